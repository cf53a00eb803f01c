"""How fast is the attention layer of real models, compiled with kwtrace and without?

    python tools/attention_speed.py
    python tools/attention_speed.py --models llama --dtypes bfloat16 --seq 2048 --repeats 20

Per model and dtype: a model of one layer, with the head sizes that people run and random weights (seeded), is run once
to see what its attention layer is called with. Then that layer alone (projections, rotary embedding and all, as the
model has them) is compiled by torch.compile twice, with kwtrace's options and with none, and the two are timed in turn,
so that whatever else the machine does touches both alike. The figures are medians.

without, with    milliseconds of one call
ratio            without / with: above 1, kwtrace is faster
fused            fused attention nodes in the graph: torch alone / with kwtrace
difference       the largest between the two outputs

The exit code is 1 if kwtrace left a layer unfused, or fused Gemma 2's, for which there is no fused form.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import logging
import statistics
import sys
import time
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any

import _models
import torch
from _models import say

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import Tensor, nn

WARM_UP = 2


@dataclasses.dataclass(frozen=True, kw_only=True)
class Call:
    """An attention layer, and what its model calls it with."""

    layer: nn.Module
    args: tuple[Any, ...]
    kwargs: dict[str, Any]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Speed:
    """One row of the table; times in milliseconds, one for each repeat."""

    model: str
    dtype: str
    heads: str
    without: list[float]
    stock: int
    within: list[float] = dataclasses.field(default_factory=list)
    fused: int | None = None
    difference: float | None = None

    @property
    def ratio(self) -> float | None:
        """How many times faster the layer is with kwtrace."""
        return statistics.median(self.without) / statistics.median(self.within) if self.within else None


class Called(Exception):  # noqa: N818 - it is no error: it ends a forward pass whose rest isn't needed
    """Raised when the attention layer is reached."""


def capture(model: _models.Model, *, dtype: torch.dtype, batch: int, seq: int) -> Call:
    """Run a model of one layer as far as its attention layer, and keep that layer and its arguments."""
    size = dataclasses.replace(model.real, layers=1, tokens=seq)
    module = _models.build(model, size, dtype)
    layer = _models.attention_modules(module, model)[0]
    seen: list[Call] = []

    def keep(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        seen.append(Call(layer=layer, args=args, kwargs=kwargs))
        raise Called

    handle = layer.register_forward_pre_hook(keep, with_kwargs=True)
    try:
        with torch.no_grad():
            module(**model.inputs(size, batch, dtype))
    except Called:
        pass
    finally:
        handle.remove()
    return seen[0]


def compiled(call: Call, options: Callable[..., _models.Options]) -> tuple[Callable[[], Tensor], _models.Tally]:
    """The layer compiled, as a function of nothing, and what is in its graph.

    Only the layer's first output is asked for, as in a model: the attention weights, which eager attention returns as
    well, are what a fused operator never makes.
    """
    tally = _models.Tally()
    chosen = options(**_models.UNCACHED, joint_custom_post_pass=tally.hook())

    def attend(*args: Any, **kwargs: Any) -> Tensor:
        return _models.first_output(call.layer(*args, **kwargs))

    fast = torch.compile(attend, dynamic=False, options=chosen)

    def run() -> Tensor:
        return fast(*call.args, **call.kwargs)

    run()
    return run, tally


def milliseconds(run: Callable[[], object]) -> float:
    """How long one call takes."""
    start = time.perf_counter()
    run()
    return (time.perf_counter() - start) * 1e3


def measure(name: str, dtype: str, arguments: argparse.Namespace) -> Speed:
    """Compile one model's attention layer both ways and time the two in turn."""
    model = _models.MODELS[name]
    call = capture(model, dtype=_models.DTYPES[dtype], batch=arguments.batch, seq=arguments.seq)
    torch.compiler.reset()
    runs = {"without": compiled(call, dict)}
    if not arguments.stock_only:
        runs["with"] = compiled(call, _models.kwtrace_options)
    times: dict[str, list[float]] = {way: [] for way in runs}
    for turn in range(WARM_UP + arguments.repeats):
        for way, (run, _) in runs.items():
            spent = milliseconds(run)
            times[way] += [spent] if turn >= WARM_UP else []
    row = Speed(
        model=name,
        dtype=dtype,
        heads=f"{model.real.heads}/{model.real.kv_heads} x {model.real.head_dim}",
        without=times["without"],
        stock=runs["without"][1].fused,
    )
    if arguments.stock_only:
        return row
    run, tally = runs["with"]
    difference = _models.difference(run(), runs["without"][0]())
    return dataclasses.replace(row, within=times["with"], fused=tally.fused, difference=difference)


