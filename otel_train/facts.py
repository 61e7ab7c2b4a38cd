"""What does not change while a run goes on, as the assembler takes it."""

from __future__ import annotations

import logging
import socket
import time
from collections.abc import Callable, Sequence

import torch
from torch import nn

from otel_train import config as configuration
from otel_train._version import __version__
from otel_train.assembly import RunFacts
from otel_train.config import MonitorConfig, Rank
from otel_train.device import device_name
from otel_train.guard import PARTS
from otel_train.hooks.targets import unwrapped
from otel_train.parallel import Ranks
from otel_train.stats.throughput import TransformerShape, peak_flops, transformer_shape

_LOG = logging.getLogger("otel_train")


def run_facts(
    model: nn.Module, config: MonitorConfig, place: Rank, device: torch.device, ranks: Ranks | None, *, measured: Sequence[str]
) -> RunFacts:
    """Collect what is known when a monitor is attached.

    Args:
        model: The root module.
        config: The settings.
        place: This process among the others.
        device: The model's.
        ranks: The other ranks, where there are any.
        measured: Names of the parts that sampled steps measure.
    """
    name, uuid = device_name(device)
    peak, source = (config.peak_flops, "given") if config.peak_flops else (peak_flops(name), "table")
    run = ranks.run if ranks is not None else configuration.run_name(config)
    base = {"run": run, "rank": str(place.rank), **config.labels}
    layout = ranks.layout if ranks is not None else None
    return RunFacts(
        base_labels=tuple(base.items()),
        model=type(unwrapped(model)).__name__,
        world_size=place.world_size,
        torch_version=torch.__version__,
        version=__version__,
        update_mode=config.updates,
        device=name,
        device_uuid=uuid,
        local_rank=place.local_rank,
        host=socket.gethostname(),
        planned_steps=config.planned_steps,
        warmup_steps=config.warmup_steps,
        peak_flops=peak,
        peak_flops_source=source,
        started_at=time.time(),
        parts=PARTS,
        measured=tuple(measured),
        layers_on=config.layers_on,
        leads_run=layout is None or layout.leads_run,
        leads_replica=layout is None or layout.leads_replica,
        replica_ranks=1 if layout is None else layout.replica_ranks,
        forward_is_own=layout is None or layout.is_whole,
    )


def flops_per_token(
    model: nn.Module, config: MonitorConfig, device: torch.device, ranks: Ranks | None
) -> Callable[[int | None], float | None]:
    """Return what tells the FLOPs of a token by the sequence length, over all stages of the model; None where they are unknown."""
    given = config.flops_per_token
    if given is not None:
        return lambda _: given
    known = None if ranks is None else ranks.layout.flops
    shape = transformer_shape(model) if ranks is None else known and TransformerShape(*known)
    if shape is None:
        _LOG.info("MFU is not exported: no transformer found by its shapes; give flops_per_token to have it")
        return lambda _: None
    if not config.peak_flops and peak_flops(device_name(device)[0]) is None:
        _LOG.info("MFU is not exported: the peak FLOP/s of this device are unknown; give peak_flops to have it")
    return lambda length: None if length is None else shape.flops_per_token(length)
