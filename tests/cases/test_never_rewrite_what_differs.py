"""Cases a1 to a10: a graph that differs from the pattern in one thing stays as it is, to the bit."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable
from typing import Annotated, Any, Literal

import pytest
import torch
from graphs import assert_as_exact, calls, hand_written, only, run_checked, targets, traced
from ops_for_cases import act, add_act, batch_norm, gquant, qmm_relu, quant, relu_rms, rms, rms_gquant, rms_quant
from torch import Tensor

import kwtrace as kt
import patterns_gen

aten = torch.ops.aten
CPU = ("cpu",)
F32 = torch.float32
BF16 = torch.bfloat16
T = kt.DTypes("T", F32, BF16)
MATRIX = kt.Shape("m>1 n>1")
MODES = ["real", "symbolic"]

ADD_ACT = "kwcases.add_act.default"
RELU_RMS = "kwcases.relu_rms.default"
RMS_QUANT = "kwcases.rms_quant.default"
RMS_GQUANT = "kwcases.rms_gquant.default"
QMM_RELU = "kwcases.qmm_relu.default"
BATCH_NORM = "kwcases.batch_norm.default"
SDPA = "scaled_dot_product"


@functools.cache
def patterns_of(rule: kt.Rule) -> kt.PatternSet:
    """Return the patterns of a rule, traced once."""
    return kt.trace(rule)


def assert_equal(found: Any, expected: Any) -> None:
    """Check one result, or several, to the bit; NaN equals NaN."""
    for one, other in zip(*(x if isinstance(x, tuple | list) else (x,) for x in (found, expected)), strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=0, equal_nan=True)


def assert_untouched(
    patterns: kt.PatternSet, function: Callable[..., Any], *inputs: Tensor, mode: Any = "real"
) -> None:
    """Check that nothing matches, that every operator is still there, and that the result is the same to the bit."""
    graph = traced(function, *inputs, mode=mode)
    before, expected = targets(graph), graph(*inputs)
    assert kt.apply(graph, patterns).count == 0
    assert targets(graph) == before
    assert_equal(run_checked(graph, *inputs), expected)


def assert_fused(
    patterns: kt.PatternSet, function: Callable[..., Any], fused: str, *inputs: Tensor, mode: Any = "real"
) -> kt.Report:
    """Check that the fused operator is there once, and yields what the graph yielded before, to the bit."""
    graph = traced(function, *inputs, mode=mode)
    assert not calls(graph, fused)
    expected = graph(*inputs)
    report = kt.apply(graph, patterns)
    assert report.count == 1
    assert len(calls(graph, fused)) == 1
    assert_equal(run_checked(graph, *inputs), expected)
    return report


def fired(report: kt.Report) -> list[str]:
    """Return the variants that fired."""
    return [variant for counts in report.fired.values() for variant in counts]


def integers(*shape: int, dtype: torch.dtype = F32) -> Tensor:
    """Return small integers, whose sums and products are exact in any order."""
    return torch.randint(-4, 5, shape).to(dtype)


# a1: a permutation


@kt.rule(devices=CPU)
def add_transposed(
    q: Annotated[Tensor, kt.Shape("b h s>1 t>1"), F32], k: Annotated[Tensor, kt.Shape("b h t s"), F32]
) -> Tensor:
    """Search for an addition of K with its last two dims swapped."""
    return act(q + k.transpose(-2, -1), mode="tanh")


@add_transposed.replacement
def _(q: Tensor, k: Tensor) -> Tensor:
    return add_act(q, k.transpose(-2, -1), mode="tanh")


@pytest.fixture(scope="module")
def transposed() -> kt.PatternSet:
    """Return the patterns of `add_transposed`."""
    return kt.trace(add_transposed)


SWAP = (0, 1, 3, 2)
OTHERS = [order for order in itertools.permutations(range(4)) if order != SWAP]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("order", OTHERS, ids=str)
def test_a1_no_other_permutation_matches(transposed: kt.PatternSet, order: tuple[int, ...], mode: Any) -> None:
    """All sizes are equal, so that every permutation of K is legal; only the pattern's own may match."""
    q, k = torch.randn(4, 4, 4, 4), torch.randn(4, 4, 4, 4)
    assert_untouched(transposed, lambda q, k: act(q + k.permute(order), mode="tanh"), q, k, mode=mode)


@pytest.mark.parametrize("mode", MODES)
def test_a1_sizes_that_differ_but_allow_both(transposed: kt.PatternSet, mode: Any) -> None:
    """K of as many heads as columns: permuted ``(0, 2, 3, 1)`` it has the shape that the pattern wants."""
    q, k = torch.randn(2, 4, 5, 4), torch.randn(2, 4, 4, 5)
    assert k.permute(0, 2, 3, 1).shape == q.shape
    assert k.transpose(-2, -1).shape == q.shape
    assert_untouched(transposed, lambda q, k: act(q + k.permute(0, 2, 3, 1), mode="tanh"), q, k, mode=mode)
    assert_fused(transposed, lambda q, k: act(q + k.permute(SWAP), mode="tanh"), ADD_ACT, q, k, mode=mode)


