"""Law 2: constants are compared by type and value, and no type is ever a wildcard."""

from __future__ import annotations

import math
from operator import getitem
from typing import Any

import pytest
import torch
from both_sides import count, fires, refused
from graphs import calls, hand_written, only
from rules_for_laws import BF16, F32, Matrix, edges_rule, rounded_rule, signed_rule, typed
from torch import Tensor, fx
from toys import scaled_rule, topk_rule

import kwtrace as kt

aten = torch.ops.aten
SCALED = "kwtoys.scaled_exp.default"


def scaled_graph(factor: Any) -> fx.GraphModule:
    """Write ``exp(x) * factor`` by hand; ``factor`` stands in the graph exactly as it is."""
    return hand_written(
        lambda g, p: g.call_function(aten.mul.Tensor, (g.call_function(aten.exp.default, (p,)), factor)),
        torch.randn(3, 4),
    )


@pytest.mark.parametrize("factor", [0.5, -0.0, 0.0, 1.0, 1e-300, math.inf, -2.0, 3.0000000001])
def test_any_float_is_captured_exactly(factor: float) -> None:
    """A captured number is bound to whatever float the graph holds, sign of zero included."""
    module = scaled_graph(factor)
    assert count(module, scaled_rule) == 1
    found = only(module, SCALED).args[1]
    assert type(found) is float
    assert math.copysign(1.0, found) == math.copysign(1.0, factor)
    assert found == factor


def test_nan_is_captured() -> None:
    """NaN is a number like another: it is captured, though it doesn't equal itself."""
    module = scaled_graph(math.nan)
    assert count(module, scaled_rule) == 1
    assert math.isnan(only(module, SCALED).args[1])


def test_an_int_that_no_float_equals_is_refused() -> None:
    """An int beyond 2**53 may be no float: it isn't captured as one."""
    refused(scaled_graph(2**53 + 1), torch.randn(3, 4), rule=scaled_rule)


@pytest.mark.parametrize("factor", [True, False])
def test_a_bool_is_no_number(factor: bool) -> None:
    """``x * True`` isn't captured as 1.0."""
    refused(scaled_graph(factor), torch.randn(3, 4), rule=scaled_rule)


LITERALS = [1, 1.0, True, 0, 2, -1, 1.0000001, 0.0, -0.0]


@pytest.mark.parametrize("found", LITERALS, ids=repr)
def test_a_literal_is_compared_by_type_and_value(found: Any) -> None:
    """Of ``places + 1`` only the int 1 is the rule's: 1.0 and True are other constants."""

    def build(g: fx.Graph, p: fx.Node) -> tuple[fx.Node, ...]:
        top = g.call_function(aten.topk.default, (p, 2))
        values, places = (
            g.call_function(torch.ops.aten.clone.default, (g.call_function(getitem, (top, i)),)) for i in (0, 1)
        )
        return g.call_function(aten.neg.default, (values,)), g.call_function(aten.add.Tensor, (places, found))

    module = hand_written(build, torch.randn(3, 4))
    wanted = type(found) is int and found == 1
    assert count(module, topk_rule) == wanted
    assert len(calls(module, "kwtoys.negated_topk.default")) == wanted


def scaled_and_shifted(factor: Any, term: Any) -> fx.GraphModule:
    """Write ``exp(x) * factor + term`` by hand."""

    def build(g: fx.Graph, p: fx.Node) -> fx.Node:
        scaled = g.call_function(aten.mul.Tensor, (g.call_function(aten.exp.default, (p,)), factor))
        return g.call_function(aten.add.Tensor, (scaled, term))

    return hand_written(build, torch.randn(3, 4))


@pytest.mark.parametrize(
    ("factor", "term", "matches"),
    [
        (0.0, 1, True),
        (-0.0, 1, False),
        (0, 1, False),
        (False, 1, False),
        (5e-324, 1, False),
        (0.0, 1.0, False),
        (0.0, True, False),
        (0.0, -1, False),
        (0.0, 2, False),
    ],
    ids=str,
)
def test_zeros_ones_and_bools_are_told_apart(factor: Any, term: Any, matches: bool) -> None:
    """``0.0`` isn't ``-0.0``, 0 or False, and 1 isn't 1.0 or True."""
    module, x = scaled_and_shifted(factor, term), torch.randn(3, 4)
    (fires if matches else refused)(module, x, rule=signed_rule)


