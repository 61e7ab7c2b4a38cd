"""The comparison finds each kind of fault: planted into what a row really exported."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest

from tests.parity.compare import compare
from tests.parity.harness import Ranks
from tests.parity.reference import Reference, reference
from tests.parity.table import TABLE
from tests.parity.test_parity import run_row
from tests.parity.training import Outcome, Series

ROW = "DDP 2, clipped"
Fault = Callable[[list[Outcome]], None]


def change(name: str, by: Callable[[float], float], rank: int = 0) -> Fault:
    """Change the first series of a metric on a rank, after the last step."""

    def fault(outcomes: list[Outcome]) -> None:
        series = outcomes[rank].run.series[-1]
        at = next(i for i, (found, _, _) in enumerate(series) if found == f"otel_train_{name}")
        series[at] = (*series[at][:2], by(series[at][2]))

    return fault


def without(name: str) -> Fault:
    """Leave a metric out on rank 0."""

    def fault(outcomes: list[Outcome]) -> None:
        outcomes[0].run.series[-1] = [found for found in outcomes[0].run.series[-1] if found[0] != f"otel_train_{name}"]

    return fault


def also_on_rank_1(name: str) -> Fault:
    """Export a metric of rank 0 on rank 1 too."""

    def fault(outcomes: list[Outcome]) -> None:
        outcomes[1].run.series[-1] += [found for found in outcomes[0].run.series[-1] if found[0] == f"otel_train_{name}"]

    return fault


def with_another_depth(outcomes: list[Outcome]) -> None:
    """Give every layer the same depth."""
    series: Series = outcomes[0].run.series[-1]
    outcomes[0].run.series[-1] = [
        (name, {**labels, "depth": "0"} if "depth" in labels else labels, v) for name, labels, v in series
    ]


def with_an_unknown_layer(outcomes: list[Outcome]) -> None:
    """Export a layer that is none."""
    labels = {"layer": "module.embedding", "depth": "99", "kind": "matrix", "param_group": "0"}
    outcomes[0].run.series[-1].append(("otel_train_layer_grad_norm", labels, 1.0))


def with_another_training(outcomes: list[Outcome]) -> None:
    """Change a loss by its last digit."""
    outcomes[1].run.losses[2] *= 1 + 1e-15


def with_other_weights(outcomes: list[Outcome]) -> None:
    """Change the weights."""
    outcomes[1].same_weights = False


def with_random_numbers_drawn(outcomes: list[Outcome]) -> None:
    """Move the random state."""
    outcomes[0].same_random_state = False


def with_another_norm_returned(outcomes: list[Outcome]) -> None:
    """Return another norm from clipping on rank 1."""
    outcomes[1].run.norms[0] *= 1.001


def with_a_warning(outcomes: list[Outcome]) -> None:
    """Warn."""
    outcomes[0].warnings.append("planted")


FAULTS: dict[str, Fault] = {
    "a gradient norm off by 2e-5": change("layer_grad_norm", lambda v: v * (1 + 2e-5)),
    "a gradient mean off": change("layer_grad_mean", lambda v: v + 1e-5),
    "an update ratio of NaN": change("layer_update_ratio", lambda _: float("nan")),
    "an activation mean of one rank": change("layer_activation_mean", lambda v: v * 1.01),
    "half of the elements": change("layer_parameters", lambda v: v / 2),
    "a share of changed elements off": change("layer_changed_ratio", lambda v: v - 0.1),
    "the norm over all ranks": change("grad_norm", lambda v: v * 2**0.5),
    "a step fewer": change("steps_total", lambda v: v - 1, rank=1),
    "tokens counted twice": change("tokens_total", lambda v: v * 2),
    "FLOPs counted twice": change("model_flops_total", lambda v: v * 2),
    "a failure of the monitor": change("monitor_errors_total", lambda v: v + 1, rank=1),
    "an older step": change("sampled_step", lambda v: v - 1),
    "parameters counted twice": change("trainable_parameters", lambda v: v * 2),
    "a histogram without half": change("layer_grad_magnitude", lambda v: v // 2),
    "another sum of a histogram": change("layer_grad_magnitude_sum", lambda v: v * 1.01),
    "a signed histogram without half": change("layer_grad_value", lambda v: v // 2),
    "another sum of a signed histogram": change("layer_grad_value_sum", lambda v: v + 0.01),
    "a signed histogram without negative elements": change("layer_grad_value_negative", lambda _: 0.0),
    "the loss of another rank": change("loss", lambda v: v * 1.01, rank=1),
    "no layer norms": without("layer_grad_norm"),
    "no norm of the parameters": without("param_norm"),
    "layers on both ranks": also_on_rank_1("layer_grad_norm"),
    "the global norm on both ranks": also_on_rank_1("grad_norm"),
    "equal depths": with_another_depth,
    "a layer with its wrapper's name": with_an_unknown_layer,
    "another loss": with_another_training,
    "other weights": with_other_weights,
    "random numbers drawn": with_random_numbers_drawn,
    "another norm returned": with_another_norm_returned,
    "a warning": with_a_warning,
}


@pytest.fixture(scope="module")
def ran(two: Ranks) -> tuple[list[Outcome], Reference]:
    """Run the row once."""
    return two.run(run_row, ROW), reference(TABLE[ROW])


@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_is_found(fault: str, ran: tuple[list[Outcome], Reference]) -> None:
    """Each gives at least one problem that was not there without it."""
    outcomes, expected = copy.deepcopy(ran[0]), ran[1]
    before = compare(TABLE[ROW], outcomes, expected).problems
    FAULTS[fault](outcomes)
    assert set(compare(TABLE[ROW], outcomes, expected).problems) - set(before)
