"""Which attention layers of real models does kwtrace fuse, and what does fusing do to the numbers?

    python tools/models.py                                   # the whole table
    python tools/models.py --models bert,llama --seqs 32 --dynamic static
    python tools/models.py --stock-only                      # what torch manages alone; needs no kwtrace

Each row is one model of transformers with random weights (seeded) and ``attn_implementation="eager"``, in eval mode and
without gradients, for one dtype, batch size, sequence length and kind of sizes. Its columns:

layers     attention layers in the model
fused      nodes ``_scaled_dot_product_*`` in the graphs that Inductor's passes leave, kwtrace in use
grouped    layers that kwtrace rewrote by the rule for grouped heads
stock      the same nodes, torch alone
kw-eager, stock-eager           largest difference of the compiled models' outputs from the eager model's
eager-f64, stock-f64, kw-f64    largest difference of each from the same model run wholly in float64

A row is "ok" when every layer was rewritten by kwtrace, grouped heads by the grouped rule, and when the error against
float64 is no worse than twice the unfused one plus a few ulps. A model for which there is no fused form (Gemma 2, which
caps its scores) is "ok" when nothing was fused and its output is stock torch's, bit for bit. The exit code is 1 if any
row isn't ok.

Sequence lengths. For text it is the number of tokens. ViT's images are a single row of patches, whose class token
counts as one of the tokens: 32 is exact, and 1 becomes 2, an image of one patch. Whisper's encoder has its length as a
constant: a model is made for each, and is fed twice as many frames, which its second convolution halves.

Back ends. ``inductor`` is the whole torch.compile, done once with kwtrace and once without. ``graph`` runs Inductor up
to and with its joint passes, then executes the graph eagerly instead of generating code: a model is traced once, and
that one graph goes through the passes twice, with and without kwtrace. The counts are the same, much sooner.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import dataclasses
import importlib
import itertools
import json
import logging
import sys
import time
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any

import _models
import torch
from _models import say
from torch import Tensor, fx, nn
from torch._dynamo.utils import counters
from torch._inductor import config as inductor_config
from torch._inductor.compile_fx import compile_fx
from torch._inductor.fx_passes.joint_graph import joint_graph_passes
from torch.overrides import TorchFunctionMode

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

GROUPED_RULE = "attention_grouped"
ULPS = 4


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
    """One row of the table, before it is measured."""

    model: str
    dtype: str
    batch: int
    seq: int
    dynamic: bool
    masked: bool


@dataclasses.dataclass(frozen=True, kw_only=True)
class Compiled:
    """What came of one compile: the output, the fused nodes in the graphs, what kwtrace or torch say that they did."""

    output: Tensor
    tally: _models.Tally
    rewrites: int
    grouped: int = 0


@dataclasses.dataclass(frozen=True, kw_only=True)
class Row:
    """One row of the table; what wasn't measured is None."""

    case: Case
    layers: int = 0
    fused: int | None = None
    rewrites: int | None = None
    grouped: int | None = None
    stock: int | None = None
    stock_counter: int | None = None
    graphs: int | None = None
    kw_eager: float | None = None
    stock_eager: float | None = None
    eager_f64: float | None = None
    stock_f64: float | None = None
    kw_f64: float | None = None
    seconds: float = 0.0
    verdict: str = "ok"


class InDoubles(TorchFunctionMode):
    """Turns requests for float32 into ones for float64, so that a model in float64 has no step of less precision."""

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> object:
        """Call ``func`` with float64 wherever float32 was asked for."""
        del types
        if func is Tensor.float:
            func = Tensor.double
        given = {name: self._widen(value) for name, value in (kwargs or {}).items()}
        return func(*(self._widen(value) for value in args), **given)

    @staticmethod
    def _widen(value: object) -> object:
        """float64 for float32, anything else as it is."""
        return torch.float64 if value is torch.float32 else value


class Runnable:
    """A graph with the calling convention that AOTAutograd expects: one list, which the callee may empty."""

    _boxed_call = True

    def __init__(self, choose: Callable[[], fx.GraphModule]) -> None:
        """Keep the function that says which graph runs."""
        self._choose = choose

    def __call__(self, arguments: list[Any]) -> object:
        """Run the graph that is chosen now."""
        return self._choose()(*arguments)


