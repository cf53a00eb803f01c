"""Leave out the laws' clauses one at a time, and print how many near misses catch each.

    python tools/weakened_laws.py [--law N] [--verbose]

Per clause: near misses and other spellings tried, how many are judged wrong for the reason that they should be, and
how many in all; and how many without leaving anything out. Exit code 1 if a clause isn't caught, or if something is
wrong with nothing left out.
"""

from __future__ import annotations

import argparse
import functools
import logging
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests"), str(ROOT / "tests" / "testing")]

from weakened import PARTS, WEAKENINGS, Weakening  # noqa: E402 - it lies among the tests

import kwtrace as kt  # noqa: E402 - as above
from kwtrace.testing import Tally  # noqa: E402 - as above


def main() -> int:
    """Run over every weakening and print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--law", type=int, help="one law; all of them by default")
    parser.add_argument("--verbose", action="store_true", help="print the first catch of each")
    arguments = parser.parse_args()
    logging.getLogger("kwtrace").setLevel(logging.ERROR)
    print(f"{'law':>3}  {'left out':<46} {'tried':>6} {'spelled':>8} {'caught':>7} {'wrong':>6} {'whole':>6}")
    failed = 0
    for weakening in WEAKENINGS:
        if arguments.law in (None, weakening.law):
            failed += report(weakening, verbose=arguments.verbose)
    return int(failed > 0)


def report(weakening: Weakening, *, verbose: bool) -> bool:
    """Print the line of a weakening; return whether something is amiss."""
    tally = total(weakening, weakened=True)
    whole = () if weakening.generating else wrong_without(weakening.subject)
    caught = weakening.caught(tally)
    counts = (sum(tally.tried.values()), sum(tally.spelled.values()), len(caught), len(tally.wrong))
    print("{:>3}  {:<46} {:>6} {:>8} {:>7} {:>6}".format(weakening.law, weakening.words, *counts), end=" ")
    print(f"{'refused' if weakening.generating else len(whole):>6}", flush=True)
    for words in [*caught[:1], *whole[:1]] if verbose else []:
        print(f"     {words}")
    return not caught or bool(whole)


@functools.cache
def wrong_without(subject: tuple[kt.Rule, ...]) -> tuple[str, ...]:
    """Return what is wrong with nothing left out."""
    weakening = next(w for w in WEAKENINGS if w.subject == subject and not w.generating)
    return tuple(total(weakening, weakened=False).wrong)


def total(weakening: Weakening, *, weakened: bool) -> Tally:
    """Try all changes of a weakening's subject."""
    tally = Tally()
    for part in range(PARTS):
        tally.add(weakening.tally(part, weakened=weakened))
    return tally


if __name__ == "__main__":
    sys.exit(main())
