"""A skeleton's operators bound to the nodes of a graph, from an output backwards."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from kwtrace import operators
from kwtrace.constants import SYMBOLIC, capture, same_constant
from kwtrace.matches import Mismatch
from kwtrace.normal import View, is_tensor, number
from kwtrace.patterns import Capture, Hole, In, MatchDevice, Op, Ref, Size, Slot, Value
from kwtrace.values import same

Pending = list[tuple[Op, fx.Node]]


@dataclass(slots=True)
class State:
    """What a partial match has bound so far; ``origins`` says where a column's cell was found: node and argument."""

    nodes: dict[str, fx.Node] = field(default_factory=dict)
    passed: list[fx.Node] = field(default_factory=list)
    inputs: dict[str, fx.Node] = field(default_factory=dict)
    holes: dict[str, Any] = field(default_factory=dict)
    cells: dict[str, Any] = field(default_factory=dict)
    origins: dict[str, tuple[fx.Node, str]] = field(default_factory=dict)
    sizes: list[tuple[str, Any, fx.Node]] = field(default_factory=list)
    devices: list[torch.device] = field(default_factory=list)

    def copy(self) -> State:
        """Return a copy that a failed try may spoil."""
        return State(
            dict(self.nodes),
            list(self.passed),
            dict(self.inputs),
            dict(self.holes),
            dict(self.cells),
            dict(self.origins),
            list(self.sizes),
            list(self.devices),
        )


class Binder:
    """Binds operators, and what they need, into a state."""

    def __init__(self, ops: Mapping[str, Op], captures: Mapping[str, Capture], view: View, state: State) -> None:
        """Take the skeleton's operators, its captured parameters, the graph, and where to bind."""
        self.ops, self.captures, self.view, self.state = ops, captures, view, state

    def bind(self, op: Op, node: fx.Node) -> None:
        """Bind ``op`` to ``node``, and what it needs, without recursion over deep graphs.

        Raises:
            Mismatch: saying what differs.

        """
        pending = [(op, node)]
        while pending:
            pending += self._bind_op(*pending.pop())

    def refuse(self, law: int | None, node: fx.Node, words: Callable[[], str]) -> Pending:
        """Give up; a binder that goes on nevertheless returns that nothing is left to bind here.

        Raises:
            Mismatch: always.

        """
        raise Mismatch(law, node, words)

    def _bind_op(self, op: Op, node: fx.Node) -> Pending:
        bound = self.state.nodes.get(op.name)
        if bound is node:
            return []
        if bound is not None:
            return self.refuse(None, node, lambda: f"{op.target}: expected {bound} for both its uses, found {node}")
        if node.op != "call_function" or operators.name_of(node.target) != op.target:
            return self.refuse(None, node, lambda: f"operator: expected {op.target}, found {_target(node)}")
        self.state.nodes[op.name] = node
        args = self.view.args(node)
        if len(args) != len(op.args):
            return self.refuse(1, node, lambda: f"arguments: expected {len(op.args)}, found {len(args)}")
        pending: Pending = []
        for name, value in op.args:
            pending += self._bind_value(name, value, args.get(name), node)
        return pending

    def _bind_value(self, name: str, value: Value, found: Any, owner: fx.Node) -> Pending:
        """Bind one argument; return the operators that are still to be bound."""
        if isinstance(value, In | Ref):
            return self._bind_tensor(name, value, found, owner)
        if isinstance(value, tuple):
            return self._bind_list(name, value, found, owner)
        if isinstance(value, Hole):
            return self._bind_hole(value, found, owner)
        return self._bind_number(name, value, number(found), owner)

    def _bind_number(self, name: str, value: Value, found: Any, owner: fx.Node) -> Pending:
        if isinstance(found, fx.Node):
            return self.refuse(4, owner, lambda: f"{name}: expected {_shown(value)}, found the tensor {found}")
        if isinstance(value, Size):
            self.state.sizes.append((value.expr, found, owner))
            return []
        if isinstance(value, MatchDevice):
            return self._bind_device(name, found, owner)
        if isinstance(value, Slot):
            return self._bind_cell(name, value.column, found, owner)
        if same_constant(value, found):
            return []
        return self.refuse(law_between(value, found), owner, lambda: f"{name}: expected {value!r}, found {found!r}")

    def _bind_list(self, name: str, value: tuple[Value, ...], found: Any, owner: fx.Node) -> Pending:
        if not isinstance(found, tuple) or len(found) != len(value):
            return self.refuse(1, owner, lambda: f"{name}: expected {_shown(value)}, found {found!r}")
        pending: Pending = []
        for wanted, item in zip(value, found, strict=True):
            pending += self._bind_value(name, wanted, item, owner)
        return pending

    def _bind_device(self, name: str, found: Any, owner: fx.Node) -> Pending:
        if not isinstance(found, torch.device):
            return self.refuse(1, owner, lambda: f"{name}: expected the device of the inputs, found {found!r}")
        self.state.devices.append(found)
        return []

    def _bind_cell(self, name: str, column: str, found: Any, owner: fx.Node) -> Pending:
        kept = self.state.cells.setdefault(column, found)
        self.state.origins.setdefault(column, (owner, name))
        if not isinstance(found, SYMBOLIC) and same(kept, found):
            return []
        return self.refuse(law_between(kept, found), owner, lambda: f"{name}: expected {kept!r}, found {found!r}")

    def _bind_tensor(self, name: str, value: In | Ref, found: Any, owner: fx.Node) -> Pending:
        if not isinstance(found, fx.Node) or not is_tensor(found):
            return self.refuse(4, owner, lambda: f"{name}: expected a tensor, found {found!r}")
        stripped = self.view.strip(found, self.view.region(owner))
        if isinstance(value, In):
            kept = self.state.inputs.setdefault(value.name, stripped)
            if kept is stripped:
                return []
            return self.refuse(4, owner, lambda: f"{name}: expected {value.name} = {kept} again, found {found}")
        while found is not stripped:
            self.state.passed.append(found)
            found = self.view.identity_source(found)
        return [(self.ops[value.name], stripped)]

    def _bind_hole(self, hole: Hole, found: Any, owner: fx.Node) -> Pending:
        try:
            value = capture(hole, self.captures[hole.name], found, owner)
        except Mismatch as mismatch:
            return self.refuse(mismatch.law, owner, mismatch.words)
        kept = self.state.holes.setdefault(hole.name, value)
        symbolic = isinstance(kept, fx.Node) or isinstance(value, fx.Node)
        if kept is value if symbolic else same(kept, value):
            return []
        return self.refuse(2, owner, lambda: f"{hole.name}: expected {kept!r} again, found {value!r}")


def law_between(wanted: Any, found: Any) -> int:
    """Return the law that tells two constants apart: 3 for a symbolic one, 2 if type or sign differs, else 1."""
    if isinstance(found, SYMBOLIC):
        return 3
    return 2 if type(wanted) is not type(found) or wanted == found else 1


def _target(node: fx.Node) -> str:
    return operators.name_of(node.target) if node.op == "call_function" else f"{node.op} {node}"


def _shown(value: Value) -> str:
    if isinstance(value, tuple):
        return f"({', '.join(map(_shown, value))})"
    if isinstance(value, Slot):
        return f"one of the values of {value.column}"
    return value.expr if isinstance(value, Size) else getattr(value, "name", repr(value))
