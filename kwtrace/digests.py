"""What a rule's generated module depends on: a digest of its declaration, its code, and the tracer."""

from __future__ import annotations

import functools
import hashlib
import inspect
import sys
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path
from types import CodeType, FunctionType, ModuleType
from typing import Any

import torch

from kwtrace.domains import TensorParameter, read_domain
from kwtrace.patterns import exact_text
from kwtrace.rules import DTypes, OneOf, Rule

_TRACER = (
    "callables",
    "commuting",
    "derived",
    "domains",
    "drafting",
    "drafts",
    "families",
    "generation",
    "lowering",
    "merging",
    "normal",
    "operators",
    "patterns",
    "proving",
    "rules",
    "shapes",
    "source",
    "surroundings",
    "tracing",
    "values",
)
_FOREIGN = ("torch", "numpy", "kwtrace.rules", "kwtrace.domains")


def source_digest(rule: Rule) -> str:
    """Return a digest of everything that a rule's generated module is made from, torch's version included."""
    parts = [torch_version(), _tracer_digest(), rule.name, rule.module, repr(describe_axes(rule)), repr(_options(rule))]
    functions = [rule.function, *(r.function for _, r in sorted(rule.replacements.items()))]
    if rule.where is not None:
        functions.append(rule.where)
    for function in (*functions, *_axis_functions(rule)):
        parts += sorted(_sources(function))
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()


def replacement_digest(rule: Rule, device: str) -> str:
    """Return a digest of the code of a rule's replacement for ``device``, and of the callables that it may be given."""
    parts: list[str] = []
    for function in (rule.replacements[device].function, *_axis_functions(rule)):
        parts += sorted(_sources(function))
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()


def describe_axes(rule: Rule) -> dict[str, list[str]]:
    """Return a rule's axes and their values as text."""
    return {name: [exact_text(value) for value in values] for name, values in read_domain(rule).axes}


def torch_version() -> str:
    """Return torch's major and minor version, such as ``2.13``."""
    return ".".join(torch.__version__.split(".")[:2])


def _options(rule: Rule) -> tuple[Any, ...]:
    replacements = tuple((device, r.at) for device, r in sorted(rule.replacements.items()))
    parameters = tuple(exact_text(p) for p in read_domain(rule).parameters if not isinstance(p, TensorParameter))
    shapes = tuple((p.name, p.texts, repr(p.dtype)) for p in read_domain(rule).tensors)
    own = (rule.stage, rule.modes, rule.devices, rule.priority, rule.unused, rule.commutative)
    return (*own, replacements, parameters, shapes)


def _axis_functions(rule: Rule) -> list[Callable[..., Any]]:
    """Return the functions that are values of axes, other libraries' aside."""
    return [f for f in read_domain(rule).callables if isinstance(f, FunctionType) and not _is_foreign(f)]


@functools.cache
def _tracer_digest() -> str:
    folder = Path(__file__).parent
    sources = [(folder / f"{name}.py").read_text(encoding="utf-8") for name in _TRACER]
    return hashlib.sha256("\n".join(sources).encode()).hexdigest()


def _sources(function: Callable[..., Any]) -> set[str]:
    """Return the source of a function and of all that it reaches by name, other libraries aside."""
    found: dict[int, str] = {}
    kept: list[Any] = []
    pending: list[Any] = [function]
    while pending:
        current = pending.pop()
        if id(current) in found:
            continue
        kept.append(current)  # so that no other object gets its id
        found[id(current)] = f"{current.__qualname__}\n{_source(current)}"
        if isinstance(current, FunctionType):
            described = [_describe(name, value, pending) for name, value in _reached(current)]
            found[id(current)] += "\n".join(described)
    return set(found.values())


def _describe(name: str, value: Any, pending: list[Any]) -> str:
    """Return a global that a function reads as text; functions and classes are left in ``pending`` to be read too."""
    if isinstance(value, dict):
        items = [f"{_describe('', key, pending)}: {_describe('', item, pending)}" for key, item in value.items()]
        return f"{name} = {{{', '.join(items)}}}"
    if isinstance(value, list | tuple | set | frozenset):
        items = [_describe("", item, pending) for item in value]
        ordered = sorted(items) if isinstance(value, set | frozenset) else items
        return f"{name} = {type(value).__name__}({', '.join(ordered)})"
    if isinstance(value, OneOf):
        return _describe(name, value.values, pending)
    if isinstance(value, FunctionType | type) and not _is_foreign(value):
        pending.append(value)
        return f"{name} = {value.__module__}.{value.__qualname__}"
    if isinstance(value, bool | int | float | complex | str | torch.dtype | DTypes | None):
        return f"{name} = {value!r}"
    return f"{name}: {type(value).__qualname__}"


def _source(function: Any) -> str:
    try:
        return textwrap.dedent(inspect.getsource(function))
    except (OSError, TypeError):
        code = getattr(function, "__code__", None)
        return code.co_code.hex() if code else ""


def _reached(function: FunctionType) -> Iterator[tuple[str, Any]]:
    closure = inspect.getclosurevars(function)
    yield from closure.nonlocals.items()
    names = set(_names(function.__code__))
    for name in sorted(names & function.__globals__.keys()):
        value = function.__globals__[name]
        yield name, value
        if isinstance(value, ModuleType) and not _is_foreign(value):
            yield from ((f"{name}.{part}", getattr(value, part)) for part in sorted(names) if hasattr(value, part))


def _names(code: CodeType) -> Iterator[str]:
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _names(constant)


def _is_foreign(value: Any) -> bool:
    module = value.__name__ if isinstance(value, ModuleType) else getattr(value, "__module__", "") or ""
    top = module.split(".")[0]
    return top in sys.stdlib_module_names or any(module == name or module.startswith(f"{name}.") for name in _FOREIGN)
