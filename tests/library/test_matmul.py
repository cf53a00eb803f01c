"""The tutorial rule: every combination fires on its own graph, on no other, and yields what eager yields."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from graphs import assert_as_exact, calls, fake_traced, only, run_checked, targets, traced
from hypothesis import given
from hypothesis import strategies as st
from strategies import LAYOUTS, VALUES, layouts, seeds, sizes, tensor
from torch import Tensor, fx
from torch.nn.functional import gelu

import kwtrace as kt
import patterns_gen
from kwtrace.library import ops

FUSED = "kwtrace.mm_act.default"
UNFUSED = ["aten.mm.default", "kwtrace.act.default"]
DTYPES = (torch.float32, torch.bfloat16)
COMBINATIONS = tuple(itertools.product(DTYPES, (False, True), ("none", "tanh"), (None, torch.float32, torch.float16)))
"""Every value of T, negate, approximate and out_dtype."""

Combination = tuple[torch.dtype, bool, str, torch.dtype | None]


def written(combination: Combination) -> Callable[[Tensor, Tensor], Tensor]:
    """Return the function that a user writes for a combination."""
    _, negate, approximate, out_dtype = combination
    return lambda a, b: ops.act(torch.mm(a, b), negate=negate, approximate=approximate, out_dtype=out_dtype)


def selected(patterns: kt.PatternSet, combination: Combination, device: str) -> kt.PatternSet:
    """Return the variant of one combination."""
    dtype, negate, approximate, out_dtype = combination
    return patterns.select(
        "mm_act", T=dtype, negate=negate, approximate=approximate, out_dtype=out_dtype, device=device
    )


def is_combination(node: fx.Node, combination: Combination) -> bool:
    """Tell whether a node has the dtype and arguments of a combination, whatever way they are spelled."""
    dtype, negate, approximate, out_dtype = combination
    wanted = {"negate": negate, "approximate": approximate, "out_dtype": out_dtype}
    defaults: dict[str, Any] = {"negate": False, "approximate": "none", "out_dtype": None}
    found = {**defaults, **node.kwargs}
    source = node.args[0]
    assert isinstance(source, fx.Node)
    return found == wanted and type(found["negate"]) is bool and source.meta["val"].dtype is dtype


@pytest.fixture(scope="module")
def cpu_graphs() -> dict[Combination, fx.GraphModule]:
    """Return the graph of each combination, traced on CPU."""
    return {c: traced(written(c), torch.randn(3, 4).to(c[0]), torch.randn(4, 5).to(c[0])) for c in COMBINATIONS}


def copied(module: fx.GraphModule) -> fx.GraphModule:
    """Return a copy of a graph to rewrite."""
    graph = fx.Graph()
    graph.output(graph.graph_copy(module.graph, {}))
    return fx.GraphModule(module, graph)


def test_the_set_holds_every_combination_once_per_device(shipped: kt.PatternSet) -> None:
    """There is exactly one variant per combination and device."""
    found = [tuple(value for _, value in variant.axes) for variant in shipped.select("mm_act").variants]
    assert sorted(map(str, found)) == sorted(str((*c, device)) for c in COMBINATIONS for device in ("cpu", "cuda"))


@pytest.mark.parametrize("combination", COMBINATIONS, ids=str)
def test_a_variant_fires_on_its_own_combination_and_no_other(
    shipped: kt.PatternSet, cpu_graphs: dict[Combination, fx.GraphModule], combination: Combination
) -> None:
    """Of the graphs of all combinations, one variant alone rewrites the one graph that is its own."""
    variant = selected(shipped, combination, "cpu")
    assert len(variant.variants) == 1
    for other, module in cpu_graphs.items():
        graph = copied(module)
        report = kt.apply(graph, variant)
        if other == combination:
            assert report.count == 1
            assert targets(graph) == [FUSED]
            assert is_combination(only(graph, FUSED), combination)
        else:
            assert report.count == 0
            assert targets(graph) == UNFUSED


@pytest.mark.parametrize("combination", COMBINATIONS, ids=str)
def test_the_whole_set_puts_in_the_arguments_that_the_graph_has(
    shipped: kt.PatternSet, cpu_graphs: dict[Combination, fx.GraphModule], combination: Combination
) -> None:
    """With all variants at work the fused operator gets the combination's own arguments, and yields what eager does."""
    graph = copied(cpu_graphs[combination])
    report = kt.apply(graph, shipped)
    (fired,) = report.fired["mm_act"]
    assert fired == str(selected(shipped, combination, "cpu").variants[0])
    assert [is_combination(only(graph, FUSED), c) for c in COMBINATIONS].count(True) == 1
    a, b = torch.randn(3, 4).to(combination[0]), torch.randn(4, 5).to(combination[0])
    assert torch.equal(run_checked(graph, a, b), written(combination)(a, b))


