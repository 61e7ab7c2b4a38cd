"""Ranks exchange samples: real stores and real gloo groups, one rank a thread."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial

import pytest
from torch._C._distributed_c10d import HashStore

from otel_train.budget import Pace
from otel_train.config import Rank
from otel_train.guard import Guard
from otel_train.parallel import Membership, join, share_error, share_run
from otel_train.parallel.board import Board
from otel_train.parallel.exchange import Exchange
from otel_train.parallel.layout import layouts
from otel_train.records import (
    MAGNITUDE_EXPONENTS,
    ActivationReading,
    Agreement,
    Layer,
    LayerSample,
    ParameterReading,
    ParameterSums,
    RankSample,
    Signs,
    StepRecord,
)
from tests.parallel.test_layout import manifest, place, shard

STEP = StepRecord(
    finished_at=0.0, duration=None, forward=0.0, data_wait=0.0, micro_batches=1, tokens=0, samples=0, sequence_length=None,
    skipped=False, losses=(), grad_norm=None, clipped=False, loss_scale=None, groups=(), precision="float32", sample=None, sampled=True,
)  # fmt: skip
PACE = Pace.regular(10)
BINS = len(MAGNITUDE_EXPONENTS) + 1
SUMS = ParameterSums(16, 1.0, 4.0, 9.0, 0, 0, update_squared=0.09, changed=8.0)
LAYERS = {name: Layer(name, depth, "matrix", "0") for depth, name in enumerate(("w", "v"))}


def readings(*names: str, sums: ParameterSums = SUMS) -> LayerSample:
    """Return a sample of some parameters, and of one activation site."""
    site = ActivationReading("act", 1, "post", 4.0, 2.0, 8.0, 3.0, 0.0, 0.0, None, None, 0)
    return LayerSample(tuple(ParameterReading(LAYERS[name], None, sums, name) for name in names), (site,))


@dataclass
class Member:
    """One rank: its exchange and what it was given."""

    exchange: Exchange
    guard: Guard
    taken: list[RankSample] = field(default_factory=list)

    def put(self, attempt: int, sample: LayerSample | None, pace: Pace = PACE) -> None:
        self.exchange.put(replace(STEP, attempt=attempt, sample=sample), attempt, pace)


@contextmanager
def ranks(*manifests: object, seconds: float = 10.0, everything: bool = False, signed: bool = False) -> Iterator[list[Member]]:
    """Start the exchanges of all ranks over one store."""
    store = HashStore()
    planned = layouts(manifests)  # type: ignore[arg-type]
    members: list[Member] = []
    for rank, layout in enumerate(planned):
        guard, taken = Guard(), []  # type: ignore[var-annotated]
        exchange = Exchange(
            Board(store, Rank(rank, rank, len(planned)), "test"), layout, labels={name: (layer, None) for name, layer in LAYERS.items()},
            depths={"act": 1}, seconds=seconds, everything=everything, signed=signed, horizon=partial(int, 30 + rank), guard=guard, deliver=taken.append,
        )  # fmt: skip
        exchange.start()
        members.append(Member(exchange, guard, taken))
    try:
        yield members
    finally:
        for member in members:
            member.exchange.stop(1.0)


def settle(*members: Member) -> None:
    """Wait until everything is delivered."""
    assert [member.exchange.flush(20) for member in members] == [True] * len(members)


def at_once(calls: list[Callable[[], object]]) -> list[object]:
    """Call everything at the same time, and return the answers."""
    answers: list[object] = [None] * len(calls)

    def call(index: int) -> None:
        try:
            answers[index] = calls[index]()
        except Exception as error:  # noqa: BLE001  # handed to the test
            answers[index] = error

    threads = [threading.Thread(target=call, args=(i,)) for i in range(len(calls))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    return answers


def test_shards_add_up_to_what_the_owner_exports() -> None:
    """Sums of both ranks on rank 0, nothing on rank 1; activations of both."""
    with ranks(*[manifest(r, shard("w", r, 2), groups=((0, 1),)) for r in range(2)]) as (one, two):
        one.put(10, readings("w"))
        two.put(10, readings("w", sums=replace(SUMS, gradient_squared=5.0, nonfinite_gradients=3)))
        settle(one, two)
        (reading,) = one.taken[0].own.parameters
        assert (reading.sums.elements, reading.sums.gradient_squared, reading.sums.nonfinite_gradients) == (32, 9.0, 3)
        assert reading.sums.update_squared == pytest.approx(0.18)
        assert one.taken[0].own.activations[0].count == 8
        assert one.taken[0].step == 10
        assert one.taken[0].own.run is not None
        assert one.taken[0].own.run.gradient_squared == 9.0
        assert (two.taken[0].own.parameters, two.taken[0].own.activations) == ((), ())
        assert two.taken[0].own.run == one.taken[0].own.run
        assert (one.taken[0].local, one.guard.errors["ranks"]) == (None, 0)


def test_updates_that_not_all_ranks_measured_have_no_values() -> None:
    """Parts of an update over the whole weight would look like a smaller update."""
    unmeasured = replace(SUMS, update_squared=None, changed=None)
    with ranks(*[manifest(r, shard("w", r, 2), groups=((0, 1),)) for r in range(2)]) as (one, two):
        for step, other in ((10, SUMS), (20, unmeasured)):
            one.put(step, readings("w"))
            two.put(step, readings("w", sums=other))
        settle(one, two)
        both, half = (taken.own.parameters[0].sums for taken in one.taken)
        assert both.update_squared == pytest.approx(0.18)
        assert both.changed == 16.0
        assert (half.update_squared, half.changed) == (None, None)


def test_histograms_that_not_all_ranks_counted_have_no_values() -> None:
    """A rank that learned too late of what was agreed on: half the counts would look like half the elements."""
    counted = replace(SUMS, magnitudes=(1.0,) * BINS, magnitude_sum=2.0)
    with ranks(*[manifest(r, shard("w", r, 2), groups=((0, 1),)) for r in range(2)]) as (one, two):
        for step, other in ((10, counted), (20, SUMS)):
            one.put(step, readings("w", sums=counted))
            two.put(step, readings("w", sums=other))
        settle(one, two)
        both, half = (taken.own.parameters[0].sums for taken in one.taken)
        assert (both.magnitudes, both.magnitude_sum) == ((2.0,) * BINS, 4.0)
        assert (half.magnitudes, half.magnitude_sum) == (None, 0.0)


def test_signs_add_up_over_ranks_with_the_magnitudes_and_only_with_them() -> None:
    """Negative elements, exact powers and sums, each in its place; activations, which travel behind them, as well."""
    below = tuple(float(i) for i in range(BINS - 1))
    powers = tuple(0.25 * i for i in range(BINS - 1))
    counted = replace(SUMS, magnitudes=(100.0,) * BINS, magnitude_sum=2.0, signs=Signs(below, powers, -7.0))
    with ranks(*[manifest(r, shard("w", r, 2), groups=((0, 1),)) for r in range(2)], signed=True) as (one, two):
        for step, other in ((10, counted), (20, SUMS)):
            one.put(step, readings("w", sums=counted))
            two.put(step, readings("w", sums=other))
        settle(one, two)
        both, half = (taken.own.parameters[0].sums for taken in one.taken)
        assert both.magnitudes == (200.0,) * BINS
        assert both.signs == Signs(tuple(2 * n for n in below), tuple(2 * n for n in powers), -14.0)
        assert (half.magnitudes, half.signs) == (None, None)
        assert one.taken[0].own.activations[0].count == 8


def test_activations_of_an_earlier_step_are_shown_and_are_no_new_sample() -> None:
    """Where they are measured less often; also where the other rank does not come."""
    new = readings("w")
    old = replace(new, activations=(), earlier_activations=new.activations)
    with ranks(*[manifest(r, shard("w", r, 2), groups=((0, 1),)) for r in range(2)], seconds=0.5) as (one, two):
        for step, sample in ((10, new), (20, old)):
            one.put(step, sample)
            two.put(step, sample)
        settle(one, two)
        one.put(30, old)
        settle(one)
        counts = [
            ([site.count for site in taken.own.activations], [site.count for site in taken.own.earlier_activations])
            for taken in one.taken
        ]
        assert counts == [([8.0], []), ([], [8.0]), ([], [4.0])]


def test_replicas_count_once_and_their_divergence_is_seen() -> None:
    """Two ranks with the same parameter, whose norms differ by one in a thousand."""
    with ranks(*[manifest(r, place("w", mates=0, by="group"), groups=((0, 1),)) for r in range(2)]) as (one, two):
        one.put(1, readings("w"))
        two.put(1, readings("w"))
        one.put(2, readings("w"))
        two.put(2, readings("w", sums=replace(SUMS, weight_squared=9.0 * 1.001**2)))
        settle(one, two)
        runs = [taken.own.run for taken in one.taken]
        assert [run and run.weight_squared for run in runs] == [9.0, 9.0]
        assert [run and run.replica_divergence for run in runs] == [0.0, pytest.approx(0.001, rel=0.01)]


def test_ranks_agree_on_the_most_sparing_pace_and_on_the_last_step_that_one_needs() -> None:
    """Part by part; also at a step that one of them skipped."""
    with ranks(*[manifest(r, place("w", mates=0, by="group"), groups=((0, 1),)) for r in range(2)]) as (one, two):
        one.put(10, readings("w"), Pace(10, 80, 10))
        two.put(10, readings("w"), Pace(20, 20, 40))
        one.put(20, readings("w"), Pace(20, 80, 40))
        two.put(20, None, Pace(20, 40, 20))
        settle(one, two)
        for member in (one, two):
            assert [taken.agreed for taken in member.taken] == [Agreement(Pace(20, 80, 40), 31)] * 2


def test_ranks_that_do_not_meet_agree_on_nothing() -> None:
    """One does not come."""
    with ranks(*[manifest(r, place("w", mates=0, by="group"), groups=((0, 1),)) for r in range(2)], seconds=0.3) as (one, _):
        one.put(10, readings("w"), Pace(20, 20, 20))
        settle(one)
        assert one.taken[0].agreed is None


def test_a_rank_that_skipped_leaves_the_others_what_is_whole() -> None:
    """A pipeline's stage whose scaler found Inf: no layers of that stage, and no value of the whole run."""
    with ranks(manifest(0, place("w", mark="a")), manifest(1, place("w", mark="b"))) as (one, two):
        one.put(10, readings("w"))
        two.put(10, None)
        settle(one, two)
        assert [reading.name for reading in one.taken[0].own.parameters] == ["w"]
        assert one.taken[0].own.run is None
        assert two.taken[0].own.parameters == ()
        one.put(20, readings("w"))
        two.put(20, readings("w"))
        settle(one, two)
        assert one.taken[1].own.run is not None, "the next step has all again"
        assert two.taken[1].own.parameters[0].layer == Layer("w", 1, "matrix", "0"), "depth goes on"


