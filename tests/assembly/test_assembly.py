"""Step records to Snapshots, against sums made by hand."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest

from otel_train.assembly import Assembler, LiveState, RunFacts
from otel_train.assembly.state import RunState
from otel_train.budget import Pace
from otel_train.catalog import CATALOG, activations, gradients, loss, monitor, run, throughput, updates
from otel_train.records import (
    MAGNITUDE_EXPONENTS,
    ActivationReading,
    Coverage,
    GroupSettings,
    Layer,
    LayerSample,
    ParameterReading,
    ParameterSums,
    StepRecord,
)
from otel_train.snapshot import HistogramValue, Snapshot

PACE = Pace.regular(10)
FACTS = RunFacts(
    started_at=0.0,
    base_labels=(("run", "r"), ("rank", "0")), model="GPT", world_size=1, torch_version="2", version="0", update_mode="sampled",
    device="cpu", device_uuid="", local_rank=0, host="h", planned_steps=100, warmup_steps=10, peak_flops=1e6,
    peak_flops_source="given", parts=("loop", "export"),
)  # fmt: skip
STEP = StepRecord(
    finished_at=1000.0, duration=0.5, forward=0.1, data_wait=0.25, micro_batches=2, tokens=64, samples=4, sequence_length=32,
    skipped=False, losses=(2.0, 4.0), grad_norm=3.0, clipped=True, loss_scale=None,
    groups=(GroupSettings("AdamW", "0", 1e-4, 1e-3, 0.1, 0.9, 0.95, 1e-8),), precision="float32", sample=None,
)  # fmt: skip
SUMS = ParameterSums(
    elements=4, gradient=2.0, gradient_squared=9.0, weight_squared=16.0, nonfinite_gradients=0, nonfinite_weights=0,
    update_squared=0.0016, changed=3.0,
)  # fmt: skip
MATRIX = Layer("fc", 1, "matrix", "0")
NORM = Layer("norm", 0, "norm", "0")


def assemble(*records: StepRecord, live: LiveState | None = None, **facts: Any) -> Snapshot:
    """Add records and take a Snapshot; 10 FLOPs a token."""
    assembler = Assembler(replace(FACTS, **facts), lambda _: 10.0)
    for record in records:
        assembler.add(record)
    return assembler.snapshot(live or LiveState(PACE), 1234.0)


def sampled(*readings: ParameterReading, activations: tuple[ActivationReading, ...] = ()) -> StepRecord:
    """Return a step that was sampled."""
    return replace(STEP, sample=LayerSample(readings, activations, optimizers=frozenset({1})))


def test_a_step_counts_what_it_brought() -> None:
    """Two steps of two micro-batches."""
    shot = assemble(STEP, STEP)
    expected = {
        run.STEP: 2, run.STEPS: 2, run.MICRO_BATCHES: 4, run.TOKENS_SEEN: 128, throughput.TOKENS: 128, throughput.SAMPLES: 8,
        run.SKIPPED_STEPS: 0, gradients.CLIPPED_STEPS: 2, throughput.DATA_WAIT_SECONDS: 0.5, throughput.FORWARD_SECONDS: 0.2,
        throughput.MODEL_FLOPS: 1280.0, throughput.TOKENS_PER_SECOND: 128.0, throughput.MFU: 1280.0 / 1e6,
        loss.LOSS: 3.0, loss.LOSS_SMOOTHED: 3.0, run.LAST_STEP_TIMESTAMP: 1000.0, run.RUN_ACTIVE: 1,
    }  # fmt: skip
    assert {spec: pytest.approx(shot.value(spec)) for spec in expected} == expected


def test_ranks_that_work_on_the_same_tokens_count_them_once_and_share_the_mfu() -> None:
    """Two devices for one replica: half the MFU; the other rank has neither tokens nor FLOPs, and its own loss and times."""
    per_replica = (throughput.TOKENS, throughput.TOKENS_PER_SECOND, throughput.MODEL_FLOPS, throughput.MFU, run.TOKENS_SEEN)
    shots = []
    for leads in (True, False):
        facts = replace(FACTS, world_size=2, replica_ranks=2, leads_replica=leads)
        assembler = Assembler(facts, lambda _: 10.0)
        assembler.add(STEP)
        assembler.add(STEP)
        shots.append(assembler.snapshot(LiveState(PACE), 0.0))
    assert shots[0].value(throughput.MFU) == pytest.approx(1280.0 / 1e6 / 2)
    assert shots[0].value(throughput.TOKENS) == 128
    assert [shots[1].value(spec) for spec in per_replica] == [None] * 5
    assert shots[1].value(loss.LOSS) == shots[0].value(loss.LOSS)


def test_samples_stand_in_the_order_of_the_catalog() -> None:
    """Each metric's series together, so that an exposition is one pass."""
    shot = assemble(sampled(ParameterReading(MATRIX, MATRIX, SUMS)))
    order = [list(CATALOG.values()).index(sample.spec) for sample in shot.samples]
    assert order == sorted(order)


