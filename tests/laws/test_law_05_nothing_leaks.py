"""Law 5: nothing leaks out of a match, and no match crosses a mutation or a stream boundary."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch._dynamo.variables.streams  # it registers torch.ops.streams
from both_sides import assert_same, copies, count, fires, fused_calls, refused
from graphs import calls, hand_written, run_checked, targets, traced
from torch import Tensor, fx
from toys import bounds_rule, linked_rule, patterns, scaled_add_rule, scaled_rule

import kwtrace as kt

aten = torch.ops.aten


@pytest.mark.parametrize("other", ["output", "function", "view"])
def test_an_inner_node_with_another_user_is_a_refusal(other: str) -> None:
    """What else uses the inner node, be it the graph's output, needs it to stay: nothing leaks out of a match."""

    def function(x: Tensor) -> tuple[Tensor, Tensor]:
        inner = torch.exp(x)
        return inner * 0.5, {"output": inner, "function": inner.sin(), "view": inner.view(-1)}[other]

    x = torch.randn(3, 4)
    module = traced(function, x)
    assert count(module, scaled_rule) == 0
    assert all(torch.equal(a, b) for a, b in zip(run_checked(module, x), function(x), strict=True))


def test_an_identity_inside_with_another_user_is_a_refusal() -> None:
    """An alias between two nodes of the match that something else uses is a leak as well."""

    def build(g: fx.Graph, p: fx.Node) -> tuple[fx.Node, ...]:
        alias = g.call_function(aten.alias.default, (g.call_function(aten.exp.default, (p,)),))
        return g.call_function(aten.mul.Tensor, (alias, 0.5)), g.call_function(aten.sin.default, (alias,))

    assert count(hand_written(build, torch.randn(3, 4)), scaled_rule) == 0


MUTATIONS: dict[str, Callable[[fx.Graph, fx.Node, fx.Node], Any]] = {
    "add_ to the input": lambda g, p, inner: g.call_function(aten.add_.Tensor, (p, 1.0)),
    "copy_ to the input": lambda g, p, inner: g.call_function(aten.copy_.default, (p, p)),
    "add_ to the inner node": lambda g, p, inner: g.call_function(aten.add_.Tensor, (inner, 1.0)),
    "copy_ to another": lambda g, p, inner: g.call_function(
        aten.zero_.default, (g.call_function(aten.sin.default, (p,)),)
    ),
}


@pytest.mark.parametrize("mutate", MUTATIONS.values(), ids=MUTATIONS.keys())
def test_a_mutation_between_two_matched_nodes_is_a_refusal(mutate: Callable[..., Any]) -> None:
    """No match crosses a mutation, of whatever it is."""

    def build(g: fx.Graph, p: fx.Node) -> fx.Node:
        inner = g.call_function(aten.exp.default, (p,))
        mutate(g, p, inner)
        return g.call_function(aten.mul.Tensor, (inner, 0.5))

    x = torch.randn(3, 4)
    module = hand_written(build, x)
    expected = module(x.clone())
    assert count(module, scaled_rule) == 0
    module.graph.lint()
    assert torch.equal(module(x.clone()), expected)


def test_mutations_before_and_after_a_match_do_not_matter() -> None:
    """A match that lies whole between two mutations fires, and reads what was written before it."""

    def build(g: fx.Graph, p: fx.Node) -> fx.Node:
        g.call_function(aten.add_.Tensor, (p, 1.0))
        result = g.call_function(aten.mul.Tensor, (g.call_function(aten.exp.default, (p,)), 0.5))
        g.call_function(aten.copy_.default, (p, result))
        return result

    x = torch.randn(3, 4)
    module = hand_written(build, x)
    expected = module(x.clone())
    assert count(module, scaled_rule) == 1
    module.graph.lint()
    module.recompile()
    written = x.clone()
    assert torch.equal(module(written), expected)
    assert torch.equal(written, expected)


def test_a_copy_taken_before_a_mutation_is_no_identity() -> None:
    """A clone that was taken before its source is written to holds other values than the source."""

    def build(g: fx.Graph, p: fx.Node) -> fx.Node:
        before = g.call_function(aten.clone.default, (p,))
        g.call_function(aten.add_.Tensor, (p, 1.0))
        return g.call_function(aten.mul.Tensor, (g.call_function(aten.exp.default, (before,)), 0.5))

    x = torch.randn(3, 4)
    module = hand_written(build, x)
    expected = module(x.clone())
    kt.apply(module, patterns(scaled_rule))
    assert torch.equal(module(x.clone()), expected)


