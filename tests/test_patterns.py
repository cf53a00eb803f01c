"""Pattern sets: what they hold, their digest, selecting and joining."""

from __future__ import annotations

import math
from dataclasses import FrozenInstanceError, replace
from enum import Enum
from typing import Any

import ops_for_tests as ops
import pytest
import torch
from constants_for_tests import related
from hypothesis import given
from hypothesis import strategies as st
from test_source import pattern, with_argument

from kwtrace.families import factor
from kwtrace.patterns import Named, Pattern, PatternSet, Slot, call, fill, map_leaves, op


class Kind(Enum):
    """An Enum with a member that is called as a function is."""

    written_out = 1


def set_of(*values: Any, rule: str = "rule") -> PatternSet:
    """Return a set with a family whose axis has the given values."""
    return PatternSet(
        factor([replace(with_argument("v", v), rule=rule, axes=(("axis", v), ("flag", True))) for v in values])
    )


def values_of(patterns: PatternSet) -> list[Any]:
    """Return the values of the axis in a set's variants."""
    return [dict(variant.axes)["axis"] for variant in patterns.variants]


def test_a_set_names_its_rules_and_variants() -> None:
    """``rules`` are sorted and named once; ``variants`` follow the tables."""
    patterns = set_of("b", "a", rule="second") | set_of(1, rule="first")
    assert patterns.rules == ("first", "second")
    assert [str(v) for v in patterns.variants] == [
        "second[axis='b', flag=True]",
        "second[axis='a', flag=True]",
        "first[axis=1, flag=True]",
    ]
    assert PatternSet().rules == PatternSet().variants == ()


def test_select_by_rule_and_by_axes() -> None:
    """``select`` keeps the variants of a rule, or with the given values, and composes."""
    patterns = set_of("a", "b", rule="first") | set_of("b", "c", rule="second")
    assert values_of(patterns.select("first")) == ["a", "b"]
    assert values_of(patterns.select(axis="b")) == ["b", "b"]
    assert values_of(patterns.select("second", axis="b")) == ["b"]
    assert values_of(patterns.select(axis="b").select(rule="second")) == ["b"]
    assert patterns.select("third").families == ()
    assert patterns.select(no_such_axis=1).families == ()
    assert patterns.select().digest == patterns.digest


@pytest.mark.parametrize("value", [True, 1, 1.0, 0.0, -0.0, math.nan, None, torch.float32])
def test_select_compares_type_and_value(value: Any) -> None:
    """``select`` takes exactly the value given: NaN is found, and 1 isn't True."""
    patterns = set_of(True, 1, 1.0, 0.0, -0.0, math.nan, None, torch.float32)
    (found,) = values_of(patterns.select(axis=value))
    assert type(found) is type(value)
    assert repr(found) == repr(value)


def written_out(x: torch.Tensor) -> torch.Tensor:
    """Be a callable that an axis may have as a value."""
    return x


def test_select_by_a_callable() -> None:
    """A callable is found by itself, by its `Named`, short or not, and not by another one or by a text."""
    name = f"{__name__}:written_out"
    known = (Named("aten.relu.default"), Named("aten.relu"), Named("kwtrace_toys.act.default"), Named(name, "short"))
    patterns = set_of(*known, name, None)
    by_itself = (torch.ops.aten.relu.default, torch.ops.aten.relu, ops.act, written_out)
    for named, function in zip(known, by_itself, strict=True):
        assert values_of(patterns.select(axis=function)) == [named]
        assert values_of(patterns.select(axis=named)) == [named]
        assert values_of(patterns.select(axis=Named(named.name))) == [named]
    assert values_of(patterns.select(axis=name)) == [name]
    assert values_of(patterns.select(axis=None)) == [None]
    for other in (torch.ops.aten.sigmoid.default, related, Named("other"), "short", Kind.written_out):
        assert patterns.select(axis=other).families == ()


def test_variants_show_callables_by_their_short_names() -> None:
    """The name stands in a variant without quotes, the short one where there is one."""
    patterns = set_of(Named("aten.relu.default"), Named("module:function", "function"))
    assert [str(variant) for variant in patterns.variants] == [
        "rule[axis=aten.relu.default, flag=True]",
        "rule[axis=function, flag=True]",
    ]


