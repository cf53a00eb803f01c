"""What a pattern matches and what it doesn't: every argument, constant, size, input and user counts."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from graphs import calls, fill_values, hand_written, only, run_checked, targets, traced
from torch import Tensor, fx
from toys import patterns, scaled_add_rule, scaled_rule, topk_rule

import kwtrace as kt

aten = torch.ops.aten
SCALED = "kwtoys.scaled_exp.default"


def count(module: fx.GraphModule, *rules: kt.Rule) -> int:
    """Rewrite ``module`` with some rules; return how often they fired."""
    return kt.apply(module, patterns(*rules)).count


def scaled_graph(factor: Any, x: Tensor | None = None) -> fx.GraphModule:
    """Write ``exp(x) * factor`` by hand; ``factor`` stands in the graph exactly as it is."""
    x = torch.randn(3, 4) if x is None else x
    return hand_written(
        lambda g, p: g.call_function(aten.mul.Tensor, (g.call_function(aten.exp.default, (p,)), factor)), x
    )


def refused(module: fx.GraphModule, *inputs: Tensor, rule: kt.Rule = scaled_rule) -> None:
    """Check that nothing fires and that the graph yields what it yielded before."""
    before = targets(module)
    expected = module(*inputs)
    assert count(module, rule) == 0
    assert targets(module) == before
    found = run_checked(module, *inputs)
    assert torch.equal(found, expected)


@pytest.mark.parametrize("factor", [0.5, -0.0, 0.0, 1.0, 1e-300, math.inf, -2.0, 3.0000000001])
def test_any_float_is_captured_exactly(factor: float) -> None:
    """A captured number is bound to whatever float the graph holds, sign of zero included."""
    module = scaled_graph(factor)
    assert count(module, scaled_rule) == 1
    found = only(module, SCALED).args[1]
    assert type(found) is float
    assert math.copysign(1.0, found) == math.copysign(1.0, factor)
    assert found == factor


def test_nan_is_captured() -> None:
    """NaN is a number like another: it is captured, though it doesn't equal itself."""
    module = scaled_graph(math.nan)
    assert count(module, scaled_rule) == 1
    assert math.isnan(only(module, SCALED).args[1])


def test_an_int_where_a_float_is_captured_becomes_that_float() -> None:
    """``x * 2`` of a float tensor is ``x * 2.0``: the replacement gets a float, as its schema says."""
    module = scaled_graph(2)
    x = torch.randn(3, 4)
    assert count(module, scaled_rule) == 1
    found = only(module, SCALED).args[1]
    assert type(found) is float
    assert found == 2.0
    assert torch.equal(run_checked(module, x), torch.exp(x) * 2)


def test_an_int_that_no_float_equals_is_refused() -> None:
    """An int beyond 2**53 may be no float: it isn't captured as one."""
    refused(scaled_graph(2**53 + 1), torch.randn(3, 4))


@pytest.mark.parametrize("factor", [True, False])
def test_a_bool_is_no_number(factor: bool) -> None:
    """``x * True`` isn't captured as 1.0."""
    refused(scaled_graph(factor), torch.randn(3, 4))


def test_a_complex_number_is_no_float() -> None:
    """``x * 1j`` yields another dtype, and isn't captured as a float."""
    module = scaled_graph(2j)
    assert count(module, scaled_rule) == 0


def test_a_tensor_is_no_captured_number() -> None:
    """A 0-d tensor in place of a captured number isn't bound to it, whatever its dtype."""
    for factor in (torch.tensor(0.5), torch.tensor(0.5, dtype=torch.float64)):
        x = torch.randn(3, 4)
        module = traced(lambda x, y: torch.exp(x) * y, x, factor)
        assert count(module, scaled_rule) == 0
        assert torch.equal(run_checked(module, x, factor), torch.exp(x) * factor)


LITERALS = [1, 1.0, True, 0, 2, -1, 1.0000001, 0.0, -0.0]


