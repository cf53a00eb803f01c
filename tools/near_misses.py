"""Try the near misses of every variant of the shipped rules, and print what the matcher made of them.

    python tools/near_misses.py [--rule NAME] [--share N] [--jobs N] [--verbose]

Per rule: graphs that its variants match, near misses made from them, how many of these are exactly what some variant
searches for, other spellings that had to match, and how many of all were treated wrongly. Exit code 1 if any was.
"""

from __future__ import annotations

import argparse
import multiprocessing
import sys
import time
from concurrent.futures import ProcessPoolExecutor

import patterns_gen
from kwtrace import library
from kwtrace.loading import as_pattern_set
from kwtrace.testing.near_misses import Tally, check_rows

RULES = {name: getattr(library, name) for name in library.__all__}


def main() -> int:
    """Run over every row and print the tables."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rule", choices=sorted(RULES), help="one rule; all of them by default")
    parser.add_argument("--share", type=int, default=1, metavar="N", help="try every Nth change only")
    parser.add_argument("--jobs", type=int, default=2, metavar="N", help="processes")
    parser.add_argument("--verbose", action="store_true", help="print everything that went wrong, not the first ten")
    arguments = parser.parse_args()
    failed = 0
    for rule in [arguments.rule] if arguments.rule else sorted(RULES):
        tally, seconds = run(rule, arguments.share, arguments.jobs)
        report(rule, tally, seconds, verbose=arguments.verbose)
        failed += len(tally.wrong)
    return int(failed > 0)


def run(rule: str, share: int, jobs: int) -> tuple[Tally, float]:
    """Check a rule in several processes."""
    start = time.perf_counter()
    total = Tally()
    tasks = [(rule, share, part, 8 * jobs) for part in range(8 * jobs)]
    with ProcessPoolExecutor(jobs, mp_context=multiprocessing.get_context("spawn")) as pool:
        for tally in pool.map(check_part, tasks):
            total.add(tally)
    return total, time.perf_counter() - start


def check_part(task: tuple[str, int, int, int]) -> Tally:
    """Check every row of a part of a rule's table."""
    rule, share, part, parts = task
    patterns = as_pattern_set(patterns_gen)
    rows = [(family, row) for family in patterns.families if family.rule == rule for row in family.rows]
    return check_rows(patterns, RULES, rows[part::parts], (part, share))


def report(rule: str, tally: Tally, seconds: float, *, verbose: bool) -> None:
    """Print a rule's table."""
    tried, claimed, spelled = (sum(c.values()) for c in (tally.tried, tally.claimed, tally.spelled))
    print(f"\n{rule}: {tally.instances} graphs, {seconds:.0f} s")
    print(
        f"  near misses {tried}, of which another match {claimed}; other spellings {spelled}; wrong {len(tally.wrong)}"
    )
    for kind, count in sorted(tally.tried.items()):
        print(f"    {kind:<18} {count:7d}  another match {tally.claimed[kind]:6d}")
    for kind, count in sorted(tally.spelled.items()):
        print(f"    {kind:<18} {count:7d}  must match")
    for words in tally.wrong if verbose else tally.wrong[:10]:
        print(f"  WRONG {words}")


if __name__ == "__main__":
    sys.exit(main())
