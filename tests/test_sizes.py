"""Size expressions: solved for the dims, proved on ints and on symbols, and never a guard added."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch._dynamo.source import ConstantSource
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv

from kwtrace.sizes import condition, evaluator, plan, solve


def solved(shapes: dict[str, Sequence[str]], found: dict[str, Sequence[Any]]) -> Any:
    """Solve declared shapes for their dims, given the sizes that a graph has."""
    steps = plan(shapes.items())
    assert steps is not None
    return solve(steps, lambda name, place: found[name][place])


def symbols(env: ShapeEnv, **hints: int) -> list[Any]:
    """Return symbolic sizes."""
    made = []
    for name, hint in hints.items():
        source = ConstantSource(name)
        symbol = env.create_symbol(hint, source, dynamic_dim=DimDynamic.DYNAMIC)
        made.append(env.create_symintnode(symbol, hint=hint, source=source))
    return made


@given(m=st.integers(1, 50), k=st.integers(1, 50), n=st.integers(1, 50), other=st.integers(1, 50))
def test_shapes_are_solved_for_their_dims(m: int, k: int, n: int, other: int) -> None:
    """Each name gets one size, and a second place of the same name must have it too."""
    shapes = {"a": ("m", "k"), "b": ("k", "n")}
    assert solved(shapes, {"a": (m, k), "b": (k, n)}) == {"m": m, "k": k, "n": n}
    found = solved(shapes, {"a": (m, k), "b": (other, n)})
    assert isinstance(found, str) is (other != k)


@given(g=st.integers(1, 12), n=st.integers(1, 12), heads=st.integers(1, 60))
def test_a_product_is_solved_for_its_one_unknown_factor(g: int, n: int, heads: int) -> None:
    """``g*n`` is divided by what is known; a remainder is a refusal."""
    shapes = {"q": ("b", "g*n"), "k": ("b", "g")}
    assert solved(shapes, {"q": (2, g * n), "k": (2, g)}) == {"b": 2, "g": g, "n": n}
    found = solved(shapes, {"q": (2, heads), "k": (2, g)})
    assert isinstance(found, str) is (heads % g != 0)


def test_division_by_zero_is_a_refusal() -> None:
    """A factor of size 0 can't be divided by."""
    assert isinstance(solved({"q": ("g*n",), "k": ("g",)}, {"q": (0,), "k": (0,)}), str)


@pytest.mark.parametrize(("size", "fits"), [(1, True), (3, True), (2, False), (0, False)])
def test_an_optional_dim_is_one_or_the_size(size: int, fits: bool) -> None:
    """``h?`` is 1 or ``h`` and nothing else."""
    found = solved({"q": ("h",), "mask": ("h?",)}, {"q": (3,), "mask": (size,)})
    assert (found == {"h": 3}) is fits


@pytest.mark.parametrize(
    ("text", "size", "fits"), [("1", 1, True), ("1", 2, False), ("4", 4, True), ("2*h", 6, True), ("2*h", 5, False)]
)
def test_literals_are_checked(text: str, size: int, fits: bool) -> None:
    """A literal, or a product with one, is a size to be equal to."""
    found = solved({"x": ("h",), "y": (text,)}, {"x": (3,), "y": (size,)})
    assert (found == {"h": 3}) is fits


def test_two_unknown_factors_cannot_be_planned() -> None:
    """A product of two dims that nothing else gives is refused when planning."""
    assert plan([("x", ("g*n",))]) is None


def test_symbols_are_proved_and_never_guarded() -> None:
    """What is true of all sizes is proved, what is true of the example only is not, and no guard is added."""
    env = ShapeEnv(duck_shape=False)
    a, b, c = symbols(env, a=6, b=6, c=3)
    assert solved({"x": ("m",), "y": ("m",)}, {"x": (a,), "y": (a,)}) == {"m": a}
    assert isinstance(solved({"x": ("m",), "y": ("m",)}, {"x": (a,), "y": (b,)}), str)
    assert isinstance(solved({"x": ("m",), "y": ("m",)}, {"x": (a,), "y": (6,)}), str)
    product = solved({"q": ("g*n",), "k": ("g",)}, {"q": (b * c,), "k": (c,)})
    assert not isinstance(product, str)
    assert product["n"].node.expr == b.node.expr
    assert isinstance(solved({"q": ("g*n",), "k": ("g",)}, {"q": (a,), "k": (c,)}), str)
    assert condition("m*n % n == 0")({"m": a, "n": c})
    assert not condition("m == n")({"m": a, "n": b})
    assert not condition("m != n")({"m": a, "n": b})
    assert not env.guards


@given(m=st.integers(1, 40), n=st.integers(1, 40))
def test_expressions_are_plain_python_on_ints(m: int, n: int) -> None:
    """On ints an expression is what Python says it is, and a condition is a bool."""
    dims = {"m": m, "n": n}
    assert evaluator("m*n + 1")(dims) == m * n + 1
    assert evaluator("max(m, n)//2")(dims) == max(m, n) // 2
    assert evaluator("m")(dims) == m
    assert condition("m > n")(dims) is (m > n)
    assert condition("m > n or m == n")(dims) is (m >= n)
    assert condition("m % n == 0 and m != 7")(dims) is (m % n == 0 and m != 7)


def test_expressions_reach_nothing_else() -> None:
    """The names in an expression are the dims and a few functions; builtins aren't among them."""
    with pytest.raises(NameError):
        evaluator("open('x')")({"m": 1})
