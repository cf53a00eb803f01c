"""What a rewrite leaves behind: a valid graph whose metadata says what its nodes really yield."""

from __future__ import annotations

import itertools
import logging
from operator import getitem
from typing import Any

import pytest
import torch
from graphs import assert_as_exact, calls, hand_written, only, run_checked, targets, traced
from torch import Tensor, fx
from toys import (
    bounded_rule,
    bounds_rule,
    flattened_rule,
    linked_rule,
    patterns,
    scaled_add_rule,
    scaled_rule,
    topk_rule,
)

import kwtrace as kt

aten = torch.ops.aten
MODES = ["real", "fake", "symbolic"]


def rewritten(module: fx.GraphModule, *rules: kt.Rule) -> int:
    """Rewrite ``module`` with some rules; return how often they fired."""
    return kt.apply(module, patterns(*rules)).count


def test_metadata_of_a_new_node_is_its_own() -> None:
    """Changing one node's metadata after a rewrite changes no other's."""
    x = torch.randn(3, 4)
    module = traced(lambda x: torch.exp(x) - 1, x)
    only(module, aten.sub.Tensor).meta["stack_trace"] = "here"
    assert rewritten(module, flattened_rule) == 1
    nodes = [n for n in module.graph.nodes if n.op == "call_function"]
    assert len({id(n.meta) for n in nodes}) == len(nodes)


def test_nothing_of_the_match_is_left() -> None:
    """Matched nodes and the identities between and before them are gone when nothing else uses them."""

    def build(g: fx.Graph, p: fx.Node) -> fx.Node:
        source = g.call_function(aten.clone.default, (g.call_function(aten.alias.default, (p,)),))
        inner = g.call_function(aten.alias.default, (g.call_function(aten.exp.default, (source,)),))
        return g.call_function(aten.mul.Tensor, (inner, 0.5))

    module = hand_written(build, torch.randn(3, 4))
    assert rewritten(module, scaled_rule) == 1
    assert targets(module) == ["kwtoys.scaled_exp.default"]


def test_an_identity_before_the_match_that_is_used_stays() -> None:
    """What others use is not removed with the match."""
    x = torch.randn(3, 4)

    def build(g: fx.Graph, p: fx.Node) -> tuple[fx.Node, ...]:
        source = g.call_function(aten.clone.default, (p,))
        product = g.call_function(aten.mul.Tensor, (g.call_function(aten.exp.default, (source,)), 0.5))
        return product, source

    module = hand_written(build, x)
    assert rewritten(module, scaled_rule) == 1
    found = run_checked(module, x)
    assert torch.equal(found[0], torch.exp(x) * 0.5)
    assert torch.equal(found[1], x)


RULES = [scaled_rule, scaled_add_rule, bounds_rule, topk_rule, flattened_rule, bounded_rule]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.name)
def test_a_second_pass_finds_nothing(rule: kt.Rule, mode: Any) -> None:
    """Rewriting is done after one pass: the replacement doesn't match again, and the graph stays as it is."""
    inputs = [torch.randn(3, 4), torch.randn(3, 4)]
    module = traced(lambda x, y: searched(rule, x, y), *inputs, mode=mode)
    assert rewritten(module, rule) == 1
    after = str(module.graph)
    assert rewritten(module, rule) == 0
    assert str(module.graph) == after


def searched(rule: kt.Rule, x: Tensor, y: Tensor) -> Any:
    """Run the search function of a toy rule."""
    if rule is scaled_add_rule:
        return rule(x, y, alpha=0.5)
    return rule(x, alpha=0.5) if rule in (scaled_rule, bounded_rule) else rule(x)


ORDERS = list(itertools.permutations(range(2)))


@pytest.mark.parametrize("mode", MODES)
def test_both_results_of_an_operator_that_returns_two(mode: Any) -> None:
    """``topk`` and what is done with its two results is one match, with two outputs of two dtypes."""

    def function(x: Tensor) -> tuple[Tensor, Tensor]:
        values, places = torch.topk(x, 2)
        return (-values).sin(), (places + 1) * 3

    x = torch.randn(4, 6)
    module = traced(function, x, mode=mode)
    assert rewritten(module, topk_rule) == 1
    assert len(calls(module, "kwtoys.negated_topk.default")) == 1
    assert not calls(module, aten.topk.default)
    assert all(torch.equal(a, b) for a, b in zip(run_checked(module, x), function(x), strict=True))