class TwoForms:
    """A back end that makes a stock and a rewritten form of each graph; ``chosen`` is the one to run."""

    def __init__(self, *, rewritten: bool) -> None:
        """Start with nothing compiled; ``rewritten`` says whether kwtrace's form is wanted at all."""
        self.chosen = "stock"
        self.tallies = {"stock": _models.Tally()}
        if rewritten:
            self.tallies["kwtrace"] = _models.Tally()
        self.counted = 0
        self._before: fx.GraphModule | None = None

    def __call__(self, module: fx.GraphModule, inputs: Sequence[Any]) -> object:
        """Compile one graph from Dynamo as Inductor does, up to its code generation."""
        patches: _models.Options = {**_models.UNCACHED, "joint_custom_pre_pass": self._keep}
        return compile_fx(module, inputs, inner_compile=self._finish, config_patches=patches)  # type: ignore[arg-type]

    def _keep(self, graph: fx.Graph) -> None:
        """Copy the graph before the passes change it, and set torch's counter to nothing."""
        counters["inductor"]["fuse_attention"] = 0
        if "kwtrace" in self.tallies:
            self._before = copy.deepcopy(graph.owning_module)

    def _finish(self, module: fx.GraphModule, inputs: Sequence[Any], **_: object) -> Runnable:
        """Take what the stock passes left, make the other form from the copy, count in both."""
        self.counted += counters["inductor"]["fuse_attention"]
        forms = {"stock": module}
        if self._before is not None:
            forms["kwtrace"] = self._rewrite(self._before, inputs)
        for name, form in forms.items():
            form.recompile()
            self.tallies[name].add(form.graph)
        return Runnable(lambda: forms[self.chosen])

    @staticmethod
    def _rewrite(module: fx.GraphModule, inputs: Sequence[Any]) -> fx.GraphModule:
        """Run the joint passes, kwtrace's among them."""
        device = next((value.device for value in inputs if isinstance(value, Tensor)), None)
        with inductor_config.patch(_models.kwtrace_options()):
            passed: fx.GraphModule = joint_graph_passes(module, device)
        return passed


def kwtrace_report() -> tuple[int, int]:
    """How many rewrites kwtrace made since this was last asked, and how many of them by the grouped rule."""
    report = importlib.import_module("kwtrace").stats(reset=True)
    return report.count, sum(report.fired.get(GROUPED_RULE, {}).values())


def run(model: Callable[..., Any], inputs: _models.Inputs) -> Tensor:
    """The output of a model, without gradients."""
    with torch.no_grad():
        return _models.first_output(model(**inputs))


def by_graph(module: nn.Module, inputs: _models.Inputs, *, dynamic: bool, rewritten: bool) -> dict[str, Compiled]:
    """Trace a model once, pass its graph through Inductor's passes with and without kwtrace, run both eagerly."""
    forms = TwoForms(rewritten=rewritten)
    model = torch.compile(module, dynamic=dynamic, backend=forms)
    if rewritten:
        kwtrace_report()
    output = run(model, inputs)
    found = {"stock": Compiled(output=output, tally=forms.tallies["stock"], rewrites=forms.counted)}
    if rewritten:
        rewrites, grouped = kwtrace_report()
        forms.chosen = "kwtrace"
        output, tally = run(model, inputs), forms.tallies["kwtrace"]
        found["kwtrace"] = Compiled(output=output, tally=tally, rewrites=rewrites, grouped=grouped)
    return found


def by_inductor(module: nn.Module, inputs: _models.Inputs, *, dynamic: bool, rewritten: bool) -> dict[str, Compiled]:
    """Compile a model wholly, once for each form."""
    before = counters["inductor"]["fuse_attention"]
    output, tally = compile_wholly(module, inputs, dynamic=dynamic, options=dict)
    counted = counters["inductor"]["fuse_attention"] - before
    found = {"stock": Compiled(output=output, tally=tally, rewrites=counted)}
    if rewritten:
        kwtrace_report()
        output, tally = compile_wholly(module, inputs, dynamic=dynamic, options=_models.kwtrace_options)
        rewrites, grouped = kwtrace_report()
        found["kwtrace"] = Compiled(output=output, tally=tally, rewrites=rewrites, grouped=grouped)
    return found


def compile_wholly(
    module: nn.Module, inputs: _models.Inputs, *, dynamic: bool, options: Callable[..., _models.Options]
) -> tuple[Tensor, _models.Tally]:
    """Compile with torch.compile and run, counting in the graphs that the joint passes leave."""
    torch.compiler.reset()
    tally = _models.Tally()
    chosen = options(**_models.UNCACHED, joint_custom_post_pass=tally.hook())
    return run(torch.compile(module, dynamic=dynamic, options=chosen), inputs), tally


BACKENDS = {"graph": by_graph, "inductor": by_inductor}


def in_doubles(module: nn.Module, inputs: _models.Inputs) -> Tensor:
    """The output of a model in float64, from the same weights and inputs."""
    wide = copy.deepcopy(module).double()
    given = {
        name: value.double() if isinstance(value, Tensor) and value.is_floating_point() else value
        for name, value in inputs.items()
    }
    with InDoubles():
        return run(wide, given)


