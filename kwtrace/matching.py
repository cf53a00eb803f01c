"""Families → matches: a walk of the skeleton from an anchor, then one look-up for all rows.

This is the interpreted matcher. It reads the user's graph through a `View`, so it adds no guard and traces nothing.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import fx

from kwtrace import operators
from kwtrace.binding import Binder, State
from kwtrace.checking import check_inputs, check_outputs, check_sizes, check_surroundings
from kwtrace.matches import Match, Mismatch, require
from kwtrace.normal import View
from kwtrace.patterns import Family, Op, Output, Slot, Value
from kwtrace.sizes import plan
from kwtrace.values import exact_key


class Matcher:
    """Finds one family in a graph."""

    def __init__(self, family: Family) -> None:
        """Prepare the skeleton and the table of rows."""
        skeleton = family.skeleton
        self.family = family
        self.skeleton = skeleton
        self.ops = {op.name: op for op in skeleton.search}
        self.anchor = self.ops[skeleton.outputs[0].value.name]
        self.required = frozenset(op.target for op in skeleton.search)
        self.steps = plan((i.name, i.dims) for i in skeleton.inputs) or ()
        self.captures = {capture.name: capture for capture in skeleton.captures}
        self.random = [op.name for op in skeleton.search if operators.is_random(operators.resolve(op.target))]
        self.keyed = self._keyed_columns()
        places = [family.columns.index(column) for column in self.keyed]
        self.rows = {tuple(exact_key(row[i]) for i in places): row for row in family.rows}

    @property
    def size(self) -> int:
        """Return the number of operators in the skeleton."""
        return len(self.ops)

    def match(self, view: View, node: fx.Node) -> Match | None:
        """Return the match anchored at ``node``, or None."""
        try:
            return self.try_match(view, node)
        except Mismatch:
            return None

    def try_match(self, view: View, node: fx.Node) -> Match:
        """Return the match anchored at ``node``.

        Raises:
            Mismatch: saying what differs.

        """
        state = State()
        Binder(self.ops, self.captures, view, state).bind(self.anchor, node)
        state = self._bind_outputs(view, state)
        drawn = [state.nodes[name] for name in self.random]
        require(
            len(set(drawn)) == len(drawn), 5, node, lambda: f"random numbers: expected {len(drawn)} draws, found less"
        )
        self.read_inputs(state)
        row = self._find_row(state)
        cells = dict(zip(self.family.columns, row, strict=True))
        check_inputs(self.skeleton, cells, state)
        dims = check_sizes(self.skeleton, self.steps, state)
        outputs = tuple(state.nodes[output.value.name] for output in self.skeleton.outputs)
        check_outputs(self.skeleton, outputs, cells, dims)
        check_surroundings(view, state, outputs)
        axes = dict(self.family.variant(row).axes)
        nodes = tuple(dict.fromkeys((*state.nodes.values(), *state.passed)))
        return Match(self.family, row, {**axes, **state.holes}, state.inputs, dims, nodes, outputs, view.graph)

    def read_inputs(self, state: State) -> None:
        """Read the cells that the inputs decide: their dtypes and their device.

        Raises:
            Mismatch: if an input is no tensor, or two inputs disagree on a cell.

        """
        for declared in self.skeleton.inputs:
            node = state.inputs.get(declared.name)
            value = None if node is None else node.meta.get("val")
            if node is None or not isinstance(value, torch.Tensor):
                found = node
                raise Mismatch(4, node, lambda: f"{declared.name}: expected a tensor, found {found}")
            if isinstance(declared.dtype, Slot):
                self._read_cell(state, declared.dtype.column, value.dtype, (node, f"dtype of {declared.name}"))
            if isinstance(self.skeleton.device, Slot):
                self._read_cell(state, self.skeleton.device.column, value.device.type, (node, "device"))

    def _read_cell(self, state: State, column: str, found: Any, origin: tuple[fx.Node, str]) -> None:
        kept = state.cells.setdefault(column, found)
        state.origins.setdefault(column, origin)
        require(kept == found, 4, origin[0], lambda: f"{origin[1]}: expected {kept}, found {found}")

    def _keyed_columns(self) -> tuple[str, ...]:
        """Return the columns that the graph decides on; the others only tell what to put in place."""
        found: dict[str, None] = {}

        def note(value: Any) -> None:
            if isinstance(value, Slot):
                found[value.column] = None
            elif isinstance(value, tuple):
                for item in value:
                    note(item)

        note(self.skeleton.device)
        for declared in self.skeleton.inputs:
            note(declared.dtype)
        for op in self.skeleton.search:
            note(tuple(value for _, value in op.args))
        return tuple(found)

    def _bind_outputs(self, view: View, state: State) -> State:
        for output in self.skeleton.outputs[1:]:
            if output.value.name not in state.nodes:
                state = self._bind_output(view, output, state)
        return state

    def _bind_output(self, view: View, output: Output, state: State) -> State:
        op = self.ops[output.value.name]
        for node in self._candidates(view, op, state):
            attempt = state.copy()
            try:
                Binder(self.ops, self.captures, view, attempt).bind(op, node)
            except Mismatch:
                continue
            return attempt
        raise Mismatch(None, None, lambda: f"{op.name}: expected an output {op.target}, found none")

    def _candidates(self, view: View, op: Op, state: State) -> Iterator[fx.Node]:
        """Yield the nodes that use, directly or through identities and further operands, what is already bound."""
        pending = [*state.nodes.values(), *state.inputs.values()]
        seen = set(pending)
        while pending:
            for user in pending.pop(0).users:
                if user in seen or user.op != "call_function":
                    continue
                seen.add(user)
                if operators.name_of(user.target) == op.target and not view.identity_source(user) is not None:
                    yield user
                if len(seen) < len(self.ops) * 16:
                    pending.append(user)

    def _find_row(self, state: State) -> tuple[Value, ...]:
        row = self.rows.get(tuple(exact_key(state.cells[column]) for column in self.keyed))
        if row is None:
            raise Mismatch(1, None, lambda: f"expected one of the {len(self.rows)} variants, found {_shown(state)}")
        return row


def _shown(state: State) -> str:
    return ", ".join(f"{column}={value!r}" for column, value in state.cells.items())
