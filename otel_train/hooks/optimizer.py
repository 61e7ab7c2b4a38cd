"""Hooks around an optimizer's step, and what its parameter groups say."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, Protocol

import torch
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

Arguments = tuple[tuple[Any, ...], dict[str, Any]]


class StepListener(Protocol):
    """What is told of an optimizer's step."""

    def before_step(self, optimizer: Optimizer, *, closure: bool) -> None:
        """The step begins; with a closure the gradients are not there yet."""

    def closure_called(self, optimizer: Optimizer) -> None:
        """The closure has been called: gradients are there, weights may move from now on."""

    def after_step(self, optimizer: Optimizer) -> None:
        """The step has ended."""


def hook_steps(optimizer: Optimizer, listener: StepListener) -> list[RemovableHandle]:
    """Tell a listener of every step of an optimizer; returns what removes the hooks.

    A closure is wrapped, since its first call is the only moment at which the gradients are there and the weights have not moved
    (LBFGS, and frameworks that hand the whole micro-batch to the optimizer).

    A compiled ``optimizer.step`` calls the hooks outside of its graph, which is the same one as without them.
    """

    def before(optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Arguments | None:
        wrapped = _wrap_closure(optimizer, args, kwargs, listener)
        listener.before_step(optimizer, closure=wrapped is not None)
        return wrapped

    def after(optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        del args, kwargs
        listener.after_step(optimizer)

    outside: Callable[..., Any] = torch.compiler.disable
    return [optimizer.register_step_pre_hook(outside(before)), optimizer.register_step_post_hook(outside(after))]


def _wrap_closure(optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any], listener: StepListener) -> Arguments | None:
    """Return the step's arguments with a closure that tells the listener, None where there is no closure.

    torch passes the optimizer itself as the first argument.
    """
    if callable(kwargs.get("closure")):
        return args, {**kwargs, "closure": _telling(kwargs["closure"], optimizer, listener)}
    if len(args) > 1 and callable(args[1]):
        return (args[0], _telling(args[1], optimizer, listener), *args[2:]), kwargs
    return None


def _telling(closure: Callable[..., Any], optimizer: Optimizer, listener: StepListener) -> Callable[..., Any]:
    def told(*args: Any, **kwargs: Any) -> Any:
        result = closure(*args, **kwargs)
        listener.closure_called(optimizer)
        return result

    return told


def group_names(optimizers: Mapping[str, Optimizer]) -> dict[int, str]:
    """Return the parameter group of each parameter, by ``id``: unique over all optimizers."""
    names: dict[int, str] = {}
    for label, optimizer in optimizers.items():
        for name, group in named_groups(optimizer, label if len(optimizers) > 1 else None):
            for parameter in group["params"]:
                names.setdefault(id(parameter), name)
    return names


def named_groups(optimizer: Optimizer, front: str | None) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the groups with their names: the group's own ``name``, else its index; with the optimizer's in front where given."""
    names: set[str] = set()
    for index, group in enumerate(optimizer.param_groups):
        own = group.get("name")
        name = own if isinstance(own, str) and own else str(index)
        name = f"{name}_{index}" if name in names else name
        names.add(name)
        yield (f"{front}/{name}" if front else name), group


def group_facts(group: Mapping[str, Any]) -> Iterator[tuple[str, float | torch.Tensor]]:
    """Yield the settings of a group that are numbers, under the names of GroupSettings."""
    betas = group.get("betas")
    first, second = betas[:2] if isinstance(betas, (tuple, list)) and len(betas) >= 2 else (group.get("momentum"), None)
    found = {
        "learning_rate": group.get("lr"),
        # OneCycleLR starts from initial_lr and rises to max_lr; all others record the peak as initial_lr
        "peak_learning_rate": group.get("max_lr", group.get("initial_lr")),
        "weight_decay": group.get("weight_decay"),
        "beta1": first,
        "beta2": second,
        "epsilon": group.get("eps"),
    }
    for name, value in found.items():
        if isinstance(value, (int, float, torch.Tensor)):
            yield name, value
