"""Matches → graph edits: the replacement put in place, with metadata that says what the new nodes yield."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from kwtrace import derived, operators
from kwtrace.aliasing import shares_more
from kwtrace.fakes import common_mode, run
from kwtrace.layouts import must_copy
from kwtrace.matches import Match
from kwtrace.materialising import Materialiser
from kwtrace.normal import View, same_sizes
from kwtrace.patterns import AtMatch, Graph, Hole, In, MatchDevice, Ref, Size, fill
from kwtrace.restriding import Restriding, restride, same_strides
from kwtrace.scaling import scaled_operand
from kwtrace.tracing_at_match import trace_replacement

_OWN_META = frozenset({"val", "tensor_meta", "unbacked_bindings", "eager_input_vals", "example_value"})


@dataclass(frozen=True, slots=True)
class Rewrite:
    """What a rewrite put in: the nodes that stand for the outputs, and all new nodes."""

    results: tuple[fx.Node, ...]
    new: tuple[fx.Node, ...]


@dataclass(frozen=True, slots=True)
class Refusal:
    """Why a match wasn't rewritten, in words; the graph is as it was."""

    words: str


def rewrite(match: Match) -> Rewrite | Refusal:
    """Put the replacement in place of a match, unless it can't be made or would yield something else."""
    writer = _Writer(match)
    try:
        with match.graph.inserting_before(_last_output(match)):
            results = writer.write()
    except Exception as error:  # noqa: BLE001 - whatever a replacement raises must not stop a user's compile
        refused: str | None = f"{type(error).__name__}: {error}"
    else:
        refused = _difference(match, results)
    restriding = Restriding()
    if refused is None:
        pairs = zip(match.outputs, results, strict=True)
        changed = {old: new.meta["val"] for old, new in pairs if not same_strides(old.meta["val"], new.meta["val"])}
        restriding = restride(changed)
        if restriding.reader is not None:
            refused = f"other strides, which {restriding.reader} reads"
    if refused is not None:
        writer.undo()
        return Refusal(refused)
    restriding.apply()
    early = [user for output in match.outputs for user in output.users if user < _last_output(match)]
    for old, new in zip(match.outputs, results, strict=True):
        old.replace_all_uses_with(new)
    _erase(match)
    _move_behind([user for user in early if not user._erased], results)
    return Rewrite(results, tuple(writer.new))


