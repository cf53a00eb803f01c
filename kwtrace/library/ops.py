"""The operators of the tutorial rule: an activation, and a matmul fused with it.

Both are registered under ``torch.ops.kwtrace`` when this module is imported, for every device.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import gelu


@torch.library.custom_op("kwtrace::act", mutates_args=())
def act(x: Tensor, *, negate: bool = False, approximate: str = "none", out_dtype: torch.dtype | None = None) -> Tensor:
    """Return GELU of ``x``, negated if ``negate``, in ``out_dtype`` or the dtype of ``x``.

    ``approximate`` is ``"none"`` for the exact GELU or ``"tanh"``.
    """
    return _activate(x, negate, approximate, out_dtype)


@torch.library.custom_op("kwtrace::mm_act", mutates_args=())
def mm_act(
    a: Tensor, b: Tensor, *, negate: bool = False, approximate: str = "none", out_dtype: torch.dtype | None = None
) -> Tensor:
    """Return ``act`` of the product of ``a`` [m, k] and ``b`` [k, n], in one operator."""
    return _activate(torch.mm(a, b), negate, approximate, out_dtype)


@act.register_fake
def _(x: Tensor, *, negate: bool = False, approximate: str = "none", out_dtype: torch.dtype | None = None) -> Tensor:
    return torch.empty_like(x, dtype=out_dtype or x.dtype)


@mm_act.register_fake
def _(
    a: Tensor, b: Tensor, *, negate: bool = False, approximate: str = "none", out_dtype: torch.dtype | None = None
) -> Tensor:
    return a.new_empty((a.shape[0], b.shape[1]), dtype=out_dtype or a.dtype)


def _activate(x: Tensor, negate: bool, approximate: str, out_dtype: torch.dtype | None) -> Tensor:
    y = gelu(x, approximate=approximate)
    y = y.neg() if negate else y
    return y if out_dtype is None else y.to(out_dtype)
