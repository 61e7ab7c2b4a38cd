"""Gradients: norm, mean and std from exact sums; magnitudes from samples."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from otel_train.records import MAGNITUDE_EXPONENTS
from otel_train.sampling import Draw, Plan, wide_dtype
from otel_train.stats.sums import flat

# A positive fp32 with exponent field f is in [2^(f-127), 2^(f-126)). Bins want (lower, upper]: with 1 taken off the bits, exact
# powers of two (0.84 % of bf16 values) fall to the bin that they bound.
_FIRST_FIELD = MAGNITUDE_EXPONENTS[0] + 126
BINS = len(MAGNITUDE_EXPONENTS) + 1
"""One a bound, and one for what is larger than all of them."""


def norm_mean_std(elements: int, total: float, squared: float) -> tuple[float, float, float]:
    """Return L2 norm, mean and population standard deviation on the host, from exact sums.

    NB: for tensors above ``sums.STACK`` elements the sum of squares is right to 1e-6 at worst, so a standard deviation below a
    thousandth of the mean is lost in rounding; gradients are the other way round.
    """
    if elements == 0:
        return 0.0, math.nan, math.nan
    mean = total / elements
    variance = squared / elements - mean * mean
    # max() would turn NaN into 0
    return math.sqrt(squared) if squared >= 0 else math.nan, mean, math.sqrt(0.0 if variance < 0 else variance)


def magnitude_samples(gradients: Sequence[torch.Tensor], plan: Plan, draw: Draw | None) -> torch.Tensor:
    """Return the elements that the histogram counts, (n, k) fp32, of n gradients of one shape."""
    if draw is None:
        return torch.stack([flat(g) for g in gradients]).float()
    elements = [flat(g) if plan.width == 1 else flat(g).view(-1, plan.width) for g in gradients]
    return torch.stack([e.index_select(0, draw.magnitude_lines) for e in elements]).float().view(len(gradients), -1)


def magnitudes(samples: torch.Tensor) -> torch.Tensor:
    """Count elements by the power of two of their absolute value, and sum the finite ones.

    Args:
        samples: (n, k) fp32.

    Returns:
        (n, BINS + 1) fp64: counts, then the sum of absolute values. NaN is in no bin; Inf in the last.
    """
    wide = wide_dtype(samples.device)
    field = samples.contiguous().view(torch.int32).bitwise_and(0x7FFFFFFF).sub_(1).bitwise_right_shift_(23)
    # zero has bits 0, so field -1; NaN stays above 254, the field of Inf and of the largest numbers
    key = field.sub(_FIRST_FIELD).clamp_(0, BINS - 1).add_(field.gt(254).int() * BINS).clamp_(max=BINS)
    counts = torch.zeros(len(samples), BINS + 1, dtype=wide, device=samples.device)
    counts.scatter_add_(1, key.long(), torch.ones((), dtype=wide, device=samples.device).expand(samples.shape))
    finite = torch.nan_to_num(samples.abs(), nan=0.0, posinf=0.0)
    counts[:, BINS] = finite.sum(1, dtype=wide)
    return counts
