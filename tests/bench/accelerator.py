"""Checks that take an accelerator, as one prepared script: ``python -m tests.bench.accelerator``.

Synchronisation, device time, a trace, memory, values, graphs; a table, and one JSON object as the last line. Exits with 0 where all
checks pass, and where there is no accelerator. ``--device cpu`` runs what makes sense without one, on a small model, whose costs
are not judged.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import sys
import tempfile
import time
import traceback
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.autograd.profiler_util import FunctionEvent
from torch.profiler import profile, record_function

from otel_train.catalog import activations, gradients, loss, parameters, updates
from otel_train.catalog import monitor as monitor_catalog
from otel_train.config import KINDS, MonitorConfig
from otel_train.demo.model import GPT
from otel_train.monitor import Monitor
from otel_train.sinks.memory import MemorySink
from otel_train.testing import capture
from tests import problems

BUDGET = 0.01
"""Share of a bare step that monitoring may take, spread over the steps from sample to sample."""
HELD = 0.01
"""Share of weights, gradients and optimizer state that our tensors may take."""
SETTLED = 20
"""Steps after which buffers are made and the allocator has what it needs."""
SLACK = 64 << 10
"""Bytes by which allocated memory may differ: read-outs on their way."""
_RANGE = "otel_train."

Figures = dict[str, Any]


@dataclass(frozen=True)
class Setting:
    """What a run of the script is asked for."""

    device: torch.device
    steps: int
    memory_steps: int
    trace: Path

    @property
    def judged(self) -> bool:
        """Whether costs count: on the CPU the model is too small for them."""
        return self.device.type != "cpu"


@dataclass(frozen=True)
class Outcome:
    """What a check found."""

    name: str
    passed: bool
    figures: Figures


class Training:
    """A GPT under autocast and a GradScaler, clipped, with a fused AdamW; the data stays on the device."""

    def __init__(self, device: torch.device, *, mixed: bool = True, compiled: bool = False) -> None:
        torch.manual_seed(0)
        small = device.type == "cpu"
        batch, context = (2, 32) if small else (8, 512)
        model = GPT(width=64, layers=2, context=context) if small else GPT(width=768, layers=12, heads=12, context=context)
        self.device, self.mixed = device, mixed
        self.model = model.to(device)
        how: dict[str, Any] = {"fused": True} if mixed else {"capturable": device.type != "cpu"}
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3, **how)
        self.scaler = torch.amp.GradScaler(device.type, enabled=mixed)
        self.inputs, self.targets = torch.randint(256, (2, batch, context)).to(device)
        self.forward: Callable[..., Any] = torch.compile(self.model, mode="reduce-overhead") if compiled else self.model

    def step(self, monitor: Monitor | None = None) -> None:
        """Make a step; with a monitor, clip by it and tell it the loss."""
        value = self.backward()
        self.scaler.unscale_(self.optimizer)
        if monitor is None:
            nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        else:
            monitor.clip_grad_norm_(1.0)
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.optimizer.zero_grad()  # gradients that stay would be overwritten by CUDA graphs
        if monitor is not None:
            monitor.observe(loss=value, tokens=self.inputs.numel())

    def backward(self) -> torch.Tensor:
        """Compute gradients, and return the loss."""
        dtype = torch.float16 if self.device.type == "cuda" else torch.bfloat16
        with torch.autocast(self.device.type, dtype=dtype, enabled=self.mixed):
            value: torch.Tensor = self.forward(self.inputs, self.targets)
        self.scaler.scale(value).backward()  # type: ignore[no-untyped-call]  # torch's
        return value

    @contextmanager
    def monitored(self, **settings: Any) -> Iterator[tuple[Monitor, MemorySink]]:
        """Attach with everything on, at every step."""
        with capture(self.model, self.optimizer, every_n_steps=1, kinds=KINDS, **settings) as (monitor, sink):
            yield monitor, sink
            assert monitor.flush(60.0)
            failures = {s.labels[0]: s.value for s in problems.seen(monitor, sink).find(monitor_catalog.MONITOR_ERRORS) if s.value}
            assert not failures, f"the monitor failed in {failures}; its log says how"


def synchronise(device: torch.device) -> None:
    """Wait for the device."""
    if device.type != "cpu":
        torch.accelerator.synchronize()


def check_synchronisation(setting: Setting) -> tuple[bool, Figures]:
    """No call of ours synchronises: each would raise. The bare loop goes first, so that what raises then is not ours."""
    training = Training(setting.device)
    training.step()
    with _synchronising_raises():
        for _ in range(3):
            training.step()
    with training.monitored() as (monitor, _):
        for _ in range(3):  # buffers are made, and copied to the device
            training.step(monitor)
        with _synchronising_raises():
            for _ in range(setting.steps):
                training.step(monitor)
    return True, {"steps": setting.steps}  # what raised in a hook has been counted, and found on leaving


@contextmanager
def _synchronising_raises() -> Iterator[None]:
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def check_time(setting: Setting) -> tuple[bool, Figures]:
    """A sampled step against a bare one, in turns, by the device's own clock."""
    bare, watched = Training(setting.device), Training(setting.device)
    with watched.monitored() as (monitor, _):
        turns: dict[str, Callable[[], None]] = {"bare": bare.step, "sampled": lambda: watched.step(monitor)}
        times: defaultdict[str, list[float]] = defaultdict(list)
        for _ in range(3):
            for turn in turns.values():
                turn()
        for _ in range(setting.steps):
            for name, turn in turns.items():
                times[name].append(_milliseconds(setting.device, turn))
    medians = {name: statistics.median(found) for name, found in times.items()}
    ratio = medians["sampled"] / medians["bare"]
    spread = (ratio - 1.0) / MonitorConfig().every_n_steps
    figures = {"bare_ms": medians["bare"], "sampled_ms": medians["sampled"], "ratio": ratio, "overhead": spread}
    return not setting.judged or spread <= BUDGET, figures


