"""The life of an attachment: what it holds, what it lets go of, and what changes under it."""

from __future__ import annotations

import gc
import io
import socket
import threading
import time
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import otel_train
from otel_train.catalog import gradients, parameters, run, updates
from otel_train.catalog import monitor as monitor_catalog
from otel_train.monitor import Monitor
from otel_train.snapshot import Snapshot
from otel_train.testing import capture
from tests import problems
from tests.problems import Mlp

Threads = Callable[[], list[str]]


@pytest.fixture
def threads() -> Threads:
    """Return what tells the names of our threads that live and that did not live before the test."""
    before = set(threading.enumerate())
    return lambda: sorted(t.name for t in set(threading.enumerate()) - before if t.name.startswith("otel-train"))


def is_listening(port: int) -> bool:
    """Say whether something answers on a port of this machine."""
    with socket.socket() as client:
        client.settimeout(5)
        return client.connect_ex(("127.0.0.1", port)) == 0


def hooks_of(model: nn.Module) -> int:
    """Count the hooks on a model and everything in it."""
    return sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules())


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int = 1) -> None:
    """Make steps."""
    for step in range(steps):
        optimizer.zero_grad()
        problems.vector_loss(model, step).backward()  # type: ignore[no-untyped-call]  # torch's
        optimizer.step()


def layers_of(snapshot: Snapshot) -> set[str]:
    """Return the layers with an update ratio."""
    return {layer for layer, _ in problems.layer_values(snapshot, updates.LAYER_UPDATE_RATIO)}


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    """Return the plainest optimizer."""
    return torch.optim.SGD(model.parameters(), lr=0.1)


def soon(condition: Any, seconds: float = 5.0) -> bool:
    """Wait for a condition, for so long at most."""
    end = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > end:
            return False
        time.sleep(0.01)
    return True


def test_close_removes_every_hook_thread_and_socket_and_twice_is_harmless(threads: Threads) -> None:
    """Afterwards steps do nothing, and the model is as it was."""
    model = Mlp(hidden=16)
    optimizer = sgd(model)
    assert threads() == []
    monitor = otel_train.attach(model, optimizer, port=0, every_n_steps=1, max_overhead=None)
    assert hooks_of(model) == 2 + 2 * 2
    assert threads() == ["otel-train", "otel-train-endpoint"]
    assert monitor.port is not None
    assert is_listening(monitor.port)
    train(model, optimizer)
    monitor.close()
    monitor.close()
    assert hooks_of(model) == 0
    assert not optimizer._optimizer_step_pre_hooks
    assert not optimizer._optimizer_step_post_hooks
    assert soon(lambda: threads() == [])
    assert not is_listening(monitor.port)
    train(model, optimizer, 2)
    monitor.observe(loss=1.0)
    assert torch.is_tensor(monitor.clip_grad_norm_(1.0))
    with monitor.phase("eval"):
        assert list(monitor.data([1, 2])) == [1, 2]
    assert monitor.snapshot is not None
    assert monitor.snapshot.value(run.STEPS) == 1
    assert monitor.snapshot.value(run.RUN_ACTIVE) == 0


def test_a_flush_after_close_says_at_once_that_everything_is_published() -> None:
    """Which it is: `close` published the last step."""
    model = Mlp(hidden=16)
    optimizer = sgd(model)
    monitor = otel_train.attach(model, optimizer, port=None)
    train(model, optimizer)
    monitor.close()
    began = time.monotonic()
    assert monitor.flush()
    assert time.monotonic() - began < 1.0
    assert monitor.state_dict()["step"] == 1


def test_leaving_the_with_block_by_an_exception_ends_the_run_as_inactive() -> None:
    """The exception is the user's and goes on; the last Snapshot says that nothing trains."""
    model = Mlp(hidden=16)
    optimizer = sgd(model)

    def interrupted() -> None:
        train(model, optimizer)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt), capture(model, optimizer) as (_, sink):
        interrupted()
    assert sink.last is not None
    assert sink.last.value(run.RUN_ACTIVE) == 0
    assert sink.last.value(run.STEPS) == 1
    assert sink.closed
    assert hooks_of(model) == 0


