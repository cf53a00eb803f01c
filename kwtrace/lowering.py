"""Traces → drafts → patterns.

A `Draft` is a pattern whose sizes are still symbolic expressions, so that two traces of one variant can be compared and
one can be evaluated at a point of the other.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, is_dataclass, replace
from typing import TYPE_CHECKING, Any

import sympy
import torch
from torch import fx

from kwtrace import operators
from kwtrace.derived import evaluate, find_hole
from kwtrace.domains import Domain, samples
from kwtrace.errors import TraceError
from kwtrace.normal import View, is_tensor, nodes_in, number
from kwtrace.patterns import AtMatch, Call, Capture, Dim, Graph, Hole, In, Input, MatchDevice, Op, Output, Pattern, Ref, Size, map_leaves
from kwtrace.tracing import Point, Trace, dtype_of, shape_of, to_text, trace
from kwtrace.values import same

if TYPE_CHECKING:
    from kwtrace.patterns import Variant
    from kwtrace.rules import Rule


@dataclass(frozen=True, slots=True)
class Expression:
    """A size that is still symbolic."""

    value: Any


@dataclass(frozen=True, slots=True)
class Draft:
    """A variant's search graph and replacement graph in normal form, with symbolic sizes."""

    search: tuple[Op, ...]
    outputs: tuple[Output, ...]
    replacement: Graph | AtMatch
    conditions: frozenset[Any]


def draft(rule: Rule, domain: Domain, variant: Variant, point: Point | None = None) -> Draft:
    """Trace a variant at a point and bring both its graphs into normal form.

    Raises:
        TraceError: if a function can't be traced, the outputs differ, or an argument got lost.

    """
    point = point or Point()
    given = samples(domain, variant)
    found, *others = (_draft_once(rule, domain, variant, point, sample) for sample in given)
    for other in others:
        found = _merge(found, other, _Places(rule, variant, given))
    _check_arguments(rule, domain, variant, found)
    return found


def sample_draft(rule: Rule, domain: Domain, variant: Variant, point: Point) -> Draft:
    """Trace a variant at a point with one value per captured parameter, which then stand in the draft as literals.

    Raises:
        TraceError: as `draft` does.

    """
    return _draft_once(rule, domain, variant, point, samples(domain, variant)[0])


def with_sample(base: Draft, sample: Mapping[str, Any]) -> Draft:
    """Return ``base`` with its holes filled."""
    return _map_draft(base, lambda leaf: evaluate(leaf, sample[leaf.name]) if isinstance(leaf, Hole) else leaf)


def at_point(base: Draft, dims: Mapping[str, int]) -> Draft:
    """Return what ``base`` says where the given dims have the given sizes."""
    values = {sympy.Symbol(name, integer=True, positive=True): size for name, size in dims.items()}

    def substitute(value: Any) -> Any:
        if not isinstance(value, Expression):
            return value
        result = value.value.xreplace(values) if isinstance(value.value, sympy.Basic) else value.value
        result = sympy.sympify(result).subs(values) if isinstance(result, sympy.Basic) else result
        return _expression(result)

    conditions = {condition.subs(values) for condition in base.conditions} - {sympy.true}
    return replace(_map_draft(base, substitute), conditions=frozenset(conditions))


def to_pattern(
    rule: Rule, domain: Domain, variant: Variant, base: Draft, ones: Point, point: Point | None = None
) -> Pattern:
    """Write a draft down as a pattern; ``ones`` are the dims and places that were proved to hold at 1 as well."""
    point = point or Point()
    axes = dict(variant.axes)
    present = [p for p in domain.tensors if not p.optional or axes[p.name]]
    inputs = tuple(
        Input(p.name, dtype_of(p, axes), tuple(_dim_texts(p.name, shape_of(p, axes), ones, point))) for p in present
    )
    used = sorted({name for p in present for dim in shape_of(p, axes) for name in dim.names} - point.dims)
    searched = _used(base.search)
    free = [p for p in domain.captured if p.name in searched]
    final = _map_draft(base, lambda v: Size(to_text(v.value)) if isinstance(v, Expression) else v)
    return Pattern(
        rule=rule.name,
        module=rule.module,
        device=axes["device"],
        inputs=inputs,
        dims=tuple(Dim(name, 1 if name in ones.dims else 2) for name in used),
        conditions=tuple(sorted(to_text(condition) for condition in base.conditions)),
        captures=tuple(Capture(p.name, p.kind.__name__) for p in free),
        search=final.search,
        outputs=final.outputs,
        replacement=final.replacement,
        axes=variant.axes,
        priority=rule.priority,
    )


