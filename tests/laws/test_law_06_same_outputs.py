"""Law 6: the outputs of a rewrite are those of what it replaces, and the graph says so truly."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
from both_sides import assert_same, count, refused
from graphs import calls, only, run_checked, targets, traced
from rules_for_laws import BF16, Matrix
from torch import Tensor
from toys import bounds_rule, patterns, scaled_add_rule, scaled_rule, strided_rule

import kwtrace as kt

aten = torch.ops.aten
MODES = ["real", "fake", "symbolic"]
ORDERS = list(itertools.permutations(range(2)))


def test_a_wrong_dtype_in_the_metadata_of_an_output_is_a_refusal() -> None:
    """The output of a match must be what the variant yields."""
    x = torch.randn(3, 4)
    module = traced(lambda x: torch.exp(x) * 0.5, x)
    node = only(module, aten.mul.Tensor)
    node.meta["val"] = node.meta["val"].to(torch.float64)
    assert count(module, scaled_rule) == 0


@pytest.mark.parametrize("mode", MODES)
def test_new_nodes_say_what_they_yield(mode: Any) -> None:
    """Dtype, size, device and strides in the metadata of every node are those of running the graph."""
    x, y = torch.randn(3, 4), torch.randn(3, 4)
    module = traced(lambda x, y: (torch.exp(x) * 0.5 + y).sin(), x, y, mode=mode)
    assert count(module, scaled_add_rule) == 1
    assert targets(module) == ["kwtoys.scaled_exp_add.default", "aten.sin.default"]
    assert torch.equal(run_checked(module, x, y), (torch.exp(x) * 0.5 + y).sin())


@pytest.mark.parametrize("mode", MODES)
def test_stack_trace_and_recompute_tags_survive(mode: Any) -> None:
    """New nodes carry the replaced output's metadata, other than what describes its value."""
    module = traced(lambda x: torch.exp(x) * 0.5, torch.randn(3, 4), mode=mode)
    node = only(module, aten.mul.Tensor)
    kept = {"stack_trace": "File model.py, line 1", "recompute": "must_save", "ac_graph_id": 7, "custom": {"a": 1}}
    node.meta.update(kept)
    node.meta["tensor_meta"] = "of the old node"
    assert count(module, scaled_rule) == 1
    found = only(module, "kwtoys.scaled_exp.default").meta
    assert {key: found.get(key) for key in kept} == kept
    assert found.get("tensor_meta") != "of the old node"


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("order", ORDERS, ids=str)
def test_two_outputs_computed_in_any_order(order: tuple[int, ...], mode: Any) -> None:
    """A rule with two outputs matches whichever the graph computes first; each is used where it was."""

    def function(x: Tensor) -> list[Tensor]:
        results = {}
        for place in order:
            results[place] = x.amax(-1) if place == 0 else x.amin(-1)
        return [results[0].sin(), results[1].cos()]

    x = torch.randn(3, 4)
    module = traced(function, x, mode=mode)
    assert count(module, bounds_rule) == 1
    assert len(calls(module, "kwtoys.bounds.default")) == 1
    assert all(torch.equal(a, b) for a, b in zip(run_checked(module, x), function(x), strict=True))


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("order", ORDERS, ids=str)
def test_an_output_used_before_the_other_is_computed(order: tuple[int, ...], mode: Any) -> None:
    """Where the first output already has a user before the second output, the graph stays valid, rewritten or not."""

    def function(x: Tensor) -> list[Tensor]:
        results: dict[int, Tensor] = {}
        for place in order:
            results[place] = (x.amax(-1) if place == 0 else x.amin(-1)).sin()
        return [results[0], results[1]]

    x = torch.randn(3, 4)
    module = traced(function, x, mode=mode)
    kt.apply(module, patterns(bounds_rule))
    module.graph.lint()
    assert all(torch.equal(a, b) for a, b in zip(run_checked(module, x), function(x), strict=True))


VIEWS: dict[str, Callable[[Tensor], Any]] = {
    "view": lambda y: y.view(y.shape[0] * y.shape[1]),
    "view after sin": lambda y: y.sin().view(y.shape[0] * y.shape[1]),
    "view after two": lambda y: y.sin().neg().view(y.shape[0] * y.shape[1]) * 2,
    "view of the transposed": lambda y: y.sin().t().reshape(y.shape[0] * y.shape[1]) + 1,
    "view after split": lambda y: [part.view(part.shape[0] * part.shape[1]) for part in y.sin().split(2, 0)],
    "view after topk": lambda y: torch.topk(y.sin(), 2, 0)[0].view(2 * y.shape[1]),
    "view of unbind": lambda y: [part.view(2, -1) for part in y.unbind(0)],
    "as_strided": lambda y: torch.as_strided(y, (3,), (1,)),
    "contiguous": lambda y: y.contiguous().view(y.shape[0] * y.shape[1]),
}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("use", VIEWS.values(), ids=VIEWS.keys())
def test_views_stay_runnable_when_strides_change(use: Callable[[Tensor], Any], mode: Any) -> None:
    """A replacement may yield other strides: what follows runs, yields the same, and says what it yields."""

    def function(x: Tensor) -> Any:
        return use(torch.cos(x) + 1)

    x = torch.randn(4, 6)
    module = traced(function, x, mode=mode)
    kt.apply(module, patterns(strided_rule))
    found, expected = run_checked(module, x), function(x)
    pairs = zip(found, expected, strict=True) if isinstance(expected, list) else [(found, expected)]
    assert all(torch.equal(a, b) for a, b in pairs)


