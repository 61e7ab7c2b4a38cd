"""Recording rules, ``level:metric:operations``: what alerts compare, and since which step a condition has held."""

from __future__ import annotations

from dataclasses import dataclass

from otel_train.catalog import LAYER_LABELS, monitor, run, throughput, updates
from otel_train.catalog.updates import TOLERATED_LOG10
from otel_train.generate.promql import median, merged, seconds, series
from otel_train.generate.time_base import HELD_SAMPLES, HELD_STEPS, TimeBase

STALLED_RATIO, STALLED_SPEED = 1e-6, 1e-2
"""A layer is stalled below this update ratio, if it is also so much slower than the median layer."""
LOW_COVERAGE = 0.99
"""Share of the trainable elements with a gradient below which something is missing: a block of a deep model is more than a
hundredth, the pooler that nobody uses is less."""
NO_LEARNING_RATE, NEAR_PEAK = 0.01, 0.1
"""Share of the peak learning rate below which a layer may stand still, and above which update ratios are judged. Late in a long run
they fall with the root of the rate only (random walk against weight decay): divided by a small share they would look too high."""


@dataclass(frozen=True, slots=True)
class RecordingRule:
    """A query whose answer is stored under a name."""

    record: str
    expr: str
    brief: str
    """What it is for; a comment in the generated file."""


RUN_ACTIVE = "run:otel_train_run_active:max"
SEEN = "run_rank:otel_train_run_active:timestamp"
HUNG = "run_rank:otel_train_run_active:hung"
LAST_STEP = "run:otel_train_last_step_timestamp_seconds:max"
ELSEWHERE = "run_rank:otel_train_phase:elsewhere"
STEP_SECONDS = "run:otel_train_step_duration_seconds:mean"
SAMPLED_STEP = "run:otel_train_sampled_step:max"
HELD = "run:otel_train_every_n_steps:held"
ACTIVATIONS_HELD = "run:otel_train_part_every_n_steps:activations_held"
LAYER_RATIO = "run_layer:otel_train_layer_update_ratio:max"
MEDIAN_RATIO = "run:otel_train_layer_update_ratio:median"
MEDIAN_AT_PEAK = "run:otel_train_layer_update_ratio_at_peak_log10:median"
STALLED_SINCE = "run_layer:otel_train_sampled_step:stalled_since"
LOW_SINCE = "run:otel_train_sampled_step:update_ratio_low_since"
HIGH_SINCE = "run:otel_train_sampled_step:update_ratio_high_since"
COVERAGE = "run:otel_train_monitored_parameters:ratio"
SILENT = "run:otel_train_silent_activation_modules:sum"
UNCOVERED_SINCE = "run:otel_train_sampled_step:coverage_low_since"
SILENT_SINCE = "run:otel_train_sampled_step:activations_silent_since"

LAYER_STALLED = f"""\
(
    {LAYER_RATIO} < {STALLED_RATIO:g}
  unless on (job, run, param_group)
    {merged("max", series(run.LEARNING_RATE_SCHEDULE_RATIO), "param_group")} < {NO_LEARNING_RATE:g}
)
and
  {LAYER_RATIO} / on (job, run) group_left () {MEDIAN_RATIO} <= {STALLED_SPEED:g}"""
RATIO_LOW = f"{MEDIAN_AT_PEAK} < {TOLERATED_LOG10[0]:g}"
RATIO_HIGH = f"{MEDIAN_AT_PEAK} > {TOLERATED_LOG10[1]:g}"
COVERAGE_LOW = f"{COVERAGE} < {LOW_COVERAGE:g}"
SOME_SILENT = f"{SILENT} > 0"


def recording_rules(time_base: TimeBase) -> tuple[RecordingRule, ...]:
    """Return the rules in the order in which they build on each other."""
    return (*_of_the_run(time_base), *_of_update_ratios(), *_of_coverage(), *_of_steps())


def held(since: str, enough: str = HELD) -> str:
    """Say that a condition has held long enough, counted in steps of the training: for the right side of an ``and``."""
    return f"({SAMPLED_STEP} - on (job, run) group_right () {since}) >= on (job, run) group_left () {enough}"


