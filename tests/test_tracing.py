"""A variant → its graphs with symbolic sizes, and the conditions under which they hold."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Annotated, Any

import ops_for_tests as ops
import pytest
import sympy
import torch
from rules_for_tests import Vector
from torch import Tensor
from torch.utils._sympy.functions import FloorDiv

import kwtrace as kt
from kwtrace.domains import enumerate_variants, read_domain, samples
from kwtrace.rules import Rule
from kwtrace.tracing import HINTS, Point, Trace, caller, check_signature, to_text, trace

F32 = torch.float32


def traced(search: Callable[..., Any], point: Point | None = None, place: int = 0, **options: Any) -> Trace:
    """Trace the search function of a rule at one of its variants."""
    rule = kt.rule(**{"devices": ("cpu",), **options})(search)
    domain = read_domain(rule)
    variant = enumerate_variants(rule, domain)[place]
    return trace(search, rule, domain, variant, point or Point(), samples(domain, variant)[0])


def metadata(found: Trace) -> dict[str, tuple[Any, ...]]:
    """Return the shapes of the inputs, as ints or text."""
    nodes = [node for node in found.graph.nodes if node.op == "placeholder"]
    shapes = ([found.expression(size) for size in node.meta["val"].shape] for node in nodes)
    return {
        name: tuple(size if type(size) is int else to_text(size) for size in shape)
        for name, shape in zip(found.inputs, shapes, strict=True)
    }


def search_two(
    x: Annotated[Tensor, kt.Shape("b h? 2*d 1"), F32], y: Annotated[Tensor, kt.Shape("h d*b"), F32]
) -> Tensor:
    """Use two tensors with every form of dim."""
    return torch.relu(x).sum() + y


def test_sizes_are_symbols_named_by_the_rule() -> None:
    """Each named dim is one symbol, products and literals as they are written, and ``h?`` is the dim at first."""
    assert metadata(traced(search_two)) == {"x": ("b", "h", "2*d", 1), "y": ("h", "b*d")}


def test_a_point_fixes_dims_and_places_at_1() -> None:
    """At a point the dims, or the optional places, that it names are 1; the others stay symbols."""
    assert metadata(traced(search_two, Point(dims=frozenset({"d"})))) == {"x": ("b", "h", 2, 1), "y": ("h", "b")}
    assert metadata(traced(search_two, Point(places=frozenset({("x", 1)})))) == {
        "x": ("b", 1, "2*d", 1),
        "y": ("h", "b*d"),
    }


def test_a_static_point_has_ints() -> None:
    """A static point gives every dim a size of its own, as an int, except those at 1."""
    shapes = metadata(traced(search_two, Point(dims=frozenset({"d"}), static=True)))
    b, h = shapes["x"][0], shapes["x"][1]
    assert shapes == {"x": (b, h, 2, 1), "y": (h, b)}
    assert type(b) is type(h) is int
    assert b != h


def test_example_sizes_are_no_multiples_of_each_other() -> None:
    """Sizes to trace with are distinct, at least 3, and no multiples: no accidental equality becomes a guard."""
    assert min(HINTS) >= 3
    assert all(b % a for a, b in itertools.combinations(sorted(HINTS), 2))


def test_two_dims_are_never_taken_for_equal() -> None:
    """A function that needs two dims to be equal is refused: name them alike."""

    def search(x: Annotated[Tensor, kt.Shape("m"), F32], y: Annotated[Tensor, kt.Shape("n"), F32]) -> Tensor:
        return torch.relu(x) + y

    with pytest.raises(
        kt.TraceError, match=r"Rule search, variant .*: expected it to trace, found RuntimeError: The size"
    ):
        traced(search)


def test_conditions_are_over_the_dims() -> None:
    """A guard is kept as a condition over the rule's own dims; without guards there is none."""

    def search(x: Annotated[Tensor, kt.Shape("m n"), F32]) -> Tensor:
        return torch.relu(x) if x.shape[0] * 2 > x.shape[1] else x + 1

    assert traced(search_two).conditions == frozenset()
    assert {str(symbol) for condition in traced(search).conditions for symbol in condition.free_symbols} == {"m", "n"}


def test_the_variant_decides_device_dtype_and_presence() -> None:
    """Tensors have the device and dtype of the variant; an absent one is no input, and the function gets None."""
    seen: list[Any] = []
    dtypes = kt.DTypes("T", torch.bfloat16)

    def search(x: Tensor, y: Tensor | None) -> Tensor:
        seen.append((x.dtype, x.device.type, None if y is None else y.device.type))
        return torch.relu(x)

    search.__annotations__["x"] = Annotated[Tensor, kt.Shape("n"), dtypes]
    search.__annotations__["y"] = Annotated[Tensor | None, kt.Shape("n"), F32]
    assert traced(search, devices=("cpu", "cuda")).inputs == ("x",)
    assert traced(search, place=3, devices=("cpu", "cuda")).inputs == ("x", "y")
    assert seen == [(torch.bfloat16, "cpu", None), (torch.bfloat16, "cuda", "cuda")]