SPELLINGS: dict[str, Callable[[Tensor], Tensor]] = {
    "transpose": lambda k: k.transpose(-2, -1),
    "transpose of positive dims": lambda k: k.transpose(2, 3),
    "transpose the other way": lambda k: k.transpose(-1, -2),
    "permute": lambda k: k.permute(SWAP),
    "permute with negative dims": lambda k: k.permute(0, 1, -1, -2),
    "mT": lambda k: k.mT,
}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("spelling", SPELLINGS)
def test_a1_every_spelling_of_the_right_permutation_matches(
    transposed: kt.PatternSet, spelling: str, mode: Any
) -> None:
    """The pattern's own permutation matches, however it is written."""
    q, k = torch.randn(4, 4, 4, 4), torch.randn(4, 4, 4, 4)
    assert_fused(transposed, lambda q, k: act(q + SPELLINGS[spelling](k), mode="tanh"), ADD_ACT, q, k, mode=mode)


def attention(order: tuple[int, ...] = SWAP, dim: int = -1) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    """Return attention with K permuted in some order and softmax over some dim."""
    return lambda q, k, v: (q @ k.permute(order) * 0.125).softmax(dim) @ v


def heads(size: int = 8) -> list[Tensor]:
    """Return q, k and v of which all dims are equal."""
    return [torch.randn(size, size, size, size) for _ in range(3)]


def assert_attention(shipped: kt.PatternSet, function: Callable[..., Tensor], count: int, mode: Any = "real") -> None:
    """Check how often the shipped rules fuse ``function``, and that the result is right."""
    inputs = heads()
    graph = traced(function, *inputs, mode=mode)
    expected = graph(*inputs)
    assert kt.apply(graph, shipped).count == count
    assert sum(SDPA in target for target in targets(graph)) == count
    found = run_checked(graph, *inputs)
    if count:
        assert_as_exact(found, function(*inputs), function(*(x.double() for x in inputs)))
    else:
        assert torch.equal(found, expected)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("order", [(0, 2, 3, 1), (0, 3, 1, 2), (1, 0, 3, 2), (3, 1, 0, 2), (0, 3, 2, 1)], ids=str)
def test_a1_attention_with_another_permutation_of_k(shipped: kt.PatternSet, order: tuple[int, ...], mode: Any) -> None:
    """The shipped attention leaves K in any other order than its own alone."""
    assert_attention(shipped, attention(order), 0, mode)


@pytest.mark.parametrize("mode", MODES)
def test_a1_attention_with_its_own_permutation_of_k(shipped: kt.PatternSet, mode: Any) -> None:
    """The shipped attention takes its own permutation written out."""
    assert_attention(shipped, attention(SWAP), 1, mode)