def test_a_skipped_step_did_not_happen() -> None:
    """It counts as skipped, moves no step, and clips nothing."""
    shot = assemble(STEP, replace(STEP, skipped=True))
    assert [shot.value(spec) for spec in (run.STEP, run.STEPS, run.SKIPPED_STEPS, gradients.CLIPPED_STEPS)] == [1, 1, 1, 1]


def test_counters_stand_at_zero_before_the_first_step() -> None:
    """The first event of a counter that was never there is invisible to increase()."""
    assembler = Assembler(FACTS, lambda _: None)
    assembler.cover(Coverage(10, 0, (MATRIX,), (("act", 2),)))
    shot = assembler.snapshot(LiveState(PACE), 0.0)
    assert {s.labels for s in shot.find(loss.LAYER_NONFINITE)} == {
        ("fc", "1", "gradient"), ("fc", "1", "parameter"), ("act", "2", "activation")
    }  # fmt: skip
    for spec in (run.STEPS, run.MICRO_BATCHES, run.SKIPPED_STEPS, throughput.TOKENS, run.RESUMES):
        assert shot.value(spec) == 0
    assert all(s.value == 0 for spec in (loss.NONFINITE, loss.LOSS_SPIKES, monitor.MONITOR_ERRORS) for s in shot.find(spec))


def test_what_does_not_exist_has_no_series() -> None:
    """Neither 0 nor NaN."""
    assembler = Assembler(replace(FACTS, planned_steps=None, warmup_steps=None, peak_flops=None), lambda _: None)
    assembler.add(replace(STEP, losses=(), tokens=0, duration=None, groups=()))
    shot = assembler.snapshot(LiveState(PACE), 0.0)
    absent = (
        run.PLANNED_STEPS, run.CONFIGURED_WARMUP_STEPS, run.TOKENS_SEEN, run.SAMPLED_STEP, loss.LOSS, loss.LOSS_SMOOTHED,
        loss.LOSS_SCALE, throughput.MFU, throughput.PEAK_FLOPS, throughput.TOKENS_PER_SECOND, throughput.MODEL_FLOPS,
        gradients.GRAD_NORM, updates.UPDATE_RATIO, monitor.MONITORED_PARAMETERS, run.LEARNING_RATE, throughput.MEMORY_PEAK,
    )  # fmt: skip
    assert [spec.name for spec in absent if shot.find(spec)] == []


def test_parameters_of_a_layer_add_up_as_sums_of_squares() -> None:
    """Two matrices of one module, one series."""
    other = replace(SUMS, elements=12, gradient=-6.0, gradient_squared=16.0, weight_squared=9.0, update_squared=0.0009, changed=4.0)
    shot = assemble(sampled(ParameterReading(MATRIX, None, SUMS), ParameterReading(MATRIX, None, other)))
    assert shot.value(gradients.LAYER_GRAD_NORM, layer="fc") == pytest.approx(5.0)
    assert shot.value(gradients.LAYER_GRAD_MEAN, layer="fc") == pytest.approx(-0.25)
    assert shot.value(gradients.LAYER_GRAD_STD, layer="fc") == pytest.approx(math.sqrt(25 / 16 - 0.0625))
    assert shot.value(updates.LAYER_UPDATE_RATIO, layer="fc") == pytest.approx(math.sqrt(0.0025 / 25))
    assert shot.value(updates.LAYER_CHANGED_RATIO, layer="fc") == pytest.approx(7 / 16)


def test_parameters_without_series_still_count_in_the_whole() -> None:
    """Biases have no series by default."""
    shot = assemble(
        sampled(ParameterReading(MATRIX, None, SUMS), ParameterReading(None, None, replace(SUMS, gradient_squared=16.0)))
    )
    assert shot.value(gradients.GRAD_NORM, stage="post_clip") == pytest.approx(5.0)
    assert shot.value(gradients.GRAD_NORM, stage="pre_clip") == 3.0
    assert shot.value(updates.UPDATE_RATIO) == pytest.approx(0.01)
    assert shot.value(monitor.MONITORED_PARAMETERS) == 8


