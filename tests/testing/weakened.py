"""The laws weakened one clause at a time, to see that the near misses catch it."""

from __future__ import annotations

import importlib
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import rules_for_laws as laws
import torch
import toys
from torch import fx

import kwtrace as kt
from kwtrace import operators, values
from kwtrace.normal import View, same_sizes
from kwtrace.patterns import Hole, In, PatternSet
from kwtrace.restriding import Restriding
from kwtrace.testing import Tally, check_rows

PARTS = 8
"""In how many parts the changes are tried: a test takes part after part until one catches the weakening."""
Weak = Callable[[Any], Any]
"""Makes the weakened function from the real one."""


def _always(value: Any) -> Weak:
    return lambda _: lambda *args, **kwargs: value


def _nothing(_: Any) -> Any:
    return lambda *args, **kwargs: None


def _without_defaults(real: Any) -> Any:
    """Don't compare an argument that the pattern has at its schema's default."""

    def bind(self: Any, name: str, value: Any, found: Any, owner: fx.Node) -> Any:
        arguments = operators.describe(owner.target).arguments or ()
        defaults = {a.name: a.default for a in arguments if a.has_default}
        if name in defaults and values.same(values.plain(defaults[name]), value):
            return []
        return real(self, name, value, found, owner)

    return bind


def _without_dims(real: Any) -> Any:
    """Don't compare an argument that names dims."""

    def bind(self: Any, name: str, value: Any, found: Any, owner: fx.Node) -> Any:
        dims = {a.name for a in operators.describe(owner.target).arguments or () if a.is_dim}
        return [] if name in dims else real(self, name, value, found, owner)

    return bind


def _without_strings(real: Any) -> Any:
    """Take strings in a pattern's table for wildcards."""
    return lambda value: "a string" if isinstance(value, str) and value in ("none", "twice") else real(value)


def _equal(_: Any) -> Any:
    return lambda left, right: left == right


def _equal_of_one_type(_: Any) -> Any:
    return lambda left, right: type(left) is type(right) and left == right


def _any_dtype(real: Any) -> Any:
    def same(wanted: Any, found: Any) -> bool:
        return (isinstance(wanted, torch.dtype) and isinstance(found, torch.dtype)) or real(wanted, found)

    return same


def _tensor_for_none(real: Any) -> Any:
    """Let None in a pattern be any tensor."""

    def bind(self: Any, name: str, value: Any, found: Any, owner: fx.Node) -> Any:
        return [] if value is None and isinstance(found, fx.Node) else real(self, name, value, found, owner)

    return bind


def _none_for_tensor(real: Any) -> Any:
    """Let None stand for a tensor of the rule: it is taken for the first input of the graph."""

    def bind(self: Any, name: str, value: Any, found: Any, owner: fx.Node) -> Any:
        if found is None and isinstance(value, In):
            found = next(node for node in owner.graph.nodes if node.op == "placeholder")
        return real(self, name, value, found, owner)

    return bind


def _tensor_for_number(real: Any) -> Any:
    """Take a tensor for a captured number."""

    def bind(self: Any, hole: Hole, found: Any, owner: fx.Node) -> Any:
        tensor = isinstance(found, fx.Node) and isinstance(found.meta["val"], torch.Tensor)
        return real(self, hole, 0.37 if tensor else found, owner)

    return bind


def _declared_twice(real: Any) -> Any:
    """Let an input be bound to one tensor here and to another there."""

    def bind(self: Any, name: str, value: Any, found: Any, owner: fx.Node) -> Any:
        if isinstance(value, In) and value.name in self.state.inputs and isinstance(found, fx.Node):
            return []
        return real(self, name, value, found, owner)

    return bind


def _live_users(_: Any) -> Any:
    """Count every user of an inner node, dead or not."""
    return lambda self, node, own, kept: node in own


def _permutes_too(real: Any) -> Any:
    def changes_nothing(self: View, name: str, node: fx.Node, source: fx.Node) -> bool:
        if name == "aten.permute.default":
            return same_sizes(source.meta["val"].shape, node.meta["val"].shape)
        return bool(real(self, name, node, source))

    return changes_nothing


def _whatever(wanted: str) -> Weak:
    """Take every call of an operator for an identity."""

    def weak(real: Any) -> Any:
        return lambda self, name, node, source: name == wanted or real(self, name, node, source)

    return weak


def _first(_: Any) -> Any:
    """Let the first match found win."""

    def choose(found: list[kt.Match]) -> list[kt.Match]:
        taken: set[fx.Node] = set()
        kept = []
        for match in found:
            if taken.isdisjoint(match.nodes):
                taken.update(match.nodes)
                kept.append(match)
        return kept

    return choose


def _by_size_only(real: Any) -> Any:
    """Let the order of families decide between matches of one size."""

    def choose(found: list[kt.Match]) -> list[kt.Match]:
        return list(_first(real)(sorted(found, key=lambda match: -len(match.family.skeleton.search))))

    return choose


