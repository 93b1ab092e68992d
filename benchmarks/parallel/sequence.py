"""Tensor and sequence parallel."""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

dist.init_process_group("gloo")
mesh = dist.init_device_mesh("cpu", (dist.get_world_size(),))


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(256), nn.Linear(256, 512), nn.Linear(512, 256)

    def forward(self, x):
        return self.down(self.up(self.norm(x)).relu())


model = nn.Sequential(*[Block() for _ in range(4)])
for layer in model:
    parallelize_module(
        layer,
        mesh,
        {
            "norm": SequenceParallel(use_local_output=False),
            "up": ColwiseParallel(input_layouts=Shard(1)),
            "down": RowwiseParallel(output_layouts=Shard(1)),
        },
    )
optimizer = torch.optim.AdamW(model.parameters())
for _ in range(3):
    model(torch.randn(8, 32 // dist.get_world_size(), 256)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
