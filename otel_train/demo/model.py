"""A byte-level GPT: pre-norm blocks, fused attention projection, GELU."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn import functional


class Attention(nn.Module):
    """Causal self-attention."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(width, 3 * width)
        self.proj = nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Attend: (batch, context, width) to the same."""
        batch, context, width = x.shape
        q, k, v = self.qkv(x).view(batch, context, 3, self.heads, width // self.heads).permute(2, 0, 3, 1, 4)
        attended = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        projected: torch.Tensor = self.proj(attended.transpose(1, 2).reshape(batch, context, width))
        return projected


class Block(nn.Module):
    """Attention and a feed-forward network, each after a norm and beside a residual."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(width)
        self.attn = Attention(width, heads)
        self.norm2 = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.act = nn.GELU()
        self.down = nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Transform: (batch, context, width) to the same."""
        x = x + self.attn(self.norm1(x))
        result: torch.Tensor = x + self.down(self.act(self.up(self.norm2(x))))
        return result


class GPT(nn.Module):
    """A GPT over bytes; about 1.06 M parameters by default."""

    def __init__(self, width: int = 128, layers: int = 5, heads: int = 4, context: int = 128) -> None:
        super().__init__()
        self.context = context
        self.tokens = nn.Embedding(256, width)
        self.positions = nn.Embedding(context, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, 256, bias=False)
        self.apply(_initialise)

    def forward(self, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """Return the mean cross-entropy, (): `inputs` and `targets` are (batch, context) int64."""
        x = self.tokens(inputs) + self.positions(torch.arange(inputs.shape[1], device=inputs.device))
        for block in self.blocks:
            x = block(x)
        return functional.cross_entropy(self.head(self.norm(x)).flatten(0, 1), targets.flatten())

    def parameter_groups(self, weight_decay: float, *, without_block: int | None = None) -> list[dict[str, Any]]:
        """Return the parameters in two groups: matrices decay, vectors and norms do not; a block can be forgotten."""
        forgotten = set() if without_block is None else set(self.blocks[without_block].parameters())
        given = [p for p in self.parameters() if p not in forgotten]
        return [
            {"name": "decay", "params": [p for p in given if p.dim() >= 2], "weight_decay": weight_decay},
            {"name": "no_decay", "params": [p for p in given if p.dim() < 2], "weight_decay": 0.0},
        ]


def _initialise(module: nn.Module) -> None:
    if isinstance(module, (nn.Linear, nn.Embedding)):
        nn.init.normal_(module.weight, std=0.04)
    if isinstance(module, nn.Linear) and module.bias is not None:
        nn.init.zeros_(module.bias)
