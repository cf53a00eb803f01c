"""A variant → symbolic graphs and the conditions under which they hold.

With `kwtrace.inductor` the one module that knows torch's private tracing machinery.
"""

from __future__ import annotations

import inspect
import math
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

import sympy
import torch
from torch import fx
from torch._dispatch.python import enable_python_dispatcher
from torch._dynamo.source import ConstantSource
from torch._inductor.decomposition import select_decomp_table
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv
from torch.utils._sympy.printers import PythonPrinter

from kwtrace.domains import AxisParameter, CapturedParameter, Domain, Parameter, TensorParameter, TiedParameter
from kwtrace.errors import TraceError
from kwtrace.rules import DTypes
from kwtrace.surroundings import clean_surroundings

if TYPE_CHECKING:
    from kwtrace.patterns import Variant
    from kwtrace.rules import Rule
    from kwtrace.shapes import DimSpec

_TORCH = str(Path(torch.__file__).parent) + os.sep
_SYMPY = str(Path(sympy.__file__).parent) + os.sep
_CONVERSIONS = frozenset({"__bool__", "__int__", "__index__", "__float__"})

HINTS = (521, 523, 541, 547, 557, 563, 569, 571, 577, 587, 593, 599, 601, 607, 613, 617)
"""Sizes of the named dims: primes, so that no accidental equality becomes a guard, and so large that the usual parts of
them (``n // 128``) are no 0 or 1, which torch would take for the size itself."""


@dataclass(frozen=True, slots=True)
class Point:
    """Where a variant is traced: the dims, and the optional places of shapes, that are 1 instead of symbolic.

    ``static`` gives every other dim its hint as an int, which is faster and proves less.
    """

    dims: frozenset[str] = frozenset()
    places: frozenset[tuple[str, int]] = frozenset()
    static: bool = False


class WatchedShapeEnv(ShapeEnv):
    """A shape environment that notes whether code outside torch asked a question about a size."""

    asked = False

    def evaluate_expr(self, *args: Any, **kwargs: Any) -> Any:
        """Answer as torch does."""
        self.asked = self.asked or _is_asked_outside_torch()
        return super().evaluate_expr(*args, **kwargs)


@dataclass(frozen=True, slots=True)
class Trace:
    """A traced function: its graph, the tensor parameters in order of the placeholders, and its conditions.

    ``branches`` says that the function, or something outside torch that it calls, asked a question about a size.
    """

    graph: fx.Graph
    inputs: tuple[str, ...]
    conditions: frozenset[sympy.Basic]
    symbols: Mapping[sympy.Basic, sympy.Basic]
    branches: bool
    where: str

    def expression(self, value: Any) -> Any:
        """Return a symbolic number as an expression over the dims, or a plain one as it is.

        Raises:
            TraceError: if it depends on data.

        """
        if not isinstance(value, torch.SymInt | torch.SymFloat):
            return value
        expression = value.node.expr.xreplace(self.symbols)
        if expression.free_symbols - set(self.symbols.values()):
            msg = f"{self.where}: expected sizes known from the inputs, found the data-dependent {value}."
            raise TraceError(msg)
        if not expression.free_symbols:
            return int(expression) if isinstance(value, torch.SymInt) else float(expression)
        return expression


def trace(
    function: Callable[..., Any], rule: Rule, domain: Domain, variant: Variant, point: Point, sample: Mapping[str, Any]
) -> Trace:
    """Trace a search or replacement function of ``rule`` with symbolic sizes.

    Raises:
        TraceError: naming rule and variant, if the function raises, returns something else than tensors, or depends on
            data.

    """
    where = f"Rule {rule.name}, variant {variant}, function {function.__name__}"
    axes = dict(variant.axes)
    env = WatchedShapeEnv(duck_shape=False)
    fake_mode = FakeTensorMode(shape_env=env)
    fake_mode.cache_enabled = point.static  # with symbols, filling the cache costs more than it saves
    dims, symbols = _make_dims(env, domain, point, where)
    present = [p for p in domain.tensors if not p.optional or axes[p.name]]
    with clean_surroundings():
        with fake_mode:
            tensors = [_make_tensor(p, axes, dims, point) for p in present]
        names = tuple(p.name for p in present)
        call = caller(function, rule, domain, axes, names, sample)
        graph = _run(call, fake_mode, tensors, where)
    return Trace(graph, names, frozenset(_conditions(env, symbols, where)), symbols, env.asked, where)


