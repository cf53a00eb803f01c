"""Orders of commutative operators: which there are, which are one, and that each is what tracing would give."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Annotated, Any

import ops_for_commuting as ops
import pytest
import torch
from torch import Tensor

import kwtrace as kt
from kwtrace import drafting
from kwtrace.commuting import COMMUTATIVE, expand, order_key
from kwtrace.families import search_key
from kwtrace.generation import RuleResult, generate_rule
from kwtrace.operators import resolve
from kwtrace.patterns import AtMatch, Hole, In, Op, Pattern, Ref

F32 = torch.float32
Wide = Annotated[Tensor, kt.Shape("m n>1"), F32]
Row = Annotated[Tensor, kt.Shape("n>1"), F32]
Bits = Annotated[Tensor, kt.Shape("m n>1"), torch.int32]
Bit = Annotated[Tensor, kt.Shape("n>1"), torch.int32]
Function = Callable[..., Any]

FUNCTIONS = {
    "aten.add.Tensor": torch.add,
    "aten.bitwise_and.Tensor": torch.bitwise_and,
    "aten.bitwise_or.Tensor": torch.bitwise_or,
    "aten.bitwise_xor.Tensor": torch.bitwise_xor,
    "aten.eq.Tensor": torch.eq,
    "aten.logical_and.default": torch.logical_and,
    "aten.logical_or.default": torch.logical_or,
    "aten.logical_xor.default": torch.logical_xor,
    "aten.maximum.default": torch.maximum,
    "aten.minimum.default": torch.minimum,
    "aten.mul.Tensor": torch.mul,
    "aten.ne.Tensor": torch.ne,
}


def generated(search: Function, replacement: Function | None = None, **options: Any) -> RuleResult:
    """Return what becomes of a rule for the CPU; by default its search function is the replacement, too."""
    rule = kt.rule(devices=("cpu",), **options)(search)
    rule.replacement(replacement or search)
    return generate_rule(rule)


def patterns_of(search: Function, **options: Any) -> list[Pattern]:
    """Return the patterns of a rule of one variant that holds at all sizes."""
    return [family.skeleton for family in generated(search, **options).families]


def written(pattern: Pattern) -> str:
    """Return the first output of a search graph as an expression of operators, tensors and captured numbers."""
    ops_by_name = {op.name: op for op in pattern.search}

    def text(value: Any) -> str:
        if isinstance(value, Ref):
            return text_of(ops_by_name[value.name])
        return value.name if isinstance(value, In | Hole) else repr(value)

    def text_of(op: Op) -> str:
        kept = [value for name, value in op.args if name != "alpha"]
        return f"{op.target.split('.')[1]}({', '.join(map(text, kept))})"

    return text(pattern.outputs[0].value)


def test_every_order_of_every_operator_is_a_pattern() -> None:
    """Two operators have four orders; the rule's own is the first, and all but the search graph is the same."""

    def search(x: Wide, y: Row, z: Wide) -> Tensor:
        return (x + y) * z

    own, *others = patterns_of(search, commutative=True)
    assert [written(pattern) for pattern in (own, *others)] == [
        "mul(add(x, y), z)",
        "mul(z, add(x, y))",
        "mul(add(y, x), z)",
        "mul(z, add(y, x))",
    ]
    assert patterns_of(search) == [own]
    for other in others:
        assert (other.replacement, other.axes, other.inputs) == (own.replacement, own.axes, own.inputs)
        assert (other.dims, other.conditions, other.captures) == (own.dims, own.conditions, own.captures)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_which_operators_are_commutative(name: str) -> None:
    """Sums, products, extremes, equality and what combines bits have a second order."""

    def search(x: Bits, y: Bit) -> Tensor:
        found: Tensor = FUNCTIONS[name](x, y)
        return found

    operator = name.split(".")[1]
    found = patterns_of(search, commutative=True)
    assert [written(pattern) for pattern in found] == [f"{operator}(x, y)", f"{operator}(y, x)"]


