"""The oracle: it refuses planted faults, accepts what is right, and asks neither the matcher nor the rewriting."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import rules_for_laws as laws
import torch
import toys
from graphs import hand_written, only, traced
from torch import Tensor, fx

import kwtrace as kt
from kwtrace.engine import Engine
from kwtrace.testing.declared import undeclared
from kwtrace.testing.oracle import Claims, difference, leak, random_inputs
from kwtrace.testing.reading import describe, passed_on

aten = torch.ops.aten


def scaled_match(function: Callable[[Tensor], Any] | None = None) -> kt.Match:
    """Return the match of ``exp(x) * 0.5`` in a graph."""
    module = traced(function or (lambda x: torch.exp(x) * 0.5), torch.randn(3, 4), mode="fake")
    (match,) = Engine(toys.patterns(toys.scaled_rule)).find(module.graph)
    return match


CLAIMS = Claims({"scaled": toys.scaled_rule, "scaled_add": toys.scaled_add_rule, "moded": laws.moded_rule})


def test_a_right_match_is_claimed() -> None:
    """What the variant's search function computes is its claim."""
    assert CLAIMS.problem(scaled_match()) is None


@pytest.mark.parametrize("alpha", [0.25, 1.0, math.nan, -0.5])
def test_a_wrong_captured_value_is_refused(alpha: float) -> None:
    """A match that says that the graph holds another number isn't what the graph has."""
    match = scaled_match()
    match.kwargs["alpha"] = alpha
    problem = CLAIMS.problem(match)
    assert problem is not None
    assert "is not what the graph has" in problem


def test_a_captured_value_that_is_missing_is_refused() -> None:
    """A match has a value for every captured parameter."""
    match = scaled_match()
    del match.kwargs["alpha"]
    assert "expected a value of alpha, found none" in str(CLAIMS.problem(match))


def test_a_wrong_input_is_refused() -> None:
    """A match whose input is another node claims another graph."""
    module = traced(lambda x, y: (torch.exp(x) * 0.5, y + 1), torch.randn(3, 4), torch.randn(3, 4), mode="fake")
    (match,) = Engine(toys.patterns(toys.scaled_rule)).find(module.graph)
    assert CLAIMS.problem(match) is None
    match.inputs["x"] = list(module.graph.nodes)[1]
    assert "is not what the graph has" in str(CLAIMS.problem(match))


@pytest.mark.parametrize("row", range(4))
def test_a_wrong_variant_is_refused(row: int) -> None:
    """Of the rows of a table only the one that the graph shows is right."""
    module = traced(lambda x: laws.mode(torch.relu(x), negate=True, kind="none"), torch.randn(3, 4), mode="fake")
    (match,) = Engine(toys.patterns(laws.moded_rule)).find(module.graph)
    right = match.family.rows.index(match.row) == row
    wrong = replace(match, row=match.family.rows[row]) if not right else match
    assert (CLAIMS.problem(wrong) is None) == right


DECLARED: dict[str, Callable[[Tensor], Tensor]] = {
    "dtype": lambda x: x.double(),
    "rank": lambda x: x[None],
    "size": lambda x: x[:1],
    "device": lambda x: x.to("meta"),
}


@pytest.mark.parametrize("change", DECLARED.values(), ids=DECLARED.keys())
def test_an_input_that_the_rule_does_not_declare_is_refused(change: Callable[[Tensor], Tensor]) -> None:
    """The dtype, rank, sizes and device of each input are those of the annotation, whatever the graph computes."""
    match = scaled_match()
    assert undeclared(match, toys.scaled_rule) is None
    node = match.inputs["x"]
    with node.meta["val"].fake_mode:
        node.meta["val"] = change(node.meta["val"])
    assert undeclared(match, toys.scaled_rule) is not None


def test_sizes_of_one_name_are_one_size() -> None:
    """Two inputs that share a dim's name share its size; one that only broadcasts isn't declared."""
    x = torch.randn(3, 4)
    module = traced(lambda x, y: torch.exp(x) * 0.5 + y, x, x.clone(), mode="fake")
    (match,) = Engine(toys.patterns(toys.scaled_add_rule)).find(module.graph)
    assert undeclared(match, toys.scaled_add_rule) is None
    node = match.inputs["y"]
    with node.meta["val"].fake_mode:
        node.meta["val"] = node.meta["val"][:1]
    assert "expected m" in str(undeclared(match, toys.scaled_add_rule))


def test_an_input_too_many_or_too_few_is_refused() -> None:
    """The inputs of a match are the tensors of its variant."""
    match = scaled_match()
    match.inputs["z"] = match.inputs["x"]
    assert "expected the inputs ['x']" in str(undeclared(match, toys.scaled_rule))


