"""Source digests: stable in any process, and different as soon as anything changed that a module is made from."""

from __future__ import annotations

import ast
import importlib
import itertools
import sys
from pathlib import Path

import pytest
import rules_for_tests
from modules_for_tests import DOUBLE, NEGATE, import_module, run_python

import kwtrace
from kwtrace import digests
from kwtrace.digests import describe_axes, replacement_digest, source_digest, torch_version

_count = itertools.count()

RICH = """
FACTOR = 2.0
SCALES = {"none": 1.0, "twice": 2.0}
STEPS = [1, 2]
NAMES = {"none", "twice"}


class Kind(Enum):
    LOW = 1


class Settings:
    shift = 0.5


def helper(x):
    return torch.relu(x)


def deeper(x):
    return helper(x)


PAIR = (helper, 3)


def is_wanted(mode):
    return mode in NAMES


def annotated(x, by=1.5):
    if by > 2:
        x = x + 1
        x = x + 2
    return x * by


def closing(number):
    def inner(x):
        return x + number

    return inner


added = closing(4)


@kt.rule(devices=("cpu",), where=is_wanted)
def rich(x: Vector, *, mode: Annotated[str, kt.OneOf("none", "twice")]) -> Tensor:
    y = deeper(x) * FACTOR * SCALES["none"] * STEPS[0] * Kind.LOW.value * Settings.shift + PAIR[1]
    return ops.act(added(annotated(y)), mode=mode or "a b")


@rich.replacement
def _(x, *, mode):
    return ops.relu_act(x, mode=mode)
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a folder on ``sys.path`` for modules, whose imports leave no compiled files."""
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    return tmp_path


def digest_of(folder: Path, name: str, text: str) -> str:
    """Write a module, import it, and return the digest of its rule."""
    module = import_module(folder, name, text)
    return source_digest(module.rich)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("FACTOR = 2.0", "FACTOR = 3.0"),
        ('"none": 1.0', '"none": 1.5'),
        ("STEPS = [1, 2]", "STEPS = [2, 2]"),
        ('NAMES = {"none", "twice"}', 'NAMES = {"none"}'),
        ("LOW = 1", "LOW = 2"),
        ("shift = 0.5", "shift = 0.25"),
        ("return torch.relu(x)", "return torch.relu(x) + 1"),
        ("PAIR = (helper, 3)", "PAIR = (helper, 4)"),
        ("return mode in NAMES", "return mode not in NAMES"),
        ("by=1.5", "by=2.5"),
        ("closing(4)", "closing(5)"),
        ("        x = x + 2", "    x = x + 2"),
        ('mode or "a b"', 'mode or "ab"'),
        ("x + number", "x - number"),
        ('OneOf("none", "twice")', 'OneOf("none", "never")'),
        ('OneOf("none", "twice")', 'OneOf("twice", "none")'),
        ("return ops.relu_act(x, mode=mode)", "return ops.relu_act(x, mode=mode, negate=True)"),
        ("where=is_wanted)", "where=is_wanted, priority=1)"),
        ("where=is_wanted)", 'where=is_wanted, unused=("mode",))'),
        ("where=is_wanted)", "where=None)"),
        ("where=is_wanted)", "where=is_wanted, commutative=True)"),
        ('devices=("cpu",)', 'devices=("cpu", "cuda")'),
        ('@kt.rule(devices=("cpu",)', '@kt.rule(name="other", devices=("cpu",)'),
        ("@rich.replacement", '@rich.replacement(at="match")'),
        ("x: Vector, *, mode", 'x: Annotated[Tensor, kt.Shape("k>1"), torch.float32], *, mode'),
        ("x: Vector, *, mode", 'x: Annotated[Tensor, kt.Shape("n>1"), torch.float64], *, mode'),
    ],
)
def test_whatever_a_rule_depends_on_is_in_its_digest(folder: Path, old: str, new: str) -> None:
    """Values, helpers, closures, defaults, options, domains: a change of any of them changes the digest."""
    assert old in RICH
    name = f"digested_{next(_count)}"
    assert digest_of(folder, name, RICH) != digest_of(folder, name, RICH.replace(old, new))


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("def deeper(x):", "\n\n# a remark\ndef deeper(x):"),
        ("STEPS =", "OTHER = 5\nSTEPS ="),
    ],
)
def test_remarks_and_layout_are_not(folder: Path, old: str, new: str) -> None:
    """What doesn't run doesn't make a package stale, nor does what the rule doesn't reach."""
    assert old in RICH
    name = f"digested_{next(_count)}"
    assert digest_of(folder, name, RICH) == digest_of(folder, name, RICH.replace(old, new))


def test_the_digest_is_the_same_in_any_process(folder: Path) -> None:
    """Hash seeds, addresses and paths have no part in a digest."""
    module = import_module(folder, "digested_anywhere", RICH, DOUBLE)
    code = (
        "import digested_anywhere as m; from kwtrace.digests import source_digest as s, replacement_digest as r; "
        "print(s(m.rich), s(m.double), r(m.double, 'cpu'))"
    )
    own = f"{source_digest(module.rich)} {source_digest(module.double)} {replacement_digest(module.double, 'cpu')}"
    assert run_python("-c", code, folder=folder, PYTHONHASHSEED="2").stdout.strip() == own


def test_rules_differ(folder: Path) -> None:
    """Two rules have two digests."""
    module = import_module(folder, "digested_two", DOUBLE, NEGATE)
    assert source_digest(module.double) != source_digest(module.negate)


