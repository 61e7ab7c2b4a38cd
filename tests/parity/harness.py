"""Real processes in real process groups (gloo): a pool of ranks that runs functions, with a hard limit.

The ranks are forked from a clean server process that has imported torch once, so that a group costs tenths of a second.
"""

from __future__ import annotations

import contextlib
import faulthandler
import multiprocessing
import os
import signal
import socket
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

LIMIT_SECONDS = 120.0
"""After this the ranks of a call are killed, and what each of them was doing is shown."""
_STRAGGLER_SECONDS = 5.0
"""Once a rank has failed, how long the others may take: they may wait for it in a collective."""
_GROUP_SECONDS = 60.0
_PRELOAD = [
    "torch", "torch._dynamo", "torch.distributed.fsdp", "torch.distributed.tensor.parallel", "torch.distributed.pipelining",
]  # fmt: skip


class RanksError(AssertionError):
    """Ranks failed, died or took too long; the text has their tracebacks."""


@dataclass(frozen=True)
class Died:
    """What a rank returns that ended instead."""

    exit_code: int | None


@dataclass
class _Failed:
    kind: str
    text: str


class Ranks:
    """N processes that stand in one process group and run functions together.

    A function must be importable by name; it is called on each rank as ``function(*arguments)``. After a failure that not all ranks
    share, the group may be out of step: it is killed, and the next call starts a new one.

    Args:
        size: How many ranks.
        agent: Keep the group's store in this process, as torchrun does in its agent; otherwise it is in rank 0 and dies with it.
    """

    def __init__(self, size: int, *, agent: bool = False) -> None:
        self.size = size
        self._agent = agent
        self._store: Any = None
        self._processes: list[Any] = []
        self._connections: list[Connection] = []
        self._logs = tempfile.TemporaryDirectory(prefix="parity-", ignore_cleanup_errors=True)

    def run(
        self,
        function: Callable[..., Any],
        *arguments: Any,
        limit_seconds: float = LIMIT_SECONDS,
        may_die: Collection[int] = (),
    ) -> list[Any]:
        """Call a function on all ranks and return what each returned.

        Args:
            function: Called on each rank.
            *arguments: The same for each rank.
            limit_seconds: After this all ranks are killed.
            may_die: Ranks that may end instead of returning; ``Died`` stands for their result.

        Raises:
            RanksError: A rank raised, died, or was not done in time.
        """
        if not self._processes:
            self._start()
        for connection in self._connections:
            connection.send((function, arguments))
        results = self._collect(time.monotonic() + limit_seconds, may_die)
        bad = {rank: result for rank, result in results.items() if isinstance(result, _Failed)}
        late = sorted(set(range(self.size)) - set(results))
        died = [rank for rank, result in results.items() if isinstance(result, Died)]
        shared = len(bad) == self.size and len({failed.kind for failed in bad.values()}) == 1
        if late or died or (bad and not shared):
            logs = self.kill(late)
        if bad or late or set(died) - set(may_die):
            text = [f"rank {rank}: {failed.text}" for rank, failed in sorted(bad.items())]
            text += [f"rank {rank} died with {results[rank].exit_code}:\n{logs[rank]}" for rank in died]
            text += [f"rank {rank} was not done in time:\n{logs[rank]}" for rank in late]
            raise RanksError("\n".join(text))
        return [results[rank] for rank in range(self.size)]

    def kill(self, ask: Collection[int] = ()) -> list[str]:
        """Kill all ranks.

        Args:
            ask: Ranks that are to write down first what each of their threads is doing.

        Returns:
            The end of what each rank has written.
        """
        for rank in ask:
            if self._processes[rank].is_alive():
                os.kill(self._processes[rank].pid, signal.SIGUSR1)
        time.sleep(1.0 if ask else 0.0)
        for process in self._processes:
            process.kill()
            process.join()
            process.close()
        for connection in self._connections:
            connection.close()
        logs = [self._log(rank).read_text(errors="replace")[-6000:] for rank in range(len(self._processes))]
        self._processes, self._connections = [], []
        return logs

    def close(self) -> None:
        """End all ranks; in peace if they are idle."""
        for connection in self._connections:
            with contextlib.suppress(OSError):
                connection.send(None)
        for process in self._processes:
            process.join(5.0)
        self.kill()
        self._logs.cleanup()

    def _log(self, rank: int) -> Path:
        return Path(self._logs.name) / f"rank{rank}.log"

    def _start(self) -> None:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(_PRELOAD)
        port = self._serve_store() if self._agent else _free_port()
        for rank in range(self.size):
            ours, theirs = context.Pipe()
            place = _Place(rank, self.size, port, str(self._log(rank)), self._agent)
            process = context.Process(target=_serve, args=(place, theirs), daemon=True)
            process.start()
            theirs.close()
            self._processes.append(process)
            self._connections.append(ours)

    def _serve_store(self) -> int:
        from torch import distributed

        self._store = distributed.TCPStore(  # type: ignore[attr-defined]  # not in its __all__
            "127.0.0.1", 0, is_master=True, wait_for_workers=False
        )
        port: int = self._store.port
        return port

    def _collect(self, deadline: float, may_die: Collection[int]) -> dict[int, Any]:
        results: dict[int, Any] = {}
        while len(results) < self.size:
            waiting = {c: rank for rank, c in enumerate(self._connections) if rank not in results}
            ready = wait(list(waiting), timeout=deadline - time.monotonic()) if deadline > time.monotonic() else []
            if not ready:
                break
            for connection in ready:
                rank = waiting[connection]  # type: ignore[index]  # wait returns what it was given
                results[rank] = self._receive(rank)
                if isinstance(results[rank], _Failed) or (isinstance(results[rank], Died) and rank not in may_die):
                    deadline = min(deadline, time.monotonic() + _STRAGGLER_SECONDS)
        return results

    def _receive(self, rank: int) -> Any:
        try:
            return self._connections[rank].recv()
        except (EOFError, ConnectionError):
            self._processes[rank].join(5.0)
            return Died(self._processes[rank].exitcode)


