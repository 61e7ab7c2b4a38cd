"""Histograms of real gradients in real Prometheus servers, 3.5 and 2.42: native ones by protobuf, classic ones by text."""

from __future__ import annotations

import contextlib
import math
from bisect import bisect_left
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
import torch
from torch.optim import SGD

import otel_train
from otel_train.catalog import CATALOG, MetricSpec, gradients
from otel_train.catalog.gradients import MAGNITUDE_BOUNDS, VALUE_BOUNDS
from tests import problems
from tests.hooks.test_signed_histograms import FINITE, NOT_FINITE, plant
from tests.problems import Mlp
from tests.servers import VERSIONS, Prometheus, Version, prometheus, wait_until

STEPS = 5
SMALLEST, LARGEST = -46, 16
"""Exponents of the bounds at full resolution."""
NATIVE = [2.0**exponent for exponent in range(SMALLEST, LARGEST + 1)]
SIGNED_NATIVE = [*(-bound for bound in reversed(NATIVE)), *NATIVE]
SPECS = (gradients.LAYER_GRAD_MAGNITUDE, gradients.LAYER_GRAD_VALUE)
QUANTILES = (0.05, 0.25, 0.5, 0.9, 0.99)

pytestmark = [pytest.mark.servers, pytest.mark.slow]


@dataclass(frozen=True)
class Scraped:
    """A training that has ended its steps and is still there, and the servers that scrape it."""

    elements: Mapping[str, torch.Tensor]
    """The gradients of all steps by layer, in fp64, without NaN: special ones of ``first``, zeros of ``last``."""
    native: Prometheus
    """Has native histograms on."""
    classic: Prometheus
    """Has not: it asks for text."""
    version: Version

    def of(self, spec: MetricSpec, layer: str) -> torch.Tensor:
        """Return the elements that a histogram counts."""
        return self.elements[layer].abs() if spec is gradients.LAYER_GRAD_MAGNITUDE else self.elements[layer]


def train(model: Mlp, optimizer: SGD) -> dict[str, torch.Tensor]:
    """Make some steps, and return the gradients by layer."""
    found: dict[str, list[torch.Tensor]] = {"first": [], "second": [], "last": []}
    for step in range(STEPS):
        optimizer.zero_grad()
        problems.vector_loss(model, step).backward()  # type: ignore[no-untyped-call]  # torch's
        plant(model, torch.cat([FINITE, NOT_FINITE]))
        for layer, parts in found.items():
            grad = model.get_parameter(f"{layer}.weight").grad
            assert grad is not None
            if layer == "last":
                grad.zero_()
            parts.append(grad.double().flatten())
        with torch.no_grad():
            weights = [p.clone() for p in model.parameters()]
            optimizer.step()
            for p, before in zip(model.parameters(), weights, strict=True):
                p.copy_(before)  # NaN among the gradients must not end the training
    whole = {layer: torch.cat(parts) for layer, parts in found.items()}
    return {layer: grads[~grads.isnan()] for layer, grads in whole.items()}


def _is_scraped(server: Prometheus) -> bool:
    return bool(server.query("up == 1"))


@pytest.fixture(scope="module", params=VERSIONS)
def scraped(request: pytest.FixtureRequest) -> Iterator[Scraped]:
    """Train, and let two servers of a version scrape it."""
    version: Version = request.param
    torch.manual_seed(0)
    model = Mlp(hidden=32)
    optimizer = SGD(model.parameters(), lr=0.01)
    with contextlib.ExitStack() as stack:
        monitor = stack.enter_context(
            otel_train.attach(
                model,
                optimizer,
                host="127.0.0.1",
                port=0,
                run="native",
                every_n_steps=1,
                max_overhead=None,
                histograms="layer",
                signed_histograms=True,
            )
        )
        elements = train(model, optimizer)
        assert monitor.flush()
        assert monitor.url is not None
        jobs = {"training": int(monitor.url.rstrip("/").rpartition(":")[2])}
        native = stack.enter_context(prometheus(version, jobs, features=["native-histograms"]))
        classic = stack.enter_context(prometheus(version, jobs))
        for server in (native, classic):
            wait_until(partial(_is_scraped, server), 40, "the training is scraped")
        yield Scraped(elements, native, classic, version)


def histogram(server: Prometheus, spec: MetricSpec, layer: str) -> dict[str, Any]:
    """Return a native histogram as the server gives it."""
    (entry,) = server.ask(f'{spec.prometheus_name}{{layer="{layer}"}}')
    found: dict[str, Any] = entry["histogram"][1]
    return found


def in_range(elements: torch.Tensor, rule: int, low: float, high: float) -> int:
    """Count the elements of a bucket; the rule says which of its ends are in it, as in Prometheus' API."""
    above = elements >= low if rule in {1, 3} else elements > low
    below = elements <= high if rule in {0, 3} else elements < high
    return int((above & below).sum())


