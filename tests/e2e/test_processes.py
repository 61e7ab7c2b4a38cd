"""Processes: killed, interrupted and forked trainings, and what they leave on their port."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import time
from collections.abc import Iterator
from pathlib import Path

from tests.servers import FULL_TRAINING, Training, get, training, wait_until

PROMETHEUS = {"X-Prometheus-Scrape-Timeout-Seconds": "2"}
"""What tells the endpoint that a Prometheus scrapes."""

LOADER_TRAINING = '''
"""Trains on a loader whose two forked workers fall asleep over their third item, and note their process ids."""
import os, sys, time
from pathlib import Path
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset
import otel_train

port, folder = int(sys.argv[1]), Path(sys.argv[2])

class Sleepy(Dataset):
    def __len__(self):
        return 1000
    def __getitem__(self, index):
        (folder / f"worker-{os.getpid()}").touch()
        if index >= 12:
            time.sleep(120)
        return torch.randn(8)

model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 4))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
monitor = otel_train.attach(model, optimizer, host="127.0.0.1", port=port, run="loader")
deadline = time.monotonic() + 60
while "hold" in sys.argv and not (folder / "go").exists() and time.monotonic() < deadline:  # until a client has connected
    time.sleep(0.02)
loader = DataLoader(Sleepy(), batch_size=2, num_workers=2, prefetch_factor=1, multiprocessing_context="fork")
for batch in monitor.data(loader):
    model(batch).square().mean().backward()
    optimizer.step()
    monitor.observe(tokens=len(batch))
'''

FORKING_TRAINING = '''
"""Trains, forks a child that trains on with the same objects, and goes on."""
import os, sys, time
from pathlib import Path
import torch
from torch import nn
import otel_train

torch.set_num_threads(1)
port, folder = int(sys.argv[1]), Path(sys.argv[2])
model = nn.Linear(8, 4)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
monitor = otel_train.attach(model, optimizer, host="127.0.0.1", port=port, run="forking")

def step(loss=1.0):
    model(torch.randn(4, 8)).square().mean().backward()
    optimizer.step()
    monitor.observe(loss=loss, tokens=10)

for _ in range(5):
    step()
monitor.flush()
child = os.fork()
if child == 0:
    try:
        for _ in range(50):
            step(777.0)
        assert monitor.flush()
        with monitor.phase("eval"):
            monitor.clip_grad_norm_(1.0)
        monitor.state_dict()
        monitor.close()
        (folder / f"child-{os.getpid()}").touch()
        time.sleep(60)
    finally:
        os._exit(0)
deadline = time.monotonic() + 60
while not (folder / "finish").exists() and time.monotonic() < deadline:
    time.sleep(0.02)
step()
monitor.flush()
(folder / "stepped").touch()
time.sleep(30)
'''

NO_NEW_THREADS = '''
"""Ends without close where no thread can be started any more, as with Python 3.12.1 while the interpreter shuts down."""
import atexit, sys, threading, time
from pathlib import Path
import torch
from torch import nn
import otel_train

port, folder = int(sys.argv[1]), Path(sys.argv[2])
model = nn.Linear(8, 4)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
monitor = otel_train.attach(model, optimizer, host="127.0.0.1", port=port, run="late")

def refuse(*args, **kwargs):
    raise RuntimeError("can't create new thread at interpreter shutdown")

starter = "_start_new_thread" if sys.version_info < (3, 13) else "_start_joinable_thread"
atexit.register(lambda: setattr(threading, starter, refuse))  # runs before what was registered earlier
deadline = time.monotonic() + 60
while not (folder / "finish").exists() and time.monotonic() < deadline:
    model(torch.randn(4, 8)).square().mean().backward()
    optimizer.step()
    time.sleep(0.02)
'''


def _listens(port: int) -> bool:
    """Say whether any process listens on a port of this machine, by the kernel's own table."""
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        with contextlib.suppress(FileNotFoundError):
            for line in Path(table).read_text().splitlines()[1:]:
                fields = line.split()
                if int(fields[1].rsplit(":", 1)[1], 16) == port and fields[3] == "0A":
                    return True
    return False


