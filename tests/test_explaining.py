"""Explaining in words, from a terminal, and in a compile; what it says of single rules is case e10."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
import torch
from graphs import traced
from modules_for_tests import run_python
from torch import Tensor
from toys import scaled_add_rule, scaled_rule

import kwtrace as kt
from kwtrace.explanations import Explanation, Miss, RuleExplanation, location_of
from kwtrace.inductor import KwtracePass
from kwtrace.patterns import Variant
from kwtrace.reports import Recorder

VARIANT = Variant("attend", (("softmax_dtype", torch.float32),))
MODEL = '''"""A model whose attention looks at the wrong dim."""

import torch


def attend(q, k, v):
    weights = torch.softmax(q @ k.transpose(-2, -1) * 0.3, -2)
    return weights @ v


def example_inputs():
    return [torch.randn(2, 3, 5, 8) for _ in range(3)]


two = (torch.randn(2, 3, 4, 8), torch.randn(2, 3, 5, 8), torch.randn(2, 3, 5, 8))
'''


def test_a_miss_reads_as_one_would_say_it() -> None:
    """Variant, how many operators match, what differs and where, which law, and what matches instead."""
    miss = Miss(
        VARIANT,
        9,
        10,
        "softmax_dtype: expected torch.float32, found None",
        1,
        "_softmax_3",
        "model.py:41",
        ("other[]",),
    )
    assert str(miss).splitlines() == [
        "nearest is attend[softmax_dtype=torch.float32]: 9 of 10 operators match",
        "  softmax_dtype: expected torch.float32, found None, at node `_softmax_3`, model.py:41",
        "  refused by law 1: every argument counts",
        "  other[] matches there",
    ]


def test_a_miss_without_law_or_node_reads_well() -> None:
    """Where the graph has something else, no law is to blame."""
    assert str(Miss(VARIANT, 0, 2, "operators: expected a, found none")).splitlines()[1:] == [
        "  operators: expected a, found none",
        "  refused by no law: the graph is another one there",
        "  no other variant matches there",
    ]


def test_an_explanation_reads_rule_by_rule() -> None:
    """Matches first, then the miss; a problem, and an empty set, are said too."""
    rule = RuleExplanation("attend", ("attend[a=1]",), Miss(VARIANT, 1, 2, "x: expected 1, found 2", 1))
    lines = str(Explanation({"attend": rule})).splitlines()
    assert lines[:3] == [
        "attend: 1 match(es)",
        "  attend[a=1]",
        "  nearest is attend[softmax_dtype=torch.float32]: 1 of 2 operators match",
    ]
    assert "can't explain this: no" in str(Explanation(problem="no"))
    assert str(Explanation()) == "kwtrace has no rules to explain."


def test_the_location_is_the_innermost_line_of_the_users_code() -> None:
    """A stack trace ends in the line that made the node; without one there is no location."""
    graph = traced(torch.tanh, torch.ones(2))
    (node,) = (n for n in graph.graph.nodes if n.op == "call_function")
    node.meta["stack_trace"] = (
        'File "/a/train.py", line 3, in main\n  f(x)\nFile "/a/model.py", line 41, in f\n  tanh(x)'
    )
    assert location_of(node) == "/a/model.py:41"
    node.meta["stack_trace"] = f'File "{Path.cwd() / "model.py"}", line 7, in f\n  tanh(x)'
    assert location_of(node) == "model.py:7"
    del node.meta["stack_trace"]
    assert location_of(node) is None


@pytest.mark.parametrize("mode", ["real", "symbolic"])
def test_what_matches_is_said_to_match(mode: str) -> None:
    """Static and symbolic graphs, in which sizes are read off inner nodes, are explained as they are rewritten."""
    patterns = kt.trace(scaled_rule) | kt.trace(scaled_add_rule)

    def function(x: Tensor) -> Tensor:
        return torch.exp(x) * 0.3

    graph = traced(function, torch.randn(3, 4), mode=mode)  # type: ignore[arg-type]
    explained = kt.explain(graph, patterns)
    assert explained.rules["scaled"].matches == ("scaled[device='cpu']",)
    assert explained.rules["scaled"].miss is None
    assert explained.rules["scaled_add"].miss is not None
    assert kt.apply(graph, patterns).fired == {"scaled": {"scaled[device='cpu']": 1}}


@pytest.mark.slow
@pytest.mark.usefixtures("fresh_compiler")
def test_a_pass_that_matched_nothing_points_to_explaining(
    shipped: kt.PatternSet, caplog: pytest.LogCaptureFixture
) -> None:
    """All operators of attention are in the graph, but the dim is wrong: one line names the rule and what to call."""

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return torch.softmax(q @ k.transpose(-2, -1) * 0.3, -2) @ v

    inputs = [torch.randn(2, 3, 5, 8) for _ in range(3)]
    with caplog.at_level(logging.WARNING, "kwtrace"), torch.no_grad():
        torch.compile(attend, options=kt.options(shipped))(*inputs)
    lines = [record.getMessage() for record in caplog.records if "kwtrace.explain" in record.getMessage()]
    assert len(lines) == 1
    assert lines[0].startswith("attention")


@pytest.mark.parametrize(("setting", "lines"), [("", 1), ("1", 0)])
def test_a_pass_that_is_switched_off_points_nowhere(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, setting: str, lines: int
) -> None:
    """Whoever sets ``KWTRACE_DISABLE`` knows why nothing matches."""
    monkeypatch.setenv("KWTRACE_DISABLE", setting)
    graph = traced(lambda x: torch.exp(x) * 0.3, torch.randn(1, 4)).graph
    with caplog.at_level(logging.WARNING, "kwtrace"):
        KwtracePass(kt.trace(scaled_rule), (), Recorder())(graph)
    assert len(caplog.records) == lines


@pytest.mark.slow
@pytest.mark.usefixtures("fresh_compiler")
def test_a_pass_is_silent_where_operators_are_missing(shipped: kt.PatternSet, caplog: pytest.LogCaptureFixture) -> None:
    """A graph that has nothing to do with any rule leaves no line."""
    with caplog.at_level(logging.WARNING, "kwtrace"), torch.no_grad():
        torch.compile(lambda x: torch.tanh(x) + 1, options=kt.options(shipped))(torch.ones(4, 4))
    assert not caplog.records


@pytest.mark.slow
def test_the_command_line_explains_a_function(tmp_path: Path) -> None:
    """The nearest variant, the dim that differs, and the line of the file; the exit code is 0."""
    (tmp_path / "model_to_explain.py").write_text(MODEL, encoding="utf-8")
    found = run_python(
        "-m", "kwtrace.explain", str(tmp_path / "model_to_explain.py:attend"), "patterns_gen", folder=tmp_path
    )
    assert found.returncode == 0, found.stderr
    assert "graph 0" in found.stdout
    assert "attention: 0 match(es)" in found.stdout
    assert "dim: expected 3, found 2, at node" in found.stdout
    assert "model_to_explain.py:7" in found.stdout
    assert "refused by law 1: every argument counts" in found.stdout


@pytest.mark.slow
def test_the_command_line_traces_rules_and_takes_other_inputs(tmp_path: Path) -> None:
    """RULES may be a module that declares rules; inputs may have another name; sizes may be symbolic."""
    (tmp_path / "model_to_explain.py").write_text(MODEL, encoding="utf-8")
    place = str(tmp_path / "model_to_explain.py:attend")
    arguments = ("-m", "kwtrace.explain", place, "rules_for_tests", "--inputs", "two", "--dynamic")
    found = run_python(*arguments, folder=tmp_path)
    assert found.returncode == 0, found.stderr
    assert "relu_act: 0 match(es)" in found.stdout
    assert "relu_scale: 0 match(es)" in found.stdout


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("model_to_explain.py:nothing", "patterns_gen"), "to define nothing"),
        (("model_to_explain.py:attend", "patterns_gen", "--inputs", "none"), "to define none"),
        (("absent.py:attend", "patterns_gen"), "Expected a Python file"),
        (("attend", "patterns_gen"), "Expected FILE.py:function"),
        (("model_to_explain.py:attend", "no_such_module"), "no_such_module"),
        (("model_to_explain.py:attend", "json"), "found neither in json"),
        (("broken.py:attend", "patterns_gen"), "to import"),
    ],
)
def test_the_command_line_says_what_is_missing(tmp_path: Path, arguments: tuple[str, ...], words: str) -> None:
    """Exit code 2 and one line for a file, function, inputs or rules that aren't there."""
    (tmp_path / "model_to_explain.py").write_text(MODEL, encoding="utf-8")
    (tmp_path / "broken.py").write_text("1 / 0", encoding="utf-8")
    found = run_python("-m", "kwtrace.explain", *arguments, folder=tmp_path)
    assert found.returncode == 2
    assert words in found.stderr
    assert "Traceback" not in found.stderr


def test_the_command_is_no_module_to_import() -> None:
    """Importing ``kwtrace.explain`` would put a module where the function is, so it says so and changes nothing."""
    with pytest.raises(ImportError, match="is a function"):
        __import__("kwtrace.explain")
    assert callable(kt.explain)