def test_a_copy_that_is_written_to_is_no_identity() -> None:
    """A clone that is mutated holds other values than its source from then on."""

    def build(g: fx.Graph, p: fx.Node) -> fx.Node:
        own = g.call_function(aten.clone.default, (p,))
        g.call_function(aten.add_.Tensor, (own, 1.0))
        return g.call_function(aten.mul.Tensor, (g.call_function(aten.exp.default, (own,)), 0.5))

    x = torch.randn(3, 4)
    module = hand_written(build, x)
    expected = module(x.clone())
    kt.apply(module, patterns(scaled_rule))
    assert torch.equal(module(x.clone()), expected)


def test_one_output_feeding_the_other_s_input_is_no_match() -> None:
    """An input that is computed from one of the outputs can't be there before both are: the graph is left as it is."""

    def function(x: Tensor) -> tuple[Tensor, Tensor]:
        largest = x.amax(-1)
        return largest, x + largest[:, None].sin().expand(3, 4).cos()

    x, y = torch.randn(3, 4), torch.randn(3, 4)
    module = traced(linked_rule.function, x, y)
    assert count(module, linked_rule) == 1
    assert all(torch.equal(a, b) for a, b in zip(run_checked(module, x, y), linked_rule(x, y), strict=True))
    module = traced(function, x)
    assert count(module, linked_rule) == 0
    assert all(torch.equal(a, b) for a, b in zip(run_checked(module, x), function(x), strict=True))


def on_streams(boundary: Callable[[fx.Graph, fx.Node], Any], place: str) -> fx.GraphModule:
    """Write ``exp(x) * 0.5`` with a stream operation somewhere, which there is no GPU to run on."""
    module = hand_written(
        lambda g, p: g.call_function(aten.mul.Tensor, (g.call_function(aten.exp.default, (p,)), 0.5)), torch.randn(3, 4)
    )
    placeholder, inner, result, output = module.graph.nodes
    with module.graph.inserting_before({"before": inner, "between": result, "after": output}[place]):
        boundary(module.graph, placeholder)
    return module


STREAMS: dict[str, Callable[[fx.Graph, fx.Node], Any]] = {
    "record": lambda g, p: g.call_function(torch.ops.streams.record_event.default, (0, 0)),
    "wait": lambda g, p: g.call_function(torch.ops.streams.wait_event.default, (0, 0)),
    "fork": lambda g, p: g.call_function(torch.ops.streams.fork.default, (0, 1)),
    "join": lambda g, p: g.call_function(torch.ops.streams.join.default, (1, 0)),
    "synchronize": lambda g, p: g.call_function(torch.ops.streams.synchronize_stream.default, (0,)),
}


@pytest.mark.parametrize("place", ["before", "between", "after"])
@pytest.mark.parametrize("boundary", STREAMS.values(), ids=STREAMS.keys())
def test_no_match_crosses_a_stream_boundary(boundary: Callable[..., Any], place: str) -> None:
    """What lies whole on one side of a fork, join, event or wait is fused; what lies on both sides isn't."""
    module = on_streams(boundary, place)
    before = targets(module)
    assert count(module, scaled_rule) == (place != "between")
    assert fused_calls(module, scaled_rule) == (place != "between")
    module.graph.lint()
    if place == "between":
        assert targets(module) == before
    else:
        assert len(targets(module)) == 2
        assert targets(module)[place == "before"] == "kwtoys.scaled_exp.default"


WRITES: dict[str, Callable[[fx.Graph, fx.Node], Any]] = {
    "add_": lambda g, p: g.call_function(aten.add_.Tensor, (p, 1.0)),
    "copy_": lambda g, p: g.call_function(aten.copy_.default, (p, g.call_function(aten.sin.default, (p,)))),
    "through a view": lambda g, p: g.call_function(
        aten.zero_.default, (g.call_function(aten.view.default, (p, [12])),)
    ),
    "out": lambda g, p: g.call_function(aten.sin.out, (p,), {"out": p}),
}


