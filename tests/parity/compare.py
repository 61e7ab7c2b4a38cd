"""What the ranks exported together, against the reference."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from dataclasses import dataclass, field

from tests.parity.cases import Case
from tests.parity.model import TOKENS
from tests.parity.reference import Key, Reference, Step
from tests.parity.training import Outcome, Series

PREFIX = "otel_train_layer_"
_MEANS = ("grad_mean", "grad_std", "activation_mean", "activation_std", "activation_absmax", "activation_zero_ratio")
_HISTOGRAMS = ("magnitude", "magnitude_sum", "value", "value_sum", "value_negative")
_UPDATES = ("update_ratio", "changed_ratio", "relative_speed")
_OF_ORIGINS = ("tokens_total", "tokens_seen", "tokens_per_second", "model_flops_total")
_OF_ALL = ("steps_total", "step_duration_seconds", "data_wait_seconds_total")
_OF_ANY = ("trainable_parameters", "monitored_parameters")


@dataclass
class Report:
    """What a comparison found."""

    worst: float = 0.0
    """Largest error over its tolerance."""
    where: str = ""
    values: int = 0
    problems: list[str] = field(default_factory=list)

    def check(self, what: str, got: float | None, expected: float, tolerance: float) -> None:
        """Compare a value; the tolerance is absolute."""
        self.values += 1
        if got is None:
            self.problems.append(f"{what}: no series, expected {expected:.9g}")
            return
        error = abs(got - expected) / tolerance if tolerance else (0.0 if got == expected else math.inf)
        if not error <= 1:
            self.problems.append(f"{what}: got {got:.9g}, expected {expected:.9g} within {tolerance:.2g}")
        if tolerance and error > self.worst:
            self.worst, self.where = error, what

    def expect(self, what: str, got: object, expected: object) -> None:
        """Compare what must be equal."""
        if got != expected:
            self.problems.append(f"{what}: got {got!r}, expected {expected!r}")


def compare(case: Case, outcomes: list[Outcome], expected: Reference) -> Report:
    """Compare all of a row."""
    report = Report()
    _compare_truth(case, outcomes, expected, report)
    if report.problems:
        return report  # of the row itself: nothing below would say anything about the monitor
    for moment, name in enumerate(("first step", "last step")):
        series = [outcome.run.series[moment] for outcome in outcomes]
        step = expected.steps[_sampled_step(case, series, 1 if moment == 0 else len(expected.steps), report) - 1]
        _compare_layers(case, series, step, report, name)
        _compare_whole(case, series, step, report, name)
    last = [outcome.run.series[-1] for outcome in outcomes]
    _compare_depths(case, last, expected, report)
    _compare_ranks(case, last, expected, report)
    _compare_histograms(case, last, expected, report)
    _compare_training(case, outcomes, expected, report)
    if case.settings.get("layers_on") == "all":
        _compare_local(outcomes, report)
    return report


def _compare_truth(case: Case, outcomes: list[Outcome], expected: Reference, report: Report) -> None:
    """The row's training is that of the reference, before anything is said about what the monitor makes of it."""
    for rank, outcome in enumerate(outcomes):
        owner = case.owner(case.stage_of(rank))
        for name, (grad, weight) in outcome.bare.truth.items():
            if not (case.own_experts and name.startswith("experts.")):
                wanted = expected.steps[-1].truth[owner, name]
                report.check(f"the training itself: gradient of {name}", grad, wanted[0], case.tolerance * wanted[0])
                report.check(f"the training itself: {name}", weight, wanted[1], case.tolerance * wanted[1])


def _sampled_step(case: Case, series: list[Series], happened: int, report: Report) -> int:
    """Return the step that the gauges show; all ranks must agree on it."""
    shown = [values(found, "sampled_step").get((), 0.0) for found in series]
    least = happened - case.settings.get("every_n_steps", 1)
    report.expect("sampled step of all ranks", shown, [shown[0]] * len(shown))
    report.expect("sampled step is a late one", least < shown[0] <= happened, True)
    return max(1, min(int(shown[0]), happened))


def values(series: Series, name: str) -> dict[tuple[str, ...], float]:
    """Return a metric's values by label values, without the prefix in the name."""
    return {tuple(labels.values()): value for found, labels, value in series if found == f"otel_train_{name}"}


