"""Trainings that push: forked and spawned workers, signals, and ends of every kind."""

from __future__ import annotations

import os
import signal
import time
from collections import Counter
from pathlib import Path

import pytest

from tests.servers import Training, free_port, training, wait_until
from tests.sinks.otlp.collector import Collector, collector, numbers, points

TRAINING = '''
"""Trains and pushes until it is told to finish; how it ends, and with which workers, the arguments say."""
import os, sys, time
from pathlib import Path
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset
import otel_train

class Numbers(Dataset):
    def __init__(self, folder):
        self.folder = folder
    def __len__(self):
        return 10_000
    def __getitem__(self, index):
        (self.folder / f"worker-{os.getpid()}").touch()
        return torch.randn(8)

def main():
    folder, url, workers, ending = Path(sys.argv[2]), sys.argv[3], sys.argv[4], sys.argv[5]
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    sink = otel_train.OtlpSink(url, interval_seconds=0.2)
    monitor = otel_train.attach(model, optimizer, port=None, run="pushing", sinks=[sink], handle_sigterm=ending == "sigterm")
    several = {} if workers == "none" else {"num_workers": 2, "multiprocessing_context": workers, "persistent_workers": True}
    loader = DataLoader(Numbers(folder), batch_size=2, **several)
    while not (folder / "finish").exists():
        for batch in loader:
            model(batch).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            time.sleep(0.005)
            if (folder / "finish").exists():
                break
    if ending == "raise":
        raise RuntimeError("the loop broke")
    if ending == "close":
        monitor.close()

if __name__ == "__main__":
    main()
'''


def instances(there: Collector) -> Counter[str]:
    """Return how many requests each pusher sent."""
    found: Counter[str] = Counter()
    for request in there.accepted:
        (of_resource,) = request.resource_metrics
        points(request)  # no series twice
        found.update(a.value.string_value for a in of_resource.resource.attributes if a.key == "service.instance.id")
    return found


def wait_for_pushes(there: Collector, run: Training, count: int = 3) -> None:
    """Wait until so many pushes have come."""
    wait_until(lambda: len(there.accepted) >= count, 60, f"{count} pushes; stderr:\n{run.said()[-2000:]}")


def ended(there: Collector) -> bool:
    """Say whether the last push says that the run has ended."""
    return numbers(there.accepted[-1], "otel_train.run_active") == [0.0]


@pytest.mark.parametrize("workers", ["fork", "spawn"])
def test_workers_push_nothing(workers: str, tmp_path: Path) -> None:
    """One pusher, no series twice, and time goes forward; the workers outlive some pushes."""
    with collector() as there, training(tmp_path, TRAINING, [there.url, workers, "close"]) as run:
        wait_until(lambda: len(list(tmp_path.glob("worker-*"))) == 2, 60, f"two workers; stderr:\n{run.said()[-2000:]}")
        wait_for_pushes(there, run, len(there.accepted) + 5)
        run.finish()
        assert run.wait() == 0, run.said()
        assert len(instances(there)) == 1
        times = [next(iter(points(request).values())).time_unix_nano for request in there.accepted]
        assert times == sorted(set(times))
        assert ended(there)


@pytest.mark.parametrize("ending", ["close", "exit", "raise"])
def test_the_end_of_a_run_is_pushed(ending: str, tmp_path: Path) -> None:
    """By close, by the interpreter's exit without it, and by an exception."""
    with collector() as there, training(tmp_path, TRAINING, [there.url, "none", ending]) as run:
        wait_for_pushes(there, run)
        run.finish()
        assert run.wait() == (1 if ending == "raise" else 0), run.said()
        assert ended(there)
        assert len(instances(there)) == 1


def test_sigterm_pushes_the_end_where_it_is_handled(tmp_path: Path) -> None:
    """As a scheduler ends a job."""
    with collector() as there, training(tmp_path, TRAINING, [there.url, "none", "sigterm"]) as run:
        wait_for_pushes(there, run)
        run.send(signal.SIGTERM)
        assert run.wait() == -signal.SIGTERM, run.said()
        assert ended(there)


@pytest.mark.parametrize("workers", ["none", "fork"])
def test_after_a_kill_nobody_pushes_on(workers: str, tmp_path: Path) -> None:
    """The last push says that the run is active: that it went silent is what alerts see. Orphaned workers push nothing."""
    with collector() as there, training(tmp_path, TRAINING, [there.url, workers, "close"]) as run:
        wait_for_pushes(there, run)
        run.send(signal.SIGKILL)
        assert run.wait() == -signal.SIGKILL
        time.sleep(0.1)
        count = len(there.accepted)
        time.sleep(1.0)
        assert len(there.accepted) == count
        assert numbers(there.accepted[-1], "otel_train.run_active") == [1.0]
        for worker in tmp_path.glob("worker-*"):
            pid = int(worker.name.partition("-")[2])
            if pid != run.process.pid:
                wait_until(lambda pid=pid: not Path(f"/proc/{pid}").exists() or _is_dead(pid), 20, "the end of a worker")  # type: ignore[misc]


def _is_dead(pid: int) -> bool:
    return ") Z" in Path(f"/proc/{pid}/stat").read_text()


@pytest.mark.parametrize("ending", ["close", "exit"])
def test_a_collector_that_is_down_holds_the_end_up_for_the_deadline_at_most(ending: str, tmp_path: Path) -> None:
    """5 s, whatever waits."""
    with training(tmp_path, TRAINING, [f"http://127.0.0.1:{free_port()}", "none", ending]) as run:
        wait_until(lambda: "takes nothing now" in run.said(), 60, f"a try; stderr:\n{run.said()[-2000:]}")
        run.finish()
        began = time.monotonic()
        assert run.wait() == 0, run.said()
        assert time.monotonic() - began < 5 + 2
        assert os.fspath(tmp_path) not in run.said(), "no traceback"