@pytest.mark.parametrize("combination", COMBINATIONS, ids=str)
def test_cuda_variants_match_graphs_traced_for_a_gpu(shipped: kt.PatternSet, combination: Combination) -> None:
    """A graph of fake CUDA tensors is rewritten by its own CUDA variant, on a machine with or without a GPU."""
    graph = fake_traced(written(combination), (3, 4), (4, 5), dtype=combination[0], device="cuda")
    assert kt.apply(graph, shipped.select("mm_act", device="cpu")).count == 0
    assert kt.apply(graph, shipped).fired == {"mm_act": {str(selected(shipped, combination, "cuda").variants[0]): 1}}
    assert is_combination(only(graph, FUSED), combination)
    assert only(graph, FUSED).meta["val"].device.type == "cuda"


@pytest.mark.usefixtures("fresh_compiler")
def test_every_combination_fires_through_torch_compile(device: str) -> None:
    """One compile of all combinations: each is one fused operator with its own arguments in the post-grad graph."""
    seen: list[tuple[Any, ...]] = []

    def record(graph: fx.Graph) -> None:
        nodes = [n for n in graph.nodes if n.op == "call_function"]
        seen.extend((str(n.target), dict(n.kwargs), n.args[0].meta["val"].dtype) for n in nodes)

    def model(pairs: list[tuple[Tensor, Tensor]]) -> list[Tensor]:
        return [written(c)(a, b) for c, (a, b) in zip(COMBINATIONS, pairs, strict=True)]

    pairs = [(torch.randn(3, 4).to(device, c[0]), torch.randn(4, 5).to(device, c[0])) for c in COMBINATIONS]
    options = kt.options(patterns_gen, post_grad_custom_pre_pass=record)
    with torch.no_grad():
        found = torch.compile(model, options=options)(pairs)
        expected = model(pairs)
    for one, other in zip(found, expected, strict=True):
        assert one.dtype is other.dtype
        assert torch.equal(one, other)
    defaults = {"negate": False, "approximate": "none", "out_dtype": None}
    fused = [tuple({**defaults, **kwargs}.values()) for target, kwargs, _ in seen if target == FUSED]
    dtypes = [dtype for target, _, dtype in seen if target == FUSED]
    assert sorted(map(str, zip(dtypes, *zip(*fused, strict=True), strict=True))) == sorted(map(str, COMBINATIONS))
    assert not {target for target, _, _ in seen} & set(UNFUSED)
    assert kt.stats().count == len(COMBINATIONS)


