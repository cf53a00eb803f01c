"""Patterns → families: one skeleton and a table for all patterns that differ in constants only."""

from __future__ import annotations

import itertools
from collections.abc import Hashable, Iterable
from dataclasses import replace
from typing import Any

from kwtrace.patterns import MARKERS, Family, Hole, Pattern, Slot, map_leaves
from kwtrace.values import exact_key

BLANK = "*"
_MATCHED = ("device", "inputs", "search", "outputs")
_FACTORED = (*_MATCHED, "replacement")


def factor(patterns: Iterable[Pattern]) -> tuple[Family, ...]:
    """Group patterns into families, in the order in which they come."""
    groups: dict[Hashable, list[Pattern]] = {}
    for pattern in patterns:
        groups.setdefault(skeleton_key(pattern), []).append(pattern)
    return tuple(_family(group) for group in groups.values())


def skeleton_key(pattern: Pattern) -> Hashable:
    """Return what a family's patterns have in common: everything but constants."""
    names = tuple(name for name, _ in pattern.axes)
    return (names, _blanked(pattern, _FACTORED), *_unfactored(pattern))


def search_key(pattern: Pattern) -> Hashable:
    """Return a key that is equal for patterns that match the same graphs."""
    return (_blanked(pattern, _MATCHED), _exact(pattern, _MATCHED), *_unfactored(pattern))


def replacement_key(pattern: Pattern) -> Hashable:
    """Return a key that is equal for patterns that put the same graph in place."""
    return (_blanked(pattern, ("replacement",)), _exact(pattern, ("replacement",)))


def _unfactored(pattern: Pattern) -> tuple[Hashable, ...]:
    return (pattern.rule, pattern.dims, pattern.conditions, pattern.captures, pattern.priority)


def _blanked(pattern: Pattern, names: tuple[str, ...]) -> Hashable:
    return tuple(map_leaves(getattr(pattern, name), _blank) for name in names)


def _blank(leaf: Any) -> Any:
    if isinstance(leaf, Hole):
        return (leaf.name, leaf.function, exact_key(leaf.constant))
    return leaf if isinstance(leaf, MARKERS) else BLANK


def _exact(pattern: Pattern, names: tuple[str, ...]) -> Hashable:
    return tuple(exact_key(value) for value in _constants(pattern, names))


def _constants(pattern: Pattern, names: tuple[str, ...]) -> list[Any]:
    found: list[Any] = []

    def note(leaf: Any) -> Any:
        if not isinstance(leaf, MARKERS):
            found.append(leaf)
        return leaf

    for name in names:
        map_leaves(getattr(pattern, name), note)
    return found


def _family(group: list[Pattern]) -> Family:
    names = [name for name, _ in group[0].axes]
    axes = list(zip(*([value for _, value in pattern.axes] for pattern in group), strict=True))
    vectors = list(zip(*(_constants(pattern, _FACTORED) for pattern in group), strict=True))
    columns = dict(zip(names, axes, strict=True))
    places = _places(columns, vectors)
    columns |= {name: vector for name, vector in zip(places, vectors, strict=True) if name is not None}
    columns = {name: vector for name, vector in columns.items() if _varies(vector)}
    rows = tuple(zip(*columns.values(), strict=True)) if columns else ((),)
    return Family(_skeleton(group[0], places, columns), tuple(columns), rows)


def _places(axes: dict[str, tuple[Any, ...]], vectors: list[tuple[Any, ...]]) -> list[str | None]:
    """Name each place that varies: after the axis that has the same values there, or ``c0``, ``c1``, ..."""
    known = {exact_key(vector): name for name, vector in reversed(axes.items())}
    taken = set(axes)
    names: list[str | None] = []
    for vector in vectors:
        key = exact_key(vector)
        if _varies(vector) and key not in known:
            name = next(f"c{i}" for i in itertools.count() if f"c{i}" not in taken)
            taken.add(name)
            known[key] = name
        names.append(known[key] if _varies(vector) else None)
    return names


def _varies(vector: tuple[Any, ...]) -> bool:
    return len({exact_key(value) for value in vector}) > 1


def _skeleton(pattern: Pattern, places: list[str | None], columns: dict[str, Any]) -> Pattern:
    remaining = iter(places)

    def slot(leaf: Any) -> Any:
        if isinstance(leaf, MARKERS):
            return leaf
        place = next(remaining)
        return leaf if place is None else Slot(place)

    changed = {name: map_leaves(getattr(pattern, name), slot) for name in _FACTORED}
    axes = tuple((name, Slot(name) if name in columns else value) for name, value in pattern.axes)
    return replace(pattern, axes=axes, **changed)
