"""Kernels that take their scale as a plain float: a symbolic one is multiplied into an operand instead."""

from __future__ import annotations

_SCALED = {"aten._scaled_dot_product_flash_attention_for_cpu.default": ("scale", "query")}


def scaled_operand(target: str) -> tuple[str, str] | None:
    """Return the scale of the operator ``target``, and the operand that it may be multiplied into, if it has one."""
    return _SCALED.get(target)
