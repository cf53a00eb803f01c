"""Operators for the cases from the field, registered under ``torch.ops.kwcases``, and a fused partner of each.

============= ================ =========================================
operator      fused partner    which is, to the bit
============= ================ =========================================
`rms`         `relu_rms`       ``rms(relu(x), w, eps)``
`quant`       `rms_quant`      ``quant(rms(x, w, eps), scale, ...)``
`gquant`      `rms_gquant`     ``gquant(rms(x, w, eps), group, ...)``
`qmm`         `qmm_relu`       ``relu(qmm(x1, x2, scale, ...))``
`act`         `add_act`        ``act(x + y, mode=mode)``
`rope`        `rms_rope`       ``rope(rms(q, w, eps), rms(k, w, eps), is_neox)``
============= ================ =========================================

`batch_norm` is the fused form of PyTorch's own batch norm in training. Every argument changes the result, so that a
value that is dropped or mixed up on the way shows.
"""

from __future__ import annotations

import zlib

import torch
from torch import Tensor
from torch.nn.functional import gelu

_LARGEST = 100
_SHIFT = 3


@torch.library.custom_op("kwcases::rms", mutates_args=())
def rms(x: Tensor, w: Tensor, eps: float) -> Tensor:
    """Return ``x`` [..., n] over the root of its mean square, times ``w`` [n], computed in float32."""
    return _rms(x, w, eps)


@torch.library.custom_op("kwcases::relu_rms", mutates_args=())
def relu_rms(x: Tensor, w: Tensor, eps: float) -> Tensor:
    """Return `rms` of the relu of ``x``."""
    return _rms(torch.relu(x), w, eps)


@rms.register_fake
@relu_rms.register_fake
def _(x: Tensor, w: Tensor, eps: float) -> Tensor:
    return x.new_empty(x.shape)


@torch.library.custom_op("kwcases::quant", mutates_args=())
def quant(x: Tensor, scale: Tensor, *, dtype: torch.dtype, sym: bool = True) -> Tensor:
    """Return ``x / scale``, shifted unless ``sym``, rounded and clamped, in ``dtype``."""
    return _quant(x, scale, dtype, sym)


@torch.library.custom_op("kwcases::rms_quant", mutates_args=())
def rms_quant(x: Tensor, w: Tensor, scale: Tensor, eps: float, *, dtype: torch.dtype, sym: bool = True) -> Tensor:
    """Return `quant` of `rms`."""
    return _quant(_rms(x, w, eps), scale, dtype, sym)


@quant.register_fake
def _(x: Tensor, scale: Tensor, *, dtype: torch.dtype, sym: bool = True) -> Tensor:
    return x.new_empty(x.shape, dtype=dtype)


@rms_quant.register_fake
def _(x: Tensor, w: Tensor, scale: Tensor, eps: float, *, dtype: torch.dtype, sym: bool = True) -> Tensor:
    return x.new_empty(x.shape, dtype=dtype)


@torch.library.custom_op("kwcases::gquant", mutates_args=())
def gquant(x: Tensor, group: int, *, ue8m0: bool, col_major: bool, tma: bool = False) -> tuple[Tensor, Tensor]:
    """Return ``x`` [m, n] over a scale per ``group`` columns, rounded, and the scales [m, n / group].

    Scales are powers of two if ``ue8m0``, transposed if ``col_major``, and stored twice if ``tma``.
    """
    return _gquant(x, group, ue8m0=ue8m0, col_major=col_major, tma=tma)


@torch.library.custom_op("kwcases::rms_gquant", mutates_args=())
def rms_gquant(
    x: Tensor, w: Tensor, eps: float, group: int, *, ue8m0: bool, col_major: bool, tma: bool = False
) -> tuple[Tensor, Tensor]:
    """Return `gquant` of `rms`."""
    return _gquant(_rms(x, w, eps), group, ue8m0=ue8m0, col_major=col_major, tma=tma)


@gquant.register_fake
def _(x: Tensor, group: int, *, ue8m0: bool, col_major: bool, tma: bool = False) -> tuple[Tensor, Tensor]:
    return _empty_groups(x, group, col_major=col_major, tma=tma)


