"""Operators by name, and their arguments bound to their schemas."""

from __future__ import annotations

import operator
from typing import Any

import numpy as np
import pytest
import torch
from torch import fx

from kwtrace import operators
from kwtrace.library import ops

aten = torch.ops.aten


@pytest.mark.parametrize(
    "target",
    [
        aten.mm.default,
        aten.add.Tensor,
        torch.ops.prims.convert_element_type.default,
        torch.ops.kwtrace.act.default,
        operator.getitem,
        operator.mul,
    ],
    ids=str,
)
def test_a_name_resolves_to_the_operator_it_names(target: Any) -> None:
    """Names go both ways, for ATen, prims, custom operators and Python's own."""
    assert operators.resolve(operators.name_of(target)) is target


def test_what_is_an_operator() -> None:
    """An overload, a packet of overloads and what ``custom_op`` returns are; Python's own functions aren't."""
    assert all(map(operators.is_operator, (aten.add.Tensor, aten.add, ops.act)))
    assert not any(map(operators.is_operator, (operator.add, torch.add, "aten.add.Tensor", None)))


def test_spellings_of_a_view_have_one_name() -> None:
    """``view``, ``_unsafe_view`` and ``reshape`` yield the same values; ``view.dtype`` is another operation."""
    assert {operators.name_of(t) for t in (aten.view.default, aten._unsafe_view.default, aten.reshape.default)} == {
        "aten.view.default"
    }
    assert operators.name_of(aten.view.dtype) == "aten.view.dtype"


def test_an_unknown_operator_is_an_attribute_error() -> None:
    """What isn't registered can't be resolved."""
    with pytest.raises(AttributeError):
        operators.resolve("kwtrace.no_such_operator.default")


SPELLINGS: list[tuple[tuple[Any, ...], dict[str, Any]]] = [
    ((1, 2), {}),
    ((1,), {"other": 2}),
    ((), {"self": 1, "other": 2}),
    ((1, 2), {"alpha": 1}),
]


@pytest.mark.parametrize(("args", "kwargs"), SPELLINGS, ids=str)
def test_all_spellings_of_a_call_bind_alike(args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """By place, by keyword, defaults given or left out: one and the same binding, in the order of the schema."""
    bound = operators.bind(aten.add.Tensor, args, kwargs)
    assert list(bound.items()) == [("self", 1), ("other", 2), ("alpha", 1)]


def test_lists_and_scalar_subclasses_are_bound_as_what_operators_see() -> None:
    """A list and a tuple are one thing, and NumPy's float64 is a float."""
    bound = operators.bind(aten.view.default, ("x", [2, 3]), {})
    assert bound == {"self": "x", "size": (2, 3)}
    found = operators.bind(aten.mul.Scalar, ("x", np.float64(0.5)), {})["other"]
    assert type(found) is float


def test_a_function_without_schema_keeps_its_arguments() -> None:
    """Where there is no schema the arguments are numbered, keywords keep their names, and none is dropped."""
    assert operators.bind(len, ("x", 2), {"key": 3}) == {"arg0": "x", "arg1": 2, "key": 3}


@pytest.mark.parametrize(
    ("args", "kwargs", "expected"),
    [
        (("x", -1, False), {}, (("x", -1, False), {})),
        (("x", 2, -1, True, True), {}, (("x", 2), {})),
        (("x", 2, 0, True, True), {}, (("x", 2, 0), {})),
        (("x", 2), {"largest": True, "sorted": False}, (("x", 2), {"sorted": False})),
        (("x", 2), {"largest": 1}, (("x", 2), {"largest": 1})),
    ],
)
def test_only_what_is_exactly_the_default_is_left_out(args: Any, kwargs: Any, expected: Any) -> None:
    """Trailing and keyword defaults go; an equal value of another type stays."""
    target = aten._softmax.default if args[1] == -1 else aten.topk.default
    assert operators.without_defaults(target, args, kwargs) == expected


def test_a_node_is_never_a_default() -> None:
    """A symbolic argument stays, whatever its value would be."""
    node = fx.Graph().placeholder("x")
    assert operators.without_defaults(aten.topk.default, ("x", 2, node), {}) == (("x", 2, node), {})


@pytest.mark.parametrize(
    ("target", "expected"),
    [
        (aten.add.Tensor, False),
        (aten.add_.Tensor, True),
        (aten.copy_.default, True),
        (aten.add.out, True),
        (aten.view.default, False),
        (operator.getitem, False),
        (operator.add, False),
        (torch.sym_max, False),
        (torch.ops.kwtrace.act.default, False),
        (print, True),
    ],
    ids=lambda value: getattr(value, "__name__", str(value)),
)
def test_what_no_match_may_cross(target: Any, expected: bool) -> None:
    """Operators that mutate, and functions of which nothing is known, are boundaries; pure ones aren't."""
    assert operators.is_boundary(target) is expected


def test_dims_are_known_for_what_they_are() -> None:
    """Only ints of native operators that name a dim count from the rank; a custom operator's may mean anything."""
    softmax = {a.name: a.is_dim for a in operators.describe(aten._softmax.default).arguments or ()}
    assert softmax == {"self": False, "dim": True, "half_to_float": False}
    topk = {a.name: a.is_dim for a in operators.describe(aten.topk.default).arguments or ()}
    assert topk == {"self": False, "k": False, "dim": True, "largest": False, "sorted": False}
    assert operators.keywords_of(aten.add.Tensor) == {"alpha"}


def test_operators_without_results_are_known() -> None:
    """``_assert_async`` returns nothing; ``mm`` does."""
    assert operators.has_results(aten.mm.default)
    assert not operators.has_results(aten._assert_async.default)