def test_summands_of_a_gradient_are_added_before_they_are_squared() -> None:
    """(1, 2) and (3, -2) are (4, 0): 16, not 18."""
    halves = [(1.0, 2.0), (3.0, -2.0)]
    with ranks(*[manifest(r, place("w", (2,), mates=0, by="mesh"), groups=((0, 1),)) for r in range(2)]) as members:
        for member, half in zip(members, halves, strict=True):
            member.put(1, readings("w", sums=replace(SUMS, elements=2, partial_gradient=half)))
        assert all(member.exchange.flush(10) for member in members)
        sums = members[0].taken[0].own.parameters[0].sums
        assert (sums.gradient, sums.gradient_squared) == (4.0, 16.0)


def test_non_finite_values_of_a_rank_are_kept() -> None:
    """NaN in a contributor's sums is NaN in the whole; in a replica that does not contribute it shows as divergence."""
    nan = float("nan")
    broken = replace(SUMS, gradient_squared=nan, weight_squared=nan)
    with ranks(*[manifest(r, shard("w", r, 2), groups=((0, 1),)) for r in range(2)]) as (one, two):
        one.put(1, readings("w"))
        two.put(1, readings("w", sums=broken))
        settle(one, two)
        assert one.taken[0].own.parameters[0].sums.gradient_squared != one.taken[0].own.parameters[0].sums.gradient_squared
    with ranks(*[manifest(r, place("w", mates=0, by="group"), groups=((0, 1),)) for r in range(2)]) as (one, two):
        one.put(1, readings("w"))
        two.put(1, readings("w", sums=broken))
        settle(one, two)
        run = one.taken[0].own.run
        assert run is not None
        assert (run.gradient_squared, run.replica_divergence is not None and not run.replica_divergence <= 0.1) == (4.0, True)


