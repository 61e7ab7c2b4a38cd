"""torch.compile: graphs, breaks and recompilations with and without a monitor, side by side; values as in eager mode."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple, cast

import pytest
import torch
from torch import nn
from torch._dynamo.utils import clear_compilation_metrics, counters, get_compilation_metrics
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from otel_train.catalog import activations as act
from otel_train.catalog import loss as loss_catalog
from otel_train.catalog import run as run_catalog
from otel_train.hooks.module import DEAD_ROWS, _Hook
from otel_train.stats.activations import ROWS
from otel_train.testing import capture
from tests import problems
from tests.hooks.test_activations import Watch, check, sgd
from tests.hooks.test_untouched import COPIES

# torch's own: the compiler looks whether tensors between its graphs have a gradient, with and without a monitor
pytestmark = [
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning"),
    pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad:UserWarning"),
]

BLOCKS = 12
"""Above torch's recompile limit of 8: what differs between blocks would hit it at the ninth."""
SETTLED, STEPS = 4, 8
"""After SETTLED steps both kinds of step have been met; no graph is made after it."""

Call = Callable[[nn.Module, torch.Tensor], Any]


@pytest.fixture(autouse=True)
def _fresh_compiler() -> Iterator[None]:
    """Start without compiled graphs, and leave none."""
    torch.compiler.reset()
    yield
    torch.compiler.reset()


class Block(nn.Module):
    """A residual block."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.up, self.act, self.down = nn.LayerNorm(width), nn.Linear(width, 24), nn.ReLU(), nn.Linear(24, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map (batch, width) to the same shape."""
        mapped: torch.Tensor = x + self.down(self.act(self.up(self.norm(x))))
        return mapped


class Tower(nn.Module):
    """Blocks, each called as the configuration says."""

    def __init__(self, call: Call | None = None, blocks: int = BLOCKS, width: int = 12) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(width) for _ in range(blocks))
        self._call = call

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map (batch, width) to the same shape."""
        for block in self.blocks:
            x = block(x) if self._call is None else self._call(block, x)
        return x


class Made(NamedTuple):
    """What is attached, and what the loop calls."""

    root: nn.Module
    call: nn.Module


def whole(model: nn.Module, **settings: Any) -> Made:
    """torch.compile(model), then attach to what it returned."""
    compiled = cast("nn.Module", torch.compile(model, **settings))
    return Made(compiled, compiled)


def whole_inside(model: nn.Module, **settings: Any) -> Made:
    """Attach to the model, call what torch.compile(model) returned."""
    return Made(model, cast("nn.Module", torch.compile(model, **settings)))


def in_place(model: nn.Module, **settings: Any) -> Made:
    """model.compile()."""
    model.compile(**settings)
    return Made(model, model)


def blocks_in_place(model: nn.Module, **settings: Any) -> Made:
    """block.compile() for each block."""
    for block in cast("Tower", model).blocks:
        block.compile(**settings)
    return Made(model, model)


def blocks_wrapped(model: nn.Module, **settings: Any) -> Made:
    """torch.compile(block) in place of each block."""
    blocks = cast("Tower", model).blocks
    for i, block in enumerate(blocks):
        blocks[i] = cast("nn.Module", torch.compile(block, **settings))
    return Made(model, model)


def _policy(ctx: object, op: Any, *args: object, **kwargs: object) -> CheckpointPolicy:
    del ctx, args, kwargs
    saved = (torch.ops.aten.addmm.default, torch.ops.aten.sum.default)
    return CheckpointPolicy.MUST_SAVE if op in saved else CheckpointPolicy.PREFER_RECOMPUTE


not_reentrant = partial(checkpoint, use_reentrant=False)
reentrant = partial(checkpoint, use_reentrant=True)
selective = partial(checkpoint, use_reentrant=False, context_fn=partial(create_selective_checkpoint_contexts, _policy))


@dataclass(frozen=True)
class Row:
    """A configuration of the table."""

    make: Callable[..., Made]
    settings: dict[str, Any] = field(default_factory=dict)
    checkpoint: Call | None = None
    backend: str = "aot_eager"
    blocks: int = BLOCKS
    varies: bool = False
    """The batch size changes from step to step."""


FULL = {"fullgraph": True}
DYNAMIC = {"fullgraph": True, "dynamic": True}
ROWS_OF_TABLE: dict[str, Row] = {
    "model, attached to torch.compile(model)": Row(whole, FULL, blocks=4),
    "model, attached before torch.compile(model)": Row(whole_inside, FULL, blocks=4),
    "model.compile()": Row(in_place, FULL, blocks=4),
    "model, graph breaks allowed": Row(whole, blocks=4),
    "model, dynamic": Row(whole, DYNAMIC, blocks=3, varies=True),
    "block.compile()": Row(blocks_in_place, FULL),
    "torch.compile(block)": Row(blocks_wrapped, FULL),
    "block.compile(), dynamic": Row(blocks_in_place, DYNAMIC, varies=True),
    "block.compile(), dynamic where torch finds it out": Row(blocks_in_place, FULL, varies=True),
    "checkpoints in a compiled model": Row(whole, FULL, not_reentrant, blocks=4),
    "selective checkpoints in a compiled model": Row(whole, FULL, selective, blocks=3),
    "reentrant checkpoints in a compiled model": Row(whole, {}, reentrant, blocks=3),
    "block.compile() in checkpoints": Row(blocks_in_place, FULL, not_reentrant),
    "torch.compile(block) in checkpoints": Row(blocks_wrapped, FULL, not_reentrant),
    "block.compile() in selective checkpoints": Row(blocks_in_place, FULL, selective),
    "block.compile() in reentrant checkpoints": Row(blocks_in_place, FULL, reentrant),
    "block.compile(), inductor": Row(blocks_in_place, FULL, backend="inductor"),
    "block.compile() in checkpoints, inductor": Row(blocks_in_place, FULL, not_reentrant, backend="inductor"),
    "checkpoints in a compiled model, inductor": Row(whole, FULL, not_reentrant, backend="inductor", blocks=2),
}


class Counts(NamedTuple):
    """What the compiler did in a training."""

    graphs: int
    late: int
    """Graphs made after SETTLED steps."""
    breaks: int
    recompilations: int


@dataclass
class Training:
    """A training's compiler counts and losses."""

    counts: Counts
    losses: list[float]


