"""Small rules that tests generate, and import by name from processes of their own."""

from __future__ import annotations

from enum import Enum
from typing import Annotated, Literal

import ops_for_tests as ops
import torch
from torch import Tensor

import kwtrace as kt

T = kt.DTypes("T", torch.float32, torch.bfloat16)
Vector = Annotated[Tensor, kt.Shape("n>1"), torch.float32]


class Mode(Enum):
    """How `relu_enum` treats its input; the values are what the operator takes."""

    NONE = "none"
    TWICE = "twice"


@kt.rule(devices=("cpu",))
def relu_act(x: Vector, *, negate: bool, mode: Literal["none", "twice"]) -> Tensor:
    """Search for an activation after a relu: four variants of one skeleton."""
    return ops.act(torch.relu(x), negate=negate, mode=mode)


@relu_act.replacement
def _(x: Tensor, *, negate: bool, mode: str) -> Tensor:
    return ops.relu_act(x, negate=negate, mode=mode)


@kt.rule(devices=("cpu",))
def relu_scale(x: Vector, *, scale: float) -> Tensor:
    """Search for a relu times a captured number."""
    return torch.relu(x) * scale


@relu_scale.replacement
def _(x: Tensor, *, scale: float) -> Tensor:
    return ops.scaled(x, scale=scale)


@kt.rule(devices=("cpu",))
def relu_enum(x: Annotated[Tensor, kt.Shape("m n>1"), T], *, mode: Mode) -> Tensor:
    """Search for an activation whose mode is an Enum; ``m`` may be 1."""
    return ops.act(torch.relu(x), mode=mode.value)


@relu_enum.replacement
def _(x: Tensor, *, mode: Mode) -> Tensor:
    return ops.relu_act(x, mode=mode.value)
