"""Parameters: norms from exact sums of squares."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from otel_train.stats.sums import is_small, square_sums, squares_of


def weight_square_sums(weights: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return the sums of squares of n weights of one shape, (n,) fp64: their L2 norms squared, which add up over layers."""
    return square_sums(weights)


def square_sums_of_copies(copies: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return the same of copies that were made of them all (``updates.read_whole``), which saves a look at the weights."""
    return torch.cat([squares_of(copy) if is_small(copy[0]) else square_sums([copy[0]]) for copy in copies])
