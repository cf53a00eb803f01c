"""Memory: what stands in place of a node shares it as that did, and no more."""

import operator
from typing import Annotated

import pytest
import torch
from graphs import calls, traced
from torch import Tensor, fx

import kwtrace as kt
from kwtrace.aliasing import base_of

Matrix = Annotated[Tensor, kt.Shape("m>1 n>1"), torch.float32]
ATEN = torch.ops.aten


@kt.rule(name="double_negation", devices=("cpu",))
def negated(x: Matrix) -> Tensor:
    """Two operators whose result is the input."""
    return x.neg().neg()


@negated.replacement
def _(x: Tensor) -> Tensor:
    return x


@kt.rule(name="twins", devices=("cpu",))
def twins(x: Matrix) -> tuple[Tensor, Tensor]:
    """Two results of equal numbers."""
    return x.sigmoid(), x.sigmoid().neg().neg()


@twins.replacement
def _(x: Tensor) -> tuple[Tensor, Tensor]:
    y = x.sigmoid()
    return y, y


@kt.rule(name="viewed", devices=("cpu",))
def viewed(x: Matrix) -> Tensor:
    """A view of the input."""
    return x.t()[1:]


@viewed.replacement
def _(x: Tensor) -> Tensor:
    return x.t()[1:].clone(memory_format=torch.contiguous_format)


def mutating_input(x: Tensor) -> Tensor:
    """Write to the input behind the match."""
    y = x.neg().neg()
    x.add_(1)
    return y * 1


def mutating_result(x: Tensor) -> tuple[Tensor, Tensor]:
    """Write to the result."""
    y = x.neg().neg()
    y.add_(1)
    return y * 1, x * 1


def mutating_twin(x: Tensor) -> tuple[Tensor, Tensor]:
    """Write to one of two results."""
    a, b = x.sigmoid(), x.sigmoid().neg().neg()
    a.add_(1)
    return a * 1, b * 1


@pytest.mark.parametrize("function", [mutating_input, mutating_result])
def test_a_replacement_that_returns_its_input_is_copied(function: object) -> None:
    """Someone may write to the input or to the result later: neither shows in the other, as before."""
    graph = traced(function, torch.zeros(3, 4), mode="fake")  # type: ignore[arg-type]
    assert kt.apply(graph, kt.trace(negated)).count == 1
    assert not calls(graph, ATEN.neg.default)
    assert len(calls(graph, ATEN.clone.default)) == 1
    wanted, found = function(torch.zeros(3, 4)), graph(torch.zeros(3, 4))  # type: ignore[operator]
    torch.testing.assert_close(found, wanted, rtol=0, atol=0)


def test_two_results_stay_two_tensors() -> None:
    """A replacement that returns one tensor twice is copied, so that a write to one leaves the other alone."""
    graph = traced(mutating_twin, torch.zeros(3, 4), mode="fake")
    assert kt.apply(graph, kt.trace(twins)).count == 1
    wanted, found = mutating_twin(torch.zeros(3, 4)), graph(torch.zeros(3, 4))
    torch.testing.assert_close(found, wanted, rtol=0, atol=0)


def test_a_view_is_not_replaced_by_a_copy() -> None:
    """What shares memory with an input must go on doing so: otherwise the match is refused."""

    def function(x: Tensor) -> tuple[Tensor, Tensor]:
        y = x.t()[1:]
        y.add_(1)
        return y * 1, x * 1

    graph = traced(function, torch.zeros(3, 4), mode="fake")
    assert kt.apply(graph, kt.trace(viewed)).count == 0
    torch.testing.assert_close(graph(torch.zeros(3, 4)), function(torch.zeros(3, 4)), rtol=0, atol=0)


@pytest.mark.usefixtures("fresh_compiler")
def test_a_compiled_function_returns_a_tensor_of_its_own() -> None:
    """Through torch.compile: the caller's tensor isn't handed back, and a later write to it doesn't show."""
    patterns = kt.trace(negated)
    x = torch.zeros(4, 4)
    found = torch.compile(lambda x: x.neg().neg(), options=kt.options(patterns))(x)
    assert found.data_ptr() != x.data_ptr()
    written = torch.compile(mutating_input, options=kt.options(patterns))
    assert torch.equal(written(torch.zeros(4, 4)), torch.zeros(4, 4))
    assert kt.stats().count == 2


def test_the_base_of_a_view_is_what_it_shows() -> None:
    """Views of views lead to the tensor that holds the numbers; other results are their own."""
    graph = fx.Graph()
    x = graph.placeholder("x")
    view = graph.call_function(ATEN.view.default, (x, [12]))
    piece = graph.call_function(ATEN.slice.Tensor, (view, 0, 1, 2))
    parts = graph.call_function(ATEN.split.Tensor, (piece, 1))
    part = graph.call_function(operator.getitem, (parts, 0))
    made = graph.call_function(ATEN.exp.default, (part,))
    top = graph.call_function(ATEN.topk.default, (x, 1))
    value = graph.call_function(operator.getitem, (top, 0))
    assert [base_of(node) for node in (x, view, piece, part, made, value)] == [x, x, x, x, made, value]
