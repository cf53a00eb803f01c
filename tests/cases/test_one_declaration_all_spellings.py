"""Cases b1 to b7 and b10: one declaration takes every spelling of a thing, each by a variant of its own."""

from __future__ import annotations

import functools
import itertools
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, Literal

import pytest
import torch
from graphs import assert_as_exact, calls, hand_written, only, run_checked, targets, traced
from ops_for_cases import act, add_act, gquant, qmm, qmm_relu, rms, rms_gquant
from torch import Tensor
from torch.nn.functional import gelu

import kwtrace as kt
from kwtrace.engine import Engine

aten = torch.ops.aten
CPU = ("cpu",)
F32, BF16, F16 = torch.float32, torch.bfloat16, torch.float16
HALVES_TOO = kt.DTypes("T", F32, BF16, F16)
MODES = ["real", "symbolic"]

ACT = "kwcases.act.default"
ADD_ACT = "kwcases.add_act.default"
QMM = "kwcases.qmm.default"
QMM_RELU = "kwcases.qmm_relu.default"
RMS = "kwcases.rms.default"
RMS_GQUANT = "kwcases.rms_gquant.default"


@functools.cache
def patterns_of(rule: kt.Rule) -> kt.PatternSet:
    """Return the patterns of a rule, traced once."""
    return kt.trace(rule)


def fired(report: kt.Report) -> list[str]:
    """Return the variants that fired."""
    return [variant for counts in report.fired.values() for variant in counts]


def assert_untouched(
    patterns: kt.PatternSet, function: Callable[..., Any], *inputs: Tensor, mode: Any = "real"
) -> None:
    """Check that nothing matches, that every operator is still there, and that the result is the same to the bit."""
    graph = traced(function, *inputs, mode=mode)
    before, expected = targets(graph), graph(*inputs)
    assert kt.apply(graph, patterns).count == 0
    assert targets(graph) == before
    assert torch.equal(run_checked(graph, *inputs), expected)


def assert_fused(
    patterns: kt.PatternSet, function: Callable[..., Tensor], fused: str, *inputs: Tensor, mode: Any = "real"
) -> str:
    """Check that the fused operator is there once and yields eager's result to the bit; return what fired."""
    graph = traced(function, *inputs, mode=mode)
    assert not calls(graph, fused)
    report = kt.apply(graph, patterns)
    assert report.count == 1
    assert len(calls(graph, fused)) == 1
    assert torch.equal(run_checked(graph, *inputs), function(*inputs))
    (variant,) = fired(report)
    return variant


def integers(*shape: int) -> Tensor:
    """Return small integers, whose sums and products are exact in any order."""
    return torch.randint(-4, 5, shape).float()


# b1 and b2: optional tensors


@kt.rule(devices=CPU)
def qmm_then_relu(
    x1: Annotated[Tensor, kt.Shape("m k>1"), F32],
    x2: Annotated[Tensor, kt.Shape("k n>1"), F32],
    scale: Annotated[Tensor, kt.Shape("n"), F32],
    offset: Annotated[Tensor | None, kt.Shape("n"), F32],
    bias: Annotated[Tensor | None, kt.Shape("n"), F32],
) -> Tensor:
    """Search for a quantised product with or without offset and bias, and relu."""
    return qmm(x1, x2, scale, offset=offset, bias=bias).relu()


@qmm_then_relu.replacement
def _(x1: Tensor, x2: Tensor, scale: Tensor, offset: Tensor | None, bias: Tensor | None) -> Tensor:
    return qmm_relu(x1, x2, scale, offset=offset, bias=bias)


def qmm_inputs() -> list[Tensor]:
    """Return x1, x2, scale, offset and bias."""
    return [torch.randn(3, 4), torch.randn(4, 5), *torch.randn(3, 5)]


def qmm_graph(spelled: Callable[..., tuple[tuple[Any, ...], dict[str, Any]]]) -> Any:
    """Return a graph that calls qmm with the arguments as ``spelled`` says, and relu."""

    def build(graph: Any, *placeholders: Any) -> Any:
        args, kwargs = spelled(*placeholders)
        return graph.call_function(
            aten.relu.default, (graph.call_function(torch.ops.kwcases.qmm.default, args, kwargs),)
        )

    return hand_written(build, *qmm_inputs())


PRESENCE = ["left out", "None", "given"]


