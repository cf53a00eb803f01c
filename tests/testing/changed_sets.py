"""Near misses of a pattern set: every set that differs from one in a single leaf, or lacks an item of a tuple."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import fields, is_dataclass, replace
from enum import Enum
from typing import Any
from unittest import mock

from kwtrace import patterns
from kwtrace.patterns import PatternSet
from kwtrace.testing.constants import neighbours

Change = tuple[str, Any]


def changed_sets(whole: PatternSet) -> Iterator[tuple[str, PatternSet]]:
    """Yield, in words and made, every change of one leaf of one family."""
    for words, families in _changes("families", whole.families):
        yield words, PatternSet(families)


def _changes(words: str, value: Any) -> Iterator[Change]:
    if isinstance(value, tuple):
        yield from _changes_of_tuple(words, value)
    elif is_dataclass(value) and not isinstance(value, type):
        for field in fields(value):
            for inner, made in _changes(f"{words}.{field.name}", getattr(value, field.name)):
                yield inner, replace(value, **{field.name: made})
    elif value is None or isinstance(value, Enum):
        yield f"{words}: {value!r} → 0", 0
    else:
        for other in neighbours(value):
            yield f"{words}: {value!r} → {other!r}", other


def _changes_of_tuple(words: str, value: tuple[Any, ...]) -> Iterator[Change]:
    for place, item in enumerate(value):
        yield f"{words}: item {place} dropped", (*value[:place], *value[place + 1 :])
        for inner, made in _changes(f"{words}[{place}]", item):
            yield inner, (*value[:place], made, *value[place + 1 :])


def digest_without(name: str) -> AbstractContextManager[Any]:
    """Leave a field of a family or pattern out of digests."""
    real = patterns.exact_text

    def weak(value: Any) -> str:
        if is_dataclass(value) and not isinstance(value, type) and any(f.name == name for f in fields(value)):
            parts = (patterns.exact_text(getattr(value, f.name)) for f in fields(value) if f.repr and f.name != name)
            return f"{type(value).__name__}({', '.join(parts)})"
        return real(value)

    return _digest_by(weak)


def digest_without_types() -> AbstractContextManager[Any]:
    """Let digests see numbers by their value only."""
    real = patterns.exact_text

    def weak(value: Any) -> str:
        whole = isinstance(value, bool) or (isinstance(value, float) and value.is_integer())
        return repr(int(value)) if whole else real(value)

    return _digest_by(weak)


def _digest_by(weak: Callable[[Any], str]) -> AbstractContextManager[Any]:
    return mock.patch.object(patterns, "exact_text", weak)
