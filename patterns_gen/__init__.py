"""Patterns made by kwtrace, not to be edited; pass this module to kwtrace.options."""

from kwtrace.loading import Package

PATTERNS = Package(
    __name__,
    {
        'mm_act': 'kwtrace.library.matmul',
    },
)
