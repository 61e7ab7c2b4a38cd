"""The pace of strangers: honest ones never wait, a crowd does, and waiting costs nothing."""

from __future__ import annotations

import threading
import time

from otel_train.sinks.throttle import Throttle


def test_a_burst_passes_at_once() -> None:
    """So many as allowed, even where a turn takes a minute."""
    throttle = Throttle(1 / 60, 5)
    began = time.monotonic()
    for _ in range(5):
        throttle.wait()
    assert time.monotonic() - began < 1


def test_more_than_the_burst_pass_at_the_rate() -> None:
    """Twenty beyond the burst, a hundred a second: a fifth of a second, asleep."""
    throttle = Throttle(100, 5)
    began, worked = time.monotonic(), time.thread_time()
    for _ in range(25):
        throttle.wait()
    assert 0.19 < time.monotonic() - began < 2
    assert time.thread_time() - worked < 0.05


def test_who_keeps_to_the_rate_never_waits() -> None:
    """Once the burst is used up, one turn is there after each interval."""
    throttle = Throttle(50, 1)
    throttle.wait()
    for _ in range(10):
        time.sleep(0.03)
        began = time.monotonic()
        throttle.wait()
        assert time.monotonic() - began < 0.01


def test_all_threads_together_keep_to_the_rate() -> None:
    """Each waits for a turn of its own."""
    throttle = Throttle(100, 1)
    threads = [threading.Thread(target=throttle.wait, daemon=True) for _ in range(31)]
    began = time.monotonic()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(10)
    assert time.monotonic() - began > 0.28


def test_a_long_rest_gives_no_more_than_a_burst() -> None:
    """A storm that comes after an hour is no bigger."""
    throttle = Throttle(100, 2)
    throttle._next -= 3600
    began = time.monotonic()
    for _ in range(12):
        throttle.wait()
    assert time.monotonic() - began > 0.09


def test_the_end_wakes_everybody() -> None:
    """The endpoint closes at once, whoever waits."""
    throttle = Throttle(1 / 60, 1)
    threads = [threading.Thread(target=throttle.wait, daemon=True) for _ in range(4)]
    for thread in threads:
        thread.start()
    throttle.end()
    for thread in threads:
        thread.join(5)
    assert not any(thread.is_alive() for thread in threads)
