"""Sizes of 1: where a draft is widened, where it isn't, and where a size gets a pattern of its own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any, Literal

import ops_for_tests as ops
import pytest
import torch
from torch import Tensor

import kwtrace as kt
from kwtrace.generation import generate_rule
from kwtrace.patterns import Family
from kwtrace.proving import describe_point, join_points
from kwtrace.tracing import Point

F32 = torch.float32
Two = Annotated[Tensor, kt.Shape("m n"), F32]
Tall = Annotated[Tensor, kt.Shape("m n>1"), F32]


def families_of(search: Callable[..., Any], replacement: Callable[..., Any]) -> tuple[Family, ...]:
    """Return the families of a rule for the CPU, every variant of which must be generated."""
    rule = kt.rule(devices=("cpu",))(search)
    rule.replacement(replacement)
    result = generate_rule(rule)
    assert result.failed == ()
    return result.families


def lows(family: Family) -> dict[str, int]:
    """Return the smallest size for which a family is proved, by dim."""
    return {dim.name: dim.low for dim in family.skeleton.dims}


def targets(family: Family) -> list[str]:
    """Return the names of the ops of a family's search graph."""
    return [op.name for op in family.skeleton.search]


def shapes(family: Family) -> dict[str, tuple[str, ...]]:
    """Return the shapes of a family's inputs."""
    return {given.name: given.dims for given in family.skeleton.inputs}


def same_as(x: Tensor) -> Tensor:
    """Stand for a fused op."""
    return ops.joined(x)


def relu_act_as(x: Tensor, *, mode: str) -> Tensor:
    """Stand for a fused op with a string."""
    return ops.relu_act(x, mode=mode)


def two_as(x: Tensor, y: Tensor) -> Tensor:
    """Stand for a fused op of two inputs."""
    return ops.joined(x, y)


def test_a_graph_that_is_the_same_at_1_is_widened() -> None:
    """Where size 1 gives the same graph, alone and together, one family holds from 1 on."""

    def search(x: Two) -> Tensor:
        return torch.relu(x) * 2

    (family,) = families_of(search, same_as)
    assert lows(family) == {"m": 1, "n": 1}


def test_a_dim_that_is_never_1_is_not_proved() -> None:
    """A dim marked ``n>1`` holds from 2 on, and costs no proof."""

    def search(x: Tall) -> Tensor:
        return torch.relu(x) * 2

    (family,) = families_of(search, same_as)
    assert lows(family) == {"m": 1, "n": 2}


def test_a_graph_that_differs_at_1_gets_a_pattern_of_its_own() -> None:
    """An expand to size 1 vanishes, so that the graph at 1 is another: a family in which the dim is 1."""

    def search(
        x: Annotated[Tensor, kt.Shape("b>1 d>1"), F32], y: Annotated[Tensor, kt.Shape("b>1 h d>1"), F32]
    ) -> Tensor:
        b, h, d = y.shape
        return torch.relu(x[:, None].expand(b, h, d)) + y

    found = {shapes(family)["y"]: family for family in families_of(search, lambda x, y: ops.joined(y, x))}
    assert set(found) == {("b", "h", "d"), ("b", "1", "d")}
    assert lows(found["b", "h", "d"]) == {"b": 2, "d": 2, "h": 2}
    assert lows(found["b", "1", "d"]) == {"b": 2, "d": 2}
    assert targets(found["b", "h", "d"]) == ["unsqueeze", "expand", "relu", "add"]
    assert targets(found["b", "1", "d"]) == ["unsqueeze", "relu", "add"]


def computes_else(x: Tensor) -> Tensor:
    """Be what a search function computes at some sizes only."""
    return torch.sigmoid(x)


def if_one(x: Tensor) -> bool:
    """Tell whether m is 1."""
    return x.shape[0] == 1


def if_one_and_long(x: Tensor) -> bool:
    """Tell whether m is 1 and n is large, which no retracing at one size of n sees."""
    return x.shape[0] == 1 and x.shape[1] > 100


def if_either(x: Tensor) -> bool:
    """Tell whether exactly one of the sizes is 1, which retracing with all at 1 doesn't see."""
    return (x.shape[0] == 1 and x.shape[1] != 1) or (x.shape[0] != 1 and x.shape[1] == 1)


def if_both(x: Tensor) -> bool:
    """Tell whether both sizes are 1, which retracing with one at 1 doesn't see."""
    return x.shape[0] == 1 and x.shape[1] == 1


@pytest.mark.parametrize("condition", [if_one, if_one_and_long])
def test_a_function_that_computes_something_else_at_1_is_never_widened(condition: Callable[[Tensor], bool]) -> None:
    """A branch on size 1, whatever else it asks for, keeps the general pattern from holding at 1."""

    def search(x: Tall) -> Tensor:
        return computes_else(x) if condition(x) else torch.relu(x)

    for family in families_of(search, same_as):
        if targets(family) == ["relu"] and shapes(family)["x"] == ("m", "n"):
            assert lows(family) == {"m": 2, "n": 2}


