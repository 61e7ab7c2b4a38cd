"""Several ranks: who holds what of the model, and how their values become one.

``manifest`` and ``describe`` say what a rank holds, ``layout`` plans for all, ``combine`` and ``exchange`` reduce sampled steps.
Ranks find each other through the process group's store (``board``). Only ``clip`` communicates in the training's thread.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist
from torch import nn

from otel_train import config as configuration
from otel_train.budget import Pace
from otel_train.config import MonitorConfig, Rank
from otel_train.errors import AttachError
from otel_train.guard import Guard
from otel_train.layers import LayerMap
from otel_train.parallel import layout as layouts
from otel_train.parallel import manifest as manifests
from otel_train.parallel.board import Board, open_board, ranks_in_words
from otel_train.parallel.clip import clip_grad_norm_
from otel_train.parallel.describe import check_groups, check_mesh, describe
from otel_train.parallel.exchange import Exchange
from otel_train.parallel.layout import Layout, LayoutError, SettingsError, site_key
from otel_train.parallel.manifest import Manifest
from otel_train.records import Coverage, RankSample, StepRecord
from otel_train.stats.throughput import transformer_parts

_LOG = logging.getLogger("otel_train")
_VERDICT = "verdict"
_MET, _REFUSED = "met", "refused "


def process_rank(environment: Rank) -> Rank:
    """Return this process's rank: the process group's where there is one, else what the environment says."""
    if not is_distributed():
        return environment
    return Rank(dist.get_rank(), environment.local_rank, dist.get_world_size())


def is_distributed() -> bool:
    """Say whether there is a process group of several ranks."""
    return dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1


def find_board() -> Board | None:
    """Return what this monitor shares with those of other ranks; None where there are none, or monitoring is switched off."""
    if not is_distributed() or configuration.is_disabled():
        return None
    return open_board(process_rank(configuration.rank_from_environment()))


@dataclass(frozen=True, slots=True)
class Membership:
    """What came of meeting the other ranks at attach."""

    layout: Layout
    board: Board | None
    """None: the ranks did not meet, and every one exports what it holds in whole."""

    def own(self, coverage: Coverage) -> Coverage:
        """Return what of the coverage this rank exports."""
        rows, depth = self.layout.rows, self.layout.depth
        unknown = [p.name for p in coverage.parameters if p.name not in rows]
        if unknown:
            _LOG.warning("%s was added after attach, so the other ranks do not know of it; attach again", unknown[0])
        exported = [p for p in coverage.parameters if p.name in rows and rows[p.name].exports]
        layers = dict.fromkeys(p.layer for p in exported if p.layer is not None)
        sites = [(name, at) for name, at in coverage.sites if self.layout.sites.get(site_key(name, "post"), (0, False))[1]]
        return replace(
            coverage,
            parameters=tuple(exported),
            trainable_parameters=sum(p.elements if self.board is None else rows[p.name].elements for p in exported),
            layers=tuple(layer.deeper(depth) for layer in layers),
            sites=tuple((name, at + depth) for name, at in sites),
        )


def share_error(board: Board, error: Exception) -> str:
    """Tell the other ranks why this one cannot attach; return the sentence that all ranks give."""
    return board.decide(_VERDICT, f"{_REFUSED}{ranks_in_words([board.rank])}: {error}").removeprefix(_REFUSED)


def share_run(board: Board, name: str) -> str:
    """Return the run's name: that of the rank that came first."""
    return board.decide("run", name)


def join(board: Board, manifest: Manifest, seconds: float) -> Membership:
    """Meet the other ranks and learn who holds what.

    Args:
        board: Shared with them.
        manifest: What this rank holds.
        seconds: How long to wait for the others, at most twice.

    Returns:
        The layout of all ranks; where they could not meet, after one line of warning, this rank's alone.

    Raises:
        AttachError: Some rank cannot attach, or has other settings.
    """
    board.post(f"manifest/{board.rank}", manifest.dumps())
    verdict = _verdict(board, seconds)
    if verdict.startswith(_REFUSED):
        raise AttachError(verdict.removeprefix(_REFUSED))
    if verdict == _MET:
        table = board.read("table")
        return Membership(layouts.loads(board.read(f"layout/{board.rank}"), table), board)
    _LOG.warning("%s", verdict)
    return Membership(layouts.alone(manifest), None)