def _refuses(port: int) -> bool:
    try:
        socket.create_connection(("127.0.0.1", port), 1).close()
    except ConnectionRefusedError:
        return True
    return False


def _bind_as_a_restarted_training_does(port: int) -> None:
    with socket.socket() as again:
        again.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        again.bind(("127.0.0.1", port))
        again.listen()


def _is_alive(pid: int) -> bool:
    """Say whether a process runs (a zombie does not)."""
    with contextlib.suppress(FileNotFoundError):
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    return False


def _marked(folder: Path, word: str) -> list[int]:
    return [int(path.name.rpartition("-")[2]) for path in folder.glob(f"{word}-*")]


def _sockets(pid: int) -> set[str]:
    """Return the kernel's numbers of a process's sockets."""
    found = set()
    for entry in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(OSError):
            target = str(entry.readlink())
            if target.startswith("socket:["):
                found.add(target[8:-1])
    return found


def _tcp_sockets_of_port(port: int) -> set[str]:
    lines = Path("/proc/net/tcp").read_text().splitlines()[1:]
    return {fields[9] for fields in map(str.split, lines) if int(fields[1].rsplit(":", 1)[1], 16) == port}


@contextlib.contextmanager
def _ended_afterwards(folder: Path, word: str) -> Iterator[None]:
    """Kill the orphans of a test, by the process ids that they noted."""
    try:
        yield
    finally:
        for pid in _marked(folder, word):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


def _scrape_like_prometheus(run: Training) -> None:
    """Scrape twice, so that the endpoint knows that somebody stores its values."""
    for _ in range(2):
        get(run.url, PROMETHEUS)
        time.sleep(0.3)


def _saw_the_end(run: Training, seconds: float = 10.0) -> bool:
    """Scrape as Prometheus does until run_active is 0 or nobody answers."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        active = run.value("otel_train_run_active", PROMETHEUS)
        if active is None:
            return False
        if active == 0:
            return True
        time.sleep(0.1)
    return False


def test_workers_that_outlive_a_killed_training_hold_no_listener(tmp_path: Path) -> None:
    """Two forked DataLoader workers still run, and the port is refused and free all the same."""
    with _ended_afterwards(tmp_path, "worker"), training(tmp_path, LOADER_TRAINING) as run:
        run.wait_for_steps(2)
        wait_until(lambda: len(_marked(tmp_path, "worker")) == 2, 20, "two workers")
        workers = _marked(tmp_path, "worker")
        assert _listens(run.port)
        run.send(signal.SIGKILL)
        assert run.wait() == -signal.SIGKILL
        assert not _listens(run.port)
        assert all(_is_alive(pid) for pid in workers)
        assert _refuses(run.port)
        _bind_as_a_restarted_training_does(run.port)
        assert all(_is_alive(pid) for pid in workers)


def test_workers_do_not_hold_the_connection_of_a_prometheus(tmp_path: Path) -> None:
    """A connection that was kept alive when the workers were forked ends with the training; else the scraper waits in vain."""
    with _ended_afterwards(tmp_path, "worker"), training(tmp_path, LOADER_TRAINING, ["hold"]) as run:
        wait_until(lambda: run.value("otel_train_run_active") == 1, 60, "the endpoint answers")
        with socket.create_connection(("127.0.0.1", run.port), 5) as connection:
            connection.sendall(b"GET /-/healthy HTTP/1.1\r\nHost: x\r\n\r\n")
            assert connection.recv(1 << 16).startswith(b"HTTP/1.1 200")
            (tmp_path / "go").touch()
            wait_until(lambda: len(_marked(tmp_path, "worker")) == 2, 20, "two workers")
            workers = _marked(tmp_path, "worker")
            inherited = {pid: _sockets(pid) & _tcp_sockets_of_port(run.port) for pid in workers}
            run.send(signal.SIGKILL)
            run.wait()
            assert all(_is_alive(pid) for pid in workers)
            assert inherited == {pid: set() for pid in workers}
            connection.settimeout(2)
            with contextlib.suppress(ConnectionResetError):
                assert connection.recv(1) == b""


def test_a_forked_child_neither_serves_nor_counts(tmp_path: Path) -> None:
    """It trains on with the parent's objects without a trace, and holds no socket of the endpoint."""
    with _ended_afterwards(tmp_path, "child"), training(tmp_path, FORKING_TRAINING) as run:
        wait_until(lambda: bool(_marked(tmp_path, "child")), 60, f"the child is done: {run.said()}")
        (child,) = _marked(tmp_path, "child")
        assert _sockets(child) & _tcp_sockets_of_port(run.port) == set()
        assert run.value("otel_train_steps_total") == 5
        run.finish()
        wait_until((tmp_path / "stepped").exists, 20, "the parent's step")
        assert run.value("otel_train_steps_total") == 6
        assert run.value("otel_train_tokens_total") == 60
        assert run.value("otel_train_loss{") == 1.0
        assert run.value("otel_train_run_active") == 1
        run.send(signal.SIGKILL)
        run.wait()
        assert _is_alive(child)
        assert _refuses(run.port)
    assert run.said() == ""


