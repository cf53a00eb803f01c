"""Numbers that a graph holds in place of a captured one: ``1/x`` where the rule was given ``x``."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from kwtrace.patterns import Hole
from kwtrace.values import same

Function = Callable[[Any], Any]


def find_hole(name: str, inputs: tuple[Any, Any], outputs: tuple[Any, Any]) -> Hole | None:
    """Return the hole that turns both ``inputs`` into ``outputs``, exactly, or None."""
    for hole in _candidates(name, inputs, outputs):
        if all(_gives(hole, x, y) for x, y in zip(inputs, outputs, strict=True)):
            return hole
    return None


def evaluate(hole: Hole, value: Any) -> Any:
    """Return the number that stands in the graph where the parameter is ``value``."""
    return _FORWARD[hole.function](value, hole.constant)


def invert(hole: Hole, value: Any, kind: str) -> Any:
    """Return the parameter's value, of type ``kind``, for which the graph holds ``value``; None if none is exact."""
    if hole.function == "same":
        return value
    try:
        guess = _BACKWARD[hole.function](value, hole.constant)
        guesses = [round(guess)] if kind == "int" else _neighbours(guess)
        return next((x for x in guesses if _gives(hole, x, value)), None)
    except (ArithmeticError, ValueError, TypeError):
        return None


_FORWARD: dict[str, Callable[[Any, Any], Any]] = {
    "same": lambda x, _: x,
    "negative": lambda x, _: -x,
    "reciprocal": lambda x, _: 1 / x,
    "complement": lambda x, _: 1 - x,
    "square": lambda x, _: x * x,
    "square_root": lambda x, _: math.sqrt(x),
    "inverse_square_root": lambda x, _: 1 / math.sqrt(x),
    "as_float": lambda x, _: float(x),
    "multiple": lambda x, c: x * c,
    "sum": lambda x, c: x + c,
}
_BACKWARD: dict[str, Callable[[Any, Any], Any]] = {
    "negative": lambda y, _: -y,
    "reciprocal": lambda y, _: 1 / y,
    "complement": lambda y, _: 1 - y,
    "square": lambda y, _: math.sqrt(y),
    "square_root": lambda y, _: y * y,
    "inverse_square_root": lambda y, _: 1 / (y * y),
    "as_float": lambda y, _: int(y),
    "multiple": lambda y, c: y // c if isinstance(y, int) else y / c,
    "sum": lambda y, c: y - c,
}


def _candidates(name: str, inputs: tuple[Any, Any], outputs: tuple[Any, Any]) -> list[Hole]:
    plain = [Hole(name, function) for function in _FORWARD if function not in ("multiple", "sum")]
    (x, _), (y, _) = inputs, outputs
    if isinstance(y, bool) or not isinstance(y, int | float) or not isinstance(x, int | float) or x == 0:
        return plain
    if isinstance(y, int) and isinstance(x, int):
        factors = [y // x] if y % x == 0 else []
        return plain + [Hole(name, "multiple", c) for c in factors] + [Hole(name, "sum", y - x)]
    factor, term = y / x, y - x
    return (
        plain
        + [Hole(name, "multiple", c) for c in _neighbours(factor)]
        + [Hole(name, "sum", c) for c in _neighbours(term)]
    )


def _gives(hole: Hole, x: Any, y: Any) -> bool:
    try:
        return same(evaluate(hole, x), y)
    except (ArithmeticError, ValueError, TypeError):
        return False


def _neighbours(value: Any) -> list[Any]:
    if not isinstance(value, float) or not math.isfinite(value):
        return [value]
    shorter = [float(f"{value:.{digits}g}") for digits in (3, 6, 12)]
    above, below = math.nextafter(value, math.inf), math.nextafter(value, -math.inf)
    return [*shorter, value, above, below, math.nextafter(above, math.inf), math.nextafter(below, -math.inf)]
