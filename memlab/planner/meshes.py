"""Search the ways to divide a Llama over several GPUs: data × tensor × pipeline × context.

    meshes(config, gpus, seq_len)     all ways, with and without checkpointed blocks
    rank_bytes(config, mesh, …)       the bytes of a rank of each pipeline stage, by category
    sent_bytes(config, mesh, …)       the bytes that it sends in a step, within and between nodes

The training is the script of `memlab.planner.mesh_script`: FSDP2 with float32 weights, gathered in
bfloat16, gradients reduced in float32, AdamW, tensor parallelism with sequence parallelism, and
1F1B. A stage has P weights after tensor parallelism, and s = data · context ranks share them.

    weights, state, gradients   4·P/s + 8·P/s + 4·P/s
    gathered                    2·P of a pipeline, which keeps them for all micro-batches; without
                                one, the ends and two blocks
    unreduced gradients         4·P of a pipeline, which adds micro-batches up; without one, the
                                ends, and a block in bfloat16 and float32
    saved                       f·(a micro-batch's blocks), f = min(micro-batches, p − stage)
    optimizer                   4·P/s, the square roots of all second moments

The rank with the most bytes is most often one of the first stage, which has most micro-batches in
flight, or of the last, which has the logits. The time of a step is estimated by operations at
UTILIZATION and bytes at the links' bandwidths. FSDP's collectives overlap with computation, and the
others don't. A pipeline waits for (p − 1)/(m + p − 1) of a step.

Source   Narayanan et al. 2021, arXiv 2104.04473, section 3 (the mesh, its bubble); Zhao et al.
         2023, arXiv 2304.11277 (FSDP); the formulas of memlab.planner.parallel.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product

from memlab.configs.shapes import GPTConfig
from memlab.configs.torchrun import MAX_GPUS_PER_MACHINE
from memlab.planner.cards import Card
from memlab.planner.parallel import (
    gathered_context_bytes,
    micro_batches_in_flight,
    pipeline_elements,
    saved_bytes,
    tensor_parallel_elements,
)
from memlab.planner.recipes import GROUPS
from memlab.zero.formulas import ring_elements

BFLOAT16, FLOAT32, INT64 = 2, 4, 8
MICRO_BATCHES_PER_STAGE = 2
MOST_UNEVEN = 1.15  # the longest stage may have so many times the average number of blocks
UTILIZATION = 0.5  # of peak operations, as in memlab.planner.costs
NODE_BANDWIDTH = 50e9  # bytes per second between nodes: a port of 400 Gbit/s for each GPU


@dataclass(frozen=True)
class Mesh:
    """How many ways each dimension divides the training, and whether blocks are checkpointed."""

    data: int = 1
    tensor: int = 1
    pipeline: int = 1
    context: int = 1
    checkpointed: bool = True

    @property
    def gpus(self) -> int:
        return self.data * self.tensor * self.pipeline * self.context

    @property
    def shards(self) -> int:
        """Ranks that share a stage's weights."""
        return self.data * self.context

    @property
    def micro_batches(self) -> int:
        """How many a data rank takes in a step."""
        return 1 if self.pipeline == 1 else MICRO_BATCHES_PER_STAGE * self.pipeline

    @property
    def sizes(self) -> dict[str, int]:
        """The dimensions of torch's DeviceMesh, from the slowest links to the fastest."""
        sizes = {
            "pipeline": self.pipeline,
            "data": self.data,
            "context": self.context,
            "tensor": self.tensor,
        }
        return {name: size for name, size in sizes.items() if size > 1 or name == "data"}

    @property
    def words(self) -> str:
        return f"{self}{', checkpointing' if self.checkpointed else ''}"

    @property
    def group(self) -> str:
        return GROUPS[0]

    @property
    def settings(self) -> dict[str, int]:
        return {**self.sizes, "checkpointed": self.checkpointed}

    def blocks(self, layers: int, stage: int) -> int:
        """Return the number of blocks of a stage, as the script divides them."""
        return (stage + 1) * layers // self.pipeline - stage * layers // self.pipeline

    def __str__(self) -> str:
        return ", ".join(f"{name} {size}" for name, size in self.sizes.items())


