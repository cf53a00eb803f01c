"""What other strides of a new node change in the graph behind it."""

from __future__ import annotations

import operator
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from kwtrace import operators
from kwtrace.fakes import mode_of, run
from kwtrace.normal import same_sizes

_VIEW = "aten.view.default"
_READS_STRIDES = frozenset(
    {
        "aten.as_strided.default",
        "aten.as_strided_copy.default",
        "aten.as_strided_scatter.default",
        "aten.view.dtype",
        "aten.stride.int",
        "aten.sym_stride.int",
        "aten.storage_offset.default",
        "aten.sym_storage_offset.default",
    }
)


@dataclass(slots=True)
class Restriding:
    """What nodes yield once another value stands in place of one: new values, and views that must become reshapes.

    ``reader`` is a node whose result depends on strides, which rules the change out.
    """

    values: dict[fx.Node, Any] = field(default_factory=dict)
    reshapes: list[fx.Node] = field(default_factory=list)
    reader: fx.Node | None = None

    def apply(self) -> None:
        """Write the new values down."""
        for node in self.reshapes:
            node.target = torch.ops.aten.reshape.default
        for node, value in self.values.items():
            node.meta["val"] = value


def same_strides(left: Any, right: Any) -> bool:
    """Tell whether two values, tensors or several of them, have provably the same strides."""
    if isinstance(left, list | tuple) and isinstance(right, list | tuple):
        return len(left) == len(right) and all(same_strides(a, b) for a, b in zip(left, right, strict=True))
    if not isinstance(left, torch.Tensor) or not isinstance(right, torch.Tensor):
        return True
    kept = [place for place, size in enumerate(left.shape) if not (type(size) is int and size == 1)]
    strides = [[tensor.stride(place) for place in kept] for tensor in (left, right)]
    return same_sizes(strides[0], strides[1])


def restride(changed: Mapping[fx.Node, Any]) -> Restriding:
    """Work out what the users of nodes yield when those yield other values, as far as the strides differ."""
    found = Restriding()
    overrides = dict(changed)
    pending = sorted({user for node in changed for user in node.users})
    while pending and found.reader is None:
        node = pending.pop(0)
        if node.op != "call_function":
            continue
        if operators.describe(node.target).name in _READS_STRIDES:
            found.reader = node
            continue
        after = _rerun(node, overrides, found)
        if after is not None and not same_strides(node.meta.get("val"), after):
            overrides[node] = found.values[node] = after
            pending = sorted({*pending, *node.users})
    return found


def _rerun(node: fx.Node, overrides: Mapping[fx.Node, Any], found: Restriding) -> Any:
    """Run ``node`` on the new values; None for what isn't an operator or has no fake value."""
    value = node.meta.get("val")
    first = value[0] if isinstance(value, list | tuple) and value else value
    mode = mode_of(first)
    if mode is None or not (isinstance(node.target, torch._ops.OpOverload) or node.target is operator.getitem):
        return None
    try:
        return run(node, mode, overrides)
    except (RuntimeError, ValueError):
        if operators.describe(node.target).name != _VIEW:
            return None
    found.reshapes.append(node)
    return run(node, mode, overrides, torch.ops.aten.reshape.default)
