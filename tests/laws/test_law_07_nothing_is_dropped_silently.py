"""Law 7: nothing is dropped silently; each error names rule, parameter and variant."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any, Literal

import ops_for_tests as ops
import pytest
import torch
from rules_for_tests import Vector
from torch import Tensor

import kwtrace as kt
from kwtrace.generation import RuleResult, generate_rule
from kwtrace.patterns import Family

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


def test_a_captured_value_that_vanishes_is_refused() -> None:
    """A captured value that the search graph doesn't hold is an error naming rule, parameter and variant."""

    def search(x: Vector, *, scale: float) -> Tensor:
        return torch.relu(x) * 2

    reason = refused(search, scaled_of)
    assert reason == (
        "Rule search, parameter scale, variant search[device='cpu']: expected its value to be in the search graph, "
        "found that it vanished while tracing."
    )


def test_a_replacement_may_leave_out_what_is_declared_unused() -> None:
    """``unused=`` names parameters that a replacement need not take."""

    def search(x: Vector, *, negate: bool) -> Tensor:
        return ops.act(torch.relu(x), negate=negate)

    result = generated(search, act_of, unused=("negate",))
    assert result.failed == ()
    assert only(result.families).rows == ((False,), (True,))


def test_an_axis_that_the_replacement_ignores_is_refused() -> None:
    """A replacement that gives one graph for two values that the search graph tells apart is wrong for one of them."""

    def search(x: Vector, *, negate: bool) -> Tensor:
        return ops.act(torch.relu(x), negate=negate)

    result = generated(search, ignores_negate)
    assert result.families == ()
    reason = str(result.failed[0][1])
    assert reason.startswith("Rule search, parameter negate: expected the replacement to depend on it as the search ")
    assert "search[negate=False, device='cpu'] and search[negate=True, device='cpu']" in reason


def test_a_tensor_or_number_that_the_replacement_ignores_is_refused() -> None:
    """A tensor or captured number that the replacement takes and doesn't use is an error naming it."""

    def search(x: Vector, y: Vector, *, scale: float) -> Tensor:
        return torch.relu(x) * scale + y

    assert "parameter y, " in refused(search, lambda x, y, *, scale: ops.scaled(x, scale=scale))
    assert "parameter scale, " in refused(search, lambda x, y, *, scale: ops.joined(x + 0, y))


def test_a_tensor_that_the_search_graph_drops_is_refused() -> None:
    """A tensor parameter that tracing dropped can't be bound at a match."""

    def search(x: Vector, y: Vector) -> Tensor:
        return torch.relu(x)

    reason = refused(search, joined_of)
    assert reason.startswith(
        "Rule search, parameter y, variant search[device='cpu']: expected the search graph to use it"
    )


def test_variants_with_one_search_graph_and_different_replacements_are_refused() -> None:
    """Where an axis vanishes from the search graph only, both variants are refused, each naming the other."""

    def search(x: Vector, *, negate: bool) -> Tensor:
        return torch.relu(x) + 1

    result = generated(search, relu_act_of)
    assert result.families == ()
    reasons = {variant: str(error) for variant, error in result.failed}
    first, second = "search[negate=False, device='cpu']", "search[negate=True, device='cpu']"
    assert set(reasons) == {first, second}
    assert reasons[second].startswith(
        f"Rule search, variant {second}: expected a search graph of its own, found that of variant {first}, whose "
        "replacement differs"
    )
    assert "where=" in reasons[second]


def test_variants_with_the_same_graphs_are_merged() -> None:
    """Two variants with equal graphs on both sides are one row, and the result says which was merged into which."""

    def search(x: Vector, *, negate: bool) -> Tensor:
        return torch.relu(x) + 1

    result = generated(search, ignores_negate)
    assert result.failed == ()
    assert result.merged == (("search[negate=True, device='cpu']", "search[negate=False, device='cpu']"),)
    assert only(result.families).rows == ((),)


def test_an_op_without_output_is_refused() -> None:
    """An op that yields nothing would be lost by the rewrite: an error naming the op, on either side."""

    def search(x: Vector) -> Tensor:
        ops.observe(x)
        return torch.relu(x) + 1

    def fine(x: Vector) -> Tensor:
        return torch.relu(x) + 1

    for reason in (refused(search, act_of), refused(fine, search)):
        assert "expected every op to reach an output" in reason
        assert "kwtrace_toys.observe.default" in reason


