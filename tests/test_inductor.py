"""The pass that Inductor calls: what it depends on, that caches stay right, and that it never raises."""

from __future__ import annotations

import json
import logging
import os
import pickle
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import pytest
import torch
from graphs import assert_as_exact, targets, traced
from torch import Tensor, fx
from torch._inductor.custom_graph_pass import CustomGraphPass
from torch.nn.functional import rms_norm
from toys import normed

import kwtrace as kt
import patterns_gen
from kwtrace import inductor
from kwtrace.library import ops
from kwtrace.reports import Recorder

ROOT = Path(kt.__file__).parent.parent


class Earlier(CustomGraphPass):  # type: ignore[misc] - torch's class is untyped
    """A pass that someone else configured."""

    def __init__(self, name: Any = "earlier") -> None:
        """Take what its uuid is."""
        self.name = name
        self.seen: list[list[str]] = []

    def __call__(self, graph: fx.Graph) -> None:
        """Note what the graph calls."""
        self.seen.append(targets(graph))

    def uuid(self) -> Any:
        """Return the name."""
        return self.name


def made(patterns: Any, *before: Any) -> inductor.KwtracePass:
    """Return a pass that counts for itself."""
    return inductor.KwtracePass(patterns, before, Recorder())


def function(a: Tensor, b: Tensor) -> Tensor:
    """Return what the tutorial rule searches for."""
    return ops.act(torch.mm(a, b), negate=True)


def test_earlier_passes_run_first_and_in_order(shipped: kt.PatternSet) -> None:
    """A pass that was configured before sees the graph before kwtrace rewrites it."""
    order: list[str] = []
    first, second = Earlier(), lambda graph: order.append("second")
    graph = traced(function, torch.randn(3, 4), torch.randn(4, 5))
    made(shipped, first, second)(graph.graph)
    assert first.seen == [["aten.mm.default", "kwtrace.act.default"]]
    assert order == ["second"]
    assert targets(graph) == ["kwtrace.mm_act.default"]


def test_an_earlier_pass_that_raises_is_not_hidden(shipped: kt.PatternSet) -> None:
    """An error in someone else's pass is theirs: kwtrace doesn't swallow it."""

    def broken(graph: fx.Graph) -> None:
        msg = "theirs"
        raise ValueError(msg)

    with pytest.raises(ValueError, match="theirs"):
        made(shipped, broken)(fx.Graph())


def test_passes_are_pickled(shipped: kt.PatternSet) -> None:
    """A pass survives pickling, as compile workers need it to: same content, same work, no engine dragged along."""
    for content in (shipped, patterns_gen):
        original = made(content, Earlier("a"))
        original(traced(function, torch.randn(3, 4), torch.randn(4, 5)).graph)
        copy = pickle.loads(pickle.dumps(original))  # noqa: S301 - it was pickled one call before
        assert copy.uuid() == original.uuid()
        graph = traced(function, torch.randn(3, 4), torch.randn(4, 5))
        copy(graph.graph)
        assert targets(graph) == ["kwtrace.mm_act.default"]


def test_equal_passes_are_equal(shipped: kt.PatternSet) -> None:
    """Passes of equal content after equal passes are equal, and so are their hashes; others differ."""
    earlier = Earlier()
    same = [made(shipped, earlier), made(patterns_gen, earlier), made(shipped.select("mm_act") | shipped, earlier)]
    assert all(one == other and hash(one) == hash(other) for one in same for other in same)
    others = [
        made(shipped),
        made(shipped, Earlier()),
        made(shipped.select("mm_act", negate=True), earlier),
        "a pass",
        None,
    ]
    assert all(one != other for one in same for other in others)