def shape_of(parameter: TensorParameter, axes: Mapping[str, Any]) -> tuple[DimSpec, ...]:
    """Return the shape that ``parameter`` has in a variant."""
    if len(parameter.shapes) == 1:
        return parameter.shapes[0]
    return parameter.shapes[parameter.texts.index(axes[f"{parameter.name}_shape"])]


def dtype_of(parameter: TensorParameter, axes: Mapping[str, Any]) -> torch.dtype:
    """Return the dtype that ``parameter`` has in a variant."""
    if isinstance(parameter.dtype, DTypes):
        found = axes[parameter.dtype.name]
        assert isinstance(found, torch.dtype)
        return found
    return parameter.dtype


def to_text(expression: Any) -> str:
    """Return a size or condition as a Python expression."""
    return str(PythonPrinter().doprint(expression))


def _make_dims(
    env: ShapeEnv, domain: Domain, point: Point, where: str
) -> tuple[dict[str, Any], dict[sympy.Basic, sympy.Basic]]:
    names = sorted({n for p in domain.tensors for shape in p.shapes for dim in shape for n in dim.names})
    if len(names) > len(HINTS):
        msg = f"{where}: expected at most {len(HINTS)} named dims, found {len(names)}."
        raise TraceError(msg)
    dims: dict[str, Any] = {}
    symbols: dict[sympy.Basic, sympy.Basic] = {}
    for name, hint in zip(names, HINTS, strict=False):
        if name in point.dims or point.static:
            dims[name] = 1 if name in point.dims else hint
            continue
        source = ConstantSource(name)
        symbol = env.create_symbol(hint, source, dynamic_dim=DimDynamic.DYNAMIC)
        dims[name] = env.create_symintnode(symbol, hint=hint, source=source)
        symbols[symbol] = sympy.Symbol(name, integer=True, positive=True)
    return dims, symbols


def _make_tensor(
    parameter: TensorParameter, axes: Mapping[str, Any], dims: Mapping[str, Any], point: Point
) -> torch.Tensor:
    sizes = []
    for place, dim in enumerate(shape_of(parameter, axes)):
        factors = [dims[factor] if isinstance(factor, str) else factor for factor in dim.factors]
        sizes.append(1 if (parameter.name, place) in point.places else math.prod(factors))
    return torch.empty(sizes, dtype=dtype_of(parameter, axes), device=axes["device"])


def caller(
    function: Callable[..., Any],
    rule: Rule,
    domain: Domain,
    axes: Mapping[str, Any],
    present: tuple[str, ...],
    sample: Mapping[str, Any],
) -> Callable[..., Any]:
    """Return ``function`` as a function of the tensors called ``present``: axes, captured values and None filled in."""
    constants = {p.name: _constant(p, axes, sample) for p in domain.parameters}
    taken = check_signature(function, rule, domain)

    def call(*tensors: torch.Tensor) -> Any:
        values = {**constants, **dict(zip(present, tensors, strict=True))}
        positional = [values[p.name] for p in taken if p.kind is p.POSITIONAL_ONLY]
        named = {p.name: values[p.name] for p in taken if p.kind is not p.POSITIONAL_ONLY}
        return function(*positional, **named)

    return call


def check_signature(function: Callable[..., Any], rule: Rule, domain: Domain) -> list[inspect.Parameter]:
    """Return the parameters of a search or replacement function.

    Raises:
        TraceError: if it takes a parameter that the rule doesn't have, or leaves one out that isn't declared unused.

    """
    known = {p.name for p in domain.parameters}
    taken = list(inspect.signature(function).parameters.values())
    names = {p.name for p in taken}
    for name in sorted(names - known):
        msg = f"Rule {rule.name}: expected a replacement with the rule's own parameters, found {name!r}; remove it."
        raise TraceError(msg)
    for name in sorted(known - names - set(rule.unused)):
        msg = (
            f"Rule {rule.name}, parameter {name}: expected the replacement to take it, found it missing; take it or "
            f"declare unused=({name!r},)."
        )
        raise TraceError(msg)
    return taken


