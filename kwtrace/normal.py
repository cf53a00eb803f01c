"""The normal form of a graph: every argument bound to its schema, identities looked through.

Both sides of a match are read through a `View`, the traced search graph and the user's graph alike, so that two
spellings of one thing are one thing (laws 1 and 9).
"""

from __future__ import annotations

import operator
import sys
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import fx
from torch.fx.experimental.symbolic_shapes import statically_known_true

from kwtrace import operators
from kwtrace.values import same

_ALIASES = frozenset(
    {"aten.alias.default", "aten.clone.default", "aten.detach.default", "aten.lift_fresh_copy.default"}
)
_RESHAPES = frozenset({"aten.view.default", "aten.expand.default"})
_CAST = "prims.convert_element_type.default"
_SLICE = "aten.slice.Tensor"
_IDENTITIES = dict.fromkeys((*_ALIASES, *_RESHAPES, _SLICE, "aten.permute.default"), "self") | {_CAST: "a"}
"""Operators that may change nothing, and the argument that they pass on."""
_SYMBOLIC = (torch.SymInt, torch.SymFloat, torch.SymBool)


class View:
    """A graph read in normal form; what it reads it keeps, so it must not outlive a change of the graph."""

    def __init__(self, graph: fx.Graph) -> None:
        """Read nothing yet."""
        self.graph = graph
        self._stripped: dict[tuple[fx.Node, int], fx.Node] = {}
        self._args: dict[fx.Node, dict[str, Any]] = {}
        self._regions: dict[fx.Node, int] = {}

    def strip(self, node: fx.Node, region: int = 0) -> fx.Node:
        """Follow ``node`` through operations that provably leave every value as it is, within a region.

        A copy that was taken before a mutation, in an earlier region, is not what its source is now.
        """
        found = self._stripped.get((node, region))
        if found is not None:
            return found
        current, chain = node, [node]
        while (source := self.identity_source(current)) is not None and self.region(current) == region:
            current = source
            chain.append(current)
        self._stripped.update({(link, region): current for link in chain})
        return current

    def identity_source(self, node: fx.Node) -> fx.Node | None:
        """Return the node whose values, shape and dtype ``node`` yields unchanged, or None."""
        if node.op != "call_function":
            return None
        name = operators.name_of(node.target)
        if name not in _IDENTITIES:
            return None
        source = self.args(node)[_IDENTITIES[name]]
        if not isinstance(source, fx.Node):
            return None
        return source if name in _ALIASES or self._changes_nothing(name, node, source) else None

    def _changes_nothing(self, name: str, node: fx.Node, source: fx.Node) -> bool:
        before, after = source.meta.get("val"), node.meta.get("val")
        if not isinstance(before, torch.Tensor) or not isinstance(after, torch.Tensor):
            return False
        if name == _CAST:
            return before.dtype is after.dtype
        if name == "aten.permute.default":
            return list(self.args(node)["dims"]) == list(range(before.dim()))
        forward = name != _SLICE or same(self.args(node)["step"], 1)
        return forward and same_sizes(before.shape, after.shape)

    def args(self, node: fx.Node) -> dict[str, Any]:
        """Return every argument of ``node`` by name, defaults filled in, dims and sizes made absolute."""
        found = self._args.get(node)
        if found is None:
            found = self._args[node] = _normalise(node)
        return found

    def region(self, node: fx.Node) -> int:
        """Return the number of mutations and stream operations before ``node``."""
        if not self._regions:
            count = 0
            for current in self.graph.nodes:
                count += _is_boundary(current)
                self._regions[current] = count
        return self._regions[node]

    def ends_in(self, node: fx.Node, own: set[fx.Node], kept: set[fx.Node]) -> bool:
        """Tell whether nothing that counts needs ``node`` but what is in ``own``: it can be erased along with that.

        ``kept`` are nodes that stay: what they need counts.
        """
        pending, seen = [node], {node}
        while pending:
            current = pending.pop()
            if current in kept or current.op == "output" or _is_boundary(current) or current.is_impure():
                return False
            if current in own:
                continue
            pending.extend(user for user in current.users if user not in seen)
            seen.update(current.users)
        return True