@pytest.mark.slow
@pytest.mark.usefixtures("fresh_compiler")
def test_a1_through_torch_compile() -> None:
    """A compile with the shipped rules fuses the right permutation and leaves the other alone."""
    inputs = heads()

    def both(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        return attention((0, 2, 3, 1))(q, k, v), attention(SWAP)(q, k, v)

    with torch.no_grad():
        found = torch.compile(both, options=kt.options(patterns_gen))(*inputs)
    assert kt.stats().count == 1
    for one, other, exact in zip(found, both(*inputs), both(*(x.double() for x in inputs)), strict=True):
        assert_as_exact(one, other, exact)


# a2: a dim


@kt.rule(devices=CPU)
def softmax_last(
    x: Annotated[Tensor, kt.Shape("b m n>1"), F32], y: Annotated[Tensor, kt.Shape("b m n"), F32]
) -> Tensor:
    """Search for a softmax over the last dim, something added, and an activation."""
    return act(x.softmax(-1) + y, mode="tanh")


@softmax_last.replacement
def _(x: Tensor, y: Tensor) -> Tensor:
    return add_act(x.softmax(-1), y, mode="tanh")


@kt.rule(devices=CPU)
def softmax_either(
    x: Annotated[Tensor, kt.Shape("b>1 m n>1"), F32],
    y: Annotated[Tensor, kt.Shape("b m n"), F32],
    *,
    dim: Literal[-1, 0],
) -> Tensor:
    """Search for a softmax over the first dim or the last."""
    return act(x.softmax(dim) + y, mode="tanh")


@softmax_either.replacement
def _(x: Tensor, y: Tensor, *, dim: int) -> Tensor:
    return add_act(x.softmax(dim), y, mode="tanh")


def softmax_over(dim: int) -> Callable[[Tensor, Tensor], Tensor]:
    """Return the function that both rules search for, with a dim of choice."""
    return lambda x, y: act(x.softmax(dim) + y, mode="tanh")


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("dim", [0, -2, 1, -3])
def test_a2_softmax_over_another_dim(dim: int, mode: Any) -> None:
    """Of a rule for the last dim, no other dim is taken, though all sizes are equal."""
    assert_untouched(patterns_of(softmax_last), softmax_over(dim), *torch.randn(2, 4, 4, 4), mode=mode)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("dim", [-1, 2])
def test_a2_softmax_over_the_last_dim(dim: int, mode: Any) -> None:
    """The last dim is taken, counted from either end."""
    assert_fused(patterns_of(softmax_last), softmax_over(dim), ADD_ACT, *torch.randn(2, 4, 4, 4), mode=mode)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(("dim", "axis"), [(-1, -1), (2, -1), (0, 0), (-3, 0)])
def test_a2_each_variant_takes_its_own_dim(dim: int, axis: int, mode: Any) -> None:
    """With the dim an axis, a graph is taken by the variant of its dim, and not by the other alone."""
    patterns = patterns_of(softmax_either)
    x, y = torch.randn(2, 4, 4, 4)
    report = assert_fused(patterns, softmax_over(dim), ADD_ACT, x, y, mode=mode)
    assert fired(report) == [f"softmax_either[dim={axis}, device='cpu']"]
    other = patterns.select(dim=-1 - axis)
    assert other.variants
    assert_untouched(other, softmax_over(dim), x, y, mode=mode)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("dim", [1, -2])
def test_a2_a_dim_outside_the_axis(dim: int, mode: Any) -> None:
    """A dim that is no value of the axis is taken by no variant."""
    assert_untouched(patterns_of(softmax_either), softmax_over(dim), *torch.randn(2, 4, 4, 4), mode=mode)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(("dim", "count"), [(0, 0), (1, 0), (-2, 0), (2, 0), (-1, 1), (3, 1)])
def test_a2_attention(shipped: kt.PatternSet, dim: int, count: int, mode: Any) -> None:
    """The shipped attention takes a softmax over the last dim only."""
    assert_attention(shipped, attention(dim=dim), count, mode)


# a3: an argument at its default


def summed(dtype: torch.dtype | None) -> Callable[[Tensor, Tensor], Tensor]:
    """Return a running count in some dtype, and what follows it."""
    return lambda x, y: act(torch.cumsum(x, 1, dtype=dtype).float() + y, mode="sigmoid")


@kt.rule(devices=CPU)
def cumsum_plain(x: Annotated[Tensor, MATRIX, torch.bool], y: Annotated[Tensor, kt.Shape("m n"), F32]) -> Tensor:
    """Search for a running count that leaves the dtype at its default."""
    return act(torch.cumsum(x, 1).float() + y, mode="sigmoid")


@cumsum_plain.replacement
def _(x: Tensor, y: Tensor) -> Tensor:
    return add_act(torch.cumsum(x, 1).float(), y, mode="sigmoid")


@kt.rule(devices=CPU)
def cumsum_typed(
    x: Annotated[Tensor, MATRIX, torch.bool],
    y: Annotated[Tensor, kt.Shape("m n"), F32],
    *,
    dtype: Annotated[torch.dtype | None, kt.OneOf(None, BF16)],
) -> Tensor:
    """Search for a running count in bfloat16, or in the default dtype."""
    return act(torch.cumsum(x, 1, dtype=dtype).float() + y, mode="sigmoid")


@cumsum_typed.replacement
def _(x: Tensor, y: Tensor, *, dtype: torch.dtype | None) -> Tensor:
    return add_act(torch.cumsum(x, 1, dtype=dtype).float(), y, mode="sigmoid")


def counted() -> tuple[Tensor, Tensor]:
    """Return a bool input whose running count bfloat16 can't hold, and a summand that brings it back to a few."""
    x = torch.ones(3, 300, dtype=torch.bool)
    return x, 0.125 - torch.arange(300.0).expand(3, 300)


def test_a3_a_running_count_depends_on_its_dtype() -> None:
    """The input of the tests below tells the dtypes apart."""
    x, y = counted()
    assert not torch.equal(summed(None)(x, y), summed(BF16)(x, y))
    assert not torch.equal(summed(torch.float16)(x, y), summed(BF16)(x, y))


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("dtype", [BF16, torch.float16, F32, torch.int32], ids=str)
def test_a3_a_dtype_where_the_pattern_has_the_default(dtype: torch.dtype, mode: Any) -> None:
    """A node with a dtype is never taken by a pattern that leaves it out."""
    assert_untouched(patterns_of(cumsum_plain), summed(dtype), *counted(), mode=mode)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("dtype", [None, BF16], ids=str)
def test_a3_the_dtype_is_honoured(dtype: torch.dtype | None, mode: Any) -> None:
    """With the dtype an axis, the graph's own variant fires and the result is the graph's, to the bit."""
    report = assert_fused(patterns_of(cumsum_typed), summed(dtype), ADD_ACT, *counted(), mode=mode)
    assert fired(report) == [f"cumsum_typed[dtype={dtype}, device='cpu']"]


def test_a3_a_dtype_outside_the_axis() -> None:
    """A dtype that is no value of the axis is taken by no variant."""
    assert_untouched(patterns_of(cumsum_typed), summed(torch.float16), *counted())


def test_a3_the_default_matches_left_out_and_spelled_out() -> None:
    """A default is taken whether the graph leaves it out or spells it out."""
    assert_fused(patterns_of(cumsum_plain), summed(None), ADD_ACT, *counted())
    x, y = counted()

    def build(graph: Any, x: Any, y: Any) -> Any:
        count = graph.call_function(aten.cumsum.default, (x, 1), {"dtype": None})
        cast = graph.call_function(torch.ops.prims.convert_element_type.default, (count, F32))
        added = graph.call_function(aten.add.Tensor, (cast, y))
        return graph.call_function(torch.ops.kwcases.act.default, (added,), {"mode": "sigmoid"})

    graph = hand_written(build, x, y)
    assert kt.apply(graph, patterns_of(cumsum_plain)).count == 1
    assert len(calls(graph, ADD_ACT)) == 1
    assert torch.equal(run_checked(graph, x, y), summed(None)(x, y))


@kt.rule(devices=CPU)
def quant_default(
    x: Annotated[Tensor, MATRIX, F32],
    w: Annotated[Tensor, kt.Shape("n"), F32],
    scale: Annotated[Tensor, kt.Shape(""), F32],
) -> Tensor:
    """Search for a quantisation that leaves ``sym`` at its default, which is True."""
    return quant(rms(x, w, 0.125), scale, dtype=torch.int8)


@quant_default.replacement
def _(x: Tensor, w: Tensor, scale: Tensor) -> Tensor:
    return rms_quant(x, w, scale, 0.125, dtype=torch.int8)


QUANT_ARGUMENTS: dict[str, tuple[dict[str, Any], bool]] = {
    "left out": ({"dtype": torch.int8}, True),
    "spelled out": ({"dtype": torch.int8, "sym": True}, True),
    "another bool": ({"dtype": torch.int8, "sym": False}, False),
    "another dtype": ({"dtype": torch.int16}, False),
}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("case", QUANT_ARGUMENTS)
def test_a3_a_bool_at_its_default(case: str, mode: Any) -> None:
    """A bool that the pattern leaves at its default is taken at that value only."""
    arguments, fuses = QUANT_ARGUMENTS[case]
    inputs = torch.randn(3, 8), torch.randn(8), torch.tensor(0.125)

    def function(x: Tensor, w: Tensor, scale: Tensor) -> Tensor:
        return quant(rms(x, w, 0.125), scale, **arguments)

    if fuses:
        assert_fused(patterns_of(quant_default), function, RMS_QUANT, *inputs, mode=mode)
    else:
        assert_untouched(patterns_of(quant_default), function, *inputs, mode=mode)


# a4: variants that share a replacement


def gquant_rule(ue8m0: Any, **options: Any) -> kt.Rule:
    """Return a rule whose replacement leaves the flag ``ue8m0`` out, or, with ``dropped``, in some variants only."""
    dropped = options.pop("dropped", (False, True))

    def search(x: Tensor, w: Tensor, *, ue8m0: bool, col_major: bool) -> tuple[Tensor, Tensor]:
        return gquant(rms(x, w, 0.125), 4, ue8m0=ue8m0, col_major=col_major)

    search.__annotations__ |= {
        "x": Annotated[Tensor, kt.Shape("m>1 g>1*4"), F32],
        "w": Annotated[Tensor, kt.Shape("g*4"), F32],
        "ue8m0": ue8m0,
    }
    rule = kt.rule(name="lossy_gquant", devices=CPU, **options)(search)

    @rule.replacement
    def _(x: Tensor, w: Tensor, *, ue8m0: bool, col_major: bool) -> tuple[Tensor, Tensor]:
        flag = False if col_major in dropped else ue8m0
        return rms_gquant(x, w, 0.125, 4, ue8m0=flag, col_major=col_major)

    return rule


def grouped(*, ue8m0: bool, col_major: bool) -> Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]:
    """Return the graph of one variant."""
    return lambda x, w: gquant(rms(x, w, 0.125), 4, ue8m0=ue8m0, col_major=col_major)


