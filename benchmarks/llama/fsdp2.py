"""A Llama whose blocks are checkpointed, under FSDP2 (ZeRO stage 3).

    memlab run --gpu h100 --ranks 8 benchmarks/llama/fsdp2.py llama-3-70b 80 4096 2

Arguments: the preset, its number of blocks, the tokens of a micro-batch, micro-batches per step.
"""

import os
import sys
from dataclasses import replace
from functools import partial

import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard

from memlab.checkpointing import checkpoint
from memlab.model import GPT, PRESETS

name, (layers, tokens, micro_batches) = sys.argv[1], map(int, sys.argv[2:])
config = replace(PRESETS[name], layers=layers)
device = "cuda" if torch.cuda.is_available() else "cpu"
dist.init_process_group("nccl" if device == "cuda" else "gloo")
if device == "cuda":
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
mesh = dist.init_device_mesh(device, (dist.get_world_size(),))

with torch.device("meta"):
    model = GPT(config, dtype=torch.bfloat16)
for block in model.blocks:
    block.forward = partial(checkpoint, block.forward)
    fully_shard(block, mesh=mesh)
fully_shard(model, mesh=mesh)
model.to_empty(device=device)
optimizer = torch.optim.AdamW(model.parameters(), fused=True)
batch = torch.zeros(1, tokens, dtype=torch.long, device=device)
for _ in range(3):
    for _ in range(micro_batches):
        model(batch, batch).backward()
    optimizer.step()
    optimizer.zero_grad()
