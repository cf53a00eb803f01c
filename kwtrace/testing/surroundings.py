"""One change around the calls of a graph: its inputs, who uses its results, what mutates or orders between them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import fx

from kwtrace.fakes import in_mode
from kwtrace.testing.changes import Change
from kwtrace.testing.constants import DEVICES, DTYPES
from kwtrace.testing.editing import Copy


def graph_changes(graph: fx.Graph) -> Iterator[Change]:
    """Yield every change to a graph's inputs, to the users of its calls, and every boundary between its calls."""
    inputs = [node for node in graph.nodes if node.op == "placeholder"]
    calls = [node for node in graph.nodes if node.op == "call_function"]
    yield from _input_changes(inputs)
    for node in calls[:-1]:
        yield _with_user(node)
        yield _with_output(node)
        if isinstance(node.meta["val"], torch.Tensor):
            yield _with_assertion(node)
    for node in calls:
        if len(node.users) > 1:
            yield _with_twin(node)
    for node in calls[-1:]:
        yield from _readers(node)
    yield from _mutations(inputs, calls)
    yield from (_with_stream(place) for place in calls[1:])


def _input_changes(inputs: list[fx.Node]) -> Iterator[Change]:
    for dtype in {node.meta["val"].dtype: None for node in inputs}:
        alike = [node for node in inputs if node.meta["val"].dtype is dtype]
        for other in DTYPES:
            if other is not dtype:
                yield _changed_inputs(alike, "dtype", f"{dtype} → {other}", _to_dtype(other))
    for node in inputs:
        yield from _dtypes_and_devices(node, node.meta["val"])
        yield from _shapes(node, node.meta["val"].dim(), node.meta["val"].shape)
    for device in DEVICES:
        yield _changed_inputs(inputs, "device", f"all on {device}", _to_device(device))


def _dtypes_and_devices(node: fx.Node, value: torch.Tensor) -> Iterator[Change]:
    for dtype in DTYPES:
        if dtype is not value.dtype:
            yield _changed_inputs([node], "dtype", f"{value.dtype} → {dtype}", _to_dtype(dtype))
    for device in DEVICES:
        if device != value.device:
            yield _changed_inputs([node], "device", f"{value.device} → {device}", _to_device(device))


def _shapes(node: fx.Node, rank: int, shape: torch.Size) -> Iterator[Change]:
    yield _changed_inputs([node], "rank", "one dim more", lambda x: x[None])
    if rank:
        yield _changed_inputs([node], "rank", "one dim less", lambda x: torch.empty_like(x[0]))
    for dim, size in enumerate(shape):
        for other in (1, 2 * size):
            yield _changed_inputs([node], "size", f"{other} for dim {dim}", _with_size(dim, other))
    if rank > 1:
        yield _changed_inputs([node], "size", "last dims exchanged", lambda x: _like(x, x.transpose(-2, -1).shape))


def _with_user(node: fx.Node) -> Change:
    def edit(copy: Copy) -> list[fx.Node]:
        own = copy.nodes[node]
        with copy.graph.inserting_before(copy.output):
            user = copy.graph.call_function(torch.ops.aten.clone.default, (own,))
        copy.add_output(user)
        return [user]

    return Change("user", f"{node}: one more user, which is returned", edit)


def _with_assertion(node: fx.Node) -> Change:
    def edit(copy: Copy) -> list[fx.Node]:
        own, aten = copy.nodes[node], torch.ops.aten
        with copy.graph.inserting_before(copy.output):
            equal = copy.graph.call_function(aten.eq.Tensor, (own, own))
            held = copy.graph.call_function(aten.any.default, (equal,))
            asserted = copy.graph.call_function(aten._assert_async.msg, (held, "all are NaN"))  # noqa: SLF001 - it has no other name
        return [equal, held, asserted]

    return Change("user", f"{node}: one more user, which asserts", edit)


def _with_output(node: fx.Node) -> Change:
    def edit(copy: Copy) -> list[fx.Node]:
        copy.add_output(copy.nodes[node])
        return []

    return Change("user", f"{node}: returned as well", edit)


