"""Code that the tests of parallel training run in real ranks."""

import os
import signal
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

import memlab
from memlab.internals.torch_internals import storage_use_count
from memlab.reference import ring_attention, tensor_parallel
from memlab.reference.pipeline import gpipe, one_forward_one_backward, run_stage
from memlab.reference.tensor_parallel import (
    column_parallel,
    column_parallel_gather,
    row_parallel,
    row_parallel_scatter,
    sequence_parallel_norm,
    shard,
)
from memlab.reference.tiled_attention import flash
from memlab.zero import processes
from memlab.zero.formulas import ring_elements

TIME_OUT = 60  # of a collective
LAUNCH_TIME_OUT = 300  # generous: the machine may be busy
DOUBLE = 8  # bytes


def seeded(*shape: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator, dtype=torch.float64)


def saved_bytes_of(trace: memlab.Trace) -> int:
    """Return the bytes that forward allocated and backward found."""
    born = [e for e in trace.events if e.bytes > 0 and e.phase == "forward"]
    return sum(event.bytes for event in born if event.category == "activations")


@contextmanager
def counted() -> Iterator[Counter[str]]:
    """Yield the calls of each kind of collective, and the bytes that this rank of a ring sends."""
    found: Counter[str] = Counter()
    kept = {name: getattr(dist, name) for name in ("all_reduce", "all_gather", "reduce_scatter")}

    def counting(name: str) -> Callable[..., None]:
        passes = 2 if name == "all_reduce" else 1

        def one(*given: Tensor | list[Tensor]) -> None:
            tensors = [x for each in given for x in (each if isinstance(each, list) else [each])]
            whole = next((each for each in given if isinstance(each, list)), tensors)
            elements = ring_elements(sum(x.numel() for x in whole), dist.get_world_size())
            found[name] += 1
            found["bytes"] += passes * elements * tensors[0].element_size()
            with released(tensors):
                kept[name](*map(viewed, given))

        return one

    for name in kept:
        setattr(dist, name, counting(name))
    try:
        yield found
    finally:
        for name, call in kept.items():
            setattr(dist, name, call)


def viewed(given: Tensor | list[Tensor]) -> Tensor | list[Tensor]:
    """Return views: gloo alone holds them, so that the storage's use count shows its release."""
    return list(map(viewed, given)) if isinstance(given, list) else given.view_as(given)


@contextmanager
def released(tensors: list[Tensor]) -> Iterator[None]:
    """Wait until gloo's thread has released the tensors, a moment after the collective."""
    storages = {x.untyped_storage()._cdata for x in tensors}
    users = {storage: storage_use_count(storage) for storage in storages}
    yield
    while any(storage_use_count(storage) > users[storage] for storage in storages):
        time.sleep(5e-5)


@contextmanager
def sends() -> Iterator[list[tuple[int, int]]]:
    """Yield (bytes, target) of each tensor that this process sends to another."""
    found, kept = [], dist.isend

    def isend(x: Tensor, target: int) -> Any:
        found.append((x.nbytes, target))
        return kept(x, target)

    dist.isend = isend
    try:
        yield found
    finally:
        dist.isend = kept


def all_parts() -> dict[str, Any]:
    """Run everything in one launch."""
    with processes.joined("gloo", timeout=TIME_OUT):
        return {"tensor": tensor_part(), "pipeline": pipeline_part(), "ring": ring_part()}


# ------------------------------------------------------------------ tensor and sequence parallelism

TOKENS, BATCH, HIDDEN, HEADS, INTERMEDIATE = 8, 3, 8, 4, 20
X, DOUT = seeded(TOKENS, BATCH, HIDDEN), seeded(TOKENS, BATCH, HIDDEN, seed=1)

# How one process, tensor parallelism and sequence parallelism do (column, row, norm).
PLAIN = F.linear, F.linear, lambda x, weight: F.rms_norm(x, x.shape[-1:], weight, 1e-6)
TENSOR = column_parallel, row_parallel, PLAIN[2]
SEQUENCE = column_parallel_gather, row_parallel_scatter, sequence_parallel_norm
WAYS = {"tensor": TENSOR, "sequence": SEQUENCE}

