"""Why isn't the attention of these models fused? What `kwtrace.explain` says of three of them.

    python tools/explain_models.py

Gemma 2 caps its scores with a tanh. T5 adds a padding mask to its position bias, and the sum to its scores. Llama is
made not to fuse by one edit: its softmax is taken over the queries. The models have random weights and one layer.
"""

from __future__ import annotations

import dataclasses
import sys
import warnings
from typing import TYPE_CHECKING, Any
from unittest import mock

import _models
import torch
from transformers.models.llama import modeling_llama

import patterns_gen
from kwtrace.inductor import explain_compiled
from kwtrace.loading import as_pattern_set

if TYPE_CHECKING:
    from collections.abc import Callable

CASES = ("gemma2", "t5", "llama")


def attend_over_queries(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float,
    **_: object,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return Llama's attention with its softmax over the wrong dim, in [b, s, h, d], and the weights."""
    key = modeling_llama.repeat_kv(key, module.num_key_value_groups)
    value = modeling_llama.repeat_kv(value, module.num_key_value_groups)
    scores = torch.matmul(query, key.transpose(2, 3)) * scaling
    scores = scores if attention_mask is None else scores + attention_mask
    weights = torch.softmax(scores, dim=-2, dtype=torch.float32).to(query.dtype)
    return torch.matmul(weights, value).transpose(1, 2).contiguous(), weights


def caller(name: str) -> Callable[[], Any]:
    """Return a function that runs the model called ``name``."""
    model = _models.MODELS[name]
    size = dataclasses.replace(model.tiny, layers=1)
    module = _models.build(model, size, torch.float32)
    inputs = model.inputs(size, 2, torch.float32)
    inputs = _models.pad(inputs) if name == "t5" else inputs
    return lambda: module(**inputs)


def main() -> int:
    """Print the explanations."""
    warnings.simplefilter("ignore")
    shipped = as_pattern_set(patterns_gen)
    patterns = shipped.select("attention") | shipped.select("attention_grouped")
    for name in CASES:
        torch.compiler.reset()
        with mock.patch.object(modeling_llama, "eager_attention_forward", attend_over_queries):
            for explanation in explain_compiled(caller(name), (), patterns):
                _models.say(f"{name}\n{explanation}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
