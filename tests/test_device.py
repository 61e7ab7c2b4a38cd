"""The device's clock, with events that tell the time of the test: there is no accelerator here."""

from __future__ import annotations

import torch

from otel_train.device import DeviceClock, device_clock, device_seconds
from otel_train.guard import Guard
from otel_train.hooks.pending import Step


class Event:
    """An event that passes when the test says so."""

    def __init__(self, at: list[float]) -> None:
        self._now, self.time = at, -1.0
        self.passed = True

    def record(self) -> None:
        self.time = self._now[0]

    def elapsed_time(self, other: Event) -> float:
        if not (self.passed and other.passed):
            raise RuntimeError("not ready")
        return other.time - self.time


def test_parts_are_timed_on_the_device_and_added_up() -> None:
    """Two calls of one part, one of another; what is not measured has no time."""
    now = [0.0]
    clock = DeviceClock(lambda: Event(now))
    guard = Guard(clock)
    for part, milliseconds in (("gradients", 3.0), ("updates", 5.0), ("gradients", 4.0), ("loop", 100.0)):
        with guard.part(part):
            now[0] += milliseconds
        now[0] += 50.0
    marks = clock.take()
    assert device_seconds(marks) == {"gradients": 0.007, "updates": 0.005}
    assert clock.take() == []


def test_what_has_not_passed_is_left_out_and_nobody_waits_for_it() -> None:
    """As on a stream of its own."""
    now = [0.0]
    clock = DeviceClock(lambda: Event(now))
    for part in ("gradients", "updates"):
        began = clock.begin()
        now[0] += 1.0
        clock.end(part, began)
    marks = clock.take()
    marks[0][2].passed = False
    assert device_seconds(marks) == {"updates": 0.001}


def test_a_backend_without_events_is_no_failure() -> None:
    """Then the host's clock is all there is."""

    def refuse() -> Event:
        raise NotImplementedError("no events")

    clock = DeviceClock(refuse)
    guard = Guard(clock)
    with guard.part("gradients"):
        pass
    assert clock.take() == []
    assert guard.errors["gradients"] == 0


def test_marks_are_bounded() -> None:
    """A step of many micro-batches meets every activation module in each."""
    clock = DeviceClock(lambda: Event([0.0]))
    for _ in range(10_000):
        clock.end("activations", clock.begin())
    assert len(clock.take()) == 4096


def test_the_cpu_has_no_clock_of_its_own() -> None:
    """Nothing of it runs there."""
    assert device_clock(torch.device("cpu")) is None
    assert device_clock(torch.device("cuda")) is not None


def test_a_part_costs_what_the_slower_of_host_and_device_took() -> None:
    """The host waits for the device's memory here, the device for the host's calls there."""
    now = [0.0]
    clock = DeviceClock(lambda: Event(now))
    for part in ("gradients", "updates"):
        began = clock.begin()
        now[0] += 5.0
        clock.end(part, began)
    step = Step(costs={"gradients": 0.001, "updates": 0.02, "loop": 0.0001}, marks=clock.take())
    assert step.resolve().costs == {"gradients": 0.005, "updates": 0.02, "loop": 0.0001}
