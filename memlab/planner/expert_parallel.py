"""Expert parallelism over several GPUs, by formula: what each degree needs, sends and tolerates.

    expert_meshes(config, gpus)         all degrees, with and without checkpointed blocks
    expert_bytes(config, mesh, …)       the bytes of the busiest rank, by category
    largest_imbalance(config, mesh, …)  how busy one expert may be

N GPUs train the same model on their own sequences. e of them share a set of experts, and each has
E/e experts of every layer, X weights. FSDP2 shards these over the N/e ranks with the same experts,
and all other weights over all N. A block has A other weights. Everything else is as in
`memlab.planner.meshes`: float32 weights, gathered in bfloat16, gradients reduced in float32, and
AdamW. All degrees have the same shards of weights, gradients and optimizer state. A larger degree
gathers and reduces fewer experts at once, and sends tokens instead.

    gathered                2·(A + X), and twice 2·A while another block arrives
    reduction of experts    2·X + 4·X, the gradients and their float32 copies
    saved of a block        what attention, routing and the busiest rank's experts save
    sent                    FSDP's weights and gradients, and all-to-alls of tokens

One expert gets `imbalance` times the average number of tokens in every layer, and always on the
same rank: the worst case. A capacity limits it, and drops tokens above.

Source   Lepikhin et al. 2020, arXiv 2006.16668, section 3.2; Fedus et al. 2021, arXiv 2101.03961,
         section 2.2 (capacity); memlab.planner.experts has the formulas of a layer.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from memlab.configs.mixtures import MixtureConfig
from memlab.configs.torchrun import MAX_GPUS_PER_MACHINE
from memlab.planner.cards import Card
from memlab.planner.experts import Mixture
from memlab.planner.meshes import (
    BFLOAT16,
    FLOAT32,
    INT64,
    NODE_BANDWIDTH,
    UTILIZATION,
    Mesh,
    RankBytes,
    StageBytes,
    block_saved,
    block_weights,
)
from memlab.zero.formulas import ring_elements

CAPACITY = 1.25  # a capacity factor that Switch Transformer trains with


@dataclass(frozen=True)
class ExpertMesh:
    """How many GPUs there are, how many share a set of experts, and whether blocks are
    checkpointed."""

    gpus: int
    experts: int = 1
    checkpointed: bool = True

    @property
    def replicas(self) -> int:
        """Ranks that have the same experts."""
        return self.gpus // self.experts

    def __str__(self) -> str:
        return f"data {self.gpus}, experts {self.experts}"


def degrees(config: MixtureConfig, gpus: int) -> list[int]:
    """Return the degrees of expert parallelism: divisors of the experts and of the GPUs."""
    return [n for n in range(1, config.experts + 1) if config.experts % n == gpus % n == 0]


def expert_meshes(config: MixtureConfig, gpus: int) -> Iterator[ExpertMesh]:
    """Yield all meshes of so many GPUs."""
    for degree in degrees(config, gpus):
        yield ExpertMesh(gpus, degree)
        yield ExpertMesh(gpus, degree, checkpointed=False)


def layer_of(config: MixtureConfig) -> Mixture:
    """Return the layer's formulas."""
    dense = config.dense
    return Mixture(dense.hidden_size, dense.intermediate_size, config.experts, config.chosen)


# ------------------------------------------------------------------ bytes


def expert_bytes(
    config: MixtureConfig,
    mesh: ExpertMesh,
    *,
    sequences: int,
    seq_len: int,
    imbalance: float = 1.0,
    workspace: int = 0,
) -> RankBytes:
    """Return the bytes of the rank with the busiest expert. `workspace` is cuBLAS's."""
    return _ExpertBytes(config, mesh, sequences, seq_len, imbalance).peak(workspace)


