"""What a checkpoint carries of a run: plain numbers and lists, for torch.save with weights_only, for JSON, for whatever else."""

from __future__ import annotations

import math
import reprlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from otel_train.detect.spikes import WINDOW
from otel_train.errors import ConfigError

VERSION = 2
"""Of the state. 1, without a version in it, was step and tokens alone."""

_Value = TypeVar("_Value")


@dataclass(frozen=True, slots=True)
class RunState:
    """Where a run is, and what its detectors remember."""

    step: int
    tokens_seen: int
    """Of one replica: ranks that work on the same tokens count once."""
    replicas: int | None = None
    """Data-parallel ranks that saw as many; None where that is not known."""
    smoothed_loss: tuple[float, float] = (0.0, 0.0)
    """Weighted sum, and sum of the weights."""
    loss_window: tuple[float, ...] = ()
    grad_norm_window: tuple[float, ...] = ()
    """Logarithms."""
    schedule_peaks: tuple[tuple[str, str, float], ...] = ()
    """Optimizer, parameter group, largest rate seen."""

    def plain(self) -> dict[str, Any]:
        """Return the state in types that every format knows: at most 256 numbers and a row for each parameter group."""
        return {
            "version": VERSION,
            "step": self.step,
            "tokens_seen": self.tokens_seen,
            "replicas": self.replicas,
            "smoothed_loss": list(self.smoothed_loss),
            "loss_window": list(self.loss_window),
            "grad_norm_window": list(self.grad_norm_window),
            "schedule_peaks": [list(row) for row in self.schedule_peaks],
        }

    def tokens_on(self, replicas: int) -> int:
        """Return the tokens that each of so many replicas goes on from: their sum goes on, to less than a token each."""
        return (self.tokens_seen * (self.replicas or replicas) + replicas // 2) // replicas


def read_state(state: object) -> RunState:
    """Return what ``plain`` made, of this version or an earlier one.

    Raises:
        ConfigError: It is no such state, or one of a later version.
    """
    if not isinstance(state, Mapping):
        raise _refusal(state)
    version = _entry(state, "version", lambda value: _whole(value, 1)) if "version" in state else 1
    if version > VERSION:
        raise ConfigError(
            f"the monitor's state has version {version}, this otel-train reads up to {VERSION}: update it, or leave it out"
        )
    step, tokens = _entry(state, "step", _whole), _entry(state, "tokens_seen", _whole)
    if version == 1:
        return RunState(step, tokens)
    return RunState(
        step,
        tokens,
        _entry(state, "replicas", lambda value: None if value is None else _whole(value, 1)),
        _entry(state, "smoothed_loss", _sum_and_weight),
        _entry(state, "loss_window", _window),
        _entry(state, "grad_norm_window", _window),
        _entry(state, "schedule_peaks", lambda rows: tuple(_peak(*row) for row in rows)),
    )


def _entry(state: Mapping[str, Any], name: str, read: Callable[[Any], _Value]) -> _Value:
    try:
        return read(state[name])
    except (KeyError, TypeError, ValueError, OverflowError):
        raise _refusal(state, f"; {name} is missing, or not as it was") from None


def _refusal(state: object, detail: str = "") -> ConfigError:
    shown = " ".join(reprlib.repr(state).split())  # one line, however large what came is
    return ConfigError(f"expected what Monitor.state_dict returned (step, tokens_seen), got {shown}{detail}")


def _whole(value: Any, least: int = 0) -> int:
    number = int(value)
    if number < least:
        raise ValueError(number)
    return number


def _finite(value: Any) -> float:
    number = float(value)
    if not math.isfinite(number):
        raise ValueError(number)
    return number


def _window(values: Any) -> tuple[float, ...]:
    if isinstance(values, str) or len(values) > WINDOW:
        raise ValueError(values)
    return tuple(_finite(value) for value in values)


def _sum_and_weight(values: Any) -> tuple[float, float]:
    total, weight = _window(values)
    if weight < 0 or (weight == 0 and total != 0):
        raise ValueError(values)
    return total, weight


def _peak(optimizer: Any, group: Any, largest: Any) -> tuple[str, str, float]:
    return str(optimizer), str(group), _finite(largest)