def test_attaching_again_replaces_the_monitor(threads: Threads) -> None:
    """Values are not counted twice, and the first monitor has ended."""
    model = Mlp(hidden=16)
    optimizer = sgd(model)
    first = otel_train.attach(model, optimizer, port=None)
    with capture(model, optimizer, every_n_steps=1) as (monitor, sink):
        assert hooks_of(model) == 2 + 2 * 2
        assert first.snapshot is not None
        assert first.snapshot.value(run.RUN_ACTIVE) == 0
        train(model, optimizer, 2)
        assert problems.seen(monitor, sink).value(run.STEPS) == 2
        assert first.snapshot.value(run.STEPS) == 0
    assert threads() == []


CELL = """
model = problems.Mlp(hidden=16)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
monitor = otel_train.attach(model, optimizer, port=port, every_n_steps=1, max_overhead=None)
for step in range(3):
    optimizer.zero_grad()
    problems.vector_loss(model, step).backward()
    optimizer.step()
"""


def free_port() -> int:
    """Return a port that nothing listens on."""
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        port: int = server.getsockname()[1]
    return port


@pytest.mark.parametrize("keeps_monitor", [True, False])
def test_a_notebook_cell_executed_three_times_leaves_one_endpoint(threads: Threads, *, keeps_monitor: bool) -> None:
    """A new model each time: the old one is gone with its monitor, and the port is the one that was asked for."""
    port = free_port()
    cell = CELL if keeps_monitor else CELL.replace("monitor = ", "")
    namespace: dict[str, Any] = {"problems": problems, "torch": torch, "otel_train": otel_train, "port": port}
    for _ in range(3):
        exec(cell, namespace)  # noqa: S102  # as a notebook does
        gc.collect()
    assert soon(lambda: threads() == ["otel-train", "otel-train-endpoint"])
    assert is_listening(port) or not keeps_monitor
    namespace.clear()
    gc.collect()
    assert soon(lambda: threads() == [])
    assert not is_listening(port)


@pytest.mark.parametrize("keeps_monitor", [False, True])
@pytest.mark.parametrize("steps", [0, 3])
def test_the_model_and_its_parameters_are_freed_when_the_user_drops_them(
    steps: int, threads: Threads, *, keeps_monitor: bool
) -> None:
    """Whether the monitor is kept or not, and the monitor ends by itself."""
    model: Mlp | None = Mlp(hidden=16)
    assert model is not None
    optimizer: torch.optim.Optimizer | None = sgd(model)
    assert optimizer is not None
    monitor: Monitor | None = otel_train.attach(model, optimizer, port=None, every_n_steps=1, max_overhead=None)
    train(model, optimizer, steps)
    gone = weakref.ref(model), weakref.ref(model.first.weight), weakref.ref(model.act), weakref.ref(optimizer)
    model = optimizer = None
    if not keeps_monitor:
        monitor = None
    gc.collect()
    assert [reference() for reference in gone] == [None] * 4
    assert soon(lambda: threads() == [])
    if monitor is not None:
        assert monitor.snapshot is not None
        assert monitor.snapshot.value(run.RUN_ACTIVE) == 0
        assert monitor.snapshot.value(run.STEPS) == steps
        monitor.observe(loss=1.0)
        monitor.close()


class Dropping:
    """A sink that drops the last reference to the model in the monitor's own thread, as the garbage collector may."""

    def __init__(self) -> None:
        self.holds: list[nn.Module] = []
        self.armed = threading.Event()

    def publish(self, snapshot: Snapshot) -> None:
        """Take a Snapshot."""
        del snapshot
        if self.armed.is_set():
            self.holds.clear()
            gc.collect()

    def close(self) -> None:
        """Nothing to close."""


def test_a_model_that_dies_in_the_monitors_own_thread_ends_it_at_once(threads: Threads) -> None:
    """The collector runs in any thread: the monitor's own must not wait for itself."""
    sink = Dropping()
    model: Mlp | None = Mlp(hidden=16)
    assert model is not None
    sink.holds.append(model)
    monitor = otel_train.attach(model, port=None, sinks=[sink])
    gone = weakref.ref(model)
    model = None
    sink.armed.set()
    with monitor.phase("eval"):
        pass
    assert soon(lambda: gone() is None)
    assert soon(lambda: threads() == [], 3.0)
    assert monitor.snapshot is not None
    assert monitor.snapshot.value(run.RUN_ACTIVE) == 0


