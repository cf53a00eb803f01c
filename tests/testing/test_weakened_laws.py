"""The near misses have teeth: a law that loses a clause is caught, for the reason that it should be."""

from __future__ import annotations

from contextlib import AbstractContextManager
from dataclasses import fields

import pytest
import rules_for_laws as laws
import toys
from changed_sets import changed_sets, digest_without, digest_without_types
from weakened import PARTS, WEAKENINGS, Weakening

import kwtrace as kt
from kwtrace.patterns import Family, Hole, Pattern


@pytest.mark.parametrize("weakening", WEAKENINGS, ids=str)
def test_a_clause_left_out_is_caught(weakening: Weakening) -> None:
    """Some near miss, or another spelling that must match, is judged wrong once a clause of a law is left out."""
    for part in range(PARTS):
        if weakening.caught(weakening.tally(part, weakened=True)):
            break
    else:
        pytest.fail(f"nothing caught it: {weakening.tally(0, weakened=True).wrong[:3]}")
    if weakening.generating:
        assert not laws.generated(weakening.subject[-1]).families
        return
    whole = weakening.tally(part, weakened=False)
    assert sum(whole.tried.values()) > 10
    assert whole.wrong == []


@pytest.fixture(scope="module")
def whole() -> kt.PatternSet:
    """Return a set that has everything that a pattern can have."""
    rules = (toys.flattened_rule, toys.bounded_rule, laws.joined_rule, laws.moded_rule, laws.limited_rule)
    return toys.patterns(*rules, laws.rooted_rule)


def unseen(whole: kt.PatternSet, weakened: AbstractContextManager[object], wanted: str) -> str | None:
    """Return a change of a set, one whose words have ``wanted`` in them, that its digest doesn't show."""
    with weakened:
        digest = kt.PatternSet(whole.families).digest
        changes = ((words, other) for words, other in changed_sets(whole) if wanted in words)
        return next((words for words, other in changes if other.digest == digest), None)


def test_every_change_of_a_pattern_set_is_another_digest(whole: kt.PatternSet) -> None:
    """One leaf changed, in value or in type, or one item dropped, is another digest; no two changes share one."""
    digests = {words: other.digest for words, other in changed_sets(whole)}
    assert len(digests) > 1000
    assert whole.digest not in digests.values()
    assert len(set(digests.values())) > len(digests) / 2


@pytest.mark.parametrize("name", sorted({f.name for c in (Family, Pattern, Hole) for f in fields(c)}))
def test_a_part_left_out_of_a_digest_is_caught(whole: kt.PatternSet, name: str) -> None:
    """A digest that leaves out a field of a family, a pattern or a hole misses a change of that field."""
    assert unseen(whole, digest_without(name), f".{name}") is not None


@pytest.mark.parametrize("change", ["0 → False", "0 → 0.0", "0.0 → 0"])
def test_types_left_out_of_a_digest_are_caught(whole: kt.PatternSet, change: str) -> None:
    """A digest that takes False, 0 and 0.0 for one misses changes of type."""
    assert unseen(whole, digest_without_types(), change) is not None