def spelling(positional: int, offset: str, bias: str, *, swapped: bool) -> Callable[..., Any]:
    """Return a spelling: so many positional arguments, and how offset and bias are passed, in either order."""

    def spelled(*nodes: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
        named = dict(zip(("x1", "x2", "scale", "offset", "bias"), nodes, strict=True))
        passed = {"x1": "given", "x2": "given", "scale": "given", "offset": offset, "bias": bias}
        kept = {
            name: None if passed[name] == "None" else node
            for name, node in named.items()
            if passed[name] in PRESENCE[1:]
        }
        args = tuple(kept.pop(name) for name in list(kept)[:positional])
        return args, dict(reversed(kept.items()) if swapped else kept.items())

    return spelled


@pytest.mark.parametrize("swapped", [False, True])
@pytest.mark.parametrize("positional", [0, 2, 3])
@pytest.mark.parametrize("bias", PRESENCE)
@pytest.mark.parametrize("offset", PRESENCE)
def test_b1_every_spelling_matches_once(offset: str, bias: str, positional: int, swapped: bool) -> None:
    """Absent, None and given, positional and by keyword: the variant fires, and passes on what is there."""
    graph = qmm_graph(spelling(positional, offset, bias, swapped=swapped))
    assert len(only(graph, QMM).args) == positional
    placeholders = [node for node in graph.graph.nodes if node.op == "placeholder"]
    inputs = qmm_inputs()
    report = kt.apply(graph, patterns_of(qmm_then_relu))
    given = {"offset": offset == "given", "bias": bias == "given"}
    assert fired(report) == [f"qmm_then_relu[offset={given['offset']}, bias={given['bias']}, device='cpu']"]
    assert report.count == 1
    assert not calls(graph, QMM)
    node = only(graph, QMM_RELU)
    assert node.kwargs.get("offset") is (placeholders[3] if given["offset"] else None)
    assert node.kwargs.get("bias") is (placeholders[4] if given["bias"] else None)
    x1, x2, scale, *more = inputs
    optional = {name: tensor for (name, there), tensor in zip(given.items(), more, strict=True) if there}
    assert torch.equal(run_checked(graph, *inputs), qmm(x1, x2, scale, **optional).relu())


def test_b1_there_are_four_variants() -> None:
    """Two optional tensors are four variants, and no more."""
    found = [dict(variant.axes) for variant in patterns_of(qmm_then_relu).variants]
    assert sorted((axes["offset"], axes["bias"]) for axes in found) == list(itertools.product((False, True), repeat=2))


def test_b1_offset_and_bias_are_not_mixed_up() -> None:
    """One tensor in the place of either argument, or of both, is passed on in that place."""
    x1, x2, scale, t, _ = qmm_inputs()
    results = []
    for names in (("offset",), ("bias",), ("offset", "bias")):
        function = qmm_with(names)
        variant = assert_fused(patterns_of(qmm_then_relu), function, QMM_RELU, x1, x2, scale, t)
        assert variant == f"qmm_then_relu[offset={'offset' in names}, bias={'bias' in names}, device='cpu']"
        results.append(function(x1, x2, scale, t))
    assert not any(torch.equal(a, b) for a, b in itertools.combinations(results, 2))


def qmm_with(names: tuple[str, ...]) -> Callable[..., Tensor]:
    """Return a graph in which one tensor is passed by each of ``names``."""
    return lambda x1, x2, scale, t: qmm(x1, x2, scale, **dict.fromkeys(names, t)).relu()


@pytest.mark.slow
@pytest.mark.usefixtures("fresh_compiler")
def test_b1_through_torch_compile() -> None:
    """A compile of all four forms fuses all four."""
    inputs = qmm_inputs()

    def model(x1: Tensor, x2: Tensor, scale: Tensor, offset: Tensor, bias: Tensor) -> list[Tensor]:
        pairs = [(None, None), (offset, None), (None, bias), (offset, bias)]
        return [qmm(x1, x2, scale, offset=o, bias=b).relu() for o, b in pairs]

    with torch.no_grad():
        found = torch.compile(model, options=kt.options(patterns_of(qmm_then_relu)))(*inputs)
    assert kt.stats().count == 4
    assert len(fired(kt.stats())) == 4
    assert all(torch.equal(one, other) for one, other in zip(found, model(*inputs), strict=True))


@kt.rule(devices=CPU)
def with_bias(
    x1: Annotated[Tensor, kt.Shape("m k>1"), F32],
    x2: Annotated[Tensor, kt.Shape("k n>1"), F32],
    scale: Annotated[Tensor, kt.Shape("n"), F32],
    bias: Annotated[Tensor, kt.Shape("n"), F32],
) -> Tensor:
    """Search for a quantised product with a bias, and relu."""
    return qmm(x1, x2, scale, bias=bias).relu()


@with_bias.replacement
def _(x1: Tensor, x2: Tensor, scale: Tensor, bias: Tensor) -> Tensor:
    return qmm_relu(x1, x2, scale, bias=bias)


@kt.rule(devices=CPU)
def without_bias(
    x1: Annotated[Tensor, kt.Shape("m k>1"), F32],
    x2: Annotated[Tensor, kt.Shape("k n>1"), F32],
    scale: Annotated[Tensor, kt.Shape("n"), F32],
) -> Tensor:
    """Search for a quantised product without a bias, and relu."""
    return qmm(x1, x2, scale).relu()


@without_bias.replacement
def _(x1: Tensor, x2: Tensor, scale: Tensor) -> Tensor:
    return qmm_relu(x1, x2, scale)


ORDERS = [(with_bias, without_bias), (without_bias, with_bias)]
BIASES = {"left out": "without_bias", "None": "without_bias", "given": "with_bias"}


@pytest.mark.parametrize("rules", ORDERS, ids=["with first", "without first"])
@pytest.mark.parametrize("bias", BIASES)
def test_b2_the_right_rule_in_either_order(bias: str, rules: tuple[kt.Rule, kt.Rule]) -> None:
    """Joined in either order, by ``|`` or traced together, the rule for what is there fires."""
    inputs = qmm_inputs()
    x1, x2, scale, _, given = inputs
    expected = qmm(x1, x2, scale, bias=given if bias == "given" else None).relu()
    for patterns in (patterns_of(rules[0]) | patterns_of(rules[1]), kt.trace(*rules)):
        graph = qmm_graph(spelling(3, "left out", bias, swapped=False))
        assert kt.apply(graph, patterns).fired.keys() == {BIASES[bias]}
        assert len(calls(graph, QMM_RELU)) == 1
        assert not calls(graph, QMM)
        assert torch.equal(run_checked(graph, *inputs), expected)


@pytest.mark.parametrize("bias", BIASES)
def test_b2_the_other_rule_alone_takes_nothing(bias: str) -> None:
    """None is never taken for a tensor, nor a tensor for None."""
    (other,) = (rule for rule in ORDERS[0] if rule.name != BIASES[bias])
    inputs = qmm_inputs()
    graph = qmm_graph(spelling(3, "left out", bias, swapped=False))
    before = targets(graph)
    expected = graph(*inputs)
    assert kt.apply(graph, patterns_of(other)).count == 0
    assert targets(graph) == before
    assert torch.equal(run_checked(graph, *inputs), expected)


@pytest.mark.parametrize("rules", ORDERS, ids=["with first", "without first"])
def test_b2_the_digest_does_not_depend_on_the_order(rules: tuple[kt.Rule, kt.Rule]) -> None:
    """Equal content is equal, in whatever order it was put together."""
    one, other = (patterns_of(rule) for rule in rules)
    assert (one | other).digest == (other | one).digest == kt.trace(*rules).digest


# b3: spellings of one call


@kt.rule(devices=CPU)
def addmm_plus_x(
    i: Annotated[Tensor, kt.Shape("n"), F32],
    x: Annotated[Tensor, kt.Shape("n>1 n"), F32],
    y: Annotated[Tensor, kt.Shape("n n"), F32],
) -> Tensor:
    """Search for addmm and its own first factor added: which factor is which can be told."""
    return act(torch.addmm(i, x, y) + x, mode="relu")


@addmm_plus_x.replacement
def _(i: Tensor, x: Tensor, y: Tensor) -> Tensor:
    return add_act(torch.addmm(i, x, y), x, mode="relu")


ADDMM: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
    "plain": torch.addmm,
    "factors spelled out": lambda i, x, y: torch.addmm(i, x, y, beta=1, alpha=1),
    "factors swapped": lambda i, x, y: torch.addmm(i, x, y, alpha=1, beta=1),
    "one factor": lambda i, x, y: torch.addmm(i, x, y, alpha=1),
    "by keyword": lambda i, x, y: torch.addmm(input=i, mat1=x, mat2=y),
    "by keyword, swapped": lambda i, x, y: torch.addmm(mat2=y, alpha=1, mat1=x, input=i),
    "a method": lambda i, x, y: i.addmm(x, y, beta=1),
}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", ADDMM)
def test_b3_python_spellings_are_one(name: str, mode: Any) -> None:
    """However a program writes the call, the rule takes it."""
    inputs = integers(4), integers(4, 4), integers(4, 4)
    assert_fused(
        patterns_of(addmm_plus_x),
        lambda i, x, y: act(ADDMM[name](i, x, y) + x, mode="relu"),
        ADD_ACT,
        *inputs,
        mode=mode,
    )


