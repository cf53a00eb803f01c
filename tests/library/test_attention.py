"""Hand-written attention, plain and with grouped heads: fused where the rule says so, and as exact as eager."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from graphs import assert_as_exact, calls, run_checked, targets, traced
from hypothesis import given, settings
from strategies import FLOATS, Attention, Mask, attentions, tensor
from torch import Tensor, fx

import kwtrace as kt
import patterns_gen

SDPA = "scaled_dot_product"
PLAIN = Attention(
    batch=2,
    groups=3,
    times=1,
    rows=5,
    columns=7,
    width=8,
    dtype=torch.float32,
    layouts=("contiguous", "contiguous", "contiguous"),
    mask=Mask("none", (False, False, False), in_float32=False),
    scaling="*",
    scale=0.3,
    softmax_in_float32=True,
    seed=1,
)
GROUPED = replace(PLAIN, times=2)
FORMS = {"plain": PLAIN, "grouped": GROUPED}


def named(value: Any) -> str:
    """Name a parameter of a test."""
    if isinstance(value, Attention):
        return "plain" if value.times == 1 else "grouped"
    return f"{value.kind}{value.in_float32}" if isinstance(value, Mask) else str(value)


def eager(case: Attention) -> Callable[..., Tensor]:
    """Return attention as a model writes it, as a function of q, k, v, the mask and the scale's tensor."""

    def repeat(x: Tensor) -> Tensor:
        batch, groups, columns, width = x.shape
        return (
            x[:, :, None, :, :]
            .expand(batch, groups, case.times, columns, width)
            .reshape(batch, groups * case.times, columns, width)
        )

    def function(q: Tensor, k: Tensor, v: Tensor, *more: Tensor) -> Tensor:
        if case.times > 1:
            k, v = repeat(k), repeat(v)
        rest = list(more)
        scores = q @ k.transpose(2, 3)
        if case.scaling == "*":
            scores = scores * case.scale
        elif case.scaling == "/":
            scores = scores / case.scale
        elif case.scaling == "tensor":
            scores = scores * rest.pop()
        if case.mask.kind == "added":
            scores = scores + rest.pop()
        elif case.mask.kind == "bool":
            scores = scores.masked_fill(rest.pop(), -math.inf)
        if case.softmax_in_float32:
            return torch.nn.functional.softmax(scores, dim=-1, dtype=torch.float32).to(q.dtype) @ v
        return torch.nn.functional.softmax(scores, dim=-1).to(q.dtype) @ v

    return function


def inputs(case: Attention, device: str = "cpu") -> list[Tensor]:
    """Return q, k, v, and what else the case's function takes, in its order."""
    heads = case.groups * case.times
    shapes = [(case.batch, heads, case.rows, case.width)] + [(case.batch, case.groups, case.columns, case.width)] * 2
    made = [
        tensor(s, case.dtype, layout, case.seed + i, device)
        for i, (s, layout) in enumerate(zip(shapes, case.layouts, strict=True))
    ]
    whole = (case.batch, heads, case.rows)
    shape = (*(1 if single else size for single, size in zip(case.mask.single, whole, strict=True)), case.columns)
    if case.mask.kind == "added":
        made.append(
            tensor(shape, torch.float32 if case.mask.in_float32 else case.dtype, "contiguous", case.seed + 7, device)
        )
    elif case.mask.kind == "bool":
        hidden = tensor(shape, torch.float32, "contiguous", case.seed + 7, device) > 0
        hidden[..., 0] = False  # a row that is wholly hidden is a test of its own
        made.append(hidden)
    if case.scaling == "tensor":
        made.append(torch.tensor(case.scale, device=device))
    return made


def exact(case: Attention, given_inputs: list[Tensor]) -> Tensor:
    """Return the result in float64, from the inputs as they are."""
    wide = [x if x.dtype is torch.bool else x.double() for x in given_inputs]
    return eager(in_float64(case))(*wide)


