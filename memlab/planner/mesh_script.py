"""Write the script that trains a Llama on a mesh of GPUs, in plain torch.

The script has only what its mesh needs:

    data       fully_shard: weights, gradients and optimizer state divided over data and context
    context    context_parallel: attention over sequences divided among GPUs
    tensor     parallelize_module with sequence parallelism, and a loss over divided logits
    pipeline   Schedule1F1B, which starts as many micro-batches as there are stages

Weights are float32, cast to bfloat16 when gathered, and gradients are reduced in float32. The
tokens are random and the same in every step, so the loss falls; replace them by your own.
"""

from collections.abc import Iterator
from typing import Any

from memlab.configs.shapes import GPTConfig
from memlab.planner.meshes import Mesh, require_llama

STEPS = 3
LINE = 100  # characters

_BLOCK = """
def rotated(x):  # (B, T, heads, D) to (B, heads, T, D)
    (a, b), cos, sin = x.float().chunk(2, -1), angles.cos()[:, None], angles.sin()[:, None]
    return torch.cat((a * cos - b * sin, b * cos + a * sin), -1).to(x.dtype).transpose(1, 2)


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        sizes = dict(q=(C, H * D), k=(C, KV * D), v=(C, KV * D), o=(H * D, C))
        for name, size in (sizes | dict(gate=(C, I), up=(C, I), down=(I, C))).items():
            setattr(self, name, nn.Linear(*size, bias=False))
        self.norm1, self.norm2 = nn.RMSNorm(C, {eps}), nn.RMSNorm(C, {eps})

    def {run}(self, x):
        h = self.norm1(x)
        q, k, v = (f(h).unflatten(-1, (-1, D)) for f in (self.q, self.k, self.v))
        qkv = rotated(q), rotated(k), v.transpose(1, 2)
        h = F.scaled_dot_product_attention(*qkv, is_causal=True{grouped})
        x = x + self.o(h.transpose(1, 2).flatten(2))
        h = self.norm2(x)
        return x + self.down(F.silu(self.gate(h)) * self.up(h))
"""
_CHECKPOINTED = """
    def forward(self, x):
        return checkpoint(self.run, x, use_reentrant=False)
"""
_WHOLE = """
with torch.device("meta"):
    blocks = [Block() for _ in range(L)]
    start, end = [nn.Embedding(V, C)], [nn.RMSNorm(C, {eps}), nn.Linear(C, V, bias=False)]
"""
_STAGE = """
stage = mesh.get_local_rank("pipeline")
first, last = stage == 0, stage == STAGES - 1
with torch.device("meta"):
    blocks = [Block() for _ in range(stage * L // STAGES, (stage + 1) * L // STAGES)]
    start = [nn.Embedding(V, C)] if first else []
    end = [nn.RMSNorm(C, {eps}), nn.Linear(C, V, bias=False)] if last else []
"""
_TENSOR = """
rows = parallel.RowwiseParallel(output_layouts=Shard(1))
plan = dict.fromkeys(("q", "k", "v", "gate", "up"), parallel.ColwiseParallel())
norm = parallel.SequenceParallel()
plan |= dict(o=rows, down=rows, norm1=norm, norm2=norm)
whole = dict(output_layouts=Shard(1), desired_output_layouts=Replicate(), use_local_output=False)
whole = parallel.PrepareModuleOutput(**whole)  # gathered once for the matmuls that read it
for block in blocks:
    for styles in (plan, dict(norm1=whole, norm2=whole)):
        parallel.parallelize_module(block, mesh["tensor"], styles)
words = parallel.RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1))
styles = [words] * len(start) + [norm, parallel.ColwiseParallel(input_layouts=Shard(1))]
for module, style in zip((*start, *end), styles):
    parallel.parallelize_module(module, mesh["tensor"], style)
"""
_MODEL = """model = nn.Sequential(*start, *blocks, *end)
{tied}shards, policy = {shards}, MixedPrecisionPolicy(torch.bfloat16, torch.float32)
for module in (*blocks, model):
    fully_shard(module, mesh=shards, mp_policy=policy, reshard_after_forward={reshard})
model.to_empty(device=device)
for weight in model.parameters():
    nn.init.normal_(weight, std=0.02) if weight.ndim > 1 else nn.init.ones_(weight)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
"""
_LOSS = "F.cross_entropy({}.flatten(0, 1).float(), targets.flatten())"
_LOSS_FUNCTION = """

def loss_of(logits, targets):
{logits}    return {loss}


"""
_LOGITS = """    logits = DTensor.from_local(logits, mesh["tensor"], [Shard(-1)])
"""
_SCHEDULE = """sizes = dict(dtype=torch.bfloat16, device="meta", requires_grad=True)
x = torch.empty(SEQUENCES, {own_tokens}, C, **sizes)  # what stages send
words = torch.empty(SEQUENCES, {context_tokens}, dtype=int, device="meta")
logits = torch.empty(SEQUENCES, {context_tokens}, {own_words}, **sizes)
examples = words if first else x, logits if last else x
group = mesh.get_group("pipeline")
part = PipelineStage(model, stage, STAGES, torch.device(device), *examples, group=group)
schedule = Schedule1F1B(part, MICRO_BATCHES, loss_of)
"""
_LOOP = """torch.manual_seed(mesh.get_local_rank("data"))  # ranks of one model need the same tokens
batch = torch.randint(V, ({sequences}, T + 1)).to(device)
for step in range({steps}):
    tokens, targets = batch[:, :-1].clone(), batch[:, 1:].clone()
"""
_STEP = """loss = {loss}
loss.backward()
"""
_PIPELINE_STEP = """losses, target = [], targets if last else None
schedule.step(*[tokens] * first, target=target, losses=losses, return_outputs=False)
"""
_END = """    optimizer.step()
    optimizer.zero_grad()
{report}dist.destroy_process_group()
"""
_REPORT = """    print(f"rank {dist.get_rank()}, step {step}: loss {loss.item():.4f}", flush=True)
"""
_PIPELINE_REPORT = """    if last:
        loss = sum(losses).item() / MICRO_BATCHES
        print(f"rank {dist.get_rank()}, step {step}: loss {loss:.4f}", flush=True)
"""


