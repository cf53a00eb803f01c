"""Fusion rules for torch.compile, generated ahead of time: one exact pattern for every combination of arguments."""

from typing import TYPE_CHECKING, Any

from kwtrace.errors import ConflictError, KwtraceError, LoadError, RuleError, StaleError, TraceError
from kwtrace.patterns import Named, PatternSet, Variant
from kwtrace.reports import Report
from kwtrace.rules import Captured, DTypes, OneOf, Rule, Shape, rule
from kwtrace.using import apply, install, installed, options, stats, uninstall

if TYPE_CHECKING:
    from kwtrace.explaining import explain
    from kwtrace.explanations import Explanation, Miss, RuleExplanation
    from kwtrace.generating import GenerationReport, generate, trace
    from kwtrace.matches import Match

__version__ = "0.1.0"

__all__ = [
    "Captured",
    "ConflictError",
    "DTypes",
    "Explanation",
    "GenerationReport",
    "KwtraceError",
    "LoadError",
    "Match",
    "Miss",
    "Named",
    "OneOf",
    "PatternSet",
    "Report",
    "Rule",
    "RuleError",
    "RuleExplanation",
    "Shape",
    "StaleError",
    "TraceError",
    "Variant",
    "apply",
    "explain",
    "generate",
    "install",
    "installed",
    "options",
    "rule",
    "stats",
    "trace",
    "uninstall",
]

_LAZY = {
    "Explanation": "kwtrace.explanations",
    "GenerationReport": "kwtrace.generating",
    "Match": "kwtrace.matches",
    "Miss": "kwtrace.explanations",
    "RuleExplanation": "kwtrace.explanations",
    "explain": "kwtrace.explaining",
    "generate": "kwtrace.generating",
    "trace": "kwtrace.generating",
}


def __getattr__(name: str) -> Any:
    """Import what needs the tracer or the matcher only when it is asked for."""
    if name not in _LAZY:
        msg = f"module {__name__!r} has no attribute {name!r}"
        raise AttributeError(msg)
    from importlib import import_module

    return getattr(import_module(_LAZY[name]), name)
