"""Ranks that are late, die, never attach, differ or skip a step alone: training goes on, and what is exported is right or absent."""

from __future__ import annotations

import contextlib
import logging
import math
import os
import signal
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import distributed, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

import otel_train
from otel_train.testing import capture
from tests.parity.compare import values
from tests.parity.harness import Died, ranks
from tests.parity.training import KINDS, Series, flat, local

TIMEOUT = 1.0
"""Seconds that a sampled step waits for other ranks, here."""
SLACK = 0.5
"""What a step may take longer than without the monitor: far less than the time-out."""
ODD_STEP, STEPS = 2, 6


class Wide(nn.Module):
    """A layer that each rank has, and one that is divided over them; its training needs no word between ranks."""

    def __init__(self, *, extra: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.plain, self.wide = nn.Linear(8, 8), nn.Linear(8, 16)
        if extra:
            self.third = nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return a loss."""
        loss: torch.Tensor = self.plain(x).square().mean() + self.wide(x).square().mean()
        return loss + self.third(x).square().mean() if hasattr(self, "third") else loss


@dataclass
class Seen:
    """What a rank reports."""

    seconds: list[float] = field(default_factory=list)
    """Each step took."""
    bare_seconds: list[float] = field(default_factory=list)
    """… without the monitor."""
    attach_seconds: float = 0.0
    close_seconds: float = 0.0
    series: list[Series] = field(default_factory=list)
    """Whenever the scenario looked."""
    norms: list[dict[str, float]] = field(default_factory=list)
    """Norms of the local gradients by layer, then; naively."""
    lines: list[str] = field(default_factory=list)
    """What the monitor's logger said, from warnings up."""


class Scenario:
    """A training on one rank, step by step."""

    def __init__(self, *, extra: bool = False) -> None:
        self.rank = distributed.get_rank()
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
        self.model: nn.Module = parallelize_module(Wide(extra=extra), mesh, {"wide": ColwiseParallel()})
        self.optimizer = torch.optim.AdamW(self.model.parameters(), foreach=False)
        self.scaler: Any = None
        self.monitor: Any = None
        self.sink: Any = None
        self.seen = Seen()

    def step(self, number: int, into: list[float], *, infinite: bool = False) -> None:
        """Make a step, and note how long it took."""
        time.sleep(0.05)  # as if there were more to do: the monitor's thread has time to meet the others
        began = time.perf_counter()
        x = torch.randn(4, 8, generator=torch.Generator().manual_seed(number))
        loss = self.model(x) * (math.inf if infinite else 1.0)
        (self.scaler.scale(loss) if self.scaler else loss).backward()
        if self.scaler:
            self.scaler.step(self.optimizer)
            self.scaler.update()
        else:
            self.optimizer.step()
        self.grads = {n: local(p.grad).double().clone() for n, p in self.model.named_parameters() if p.grad is not None}
        self.optimizer.zero_grad()
        if self.monitor is not None:
            self.monitor.observe(loss=loss.detach(), tokens=4, loss_scale=self.scaler.get_scale() if self.scaler else None)
        into.append(time.perf_counter() - began)

    def steps(self, numbers: range) -> None:
        """Make steps with the monitor."""
        for number in numbers:
            self.step(number, self.seen.seconds)

    def bare(self) -> None:
        """Make steps before there is a monitor; the first only loads what torch needs."""
        self.step(0, [])
        for number in range(4):
            self.step(number, self.seen.bare_seconds)

    def look(self) -> None:
        """Take what is exported now, and the truth beside it."""
        self.monitor.flush()
        self.seen.series.append(flat(self.sink.last) if self.sink.last is not None else [])
        squares: dict[str, float] = {}
        for name, grad in self.grads.items():
            layer = name.rpartition(".")[0]
            if name.endswith("weight"):
                squares[layer] = grad.square().sum().item()
        self.seen.norms.append({layer: square**0.5 for layer, square in squares.items()})

    @contextlib.contextmanager
    def attached(self, **settings: Any) -> Iterator[None]:
        """Attach, and close in the end."""
        handler = logging.Handler(logging.WARNING)
        handler.emit = lambda record: self.seen.lines.append(record.getMessage())  # type: ignore[method-assign]
        logging.getLogger("otel_train").addHandler(handler)
        defaults = {"every_n_steps": 1, "updates": "exact", "kinds": KINDS, "rank_timeout": TIMEOUT}
        began = time.perf_counter()
        with capture(self.model, self.optimizer, **{**defaults, **settings}) as (self.monitor, self.sink):
            self.seen.attach_seconds = time.perf_counter() - began
            yield
            began = time.perf_counter()
        self.seen.close_seconds = time.perf_counter() - began
        logging.getLogger("otel_train").removeHandler(handler)


def late() -> Seen:
    """Rank 1 is three seconds late in a step."""
    scenario = Scenario()
    scenario.bare()
    with scenario.attached():
        scenario.steps(range(ODD_STEP))
        scenario.look()
        if scenario.rank == 1:
            time.sleep(3.0)
        scenario.steps(range(ODD_STEP, ODD_STEP + 1))
        scenario.look()
        distributed.barrier()  # the test's own
        scenario.monitor.flush()
        distributed.barrier()
        scenario.steps(range(ODD_STEP + 1, STEPS))
        scenario.look()
    return scenario.seen


def dies(who: int) -> Seen:
    """A rank is killed; the other trains on."""
    scenario = Scenario()
    scenario.bare()
    with scenario.attached():
        scenario.steps(range(ODD_STEP))
        scenario.look()
        distributed.barrier()  # the test's own
        if scenario.rank == who:
            os.kill(os.getpid(), signal.SIGKILL)
        scenario.steps(range(ODD_STEP, STEPS))
        scenario.look()
    return scenario.seen


def never_attaches() -> Seen:
    """Only rank 0 attaches."""
    scenario = Scenario()
    scenario.bare()
    if scenario.rank == 0:
        with scenario.attached():
            scenario.steps(range(STEPS))
            scenario.look()
    else:
        scenario.steps(range(STEPS))
    distributed.barrier()  # the test's own: so long does the other live
    return scenario.seen


def attaches_late() -> Seen:
    """Rank 1 attaches when rank 0 has given up on it, and both attach once more later."""
    scenario = Scenario()
    scenario.bare()
    if scenario.rank == 1:
        time.sleep(2.5)
    with scenario.attached():
        scenario.steps(range(ODD_STEP))
        scenario.look()
        distributed.barrier()  # the test's own
    with scenario.attached():
        scenario.steps(range(ODD_STEP, STEPS))
        scenario.look()
    return scenario.seen


def differs() -> Seen:
    """Rank 1 has a layer more."""
    scenario = Scenario(extra=distributed.get_rank() == 1)
    scenario.bare()
    with scenario.attached():
        scenario.steps(range(STEPS))
        scenario.look()
    return scenario.seen


def skips_alone() -> Seen:
    """Two pipeline stages, each with a GradScaler of its own; that of rank 1 skips a step."""
    scenario = Scenario()
    torch.manual_seed(scenario.rank)
    scenario.model = Wide()
    scenario.optimizer = torch.optim.AdamW(scenario.model.parameters())
    scenario.scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    scenario.bare()
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("pp",))
    with scenario.attached(mesh=mesh):
        for number in range(STEPS):
            scenario.step(number, scenario.seen.seconds, infinite=number == ODD_STEP and scenario.rank == 1)
            if number in {ODD_STEP, STEPS - 1}:
                scenario.look()
        distributed.barrier()  # the test's own
    return scenario.seen


