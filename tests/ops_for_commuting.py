"""Operators for rules about the order of operands and the spelling of an operator, under ``torch.ops.kwcommute``."""

from __future__ import annotations

import torch
from torch import Tensor


@torch.library.custom_op("kwcommute::add_mul", mutates_args=())
def add_mul(x: Tensor, y: Tensor, z: Tensor) -> Tensor:
    """Return ``(x + y) * z``."""
    return (x + y) * z


@torch.library.custom_op("kwcommute::weighed", mutates_args=())
def weighed(x: Tensor, y: Tensor, z: Tensor, *, weight: float) -> Tensor:
    """Return ``(x + y) * z * weight``; the fused partner of rules with a captured number or an axis."""
    return (x + y) * z * weight


@torch.library.custom_op("kwcommute::rms", mutates_args=())
def rms(x: Tensor, w: Tensor, eps: float) -> Tensor:
    """Return ``x`` [m, n] over the root of its mean square, times ``w`` [n]."""
    return written_out(x, w, eps)


@torch.library.custom_op("kwcommute::relu_rms", mutates_args=())
def relu_rms(x: Tensor, w: Tensor, eps: float) -> Tensor:
    """Return the relu of `rms`."""
    return torch.relu(written_out(x, w, eps))


@torch.library.custom_op("kwcommute::attend", mutates_args=())
def attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, scale: float) -> Tensor:
    """Return attention with an additive mask: q [b, h, s, d], k and v [b, h, t, d], mask [b, 1, s, t]."""
    return torch.softmax(q @ k.transpose(-2, -1) * scale + mask, -1) @ v


@add_mul.register_fake
def _(x: Tensor, y: Tensor, z: Tensor) -> Tensor:
    return torch.empty_like(z)


@weighed.register_fake
def _(x: Tensor, y: Tensor, z: Tensor, *, weight: float) -> Tensor:
    return torch.empty_like(z)


@rms.register_fake
@relu_rms.register_fake
def _(x: Tensor, w: Tensor, eps: float) -> Tensor:
    return torch.empty_like(x)


@attend.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, scale: float) -> Tensor:
    return torch.empty_like(q)


def written_out(x: Tensor, w: Tensor, eps: float) -> Tensor:
    """Return what `rms` does, in PyTorch's own operators."""
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps) * w
