"""Small rules, one per clause of the laws, and the operators that they put in place, under ``torch.ops.kwlaws``."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Annotated, Any, Literal

import torch
from torch import Tensor

import kwtrace as kt
from kwtrace.generation import generate_rule

F32 = torch.float32
BF16 = torch.bfloat16
CPU = ("cpu",)
Matrix = Annotated[Tensor, kt.Shape("m>1 n>1"), F32]


def operator(function: Callable[..., Any]) -> Any:
    """Register ``function`` as the operator that fuses what it computes; it is its own fake kernel."""
    made = torch.library.custom_op(f"kwlaws::{function.__name__}", function, mutates_args=())
    made.register_fake(function)
    return made


@operator
def above(x: Tensor) -> Tensor:
    """Return where ``exp(x)`` is above one half."""
    return torch.exp(x) > 0.5


@operator
def total(x: Tensor) -> Tensor:
    """Return the sum of ``exp(x)``."""
    return torch.exp(x).sum()


@operator
def rounded(x: Tensor) -> Tensor:
    """Return ``tanh(exp(x))`` with ``exp(x)`` rounded to bfloat16."""
    return torch.exp(x).to(BF16).to(F32).tanh()


@operator
def edges(x: Tensor) -> Tensor:
    """Return NaN everywhere, by way of a zero whose sign counts."""
    return torch.exp(x) * 0.0 + math.nan


@operator
def signed(x: Tensor) -> Tensor:
    """Return ``exp(x)`` times a zero whose sign counts, plus an int."""
    return torch.exp(x) * 0.0 + 1


@operator
def rooted(x: Tensor) -> Tensor:
    """Return ``relu(x)`` over the root of its width."""
    return torch.relu(x) / x.shape[1] ** 0.5


@operator
def doubled(x: Tensor) -> Tensor:
    """Return ``relu(x) * 2``."""
    return torch.relu(x) * 2


@operator
def joined(x: Tensor, y: Tensor | None = None, *, scale: float = 0.5) -> Tensor:
    """Return ``x * scale``, plus ``y`` where there is one."""
    return x * scale if y is None else x * scale + y


@operator
def exp_joined(x: Tensor, y: Tensor | None = None, *, scale: float = 0.5) -> Tensor:
    """Return `joined` of ``exp(x)``."""
    return torch.exp(x) * scale if y is None else torch.exp(x) * scale + y


@operator
def mode(x: Tensor, *, negate: bool = False, kind: str = "none") -> Tensor:
    """Return ``x``, doubled if ``kind`` is ``"twice"``, negated if ``negate``."""
    y = x * 2 if kind == "twice" else x * 1
    return -y if negate else y


@operator
def relu_mode(x: Tensor, *, negate: bool = False, kind: str = "none") -> Tensor:
    """Return `mode` of ``relu(x)``."""
    y = torch.relu(x) * (2 if kind == "twice" else 1)
    return -y if negate else y


@operator
def relu_scaled(x: Tensor, *, scale: float) -> Tensor:
    """Return ``relu(x) * scale``."""
    return torch.relu(x) * scale


@operator
def observed(x: Tensor) -> None:
    """Return nothing."""


@operator
def folded(x: Tensor) -> Tensor:
    """Return ``exp(x) + 1``, flat."""
    return torch.exp(x).reshape(x.shape[0] * x.shape[1]) + 1


@operator
def tail(x: Tensor) -> Tensor:
    """Return the last row of ``exp(x)``, plus 1."""
    return torch.exp(x)[x.shape[0] - 1 : x.shape[0]] + 1


@operator
def sliced(x: Tensor) -> Tensor:
    """Return ``exp(x) + 1`` less its first column."""
    return torch.exp(x)[:, 1:] + 1


_library = torch.library.Library("kwlaws", "FRAGMENT")
_library.define(
    "constants(Tensor x, *, bool flag, int n, float f, int[] sizes, str text, ScalarType? dtype, Layout? layout, "
    "Device? device, MemoryFormat? format, int? nothing) -> Tensor"
)
_library.impl("constants", lambda x, **_: x * 2, "CompositeExplicitAutograd")


@operator
def typed(x: Tensor) -> Tensor:
    """Return ``exp(x) * 2``."""
    return torch.exp(x) * 2


def declared(search: Callable[..., Any], replacement: Callable[..., Any], **options: Any) -> kt.Rule:
    """Return a rule for the CPU."""
    rule = kt.rule(devices=CPU, **options)(search)
    rule.replacement(replacement)
    return rule


def matrix_rule(search: Callable[..., Any], fused: Any, name: str) -> kt.Rule:
    """Return a rule of one matrix."""

    def of_matrix(x: Matrix) -> Tensor:
        return search(x)  # type: ignore[no-any-return]

    return declared(of_matrix, lambda x: fused(x), name=name)  # noqa: PLW0108 - a replacement is a function, not an operator


above_rule = matrix_rule(lambda x: torch.exp(x) > 0.5, above, "above")
rounded_rule = matrix_rule(lambda x: torch.exp(x).to(BF16).to(F32).tanh(), rounded, "rounded")
edges_rule = matrix_rule(lambda x: torch.exp(x) * 0.0 + math.nan, edges, "edges")
signed_rule = matrix_rule(lambda x: torch.exp(x) * 0.0 + 1, signed, "signed")
rooted_rule = matrix_rule(lambda x: torch.relu(x) / x.shape[1] ** 0.5, rooted, "rooted")


@kt.rule(name="tail", devices=CPU)
def tail_rule(x: Matrix) -> Tensor:
    """A slice that starts at a size."""
    return torch.exp(x)[x.shape[0] - 1 : x.shape[0]] + 1


@tail_rule.replacement
def _(x: Tensor) -> Tensor:
    return tail(x)


@kt.rule(name="total", devices=CPU)
def total_rule(x: Annotated[Tensor, kt.Shape("m n"), F32]) -> Tensor:
    """One number of a matrix of any size, so that nothing behind it tells rank or size."""
    return torch.exp(x).sum()


@total_rule.replacement
def _(x: Tensor) -> Tensor:
    return total(x)


@kt.rule(name="limited", devices=CPU)
def limited_rule(x: Matrix) -> Tensor:
    """A graph that is another one where the height is twice the width."""
    return torch.relu(x) * (3 if x.shape[0] == 2 * x.shape[1] else 2)


@limited_rule.replacement
def _(x: Tensor) -> Tensor:
    return doubled(x)


@kt.rule(name="joined", devices=CPU)
def joined_rule(
    x: Annotated[Tensor, kt.Shape("m>1 n>1"), F32],
    y: Annotated[Tensor | None, kt.Shape("m n"), F32],
    *,
    scale: float,
) -> Tensor:
    """A tensor that may be absent, and a captured number."""
    return joined(torch.exp(x), y, scale=scale)


@joined_rule.replacement
def _(x: Tensor, y: Tensor | None, *, scale: float) -> Tensor:
    return exp_joined(x, y, scale=scale)


@kt.rule(name="paired", devices=CPU)
def paired_rule(
    x: Annotated[Tensor, kt.Shape("m>1 n>1"), F32], y: Annotated[Tensor, kt.Shape("m n"), F32], *, scale: float
) -> Tensor:
    """A tensor that must be there, for an argument that may be None."""
    return joined(torch.exp(x), y, scale=scale)


@paired_rule.replacement
def _(x: Tensor, y: Tensor, *, scale: float) -> Tensor:
    return exp_joined(x, y, scale=scale)


@kt.rule(name="moded", devices=CPU)
def moded_rule(x: Matrix, *, negate: bool, kind: Literal["none", "twice"]) -> Tensor:
    """A bool and a string, both axes."""
    return mode(torch.relu(x), negate=negate, kind=kind)


@moded_rule.replacement
def _(x: Tensor, *, negate: bool, kind: str) -> Tensor:
    return relu_mode(x, negate=negate, kind=kind)


@kt.rule(name="untrue", devices=CPU)
def untrue_rule(x: Matrix, *, alpha: float) -> Tensor:
    """A replacement traced at the match, which isn't proved ahead and sometimes yields another dtype."""
    return torch.exp(x) * alpha


