"""Graphs for tests: traced as torch.compile traces them, counted, and checked by running them."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any, Literal

import torch
from torch import Tensor, fx
from torch._dispatch.python import enable_python_dispatcher
from torch._inductor.decomposition import select_decomp_table
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from kwtrace.testing.comparing import compare

Mode = Literal["real", "fake", "symbolic"]


def traced(function: Callable[..., Any], *inputs: Tensor, mode: Mode = "real") -> fx.GraphModule:
    """Trace ``function`` with Inductor's decompositions, as the joint graph of a compile is."""
    with enable_python_dispatcher(), torch.no_grad():
        return _without_dead_code(make_fx(function, select_decomp_table(), tracing_mode=mode)(*inputs))


def fake_traced(
    function: Callable[..., Any], *shapes: tuple[int, ...], dtype: torch.dtype, device: str
) -> fx.GraphModule:
    """Trace ``function`` with static fake tensors on a device that needn't exist."""
    with FakeTensorMode(shape_env=ShapeEnv()) as fake, enable_python_dispatcher(), torch.no_grad():
        inputs = [torch.empty(shape, dtype=dtype, device=device) for shape in shapes]
        with fake:
            return _without_dead_code(make_fx(function, select_decomp_table())(*inputs))


def calls(graph: fx.Graph | fx.GraphModule, target: Any) -> list[fx.Node]:
    """Return the nodes that call ``target``, an operator or its name."""
    found = graph.graph if isinstance(graph, fx.GraphModule) else graph
    return [node for node in found.nodes if node.op == "call_function" and target in (node.target, str(node.target))]


def targets(graph: fx.Graph | fx.GraphModule) -> list[str]:
    """Return the targets of all calls, in order, as text."""
    found = graph.graph if isinstance(graph, fx.GraphModule) else graph
    return [_name(node.target) for node in found.nodes if node.op == "call_function"]


def only(graph: fx.Graph | fx.GraphModule, target: Any) -> fx.Node:
    """Return the one node that calls ``target``."""
    (node,) = calls(graph, target)
    return node


def hand_written(build: Callable[..., Any], *inputs: Tensor) -> fx.GraphModule:
    """Make a graph by hand: ``build`` gets the graph and a placeholder per input and returns the output node(s).

    The values in the nodes' metadata come from running the graph.
    """
    graph = fx.Graph()
    placeholders = [graph.placeholder(f"x{i}") for i in range(len(inputs))]
    graph.output(build(graph, *placeholders))
    module = fx.GraphModule({}, graph)
    fill_values(module, *inputs)
    return module


def fill_values(module: fx.GraphModule, *inputs: Tensor) -> None:
    """Set ``meta["val"]`` of every node to a fake tensor of what it yields."""
    mode = FakeTensorMode(shape_env=ShapeEnv())

    class Fill(fx.Interpreter):
        def run_node(self, n: fx.Node) -> Any:
            result = super().run_node(n)
            if n.op != "output":
                n.meta["val"] = result
            return result

    with mode:
        fakes = [mode.from_tensor(x, static_shapes=True) for x in inputs]
        Fill(module).run(*fakes)


def run_checked(module: fx.GraphModule, *inputs: Tensor) -> Any:
    """Run a graph, and check that each node yields what its metadata says, after a lint."""
    module.graph.lint()
    module.recompile()

    class Check(fx.Interpreter):
        def run_node(self, n: fx.Node) -> Any:
            result = super().run_node(n)
            if n.op == "call_function":
                _check_value(n, n.meta["val"], result)
            return result

    Check(module).run(*inputs)
    return module(*inputs)


def assert_as_exact(fused: Any, unfused: Any, reference: Any) -> None:
    """Check that ``fused`` is at most twice as far from the float64 ``reference`` as ``unfused``, and a few ulps.

    See `kwtrace.testing.comparing`. Of several results, each is checked; only where the reference is NaN both may be.
    """
    if isinstance(fused, tuple | list):
        for results in zip(fused, unfused, reference, strict=True):
            assert_as_exact(*results)
        return
    if fused.dtype.is_floating_point:
        assert (reference.dtype, reference.shape) == (torch.float64, fused.shape)
        assert bool(reference[unfused.isnan()].isnan().all())
    problem = compare(unfused, fused, reference)
    assert problem is None, problem


def _without_dead_code(module: fx.GraphModule) -> fx.GraphModule:
    """Drop what a decomposition left behind when it decided not to decompose, as torch.compile does."""
    module.graph.eliminate_dead_code()
    module.recompile()
    return module


def _check_value(node: fx.Node, stated: Any, found: Any) -> None:
    if isinstance(found, tuple | list):
        assert isinstance(stated, tuple | list)
        for one, other in zip(stated, found, strict=True):
            _check_value(node, one, other)
    elif isinstance(found, Tensor):
        assert isinstance(stated, Tensor), node
        sizes = [_hint(size) for size in stated.shape]
        assert (stated.dtype, sizes, stated.device) == (found.dtype, list(found.shape), found.device), node
        if found.numel():
            places = [place for place, size in enumerate(sizes) if size != 1]
            strides = [_hint(stated.stride(place)) for place in places]
            assert strides == [found.stride(place) for place in places], (node, node.target, node.args)
    else:
        assert _hint(stated) == found, node


def _hint(value: Any) -> Any:
    return value.node.hint if isinstance(value, torch.SymInt | torch.SymFloat) else value


def _name(target: Any) -> str:
    return (
        f"operator.{target.__name__}"
        if getattr(operator, getattr(target, "__name__", ""), None) is target
        else str(target)
    )
