"""What the host knows of the device: its name and its memory. Nothing here waits for it."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from typing import Any

import torch

from otel_train.catalog import throughput


def device_name(device: torch.device) -> tuple[str, str]:
    """Return a device's name and, where it has one, its UUID."""
    if device.type in ("cpu", "meta"):
        return device.type, ""
    with contextlib.suppress(Exception):
        properties = torch.get_device_module(device).get_device_properties(device)
        return str(properties.name), str(getattr(properties, "uuid", ""))
    return device.type, ""


def device_memory(device: torch.device) -> dict[str, float]:
    """Return the accelerator's memory by metric name; asks the host's allocator, not the device."""
    if device.type in ("cpu", "meta"):
        return {}
    stats = getattr(torch.get_device_module(device), "memory_stats", None)
    return memory_values(stats(device)) if stats is not None else {}


def memory_values(stats: Mapping[str, Any]) -> dict[str, float]:
    """Pick what is exported out of ``torch.cuda.memory_stats``."""
    keys = {
        throughput.MEMORY_ALLOCATED.name: "allocated_bytes.all.current",
        throughput.MEMORY_RESERVED.name: "reserved_bytes.all.current",
        throughput.MEMORY_PEAK.name: "allocated_bytes.all.peak",
        throughput.ALLOCATOR_RETRIES.name: "num_alloc_retries",
    }
    return {name: float(stats[key]) for name, key in keys.items() if key in stats}
