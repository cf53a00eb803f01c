"""What must hold beside the skeleton: inputs, sizes and outputs as declared, and nothing that leaks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import fx

from kwtrace.binding import State
from kwtrace.constants import is_float, is_size
from kwtrace.matches import Mismatch, require
from kwtrace.normal import View, known, known_equal, same_sizes
from kwtrace.patterns import Pattern, Size, fill
from kwtrace.sizes import Step, condition, evaluator, solve


def check_inputs(skeleton: Pattern, cells: Mapping[str, Any], state: State) -> None:
    """Require dtype, rank, layout and device of every input (law 4).

    Raises:
        Mismatch: naming the input.

    """
    wanted = fill(skeleton.device, cells)
    devices = set(state.devices)
    for declared in skeleton.inputs:
        name, node = declared.name, state.inputs[declared.name]
        value, dtype, rank = node.meta["val"], fill(declared.dtype, cells), len(declared.dims)
        require(value.dtype is dtype, 4, node, lambda: f"dtype of {name}: expected {dtype}, found {value.dtype}")
        require(value.dim() == rank, 4, node, lambda: f"rank of {name}: expected {rank}, found {value.dim()}")
        right = value.device.type == wanted
        require(right, 4, node, lambda: f"device of {name}: expected {wanted}, found {value.device}")
        strided = value.layout is torch.strided
        require(strided, 4, node, lambda: f"layout of {name}: expected torch.strided, found {value.layout}")
        devices.add(value.device)
    require(len(devices) == 1, 4, None, lambda: f"devices: expected one, found {sorted(map(str, devices))}")


def check_sizes(skeleton: Pattern, steps: Sequence[Step], state: State) -> dict[str, Any]:
    """Return the dims, after proving every size, range and condition (law 3).

    Raises:
        Mismatch: naming what can't be proved.

    """
    dims = solve(steps, lambda name, place: state.inputs[name].meta["val"].shape[place])
    if isinstance(dims, str):
        refused = dims
        raise Mismatch(3, None, lambda: refused)
    for dim in skeleton.dims:
        size = dims[dim.name]
        require(known(size >= dim.low), 3, None, lambda: f"dim {dim.name}: expected at least {dim.low}, found {size}")
    for expression, found, owner in state.sizes:
        value = evaluator(expression)(dims)
        proved = is_size(found) and is_float(value) == is_float(found) and known_equal(value, found)
        require(proved, 3, owner, lambda: f"size {expression}: expected {value}, found {found!r}")
    for text in skeleton.conditions:
        require(condition(text)(dims), 3, None, lambda: f"condition: expected {text}, found {dims}")
    return dims


def check_outputs(
    skeleton: Pattern, outputs: Sequence[fx.Node], cells: Mapping[str, Any], dims: Mapping[str, Any]
) -> None:
    """Require dtype and sizes of every output (law 6).

    Raises:
        Mismatch: naming the output.

    """
    for declared, node in zip(skeleton.outputs, outputs, strict=True):
        value = node.meta.get("val")
        if not isinstance(value, torch.Tensor):
            raise Mismatch(6, node, lambda: f"output {node}: expected a tensor, found {value!r}")
        dtype = fill(declared.dtype, cells)
        sizes = [evaluator(d.expr)(dims) if isinstance(d, Size) else d for d in fill(declared.dims, cells)]
        right = value.dtype is dtype and same_sizes(value.shape, sizes)
        found = value
        require(
            right, 6, node, lambda: f"output {node}: expected {dtype} {sizes}, found {found.dtype} {list(found.shape)}"
        )


def check_surroundings(view: View, state: State, outputs: Sequence[fx.Node]) -> None:
    """Require that nothing leaks (law 5).

    No inner node has users outside the match, no mutation lies within it, no output needs another through the outside.

    Raises:
        Mismatch: naming what leaks.

    """
    own = {*state.nodes.values(), *state.passed}
    inside = own & set(state.inputs.values())
    require(not inside, 5, None, lambda: f"inputs: expected none from inside the match, found {inside}")
    boundary = _boundary(view, own)
    require(boundary is None, 5, boundary, lambda: f"expected no mutation or stream switch inside, found {boundary}")
    kept = {*state.inputs.values(), *(value for value in state.holes.values() if isinstance(value, fx.Node))}
    for node in sorted(own - set(outputs)):
        leak = next((user for user in node.users if not view.ends_in(user, own, kept)), None)
        require(leak is None, 5, node, lambda: f"users of {node}: expected none outside the match, found {leak}")
    back = _way_back(own, outputs) if len(outputs) > 1 else None
    require(back is None, 5, back, lambda: f"outputs: expected none that needs another through {back}, found one")


def _boundary(view: View, own: set[fx.Node]) -> fx.Node | None:
    """Return the first boundary between the nodes of a match, if there is one."""
    ordered = sorted(own)
    if view.region(ordered[0]) == view.region(ordered[-1]):
        return None
    node = ordered[0].next
    while view.region(node) == view.region(ordered[0]):
        node = node.next
    return node


def _way_back(own: set[fx.Node], outputs: Sequence[fx.Node]) -> fx.Node | None:
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
