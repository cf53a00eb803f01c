"""A rule → its families: every variant traced, proved, compared and factored."""

from __future__ import annotations

import importlib
import itertools
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass
from types import ModuleType
from typing import TypeVar

from kwtrace.commuting import expand, order_key
from kwtrace.domains import AxisParameter, Domain, enumerate_variants, read_domain
from kwtrace.drafting import draft
from kwtrace.drafts import Draft, to_pattern
from kwtrace.errors import ConflictError, KwtraceError, LoadError, RuleError, TraceError
from kwtrace.families import factor, replacement_key, search_key, skeleton_key
from kwtrace.patterns import AtMatch, Family, Pattern, Variant
from kwtrace.proving import Proof, Subject, describe_point, draft_at, join_points, prove
from kwtrace.rules import Rule
from kwtrace.tracing import Point

_Item = tuple[Variant, Draft]
A = TypeVar("A")
B = TypeVar("B")


@dataclass(frozen=True, slots=True)
class RuleResult:
    """What became of a rule's variants.

    ``merged`` pairs a variant with the one that has the same graphs, ``failed`` one with what is wrong with it, and
    ``unmatched`` lists sizes at which a variant has no pattern.
    """

    rule: str
    variants: int
    families: tuple[Family, ...]
    merged: tuple[tuple[str, str], ...]
    failed: tuple[tuple[str, KwtraceError], ...]
    unmatched: tuple[tuple[str, str], ...]


@dataclass(frozen=True, slots=True)
class RuleReference:
    """A rule as a worker process finds it."""

    module: str
    name: str

    def load(self) -> Rule:
        """Import the module and return the rule.

        Raises:
            LoadError: if the module doesn't import or has no such rule.

        """
        return find_rule(self.module, self.name)


def find_module(name: str) -> ModuleType:
    """Import a module that declares rules.

    Raises:
        LoadError: if it doesn't import.

    """
    try:
        return importlib.import_module(name)
    except Exception as error:
        msg = f"Expected the module {name} to import, found {type(error).__name__}: {error}."
        raise LoadError(msg) from error


def find_rule(module: str, name: str) -> Rule:
    """Return the rule called ``name`` that ``module`` declares.

    Raises:
        LoadError: if the module doesn't import or has no such rule.

    """
    loaded = find_module(module)
    for value in vars(loaded).values():
        if isinstance(value, Rule) and value.name == name:
            return value
    msg = f"Expected the module {module} to declare rule {name}, found no such rule; regenerate the package."
    raise LoadError(msg)


def generate_rule(
    rule: Rule, executor: Executor | None = None, progress: Callable[[int], object] | None = None
) -> RuleResult:
    """Trace every variant of a rule, prove what can be proved of each, and factor them into families.

    Variants that can't be traced or contradict each other are reported, not raised; the others are generated all the
    same. An axis that the replacement ignores leaves no family, since nobody can tell which of its values is right.

    Raises:
        RuleError: if the declaration itself is wrong.

    """
    domain = read_domain(rule)
    variants = enumerate_variants(rule, domain)
    if not rule.replacements:
        msg = f"Rule {rule.name}: expected a replacement, found none; declare one with @{rule.name}.replacement."
        raise RuleError(msg)
    source: Rule | RuleReference = rule if executor is None else RuleReference(rule.module, rule.name)
    drafts: dict[Variant, Draft] = {}
    failed: list[tuple[str, KwtraceError]] = []
    for variant, found in zip(variants, _map(_draft_task, [(source, v) for v in variants], executor), strict=True):
        if isinstance(found, KwtraceError):
            failed.append((str(variant), found))
        else:
            drafts[variant] = found
        _tick(progress)
    kept, merged, conflicts = _compare(rule, domain, drafts)
    errors = len(failed)
    failed += conflicts
    failed += _unused_axes(rule, domain, [drafts[v] for v in kept], kept)
    if len(failed) > len(conflicts) + errors:
        return RuleResult(rule.name, len(variants), (), tuple(merged), tuple(failed), ())
    bundles = [(source, bundle) for bundle in _bundle(rule, domain, [(v, drafts[v]) for v in kept])]
    results = list(_map(_prove_task, bundles, executor))
    proved = [pattern for found, _ in results for pattern in found]
    patterns = [order for pattern in proved for order in expand(pattern)] if rule.commutative else proved
    unmatched = [pair for _, pairs in results for pair in pairs]
    order = {variant.axes: place for place, variant in enumerate(variants)}
    families = factor(sorted(patterns, key=lambda p: (len(p.search) + len(p.inputs), order[p.axes], repr(p.dims))))
    return RuleResult(rule.name, len(variants), families, tuple(merged), tuple(failed), tuple(dict.fromkeys(unmatched)))


def _tick(progress: Callable[[int], object] | None) -> None:
    if progress is not None:
        progress(1)


def _map(function: Callable[[A], B], tasks: Sequence[A], executor: Executor | None) -> Iterable[B]:
    if executor is None:
        return (function(task) for task in tasks)
    futures = [executor.submit(function, task) for task in tasks]
    return (future.result() for future in futures)


def _load(source: Rule | RuleReference) -> Rule:
    return source if isinstance(source, Rule) else source.load()


def _draft_task(task: tuple[Rule | RuleReference, Variant]) -> Draft | KwtraceError:
    rule = _load(task[0])
    try:
        return draft(rule, read_domain(rule), task[1])
    except KwtraceError as error:
        return error


