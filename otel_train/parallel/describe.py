"""What this rank holds, as the manifest that it tells the others."""

from __future__ import annotations

import fnmatch
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from otel_train.config import MonitorConfig
from otel_train.errors import AttachError, ConfigError
from otel_train.layers import LayerMap, NamedParameter
from otel_train.parallel.manifest import Manifest, Place
from otel_train.readout import read_out
from otel_train.shards import is_sharded, local
from otel_train.stats.sums import sum_and_square_sum
from otel_train.stats.throughput import TransformerShape

_PIPELINE = ("pp", "pipe", "pipeline", "stage")
_DATA = ("dp", "data", "ddp", "fsdp", "hsdp", "replicate", "shard", "ep", "expert", "efsdp", "batch")
"""Beginnings of the names, in torchtitan and elsewhere, of mesh dimensions over which the data is spread; along the others (tensor,
context parallelism) ranks work on the same tokens."""
_SETTINGS = (
    "every_n_steps", "max_overhead", "updates", "update_memory_mb", "histograms", "signed_histograms", "layers", "kinds",
    "max_layers",
)  # fmt: skip
_DIGITS = 6
_SUMMABLE = (torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.complex64, torch.complex128)

Groups = Mapping[str, Sequence[int]]
"""Pattern of parameter names to the ranks, this one among them, that hold replicas of what matches."""


def check_groups(given: object, rank: int) -> Groups:
    """Return ``groups=`` as ranks.

    Raises:
        ConfigError: It is no mapping of patterns to process groups or ranks, or this rank is in none of a pattern's.
    """
    if given is None:
        return {}
    if not isinstance(given, Mapping):
        raise ConfigError(f"groups: expected a mapping of name patterns to process groups or ranks, got {type(given).__name__}")
    found = {}
    for pattern, group in given.items():
        if isinstance(group, torch.distributed.ProcessGroup):
            found[str(pattern)] = tuple(torch.distributed.get_process_group_ranks(group))
        elif isinstance(group, (list, tuple)) and all(type(member) is int for member in group):
            found[str(pattern)] = tuple(sorted(group))
        else:
            raise ConfigError(f"groups: expected a process group or a list of ranks for {pattern!r}, got {group!r}")
        if rank not in found[str(pattern)]:
            raise ConfigError(
                f"groups: expected the ranks of {pattern!r} that rank {rank} is one of, got {list(found[str(pattern)])}"
            )
    return found


def check_mesh(mesh: object) -> DeviceMesh | None:
    """Return ``mesh=``.

    Raises:
        ConfigError: It is no DeviceMesh with names, or this rank is not in it.
    """
    if mesh is None:
        return None
    if not isinstance(mesh, DeviceMesh):
        raise ConfigError(f"mesh: expected a DeviceMesh, got {type(mesh).__name__}")
    if not mesh.mesh_dim_names or mesh.get_coordinate() is None:
        raise ConfigError(f"mesh: expected a mesh with dimension names that this rank is in (init_device_mesh), got {mesh}")
    return mesh


def describe(
    model: nn.Module,
    layer_map: LayerMap,
    config: MonitorConfig,
    *,
    rank: int,
    mesh: DeviceMesh | None,
    groups: Groups,
    flops: TransformerShape | None,
) -> Manifest:
    """Say what this rank holds of a model; reads every parameter once, and waits for the device.

    Args:
        model: The root module.
        layer_map: Its layers.
        config: The settings.
        rank: This rank.
        mesh: The root mesh, if it was given.
        groups: What was given as ``groups``.
        flops: What the model's FLOPs follow from; None where that is not known.

    Raises:
        AttachError: A pattern of ``groups`` matches nothing, or parameters have no values yet.
    """
    places = _Places(model, layer_map, groups)
    root = mesh if mesh is not None else _root_mesh(layer_map)
    stage, same_tokens = _coordinates(root, _data_dimensions(model))
    return Manifest(
        rank=rank,
        places=places.found,
        groups=tuple(places.groups),
        sites=tuple(dict.fromkeys((site.layer, which) for site in layer_map.sites for which in ("pre", "post"))),
        depths=layer_map.depths,
        settings=tuple((name, _text(getattr(config, name))) for name in _SETTINGS),
        stage=stage,
        tensor_parallel=same_tokens,
        flops=None if flops is None else (flops.matrix_parameters, flops.attention_width),
    )


def _text(value: object) -> str:
    return getattr(value, "__qualname__", None) or str(value)


