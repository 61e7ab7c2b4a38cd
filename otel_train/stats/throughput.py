"""Model FLOPs of transformers, found by their shapes, and the peak FLOP/s of devices."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import nn

# Dense bf16 peak in TFLOP/s, without sparsity, from the vendors' data sheets as torchtitan, Composer and Lightning quote them.
# V100 and T4 have no bf16: fp16.
_PEAK_TFLOPS = {
    "h100 nvl": 835.0,
    "h100 pcie": 756.0,
    "h100": 989.0,
    "h200 nvl": 840.0,
    "h200": 989.0,
    "h20": 148.0,
    "gb300": 2500.0,
    "gb200": 2500.0,
    "b300": 2250.0,
    "b200": 2250.0,
    "a100": 312.0,
    "a6000": 154.85,
    "a40": 149.7,
    "a10g": 125.0,
    "a10": 125.0,
    "l40s": 362.0,
    "l40": 181.0,
    "l4": 121.0,
    "rtx 4090": 165.2,
    "v100-pcie": 112.0,
    "v100s": 130.0,
    "v100": 125.0,
    "t4": 65.0,
    "mi250x": 191.5,
    "mi300x": 1307.4,
    "mi325x": 1307.4,
    "mi350x": 2300.0,
    "mi355x": 2500.0,
}


def peak_flops(device_name: str) -> float | None:
    """Return the peak of a device by its name, the longest known name first; None for unknown devices and MIG slices."""
    name = f" {device_name.lower()} "
    if " mig " in name:
        return None
    for known in sorted(_PEAK_TFLOPS, key=len, reverse=True):
        if _has_word(name, known):
            return _PEAK_TFLOPS[known] * 1e12
    return None


def _has_word(name: str, word: str) -> bool:
    """Say whether a word stands in a name with no letter or digit at its ends: ``a100`` in ``A100-SXM4``, not ``l4`` in ``L40``."""
    at = name.find(word)
    while at >= 0:
        before, after = name[at - 1 : at], name[at + len(word) : at + len(word) + 1]
        if not before.isalnum() and not after.isalnum():
            return True
        at = name.find(word, at + 1)
    return False


@dataclass(frozen=True, slots=True)
class TransformerShape:
    """What the FLOPs of a transformer follow from."""

    matrix_parameters: int
    """Elements of matrices that every token is multiplied with; the embedding only where it is tied to the head."""
    attention_width: int
    """Heads x head size, summed over attention layers."""

    def flops_per_token(self, sequence_length: int) -> float:
        """Return FLOPs a token of forward and backward: 6 N + 12 x attention width x sequence length.

        PaLM, arXiv:2204.02311, appendix B: no causal halving, recomputation not counted.
        """
        return 6.0 * self.matrix_parameters + 12.0 * self.attention_width * sequence_length


def transformer_shape(model: nn.Module) -> TransformerShape | None:
    """Find a transformer by its shapes; None where there is no attention layer, or where not every token meets every matrix.

    An attention layer is ``nn.MultiheadAttention``, or a module with a fused projection (d to 3 d, and one d to d), or with four
    projections of which two, keys and values, have equal shapes and none is wider than the query's (d to a, a to d).
    Mixtures of experts are not counted: which experts a token meets cannot be seen in shapes.
    """
    parts = transformer_parts(model)
    return parts if parts is not None and parts.attention_width else None


def transformer_parts(model: nn.Module) -> TransformerShape | None:
    """Return what a model, or a stage of one, adds to a transformer's shape, attention or not; None for a mixture of experts."""
    if _has_experts(model):
        return None
    widths = sum(_attention_width(module) for module in model.modules())
    return TransformerShape(sum(p.numel() for p in _matmul_parameters(model)), widths)


def _has_experts(model: nn.Module) -> bool:
    """Say whether the model looks like a mixture of experts: by name, or by matrices stacked in one parameter."""
    for name, module in model.named_modules():
        own = module.parameters(recurse=False)
        stacked = any(p.dim() == 3 and min(p.shape) > 1 for p in own) and "conv" not in type(module).__name__.lower()
        if stacked or "expert" in name.lower():
            return True
    return False


def _projection(module: nn.Module) -> tuple[int, int] | None:
    """Return (in, out) of a linear layer; Hugging Face's Conv1D keeps its weight the other way round."""
    if isinstance(module, nn.Linear):
        return module.in_features, module.out_features
    weight = getattr(module, "weight", None)
    if type(module).__name__ == "Conv1D" and isinstance(weight, torch.Tensor) and weight.dim() == 2:
        return weight.shape[0], weight.shape[1]
    return None


def _attention_width(module: nn.Module) -> int:
    if isinstance(module, nn.MultiheadAttention):
        return int(module.embed_dim)
    if isinstance(module, (nn.Sequential, nn.ModuleList)):
        return 0  # a chain of layers, not projections of one input
    shapes = [shape for child in module.children() if (shape := _projection(child)) is not None]
    fused = [i for i, o in shapes if o == 3 * i and (i, i) in shapes]
    return fused[0] if fused else _separate_width(shapes)


def _separate_width(shapes: list[tuple[int, int]]) -> int:
    for width_in, width in shapes:
        if (width, width_in) not in shapes:
            continue
        rest = list(shapes)
        rest.remove((width_in, width))
        if (width, width_in) not in rest:
            continue
        rest.remove((width, width_in))
        if any(rest.count((i, o)) >= 2 and i == width_in and o <= width for i, o in rest):
            return width
    return 0


def _matmul_parameters(model: nn.Module) -> Iterable[nn.Parameter]:
    """Yield the matrices of linear layers once, an embedding only where a linear layer shares it."""
    seen: set[int] = set()
    for module in model.modules():
        names: tuple[str, ...] = ()
        if isinstance(module, nn.MultiheadAttention):
            names = ("in_proj_weight", "q_proj_weight", "k_proj_weight", "v_proj_weight")
        elif _projection(module) is not None:
            names = ("weight",)
        for parameter in (getattr(module, name, None) for name in names):
            if isinstance(parameter, nn.Parameter) and id(parameter) not in seen:
                seen.add(id(parameter))
                yield parameter
