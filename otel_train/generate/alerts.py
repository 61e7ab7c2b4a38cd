"""Alerts: symptoms of a training that somebody should look at, with what to do."""

from __future__ import annotations

from dataclasses import dataclass

from otel_train.catalog import MetricSpec, loss, parameters, run, throughput
from otel_train.catalog.updates import TOLERATED_LOG10
from otel_train.errors import CatalogError
from otel_train.generate import recording
from otel_train.generate.promql import Matcher, increase, merged, seconds, series
from otel_train.generate.time_base import TimeBase

SEVERITIES = ("critical", "warning", "info")
"""By what people must do: act now; look at it today; know it when they look at something else."""
DIVERGED = 1e-6
"""Relative difference of replicas' norms. Those that compute the same have none at all; one update that only some of them made is a
thousandth of the weights, and changes their norm by the square of that at least."""
MISSED_STEPS = 20
"""So many times the mean step without a step are too long, whatever the time base says."""


@dataclass(frozen=True, slots=True)
class Alert:
    """An alerting rule; its runbook is ``runbooks/NAME.md`` beside this file."""

    name: str
    severity: str
    expr: str
    summary: str
    """What is wrong, in one sentence that is the same for every run."""
    description: str
    """What is wrong where, and what to do: a template of Prometheus; lines are joined."""
    hold_for: int = 0
    """`for`, in seconds."""
    keep_firing_for: int = 0

    def __post_init__(self) -> None:
        """Join the description's lines, and refuse what the conventions of monitoring mixins refuse."""
        object.__setattr__(self, "description", " ".join(self.description.split()))
        if not self.name.startswith("OtelTrain") or self.severity not in SEVERITIES:
            raise CatalogError(f"expected OtelTrain… with a severity of {SEVERITIES}, got {self.name}, {self.severity}")
        if "{{" in self.summary or not self.summary.endswith("."):
            raise CatalogError(f"{self.name}: expected a static sentence as summary, got {self.summary!r}")
        if "$labels.run" not in self.description:
            raise CatalogError(f"{self.name}: expected a description that names the run, got {self.description!r}")


def alerts(time_base: TimeBase) -> tuple[Alert, ...]:
    """Return the alerts on a time base: availability, the loss, the learning rate, layers, replicas, coverage."""
    return (
        _exporter_absent(time_base),
        _steps_stalled(time_base),
        _loss_non_finite(time_base),
        _update_ratio_low(time_base),
        _update_ratio_high(time_base),
        _layer_stalled(time_base),
        _replicas_diverged(time_base),
        _coverage_low(time_base),
    )


def _exporter_absent(time_base: TimeBase) -> Alert:
    active, memory = series(run.RUN_ACTIVE), seconds(time_base.memory)
    seen = f"last_over_time({recording.SEEN}[{memory}])"  # of the addresses that a rank had, the latest counts
    return Alert(
        "OtelTrainExporterAbsent",
        "critical",
        f"(\n  last_over_time({active}[{memory}]) == 1\nand on (job, run, rank, instance)\n"
        f"  {seen} == on (job, run, rank) group_left () {merged('max', seen, 'rank')}\n)\n"
        f"unless on (job, run, rank)\n  {active}",
        "A training stopped answering without having ended.",
        f"""
        Rank {{{{ $labels.rank }}}} of run {{{{ $labels.run }}}} ({{{{ $labels.instance }}}}) was training when it last answered,
        and has not answered for {seconds(time_base.absent)}. Look whether the process, and its machine, still live: it was killed
        (out of memory, preempted), crashed in native code, or hangs. Restart it from its last checkpoint.
        """,
        hold_for=time_base.absent,
    )