def _verdict(board: Board, seconds: float) -> str:
    """Return what all ranks take as the outcome: that they met, or a sentence."""
    keys = [f"manifest/{rank}" for rank in range(board.world)]
    if board.rank == 0:
        board.wait(lambda: board.has(_VERDICT) or board.has(*keys), seconds)
        if not board.has(_VERDICT) and board.has(*keys):
            return board.decide(_VERDICT, _plan(board, keys))
    elif not board.wait(lambda: board.has(_VERDICT), seconds) and board.has(*keys):
        board.wait(lambda: board.has(_VERDICT), seconds)  # rank 0 is at it
    if board.has(_VERDICT):
        return board.read(_VERDICT)
    missing = [rank for rank, key in enumerate(keys) if not board.has(key)]
    return board.decide(
        _VERDICT,
        f"{ranks_in_words(missing or [0])} did not attach within {seconds:g} s, so each rank exports only what it holds in whole; "
        "call otel_train.attach on every rank",
    )


def _plan(board: Board, keys: Sequence[str]) -> str:
    """Plan for all ranks, and leave each its layout."""
    try:
        planned = layouts.layouts([manifests.loads(board.read(key)) for key in keys])
    except SettingsError as error:
        return f"{_REFUSED}{error}"
    except LayoutError as error:
        return f"{error}; until then each rank exports only what it holds in whole"
    board.post("table", planned[0].table.dumps())
    for rank, layout in enumerate(planned):
        board.post(f"layout/{rank}", layout.dumps())
    board.forget(keys)
    return _MET


@dataclass(frozen=True, slots=True)
class Others:
    """What ``attach`` knows of other ranks."""

    board: Board | None = None
    """What they share; None where there is only this one."""
    mesh: object = None
    groups: object = None

    def meet(
        self,
        model: nn.Module,
        layer_map: LayerMap | None,
        config: MonitorConfig,
        *,
        horizon: Callable[[], int],
        guard: Guard,
        deliver: Callable[[RankSample], None],
    ) -> Ranks | None:
        """Meet them, where there are any; arguments and errors as of Ranks."""
        if self.board is None or layer_map is None:
            return None
        return Ranks(
            self.board, model, layer_map, config, mesh=self.mesh, groups=self.groups, horizon=horizon, guard=guard, deliver=deliver
        )


class Ranks:
    """This rank among the others, for one monitor.

    Args:
        board: Shared with the others.
        model: The root module.
        layer_map: Its layers.
        config: The settings.
        mesh: What was given to ``attach`` as ``mesh``.
        groups: What was given as ``groups``.
        horizon: Returns a step that this rank will not have come to when ranks have met.
        guard: Counts failures.
        deliver: Takes reduced samples.

    Raises:
        AttachError: Some rank cannot attach, or has other settings.
        ConfigError: ``mesh`` or ``groups`` is not what is expected.
    """

    def __init__(
        self,
        board: Board,
        model: nn.Module,
        layer_map: LayerMap,
        config: MonitorConfig,
        *,
        mesh: object,
        groups: object,
        horizon: Callable[[], int],
        guard: Guard,
        deliver: Callable[[RankSample], None],
    ) -> None:
        manifest = describe(
            model,
            layer_map,
            config,
            rank=board.rank,
            mesh=check_mesh(mesh),
            groups=check_groups(groups, board.rank),
            flops=transformer_parts(model),
        )
        self.run = share_run(board, configuration.run_name(config))
        self._membership = join(board, manifest, config.rank_timeout)
        self.layout = self._membership.layout
        self.own = self._membership.own
        self._names = {id(p.tensor): p.name for p in layer_map.everything}
        self._exchange = Exchange(
            self._membership.board,
            self.layout,
            labels={p.name: (p.layer, p.histogram) for p in layer_map.parameters},
            depths={site.layer: site.depth for site in layer_map.sites},
            seconds=config.rank_timeout,
            everything=config.layers_on == "all",
            signed=config.signed_histograms,
            horizon=horizon,
            guard=guard,
            deliver=deliver,
        )
        self.start, self.flush, self.stop = self._exchange.start, self._exchange.flush, self._exchange.stop

    @property
    def meets(self) -> bool:
        """Whether the ranks have met at attach; else each is alone."""
        return self._membership.board is not None

    def put(self, record: StepRecord, step: int, pace: Pace) -> None:
        """Take a sampled step, and how often to sample; delivered is what comes of it once the ranks have met."""
        self._exchange.put(record, step, pace)

    def clip_grad_norm_(
        self, parameters: Sequence[torch.Tensor], max_norm: float, norm_type: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Clip by the norm over all ranks; see ``parallel.clip``."""
        return clip_grad_norm_(parameters, max_norm, norm_type, self.layout if self._membership.board else None, self._names)
