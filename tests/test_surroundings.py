"""Tracing is not disturbed by what is active around it, and leaves it as it was."""

from __future__ import annotations

import sys
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Annotated, Any

import pytest
import torch
from graphs import assert_as_exact, calls, run_checked, traced
from modules_for_tests import run_python
from torch import Tensor
from torch._functorch import config as functorch_config
from torch._guards import TracingContext
from torch._inductor import config as inductor_config
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental import _config as shapes_config
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention
from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack
from torch.utils import _device, deterministic
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode_stack

import kwtrace as kt
from kwtrace import tracing_at_match
from kwtrace.source import render_module

F32 = torch.float32
Tracing = Callable[[], str]
Query = Annotated[Tensor, kt.Shape("b>1 h>1 s>1 d>1"), F32]
Key = Annotated[Tensor, kt.Shape("b h t>1 d"), F32]


@kt.rule(name="attended", devices=("cpu",))
def attended_rule(q: Query, k: Key, v: Key, *, scale: float) -> Tensor:
    """Attention, whose replacement depends on which kernels are allowed."""
    return torch.matmul(torch.softmax(torch.matmul(q, k.transpose(-2, -1)) * scale, -1), v)


@attended_rule.replacement
def _(q: Tensor, k: Tensor, v: Tensor, *, scale: float) -> Tensor:
    return scaled_dot_product_attention(q, k, v, scale=scale)


@kt.rule(name="attended_late", devices=("cpu",))
def attended_late_rule(q: Query, k: Key, v: Key, *, scale: float) -> Tensor:
    """The same, with the replacement traced at the match."""
    return torch.matmul(torch.softmax(torch.matmul(q, k.transpose(-2, -1)) * scale, -1), v)


@attended_late_rule.replacement(at="match")
def _(q: Tensor, k: Tensor, v: Tensor, *, scale: float) -> Tensor:
    return scaled_dot_product_attention(q, k, v, scale=scale) * torch.ones(1)


@kt.rule(name="sensitive", devices=("cpu",))
def sensitive_rule(x: Annotated[Tensor, kt.Shape("m>1 n>1"), F32], *, alpha: float) -> Tensor:
    """Ask for a default dtype and device, cast by autocast, index, and ask whether this is a compile."""
    y = torch.exp(torch.mm(x, x.t())) * alpha + torch.ones(x.shape[0])
    return y[:, :1].sin() if torch.compiler.is_compiling() else y[:, :1]


@sensitive_rule.replacement
def _(x: Tensor, *, alpha: float) -> Tensor:
    noise = torch.nn.functional.dropout(torch.rand(x.shape[0], 1), 0.5)
    return (torch.exp(torch.mm(x, x.t())) * alpha + torch.ones(x.shape[0]))[:, :1] + noise * 0


@kt.rule(name="warned", devices=("cpu",))
def warned_rule(x: Annotated[Tensor, kt.Shape("m>1 n>1"), F32]) -> Tensor:
    """Warn while it is traced."""
    warnings.warn("spelled differently in the next release", FutureWarning, stacklevel=1)
    return x.tanh().sin()


@warned_rule.replacement
def _(x: Tensor) -> Tensor:
    return x.tanh().sin()


def text(*rules: kt.Rule) -> str:
    """Trace rules and return the modules that are generated for them."""
    chosen = rules or (attended_rule, sensitive_rule)
    return "\n".join(render_module(rule.name, kt.trace(rule).families, "x") for rule in chosen)


@pytest.fixture(scope="module")
def clean() -> str:
    """Return what is generated where nothing is active."""
    return text()


def state() -> dict[str, Any]:
    """Return all that tracing changes for its own time."""
    cuda = torch.backends.cuda
    return {
        "dtype": torch.get_default_dtype(),
        "device": (_device.CURRENT_DEVICE, torch.get_default_device().type),
        "function modes": _get_current_function_mode_stack(),
        "dispatch modes": _get_current_dispatch_mode_stack(),
        "transforms": torch._C._functorch.peek_interpreter_stack() is None,
        "context": TracingContext.try_get(),
        "gradients": (torch.is_grad_enabled(), torch.is_inference_mode_enabled()),
        "autocast": [(torch.is_autocast_enabled(d), torch.get_autocast_dtype(d)) for d in ("cpu", "cuda")],
        "deterministic": (torch.get_deterministic_debug_mode(), deterministic.fill_uninitialized_memory),
        "attention": (cuda.flash_sdp_enabled(), cuda.mem_efficient_sdp_enabled(), cuda.math_sdp_enabled()),
        "order": list(torch._C._get_sdp_priority_order()),
        "precision": (torch.get_float32_matmul_precision(), torch.backends.mkldnn.enabled),
        "recursion": sys.getrecursionlimit(),
        "warnings": list(warnings.filters),
        "compiling": torch.compiler.is_compiling(),
        "inductor": inductor_config.get_config_copy(),
        "functorch": functorch_config.get_config_copy(),
        "shapes": shapes_config.get_config_copy(),
    }


