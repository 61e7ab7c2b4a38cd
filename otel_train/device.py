"""What the host knows of the device: its name, its memory, what the monitor takes of its time. Nothing here waits for it."""

from __future__ import annotations

import contextlib
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
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


Marks = Sequence[tuple[str, Any, Any]]
"""Parts, and the events at which the device began and ended each."""
_MOST_MARKS = 4096
"""Marks a step at most: hundreds of micro-batches each meet every activation module."""


class DeviceClock:
    """Marks on the device where parts of the monitor begin and end: the host has long gone on when their kernels run.

    For the training's thread, which waits for none of the events; ``device_seconds`` looks at them once they have passed.

    Args:
        make_event: Returns an event that can be timed.
    """

    def __init__(self, make_event: Callable[[], Any]) -> None:
        self._make_event = make_event
        self._marks: list[tuple[str, Any, Any]] = []

    def begin(self) -> object:
        """Mark the beginning of a part; None where no more can be marked."""
        return self._mark() if len(self._marks) < _MOST_MARKS else None

    def end(self, part: str, began: object) -> None:
        """Mark the end of a part."""
        ended = self._mark() if began is not None else None
        if ended is not None:
            self._marks.append((part, began, ended))

    def _mark(self) -> Any:
        with contextlib.suppress(RuntimeError):  # a backend without events that can be timed
            event = self._make_event()
            event.record()
            return event
        return None

    def take(self) -> Marks:
        """Return the marks since the last call."""
        marks, self._marks = self._marks, []
        return marks


def device_clock(device: torch.device) -> DeviceClock | None:
    """Return a clock of an accelerator; None for the CPU, where the host's clock sees everything."""
    return None if device.type in ("cpu", "meta") else DeviceClock(lambda: torch.Event(device, enable_timing=True))


def device_seconds(marks: Marks) -> dict[str, float]:
    """Return what each part took on the device, without waiting: what has not passed yet is left out."""
    seconds: defaultdict[str, float] = defaultdict(float)
    for part, began, ended in marks:
        with contextlib.suppress(RuntimeError):  # not passed: on a stream of its own, or recorded into a graph
            milliseconds = began.elapsed_time(ended)
            seconds[part] += milliseconds / 1000
    return dict(seconds)