def test_a_match_that_leaks_is_refused() -> None:
    """A user of an inner node that counts is a leak, a dead one isn't."""

    def build(g: fx.Graph, p: fx.Node) -> fx.Node:
        inner = g.call_function(aten.exp.default, (p,))
        g.call_function(aten.sin.default, (inner,))
        return g.call_function(aten.mul.Tensor, (inner, 0.5))

    module = hand_written(build, torch.randn(3, 4))
    (match,) = Engine(toys.patterns(toys.scaled_rule)).find(module.graph)
    assert leak(match) is None
    module.graph.output_node().args = ((match.outputs[0], only(module, aten.sin.default)),)
    assert "is used by sin_default outside the match" in str(leak(match))


BOUNDARIES = {
    "mutation": lambda g, p: g.call_function(aten.add_.Tensor, (p, 1)),
    "stream": lambda g, p: g.call_function(torch.ops.streams.record_event.default, (0, 0)),
}


@pytest.mark.parametrize("boundary", BOUNDARIES.values(), ids=BOUNDARIES.keys())
@pytest.mark.parametrize("inside", [True, False])
def test_a_boundary_in_the_middle_is_refused(boundary: Callable[..., Any], inside: bool) -> None:
    """A mutation or a stream operation between the nodes of a match is a leak, one before it isn't."""
    match = scaled_match()
    exp, mul = (node for node in match.graph.nodes if node.op == "call_function")
    with match.graph.inserting_before(mul if inside else exp):
        boundary(match.graph, match.inputs["x"])
    assert (leak(match) is not None) == inside


def test_an_assertion_is_a_user() -> None:
    """An assertion needs its operand, though nothing uses what it yields."""
    match = scaled_match()
    exp, mul = (node for node in match.graph.nodes if node.op == "call_function")
    with match.graph.inserting_before(mul):
        held = match.graph.call_function(aten.any.default, (exp,))
        match.graph.call_function(aten._assert_async.msg, (held, "none"))
    assert "outside the match" in str(leak(match))


def pair(left: Callable[..., Any], right: Callable[..., Any], *inputs: Tensor) -> str | None:
    """Return how two functions differ as graphs."""
    return difference(*(traced(lambda *x, f=f: (f(*x),), *inputs, mode="fake").graph for f in (left, right)))


def test_right_numbers_are_accepted() -> None:
    """Equal numbers are right, and so is an error of the unfused form's own size."""
    x = torch.randn(8, 8)
    assert pair(lambda x: torch.exp(x) * 0.5, lambda x: toys.scaled_exp(x, 0.5), x) is None
    assert pair(lambda x: (x + x) + x, lambda x: x * 3, x) is None
    assert pair(lambda x: x > 0, lambda x: x > 0, x) is None


WRONG: dict[str, tuple[Callable[[Tensor], Tensor], Callable[[Tensor], Tensor], str]] = {
    "number": (lambda x: x * 2, lambda x: x * 2.01, "error"),
    "last places": (lambda x: x * 2, lambda x: x * (2 + 1e-5), "error"),
    "nan at another place": (lambda x: x / x.relu().floor(), lambda x: x / x.floor(), "nan or inf"),
    "nan for a number": (lambda x: x * 2, lambda x: x.sqrt(), "error|nan"),
    "inf for nan": (lambda x: (x - x) / (x - x), lambda x: 1 / (x - x), "nan or inf"),
    "dtype": (lambda x: x * 2, lambda x: (x * 2).double(), "expected"),
    "size": (lambda x: x * 2, lambda x: x[:3] * 2, "expected"),
    "bools": (lambda x: x > 0, lambda x: x > 0.5, "expected"),
    "ints": (lambda x: x.int(), lambda x: x.int() + 1, "expected"),
    "rounding": (lambda x: x * 1.5, lambda x: (x.bfloat16() * 1.5).float(), "error"),
}


@pytest.mark.parametrize(("left", "right", "words"), WRONG.values(), ids=WRONG.keys())
def test_wrong_numbers_are_refused(
    left: Callable[[Tensor], Tensor], right: Callable[[Tensor], Tensor], words: str
) -> None:
    """Other numbers, other places of NaN and infinity, another dtype or size, are found."""
    found = pair(left, right, torch.randn(8, 8))
    assert found is not None
    assert any(word in found for word in words.split("|"))


def test_untrue_metadata_is_refused() -> None:
    """A node of the fused graph that yields other strides than its metadata says is found."""
    x = torch.randn(3, 4)
    graphs = [traced(lambda x: (x.sin().neg(),), x, mode="fake").graph for _ in range(2)]
    assert difference(*graphs) is None
    node = graphs[1].find_nodes(op="call_function", target=aten.sin.default)[0]
    with node.meta["val"].fake_mode:
        node.meta["val"] = torch.empty_strided((3, 4), (1, 3))
    assert "where its metadata says" in str(difference(*graphs))


