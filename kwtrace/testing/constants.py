"""Other legal values of a constant: its neighbours by value, and equal values of another type."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from itertools import combinations
from typing import Any

import torch

from kwtrace.values import same

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int64, torch.bool)
DEVICES = (torch.device("cpu"), torch.device("cuda", 0), torch.device("cuda", 1))
LAYOUTS = (torch.strided, torch.sparse_coo)
FORMATS = (torch.contiguous_format, torch.channels_last, torch.preserve_format)
_BY_TYPE: dict[str, tuple[Any, ...]] = {
    "int": (0, 1, 2, -1),
    "SymInt": (0, 1, 2, -1),
    "float": (0.5, 1.0, 0.0),
    "bool": (False, True),
    "number": (1, 0.5, True),
    "ScalarType": DTYPES,
    "Device": DEVICES,
    "Layout": LAYOUTS,
    "MemoryFormat": FORMATS,
    "str": ("other",),
}


def neighbours(value: Any, kind: str = "", strings: Iterable[str] = ()) -> Iterator[Any]:
    """Yield values that differ from ``value`` in value or in type.

    ``kind`` is the schema's name for the argument's type, which says what None may become; ``strings`` are strings
    that an operator is likely to take.
    """
    made = list(_raw(value, kind, tuple(strings)))
    for place, found in enumerate(made):
        if not same(found, value) and not any(same(found, other) for other in made[:place]):
            yield found


def _raw(value: Any, kind: str, strings: tuple[str, ...]) -> Iterator[Any]:
    if isinstance(value, tuple):
        yield from _lists(value)
    elif value is None:
        yield from (item for name, values in _BY_TYPE.items() if name == kind for item in values)
        yield from strings if kind == "str" else ()
    elif isinstance(value, str):
        yield from (*strings, f"{value}_", "")
    elif isinstance(value, bool):
        yield from (not value, int(value), float(value))
    elif isinstance(value, int | float):
        yield from _numbers(value)
    else:
        yield from _objects(value)


def _numbers(value: float) -> Iterator[Any]:
    if isinstance(value, int):
        yield from (value + 1, value - 1, -value, 2 * value, float(value))
    else:
        yield from (2 * value + 0.25, -value, math.nextafter(value, math.inf), 0.0, -0.0, 1.0, math.inf, math.nan)
        yield from (int(value),) if value.is_integer() else ()
    if value in (0, 1):
        yield bool(value)


def _objects(value: Any) -> Iterator[Any]:
    for kind, values in (
        (torch.dtype, DTYPES),
        (torch.device, DEVICES),
        (torch.layout, LAYOUTS),
        (torch.memory_format, FORMATS),
    ):
        if isinstance(value, kind):
            yield from values
    yield None


def _lists(value: tuple[Any, ...]) -> Iterator[tuple[Any, ...]]:
    for place, item in enumerate(value):
        if not isinstance(item, torch.fx.Node):
            yield from ((*value[:place], other, *value[place + 1 :]) for other in neighbours(item))
    for left, right in combinations(range(len(value)), 2):
        swapped = list(value)
        swapped[left], swapped[right] = value[right], value[left]
        yield tuple(swapped)
    if value:
        yield value[:-1]
        yield (*value, value[-1])
