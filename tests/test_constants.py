"""Captured numbers: what a parameter is bound to, and the values that it is never bound to."""

import math
from collections.abc import Callable
from typing import Annotated

import pytest
import torch
from graphs import calls, run_checked, traced
from torch import Tensor
from toys import scaled_exp

import kwtrace as kt
from kwtrace.domains import read_domain, samples

SPECIAL = (0.0, math.inf, math.nan)
ATEN = torch.ops.aten


@kt.rule(name="special", devices=("cpu",))
def rule(
    x: Annotated[Tensor, kt.Shape("m>1 n>1"), torch.float32],
    *,
    alpha: Annotated[float, kt.Captured(special=SPECIAL)],
) -> Tensor:
    """A captured number whose special values leave the graph as it is, but for the number."""
    return torch.exp(x) * alpha


@rule.replacement
def _(x: Tensor, *, alpha: float) -> Tensor:
    return scaled_exp(x, 0.5) if alpha in SPECIAL or math.isnan(alpha) else scaled_exp(x, alpha)


@pytest.fixture(scope="module")
def patterns() -> kt.PatternSet:
    """Return all variants."""
    return kt.trace(rule)


@pytest.fixture(scope="module")
def general(patterns: kt.PatternSet) -> kt.PatternSet:
    """Return the general variant alone."""
    families = [f for f in patterns.families if f.skeleton.captures]
    assert len(families) == 1
    return kt.PatternSet(tuple(families))


@pytest.mark.parametrize("value", [0.0, -0.0, math.inf, math.nan])
def test_the_general_variant_refuses_special_values(general: kt.PatternSet, value: float) -> None:
    """Even where nothing else matches, and whatever the sign of zero: they have a replacement of their own."""
    graph = traced(lambda x: torch.exp(x) * value, torch.randn(3, 4))
    assert kt.apply(graph, general).count == 0
    assert not calls(graph, torch.ops.kwtoys.scaled_exp.default)
    miss = kt.explain(graph, general).rules["special"].miss
    assert miss is not None
    assert miss.found.startswith("alpha: expected none of (0.0, inf, nan)")


@pytest.mark.parametrize("value", [0.25, -math.inf, 2, 1e-300])
def test_the_general_variant_takes_every_other_value(general: kt.PatternSet, value: float) -> None:
    """Others are bound and passed on, an int for a float too."""
    x = torch.randn(3, 4)
    graph = traced(lambda x: torch.exp(x) * value, x)
    assert kt.apply(graph, general).count == 1
    assert len(calls(graph, torch.ops.kwtoys.scaled_exp.default)) == 1
    assert torch.equal(run_checked(graph, x), torch.exp(x) * value)


@pytest.mark.parametrize("value", SPECIAL)
def test_a_special_value_is_taken_by_its_own_variant(patterns: kt.PatternSet, value: float) -> None:
    """Its own replacement is put in place, in whatever order the families stand."""
    x = torch.randn(3, 4)
    for families in (patterns.families, patterns.families[::-1]):
        graph = traced(lambda x: torch.exp(x) * value, x)
        report = kt.apply(graph, kt.PatternSet(families))
        assert list(report.fired["special"]) == [f"special[alpha={value!r}, device='cpu']"]
        assert torch.equal(run_checked(graph, x), torch.exp(x) * 0.5)


@pytest.mark.parametrize(("special", "fused"), [(1, True), (7, False)])
def test_a_symbolic_number_must_provably_be_none_of_them(special: int, fused: bool) -> None:
    """A size is at least 2, so it isn't 1; whether it is 7 can't be told, so it doesn't match, and adds no guard."""

    @kt.rule(name="sized", devices=("cpu",))
    def sized(
        x: Annotated[Tensor, kt.Shape("m>1 n>1"), torch.float32],
        *,
        k: Annotated[int, kt.Captured(special=(special,))],
    ) -> Tensor:
        return torch.exp(x) * k

    @sized.replacement
    def _(x: Tensor, *, k: int) -> Tensor:
        return torch.expm1(x) * k + k

    graph = traced(lambda x: torch.exp(x) * x.shape[0], torch.randn(3, 4), mode="symbolic")
    assert (kt.apply(graph, kt.trace(sized)).count == 1) is fused
    assert bool(calls(graph, ATEN.expm1.default)) is fused


@pytest.mark.parametrize("special", [(0.37,), (0.61,), (0.37, 0.38, 0.62)])
def test_a_rule_is_traced_with_none_of_its_special_values(special: tuple[float, ...]) -> None:
    """The examples that tracing uses keep clear of special values, which would lead to another graph."""

    @kt.rule(devices=("cpu",))
    def search(
        x: Annotated[Tensor, kt.Shape("n"), torch.float32],
        *,
        alpha: Annotated[float, kt.Captured(0.37, special=special)],
    ) -> Tensor:
        return x * alpha

    domain = read_domain(search)
    for sample in samples(domain, kt.Variant("search", (("device", "cpu"),))):
        assert sample["alpha"] not in domain.captured[0].special


@pytest.mark.parametrize("scale", [0.0, math.inf, -math.inf, math.nan])
@pytest.mark.parametrize("write", [lambda s, scale: s * scale, lambda s, scale: s / scale], ids=["*", "/"])
def test_attention_leaves_scales_alone_that_leave_no_scores(
    shipped: kt.PatternSet, scale: float, write: Callable[[Tensor, float], Tensor]
) -> None:
    """Fused kernels yield 0 where such scores make everything NaN: the shipped rules prune these values."""

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return torch.softmax(write(torch.matmul(q, k.transpose(-2, -1)), scale), -1) @ v

    graph = traced(attend, *(torch.randn(2, 3, 5, 8) for _ in range(3)))
    assert kt.apply(graph, shipped).count == 0
