"""One change to one call of a graph: an argument, an operand, the operator."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Any

import torch
from torch import fx

from kwtrace import operators
from kwtrace.testing.constants import neighbours
from kwtrace.testing.detours import DETOURS
from kwtrace.testing.editing import Copy, Edit, placeholder_like

SIBLINGS = tuple(
    operators.resolve(f"aten.{name}")
    for name in (
        *("exp.default", "tanh.default", "neg.default", "relu.default", "sigmoid.default", "erf.default"),
        *("add.Tensor", "sub.Tensor", "mul.Tensor", "div.Tensor", "maximum.default", "eq.Tensor", "lt.Tensor"),
        *("_softmax.default", "_log_softmax.default", "amax.default", "amin.default", "sum.dim_IntList", "mean.dim"),
        *("permute.default", "view.default", "expand.default", "flip.default", "slice.Tensor", "select.int"),
        *(
            "zeros_like.default",
            "ones_like.default",
            "clone.default",
            "bmm.default",
            "mm.default",
            "logical_not.default",
        ),
    )
)
"""Operators that may stand where another stood: those with the same arguments are each other's siblings."""


@dataclass(frozen=True, slots=True)
class Change:
    """One change: what kind it is of, in words, and how it is made."""

    kind: str
    words: str
    edit: Edit


def call_changes(node: fx.Node, strings: Sequence[str]) -> Iterator[Change]:
    """Yield every change to one call: its constants, spelled out or not, its operands, its operator."""
    yield from _constant_changes(node, strings)
    yield from _operand_changes(node)
    yield from _detour_changes(node)
    yield from _sibling_changes(node)


def _constant_changes(node: fx.Node, strings: Sequence[str]) -> Iterator[Change]:
    kinds = _kinds(node.target)
    for name, value in operators.bind(node.target, node.args, node.kwargs).items():
        if isinstance(value, fx.Node):
            continue
        for other in neighbours(value, kinds.get(name, ""), strings):
            kind = "list" if isinstance(value, tuple) else _kind_of(value, other)
            yield _with_argument(node, name, other, kind, f"{value!r} → {other!r}")
        if isinstance(value, int | float) and kinds.get(name) == "Tensor":
            words = f"{node}, {name}: {value!r} → a tensor without dims"
            yield Change("operand", words, _with_new_input(node, name, torch.tensor(value)))


def _operand_changes(node: fx.Node) -> Iterator[Change]:
    bound = operators.bind(node.target, node.args, node.kwargs)
    tensors = [name for name, value in bound.items() if _is_tensor(value)]
    for left, right in combinations(tensors, 2):
        if bound[left] is not bound[right]:
            swapped = {left: bound[right], right: bound[left]}
            yield _with_arguments(node, swapped, "operands swapped", f"{left} and {right} exchanged")
    for name in tensors:
        yield _with_argument(node, name, 2.0, "operand", f"{bound[name]} → 2.0")
        words = f"{node}, {name}: {bound[name]} → another input"
        yield Change("operand", words, _with_new_input(node, name, bound[name].meta["val"]))
        for other in _like(bound[name], node):
            yield _with_argument(node, name, other, "operand", f"{bound[name]} → {other}")
            yield _with_detour(node, bound[name], other, "negated")
    for name, kind in _kinds(node.target).items():
        if kind != "Tensor" or name not in _optional(node.target):
            continue
        if bound.get(name) is not None:
            yield _with_argument(node, name, None, "operand", f"{bound[name]} → None")
            continue
        for other in [n for n in node.graph.nodes if n.op == "placeholder"]:
            yield _with_argument(node, name, other, "operand", f"None → {other}")


def _detour_changes(node: fx.Node) -> Iterator[Change]:
    for operand in node.all_input_nodes:
        if _is_tensor(operand):
            yield from (_with_detour(node, operand, operand, name) for name in DETOURS)


