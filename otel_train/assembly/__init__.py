"""Step records to Snapshots: counters, gauges, and the detectors that feed them. The host arm's memory of a run. No torch here."""

from __future__ import annotations

import itertools
import math
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from otel_train.assembly.coverage import CoverageWatch
from otel_train.assembly.histograms import GradientHistograms, Histogram
from otel_train.assembly.layer import local_samples_of, root, run_samples_of, run_sums, samples_of
from otel_train.assembly.schedule import SchedulePeak
from otel_train.assembly.state import RunState
from otel_train.budget import Pace
from otel_train.catalog import CATALOG, LAYER_LABELS, Instrument, MetricSpec, gradients, loss, monitor, parameters, run, throughput
from otel_train.detect.spikes import Smoothed, SpikeDetector, schedule_phase
from otel_train.records import Coverage, MicroBatches, ParameterReading, RankSample, StepRecord
from otel_train.snapshot import Sample, Snapshot

_DURATION_BOUNDS = throughput.STEP_DURATION.bounds
_LAYER_GAUGES = sum(spec.labels == LAYER_LABELS and spec.instrument is Instrument.GAUGE for spec in CATALOG.values())
_RATED = 1000
"""Steps at most that rates are averaged over: from one sample to the next, so that own cost is in it as it is in the training."""
_PHASES = ("warmup", "peak", "main")
_LEARNING_RATE_FACTS = (
    (run.LEARNING_RATE, "learning_rate"),
    (run.WEIGHT_DECAY, "weight_decay"),
    (run.OPTIMIZER_BETA1, "beta1"),
    (run.OPTIMIZER_BETA2, "beta2"),
    (run.OPTIMIZER_EPSILON, "epsilon"),
)