def _steps_stalled(time_base: TimeBase) -> Alert:
    silence = f"time() - {recording.LAST_STEP}"
    mean = f"last_over_time({recording.STEP_SECONDS}[{seconds(time_base.memory)}])"
    too_long = f"{silence} > clamp_min({MISSED_STEPS} * {mean},"
    least, patient = time_base.stalled, time_base.stalled_elsewhere
    condition = (
        # the first step after another phase has time to end
        f"(\n    {too_long} {least})\n  unless on (job, run)\n    last_over_time({recording.ELSEWHERE}[{seconds(least)}])\n"
        f"or\n    {too_long} {patient})\n"
        # no step at all, also none of before a restart
        f"or\n    {patient} * ({recording.RUN_ACTIVE} offset {seconds(patient)} == 1)\n"
        f"  unless on (job, run)\n    last_over_time({recording.LAST_STEP}[{seconds(patient)}])\n)"
    )
    return Alert(
        "OtelTrainStepsStalled",
        "critical",
        _active(condition),
        "A training that is not over makes no steps.",
        """
        Run {{ $labels.run }} has ended no optimizer step for {{ $value | humanizeDuration }}, far longer than its steps take. It
        hangs: in a collective that one rank never entered, in the data loader, in storage, or it is stopped. Take a stack of every
        rank (py-spy dump --pid PID), then restart it from its last checkpoint. Mark long evaluations and checkpoints with
        monitor.phase(…).
        """,
    )


def _loss_non_finite(time_base: TimeBase) -> Alert:
    return Alert(
        "OtelTrainLossNonFinite",
        "critical",
        _appeared(loss.NONFINITE, time_base, ("source", "loss")),
        "The loss is NaN or infinite.",
        f"""
        Run {{{{ $labels.run }}}} had about {{{{ $value | printf "%.0f" }}}} non-finite losses in the last
        {seconds(time_base.window)}. If its weights are not finite either (otel_train_nonfinite_total, source parameter), training
        on is useless: stop it, and go on from a checkpoint before the first one, past the batch that did it or with a lower
        learning rate.
        """,
        keep_firing_for=time_base.keep_firing,
    )


def _update_ratio_low(time_base: TimeBase) -> Alert:
    return Alert(
        "OtelTrainUpdateRatioLow",
        "warning",
        _active(f"{recording.RATIO_LOW}\nand on (job, run)\n  {recording.held(recording.LOW_SINCE)}"),
        "The weights hardly move: the learning rate is probably too low.",
        f"""
        The median layer of run {{{{ $labels.run }}}} {{{{ if lt $value -99.0 }}}}does not change at all. Look whether its learning
        rate is 0, and whether attach was given the optimizer that the loop uses.{{{{ else }}}}changes by
        10^{{{{ printf "%.1f" $value }}}} of its weights a step, as it would be at the peak of the schedule; 10^-3 is usual,
        10^{TOLERATED_LOG10[0]:g} the limit. Raise the learning rate, at most tenfold at a time, and look again; in fine-tuning it
        can be meant.{{{{ end }}}}
        """,
        hold_for=time_base.patience,
    )


def _update_ratio_high(time_base: TimeBase) -> Alert:
    return Alert(
        "OtelTrainUpdateRatioHigh",
        "warning",
        _active(f"{recording.RATIO_HIGH}\nand on (job, run)\n  {recording.held(recording.HIGH_SINCE)}"),
        "The weights are thrown about: the learning rate is probably too high.",
        f"""
        The median layer of run {{{{ $labels.run }}}} changes by 10^{{{{ printf "%.1f" $value }}}} of its weights a step, as it
        would be at the peak of the schedule; 10^-3 is usual, 10^{TOLERATED_LOG10[1]:g} the limit. Lower the learning rate, or
        warm up for longer if it is only so at the start.
        """,
        hold_for=time_base.patience,
    )


