"""What tracing is shielded from: modes that are active around it, and devices that this machine lacks."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import _disable_current_modes


class _Indexing(TorchFunctionMode):
    """Spells ``x[...]`` out, since torch's own indexing wants a driver even for a fake tensor on a GPU."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.Tensor.__getitem__:
            index = args[1] if isinstance(args[1], tuple) else (args[1],)
            if all(item is None or item is ... or _is_plain(item) for item in index):
                return _index(args[0], index)
        return func(*args, **(kwargs or {}))


@contextmanager
def clean_surroundings() -> Iterator[None]:
    """Trace as in a fresh process: no gradients, no active modes, default device and dtype, no autocast."""
    dtype = torch.get_default_dtype()
    with ExitStack() as stack:
        stack.enter_context(_disable_current_modes())
        stack.enter_context(torch.no_grad())
        stack.enter_context(torch.device("cpu"))
        for device in ("cpu", "cuda"):
            stack.enter_context(torch.autocast(device, enabled=False))
        stack.enter_context(_Indexing())
        torch.set_default_dtype(torch.float32)
        stack.callback(torch.set_default_dtype, dtype)
        yield


def _is_plain(item: Any) -> bool:
    return isinstance(item, slice | torch.SymInt) or type(item) is int


def _index(tensor: torch.Tensor, index: tuple[Any, ...]) -> torch.Tensor:
    dim = 0
    for item in _without_ellipsis(index, tensor.dim()):
        if item is None:
            tensor = tensor.unsqueeze(dim)
        elif isinstance(item, slice):
            tensor = _slice(tensor, dim, item)
        else:
            tensor = tensor.select(dim, item)
            continue
        dim += 1
    return tensor


def _slice(tensor: torch.Tensor, dim: int, item: slice) -> torch.Tensor:
    if item == slice(None):
        return tensor
    step = 1 if item.step is None else item.step
    result: torch.Tensor = torch.ops.aten.slice.Tensor(tensor, dim, item.start, item.stop, step)
    return result


def _without_ellipsis(index: tuple[Any, ...], rank: int) -> tuple[Any, ...]:
    places = [place for place, item in enumerate(index) if item is ...]
    if not places:
        return index
    named = sum(item is not None and item is not ... for item in index)
    before, after = index[: places[0]], index[places[0] + 1 :]
    return (*before, *(slice(None),) * (rank - named), *after)
