"""How exact a fused result must be: judged by float64 and by the unfused code, with no tolerance that is guessed."""

from __future__ import annotations

import torch
from torch import Tensor

ULPS = 4
"""How many ulps of its dtype a fused result may be off beyond twice the error of the unfused code.

Twice the unfused error is no bound by itself: of a few numbers the unfused code may get each right by luck, with an
error of 0. The fused code may take its last steps in another way, and lose what each of them rounds away: a function
such as the exponential, for which torch's vector library promises at most one ulp, and a sum, a product or quotient and
the cast to the output dtype, which round by half a one. These are 4 steps of at most an ulp each, hence 4. What comes
before them, such as a sum over many numbers, the unfused code rounds as well, and its error shows it.
"""


def compare(unfused: Tensor, fused: Tensor, exact: Tensor) -> str | None:
    """Return in what ``fused`` is worse than ``unfused``, or None.

    Its largest error against ``exact``, the same in float64, may be twice that of ``unfused`` and `ULPS` of the largest
    number. Where ``unfused`` is infinite or NaN, ``fused`` is the same; what isn't of a float dtype is equal.
    """
    looks = [(tuple(x.shape), x.dtype, x.device) for x in (unfused, fused)]
    if looks[0] != looks[1]:
        return f"expected {looks[0]}, found {looks[1]}"
    if not unfused.dtype.is_floating_point:
        return None if torch.equal(unfused, fused) else f"expected {unfused}, found {fused}"
    finite = unfused.isfinite()
    special = torch.allclose(unfused[~finite], fused[~finite], rtol=0, atol=0, equal_nan=True)
    if not special or not bool(fused[finite].isfinite().all()):
        return "nan or inf at other places"
    return _exceeds(unfused[finite], fused[finite], exact[finite])


def _exceeds(unfused: Tensor, fused: Tensor, exact: Tensor) -> str | None:
    if not unfused.numel():
        return None
    if not bool(exact.isfinite().all()):
        return "finite results where those in float64 aren't"
    allowed = 2 * (unfused - exact).abs().max() + ULPS * _ulp(unfused.dtype, exact.abs().max())
    error = (fused - exact).abs().max()
    return None if bool(error <= allowed) else f"error {error:.3g} against float64, allowed {allowed:.3g}"


def _ulp(dtype: torch.dtype, number: Tensor) -> Tensor:
    """Return the distance of the numbers of ``dtype`` around a positive ``number``, at most twice too large."""
    limits = torch.finfo(dtype)
    return limits.eps * number.clamp(min=limits.tiny)
