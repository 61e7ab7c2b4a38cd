"""Transformers found by their shapes, and the peaks of devices."""

from __future__ import annotations

from collections import OrderedDict

import pytest
import torch
from torch import nn

from otel_train.stats.throughput import TransformerShape, peak_flops, transformer_shape

D, VOCAB = 32, 100


class FusedAttention(nn.Module):
    """As in nanoGPT."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.c_attn = nn.Linear(width, 3 * width)
        self.c_proj = nn.Linear(width, width)


class SeparateAttention(nn.Module):
    """As in Llama: heads x head size may differ from the width, and keys and values may be narrower."""

    def __init__(self, width: int, queries: int, keys: int) -> None:
        super().__init__()
        self.q_proj = nn.Linear(width, queries, bias=False)
        self.k_proj = nn.Linear(width, keys, bias=False)
        self.v_proj = nn.Linear(width, keys, bias=False)
        self.o_proj = nn.Linear(queries, width, bias=False)


class Conv1D(nn.Module):
    """Hugging Face's, of GPT-2: weight (in, out)."""

    def __init__(self, outputs: int, inputs: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(inputs, outputs))
        self.bias = nn.Parameter(torch.zeros(outputs))


class HuggingFaceAttention(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.c_attn = Conv1D(3 * width, width)
        self.c_proj = Conv1D(width, width)


class Mlp(nn.Module):
    def __init__(self, width: int, expansion: int) -> None:
        super().__init__()
        self.up = nn.Linear(width, expansion * width)
        self.down = nn.Linear(expansion * width, width)


class GatedMlp(nn.Module):
    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.gate = nn.Linear(width, hidden)
        self.up = nn.Linear(width, hidden)
        self.down = nn.Linear(hidden, width)


class Block(nn.Module):
    def __init__(self, attention: nn.Module, mlp: nn.Module) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(D)
        self.attention = attention
        self.mlp = mlp


class Gpt(nn.Module):
    """Embeddings, blocks and a head, which may be tied to the embedding."""

    def __init__(self, blocks: list[nn.Module], *, tied: bool = False) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCAB, D)
        self.positions = nn.Embedding(16, D)
        self.blocks = nn.ModuleList(blocks)
        self.norm = nn.LayerNorm(D)
        self.head = nn.Linear(D, VOCAB, bias=False)
        if tied:
            self.head.weight = self.tokens.weight


HEAD = D * VOCAB


@pytest.mark.parametrize("tied", [False, True])
def test_a_gpt_with_fused_projections_is_found(*, tied: bool) -> None:
    """Matrices: 4 d^2 of attention and 8 d^2 of the MLP a block, and the head once, tied or not."""
    model = Gpt([Block(FusedAttention(D), Mlp(D, 4)) for _ in range(3)], tied=tied)
    assert transformer_shape(model) == TransformerShape(3 * 12 * D * D + HEAD, 3 * D)


def test_a_gpt_2_of_hugging_face_is_found() -> None:
    """Conv1D keeps its weight the other way round."""
    model = Gpt([Block(HuggingFaceAttention(D), Mlp(D, 4)) for _ in range(2)], tied=True)
    assert transformer_shape(model) == TransformerShape(2 * 12 * D * D + HEAD, 2 * D)


@pytest.mark.parametrize(
    ("queries", "keys"), [(D, D), (D, D // 4), (2 * D, D), (2 * D, 2 * D), (D // 2, D // 8), (2 * D, D // 2)], ids=str
)
def test_a_gpt_with_separate_projections_is_found(queries: int, keys: int) -> None:
    """All heads, grouped queries, and heads x head size other than the width."""
    model = Gpt([Block(SeparateAttention(D, queries, keys), GatedMlp(D, 3 * D)) for _ in range(2)])
    matrices = 2 * (2 * D * queries + 2 * D * keys + 9 * D * D) + HEAD
    assert transformer_shape(model) == TransformerShape(matrices, 2 * queries)


def test_torchs_encoder_is_found() -> None:
    """nn.MultiheadAttention: its projection is a plain parameter, its output a linear layer."""
    encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(D, 4, 2 * D, batch_first=True), 3)
    assert transformer_shape(encoder) == TransformerShape(3 * (4 * D * D + 4 * D * D), 3 * D)


def test_torchs_attention_with_other_keys_and_values_is_found() -> None:
    """Both make three parameters of the projection."""
    attention = nn.MultiheadAttention(D, 4, kdim=24, vdim=40)
    assert transformer_shape(attention) == TransformerShape(D * D + 24 * D + 40 * D + D * D, D)


def test_torchs_decoder_counts_both_attentions() -> None:
    """Self-attention and cross-attention a layer."""
    decoder = nn.TransformerDecoder(nn.TransformerDecoderLayer(D, 4, 2 * D), 2)
    assert transformer_shape(decoder) == TransformerShape(2 * (8 * D * D + 4 * D * D), 4 * D)


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(D, D)
        self.head = nn.Linear(D, VOCAB)


def _convnet() -> nn.Module:
    return nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 24, 3), nn.Flatten(), nn.Linear(24, 10))


def _deep_mlp() -> nn.Module:
    layers: list[nn.Module] = []
    for _ in range(5):
        layers += [nn.Linear(D, D), nn.Tanh()]
    return nn.Sequential(*layers)


