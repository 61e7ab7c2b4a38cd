"""What ranks tell each other through the process group's store: small texts, and decisions that are the same for all.

Nothing here blocks in the store itself: waiting means asking again, so a rank that never comes costs a time-out and nothing else.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from typing import Any

from torch.distributed import distributed_c10d

from otel_train.config import Rank

_FIRST_PAUSE, _LONGEST_PAUSE = 0.002, 0.2
_attached = 0  # monitors that this process has attached with other ranks: each has texts of its own


class Board:
    """The texts of one monitor on all ranks.

    Args:
        store: The process group's; where it can be cloned we have a connection of our own, so that no one waits for us.
        place: This rank.
        name: What no other monitor of the run has.
    """

    def __init__(self, store: Any, place: Rank, name: str) -> None:
        own = store.clone() if hasattr(store, "clone") else store
        self._store: Any = distributed_c10d.PrefixStore(name, own)
        self.rank, self.world = place.rank, place.world_size

    def under(self, name: str) -> Any:
        """Return the store below a name, for a process group's own use."""
        return distributed_c10d.PrefixStore(name, self._store)

    def post(self, key: str, text: str) -> None:
        """Write a text."""
        self._store.set(key, text)

    def read(self, key: str) -> str:
        """Return a text that is there."""
        return str(self._store.get(key).decode())

    def has(self, *keys: str) -> bool:
        """Say whether all texts are there."""
        return bool(self._store.check(list(keys)))

    def count(self, key: str) -> int:
        """Add one to a number, and return it."""
        return int(self._store.add(key, 1))

    def decide(self, key: str, text: str) -> str:
        """Return what all ranks take as decided: this text, or the one that came first."""
        return str(self._store.compare_set(key, "", text).decode())

    def forget(self, keys: Iterable[str]) -> None:
        """Remove texts."""
        for key in keys:
            self._store.delete_key(key)

    def wait(self, ready: Callable[[], bool], seconds: float, stop: Callable[[], bool] = lambda: False) -> bool:
        """Ask again until something is ready; say whether it was in time."""
        end, pause = time.monotonic() + seconds, _FIRST_PAUSE
        while not ready():
            if stop() or time.monotonic() >= end:
                return False
            time.sleep(pause)
            pause = min(pause * 1.5, _LONGEST_PAUSE)
        return True


def open_board(place: Rank) -> Board:
    """Return the board of the monitor that is attached next; all ranks attach theirs in the same order."""
    global _attached  # noqa: PLW0603  # counts over the process
    _attached += 1
    return Board(distributed_c10d._get_default_store(), place, f"otel_train/{_attached}")  # noqa: SLF001  # no public way


def ranks_in_words(ranks: Iterable[int]) -> str:
    """Return ``rank 1`` or ``ranks 1, 3``, a few of them."""
    found = sorted(ranks)
    some = ", ".join(map(str, found[:8])) + (f" and {len(found) - 8} more" if len(found) > 8 else "")
    return ("rank " if len(found) == 1 else "ranks ") + some
