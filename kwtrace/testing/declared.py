"""Whether what a match binds is what the rule's signature says: every parameter, dtype, device, rank and size."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

import torch

from kwtrace.domains import TensorParameter, read_domain
from kwtrace.matches import Match
from kwtrace.rules import Rule
from kwtrace.shapes import DimSpec
from kwtrace.tracing import dtype_of, shape_of

_Sized = tuple[DimSpec, int]


def undeclared(match: Match, rule: Rule) -> str | None:
    """Return how what a match binds differs from the parameters that its variant declares, or None."""
    domain, axes = read_domain(rule), dict(match.variant.axes)
    unbound = [p.name for p in domain.captured if p.name not in match.kwargs and p.name not in rule.unused]
    if unbound:
        return f"expected a value of {unbound[0]}, found none"
    present = {p.name: p for p in domain.tensors if not p.optional or axes[p.name]}
    if present.keys() != match.inputs.keys():
        return f"expected the inputs {sorted(present)}, found {sorted(match.inputs)}"
    tensors = {name: match.tensors[name] for name in present}
    if len({value.device for value in tensors.values()}) > 1:
        return f"expected one device, found {[str(value.device) for value in tensors.values()]}"
    for name, value in tensors.items():
        problem = _another_kind(present[name], value, axes)
        if problem is not None:
            return problem
    dims = [pair for name, value in tensors.items() for pair in zip(shape_of(present[name], axes), value.shape)]  # noqa: B905 - ranks were compared
    return _another_size(dims)


def _another_kind(parameter: TensorParameter, value: torch.Tensor, axes: Mapping[str, Any]) -> str | None:
    wanted = (dtype_of(parameter, axes), axes["device"], len(shape_of(parameter, axes)))
    found = (value.dtype, value.device.type, value.dim())
    return None if found == wanted else f"{parameter.name}: expected dtype, device, rank {wanted}, found {found}"


def _another_size(dims: Iterable[_Sized]) -> str | None:
    """Return a dim that isn't what its name, or product of names, stands for; names stand alone somewhere or once."""
    given = [(dim, size) for dim, size in dims if not (dim.optional and size == 1)]
    sizes: dict[str, int] = {}
    for dim, size in sorted(given, key=lambda pair: len(pair[0].names)):
        unknown = [name for name in dim.names if name not in sizes]
        known = math.prod(factor if isinstance(factor, int) else sizes.get(factor, 1) for factor in dim.factors)
        if size != known if not unknown else size % known:
            return f"expected {dim.text} with {sizes}, found {size}"
        sizes.update(dict.fromkeys(unknown[:1], size // known) if unknown else {})
        if any(sizes.get(name) == 1 for name in dim.above_one):
            return f"expected {dim.text} above 1, found {size}"
    return None
