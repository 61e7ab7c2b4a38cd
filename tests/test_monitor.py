"""Monitor: what users call in the loop, and what comes of it."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

import otel_train
from otel_train.catalog import activations as act
from otel_train.catalog import gradients, run, throughput
from otel_train.catalog import loss as loss_catalog
from otel_train.catalog import monitor as monitor_catalog
from otel_train.snapshot import HistogramValue, Snapshot
from otel_train.testing import capture
from tests import problems
from tests.problems import Gpt, Mlp


def sgd(model: torch.nn.Module) -> torch.optim.Optimizer:
    """Return the plainest optimizer."""
    return torch.optim.SGD(model.parameters(), lr=0.1)


def step_once(model: torch.nn.Module, optimizer: torch.optim.Optimizer, step: int = 0) -> torch.Tensor:
    """Make a step; return its loss."""
    optimizer.zero_grad()
    loss = problems.vector_loss(model, step)
    loss.backward()  # type: ignore[no-untyped-call]  # torch's
    optimizer.step()
    return loss


def durations(snapshot: Snapshot) -> HistogramValue:
    """Return the histogram of step durations."""
    (sample,) = snapshot.find(throughput.STEP_DURATION)
    assert isinstance(sample.value, HistogramValue)
    return sample.value


def errors(snapshot: Snapshot) -> float:
    """Return the number of failures."""
    return sum(s.value for s in snapshot.find(monitor_catalog.MONITOR_ERRORS) if isinstance(s.value, (int, float)))


@pytest.mark.parametrize("before", [False, True], ids=["after_the_step", "before_the_step"])
@pytest.mark.parametrize("as_tensor", [False, True], ids=["numbers", "tensors"])
def test_observed_losses_and_tokens_belong_to_the_step_they_were_seen_with(*, before: bool, as_tensor: bool) -> None:
    """Averaged over micro-batches, summed over the run; whether observe comes before optimizer.step or after it."""
    model = Mlp(hidden=16)
    optimizer = sgd(model)
    seen_losses: list[float] = []
    with capture(model, optimizer, every_n_steps=1) as (monitor, sink):
        for step in range(3):
            optimizer.zero_grad()
            losses = []
            for micro in range(2):
                loss = problems.vector_loss(model, 2 * step + micro)
                loss.backward()  # type: ignore[no-untyped-call]  # torch's
                losses.append(loss.item())
                if micro and not before:
                    optimizer.step()
                monitor.observe(loss=loss if as_tensor else loss.item(), tokens=torch.tensor(7) if as_tensor else 7, samples=32)
            if before:
                optimizer.step()
            snapshot = problems.seen(monitor, sink)
            seen_losses.append(sum(losses) / 2)
            assert snapshot.value(loss_catalog.LOSS) == pytest.approx(seen_losses[-1], rel=1e-9)
    weights = [0.99 ** (2 - i) for i in range(3)]
    smoothed = sum(w * value for w, value in zip(weights, seen_losses, strict=True)) / sum(weights)
    assert snapshot.value(loss_catalog.LOSS_SMOOTHED) == pytest.approx(smoothed, rel=1e-9)
    assert snapshot.value(run.STEPS) == 3
    assert snapshot.value(run.MICRO_BATCHES) == 6
    assert snapshot.value(throughput.TOKENS) == snapshot.value(run.TOKENS_SEEN) == 42
    assert snapshot.value(throughput.SAMPLES) == 192
    assert (snapshot.value(throughput.TOKENS_PER_SECOND) or 0) > 0


def test_bad_observations_are_counted_and_do_not_raise() -> None:
    """A loss with many elements, or a word, is a mistake that must not end a training."""
    model = Mlp(hidden=16)
    optimizer = sgd(model)
    with capture(model, optimizer, every_n_steps=1) as (monitor, sink):
        step_once(model, optimizer)
        monitor.observe(loss=torch.ones(3))
        monitor.observe(loss="low")  # type: ignore[arg-type]  # the mistake
        monitor.observe(tokens=12)
        snapshot = problems.seen(monitor, sink)
    assert errors(snapshot) == 2
    assert snapshot.value(throughput.TOKENS) == 12
    assert not snapshot.find(loss_catalog.LOSS)


def test_a_phase_is_a_label_and_its_time_is_no_step_time() -> None:
    """While evaluation runs the phase says so; the step after it is as long as a step."""
    model = Mlp(hidden=16)
    optimizer = sgd(model)
    with capture(model, optimizer, every_n_steps=1) as (monitor, sink):
        step_once(model, optimizer)
        assert [s.labels for s in problems.seen(monitor, sink).find(run.PHASE)] == [("train",)]
        with monitor.phase("eval"):
            time.sleep(0.3)
            assert [s.labels for s in problems.seen(monitor, sink).find(run.PHASE)] == [("eval",)]
            with monitor.phase("checkpoint"):
                time.sleep(0.3)
                assert [s.labels for s in problems.seen(monitor, sink).find(run.PHASE)] == [("checkpoint",)]
            assert [s.labels for s in problems.seen(monitor, sink).find(run.PHASE)] == [("eval",)]
        step_once(model, optimizer)
        snapshot = problems.seen(monitor, sink)
        assert [s.labels for s in snapshot.find(run.PHASE)] == [("train",)]
        assert sum(durations(snapshot).counts) == 1
        assert durations(snapshot).total < 0.3
        # and time outside of phases is step time
        time.sleep(0.3)
        step_once(model, optimizer)
        assert durations(problems.seen(monitor, sink)).total >= 0.3


def test_a_phase_that_is_left_by_an_exception_ends() -> None:
    """Whatever happens in it, what comes after it is training."""
    model = Mlp(hidden=16)
    optimizer = sgd(model)
    with capture(model, optimizer, every_n_steps=1) as (monitor, sink):
        with pytest.raises(ZeroDivisionError), monitor.phase("eval"):
            raise ZeroDivisionError
        step_once(model, optimizer)
        snapshot = problems.seen(monitor, sink)
    assert [s.labels for s in snapshot.find(run.PHASE)] == [("train",)]
    assert snapshot.find(act.LAYER_ACTIVATION_MEAN)


def test_the_phase_train_is_training() -> None:
    """Its time counts as step time, and its activations are measured: within another phase and on its own."""
    model = Mlp(hidden=16)
    optimizer = sgd(model)
    with capture(model, optimizer, every_n_steps=1) as (monitor, sink):
        step_once(model, optimizer)
        with monitor.phase("train"):
            time.sleep(0.3)
        step_once(model, optimizer)
        snapshot = problems.seen(monitor, sink)
    assert snapshot.find(act.LAYER_ACTIVATION_MEAN)
    assert durations(snapshot).total >= 0.3


def test_steps_made_in_another_phase_do_not_shorten_the_step_after_it() -> None:
    """A phase with steps of its own, then a step of 0.3 s: its time is its own, and not what is left of it after the phase's."""
    model = Mlp(hidden=16)
    optimizer = sgd(model)
    with capture(model, optimizer, every_n_steps=1) as (monitor, sink):
        step_once(model, optimizer)
        with monitor.phase("finetune"):
            for _ in range(2):
                time.sleep(0.3)
                step_once(model, optimizer)
        before = durations(problems.seen(monitor, sink)).total
        time.sleep(0.3)
        step_once(model, optimizer)
        after = durations(problems.seen(monitor, sink)).total
    assert after - before >= 0.3


