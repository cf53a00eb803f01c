"""A rule → its families: what is generated, merged, and refused, each refusal naming the rule."""

from __future__ import annotations

import math
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Annotated, Any, Literal

import ops_for_tests as ops
import pytest
import rules_for_tests
import torch
from rules_for_tests import Vector, relu_act, relu_enum, relu_scale
from torch import Tensor

import kwtrace as kt
from kwtrace.generation import RuleReference, RuleResult, find_module, find_rule, generate_rule
from kwtrace.patterns import AtMatch, Call, Family, Graph, Hole, In, Op, Ref, Size, Slot

F32 = torch.float32


def generated(search: Callable[..., Any], replacement: Callable[..., Any], **options: Any) -> RuleResult:
    """Return what becomes of a rule for the CPU."""
    rule = kt.rule(devices=("cpu",), **options)(search)
    rule.replacement(replacement)
    return generate_rule(rule)


def refused(search: Callable[..., Any], replacement: Callable[..., Any], **options: Any) -> str:
    """Return why no variant of a rule for the CPU could be generated: one reason, whose head is the same for all."""
    result = generated(search, replacement, **options)
    assert result.families == ()
    assert len(result.failed) == result.variants
    assert all(f"Rule {result.rule}" in str(error) for _, error in result.failed)
    return str(result.failed[0][1])


def only(families: tuple[Family, ...]) -> Family:
    """Return the one family there must be."""
    (family,) = families
    return family


def act_of(x: Tensor) -> Tensor:
    """Stand for a fused op."""
    return ops.act(x)