def test_a_rule_that_changes_strides_fires() -> None:
    """Other strides are no reason not to rewrite."""
    x = torch.randn(4, 6)
    module = traced(lambda x: (torch.cos(x) + 1) * 2, x)
    assert count(module, strided_rule) == 1
    assert only(module, "kwtoys.strided.default").meta["val"].stride() == (1, 4)
    assert only(module, aten.mul.Tensor).meta["val"].stride() == (1, 4)
    assert torch.equal(run_checked(module, x), (torch.cos(x) + 1) * 2)


def at_match(name: str, replacement: Callable[..., Any]) -> kt.Rule:
    """Return a rule whose replacement is traced at the match: nothing was proved of its outputs when generating."""

    def search(x: Matrix, *, alpha: float) -> Tensor:
        return torch.exp(x) * alpha

    rule = kt.rule(name=name, devices=("cpu",))(search)
    rule.replacement(at="match")(replacement)
    return rule


def with_dtype(x: Tensor, *, alpha: float) -> Tensor:
    """Yield another dtype for some numbers."""
    made: Tensor = torch.ops.kwtoys.scaled_exp(x, alpha)
    return made.to(BF16) if alpha >= 1 else made


def with_size(x: Tensor, *, alpha: float) -> Tensor:
    """Yield another size for some numbers."""
    made: Tensor = torch.ops.kwtoys.scaled_exp(x, alpha)
    return made[1:] if alpha >= 1 else made


def with_rank(x: Tensor, *, alpha: float) -> Tensor:
    """Yield another rank for some numbers."""
    made: Tensor = torch.ops.kwtoys.scaled_exp(x, alpha)
    return made[None] if alpha >= 1 else made


def with_device(x: Tensor, *, alpha: float) -> Tensor:
    """Yield something on another device for some numbers."""
    made: Tensor = torch.ops.kwtoys.scaled_exp(x, alpha)
    return made.to("meta") if alpha >= 1 else made


def raising(x: Tensor, *, alpha: float) -> Tensor:
    """Raise for some numbers."""
    if alpha >= 1:
        msg = "not for these"
        raise ValueError(msg)
    made: Tensor = torch.ops.kwtoys.scaled_exp(x, alpha)
    return made


dtype_rule = at_match("with_dtype", with_dtype)
size_rule = at_match("with_size", with_size)
rank_rule = at_match("with_rank", with_rank)
device_rule = at_match("with_device", with_device)
raising_rule = at_match("raising", raising)
OTHER_OUTPUTS = [dtype_rule, size_rule, rank_rule, device_rule, raising_rule]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("rule", OTHER_OUTPUTS, ids=lambda rule: rule.name)
def test_another_dtype_size_or_device_is_never_put_in(
    rule: kt.Rule, mode: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """A replacement that would yield something else, or raise, leaves the graph as it is; one line says so."""
    x = torch.randn(3, 4)
    fused = traced(lambda x: torch.exp(x) * 0.5, x, mode=mode)
    assert count(fused, rule) == 1
    assert len(calls(fused, "kwtoys.scaled_exp.default")) == 1
    assert_same(run_checked(fused, x), torch.exp(x) * 0.5)
    with caplog.at_level(logging.WARNING, "kwtrace"):
        refused(traced(lambda x: torch.exp(x) * 2.0, x, mode=mode), x, rule=rule)
    (record,) = (record for record in caplog.records if record.name == "kwtrace")
    assert f"{rule.name}[" in record.getMessage()


READERS: dict[str, Callable[[Tensor], Any]] = {
    "as_strided": lambda y: torch.as_strided(y, (12,), (1,)),
    "as_strided of a sine": lambda y: torch.as_strided(y.sin(), (12,), (1,)),
    "as_strided_copy": lambda y: torch.as_strided_copy(y, (12,), (1,)),
    "bits": lambda y: y.view(torch.int32),
}


@pytest.mark.parametrize("mode", ["real", "fake"])
@pytest.mark.parametrize("use", READERS.values(), ids=READERS.keys())
def test_who_reads_strides_keeps_them(use: Callable[[Tensor], Any], mode: Any) -> None:
    """Where strides decide on values, a replacement that changes them isn't put in."""

    def function(x: Tensor) -> Any:
        return use(torch.cos(x) + 1)

    x = torch.randn(3, 4)
    module = traced(function, x, mode=mode)
    refused(module, x, rule=strided_rule)
    assert_same(module(x), function(x))


def test_strides_of_what_follows_are_written_down() -> None:
    """Every node behind a rewrite says the strides that it now has, up to one that has strides of its own."""
    x = torch.randn(4, 6)
    module = traced(lambda x: ((torch.cos(x) + 1).sin().neg(), (torch.cos(x) + 1).sum(0)), x)
    assert count(module, strided_rule) == 2
    assert only(module, aten.neg.default).meta["val"].stride() == (1, 4)
    assert_same(run_checked(module, x), ((torch.cos(x) + 1).sin().neg(), (torch.cos(x) + 1).sum(0)))


@pytest.mark.parametrize("mode", MODES)
def test_many_rewrites_leave_a_valid_graph(mode: Any) -> None:
    """Matches that feed each other, interleaved, end in a graph in topological order that says what it yields."""

    def function(x: Tensor, y: Tensor) -> list[Tensor]:
        first = torch.exp(x * 0.1) * 0.5 + y
        second = torch.exp(y * 0.1) * 0.25 + first
        third = torch.exp(first * 0.1) * 0.125 + second
        return [third.amax(-1), third.amin(-1), torch.cos(third) + 1]

    x, y = torch.randn(3, 4), torch.randn(3, 4)
    module = traced(function, x, y, mode=mode)
    assert count(module, scaled_add_rule, bounds_rule, strided_rule) == 5
    module.graph.lint()
    assert_same(run_checked(module, x, y), function(x, y))
