"""Patterns made by kwtrace, not to be edited; pass this module to kwtrace.options."""

from kwtrace.loading import Package

PATTERNS = Package(
    __name__,
    {
        'attention': 'kwtrace.library.attention',
        'attention_grouped': 'kwtrace.library.attention',
        'mm_act': 'kwtrace.library.matmul',
    },
)