def test_results_of_two_different_calls_are_no_match() -> None:
    """The values of one ``topk`` and the places of another aren't the two results of one."""

    def function(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        return -torch.topk(x, 2)[0], torch.topk(y, 2)[1] + 1

    x, y = torch.randn(4, 6), torch.randn(4, 6)
    module = traced(function, x, y)
    assert rewritten(module, topk_rule) == 0
    assert all(torch.equal(a, b) for a, b in zip(run_checked(module, x, y), function(x, y), strict=True))


@pytest.mark.parametrize("which", [0, 1])
def test_one_output_of_two_is_no_match(which: int) -> None:
    """Where the graph has only one of the outputs there is no match."""

    def function(x: Tensor) -> Tensor:
        values, places = torch.topk(x, 2)
        return (-values, places + 1)[which]

    module = traced(function, torch.randn(4, 6))
    assert rewritten(module, topk_rule) == 0


@pytest.mark.parametrize("mode", MODES)
def test_an_input_computed_between_two_outputs(mode: Any) -> None:
    """An input may be computed after the first output, as long as it doesn't need it."""

    def function(x: Tensor) -> list[Tensor]:
        largest = x.amax(-1)
        used = largest.sin()
        return [x + x.cos(), used, largest]

    x = torch.randn(3, 4)
    module = traced(function, x, mode=mode)
    assert rewritten(module, linked_rule) == 1
    assert all(torch.equal(a, b) for a, b in zip(run_checked(module, x), function(x), strict=True))


@pytest.mark.parametrize("mode", MODES)
def test_a_replacement_may_need_the_sizes_of_its_inputs(mode: Any) -> None:
    """Views and new tensors in a replacement get their sizes from the graph: ints, or nodes where they are symbolic."""
    x = torch.randn(5, 7)
    module = traced(lambda x: torch.exp(x) - 1, x, mode=mode)
    assert rewritten(module, flattened_rule) == 1
    assert len(calls(module, "kwtoys.flat_expm1.default")) == 1
    assert torch.equal(run_checked(module, x), torch.exp(x) - 1)
    if mode == "symbolic":
        other = torch.randn(9, 4)
        assert torch.equal(module(other), torch.exp(other) - 1)


def test_a_replacement_that_raises_leaves_the_graph_as_it_is(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Whatever goes wrong while writing is undone and logged, once, with rule and variant; nothing raises."""
    from kwtrace import rewriting  # noqa: PLC0415 - to break it

    x = torch.randn(3, 4)
    module = traced(lambda x: torch.exp(x) - 1, x)
    before = str(module.graph)
    real = rewriting.run
    done: list[fx.Node] = []

    def run(node: fx.Node, mode: Any) -> Any:
        done.append(node)
        if len(done) > 2:
            msg = "out of ideas"
            raise ValueError(msg)
        return real(node, mode)

    monkeypatch.setattr(rewriting, "run", run)
    with caplog.at_level(logging.WARNING, "kwtrace"):
        assert rewritten(module, flattened_rule) == 0
    module.graph.lint()
    assert str(module.graph) == before
    (record,) = caplog.records
    assert "out of ideas" in record.getMessage()
    assert "flattened[" in record.getMessage()
    assert torch.equal(run_checked(module, x), torch.exp(x) - 1)


def test_a_replacement_that_yields_something_else_is_not_put_in(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the new value differs in dtype from the old one the graph is left as it is."""
    from kwtrace import rewriting  # noqa: PLC0415 - to break it

    x = torch.randn(3, 4)
    module = traced(lambda x: torch.exp(x) * 0.5, x)
    before = str(module.graph)
    real = rewriting.run
    monkeypatch.setattr(rewriting, "run", lambda node, mode: real(node, mode).double())
    assert rewritten(module, scaled_rule) == 0
    assert str(module.graph) == before


def test_defaults_are_not_written_out() -> None:
    """New nodes are written as torch writes them: without arguments that are the schema's defaults."""
    module = traced(lambda x: torch.exp(x) - 1, torch.randn(3, 4))
    assert rewritten(module, flattened_rule) == 1
    assert dict(only(module, aten.add.Tensor).kwargs) == {}


def test_captured_numbers_reach_a_replacement_traced_at_the_match() -> None:
    """A captured number stands in the traced replacement as it was in the graph."""
    x = torch.randn(3, 4)
    module = traced(lambda x: torch.tanh(x) * 0.7, x)
    assert rewritten(module, bounded_rule) == 1
    assert only(module, aten.mul.Tensor).args[1] == 0.7
    assert_as_exact(run_checked(module, x), torch.tanh(x) * 0.7, torch.tanh(x.double()) * 0.7)


def test_outputs_of_the_graph_are_replaced_wherever_they_stand() -> None:
    """A replaced node that the graph returns, twice and nested, is replaced in each place."""
    x = torch.randn(3, 4)

    def build(g: fx.Graph, p: fx.Node) -> Any:
        node = g.call_function(aten.mul.Tensor, (g.call_function(aten.exp.default, (p,)), 0.5))
        return [node, (node, p)]

    module = hand_written(build, x)
    assert rewritten(module, scaled_rule) == 1
    found = run_checked(module, x)
    assert torch.equal(found[0], torch.exp(x) * 0.5)
    assert torch.equal(found[1][0], found[0])


def test_a_getitem_of_a_list_keeps_its_meaning() -> None:
    """``getitem`` with an index of another sign or type is another constant."""

    def build(index: Any) -> fx.GraphModule:
        def inner(g: fx.Graph, p: fx.Node) -> tuple[fx.Node, ...]:
            top = g.call_function(aten.topk.default, (p, 2))
            values, places = g.call_function(getitem, (top, 0)), g.call_function(getitem, (top, index))
            return g.call_function(aten.neg.default, (values,)), g.call_function(aten.add.Tensor, (places, 1))

        return hand_written(inner, torch.randn(4, 6))

    assert rewritten(build(1), topk_rule) == 1
    assert rewritten(build(True), topk_rule) == 0