@pytest.mark.usefixtures("fresh_compiler")
@pytest.mark.parametrize("combination", [COMBINATIONS[0], COMBINATIONS[11], COMBINATIONS[22]], ids=str)
def test_one_variant_alone_fires_on_no_other_combination_through_torch_compile(
    shipped: kt.PatternSet, combination: Combination
) -> None:
    """Compiled with one variant only, a model of all combinations holds one fused operator: that variant's."""
    seen: list[fx.Node] = []

    def model(pairs: list[tuple[Tensor, Tensor]]) -> list[Tensor]:
        return [written(c)(a, b) for c, (a, b) in zip(COMBINATIONS, pairs, strict=True)]

    pairs = [(torch.randn(3, 4).to(c[0]), torch.randn(4, 5).to(c[0])) for c in COMBINATIONS]
    record = lambda graph: seen.extend(calls(graph, FUSED))  # noqa: E731 - a pass is a function of the graph
    options = kt.options(selected(shipped, combination, "cpu"), post_grad_custom_pre_pass=record)
    with torch.no_grad():
        found = torch.compile(model, options=options)(pairs)
        assert all(torch.equal(x, y) for x, y in zip(found, model(pairs), strict=True))
    assert len(seen) == 1
    assert is_combination(seen[0], combination)


def reference(a: Tensor, b: Tensor, combination: Combination) -> Tensor:
    """Return the result in float64."""
    _, negate, approximate, _ = combination
    result = gelu(a.double() @ b.double(), approximate=approximate)
    return -result if negate else result


@given(
    combination=st.sampled_from(COMBINATIONS),
    shape=st.tuples(sizes, sizes, sizes),
    strides=st.tuples(layouts, layouts),
    values=st.sampled_from(VALUES),
    mode=st.sampled_from(["real", "symbolic"]),
    seed=seeds,
)
def test_the_fused_result_is_as_exact_as_the_unfused(
    device: str,
    shipped: kt.PatternSet,
    combination: Combination,
    shape: tuple[int, int, int],
    strides: tuple[Any, Any],
    values: Any,
    mode: Any,
    seed: int,
) -> None:
    """For any size, stride and values the fused operator is in the graph once, and about as exact as eager."""
    m, k, n = shape
    dtype = combination[0]
    a = tensor((m, k), dtype, strides[0], seed, device, values)
    b = tensor((k, n), dtype, strides[1], seed + 1, device, values)
    function = written(combination)
    graph = traced(function, a, b, mode=mode)
    fits = k > 1 and n > 1  # what the rule declares, since torch decomposes other products into sums
    assert kt.apply(graph, shipped).count == fits
    assert targets(graph).count(FUSED) == fits
    assert targets(graph).count("kwtrace.act.default") == (not fits)
    fused, unfused = run_checked(graph, a, b), function(a, b)
    finite = unfused.isfinite()
    assert torch.equal(finite, fused.isfinite())
    exact = reference(a, b, combination)
    assert_as_exact(fused[finite], unfused[finite], exact[finite])


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("mode", ["real", "fake", "symbolic"])
def test_a_graph_traced_once_fires_at_any_stride(shipped: kt.PatternSet, layout: Any, mode: Any) -> None:
    """Strides of the inputs decide nothing: the rewritten graph yields what eager yields."""
    a, b = tensor((6, 4), torch.float32, layout, 1), tensor((4, 3), torch.float32, layout, 2)
    function = written((torch.float32, True, "tanh", torch.float16))
    graph = traced(function, a, b, mode=mode)
    assert kt.apply(graph, shipped).count == 1
    assert torch.equal(run_checked(graph, a, b), function(a, b))


SPELLINGS: tuple[tuple[str, dict[str, Any]], ...] = (
    ("left out", {}),
    ("all given", {"negate": False, "approximate": "none", "out_dtype": None}),
    ("one given", {"approximate": "none"}),
    ("another order", {"out_dtype": None, "negate": False}),
)


@pytest.mark.parametrize("kwargs", [kwargs for _, kwargs in SPELLINGS], ids=[name for name, _ in SPELLINGS])
def test_defaults_left_out_or_given_are_one_thing(shipped: kt.PatternSet, kwargs: dict[str, Any]) -> None:
    """Every spelling of the defaults matches, once, and no default is written out."""
    graph = fx.Graph()
    a, b = (graph.placeholder(name) for name in "ab")
    product = graph.call_function(torch.ops.aten.mm.default, (a, b))
    graph.output(graph.call_function(torch.ops.kwtrace.act.default, (product,), kwargs))
    module = with_values(graph)
    assert kt.apply(module, shipped).count == 1
    assert dict(only(module, FUSED).kwargs) == {}