def refusal(scenario: Scenario, **settings: Any) -> str:
    """Return what attach says."""
    try:
        with scenario.attached(**settings):
            return ""
    except otel_train.AttachError as error:
        return str(error)


def other_settings() -> str:
    """Rank 1 samples less often."""
    return refusal(Scenario(), every_n_steps=1 + distributed.get_rank())


def refused_alone() -> str:
    """Attach is wrong on rank 1: an optimizer of another model."""
    scenario = Scenario()
    if scenario.rank == 1:
        scenario.optimizer = torch.optim.AdamW(nn.Linear(2, 2).parameters())
    return refusal(scenario)


def assert_own_speed(seen: Seen) -> None:
    """No step took longer for the monitor's sake."""
    assert max(seen.seconds) < max(seen.bare_seconds) + SLACK


def layers(series: Series, metric: str) -> dict[str, float]:
    """Return a layer metric of the matrices by layer."""
    return {labels["layer"]: v for name, labels, v in series if name == f"otel_train_{metric}" and labels["kind"] == "matrix"}


def assert_reduced(seen: list[Seen], moment: int) -> None:
    """Both layers are exported whole, by rank 0 only."""
    truth = [one.norms[moment] for one in seen]
    found = layers(seen[0].series[moment], "layer_grad_norm")
    assert found == pytest.approx({"plain": truth[0]["plain"], "wide": math.hypot(truth[0]["wide"], truth[1]["wide"])}, rel=1e-5)
    assert layers(seen[1].series[moment], "layer_grad_norm") == {}


def assert_local(seen: Seen, moment: int, *, whole: set[str]) -> None:
    """The divided layer is absent rather than shown by a shard, what is whole stays, and the local view is there."""
    series, truth = seen.series[moment], seen.norms[moment]
    for metric in ("layer_grad_norm", "layer_grad_mean", "layer_param_norm", "layer_update_ratio", "layer_parameters"):
        assert "wide" not in layers(series, metric), metric
    found = layers(series, "layer_grad_norm")
    assert found == pytest.approx({layer: truth[layer] for layer in whole}, rel=1e-5)
    for metric in ("local_layer_grad_norm", "local_layer_param_norm", "local_layer_update_ratio"):
        assert {"plain", "wide"} <= set(layers(series, metric)), metric
    shown = layers(series, "local_layer_grad_norm")
    assert {name: shown[name] for name in ("plain", "wide")} == pytest.approx({n: truth[n] for n in ("plain", "wide")}, rel=1e-5)
    for name in ("grad_norm", "param_norm", "update_ratio"):
        assert values(series, name) == {}, name  # of the whole model, which nobody knows now
    assert values(series, "monitor_errors_total").get(("ranks",), 0.0) >= 1


