"""Options, installing, counting: nothing global changes that wasn't asked for, and everything can be undone."""

from __future__ import annotations

import copy
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from graphs import assert_as_exact, run_checked, targets, traced
from torch import Tensor, fx, nn
from torch._inductor import config
from torch._inductor.custom_graph_pass import CustomGraphPass

import kwtrace as kt
import patterns_gen
from kwtrace import using
from kwtrace.inductor import KEY
from kwtrace.library import ops

ROOT = Path(kt.__file__).parent.parent
FUSED = "kwtrace.mm_act.default"


class Noting(CustomGraphPass):  # type: ignore[misc] - torch's class is untyped
    """A pass of the user's own, that notes that it ran."""

    def __init__(self, name: str, notes: list[str]) -> None:
        """Take a name and where to note it."""
        self.name, self.notes = name, notes

    def __call__(self, graph: fx.Graph) -> None:
        """Note the name, and whether kwtrace has been here."""
        self.notes.append(f"{self.name}{' after kwtrace' if FUSED in targets(graph) else ''}")

    def uuid(self) -> Any:
        """Return the name."""
        return self.name


def function(a: Tensor, b: Tensor) -> Tensor:
    """Return what the tutorial rule searches for."""
    return ops.act(torch.mm(a, b), negate=True)


def run(options: dict[str, Any] | None = None) -> list[str]:
    """Compile and run `function` afresh; return what the graph called after all joint passes."""
    torch._dynamo.reset()
    seen: list[str] = []
    record = lambda graph: seen.extend(targets(graph))  # noqa: E731 - a pass is a function of the graph
    a, b = torch.randn(3, 4), torch.randn(4, 5)
    with torch.no_grad():
        found = torch.compile(function, options={**(options or {}), "post_grad_custom_pre_pass": record})(a, b)
    assert torch.equal(found, function(a, b))
    return seen


@pytest.fixture(autouse=True)
def _nothing_installed() -> Iterator[None]:
    """Start and end each test with no pass configured."""
    assert getattr(config, KEY) is None
    yield
    leftover = using._installed[:]
    using._installed.clear()
    setattr(config, KEY, None)
    assert not leftover


@pytest.mark.usefixtures("fresh_compiler")
def test_options_change_nothing_global() -> None:
    """Making and using options leaves Inductor's configuration, and other compiles, as they were."""
    before = copy.deepcopy(config.get_config_copy())
    options = kt.options(patterns_gen, max_autotune=False)
    assert set(options) == {KEY, "max_autotune"}
    assert run(options) == [FUSED]
    assert run() == ["aten.mm.default", "kwtrace.act.default"]
    after = config.get_config_copy()
    assert {k: v for k, v in after.items() if v != before[k]} == {}


@pytest.mark.usefixtures("fresh_compiler")
def test_options_do_not_change_what_they_are_given() -> None:
    """The further options are copied, and passed on as they are."""
    notes: list[str] = []
    given = {KEY: Noting("own", notes), "epilogue_fusion": False}
    kept = dict(given)
    options = kt.options(patterns_gen, **given)
    assert given == kept
    assert options["epilogue_fusion"] is False
    assert options[KEY] is not given[KEY]


@pytest.mark.usefixtures("fresh_compiler")
@pytest.mark.parametrize("how", ["configured", "passed in", "a function passed in"])
def test_options_chain_with_a_pass_of_the_user_s(how: str) -> None:
    """A pass that is configured already, or passed in, runs first; then kwtrace."""
    notes: list[str] = []
    own: Any = Noting("own", notes)
    if how == "configured":
        with config.patch({KEY: own}):
            assert run(kt.options(patterns_gen)) == [FUSED]
    else:
        passed = own.__call__ if how == "a function passed in" else own
        assert run(kt.options(patterns_gen, **{KEY: passed})) == [FUSED]
    assert notes == ["own"]


@pytest.mark.usefixtures("fresh_compiler")
def test_options_on_options_run_both() -> None:
    """Options made of options hold both sets."""
    one = kt.options(patterns_gen_select(negate=True))
    both = kt.options(patterns_gen_select(negate=False), **one)
    assert run(both) == [FUSED]
    assert kt.stats().graphs == 2


def patterns_gen_select(**axes: Any) -> kt.PatternSet:
    """Return the shipped variants of the tutorial rule with some arguments."""
    from kwtrace.loading import as_pattern_set  # noqa: PLC0415 - the generated package is loaded when it is used

    return as_pattern_set(patterns_gen).select("mm_act", **axes)


@pytest.mark.usefixtures("fresh_compiler")
def test_installed_patterns_fire_in_every_compile_until_uninstalled() -> None:
    """``install`` needs no options; ``uninstall`` undoes it."""
    kt.install(patterns_gen)
    assert run() == [FUSED]
    kt.uninstall(patterns_gen)
    assert run() == ["aten.mm.default", "kwtrace.act.default"]
    assert getattr(config, KEY) is None
    with kt.installed(patterns_gen):
        assert run() == [FUSED]
    assert getattr(config, KEY) is None