def test_named_callables_count_in_the_digest() -> None:
    """Sets that differ in the name of a callable have different digests."""
    digests = {set_of(value).digest for value in (Named("a"), Named("b"), Named("a", "b"), "a", None)}
    assert len(digests) == 5


def test_union_holds_each_family_once() -> None:
    """``|`` joins two sets; what is in both is there once."""
    left, right = set_of("a", "b"), set_of(1, 2, rule="other")
    assert (left | right).families == (*left.families, *right.families)
    assert (left | right | left).families == (left | right).families
    assert (left | PatternSet()).families == left.families


def test_union_with_something_else_is_a_type_error() -> None:
    """``|`` joins pattern sets only."""
    with pytest.raises(TypeError):
        set_of("a") | ("a",)  # type: ignore[operator]


@given(st.lists(related(), min_size=2, max_size=3), st.randoms())
def test_equal_content_has_an_equal_digest_in_any_order(made: list[list[Pattern]], random: Any) -> None:
    """The order of families doesn't change a set's digest."""
    families = [family for patterns in made for family in factor(patterns)]
    shuffled = list(families)
    random.shuffle(shuffled)
    assert PatternSet(tuple(families)).digest == PatternSet(tuple(shuffled)).digest


@pytest.mark.parametrize(
    "changes",
    [
        {"rule": "other"},
        {"module": "other"},
        {"priority": 1},
        {"conditions": ("n <= 8",)},
        {"device": "cuda"},
        {"axes": (("axis", 1),)},
    ],
    ids=str,
)
def test_other_content_has_another_digest(changes: dict[str, Any]) -> None:
    """Whatever part of a pattern differs, the digest does."""
    assert PatternSet(factor([pattern()])).digest != PatternSet(factor([pattern(**changes)])).digest


@pytest.mark.parametrize(("left", "right"), [(1, True), (1, 1.0), (0.0, -0.0), ("1", 1)])
def test_lookalike_constants_have_different_digests(left: Any, right: Any) -> None:
    """Constants of another type, or sign, make another digest."""
    assert set_of(left).digest != set_of(right).digest


def _look_alike(module: str) -> Enum:
    """Return a member of an Enum that prints like others of its name."""
    member: Enum = Enum("Same", {"X": 1}, module=module)(1)  # type: ignore[misc] - a class that is made, not written
    return member


def test_members_that_print_alike_have_different_digests() -> None:
    """Two Enums of one name in two modules are two: in a union both stay, and digests differ."""
    left, right = set_of(_look_alike("first")), set_of(_look_alike("second"))
    assert left.digest != right.digest
    assert len((left | right).families) == 2


def test_sets_and_families_are_frozen() -> None:
    """Pattern sets are plain frozen data."""
    patterns = set_of("a")
    with pytest.raises(FrozenInstanceError):
        patterns.families = ()  # type: ignore[misc]
    with pytest.raises(FrozenInstanceError):
        patterns.families[0].rows = ()  # type: ignore[misc]


def test_op_and_call_take_any_name_of_an_argument() -> None:
    """The helpers that generated modules use pass every keyword on, ``name`` and ``target`` too, in order."""
    assert op("n", "t", name=1, target=2, self=3).args == (("name", 1), ("target", 2), ("self", 3))
    assert call("n", "t", 4, target=1, name=2).kwargs == (("target", 1), ("name", 2))


def test_filling_replaces_slots_and_nothing_else() -> None:
    """``fill`` puts a row's cells where the slots are, in nested tuples too, and leaves the rest."""
    made = op("n", "t", a=Slot("x"), b=(1, (Slot("y"), "x")))
    assert fill(made, {"x": 5, "y": (6, 7)}) == op("n", "t", a=5, b=(1, ((6, 7), "x")))


def test_leaves_come_in_one_order() -> None:
    """Every leaf of a pattern's part is visited once, in the order in which it is written."""
    seen: list[Any] = []
    map_leaves(op("n", "t", a=1, b=(2, (3, 4)), c=5), seen.append)
    assert seen == [1, 2, 3, 4, 5]
