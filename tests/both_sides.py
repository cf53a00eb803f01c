"""Both sides of a law: what must match is fused and yields what it yielded, what must not stays exactly as it was."""

from __future__ import annotations

from typing import Any

import torch
from graphs import calls, run_checked, targets
from torch import Tensor, fx
from toys import patterns

import kwtrace as kt
from kwtrace.patterns import Graph


def count(module: fx.GraphModule, *rules: kt.Rule) -> int:
    """Rewrite ``module`` with some rules; return how often they fired."""
    return kt.apply(module, patterns(*rules)).count


def fused_calls(module: fx.GraphModule, *rules: kt.Rule) -> int:
    """Return how many calls a graph has of the operators that rules put in place."""
    graphs = [family.skeleton.replacement for family in patterns(*rules).families]
    names = {call.target for graph in graphs if isinstance(graph, Graph) for call in graph.calls}
    return sum(len(calls(module, name)) for name in names if name.startswith("kw"))


def fires(module: fx.GraphModule, *inputs: Tensor, rule: kt.Rule, times: int = 1) -> None:
    """Check that a rule fires, that the graph holds its operator, and that it yields what it yielded before."""
    expected = module(*copies(inputs))
    assert fused_calls(module, rule) == 0
    assert count(module, rule) == times
    assert fused_calls(module, rule) == times
    module.graph.lint()
    assert_same(run_checked(module, *copies(inputs)), expected)


def refused(module: fx.GraphModule, *inputs: Tensor, rule: kt.Rule) -> None:
    """Check that nothing fires, that the graph is what it was, and that it yields the same bits."""
    before, code = targets(module), str(module.graph)
    expected = module(*copies(inputs))
    assert count(module, rule) == 0
    assert targets(module) == before
    assert str(module.graph) == code
    module.graph.lint()
    module.recompile()
    assert_same(module(*copies(inputs)), expected)


def copies(inputs: tuple[Tensor, ...]) -> list[Tensor]:
    """Return copies that a graph may write to."""
    return [x.clone() for x in inputs]


def assert_same(found: Any, expected: Any) -> None:
    """Check that two results, tensors or several, are the same bit for bit, NaN included."""
    torch.testing.assert_close(found, expected, rtol=0, atol=0, equal_nan=True)
