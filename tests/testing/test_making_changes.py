"""Changes one by one: each kind is made where a graph has what it changes, and changes just that."""

from __future__ import annotations

import math
from collections import Counter
from typing import Any

import pytest
import rules_for_laws as laws
import torch
import toys
from graphs import hand_written, traced
from torch import fx

import kwtrace as kt
from kwtrace.testing import Instance, instances, near_misses, other_spellings
from kwtrace.testing.changes import call_changes
from kwtrace.testing.constants import neighbours
from kwtrace.testing.detours import DETOURS
from kwtrace.testing.oracle import difference
from kwtrace.testing.reading import describe
from kwtrace.testing.surroundings import graph_changes
from kwtrace.values import exact_key

aten = torch.ops.aten
VALUES = [0, 1, -1, 7, 0.0, -0.0, 1.0, 0.37, math.inf, math.nan, True, False, "none", "", (1, 2), (), torch.float32]


@pytest.mark.parametrize("value", [*VALUES, torch.strided, torch.contiguous_format, torch.device("cpu")], ids=repr)
def test_neighbours_differ_in_type_or_value(value: Any) -> None:
    """No neighbour of a constant is the constant, and no two are alike."""
    made = [exact_key(other) for other in neighbours(value, strings=("none", "tanh"))]
    assert exact_key(value) not in made
    assert len(set(made)) == len(made)
    assert made or value == ()


@pytest.mark.parametrize(
    ("value", "other"),
    [(1, True), (1, 1.0), (1.0, 1), (True, 1), (0.0, -0.0), (-0.0, 0.0), (0.5, math.nextafter(0.5, 1)), (0.5, math.nan),
     ((1, 2), (2, 1)), ((1, 2), (1,)), ("none", "tanh"), (torch.float32, torch.bfloat16), (torch.float32, None)],
    ids=str,
)  # fmt: skip
def test_the_neighbours_that_count_are_there(value: Any, other: Any) -> None:
    """Equal values of another type, the other zero, the next float, exchanged lists, other strings and dtypes."""
    assert exact_key(other) in [exact_key(found) for found in neighbours(value, strings=("none", "tanh"))]


@pytest.mark.parametrize(("kind", "value"), [("int", 0), ("bool", True), ("ScalarType", torch.bool), ("str", "other")])
def test_none_becomes_what_the_schema_allows(kind: str, value: Any) -> None:
    """An argument that was left at None is given something of its type."""
    assert exact_key(value) in [exact_key(found) for found in neighbours(None, kind)]
    assert not list(neighbours(None, "Tensor"))


def instance_of(rule: kt.Rule, place: int = 0) -> Instance:
    """Return a graph of a rule's first row."""
    family = toys.patterns(rule).families[0]
    return list(instances(family, family.rows[0], rule))[place]


def words(rule: kt.Rule, kind: str, place: int = 0) -> list[str]:
    """Return the near misses of one kind in words."""
    return [n.words for n in near_misses(instance_of(rule, place)) if n.kind == kind]


WANTED: list[tuple[kt.Rule, str, str]] = [
    (toys.topk_rule, "constant", "largest: True → False"),
    (toys.topk_rule, "constant", "dim: -1 → 0"),
    (toys.topk_rule, "type", "other: 1 → 1.0"),
    (toys.scaled_rule, "operand", "other: 0.37 → a tensor without dims"),
    (toys.scaled_rule, "operator", "aten.exp.default → aten.tanh.default"),
    (toys.scaled_rule, "detour", "transposed"),
    (toys.scaled_rule, "user", "which asserts"),
    (toys.scaled_rule, "user", "returned as well"),
    (toys.scaled_rule, "stream", "an event recorded before mul"),
    (toys.scaled_rule, "mutation", "filled with 1 before mul"),
    (toys.scaled_rule, "device", "all on cuda:0"),
    (toys.scaled_rule, "dtype", "torch.float32 → torch.float64"),
    (toys.scaled_rule, "rank", "one dim more"),
    (toys.scaled_rule, "size", "1 for dim 0"),
    (toys.scaled_rule, "strides", "as_strided"),
    (toys.scaled_add_rule, "operands swapped", "self and other exchanged"),
    (toys.scaled_add_rule, "operand", "→ another input"),
    (toys.scaled_add_rule, "operand", "negated"),
    (laws.paired_rule, "operand", "→ None"),
    (laws.joined_rule, "operand", "None → arg0_1"),
    (laws.rounded_rule, "dtype", "torch.bfloat16 → torch.float16"),
]


