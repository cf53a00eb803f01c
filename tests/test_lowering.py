"""Traced graphs in normal form: identities gone, arguments bound, names in order."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Annotated, Any

import ops_for_tests as ops
import pytest
import torch
from torch import Tensor, fx

import kwtrace as kt
from kwtrace.generation import generate_rule
from kwtrace.lowering import Lowering
from kwtrace.patterns import Call, Graph, In, MatchDevice, Op, Pattern, Ref, Size
from kwtrace.tracing import Trace

Two = Annotated[Tensor, kt.Shape("m>1 n>1"), torch.float32]


def joined_of(x: Tensor) -> Tensor:
    """Stand for a fused op."""
    return ops.joined(x)


def lowered(search: Callable[..., Any], replacement: Callable[..., Any] | None = None) -> Pattern:
    """Return the one pattern of a rule for the CPU."""
    rule = kt.rule(devices=("cpu",))(search)
    rule.replacement(replacement or joined_of)
    result = generate_rule(rule)
    assert result.failed == ()
    (family,) = result.families
    return family.skeleton


def argument(op: Op, name: str) -> Any:
    """Return an argument of an op."""
    return dict(op.args)[name]


SPELLINGS: list[Callable[[Tensor], Tensor]] = [
    lambda x: torch.softmax(x, -1),
    lambda x: torch.softmax(x, 1),
    lambda x: torch.softmax(x.clone(), dim=1),
    lambda x: torch.softmax(x.contiguous(), dim=-1),
    lambda x: torch.softmax(x.to(torch.float32), -1).clone(),
    lambda x: torch.softmax(x[:, :], -1),
    lambda x: torch.softmax(x.expand(x.shape[0], -1), -1),
    lambda x: torch.softmax(x.view(x.shape), -1),
    lambda x: torch.softmax(x[: x.shape[0]], -1).alias() if hasattr(Tensor, "alias") else torch.softmax(x, -1),
    lambda x: torch.softmax(x.permute(0, 1), -1),
]


@pytest.mark.parametrize("spelling", SPELLINGS[1:], ids=range(1, len(SPELLINGS)))
def test_spellings_of_one_thing_are_one_search_graph(spelling: Callable[[Tensor], Tensor]) -> None:
    """Negative dims, clones, casts to the same dtype, full slices and views to the same size make no difference."""

    def first(x: Two) -> Tensor:
        return SPELLINGS[0](x)

    def second(x: Two) -> Tensor:
        return spelling(x)

    assert lowered(second).search == lowered(first).search


@pytest.mark.parametrize(
    "other",
    [
        lambda x: torch.softmax(x, 0),
        lambda x: torch.softmax(x.double(), -1).float(),
        lambda x: torch.softmax(x[:, 1:], -1),
        lambda x: torch.softmax(x.t(), -1),
        lambda x: torch.softmax(x * 1.0, -1),
    ],
    ids=["dim", "dtype", "slice", "transposed", "times 1"],
)
def test_different_things_are_different_search_graphs(other: Callable[[Tensor], Tensor]) -> None:
    """What changes a value, a shape or a dtype on the way stays in the graph."""

    def first(x: Two) -> Tensor:
        return SPELLINGS[0](x)

    def second(x: Two) -> Tensor:
        return other(x)

    def replacement(x: Tensor) -> Tensor:
        return ops.joined(other(x))

    assert lowered(second, replacement).search != lowered(first).search


def test_every_argument_of_a_schema_is_bound() -> None:
    """An op lists all its arguments by name, defaults filled in, however it was called."""

    def search(x: Two) -> Tensor:
        return ops.act(torch.relu(x), mode="twice")

    op = lowered(search).search[1]
    assert op.args == (("x", Ref("relu")), ("negate", False), ("mode", "twice"), ("out_dtype", None))


def test_a_negative_dim_counts_from_the_rank() -> None:
    """Dims are absolute; of an op that adds a dim they count from the new rank."""

    def search(x: Two) -> Tensor:
        return torch.cat([torch.relu(x).unsqueeze(-1), x.unsqueeze(-1)], -1)

    found = lowered(search, lambda x: torch.stack([ops.joined(x), x], -1)).search
    assert [argument(op, "dim") for op in found if op.name.startswith("unsqueeze")] == [2, 2]
    assert argument(found[-1], "dim") == 2
    assert argument(found[-1], "tensors") == (Ref("unsqueeze"), Ref("unsqueeze_2"))


def test_view_sizes_are_those_of_the_result() -> None:
    """A size of -1 is the size it stands for, as an expression over the dims."""

    def search(x: Two) -> Tensor:
        return torch.relu(x).view(-1) + 1

    found = lowered(search, lambda x: ops.joined(x).view(-1)).search[1]
    assert argument(found, "size") in ((Size("m*n"),), (Size("n*m"),))


def test_the_device_is_that_of_the_match() -> None:
    """A device in a graph that is the variant's own stands for the match's; another one stays."""

    def search(x: Two) -> Tensor:
        return torch.relu(x) + torch.full((x.shape[1],), 2.0, device=x.device)

    found = lowered(search).search
    assert [argument(op, "device") for op in found if op.name == "full"] == [MatchDevice()]


def test_ops_of_one_name_are_numbered_in_order() -> None:
    """Ops come operands first, named after their op, numbered from the second on."""

    def search(x: Two) -> Tensor:
        return torch.relu(torch.neg(torch.relu(x)))

    found = lowered(search).search
    assert [op.name for op in found] == ["relu", "neg", "relu_2"]
    assert [argument(op, "self") for op in found] == [In("x"), Ref("relu"), Ref("neg")]


def test_an_op_that_is_used_twice_is_there_once() -> None:
    """A value that two ops use is one op of the graph."""

    def search(x: Two) -> Tensor:
        y = torch.relu(x)
        return y * y + y

    assert [op.name for op in lowered(search).search] == ["relu", "mul", "add"]


def test_dead_code_is_left_out() -> None:
    """Pure ops that no output needs are in neither graph."""

    def search(x: Two) -> Tensor:
        torch.sigmoid(x)
        return torch.relu(x) + 1

    def replacement(x: Tensor) -> Tensor:
        torch.sigmoid(x)
        return ops.joined(x)

    pattern = lowered(search, replacement)
    assert [op.name for op in pattern.search] == ["relu", "add"]
    assert isinstance(pattern.replacement, Graph)
    assert [call.name for call in pattern.replacement.calls] == ["joined"]


def test_several_results_are_taken_by_getitem() -> None:
    """An op with several results is followed by the item that is used."""

    def search(x: Two) -> Tensor:
        return torch.topk(torch.relu(x), 2)[0]

    found = lowered(search, lambda x: torch.topk(ops.joined(x), 2)[0]).search
    assert found[-1].target == "operator.getitem"
    assert found[-1].args == (("self", Ref("topk")), ("index", 0))


def test_a_replacement_keeps_its_calls_as_they_are() -> None:
    """In a replacement nothing is looked through: a clone that the function asks for is made."""

    def search(x: Two) -> Tensor:
        return torch.relu(x) + 1

    found = lowered(search, lambda x: ops.joined(x.clone())).replacement
    assert isinstance(found, Graph)
    clone, joined = found.calls
    assert clone.target == "aten.clone.default"
    assert joined == Call("joined", "kwtrace_toys.joined.default", (Ref("clone"), None), (("heads", 1),))


def test_a_replacement_may_be_an_input() -> None:
    """A replacement without ops is allowed where the outputs agree: the match gives way to an input."""

    def search(x: Two) -> Tensor:
        return torch.neg(torch.neg(x))

    assert lowered(search, lambda x: x).replacement == Graph((), (In("x"),))


def test_a_deep_graph_is_lowered_without_recursion() -> None:
    """A chain of ops deeper than Python's recursion limit is no trouble."""
    graph = fx.Graph()
    node = graph.placeholder("x")
    node.meta["val"] = value = torch.empty(2)
    depth = 2 * sys.getrecursionlimit()
    for _ in range(depth):
        node = graph.call_function(torch.ops.aten.relu.default, (node,))
        node.meta["val"] = value
    graph.output((node,))
    ops_found, _ = Lowering(Trace(graph, ("x",), frozenset(), {}, branches=False, where="here"), "cpu", "here").search()
    assert [op.name for op in ops_found[:2]] == ["relu", "relu_2"]
    assert len(ops_found) == depth
