"""What a match is, and what keeps a place from being one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from kwtrace.patterns import Family, Value, Variant


class Mismatch(Exception):  # noqa: N818 - it is control flow, not an error
    """A place where graph and pattern differ; the words are put together only when they are read.

    ``law`` is the number of the law that refuses (README, "What makes a match"), or None where the graph simply has
    another operator; ``node`` is where the difference is.
    """

    def __init__(self, law: int | None, node: fx.Node | None, words: Callable[[], str]) -> None:
        """Take the law, the node, and a function that says what was expected and found."""
        super().__init__()
        self.law = law
        self.node = node
        self.words = words

    def __str__(self) -> str:
        """Say what was expected and found."""
        return self.words()


@dataclass(eq=False, slots=True)
class Match:
    """A place in a graph that a variant describes.

    ``kwargs`` holds the axes and the captured values by name (a symbolic one as its node, a callable as its `Named`),
    ``tensors`` the fake tensor and ``inputs`` the node of each tensor parameter, ``nodes`` what the match consists of,
    ``outputs`` the nodes that the replacement's outputs take the place of.
    """

    family: Family
    row: tuple[Value, ...]
    kwargs: dict[str, Any]
    inputs: dict[str, fx.Node]
    dims: dict[str, Any]
    nodes: tuple[fx.Node, ...]
    outputs: tuple[fx.Node, ...]
    graph: fx.Graph

    @property
    def rule(self) -> str:
        """Return the name of the rule."""
        return self.family.rule

    @property
    def variant(self) -> Variant:
        """Return the variant that matched."""
        return self.family.variant(self.row)

    @property
    def tensors(self) -> dict[str, torch.Tensor]:
        """Return the fake tensor of each tensor parameter."""
        return {name: node.meta["val"] for name, node in self.inputs.items()}


def require(
    holds: bool,  # noqa: FBT001 - the condition is what it is about
    law: int | None,
    node: fx.Node | None,
    words: Callable[[], str],
) -> None:
    """Raise a `Mismatch` unless ``holds``."""
    if not holds:
        raise Mismatch(law, node, words)