def test_a4_a_flag_that_the_replacement_leaves_out_is_an_error() -> None:
    """Two variants that differ in ``ue8m0`` only and share a replacement: the error names rule, parameter and both."""
    with pytest.raises(kt.KwtraceError) as caught:
        kt.trace(gquant_rule(bool))
    text = str(caught.value)
    assert "lossy_gquant" in text
    assert "parameter ue8m0" in text
    assert "ue8m0=False, col_major=" in text
    assert "ue8m0=True, col_major=" in text
    assert "unused=" in text


def test_a4_the_error_is_one_about_variants() -> None:
    """What is raised is a TraceError or a ConflictError, so that it can be told from a wrong declaration."""
    with pytest.raises((kt.TraceError, kt.ConflictError)):
        kt.trace(gquant_rule(bool))


@pytest.mark.parametrize("col_major", [False, True])
def test_a4_a_flag_left_out_in_some_variants_is_an_error(col_major: bool) -> None:
    """The replacement honours ``ue8m0`` for one layout and drops it for the other: those two variants share one."""
    with pytest.raises(kt.KwtraceError) as caught:
        kt.trace(gquant_rule(bool, dropped=(col_major,)))
    text = str(caught.value)
    assert "parameter ue8m0" in text
    assert f"ue8m0=True, col_major={col_major}" in text


@functools.cache
def restricted(how: str) -> kt.PatternSet:
    """Return the patterns of a rule that leaves the flag out, and is for ``ue8m0=False`` only."""
    if how == "by the domain":
        return kt.trace(gquant_rule(Annotated[bool, kt.OneOf(False)]))
    return kt.trace(gquant_rule(bool, where=lambda ue8m0, **_: not ue8m0))


