"""A whole pattern set at work on one graph: who wins, what is switched off, when tracing happens."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
from graphs import assert_as_exact, calls, run_checked, targets, traced
from torch import Tensor, fx
from toys import bounded_rule, flattened_rule, patterns, scaled_add_rule, scaled_rule, topk_rule, traces_at_match

import kwtrace as kt
from kwtrace import tracing_at_match
from kwtrace.engine import Engine, is_disabled
from kwtrace.library import ops
from kwtrace.patterns import Variant

aten = torch.ops.aten


def larger(x: Tensor, y: Tensor) -> Tensor:
    """Return what the larger rule searches for."""
    return torch.exp(x) * 0.5 + y


def test_a_chain_of_overlapping_matches_is_rewritten_without_overlap() -> None:
    """A node belongs to one match only: of matches that share one, the others are looked for again afterwards."""

    def function(x: Tensor, y: Tensor) -> Tensor:
        for _ in range(3):
            x = torch.exp(x * 0.01) * 0.1 + y
        return x

    x, y = torch.randn(3, 4), torch.randn(3, 4)
    graph = traced(function, x, y)
    report = kt.apply(graph, patterns(scaled_rule) | patterns(scaled_add_rule))
    assert report.count == 3
    assert len(calls(graph, "kwtoys.scaled_exp_add.default")) == 3
    assert torch.equal(run_checked(graph, x, y), function(x, y))


def test_find_changes_nothing() -> None:
    """Looking for matches leaves the graph as it is."""
    graph = traced(larger, torch.randn(3, 4), torch.randn(3, 4))
    before = str(graph.graph)
    (match,) = Engine(patterns(scaled_add_rule)).find(graph.graph)
    assert match.rule == "scaled_add"
    assert match.kwargs["alpha"] == 0.5
    assert set(match.inputs) == set(match.tensors) == {"x", "y"}
    assert match.dims == {"m": 3, "n": 4}
    assert str(graph.graph) == before


def test_a_family_whose_operators_the_graph_lacks_costs_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """No matcher is made for a family that can't match."""
    from kwtrace import engine  # noqa: PLC0415 - to see that it isn't used

    monkeypatch.setattr(engine, "Matcher", None)
    graph = traced(lambda x: x.sin(), torch.randn(3, 4))
    assert Engine(patterns(scaled_rule)).run(graph.graph) == []


def test_an_empty_set_and_an_empty_graph() -> None:
    """Nothing to do is done without fuss."""
    graph = traced(lambda x: x.sin(), torch.randn(3, 4))
    assert kt.apply(graph, kt.PatternSet()).count == 0
    empty = fx.GraphModule({}, fx.Graph())
    assert kt.apply(empty, patterns(scaled_rule)).count == 0


MM_ACT = Variant(
    "mm_act",
    (("T", torch.bfloat16), ("negate", True), ("approximate", "tanh"), ("out_dtype", None), ("device", "cpu")),
)


@pytest.mark.parametrize(
    ("setting", "disabled"),
    [
        ("", False),
        ("0", False),
        ("1", True),
        ("mm_act", True),
        ("other", False),
        ("mm", False),
        ("other,mm_act", True),
        ("other, mm_act", True),
        ("mm_act[negate=True]", True),
        ("mm_act[negate=False]", False),
        ("mm_act[approximate=tanh]", True),
        ("mm_act[approximate='tanh']", True),
        ("mm_act[T=bfloat16]", True),
        ("mm_act[T=torch.bfloat16]", True),
        ("mm_act[T=float32]", False),
        ("mm_act[out_dtype=None]", True),
        ("mm_act[negate=True,approximate=tanh]", True),
        ("mm_act[negate=True, approximate=none]", False),
        ("mm_act[negate=False],mm_act[device=cpu]", True),
        ("mm_act[unknown=1]", False),
        ("other[negate=True],mm_act[negate=False]", False),
    ],
)
def test_what_kwtrace_disable_switches_off(setting: str, disabled: bool) -> None:
    """``1`` is everything, ``rule`` a rule, ``rule[axis=value, ...]`` the variants with those values."""
    assert is_disabled(MM_ACT, setting) is disabled


