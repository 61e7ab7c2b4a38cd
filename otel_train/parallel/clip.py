"""The norm of a gradient that is spread over ranks, and clipping by it: the only communication in the training's thread."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from otel_train.parallel.layout import Layout, Row
from otel_train.sampling import wide_dtype, work_dtype
from otel_train.shards import is_sharded, local


def clip_grad_norm_(
    parameters: Sequence[torch.Tensor], max_norm: float, norm_type: float, layout: Layout | None, names: Mapping[int, str]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Clip as torch does; where torch knows only a part of the gradient, or refuses, by the norm over all ranks.

    That is where a pipeline's stages or experts hold other parameters on other ranks, and where parameters lie on different meshes:
    then all ranks must call it, and it waits for them, as torch's own does for sharded gradients.

    Args:
        parameters: What to clip.
        max_norm: Largest norm.
        norm_type: The p of the norm.
        layout: Who holds what; None where there are no other ranks.
        names: Names of parameters by ``id``.

    Returns:
        The norm before clipping as torch gives it, which may be a DTensor, and as a plain tensor.
    """
    given = [p for p in parameters if p.grad is not None]
    if layout is not None and (layout.spans_stages or layout.table.owned_apart or _on_different_meshes(given)):
        norm = _norm(given, float(norm_type), {i: layout.rows[name] for i, name in names.items() if name in layout.rows})
        _scale(given, norm, max_norm)
        return norm, norm
    norm = nn.utils.clip_grad_norm_(given, max_norm, norm_type)
    # torch's is a sum over ranks that is still to be made, unless it is asked for
    return norm, norm.full_tensor() if is_sharded(norm) else norm


def _on_different_meshes(parameters: Sequence[torch.Tensor]) -> bool:
    meshes: set[Any] = {p.grad.device_mesh if is_sharded(p.grad) else None for p in parameters}
    return len(meshes) > 1


def _norm(parameters: Sequence[torch.Tensor], order: float, rows: Mapping[int, Row]) -> torch.Tensor:
    device = parameters[0].device if parameters else torch.device(dist.distributed_c10d._get_pg_default_device())  # noqa: SLF001  # no public way
    parts = [_power(_summed(p), order) for p in parameters if id(p) not in rows or rows[id(p)].contributes]
    largest = math.isinf(order)
    total = torch.stack([torch.zeros((), dtype=wide_dtype(device), device=device), *(part.to(device) for part in parts)])
    total = total.amax() if largest else total.sum()
    dist.all_reduce(total, dist.ReduceOp.MAX if largest else dist.ReduceOp.SUM)
    norm = total if largest else total.pow(1.0 / order)
    return norm.to(torch.float32)


def _summed(parameter: torch.Tensor) -> torch.Tensor:
    """Return this rank's part of a gradient; summands are added up over their ranks first."""
    gradient: Any = parameter.grad
    if not is_sharded(gradient) or not is_sharded(parameter):
        return local(gradient)
    if gradient.placements != parameter.placements:
        gradient = gradient.redistribute(placements=parameter.placements)
    return local(gradient)


def _power(part: torch.Tensor, order: float) -> torch.Tensor:
    """Return the sum of the p-th powers of absolute values, or the largest of them, () in the wide type."""
    wide = wide_dtype(part.device)
    if not part.numel():
        return torch.zeros((), dtype=wide, device=part.device)
    norm: torch.Tensor = torch.linalg.vector_norm(part, order, dtype=None if part.is_complex() else work_dtype(part))
    return norm.to(wide) if math.isinf(order) else norm.to(wide).pow(order)


def _scale(parameters: Sequence[torch.Tensor], norm: torch.Tensor, max_norm: float) -> None:
    """Scale gradients down to the largest norm, as torch does: the coefficient is at most 1."""
    coefficient = (max_norm / (norm + 1e-6)).clamp(max=1.0)
    for parameter in parameters:
        if parameter.grad is not None:
            part = local(parameter.grad)
            part.mul_(coefficient.to(part.device, part.dtype))
