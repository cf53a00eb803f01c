"""What is right, without asking the matcher: the rule's own function, the users of nodes, and float64 numbers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, fx

from kwtrace import operators
from kwtrace.domains import read_domain, samples
from kwtrace.fakes import mode_of
from kwtrace.matches import Match
from kwtrace.patterns import exact_text
from kwtrace.rules import Rule
from kwtrace.testing.comparing import compare
from kwtrace.testing.declared import undeclared
from kwtrace.testing.instances import trace_search
from kwtrace.testing.reading import describe, mutates, orders_streams


class Claims:
    """Says whether a match is exactly what its variant's search function computes; traces of it are kept."""

    def __init__(self, rules: Mapping[str, Rule]) -> None:
        """Take the rules by name."""
        self.rules = rules
        self._texts: dict[str, str] = {}

    def problem(self, match: Match) -> str | None:
        """Return what is wrong with a match, or None.

        The inputs must be what the variant declares; its search function is traced on them and held against the nodes
        that were matched.
        """
        other = undeclared(match, self.rules[match.rule])
        if other is not None:
            return f"{match.variant} declares something else: {other}"
        found = describe(match.outputs, {node: name for name, node in reversed(match.inputs.items())})
        wanted = [self._wanted(match, captured) for captured in _captured(match)]
        if found in wanted:
            return None
        return f"{match.variant} is not what the graph has:\n{wanted[0]}\nbut\n{found}"

    def _wanted(self, match: Match, captured: Mapping[str, Any]) -> str:
        shapes = {n: (tuple(x.shape), x.stride(), x.dtype, str(x.device)) for n, x in match.tensors.items()}
        nodes = list(match.inputs.values())
        key = repr((str(match.variant), shapes, [*map(nodes.index, nodes)], exact_text(tuple(captured.items()))))
        if key not in self._texts:
            self._texts[key] = self._trace(match, captured)
        return self._texts[key]

    def _trace(self, match: Match, captured: Mapping[str, Any]) -> str:
        mode = next(m for m in map(mode_of, match.tensors.values()) if m is not None)
        rule, axes = self.rules[match.rule], dict(match.variant.axes)
        unused = samples(read_domain(rule), match.variant)[0]
        try:
            graph = trace_search(rule, axes, match.tensors, {**unused, **axes, **captured}, mode)
        except Exception as error:  # noqa: BLE001 - a search function that refuses these inputs claims nothing
            return f"{type(error).__name__}: {error}"
        placeholders = (node for node in graph.nodes if node.op == "placeholder")
        (outputs,) = next(iter(reversed(graph.nodes))).args
        first = {node: name for name, node in reversed(match.inputs.items())}
        return describe(outputs, dict(zip(placeholders, map(first.get, match.inputs.values()), strict=True)))


def _captured(match: Match) -> list[dict[str, Any]]:
    """Return the captured values; a second time with ints for whole floats, which a graph may hold for them."""
    values = {c.name: match.kwargs[c.name] for c in match.family.skeleton.captures}
    ints = {n: int(v) if isinstance(v, float) and v.is_integer() else v for n, v in values.items()}
    return [values, ints]


def leak(match: Match) -> str | None:
    """Return what leaks out of a match or into it, or None.

    That is a user of an inner node, a mutation or a stream operation between its nodes.
    """
    own, order = set(match.nodes), list(match.graph.nodes)
    needed = _needed(match.graph)
    for node in own - set(match.outputs):
        outside = [user for user in node.users if user not in own and user in needed]
        if outside:
            return f"{node} is used by {outside[0]} outside the match"
    first, last = (order.index(end) for end in (min(own), max(own)))
    boundary = next((node for node in order[first:last] if mutates(node) or orders_streams(node)), None)
    return None if boundary is None else f"{boundary} mutates or orders streams in the middle of the match"


