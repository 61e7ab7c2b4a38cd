"""Gradients: norm, mean and std from exact sums; magnitudes from samples."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from otel_train.records import MAGNITUDE_EXPONENTS
from otel_train.sampling import Draw, Plan, wide_dtype, work_dtype
from otel_train.stats.sums import LargeSums, flat, is_small, rows_of, run_length, small_pairs, stacked

# A positive fp32 with exponent field f is in [2^(f-127), 2^(f-126)). Bins want (lower, upper]: with 1 taken off the bits, exact
# powers of two (0.84 % of bf16 values) fall to the bin that they bound, and zeros to a field of -1.
_FIRST_FIELD = MAGNITUDE_EXPONENTS[0] + 126
_NAN_FIELD = 255
BINS = len(MAGNITUDE_EXPONENTS) + 1
"""One a bound, and one for what is larger than all of them."""
_LAST_FIELD = _FIRST_FIELD + BINS - 1


@dataclass(frozen=True, slots=True)
class GradientSums:
    """What is read of n gradients of one shape, on the device."""

    pairs: torch.Tensor
    """(n, 2) fp64: sum and sum of squares."""
    samples: torch.Tensor | None
    """(n, k) fp32: the elements that the histogram counts, if it is asked for."""
    row_norms: torch.Tensor | None
    """(n, rows): where rows are read exactly, by which they are chosen."""


def read_gradients(gradients: Sequence[torch.Tensor], plan: Plan, draw: Draw, *, histogram: bool) -> GradientSums:
    """Read n gradients of one shape in one pass over each.

    Args:
        gradients: Of equal shape, type and device.
        plan: What is read of them.
        draw: What that is at this sample.
        histogram: Whether elements for the magnitude histogram are read.
    """
    if not is_small(gradients[0]):
        large = LargeSums(gradients, run_length(plan.columns), plain=True)
        samples = magnitude_samples(gradients, plan, draw) if histogram else None
        return GradientSums(large.pairs(), samples, _row_norms(large.norms, gradients, plan) if plan.top else None)
    pairs, picked = [], []
    for matrix in stacked(gradients):
        pairs.append(small_pairs(matrix))
        if histogram:
            picked.append(_pick(matrix, draw))
    return GradientSums(torch.cat(pairs), torch.cat(picked) if picked else None, None)


def _row_norms(norms: torch.Tensor, gradients: Sequence[torch.Tensor], plan: Plan) -> torch.Tensor:
    """Return the norms of rows, out of those of their runs where runs do not cross rows: then they are there for nothing."""
    if plan.columns % run_length(plan.columns) == 0 and all(g.is_contiguous() and not g.is_sparse for g in gradients):
        found: torch.Tensor = torch.linalg.vector_norm(norms.view(len(gradients), plan.rows, -1), dim=2)
        return found
    return row_norms(gradients, plan)


def row_norms(gradients: Sequence[torch.Tensor], plan: Plan) -> torch.Tensor:
    """Return the L2 norm of each row of n gradients, (n, rows) in their working type."""
    return torch.stack([torch.linalg.vector_norm(rows_of(g, plan), dim=1, dtype=work_dtype(g)) for g in gradients])


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


def magnitude_samples(gradients: Sequence[torch.Tensor], plan: Plan, draw: Draw) -> torch.Tensor:
    """Return the elements that the histogram counts, (n, k) fp32, of n gradients of one shape."""
    if draw.magnitude_lines is None or is_small(gradients[0]):
        return torch.cat([_pick(matrix, draw) for matrix in stacked(gradients)])
    elements = [flat(g) if plan.width == 1 else flat(g).view(-1, plan.width) for g in gradients]
    return torch.stack([e.index_select(0, draw.magnitude_lines) for e in elements]).float().view(len(gradients), -1)


def _pick(matrix: torch.Tensor, draw: Draw) -> torch.Tensor:
    return (matrix if draw.magnitude_lines is None else matrix.index_select(1, draw.magnitude_lines)).float()


def magnitudes(samples: torch.Tensor) -> torch.Tensor:
    """Count elements by the power of two of their absolute value, and sum the finite ones.

    Args:
        samples: (n, k) fp32.

    Returns:
        (n, BINS + 1) fp64: counts, then the sum of absolute values. NaN is in no bin; Inf in the last.
    """
    wide = wide_dtype(samples.device)
    fields = torch.zeros(len(samples), _NAN_FIELD + 1, dtype=wide, device=samples.device)
    fields.scatter_add_(1, _field(samples), torch.ones((), dtype=wide, device=samples.device).expand(samples.shape))
    first = fields[:, : _FIRST_FIELD + 1].sum(1, keepdim=True)
    larger = fields[:, _LAST_FIELD:_NAN_FIELD].sum(1, keepdim=True)
    finite = torch.linalg.vector_norm(samples.nan_to_num(nan=0.0, posinf=0.0, neginf=0.0), 1, dim=1, keepdim=True, dtype=wide)
    return torch.cat([first, fields[:, _FIRST_FIELD + 1 : _LAST_FIELD], larger, finite], dim=1)


def signs(samples: torch.Tensor) -> torch.Tensor:
    """Count negative elements by the power of two of their absolute value, exact powers apart, and sum the finite ones.

    Args:
        samples: (n, k) fp32.

    Returns:
        (n, 2 * BINS - 1) fp64: negative elements by magnitude, all bins but the first; those that are the upper bound of a bin, all
        bins but the last; the sum of all elements. NaN is nowhere; -Inf in the last bin.
    """
    wide = wide_dtype(samples.device)
    is_power = samples.contiguous().view(torch.int32).bitwise_and(0x7FFFFF).eq(0)
    fields = torch.zeros(len(samples), 2 * (_NAN_FIELD + 1), dtype=wide, device=samples.device)
    fields.scatter_add_(1, _field(samples) + is_power * (_NAN_FIELD + 1), samples.lt(0).to(wide))
    others, powers = fields.chunk(2, dim=1)
    negatives = others + powers
    larger = negatives[:, _LAST_FIELD:].sum(1, keepdim=True)
    finite = samples.nan_to_num(nan=0.0, posinf=0.0, neginf=0.0).sum(1, keepdim=True, dtype=wide)
    return torch.cat([negatives[:, _FIRST_FIELD + 1 : _LAST_FIELD], larger, powers[:, _FIRST_FIELD:_LAST_FIELD], finite], dim=1)


def _field(samples: torch.Tensor) -> torch.Tensor:
    """Return each element's exponent field with exact powers of two in the bin that they bound, (n, k) int64."""
    return samples.contiguous().view(torch.int32).bitwise_and(0x7FFFFFFF).sub_(1).bitwise_right_shift_(23).clamp_(min=0).long()