NODES: dict[str, Callable[[Any, Any, Any], tuple[tuple[Any, ...], dict[str, Any]]]] = {
    "plain": lambda i, x, y: ((i, x, y), {}),
    "factors spelled out": lambda i, x, y: ((i, x, y), {"beta": 1, "alpha": 1}),
    "factors swapped": lambda i, x, y: ((i, x, y), {"alpha": 1, "beta": 1}),
    "one factor": lambda i, x, y: ((i, x, y), {"beta": 1}),
    "by keyword": lambda i, x, y: ((), {"self": i, "mat1": x, "mat2": y}),
    "by keyword, swapped": lambda i, x, y: ((i,), {"alpha": 1, "mat2": y, "beta": 1, "mat1": x}),
}


def addmm_graph(name: str, *inputs: Tensor, **more: Any) -> Any:
    """Return a graph with a spelling of addmm as it stands in the node."""

    def build(graph: Any, i: Any, x: Any, y: Any) -> Any:
        args, kwargs = NODES[name](i, x, y)
        product = graph.call_function(aten.addmm.default, args, {**kwargs, **more})
        added = graph.call_function(aten.add.Tensor, (product, x))
        return graph.call_function(torch.ops.kwcases.act.default, (added,), {"mode": "relu"})

    return hand_written(build, *inputs)


@pytest.mark.parametrize("name", NODES)
def test_b3_node_spellings_are_one(name: str) -> None:
    """However a node holds the arguments, the rule takes it."""
    inputs = integers(4), integers(4, 4), integers(4, 4)
    graph = addmm_graph(name, *inputs)
    assert (only(graph, aten.addmm.default).args, dict(only(graph, aten.addmm.default).kwargs)) == NODES[name](
        *(node for node in graph.graph.nodes if node.op == "placeholder")
    )
    assert kt.apply(graph, patterns_of(addmm_plus_x)).count == 1
    assert len(calls(graph, ADD_ACT)) == 1
    i, x, y = inputs
    assert torch.equal(run_checked(graph, *inputs), (torch.addmm(i, x, y) + x).relu())


@pytest.mark.parametrize("more", [{"beta": 2}, {"alpha": 2}, {"beta": 0.5, "alpha": 0.5}], ids=str)
@pytest.mark.parametrize("name", NODES)
def test_b3_another_factor_is_another_thing(name: str, more: dict[str, float]) -> None:
    """In every spelling a factor that isn't 1 keeps the rule away."""
    inputs = integers(4), integers(4, 4), integers(4, 4)
    graph = addmm_graph(name, *inputs, **more)
    assert kt.apply(graph, patterns_of(addmm_plus_x)).count == 0
    i, x, y = inputs
    assert torch.equal(run_checked(graph, *inputs), (torch.addmm(i, x, y, **more) + x).relu())