def test_every_operator_of_the_list_exists_and_has_two_tensors_first() -> None:
    """The list names operators of the running torch, in aten and, where there are any, their spellings in prims."""
    assert {name for name in COMMUTATIVE if name.startswith("aten.")} == FUNCTIONS.keys()
    for name in COMMUTATIVE:
        first, second, *others = resolve(name)._schema.arguments
        assert (str(first.type), str(second.type)) == ("Tensor", "Tensor")
        assert [argument.name for argument in others] == (["alpha"] if name == "aten.add.Tensor" else [])


def test_a_spelling_in_prims_is_commutative() -> None:
    """What decompositions leave in prims has a second order as well."""

    def search(x: Wide, y: Wide) -> Tensor:
        found: Tensor = torch.ops.prims.mul.default(x.exp(), y)
        return found

    found = patterns_of(search, commutative=True)
    assert [written(pattern) for pattern in found] == ["mul(exp(x), y)", "mul(y, exp(x))"]


@pytest.mark.parametrize(
    "operation",
    [
        lambda x, y: x - y,
        lambda x, y: x / y,
        lambda x, y: x < y,
        lambda x, y: torch.add(x, y, alpha=2),
        torch.atan2,
        lambda x, y: torch.add(x.exp() + 1, x.exp() + 1) / y,
    ],
    ids=["sub", "div", "lt", "alpha", "atan2", "one tensor twice"],
)
def test_what_has_one_order_only(operation: Callable[[Tensor, Tensor], Tensor]) -> None:
    """Other operators, a sum with an alpha, a tensor with a number or with itself: each is one pattern."""

    def search(x: Wide, y: Row) -> Tensor:
        return operation(x, y)

    assert len(patterns_of(search, commutative=True)) == 1


def test_a_captured_alpha_is_not_one() -> None:
    """A sum whose alpha is captured may have any: it isn't commutative."""

    def search(x: Wide, y: Row, *, alpha: int) -> Tensor:
        return torch.add(x, y, alpha=alpha)

    assert len(patterns_of(search, commutative=True)) == 1


def test_orders_that_differ_in_names_only_are_one() -> None:
    """With x and y of one shape and dtype, ``y + x`` is ``x + y`` with its tensors called otherwise."""

    def same(x: Wide, y: Wide, z: Wide) -> Tensor:
        return (x + y) * z

    def shapes(x: Wide, y: Row) -> Tensor:
        return x + y

    def dtypes(x: Wide, y: Annotated[Tensor, kt.Shape("m n"), torch.float64]) -> Tensor:
        return x + y

    found = patterns_of(same, commutative=True)
    assert [written(pattern) for pattern in found] == ["mul(add(x, y), z)", "mul(z, add(x, y))"]
    assert len(patterns_of(shapes, commutative=True)) == len(patterns_of(dtypes, commutative=True)) == 2


def test_captured_numbers_and_dims_are_names_as_well() -> None:
    """Orders that exchange two captured numbers, or two dims, match the same graphs."""

    def numbers(x: Wide, *, a: float, b: float) -> Tensor:
        return x * a + x * b

    def kinds(x: Wide, *, a: float, b: int) -> Tensor:
        return x * a + x * b

    def dims(x: Annotated[Tensor, kt.Shape("m>1"), F32], y: Annotated[Tensor, kt.Shape("n>1"), F32]) -> Tensor:
        return x.sum() + y.sum()

    assert len(patterns_of(numbers, commutative=True)) == len(patterns_of(dims, commutative=True)) == 1
    assert len(patterns_of(kinds, commutative=True)) == 2


def test_dims_with_different_conditions_are_not_exchanged() -> None:
    """A dim that may be 1 and one that may not are two, whatever they are called."""

    def search(x: Annotated[Tensor, kt.Shape("m"), F32], y: Annotated[Tensor, kt.Shape("n>1"), F32]) -> Tensor:
        return x.cos().sum() + y.cos().sum()

    found = patterns_of(search, commutative=True)
    assert len([pattern for pattern in found if {dim.low for dim in pattern.dims} == {1, 2}]) == 2


