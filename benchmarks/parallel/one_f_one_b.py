"""A pipeline, Schedule1F1B."""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B

dist.init_process_group("gloo")
rank, ranks = dist.get_rank(), dist.get_world_size()
model = nn.Sequential(
    *[nn.Sequential(nn.Linear(256, 512), nn.ReLU(), nn.Linear(512, 256)) for _ in range(2)]
)
stage = PipelineStage(model, rank, ranks, torch.device("cpu"))
schedule = Schedule1F1B(stage, n_microbatches=4, loss_fn=nn.functional.mse_loss)
optimizer = torch.optim.AdamW(model.parameters())
for _ in range(3):
    inputs = (torch.randn(32, 256),) if rank == 0 else ()
    target = torch.randn(32, 256) if rank == ranks - 1 else None
    schedule.step(*inputs, target=target)
    optimizer.step()
    optimizer.zero_grad()
