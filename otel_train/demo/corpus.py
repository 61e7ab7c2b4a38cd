"""Real text that every machine has: the source of its own standard library, as bytes."""

from __future__ import annotations

import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

from otel_train.errors import ConfigError

_BYTES = 4_000_000
_VALIDATION_SHARE = 0.05


@dataclass(frozen=True)
class Corpus:
    """Bytes to learn from, and others to be tested on."""

    training: torch.Tensor  # (n,) uint8
    validation: torch.Tensor  # (m,) uint8

    @classmethod
    def from_standard_library(cls) -> Corpus:
        """Read the standard library's top-level modules.

        Raises:
            ConfigError: They are not there as source.
        """
        folder = Path(sysconfig.get_path("stdlib"))
        text = b"".join(path.read_bytes() for path in sorted(folder.glob("*.py")))[:_BYTES]
        if len(text) < _BYTES // 10:
            raise ConfigError(
                f"demo: expected the standard library's .py files in {folder}, got {len(text)} bytes; install Python's source"
            )
        data = torch.frombuffer(bytearray(text), dtype=torch.uint8)
        split = int(len(data) * (1 - _VALIDATION_SHARE))
        return cls(data[:split], data[split:])

    @staticmethod
    def batches(
        data: torch.Tensor, batch: int, context: int, generator: torch.Generator, count: int
    ) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Yield `count` batches of (inputs, targets), each (batch, context) int64: bytes and the byte after each."""
        window = torch.arange(context + 1)
        for _ in range(count):
            starts = torch.randint(0, len(data) - context - 1, (batch, 1), generator=generator)
            rows = data[starts + window].long()
            yield rows[:, :-1], rows[:, 1:]
