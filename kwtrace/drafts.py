"""Drafts: patterns whose sizes are still symbolic, so that two traces of one variant can be compared."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import sympy

from kwtrace.derived import evaluate
from kwtrace.domains import Domain
from kwtrace.patterns import (
    AtMatch,
    Capture,
    Dim,
    Graph,
    Hole,
    In,
    Input,
    Op,
    Output,
    Pattern,
    Size,
    Variant,
    map_leaves,
)
from kwtrace.rules import Rule
from kwtrace.tracing import Point, dtype_of, shape_of, to_text


@dataclass(frozen=True, slots=True)
class Expression:
    """A size that is still symbolic."""

    value: Any


@dataclass(frozen=True, slots=True)
class Draft:
    """A variant's search graph and replacement graph in normal form, with symbolic sizes.

    ``branches`` says that the rule's own code asked a question about a size while it was traced.
    """

    search: tuple[Op, ...]
    outputs: tuple[Output, ...]
    replacement: Graph | AtMatch
    conditions: frozenset[Any]
    branches: bool = False


def with_sample(base: Draft, sample: Mapping[str, Any]) -> Draft:
    """Return ``base`` with its holes filled."""
    return map_draft(base, lambda leaf: evaluate(leaf, sample[leaf.name]) if isinstance(leaf, Hole) else leaf)


def at_point(base: Draft, dims: Mapping[str, int]) -> Draft:
    """Return what ``base`` says where the given dims have the given sizes."""
    values = {sympy.Symbol(name, integer=True, positive=True): size for name, size in dims.items()}

    def substitute(value: Any) -> Any:
        if not isinstance(value, Expression):
            return value
        result = value.value.xreplace(values) if isinstance(value.value, sympy.Basic) else value.value
        result = sympy.sympify(result).subs(values) if isinstance(result, sympy.Basic) else result
        return to_expression(result)

    conditions = {condition.subs(values) for condition in base.conditions} - {sympy.true}
    return replace(map_draft(base, substitute), conditions=frozenset(conditions))


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
    searched = used_names(base.search)
    free = [p for p in domain.captured if p.name in searched]
    final = map_draft(base, lambda v: Size(to_text(v.value)) if isinstance(v, Expression) else v)
    return Pattern(
        rule=rule.name,
        module=rule.module,
        device=axes["device"],
        inputs=inputs,
        dims=tuple(Dim(name, 1 if name in ones.dims else 2) for name in used),
        conditions=tuple(sorted(to_text(condition) for condition in base.conditions)),
        captures=tuple(Capture(p.name, p.kind.__name__, p.special) for p in free),
        search=final.search,
        outputs=final.outputs,
        replacement=final.replacement,
        axes=variant.axes,
        priority=rule.priority,
    )


def map_draft(base: Draft, leaf: Callable[[Any], Any]) -> Draft:
    """Apply ``leaf`` to every constant, marker and expression of a draft."""
    return Draft(
        map_leaves(base.search, leaf),
        map_leaves(base.outputs, leaf),
        map_leaves(base.replacement, leaf),
        base.conditions,
        base.branches,
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


def to_expression(value: Any) -> Any:
    """Return a number that is known as it is, and one that isn't as an `Expression`."""
    if not isinstance(value, sympy.Basic):
        return value
    if value.is_Integer:
        return int(value)
    return float(value) if value.is_Float else Expression(value)


def used_names(value: Any) -> set[str]:
    """Return the names of the parameters that a part of a draft uses."""
    names: set[str] = set()

    def note(leaf: Any) -> Any:
        if isinstance(leaf, In | Hole):
            names.add(leaf.name)
        return leaf

    map_leaves(value, note)
    return names
