"""What ``attach`` is given: models and optimizers, checked, unwrapped and named."""

from __future__ import annotations

from collections.abc import Mapping

from torch import nn
from torch.optim import Optimizer

from otel_train.errors import AttachError

_WRAPPERS = 8
"""Wrappers around an optimizer at most; what looks deeper wraps itself."""


def check_model(model: object) -> None:
    """Refuse what cannot be monitored as it is.

    Raises:
        AttachError: With what to do instead.
    """
    if type(model).__name__ in ("DeepSpeedEngine", "PipelineEngine"):
        raise AttachError(
            "expected an unwrapped model, got a DeepSpeed engine, which keeps gradients to itself; use DDP or FSDP2 (fully_shard)"
        )
    if not isinstance(model, nn.Module):
        raise AttachError(f"expected a torch.nn.Module as model, got {type(model).__name__}")
    if isinstance(model, nn.DataParallel):
        raise AttachError(
            "expected a model that lives on one device, got nn.DataParallel, whose replicas hooks cannot see; "
            "use DistributedDataParallel, or attach to model.module without it"
        )
    if any(type(module).__name__ == "FullyShardedDataParallel" for module in model.modules()):
        raise AttachError(
            "expected DistributedDataParallel or FSDP2, got FullyShardedDataParallel (FSDP1), whose flat parameters hide layers; "
            "use torch.distributed.fsdp.fully_shard"
        )


def named_optimizers(model: nn.Module, given: object) -> dict[str, Optimizer]:
    """Return optimizers by name: given names, else those of their classes.

    Raises:
        AttachError: One is no optimizer, or holds no parameter of the model.
    """
    if given is None:
        return {}
    if isinstance(given, Mapping):
        named = {str(name): _unwrapped_optimizer(value) for name, value in given.items()}
    elif isinstance(given, (list, tuple)):
        named = _numbered([_unwrapped_optimizer(value) for value in given])
    else:
        named = _numbered([_unwrapped_optimizer(given)])
    if not named:
        raise AttachError("expected an optimizer, several, or None, got an empty collection")
    own = {id(parameter) for parameter in model.parameters()}
    if not own:
        raise AttachError(f"expected a model with trainable parameters, got {type(model).__name__} with no parameters at all")
    for name, optimizer in named.items():
        if not any(id(p) in own for group in optimizer.param_groups for p in group["params"]):
            raise AttachError(
                f"expected an optimizer that holds parameters of this model, but {name} holds none of them; "
                "make the optimizer from the same model, after it is wrapped or moved"
            )
    return named


def _unwrapped_optimizer(given: object) -> Optimizer:
    """Return the innermost optimizer; accelerate's wrapper is an Optimizer itself, but without hooks."""
    found: object = given
    for _ in range(_WRAPPERS):
        inner = getattr(found, "optimizer", None)
        if inner is None or (isinstance(found, Optimizer) and not isinstance(inner, Optimizer)):
            break
        found = inner
    if isinstance(found, Optimizer):
        return found
    raise AttachError(
        f"expected a torch.optim.Optimizer, got {type(given).__name__}; "
        "an optimizer of your own can be monitored if it is a subclass of torch.optim.Optimizer"
    )


def _numbered(optimizers: list[Optimizer]) -> dict[str, Optimizer]:
    """Name optimizers after their classes, with a number from the second of a class on."""
    named: dict[str, Optimizer] = {}
    for optimizer in optimizers:
        name, number = type(optimizer).__name__, 2
        while name in named:
            name, number = f"{type(optimizer).__name__}{number}", number + 1
        named[name] = optimizer
    return named


def unwrapped(model: nn.Module) -> nn.Module:
    """Return the module inside of a compiled one, which is what a second attachment would hook too."""
    inner = getattr(model, "_orig_mod", model)
    return inner if isinstance(inner, nn.Module) else model