@pytest.mark.parametrize("found", LITERALS, ids=repr)
def test_a_literal_is_compared_by_type_and_value(found: Any) -> None:
    """Of ``places + 1`` only the int 1 is the rule's: 1.0 and True are other constants."""

    def build(g: fx.Graph, p: fx.Node) -> tuple[fx.Node, ...]:
        top = g.call_function(aten.topk.default, (p, 2))
        values, places = (
            g.call_function(torch.ops.aten.clone.default, (g.call_function(getitem, (top, i)),)) for i in (0, 1)
        )
        return g.call_function(aten.neg.default, (values,)), g.call_function(aten.add.Tensor, (places, found))

    from operator import getitem  # noqa: PLC0415 - the builder's own

    module = hand_written(build, torch.randn(3, 4))
    wanted = type(found) is int and found == 1
    assert count(module, topk_rule) == wanted
    assert len(calls(module, "kwtoys.negated_topk.default")) == wanted


@pytest.mark.parametrize(
    ("args", "kwargs"),
    [
        ((2,), {}),
        ((2, -1), {}),
        ((2, 1), {}),
        ((2, -1, True, True), {}),
        ((), {"k": 2}),
        ((2,), {"sorted": True, "dim": 1}),
        ((2,), {"largest": True}),
    ],
    ids=repr,
)
def test_spellings_of_equal_arguments_match_once(args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Defaults left out or given, by place or by keyword, and a dim counted from either end, are one thing."""
    assert count(topk_graph(args, kwargs), topk_rule) == 1


@pytest.mark.parametrize(
    ("args", "kwargs"),
    [
        ((3,), {}),
        ((2, 0), {}),
        ((2, -2), {}),
        ((2,), {"largest": False}),
        ((2,), {"sorted": False}),
        ((2, -1, False), {}),
    ],
    ids=repr,
)
def test_an_argument_that_differs_is_a_refusal(args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Every argument counts, those that the rule leaves to their defaults too."""
    module = topk_graph(args, kwargs)
    x = torch.randn(4, 4)
    expected = module(x)
    assert count(module, topk_rule) == 0
    assert all(torch.equal(a, b) for a, b in zip(run_checked(module, x), expected, strict=True))


def topk_graph(args: tuple[Any, ...], kwargs: dict[str, Any]) -> fx.GraphModule:
    """Write what `topk_rule` searches for, with ``topk`` called in some way."""
    from operator import getitem  # noqa: PLC0415 - the builder's own

    def build(g: fx.Graph, p: fx.Node) -> tuple[fx.Node, ...]:
        top = g.call_function(aten.topk.default, (p, *args), kwargs)
        values, places = (g.call_function(getitem, (top, i)) for i in (0, 1))
        return g.call_function(aten.neg.default, (values,)), g.call_function(aten.add.Tensor, (places, 1))

    return hand_written(build, torch.randn(4, 4))


def test_an_extra_keyword_argument_is_a_refusal() -> None:
    """``add(..., alpha=2)`` isn't the ``add`` of the rule, whose alpha is 1; ``alpha=1`` is."""
    x, y = torch.randn(3, 4), torch.randn(3, 4)
    for alpha, fires in ((1, 1), (2, 0), (1.0, 0)):
        module = hand_written(
            lambda g, p, q, a=alpha: g.call_function(
                aten.add.Tensor,
                (g.call_function(aten.mul.Tensor, (g.call_function(aten.exp.default, (p,)), 0.5)), q),
                {"alpha": a},
            ),
            x,
            y,
        )
        assert count(module, scaled_add_rule) == fires
        assert torch.equal(run_checked(module, x, y), torch.add(torch.exp(x) * 0.5, y, alpha=int(alpha)))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16, torch.bfloat16])
def test_another_input_dtype_is_a_refusal(dtype: torch.dtype) -> None:
    """A tensor of a dtype that the rule doesn't name isn't bound."""
    x = torch.randn(3, 4).to(dtype)
    refused(traced(lambda x: torch.exp(x) * 0.5, x), x)


@pytest.mark.parametrize("shape", [(), (4,), (2, 3, 4)], ids=str)
def test_another_rank_is_a_refusal(shape: tuple[int, ...]) -> None:
    """A tensor of another rank isn't bound."""
    x = torch.randn(shape)
    refused(traced(lambda x: torch.exp(x) * 0.5, x), x)


