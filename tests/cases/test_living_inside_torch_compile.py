"""Cases e1 to e9: caches, other passes, dynamic sizes, training, and what is said when nothing fires."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import ops_for_tests as ops
import pytest
import torch
import toys
from graphs import assert_as_exact, calls, hand_written, run_checked, targets, traced
from modules_for_tests import import_module, run_python, write_module
from torch import Tensor, fx, nn
from torch._dynamo.utils import counters
from torch._inductor import config
from torch._inductor.custom_graph_pass import CustomGraphPass

import kwtrace as kt
import patterns_gen
from kwtrace import loading
from kwtrace.inductor import KEY

aten = torch.ops.aten
F32 = torch.float32
SCALED, SCALED_ADD = "kwtoys.scaled_exp.default", "kwtoys.scaled_exp_add.default"
SDPA = "aten._scaled_dot_product_flash_attention_for_cpu.default"

DOUBLE = """
@kt.rule(devices=("cpu",))
def double(x: Vector, *, mode: Annotated[str, kt.OneOf("none", "twice")]) -> Tensor:
    return ops.act(torch.relu(x), mode=mode)


@double.replacement
def _(x, *, mode):
    return ops.relu_act(x, mode=mode, negate={negate})
"""

COMPILE = """
import json, warnings
warnings.filterwarnings("ignore")
import torch
from torch._dynamo.utils import counters
import kwtrace as kt
import ops_for_tests as ops
import written

def function(x):
    return ops.act(torch.relu(x), mode="twice") + 1

x = torch.tensor([-1.0, 0.5, 2.0])
with torch.no_grad():
    found = torch.compile(function, options=kt.options(kt.trace(written.double)))(x)
print(json.dumps({
    "found": found.tolist(),
    "eager": function(x).tolist(),
    "graphs": counters["inductor"]["fxgraph_cache_hit"],
    "programs": counters["aot_autograd"]["autograd_cache_hit"],
    "misses": counters["aot_autograd"]["autograd_cache_miss"],
    "count": kt.stats().count,
    "seen": kt.stats().graphs,
    "words": str(kt.stats()),
}))
"""


def in_a_process(folder: Path, negate: str) -> dict[str, Any]:
    """Compile in a process of its own, with caches kept in ``folder`` and the rule as given; return what it says."""
    write_module(folder, "written", DOUBLE.format(negate=negate))
    done = run_python(
        "-c",
        COMPILE,
        folder=folder,
        TORCHINDUCTOR_CACHE_DIR=str(folder / "cache"),
        TORCHINDUCTOR_FX_GRAPH_CACHE="1",
        TORCHINDUCTOR_AUTOGRAD_CACHE="1",
        TORCHINDUCTOR_FORCE_DISABLE_CACHES="0",
        TORCHINDUCTOR_COMPILE_THREADS="1",
        KWTRACE_DISABLE="",
    )
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


@pytest.fixture(scope="module")
def processes(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """Return what three processes say that share a cache: one variant is wrong in the first, right in the others."""
    folder = tmp_path_factory.mktemp("shared")
    return [in_a_process(folder, negate) for negate in ("mode == 'twice'", "False", "False")]


@pytest.mark.slow
def test_e1_a_shared_cache_never_replays_another_set(processes: list[dict[str, Any]]) -> None:
    """With one variant changed the cached rewrite isn't used, which the numbers would show; unchanged it is, rightly.

    The first process negates on purpose.
    """
    first, second, third = processes
    assert first["eager"] == [1.0, 2.0, 5.0]
    assert (first["found"], first["count"]) == ([1.0, 0.0, -3.0], 1)
    assert (second["found"], second["count"]) == (second["eager"], 1)
    assert (second["graphs"], second["programs"]) == (0, 0)
    assert second["misses"] == 1
    assert (third["found"], third["count"], third["misses"]) == (third["eager"], 0, 0)
    assert third["programs"] == 1


@pytest.mark.slow
def test_e3_statistics_say_that_a_cache_was_used(processes: list[dict[str, Any]]) -> None:
    """Where no pass ran the statistics speak of the cache, not of 0 matches."""
    first, _, third = processes
    assert (first["seen"], third["seen"]) == (1, 0)
    assert "cache" in third["words"]
    assert "cache" not in first["words"]
    assert "rewrote" not in third["words"]


class Cosines(CustomGraphPass):  # type: ignore[misc] - torch's class is untyped
    """A pass of the user's that takes the cosine where the graph takes the sine."""

    def __call__(self, graph: fx.Graph) -> None:
        """Rewrite the graph."""
        for node in calls(graph, aten.sin.default):
            node.target = aten.cos.default

    def uuid(self) -> Any:
        """Return what the pass depends on."""
        return "cosines"


