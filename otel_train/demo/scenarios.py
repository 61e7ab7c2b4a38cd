"""Trainings to look at: a healthy one, and some that are broken in ways that people really meet."""

from __future__ import annotations

from dataclasses import dataclass

import torch

PEAK_LEARNING_RATE = 5e-4


@dataclass(frozen=True, slots=True)
class Scenario:
    """One way to train the demo's model."""

    brief: str
    """What is wrong, for the screen; a full stop at its end."""
    alert: str | None = None
    """The alert that it must set off."""
    learning_rate: float = PEAK_LEARNING_RATE
    forgotten_block: int | None = None
    """A block whose parameters no optimizer gets."""
    broken_from: float | None = None
    """Share of the steps after which the loss is NaN."""

    def cause(self, steps: int) -> int:
        """Return the first step at which the training is broken."""
        return 1 if self.broken_from is None else max(1, round(self.broken_from * steps))

    def loss(self, loss: torch.Tensor, step: int, steps: int) -> torch.Tensor:
        """Return the loss of a step, (): broken as the scenario says."""
        if self.broken_from is None or step < self.cause(steps):
            return loss
        mask = torch.zeros((), device=loss.device)
        return loss * mask / mask.sum()  # 0/0: the mean over a mask that leaves nothing


SCENARIOS = {
    "healthy": Scenario("A healthy training: no alert is expected."),
    # so high that weight decay alone moves a twentieth of the weights a step: however the diverged training goes on, as the weights
    # grow, the ratio stays high
    "lr-too-high": Scenario(
        "The learning rate is 1000 times too high.", "OtelTrainUpdateRatioHigh", learning_rate=1000 * PEAK_LEARNING_RATE
    ),
    "lr-too-low": Scenario(
        "The learning rate is 300 times too low.", "OtelTrainUpdateRatioLow", learning_rate=PEAK_LEARNING_RATE / 300
    ),
    "frozen-layer": Scenario(
        "Block 2 gets gradients, but was forgotten in the optimizer, which never moves it.",
        "OtelTrainLayerStalled",
        forgotten_block=2,
    ),
    "nan-loss": Scenario(
        "From the middle on, the loss is divided by the size of an empty mask.", "OtelTrainLossNonFinite", broken_from=0.5
    ),
}
