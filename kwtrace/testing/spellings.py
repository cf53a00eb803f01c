"""Other spellings of a graph: changes that leave every value as it is, so that a rule must match all the same."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import fx

from kwtrace import operators
from kwtrace.fakes import in_mode
from kwtrace.testing.changes import Change
from kwtrace.testing.editing import Copy

_ATEN = torch.ops.aten
Identity = Callable[[fx.Graph, fx.Node], fx.Node]


def spellings(graph: fx.Graph) -> Iterator[Change]:
    """Yield every other spelling of a graph.

    Identities around each operand, arguments by keyword, by position, explicit or left out, dims counted from either
    end, dead nodes, inputs with other strides, a result that is used twice.
    """
    calls = [node for node in graph.nodes if node.op == "call_function"]
    for node in calls:
        for operand in node.all_input_nodes:
            if isinstance(operand.meta.get("val"), torch.Tensor):
                yield from _identities(node, operand)
        yield from _arguments(node)
        yield _with_dead_user(node)
    for node in graph.nodes:
        if node.op == "placeholder" and node.meta["val"].dim() > 1:
            yield _restrided(node)
    yield _returned_twice()


def _identities(node: fx.Node, operand: fx.Node) -> Iterator[Change]:
    for name, make in _IDENTITIES.items():

        def edit(copy: Copy, make: Identity = make) -> list[fx.Node]:
            own, source = copy.nodes[node], copy.nodes[operand]
            with copy.graph.inserting_before(own):
                made = make(copy.graph, source)
            own.replace_input_with(source, made)
            return [made]

        yield Change("identity", f"{node}: {name} of {operand}", edit)


def _call(target: Any, *arguments: Any, **keywords: Any) -> Identity:
    return lambda graph, source: graph.call_function(target, (source, *arguments), keywords)


def _sized(target: Any) -> Identity:
    return lambda graph, source: graph.call_function(target, (source, list(source.meta["val"].shape)))


_IDENTITIES: dict[str, Identity] = {
    "alias": _call(_ATEN.alias.default),
    "clone": _call(_ATEN.clone.default),
    "contiguous clone": _call(_ATEN.clone.default, memory_format=torch.contiguous_format),
    "detach": _call(_ATEN.detach.default),
    "reshape to its size": _sized(_ATEN.reshape.default),
    "expand to its size": _sized(_ATEN.expand.default),
    "expand by -1": lambda graph, source: graph.call_function(
        _ATEN.expand.default, (source, [-1] * source.meta["val"].dim())
    ),
    "slice of the whole": lambda graph, source: (
        graph.call_function(_ATEN.slice.Tensor, (source, 0, 0, 2**63 - 1))
        if source.meta["val"].dim()
        else graph.call_function(_ATEN.alias.default, (source,))
    ),
    "cast to its dtype": lambda graph, source: graph.call_function(
        torch.ops.prims.convert_element_type.default, (source, source.meta["val"].dtype)
    ),
    "permute in order": lambda graph, source: graph.call_function(
        _ATEN.permute.default, (source, list(range(source.meta["val"].dim())))
    ),
}
"""Operations after which every value is what it was."""


def _arguments(node: fx.Node) -> Iterator[Change]:
    described = operators.describe(node.target)
    if described.arguments is None or node.target is operators.resolve(operators.GETITEM):
        return
    bound = operators.bind(node.target, node.args, node.kwargs)
    explicit = operators.unbind(node.target, bound)
    yield _spelled(node, "every argument given", *explicit)
    yield _spelled(node, "every argument by keyword", (), dict(bound))
    yield _spelled(node, "defaults left out", *operators.without_defaults(node.target, *explicit))
    rank = _rank(bound)
    for argument in described.arguments:
        value = bound[argument.name]
        if argument.is_dim and type(value) is int and rank and not described.extra_rank:
            other = value - rank if value >= 0 else value + rank
            changed = operators.unbind(node.target, {**bound, argument.name: other})
            yield _spelled(node, f"{argument.name}: {value} → {other}", *changed)


def _rank(bound: dict[str, Any]) -> int:
    first = next(iter(bound.values()))
    first = first[0] if isinstance(first, tuple) and first else first
    value = first.meta.get("val") if isinstance(first, fx.Node) else None
    return value.dim() if isinstance(value, torch.Tensor) else 0


def _spelled(node: fx.Node, words: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Change:
    def edit(copy: Copy) -> list[fx.Node]:
        own = copy.nodes[node]
        own.args, own.kwargs = fx.map_arg((args, kwargs), lambda n: copy.nodes[n])
        return [own]

    return Change("arguments", f"{node}: {words}", edit)


def _with_dead_user(node: fx.Node) -> Change:
    def edit(copy: Copy) -> list[fx.Node]:
        with copy.graph.inserting_before(copy.output):
            return [copy.graph.call_function(_ATEN.clone.default, (copy.nodes[node],))]

    return Change("dead node", f"{node}: one more user, which nothing needs", edit)


def _restrided(node: fx.Node) -> Change:
    def edit(copy: Copy) -> list[fx.Node]:
        own = copy.nodes[node]
        with copy.mode:
            value = in_mode(own.meta["val"], copy.mode)
            transposed = torch.empty_like(value.transpose(0, 1).contiguous())
        own.meta["val"] = transposed.transpose(0, 1)
        return list(own.users)

    return Change("strides", f"{node}: first dims exchanged in memory", edit)


def _returned_twice() -> Change:
    def edit(copy: Copy) -> list[fx.Node]:
        copy.add_output(copy.output.args[0][0])  # type: ignore[index,arg-type]  # as in `Copy.add_output`
        return []

    return Change("result", "the first output: returned twice", edit)