def test_nan_equals_nan() -> None:
    """A NaN in the rule is every NaN in a graph, and no other number."""
    x = torch.randn(3, 4)
    fires(scaled_and_shifted(0.0, math.nan), x, rule=edges_rule)
    fires(scaled_and_shifted(0.0, -math.nan), x, rule=edges_rule)
    refused(scaled_and_shifted(0.0, math.inf), x, rule=edges_rule)
    refused(scaled_and_shifted(-0.0, math.nan), x, rule=edges_rule)


@pytest.mark.parametrize("dtype", [BF16, torch.float16, torch.float64])
def test_a_dtype_is_no_wildcard(dtype: torch.dtype) -> None:
    """A cast to another dtype and back rounds otherwise: it isn't the rule's."""
    cast = torch.ops.prims.convert_element_type.default

    def build(g: fx.Graph, p: fx.Node) -> fx.Node:
        there = g.call_function(cast, (g.call_function(aten.exp.default, (p,)), dtype))
        return g.call_function(aten.tanh.default, (g.call_function(cast, (there, F32)),))

    x = torch.randn(3, 4)
    (fires if dtype is BF16 else refused)(hand_written(build, x), x, rule=rounded_rule)


OWN = {
    "flag": True,
    "n": 1,
    "f": 0.5,
    "sizes": [1, 2],
    "text": "a",
    "dtype": torch.float32,
    "layout": torch.strided,
    "device": torch.device("cpu"),
    "format": torch.contiguous_format,
    "nothing": None,
}


@kt.rule(name="typed", devices=("cpu",))
def typed_rule(x: Matrix) -> Tensor:
    """One argument of every kind."""
    return torch.ops.kwlaws.constants(torch.exp(x), **OWN)  # type: ignore[no-any-return]


@typed_rule.replacement
def _(x: Tensor) -> Tensor:
    return typed(x)


def typed_graph(**changed: Any) -> fx.GraphModule:
    """Write what `typed_rule` searches for, with some arguments changed."""

    def build(g: fx.Graph, p: fx.Node) -> fx.Node:
        inner = g.call_function(aten.exp.default, (p,))
        return g.call_function(torch.ops.kwlaws.constants.default, (inner,), {**OWN, **changed})

    return hand_written(build, torch.randn(3, 4))


def test_one_argument_of_every_kind() -> None:
    """A call with the rule's own constants matches, lists written as tuples included."""
    x = torch.randn(3, 4)
    fires(typed_graph(), x, rule=typed_rule)
    fires(typed_graph(sizes=(1, 2)), x, rule=typed_rule)


OTHERS = [
    {"flag": False},
    {"n": 2},
    {"n": 0},
    {"n": -1},
    {"f": 0.25},
    {"f": -0.5},
    {"f": math.nextafter(0.5, 1.0)},
    {"sizes": [1, 3]},
    {"sizes": [2, 1]},
    {"sizes": [1]},
    {"sizes": [1, 2, 2]},
    {"sizes": []},
    {"text": "b"},
    {"text": "A"},
    {"text": ""},
    {"dtype": torch.float64},
    {"dtype": None},
    {"layout": torch.sparse_coo},
    {"layout": None},
    {"device": torch.device("meta")},
    {"device": None},
    {"format": torch.channels_last},
    {"format": torch.preserve_format},
    {"format": None},
    {"nothing": 1},
    {"nothing": 0},
]


@pytest.mark.parametrize("changed", OTHERS, ids=str)
def test_no_type_is_a_wildcard(changed: dict[str, Any]) -> None:
    """Bools, ints, floats, lists, strings, dtypes, layouts, devices, memory formats and None all count."""
    refused(typed_graph(**changed), torch.randn(3, 4), rule=typed_rule)
