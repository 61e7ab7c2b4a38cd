"""attach and Monitor: the one file that sees both the device arm and the host arm."""

from __future__ import annotations

import atexit
import contextlib
import logging
import os
import threading
import time
import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from types import TracebackType
from typing import Any, TypeVar

import torch
from prometheus_client import CollectorRegistry
from torch import nn
from torch.optim import Optimizer
from typing_extensions import Self  # torch depends on it

from otel_train import config as configuration
from otel_train import parallel
from otel_train.assembly import Assembler, LiveState
from otel_train.assembly.state import RunState, read_state
from otel_train.budget import Pace
from otel_train.config import MonitorConfig
from otel_train.device import device_clock, device_memory
from otel_train.errors import OtelTrainError
from otel_train.facts import flops_per_token, run_facts
from otel_train.guard import Guard
from otel_train.hooks.attachment import Attachment
from otel_train.hooks.loader import TimedLoader
from otel_train.hooks.optimizer import group_names
from otel_train.hooks.pending import PendingMicroBatches, Step
from otel_train.hooks.targets import check_model, named_optimizers, unwrapped
from otel_train.layers import map_layers
from otel_train.pacing import Pacer
from otel_train.parallel import Others, Ranks
from otel_train.parallel.clip import clip_grad_norm_
from otel_train.records import Coverage, RankSample
from otel_train.sigterm import Sigterm
from otel_train.sinks import Outlets, Sink, find_sinks
from otel_train.sinks.endpoint import Endpoint
from otel_train.sinks.page import render_fragment
from otel_train.sinks.prometheus import PrometheusSink
from otel_train.snapshot import Snapshot
from otel_train.worker import Worker, thread_seconds

_LOG = logging.getLogger("otel_train")
_Batch = TypeVar("_Batch")

_FLUSH_SECONDS = 10.0
_PHASES = 16
"""Names of phases at most, since each is a series; what comes after is called ``other``."""

_monitors: weakref.WeakKeyDictionary[nn.Module, Monitor] = weakref.WeakKeyDictionary()
"""The monitor of each model; holds it as long as the model lives, even if the user keeps none."""
_open: weakref.WeakSet[Monitor] = weakref.WeakSet()


def attach(
    model: nn.Module,
    optimizer: Optimizer | Sequence[Optimizer] | Mapping[str, Optimizer] | None = None,
    *,
    config: MonitorConfig | None = None,
    sinks: Iterable[Sink] | None = None,
    mesh: object = None,
    groups: object = None,
    **settings: Any,
) -> Monitor:
    """Measure a training from the inside and serve what is seen, from the next forward on.

    Call it after the model is wrapped or sharded and before the first compiled call. Attaching to the same model again replaces its
    monitor and keeps its port.

    Args:
        model: The root module: one call of it is one micro-batch.
        optimizer: The optimizer, several (a list, or a mapping by name), or None: then gradients and updates are not measured, and
            each ``observe`` counts as a step. Wrappers with an inner ``.optimizer`` are unwrapped.
        config: Settings; fields of MonitorConfig. Default: the environment.
        sinks: Where Snapshots go besides the Prometheus endpoint.
        mesh: The root DeviceMesh, where parameters do not tell it: its dimension ``pp`` tells stages of a pipeline apart.
        groups: Patterns of parameter names to the process group, or the ranks, that hold replicas of what matches, such as
            ``{"experts.*": expert_data_parallel_group}``; each rank gives the group that it is in.
        **settings: Fields of MonitorConfig; they win over ``config``.

    Returns:
        The monitor; close it when the training ends.

    Raises:
        ConfigError: A setting has no such name or value.
        AttachError: The model or the optimizer cannot be monitored as it is, on this rank or on another one.
    """
    board = parallel.find_board()
    try:
        chosen = configuration.make_config(config, settings)
        check_model(model)
        optimizers = named_optimizers(model, optimizer)
        extra = find_sinks(sinks)
        monitor = Monitor(model, optimizers, chosen, extra, Others(board, mesh, groups))
    except OtelTrainError as error:
        if board is None:
            raise
        raise type(error)(parallel.share_error(board, error)) from error
    old = _monitors.get(unwrapped(model))
    _monitors[unwrapped(model)] = monitor
    monitor.start(old)
    return monitor


_Item = Step | PendingMicroBatches | Coverage | RankSample


