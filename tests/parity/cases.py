"""What a row of the table is."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from math import prod
from typing import Any, Literal

from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from tests.parity.model import Net, NetSpec

GIVEN_FLOPS = 1000.0
"""A token, where the model's shapes do not tell: without attention."""
DATA_DIMS = ("dp", "replicate", "shard")
"""Mesh dimensions whose ranks see different data; the others (tp, pp) divide the model only."""

Dims = tuple[tuple[str, int], ...]
Shard = Callable[[nn.Module, DeviceMesh], nn.Module]


def unsharded(model: nn.Module, mesh: DeviceMesh) -> nn.Module:
    """Leave the model as it is."""
    del mesh
    return model


@dataclass(frozen=True)
class Case:
    """One configuration: how the model is divided, and how it is trained."""

    name: str
    dims: Dims = ()
    """The mesh: names and sizes, outermost first; empty for a single process."""
    shard: Shard = unsharded
    net: NetSpec = field(default_factory=NetSpec)
    micro: int = 1
    """Micro-batches a step and data-parallel rank."""
    steps: int = 4
    optimizer: Literal["adamw", "fused", "sgd", "several"] = "adamw"
    loop: Literal["plain", "no_sync", "late_sync", "manual", "pipeline", "manual pipeline"] = "plain"
    """How gradients come together: by themselves, on the last micro-batch only (DDP, FSDP2), by hand; by a pipeline's schedule."""
    schedule: Literal["GPipe", "1F1B"] = "GPipe"
    precision: Literal["fp32", "autocast", "bf16 shards", "bf16"] = "fp32"
    """``bf16 shards``: FSDP2 computes in bf16, the optimizer sees fp32. ``bf16``: so are the weights themselves."""
    infinite_step: int | None = None
    """Train with a GradScaler; in this step a loss is infinite."""
    unscale: bool = False
    """The loop calls ``scaler.unscale_`` itself."""
    clip: float | None = None
    gives_mesh: bool = False
    own_experts: bool = False
    """Each rank has an expert of its own, and says so by ``groups=``."""
    settings: Mapping[str, Any] = field(default_factory=dict)
    tolerance: float = 1e-5
    """Relative, of norms and ratios; of means and deviations, relative to the root mean square."""
    update_tolerance: float = 1e-5
    same: float = 0.0
    """How far the losses may be from those without the monitor, relative: nothing, unless clipping sums in another order."""

    @property
    def ranks(self) -> int:
        """How many processes."""
        return prod(size for _, size in self.dims)

    @property
    def replicas(self) -> int:
        """How many ranks see different data."""
        return prod(size for name, size in self.dims if name in DATA_DIMS)

    @property
    def pieces(self) -> int:
        """Micro-batches a step, over all ranks."""
        return self.replicas * self.micro

    @property
    def stages(self) -> int:
        """How many pipeline stages."""
        return dict(self.dims).get("pp", 1)

    def build(self) -> Net:
        """Build the whole model."""
        model = self.net.build()
        return model.bfloat16() if self.precision == "bf16" else model

    def coordinates(self, rank: int) -> dict[str, int]:
        """Return the place of a rank in the mesh."""
        found = {}
        for name, size in reversed(self.dims):
            found[name] = rank % size
            rank //= size
        return found

    def data_index(self, rank: int) -> int:
        """Return which part of the data a rank sees."""
        index, place = 0, self.coordinates(rank)
        for name, size in self.dims:
            if name in DATA_DIMS:
                index = index * size + place[name]
        return index

    def is_model_origin(self, rank: int) -> bool:
        """Say whether a rank stands for its replica: coordinate 0 wherever the model is divided."""
        return all(place == 0 for name, place in self.coordinates(rank).items() if name not in DATA_DIMS)

    def stage_of(self, rank: int) -> int:
        """Return the pipeline stage of a rank."""
        return self.coordinates(rank).get("pp", 0)

    def owner(self, stage: int) -> int:
        """Return the lowest rank of a stage."""
        return min((r for r in range(self.ranks) if self.stage_of(r) == stage), default=0)


def stage_children(net: NetSpec, stages: int) -> list[list[str]]:
    """Divide the model's children over pipeline stages, in order: the first has the embedding, the last norm and head."""
    share = net.blocks // stages
    found = [[f"blocks.{i}" for i in range(s * share, (s + 1) * share)] for s in range(stages)]
    return [["embedding", *found[0]], *found[1:-1], [*found[-1], "norm", "head"]]