@dataclass(frozen=True, slots=True)
class RunFacts:
    """What does not change while the run goes on."""

    base_labels: tuple[tuple[str, str], ...]
    model: str
    world_size: int
    torch_version: str
    version: str
    update_mode: str
    device: str
    device_uuid: str
    local_rank: int
    host: str
    planned_steps: int | None
    warmup_steps: int | None
    peak_flops: float | None
    peak_flops_source: str
    started_at: float
    """Unix time at which counting began."""
    parts: tuple[str, ...]
    """Names of the monitor's parts, whose cost and errors are counted."""
    measured: tuple[str, ...] = ()
    """Those of them that sampled steps measure."""
    layers_on: str = "owner"
    """``all``: every rank exports what it holds of each layer too."""
    leads_run: bool = True
    """This rank exports the values of the whole run."""
    leads_replica: bool = True
    """This rank counts tokens and FLOPs for all ranks that work on the same tokens."""
    replica_ranks: int = 1
    """Ranks that work on the same tokens."""
    forward_is_own: bool = True
    """No forward pass waits for other ranks, so that its time tells ranks apart."""

    @property
    def replicas(self) -> int:
        """Data-parallel ranks: those whose tokens add up."""
        return max(self.world_size // self.replica_ranks, 1)


@dataclass(slots=True)
class LiveState:
    """What the training thread and the monitor keep current outside of step records."""

    pace: Pace
    """How often samples come."""
    overhead: float | None = None
    """Own seconds a second of training at that pace."""
    active: bool = True
    phase: str = "train"
    resumes: int = 0
    monitor_seconds: Mapping[str, float] = field(default_factory=dict)
    monitor_errors: Mapping[str, int] = field(default_factory=dict)
    memory: Mapping[str, float] = field(default_factory=dict)
    """Accelerator memory by the names of its metrics; empty on the CPU."""
    reported: Sequence[Sample] = ()
    """What sinks say of themselves."""


@dataclass(slots=True)
class _Waiting:
    """What the micro-batches of the step under way add up to."""

    tokens: int = 0
    samples: int = 0
    losses: int = 0
    loss: float = 0.0

    def add(self, told: MicroBatches) -> None:
        self.tokens += told.tokens
        self.samples += told.samples
        self.losses += len(told.losses)
        self.loss += sum(told.losses)

    def mean_loss(self) -> float | None:
        return self.loss / self.losses if self.losses else None


class Assembler:
    """Adds up step records and tells the state of the run as a Snapshot.

    Args:
        facts: What does not change.
        flops_per_token: FLOPs a token by sequence length; None where they are not known.
    """

    def __init__(self, facts: RunFacts, flops_per_token: Callable[[int | None], float | None]) -> None:
        self._facts, self._flops_per_token = facts, flops_per_token
        self.step = self.tokens_seen = 0
        self._sampled_step: int | None = None
        self._last: StepRecord | None = None
        self._sampled: Mapping[MetricSpec, list[Sample]] = {}
        self._counts: Counter[MetricSpec] = Counter()
        self._model_flops: float | None = None
        self._seconds: defaultdict[MetricSpec, float] = defaultdict(float)
        self._durations = Histogram(_DURATION_BOUNDS)
        self._recent: deque[tuple[float, int]] = deque(maxlen=_RATED)
        self._waiting = _Waiting()
        self._loss: float | None = None
        self._loss_scale: float | None = None
        self._smoothed_loss: float | None = None
        self._smooth = Smoothed()
        self._loss_spikes = SpikeDetector(logarithmic=False)
        self._norm_spikes = SpikeDetector(logarithmic=True)
        self._spikes: Counter[tuple[MetricSpec, str]] = Counter()
        self._nonfinite: Counter[str] = Counter()
        self._layer_nonfinite: Counter[tuple[str, int, str]] = Counter()
        self._histograms = GradientHistograms()
        self._coverage = Coverage(0, 0, (), ())
        self._watch = CoverageWatch()
        self._peaks: defaultdict[tuple[str, str], SchedulePeak] = defaultdict(SchedulePeak)

    def state(self) -> RunState:
        """Return what a checkpoint should carry."""
        peaks = ((*labels, peak.largest) for labels, peak in list(self._peaks.items()))
        return RunState(
            self.step,
            self.tokens_seen,
            self._facts.replicas,
            self._smooth.state,
            self._loss_spikes.window,
            self._norm_spikes.window,
            tuple(row for row in peaks if math.isfinite(row[2])),
        )

    def restore(self, state: RunState) -> None:
        """Go on from a checkpoint, of this world size or another."""
        self.step, self.tokens_seen = state.step, state.tokens_on(self._facts.replicas)
        self._smooth.restore(*state.smoothed_loss)
        self._loss_spikes.restore(state.loss_window)
        self._norm_spikes.restore(state.grad_norm_window)
        self._peaks.clear()
        for optimizer, group, largest in state.schedule_peaks:
            self._peaks[optimizer, group].restore(largest)

    def cover(self, coverage: Coverage) -> None:
        """Take what is monitored from now on, and start its counters at 0."""
        self._coverage = coverage
        self._watch.cover(coverage)
        for layer in coverage.layers:
            for source in ("gradient", "parameter"):
                self._layer_nonfinite[layer.name, layer.depth, source] += 0
        for name, depth in coverage.sites:
            self._layer_nonfinite[name, depth, "activation"] += 0

    def wait(self, told: MicroBatches) -> None:
        """Take micro-batches whose step has not come yet: they count with it, but a loss that is not finite is said at once."""
        self._nonfinite["loss"] += sum(not math.isfinite(value) for value in told.losses)
        self._waiting.add(told)
        mean = self._waiting.mean_loss()
        if mean is not None and not math.isfinite(mean):
            self._loss, self._smoothed_loss = mean, math.nan

    def add(self, record: StepRecord) -> None:
        """Take one step."""
        self._nonfinite["loss"] += sum(not math.isfinite(value) for value in record.losses)
        told, self._waiting = self._waiting, _Waiting()
        told.add(MicroBatches(record.tokens, record.samples, record.losses))
        record = replace(record, tokens=told.tokens, samples=told.samples)
        self._last = record
        self._counts[run.SKIPPED_STEPS if record.skipped else run.STEPS] += 1
        self._counts[run.SKIPPED_STEPS] += record.also_skipped
        self.step += not record.skipped
        self._counts[run.MICRO_BATCHES] += record.micro_batches
        self._counts[gradients.CLIPPED_STEPS] += record.clipped and not record.skipped
        self._seconds[throughput.FORWARD_SECONDS] += record.forward
        self._seconds[throughput.DATA_WAIT_SECONDS] += record.data_wait
        self._loss_scale = record.loss_scale if record.loss_scale is not None else self._loss_scale
        self._add_tokens(record)
        self._add_loss(told.mean_loss())
        for group in (g for g in record.groups if g.current):
            self._peaks[group.optimizer, group.param_group].add(group.learning_rate, group.peak_learning_rate)
        if record.duration is not None:
            self._add_duration(record.duration, record.tokens)
        if record.grad_norm is not None and not record.skipped:
            self._look_for_spike(record.grad_norm)
        if record.sample is not None:
            own = replace(record.sample, run=run_sums(record.sample.shown.parameters))
            local = record.sample if self._facts.layers_on == "all" else None
            self.add_sample(RankSample(self.step, record.grad_norm, own, local))

    def _look_for_spike(self, norm: float) -> None:
        if self._norm_spikes.is_spike(norm):
            self._spikes[gradients.GRAD_NORM_SPIKES, self._schedule_phase()] += 1

    def _add_tokens(self, record: StepRecord) -> None:
        self._counts[throughput.TOKENS] += record.tokens
        self._counts[throughput.SAMPLES] += record.samples
        self.tokens_seen += record.tokens
        per_token = self._flops_per_token(record.sequence_length) if record.tokens else None
        if per_token is not None:
            self._model_flops = (self._model_flops or 0.0) + per_token * record.tokens

    def _add_loss(self, mean: float | None) -> None:
        if mean is None:
            return
        self._loss = mean
        self._smoothed_loss = self._smooth.add(self._loss)
        if self._loss_spikes.is_spike(self._loss):
            self._spikes[loss.LOSS_SPIKES, self._schedule_phase()] += 1

    def _schedule_phase(self) -> str:
        return schedule_phase(self.step, self._facts.warmup_steps, self._facts.planned_steps)

    def _add_duration(self, seconds: float, tokens: int) -> None:
        index = next((i for i, bound in enumerate(_DURATION_BOUNDS) if seconds <= bound), len(_DURATION_BOUNDS))
        self._durations.counts[index] += 1
        self._durations.total += seconds
        self._recent.append((seconds, tokens))

    def add_sample(self, taken: RankSample) -> None:
        """Take what a sampled step measured, after the ranks have met where there are several."""
        sample = taken.own
        self._sampled_step = taken.step
        self._watch.add(sample)
        if taken.grad_norm is None and sample.run is not None:
            self._look_for_spike(root(sample.run.gradient_squared))
        for reading in sample.parameters:
            self._add_nonfinite(reading)
            self._histograms.add(reading)
        for site in sample.activations:
            self._nonfinite["activation"] += int(site.nonfinite)
            self._layer_nonfinite[site.layer, site.depth, "activation"] += int(site.nonfinite)
        of_run = run_samples_of(sample.run, taken.grad_norm) if sample.run is not None and self._facts.leads_run else ()
        of_shards = local_samples_of(taken.local.shown) if taken.local is not None else ()
        if taken.local_weight_squared is not None:
            of_shards = (Sample(parameters.LOCAL_PARAM_NORM, (), root(taken.local_weight_squared)), *of_shards)
        self._sampled = _by_metric(itertools.chain(of_run, samples_of(sample.shown), of_shards, self._histograms.samples()))

    def _add_nonfinite(self, reading: ParameterReading) -> None:
        for source, count in (
            ("gradient", reading.sums.nonfinite_gradients),
            ("parameter", reading.sums.nonfinite_weights),
        ):
            self._nonfinite[source] += count
            if reading.layer is not None:
                self._layer_nonfinite[reading.layer.name, reading.layer.depth, source] += count

    def snapshot(self, live: LiveState, now: float) -> Snapshot:
        """Return everything known at this moment, in the order of the catalog."""
        fresh = _by_metric(
            itertools.chain(
                self._run_samples(live),
                self._step_samples(),
                self._loss_samples(),
                self._throughput_samples(live),
                self._monitor_samples(live),
                live.reported,
            )
        )
        ordered = tuple(sample for spec in CATALOG.values() for part in (fresh, self._sampled) for sample in part.get(spec, ()))
        return Snapshot(self._facts.base_labels, now, ordered, self._facts.started_at)

    def _update_mode(self) -> str:
        mode, turns = self._facts.update_mode, self._coverage.update_turns
        return mode if turns == 1 else f"{mode} in {turns} turns"

    def _run_samples(self, live: LiveState) -> Iterator[Sample]:
        facts = self._facts
        precision = self._last.precision if self._last else "unknown"
        info = (facts.model, str(facts.world_size), facts.torch_version, facts.version, self._update_mode(), precision)
        yield Sample(run.RUN_INFO, info, 1)
        yield Sample(run.DEVICE_INFO, (facts.device, facts.device_uuid, str(facts.local_rank), facts.host), 1)
        yield Sample(run.RUN_ACTIVE, (), int(live.active))
        yield Sample(run.PHASE, (live.phase,), 1)
        yield Sample(run.WORLD_SIZE, (), facts.world_size)
        yield Sample(run.RESUMES, (), live.resumes)
        if facts.planned_steps is not None:
            yield Sample(run.PLANNED_STEPS, (), facts.planned_steps)
        if facts.warmup_steps is not None:
            yield Sample(run.CONFIGURED_WARMUP_STEPS, (), facts.warmup_steps)

    def _step_samples(self) -> Iterator[Sample]:
        yield Sample(run.STEP, (), self.step)
        for spec in (run.STEPS, run.MICRO_BATCHES, run.SKIPPED_STEPS, gradients.CLIPPED_STEPS):
            yield Sample(spec, (), self._counts[spec])
        if self._sampled_step is not None:
            yield Sample(run.SAMPLED_STEP, (), self._sampled_step)
        if self.tokens_seen and self._facts.leads_replica:
            yield Sample(run.TOKENS_SEEN, (), self.tokens_seen)
        if self._last is None:
            return
        yield Sample(run.LAST_STEP_TIMESTAMP, (), self._last.finished_at)
        for group in self._last.groups:
            labels = (group.optimizer, group.param_group)
            for spec, name in _LEARNING_RATE_FACTS:
                value = getattr(group, name)
                if value is not None:
                    yield Sample(spec, labels, value)
            expected = self._expected_learning_rate(group.peak_learning_rate)
            if expected and group.learning_rate is not None:
                yield Sample(run.LEARNING_RATE_EXPECTED_RATIO, labels, group.learning_rate / expected)
            peak = self._peaks[labels].value
            if peak and group.learning_rate is not None:
                yield Sample(run.LEARNING_RATE_SCHEDULE_RATIO, labels, group.learning_rate / peak)

    def _expected_learning_rate(self, peak: float | None) -> float | None:
        warmup = self._facts.warmup_steps
        return peak * self.step / warmup if warmup and peak and 0 < self.step <= warmup else None

    def _loss_samples(self) -> Iterator[Sample]:
        for spec, value in (
            (loss.LOSS, self._loss),
            (loss.LOSS_SMOOTHED, self._smoothed_loss),
            (loss.LOSS_SCALE, self._loss_scale),
        ):
            if value is not None:
                yield Sample(spec, (), value)
        for spec in (loss.LOSS_SPIKES, gradients.GRAD_NORM_SPIKES):
            for phase in _PHASES:
                yield Sample(spec, (phase,), self._spikes[spec, phase])
        for source in ("loss", "gradient", "activation", "parameter"):
            yield Sample(loss.NONFINITE, (source,), self._nonfinite[source])
        for (layer, depth, source), count in self._layer_nonfinite.items():
            yield Sample(loss.LAYER_NONFINITE, (layer, str(depth), source), count)

    def _throughput_samples(self, live: LiveState) -> Iterator[Sample]:
        yield Sample(throughput.STEP_DURATION, (), self._durations.value())
        yield Sample(throughput.DATA_WAIT_SECONDS, (), self._seconds[throughput.DATA_WAIT_SECONDS])
        if self._seconds[throughput.FORWARD_SECONDS] and self._facts.forward_is_own:
            yield Sample(throughput.FORWARD_SECONDS, (), self._seconds[throughput.FORWARD_SECONDS])
        if self._facts.leads_replica:
            yield from self._replica_samples(live)
        for spec in (
            throughput.MEMORY_ALLOCATED,
            throughput.MEMORY_RESERVED,
            throughput.MEMORY_PEAK,
            throughput.ALLOCATOR_RETRIES,
        ):
            if spec.name in live.memory:
                yield Sample(spec, (), live.memory[spec.name])

    def _replica_samples(self, live: LiveState) -> Iterator[Sample]:
        """Yield what the ranks that work on the same tokens have in common."""
        yield Sample(throughput.TOKENS, (), self._counts[throughput.TOKENS])
        yield Sample(throughput.SAMPLES, (), self._counts[throughput.SAMPLES])
        if self._model_flops is not None:
            yield Sample(throughput.MODEL_FLOPS, (), self._model_flops)
        yield from self._rates(live)

    def _rates(self, live: LiveState) -> Iterator[Sample]:
        peak = self._facts.peak_flops
        if peak is not None:
            yield Sample(throughput.PEAK_FLOPS, (self._facts.peak_flops_source,), peak)
        recent = list(self._recent)[-max(live.pace.every_n_steps, 2) :]
        seconds = sum(duration for duration, _ in recent)
        tokens = sum(count for _, count in recent)
        if not tokens or not seconds:
            return
        yield Sample(throughput.TOKENS_PER_SECOND, (), tokens / seconds)
        per_token = self._flops_per_token(self._last.sequence_length) if self._last else None
        if peak is not None and per_token is not None:
            yield Sample(throughput.MFU, (), per_token * tokens / seconds / (peak * self._facts.replica_ranks))

    def _monitor_samples(self, live: LiveState) -> Iterator[Sample]:
        for part in self._facts.parts:
            yield Sample(monitor.MONITOR_SECONDS, (part,), live.monitor_seconds.get(part, 0.0))
        for part in self._facts.parts:
            yield Sample(monitor.MONITOR_ERRORS, (part,), live.monitor_errors.get(part, 0))
        yield from self._watch.samples()
        yield Sample(monitor.EVERY_N_STEPS, (), live.pace.every_n_steps)
        for part in self._facts.measured:
            yield Sample(monitor.PART_EVERY_N_STEPS, (part,), live.pace.of(part))
        if live.overhead is not None:
            yield Sample(monitor.OVERHEAD, (), live.overhead)
        yield Sample(monitor.DROPPED_SERIES, (), self._coverage.dropped_layers * _LAYER_GAUGES)


def _by_metric(samples: Iterable[Sample]) -> Mapping[MetricSpec, list[Sample]]:
    found: defaultdict[MetricSpec, list[Sample]] = defaultdict(list)
    for sample in samples:
        found[sample.spec].append(sample)
    return dict(found)
