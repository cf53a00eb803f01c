"""Small operators for the rules under test, registered under ``torch.ops.kwtrace_toys``."""

from __future__ import annotations

import torch
from torch import Tensor


@torch.library.custom_op("kwtrace_toys::act", mutates_args=())
def act(x: Tensor, *, negate: bool = False, mode: str = "none", out_dtype: torch.dtype | None = None) -> Tensor:
    """Return ``x``, doubled in mode ``"twice"``, negated if ``negate``, in ``out_dtype``."""
    y = x * 2 if mode == "twice" else x.clone()
    y = -y if negate else y
    return y if out_dtype is None else y.to(out_dtype, copy=True)


@torch.library.custom_op("kwtrace_toys::relu_act", mutates_args=())
def relu_act(x: Tensor, *, negate: bool = False, mode: str = "none", out_dtype: torch.dtype | None = None) -> Tensor:
    """Return `act` of the relu of ``x``, in one operator."""
    return act(torch.relu(x), negate=negate, mode=mode, out_dtype=out_dtype)


@torch.library.custom_op("kwtrace_toys::scaled", mutates_args=())
def scaled(x: Tensor, *, scale: float) -> Tensor:
    """Return relu of ``x`` times ``scale``."""
    return torch.relu(x) * scale


@torch.library.custom_op("kwtrace_toys::joined", mutates_args=())
def joined(x: Tensor, y: Tensor | None = None, *, heads: int = 1) -> Tensor:
    """Return a tensor like ``x``; what it computes is of no interest."""
    return x.clone()


@torch.library.custom_op("kwtrace_toys::observe", mutates_args=())
def observe(x: Tensor) -> None:
    """Return nothing."""


@act.register_fake
def _(x: Tensor, *, negate: bool = False, mode: str = "none", out_dtype: torch.dtype | None = None) -> Tensor:
    return torch.empty_like(x, dtype=out_dtype or x.dtype)


@relu_act.register_fake
def _(x: Tensor, *, negate: bool = False, mode: str = "none", out_dtype: torch.dtype | None = None) -> Tensor:
    return torch.empty_like(x, dtype=out_dtype or x.dtype)


@scaled.register_fake
def _(x: Tensor, *, scale: float) -> Tensor:
    return torch.empty_like(x)


@joined.register_fake
def _(x: Tensor, y: Tensor | None = None, *, heads: int = 1) -> Tensor:
    return torch.empty_like(x)


@observe.register_fake
def _(x: Tensor) -> None:
    return None
