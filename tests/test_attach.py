"""attach: what it takes, what it refuses and how, and that a refusal leaves nothing behind."""

from __future__ import annotations

import contextlib
import gc
import logging
import pathlib
import socket
import threading
import time
import urllib.request
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import otel_train
from otel_train.catalog import CATALOG, run, updates
from otel_train.config import MonitorConfig
from otel_train.testing import capture
from tests import problems
from tests.problems import Mlp


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    """Return the plainest optimizer."""
    return torch.optim.SGD(model.parameters(), lr=0.1)


def frozen() -> nn.Module:
    """Return a model of which nothing trains."""
    return Mlp(hidden=16).requires_grad_(requires_grad=False)


class DeepSpeedEngine(nn.Module):
    """Has the name of what cannot be monitored."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 2)


class NotAnOptimizer:
    """Steps, but is none of torch's."""

    def step(self) -> None:
        """Do nothing."""


Case = tuple[Callable[[], Any], Callable[[Any], Any], dict[str, Any], str]


def mlp() -> nn.Module:
    """Return a small model."""
    return Mlp(hidden=16)


def other(model: nn.Module) -> torch.optim.Optimizer:
    """Return the optimizer of another model."""
    del model
    return sgd(Mlp(hidden=16))


CASES: dict[str, Case] = {
    "foreign_optimizer": (mlp, other, {}, r"expected an optimizer that holds parameters of this model, but SGD holds none"),
    "foreign_optimizer_in_mapping": (
        mlp, lambda m: {"main": sgd(m), "heads": other(m)}, {}, r"parameters of this model, but heads holds none",
    ),
    "no_optimizers": (mlp, lambda _: [], {}, r"expected an optimizer.* got an empty collection"),
    "unknown_setting": (mlp, sgd, {"every_n_step": 1}, r"unknown setting 'every_n_step'; did you mean 'every_n_steps'\?"),
    "unlike_any_setting": (mlp, sgd, {"xyzzy": 1}, r"unknown setting 'xyzzy'; settings are: .*every_n_steps"),
    "every_0_steps": (mlp, sgd, {"every_n_steps": 0}, r"every_n_steps: expected an integer of at least 1, got 0"),
    "every_half_step": (mlp, sgd, {"every_n_steps": 0.5}, r"every_n_steps: expected an integer of at least 1, got 0\.5"),
    "max_layers": (mlp, sgd, {"max_layers": -1}, r"max_layers: expected an integer of at least 1, got -1"),
    "no_such_activation": (mlp, sgd, {"activations": "blocks.*.act"}, r"activations: no module matches 'blocks\.\*\.act'; .*'last'"),
    "one_of_two_patterns": (mlp, sgd, {"activations": ("act", "gelu*")}, r"activations: no module matches 'gelu\*'"),
    "bad_activations": (mlp, sgd, {"activations": 3}, r"activations: expected True, False or patterns .*got 3"),
    "layers_none": (mlp, sgd, {"layers": lambda _: None}, r"layers: the callable returned None for every.*'first\.weight'"),
    "layers_word": (mlp, sgd, {"layers": "modules"}, r"layers: expected 'module', 'block', 'parameter' or a callable, got 'modules'"),
    "no_parameters": (nn.ReLU, lambda _: None, {}, r"expected a model with trainable parameters, got ReLU"),
    "no_parameters_with_optimizer": (nn.ReLU, other, {}, r"expected a model with trainable parameters, got ReLU"),
    "all_frozen": (frozen, lambda _: None, {}, r"expected a model with trainable parameters, got Mlp with none"),
    "all_frozen_with_optimizer": (frozen, sgd, {}, r"expected a model with trainable parameters, got Mlp with none"),
    "data_parallel": (lambda: nn.DataParallel(mlp()), sgd, {}, r"got nn\.DataParallel.*use DistributedDataParallel"),
    "deepspeed": (DeepSpeedEngine, sgd, {}, r"expected an unwrapped model, got a DeepSpeed engine"),
    "no_module": (lambda: "model", lambda _: None, {}, r"expected a torch\.nn\.Module as model, got str"),
    "module_class": (lambda: Mlp, lambda _: None, {}, r"expected a torch\.nn\.Module as model, got type"),
    "no_torch_optimizer": (mlp, lambda _: NotAnOptimizer(), {}, r"expected a torch\.optim\.Optimizer, got NotAnOptimizer"),
    "optimizer_class": (mlp, lambda _: torch.optim.SGD, {}, r"expected a torch\.optim\.Optimizer, got type"),
    "port_too_large": (mlp, sgd, {"port": 65536}, r"port: expected a port from 0 to 65535 or None, got 65536"),
    "port_negative": (mlp, sgd, {"port": -1}, r"port: expected .*got -1"),
    "port_text": (mlp, sgd, {"port": "9464"}, r"port: expected .*got '9464'"),
    "kinds_unknown": (mlp, sgd, {"kinds": ("matrix", "bias")}, r"kinds: expected one or more of 'matrix'.*got \('matrix', 'bias'\)"),
    "kinds_empty": (mlp, sgd, {"kinds": ()}, r"kinds: expected one or more of 'matrix'.*got \(\)"),
    "kinds_number": (mlp, sgd, {"kinds": 3}, r"kinds: expected one or more of 'matrix'.*got 3"),
    "updates_unknown": (mlp, sgd, {"updates": "sometimes"}, r"updates: expected 'sampled', 'exact' or 'off', got 'sometimes'"),
    "histograms_unknown": (mlp, sgd, {"histograms": True}, r"histograms: expected 'block', 'layer' or 'off', got True"),
    "peak_flops": (mlp, sgd, {"peak_flops": 0}, r"peak_flops: expected a positive number or None, got 0"),
    "label_reserved": (mlp, sgd, {"labels": {"run": "x"}}, r"labels: 'run' is a label of otel-train"),
    "label_name": (mlp, sgd, {"labels": {"my team": "x"}}, r"labels: expected a mapping of Prometheus label names to strings"),
    "label_value": (mlp, sgd, {"labels": {"team": 3}}, r"labels: expected a mapping of Prometheus label names to strings"),
    "labels_text": (mlp, sgd, {"labels": "team=vision"}, r"labels: expected a mapping of Prometheus label names to strings.*got"),
    "sink": (mlp, sgd, {"sinks": [print]}, r"sinks: expected objects with publish and close, got builtin_function_or_method"),
    "config": (mlp, sgd, {"config": {"port": 0}}, r"config: expected a MonitorConfig, got dict"),
}  # fmt: skip


