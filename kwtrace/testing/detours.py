"""Operations that look like identities and are none: the same shape or the same dtype, other values."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import fx

_ATEN = torch.ops.aten
_CAST = torch.ops.prims.convert_element_type.default
Detour = Callable[[fx.Graph, fx.Node, torch.Tensor], list[fx.Node]]
"""Adds the calls, in order, that make something of a node with a certain value."""


def _transposed(graph: fx.Graph, source: fx.Node, value: torch.Tensor) -> list[fx.Node]:
    return [graph.call_function(_ATEN.permute.default, (source, list(reversed(range(value.dim())))))]


def _cast(graph: fx.Graph, source: fx.Node, value: torch.Tensor) -> list[fx.Node]:
    return [graph.call_function(_CAST, (source, _other(value.dtype)))]


def _rounded(graph: fx.Graph, source: fx.Node, value: torch.Tensor) -> list[fx.Node]:
    there = graph.call_function(_CAST, (source, _other(value.dtype)))
    return [there, graph.call_function(_CAST, (there, value.dtype))]


def _every_other(graph: fx.Graph, source: fx.Node, _value: torch.Tensor) -> list[fx.Node]:
    twice = graph.call_function(_ATEN.cat.default, ([source, source],))
    return [twice, graph.call_function(_ATEN.slice.Tensor, (twice, 0, 0, 2**63 - 1, 2))]


def _second_half(graph: fx.Graph, source: fx.Node, value: torch.Tensor) -> list[fx.Node]:
    twice = graph.call_function(_ATEN.cat.default, ([source, source],))
    size = value.shape[0]
    return [twice, graph.call_function(_ATEN.slice.Tensor, (twice, 0, 1, size + 1))]


def _every_other_of_one(graph: fx.Graph, source: fx.Node, _value: torch.Tensor) -> list[fx.Node]:
    return [graph.call_function(_ATEN.slice.Tensor, (source, 0, 0, 2**63 - 1, 2))]


def _flipped(graph: fx.Graph, source: fx.Node, _value: torch.Tensor) -> list[fx.Node]:
    return [graph.call_function(_ATEN.flip.default, (source, [0]))]


def _negated(graph: fx.Graph, source: fx.Node, _value: torch.Tensor) -> list[fx.Node]:
    return [graph.call_function(_ATEN.neg.default, (source,))]


DETOURS: dict[str, Detour] = {
    "transposed": _transposed,
    "cast": _cast,
    "cast and back": _rounded,
    "every other of two": _every_other,
    "shifted by one": _second_half,
    "every other": _every_other_of_one,
    "flipped": _flipped,
    "negated": _negated,
}


def _other(dtype: torch.dtype) -> torch.dtype:
    """Return a dtype that can't hold every number of ``dtype``."""
    return torch.float16 if dtype is torch.bfloat16 else torch.bfloat16