@untrue_rule.replacement(at="match")
def _(x: Tensor, *, alpha: float) -> Tensor:
    made: Tensor = torch.ops.kwtoys.scaled_exp(x, alpha)
    return made.to(BF16) if alpha >= 1.0 else made


def conflicting(x: Matrix, *, negate: bool) -> Tensor:
    """Search for one graph whatever ``negate`` is; the replacement heeds it."""
    return torch.relu(x) * 1.5


def ignoring(x: Matrix, *, negate: bool) -> Tensor:
    """Heed ``negate``; the replacement doesn't."""
    return mode(torch.relu(x), negate=negate)


def vanishing(x: Matrix, *, scale: float) -> Tensor:
    """Search for a graph that doesn't hold ``scale``, which the replacement needs."""
    return torch.relu(x) * 2


def dropping(x: Matrix, *, scale: float) -> Tensor:
    """Heed ``scale``; the replacement doesn't."""
    return torch.relu(x) * scale


conflicting_rule = declared(
    conflicting, lambda x, *, negate: relu_scaled(x, scale=-1.5 if negate else 1.5), name="conflicting"
)
ignoring_rule = declared(ignoring, lambda x, *, negate: relu_mode(x), name="ignoring")  # noqa: PLW0108 - it must not take negate
vanishing_rule = declared(vanishing, lambda x, *, scale: relu_scaled(x, scale=scale), name="vanishing")
dropping_rule = declared(dropping, lambda x, *, scale: relu_scaled(x, scale=2.0), name="dropping")


def generated(rule: kt.Rule) -> kt.PatternSet:
    """Return what could be generated of a rule, whatever was refused."""
    return kt.PatternSet(generate_rule(rule).families)