def measure(case: Case, *, layers: int, backend: str, rewritten: bool) -> Row:
    """Measure one row; whatever goes wrong is its verdict."""
    start = time.perf_counter()
    torch.compiler.reset()
    try:
        row = compare(case, layers=layers, backend=backend, rewritten=rewritten)
    except Exception as error:  # noqa: BLE001 - one model that fails must not hide the others
        text = str(error).strip() or "no message"
        row = Row(case=case, verdict=f"{type(error).__name__}: {text.splitlines()[0]}")
    return dataclasses.replace(row, seconds=time.perf_counter() - start)


def compare(case: Case, *, layers: int, backend: str, rewritten: bool) -> Row:
    """Build a model, run it eagerly, in float64 and compiled, and compare."""
    model = _models.MODELS[case.model]
    size = dataclasses.replace(model.tiny, layers=layers, tokens=case.seq)
    dtype = _models.DTYPES[case.dtype]
    module = _models.build(model, size, dtype)
    inputs = model.inputs(size, case.batch, dtype)
    if case.masked:
        inputs = _models.pad(inputs)
    exact = in_doubles(module, inputs)
    eager = run(module, inputs)
    found = BACKENDS[backend](module, inputs, dynamic=case.dynamic, rewritten=rewritten)
    stock = found["stock"]
    row = Row(
        case=case,
        layers=len(_models.attention_modules(module, model)),
        stock=stock.tally.fused,
        stock_counter=stock.rewrites,
        graphs=stock.tally.graphs,
        stock_eager=_models.difference(stock.output, eager),
        eager_f64=_models.difference(eager, exact),
        stock_f64=_models.difference(stock.output, exact),
    )
    if rewritten:
        row = with_kwtrace(row, found, eager=eager, exact=exact)
    return dataclasses.replace(row, verdict=judge(row, model, found, exact))


def with_kwtrace(row: Row, found: Mapping[str, Compiled], *, eager: Tensor, exact: Tensor) -> Row:
    """The row with kwtrace's columns filled in."""
    yours = found["kwtrace"]
    return dataclasses.replace(
        row,
        fused=yours.tally.fused,
        rewrites=yours.rewrites,
        grouped=yours.grouped,
        kw_eager=_models.difference(yours.output, eager),
        kw_f64=_models.difference(yours.output, exact),
    )


def judge(row: Row, model: _models.Model, found: Mapping[str, Compiled], exact: Tensor) -> str:
    """Everything that is wrong with a row, or "ok"."""
    wrong = list(stock_faults(row, model))
    if "kwtrace" in found:
        wrong += count_faults(row, model)
        wrong += number_faults(row, model, found, exact)
    return "; ".join(wrong) or "ok"


def stock_faults(row: Row, model: _models.Model) -> Iterator[str]:
    """What would make the table itself wrong."""
    if row.layers == 0:
        yield f"no module of class {model.attention}"
    if row.stock != row.stock_counter:
        yield f"torch counts {row.stock_counter} of its own fusions"


def count_faults(row: Row, model: _models.Model) -> Iterator[str]:
    """Layers that kwtrace should have fused and didn't, or fused and shouldn't have."""
    wanted = row.layers if model.fusible else 0
    if row.fused != wanted:
        yield f"fused {row.fused} of {wanted}"
    if row.rewrites != wanted:
        yield f"kwtrace rewrote {row.rewrites} of {wanted}"
    grouped = wanted if model.grouped else 0
    if row.grouped != grouped:
        yield f"grouped {row.grouped} of {grouped}"


def number_faults(row: Row, model: _models.Model, found: Mapping[str, Compiled], exact: Tensor) -> Iterator[str]:
    """Numbers that fusing made worse; where nothing is fused, numbers that aren't the same."""
    stock, yours = found["stock"].output, found["kwtrace"].output
    if not model.fusible and not torch.equal(stock, yours):
        yield "not equal to stock"
    ulp = torch.finfo(stock.dtype).eps * exact.abs().max().item()
    unfused = row.eager_f64 or 0.0
    if row.kw_f64 is not None and not row.kw_f64 <= 2 * unfused + ULPS * ulp:
        yield "less exact than eager"


COLUMNS: _models.Columns[Row] = {
    "model": (-8, lambda row: row.case.model),
    "dtype": (-8, lambda row: row.case.dtype),
    "batch": (5, lambda row: row.case.batch),
    "seq": (4, lambda row: row.case.seq),
    "sizes": (-7, lambda row: "dynamic" if row.case.dynamic else "static"),
    "mask": (-6, lambda row: "padded" if row.case.masked else "none"),
    "layers": (6, lambda row: row.layers),
    "fused": (5, lambda row: row.fused),
    "grouped": (7, lambda row: row.grouped),
    "stock": (5, lambda row: row.stock),
    "kw-eager": (8, lambda row: row.kw_eager),
    "stock-eager": (11, lambda row: row.stock_eager),
    "eager-f64": (9, lambda row: row.eager_f64),
    "stock-f64": (9, lambda row: row.stock_f64),
    "kw-f64": (9, lambda row: row.kw_f64),
    "s": (5, lambda row: f"{row.seconds:.1f}"),
    "verdict": (-7, lambda row: row.verdict),
}


