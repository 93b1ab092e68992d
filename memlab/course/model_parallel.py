"""Train one small transformer each way on R processes, for Day 18.

    found = run_ranks("memlab.course.model_parallel:all_ways", 2)

For each way, each rank returns the gradients of its weights, and the bytes that it holds, saves and
sends in a step. All ways train on the same 4 sequences of 16 tokens. They divide:

    one         nothing: each rank computes everything
    data        the sequences
    tensor      heads, the MLP's intermediate elements, the vocabulary of the logits
    sequence    tensor, and tokens between the matmuls
    context     the tokens; ring attention
    GPipe       the layers; micro-batches of one sequence
    1F1B        the same; backward passes begin earlier

The embedding and the weights of norms are whole on every rank that has them.
"""

import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

from memlab.internals.replacing import replaced
from memlab.internals.torch_internals import storage_use_count
from memlab.metering import meter
from memlab.reference import pipeline, tensor_parallel
from memlab.reference.ring_attention import ring
from memlab.reference.tensor_parallel import shard
from memlab.reference.tiled_attention import flash
from memlab.trace import Trace
from memlab.zero import processes
from memlab.zero.formulas import ring_elements

TOKENS, BATCH, HIDDEN, HEADS, INTERMEDIATE, VOCABULARY, LAYERS = 16, 4, 32, 4, 96, 512, 2
TILE = 8
EACH = 4  # bytes of an element in float32
TARGETS = TOKENS * BATCH


class Way(NamedTuple):
    """How a block computes: x has all tokens, or this rank's."""

    column: Callable[[Tensor, Tensor], Tensor]
    row: Callable[[Tensor, Tensor], Tensor]
    norm: Callable[[Tensor, Tensor], Tensor]
    attend: Callable[[Tensor, Tensor, Tensor], Tensor]
    splits_matrices: bool = False


def plain_norm(x: Tensor, weight: Tensor) -> Tensor:
    return F.rms_norm(x, x.shape[-1:], weight, 1e-6)


def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return flash(q, k, v, TILE, 0)


ONE = Way(F.linear, F.linear, plain_norm, attend)
TENSOR = Way(
    tensor_parallel.column_parallel, tensor_parallel.row_parallel, plain_norm, attend, True
)
SEQUENCE = Way(
    tensor_parallel.column_parallel_gather,
    tensor_parallel.row_parallel_scatter,
    tensor_parallel.sequence_parallel_norm,
    attend,
    True,
)
CONTEXT = ONE._replace(attend=lambda q, k, v: ring(q, k, v, TILE))


# ------------------------------------------------------------------ the model


class Embedding(nn.Module):
    def __init__(self, weight: Tensor, way: Way) -> None:
        super().__init__()
        self.weight, self.way = nn.Parameter(weight), way

    def forward(self, tokens: Tensor) -> Tensor:  # (T, B)
        is_divided = self.way is SEQUENCE
        weight = tensor_parallel.copy_to_ranks(self.weight) if is_divided else self.weight
        return F.embedding(shard(tokens, 0) if is_divided else tokens, weight)