def batch(step: int, row: Row) -> torch.Tensor:
    """Return inputs, few enough rows to be read whole."""
    rows = ROWS - 4 * (step % 3) if row.varies else ROWS
    return problems.vector_batch(step, batch=rows, inputs=12)[0].requires_grad_()


def twin_of(model: nn.Module, row: Row) -> Tower:
    """Return a plain copy with the model's present weights."""
    twin = Tower(blocks=row.blocks)
    twin.load_state_dict({name.replace("_orig_mod.", ""): value for name, value in model.state_dict().items()})
    return twin


def watched(model: nn.Module, row: Row, x: torch.Tensor) -> list[Watch]:
    """Watch a plain copy map the same inputs."""
    twin = twin_of(model, row)
    watches = [Watch(cast("Block", block).act) for block in twin.blocks]
    twin(x.detach())
    return watches


def train(row: Row, *, attached: bool) -> Training:
    """Make STEPS steps, every second of them sampled, and compare each site's values with those of a plain copy."""
    torch.compiler.reset()
    counters.clear()
    clear_compilation_metrics()
    torch.manual_seed(0)
    model = Tower(row.checkpoint, row.blocks)
    optimizer = sgd(model)
    root, call = row.make(model, backend=row.backend, **row.settings)
    graphs, losses = [], []
    with capture(root, optimizer, every_n_steps=2) if attached else contextlib.nullcontext((None, None)) as (monitor, sink):
        for step in range(1, STEPS + 1):
            x = batch(step, row)
            if step == STEPS:
                with torch.no_grad():
                    x[0, 0] = torch.inf
            watches = watched(model, row, x) if attached else []
            optimizer.zero_grad()
            loss = call(x).square().mean()
            loss.backward()
            optimizer.step()
            losses.append(float(loss.detach()))
            graphs.append(counters["stats"]["unique_graphs"])
            if monitor is None or sink is None or (step != 1 and step % 2):
                continue
            snapshot = problems.seen(monitor, sink)
            for i, watch in enumerate(watches):
                if step < STEPS:
                    check(snapshot, f"blocks.{i}.act", watch, 1e-6 if row.backend != "inductor" else 1e-5)
                else:  # counted once, whoever recomputes it
                    expected = sum(int((~watch.elements(site).isfinite()).sum()) for site in ("pre", "post"))
                    layer = f"blocks.{i}.act"
                    assert snapshot.value(loss_catalog.LAYER_NONFINITE, layer=layer, source="activation") == expected > 0
    if monitor is not None:
        assert not any(monitor._guard.errors.values())
    recompilations = sum(m.recompile_reason is not None for m in get_compilation_metrics())
    counts = Counts(graphs[-1], graphs[-1] - graphs[SETTLED - 1], sum(counters["graph_break"].values()), recompilations)
    return Training(counts, losses[:-1])


