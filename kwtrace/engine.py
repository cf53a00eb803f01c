"""A pattern set at work on a graph: find every match, let the larger win, rewrite."""

from __future__ import annotations

import logging
import os
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from torch import fx

from kwtrace import operators
from kwtrace.errors import KwtraceError
from kwtrace.generation import find_module
from kwtrace.matches import Match
from kwtrace.matching import Matcher
from kwtrace.normal import View
from kwtrace.patterns import AtMatch, Family, PatternSet, Variant
from kwtrace.rewriting import Refusal, remapped, rewrite
from kwtrace.sharing import share_sizes

log = logging.getLogger("kwtrace")
_ROUNDS = 10


@dataclass(slots=True)
class _Work:
    """What was done to a graph: variants that fired, nodes that a rule made, and matches that couldn't be rewritten."""

    fired: list[Variant] = field(default_factory=list)
    made: dict[fx.Node, str] = field(default_factory=dict)
    refused: set[tuple[int, fx.Node]] = field(default_factory=set)

    def is_open(self, match: Match) -> bool:
        """Tell whether a match is neither refused nor wholly what its own rule has made."""
        return _identity(match) not in self.refused and any(self.made.get(n) != match.rule for n in match.nodes)


class Engine:
    """A pattern set made ready: one matcher per family, by the operator it starts from."""

    def __init__(self, patterns: PatternSet) -> None:
        """Prepare nothing yet: a matcher is made when a graph holds all its operators."""
        self.families = patterns.families
        self._matchers: dict[int, Matcher | None] = {}
        self._required = [frozenset(op.target for op in family.skeleton.search) for family in self.families]

    def find(self, graph: fx.Graph, work: _Work | None = None) -> list[Match]:
        """Return the matches to rewrite, in the order of the graph: of any that overlap, the largest."""
        anchors = _by_operator(graph)
        present = anchors.keys()
        view = View(graph)
        found = [
            match
            for place, required in enumerate(self._required)
            if required <= present and (matcher := self._matcher(place)) is not None
            for match in _matches(matcher, view, anchors[matcher.anchor.target])
        ]
        return _choose([match for match in found if work is None or work.is_open(match)])

    def rules_in(self, graph: fx.Graph) -> list[str]:
        """Return the rules of which the graph has all operators of some variant, sorted."""
        present = _by_operator(graph).keys()
        pairs = zip(self.families, self._required, strict=True)
        return sorted({family.rule for family, required in pairs if required <= present})

    def run(self, graph: fx.Graph) -> list[Variant]:
        """Rewrite ``graph`` until nothing matches; return what fired."""
        share_sizes(graph)
        work = _Work()
        for _ in range(_ROUNDS):
            before = len(work.fired) + len(work.refused)
            self._rewrite(graph, work)
            if len(work.fired) + len(work.refused) == before:
                break
        return work.fired

    def _rewrite(self, graph: fx.Graph, work: _Work) -> None:
        replaced: dict[fx.Node, fx.Node] = {}
        for match in self.find(graph, work):
            match.inputs = remapped(match.inputs, replaced)
            outputs = rewrite(match)
            if isinstance(outputs, Refusal):
                found = outputs.words
                log.warning("%s: expected the replacement to yield what the graph had, found %s", match.variant, found)
                work.refused.add(_identity(match))
                continue
            replaced.update(zip(match.outputs, outputs.results, strict=True))
            work.made.update(dict.fromkeys(outputs.new, match.rule))
            work.fired.append(match.variant)

    def _matcher(self, place: int) -> Matcher | None:
        if place not in self._matchers:
            self._matchers[place] = _prepare(self.families[place])
        return self._matchers[place]


def _identity(match: Match) -> tuple[int, fx.Node]:
    return (id(match.family), match.outputs[0])


def _prepare(family: Family) -> Matcher | None:
    missing = missing_operators(family)
    if missing:
        log.warning(
            "rule %s: expected the operators %s, found them missing after importing %s; this family is off",
            family.rule,
            ", ".join(missing),
            family.skeleton.module,
        )
        return None
    return Matcher(family)


def missing_operators(family: Family) -> list[str]:
    """Return the operators of a family that aren't registered, even after importing the module of its rule."""
    missing = [name for name in _operators_of(family) if not _is_registered(name)]
    if not missing:
        return []
    try:
        find_module(family.skeleton.module)
    except KwtraceError as error:
        log.warning("rule %s: %s", family.rule, error)
    return [name for name in missing if not _is_registered(name)]


def _operators_of(family: Family) -> list[str]:
    replacement = family.skeleton.replacement
    calls = () if isinstance(replacement, AtMatch) else replacement.calls
    return sorted({op.target for op in family.skeleton.search} | {call.target for call in calls})


def _is_registered(name: str) -> bool:
    try:
        operators.resolve(name)
    except (AttributeError, RuntimeError):
        return False
    return True


def _by_operator(graph: fx.Graph) -> dict[str, list[fx.Node]]:
    found: defaultdict[str, list[fx.Node]] = defaultdict(list)
    for node in graph.nodes:
        if node.op == "call_function":
            found[operators.name_of(node.target)].append(node)
    return dict(found)


def _matches(matcher: Matcher, view: View, anchors: Iterable[fx.Node]) -> Iterator[Match]:
    disabled = os.environ.get("KWTRACE_DISABLE", "")
    for node in anchors:
        match = matcher.match(view, node)
        if match is not None and not is_disabled(match.variant, disabled):
            yield match


def is_disabled(variant: Variant, setting: str) -> bool:
    """Tell whether ``KWTRACE_DISABLE=setting`` switches a variant off: ``1``, or ``rule``, ``rule[axis=value]``, ..."""
    if setting == "1":
        return True
    axes = {name: str(value).removeprefix("torch.") for name, value in variant.axes}
    for rule, wanted in re.findall(r"(\w+)(?:\[([^\]]*)\])?", setting):
        pairs = (pair.split("=", 1) for pair in wanted.split(",") if "=" in pair)
        if rule == variant.rule and all(
            axes.get(n.strip()) == v.strip().strip("'\"").removeprefix("torch.") for n, v in pairs
        ):
            return True
    return False


def _choose(found: list[Match]) -> list[Match]:
    """Keep, of matches that share nodes, the larger; then the one with the higher priority; then the first by name."""
    order = {node: place for place, node in enumerate(found[0].graph.nodes)} if found else {}
    ranked = sorted(found, key=lambda m: (-len(m.family.skeleton.search), -m.family.skeleton.priority, str(m.variant)))
    taken: set[fx.Node] = set()
    kept = []
    for match in ranked:
        if taken.isdisjoint(match.nodes):
            taken.update(match.nodes)
            kept.append(match)
    return sorted(kept, key=lambda match: order[match.outputs[0]])