def _map_draft(base: Draft, leaf: Callable[[Any], Any]) -> Draft:
    return Draft(
        map_leaves(base.search, leaf),
        map_leaves(base.outputs, leaf),
        map_leaves(base.replacement, leaf),
        base.conditions,
    )


def _dim_texts(name: str, shape: Any, ones: Point, point: Point) -> list[str]:
    texts = []
    for place, dim in enumerate(shape):
        if (name, place) in point.places:
            texts.append("1")
            continue
        factors = [str(f) for f in dim.factors if f not in point.dims]
        mark = "?" if (name, place) in ones.places else ""
        texts.append(("*".join(factors) or "1") + mark)
    return texts


def _draft_once(rule: Rule, domain: Domain, variant: Variant, point: Point, sample: Mapping[str, Any]) -> Draft:
    found = trace(rule.function, rule, domain, variant, point, sample)
    where = f"Rule {rule.name}, variant {variant}"
    search, outputs = _Lowering(found, dict(variant.axes)["device"], where).search()
    declared = rule.replacements.get(dict(variant.axes)["device"])
    if declared is None:
        msg = f"{where}: expected a replacement for device {dict(variant.axes)['device']!r}, found none; declare one with @{rule.name}.replacement."
        raise TraceError(msg)
    if declared.at == "match":
        return Draft(search, outputs, AtMatch(), found.conditions)
    traced = trace(declared.function, rule, domain, variant, point, sample)
    lowering = _Lowering(traced, dict(variant.axes)["device"], where)
    replacement = lowering.replacement()
    _check_outputs(outputs, lowering.outputs, where)
    return Draft(search, outputs, replacement, found.conditions | traced.conditions)


