"""How exact a fused result must be."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from kwtrace.testing.comparing import ULPS, compare

EXACT = torch.tensor([1.0, 2.0, 3.0], dtype=torch.float64)


def off(number: float, dtype: torch.dtype = torch.float32) -> Tensor:
    """Return the exact numbers, the last of them off by ``number`` ulps of a number between 2 and 4."""
    return (EXACT + torch.tensor([0.0, 0.0, 2 * number * torch.finfo(dtype).eps])).to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    ("unfused", "fused", "passes"),
    [(0, 0, True), (0, ULPS, True), (0, 2 * ULPS, False), (4, 8, True), (4, 2 * ULPS + 16, False), (4, 0, True)],
)
def test_the_error_may_be_twice_that_of_the_unfused_code_and_a_few_ulps(
    dtype: torch.dtype, unfused: int, fused: int, passes: bool
) -> None:
    """The bound is made of the unfused error and the dtype, and of nothing else."""
    assert (compare(off(unfused, dtype), off(fused, dtype), EXACT) is None) is passes


@pytest.mark.parametrize("special", [math.inf, -math.inf, math.nan])
def test_inf_and_nan_stay_where_they_are(special: float) -> None:
    """The same special numbers at the same places pass; any other, on either side, doesn't."""
    plain, one = torch.tensor([1.0, 2.0]), torch.tensor([1.0, special])
    exact = plain.double()
    assert compare(one, one, exact) is None
    for unfused, fused in ((one, plain), (plain, one), (one, torch.tensor([1.0, 7.0])), (one, one.flip(0))):
        assert compare(unfused, fused, exact) == "nan or inf at other places"
    assert compare(torch.tensor([math.inf]), torch.tensor([-math.inf]), exact[:1]) is not None


def test_finite_results_of_an_infinite_reference_prove_nothing() -> None:
    """A reference that isn't finite can't bound an error."""
    plain = torch.ones(2)
    assert compare(plain, plain, torch.tensor([1.0, math.inf], dtype=torch.float64)) is not None


@pytest.mark.parametrize(
    "fused", [torch.ones(3), torch.ones(2, dtype=torch.float64), torch.ones(1, 2)], ids=["size", "dtype", "rank"]
)
def test_shape_and_dtype_are_the_same(fused: Tensor) -> None:
    """A result that looks otherwise is no result."""
    found = compare(torch.ones(2), fused, torch.ones(2, dtype=torch.float64))
    assert found is not None
    assert found.startswith("expected")


def test_ints_and_bools_are_equal() -> None:
    """What has no rounding has no error."""
    numbers = torch.tensor([1, 2])
    assert compare(numbers, numbers.clone(), numbers) is None
    assert compare(numbers, numbers + 1, numbers) is not None
    assert compare(numbers > 1, numbers > 0, numbers) is not None


def test_an_empty_result_passes() -> None:
    """Without numbers there is nothing to be wrong."""
    assert compare(torch.ones(0), torch.ones(0), torch.ones(0, dtype=torch.float64)) is None
