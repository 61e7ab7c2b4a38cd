"""``otel-train demo``: a small GPT learns Python from the standard library's own source text, and is watched doing it."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass
from typing import Any

import torch
from torch.optim.lr_scheduler import LambdaLR

import otel_train
from otel_train.demo.corpus import Corpus
from otel_train.demo.model import GPT
from otel_train.demo.progress import Progress, make_progress
from otel_train.demo.verdict import verdict

BATCH, WARMUP_SHARE, PEAK_LEARNING_RATE, CLIP_NORM = 8, 0.1, 5e-4, 1.0
_EVAL_EVERY, _EVAL_BATCHES = 100, 4


@dataclass(frozen=True, slots=True)
class DemoOptions:
    """What the command line asks for."""

    steps: int = 300
    port: int | None = None
    every_n_steps: int | None = None
    hold: bool = False


def run_demo(options: DemoOptions) -> None:
    """Train, show, and say what was seen.

    Raises:
        ConfigError: An option has no such value, or the standard library's source is not there.
    """
    torch.manual_seed(0)
    corpus = Corpus.from_standard_library()
    model = GPT()
    optimizer = torch.optim.AdamW(model.parameter_groups(weight_decay=0.1), lr=PEAK_LEARNING_RATE, betas=(0.9, 0.95))
    warmup = max(1, round(options.steps * WARMUP_SHARE))
    schedule = LambdaLR(optimizer, lambda step: warmup_cosine(step, warmup, options.steps))
    given: dict[str, Any] = {"port": options.port, "every_n_steps": options.every_n_steps}
    seen = otel_train.MemorySink()
    monitor = otel_train.attach(
        model,
        optimizer,
        sinks=[seen],
        planned_steps=options.steps,
        warmup_steps=warmup,
        **{name: value for name, value in given.items() if value is not None},
    )
    with monitor:
        _greet(monitor, model, corpus)
        began = time.perf_counter()
        with make_progress(options.steps) as progress:
            validation = _train(monitor, model, optimizer, schedule, corpus, steps=options.steps, progress=progress)
        monitor.flush()
        if seen.snapshots:  # none where OTEL_SDK_DISABLED is set
            print("\n" + verdict(seen.snapshots, validation, time.perf_counter() - began))
        if options.hold:
            print(f"\nServing the last values at {monitor.url} until Ctrl-C.")
            monitor.close(linger_seconds=math.inf)


def warmup_cosine(step: int, warmup: int, steps: int) -> float:
    """Return the learning rate's factor: linear warmup, then a cosine down to a tenth."""
    if step < warmup:
        return (step + 1) / warmup
    done = (step - warmup) / max(1, steps - warmup)
    return 0.1 + 0.45 * (1 + math.cos(math.pi * min(done, 1.0)))


def _greet(monitor: otel_train.Monitor, model: GPT, corpus: Corpus) -> None:
    millions = sum(p.numel() for p in model.parameters()) / 1e6
    megabytes = len(corpus.training) / 1e6
    if monitor.url:
        print(f"Look inside:  {monitor.url}  (for Prometheus: {monitor.url}metrics)")
    print(
        f"A byte-level GPT of {millions:.2f} M parameters learns Python from {megabytes:.1f} MB of the standard library.",
        flush=True,
    )


def _train(
    monitor: otel_train.Monitor,
    model: GPT,
    optimizer: torch.optim.Optimizer,
    schedule: LambdaLR,
    corpus: Corpus,
    *,
    steps: int,
    progress: Progress,
) -> float:
    """Train, and return the last validation loss."""
    generator = torch.Generator().manual_seed(1)
    batches = corpus.batches(corpus.training, BATCH, model.context, generator, steps)
    validation = math.nan
    for step, (inputs, targets) in enumerate(monitor.data(batches), start=1):
        loss = model(inputs, targets)
        loss.backward()
        monitor.clip_grad_norm_(CLIP_NORM)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        monitor.observe(loss=loss, tokens=inputs.numel(), samples=len(inputs))
        progress.show(step, monitor.snapshot)
        if step % _EVAL_EVERY == 0 or step == steps:
            with monitor.phase("eval"):
                validation = _evaluate(model, corpus)
    return validation


@torch.no_grad()
def _evaluate(model: GPT, corpus: Corpus) -> float:
    model.eval()
    generator = torch.Generator().manual_seed(2)
    batches = corpus.batches(corpus.validation, BATCH, model.context, generator, _EVAL_BATCHES)
    losses = [float(model(inputs, targets)) for inputs, targets in batches]
    model.train()
    return sum(losses) / len(losses)
