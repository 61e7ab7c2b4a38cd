"""The sinks of a monitor, together."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator

import pytest

from otel_train.catalog import run
from otel_train.sinks import Outlets
from otel_train.sinks.memory import MemorySink
from otel_train.snapshot import Sample, Snapshot

SNAPSHOT = Snapshot((), 0.0, (Sample(run.STEPS, (), 1),))
FAILURES: list[str] = []


@contextlib.contextmanager
def part() -> Iterator[None]:
    """Let no exception out, as a monitor's guard does."""
    try:
        yield
    except Exception as error:  # noqa: BLE001  # whatever it is
        FAILURES.append(str(error))


class Broken:
    """Fails at everything."""

    def publish(self, snapshot: Snapshot) -> None:
        del snapshot
        raise RuntimeError("publish")

    def close(self) -> None:
        raise RuntimeError("close")


class Pushing(MemorySink):
    """Has a thread of its own, as it says."""

    cpu_seconds = 0.25

    def report(self) -> Iterable[Sample]:
        return [Sample(run.STEPS, (), len(self.snapshots))]


@pytest.fixture(autouse=True)
def no_failures() -> None:
    """Start with none."""
    FAILURES.clear()


def test_a_sink_that_fails_keeps_nothing_from_the_others() -> None:
    """Neither a Snapshot nor the end."""
    before, after = MemorySink(), MemorySink()
    outlets = Outlets([before, Broken(), after], part)
    outlets.publish(SNAPSHOT)
    outlets.close()
    assert list(before.snapshots) == list(after.snapshots) == [SNAPSHOT]
    assert FAILURES == ["publish", "close"]


def test_who_is_late_publishes_nothing_after_the_end() -> None:
    """A sink takes so long that the others are closed meanwhile: they would show the run for ever."""
    last = MemorySink()

    class ClosesMeanwhile(MemorySink):
        def publish(self, snapshot: Snapshot) -> None:
            del snapshot
            outlets.close()

    outlets = Outlets([ClosesMeanwhile(), last], part)
    outlets.publish(SNAPSHOT)
    outlets.publish(SNAPSHOT)
    assert last.last is None


def test_sinks_with_threads_of_their_own_say_what_they_did_and_cost() -> None:
    """The others have nothing to say."""
    pushing = Pushing()
    outlets = Outlets([MemorySink(), pushing, Pushing()], part)
    pushing.publish(SNAPSHOT)
    assert [sample.value for sample in outlets.reports()] == [1, 0]
    assert outlets.cpu_seconds == 0.5
