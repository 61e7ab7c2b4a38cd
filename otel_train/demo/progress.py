"""The demo's progress: a bar in a terminal, plain lines elsewhere."""

from __future__ import annotations

import sys
from types import TracebackType
from typing import Any, Protocol

from typing_extensions import Self  # torch depends on it

from otel_train.catalog import loss, run
from otel_train.detect.update_ratio import median_log10_ratio
from otel_train.snapshot import Snapshot

_PLAIN_LINES = 12


class Progress(Protocol):
    """Shows how far the training is."""

    def show(self, step: int, snapshot: Snapshot | None) -> None:
        """Show a step and the latest values."""

    def say(self, text: str) -> None:
        """Print a text beside the progress; from any thread."""

    def __enter__(self) -> Self:
        """Start showing."""

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        """Stop showing."""


def make_progress(steps: int) -> Progress:
    """Return a bar where there is a terminal and rich is installed, else plain lines."""
    if sys.stdout.isatty():
        try:
            return _Bar(steps)
        except ImportError:
            print("(pip install 'otel-train[demo]' for a progress bar)")
    return _Lines(steps)


def describe(snapshot: Snapshot | None, ratio: str = "median log10 update ratio") -> str:
    """Say loss, learning rate and median log10 update ratio, which is called as `ratio` says."""
    if snapshot is None:
        return ""
    value, median = snapshot.value(loss.LOSS), median_log10_ratio(snapshot)
    rates = [s.value for s in snapshot.find(run.LEARNING_RATE) if isinstance(s.value, (int, float))]
    parts = [f"loss {value:.3f}" if value is not None else "", f"lr {max(rates):.2e}" if rates else ""]
    parts.append(f"{ratio} {median:.2f}" if median is not None else "")
    return "  ".join(part for part in parts if part)


class _Lines:
    def __init__(self, steps: int) -> None:
        self._steps, self._every = steps, max(1, steps // _PLAIN_LINES)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *unused: object) -> None:
        pass

    def show(self, step: int, snapshot: Snapshot | None) -> None:
        if step % self._every == 0 or step == self._steps:
            self.say(f"step {step:>{len(str(self._steps))}}/{self._steps}  {describe(snapshot)}")

    def say(self, text: str) -> None:
        print(text, flush=True)


class _Bar:
    def __init__(self, steps: int) -> None:
        from rich import progress  # noqa: PLC0415  # an extra, and only where there is a terminal

        self._progress: Any = progress.Progress(
            # 80 columns hold it all
            progress.TextColumn("{task.completed:.0f}/{task.total:.0f}"),
            progress.BarColumn(bar_width=12),
            progress.TimeRemainingColumn(compact=True),
            progress.TextColumn("{task.description}"),
        )
        self._task = self._progress.add_task("", total=steps)

    def __enter__(self) -> Self:
        self._progress.start()
        return self

    def __exit__(self, *unused: object) -> None:
        self._progress.stop()

    def show(self, step: int, snapshot: Snapshot | None) -> None:
        self._progress.update(self._task, completed=step, description=describe(snapshot, "log10 ratio"))

    def say(self, text: str) -> None:
        self._progress.console.print(text, markup=False, highlight=False, soft_wrap=True)
