"""Near misses: all neighbours of a graph that a rule matches, one change each, and what a pattern set makes of them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from torch import fx

from kwtrace.domains import read_domain
from kwtrace.engine import Engine
from kwtrace.matches import Match
from kwtrace.patterns import Family, PatternSet, Value
from kwtrace.rules import Rule
from kwtrace.testing.changes import Change, call_changes
from kwtrace.testing.editing import IllegalEditError, copy_graph, edited
from kwtrace.testing.instances import Instance, instances
from kwtrace.testing.oracle import Claims, difference, leak
from kwtrace.testing.spellings import spellings
from kwtrace.testing.surroundings import graph_changes


@dataclass(frozen=True, slots=True)
class Neighbour:
    """A graph one change away from an instance."""

    kind: str
    words: str
    graph: fx.Graph


@dataclass(slots=True)
class Tally:
    """What became of a rule's neighbours.

    ``instances`` is the number of graphs they were made from; ``tried`` counts near misses by kind, ``claimed`` those
    that a variant matched because they are exactly what it searches for, ``spelled`` other spellings that had to match;
    ``wrong`` says in words what went wrong, where something did.
    """

    instances: int = 0
    tried: Counter[str] = field(default_factory=Counter)
    claimed: Counter[str] = field(default_factory=Counter)
    spelled: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)

    def add(self, other: Tally) -> None:
        """Add another tally to this one."""
        self.instances += other.instances
        self.tried += other.tried
        self.claimed += other.claimed
        self.spelled += other.spelled
        self.wrong += other.wrong


def near_misses(instance: Instance, strings: Sequence[str] = (), part: slice = slice(None)) -> Iterator[Neighbour]:
    """Yield the neighbours of an instance that differ from it in what they compute, or in what happens around it.

    ``strings`` are strings to try as arguments; ``part`` takes some of the changes only.
    """
    graph = instance.graph
    calls = (node for node in graph.nodes if node.op == "call_function")
    changes = [change for node in calls for change in call_changes(node, strings)]
    yield from _make(instance, [*changes, *graph_changes(graph)][part])


def other_spellings(instance: Instance, part: slice = slice(None)) -> Iterator[Neighbour]:
    """Yield the neighbours of an instance that compute the same, so that its variant must match them."""
    yield from _make(instance, list(spellings(instance.graph))[part])


def _make(instance: Instance, changes: Sequence[Change]) -> Iterator[Neighbour]:
    for change in changes:
        try:
            graph = edited(instance.graph, instance.mode, change.edit)
        except IllegalEditError:
            continue
        yield Neighbour(change.kind, change.words, graph)


class Judge:
    """Says what a pattern set does wrong on a graph; it asks the rules and the numbers, never the matcher."""

    def __init__(self, patterns: PatternSet, rules: Mapping[str, Rule]) -> None:
        """Take a pattern set and its rules by name."""
        self.engine = Engine(patterns)
        self.backwards = Engine(PatternSet(patterns.families[::-1]))
        self.claims = Claims(rules)

    def find(self, graph: fx.Graph) -> list[Match]:
        """Return the matches in a graph, without rewriting it."""
        return self.engine.find(graph)

    def problem(
        self, graph: fx.Graph, found: Sequence[Match], instance: Instance, *, must_fire: bool = False
    ) -> str | None:
        """Return what is wrong with the matches found in a graph, or None.

        Each must be exactly what its variant searches for, must not leak, must not depend on the order of families;
        rewritten, the graph must give the numbers that it gave before (on the CPU). With ``must_fire`` a replacement
        that can't be put in place is wrong too.
        """
        for match in found:
            problem = self.claims.problem(match) or leak(match)
            if problem is not None:
                return problem
        other = self.backwards.find(graph)
        if [str(match.variant) for match in other] != [str(match.variant) for match in found]:
            return f"with families in reverse order {[str(m.variant) for m in other]} match, not {found[0].variant}"
        if any(dict(match.variant.axes)["device"] != "cpu" for match in found):
            return None
        rewritten = copy_graph(graph, instance.mode).graph
        fired = self.engine.run(rewritten)
        if must_fire and not fired:
            return f"expected {found[0].variant} to be rewritten, found it refused"
        rewritten.lint()
        return difference(graph, rewritten)


def check(
    patterns: PatternSet, rules: Mapping[str, Rule], share: tuple[int, int] = (0, 1), judge: Judge | None = None
) -> dict[str, Tally]:
    """Try the near misses and the other spellings of every variant, by rule; see `check_rows`."""
    tallies: dict[str, Tally] = {}
    for rule in patterns.rules:
        rows = [(family, row) for family in patterns.families if family.rule == rule for row in family.rows]
        tallies[rule] = check_rows(patterns, rules, rows, share, judge)
    return tallies


def check_rows(
    patterns: PatternSet,
    rules: Mapping[str, Rule],
    rows: Iterable[tuple[Family, tuple[Value, ...]]],
    share: tuple[int, int] = (0, 1),
    judge: Judge | None = None,
) -> Tally:
    """Try the near misses and the other spellings of some rows of a pattern set.

    Args:
        patterns: the whole set, which may match the neighbours.
        rules: its rules by name.
        rows: families and rows to start from.
        share: (i, n) takes the i-th of n parts of all changes, spread evenly over variants and kinds.
        judge: what decides; by default one for ``patterns``.

    """
    judge = judge or Judge(patterns, rules)
    tally = Tally()
    for family, row in rows:
        rule = rules[family.rule]
        for instance in instances(family, row, rule):
            tally.add(_check_instance(judge, instance, _strings(rule), share, tally.instances))
    return tally


def _check_instance(
    judge: Judge, instance: Instance, strings: Sequence[str], share: tuple[int, int], place: int
) -> Tally:
    tally = Tally(instances=1)
    part = slice((share[0] + place) % share[1], None, share[1])
    _check_neighbour(judge, instance, Neighbour("none", "unchanged", instance.graph), tally.spelled, tally)
    for neighbour in other_spellings(instance, part):
        _check_neighbour(judge, instance, neighbour, tally.spelled, tally)
    for neighbour in near_misses(instance, strings, part):
        _check_neighbour(judge, instance, neighbour, tally.tried, tally)
    return tally


def _check_neighbour(
    judge: Judge, instance: Instance, neighbour: Neighbour, counter: Counter[str], tally: Tally
) -> None:
    counter[neighbour.kind] += 1
    must_match = counter is tally.spelled
    try:
        found = judge.find(neighbour.graph)
        problem = _problem(judge, instance, neighbour, found, must_match=must_match)
    except Exception as error:  # noqa: BLE001 - nothing that a graph holds may make the matcher raise
        found, problem = [], f"raised {type(error).__name__}: {error}"
    if problem is not None:
        tally.wrong.append(f"{instance}, {neighbour.kind}, {neighbour.words}: {problem}")
    elif found and not must_match:
        tally.claimed[neighbour.kind] += 1


def _problem(
    judge: Judge, instance: Instance, neighbour: Neighbour, found: Sequence[Match], *, must_match: bool
) -> str | None:
    if must_match and [match.variant for match in found] != [instance.variant]:
        return f"expected a match, found {[str(match.variant) for match in found]}"
    return judge.problem(neighbour.graph, found, instance, must_fire=must_match) if found else None


def _strings(rule: Rule) -> tuple[str, ...]:
    values = (value for _, values in read_domain(rule).axes for value in values)
    return tuple(value for value in values if isinstance(value, str))
