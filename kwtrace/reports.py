"""What fired: counts per rule and variant, and of the graphs that were looked at."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kwtrace.patterns import Variant


@dataclass(frozen=True, slots=True)
class Report:
    """How often each variant was rewritten, and in how many graphs kwtrace looked.

    ``graphs`` is 0 when the compiled code came from a cache: then no pass ran, which is not the same as no match.
    """

    graphs: int = 0
    fired: dict[str, dict[str, int]] = field(default_factory=dict)

    @property
    def count(self) -> int:
        """Return the number of rewrites."""
        return sum(sum(variants.values()) for variants in self.fired.values())

    def __str__(self) -> str:
        """Return a line per variant that fired, or what is known when none did."""
        if self.graphs == 0:
            return "kwtrace has seen no graph: nothing was compiled, or the compiled code came from a cache."
        if not self.fired:
            return f"kwtrace rewrote nothing in {self.graphs} graph(s); kwtrace.explain says why."
        lines = [f"kwtrace rewrote {self.count} place(s) in {self.graphs} graph(s):"]
        for _, variants in sorted(self.fired.items()):
            lines += [f"  {count:5d} x {variant}" for variant, count in sorted(variants.items())]
        return "\n".join(lines)


class Recorder:
    """Counts; one for each call of `apply`, and one for the process."""

    def __init__(self) -> None:
        """Start at zero."""
        self.graphs = 0
        self.counts: Counter[tuple[str, str]] = Counter()

    def add(self, variants: list[Variant]) -> None:
        """Count one graph and what fired in it."""
        self.graphs += 1
        self.counts.update((variant.rule, str(variant)) for variant in variants)

    def report(self) -> Report:
        """Return the counts as they are."""
        fired: dict[str, dict[str, int]] = {}
        for (rule, variant), count in self.counts.items():
            fired.setdefault(rule, {})[variant] = count
        return Report(self.graphs, fired)

    def reset(self) -> None:
        """Go back to zero."""
        self.graphs = 0
        self.counts.clear()