def in_float64(case: Attention) -> Attention:
    """Return the case with nothing in it of less precision than float64."""
    return replace(case, dtype=torch.float64, softmax_in_float32=False)


def fused(graph: fx.GraphModule | fx.Graph) -> list[str]:
    """Return the fused attention operators in a graph."""
    return [target for target in targets(graph) if SDPA in target]


def check(patterns: kt.PatternSet, case: Attention, mode: Any = "real", device: str = "cpu") -> None:
    """Check that a case is fused, by its own form of the rule, and as exact as eager."""
    given_inputs = inputs(case, device)
    graph = traced(eager(case), *given_inputs, mode=mode)
    report = kt.apply(graph, patterns)
    assert {rule: sum(counts.values()) for rule, counts in report.fired.items()} == {
        "attention_grouped" if case.times > 1 else "attention": 1
    }
    assert len(fused(graph)) == 1
    assert not calls(graph, "aten.bmm.default")
    assert not calls(graph, "aten.exp.default")
    unfused = eager(case)(*given_inputs)
    found = run_checked(graph, *given_inputs) if device == "cpu" else graph(*given_inputs)
    assert_as_exact(found, unfused, exact(case, given_inputs))
    if mode == "real":
        assert kt.apply(graph, patterns).count == 0


def supported(case: Attention) -> bool:
    """Tell whether the rule says that a case is fused."""
    return case.width > 1 and not (case.scaling == "tensor" and case.mask.kind == "bool")


@settings(max_examples=15)
@given(case=attentions(grouped=False).filter(supported))
def test_any_plain_attention_is_fused(device: str, shipped: kt.PatternSet, case: Attention) -> None:
    """Whatever its sizes, strides, dtype, mask and scale, attention is fused in a static graph."""
    check(shipped, case, device=device)


@settings(max_examples=15)
@given(case=attentions(grouped=True).filter(supported))
def test_any_grouped_attention_is_fused(device: str, shipped: kt.PatternSet, case: Attention) -> None:
    """The same, with K and V repeated: the grouped form fires, and K and V are not repeated any more."""
    check(shipped, case, device=device)


@settings(max_examples=5)
@given(case=attentions(grouped=False).filter(supported))
def test_any_plain_attention_is_fused_in_a_dynamic_graph(device: str, shipped: kt.PatternSet, case: Attention) -> None:
    """A graph with symbolic sizes is fused like a static one."""
    check(shipped, case, "symbolic", device)


@settings(max_examples=5)
@given(case=attentions(grouped=True).filter(supported))
def test_any_grouped_attention_is_fused_in_a_dynamic_graph(
    device: str, shipped: kt.PatternSet, case: Attention
) -> None:
    """Grouped attention too, whose number of heads is a product of symbols."""
    check(shipped, case, "symbolic", device)


KINDS = {
    "added": Mask("added", (False,) * 3, in_float32=False),
    "added in float32": Mask("added", (False,) * 3, in_float32=True),
    "bool": Mask("bool", (False,) * 3, in_float32=False),
}


SINGLES = list(itertools.product((False, True), repeat=3))
MASKED = [
    *((PLAIN, kind, single) for kind in KINDS for single in SINGLES),
    *((GROUPED, kind, single) for kind, single in zip(itertools.cycle(KINDS), SINGLES, strict=False)),
]


@pytest.mark.parametrize(("form", "kind", "single"), MASKED, ids=named)
def test_every_mask_in_every_broadcast_shape(
    shipped: kt.PatternSet, form: Attention, kind: str, single: tuple[bool, bool, bool]
) -> None:
    """A mask may be 1 in any of its first three dims."""
    check(shipped, replace(form, dtype=torch.bfloat16, mask=replace(KINDS[kind], single=single)))