def _every_variant(_: Any) -> Any:
    return lambda rule, domain, drafts: (list(drafts), [], [])


@dataclass(frozen=True, slots=True)
class Weakening:
    """A law without one of its clauses.

    ``patches`` holds, by dotted name, what replaces what; ``subject`` the rules that show it, ``reason`` a regular
    expression for what the near misses have to say. ``generating`` says that it is while generating that the clause is
    missing.
    """

    law: int
    words: str
    subject: tuple[kt.Rule, ...]
    reason: str
    patches: Mapping[str, Weak] = field(hash=False)
    generating: bool = False

    def __str__(self) -> str:
        """Return the law and the words."""
        return f"law {self.law}: {self.words}"

    @contextmanager
    def applied(self) -> Iterator[None]:
        """Leave the clause out."""
        with ExitStack() as stack:
            for name, weak in self.patches.items():
                owner, attribute = _owner(name)
                stack.enter_context(mock.patch.object(owner, attribute, weak(getattr(owner, attribute))))
            yield

    def patterns(self) -> PatternSet:
        """Return what to try: the patterns of the subject, generated without the clause if that is where it counts."""
        if not self.generating:
            return toys.patterns(*self.subject)
        with self.applied():
            families = [family for rule in self.subject for family in laws.generated(rule).families]
        return PatternSet(tuple(families))

    def tally(self, part: int, *, weakened: bool) -> Tally:
        """Try one part of all changes of the subject's last rule."""
        patterns = self.patterns()
        rows = [(f, row) for f in patterns.families if f.rule == self.subject[-1].name for row in f.rows]
        rules = {rule.name: rule for rule in self.subject}
        if not weakened or self.generating:
            return check_rows(patterns, rules, rows, (part, PARTS))
        with self.applied():
            return check_rows(patterns, rules, rows, (part, PARTS))

    def caught(self, tally: Tally) -> list[str]:
        """Return what went wrong for the reason that it should."""
        return [words for words in tally.wrong if re.search(self.reason, words)]


def _owner(name: str) -> tuple[Any, str]:
    """Return what holds the attribute that a dotted name names: a module, or a class in one."""
    path, attribute = name.rsplit(".", 1)
    try:
        return importlib.import_module(path), attribute
    except ModuleNotFoundError:
        module, holder = path.rsplit(".", 1)
        return getattr(importlib.import_module(module), holder), attribute


OTHER = "is not what the graph has"
DECLARED = "declares something else"
NUMBERS = "output 0: (error|expected)"
MISSED = "expected a match, found"
BINDER = "kwtrace.binding.Binder"
VIEW = "kwtrace.normal.View"
SAME = ("kwtrace.binding.same", "kwtrace.constants.same")
low_rule, high_rule = toys.rival("low", "low"), toys.rival("high", "high", priority=1)

