"""What this machine's processor can do at most, so that the demo has an MFU to show: nobody lists the peaks of CPUs."""

from __future__ import annotations

import time

import torch

_SIZE, _SECONDS = 256, 0.3


def measured_peak_flops() -> float:
    """Return the FLOP/s of a matrix product that fits the caches, the best of those that a third of a second has room for."""
    left, right = torch.rand(_SIZE, _SIZE), torch.rand(_SIZE, _SIZE)
    until, best = time.perf_counter() + _SECONDS, float("inf")
    while time.perf_counter() < until:
        began = time.perf_counter()
        torch.mm(left, right)
        best = min(best, time.perf_counter() - began)
    return 2 * _SIZE**3 / best
