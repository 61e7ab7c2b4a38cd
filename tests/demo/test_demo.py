"""The demo's parts; the whole is run by tests/test_cli.py."""

from __future__ import annotations

import pytest
import torch

from otel_train.demo import warmup_cosine
from otel_train.demo.corpus import Corpus
from otel_train.demo.model import GPT
from otel_train.stats.throughput import transformer_shape


def test_the_model_has_about_a_million_parameters_in_two_groups() -> None:
    """Every parameter in one group, norms and biases without decay."""
    model = GPT()
    assert sum(p.numel() for p in model.parameters()) == pytest.approx(1e6, rel=0.1)
    decayed, others = model.parameter_groups(weight_decay=0.1)
    assert len(decayed["params"]) + len(others["params"]) == len(list(model.parameters()))
    assert (decayed["weight_decay"], others["weight_decay"]) == (0.1, 0.0)


def test_the_model_is_found_to_be_a_transformer() -> None:
    """So that the demo shows MFU where a peak is given."""
    model = GPT()
    shape = transformer_shape(model)
    assert shape is not None
    assert shape.attention_width == 5 * 128
    assert shape.matrix_parameters == sum(p.numel() for n, p in model.named_parameters() if p.dim() == 2) - 256 * 128 - 128 * 128


def test_a_model_of_bytes_starts_at_the_entropy_of_bytes() -> None:
    """Log 256, within what initialisation adds."""
    model, corpus = GPT(), Corpus.from_standard_library()
    inputs, targets = next(corpus.batches(corpus.training, 4, model.context, torch.Generator().manual_seed(0), 1))
    assert torch.equal(inputs[:, 1:], targets[:, :-1])
    assert float(model(inputs, targets).detach()) == pytest.approx(5.545, abs=0.4)


def test_the_text_is_real_and_the_held_out_part_is_not_trained_on() -> None:
    """Python's own source."""
    corpus = Corpus.from_standard_library()
    assert b"def " in bytes(corpus.training[:100_000].tolist())
    assert len(corpus.validation) == pytest.approx(0.05 * (len(corpus.training) + len(corpus.validation)), rel=0.01)


def test_the_schedule_warms_up_and_falls_to_a_tenth() -> None:
    """Linear, then a cosine."""
    factors = [warmup_cosine(step, 10, 100) for step in range(101)]
    assert factors[0] == pytest.approx(0.1)
    assert factors[9] == 1.0
    assert factors[100] == pytest.approx(0.1)
    assert factors[10:] == sorted(factors[10:], reverse=True)
