"""The clocks of a deployment: how often it scrapes, how far its rules look back, how patient they are.

Rules on sampled values do not depend on it alone: they count training steps (HELD_SAMPLES, HELD_STEPS), so that they follow the
sampling cadence of each run, however long its steps take.
"""

from __future__ import annotations

from dataclasses import dataclass

from otel_train.errors import CatalogError

HELD_SAMPLES, HELD_STEPS = 3, 50
"""What a sampled value shows must hold for so many further samples, and so many steps, before it is said."""


@dataclass(frozen=True, slots=True)
class TimeBase:
    """One set of clocks; all in seconds."""

    name: str
    scrape: int
    """Between two scrapes, and between two evaluations."""
    window: int
    """That counters are compared over."""
    patience: int
    """`for` of what samples show: the least time, where steps are fast."""
    absent: int
    """`for` of a silent exporter."""
    stalled: int
    """Least time without a step, in the phase `train`, that is too long."""
    stalled_elsewhere: int
    """The same in other phases: evaluation, checkpoint, compilation."""
    memory: int
    """How long a run that stopped answering is remembered."""
    keep_firing: int
    """How long an event goes on firing, so that people see it."""
    group_wait: int
    group_interval: int
    repeat_interval: int

    def __post_init__(self) -> None:
        """Refuse clocks that cannot work together."""
        for holds, what in (
            (self.window >= 4 * self.scrape, "a window of at least 4 scrapes"),
            (self.absent >= 2 * self.scrape, "absent for at least 2 scrapes"),
            (self.stalled >= 2 * self.scrape, "stalled for at least 2 scrapes"),
            (self.memory >= 2 * max(self.absent, self.stalled), "a memory of at least twice the limits on silence"),
        ):
            if not holds:
                raise CatalogError(f"time base {self.name}: expected {what}, got {self}")

    @property
    def scrape_timeout(self) -> int:
        """Prometheus' default, where the interval allows it."""
        return min(10, self.scrape)


STANDARD = TimeBase(
    name="standard",
    scrape=15,
    window=300,
    patience=300,
    absent=300,
    stalled=600,
    stalled_elsewhere=3600,
    memory=7200,
    keep_firing=1800,
    group_wait=30,
    group_interval=300,
    repeat_interval=12 * 3600,
)
"""For runs of hours to weeks."""

DEMO = TimeBase(
    name="demo",
    scrape=1,
    window=10,
    patience=2,
    absent=5,
    stalled=8,
    stalled_elsewhere=60,
    memory=120,
    keep_firing=10,
    group_wait=1,
    group_interval=2,
    repeat_interval=3600,
)
"""For the demo, which is over in a minute: the same rules on clocks that are 12 to 180 times as fast."""

TIME_BASES = (STANDARD, DEMO)
