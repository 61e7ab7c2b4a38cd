"""Sums over tensors that are accurate at any size: small tensors in fp64, large ones in short fp32 runs added up in fp64.

Measured on 3 M random fp32 elements (2 cores): one fp32 ``vector_norm`` is off by 6e-5, ``dot`` by 8e-6, norms of runs added in
fp64 by 3e-9. Equal elements are the worst case, since their rounding errors do not cancel: the sum of squares is off by 7e-6 with
runs of 4,096, by 5e-7 with runs of 256.

What it costs, 262,144 fp32 elements in the cache, one core: runs of 256 19 us, of 64 25 us, ``vector_norm(dtype=float64)`` 68 us,
``sum(dtype=float64)`` 61 us against 11 us in fp32, stacking them out of 64 tensors 31 us; ``double().square().sum()``, whose
results are two new tensors of 2 MiB, 1,600 us.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from otel_train.sampling import WHOLE, Plan, wide_dtype, work_dtype

RUN = 256
"""Elements whose squares are summed in the tensor's working type before fp64 takes over, at most."""
_SHORTEST_RUN = 32
STACK = WHOLE
"""Tensors of up to so many elements are stacked by shape: below it the calls cost more than the copy."""
_CHUNK = 8 * STACK
"""Elements that are stacked at a time: 1 MiB, which the passes after it find in the cache."""
PIECE = 3072 * RUN
"""On the CPU, elements a pass: the second pass over 3 MiB still finds them in the cache."""


def flat(tensor: torch.Tensor) -> torch.Tensor:
    """Return all elements in one dimension, in storage order where that needs no copy; complex ones as pairs of reals."""
    if tensor.is_sparse:
        tensor = tensor.to_dense()
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor.resolve_conj())
    if tensor.is_contiguous():
        return tensor.view(-1)
    # channels_last and the like: dense storage in another order. Order does not matter to sums and samples.
    if torch.ops.aten.is_non_overlapping_and_dense.default(tensor):
        return tensor.as_strided((tensor.numel(),), (1,))
    return tensor.reshape(-1)


def is_small(tensor: torch.Tensor) -> bool:
    """Say whether tensors of this shape are stacked."""
    return tensor.numel() * (1 + tensor.is_complex()) <= STACK


def stacked(tensors: Sequence[torch.Tensor]) -> Iterator[torch.Tensor]:
    """Yield the elements of tensors of one shape as (m, k) matrices of a few tensors each, in their order."""
    several = max(1, _CHUNK // max(tensors[0].numel(), 1))
    plain = [flat(t) if t.is_sparse or t.is_complex() else t for t in tensors]  # a view of each would cost as much as the copy
    for first in range(0, len(tensors), several):
        chunk = torch.stack(plain[first : first + several])
        yield chunk.reshape(len(chunk), plain[first].numel())


def rows_of(tensor: torch.Tensor, plan: Plan) -> torch.Tensor:
    """Return a tensor as (rows, columns), in logical order: rows of weight and gradient are alike however they are stored."""
    dense = tensor.to_dense() if tensor.is_sparse else tensor
    dense = torch.view_as_real(dense.resolve_conj()) if dense.is_complex() else dense
    return dense.reshape(plan.rows, plan.columns)


def run_length(columns: int) -> int:
    """Return how many elements of a row of so many make a run: rows are whole numbers of runs, unless runs were too short."""
    return next((run for run in range(min(RUN, columns), _SHORTEST_RUN - 1, -1) if columns % run == 0), RUN)


def run_norms(elements: torch.Tensor, run: int, out: torch.Tensor | None = None) -> torch.Tensor:
    """Return the L2 norm of each run of a flat tensor, (n // run,) in the working type; what does not fill a run is left out.

    NB: squares are fp32: elements under 1e-23 count as 0, and a norm over 1e19 shows as Inf.
    """
    runs = elements.numel() // run
    whole = elements[: runs * run].view(runs, run)
    norms: torch.Tensor = torch.linalg.vector_norm(whole, dim=1, dtype=work_dtype(elements), out=out)
    return norms


def squares_of(norms: torch.Tensor) -> torch.Tensor:
    """Return the sum of squares of each row, (n,) fp64, without a temporary of that type."""
    root: torch.Tensor = torch.linalg.vector_norm(norms, dim=1, dtype=wide_dtype(norms.device))
    return root.square()


class LargeSums:
    """Sums over n large tensors of one shape.

    Args:
        tensors: Of equal shape, type and device.
        run: Elements a run.
        plain: Whether the sum of the elements is wanted too.
    """

    def __init__(self, tensors: Sequence[torch.Tensor], run: int, *, plain: bool) -> None:
        first = tensors[0]
        elements = first.numel() * (1 + first.is_complex())
        self.norms = torch.empty(len(tensors), elements // run, dtype=work_dtype(first), device=first.device)
        """(n, runs): the L2 norm of each run, in storage order."""
        piece = PIECE // run * run if first.device.type == "cpu" else elements
        rest = elements % run
        totals: list[torch.Tensor] = []
        tails: list[torch.Tensor] = []
        for tensor, norms in zip(tensors, self.norms, strict=True):
            values = flat(tensor)
            for start in range(0, elements, piece):
                part = values[start : start + piece]
                run_norms(part, run, norms[start // run : (start + part.numel()) // run])
                if plain:
                    # torch sums fp32 in a cascade: its error does not grow with the length
                    totals.append(part.sum(dtype=self.norms.dtype))
            if rest:
                tails.append(values[-rest:])
        self._squares = squares_of(self.norms)
        if tails:
            self._squares = self._squares + squares_of(torch.stack(tails))
        self._totals = torch.stack(totals).view(len(tensors), -1) if totals else None

    def squares(self) -> torch.Tensor:
        """Return the sums of squares, (n,) fp64."""
        return self._squares

    def pairs(self) -> torch.Tensor:
        """Return the sums and the sums of squares, (n, 2) fp64; made with ``plain``."""
        if self._totals is None:
            raise ValueError("expected sums that were made with plain=True")
        return torch.stack([self._totals.sum(1, dtype=self._squares.dtype), self._squares], dim=1)


def small_pairs(matrix: torch.Tensor) -> torch.Tensor:
    """Return the sum and the sum of squares of each row, (n, 2) fp64, in fp64 throughout.

    Args:
        matrix: (n, k) any floating type.
    """
    return torch.stack([matrix.sum(1, dtype=wide_dtype(matrix.device)), squares_of(matrix)], dim=1)


def sum_and_square_sum(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return the sum and the sum of squares of n tensors of equal shape, type and device, (n, 2) fp64."""
    if is_small(tensors[0]):
        return torch.cat([small_pairs(matrix) for matrix in stacked(tensors)])
    return LargeSums(tensors, RUN, plain=True).pairs()


def wide_sums(tensor: torch.Tensor) -> torch.Tensor:
    """Return sum and sum of squares in fp64 throughout, (2,): for the rare tensor whose squares fp32 cannot hold."""
    elements = flat(tensor).to(wide_dtype(tensor.device))
    return torch.stack([elements.sum(), elements.square().sum()])


def square_sums(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return the sums of squares of n tensors of one shape, (n,) fp64."""
    if is_small(tensors[0]):
        return torch.cat([squares_of(matrix) for matrix in stacked(tensors)])
    return LargeSums(tensors, RUN, plain=False).squares()


def count_nonfinite(tensor: torch.Tensor) -> torch.Tensor:
    """Return how many elements are NaN or Inf, () int64."""
    return flat(tensor).isfinite().logical_not_().sum()
