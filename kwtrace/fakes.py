"""Fake tensors: the values that say what a node yields without computing it.

Part of the tracer: fake tensor modes are private to torch.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import fx
from torch._dispatch.python import enable_python_dispatcher
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv


def run(node: fx.Node, mode: FakeTensorMode, overrides: Mapping[fx.Node, Any] | None = None, target: Any = None) -> Any:
    """Return what ``node`` yields, from the fake values of its arguments.

    ``overrides`` are values that stand in for those that nodes have, ``target`` is what to call instead of its own.
    """
    known = overrides or {}
    function: Any = target or node.target

    def value(argument: fx.Node) -> Any:
        return in_mode(known[argument] if argument in known else argument.meta["val"], mode)

    args, kwargs = fx.map_arg(node.args, value), fx.map_arg(node.kwargs, value)
    with mode, enable_python_dispatcher(), torch.no_grad():
        return function(*args, **kwargs)


def own_value(node: fx.Node, mode: FakeTensorMode) -> Any:
    """Return a node's value as a fake tensor of ``mode``."""
    return in_mode(node.meta["val"], mode)


def in_mode(value: Any, mode: FakeTensorMode) -> Any:
    """Return a value, a tensor or several or a number, with its tensors as fake tensors of ``mode``."""
    if isinstance(value, list | tuple):
        return [in_mode(item, mode) for item in value]
    if not isinstance(value, torch.Tensor) or mode_of(value) is mode:
        return value
    with mode:
        return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=value.device)


def mode_of(value: Any) -> FakeTensorMode | None:
    """Return the mode of a fake tensor, or None for anything else."""
    return value.fake_mode if isinstance(value, FakeTensor) else None


def common_mode(nodes: Iterable[fx.Node]) -> FakeTensorMode:
    """Return the mode that the nodes' values share, or a new one if they share none."""
    modes = {mode for mode in (mode_of(node.meta["val"]) for node in nodes) if mode is not None}
    return modes.pop() if len(modes) == 1 else FakeTensorMode(shape_env=ShapeEnv())