class _Places:
    """The places of a model's parameters."""

    def __init__(self, model: nn.Module, layer_map: LayerMap, groups: Groups) -> None:
        self.groups: dict[tuple[int, ...], int] = {}
        self._given = groups
        self._data_parallel = _data_parallel_ranks(model)
        named = layer_map.everything
        for pattern in groups:
            if not any(fnmatch.fnmatchcase(p.name, pattern) for p in named):
                example = named[-1].name if named else "none"
                raise AttachError(f"groups: no parameter matches {pattern!r}; the model has names like {example!r}")
        missing = [p.name for p in named if p.tensor.is_meta]
        if missing:
            raise AttachError(f"expected parameters with values, but {missing[0]!r} is on the meta device; attach after to_empty")
        marks = _marks([local(p.tensor) for p in named])
        self.found = tuple(self._place(p, *mark) for p, mark in zip(named, marks, strict=True))

    def _place(self, parameter: NamedParameter, mark: str, constant: bool) -> Place:  # noqa: FBT001  # of one pair
        tensor = parameter.tensor
        offset, part = _region(tensor)
        by, mates = self._mates(parameter)
        number = self.groups.setdefault(mates, len(self.groups)) if mates else -1
        return Place(parameter.name, parameter.layer, parameter.kind, tuple(tensor.shape), offset, part, mark, constant, number, by)

    def _mates(self, parameter: NamedParameter) -> tuple[str, tuple[int, ...]]:
        for pattern, ranks in self._given.items():
            if fnmatch.fnmatchcase(parameter.name, pattern):
                return "only", tuple(ranks)
        if is_sharded(parameter.tensor):
            return "mesh", tuple(sorted(int(rank) for rank in parameter.tensor.device_mesh.mesh.flatten().tolist()))
        ranks = self._data_parallel.get(id(parameter.tensor), ())
        return ("group" if ranks else "values"), ranks


def _region(tensor: Any) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return offset and shape of this rank's part."""
    if not is_sharded(tensor):
        return (0,) * tensor.dim(), tuple(tensor.shape)
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset  # noqa: PLC0415  # heavy, loaded by now

    _, offset = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
    return tuple(offset), tuple(local(tensor).shape)


def _marks(tensors: Sequence[torch.Tensor]) -> list[tuple[str, bool]]:
    """Return a fingerprint of each tensor, rounded so that devices of different make agree, and whether it is constant."""
    floating = [t if t.dtype in _SUMMABLE else t.double() for t in tensors]
    sums = [sum_and_square_sum([t]) for t in floating]
    numbers = read_out(sums).values()
    marks = []
    for tensor, (total, squared) in zip(tensors, numbers, strict=True):
        constant = tensor.numel() < 2 or tensor.numel() * squared <= total * total * (1 + 1e-9)
        marks.append((f"{total:.{_DIGITS}e} {squared:.{_DIGITS}e}", constant))
    return marks


def _data_parallel_ranks(model: nn.Module) -> dict[int, tuple[int, ...]]:
    """Return the ranks that DistributedDataParallel keeps equal, by the ``id`` of their parameters."""
    found: dict[int, tuple[int, ...]] = {}
    for module in model.modules():
        if not isinstance(module, nn.parallel.DistributedDataParallel):
            continue
        ranks = tuple(sorted(torch.distributed.get_process_group_ranks(module.process_group)))
        ignored: set[str] = getattr(module, "parameters_to_ignore", set())
        found.update({id(p): ranks for name, p in module.module.named_parameters() if name not in ignored})
    return found


def _data_dimensions(model: nn.Module) -> set[str]:
    """Return the names of mesh dimensions over which fully_shard spreads the data."""
    names: set[str] = set()
    for module in model.modules():
        state = getattr(module, "_get_fsdp_state", None)
        group = getattr(state(), "_fsdp_param_group", None) if state is not None else None
        mesh = getattr(getattr(group, "mesh_info", None), "mesh", None)
        if mesh is not None:
            names.update(mesh.mesh_dim_names or (f"{id(mesh)}",))
    return names


def _root_mesh(layer_map: LayerMap) -> DeviceMesh | None:
    """Return the largest mesh that the parameters lie on: a slice of a mesh knows what it was cut from."""
    meshes = [p.tensor.device_mesh for p in layer_map.everything if is_sharded(p.tensor)]
    roots = [mesh._get_root_mesh() if hasattr(mesh, "_get_root_mesh") else mesh for mesh in meshes]  # noqa: SLF001  # no public way
    return max(roots, key=lambda mesh: mesh.ndim, default=None)


def _coordinates(mesh: DeviceMesh | None, data: set[str]) -> tuple[int | None, tuple[tuple[int, int], ...]]:
    """Return the coordinate in the pipeline, and coordinates and sizes of the dimensions that work on the same tokens."""
    if mesh is None:
        return None, ()
    names = mesh.mesh_dim_names or ()
    coordinate = mesh.get_coordinate() or [0] * mesh.ndim
    if not names:  # one dimension without a name: fully_shard's, or tensor parallelism's
        return None, () if data else tuple(zip(coordinate, mesh.shape, strict=True))
    stage = next((coordinate[i] for i, name in enumerate(names) if name in _PIPELINE), None)
    data_names = {name for name in names if name in data or name.startswith(_DATA)}
    same = [i for i, name in enumerate(names) if name not in data_names and name not in _PIPELINE]
    return stage, tuple((coordinate[i], mesh.size(i)) for i in same)
