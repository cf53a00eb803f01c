"""Numbers that a graph holds in place of a captured one: found, evaluated and inverted exactly."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kwtrace.derived import evaluate, find_hole, invert
from kwtrace.patterns import Hole
from kwtrace.values import same

FUNCTIONS: dict[str, Callable[[Any], Any]] = {
    "same": lambda x: x,
    "negative": lambda x: -x,
    "reciprocal": lambda x: 1 / x,
    "complement": lambda x: 1 - x,
    "square": lambda x: x**2,
    "square_root": math.sqrt,
    "inverse_square_root": lambda x: 1 / math.sqrt(x),
}
SAMPLES: tuple[tuple[Any, Any], ...] = ((0.37, 0.61), (29, 64), (1e-5, 3.25))
moderate = st.floats(1e-3, 1e3)
HOLES = [Hole("x", name) for name in FUNCTIONS if name != "same"] + [Hole("x", "multiple", 0.7), Hole("x", "sum", 2.5)]


@pytest.mark.parametrize("inputs", SAMPLES, ids=str)
@pytest.mark.parametrize("name", FUNCTIONS)
def test_each_function_is_found_from_two_values(name: str, inputs: tuple[Any, Any]) -> None:
    """From what a graph holds for two values the function is found that gives both, exactly, and any third value."""
    function = FUNCTIONS[name]
    hole = find_hole("x", inputs, (function(inputs[0]), function(inputs[1])))
    assert hole is not None
    assert (hole.name, hole.constant) == ("x", None)
    third = type(inputs[0])(7)
    assert same(evaluate(hole, third), function(third))


@pytest.mark.parametrize(
    ("inputs", "function", "third"),
    [
        ((0.37, 0.61), lambda x: x * 0.7, 5.0),
        ((0.37, 0.61), lambda x: x * -3, 5.0),
        ((29, 64), lambda x: x * 3, 5),
        ((29, 64), lambda x: x * 0.5, 5),
        ((0.37, 0.61), lambda x: x / 4, 5.0),
        ((29, 64), lambda x: x + 1, 5),
        ((29, 64), lambda x: x - 7, 5),
        ((0.37, 0.61), lambda x: x + 0.5, 5.0),
    ],
    ids=["0.7x", "-3x", "3n", "0.5n", "x:4", "n+1", "n-7", "x+0.5"],
)
def test_a_constant_factor_or_term_is_found(
    inputs: tuple[Any, Any], function: Callable[[Any], Any], third: Any
) -> None:
    """A multiple or a sum is found with its constant, exact in type."""
    hole = find_hole("x", inputs, (function(inputs[0]), function(inputs[1])))
    assert hole is not None
    assert same(evaluate(hole, third), function(third))


@pytest.mark.parametrize(
    "function",
    [lambda x: x**3, lambda x: x * x + 1, math.exp, lambda x: 2 * x + 0.1, str, lambda _: None],
    ids=["cube", "square plus 1", "exp", "affine", "str", "None"],
)
def test_other_functions_are_not_found(function: Callable[[Any], Any]) -> None:
    """What is no simple function of the value isn't taken for one."""
    assert find_hole("x", (0.37, 0.61), (function(0.37), function(0.61))) is None


def test_a_function_of_another_type_is_not_found() -> None:
    """The number must agree in type: for an int, a float of the same value is the float of it, not the same."""
    hole = find_hole("x", (29, 64), (29.0, 64.0))
    assert hole is not None
    assert hole.function != "same"
    assert same(evaluate(hole, 3), 3.0)
    assert find_hole("x", (0.0, 1.0), (False, True)) is None


@given(st.sampled_from(HOLES), st.floats() | st.integers(), st.sampled_from(["int", "float", "complex"]))
def test_an_inverse_is_exact_or_none(hole: Hole, value: float, kind: str) -> None:
    """Whatever the graph holds, the parameter's value that is found gives exactly that, or there is none."""
    found = invert(hole, value, kind)
    assert found is None or same(evaluate(hole, found), value)


@given(st.sampled_from(HOLES), moderate)
def test_what_was_evaluated_is_inverted(hole: Hole, value: float) -> None:
    """A number that some ordinary value gives has an inverse: of the values around that one that give the number too.

    The functions are monotonic there, so this holds if what lies between the two gives the number as well.
    """
    held = evaluate(hole, value)
    found = invert(hole, held, "float")
    assert found is not None
    assert same(evaluate(hole, found), held)
    assert same(evaluate(hole, (found + value) / 2), held)


@given(
    st.sampled_from(
        [hole for hole in HOLES if hole.constant is None] + [Hole("n", "multiple", 3), Hole("n", "sum", -2)]
    ),
    st.integers(1, 10**6),
)
def test_an_int_is_inverted_to_an_int(hole: Hole, value: int) -> None:
    """Where the parameter is an int, the inverse of what it gave is that int, exact in type."""
    assert same(invert(hole, evaluate(hole, value), "int"), value)


@given(st.integers(), st.integers().filter(bool))
def test_an_int_that_is_no_multiple_has_no_inverse(value: int, factor: int) -> None:
    """An int multiple is inverted only where it divides."""
    found = invert(Hole("n", "multiple", factor), value, "int")
    assert same(found, value // factor if value % factor == 0 else None)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, 0.0, -0.0, "text", None, True], ids=repr)
@pytest.mark.parametrize("hole", HOLES, ids=lambda hole: hole.function)
def test_odd_values_do_not_raise(hole: Hole, value: Any) -> None:
    """A value that the function can't give yields None or an exact inverse, never an error."""
    for kind in ("int", "float", "complex"):
        found = invert(hole, value, kind)
        assert found is None or same(evaluate(hole, found), value)