@pytest.mark.parametrize("place", ["before", "between", "after"])
@pytest.mark.parametrize("write", WRITES.values(), ids=WRITES.keys())
def test_no_match_crosses_a_write(write: Callable[..., Any], place: str) -> None:
    """A match lies whole on one side of a mutation, and reads and leaves behind what it did."""

    def build(g: fx.Graph, p: fx.Node) -> fx.Node:
        for step in ("before", "exp", "between", "mul", "after"):
            if step == place:
                write(g, p)
            elif step == "exp":
                inner = g.call_function(aten.exp.default, (p,))
            elif step == "mul":
                result = g.call_function(aten.mul.Tensor, (inner, 0.5))
        return result

    x = torch.randn(3, 4)
    module = hand_written(build, x)
    (expected_x,) = copies((x,))
    expected = module(expected_x)
    assert count(module, scaled_rule) == (place != "between")
    assert fused_calls(module, scaled_rule) == (place != "between")
    module.graph.lint()
    module.recompile()
    (found_x,) = copies((x,))
    assert_same((module(found_x), found_x), (expected, expected_x))


def test_matches_on_both_sides_of_a_mutation_both_fire() -> None:
    """The same calls before and after a mutation are two matches, each with the values of its side."""

    def build(g: fx.Graph, p: fx.Node) -> list[fx.Node]:
        results = []
        for _ in range(2):
            results.append(g.call_function(aten.mul.Tensor, (g.call_function(aten.exp.default, (p,)), 0.5)))
            g.call_function(aten.add_.Tensor, (p, 1.0))
        return results

    x = torch.randn(3, 4)
    module = hand_written(build, x)
    expected = module(x.clone())
    assert count(module, scaled_rule) == 2
    module.recompile()
    assert_same(module(x.clone()), expected)


def test_a_rule_with_two_outputs_crosses_no_mutation() -> None:
    """Two outputs that a mutation lies between aren't one match, though neither needs the other."""

    def build(g: fx.Graph, p: fx.Node) -> list[fx.Node]:
        largest = g.call_function(aten.amax.default, (p, [-1]))
        g.call_function(aten.add_.Tensor, (p, 1.0))
        return [largest, g.call_function(aten.amin.default, (p, [-1]))]

    x = torch.randn(3, 4)
    refused(hand_written(build, x), x, rule=bounds_rule)


def test_an_assertion_on_an_inner_node_is_a_user() -> None:
    """An assertion has no result that anything uses, and needs its operand all the same."""

    def build(g: fx.Graph, p: fx.Node) -> fx.Node:
        inner = g.call_function(aten.exp.default, (p,))
        held = g.call_function(aten.any.default, (g.call_function(aten.gt.Scalar, (inner, 1.0)),))
        g.call_function(aten._assert_async.msg, (held, "nothing above 1"))
        return g.call_function(aten.mul.Tensor, (inner, 0.5))

    x = torch.randn(3, 4).abs()
    refused(hand_written(build, x), x, rule=scaled_rule)


def test_an_assertion_on_the_result_stays() -> None:
    """An assertion on an output of the match goes on asserting."""

    def build(g: fx.Graph, p: fx.Node) -> fx.Node:
        result = g.call_function(aten.mul.Tensor, (g.call_function(aten.exp.default, (p,)), 0.5))
        held = g.call_function(aten.any.default, (g.call_function(aten.gt.Scalar, (result, 0.5)),))
        g.call_function(aten._assert_async.msg, (held, "nothing above one half"))
        return result

    x = torch.randn(3, 4).abs()
    module = hand_written(build, x)
    fires(module, x, rule=scaled_rule)
    assert len(calls(module, aten._assert_async.msg)) == 1
    with pytest.raises(RuntimeError, match="nothing above one half"):
        module(torch.full((3, 4), -9.0))


def test_an_input_that_an_inner_node_feeds_is_a_user() -> None:
    """``exp(x) * a - exp(x)`` with one ``exp``: the second input needs the inner node, so it can't be fused away."""

    def build(g: fx.Graph, p: fx.Node) -> fx.Node:
        inner = g.call_function(aten.exp.default, (p,))
        scaled = g.call_function(aten.mul.Tensor, (inner, 0.5))
        return g.call_function(aten.add.Tensor, (scaled, g.call_function(aten.neg.default, (inner,))))

    x = torch.randn(3, 4)
    refused(hand_written(build, x), x, rule=scaled_add_rule)
