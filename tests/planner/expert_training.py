"""A training with expert parallelism in plain torch, which the formulas are compared with.

It takes one argument, a JSON object with the sizes. Tokens are sorted by expert and sent to the
ranks of their experts, where each expert computes its rows; an all-to-all brings them back. FSDP2
divides the experts over the ranks that have the same ones, and everything else over all ranks. The
ranks route alike, so the counts of other ranks are not exchanged.
"""

import json
import sys

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed._functional_collectives import all_to_all_single_autograd
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.utils.checkpoint import checkpoint

sizes = json.loads(sys.argv[1])
V, C, WIDTH, L = (sizes[name] for name in ("vocab", "hidden", "intermediate", "layers"))
H, KV, D, T = (sizes[name] for name in ("heads", "kv_heads", "head_dim", "tokens"))
E, K, WAYS, GPUS = (sizes[name] for name in ("experts", "chosen", "ways", "gpus"))
OWN = E // WAYS
shape, names = (GPUS // WAYS, WAYS), ("replica", "expert")
mesh = dist.init_device_mesh("cuda", shape, mesh_dim_names=names)
everyone, group = mesh._flatten(), mesh.get_group("expert")
angles = torch.outer(torch.arange(T), 1e6 ** (-torch.arange(0, D, 2) / D)).to("cuda")


def linear(inputs, outputs):
    return nn.Linear(inputs, outputs, bias=False)


class Expert(nn.Module):
    def __init__(self):
        super().__init__()
        self.gate, self.up, self.down = linear(C, WIDTH), linear(C, WIDTH), linear(WIDTH, C)

    def forward(self, x):
        return self.down(F.silu(self.gate(x)) * self.up(x))


class Experts(nn.Module):
    def __init__(self):
        super().__init__()
        self.each = nn.ModuleList(Expert() for _ in range(OWN))

    def forward(self, x, counts):  # rows by expert
        return torch.cat([f(rows) for f, rows in zip(self.each, x.split(counts), strict=True)])


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.q, self.k, self.v = linear(C, H * D), linear(C, KV * D), linear(C, KV * D)
        self.o, self.router, self.experts = linear(H * D, C), linear(C, E), Experts()
        self.norm1, self.norm2 = nn.RMSNorm(C), nn.RMSNorm(C)
        has_norms = sizes["head_norms"]
        self.q_norm, self.k_norm = (nn.RMSNorm(D) if has_norms else nn.Identity() for _ in "qk")

    def run(self, x):
        h = self.norm1(x)
        q, k, v = (f(h).unflatten(-1, (-1, D)) for f in (self.q, self.k, self.v))
        qkv = rotated(self.q_norm(q)), rotated(self.k_norm(k)), v.transpose(1, 2)
        h = F.scaled_dot_product_attention(*qkv, is_causal=True, enable_gqa=True)
        x = x + self.o(h.transpose(1, 2).flatten(2))
        return x + routed(self, self.norm2(x).flatten(0, 1)).view_as(x)

    def forward(self, x):
        if not sizes["checkpointed"]:
            return self.run(x)
        return checkpoint(self.run, x, use_reentrant=False)


def rotated(x):  # (B, T, heads, D) to (B, heads, T, D)
    (a, b), cos, sin = x.float().chunk(2, -1), angles.cos()[:, None], angles.sin()[:, None]
    return torch.cat((a * cos - b * sin, b * cos + a * sin), -1).to(x.dtype).transpose(1, 2)


def routed(block, h):  # (n, C)
    scores, chosen = block.router(h).float().softmax(-1).topk(K)
    order = chosen.flatten().argsort(stable=True)
    counts = chosen.flatten().bincount(minlength=E).tolist()
    sent = [sum(counts[rank * OWN : (rank + 1) * OWN]) for rank in range(WAYS)]
    own = counts[dist.get_rank(group) * OWN :][:OWN]
    got = [sum(own)] * WAYS
    arrived = all_to_all_single_autograd(h[order // K], got, sent, group)  # rows by rank
    by_expert = [rank * OWN + expert for expert in range(OWN) for rank in range(WAYS)]
    by_rank = [expert * WAYS + rank for rank in range(WAYS) for expert in range(OWN)]
    rows = reordered(arrived, own * WAYS, by_expert)
    rows = block.experts(rows, [WAYS * count for count in own])
    rows = reordered(rows, [count for count in own for _ in range(WAYS)], by_rank)
    back = all_to_all_single_autograd(rows, sent, got, group)
    weighted = back * scores.flatten()[order, None].to(back.dtype)
    return torch.zeros_like(h).scatter_add(0, (order // K)[:, None].expand(-1, C), weighted)


def reordered(x, counts, order):
    parts = x.split(counts)
    return x if order == sorted(order) else torch.cat([parts[place] for place in order])


with torch.device("meta"):
    blocks = [Block() for _ in range(L)]
    model = nn.Sequential(nn.Embedding(V, C), *blocks, nn.RMSNorm(C), linear(C, V))
policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
settings = {"mp_policy": policy, "reshard_after_forward": True}
for block in blocks:
    fully_shard(block.experts, mesh=mesh["replica"], **settings)
    fully_shard(block, mesh=everyone, **settings)
fully_shard(model, mesh=everyone, **settings)
model.to_empty(device="cuda")
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
batch = torch.randint(V, (1, T + 1)).to("cuda")


def loss_of(logits, targets):
    return F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())


for _ in range(2):
    tokens, targets = batch[:, :-1].clone(), batch[:, 1:].clone()
    loss_of(model(tokens), targets).backward()
    optimizer.step()
    optimizer.zero_grad()
