"""A row of a family → a graph that it must match: the rule's search function, traced with concrete sizes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch._dispatch.python import enable_python_dispatcher
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from kwtrace.domains import read_domain, samples
from kwtrace.patterns import Family, Value, Variant, fill
from kwtrace.rules import Rule
from kwtrace.sizes import condition, evaluator
from kwtrace.surroundings import clean_surroundings
from kwtrace.tracing import caller, make_graph

DISTINCT = (3, 4, 5, 7, 6, 9, 8, 10, 11, 13, 14, 15)
"""Sizes of dims, by order of their names: no two alike, so that each stands at its own place only."""
EQUAL = (4,) * 12
"""All sizes alike, so that a graph with two dims exchanged is legal too."""


@dataclass(frozen=True, slots=True)
class Instance:
    """A graph that the row of a family describes: ``sizes`` of its dims, one placeholder per tensor parameter."""

    variant: Variant
    sizes: dict[str, int]
    graph: fx.Graph
    mode: FakeTensorMode

    def __str__(self) -> str:
        """Return the variant and its sizes."""
        return f"{self.variant} at {self.sizes}"


def instances(family: Family, row: tuple[Value, ...], rule: Rule) -> Iterator[Instance]:
    """Yield the graphs of a row.

    They have distinct sizes, equal ones, every dim at 1 that may be, and inputs whose dims lie in memory in reverse.
    Sizes that the pattern's conditions don't hold for are left out.
    """
    for table, optional, reverse in ((DISTINCT, False, False), (EQUAL, False, False), (DISTINCT, True, True)):
        sizes = _choose(family, table)
        if all(condition(text)(sizes) for text in family.skeleton.conditions):
            yield _instantiate(family, row, rule, sizes, optional=optional, reverse=reverse)


def _instantiate(
    family: Family, row: tuple[Value, ...], rule: Rule, sizes: dict[str, int], *, optional: bool, reverse: bool
) -> Instance:
    """Trace the search function of a row's variant with inputs of the given sizes."""
    cells = dict(zip(family.columns, row, strict=True))
    variant = family.variant(row)
    device = fill(family.skeleton.device, cells)
    shapes = [(i, [_size(text, sizes, optional=optional) for text in i.dims]) for i in family.skeleton.inputs]
    inputs = {i.name: _described(shape, fill(i.dtype, cells), device, reverse=reverse) for i, shape in shapes}
    captured = samples(read_domain(rule), variant)[0]
    mode = FakeTensorMode(shape_env=ShapeEnv())
    graph = trace_search(rule, dict(variant.axes), inputs, captured, mode)
    return Instance(variant, sizes, graph, mode)


def trace_search(
    rule: Rule,
    axes: Mapping[str, Any],
    inputs: Mapping[str, torch.Tensor],
    captured: Mapping[str, Any],
    mode: FakeTensorMode,
) -> fx.Graph:
    """Trace a rule's search function on tensors like ``inputs``, as torch.compile would."""
    call = caller(rule.function, rule, read_domain(rule), dict(axes), tuple(inputs), dict(captured))
    with clean_surroundings(), mode, enable_python_dispatcher():
        fakes = [torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=x.device) for x in inputs.values()]
        graph = make_graph(_as_tuple(call), fakes)
    graph.eliminate_dead_code()
    return graph


def _as_tuple(call: Callable[..., Any]) -> Callable[..., tuple[Any, ...]]:
    def outputs(*values: Any) -> tuple[Any, ...]:
        result = call(*values)
        return (result,) if isinstance(result, torch.Tensor) else tuple(result)

    return outputs


def _described(shape: Sequence[int], dtype: torch.dtype, device: str, *, reverse: bool) -> torch.Tensor:
    with FakeTensorMode():
        if not reverse:
            return torch.empty(tuple(shape), dtype=dtype, device=device)
        return torch.empty(tuple(shape[::-1]), dtype=dtype, device=device).permute(tuple(reversed(range(len(shape)))))


def _choose(family: Family, table: Sequence[int]) -> dict[str, int]:
    """Return a size per dim; factors of products are 2 where all sizes are to be alike."""
    products = {f for i in family.skeleton.inputs for text in i.dims if "*" in text for f in text.strip("?").split("*")}
    alike = len(set(table)) == 1
    names = [dim.name for dim in family.skeleton.dims]
    return {n: 2 if alike and n in products else size for n, size in zip(names, table, strict=False)}


def _size(text: str, sizes: Mapping[str, int], *, optional: bool) -> int:
    if text.endswith("?") and optional:
        return 1
    return int(evaluator(text.removesuffix("?"))(sizes))