def summary(rows: Sequence[Row], *, rewritten: bool) -> Iterator[str]:
    """One line for each model: how many layers were fused in all of its rows."""
    for name, group in itertools.groupby(rows, key=lambda row: row.case.model):
        mine = list(group)
        layers = sum(row.layers for row in mine)
        fused = f"{sum(row.fused or 0 for row in mine)} with kwtrace, " if rewritten else ""
        grouped = sum(row.grouped or 0 for row in mine)
        of_them = f"({grouped} grouped) " if grouped else ""
        stock = sum(row.stock or 0 for row in mine)
        bad = sum(row.verdict != "ok" for row in mine)
        yield f"{name:8}  {layers} layers in {len(mine)} rows; {fused}{of_them}{stock} by torch; {bad} not ok"


def save(path: Path, rows: Sequence[Row], arguments: argparse.Namespace) -> None:
    """Write the rows and what they were measured with."""
    report = {
        "torch": torch.__version__,
        "transformers": _models.transformers.__version__,
        "backend": arguments.backend,
        "rows": [dataclasses.asdict(row) for row in rows],
    }
    path.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")


def cases(arguments: argparse.Namespace) -> Iterator[Case]:
    """The rows to measure, model by model."""
    sizes = {"static": [False], "dynamic": [True], "both": [False, True]}[arguments.dynamic]
    masks = {"none": [False], "padded": [True], "both": [False, True]}[arguments.masks]
    grid = (arguments.models, arguments.dtypes, sizes, masks, arguments.batches, arguments.seqs)
    for model, dtype, dynamic, masked, batch, seq in itertools.product(*grid):
        if not masked or _models.MODELS[model].maskable:
            yield Case(model=model, dtype=dtype, batch=batch, seq=seq, dynamic=dynamic, masked=masked)


def parser() -> argparse.ArgumentParser:
    """The command line."""
    made = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    made.add_argument("--models", type=_models.models_flag, default="all", help="names, comma-separated (default: all)")
    made.add_argument(
        "--dtypes",
        type=_models.dtypes_flag,
        default="float32,bfloat16",
        help="of float32, bfloat16, float16 (default: the first two)",
    )
    made.add_argument("--batches", type=_models.numbers_flag, default="1,2", help="batch sizes (default: 1,2)")
    made.add_argument("--seqs", type=_models.numbers_flag, default="1,32", help="sequence lengths (default: 1,32)")
    made.add_argument(
        "--dynamic", choices=("static", "dynamic", "both"), default="both", help="kind of sizes (default: both)"
    )
    made.add_argument(
        "--masks",
        choices=("none", "padded", "both"),
        default="none",
        help="give text models no attention mask, one for a padded batch, or each in turn (default: none)",
    )
    made.add_argument("--layers", type=int, default=2, help="layers of each model (default: 2)")
    made.add_argument(
        "--backend",
        choices=tuple(BACKENDS),
        default="graph",
        help="inductor: all of torch.compile; graph: its passes, then the graph run eagerly (default: graph)",
    )
    made.add_argument("--stock-only", action="store_true", help="only torch's own fusions; kwtrace isn't imported")
    made.add_argument("--json", type=Path, metavar="FILE", help="also write the rows, unrounded, to FILE")
    return made


def main(argv: Sequence[str] | None = None) -> int:
    """Measure and print the table; the exit code says whether all of it is as it should be."""
    arguments = parser().parse_args(argv)
    warnings.filterwarnings("ignore")
    logging.getLogger("torch").setLevel(logging.ERROR)
    say(f"torch {torch.__version__}, transformers {_models.transformers.__version__}, back end {arguments.backend}\n")
    say(_models.header(COLUMNS))
    rows = []
    with contextlib.suppress(KeyboardInterrupt):
        for case in cases(arguments):
            rows.append(
                measure(case, layers=arguments.layers, backend=arguments.backend, rewritten=not arguments.stock_only)
            )
            say(_models.line(rows[-1], COLUMNS))
    say("")
    for text in summary(rows, rewritten=not arguments.stock_only):
        say(text)
    if arguments.json:
        save(arguments.json, rows, arguments)
    complete = len(rows) == sum(1 for _ in cases(arguments))
    return 0 if complete and all(row.verdict == "ok" for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
