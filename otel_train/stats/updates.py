"""Updates: sums of squares of the real change of the weights, on every element or on samples (see otel_train.sampling)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from otel_train.sampling import Draw, Plan, wide_dtype, work_dtype
from otel_train.stats.sums import STACK, flat, square_sum


@dataclass(frozen=True, slots=True)
class UpdateEstimate:
    """Host values of one tensor's update."""

    update_squared: float
    changed: float
    relative_error: float
    """Standard error of the root of update_squared, relative to it."""


def read_whole(weights: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Copy weights of one shape in their working type: small ones to one (n, k) tensor, large ones one by one as (1, k)."""
    if weights[0].numel() <= STACK:
        return [torch.stack([flat(w) for w in weights]).to(work_dtype(weights[0]))]
    return [flat(w).to(work_dtype(w), copy=True).unsqueeze(0) for w in weights]


def whole_sums(before: Sequence[torch.Tensor], weights: Sequence[torch.Tensor]) -> torch.Tensor:
    """Compare copies taken before the step with the weights after it.

    Args:
        before: What ``read_whole`` returned; overwritten.
        weights: The n tensors, after the step.

    Returns:
        (n, 2) fp64: sum of squared changes, elements changed.
    """
    rows = len(weights) // len(before)
    sums = []
    for i, copy in enumerate(before):
        after = torch.stack([flat(w) for w in weights[i * rows : (i + 1) * rows]]).to(copy.dtype)
        # before they are subtracted: an Inf that stays has not changed, but Inf - Inf is NaN
        changed = torch.count_nonzero(copy.ne(after), 1).to(wide_dtype(copy.device))
        sums.append(torch.stack([_row_squares(copy.sub_(after)), changed], dim=1))
    return torch.cat(sums)


def _row_squares(rows: torch.Tensor) -> torch.Tensor:
    if rows.shape[1] <= STACK:
        return rows.to(wide_dtype(rows.device)).square().sum(1)
    return torch.stack([square_sum(row) for row in rows])


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

    def choose_rows(self, gradients: Sequence[torch.Tensor], draw: Draw) -> None:
        """Choose the rows to read exactly, by the norm of this step's gradient."""
        if draw.line_rows is None:
            return
        work = work_dtype(gradients[0])
        norms = torch.stack([torch.linalg.vector_norm(_rows(g, self._plan), dim=1, dtype=work) for g in gradients])
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
            rows = _rows(weight, self._plan)
            _take(rows.reshape(-1, self._plan.width), draw.lines, self._lines[after][i])
            _take(rows, self._top[i], self._rows[after][i])

    def sums(self) -> torch.Tensor:
        """Return the sums that ``estimate_sampled`` takes, (n, 5) fp64; the copies are overwritten."""
        before, after = self._lines
        wide = wide_dtype(before.device)
        moved, squared = after.ne(before), after.sub_(before).square()
        changed = torch.count_nonzero(moved, 2) if self._plan.width > 1 else moved.squeeze(2)
        squared = squared.sum(2) if self._plan.width > 1 else squared.squeeze(2)
        if self._outside is not None:
            squared, changed = squared.mul_(self._outside), self._outside.mul(changed)
        parts = [squared.sum(1, dtype=wide), squared.to(wide).square().sum(1), changed.sum(1, dtype=wide)]
        rows_before, rows_after = self._rows
        rows_changed = torch.count_nonzero(rows_after.ne(rows_before), (1, 2)).to(wide)
        rows_squared = rows_after.sub_(rows_before).square().sum((1, 2), dtype=wide)
        return torch.stack([*parts, rows_squared, rows_changed], dim=1)


def _rows(tensor: torch.Tensor, plan: Plan) -> torch.Tensor:
    # rows must be rows of weight and gradient alike, whatever their storage order
    dense = tensor.to_dense() if tensor.is_sparse else tensor
    dense = torch.view_as_real(dense.resolve_conj()) if dense.is_complex() else dense
    return dense.reshape(plan.rows, plan.columns)


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