def test_without_an_optimizer_each_observe_is_a_step() -> None:
    """Gradients and updates are not measured; activations and the loss are."""
    model = Mlp(hidden=16)
    with capture(model, every_n_steps=1) as (monitor, sink):
        for step in range(3):
            loss = problems.vector_loss(model, step)
            monitor.observe(loss=loss)
        snapshot = problems.seen(monitor, sink)
    assert snapshot.value(run.STEPS) == 3
    assert snapshot.value(run.SAMPLED_STEP) == 3
    assert snapshot.find(otel_train.catalog.activations.LAYER_ACTIVATION_MEAN)
    assert not snapshot.find(updates.LAYER_UPDATE_RATIO)
    assert not snapshot.find(gradients.LAYER_GRAD_NORM)


def test_a_frozen_layer_has_no_series_and_one_that_is_thawed_gets_them() -> None:
    """Freezing and thawing during training is seen at the next sampled step."""
    model = Mlp(hidden=16)
    model.first.requires_grad_(requires_grad=False)
    optimizer = sgd(model)
    with capture(model, optimizer, every_n_steps=1) as (monitor, sink):
        train(model, optimizer)
        snapshot = problems.seen(monitor, sink)
        assert layers_of(snapshot) == {"norm", "second", "last"}
        assert all("first" not in sample.labels for sample in snapshot.samples)
        trainable = snapshot.value(monitor_catalog.TRAINABLE_PARAMETERS)
        model.first.requires_grad_(requires_grad=True)
        train(model, optimizer)
        snapshot = problems.seen(monitor, sink)
        assert layers_of(snapshot) == {"first", "norm", "second", "last"}
        grown = sum(p.numel() for p in model.first.parameters())
        assert snapshot.value(monitor_catalog.TRAINABLE_PARAMETERS) == (trainable or 0) + grown
        model.second.requires_grad_(requires_grad=False)
        train(model, optimizer)
        snapshot = problems.seen(monitor, sink)
        assert layers_of(snapshot) == {"first", "norm", "last"}
        for spec in (parameters.LAYER_PARAM_NORM, gradients.LAYER_GRAD_NORM, updates.LAYER_CHANGED_RATIO):
            assert "second" not in {layer for layer, _ in problems.layer_values(snapshot, spec)}
        assert sum(s.value for s in snapshot.find(monitor_catalog.MONITOR_ERRORS) if isinstance(s.value, (int, float))) == 0


def test_freezing_a_layer_does_not_rename_the_series_of_the_others() -> None:
    """`depth` is a label: the position in registration order stays, or every later layer would be another series."""
    model = Mlp(hidden=16)
    optimizer = sgd(model)
    with capture(model, optimizer, every_n_steps=1) as (monitor, sink):
        train(model, optimizer)
        before = {s.labels for s in problems.seen(monitor, sink).find(updates.LAYER_UPDATE_RATIO)}
        model.first.requires_grad_(requires_grad=False)
        train(model, optimizer)
        snapshot = problems.seen(monitor, sink)
    after = {s.labels for s in snapshot.find(updates.LAYER_UPDATE_RATIO)}
    assert after == {labels for labels in before if labels[0] != "first"}
    histograms = [s.labels[0] for s in snapshot.find(gradients.LAYER_GRAD_MAGNITUDE)]
    assert len(histograms) == len(set(histograms))