def test_the_digest_covers_torch_and_the_tracer(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another torch version, or a change in kwtrace's own tracer, makes everything stale."""
    before = source_digest(rules_for_tests.relu_act)
    with monkeypatch.context() as patch:
        patch.setattr(digests, "torch_version", lambda: "9.99")
        assert source_digest(rules_for_tests.relu_act) != before
    with monkeypatch.context() as patch:
        patch.setattr(digests, "_tracer_digest", lambda: "other")
        assert source_digest(rules_for_tests.relu_act) != before
    assert source_digest(rules_for_tests.relu_act) == before


def test_the_tracer_is_all_that_generating_runs() -> None:
    """Every module of kwtrace that generating a rule imports is part of the tracer's digest, errors aside."""
    folder = Path(kwtrace.__file__).parent
    seen: set[str] = set()
    pending = ["generation", "source"]
    while pending:
        name = pending.pop()
        if name in seen:
            continue
        seen.add(name)
        tree = ast.parse((folder / f"{name}.py").read_text(encoding="utf-8"))
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] == "kwtrace":
                parts = node.module.split(".")[1:]
                pending += parts or [alias.name for alias in node.names if (folder / f"{alias.name}.py").exists()]
    assert seen - {"errors"} <= set(digests._TRACER)


def test_a_replacement_has_a_digest_of_its_own(folder: Path) -> None:
    """The code of a replacement, which may run in the user's compile, has a digest that changes with it alone."""
    first = import_module(folder, "digested_replacement", DOUBLE).double
    kept = (replacement_digest(first, "cpu"), source_digest(first))
    second = import_module(folder, "digested_replacement", DOUBLE.replace("torch.relu(x)", "torch.relu(x) + 1")).double
    assert replacement_digest(second, "cpu") == kept[0]
    assert source_digest(second) != kept[1]
    third = import_module(
        folder, "digested_replacement", DOUBLE.replace("relu_act(x,", "relu_act(x, negate=True,")
    ).double
    assert replacement_digest(third, "cpu") != kept[0]


def test_axes_are_described_as_text() -> None:
    """A manifest shows axes by name with their values as text, the device among them."""
    assert describe_axes(rules_for_tests.relu_act) == {
        "negate": ["False", "True"],
        "mode": ["'none'", "'twice'"],
        "device": ["'cpu'"],
    }


def test_an_enum_with_values_that_print_an_address_is_described_alike_everywhere(folder: Path) -> None:
    """The members of an Enum are known by name, whatever their values are."""
    text = """
class Odd(Enum):
    FIRST = object()


@kt.rule(devices=("cpu",))
def odd(x: Vector, *, kind: Odd) -> Tensor:
    return torch.relu(x) + 1
"""
    module = import_module(folder, "digested_odd", text)
    code = "import digested_odd as m; from kwtrace.digests import *; print(source_digest(m.odd), describe_axes(m.odd))"
    own = f"{source_digest(module.odd)} {describe_axes(module.odd)}"
    assert run_python("-c", code, folder=folder).stdout.strip() == own


CALLING = """
from collections.abc import Callable

FACTOR = 2.0


def helper(x):
    return torch.relu(x)


def first(x):
    return helper(x) * FACTOR


def second(x):
    return torch.sigmoid(x)


FORMS = kt.OneOf(first, second, ops.scaled, torch.ops.aten.relu.default)


def is_wanted(form):
    return form in FORMS.values


@kt.rule(devices=("cpu",), where=is_wanted)
def calling(x: Vector, *, form: Annotated[Callable[..., Tensor], FORMS]) -> Tensor:
    return ops.act(form(x))


@calling.replacement(at="match")
def _(x, *, form):
    return form(x)
"""


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("return torch.sigmoid(x)", "return torch.tanh(x)"),
        ("return torch.relu(x)", "return torch.exp(x)"),
        ("FACTOR = 2.0", "FACTOR = 3.0"),
        ("OneOf(first, second,", "OneOf(second, first,"),
        ("aten.relu.default", "aten.sigmoid.default"),
    ],
)
def test_the_callables_of_an_axis_are_in_the_digest(folder: Path, old: str, new: str) -> None:
    """The code of a function that is an axis value, what it reaches, and the names: a change of any is seen."""
    assert old in CALLING
    name = f"digested_{next(_count)}"
    before = source_digest(import_module(folder, name, CALLING).calling)
    assert source_digest(import_module(folder, name, CALLING.replace(old, new)).calling) != before


def test_the_callables_of_an_axis_are_in_the_digest_of_a_replacement(folder: Path) -> None:
    """A replacement that is traced at the match may call them, so their code counts as its own does."""
    first = import_module(folder, "digested_given", CALLING).calling
    before = replacement_digest(first, "cpu")
    assert replacement_digest(import_module(folder, "digested_given", CALLING).calling, "cpu") == before
    changed = CALLING.replace("return torch.sigmoid(x)", "return torch.tanh(x)")
    assert replacement_digest(import_module(folder, "digested_given", changed).calling, "cpu") != before


def test_callables_are_described_alike_everywhere(folder: Path) -> None:
    """Callables have no address in a digest, nor in the axes of a manifest."""
    module = import_module(folder, "digested_callables", CALLING)
    code = (
        "import digested_callables as m; from kwtrace.digests import *; "
        "print(source_digest(m.calling), describe_axes(m.calling))"
    )
    own = f"{source_digest(module.calling)} {describe_axes(module.calling)}"
    assert run_python("-c", code, folder=folder).stdout.strip() == own
    assert "0x" not in own
    assert "'digested_callables:first'" in own


def test_the_torch_version_has_two_numbers() -> None:
    """A set belongs to a minor version of torch."""
    torch = importlib.import_module("torch")
    assert torch.__version__.startswith(f"{torch_version()}.")
    assert torch_version().count(".") == 1
