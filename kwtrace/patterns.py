"""Patterns, families and pattern sets: frozen data that knows no other module.

A search graph is a tuple of `Op`, each a call of an operator with *every* argument of its schema by name. A replacement
is a `Graph` of `Call`, each with the arguments as they are passed. Their arguments are constants, tuples, or one of the
markers below.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, is_dataclass, replace
from enum import Enum
from types import FunctionType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

Value = Any
"""A constant, a marker, or a tuple of values."""


@dataclass(frozen=True, slots=True)
class In:
    """The tensor bound to the rule's parameter ``name``."""

    name: str


@dataclass(frozen=True, slots=True)
class Ref:
    """The result of the `Op` or `Call` called ``name``."""

    name: str


@dataclass(frozen=True, slots=True)
class Size:
    """An int: a Python expression over the rule's dims."""

    expr: str


@dataclass(frozen=True, slots=True)
class Hole:
    """A captured number: ``function`` (see `kwtrace.derived`), and its constant, of the parameter ``name``."""

    name: str
    function: str = "same"
    constant: float | None = None


@dataclass(frozen=True, slots=True)
class Slot:
    """The value in ``column`` of the family's table."""

    column: str


@dataclass(frozen=True, slots=True)
class MatchDevice:
    """The device of the match's inputs, index and all."""


@dataclass(frozen=True, slots=True, repr=False)
class Named:
    """A callable that is the value of an axis, by its name; ``short`` is what variants show, if that is another.

    An operator is called ``namespace.name`` or ``namespace.name.overload``, a function ``module:qualname``.
    """

    name: str
    short: str | None = None

    def __repr__(self) -> str:
        """Return the name as variants show it."""
        return self.short or self.name


@dataclass(frozen=True, slots=True)
class Op:
    """One node of a search graph, in normal form."""

    name: str
    target: str
    args: tuple[tuple[str, Value], ...]


@dataclass(frozen=True, slots=True)
class Call:
    """One node of a replacement graph."""

    name: str
    target: str
    args: tuple[Value, ...]
    kwargs: tuple[tuple[str, Value], ...] = ()


@dataclass(frozen=True, slots=True)
class Graph:
    """A replacement graph, traced when generating."""

    calls: tuple[Call, ...]
    outputs: tuple[Value, ...]


@dataclass(frozen=True, slots=True)
class AtMatch:
    """A replacement that is traced at the match, with the match's own fake tensors."""


@dataclass(frozen=True, slots=True)
class Input:
    """A tensor parameter: its dtype and, per dim, a size expression; ``"h?"`` stands for 1 or ``h``."""

    name: str
    dtype: torch.dtype | Slot
    dims: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Dim:
    """A named size and the smallest value for which the pattern is proved."""

    name: str
    low: int = 2


@dataclass(frozen=True, slots=True)
class Output:
    """A tensor that the match yields: which value, and what it must look like."""

    value: Value
    dtype: torch.dtype | Slot
    dims: tuple[Value, ...]


@dataclass(frozen=True, slots=True)
class Capture:
    """A captured parameter: ``kind`` is the name of its type; ``special`` values have variants of their own."""

    name: str
    kind: str
    special: tuple[Value, ...] = ()


@dataclass(frozen=True, slots=True)
class Pattern:
    """One variant's trace in normal form, or, where a `Slot` stands in it, the skeleton of a family."""

    rule: str
    module: str
    device: str | Slot
    inputs: tuple[Input, ...]
    dims: tuple[Dim, ...]
    conditions: tuple[str, ...]
    captures: tuple[Capture, ...]
    search: tuple[Op, ...]
    outputs: tuple[Output, ...]
    replacement: Graph | AtMatch
    axes: tuple[tuple[str, Value], ...]
    priority: int = 0


@dataclass(frozen=True, slots=True)
class Variant:
    """One point of the product of a rule's axes."""

    rule: str
    axes: tuple[tuple[str, Value], ...]

    def __str__(self) -> str:
        """Return ``rule[axis=value, ...]``."""
        return f"{self.rule}[{', '.join(f'{name}={value!r}' for name, value in self.axes)}]"


@dataclass(frozen=True, slots=True)
class Family:
    """Patterns that share a skeleton: the skeleton and a table with one row per variant."""

    skeleton: Pattern
    columns: tuple[str, ...]
    rows: tuple[tuple[Value, ...], ...]

    @property
    def rule(self) -> str:
        """Return the name of the rule."""
        return self.skeleton.rule

    def variant(self, row: tuple[Value, ...]) -> Variant:
        """Return the variant that ``row`` stands for."""
        cells = dict(zip(self.columns, row, strict=True))
        axes = ((name, fill(value, cells)) for name, value in self.skeleton.axes)
        return Variant(self.rule, tuple(axes))