@pytest.mark.parametrize("how", ["by the domain", "by where"])
@pytest.mark.parametrize("col_major", [False, True])
def test_a4_restricted_to_false_the_true_graph_stays(how: str, col_major: bool) -> None:
    """A rule for ``ue8m0=False`` only fuses that graph, and leaves the True graph bit-exact."""
    x, w = torch.randn(3, 8), torch.randn(8)
    assert_fused(restricted(how), grouped(ue8m0=False, col_major=col_major), RMS_GQUANT, x, w)
    for mode in MODES:
        assert_untouched(restricted(how), grouped(ue8m0=True, col_major=col_major), x, w, mode=mode)


def test_a4_with_the_flag_passed_on_every_graph_is_fused() -> None:
    """A replacement that passes the flag on takes every graph, with the graph's own values."""
    patterns = kt.trace(gquant_rule(bool, dropped=()))
    x, w = torch.randn(3, 8), torch.randn(8)
    for ue8m0, col_major in itertools.product((False, True), repeat=2):
        report = assert_fused(patterns, grouped(ue8m0=ue8m0, col_major=col_major), RMS_GQUANT, x, w)
        assert fired(report) == [f"lossy_gquant[ue8m0={ue8m0}, col_major={col_major}, device='cpu']"]


# a5: a captured value that the replacement ignores


def scaled_rule(replacement: Callable[..., Tensor]) -> kt.Rule:
    """Return a rule that captures a scale."""

    def search(
        x: Annotated[Tensor, MATRIX, F32], y: Annotated[Tensor, kt.Shape("m n"), F32], *, scale: float
    ) -> Tensor:
        return act(x * scale + y, mode="sigmoid")

    rule = kt.rule(name="scaled_act", devices=CPU)(search)
    rule.replacement(replacement)
    return rule


def passing(x: Tensor, y: Tensor, *, scale: float) -> Tensor:
    """Pass the scale on."""
    return add_act(x * scale, y, mode="sigmoid")


def ignoring(x: Tensor, y: Tensor, *, scale: float) -> Tensor:
    """Ignore the scale."""
    return add_act(x, y, mode="sigmoid")


def burning_in(x: Tensor, y: Tensor, *, scale: float) -> Tensor:
    """Put a number of its own in place of the scale."""
    return add_act(x * 0.35, y, mode="sigmoid")


@functools.cache
def scaled_passing() -> kt.Rule:
    """Return the rule whose replacement passes the scale on."""
    return scaled_rule(passing)


def times(scale: Any) -> Callable[[Tensor, Tensor], Tensor]:
    """Return the graph with a scale of its own."""
    return lambda x, y: act(x * scale + y, mode="sigmoid")


@pytest.mark.parametrize("replacement", [ignoring, burning_in])
def test_a5_a_captured_scale_that_is_ignored_is_an_error(replacement: Callable[..., Tensor]) -> None:
    """The error names rule, parameter and variant."""
    with pytest.raises(kt.KwtraceError, match=r"Rule scaled_act, parameter scale, variant scaled_act\[device='cpu'\]"):
        kt.trace(scaled_rule(replacement))


def test_a5_the_error_is_a_trace_error() -> None:
    """What is raised is the error for a variant that can't be traced."""
    with pytest.raises(kt.TraceError):
        kt.trace(scaled_rule(ignoring))


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("scale", [8.0, 0.35, 1.0, -0.125])
def test_a5_with_the_scale_passed_on_every_value_is_right(scale: float, mode: Any) -> None:
    """The fused operator gets the graph's own scale, also a neutral one and that of the example."""
    patterns = patterns_of(scaled_passing())
    x, y = torch.randn(3, 8), torch.randn(3, 8)
    assert_fused(patterns, times(scale), ADD_ACT, x, y, mode=mode)
    graph = traced(times(scale), x, y, mode=mode)
    kt.apply(graph, patterns)
    assert only(graph, aten.mul.Tensor).args[1] == scale
    assert torch.equal(graph(x, y), times(scale)(x, y))


@pytest.mark.slow
@pytest.mark.usefixtures("fresh_compiler")
def test_a5_through_torch_compile() -> None:
    """Three scales in one compiled graph are all fused and right."""
    x, y = torch.randn(3, 8), torch.randn(3, 8)

    def model(x: Tensor, y: Tensor) -> list[Tensor]:
        return [times(scale)(x, y) for scale in (8.0, 0.35, 1.0)]

    with torch.no_grad():
        found = torch.compile(model, options=kt.options(patterns_of(scaled_passing())))(x, y)
    assert kt.stats().count == 3
    for one, other, exact in zip(found, model(x, y), model(x.double(), y.double()), strict=True):
        assert_as_exact(one, other, exact)


# a6: a tensor in the place of a captured number

SCALES: dict[str, Callable[[Tensor], Any]] = {
    "a tensor made in the graph": lambda x: torch.full((), 0.35),
    "a constant": lambda x: torch.tensor(0.35),
    "a constant in float64": lambda x: torch.tensor(0.35, dtype=torch.float64),
    "a constant int": lambda x: torch.tensor(8),
    "a result": lambda x: x.amax(),
    "a vector of one": lambda x: torch.full((1,), 0.35),
    "a row": lambda x: x[0],
}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("scale", SCALES)
def test_a6_a_tensor_is_no_captured_number(scale: str, mode: Any) -> None:
    """A scale that is a tensor, of whatever origin, dtype and rank, doesn't match, and raises nothing."""
    patterns = patterns_of(scaled_passing())
    x, y = torch.randn(3, 8), torch.randn(3, 8)
    assert_untouched(patterns, lambda x, y: times(SCALES[scale](x))(x, y), x, y, mode=mode)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("dtype", [F32, torch.float64, torch.int64], ids=str)
