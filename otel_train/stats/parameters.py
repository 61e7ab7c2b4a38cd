"""Parameters: norms from exact sums of squares."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from otel_train.stats.sums import square_sums


def weight_square_sums(weights: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return the sums of squares of n weights of one shape, (n,) fp64: their L2 norms squared, which add up over layers."""
    return square_sums(weights)
