"""A Llama in three dimensions: pipeline, data and tensor parallel, with sequence parallelism.

    memlab run --gpu h100 --ranks 128 benchmarks/llama/three_d.py llama-3-405b 4 4 8 32 8192 4

Arguments: the preset; stages, data parallel ranks, tensor parallel ranks; the blocks of a stage,
the tokens of a micro-batch, micro-batches per step. Blocks are checkpointed. FSDP2 shards the
weights, gradients and optimizer state over the data parallel ranks, and gathers a block's weights
for forward and for backward.
"""

import os
import sys
from dataclasses import replace
from functools import partial

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)
from torch.nn.functional import cross_entropy

from memlab.checkpointing import checkpoint
from memlab.model import GPT, PRESETS

name, sizes, (blocks, tokens, micro_batches) = (
    sys.argv[1],
    tuple(map(int, sys.argv[2:5])),
    map(int, sys.argv[5:]),
)
config = replace(PRESETS[name], layers=blocks, tied=False)  # the ends are on other stages
device = "cuda" if torch.cuda.is_available() else "cpu"
dist.init_process_group("nccl" if device == "cuda" else "gloo")
if device == "cuda":
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
mesh = dist.init_device_mesh(device, sizes, mesh_dim_names=("pipeline", "data", "tensor"))
number, last = mesh["pipeline"].get_local_rank(), sizes[0] - 1

# Between blocks, a rank has 1/t of the tokens.
GATHER = PrepareModuleInput(input_layouts=Shard(1), desired_input_layouts=Replicate())
OF_A_BLOCK = {
    "attention_norm": SequenceParallel(),
    "attention": GATHER,
    **{f"attention.{each}": ColwiseParallel() for each in ("query", "key", "value")},
    "attention.output": RowwiseParallel(output_layouts=Shard(1)),
    "mlp_norm": SequenceParallel(),
    "mlp": GATHER,
    **{f"mlp.{each}": ColwiseParallel() for each in ("gate", "up")},
    "mlp.down": RowwiseParallel(output_layouts=Shard(1)),
}
OF_THE_ENDS = {
    "embedding": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
    "norm": SequenceParallel(),
    "head": ColwiseParallel(input_layouts=Shard(1), use_local_output=True),
}


class Stage(nn.Module):
    """The blocks of this rank, with the embedding on the first stage and the head on the last."""

    def __init__(self, model: GPT) -> None:
        super().__init__()
        self.embedding = model.embedding if number == 0 else None
        self.blocks = model.blocks
        self.norm, self.head = (model.norm, model.unembedding) if number == last else (None, None)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for module in filter(None, (self.embedding, *self.blocks, self.norm, self.head)):
            x = module(x)
        return x


with torch.device("meta"):
    stage = Stage(GPT(config, dtype=torch.bfloat16))
tensor, data = mesh["tensor"], mesh["data"]
for block in stage.blocks:
    parallelize_module(block, tensor, OF_A_BLOCK)
    block.forward = partial(checkpoint, block.forward)
    fully_shard(block, mesh=data)
ends = {each: plan for each, plan in OF_THE_ENDS.items() if getattr(stage, each) is not None}
if ends:
    parallelize_module(stage, tensor, ends)
fully_shard(stage, mesh=data)
stage.to_empty(device=device)


def loss_of(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """A rank has the logits of 1/t of the vocabulary."""
    whole = DTensor.from_local(logits.flatten(0, 1), tensor, [Shard(-1)])
    return cross_entropy(whole, targets.flatten())


pipeline = PipelineStage(
    stage, number, sizes[0], torch.device(device), group=mesh["pipeline"].get_group()
)
schedule = Schedule1F1B(pipeline, n_microbatches=micro_batches, loss_fn=loss_of)
optimizer = torch.optim.AdamW(stage.parameters(), fused=True)
batch = torch.zeros(micro_batches, tokens, dtype=torch.long, device=device)
for _ in range(3):
    with loss_parallel():
        schedule.step(*[batch][: number == 0], target=batch if number == last else None)
    optimizer.step()
    optimizer.zero_grad()