def test_phases_are_few() -> None:
    """A name made of the step's number does not make a series a step."""
    model = Mlp(hidden=16)
    with capture(model, sgd(model)) as (monitor, sink):
        for i in range(40):
            with monitor.phase(f"eval-{i}"):
                (sample,) = problems.seen(monitor, sink).find(run.PHASE)
        assert sample.labels == ("other",)
        assert len({s.labels for snapshot in sink.snapshots for s in snapshot.find(run.PHASE)}) <= 17


def slow_batches() -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Return three batches."""
    return [problems.vector_batch(step) for step in range(3)]


class Slow:
    """A loader that takes its time."""

    batch_size = 32

    def __len__(self) -> int:
        return 3

    def __iter__(self) -> object:
        for batch in slow_batches():
            time.sleep(0.1)
            yield batch


def test_data_measures_waits_and_is_the_loader_otherwise() -> None:
    """Length, attributes and batches are the loader's; the wait for each batch is counted, and not the work between."""
    model = Mlp(hidden=16)
    optimizer = sgd(model)
    with capture(model, optimizer, every_n_steps=1) as (monitor, sink):
        loader: Any = monitor.data(Slow())  # type: ignore[arg-type]  # only __getitem__ and __len__
        assert len(loader) == 3
        assert loader.batch_size == 32
        for _ in range(2):
            for batch, expected in zip(loader, slow_batches(), strict=True):
                assert torch.equal(batch[0], expected[0])
                step_once(model, optimizer)
                time.sleep(0.2)
        snapshot = problems.seen(monitor, sink)
    waited = snapshot.value(throughput.DATA_WAIT_SECONDS)
    assert waited is not None
    assert 0.6 <= waited < 1.2
    assert snapshot.value(run.STEPS) == 6


