"""The benchmark measures what it says, its tables hold together, and what README quotes is what was measured."""

from __future__ import annotations

import re
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch
from torch import distributed

from otel_train.catalog.throughput import STEP_DURATION
from otel_train.snapshot import HistogramValue
from tests.bench import __main__ as bench
from tests.bench import budget, tables
from tests.bench.cases import CASES, UNBOUNDED, Monitored, Watch
from tests.bench.claims import check_claims, cost
from tests.bench.ddp import count_collectives, run_processes
from tests.bench.measure import measure, take_turn, watched
from tests.bench.models import MODELS, Training
from tests.bench.ratios import paired, spread
from tests.bench.results import Budget, Processes, Results, Row, Table, make_table
from tests.parity.harness import ranks

RESULTS = Path(__file__).parent / "results" / "cpu.json"
README = Path(__file__).parents[2] / "README.md"
SAMPLED_SHARE = 0.12
"""Own seconds over step seconds of a sampled step of the 5 M GPT, at most: twice what it is on one thread of a quiet machine."""


@pytest.fixture
def tiny() -> Training:
    """A GPT that trains in a few milliseconds."""
    return MODELS["gpt-tiny"]()


@dataclass(frozen=True)
class Asleep(Training):
    """A training whose steps take a time that is known."""

    def step(self) -> torch.Tensor:
        """Sleep."""
        time.sleep(0.02)
        return torch.zeros(())


class Slower(Watch):
    """Makes a step a tenth slower, and says so."""

    def observe(self, loss: torch.Tensor) -> None:
        del loss
        time.sleep(0.002)

    def seconds(self) -> Mapping[str, float]:
        self.training.inputs.add_(1.0)  # asked before and after each turn
        return {"sleep": float(self.training.inputs)}


class Noted(Watch):
    """Writes down whose turn it is."""

    def __init__(self, training: Training, name: str, turns: list[str]) -> None:
        super().__init__(training)
        self._name, self._turns = name, turns

    def begin_turn(self) -> None:
        self._turns.append(self._name)


def asleep() -> Training:
    """Return a training of which only the time matters."""
    model = torch.nn.Linear(1, 1)
    return Asleep(model, torch.optim.SGD(model.parameters()), torch.zeros(()), torch.zeros(()), 1)


def test_twins_share_every_tensor_and_no_hook(tiny: Training) -> None:
    """A twin trains the same weights with the same moments, and does not call the other's hooks."""
    called = []
    twin, before = tiny.twin(), [p.detach().clone() for p in tiny.model.parameters()]
    tiny.model.register_forward_pre_hook(lambda *_: called.append("forward"))
    tiny.optimizer.register_step_post_hook(lambda *_: called.append("step"))
    twin.step()
    assert called == []
    assert all(a is b for a, b in zip(tiny.model.parameters(), twin.model.parameters(), strict=True))
    assert not any(torch.equal(a, b) for a, b in zip(before, tiny.model.parameters(), strict=True))
    tiny.step()
    assert called == ["forward", "step"]
    assert {state["step"].item() for state in twin.optimizer.state.values()} == {2.0}


def test_a_planted_cost_is_measured() -> None:
    """A case that adds a tenth to each step shows a ratio of 1.1, and equals come out as equals."""
    watches = {"none": Watch(asleep()), "again": Watch(asleep()), "slower": Slower(asleep())}
    table = make_table("asleep", [2], 1, measure(watches, rounds=15, steps=1), dict.fromkeys(watches, ""))
    slower = table.row("slower")
    assert slower is not None
    assert slower.ratio == pytest.approx(1.1, abs=0.02)
    assert slower.low <= slower.ratio <= slower.high
    assert table.step_seconds == pytest.approx(0.02, rel=0.1)
    assert table.floor < 0.05
    assert slower.own == {"sleep": 1.0}


def test_each_case_has_one_turn_a_round_in_shuffled_order() -> None:
    """No case always follows the same one; every rank of a group shuffles alike."""
    orders = []
    for _ in range(2):
        turns: list[str] = []
        measure({name: Noted(asleep(), name, turns) for name in "abc"}, rounds=6, steps=1)
        rounds = ["".join(turns[i : i + 3]) for i in range(0, len(turns), 3)]
        orders.append(rounds)
        assert rounds[0] == "abc", "warm-up"
        assert all(sorted(order) == ["a", "b", "c"] for order in rounds)
        assert len(set(rounds[1:])) > 2
    assert orders[0] == orders[1]


