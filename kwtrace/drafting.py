"""A variant → its draft: traced, lowered, its captured numbers found, its outputs and arguments checked."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import sympy

from kwtrace.domains import Domain, samples
from kwtrace.drafts import Draft, Expression, used_names
from kwtrace.errors import TraceError
from kwtrace.lowering import Lowering
from kwtrace.merging import Places, merge
from kwtrace.patterns import AtMatch, Output, Variant
from kwtrace.rules import Rule
from kwtrace.surroundings import clean_surroundings
from kwtrace.tracing import Point, to_text, trace


def draft(rule: Rule, domain: Domain, variant: Variant, point: Point | None = None) -> Draft:
    """Trace a variant at a point and bring both its graphs into normal form.

    Raises:
        TraceError: if a function can't be traced, the outputs differ, or an argument got lost.

    """
    point = point or Point()
    given = samples(domain, variant)
    found, *others = (_draft_once(rule, domain, variant, point, sample) for sample in given)
    for other in others:
        found = merge(found, other, Places(rule, variant, given))
    _check_arguments(rule, domain, variant, found)
    return found


def sample_draft(rule: Rule, domain: Domain, variant: Variant, point: Point) -> Draft:
    """Trace a variant at a point with one value per captured parameter, which then stand in the draft as literals.

    Raises:
        TraceError: as `draft` does.

    """
    return _draft_once(rule, domain, variant, point, samples(domain, variant)[0])


@clean_surroundings()
def _draft_once(rule: Rule, domain: Domain, variant: Variant, point: Point, sample: Mapping[str, Any]) -> Draft:
    found = trace(rule.function, rule, domain, variant, point, sample)
    where = f"Rule {rule.name}, variant {variant}"
    search, outputs = Lowering(found, dict(variant.axes)["device"], where).search()
    declared = rule.replacements.get(dict(variant.axes)["device"])
    if declared is None:
        msg = f"{where}: expected a replacement for its device, found none; declare one with @{rule.name}.replacement."
        raise TraceError(msg)
    if declared.at == "match":
        return Draft(search, outputs, AtMatch(), found.conditions, found.branches)
    traced = trace(declared.function, rule, domain, variant, point, sample)
    lowering = Lowering(traced, dict(variant.axes)["device"], where)
    replacement = lowering.replacement()
    _check_outputs(outputs, lowering.outputs, where)
    conditions, branches = found.conditions | traced.conditions, found.branches or traced.branches
    return Draft(search, outputs, replacement, conditions, branches)


def _check_outputs(search: tuple[Output, ...], replacement: tuple[Output, ...], where: str) -> None:
    if len(search) != len(replacement):
        msg = f"{where}: expected {len(search)} outputs of the replacement, found {len(replacement)}."
        raise TraceError(msg)
    for place, (wanted, found) in enumerate(zip(search, replacement, strict=True)):
        if wanted.dtype is not found.dtype:
            msg = f"{where}: expected {wanted.dtype} as output {place} of the replacement, found {found.dtype}."
            raise TraceError(msg)
        if not _equal_dims(wanted.dims, found.dims):
            sizes = f"{_shown(wanted.dims)} as output {place} of the replacement, found {_shown(found.dims)}"
            msg = f"{where}: expected size {sizes}."
            raise TraceError(msg)


def _equal_dims(left: tuple[Any, ...], right: tuple[Any, ...]) -> bool:
    raw = [tuple(d.value if isinstance(d, Expression) else d for d in dims) for dims in (left, right)]
    return len(left) == len(right) and all(sympy.simplify(a - b) == 0 for a, b in zip(*raw, strict=True))


def _shown(dims: tuple[Any, ...]) -> str:
    return f"[{', '.join(to_text(d.value) if isinstance(d, Expression) else str(d) for d in dims)}]"


def _check_arguments(rule: Rule, domain: Domain, variant: Variant, found: Draft) -> None:
    axes = dict(variant.axes)
    searched = used_names(found.search)
    replaced = (
        None
        if isinstance(found.replacement, AtMatch)
        else used_names((found.replacement.calls, found.replacement.outputs))
    )
    for p in domain.tensors:
        if p.optional and not axes[p.name]:
            continue
        _require(p.name in searched, rule, variant, p.name, "the search graph to use it", "that tracing dropped it")
        _require(replaced is None or p.name in replaced or p.name in rule.unused, rule, variant, p.name, *_DROPPED)
    for c in domain.captured:
        if c.name in axes or (c.name in rule.unused and c.name not in (replaced or ())):
            continue
        _require(
            c.name in searched,
            rule,
            variant,
            c.name,
            "its value to be in the search graph",
            "that it vanished while tracing",
        )
        used = replaced is None or c.name in replaced or c.name in rule.unused
        _require(used, rule, variant, c.name, *_DROPPED)


_DROPPED = ("the replacement to use it", "that it doesn't; use it or declare it in unused=")


def _require(
    holds: bool,  # noqa: FBT001 - the condition is what the function is about
    rule: Rule,
    variant: Variant,
    name: str,
    expected: str,
    found: str,
) -> None:
    if not holds:
        msg = f"Rule {rule.name}, parameter {name}, variant {variant}: expected {expected}, found {found}."
        raise TraceError(msg)