@pytest.mark.parametrize("mode", MODES)
def test_b3_factors_of_the_product_in_another_order(mode: Any) -> None:
    """``y @ x`` is not ``x @ y``, though both are legal."""
    inputs = integers(4), integers(4, 4), integers(4, 4)
    swapped = lambda i, x, y: act(torch.addmm(i, mat1=y, mat2=x) + x, mode="relu")  # noqa: E731 - one expression
    assert_untouched(patterns_of(addmm_plus_x), swapped, *inputs, mode=mode)


# b4: activations over addmm, and factors for which 1 is special

Activation = Literal["relu", "gelu", "gelu_tanh"]
Factor = Annotated[int, kt.Captured(special=(1,))]


def activate(x: Tensor, mode: str) -> Tensor:
    """Return an activation as a program writes it."""
    return x.relu() if mode == "relu" else gelu(x, approximate="tanh" if mode == "gelu_tanh" else "none")


def combine(i: Tensor, x: Tensor, y: Tensor, beta: int, alpha: int) -> Tensor:
    """Return addmm written out; a factor of 1 is not in the graph."""
    product = torch.mm(x, y)
    return (i if beta == 1 else i * beta) + (product if alpha == 1 else product * alpha)


def addmm(i: Tensor, x: Tensor, y: Tensor, beta: int, alpha: int) -> Tensor:
    """Return addmm in one call."""
    return torch.addmm(i, x, y, beta=beta, alpha=alpha)


def activated(linear: Callable[..., Tensor]) -> kt.Rule:
    """Return the rule for an activation over ``linear``."""

    def search(
        i: Annotated[Tensor, kt.Shape("n>1"), F32],
        x: Annotated[Tensor, kt.Shape("m>1 k>1"), F32],
        y: Annotated[Tensor, kt.Shape("k n"), F32],
        *,
        beta: Factor,
        alpha: Factor,
        mode: Activation,
    ) -> Tensor:
        return activate(linear(i, x, y, beta, alpha), mode)

    rule = kt.rule(name=f"activated_{linear.__name__}", devices=CPU)(search)

    @rule.replacement
    def _(i: Tensor, x: Tensor, y: Tensor, *, beta: int, alpha: int, mode: str) -> Tensor:
        return act(linear(i, x, y, beta, alpha), mode=mode)

    return rule


ACTIVATED = {linear.__name__: activated(linear) for linear in (combine, addmm)}
LINEAR = {"combine": combine, "addmm": addmm}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("activation", ["relu", "gelu", "gelu_tanh"])
@pytest.mark.parametrize(("beta", "alpha"), list(itertools.product((1, 2), repeat=2)))
@pytest.mark.parametrize("form", LINEAR)
def test_b4_every_factor_and_activation(form: str, beta: int, alpha: int, activation: str, mode: Any) -> None:
    """A factor of 1, in the graph or not, and any other; each activation is taken for itself."""
    inputs = integers(5) / 4, integers(3, 4) / 4, integers(4, 5) / 4
    function = lambda i, x, y: activate(LINEAR[form](i, x, y, beta, alpha), activation)  # noqa: E731 - it closes over all
    patterns = patterns_of(ACTIVATED[form])
    variant = assert_fused(patterns, function, ACT, *inputs, mode=mode)
    assert f"mode='{activation}'" in variant
    if form == "combine":
        assert ("beta=1," in variant, "alpha=1," in variant) == (beta == 1, alpha == 1)
    graph = traced(function, *inputs, mode=mode)
    kt.apply(graph, patterns)
    assert only(graph, ACT).kwargs == {"mode": activation}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("form", LINEAR)
def test_b4_tanh_gelu_never_becomes_erf_gelu(form: str, mode: Any) -> None:
    """Without the variants of its own, a gelu of either kind is left alone by those of the other."""
    inputs = torch.randn(5), torch.randn(3, 4), torch.randn(4, 5)
    patterns = patterns_of(ACTIVATED[form])
    for own, other in (("gelu", "gelu_tanh"), ("gelu_tanh", "gelu")):
        function = over_twice(form, own)
        assert not torch.equal(function(*inputs), over_twice(form, other)(*inputs))
        assert_untouched(patterns.select(mode=other) | patterns.select(mode="relu"), function, *inputs, mode=mode)
        assert assert_fused(patterns.select(mode=own), function, ACT, *inputs, mode=mode)


def over_twice(form: str, activation: str) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    """Return an activation over addmm of which the summand counts twice."""
    return lambda i, x, y: activate(LINEAR[form](i, x, y, 2, 1), activation)


@pytest.mark.parametrize(("beta", "alpha"), list(itertools.product((1, 2), repeat=2)))
def test_b4_a_special_value_is_taken_by_its_own_variant(beta: int, alpha: int) -> None:
    """Where a special value doesn't change the graph, its variant and the general one match: its own fires."""
    inputs = integers(5), integers(3, 4), integers(4, 5)
    function = lambda i, x, y: activate(addmm(i, x, y, beta, alpha), "relu")  # noqa: E731 - it closes over the factors
    variant = assert_fused(patterns_of(ACTIVATED["addmm"]), function, ACT, *inputs)
    assert ("beta=1," in variant, "alpha=1," in variant) == (beta == 1, alpha == 1)


@kt.rule(devices=CPU)
def scaled_sum(
    x: Annotated[Tensor, kt.Shape("m>1 n>1"), F32],
    y: Annotated[Tensor, kt.Shape("m n"), F32],
    *,
    scale: Annotated[float, kt.Captured(special=(0.0,))],
) -> Tensor:
    """Search for a scaled sum whose general replacement divides by the scale, and whose special one doesn't."""
    return act(x * scale + y, mode="relu")