class Block(nn.Module):
    """Attention and an MLP, without biases; x (T, B, C) or (T/R, B, C)."""

    def __init__(self, weights: dict[str, Tensor], way: Way) -> None:
        super().__init__()
        for name, weight in weights.items():
            self.register_parameter(name, nn.Parameter(weight))
        self.way = way

    def forward(self: Any, x: Tensor) -> Tensor:
        column, row, norm, attend, _ = self.way
        qkv = column(norm(x, self.norm1), self.qkv.flatten(0, 1))  # (T, B, 3·C/R)
        q, k, v = qkv.unflatten(-1, (3, -1, HIDDEN // HEADS)).permute(2, 1, 3, 0, 4)
        heads = attend(q, k, v).permute(2, 0, 1, 3).flatten(-2)  # (T, B, C/R)
        x = x + row(heads, self.out)
        return x + row(F.gelu(column(norm(x, self.norm2), self.up)), self.down)


class Head(nn.Module):
    """The last norm, the logits (T, B, V/R) and their loss."""

    def __init__(self, weights: dict[str, Tensor], way: Way) -> None:
        super().__init__()
        self.norm, self.unembedding = (nn.Parameter(weights[n]) for n in ("norm", "unembedding"))
        self.way = way

    def forward(self, x: Tensor, targets: Tensor) -> Tensor:
        logits = self.way.column(self.way.norm(x, self.norm), self.unembedding)
        return Loss.apply(logits, targets, self.way.splits_matrices) / TARGETS


class Loss(torch.autograd.Function):
    """The sum of the cross-entropies; each rank may have 1/R of the vocabulary's logits."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, targets: Tensor, is_divided: bool) -> Tensor:
        own = logits.shape[-1]
        place = targets - (dist.get_rank() * own if is_divided else 0)
        ctx.inside = (place >= 0) & (place < own)
        ctx.place = place.clamp(0, own - 1)[..., None]
        row_max, total = logits.amax(-1, keepdim=True), lambda x: x
        if is_divided:
            dist.all_reduce(row_max, dist.ReduceOp.MAX)
            total = tensor_parallel.all_reduce
        target = total(logits.gather(-1, ctx.place)[..., 0] * ctx.inside)
        probs = (logits - row_max).exp_()
        row_sum = total(probs.sum(-1, keepdim=True))
        ctx.save_for_backward(probs.div_(row_sum))
        return (row_sum.log() + row_max)[..., 0].sub_(target).sum()

    @staticmethod
    def backward(ctx: Any, dloss: Tensor) -> tuple[Tensor, None, None]:
        (probs,) = ctx.saved_tensors
        dlogits = probs.scatter_add(-1, ctx.place, -ctx.inside[..., None].to(probs.dtype))
        return dlogits.mul_(dloss), None, None


# The dimension of each weight that tensor parallelism divides; None: every rank has all of it.
SPLIT = {
    **dict.fromkeys(("embedding", "norm1", "norm2", "norm")),
    **{"qkv": 1, "out": 1, "up": 0, "down": 1, "unembedding": 0},
}


def weights() -> dict[str, Tensor]:
    """Return all weights of the model by name, the same in every process."""
    C, drawn = HIDDEN, torch.Generator().manual_seed(0)
    shapes = {
        **{"qkv": (3, C, C), "out": (C, C), "up": (INTERMEDIATE, C), "down": (C, INTERMEDIATE)},
        **{"norm1": (C,), "norm2": (C,)},
    }
    shapes = {
        "embedding.weight": (VOCABULARY, C),
        **{f"blocks.{n}.{name}": shape for n in range(LAYERS) for name, shape in shapes.items()},
        "head.norm": (C,),
        "head.unembedding": (VOCABULARY, C),
    }
    return {name: 0.2 * torch.randn(shape, generator=drawn) for name, shape in shapes.items()}


def split_of(name: str) -> int | None:
    """Return the dimension that tensor parallelism splits in a weight."""
    return SPLIT[name.removesuffix(".weight").rpartition(".")[2]]


class Model(nn.Module):
    """The layers of a stage, or all layers."""

    def __init__(self, way: Way, stage: int = 0, stages: int = 1) -> None:
        super().__init__()
        own = weights()
        if way.splits_matrices:
            own = {n: w if (dim := split_of(n)) is None else shard(w, dim) for n, w in own.items()}
        is_first, is_last = stage == 0, stage == stages - 1
        numbers = range(LAYERS * stage // stages, LAYERS * (stage + 1) // stages)
        self.embedding = Embedding(own["embedding.weight"], way) if is_first else None
        self.blocks = nn.ModuleDict({str(n): Block(_of(own, f"blocks.{n}."), way) for n in numbers})
        self.head: Any = Head(_of(own, "head."), way) if is_last else None

    def forward(self, x: Tensor, targets: Tensor | None = None) -> Tensor:
        x = x if self.embedding is None else self.embedding(x)
        for block in self.blocks.values():
            x = block(x)
        return x if targets is None else self.head(x, targets)


def _of(weights: dict[str, Tensor], prefix: str) -> dict[str, Tensor]:
    return {n.removeprefix(prefix): w for n, w in weights.items() if n.startswith(prefix)}


def batch() -> tuple[Tensor, Tensor]:
    """Return tokens and targets, both (T, B)."""
    drawn = torch.Generator().manual_seed(1)
    tokens = torch.randint(VOCABULARY, (TOKENS + 1, BATCH), generator=drawn)
    return tokens[:-1].clone(), tokens[1:].clone()


# ------------------------------------------------------------------ what a rank sends


@contextmanager
def counted() -> Iterator[Counter[str]]:
    """Yield the bytes that this rank of a ring sends by each kind of collective.

    Each collective returns when gloo's thread has released its tensors, so that the meter never
    counts them a moment longer.
    """
    sent: Counter[str] = Counter()

    def counting(name: str, real: Callable[..., Any]) -> Callable[..., Any]:
        passes = 2 if name == "all_reduce" else 1

        def one(*given: Any) -> None:
            lists = [each for each in given if isinstance(each, list)]
            tensors = [x for each in lists for x in each] or [given[0]]
            elements = ring_elements(sum(x.numel() for x in tensors), dist.get_world_size())
            sent[name] += passes * elements * tensors[0].element_size()
            with _released([x for x in (*tensors, *given) if isinstance(x, Tensor)]):
                real(*map(_viewed, given))

        return one

    def counting_isend(real: Callable[..., Any]) -> Callable[..., Any]:
        def isend(x: Tensor, target: int) -> dist.Work:
            sent["isend"] += x.nbytes
            return real(x, target)

        return isend

    names = ("all_reduce", "all_gather", "reduce_scatter")
    functions = {(dist, name): partial(counting, name) for name in names}
    with replaced({**functions, (dist, "isend"): counting_isend}):
        yield sent


def _viewed(given: Any) -> Any:
    """Return views: gloo alone holds them, so the storage's use count shows their release."""
    if isinstance(given, list):
        return list(map(_viewed, given))
    return given.view_as(given) if isinstance(given, Tensor) else given


@contextmanager
def _released(tensors: list[Tensor]) -> Iterator[None]:
    storages = {x.untyped_storage()._cdata for x in tensors}
    users = {storage: storage_use_count(storage) for storage in storages}
    yield
    while any(storage_use_count(storage) > users[storage] for storage in storages):
        time.sleep(5e-5)


# ------------------------------------------------------------------ the ways

Step = Callable[[Model], None]


def whole_step(model: Model) -> None:
    model(*batch()).backward()


def share_of(dim: int) -> Step:
    """Return a step on this rank's part of the batch; the gradients are summed over ranks."""

    def step(model: Model) -> None:
        model(*(shard(x, dim) for x in batch())).backward()
        for weight in model.parameters():
            own: Any = weight.grad
            weight.grad = tensor_parallel.all_reduce(own)

    return step


def in_order(order_of: Callable[[int, int, int], list[pipeline.Pass]]) -> Step:
    """Return a step of a stage, with one sequence per micro-batch."""

    def step(model: Model) -> None:
        tokens, targets = (x.split(1, 1) for x in batch())
        order = order_of(dist.get_rank(), dist.get_world_size(), BATCH)
        like = torch.empty(TOKENS, 1, HIDDEN)

        def loss_of(y: Tensor, number: int) -> Tensor:
            return model.head(y, targets[number])

        pipeline.run_stage(model, order, tokens, loss_of, like)

    return step


def ways(rank: int, ranks: int) -> dict[str, tuple[Callable[[], Model], Step]]:
    """Return for each way a function that makes this rank's model, and the step up to backward."""
    return {
        "one": (lambda: Model(ONE), whole_step),
        "data": (lambda: Model(ONE), share_of(1)),
        "tensor": (lambda: Model(TENSOR), whole_step),
        "sequence": (lambda: Model(SEQUENCE), whole_step),
        "context": (lambda: Model(CONTEXT), share_of(0)),
        "GPipe": (lambda: Model(ONE, rank, ranks), in_order(pipeline.gpipe)),
        "1F1B": (lambda: Model(ONE, rank, ranks), in_order(pipeline.one_forward_one_backward)),
    }


def saved(trace: Trace, module: str) -> int:
    """Return the most bytes that a module's forward passes have saved for backward at once."""
    alive = most = 0
    for event in trace.events:
        if event.category == "activations" and event.module.startswith(module):
            alive += event.bytes
            most = max(most, alive)
    return most


def measured(make: Callable[[], Model], step: Step) -> dict[str, Any]:
    """Take two steps; the second is metered, so that all state exists."""
    model = make()
    optimizer = torch.optim.AdamW(model.parameters(), foreach=False)
    step(model)
    gradients = {name: own.clone() for name, own in gradients_of(model).items()}
    optimizer.step()
    optimizer.zero_grad()
    with counted() as sent, meter(model, optimizer) as running:
        step(model)
        optimizer.step()
    at_end = running.trace.at_end
    held = {name: at_end[name] for name in ("parameters", "gradients", "optimizer_state")}
    of_blocks, of_head = (saved(running.trace, module) for module in ("blocks", "head"))
    bytes_ = held | {"activations": of_blocks, "logits": of_head, "sent": sent.total()}
    return {"bytes": bytes_, "sent": dict(sent), "gradients": gradients}


def sent_by_a_block(way: Way) -> dict[str, int]:
    """Return the bytes that this rank sends in a block's forward and backward pass."""
    block = Model(way).blocks["0"]
    x = torch.randn(TOKENS, BATCH, HIDDEN)
    x = (shard(x, 0) if way is SEQUENCE else x).requires_grad_()
    with counted() as sent:
        block(x).sum().backward()
    return dict(sent)


def all_ways() -> dict[str, dict[str, Any]]:
    """Take the steps of each way on this rank."""
    with processes.joined("gloo", timeout=60) as rank:
        by_name = ways(rank, dist.get_world_size())
        found = {name: measured(*way) for name, way in by_name.items()}
        for name, way in (("tensor", TENSOR), ("sequence", SEQUENCE)):
            found[name]["sent by a block"] = sent_by_a_block(way)
        return found


def right_gradients() -> dict[str, Tensor]:
    """Return the gradients of all weights in one process."""
    model = Model(ONE)
    whole_step(model)
    return gradients_of(model)


def gradients_of(model: nn.Module) -> dict[str, Any]:
    return {name: weight.grad for name, weight in model.named_parameters()}
