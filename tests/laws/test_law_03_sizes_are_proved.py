"""Law 3: sizes are proved, on ints and on symbolic sizes, and what can't be proved doesn't match."""

from __future__ import annotations

import pytest
import torch
from both_sides import assert_same, count, fires, fused_calls, refused
from graphs import only, run_checked, traced
from rules_for_laws import limited_rule, rooted_rule, tail_rule, total_rule
from torch import Tensor, fx
from torch._dispatch.python import enable_python_dispatcher
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext
from toys import flattened_rule, scaled_add_rule, scaled_rule

import kwtrace as kt

aten = torch.ops.aten


@pytest.mark.parametrize("shape", [(1, 4), (4, 1), (0, 4), (4, 0)], ids=str)
def test_a_size_that_is_not_proved_is_a_refusal(shape: tuple[int, ...]) -> None:
    """Sizes 0 and 1 match only where tracing proved them, which the rule's ``>1`` says not to."""
    x = torch.randn(shape)
    refused(traced(lambda x: torch.exp(x) * 0.5, x), x, rule=scaled_rule)


@pytest.mark.parametrize("shape", [(1, 4), (3, 1), (1, 1), (4,), ()], ids=str)
def test_sizes_that_only_broadcast_are_a_refusal(shape: tuple[int, ...]) -> None:
    """The rule says that both inputs have one shape; an input that broadcasts to it is another graph."""
    x, y = torch.randn(3, 4), torch.randn(shape)
    module = traced(lambda x, y: torch.exp(x) * 0.5 + y, x, y)
    assert count(module, scaled_add_rule) == 0
    assert torch.equal(run_checked(module, x, y), torch.exp(x) * 0.5 + y)


def test_symbolic_sizes_that_are_not_known_to_be_equal_are_a_refusal() -> None:
    """Two dims of a dynamic graph that no guard ties together aren't taken for equal, though equal in the example."""
    mode = FakeTensorMode(shape_env=ShapeEnv(duck_shape=False))
    dynamic = StatelessSymbolicContext([DimDynamic.DYNAMIC, DimDynamic.DYNAMIC])
    x, y = (mode.from_tensor(torch.randn(3, 4), symbolic_context=dynamic) for _ in range(2))
    with mode, enable_python_dispatcher():
        module = make_fx(lambda x, y: torch.mm(torch.exp(x) * 0.5, y.t()), tracing_mode="symbolic")(x, y)
    guards = len(mode.shape_env.guards)  # type: ignore[union-attr] - the mode was made with one
    graph = only(module, aten.mul.Tensor)
    with module.graph.inserting_after(graph):
        inputs = [n for n in module.graph.nodes if n.op == "placeholder"]
        added = module.graph.call_function(aten.add.Tensor, (graph, inputs[1]))
    added.meta["val"] = graph.meta["val"]
    graph.replace_all_uses_with(added, delete_user_cb=lambda user: user is not added)
    assert count(module, scaled_add_rule) == 0
    assert len(mode.shape_env.guards) == guards  # type: ignore[union-attr] - as above


def guards_of(module: fx.GraphModule) -> int:
    """Return how many guards the symbolic sizes of a graph have gathered."""
    (first, *_) = (node for node in module.graph.nodes if node.op == "placeholder")
    return len(first.meta["val"].fake_mode.shape_env.guards)


DYNAMIC = {
    "rooted": (rooted_rule, 1),
    "scaled": (scaled_rule, 1),
    "scaled_add": (scaled_add_rule, 2),
    "flattened": (flattened_rule, 1),
    "tail": (tail_rule, 1),
}


def searched(rule: kt.Rule, *inputs: Tensor) -> Tensor:
    """Run what a rule searches for, captured numbers at 0.5."""
    captured = {"alpha": 0.5} if rule in (scaled_rule, scaled_add_rule) else {}
    result: Tensor = rule(*inputs, **captured)
    return result


