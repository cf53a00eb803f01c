"""The two faults of the stock matcher that led to kwtrace: what it gets wrong, kwtrace leaves alone or gets right."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from graphs import assert_as_exact, calls, run_checked, targets, traced
from torch import Tensor, fx

import kwtrace as kt
import patterns_gen
from kwtrace.library import ops

SDPA = "scaled_dot_product"


def fused_attention(graph: fx.GraphModule | fx.Graph) -> list[str]:
    """Return the fused attention operators in a graph."""
    return [target for target in targets(graph) if SDPA in target]


def recorder(seen: list[str]) -> Callable[[fx.Graph], None]:
    """Return a pass that notes what operators a graph calls."""
    return lambda graph: seen.extend(targets(graph))


@pytest.mark.usefixtures("fresh_compiler")
@pytest.mark.parametrize(
    ("negate", "approximate", "out_dtype"),
    [
        c
        for c in itertools.product((False, True), ("none", "tanh"), (None, torch.float64))
        if c[2] is not None or c[:2] == (True, "tanh")
    ],
)
def test_an_omitted_keyword_argument_matches_no_other_value(
    negate: bool, approximate: str, out_dtype: torch.dtype | None
) -> None:
    """``evidence/swallow.py``: a pattern for the defaults must not swallow a call with other arguments."""
    defaults = patterns_gen_select(negate=False, approximate="none", out_dtype=None)
    seen: list[str] = []

    def user_code(a: Tensor, b: Tensor) -> Tensor:
        return ops.act(torch.mm(a, b), negate=negate, approximate=approximate, out_dtype=out_dtype)

    a, b = torch.randn(32, 16), torch.randn(16, 32)
    options = kt.options(defaults, post_grad_custom_pre_pass=recorder(seen))
    found = torch.compile(user_code, options=options)(a, b)
    expected = user_code(a, b)
    assert found.dtype is expected.dtype
    assert torch.equal(found, expected)
    assert "kwtrace.mm_act.default" not in seen
    assert "kwtrace.act.default" in seen


@pytest.mark.usefixtures("fresh_compiler")
def test_the_same_call_with_its_own_variant_is_fused_and_right() -> None:
    """Where a variant for the arguments exists it is that one which fires."""
    seen: list[str] = []

    def user_code(a: Tensor, b: Tensor) -> Tensor:
        return ops.act(torch.mm(a, b), negate=True, approximate="tanh", out_dtype=torch.float16)

    a, b = torch.randn(32, 16), torch.randn(16, 32)
    options = kt.options(patterns_gen, post_grad_custom_pre_pass=recorder(seen))
    assert torch.equal(torch.compile(user_code, options=options)(a, b), user_code(a, b))
    assert seen.count("kwtrace.mm_act.default") == 1
    assert "kwtrace.act.default" not in seen


def attention(dim: int) -> Callable[..., Tensor]:
    """Return hand-written attention that normalises over some dim."""

    def fn(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        scores = torch.matmul(q, k.transpose(-2, -1)).div(math.sqrt(q.shape[-1]))
        return scores.softmax(dim=dim).matmul(v)

    return fn


@pytest.mark.parametrize("mode", ["real", "symbolic"])
@pytest.mark.parametrize(("dim", "fires"), [(-1, 1), (3, 1), (-2, 0), (2, 0), (0, 0), (1, 0)])
def test_attention_over_another_dim_is_not_fused(shipped: kt.PatternSet, dim: int, fires: int, mode: Any) -> None:
    """``evidence/wrong_dim.py``: all sizes are equal here, so that only the dim tells the graphs apart."""
    q, k, v = (torch.randn(2, 8, 8, 8) for _ in range(3))
    graph = traced(attention(dim), q, k, v, mode=mode)
    assert kt.apply(graph, shipped).count == fires
    assert len(fused_attention(graph)) == fires
    assert len(calls(graph, "aten._softmax.default")) + len(calls(graph, "prims.exp.default")) <= 1
    exact = attention(dim)(q.double(), k.double(), v.double())
    assert_as_exact(run_checked(graph, q, k, v), attention(dim)(q, k, v), exact)


@pytest.mark.slow
@pytest.mark.usefixtures("fresh_compiler")
def test_attention_over_another_dim_through_torch_compile() -> None:
    """``evidence/wrong_dim.py`` as it stands, with kwtrace's patterns: dim -1 is fused, -2 isn't, both are right."""
    q, k, v = (torch.randn(2, 8, 8, 8) for _ in range(3))
    for dim, fused in ((-1, 1), (-2, 0)):
        seen: list[str] = []
        options = kt.options(patterns_gen, post_grad_custom_pre_pass=recorder(seen), pattern_matcher=False)
        with torch.no_grad():
            found = torch.compile(attention(dim), options=options)(q, k, v)
            expected = attention(dim)(q, k, v)
        assert sum(SDPA in target for target in seen) == fused
        assert_as_exact(found, expected, attention(dim)(q.double(), k.double(), v.double()))


def patterns_gen_select(**axes: Any) -> kt.PatternSet:
    """Return the shipped variants of the tutorial rule with some arguments."""
    from kwtrace.loading import as_pattern_set  # noqa: PLC0415 - the generated package is loaded when it is used

    return as_pattern_set(patterns_gen).select("mm_act", **axes)
