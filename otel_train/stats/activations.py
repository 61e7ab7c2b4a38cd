"""Activations: sums over sampled rows (tokens, positions), which add up over calls, micro-batches and modules.

32 rows a call cost 0.24 % of a step where all rows cost 3.2 % (20 M GPT, 8 GELUs, 2 cores).
"""

from __future__ import annotations

import torch

from otel_train.sampling import wide_dtype, work_dtype

ROWS = 32
"""Rows sampled of a call, at most; fewer rows are read whole."""
SUMS = 6
"""count, sum, sum of squares, zeros, saturated, non-finite"""


def sample_rows(activation: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
    """Pick rows of an activation: one from each of equal strata, whole vectors over the units.

    Args:
        activation: (..., units), or (batch, units, ...) for images and volumes (4 or 5 dimensions).
        offsets: (ROWS,) uniform in [0, 1), where in its stratum a row is.

    Returns:
        (rows, units) in the activation's type.
    """
    if activation.dim() in (4, 5):
        return _sample_positions(activation.flatten(2), offsets)
    rows = activation.flatten(0, -2) if activation.dim() > 1 else activation.reshape(1, -1)
    if rows.shape[0] <= ROWS:
        return rows
    return rows.index_select(0, _strata(rows.shape[0], ROWS, offsets))


def _sample_positions(images: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
    """Pick (image, position) pairs of (batch, units, positions): images in strata, and a few positions of each."""
    batch, _, positions = images.shape
    picked = min(batch, ROWS)
    if batch > ROWS:
        images = images.index_select(0, _strata(batch, picked, offsets))
    each = min(positions, max(1, ROWS // max(picked, 1)))
    if positions > each:
        images = images.index_select(2, _strata(positions, each, offsets.flip(0)))
    return images.transpose(1, 2).flatten(0, 1)


def _strata(size: int, picked: int, offsets: torch.Tensor) -> torch.Tensor:
    strata = torch.arange(picked, device=offsets.device, dtype=offsets.dtype)
    return ((offsets[:picked] + strata) * (size / picked)).long().clamp_(max=size - 1)


def row_sums(rows: torch.Tensor, flat_outside: tuple[float, float] | None) -> tuple[torch.Tensor, torch.Tensor]:
    """Sum over sampled rows.

    Args:
        rows: (rows, units), any floating type.
        flat_outside: (low, high) outside which the activation is flat, ends included.

    Returns:
        (SUMS,) fp64, and the largest absolute value, () in the working type.
    """
    wide = wide_dtype(rows.device)
    values = rows.to(wide)
    # x - x is 0 for finite x and NaN for others, which count as non-zero: 4 times faster than isfinite and a sum of booleans
    nonfinite = torch.count_nonzero(values - values).to(wide)
    if flat_outside is None:
        saturated = torch.zeros((), dtype=wide, device=rows.device)
    else:
        low, high = flat_outside
        saturated = values.ge(high).logical_or(values.le(low)).sum(dtype=wide)
    count = torch.full((), float(rows.numel()), dtype=wide, device=rows.device)
    zeros = count - torch.count_nonzero(values)
    sums = torch.stack([count, values.sum(), values.square().sum(), zeros, saturated, nonfinite])
    peak = values.abs().amax() if rows.numel() else torch.zeros((), dtype=wide, device=rows.device)
    return sums, peak.to(work_dtype(rows))


def positive_units(rows: torch.Tensor) -> torch.Tensor:
    """Say which units are positive in some row, (units,) bool."""
    return rows.gt(0).any(0)