@rms_gquant.register_fake
def _(
    x: Tensor, w: Tensor, eps: float, group: int, *, ue8m0: bool, col_major: bool, tma: bool = False
) -> tuple[Tensor, Tensor]:
    return _empty_groups(x, group, col_major=col_major, tma=tma)


for _name in ("qmm", "qmm_relu"):  # `torch.library.custom_op` takes no tensors by keyword
    torch.library.define(
        f"kwcases::{_name}", "(Tensor x1, Tensor x2, Tensor scale, *, Tensor? offset=None, Tensor? bias=None) -> Tensor"
    )


def qmm(x1: Tensor, x2: Tensor, scale: Tensor, *, offset: Tensor | None = None, bias: Tensor | None = None) -> Tensor:
    """Return ``(x1 @ x2 + offset) * scale + bias``: x1 [m, k], x2 [k, n], the others [n]."""
    result: Tensor = torch.ops.kwcases.qmm(x1, x2, scale, offset=offset, bias=bias)
    return result


def qmm_relu(
    x1: Tensor, x2: Tensor, scale: Tensor, *, offset: Tensor | None = None, bias: Tensor | None = None
) -> Tensor:
    """Return the relu of `qmm`."""
    result: Tensor = torch.ops.kwcases.qmm_relu(x1, x2, scale, offset=offset, bias=bias)
    return result


@torch.library.impl("kwcases::qmm", "CompositeExplicitAutograd")
def _(x1: Tensor, x2: Tensor, scale: Tensor, *, offset: Tensor | None = None, bias: Tensor | None = None) -> Tensor:
    return _qmm(x1, x2, scale, offset, bias)


@torch.library.impl("kwcases::qmm_relu", "CompositeExplicitAutograd")
def _(x1: Tensor, x2: Tensor, scale: Tensor, *, offset: Tensor | None = None, bias: Tensor | None = None) -> Tensor:
    return torch.relu(_qmm(x1, x2, scale, offset, bias))


@torch.library.register_fake("kwcases::qmm")
@torch.library.register_fake("kwcases::qmm_relu")
def _(x1: Tensor, x2: Tensor, scale: Tensor, *, offset: Tensor | None = None, bias: Tensor | None = None) -> Tensor:
    return x1.new_empty((x1.shape[0], x2.shape[1]))


@torch.library.custom_op("kwcases::act", mutates_args=())
def act(x: Tensor, *, mode: str = "none") -> Tensor:
    """Return an activation of ``x``; a ``mode`` that is no activation's name scales by a number of its own."""
    return _act(x, mode)


@torch.library.custom_op("kwcases::add_act", mutates_args=())
def add_act(x: Tensor, y: Tensor, *, mode: str = "none") -> Tensor:
    """Return `act` of ``x + y``."""
    return _act(x + y, mode)


@act.register_fake
def _(x: Tensor, *, mode: str = "none") -> Tensor:
    return x.new_empty(x.shape)


@add_act.register_fake
def _(x: Tensor, y: Tensor, *, mode: str = "none") -> Tensor:
    return (x + y).contiguous()


@torch.library.custom_op("kwcases::rope", mutates_args=())
def rope(q: Tensor, k: Tensor, is_neox: bool) -> tuple[Tensor, Tensor]:
    """Return ``q`` and ``k`` [..., s, d] turned by their position: halves if ``is_neox``, else neighbours."""
    return _rope(q, is_neox), _rope(k, is_neox)


@torch.library.custom_op("kwcases::rms_rope", mutates_args=())
def rms_rope(q: Tensor, k: Tensor, w: Tensor, eps: float, is_neox: bool) -> tuple[Tensor, Tensor]:
    """Return `rope` of `rms` of ``q`` and ``k``."""
    return _rope(_rms(q, w, eps), is_neox), _rope(_rms(k, w, eps), is_neox)


@rope.register_fake
def _(q: Tensor, k: Tensor, is_neox: bool) -> tuple[Tensor, Tensor]:
    return q.new_empty(q.shape), k.new_empty(k.shape)