def mesh_script(
    config: GPTConfig,
    mesh: Mesh,
    *,
    sequences: int = 1,
    seq_len: int | None = None,
    steps: int = STEPS,
    name: str = "a Llama",
) -> str:
    """Return the script, which torchrun starts in `mesh.gpus` processes.

    A micro-batch has `sequences` sequences. Raises ValueError for a model other than a Llama, and
    for a mesh that does not divide it.
    """
    seq_len = seq_len or config.seq_len
    require_llama(config, mesh, seq_len)
    values = _values(config, mesh, seq_len, steps)
    pipelined = mesh.pipeline > 1
    parts = [
        f'"""Train {name} on {mesh.gpus} GPUs: {mesh}. Written by memlab plan."""\n\n',
        "\n".join(_imports(mesh)),
        "\n\n" + "\n".join(_settings(config, mesh, sequences, seq_len)) + "\n\n",
        _BLOCK,
        _CHECKPOINTED if mesh.checkpointed else "",
        "\n" + (_STAGE if pipelined else _WHOLE),
        _TENSOR.lstrip() if mesh.tensor > 1 else "",
        _MODEL,
        _LOSS_FUNCTION if pipelined or mesh.tensor > 1 else "",
        _SCHEDULE if pipelined else "",
        _LOOP,
        "".join(_step(mesh)),
        _END,
    ]
    return "".join(part.format(**values) if part[:3] != '"""' else part for part in parts)


