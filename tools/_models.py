"""The transformers models that the tools measure: how each is built, what it takes, where its attention is.

Every model has random weights that depend on nothing but a seed, so that two runs measure the same thing.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib
import os
import sys
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor, fx, nn

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    RowT = TypeVar("RowT")
    Columns = Mapping[str, tuple[int, Callable[[RowT], object]]]

os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
try:
    transformers: Any = importlib.import_module("transformers")
except ImportError as error:
    MESSAGE = "this tool needs transformers: pip install 'kwtrace[models]'"
    raise SystemExit(MESSAGE) from error

Inputs = dict[str, Any]
Options = dict[str, Any]

FUSED_OP = "_scaled_dot_product"
UNCACHED: Mapping[str, bool] = {"fx_graph_cache": False}

DTYPES: Mapping[str, torch.dtype] = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}

_PATCH = 8
_MELS = 8
_SEED = 20


@dataclasses.dataclass(frozen=True, kw_only=True)
class Size:
    """The sizes of a model; ``kv_heads`` matters only where heads are grouped, ``tokens`` is the longest sequence."""

    heads: int
    head_dim: int
    kv_heads: int
    layers: int = 2
    tokens: int = 32
    vocab: int = 100

    @property
    def hidden(self) -> int:
        """The width of the residual stream."""
        return self.heads * self.head_dim


@dataclasses.dataclass(frozen=True, kw_only=True)
class Model:
    """One kind of model: its builder, its inputs, the class of its attention, a tiny size and one that people run."""

    build: Callable[[Size], nn.Module]
    inputs: Callable[[Size, int, torch.dtype], Inputs]
    attention: str
    tiny: Size
    real: Size
    fusible: bool = True
    maskable: bool = True

    @property
    def grouped(self) -> bool:
        """Whether several heads share one key and value."""
        return self.tiny.kv_heads < self.tiny.heads


def _decoder_sizes(size: Size) -> dict[str, Any]:
    """The configuration words that Llama and its descendants share."""
    return {
        "hidden_size": size.hidden,
        "intermediate_size": 2 * size.hidden,
        "num_hidden_layers": size.layers,
        "num_attention_heads": size.heads,
        "num_key_value_heads": size.kv_heads,
        "max_position_embeddings": max(128, size.tokens),
        "vocab_size": size.vocab,
    }


def _llama(size: Size) -> nn.Module:
    """Llama with a language model head."""
    config = transformers.LlamaConfig(**_decoder_sizes(size), attn_implementation="eager")
    model: nn.Module = transformers.LlamaForCausalLM(config)
    return model


def _mistral(size: Size) -> nn.Module:
    """Mistral with a language model head, without a sliding window."""
    config = transformers.MistralConfig(**_decoder_sizes(size), sliding_window=None, attn_implementation="eager")
    model: nn.Module = transformers.MistralForCausalLM(config)
    return model


def _qwen2(size: Size) -> nn.Module:
    """Qwen2 with a language model head."""
    config = transformers.Qwen2Config(**_decoder_sizes(size), attn_implementation="eager")
    model: nn.Module = transformers.Qwen2ForCausalLM(config)
    return model


def _gemma2(size: Size) -> nn.Module:
    """Gemma 2, which caps its attention scores with tanh."""
    config = transformers.Gemma2Config(
        **_decoder_sizes(size),
        head_dim=size.head_dim,
        query_pre_attn_scalar=size.head_dim,
        attn_implementation="eager",
    )
    model: nn.Module = transformers.Gemma2ForCausalLM(config)
    return model


def _gpt2(size: Size) -> nn.Module:
    """GPT-2 with a language model head."""
    config = transformers.GPT2Config(
        n_embd=size.hidden,
        n_layer=size.layers,
        n_head=size.heads,
        n_positions=max(128, size.tokens),
        vocab_size=size.vocab,
        attn_implementation="eager",
    )
    model: nn.Module = transformers.GPT2LMHeadModel(config)
    return model


def _opt(size: Size) -> nn.Module:
    """OPT with a language model head."""
    config = transformers.OPTConfig(
        hidden_size=size.hidden,
        word_embed_proj_dim=size.hidden,
        ffn_dim=2 * size.hidden,
        num_hidden_layers=size.layers,
        num_attention_heads=size.heads,
        max_position_embeddings=max(128, size.tokens),
        vocab_size=size.vocab,
        attn_implementation="eager",
    )
    model: nn.Module = transformers.OPTForCausalLM(config)
    return model


def _bert(size: Size) -> nn.Module:
    """BERT with a masked language model head."""
    config = transformers.BertConfig(
        hidden_size=size.hidden,
        intermediate_size=2 * size.hidden,
        num_hidden_layers=size.layers,
        num_attention_heads=size.heads,
        max_position_embeddings=max(128, size.tokens),
        vocab_size=size.vocab,
        attn_implementation="eager",
    )
    model: nn.Module = transformers.BertForMaskedLM(config)
    return model


def _t5(size: Size) -> nn.Module:
    """The encoder of T5, which adds a position bias and doesn't scale."""
    config = transformers.T5Config(
        d_model=size.hidden,
        d_kv=size.head_dim,
        d_ff=2 * size.hidden,
        num_layers=size.layers,
        num_heads=size.heads,
        vocab_size=size.vocab,
        attn_implementation="eager",
    )
    model: nn.Module = transformers.T5EncoderModel(config)
    return model


