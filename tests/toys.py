"""Small rules, and the operators that they put in place, to try the using side with."""

from __future__ import annotations

import functools
from typing import Annotated

import torch
from torch import Tensor

import kwtrace as kt

F32 = torch.float32
CPU = ("cpu",)
traces_at_match: list[tuple[int, ...]] = []
"""The shape of x at every trace of the replacement of `bounded`."""


@torch.library.custom_op("kwtoys::scaled_exp", mutates_args=())
def scaled_exp(x: Tensor, alpha: float) -> Tensor:
    """Return ``exp(x) * alpha``."""
    return torch.exp(x) * alpha


@torch.library.custom_op("kwtoys::scaled_exp_add", mutates_args=())
def scaled_exp_add(x: Tensor, y: Tensor, alpha: float) -> Tensor:
    """Return ``exp(x) * alpha + y``."""
    return torch.exp(x) * alpha + y


@torch.library.custom_op("kwtoys::low", mutates_args=())
def low(x: Tensor) -> Tensor:
    """Return ``sin(tanh(x))``."""
    return x.tanh().sin()


@torch.library.custom_op("kwtoys::high", mutates_args=())
def high(x: Tensor) -> Tensor:
    """Return ``sin(tanh(x))``."""
    return x.tanh().sin()


@torch.library.custom_op("kwtoys::bounds", mutates_args=())
def bounds(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return the largest and the smallest number of each row."""
    return x.amax(-1), x.amin(-1)


@torch.library.custom_op("kwtoys::negated_topk", mutates_args=())
def negated_topk(x: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Return the ``k`` largest numbers of each row, negated, and their places, one further."""
    values, places = torch.topk(x, k)
    return -values, places + 1


@torch.library.custom_op("kwtoys::flat_expm1", mutates_args=())
def flat_expm1(x: Tensor) -> Tensor:
    """Return ``exp(x) - 1`` of a vector."""
    return torch.exp(x) - 1


@torch.library.custom_op("kwtoys::strided", mutates_args=())
def strided(x: Tensor) -> Tensor:
    """Return ``cos(x) + 1`` with the strides of a transposed tensor."""
    return (x.cos() + 1).t().contiguous().t()


@torch.library.custom_op("kwtoys::normed", mutates_args=())
def normed(x: Tensor, w: Tensor) -> Tensor:
    """Return ``x`` over the root of its mean square, with 0.125 added under the root, times ``w``."""
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 0.125) * w


@strided.register_fake
def _(x: Tensor) -> Tensor:
    return x.new_empty((x.shape[1], x.shape[0])).t()


@scaled_exp.register_fake
def _(x: Tensor, alpha: float) -> Tensor:
    return torch.empty_like(x)


@scaled_exp_add.register_fake
def _(x: Tensor, y: Tensor, alpha: float) -> Tensor:
    return torch.empty_like(x)


@normed.register_fake
def _(x: Tensor, w: Tensor) -> Tensor:
    return torch.empty_like(x)


@low.register_fake
@high.register_fake
@flat_expm1.register_fake
def _(x: Tensor) -> Tensor:
    return torch.empty_like(x)


@bounds.register_fake
def _(x: Tensor) -> tuple[Tensor, Tensor]:
    return x.new_empty(x.shape[:-1]), x.new_empty(x.shape[:-1])


@negated_topk.register_fake
def _(x: Tensor, k: int) -> tuple[Tensor, Tensor]:
    shape = (*x.shape[:-1], k)
    return x.new_empty(shape), x.new_empty(shape, dtype=torch.int64)


@kt.rule(name="scaled", devices=CPU)
def scaled_rule(x: Annotated[Tensor, kt.Shape("m>1 n>1"), F32], *, alpha: float) -> Tensor:
    """Two operators and a captured number."""
    return torch.exp(x) * alpha


@scaled_rule.replacement
def _(x: Tensor, *, alpha: float) -> Tensor:
    return scaled_exp(x, alpha)


