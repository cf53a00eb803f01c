"""Fixtures that all tests share."""

from __future__ import annotations

import os
from collections.abc import Iterator

os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")  # the tests' own processes are enough

import pytest
import torch
from hypothesis import HealthCheck, Phase, settings

import kwtrace as kt
import patterns_gen
from kwtrace.loading import as_pattern_set

settings.register_profile(
    "kwtrace",
    database=None,
    deadline=None,  # the first example of a test warms up the tracer
    derandomize=True,  # a failure in CI is a failure everywhere
    max_examples=20,
    phases=[Phase.explicit, Phase.generate],  # an example here traces a graph: shrinking one takes minutes
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
)
settings.load_profile("kwtrace")


@pytest.fixture(autouse=True)
def _seed() -> None:
    """Start every test with the same random numbers."""
    torch.manual_seed(0)


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.cuda)])
def device(request: pytest.FixtureRequest) -> str:
    """Return a device to run on; CUDA is skipped where there is none."""
    if request.param == "cuda" and not torch.cuda.is_available():
        pytest.skip("needs an NVIDIA GPU, and this machine has none")
    return str(request.param)


@pytest.fixture(scope="session")
def shipped() -> kt.PatternSet:
    """Return the patterns that kwtrace ships, as the generated package holds them."""
    return as_pattern_set(patterns_gen)


@pytest.fixture
def fresh_compiler(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Compile as a fresh process does: nothing compiled before, no cache on disk, no counts."""
    from torch._functorch import config as functorch_config  # noqa: PLC0415 - only tests that compile pay for it
    from torch._inductor import config  # noqa: PLC0415 - as above

    torch._dynamo.reset()
    kt.stats(reset=True)
    monkeypatch.delenv("KWTRACE_DISABLE", raising=False)
    with config.patch(fx_graph_cache=False), functorch_config.patch(enable_autograd_cache=False):
        yield
    torch._dynamo.reset()
    kt.stats(reset=True)