@scaled_sum.replacement
def _(x: Tensor, y: Tensor, *, scale: float) -> Tensor:
    return add_act(x * 0.0, y, mode="relu") if scale == 0.0 else add_act(x, y / scale, mode="relu") * scale


@pytest.mark.parametrize("scale", [0.125, 0.0])
def test_b4_a_special_value_gets_its_own_replacement(scale: float) -> None:
    """A rule may declare a value special because its general replacement is wrong there."""
    function = lambda x, y: act(x * scale + y, mode="relu")  # noqa: E731 - it closes over the scale
    variant = assert_fused(patterns_of(scaled_sum), function, ADD_ACT, torch.randn(3, 8), torch.randn(3, 8))
    assert ("scale=0.0" in variant) == (scale == 0.0)


@pytest.mark.parametrize("form", LINEAR)
def test_b4_a_float_is_no_captured_int(form: str) -> None:
    """A factor of another type than the rule captures is left alone."""
    inputs = integers(5), integers(3, 4), integers(4, 5)
    function = lambda i, x, y: activate(LINEAR[form](i, x, y, 0.5, 0.5), "relu")  # noqa: E731 - it closes over form
    assert_untouched(patterns_of(ACTIVATED[form]), function, *inputs)


@pytest.mark.slow
@pytest.mark.usefixtures("fresh_compiler")
def test_b4_through_torch_compile() -> None:
    """All factors and activations in one compiled graph are fused, each by its own variant."""
    inputs = torch.randn(5), torch.randn(3, 4), torch.randn(4, 5)
    points = list(itertools.product((1, 2), (1, 2), ("relu", "gelu", "gelu_tanh")))

    def model(i: Tensor, x: Tensor, y: Tensor) -> list[Tensor]:
        return [activate(addmm(i, x, y, beta, alpha), mode) for beta, alpha, mode in points]

    with torch.no_grad():
        found = torch.compile(model, options=kt.options(patterns_of(ACTIVATED["addmm"])))(*inputs)
    assert kt.stats().count == len(points)
    for one, other, exact in zip(found, model(*inputs), model(*(x.double() for x in inputs)), strict=True):
        assert_as_exact(one, other, exact)


# b5: dtypes that change the graph


def gelu_rule(name: str, *dtypes: torch.dtype) -> kt.Rule:
    """Return a rule for gelu over addmm in some dtypes."""

    def search(i: Tensor, x: Tensor, y: Tensor) -> Tensor:
        return gelu(torch.addmm(i, x, y))

    variable = kt.DTypes("T", *dtypes)
    shapes = {"i": "n>1", "x": "m>1 k>1", "y": "k n"}
    search.__annotations__ |= {key: Annotated[Tensor, kt.Shape(text), variable] for key, text in shapes.items()}
    rule = kt.rule(name=name, devices=CPU)(search)
    rule.replacement(lambda i, x, y: act(torch.addmm(i, x, y), mode="gelu"))
    return rule


FLOATS = (F32, BF16, F16)
ONE_DTYPE = {dtype: gelu_rule(f"gelu_{str(dtype).removeprefix('torch.')}", dtype) for dtype in FLOATS}
ALL_DTYPES = {"as listed": gelu_rule("gelu_all", *FLOATS), "reversed": gelu_rule("gelu_all", *reversed(FLOATS))}


def layer(dtype: torch.dtype) -> list[Tensor]:
    """Return summand, input and weight of a linear layer."""
    return [torch.randn(5).to(dtype), torch.randn(3, 4).to(dtype), torch.randn(4, 5).to(dtype)]


def gelu_addmm(i: Tensor, x: Tensor, y: Tensor) -> Tensor:
    """Return gelu over addmm."""
    return gelu(torch.addmm(i, x, y))


def test_b5_half_types_upcast_and_look_alike() -> None:
    """The premise: graphs of both half types have the same operators, the float32 graph has no casts."""
    single, *halves = (targets(traced(gelu_addmm, *layer(dtype))) for dtype in FLOATS)
    cast = "prims.convert_element_type.default"
    assert halves[0] == halves[1]
    assert halves[0].count(cast) == 2
    assert cast not in single


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("order", ALL_DTYPES)
def test_b5_one_rule_takes_each_dtype_by_its_own_variant(order: str, dtype: torch.dtype, mode: Any) -> None:
    """The variant of the graph's dtype fires, in whatever order the dtypes are declared."""
    variant = assert_fused(patterns_of(ALL_DTYPES[order]), gelu_addmm, ACT, *layer(dtype), mode=mode)
    assert variant == f"gelu_all[T={dtype}, device='cpu']"