def _with_twin(node: fx.Node) -> Change:
    def edit(copy: Copy) -> list[fx.Node]:
        own = copy.nodes[node]
        with copy.graph.inserting_after(own):
            twin = copy.graph.node_copy(own, lambda n: n)
        next(iter(own.users)).replace_input_with(own, twin)
        return [twin]

    return Change("user", f"{node}: computed twice, once for each user", edit)


def _readers(node: fx.Node) -> Iterator[Change]:
    """Yield users of a result that depend on how it lies in memory, in their values or in how they lie themselves."""
    value = node.meta["val"]
    if isinstance(value, torch.Tensor) and value.is_contiguous() and value.numel():
        arguments: dict[Any, tuple[Any, ...]] = {
            torch.ops.aten.as_strided.default: ([value.numel()], [1]),
            torch.ops.aten.view.default: ([value.numel()],),
            torch.ops.aten.clone.default: (),
        }
        for target, rest in arguments.items():
            yield _with_reader(node, target, rest)


def _with_reader(node: fx.Node, target: Any, rest: tuple[Any, ...]) -> Change:
    def edit(copy: Copy) -> list[fx.Node]:
        with copy.graph.inserting_before(copy.output):
            user = copy.graph.call_function(target, (copy.nodes[node], *rest))
        copy.add_output(user)
        return [user]

    return Change("strides", f"{node}: used by {target}, which is returned", edit)


def _with_stream(place: fx.Node) -> Change:
    def edit(copy: Copy) -> list[fx.Node]:
        with copy.graph.inserting_before(copy.nodes[place]):
            copy.graph.call_function(torch.ops.streams.record_event.default, (0, 0))
        return []

    return Change("stream", f"an event recorded before {place}", edit)


def _mutations(inputs: list[fx.Node], calls: list[fx.Node]) -> Iterator[Change]:
    for place in calls:
        for node in (*inputs, *(n for n in place.all_input_nodes if n.op == "call_function")):
            if not _is_expanded(node.meta["val"]):
                yield _with_mutation(node, place)


def _is_expanded(value: Any) -> bool:
    """Tell whether several elements of a tensor are one place in memory, to which torch refuses to write."""
    if not isinstance(value, torch.Tensor):
        return False
    return any(stride == 0 and size > 1 for size, stride in zip(value.shape, value.stride(), strict=True))


def _with_mutation(node: fx.Node, place: fx.Node) -> Change:
    dtype = getattr(node.meta["val"], "dtype", None)
    value = 0 if dtype is torch.bool else 1  # a mask of ones may hide everything: a case of its own

    def edit(copy: Copy) -> list[fx.Node]:
        own = copy.nodes[node]
        with copy.graph.inserting_before(copy.nodes[place]):
            made = copy.graph.call_function(torch.ops.aten.fill_.Scalar, (own, value))
        made.meta["val"] = own.meta["val"]
        return []

    return Change("mutation", f"{node}: filled with {value} before {place}", edit)


def _changed_inputs(
    nodes: list[fx.Node], kind: str, words: str, change: Callable[[torch.Tensor], torch.Tensor]
) -> Change:
    def edit(copy: Copy) -> list[fx.Node]:
        users: list[fx.Node] = []
        for node in nodes:
            own = copy.nodes[node]
            with copy.mode:
                value = change(in_mode(own.meta["val"], copy.mode))
            own.meta["val"] = value
            users += own.users
        return users

    names = ", ".join(str(node) for node in nodes)
    return Change(kind, f"{names}: {words}", edit)


def _to_dtype(dtype: torch.dtype) -> Callable[[torch.Tensor], torch.Tensor]:
    return lambda x: torch.empty_like(x, dtype=dtype)


def _to_device(device: torch.device) -> Callable[[torch.Tensor], torch.Tensor]:
    return lambda x: torch.empty_like(x, device=device)


def _with_size(dim: int, size: int) -> Callable[[torch.Tensor], torch.Tensor]:
    return lambda x: _like(x, (*x.shape[:dim], size, *x.shape[dim + 1 :]))


def _like(x: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
    return torch.empty(shape, dtype=x.dtype, device=x.device)