def test_sigterm_ends_the_run_where_it_is_handled(tmp_path: Path) -> None:
    """With handle_sigterm the last scrape sees run_active 0, and the process still dies by the signal."""
    with training(tmp_path, FULL_TRAINING, ["sigterm"]) as run:
        run.wait_for_steps()
        _scrape_like_prometheus(run)
        run.send(signal.SIGTERM)
        assert _saw_the_end(run)
        assert run.wait() == -signal.SIGTERM
        assert _refuses(run.port)
    assert run.said() == ""


def test_sigterm_kills_at_once_where_it_is_not_handled(tmp_path: Path) -> None:
    """By default the signal is the user's: the process dies as it would without us."""
    with training(tmp_path, FULL_TRAINING) as run:
        run.wait_for_steps()
        _scrape_like_prometheus(run)
        began = time.monotonic()
        run.send(signal.SIGTERM)
        assert run.wait() == -signal.SIGTERM
        assert time.monotonic() - began < 2


def test_ctrl_c_ends_the_run(tmp_path: Path) -> None:
    """KeyboardInterrupt leaves the script without close; the last scrape sees run_active 0."""
    with training(tmp_path, FULL_TRAINING) as run:
        run.wait_for_steps()
        _scrape_like_prometheus(run)
        run.send(signal.SIGINT)
        assert _saw_the_end(run)
        assert run.wait() == -signal.SIGINT
    assert run.said().rstrip().endswith("KeyboardInterrupt")
    assert "otel_train" not in run.said().replace(str(tmp_path), "").partition("KeyboardInterrupt")[2]


def test_a_second_ctrl_c_ends_the_wait_for_a_scrape(tmp_path: Path) -> None:
    """Who wants to leave can leave."""
    with training(tmp_path, FULL_TRAINING) as run:
        run.wait_for_steps()
        get(run.url, {"X-Prometheus-Scrape-Timeout-Seconds": "15"})
        run.send(signal.SIGINT)
        wait_until(lambda: run.value("otel_train_run_active") == 0, 10, "the run has ended")
        began = time.monotonic()
        run.send(signal.SIGINT)
        run.wait()
        assert time.monotonic() - began < 4


def test_a_script_that_falls_over_ends_the_run(tmp_path: Path) -> None:
    """By an exception, without close: exit status and traceback stay, and the last scrape sees run_active 0."""
    with training(tmp_path, FULL_TRAINING, ["raise"]) as run:
        run.wait_for_steps()
        _scrape_like_prometheus(run)
        run.finish()
        assert _saw_the_end(run)
        assert run.wait() == 1
    assert run.said().rstrip().endswith("RuntimeError: the training fell over")


def test_the_run_ends_where_no_thread_can_be_started_any_more(tmp_path: Path) -> None:
    """With Python 3.12.1 that is so at exit: the last scrape is answered all the same, and nothing is printed."""
    with training(tmp_path, NO_NEW_THREADS) as run:
        run.wait_for_steps()
        _scrape_like_prometheus(run)
        run.finish()
        assert _saw_the_end(run)
        assert run.wait() == 0
    assert run.said() == ""
