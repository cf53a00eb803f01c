"""Why a rule doesn't match: what the explaining run found, and how it is said."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import fx

    from kwtrace.patterns import Variant

LAWS = {
    1: "every argument counts",
    2: "constants are compared by type and value",
    3: "sizes are proved",
    4: "inputs are checked",
    5: "nothing leaks",
    6: "the outputs stay the same",
    8: "the larger match wins, then the priority, then the name",
}
"""The laws that can refuse a place in a graph."""


@dataclass(frozen=True, slots=True)
class Miss:
    """The place where a rule came nearest to matching, and the first thing that differs there.

    ``matched`` of the ``total`` operators of ``variant`` are in the graph; ``found`` says in words what differs, at
    ``node``, which the line ``location`` of the user's code made; ``law`` is the number of the law that refuses, or
    None where the graph has another operator; ``others`` are variants, of any rule, that match there.
    """

    variant: Variant
    matched: int
    total: int
    found: str
    law: int | None = None
    node: str | None = None
    location: str | None = None
    others: tuple[str, ...] = ()

    def __str__(self) -> str:
        """Say it in a few lines."""
        where = f", at node `{self.node}`" if self.node else ""
        where += f", {self.location}" if self.location else ""
        law = f"law {self.law}: {LAWS[self.law]}" if self.law else "no law: the graph is another one there"
        others = ", ".join(self.others) if self.others else "no other variant"
        return (
            f"nearest is {self.variant}: {self.matched} of {self.total} operators match\n"
            f"  {self.found}{where}\n"
            f"  refused by {law}\n"
            f"  {others} matches there"
        )


@dataclass(frozen=True, slots=True)
class RuleExplanation:
    """What one rule does in a graph: the variants that match, and the nearest miss beside them, if there is one."""

    rule: str
    matches: tuple[str, ...] = ()
    miss: Miss | None = None

    def __str__(self) -> str:
        """Say it in a few lines."""
        lines = [f"{self.rule}: {len(self.matches)} match(es)"]
        lines += [f"  {variant}" for variant in self.matches]
        lines += [f"  {line}" for line in str(self.miss).splitlines()] if self.miss else []
        return "\n".join(lines)


@dataclass(frozen=True, slots=True)
class Explanation:
    """What every rule of a pattern set does in a graph; ``problem`` says why that couldn't be found out, if so."""

    rules: dict[str, RuleExplanation] = field(default_factory=dict)
    problem: str | None = None

    def __str__(self) -> str:
        """Say it rule by rule."""
        lines = [f"kwtrace can't explain this: {self.problem}"] if self.problem else []
        lines += [str(rule) for rule in self.rules.values()]
        return "\n".join(lines) or "kwtrace has no rules to explain."


def location_of(node: fx.Node) -> str | None:
    """Return the file and line of the user's code that made a node, if it is on record."""
    found = re.findall(r'File "([^"]+)", line (\d+)', node.meta.get("stack_trace") or "")
    if not found:
        return None
    path, line = found[-1]
    relative = os.path.relpath(path)
    return f"{path if relative.startswith('..') else Path(relative)}:{line}"