SCALINGS = ("*", "/", "tensor", "none")
SCALED = [
    case
    for case in (
        *((PLAIN, dtype, scaling, i % 2 == 0) for dtype in FLOATS for i, scaling in enumerate(SCALINGS)),
        *((PLAIN, torch.bfloat16, scaling, i % 2 == 1) for i, scaling in enumerate(SCALINGS)),
        *((GROUPED, dtype, scaling, True) for dtype in FLOATS for scaling in SCALINGS),
    )
    if case[1:3] != (torch.float16, "tensor")
]
"""All but a tensor's factor in float16, which is left alone: see ``tests/test_attacks.py``."""


@pytest.mark.parametrize(("form", "dtype", "scaling", "in_float32"), SCALED, ids=named)
def test_every_scale_and_softmax(
    shipped: kt.PatternSet, form: Attention, dtype: torch.dtype, scaling: Any, in_float32: bool
) -> None:
    """A scale by ``*``, ``/``, a 0-d tensor or none, and a softmax in its own dtype or in float32."""
    check(shipped, replace(form, dtype=dtype, scaling=scaling, softmax_in_float32=in_float32))


SIZES = [
    (1, 1, 1, 1),
    (1, 1, 1, 7),
    (1, 3, 1, 1),
    (2, 1, 1, 9),
    (1, 1, 4, 4),
    (2, 3, 4, 1),
    (1, 3, 32, 32),
    (2, 1, 1, 1),
]


NO_MASK = PLAIN.mask
SMALL = [
    *((PLAIN, kind, sizes) for kind in (NO_MASK, KINDS["added"]) for sizes in SIZES),
    *(
        (GROUPED, kind, sizes)
        for kind, sizes in zip(
            itertools.cycle((NO_MASK, KINDS["bool"], KINDS["added in float32"])), SIZES, strict=False
        )
    ),
]


@pytest.mark.parametrize(("form", "kind", "sizes"), SMALL, ids=named)
def test_sizes_of_one(shipped: kt.PatternSet, form: Attention, kind: Mask, sizes: tuple[int, int, int, int]) -> None:
    """Batch 1, one head, one query and one key are daily work: generation with a cache is a single row."""
    batch, groups, rows, columns = sizes
    check(shipped, replace(form, batch=batch, groups=groups, rows=rows, columns=columns, mask=kind))


@pytest.mark.parametrize("mode", ["real", "symbolic"])
@pytest.mark.parametrize("layout", ["transposed", "sliced"])
@pytest.mark.parametrize("place", range(3))
def test_strides_that_the_kernel_does_not_take(shipped: kt.PatternSet, place: int, layout: Any, mode: Any) -> None:
    """One of q, k and v has a last dim of another stride than 1, which CPU kernels of attention take for 1."""
    chosen: list[Any] = ["contiguous"] * 3
    chosen[place] = layout
    check(shipped, replace(PLAIN, layouts=tuple(chosen)), mode)


@pytest.mark.parametrize("mode", ["real", "symbolic"])
@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS.keys())
def test_what_follows_attention_still_runs(shipped: kt.PatternSet, form: Attention, mode: Any) -> None:
    """The fused operator yields other strides; the transpose and view that models put behind it still run."""

    def model(case: Attention, *given: Tensor) -> Tensor:
        result = eager(case)(*given)
        batch, heads, rows, width = result.shape
        return result.transpose(1, 2).contiguous().view(batch, rows, heads * width).sin()

    given_inputs = inputs(form)
    graph = traced(partial(model, form), *given_inputs, mode=mode)
    assert kt.apply(graph, shipped).count == 1
    assert len(fused(graph)) == 1
    reference = model(in_float64(form), *(x.double() for x in given_inputs))
    assert_as_exact(run_checked(graph, *given_inputs), model(form, *given_inputs), reference)


def test_a_dynamic_graph_whose_batch_is_its_number_of_heads(shipped: kt.PatternSet) -> None:
    """Sizes that the trace took for one, since the example's are equal, are fused all the same."""
    check(shipped, replace(PLAIN, batch=3), "symbolic")


