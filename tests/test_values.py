"""Constants are compared by exact type and value."""

from __future__ import annotations

import math
import struct
from typing import Any

import numpy as np
import pytest
import torch
from constants_for_tests import Colour, Number, Word, exact, floats, nested, plain_constants
from hypothesis import given
from hypothesis import strategies as st

from kwtrace.values import exact_key, is_constant, plain, same


@given(nested, nested)
def test_keys_are_equal_exactly_when_type_and_value_are(left: Any, right: Any) -> None:
    """Two constants share a key if and only if they agree in type and in every bit that counts."""
    assert (exact_key(left) == exact_key(right)) == (exact(left) == exact(right))
    assert same(left, right) == (exact(left) == exact(right))


@given(nested)
def test_every_constant_is_the_same_as_itself(value: Any) -> None:
    """A constant has a hashable key of its own, NaN included."""
    assert same(value, value)
    assert hash(exact_key(value)) == hash(exact_key(value))


@given(st.integers(-(2**53), 2**53))
def test_an_int_is_no_float_and_no_bool(value: int) -> None:
    """Numbers that compare equal but differ in type are different constants."""
    assert not same(value, float(value))
    assert not same(value, complex(value))
    assert same(value, bool(value)) is False


@given(floats, floats)
def test_floats_are_compared_by_their_bits(left: float, right: float) -> None:
    """Two floats are the same if their bits are, and so are any two NaNs."""
    bits = struct.pack("<d", left) == struct.pack("<d", right)
    assert same(left, right) == (bits or (math.isnan(left) and math.isnan(right)))


@pytest.mark.parametrize(
    ("left", "right"),
    [
        (True, 1),
        (1, 1.0),
        (False, 0.0),
        (0.0, -0.0),
        (1.0, 1 + 0j),
        (complex(0.0, -0.0), 0j),
        ("1", 1),
        (None, False),
        ((1,), 1),
    ],
)
def test_lookalikes_differ(left: Any, right: Any) -> None:
    """Constants that ``==`` takes for one another, or nearly, are two."""
    assert not same(left, right)
    assert not same((left,), (right,))


def test_members_differ_from_their_values() -> None:
    """An Enum member is another constant than its value, even where it is a str or an int."""
    assert not same(Number.ONE, 1)
    assert not same(Word.NONE, "none")
    assert same(Colour.AZURE, Colour.BLUE)


def test_a_list_and_a_tuple_of_equal_items_are_one() -> None:
    """A schema has only lists, so that a list and a tuple of the same items are one constant."""
    assert same([1, [2.0]], (1, (2.0,)))
    assert not same([1], (1.0,))


@given(plain_constants)
def test_plain_leaves_constants_alone(value: Any) -> None:
    """What an operator can be given is plain already: the same object, of the same type."""
    assert plain(value) is value


@given(nested)
def test_plain_is_idempotent(value: Any) -> None:
    """Plain twice is plain once."""
    assert exact(plain(plain(value))) == exact(plain(value))


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (np.float64(0.1), 0.1),
        (np.complex128(1 - 2j), 1 - 2j),
        (np.str_("x"), "x"),
        (Number.TWO, 2),
        (Word.NONE, "none"),
        (torch.Size([2, 3]), (2, 3)),
        ([1, [Number.ONE]], (1, (1,))),
        (True, True),
        (Colour.BLUE, Colour.BLUE),
        (None, None),
    ],
    ids=str,
)
def test_plain_unwraps_to_what_an_operator_sees(value: Any, expected: Any) -> None:
    """Subclasses of scalars become the scalar, exact in type; lists and sizes become tuples; the rest stays."""
    assert exact(plain(value)) == exact(expected)


@given(nested)
def test_constants_are_constants(value: Any) -> None:
    """Every kind of constant may be the value of an axis."""
    assert is_constant(value)


@pytest.mark.parametrize(
    "value", [[1], {}, {1}, object(), torch.zeros(1), (1, [2]), int, len], ids=lambda v: type(v).__name__
)
def test_other_values_are_no_constants(value: Any) -> None:
    """Mutable things, objects and functions may not, not even within a tuple."""
    assert not is_constant(value)
