"""What a rank holds of a tensor: the local part of a DTensor, and how its gradient lies on the ranks. No communication here."""

from __future__ import annotations

from typing import Any, TypeGuard

import torch

PARTIAL_LIMIT = 16384
"""Elements of a partial gradient that ranks add up on their hosts, at most: tensor parallelism has them in norms and biases."""


def is_sharded(tensor: object) -> TypeGuard[Any]:
    """Say whether it is a DTensor; told by name, since importing it would cost every training half a second."""
    return type(tensor).__name__ == "DTensor"


def local(tensor: torch.Tensor) -> torch.Tensor:
    """Return the part of a tensor that this rank holds, detached: without communication, and a view where that is possible."""
    if not is_sharded(tensor):
        return tensor.detach()
    with torch.no_grad():  # to_local is then free of autograd
        part: torch.Tensor = tensor.to_local()
        return part.detach()


def even_shape(tensor: Any) -> tuple[int, ...]:
    """Return the shape of the largest part that any rank holds, if a tensor is cut evenly: the same on all ranks."""
    shape = list(tensor.shape)
    if is_sharded(tensor):
        for dimension, placement in enumerate(tensor.placements):
            if not placement.is_replicate() and not placement.is_partial():  # _StridedShard denies to be a shard
                shape[placement.dim] = -(-shape[placement.dim] // tensor.device_mesh.size(dimension))
    return tuple(shape)


def is_partial(tensor: object) -> bool:
    """Say whether ranks hold summands of a tensor rather than parts of it."""
    return is_sharded(tensor) and any(placement.is_partial() for placement in tensor.placements)


def is_readable(parameter: Any) -> bool:
    """Say whether this rank's part of the gradient, or its summand, is there and can be read without communication."""
    gradient: Any = parameter.grad
    if gradient is None or is_sharded(gradient) != is_sharded(parameter):
        return False
    if not is_sharded(gradient):
        return True
    pairs = zip(gradient.placements, parameter.placements, strict=True)
    return gradient.device_mesh == parameter.device_mesh and all(_fits(parameter, *pair) for pair in pairs)


def _fits(parameter: Any, gradient: Any, own: Any) -> bool:
    if gradient.is_partial():
        few = local(parameter).numel() <= PARTIAL_LIMIT
        return bool(few and own.is_replicate() and gradient.reduce_op in {"sum", "avg"})
    return bool(gradient == own or gradient.is_replicate())


def local_gradient(parameter: Any) -> torch.Tensor:
    """Return this rank's part of a readable gradient, or its summand where ranks hold those: zeros where another adds the same."""
    gradient: Any = parameter.grad
    if not is_sharded(gradient):
        return gradient.detach()  # type: ignore[no-any-return]  # a tensor, as it is readable
    if is_partial(gradient):
        return _summand(gradient)
    if gradient.placements != parameter.placements:
        # whole on each rank, as row-wise embeddings have it: cutting needs no other rank
        gradient = gradient.detach().redistribute(placements=parameter.placements)
    return local(gradient)


def _summand(gradient: Any) -> torch.Tensor:
    factor, coordinate = 1.0, gradient.device_mesh.get_coordinate() or []
    for dimension, placement in enumerate(gradient.placements):
        if placement.is_partial() and placement.reduce_op == "avg":
            factor /= gradient.device_mesh.size(dimension)
        if placement.is_replicate() and coordinate and coordinate[dimension]:
            factor = 0.0
    part = local(gradient)
    return part if factor == 1.0 else part * factor
