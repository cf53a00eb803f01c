"""Case e10, "why doesn't it match?": the nearest variant, the first thing that differs, expected and found."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any, Literal

import pytest
import torch
from graphs import calls, hand_written, traced
from ops_for_cases import act, add_act
from torch import Tensor, fx

import kwtrace as kt

T = kt.DTypes("T", torch.float32, torch.bfloat16)
Matrix = kt.Shape("m>1 n>1")
ATEN = torch.ops.aten


@kt.rule(name="nearest", devices=("cpu",))
def rule(
    x: Annotated[Tensor, Matrix, T],
    y: Annotated[Tensor, Matrix, T],
    *,
    keepdim: bool,
    mode: Literal["relu", "gelu"],
    alpha: float,
) -> Tensor:
    """Three operators with an axis, a string and a captured number."""
    return act(x * alpha + torch.amax(y, -1, keepdim=True) if keepdim else x * alpha + y, mode=mode)


@rule.replacement
def _(x: Tensor, y: Tensor, *, keepdim: bool, mode: str, alpha: float) -> Tensor:
    return add_act(x * alpha, torch.amax(y, -1, keepdim=True) if keepdim else y, mode=mode)


@pytest.fixture(scope="module")
def patterns() -> kt.PatternSet:
    """Return the patterns of the rule."""
    return kt.trace(rule)


def x_and_y(rows: int = 3, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    """Return two matrices."""
    return torch.randn(rows, 4).to(dtype), torch.randn(rows, 4).to(dtype)


def miss(function: Callable[..., Any], patterns: kt.PatternSet, *inputs: Tensor) -> kt.Miss:
    """Return the nearest miss of the rule in a function that it doesn't match."""
    graph = traced(function, *inputs)
    before = graph.code
    explained = kt.explain(graph, patterns).rules["nearest"]
    assert graph.code == before
    assert explained.matches == ()
    assert explained.miss is not None
    assert kt.apply(graph, patterns).count == 0
    return explained.miss


def test_e10_an_argument_that_differs_is_named_with_what_was_expected_and_found(patterns: kt.PatternSet) -> None:
    """A string outside the axis: the axis, its values, the one found, and the node."""
    found = miss(lambda x, y: act(x * 0.3 + y, mode="other"), patterns, *x_and_y())
    assert found.found == "mode: expected 'relu' or 'gelu', found 'other'"
    assert (found.matched, found.total, found.law) == (3, 3, 1)
    assert found.node == "act"
    assert dict(found.variant.axes)["keepdim"] is False


def test_e10_the_nearest_variant_is_the_one_with_most_operators_in_the_graph(patterns: kt.PatternSet) -> None:
    """With an amax in the graph, the variants with one are nearer than those without."""
    found = miss(lambda x, y: act(x * 0.3 + torch.amax(y, 0, keepdim=True), mode="gelu"), patterns, *x_and_y())
    assert dict(found.variant.axes) | {"device": "cpu"} == {
        "T": torch.float32,
        "keepdim": True,
        "mode": "gelu",
        "device": "cpu",
    }
    assert found.found == "dim: expected 1, found 0"
    assert (found.matched, found.total, found.law, found.node) == (3, 4, 1, "amax")


def test_e10_a_constant_of_another_type_is_refused_by_the_second_law(patterns: kt.PatternSet) -> None:
    """``keepdim=1`` is not ``keepdim=True``."""
    x, y = x_and_y()

    def build(graph: fx.Graph, a: fx.Node, b: fx.Node) -> fx.Node:
        scaled = graph.call_function(ATEN.mul.Tensor, (a, 0.3))
        largest = graph.call_function(ATEN.amax.default, (b, [-1], 1))
        added = graph.call_function(ATEN.add.Tensor, (scaled, largest))
        return graph.call_function(torch.ops.kwcases.act.default, (added,), {"mode": "relu"})

    found = kt.explain(hand_written(build, x, y), patterns).rules["nearest"].miss
    assert found is not None
    assert (found.found, found.law) == ("keepdim: expected True, found 1", 2)


def test_e10_an_input_is_refused_by_the_fourth_law(patterns: kt.PatternSet) -> None:
    """A dtype outside the variable, with the dtypes that would do."""
    found = miss(lambda x, y: act(x * 0.3 + y, mode="relu"), patterns, *x_and_y(dtype=torch.float64))
    assert found.found == "T: expected torch.float32 or torch.bfloat16, found torch.float64"
    assert (found.matched, found.total, found.law) == (3, 3, 4)


def test_e10_a_size_is_refused_by_the_third_law(patterns: kt.PatternSet) -> None:
    """A single row, where the rule says that there is never one."""
    found = miss(lambda x, y: act(x * 0.3 + y, mode="relu"), patterns, *x_and_y(rows=1))
    assert found.found == "dim m: expected at least 2, found 1"
    assert found.law == 3


