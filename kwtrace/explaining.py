"""The slow run of a match that goes on where it fails, to say how far it came and what differs first."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from torch import fx

from kwtrace import operators
from kwtrace.binding import Binder, Pending, State, law_between
from kwtrace.copying import copy_nodes
from kwtrace.engine import Engine, is_disabled, missing_operators
from kwtrace.explanations import Explanation, Miss, RuleExplanation, location_of
from kwtrace.loading import as_pattern_set
from kwtrace.matches import Match, Mismatch
from kwtrace.matching import Matcher
from kwtrace.normal import View
from kwtrace.patterns import Capture, Op, PatternSet, Ref, Value, map_leaves
from kwtrace.rewriting import Refusal, rewrite
from kwtrace.sharing import share_sizes
from kwtrace.values import same


@dataclass(frozen=True, slots=True)
class _Try:
    """One place at which a family was tried: how near it came, what it bound there, and the first refusal."""

    nearness: tuple[int, int]
    matcher: Matcher
    state: State
    matched: int
    refusal: Mismatch


def explain(gm: fx.GraphModule, patterns: Any) -> Explanation:
    """Say, rule by rule, what matches in an ATen graph, and where each rule came nearest to matching otherwise.

    ``patterns`` is what `kwtrace.apply` takes. What is looked at is the graph as it is, not what a rewrite would make
    of it, which other rules may match in turn. The graph isn't changed, and nothing is raised: what goes wrong is the
    result's ``problem``.
    """
    try:
        graph, _ = copy_nodes(gm.graph)
        share_sizes(graph)
        return explain_graph(graph, as_pattern_set(patterns))
    except Exception as error:  # noqa: BLE001 - whoever asks why gets an answer, not another error
        return Explanation(problem=f"{type(error).__name__}: {error}")


def explain_graph(graph: fx.Graph, patterns: PatternSet) -> Explanation:
    """Say what matches in a graph, and what came nearest."""
    matchers = [Matcher(family) for family in patterns.families if not missing_operators(family)]
    view = View(graph)
    found = [match for matcher in matchers for match in _matches(matcher, view)]
    engine = Engine(patterns)
    chosen = {_identity(match) for match in engine.find(graph)}
    kept = [match for match in found if _identity(match) in chosen]
    refused = _refusals(graph, engine, len(chosen))
    by_node = {node: match for match in kept if _place(match) not in refused for node in match.nodes}
    rules = {}
    for rule in patterns.rules:
        own = [match for match in found if match.rule == rule]
        written = [m for m in own if m in kept and _place(m) not in refused]
        mine = [matcher for matcher in matchers if matcher.family.rule == rule]
        nearest = _nearest(mine, view, own, by_node) if mine else _off(patterns, rule)
        miss = _lost(own, kept, refused, by_node) or nearest
        rules[rule] = RuleExplanation(rule, tuple(str(match.variant) for match in written), miss)
    return Explanation(rules)


def _off(patterns: PatternSet, rule: str) -> Miss:
    """Return the miss of a rule whose operators aren't registered."""
    family = next(family for family in patterns.families if family.rule == rule)
    words = f"operators: expected {', '.join(missing_operators(family))} registered, found them missing"
    return Miss(family.variant(family.rows[0]), 0, len(family.skeleton.search), words)


def _matches(matcher: Matcher, view: View) -> Iterator[Match]:
    for node in _calls(view.graph, matcher.anchor.target):
        match = matcher.match(view, node)
        if match is not None:
            yield match


def _calls(graph: fx.Graph, target: str) -> list[fx.Node]:
    calls = (node for node in graph.nodes if node.op == "call_function")
    return [node for node in calls if operators.name_of(node.target) == target]


def _identity(match: Match) -> tuple[str, str]:
    return (str(match.variant), match.outputs[0].name)


def _place(match: Match) -> str:
    return match.outputs[0].name