@pytest.mark.parametrize("shape", [(1, 4), (4, 1), (0, 4), (4, 0)], ids=str)
def test_a_size_that_is_not_proved_is_a_refusal(shape: tuple[int, ...]) -> None:
    """Sizes 0 and 1 match only where tracing proved them, which the rule's ``>1`` says not to."""
    x = torch.randn(shape)
    refused(traced(lambda x: torch.exp(x) * 0.5, x), x)


def test_another_device_is_a_refusal() -> None:
    """A graph of fake CUDA tensors isn't what a CPU rule matches."""
    from graphs import fake_traced  # noqa: PLC0415 - this test alone needs it

    module = fake_traced(lambda x: torch.exp(x) * 0.5, (3, 4), dtype=torch.float32, device="cuda")
    assert count(module, scaled_rule) == 0


@pytest.mark.parametrize("shape", [(1, 4), (3, 1), (1, 1), (4,), ()], ids=str)
def test_sizes_that_only_broadcast_are_a_refusal(shape: tuple[int, ...]) -> None:
    """The rule says that both inputs have one shape; an input that broadcasts to it is another graph."""
    x, y = torch.randn(3, 4), torch.randn(shape)
    module = traced(lambda x, y: torch.exp(x) * 0.5 + y, x, y)
    assert count(module, scaled_add_rule) == 0
    assert torch.equal(run_checked(module, x, y), torch.exp(x) * 0.5 + y)


def test_symbolic_sizes_that_are_not_known_to_be_equal_are_a_refusal() -> None:
    """Two dims of a dynamic graph that no guard ties together aren't taken for equal, though equal in the example."""
    from torch._dispatch.python import enable_python_dispatcher  # noqa: PLC0415 - this test alone needs it
    from torch._subclasses.fake_tensor import FakeTensorMode  # noqa: PLC0415 - as above
    from torch.fx.experimental.proxy_tensor import make_fx  # noqa: PLC0415 - as above
    from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext  # noqa: PLC0415 - as above

    mode = FakeTensorMode(shape_env=ShapeEnv(duck_shape=False))
    dynamic = StatelessSymbolicContext([DimDynamic.DYNAMIC, DimDynamic.DYNAMIC])
    x, y = (mode.from_tensor(torch.randn(3, 4), symbolic_context=dynamic) for _ in range(2))
    with mode, enable_python_dispatcher():
        module = make_fx(lambda x, y: torch.mm(torch.exp(x) * 0.5, y.t()), tracing_mode="symbolic")(x, y)
    guards = len(mode.shape_env.guards)  # type: ignore[union-attr] - the mode was made with one
    graph = only(module, aten.mul.Tensor)
    with module.graph.inserting_after(graph):
        inputs = [n for n in module.graph.nodes if n.op == "placeholder"]
        added = module.graph.call_function(aten.add.Tensor, (graph, inputs[1]))
    added.meta["val"] = graph.meta["val"]
    graph.replace_all_uses_with(added, delete_user_cb=lambda user: user is not added)
    assert count(module, scaled_add_rule) == 0
    assert len(mode.shape_env.guards) == guards  # type: ignore[union-attr] - as above


@pytest.mark.parametrize("other", ["output", "function", "view"])
def test_an_inner_node_with_another_user_is_a_refusal(other: str) -> None:
    """What else uses the inner node, be it the graph's output, needs it to stay: nothing leaks out of a match."""

    def function(x: Tensor) -> tuple[Tensor, Tensor]:
        inner = torch.exp(x)
        return inner * 0.5, {"output": inner, "function": inner.sin(), "view": inner.view(-1)}[other]

    x = torch.randn(3, 4)
    module = traced(function, x)
    assert count(module, scaled_rule) == 0
    assert all(torch.equal(a, b) for a, b in zip(run_checked(module, x), function(x), strict=True))