class _Lowering:
    """One traced graph, read into `Op` or `Call`."""

    def __init__(self, traced: Trace, device: str, where: str) -> None:
        self.traced, self.device, self.where = traced, device, where
        self.view = View(traced.graph)
        placeholders = [node for node in traced.graph.nodes if node.op == "placeholder"]
        self.inputs = dict(zip(placeholders, traced.inputs, strict=True))
        self.returned = next(node for node in traced.graph.nodes if node.op == "output").args[0]
        self.names: dict[fx.Node, str] = {}
        self.taken: set[str] = set()
        self.outputs: tuple[Output, ...] = ()

    def search(self) -> tuple[tuple[Op, ...], tuple[Output, ...]]:
        ops: list[Op] = []
        outputs = []
        for node in self.returned:
            value = self._visit(self.view.strip(node), ops)
            if isinstance(value, In):
                msg = f"{self.where}: expected outputs that are computed, found that one is the input {value.name}."
                raise TraceError(msg)
            outputs.append(self._output(value, node))
        self._check_lost()
        self.outputs = tuple(outputs)
        return tuple(ops), self.outputs

    def replacement(self) -> Graph:
        wanted = self._reachable()
        calls = []
        for node in self.traced.graph.nodes:
            if node.op == "call_function" and node in wanted and is_tensor(node):
                calls.append(self._call(node))
        self._check_lost()
        values = tuple(self._value(node, lambda n: n) for node in self.returned)
        self.outputs = tuple(self._output(value, node) for value, node in zip(values, self.returned, strict=True))
        return Graph(tuple(calls), values)

    def _visit(self, node: fx.Node, ops: list[Op]) -> In | Ref:
        """Add the ops that ``node`` needs, operands first, without recursion over deep graphs."""
        pending = [node]
        while pending:
            current = pending[-1]
            if current in self.inputs or current in self.names:
                pending.pop()
                continue
            self._check_call(current)
            operands = [self.view.strip(n) for value in self.view.args(current).values() for n in nodes_in(value) if is_tensor(n)]
            missing = [n for n in operands if n not in self.inputs and n not in self.names]
            if missing:
                pending.extend(reversed(missing))
                continue
            ops.append(self._op(pending.pop()))
        return self._reference(node)

    def _op(self, node: fx.Node) -> Op:
        args = tuple((name, self._value(value, self.view.strip)) for name, value in self.view.args(node).items())
        return Op(self._name(node), operators.name_of(node.target), args)

    def _call(self, node: fx.Node) -> Call:
        self._check_call(node)
        bound = operators.bind(node.target, node.args, node.kwargs)
        keywords = operators.keywords_of(node.target)
        args = tuple(self._value(value, lambda n: n) for name, value in bound.items() if name not in keywords)
        kwargs = tuple((name, self._value(value, lambda n: n)) for name, value in bound.items() if name in keywords)
        return Call(self._name(node), operators.describe(node.target).name, args, kwargs)

    def _check_call(self, node: fx.Node) -> None:
        if node.op != "call_function":
            msg = f"{self.where}: expected tensors to come from the inputs, found {node.op} {node.target}; make constants with torch.full or pass them in."
            raise TraceError(msg)
        if operators.is_boundary(node.target):
            msg = f"{self.where}: expected ops that don't mutate, found {node.target}."
            raise TraceError(msg)

    def _value(self, value: Any, strip: Callable[[fx.Node], fx.Node]) -> Any:
        if isinstance(value, tuple):
            return tuple(self._value(item, strip) for item in value)
        if isinstance(value, fx.Node) and is_tensor(value):
            return self._reference(strip(value))
        value = number(value)
        if isinstance(value, torch.device):
            return MatchDevice() if value.type == self.device else value
        return _expression(self.traced.expression(value))

    def _reference(self, node: fx.Node) -> In | Ref:
        return In(self.inputs[node]) if node in self.inputs else Ref(self.names[node])

    def _name(self, node: fx.Node) -> str:
        name = operators.name_of(node.target)
        base = name.split(".")[1]
        found, count = base, 1
        while found in self.taken:
            count += 1
            found = f"{base}_{count}"
        self.taken.add(found)
        self.names[node] = found
        return found

    def _output(self, value: Any, node: fx.Node) -> Output:
        result = node.meta["val"]
        dims = tuple(_expression(self.traced.expression(size)) for size in result.shape)
        return Output(value, result.dtype, dims)

    def _reachable(self) -> set[fx.Node]:
        seen: set[fx.Node] = set()
        pending = list(self.returned)
        while pending:
            node = pending.pop()
            if node not in seen:
                seen.add(node)
                pending.extend(node.all_input_nodes)
        return seen

    def _check_lost(self) -> None:
        calls = [n.target for n in self.traced.graph.nodes if n.op == "call_function"]
        lost = [str(target) for target in calls if operators.is_boundary(target) or not operators.has_results(target)]
        if lost:
            msg = f"{self.where}: expected every op to reach an output, found ops that don't: {', '.join(lost)}."
            raise TraceError(msg)


@dataclass(frozen=True, slots=True)
class _Places:
    """What two traces were given, to find captured numbers by their place."""

    rule: Rule
    variant: Variant
    given: tuple[Mapping[str, Any], ...]

    def find(self, first: Any, second: Any) -> Hole:
        for name in self.given[0]:
            inputs = (self.given[0][name], self.given[1][name])
            hole = None if same(*inputs) else find_hole(name, inputs, (first, second))
            if hole is not None:
                return hole
        msg = (
            f"Rule {self.rule.name}, variant {self.variant}: expected each number in the graph to be a literal or a simple "
            f"function of one captured parameter, found {first!r} for {self.given[0]} and {second!r} for {self.given[1]}."
        )
        raise TraceError(msg)


