"""The only copy from device to host: small tensors packed to one a device, asynchronous on an accelerator.

Reading a value that is not there would make the training thread wait for the device. So values are asked for here (`read_out`) and
taken later, by the monitor's own thread (`Reading.values`), which may wait.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from otel_train.sampling import wide_dtype


class Reading:
    """Numbers on their way to the host."""

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        self._sizes = [tensor.numel() for tensor in tensors]
        by_device: dict[torch.device, list[int]] = {}
        for i, tensor in enumerate(tensors):
            by_device.setdefault(tensor.device, []).append(i)
        self._parts = [(indices, *_pack([tensors[i] for i in indices])) for indices in by_device.values()]

    def values(self) -> list[list[float]]:
        """Return the numbers of each tensor, flattened; waits until they are there."""
        found: list[list[float]] = [[] for _ in self._sizes]
        for indices, packed, event in self._parts:
            if event is not None:
                event.synchronize()
            numbers, at = packed.tolist(), 0
            for i in indices:
                found[i] = numbers[at : at + self._sizes[i]]
                at += self._sizes[i]
        return found


def _pack(tensors: Sequence[torch.Tensor]) -> tuple[torch.Tensor, torch.Event | None]:
    """Copy tensors of one device into one host tensor; the event says when it is filled, None: it is."""
    device = tensors[0].device
    packed = torch.cat([tensor.detach().reshape(-1).to(wide_dtype(device)) for tensor in tensors])
    if device.type == "cpu":
        return packed, None
    host = torch.empty(packed.shape, dtype=packed.dtype, pin_memory=True, device="cpu")
    host.copy_(packed, non_blocking=True)
    # CUDA's default wait spins, which would cost the training a core
    event = torch.get_device_module(device).Event(**({"blocking": True} if device.type == "cuda" else {}))
    event.record()
    return host, event


def read_out(tensors: Sequence[torch.Tensor]) -> Reading:
    """Ask for the values of tensors; does not synchronise.

    Args:
        tensors: Any shapes, floating, integer or bool types, on any devices.
    """
    return Reading(tensors)


def peek(tensor: torch.Tensor) -> list[float] | None:
    """Return a tensor's numbers if the host has them already, else None; never waits."""
    return [float(v) for v in tensor.detach().reshape(-1).tolist()] if tensor.device.type == "cpu" else None