@rms_rope.register_fake
def _(q: Tensor, k: Tensor, w: Tensor, eps: float, is_neox: bool) -> tuple[Tensor, Tensor]:
    return q.new_empty(q.shape), k.new_empty(k.shape)


@torch.library.custom_op("kwcases::batch_norm", mutates_args=())
def batch_norm(
    x: Tensor, w: Tensor, b: Tensor, mean: Tensor, var: Tensor, momentum: float, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Return batch norm of ``x`` [n, c, ...] in training, and the new running mean and variance [c]."""
    mean, var = mean.clone(), var.clone()
    y = torch.nn.functional.batch_norm(x, mean, var, w, b, training=True, momentum=momentum, eps=eps)
    return y.contiguous(), mean, var


@batch_norm.register_fake
def _(
    x: Tensor, w: Tensor, b: Tensor, mean: Tensor, var: Tensor, momentum: float, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    return x.new_empty(x.shape), mean.new_empty(mean.shape), var.new_empty(var.shape)


def _rms(x: Tensor, w: Tensor, eps: float) -> Tensor:
    h = x.float()
    return (h * torch.rsqrt(h.square().mean(-1, keepdim=True) + eps) * w.float()).to(x.dtype).contiguous()


def _quant(x: Tensor, scale: Tensor, dtype: torch.dtype, sym: bool) -> Tensor:
    shifted = x.float() / scale + (0 if sym else _SHIFT)
    return shifted.round().clamp(-_LARGEST if dtype.is_signed else 0, _LARGEST).to(dtype, copy=True).contiguous()


def _gquant(x: Tensor, group: int, *, ue8m0: bool, col_major: bool, tma: bool) -> tuple[Tensor, Tensor]:
    groups = x.float().unflatten(-1, (-1, group))
    scales = groups.abs().amax(-1).clamp(min=1e-6) / _LARGEST
    scales = scales.log2().ceil().exp2() if ue8m0 else scales
    rounded = (groups / scales[..., None]).round().flatten(-2).to(x.dtype)
    scales = torch.cat([scales, scales], -1) if tma else scales
    return rounded.contiguous(), (scales.t() if col_major else scales).contiguous()


def _empty_groups(x: Tensor, group: int, *, col_major: bool, tma: bool) -> tuple[Tensor, Tensor]:
    rows, columns = x.shape[0], x.shape[1] // group * (2 if tma else 1)
    shape = (columns, rows) if col_major else (rows, columns)
    return x.new_empty(x.shape), x.new_empty(shape, dtype=torch.float32)


def _qmm(x1: Tensor, x2: Tensor, scale: Tensor, offset: Tensor | None, bias: Tensor | None) -> Tensor:
    y = x1 @ x2
    y = y if offset is None else y + offset
    y = y * scale
    return y if bias is None else y + bias


def _act(x: Tensor, mode: str) -> Tensor:
    if mode == "none":
        return x.clone(memory_format=torch.contiguous_format)
    if mode in ("gelu", "gelu_tanh"):
        return gelu(x, approximate="tanh" if mode == "gelu_tanh" else "none").contiguous()
    if mode in ("relu", "tanh", "sigmoid"):
        result: Tensor = getattr(torch, mode)(x)
        return result.contiguous()
    return (x * (1 + zlib.crc32(mode.encode()) % 1000 / 1000)).contiguous()


def _rope(x: Tensor, is_neox: bool) -> Tensor:
    half = x.shape[-1] // 2
    turns = torch.arange(x.shape[-2], dtype=torch.float32)[:, None] / (1 + torch.arange(half, dtype=torch.float32))
    h = x.float()
    first, second = (h[..., :half], h[..., half:]) if is_neox else (h[..., ::2], h[..., 1::2])
    turned = first * turns.cos() - second * turns.sin(), second * turns.cos() + first * turns.sin()
    return (torch.cat(turned, -1) if is_neox else torch.stack(turned, -1).flatten(-2)).to(x.dtype).contiguous()
