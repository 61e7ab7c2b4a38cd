"""The demo's ``--stack``: real servers watch it, and their alerts are shown with the time since the cause."""

from __future__ import annotations

import time
from collections.abc import Callable
from types import TracebackType

from typing_extensions import Self

from otel_train.demo.scenarios import Scenario
from otel_train.errors import StackError
from otel_train.stack import Announcer, Stack, StackOptions

_SCRAPE_SECONDS = 30.0
_AFTERWARDS_SECONDS = 10
"""How long to wait after the end for alerts that should not come: twice what the demo's clocks take to miss a training."""


class Watch:
    """A stack around a demo, or nothing.

    Args:
        scenario: What is trained.
        steps: For how long.
        port: Of the demo's endpoint; None for no stack.
    """

    def __init__(self, scenario: Scenario, steps: int, port: int | None) -> None:
        self._scenario, self._cause, self._port = scenario, scenario.cause(steps), port
        self._announcer = Announcer(print, self._when)
        self._stack: Stack | None = None
        self._step = 0
        self._caused_at: float | None = None

    def __enter__(self) -> Self:
        """Start the servers, and wait until they scrape; where they cannot be had, say so and go on without."""
        if self._port is None:
            return self
        stack = Stack(StackOptions((f"localhost:{self._port}",), "demo"), self._announcer.received)
        try:
            self._stack = stack.__enter__()
        except StackError as error:
            print(f"No stack: {error}.\nThe training goes on without it.", flush=True)
            return self
        print("\n".join(stack.describe()), flush=True)
        if not stack.wait_for_scrape(_SCRAPE_SECONDS):
            print("Prometheus does not reach the training; it goes on all the same.", flush=True)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        """Stop the servers."""
        if self._stack is not None:
            self._stack.__exit__(kind, error, traceback)

    def follow(self, say: Callable[[str], None]) -> None:
        """Print through this from now on: a progress bar owns the screen."""
        self._announcer.say = say

    def begin(self, step: int) -> None:
        """Take the time at which a step begins."""
        self._step = step
        if step == self._cause:
            self._caused_at = time.monotonic()

    def conclude(self) -> bool:
        """Wait for what a clean end should not set off, say what came, and return whether it was what should."""
        if self._stack is None:
            return True
        print(f"The run has ended; waiting {_AFTERWARDS_SECONDS} s for alerts that a clean end should not set off.", flush=True)
        time.sleep(_AFTERWARDS_SECONDS)
        names = sorted({alert.name for alert in self._announcer.fired})
        print(f"Alerts delivered: {', '.join(names) or 'none'}; expected: {self._scenario.alert or 'none'}.", flush=True)
        as_expected = names == ([self._scenario.alert] if self._scenario.alert else [])
        if not names and not as_expected:
            print("Rules wait for some seconds, and those on layers for 50 steps and 3 samples: try more --steps.", flush=True)
        return as_expected

    def _when(self) -> str:
        clock = time.strftime("%H:%M:%S")
        if self._scenario.alert is None or self._caused_at is None:
            return clock
        seconds = time.monotonic() - self._caused_at
        return f"{clock}, step {self._step}, {self._step - self._cause} steps and {seconds:.1f} s after the cause"
