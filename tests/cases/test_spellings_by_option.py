"""One declaration, all spellings, where a rule says so: callables as the values of an axis, and operand orders."""

from __future__ import annotations

import functools
import math
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import ops_for_commuting as ops
import pytest
import torch
from graphs import assert_as_exact, calls, only, run_checked, traced
from modules_for_tests import run_python
from ops_for_commuting import written_out
from torch import Tensor, fx

import kwtrace as kt
from kwtrace.engine import Engine, is_disabled
from kwtrace.loading import as_pattern_set

F32 = torch.float32
CPU = ("cpu",)
T = kt.DTypes("T", torch.float32, torch.bfloat16)
Wide = Annotated[Tensor, kt.Shape("m n>1"), F32]
Row = Annotated[Tensor, kt.Shape("n"), F32]
Form = Annotated[Callable[..., Tensor], kt.OneOf(ops.rms, written_out)]
Scores = Callable[[Tensor, Tensor], Tensor]

RELU_RMS = "kwcommute.relu_rms.default"
ADD_MUL = "kwcommute.add_mul.default"
ATTEND = "kwcommute.attend.default"
given_at_match: list[Any] = []
"""The callable that the replacement of `relu_rms_at_match` got at each trace."""


@kt.rule(devices=CPU, unused=("form",))
def relu_rms(x: Wide, w: Row, *, eps: float, form: Form) -> Tensor:
    """Search for a relu of the norm, whichever way that is spelled."""
    return torch.relu(form(x, w, eps))


@relu_rms.replacement
def _(x: Tensor, w: Tensor, *, eps: float) -> Tensor:
    return ops.relu_rms(x, w, eps)


@kt.rule(devices=CPU, where=lambda form: form is written_out)
def relu_rms_at_match(x: Wide, w: Row, *, eps: float, form: Form) -> Tensor:
    """Search for the same written out, with a replacement that is traced at the match."""
    return torch.relu(form(x, w, eps))


@relu_rms_at_match.replacement(at="match")
def _(x: Tensor, w: Tensor, *, eps: float, form: Callable[..., Tensor]) -> Tensor:
    given_at_match.append(form)
    return ops.relu_rms(x, w, eps)


@kt.rule(devices=CPU, commutative=True)
def add_mul(
    x: Annotated[Tensor, kt.Shape("m n>1"), T],
    y: Annotated[Tensor, kt.Shape("n"), T],
    z: Annotated[Tensor, kt.Shape("m n"), T],
) -> Tensor:
    """Search for a sum times a tensor."""
    return (x + y) * z


@add_mul.replacement
def _(x: Tensor, y: Tensor, z: Tensor) -> Tensor:
    return ops.add_mul(x, y, z)


def attend(
    q: Annotated[Tensor, kt.Shape("b h s>1 d>1"), F32],
    k: Annotated[Tensor, kt.Shape("b h t>1 d"), F32],
    v: Annotated[Tensor, kt.Shape("b h t d"), F32],
    mask: Annotated[Tensor, kt.Shape("b 1 s t"), F32],
    *,
    scale: float,
) -> Tensor:
    """Search for attention with a mask that is added."""
    return torch.softmax(q @ k.transpose(-2, -1) * scale + mask, -1) @ v


@functools.cache
def attention(*, commutative: bool) -> kt.PatternSet:
    """Return the patterns of a rule for `attend`."""
    rule = kt.rule(devices=CPU, commutative=commutative)(attend)
    rule.replacement(lambda q, k, v, mask, *, scale: ops.attend(q, k, v, mask, scale))
    return kt.trace(rule)


@functools.cache
def patterns(*rules: kt.Rule) -> kt.PatternSet:
    """Return the patterns of rules, traced once."""
    return kt.trace(*rules)


def fired(module: fx.GraphModule, found: kt.PatternSet) -> int:
    """Rewrite a graph, and return how often."""
    return kt.apply(module, found).count


def normed(x: Tensor, w: Tensor) -> Tensor:
    """Use the operator."""
    return torch.relu(ops.rms(x, w, 0.125))


def normed_by_hand(x: Tensor, w: Tensor) -> Tensor:
    """Write the same out."""
    return torch.relu(x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 0.125) * w)


def rms_inputs() -> tuple[Tensor, Tensor]:
    """Return a matrix and a row."""
    return torch.randn(3, 5), torch.randn(5)


@pytest.mark.parametrize("function", [normed, normed_by_hand])
def test_b8_an_operator_and_its_body_written_out_are_both_fused(function: Callable[..., Tensor]) -> None:
    """One axis, whose values are an operator and a function: either graph holds the fused op once, with its eps."""
    inputs = rms_inputs()
    graph = traced(function, *inputs)
    assert fired(graph, patterns(relu_rms)) == 1
    (node,) = calls(graph, RELU_RMS)
    assert node.args[2] == 0.125
    assert len(calls(graph, "aten.relu.default")) == 0
    assert torch.equal(run_checked(graph, *inputs), function(*inputs))