@pytest.mark.parametrize("names", [("scale",), ("negate",), ("y",), ("scale", "negate", "y")], ids=str)
def test_unused_says_that_it_is_meant(names: tuple[str, ...]) -> None:
    """Each parameter that a replacement leaves out may be declared unused, by name, and only it is excused."""

    def search(x: Vector, y: Vector, *, scale: float, negate: bool) -> Tensor:
        return ops.act(torch.relu(x) * scale + y, negate=negate)

    def replacement(x: Tensor, y: Tensor, *, scale: float, negate: bool) -> Tensor:
        z = x if "y" in names else ops.joined(x, y)
        z = z if "scale" in names else ops.scaled(z, scale=scale)
        return ops.act(z, negate=negate and "negate" not in names)

    assert generated(search, replacement, unused=names).failed == ()
    for name in names:
        rest = tuple(other for other in names if other != name)
        reason = refused_somewhere(search, replacement, unused=rest)
        assert reason.startswith(f"Rule search, parameter {name}")
        assert "search[" in reason


def refused_somewhere(search: Callable[..., Any], replacement: Callable[..., Any], **options: Any) -> str:
    """Return why some variant of a rule couldn't be generated."""
    return str(generated(search, replacement, **options).failed[0][1])


def test_an_unused_captured_value_may_vanish() -> None:
    """A captured value that neither graph holds is no error where it is declared unused."""

    def search(x: Vector, *, scale: float) -> Tensor:
        return torch.relu(x) * 2

    result = generated(search, lambda x, *, scale: ops.scaled(x, scale=2.0), unused=("scale",))
    assert result.failed == ()
    assert only(result.families).skeleton.captures == ()


def test_unused_does_not_excuse_a_vanished_value_that_is_needed() -> None:
    """What the replacement does need must be in the search graph, whatever is declared."""

    def search(x: Vector, *, scale: float) -> Tensor:
        return torch.relu(x) * 2

    reason = refused(search, scaled_of, unused=("scale",))
    assert reason.startswith("Rule search, parameter scale, variant search[device='cpu']: ")
    assert "vanished while tracing" in reason


@pytest.mark.parametrize(
    "function",
    [lambda x, k: torch.relu(x[:k]), lambda x, k: torch.nn.functional.dropout(torch.relu(x), 1 / k, training=False)],
    ids=["slice past the end", "dropout in eval"],
)
def test_a_value_that_tracing_drops_is_refused(function: Callable[..., Tensor]) -> None:
    """A number that the traced graph doesn't hold, though the function uses it, is an error; none is lost silently."""

    def search(x: Vector, *, k: int) -> Tensor:
        return function(x, k)

    reason = refused(search, lambda x, *, k: ops.joined(x, heads=k))
    assert reason.startswith("Rule search, ")
    assert "search[device='cpu']" in reason


def test_a_dtype_that_vanishes_for_one_of_its_values_is_refused() -> None:
    """``x.to(dtype)`` leaves no trace where x has that dtype already: that variant conflicts with its neighbour."""

    def search(x: Vector, *, dtype: Annotated[torch.dtype | None, kt.OneOf(None, F32)]) -> Tensor:
        return ops.act(torch.relu(x).to(dtype or F32))

    result = generated(search, lambda x, *, dtype: ops.relu_act(x, out_dtype=dtype))
    assert result.families == ()
    reasons = [str(reason) for _, reason in result.failed]
    assert len(reasons) == 2
    assert all("search[dtype=None" in reason and "search[dtype=torch.float32" in reason for reason in reasons)


def test_a_rule_with_no_variant_left_is_an_error() -> None:
    """A rule that ``where`` leaves nothing of is an error, not an empty set."""

    def search(x: Vector, *, negate: bool) -> Tensor:
        return ops.act(torch.relu(x), negate=negate)

    with pytest.raises(kt.RuleError, match=r"Rule search: expected at least one variant, found none left by where="):
        generated(search, relu_act_of, where=lambda negate, device: False)


def test_a_conflict_touches_only_the_variants_that_have_it() -> None:
    """Of three variants two share a search graph: both are refused, each naming the other; the third is generated."""

    def search(x: Vector, *, mode: Literal["a", "b", "c"]) -> Tensor:
        return torch.relu(x) * (2.0 if mode in ("a", "b") else 3.0)

    def replacement(x: Tensor, *, mode: str) -> Tensor:
        return ops.scaled(x, scale={"a": 2.0, "b": 2.5, "c": 3.0}[mode])

    result = generated(search, replacement)
    assert [name for name, _ in result.failed] == ["search[mode='a', device='cpu']", "search[mode='b', device='cpu']"]
    assert "search[mode='b', device='cpu']" in str(result.failed[0][1])
    assert "search[mode='a', device='cpu']" in str(result.failed[1][1])
    families = [str(f.variant(row)) for f in result.families for row in f.rows]
    assert families == ["search[mode='c', device='cpu']"]


def test_tracing_in_memory_raises_what_generating_reports() -> None:
    """``kt.trace`` has no table to put a failed variant into: it raises."""

    def search(x: Vector, *, scale: float) -> Tensor:
        return torch.relu(x) * 2

    rule = kt.rule(devices=("cpu",))(search)
    rule.replacement(scaled_of)
    with pytest.raises(kt.KwtraceError, match=r"Rule search, parameter scale, variant search\[device='cpu'\]"):
        kt.trace(rule)