def _compare(
    rule: Rule, domain: Domain, drafts: dict[Variant, Draft]
) -> tuple[list[Variant], list[tuple[str, str]], list[tuple[str, KwtraceError]]]:
    """Merge variants with equal graphs; refuse all of those with one search graph and different replacements."""
    groups: dict[Hashable, dict[Variant, Hashable]] = {}
    for variant, found in drafts.items():
        pattern = to_pattern(rule, domain, variant, found, Point())
        key = order_key(pattern) if rule.commutative else search_key(pattern)
        groups.setdefault(key, {})[variant] = replacement_key(pattern)
    kept: list[Variant] = []
    merged: list[tuple[str, str]] = []
    conflicts: list[tuple[str, KwtraceError]] = []
    for replacements in groups.values():
        first, *others = replacements
        different = [other for other in others if replacements[other] != replacements[first]]
        if different:
            pairs = [(first, different[0]), *((other, first) for other in others)]
            conflicts += [(str(one), _conflict(one, other)) for one, other in pairs]
            continue
        kept.append(first)
        merged += [(str(other), str(first)) for other in others]
    return kept, merged, conflicts


def _conflict(variant: Variant, first: Variant) -> ConflictError:
    return ConflictError(
        f"Rule {variant.rule}, variant {variant}: expected a search graph of its own, found that of variant {first}, "
        "whose replacement differs; the argument that tells them apart vanished while tracing; prune one with where=."
    )


def _bundle(rule: Rule, domain: Domain, items: list[_Item]) -> list[list[_Item]]:
    """Put variants with the same inputs on the same device together, as one task: they share most of their proof."""
    bundles: dict[Hashable, list[_Item]] = {}
    for variant, found in items:
        pattern = to_pattern(rule, domain, variant, found, Point())
        key = (pattern.device, tuple((declared.name, declared.dims) for declared in pattern.inputs))
        bundles.setdefault(key, []).append((variant, found))
    return list(bundles.values())


def _prove_task(task: tuple[Rule | RuleReference, list[_Item]]) -> tuple[list[Pattern], list[tuple[str, str]]]:
    """Turn drafts with the same inputs into patterns, and trace on at the sizes where they don't hold."""
    rule = _load(task[0])
    domain = read_domain(rule)
    patterns: list[Pattern] = []
    unmatched: list[tuple[str, str]] = []
    pending = {Point(): task[1]}
    seen: set[tuple[Variant, Point]] = set()
    while pending:
        point = next(iter(pending))
        for subject, proof in _prove_all(rule, domain, point, pending.pop(point)):
            patterns.append(to_pattern(rule, domain, subject.variant, subject.base, proof.ones, point))
            for single in proof.differing:
                joined = join_points((point, single))
                if (subject.variant, joined) in seen:
                    continue
                seen.add((subject.variant, joined))
                found = draft_at(subject, single)
                if found is None:
                    unmatched.append((str(subject.variant), describe_point(joined)))
                else:
                    pending.setdefault(joined, []).append((subject.variant, found.base))
    return patterns, unmatched


def _prove_all(rule: Rule, domain: Domain, point: Point, items: list[_Item]) -> Iterator[tuple[Subject, Proof]]:
    """Prove the first draft of each skeleton, and hold those that share its skeleton against it at all sizes of 1."""
    sibling: Proof | None = None
    for (variant, base), *others in _group(rule, domain, point, items):
        first = Subject(rule, domain, variant, point, base)
        proof = prove(first, sibling)
        sibling = sibling if base.branches else proof
        yield first, proof
        for other, found in others:
            subject = Subject(rule, domain, other, point, found)
            yield subject, proof if _holds_alike(subject, proof) else prove(subject)


def _holds_alike(subject: Subject, proof: Proof) -> bool:
    return not subject.base.branches and subject.holds_at(proof.ones, static=True)


def _group(rule: Rule, domain: Domain, point: Point, items: list[_Item]) -> list[list[_Item]]:
    groups: dict[Hashable, list[_Item]] = {}
    for variant, found in items:
        key = skeleton_key(to_pattern(rule, domain, variant, found, Point(), point))
        groups.setdefault(key, []).append((variant, found))
    return list(groups.values())


def _unused_axes(
    rule: Rule, domain: Domain, drafts: list[Draft], variants: list[Variant]
) -> list[tuple[str, KwtraceError]]:
    """Find axes of which two values change the search graph but not the replacement graph."""
    found: list[tuple[str, KwtraceError]] = []
    patterns = [to_pattern(rule, domain, v, d, Point()) for v, d in zip(variants, drafts, strict=True)]
    for parameter in domain.parameters:
        if not isinstance(parameter, AxisParameter) or parameter.name in rule.unused or len(parameter.values) == 1:
            continue
        pairs = _differing_only_in(parameter.name, patterns)
        alike = next(((a, b) for a, b in pairs if replacement_key(a) == replacement_key(b)), None)
        if alike is not None:
            a, b = (Variant(rule.name, p.axes) for p in alike)
            message = (
                f"Rule {rule.name}, parameter {parameter.name}: expected the replacement to depend on it as the search "
                f"function does, found one replacement for {a} and {b}; use it or declare it in unused=."
            )
            found.append((str(b), TraceError(message)))
    return found


def _differing_only_in(name: str, patterns: list[Pattern]) -> Iterator[tuple[Pattern, Pattern]]:
    groups: dict[str, list[Pattern]] = {}
    for pattern in patterns:
        if isinstance(pattern.replacement, AtMatch):
            continue
        rest = tuple((axis, value) for axis, value in pattern.axes if axis != name)
        groups.setdefault(repr(rest), []).append(pattern)
    for members in groups.values():
        yield from itertools.combinations(members, 2)