def _of_the_run(time_base: TimeBase) -> tuple[RecordingRule, ...]:
    memory, slow = seconds(time_base.memory), f"{time_base.scrape_timeout / 2:g}"
    lately = seconds(time_base.window)
    elsewhere = series(run.PHASE, ("phase!=", "train"))
    activations = series(monitor.PART_EVERY_N_STEPS, ("part=", "activations"))
    active, last_step, duration = series(run.RUN_ACTIVE), series(run.LAST_STEP_TIMESTAMP), throughput.STEP_DURATION
    return (
        RecordingRule(SEEN, f"timestamp({active})", "When each rank was last seen, by address: the same rank can move."),
        RecordingRule(
            HUNG,
            f"(last_over_time({active}[{lately}]) == 1 or {HUNG})\n"
            f"and on (job, instance)\n  (up == 0 and scrape_duration_seconds >= {slow})",
            "Ranks that hang with their endpoint: scrapes time out. Where they are refused at once, the process is gone. "
            "Reads its own last answer, so that it stays with the run that hung, not with one that was killed there long before.",
        ),
        RecordingRule(
            RUN_ACTIVE,
            merged("max", f"{active} or {HUNG}"),
            "1 while any rank of the run trains, or hangs.",
        ),
        RecordingRule(
            LAST_STEP,
            merged("max", f"\n  {last_step}\nor\n  last_over_time({last_step}[{memory}]) and on (job, run, rank) {HUNG}\n"),
            "When any rank of the run last ended a step.",
        ),
        RecordingRule(
            STEP_SECONDS,
            merged("sum", series(duration, part="sum")) + f"\n/\nclamp_min({merged('sum', series(duration, part='count'))}, 1)",
            "Mean duration of a step since the start: a rate would forget it while nothing moves. 0 before the second step.",
        ),
        RecordingRule(
            ELSEWHERE,
            f"{elsewhere}\nor\n  {ELSEWHERE} and on (job, run, rank) {HUNG}",
            "Ranks in another phase than training, also when they hang in it.",
        ),
        RecordingRule(SAMPLED_STEP, merged("max", series(run.SAMPLED_STEP)), "The step that layer gauges show."),
        RecordingRule(
            HELD,
            f"clamp_min({HELD_SAMPLES} * {merged('max', series(monitor.EVERY_N_STEPS))}, {HELD_STEPS})",
            f"Steps that a condition on sampled values must hold for: {HELD_SAMPLES} samples, at least {HELD_STEPS} steps.",
        ),
        RecordingRule(
            ACTIVATIONS_HELD,
            f"clamp_min({HELD_SAMPLES} * {merged('max', activations)}, {HELD_STEPS})",
            "The same for activations, which can be measured less often.",
        ),
    )


def _of_update_ratios() -> tuple[RecordingRule, ...]:
    ratio = series(updates.LAYER_UPDATE_RATIO, ("kind=~", "matrix|embedding"))
    matrices = f'{LAYER_RATIO}{{kind="matrix"}}'
    schedule = merged("max", series(run.LEARNING_RATE_SCHEDULE_RATIO), "param_group")
    return (
        RecordingRule(
            LAYER_RATIO,
            merged("max", ratio, *LAYER_LABELS),
            "Update ratio of each weight matrix and embedding, ranks merged.",
        ),
        RecordingRule(
            MEDIAN_RATIO,
            f"{median(f'{matrices} > 0')}\nor\n  {median(f'{LAYER_RATIO} > 0')}",
            "Median of the matrices that move at all; of the embeddings where no matrix does.",
        ),
        RecordingRule(
            MEDIAN_AT_PEAK,
            median(f"log10(\n  ({matrices} > 0)\n/ on (job, run, param_group) group_left ()\n  ({schedule} >= {NEAR_PEAK:g})\n)")
            + f"\nor\n  log10({merged('max', LAYER_RATIO)} == 0)\nunless on (job, run)\n  {schedule} < {NO_LEARNING_RATE:g}",
            "log10 of the median update ratio as it would be at the peak of the schedule: decay is not too low. -Inf where nothing "
            "moves at all, although there is a learning rate, or never was.",
        ),
    )


def _of_coverage() -> tuple[RecordingRule, ...]:
    covered, trainable = (merged("sum", series(spec)) for spec in (monitor.MONITORED_PARAMETERS, monitor.TRAINABLE_PARAMETERS))
    return (
        RecordingRule(COVERAGE, f"{covered}\n/\n{trainable}", "Share of the trainable elements that had a gradient."),
        RecordingRule(SILENT, merged("sum", series(monitor.SILENT_ACTIVATION_MODULES)), "Activation modules that showed no value."),
    )


def _of_steps() -> tuple[RecordingRule, ...]:
    of_the_run = f"{SAMPLED_STEP} and on (job, run) ({{}})"
    return (
        RecordingRule(
            STALLED_SINCE,
            _since(STALLED_SINCE, LAYER_STALLED, "({}) * 0 + on (job, run) group_left () " + SAMPLED_STEP),
            "Sampled step at which the layer was first seen stalled, while it still is.",
        ),
        RecordingRule(LOW_SINCE, _since(LOW_SINCE, RATIO_LOW, of_the_run), "The same for a median that is too low."),
        RecordingRule(HIGH_SINCE, _since(HIGH_SINCE, RATIO_HIGH, of_the_run), "And for one that is too high."),
        RecordingRule(UNCOVERED_SINCE, _since(UNCOVERED_SINCE, COVERAGE_LOW, of_the_run), "For elements without a gradient."),
        RecordingRule(SILENT_SINCE, _since(SILENT_SINCE, SOME_SILENT, of_the_run), "For activation modules without a value."),
    )


def _since(record: str, condition: str, first: str) -> str:
    """Keep the step at which a condition began: PromQL's windows are in seconds, a training's samples are not.

    The rule reads its own last answer; once the condition does not hold, the series ends, and begins anew the next time.
    """
    indented = condition.replace("\n", "\n  ")
    kept = f"{record} <= on (job, run) group_left () {SAMPLED_STEP}"  # steps go back where a run is taken up again
    return f"(\n  {kept}\nand\n  ({indented})\n)\nor\n(\n  {first.format(indented)}\n)"
