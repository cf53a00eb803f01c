"""At which sizes a draft holds: the retracing of dims, and of the optional places of shapes, at 1.

A dim that is traced as a symbol stands for 2 and more, since torch answers ``size == 1`` with False for it and leaves
no guard. So a variant is traced again with each dim at 1 and with each two of them, the other dims as ints, and with
all of those that held at 1 together, the other dims as symbols. Where the graphs are what the draft says there, with no
condition that it doesn't have, the draft holds for 1 as well. Where one differs it is a pattern of its own.

That stands on torch's operators meaning the same at every size but 1, whatever they decide inside. A rule whose own
code asks a question about a size has no such standing: its drafts hold at 1 nowhere, and each size of 1, alone and
together with others, is a pattern of its own, traced with the other dims as symbols.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kwtrace.domains import samples
from kwtrace.drafting import draft, sample_draft
from kwtrace.drafts import Draft, at_point, with_sample
from kwtrace.errors import TraceError
from kwtrace.tracing import HINTS, Point, shape_of
from kwtrace.values import exact_key

if TYPE_CHECKING:
    from kwtrace.domains import Domain
    from kwtrace.patterns import Variant
    from kwtrace.rules import Rule


@dataclass(frozen=True, slots=True)
class Subject:
    """What is to be proved: a variant's draft at a point."""

    rule: Rule
    domain: Domain
    variant: Variant
    point: Point
    base: Draft

    def holds_at(self, ones: Point, *, static: bool = False) -> bool:
        """Tell whether the draft is what tracing gives with all of ``ones`` at 1 together."""
        point = _join(self.point, ones, static=static)
        try:
            found = sample_draft(self.rule, self.domain, self.variant, point)
        except TraceError:
            return False
        sizes = dict.fromkeys(point.dims, 1)
        if static:
            sizes = {**_hints(self.domain), **sizes}
        expected = with_sample(at_point(self.base, sizes), samples(self.domain, self.variant)[0])
        return _same_graphs(expected, found) and found.conditions <= expected.conditions


@dataclass(frozen=True, slots=True)
class Proof:
    """What was proved: the dims and places that may be 1, and the points at which the draft doesn't hold."""

    ones: Point
    differing: tuple[Point, ...]


def prove(subject: Subject, sibling: Proof | None = None) -> Proof:
    """Find out at which sizes a draft holds.

    ``sibling`` is what was proved for a draft with the same inputs at the same point. Where this draft holds too with
    all at 1 together that held for the sibling, it is taken to hold and to differ where the sibling does.
    """
    if subject.base.branches:
        return Proof(Point(), tuple(_single_points(subject)))
    if sibling is not None and subject.holds_at(sibling.ones):
        return sibling
    singles = _single_points(subject)
    holding = [point for point in singles if subject.holds_at(point, static=True)]
    if not _hold_together(subject, holding):
        holding = _largest_prefix(subject, holding)
    return Proof(join_points(holding), tuple(point for point in singles if point not in holding))


def draft_at(subject: Subject, point: Point) -> Subject | None:
    """Trace the subject's variant at a further point, as a draft of its own; None where it can't be traced."""
    joined = _join(subject.point, point, static=False)
    try:
        found = draft(subject.rule, subject.domain, subject.variant, joined)
    except TraceError:
        return None
    return Subject(subject.rule, subject.domain, subject.variant, joined, found)


def join_points(points: Iterable[Point]) -> Point:
    """Return the point at which everything is 1 that is 1 in one of ``points``."""
    dims: frozenset[str] = frozenset()
    places: frozenset[tuple[str, int]] = frozenset()
    for point in points:
        dims, places = dims | point.dims, places | point.places
    return Point(dims, places)


def describe_point(point: Point) -> str:
    """Return a point in words: ``s=1``, ``mask.0=1``."""
    places = (f"{name}.{place}=1" for name, place in sorted(point.places))
    return ", ".join([*(f"{name}=1" for name in sorted(point.dims)), *places])


def _largest_prefix(subject: Subject, candidates: list[Point]) -> list[Point]:
    """Keep each point that holds together with those kept before it."""
    kept: list[Point] = []
    for point in candidates:
        if _hold_together(subject, [*kept, point]):
            kept.append(point)
    return kept


def _hold_together(subject: Subject, holding: list[Point]) -> bool:
    if not holding:
        return True
    pairs = itertools.combinations(holding, 2)
    return all(subject.holds_at(join_points(pair), static=True) for pair in pairs) and subject.holds_at(
        join_points(holding)
    )


def _join(base: Point, ones: Point, *, static: bool) -> Point:
    joined = join_points((base, ones))
    return Point(joined.dims, joined.places, static)


def _same_graphs(left: Draft, right: Draft) -> bool:
    parts = ((d.search, d.outputs, d.replacement) for d in (left, right))
    first, second = parts
    return first == second and exact_key(repr(first)) == exact_key(repr(second))


def _hints(domain: Domain) -> dict[str, int]:
    names = sorted({n for p in domain.tensors for shape in p.shapes for dim in shape for n in dim.names})
    return dict(zip(names, HINTS, strict=False))


def _single_points(subject: Subject) -> list[Point]:
    axes = dict(subject.variant.axes)
    present = [(p.name, shape_of(p, axes)) for p in subject.domain.tensors if not p.optional or axes[p.name]]
    above_one = {n for _, shape in present for dim in shape for n in dim.above_one}
    names = sorted({n for _, shape in present for dim in shape for n in dim.names} - subject.point.dims - above_one)
    places = [(name, place) for name, shape in present for place, dim in enumerate(shape) if dim.optional]
    left = [place for place in places if place not in subject.point.places]
    return [Point(dims=frozenset({name})) for name in names] + [Point(places=frozenset({place})) for place in left]
