"""The orders in which a pattern's commutative operators may take their operands: one pattern for each.

It is patterns that are turned, after they were traced and proved: both orders of an operator broadcast and promote
alike, so what was proved for one order holds for the other. The replacement stays as it is, so that every order of a
graph gives what the rule's own order gives, bit for bit. Torch itself is less strict in two places: its CPU kernels
round a 0-d tensor to the other operand's dtype only where it comes first in a product, and the maximum or minimum of
0.0 and -0.0 may be either.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Collection, Hashable, Iterator
from dataclasses import replace
from typing import Any

from kwtrace.errors import RuleError
from kwtrace.families import search_key
from kwtrace.lowering import unique_name
from kwtrace.patterns import Dim, Hole, In, Input, Op, Pattern, Ref, Size, Variant, map_leaves

COMMUTATIVE = frozenset(
    {
        "aten.add.Tensor",
        "aten.bitwise_and.Tensor",
        "aten.bitwise_or.Tensor",
        "aten.bitwise_xor.Tensor",
        "aten.eq.Tensor",
        "aten.logical_and.default",
        "aten.logical_or.default",
        "aten.logical_xor.default",
        "aten.maximum.default",
        "aten.minimum.default",
        "aten.mul.Tensor",
        "aten.ne.Tensor",
        "prims.add.default",
        "prims.bitwise_and.default",
        "prims.bitwise_or.default",
        "prims.bitwise_xor.default",
        "prims.eq.default",
        "prims.maximum.default",
        "prims.minimum.default",
        "prims.mul.default",
        "prims.ne.default",
    }
)
"""Operators whose first two arguments may change places; what else they take must be 1 (the ``alpha`` of a sum)."""
MOST = 6
"""How many of these operators a variant may have: 64 orders."""
_NAME = re.compile(r"[^\W\d]\w*")


def expand(pattern: Pattern) -> tuple[Pattern, ...]:
    """Return the pattern, followed by those of its other orders that match other graphs.

    An order matches the graphs of another one also where the two differ only in which input, captured number or dim
    is called what: ``x + y`` is ``y + x`` if x and y have one shape and dtype.

    Raises:
        RuleError: naming rule and variant, if there are too many orders.

    """
    found: dict[Hashable, Pattern] = {}
    for order in _orders(pattern):
        found.setdefault(search_key(_with_plain_names(order)), order)
    return tuple(found.values())


def order_key(pattern: Pattern) -> Hashable:
    """Return a key that is equal for patterns of which one is an order of the other.

    Raises:
        RuleError: naming rule and variant, if there are too many orders.

    """
    return frozenset(search_key(order) for order in _orders(pattern))


def _orders(pattern: Pattern) -> Iterator[Pattern]:
    """Yield the pattern in every order, the first of which is its own."""
    places = [op.name for op in pattern.search if _commutes(op)]
    if len(places) > MOST:
        msg = (
            f"Rule {pattern.rule}, variant {Variant(pattern.rule, pattern.axes)}: expected at most {MOST} commutative "
            f"operators for commutative=True, found {len(places)}, which have {2 ** len(places)} orders; split the "
            "rule, or declare commutative=False."
        )
        raise RuleError(msg)
    for kept in itertools.product((True, False), repeat=len(places)):
        yield _arranged(pattern, [name for name, keep in zip(places, kept, strict=True) if not keep])


def _commutes(op: Op) -> bool:
    if op.target not in COMMUTATIVE:
        return False
    (_, first), (_, second), *others = op.args
    tensors = isinstance(first, In | Ref) and isinstance(second, In | Ref)
    return tensors and first != second and all(value == 1 for _, value in others)


def _arranged(pattern: Pattern, turned: Collection[str]) -> Pattern:
    """Return the pattern with some operators turned, its ops in the order and by the names of a trace."""
    ops = {op.name: _turned(op) if op.name in turned else op for op in pattern.search}
    names: dict[str, str] = {}
    taken: set[str] = set()
    pending = [output.value.name for output in reversed(pattern.outputs)]
    while pending:
        current = ops[pending[-1]]
        missing = [name for name in _names_in(current, Ref) if name not in names]
        if missing:
            pending.extend(reversed(missing))
            continue
        pending.pop()
        if current.name not in names:
            names[current.name] = unique_name(current.target, taken)

    def renamed(leaf: Any) -> Any:
        return Ref(names[leaf.name]) if isinstance(leaf, Ref) else leaf

    search = tuple(map_leaves(replace(ops[old], name=new), renamed) for old, new in names.items())
    return replace(pattern, search=search, outputs=map_leaves(pattern.outputs, renamed))


def _turned(op: Op) -> Op:
    (first, left), (second, right), *others = op.args
    return replace(op, args=((first, right), (second, left), *others))


def _with_plain_names(pattern: Pattern) -> Pattern:
    """Return the pattern with its inputs, captured numbers and dims called after the order in which they occur."""
    declared = {i.name: i for i in pattern.inputs}
    names = {name: f"%{place}" for place, name in enumerate(_names_in(pattern.search, In | Hole))}
    known = {dim.name for dim in pattern.dims}
    texts = (text for name in names if name in declared for text in declared[name].dims)
    used = dict.fromkeys(name for text in texts for name in _NAME.findall(text) if name in known)
    dims = {name: f"%{place}" for place, name in enumerate(used)}

    def text_of(text: str) -> str:
        return _NAME.sub(lambda found: dims.get(found[0], found[0]), text)

    def renamed(leaf: Any) -> Any:
        if isinstance(leaf, In | Hole):
            return replace(leaf, name=names[leaf.name])
        return Size(text_of(leaf.expr)) if isinstance(leaf, Size) else leaf

    inputs = (Input(names[i.name], i.dtype, tuple(map(text_of, i.dims))) for i in pattern.inputs)
    return replace(
        pattern,
        inputs=tuple(sorted(inputs, key=lambda i: i.name)),
        dims=tuple(sorted((Dim(dims.get(d.name, d.name), d.low) for d in pattern.dims), key=lambda d: d.name)),
        conditions=tuple(sorted(map(text_of, pattern.conditions))),
        captures=tuple(sorted((replace(c, name=names[c.name]) for c in pattern.captures), key=lambda c: c.name)),
        search=map_leaves(pattern.search, renamed),
        outputs=map_leaves(pattern.outputs, renamed),
    )


def _names_in(value: Any, kind: Any) -> list[str]:
    """Return the names in the markers of a kind in a part of a pattern, each once, in the order of the part."""
    names: dict[str, None] = {}

    def note(leaf: Any) -> Any:
        if isinstance(leaf, kind):
            names[leaf.name] = None
        return leaf

    map_leaves(value, note)
    return list(names)
