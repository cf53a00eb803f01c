"""Replacements that are traced at the match, once per distinct input metadata."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import fx
from torch._dispatch.python import enable_python_dispatcher
from torch._inductor import config

from kwtrace.domains import read_domain
from kwtrace.fakes import own_value
from kwtrace.generation import find_rule
from kwtrace.surroundings import shielded
from kwtrace.tracing import caller, make_graph

if TYPE_CHECKING:
    from torch._subclasses.fake_tensor import FakeTensorMode

    from kwtrace.matches import Match
    from kwtrace.rules import Rule

_LIMIT = 256
_traced: dict[Hashable, tuple[fx.Graph, tuple[str, ...]]] = {}


@dataclass(frozen=True, slots=True)
class TracedReplacement:
    """A traced graph, its placeholders and what they stand for, and its outputs."""

    graph: fx.Graph
    placeholders: tuple[fx.Node, ...]
    bound: tuple[fx.Node, ...]
    outputs: tuple[fx.Node, ...]


def trace_replacement(match: Match, mode: FakeTensorMode) -> TracedReplacement:
    """Trace the replacement of a match, or take the one that was traced for equal metadata."""
    symbolic = {name: value for name, value in match.kwargs.items() if isinstance(value, fx.Node)}
    inputs = {**match.inputs, **symbolic}
    rule = find_rule(match.family.skeleton.module, match.rule)
    function = rule.replacements[dict(match.variant.axes)["device"]].function
    key = (function, *_key(match))
    if key not in _traced:
        if len(_traced) >= _LIMIT:
            _traced.clear()
        _traced[key] = (_trace(match, mode, inputs, rule, function), tuple(inputs))
    graph, names = _traced[key]
    placeholders = tuple(node for node in graph.nodes if node.op == "placeholder")
    output = next(node for node in graph.nodes if node.op == "output")
    return TracedReplacement(graph, placeholders, tuple(inputs[name] for name in names), tuple(output.args[0]))


def _trace(
    match: Match, mode: FakeTensorMode, inputs: dict[str, fx.Node], rule: Rule, function: Callable[..., Any]
) -> fx.Graph:
    axes = dict(match.variant.axes)
    domain = read_domain(rule)
    captured = {**dict.fromkeys(p.name for p in domain.captured), **match.kwargs}  # None where the graph has no value
    call = caller(function, rule, domain, axes, tuple(inputs), captured)

    def outputs(*values: Any) -> tuple[Any, ...]:
        result = call(*values)
        return (result,) if isinstance(result, torch.Tensor) else tuple(result)

    with shielded():
        values = [own_value(node, mode) for node in inputs.values()]
        with mode, enable_python_dispatcher():
            graph = make_graph(outputs, values)
    graph.eliminate_dead_code()
    return graph


def _key(match: Match) -> tuple[Hashable, ...]:
    tensors = tuple((name, _metadata(value)) for name, value in match.tensors.items())
    captured = tuple((name, _shown(value)) for name, value in match.kwargs.items())
    return (match.family.skeleton.module, str(match.variant), tensors, captured, _settings())


def _settings() -> Hashable:
    """Return what the user has set that decides on the kernels of a graph, or on how it is decomposed."""
    cuda = torch.backends.cuda
    attention = (cuda.flash_sdp_enabled(), cuda.mem_efficient_sdp_enabled(), cuda.math_sdp_enabled())
    reduced = cuda.fp16_bf16_reduction_math_sdp_allowed()
    order = tuple(torch._C._get_sdp_priority_order())  # noqa: SLF001 - there is no public way to ask
    deterministic = torch.are_deterministic_algorithms_enabled()
    return (*attention, cuda.cudnn_sdp_enabled(), reduced, order, deterministic, config.fallback_random)


def _metadata(value: torch.Tensor) -> Hashable:
    return (tuple(map(_size, value.shape)), tuple(map(_size, value.stride())), value.dtype, value.device)


def _size(size: Any) -> Hashable:
    return (str(size.node.expr), size.node.shape_env) if isinstance(size, torch.SymInt) else size


def _shown(value: Any) -> str:
    return f"{value.meta['val']}" if isinstance(value, fx.Node) else repr(value)
