"""Law 9: identities don't matter, on either side, and what only looks like one is none."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from both_sides import assert_same, count, fires, refused
from graphs import calls, hand_written, run_checked, targets, traced
from rules_for_laws import Matrix, declared
from torch import Tensor, fx
from toys import scaled_rule

aten = torch.ops.aten
SCALED = "kwtoys.scaled_exp.default"


def test_dead_users_hide_nothing() -> None:
    """A user whose result nothing uses, as decompositions leave behind, doesn't stand in the way."""

    def build(g: fx.Graph, p: fx.Node) -> fx.Node:
        inner = g.call_function(aten.exp.default, (p,))
        dead = g.call_function(aten.sin.default, (inner,))
        g.call_function(aten.cos.default, (dead,))
        return g.call_function(aten.mul.Tensor, (inner, 0.5))

    x = torch.randn(3, 4)
    module = hand_written(build, x)
    assert count(module, scaled_rule) == 1
    assert len(calls(module, SCALED)) == 1
    assert torch.equal(run_checked(module, x), torch.exp(x) * 0.5)
    assert count(module, scaled_rule) == 0


IDENTITIES: dict[str, Callable[[fx.Graph, fx.Node], fx.Node]] = {
    "alias": lambda g, n: g.call_function(aten.alias.default, (n,)),
    "alias by keyword": lambda g, n: g.call_function(aten.alias.default, (), {"self": n}),
    "detach": lambda g, n: g.call_function(aten.detach.default, (n,)),
    "clone": lambda g, n: g.call_function(aten.clone.default, (n,)),
    "contiguous clone": lambda g, n: g.call_function(
        aten.clone.default, (n,), {"memory_format": torch.contiguous_format}
    ),
    "preserving clone": lambda g, n: g.call_function(
        aten.clone.default, (n,), {"memory_format": torch.preserve_format}
    ),
    "view": lambda g, n: g.call_function(aten.view.default, (n, [3, 4])),
    "view with -1": lambda g, n: g.call_function(aten.view.default, (n, [-1, 4])),
    "unsafe view": lambda g, n: g.call_function(aten._unsafe_view.default, (n, [3, 4])),
    "reshape": lambda g, n: g.call_function(aten.reshape.default, (n, [3, -1])),
    "expand": lambda g, n: g.call_function(aten.expand.default, (n, [3, 4])),
    "expand with -1": lambda g, n: g.call_function(aten.expand.default, (n, [-1, -1])),
    "slice": lambda g, n: g.call_function(aten.slice.Tensor, (n, 0, 0, 9223372036854775807)),
    "slice to the size": lambda g, n: g.call_function(aten.slice.Tensor, (n, -1, None, 4)),
    "slice from below": lambda g, n: g.call_function(aten.slice.Tensor, (n, 1, -4, 9)),
    "slice by keyword": lambda g, n: g.call_function(aten.slice.Tensor, (n,), {"dim": 1, "step": 1}),
    "cast": lambda g, n: g.call_function(torch.ops.prims.convert_element_type.default, (n, torch.float32)),
    "permute": lambda g, n: g.call_function(aten.permute.default, (n, [0, 1])),
    "permute from the end": lambda g, n: g.call_function(aten.permute.default, (n, [-2, -1])),
}


@pytest.mark.parametrize("place", ["before", "between"])
@pytest.mark.parametrize("identity", IDENTITIES.values(), ids=IDENTITIES.keys())
def test_identities_hide_nothing(identity: Callable[..., fx.Node], place: str) -> None:
    """What leaves every value as it is may stand before a match and between its nodes."""

    def build(g: fx.Graph, p: fx.Node) -> fx.Node:
        source = identity(g, p) if place == "before" else p
        inner = g.call_function(aten.exp.default, (source,))
        inner = identity(g, inner) if place == "between" else inner
        return g.call_function(aten.mul.Tensor, (inner, 0.5))

    x = torch.randn(3, 4)
    module = hand_written(build, x)
    assert count(module, scaled_rule) == 1
    assert targets(module).count(SCALED) == 1
    assert torch.equal(run_checked(module, x), torch.exp(x) * 0.5)


NO_IDENTITIES: dict[str, Callable[[fx.Graph, fx.Node], fx.Node]] = {
    "flip": lambda g, n: g.call_function(aten.flip.default, (n, [0])),
    "permute": lambda g, n: g.call_function(aten.permute.default, (n, [1, 0])),
    "another dtype and back": lambda g, n: g.call_function(
        torch.ops.prims.convert_element_type.default,
        (g.call_function(torch.ops.prims.convert_element_type.default, (n, torch.bfloat16)), torch.float32),
    ),
    "view of another shape and back": lambda g, n: g.call_function(
        aten.view.default, (g.call_function(aten.permute.default, (n, [1, 0])), [4, 4])
    ),
    "roll": lambda g, n: g.call_function(aten.roll.default, (n, [1])),
    "shifted slice": lambda g, n: g.call_function(
        aten.slice.Tensor, (g.call_function(aten.cat.default, ([n, n],)), 0, 1, 5)
    ),
}


