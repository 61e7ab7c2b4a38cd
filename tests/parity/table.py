"""The rows: each way of training that must show the values of the unsharded one."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Replicate
from torch.distributed.tensor import Shard as OnDim
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, SequenceParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

from tests.parity.cases import Case, Dims
from tests.parity.model import NetSpec

DP2: Dims = (("dp", 2),)
DP4: Dims = (("dp", 4),)
TP2: Dims = (("tp", 2),)
PP2: Dims = (("pp", 2),)
DP_TP: Dims = (("dp", 2), ("tp", 2))
PP_DP: Dims = (("pp", 2), ("dp", 2))
HYBRID: Dims = (("replicate", 2), ("shard", 2))


def blocks_of(model: nn.Module) -> list[nn.Module]:
    """Return the blocks of the whole model or of a pipeline's stage."""
    blocks: Any = model.blocks if hasattr(model, "blocks") else model
    return list(blocks)


def ddp(model: nn.Module, mesh: DeviceMesh) -> nn.Module:
    """Replicate."""
    return DistributedDataParallel(model, process_group=mesh["dp"].get_group())


def data_mesh(mesh: DeviceMesh) -> DeviceMesh:
    """Return the part of a mesh over which FSDP2 shards."""
    names = mesh.mesh_dim_names or ()
    return mesh["dp"] if "dp" in names else mesh


def fsdp(model: nn.Module, mesh: DeviceMesh, **settings: Any) -> nn.Module:
    """Shard each block and the root."""
    for block in blocks_of(model):
        fully_shard(block, mesh=data_mesh(mesh), **settings)
    fully_shard(model, mesh=data_mesh(mesh), **settings)
    return model


def fsdp_columns(model: nn.Module, mesh: DeviceMesh) -> nn.Module:
    """Shard matrices by their columns."""
    return fsdp(model, mesh, shard_placement_fn=lambda parameter: OnDim(parameter.dim() - 1))


def fsdp_kept(model: nn.Module, mesh: DeviceMesh) -> nn.Module:
    """Shard, and keep the whole weights between forward and backward."""
    return fsdp(model, mesh, reshard_after_forward=False)


def fsdp_bf16(model: nn.Module, mesh: DeviceMesh) -> nn.Module:
    """Shard; compute in bf16."""
    return fsdp(model, mesh, mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32))


def fsdp_one_block(model: nn.Module, mesh: DeviceMesh) -> nn.Module:
    """Shard the first block only; the rest are plain parameters."""
    fully_shard(blocks_of(model)[0], mesh=mesh["dp"])
    return model


def fsdp_checkpointed(model: nn.Module, mesh: DeviceMesh) -> nn.Module:
    """Recompute each block in backward, and shard."""
    model.blocks = nn.ModuleList(checkpoint_wrapper(block) for block in blocks_of(model))
    return fsdp(model, mesh)


def compiled(model: nn.Module) -> nn.Module:
    """Compile each block."""
    for block in blocks_of(model):
        block.compile(backend="aot_eager")
    return model


def fsdp_compiled(model: nn.Module, mesh: DeviceMesh) -> nn.Module:
    """Compile each block, then shard."""
    return fsdp(compiled(model), mesh)


def ddp_compiled(model: nn.Module, mesh: DeviceMesh) -> nn.Module:
    """Compile each block, then replicate."""
    return ddp(compiled(model), mesh)


def tp(model: nn.Module, mesh: DeviceMesh) -> nn.Module:
    """Divide the products of each block; all else is whole on each rank."""
    for block in blocks_of(model):
        plan: dict[str, Any] = {"up": ColwiseParallel(), "down": RowwiseParallel()}
        if hasattr(block, "attention"):
            plan |= {f"attention.{name}": ColwiseParallel() for name in "qkv"} | {"attention.out": RowwiseParallel()}
        parallelize_module(block, mesh["tp"], plan)
    return model


def tp_sequence(model: nn.Module, mesh: DeviceMesh) -> nn.Module:
    """Divide everything, norms by the sequence: their gradients are partial sums."""
    rows: dict[str, Any] = {
        "embedding": RowwiseParallel(input_layouts=Replicate(), output_layouts=OnDim(1)),
        "norm": SequenceParallel(),
        "head": ColwiseParallel(input_layouts=OnDim(1), output_layouts=Replicate()),
    }
    parallelize_module(model, mesh["tp"], rows)
    for block in blocks_of(model):
        plan = {
            "ln": SequenceParallel(),
            "up": ColwiseParallel(input_layouts=OnDim(1)),
            "down": RowwiseParallel(output_layouts=OnDim(1)),
        }
        parallelize_module(block, mesh["tp"], plan)
    return model