def broken_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make kwtrace raise whenever it looks at a graph."""

    def run(self: Any, graph: fx.Graph) -> Any:
        msg = "kwtrace is broken"
        raise RuntimeError(msg)

    monkeypatch.setattr(inductor.Engine, "run", run)


def test_a_fault_in_kwtrace_is_logged_and_leaves_the_graph(
    shipped: kt.PatternSet, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The pass never raises: the graph stays, and the log says what happened."""
    broken_engine(monkeypatch)
    graph = traced(function, torch.randn(3, 4), torch.randn(4, 5))
    with caplog.at_level(logging.WARNING, "kwtrace"):
        made(shipped)(graph.graph)
    assert targets(graph) == ["aten.mm.default", "kwtrace.act.default"]
    assert "kwtrace is broken" in caplog.text


@pytest.mark.parametrize("content", [42, None, "patterns", json], ids=["int", "None", "str", "a module"])
def test_something_else_than_patterns_never_raises_in_a_compile(content: Any, caplog: pytest.LogCaptureFixture) -> None:
    """A pass given something that is no pattern set leaves the graph as it is and says so."""
    graph = traced(function, torch.randn(3, 4), torch.randn(4, 5))
    with caplog.at_level(logging.WARNING, "kwtrace"):
        broken = made(content)
        broken.uuid()
        broken(graph.graph)
    assert targets(graph) == ["aten.mm.default", "kwtrace.act.default"]
    assert "Expected a PatternSet" in caplog.text


@pytest.mark.usefixtures("fresh_compiler")
def test_a_compile_goes_on_when_kwtrace_is_broken(monkeypatch: pytest.MonkeyPatch) -> None:
    """A user's compile succeeds and yields what eager yields, whatever is wrong inside kwtrace."""
    broken_engine(monkeypatch)
    a, b = torch.randn(3, 4), torch.randn(4, 5)
    found = torch.compile(function, options=kt.options(patterns_gen))(a, b)
    assert torch.equal(found, function(a, b))
    assert kt.stats().count == 0


@pytest.mark.usefixtures("fresh_compiler")
@pytest.mark.parametrize("dynamic", [False, True])
def test_static_and_dynamic_compiles_are_fused(dynamic: bool) -> None:
    """The same patterns fire in a static compile and in a dynamic one, which then serves other sizes as well."""
    seen: list[str] = []
    record: Callable[[fx.Graph], None] = lambda graph: seen.extend(targets(graph))  # noqa: E731 - a pass is a function of the graph
    compiled = torch.compile(
        function, options=kt.options(patterns_gen, post_grad_custom_pre_pass=record), dynamic=dynamic
    )
    for rows, columns in ((3, 4), (5, 6)) if dynamic else ((3, 4),):
        a, b = torch.randn(rows, columns), torch.randn(columns, 7)
        assert torch.equal(compiled(a, b), function(a, b))
    assert seen.count("kwtrace.mm_act.default") == 1
    assert "kwtrace.act.default" not in seen
    assert kt.stats().count == 1


@pytest.mark.usefixtures("fresh_compiler")
def test_equal_options_do_not_recompile() -> None:
    """Compiling again with options of equal content reuses the compiled code."""
    from torch._dynamo.utils import counters  # noqa: PLC0415 - this test alone counts compiles

    counters.clear()
    a, b = torch.randn(3, 4), torch.randn(4, 5)
    for _ in range(3):
        assert torch.equal(torch.compile(function, options=kt.options(patterns_gen))(a, b), function(a, b))
    assert counters["stats"]["unique_graphs"] == 1
    assert kt.stats().graphs == 1


