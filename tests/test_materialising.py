"""Size expressions written into graphs: ints where the graph is static, nodes where it isn't."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any

import pytest
import torch
from graphs import assert_as_exact, calls, run_checked, traced
from torch import Tensor
from toys import F32, flat_expm1

import kwtrace as kt


def rule_of(replacement: Callable[[Tensor], Tensor]) -> kt.PatternSet:
    """Return a rule that searches for ``exp(x) - 1`` and puts ``replacement`` in its place."""

    def search(x: Annotated[Tensor, kt.Shape("m>1 n>1"), F32]) -> Tensor:
        return torch.exp(x) - 1

    rule = kt.rule(name="sized", devices=("cpu",))(search)
    rule.replacement(replacement)
    return kt.trace(rule)


REPLACEMENTS: dict[str, Callable[[Tensor], Tensor]] = {
    "a product": lambda x: flat_expm1(x.reshape(-1)).view(x.shape),
    "a sum": lambda x: flat_expm1(torch.cat([x, x]))[: x.shape[0]] + torch.zeros(x.shape[0] + x.shape[1])[: x.shape[1]],
    "a difference": lambda x: flat_expm1(x) + torch.zeros(x.shape[0] * x.shape[1] - x.shape[1]).sum(),
    "a quotient": lambda x: flat_expm1(x) + torch.zeros((x.shape[0] * x.shape[1]) // 2).sum(),
    "a new tensor": lambda x: flat_expm1(x) * torch.full((x.shape[0], x.shape[1]), 1.0),
    "a range": lambda x: flat_expm1(x) + torch.arange(x.shape[1]) * 0.0,
    "a size as a number": lambda x: flat_expm1(x) * (x.shape[0] / x.shape[0]) + 0 * x.shape[1],
    "an expanded view": lambda x: flat_expm1(x[None].expand(2, x.shape[0], x.shape[1]))[0],
}


@pytest.mark.parametrize("mode", ["real", "fake", "symbolic"])
@pytest.mark.parametrize("name", REPLACEMENTS)
def test_sizes_in_a_replacement_are_the_graph_s(name: str, mode: Any) -> None:
    """Whatever a replacement computes of its sizes, it is right at the sizes of the graph, and at others if dynamic."""
    x = torch.randn(5, 6)
    graph = traced(lambda x: torch.exp(x) - 1, x, mode=mode)
    assert kt.apply(graph, rule_of(REPLACEMENTS[name])).count == 1
    assert len(calls(graph, "kwtoys.flat_expm1.default")) == 1
    assert torch.equal(run_checked(graph, x), torch.exp(x) - 1)
    if mode == "symbolic":
        other = torch.randn(4, 9)
        assert torch.equal(graph(other), torch.exp(other) - 1)


def test_a_static_graph_gets_no_size_nodes() -> None:
    """Where sizes are ints they are written as ints."""
    graph = traced(lambda x: torch.exp(x) - 1, torch.randn(5, 6))
    kt.apply(graph, rule_of(REPLACEMENTS["a product"]))
    assert not calls(graph, torch.ops.aten.sym_size.int)


def test_a_factor_of_a_product_is_divided_out_in_the_graph() -> None:
    """A dim that the inputs have only in a product is computed from it."""

    def search(
        x: Annotated[Tensor, kt.Shape("g*n>1 d>1"), F32], y: Annotated[Tensor, kt.Shape("g>1 d"), F32]
    ) -> Tensor:
        times = x.shape[0] // y.shape[0]
        return torch.exp(x) + y[:, None, :].expand(y.shape[0], times, y.shape[1]).reshape(x.shape)

    rule = kt.rule(name="grouped", devices=("cpu",))(search)

    @rule.replacement
    def _(x: Tensor, y: Tensor) -> Tensor:
        times = x.shape[0] // y.shape[0]
        parts = (flat_expm1(x) + 1).view(y.shape[0], times, y.shape[1])
        return (parts + y[:, None, :]).view(x.shape)

    x, y = torch.randn(6, 5), torch.randn(2, 5)
    patterns = kt.trace(rule)
    graph = traced(search, x, y)
    assert kt.apply(graph, patterns).count == 1
    assert_as_exact(run_checked(graph, x, y), search(x, y), search(x.double(), y.double()))