@pytest.fixture(scope="module")
def table() -> Iterator[list[str]]:
    """Collect the rows, and print them in the end (pytest -s)."""
    lines: list[str] = []
    yield lines
    print(f"\n{'':60} {'graphs':>13} {'late graphs':>13} {'breaks':>13} {'recompiled':>13}")  # noqa: T201
    print(f"{'without, with a monitor':60}")  # noqa: T201
    print("\n".join(lines))  # noqa: T201


@pytest.mark.slow
@pytest.mark.parametrize("name", ROWS_OF_TABLE)
def test_a_monitor_adds_one_graph_no_break_and_changes_nothing(name: str, table: list[str]) -> None:
    """One more graph in all, for steps that are sampled; none a step, and none a block; values as in eager mode, losses bit-identical."""
    row = ROWS_OF_TABLE[name]
    bare, with_monitor = train(row, attached=False), train(row, attached=True)
    pairs = zip(bare.counts, with_monitor.counts, strict=True)
    table.append(f"{name:60} " + " ".join(f"{without:6} {with_:6}" for without, with_ in pairs))
    assert with_monitor.counts.graphs <= bare.counts.graphs + 1
    assert with_monitor.counts.late <= bare.counts.late
    assert with_monitor.counts.breaks == bare.counts.breaks
    assert with_monitor.counts.recompilations <= bare.counts.recompilations + 1
    assert with_monitor.losses == bare.losses


def plain(model: nn.Module, **settings: Any) -> Made:
    """Do not compile."""
    del settings
    return Made(model, model)


def step_once(call: nn.Module, optimizer: torch.optim.Optimizer, x: torch.Tensor) -> None:
    """Make a step."""
    optimizer.zero_grad()
    call(x).square().mean().backward()
    optimizer.step()


WAYS = (whole, whole_inside, in_place, blocks_in_place, blocks_wrapped)


@pytest.mark.parametrize("make", WAYS, ids=lambda way: way.__name__)
@pytest.mark.parametrize("attached_late", [True, False], ids=["late", "in_time"])
def test_attaching_after_the_first_compiled_call_is_said_once_with_what_to_do(
    make: Callable[..., Made], caplog: pytest.LogCaptureFixture, *, attached_late: bool
) -> None:
    """pytorch/pytorch #117758: hooks registered after the first call are ignored. torch._dynamo.reset() mends it, as we say."""
    caplog.set_level(logging.WARNING, logger="otel_train")
    model = Tower(blocks=2)
    optimizer = sgd(model)
    root, call = make(model, backend="aot_eager")
    if attached_late:
        step_once(call, optimizer, torch.randn(4, 12))
    with capture(root, optimizer, every_n_steps=1) as (monitor, sink):
        for _ in range(3):
            step_once(call, optimizer, torch.randn(4, 12))
            snapshot = problems.seen(monitor, sink)
        said = [r.getMessage() for r in caplog.records if r.name == "otel_train"]
        assert len(snapshot.find(act.LAYER_ACTIVATION_MEAN)) == (0 if attached_late else 4)
        assert len(said) == attached_late
        if attached_late:
            assert "attach before the first compiled call, or call torch._dynamo.reset()" in said[0]
            torch._dynamo.reset()
            step_once(call, optimizer, torch.randn(4, 12))
            assert len(problems.seen(monitor, sink).find(act.LAYER_ACTIVATION_MEAN)) == 4


