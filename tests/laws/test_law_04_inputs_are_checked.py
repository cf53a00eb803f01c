"""Law 4: inputs are checked for dtype, rank, device and presence."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from both_sides import count, fires, refused
from graphs import fake_traced, hand_written, only, run_checked, traced
from rules_for_laws import above_rule, joined_rule, paired_rule, total_rule
from torch import Tensor, fx
from toys import bounds_rule, scaled_add_rule, scaled_rule

aten = torch.ops.aten


def test_a_tensor_is_no_captured_number() -> None:
    """A 0-d tensor in place of a captured number isn't bound to it, whatever its dtype."""
    for factor in (torch.tensor(0.5), torch.tensor(0.5, dtype=torch.float64)):
        x = torch.randn(3, 4)
        module = traced(lambda x, y: torch.exp(x) * y, x, factor)
        assert count(module, scaled_rule) == 0
        assert torch.equal(run_checked(module, x, factor), torch.exp(x) * factor)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16, torch.bfloat16])
def test_another_input_dtype_is_a_refusal(dtype: torch.dtype) -> None:
    """A tensor of a dtype that the rule doesn't name isn't bound."""
    x = torch.randn(3, 4).to(dtype)
    refused(traced(lambda x: torch.exp(x) * 0.5, x), x, rule=scaled_rule)


@pytest.mark.parametrize("shape", [(), (4,), (2, 3, 4)], ids=str)
def test_another_rank_is_a_refusal(shape: tuple[int, ...]) -> None:
    """A tensor of another rank isn't bound."""
    x = torch.randn(shape)
    refused(traced(lambda x: torch.exp(x) * 0.5, x), x, rule=scaled_rule)


def test_another_device_is_a_refusal() -> None:
    """A graph of fake CUDA tensors isn't what a CPU rule matches."""
    module = fake_traced(lambda x: torch.exp(x) * 0.5, (3, 4), dtype=torch.float32, device="cuda")
    assert count(module, scaled_rule) == 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16, torch.bfloat16])
def test_a_dtype_counts_where_the_output_does_not_show_it(dtype: torch.dtype) -> None:
    """A comparison yields bools whatever it compares: the input's dtype counts all the same."""
    x = torch.randn(3, 4).to(dtype)
    module = traced(lambda x: torch.exp(x) > 0.5, x)
    (fires if dtype is torch.float32 else refused)(module, x, rule=above_rule)


@pytest.mark.parametrize("shape", [(), (4,), (3, 4), (1, 3, 4), (2, 3, 4)], ids=str)
def test_a_rank_counts_where_the_output_does_not_show_it(shape: tuple[int, ...]) -> None:
    """A sum is one number whatever it sums: the input's rank counts all the same."""
    x = torch.randn(shape)
    module = traced(lambda x: torch.exp(x).sum(), x)
    (fires if len(shape) == 2 else refused)(module, x, rule=total_rule)


def test_a_layout_counts() -> None:
    """A tensor that isn't strided isn't bound."""
    x = torch.randn(3, 4)
    module = traced(lambda x: torch.exp(x) * 0.5, x)
    (placeholder,) = (node for node in module.graph.nodes if node.op == "placeholder")
    placeholder.meta["val"] = x.to_sparse()
    assert count(module, scaled_rule) == 0


def test_inputs_on_two_devices_are_a_refusal() -> None:
    """Two inputs of one match lie on one device, index and all."""
    module = fake_traced(lambda x, y: torch.exp(x) * 0.5 + y, (3, 4), (3, 4), dtype=torch.float32, device="cpu")
    other = fake_traced(lambda x: x + 1, (3, 4), dtype=torch.float32, device="cuda")
    placeholders = [node for node in module.graph.nodes if node.op == "placeholder"]
    placeholders[1].meta["val"] = next(iter(other.graph.nodes)).meta["val"]
    assert count(module, scaled_add_rule) == 0
    placeholders[1].meta["val"] = placeholders[0].meta["val"]
    assert count(module, scaled_add_rule) == 1


def joined_graph(x: Tensor, y: Tensor, *, given: Any, keywords: dict[str, Any]) -> fx.GraphModule:
    """Write `joined` of ``exp(x)``; ``given`` says how the optional tensor is passed."""

    def build(g: fx.Graph, p: fx.Node, q: fx.Node) -> fx.Node:
        inner = g.call_function(aten.exp.default, (p,))
        args = {"left out": (), "None": (None,), "given": (q,)}[given]
        return g.call_function(torch.ops.kwlaws.joined.default, (inner, *args), keywords)

    return hand_written(build, x, y)


@pytest.mark.parametrize("given", ["left out", "None", "given"])
def test_presence_is_told_apart(given: str) -> None:
    """Each variant takes its own: the one without the tensor a graph that has none, explicit None included."""
    x, y = torch.randn(3, 4), torch.randn(3, 4)
    module = joined_graph(x, y, given=given, keywords={"scale": 0.25})
    fires(module, x, y, rule=joined_rule)
    fused = only(module, "kwlaws.exp_joined.default")
    assert len(fused.all_input_nodes) == (2 if given == "given" else 1)


@pytest.mark.parametrize("given", ["left out", "None", "given"])
def test_none_is_never_bound_to_a_tensor_parameter(given: str) -> None:
    """A rule whose tensor must be there doesn't match where the graph has None, spelled out or not."""
    x, y = torch.randn(3, 4), torch.randn(3, 4)
    module = joined_graph(x, y, given=given, keywords={"scale": 0.25})
    (fires if given == "given" else refused)(module, x, y, rule=paired_rule)


@pytest.mark.parametrize("number", [0.5, 2])
def test_a_number_is_never_bound_to_a_tensor_parameter(number: float) -> None:
    """``exp(x) * a + 0.5`` isn't ``exp(x) * a + y``."""
    x = torch.randn(3, 4)
    refused(traced(lambda x: torch.exp(x) * 0.5 + number, x), x, rule=scaled_add_rule)


def test_one_parameter_is_one_tensor() -> None:
    """Where the rule uses a parameter twice, the graph has one tensor there: two that are equal aren't one."""
    x, y = torch.randn(3, 4), torch.randn(3, 4)
    module = traced(lambda x, y: (x.amax(-1), x.amin(-1), y.amax(-1), y.amin(-1)), x, y)
    fires(module, x, y, rule=bounds_rule, times=2)
    module = traced(lambda x, y: (x.amax(-1), y.amin(-1)), x, y)
    refused(module, x, y, rule=bounds_rule)