def same_sizes(left: Sequence[Any], right: Sequence[Any]) -> bool:
    """Tell whether two shapes are provably equal, without adding a guard."""
    return len(left) == len(right) and all(known_equal(a, b) for a, b in zip(left, right, strict=True))


def known_equal(left: Any, right: Any) -> bool:
    """Tell whether two sizes are provably equal, without adding a guard."""
    if type(left) is int and type(right) is int:
        return left == right
    return bool(statically_known_true(left == right))


def known(condition: Any) -> bool:
    """Tell whether a condition over sizes provably holds, without adding a guard."""
    if isinstance(condition, bool):
        return condition
    return bool(statically_known_true(condition))


def number(value: Any) -> Any:
    """Return the number or symbolic number that an argument stands for, or the argument itself."""
    if isinstance(value, fx.Node):
        found = value.meta.get("val")
        return found if isinstance(found, (*_SYMBOLIC, int, float, bool)) else value
    return value


def _is_boundary(node: fx.Node) -> bool:
    if node.op == "call_function":
        return operators.is_boundary(node.target)
    return node.op in ("call_module", "call_method")


def _normalise(node: fx.Node) -> dict[str, Any]:
    described = operators.describe(node.target)
    bound = operators.bind(node.target, node.args, node.kwargs)
    name = operators.name_of(node.target)
    value = node.meta.get("val")
    if name in _RESHAPES and isinstance(value, torch.Tensor):
        return {"self": bound["self"], "size": tuple(value.shape)}
    rank = _rank(bound, described)
    if rank is not None:
        _wrap_dims(bound, described, rank)
    if name == _SLICE:
        _clip_slice(bound)
    return bound


def _rank(bound: dict[str, Any], described: operators.Operator) -> int | None:
    if described.ranked is None:
        return None
    source = bound[described.ranked]
    if isinstance(source, tuple) and source:
        source = source[0]
    value = source.meta.get("val") if isinstance(source, fx.Node) else None
    return value.dim() + described.extra_rank if isinstance(value, torch.Tensor) else None


def _wrap_dims(bound: dict[str, Any], described: operators.Operator, rank: int) -> None:
    for argument in described.arguments or ():
        if argument.is_dim:
            bound[argument.name] = _wrap(bound[argument.name], rank)


def _wrap(dim: Any, rank: int) -> Any:
    if isinstance(dim, tuple):
        return tuple(_wrap(item, rank) for item in dim)
    return dim + rank if type(dim) is int and dim < 0 else dim


def _clip_slice(bound: dict[str, Any]) -> None:
    source, dim = bound["self"], bound["dim"]
    value = source.meta.get("val") if isinstance(source, fx.Node) else None
    if not isinstance(value, torch.Tensor) or type(dim) is not int:
        return
    size = value.shape[dim]
    bound["start"] = _clip(bound["start"], 0, size)
    bound["end"] = _clip(bound["end"], size, size)


def _clip(bound: Any, default: Any, size: Any) -> Any:
    bound = number(bound)
    if bound is None:
        return default
    if not isinstance(bound, int | torch.SymInt):
        return bound
    if type(bound) is int and bound == sys.maxsize:
        return size
    if known(bound < 0):
        bound = bound + size
    return size if known(bound >= size) else bound


def nodes_in(value: Any) -> Iterable[fx.Node]:
    """Yield the nodes in an argument."""
    if isinstance(value, fx.Node):
        yield value
    elif isinstance(value, tuple):
        for item in value:
            yield from nodes_in(item)


def is_tensor(node: fx.Node) -> bool:
    """Tell whether ``node`` yields a tensor or several, rather than a number."""
    return node.target is operator.getitem or not isinstance(node.meta.get("val"), (*_SYMBOLIC, int, float, bool))