def _needed(graph: fx.Graph) -> set[fx.Node]:
    """Return the nodes that an output, a mutation or an assertion needs."""
    pending = [node for node in graph.nodes if node.op == "output" or mutates(node) or node.is_impure()]
    needed = set(pending)
    while pending:
        operands = [node for node in pending.pop().all_input_nodes if node not in needed]
        needed.update(operands)
        pending += operands
    return needed


def random_inputs(graph: fx.Graph, seed: int) -> list[Tensor]:
    """Return numbers for a graph's inputs on the CPU; of every row of bools the first is False, the second True."""
    generator = torch.Generator().manual_seed(seed)
    return [_random(node.meta["val"], generator) for node in graph.nodes if node.op == "placeholder"]


def _random(like: Tensor, generator: torch.Generator) -> Tensor:
    made = torch.empty_strided(like.shape, like.stride(), dtype=like.dtype)
    held = made
    for dim, stride in enumerate(like.stride()):
        held = held[(slice(None),) * dim + (slice(1),)] if stride == 0 else held  # its other elements are the same ones
    numbers = torch.randn(held.shape, generator=generator)
    if like.dtype is torch.bool:
        numbers = numbers > 0
        numbers[..., :1], numbers[..., 1:2] = False, True
    elif not like.dtype.is_floating_point:
        numbers = (2 * numbers).round()
    held.copy_(numbers)
    return made


def difference(unfused: fx.Graph, fused: fx.Graph, seed: int = 0) -> str | None:
    """Return how two graphs differ on random numbers, or None.

    What the nodes of ``fused`` yield must look as their metadata says.
    Every result is held against that in float64; see `kwtrace.testing.comparing.compare`.
    """
    owner = torch.nn.Module()
    runs = (
        _OnTheCpu(owner, graph=unfused),
        _Checked(owner, graph=fused),
        _InFloat64(owner, graph=unfused),
    )
    try:
        wanted, found, exact = (run.run(*random_inputs(unfused, seed)) for run in runs)  # a run may write to them
    except RuntimeError as error:
        return f"expected it to run, found {error}"
    for place, results in enumerate(zip(wanted, found, exact, strict=True)):
        problem = compare(*results)
        if problem is not None:
            return f"output {place}: {problem}"
    return None


class _OnTheCpu(fx.Interpreter):
    """Runs a graph on the CPU, where there are no streams to order."""

    def run_node(self, n: fx.Node) -> Any:
        return None if orders_streams(n) else super().run_node(n)


class _Checked(_OnTheCpu):
    """Runs a graph and holds what each node yields against its metadata."""

    def run_node(self, n: fx.Node) -> Any:
        result = super().run_node(n)
        stated = n.meta.get("val")
        if isinstance(result, Tensor) and result.numel() and _look(result) != _look(stated):
            msg = f"{n} yields {_look(result)} where its metadata says {_look(stated)}"
            raise RuntimeError(msg)
        return result


def _look(value: Any) -> Any:
    """Return shape, dtype and the strides that count of a tensor."""
    if not isinstance(value, Tensor):
        return value
    strides = [stride for size, stride in zip(value.shape, value.stride(), strict=True) if size != 1]
    return (tuple(value.shape), value.dtype, strides)


class _InFloat64(_OnTheCpu):
    """Runs a graph with every float in float64."""

    def placeholder(self, target: Any, args: Any, kwargs: Any) -> Any:
        return _double(super().placeholder(target, args, kwargs))

    def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
        args, kwargs = fx.node.map_aggregate((args, kwargs), _double)
        if operators.name_of(target) == "aten._softmax.default":
            args, kwargs = (*args[:2], False), {}
        return _double(super().call_function(target, args, kwargs))


def _double(value: Any) -> Any:
    if isinstance(value, torch.dtype):
        return torch.float64 if value.is_floating_point else value
    if isinstance(value, Tensor) and value.dtype.is_floating_point:
        return value.double()
    return value