def tree(operands: list[Tensor], turned: int) -> tuple[Tensor, Tensor]:
    """Return sums and products of four tensors, with nodes shared; each bit of ``turned`` turns an operator."""

    def of(operator: Callable[[Tensor, Tensor], Tensor], left: Tensor, right: Tensor, bit: int) -> Tensor:
        return operator(right, left) if turned >> bit & 1 else operator(left, right)

    a, b, c, d = operands
    first = of(torch.add, a.exp(), b, 0)
    second = of(torch.mul, first, c.sin(), 1)
    third = of(torch.maximum, second, first, 2)
    return of(torch.add, third, d - second, 3), of(torch.mul, d, c.sin(), 4)


@functools.cache
def orders_of_tree() -> tuple[Pattern, ...]:
    """Return `tree` in all orders."""

    def search(a: Wide, b: Row, c: Wide, d: Wide) -> tuple[Tensor, Tensor]:
        return tree([a, b, c, d], 0)

    return tuple(patterns_of(search, commutative=True))


@pytest.mark.parametrize("turned", [0b00000, 0b00001, 0b00110, 0b01000, 0b10010, 0b11101, 0b11111])
def test_an_order_is_what_tracing_it_would_give(turned: int) -> None:
    """Operators come in the order and with the names that a trace of the turned function has."""

    def search(a: Wide, b: Row, c: Wide, d: Wide) -> tuple[Tensor, Tensor]:
        return tree([a, b, c, d], turned)

    (traced,) = patterns_of(search)
    found = [(pattern.search, pattern.outputs) for pattern in orders_of_tree()]
    assert len(found) == 32
    assert found.count((traced.search, traced.outputs)) == 1
    assert turned or (traced.search, traced.outputs) == found[0]


def test_an_order_of_an_order_has_the_same_orders() -> None:
    """Expanding begins with the pattern as it is, and whichever order it begins with, the others are the same."""
    keys = {search_key(pattern) for pattern in orders_of_tree()}
    assert len(keys) == 32
    for pattern in orders_of_tree()[::7]:
        own, *others = expand(pattern)
        assert own == pattern
        assert {search_key(order) for order in (own, *others)} == keys
        assert order_key(pattern) == order_key(orders_of_tree()[0])


def sum_of(tensors: list[Tensor]) -> Tensor:
    """Return the sum of the cosines of tensors, one after the other."""
    total = tensors[0].cos()
    for tensor in tensors[1:]:
        total = total + tensor.cos()
    return total


def six(a: Wide, b: Wide, c: Wide, d: Wide, e: Wide, f: Wide, g: Wide) -> Tensor:
    """Have six sums."""
    return sum_of([a, b, c, d, e, f, g])


def seven(a: Wide, b: Wide, c: Wide, d: Wide, e: Wide, f: Wide, g: Wide, h: Wide) -> Tensor:
    """Have seven sums."""
    return sum_of([a, b, c, d, e, f, g, h])


def test_up_to_six_operators_are_expanded() -> None:
    """Six operators have 64 orders, of which 32 are left: the first sum is of tensors that are alike."""
    assert len(patterns_of(six, commutative=True)) == 32


def test_more_orders_are_an_error() -> None:
    """Seven operators are refused, with the rule, the variant, the count and what to do, with the flag only."""
    message = (
        r"Rule seven, variant seven\[device='cpu'\]: expected at most 6 commutative operators for commutative=True, "
        r"found 7, which have 128 orders; split the rule, or declare commutative=False."
    )
    with pytest.raises(kt.RuleError, match=message):
        patterns_of(seven, commutative=True)
    assert len(patterns_of(seven)) == 1


def flipped(x: Wide, y: Row, z: Wide, *, flip: bool) -> Tensor:
    """Search for a sum in either order, times z."""
    return (y + x if flip else x + y) * z


def test_variants_that_are_orders_of_each_other_are_merged() -> None:
    """With one replacement for both, an axis that says the order is one variant's worth of patterns."""

    def replacement(x: Tensor, y: Tensor, z: Tensor) -> Tensor:
        return ops.add_mul(x, y, z)

    result = generated(flipped, replacement, commutative=True, unused=("flip",))
    first, second = "flipped[flip=False, device='cpu']", "flipped[flip=True, device='cpu']"
    assert (result.merged, result.failed) == (((second, first),), ())
    assert len(result.families) == 4
    assert len(generated(flipped, replacement, unused=("flip",)).families) == 2


