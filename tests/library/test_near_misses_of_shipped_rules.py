"""Near misses of every variant of every shipped rule: nothing is rewritten that no variant searches for."""

from __future__ import annotations

import pytest

import kwtrace as kt
from kwtrace import library
from kwtrace.testing import check_rows

RULES = {name: getattr(library, name) for name in library.__all__}
SHARES = {"attention": 240, "attention_grouped": 240, "mm_act": 60}
"""Each variant is tried with one change in so many, another for each; ``tools/near_misses.py`` tries them all."""


@pytest.mark.slow
@pytest.mark.parametrize("rule", sorted(RULES))
def test_near_misses_of_every_variant_are_left_alone(shipped: kt.PatternSet, rule: str) -> None:
    """Changed graphs are rewritten only where another variant claims them; other spellings are matched all the same."""
    rows = {}
    for family in shipped.families:
        if family.rule == rule:
            rows |= {str(family.variant(row)): (family, row) for row in reversed(family.rows)}
    assert len(rows) == len({str(v) for v in shipped.select(rule).variants})
    tally = check_rows(shipped, RULES, rows.values(), (0, SHARES[rule]))
    assert tally.wrong == []
    assert sum(tally.tried.values()) > len(rows)
    assert sum(tally.spelled.values()) > len(rows)