@dataclass(frozen=True, slots=True)
class PatternSet:
    """Families of any number of rules; equal content gives an equal ``digest`` in any process and any order."""

    families: tuple[Family, ...] = ()
    _digest: list[str] = field(default_factory=list, compare=False, repr=False)

    @property
    def rules(self) -> tuple[str, ...]:
        """Return the names of the rules, sorted."""
        return tuple(sorted({family.rule for family in self.families}))

    @property
    def variants(self) -> tuple[Variant, ...]:
        """Return every variant, in the order of the tables."""
        return tuple(family.variant(row) for family in self.families for row in family.rows)

    @property
    def digest(self) -> str:
        """Return a digest of the content."""
        if not self._digest:
            lines = sorted(exact_text(family) for family in self.families)
            self._digest.append(hashlib.sha256("\n".join(lines).encode()).hexdigest())
        return self._digest[0]

    def select(self, rule: str | None = None, **axes: Value) -> PatternSet:
        """Return the patterns of one rule, or those whose variants have the given axis values.

        A callable is selected by itself or by its `Named`.
        """
        kept = []
        for family in self.families:
            rows = tuple(row for row in family.rows if _selected(family.variant(row), rule, axes))
            if rows:
                kept.append(replace(family, rows=rows))
        return PatternSet(tuple(kept))

    def __or__(self, other: PatternSet) -> PatternSet:
        """Return the union; families that are in both stand in it once."""
        if not isinstance(other, PatternSet):
            return NotImplemented
        unique = {exact_text(family): family for family in (*self.families, *other.families)}
        return PatternSet(tuple(unique.values()))


def op(name: str, target: str, /, **args: Value) -> Op:
    """Return an `Op`, as generated modules write it."""
    return Op(name, target, tuple(args.items()))


def call(name: str, target: str, /, *args: Value, **kwargs: Value) -> Call:
    """Return a `Call`, as generated modules write it."""
    return Call(name, target, args, tuple(kwargs.items()))


MARKERS = (In, Ref, Size, Hole, Slot, MatchDevice, AtMatch)


def map_leaves(value: Value, leaf: Callable[[Value], Value]) -> Any:
    """Apply ``leaf`` to every constant and marker in a part of a pattern, in one fixed order."""
    if isinstance(value, tuple):
        return tuple(map_leaves(item, leaf) for item in value)
    if isinstance(value, Op):
        return replace(value, args=tuple((name, map_leaves(item, leaf)) for name, item in value.args))
    if isinstance(value, Call):
        kwargs = tuple((name, map_leaves(item, leaf)) for name, item in value.kwargs)
        return replace(value, args=map_leaves(value.args, leaf), kwargs=kwargs)
    if isinstance(value, Graph):
        return replace(value, calls=map_leaves(value.calls, leaf), outputs=map_leaves(value.outputs, leaf))
    if isinstance(value, Input):
        return replace(value, dtype=leaf(value.dtype))
    if isinstance(value, Output):
        return Output(leaf(value.value), leaf(value.dtype), map_leaves(value.dims, leaf))
    return leaf(value)


def exact_text(value: Value) -> str:
    """Return a text that two parts of patterns share exactly when they are equal in type and value, in any process."""
    if isinstance(value, tuple | list):
        return f"({', '.join(map(exact_text, value))})"
    if isinstance(value, Enum):
        return f"{type(value).__module__}.{type(value).__qualname__}.{value.name}"
    if is_dataclass(value) and not isinstance(value, type):
        parts = (exact_text(getattr(value, f.name)) for f in fields(value) if f.repr)
        return f"{type(value).__name__}({', '.join(parts)})"
    return repr(value)


def callable_name(value: Any) -> str:
    """Return the name of an operator, or of a function that has one."""
    if isinstance(value, FunctionType):
        return f"{value.__module__}:{value.__qualname__}"
    return str(getattr(value, "_opoverload", value))  # what torch.library.custom_op returns, and other operators


def fill(value: Value, cells: Mapping[str, Value]) -> Value:
    """Return ``value``, a part of a pattern, with every slot replaced by its cell."""
    return map_leaves(value, lambda leaf: cells[leaf.column] if isinstance(leaf, Slot) else leaf)


def _selected(variant: Variant, rule: str | None, axes: Mapping[str, Value]) -> bool:
    if rule is not None and variant.rule != rule:
        return False
    own = dict(variant.axes)
    return all(name in own and _is_value(own[name], value) for name, value in axes.items())


def _is_value(own: Value, wanted: Value) -> bool:
    if not isinstance(own, Named):
        return exact_text(own) == exact_text(wanted)
    if isinstance(wanted, Named):
        return wanted.name == own.name
    return callable(wanted) and callable_name(wanted) == own.name