def test_data_takes_a_data_loader_and_a_generator() -> None:
    """Torch's loader, and something without a length, which says so as Python does."""
    model = Mlp(hidden=16)
    with capture(model, sgd(model)) as (monitor, _):
        loader = DataLoader(TensorDataset(torch.arange(10)), batch_size=4)
        assert len(monitor.data(loader)) == 3
        assert [len(batch[0]) for batch in monitor.data(loader)] == [4, 4, 2]
        assert monitor.data(loader).batch_size == 4
        generator = (i for i in range(3))
        with pytest.raises(TypeError, match=r"object of type 'generator' has no len\(\)"):
            len(monitor.data(generator))
        assert list(monitor.data(generator)) == [0, 1, 2]


def test_the_state_goes_on_after_a_restart_and_counters_start_anew() -> None:
    """Global step and tokens continue; what counts in this process starts at 0; the resume is counted."""
    model = Mlp(hidden=16)
    optimizer = sgd(model)
    with capture(model, optimizer, every_n_steps=1) as (monitor, _):
        for step in range(3):
            step_once(model, optimizer, step)
            monitor.observe(tokens=10)
        state = monitor.state_dict()
    assert (state["step"], state["tokens_seen"]) == (3, 30)
    with capture(model, optimizer, every_n_steps=1) as (monitor, sink):
        monitor.load_state_dict(state)
        snapshot = problems.seen(monitor, sink)
        assert snapshot.value(run.STEP) == 3
        assert snapshot.value(run.RESUMES) == 1
        step_once(model, optimizer)
        monitor.observe(tokens=10)
        snapshot = problems.seen(monitor, sink)
    assert (snapshot.value(run.STEP), snapshot.value(run.SAMPLED_STEP), snapshot.value(run.STEPS)) == (4, 4, 1)
    assert (snapshot.value(run.TOKENS_SEEN), snapshot.value(throughput.TOKENS)) == (40, 10)


@pytest.mark.parametrize("state", [{}, {"step": 1}, {"step": "x", "tokens_seen": 0}, {"step": None, "tokens_seen": 0}])
def test_a_state_that_is_none_is_refused(state: dict[str, int]) -> None:
    """With one line that says what was expected."""
    model = Mlp(hidden=16)
    message = r"expected what Monitor.state_dict returned \(step, tokens_seen\), got \{"
    with capture(model, sgd(model)) as (monitor, _), pytest.raises(otel_train.ConfigError, match=message):
        monitor.load_state_dict(state)


def test_every_counter_is_there_before_the_first_step() -> None:
    """At 0, so that the first increase is seen; gauges of steps that did not happen are not there."""
    model = Mlp(hidden=16)
    with capture(model, sgd(model)) as (monitor, sink):
        snapshot = problems.seen(monitor, sink)
    for spec in (run.STEPS, run.MICRO_BATCHES, run.SKIPPED_STEPS, run.RESUMES, gradients.CLIPPED_STEPS, throughput.TOKENS):
        assert snapshot.value(spec) == 0
    for absent in (run.SAMPLED_STEP, run.LAST_STEP_TIMESTAMP, loss_catalog.LOSS, gradients.GRAD_NORM, run.TOKENS_SEEN):
        assert not snapshot.find(absent)
    assert snapshot.value(run.RUN_ACTIVE) == 1


def test_facts_of_the_run_are_exported() -> None:
    """Model, precision with autocast, planned steps, coverage, time of the last step."""
    model = Gpt(width=32)
    optimizer = sgd(model)
    began = time.time()
    with capture(model, optimizer, every_n_steps=4, planned_steps=100, warmup_steps=10) as (monitor, sink):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = problems.text_loss(model, problems.byte_ids(), 0, batch=2)
        loss.backward()  # type: ignore[no-untyped-call]  # torch's
        optimizer.step()
        snapshot = problems.seen(monitor, sink)
    (info,) = snapshot.find(run.RUN_INFO)
    labels = dict(zip(info.spec.labels, info.labels, strict=True))
    assert labels["model"] == "Gpt"
    assert labels["precision"] == "float32, autocast bfloat16"
    assert labels["update_mode"] == "sampled"
    assert labels["torch_version"] == torch.__version__
    assert snapshot.value(run.PLANNED_STEPS) == 100
    assert snapshot.value(run.CONFIGURED_WARMUP_STEPS) == 10
    assert snapshot.value(monitor_catalog.EVERY_N_STEPS) == 4
    total = sum(p.numel() for p in model.parameters())
    assert snapshot.value(monitor_catalog.TRAINABLE_PARAMETERS) == snapshot.value(monitor_catalog.MONITORED_PARAMETERS) == total
    assert began <= (snapshot.value(run.LAST_STEP_TIMESTAMP) or 0) <= time.time()
    assert errors(snapshot) == 0