def _refusals(graph: fx.Graph, engine: Engine, count: int) -> dict[str, str]:
    """Return, by output, why a match can't be rewritten; each of ``count`` is tried on a copy of the graph."""
    refused = {}
    for place in range(count):
        match = engine.find(copy_nodes(graph)[0])[place]
        name = _place(match)
        result = rewrite(match)
        if isinstance(result, Refusal):
            refused[name] = result.words
    return refused


def _lost(
    own: list[Match], kept: list[Match], refused: Mapping[str, str], by_node: Mapping[fx.Node, Match]
) -> Miss | None:
    """Return the miss of a whole match that isn't rewritten: switched off, refused, or less than another."""
    disabled = os.environ.get("KWTRACE_DISABLE", "")
    for match in own:
        winner = next((by_node[node] for node in match.nodes if node in by_node), None)
        size = len(match.family.skeleton.search)
        output = match.outputs[0]
        if is_disabled(match.variant, disabled):
            words = f"it is switched off by KWTRACE_DISABLE={disabled}"
            return Miss(match.variant, size, size, words, None, output.name, location_of(output))
        if _place(match) in refused and match in kept:
            words = f"replacement: expected it to yield what the graph has, found {refused[_place(match)]}"
            return Miss(match.variant, size, size, words, 6, output.name, location_of(output))
        if match not in kept and winner is not None:
            words = f"operators: expected no better match of them, found {winner.variant}"
            others = (str(winner.variant),)
            return Miss(match.variant, size, size, words, 8, output.name, location_of(output), others)
    return None


def _nearest(matchers: list[Matcher], view: View, own: list[Match], by_node: Mapping[fx.Node, Match]) -> Miss | None:
    """Return the nearest miss of a rule's families, away from where the rule matches."""
    taken = {node for match in own for node in match.nodes}
    best: _Try | None = None
    for matcher in matchers:
        needs = _needs(matcher)
        for op in reversed(matcher.skeleton.search):
            most = matcher.size if op is matcher.anchor else 2 * len(needs[op.name]) - matcher.size - 1
            if best is not None and best.nearness[0] >= most:
                continue
            attempts = _tries(matcher, view, op, taken)
            best = max(attempts if best is None else [best, *attempts], key=lambda a: a.nearness, default=None)
    if best is None:
        return None if own else _absent(matchers)
    others = {str(by_node[node].variant): None for node in best.state.nodes.values() if node in by_node}
    return replace(_miss(best), others=tuple(others))


def _needs(matcher: Matcher) -> dict[str, set[str]]:
    """Return, by operator, the names of all those that a try which starts there can bind."""
    needs: dict[str, set[str]] = {}
    for op in matcher.skeleton.search:
        needs[op.name] = {op.name}.union(*(needs[name] for name in _refs(op)))
    return needs


def _absent(matchers: list[Matcher]) -> Miss:
    """Return the miss of a rule of which no operator is in the graph."""
    matcher = matchers[0]
    words = f"operators: expected {', '.join(sorted(matcher.required))}, found none of them in the graph"
    return Miss(matcher.family.variant(matcher.family.rows[0]), 0, matcher.size, words)


def _tries(matcher: Matcher, view: View, op: Op, taken: set[fx.Node]) -> list[_Try]:
    """Try a family at each place in the graph that its operator ``op`` could be."""
    nodes = [node for node in _calls(view.graph, op.target) if node not in taken]
    attempts = (_attempt(matcher, view, op, node) for node in nodes)
    return [attempt for attempt in attempts if attempt is not None]


def _attempt(matcher: Matcher, view: View, op: Op, node: fx.Node) -> _Try | None:
    state = State()
    binder = _Lenient(matcher.ops, matcher.captures, view, state)
    binder.bind(op, node)
    refusals = binder.refusals
    if op is not matcher.anchor:
        refusals = [_unused(matcher, op, node), *refusals]
    if not refusals:
        refusals = _conclude(matcher, view, node, state)
    if not refusals:
        return None
    bound = set(state.nodes.values())
    matched = len(bound - {refusal.node for refusal in binder.refusals})
    nearness = 2 * len(bound) - matcher.size - len(refusals)
    return _Try((nearness, len(bound)), matcher, state, matched, refusals[0])