@pytest.mark.parametrize("change", NO_IDENTITIES.values(), ids=NO_IDENTITIES.keys())
def test_what_changes_values_between_two_nodes_is_a_refusal(change: Callable[..., fx.Node]) -> None:
    """Operations of the same shape and dtype that move or round values are no identities."""

    def build(g: fx.Graph, p: fx.Node) -> fx.Node:
        return g.call_function(aten.mul.Tensor, (change(g, g.call_function(aten.exp.default, (p,))), 0.5))

    x = torch.randn(4, 4)
    refused(hand_written(build, x), x.abs(), rule=scaled_rule)


TRACED: dict[str, Callable[[Tensor], Tensor]] = {
    "nothing": lambda x: x,
    "clone": lambda x: x.clone(),
    "contiguous clone": lambda x: x.clone(memory_format=torch.contiguous_format),
    "contiguous": lambda x: x.contiguous(),
    "detach": lambda x: x.detach(),
    "view": lambda x: x.view(x.shape),
    "reshape": lambda x: x.reshape(x.shape),
    "expand": lambda x: x.expand(x.shape),
    "expand by -1": lambda x: x.expand(-1, -1),
    "slices": lambda x: x[:, :],
    "cast": lambda x: x.to(torch.float32),
    "copying cast": lambda x: x.to(torch.float32, copy=True),
    "permute": lambda x: x.permute(0, 1),
    "dropout in eval": lambda x: torch.nn.functional.dropout(x, 0.5, training=False),
    "dead": lambda x: (x.cos().sum(), x)[1],
}


def scaled_with(identity: Callable[[Tensor], Tensor], place: str) -> Callable[..., Tensor]:
    """Return ``exp(x) * alpha``, with something that leaves values alone at a place."""

    def search(x: Matrix, *, alpha: float) -> Tensor:
        x = identity(x) if place == "before" else x
        y = torch.exp(x)
        y = identity(y) if place == "between" else y
        z = y * alpha
        return identity(z) if place == "after" else z

    return search


PLACES = ["before", "between", "after"]
SEARCHED = {
    (name, place): declared(
        scaled_with(identity, place), lambda x, *, alpha: torch.ops.kwtoys.scaled_exp(x, alpha), name="identical"
    )
    for name, identity in TRACED.items()
    for place in PLACES
}


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("name", TRACED)
def test_identities_in_the_search_function_ask_for_nothing(name: str, place: str) -> None:
    """A rule that is written with an identity matches a graph that has none, one that has it, and one with another."""
    x = torch.randn(3, 4)
    rule = SEARCHED[name, place]
    fires(traced(lambda x: torch.exp(x) * 0.5, x), x, rule=rule)
    fires(traced(lambda x: scaled_with(TRACED[name], "between")(x, alpha=0.5), x), x, rule=rule)
    fires(traced(lambda x: scaled_with(TRACED["clone"], "between")(x, alpha=0.5), x), x, rule=rule)


@pytest.mark.parametrize("place", ["before", "between"])
@pytest.mark.parametrize("name", TRACED)
def test_identities_in_a_graph_hide_nothing_from_a_rule_that_has_none(name: str, place: str) -> None:
    """A graph as torch traces it, with an identity before or between, is what the plain rule searches for."""
    x = torch.randn(3, 4)
    search = scaled_with(TRACED[name], place)
    fires(traced(lambda x: search(x, alpha=0.5), x), x, rule=scaled_rule)


@pytest.mark.parametrize("name", [name for name in TRACED if name != "dead"])
def test_identities_hide_nothing_in_a_dynamic_graph(name: str) -> None:
    """Where sizes are symbolic, what provably leaves values alone is looked through as well."""
    x = torch.randn(5, 7)
    module = traced(lambda x: scaled_with(TRACED[name], "between")(x, alpha=0.5), x, mode="symbolic")
    assert count(module, scaled_rule) == 1
    assert targets(module).count(SCALED) == 1
    other = torch.randn(4, 3)
    assert_same(module(other), torch.exp(other) * 0.5)


@pytest.mark.parametrize(
    "change",
    [
        lambda x: x.t(),
        lambda x: x.flip(0),
        lambda x: x.to(torch.bfloat16).to(torch.float32),
        lambda x: x.roll(1),
        lambda x: x.expand(4, 4).t().contiguous(),
        lambda x: torch.cat([x, x])[1:5],
        lambda x: torch.cat([x, x])[::2],
        lambda x: x.reshape(16).view(4, 4).t(),
    ],
    ids=["t", "flip", "rounded", "roll", "expand and t", "shifted", "every other", "view and t"],
)
@pytest.mark.parametrize("mode", ["real", "symbolic"])
def test_what_changes_values_in_the_search_function_is_asked_for(change: Callable[[Tensor], Tensor], mode: Any) -> None:
    """A graph of the same shape and dtype whose values move or are rounded isn't the plain rule's."""
    x = torch.randn(4, 4)
    module = traced(lambda x: change(torch.exp(x)) * 0.5, x, mode=mode)
    assert count(module, scaled_rule) == 0
    assert_same(module(x), change(torch.exp(x)) * 0.5)