def test_composite_ops_are_decomposed() -> None:
    """The graph holds what Inductor's decompositions leave: no composite op."""

    def search(x: Annotated[Tensor, kt.Shape("m n"), F32]) -> Tensor:
        return torch.nn.functional.silu(x)

    names = [str(node.target) for node in traced(search).graph.nodes if node.op == "call_function"]
    assert "aten.silu.default" not in names
    assert "aten.sigmoid.default" in names or "aten.exp.default" in names


def test_indexing_on_a_device_without_driver_is_traced() -> None:
    """``x[...]`` of any form is traced for CUDA on a machine without a GPU, with the shapes that indexing gives."""

    def search(x: Annotated[Tensor, kt.Shape("b h d"), F32]) -> tuple[Tensor, ...]:
        return (
            x[:, None] + 1,
            x[..., 0] + 1,
            x[0, :, 1:] + 1,
            x[..., None, :] + 1,
            x[:, :, ::2] + 1,
            x[None, ..., -1] + 1,
            x[:] + 1,
        )

    found = traced(search, devices=("cuda",))
    output = next(node for node in found.graph.nodes if node.op == "output")
    expected = [(3, 1, 7, 5), (3, 7), (7, 4), (3, 7, 1, 5), (3, 7, 3), (1, 3, 7), (3, 7, 5)]
    symbols = {"b": 3, "d": 5, "h": 7}
    shapes = []
    for node in output.args[0]:
        sizes = (found.expression(size) for size in node.meta["val"].shape)
        shapes.append(
            tuple(
                int(s if type(s) is int else s.subs({symbol: symbols[str(symbol)] for symbol in s.free_symbols}))
                for s in sizes
            )
        )
    assert shapes == expected


def rule_of(search: Callable[..., Any], **options: Any) -> Rule:
    """Return a rule for the CPU."""
    return kt.rule(devices=("cpu",), **options)(search)


def scale(x: Vector, *, by: float, twice: bool) -> Tensor:
    """Be a search function with a captured number and an axis."""
    return torch.relu(x) * by * (2 if twice else 1)


def test_a_caller_fills_in_axes_and_samples() -> None:
    """What is traced is a function of the tensors; the axes and samples are passed as they are, by name."""
    rule = rule_of(scale)
    domain = read_domain(rule)
    call = caller(
        lambda x, *, by, twice: (x, by, twice), rule, domain, {"twice": True, "device": "cpu"}, ("x",), {"by": 0.5}
    )
    assert call("tensor") == ("tensor", 0.5, True)


def test_a_caller_passes_positional_only_parameters_in_order() -> None:
    """A replacement may take parameters by position only."""
    rule = rule_of(scale)

    def replacement(by: float, x: Tensor, /, twice: bool) -> Any:
        return (x, by, twice)

    call = caller(replacement, rule, read_domain(rule), {"twice": False, "device": "cpu"}, ("x",), {"by": 0.5})
    assert call("tensor") == ("tensor", 0.5, False)


def test_a_signature_may_leave_out_what_is_unused() -> None:
    """The parameters of a function are the rule's, less those that are declared unused."""
    rule = rule_of(scale, unused=("twice",))
    domain = read_domain(rule)
    assert [p.name for p in check_signature(lambda by, x: None, rule, domain)] == ["by", "x"]
    with pytest.raises(kt.TraceError, match="Rule scale, parameter by: expected the replacement to take it"):
        check_signature(lambda x: None, rule, domain)
    with pytest.raises(kt.TraceError, match="found 'z'"):
        check_signature(lambda x, by, z: None, rule, domain)


def test_a_replacement_may_not_take_keywords_at_large() -> None:
    """``**kwargs`` in a replacement would hide what it uses."""
    rule = rule_of(scale)
    with pytest.raises(kt.TraceError, match="found 'kwargs'"):
        check_signature(lambda x, **kwargs: None, rule, read_domain(rule))


def test_too_many_dims_are_an_error_that_names_the_rule() -> None:
    """There are sizes for a limited number of named dims; one more is an error naming the rule."""
    dims = " ".join(f"d{i}" for i in range(len(HINTS) + 1))

    def search(x) -> Tensor:  # type: ignore[no-untyped-def] # noqa: ANN001 - set below
        return ops.joined(x)

    search.__annotations__["x"] = Annotated[Tensor, kt.Shape(dims), F32]
    with pytest.raises(
        kt.TraceError, match=f"Rule search.*expected at most {len(HINTS)} named dims.*found {len(HINTS) + 1}"
    ):
        traced(search)


def test_expressions_are_python() -> None:
    """A size is written as a Python expression that evaluates to it."""
    n, m = sympy.symbols("n m", integer=True, positive=True)
    for expression, value in ((n * m + 1, 16), (FloorDiv(n, 2), 2), (sympy.Max(n, m), 5), (n <= m, False)):
        assert eval(to_text(expression), {"n": 5, "m": 3, "max": max}) == value  # noqa: S307 - text of our own