@pytest.mark.parametrize("layer", ["first", "second", "last"])
@pytest.mark.parametrize("spec", SPECS, ids=lambda spec: spec.name)
def test_native_buckets_hold_what_their_bounds_say(scraped: Scraped, spec: MetricSpec, layer: str) -> None:
    """Exact powers of two, zeros, subnormals, Inf, both signs; and zeros alone are a native histogram too."""
    elements = scraped.of(spec, layer)
    found = histogram(scraped.native, spec, layer)
    assert int(found["count"]) == len(elements)
    # what is larger than all bounds is in the buckets beyond them: 2^17 stands for infinity
    elements = elements.clamp(-(2.0**17), 2.0**17)
    expected = {
        (rule, float(low), float(high)): in_range(elements, rule, float(low), float(high))
        for rule, low, high, _ in found["buckets"]
    }
    assert {(rule, float(low), float(high)): int(count) for rule, low, high, count in found["buckets"]} == expected
    assert sum(expected.values()) == len(elements)
    assert {high / low for rule, low, high in expected if low > 0} <= {2.0}
    assert {rule for rule, _, high in expected if high < 0} <= {1}, "mirrored below zero"
    if layer == "last":
        assert expected == {(3, -(2.0**SMALLEST), 2.0**SMALLEST): len(elements)}


@pytest.mark.parametrize("layer", ["first", "second", "last"])
@pytest.mark.parametrize("spec", SPECS, ids=lambda spec: spec.name)
def test_classic_buckets_include_their_upper_bound(scraped: Scraped, spec: MetricSpec, layer: str) -> None:
    """Each ``le`` counts what is smaller or equal, by text; of both signs."""
    elements = scraped.of(spec, layer)
    series = scraped.classic.query(f'{spec.prometheus_name}_bucket{{layer="{layer}"}}')
    found = {float(one.labels["le"]): int(one.value) for one in series}
    assert found == {bound: int((elements <= bound).sum()) for bound in (*spec.bounds, math.inf)}


@pytest.mark.parametrize("spec", SPECS, ids=lambda spec: spec.name)
def test_quantiles_are_those_of_the_gradients_within_a_bucket(scraped: Scraped, spec: MetricSpec) -> None:
    """By both roads, against torch.quantile of what the optimizer used."""
    signed = spec is gradients.LAYER_GRAD_VALUE
    roads = {
        "native": (scraped.native, spec.prometheus_name, SIGNED_NATIVE if signed else NATIVE),
        "classic": (scraped.classic, f"{spec.prometheus_name}_bucket", list(VALUE_BOUNDS if signed else MAGNITUDE_BOUNDS)),
    }
    for share in QUANTILES:
        true = torch.quantile(scraped.of(spec, "second"), share).item()
        for road, (server, name, bounds) in roads.items():
            (found,) = server.query(f'histogram_quantile({share}, {name}{{layer="second"}})')
            apart = abs(bisect_left(bounds, found.value) - bisect_left(bounds, true))
            assert apart <= 1, f"{road}: quantile {share} is {found.value}, of the gradients {true}"


def test_counts_sums_and_fractions_are_those_of_the_gradients(scraped: Scraped) -> None:
    """What native histograms have functions for; their sum can be below zero."""
    elements = scraped.elements["second"]
    name = f'{gradients.LAYER_GRAD_VALUE.prometheus_name}{{layer="second"}}'
    for expression, expected in (
        (f"histogram_count({name})", len(elements)),
        (f"histogram_sum({name})", elements.sum().item()),
        (f"histogram_fraction(-Inf, -{2.0**-12}, {name})", (elements < -(2.0**-12)).double().mean().item()),
        (f"histogram_fraction({2.0**-12}, +Inf, {name})", (elements > 2.0**-12).double().mean().item()),
    ):
        (found,) = scraped.native.query(expression)
        assert found.value == pytest.approx(expected, rel=1e-5), expression


def test_all_other_series_are_the_same_by_protobuf_and_by_text(scraped: Scraped) -> None:
    """Names, labels, among them each ``le``, and values; only what is a native histogram has another form."""
    moving = "otel_train_monitor_seconds_total"
    native_names = "|".join(spec.prometheus_name for spec in CATALOG.values() if spec.exponential)
    selector = f'{{__name__=~"otel_train_.+",__name__!~"({native_names})(_bucket|_count|_sum)?"}}'
    answers = []
    for server in (scraped.native, scraped.classic):
        series = server.query(selector)
        answers.append({frozenset(one.labels.items()): None if one.labels["__name__"] == moving else one.value for one in series})
    assert len(answers[0]) > 60
    assert any(("le", "0.001") in labels for labels in answers[0])
    # NaN is not equal to itself
    assert [{labels: str(value) for labels, value in answer.items()} for answer in answers[:1]] == [
        {labels: str(value) for labels, value in answer.items()} for answer in answers[1:]
    ]


def test_a_server_can_have_both_forms() -> None:
    """``always_scrape_classic_histograms``, in 3.5: dashboards and rules that ask for ``_bucket`` go on."""
    model = Mlp(hidden=16)
    optimizer = SGD(model.parameters(), lr=0.01)
    with otel_train.attach(model, optimizer, host="127.0.0.1", port=0, every_n_steps=1, signed_histograms=True) as monitor:
        problems.vector_loss(model, 0).backward()  # type: ignore[no-untyped-call]  # torch's
        optimizer.step()
        assert monitor.flush()
        assert monitor.url is not None
        jobs = {"training": int(monitor.url.rstrip("/").rpartition(":")[2])}
        both = {"training": "always_scrape_classic_histograms: true"}
        with prometheus("current", jobs, features=["native-histograms"], settings=both) as server:
            wait_until(lambda: bool(server.query("up == 1")), 40, "the training is scraped")
            for spec in SPECS:
                name = spec.prometheus_name
                counts = [int(entry["histogram"][1]["count"]) for entry in server.ask(name)]
                assert sorted(counts) == sorted(int(one.value) for one in server.query(f'{name}_bucket{{le="+Inf"}}'))
                assert len(server.query(f"{name}_bucket")) == len(counts) * (len(spec.bounds) + 1)