@pytest.mark.parametrize("order", list(itertools.permutations(FLOATS)), ids=lambda o: "-".join(map(str, o)))
def test_b5_three_rules_in_any_order(order: tuple[torch.dtype, ...]) -> None:
    """Registered as three rules, in any order, each graph is taken by the rule of its dtype."""
    patterns = functools.reduce(kt.PatternSet.__or__, (patterns_of(ONE_DTYPE[dtype]) for dtype in order))
    inputs = [tensor for dtype in FLOATS for tensor in layer(dtype)]

    def model(*tensors: Tensor) -> tuple[Tensor, ...]:
        return tuple(gelu_addmm(*tensors[place : place + 3]) for place in (0, 3, 6))

    graph = traced(model, *inputs)
    report = kt.apply(graph, patterns)
    assert {rule: sum(counts.values()) for rule, counts in report.fired.items()} == dict.fromkeys(
        ("gelu_float32", "gelu_bfloat16", "gelu_float16"), 1
    )
    assert len(calls(graph, ACT)) == 3
    for one, other in zip(run_checked(graph, *inputs), model(*inputs), strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_b5_rules_of_other_dtypes_take_nothing(dtype: torch.dtype) -> None:
    """Without the rule of its dtype a graph is left alone."""
    first, second = (patterns_of(rule) for own, rule in ONE_DTYPE.items() if own is not dtype)
    for patterns in (first | second, second | first):
        assert_untouched(patterns, gelu_addmm, *layer(dtype))


# b6: a mask of another dtype

M = kt.DTypes("M", F32, BF16, F16)
PAIRS = [(F32, F32), (F16, F16), (F16, F32), (BF16, BF16), (BF16, F32)]
"""Dtypes of the scores and of the mask: the same, or float32."""


@kt.rule(devices=CPU, where=lambda T, M: M in (T, F32))  # noqa: N803 - dtype variables are named like type variables
def masked_scores(
    q: Annotated[Tensor, kt.Shape("b s d>1"), HALVES_TOO],
    k: Annotated[Tensor, kt.Shape("b t d"), HALVES_TOO],
    mask: Annotated[Tensor, kt.Shape("b s t>1"), M],
) -> Tensor:
    """Search for scores and a mask added to them."""
    return act(torch.matmul(q, k.transpose(-2, -1)) + mask, mode="sigmoid")


@masked_scores.replacement
def _(q: Tensor, k: Tensor, mask: Tensor) -> Tensor:
    return add_act(torch.matmul(q, k.transpose(-2, -1)), mask, mode="sigmoid")


def matching(patterns: kt.PatternSet, graph: Any) -> set[str]:
    """Return every variant that matches somewhere in a graph, each family asked alone."""
    found = (match for family in patterns.families for match in Engine(kt.PatternSet((family,))).find(graph.graph))
    return {str(match.variant) for match in found}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(("dtype", "mask_dtype"), PAIRS, ids=str)
def test_b6_scores_and_mask_match_one_variant(dtype: torch.dtype, mask_dtype: torch.dtype, mode: Any) -> None:
    """Each pairing is taken by its own variant, and by no other."""
    inputs = torch.randn(2, 3, 4).to(dtype), torch.randn(2, 5, 4).to(dtype), torch.randn(2, 3, 5).to(mask_dtype)
    function = lambda q, k, mask: act(q @ k.transpose(1, 2) + mask, mode="sigmoid")  # noqa: E731 - one expression
    expected = f"masked_scores[T={dtype}, M={mask_dtype}, device='cpu']"
    assert matching(patterns_of(masked_scores), traced(function, *inputs, mode=mode)) == {expected}
    assert assert_fused(patterns_of(masked_scores), function, ADD_ACT, *inputs, mode=mode) == expected


@pytest.mark.parametrize(("dtype", "mask_dtype"), [(F32, F16), (BF16, F16), (F16, torch.float64)], ids=str)
def test_b6_scores_and_mask_of_a_pairing_that_is_no_variant(dtype: torch.dtype, mask_dtype: torch.dtype) -> None:
    """A pairing that the rule doesn't have is left alone."""
    inputs = torch.randn(2, 3, 4).to(dtype), torch.randn(2, 5, 4).to(dtype), torch.randn(2, 3, 5).to(mask_dtype)
    function = lambda q, k, mask: act(q @ k.transpose(1, 2) + mask, mode="sigmoid")  # noqa: E731 - one expression
    assert_untouched(patterns_of(masked_scores), function, *inputs)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(("dtype", "mask_dtype"), PAIRS, ids=str)
def test_b6_attention_matches_one_variant(
    shipped: kt.PatternSet, dtype: torch.dtype, mask_dtype: torch.dtype, mode: Any
) -> None:
    """The shipped attention takes each pairing by one variant of its own, and as exactly as eager."""
    q, k, v = (torch.randn(2, 3, size, 8).to(dtype) for size in (5, 7, 7))
    mask = torch.randn(2, 3, 5, 7).to(mask_dtype)

    def function(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
        return (q @ k.transpose(2, 3) * 0.125 + mask).softmax(-1).to(q.dtype) @ v

    graph = traced(function, q, k, v, mask, mode=mode)
    (variant,) = matching(shipped, graph)
    assert variant.startswith(f"attention[T={dtype}, mask=True, M={mask_dtype}") or (
        variant.startswith("attention[") and f"T={dtype}," in variant and f"M={mask_dtype}," in variant
    )
    assert kt.apply(graph, shipped).count == 1
    assert sum("scaled_dot_product" in target for target in targets(graph)) == 1
    exact = function(*(x.double() for x in (q, k, v, mask)))
    assert_as_exact(run_checked(graph, q, k, v, mask), function(q, k, v, mask), exact)


# b7: 64 variants of one rule

EPS = (1e-5, 1e-6)
GROUPS = (2, 4, 8, 16)
FLAGS = (False, True)
POINTS = list(itertools.product(EPS, GROUPS, FLAGS, FLAGS, FLAGS))


@kt.rule(devices=CPU)
def norm_gquant(
    x: Annotated[Tensor, kt.Shape("m>1 g>1*16"), F32],
    w: Annotated[Tensor, kt.Shape("g*16"), F32],
    *,
    eps: Annotated[float, kt.OneOf(*EPS)],
    group: Annotated[int, kt.OneOf(*GROUPS)],
    col_major: bool,
    ue8m0: bool,
    tma: bool,
) -> tuple[Tensor, Tensor]:
    """Search for a norm and a quantisation by groups, with every combination of arguments."""
    return gquant(rms(x, w, eps), group, ue8m0=ue8m0, col_major=col_major, tma=tma)


@norm_gquant.replacement
def _(
    x: Tensor, w: Tensor, *, eps: float, group: int, col_major: bool, ue8m0: bool, tma: bool
) -> tuple[Tensor, Tensor]:
    return rms_gquant(x, w, eps, group, ue8m0=ue8m0, col_major=col_major, tma=tma)


def name_of(point: tuple[Any, ...]) -> str:
    """Return the name of a variant."""
    names = ("eps", "group", "col_major", "ue8m0", "tma")
    return f"norm_gquant[{', '.join(f'{n}={v!r}' for n, v in zip(names, point, strict=True))}, device='cpu']"


def quantised(point: tuple[Any, ...]) -> Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]:
    """Return the graph of one variant."""
    eps, group, col_major, ue8m0, tma = point
    return lambda x, w: gquant(rms(x, w, eps), group, ue8m0=ue8m0, col_major=col_major, tma=tma)


def test_b7_there_are_64_variants_in_the_order_of_the_axes() -> None:
    """Every combination is a variant, named by its axes in the order of the declaration."""
    names = [str(variant) for variant in patterns_of(norm_gquant).variants]
    assert len(names) == len(set(names)) == 64
    assert sorted(names) == sorted(map(name_of, POINTS))


@pytest.mark.slow
def test_b7_another_process_gives_the_same() -> None:
    """Names, order and content don't depend on the process and its hashing."""
    folder = Path(__file__).parent
    script = (
        "import kwtrace as kt\n"
        "from test_one_declaration_all_spellings import norm_gquant\n"
        "found = kt.trace(norm_gquant)\n"
        "print(found.digest, *found.variants, sep='\\n')\n"
    )
    path = os.pathsep.join([str(folder), str(folder.parent), str(folder.parent.parent)])
    env = {**os.environ, "PYTHONPATH": path, "PYTHONHASHSEED": "7"}
    run = subprocess.run([sys.executable, "-c", script], env=env, capture_output=True, text=True, check=True)
    patterns = patterns_of(norm_gquant)
    assert run.stdout.splitlines() == [patterns.digest, *map(str, patterns.variants)]


@pytest.mark.parametrize("eps", EPS)
@pytest.mark.parametrize("group", GROUPS)
def test_b7_each_graph_is_taken_by_its_own_variant(eps: float, group: int) -> None:
    """Of 64 variants the one with the graph's arguments fires; its results are the graph's, to the bit."""
    x, w = torch.randn(3, 32) * 1e-3, torch.randn(32)
    for point in (p for p in POINTS if p[:2] == (eps, group)):
        graph = traced(quantised(point), x, w)
        assert fired(kt.apply(graph, patterns_of(norm_gquant))) == [name_of(point)]
        assert len(calls(graph, RMS_GQUANT)) == 1
        for one, other in zip(run_checked(graph, x, w), quantised(point)(x, w), strict=True):
            assert torch.equal(one, other)


def test_b7_the_arguments_tell_all_graphs_apart() -> None:
    """The premise: no two of the 64 graphs yield the same."""
    x, w = torch.randn(3, 32) * 1e-3, torch.randn(32)
    results = {tuple((tuple(t.shape), tuple(t.flatten().tolist())) for t in quantised(p)(x, w)) for p in POINTS}
    assert len(results) == 64


NEAR: dict[str, tuple[Any, ...]] = {
    "another eps": (1e-4, 4, False, True, False),
    "another group": (1e-5, 32, False, True, False),
}


@pytest.mark.parametrize("point", NEAR.values(), ids=NEAR.keys())
def test_b7_a_value_outside_the_axes(point: tuple[Any, ...]) -> None:
    """A value that no variant has is left alone."""
    x, w = torch.randn(3, 32), torch.randn(32)
    graph = traced(quantised(point), x, w)
    before = targets(graph)
    assert kt.apply(graph, patterns_of(norm_gquant)).count == 0
    assert targets(graph) == before


def seconds(function: Callable[[], Any], rounds: int = 5) -> float:
    """Return the least time that ``function`` took."""
    times = []
    for _ in range(rounds):
        start = time.perf_counter()
        function()
        times.append(time.perf_counter() - start)
    return min(times)


def test_b7_looking_for_64_variants_is_not_64_times_the_work() -> None:
    """Variants of a family are told apart by one look-up: time grows with the families, not with the variants."""
    whole = patterns_of(norm_gquant)
    single = whole.select(**dict(whole.variants[0].axes))
    assert len(single.variants) == 1
    assert len(whole.families) <= 16

    def model(x: Tensor, w: Tensor) -> list[Tensor]:
        return [gquant(rms(x, w, 1e-4), 4, ue8m0=True, col_major=False)[0] for _ in range(50)]

    graph = traced(model, torch.randn(3, 32), torch.randn(32)).graph
    many, one = Engine(whole), Engine(single)
    assert many.find(graph) == one.find(graph) == []
    assert seconds(lambda: many.find(graph)) <= 2 * len(whole.families) * seconds(lambda: one.find(graph))


# b10: casts that one example loses


@kt.rule(devices=CPU)
def llama_rms(
    x: Annotated[Tensor, kt.Shape("b s d>1"), HALVES_TOO],
    w: Annotated[Tensor, kt.Shape("d"), HALVES_TOO],
    *,
    eps: float,
) -> Tensor:
    """Search for a norm that computes in float32 and casts back."""
    h = x.to(F32)
    h = h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + eps)
    return w * h.to(x.dtype)