@pytest.mark.parametrize(
    ("setting", "count"),
    [("1", 0), ("mm_act", 0), ("mm_act[negate=True]", 1), ("mm_act[negate=False]", 1), ("mm_act[T=float32]", 0)],
)
def test_disabling_takes_effect_on_the_next_graph(
    shipped: kt.PatternSet, monkeypatch: pytest.MonkeyPatch, setting: str, count: int
) -> None:
    """The environment variable is read when a graph is rewritten, not when kwtrace is imported."""

    def function(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
        return ops.act(torch.mm(a, b), negate=True), ops.act(torch.mm(b, a), negate=False)

    a, b = torch.randn(3, 4), torch.randn(4, 3)
    monkeypatch.setenv("KWTRACE_DISABLE", setting)
    graph = traced(function, a, b)
    assert kt.apply(graph, shipped).count == count
    monkeypatch.delenv("KWTRACE_DISABLE")
    assert kt.apply(graph, shipped).count == 2 - count


def test_a_larger_pattern_that_is_switched_off_leaves_its_place_to_the_smaller(monkeypatch: pytest.MonkeyPatch) -> None:
    """A disabled rule doesn't hold nodes that another could rewrite."""
    monkeypatch.setenv("KWTRACE_DISABLE", "scaled_add")
    graph = traced(larger, torch.randn(3, 4), torch.randn(3, 4))
    kt.apply(graph, patterns(scaled_rule) | patterns(scaled_add_rule))
    assert targets(graph) == ["kwtoys.scaled_exp.default", "aten.add.Tensor"]


def test_a_larger_pattern_that_cannot_be_written_leaves_its_place_to_the_smaller(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A match whose replacement fails doesn't keep the others from firing."""
    from kwtrace import rewriting  # noqa: PLC0415 - to break it

    real = rewriting.run

    def run(node: fx.Node, mode: Any) -> Any:
        if "scaled_exp_add" in str(node.target):
            msg = "not this one"
            raise ValueError(msg)
        return real(node, mode)

    monkeypatch.setattr(rewriting, "run", run)
    x, y = torch.randn(3, 4), torch.randn(3, 4)
    graph = traced(larger, x, y)
    kt.apply(graph, patterns(scaled_rule) | patterns(scaled_add_rule))
    assert targets(graph) == ["kwtoys.scaled_exp.default", "aten.add.Tensor"]


def test_a_missing_operator_switches_its_family_off_with_one_line(caplog: pytest.LogCaptureFixture) -> None:
    """A family whose operator isn't registered is off, says so once, and the rest work."""
    from dataclasses import replace  # noqa: PLC0415 - this test alone needs it

    from kwtrace.patterns import Call, Graph, In, Ref  # noqa: PLC0415 - as above

    (family,) = patterns(scaled_add_rule).families
    missing = Graph((Call("gone", "kwtoys.gone.default", (In("x"), In("y"))),), (Ref("gone"),))
    broken = kt.PatternSet((replace(family, skeleton=replace(family.skeleton, replacement=missing)),))
    engine = Engine(broken | patterns(scaled_rule))
    with caplog.at_level(logging.WARNING, "kwtrace"):
        for _ in range(2):
            graph = traced(larger, torch.randn(3, 4), torch.randn(3, 4))
            assert [variant.rule for variant in engine.run(graph.graph)] == ["scaled"]
    (record,) = caplog.records
    assert "kwtoys.gone.default" in record.getMessage()
    assert "scaled_add" in record.getMessage()


@pytest.fixture
def _untraced(monkeypatch: pytest.MonkeyPatch) -> None:
    """Forget what was traced at matches before."""
    monkeypatch.setattr(tracing_at_match, "_traced", {})
    traces_at_match.clear()


@pytest.mark.usefixtures("_untraced")
def test_equal_layers_trace_a_replacement_once() -> None:
    """At the match a replacement is traced once per distinct input metadata, over all layers and graphs."""

    def function(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        for _ in range(4):
            x, y = torch.tanh(x) * 0.5, torch.tanh(y) * 0.5
        return x, y

    x, y = torch.randn(3, 4), torch.randn(5, 6)
    graph = traced(function, x, y, mode="fake")
    assert kt.apply(graph, patterns(bounded_rule)).count == 8
    assert traces_at_match == [(3, 4), (5, 6)]
    assert len(calls(graph, "kwtoys.low.default")) == 8
    assert_as_exact(run_checked(graph, x, y), function(x, y), function(x.double(), y.double()))
    again = traced(function, y, x, mode="fake")
    assert kt.apply(again, patterns(bounded_rule)).count == 8
    assert len(traces_at_match) == 2


@pytest.mark.usefixtures("_untraced")
@pytest.mark.parametrize("mode", ["fake", "symbolic"])
def test_other_metadata_traces_again(mode: Any) -> None:
    """Another size, stride or captured value is another trace."""

    def function(x: Tensor, y: Tensor) -> list[Tensor]:
        return [torch.tanh(x) * 0.5, torch.tanh(x.t()) * 0.5, torch.tanh(y) * 0.5, torch.tanh(y) * 0.25]

    x, y = torch.randn(4, 6), torch.randn(5, 7)
    graph = traced(function, x, y, mode=mode)
    assert kt.apply(graph, patterns(bounded_rule)).count == 4
    assert len(traces_at_match) == 4
    assert_as_exact(run_checked(graph, x, y), function(x, y), function(x.double(), y.double()))


@pytest.mark.usefixtures("_untraced")
def test_a_replacement_traced_at_the_match_stays_dynamic() -> None:
    """In a graph with symbolic sizes the traced replacement has them too, and layers of the same symbols share it."""

    def function(x: Tensor) -> Tensor:
        for _ in range(3):
            x = torch.tanh(x) * 0.5
        return x

    graph = traced(function, torch.randn(4, 6), mode="symbolic")
    assert kt.apply(graph, patterns(bounded_rule)).count == 3
    assert len(traces_at_match) == 1
    other = torch.randn(7, 3)
    assert_as_exact(graph(other), function(other), function(other.double()))


@pytest.mark.parametrize("mode", ["real", "fake", "symbolic"])
def test_nothing_traces(shipped: kt.PatternSet, monkeypatch: pytest.MonkeyPatch, mode: Any) -> None:
    """Matching and rewriting with patterns that were traced ahead of time never traces."""
    x, y = torch.randn(4, 6), torch.randn(6, 5)
    whole = patterns(scaled_rule) | patterns(scaled_add_rule) | patterns(topk_rule) | patterns(flattened_rule) | shipped

    def function(x: Tensor, y: Tensor) -> list[Tensor]:
        product = ops.act(torch.mm(x, y), negate=True)
        values, places = torch.topk(x.sin(), 2)
        return [product, larger(product, product), torch.exp(x.cos()) - 1, -values, places + 1]

    graph = traced(function, x, y, mode=mode)
    forbid_tracing(monkeypatch)
    engine = Engine(whole)
    assert sorted(variant.rule for variant in engine.run(graph.graph)) == ["flattened", "mm_act", "scaled_add", "topk"]
    monkeypatch.undo()
    for one, other in zip(run_checked(graph, x, y), function(x, y), strict=True):
        assert torch.equal(one, other)


def forbid_tracing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make every way to trace raise."""
    from torch.fx.experimental import proxy_tensor  # noqa: PLC0415 - to break it

    from kwtrace import tracing  # noqa: PLC0415 - as above

    def forbidden(*args: Any, **kwargs: Any) -> Any:
        msg = "this must not trace"
        raise AssertionError(msg)

    for module, name in ((proxy_tensor, "make_fx"), (tracing, "make_fx"), (tracing_at_match, "make_graph")):
        monkeypatch.setattr(module, name, forbidden)
    monkeypatch.setattr(torch.fx.Tracer, "trace", forbidden)
    monkeypatch.setattr(torch.fx, "symbolic_trace", forbidden)


def test_loading_the_shipped_package_traces_nothing(tmp_path: Any) -> None:
    """A fresh process in which ``make_fx`` raises from the start can import, load, match and rewrite."""
    import subprocess  # noqa: PLC0415 - this test alone starts a process
    import sys  # noqa: PLC0415 - as above
    from pathlib import Path  # noqa: PLC0415 - as above

    script = tmp_path / "load.py"
    script.write_text(
        "import torch\n"
        "from torch import fx\n"
        "from torch.fx.experimental import proxy_tensor\n"
        "from torch._subclasses.fake_tensor import FakeTensorMode\n"
        "def forbidden(*args, **kwargs): raise AssertionError('this must not trace')\n"
        "proxy_tensor.make_fx = proxy_tensor._MakefxTracer.trace = fx.Tracer.trace = forbidden\n"
        "import kwtrace as kt, patterns_gen\n"
        "from kwtrace.library import ops\n"
        "graph = fx.Graph()\n"
        "a, b = graph.placeholder('a'), graph.placeholder('b')\n"
        "mm = graph.call_function(torch.ops.aten.mm.default, (a, b))\n"
        "act = graph.call_function(torch.ops.kwtrace.act.default, (mm,), {'negate': True})\n"
        "graph.output(act)\n"
        "with FakeTensorMode():\n"
        "    a.meta['val'], b.meta['val'] = torch.empty(3, 4), torch.empty(4, 5)\n"
        "    mm.meta['val'] = act.meta['val'] = torch.empty(3, 5)\n"
        "module = fx.GraphModule({}, graph)\n"
        "print(kt.apply(module, patterns_gen).count, [str(n.target) for n in graph.nodes if n.op == 'call_function'])\n"
    )
    root = Path(kt.__file__).parent.parent
    done = subprocess.run(
        [sys.executable, script],
        capture_output=True,
        text=True,
        check=False,
        cwd=root,
        env={**__import__("os").environ, "PYTHONPATH": str(root)},
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "1 ['kwtrace.mm_act.default']"
