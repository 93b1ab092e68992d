"""The bytes of a training by formula: every term named, at each moment that can be the peak.

    weights     N·w                              w = 4 bytes in float32, 2 in bfloat16
    state       N·s                              s = 8 for AdamW in float32, 1.016 for 8-bit Lion
    gradients   N_trained·w                      or those of two weights, stepped in backward
    kept        n·L·(what a block keeps a token) + n·(what the ends keep)         n = B·T tokens

A block of Llama's shape on CUDA (fused norms and attention) keeps for each token

    a·(2·C + 2·H·D + 2·KV·D + 4·hidden) + r·2·C + 4·(H + 2)        bytes

where a number of the activations has a bytes and one of the residual stream r: 4 and 4 in float32,
2 and 2 in bfloat16, 2 and 4 under autocast, which keeps 3·C numbers more: it casts a norm's output
for each product that takes it. A checkpointed block keeps its input, r·C; a selective one its
products and attention, too. The logits weigh V·a a token three times when backward begins: the
log-probabilities, their gradient and, made from it, the logits' own.

A step has its peak at one of four moments, and the formula gives all of them:

    loss        the last logits are made            weights, state, kept, the loss's temporaries
    backward    it has just begun                   … and the first block's temporaries
    gradients   backward comes to block 0           weights, state, all gradients, one block's kept
    optimizer   the step                            weights, state, all gradients, its temporaries

A formula leaves out what kernels and allocators do: `memlab.planner.plan` searches by it and
measures what it finds. How far it is from a prediction is tested: within 3 % for matrices of a 7B
model on one GPU, within 10 % for small ones whose temporaries weigh as much as their weights.

Source   Korthikanti et al. 2022, arXiv 2205.05198, section 4; Rajbhandari et al. 2020, arXiv
         1910.02054, section 3.
"""

from dataclasses import dataclass
from typing import Any

from memlab.configs.shapes import GPTConfig
from memlab.configs.targets import TARGETS
from memlab.internals.chunks import CHUNK_SIZE, CHUNK_SIZE_ON_ACCELERATOR
from memlab.lora import added_weights
from memlab.losses import chunk_rows
from memlab.planner.recipes import Recipe
from memlab.train.registry import LORA_RANK, TECHNIQUES
from memlab.train.technique import BlockBytes
from memlab.units import format_bytes

MOMENTS = ("loss", "backward", "gradients", "optimizer")
INT64, FLOAT32 = 8, 4
PLAIN = TECHNIQUES["plain"]
USUAL_STEP_COPIES = 5  # float32 copies of a chunk of a weight, made by a step of ours


@dataclass(frozen=True)
class Estimate:
    """Bytes by formula: at each of MOMENTS, {what: bytes}."""

    moments: dict[str, dict[str, int]]

    @property
    def moment(self) -> str:
        """When the peak is."""
        return max(self.moments, key=lambda moment: sum(self.moments[moment].values()))

    @property
    def terms(self) -> dict[str, int]:
        """What the peak is made of."""
        return self.moments[self.moment]

    @property
    def peak_bytes(self) -> int:
        return sum(self.terms.values())

    def __str__(self) -> str:
        lines = [f"{count:>18,}  {name}" for name, count in self.terms.items() if count]
        total = f"{self.peak_bytes:>18,}  in all, {format_bytes(self.peak_bytes)}, at the moment"
        return "\n".join([*lines, f"{total} of {self.moment!r}"])


def training_bytes(
    config: GPTConfig,
    recipe: Recipe,
    batch: int = 1,
    seq_len: int | None = None,
    *,
    gpus: int = 1,
    target: str = "cuda",
) -> Estimate:
    """What each of the GPUs holds in a step of `batch` sequences a data-parallel rank, by formula.

    `seq_len` is the longest that the model takes unless given. ValueError for what is no number of
    sequences, tokens or GPUs, and for parallel sizes that don't divide the GPUs or the model.
    """
    step = Step.of(config, recipe, batch, seq_len, gpus=gpus, target=target)
    return Estimate({moment: getattr(step, moment)() for moment in MOMENTS})


