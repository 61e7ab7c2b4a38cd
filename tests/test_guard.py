"""The one place where failures end."""

from __future__ import annotations

import logging
import time

import pytest

from otel_train.guard import IN_TRAINING, PARTS, Guard


def _fail(error: BaseException) -> None:
    raise error


def _fail_slowly(error: BaseException) -> None:
    time.sleep(0.01)
    raise error


def _warnings(caplog: pytest.LogCaptureFixture) -> list[logging.LogRecord]:
    return [record for record in caplog.records if record.name == "otel_train"]


@pytest.mark.parametrize("part", PARTS)
def test_an_exception_is_swallowed_and_counted(part: str, caplog: pytest.LogCaptureFixture) -> None:
    """In its part only, and logged with its cause."""
    guard = Guard()
    with guard.part(part):
        _fail(ValueError("oh"))
    assert guard.errors == {name: int(name == part) for name in PARTS}
    (record,) = _warnings(caplog)
    assert record.levelno == logging.WARNING
    assert part in record.getMessage()
    assert "ValueError('oh')" in record.getMessage()
    assert record.exc_info is not None
    assert isinstance(record.exc_info[1], ValueError)


def test_one_cause_is_logged_once_and_counted_each_time(caplog: pytest.LogCaptureFixture) -> None:
    """Every step would fail alike; the message may differ."""
    guard = Guard()
    for i in range(10):
        with guard.part("loop"):
            _fail(ValueError(f"step {i}"))
    assert guard.errors["loop"] == 10
    assert len(_warnings(caplog)) == 1


def test_every_new_cause_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    """Another type, another line, another part."""
    guard = Guard()
    for _ in range(3):
        with guard.part("loop"):
            _fail(ValueError("a"))
        with guard.part("loop"):
            _fail(TypeError("another type"))
        with guard.part("loop"):
            raise ValueError("another line")
        with guard.part("updates"):
            _fail(ValueError("another part"))
    assert len(_warnings(caplog)) == 4
    assert (guard.errors["loop"], guard.errors["updates"]) == (9, 3)


def test_another_guard_logs_for_itself(caplog: pytest.LogCaptureFixture) -> None:
    """Nothing is remembered across monitors."""
    for _ in range(2):
        with Guard().part("loop"):
            _fail(ValueError("a"))
    assert len(_warnings(caplog)) == 2


@pytest.mark.parametrize("error", [KeyboardInterrupt(), SystemExit(1), GeneratorExit()], ids=repr)
def test_an_interrupt_is_the_users(error: BaseException, caplog: pytest.LogCaptureFixture) -> None:
    """It passes, uncounted and unlogged."""
    guard = Guard()
    with pytest.raises(type(error)), guard.part("loop"):
        _fail(error)
    assert not any(guard.errors.values())
    assert not _warnings(caplog)


def test_nothing_happens_where_nothing_fails(caplog: pytest.LogCaptureFixture) -> None:
    """No error, no log."""
    guard = Guard()
    with guard.part("export"):
        pass
    assert not any(guard.errors.values())
    assert not _warnings(caplog)


def test_seconds_add_up_also_where_it_fails() -> None:
    """Of the part that they were spent in."""
    guard = Guard()
    for _ in range(2):
        with guard.part("readout"):
            time.sleep(0.01)
            _fail(ValueError("a"))
    with pytest.raises(KeyboardInterrupt), guard.part("readout"):
        _fail_slowly(KeyboardInterrupt())
    assert 0.03 <= guard.seconds["readout"] < 1
    assert all(seconds == 0 for name, seconds in guard.seconds.items() if name != "readout")


def test_a_failure_outside_a_part_is_counted_alike(caplog: pytest.LogCaptureFixture) -> None:
    """An error that was never raised has no line, and is one cause of its type."""
    guard = Guard()
    guard.failed("export", OSError("a"))
    guard.failed("export", OSError("b"))
    assert guard.errors["export"] == 2
    assert len(_warnings(caplog)) == 1


def test_a_part_that_is_none_is_an_error() -> None:
    """A misspelt name must not count nowhere."""
    with pytest.raises(KeyError):
        Guard().part("no such part")


def test_what_was_spent_is_told_once_and_by_part() -> None:
    """Of the training's thread only."""
    guard = Guard()
    for part in ("gradients", "export"):
        with guard.part(part):
            time.sleep(0.02)
    spent = guard.spent()
    assert set(spent) == set(IN_TRAINING)
    assert {part for part, seconds in spent.items() if seconds >= 0.02} == {"gradients"}
    assert set(guard.spent().values()) == {0.0}
