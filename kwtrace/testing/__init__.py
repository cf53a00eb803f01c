"""Tests of rules by their near misses: every graph one change away from one that a rule matches.

`check` and `check_rows` try the neighbours of the variants of a pattern set and tally what the matcher makes of them.
`instances` are the graphs to start from, `near_misses` their neighbours that compute something else, `other_spellings`
those that compute the same, and a `Judge` says what is wrong with the matches in a graph, from the rules and from
numbers.
"""

from kwtrace.testing.instances import Instance, instances
from kwtrace.testing.near_misses import (
    Judge,
    Neighbour,
    Tally,
    check,
    check_rows,
    near_misses,
    other_spellings,
)

__all__ = [
    "Instance",
    "Judge",
    "Neighbour",
    "Tally",
    "check",
    "check_rows",
    "instances",
    "near_misses",
    "other_spellings",
]
