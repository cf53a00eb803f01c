"""What a pattern matches and what it doesn't: every argument, constant, size, input and user counts."""

from __future__ import annotations

from typing import Any

import torch
from graphs import fill_values, hand_written, only, run_checked, targets, traced
from torch import Tensor, fx
from toys import patterns, scaled_add_rule, scaled_rule

import kwtrace as kt

aten = torch.ops.aten
SCALED = "kwtoys.scaled_exp.default"


def count(module: fx.GraphModule, *rules: kt.Rule) -> int:
    """Rewrite ``module`` with some rules; return how often they fired."""
    return kt.apply(module, patterns(*rules)).count


def scaled_graph(factor: Any, x: Tensor | None = None) -> fx.GraphModule:
    """Write ``exp(x) * factor`` by hand; ``factor`` stands in the graph exactly as it is."""
    x = torch.randn(3, 4) if x is None else x
    return hand_written(
        lambda g, p: g.call_function(aten.mul.Tensor, (g.call_function(aten.exp.default, (p,)), factor)), x
    )


def refused(module: fx.GraphModule, *inputs: Tensor, rule: kt.Rule = scaled_rule) -> None:
    """Check that nothing fires and that the graph yields what it yielded before."""
    before = targets(module)
    expected = module(*inputs)
    assert count(module, rule) == 0
    assert targets(module) == before
    found = run_checked(module, *inputs)
    assert torch.equal(found, expected)


def test_an_int_where_a_float_is_captured_becomes_that_float() -> None:
    """``x * 2`` of a float tensor is ``x * 2.0``: the replacement gets a float, as its schema says."""
    module = scaled_graph(2)
    x = torch.randn(3, 4)
    assert count(module, scaled_rule) == 1
    found = only(module, SCALED).args[1]
    assert type(found) is float
    assert found == 2.0
    assert torch.equal(run_checked(module, x), torch.exp(x) * 2)


def test_a_complex_number_is_no_float() -> None:
    """``x * 1j`` yields another dtype, and isn't captured as a float."""
    module = scaled_graph(2j)
    assert count(module, scaled_rule) == 0


def test_one_input_used_where_the_rule_has_two_is_a_match() -> None:
    """``exp(x) * a + x``: both parameters are bound to one tensor, which is allowed."""
    x = torch.randn(3, 4)
    module = traced(lambda x: torch.exp(x) * 0.5 + x, x)
    assert count(module, scaled_add_rule) == 1
    assert torch.equal(run_checked(module, x), torch.exp(x) * 0.5 + x)


def test_the_order_of_operands_counts() -> None:
    """``y + exp(x) * a`` is another graph than the rule's: nothing is commuted behind the rule's back."""
    x, y = torch.randn(3, 4), torch.randn(3, 4)
    module = traced(lambda x, y: y + torch.exp(x) * 0.5, x, y)
    assert count(module, scaled_add_rule) == 0


def test_an_input_or_output_without_metadata_is_a_refusal() -> None:
    """Where a careless pass left no value behind, nothing is proved: nothing matches, and nothing raises."""
    x = torch.randn(3, 4)
    for place in ("placeholder", "aten.mul.Tensor"):
        module = traced(lambda x: torch.exp(x) * 0.5, x)
        for node in module.graph.nodes:
            if place in (node.op, str(node.target)):
                node.meta.clear()
        assert count(module, scaled_rule) == 0


def test_equal_places_in_one_graph_each_match() -> None:
    """Ten layers match ten times, those that use each other's results too."""

    def function(x: Tensor) -> Tensor:
        for factor in range(10):
            x = torch.exp(x) * (0.01 * (factor + 1))
        return x

    x = torch.randn(3, 4)
    module = traced(function, x)
    assert count(module, scaled_rule) == 10
    assert targets(module) == [SCALED] * 10
    assert torch.equal(run_checked(module, x), function(x))


def test_symbolic_numbers_are_captured_as_nodes() -> None:
    """A size in place of a captured float stays symbolic: the replacement gets the node, or nothing fires."""
    x = torch.randn(3, 4)
    module = traced(lambda x: torch.exp(x) * x.shape[0], x, mode="symbolic")
    kt.apply(module, patterns(scaled_rule))
    other = torch.randn(3, 4)
    assert torch.equal(run_checked(module, other), torch.exp(other) * 3)


def test_values_filled_in_by_hand_are_those_of_a_trace() -> None:
    """The helper of these tests writes the metadata that tracing writes."""
    x = torch.randn(3, 4)
    module = traced(lambda x: torch.exp(x) * 0.5, x)
    found = [(n.meta["val"].shape, n.meta["val"].dtype) for n in module.graph.nodes if n.op != "output"]
    fill_values(module, x)
    assert [(n.meta["val"].shape, n.meta["val"].dtype) for n in module.graph.nodes if n.op != "output"] == found