def test_an_identity_inside_with_another_user_is_a_refusal() -> None:
    """An alias between two nodes of the match that something else uses is a leak as well."""

    def build(g: fx.Graph, p: fx.Node) -> tuple[fx.Node, ...]:
        alias = g.call_function(aten.alias.default, (g.call_function(aten.exp.default, (p,)),))
        return g.call_function(aten.mul.Tensor, (alias, 0.5)), g.call_function(aten.sin.default, (alias,))

    assert count(hand_written(build, torch.randn(3, 4)), scaled_rule) == 0


def test_dead_users_hide_nothing() -> None:
    """A user whose result nothing uses, as decompositions leave behind, doesn't stand in the way."""

    def build(g: fx.Graph, p: fx.Node) -> fx.Node:
        inner = g.call_function(aten.exp.default, (p,))
        dead = g.call_function(aten.sin.default, (inner,))
        g.call_function(aten.cos.default, (dead,))
        return g.call_function(aten.mul.Tensor, (inner, 0.5))

    x = torch.randn(3, 4)
    module = hand_written(build, x)
    assert count(module, scaled_rule) == 1
    assert len(calls(module, SCALED)) == 1
    assert torch.equal(run_checked(module, x), torch.exp(x) * 0.5)
    assert count(module, scaled_rule) == 0


MUTATIONS: dict[str, Callable[[fx.Graph, fx.Node, fx.Node], Any]] = {
    "add_ to the input": lambda g, p, inner: g.call_function(aten.add_.Tensor, (p, 1.0)),
    "copy_ to the input": lambda g, p, inner: g.call_function(aten.copy_.default, (p, p)),
    "add_ to the inner node": lambda g, p, inner: g.call_function(aten.add_.Tensor, (inner, 1.0)),
    "copy_ to another": lambda g, p, inner: g.call_function(
        aten.zero_.default, (g.call_function(aten.sin.default, (p,)),)
    ),
}


@pytest.mark.parametrize("mutate", MUTATIONS.values(), ids=MUTATIONS.keys())
def test_a_mutation_between_two_matched_nodes_is_a_refusal(mutate: Callable[..., Any]) -> None:
    """No match crosses a mutation, of whatever it is."""

    def build(g: fx.Graph, p: fx.Node) -> fx.Node:
        inner = g.call_function(aten.exp.default, (p,))
        mutate(g, p, inner)
        return g.call_function(aten.mul.Tensor, (inner, 0.5))

    x = torch.randn(3, 4)
    module = hand_written(build, x)
    expected = module(x.clone())
    assert count(module, scaled_rule) == 0
    module.graph.lint()
    assert torch.equal(module(x.clone()), expected)


def test_mutations_before_and_after_a_match_do_not_matter() -> None:
    """A match that lies whole between two mutations fires, and reads what was written before it."""

    def build(g: fx.Graph, p: fx.Node) -> fx.Node:
        g.call_function(aten.add_.Tensor, (p, 1.0))
        result = g.call_function(aten.mul.Tensor, (g.call_function(aten.exp.default, (p,)), 0.5))
        g.call_function(aten.copy_.default, (p, result))
        return result

    x = torch.randn(3, 4)
    module = hand_written(build, x)
    expected = module(x.clone())
    assert count(module, scaled_rule) == 1
    module.graph.lint()
    module.recompile()
    written = x.clone()
    assert torch.equal(module(written), expected)
    assert torch.equal(written, expected)


def test_a_copy_taken_before_a_mutation_is_no_identity() -> None:
    """A clone that was taken before its source is written to holds other values than the source."""

    def build(g: fx.Graph, p: fx.Node) -> fx.Node:
        before = g.call_function(aten.clone.default, (p,))
        g.call_function(aten.add_.Tensor, (p, 1.0))
        return g.call_function(aten.mul.Tensor, (g.call_function(aten.exp.default, (before,)), 0.5))

    x = torch.randn(3, 4)
    module = hand_written(build, x)
    expected = module(x.clone())
    kt.apply(module, patterns(scaled_rule))
    assert torch.equal(module(x.clone()), expected)