def _milliseconds(device: torch.device, call: Callable[[], None]) -> float:
    if device.type == "cpu":
        began = time.perf_counter()
        call()
        return (time.perf_counter() - began) * 1e3
    synchronise(device)
    start, end = (torch.Event(device=device, enable_timing=True) for _ in range(2))
    start.record()
    call()
    end.record()
    synchronise(device)
    return float(start.elapsed_time(end))


class _Ranged:
    """A part of the monitor that is a range of the trace too."""

    def __init__(self, part: Any, name: str) -> None:
        self._part, self._name = part, name

    def __enter__(self) -> None:
        self._range = record_function(_RANGE + self._name)
        self._range.__enter__()  # type: ignore[no-untyped-call]  # torch's
        self._part.__enter__()

    def __exit__(self, *error: object) -> bool:
        swallowed: bool = self._part.__exit__(*error)
        self._range.__exit__(*error)
        return swallowed


def check_trace(setting: Setting) -> tuple[bool, Figures]:
    """A trace with our parts as ranges; what of ours runs on the device in a sampled step, and for how long."""
    training, steps = Training(setting.device), 3
    with training.monitored() as (monitor, _):
        parts = monitor._guard._parts
        parts.update({name: _Ranged(part, name) for name, part in parts.items()})  # type: ignore[misc]  # as good as a part
        for _ in range(3):
            training.step(monitor)
        with profile() as profiler:
            for _ in range(steps):
                training.step(monitor)
            synchronise(setting.device)
    profiler.export_chrome_trace(str(setting.trace))
    ours, total = _own_kernels(profiler.events() or [], on_host=setting.device.type == "cpu")
    count, seconds = Counter[str](), Counter[str]()
    for part, name, microseconds in ours:
        count[part] += 1
        seconds[name] += microseconds  # type: ignore[assignment]  # a Counter of floats
    own = sum(microseconds for _, _, microseconds in ours)
    return bool(ours), {
        "trace": str(setting.trace),
        "kernels_a_step": len(ours) / steps,
        "kernels_by_part": {part: number / steps for part, number in count.items()},
        "own_us_a_step": own / steps,
        "share_of_device_time": own / total,
        "top": {name[:80]: microseconds / steps for name, microseconds in seconds.most_common(10)},
    }