def test_parameters_added_to_an_optimizer_later_are_measured() -> None:
    """add_param_group, as gradual unfreezing does it: group and ratio are right from the next sampled step on."""
    model = Mlp(hidden=16)
    optimizer = torch.optim.SGD([*model.second.parameters(), *model.last.parameters()], lr=0.1)
    with capture(model, optimizer, every_n_steps=1, updates="exact") as (monitor, sink):
        train(model, optimizer)
        found = {s.labels[0]: (s.labels[3], s.value) for s in problems.seen(monitor, sink).find(updates.LAYER_UPDATE_RATIO)}
        assert found["first"] == ("none", 0.0)
        assert found["norm"] == ("none", 0.0)
        assert found["last"][0] == "0"
        optimizer.add_param_group({"params": list(model.first.parameters()), "lr": 0.01})
        model.zero_grad()
        problems.vector_loss(model, 7).backward()  # type: ignore[no-untyped-call]  # torch's
        before = problems.weights(model)
        optimizer.step()
        snapshot = problems.seen(monitor, sink)
        expected = problems.naive_ratios(model, before, problems.weights(model), ("matrix", "norm"))
    assert expected["first", "matrix"] > 0
    assert problems.layer_values(snapshot, updates.LAYER_UPDATE_RATIO) == pytest.approx(expected, rel=1e-6)
    assert {s.labels[0]: s.labels[3] for s in snapshot.find(updates.LAYER_UPDATE_RATIO)} == {
        "first": "1", "norm": "none", "second": "0", "last": "0",
    }  # fmt: skip


class Partly(Mlp):
    """Has a layer that its forward may leave out."""

    def __init__(self) -> None:
        super().__init__(hidden=16)
        self.third = nn.Linear(16, 16)
        self.uses_third = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map vectors to logits."""
        hidden = self.second(self.act(self.first(x)))
        logits: torch.Tensor = self.last(self.third(hidden) if self.uses_third else hidden)
        return logits


def test_a_parameter_without_a_gradient_has_no_update_series() -> None:
    """A layer that the forward leaves out shows nothing, is missing from the coverage, and comes when it takes part."""
    model = Partly()
    optimizer = sgd(model)
    with capture(model, optimizer, every_n_steps=1) as (monitor, sink):
        train(model, optimizer)
        snapshot = problems.seen(monitor, sink)
        assert layers_of(snapshot) == {"first", "second", "last"}
        unused = sum(p.numel() for p in [*model.third.parameters(), *model.norm.parameters()])
        total = sum(p.numel() for p in model.parameters())
        assert snapshot.value(monitor_catalog.TRAINABLE_PARAMETERS) == total
        assert snapshot.value(monitor_catalog.MONITORED_PARAMETERS) == total - unused
        model.uses_third = True
        train(model, optimizer)
        assert layers_of(problems.seen(monitor, sink)) == {"first", "second", "last", "third"}


def test_tied_weights_are_measured_once() -> None:
    """An embedding that is the head's matrix too: one series, and its elements count once."""
    model = problems.Gpt(width=32)
    model.head.weight = model.tokens.weight
    optimizer = sgd(model)
    with capture(model, optimizer, every_n_steps=1) as (monitor, sink):
        problems.text_loss(model, problems.byte_ids(), 0).backward()  # type: ignore[no-untyped-call]  # torch's
        norm = torch.cat([p.grad.double().view(-1) for p in model.parameters() if p.grad is not None]).norm().item()
        optimizer.step()
        snapshot = problems.seen(monitor, sink)
    assert "head" not in layers_of(snapshot)
    assert "tokens" in layers_of(snapshot)
    assert snapshot.value(gradients.GRAD_NORM, stage="post_clip") == pytest.approx(norm, rel=1e-6)
    assert snapshot.value(monitor_catalog.TRAINABLE_PARAMETERS) == sum(p.numel() for p in model.parameters())


def test_weights_loaded_from_a_checkpoint_are_measured_where_they_are() -> None:
    """load_state_dict, also with assign=True, which puts other parameters in place; the optimizer is told by its user."""
    model = Mlp(hidden=16)
    optimizer = sgd(model)
    buffer = io.BytesIO()
    torch.save(Mlp(hidden=16).state_dict(), buffer)
    buffer.seek(0)
    with capture(model, optimizer, every_n_steps=1, updates="exact") as (monitor, sink):
        model.load_state_dict(torch.load(buffer))
        problems.vector_loss(model, 0).backward()  # type: ignore[no-untyped-call]  # torch's
        before = problems.weights(model)
        optimizer.step()
        expected = problems.naive_ratios(model, before, problems.weights(model), ("matrix", "norm"))
        found = problems.layer_values(problems.seen(monitor, sink), updates.LAYER_UPDATE_RATIO)
    assert found == pytest.approx(expected, rel=1e-6)