@pytest.mark.parametrize(
    "model",
    [
        nn.Sequential(Mlp(D, 3), Mlp(D, 3)),
        nn.Sequential(nn.Linear(D, 3 * D), nn.ReLU(), nn.Linear(3 * D, D)),
        Mlp(D, 4),
        Mlp(D, 1),
        GatedMlp(D, 3 * D),
        GatedMlp(D, D),
        GatedMlp(D, D // 2),
        nn.Sequential(GatedMlp(D, 2 * D), GatedMlp(D, 2 * D)),
        _convnet(),
        Recurrent(),
        nn.Linear(D, 3 * D),
        nn.Identity(),
        Gpt([Block(nn.Identity(), GatedMlp(D, 2 * D))]),
    ],
    ids=lambda model: type(model).__name__,
)
def test_a_model_without_attention_is_no_transformer(model: nn.Module) -> None:
    """MLPs of any expansion, gated ones, convolutions and recurrent networks."""
    assert transformer_shape(model) is None


@pytest.mark.parametrize(
    "model",
    [_deep_mlp(), nn.Sequential(nn.Linear(D, D), nn.ReLU(), nn.Linear(D, 3 * D), nn.ReLU(), nn.Linear(3 * D, D))],
    ids=["equal widths", "one layer, then expansion 3"],
)
def test_a_deep_perceptron_is_no_transformer(model: nn.Module) -> None:
    """Linear layers one after the other with equal widths look like projections by their shapes alone."""
    assert transformer_shape(model) is None


@pytest.mark.parametrize("mlp", [Mlp(D, 3), Mlp(D, 1), GatedMlp(D, D), GatedMlp(D, 3 * D)], ids=lambda model: type(model).__name__)
def test_no_mlp_adds_to_the_attention_width(mlp: nn.Module) -> None:
    """One attention layer a block, whatever the MLP beside it."""
    shape = transformer_shape(Gpt([Block(FusedAttention(D), mlp)]))
    assert shape is not None
    assert shape.attention_width == D


class Experts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(D, 4)
        self.experts = nn.ModuleList([Mlp(D, 4) for _ in range(4)])


class StackedExperts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(D, 4)
        self.up = nn.Parameter(torch.zeros(4, D, 4 * D))
        self.down = nn.Parameter(torch.zeros(4, 4 * D, D))


@pytest.mark.parametrize("experts", [Experts(), StackedExperts()], ids=["listed", "stacked"])
def test_a_mixture_of_experts_is_not_counted(experts: nn.Module) -> None:
    """Which experts a token meets cannot be seen in shapes."""
    assert transformer_shape(Gpt([Block(FusedAttention(D), experts)])) is None


def test_a_convolution_in_front_of_a_transformer_is_no_expert() -> None:
    """A 1d convolution's weight has three dimensions too."""
    model = nn.Sequential(OrderedDict(stem=nn.Conv1d(8, D, 3), block=Block(FusedAttention(D), Mlp(D, 4))))
    assert transformer_shape(model) == TransformerShape(12 * D * D, D)


def test_flops_of_a_token_are_those_of_the_palm_paper() -> None:
    """6 N + 12 L H Q T: for 2 layers of 4 heads of 8, 1000 matrix elements and 128 tokens."""
    assert TransformerShape(1000, 2 * 4 * 8).flops_per_token(128) == 6 * 1000 + 12 * 2 * 4 * 8 * 128


@pytest.mark.parametrize(
    ("name", "tera"),
    [
        ("NVIDIA H100 80GB HBM3", 989.0),
        ("NVIDIA H100 PCIe", 756.0),
        ("NVIDIA H100 NVL", 835.0),
        ("NVIDIA H200", 989.0),
        ("NVIDIA H20", 148.0),
        ("NVIDIA B200", 2250.0),
        ("NVIDIA GB200", 2500.0),
        ("NVIDIA A100-SXM4-80GB", 312.0),
        ("NVIDIA A100 80GB PCIe", 312.0),
        ("NVIDIA A10", 125.0),
        ("NVIDIA A10G", 125.0),
        ("NVIDIA RTX A6000", 154.85),
        ("NVIDIA L40S", 362.0),
        ("NVIDIA L40", 181.0),
        ("NVIDIA L4", 121.0),
        ("NVIDIA GeForce RTX 4090", 165.2),
        ("Tesla V100-SXM2-16GB", 125.0),
        ("Tesla V100-PCIE-16GB", 112.0),
        ("Tesla T4", 65.0),
        ("AMD Instinct MI300X", 1307.4),
        ("AMD Instinct MI250X", 191.5),
        ("H100", 989.0),
    ],
)
def test_known_devices_have_their_peak(name: str, tera: float) -> None:
    """Dense bf16 (fp16 where there is no bf16), from the data sheets."""
    assert peak_flops(name) == tera * 1e12


@pytest.mark.parametrize(
    "name",
    [
        "NVIDIA A100-SXM4-40GB MIG 1g.5gb",
        "NVIDIA H100 80GB HBM3 MIG 1g.10gb",
        "cpu",
        "",
        "NVIDIA GH200",
        "NVIDIA GH200 480GB",
        "NVIDIA A1000",
        "NVIDIA L400",
        "NVIDIA GeForce RTX 3060",
        "Apple M2",
    ],
)
def test_unknown_devices_and_slices_have_none(name: str) -> None:
    """No peak is better than a wrong one."""
    assert peak_flops(name) is None