@pytest.mark.parametrize(("rule", "kind", "wanted"), WANTED, ids=[f"{r.name} {k} {w}" for r, k, w in WANTED])
def test_a_change_is_made_where_there_is_something_to_change(rule: kt.Rule, kind: str, wanted: str) -> None:
    """Each kind of change is made for a graph that has what it changes."""
    assert any(wanted in found for found in words(rule, kind))


def test_a_value_that_two_calls_use_is_computed_twice() -> None:
    """A shared inner node gets a twin, one for each user."""
    graph = traced(lambda x: (torch.exp(x) * torch.exp(x).sin(),), torch.randn(3, 4), mode="fake").graph
    exp = graph.find_nodes(op="call_function", target=aten.exp.default)
    assert len(exp) == 2
    module = hand_written(shared, torch.randn(3, 4))
    value = next(iter(module.graph.nodes)).meta["val"]
    instance = Instance(kt.Variant("none", ()), {}, module.graph, value.fake_mode)
    (twin,) = (n for n in near_misses(instance) if "computed twice" in n.words)
    assert len(twin.graph.find_nodes(op="call_function", target=aten.exp.default)) == 2


def shared(g: fx.Graph, p: fx.Node) -> tuple[fx.Node]:
    """Write ``exp(x) * sin(exp(x))`` with one ``exp``."""
    inner = g.call_function(aten.exp.default, (p,))
    return (g.call_function(aten.mul.Tensor, (inner, g.call_function(aten.sin.default, (inner,)))),)


@pytest.mark.parametrize("name", DETOURS)
def test_a_detour_yields_other_values(name: str) -> None:
    """What a detour makes of a tensor isn't the tensor: other numbers, another dtype or another size."""
    instance = instance_of(toys.scaled_rule, 1)
    made = [n for n in near_misses(instance) if n.kind == "detour" and n.words.endswith(f"arg0_1, {name}")]
    assert len(made) == 1
    outputs = [graph.output_node().args[0] for graph in (instance.graph, made[0].graph)]
    readings = [describe(out, {next(iter(out[0].graph.nodes)): "x"}) for out in outputs]  # type: ignore[arg-type,union-attr,index]
    assert readings[0] != readings[1]
    numbers = difference(instance.graph, made[0].graph)
    assert numbers is not None


@pytest.mark.parametrize("rule", [toys.scaled_rule, toys.scaled_add_rule, toys.topk_rule], ids=lambda rule: rule.name)
def test_other_spellings_yield_the_same_numbers(rule: kt.Rule) -> None:
    """Every spelling that must match computes what the instance computes, bit for bit, in its first outputs."""
    instance = instance_of(rule)
    count = len(instance.graph.output_node().args[0])  # type: ignore[arg-type]
    made = list(other_spellings(instance))
    assert len(made) > 20
    for neighbour in made:
        if neighbour.kind == "strides":
            continue  # it has other inputs
        if neighbour.kind == "result":
            returned = neighbour.graph.output_node()
            returned.args = (returned.args[0][:count],)  # type: ignore[index]
        assert difference(instance.graph, neighbour.graph) is None, neighbour.words


def test_changes_of_one_call_concern_that_call() -> None:
    """The changes of a call name it, and those of different calls are different."""
    graph = instance_of(toys.scaled_add_rule).graph
    calls = [node for node in graph.nodes if node.op == "call_function"]
    found = {node: [change.words for change in call_changes(node, ())] for node in calls}
    assert all(text.startswith(str(node)) for node, texts in found.items() for text in texts)
    assert max(Counter(text for texts in found.values() for text in texts).values()) == 1


def test_expanded_tensors_are_not_written_to() -> None:
    """Torch refuses to write to a tensor whose elements share a place in memory: such a graph is no near miss."""
    expanded = hand_written(
        lambda graph, x: graph.call_function(
            aten.exp.default, (graph.call_function(aten.expand.default, (x, [3, 4])),)
        ),
        torch.randn(1, 4),
    ).graph
    written = [change.words for change in graph_changes(expanded) if change.kind == "mutation"]
    assert written == ["x0: filled with 1 before expand_default", "x0: filled with 1 before exp_default"]