@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS.keys())
def test_a_dynamic_graph_serves_other_sizes(shipped: kt.PatternSet, form: Attention) -> None:
    """A graph rewritten once with symbolic sizes runs at others."""
    graph = traced(eager(form), *inputs(form), mode="symbolic")
    assert kt.apply(graph, shipped).count == 1
    other = replace(form, batch=3, rows=9, columns=11, width=4)
    given_inputs = inputs(other)
    assert_as_exact(graph(*given_inputs), eager(other)(*given_inputs), exact(other, given_inputs))


@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS.keys())
def test_heads_taken_from_a_projection(shipped: kt.PatternSet, form: Attention) -> None:
    """Q, K and V as models make them, by view and transpose of a projection, are fused as well."""

    def model(case: Attention, x: Tensor, w: Tensor) -> Tensor:
        rows, width = x.shape[1], form.width
        heads = (form.groups * form.times, form.groups, form.groups)
        parts = (x @ w).split([h * width for h in heads], -1)
        q, k, v = (part.view(x.shape[0], rows, h, width).transpose(1, 2) for part, h in zip(parts, heads, strict=True))
        return eager(case)(q, k, v).transpose(1, 2).reshape(x.shape[0], rows, -1)

    x = torch.randn(2, 5, 12)
    w = torch.randn(12, (form.groups * form.times + 2 * form.groups) * form.width) / 4
    graph = traced(partial(model, form), x, w)
    assert kt.apply(graph, shipped).count == 1
    assert len(fused(graph)) == 1
    reference = model(in_float64(form), x.double(), w.double())
    assert_as_exact(run_checked(graph, x, w), model(form, x, w), reference)


def scores(q: Tensor, k: Tensor) -> Tensor:
    """Return scaled scores, as the refusals below have them."""
    return q @ k.transpose(-2, -1) * 0.3


NEAR: dict[str, Callable[[Tensor, Tensor, Tensor], Any]] = {
    "softmax over -2": lambda q, k, v: scores(q, k).softmax(-2) @ v,
    "softmax over 0": lambda q, k, v: scores(q, k).softmax(0) @ v,
    "softmax over 1": lambda q, k, v: scores(q, k).softmax(1) @ v,
    "capped scores": lambda q, k, v: ((scores(q, k) / 5).tanh() * 5).softmax(-1) @ v,
    "log_softmax": lambda q, k, v: scores(q, k).log_softmax(-1) @ v,
    "sigmoid": lambda q, k, v: scores(q, k).sigmoid() @ v,
    "weights returned": lambda q, k, v: ((w := scores(q, k).softmax(-1)) @ v, w),
    "scores returned": lambda q, k, v: ((s := scores(q, k)).softmax(-1) @ v, s),
    "weights scaled": lambda q, k, v: (scores(q, k).softmax(-1) * 2) @ v,
    "softmax in float64": lambda q, k, v: scores(q, k).softmax(-1, dtype=torch.float64).to(q.dtype) @ v,
    "scores in float64": lambda q, k, v: scores(q, k).double().softmax(-1).to(q.dtype) @ v,
    "weights rounded": lambda q, k, v: scores(q, k).softmax(-1).bfloat16().to(q.dtype) @ v,
    "a vector of scales": lambda q, k, v: (q @ k.transpose(-2, -1) * torch.linspace(0.1, 0.5, 8)).softmax(-1) @ v,
    "a scale per head": lambda q, k, v: (
        (q @ k.transpose(-2, -1) * torch.linspace(0.1, 0.5, 8)[:, None, None]).softmax(-1) @ v
    ),
    "a scale in float64": lambda q, k, v: (
        (q @ k.transpose(-2, -1) * torch.full((), 0.3, dtype=torch.float64)).softmax(-1) @ v
    ),
    "subtracted mask": lambda q, k, v: (scores(q, k) - q @ q.transpose(-2, -1)).softmax(-1) @ v,
    "mask times two": lambda q, k, v: torch.add(scores(q, k), q @ q.transpose(-2, -1), alpha=2).softmax(-1) @ v,
    "mask added first": lambda q, k, v: ((q @ k.transpose(-2, -1) + q @ q.transpose(-2, -1)) * 0.3).softmax(-1) @ v,
    "filled with zero": lambda q, k, v: scores(q, k).masked_fill(q[..., :1] > 0, 0.0).softmax(-1) @ v,
    "filled with -1": lambda q, k, v: scores(q, k).masked_fill(q[..., :1] > 0, -1.0).softmax(-1) @ v,
    "filled with +inf": lambda q, k, v: scores(q, k).masked_fill(q[..., :1] > 9, math.inf).softmax(-1) @ v,
    "k not transposed": lambda q, k, v: (q @ k * 0.3).softmax(-1) @ v,
    "heads swapped": lambda q, k, v: (q @ k.transpose(-3, -1).transpose(-2, -3) * 0.3).softmax(-1) @ v,
    "v of another width": lambda q, k, v: scores(q, k).softmax(-1) @ v[..., :5],
    "k of one batch": lambda q, k, v: scores(q, k[:1]).softmax(-1) @ v,
    "v of one head": lambda q, k, v: scores(q, k).softmax(-1) @ v[:, :1],
    "three dims": lambda q, k, v: scores(q[0], k[0]).softmax(-1) @ v[0],
    "five dims": lambda q, k, v: scores(q[None], k[None]).softmax(-1) @ v[None],
    "float64": lambda q, k, v: scores(q.double(), k.double()).softmax(-1) @ v.double(),
}
MAY_FIRE = {"three dims", "five dims", "k of one batch", "v of one head"}
"""Other rules of the set, or other variants, may claim these; only the result counts."""


