"""Patterns → families: factoring, and which patterns are one."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import pytest
from constants_for_tests import exact, patterns, plain_constants, related, unfactored
from hypothesis import assume, given
from test_source import pattern, with_argument

from kwtrace.families import factor, replacement_key, search_key, skeleton_key
from kwtrace.patterns import Call, Graph, Hole, In, Pattern, Ref, Slot, Variant


@given(related())
def test_families_fill_back_to_their_patterns(made: list[Pattern]) -> None:
    """Factoring loses nothing and adds nothing: filling each row into its skeleton gives the same patterns, exactly."""
    assert set(map(exact, unfactored(factor(made)))) == set(map(exact, made))


@given(related())
def test_columns_are_needed_and_named_once(made: list[Pattern]) -> None:
    """A table has no two equal columns, no column with one value, no name twice, and a row per pattern."""
    for family in factor(made):
        vectors = [exact(tuple(row[i] for row in family.rows)) for i in range(len(family.columns))]
        assert len(set(family.columns)) == len(family.columns)
        axes = {name for name, _ in family.skeleton.axes}
        places = [vector for name, vector in zip(family.columns, vectors, strict=True) if name not in axes]
        assert len(set(places)) == len(places)
        assert all(len(row) == len(family.columns) for row in family.rows)
        for i in range(len(family.columns)):
            assert len({exact(row[i]) for row in family.rows}) > 1


@given(related())
def test_factoring_again_changes_nothing(made: list[Pattern]) -> None:
    """Families of the patterns of families are the same families."""
    families = factor(made)
    assert exact(factor(unfactored(families))) == exact(families)


@given(patterns(), patterns())
def test_keys_tell_patterns_apart(left: Pattern, right: Pattern) -> None:
    """Patterns with one skeleton key are one family; search keys are equal exactly when the searches are."""
    assert (len(factor([left, right])) == 1) == (skeleton_key(left) == skeleton_key(right))
    parts = ("device", "inputs", "search", "outputs", "dims", "conditions", "captures", "priority")
    equal = all(exact(getattr(left, part)) == exact(getattr(right, part)) for part in parts)
    assert (search_key(left) == search_key(right)) == equal
    assert (replacement_key(left) == replacement_key(right)) == (exact(left.replacement) == exact(right.replacement))


@given(plain_constants, plain_constants)
def test_any_other_constant_makes_another_search_and_one_family(left: Any, right: Any) -> None:
    """Two patterns that differ in one constant are one family with two rows and a column of its own."""
    assume(exact(left) != exact(right))
    made = [with_argument("value", left), with_argument("value", right)]
    assert search_key(made[0]) != search_key(made[1])
    (family,) = factor(made)
    assert family.columns == ("c0",)
    assert exact(family.rows) == exact(((left,), (right,)))


def test_a_place_with_the_values_of_an_axis_shares_its_column() -> None:
    """Where a graph holds the axis's own values there is one column, called like the axis."""
    made = [replace(with_argument("value", v), axes=(("axis", v), ("fixed", 0))) for v in ("a", "b")]
    (family,) = factor(made)
    assert (family.columns, family.rows) == (("axis",), (("a",), ("b",)))
    assert dict(family.skeleton.search[0].args)["value"] == Slot("axis")
    assert family.skeleton.axes == (("axis", Slot("axis")), ("fixed", 0))


def test_an_axis_named_like_a_column_keeps_its_values() -> None:
    """An axis called ``c0`` and a place that varies otherwise have two columns."""
    made = [replace(with_argument("value", place), axes=(("c0", axis),)) for axis, place in ((1, 7), (2, 8), (3, 7))]
    assert unfactored(factor(made)) == made


@pytest.mark.parametrize("constants", list(itertools.combinations([1, 1.0, True, 0.0, -0.0], 2)), ids=str)
def test_holes_with_constants_of_different_types_are_two_families(constants: tuple[Any, Any]) -> None:
    """``x * 2`` and ``x * 2.0`` of a captured number are different searches."""
    made = [with_argument("value", Hole("x", "multiple", constant)) for constant in constants]
    assert search_key(made[0]) != search_key(made[1])
    assert [exact(p) for p in unfactored(factor(made))] == [exact(p) for p in made]


def test_a_marker_and_a_constant_are_two_families() -> None:
    """An input in one pattern where the other has a constant is another skeleton, as is a tuple of another length."""
    made = [with_argument("value", v) for v in (In("x"), "*", ("*",), ("*", "*"), ())]
    assert len(factor(made)) == 5


def test_a_variant_is_read_from_its_row() -> None:
    """A family says which variant each row stands for, in the order of the rule's axes."""
    made = [replace(with_argument("value", v), axes=(("axis", v), ("device", "cpu"))) for v in ("a", "b")]
    (family,) = factor(made)
    variants = [family.variant(row) for row in family.rows]
    assert variants == [Variant("rule", (("axis", v), ("device", "cpu"))) for v in ("a", "b")]
    assert str(variants[1]) == "rule[axis='b', device='cpu']"


def test_replacements_count_apart_from_searches() -> None:
    """Two patterns with one search and other replacements share the search key only."""
    left = pattern()
    right = pattern(replacement=Graph((Call("neg", "aten.neg.default", (In("x"),)),), (Ref("neg"),)))
    assert search_key(left) == search_key(right)
    assert replacement_key(left) != replacement_key(right)


def test_families_come_in_the_order_of_their_first_patterns() -> None:
    """The order of patterns is the order of families and of their rows."""
    made = [with_argument("value", v) for v in (2, (), 1)]
    first, second = factor(made)
    assert first.rows == ((2,), (1,))
    assert second.rows == ((),)
