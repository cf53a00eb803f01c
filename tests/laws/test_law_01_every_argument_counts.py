"""Law 1: every argument counts, and spelling doesn't."""

from __future__ import annotations

from operator import getitem
from typing import Any

import pytest
import torch
from both_sides import assert_same, count, fires, refused
from graphs import hand_written, run_checked, traced
from rules_for_laws import Matrix, folded, sliced
from torch import Tensor, fx
from toys import scaled_add_rule, scaled_rule, topk_rule

import kwtrace as kt

aten = torch.ops.aten


@pytest.mark.parametrize(
    ("args", "kwargs"),
    [
        ((2,), {}),
        ((2, -1), {}),
        ((2, 1), {}),
        ((2, -1, True, True), {}),
        ((), {"k": 2}),
        ((2,), {"sorted": True, "dim": 1}),
        ((2,), {"largest": True}),
    ],
    ids=repr,
)
def test_spellings_of_equal_arguments_match_once(args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Defaults left out or given, by place or by keyword, and a dim counted from either end, are one thing."""
    assert count(topk_graph(args, kwargs), topk_rule) == 1


@pytest.mark.parametrize(
    ("args", "kwargs"),
    [
        ((3,), {}),
        ((2, 0), {}),
        ((2, -2), {}),
        ((2,), {"largest": False}),
        ((2,), {"sorted": False}),
        ((2, -1, False), {}),
    ],
    ids=repr,
)
def test_an_argument_that_differs_is_a_refusal(args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Every argument counts, those that the rule leaves to their defaults too."""
    module = topk_graph(args, kwargs)
    x = torch.randn(4, 4)
    expected = module(x)
    assert count(module, topk_rule) == 0
    assert all(torch.equal(a, b) for a, b in zip(run_checked(module, x), expected, strict=True))


def topk_graph(args: tuple[Any, ...], kwargs: dict[str, Any]) -> fx.GraphModule:
    """Write what `topk_rule` searches for, with ``topk`` called in some way."""

    def build(g: fx.Graph, p: fx.Node) -> tuple[fx.Node, ...]:
        top = g.call_function(aten.topk.default, (p, *args), kwargs)
        values, places = (g.call_function(getitem, (top, i)) for i in (0, 1))
        return g.call_function(aten.neg.default, (values,)), g.call_function(aten.add.Tensor, (places, 1))

    return hand_written(build, torch.randn(4, 4))


def test_an_extra_keyword_argument_is_a_refusal() -> None:
    """``add(..., alpha=2)`` isn't the ``add`` of the rule, whose alpha is 1; ``alpha=1`` is."""
    x, y = torch.randn(3, 4), torch.randn(3, 4)
    for alpha, wanted in ((1, 1), (2, 0), (1.0, 0)):
        module = hand_written(
            lambda g, p, q, a=alpha: g.call_function(
                aten.add.Tensor,
                (g.call_function(aten.mul.Tensor, (g.call_function(aten.exp.default, (p,)), 0.5)), q),
                {"alpha": a},
            ),
            x,
            y,
        )
        assert count(module, scaled_add_rule) == wanted
        assert torch.equal(run_checked(module, x, y), torch.add(torch.exp(x) * 0.5, y, alpha=int(alpha)))


SCALED: dict[str, Any] = {
    "by place": lambda g, e: g.call_function(aten.mul.Tensor, (e, 0.5)),
    "by keyword": lambda g, e: g.call_function(aten.mul.Tensor, (), {"self": e, "other": 0.5}),
    "one by keyword": lambda g, e: g.call_function(aten.mul.Tensor, (e,), {"other": 0.5}),
    "in another order": lambda g, e: g.call_function(aten.mul.Tensor, (), {"other": 0.5, "self": e}),
}


@pytest.mark.parametrize("spelled", SCALED.values(), ids=SCALED.keys())
def test_place_and_keyword_are_one_thing(spelled: Any) -> None:
    """A tensor and a captured number are found by place and by keyword alike."""
    x = torch.randn(3, 4)
    module = hand_written(lambda g, p: spelled(g, g.call_function(aten.exp.default, (p,))), x)
    fires(module, x, rule=scaled_rule)


@kt.rule(name="folded", devices=("cpu",))
def folded_rule(x: Matrix) -> Tensor:
    """A view whose size is a product of dims."""
    return torch.exp(x).reshape(x.shape[0] * x.shape[1]) + 1


@folded_rule.replacement
def _(x: Tensor) -> Tensor:
    return folded(x)


@kt.rule(name="sliced", devices=("cpu",))
def sliced_rule(x: Matrix) -> Tensor:
    """All columns but the first."""
    return torch.exp(x)[:, 1:] + 1


@sliced_rule.replacement
def _(x: Tensor) -> Tensor:
    return sliced(x)


def with_view(target: Any, size: list[int], x: Tensor) -> fx.GraphModule:
    """Write ``exp(x)``, viewed in a size, plus 1."""

    def build(g: fx.Graph, p: fx.Node) -> fx.Node:
        viewed = g.call_function(target, (g.call_function(aten.exp.default, (p,)), size))
        return g.call_function(aten.add.Tensor, (viewed, 1))

    return hand_written(build, x)


@pytest.mark.parametrize("target", [aten.view.default, aten.reshape.default, aten._unsafe_view.default], ids=str)
@pytest.mark.parametrize("size", [[12], [-1]], ids=str)
def test_a_size_of_minus_one_is_what_it_stands_for(target: Any, size: list[int]) -> None:
    """-1 and the size it stands for are one thing, in every spelling of a view."""
    x = torch.randn(3, 4)
    fires(with_view(target, size, x), x, rule=folded_rule)


@pytest.mark.parametrize("size", [[4, 3], [-1, 6], [1, 12], [12, 1]], ids=str)
def test_another_size_of_a_view_is_a_refusal(size: list[int]) -> None:
    """Another size of as many numbers is another argument."""
    x = torch.randn(3, 4)
    refused(with_view(aten.view.default, size, x), x, rule=folded_rule)


def with_slice(arguments: tuple[Any, ...], keywords: dict[str, Any], x: Tensor) -> fx.GraphModule:
    """Write ``exp(x)``, sliced, plus 1."""

    def build(g: fx.Graph, p: fx.Node) -> fx.Node:
        cut = g.call_function(aten.slice.Tensor, (g.call_function(aten.exp.default, (p,)), *arguments), keywords)
        return g.call_function(aten.add.Tensor, (cut, 1))

    return hand_written(build, x)


@pytest.mark.parametrize(
    ("arguments", "keywords"),
    [
        ((1, 1, 2**63 - 1), {}),
        ((1, 1, 5), {}),
        ((1, 1, 99, 1), {}),
        ((-1, 1), {}),
        ((-1, -4, None), {}),
        ((), {"dim": 1, "start": 1, "end": None}),
    ],
    ids=str,
)
def test_a_slice_end_past_the_size_is_the_size(arguments: tuple[Any, ...], keywords: dict[str, Any]) -> None:
    """Ends at, past, or without a number for the size are one thing, and so are starts counted from either end."""
    x = torch.randn(3, 5)
    fires(with_slice(arguments, keywords, x), x, rule=sliced_rule)


@pytest.mark.parametrize(
    "arguments", [(1, 0, 4), (1, 1, 4), (1, 2), (0, 1), (1, 1, -1), (1, 1, 99, 2), (-2, 1)], ids=str
)
def test_another_slice_is_a_refusal(arguments: tuple[Any, ...]) -> None:
    """Another dim, start, end or step is another slice, though some have the size of the rule's."""
    x = torch.randn(5, 5)
    refused(with_slice(arguments, {}, x), x, rule=sliced_rule)


@pytest.mark.parametrize("end", [None, 2**63 - 1])
def test_a_slice_without_end_is_found_in_a_dynamic_graph(end: int | None) -> None:
    """An end past every size is the size, where that is symbolic too."""
    x = torch.randn(5, 7)
    module = traced(lambda x: torch.exp(x)[:, 1:end] + 1, x, mode="symbolic")
    assert count(module, sliced_rule) == 1
    other = torch.randn(4, 3)
    assert_same(module(other), torch.exp(other)[:, 1:] + 1)


@pytest.mark.parametrize("end", [-1, 3])
def test_a_slice_with_another_end_is_refused_in_a_dynamic_graph(end: int) -> None:
    """An end that isn't known to be past the size isn't taken for it."""
    x = torch.randn(5, 7)
    module = traced(lambda x: torch.exp(x)[:, 1:end] + 1, x, mode="symbolic")
    assert count(module, sliced_rule) == 0
    other = torch.randn(4, 6)
    assert_same(module(other), torch.exp(other)[:, 1:end] + 1)