@pytest.mark.parametrize(
    ("name", "mode"), [*((name, "real") for name in NEAR), *((name, "symbolic") for name in list(NEAR)[::9])]
)
def test_what_is_almost_attention_is_left_alone(shipped: kt.PatternSet, name: str, mode: Any) -> None:
    """One thing is different: nothing fires, and the result is eager's. All sizes are equal, to tell nothing apart."""
    q, k, v = (torch.randn(8, 8, 8, 8) for _ in range(3))
    graph = traced(NEAR[name], q, k, v, mode=mode)
    before = graph(q, k, v)
    count = kt.apply(graph, shipped).count
    if name not in MAY_FIRE:
        assert count == 0
        assert not fused(graph)
    found = run_checked(graph, q, k, v)
    assert_as_exact(found, NEAR[name](q, k, v), NEAR[name](q.double(), k.double(), v.double()))
    if not count:
        torch.testing.assert_close(found, before, rtol=0, atol=0)


@pytest.mark.parametrize("mode", ["real", "symbolic"])
def test_other_scales_are_captured_as_they_are(shipped: kt.PatternSet, mode: Any) -> None:
    """Each layer's own scale reaches its fused operator: equal but for that, the layers yield different results."""

    def model(q: Tensor, k: Tensor, v: Tensor) -> list[Tensor]:
        return [(q @ k.transpose(-2, -1) * scale).softmax(-1) @ v for scale in (0.1, -0.5, 2.0, 1.0)] + [
            (q @ k.transpose(-2, -1) / 3).softmax(-1) @ v
        ]

    q, k, v = (torch.randn(2, 3, 5, 8) for _ in range(3))
    graph = traced(model, q, k, v, mode=mode)
    assert kt.apply(graph, shipped).count == 5
    assert len(fused(graph)) == 5
    assert_as_exact(run_checked(graph, q, k, v), model(q, k, v), model(q.double(), k.double(), v.double()))


