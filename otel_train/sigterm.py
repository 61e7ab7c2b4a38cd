"""SIGTERM ends the run as inactive, then goes to whoever handled it before."""

from __future__ import annotations

import logging
import os
import signal
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any

_LOG = logging.getLogger("otel_train")


class Sigterm:
    """The handler of one monitor.

    Args:
        close: Called when the signal comes.
    """

    def __init__(self, close: Callable[[], None]) -> None:
        self._close = close
        self._previous: Any = None

    def handle(self) -> None:
        """Handle the signal from now on."""
        if threading.current_thread() is not threading.main_thread():
            _LOG.warning("handle_sigterm: attach was not called in the main thread, so SIGTERM is not handled")
            return
        self._previous = signal.signal(signal.SIGTERM, self._on_signal)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        previous = self._previous
        self._close()
        if callable(previous):
            previous(number, frame)
        elif previous is not signal.SIG_IGN:
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)

    def restore(self) -> None:
        """Give the signal back, unless somebody else has taken it since."""
        if self._previous is None or threading.current_thread() is not threading.main_thread():
            return
        if signal.getsignal(signal.SIGTERM) == self._on_signal:
            signal.signal(signal.SIGTERM, self._previous)
        self._previous = None
