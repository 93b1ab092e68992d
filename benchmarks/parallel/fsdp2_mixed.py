"""FSDP2 that gathers weights in bfloat16."""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

dist.init_process_group("gloo")
mesh = dist.init_device_mesh("cpu", (dist.get_world_size(),))
model = nn.Sequential(
    *[nn.Sequential(nn.Linear(256, 512), nn.ReLU(), nn.Linear(512, 256)) for _ in range(4)]
)
settings = {"mp_policy": MixedPrecisionPolicy(torch.bfloat16, torch.float32)}
for layer in model:
    fully_shard(layer, mesh=mesh, **settings)
fully_shard(model, mesh=mesh, **settings)
optimizer = torch.optim.AdamW(model.parameters())
for _ in range(3):
    model(torch.randn(32, 256)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
