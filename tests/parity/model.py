"""The model of the table, its data, and the variants that some rows need."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn
from torch.nn import functional

ROWS, LENGTH = 4, 8
"""Of a micro-batch: 32 tokens, so that the monitor reads all of them."""
TOKENS = ROWS * LENGTH


class Attention(nn.Module):
    """Causal attention whose heads follow from the width of its projections, so that they can be sharded."""

    def __init__(self, width: int, head: int = 4) -> None:
        super().__init__()
        self.head = head
        # No biases: that of k has a gradient of zero but for rounding, and AdamW makes steps of that.
        self.q, self.k, self.v, self.out = (nn.Linear(width, width, bias=False) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map (batch, length, width) to the same shape."""
        q, k, v = (part(x).unflatten(-1, (-1, self.head)).transpose(1, 2) for part in (self.q, self.k, self.v))
        attended = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        out: torch.Tensor = self.out(attended.transpose(1, 2).flatten(2))
        return out


class Lora(nn.Module):
    """A frozen layer and a small trainable product beside it."""

    def __init__(self, base: nn.Linear, rank: int = 2) -> None:
        super().__init__()
        self.base = base.requires_grad_(requires_grad=False)
        self.a, self.b = nn.Linear(base.in_features, rank, bias=False), nn.Linear(rank, base.out_features, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map as the base does, and add the product."""
        out: torch.Tensor = self.base(x) + self.b(self.a(x))
        return out


class Block(nn.Module):
    """Norm, up, GELU, down; attention before it on request."""

    def __init__(self, width: int, *, attention: bool = False) -> None:
        super().__init__()
        if attention:
            self.norm, self.attention = nn.LayerNorm(width), Attention(width)
        self.ln, self.up, self.act = nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.GELU()
        self.down = nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map (batch, length, width) to the same shape."""
        if hasattr(self, "attention"):
            x = x + self.attention(self.norm(x))
        out: torch.Tensor = x + self.down(self.act(self.up(self.ln(x))))
        return out


class Net(nn.Module):
    """A language model; with experts, each data-parallel rank sends its tokens through one of them."""

    def __init__(self, net: NetSpec) -> None:
        super().__init__()
        width = net.width
        self.embedding = nn.Embedding(net.vocabulary, width)
        self.blocks = nn.ModuleList(Block(width, attention=net.attention) for _ in range(net.blocks))
        if net.experts:
            self.experts = nn.ModuleList(nn.Linear(width, width) for _ in range(net.experts))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, net.vocabulary, bias=False)
        self.tokens_of: int = 0
        """The expert that the next tokens go through."""
        if net.tied:
            self.head.weight = self.embedding.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """Map (batch, length) int64 to logits."""
        x = self.embedding(ids)
        for block in self.blocks:
            x = block(x)
        if hasattr(self, "experts"):
            x = x + self.experts[self.tokens_of](x)
        logits: torch.Tensor = self.head(self.norm(x))
        return logits


@dataclass(frozen=True)
class NetSpec:
    """Sizes and variants of the model."""

    vocabulary: int = 32
    width: int = 16
    blocks: int = 2
    attention: bool = False
    tied: bool = False
    lora: bool = False
    frozen: tuple[str, ...] = ()
    """Prefixes of parameters that are not trained."""
    experts: int = 0

    def build(self) -> Net:
        """Build the model, the same on every rank."""
        torch.manual_seed(0)
        model = Net(self)
        if self.lora:
            for block in model.blocks:
                block.up = Lora(block.up)  # type: ignore[arg-type]  # a Linear
            model.embedding.requires_grad_(requires_grad=False)
        for name, parameter in model.named_parameters():
            if name.startswith(self.frozen):
                parameter.requires_grad = False
        return model


def batch(net: NetSpec, step: int, piece: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return inputs and targets of one piece of a step's batch; its own generator leaves the global one alone."""
    generator = torch.Generator().manual_seed(1000 * step + piece)
    ids = torch.randint(net.vocabulary, (ROWS, LENGTH + 1), generator=generator)
    return ids[:, :-1], ids[:, 1:]


def loss_of(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Return the mean cross entropy."""
    return functional.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())
