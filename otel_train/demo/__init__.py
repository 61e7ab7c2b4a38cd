"""``otel-train demo``: a small GPT learns Python from the standard library's own source text, and is watched doing it."""

from __future__ import annotations

import contextlib
import math
import os
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch.optim.lr_scheduler import LambdaLR

import otel_train
from otel_train.config import settings_from_environment
from otel_train.demo.corpus import Corpus
from otel_train.demo.model import GPT
from otel_train.demo.peak import measured_peak_flops
from otel_train.demo.progress import Progress, make_progress
from otel_train.demo.scenarios import SCENARIOS, Scenario
from otel_train.demo.verdict import verdict
from otel_train.demo.watch import Watch

BATCH, WARMUP_SHARE, CLIP_NORM, WEIGHT_DECAY = 8, 0.1, 1.0, 0.1
_EVAL_EVERY, _EVAL_BATCHES = 100, 4


@dataclass(frozen=True, slots=True)
class DemoOptions:
    """What the command line asks for."""

    steps: int = 300
    port: int | None = None
    every_n_steps: int | None = None
    hold: bool = False
    scenario: str = "healthy"
    stack: bool = False


@dataclass(frozen=True, slots=True)
class Demo:
    """One training: what is trained, how, and how long."""

    scenario: Scenario
    steps: int
    corpus: Corpus
    model: GPT
    optimizer: torch.optim.Optimizer
    schedule: LambdaLR
    warmup: int

    @classmethod
    def build(cls, scenario: Scenario, steps: int) -> Demo:
        """Make the model and what trains it; the same each time.

        Raises:
            ConfigError: The standard library's source is not there.
        """
        torch.manual_seed(0)
        corpus, model = Corpus.from_standard_library(), GPT()
        groups = model.parameter_groups(WEIGHT_DECAY, without_block=scenario.forgotten_block)
        optimizer = torch.optim.AdamW(groups, lr=scenario.learning_rate, betas=(0.9, 0.95))
        warmup = max(1, round(steps * WARMUP_SHARE))
        schedule = LambdaLR(optimizer, lambda step: warmup_cosine(step, warmup, steps))
        return cls(scenario, steps, corpus, model, optimizer, schedule, warmup)


def run_demo(options: DemoOptions) -> bool:
    """Train, show, and say what was seen.

    Returns:
        Whether the alerts were those that the scenario should set off; also where nothing looked for them.

    Raises:
        ConfigError: An option has no such value, or the standard library's source is not there.
    """
    demo = Demo.build(SCENARIOS[options.scenario], options.steps)
    seen = otel_train.MemorySink()
    with _attached(demo, options, seen) as monitor, contextlib.ExitStack() as closing:
        _greet(monitor, demo)
        if options.stack and monitor.port is None:
            print("No stack: OTEL_SDK_DISABLED switches the endpoint off, so that there is nothing to scrape.")
        watch = closing.enter_context(Watch(demo.scenario, demo.steps, monitor.port if options.stack else None))
        began = time.perf_counter()
        with make_progress(demo.steps) as progress:
            watch.follow(progress.say)
            validation = _train(monitor, demo, progress, watch)
        monitor.flush()
        if seen.snapshots:  # none where OTEL_SDK_DISABLED is set
            print("\n" + verdict(seen.snapshots, validation, time.perf_counter() - began))
        if options.hold:
            print(f"\nServing the last values at {monitor.url} until Ctrl-C.", flush=True)
            monitor.close(linger_seconds=math.inf)
            return True
        monitor.close()
        return watch.conclude()


@contextlib.contextmanager
def _attached(demo: Demo, options: DemoOptions, seen: otel_train.MemorySink) -> Iterator[otel_train.Monitor]:
    given: dict[str, Any] = {"port": options.port, "every_n_steps": options.every_n_steps}
    if "peak_flops" not in settings_from_environment(os.environ):
        given["peak_flops"] = measured_peak_flops()
    if "max_overhead" not in settings_from_environment(os.environ):
        given["max_overhead"] = 1.0  # as good as none: a small model is to be seen learning, in a minute
    with otel_train.attach(
        demo.model,
        demo.optimizer,
        sinks=[seen],
        planned_steps=demo.steps,
        warmup_steps=demo.warmup,
        **{name: value for name, value in given.items() if value is not None},
    ) as monitor:
        yield monitor


def warmup_cosine(step: int, warmup: int, steps: int) -> float:
    """Return the learning rate's factor: linear warmup, then a cosine down to a tenth."""
    if step < warmup:
        return (step + 1) / warmup
    done = (step - warmup) / max(1, steps - warmup)
    return 0.1 + 0.45 * (1 + math.cos(math.pi * min(done, 1.0)))


def _greet(monitor: otel_train.Monitor, demo: Demo) -> None:
    millions = sum(p.numel() for p in demo.model.parameters()) / 1e6
    megabytes = len(demo.corpus.training) / 1e6
    if monitor.url:
        print(f"Look inside:  {monitor.url}  (for Prometheus: {monitor.url}metrics)")
    print(
        f"A byte-level GPT of {millions:.2f} M parameters learns Python from {megabytes:.1f} MB of the standard library.\n"
        f"{demo.scenario.brief}",
        flush=True,
    )


def _train(monitor: otel_train.Monitor, demo: Demo, progress: Progress, watch: Watch) -> float:
    """Train, and return the last validation loss."""
    generator = torch.Generator().manual_seed(1)
    model, steps = demo.model, demo.steps
    batches = demo.corpus.batches(demo.corpus.training, BATCH, model.context, generator, steps)
    validation = math.nan
    for step, (inputs, targets) in enumerate(monitor.data(batches), start=1):
        watch.begin(step)
        loss = demo.scenario.loss(model(inputs, targets), step, steps)
        loss.backward()  # type: ignore[no-untyped-call]  # torch's
        monitor.clip_grad_norm_(CLIP_NORM)
        demo.optimizer.step()
        demo.schedule.step()
        demo.optimizer.zero_grad()
        monitor.observe(loss=loss, tokens=inputs.numel(), samples=len(inputs))
        progress.show(step, monitor.snapshot)
        if step % _EVAL_EVERY == 0 or step == steps:
            with monitor.phase("eval"):
                validation = _evaluate(model, demo.corpus)
    return validation


@torch.no_grad()
def _evaluate(model: GPT, corpus: Corpus) -> float:
    model.eval()
    generator = torch.Generator().manual_seed(2)
    batches = corpus.batches(corpus.validation, BATCH, model.context, generator, _EVAL_BATCHES)
    losses = [float(model(inputs, targets)) for inputs, targets in batches]
    model.train()
    return sum(losses) / len(losses)