def require_llama(config: GPTConfig, mesh: Mesh, seq_len: int) -> None:
    """Raise ValueError for a model other than a Llama, and for a mesh that does not divide it."""
    if missing := config.beyond_llama:
        raise ValueError(f"got a model with {missing}; meshes are for Llama's architecture")
    if reason := _indivisible(config, mesh, seq_len):
        raise ValueError(f"got a mesh of {mesh}, which {reason}; choose a divisor")


def _indivisible(config: GPTConfig, mesh: Mesh, seq_len: int) -> str | None:
    """Return what the mesh does not divide; None if it divides all."""
    t = mesh.tensor
    if any(count % t for count in (config.kv_heads, config.intermediate_size, config.vocab_size)):
        return (
            f"does not divide {config.kv_heads} key heads, {config.vocab_size} words and an "
            f"intermediate size of {config.intermediate_size} by tensor {t}"
        )
    parts = mesh.context * t * (2 if mesh.context > 1 else 1)  # two pieces, to balance the mask
    if seq_len % parts:
        return f"does not divide {seq_len} tokens by {parts}"
    if mesh.pipeline > config.layers:
        return f"has more stages than the {config.layers} layers"
    if mesh.pipeline > 1 and config.tied:
        return "divides a tied embedding between stages"
    return None