def test_a_copy_that_is_written_to_is_no_identity() -> None:
    """A clone that is mutated holds other values than its source from then on."""

    def build(g: fx.Graph, p: fx.Node) -> fx.Node:
        own = g.call_function(aten.clone.default, (p,))
        g.call_function(aten.add_.Tensor, (own, 1.0))
        return g.call_function(aten.mul.Tensor, (g.call_function(aten.exp.default, (own,)), 0.5))

    x = torch.randn(3, 4)
    module = hand_written(build, x)
    expected = module(x.clone())
    kt.apply(module, patterns(scaled_rule))
    assert torch.equal(module(x.clone()), expected)


IDENTITIES: dict[str, Callable[[fx.Graph, fx.Node], fx.Node]] = {
    "alias": lambda g, n: g.call_function(aten.alias.default, (n,)),
    "alias by keyword": lambda g, n: g.call_function(aten.alias.default, (), {"self": n}),
    "detach": lambda g, n: g.call_function(aten.detach.default, (n,)),
    "clone": lambda g, n: g.call_function(aten.clone.default, (n,)),
    "contiguous clone": lambda g, n: g.call_function(
        aten.clone.default, (n,), {"memory_format": torch.contiguous_format}
    ),
    "preserving clone": lambda g, n: g.call_function(
        aten.clone.default, (n,), {"memory_format": torch.preserve_format}
    ),
    "view": lambda g, n: g.call_function(aten.view.default, (n, [3, 4])),
    "view with -1": lambda g, n: g.call_function(aten.view.default, (n, [-1, 4])),
    "unsafe view": lambda g, n: g.call_function(aten._unsafe_view.default, (n, [3, 4])),
    "reshape": lambda g, n: g.call_function(aten.reshape.default, (n, [3, -1])),
    "expand": lambda g, n: g.call_function(aten.expand.default, (n, [3, 4])),
    "expand with -1": lambda g, n: g.call_function(aten.expand.default, (n, [-1, -1])),
    "slice": lambda g, n: g.call_function(aten.slice.Tensor, (n, 0, 0, 9223372036854775807)),
    "slice to the size": lambda g, n: g.call_function(aten.slice.Tensor, (n, -1, None, 4)),
    "slice from below": lambda g, n: g.call_function(aten.slice.Tensor, (n, 1, -4, 9)),
    "slice by keyword": lambda g, n: g.call_function(aten.slice.Tensor, (n,), {"dim": 1, "step": 1}),
    "cast": lambda g, n: g.call_function(torch.ops.prims.convert_element_type.default, (n, torch.float32)),
    "permute": lambda g, n: g.call_function(aten.permute.default, (n, [0, 1])),
    "permute from the end": lambda g, n: g.call_function(aten.permute.default, (n, [-2, -1])),
}


@pytest.mark.parametrize("place", ["before", "between"])
@pytest.mark.parametrize("identity", IDENTITIES.values(), ids=IDENTITIES.keys())
def test_identities_hide_nothing(identity: Callable[..., fx.Node], place: str) -> None:
    """What leaves every value as it is may stand before a match and between its nodes."""

    def build(g: fx.Graph, p: fx.Node) -> fx.Node:
        source = identity(g, p) if place == "before" else p
        inner = g.call_function(aten.exp.default, (source,))
        inner = identity(g, inner) if place == "between" else inner
        return g.call_function(aten.mul.Tensor, (inner, 0.5))

    x = torch.randn(3, 4)
    module = hand_written(build, x)
    assert count(module, scaled_rule) == 1
    assert targets(module).count(SCALED) == 1
    assert torch.equal(run_checked(module, x), torch.exp(x) * 0.5)


NO_IDENTITIES: dict[str, Callable[[fx.Graph, fx.Node], fx.Node]] = {
    "flip": lambda g, n: g.call_function(aten.flip.default, (n, [0])),
    "permute": lambda g, n: g.call_function(aten.permute.default, (n, [1, 0])),
    "another dtype and back": lambda g, n: g.call_function(
        torch.ops.prims.convert_element_type.default,
        (g.call_function(torch.ops.prims.convert_element_type.default, (n, torch.bfloat16)), torch.float32),
    ),
    "view of another shape and back": lambda g, n: g.call_function(
        aten.view.default, (g.call_function(aten.permute.default, (n, [1, 0])), [4, 4])
    ),
    "roll": lambda g, n: g.call_function(aten.roll.default, (n, [1])),
    "shifted slice": lambda g, n: g.call_function(
        aten.slice.Tensor, (g.call_function(aten.cat.default, ([n, n],)), 0, 1, 5)
    ),
}