def traced_inside() -> str:
    """Trace, and check that what was active before is active still, and exactly so."""
    before = state()
    found = text()
    after = state()
    assert {name: value for name, value in after.items() if value != before[name]} == {}
    return found


class Sines(TorchFunctionMode):
    """A mode of the user's that computes something else."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Take the sine where the exponential is asked for."""
        return torch.sin(*args) if func is torch.exp else func(*args, **(kwargs or {}))


class Refusing(TorchDispatchMode):
    """A mode of the user's that allows nothing."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Raise."""
        raise NotImplementedError


@contextmanager
def switched(switch: Callable[[Any], object], value: Any, back: Any) -> Iterator[None]:
    """Call a function that sets something, and call it again to undo that."""
    switch(value)
    try:
        yield
    finally:
        switch(back)


@contextmanager
def warnings_as_errors() -> Iterator[None]:
    """Raise every warning."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        yield


@contextmanager
def little_room() -> Iterator[None]:
    """Leave few frames before the recursion limit."""
    depth = len(list(_frames()))
    with switched(sys.setrecursionlimit, depth + 70, sys.getrecursionlimit()):
        yield


def _frames() -> Iterator[Any]:
    frame = sys._getframe()
    while frame is not None:
        yield frame
        frame = frame.f_back  # type: ignore[assignment]


@contextmanager
def meta_by_default() -> Iterator[None]:
    """Set the default device for the whole thread."""
    torch.set_default_device("meta")
    try:
        yield
    finally:
        torch.set_default_device(None)


def _autocast_on_cuda(value: bool) -> None:
    torch.set_autocast_enabled("cuda", value)  # torch.autocast doesn't, where there is no GPU


def _fill(value: bool) -> None:
    deterministic.fill_uninitialized_memory = value


SURROUNDINGS: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "torch.device": lambda: torch.device("meta"),
    "default device": meta_by_default,
    "default dtype bfloat16": lambda: switched(torch.set_default_dtype, torch.bfloat16, F32),
    "default dtype float64": lambda: switched(torch.set_default_dtype, torch.float64, F32),
    "autocast on the CPU": lambda: torch.autocast("cpu", torch.bfloat16),
    "autocast on CUDA": lambda: switched(_autocast_on_cuda, True, False),
    "inference mode": torch.inference_mode,
    "no_grad": torch.no_grad,
    "enable_grad": torch.enable_grad,
    "deterministic": lambda: switched(torch.use_deterministic_algorithms, True, False),
    "no fill": lambda: switched(_fill, False, True),
    "a fake mode": lambda: FakeTensorMode(shape_env=ShapeEnv()),
    "a function mode": Sines,
    "a dispatch mode": Refusing,
    "functions not overridden": torch._C.DisableTorchFunction,
    "attention by math": lambda: sdpa_kernel(SDPBackend.MATH),
    "no flash attention": lambda: switched(torch.backends.cuda.enable_flash_sdp, False, True),
    "no attention by math": lambda: switched(torch.backends.cuda.enable_math_sdp, False, True),
    "no attention kernel": lambda: sdpa_kernel([]),
    "matmul precision": lambda: switched(torch.set_float32_matmul_precision, "medium", "highest"),
    "no mkldnn": lambda: switched(torch._C._set_mkldnn_enabled, False, True),
    "little room": little_room,
    "fallback_random": lambda: inductor_config.patch(fallback_random=True),
    "emulate_precision_casts": lambda: inductor_config.patch(emulate_precision_casts=True),
    "real tensors": lambda: functorch_config.patch(fake_tensor_propagate_real_tensors=True),
    "translation_validation": lambda: shapes_config.patch(translation_validation=True),
    "use_duck_shape": lambda: shapes_config.patch(use_duck_shape=True),
    "backed_size_oblivious": lambda: shapes_config.patch(backed_size_oblivious=True),
}


@pytest.mark.parametrize("name", SURROUNDINGS)
def test_a_surrounding_changes_nothing(name: str, clean: str) -> None:
    """Whatever mode, flag or setting is active, the generated text is the same, and it is active afterwards."""
    with SURROUNDINGS[name]():
        assert traced_inside() == clean


def in_a_backend(run: Tracing) -> None:
    """Run in a backend of ``torch.compile``."""

    def backend(module: Any, inputs: Any) -> Any:
        run()
        return module.forward

    torch.compile(torch.sin, backend=backend)(torch.ones(3))


def in_a_pass(run: Tracing) -> None:
    """Run in a pass of Inductor's."""
    torch.compile(torch.sin, options={"joint_custom_pre_pass": lambda graph: run()})(torch.ones(3))


def in_a_trace(run: Tracing) -> None:
    """Run in a function that is being traced with symbolic sizes."""
    make_fx(lambda x: (run(), x.sin())[1], tracing_mode="symbolic")(torch.ones(3, 4))