def searching(function: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    """Return a search function that calls another."""

    def search(x: Vector) -> Tensor:
        return function(x)

    return search


def joined_of(x: Tensor, y: Tensor) -> Tensor:
    """Stand for a fused op of two inputs."""
    return ops.joined(x, y)


def ignores_negate(x: Tensor, *, negate: bool) -> Tensor:
    """Take a bool and do the same whatever it is."""
    return ops.relu_act(x)


def scaled_of(x: Tensor, *, scale: float) -> Tensor:
    """Stand for a fused op with a captured number."""
    return ops.scaled(x, scale=scale)


def relu_act_of(x: Tensor, *, negate: bool) -> Tensor:
    """Stand for a fused op with a bool."""
    return ops.relu_act(x, negate=negate)


def relu_act_mode_of(x: Tensor, *, mode: str) -> Tensor:
    """Stand for a fused op with a string."""
    return ops.relu_act(x, mode=mode)


def test_variants_of_one_skeleton_are_one_family() -> None:
    """Four combinations of a bool and a string are one skeleton and four rows, arguments bound by name."""
    result = generate_rule(relu_act)
    family = only(result.families)
    assert (result.variants, result.failed, result.merged, result.unmatched) == (4, (), (), ())
    assert family.columns == ("negate", "mode")
    assert family.rows == ((False, "none"), (False, "twice"), (True, "none"), (True, "twice"))
    assert family.skeleton.search == (
        Op("relu", "aten.relu.default", (("self", In("x")),)),
        Op(
            "act",
            "kwtrace_toys.act.default",
            (("x", Ref("relu")), ("negate", Slot("negate")), ("mode", Slot("mode")), ("out_dtype", None)),
        ),
    )
    assert isinstance(family.skeleton.replacement, Graph)
    (call,) = family.skeleton.replacement.calls
    assert (call.target, call.args) == ("kwtrace_toys.relu_act.default", (In("x"),))
    assert family.skeleton.outputs[0].dims == (Size("n"),)
    assert family.skeleton.module == "rules_for_tests"


def test_an_enum_is_an_axis_whose_members_stand_in_the_rows() -> None:
    """The member is the axis's value, and what the operator got has a column of its own; dtypes share theirs."""
    family = only(generate_rule(relu_enum).families)
    assert family.columns[:2] == ("T", "mode")
    modes = rules_for_tests.Mode
    assert [row[:2] for row in family.rows] == [
        (dtype, mode) for dtype in (torch.float32, torch.bfloat16) for mode in modes
    ]
    assert [row[2] for row in family.rows] == ["none", "twice"] * 2


def test_a_captured_number_is_a_hole() -> None:
    """A captured float is found by its place, in search and replacement graph."""
    family = only(generate_rule(relu_scale).families)
    assert dict(family.skeleton.search[1].args)["other"] == Hole("scale")
    assert isinstance(family.skeleton.replacement, Graph)
    assert dict(family.skeleton.replacement.calls[0].kwargs) == {"scale": Hole("scale")}
    assert [(c.name, c.kind) for c in family.skeleton.captures] == [("scale", "float")]


@pytest.mark.parametrize(
    ("function", "hole"),
    [
        (lambda s: 1 / s, "reciprocal"),
        (lambda s: -s, "negative"),
        (lambda s: 1 - s, "complement"),
        (lambda s: s * 0.7, "multiple"),
        (lambda s: s**2, "square"),
        (math.sqrt, "square_root"),
        (lambda s: s * 1, "same"),
    ],
    ids=["reciprocal", "negative", "complement", "multiple", "square", "square_root", "same"],
)
def test_a_captured_number_may_be_derived(function: Callable[[float], float], hole: str) -> None:
    """1/x, -x, 1-x, x*c, x**2 and sqrt(x) of a captured number are found in the graph."""

    def search(x: Vector, *, scale: float) -> Tensor:
        return torch.relu(x) * function(scale)

    family = only(generated(search, scaled_of).families)
    found = dict(family.skeleton.search[1].args)["other"]
    assert isinstance(found, Hole)
    assert (found.name, found.function) == ("scale", hole)
    assert found.constant == (0.7 if hole == "multiple" else None)


def test_two_captured_numbers_are_told_apart() -> None:
    """Each captured number is found in its own place, whichever order it is used in."""

    def search(x: Vector, *, a: float, b: float, n: int) -> Tensor:
        return torch.relu(x) * b + a - n

    family = only(
        generated(
            search, lambda x, *, a, b, n: ops.scaled(ops.scaled(ops.joined(x, heads=n), scale=a), scale=b)
        ).families
    )
    holes = [value for op in family.skeleton.search for _, value in op.args if isinstance(value, Hole)]
    assert holes == [Hole("b"), Hole("a"), Hole("n")]


def test_a_number_that_is_no_simple_function_is_refused() -> None:
    """A number that depends on a captured one in another way is shown, with the values it was traced with."""

    def search(x: Vector, *, scale: float) -> Tensor:
        return torch.relu(x) * math.exp(scale)

    reason = refused(search, scaled_of)
    assert "expected each number in the graph to be a literal or a simple function of one captured parameter" in reason
    assert "{'scale': " in reason


def test_a_captured_number_that_decides_the_structure_is_refused() -> None:
    """A graph whose structure depends on a captured value needs special values; the error says so."""

    def search(x: Vector, *, scale: float) -> Tensor:
        return torch.relu(x) * scale if scale < 0.5 else torch.relu(x) + scale

    assert "give such values in Captured(special=...)" in refused(search, scaled_of)


def test_special_values_have_variants_of_their_own() -> None:
    """A value that changes the graph is a variant, with the literal, or nothing, in place of the hole."""

    def search(x: Vector, *, scale: Annotated[float, kt.Captured(special=(1.0, 0.0))]) -> Tensor:
        return torch.relu(x) if scale == 1.0 else torch.relu(x) * scale

    result = generated(search, scaled_of)
    assert result.failed == ()
    found = {
        str(f.variant(row)): [value for op in f.skeleton.search for _, value in op.args][2:]
        for f in result.families
        for row in f.rows
    }
    assert found == {
        "search[device='cpu']": [Hole("scale")],
        "search[scale=1.0, device='cpu']": [],
        "search[scale=0.0, device='cpu']": [0.0],
    }
    replacements = {
        str(f.variant(f.rows[0])): dict(f.skeleton.replacement.calls[0].kwargs)["scale"]  # type: ignore[union-attr]
        for f in result.families
    }
    assert replacements["search[scale=1.0, device='cpu']"] == 1.0
    assert replacements["search[device='cpu']"] == Hole("scale")


def test_structure_may_differ_between_variants() -> None:
    """A search function may branch on an axis: variants of different structure are different families."""

    def search(x: Vector, y: Annotated[Tensor | None, kt.Shape("n>1"), F32], *, negate: bool) -> Tensor:
        z = torch.relu(x) if y is None else torch.relu(x) + y
        return ops.act(-z if negate else z)

    def replacement(x: Tensor, y: Tensor | None, *, negate: bool) -> Tensor:
        return ops.act(ops.joined(x, y), negate=negate)

    result = generated(search, replacement)
    assert result.failed == ()
    assert sorted(len(family.skeleton.search) for family in result.families) == [2, 3, 3, 4]


def test_alternatives_products_and_literals_are_traced() -> None:
    """Each alternative is a variant of its own shape; products and literals stay expressions in the pattern."""

    def search(
        x: Annotated[Tensor, kt.Shape("b>1 g>1*n>1", "3 1 g>1*n>1"), F32], y: Annotated[Tensor, kt.Shape("g>1"), F32]
    ) -> Tensor:
        groups = y.shape[0]
        folded = x.reshape(*x.shape[:-1], groups, x.shape[-1] // groups)
        return (torch.relu(folded) * y[:, None]).reshape(x.shape)

    result = generated(search, joined_of)
    assert result.failed == ()
    shapes = {family.skeleton.inputs[0].dims: family.skeleton for family in result.families}
    assert set(shapes) == {("b", "g*n"), ("3", "1", "g*n")}
    assert dict(shapes["b", "g*n"].search[0].args)["size"] == (Size("b"), Size("g"), Size("n"))
    assert shapes["3", "1", "g*n"].outputs[0].dims[:2] == (3, 1)


def test_a_scalar_tensor_has_no_dims() -> None:
    """``Shape("")`` is a tensor without dims."""

    def search(x: Vector, factor: Annotated[Tensor, kt.Shape(""), F32]) -> Tensor:
        return torch.relu(x) * factor

    assert only(generated(search, lambda x, factor: ops.joined(x + 0, factor)).families).skeleton.inputs[1].dims == ()


def test_several_outputs_are_kept_in_order() -> None:
    """A rule may return a tuple; each output has its value, dtype and size."""

    def search(x: Vector) -> tuple[Tensor, Tensor]:
        y = torch.relu(x)
        return ops.act(y, out_dtype=torch.bfloat16), y + 1

    def replacement(x: Tensor) -> tuple[Tensor, Tensor]:
        return ops.joined(x).to(torch.bfloat16), ops.act(x)

    outputs = only(generated(search, replacement).families).skeleton.outputs
    assert [(output.value, output.dtype) for output in outputs] == [(Ref("act"), torch.bfloat16), (Ref("add"), F32)]


def test_a_size_condition_is_kept() -> None:
    """What a search function asks of a size is a condition of the pattern."""

    def search(x: Vector) -> Tensor:
        return torch.relu(x) * 2 if x.shape[0] > 8 else torch.relu(x)

    assert only(generated(search, act_of).families).skeleton.conditions == ("n > 8",)


def test_a_size_may_be_used_as_a_number() -> None:
    """``size ** 0.5`` stays an expression over the dims."""

    def search(x: Vector) -> Tensor:
        return torch.relu(x) / x.shape[0] ** 0.5

    found = dict(only(generated(search, act_of).families).skeleton.search[1].args)["other"]
    assert isinstance(found, Size)
    assert "n" in found.expr


def test_variants_for_cuda_are_traced_without_a_gpu() -> None:
    """A rule for two devices has a variant for each, whatever this machine has."""

    def search(x: Vector) -> Tensor:
        return torch.relu(x) + torch.ones(x.shape[0], device=x.device)

    rule = kt.rule(search)
    rule.replacement(act_of)
    result = generate_rule(rule)
    assert result.failed == ()
    assert {row for family in result.families for row in family.rows} in ({("cpu",), ("cuda",)}, {()})
    devices = {dict(f.variant(row).axes)["device"] for f in result.families for row in f.rows}
    assert devices == {"cpu", "cuda"}


def test_a_replacement_at_match_is_not_traced() -> None:
    """``at="match"`` leaves the replacement to the match: here it would raise."""

    def search(x: Vector) -> Tensor:
        return torch.relu(x) + 1

    def never(x: Tensor) -> Tensor:
        raise AssertionError

    rule = kt.rule(devices=("cpu",))(search)
    rule.replacement(at="match")(never)
    assert only(generate_rule(rule).families).skeleton.replacement == AtMatch()


def test_a_rule_without_replacement_is_an_error() -> None:
    """A rule needs a replacement; the error shows how to declare one."""

    def search(x: Vector) -> Tensor:
        return torch.relu(x)

    with pytest.raises(kt.RuleError, match=r"Rule search: expected a replacement, found none.*@search\.replacement"):
        generate_rule(kt.rule(search))


def test_a_device_without_replacement_is_refused() -> None:
    """A rule with a replacement for one of its devices only fails on the other, naming it."""

    def search(x: Vector) -> Tensor:
        return torch.relu(x) + 1

    rule = kt.rule(search)
    rule.replacement(devices=("cpu",))(act_of)
    result = generate_rule(rule)
    ((variant, error),) = result.failed
    reason = str(error)
    assert variant == "search[device='cuda']"
    assert "Rule search, variant search[device='cuda']: expected a replacement for " in reason


def test_a_variant_that_raises_fails_alone() -> None:
    """What a search function raises for one variant is reported for it; the others are generated."""

    def search(x: Vector, *, mode: Literal["none", "twice"]) -> Tensor:
        if mode == "twice":
            msg = "no such mode\nand more"
            raise LookupError(msg)
        return ops.act(torch.relu(x), mode=mode)

    result = generated(search, relu_act_mode_of)
    ((variant, error),) = result.failed
    reason = str(error)
    assert variant == "search[mode='twice', device='cpu']"
    assert reason.startswith(
        f"Rule search, variant {variant}, function search: expected it to trace, found LookupError: no such mode"
    )
    assert "\n" not in reason
    assert [str(f.variant(row)) for f in result.families for row in f.rows] == ["search[mode='none', device='cpu']"]


def test_a_replacement_that_raises_is_named() -> None:
    """An error in a replacement names the function that raised."""

    def search(x: Vector) -> Tensor:
        return torch.relu(x) + 1

    def breaking(x: Tensor) -> Tensor:
        msg = "not today"
        raise ValueError(msg)

    assert "function breaking: expected it to trace, found ValueError: not today" in refused(search, breaking)


@pytest.mark.parametrize(
    "error", [SystemExit(0), KeyError(), RecursionError("deep")], ids=["exit", "empty", "recursion"]
)
def test_whatever_a_search_function_raises_is_reported(error: BaseException) -> None:
    """An error without a message, or one that would end the process, is a failed variant like any other."""

    def search(x: Vector) -> Tensor:
        raise error

    assert f"found {type(error).__name__}" in refused(search, act_of)


@pytest.mark.parametrize("result", [None, 3, (), [], ("x",)], ids=repr)
def test_a_function_that_returns_no_tensor_is_refused(result: Any) -> None:
    """A function must return a tensor or a tuple of tensors."""

    def search(x: Vector) -> Any:
        torch.relu(x)
        return result

    assert "expected it to return a tensor or a tuple of tensors, found " in refused(search, act_of)


def test_an_output_that_is_an_input_is_refused() -> None:
    """There is nothing to replace where an output is an input."""

    def search(x: Vector, y: Vector) -> tuple[Tensor, Tensor]:
        return torch.relu(x) + y, y

    reason = refused(search, lambda x, y: (ops.joined(x, y), y))
    assert reason.endswith("expected outputs that are computed, found that one is the input y.")


def replaced(replacement: Callable[..., Any], **options: Any) -> str:
    """Return why a replacement for ``act(relu(x), negate=)`` is refused."""

    def search(x: Vector, *, negate: bool) -> Tensor:
        return ops.act(torch.relu(x), negate=negate)

    return refused(search, replacement, **options)


def test_a_replacement_with_an_unknown_parameter_is_refused() -> None:
    """A replacement takes the rule's own parameters; another one is named."""
    assert replaced(lambda x, *, negate, extra: ops.act(x, negate=negate)) == (
        "Rule search: expected a replacement with the rule's own parameters, found 'extra'; remove it."
    )


def test_a_replacement_with_a_missing_parameter_is_refused() -> None:
    """A parameter that the replacement doesn't take is named, and how to say that it's meant."""
    reason = replaced(act_of)
    assert reason.startswith("Rule search, parameter negate: expected the replacement to take it, found it missing")
    assert "unused=('negate',)" in reason


def test_a_replacement_with_another_number_of_outputs_is_refused() -> None:
    """The replacement returns as many tensors as the search function."""
    reason = replaced(lambda x, *, negate: (ops.relu_act(x, negate=negate), x + 1))
    assert reason.startswith("Rule search, variant search[negate=False, device='cpu']: expected ")
    assert "1 outputs" in reason
    assert reason.endswith("found 2.")


def test_a_replacement_with_another_dtype_is_refused() -> None:
    """Each output has the dtype of the search function's."""
    reason = replaced(lambda x, *, negate: ops.relu_act(x, negate=negate, out_dtype=torch.float64))
    assert "expected torch.float32" in reason
    assert reason.endswith("output 0 of the replacement, found torch.float64.")


@pytest.mark.parametrize(
    ("change", "found"),
    [(lambda y: y[1:], "[(-1) + n]"), (lambda y: y[None], "[1, n]"), (lambda y: y.sum(), "[]")],
    ids=["shorter", "more dims", "fewer dims"],
)
def test_a_replacement_with_another_size_is_refused(change: Callable[[Tensor], Tensor], found: str) -> None:
    """Each output has the size of the search function's, symbolically."""
    reason = replaced(lambda x, *, negate: change(ops.relu_act(x, negate=negate)))
    assert "expected size [n]" in reason
    assert reason.endswith(f"output 0 of the replacement, found {found}.")


def test_a_replacement_on_another_device_is_refused() -> None:
    """Each output is on the device of the search function's."""
    reason = replaced(lambda x, *, negate: ops.relu_act(x, negate=negate).to("meta"))
    assert reason.startswith("Rule search, variant search[negate=False, device='cpu']: expected ")
    assert "meta" in reason


@pytest.mark.parametrize(
    ("function", "found"),
    [
        (lambda x: torch.relu(x) if x.sum() > 0 else -x, "data-dependent"),
        (lambda x: torch.relu(x) * x.sum().item(), ""),
        (lambda x: torch.nonzero(torch.relu(x)).float().sum(1), ""),
        (lambda x: torch.relu(x)[: int(x.sum())], ""),
    ],
    ids=["branch", "item", "nonzero", "slice"],
)
def test_data_dependent_code_is_refused(function: Callable[[Tensor], Tensor], found: str) -> None:
    """A graph or size that depends on the data of a tensor can't be traced ahead."""

    def search(x: Vector) -> Tensor:
        return function(x)

    assert found in refused(search, function)


@pytest.mark.parametrize(
    "constant", [torch.tensor(2.0), torch.tensor([2.0]), torch.ones(1)], ids=["0-d", "1-d", "ones"]
)
def test_a_tensor_constant_is_refused(constant: Tensor) -> None:
    """A tensor that comes from neither the inputs nor an op is an error that says what to do."""

    def search(x: Vector) -> Tensor:
        return torch.relu(x) * constant

    def made(x: Vector) -> Tensor:
        return torch.relu(x) * torch.tensor(constant.tolist())

    for function in (search, made):
        assert "Rule " in refused(function, act_of)
    assert "torch.full" in refused(made, act_of)
    assert "torch.full" in refused(searching(torch.relu), made)


def mutate_input(x: Tensor) -> Tensor:
    """Mutate an input and go on with it."""
    return torch.relu(x.add_(1))


def mutate_aside(x: Tensor) -> Tensor:
    """Mutate an input and use it no more."""
    y = torch.relu(x)
    x.add_(1)
    return y


@pytest.mark.parametrize("function", [mutate_input, mutate_aside])
def test_a_mutating_op_is_refused(function: Callable[[Tensor], Tensor]) -> None:
    """An op that mutates an input, whether or not its result is used, is an error naming the op, on either side."""

    def search(x: Vector) -> Tensor:
        return function(x)

    def fine(x: Vector) -> Tensor:
        return torch.relu(x) + 1

    for reason in (refused(search, act_of), refused(fine, function)):
        assert "aten.add_.Tensor" in reason


def test_a_size_that_only_one_tensor_fits_is_refused() -> None:
    """A constant of three numbers fits inputs of that size alone."""

    def search(x: Vector) -> Tensor:
        return torch.relu(x) + torch.ones(3)

    assert "expected it to trace" in refused(search, act_of)


def test_a_tensor_of_its_own_may_be_mutated() -> None:
    """What a function writes to something that it has made is what torch.compile makes of it: an op that doesn't."""

    def search(x: Vector) -> Tensor:
        return torch.relu(x).mul_(2)

    skeleton = only(generated(search, act_of).families).skeleton
    assert [op.target for op in skeleton.search] == ["aten.relu.default", "aten.mul.Tensor"]


@pytest.mark.parametrize(
    "function",
    [
        lambda x: torch.relu(x) * int(x.shape[0]),
        lambda x: torch.relu(x) / math.sqrt(x.shape[0]),
        lambda x: torch.relu(x) * float(x.shape[0]),
        lambda x: torch.relu(x) * len(range(x.shape[0])),
    ],
    ids=["int", "sqrt", "float", "range"],
)
def test_a_size_that_tracing_fixes_is_refused(function: Callable[[Tensor], Tensor]) -> None:
    """Code that turns a size into a number would burn it in: an error that shows the size and what to write."""

    def search(x: Vector) -> Tensor:
        return function(x)

    reason = refused(search, act_of)
    assert "expected sizes to stay symbolic, found that tracing fixed one: n == " in reason
    assert "size ** 0.5" in reason


def test_a_replacement_that_fixes_a_size_is_refused() -> None:
    """The replacement's sizes stay symbolic too."""

    def search(x: Vector) -> Tensor:
        return torch.relu(x) + 1

    assert "tracing fixed one" in refused(search, lambda x: ops.joined(x, heads=int(x.shape[0])))


def test_tracing_does_not_depend_on_what_surrounds_it() -> None:
    """Default dtype, default device, gradients and autocast around a run change nothing."""

    def search(x: Vector) -> Tensor:
        return torch.relu(x) + torch.ones(x.shape[0])

    expected = generated(search, act_of).families
    torch.set_default_dtype(torch.float64)
    try:
        with torch.device("meta"), torch.enable_grad(), torch.autocast("cpu"):
            assert generated(search, act_of).families == expected
            assert torch.get_default_dtype() is torch.float64
    finally:
        torch.set_default_dtype(torch.float32)


def test_progress_ticks_once_per_variant() -> None:
    """The progress callback is called with 1 for each variant."""
    ticks: list[int] = []
    generate_rule(relu_act, progress=ticks.append)
    assert ticks == [1] * 4


def test_an_executor_gives_the_same_result() -> None:
    """Any concurrent.futures.Executor may trace; the result is the one of no executor."""
    with ThreadPoolExecutor(1) as executor:
        assert generate_rule(relu_enum, executor) == generate_rule(relu_enum)


def test_a_rule_is_found_by_module_and_name() -> None:
    """A worker finds a rule by the name of its module and its own, not by the variable's."""
    assert RuleReference("rules_for_tests", "relu_act").load() is relu_act
    assert find_rule("rules_for_tests", "relu_scale") is relu_scale


def test_a_rule_that_is_not_found_is_an_error() -> None:
    """A missing rule, or a module that doesn't import, is a LoadError that names it."""
    with pytest.raises(kt.LoadError, match="Expected the module rules_for_tests to declare rule nothing"):
        find_rule("rules_for_tests", "nothing")
    with pytest.raises(
        kt.LoadError, match="Expected the module no_such_module_at_all to import, found ModuleNotFoundError"
    ):
        find_module("no_such_module_at_all")


def test_a_call_of_the_replacement_has_no_other_shape() -> None:
    """A replacement graph holds calls, with positional arguments in place and keyword ones by name."""
    family = only(generate_rule(relu_scale).families)
    assert isinstance(family.skeleton.replacement, Graph)
    assert family.skeleton.replacement == Graph(
        (Call("scaled", "kwtrace_toys.scaled.default", (In("x"),), (("scale", Hole("scale")),)),), (Ref("scaled"),)
    )