@pytest.mark.usefixtures("fresh_compiler")
def test_installing_chains_with_a_pass_that_is_configured() -> None:
    """A configured pass goes on running, first, and is what is configured again afterwards."""
    notes: list[str] = []
    own = Noting("own", notes)
    with config.patch({KEY: own}):
        with kt.installed(patterns_gen):
            assert run() == [FUSED]
        assert getattr(config, KEY) is own
    assert notes == ["own"]


def test_installing_nests_and_is_undone_in_order() -> None:
    """Nested installs are undone one by one, whatever was configured before coming back last."""
    own = Noting("own", [])
    one, other = patterns_gen_select(negate=True), patterns_gen_select(negate=False)
    with config.patch({KEY: own}):
        with kt.installed(one):
            first = getattr(config, KEY)
            with kt.installed(other):
                assert getattr(config, KEY) is not first
            assert getattr(config, KEY) is first
        assert getattr(config, KEY) is own


@pytest.mark.parametrize("order", [(0, 1, 2), (0, 2, 1), (1, 0, 2), (1, 2, 0), (2, 0, 1), (2, 1, 0)], ids=str)
def test_installs_are_undone_in_any_order(order: tuple[int, ...]) -> None:
    """Uninstalling out of order takes out that set and keeps the others, and the user's pass."""
    notes: list[str] = []
    own = Noting("own", notes)
    sets = [
        patterns_gen_select(T=torch.float32, negate=True),
        patterns_gen_select(negate=False),
        patterns_gen_select(T=torch.bfloat16),
    ]
    with config.patch({KEY: own}):
        for each in sets:
            kt.install(each)
        left = {0, 1, 2}
        for place in order:
            kt.uninstall(sets[place])
            left.remove(place)
            notes.clear()
            graph = traced(all_three, torch.randn(3, 3))
            getattr(config, KEY)(graph.graph)
            assert targets(graph).count(FUSED) == len(left), left
            assert notes == ["own"]
        assert getattr(config, KEY) is own


def all_three(x: Tensor) -> list[Tensor]:
    """Return three results, one for each of three sets of patterns."""
    half = x.bfloat16()
    return [
        ops.act(torch.mm(x, x), negate=True),
        ops.act(torch.mm(x.sin(), x), negate=False),
        ops.act(torch.mm(half, half), negate=True),
    ]


def test_a_set_installed_twice_is_uninstalled_twice() -> None:
    """Each ``uninstall`` undoes one ``install`` of the set."""
    kt.install(patterns_gen)
    kt.install(patterns_gen)
    kt.uninstall(patterns_gen)
    assert getattr(config, KEY) is not None
    kt.uninstall(patterns_gen)
    assert getattr(config, KEY) is None
    with pytest.raises(kt.KwtraceError, match="Expected installed patterns"):
        kt.uninstall(patterns_gen)


def test_uninstalling_what_is_not_installed_is_an_error() -> None:
    """It says so, and leaves what is installed."""
    other = patterns_gen_select(negate=True)
    with kt.installed(patterns_gen):
        before = getattr(config, KEY)
        with pytest.raises(kt.KwtraceError, match="Expected installed patterns"):
            kt.uninstall(other)
        assert getattr(config, KEY) is before


def test_several_configured_passes_come_back_as_they_were() -> None:
    """Where the configuration holds a list of passes, all of them run, and the list comes back."""
    notes: list[str] = []
    own = [Noting("first", notes), Noting("second", notes)]
    setattr(config, KEY, own)
    with kt.installed(patterns_gen):
        graph = traced(function, torch.randn(3, 4), torch.randn(4, 5))
        getattr(config, KEY)(graph.graph)
    restored = getattr(config, KEY)
    setattr(config, KEY, None)
    assert notes == ["first", "second"]
    assert restored == own


def test_a_pass_configured_over_an_install_is_not_lost() -> None:
    """Where someone replaced kwtrace's pass since, uninstalling is an error or leaves theirs; it never removes it."""
    other = Noting("other", [])
    kt.install(patterns_gen)
    setattr(config, KEY, other)
    with pytest.raises(kt.KwtraceError, match="pass"):
        kt.uninstall(patterns_gen)
    assert getattr(config, KEY) is other
    setattr(config, KEY, None)
    using._installed.clear()


def test_an_error_inside_a_with_block_uninstalls() -> None:
    """``installed`` undoes itself when the block raises."""
    with pytest.raises(ZeroDivisionError), kt.installed(patterns_gen):
        _ = 1 / 0
    assert getattr(config, KEY) is None


