"""`kwtrace.generate` and `kwtrace.trace`: what they return, raise and keep."""

from __future__ import annotations

import ast
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import pytest
import rules_for_tests
import torch
from modules_for_tests import DOUBLE, FAILING, import_module, run_python, snapshot
from rules_for_tests import Vector, relu_act, relu_enum, relu_scale
from torch import Tensor

import kwtrace as kt
from kwtrace.digests import torch_version
from kwtrace.generating import check, generate, trace
from kwtrace.loading import read_folder

VERSION = f"torch_{torch_version().replace('.', '_')}"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a folder on ``sys.path`` for modules, whose imports leave no compiled files."""
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    return tmp_path


def test_a_report_says_what_was_done(folder: Path) -> None:
    """A report has a record per rule in the order given, and says whether all is well and whether anything changed."""
    report = generate([relu_scale, relu_act], folder / "out", jobs=1)
    assert (report.ok, report.changed, report.out, report.torch) == (True, True, folder / "out", torch_version())
    assert [(r.rule, r.status, r.variants, r.rows, r.families, r.merged, r.failed) for r in report.rules] == [
        ("relu_scale", "traced", 1, 1, 1, 0, ()),
        ("relu_act", "traced", 4, 4, 1, 0, ()),
    ]
    again = generate([relu_scale, relu_act], str(folder / "out"), jobs=1)
    assert (again.ok, again.changed) == (True, False)
    assert {r.status for r in again.rules} == {"unchanged"}
    assert "nothing changed" in str(again)


def test_what_is_generated_is_what_is_traced(folder: Path) -> None:
    """The package holds, exactly, the pattern set that tracing in memory gives."""
    generate([relu_act, relu_enum, relu_scale], folder / "out", jobs=1)
    loaded = read_folder(folder / "out" / VERSION)
    traced = trace(relu_scale, relu_act, relu_enum)
    assert loaded.digest == traced.digest
    assert set(loaded.families) == set(traced.families)


def test_the_order_of_rules_does_not_change_the_package(folder: Path) -> None:
    """Rules in another order give the same bytes."""
    generate([relu_act, relu_scale], folder / "a", jobs=1)
    generate([relu_scale, relu_act], folder / "b", jobs=1)
    assert snapshot(folder / "a") == snapshot(folder / "b")


def test_the_text_of_a_package_is_python_of_any_supported_version(folder: Path) -> None:
    """Generated modules use no syntax newer than Python 3.10."""
    generate([relu_enum], folder / "out", jobs=1)
    for path in (folder / "out").rglob("*.py"):
        ast.parse(path.read_text(encoding="utf-8"), feature_version=(3, 10))


def test_an_executor_of_ones_own_may_trace(folder: Path) -> None:
    """``executor=`` takes any concurrent.futures.Executor and gives the same bytes."""
    with ThreadPoolExecutor(1) as executor:
        assert generate([relu_act], folder / "a", executor=executor).ok
    generate([relu_act], folder / "b", jobs=1)
    assert snapshot(folder / "a") == snapshot(folder / "b")


def test_rules_in_functions_are_traced_here(folder: Path) -> None:
    """A rule that no worker could import is traced in this process, whatever ``jobs`` says."""

    def local(x: Vector) -> Tensor:
        return torch.relu(x) + 1

    rule = kt.rule(devices=("cpu",))(local)
    rule.replacement(lambda x: torch.ops.kwtrace_toys.act.default(x, mode="twice"))
    assert generate([rule], folder / "out", jobs=4).ok


def test_two_rules_of_one_name_are_an_error(folder: Path) -> None:
    """Rules are known by name, so that two of one name are refused before anything is written."""
    first, second = (import_module(folder, f"named_{i}", DOUBLE).double for i in (1, 2))
    for call in (lambda: generate([first, second], folder / "out", jobs=1), lambda: trace(first, second)):
        with pytest.raises(kt.RuleError, match=r"Expected distinct rule names, found double in named_1 and .*named_2"):
            call()
    assert not (folder / "out").exists()
    assert generate([first, first], folder / "out", jobs=1).ok


def test_trace_raises_what_generate_reports(folder: Path) -> None:
    """``trace`` is for trying a rule out: a variant that fails is an error with its reason."""
    rule = import_module(folder, "traced_failing", FAILING).failing
    with pytest.raises(kt.KwtraceError, match=r"failing\[mode='twice', device='cpu'\].*no twice today"):
        trace(rule)
    report = generate([rule], folder / "out", jobs=1)
    assert not report.ok
    assert report.rules[0].failed[0][0] == "failing[mode='twice', device='cpu']"


def test_trace_of_nothing_is_empty() -> None:
    """No rules, no patterns."""
    assert trace() == kt.PatternSet()


def test_a_rule_that_becomes_wrong_keeps_what_was_generated_for_it(folder: Path) -> None:
    """A declaration that is wrong now fails, and the rule's old patterns stay until it's mended."""
    module = import_module(folder, "becomes_wrong", DOUBLE)
    generate([module.double], folder / "out", jobs=1)
    before = snapshot(folder / "out")
    module = import_module(folder, "becomes_wrong", DOUBLE.replace('Annotated[str, kt.OneOf("none", "twice")]', "str"))
    report = generate([module.double], folder / "out", jobs=1)
    assert [r.status for r in report.rules] == ["failed"]
    assert "expected a domain, found plain str" in report.rules[0].failed[0][1]
    assert snapshot(folder / "out") == before


def test_others_are_dropped_or_kept(folder: Path) -> None:
    """Rules that aren't given leave the package, unless ``keep_others`` says otherwise."""
    generate([relu_act, relu_scale], folder / "out", jobs=1)
    generate([relu_scale], folder / "out", jobs=1, keep_others=True)
    assert (folder / "out" / VERSION / "relu_act.py").exists()
    generate([relu_scale], folder / "out", jobs=1)
    assert not (folder / "out" / VERSION / "relu_act.py").exists()


