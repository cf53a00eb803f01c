"""Whose memory a node's result shows: what stands in place of a node must share memory as that did, and no more."""

from __future__ import annotations

import operator
from collections.abc import Collection, Sequence

import torch
from torch import fx

from kwtrace import operators


def base_of(node: fx.Node) -> fx.Node:
    """Return the node whose memory ``node`` shows: itself, unless it is a view, or a view of one."""
    while (source := _viewed(node)) is not None:
        node = source
    return node


def shares_more(
    old: Sequence[fx.Node], new: Sequence[fx.Node], inside: Collection[fx.Node], made: Collection[fx.Node], place: int
) -> bool:
    """Tell whether the new result at ``place`` shares memory that the old one doesn't, with an input or another result.

    Args:
        old: the nodes to be replaced.
        new: what is to stand in their place.
        inside: the nodes of the match.
        made: the nodes that the replacement made.
        place: which result.

    Raises:
        ValueError: if it shares less: a mutation of the one would no longer be seen in the other.

    """
    wanted, found = base_of(old[place]), base_of(new[place])
    before = range(place)
    twins = ([i for i in before if base_of(old[i]) is wanted], [i for i in before if base_of(new[i]) is found])
    outside = (None if wanted in inside else wanted, None if found in made else found)
    if outside[0] not in (None, outside[1]) or not set(twins[0]) <= set(twins[1]):
        msg = f"other memory than {old[place]} shares"
        raise ValueError(msg)
    return outside[0] is not outside[1] or twins[0] != twins[1]


def _viewed(node: fx.Node) -> fx.Node | None:
    """Return the operand that ``node`` may be a view of."""
    if node.op != "call_function":
        return None
    if node.target is operator.getitem:
        source = node.args[0]
        return source if isinstance(source, fx.Node) and _viewed(source) is not None else None
    if not isinstance(node.target, torch._ops.OpOverload):
        return None
    schema = node.target._schema
    if not any(result.alias_info is not None for result in schema.returns):
        return None
    bound = operators.bind(node.target, node.args, node.kwargs)
    operands = (bound[argument.name] for argument in schema.arguments if argument.alias_info is not None)
    return next((operand for operand in operands if isinstance(operand, fx.Node)), None)