@pytest.mark.usefixtures("fresh_compiler")
def test_stats_count_since_the_last_reset() -> None:
    """Counts are per rule and variant over the process; resetting returns them one last time."""
    assert str(kt.stats()) == "kwtrace has seen no graph: nothing was compiled, or the compiled code came from a cache."
    options = kt.options(patterns_gen)
    run(options)
    run(options)
    report = kt.stats(reset=True)
    (variant,) = patterns_gen_select(
        T=torch.float32, negate=True, approximate="none", out_dtype=None, device="cpu"
    ).variants
    assert report.graphs == 2
    assert report.count == 2
    assert report.fired == {"mm_act": {str(variant): 2}}
    assert kt.stats().count == kt.stats().graphs == 0
    assert report.count == 2


@pytest.mark.usefixtures("fresh_compiler")
def test_apply_counts_for_itself_alone() -> None:
    """A report of ``apply`` is of that graph; the process's counts are those of compiles."""
    graph = traced(function, torch.randn(3, 4), torch.randn(4, 5))
    assert kt.apply(graph, patterns_gen).count == 1
    assert kt.stats().count == 0


def test_apply_recompiles_the_module() -> None:
    """The module runs what its graph says at once."""
    a, b = torch.randn(3, 4), torch.randn(4, 5)
    graph = traced(function, a, b)
    kt.apply(graph, patterns_gen)
    assert "mm_act" in graph.code
    assert torch.equal(graph(a, b), function(a, b))


def test_apply_works_on_an_exported_program() -> None:
    """The graph of ``torch.export``, with symbolic sizes, is rewritten like any other."""

    class Model(nn.Module):
        def forward(self, a: Tensor, b: Tensor) -> Tensor:
            return function(a, b)

    a, b = torch.randn(3, 4), torch.randn(4, 5)
    rows = torch.export.Dim("rows", min=2)
    exported = torch.export.export(Model(), (a, b), dynamic_shapes={"a": {0: rows}, "b": None})
    module = exported.graph_module
    assert kt.apply(module, patterns_gen).count == 1
    assert targets(module) == [FUSED]
    other = torch.randn(6, 4)
    assert torch.equal(exported.module()(other, b), function(other, b))


@pytest.mark.parametrize("content", [42, None, "patterns", torch], ids=["int", "None", "str", "a module"])
def test_something_else_than_patterns_is_an_error(content: Any) -> None:
    """Outside a compile, a wrong argument is an error that says what was expected and found."""
    graph = traced(function, torch.randn(3, 4), torch.randn(4, 5))
    with pytest.raises(kt.LoadError, match="Expected a PatternSet or a package"):
        kt.apply(graph, content)


@pytest.mark.usefixtures("fresh_compiler")
@pytest.mark.slow
def test_training_is_left_alone_and_right() -> None:
    """Patterns are traced for inference: a graph with a backward pass yields the gradients that eager yields."""

    def loss(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return (torch.matmul(torch.softmax(torch.matmul(q, k.transpose(-2, -1)) * 0.3, -1), v) ** 2).sum()

    def gradients(run: Any, dtype: torch.dtype = torch.float32) -> list[Tensor]:
        torch.manual_seed(0)
        inputs = [torch.randn(2, 2, 5, 4).to(dtype).requires_grad_() for _ in range(3)]
        result = run(*inputs)
        return [result.detach(), *torch.autograd.grad(result, inputs)]

    compiled = torch.compile(loss, options=kt.options(patterns_gen, pattern_matcher=False))
    assert_as_exact(gradients(compiled), gradients(loss), gradients(loss, torch.float64))


def test_importing_is_cheap_and_changes_nothing() -> None:
    """Importing kwtrace and a generated package imports neither Inductor nor the tracer, and logs nothing."""
    script = (
        "import sys, torch; before = set(sys.modules)\n"
        "import kwtrace, patterns_gen\n"
        "new = set(sys.modules) - before\n"
        "unwanted = ('torch._inductor', 'kwtrace.tracing', 'kwtrace.matching')\n"
        "print(sorted(m for m in new if m.startswith(unwanted)))"
    )
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", script], capture_output=True, text=True, check=False, cwd=ROOT
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "[]"
    assert done.stderr == ""


def test_rewriting_twice_through_a_chain_fires_once() -> None:
    """A set that is both installed and in the options rewrites once: the second finds nothing."""
    with kt.installed(patterns_gen):
        options = kt.options(patterns_gen)
        graph = traced(function, torch.randn(3, 4), torch.randn(4, 5))
        kt.stats(reset=True)
        options[KEY](graph.graph)
    assert kt.stats(reset=True).count == 1
    a, b = torch.randn(3, 4), torch.randn(4, 5)
    assert torch.equal(run_checked(graph, a, b), function(a, b))