def _with_detour(node: fx.Node, operand: fx.Node, other: fx.Node, name: str) -> Change:
    """Put what a detour makes of ``other`` in place of an operand."""

    def edit(copy: Copy) -> list[fx.Node]:
        own, source = copy.nodes[node], copy.nodes[other]
        with copy.graph.inserting_before(own):
            made = DETOURS[name](copy.graph, source, other.meta["val"])
        own.replace_input_with(copy.nodes[operand], made[-1])
        return made

    kind = "detour" if operand is other else "operand"
    return Change(kind, f"{node}: {operand} → {other}, {name}", edit)


def _sibling_changes(node: fx.Node) -> Iterator[Change]:
    packet = getattr(node.target, "overloadpacket", None)
    overloads = [getattr(packet, name) for name in packet.overloads()] if packet is not None else []
    signature = _signature(node.target)
    siblings = [other for other in SIBLINGS if _signature(other) == signature]
    for other in dict.fromkeys((*overloads, *siblings)):
        if other is node.target or operators.is_boundary(other) or not operators.has_results(other):
            continue

        def edit(copy: Copy, target: Any = other) -> list[fx.Node]:
            copy.nodes[node].target = target
            return [copy.nodes[node]]

        yield Change("operator", f"{node}: {node.target} → {other}", edit)


def _with_argument(node: fx.Node, name: str, value: Any, kind: str, words: str) -> Change:
    return _with_arguments(node, {name: value}, kind, f"{name}: {words}")


def _with_arguments(node: fx.Node, changed: dict[str, Any], kind: str, words: str) -> Change:
    def edit(copy: Copy) -> list[fx.Node]:
        _set_arguments(copy.nodes[node], fx.map_arg(changed, lambda n: copy.nodes[n]))
        return [copy.nodes[node]]

    return Change(kind, f"{node}, {words}", edit)


def _with_new_input(node: fx.Node, name: str, value: torch.Tensor) -> Edit:
    def edit(copy: Copy) -> list[fx.Node]:
        own = copy.nodes[node]
        _set_arguments(own, {name: placeholder_like(copy, own, value)})
        return [own]

    return edit


def _set_arguments(node: fx.Node, changed: dict[str, Any]) -> None:
    bound = operators.bind(node.target, node.args, node.kwargs)
    node.args, node.kwargs = operators.unbind(node.target, {**bound, **changed})


def _like(operand: fx.Node, user: fx.Node) -> list[fx.Node]:
    """Return the other nodes before ``user`` whose results look like those of ``operand``."""
    wanted = operand.meta["val"]
    return [
        node
        for node in user.graph.nodes
        if node < user and node is not operand and _is_tensor(node) and _looks(node) == (wanted.shape, wanted.dtype)
    ]


def _looks(node: fx.Node) -> tuple[Any, ...]:
    return (node.meta["val"].shape, node.meta["val"].dtype)


def _is_tensor(value: Any) -> bool:
    return isinstance(value, fx.Node) and isinstance(value.meta.get("val"), torch.Tensor)


def _kind_of(value: Any, other: Any) -> str:
    if isinstance(value, torch.dtype) or isinstance(other, torch.dtype):
        return "dtype"
    if value is None or other is None:
        return "default"
    return "constant" if type(value) is type(other) else "type"


def _kinds(target: Any) -> dict[str, str]:
    """Return the schema's name for the type of each argument, less that it is optional."""
    schema = getattr(target, "_schema", None)
    arguments = () if schema is None else schema.arguments
    return {a.name: str(a.real_type).removeprefix("Optional[").removesuffix("]") for a in arguments}


def _optional(target: Any) -> frozenset[str]:
    schema = getattr(target, "_schema", None)
    arguments = () if schema is None else schema.arguments
    return frozenset(a.name for a in arguments if str(a.real_type).startswith("Optional["))


def _signature(target: Any) -> tuple[str, ...]:
    return tuple(_kinds(target).values()) or (str(target),)