def test_relative_speed_is_over_the_median_matrix() -> None:
    """Norms are compared with matrices, not the other way round."""
    layers = [Layer(f"m{i}", i, "matrix", "0") for i in range(3)] + [NORM]
    changes = [1e-6, 4e-6, 1.6e-5, 1e-4]
    readings = [
        ParameterReading(layer, None, replace(SUMS, update_squared=change, weight_squared=1.0))
        for layer, change in zip(layers, changes, strict=True)
    ]
    shot = assemble(sampled(*readings))
    speeds = {s.labels[0]: s.value for s in shot.find(updates.LAYER_RELATIVE_SPEED)}
    assert speeds == pytest.approx({"m0": 0.5, "m1": 1.0, "m2": 2.0, "norm": 5.0})


def test_a_layer_of_zeros_has_no_ratio_and_one_that_stands_still_has_zero() -> None:
    """LoRA's B starts at zero: the ratio would be infinite."""
    zeros = ParameterReading(Layer("lora", 0, "matrix", "0"), None, replace(SUMS, weight_squared=0.0))
    still = ParameterReading(MATRIX, None, replace(SUMS, update_squared=0.0, changed=0.0))
    shot = assemble(sampled(zeros, still))
    assert [(s.labels[0], s.value) for s in shot.find(updates.LAYER_UPDATE_RATIO)] == [("fc", 0.0)]


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_values_that_are_not_finite_are_shown_and_counted(bad: float) -> None:
    """They are the news."""
    broken = replace(SUMS, gradient=bad, gradient_squared=bad, update_squared=bad, nonfinite_gradients=2, nonfinite_weights=1)
    shot = assemble(STEP, replace(sampled(ParameterReading(MATRIX, None, broken)), losses=(bad, 1.0)))
    for spec in (loss.LOSS, loss.LOSS_SMOOTHED, gradients.LAYER_GRAD_NORM, gradients.LAYER_GRAD_STD, updates.LAYER_UPDATE_RATIO):
        value = shot.value(spec)
        assert value is not None
        assert not math.isfinite(value)
    counts = {s.labels[0]: s.value for s in shot.find(loss.NONFINITE)}
    assert counts == {"loss": 1, "gradient": 2, "activation": 0, "parameter": 1}
    assert {s.labels[2]: s.value for s in shot.find(loss.LAYER_NONFINITE)} == {"gradient": 2, "parameter": 1}


def test_the_smoothed_loss_recovers_after_a_nan() -> None:
    """One bad step must not freeze or poison it."""
    shot = assemble(replace(STEP, losses=(1.0,)), replace(STEP, losses=(math.nan,)), replace(STEP, losses=(1.0,)))
    assert shot.value(loss.LOSS_SMOOTHED) == pytest.approx(1.0)


def test_magnitudes_cumulate_over_sampled_steps() -> None:
    """Per block, each bin in whole elements."""
    bins = [0.4] * (len(MAGNITUDE_EXPONENTS) + 1)
    record = sampled(ParameterReading(MATRIX, NORM, replace(SUMS, magnitudes=tuple(bins), magnitude_sum=1.5)))
    shot = assemble(record, record)
    (sample,) = shot.find(gradients.LAYER_GRAD_MAGNITUDE)
    assert isinstance(sample.value, HistogramValue)
    assert sample.labels[0] == "norm"
    assert sample.value.total == 3.0
    assert sample.value.counts == (1,) * len(bins)  # 0.8 each
    buckets, count = sample.value.cumulated(gradients.MAGNITUDE_BOUNDS)
    assert count == len(bins)
    assert [upto for _, upto in buckets] == sorted(upto for _, upto in buckets)
    assert buckets[0] == (2.0**-40, 7)


def test_durations_fall_into_buckets_with_inclusive_upper_bounds() -> None:
    """As Prometheus' le means."""
    shot = assemble(*(replace(STEP, duration=d) for d in (0.0005, 0.001, 0.0011, 601.0)))
    (sample,) = shot.find(throughput.STEP_DURATION)
    assert isinstance(sample.value, HistogramValue)
    assert sample.value.counts[:2] == (2, 1)
    assert sample.value.counts[-1] == 1
    assert sample.value.total == pytest.approx(601.0026)


