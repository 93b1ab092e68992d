"""Trains a Llama as torchtitan does: FSDP2, tensor parallel, checkpointing, fused AdamW.

    memlab run --device cuda:h100 --ranks 8 benchmarks/published/llama.py --model 8B

The operators and their order follow torchtitan's eager trainer of the named figures, because each
operator casts and saves its own tensors. A step is: loss, backward, clipped gradients, AdamW.
"""

import argparse
from collections import Counter
from contextlib import nullcontext
from dataclasses import dataclass

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)


@dataclass(frozen=True)
class Shape:
    layers: int
    hidden_size: int
    heads: int
    kv_heads: int
    intermediate_size: int
    vocab_size: int


SHAPES = {
    "7B": Shape(32, 4096, 32, 32, 11008, 32000),  # Llama 2
    "8B": Shape(32, 4096, 32, 8, 14336, 128256),  # Llama 3
    "70B": Shape(80, 8192, 64, 8, 28672, 128256),
}


class RMSNorm(nn.Module):
    def __init__(self, width: int):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(width))

    def forward(self, x: Tensor) -> Tensor:
        exact = x.float()
        normed = exact * torch.rsqrt(exact.pow(2).mean(-1, keepdim=True) + 1e-5)
        return normed.type_as(x) * self.weight


def rotated(x: Tensor, rotations: Tensor) -> Tensor:
    pairs = torch.view_as_complex(x.float().reshape(*x.shape[:-1], -1, 2))
    return torch.view_as_real(pairs * rotations[None, :, None]).flatten(3).type_as(x)


class Attention(nn.Module):
    def __init__(self, shape: Shape, backend: SDPBackend):
        super().__init__()
        self.backend = backend
        self.head_dim = shape.hidden_size // shape.heads
        self.groups = shape.heads // shape.kv_heads
        kv_width = shape.kv_heads * self.head_dim
        self.q = nn.Linear(shape.hidden_size, shape.hidden_size, bias=False)
        self.k = nn.Linear(shape.hidden_size, kv_width, bias=False)
        self.v = nn.Linear(shape.hidden_size, kv_width, bias=False)
        self.out = nn.Linear(shape.hidden_size, shape.hidden_size, bias=False)

    def forward(self, x: Tensor, rotations: Tensor) -> Tensor:
        q, k, v = self.q(x), self.k(x), self.v(x)
        q, k, v = (y.view(*y.shape[:2], -1, self.head_dim) for y in (q, k, v))  # (B, T, H, D)
        q, k = rotated(q, rotations), rotated(k, rotations)
        k, v = self.repeated(k), self.repeated(v)
        q, k, v = (y.transpose(1, 2) for y in (q, k, v))  # (B, H, T, D)
        with sdpa_kernel(self.backend):
            mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(mixed.transpose(1, 2).contiguous().flatten(2))

    def repeated(self, x: Tensor) -> Tensor:
        if self.groups == 1:
            return x
        return x[:, :, :, None].expand(-1, -1, -1, self.groups, -1).flatten(2, 3)


class FeedForward(nn.Module):
    def __init__(self, shape: Shape):
        super().__init__()
        self.gate = nn.Linear(shape.hidden_size, shape.intermediate_size, bias=False)
        self.down = nn.Linear(shape.intermediate_size, shape.hidden_size, bias=False)
        self.up = nn.Linear(shape.hidden_size, shape.intermediate_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.silu(self.gate(x)) * self.up(x))


class Block(nn.Module):
    def __init__(self, shape: Shape, norm: type[nn.Module], backend: SDPBackend):
        super().__init__()
        self.attention, self.feed_forward = Attention(shape, backend), FeedForward(shape)
        self.attention_norm, self.feed_forward_norm = (
            norm(shape.hidden_size),
            norm(shape.hidden_size),
        )

    def forward(self, x: Tensor, rotations: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x), rotations)
        return x + self.feed_forward(self.feed_forward_norm(x))


class Checkpointed(nn.Module):
    """Recompute a block in backward. FSDP shards this module, so it gathers once for both."""

    def __init__(self, block: Block, *, selective: bool):
        super().__init__()
        self.block = block
        self.settings = {"context_fn": contexts} if selective else {}

    def forward(self, x: Tensor, rotations: Tensor) -> Tensor:
        settings = {"use_reentrant": False, "preserve_rng_state": False, **self.settings}
        return checkpoint(self.block, x, rotations, **settings)


KEPT = {
    torch.ops.aten._scaled_dot_product_efficient_attention.default,
    torch.ops.aten._scaled_dot_product_flash_attention.default,
    torch.ops._c10d_functional.reduce_scatter_tensor.default,
}


def contexts():
    """Keep the results of attention, of reduce-scatter and of every other matmul."""
    matmuls: Counter[bool] = Counter()

    def policy(context, operator, *args, **kwargs):
        keeps = operator in KEPT
        if operator == torch.ops.aten.mm.default:
            matmuls[context.is_recompute] += 1
            keeps = matmuls[context.is_recompute] % 2 == 1
        return CheckpointPolicy.MUST_SAVE if keeps else CheckpointPolicy.PREFER_RECOMPUTE

    return create_selective_checkpoint_contexts(policy)


class Llama(nn.Module):
    def __init__(self, shape: Shape, seq_len: int, norm: type[nn.Module], backend: SDPBackend):
        super().__init__()
        self.embedding = nn.Embedding(shape.vocab_size, shape.hidden_size)
        self.blocks = nn.ModuleList(Block(shape, norm, backend) for _ in range(shape.layers))
        self.norm = norm(shape.hidden_size)
        self.output = nn.Linear(shape.hidden_size, shape.vocab_size, bias=False)
        pairs = shape.hidden_size // shape.heads // 2
        self.register_buffer("rotations", torch.empty(seq_len, pairs, dtype=torch.complex64))

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x, self.rotations)
        return self.output(self.norm(x))