# The dimension that each weight is split in; None: every rank has all of it.
HALF = "norm2", "up", "down"
SPLIT = {"norm1": None, "qkv": 1, "out": 1, "norm2": None, "up": 0, "down": 1}


def whole_weights() -> dict[str, Tensor]:
    return {
        "norm1": 1 + 0.1 * seeded(HIDDEN, seed=2),
        "qkv": seeded(3, HIDDEN, HIDDEN, seed=3),  # queries, keys and values
        "out": seeded(HIDDEN, HIDDEN, seed=4),
        "norm2": 1 + 0.1 * seeded(HIDDEN, seed=5),
        "up": seeded(INTERMEDIATE, HIDDEN, seed=6),
        "down": seeded(HIDDEN, INTERMEDIATE, seed=7),
    }


def split_weights() -> dict[str, Tensor]:
    whole = whole_weights()
    return {n: x if SPLIT[n] is None else shard(x, SPLIT[n]) for n, x in whole.items()}


class Block(nn.Module):
    """A transformer block for x (T, B, C); every rank of a parallel way has some of the heads."""

    def __init__(self, weights: dict[str, Tensor], way: tuple[Any, ...]) -> None:
        super().__init__()
        for name, weight in weights.items():
            self.register_parameter(name, nn.Parameter(weight))
        self.column, self.row, self.norm = way

    def forward(self, x: Tensor) -> Tensor:
        qkv = self.column(self.norm(x, self.norm1), self.qkv.flatten(0, 1))
        q, k, v = qkv.unflatten(-1, (3, -1, HIDDEN // HEADS)).permute(2, 1, 3, 0, 4)
        heads = flash(q, k, v, 4, 0).permute(2, 0, 1, 3).flatten(-2)  # (T, B, C/R)
        x = x + self.row(heads, self.out)
        return x + self.mlp(x)

    def mlp(self, x: Tensor) -> Tensor:
        up = self.column(self.norm(x, self.norm2), self.up)
        return self.row(F.gelu(up), self.down)


def outcome(block: nn.Module, x: Tensor, dout: Tensor) -> dict[str, Tensor]:
    """Return the output and the gradients of the input and of each weight."""
    x = x.clone().requires_grad_()
    out = block(x)
    out.backward(dout)
    gradients = {name: w.grad for name, w in block.named_parameters()}
    return {"output": out.detach(), "input": x.grad, **gradients}


def tensor_part() -> dict[str, Any]:
    """Run the block both ways, then with mistakes, then the same MLP by torch."""
    return {
        **{name: run_block(way) for name, way in WAYS.items()},
        "wrong": {name: mistaken(*case) for name, case in MISTAKES.items()},
        "torch": {name: mlp_by_torch(name) for name in WAYS},
        "refused": refused(),
    }


def run_block(way: tuple[Any, ...]) -> dict[str, Any]:
    x, dout = (X, DOUT) if way is TENSOR else (shard(X, 0), shard(DOUT, 0))
    block = Block(split_weights(), way)
    with counted() as sent, memlab.meter(block) as running:
        values = outcome(block, x, dout)
    at_end = running.trace.at_end
    held = {name: at_end[name] for name in ("parameters", "gradients")}
    return {"values": values, "saved": saved_bytes_of(running.trace), "held": held, "sent": sent}


# Mistakes: the replaced function of the reference, its replacement, and the way it is tested.
MISTAKES = {
    "no all-reduce in backward": ("copy_to_ranks", lambda x: x, TENSOR),
    "an all-reduce in both passes": (
        "sum_over_ranks",
        lambda x: tensor_parallel.Conjugates.apply(
            x, tensor_parallel.all_reduce, tensor_parallel.all_reduce
        ),
        TENSOR,
    ),
    "each rank its own norm gradient": ("copy_to_ranks", lambda x: x, SEQUENCE),
}


def mistaken(name: str, mistake: Any, way: tuple[Any, ...]) -> dict[str, Tensor]:
    kept = getattr(tensor_parallel, name)
    setattr(tensor_parallel, name, mistake)
    try:
        return run_block(way)["values"]
    finally:
        setattr(tensor_parallel, name, kept)


def local(x: Tensor) -> Tensor:
    """Return this rank's part of a DTensor, and the values of a collective that has been started.

    A gradient with partial sums on the ranks becomes the sum.
    """
    from torch.distributed._functional_collectives import AsyncCollectiveTensor
    from torch.distributed.tensor import DTensor, Replicate

    if isinstance(x, DTensor):
        x = x.redistribute(placements=[Replicate()]) if x.placements[0].is_partial() else x
        x = x.to_local()
    return x.wait() if isinstance(x, AsyncCollectiveTensor) else x


@contextmanager
def saved_storages(module: nn.Module) -> Iterator[dict[int, int]]:
    """Yield the bytes of the storages that autograd saves, without weights, by address.

    The meter also counts what gloo's thread holds a moment longer than torch's modules.
    """
    weights = {local(w.detach()).untyped_storage().data_ptr() for w in module.parameters()}
    found, alive = {}, []

    def pack(x: Tensor) -> Tensor:
        storage = local(x.detach()).untyped_storage()
        alive.append(storage)
        if storage.data_ptr() not in weights:
            found[storage.data_ptr()] = storage.nbytes()
        return x

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        yield found


def refused() -> str:
    try:
        shard(torch.zeros(7, 3), 0)
    except ValueError as error:
        return str(error)
    return ""


def dying() -> None:
    """Kill rank 1 when its backward pass reaches the first row-parallel matmul."""
    with processes.joined("gloo", timeout=TIME_OUT) as rank:
        block = Block(split_weights(), TENSOR)
        if rank == 1:
            block.out.register_hook(lambda gradient: os.kill(os.getpid(), signal.SIGKILL))
        outcome(block, X, DOUT)


class MLP(nn.Module):
    """The second half of the block without the sum, from torch's own modules."""

    def __init__(self) -> None:
        super().__init__()
        self.norm2 = nn.RMSNorm(HIDDEN, 1e-6)
        self.up = nn.Linear(HIDDEN, INTERMEDIATE, bias=False)
        self.down = nn.Linear(INTERMEDIATE, HIDDEN, bias=False)
        whole = whole_weights()
        weights = {f"{name}.weight": whole[name] for name in HALF}
        self.load_state_dict(weights, assign=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.gelu(self.up(self.norm2(x))))


class OurMLP(Block):
    """The same half of the block from the reference."""

    def __init__(self, way: tuple[Any, ...]) -> None:
        super().__init__({n: w for n, w in split_weights().items() if n in HALF}, way)

    def forward(self, x: Tensor) -> Tensor:
        return self.mlp(x)


def mlp_by_torch(name: str) -> dict[str, Any]:
    """Return (values, saved bytes, trace) of the MLP by torch and by the reference."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        RowwiseParallel,
        SequenceParallel,
        parallelize_module,
    )

    plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
    if name == "sequence":
        plan = {
            "norm2": SequenceParallel(sequence_dim=0),
            "up": ColwiseParallel(input_layouts=Shard(0)),
            "down": RowwiseParallel(output_layouts=Shard(0)),
        }
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    theirs, ours = parallelize_module(MLP(), mesh, plan), OurMLP(WAYS[name])
    x, dout = (X, DOUT) if name == "tensor" else (shard(X, 0), shard(DOUT, 0))
    found = {}
    for whose, mlp in (("theirs", theirs), ("ours", ours)):
        with saved_storages(mlp) as storages:
            values = outcome(mlp, x, dout)
        plain = {key.removesuffix(".weight"): local(x) for key, x in values.items()}
        mlp.zero_grad()
        with memlab.meter(mlp) as running:
            outcome(mlp, x, dout)
        found[whose] = plain, sum(storages.values()), running.trace
    return found


# ------------------------------------------------------------------ pipelines

MICRO_ROWS, WIDTH, LAYERS, MICRO_BATCHES = 6, 8, 4, 6
LIKE = torch.empty(MICRO_ROWS, WIDTH, dtype=torch.float64)
INPUTS = [seeded(MICRO_ROWS, WIDTH, seed=n) for n in range(MICRO_BATCHES)]
TARGETS = [seeded(MICRO_ROWS, WIDTH, seed=10 + n) for n in range(MICRO_BATCHES)]
ORDERS = {"1F1B": one_forward_one_backward, "GPipe": gpipe}


class Layer(nn.Module):
    """x + W2 gelu(W1 x)."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.up = nn.Parameter(seeded(4 * WIDTH, WIDTH, seed=20 + seed))
        self.down = nn.Parameter(seeded(WIDTH, 4 * WIDTH, seed=30 + seed))

    def forward(self, x: Tensor) -> Tensor:
        return x + F.linear(F.gelu(F.linear(x, self.up)), self.down)


def part_of_layers(stage: int, stages: int) -> nn.Sequential:
    each = LAYERS // stages
    return nn.Sequential(*(Layer(n) for n in range(stage * each, (stage + 1) * each)))


def loss_of(y: Tensor, number: int) -> Tensor:
    return (y - TARGETS[number]).square().sum() / MICRO_BATCHES


def gradients_of(part: nn.Module) -> list[Tensor]:
    return [weight.grad.clone() for weight in part.parameters()]


def pipeline_part() -> dict[str, Any]:
    """Run a step of each order, by the reference and by torch."""
    return {
        **{name: run_order(order) for name, order in ORDERS.items()},
        "one micro-batch": run_order(one_forward_one_backward, micro_batches=1),
        "swapped": run_order(swapped_on_stage_0),
        "torch": {name: run_by_torch(name) for name in ORDERS},
    }


def run_order(order_of: Callable[..., Any], micro_batches: int = MICRO_BATCHES) -> dict[str, Any]:
    """Run two steps; the second is metered, so that all gradients exist."""
    stage, stages = dist.get_rank(), dist.get_world_size()
    part, order = part_of_layers(stage, stages), order_of(stage, stages, micro_batches)
    given = part, order, INPUTS if stage == 0 else (), loss_of, LIKE
    losses = run_stage(*given)
    gradients = gradients_of(part)
    with sends() as sent, memlab.meter(part) as running:
        run_stage(*given)
    return {
        "sent": sent,
        "losses": losses,
        "gradients": gradients,
        "peak": running.trace.peak_bytes,
        "at peak": running.trace.at_peak,
    }


def swapped_on_stage_0(stage: int, *sizes: int) -> list[Any]:
    """Return 1F1B's order; on stage 0 the first two backward passes are exchanged by mistake."""
    order = one_forward_one_backward(stage, *sizes)
    exchanged = {("backward", 0): ("backward", 1), ("backward", 1): ("backward", 0)}
    return [exchanged.get(each, each) for each in order] if stage == 0 else order


def run_by_torch(name: str) -> dict[str, Any]:
    """Do as run_order, by torch.distributed.pipelining."""
    from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe

    stage, stages = dist.get_rank(), dist.get_world_size()
    part = part_of_layers(stage, stages)
    schedule_of = {"1F1B": Schedule1F1B, "GPipe": ScheduleGPipe}[name]

    def loss_of_torch(y: Tensor, target: Tensor) -> Tensor:
        return (y - target).square().sum() / MICRO_BATCHES

    schedule = schedule_of(
        PipelineStage(part, stage, stages, torch.device("cpu")),
        MICRO_BATCHES,
        loss_fn=loss_of_torch,
        scale_grads=False,
    )

    def step() -> list[Tensor]:
        losses: list[Tensor] = []
        given = (torch.cat(INPUTS),) if stage == 0 else ()
        if stage == stages - 1:
            schedule.step(*given, target=torch.cat(TARGETS), losses=losses)
        else:
            schedule.step(*given)
        return [loss.detach() for loss in losses]

    losses = step()
    gradients = gradients_of(part)
    with memlab.meter(part) as running:
        step()
    return {
        "losses": losses,
        "gradients": gradients,
        "peak": running.trace.peak_bytes,
        "at peak": running.trace.at_peak,
    }


# ------------------------------------------------------------------ rings

SEQUENCE_LENGTH, TILE = 32, 3
SHAPE = 2, 3, SEQUENCE_LENGTH, 4  # batch, heads, tokens, head dimension
QKV = [seeded(*SHAPE, seed=n) for n in range(3)]
DATTENTION = seeded(*SHAPE, seed=3)


def ring_part() -> dict[str, Any]:
    """Run ring attention by the reference, with mistakes and by torch."""
    return {
        "ours": run_ring(),
        "wrong": {name: mistaken_ring(case) for name, case in RING_MISTAKES.items()},
        "torch": ring_of_torch(),
        "not supported": context_parallel_by_torch(),
    }


def run_ring() -> dict[str, Any]:
    q, k, v = (shard(x, -2).requires_grad_() for x in QKV)
    dout = shard(DATTENTION, -2)
    with sends() as sent_forward, memlab.meter() as forward:
        out = ring_attention.ring(q, k, v, TILE)
    with sends() as sent_backward, memlab.meter() as backward:
        out.backward(dout)
    return {
        "values": [out.detach(), q.grad, k.grad, v.grad],
        "held": forward.trace.live_bytes,
        "peaks": (forward.trace.peak_bytes, backward.trace.peak_bytes),
        "sent": (sent_forward, sent_backward),
    }


def sum_of_blocks(out: Tensor, lse: Tensor, out_b: Tensor, lse_b: Tensor) -> tuple[Tensor, ...]:
    """Forget that each block's output is divided by its own row sum."""
    return out + out_b, torch.logaddexp(lse, lse_b)


def all_blocks(k: Tensor, v: Tensor) -> Iterator[tuple[int, Tensor, Tensor]]:
    """Yield the same as ring_blocks, from an all-gather."""
    ranks, rank = dist.get_world_size(), dist.get_rank()
    gathered = [[torch.empty(x.shape, dtype=x.dtype) for _ in range(ranks)] for x in (k, v)]
    for parts, x in zip(gathered, (k, v), strict=True):
        dist.all_gather(parts, x.contiguous())
    for step in range(ranks):
        yield step, gathered[0][rank - step], gathered[1][rank - step]


# What of the reference is replaced, by what.
RING_MISTAKES = {
    "blocks are added without weights": {"merge": sum_of_blocks},
    "gradients do not go round": {
        "ring_blocks": all_blocks,
        "pass_to_next": lambda *tensors: lambda: tensors,
    },
}


def mistaken_ring(mistakes: dict[str, Any]) -> list[Tensor]:
    kept = {name: getattr(ring_attention, name) for name in mistakes}
    vars(ring_attention).update(mistakes)
    try:
        return run_ring()["values"]
    finally:
        vars(ring_attention).update(kept)


def ring_of_torch() -> list[Tensor]:
    """Run torch's ring with the CPU's attention: forward and backward, without load balancing."""
    from torch.distributed.tensor.experimental._context_parallel import _attention

    q, k, v, dout = (shard(x, -2) for x in (*QKV, DATTENTION))
    aten, group = torch.ops.aten, dist.group.WORLD
    _attention._cp_options.enable_load_balance = False
    _attention._cp_options.convert_to_f32 = False
    operator = aten._scaled_dot_product_flash_attention_for_cpu.default
    out, lse, *_ = _attention._templated_ring_attention(group, 2, operator, q, k, v, is_causal=True)
    operator = aten._scaled_dot_product_flash_attention_for_cpu_backward.default
    saved = q, k, v, out, lse
    gradients = _attention._templated_ring_attention_backward(
        group, 2, operator, dout, "grad_out", *saved, is_causal=True, dropout_p=0.0
    )
    return [out, *gradients]


def context_parallel_by_torch() -> str:
    """Return the error of torch's public context parallelism on the CPU."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.experimental import context_parallel

    qkv = [x.clone() for x in QKV]
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    try:
        with context_parallel(mesh, buffers=qkv, buffer_seq_dims=[2] * 3):
            F.scaled_dot_product_attention(*qkv, is_causal=True)
    except NotImplementedError as error:
        return str(error)
    return ""