def _unused(matcher: Matcher, op: Op, node: fx.Node) -> Mismatch:
    """Return the refusal of a place that has no more operators behind it."""

    def words() -> str:
        user = next(o for o in matcher.skeleton.search if op.name in _refs(o))
        found = ", ".join(operators.name_of(n.target) for n in node.users if n.op == "call_function") or "nothing"
        return f"users of {op.target}: expected {user.target}, found {found}"

    return Mismatch(None, node, words)


def _refs(op: Op) -> set[str]:
    """Return the names of the operators whose results ``op`` takes."""
    found: set[str] = set()

    def note(leaf: Any) -> Any:
        if isinstance(leaf, Ref):
            found.add(leaf.name)
        return leaf

    map_leaves(op, note)
    return found


def _conclude(matcher: Matcher, view: View, node: fx.Node, state: State) -> list[Mismatch]:
    """Return why a place where every operator is right doesn't match all the same."""
    try:
        matcher.try_match(view, node)
    except Mismatch as mismatch:
        return _row_differences(matcher, state) or [mismatch]
    return []


def _row_differences(matcher: Matcher, state: State) -> list[Mismatch]:
    """Return what keeps the graph's constants from being those of the nearest variant."""
    try:
        matcher.read_inputs(state)
    except Mismatch:
        return []
    row = _nearest_row(matcher, state)
    columns = matcher.family.columns
    wrong = [c for c in matcher.keyed if c in state.cells and not same(row[columns.index(c)], state.cells[c])]
    return [_difference(matcher, state, column, row, single=len(wrong) == 1) for column in wrong]


def _nearest_row(matcher: Matcher, state: State) -> tuple[Value, ...]:
    """Return the row that differs in the fewest columns from what was bound."""
    places = [(matcher.family.columns.index(c), state.cells[c]) for c in matcher.keyed if c in state.cells]
    return min(matcher.family.rows, key=lambda row: sum(not same(row[place], cell) for place, cell in places))


def _difference(matcher: Matcher, state: State, column: str, row: tuple[Value, ...], *, single: bool) -> Mismatch:
    place = matcher.family.columns.index(column)
    node, argument = state.origins[column]
    found = state.cells[column]
    wanted = _alternatives(matcher, column, row) if single else [row[place]]
    axes = dict(matcher.skeleton.axes)
    name = column if column in axes else argument
    law = 4 if node.op == "placeholder" else law_between(row[place], found)
    return Mismatch(law, node, lambda: f"{name}: expected {' or '.join(map(repr, wanted))}, found {found!r}")


def _alternatives(matcher: Matcher, column: str, row: tuple[Value, ...]) -> list[Value]:
    """Return the values that a column has in the rows that agree with ``row`` on all others that count."""
    columns = matcher.family.columns
    others = [columns.index(c) for c in matcher.keyed if c != column]
    alike = [r for r in matcher.family.rows if all(same(r[i], row[i]) for i in others)]
    return list(dict.fromkeys(r[columns.index(column)] for r in alike))


def _miss(found: _Try) -> Miss:
    matcher, refusal = found.matcher, found.refusal
    variant = matcher.family.variant(_nearest_row(matcher, found.state))
    name, location = (None, None) if refusal.node is None else (refusal.node.name, location_of(refusal.node))
    return Miss(variant, found.matched, matcher.size, str(refusal), refusal.law, name, location)


class _Lenient(Binder):
    """Goes on after a refusal, and keeps it."""

    def __init__(self, ops: Mapping[str, Op], captures: Mapping[str, Capture], view: View, state: State) -> None:
        super().__init__(ops, captures, view, state)
        self.refusals: list[Mismatch] = []

    def refuse(self, law: int | None, node: fx.Node, words: Callable[[], str]) -> Pending:
        text = words()
        self.refusals.append(Mismatch(law, node, lambda: text))
        return []