@contextlib.contextmanager
def ranks(size: int, *, agent: bool = False) -> Iterator[Ranks]:
    """Yield a pool of ranks; it starts with the first call."""
    pool = Ranks(size, agent=agent)
    try:
        yield pool
    finally:
        pool.close()


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


@dataclass(frozen=True)
class _Place:
    rank: int
    size: int
    port: int
    log: str
    agent: bool


def _serve(place: _Place, connection: Connection) -> None:
    """Be a rank: join the group, and call what comes."""
    _prepare(place)
    import torch
    from torch import distributed

    torch.set_num_threads(1)
    distributed.init_process_group("gloo", rank=place.rank, world_size=place.size, timeout=timedelta(seconds=_GROUP_SECONDS))
    while (call := _next(connection)) is not None:
        function, arguments = call
        try:
            result = function(*arguments)
        except BaseException as error:  # noqa: BLE001  # told to the parent
            result = _Failed(f"{type(error).__name__}: {error}", traceback.format_exc())
        connection.send(result)


def _next(connection: Connection) -> Any:
    try:
        return connection.recv()
    except (EOFError, OSError):
        return None


def _prepare(place: _Place) -> None:
    log = os.open(place.log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    os.dup2(log, 1)
    os.dup2(log, 2)
    sys.stdout, sys.stderr = os.fdopen(1, "w", buffering=1), os.fdopen(2, "w", buffering=1)
    faulthandler.register(signal.SIGUSR1, file=sys.stderr, all_threads=True)
    for name in list(os.environ):
        if name.startswith(("OTEL_", "SLURM_", "TORCHELASTIC_")):
            del os.environ[name]
    os.environ.update(
        RANK=str(place.rank),
        LOCAL_RANK=str(place.rank),
        WORLD_SIZE=str(place.size),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(place.port),
    )
    if place.agent:
        os.environ.update(TORCHELASTIC_USE_AGENT_STORE="True", TORCHELASTIC_RESTART_COUNT="0", TORCHELASTIC_RUN_ID="none")
    warnings.filterwarnings("error", module=r"otel_train")  # as in the parent; what torch warns of is its own business
