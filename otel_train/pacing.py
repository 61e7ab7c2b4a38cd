"""Keeps a training's samples within the budget: takes what they cost, lets the hooks follow, and says what has changed and why."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping

from otel_train.budget import Budget, Pace
from otel_train.config import MonitorConfig
from otel_train.hooks.recorder import Recorder
from otel_train.records import Agreement, StepRecord

_LOG = logging.getLogger("otel_train")

_LEAD_SECONDS = 0.5
"""The new pace of ranks begins so much after their furthest step: by then all have learned of it, in threads that poll."""
_MISSES = 3
"""Samples in a row that the other ranks did not come to, after which this rank spares the training alone."""
_PATIENCE_SECONDS = 1.0
"""A sample is looked at that late at most; own seconds of a budget that is spent by then make it sooner."""


class Pacer:
    """Decides how often samples come, for one monitor.

    Args:
        recorder: The training thread's side, which reads the schedule.
        config: The settings.
    """

    def __init__(self, recorder: Recorder, config: MonitorConfig) -> None:
        self._recorder, self._most = recorder, config.max_overhead
        self._budget = Budget(config.every_n_steps, config.max_overhead)
        self.alone = True
        """No other rank takes part in the decision."""
        self._wish = recorder.cadence.schedule.following
        self._misses = 0
        self._unseen = 0.0
        self._handled = self._threads = self._ranks = 0.0
        self._says_steady = config.max_overhead is not None

    @property
    def pace(self) -> Pace:
        """The pace in force."""
        return self._recorder.cadence.schedule.at(self._recorder.attempt)

    @property
    def overhead(self) -> float | None:
        """Own seconds a second of training at that pace; None where they are not known yet."""
        return self._budget.overhead(self.pace)

    @property
    def horizon(self) -> int:
        """A step that this rank will not have come to when it learns what the ranks agree on."""
        step = self._budget.step_seconds
        return self._recorder.attempt + 1 + (math.ceil(_LEAD_SECONDS / step) if step else 0)

    def is_urgent(self, costs: Mapping[str, float]) -> bool:
        """Take what a step cost, in the training's thread; say whether the monitor's own should look at it at once."""
        self._unseen += sum(seconds for part, seconds in costs.items() if part != "loop")
        return self._most is not None and self._unseen > self._most * _PATIENCE_SECONDS

    def add(self, record: StepRecord, handled: float, *, threads: float, ranks: float) -> Pace:
        """Take a step, in the monitor's own thread; where there is only this rank, its wish comes true.

        Args:
            record: The step.
            handled: Processor seconds that its record took in this thread.
            threads: Processor seconds of this thread and of the endpoint's so far.
            ranks: The same of the exchange with other ranks.

        Returns:
            The pace that this rank wishes for.
        """
        self._unseen = 0.0
        schedule = self._recorder.cadence.schedule
        due = schedule.at(record.attempt).is_sampled(record.attempt)
        bare = None if record.duration is None else max(record.duration - sum(record.costs.values()), 0.0)
        costs = {**record.costs, **self._costs_of_threads(handled if due else 0.0, threads, ranks)}
        news = self._budget.add(bare, costs, due=due)
        if record.attempt < schedule.start:  # the last change has still to come about
            self._wish = schedule.following
        elif due:
            self._wish = self._budget.wish(schedule.following)
        elif news and self.alone:  # the next sample, which would heed it, may be far
            self._wish = self._budget.wish(schedule.following).common(schedule.following)
        self._say_steady()
        if self.alone:
            self._follow(self._wish, self._recorder.attempt + 1)
        return self._wish

    def _costs_of_threads(self, handled: float, threads: float, ranks: float) -> dict[str, float]:
        """Return what the monitor's own threads took since the last step, apart from what they take for a sample."""
        self._handled += handled
        steady, self._threads = threads - self._handled - self._threads, threads - self._handled
        exchanged, self._ranks = ranks - self._ranks, ranks
        return {"threads": steady, "export": handled, "ranks": exchanged}

    def meet(self, attempt: int, agreed: Agreement | None) -> None:
        """Take what the ranks agreed on at a sampled step, in the thread of their exchange; None where they did not meet."""
        if self.alone:
            return
        schedule = self._recorder.cadence.schedule
        self._misses = 0 if agreed is not None else self._misses + 1
        if agreed is not None and attempt >= schedule.start:  # else it tells of before the last change, on every rank alike
            self._follow(agreed.pace, agreed.start)
        elif self._misses >= _MISSES:
            self._follow(self._wish.common(schedule.following), self._recorder.attempt + 1)

    def _follow(self, pace: Pace, start: int) -> None:
        schedule = self._recorder.cadence.schedule
        if pace != schedule.following:
            self._recorder.cadence.schedule = schedule.then(pace, start)
            self._say(schedule.following, pace, start)

    def _say(self, before: Pace, after: Pace, start: int) -> None:
        """Tell of a change: a warning where less is seen from now on."""
        overhead, shares = self._budget.overhead(before) or 0.0, self._budget.shares(before)
        changes = f"from step {start} on samples come every {after.every_n_steps} steps (before: {before.every_n_steps})" + "".join(
            f", {part} every {after.of(part)} ({before.of(part)})"
            for part in ("histograms", "activations")
            if after.of(part) != after.every_n_steps or before.of(part) != before.every_n_steps
        )
        if after == after.common(before):
            part = max(shares, key=lambda name: shares[name], default="nothing")
            why = f"{100 * overhead:.2f} % of the training's time, {part} most of it ({100 * shares.get(part, 0.0):.2f} %)"
            over = "more than" if overhead > (self._most or 0.0) else "and another rank's is more than"
            _LOG.warning(
                "own cost is %s, %s max_overhead=%g: %s; denser again once they cost less. To see more, raise max_overhead (None: "
                "no limit); to make samples cheaper, leave parts out (histograms='off', activations=False, updates='off')",
                why, over, self._most, changes,
            )  # fmt: skip
        else:
            _LOG.info("own cost is %.2f %% of the training's time and leaves room: %s", 100 * overhead, changes)

    def _say_steady(self) -> None:
        if self._says_steady and self._most is not None and self._budget.steady > self._most:
            self._says_steady = False
            _LOG.warning(
                "what every step costs without any sample (hooks, and the monitor's own threads) is %.2f %% of the training's time,"
                " more than max_overhead=%g: steps of %.2g ms are too short for it, and sampling less often cannot mend that",
                100 * self._budget.steady, self._most, 1000 * self._budget.step_seconds,
            )  # fmt: skip