def test_a_rank_that_is_late_is_waited_for_without_holding_anybody() -> None:
    """Putting returns at once; the values come when the last rank has."""
    with ranks(*[manifest(r, shard("w", r, 2), groups=((0, 1),)) for r in range(2)]) as (one, two):
        began = time.monotonic()
        one.put(10, readings("w"))
        assert time.monotonic() - began < 0.1
        time.sleep(1.0)
        assert one.taken == []
        two.put(10, readings("w"))
        assert one.exchange.flush(10)
        assert one.taken[0].own.parameters[0].sums.elements == 32


def test_a_rank_that_does_not_come_is_named_and_shards_are_not_shown_as_layers(caplog: pytest.LogCaptureFixture) -> None:
    """The same sentence on all ranks, also on the one that comes too late; the next step has all again."""
    with ranks(*[manifest(r, shard("w", r, 2), groups=((0, 1),)) for r in range(2)], seconds=3.0) as (one, two):
        with caplog.at_level(logging.WARNING, "otel_train"):
            one.put(10, readings("w"))
            assert one.exchange.flush(20)
            two.put(10, readings("w"))
            assert two.exchange.flush(20)
        said = "sampled step 10: rank 1 did not come to it within 3 s, so layers and norms that are spread over ranks have no values; the training goes on"
        assert [record.message for record in caplog.records] == [said, said]
        assert (one.guard.errors["ranks"], two.guard.errors["ranks"]) == (1, 1)
        assert [taken.own for taken in one.taken] == [LayerSample((), one.taken[0].own.activations)]
        assert one.taken[0].own.activations != ()
        assert one.taken[0].local == readings("w"), "what it holds itself is exported under names of its own"
        one.put(20, readings("w"))
        two.put(20, readings("w"))
        settle(one, two)
        assert one.taken[1].own.parameters[0].sums.elements == 32