def test_e10_another_user_is_refused_by_the_fifth_law(patterns: kt.PatternSet) -> None:
    """An inner result that the graph returns as well."""

    def function(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        added = x * 0.3 + y
        return act(added, mode="relu"), added

    found = miss(function, patterns, *x_and_y())
    assert found.found == "users of add: expected none outside the match, found output"
    assert (found.law, found.node) == (5, "add")


def test_e10_another_operator_is_refused_by_no_law(patterns: kt.PatternSet) -> None:
    """The graph subtracts where the pattern adds."""
    found = miss(lambda x, y: act(x * 0.3 - y, mode="relu"), patterns, *x_and_y())
    assert found.found == "operator: expected aten.add.Tensor, found aten.sub.Tensor"
    assert (found.matched, found.total, found.law, found.node) == (1, 3, None, "sub")


def test_e10_a_pattern_without_its_end_is_found_all_the_same(patterns: kt.PatternSet) -> None:
    """The last operator isn't in the graph: the miss tells what should use the rest."""
    found = miss(lambda x, y: torch.tanh(x * 0.3 + y), patterns, *x_and_y())
    assert found.found == "users of aten.add.Tensor: expected kwcases.act.default, found aten.tanh.default"
    assert (found.matched, found.total) == (2, 3)


def test_e10_a_rule_of_which_nothing_is_there_says_so(patterns: kt.PatternSet) -> None:
    """No operator of the rule is in the graph."""
    found = miss(lambda x, y: torch.tanh(x) / y, patterns, *x_and_y())
    assert found.found.startswith(
        "operators: expected aten.add.Tensor, aten.mul.Tensor, kwcases.act.default, found none"
    )
    assert (found.matched, found.node) == (0, None)


def test_e10_a_miss_beside_a_match_is_reported_with_it(patterns: kt.PatternSet) -> None:
    """One place matches, another doesn't: both are told."""

    def function(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        return act(x * 0.3 + y, mode="relu"), act(y * 0.3 + x, mode="other")

    explained = kt.explain(traced(function, *x_and_y()), patterns).rules["nearest"]
    assert len(explained.matches) == 1
    assert "mode='relu'" in explained.matches[0]
    assert explained.miss is not None
    assert explained.miss.found == "mode: expected 'relu' or 'gelu', found 'other'"


def test_e10_another_variant_that_matches_there_is_named(patterns: kt.PatternSet) -> None:
    """With one mode selected, the place is a miss of that mode's rule; in the whole set another variant matches."""
    graph = traced(lambda x, y: act(x * 0.3 + y, mode="relu"), *x_and_y())
    gelu = patterns.select(mode="gelu")
    assert kt.explain(graph, gelu).rules["nearest"].miss is not None
    whole = kt.explain(graph, patterns).rules["nearest"]
    assert [name for name in whole.matches if "mode='relu'" in name] == list(whole.matches)
    assert len(calls(graph, torch.ops.kwcases.act.default)) == 1


def test_e10_a_rule_that_loses_to_a_larger_one_says_to_which() -> None:
    """The eighth law: a whole match that a larger one takes."""

    @kt.rule(name="smaller", devices=("cpu",))
    def smaller(x: Annotated[Tensor, Matrix, torch.float32], *, alpha: float) -> Tensor:
        return torch.sin(x * alpha)

    @smaller.replacement
    def _(x: Tensor, *, alpha: float) -> Tensor:
        return torch.cos(x * alpha)

    @kt.rule(name="larger", devices=("cpu",))
    def larger(x: Annotated[Tensor, Matrix, torch.float32], *, alpha: float) -> Tensor:
        return torch.exp(torch.sin(x * alpha))

    @larger.replacement
    def _(x: Tensor, *, alpha: float) -> Tensor:
        return torch.tanh(x * alpha)

    patterns = kt.trace(smaller) | kt.trace(larger)
    explained = kt.explain(traced(lambda x: torch.exp(torch.sin(x * 0.3)), x_and_y()[0]), patterns)
    assert explained.rules["larger"].matches == ("larger[device='cpu']",)
    lost = explained.rules["smaller"].miss
    assert lost is not None
    assert explained.rules["smaller"].matches == ()
    assert lost.law == 8
    assert lost.others == ("larger[device='cpu']",)


def test_e10_a_variant_that_is_switched_off_says_so(patterns: kt.PatternSet, monkeypatch: pytest.MonkeyPatch) -> None:
    """``KWTRACE_DISABLE`` is a reason like any other."""
    monkeypatch.setenv("KWTRACE_DISABLE", "nearest[mode=relu]")
    found = miss(lambda x, y: act(x * 0.3 + y, mode="relu"), patterns, *x_and_y())
    assert found.found == "it is switched off by KWTRACE_DISABLE=nearest[mode=relu]"


@pytest.mark.parametrize("patterns", [42, None, "patterns_gen", object()])
def test_e10_explaining_never_raises(patterns: Any) -> None:
    """Something else than patterns is answered in words."""
    explained = kt.explain(traced(lambda x: x + 1, torch.ones(2)), patterns)
    assert explained.problem is not None
    assert "Expected a PatternSet" in str(explained)


def test_e10_a_graph_without_metadata_is_answered_in_words(patterns: kt.PatternSet) -> None:
    """A graph that was only traced symbolically, whose nodes have no values, doesn't match, and explaining it works."""

    def function(x: Tensor, y: Tensor) -> Tensor:
        result: Tensor = torch.ops.kwcases.act.default(ATEN.add.Tensor(ATEN.mul.Tensor(x, 0.3), y), mode="relu")
        return result

    explained = kt.explain(fx.symbolic_trace(function), patterns)
    assert explained.problem is None
    assert explained.rules["nearest"].miss is not None
