"""Real Prometheus servers, 3.5 and 2.42, scrape real trainings."""

from __future__ import annotations

import contextlib
import time
from dataclasses import dataclass
from pathlib import Path

import pytest

from otel_train.catalog import CATALOG, Instrument, gradients, otlp, parameters, specs_of, throughput, updates
from tests.servers import FULL_TRAINING, VERSIONS, Prometheus, Series, Training, Version, prometheus, training, wait_until

NOT_HERE = {
    throughput.MEMORY_ALLOCATED.prometheus_name: "the CPU has no allocator of an accelerator",
    throughput.MEMORY_RESERVED.prometheus_name: "as above",
    throughput.MEMORY_PEAK.prometheus_name: "as above",
    throughput.ALLOCATOR_RETRIES.prometheus_name: "as above",
    parameters.REPLICA_DIVERGENCE.prometheus_name: "there is one rank",
    parameters.LOCAL_PARAM_NORM.prometheus_name: "there is one rank",
    parameters.LOCAL_LAYER_PARAM_NORM.prometheus_name: "there is one rank",
    gradients.LOCAL_LAYER_GRAD_NORM.prometheus_name: "there is one rank",
    updates.LOCAL_LAYER_UPDATE_RATIO.prometheus_name: "there is one rank",
    **{spec.prometheus_name: "nothing is pushed" for spec in specs_of(otlp)},
    gradients.LAYER_GRAD_VALUE.prometheus_name: "signed histograms are off",
}
"""All else applies: the training gives its loss scale, FLOPs and peak, stays in its warmup, clips and evaluates."""
ENDINGS = {"close": 0, "close_and_die": 0, "close_and_live_on": 0, "raise": 1, "sys_exit": 3}
"""How the trainings end, and their exit status."""

pytestmark = pytest.mark.servers


@dataclass
class Story:
    """What the server said while the trainings ran and after they had ended."""

    up: list[Series]
    by_name: dict[str, list[Series]]
    """Answers of instant queries for each of the catalog's metrics, for the training that is closed properly."""
    active: dict[str, list[Series]]
    """The last stored ``run_active`` of each training after its end."""
    up_while_living_on: list[Series]
    """``up`` of the training that is closed while its process lives on."""
    up_after: list[Series]
    statuses: dict[str, int]
    said: dict[str, str]
    seconds_to_close: float


def _query_name(name: str) -> str:
    return f"{name}_bucket" if CATALOG[name].instrument is Instrument.HISTOGRAM else name


def _last_active(server: Prometheus, ending: str) -> list[Series]:
    return server.query(f'last_over_time(otel_train_run_active{{job="{ending}"}}[5m])')


def _scraped_since(server: Prometheus, job: str, seconds: float) -> list[Series]:
    """Return ``up`` once it is 0, at the latest after some seconds."""
    deadline = time.monotonic() + seconds
    while True:
        found = server.query(f'up{{job="{job}"}}')
        if time.monotonic() > deadline or [series.value for series in found] == [0]:
            return found
        time.sleep(0.2)


def _tell(version: Version, folder: Path) -> Story:
    with contextlib.ExitStack() as stack:
        runs: dict[str, Training] = {
            ending: stack.enter_context(training(folder / ending, FULL_TRAINING, [ending])) for ending in ENDINGS
        }
        server = stack.enter_context(prometheus(version, {ending: run.port for ending, run in runs.items()}))
        for run in runs.values():
            run.wait_for_steps(10)
        started = time.monotonic()
        wait_until(lambda: len(server.query("up == 1")) == len(ENDINGS), 40, "every training is scraped")
        # the rarest series: dead units need 512 rows, and two scrapes tell the interval
        rare = "otel_train_layer_activation_dead_unit_ratio"
        wait_until(lambda: bool(server.query(f'{rare}{{job="close"}}')), 30, f"{rare} is stored")
        wait_until(lambda: len(server.query("count_over_time(up[1m]) >= 3")) == len(ENDINGS), 30, "three scrapes of each")
        assert time.monotonic() - started < 80  # the trainings end by themselves after 90 s
        up = server.query("up")
        by_name = {name: server.query(f'{_query_name(name)}{{job="close"}}') for name in CATALOG}
        for run in runs.values():
            run.finish()
        wait_until((folder / "close_and_live_on" / "closed").exists, 20, "close returns")
        lives_on = _scraped_since(server, "close_and_live_on", 4.0)
        assert runs["close_and_live_on"].process.poll() is None
        statuses = {ending: run.wait() for ending, run in runs.items()}
        wait_until(lambda: len(server.query("up == 0")) == len(ENDINGS), 20, "the targets are gone")
        return Story(
            up=up,
            by_name=by_name,
            active={ending: _last_active(server, ending) for ending in ENDINGS},
            up_while_living_on=lives_on,
            up_after=server.query("up"),
            statuses=statuses,
            said={ending: run.said() for ending, run in runs.items()},
            seconds_to_close=float((folder / "close" / "closed").read_text()),
        )