@pytest.mark.parametrize(
    "function",
    [
        lambda x, w: torch.relu(x * torch.rsqrt(x.pow(2).mean(0, keepdim=True) + 0.125) * w),
        lambda x, w: torch.relu(x * torch.rsqrt(x.pow(3).mean(-1, keepdim=True) + 0.125) * w),
        lambda x, w: torch.relu(x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 0.125) * w + 1),
        lambda x, w: torch.relu(w * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 0.125))),
        lambda x, w: torch.tanh(ops.rms(x, w, 0.125)),
        lambda x, w: torch.relu(ops.relu_rms(x, w, 0.125)),
    ],
    ids=["dim", "power", "offset", "order", "activation", "another operator"],
)
def test_b8_other_graphs_stay_as_they_are(function: Callable[..., Tensor]) -> None:
    """Neither spelling takes a graph that computes something else, nor, without the flag, another order."""
    inputs = rms_inputs()
    graph = traced(function, *inputs)
    before = str(graph.graph)
    assert fired(graph, patterns(relu_rms)) == 0
    assert str(graph.graph) == before


def test_b8_a_spelling_is_selected_and_switched_off_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    """``select`` takes the callable or its name; ``KWTRACE_DISABLE`` takes the name that variants show."""
    found = patterns(relu_rms)
    assert [str(variant) for variant in found.variants] == [
        "relu_rms[form=kwcommute.rms.default, device='cpu']",
        "relu_rms[form=written_out, device='cpu']",
    ]
    inputs = rms_inputs()
    for form, fits, other in ((ops.rms, normed, normed_by_hand), (written_out, normed_by_hand, normed)):
        (variant,) = found.select(form=form).variants
        assert found.select(form=dict(variant.axes)["form"]).variants == (variant,)
        assert fired(traced(fits, *inputs), found.select(form=form)) == 1
        assert fired(traced(other, *inputs), found.select(form=form)) == 0
        shown = str(dict(variant.axes)["form"])
        assert is_disabled(variant, f"relu_rms[form={shown}]")
        assert not is_disabled(variant, "relu_rms[form=other]")
        monkeypatch.setenv("KWTRACE_DISABLE", f"relu_rms[form={shown}]")
        assert fired(traced(fits, *inputs), found) == 0
        assert fired(traced(other, *inputs), found) == 1
        monkeypatch.delenv("KWTRACE_DISABLE")


def test_b8_a_match_has_the_name_and_a_replacement_the_callable() -> None:
    """``Match.kwargs`` holds the name; a replacement that is traced at the match gets the function itself."""
    inputs = rms_inputs()
    graph = traced(normed_by_hand, *inputs)
    found = patterns(relu_rms_at_match)
    (match,) = Engine(found).find(graph.graph)
    assert match.kwargs == {
        "form": kt.Named("ops_for_commuting:written_out", "written_out"),
        "device": "cpu",
        "eps": 0.125,
    }
    given_at_match.clear()
    assert fired(graph, found) == 1
    assert given_at_match == [written_out]
    assert len(calls(graph, RELU_RMS)) == 1
    assert torch.equal(run_checked(graph, *inputs), normed_by_hand(*inputs))


def test_b8_a_generated_package_needs_no_module_of_the_rule(tmp_path: Path) -> None:
    """A package is loaded, and names its variants, with neither the rule's module nor the function's imported."""
    report = kt.generate([relu_rms], tmp_path / "pkg_of_forms", jobs=1)
    assert report.ok
    code = (
        "import sys, kwtrace as kt, pkg_of_forms; from kwtrace.loading import as_pattern_set as a; "
        "found = a(pkg_of_forms); print(*found.variants, sep='\\n'); print(found.digest); "
        f"print([name in sys.modules for name in ({__name__!r}, 'ops_for_commuting')])"
    )
    lines = run_python("-c", code, folder=tmp_path).stdout.splitlines()
    assert lines == [*map(str, patterns(relu_rms).variants), patterns(relu_rms).digest, "[False, False]"]
    assert __name__ in sys.modules
    assert not kt.generate([relu_rms], tmp_path / "pkg_of_forms", jobs=1).changed


ORDERS: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
    "(x + y) * z": lambda x, y, z: (x + y) * z,
    "z * (x + y)": lambda x, y, z: z * (x + y),
    "(y + x) * z": lambda x, y, z: (y + x) * z,
    "z * (y + x)": lambda x, y, z: z * (y + x),
}