@pytest.mark.parametrize("condition", [if_one, if_one_and_long, if_either, if_both])
def test_the_general_pattern_never_holds_at_1_and_1_where_the_function_differs(
    condition: Callable[[Tensor], bool],
) -> None:
    """With two dims that may be 1, no pattern claims sizes for which the function computes something else."""

    def search(x: Two) -> Tensor:
        return computes_else(x) if condition(x) else torch.relu(x)

    check_claims(families_of(search, same_as), condition)


@pytest.mark.parametrize("condition", [if_one, if_one_and_long, if_either, if_both])
def test_a_variant_is_not_widened_because_another_one_is(condition: Callable[[Tensor], bool]) -> None:
    """What was proved for one variant isn't taken for granted for the next, which branches on its sizes."""

    def search(x: Two, *, mode: Literal["plain", "branching"]) -> Tensor:
        if mode == "branching" and condition(x):
            return ops.act(computes_else(x), mode=mode)
        return ops.act(torch.relu(x), mode=mode)

    families = families_of(search, relu_act_as)
    check_claims(
        [f for f in families if any(dict(f.variant(r).axes)["mode"] == "branching" for r in f.rows)], condition
    )


def check_claims(families: Any, condition: Callable[[Tensor], bool]) -> None:
    """Hold what each family claims against the search function at many sizes."""
    for m in (1, 2, 3, 200):
        for n in (1, 2, 3, 200):
            wanted = "sigmoid" if condition(torch.empty(m, n, device="meta")) else "relu"
            for family in families:
                sizes = zip(shapes(family)["x"], (m, n), strict=True)
                fits = all(size == 1 if dim == "1" else size >= lows(family)[dim] for dim, size in sizes)
                holds = all(eval(c, {}, {"m": m, "n": n}) for c in family.skeleton.conditions)  # noqa: S307 - of our own
                if fits and holds:
                    assert targets(family)[0] == wanted, f"m={m}, n={n}: {family}"


def test_an_optional_place_is_1_or_the_dim() -> None:
    """``h?`` is written down as such where both give the same graph."""

    def search(x: Annotated[Tensor, kt.Shape("h>1 n>1"), F32], y: Annotated[Tensor, kt.Shape("h? n>1"), F32]) -> Tensor:
        return torch.relu(x) + y

    (family,) = families_of(search, two_as)
    assert shapes(family) == {"x": ("h", "n"), "y": ("h?", "n")}


def test_an_optional_place_whose_graph_differs_is_two_patterns() -> None:
    """Where ``h?`` at 1 gives another graph, there is a pattern with 1 and one with the dim."""

    def search(x: Annotated[Tensor, kt.Shape("h>1 n>1"), F32], y: Annotated[Tensor, kt.Shape("h? n>1"), F32]) -> Tensor:
        return torch.relu(x) + y.expand(x.shape[0], x.shape[1])

    found = {shapes(family)["y"]: targets(family) for family in families_of(search, two_as)}
    assert found == {("h", "n"): ["relu", "add"], ("1", "n"): ["relu", "expand", "add"]}


def test_sizes_that_have_no_pattern_are_reported() -> None:
    """A size at which the function can't be traced is unmatched, and the result says which variant and size."""

    def search(x: Tall) -> Tensor:
        if x.shape[0] == 1:
            msg = "not at 1"
            raise ValueError(msg)
        return torch.relu(x) * 2

    rule = kt.rule(devices=("cpu",))(search)
    rule.replacement(same_as)
    result = generate_rule(rule)
    assert result.unmatched == (("search[device='cpu']", "m=1"),)
    assert [lows(family) for family in result.families] == [{"m": 2, "n": 2}]


def test_a_replacement_that_differs_at_1_keeps_the_pattern_from_1() -> None:
    """The replacement graph is proved as the search graph is."""

    def search(x: Tall) -> Tensor:
        return torch.relu(x) * 2

    def replacement(x: Tensor) -> Tensor:
        return ops.act(ops.joined(x)) if x.shape[0] == 1 else ops.joined(x)

    found = {}
    for family in families_of(search, replacement):
        assert not isinstance(family.skeleton.replacement, str)
        found[shapes(family)["x"]] = len(family.skeleton.replacement.calls)  # type: ignore[union-attr]
        assert "m" not in lows(family) or lows(family)["m"] == 2
    assert found == {("m", "n"): 1, ("1", "n"): 2}


def test_points_are_joined_and_described() -> None:
    """Points join to the point at which everything is 1 that is 1 in one of them; in words they are sorted."""
    points = [Point(dims=frozenset({"s"})), Point(places=frozenset({("mask", 0)})), Point(dims=frozenset({"b"}))]
    joined = join_points(points)
    assert joined == Point(frozenset({"b", "s"}), frozenset({("mask", 0)}))
    assert describe_point(joined) == "b=1, s=1, mask.0=1"
    assert join_points([]) == Point()