def _values(config: GPTConfig, mesh: Mesh, seq_len: int, steps: int) -> dict[str, Any]:
    """Return what the parts of the script leave open."""
    pipelined = mesh.pipeline > 1
    per_context = seq_len // mesh.context
    return {
        "eps": config.norm_eps,
        "run": "run" if mesh.checkpointed else "forward",
        "grouped": ", enable_gqa=True" if config.kv_heads < config.heads else "",
        "tied": "end[-1].weight = start[0].weight\n" if config.tied else "",
        "shards": 'mesh["data", "context"]._flatten()' if mesh.context > 1 else 'mesh["data"]',
        "reshard": not pipelined,
        "loss": _LOSS.format("logits"),
        "logits": _LOGITS if mesh.tensor > 1 else "",
        "own_words": f"V // {mesh.tensor}" if mesh.tensor > 1 else "V",
        "context_tokens": per_context,
        "own_tokens": per_context // mesh.tensor,
        "sequences": "SEQUENCES * MICRO_BATCHES" if pipelined else "SEQUENCES",
        "steps": steps,
        "report": _PIPELINE_REPORT if pipelined else _REPORT,
    }


def _settings(config: GPTConfig, mesh: Mesh, sequences: int, seq_len: int) -> Iterator[str]:
    widths = f"{config.hidden_size}, {config.intermediate_size}"
    yield f"V, C, I, L = {config.vocab_size}, {widths}, {config.layers}"
    yield f"H, KV, D = {config.heads}, {config.kv_heads}, {config.head_dim}"
    yield f"T, SEQUENCES = {seq_len}, {sequences}  # of a sequence, of a micro-batch"
    if mesh.pipeline > 1:
        yield f"STAGES, MICRO_BATCHES = {mesh.pipeline}, {mesh.micro_batches}"
    sizes = mesh.sizes
    shape = ", ".join(map(str, sizes.values()))
    names = ", ".join(f'"{name}"' for name in sizes)
    comma = "," if len(sizes) == 1 else ""
    yield 'device = "cuda" if torch.cuda.is_available() else "cpu"'
    made = f"mesh = dist.init_device_mesh(device, ({shape}{comma}), mesh_dim_names="
    if len(line := f"{made}({names}{comma}))") <= LINE:
        yield line
    else:
        yield f"names = ({names}{comma})"
        yield f"{made}names)"
    power = f"{config.rope_theta} ** (-torch.arange(0, D, 2) / D)"
    yield f"angles = torch.outer(torch.arange(T), {power}).to(device)"


def _step(mesh: Mesh) -> Iterator[str]:
    """Yield the lines of a step, within what divides sequences and the loss."""
    around = ["parallel.loss_parallel()"] if mesh.tensor > 1 else []
    if mesh.context > 1:
        yield "    buffers = dict(buffers=[tokens, targets, angles], buffer_seq_dims=[1, 1, 0])\n"
        around.insert(0, 'context_parallel(mesh["context"], **buffers)')
    if around:
        yield f"    with {', '.join(around)}:\n"
    indent = "        " if around else "    "
    loss = "loss_of(model(tokens), targets)" if mesh.tensor > 1 else _LOSS.format("model(tokens)")
    step = _PIPELINE_STEP if mesh.pipeline > 1 else _STEP.format(loss=loss)
    for line in step.splitlines():
        yield f"{indent}{line}\n"


def _imports(mesh: Mesh) -> Iterator[str]:
    yield from ("import torch", "import torch.distributed as dist")
    yield from ("import torch.nn.functional as F", "from torch import nn")
    yield "from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard"
    if mesh.pipeline > 1:
        yield "from torch.distributed.pipelining import PipelineStage, Schedule1F1B"
    if mesh.tensor > 1:
        yield "from torch.distributed.tensor import DTensor, Replicate, Shard, parallel"
    if mesh.context > 1:
        yield "from torch.distributed.tensor.experimental import context_parallel"
    if mesh.checkpointed:
        yield "from torch.utils.checkpoint import checkpoint"
