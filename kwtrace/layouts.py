"""Kernels that want their inputs laid out in memory as the trace had them.

Torch chooses a fused attention kernel by the strides of its inputs, among others. A replacement that is traced ahead
was traced with contiguous inputs; where a match's inputs aren't laid out as the chosen kernel needs, they are copied.
"""

from __future__ import annotations

from typing import Any

import torch

from kwtrace.normal import known

_UNIT_STRIDE = {
    "aten._scaled_dot_product_flash_attention_for_cpu.default": frozenset({"query", "key", "value", "attn_mask"}),
}
"""Arguments whose last dim must be contiguous (``check_last_dim_stride_equals_1`` in torch's sdp_utils)."""


def must_copy(target: str, argument: str, value: Any) -> bool:
    """Tell whether an argument has to be made contiguous before the operator ``target`` can take it."""
    if argument not in _UNIT_STRIDE.get(target, ()) or not isinstance(value, torch.Tensor) or value.dim() == 0:
        return False
    return not known(value.stride(-1) == 1) and not known(value.shape[-1] == 1)