def our_threads() -> set[threading.Thread]:
    """Return our threads that live."""
    return {thread for thread in threading.enumerate() if thread.name.startswith("otel-train")}


def listening() -> set[str]:
    """Return the inodes of this process' listening sockets; empty where there is no /proc."""
    found = set()
    for name in ("/proc/self/net/tcp", "/proc/self/net/tcp6"):
        try:
            with open(name) as table:  # noqa: PTH123  # not a regular file
                rows = [line.split() for line in table.readlines()[1:]]
        except OSError:
            continue
        found |= {f"socket:[{row[9]}]" for row in rows if row[3] == "0A"}
    return found & _open_files()


def _open_files() -> set[str]:
    found = set()
    for link in pathlib.Path("/proc/self/fd").glob("*"):
        with contextlib.suppress(OSError):  # what listed them is closed again
            found.add(str(link.readlink()))
    return found


def test_a_socket_that_stays_is_seen() -> None:
    """What the next test relies on."""
    before = listening()
    with socket.create_server(("127.0.0.1", 0)):
        assert len(listening() - before) == 1


@pytest.mark.parametrize("case", CASES)
def test_a_refusal_says_what_was_expected_and_leaves_nothing_behind(case: str) -> None:
    """One line, a ValueError of ours; no hook, no thread, no listening socket, and a right call works afterwards."""
    make_model, make_optimizer, settings, message = CASES[case]
    model = make_model()
    optimizer = make_optimizer(model) if case != "data_parallel" else sgd(model.module)
    sockets, threads = listening(), our_threads()
    with pytest.raises(ValueError, match=message) as caught:
        otel_train.attach(model, optimizer, **{"port": 0, **settings})
    assert isinstance(caught.value, (otel_train.ConfigError, otel_train.AttachError))
    assert "\n" not in str(caught.value)
    assert caught.value.__cause__ is None
    assert our_threads() <= threads
    assert listening() <= sockets
    if isinstance(model, nn.Module):
        assert sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules()) == 0
    if isinstance(optimizer, torch.optim.Optimizer):
        assert not optimizer._optimizer_step_pre_hooks
        assert not optimizer._optimizer_step_post_hooks