def compiled(function: Callable[..., Any], patterns: Any, seen: list[str], **options: Any) -> Callable[..., Any]:
    """Compile with a pattern set; what each graph calls after all joint passes is added to ``seen``."""
    record: Callable[[fx.Graph], None] = lambda graph: seen.extend(targets(graph))  # noqa: E731 - a pass is a function of the graph
    dynamic = options.pop("dynamic", None)
    chosen = kt.options(patterns, post_grad_custom_pre_pass=record, **options)
    return torch.compile(function, options=chosen, dynamic=dynamic)


@pytest.mark.usefixtures("fresh_compiler")
@pytest.mark.parametrize("how", ["configured before", "given", "configured, and kwtrace installed"])
def test_e2_a_pass_configured_already_runs_as_well(how: str) -> None:
    """The user's pass and kwtrace's both rewrite, the user's first, whichever way each was configured."""
    patterns, seen = toys.patterns(toys.scaled_rule), []  # type: tuple[kt.PatternSet, list[str]]
    x = torch.randn(3, 4)
    with torch.no_grad():
        if how == "given":
            found = compiled(lambda x: torch.exp(x.sin()) * 0.125, patterns, seen, **{KEY: Cosines()})(x)
        elif how == "configured before":
            with config.patch({KEY: Cosines()}):
                found = compiled(lambda x: torch.exp(x.sin()) * 0.125, patterns, seen)(x)
        else:
            with config.patch({KEY: Cosines()}), kt.installed(patterns):
                found = compiled(lambda x: torch.exp(x.sin()) * 0.125, kt.PatternSet(), seen)(x)
    expected, exact = (torch.exp(y.cos()) * 0.125 for y in (x, x.double()))
    assert_as_exact(found, expected, exact)
    assert seen == ["aten.cos.default", SCALED]