def data_ranks(config: GPTConfig, recipe: Recipe, gpus: int) -> int:
    """How many ranks share the batches: the GPUs, over what parallel parts of a model take."""
    tensor, pipeline = recipe.tensor_parallel, recipe.pipeline_parallel
    if not isinstance(gpus, int) or gpus < 1:
        raise ValueError(f"got {gpus} GPUs; give at least 1")
    if gpus % (tensor * pipeline):
        raise ValueError(
            f"{gpus} GPUs don't split into groups of {tensor} × {pipeline} for tensor and pipeline "
            f"parallelism; give a multiple of {tensor * pipeline}"
        )
    if config.heads % tensor or config.layers < pipeline:
        raise ValueError(
            f"{config.heads} heads and {config.layers} layers don't split into {tensor} tensor and "
            f"{pipeline} pipeline parts; the heads must be a multiple, the layers as many"
        )
    return gpus // (tensor * pipeline)


@dataclass(frozen=True)
class Weights:
    """How many weights there are."""

    block: int
    ends: int  # embedding, last norm and unembedding
    largest: int
    trained_block: int
    trained_ends: int
    after_block_0: int  # whose gradients are not there when backward comes to block 0's MLP
    products: int  # of the blocks and the unembedding: what autocast casts

    @classmethod
    def of(cls, config: GPTConfig, recipe: Recipe) -> "Weights":
        V, C, F = config.vocab_size, config.width, config.hidden
        QD, KD = config.heads * config.head_width, config.kv_heads * config.head_width
        ends = V * C * (1 if config.tied else 2) + C
        block = (config.parameters - ends) // config.layers
        largest = max(V * C, C * F, C * QD)
        products = config.layers * (block - 2 * C) + V * C
        if not recipe.lora:
            embedding = 0 if config.tied else V * C
            return cls(block, ends, largest, block, ends, block - C * F + embedding, products)
        shapes = [(C, QD), (C, KD), (C, KD), (QD, C), (C, F), (C, F), (F, C)]
        added = sum(added_weights(*shape, rank=LORA_RANK) for shape in shapes)
        return cls(block + added, ends, LORA_RANK * max(C, F), added, 0, added, products)