@pytest.mark.parametrize("name", sorted({label for spec in CATALOG.values() for label in spec.labels} | {"run", "rank", "le"}))
def test_no_label_of_a_metric_can_be_taken_as_a_constant_label(name: str) -> None:
    """Else one of both would silently lose: every label of the catalog is refused."""
    model = mlp()
    with pytest.raises(otel_train.ConfigError, match=rf"labels: '{name}' is a label"):
        otel_train.attach(model, sgd(model), port=None, labels={name: "x"}).close()


def test_a_refused_second_attach_leaves_the_first_monitor_running() -> None:
    """A typing error in the second call must not end the measurement that goes on."""
    model = Mlp(hidden=16)
    optimizer = sgd(model)
    with capture(model, optimizer, every_n_steps=1) as (monitor, sink):
        with pytest.raises(otel_train.AttachError):
            otel_train.attach(model, optimizer, port=None, activations="nothing.*")
        problems.vector_loss(model, 0).backward()  # type: ignore[no-untyped-call]  # torch's
        optimizer.step()
        snapshot = problems.seen(monitor, sink)
        assert snapshot.value(run.RUN_ACTIVE) == 1
        assert snapshot.value(run.STEPS) == 1


class Circular:
    """Has itself as its inner optimizer."""

    @property
    def optimizer(self) -> Circular:
        """Return itself."""
        return self


@pytest.mark.timeout(10)
def test_a_wrapper_that_wraps_itself_is_refused_and_does_not_hang() -> None:
    """Unwrapping ends: at an object that was seen before, too."""
    with pytest.raises(otel_train.AttachError, match=r"expected a torch\.optim\.Optimizer, got Circular"):
        otel_train.attach(mlp(), Circular(), port=None)  # type: ignore[arg-type]  # the mistake


def free_port() -> int:
    """Return a port that nothing listens on."""
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        port: int = server.getsockname()[1]
    return port


@pytest.mark.parametrize("taken", [False, True], ids=["free", "taken"])
@pytest.mark.parametrize("local_rank", [0, 1])
def test_attaching_again_keeps_the_port_each_time(local_rank: int, monkeypatch: pytest.MonkeyPatch, *, taken: bool) -> None:
    """Whether it was the one asked for or the free one that replaced it, for the third monitor as for the second, on every rank."""
    monkeypatch.setenv("LOCAL_RANK", str(local_rank))
    model = Mlp(hidden=16)
    optimizer = sgd(model)
    asked = free_port()
    with socket.socket() as other_server:
        if taken:
            other_server.bind(("127.0.0.1", asked + local_rank))
            other_server.listen()
        ports = []
        for _ in range(3):
            monitor = otel_train.attach(model, optimizer, port=asked)
            ports.append(monitor.port)
            assert urllib.request.urlopen(f"{monitor.url}-/healthy", timeout=10).status == 200
        monitor.close()
    assert len(set(ports)) == 1
    assert (ports[0] == asked + local_rank) == (not taken)


def test_attaching_again_with_any_free_port_keeps_the_one_that_was_found() -> None:
    """Port 0 means any: the one that a Prometheus already scrapes is as good as any."""
    model = Mlp(hidden=16)
    first = otel_train.attach(model, sgd(model), port=0)
    second = otel_train.attach(model, sgd(model), port=0)
    second.close()
    assert second.port == first.port