def split_tensors(model: Llama, mesh) -> None:
    """Tensor and sequence parallel, the logits split by vocabulary."""
    ends = {
        "embedding": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
        "norm": SequenceParallel(),
        "output": ColwiseParallel(
            input_layouts=Shard(1), output_layouts=Shard(-1), use_local_output=False
        ),
    }
    gathered = {"input_layouts": (Shard(1),), "desired_input_layouts": (Replicate(),)}
    with_rotations = {name: (*layout, None) for name, layout in gathered.items()}
    plan = {
        "attention_norm": SequenceParallel(),
        "attention": PrepareModuleInput(**with_rotations),
        **{f"attention.{name}": ColwiseParallel() for name in "qkv"},
        "attention.out": RowwiseParallel(output_layouts=Shard(1)),
        "feed_forward_norm": SequenceParallel(),
        "feed_forward": PrepareModuleInput(**gathered),
        "feed_forward.gate": ColwiseParallel(),
        "feed_forward.up": ColwiseParallel(),
        "feed_forward.down": RowwiseParallel(output_layouts=Shard(1)),
    }
    parallelize_module(model, mesh, ends)
    for block in model.blocks:
        parallelize_module(block, mesh, plan)


def shard(model: Llama, mesh, options: argparse.Namespace) -> None:
    """Shard each block, and the rest as one group or as two: the embedding, the norm and output.

    FSDP2 once kept the root's weights for backward in any case, as `reshard_after_forward=False`.
    """
    settings = {"mesh": mesh, "mp_policy": MixedPrecisionPolicy(torch.bfloat16, torch.float32)}
    last = len(model.blocks) - 1
    frees = options.reshard != "never"
    if options.groups == "ends":
        fully_shard(model.embedding, reshard_after_forward=frees, **settings)
    for place, block in enumerate(model.blocks):
        kept_last = options.reshard == "default" and options.groups == "root" and place == last
        fully_shard(block, reshard_after_forward=frees and not kept_last, **settings)
    if options.groups == "ends":
        frees = options.reshard == "always"
        fully_shard([model.norm, model.output], reshard_after_forward=frees, **settings)
    fully_shard(model, reshard_after_forward=False, **settings)


def cross_entropy(logits: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1).float(), labels.flatten(0, 1))


def chunked_cross_entropy(logits: Tensor, labels: Tensor, chunks: int = 8) -> Tensor:
    """The same in eight parts: a float32 copy of the logits is needed for one part at a time."""
    parts = zip(logits.chunk(chunks, dim=1), labels.chunk(chunks, dim=1), strict=True)
    return sum(cross_entropy(*part) for part in parts) / chunks


LOSSES = {
    "float32": cross_entropy,
    "chunked": chunked_cross_entropy,
}
NORMS = {"composed": RMSNorm, "fused": nn.RMSNorm}
BACKENDS = {"flash": SDPBackend.FLASH_ATTENTION, "cudnn": SDPBackend.CUDNN_ATTENTION}


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", choices=SHAPES, default="8B")
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--seq-len", type=int, default=8192)
    parser.add_argument("--checkpointing", choices=("selective", "full", "none"), required=True)
    parser.add_argument("--tensor", type=int, default=1, help="ranks of tensor parallel")
    parser.add_argument("--reshard", choices=("default", "always", "never"), default="default")
    parser.add_argument("--groups", choices=("root", "ends"), default="root")
    parser.add_argument("--loss", choices=LOSSES, default="float32")
    parser.add_argument("--keep-logits", action="store_true", help="in a variable, until backward")
    parser.add_argument("--norm", choices=NORMS, default="composed")
    parser.add_argument("--attention", choices=BACKENDS, default="flash")
    parser.add_argument("--foreach", action="store_true", help="foreach AdamW instead of fused")
    return parser.parse_args()


def main() -> None:
    options = parsed()
    dist.init_process_group("nccl")
    torch.cuda.set_device(dist.get_rank() % torch.cuda.device_count())
    degrees = (dist.get_world_size() // options.tensor, options.tensor)
    mesh = dist.init_device_mesh("cuda", degrees, mesh_dim_names=("data", "tensor"))

    shape = SHAPES[options.model]
    with torch.device("meta"):
        model = Llama(shape, options.seq_len, NORMS[options.norm], BACKENDS[options.attention])
    if options.tensor > 1:
        split_tensors(model, mesh["tensor"])
    if options.checkpointing != "none":
        for place, block in enumerate(model.blocks):
            selective = options.checkpointing == "selective"
            model.blocks[place] = Checkpointed(block, selective=selective)
    shard(model, mesh["data"], options)
    model.to_empty(device="cuda")
    kernels = {"foreach" if options.foreach else "fused": True}
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, **kernels)

    for _ in range(3):
        batch = torch.randint(shape.vocab_size, (2, options.batch, options.seq_len))
        tokens, labels = batch[0].cuda(), batch[1].cuda()
        optimizer.zero_grad()
        with loss_parallel() if options.tensor > 1 else nullcontext():
            logits = model(tokens).float() if options.keep_logits else model(tokens)
            loss = LOSSES[options.loss](logits, labels)
            if not options.keep_logits:
                del logits
            loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0, foreach=True)
        optimizer.step()


main()