def _merge(left: Any, right: Any, places: _Places) -> Any:
    if isinstance(left, tuple) and isinstance(right, tuple) and len(left) == len(right):
        return tuple(_merge(a, b, places) for a, b in zip(left, right, strict=True))
    if isinstance(left, frozenset) and left == right:
        return left
    if is_dataclass(left) and type(left) is type(right) and not isinstance(left, type):
        if not fields(left):
            return left
        merged = {f.name: _merge(getattr(left, f.name), getattr(right, f.name), places) for f in fields(left)}
        return replace(left, **merged)
    if isinstance(left, int | float | complex) and isinstance(right, int | float | complex):
        return left if same(left, right) else places.find(left, right)
    if isinstance(left, sympy.Basic) and isinstance(right, sympy.Basic) and left == right:
        return left
    if not isinstance(left, tuple | frozenset | sympy.Basic) and same(left, right):
        return left
    msg = (
        f"Rule {places.rule.name}, variant {places.variant}: expected a graph whose structure doesn't depend on captured values, "
        f"found {left!r} for {places.given[0]} and {right!r} for {places.given[1]}; give such values in Captured(special=...)."
    )
    raise TraceError(msg)


def _expression(value: Any) -> Any:
    if not isinstance(value, sympy.Basic):
        return value
    if value.is_Integer:
        return int(value)
    return float(value) if value.is_Float else Expression(value)


def _check_outputs(search: tuple[Output, ...], replacement: tuple[Output, ...], where: str) -> None:
    if len(search) != len(replacement):
        msg = f"{where}: expected a replacement with {len(search)} outputs like the search function, found {len(replacement)}."
        raise TraceError(msg)
    for place, (wanted, found) in enumerate(zip(search, replacement, strict=True)):
        if wanted.dtype is not found.dtype:
            msg = f"{where}: expected {wanted.dtype} as output {place} of the replacement, found {found.dtype}."
            raise TraceError(msg)
        if not _equal_dims(wanted.dims, found.dims):
            msg = f"{where}: expected size {_shown(wanted.dims)} of output {place} of the replacement, found {_shown(found.dims)}."
            raise TraceError(msg)


def _equal_dims(left: tuple[Any, ...], right: tuple[Any, ...]) -> bool:
    raw = [tuple(d.value if isinstance(d, Expression) else d for d in dims) for dims in (left, right)]
    return len(left) == len(right) and all(sympy.simplify(a - b) == 0 for a, b in zip(*raw, strict=True))


def _shown(dims: tuple[Any, ...]) -> str:
    return f"[{', '.join(to_text(d.value) if isinstance(d, Expression) else str(d) for d in dims)}]"


def _check_arguments(rule: Rule, domain: Domain, variant: Variant, found: Draft) -> None:
    axes = dict(variant.axes)
    searched = _used(found.search)
    replaced = None if isinstance(found.replacement, AtMatch) else _used((found.replacement.calls, found.replacement.outputs))
    for p in domain.tensors:
        if p.optional and not axes[p.name]:
            continue
        _require(p.name in searched, rule, variant, p.name, "the search graph to use it", "that tracing dropped it")
        _require(replaced is None or p.name in replaced or p.name in rule.unused, rule, variant, p.name, *_DROPPED)
    for c in domain.captured:
        if c.name in axes or (c.name in rule.unused and c.name not in (replaced or ())):
            continue
        _require(c.name in searched, rule, variant, c.name, "its value to be in the search graph", "that it vanished while tracing")
        used = replaced is None or c.name in replaced or c.name in rule.unused
        _require(used, rule, variant, c.name, *_DROPPED)


_DROPPED = ("the replacement to use it", "that it doesn't; use it or declare it in unused=")


def _require(holds: bool, rule: Rule, variant: Variant, name: str, expected: str, found: str) -> None:  # noqa: FBT001 - the condition is what the function is about
    if not holds:
        msg = f"Rule {rule.name}, parameter {name}, variant {variant}: expected {expected}, found {found}."
        raise TraceError(msg)


def _used(value: Any) -> set[str]:
    names: set[str] = set()

    def note(leaf: Any) -> Any:
        if isinstance(leaf, In | Hole):
            names.add(leaf.name)
        return leaf

    map_leaves(value, note)
    return names
