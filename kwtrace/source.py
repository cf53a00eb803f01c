"""Families ⇄ Python text: deterministic, minimal in its imports, and equal when it is read back."""

from __future__ import annotations

import enum
import keyword
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, fields, is_dataclass
from typing import Any

import torch

from kwtrace.errors import RuleError
from kwtrace.patterns import Call, Family, Op

_WIDTH = 116
_INDENT = "    "


@dataclass(slots=True)
class _Imports:
    modules: set[str] = field(default_factory=set)
    names: set[str] = field(default_factory=set)


def render_module(rule: str, families: Sequence[Family], torch_version: str) -> str:
    """Return the text of a rule's generated module.

    Raises:
        RuleError: if an axis has a value that no text can give back.

    """
    imports = _Imports()
    body = _sequence([_render(family, imports, 1) for family in families], "(", ")", 0)
    count = sum(len(family.rows) for family in families)
    lines = [
        f'"""Rule {rule}: {count} rows in {len(families)} families, for torch {torch_version}."""',
        "",
        "# Made by python -m kwtrace.gen; not to be edited.",
        "",
    ]
    lines += [f"import {module}" for module in sorted(imports.modules)]
    lines += [""] if imports.modules else []
    lines += [f"from kwtrace.patterns import {', '.join(sorted(imports.names, key=_import_order))}", ""]
    return "\n".join([*_wrapped_imports(lines), f"FAMILIES = {body}", ""])


def render_value(value: Any) -> str:
    """Return a constant as Python text, for people to read."""
    return _constant(value, _Imports())


def _import_order(name: str) -> tuple[bool, str]:
    return (name[0].islower(), name)


def _wrapped_imports(lines: Sequence[str]) -> Iterable[str]:
    for line in lines:
        if len(line) <= _WIDTH or not line.startswith("from "):
            yield line
            continue
        head, names = line.split(" import ")
        yield f"{head} import ("
        yield from (f"{_INDENT}{name}," for name in names.split(", "))
        yield ")"


def _render(value: Any, imports: _Imports, depth: int) -> str:
    if isinstance(value, tuple):
        parts = [_render(item, imports, depth + 1) for item in value]
        return _sequence(parts, "(", ",)" if len(parts) == 1 else ")", depth)
    if isinstance(value, Op):
        imports.names.add("op")
        return _call("op", [repr(value.name), repr(value.target)], value.args, imports, depth)
    if isinstance(value, Call):
        imports.names.add("call")
        positional = [repr(value.name), repr(value.target), *(_render(item, imports, depth + 1) for item in value.args)]
        return _call("call", positional, value.kwargs, imports, depth)
    if is_dataclass(value) and not isinstance(value, type):
        return _dataclass(value, imports, depth)
    return _constant(value, imports)


def _dataclass(value: Any, imports: _Imports, depth: int) -> str:
    name = type(value).__name__
    imports.names.add(name)
    given = [f for f in fields(value) if not _is_default(f.default, getattr(value, f.name))]
    leading = list(fields(value))[: len(given)] == given
    positional = leading and len(given) <= 3  # noqa: PLR2004 - with more, names help the reader
    parts = []
    for f in given:
        text = _render(getattr(value, f.name), imports, depth + 1)
        parts.append(text if positional else f"{f.name}={text}")
    return _sequence(parts, f"{name}(", ")", depth)


def _is_default(default: Any, value: Any) -> bool:
    if type(default) is not type(value) or (isinstance(value, tuple) and value):
        return False
    return bool(default == value)


def _call(name: str, positional: list[str], named: tuple[tuple[str, Any], ...], imports: _Imports, depth: int) -> str:
    keys = [key for key, _ in named]
    first = next((place for place, key in enumerate(keys) if not _is_name(key)), len(keys))
    texts = [_render(item, imports, depth + 1) for _, item in named]
    parts = [*positional, *(f"{key}={text}" for key, text in zip(keys[:first], texts[:first], strict=True))]
    if first < len(keys):
        others = (f"{key!r}: {text}" for key, text in zip(keys[first:], texts[first:], strict=True))
        parts.append("**{" + ", ".join(others) + "}")
    return _sequence(parts, f"{name}(", ")", depth)


def _is_name(key: str) -> bool:
    return key.isidentifier() and not keyword.iskeyword(key)


def _sequence(parts: list[str], opening: str, closing: str, depth: int) -> str:
    flat = opening + ", ".join(parts) + closing
    if "\n" not in flat and len(flat) + depth * len(_INDENT) <= _WIDTH:
        return flat
    inner = "".join(f"{_INDENT * (depth + 1)}{part},\n" for part in parts)
    return f"{opening}\n{inner}{_INDENT * depth}{closing.removeprefix(',')}"


def _constant(value: Any, imports: _Imports) -> str:
    if isinstance(value, enum.Enum):
        return _member(value, imports)
    if value is None or type(value) in (bool, int, str):
        return repr(value)
    if type(value) is float:
        return _float(value, imports)
    if type(value) is complex:
        return f"complex({_float(value.real, imports)}, {_float(value.imag, imports)})"
    if isinstance(value, torch.dtype | torch.layout | torch.memory_format):
        imports.modules.add("torch")
        return repr(value)
    if isinstance(value, torch.device):
        imports.modules.add("torch")
        return f"torch.device({str(value)!r})"
    if isinstance(value, tuple | list):
        parts = [_constant(item, imports) for item in value]
        return f"({', '.join(parts)}{',' if len(parts) == 1 else ''})"
    found = f"{value!r} of type {type(value).__name__}"
    msg = f"Expected a value that can be written as Python text, found {found}; use an Enum."
    raise RuleError(msg)


def _float(value: float, imports: _Imports) -> str:
    if math.isfinite(value):
        return repr(value)
    imports.modules.add("math")
    if math.isnan(value):
        return "math.nan"
    return "math.inf" if value > 0 else "-math.inf"


def _member(value: enum.Enum, imports: _Imports) -> str:
    kind = type(value)
    if "<locals>" in kind.__qualname__:
        msg = f"Expected an Enum at the top level of its module, found {kind.__qualname__}; move it there."
        raise RuleError(msg)
    imports.modules.add(kind.__module__)
    if value.name is None or value.name not in kind.__members__:
        return f"{kind.__module__}.{kind.__qualname__}({value.value!r})"
    return f"{kind.__module__}.{kind.__qualname__}.{value.name}"
