"""Two traces with different captured values → one draft with holes in their places."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, is_dataclass, replace
from typing import Any

import sympy

from kwtrace.derived import find_hole
from kwtrace.errors import TraceError
from kwtrace.patterns import Hole, Variant
from kwtrace.rules import Rule
from kwtrace.values import same


@dataclass(frozen=True, slots=True)
class Places:
    """What two traces were given, to find captured numbers by their place."""

    rule: Rule
    variant: Variant
    given: tuple[Mapping[str, Any], ...]

    def find(self, first: Any, second: Any) -> Hole:
        """Return the hole for a place that holds ``first`` in one trace and ``second`` in the other.

        Raises:
            TraceError: if no captured parameter gives both.

        """
        for name in self.given[0]:
            inputs = (self.given[0][name], self.given[1][name])
            hole = None if same(*inputs) else find_hole(name, inputs, (first, second))
            if hole is not None:
                return hole
        msg = (
            f"Rule {self.rule.name}, variant {self.variant}: expected each number in the graph to be a literal or a "
            f"simple function of one captured parameter, found {first!r} for {self.given[0]} and {second!r} for "
            f"{self.given[1]}."
        )
        raise TraceError(msg)


def merge(left: Any, right: Any, places: Places) -> Any:
    """Return what two drafts have in common, with holes where captured numbers stand.

    Raises:
        TraceError: if they differ otherwise.

    """
    if isinstance(left, tuple) and isinstance(right, tuple) and len(left) == len(right):
        return tuple(merge(a, b, places) for a, b in zip(left, right, strict=True))
    if isinstance(left, frozenset) and left == right:
        return left
    if is_dataclass(left) and type(left) is type(right) and not isinstance(left, type):
        if not fields(left):
            return left
        merged = {f.name: merge(getattr(left, f.name), getattr(right, f.name), places) for f in fields(left)}
        return replace(left, **merged)
    if isinstance(left, int | float | complex) and isinstance(right, int | float | complex):
        return left if same(left, right) else places.find(left, right)
    if isinstance(left, sympy.Basic) and isinstance(right, sympy.Basic) and left == right:
        return left
    if not isinstance(left, tuple | frozenset | sympy.Basic) and same(left, right):
        return left
    msg = (
        f"Rule {places.rule.name}, variant {places.variant}: expected a graph whose structure doesn't depend on "
        f"captured values, found {left!r} for {places.given[0]} and {right!r} for {places.given[1]}; give such values "
        "in Captured(special=...)."
    )
    raise TraceError(msg)
