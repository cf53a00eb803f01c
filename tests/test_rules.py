"""Declaring rules: what `kwtrace.rule` and its markers accept, keep and refuse."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any

import ops_for_tests as ops
import pytest
import torch
from rules_for_tests import Vector, relu_scale
from torch import Tensor

import kwtrace as kt


def search(x: Vector) -> Tensor:
    """Be a search function."""
    return torch.relu(x) + 1


def other(x: Tensor) -> Tensor:
    """Be a replacement."""
    return ops.joined(x)


def test_a_bare_decorator_takes_the_name_of_the_function() -> None:
    """``@kt.rule`` without arguments makes a rule called like the function, with the defaults that are documented."""
    rule = kt.rule(search)
    assert (rule.name, rule.module) == ("search", __name__)
    assert (rule.stage, rule.modes, rule.devices) == ("joint", ("inference",), ("cpu", "cuda"))
    assert (rule.where, rule.priority, rule.unused, rule.commutative) == (None, 0, (), False)


def test_options_are_kept() -> None:
    """What is given to ``kt.rule`` stands on the rule."""

    def where(**axes: Any) -> bool:
        return True

    rule = kt.rule(name="mine", devices=["cpu"], where=where, priority=3, unused=["x"], commutative=True)(search)
    assert (rule.name, rule.devices, rule.where, rule.priority, rule.unused) == ("mine", ("cpu",), where, 3, ("x",))
    assert rule.commutative


def test_calling_a_rule_runs_the_search_function() -> None:
    """A rule is callable: it is the reference that the fused form must equal."""
    x = torch.tensor([-1.0, 2.0])
    assert torch.equal(relu_scale(x, scale=3.0), torch.tensor([0.0, 6.0]))


@pytest.mark.parametrize(
    ("options", "found"),
    [
        ({"name": "not a name"}, "'not a name'"),
        ({"name": ""}, "''"),
        ({"name": "__init__"}, "'__init__'"),
        ({"name": "class"}, "'class'"),
        ({"stage": "somewhere"}, "stage='somewhere'"),
        ({"modes": ("dreaming",)}, "modes=('dreaming',)"),
        ({"modes": ()}, "modes=()"),
        ({"devices": ()}, "devices=()"),
        ({"devices": "cpu"}, "devices='cpu'"),
        ({"devices": ("cpu", "cpu")}, "devices=('cpu', 'cpu')"),
    ],
)
def test_wrong_options_are_refused(options: dict[str, Any], found: str) -> None:
    """A wrong option is a RuleError that quotes what was found, and names the rule unless the name is what is wrong."""
    with pytest.raises(kt.RuleError) as caught:
        kt.rule(**options)(search)
    assert f"found {found}" in str(caught.value)
    assert "name" in options or str(caught.value).startswith("Rule search: expected ")


def test_what_is_no_function_is_refused() -> None:
    """A class or a callable object has no source to follow: it is refused, and shown."""
    with pytest.raises(kt.RuleError, match="Expected a function to search for, found <class 'int'>"):
        kt.rule(int)  # type: ignore[call-overload]


def test_a_replacement_serves_every_device_by_default() -> None:
    """A bare ``@rule.replacement`` is traced when generating, for each device, and returns the function."""
    rule = kt.rule(search)
    assert rule.replacement(other) is other
    assert {d: (r.function, r.at) for d, r in rule.replacements.items()} == {
        "cpu": (other, "generate"),
        "cuda": (other, "generate"),
    }


def test_a_replacement_per_device() -> None:
    """Each device may have a replacement of its own, traced when it says."""

    def at_match(x: Tensor) -> Tensor:
        return other(x)

    rule = kt.rule(search)
    rule.replacement(devices=("cpu",))(other)
    rule.replacement(at="match", devices=("cuda",))(at_match)
    assert (rule.replacements["cpu"].function, rule.replacements["cpu"].at) == (other, "generate")
    assert (rule.replacements["cuda"].function, rule.replacements["cuda"].at) == (at_match, "match")


@pytest.mark.parametrize(
    ("declare", "said"),
    [
        (
            lambda rule: rule.replacement(other),
            "Rule search: expected one replacement for device 'cpu', found a second",
        ),
        (lambda rule: rule.replacement(devices=("tpu",))(other), "found device 'tpu'"),
        (lambda rule: rule.replacement(at="noon")(other), "Rule search: .*at='match'.* found at='noon'"),
    ],
)
def test_wrong_replacements_are_refused(declare: Callable[[kt.Rule], object], said: str) -> None:
    """A second replacement for a device, one for a device that isn't the rule's, or another ``at`` is a RuleError."""
    rule = kt.rule(devices=("cpu",))(search)
    rule.replacement(other)
    with pytest.raises(kt.RuleError, match=said):
        declare(rule)


@pytest.mark.parametrize(
    ("marker", "text"),
    [
        (kt.Shape("m  k", " k "), "Shape('m k', 'k')"),
        (kt.Shape(""), "Shape('')"),
        (kt.DTypes("T", torch.float32), "DTypes('T', torch.float32)"),
        (kt.OneOf(None, "a", 1.0), "OneOf(None, 'a', 1.0)"),
        (kt.Captured(0.5, special=[1.0]), "Captured(0.5, special=(1.0,))"),
    ],
)
def test_markers_print_as_they_are_written(marker: object, text: str) -> None:
    """A marker's repr is the call that makes it, which is what errors and digests show."""
    assert repr(marker) == text


def test_rules_of_one_function_are_two_rules() -> None:
    """Rules are compared by identity: two declarations of one function don't share replacements."""
    first, second = kt.rule(search), kt.rule(search)
    first.replacement(other)
    assert first != second
    assert second.replacements == {}


Unread = Annotated[Tensor, kt.Shape("bad shape!"), torch.float32]


def test_declaring_reads_no_annotation() -> None:
    """Annotations are read when generating, so that importing a module of rules stays cheap."""

    def late(x: Unread) -> Tensor:
        return x

    assert kt.rule(late).name == "late"