@pytest.mark.parametrize("change", NO_IDENTITIES.values(), ids=NO_IDENTITIES.keys())
def test_what_changes_values_between_two_nodes_is_a_refusal(change: Callable[..., fx.Node]) -> None:
    """Operations of the same shape and dtype that move or round values are no identities."""

    def build(g: fx.Graph, p: fx.Node) -> fx.Node:
        return g.call_function(aten.mul.Tensor, (change(g, g.call_function(aten.exp.default, (p,))), 0.5))

    x = torch.randn(4, 4)
    refused(hand_written(build, x), x.abs())


def test_one_input_used_where_the_rule_has_two_is_a_match() -> None:
    """``exp(x) * a + x``: both parameters are bound to one tensor, which is allowed."""
    x = torch.randn(3, 4)
    module = traced(lambda x: torch.exp(x) * 0.5 + x, x)
    assert count(module, scaled_add_rule) == 1
    assert torch.equal(run_checked(module, x), torch.exp(x) * 0.5 + x)


def test_the_order_of_operands_counts() -> None:
    """``y + exp(x) * a`` is another graph than the rule's: nothing is commuted behind the rule's back."""
    x, y = torch.randn(3, 4), torch.randn(3, 4)
    module = traced(lambda x, y: y + torch.exp(x) * 0.5, x, y)
    assert count(module, scaled_add_rule) == 0


def test_an_input_or_output_without_metadata_is_a_refusal() -> None:
    """Where a careless pass left no value behind, nothing is proved: nothing matches, and nothing raises."""
    x = torch.randn(3, 4)
    for place in ("placeholder", "aten.mul.Tensor"):
        module = traced(lambda x: torch.exp(x) * 0.5, x)
        for node in module.graph.nodes:
            if place in (node.op, str(node.target)):
                node.meta.clear()
        assert count(module, scaled_rule) == 0


def test_a_wrong_dtype_in_the_metadata_of_an_output_is_a_refusal() -> None:
    """The output of a match must be what the variant yields."""
    x = torch.randn(3, 4)
    module = traced(lambda x: torch.exp(x) * 0.5, x)
    node = only(module, aten.mul.Tensor)
    node.meta["val"] = node.meta["val"].to(torch.float64)
    assert count(module, scaled_rule) == 0


def test_equal_places_in_one_graph_each_match() -> None:
    """Ten layers match ten times, those that use each other's results too."""

    def function(x: Tensor) -> Tensor:
        for factor in range(10):
            x = torch.exp(x) * (0.01 * (factor + 1))
        return x

    x = torch.randn(3, 4)
    module = traced(function, x)
    assert count(module, scaled_rule) == 10
    assert targets(module) == [SCALED] * 10
    assert torch.equal(run_checked(module, x), function(x))


def test_symbolic_numbers_are_captured_as_nodes() -> None:
    """A size in place of a captured float stays symbolic: the replacement gets the node, or nothing fires."""
    x = torch.randn(3, 4)
    module = traced(lambda x: torch.exp(x) * x.shape[0], x, mode="symbolic")
    kt.apply(module, patterns(scaled_rule))
    other = torch.randn(3, 4)
    assert torch.equal(run_checked(module, other), torch.exp(other) * 3)


def test_values_filled_in_by_hand_are_those_of_a_trace() -> None:
    """The helper of these tests writes the metadata that tracing writes."""
    x = torch.randn(3, 4)
    module = traced(lambda x: torch.exp(x) * 0.5, x)
    found = [(n.meta["val"].shape, n.meta["val"].dtype) for n in module.graph.nodes if n.op != "output"]
    fill_values(module, x)
    assert [(n.meta["val"].shape, n.meta["val"].dtype) for n in module.graph.nodes if n.op != "output"] == found
