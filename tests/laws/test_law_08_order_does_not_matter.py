"""Law 8: the larger pattern wins, then priority, then the name; never the order of registration."""

from __future__ import annotations

import itertools

import pytest
import torch
from both_sides import assert_same
from graphs import run_checked, targets, traced
from torch import Tensor
from toys import patterns, rival, scaled_add_rule, scaled_rule, topk_rule

import kwtrace as kt


def larger(x: Tensor, y: Tensor) -> Tensor:
    """Return what the larger rule searches for."""
    return torch.exp(x) * 0.5 + y


@pytest.mark.parametrize("order", list(itertools.permutations(range(3))), ids=str)
def test_the_larger_pattern_wins_whatever_the_order(order: tuple[int, ...]) -> None:
    """Where one rule's graph contains another's whole, the larger fires; the smaller where it stands alone."""
    sets = [patterns(scaled_rule), patterns(scaled_add_rule), patterns(topk_rule)]
    chosen = [sets[place] for place in order]
    x, y = torch.randn(3, 4), torch.randn(3, 4)
    graph = traced(lambda x, y: (larger(x, y), torch.exp(y) * 0.25), x, y)
    report = kt.apply(graph, chosen[0] | chosen[1] | chosen[2])
    assert {rule: sum(counts.values()) for rule, counts in report.fired.items()} == {"scaled": 1, "scaled_add": 1}
    assert sorted(targets(graph)) == ["kwtoys.scaled_exp.default", "kwtoys.scaled_exp_add.default"]
    found = run_checked(graph, x, y)
    assert torch.equal(found[0], larger(x, y))


@pytest.mark.parametrize("swap", [False, True])
def test_of_equal_size_the_higher_priority_wins(swap: bool) -> None:
    """Two rules that search for one graph: priority decides, not the order or the name."""
    sets = [kt.trace(rival("a", "low", priority=0)), kt.trace(rival("b", "high", priority=1))]
    graph = traced(lambda x: x.tanh().sin(), torch.randn(3, 4))
    kt.apply(graph, sets[swap] | sets[not swap])
    assert targets(graph) == ["kwtoys.high.default"]


@pytest.mark.parametrize("swap", [False, True])
def test_of_equal_priority_the_name_decides(swap: bool) -> None:
    """Two rules alike in size and priority: the first name wins, whatever the order."""
    sets = [kt.trace(rival("a", "low")), kt.trace(rival("b", "high"))]
    graph = traced(lambda x: x.tanh().sin(), torch.randn(3, 4))
    kt.apply(graph, sets[swap] | sets[not swap])
    assert targets(graph) == ["kwtoys.low.default"]


def test_size_comes_before_priority() -> None:
    """A larger pattern wins over a smaller one of any priority."""
    small = kt.rule(name="small", devices=("cpu",), priority=9)(scaled_rule.function)
    small.replacement(lambda x, *, alpha: torch.ops.kwtoys.scaled_exp(x, alpha))
    graph = traced(larger, torch.randn(3, 4), torch.randn(3, 4))
    kt.apply(graph, kt.trace(small) | patterns(scaled_add_rule))
    assert targets(graph) == ["kwtoys.scaled_exp_add.default"]


RIVALS = {
    "by priority": ([("a", 0), ("b", 2), ("c", 1)], "b"),
    "by name among equals": ([("c", 1), ("b", 1), ("a", 0)], "b"),
    "by name": ([("c", 0), ("a", 0), ("b", 0)], "a"),
    "negative priority": ([("a", -1), ("b", 0), ("c", -2)], "b"),
}


@pytest.mark.parametrize("order", list(itertools.permutations(range(3))), ids=str)
@pytest.mark.parametrize(("declared", "winner"), RIVALS.values(), ids=RIVALS.keys())
def test_rivals_in_every_order(declared: list[tuple[str, int]], winner: str, order: tuple[int, ...]) -> None:
    """Three rules that search for one graph: the same one wins in every order in which they are joined."""
    rules = [RULES[name, priority] for name, priority in declared]
    whole = kt.PatternSet()
    for place in order:
        whole = whole | patterns(rules[place])
    x = torch.randn(3, 4)
    module = traced(lambda x: x.tanh().sin(), x)
    report = kt.apply(module, whole)
    assert list(report.fired) == [winner]
    assert targets(module) == ["kwtoys.high.default" if winner == "b" else "kwtoys.low.default"]
    assert_same(run_checked(module, x), x.tanh().sin())


@pytest.mark.parametrize("order", list(itertools.permutations(range(2))), ids=str)
def test_size_then_priority_then_name(order: tuple[int, ...]) -> None:
    """The digest of a set and what it does are the same in either order of its rules, and with a rule named twice."""
    rules = [scaled_rule, scaled_add_rule]
    first, second = (rules[place] for place in order)
    whole = patterns(first) | patterns(second) | patterns(first)
    assert whole.digest == (patterns(scaled_rule) | patterns(scaled_add_rule)).digest
    x, y = torch.randn(3, 4), torch.randn(3, 4)
    module = traced(larger, x, y)
    kt.apply(module, whole)
    assert targets(module) == ["kwtoys.scaled_exp_add.default"]
    assert_same(run_checked(module, x, y), larger(x, y))


RULES: dict[tuple[str, int], kt.Rule] = {
    (name, priority): rival(name, "high" if name == "b" else "low", priority)
    for name, priority in {pair for declared, _ in RIVALS.values() for pair in declared}
}
