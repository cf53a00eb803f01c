"""Hand-written attention, plain and with grouped heads, into ``scaled_dot_product_attention``.

What is found: scores, scaled by ``*`` or ``/`` with a number, by a 0-d tensor (which is what ``dynamic=True`` makes of
a module's float), or not at all; an additive mask in the dtype of the scores or in float32, or a bool mask that
``masked_fill`` hides with; softmax over the last dim, in the dtype of the scores or in float32, which is one graph,
since torch computes a softmax of half types in float32; the cast back; the product with V.

Where the fused form differs from eager by design of ``scaled_dot_product_attention``: a row that is wholly hidden with
-inf yields 0 instead of NaN, and so do scores that a tensor, whose value is not known at the match, makes infinite.
"""

from __future__ import annotations

import math
from typing import Annotated, Any, Literal

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

import kwtrace as kt

T = kt.DTypes("T", torch.float32, torch.bfloat16, torch.float16)
M = kt.DTypes("M", torch.float32, torch.bfloat16, torch.float16)

Scale = Annotated[float, kt.Captured(special=(0.0, math.inf, -math.inf, math.nan))]
ScaleBy = Literal["*", "/", "none"]
Fill = Literal["-inf", "lowest"]


def is_wanted(
    T: torch.dtype, M: torch.dtype, mask: bool, hidden: bool, factor: bool, scale: Any, scale_by: str, fill: str
) -> bool:
    """Say which combinations exist: one mask and one scale at most, and no axis that changes nothing.

    A float16 score plus the lowest float16 is not the lowest float16 in the float32 that fused kernels compute in, so
    rows that are wholly hidden would differ: that combination is left out. So is a factor in float16, which the fused
    form multiplies into q, where it may overflow though the scores don't. So are scales that make scores infinite or
    NaN, where fused kernels yield 0 instead of NaN.
    """
    if isinstance(scale, float):
        return False
    if (mask and M not in (T, torch.float32)) or (mask and hidden):
        return False
    if factor and (scale_by != "none" or hidden or T is torch.float16):
        return False
    return fill != "lowest" or (hidden and T is not torch.float16)


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    hidden: Tensor | None,
    factor: Tensor | None,
    *,
    scale: float,
    scale_by: str,
    fill: str,
) -> Tensor:
    """Return attention as people write it out: q [b, h, s, d], k and v [b, h, t, d] → [b, h, s, d]."""
    scores = torch.matmul(q, k.transpose(-2, -1))
    if factor is not None:
        scores = scores * factor
    elif scale_by != "none":
        scores = scores * scale if scale_by == "*" else scores / scale
    if mask is not None:
        scores = scores + mask
    if hidden is not None:
        scores = scores.masked_fill(hidden, _fill_value(fill, q.dtype))
    weights = torch.softmax(scores, dim=-1, dtype=torch.float32).to(q.dtype)
    return torch.matmul(weights, v)


def attend_fused(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    hidden: Tensor | None,
    factor: Tensor | None,
    *,
    scale: float,
    scale_by: str,
    fill: str,
    grouped: bool,
) -> Tensor:
    """Return the same in one operator; with ``grouped``, k and v may have fewer heads than q.

    ``scale`` is of no account where ``scale_by`` is ``"none"``.
    """
    if hidden is not None:
        mask = torch.where(hidden, _fill_value(fill, q.dtype), 0.0).to(q.dtype)
    if factor is not None:
        q = q * factor
    number = 1.0 if scale_by == "none" else scale if scale_by == "*" else 1 / scale
    return scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=number, enable_gqa=grouped)


def repeat_heads(x: Tensor, times: Any) -> Tensor:
    """Return [b, g, t, d] with each head repeated: [b, g * times, t, d]."""
    b, g, t, d = x.shape
    return x[:, :, None, :, :].expand(b, g, times, t, d).reshape(b, g * times, t, d)


@kt.rule(where=is_wanted, unused=("scale",))
def attention(
    q: Annotated[Tensor, kt.Shape("b h s d>1"), T],
    k: Annotated[Tensor, kt.Shape("b h t d>1"), T],
    v: Annotated[Tensor, kt.Shape("b h t d>1"), T],
    mask: Annotated[Tensor | None, kt.Shape("b? h? s? t"), M],
    hidden: Annotated[Tensor | None, kt.Shape("b? h? s? t"), torch.bool],
    factor: Annotated[Tensor | None, kt.Shape(""), torch.float32],
    *,
    scale: Scale,
    scale_by: ScaleBy,
    fill: Fill,
) -> Tensor:
    """Search for attention whose k and v have as many heads as q."""
    return attend(q, k, v, mask, hidden, factor, scale=scale, scale_by=scale_by, fill=fill)


@attention.replacement(devices=("cpu",))
def _(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, hidden: Tensor | None, factor: Tensor | None,
    *, scale: float, scale_by: str, fill: str,
) -> Tensor:  # fmt: skip
    return attend_fused(q, k, v, mask, hidden, factor, scale=scale, scale_by=scale_by, fill=fill, grouped=False)


@attention.replacement(at="match", devices=("cuda",))
def _(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, hidden: Tensor | None, factor: Tensor | None,
    *, scale: float, scale_by: str, fill: str,
) -> Tensor:  # fmt: skip
    return attend_fused(q, k, v, mask, hidden, factor, scale=scale, scale_by=scale_by, fill=fill, grouped=False)


@kt.rule(where=is_wanted, unused=("scale",))
def attention_grouped(
    q: Annotated[Tensor, kt.Shape("b g*n>1 s d>1"), T],
    k: Annotated[Tensor, kt.Shape("b g t d>1"), T],
    v: Annotated[Tensor, kt.Shape("b g t d>1"), T],
    mask: Annotated[Tensor | None, kt.Shape("b? g*n? s? t"), M],
    hidden: Annotated[Tensor | None, kt.Shape("b? g*n? s? t"), torch.bool],
    factor: Annotated[Tensor | None, kt.Shape(""), torch.float32],
    *,
    scale: Scale,
    scale_by: ScaleBy,
    fill: Fill,
) -> Tensor:
    """Search for attention whose k and v are repeated to the heads of q."""
    times = q.shape[1] // k.shape[1]
    k, v = repeat_heads(k, times), repeat_heads(v, times)
    return attend(q, k, v, mask, hidden, factor, scale=scale, scale_by=scale_by, fill=fill)


@attention_grouped.replacement(devices=("cpu",))
def _(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, hidden: Tensor | None, factor: Tensor | None,
    *, scale: float, scale_by: str, fill: str,
) -> Tensor:  # fmt: skip
    return attend_fused(q, k, v, mask, hidden, factor, scale=scale, scale_by=scale_by, fill=fill, grouped=True)


@attention_grouped.replacement(at="match", devices=("cuda",))
def _(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, hidden: Tensor | None, factor: Tensor | None,
    *, scale: float, scale_by: str, fill: str,
) -> Tensor:  # fmt: skip
    return attend_fused(q, k, v, mask, hidden, factor, scale=scale, scale_by=scale_by, fill=fill, grouped=True)


def _fill_value(fill: str, dtype: torch.dtype) -> float:
    return -math.inf if fill == "-inf" else torch.finfo(dtype).min
