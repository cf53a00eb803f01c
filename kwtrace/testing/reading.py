"""A graph as a text that doesn't depend on spelling: the oracle's own reading, which shares no code for identities.

If the matcher takes an operation for an identity that is none, or doesn't see a mutation, this mustn't do so too.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import fx

from kwtrace import operators
from kwtrace.normal import View
from kwtrace.patterns import exact_text

_ALIKE = frozenset({"alias", "clone", "detach", "lift_fresh_copy"})
_RESIZED = frozenset({"view", "_unsafe_view", "reshape", "expand"})


def describe(outputs: Sequence[fx.Node], inputs: Mapping[fx.Node, Any]) -> str:
    """Return a text that two graphs share exactly when they compute the same operators on the same inputs.

    Identities are looked through, arguments are bound to their schemas, and equal calls are one; ``inputs`` gives the
    names of inputs.
    """
    graph = outputs[0].graph
    view, regions = View(graph), _regions(graph)
    names = {node: str(name) for node, name in inputs.items()}
    calls: dict[str, str] = {}

    def strip(node: fx.Node, user: fx.Node) -> fx.Node:
        """Follow identities that stand on the same side of every mutation as what uses them."""
        while node not in names and (source := passed_on(node)) is not None and regions[node] == regions[user]:
            node = source
        return node

    def text(value: Any, user: fx.Node) -> str:
        if isinstance(value, fx.Node):
            return note(strip(value, user))
        if isinstance(value, tuple):
            return f"({', '.join(text(item, user) for item in value)})"
        return exact_text(value)

    def note(node: fx.Node) -> str:
        if node not in names:
            args = ", ".join(f"{name}={text(value, node)}" for name, value in view.args(node).items())
            names[node] = calls.setdefault(f"{operators.name_of(node.target)}({args})", f"%{len(calls)}")
        return names[node]

    results = ", ".join([text(node, node) for node in outputs])
    return "\n".join([*(f"{name} = {call}" for call, name in calls.items()), f"return {results}"])


def passed_on(node: fx.Node) -> fx.Node | None:
    """Return the operand that a call yields as it is: same values, same shape, same dtype; or None."""
    packet = getattr(node.target, "overloadpacket", None)
    source = next(iter((*node.args, *node.kwargs.values())), None)
    if packet is None or not isinstance(source, fx.Node):
        return None
    before, after = source.meta.get("val"), node.meta.get("val")
    if not isinstance(before, torch.Tensor) or not isinstance(after, torch.Tensor):
        return None
    if before.shape != after.shape or before.dtype is not after.dtype:
        return None
    return source if _leaves_alone(packet.__name__, node, before.dim()) else None


def _leaves_alone(name: str, node: fx.Node, rank: int) -> bool:
    """Tell whether a call that yields the shape and dtype of its operand yields its values too."""
    arguments = operators.bind(node.target, node.args, node.kwargs)
    if name == "permute":
        return [dim % rank for dim in arguments["dims"]] == list(range(rank))
    if name == "slice":
        return bool(arguments["step"] == 1)
    return name in _ALIKE or name in _RESIZED or name == "convert_element_type"


def mutates(node: fx.Node) -> bool:
    """Tell whether a call writes to one of its operands."""
    schema = getattr(node.target, "_schema", None)
    return schema is not None and schema.is_mutable


def orders_streams(node: fx.Node) -> bool:
    """Tell whether a call orders streams or waits for another device or process."""
    return getattr(node.target, "namespace", "") in ("streams", "c10d", "_c10d_functional")


def _regions(graph: fx.Graph) -> dict[fx.Node, int]:
    found, count = {}, 0
    for node in graph.nodes:
        count += mutates(node)
        found[node] = count
    return found
