"""The monitor's own thread: order, ticks, flushes, dropping and the end."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import pairwise

import pytest

from otel_train.worker import Worker

WAIT = 5.0


class Log:
    """What the thread did, in order: items, and "tick"."""

    def __init__(self) -> None:
        self.events: list[object] = []
        self.ticked = threading.Condition()

    def handle(self, item: int) -> None:
        self.events.append(item)

    def tick(self) -> None:
        with self.ticked:
            self.events.append("tick")
            self.ticked.notify_all()

    @property
    def items(self) -> list[object]:
        return [event for event in self.events if event != "tick"]

    @property
    def ticks(self) -> int:
        return self.events.count("tick")

    def wait_for_ticks(self, count: int, timeout_seconds: float = WAIT) -> bool:
        with self.ticked:
            return self.ticked.wait_for(lambda: self.ticks >= count, timeout_seconds)


@contextmanager
def _running(
    log: Log, *, handle: Callable[[int], None] | None = None, period_seconds: float = 3600.0, limit: int = 4096
) -> Iterator[Worker[int]]:
    worker: Worker[int] = Worker("test", handle or log.handle, log.tick, period_seconds=period_seconds, limit=limit)
    worker.start()
    try:
        yield worker
    finally:
        worker.stop(WAIT)


def test_items_are_handled_in_order() -> None:
    """As put, none lost, none twice."""
    log = Log()
    with _running(log) as worker:
        for i in range(1000):
            worker.put(i)
        assert worker.flush(WAIT)
        assert log.items == list(range(1000))


def test_a_flush_returns_after_everything_is_handled_and_ticked() -> None:
    """Slow handling: the flush waits for it, and for a tick after it."""
    log = Log()

    def slow(item: int) -> None:
        time.sleep(0.01)
        log.handle(item)

    with _running(log, handle=slow) as worker:
        for turn in range(5):
            for i in range(3):
                worker.put(i)
            assert worker.flush(WAIT)
            assert len(log.items) == 3 * (turn + 1)
            assert log.events[-1] == "tick"


def test_a_flush_says_when_time_ran_out() -> None:
    """The handling goes on; a later flush sees it done."""
    log, release = Log(), threading.Event()

    def blocked(item: int) -> None:
        release.wait(WAIT)
        log.handle(item)

    with _running(log, handle=blocked) as worker:
        worker.put(1)
        assert not worker.flush(0.05)
        release.set()
        assert worker.flush(WAIT)
        assert log.items == [1]


def test_each_flush_ticks_though_the_period_is_long() -> None:
    """Nothing has to be waiting."""
    log = Log()
    with _running(log) as worker:
        for _ in range(4):
            before = log.ticks
            assert worker.flush(WAIT)
            assert log.ticks > before


def test_flushes_of_several_threads_all_return() -> None:
    """None waits for ever."""
    log, found = Log(), list[bool]()
    with _running(log) as worker:

        def put_and_flush() -> None:
            for i in range(20):
                worker.put(i)
                found.append(worker.flush(WAIT))

        threads = [threading.Thread(target=put_and_flush) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(WAIT)
    assert found == [True] * 80
    assert len(log.items) == 80


def test_a_fast_loop_ticks_at_most_once_a_period() -> None:
    """Items every millisecond for half a second, a period of 0.1 s: about 5 ticks, at least that far apart."""
    log, times = Log(), list[float]()

    def tick() -> None:
        times.append(time.monotonic())
        log.tick()

    worker: Worker[int] = Worker("test", log.handle, tick, period_seconds=0.1)
    worker.start()
    end = time.monotonic() + 0.5
    while time.monotonic() < end:
        worker.put(0)
        time.sleep(0.001)
    ticks = list(times)
    worker.stop(WAIT)
    assert 2 <= len(ticks) <= 6
    assert all(after - before >= 0.099 for before, after in pairwise(ticks))


def test_an_item_is_handled_and_ticked_by_itself() -> None:
    """Without a flush."""
    log = Log()
    with _running(log, period_seconds=0.05) as worker:
        worker.put(1)
        assert log.wait_for_ticks(1)
        assert log.events == [1, "tick"]


def test_the_first_item_is_ticked_at_once() -> None:
    """Whatever the period, and however long ago the machine started."""
    log = Log()
    with _running(log, period_seconds=1e9) as worker:
        worker.put(1)
        assert log.wait_for_ticks(1, 1.0)


def test_an_item_after_a_flush_is_ticked_within_a_period() -> None:
    """The tick after it is only put off until it is due, not until the next item."""
    log = Log()
    with _running(log, period_seconds=0.2) as worker:
        assert worker.flush(WAIT)
        worker.put(1)
        assert log.wait_for_ticks(2, 1.5)
        assert log.events == ["tick", 1, "tick"]


def test_waking_ticks_though_no_item_came() -> None:
    """At once where a tick is due."""
    log = Log()
    with _running(log, period_seconds=0.05) as worker:
        worker.wake()
        assert log.wait_for_ticks(1)
        time.sleep(0.1)
        worker.wake()
        assert log.wait_for_ticks(2)
        assert log.items == []


def test_waking_after_a_flush_ticks_within_a_period() -> None:
    """Not due yet, the tick comes when it is."""
    log = Log()
    with _running(log, period_seconds=0.2) as worker:
        assert worker.flush(WAIT)
        worker.wake()
        assert log.wait_for_ticks(2, 1.5)


def test_the_oldest_item_is_dropped_for_a_new_one() -> None:
    """And counted; putting never waits."""
    log, started, release = Log(), threading.Event(), threading.Event()

    def blocked(item: int) -> None:
        started.set()
        release.wait(WAIT)
        log.handle(item)

    with _running(log, handle=blocked, limit=3) as worker:
        worker.put(0)
        assert started.wait(WAIT)  # 0 is being handled and waits no more
        for i in range(1, 11):
            worker.put(i)
        assert worker.dropped == 7
        release.set()
        assert worker.flush(WAIT)
        assert log.items == [0, 8, 9, 10]
        assert worker.dropped == 7


def test_stopping_handles_what_waits_and_joins() -> None:
    """Afterwards the thread is gone, and ticked last."""
    log, before = Log(), threading.active_count()
    with _running(log) as worker:
        for i in range(50):
            worker.put(i)
        worker.stop(WAIT)
        assert threading.active_count() == before
        assert log.items == list(range(50))
        assert log.events[-1] == "tick"


def test_stopping_during_a_pause_does_not_wait_for_the_period() -> None:
    """An hour would be long."""
    log = Log()
    with _running(log) as worker:
        worker.put(1)
        deadline = time.monotonic() + WAIT
        while not log.items and time.monotonic() < deadline:
            time.sleep(0.01)
        worker.put(2)
        started = time.monotonic()
        worker.stop(WAIT)
        assert time.monotonic() - started < 2
        assert log.items == [1, 2]


def test_stopping_from_within_the_thread_does_not_deadlock() -> None:
    """In the handling of an item; stopping again from outside joins."""
    log, stopped = Log(), threading.Event()
    holder: list[Worker[int]] = []

    def handle(item: int) -> None:
        log.handle(item)
        holder[0].stop(WAIT)
        stopped.set()

    before = threading.active_count()
    with _running(log, handle=handle) as worker:
        holder.append(worker)
        started = time.monotonic()
        worker.put(1)
        assert stopped.wait(WAIT)
        worker.stop(WAIT)
        assert time.monotonic() - started < 2
        assert threading.active_count() == before


def test_stopping_from_within_a_tick_does_not_deadlock() -> None:
    """As where an exporter gives up."""
    holder: list[Worker[int]] = []
    worker: Worker[int] = Worker("test", lambda _: None, lambda: holder[0].stop(WAIT))
    holder.append(worker)
    before = threading.active_count()
    worker.start()
    worker.put(1)
    deadline = time.monotonic() + 2
    while threading.active_count() > before and time.monotonic() < deadline:
        time.sleep(0.01)
    assert threading.active_count() == before


@pytest.mark.parametrize("started", [False, True])
def test_a_flush_without_a_thread_says_no_at_once(*, started: bool) -> None:
    """Before the start and after the end; stopping then is harmless."""
    log = Log()
    worker: Worker[int] = Worker("test", log.handle, log.tick)
    if started:
        worker.start()
        worker.stop(WAIT)
    begun = time.monotonic()
    assert not worker.flush(WAIT)
    worker.stop(WAIT)
    assert time.monotonic() - begun < 2


def test_the_threads_processor_time_is_counted() -> None:
    """Its own, not that of others or of waiting."""
    log = Log()

    def busy(_: int) -> None:
        end = time.thread_time() + 0.05
        while time.thread_time() < end:
            pass

    with _running(log, handle=busy) as worker:
        worker.put(1)
        assert worker.flush(WAIT)
        assert 0.05 <= worker.cpu_seconds < 1


def test_the_thread_is_a_daemon_with_its_name() -> None:
    """It must not keep the process alive."""
    started, release, found = threading.Event(), threading.Event(), list[threading.Thread]()

    def handle(_: int) -> None:
        found.append(threading.current_thread())
        started.set()
        release.wait(WAIT)

    worker: Worker[int] = Worker("a name", handle, lambda: None)
    worker.start()
    worker.put(1)
    assert started.wait(WAIT)
    release.set()
    worker.stop(WAIT)
    assert found[0].daemon
    assert found[0].name == "a name"


def test_what_is_hurried_does_not_wait_for_the_period() -> None:
    """The period here is an hour: an item waits for it, a hurried one does not."""
    log = Log()
    with _running(log) as worker:
        worker.put(1)
        assert log.wait_for_ticks(1)
        worker.put(2)
        assert not log.wait_for_ticks(2, 0.2)
        worker.hurry()
        assert log.wait_for_ticks(2)
        assert log.items == [1, 2]
