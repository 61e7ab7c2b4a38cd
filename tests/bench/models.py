"""What is trained: GPTs of three sizes, a deep narrow one, a vision transformer; AdamW, random data, one batch for all steps."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import chain

import torch
from torch import nn
from torch.nn import functional
from torch.optim import AdamW, Optimizer

from tests.problems import Block, Gpt

BATCH, CONTEXT = 4, 256


@dataclass(frozen=True)
class Training:
    """A model, its optimizer and a batch."""

    model: nn.Module
    optimizer: Optimizer
    inputs: torch.Tensor
    targets: torch.Tensor
    tokens: int

    def twin(self) -> Training:
        """Return this training with hooks of its own: other modules, another optimizer, the same tensors in them.

        So a case leaves no trace in the others, and all cases work on the same memory: copies would differ by their place in it.
        """
        shared = {id(tensor): tensor for tensor in chain(self.model.parameters(), self.model.buffers())}
        return replace(self, model=copy.deepcopy(self.model, dict(shared)), optimizer=copy.copy(self.optimizer))

    def step(self) -> torch.Tensor:
        """Train one step and return the loss, ()."""
        self.optimizer.zero_grad()
        logits = self.model(self.inputs)
        loss = functional.cross_entropy(logits.flatten(0, -2), self.targets.flatten())
        loss.backward()  # type: ignore[no-untyped-call]  # torch's
        self.optimizer.step()
        return loss.detach()


class VisionTransformer(nn.Module):
    """Like ViT-S/16: patches by a convolution, blocks, the mean over patches; its attention is causal, as the blocks have it."""

    def __init__(
        self, width: int = 384, blocks: int = 12, heads: int = 6, patch: int = 16, image: int = 224, classes: int = 1000
    ) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, width, patch, stride=patch)
        self.positions = nn.Parameter(0.02 * torch.randn((image // patch) ** 2, width))
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(blocks))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, classes)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """Map (batch, 3, height, width) to logits."""
        x = self.patches(images).flatten(2).transpose(1, 2) + self.positions
        for block in self.blocks:
            x = block(x)
        logits: torch.Tensor = self.head(self.norm(x).mean(1))
        return logits


def make_gpt(vocabulary: int, width: int, blocks: int, heads: int, *, batch: int = BATCH, context: int = CONTEXT) -> Training:
    """Return a GPT that learns random tokens by heart."""
    torch.manual_seed(0)
    model = Gpt(vocabulary, width, blocks, heads, context)
    inputs, targets = (torch.randint(0, vocabulary, (batch, context)) for _ in range(2))
    return Training(model, make_optimizer(model), inputs, targets, inputs.numel())


def make_vit(images: int = 6) -> Training:
    """Return a vision transformer of 22 M parameters; its tokens are patches."""
    torch.manual_seed(0)
    model = VisionTransformer()
    inputs, targets = torch.randn(images, 3, 224, 224), torch.randint(0, 1000, (images,))
    return Training(model, make_optimizer(model), inputs, targets, images * len(model.positions))


def make_optimizer(model: nn.Module) -> Optimizer:
    """Return the fastest AdamW there is, next to which a monitor's share is largest."""
    return AdamW(model.parameters(), lr=3e-4, fused=True)


MODELS: dict[str, Callable[[], Training]] = {
    "gpt-tiny": lambda: make_gpt(64, 16, 2, 2, batch=2, context=16),  # to try the benchmark itself
    "gpt-5m": lambda: make_gpt(4096, 192, 8, 6),
    "gpt-20m": lambda: make_gpt(8192, 384, 8, 6),
    "gpt-100m": lambda: make_gpt(8192, 832, 10, 13),
    "gpt-200-layers": lambda: make_gpt(1024, 64, 200, 4),
    "vit-22m": make_vit,
}
