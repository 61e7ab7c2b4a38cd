"""Parameters and modules to layers: names, kinds, depth, and the budget of series.

A layer is a module by default. What belongs to it: all trainable parameters of one kind in it, so that a module with several
matrices (``nn.MultiheadAttention``) is one series; norms combine as sums of squares.
"""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import nn

from otel_train.config import MonitorConfig
from otel_train.errors import AttachError
from otel_train.records import Layer

_WRAPPERS = re.compile(r"(^|\.)(_orig_mod|_fsdp_wrapped_module|_checkpoint_wrapped_module)(?=\.|$)")
_BLOCK = re.compile(r"^((?:[^.]+\.)*?\d+)(\.|$)")
_EMBEDDINGS = (nn.Embedding, nn.EmbeddingBag)
_ACTIVATIONS = (
    nn.ReLU, nn.ReLU6, nn.LeakyReLU, nn.PReLU, nn.RReLU, nn.ELU, nn.CELU, nn.SELU, nn.GELU, nn.SiLU, nn.Mish, nn.Hardswish,
    nn.Softplus, nn.Softsign, nn.Tanh, nn.Hardtanh, nn.Sigmoid, nn.Hardsigmoid, nn.LogSigmoid, nn.Threshold, nn.Hardshrink,
    nn.Softshrink, nn.Tanhshrink, nn.GLU,
)  # fmt: skip
_RECTIFYING = (nn.ReLU, nn.ReLU6, nn.GELU, nn.SiLU, nn.Mish, nn.Hardswish, nn.Threshold)
_UNNAMED_GROUP = "none"


@dataclass(frozen=True, slots=True)
class MonitoredParameter:
    """A trainable parameter and where its numbers go."""

    tensor: nn.Parameter
    name: str
    kind: str
    layer: Layer | None
    """None where its kind, or the budget, leaves it without series; it still counts towards global values."""
    histogram: Layer | None
    signed: bool = False
    """Whether its histogram is one of signed values too."""


@dataclass(frozen=True, slots=True)
class ActivationSite:
    """A module whose input and output are measured."""

    module: nn.Module
    name: str
    layer: str
    depth: int
    flat: tuple[float, float] | None
    """(low, high) of the output outside which the activation is flat; None where it never is."""
    rectifying: bool
    """It cuts off negative values, so that a unit can be dead."""


@dataclass(frozen=True, slots=True)
class NamedParameter:
    """Any parameter of a model, frozen ones too, as other ranks are told of it."""

    tensor: nn.Parameter
    name: str
    kind: str
    layer: tuple[str, str, str] | None
    """Layer, kind and parameter group; None without series."""


@dataclass(frozen=True, slots=True)
class LayerMap:
    """Everything of a model that is monitored."""

    parameters: tuple[MonitoredParameter, ...]
    sites: tuple[ActivationSite, ...]
    dropped_layers: int
    """Layers without series of their own because of max_layers."""
    note: str
    """What max_layers did, in words; empty where it did nothing."""
    everything: tuple[NamedParameter, ...]
    depths: int
    """Depths that the model's layers use."""


def map_layers(model: nn.Module, groups: Mapping[int, str], config: MonitorConfig) -> LayerMap:
    """Find the layers of a model.

    Args:
        model: The root module.
        groups: ``id`` of a parameter to the name of its parameter group; parameters not in it are in no optimizer.
        config: Settings: layers, max_layers, kinds, activations, histograms.

    Raises:
        AttachError: No parameter is trainable, or a setting's pattern or callable matches nothing.
    """
    strip = _name_stripper(name for name, _ in _owned_parameters(model))
    everything = _find(model, strip)
    found = [f for f in everything if f.tensor.requires_grad]
    if not found:
        raise AttachError(
            f"expected a model with trainable parameters, got {type(model).__name__} with none; "
            "attach after the model is built, and before it is frozen"
        )
    modules = _activation_modules(model, strip, wanted=config.activations)
    rule = _layer_rule(config.layers)
    names: list[object] = [rule(parameter) for parameter in found]
    for name in names:
        if name is not None and not isinstance(name, str):
            raise AttachError(f"layers: expected the callable to return a layer's name or None, got {name!r}")
    if all(name is None for name in names):
        raise AttachError(f"layers: the callable returned None for every parameter; it is given names like {found[0].name!r}")
    rule, kinds, dropped, note = _within_budget(found, rule, groups, config)
    by_block = config.layers == "block" or len(modules) > config.max_layers
    sites = [(block_of(name) if by_block else name, name, module) for name, module in modules]
    depths = _depths(model, strip, everything, rule, {name: layer for layer, name, _ in sites})
    return LayerMap(
        tuple(_monitored(f, rule, kinds, groups=groups, config=config, depths=depths) for f in found),
        tuple(
            ActivationSite(module, name, layer, depths[layer], _flat_outside(module), isinstance(module, _RECTIFYING))
            for layer, name, module in sites
        ),
        dropped,
        note,
        tuple(_named(f, rule, kinds, groups) for f in everything),
        max(depths.values(), default=-1) + 1,
    )