def test_a_hiccup_of_the_machine_is_not_counted_as_own_cost() -> None:
    """Own seconds of a turn that took much longer than the others are left out; its ratio stays, as one of many."""

    class Hiccup(Watch):
        """Takes long, and says that it did, in the third turn."""

        turns, own = 0, 0.0

        def end_turn(self) -> None:
            self.turns += 1
            self.own += 0.001

        def observe(self, loss: torch.Tensor) -> None:
            del loss
            if self.turns == 2:
                time.sleep(0.1)
                self.own += 0.1

        def seconds(self) -> Mapping[str, float]:
            return {"part": self.own}

    timing = measure({"hiccup": Hiccup(asleep())}, rounds=5, steps=1)["hiccup"]
    assert len(timing.turns) == 5
    assert max(timing.turns) > 0.1
    assert timing.own == {"part": pytest.approx(0.001)}


def test_ratios_are_paired_within_rounds() -> None:
    """A drift of the machine cancels out; the interval narrows with the spread, and the floor is its farther end."""
    drift = [1.0, 2.0, 4.0, 8.0, 16.0]
    steady = paired([1.5 * d for d in drift], drift)
    assert (steady.low, steady.median, steady.high) == (1.5, 1.5, 1.5)
    noisy = paired([0.9, 1.0, 1.2, 1.0, 1.1], [1.0] * 5)
    assert noisy.median == 1.0
    assert noisy.low == pytest.approx(0.9, abs=0.05)
    assert noisy.high == pytest.approx(1.2, abs=0.05)
    assert noisy.floor == pytest.approx(max(1 - noisy.low, noisy.high - 1))
    assert spread([1.0, 2.0, 3.0, 4.0, 5.0]) == pytest.approx(2 / 3)


@pytest.mark.parametrize("name", CASES)
def test_every_case_runs(name: str, tiny: Training) -> None:
    """Each takes its turns, exports what it says, and leaves nothing behind."""
    with watched(tiny, [CASES["none"], CASES[name]]) as watches:
        timing = measure(watches, rounds=2, steps=10)[name]
    assert len(timing.turns) == 2
    assert (timing.values > 0) == (name not in {"none", "again"})
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in watches[name].training.model.modules())
    assert not any(p._backward_hooks for p in tiny.model.parameters())


def test_cases_of_parts_measure_their_part_alone(tiny: Training) -> None:
    """What is off costs nothing or next to nothing, and what is not sampled is not measured."""
    names = ("every-step", "between", "gradients", "activations")
    with watched(tiny, [CASES[name] for name in names]) as watches:
        own = {name: timing.own for name, timing in measure(watches, rounds=3, steps=4).items()}
    assert min(own["every-step"][part] for part in ("gradients", "updates", "activations", "readout", "export")) > 0
    assert {own["between"][part] for part in ("gradients", "updates", "activations")} == {0.0}
    assert own["gradients"]["gradients"] > 0
    assert own["gradients"]["activations"] == 0.0
    assert own["activations"]["activations"] > 0


def test_turns_of_others_are_no_step_time(tiny: Training) -> None:
    """The monitor stays attached while others train, and its step time knows nothing of it."""
    watch = Monitored(tiny, every_n_steps=1, **UNBOUNDED)
    for _ in range(3):
        take_turn(watch, 1)
        time.sleep(0.3)
    snapshot = watch.monitor.snapshot
    watch.close()
    assert snapshot is not None
    durations = snapshot.find(STEP_DURATION)[0].value
    assert isinstance(durations, HistogramValue)
    assert sum(durations.counts) == 2, "the first step has no beginning"
    assert durations.total < 0.3


def row(case: str, ratio: float, own: float = 0.0, values: int = 0) -> Row:
    """Return a row without noise."""
    return Row(case, f"the case {case}", ratio, 0.01, ratio, ratio, ratio, {"loop": own} if own else {}, values)


def table(model: str, steps: int, *rows: Row) -> Table:
    """Return a table whose unmonitored step takes a second."""
    return Table(model, 1000, 10, steps, 5, 1.0, 0.002, (row("none", 1.0), row("again", 1.0), *rows))


