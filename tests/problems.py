"""Small models on real data, and what tests need to look at them naively: clones in fp64, layer by layer."""

from __future__ import annotations

import re
import sysconfig
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from functools import lru_cache
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional

from otel_train.catalog import MetricSpec
from otel_train.monitor import Monitor
from otel_train.sinks.memory import MemorySink
from otel_train.snapshot import Snapshot

Key = tuple[str, str]
"""Layer and kind."""


class Mlp(nn.Module):
    """Two hidden layers, one of them above the size at which sums go in pieces."""

    def __init__(self, inputs: int = 64, hidden: int = 256, outputs: int = 10, dropout: float = 0.0) -> None:
        super().__init__()
        self.first = nn.Linear(inputs, hidden)
        self.norm = nn.LayerNorm(hidden)
        self.act = nn.ReLU()
        self.dropout = nn.Dropout(dropout)
        self.second = nn.Linear(hidden, hidden)
        self.tanh = nn.Tanh()
        self.last = nn.Linear(hidden, outputs)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map (batch, inputs) to logits."""
        hidden = self.dropout(self.act(self.norm(self.first(x))))
        logits: torch.Tensor = self.last(self.tanh(self.second(hidden)))
        return logits


class Block(nn.Module):
    """A transformer block with a fused qkv projection."""

    def __init__(self, width: int, heads: int, dropout: float = 0.0) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.up, self.act, self.down = nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map (batch, length, width) to the same shape."""
        q, k, v = (t.unflatten(-1, (self.heads, -1)).transpose(1, 2) for t in self.qkv(self.norm1(x)).chunk(3, dim=-1))
        attended = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.dropout(self.out(attended.transpose(1, 2).flatten(2)))
        mlp: torch.Tensor = self.dropout(self.down(self.act(self.up(self.norm2(x)))))
        return x + mlp


class Gpt(nn.Module):
    """A causal language model: over bytes with a vocabulary of 256, over words with thousands."""

    def __init__(
        self, vocabulary: int = 256, width: int = 96, blocks: int = 2, heads: int = 4, length: int = 64, dropout: float = 0.0
    ) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(vocabulary, width), nn.Embedding(length, width)
        self.blocks = nn.ModuleList(Block(width, heads, dropout) for _ in range(blocks))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, vocabulary, bias=False)
        for parameter in self.parameters():
            if parameter.dim() > 1:
                nn.init.normal_(parameter, std=0.02)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """Map (batch, length) int64 to logits."""
        x = self.tokens(ids) + self.positions.weight[: ids.shape[1]]
        for block in self.blocks:
            x = block(x)
        logits: torch.Tensor = self.head(self.norm(x))
        return logits


class ConvNet(nn.Module):
    """Three convolutions and a classifier."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.act1 = nn.Conv2d(1, 16, 3, padding=1), nn.ReLU()
        self.conv2, self.act2 = nn.Conv2d(16, 32, 3, stride=2, padding=1), nn.ReLU()
        self.conv3, self.norm, self.act3 = nn.Conv2d(32, 64, 3, stride=2, padding=1), nn.BatchNorm2d(64), nn.ReLU()
        self.head = nn.Linear(64, 10)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """Map (batch, 1, height, width) to logits."""
        x = self.act2(self.conv2(self.act1(self.conv1(images))))
        x = self.act3(self.norm(self.conv3(x)))
        logits: torch.Tensor = self.head(x.mean((2, 3)))
        return logits


@lru_cache(maxsize=1)
def source_text() -> str:
    """Return Python source of the standard library, some 2 MB."""
    files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    return "\n".join(path.read_text(encoding="utf-8", errors="replace") for path in files[:70])


@lru_cache(maxsize=1)
def byte_ids() -> torch.Tensor:
    """Return the text as bytes, int64."""
    return torch.frombuffer(bytearray(source_text().encode()), dtype=torch.uint8).long()


@lru_cache(maxsize=4)
def word_ids(vocabulary: int) -> torch.Tensor:
    """Return the text as words, numbered by frequency; rarer ones than the vocabulary holds share the last number."""
    words = re.findall(r"\w+|[^\w\s]|\n", source_text())
    number = {word: i for i, (word, _) in enumerate(Counter(words).most_common(vocabulary - 1))}
    return torch.tensor([number.get(word, vocabulary - 1) for word in words])


def text_batch(ids: torch.Tensor, step: int, batch: int = 8, length: int = 64) -> tuple[torch.Tensor, torch.Tensor]:
    """Return inputs and targets of a step, another part of the text for each."""
    generator = torch.Generator().manual_seed(step)
    starts = torch.randint(len(ids) - length - 1, (batch,), generator=generator)
    rows = torch.stack([ids[s : s + length + 1] for s in starts.tolist()])
    return rows[:, :-1], rows[:, 1:]


def text_loss(model: nn.Module, ids: torch.Tensor, step: int, batch: int = 8, length: int = 64) -> torch.Tensor:
    """Return the loss of a language model on a step's batch."""
    inputs, targets = text_batch(ids, step, batch, length)
    return functional.cross_entropy(model(inputs).flatten(0, 1), targets.flatten())