def _constant(parameter: Parameter, axes: Mapping[str, Any], sample: Mapping[str, Any]) -> Any:
    if isinstance(parameter, AxisParameter):
        return parameter.given(axes[parameter.name])
    if isinstance(parameter, TiedParameter):
        return axes[parameter.variable.name]
    if isinstance(parameter, CapturedParameter):
        return sample[parameter.name]
    return None


def _run(call: Callable[..., Any], fake_mode: FakeTensorMode, tensors: list[torch.Tensor], where: str) -> fx.Graph:
    kept: list[Any] = []

    def outputs(*inputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
        result = call(*inputs)
        kept.append(result)
        return tuple(result) if isinstance(result, tuple | list) else (result,)

    try:
        with fake_mode, enable_python_dispatcher():
            graph = make_graph(outputs, tensors)
    except (Exception, SystemExit) as error:
        msg = f"{where}: expected it to trace, found {type(error).__name__}: {_first_line(error)}"
        raise TraceError(msg) from error
    results = kept[-1] if isinstance(kept[-1], tuple | list) else (kept[-1],)
    if not results or not all(isinstance(result, torch.Tensor) for result in results):
        msg = f"{where}: expected it to return a tensor or a tuple of tensors, found {type(kept[-1]).__name__}."
        raise TraceError(msg)
    return graph


def make_graph(function: Callable[..., Any], tensors: list[torch.Tensor]) -> fx.Graph:
    """Trace a function on fake tensors as torch.compile does: decomposed, and with no mutation of what it has made."""
    traced = _make(function, tensors)
    if not _writes(traced):
        return traced.graph
    functional = _make(torch.func.functionalize(traced, remove="mutations"), tensors)
    return traced.graph if _writes(functional) else functional.graph  # an input is written to: the ops say by what


def _make(function: Callable[..., Any], tensors: list[torch.Tensor]) -> fx.GraphModule:
    traced: fx.GraphModule = make_fx(function, select_decomp_table(), tracing_mode="symbolic")(*tensors)
    return traced


def _writes(traced: fx.GraphModule) -> bool:
    """Tell whether a node mutates a tensor: torch's composite operators (``rms_norm``) do so to what they have made."""
    schemas = (getattr(node.target, "_schema", None) for node in traced.graph.nodes)
    return any(schema is not None and schema.is_mutable for schema in schemas)


def _is_asked_outside_torch() -> bool:
    """Tell whether the question being answered came from ``bool``, ``int`` or the like of a size in foreign code.

    What torch's own kernels and decompositions ask changes how a value is computed, not which value.
    """
    frame: FrameType | None = sys._getframe(2)  # noqa: SLF001 - inspect.stack reads source files
    while frame is not None and frame.f_code.co_filename.startswith(_TORCH):
        if frame.f_code.co_filename == torch.__file__ and frame.f_code.co_name in _CONVERSIONS:
            caller = frame.f_back
            return caller is not None and not caller.f_code.co_filename.startswith((_TORCH, _SYMPY))
        frame = frame.f_back
    return False


def _first_line(error: BaseException) -> str:
    return next(iter(str(error).strip().splitlines()), "no message")


def _conditions(env: ShapeEnv, symbols: Mapping[sympy.Basic, sympy.Basic], where: str) -> Iterator[sympy.Basic]:
    found = [guard.expr for guard in env.guards]
    found += [sympy.Eq(symbol, value) for symbol, value in env.replacements.items()]
    found += [check.expr for checks in env.deferred_runtime_asserts.values() for check in checks]
    for condition in found:
        named = condition.xreplace(symbols)
        if named is sympy.true:
            continue
        if isinstance(named, sympy.Eq) and any(side.is_number for side in named.args):
            msg = (
                f"{where}: expected sizes to stay symbolic, found that tracing fixed one: {to_text(named)}; "
                "write size ** 0.5 for math.sqrt(size), and don't turn sizes into ints."
            )
            raise TraceError(msg)
        if named.free_symbols - set(symbols.values()):
            msg = f"{where}: expected sizes known from the inputs, found the data-dependent condition {condition}."
            raise TraceError(msg)
        yield named