SCRIPT = """
import json, os, sys, warnings
warnings.filterwarnings("ignore")
import torch
from torch._dynamo.utils import counters
import kwtrace as kt
import patterns_gen
from kwtrace import inductor
from kwtrace.library import ops
from kwtrace.loading import as_pattern_set

def function(a, b):
    return ops.act(torch.mm(a, b), negate=True)

def compiled(patterns):
    torch._dynamo.reset()
    counters.clear()
    kt.stats(reset=True)
    a, b = torch.arange(12.0).reshape(3, 4), torch.arange(20.0).reshape(4, 5)
    options = kt.options(patterns)
    with torch.no_grad():
        run = torch.compile(function, options=options)
        run(a, b)
        with torch.autograd.profiler.profile() as profile:
            found = run(a, b)
    return {
        "uuid": repr(options[inductor.KEY].uuid()),
        "hits": counters["inductor"]["fxgraph_cache_hit"],
        "called": sorted({event.name for event in profile.function_events if event.name.startswith("kwtrace::")}),
        "right": torch.equal(found, function(a, b)),
        "count": kt.stats().count,
        "words": str(kt.stats()),
    }

found = {}
for step in sys.argv[1:]:
    os.environ["KWTRACE_DISABLE"] = "mm_act[negate=True]" if step == "disabled" else ""
    other = as_pattern_set(patterns_gen).select("mm_act", negate=False) if step == "changed" else patterns_gen
    found[step] = compiled(other)
print(json.dumps(found))
"""


def in_a_process(tmp_path: Path, *steps: str) -> dict[str, Any]:
    """Compile once per step, in a process of its own with caches kept in ``tmp_path``; return what it says."""
    script = tmp_path / "compile.py"
    script.write_text(SCRIPT)
    dropped = ("KWTRACE_DISABLE", "TORCHINDUCTOR_FORCE_DISABLE_CACHES")
    inherited = {name: value for name, value in os.environ.items() if name not in dropped}
    env = {
        **inherited,
        "TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "cache"),
        "TORCHINDUCTOR_FX_GRAPH_CACHE": "1",
        "TORCHINDUCTOR_COMPILE_THREADS": "1",
        "PYTHONPATH": os.pathsep.join([str(ROOT), inherited.get("PYTHONPATH", "")]),
    }
    command = [sys.executable, str(script), *steps]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=env)
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


@pytest.mark.slow
def test_the_fx_graph_cache_stays_right(tmp_path: Path) -> None:
    """A second process with the same set hits the cache; a changed set, or a switch, doesn't replay what it holds."""
    first = in_a_process(tmp_path, "same")["same"]
    assert (first["right"], first["called"], first["hits"], first["count"]) == (True, ["kwtrace::mm_act"], 0, 1)
    second = in_a_process(tmp_path, "same", "changed", "disabled")
    same, changed, disabled = second["same"], second["changed"], second["disabled"]
    assert (same["right"], same["called"], same["hits"], same["count"]) == (True, ["kwtrace::mm_act"], 1, 0)
    assert same["uuid"] == first["uuid"]
    assert "cache" in same["words"]
    for other in (changed, disabled):
        assert (other["right"], other["called"], other["hits"], other["count"]) == (True, ["kwtrace::act"], 0, 0)
        assert other["uuid"] != first["uuid"]


@pytest.mark.usefixtures("fresh_compiler")
def test_a_composite_operator_that_mutates_inside_is_fused() -> None:
    """``rms_norm`` decomposes with a mutation of what it has made; a compile's graph has none, and so has the trace."""

    @kt.rule(name="normed", devices=("cpu",))
    def rule(
        x: Annotated[Tensor, kt.Shape("m>1 n>1"), torch.float32], w: Annotated[Tensor, kt.Shape("n"), torch.float32]
    ) -> Tensor:
        return rms_norm(x, (x.shape[-1],), w, 0.125)

    @rule.replacement
    def _(x: Tensor, w: Tensor) -> Tensor:
        return normed(x, w)

    seen: list[str] = []
    options = kt.options(kt.trace(rule), post_grad_custom_pre_pass=lambda graph: seen.extend(targets(graph)))
    x, w = torch.randn(6, 8), torch.randn(8)
    with torch.no_grad():
        found = torch.compile(lambda x, w: rms_norm(x, (8,), w, 0.125), options=options)(x, w)
    assert seen == ["kwtoys.normed.default"]
    assert torch.equal(found, normed(x, w))
    assert_as_exact(found, rms_norm(x, (8,), w, 0.125), rms_norm(x.double(), (8,), w.double(), 0.125))