def vector_batch(step: int, batch: int = 32, inputs: int = 64, classes: int = 10) -> tuple[torch.Tensor, torch.Tensor]:
    """Return a batch of vectors and their classes."""
    generator = torch.Generator().manual_seed(step)
    x = torch.randn(batch, inputs, generator=generator)
    return x, x[:, :classes].argmax(1)


def vector_loss(model: nn.Module, step: int, batch: int = 32, inputs: int = 64) -> torch.Tensor:
    """Return the loss of a classifier of vectors on a step's batch."""
    x, y = vector_batch(step, batch, inputs)
    return functional.cross_entropy(model(x), y)


def image_loss(model: nn.Module, step: int, batch: int = 8) -> torch.Tensor:
    """Return the loss of a classifier of images on a step's batch: 16 x 16 bytes of source text as grey values, by first byte."""
    ids = byte_ids()
    images = torch.stack([ids[i : i + 256] for i in range(step * 4096, step * 4096 + batch * 256, 256)])
    return functional.cross_entropy(model(images.view(-1, 1, 16, 16) / 128 - 0.5), images[:, 0] % 10)


def seen(monitor: Monitor, sink: MemorySink) -> Snapshot:
    """Return the Snapshot of everything so far."""
    assert monitor.flush()
    assert sink.last is not None
    return sink.last


def layer_values(snapshot: Snapshot, spec: MetricSpec) -> dict[Key, float]:
    """Return a layer gauge's values by layer and kind, each once."""
    found: dict[Key, float] = {}
    for sample in snapshot.find(spec):
        labels = dict(zip(spec.labels, sample.labels, strict=True))
        key = labels["layer"], labels["kind"]
        assert key not in found
        assert isinstance(sample.value, (int, float))
        found[key] = sample.value
    return found


def weights(model: nn.Module) -> dict[str, torch.Tensor]:
    """Clone the trainable parameters in fp64, by name."""
    return {name: p.detach().double().clone() for name, p in model.named_parameters() if p.requires_grad}


def gradients(model: nn.Module) -> dict[str, torch.Tensor]:
    """Clone the gradients in fp64, by name."""
    return {name: p.grad.detach().double().clone() for name, p in model.named_parameters() if p.grad is not None}


def kind_of(model: nn.Module, name: str) -> str:
    """Say naively of which kind a parameter is."""
    owner, _, leaf = name.rpartition(".")
    module = model.get_submodule(owner)
    if isinstance(module, nn.Embedding):
        return "embedding"
    if model.get_parameter(name).dim() > 1:
        return "matrix"
    return "norm" if isinstance(module, (nn.LayerNorm, nn.BatchNorm2d)) and leaf == "weight" else "vector"


def by_layer(model: nn.Module, tensors: Mapping[str, torch.Tensor]) -> dict[Key, torch.Tensor]:
    """Concatenate tensors by layer and kind, flat."""
    parts: defaultdict[Key, list[torch.Tensor]] = defaultdict(list)
    for name, tensor in tensors.items():
        parts[name.rpartition(".")[0], kind_of(model, name)].append(tensor.reshape(-1))
    return {key: torch.cat(found) for key, found in parts.items()}


def everything(tensors: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """Concatenate all tensors, flat."""
    return torch.cat([tensor.reshape(-1) for tensor in tensors.values()])


def ratio(before: torch.Tensor, after: torch.Tensor) -> float | None:
    """Return the RMS of the change over the RMS before, None where all weights were 0."""
    norm = before.norm().item()
    return (after - before).norm().item() / norm if norm else None


def naive_ratios(
    model: nn.Module, before: Mapping[str, torch.Tensor], after: Mapping[str, torch.Tensor], kinds: Sequence[str]
) -> dict[Key, float]:
    """Return the update ratio of each layer that has one."""
    late = by_layer(model, after)
    found = {key: ratio(early, late[key]) for key, early in by_layer(model, before).items() if key[1] in kinds}
    return {key: value for key, value in found.items() if value is not None}