def results() -> Results:
    """Return results in which every claim holds, but only just."""
    single = (row("every-step", 1.03, 0.03), row("between", 1.0, 0.001), row("seed", 1.101))
    return Results(
        machine={"date": "2026-12-03"},
        tables=(
            table("gpt-20m", 1, *single),
            table(
                "gpt-20m", 10, row("default", 1.0019, 0.005), row("every-10", 1.0, 0.004, 100), row("watch-10", 1.201, values=5000)
            ),
            table("gpt-5m", 1, row("every-step", 1.03, 0.03), row("between", 1.0, 0.001)),
            table("gpt-100m", 1, row("every-step", 1.03, 0.03), row("between", 1.0, 0.001)),
        ),
        budget=Budget(0.5, 1.0, 10, (1.5,) * 10 + (1.01,) * 5, (0.5,) * 10 + (0.01,) * 5, (1,) * 10 + (64,) * 5),
        processes=Processes(
            table("gpt-5m, DDP", 10, row("exchange", 1.0029), row("local", 1.001)), 5, {"training": 0, "others": 10}
        ),
    )


def changed(found: Results, model: str, steps: int, new: Row) -> Results:
    """Return results with another row."""
    rows = {(t.model, t.steps): t for t in found.tables}
    old = rows[model, steps]
    rows[model, steps] = replace(old, rows=tuple(new if r.case == new.case else r for r in old.rows))
    return replace(found, tables=tuple(rows.values()))


def test_a_claim_holds_only_within_its_limit() -> None:
    """Each claim holds at its limit and fails beyond it; nothing else changes with it."""
    base = results()
    assert base.budget is not None
    assert base.processes is not None
    assert [claim.text for claim in check_claims(base) if not claim.holds] == []
    slower_exchange = table("gpt-5m, DDP", 10, row("exchange", 1.0031), row("local", 1.001))
    beyond = {
        "own seconds over step": changed(base, "gpt-20m", 10, row("default", 1.0019, 0.00501)),
        "distance from 1": changed(base, "gpt-20m", 10, row("default", 1.0021, 0.005)),
        "a sampled step": changed(base, "gpt-20m", 1, row("every-step", 1.031, 0.03)),
        "does not grow": changed(base, "gpt-100m", 1, row("every-step", 1.03, 0.0301)),
        "with default settings": changed(base, "gpt-20m", 1, row("seed", 1.099)),
        "at every step": changed(base, "gpt-20m", 1, row("every-step", 1.03, 0.034)),
        "wandb.watch": changed(base, "gpt-20m", 10, row("watch-10", 1.199, values=4900)),
        "by exported number": changed(base, "gpt-20m", 10, row("watch-10", 1.201, values=5100)),
        "slower: own share": replace(base, budget=replace(base.budget, own_shares=(0.5,) * 10 + (0.0101,) * 5)),
        "unmonitored ones beside": replace(base, budget=replace(base.budget, ratios=(1.5,) * 10 + (1.011,) * 5)),
        "less that without": replace(base, processes=replace(base.processes, table=slower_exchange)),
        "collectives of ours": replace(base, processes=replace(base.processes, collectives={"training": 1, "others": 9})),
    }
    for part, worse in beyond.items():
        assert [part in claim.text for claim in check_claims(worse) if not claim.holds] == [True], part


def test_results_read_back_as_they_were_written() -> None:
    """JSON and back, with everything and with nothing in it."""
    whole = results()
    assert Results.from_json(whole.to_json()) == whole
    bare = Results({"date": "today"}, ())
    assert Results.from_json(bare.to_json()) == bare


def test_tables_have_a_cell_for_each_column() -> None:
    """Every line of every table has as many cells as its head, and every case and block of steps has a line."""
    text = tables.report(results())
    heads = re.findall(r"(\|.*\|)\n\|---.*\n((?:\|.*\|\n?)+)", text)
    assert len(heads) == 7  # claims, five models, the budget
    for head, lines in heads:
        assert {line.count("|") for line in lines.strip().splitlines()} == {head.count("|")}
    assert text.count("the case default") == 1
    assert "| 141 to 150 | 1.010 | 1.00 % | 64 |" in text
    assert "3.00 %: loop 3.00 %" in text


