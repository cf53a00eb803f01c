"""Edits of copies: the original stays, metadata follows, and what no longer runs is no neighbour."""

from __future__ import annotations

import logging

import pytest
import torch
import toys
from graphs import targets
from torch import fx

from kwtrace.testing import Instance, instances, near_misses
from kwtrace.testing.changes import Change
from kwtrace.testing.editing import Copy, IllegalEditError, copy_graph, edited, placeholder_like
from kwtrace.testing.near_misses import _make

aten = torch.ops.aten


@pytest.fixture
def instance() -> Instance:
    """Return ``exp(x) * 0.37``."""
    (family,) = toys.patterns(toys.scaled_rule).families
    return next(instances(family, family.rows[0], toys.scaled_rule))


def to_bfloat16(copy: Copy) -> list[fx.Node]:
    """Put a cast before the last call."""
    exp, mul = (node for node in copy.graph.nodes if node.op == "call_function")
    with copy.graph.inserting_before(mul):
        cast = copy.graph.call_function(torch.ops.prims.convert_element_type.default, (exp, torch.bfloat16))
    mul.replace_input_with(exp, cast)
    return [cast]


def broken(copy: Copy) -> list[fx.Node]:
    """Give the last call an argument that it doesn't take."""
    node = copy.output.args[0][0]  # type: ignore[index]
    node.args = (node.args[0], "half")  # type: ignore[union-attr]
    return [node]  # type: ignore[list-item]


def test_metadata_follows_an_edit(instance: Instance) -> None:
    """What an edit changes downstream is recomputed; what it doesn't stays."""
    graph = edited(instance.graph, instance.mode, to_bfloat16)
    assert targets(graph) == ["aten.exp.default", "prims.convert_element_type.default", "aten.mul.Tensor"]
    found = [node.meta["val"].dtype for node in graph.nodes if node.op == "call_function"]
    assert found == [torch.float32, torch.bfloat16, torch.bfloat16]


def test_the_original_is_not_changed(instance: Instance) -> None:
    """Edits happen on a copy, its metadata included."""
    before = str(instance.graph)
    edited(instance.graph, instance.mode, to_bfloat16)
    assert str(instance.graph) == before
    assert all(n.meta["val"].dtype is torch.float32 for n in instance.graph.nodes if n.op != "output")


def test_an_illegal_edit_raises_and_is_skipped(instance: Instance, caplog: pytest.LogCaptureFixture) -> None:
    """An edit after which the graph doesn't run raises, quietly, and makes no neighbour."""
    with caplog.at_level(logging.WARNING), pytest.raises(IllegalEditError):
        edited(instance.graph, instance.mode, broken)
    assert not [record for record in caplog.records if "fake_tensor" in record.name]
    changes = [Change("legal", "a cast", to_bfloat16), Change("illegal", "a string", broken)]
    assert [neighbour.kind for neighbour in _make(instance, changes)] == ["legal"]


def test_some_neighbours_of_a_graph_are_illegal(instance: Instance) -> None:
    """Not all changes run: neighbours are fewer than changes, and all of them have a value in every call."""
    for neighbour in near_misses(instance):
        for node in neighbour.graph.nodes:
            if node.op == "call_function" and "streams" not in str(node.target) and "assert" not in str(node.target):
                assert isinstance(node.meta["val"], torch.Tensor)


def test_a_copy_may_have_another_input_and_another_output(instance: Instance) -> None:
    """A placeholder like another comes before every call, and an output after the ones that were there."""
    copy = copy_graph(instance.graph, instance.mode)
    first = next(iter(copy.graph.nodes))
    made = placeholder_like(copy, first, first.meta["val"])
    copy.add_output(made)
    copy.graph.lint()
    assert [node.op for node in copy.graph.nodes][:2] == ["placeholder", "placeholder"]
    assert made.meta["val"].shape == first.meta["val"].shape
    assert copy.output.args[0][-1] is made  # type: ignore[index]
    assert len(copy.nodes) == len(list(instance.graph.nodes))