def _patches(size: Size) -> int:
    """How many patches make the sequence wanted, the class token being one of its tokens; at least one."""
    return max(1, size.tokens - 1)


def _vit(size: Size) -> nn.Module:
    """ViT for images that are one row of patches."""
    config = transformers.ViTConfig(
        hidden_size=size.hidden,
        intermediate_size=2 * size.hidden,
        num_hidden_layers=size.layers,
        num_attention_heads=size.heads,
        image_size=(_PATCH, _PATCH * _patches(size)),
        patch_size=_PATCH,
        attn_implementation="eager",
    )
    model: nn.Module = transformers.ViTModel(config)
    return model


def _whisper(size: Size) -> nn.Module:
    """The encoder of Whisper; the number of positions is a constant of the model."""
    config = transformers.WhisperConfig(
        d_model=size.hidden,
        encoder_layers=size.layers,
        decoder_layers=size.layers,
        encoder_attention_heads=size.heads,
        decoder_attention_heads=size.heads,
        encoder_ffn_dim=2 * size.hidden,
        decoder_ffn_dim=2 * size.hidden,
        max_source_positions=size.tokens,
        num_mel_bins=_MELS,
        vocab_size=size.vocab,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
        decoder_start_token_id=1,
        attn_implementation="eager",
    )
    whole: nn.Module = transformers.WhisperModel(config)
    return whole.get_submodule("encoder")


def _generator() -> torch.Generator:
    """A generator that starts at the same place each time."""
    return torch.Generator().manual_seed(_SEED)


def _text(size: Size, batch: int, _dtype: torch.dtype) -> Inputs:
    """Token numbers, for an encoder."""
    return {"input_ids": torch.randint(3, size.vocab, (batch, size.tokens), generator=_generator())}


def _prompt(size: Size, batch: int, dtype: torch.dtype) -> Inputs:
    """Token numbers, for a decoder that keeps no cache."""
    return {**_text(size, batch, dtype), "use_cache": False}


def _image(size: Size, batch: int, dtype: torch.dtype) -> Inputs:
    """Noise in the form of an image of one row of patches."""
    shape = (batch, 3, _PATCH, _PATCH * _patches(size))
    return {"pixel_values": torch.randn(shape, generator=_generator()).to(dtype)}


def _sound(size: Size, batch: int, dtype: torch.dtype) -> Inputs:
    """Noise in the form of a spectrogram; the encoder halves its length."""
    shape = (batch, _MELS, 2 * size.tokens)
    return {"input_features": torch.randn(shape, generator=_generator()).to(dtype)}


# 24, for a scale that isn't a power of two: a scale that is lost or rounded then shows in the numbers.
_PLAIN = Size(heads=4, kv_heads=4, head_dim=24)
_GROUPED = Size(heads=4, kv_heads=2, head_dim=24)
_BASE = Size(heads=12, kv_heads=12, head_dim=64)

MODELS: Mapping[str, Model] = {
    "llama": Model(
        build=_llama,
        inputs=_prompt,
        attention="LlamaAttention",
        tiny=_GROUPED,
        real=Size(heads=32, kv_heads=8, head_dim=64),
    ),
    "mistral": Model(
        build=_mistral,
        inputs=_prompt,
        attention="MistralAttention",
        tiny=_GROUPED,
        real=Size(heads=32, kv_heads=8, head_dim=128),
    ),
    "qwen2": Model(
        build=_qwen2,
        inputs=_prompt,
        attention="Qwen2Attention",
        tiny=_PLAIN,
        real=Size(heads=16, kv_heads=16, head_dim=64),
    ),
    "bert": Model(build=_bert, inputs=_text, attention="BertSelfAttention", tiny=_PLAIN, real=_BASE),
    "gpt2": Model(build=_gpt2, inputs=_prompt, attention="GPT2Attention", tiny=_PLAIN, real=_BASE),
    "opt": Model(build=_opt, inputs=_prompt, attention="OPTAttention", tiny=_PLAIN, real=_BASE),
    "vit": Model(build=_vit, inputs=_image, attention="ViTAttention", tiny=_PLAIN, real=_BASE, maskable=False),
    "t5": Model(build=_t5, inputs=_text, attention="T5Attention", tiny=_PLAIN, real=_BASE),
    "whisper": Model(
        build=_whisper, inputs=_sound, attention="WhisperAttention", tiny=_PLAIN, real=_BASE, maskable=False
    ),
    "gemma2": Model(
        build=_gemma2,
        inputs=_prompt,
        attention="Gemma2Attention",
        tiny=_GROUPED,
        real=Size(heads=8, kv_heads=4, head_dim=256),
        fusible=False,
    ),
}