@pytest.fixture(scope="module", params=VERSIONS)
def story(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Story:
    """Five trainings scraped by one server; told once a version."""
    version: Version = request.param
    return _tell(version, tmp_path_factory.mktemp(version))


@pytest.mark.slow
def test_every_training_is_up(story: Story) -> None:
    """Each scrape succeeds while it runs, and the target goes down with the process."""
    assert {s.labels["job"]: s.value for s in story.up} == dict.fromkeys(ENDINGS, 1)
    assert {s.labels["job"]: s.value for s in story.up_after} == dict.fromkeys(ENDINGS, 0)


@pytest.mark.slow
@pytest.mark.parametrize("name", CATALOG)
def test_every_metric_that_applies_answers_an_instant_query(story: Story, name: str) -> None:
    """All of the catalog but what only an accelerator, or several ranks, have."""
    if name in NOT_HERE:
        assert story.by_name[name] == []
    else:
        assert story.by_name[name]


@pytest.mark.slow
def test_every_series_carries_our_labels_and_the_scrapes_own(story: Story) -> None:
    """run, rank and the constant label are ours; nothing had to be renamed to exported_*."""
    every = [series for found in story.by_name.values() for series in found]
    assert len(every) > 100
    for series in every:
        labels = series.labels
        assert (labels["run"], labels["rank"], labels["team"], labels["job"]) == ("e2e", "0", "tests", "close")
        assert labels["instance"].startswith("127.0.0.1:")
        assert not any(label.startswith("exported_") for label in labels)


@pytest.mark.slow
def test_labels_are_the_catalogs(story: Story) -> None:
    """Each metric has the labels that the catalog gives it, no more."""
    scraped = {"__name__", "run", "rank", "team", "job", "instance"}
    for name, found in story.by_name.items():
        spec = CATALOG[name]
        expected = scraped | set(spec.labels) | ({"le"} if spec.instrument is Instrument.HISTOGRAM else set())
        for series in found:
            # an empty label is none, to Prometheus
            assert expected - {"uuid"} <= series.labels.keys() <= expected, name


@pytest.mark.slow
@pytest.mark.parametrize("ending", ENDINGS)
def test_the_end_of_the_run_is_stored(story: Story, ending: str) -> None:
    """However the script ends, the last stored run_active is 0."""
    assert [series.value for series in story.active[ending]] == [0]


@pytest.mark.slow
def test_a_closed_run_is_no_longer_scraped_though_its_process_lives_on(story: Story) -> None:
    """The server keeps its connection: close has to end it, or the old run is read for as long as the process lives."""
    assert [series.value for series in story.up_while_living_on] == [0]


@pytest.mark.slow
def test_scripts_end_as_they_would_without_us(story: Story) -> None:
    """Exit statuses stay, and nothing of ours is on stderr."""
    assert story.statuses == ENDINGS
    assert story.said.pop("raise").rstrip().endswith("RuntimeError: the training fell over")
    assert story.said == dict.fromkeys(story.said, "")


@pytest.mark.slow
def test_close_waits_for_one_scrape_and_no_longer(story: Story) -> None:
    """The interval is one second: close takes at most two of them, and a little."""
    assert story.seconds_to_close < 3