def test_a_graph_that_does_not_run_is_refused() -> None:
    """A fused graph that raises is a difference, not an error of the oracle."""
    x = torch.randn(3, 4)
    left, right = (traced(lambda x: (x.t().reshape(12),), x, mode="fake").graph for _ in range(2))
    for node in right.find_nodes(op="call_function", target=aten.clone.default):
        node.replace_all_uses_with(node.args[0])
    assert "expected it to run" in str(difference(left, right))


def test_numbers_for_inputs() -> None:
    """Inputs are like their placeholders, the same for a seed; rows of bools have both values."""
    inputs = (torch.randn(3, 4).t(), torch.ones(2, 5, dtype=torch.bool), torch.ones(3, dtype=torch.int64))
    graph = traced(lambda x, m, i: (x, m, i), *inputs, mode="fake").graph
    first, second, other = random_inputs(graph, 1), random_inputs(graph, 1), random_inputs(graph, 2)
    assert [x.dtype for x in first] == [x.dtype for x in inputs]
    assert first[0].stride() == inputs[0].stride()
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
    assert not torch.equal(first[0], other[0])
    assert first[1][:, 0].logical_not().all()
    assert first[1][:, 1].all()


SAME = {
    "clone": lambda x: x.clone(),
    "view": lambda x: x.view(4, 4),
    "slice": lambda x: x[:, :],
    "cast": lambda x: x.to(torch.float32, copy=True),
    "permute": lambda x: x.permute(0, 1),
}
OTHER = {
    "t": lambda x: x.t(),
    "flip": lambda x: x.flip(0),
    "rounded": lambda x: x.bfloat16().float(),
    "shifted": lambda x: torch.cat([x, x])[1:5],
    "sin": lambda x: x.sin(),
}


def text_of(function: Callable[[Tensor], Tensor]) -> str:
    """Return the reading of a function of one matrix."""
    graph = traced(function, torch.randn(4, 4), mode="fake").graph
    (output,) = (n for n in graph.output_node().all_input_nodes)
    return describe([output], {next(iter(graph.nodes)): "x"})


@pytest.mark.parametrize("identity", SAME.values(), ids=SAME.keys())
def test_what_leaves_values_alone_reads_alike(identity: Callable[[Tensor], Tensor]) -> None:
    """Identities don't show in the oracle's reading."""
    assert text_of(lambda x: identity(x.exp()) * 2) == text_of(lambda x: x.exp() * 2)


@pytest.mark.parametrize("change", OTHER.values(), ids=OTHER.keys())
def test_what_changes_values_reads_otherwise(change: Callable[[Tensor], Tensor]) -> None:
    """What moves or rounds values does."""
    assert text_of(lambda x: change(x.exp()) * 2) != text_of(lambda x: x.exp() * 2)


@pytest.mark.parametrize(
    ("left", "right"), [(1, 1.0), (1, True), (0.0, -0.0), (2, 3), (0.5, math.nextafter(0.5, 1))], ids=str
)
def test_constants_read_by_type_and_value(left: Any, right: Any) -> None:
    """Equal constants of two types are two texts."""

    def written(value: Any) -> str:
        module = hand_written(lambda g, p: g.call_function(aten.mul.Tensor, (p, value)), torch.randn(2))
        return describe([only(module, aten.mul.Tensor)], {next(iter(module.graph.nodes)): "x"})

    assert written(left) != written(right)
    assert written(left) == written(left)


@pytest.mark.parametrize("place", ["before", "after"])
def test_a_copy_from_before_a_mutation_is_not_passed_on(place: str) -> None:
    """What was copied before its source was written to reads as a copy of its own, what was copied after it doesn't."""

    def build(g: fx.Graph, p: fx.Node) -> fx.Node:
        copy = g.call_function(aten.clone.default, (p,)) if place == "before" else None
        g.call_function(aten.add_.Tensor, (p, 1))
        copy = g.call_function(aten.clone.default, (p,)) if copy is None else copy
        return g.call_function(aten.sin.default, (copy,))

    module = hand_written(build, torch.randn(2))
    placeholder = next(iter(module.graph.nodes))
    assert passed_on(only(module, aten.clone.default)) is placeholder
    text = describe([only(module, aten.sin.default)], {placeholder: "x"})
    assert ("clone" in text) == (place == "before")


def test_expanded_inputs_get_numbers_too() -> None:
    """An input whose elements share a place in memory has one number there, and its strides."""
    graph = fx.Graph()
    like = [torch.empty(1, 4).expand(3, 4), torch.empty(2, 1, dtype=torch.bool).expand(2, 5), torch.empty(())]
    for place, value in enumerate(like):
        graph.placeholder(f"x{place}").meta["val"] = value
    made = random_inputs(graph, 0)
    assert [(x.shape, x.stride(), x.dtype) for x in made] == [(x.shape, x.stride(), x.dtype) for x in like]
    assert torch.equal(made[0][0], made[0][2])
    assert len(made[0].unique()) == 4
