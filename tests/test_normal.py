"""The normal form of a graph: absolute dims and sizes, clipped slices, identities looked through, regions counted."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from graphs import hand_written, only, traced
from torch import fx

from kwtrace.normal import View, known, known_equal, nodes_in, same_sizes

aten = torch.ops.aten


def arguments(target: Any, *args: Any, shape: tuple[int, ...] = (2, 3, 4), **kwargs: Any) -> dict[str, Any]:
    """Return the normal form of one call on a tensor, less the tensor."""
    module = hand_written(lambda g, p: g.call_function(target, (p, *args), kwargs), torch.randn(shape))
    found = View(module.graph).args(only(module, target))
    return {name: value for name, value in found.items() if name != "self"}


@pytest.mark.parametrize("dim", [-1, 2])
def test_dims_count_from_the_front(dim: int) -> None:
    """-1 and rank-1 are one dim, in scalars and in lists."""
    assert arguments(aten._softmax.default, dim, False)["dim"] == 2
    assert arguments(aten.sum.dim_IntList, [dim])["dim"] == (2,)
    assert arguments(aten.amax.default, [dim, 0])["dim"] == (2, 0)


def test_a_new_dim_counts_from_the_result() -> None:
    """``unsqueeze(-1)`` adds a dim behind the last: it counts from the rank that results."""
    assert arguments(aten.unsqueeze.default, -1)["dim"] == 3
    assert arguments(aten.unsqueeze.default, 3)["dim"] == 3


@pytest.mark.parametrize("size", [[6, 4], [-1, 4], [6, -1]])
def test_sizes_are_those_of_the_result(size: list[int]) -> None:
    """A size of -1 is the size it stands for."""
    for target in (aten.view.default, aten.reshape.default):
        assert arguments(target, size) == {"size": (6, 4)}


def test_expand_keeps_no_minus_one() -> None:
    """-1 in ``expand`` is the size that the dim has."""
    assert arguments(aten.expand.default, [5, -1, 3, -1], shape=(2, 1, 4)) == {"size": (5, 2, 3, 4)}


@pytest.mark.parametrize(
    ("args", "expected"),
    [
        ((), (0, 0, 2, 1)),
        ((1,), (1, 0, 3, 1)),
        ((1, 0, 9223372036854775807), (1, 0, 3, 1)),
        ((-2, None, 3), (1, 0, 3, 1)),
        ((1, -2, -1), (1, 1, 2, 1)),
        ((2, 0, 4, 2), (2, 0, 4, 2)),
        ((1, 1, 99, 1), (1, 1, 3, 1)),
    ],
    ids=str,
)
def test_slices_are_clipped_to_the_size(args: tuple[Any, ...], expected: tuple[int, ...]) -> None:
    """An end past the size is the size, a negative one counts from it, and None is the default."""
    found = arguments(aten.slice.Tensor, *args)
    assert (found["dim"], found["start"], found["end"], found["step"]) == expected


def test_identities_are_followed_to_their_source() -> None:
    """A chain of identities is one node; what changes the shape ends it."""

    def build(g: fx.Graph, p: fx.Node) -> fx.Node:
        moved = g.call_function(aten.permute.default, (p, [1, 0]))
        copied = g.call_function(aten.clone.default, (moved,))
        same = g.call_function(aten.view.default, (copied, [4, 3]))
        return g.call_function(aten.expand.default, (same, [-1, 3]))

    module = hand_written(build, torch.randn(3, 4))
    view = View(module.graph)
    last = only(module, aten.expand.default)
    assert view.strip(last) is only(module, aten.permute.default)
    assert view.strip(only(module, aten.permute.default)) is only(module, aten.permute.default)


def test_long_chains_are_followed_without_recursion() -> None:
    """Thousands of identities in a row are no problem."""
    graph = fx.Graph()
    first = last = graph.placeholder("x")
    for _ in range(3000):
        last = graph.call_function(aten.alias.default, (last,))
    graph.output(last)
    assert View(graph).strip(last) is first


def test_regions_are_counted_by_mutations() -> None:
    """Nodes on the two sides of a mutation are in two regions."""

    def build(g: fx.Graph, p: fx.Node) -> tuple[fx.Node, ...]:
        first = g.call_function(aten.sin.default, (p,))
        second = g.call_function(aten.cos.default, (p,))
        g.call_function(aten.add_.Tensor, (p, 1.0))
        return first, second, g.call_function(aten.exp.default, (p,))

    module = hand_written(build, torch.randn(2))
    view = View(module.graph)
    sin, cos, exp = (view.region(only(module, t)) for t in (aten.sin.default, aten.cos.default, aten.exp.default))
    assert sin == cos
    assert exp > cos


def test_dead_is_what_nothing_that_counts_uses() -> None:
    """A node that reaches no output and no mutation is dead, a whole branch of them too."""

    def build(g: fx.Graph, p: fx.Node) -> fx.Node:
        dead = g.call_function(aten.sin.default, (p,))
        g.call_function(aten.cos.default, (dead,))
        written = g.call_function(aten.exp.default, (p,))
        g.call_function(aten.copy_.default, (p, written))
        return g.call_function(aten.tanh.default, (p,))

    module = hand_written(build, torch.randn(2))
    view = View(module.graph)
    assert [
        view.ends_in(only(module, t), set(), set())
        for t in (aten.sin.default, aten.cos.default, aten.exp.default, aten.tanh.default)
    ] == [True, True, False, False]


def test_sizes_are_compared_without_guards() -> None:
    """Symbols that happen to be equal aren't known to be; and asking leaves no guard."""
    module = traced(lambda x, y: (x.sin(), y.sin()), torch.randn(5, 6), torch.randn(7, 6), mode="symbolic")
    x, y = (node.meta["val"] for node in module.graph.nodes if node.op == "placeholder")
    env = x.shape[0].node.shape_env
    before = len(env.guards)
    assert known_equal(x.shape[0], x.shape[0])
    assert not known_equal(x.shape[0], 5)
    assert not known_equal(x.shape[0], y.shape[0])
    assert known(x.shape[0] >= 2)
    assert not known(x.shape[0] > 3)
    assert same_sizes(x.shape[1:], y.shape[1:])
    assert not same_sizes(x.shape, y.shape)
    assert not same_sizes(x.shape, x.shape[:1])
    assert len(env.guards) == before


def test_nodes_are_found_in_nested_arguments() -> None:
    """Nodes in tuples of tuples are found, in order."""
    graph = fx.Graph()
    a, b = graph.placeholder("a"), graph.placeholder("b")
    assert list(nodes_in(((a, 1), ("x", (b, a))))) == [a, b, a]