def test_check_returns_differences(folder: Path) -> None:
    """``check`` returns what differs, by rule, in words, and nothing for a package that is up to date."""
    generate([relu_act, relu_scale], folder / "out", jobs=1)
    assert check([relu_act, relu_scale], folder / "out") == []
    (missing,) = check([relu_act, relu_scale, relu_enum], folder / "out")
    assert (missing.rule, str(missing)) == ("relu_enum", f"relu_enum: {missing.text}")
    assert "found it missing" in missing.text
    (gone,) = check([relu_act], folder / "out")
    assert (gone.rule, gone.text) == ("relu_scale", "is in the package, but is no rule any more")


def test_a_changed_schema_makes_a_rule_stale(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A rule whose operator has another schema now is stale, though its own source is the same."""
    generate([relu_act, relu_scale], folder / "out", jobs=1)
    schemas: dict[str, str] = {
        "kwtrace_toys.scaled.default": "kwtrace_toys::scaled(Tensor x, *, float scale, int extra=0) -> Tensor"
    }
    current = sys.modules["kwtrace.generating"].schema_of
    monkeypatch.setattr("kwtrace.generating.schema_of", lambda name: schemas.get(name) or current(name))
    (difference,) = check([relu_act, relu_scale], folder / "out")
    assert difference.rule == "relu_scale"
    assert "operator kwtrace_toys.scaled.default: " in difference.text
    assert "int extra=0" in difference.text


def test_a_bar_counts_the_variants_that_are_traced(folder: Path) -> None:
    """A progress bar counts the variants of stale rules, and isn't made when nothing is stale."""
    totals: list[int] = []
    ticks: list[int] = []

    @contextmanager
    def bar(total: int) -> Iterator[Callable[[int], object]]:
        totals.append(total)
        yield ticks.append

    generate([relu_act, relu_scale], folder / "out", jobs=1, bar=bar)
    generate([relu_act, relu_scale], folder / "out", jobs=1, bar=bar)
    assert (totals, sum(ticks)) == ([5], 5)


@pytest.mark.slow
def test_an_unguarded_script_gets_a_sentence_or_a_package(folder: Path) -> None:
    """A script that calls ``generate`` at its top level, which workers run again, gets no traceback of a pool."""
    script = folder / "script.py"
    script.write_text(
        "import sys, kwtrace as kt, rules_for_tests as r\n"
        "try:\n"
        "    print(kt.generate([r.relu_scale, r.relu_act], sys.argv[1], jobs=2).ok)\n"
        "except kt.KwtraceError as error:\n"
        "    print('True', error)\n",
        encoding="utf-8",
    )
    done = run_python(str(script), str(folder / "out"))
    assert done.stdout.splitlines()[-1].startswith("True"), done.stderr


def test_rules_are_generated_from_the_public_names() -> None:
    """`kwtrace.generate` and `kwtrace.trace` are these functions, imported when asked for."""
    assert kt.generate is generate
    assert kt.trace is trace
    assert rules_for_tests.relu_scale.name in trace(relu_scale).rules