def as_it_should(row: Speed) -> bool:
    """Whether kwtrace, if it was used, fused what it should, and left alone what has no fused form."""
    return row.fused is None or row.fused == int(_models.MODELS[row.model].fusible)


COLUMNS: _models.Columns[Speed] = {
    "model": (-8, lambda row: row.model),
    "dtype": (-8, lambda row: row.dtype),
    "heads": (12, lambda row: row.heads),
    "without ms": (10, lambda row: f"{statistics.median(row.without):.2f}"),
    "with ms": (9, lambda row: f"{statistics.median(row.within):.2f}" if row.within else None),
    "ratio": (7, lambda row: f"{row.ratio:.2f}" if row.ratio else None),
    "fused": (5, lambda row: f"{row.stock}/{'-' if row.fused is None else row.fused}"),
    "difference": (10, lambda row: row.difference),
}


def save(path: Path, rows: Sequence[Speed], arguments: argparse.Namespace) -> None:
    """Write every time of every row and what they were measured with."""
    report = {
        "torch": torch.__version__,
        "transformers": _models.transformers.__version__,
        "cpu": torch.backends.cpu.get_cpu_capability(),
        "threads": torch.get_num_threads(),
        "batch": arguments.batch,
        "seq": arguments.seq,
        "rows": [{**dataclasses.asdict(row), "ratio": row.ratio} for row in rows],
    }
    path.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")


def parser() -> argparse.ArgumentParser:
    """The command line."""
    made = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    made.add_argument("--models", type=_models.models_flag, default="all", help="names, comma-separated (default: all)")
    made.add_argument(
        "--dtypes",
        type=_models.dtypes_flag,
        default="bfloat16,float32",
        help="of float32, bfloat16, float16 (default: the first two)",
    )
    made.add_argument("--batch", type=int, default=1, help="batch size (default: 1)")
    made.add_argument("--seq", type=int, default=1024, help="sequence length (default: 1024)")
    made.add_argument("--repeats", type=int, default=7, help="times that each form is timed (default: 7)")
    made.add_argument("--stock-only", action="store_true", help="only without kwtrace, which isn't imported")
    made.add_argument("--json", type=Path, metavar="FILE", help="also write every time to FILE")
    return made


def main(argv: Sequence[str] | None = None) -> int:
    """Measure and print the table."""
    arguments = parser().parse_args(argv)
    warnings.filterwarnings("ignore")
    logging.getLogger("torch").setLevel(logging.ERROR)
    say(
        f"torch {torch.__version__}, {torch.backends.cpu.get_cpu_capability()}, {torch.get_num_threads()} threads; "
        f"batch {arguments.batch}, sequence {arguments.seq}, median of {arguments.repeats}\n"
    )
    say(_models.header(COLUMNS))
    rows = []
    with torch.no_grad():
        for name in arguments.models:
            for dtype in arguments.dtypes:
                rows.append(measure(name, dtype, arguments))
                say(_models.line(rows[-1], COLUMNS))
    if arguments.json:
        save(arguments.json, rows, arguments)
    return 0 if all(as_it_should(row) for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