def raising(*_: object, **__: object) -> Any:
    """Fail."""
    raise ZeroDivisionError("a bug of ours")


@pytest.mark.parametrize(
    ("target", "part"),
    [
        ("otel_train.stats.gradients.read_gradients", "gradients"),
        ("otel_train.stats.updates.read_whole", "updates"),
        ("otel_train.stats.updates.whole_sums", "updates"),
        ("otel_train.stats.activations.row_sums", "activations"),
        ("otel_train.hooks.recorder.read_out", "readout"),
        ("otel_train.hooks.recorder.named_groups", "loop"),
        ("otel_train.assembly.samples_of", "export"),
    ],
)
def test_a_failure_of_ours_is_counted_and_logged_once_and_does_not_reach_the_loop(
    target: str, part: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Steps go on as without a monitor, counted as ever; once the cause is gone, values are back and right."""
    model, bare = Mlp(hidden=16), Mlp(hidden=16)
    bare.load_state_dict(model.state_dict())
    optimizer = sgd(model)
    train(bare, sgd(bare), 3)
    with capture(model, optimizer, every_n_steps=1) as (monitor, sink):
        with monkeypatch.context() as patch:
            patch.setattr(target, raising)
            for step in range(3):
                optimizer.zero_grad()
                problems.vector_loss(model, step).backward()  # type: ignore[no-untyped-call]  # torch's
                optimizer.step()
                monitor.observe(loss=1.0)
                problems.seen(monitor, sink)
            snapshot = problems.seen(monitor, sink)
        found = snapshot.find(monitor_catalog.MONITOR_ERRORS)
        errors = {s.labels[0]: s.value for s in found if isinstance(s.value, (int, float))}
        assert errors[part] >= 3
        assert sum(value for name, value in errors.items() if name != part) == 0
        assert len([r for r in caplog.records if "a bug of ours" in r.getMessage()]) == 1
        assert all(torch.equal(a, b) for a, b in zip(model.parameters(), bare.parameters(), strict=True))
        assert snapshot.value(run.STEPS) == 3
        optimizer.zero_grad()
        problems.vector_loss(model, 9).backward()  # type: ignore[no-untyped-call]  # torch's
        before = problems.weights(model)
        optimizer.step()
        expected = problems.naive_ratios(model, before, problems.weights(model), ("matrix", "norm"))
        snapshot = problems.seen(monitor, sink)
        assert problems.layer_values(snapshot, updates.LAYER_UPDATE_RATIO) == pytest.approx(expected, rel=1e-6)
        assert snapshot.find(otel_train.catalog.activations.LAYER_ACTIVATION_MEAN)


def test_a_failed_measurement_leaves_no_older_values_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    """If step 2 could not be measured, its gauges are gone rather than those of step 1."""
    model = Mlp(hidden=16)
    optimizer = sgd(model)
    with capture(model, optimizer, every_n_steps=1) as (monitor, sink):
        train(model, optimizer)
        assert problems.seen(monitor, sink).find(updates.LAYER_UPDATE_RATIO)
        monkeypatch.setattr("otel_train.stats.updates.whole_sums", raising)
        train(model, optimizer)
        assert not problems.seen(monitor, sink).find(updates.LAYER_UPDATE_RATIO)


class Raising:
    """A sink of a user's, with a bug."""

    def publish(self, snapshot: Snapshot) -> None:
        """Fail."""
        del snapshot
        raise OSError("disk full")

    def close(self) -> None:
        """Fail."""
        raise OSError("disk full")


def test_a_sink_that_raises_hurts_neither_the_training_nor_the_other_sinks(threads: Threads) -> None:
    """It is counted; the sink after it gets every Snapshot."""
    model = Mlp(hidden=16)
    optimizer = sgd(model)
    sink = otel_train.MemorySink()
    with otel_train.attach(model, optimizer, port=None, sinks=[Raising(), sink]) as monitor:
        train(model, optimizer, 2)
        problems.seen(monitor, sink)
        snapshot = problems.seen(monitor, sink)
    assert snapshot.value(run.STEPS) == 2
    assert (snapshot.value(monitor_catalog.MONITOR_ERRORS, part="export") or 0) >= 1
    assert sink.closed
    assert threads() == []