def _compare_layers(case: Case, series: list[Series], step: Step, report: Report, moment: str) -> None:
    got: defaultdict[str, dict[Key, float]] = defaultdict(dict)
    ranks: defaultdict[tuple[object, ...], list[int]] = defaultdict(list)
    for rank, found in enumerate(series):
        for name, labels, value in found:
            if name.startswith(PREFIX):
                ranks[(name, *labels.items())].append(rank)
            if name.startswith(PREFIX) and name.removeprefix(PREFIX) in step.layers:
                key = (rank, labels["layer"], labels.get("kind") or labels["site"])
                got[name.removeprefix(PREFIX)][key] = value
    for which, found_on in ranks.items():
        if len(found_on) > 1:
            report.problems.append(f"{moment}: {which} is exported by ranks {found_on}")
    for metric, wanted in step.layers.items():
        for key in sorted(got[metric].keys() - wanted.keys()):
            report.problems.append(f"{moment}: {metric} {key} is exported and should not be: {got[metric][key]:.9g}")
        for key, value in wanted.items():
            report.check(f"{moment}: {metric} {key}", got[metric].get(key), value, _tolerance(case, step, metric, key))


def _tolerance(case: Case, step: Step, metric: str, key: Key) -> float:
    if metric == "parameters":
        return 0.0
    if metric in _MEANS:
        scale = 1.0 if metric == "activation_zero_ratio" else step.rms[key]
        return case.tolerance * scale
    if metric == "changed_ratio" and case.update_tolerance <= 1e-5:
        return 2.0 / step.elements[key]  # elements whose change is near half a unit in the last place
    if metric == "relative_speed":
        return 2 * case.update_tolerance * step.layers[metric][key]  # it is a ratio of two
    return (case.update_tolerance if metric in _UPDATES else case.tolerance) * abs(step.layers[metric][key])


def _compare_whole(case: Case, series: list[Series], step: Step, report: Report, moment: str) -> None:
    """Values of the whole model are exported by rank 0, and by nobody else."""
    names = {
        ("grad_norm", ("post_clip",)): step.whole["post_clip"],
        ("param_norm", ()): step.whole["param_norm"],
        ("update_ratio", ()): step.whole["update_ratio"],
    }
    if case.clip is not None:
        names["grad_norm", ("pre_clip",)] = step.whole["pre_clip"]
    for (name, labels), value in names.items():
        tolerance = (case.update_tolerance if name == "update_ratio" else case.tolerance) * value
        report.check(f"{moment}: {name} {labels}", values(series[0], name).get(labels), value, tolerance)
        for rank, found in enumerate(series[1:], 1):
            report.expect(f"{moment}: {name} of rank {rank}", values(found, name), {})


def _compare_depths(case: Case, series: list[Series], expected: Reference, report: Report) -> None:
    """Depths are unique over the run and rise in the order of registration, over all stages."""
    found: defaultdict[tuple[int, str], set[int]] = defaultdict(set)
    for rank, of_rank in enumerate(series):
        for name, labels, _ in of_rank:
            if name.startswith(PREFIX) and "histogram" not in name and "magnitude" not in name and "depth" in labels:
                found[rank, labels["layer"]].add(int(labels["depth"]))
    several = {key: sorted(depths) for key, depths in found.items() if len(depths) != 1}
    report.expect("layers with several depths", several, {})
    if case.settings.get("layers") == "block":
        return
    order = [min(found[place]) for place in expected.order if place in found]
    report.expect("depths in the order of registration", order, sorted(set(order)))


def _compare_ranks(case: Case, series: list[Series], expected: Reference, report: Report) -> None:
    """What each rank exports for itself, and what adds up over ranks."""
    for rank, found in enumerate(series):
        for name in _OF_ALL:
            report.expect(f"rank {rank} exports {name}", len(values(found, name)), 1)
        report.expect(f"steps of rank {rank}", values(found, "steps_total").get(()), float(len(expected.steps)))
        skipped = float(case.infinite_step is not None)
        report.expect(f"skipped steps of rank {rank}", values(found, "skipped_steps_total").get(()), skipped)
        errors = {part: value for part, value in values(found, "monitor_errors_total").items() if value}
        report.expect(f"errors of rank {rank}", errors, {})
        if case.infinite_step is None:
            strange = [v for name in ("nonfinite_total", "layer_nonfinite_total") for v in values(found, name).values() if v]
            report.expect(f"values of rank {rank} that are not finite", strange, [])
        for name in _OF_ORIGINS:
            report.expect(f"rank {rank} exports {name}", len(values(found, name)), int(case.is_model_origin(rank)))
    totals: Counter[str] = Counter()
    for found in series:
        totals.update({name: sum(values(found, name).values()) for name in (*_OF_ANY, *_OF_ORIGINS)})
    tokens = case.pieces * TOKENS * case.steps
    report.expect("tokens of all ranks", totals["tokens_total"], tokens)
    report.expect("tokens seen by all ranks", totals["tokens_seen"], tokens)
    report.check("FLOPs of all ranks", totals["model_flops_total"], expected.flops * tokens, 1e-9 * expected.flops * tokens)
    report.expect("trainable parameters of all ranks", totals["trainable_parameters"], expected.trainable)
    report.expect("monitored parameters of all ranks", totals["monitored_parameters"], expected.trainable)


