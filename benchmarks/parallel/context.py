"""Context parallel, ring attention."""

import torch
import torch.distributed as dist
from torch import nn

from memlab.reference.ring_attention import ring

dist.init_process_group("gloo")
rank, ranks = dist.get_rank(), dist.get_world_size()
HEADS, TOKENS, TILE = 4, 256 // ranks, 32


class Block(nn.Module):
    """Attention over a sequence divided among the ranks, and an MLP."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.output = nn.Linear(256, 3 * 256), nn.Linear(256, 256)
        self.mlp = nn.Sequential(nn.Linear(256, 1024), nn.SiLU(), nn.Linear(1024, 256))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (
            part.unflatten(-1, (HEADS, -1)).transpose(1, 2) for part in self.qkv(x).chunk(3, -1)
        )
        attended = ring(q, k, v, TILE)
        x = x + self.output(attended.transpose(1, 2).flatten(2))
        return x + self.mlp(x)


model = nn.Sequential(Block(), Block())
optimizer = torch.optim.AdamW(model.parameters())
for _ in range(3):
    model(torch.randn(2, TOKENS, 256)).square().mean().backward()
    for weight in model.parameters():
        dist.all_reduce(weight.grad)
    optimizer.step()
    optimizer.zero_grad()