def test_the_expected_learning_rate_is_shown_in_the_declared_warmup_only() -> None:
    """The peak is what torch's schedulers record as initial_lr."""
    warm = [assemble(*[STEP] * n).value(run.LEARNING_RATE_EXPECTED_RATIO) for n in (1, 2, 10, 11)]
    assert warm[:3] == pytest.approx([1.0, 0.5, 0.1])
    assert warm[3] is None
    assert assemble(STEP, warmup_steps=None).value(run.LEARNING_RATE_EXPECTED_RATIO) is None


def test_activation_sites_of_one_layer_add_up() -> None:
    """Several activation modules merged to one block."""
    site = ActivationReading("b", 3, "post", 4.0, 8.0, 20.0, 3.0, 1.0, 0.0, None, 2.0, 8)
    other = replace(site, count=12.0, total=0.0, total_squared=12.0, absmax=5.0, zeros=3.0, dead_units=0.0)
    shot = assemble(sampled(activations=(site, other)))
    assert shot.value(activations.LAYER_ACTIVATION_MEAN) == pytest.approx(0.5)
    assert shot.value(activations.LAYER_ACTIVATION_STD) == pytest.approx(math.sqrt(2.0 - 0.25))
    assert shot.value(activations.LAYER_ACTIVATION_ABSMAX) == 5.0
    assert shot.value(activations.LAYER_ACTIVATION_ZERO_RATIO) == 0.25
    assert shot.value(activations.LAYER_ACTIVATION_DEAD_UNIT_RATIO) == 0.125
    assert shot.find(activations.LAYER_ACTIVATION_SATURATED_RATIO) == []


def test_a_loss_spike_is_counted_in_its_phase() -> None:
    """Step 70 of 100 with 10 steps of warmup is in the main phase."""
    quiet = [replace(STEP, losses=(1.0 + 0.01 * (i % 3),)) for i in range(70)]
    shot = assemble(*quiet, replace(STEP, losses=(9.0,)))
    assert {s.labels[0]: s.value for s in shot.find(loss.LOSS_SPIKES)} == {"warmup": 0, "peak": 0, "main": 1}


def test_restored_steps_move_gauges_and_not_counters() -> None:
    """rate() over a restored counter would be wrong by orders of magnitude."""
    assembler = Assembler(FACTS, lambda _: None)
    assembler.restore(RunState(500, 10_000))
    assembler.add(STEP)
    shot = assembler.snapshot(LiveState(PACE, resumes=1), 0.0)
    assert [shot.value(s) for s in (run.STEP, run.STEPS, run.TOKENS_SEEN, throughput.TOKENS, run.RESUMES)] == [
        501,
        1,
        10_064,
        64,
        1,
    ]


def test_accelerator_memory_is_shown_where_there_is_some() -> None:
    """By the names of torch.cuda.memory_stats."""
    from otel_train.device import memory_values

    stats = {
        "allocated_bytes.all.current": 10,
        "reserved_bytes.all.current": 20,
        "allocated_bytes.all.peak": 15,
        "num_alloc_retries": 2,
    }
    shot = assemble(STEP, live=LiveState(PACE, memory=memory_values(stats)))
    specs = (throughput.MEMORY_ALLOCATED, throughput.MEMORY_RESERVED, throughput.MEMORY_PEAK, throughput.ALLOCATOR_RETRIES)
    assert [shot.value(spec) for spec in specs] == [10, 20, 15, 2]
    assert memory_values({}) == {}


def test_the_pace_in_force_is_shown_and_the_overhead_once_it_is_known() -> None:
    """Of the parts that are measured."""
    live = LiveState(Pace(20, 80, 40), overhead=0.004)
    shot = assemble(STEP, live=live, measured=("gradients", "histograms", "activations"))
    assert shot.value(monitor.EVERY_N_STEPS) == 20
    parts = {sample.labels: sample.value for sample in shot.find(monitor.PART_EVERY_N_STEPS)}
    assert parts == {("gradients",): 20, ("histograms",): 80, ("activations",): 40}
    assert shot.value(monitor.OVERHEAD) == 0.004
    assert assemble(STEP).find(monitor.OVERHEAD) == []


def test_rates_are_averaged_from_one_sample_to_the_next() -> None:
    """A slow step is in the rate for as many steps as the pace says."""
    steps = [replace(STEP, duration=9.5), *[STEP] * 19]
    tokens = {pace: assemble(*steps, live=LiveState(Pace.regular(pace))).value(throughput.TOKENS_PER_SECOND) for pace in (10, 20)}
    assert tokens == {10: pytest.approx(64 / 0.5), 20: pytest.approx(20 * 64 / 19)}