def in_vmap(run: Tracing) -> None:
    """Run in a function that is being vectorised."""
    torch.vmap(lambda x: (run(), x.sin())[1])(torch.ones(3))


def in_grad(run: Tracing) -> None:
    """Run in a function that is being differentiated."""
    torch.func.grad(lambda x: (run(), x.sin().sum())[1])(torch.ones(3))


def in_functionalize(run: Tracing) -> None:
    """Run in a function that is being functionalised."""
    torch.func.functionalize(lambda x: (run(), x.sin())[1])(torch.ones(3))


def in_an_autograd_function(run: Tracing) -> None:
    """Run in the backward of an operation that has its own."""

    class Twice(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            run()
            return x * 2

        @staticmethod
        def backward(ctx: Any, *grads: Any) -> Any:
            run()
            return grads[0] * 2

    Twice.apply(torch.ones(3, requires_grad=True)).sum().backward()


PLACES = (
    in_a_backend,
    pytest.param(in_a_pass, marks=pytest.mark.slow),
    in_a_trace,
    in_vmap,
    in_grad,
    in_functionalize,
    in_an_autograd_function,
)


@pytest.mark.usefixtures("fresh_compiler")
@pytest.mark.parametrize("place", PLACES, ids=lambda place: place.__name__)
def test_a_place_changes_nothing(place: Callable[[Tracing], None], clean: str) -> None:
    """Wherever tracing is called from, the generated text is the same, and what went on there goes on."""
    found: list[str] = []

    def run() -> str:
        found.append(traced_inside())
        return found[-1]

    place(run)
    assert set(found) == {clean}


@pytest.mark.parametrize("dtype", [F32, torch.float64], ids=str)
def test_threads_do_not_disturb_each_other(dtype: torch.dtype, clean: str) -> None:
    """Two threads that trace at once generate what one does, and leave the process's default dtype as it was."""
    start = threading.Barrier(2)
    found: list[str] = []

    def run() -> None:
        start.wait()
        found.append(text())

    threads = [threading.Thread(target=run) for _ in range(2)]
    with switched(torch.set_default_dtype, dtype, F32):
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert torch.get_default_dtype() is dtype
    assert found == [clean, clean]


def test_a_warning_is_no_error() -> None:
    """A rule that warns is traced where warnings are errors, and warns; elsewhere warnings stay errors."""
    with warnings.catch_warnings(record=True) as caught, warnings_as_errors():
        found = kt.trace(warned_rule)
        with pytest.raises(FutureWarning, match="still an error"):
            warnings.warn("still an error", FutureWarning, stacklevel=1)
    assert len(found.families) == 1
    assert {str(warning.message) for warning in caught} == {"spelled differently in the next release"}


def test_a_failed_trace_restores_everything() -> None:
    """What was active is active again after an error as well."""

    def failing(x: Annotated[Tensor, kt.Shape("n>1"), F32]) -> Tensor:
        msg = "not today"
        raise ValueError(msg)

    rule = kt.rule(devices=("cpu",))(failing)
    rule.replacement(lambda x: x.sin())
    with torch.device("meta"), Sines(), sdpa_kernel(SDPBackend.MATH), torch.autocast("cpu", torch.bfloat16):
        before = state()
        with pytest.raises(kt.KwtraceError, match="not today"):
            kt.trace(rule)
        assert state() == before


def test_a_replacement_traced_at_the_match_is_shielded_but_keeps_the_kernels() -> None:
    """Modes and defaults don't reach it; the user's choice of kernels does, also for a match that was traced before."""
    patterns = kt.trace(attended_late_rule)
    flash = "aten._scaled_dot_product_flash_attention_for_cpu.default"
    inputs = [torch.randn(2, 3, 5, 4) for _ in range(3)]
    expected, exact = (attended_late_rule(*given, scale=0.3) for given in (inputs, [x.double() for x in inputs]))
    around = (nullcontext, Sines, lambda: torch.device("meta"), lambda: sdpa_kernel(SDPBackend.MATH), nullcontext)
    counts = []
    for context in around:
        if counts != [1, 1, 1]:
            tracing_at_match._traced.clear()
        graph = traced(lambda q, k, v: attended_late_rule(q, k, v, scale=0.3), *inputs)
        with context():
            assert kt.apply(graph, patterns).count == 1
        counts.append(len(calls(graph, flash)))
        assert_as_exact(run_checked(graph, *inputs), expected, exact)
    assert counts == [1, 1, 1, 0, 1]


@pytest.mark.slow
def test_a_fresh_process_generates_the_same(clean: str) -> None:
    """What the other tests compare with is what a fresh process generates."""
    done = run_python("-c", "import test_surroundings; print(test_surroundings.text(), end='')")
    assert done.returncode == 0, done.stderr
    assert done.stdout == clean
