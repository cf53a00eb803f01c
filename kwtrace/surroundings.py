"""What tracing is shielded from: modes that are active around it, and devices that this machine lacks."""

from __future__ import annotations

import sys
import threading
import warnings
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch._dynamo import config as dynamo_config
from torch._functorch import config as functorch_config
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack
from torch._guards import tracing
from torch._inductor import config as inductor_config
from torch.fx.experimental import _config as shapes_config
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack, _pop_mode, _push_mode
from torch.utils._python_dispatch import _disable_current_modes

_lock = threading.RLock()
"""Held while tracing: the default dtype, the filters of warnings and much of torch's tracer belong to the process."""

_FRAMES = 2000
"""How deep tracing may recurse from where it starts: twice Python's own limit for a whole process."""

_KERNELS: list[SDPBackend] = [backend for backend in SDPBackend.__members__.values() if backend is not SDPBackend.ERROR]

_SETTINGS: tuple[tuple[Any, Mapping[str, Any]], ...] = (
    (
        inductor_config,
        {
            "coordinate_descent_tuning": False,
            "emulate_precision_casts": False,
            "fallback_embedding_bag_byte_unpack": False,
            "fallback_random": False,
        },
    ),
    (dynamo_config, {"fake_tensor_cache_crosscheck_enabled": False, "fake_tensor_cache_enabled": True}),
    (
        functorch_config,
        {
            "fake_tensor_allow_meta": True,
            "fake_tensor_prefer_device_type": None,
            "fake_tensor_propagate_real_tensors": False,
            "generate_fake_kernels_from_real_mismatches": False,
        },
    ),
    (
        shapes_config,
        {
            "aggressive_guard_free_semantics": 0,
            "backed_size_oblivious": False,
            "check_shape_env_recorded_events": False,
            "skip_dtype_check_in_meta_registrations": False,
            "symbol_guard_limit_before_specialize": None,
            "translation_validation": False,
        },
    ),
)
"""Torch's settings that are read while tracing and change, or may change, what comes out; their defaults."""


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
    """Trace as in a fresh process: nothing is active, and every setting that changes a graph is at its default."""
    with shielded(), ExitStack() as stack:
        stack.enter_context(sdpa_kernel(_KERNELS))
        for module, settings in _SETTINGS:
            wrong = {name: value for name, value in settings.items() if getattr(module, name, value) != value}
            if wrong:
                stack.enter_context(module.patch(wrong))
        stack.enter_context(_any_algorithm())
        yield


@contextmanager
def shielded() -> Iterator[None]:
    """Trace with no gradients, no active modes or transforms, default device and dtype, no autocast.

    What decides on kernels is left as the user has set it.
    """
    with _lock, ExitStack() as stack:
        stack.enter_context(torch._C._EnableTorchFunction())  # noqa: SLF001 - what undoes torch._C.DisableTorchFunction
        stack.enter_context(_no_function_modes())
        stack.enter_context(_disable_current_modes())
        stack.enter_context(temporarily_clear_interpreter_stack())
        stack.enter_context(tracing(None))
        stack.enter_context(torch.inference_mode(mode=False))
        stack.enter_context(torch.no_grad())
        stack.enter_context(torch.device("cpu"))
        for device in ("cpu", "cuda"):
            stack.enter_context(torch.autocast(device, enabled=False))
        stack.enter_context(_Indexing())
        stack.enter_context(_not_compiling())
        stack.enter_context(_default_dtype())
        stack.enter_context(_room_to_recurse())
        stack.enter_context(_warnings_that_are_no_errors())
        yield


@contextmanager
def _any_algorithm() -> Iterator[None]:
    """Allow algorithms that aren't deterministic; their use decides on decompositions."""
    on, warn_only = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    switch = torch._C._set_deterministic_algorithms  # noqa: SLF001 - the public one switches a setting of Inductor's too
    if on:
        switch(False, warn_only=False)  # noqa: FBT003 - torch takes it by position only
    try:
        yield
    finally:
        if on:
            switch(on, warn_only=warn_only)


@contextmanager
def _no_function_modes() -> Iterator[None]:
    modes = [_pop_mode() for _ in _get_current_function_mode_stack()]
    try:
        yield
    finally:
        for mode in reversed(modes):
            _push_mode(mode)


@contextmanager
def _not_compiling() -> Iterator[None]:
    """Let ``torch.compiler.is_compiling()`` say no, since a rule's functions, or what they call, may branch on it."""
    flag = "_is_compiling_flag"
    before = getattr(torch.compiler, flag, False)
    if before:
        setattr(torch.compiler, flag, False)
    try:
        yield
    finally:
        if before:
            setattr(torch.compiler, flag, before)


@contextmanager
def _default_dtype() -> Iterator[None]:
    before = torch.get_default_dtype()
    if before is not torch.float32:
        torch.set_default_dtype(torch.float32)
    try:
        yield
    finally:
        if before is not torch.float32:
            torch.set_default_dtype(before)


@contextmanager
def _room_to_recurse() -> Iterator[None]:
    """Raise a recursion limit that is low, or nearly reached: sympy, and tracing itself, go deep."""
    before, depth, frame = sys.getrecursionlimit(), 0, sys._getframe()  # noqa: SLF001 - inspect.stack reads files
    while (frame := frame.f_back) is not None:  # type: ignore[assignment]  # None ends the loop
        depth += 1
    if before < depth + _FRAMES:
        sys.setrecursionlimit(depth + _FRAMES)
    try:
        yield
    finally:
        sys.setrecursionlimit(before)


@contextmanager
def _warnings_that_are_no_errors() -> Iterator[None]:
    """Show a warning that would be raised as an error: it mustn't decide whether a variant traces."""
    with warnings.catch_warnings():
        filters: Any = warnings.filters
        shown = [("default", *entry[1:]) if entry[0] == "error" else entry for entry in filters]
        if shown != filters:
            warnings.resetwarnings()
            filters[:] = shown
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