class _Writer:
    """Instantiates a replacement graph."""

    def __init__(self, match: Match) -> None:
        self.match, self.graph = match, match.graph
        self.cells = dict(zip(match.family.columns, match.row, strict=True))
        self.mode = common_mode([*match.inputs.values(), *match.outputs])
        self.values: dict[str, fx.Node] = {}
        self.new: list[fx.Node] = []
        self.sizes = Materialiser(match, self.mode, self.new)

    def write(self) -> tuple[fx.Node, ...]:
        replacement = self.match.family.skeleton.replacement
        if isinstance(replacement, AtMatch):
            results = self._copy(trace_replacement(self.match, self.mode))
        else:
            results = self._instantiate(replacement)
        return self._apart(results)

    def undo(self) -> None:
        for node in reversed(self.new):
            self.graph.erase_node(node)

    def _instantiate(self, replacement: Graph) -> tuple[fx.Node, ...]:
        for call in replacement.calls:
            target = operators.resolve(call.target)
            args = tuple(self._value(value) for value in call.args)
            kwargs = {name: self._value(value) for name, value in call.kwargs}
            bound = operators.bind(target, args, kwargs)
            scaled = self._scaled(call.target, bound)
            laid_out = {name: self._laid_out(call.target, name, value) for name, value in scaled.items()}
            args, kwargs = operators.unbind(target, laid_out) if laid_out != bound else (args, kwargs)
            _check_numbers(target, laid_out)
            args, kwargs = operators.without_defaults(target, args, kwargs)
            self.values[call.name] = self._add(target, args, kwargs)
        return tuple(self._value(value) for value in replacement.outputs)

    def _apart(self, results: tuple[fx.Node, ...]) -> tuple[fx.Node, ...]:
        """Copy results that share memory which those of the match don't: someone may write to either later."""
        found = list(results)
        for place, result in enumerate(results):
            if shares_more(self.match.outputs, found, self.match.nodes, self.new, place):
                found[place] = self._add(torch.ops.aten.clone.default, (result,), {})
        return tuple(found)

    def _scaled(self, target: str, bound: Mapping[str, Any]) -> Mapping[str, Any]:
        found = scaled_operand(target)
        if found is None or not isinstance(bound[found[0]], fx.Node):
            return bound
        scale, operand = found
        if bound[operand].meta["val"].dtype is torch.float16:
            return bound  # the product may overflow where the scores wouldn't
        product = self._add(torch.ops.aten.mul.Tensor, (bound[operand], bound[scale]), {})
        return {**bound, operand: product, scale: 1.0}

    def _laid_out(self, target: str, argument: str, value: Any) -> Any:
        if not isinstance(value, fx.Node) or not must_copy(target, argument, value.meta.get("val")):
            return value
        return self._add(torch.ops.aten.clone.default, (value,), {"memory_format": torch.contiguous_format})

    def _copy(self, traced: Any) -> tuple[fx.Node, ...]:
        mapped: dict[fx.Node, Any] = dict(zip(traced.placeholders, traced.bound, strict=True))
        for node in traced.graph.nodes:
            if node.op != "call_function":
                continue
            args = fx.map_arg(node.args, lambda n: mapped[n])
            kwargs = fx.map_arg(node.kwargs, lambda n: mapped[n])
            mapped[node] = self._add(node.target, args, kwargs)
        return tuple(mapped[node] for node in traced.outputs)

    def _add(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> fx.Node:
        node = self.graph.call_function(target, args, kwargs)
        self.new.append(node)
        node.meta = {key: value for key, value in self.match.outputs[0].meta.items() if key not in _OWN_META}
        node.meta["val"] = run(node, self.mode)
        return node

    def _value(self, value: Any) -> Any:
        if isinstance(value, tuple):
            return [self._value(item) for item in value]
        if isinstance(value, In):
            return self.match.inputs[value.name]
        if isinstance(value, Ref):
            return self.values[value.name]
        if isinstance(value, Size):
            return self.sizes.write(value.expr)
        if isinstance(value, Hole):
            captured = self.match.kwargs[value.name]
            return (
                self.sizes.derive(value, captured)
                if isinstance(captured, fx.Node)
                else derived.evaluate(value, captured)
            )
        if isinstance(value, MatchDevice):
            return next(iter(self.match.tensors.values())).device
        return fill(value, self.cells)


def _check_numbers(target: Any, bound: Mapping[str, Any]) -> None:
    """Refuse a symbolic number where an operator takes a plain one: torch would guard on its value.

    Raises:
        TypeError: naming the argument.

    """
    plain = operators.plain_numbers_of(target)
    for name, value in bound.items():
        if name in plain and isinstance(value, fx.Node):
            msg = f"the symbolic number {value} for {name} of {target}, which takes a plain one"
            raise TypeError(msg)


def _last_output(match: Match) -> fx.Node:
    return max(match.outputs)


def _move_behind(early: list[fx.Node], results: tuple[fx.Node, ...]) -> None:
    """Move what uses an output before the last one was computed, and what depends on that, behind the new nodes."""
    if not early:
        return
    last, first = max(results), min(early)
    moved = set(early)
    node = first
    while node < last:
        if not moved.isdisjoint(node.all_input_nodes):
            moved.add(node)
        node = node.next
    for node in sorted(moved):
        last.append(node)
        last = node


def _difference(match: Match, results: tuple[fx.Node, ...]) -> str | None:
    for old, new in zip(match.outputs, results, strict=True):
        wanted, found = old.meta["val"], new.meta["val"]
        if not isinstance(found, torch.Tensor):
            return f"{found!r} for {old}"
        same_kind = found.dtype is wanted.dtype and found.device == wanted.device
        if not same_kind or not same_sizes(found.shape, wanted.shape):
            return f"{_described(found)} for {_described(wanted)}"
    return None


def _described(value: torch.Tensor) -> str:
    return f"{value.dtype} {list(value.shape)} on {value.device}"


def _erase(match: Match) -> None:
    """Erase the match, what nothing uses behind it, and the identities before it that it alone used."""
    view = View(match.graph)
    pending = sorted({*_dead_behind(match), *match.nodes}, reverse=True)
    while pending:
        node = pending.pop(0)
        if node.users or node._erased:
            continue
        operands = node.all_input_nodes
        match.graph.erase_node(node)
        pending += [operand for operand in operands if not operand.users and view.identity_source(operand) is not None]


def _dead_behind(match: Match) -> set[fx.Node]:
    """Return what uses inner nodes from outside: matching has shown that nothing needs it."""
    own = set(match.nodes)
    found: set[fx.Node] = set()
    pending = [user for node in match.nodes for user in node.users if user not in own]
    while pending:
        node = pending.pop()
        if node not in found and node not in own:
            found.add(node)
            pending += node.users
    return found


def remapped(inputs: Mapping[str, fx.Node], replaced: Mapping[fx.Node, fx.Node]) -> dict[str, fx.Node]:
    """Return the inputs of a match after other matches were rewritten."""
    found = dict(inputs)
    for name in inputs:
        while found[name] in replaced:
            found[name] = replaced[found[name]]
    return found