def _named(found: _Found, rule: _Rule, kinds: tuple[str, ...], groups: Mapping[int, str]) -> NamedParameter:
    name = rule(found) if found.kind in kinds else None
    layer = None if name is None else (name, found.kind, groups.get(id(found.tensor), _UNNAMED_GROUP))
    return NamedParameter(found.tensor, found.name, found.kind, layer)


@dataclass(frozen=True, slots=True)
class _Found:
    tensor: nn.Parameter
    name: str
    module: str
    """Path of the module that owns it; its own name where the root does."""
    kind: str


def _name_stripper(names: Iterable[str]) -> Callable[[str], str]:
    """Return what removes wrapper prefixes: ``module.`` only where every name has it, since a model may call a child so."""
    stripped = [_without_wrappers(name) for name in names]
    front = ""
    while stripped and all(name.startswith(f"{front}module.") for name in stripped):
        front += "module."

    def strip(name: str) -> str:
        name = _without_wrappers(name)
        return name.removeprefix(front) if name.startswith(front) else name.removeprefix(front.rstrip("."))

    return strip


def _without_wrappers(name: str) -> str:
    return _WRAPPERS.sub("", name).lstrip(".")


def _owned_parameters(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yield each parameter's full name and its owner, tied ones once; wrappers change what ``named_parameters`` says."""
    seen: set[int] = set()
    for path, module in model.named_modules():
        for leaf, parameter in module.named_parameters(recurse=False):
            if id(parameter) not in seen:
                seen.add(id(parameter))
                yield (f"{path}.{leaf}" if path else leaf), module


def _find(model: nn.Module, strip: Callable[[str], str]) -> list[_Found]:
    """Return all parameters in registration order, tied ones once."""
    found = []
    for full_name, owner in _owned_parameters(model):
        path, _, leaf = full_name.rpartition(".")
        parameter, name = owner.get_parameter(leaf), strip(full_name)
        found.append(_Found(parameter, name, strip(path) or name, _kind(owner, leaf, parameter)))
    return found


def _kind(owner: nn.Module, leaf: str, parameter: torch.Tensor) -> str:
    if isinstance(owner, _EMBEDDINGS):
        return "embedding"
    if parameter.dim() >= 2:
        return "matrix"
    return "norm" if "norm" in type(owner).__name__.lower() and not leaf.endswith("bias") else "vector"


def block_of(path: str) -> str:
    """Return the block of a module path: up to its first number (``model.layers.3``), else its first name."""
    match = _BLOCK.match(path)
    return match.group(1) if match else path.partition(".")[0]


_Rule = Callable[[_Found], "str | None"]


def _layer_rule(layers: object) -> _Rule:
    if layers == "block":
        return lambda found: block_of(found.module)
    if layers == "parameter":
        return lambda found: found.name
    if callable(layers):
        return lambda found: layers(found.name)
    return lambda found: found.module


def _within_budget(
    found: list[_Found], rule: _Rule, groups: Mapping[int, str], config: MonitorConfig
) -> tuple[_Rule, tuple[str, ...], int, str]:
    """Choose what has series: drop norms, then merge to blocks, then to the model's children, until max_layers holds.

    Returns:
        The rule, the kinds with series, the number of layers that lost their own series, and what was done in words.
    """
    without_norms = tuple(kind for kind in config.kinds if kind != "norm")
    choices: list[tuple[_Rule, tuple[str, ...], str]] = [
        (rule, config.kinds, ""),
        (rule, without_norms, "norm layers have no series"),
        (lambda f: block_of(f.module), without_norms, "layers are merged to blocks"),
        (lambda f: f.module.partition(".")[0], without_norms, "layers are merged to the model's children"),
    ]
    counts = [_count(found, choose, kinds, groups) for choose, kinds, _ in choices]
    # The coarsest is taken even where it is over the budget, and a choice without any series never is.
    fitting = [i for i, count in enumerate(counts) if 0 < count <= config.max_layers]
    level = fitting[0] if fitting else max((i for i, count in enumerate(counts) if count), default=0)
    chosen, kinds, what = choices[level]
    note = f"max_layers={config.max_layers}: {what} ({counts[0]} layers to {counts[level]})" if level else ""
    return chosen, kinds, counts[0] - counts[level], note


def _count(found: list[_Found], rule: _Rule, kinds: tuple[str, ...], groups: Mapping[int, str]) -> int:
    chosen = (f for f in found if f.kind in kinds)
    return len({(rule(f), f.kind, groups.get(id(f.tensor))) for f in chosen if rule(f) is not None})


def _monitored(
    found: _Found,
    rule: _Rule,
    kinds: tuple[str, ...],
    *,
    groups: Mapping[int, str],
    config: MonitorConfig,
    depths: Mapping[str, int],
) -> MonitoredParameter:
    group = groups.get(id(found.tensor), _UNNAMED_GROUP)

    def layer(name: str | None) -> Layer | None:
        if name is None or found.kind not in kinds:
            return None
        return Layer(name, depths[name], found.kind, group)

    own = layer(rule(found))
    histogram = None
    if config.histograms != "off" and found.kind in ("matrix", "embedding"):
        histogram = own if config.histograms == "layer" else layer(block_of(found.module))
    return MonitoredParameter(found.tensor, found.name, found.kind, own, histogram, config.signed_histograms)


def _depths(
    model: nn.Module, strip: Callable[[str], str], found: list[_Found], rule: _Rule, sites: Mapping[str, str]
) -> dict[str, int]:
    """Number layers in registration order, activation modules among them; a block has the depth of its first layer.

    Args:
        model: The root module.
        strip: Removes wrapper prefixes.
        found: All parameters: freezing some must not renumber the others.
        rule: The layer of a parameter.
        sites: Path of an activation module to its layer.
    """
    owned: dict[str, list[str]] = {}
    for f in found:
        owned.setdefault(f.module, []).append(rule(f) or f.module)
    depths: dict[str, int] = {}
    paths = [f.name for f in found if f.module == f.name] + [strip(name) for name, _ in model.named_modules()]
    for path in paths:
        for name in owned.get(path, []) + ([sites[path]] if path in sites else []):
            depths.setdefault(name, len(depths))
    for f in found:
        depths.setdefault(block_of(f.module), depths[rule(f) or f.module])
    return depths


def _activation_modules(
    model: nn.Module, strip: Callable[[str], str], *, wanted: bool | tuple[str, ...]
) -> list[tuple[str, nn.Module]]:
    named = [(strip(name), module) for name, module in model.named_modules() if name]
    if wanted is False:
        return []
    if wanted is True:
        return [(name, module) for name, module in named if _is_activation(module)]
    for pattern in wanted:
        if not any(fnmatch.fnmatchcase(name, pattern) for name, _ in named):
            example = named[-1][0] if named else "none"
            raise AttachError(f"activations: no module matches {pattern!r}; the model has paths like {example!r}")
    return [(name, module) for name, module in named if any(fnmatch.fnmatchcase(name, p) for p in wanted)]


def _is_activation(module: nn.Module) -> bool:
    # Hugging Face's own activation modules share only the end of their names.
    return isinstance(module, _ACTIVATIONS) or type(module).__name__.endswith("Activation")


def _flat_outside(module: nn.Module) -> tuple[float, float] | None:
    if isinstance(module, (nn.Tanh, nn.Softsign)):
        return (-0.97, 0.97)
    if isinstance(module, nn.Sigmoid):
        return (0.03, 0.97)
    if isinstance(module, nn.Hardsigmoid):
        return (0.0, 1.0)
    if isinstance(module, nn.ReLU6):
        return (float("-inf"), 6.0)
    if isinstance(module, nn.Hardtanh):
        return (float(module.min_val), float(module.max_val))
    return None