def test_a_wrong_number_of_groups_is_left_alone(shipped: kt.PatternSet) -> None:
    """Heads that are tiled rather than repeated one by one are other heads: the grouped form doesn't fire."""

    def model(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        k, v = (x[:, None].expand(2, 2, 3, 7, 8).reshape(2, 6, 7, 8) for x in (k, v))
        return (q @ k.transpose(-2, -1) * 0.3).softmax(-1) @ v

    q, k, v = torch.randn(2, 6, 5, 8), torch.randn(2, 3, 7, 8), torch.randn(2, 3, 7, 8)
    graph = traced(model, q, k, v)
    report = kt.apply(graph, shipped)
    assert "attention_grouped" not in report.fired
    assert_as_exact(run_checked(graph, q, k, v), model(q, k, v), model(q.double(), k.double(), v.double()))


@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS.keys())
def test_rows_that_are_wholly_hidden_yield_zero(shipped: kt.PatternSet, form: Attention) -> None:
    """The one documented difference: where -inf hides every key of a row, eager yields NaN and the fused form 0."""
    case = replace(form, mask=Mask("bool", (False, False, False), in_float32=False))
    given_inputs = inputs(case)
    given_inputs[3][0, 0, 2] = True
    graph = traced(eager(case), *given_inputs)
    assert kt.apply(graph, shipped).count == 1
    found, expected = run_checked(graph, *given_inputs), eager(case)(*given_inputs)
    assert expected[0, 0, 2].isnan().all()
    assert (found[0, 0, 2] == 0).all()
    others = ~expected.isnan()
    assert_as_exact(found[others], expected[others], exact(case, given_inputs)[others])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS.keys())
def test_rows_hidden_with_the_lowest_number_stay_uniform(
    shipped: kt.PatternSet, form: Attention, dtype: torch.dtype
) -> None:
    """Where the lowest finite number hides every key, eager weighs all keys alike, and so does the fused form."""
    lowest = torch.finfo(dtype).min

    def model(q: Tensor, k: Tensor, v: Tensor, hidden: Tensor) -> Tensor:
        if form.times > 1:
            k, v = (x[:, :, None].expand(2, 3, form.times, 7, 8).reshape(2, 3 * form.times, 7, 8) for x in (k, v))
        masked = (q @ k.transpose(-2, -1) * 0.3).masked_fill(hidden, lowest)
        wide = torch.promote_types(q.dtype, torch.float32)
        return masked.softmax(-1, dtype=wide).to(q.dtype) @ v

    q, k, v = inputs(replace(form, dtype=dtype))
    hidden = torch.zeros(2, 1, 5, 7, dtype=torch.bool)
    hidden[0, 0, 2] = hidden[1, 0, 1, 3:] = True
    graph = traced(model, q, k, v, hidden)
    assert kt.apply(graph, shipped).count == 1
    assert len(fused(graph)) == 1
    expected = model(q, k, v, hidden)
    assert_as_exact(run_checked(graph, q, k, v, hidden), expected, model(q.double(), k.double(), v.double(), hidden))


@pytest.mark.slow
@pytest.mark.usefixtures("fresh_compiler")
@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS.keys())
def test_attention_through_torch_compile(device: str, form: Attention) -> None:
    """The whole of torch.compile: the fused operator is in the post-grad graph, the result as exact as eager's."""
    case = replace(form, mask=Mask("added", (False, True, False), in_float32=True), dtype=torch.bfloat16)
    seen: list[str] = []
    record = lambda graph: seen.extend(targets(graph))  # noqa: E731 - a pass is a function of the graph
    options = kt.options(patterns_gen, post_grad_custom_pre_pass=record, pattern_matcher=False)
    given_inputs = inputs(case, device)
    with torch.no_grad():
        found = torch.compile(eager(case), options=options)(*given_inputs)
    assert sum(SDPA in target for target in seen) == 1
    assert "aten.bmm.default" not in seen
    assert_as_exact(found, eager(case)(*given_inputs), exact(case, given_inputs))
    assert kt.stats().count == 1
