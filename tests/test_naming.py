"""OTel names to Prometheus names."""

from __future__ import annotations

import pytest

from otel_train import naming
from otel_train.errors import CatalogError

NAMES = [
    ("otel_train.layer.update_ratio", "", False, "otel_train_layer_update_ratio"),
    ("otel_train.steps", "", True, "otel_train_steps_total"),
    ("otel_train.step.duration", "s", False, "otel_train_step_duration_seconds"),
    ("otel_train.data_wait", "s", True, "otel_train_data_wait_seconds_total"),
    ("otel_train.monitor.seconds", "s", True, "otel_train_monitor_seconds_total"),
    ("otel_train.memory.allocated", "By", False, "otel_train_memory_allocated_bytes"),
    ("otel_train.tokens", "{token}", True, "otel_train_tokens_total"),
    ("otel_train.mfu_ratio", "", False, "otel_train_mfu_ratio"),
]


@pytest.mark.parametrize(("name", "unit", "counter", "expected"), NAMES)
def test_names_translate_as_the_table_says(name: str, unit: str, counter: bool, expected: str) -> None:  # noqa: FBT001  # a table
    """One row a rule."""
    assert naming.prometheus_name(name, unit, counter=counter) == expected


@pytest.mark.parametrize(
    ("name", "unit", "expected"),
    [
        ("otel_train.layer.grad_magnitude", "", "otel_train.layer.grad_magnitude.bucket"),
        ("otel_train.step.duration", "s", "otel_train.step.duration.seconds.bucket"),
        ("otel_train.wait_seconds", "s", "otel_train.wait_seconds.bucket"),
    ],
)
def test_a_part_of_a_histogram_has_the_name_that_a_scrape_gives_it(name: str, unit: str, expected: str) -> None:
    """The unit is a word of the name, or each road would put it behind the part."""
    part = naming.histogram_part(name, unit, "bucket")
    assert part == expected
    assert naming.prometheus_name(part, "", counter=False) == f"{naming.prometheus_name(name, unit, counter=False)}_bucket"


@pytest.mark.parametrize("name", ["otel_train", "Otel.train", "otel_train.", "otel train.x", "otel_train..x"])
def test_a_name_that_is_not_dotted_words_is_refused(name: str) -> None:
    """Upper case, blanks and empty parts."""
    with pytest.raises(CatalogError, match="expected a name like"):
        naming.prometheus_name(name, "", counter=False)


@pytest.mark.parametrize("unit", ["1", "ms", "By/s", "{token}/s", "{}"])
def test_units_that_roads_name_differently_are_refused(unit: str) -> None:
    """The collector and Prometheus disagree on 1 and on rates."""
    with pytest.raises(CatalogError, match="expected a unit"):
        naming.unit_word(unit)


@pytest.mark.parametrize(
    ("name", "good"), [("team", True), ("_x9", True), ("__name__", False), ("9x", False), ("a-b", False), ("", False)]
)
def test_label_names_are_those_of_prometheus(name: str, good: bool) -> None:  # noqa: FBT001  # a table
    """Names with two underscores in front belong to Prometheus."""
    assert naming.is_label_name(name) is good