def test_a_falling_loss_scale_is_a_skipped_step() -> None:
    """A GradScaler that left the step out halves its scale: the step is counted as skipped, not as made."""
    model = Mlp(hidden=16)
    optimizer = sgd(model)
    with capture(model, optimizer, every_n_steps=1) as (monitor, sink):
        step_once(model, optimizer)
        monitor.observe(loss_scale=1024.0)
        problems.vector_loss(model, 1).backward()  # type: ignore[no-untyped-call]  # torch's
        monitor.observe(loss_scale=512.0)
        step_once(model, optimizer)
        monitor.observe(loss_scale=512.0)
        snapshot = problems.seen(monitor, sink)
    assert snapshot.value(run.STEPS) == snapshot.value(run.STEP) == 2
    assert snapshot.value(run.SKIPPED_STEPS) == 1
    assert snapshot.value(loss_catalog.LOSS_SCALE) == 512.0


def test_a_notebook_shows_the_monitor() -> None:
    """Its representation links to the page while it runs."""
    model = Mlp(hidden=16)
    optimizer = sgd(model)
    monitor = otel_train.attach(model, optimizer, port=0)
    step_once(model, optimizer)
    assert monitor.flush()
    assert monitor.url is not None
    assert monitor.url in monitor._repr_html_()
    assert monitor.url in repr(monitor)
    monitor.close()
    assert monitor.url not in monitor._repr_html_()
    assert "closed" in repr(monitor)


def test_the_registry_can_be_mounted_elsewhere() -> None:
    """It has the same series, and prometheus_client's default registry stays as it was."""
    import prometheus_client

    before = {metric.name for metric in prometheus_client.REGISTRY.collect()}
    model = Mlp(hidden=16)
    optimizer = sgd(model)
    with capture(model, optimizer, run="r") as (monitor, sink):
        step_once(model, optimizer)
        problems.seen(monitor, sink)
        assert monitor.registry.get_sample_value("otel_train_steps_total", {"run": "r", "rank": "0"}) == 1
    assert {metric.name for metric in prometheus_client.REGISTRY.collect()} == before


def test_steps_that_the_monitors_thread_could_not_take_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is lost in silence: the oldest step is dropped for a new one, and shows as an error of the export."""
    model = Mlp(hidden=16)
    optimizer = sgd(model)
    with capture(model, optimizer) as (monitor, sink):
        monkeypatch.setattr(monitor._worker, "_limit", 2)
        monkeypatch.setattr(monitor._worker, "_period", 0.0)
        with monitor._worker._changed:  # the thread cannot take anything now
            for _ in range(5):
                step_once(model, optimizer)
            monitor._attachment.recorder.close_step()  # type: ignore[union-attr]  # it is attached
        snapshot = problems.seen(monitor, sink)
    assert snapshot.value(run.STEPS) == 2
    assert snapshot.value(monitor_catalog.MONITOR_ERRORS, part="export") == 3


def test_evaluation_says_nothing_of_the_training() -> None:
    """Waits and losses within another phase are not those of a step."""
    model = Mlp(hidden=16)
    optimizer = sgd(model)
    with capture(model, optimizer, every_n_steps=1) as (monitor, sink):
        monitor.observe(loss=step_once(model, optimizer))
        expected = problems.seen(monitor, sink).value(loss_catalog.LOSS)
        with monitor.phase("eval"):
            monitor.waited(3.0)
            monitor.observe(loss=99.0, tokens=1000)
        snapshot = problems.seen(monitor, sink)
    assert snapshot.value(loss_catalog.LOSS) == expected
    assert snapshot.value(throughput.DATA_WAIT_SECONDS) == 0
    assert snapshot.value(throughput.TOKENS) == 0


def test_the_default_device_does_not_matter() -> None:
    """A context that makes tensors elsewhere, as models are initialised under, does not reach ours."""
    model = Mlp(hidden=16)
    optimizer = sgd(model)
    with torch.device("meta"), capture(model, optimizer, every_n_steps=1) as (monitor, sink):
        with torch.device("cpu"):
            step_once(model, optimizer)
        snapshot = problems.seen(monitor, sink)
    assert (snapshot.value(monitor_catalog.MONITORED_PARAMETERS) or 0) > 0
