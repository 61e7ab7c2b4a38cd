"""Ranks exchange the sums of a sampled step: on the host, in a thread and a gloo group of our own, never in the training's way.

A sampled step is known by its number among all attempted ones. Each rank says on the board that it has come to it; the last one
decides that all are there, or the first one that has waited for too long decides that they are not. There is one decision for all,
so no rank is left waiting in a collective, and whoever comes late finds it made.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from otel_train.budget import Pace
from otel_train.guard import Guard
from otel_train.parallel.board import Board, ranks_in_words
from otel_train.parallel.combine import Combined, Depths, Labels, pack, whole_rows
from otel_train.parallel.layout import Layout
from otel_train.records import Agreement, LayerSample, RankSample, StepRecord

_LOG = logging.getLogger("otel_train")

_WAITING = 16
"""Samples that wait for other ranks at most; older ones are given up."""
_KEPT = 16
"""Decisions that stay on the board, for ranks that come late."""
_IMPATIENT = 0.1
"""Share of the time-out that is waited for ranks that did not come the last time, and have not come since."""
_CONNECTED = 10.0
"""Seconds at least for ranks that have come to a step to connect and to reduce: a short time-out is for those that do not come."""
_ALL_HERE = "all"


@dataclass(frozen=True, slots=True)
class _Waiting:
    attempt: int
    step: int
    grad_norm: float | None
    sample: LayerSample | None
    has_activations: bool
    """Whether activations were measured in this step: else what the sample has of them is from an earlier one."""
    pace: Pace


class Exchange:
    """Reduces this rank's samples with those of the others.

    Args:
        board: Shared with the other ranks; None: nobody is met, and ``reason`` says why.
        layout: Who holds what.
        labels: Layer and histogram of each parameter, as attached.
        depths: Depth of each layer that has activation sites.
        seconds: How long to wait for other ranks.
        everything: Whether what this rank holds itself is delivered as well.
        signed: Whether signs of gradients are counted.
        horizon: Returns a step that this rank will not have come to when the ranks have met.
        guard: Counts failures.
        deliver: Takes each sample; called from this object's thread.
    """

    def __init__(
        self,
        board: Board | None,
        layout: Layout,
        *,
        labels: Labels,
        depths: Depths,
        seconds: float,
        everything: bool,
        signed: bool = False,
        horizon: Callable[[], int],
        guard: Guard,
        deliver: Callable[[RankSample], None],
    ) -> None:
        self._board, self._layout, self._labels, self._depths = board, layout, labels, depths
        self._seconds, self._everything, self._guard, self._deliver = seconds, everything, guard, deliver
        self._signed, self._horizon = signed, horizon
        self._items: deque[_Waiting] = deque()
        self._changed = threading.Condition()
        self._busy = self._stopping = False
        self._group: Any = None  # a ProcessGroupGloo, of which torch's stubs know no method
        self._group_name = "none"
        self._missed: set[int] = set()
        self._missed_at = 0
        self._decided: deque[int] = deque()
        self._said: set[str] = set()
        self._thread = threading.Thread(target=self._run, name="otel-train-ranks", daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def put(self, record: StepRecord, step: int, pace: Pace) -> None:
        """Take what this rank measured in a sampled step; returns at once.

        Args:
            record: The step; its sample is None where it was skipped: the other ranks must know that too.
            step: The global step.
            pace: How often this rank would sample.
        """
        with self._changed:
            sample = record.sample.merged if record.sample is not None else None
            has_activations = record.sample is not None and bool(record.sample.activations)
            self._items.append(_Waiting(record.attempt, step, record.grad_norm, sample, has_activations, pace))
            self._changed.notify_all()

    def flush(self, seconds: float) -> bool:
        """Wait until everything put so far is delivered; say whether that came about in time."""
        with self._changed:
            return self._changed.wait_for(lambda: not (self._items or self._busy) or not self._thread.is_alive(), seconds)

    def stop(self, seconds: float) -> None:
        """Deliver what waits, for so long, then end the thread."""
        self.flush(seconds)
        with self._changed:
            self._stopping = True
            self._changed.notify_all()
        if self._thread.is_alive():
            self._thread.join(seconds)

    def _run(self) -> None:
        while True:
            with self._changed:
                self._busy = False
                self._changed.notify_all()
                self._changed.wait_for(lambda: self._items or self._stopping)
                if self._stopping:
                    return
                item, self._busy = self._items.popleft(), True
            try:
                self._handle(item)
            except Exception as error:  # noqa: BLE001  # nothing of ours ends the thread
                self._guard.failed("ranks", error)
            with contextlib.suppress(OSError):  # no thread clock on some platforms
                self._guard.seconds["ranks"] = time.thread_time()  # waiting costs nobody anything

    def _handle(self, item: _Waiting) -> None:
        combined: Combined | None = None
        if self._board is not None:
            try:
                combined = self._meet(self._board, item)
            except (RuntimeError, ValueError) as error:  # torch's own are RuntimeErrors: a connection is gone
                self._group, self._group_name = None, "none"
                self._miss(self._cause(self._board, item.attempt, error))
        else:
            self._guard.errors["ranks"] += 1
        now = {r.name: (r.layer, r.histogram) for r in item.sample.parameters} if item.sample is not None else {}
        own = combined.sample({**self._labels, **now}, self._depths) if combined is not None else None
        if own is None and item.sample is not None:
            own = whole_rows(self._layout, item.sample)
        if own is None:
            return
        if item.sample is not None:
            own = replace(own, optimizers=item.sample.optimizers, earlier_optimizers=item.sample.earlier_optimizers)
            if not item.has_activations:
                own = replace(own, activations=(), earlier_activations=own.activations)
        local = item.sample if self._everything or combined is None else None
        weights = None if item.sample is None else sum(reading.sums.weight_squared for reading in item.sample.parameters)
        agreed = combined.agreed if combined is not None else None
        self._deliver(RankSample(item.step, item.grad_norm, own, local, weights, item.attempt, agreed))

    def _miss(self, sentence: str) -> None:
        """Count a sample that could not be reduced, and say why once a cause."""
        self._guard.errors["ranks"] += 1
        cause = sentence.partition(": ")[2]
        if cause not in self._said and not self._stopping:
            self._said.add(cause)
            _LOG.warning("%s", sentence)

    def _meet(self, board: Board, item: _Waiting) -> Combined | None:
        decision = self._decision(board, item.attempt)
        self._forget_old(board, item.attempt)
        if not decision.startswith(_ALL_HERE):
            self._miss(decision)
            return None
        self._missed.clear()
        self._connect(board, decision, item.attempt)
        return self._reduce(item.sample, Agreement(item.pace, self._horizon()))

    def _decision(self, board: Board, attempt: int) -> str:
        """Come to a step, and return what is decided about it."""
        key = f"{attempt}/decision"
        if len(self._items) > _WAITING:
            return board.decide(key, self._sentence(attempt, f"rank {board.rank} is {_WAITING} samples behind"))
        alike = board.count(f"{attempt}/{self._group_name}")
        board.post(f"at/{board.rank}", str(attempt))
        if board.count(f"{attempt}/here") == board.world:
            # whoever is last knows whether all still have the same group
            return board.decide(key, _ALL_HERE if alike == board.world and self._group is not None else f"{_ALL_HERE} new")
        if board.wait(lambda: board.has(key), self._patience(board), lambda: self._stopping):
            return board.read(key)
        self._missed, self._missed_at = self._absent(board, attempt), attempt
        told = (
            f"{ranks_in_words(self._missed)} did not come to it within {self._seconds:g} s"
            if self._missed
            else "the ranks met too late"
        )
        return board.decide(key, self._sentence(attempt, told))

    def _patience(self, board: Board) -> float:
        """Return how long to wait: not for long where somebody has not come since he was missed."""
        gone = self._missed and self._missed & self._absent(board, self._missed_at)
        return self._seconds * _IMPATIENT if gone else self._seconds

    def _absent(self, board: Board, attempt: int) -> set[int]:
        def last(rank: int) -> int:
            return int(board.read(f"at/{rank}")) if board.has(f"at/{rank}") else 0

        return {rank for rank in range(board.world) if rank != board.rank and last(rank) < attempt}

    def _sentence(self, attempt: int, cause: str) -> str:
        return (
            f"sampled step {attempt}: {cause}, so layers and norms that are spread over ranks have no values; the training goes on"
        )

    def _cause(self, board: Board, attempt: int, error: Exception) -> str:
        """Return one sentence for all ranks after a connection broke: it names those that are gone."""
        try:
            board.post(f"alive/{board.rank}", str(attempt))
            time.sleep(min(1.0, self._seconds))
            gone = [r for r in range(board.world) if not board.has(f"alive/{r}") or board.read(f"alive/{r}") != str(attempt)]
            told = f"{ranks_in_words(gone)} left the exchange" if gone else "the connection between the ranks broke"
            return board.decide(f"{attempt}/broken", self._sentence(attempt, told))
        except (RuntimeError, ValueError):  # the store is gone, which lives on one rank
            return self._sentence(attempt, f"the store of the process group does not answer ({type(error).__name__})")

    def _forget_old(self, board: Board, attempt: int) -> None:
        self._decided.append(attempt)
        if len(self._decided) > _KEPT:
            old = self._decided.popleft()
            if board.rank == 0:
                board.forget(f"{old}/{name}" for name in ("decision", "here", "none", self._group_name))

    def _connect(self, board: Board, decision: str, attempt: int) -> None:
        if decision == _ALL_HERE:
            return
        name = f"gloo{attempt}"
        store = board.under(name)
        self._group = dist.ProcessGroupGloo(store, board.rank, board.world, timedelta(seconds=max(self._seconds, _CONNECTED)))
        self._group_name = name

    def _reduce(self, sample: LayerSample | None, wish: Agreement) -> Combined:
        sums, largest = pack(self._layout, sample, wish, signed=self._signed)
        self._all_reduce(sums, dist.ReduceOp.SUM)
        self._all_reduce(largest, dist.ReduceOp.MAX)
        combined = Combined(self._layout, sums, largest, signed=self._signed)
        rows = combined.partial_rows()
        if rows:
            self._add_up(combined, rows, sample)
        return combined

    def _all_reduce(self, tensor: torch.Tensor, operation: Any) -> None:
        if self._group is None:
            raise RuntimeError("no group")
        options = dist.AllreduceOptions()
        options.reduceOp = operation
        self._group.allreduce([tensor], options).wait()

    def _add_up(self, combined: Combined, rows: list[int], sample: LayerSample | None) -> None:
        """Add up gradients of which each rank holds a summand, before they are squared."""
        regions = self._layout.table.regions
        starts: dict[tuple[int, int], int] = {}
        total = 0
        for row in rows:
            for region, size in enumerate(regions[row]):
                starts[row, region], total = total, total + size
        elements = torch.zeros(total, dtype=torch.float64)
        for reading in sample.parameters if sample is not None else ():
            own, gradient = self._layout.rows.get(reading.name), reading.sums.partial_gradient
            if own is not None and own.adds and gradient is not None and (own.index, own.region) in starts:
                start = starts[own.index, own.region]
                elements[start : start + len(gradient)] = torch.tensor(gradient, dtype=torch.float64)
        self._all_reduce(elements, dist.ReduceOp.SUM)
        for row in rows:
            start = starts[row, 0]
            combined.add_partial(row, elements[start : start + sum(regions[row])])