def _own_kernels(events: Sequence[FunctionEvent], *, on_host: bool) -> tuple[list[tuple[str, str, float]], float]:
    """Return part, name and microseconds of what runs in our ranges, and the microseconds of everything."""
    ours: list[tuple[str, str, float]] = []
    total = 0.0
    for event in events:
        part = _part_of(event)
        for name, microseconds in _work(event, on_host=on_host):
            total += microseconds
            if part is not None:
                ours.append((part, name, microseconds))
    return ours, total


def _work(event: FunctionEvent, *, on_host: bool) -> list[tuple[str, float]]:
    """Return the kernels that an operation launched; on the CPU the operation itself, if it calls no other."""
    if on_host:
        return [(event.name, event.self_cpu_time_total)] if event.name.startswith("aten::") and not event.cpu_children else []
    # a range shows on the device too, as long as all that runs in it
    return [(kernel.name, kernel.duration) for kernel in event.kernels if not kernel.name.startswith(_RANGE)]


def _part_of(event: FunctionEvent | None) -> str | None:
    while event is not None:
        if event.name.startswith(_RANGE):
            return event.name.removeprefix(_RANGE)
        event = event.cpu_parent
    return None


def check_memory(setting: Setting) -> tuple[bool, Figures]:
    """What we hold is a small share of the training's own, and neither it nor the allocator grows over sampled steps."""
    training = Training(setting.device)
    for _ in range(SETTLED):
        training.step()
    own, before = _state_bytes(training), _allocated_and_reserved(setting.device)
    with training.monitored() as (monitor, _):
        seen = [_after(training, monitor, steps) for steps in (SETTLED, setting.memory_steps)]
    held, grown, reserved = seen[0][0] - before[0], seen[1][0] - seen[0][0], seen[1][1] - seen[0][1]
    fits = not setting.judged or held <= HELD * own
    figures = {"held_bytes": held, "held_share": held / own, "grown_bytes": grown, "reserved_grown_bytes": reserved}
    return fits and grown <= SLACK and reserved <= 0, {**figures, "steps": setting.memory_steps}


def _after(training: Training, monitor: Monitor, steps: int) -> tuple[int, int]:
    for _ in range(steps):
        training.step(monitor)
    assert monitor.flush(60.0)
    return _allocated_and_reserved(training.device)


def _state_bytes(training: Training) -> int:
    """Return the bytes of weights, gradients and optimizer state."""
    state = [t for values in training.optimizer.state.values() for t in values.values() if isinstance(t, torch.Tensor)]
    return sum(2 * p.nbytes for p in training.model.parameters()) + sum(t.nbytes for t in state)


def _allocated_and_reserved(device: torch.device) -> tuple[int, int]:
    gc.collect()
    if device.type == "cpu":
        tensors = (found for found in gc.get_objects() if issubclass(type(found), torch.Tensor))
        return sum({t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}.values()), 0
    synchronise(device)
    module = torch.get_device_module(device)
    return module.memory_allocated(device), module.memory_reserved(device)


def check_values(setting: Setting) -> tuple[bool, Figures]:
    """Norms and update ratios of each layer equal those that the CPU computes of the same step in fp64, to 1e-5."""
    training = Training(setting.device, mixed=False)
    with training.monitored(updates="exact") as (monitor, sink):
        for _ in range(2):  # biases that start at 0 have a ratio only then
            training.optimizer.zero_grad()
            training.backward()
            grads, before = _on_host(problems.gradients(training.model)), _on_host(problems.weights(training.model))
            training.optimizer.step()
        after = _on_host(problems.weights(training.model))
        snapshot = problems.seen(monitor, sink)
    model = training.model
    expected = {
        gradients.LAYER_GRAD_NORM: {key: flat.norm().item() for key, flat in problems.by_layer(model, grads).items()},
        parameters.LAYER_PARAM_NORM: {key: flat.norm().item() for key, flat in problems.by_layer(model, before).items()},
        updates.LAYER_UPDATE_RATIO: problems.naive_ratios(model, before, after, KINDS),
    }
    errors = {
        spec.name: max(abs(problems.layer_values(snapshot, spec)[key] - value) / value for key, value in of_layers.items() if value)
        for spec, of_layers in expected.items()
    }
    return max(errors.values()) <= 1e-5, {**errors, "values": sum(len(of_layers) for of_layers in expected.values())}