def test_a_taken_port_falls_back_to_a_free_one_and_is_said(caplog: pytest.LogCaptureFixture) -> None:
    """A port never stops a training."""
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        server.listen()
        port = server.getsockname()[1]
        model = Mlp(hidden=16)
        with caplog.at_level(logging.WARNING, "otel_train"), otel_train.attach(model, sgd(model), port=port) as monitor:
            assert monitor.port not in (None, port)
    assert f"port {port} is taken" in caplog.text


def test_otel_sdk_disabled_switches_everything_off(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every call still works and does nothing of ours; settings are checked all the same."""
    monkeypatch.setenv("OTEL_SDK_DISABLED", "true")
    model = Mlp(hidden=16)
    optimizer = sgd(model)
    with pytest.raises(otel_train.ConfigError):
        otel_train.attach(model, optimizer, every_n_steps=0)
    sink, threads = otel_train.MemorySink(), our_threads()
    with otel_train.attach(model, optimizer, port=0, sinks=[sink]) as monitor:
        assert monitor.url is None
        assert monitor.port is None
        assert our_threads() <= threads
        assert sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules()) == 0
        for batch in monitor.data([0, 1]):
            problems.vector_loss(model, batch).backward()  # type: ignore[no-untyped-call]  # torch's
            assert monitor.clip_grad_norm_(1e-3) > 1e-3
            optimizer.step()
            monitor.observe(loss=1.0)
        with monitor.phase("eval"):
            pass
        assert monitor.flush()
        assert monitor.snapshot is None
        assert isinstance(monitor._repr_html_(), str)
        assert "closed" in repr(monitor)
        monitor.load_state_dict(monitor.state_dict())
    assert not sink.snapshots


def test_every_series_has_run_rank_and_the_constant_labels() -> None:
    """As given, on the page that Prometheus reads."""
    model = Mlp(hidden=16)
    optimizer = sgd(model)
    with otel_train.attach(
        model, optimizer, port=0, run="seven", labels={"team": 'vi"sion'}, every_n_steps=1, max_overhead=None
    ) as monitor:
        problems.vector_loss(model, 0).backward()  # type: ignore[no-untyped-call]  # torch's
        optimizer.step()
        assert monitor.flush()
        text = urllib.request.urlopen(f"{monitor.url}metrics", timeout=10).read().decode()
    lines = [line for line in text.splitlines() if line and not line.startswith("#")]
    assert len(lines) > 50
    for line in lines:
        assert 'run="seven"' in line
        assert 'rank="0"' in line
        assert r'team="vi\"sion"' in line


def test_settings_come_from_the_environment_and_keywords_win(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each setting has a variable; a keyword is nearer to the user."""
    for name, text in {
        "RUN": "from-env", "EVERY_N_STEPS": "2", "LABELS": "team=vision, site=b", "ACTIVATIONS": "act,tanh", "KINDS": "matrix,vector",
        "PORT": "none", "UPDATES": "off", "PLANNED_STEPS": "none", "PEAK_FLOPS": "1e12", "HANDLE_SIGTERM": "no",
    }.items():  # fmt: skip
        monkeypatch.setenv(f"OTEL_TRAIN_{name}", text)
    monkeypatch.setenv("OTEL_TRAIN_LABELS", "team=vision, place=b")
    model = Mlp(hidden=16)
    optimizer = sgd(model)
    sink = otel_train.MemorySink()
    with otel_train.attach(model, optimizer, sinks=[sink], updates="exact") as monitor:
        assert monitor.url is None
        for step in range(2):
            problems.vector_loss(model, step).backward()  # type: ignore[no-untyped-call]  # torch's
            optimizer.step()
        snapshot = problems.seen(monitor, sink)
    assert dict(snapshot.base_labels) == {"run": "from-env", "rank": "0", "team": "vision", "place": "b"}
    assert snapshot.value(run.SAMPLED_STEP) == 2
    assert {kind for _, kind in problems.layer_values(snapshot, updates.LAYER_UPDATE_RATIO)} == {"matrix", "vector"}
    (info,) = snapshot.find(run.RUN_INFO)
    assert info.labels[info.spec.labels.index("update_mode")] == "exact"


@pytest.mark.parametrize(
    ("variable", "text", "message"),
    [
        ("OTEL_TRAIN_EVERY_N_STEPS", "often", r"OTEL_TRAIN_EVERY_N_STEPS: expected an integer, got 'often'"),
        ("OTEL_TRAIN_EVERY_N_STEPS", "0", r"every_n_steps: expected an integer of at least 1, got 0"),
        ("OTEL_EXPORTER_PROMETHEUS_PORT", "http", r"OTEL_EXPORTER_PROMETHEUS_PORT: expected a number or none, got 'http'"),
        ("OTEL_TRAIN_HANDLE_SIGTERM", "perhaps", r"OTEL_TRAIN_HANDLE_SIGTERM: expected true or false, got 'perhaps'"),
        ("OTEL_TRAIN_LABELS", "vision", r"OTEL_TRAIN_LABELS: expected name=value,name=value, got 'vision'"),
    ],
)
def test_a_bad_variable_is_named(variable: str, text: str, message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The message names the variable, not only the setting."""
    monkeypatch.setenv(variable, text)
    model = mlp()
    with pytest.raises(otel_train.ConfigError, match=message):
        otel_train.attach(model, sgd(model)).close()


def test_otels_own_variables_give_host_and_port(monkeypatch: pytest.MonkeyPatch) -> None:
    """OTEL_EXPORTER_PROMETHEUS_HOST and _PORT are honoured; our own variable wins over them."""
    port = free_port()
    monkeypatch.setenv("OTEL_EXPORTER_PROMETHEUS_HOST", "127.0.0.1")
    monkeypatch.setenv("OTEL_EXPORTER_PROMETHEUS_PORT", str(port))
    model = mlp()
    with otel_train.attach(model, sgd(model)) as monitor:
        assert monitor.url == f"http://127.0.0.1:{port}/"
    monkeypatch.setenv("OTEL_TRAIN_PORT", "none")
    with otel_train.attach(model, sgd(model)) as monitor:
        assert monitor.url is None


def test_a_config_stands_in_for_the_environment_and_keywords_win_over_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """``config=`` is complete: variables are not read beside it."""
    monkeypatch.setenv("OTEL_TRAIN_EVERY_N_STEPS", "5")
    model = mlp()
    config = MonitorConfig(run="mine", every_n_steps=3)
    with otel_train.attach(model, sgd(model), config=config, port=None, run="other") as monitor:
        assert monitor.snapshot is not None
        assert dict(monitor.snapshot.base_labels)["run"] == "other"
        assert monitor.snapshot.value(otel_train.catalog.monitor.EVERY_N_STEPS) == 3


def chain(layers: int) -> nn.Module:
    """Return a chain of linear layers, each with an activation and a norm."""
    return nn.Sequential(*(nn.Sequential(nn.Linear(16, 16), nn.GELU(), nn.LayerNorm(16)) for _ in range(layers)))


def seconds_to_attach(layers: int) -> float:
    """Return the least of some processor times of ``attach``, which waits for the first Snapshot, with an endpoint."""
    found = []
    for _ in range(4):
        model = chain(layers)
        optimizer = torch.optim.AdamW(model.parameters())
        gc.collect()  # what other tests left is not ours
        began = time.process_time()
        monitor = otel_train.attach(model, optimizer, port=0, max_layers=2 * layers)
        found.append(time.process_time() - began)
        monitor.close()
    return min(found)


def test_attaching_to_300_layers_takes_at_most_200_ms_and_grows_with_their_number() -> None:
    """1,200 parameters and 300 activations: 45 to 55 ms on two cores; four times the layers take about four times as long."""
    many, four_times_as_many = seconds_to_attach(300), seconds_to_attach(1200)
    assert many < 0.200
    assert four_times_as_many < 6 * many, "16 would be quadratic"