class Monitor:
    """A running attachment: made by ``attach``, ended by ``close`` or by leaving its ``with`` block.

    No method raises into the training, waits for the device, or blocks, except ``flush``, ``close`` and the two of the state, which
    wait for the monitor's own thread.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizers: Mapping[str, Optimizer],
        config: MonitorConfig,
        sinks: Sequence[Sink],
        others: Others,
    ) -> None:
        self._config = config
        self._device = next(model.parameters()).device if any(True for _ in model.parameters()) else torch.device("cpu")
        clock = device_clock(self._device)
        self._guard = Guard(clock)
        self._live = LiveState(Pace.regular(config.every_n_steps))
        self._disabled = configuration.is_disabled()
        self._closed = self._disabled
        self._closing = threading.RLock()  # a signal handler may close while we close
        self._phases = {"train"}
        self._phase_began = 0.0
        self._pid = os.getpid()
        self._prometheus = PrometheusSink()
        self._outlets = Outlets((self._prometheus, *sinks), lambda: self._guard.part("export"))
        self._endpoint: Endpoint | None = None
        self._model = weakref.ref(model)
        self._worker: Worker[_Item] = Worker("otel-train", self._handle, self._publish)
        self._sigterm = Sigterm(self.close)
        self._ranks: Ranks | None = None
        if self._disabled:
            self._attachment: Attachment | None = None
            return
        self._place = parallel.process_rank(configuration.rank_from_environment())
        self._attachment = Attachment(
            model, optimizers, config, guard=self._guard, clock=clock, emit=self._emit, cover=self._worker.put
        )
        self._pacer = Pacer(self._attachment.recorder, config)
        try:
            layer_map = map_layers(model, group_names(optimizers), config) if others.board is not None else None
            self._ranks = others.meet(
                model, layer_map, config, horizon=lambda: self._pacer.horizon, guard=self._guard, deliver=self._deliver
            )
        except OtelTrainError:
            self._attachment.remove()
            raise
        self._pacer.alone = self._ranks is None or not self._ranks.meets
        facts = run_facts(model, config, self._place, self._device, self._ranks, measured=self._attachment.measured)
        self._assembler = Assembler(facts, flops_per_token(model, config, self._device, self._ranks))

    def start(self, old: Monitor | None) -> None:
        """Start the thread and the endpoint; the model's monitor until now ends, and its port is taken over."""
        port = self.asked_port
        if old is not None:
            port = old.port if old.asked_port == port and old.port is not None else port
            old.close(linger_seconds=0)  # no scrape is waited for: the training goes on
        model = self._model()
        if self._disabled or model is None:
            return
        self._worker.start()
        if self._ranks is not None:
            self._ranks.start()
        self._listen(port)
        _open.add(self)
        atexit.unregister(_close_all)
        atexit.register(_close_all)  # before what was registered so far: pipelines that take our last values shut down after us
        weakref.finalize(model, _model_gone, weakref.ref(self)).atexit = False
        if self._config.handle_sigterm:
            self._sigterm.handle()
        self._worker.flush(_FLUSH_SECONDS)  # so that the first scrape finds every counter at 0

    @property
    def asked_port(self) -> int | None:
        """The port that was asked for, which a taken port may have kept from being served; 0 for any free one."""
        return self._config.port + self._place.local_rank if self._config.port and not self._disabled else self._config.port

    def _listen(self, port: int | None) -> None:
        if port is None:
            return
        try:
            self._endpoint = Endpoint(
                self._prometheus, self._config.host, port, lambda error: self._guard.failed("endpoint", error)
            )
        except (OSError, OverflowError, UnicodeError) as error:
            self._guard.errors["endpoint"] += 1
            _LOG.warning("no endpoint: cannot listen on %s port %d (%s)", self._config.host, port, error)

    def _emit(self, item: Step | PendingMicroBatches) -> None:
        self._worker.put(item)
        if isinstance(item, Step) and self._pacer.is_urgent(item.costs):
            self._worker.hurry()

    def _deliver(self, sample: RankSample) -> None:
        self._pacer.meet(sample.attempt, sample.agreed)  # in the exchange's thread: a decision does not wait for the worker's turn
        self._worker.put(sample)

    def _handle(self, item: _Item) -> None:
        with self._guard.part("export"):
            if isinstance(item, Coverage):
                self._assembler.cover(item if self._ranks is None else self._ranks.own(item))
            elif isinstance(item, PendingMicroBatches):
                self._assembler.wait(item.resolve())
            elif isinstance(item, RankSample):
                self._assembler.add_sample(item)
            else:
                self._add(item)

    def _add(self, step: Step) -> None:
        began = thread_seconds()
        record = step.resolve()
        exchanged = self._ranks if record.sampled else None
        self._assembler.add(record if exchanged is None else replace(record, sample=None))
        now, ranks = thread_seconds(), self._guard.seconds["ranks"]
        pace = self._pacer.add(record, now - began, threads=now + self._served_seconds() + self._outlets.cpu_seconds, ranks=ranks)
        if exchanged is not None:
            exchanged.put(record, self._assembler.step, pace)  # its layers follow once the ranks have met

    def _served_seconds(self) -> float:
        return 0.0 if self._endpoint is None else self._endpoint.cpu_seconds

    def _publish(self) -> None:
        snapshot = None
        with self._guard.part("export"):
            live = self._live
            own = {"export": self._worker.cpu_seconds + self._outlets.cpu_seconds, "endpoint": self._served_seconds()}
            seconds = {**self._guard.seconds, **own}
            lost = self._worker.dropped  # steps that this thread was too slow for
            errors = {**self._guard.errors, "export": self._guard.errors["export"] + lost}
            live.monitor_seconds, live.monitor_errors = seconds, errors
            live.memory, live.reported = device_memory(self._device), tuple(self._outlets.reports())
            live.pace, live.overhead = self._pacer.pace, self._pacer.overhead
            snapshot = self._assembler.snapshot(live, time.time())
        if snapshot is not None:
            self._outlets.publish(snapshot)

    def observe(
        self,
        *,
        loss: float | torch.Tensor | None = None,
        tokens: int | torch.Tensor | None = None,
        samples: int | torch.Tensor | None = None,
        grad_norm: float | torch.Tensor | None = None,
        loss_scale: float | None = None,
    ) -> None:
        """Tell what the loop knows, once a micro-batch, before or after ``optimizer.step``; tensors are taken without a sync.

        Args:
            loss: The micro-batch's loss, () or a number.
            tokens: Tokens in the micro-batch.
            samples: Samples in the micro-batch.
            grad_norm: L2 norm of the gradient before clipping, if it is clipped by other means than ``clip_grad_norm_``.
            loss_scale: The GradScaler's scale (``scaler.get_scale()``), after ``scaler.update()``: a fall tells of a skipped step.
        """
        if self._attachment is not None and not self._closed:
            self._attachment.recorder.observe(loss, tokens, samples, grad_norm, loss_scale)

    def clip_grad_norm_(
        self, max_norm: float, norm_type: float = 2.0, *, parameters: Iterable[torch.Tensor] | None = None
    ) -> torch.Tensor:
        """Clip the gradients as ``torch.nn.utils.clip_grad_norm_`` does, and export the norm before and after.

        Where torch knows only a part of the gradient (a pipeline's stages, experts), or refuses (parameters on different meshes),
        by the norm over all ranks: then every rank must call it, and waits for the others.

        Args:
            max_norm: Largest norm.
            norm_type: The p of the norm; only the 2-norm is exported.
            parameters: What to clip. Default: the model's parameters.

        Returns:
            The norm before clipping, ().
        """
        if parameters is None:
            model = self._model()
            parameters = list(model.parameters()) if model is not None else []
        chosen = [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
        if self._ranks is None:
            norm, plain = clip_grad_norm_(chosen, max_norm, norm_type, None, {})
        else:
            norm, plain = self._ranks.clip_grad_norm_(chosen, max_norm, norm_type)
        if self._attachment is not None and not self._closed:
            self._attachment.recorder.clipped(plain, max_norm, is_l2=float(norm_type) == 2.0)
        return norm

    def data(self, loader: Iterable[_Batch]) -> TimedLoader[_Batch]:
        """Iterate over a loader and measure the wait for each batch."""
        return TimedLoader(loader, self.waited)

    def waited(self, seconds: float) -> None:
        """Take a wait for data, as ``data`` measures it; for loops that fetch batches by other means."""
        if self._attachment is not None and not self._closed:
            self._attachment.recorder.waited(seconds)

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Say that the loop does something else than training: evaluation, checkpointing, compilation.

        Its time does not count as step time, and forwards in it show no activation statistics.

        Args:
            name: ``eval``, ``checkpoint``, ``compile`` or a word of your own; a label, so a few words in all.
        """
        if self._attachment is None or self._closed:
            yield
            return
        name = str(name)[:64]
        if name not in self._phases and len(self._phases) >= _PHASES:
            name = "other"
        self._phases.add(name)
        before = self._live.phase
        self._enter_phase(name)
        try:
            yield
        finally:
            self._enter_phase(before)

    def _enter_phase(self, name: str) -> None:
        """Go over to a phase; the time in phases other than training is no step time."""
        now = time.perf_counter()
        if self._attachment is not None:
            if self._live.phase != "train":
                self._attachment.recorder.paused(now - self._phase_began)
            self._attachment.gate.paused = name != "train"
        self._phase_began, self._live.phase = now, name
        self._worker.wake()

    def state_dict(self) -> dict[str, Any]:
        """Return what a checkpoint should carry, in plain numbers, strings and lists.

        Global step, tokens seen by this rank, and what the detectors compare with: the last 128 losses and gradient norms, the
        smoothed loss, the peak of each parameter group's schedule. The state of any rank will do for all.
        """
        if self._disabled:
            return RunState(0, 0).plain()
        self._hand_over(_FLUSH_SECONDS)
        return self._assembler.state().plain()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a checkpoint; counters of this process still start at 0.

        Every rank loads, one rank's state or its own. On another number of ranks the tokens of all together go on: each rank takes
        over its share of the state's tokens times the ranks that there were.

        Raises:
            ConfigError: This is not what ``state_dict`` returned, now or in an earlier version.
        """
        restored = read_state(state)
        if not self._disabled:
            self._hand_over(_FLUSH_SECONDS)
            self._assembler.restore(restored)
            self._live.resumes += 1
            self._hand_over(_FLUSH_SECONDS)

    @property
    def url(self) -> str | None:
        """Address of the page; metrics are at ``/metrics`` below it. None without an endpoint."""
        return self._endpoint.url if self._endpoint is not None else None

    @property
    def port(self) -> int | None:
        """The port that is really served."""
        return self._endpoint.port if self._endpoint is not None else None

    @property
    def registry(self) -> CollectorRegistry:
        """A prometheus_client registry with the latest values, to mount in an application of your own."""
        return self._prometheus.registry

    @property
    def snapshot(self) -> Snapshot | None:
        """The latest values; None before the first."""
        return self._prometheus.snapshot

    def _repr_html_(self) -> str:
        link = f'<p>Live at <a href="{self.url}">{self.url}</a></p>' if self.url and not self._closed else ""
        return render_fragment(self.snapshot) + link

    def __repr__(self) -> str:
        return f"<otel_train.Monitor {'closed' if self._closed else f'at {self.url}'}>"

    def flush(self, timeout_seconds: float = _FLUSH_SECONDS) -> bool:
        """Wait until every step made so far is published; the step under way ends here, so call it after ``observe``.

        Returns:
            Whether that came about in time.
        """
        if self._closed or self._attachment is None or self._pid != os.getpid():
            return True
        end = time.monotonic() + timeout_seconds
        done = self._hand_over(timeout_seconds)
        if self._ranks is None:
            return done
        met = self._ranks.flush(max(end - time.monotonic(), 0.0))
        return self._worker.flush(max(end - time.monotonic(), 0.0)) and met

    def _hand_over(self, timeout_seconds: float) -> bool:
        """Wait until every step of this rank is published, without what needs other ranks."""
        if self._attachment is not None and not self._closed:
            with self._guard.part("loop"):
                self._attachment.recorder.close_step()
        return self._worker.flush(timeout_seconds)

    def close(self, linger_seconds: float | None = None) -> None:
        """End the run: remove the hooks, publish the last values with ``run_active`` 0, stop serving. Twice is harmless.

        Args:
            linger_seconds: How long to go on serving the last values. Default: if a Prometheus has scraped, until it has scraped
                once more, at most twice the interval seen; so it stores that the run has ended. Ctrl-C ends the wait.
        """
        with self._closing:
            if self._closed:
                return
            self._closed = True
        if self._pid != os.getpid():
            return
        self._finish()
        if self._endpoint is not None:
            with contextlib.suppress(KeyboardInterrupt):
                if linger_seconds is None:
                    self._endpoint.wait_for_scrape()
                else:
                    threading.Event().wait(min(linger_seconds, threading.TIMEOUT_MAX))
        self._shut_down()

    def _finish(self) -> None:
        """Remove the hooks and publish the end."""
        if self._attachment is not None:
            with self._guard.part("loop"):
                self._attachment.recorder.close_step()
            self._attachment.remove()
        self._live.active = False
        self._sigterm.restore()
        self._worker.flush(_FLUSH_SECONDS)
        if self._ranks is not None:
            self._ranks.stop(_FLUSH_SECONDS)
            self._worker.flush(_FLUSH_SECONDS)

    def _shut_down(self) -> None:
        self._worker.stop(_FLUSH_SECONDS)
        if self._endpoint is not None:
            self._endpoint.close()
        self._outlets.close()
        _open.discard(self)

    def close_in_child(self) -> None:
        """In a forked process, let go of what belongs to the training process."""
        self._closed = True
        if self._attachment is not None:
            self._attachment.remove()
        if self._endpoint is not None:
            self._endpoint.close_in_child()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        self.close()


def _model_gone(reference: weakref.ref[Monitor]) -> None:
    monitor = reference()
    if monitor is not None:
        monitor.close(linger_seconds=0)


def _close_all() -> None:
    for monitor in list(_open):
        monitor.close()


def _after_fork_in_child() -> None:
    for monitor in list(_open):
        monitor.close_in_child()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork_in_child)
