"""When to push, and what waits: a thread that sends the latest Snapshot each interval, and again what could not be taken."""

from __future__ import annotations

import logging
import os
import random
import threading
import time
from collections import Counter, deque
from collections.abc import Iterator

from otel_train.catalog import otlp
from otel_train.sinks.otlp.message import Encoder, Message, halves
from otel_train.sinks.otlp.transport import Outcome, Transport, Verdict
from otel_train.snapshot import Sample, Snapshot
from otel_train.worker import thread_seconds

_LOG = logging.getLogger("otel_train")

_FIRST_PAUSE, _LONGEST_PAUSE = 1.0, 60.0
"""Seconds between tries, doubled from try to try; each is cut by a random half at most, so that ranks do not come together."""
_LONGEST_WISH = 600.0
"""A Retry-After of more is taken as so much."""
_CLOSE_SECONDS, _CLOSE_PAUSE = 5.0, 0.5
"""At the end what waits is tried for so long, so often."""


class Pusher:
    """Sends the latest Snapshot each interval.

    Args:
        encoder: Makes requests.
        transport: Sends them.
        interval_seconds: Time between pushes.
        queue_bytes: What waits at most; the oldest is dropped for a new one.
    """

    def __init__(self, encoder: Encoder, transport: Transport, interval_seconds: float, queue_bytes: int) -> None:
        self._encoder, self._transport = encoder, transport
        self._interval, self._queue_bytes = interval_seconds, queue_bytes
        self._changed = threading.Condition()
        self._pid = os.getpid()
        self._thread = threading.Thread(target=self._run, name="otel-train-otlp", daemon=True)
        self._started = False
        self._latest: Snapshot | None = None
        self._ends_at: float | None = None  # on the monotonic clock, once it is closed
        self._next_push = self._next_try = 0.0
        self._failures = 0  # in a row
        self._waiting: deque[Message] = deque()
        self._bytes = 0
        self._requests: Counter[str] = Counter()
        self._points: Counter[str] = Counter()
        self._told: set[str] = set()
        self._random = random.Random(os.urandom(8))  # noqa: S311  # no secret; the user's stream does not move
        self.cpu_seconds = 0.0

    def publish(self, snapshot: Snapshot) -> None:
        """Have this Snapshot go out at the next push; nothing happens in a forked process."""
        if os.getpid() != self._pid:
            return
        self._latest = snapshot
        if not self._started and self._ends_at is None:
            self._started = True
            self._thread.start()

    def close(self) -> None:
        """Push the last Snapshot and what waits, for a few seconds at most."""
        if os.getpid() != self._pid or self._ends_at is not None:
            return
        with self._changed:
            self._ends_at = time.monotonic() + _CLOSE_SECONDS
            self._next_push = self._next_try = 0.0
            self._changed.notify_all()
        if self._thread.is_alive():
            self._thread.join(_CLOSE_SECONDS + _CLOSE_PAUSE)

    def report(self) -> Iterator[Sample]:
        """Yield what became of the pushes so far."""
        for outcome in otlp.REQUEST_OUTCOMES:
            yield Sample(otlp.OTLP_REQUESTS, (outcome,), self._requests[outcome])
        for outcome in otlp.POINT_OUTCOMES:
            yield Sample(otlp.OTLP_POINTS, (outcome,), self._points[outcome])
        yield Sample(otlp.OTLP_QUEUED, (), self._bytes)

    def _run(self) -> None:
        try:
            while not self._is_done():
                self._collect()
                self._deliver()
                self.cpu_seconds = thread_seconds()
                with self._changed:
                    self._changed.wait(self._patience())
        except Exception:  # noqa: BLE001  # nobody else would hear of it
            _LOG.exception("pushing over OTLP has ended after a failure of our own; the training goes on")
        while self._waiting:
            self._drop(self._take())
        self._transport.close()

    def _is_done(self) -> bool:
        return self._ends_at is not None and (time.monotonic() >= self._ends_at or (self._latest is None and not self._waiting))

    def _patience(self) -> float:
        """Return the seconds until something is to be done."""
        due = self._next_push if not self._waiting else min(self._next_push, self._next_try)
        if self._ends_at is not None:
            due = min(self._next_try, self._ends_at) if self._waiting else 0.0
        return max(due - time.monotonic(), 0.0)

    def _collect(self) -> None:
        """Encode the latest Snapshot when its time has come; again where no newer one has come: a scrape would see it again too."""
        now = time.monotonic()
        if now < self._next_push or self._latest is None:
            return
        self._next_push = now + self._interval
        snapshot = self._latest
        if self._ends_at is not None:
            self._latest, self._next_push = None, self._ends_at  # the last one
        self._put(self._encoder.encode(snapshot, time.time()))

    def _put(self, message: Message) -> None:
        self._waiting.append(message)
        self._bytes += len(message.body)
        while self._bytes > self._queue_bytes and len(self._waiting) > 1:
            self._drop(self._take())
            self._tell("dropped", "what waits for the OTLP collector takes %d bytes: dropping the oldest", self._queue_bytes)

    def _take(self) -> Message:
        message = self._waiting.popleft()
        self._bytes -= len(message.body)
        return message

    def _drop(self, message: Message) -> None:
        self._requests["dropped"] += 1
        self._points["dropped"] += message.points

    def _deliver(self) -> None:
        """Send what waits, the oldest first, until something is not taken or a new push is due."""
        while self._waiting and time.monotonic() >= self._next_try:
            end = self._ends_at
            limit = float("inf") if end is None else end - time.monotonic()
            if limit <= 0:
                return
            self._settle(self._waiting[0], self._transport.post(self._waiting[0].body, limit))
            if end is None and time.monotonic() >= self._next_push:
                return

    def _settle(self, message: Message, outcome: Outcome) -> None:
        """Do what the answer to the oldest message asks for."""
        verdict = outcome.verdict
        if verdict is Verdict.TOO_LARGE:
            verdict = Verdict.REJECTED if message.points <= 1 else verdict
        if verdict is Verdict.TRY_AGAIN:
            self._requests["retried"] += 1
            self._pause(outcome)
            return
        self._recover()
        self._take()
        if verdict is Verdict.TOO_LARGE:
            self._waiting.extendleft(reversed(halves(message)))
            self._bytes += len(self._waiting[0].body) + len(self._waiting[1].body)
            self._tell(outcome.said, "the OTLP collector finds %d bytes too many (%s): in halves", len(message.body), outcome.said)
            return
        self._count(message, verdict, outcome)

    def _count(self, message: Message, verdict: Verdict, outcome: Outcome) -> None:
        rejected = message.points if verdict is Verdict.REJECTED else min(outcome.rejected, message.points)
        self._requests[verdict.value] += 1
        self._points["rejected"] += rejected
        self._points["accepted"] += message.points - rejected
        if rejected:
            self._tell(outcome.said, "the OTLP collector did not take %d of %d points: %s", rejected, message.points, outcome.said)

    def _pause(self, outcome: Outcome) -> None:
        longest = _LONGEST_PAUSE if self._ends_at is None else _CLOSE_PAUSE
        pause = min(_FIRST_PAUSE * 2.0 ** min(self._failures, 16), longest) * self._random.uniform(0.5, 1.0)
        self._failures += 1
        self._next_try = time.monotonic() + max(pause, min(outcome.wait_seconds or 0.0, _LONGEST_WISH))
        self._tell(outcome.said, "the OTLP collector takes nothing now (%s): trying again, what is pushed waits", outcome.said)

    def _recover(self) -> None:
        if self._failures:
            _LOG.info("the OTLP collector answers again; %d pushes have waited", len(self._waiting))
        self._failures, self._next_try = 0, 0.0

    def _tell(self, cause: str, text: str, *values: object) -> None:
        if cause not in self._told and len(self._told) < 100:
            self._told.add(cause)
            _LOG.warning(text, *values)