def test_a_case_that_measures_itself_costs_what_it_says() -> None:
    """Own seconds count where there are any, the ratio elsewhere; a case that did not run has no cost."""
    found = table("gpt-20m", 1, row("every-step", 1.5, 0.03), row("seed", 1.1))
    assert cost(found, "every-step") == 0.03
    assert cost(found, "seed") == pytest.approx(0.1)
    assert cost(found, "watch") is None


def test_the_command_writes_results_report_and_readme(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """All three say the same, and the chosen cases are there."""
    monkeypatch.setattr(bench, "PLANS", (bench.Plan("gpt-tiny", 2, 9, ("every-step", "between")),))
    monkeypatch.setattr(bench, "_MODELS", ("gpt-tiny",))
    readme = tmp_path / "README.md"
    readme.write_text(f"before\n{tables.BEGIN}\nold\n{tables.END}\nafter\n")
    arguments = ["--rounds", "2", "--cases", "every-step", "--out", str(tmp_path / "results"), "--readme", str(readme)]
    assert bench.main(arguments) == 0
    written = Results.from_json((tmp_path / "results/cpu.json").read_text())
    assert [(t.model, t.steps, t.rounds, [r.case for r in t.rows]) for t in written.tables] == [
        ("gpt-tiny", 2, 2, ["none", "again", "every-step"])
    ]
    assert (tmp_path / "results/cpu.md").read_text() == tables.report(written)
    assert readme.read_text() == f"before\n{tables.readme_block(written)}\nafter\n"
    assert tables.report(written) in capsys.readouterr().out


def test_readme_quotes_the_committed_results() -> None:
    """What README and the report say is made from cpu.json, and of nothing else."""
    committed = Results.from_json(RESULTS.read_text(encoding="utf-8"))
    assert RESULTS.with_suffix(".md").read_text(encoding="utf-8") == tables.report(committed)
    assert tables.find_block(README.read_text(encoding="utf-8")) == tables.readme_block(committed)
    with pytest.raises(ValueError, match="no block"):
        tables.find_block("no markers")


def test_slow_samples_are_slow(tiny: Training) -> None:
    """The planted sleep is in every sample, and is seen as the monitor's own time."""
    watch = Monitored(tiny.twin(), every_n_steps=2, **UNBOUNDED)
    with budget.slow_samples(0.05):
        turn = take_turn(watch, 4)
    assert take_turn(watch, 4).own["gradients"] < 0.01
    watch.close()
    assert 4 * turn.own["gradients"] == pytest.approx(3 * 0.05, rel=0.3), "steps 1, 2 and 4"


def test_the_budget_is_followed_block_by_block(tiny: Training) -> None:
    """The first block shows the sleep in ratio and own share; each block says its cadence."""
    followed = budget.run_budget(tiny, blocks=2, share=2.0)
    assert len(followed.ratios) == len(followed.own_shares) == len(followed.every_n_steps) == 2
    assert followed.planted_seconds > 0
    assert followed.own_shares[0] > 0.1
    assert followed.ratios[0] > 1.1
    assert min(followed.every_n_steps) >= 1


def reduce_here() -> int:
    """Call one collective, and methods of tensors that are named like some."""
    with count_collectives() as counter:
        ones = torch.ones(2)
        distributed.all_reduce(ones)
        torch.gather(ones, 0, torch.tensor([0]))
        ones.scatter(0, torch.tensor([0]), 1.0)
    distributed.all_reduce(torch.ones(1))
    return sum(counter.values())


def test_collectives_are_counted_by_thread() -> None:
    """One that is called is counted, namesakes are not; a monitor's are in its own thread."""
    with ranks(2) as pool:
        assert pool.run(reduce_here) == [1, 1]
    found = run_processes("gpt-tiny", rounds=2, steps=2)
    assert found.collectives["training"] == 0
    assert found.collectives["others"] >= found.sampled_steps, "the exchange was seen"
    assert [row.case for row in found.table.rows] == ["none", "again", "exchange", "local"]


def test_a_sampled_step_stays_cheap() -> None:
    """A guard against regressions, from the calmest of several runs: what a busy machine adds is not ours."""
    watch = Monitored(MODELS["gpt-5m"](), every_n_steps=1, **UNBOUNDED)
    take_turn(watch, 2)
    turns = [take_turn(watch, 3) for _ in range(4)]
    watch.close()
    assert min(sum(turn.own.values()) / turn.seconds for turn in turns) < SAMPLED_SHARE