def _on_host(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: tensor.cpu() for name, tensor in tensors.items()}


def check_graphs(setting: Setting) -> tuple[bool, Figures]:
    """A model in CUDA graphs (``reduce-overhead``) and a capturable AdamW show what the eager ones do, to rounding."""
    eager, compiled = (_values_of_steps(setting, compiled=compiled) for compiled in (False, True))
    errors = {name: max(abs(a[name] - b[name]) / abs(a[name]) for a, b in zip(eager, compiled, strict=True)) for name in eager[0]}
    return max(errors.values()) <= 1e-3, errors


def _values_of_steps(setting: Setting, *, compiled: bool, steps: int = 6) -> list[dict[str, float]]:
    training = Training(setting.device, mixed=False, compiled=compiled)
    found = []
    with training.monitored(updates="exact") as (monitor, sink):
        for _ in range(steps):
            torch.compiler.cudagraph_mark_step_begin()  # type: ignore[no-untyped-call]  # torch's
            training.step(monitor)
            snapshot = problems.seen(monitor, sink)
            stds = [s.value for s in snapshot.find(activations.LAYER_ACTIVATION_STD) if isinstance(s.value, float)]
            values = {spec.name: snapshot.value(spec) for spec in (loss.LOSS, parameters.PARAM_NORM, updates.UPDATE_RATIO)}
            values[gradients.GRAD_NORM.name] = snapshot.value(gradients.GRAD_NORM, stage="pre_clip")
            values[activations.LAYER_ACTIVATION_STD.name] = statistics.fmean(stds)
            found.append({name: value for name, value in values.items() if value is not None})
            assert len(found[-1]) == len(values), values
    return found


CHECKS: dict[str, Callable[[Setting], tuple[bool, Figures]]] = {
    "synchronisation": check_synchronisation,
    "time": check_time,
    "trace": check_trace,
    "memory": check_memory,
    "values": check_values,
    "graphs": check_graphs,
}
_CUDA_ONLY = {"synchronisation", "graphs"}


def run(setting: Setting) -> list[Outcome]:
    """Make the checks that the device has; one that raises has failed, and the others go on."""
    outcomes = []
    for name, check in CHECKS.items():
        if name in _CUDA_ONLY and setting.device.type != "cuda":
            continue
        try:
            outcomes.append(Outcome(name, *check(setting)))
        except Exception as error:  # noqa: BLE001  # whatever it is, the device's time is short
            traceback.print_exc()
            outcomes.append(Outcome(name, passed=False, figures={"error": repr(error)}))
        print(_row(outcomes[-1]), flush=True)  # noqa: T201
    return outcomes


def _row(outcome: Outcome) -> str:
    cells = [f"{name} {f'{value:.6g}' if isinstance(value, float) else value}" for name, value in outcome.figures.items()]
    return "\n    ".join([f"{'passed' if outcome.passed else 'FAILED'}  {outcome.name}", *cells])


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the script; returns its exit code."""
    parser = argparse.ArgumentParser(prog="python -m tests.bench.accelerator", description="Checks that take an accelerator.")
    parser.add_argument("--steps", type=int, default=50, help="sampled steps of a check")
    parser.add_argument("--memory-steps", type=int, default=500, help="sampled steps over which memory must stay")
    parser.add_argument("--device", help="default: the accelerator")
    parser.add_argument("--trace", type=Path, default=Path(tempfile.gettempdir(), "otel-train-trace.json"), help="where it goes")
    given = parser.parse_args(arguments)
    if given.device is None and not torch.accelerator.is_available():
        print("skipped: no accelerator")  # noqa: T201
        return 0
    device = torch.device(given.device) if given.device else torch.accelerator.current_accelerator()
    assert device is not None
    outcomes = run(Setting(device, given.steps, given.memory_steps, given.trace))
    passed = all(outcome.passed for outcome in outcomes)
    summary = {"device": str(device), "torch": torch.__version__, "passed": passed, "checks": [asdict(o) for o in outcomes]}
    print(json.dumps(summary))  # noqa: T201
    return 0 if passed else 1


if __name__ == "__main__":
    sys.exit(main())