@pytest.mark.parametrize(("rule", "tensors"), DYNAMIC.values(), ids=DYNAMIC.keys())
def test_symbolic_sizes_are_proved_and_serve_other_sizes(rule: kt.Rule, tensors: int) -> None:
    """A dynamic graph is fused with no guard added, and yields what eager yields, at other sizes too."""
    inputs = [torch.randn(5, 7) for _ in range(tensors)]
    module = traced(lambda *x: searched(rule, *x), *inputs, mode="symbolic")
    guards = guards_of(module)
    assert count(module, rule) == 1
    assert fused_calls(module, rule) == 1
    assert guards_of(module) == guards
    run_checked(module, *inputs)
    for shape in ((5, 7), (6, 3), (2, 11)):
        other = [torch.randn(shape) for _ in range(tensors)]
        assert_same(module(*other), searched(rule, *other))


@pytest.mark.parametrize("width", [3, 4, 5, 16])
def test_a_size_from_an_input_is_the_size_of_that_input(width: int) -> None:
    """``x / width ** 0.5`` matches with the graph's own width, whatever that is."""
    x = torch.randn(3, width)
    fires(traced(rooted_rule.function, x), x, rule=rooted_rule)


@pytest.mark.parametrize("divisor", [3**0.5, 5**0.5, 2, 1.0, 4.0])
def test_a_number_that_is_another_size_is_a_refusal(divisor: float) -> None:
    """The root of the height, or any other number, isn't the root of the width."""
    x = torch.randn(3, 4)
    refused(traced(lambda x: torch.relu(x) / divisor, x), x, rule=rooted_rule)


@pytest.mark.parametrize("dim", [0, 1])
def test_a_symbolic_number_is_held_against_the_right_dim(dim: int) -> None:
    """The root of the height isn't that of the width in a dynamic graph either, where neither is a number."""
    x = torch.randn(5, 7)
    module = traced(lambda x: torch.relu(x) / x.shape[dim] ** 0.5, x, mode="symbolic")
    assert count(module, rooted_rule) == dim
    other = torch.randn(4, 6)
    assert_same(module(other), torch.relu(other) / other.shape[dim] ** 0.5)


@pytest.mark.parametrize(("height", "fused"), [(3, True), (7, True), (9, True), (8, False)])
def test_a_guard_of_the_trace_is_a_condition_of_the_match(height: int, fused: bool) -> None:
    """What the search function asked of the sizes must hold: the height isn't twice the width."""
    x = torch.randn(height, 4)
    (fires if fused else refused)(traced(lambda x: torch.relu(x) * 2, x), x, rule=limited_rule)


def test_a_condition_that_is_not_known_to_hold_is_a_refusal() -> None:
    """Where sizes are symbolic, and the condition holds for some only, nothing fires and no guard makes it hold."""
    x = torch.randn(5, 7)
    module = traced(lambda x: torch.relu(x) * 2, x, mode="symbolic")
    guards = guards_of(module)
    assert count(module, limited_rule) == 0
    assert guards_of(module) == guards
    other = torch.randn(8, 4)
    assert_same(module(other), torch.relu(other) * 2)


@pytest.mark.parametrize("shape", [(2, 2), (2, 9), (1, 4), (4, 1), (1, 1)], ids=str)
def test_sizes_down_to_one_match_where_they_were_proved(shape: tuple[int, ...]) -> None:
    """A rule whose graph is the same at 1 matches there too."""
    x = torch.randn(shape)
    fires(traced(total_rule.function, x), x, rule=total_rule)


@pytest.mark.parametrize("shape", [(0, 4), (4, 0), (0, 0)], ids=str)
def test_empty_tensors_are_a_refusal(shape: tuple[int, ...]) -> None:
    """A traced symbol is at least 2, and only 1 was tried beside: nothing says that an empty tensor does the same."""
    x = torch.randn(shape)
    refused(traced(total_rule.function, x), x, rule=total_rule)
