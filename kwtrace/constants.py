"""Constants and captured numbers of a graph, held against those of a pattern."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from kwtrace import derived
from kwtrace.matches import require
from kwtrace.normal import known, known_equal
from kwtrace.patterns import Capture, Hole
from kwtrace.values import same

_KINDS: dict[str, tuple[type, ...]] = {
    "int": (int, torch.SymInt),
    "float": (float, int, torch.SymFloat),
    "complex": (complex, float, int),
}
_EXACT_INTS = 2**53
SYMBOLIC = (torch.SymInt, torch.SymFloat, torch.SymBool)


def capture(hole: Hole, parameter: Capture, found: Any, owner: fx.Node) -> Any:
    """Return what a captured parameter is bound to: a number of its kind, or the node of a symbolic one.

    Raises:
        Mismatch: if there is something else in its place, or a value that has a variant of its own.

    """
    read = _symbolic_capture if isinstance(found, fx.Node) else _capture
    value = read(hole, parameter.kind, found, owner)
    compared = value.meta["val"] if isinstance(value, fx.Node) else value
    ordinary = not any(_may_be(compared, special) for special in parameter.special)
    require(ordinary, 2, owner, lambda: f"{hole.name}: expected none of {parameter.special}, found {compared!r}")
    return value


def _may_be(value: Any, special: Any) -> bool:
    """Tell whether a captured value is, or can't be proved not to be, a special one, whatever the sign of zero."""
    if isinstance(value, SYMBOLIC):
        return not known(value != special)
    return bool(value == special) or same(value, special)


def _symbolic_capture(hole: Hole, kind: str, found: fx.Node, owner: fx.Node) -> fx.Node:
    value = found.meta.get("val")
    law = 4 if isinstance(value, torch.Tensor) else 2
    fits = hole.function == "same" and isinstance(value, _KINDS[kind])
    require(fits, law, owner, lambda: f"{hole.name}: expected a {kind}, found {found} = {value!r}")
    return found


def _capture(hole: Hole, kind: str, found: Any, owner: fx.Node) -> Any:
    is_number = isinstance(found, int | float | complex) and not isinstance(found, bool)
    require(is_number, 2, owner, lambda: f"{hole.name}: expected a {kind}, found {found!r}")
    value = derived.invert(hole, found, kind)
    fits = isinstance(value, _KINDS[kind])
    require(fits, 2, owner, lambda: f"{hole.name}: expected a {kind}, found {found!r}")
    if kind == "int" or not isinstance(value, int):
        return value
    exact = abs(value) <= _EXACT_INTS and _yields_floats(owner)
    require(exact, 2, owner, lambda: f"{hole.name}: expected a {kind}, found the int {found!r}")
    return float(value) if kind == "float" else complex(value)


def _yields_floats(owner: fx.Node) -> bool:
    """Tell whether a node yields floats, for which an int operand is the float of the same value."""
    result = owner.meta.get("val")
    return isinstance(result, torch.Tensor) and (result.dtype.is_floating_point or result.dtype.is_complex)


def is_float(value: Any) -> bool:
    """Tell whether a size expression's value is a float."""
    return isinstance(value, float | torch.SymFloat)


def is_size(value: Any) -> bool:
    """Tell whether a value can be what a size expression yields."""
    return isinstance(value, int | float | torch.SymInt | torch.SymFloat) and not isinstance(value, bool)


def same_constant(wanted: Any, found: Any) -> bool:
    """Tell whether a graph has the constant that a pattern wants, by type and value."""
    if isinstance(found, torch.SymInt):
        return type(wanted) is int and known_equal(found, wanted)
    return not isinstance(found, SYMBOLIC) and same(wanted, found)