@llama_rms.replacement
def _(x: Tensor, w: Tensor, *, eps: float) -> Tensor:
    return rms(x, w, eps)


def norm_of(x: Tensor, w: Tensor, eps: float) -> Tensor:
    """Return the norm as a model writes it."""
    h = x.to(F32)
    h = h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + eps)
    return w * h.to(x.dtype)


def norm(x: Tensor, w: Tensor) -> Tensor:
    """Return the norm with an eps that is no rule's example."""
    return norm_of(x, w, 1e-3)


def exact_norm(x: Tensor, w: Tensor, eps: float = 1e-3) -> Tensor:
    """Return the norm in float64."""
    x, w = x.double(), w.double()
    return w * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps))


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_b10_both_structures_are_variants(dtype: torch.dtype) -> None:
    """Of float32 the casts are gone from the pattern, of half types both are there."""
    families = patterns_of(llama_rms).select(T=dtype).families
    assert families
    casts = 0 if dtype is F32 else 2
    for family in families:
        assert [op.target for op in family.skeleton.search].count("prims.convert_element_type.default") == casts


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_b10_both_structures_match(dtype: torch.dtype, mode: Any) -> None:
    """The graph of each dtype is taken by its own variant, with the graph's own eps."""
    x, w = (torch.randn(2, 3, 8) * 0.03).to(dtype), torch.randn(8).to(dtype)
    graph = traced(norm, x, w, mode=mode)
    assert fired(kt.apply(graph, patterns_of(llama_rms))) == [f"llama_rms[T={dtype}, device='cpu']"]
    assert targets(graph) == [RMS]
    assert only(graph, RMS).args[2] == 1e-3
    assert_as_exact(run_checked(graph, x, w), norm(x, w), exact_norm(x, w))


