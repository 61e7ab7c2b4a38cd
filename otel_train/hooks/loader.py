"""The wait for data, measured where a loop takes its batches."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sized
from typing import Any, Generic, TypeVar

_Batch = TypeVar("_Batch")


class TimedLoader(Generic[_Batch]):
    """A loader whose batches' waits are measured; its other attributes are the loader's own."""

    def __init__(self, loader: Iterable[_Batch], waited: Callable[[float], None]) -> None:
        self._loader, self._waited = loader, waited

    def __iter__(self) -> Iterator[_Batch]:
        iterator = iter(self._loader)
        while True:
            began = time.perf_counter()
            try:
                batch = next(iterator)
            except StopIteration:
                return
            self._waited(time.perf_counter() - began)
            yield batch

    def __len__(self) -> int:
        if not isinstance(self._loader, Sized):
            raise TypeError(f"object of type {type(self._loader).__name__!r} has no len()")
        return len(self._loader)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)