@pytest.mark.parametrize(
    ("args", "kwargs"),
    [((), {"self": "a", "mat2": "b"}), (("a",), {"mat2": "b"}), (("a", "b"), {})],
    ids=["by keyword", "mixed", "positional"],
)
def test_operands_by_keyword_and_by_place_are_one_thing(
    shipped: kt.PatternSet, args: tuple[str, ...], kwargs: dict[str, str]
) -> None:
    """The operands of ``mm`` and of the activation may be passed either way."""
    graph = fx.Graph()
    named = {name: graph.placeholder(name) for name in "ab"}
    product = graph.call_function(
        torch.ops.aten.mm.default, tuple(named[n] for n in args), {key: named[n] for key, n in kwargs.items()}
    )
    graph.output(graph.call_function(torch.ops.kwtrace.act.default, (), {"x": product, "negate": True}))
    module = with_values(graph)
    assert kt.apply(module, shipped).count == 1
    node = only(module, FUSED)
    assert node.args == (named["a"], named["b"])
    assert dict(node.kwargs) == {"negate": True}


@pytest.mark.parametrize("negate", [1, 1.0, 0, None, "True"])
def test_a_number_is_no_bool(shipped: kt.PatternSet, negate: Any) -> None:
    """``1`` or ``1.0`` where the schema says bool is not ``True``: the node is left as it is."""
    graph = fx.Graph()
    a, b = (graph.placeholder(name) for name in "ab")
    product = graph.call_function(torch.ops.aten.mm.default, (a, b))
    good = graph.call_function(torch.ops.kwtrace.act.default, (product,), {"negate": True})
    graph.output(good)
    module = with_values(graph)
    good.kwargs = {"negate": negate}
    assert kt.apply(module, shipped).count == 0
    assert targets(module) == UNFUSED


@pytest.mark.parametrize("approximate", ["None", "TANH", "", "tanh ", "sigmoid"])
def test_another_string_is_no_variant(shipped: kt.PatternSet, approximate: str) -> None:
    """A value outside the domain of a string argument matches nothing."""
    graph = fx.Graph()
    a, b = (graph.placeholder(name) for name in "ab")
    product = graph.call_function(torch.ops.aten.mm.default, (a, b))
    node = graph.call_function(torch.ops.kwtrace.act.default, (product,), {"approximate": "none"})
    graph.output(node)
    module = with_values(graph)
    node.kwargs = {"approximate": approximate}
    assert kt.apply(module, shipped).count == 0


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16])
def test_an_input_of_another_dtype_is_left_alone(shipped: kt.PatternSet, dtype: torch.dtype) -> None:
    """A dtype that the rule doesn't list matches nothing."""
    graph = traced(lambda a, b: ops.act(torch.mm(a, b)), torch.randn(3, 4).to(dtype), torch.randn(4, 5).to(dtype))
    assert kt.apply(graph, shipped).count == 0
    assert targets(graph) == UNFUSED


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.int64])
def test_another_out_dtype_is_left_alone(shipped: kt.PatternSet, dtype: torch.dtype) -> None:
    """An output dtype outside the domain matches nothing, and the result is eager's."""
    a, b = torch.randn(3, 4), torch.randn(4, 5)
    graph = traced(lambda a, b: ops.act(torch.mm(a, b), out_dtype=dtype), a, b)
    assert kt.apply(graph, shipped).count == 0
    assert torch.equal(run_checked(graph, a, b), ops.act(torch.mm(a, b), out_dtype=dtype))


def with_values(graph: fx.Graph) -> fx.GraphModule:
    """Return a module of a graph of a [3, 4] and b [4, 5], with values in its metadata."""
    from graphs import fill_values  # noqa: PLC0415 - only these tests write graphs by hand

    module = fx.GraphModule({}, graph)
    fill_values(module, torch.randn(3, 4), torch.randn(4, 5))
    return module
