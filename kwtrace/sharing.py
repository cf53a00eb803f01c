"""Sizes read off intermediate results, read off inputs instead.

``make_fx`` with symbolic sizes asks the nearest tensor for a size, often one inside a pattern, which would then be used
outside it. The number is the same wherever it is read.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

_SIZE = torch.ops.aten.sym_size.int


def share_sizes(graph: fx.Graph) -> None:
    """Let each size in ``graph`` be read off the first node that has it, an input if one does."""
    asked = [node for node in graph.nodes if node.op == "call_function" and node.target is _SIZE]
    if not asked:
        return
    known = _sizes_of_inputs(graph)
    for node in asked:
        source = node.args[0]
        if not isinstance(source, fx.Node) or source.op == "placeholder":
            continue
        first = _first_reader(graph, known, node.meta.get("val"))
        if first is not None and first < node:
            node.replace_all_uses_with(first)
            graph.erase_node(node)


def _sizes_of_inputs(graph: fx.Graph) -> dict[Any, fx.Node | tuple[fx.Node, int]]:
    """Return, by expression, the input that is a size or has one as a dim."""
    found: dict[Any, fx.Node | tuple[fx.Node, int]] = {}
    inputs = [node for node in graph.nodes if node.op == "placeholder"]
    for node in inputs:
        value = node.meta.get("val")
        if isinstance(value, torch.SymInt):
            found.setdefault(value.node.expr, node)
    for node in inputs:
        value = node.meta.get("val")
        for place, size in enumerate(value.shape if isinstance(value, torch.Tensor) else ()):
            if isinstance(size, torch.SymInt):
                found.setdefault(size.node.expr, (node, place))
    return found


def _first_reader(graph: fx.Graph, known: dict[Any, fx.Node | tuple[fx.Node, int]], size: Any) -> fx.Node | None:
    if not isinstance(size, torch.SymInt):
        return None
    found = known.get(size.node.expr)
    if not isinstance(found, tuple):
        return found
    source, place = found
    last = max(node for node in graph.nodes if node.op == "placeholder")
    with graph.inserting_after(last):
        made = graph.call_function(_SIZE, (source, place))
    made.meta["val"] = source.meta["val"].shape[place]
    known[size.node.expr] = made
    return made