class Skipping(Tower):
    """Leaves its last blocks out."""

    used = 1

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map (batch, width) to the same shape."""
        for block in self.blocks[: self.used]:
            x = block(x)
        return x


@pytest.mark.parametrize("make", [plain, whole, blocks_in_place], ids=lambda way: way.__name__)
def test_sites_that_are_not_used_are_named_while_others_fire(make: Callable[..., Made], caplog: pytest.LogCaptureFixture) -> None:
    """A block that the forward leaves out is the only one that is missed."""
    caplog.set_level(logging.WARNING, logger="otel_train")
    model = Skipping(blocks=2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    root, call = make(model, backend="aot_eager")
    with capture(root, optimizer, every_n_steps=1) as (monitor, sink):
        for _ in range(3):
            step_once(call, optimizer, torch.randn(4, 12))
        assert len(problems.seen(monitor, sink).find(act.LAYER_ACTIVATION_MEAN)) == 2
    (said,) = [r.getMessage().partition(". ")[0] for r in caplog.records if "activation" in r.getMessage()]
    assert said == "no activation seen in 3 samples: blocks.1.act"


@pytest.mark.parametrize("make", WAYS, ids=lambda way: way.__name__)
def test_a_compiled_model_counts_micro_batches_and_dead_units_as_a_plain_one(make: Callable[..., Made]) -> None:
    """Two micro-batches a step; two of 24 ReLUs of a block never fire."""
    found = []
    for how in (plain, make):
        torch.manual_seed(0)
        model = Tower(blocks=2)
        with torch.no_grad():
            cast("Block", model.blocks[1]).up.bias[:2] = -1000.0
        optimizer = sgd(model)
        root, call = how(model, backend="aot_eager")
        with capture(root, optimizer, every_n_steps=1) as (monitor, sink):
            for step in range(DEAD_ROWS // ROWS):
                assert not problems.seen(monitor, sink).find(act.LAYER_ACTIVATION_DEAD_UNIT_RATIO)
                optimizer.zero_grad()
                for half in problems.vector_batch(step, inputs=12)[0].chunk(2):
                    call(half).square().mean().backward()
                optimizer.step()
            call(torch.randn(4, 12))  # closes the last step
            snapshot = problems.seen(monitor, sink)
        found.append(
            (
                snapshot.value(run_catalog.MICRO_BATCHES),
                [s.value for s in snapshot.find(act.LAYER_ACTIVATION_DEAD_UNIT_RATIO, layer="blocks.1.act")],
                [s.value for s in snapshot.find(act.LAYER_ACTIVATION_ZERO_RATIO)],
            )
        )
    assert found[0] == found[1]
    assert found[0][:2] == (2 * (DEAD_ROWS // ROWS), [2 / 24])


@pytest.mark.parametrize("make", [whole, in_place, blocks_in_place], ids=lambda way: way.__name__)
def test_validation_of_a_compiled_model_does_not_count_and_needs_no_graph_of_ours(make: Callable[..., Made]) -> None:
    """Eval mode, no gradients, between steps: as many graphs as without a monitor, and one for sampled steps."""
    graphs = []
    for attached in (False, True):
        torch.compiler.reset()
        counters.clear()
        torch.manual_seed(0)
        model = Tower(blocks=2)
        optimizer = sgd(model)
        root, call = make(model, backend="aot_eager")
        with capture(root, optimizer, every_n_steps=2) if attached else contextlib.nullcontext((None, None)) as (monitor, sink):
            for step in range(1, 7):
                call.train()
                x = batch(step, Row(make))
                watches = watched(model, Row(make, blocks=2), x)
                step_once(call, optimizer, x)
                call.eval()
                with torch.no_grad():
                    call(100 * x)
                if monitor is not None and sink is not None and step % 2 == 0:
                    check(problems.seen(monitor, sink), "blocks.1.act", watches[1])
        graphs.append(counters["stats"]["unique_graphs"])
    assert graphs[1] == graphs[0] + 1


def test_a_compiled_block_is_measured_whether_its_checkpoint_is_reentrant_or_not_there_any_more() -> None:
    """Recomputation in a reentrant one has a graph that does not measure; a forward with gradients must not take it for good."""
    torch.compiler.reset()
    torch.manual_seed(0)
    model = Tower(blocks=2)
    optimizer = sgd(model)
    blocks_in_place(model, backend="aot_eager", fullgraph=True)
    row = Row(blocks_in_place, blocks=2)
    with capture(model, optimizer, every_n_steps=2) as (monitor, sink):
        for step, call in enumerate([reentrant] * 4 + [None] * 4 + [not_reentrant] * 4 + [reentrant] * 4, start=1):
            model._call = call
            x = batch(step, row)
            watches = watched(model, row, x)
            step_once(model, optimizer, x)
            snapshot = problems.seen(monitor, sink)
            if step % 2 == 0:
                for i, watch in enumerate(watches):
                    check(snapshot, f"blocks.{i}.act", watch)


def test_a_compiled_function_that_calls_the_model_keeps_to_one_graph() -> None:
    """Root hooks are part of its graph then: fullgraph holds, and values are those of eager mode."""
    model = Tower(blocks=2)
    optimizer = sgd(model)

    def loss_of(x: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = model(x).square().mean()
        return loss

    compiled = torch.compile(loss_of, fullgraph=True, backend="aot_eager")
    counters.clear()
    with capture(model, optimizer, every_n_steps=2) as (monitor, sink):
        for step in range(1, 7):
            x = problems.vector_batch(step, inputs=12)[0]
            watches = watched(model, Row(whole, blocks=2), x)
            optimizer.zero_grad()
            compiled(x).backward()  # type: ignore[no-untyped-call]  # torch's
            optimizer.step()
            if step % 2 == 0:
                check(problems.seen(monitor, sink), "blocks.1.act", watches[1])
        assert not any(monitor._guard.errors.values())
    assert counters["stats"]["unique_graphs"] == 2
    assert not counters["graph_break"]


@dataclass
class Answer:
    """What some models return."""

    scores: torch.Tensor | None
    hidden: torch.Tensor


class Answering(nn.Module):
    """Takes keywords and answers with a dataclass."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.act = nn.Linear(12, 12), nn.GELU()

    def forward(self, *, hidden: torch.Tensor) -> Answer:
        """Map (batch, 12) to the same shape."""
        return Answer(None, self.act(input=self.linear(hidden)))


