"""Families → matches: a walk of the skeleton from an anchor, then one look-up for all rows.

This is the interpreted matcher. It reads the user's graph through a `View`, so it adds no guard and traces nothing.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from kwtrace import operators
from kwtrace.constants import SYMBOLIC, capture, is_float, is_size, same_constant
from kwtrace.matches import Match, Mismatch, require
from kwtrace.normal import View, is_tensor, known, known_equal, number, same_sizes
from kwtrace.patterns import Family, Hole, In, MatchDevice, Op, Output, Ref, Size, Slot, Value, fill
from kwtrace.sizes import condition, evaluator, plan, solve
from kwtrace.values import exact_key, same


@dataclass(slots=True)
class _State:
    """What a partial match has bound so far."""

    nodes: dict[str, fx.Node] = field(default_factory=dict)
    passed: list[fx.Node] = field(default_factory=list)
    inputs: dict[str, fx.Node] = field(default_factory=dict)
    holes: dict[str, Any] = field(default_factory=dict)
    cells: dict[str, Any] = field(default_factory=dict)
    sizes: list[tuple[str, Any]] = field(default_factory=list)
    devices: list[torch.device] = field(default_factory=list)

    def copy(self) -> _State:
        return _State(
            dict(self.nodes),
            list(self.passed),
            dict(self.inputs),
            dict(self.holes),
            dict(self.cells),
            list(self.sizes),
            list(self.devices),
        )


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
        self.kinds = {capture.name: capture.kind for capture in skeleton.captures}
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
        state = _State()
        self._bind_op(view, self.anchor, node, state)
        state = self._bind_outputs(view, state)
        row = self._find_row(state)
        cells = dict(zip(self.family.columns, row, strict=True))
        self._check_inputs(state, cells)
        dims = self._check_sizes(state)
        outputs = tuple(state.nodes[output.value.name] for output in self.skeleton.outputs)
        self._check_outputs(outputs, cells, dims)
        self._check_surroundings(view, state, outputs)
        axes = dict(self.family.variant(row).axes)
        nodes = tuple(dict.fromkeys((*state.nodes.values(), *state.passed)))
        return Match(self.family, row, {**axes, **state.holes}, state.inputs, dims, nodes, outputs, view.graph)

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

    def _bind_outputs(self, view: View, state: _State) -> _State:
        for output in self.skeleton.outputs[1:]:
            if output.value.name not in state.nodes:
                state = self._bind_output(view, output, state)
        return state

    def _bind_output(self, view: View, output: Output, state: _State) -> _State:
        op = self.ops[output.value.name]
        for node in self._candidates(view, op, state):
            attempt = state.copy()
            try:
                self._bind_op(view, op, node, attempt)
            except Mismatch:
                continue
            return attempt
        raise Mismatch(lambda: f"{op.name}: expected an output {op.target}, found none")

    def _candidates(self, view: View, op: Op, state: _State) -> Iterator[fx.Node]:
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

    def _bind_op(self, view: View, op: Op, node: fx.Node, state: _State) -> None:
        """Bind ``op`` and what it needs, without recursion over deep graphs."""
        pending = [(op, node)]
        while pending:
            current, found = pending.pop()
            bound = state.nodes.get(current.name)
            if bound is not None:
                require(bound is found, lambda: f"{current.name}: expected one node for both its uses, found two")
                continue
            named = found.op == "call_function" and operators.name_of(found.target) == current.target
            require(named, lambda: f"{current.name}: expected {current.target}, found {found.target}")
            state.nodes[current.name] = found
            args = view.args(found)
            require(
                len(args) == len(current.args),
                lambda: f"{current.name}: expected {len(current.args)} arguments, found {len(args)}",
            )
            for name, value in current.args:
                pending += self._bind_value(view, value, args.get(name), state, found)

    def _bind_value(
        self, view: View, value: Value, found: Any, state: _State, owner: fx.Node
    ) -> list[tuple[Op, fx.Node]]:
        """Bind one argument; return the ops that are still to be bound."""
        if isinstance(value, In | Ref):
            return self._bind_tensor(view, value, found, state, owner)
        if isinstance(value, tuple):
            require(
                isinstance(found, tuple) and len(found) == len(value),
                lambda: f"{owner}: expected {value}, found {found}",
            )
            return [op for a, b in zip(value, found, strict=True) for op in self._bind_value(view, a, b, state, owner)]
        if isinstance(value, Hole):
            self._bind_hole(value, found, state, owner)
            return []
        found = number(found)
        require(not isinstance(found, fx.Node), lambda: f"{owner}: expected {value!r}, found the tensor {found}")
        if isinstance(value, Size):
            state.sizes.append((value.expr, found))
        elif isinstance(value, MatchDevice):
            require(
                isinstance(found, torch.device), lambda: f"{owner}: expected the device of the inputs, found {found!r}"
            )
            state.devices.append(found)
        elif isinstance(value, Slot):
            kept = state.cells.setdefault(value.column, found)
            require(
                not isinstance(found, SYMBOLIC) and same(kept, found),
                lambda: f"{owner}: expected {kept!r}, found {found!r}",
            )
        else:
            require(same_constant(value, found), lambda: f"{owner}: expected {value!r}, found {found!r}")
        return []

    def _bind_tensor(
        self, view: View, value: In | Ref, found: Any, state: _State, owner: fx.Node
    ) -> list[tuple[Op, fx.Node]]:
        require(isinstance(found, fx.Node) and is_tensor(found), lambda: f"{owner}: expected a tensor, found {found!r}")
        stripped = view.strip(found, view.region(owner))
        if isinstance(value, In):
            require(
                state.inputs.setdefault(value.name, stripped) is stripped,
                lambda: f"{owner}: expected {value.name} again, found {found}",
            )
            return []
        while found is not stripped:
            state.passed.append(found)
            found = view.identity_source(found)
        return [(self.ops[value.name], stripped)]

    def _bind_hole(self, hole: Hole, found: Any, state: _State, owner: fx.Node) -> None:
        kind = self.kinds[hole.name]
        value = capture(hole, kind, found, owner)
        kept = state.holes.setdefault(hole.name, value)
        agrees = kept is value if isinstance(kept, fx.Node) or isinstance(value, fx.Node) else same(kept, value)
        require(agrees, lambda: f"{owner}: expected {hole.name} = {kept!r} again, found {value!r}")

    def _find_row(self, state: _State) -> tuple[Value, ...]:
        for declared in self.skeleton.inputs:
            node = state.inputs.get(declared.name)
            require(
                node is not None and isinstance(node.meta.get("val"), torch.Tensor),
                lambda: f"{declared.name}: expected a tensor, found {node}",
            )
            assert node is not None
            if isinstance(declared.dtype, Slot):
                dtype = node.meta["val"].dtype
                require(
                    state.cells.setdefault(declared.dtype.column, dtype) is dtype,
                    lambda: f"{declared.name}: expected another dtype, found {dtype}",
                )
        if isinstance(self.skeleton.device, Slot):
            device = next(iter(state.inputs.values())).meta["val"].device.type
            kept = state.cells.setdefault(self.skeleton.device.column, device)
            require(kept == device, lambda: f"expected device {kept}, found {device}")
        key = tuple(exact_key(state.cells[column]) for column in self.keyed)
        row = self.rows.get(key)
        if row is None:
            raise Mismatch(lambda: f"expected one of the {len(self.rows)} variants, found {_shown(self.keyed, state)}")
        return row

    def _check_inputs(self, state: _State, cells: Mapping[str, Any]) -> None:
        wanted = fill(self.skeleton.device, cells)
        devices = set(state.devices)
        for declared in self.skeleton.inputs:
            value = state.inputs[declared.name].meta["val"]
            dtype = fill(declared.dtype, cells)
            require(value.dtype is dtype, lambda: f"{declared.name}: expected {dtype}, found {value.dtype}")
            require(
                value.dim() == len(declared.dims),
                lambda: f"{declared.name}: expected rank {len(declared.dims)}, found {value.dim()}",
            )
            require(
                value.device.type == wanted, lambda: f"{declared.name}: expected device {wanted}, found {value.device}"
            )
            require(
                value.layout is torch.strided,
                lambda: f"{declared.name}: expected a strided tensor, found {value.layout}",
            )
            devices.add(value.device)
        require(len(devices) == 1, lambda: f"expected one device, found {sorted(map(str, devices))}")

    def _check_sizes(self, state: _State) -> dict[str, Any]:
        dims = solve(self.steps, lambda name, place: state.inputs[name].meta["val"].shape[place])
        if isinstance(dims, str):
            refused = dims
            raise Mismatch(lambda: refused)
        for dim in self.skeleton.dims:
            size = dims[dim.name]
            require(known(size >= dim.low), lambda: f"dim {dim.name}: expected at least {dim.low}, found {size}")
        for expression, found in state.sizes:
            value = evaluator(expression)(dims)
            require(is_float(value) == is_float(found), lambda: f"expected {expression} = {value}, found {found!r}")
            require(
                is_size(found) and known_equal(value, found),
                lambda: f"expected {expression} = {value}, found {found!r}",
            )
        for text in self.skeleton.conditions:
            require(condition(text)(dims), lambda: f"expected {text}, found {dims}")
        return dims

    def _check_outputs(self, outputs: tuple[fx.Node, ...], cells: Mapping[str, Any], dims: Mapping[str, Any]) -> None:
        for declared, node in zip(self.skeleton.outputs, outputs, strict=True):
            value = node.meta.get("val")
            require(isinstance(value, torch.Tensor), lambda: f"{node}: expected a tensor, found {value!r}")
            assert isinstance(value, torch.Tensor)
            sizes = [evaluator(d.expr)(dims) if isinstance(d, Size) else d for d in fill(declared.dims, cells)]
            right = value.dtype is fill(declared.dtype, cells) and same_sizes(value.shape, sizes)
            require(
                right, lambda: f"{node}: expected {declared.dtype} {sizes}, found {value.dtype} {list(value.shape)}"
            )

    def _check_surroundings(self, view: View, state: _State, outputs: tuple[fx.Node, ...]) -> None:
        own = {*state.nodes.values(), *state.passed}
        regions = {view.region(node) for node in own}
        require(len(regions) == 1, lambda: "expected no mutation or stream operation inside the match, found one")
        for node in own - set(outputs):
            leak = next((user for user in node.users if not view.ends_in(user, own)), None)
            require(leak is None, lambda: f"{node}: expected no users outside the match, found {leak}")
        back = _way_back(own, outputs) if len(outputs) > 1 else None
        require(
            back is None, lambda: f"expected outputs that don't depend on each other through other nodes, found {back}"
        )
        inside = own & set(state.inputs.values())
        require(not inside, lambda: f"expected inputs from outside the match, found {inside}")


def _way_back(own: set[fx.Node], outputs: tuple[fx.Node, ...]) -> fx.Node | None:
    """Return a node outside the match that one output feeds and another needs, if there is one."""
    last = max(outputs)
    pending = [user for output in outputs for user in output.users if user not in own and user < last]
    seen = set(pending)
    while pending:
        node = pending.pop()
        if not own.isdisjoint(node.users):
            return node
        later = [user for user in node.users if user not in seen and user < last]
        seen.update(later)
        pending += later
    return None


def _shown(columns: tuple[str, ...], state: _State) -> str:
    return ", ".join(f"{column}={state.cells[column]!r}" for column in columns)