def build(model: Model, size: Size, dtype: torch.dtype) -> nn.Module:
    """A model in eval mode whose weights make every layer matter: scores spread enough for the softmax to choose."""
    module = model.build(size).eval().requires_grad_(requires_grad=False)
    generator = _generator()
    for name, parameter in module.named_parameters():
        if parameter.dim() > 1:
            fan_in = parameter[0].numel()
            parameter.normal_(0.0, fan_in**-0.5, generator=generator)
        elif name.endswith("bias"):
            parameter.normal_(0.0, 0.1, generator=generator)
    return module.to(dtype)


def pad(inputs: Inputs) -> Inputs:
    """The inputs with a mask that hides the last quarter of the first sequence."""
    mask = torch.ones_like(inputs["input_ids"])
    mask[0, mask.shape[1] - mask.shape[1] // 4 :] = 0
    return {**inputs, "attention_mask": mask}


def attention_modules(module: nn.Module, model: Model) -> list[nn.Module]:
    """The attention layers of a model, in order."""
    return [part for part in module.modules() if type(part).__name__ == model.attention]


def first_output(output: Any) -> Tensor:
    """The tensor that a model or a layer is there for: logits, the last hidden state or the attention's output."""
    found = output if isinstance(output, Tensor) else output[0]
    if not isinstance(found, Tensor):
        message = f"Expected a tensor as the first output but got {type(found).__name__}"
        raise TypeError(message)
    return found


def models_flag(text: str) -> list[str]:
    """Names of models for a command line; "all" is every one of them."""
    return list(MODELS) if text == "all" else _names(text, MODELS)


def dtypes_flag(text: str) -> list[str]:
    """Names of dtypes for a command line."""
    return _names(text, DTYPES)


def numbers_flag(text: str) -> list[int]:
    """Positive numbers for a command line."""
    words = _words(text)
    if not all(word.isdecimal() and int(word) > 0 for word in words):
        message = f"expected positive numbers with commas between them but got {text!r}"
        raise argparse.ArgumentTypeError(message)
    return [int(word) for word in words]


def _names(text: str, known: Mapping[str, object]) -> list[str]:
    """The words of a flag, all of them known."""
    words = _words(text)
    for word in words:
        if word not in known:
            message = f"expected some of {', '.join(known)} but got {word!r}"
            raise argparse.ArgumentTypeError(message)
    return words


def _words(text: str) -> list[str]:
    """The words between the commas; at least one."""
    words = [word.strip() for word in text.split(",") if word.strip()]
    if not words:
        message = "expected at least one word but got none"
        raise argparse.ArgumentTypeError(message)
    return words


def say(text: str) -> None:
    """Print a line at once, so that a long run shows where it is."""
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


@dataclasses.dataclass(kw_only=True)
class Tally:
    """What is found in the graphs of one compile: all of them, where a graph break split the model."""

    graphs: int = 0
    fused: int = 0

    def add(self, graph: fx.Graph) -> None:
        """Count one graph."""
        self.graphs += 1
        self.fused += sum(node.op == "call_function" and FUSED_OP in str(node.target) for node in graph.nodes)

    def hook(self) -> Callable[[fx.Graph], None]:
        """A pass for Inductor that counts; a plain function, since Inductor copies its configuration."""

        def count(graph: fx.Graph) -> None:
            self.add(graph)

        return count


def kwtrace_options(**inductor_options: object) -> Options:
    """The options for torch.compile that put kwtrace's own rules to use."""
    kwtrace, patterns_gen = importlib.import_module("kwtrace"), importlib.import_module("patterns_gen")
    return dict(kwtrace.options(patterns_gen, **inductor_options))


def difference(left: Tensor, right: Tensor) -> float:
    """The largest absolute difference; nan if either has one."""
    return (left.double() - right.double()).abs().max().item()


def cell(value: object, width: int) -> str:
    """One cell, to the right, or to the left where the width is negative; a dash for what wasn't measured."""
    text = f"{value:.1e}" if isinstance(value, float) else "-" if value is None else str(value)
    return text.rjust(width) if width > 0 else text.ljust(-width)


def line(row: RowT, columns: Columns[RowT]) -> str:
    """A row as text."""
    return "  ".join(cell(read(row), width) for width, read in columns.values()).rstrip()


def header(columns: Columns[RowT]) -> str:
    """The names of the columns, above the words to the left and above the figures to the right."""
    names = ((name.rjust(width) if width > 0 else name.ljust(-width)) for name, (width, _) in columns.items())
    return "  ".join(names).rstrip()
