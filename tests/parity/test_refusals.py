"""What cannot be measured is refused on every rank, in words that say what to do."""

from __future__ import annotations

import torch
from torch.distributed.fsdp import FullyShardedDataParallel

import otel_train
from tests.parity.harness import Ranks
from tests.parity.model import NetSpec


def attach_to_fsdp1() -> str:
    """Return what attach says of FSDP1."""
    model = FullyShardedDataParallel(NetSpec().build(), use_orig_params=True, device_id=torch.device("cpu"))
    optimizer = torch.optim.AdamW(model.parameters())
    try:
        otel_train.attach(model, optimizer, port=None).close()
    except otel_train.AttachError as error:
        return str(error)
    return ""


def test_fsdp1_is_refused_on_every_rank(two: Ranks) -> None:
    """Its flat parameters do not tell which layer an element belongs to; FSDP2 is the way out."""
    said = two.run(attach_to_fsdp1)
    assert said[0] == said[1]
    assert "fully_shard" in said[0]
