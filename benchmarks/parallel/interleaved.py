"""A pipeline of two stages on each rank, interleaved."""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage, ScheduleInterleaved1F1B

dist.init_process_group("gloo")
rank, ranks = dist.get_rank(), dist.get_world_size()
models = nn.ModuleList(
    nn.Sequential(nn.Linear(256, 512), nn.ReLU(), nn.Linear(512, 256)) for _ in range(2)
)
stages = [
    PipelineStage(model, rank + ranks * place, 2 * ranks, torch.device("cpu"))
    for place, model in enumerate(models)
]
schedule = ScheduleInterleaved1F1B(stages, n_microbatches=4, loss_fn=nn.functional.mse_loss)
optimizer = torch.optim.AdamW(models.parameters())
for _ in range(3):
    inputs = (torch.randn(32, 256),) if rank == 0 else ()
    target = torch.randn(32, 256) if rank == ranks - 1 else None
    schedule.step(*inputs, target=target)
    optimizer.step()
    optimizer.zero_grad()
