"""Callables as the values of an axis: each is known by name, so that a generated package needs no rule's module."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from types import FunctionType
from typing import Any

from kwtrace.errors import RuleError
from kwtrace.operators import is_operator
from kwtrace.patterns import Named, callable_name
from kwtrace.values import is_constant

Function = Callable[..., Any]


def is_callable(value: Any) -> bool:
    """Tell whether a value of an axis is to be called, rather than a constant."""
    return callable(value) and not is_constant(value)


def by_name(functions: Sequence[Any], where: str) -> dict[Named, Function]:
    """Return the callables of an axis by name, in order; ``short`` is set where it tells them apart.

    Raises:
        RuleError: if one has no stable name, or two have one name.

    """
    for function in functions:
        if not _has_name(function):
            msg = (
                f"{where}: expected callables with a stable name in its domain, which are operators and functions at "
                f"the top level of a module, found {function!r}; write it as such a function."
            )
            raise RuleError(msg)
    counts = Counter(map(_short_name, functions))
    found: dict[Named, Function] = {}
    for function in functions:
        name, short = callable_name(function), _short_name(function)
        named = Named(name, short if counts[short] == 1 and short != name else None)
        if name in {other.name for other in found}:
            msg = f"{where}: expected callables with distinct names in its domain, found two called {name}; rename one."
            raise RuleError(msg)
        found[named] = function
    return found


def _has_name(function: Any) -> bool:
    if isinstance(function, FunctionType):
        return "<" not in function.__qualname__
    return is_operator(function)


def _short_name(function: Any) -> str:
    """Return the name less the module."""
    return callable_name(function).rpartition(":")[2]