def said(seen: Seen) -> set[str]:
    """Return the lines about ranks."""
    return {line for line in seen.lines if "rank" in line}


def test_a_rank_that_is_late_delays_nobody_and_is_waited_for_again_later() -> None:
    """While it is away the other shows what it knows itself; afterwards both show the whole."""
    with ranks(2) as pool:
        seen = pool.run(late)
    assert_reduced(seen, 0)
    assert_own_speed(seen[0])
    assert_own_speed(seen[1])
    assert_local(seen[0], 1, whole={"plain"})
    assert_reduced(seen, 2)
    assert said(seen[0])
    assert all("rank 1" in line for line in said(seen[0]))
    assert said(seen[1]) <= said(seen[0])


@pytest.mark.parametrize(("who", "agent"), [(1, False), (0, True), (0, False)])
def test_a_rank_that_dies_is_named_by_the_living(who: int, *, agent: bool) -> None:
    """Training goes on; so it does when the rank that exported the layers has died, and where the group's store died with it."""
    with ranks(2, agent=agent) as pool:
        found = pool.run(dies, who, may_die=[who])
    assert found[who] == Died(-signal.SIGKILL)
    alive: Seen = found[1 - who]
    assert_own_speed(alive)
    if who == 1:
        assert_local(alive, 1, whole={"plain"})
    else:
        assert "wide" not in layers(alive.series[1], "layer_grad_norm")
        assert set(layers(alive.series[1], "local_layer_grad_norm")) == {"plain", "wide"}
        assert values(alive.series[1], "monitor_errors_total").get(("ranks",), 0.0) >= 1
    assert said(alive)
    assert all(f"rank {who}" in line or (not agent and who == 0 and "store" in line) for line in said(alive))
    assert alive.close_seconds < 15


def test_a_rank_that_never_attaches_delays_attach_by_the_limit_only() -> None:
    """It is named, and the other goes on with its local values."""
    with ranks(2) as pool:
        seen = pool.run(never_attaches)
    assert seen[0].attach_seconds < TIMEOUT + 2
    assert_own_speed(seen[0])
    assert_local(seen[0], 0, whole={"plain"})
    assert said(seen[0])
    assert all("rank 1" in line for line in said(seen[0]))


def test_a_rank_that_attaches_late_shows_what_it_knows_and_the_next_attach_meets() -> None:
    """Nobody waits for it, and nothing of the failed meeting is left for the next."""
    with ranks(2) as pool:
        seen = pool.run(attaches_late)
    for one in seen:
        assert_own_speed(one)
        assert "wide" not in layers(one.series[0], "layer_grad_norm")
        assert set(layers(one.series[0], "local_layer_grad_norm")) == {"plain", "wide"}
        assert said(one)
        assert all("rank 1" in line for line in said(one))
    assert_reduced(seen, 1)


def test_another_layout_on_one_rank_is_said_by_all() -> None:
    """Sums over layers that do not match would be wrong numbers."""
    with ranks(2) as pool:
        seen = pool.run(differs)
    for one in seen:
        assert_own_speed(one)
    assert_local(seen[0], 0, whole={"plain"})
    assert "wide" not in layers(seen[1].series[0], "layer_grad_norm")
    assert said(seen[0])
    assert said(seen[0]) == said(seen[1])


def test_a_stage_that_skips_a_step_alone_hangs_nobody_and_spoils_no_value() -> None:
    """In the step that one stage skipped no value of the whole is that of the other stage; afterwards all are right."""
    with ranks(2) as pool:
        seen = pool.run(skips_alone)
    for one in seen:
        assert_own_speed(one)
    own = [math.hypot(*one.norms[1].values()) for one in seen]
    assert [values(one.series[1], "steps_total")[()] for one in seen] == [STEPS, STEPS - 1]
    assert [values(one.series[1], "skipped_steps_total")[()] for one in seen] == [0, 1]
    norms = [layers(one.series[1], "layer_grad_norm") for one in seen]
    assert norms == [pytest.approx(one.norms[1], rel=1e-5) for one in seen]
    matrices = values(seen[0].series[1], "grad_norm")[("post_clip",)]
    assert matrices > math.hypot(*own)  # the biases' are in it too
    alone = values(seen[0].series[0], "grad_norm").get(("post_clip",))
    parts = [v for name, _, v in seen[0].series[0] if name == "otel_train_layer_grad_norm"]
    assert alone is None or alone != pytest.approx(math.hypot(*parts), rel=1e-5)


def test_other_settings_on_one_rank_are_refused_by_all() -> None:
    """With the same sentence, which names the setting."""
    with ranks(2) as pool:
        errors = pool.run(other_settings)
    assert errors[0] == errors[1]
    assert "every_n_steps" in errors[0]


def test_a_refusal_on_one_rank_is_one_on_all() -> None:
    """Nobody trains on with a monitor that waits for a rank without one."""
    with ranks(2) as pool:
        errors = pool.run(refused_alone)
    assert errors[1]
    assert "rank 1" in errors[0]
