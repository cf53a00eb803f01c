"""Attacks that once succeeded: each was a wrong rewrite, and each is the case of a kind."""

import math
from collections.abc import Callable
from typing import Annotated

import pytest
import torch
from graphs import calls, traced
from torch import Tensor

import kwtrace as kt

F32 = torch.float32
Matrix = Annotated[Tensor, kt.Shape("m>1 n>1"), F32]
ATEN = torch.ops.aten


def attend(q: Tensor, k: Tensor, v: Tensor, factor: Tensor) -> Tensor:
    """Return attention whose scale is a tensor."""
    return torch.softmax(torch.matmul(q, k.transpose(-2, -1)) * factor, -1) @ v


@pytest.mark.parametrize(("dtype", "fused"), [(torch.float16, 0), (torch.bfloat16, 1), (F32, 1)])
def test_a_factor_is_not_multiplied_into_queries_of_float16(
    shipped: kt.PatternSet, dtype: torch.dtype, fused: int
) -> None:
    """The fused form multiplies the factor into q, which overflows in float16 where the scores fit."""
    q, k, v = torch.randn(1, 2, 8, 16) * 300, torch.randn(1, 2, 8, 16) * 0.001, torch.randn(1, 2, 8, 16)
    graph = traced(attend, *(x.to(dtype) for x in (q, k, v)), torch.tensor(1000.0))
    assert kt.apply(graph, shipped).count == fused


@pytest.mark.parametrize("times", [(2, 1), (1, 2)])
def test_a_replacement_that_is_declared_anew_is_traced_anew(
    monkeypatch: pytest.MonkeyPatch, times: tuple[int, int]
) -> None:
    """A rule of the same name with another replacement, as in a notebook, doesn't get the trace of the first."""
    x = torch.randn(3, 4)
    found = []
    for count in times:

        @kt.rule(name="declared_anew", devices=("cpu",))
        def rule(x: Matrix) -> Tensor:
            return x.relu().sigmoid()

        rule.replacement(at="match")(_once if count == 1 else _twice)
        monkeypatch.setitem(globals(), "declared_anew", rule)
        graph = traced(lambda x: x.relu().sigmoid(), x, mode="fake")
        assert kt.apply(graph, kt.trace(rule)).count == 1
        found.append(graph(x))
    for count, result in zip(times, found, strict=True):
        assert torch.equal(result, x.relu().sigmoid() * count)


def _once(x: Tensor) -> Tensor:
    return x.relu().sigmoid() * 1


def _twice(x: Tensor) -> Tensor:
    return x.relu().sigmoid() * 2


def two_draws(x: Tensor) -> Tensor:
    """Return ``x`` times the difference of two random tensors."""
    return x * torch.rand_like(x) - x * torch.rand_like(x)


def one_draw(x: Tensor) -> Tensor:
    """Return zeros, the slow way."""
    drawn = torch.rand_like(x)
    return x * drawn - x * drawn


@pytest.mark.parametrize(("function", "count"), [(two_draws, 1), (one_draw, 0)])
def test_two_draws_are_not_one(function: Callable[[Tensor], Tensor], count: int) -> None:
    """A pattern that draws twice doesn't match a graph that uses one draw twice."""

    @kt.rule(devices=("cpu",))
    def drawn(x: Matrix) -> Tensor:
        return two_draws(x)

    @drawn.replacement
    def _(x: Tensor) -> Tensor:
        return torch.rand_like(x) * 2 * x - x

    graph = traced(function, torch.randn(3, 4), mode="fake")
    assert kt.apply(graph, kt.trace(drawn)).count == count


@pytest.mark.parametrize("dim1", [-2, -3])
def test_a_dim_of_an_operator_that_adds_one_counts_from_its_result(dim1: int) -> None:
    """``diag_embed`` yields a dim more than it takes; dims from the end are those of what it yields."""

    @kt.rule(devices=("cpu",))
    def embedded(x: Matrix) -> Tensor:
        return torch.ops.aten.diag_embed.default(x, 0, -2, -1).exp()

    @embedded.replacement
    def _(x: Tensor) -> Tensor:
        return torch.ops.aten.diag_embed.default(x, 0, -2, -1).exp() * math.e / math.e

    graph = traced(lambda x: torch.ops.aten.diag_embed.default(x, 0, dim1, -1).exp(), torch.randn(4, 4))
    assert kt.apply(graph, kt.trace(embedded)).count == (dim1 == -2)
    assert len(calls(graph, ATEN.exp.default)) == 1
