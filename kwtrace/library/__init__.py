"""The rules that kwtrace ships."""

from kwtrace.library.attention import attention, attention_grouped
from kwtrace.library.matmul import mm_act

__all__ = ["attention", "attention_grouped", "mm_act"]