def sum_inputs(dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """Return a matrix, a row and a matrix."""
    return torch.randn(3, 5, dtype=dtype), torch.randn(5, dtype=dtype), torch.randn(3, 5, dtype=dtype)


def test_b9_one_declaration_stands_for_dtypes_and_orders() -> None:
    """Two dtypes are two variants, and two operators four orders of each: eight rows in four families."""
    found = patterns(add_mul)
    assert len(set(map(str, found.variants))) == 2
    assert [len(family.rows) for family in found.families] == [2, 2, 2, 2]


@pytest.mark.parametrize("dtype", T.dtypes, ids=str)
@pytest.mark.parametrize("order", ORDERS)
def test_b9_each_order_is_fused_once(order: str, dtype: torch.dtype) -> None:
    """Each order of each dtype matches exactly once, and by one pattern; numbers are those of eager, bit for bit."""
    inputs = sum_inputs(dtype)
    function = ORDERS[order]
    families = patterns(add_mul).families
    assert sum(fired(traced(function, *inputs), kt.PatternSet((family,))) for family in families) == 1
    graph = traced(function, *inputs)
    assert fired(graph, patterns(add_mul)) == 1
    (node,) = calls(graph, ADD_MUL)
    assert [argument.name for argument in node.args if isinstance(argument, fx.Node)] == ["x_1", "y_1", "z_1"]
    assert [n.op for n in graph.graph.nodes].count("call_function") == 1
    assert torch.equal(run_checked(graph, *inputs), function(*inputs))


def test_b9_all_orders_in_one_graph_are_fused() -> None:
    """A graph with every order has as many fused operators, each with its own inputs."""

    def function(x: Tensor, y: Tensor, z: Tensor) -> Tensor:
        found = x
        for order in ORDERS.values():
            found = order(found.sin(), y, z)
        return found

    inputs = sum_inputs(F32)
    graph = traced(function, *inputs)
    assert fired(graph, patterns(add_mul)) == len(calls(graph, ADD_MUL)) == 4
    assert torch.equal(run_checked(graph, *inputs), function(*inputs))


@pytest.mark.parametrize(
    "function",
    [
        lambda x, y, z: torch.add(x, y, alpha=2) * z,
        lambda x, y, z: z * torch.add(y, x, alpha=3),
        lambda x, y, z: (y - x) * z,
        lambda x, y, z: (x + y) / z,
        lambda x, y, z: z / (y + x),
        lambda x, y, z: (x * y) + z,
        lambda x, y, z: z * (y.double() + x),
    ],
    ids=["alpha", "alpha turned", "difference", "quotient", "quotient turned", "exchanged operators", "dtype"],
)
def test_b9_what_is_no_order_stays_as_it_is(function: Callable[..., Tensor]) -> None:
    """An alpha, another operator or another dtype is no order of the operands."""
    inputs = sum_inputs(F32)
    graph = traced(function, *inputs)
    before = str(graph.graph)
    assert fired(graph, patterns(add_mul)) == 0
    assert str(graph.graph) == before


def test_b9_a_sum_that_has_another_use_stays_in_every_order() -> None:
    """Nothing leaks: an inner node with a user outside the match keeps every order from matching."""
    for order in ORDERS.values():
        graph = traced(order, *sum_inputs(F32))
        output = next(node for node in graph.graph.nodes if node.op == "output")
        output.args = ((output.args[0], only(graph, "aten.add.Tensor")),)
        assert fired(graph, patterns(add_mul)) == 0


def attention_inputs() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return q, k, v and a mask that hides what is to come."""
    q, k, v = torch.randn(2, 3, 5, 4), torch.randn(2, 3, 7, 4), torch.randn(2, 3, 7, 4)
    hidden = torch.ones(5, 7, dtype=torch.bool).triu(3)
    return q, k, v, torch.zeros(5, 7).masked_fill(hidden, -math.inf).expand(2, 1, 5, 7).contiguous()


def attends(combine: Scores) -> Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]:
    """Return attention that combines scores and mask as told."""

    def function(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
        return torch.softmax(combine(q @ k.transpose(-2, -1) * 0.35, mask), -1) @ v

    return function


SCORES_FIRST = attends(lambda scores, mask: scores + mask)
MASK_FIRST = attends(lambda scores, mask: mask + scores)


def assert_attended(graph: fx.GraphModule, times: int = 1) -> None:
    """Check that a graph has the fused operator so often, with the inputs in their places."""
    assert len(calls(graph, ATTEND)) == times
    assert len(calls(graph, "aten.exp.default")) == 0
    for node in calls(graph, ATTEND):
        assert [str(argument) for argument in node.args] == ["q_1", "k_1", "v_1", "mask_1", "0.35"]


@pytest.mark.parametrize("function", [SCORES_FIRST, MASK_FIRST], ids=["scores + mask", "mask + scores"])
def test_b11_a_mask_is_found_on_either_side(function: Callable[..., Tensor]) -> None:
    """``mask + scores`` is fused as ``scores + mask`` is, once, to the same numbers; without the flag it is not."""
    inputs = attention_inputs()
    graph = traced(function, *inputs)
    assert fired(graph, attention(commutative=True)) == 1
    assert_attended(graph)
    expected = attend(*(x.double() for x in inputs), scale=0.35)
    found, unfused = run_checked(graph, *inputs), function(*inputs)
    assert_as_exact(found, unfused, expected)
    assert torch.equal(found, unfused)
    assert fired(traced(function, *inputs), attention(commutative=False)) == (function is SCORES_FIRST)


def test_b11_a_failed_try_leaves_no_state() -> None:
    """Graphs of both orders, by one engine in any sequence, and with either order tried first: each is fused once."""
    inputs = attention_inputs()
    found = attention(commutative=True)
    for families in (found.families, found.families[::-1]):
        engine = Engine(kt.PatternSet(families))
        for function in (MASK_FIRST, SCORES_FIRST, MASK_FIRST, MASK_FIRST, SCORES_FIRST):
            graph = traced(function, *inputs)
            assert len(engine.run(graph.graph)) == 1
            assert_attended(graph)
            assert torch.equal(run_checked(graph, *inputs), function(*inputs))


def test_b11_a_failed_try_in_the_same_graph_leaves_no_state() -> None:
    """Places that fail in every order, before and after one that fits, change nothing about it."""

    def function(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> tuple[Tensor, ...]:
        other = attends(lambda scores, mask: mask - scores)
        return other(q, k, v, mask), MASK_FIRST(q, k, v, mask), SCORES_FIRST(q, k, v, mask), other(k, q, v, mask.mT)

    q, k, v, _ = attention_inputs()
    inputs = (q, k[:, :, :5].contiguous(), v[:, :, :5].contiguous(), torch.randn(2, 1, 5, 5))
    graph = traced(function, *inputs)
    assert fired(graph, attention(commutative=True)) == 2
    assert len(calls(graph, ATTEND)) == 2
    exact = function(*(x.double() for x in inputs))
    assert_as_exact(run_checked(graph, *inputs), function(*inputs), exact)


@pytest.mark.parametrize(
    "combine",
    [
        lambda scores, mask: scores - mask,
        lambda scores, mask: mask - scores,
        lambda scores, mask: torch.add(mask, scores, alpha=2),
        lambda scores, mask: torch.add(scores, mask, alpha=2),
        lambda scores, mask: mask * scores,
        lambda scores, mask: mask + (mask + scores),
    ],
    ids=["scores - mask", "mask - scores", "mask + 2 scores", "scores + 2 mask", "mask * scores", "twice"],
)
def test_b11_other_ways_to_combine_stay_unfused(combine: Scores) -> None:
    """What isn't the sum of scores and mask is left alone."""
    q, k, v, _ = attention_inputs()
    inputs = (q, k, v, torch.randn(2, 1, 5, 7))
    function = attends(combine)
    graph = traced(function, *inputs)
    before = str(graph.graph)
    assert fired(graph, attention(commutative=True)) == 0
    assert str(graph.graph) == before


def test_b11_dynamic_graphs_have_orders_too() -> None:
    """With symbolic sizes either order is fused as well."""
    for function in (SCORES_FIRST, MASK_FIRST):
        graph = traced(function, *attention_inputs(), mode="symbolic")
        assert fired(graph, attention(commutative=True)) == 1
        assert_attended(graph)


@pytest.mark.usefixtures("fresh_compiler")
def test_b11_either_order_is_fused_in_a_compile() -> None:
    """``torch.compile`` with the set fuses both orders in one graph, to eager's numbers."""
    inputs = attention_inputs()

    def function(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
        return MASK_FIRST(q, k, v, mask), SCORES_FIRST(q, k, v, mask)

    with torch.no_grad():
        found = torch.compile(function, options=kt.options(attention(commutative=True)))(*inputs)
    assert kt.stats().count == 2
    for one, expected in zip(found, function(*inputs), strict=True):
        assert torch.equal(one, expected)


def test_expanded_patterns_are_generated_and_read_back(tmp_path: Path) -> None:
    """A generated package holds every order, under variants that say nothing of it."""
    assert kt.generate([add_mul], tmp_path / "pkg_of_orders", jobs=1).ok
    code = (
        "import pkg_of_orders; from kwtrace.loading import as_pattern_set as a; found = a(pkg_of_orders); "
        "print(len(found.families), len(found.variants), len(set(found.variants)), found.digest)"
    )
    (line,) = run_python("-c", code, folder=tmp_path).stdout.splitlines()
    assert line == f"4 8 2 {as_pattern_set(patterns(add_mul)).digest}"