def test_b10_both_in_one_graph() -> None:
    """A graph with a float32 norm and a bfloat16 norm has both fused."""
    inputs = torch.randn(2, 3, 8), torch.randn(8), torch.randn(2, 3, 8).bfloat16(), torch.randn(8).bfloat16()
    graph = traced(lambda x, w, y, v: (norm(x, w), norm_of(y, v, 0.125)), *inputs)
    report = kt.apply(graph, patterns_of(llama_rms))
    assert sorted(fired(report)) == [f"llama_rms[T={dtype}, device='cpu']" for dtype in (BF16, F32)]
    assert sorted(node.args[2] for node in calls(graph, RMS)) == [1e-3, 0.125]
    found = run_checked(graph, *inputs)
    assert_as_exact(found[0], norm(*inputs[:2]), exact_norm(*inputs[:2]))
    assert_as_exact(found[1], norm_of(*inputs[2:], 0.125), exact_norm(*inputs[2:], 0.125))


def over_root(x: Tensor) -> Tensor:
    """Return ``x`` over the root of its mean square, in its own dtype."""
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-3)


STRAYS: dict[str, tuple[torch.dtype, Callable[[Tensor, Tensor], Tensor]]] = {
    "bfloat16 without casts": (BF16, lambda x, w: w * over_root(x)),
    "float16 without casts": (F16, lambda x, w: w * over_root(x)),
    "cast back to the other half type": (BF16, lambda x, w: w * over_root(x.float()).to(F16)),
    "cast by way of the other half type": (BF16, lambda x, w: w * over_root(x.float()).to(F16).to(BF16)),
    "multiplied in float32": (BF16, lambda x, w: w * over_root(x.float())),
    "float32 rounded on the way": (F32, lambda x, w: w * over_root(x).to(BF16).to(F32)),
    "computed in float64": (BF16, lambda x, w: w * over_root(x.double()).to(BF16)),
}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", STRAYS)
def test_b10_other_casts_are_left_alone(name: str, mode: Any) -> None:
    """A norm in another precision than the rule's is not the rule's."""
    dtype, function = STRAYS[name]
    x, w = torch.randn(2, 3, 8).to(dtype), torch.randn(8).to(dtype)
    assert_untouched(patterns_of(llama_rms), function, x, w, mode=mode)


def test_b10_casts_of_the_inputs_are_not_the_rules() -> None:
    """Half inputs cast to float32 and a result that is not cast back are the float32 norm of what was cast."""
    x, w = torch.randn(2, 3, 8).bfloat16(), torch.randn(8).bfloat16()
    graph = traced(lambda x, w: norm(x.float(), w.float()), x, w)
    assert fired(kt.apply(graph, patterns_of(llama_rms))) == [f"llama_rms[T={F32}, device='cpu']"]
    assert len(calls(graph, RMS)) == 1
    found = run_checked(graph, x, w)
    assert_as_exact(found, norm(x.float(), w.float()), exact_norm(x, w))


@pytest.mark.slow
@pytest.mark.usefixtures("fresh_compiler")
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_b10_through_torch_compile(dtype: torch.dtype) -> None:
    """Compiled, each dtype is fused."""
    x, w = torch.randn(2, 3, 8).to(dtype), torch.randn(8).to(dtype)
    with torch.no_grad():
        found = torch.compile(norm, options=kt.options(patterns_of(llama_rms)))(x, w)
    assert fired(kt.stats()) == [f"llama_rms[T={dtype}, device='cpu']"]
    assert_as_exact(found, norm(x, w), exact_norm(x, w))