def _compare_histograms(case: Case, series: list[Series], expected: Reference, report: Report) -> None:
    """Each element of matrices and embeddings is in one histogram, once a step."""
    sums = {name: sum(sum(values(found, f"layer_grad_{name}").values()) for found in series) for name in _HISTOGRAMS}
    elements = sum(n for (_, _, kind), n in expected.steps[-1].elements.items() if kind in ("matrix", "embedding"))
    wanted = elements * len(expected.steps)
    if case.settings.get("every_n_steps", 1) > 1:
        return
    report.check("elements in histograms", sums["magnitude"], wanted, 0.01 * wanted)
    report.check("elements in signed histograms", sums["value"], wanted, 0.01 * wanted)
    if case.settings.get("updates") != "sampled":
        whole = sum(step.absolute_sum for step in expected.steps)
        report.check("sum of histograms", sums["magnitude_sum"], whole, case.tolerance * whole)
        report.check(
            "sum of signed histograms", sums["value_sum"], sum(s.signed_sum for s in expected.steps), case.tolerance * whole
        )
        below = sum(step.negatives for step in expected.steps)
        report.check("negative elements in histograms", sums["value_negative"], below, 1e-3 * wanted)


def _compare_training(case: Case, outcomes: list[Outcome], expected: Reference, report: Report) -> None:
    """The monitor changed nothing, and each rank shows its own loss."""
    for rank, outcome in enumerate(outcomes):
        report.expect(f"warnings of rank {rank}", outcome.warnings, [])
        report.expect(f"random state of rank {rank} is untouched", outcome.same_random_state, True)
        if case.same == 0:
            report.expect(f"losses of rank {rank}", _comparable(outcome.run.losses), _comparable(outcome.bare.losses))
            report.expect(f"weights of rank {rank} are those without the monitor", outcome.same_weights, True)
        for step, (seen, bare) in enumerate(zip(outcome.run.losses, outcome.bare.losses, strict=True)):
            if step != case.infinite_step:
                report.check(f"loss of rank {rank} in step {step}", seen, bare, (case.same or 1e-12) * abs(bare))
        loss = values(outcome.run.series[-1], "loss").get(())
        if outcome.run.losses:
            report.check(f"loss that rank {rank} exports", loss, outcome.run.losses[-1], 1e-6 * outcome.run.losses[-1])
            pieces = expected.steps[-1].losses
            share = case.data_index(rank) * case.micro
            whole = sum(pieces[share : share + case.micro]) / case.micro
            report.check(f"loss of rank {rank} and of the reference", loss, whole, 1e-4 * whole)
        else:
            report.expect(f"loss that rank {rank} exports", loss, None)
        _compare_clipping(case, outcome, expected, report, rank)
    labels = [outcome.run.base_labels for outcome in outcomes]
    report.expect("names of the run", len({label["run"] for label in labels}), 1)
    report.expect("rank labels", [label["rank"] for label in labels], [str(rank) for rank in range(case.ranks)])


def _comparable(losses: list[float]) -> list[str]:
    return [f"{loss:.17g}" for loss in losses]  # so that NaN equals NaN


def _compare_clipping(case: Case, outcome: Outcome, expected: Reference, report: Report, rank: int) -> None:
    if case.clip is None:
        return
    norms = [norm for step, norm in enumerate(outcome.run.norms) if step != case.infinite_step]
    report.expect(f"norms that clipping returned on rank {rank}", len(norms), len(expected.steps))
    for step, (norm, wanted) in enumerate(zip(norms, expected.steps, strict=False)):
        value = wanted.whole["pre_clip"]
        report.check(f"norm that clipping returned on rank {rank} in step {step}", norm, value, case.tolerance * value)


def _compare_local(outcomes: list[Outcome], report: Report) -> None:
    """Each rank shows its own part of each layer, under other names."""
    for rank, outcome in enumerate(outcomes):
        for metric in ("local_layer_grad_norm", "local_layer_param_norm", "local_layer_update_ratio"):
            wanted = {key: found[metric] for key, found in outcome.run.local.items() if metric in found}
            got = {
                (labels["layer"], labels["kind"]): value
                for name, labels, value in outcome.run.series[-1]
                if name == f"otel_train_{metric}"
            }
            report.expect(f"{metric} of rank {rank}", sorted(got), sorted(wanted))
            for key, value in wanted.items():
                report.check(f"{metric} {key} of rank {rank}", got.get(key), value, 1e-5 * value)
