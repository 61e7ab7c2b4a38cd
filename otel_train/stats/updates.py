"""Updates: sums of squares of the real change of the weights, on every element or on samples (see otel_train.sampling)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from otel_train.sampling import Draw, Plan, wide_dtype, work_dtype
from otel_train.stats.sums import PIECE, RUN, flat, is_small, rows_of, run_norms, squares_of, stacked

_DEVICE_PIECE = 4 * PIECE
"""On an accelerator, elements a pass: fewer calls, and still little memory."""


@dataclass(frozen=True, slots=True)
class UpdateEstimate:
    """Host values of one tensor's update."""

    update_squared: float
    changed: float
    relative_error: float
    """Standard error of the root of update_squared, relative to it."""


def read_whole(weights: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Copy weights of one shape in their working type: small ones as (m, k) matrices of a few, large ones one by one as (1, k)."""
    if is_small(weights[0]):
        return [matrix.to(work_dtype(weights[0])) for matrix in stacked(weights)]
    return [flat(w).to(work_dtype(w), copy=True).unsqueeze(0) for w in weights]


def whole_sums(before: Sequence[torch.Tensor], weights: Sequence[torch.Tensor]) -> torch.Tensor:
    """Compare copies taken before the step with the weights after it.

    Args:
        before: What ``read_whole`` returned; overwritten.
        weights: The n tensors, after the step.

    Returns:
        (n, 2) fp64: sum of squared changes, elements changed.
    """
    if is_small(weights[0]):
        return torch.cat([_small_changes(copy, after.to(copy.dtype)) for copy, after in zip(before, stacked(weights), strict=True)])
    return torch.stack([_large_changes(copy[0], flat(w)) for copy, w in zip(before, weights, strict=True)])


def _small_changes(before: torch.Tensor, after: torch.Tensor) -> torch.Tensor:
    # before they are subtracted: an Inf that stays has not changed, but Inf - Inf is NaN
    changed = differs(before, after).sum(1, dtype=wide_dtype(before.device))
    return torch.stack([squares_of(before.sub_(after)), changed], dim=1)


def _large_changes(before: torch.Tensor, after: torch.Tensor) -> torch.Tensor:
    size = PIECE if before.device.type == "cpu" else _DEVICE_PIECE
    pieces = zip(torch.split(before, size), torch.split(after, size), strict=True)
    return torch.stack([_piece_changes(copy, now.to(copy.dtype)) for copy, now in pieces]).sum(0)


def _piece_changes(before: torch.Tensor, after: torch.Tensor) -> torch.Tensor:
    changed = differs(before, after).sum(dtype=wide_dtype(before.device))
    change = before.sub_(after)
    runs = change.numel() // RUN * RUN
    squares = squares_of(run_norms(change, RUN).unsqueeze(0)) + squares_of(change[runs:].unsqueeze(0))
    return torch.stack([squares.squeeze(0), changed])


def differs(before: torch.Tensor, after: torch.Tensor) -> torch.Tensor:
    """Return 1 where two tensors differ and 0 elsewhere, in their own type: to add up booleans takes 4 times as long."""
    return torch.ne(before, after, out=torch.empty_like(before))


def estimate_whole(plan: Plan, sums: Sequence[float]) -> UpdateEstimate:
    """Turn the host values of one row of ``whole_sums`` into an estimate without error."""
    del plan
    return UpdateEstimate(sums[0], sums[1], 0.0)


class SampledReader:
    """Reads the drawn lines, and the rows with the largest gradient norm, of n tensors of one plan before and after a step.

    Buffers are kept from sample to sample: fresh ones would cost page faults.
    """

    def __init__(self, weights: Sequence[torch.Tensor], plan: Plan) -> None:
        self._plan = plan
        count, like = len(weights), torch.empty(0, dtype=work_dtype(weights[0]), device=weights[0].device)
        self._lines = [like.new_empty(count, plan.lines, plan.width) for _ in range(2)]  # before and after
        self._rows = [like.new_empty(count, plan.top, plan.columns) for _ in range(2)]
        self._top: torch.Tensor | None = None  # (n, top) int64
        self._outside: torch.Tensor | None = None  # (n, lines): 1 where a line is in no row that is read exactly

    def choose_rows(self, norms: torch.Tensor | None, draw: Draw) -> None:
        """Choose the rows to read exactly.

        Args:
            norms: (n, rows) norms of the rows of this step's gradient; overwritten. None where no rows are read exactly.
            draw: This sample's lines.
        """
        if draw.line_rows is None or norms is None:
            return
        norms.nan_to_num_(nan=math.inf)
        self._top = norms.topk(self._plan.top, dim=1, sorted=False).indices
        mask = torch.ones(norms.shape, dtype=self._lines[0].dtype, device=norms.device).scatter_(1, self._top, 0.0)
        self._outside = mask.index_select(1, draw.line_rows)

    def read(self, weights: Sequence[torch.Tensor], draw: Draw, *, after: bool) -> None:
        """Copy the chosen elements of the weights."""
        for i, weight in enumerate(weights):
            if self._top is None:
                _take(flat(weight).view(-1, self._plan.width), draw.lines, self._lines[after][i])
                continue
            rows = rows_of(weight, self._plan)
            _take(rows.reshape(-1, self._plan.width), draw.lines, self._lines[after][i])
            _take(rows, self._top[i], self._rows[after][i])

    def sums(self) -> torch.Tensor:
        """Return the sums that ``estimate_sampled`` takes, (n, 5) fp64; the copies are overwritten."""
        before, after = self._lines
        wide = wide_dtype(before.device)
        changed = differs(before, after)
        changes = after.sub_(before)
        if self._plan.width > 1:
            changed, squares = changed.sum(2), torch.linalg.vector_norm(changes, dim=2).square_()
        else:
            changed, squares = changed.squeeze(2), changes.square_().squeeze(2)
        if self._outside is not None:
            changed, squares = changed.mul_(self._outside), squares.mul_(self._outside)
        rows_before, rows_after = self._rows
        rows_changed = differs(rows_before, rows_after).sum((1, 2), dtype=wide)
        row_norms = torch.linalg.vector_norm(rows_after.sub_(rows_before), dim=2)
        return torch.stack(
            [squares.sum(1, dtype=wide), squares_of(squares), changed.sum(1, dtype=wide), squares_of(row_norms), rows_changed],
            dim=1,
        )


def _take(source: torch.Tensor, index: torch.Tensor, out: torch.Tensor) -> None:
    if source.shape[1:] == (1,):  # five times faster in one dimension
        source, out = source.squeeze(1), out.squeeze(1)
    if source.dtype is out.dtype:
        torch.index_select(source, 0, index, out=out)
    else:
        out.copy_(source.index_select(0, index))


def estimate_sampled(plan: Plan, sums: Sequence[float]) -> UpdateEstimate:
    """Turn the host values of one row of ``SampledReader.sums`` into estimates, by the formulas of otel_train.sampling."""
    squared, fourth, changed, row_squared, row_changed = sums
    factor = plan.elements / (plan.lines * plan.width)
    update = row_squared + factor * squared
    variance = factor * factor * max(fourth - squared * squared / plan.lines, 0.0)
    error = 0.5 * math.sqrt(variance) / update if update > 0 else 0.0
    return UpdateEstimate(update, row_changed + factor * changed, error)