def fsdp_tp(model: nn.Module, mesh: DeviceMesh) -> nn.Module:
    """Divide products over tp, and shard over dp."""
    return fsdp(tp(model, mesh), mesh)


def fsdp_tp_sequence(model: nn.Module, mesh: DeviceMesh) -> nn.Module:
    """Divide everything over tp, and shard over dp."""
    return fsdp(tp_sequence(model, mesh), mesh)


def ddp_tp(model: nn.Module, mesh: DeviceMesh) -> nn.Module:
    """Divide products over tp, and replicate over dp."""
    from torch.distributed.tensor.parallel.ddp import _pre_dp_module_transform

    tp(model, mesh)
    _pre_dp_module_transform(model)
    return ddp(model, mesh)


_SMALL = NetSpec(vocabulary=31, width=6)
"""Its rows divide by neither 2 nor 4: uneven shards; the norms' six elements leave the last of four ranks without any."""
_STAGES = NetSpec(blocks=4)
_LARGE = NetSpec(vocabulary=512, width=96)
_LORA = NetSpec(lora=True, frozen=("blocks.0.down", "head"))
_CLIP = 0.3

_ROWS = [
    Case("one process", micro=2),
    Case("one process, SGD, attention", micro=2, optimizer="sgd", net=NetSpec(attention=True)),
    Case("one process, clipped", micro=2, clip=_CLIP),
    Case("DDP 2", DP2, ddp),
    Case("DDP 4, attention", DP4, ddp, NetSpec(attention=True)),
    Case("DDP 2, SGD with momentum", DP2, ddp, optimizer="sgd"),
    Case("DDP 2, no_sync", DP2, ddp, micro=2, loop="no_sync"),
    Case("DDP 2, bf16 autocast", DP2, ddp, precision="autocast"),
    Case("DDP 2, tied", DP2, ddp, NetSpec(tied=True)),
    Case("DDP 2, clipped", DP2, ddp, clip=_CLIP),
    Case("DDP 2, clipped, no_sync", DP2, ddp, micro=2, loop="no_sync", clip=_CLIP),
    Case("DDP 2, GradScaler", DP2, ddp, infinite_step=1),
    Case("DDP 2, GradScaler, fused", DP2, ddp, infinite_step=1, optimizer="fused"),
    Case("DDP 2, GradScaler, unscaled and clipped", DP2, ddp, infinite_step=1, clip=_CLIP),
    Case("DDP 2, compiled blocks", DP2, ddp_compiled),
    Case("FSDP2 2", DP2, fsdp),
    Case("FSDP2 4, attention", DP4, fsdp, NetSpec(attention=True)),
    Case("FSDP2 2, SGD with momentum", DP2, fsdp, optimizer="sgd"),
    Case("FSDP2 2, not resharded after forward", DP2, fsdp_kept),
    Case("FSDP2 2, accumulation", DP2, fsdp, micro=2, loop="late_sync"),
    Case("FSDP2 2, bf16 parameters", DP2, fsdp_bf16, precision="bf16 shards"),
    Case("FSDP2 2, bf16 weights", DP2, fsdp, precision="bf16"),
    Case("FSDP2 2, sharded by columns", DP2, fsdp_columns),
    Case("FSDP2 4, uneven and empty shards", DP4, fsdp, _SMALL),
    Case("FSDP2 4, uneven and empty shards, clipped", DP4, fsdp, _SMALL, clip=_CLIP),
    Case("FSDP2 2, tied", DP2, fsdp, NetSpec(tied=True)),
    Case("FSDP2 2, frozen", DP2, fsdp, NetSpec(frozen=("embedding", "blocks.0.up"))),
    Case("FSDP2 2, adapters", DP2, fsdp, _LORA),
    Case("FSDP2 2, checkpointing", DP2, fsdp_checkpointed),
    Case("FSDP2 2, compiled blocks", DP2, fsdp_compiled),
    Case("FSDP2 2, GradScaler", DP2, fsdp, infinite_step=1),
    Case("FSDP2 2, GradScaler, fused", DP2, fsdp, infinite_step=1, optimizer="fused"),
    Case("FSDP2 2, GradScaler, unscaled", DP2, fsdp, infinite_step=1, unscale=True),
    Case("FSDP2 2, GradScaler, clipped", DP2, fsdp, infinite_step=1, clip=_CLIP),
    Case("FSDP2 2, tied, clipped", DP2, fsdp, NetSpec(tied=True), clip=_CLIP),
    Case("FSDP2 2, clipped", DP2, fsdp, clip=_CLIP),
    Case("FSDP2 2, two optimizers", DP2, fsdp, optimizer="several"),
    Case("FSDP2 2, every second step", DP2, fsdp, steps=5, settings={"every_n_steps": 2}),
    Case("FSDP2 2, layers are blocks", DP2, fsdp, settings={"layers": "block"}),
    Case("FSDP2 2, every rank's own view", DP2, fsdp, settings={"layers_on": "all"}),
    Case("FSDP2 2, sampled updates", DP2, fsdp, _LARGE, settings={"updates": "sampled"}, update_tolerance=0.05),
    Case("FSDP2 2 of one block, others plain", DP2, fsdp_one_block, loop="manual"),
    Case("FSDP2 of one block, clipped", DP2, fsdp_one_block, loop="manual", clip=_CLIP, same=1e-6),
    Case("HSDP 2 x 2", HYBRID, fsdp),
    Case("HSDP 2 x 2, clipped", HYBRID, fsdp, clip=_CLIP),
    Case("TP 2", TP2, tp, micro=2),
    Case("TP 2, attention", TP2, tp, NetSpec(attention=True), micro=2),
    Case("TP 2, clipped", TP2, tp, micro=2, clip=_CLIP, same=1e-6),
    Case("TP 2, sequence parallel", TP2, tp_sequence, micro=2),
    Case("TP 2, sequence parallel, clipped", TP2, tp_sequence, micro=2, clip=_CLIP, same=1e-6),
    Case("FSDP2 x TP 2 x 2", DP_TP, fsdp_tp, NetSpec(attention=True)),
    Case("FSDP2 x TP 2 x 2, clipped", DP_TP, fsdp_tp, clip=_CLIP, same=1e-6),
    Case("FSDP2 x TP 2 x 2, sequence parallel", DP_TP, fsdp_tp_sequence),
    Case("FSDP2 x TP 2 x 2, mesh given", DP_TP, fsdp_tp, gives_mesh=True),
    Case("FSDP2 x TP 2 x 2, sampled updates", DP_TP, fsdp_tp, _LARGE, settings={"updates": "sampled"}, update_tolerance=0.05),
    Case("DDP x TP 2 x 2", DP_TP, ddp_tp, gives_mesh=True),
    Case("pipeline 2, GPipe, mesh given", PP2, net=_STAGES, micro=4, loop="pipeline", gives_mesh=True),
    Case("pipeline 2, attention", PP2, net=NetSpec(blocks=4, attention=True), micro=4, loop="pipeline", gives_mesh=True),
    Case("pipeline 2, GPipe", PP2, net=_STAGES, micro=4, loop="pipeline"),
    Case("pipeline 2, 1F1B", PP2, net=_STAGES, micro=4, loop="pipeline", schedule="1F1B"),
    Case("pipeline 2, clipped", PP2, net=_STAGES, micro=4, loop="pipeline", gives_mesh=True, clip=_CLIP, same=1e-6),
    Case("pipeline 2 x DDP 2", PP_DP, ddp, _STAGES, loop="pipeline", gives_mesh=True),  # more micro-batches fail in torch's DDP
    Case("pipeline 2 x 2 replicas by hand", PP_DP, net=_STAGES, micro=2, loop="manual pipeline", gives_mesh=True),
    Case("pipeline 2 x FSDP2 2", PP_DP, fsdp, _STAGES, micro=2, loop="pipeline", gives_mesh=True),
    Case("pipeline 2 x FSDP2 2, clipped", PP_DP, fsdp, _STAGES, micro=2, loop="pipeline", gives_mesh=True, clip=_CLIP, same=1e-6),
    Case("experts of each rank's own", DP2, net=NetSpec(experts=2), loop="manual", own_experts=True),
    Case("experts, clipped", DP2, net=NetSpec(experts=2), loop="manual", own_experts=True, clip=_CLIP, same=1e-6),
]

TABLE: Mapping[str, Case] = {case.name: case for case in _ROWS}
assert len(TABLE) == len(_ROWS)
