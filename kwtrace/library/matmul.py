"""The tutorial rule: a matmul and the activation after it, as one operator."""

from __future__ import annotations

from typing import Annotated, Literal

import torch
from torch import Tensor

import kwtrace as kt
from kwtrace.library import ops

T = kt.DTypes("T", torch.float32, torch.bfloat16)


@kt.rule
def mm_act(
    a: Annotated[Tensor, kt.Shape("m k>1"), T],
    b: Annotated[Tensor, kt.Shape("k n>1"), T],
    *,
    negate: bool,
    approximate: Literal["none", "tanh"],
    out_dtype: Annotated[torch.dtype | None, kt.OneOf(None, torch.float32, torch.float16)],
) -> Tensor:
    """Search for ``act(mm(a, b))``, with every combination of the activation's arguments."""
    result: Tensor = ops.act(torch.mm(a, b), negate=negate, approximate=approximate, out_dtype=out_dtype)
    return result


@mm_act.replacement
def _(a: Tensor, b: Tensor, *, negate: bool, approximate: str, out_dtype: torch.dtype | None) -> Tensor:
    result: Tensor = ops.mm_act(a, b, negate=negate, approximate=approximate, out_dtype=out_dtype)
    return result
