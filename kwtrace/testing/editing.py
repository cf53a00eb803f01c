"""A copy of a graph with one edit, its metadata brought up to date from the edit on."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensorMode

from kwtrace.copying import copy_nodes
from kwtrace.fakes import in_mode, run

Edit = Callable[["Copy"], Iterable[fx.Node]]
"""Changes a copy in place and returns the nodes whose results may have changed."""


class IllegalEditError(Exception):
    """An edit after which the graph no longer runs."""


@dataclass(frozen=True, slots=True)
class Copy:
    """A graph that may be edited; ``nodes`` leads from the nodes of the original to their copies."""

    graph: fx.Graph
    nodes: dict[fx.Node, fx.Node]
    mode: FakeTensorMode

    @property
    def output(self) -> fx.Node:
        """Return the output node."""
        return self.graph.output_node()

    def add_output(self, node: fx.Node) -> None:
        """Let the graph return ``node`` as well."""
        self.output.args = ((*self.output.args[0], node),)  # type: ignore[misc]  # fx has no type for what an output node returns


def copy_graph(graph: fx.Graph, mode: FakeTensorMode) -> Copy:
    """Return a copy of ``graph``, whose one output is a tuple."""
    return Copy(*copy_nodes(graph), mode)


def edited(graph: fx.Graph, mode: FakeTensorMode, edit: Edit) -> fx.Graph:
    """Return a copy of ``graph`` after ``edit``.

    Raises:
        IllegalEditError: if an operator refuses its arguments afterwards.

    """
    copy = copy_graph(graph, mode)
    try:
        with _quiet():
            _refresh(copy, edit(copy))
    except Exception as error:
        raise IllegalEditError(str(error)) from error
    return copy.graph


@contextmanager
def _quiet() -> Iterator[None]:
    """Keep torch from logging that an operator refused its arguments: here that is an answer, not an error."""
    log = logging.getLogger("torch._subclasses.fake_tensor")
    before, log.disabled = log.disabled, True
    try:
        yield
    finally:
        log.disabled = before


def _refresh(copy: Copy, changed: Iterable[fx.Node]) -> None:
    """Recompute what nodes yield, from the changed ones on, as far as it is another thing than before."""
    dirty = set(changed)
    if not dirty:
        return
    for node in copy.graph.nodes:
        if node.op != "call_function" or (node not in dirty and dirty.isdisjoint(node.all_input_nodes)):
            continue
        value = run(node, copy.mode)
        if "val" in node.meta and _alike(value, node.meta["val"]):
            dirty.discard(node)
            continue
        node.meta["val"] = value
        dirty.add(node)


def placeholder_like(copy: Copy, node: fx.Node, value: torch.Tensor) -> fx.Node:
    """Add an input that looks like ``value``, before the first call."""
    last = [n for n in copy.graph.nodes if n.op == "placeholder"][-1]
    with copy.graph.inserting_after(last):
        made = copy.graph.placeholder(f"{node.name}_other")
    made.meta["val"] = in_mode(value, copy.mode)
    return made


def _alike(left: object, right: object) -> bool:
    if isinstance(left, list | tuple) and isinstance(right, list | tuple):
        return len(left) == len(right) and all(map(_alike, left, right))
    if not isinstance(left, torch.Tensor) or not isinstance(right, torch.Tensor):
        return type(left) is type(right) and left == right
    return (
        left.shape == right.shape
        and left.stride() == right.stride()
        and left.dtype is right.dtype
        and left.device == right.device
    )