def _layer_stalled(time_base: TimeBase) -> Alert:
    return Alert(
        "OtelTrainLayerStalled",
        "warning",
        _active(f"(\n{recording.LAYER_STALLED}\n)\nand\n  {recording.held(recording.STALLED_SINCE)}"),
        "A layer does not learn.",
        """
        Layer {{ $labels.layer }} (depth {{ $labels.depth }}, {{ $labels.kind }}) of run {{ $labels.run }} has an update ratio of
        {{ printf "%.2g" $value }}, while others move. {{ if eq $labels.param_group "none" }}It requires gradients, but no
        attached optimizer has it: add it to one, or freeze it with requires_grad_(False).{{ else }}It is in the parameter group
        {{ $labels.param_group }}: look at its gradient norm (0: its output does not reach the loss), at the learning rate of its
        group, and at the precision of its weights (otel_train_layer_changed_ratio).{{ end }}
        """,
        hold_for=time_base.patience,
    )


def _replicas_diverged(time_base: TimeBase) -> Alert:
    return Alert(
        "OtelTrainReplicasDiverged",
        "critical",
        _active(f"{merged('max', series(parameters.REPLICA_DIVERGENCE))} > {DIVERGED:g}"),
        "Ranks that should hold the same weights do not.",
        """
        Weights of run {{ $labels.run }} that are replicas of one another differ by {{ printf "%.2g" $value }} of their norm, so its
        data-parallel ranks train different models. Compare otel_train_local_param_norm between ranks to find the one that is off,
        take its host out, and go on from a checkpoint of before: see since when otel_train_replica_divergence_ratio is above 0.
        """,
        hold_for=time_base.patience,
    )


def _coverage_low(time_base: TimeBase) -> Alert:
    gradients = f"{recording.COVERAGE_LOW}\nand on (job, run)\n  {recording.held(recording.UNCOVERED_SINCE)}"
    activations = (
        f"{recording.SOME_SILENT}\nand on (job, run)\n  {recording.held(recording.SILENT_SINCE, recording.ACTIVATIONS_HELD)}"
    )
    return Alert(
        "OtelTrainCoverageLow",
        "warning",
        _active(f"(\n{_about('gradient', gradients)}\nor\n{_about('activation', activations)}\n)"),
        "A part of the model is not seen by the monitor, or takes no part in the training.",
        """
        {{ if eq $labels.source "gradient" }}Only {{ $value | humanizePercentage }} of the trainable elements of run
        {{ $labels.run }} had a gradient when their optimizer stepped. What has none does not learn, and has no series: look in the
        training's log (logger otel_train) which parameters they are, mend what cuts them off from the loss, or freeze them with
        requires_grad_(False).{{ else }}{{ $value }} activation modules of run {{ $labels.run }} have shown no value since attach,
        so no alert on activations can see them. Their names are in the training's log (logger otel_train): attach before the first
        compiled call, train by the model's own forward, or leave modules that are not used out with activations=(…).{{ end }}
        """,
        hold_for=time_base.patience,
    )


def _about(source: str, condition: str) -> str:
    """Say in a label which of an alert's conditions holds."""
    indented = condition.replace("\n", "\n    ")
    return f'  label_replace(\n    {indented},\n    "source", "{source}", "", ""\n  )'


def _active(condition: str) -> str:
    """Leave out runs that have ended: their last values may be served for long."""
    return f"{condition}\nand on (job, run)\n  {recording.RUN_ACTIVE} == 1"


def _appeared(spec: MetricSpec, time_base: TimeBase, *matchers: Matcher) -> str:
    """Say how much a counter grew in the window, also when the first scrape of a young process already found it above 0."""
    window, memory = seconds(time_base.window), seconds(time_base.memory)
    born = f"{series(spec, *matchers)} > 0 unless last_over_time({series(spec, *matchers)}[{memory}] offset {window})"
    young = f"{series(throughput.STEP_DURATION, part='sum')} < {time_base.window}"
    grown = f"{increase(spec, window, *matchers)} > 0"
    return merged("sum", f"\n    {grown}\n  or\n    ({born})\n  and on (job, instance, run, rank)\n    {young}\n") + " > 0"
