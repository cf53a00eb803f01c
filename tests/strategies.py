"""Hypothesis strategies: tensors of every stride, and what the shipped rules take."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from hypothesis import strategies as st
from torch import Tensor

Layout = Literal["contiguous", "transposed", "sliced", "expanded"]
Values = Literal["normal", "zeros", "integers", "large", "tiny"]

LAYOUTS: tuple[Layout, ...] = ("contiguous", "transposed", "sliced", "expanded")
VALUES: tuple[Values, ...] = ("normal", "zeros", "integers", "large", "tiny")
FLOATS = (torch.float32, torch.bfloat16, torch.float16)

layouts = st.sampled_from(LAYOUTS)
seeds = st.integers(0, 2**31)
sizes = st.sampled_from([1, 2, 3, 5, 8, 17, 33])


@dataclass(frozen=True, slots=True)
class Mask:
    """What hides scores: nothing, something to add in some dtype, or a bool tensor; and which of its dims are 1."""

    kind: Literal["none", "added", "bool"]
    single: tuple[bool, bool, bool]
    in_float32: bool


@dataclass(frozen=True, slots=True)
class Attention:
    """One way to write attention, and the sizes to run it with."""

    batch: int
    groups: int
    times: int
    rows: int
    columns: int
    width: int
    dtype: torch.dtype
    layouts: tuple[Layout, Layout, Layout]
    mask: Mask
    scaling: Literal["*", "/", "tensor", "none"]
    scale: float
    softmax_in_float32: bool
    seed: int


def tensor(
    shape: tuple[int, ...],
    dtype: torch.dtype,
    layout: Layout,
    seed: int,
    device: str = "cpu",
    values: Values = "normal",
) -> Tensor:
    """Return finite numbers of a shape and dtype, with strides of a kind."""
    generator = torch.Generator().manual_seed(seed)

    def numbers(*sizes: int) -> Tensor:
        drawn = torch.randn(*sizes, generator=generator)
        if values == "integers":
            drawn = drawn.mul(2).round()
        made = {"zeros": torch.zeros_like(drawn), "large": drawn * 100, "tiny": drawn * 1e-6}.get(values, drawn)
        return made.to(dtype).to(device)

    if layout == "transposed" and len(shape) > 1:
        return numbers(*shape[:-2], shape[-1], shape[-2]).transpose(-2, -1)
    if layout == "sliced" and shape:
        return numbers(*shape[:-1], 2 * shape[-1] + 1)[..., 1::2]
    if layout == "expanded" and shape:
        return numbers(1, *shape[1:]).expand(shape)
    return numbers(*shape)


@st.composite
def masks(draw: st.DrawFn) -> Mask:
    """Draw a mask of any kind, with any of its first three dims 1."""
    kind = draw(st.sampled_from(["none", "added", "bool"]))
    return Mask(kind, draw(st.tuples(st.booleans(), st.booleans(), st.booleans())), draw(st.booleans()))


@st.composite
def attentions(draw: st.DrawFn, *, grouped: bool) -> Attention:
    """Draw attention with plain heads, or with K and V that are repeated."""
    dtype = draw(st.sampled_from(FLOATS))
    small = st.sampled_from([1, 2, 3])
    scale = draw(st.floats(0.05, 0.9) | st.floats(1.1, 4.0))
    scalings = ["*", "/", "none", *(["tensor"] if dtype is not torch.float16 else [])]
    return Attention(
        batch=draw(small),
        groups=draw(small),
        times=draw(st.sampled_from([2, 3, 4])) if grouped else 1,
        rows=draw(sizes),
        columns=draw(sizes),
        width=draw(st.sampled_from([2, 3, 8, 16])),
        dtype=dtype,
        layouts=draw(st.tuples(layouts, layouts, layouts)),
        mask=draw(masks()),
        scaling=draw(st.sampled_from(scalings)),
        scale=scale,
        softmax_in_float32=draw(st.booleans()),
        seed=draw(seeds),
    )