def test_a_rank_that_is_gone_is_not_waited_for_in_full_again() -> None:
    """After the first time-out a tenth of it; a rank that has come since is waited for as before."""
    with ranks(*[manifest(r, shard("w", r, 2), groups=((0, 1),)) for r in range(2)], seconds=2.0) as (one, two):
        began = time.monotonic()
        one.put(10, readings("w"))
        assert one.exchange.flush(5)
        first = time.monotonic() - began
        one.put(20, readings("w"))
        assert one.exchange.flush(5)
        second = time.monotonic() - began - first
        assert first >= 2.0
        assert second < 1.0
        two.put(10, readings("w"))
        two.put(20, readings("w"))
        assert two.exchange.flush(5)
        one.put(30, readings("w"))
        time.sleep(1.0)
        two.put(30, readings("w"))
        assert one.exchange.flush(5)
        assert one.taken[2].own.parameters[0].sums.elements == 32


def test_a_broken_connection_is_made_anew(caplog: pytest.LogCaptureFixture) -> None:
    """One rank loses its group; both say the same, and the next step has all again."""
    with ranks(*[manifest(r, shard("w", r, 2), groups=((0, 1),)) for r in range(2)], seconds=2.0) as (one, two):
        for member in (one, two):
            member.put(10, readings("w"))
        settle(one, two)
        two.exchange._group.abort()
        two.exchange._group = None
        with caplog.at_level(logging.WARNING, "otel_train"):
            for attempt in (20, 30):
                for member in (one, two):
                    member.put(attempt, readings("w"))
            settle(one, two)
        assert one.taken[-1].own.parameters[0].sums.elements == 32
        assert len({record.message for record in caplog.records}) <= 1


def test_ranks_learn_their_layout_from_each_other() -> None:
    """Through the store, each with what it holds."""
    store = HashStore()
    boards = [Board(store, Rank(r, r, 2), "join") for r in range(2)]
    manifests = [manifest(r, shard("w", r, 2), groups=((0, 1),)) for r in range(2)]
    found = at_once([lambda r=r: join(boards[r], manifests[r], 5.0) for r in range(2)])  # type: ignore[misc]
    assert [m.layout for m in found if isinstance(m, Membership)] == layouts(manifests)


def test_a_rank_that_never_attached_is_named_on_all_others(caplog: pytest.LogCaptureFixture) -> None:
    """After the time that was given, not more; each rank plans for itself."""
    store = HashStore()
    boards = [Board(store, Rank(r, r, 3), "join") for r in range(3)]
    began = time.monotonic()
    with caplog.at_level(logging.WARNING, "otel_train"):
        found = at_once([lambda r=r: join(boards[r], manifest(r, place("w")), 1.0) for r in (0, 2)])  # type: ignore[misc]
    assert time.monotonic() - began < 3.0
    assert {record.message for record in caplog.records} == {
        "rank 1 did not attach within 1 s, so each rank exports only what it holds in whole; call otel_train.attach on every rank"
    }
    assert all(isinstance(m, Membership) and m.board is None for m in found)


def test_the_error_of_one_rank_is_raised_on_all() -> None:
    """Without waiting for the time-out, with the rank in front."""
    store = HashStore()
    boards = [Board(store, Rank(r, r, 2), "join") for r in range(2)]
    calls: list[Callable[[], object]] = [
        lambda: join(boards[0], manifest(0, place("w")), 20.0),
        lambda: share_error(boards[1], ValueError("expected a model, got None")),
    ]
    error, said = at_once(calls)
    assert str(error) == said == "rank 1: expected a model, got None"


def test_the_run_has_one_name() -> None:
    """That of the rank that came first."""
    store = HashStore()
    boards = [Board(store, Rank(r, r, 2), "join") for r in range(2)]
    assert [share_run(boards[1], "one"), share_run(boards[0], "two")] == ["one", "one"]
