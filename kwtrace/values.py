"""Constants as patterns compare them: by exact type and value."""

import math
from collections.abc import Hashable
from enum import Enum
from typing import Any

import torch


def plain(value: Any) -> Any:
    """Return ``value`` with subclasses of the scalar types (NumPy's float64, IntEnum, str enums) and lists unwrapped.

    Operators see only the scalar, so two spellings of one scalar have to be one constant.
    """
    if isinstance(value, list | tuple):
        return tuple(plain(item) for item in value)
    if isinstance(value, bool) or value is None:
        return value
    for base in (int, float, complex, str):
        if isinstance(value, base):
            return value if type(value) is base else _unwrap(value, base)
    return value


def exact_key(value: Any) -> Hashable:
    """Return a key that is equal for two constants exactly when type and value agree.

    ``True``, ``1`` and ``1.0`` get three keys, ``0.0`` and ``-0.0`` two, and every NaN the same one. Tuples and lists
    of equal items share a key, since a schema has only lists.
    """
    if isinstance(value, float):
        return ("float", "nan" if math.isnan(value) else value.hex())
    if isinstance(value, complex):
        return ("complex", exact_key(value.real), exact_key(value.imag))
    if isinstance(value, list | tuple):
        return ("list", *(exact_key(item) for item in value))
    return (type(value), value)


def is_constant(value: Any) -> bool:
    """Tell whether ``value`` can be an axis value: a constant of a graph, an enum member, or a tuple of these."""
    if isinstance(value, tuple):
        return all(is_constant(item) for item in value)
    return value is None or isinstance(
        value,
        bool | int | float | complex | str | Enum | torch.dtype | torch.layout | torch.memory_format | torch.device,
    )


def same(left: Any, right: Any) -> bool:
    """Tell whether two constants agree in type and value."""
    return exact_key(left) == exact_key(right)


def _unwrap(value: Any, base: type) -> Any:
    raw = value.value if isinstance(value, Enum) else value
    if base is str:
        return str.__str__(raw)
    return base(raw)