def test_a6_a_scalar_tensor_as_input(dtype: torch.dtype, mode: Any) -> None:
    """A scale that is a 0-d input doesn't match, and raises nothing."""
    patterns = patterns_of(scaled_passing())
    x, y, scale = torch.randn(3, 8), torch.randn(3, 8), torch.tensor(3, dtype=dtype)
    assert_untouched(patterns, lambda x, y, scale: times(scale)(x, y), x, y, scale, mode=mode)
    assert_fused(patterns, lambda x, y, scale: (times(3.0)(x, y), scale + 1)[0], ADD_ACT, x, y, scale, mode=mode)


@pytest.mark.slow
@pytest.mark.usefixtures("fresh_compiler")
@pytest.mark.parametrize("dynamic", [False, True])
def test_a6_through_torch_compile(dynamic: bool) -> None:
    """In a compile too, a scale that is a tensor stays, and one that is a number is fused."""
    x, y, scale = torch.randn(3, 8), torch.randn(3, 8), torch.tensor(0.35)

    def model(x: Tensor, y: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
        return times(scale)(x, y), times(0.125)(x, y)

    with torch.no_grad():
        compiled = torch.compile(model, options=kt.options(patterns_of(scaled_passing())), dynamic=dynamic)
        found = compiled(x, y, scale)
    assert kt.stats().count == 1
    exact = model(x.double(), y.double(), scale)
    for one, other, reference in zip(found, model(x, y, scale), exact, strict=True):
        assert_as_exact(one, other, reference)


# a7: an operand of another dtype


@kt.rule(devices=CPU)
def mm_add(
    x: Annotated[Tensor, kt.Shape("m k>1"), T],
    w: Annotated[Tensor, kt.Shape("k n>1"), T],
    y: Annotated[Tensor, kt.Shape("m n"), T],
) -> Tensor:
    """Search for a linear layer and an operand of the same dtype added to it."""
    return act(torch.mm(x, w) + y, mode="sigmoid")


@mm_add.replacement
def _(x: Tensor, w: Tensor, y: Tensor) -> Tensor:
    return add_act(torch.mm(x, w), y, mode="sigmoid")


def linear_add(x: Tensor, w: Tensor, y: Tensor) -> Tensor:
    """Return what `mm_add` searches for."""
    return act(torch.mm(x, w) + y, mode="sigmoid")


def operands(layer: torch.dtype, operand: torch.dtype, shape: tuple[int, ...] = (3, 5)) -> list[Tensor]:
    """Return a layer's input and weight, and the operand."""
    return [torch.randn(3, 4).to(layer), torch.randn(4, 5).to(layer), torch.randn(shape).to(operand)]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("shape", [(3, 5), (1, 5), (5,), ()], ids=str)
@pytest.mark.parametrize(
    ("layer", "operand"), [(BF16, F32), (F32, BF16), (torch.float16, F32), (BF16, torch.float16)], ids=str
)
def test_a7_an_operand_of_another_dtype(
    layer: torch.dtype, operand: torch.dtype, shape: tuple[int, ...], mode: Any
) -> None:
    """A mixed addition, promoted or, with a 0-d operand, not, was never traced: nothing matches."""
    assert_untouched(patterns_of(mm_add), linear_add, *operands(layer, operand, shape), mode=mode)


@pytest.mark.parametrize("mode", MODES)
def test_a7_a_layer_that_is_cast_first(mode: Any) -> None:
    """The result of a bfloat16 layer cast to float32 is no float32 layer."""
    x, w, y = operands(BF16, F32)
    assert_untouched(
        patterns_of(mm_add), lambda x, w, y: act(torch.mm(x, w).float() + y, mode="sigmoid"), x, w, y, mode=mode
    )


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("dtype", [F32, BF16], ids=str)
def test_a7_an_operand_of_the_same_dtype(dtype: torch.dtype, mode: Any) -> None:
    """With one dtype throughout, the variant of that dtype fires."""
    report = assert_fused(patterns_of(mm_add), linear_add, ADD_ACT, *operands(dtype, dtype), mode=mode)
    assert fired(report) == [f"mm_add[T={dtype}, device='cpu']"]


@pytest.mark.slow
@pytest.mark.usefixtures("fresh_compiler")
def test_a7_through_torch_compile() -> None:
    """A compile of both leaves the mixed addition alone and fuses the other."""
    x, w, y = operands(BF16, F32)

    def model(x: Tensor, w: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        return linear_add(x, w, y), linear_add(x, w, y.to(x.dtype))

    def exact(x: Tensor, w: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        return linear_add(x.double(), w.double(), y.double()), linear_add(x.double(), w.double(), y.to(BF16).double())

    with torch.no_grad():
        found = torch.compile(model, options=kt.options(patterns_of(mm_add)))(x, w, y)
    assert kt.stats().count == 1
    for one, other, reference in zip(found, model(x, w, y), exact(x, w, y), strict=True):
        assert_as_exact(one, other, reference)


# a8: factors that the replacement's operator doesn't have


@kt.rule(devices=CPU, unused=("i",))
def addmm_relu(
    i: Annotated[Tensor, kt.Shape("n"), F32],
    x: Annotated[Tensor, kt.Shape("m>1 k>1"), F32],
    y: Annotated[Tensor, kt.Shape("k n>1"), F32],
    *,
    beta: Literal[0, 1],
) -> Tensor:
    """Search for addmm with alpha 1 and beta 0 or 1: the operator put in place has neither."""
    return torch.addmm(i, x, y, beta=beta).relu()


@addmm_relu.replacement
def _(i: Tensor, x: Tensor, y: Tensor, *, beta: int) -> Tensor:
    return qmm_relu(x, y, torch.ones(y.shape[1]), bias=i if beta else None)


def layer(**factors: float) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    """Return addmm with factors, and relu."""
    return lambda i, x, y: torch.addmm(i, x, y, **factors).relu()


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("beta", [0, 0.5, 1, 2, -1])
@pytest.mark.parametrize("alpha", [0, 0.5, 1, 2, -1])
def test_a8_only_alpha_1_and_beta_0_or_1(beta: float, alpha: float, mode: Any) -> None:
    """Any other factor would be lost, so nothing is rewritten; inputs are integers, so results are exact."""
    inputs = integers(5), integers(3, 4), integers(4, 5)
    function = layer(beta=beta, alpha=alpha)
    if alpha == 1 and beta in (0, 1):
        report = assert_fused(patterns_of(addmm_relu), function, QMM_RELU, *inputs, mode=mode)
        assert fired(report) == [f"addmm_relu[beta={beta}, device='cpu']"]
    else:
        assert_untouched(patterns_of(addmm_relu), function, *inputs, mode=mode)


def test_a8_beta_0_keeps_nan_out() -> None:
    """With beta 0 the summand is ignored, NaN and infinity included."""
    i = torch.tensor([math.nan, math.inf, -math.inf, 1.0, 0.0])
    assert_fused(patterns_of(addmm_relu), layer(beta=0), QMM_RELU, i, integers(3, 4), integers(4, 5))
    graph = traced(layer(beta=0), i, integers(3, 4), integers(4, 5))
    kt.apply(graph, patterns_of(addmm_relu))
    assert graph(i, integers(3, 4), integers(4, 5)).isfinite().all()


@pytest.mark.slow
@pytest.mark.usefixtures("fresh_compiler")
def test_a8_through_torch_compile() -> None:
    """A compile of several fuses those without factors only."""
    inputs = integers(5), integers(3, 4), integers(4, 5)

    def model(i: Tensor, x: Tensor, y: Tensor) -> list[Tensor]:
        chosen = [{}, {"beta": 0.5}, {"alpha": 2}, {"beta": 0}, {"beta": 2, "alpha": 0.5}]
        return [layer(**factors)(i, x, y) for factors in chosen]

    with torch.no_grad():
        found = torch.compile(model, options=kt.options(patterns_of(addmm_relu)))(*inputs)
    assert kt.stats().count == 2
    assert_equal(found, model(*inputs))


# a9: captured values of batch norm

C = Annotated[Tensor, kt.Shape("c>1"), F32]


@kt.rule(devices=CPU)
def batch_norm_training(
    x: Annotated[Tensor, kt.Shape("n>1 c>1 h>1 w>1"), F32],
    weight: C,
    bias: C,
    mean: C,
    var: C,
    *,
    momentum: Annotated[float, kt.Captured(0.1)],
    eps: Annotated[float, kt.Captured(1e-5)],
) -> tuple[Tensor, Tensor, Tensor]:
    """Search for batch norm in training, with the values that are torch's defaults as examples."""
    found = aten._native_batch_norm_legit_functional(x, weight, bias, mean, var, True, momentum, eps)
    return found[0], found[3], found[4]


@batch_norm_training.replacement
def _(
    x: Tensor, weight: Tensor, bias: Tensor, mean: Tensor, var: Tensor, *, momentum: float, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    return batch_norm(x, weight, bias, mean, var, momentum, eps)


@pytest.fixture(scope="module")
def batch_norms() -> kt.PatternSet:
    """Return the patterns of `batch_norm_training`."""
    return kt.trace(batch_norm_training)


def normalised(momentum: float, eps: float) -> Callable[..., tuple[Tensor, Tensor, Tensor]]:
    """Return batch norm in training as a function, with values of its own."""

    def function(x: Tensor, *channels: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        found = aten._native_batch_norm_legit_functional(x, *channels, True, momentum, eps)
        return found[0], found[3], found[4]

    return function


def channels() -> list[Tensor]:
    """Return an image whose variance is small next to the eps under test, and weight, bias, mean and variance."""
    return [torch.randn(4, 3, 5, 6) * 0.03, *(torch.rand(3) + 0.5 for _ in range(4))]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(("momentum", "eps"), [(0.03, 1e-3), (0.1, 1e-5), (0.25, 0.125)])
def test_a9_momentum_and_eps_reach_the_fused_operator(
    batch_norms: kt.PatternSet, momentum: float, eps: float, mode: Any
) -> None:
    """The fused operator gets the values of the graph, and the result is eager's."""
    function, inputs = normalised(momentum, eps), channels()
    graph = traced(function, *inputs, mode=mode)
    assert kt.apply(graph, batch_norms).count == 1
    assert only(graph, BATCH_NORM).args[5:] == (momentum, eps)
    assert not calls(graph, aten.rsqrt.default)
    exact = function(*(x.double() for x in inputs))
    for one, other, reference in zip(run_checked(graph, *inputs), function(*inputs), exact, strict=True):
        assert_as_exact(one, other, reference)


@pytest.mark.parametrize("shape", [(2, 3, 2, 2), (3, 3, 7, 5), (5, 3, 3, 11), (7, 3, 13, 2), (6, 3, 9, 10)], ids=str)
def test_a9_the_correction_of_the_variance_is_found_at_every_size(
    batch_norms: kt.PatternSet, shape: tuple[int, ...]
) -> None:
    """The factor n / (n - 1) of the running variance stands in the graph as a float, whatever n is."""
    inputs = [torch.randn(shape), *channels()[1:]]
    graph = traced(normalised(0.03, 1e-3), *inputs)
    assert kt.apply(graph, batch_norms).count == 1
    assert len(calls(graph, BATCH_NORM)) == 1


def test_a9_layers_keep_their_own_values(batch_norms: kt.PatternSet) -> None:
    """Two layers of one graph with different values are fused with their own."""

    def whole(x: Tensor, *rest: Tensor) -> tuple[Tensor, ...]:
        return *normalised(0.03, 1e-3)(x, *rest), *normalised(0.25, 0.125)(x.sin(), *rest)

    inputs = channels()
    graph = traced(whole, *inputs)
    assert kt.apply(graph, batch_norms).count == 2
    assert [node.args[5:] for node in calls(graph, BATCH_NORM)] == [(0.03, 1e-3), (0.25, 0.125)]
    exact = whole(*(x.double() for x in inputs))
    for one, other, reference in zip(run_checked(graph, *inputs), whole(*inputs), exact, strict=True):
        assert_as_exact(one, other, reference)


@pytest.mark.slow
@pytest.mark.usefixtures("fresh_compiler")
def test_a9_a_module_through_torch_compile(batch_norms: kt.PatternSet) -> None:
    """A module with eps and momentum of its own, compiled, normalises and updates its statistics as eager does."""
    x = channels()[0]
    eager, compiled, wide = (torch.nn.BatchNorm2d(3, eps=1e-3, momentum=0.03).train() for _ in range(3))
    with torch.no_grad():
        expected, exact = eager(x), wide.double()(x.double())
        found = torch.compile(compiled, options=kt.options(batch_norms))(x)
    assert kt.stats().count == 1
    assert_as_exact(found, expected, exact)
    assert_as_exact(compiled.running_mean, eager.running_mean, wide.running_mean)
    assert_as_exact(compiled.running_var, eager.running_var, wide.running_var)


# a10: an example and the graph's own value


@kt.rule(devices=CPU)
def rms_eps(
    x: Annotated[Tensor, MATRIX, F32],
    w: Annotated[Tensor, kt.Shape("n"), F32],
    *,
    eps: Annotated[float, kt.Captured(1e-5)],
) -> Tensor:
    """Search for rms of relu with eps captured and 1e-5 as example."""
    return rms(x.relu(), w, eps)


@rms_eps.replacement
def _(x: Tensor, w: Tensor, *, eps: float) -> Tensor:
    return relu_rms(x, w, eps)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("eps", [1e-3, 1e-5, 0.125, 1e-12, 0.0])
def test_a10_the_fused_operator_gets_the_graphs_own_eps(eps: float, mode: Any) -> None:
    """Whatever the example was, the value in the graph is what is passed on."""
    x, w = torch.randn(3, 8) * 0.03, torch.randn(8)
    function = lambda x, w: rms(x.relu(), w, eps)  # noqa: E731 - it closes over eps
    assert not torch.equal(function(x, w), rms(x.relu(), w, 0.01))
    assert_fused(patterns_of(rms_eps), function, RELU_RMS, x, w, mode=mode)
    graph = traced(function, x, w, mode=mode)
    kt.apply(graph, patterns_of(rms_eps))
    assert only(graph, RELU_RMS).args[2] == eps
    assert torch.equal(graph(x, w), function(x, w))


def test_a10_a_literal_eps_is_not_captured() -> None:
    """A rule with eps written out takes that eps only."""

    def search(x: Annotated[Tensor, MATRIX, F32], w: Annotated[Tensor, kt.Shape("n"), F32]) -> Tensor:
        return rms(x.relu(), w, 1e-5)

    rule = kt.rule(name="rms_literal", devices=CPU)(search)
    rule.replacement(lambda x, w: relu_rms(x, w, 1e-5))
    patterns = kt.trace(rule)
    x, w = torch.randn(3, 8) * 0.03, torch.randn(8)
    assert_untouched(patterns, lambda x, w: rms(x.relu(), w, 1e-3), x, w)
    assert_untouched(patterns, lambda x, w: rms(x.relu(), w, 1.0000001e-5), x, w)
    assert_fused(patterns, lambda x, w: rms(x.relu(), w, 1e-5), RELU_RMS, x, w)
