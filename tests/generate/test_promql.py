"""Queries are built from specs: what does not exist cannot be asked for."""

from __future__ import annotations

from dataclasses import replace

import pytest

from otel_train.catalog import CATALOG, gradients, loss, run, throughput, updates
from otel_train.errors import CatalogError
from otel_train.generate import promql
from otel_train.generate.alerts import Alert, alerts
from otel_train.generate.recording import recording_rules
from otel_train.generate.time_base import DEMO, STANDARD, TIME_BASES
from tests.generate.queries import unknown


def test_selectors_are_written_as_promql_has_them() -> None:
    """Equality is what a bare label means."""
    assert promql.series(loss.LOSS) == "otel_train_loss"
    assert promql.series(updates.LAYER_UPDATE_RATIO, ("kind=~", "matrix|norm"), ("run", "r")) == (
        'otel_train_layer_update_ratio{kind=~"matrix|norm", run="r"}'
    )
    assert promql.series(throughput.STEP_DURATION, ("le", "+Inf"), part="bucket") == (
        'otel_train_step_duration_seconds_bucket{le="+Inf"}'
    )
    assert promql.rate(run.STEPS, "5m") == "rate(otel_train_steps_total[5m])"
    assert promql.increase(throughput.STEP_DURATION, "5m", part="sum") == "increase(otel_train_step_duration_seconds_sum[5m])"
    assert promql.merged("max", "x", "layer") == "max by (job, run, layer) (x)"


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: promql.series(replace(loss.LOSS, name="otel_train.lossy")), "otel_train.lossy is not in the catalog"),
        (lambda: promql.series(loss.LOSS, ("layer", "x")), "expected one of the labels run, rank, job, instance, got layer"),
        (lambda: promql.series(throughput.STEP_DURATION), "expected the part of a histogram, and of nothing else, got ''"),
        (lambda: promql.series(loss.LOSS, part="sum"), "expected the part of a histogram, and of nothing else, got 'sum'"),
        (lambda: promql.merged("max", "x", "optimzer"), "expected one of the labels"),
        (lambda: promql.rate(gradients.GRAD_NORM, "5m"), "expected a counter or a histogram for rate(), got a gauge"),
    ],
)
def test_what_does_not_exist_cannot_be_asked_for(make: object, message: str) -> None:
    """So that a renamed metric breaks the build, and not a dashboard."""
    with pytest.raises(CatalogError) as raised:
        make()  # type: ignore[operator]
    assert message in str(raised.value)


@pytest.mark.parametrize(("count", "text"), [(1, "1s"), (90, "90s"), (300, "5m"), (3600, "1h"), (7200, "2h"), (0, "0s")])
def test_durations_are_written_in_their_largest_whole_unit(count: int, text: str) -> None:
    """As people would."""
    assert promql.seconds(count) == text


def test_every_rule_names_metrics_and_labels_that_exist() -> None:
    """Read back by another parser than wrote them."""
    for time_base in TIME_BASES:
        for rule in recording_rules(time_base):
            assert unknown(rule.expr) == set(), rule.record
        for alert in alerts(time_base):
            assert unknown(alert.expr) == set(), alert.name
    assert unknown("otel_train_lossy") == {"otel_train_lossy"}  # the check itself finds something
    assert unknown('otel_train_loss{layer="x"}') == {"otel_train_loss{layer}"}


def test_recording_rules_are_named_by_level_metric_and_operation() -> None:
    """Level run or layer, a metric of the catalog, what was done with it."""
    for rule in recording_rules(STANDARD):
        level, metric, operation = rule.record.split(":")
        assert level in {"run", "run_rank", "run_layer"}
        assert metric.removesuffix("_at_peak_log10") in CATALOG, rule.record
        assert operation
        assert rule.brief.endswith(".")


def test_rules_use_only_recording_rules_above_them() -> None:
    """They are evaluated in order; a rule may read its own last answer."""
    seen: set[str] = set()
    for rule in recording_rules(STANDARD):
        seen.add(rule.record)
        used = {name for name in (other.record for other in recording_rules(STANDARD)) if name in rule.expr}
        assert used <= seen, rule.record


def test_both_time_bases_have_the_same_alerts() -> None:
    """Only the clocks differ."""
    standard, demo = alerts(STANDARD), alerts(DEMO)
    assert [(a.name, a.severity, a.summary) for a in standard] == [(a.name, a.severity, a.summary) for a in demo]
    assert all(d.hold_for < s.hold_for or not s.hold_for for s, d in zip(standard, demo, strict=True))


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"name": "LossHigh"}, "expected OtelTrain…"),
        ({"severity": "page"}, "with a severity of"),
        ({"summary": "Run {{ $labels.run }} is bad."}, "expected a static sentence"),
        ({"summary": "It is bad"}, "expected a static sentence"),
        ({"description": "Something is bad."}, "expected a description that names the run"),
    ],
)
def test_alerts_follow_the_conventions(wrong: dict[str, str], message: str) -> None:
    """Of monitoring mixins."""
    good = {
        "name": "OtelTrainX",
        "severity": "info",
        "expr": "x > 1",
        "summary": "It is bad.",
        "description": "Run {{ $labels.run }}.",
    }
    Alert(**good)  # type: ignore[arg-type]
    with pytest.raises(CatalogError, match=message):
        Alert(**good | wrong)  # type: ignore[arg-type]


@pytest.mark.parametrize("wrong", [{"window": 30}, {"absent": 20}, {"stalled": 20}, {"memory": 600}])
def test_clocks_that_cannot_work_together_are_refused(wrong: dict[str, int]) -> None:
    """A window of two scrapes, a `for` of one, a memory shorter than the patience."""
    with pytest.raises(CatalogError, match="time base standard: expected"):
        replace(STANDARD, **wrong)  # type: ignore[arg-type]