def halves(x: Tensor) -> Tensor:
    """Slice and view by sizes."""
    rows, columns = x.shape
    return torch.exp(x[:, : columns // 2].reshape(columns // 2, rows)) * 0.125


def averages(x: Tensor) -> Tensor:
    """Scale by a size."""
    return torch.exp(x) * (1 / x.shape[0])


def attend(x: Tensor, mask: Tensor) -> Tensor:
    """Return attention with two heads, its sizes, mask and scale taken from the input."""
    batch, length, width = x.shape
    q = x.view(batch, length, 2, width // 2).transpose(1, 2)
    scores = torch.matmul(q, q.transpose(-2, -1)) * (width // 2) ** -0.5
    weights = torch.softmax(scores + mask[:, :, :length, :length], dim=-1)
    return torch.matmul(weights, q).transpose(1, 2).reshape(batch, length, width)


@pytest.mark.usefixtures("fresh_compiler")
@pytest.mark.parametrize("how", ["dynamic=True", "mark_dynamic"])
def test_e4_sizes_from_symbols_match_and_serve_other_sizes(how: str) -> None:
    """A slice and a view made of dynamic sizes are fused, and right for other sizes without a recompile."""
    seen: list[str] = []
    counters.clear()
    run = compiled(halves, toys.patterns(toys.scaled_rule), seen, dynamic=how == "dynamic=True" or None)
    for shape in ((6, 22), (7, 34), (12, 46)):
        x = torch.randn(*shape)
        if how == "mark_dynamic":
            torch._dynamo.mark_dynamic(x, 0)
            torch._dynamo.mark_dynamic(x, 1)
        assert torch.equal(run(x), halves(x))
    assert seen.count(SCALED) == 1
    assert "aten.exp.default" not in seen
    assert counters["stats"]["unique_graphs"] == 1


@pytest.mark.usefixtures("fresh_compiler")
def test_e4_a_scale_from_symbols_breaks_no_compile() -> None:
    """A number made of a size may not suit an operator that takes a float: fused or not, the compile goes on, right."""
    run = compiled(averages, toys.patterns(toys.scaled_rule), [], dynamic=True)
    for rows in (6, 7, 12):
        x = torch.randn(rows, 5)
        assert_as_exact(run(x), averages(x), averages(x.double()))


@pytest.mark.usefixtures("fresh_compiler")
@pytest.mark.slow
@pytest.mark.parametrize("how", ["dynamic=True", "mark_dynamic"])
def test_e4_attention_with_dynamic_sizes(how: str) -> None:
    """The shipped attention is found where view, mask and scale are made of dynamic sizes, and right for others."""
    seen: list[str] = []
    counters.clear()
    options = {"pattern_matcher": False, "dynamic": how == "dynamic=True" or None}
    run = compiled(attend, patterns_gen, seen, **options)
    mask = torch.randn(1, 1, 32, 32)
    with torch.no_grad():
        for batch, length in ((2, 5), (3, 9), (4, 17)):
            x = torch.randn(batch, length, 12)
            if how == "mark_dynamic":
                torch._dynamo.mark_dynamic(x, 0)
                torch._dynamo.mark_dynamic(x, 1)
            assert_as_exact(run(x, mask), attend(x, mask), attend(x.double(), mask.double()))
    assert seen.count(SDPA) == 1
    assert counters["stats"]["unique_graphs"] == 1


def test_e5_ops_without_output_are_listed() -> None:
    """A search function that calls an operator for its effect alone is refused, with the operator's name."""

    def search(x: Annotated[Tensor, kt.Shape("n>1"), F32]) -> Tensor:
        ops.observe(x)
        return torch.relu(x)

    rule = kt.rule(name="observing", devices=("cpu",))(search)
    rule.replacement(lambda x: ops.scaled(x, scale=1.0))
    with pytest.raises(kt.KwtraceError, match=r"observing.*kwtrace_toys\.observe"):
        kt.trace(rule)


@pytest.mark.usefixtures("fresh_compiler")
@pytest.mark.parametrize("order", [(0, 1), (1, 0)], ids=["small first", "large first"])
def test_e6_the_larger_pattern_wins(order: tuple[int, int]) -> None:
    """Where a small pattern is part of a larger one the larger is taken, and the small one where it stands alone."""
    rules = (toys.scaled_rule, toys.scaled_add_rule)
    patterns = toys.patterns(rules[order[0]]) | toys.patterns(rules[order[1]])

    def function(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        return torch.exp(x) * 0.125 + y, torch.exp(y) * 0.25

    seen: list[str] = []
    x, y = torch.randn(3, 4), torch.randn(3, 4)
    with torch.no_grad():
        found = compiled(function, patterns, seen)(x, y)
    torch.testing.assert_close(found, function(x, y), rtol=0, atol=0)
    assert sorted(seen) == [SCALED, SCALED_ADD]


def warnings_in(caplog: pytest.LogCaptureFixture) -> list[str]:
    """Return kwtrace's warnings."""
    return [r.getMessage() for r in caplog.records if r.name == "kwtrace" and r.levelno >= logging.WARNING]


@pytest.mark.parametrize("use", ["apply", "options", "install"])
def test_e7_an_empty_set_is_warned_of_once(use: str, caplog: pytest.LogCaptureFixture) -> None:
    """Patterns that hold no variant can't do anything: one line says so, however often they are used."""
    loading._warn_of_nothing.cache_clear()
    graph = traced(lambda x: torch.exp(x) * 0.125, torch.randn(3, 4))
    empty = toys.patterns(toys.scaled_rule).select("scaled", alpha="no such")
    assert not empty.families
    with caplog.at_level(logging.WARNING, "kwtrace"):
        for _ in range(2):
            if use == "apply":
                assert kt.apply(graph, empty).count == 0
            elif use == "options":
                kt.options(empty)[KEY](graph.graph)
            else:
                with kt.installed(empty):
                    getattr(config, KEY)(graph.graph)
    (line,) = warnings_in(caplog)
    assert "no pattern" in line
    assert "\n" not in line


def test_e7_a_set_with_patterns_is_not_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    """A set that holds patterns says nothing, whether they match or not."""
    graph = traced(lambda x: torch.cos(x) * 0.125, torch.randn(3, 4))
    with caplog.at_level(logging.WARNING, "kwtrace"):
        assert kt.apply(graph, toys.patterns(toys.scaled_rule)).count == 0
    assert warnings_in(caplog) == []


WHERE_NOTHING = """
@kt.rule(devices=("cpu",), where=lambda **axes: False)
def pruned(x: Vector) -> Tensor:
    return ops.act(torch.relu(x), negate=True)


@pruned.replacement
def _(x):
    return ops.relu_act(x, negate=True)
"""

ALL_FAIL = """
@kt.rule(devices=("cpu",))
def broken(x: Vector, *, mode: Annotated[str, kt.OneOf("none", "twice")]) -> Tensor:
    raise ValueError("not today")


@broken.replacement
def _(x, *, mode):
    return ops.relu_act(x, mode=mode)
"""


@pytest.mark.parametrize(("name", "source"), [("pruned", WHERE_NOTHING), ("broken", ALL_FAIL)])
def test_e7_a_rule_without_variants_is_no_success(
    name: str, source: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Generating a rule that ``where=`` leaves no variant, or whose variants all fail, is reported as failed."""
    monkeypatch.syspath_prepend(str(tmp_path))
    rule = getattr(import_module(tmp_path, f"rules_{name}", source), name)
    report = kt.generate([rule], tmp_path / "out", jobs=1)
    assert not report.ok
    assert "rejected" in str(report)
    assert name in str(report)
    with pytest.raises(kt.KwtraceError, match=name):
        kt.trace(rule)


def test_e7_a_set_whose_operators_are_missing_is_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    """Patterns whose operators this process lacks are named in the log, when a graph has what they search for."""
    rule = toys.rival("missing", "low")
    (family,) = kt.trace(rule).families
    lost = repr(family)
    assert "kwtoys.low" in lost
    graph = traced(lambda x: x.tanh().sin(), torch.randn(3, 4))
    patterns = kt.PatternSet((_without_operator(family),))
    with caplog.at_level(logging.WARNING, "kwtrace"):
        for _ in range(2):
            assert kt.apply(graph, patterns).count == 0
    assert any("kwtoys.lost" in line for line in warnings_in(caplog))
    assert targets(graph) == ["aten.tanh.default", "aten.sin.default"]


def _without_operator(family: Any) -> Any:
    from dataclasses import replace  # noqa: PLC0415 - one test needs it

    graph = family.skeleton.replacement
    (call,) = graph.calls
    lost = replace(graph, calls=(replace(call, target="kwtoys.lost.default"),))
    return replace(family, skeleton=replace(family.skeleton, replacement=lost))


class Model(nn.Module):
    """Attention, and what `toys.scaled_rule` searches for."""

    def __init__(self) -> None:
        """Make the weights."""
        super().__init__()
        self.inner = nn.Linear(12, 12)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        """Return attention over the exponential of a linear layer."""
        y = self.inner(x)
        scaled = torch.exp(y.view(-1, 12)) * 0.125
        return attend(scaled.view(y.shape), mask)


def gradients(run: Callable[..., Tensor], model: nn.Module, *inputs: Tensor) -> list[Tensor]:
    """Return the output, and the gradients of all parameters and of the first input."""
    first = inputs[0].clone().requires_grad_()
    found = run(first, *inputs[1:])
    return [found.detach(), *torch.autograd.grad((found**2).sum(), [first, *model.parameters()])]


@pytest.mark.usefixtures("fresh_compiler")
@pytest.mark.slow
def test_e8_training_is_right_and_inference_is_fused() -> None:
    """Compiled for training a model has eager's outputs and gradients; the same model under no_grad is fused."""
    model, seen = Model(), []  # type: tuple[Model, list[str]]
    x, mask = torch.randn(2, 5, 12), torch.randn(1, 1, 8, 8)
    patterns = toys.patterns(toys.scaled_rule) | kt.PatternSet(patterns_gen.PATTERNS.load().families)
    run = compiled(model, patterns, seen, pattern_matcher=False)
    exact = gradients(model.double(), model, x.double(), mask.double())
    expected = gradients(model.float(), model, x, mask)
    assert_as_exact(gradients(run, model, x, mask), expected, exact)
    assert SCALED not in seen
    assert SDPA not in seen
    seen.clear()
    with torch.no_grad():
        assert_as_exact(run(x, mask), expected[0], exact[0])
    assert (seen.count(SCALED), seen.count(SDPA)) == (1, 1)


def noisy(graph: fx.Graph, x: fx.Node) -> fx.Node:
    """Build what `toys.scaled_rule` searches for among operations that change nothing, and dead nodes."""
    cast = graph.call_function(torch.ops.prims.convert_element_type.default, (x, F32))
    expanded = graph.call_function(aten.expand.default, (cast, [3, 4]))
    exponential = graph.call_function(aten.exp.default, (expanded,))
    graph.call_function(aten.tanh.default, (exponential,))
    copied = graph.call_function(aten.clone.default, (exponential,))
    viewed = graph.call_function(aten.view.default, (copied, [3, 4]))
    scaled = graph.call_function(aten.mul.Tensor, (viewed, 0.125))
    graph.call_function(aten.cos.default, (scaled,))
    return graph.call_function(aten.alias.default, (scaled,))


def test_e9_noise_does_not_hide_a_match_and_twice_is_once() -> None:
    """Dead nodes, casts to the same dtype and expands to the same size don't hide a match; a second run finds none."""
    x = torch.randn(3, 4)
    patterns = toys.patterns(toys.scaled_rule)
    module = hand_written(noisy, x)
    expected = torch.exp(x) * 0.125
    assert torch.equal(module(x), expected)
    assert kt.apply(module, patterns).count == 1
    assert len(calls(module, SCALED)) == 1
    assert calls(module, aten.exp.default) == []
    assert torch.equal(run_checked(module, x), expected)
    before = str(module.graph)
    assert kt.apply(module, patterns).count == 0
    assert str(module.graph) == before


@pytest.mark.usefixtures("fresh_compiler")
def test_e9_the_pass_run_twice_in_a_compile_fires_once() -> None:
    """A set in the options and installed as well fires once in a compile."""
    patterns, seen = toys.patterns(toys.scaled_rule), []  # type: tuple[kt.PatternSet, list[str]]
    x = torch.randn(3, 4)
    with torch.no_grad(), kt.installed(patterns):
        found = compiled(lambda x: torch.exp(x.float().expand(3, 4)) * 0.125, patterns, seen)(x)
    assert torch.equal(found, torch.exp(x) * 0.125)
    assert seen == [SCALED]
    assert (kt.stats().count, kt.stats().graphs) == (1, 2)
