"""Operators by name, and what their schemas say about their arguments."""

from __future__ import annotations

import functools
import operator
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from kwtrace.values import plain, same

GETITEM = "operator.getitem"
VIEWS = frozenset({"aten.view.default", "aten._unsafe_view.default", "aten.reshape.default"})
"""Spellings of one operation: the same values in another shape."""

_DIMS = frozenset({"dim", "dims", "dim0", "dim1", "dim2", "start_dim", "end_dim", "axis", "dims_self", "dims_other"})
_ADDS_A_DIM = frozenset({"aten.unsqueeze.default", "aten.stack.default", "aten.diag_embed.default"})
_PLAIN = frozenset({"int", "float", "bool", "Optional[int]", "Optional[float]", "Optional[bool]"})
_BOUNDARY_NAMESPACES = frozenset({"streams", "_c10d_functional", "c10d"})


@dataclass(frozen=True, slots=True)
class Argument:
    """One argument of a schema: ``is_dim`` says that negative values count from the rank."""

    name: str
    keyword_only: bool
    default: Any
    is_dim: bool
    has_default: bool


@dataclass(frozen=True, slots=True)
class Operator:
    """An operator as the matcher needs it."""

    name: str
    arguments: tuple[Argument, ...] | None
    ranked: str | None
    extra_rank: int


def is_operator(value: Any) -> bool:
    """Tell whether ``value`` is an operator: an overload, a packet of them, or what ``custom_op`` returns."""
    return isinstance(
        value, torch._ops.OpOverload | torch._ops.OpOverloadPacket | torch._library.custom_ops.CustomOpDef
    )


def name_of(target: Any) -> str:
    """Return the canonical name of a call target; the three spellings of a view have one."""
    found = describe(target).name
    return "aten.view.default" if found in VIEWS else found


@functools.cache
def describe(target: Any) -> Operator:
    """Describe a call target; one without a schema has ``arguments`` None."""
    if target is operator.getitem:
        return Operator(GETITEM, (_plain_argument("self"), _plain_argument("index")), None, 0)
    if not isinstance(target, torch._ops.OpOverload):
        return Operator(_qualified_name(target), None, None, 0)
    name = str(target)
    native = name.startswith(("aten.", "prims."))
    schema = target._schema.arguments
    arguments = tuple(_argument(argument, native=native) for argument in schema)
    ranked = schema[0].name if native and schema else None
    return Operator(name, arguments, ranked, 1 if name in _ADDS_A_DIM else 0)


def bind(target: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Return every argument of a call by name, defaults filled in; without a schema they are called arg0, arg1, ..."""
    described = describe(target)
    if described.arguments is None:
        by_place = {f"arg{i}": plain(value) for i, value in enumerate(args)}
        return {**by_place, **{name: plain(value) for name, value in kwargs.items()}}
    bound = {}
    for place, argument in enumerate(described.arguments):
        if not argument.keyword_only and place < len(args):
            bound[argument.name] = plain(args[place])
        else:
            bound[argument.name] = plain(kwargs.get(argument.name, argument.default))
    return bound


def unbind(target: Any, bound: Mapping[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return a call's arguments as they are passed, the inverse of `bind`."""
    keywords = keywords_of(target)
    args = tuple(value for name, value in bound.items() if name not in keywords)
    return args, {name: value for name, value in bound.items() if name in keywords}


def without_defaults(
    target: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the arguments of a call less those at the end, and those by keyword, that are the schema's defaults."""
    arguments = describe(target).arguments or ()
    defaults = {a.name: a.default for a in arguments if a.has_default}
    kept = {name: value for name, value in kwargs.items() if name not in defaults or not _is(value, defaults[name])}
    count = len(args)
    while (
        count and arguments and arguments[count - 1].has_default and _is(args[count - 1], arguments[count - 1].default)
    ):
        count -= 1
    return args[:count], kept


def keywords_of(target: Any) -> frozenset[str]:
    """Return the names of the arguments that can only be passed by keyword."""
    return frozenset(a.name for a in describe(target).arguments or () if a.keyword_only)


@functools.cache
def plain_numbers_of(target: Any) -> frozenset[str]:
    """Return the names of the arguments that are numbers and can't be symbolic."""
    schema = getattr(target, "_schema", None)
    arguments = () if schema is None else schema.arguments
    symbolic = set(re.findall(r"\bSymInt\??(?:\[\d*\])? (\w+)", str(schema)))
    return frozenset(a.name for a in arguments if str(a.real_type) in _PLAIN) - symbolic


def schema_of(name: str) -> str:
    """Return the schema of the operator called ``name``, or its name if it has none."""
    target = resolve(name)
    return str(getattr(target, "_schema", name))


def resolve(name: str) -> Any:
    """Return the operator called ``name``.

    Raises:
        AttributeError: if no such operator is registered.

    """
    if name == GETITEM:
        return operator.getitem
    namespace, *path = name.split(".")
    if namespace == "operator":
        return getattr(operator, path[0])
    found = torch.ops
    for part in (namespace, *path):
        found = getattr(found, part)
    return found


@functools.cache
def is_boundary(target: Any) -> bool:
    """Tell whether no match may cross a call of ``target``: it may mutate its inputs or order streams."""
    if isinstance(target, torch._ops.OpOverload):
        return target._schema.is_mutable or target.namespace in _BOUNDARY_NAMESPACES
    if isinstance(target, torch._ops.HigherOrderOperator):
        return not target.name().endswith("_functional")
    module = getattr(target, "__module__", None)
    return module not in ("_operator", "operator", "math", "torch", "torch.fx.experimental.symbolic_shapes")


def is_random(target: Any) -> bool:
    """Tell whether two calls of ``target`` yield different numbers."""
    return torch.Tag.nondeterministic_seeded in getattr(target, "tags", ())


def has_results(target: Any) -> bool:
    """Tell whether a call of ``target`` returns anything."""
    schema = getattr(target, "_schema", None)
    return schema is None or bool(schema.returns)


def _argument(argument: Any, *, native: bool) -> Argument:
    has_default = argument.has_default_value()
    default = argument.default_value if has_default else None
    is_dim = native and argument.name in _DIMS and "int" in str(argument.type)
    return Argument(argument.name, argument.kwarg_only, default, is_dim, has_default)


def _is(value: Any, default: Any) -> bool:
    return not isinstance(value, fx.Node) and same(plain(value), plain(default))


def _plain_argument(name: str) -> Argument:
    return Argument(name, keyword_only=False, default=None, is_dim=False, has_default=False)


def _qualified_name(target: Any) -> str:
    if isinstance(target, torch._ops.HigherOrderOperator):
        return f"higher_order.{target.name()}"
    module = getattr(target, "__module__", "").removeprefix("_")
    return f"{module}.{getattr(target, '__name__', repr(target))}"