def meshes(config: GPTConfig, gpus: int, seq_len: int) -> Iterator[Mesh]:
    """Yield all meshes of so many GPUs that divide the model.

    Tensor parallelism stays within a node, and the longest stage of a pipeline is at most
    MOST_UNEVEN times the average.
    """
    divisors = [n for n in range(1, gpus + 1) if gpus % n == 0]
    for tensor, pipeline, context in product(divisors, repeat=3):
        if tensor > MAX_GPUS_PER_MACHINE or gpus % (tensor * pipeline * context):
            continue
        data = gpus // (tensor * pipeline * context)
        mesh = Mesh(data, tensor, pipeline, context)
        longest = -(-config.layers // pipeline)
        if longest * pipeline > MOST_UNEVEN * config.layers or _indivisible(config, mesh, seq_len):
            continue
        yield mesh
        yield Mesh(data, tensor, pipeline, context, checkpointed=False)


# ------------------------------------------------------------------ bytes


@dataclass(frozen=True)
class RankBytes:
    """The bytes of a rank at its fullest moment, by category."""

    stage: int
    moment: str
    terms: dict[str, int]

    @property
    def total(self) -> int:
        return sum(self.terms.values())


def rank_bytes(
    config: GPTConfig, mesh: Mesh, *, sequences: int, seq_len: int, workspace: int = 0
) -> list[RankBytes]:
    """Return the bytes of a rank of each stage, by formula. `workspace` is cuBLAS's."""
    return [
        StageBytes(config, mesh, stage, sequences, seq_len).peak(workspace)
        for stage in range(mesh.pipeline)
    ]


def fullest(found: list[RankBytes]) -> RankBytes:
    """Return the first stage that needs most."""
    return max(found, key=lambda each: each.total)


class StageBytes:
    """The bytes of a rank of one stage."""

    def __init__(
        self, config: GPTConfig, mesh: Mesh, stage: int, sequences: int, seq_len: int
    ) -> None:
        self.config, self.mesh = config, mesh
        self.first, self.last = stage == 0, stage == mesh.pipeline - 1
        self.stage, self.blocks = stage, mesh.blocks(config.layers, stage)
        self.tokens = sequences * seq_len // mesh.context
        self.inputs = INT64 * mesh.micro_batches * sequences * (3 * seq_len + 1)
        self.block, self.ends = block_weights(config, mesh), end_weights(config, mesh, stage)
        self.weights = self.blocks * self.block + self.ends
        self.shard = -(-self.weights // mesh.shards)
        self.block_shards = self.blocks * self.block // mesh.shards
        self.block_saved = block_saved(config, mesh, self.tokens)

    def peak(self, workspace: int) -> RankBytes:
        shard = self.shard
        always = {
            "weights": FLOAT32 * shard,
            "state": 2 * FLOAT32 * shard,
            "inputs and tables": self.inputs + workspace + self._receive_buffers(),
        }
        moments = {
            "loss": self._loss(),
            "backward": self._backward(),
            "embedding": self._embedding(),
            "end of backward": self._end_of_backward(),
            "optimizer": {"gradients": FLOAT32 * shard, "temporaries": FLOAT32 * shard},
        }
        name = max(moments, key=lambda moment: sum(moments[moment].values()))
        return RankBytes(self.stage, name, always | moments[name])

    @property
    def _pipelined(self) -> bool:
        return self.mesh.pipeline > 1

    def _gathered(self, blocks: int) -> int:
        """Return the bfloat16 weights: all of a pipeline, otherwise the ends and some blocks."""
        count = self.weights if self._pipelined else self.ends + blocks * self.block
        return BFLOAT16 * count

    def _saved(self, done: int = 0) -> int:
        """Return the bytes that all blocks save for all micro-batches in flight but `done`."""
        in_flight = micro_batches_in_flight(self.stage, self.mesh.pipeline, self.mesh.micro_batches)
        return (in_flight - done) * self.blocks * self.block_saved

    def _accumulated(self) -> int:
        return FLOAT32 * self.weights if self._pipelined else 0

    def _receive_buffers(self) -> int:
        """torch's schedules have a buffer for each micro-batch's input and output gradient."""
        stream = BFLOAT16 * self.tokens * self.config.hidden_size // self.mesh.tensor
        neighbors = (not self.first) + (not self.last)
        return neighbors * self.mesh.micro_batches * stream

    def _loss(self) -> dict[str, int]:
        """Backward of the last stage's loss: log-probabilities, and two gradients in float32,
        or three if the logits are divided. A
        pipeline has its logits, too; without one, forward has freed the gathered weights."""
        words = self.tokens * self.config.vocab_size // self.mesh.tensor if self.last else 0
        logits = FLOAT32 + (BFLOAT16 if self._pipelined else 0)
        return {
            "gathered weights": self._gathered(0) if self._pipelined else 0,
            "gradients": self._accumulated(),
            "activations": self._saved() + logits * words,
            "temporaries": (3 if self.mesh.tensor > 1 else 2) * FLOAT32 * words,
        }

    def _backward(self) -> dict[str, int]:
        """Backward of the last block, with the gradients of a block and the ends."""
        config, t = self.config, self.mesh.tensor
        head = config.vocab_size * config.hidden_size // t if self.last else 0
        again = block_saved(config, Mesh(tensor=t, checkpointed=False), self.tokens)
        temporaries = BFLOAT16 * self.tokens * (2 * config.intermediate_size // t)
        temporaries += BFLOAT16 * self.tokens * config.hidden_size
        return {
            "gathered weights": self._gathered(2),
            "gradients": self._accumulated()
            + BFLOAT16 * (head + self.block)
            + (0 if self._pipelined else FLOAT32 * self.block),
            "activations": self._saved() + (again if self.mesh.checkpointed else 0),
            "temporaries": temporaries,
        }

    def _embedding(self) -> dict[str, int]:
        """Backward of the embedding. torch's tensor parallelism makes its gradient whole."""
        whole = self.config.vocab_size * self.config.hidden_size * self.first
        own = whole // self.mesh.tensor
        gradients = FLOAT32 * self.block_shards + BFLOAT16 * own
        # FSDP reduces the gradients of all experts of a block at once: 7.9 of 19.8 GiB for Mixtral
        # 8x7B with 2,048 tokens on 64 GPUs, 1.0 GiB with the experts over 8 GPUs.
        reduced = FLOAT32 * self.block + (BFLOAT16 * own if self.mesh.tensor > 1 else 0)
        if self._pipelined:
            gradients, reduced = FLOAT32 * self.blocks * self.block, FLOAT32 * whole
        return {
            "gathered weights": self._gathered(0),
            "gradients": gradients,
            "activations": self._saved(done=1),
            "temporaries": BFLOAT16 * whole + reduced,
        }

    def _end_of_backward(self) -> dict[str, int]:
        """The ends' gradients are copied to float32 for the reduction, after all blocks'."""
        blocks = FLOAT32 * self.block_shards
        return {
            "gathered weights": self._gathered(0) if self._pipelined else 0,
            "gradients": max(self._accumulated(), blocks + BFLOAT16 * self.ends),
            "temporaries": FLOAT32 * self.ends,
        }


def block_weights(config: GPTConfig, mesh: Mesh) -> int:
    """Return a rank's weights of a block: its part of the matrices, and whole norms."""
    C, D = config.hidden_size, config.head_dim
    attention = 2 * C * D * (config.heads + config.kv_heads)
    return (attention + 3 * C * config.intermediate_size) // mesh.tensor + 2 * C


def end_weights(config: GPTConfig, mesh: Mesh, stage: int) -> int:
    """Return a rank's weights outside the blocks: the embedding first, a norm and the head last."""
    matrix = config.vocab_size * config.hidden_size // mesh.tensor
    first, last = stage == 0, stage == mesh.pipeline - 1
    matrices = first + (last and not (first and config.tied))
    return matrices * matrix + last * config.hidden_size


def block_saved(config: GPTConfig, mesh: Mesh, tokens: int) -> int:
    """Return the bytes that a block saves of a micro-batch: its input, or everything for backward.

    torch's sequence parallelism saves the two gathered inputs of matmuls whole.
    """
    C, D, t = config.hidden_size, config.head_dim, mesh.tensor
    if mesh.checkpointed:
        return saved_bytes(tokens, whole=BFLOAT16 * C, divided=0, tensor=t, sequence_parallel=True)
    heads = 2 * D * (config.heads + config.kv_heads)
    divided = BFLOAT16 * (heads + 4 * config.intermediate_size) + FLOAT32 * config.heads
    norms = 2 * (BFLOAT16 * C + FLOAT32)
    own = saved_bytes(tokens, whole=norms, divided=divided, tensor=t, sequence_parallel=True)
    return own + tokens * 2 * BFLOAT16 * C


# ------------------------------------------------------------------ what a step sends


def sent_bytes(
    config: GPTConfig, mesh: Mesh, stage: int, *, sequences: int, seq_len: int
) -> dict[str, int]:
    """Return the bytes that a rank of a stage sends in a step, by dimension of the mesh.

    Weights are gathered once in a pipeline, which keeps them, and otherwise again for backward. A
    checkpointed block repeats what its forward pass sends.
    """
    tokens, blocks = sequences * seq_len // mesh.context, mesh.blocks(config.layers, stage)
    C, t, m = config.hidden_size, mesh.tensor, mesh.micro_batches
    block, ends = block_weights(config, mesh), end_weights(config, mesh, stage)
    gathers = 1 if mesh.pipeline > 1 else 2
    weights = (BFLOAT16 * gathers + FLOAT32) * (blocks * block + ends)
    in_block = tensor_parallel_elements(tokens, C, t)
    if mesh.checkpointed:  # forward again, but for its last reduce-scatter
        in_block += 3 * ring_elements(tokens * C, t)
    outside = 2 * ring_elements(tokens * C, t)  # the embedding's or the head's
    ends_here = (stage == 0) + (stage == mesh.pipeline - 1)
    stream = tokens * C // t
    keys = 2 * config.kv_heads * config.head_dim // t
    return {
        "data": ring_elements(weights, mesh.shards),
        "context": m
        * blocks
        * gathered_context_bytes(
            BFLOAT16 * tokens * keys, mesh.context, recomputed=mesh.checkpointed
        ),
        "tensor": BFLOAT16 * m * (blocks * in_block + ends_here * outside),
        "pipeline": BFLOAT16 * pipeline_elements(stage, mesh.pipeline, m, stream),
    }


def crosses_nodes(mesh: Mesh) -> dict[str, bool]:
    """Return whether each dimension's groups of ranks are on several nodes."""
    strides = {
        "tensor": (1, mesh.tensor),
        "context": (mesh.tensor, mesh.context),
        "data": (mesh.tensor, mesh.shards),  # FSDP's group has the context ranks, too
        "pipeline": (mesh.tensor * mesh.shards, mesh.pipeline),
    }
    return {name: step * size > MAX_GPUS_PER_MACHINE for name, (step, size) in strides.items()}


# ------------------------------------------------------------------ the search


@dataclass(frozen=True)
class MeshOption:
    """A mesh with its bytes and time by formula."""

    mesh: Mesh
    stages: tuple[RankBytes, ...]
    seconds_per_token: float  # of all GPUs together

    @property
    def peak(self) -> RankBytes:
        return fullest(list(self.stages))

    @property
    def rank(self) -> int:
        """The first rank of the fullest stage."""
        return self.peak.stage * self.mesh.gpus // self.mesh.pipeline


def mesh_options(
    config: GPTConfig, gpus: int, card: Card, *, sequences: int, seq_len: int, workspace: int = 0
) -> list[MeshOption]:
    """Return all meshes by their estimated time for a token, the fastest first.

    A micro-batch has `sequences` sequences. Raises ValueError for a model other than a Llama.
    """
    require_llama(config, Mesh(), seq_len)
    sizes = {"sequences": sequences, "seq_len": seq_len}
    found = []
    for mesh in meshes(config, gpus, seq_len):
        stages = tuple(rank_bytes(config, mesh, **sizes, workspace=workspace))
        sent = sent_bytes(config, mesh, fullest(list(stages)).stage, **sizes)
        seconds = _seconds(config, mesh, card, sent, **sizes)
        tokens = mesh.data * mesh.micro_batches * sequences * seq_len
        found.append(MeshOption(mesh, stages, seconds / tokens))
    return sorted(found, key=lambda each: (each.seconds_per_token, each.peak.total))


def _seconds(
    config: GPTConfig,
    mesh: Mesh,
    card: Card,
    sent: dict[str, int],
    *,
    sequences: int,
    seq_len: int,
) -> float:
    """Estimate the time of a step, by the slowest stage."""
    m, p = mesh.micro_batches, mesh.pipeline
    attention = 2 * seq_len * config.heads * config.head_dim  # half of the scores are masked
    forward = 2 * block_weights(config, Mesh()) + attention  # of a block and token
    passes = 4 if mesh.checkpointed else 3
    head = 3 * 2 * config.vocab_size * config.hidden_size
    operations = max(
        passes * mesh.blocks(config.layers, stage) * forward + head * (stage == p - 1)
        for stage in range(p)
    )
    tokens = sequences * seq_len / mesh.context / mesh.tensor
    computing = (m + p - 1) * tokens * operations / (UTILIZATION * card.bfloat16_flops)
    own = StageBytes(config, mesh, 0, sequences, seq_len).weights / mesh.shards
    stepping = 7 * FLOAT32 * own / card.memory_bandwidth  # four tensors read, three written
    speeds = {False: card.link_bandwidth, True: min(NODE_BANDWIDTH, card.link_bandwidth)}
    crossing = crosses_nodes(mesh)
    sending = {name: size / speeds[crossing[name]] for name, size in sent.items()}
    overlapped = max(computing, sending.pop("data"))
    return overlapped + stepping + sum(sending.values())