def test_variants_that_are_orders_of_each_other_with_two_replacements_are_a_conflict() -> None:
    """Where expanded search graphs coincide and replacements differ, both variants are refused; unexpanded, neither."""

    def replacement(x: Tensor, y: Tensor, z: Tensor, *, flip: bool) -> Tensor:
        return ops.weighed(x, y, z, weight=2.0 if flip else 3.0)

    result = generated(flipped, replacement, commutative=True)
    assert result.families == ()
    first, second = "flipped[flip=False, device='cpu']", "flipped[flip=True, device='cpu']"
    assert {variant for variant, _ in result.failed} == {first, second}
    assert str(dict(result.failed)[second]).startswith(
        f"Rule flipped, variant {second}: expected a search graph of its own, found that of variant {first}"
    )
    apart = generated(flipped, replacement)
    assert (len(apart.families), apart.failed) == (2, ())


def test_expanding_traces_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """A rule is traced exactly as often with the flag as without."""
    count = 0

    def counting(*args: Any) -> Any:
        nonlocal count
        count += 1
        return original(*args)

    def search(x: Annotated[Tensor, kt.Shape("m n"), F32], y: Annotated[Tensor, kt.Shape("n"), F32]) -> Tensor:
        return (x + y).exp() * y

    original = drafting.trace
    monkeypatch.setattr(drafting, "trace", counting)
    plain = len(patterns_of(search))
    traces, count = count, 0
    assert len(patterns_of(search, commutative=True)) > plain
    assert count == traces > 0


def test_the_patterns_of_single_sizes_have_orders_too() -> None:
    """Where a size of 1 has a graph of its own, that is expanded like the others."""

    def search(x: Annotated[Tensor, kt.Shape("m n>1"), F32], y: Annotated[Tensor, kt.Shape("n"), F32]) -> Tensor:
        return (x + y).exp() if x.shape[0] == 1 else (x + y).sin()

    found = {(written(pattern), pattern.inputs[0].dims) for pattern in patterns_of(search, commutative=True)}
    assert found == {
        ("sin(add(x, y))", ("m", "n")),
        ("sin(add(y, x))", ("m", "n")),
        ("exp(add(x, y))", ("1", "n")),
        ("exp(add(y, x))", ("1", "n")),
    }


def test_an_optional_dim_that_no_input_has_otherwise() -> None:
    """Where a dim that may be 1 is 1, no input has it any more: the pattern of that size has orders as others do."""

    def search(x: Annotated[Tensor, kt.Shape("k? n>1"), F32], y: Row) -> Tensor:
        return (x + y).exp() if x.shape[0] == 1 else (x + y).sin()

    found = {(written(pattern), pattern.inputs[0].dims) for pattern in patterns_of(search, commutative=True)}
    assert {("sin(add(y, x))", ("k", "n")), ("exp(add(y, x))", ("1", "n"))} <= found


def test_a_replacement_that_is_traced_at_the_match_stays_so() -> None:
    """Every order has the replacement of the rule, whenever that is traced."""

    def search(x: Wide, y: Row) -> Tensor:
        return x + y

    rule = kt.rule(devices=("cpu",), commutative=True)(search)
    rule.replacement(at="match")(search)
    found = generate_rule(rule).families
    assert [family.skeleton.replacement for family in found] == [AtMatch(), AtMatch()]


def test_rows_of_an_order_share_its_family() -> None:
    """Variants that differ in constants are a family per order: orders multiply families, not tables."""

    def search(x: Wide, y: Row, *, weight: Annotated[float, kt.OneOf(2.0, 3.0)]) -> Tensor:
        return (x + y) * weight

    families = generated(search, commutative=True).families
    assert [family.rows for family in families] == [((2.0,), (3.0,))] * 2