class Step:
    """What one rank's step takes, by formula."""

    @classmethod
    def of(
        cls,
        config: GPTConfig,
        recipe: Recipe,
        batch: int,
        seq_len: int | None = None,
        *,
        gpus: int = 1,
        target: str = "cuda",
    ) -> "Step":
        """See `training_bytes`."""
        seq_len = config.seq_len if seq_len is None else seq_len
        for name, got in {"batch": batch, "seq_len": seq_len}.items():
            if not isinstance(got, int) or got < 1:
                raise ValueError(f"got {name}={got!r}; give a number from 1")
        return cls(config, recipe, batch, seq_len, data_ranks(config, recipe, gpus), target)

    def __init__(
        self,
        config: GPTConfig,
        recipe: Recipe,
        batch: int,
        seq_len: int,
        ranks: int,
        target: str,
    ) -> None:
        self.config, self.recipe, self.ranks = config, recipe, ranks
        self.tensor = recipe.tensor_parallel
        self.layers = -(-config.layers // recipe.pipeline_parallel)
        self.seq_len, self.batch_tokens = seq_len, batch * seq_len
        self.tokens = (1 if recipe.accumulation else batch) * seq_len  # at once
        self.weight_bytes = 4 if recipe.precision in ("float32", "autocast") else 2
        self.residual_bytes = self.weight_bytes
        self.activation_bytes = 4 if recipe.precision == "float32" else 2
        self.logit_bytes = 4 if recipe.precision == "autocast" else self.activation_bytes
        self.weights = Weights.of(config, recipe)
        self.rows = tuple(recipe.rows.values())
        self.on_disk = frozenset().union(*(row.on_disk for row in self.rows))
        self.workspace = 0 if target == "cpu" else 2 * TARGETS[target].workspace_bytes
        self.piece = CHUNK_SIZE if target == "cpu" else CHUNK_SIZE_ON_ACCELERATOR

    def _fact(self, name: str) -> Any:
        """A fact of the registry that one of the recipe's rows states, or None."""
        return next((fact for row in self.rows if (fact := getattr(row, name)) is not None), None)

    @property
    def is_streamed(self) -> bool:
        """Whether weights are on the disk while their block does not run."""
        return "weights" in self.on_disk

    # -------------------------------------------------------------- the four moments

    def loss(self) -> dict[str, int]:
        """Forward has ended: all that is kept, and what the loss makes on its way back."""
        return self._held(
            blocks_kept=0 if self._is_kept_elsewhere else self._blocks_kept(),
            ends_kept=self._ends_kept(),
            cast_weights=self._cast_weights(),
            gradients=self._gradients_from_before(),
            loss_temporaries=self._loss_temporaries(),
        )

    def backward(self) -> dict[str, int]:
        """Of the last block, whose activations are made again where they were forgotten; or the
        step of the unembedding, if it is taken there."""
        stepped = 0
        if self.recipe.step_in_backward and not self.recipe.lora:
            unembedding = self.weight_bytes * self.config.vocab_size * self.config.width
            stepped = unembedding + self._step_temporaries()
        return self._held(
            blocks_kept=self._blocks_kept(),
            cast_weights=self._cast_weights(),
            gradients=max(self._gradients_from_before(), self._first_gradient()),
            block_temporaries=max(stepped, self._block_temporaries()),
        )

    def gradients(self) -> dict[str, int]:
        """Backward has come to block 0: its own gradients are not there yet."""
        all_but = max(
            self._gradients_from_before(), self._gradients(but=self.weights.after_block_0)
        )
        return self._held(
            blocks_kept=self._blocks_kept(1),
            cast_weights=self._cast_weights(),
            gradients=all_but,
            block_temporaries=self._block_temporaries(),
        )

    def optimizer(self) -> dict[str, int]:
        """The step itself."""
        size = 4 if self._steps_copies else self.weight_bytes
        largest = size * self._on_rank(self.weights.largest, from_stage=1)
        takes_one = self.recipe.step_in_backward or self.is_streamed
        return self._held(
            stepped_copy=largest if self.is_streamed else 0,
            gradients=largest if takes_one else size * self._gradients() // self.weight_bytes,
            optimizer_temporaries=self._step_temporaries(),
        )

    def _held(self, **others: int) -> dict[str, int]:
        """What is there at every moment, and the others."""
        is_stepping = "optimizer_temporaries" in others
        return {
            "weights": self._weight_bytes(is_stepping),
            "optimizer_state": self._state_bytes(is_stepping),
            "inputs": 2 * INT64 * self.batch_tokens,
            "rotary_tables": self.config.seq_len * self.config.head_width * self.weight_bytes,
            "workspace": self.workspace,
            **others,
        }

    @property
    def _steps_copies(self) -> bool:
        """Whether float32 gradients take the place of the others while the optimizer steps."""
        recipe = self.recipe
        return recipe.precision == "master-weights" or self.is_streamed

    # -------------------------------------------------------------- for what it takes in time

    def stepped_bytes(self) -> tuple[int, int, int]:
        """Bytes of weights, gradients and state that the optimizer of this rank goes through."""
        shard = self._on_rank(self._trained(), from_stage=1)
        return self.weight_bytes * shard, self.weight_bytes * shard, round(self._by_weight * shard)

    def kept_bytes_uncompressed(self) -> int:
        """Bytes that a micro-batch's forward pass keeps for backward, before they are encoded."""
        bits = self.recipe.activation_bits
        factor = 1 if bits is None else 8 * self.activation_bytes / bits
        return round(factor * self.layers * self._block_kept())

    def streamed_bytes(self) -> int:
        """Bytes of the weights of all blocks, frozen or not."""
        return self.weight_bytes * self.layers * self.weights.block

    @property
    def trained(self) -> int:
        """How many weights have gradients, of the part of the model that a rank has."""
        return -(-self._trained() // self.tensor)

    # -------------------------------------------------------------- model states

    def _on_rank(self, elements: int, from_stage: int) -> int:
        """Elements of this rank, where a stage of ZeRO shards them among the data-parallel ones."""
        mine = -(-elements // self.tensor)
        return -(-mine // self.ranks) if self.recipe.zero_stage >= from_stage else mine

    def _all(self) -> int:
        return self.layers * self.weights.block + self.weights.ends

    def _trained(self) -> int:
        return self.layers * self.weights.trained_block + self.weights.trained_ends

    def _weight_bytes(self, is_stepping: bool) -> int:
        if self.is_streamed:
            at_work = 0 if is_stepping else self.weights.block
            return self.weight_bytes * (self.weights.ends + at_work)
        whole = self._on_rank(self._all(), from_stage=3)
        if self.recipe.zero_stage == 3:  # one block at work, one gathered ahead, or the ends
            whole += max(2 * self.weights.block, self.weights.ends + self.weights.block)
        return self.weight_bytes * whole

    def _state_bytes(self, is_stepping: bool) -> int:
        elements = self._on_rank(self._trained(), from_stage=1)
        if "state" in self.on_disk:
            elements = self.weights.largest if is_stepping else 0
        return round(self._by_weight * elements)

    @property
    def _by_weight(self) -> float:
        """Bytes of state for each trained weight."""
        known = self._fact("state_bytes")
        return PLAIN.state_bytes if known is None else known

    def _gradients(self, *, but: int = 0) -> int:
        """All that backward leaves, or all but so many; those not taken away at once."""
        if self.recipe.step_in_backward or self.is_streamed:
            return 0
        return self.weight_bytes * self._on_rank(self._trained() - but, from_stage=2)

    def _gradients_from_before(self) -> int:
        """Those of the micro-batch before, to which this one's are added, in float32."""
        adds = self.recipe.accumulation and self.batch_tokens > self.tokens
        return FLOAT32 * self._gradients() // self.weight_bytes if adds else 0

    def _first_gradient(self) -> int:
        """The unembedding's."""
        if self.recipe.lora or self.recipe.step_in_backward:
            return 0
        return self.weight_bytes * self.config.vocab_size * self.config.width // self.tensor

    def _cast_weights(self) -> int:
        """bfloat16 copies of what autocast multiplies by, there until backward has used them."""
        return 2 * self.weights.products if self.recipe.precision == "autocast" else 0

    # -------------------------------------------------------------- activations

    def _blocks_kept(self, blocks: int | None = None) -> int:
        """What all blocks keep, or so many."""
        if self._is_kept_elsewhere:
            return self._block_kept()  # about one block's is on its way
        blocks = self.layers * self.recipe.pipeline_parallel if blocks is None else blocks
        return blocks * self._block_kept() // self.tensor

    @property
    def _is_kept_elsewhere(self) -> bool:
        return "activations" in self.on_disk

    def _block_kept(self) -> int:
        """What one block keeps until backward comes."""
        config, a, r = self.config, self.activation_bytes, self.residual_bytes
        C, QD, KD = config.width, *self._head_widths
        products = QD + 2 * KD + 2 * C + 2 * config.hidden
        outputs = QD + products * (2 if self.recipe.lora else 1)  # LoRA's matmuls, too
        saved = BlockBytes(
            input=self.tokens * r * C,
            matmuls=self.tokens * (a * outputs + 4 * config.heads),
        )
        kept = self._fact("kept")
        return self._compressed(kept(saved)) if kept else self._block_made()

    def _block_made(self) -> int:
        """What a block keeps that forgets nothing."""
        config, a, r = self.config, self.activation_bytes, self.residual_bytes
        C, QD, KD = config.width, *self._head_widths
        casts = 3 * C if self.recipe.precision == "autocast" else 0
        numbers = a * (2 * C + casts + 2 * QD + 2 * KD + 4 * config.hidden) + r * 2 * C
        per_token = numbers + 4 * (config.heads + 2) + self._scores()
        return self._compressed(self.tokens * per_token)

    def _scores(self) -> int:
        """Bytes of score matrices a token: CUDA's fused kernels take float32 or grouped heads, not
        both at once."""
        config = self.config
        is_grouped = config.kv_heads < config.heads
        if self.recipe.attention == "eager-attention" or (
            self.recipe.attention is None and is_grouped and self.activation_bytes == 4
        ):
            QD, KD = self._head_widths
            copies = 2 * (QD - KD)  # of keys and values, one for each query
            return self.activation_bytes * (config.heads * self.seq_len + copies)
        return 0

    def _compressed(self, count: int) -> int:
        encoded = self._fact("encoded")
        return encoded(count // self.activation_bytes) if encoded else count

    @property
    def _head_widths(self) -> tuple[int, int]:
        """Of all heads together: the queries', and the keys'."""
        D = self.config.head_width
        return self.config.heads * D, self.config.kv_heads * D

    def _ends_kept(self) -> int:
        """The last norm's, and what the loss keeps: log-probabilities, or finished gradients."""
        C, V = self.config.width, self.config.vocab_size // self.tensor
        norm = self.tokens * ((self.residual_bytes + self.activation_bytes) * C + 4)
        if self.recipe.chunked_loss:
            of_weight = 0 if self.recipe.lora else V * C
            return norm + FLOAT32 * (self.tokens * C + of_weight)
        return norm + self.tokens * V * self.logit_bytes

    def _loss_temporaries(self) -> int:
        """The gradients of the log-probabilities and of the logits; or a chunk's logits, and then
        gradients as the weights have them."""
        C, V, n = self.config.width, self.config.vocab_size // self.tensor, self.tokens
        if not self.recipe.chunked_loss:  # of autocast's, one is in bfloat16
            return n * V * (self.logit_bytes + self.activation_bytes)
        narrow = 0 if self.activation_bytes == 4 else self.activation_bytes
        chunk = (FLOAT32 + narrow) * chunk_rows(n, V, C) * V
        narrowed = 0 if self.weight_bytes == 4 or self.recipe.lora else self.weight_bytes * V * C
        return max(chunk, narrowed)

    def _block_temporaries(self) -> int:
        """In the MLP's backward two gradients as wide as its inside, and the stream's own; where
        there are scores, their gradients."""
        made = 0 if self.recipe.checkpointing is None else self._block_made() - self._block_kept()
        a, C, F = self.activation_bytes, self.config.width, self.config.hidden
        gradients = 2 * F * a + C * self.residual_bytes + self._scores()
        return (max(0, made) + self.tokens * gradients) // self.tensor

    # -------------------------------------------------------------- the optimizer

    def _step_temporaries(self) -> int:
        """torch's AdamW takes two tensors as large as the largest weight; ours, pieces of one.
        Streamed, a weight's float32 copy is rounded, whole, before it goes."""
        recipe, largest = self.recipe, self._on_rank(self.weights.largest, from_stage=1)
        if recipe.optimizer == "adamw" and recipe.precision != "bfloat16":
            return 2 * FLOAT32 * largest
        copies = self._fact("step_copies") or USUAL_STEP_COPIES
        pieces = round(copies * FLOAT32 * min(self.piece, largest))
        is_rounded = self.is_streamed and self.weight_bytes < FLOAT32
        return max(pieces, self.weight_bytes * largest) if is_rounded else pieces
