"""Hypothesis strategies for what the generating side writes down: constants, patterns and families of them."""

from __future__ import annotations

import keyword
import math
from collections.abc import Sequence
from dataclasses import replace
from enum import Enum, Flag, IntEnum
from typing import Any

import torch
from hypothesis import strategies as st

from kwtrace.patterns import (
    AtMatch,
    Call,
    Capture,
    Dim,
    Family,
    Graph,
    Hole,
    In,
    Input,
    MatchDevice,
    Op,
    Output,
    Pattern,
    Ref,
    Size,
    fill,
)


class Colour(Enum):
    """An Enum with an alias and values that are no Python text."""

    RED = object()
    BLUE = "blue"
    AZURE = "blue"  # noqa: PIE796 - an alias


class Number(IntEnum):
    """An Enum whose members equal ints."""

    ONE = 1
    TWO = 2


class Word(str, Enum):
    """An Enum whose members equal strings."""

    NONE = "none"


class Option(Flag):
    """A Flag, whose combinations have no name of their own."""

    A = 1
    B = 2


class Outer:
    """A class with an Enum in it."""

    class Inner(Enum):
        """An Enum within a class."""

        X = 1


DTYPES = (torch.float32, torch.bfloat16, torch.bool, torch.int64, torch.complex64, torch.float8_e4m3fn)
MEMBERS = (Colour.RED, Colour.AZURE, Number.ONE, Word.NONE, Option.A, Option.A | Option.B, Outer.Inner.X)
floats = st.floats() | st.sampled_from([0.0, -0.0, math.nan, -math.nan, math.inf, -math.inf, 5e-324, 1e308])
numbers = st.booleans() | st.integers() | floats | st.builds(complex, floats, floats)
texts = st.text() | st.sampled_from(
    ["'", '"', "\n", "\\", "'\"", "\r\n", "'''\"\"\"", "\0", "ü", "{x}", "\u2028", "none"]
)
plain_constants = (
    numbers
    | texts
    | st.none()
    | st.sampled_from(DTYPES)
    | st.sampled_from([torch.strided, torch.sparse_coo, torch.channels_last, torch.contiguous_format])
    | st.sampled_from(["cpu", "cuda", "cuda:1", "meta"]).map(torch.device)
)
"""What can stand in a graph, one value of it."""
constants = plain_constants | st.sampled_from(MEMBERS)
"""What can be the value of an axis, one value of it."""
nested = st.recursive(constants, lambda inner: st.lists(inner, max_size=3).map(tuple), max_leaves=5)

_names = st.sampled_from(["x", "y", "c0", "c1", "T", "größe"])
_holes = st.builds(Hole, _names, st.just("multiple"), st.sampled_from([2, 2.0, 0.0, -0.0, 1, 1.0, True, math.nan]))
_markers = (
    _holes | st.builds(In, _names) | st.builds(Size, st.sampled_from(["n", "n*m", "n + 1"])) | st.just(MatchDevice())
)
_leaves = plain_constants | _markers
_values = st.recursive(_leaves, lambda inner: st.lists(inner, max_size=2).map(tuple), max_leaves=4)
_keys = st.sampled_from(["self", "dim", "name", "target", "größe", *keyword.kwlist])


@st.composite
def patterns(draw: st.DrawFn) -> Pattern:
    """Draw a pattern with every kind of part, keyword names of arguments included."""
    keys = draw(st.lists(_keys, unique=True, max_size=4))
    search = Op("op", "toy.op.default", tuple((key, draw(_values)) for key in keys))
    call = Call(
        "call",
        "toy.call.default",
        tuple(draw(st.lists(_values, max_size=2))),
        tuple((key, draw(_values)) for key in draw(st.lists(_keys, unique=True, max_size=3))),
    )
    names = draw(st.lists(_names, unique=True, max_size=3))
    return Pattern(
        rule="rule",
        module="module",
        device=draw(st.sampled_from(["cpu", "cuda"])),
        inputs=(Input("x", draw(st.sampled_from(DTYPES)), ("n", "h?", "2*n")),),
        dims=(Dim("n", draw(st.sampled_from([1, 2]))), Dim("h")),
        conditions=draw(st.sampled_from([(), ("n <= 8",)])),
        captures=(Capture("x", "float"),),
        search=(search,),
        outputs=(Output(Ref("op"), draw(st.sampled_from(DTYPES)), (Size("n"), 1)),),
        replacement=draw(st.just(AtMatch()) | st.just(Graph((call,), (Ref("call"), In("x"))))),
        axes=tuple((name, draw(nested)) for name in names),
        priority=draw(st.sampled_from([0, 3])),
    )


@st.composite
def related(draw: st.DrawFn) -> list[Pattern]:
    """Draw patterns that share skeletons: copies of a few, with other constants in some places."""
    made: list[Pattern] = []
    for base in draw(st.lists(patterns(), min_size=1, max_size=3)):
        made.append(base)
        made += [_varied(base, draw) for _ in range(draw(st.integers(0, 3)))]
    return made


def _varied(base: Pattern, draw: st.DrawFn) -> Pattern:
    axes = tuple((name, draw(nested)) for name, _ in base.axes)
    (search,) = base.search
    args = tuple((name, draw(plain_constants) if _is_constant(value) else value) for name, value in search.args)
    device = draw(st.sampled_from(["cpu", "cuda"]))
    return replace(base, axes=axes, search=(replace(search, args=args),), device=device)


def _is_constant(value: Any) -> bool:
    return not isinstance(value, tuple | In | Hole | Size | MatchDevice)


def unfactored(families: Sequence[Family]) -> list[Pattern]:
    """Return the patterns that families stand for, row by row."""
    found = []
    for family in families:
        for row in family.rows:
            cells = dict(zip(family.columns, row, strict=True))
            parts = ("device", "inputs", "search", "outputs", "replacement", "axes")
            found.append(
                replace(family.skeleton, **{part: fill(getattr(family.skeleton, part), cells) for part in parts})
            )
    return found


def exact(value: Any) -> str:
    """Return a text that differs for values that differ in type or in any bit that counts, however they compare."""
    if isinstance(value, Enum):
        return f"{type(value).__module__}.{type(value).__qualname__}:{value!r}"
    if isinstance(value, float):
        return f"float:{'nan' if math.isnan(value) else value.hex()}"
    if isinstance(value, complex):
        return f"complex:{exact(value.real)}:{exact(value.imag)}"
    if isinstance(value, tuple):
        return f"({','.join(exact(item) for item in value)})"
    if hasattr(type(value), "__dataclass_fields__"):
        inner = (
            f"{name}={exact(getattr(value, name))}"
            for name in type(value).__dataclass_fields__
            if not name.startswith("_")
        )
        return f"{type(value).__name__}({','.join(inner)})"
    return f"{type(value).__module__}.{type(value).__qualname__}:{value!r}"