WEAKENINGS = (
    Weakening(
        1, "an argument at its default isn't compared", (toys.topk_rule,), OTHER,
        {f"{BINDER}._bind_value": _without_defaults},
    ),
    Weakening(
        1, "dims aren't compared", (toys.bounds_rule,), OTHER, {f"{BINDER}._bind_value": _without_dims},
    ),
    Weakening(
        1, "a dim counts from one end only", (toys.topk_rule,), f"arguments.*{MISSED}",
        {"kwtrace.normal._wrap_dims": _nothing},
    ),
    Weakening(
        1, "arguments by keyword aren't read", (toys.scaled_rule,), "(?s)arguments.*(raised|expected a match)",
        {"kwtrace.operators.bind": lambda real: lambda target, args, kwargs: real(target, args, {})},
    ),
    Weakening(2, "constants are compared with ==", (laws.signed_rule,), OTHER, dict.fromkeys(SAME, _equal)),
    Weakening(
        2, "zeros of both signs are one", (laws.signed_rule,), OTHER, dict.fromkeys(SAME, _equal_of_one_type),
    ),
    Weakening(
        2, "NaN equals nothing", (laws.edges_rule,), f"none.*{MISSED}", dict.fromkeys(SAME, _equal_of_one_type),
    ),
    Weakening(
        2, "a dtype is a wildcard", (laws.rounded_rule,), OTHER, {"kwtrace.binding.same_constant": _any_dtype},
    ),
    Weakening(
        2, "a string is a wildcard", (laws.moded_rule,), f"{OTHER}|{MISSED}",
        {"kwtrace.matching.exact_key": _without_strings},
    ),
    Weakening(
        3, "sizes in a graph aren't proved", (laws.rooted_rule,), OTHER,
        {"kwtrace.checking.known_equal": _always(value=True)},
    ),
    Weakening(
        3, "sizes of inputs aren't proved", (toys.scaled_add_rule,), DECLARED,
        {"kwtrace.sizes.known_equal": _always(value=True)},
    ),
    Weakening(
        3, "conditions are ignored", (laws.limited_rule,), OTHER,
        {"kwtrace.checking.condition": _always(lambda dims: True)},
    ),
    Weakening(
        3, "the least size is ignored", (toys.scaled_rule,), DECLARED, {"kwtrace.checking.known": _always(value=True)},
    ),
    Weakening(
        4, "dtypes of inputs aren't checked", (laws.above_rule,), f"dtype.*{DECLARED}",
        {"kwtrace.matching.check_inputs": _nothing},
    ),
    Weakening(
        4, "ranks of inputs aren't checked", (laws.total_rule,), f"rank.*{DECLARED}",
        {"kwtrace.matching.check_inputs": _nothing},
    ),
    Weakening(
        4, "devices of inputs aren't checked", (toys.scaled_rule,), f"device.*{DECLARED}",
        {"kwtrace.matching.check_inputs": _nothing},
    ),
    Weakening(
        4, "None takes a tensor", (laws.joined_rule,), OTHER, {f"{BINDER}._bind_number": _tensor_for_none},
    ),
    Weakening(
        4, "a tensor takes None", (laws.paired_rule,), OTHER, {f"{BINDER}._bind_tensor": _none_for_tensor},
    ),
    Weakening(
        4, "a captured number takes a tensor", (toys.scaled_rule,), OTHER, {f"{BINDER}._bind_hole": _tensor_for_number},
    ),
    Weakening(
        4, "an input is two tensors", (toys.bounds_rule,), OTHER, {f"{BINDER}._bind_tensor": _declared_twice},
    ),
    Weakening(
        5, "users of inner nodes are ignored", (toys.scaled_rule,), "is used by .* outside the match",
        {f"{VIEW}.ends_in": _always(value=True)},
    ),
    Weakening(
        5, "dead users count", (toys.scaled_rule,), f"dead node.*{MISSED}", {f"{VIEW}.ends_in": _live_users},
    ),
    Weakening(
        5, "mutations are ignored", (toys.scaled_rule,), "mutates or orders", {f"{VIEW}.region": _always(0)},
    ),
    Weakening(
        5, "streams are ignored", (toys.scaled_rule,), "record_event.* mutates or orders",
        {"kwtrace.normal._is_boundary": lambda real: lambda node: real(node) and "streams" not in str(node.target)},
    ),
    Weakening(
        6, "outputs aren't compared", (laws.untrue_rule,), NUMBERS,
        {"kwtrace.rewriting._difference": _nothing, "kwtrace.matching.check_outputs": _nothing},
    ),
    Weakening(
        6, "who reads strides is ignored", (toys.strided_rule,), "strides.*(output 1: error|expected it to run)",
        {"kwtrace.rewriting.restride": _always(Restriding())},
    ),
    Weakening(
        6, "new values aren't written down", (toys.strided_rule,), "where its metadata says",
        {"kwtrace.restriding.Restriding.apply": _nothing},
    ),
    Weakening(
        7, "two variants have one search graph", (laws.conflicting_rule,), MISSED,
        {"kwtrace.generation._compare": _every_variant}, generating=True,
    ),
    Weakening(
        7, "an axis is ignored", (laws.ignoring_rule,), NUMBERS,
        {"kwtrace.generation._unused_axes": _always([])}, generating=True,
    ),
    Weakening(
        7, "a captured value vanished", (laws.vanishing_rule,), "expected a value of scale, found none",
        {"kwtrace.drafting._check_arguments": _nothing}, generating=True,
    ),
    Weakening(
        7, "a captured value is dropped", (laws.dropping_rule,), NUMBERS,
        {"kwtrace.drafting._check_arguments": _nothing}, generating=True,
    ),
    Weakening(
        8, "the first match found wins", (toys.scaled_rule, toys.scaled_add_rule),
        f"{MISSED}|with families in reverse order", {"kwtrace.engine._choose": _first},
    ),
    Weakening(
        8, "the order decides between equals", (low_rule, high_rule), f"{MISSED}|with families in reverse order",
        {"kwtrace.engine._choose": _by_size_only},
    ),
    Weakening(
        9, "a permutation is an identity", (toys.scaled_rule,), f"detour.*{OTHER}",
        {f"{VIEW}._changes_nothing": _permutes_too},
    ),
    Weakening(
        9, "any cast is an identity", (toys.scaled_rule,), f"detour.*{OTHER}",
        {f"{VIEW}._changes_nothing": _whatever("prims.convert_element_type.default")},
    ),
    Weakening(
        9, "any slice is an identity", (laws.total_rule,), f"detour.*{OTHER}",
        {f"{VIEW}._changes_nothing": _whatever("aten.slice.Tensor")},
    ),
    Weakening(
        9, "nothing is an identity", (toys.scaled_rule,), f"identity.*{MISSED}", {f"{VIEW}.identity_source": _nothing},
    ),
)  # fmt: skip
"""What is left out, and of which law; law 10 has changes of its own, in `changed_sets`."""
