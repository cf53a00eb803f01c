"""Fake tensors: the values that say what a node yields without computing it.

Part of the tracer: fake tensor modes are private to torch.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import fx
from torch._dispatch.python import enable_python_dispatcher
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode


def run(node: fx.Node, mode: FakeTensorMode) -> Any:
    """Return what ``node`` yields, from the fake values of its arguments."""
    target: Any = node.target
    args = fx.map_arg(node.args, lambda n: own_value(n, mode))
    kwargs = fx.map_arg(node.kwargs, lambda n: own_value(n, mode))
    with mode, enable_python_dispatcher(), torch.no_grad():
        return target(*args, **kwargs)


def own_value(node: fx.Node, mode: FakeTensorMode) -> Any:
    """Return a node's value as a fake tensor of ``mode``."""
    value = node.meta["val"]
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
    return modes.pop() if len(modes) == 1 else FakeTensorMode()