def test_keywords_and_containers_are_seen_in_compiled_graphs() -> None:
    """Arguments by keyword, a dataclass as output: one graph, and the values of eager mode."""

    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner, self.last = Answering(), nn.Linear(12, 12)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            answer: torch.Tensor = self.last(self.inner(hidden=x).hidden)
            return answer

    values = []
    for compiles in (False, True):
        torch.manual_seed(0)
        model = Outer()
        optimizer = sgd(model)
        if compiles:
            model.compile(backend="aot_eager", fullgraph=True)
        with capture(model, optimizer, every_n_steps=1, activations=("inner", "inner.act")) as (monitor, sink):
            step_once(model, optimizer, problems.vector_batch(0, inputs=12)[0])
            found = problems.seen(monitor, sink).find(act.LAYER_ACTIVATION_STD)
        values.append({s.labels: s.value for s in found})
    assert len(values[0]) == 4
    assert values[1] == pytest.approx(values[0], rel=1e-6)


@pytest.mark.parametrize("way", ["deepcopy", "pickle", "torch_save"])
@pytest.mark.parametrize("make", [in_place, blocks_in_place, blocks_wrapped, plain], ids=lambda way: way.__name__)
def test_copies_of_compiled_and_checkpointed_models_carry_nothing_that_acts(way: str, make: Callable[..., Made]) -> None:
    """A copy runs, gives what the model gives, and does not move the monitor's numbers; ``plain`` is checkpointed."""
    model = Tower(not_reentrant, blocks=2)
    if make is plain:
        model.blocks[0] = checkpoint_wrapper(model.blocks[0])
    optimizer = sgd(model)
    root, call = make(model, backend="aot_eager")
    copied = COPIES[way]
    with capture(root, optimizer, every_n_steps=1) as (monitor, sink):
        step_once(call, optimizer, torch.randn(4, 12, requires_grad=True))
        before = problems.seen(monitor, sink)
        twin = copied(model)
        x = torch.randn(4, 12, requires_grad=True)
        assert torch.allclose(twin(x), model(x), atol=1e-6)
        watches = watched(model, Row(make, blocks=2), x) if make is not plain else []
        optimizer.zero_grad()
        call(x).square().mean().backward()
        twin(100 * x).sum().backward()
        optimizer.step()
        snapshot = problems.seen(monitor, sink)
        assert (before.value(run_catalog.STEPS), snapshot.value(run_catalog.STEPS)) == (1, 2)
        del watches
    assert not any(
        isinstance(hook, _Hook) for m in twin.modules() for hook in (*m._forward_hooks.values(), *m._forward_pre_hooks.values())
    )