@kt.rule(name="scaled_add", devices=CPU)
def scaled_add_rule(
    x: Annotated[Tensor, kt.Shape("m>1 n>1"), F32], y: Annotated[Tensor, kt.Shape("m n"), F32], *, alpha: float
) -> Tensor:
    """What `scaled_rule` searches for, and one operator more."""
    return torch.exp(x) * alpha + y


@scaled_add_rule.replacement
def _(x: Tensor, y: Tensor, *, alpha: float) -> Tensor:
    return scaled_exp_add(x, y, alpha)


def rival(name: str, operator: str, priority: int = 0) -> kt.Rule:
    """Return one of several rules that search for one graph; ``operator`` is what this one puts in place."""

    def search(x: Annotated[Tensor, kt.Shape("m>1 n>1"), F32]) -> Tensor:
        return x.tanh().sin()

    rule = kt.rule(name=name, devices=CPU, priority=priority)(search)

    @rule.replacement
    def _(x: Tensor) -> Tensor:
        result: Tensor = getattr(torch.ops.kwtoys, operator)(x)
        return result

    return rule


@kt.rule(name="bounds", devices=CPU)
def bounds_rule(x: Annotated[Tensor, kt.Shape("m>1 n>1"), F32]) -> tuple[Tensor, Tensor]:
    """Two outputs, neither of which needs the other."""
    return x.amax(-1), x.amin(-1)


@bounds_rule.replacement
def _(x: Tensor) -> tuple[Tensor, Tensor]:
    return bounds(x)


@kt.rule(name="topk", devices=CPU)
def topk_rule(x: Annotated[Tensor, kt.Shape("m>1 n>1"), F32]) -> tuple[Tensor, Tensor]:
    """Both results of an operator that returns two."""
    values, places = torch.topk(x, 2)
    return -values, places + 1


@topk_rule.replacement
def _(x: Tensor) -> tuple[Tensor, Tensor]:
    return negated_topk(x, 2)


@kt.rule(name="flattened", devices=CPU)
def flattened_rule(x: Annotated[Tensor, kt.Shape("m>1 n>1"), F32]) -> Tensor:
    """A replacement that needs the sizes of its input."""
    return torch.exp(x) - 1


@flattened_rule.replacement
def _(x: Tensor) -> Tensor:
    m, n = x.shape
    return flat_expm1(x.reshape(m * n)).reshape(m, n) + torch.full((m, n), 0.0)


@kt.rule(name="linked", devices=CPU)
def linked_rule(
    x: Annotated[Tensor, kt.Shape("m>1 n>1"), F32], y: Annotated[Tensor, kt.Shape("m n"), F32]
) -> tuple[Tensor, Tensor]:
    """Two outputs, of which the second has an input of its own."""
    return x.amax(-1), x + y


@linked_rule.replacement
def _(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    return bounds(x)[0], torch.add(y, x)


@kt.rule(name="strided", devices=CPU)
def strided_rule(x: Annotated[Tensor, kt.Shape("m>1 n>1"), F32]) -> Tensor:
    """A replacement that yields other strides."""
    return torch.cos(x) + 1


@strided_rule.replacement
def _(x: Tensor) -> Tensor:
    return strided(x)


@kt.rule(name="bounded", devices=CPU)
def bounded_rule(x: Annotated[Tensor, kt.Shape("m>1 n>1"), F32], *, alpha: float) -> Tensor:
    """A replacement that is traced at the match."""
    return torch.tanh(x) * alpha


@bounded_rule.replacement(at="match")
def _(x: Tensor, *, alpha: float) -> Tensor:
    traces_at_match.append(tuple(x.shape))
    return low(x).asin() * alpha


@functools.cache
def patterns(*rules: kt.Rule) -> kt.PatternSet:
    """Return the pattern set of some of these rules, traced once."""
    return kt.trace(*rules)