class _ExpertBytes(StageBytes):
    """The bytes of a rank whose layers have experts."""

    def __init__(
        self,
        config: MixtureConfig,
        mesh: ExpertMesh,
        sequences: int,
        seq_len: int,
        imbalance: float,
    ) -> None:
        as_dense = Mesh(data=mesh.gpus, checkpointed=mesh.checkpointed)
        super().__init__(config.dense, as_dense, 0, sequences, seq_len)
        self.whole, self.degree, self.replicas = config, mesh.experts, mesh.replicas
        self.imbalance, layer = imbalance, layer_of(config)
        counts = layer.tokens_of_experts(self.tokens * mesh.experts, imbalance)
        self.counts = counts[: config.experts // mesh.experts]  # of this rank's experts
        self.routed = sum(self.counts)
        self.other = dense_weights(config)
        self.experts = config.experts // mesh.experts * config.expert
        self.block = self.other  # what FSDP still reduces when the embedding's gradient is made
        everywhere = self.blocks * (self.other + config.experts * config.expert)
        self.block_shards = everywhere // mesh.gpus
        self.shard = -(-(everywhere + self.ends) // mesh.gpus)
        self.block_saved = self.input if mesh.checkpointed else self.all_saved

    @property
    def input(self) -> int:
        """The bytes of a block's input."""
        return BFLOAT16 * self.tokens * self.config.hidden_size

    @property
    def all_saved(self) -> int:
        """What a block saves."""
        return self.attention_saved + self.routing_saved + self.experts_saved

    @property
    def attention_saved(self) -> int:
        config, n = self.config, self.tokens
        found = block_saved(config, Mesh(checkpointed=False), n)
        found -= n * BFLOAT16 * 4 * config.intermediate_size
        if config.head_norms:
            heads = config.heads + config.kv_heads
            found += n * heads * (BFLOAT16 * config.head_dim + FLOAT32)
        return found

    @property
    def routing_saved(self) -> int:
        """What this rank's tokens save: probabilities, and each copy's output, weight and four
        indices."""
        copy = BFLOAT16 * (self.config.hidden_size + 1) + 4 * INT64
        return self.tokens * (FLOAT32 * self.whole.experts + self.whole.chosen * copy)

    @property
    def experts_saved(self) -> int:
        layer = layer_of(self.whole)
        return layer.saved_bytes(self.tokens * self.degree, self.degree, self.imbalance)

    def _backward(self) -> dict[str, int]:
        """A block with experts at its fullest: the last one or the first."""
        moments = (self._forward, self._in_experts, self._reduction)
        candidates = [moment(first) for moment in moments for first in (0, 1)]
        return max(candidates, key=lambda terms: sum(terms.values()))

    def _forward(self, first: int) -> dict[str, int]:
        """A block's forward pass, in backward if it is recomputed: all is saved, and tokens are in
        the buffers that all-to-alls and sorting read and write."""
        recomputed = self.mesh.checkpointed
        ends = first or not recomputed  # no other block arrives
        sorts = len(self.counts) > 1 and self.degree > 1
        copies, C = self.tokens * self.whole.chosen, self.config.hidden_size
        # The experts' outputs are joined, and the buffer that gathered them is still there.
        buffer = self.experts if ends and self.replicas > 1 else self._arriving(first)
        joined = ((2 + sorts) * self.routed - copies) * C + buffer
        # They came back, were multiplied by their weights and are added up.
        weighted = ((1 + sorts) * self.routed + copies + self.tokens) * C + self._arriving(first)
        gradient = self.input if recomputed else 0  # of the block's output
        again = self.all_saved if recomputed else 0
        return {
            "gathered weights": self._gathered_with(self.experts, 0),
            "gradients": self._gradients(first) if recomputed else 0,
            "activations": self._saved_at(first if recomputed else 0) + again,
            "temporaries": BFLOAT16 * max(joined, weighted) + gradient,
        }

    def _in_experts(self, first: int) -> dict[str, int]:
        """Backward of an expert: of the last one, which comes first, or of the busiest, which
        comes after all others and when these have gradients in place of activations."""
        C, F = self.config.hidden_size, self.config.intermediate_size
        busiest, last, others = self.counts[0], self.counts[-1], self.routed - self.counts[0]
        at_last = 2 * last * F + self.routed * C * (len(self.counts) > 1)
        at_busiest = (2 * busiest - 4 * others) * F + others * C
        at_busiest += (len(self.counts) - 1) * self.whole.expert
        again = self.all_saved if self.mesh.checkpointed else 0
        return {
            "gathered weights": self._gathered_with(self.experts, self._arriving(first)),
            "gradients": self._gradients(first),
            "activations": self._saved_at(first) + again,
            "temporaries": BFLOAT16 * (max(at_last, at_busiest) + C * F),
        }

    def _reduction(self, first: int) -> dict[str, int]:
        """A block's expert gradients are copied to float32 for the reduction. Of the block's
        activations only attention's are left."""
        done = 0 if self.mesh.checkpointed else self.all_saved
        copies = BFLOAT16 * self.tokens * self.whole.chosen * self.config.hidden_size
        return {
            "gathered weights": self._gathered_with(0, self._arriving(first)),
            "gradients": self._gradients(first) + (BFLOAT16 + FLOAT32) * self.experts,
            "activations": self._saved_at(first) - done + self.attention_saved,
            "temporaries": copies + self.input,
        }

    def _gathered_with(self, experts: int, arriving: int) -> int:
        """Return the ends, a block's weights with these experts, and what arrives."""
        return BFLOAT16 * (self.ends + self.other + experts + arriving)

    def _arriving(self, first: int) -> int:
        """Return the next block's weights with the buffer that they arrive in; the first block,
        where backward ends, has no next one."""
        return 0 if first else 2 * self.other

    def _gradients(self, first: int) -> int:
        """Return the head's gradient, and in the first block all other gradients."""
        head = BFLOAT16 * self.config.vocab_size * self.config.hidden_size
        others = self.block_shards * (self.blocks - 1) // self.blocks
        return head + first * (FLOAT32 * others + FLOAT32 * self.other)

    def _saved_at(self, first: int) -> int:
        return self.block_saved * (1 if first else self.blocks)


def dense_weights(config: MixtureConfig) -> int:
    """Return a block's weights outside its experts: attention, norms and the router."""
    dense = config.dense
    head_norms = 2 * dense.head_dim if dense.head_norms else 0
    return block_weights(dense, Mesh()) - config.expert + head_norms + config.router


def largest_imbalance(
    config: MixtureConfig,
    mesh: ExpertMesh,
    budget_bytes: int,
    *,
    sequences: int,
    seq_len: int,
    allowance: float = 0.0,
    workspace: int = 0,
) -> float | None:
    """Return the largest imbalance whose peak, and `allowance` of it more, is within the budget.

    At most E/k, when all tokens choose one expert. None if not even an even routing fits.
    """
    tokens = sequences * seq_len * mesh.experts
    even = tokens * config.chosen / config.experts

    def fits(busiest: float) -> bool:
        found = expert_bytes(
            config,
            mesh,
            sequences=sequences,
            seq_len=seq_len,
            imbalance=max(1.0, busiest / even),
            workspace=workspace,
        )
        return (1 + allowance) * found.total <= budget_bytes

    if fits(tokens):
        return config.experts / config.chosen
    if not fits(even):
        return None
    low, high = int(even), tokens
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return max(1.0, low / even)


def dropped_share(config: MixtureConfig, imbalance: float, capacity: float = CAPACITY) -> float:
    """Return the share of the tokens' copies that a capacity drops of the busiest expert."""
    return max(0.0, imbalance - capacity) / config.experts


# ------------------------------------------------------------------ what a step sends


def sent_bytes(
    config: MixtureConfig,
    mesh: ExpertMesh,
    *,
    sequences: int,
    seq_len: int,
    imbalance: float = 1.0,
) -> dict[str, int]:
    """Return the bytes that the busiest rank sends in a step: to all ranks, to the ranks with the
    same experts, and tokens to the ranks with other experts."""
    dense = config.dense
    ends = dense.hidden_size * (dense.vocab_size * (1 if dense.tied else 2) + 1)
    own = dense.layers * config.experts // mesh.experts * config.expert
    elements = layer_of(config).sent_elements(
        sequences * seq_len, mesh.experts, imbalance, recomputed=mesh.checkpointed
    )
    per_weight = 2 * BFLOAT16 + FLOAT32  # gathered twice, and a gradient
    others = dense.layers * dense_weights(config) + ends
    return {
        "data": per_weight * ring_elements(others, mesh.gpus),
        "replicas": per_weight * ring_elements(own, mesh.replicas),
        "tokens": BFLOAT16 * dense.layers * elements,
    }


def crosses_nodes(mesh: ExpertMesh) -> dict[str, bool]:
    """Return whether each group of ranks is on several nodes. Ranks that share a set of experts
    are neighbors."""
    return {
        "data": mesh.gpus > MAX_GPUS_PER_MACHINE,
        "replicas": mesh.replicas > 1 and mesh.gpus > MAX_GPUS_PER_MACHINE,
        "tokens": mesh.experts > MAX_GPUS_PER_MACHINE,
    }


def seconds_per_token(
    config: MixtureConfig,
    mesh: ExpertMesh,
    card: Card,
    *,
    sequences: int,
    seq_len: int,
    imbalance: float = 1.0,
) -> float:
    """Estimate the time of a token of all GPUs together: the busiest rank's, as the others wait.

    FSDP's collectives overlap with computation, and all-to-alls do not.
    """
    dense, tokens = config.dense, sequences * seq_len
    attention = 2 * seq_len * dense.heads * dense.head_dim  # half of the scores are masked
    routed = layer_of(config).busiest_rank_tokens(tokens * mesh.experts, mesh.experts, imbalance)
    forward = tokens * (2 * dense_weights(config) + attention) + routed * 2 * config.expert
    head = 3 * 2 * tokens * dense.vocab_size * dense.hidden_size
    operations = (4 if mesh.checkpointed else 3) * dense.layers * forward + head
    computing = operations / (UTILIZATION * card.bfloat16_flops)
    stepping = 7 * FLOAT32 * config.parameters / mesh.gpus / card.memory_bandwidth
    speeds = {False: card.link_bandwidth, True: min(NODE_BANDWIDTH, card.link_bandwidth)}
    crossing = crosses_nodes(mesh)
    sent = sent_bytes(config, mesh, sequences=sequences, seq_len=seq_len, imbalance=imbalance)
    sending = {name: size / speeds[crossing[name]] for name, size in sent.items()}
    waiting = sending.pop("tokens")
    return (max(computing, sum(sending.values())) + stepping + waiting) / (tokens * mesh.gpus)
