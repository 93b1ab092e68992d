"""The bytes of a training by formula: each term named, at each moment that can be the peak.

    weights     N·w                              w = 4 bytes in float32, 2 in bfloat16
    state       N·s                              s = 8 for AdamW in float32, 1.016 for 8-bit Lion
    gradients   N_trained·w                      or of two weights, with the step in backward
    saved       n·L·(per token, by a block) + n·(per token, by the ends)          n = B·T tokens

A block of Llama's architecture on CUDA (fused norms and attention) saves for each token

    a·(2·C + 2·H·D + 2·KV·D + 4·hidden) + r·2·C + 4·(H + 2)        bytes

where an activation element has a bytes and a residual stream element r: 4 and 4 in float32, 2 and
2 in bfloat16, 2 and 4 under autocast. Autocast saves 3·C more elements, because it casts a norm's
output for each matmul that reads it. A checkpointed block saves its input, r·C; a selectively
checkpointed one its matmuls and attention, too. At the start of backward the logits take V·a bytes
per token three times: the log-probabilities, their gradient, and the logits' gradient.

Math attention, which torch uses where no fused kernel takes the inputs (bfloat16 on NVIDIA's GPUs
before Ampere, float32 with grouped heads), computes in float32 and saves 4·(H·T + 3·H·D) more, but
neither a·(H·D + 2·KV·D) nor 4·H. Softmax's backward holds three more such score matrices.

LoRA adds rank·(in + out) trained weights per adapted layer, and a frozen layer without an adapter
saves no input. QLoRA keeps the blocks' matrices in 4 bits (memlab.quantize.nf4) outside of N, and
holds one decoded matrix, a·C·hidden at most, while a block runs.

A step has its peak at one of four moments, and the formula gives all of them:

    loss        the last logits are computed        weights, state, saved, the loss's temporaries
    backward    it has just begun                   … and the last block's temporaries
    gradients   backward reaches block 0            weights, state, all gradients, one block's saved
    optimizer   the optimizer step                  weights, state, all gradients, its temporaries

QLoRA has one more, `loading`: all weights are on the GPU before they are quantized.

Tensor parallelism divides a block's saved bytes but for the residual stream and what norms save,
which sequence parallelism divides, too. The first stage of a pipeline saves min(m, p) micro-batches
of its blocks: m is `batch` with accumulation, and p without it. A rank is counted with both ends.

The formula ignores kernels' and allocators' details. `memlab.planner.plan` searches with it and
measures the recipes that it finds. Tests compare it with predictions: it is within 3 % for a 7B
model on one GPU, and within 10 % for small models, whose temporaries are as large as their weights.

Source   Korthikanti et al. 2022, arXiv 2205.05198, section 4; Rajbhandari et al. 2020, arXiv
         1910.02054, section 3.
"""

from dataclasses import dataclass
from typing import Any

from memlab.configs.shapes import GPTConfig
from memlab.configs.targets import target_named
from memlab.internals.sizes import (
    CHUNK_SIZE,
    CHUNK_SIZE_ON_ACCELERATOR,
    added_weights,
    chunk_rows,
    nf4_bytes,
)
from memlab.planner.parallel import micro_batches_in_flight
from memlab.planner.recipes import Recipe
from memlab.train.registry import TECHNIQUES
from memlab.train.technique import BlockBytes
from memlab.units import format_bytes

MOMENTS = ("loss", "backward", "gradients", "optimizer")
# What the allocator needs beyond a peak by formula, as a share of it. In 80 predictions of recipes
# on a full card, models of 7B and 8B needed up to 7.5 % more, and the 124M model up to 27 %
# (tests/planner/test_allowance.py).
RESERVED_MOST = 0.3
INT64, FLOAT32 = 8, 4
PLAIN = TECHNIQUES["plain"]
USUAL_STEP_COPIES = 5  # float32 copies of a chunk of a weight in a step of memlab's optimizers


@dataclass(frozen=True)
class Estimate:
    """Bytes by formula at each of MOMENTS, and while loading for QLoRA: {term: bytes}."""

    moments: dict[str, dict[str, int]]

    @property
    def moment(self) -> str:
        """The moment of the peak."""
        return max(self.moments, key=lambda moment: sum(self.moments[moment].values()))

    @property
    def terms(self) -> dict[str, int]:
        """The bytes at the peak by term."""
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
    """Estimate each GPU's bytes in a step of `batch` sequences per data-parallel rank.

    The default `seq_len` is the model's maximum. Raises ValueError for sizes below 1, and for
    parallel sizes that don't divide the GPUs or the model.
    """
    step = StepFormula.of(config, recipe, batch, seq_len, gpus=gpus, target=target)
    loading = ("loading",) if recipe.qlora else ()
    return Estimate({moment: getattr(step, moment)() for moment in (*MOMENTS, *loading)})


def data_ranks(config: GPTConfig, recipe: Recipe, gpus: int) -> int:
    """Return the number of data-parallel ranks: GPUs / (tensor parallel · pipeline parallel)."""
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
            f"{pipeline} pipeline parts; use a divisor of the heads, and at most as many pipeline "
            f"parts as layers"
        )
    return gpus // (tensor * pipeline)


@dataclass(frozen=True)
class WeightCounts:
    """The number of weights by place in the model."""

    block: int
    ends: int  # embedding, last norm and unembedding
    largest: int
    trained_block: int
    trained_ends: int
    after_block_0: int  # weights without a gradient when backward reaches block 0's MLP
    matmuls: int  # weights of the blocks' matmuls and the unembedding
    in_4_bits: int = 0  # bytes of a block's 4-bit matrices, which `block` leaves out

    @classmethod
    def of(cls, config: GPTConfig, recipe: Recipe) -> "WeightCounts":
        V, C, F = config.vocab_size, config.hidden_size, config.intermediate_size
        QD = config.heads * config.head_dim
        ends = V * C * (1 if config.tied else 2) + C
        block = (config.parameters - ends) // config.layers
        largest = max(V * C, C * F, C * QD)
        matmuls = config.layers * (block - 2 * C) + V * C
        if not recipe.has_adapters:
            embedding = 0 if config.tied else V * C
            return cls(block, ends, largest, block, ends, block - C * F + embedding, matmuls)
        rank, shapes = recipe.adapters.rank, layer_shapes(config)
        adapted = [shapes[name] for name in recipe.adapters.layers]
        added = sum(added_weights(*shape, rank=rank) for shape in adapted)
        in_4_bits = 0
        if recipe.qlora:
            block -= sum(columns * rows for columns, rows in shapes.values())
            in_4_bits = sum(nf4_bytes(columns * rows) for columns, rows in shapes.values())
        largest = rank * max(map(max, adapted))
        return cls(block + added, ends, largest, added, 0, added, matmuls, in_4_bits)


def layer_shapes(config: GPTConfig) -> dict[str, tuple[int, int]]:
    """Return the inputs and outputs of each linear layer of a block."""
    C, F = config.hidden_size, config.intermediate_size
    QD, KD = config.heads * config.head_dim, config.kv_heads * config.head_dim
    attention = {"query": (C, QD), "key": (C, KD), "value": (C, KD), "output": (QD, C)}
    return attention | {"gate": (C, F), "up": (C, F), "down": (F, C)}


class StepFormula:
    """The bytes of one rank's step, by formula."""

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
    ) -> "StepFormula":
        """Check the sizes and find the number of ranks; see `training_bytes`."""
        seq_len = config.seq_len if seq_len is None else seq_len
        for name, got in {"batch": batch, "seq_len": seq_len}.items():
            if not isinstance(got, int) or got < 1:
                raise ValueError(f"got {name}={got!r}; give an integer from 1")
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
        self.tokens = (1 if recipe.accumulation else batch) * seq_len  # per micro-batch
        self.weight_bytes = 4 if recipe.precision in ("float32", "autocast") else 2
        self.residual_bytes = self.weight_bytes
        self.activation_bytes = 4 if recipe.precision == "float32" else 2
        self.logit_bytes = 4 if recipe.precision == "autocast" else self.activation_bytes
        self.weights = WeightCounts.of(config, recipe)
        self.rows = tuple(recipe.rows.values())
        self.on_disk = frozenset().union(*(row.on_disk for row in self.rows))
        self.workspace = 0 if target == "cpu" else 2 * target_named(target).workspace_bytes
        self.piece = CHUNK_SIZE if target == "cpu" else CHUNK_SIZE_ON_ACCELERATOR
        self.fused_attention = target_named("cuda" if target == "cpu" else target).fused_attention(
            "float32" if self.activation_bytes == 4 else "bfloat16",
            config.heads,
            config.kv_heads,
            (config.head_dim, config.head_dim),
        )

    def _fact(self, name: str) -> Any:
        """Return a fact that one of the recipe's rows states in the registry, or None."""
        return next((fact for row in self.rows if (fact := getattr(row, name)) is not None), None)

    @property
    def is_streamed(self) -> bool:
        """True if weights are on disk while their block does not run."""
        return "weights" in self.on_disk

    # -------------------------------------------------------------- the moments

    def loading(self) -> dict[str, int]:
        """All weights are on the GPU before QLoRA quantizes them, one layer after another."""
        return {
            "weights": self.weight_bytes * self.config.parameters,
            "block_temporaries": USUAL_STEP_COPIES * FLOAT32 * self.piece,
        }

    def loss(self) -> dict[str, int]:
        """Forward has ended: all saved tensors, and the loss's temporaries in backward."""
        return self._held(
            blocks_kept=0 if self._is_kept_elsewhere else self._blocks_kept(),
            ends_kept=self._ends_kept(),
            cast_weights=self._cast_weights(),
            gradients=self._gradients_from_before(),
            loss_temporaries=self._loss_temporaries(),
        )

    def backward(self) -> dict[str, int]:
        """Backward runs the last block, which is recomputed if it was checkpointed; or the step of
        the unembedding, if weights are stepped in backward."""
        stepped = 0
        if self.recipe.step_in_backward and not self.recipe.has_adapters:
            unembedding = self.weight_bytes * self.config.vocab_size * self.config.hidden_size
            stepped = unembedding + self._step_temporaries()
        # Streamed layers hold two blocks in backward, the running and the prefetched one. Without
        # the second the formula was 6.2 % too low.
        prefetched = self.weight_bytes * self.weights.block if self.is_streamed else 0
        return self._held(
            blocks_kept=self._blocks_kept(),
            cast_weights=self._cast_weights_in_backward(),
            gradients=max(self._gradients_from_before(), self._first_gradient()),
            block_temporaries=max(stepped, self._block_temporaries()),
            prefetched_weights=prefetched,
        )

    def gradients(self) -> dict[str, int]:
        """Backward has reached block 0, whose own gradients don't exist yet."""
        all_but = max(
            self._gradients_from_before(), self._gradients(but=self.weights.after_block_0)
        )
        return self._held(
            blocks_kept=self._blocks_kept(1),
            cast_weights=self._cast_weights_in_backward(),
            gradients=all_but,
            block_temporaries=self._block_temporaries(),
        )

    def optimizer(self) -> dict[str, int]:
        """The optimizer step."""
        size = FLOAT32 if self._steps_copies else self.weight_bytes
        largest = size * self._on_rank(self.weights.largest, from_stage=1)
        takes_one = self.recipe.step_in_backward or self.is_streamed
        return self._held(
            stepped_copy=largest if self.is_streamed else 0,
            gradients=largest if takes_one else self._stepped_gradients(),
            optimizer_temporaries=self._step_temporaries(),
        )

    def _held(self, **others: int) -> dict[str, int]:
        """Add the terms that exist at every moment to the others."""
        is_stepping = "optimizer_temporaries" in others
        return {
            "weights": self._weight_bytes(is_stepping),
            "optimizer_state": self._state_bytes(is_stepping),
            "inputs": 2 * INT64 * self.batch_tokens,
            "rotary_tables": self.config.seq_len * self.config.head_dim * self.weight_bytes,
            "workspace": self.workspace,
            **others,
        }

    @property
    def _steps_copies(self) -> bool:
        """True if float32 gradients replace the others while the optimizer steps."""
        recipe = self.recipe
        return recipe.precision == "master-weights" or self.is_streamed

    # -------------------------------------------------------------- bytes for the time estimate

    def stepped_bytes(self) -> tuple[int, int, int]:
        """Return the bytes of weights, gradients and state that this rank's optimizer touches."""
        shard = self._on_rank(self._trained(), from_stage=1)
        return self.weight_bytes * shard, self.weight_bytes * shard, round(self._by_weight * shard)

    def saved_bytes_uncompressed(self) -> int:
        """Return the bytes of a micro-batch's saved tensors before they are encoded."""
        bits = self.recipe.activation_bits
        factor = 1 if bits is None else 8 * self.activation_bytes / bits
        return round(factor * self.layers * self._block_kept())

    def streamed_bytes(self) -> int:
        """Return the bytes of the weights of all blocks, frozen or not."""
        return self.weight_bytes * self.layers * self.weights.block

    @property
    def trained(self) -> int:
        """The number of weights with gradients in this rank's part of the model."""
        return -(-self._trained() // self.tensor)

    # -------------------------------------------------------------- model states

    def _on_rank(self, elements: int, from_stage: int) -> int:
        """Return this rank's share of the elements, which ZeRO shards from a given stage on."""
        mine = -(-elements // self.tensor)
        return -(-mine // self.ranks) if self.recipe.zero_stage >= from_stage else mine

    def _all(self) -> int:
        return self.layers * self.weights.block + self.weights.ends

    def _trained(self) -> int:
        return self.layers * self.weights.trained_block + self.weights.trained_ends

    def _weight_bytes(self, is_stepping: bool) -> int:
        if self.is_streamed:
            running = 0 if is_stepping else self.weights.block
            return self.weight_bytes * (self.weights.ends + running)
        whole = self._on_rank(self._all(), from_stage=3)
        if self.recipe.zero_stage == 3:  # one running block and one prefetched, or the ends
            whole += max(2 * self.weights.block, self.weights.ends + self.weights.block)
        in_4_bits = -(-self.layers * self.weights.in_4_bits // self.tensor)  # no rank shards them
        return self.weight_bytes * whole + in_4_bits

    def decoded_elements(self) -> int:
        """Return the number of weights that one pass over the blocks decodes."""
        if not self.recipe.qlora:
            return 0
        shapes = layer_shapes(self.config).values()
        return self.layers * sum(columns * rows for columns, rows in shapes) // self.tensor

    def _decoded_weight(self) -> int:
        """Return the bytes of the largest decoded 4-bit weight."""
        if not self.recipe.qlora:
            return 0
        shapes = layer_shapes(self.config).values()
        return self.activation_bytes * max(columns * rows for columns, rows in shapes)

    def _state_bytes(self, is_stepping: bool) -> int:
        if "state" in self.on_disk:  # the largest weight is no hidden layer's matrix
            return round(self._by_other_weight * self.weights.largest) if is_stepping else 0
        return round(self._by_weight * self._on_rank(self._trained(), from_stage=1))

    @property
    def _by_weight(self) -> float:
        """The bytes of optimizer state per trained weight, on average."""
        step, shapes = self._fact("matrix_step"), self._own_matrices()
        by_other, trained = self._by_other_weight, self._trained()
        if step is None:
            return by_other
        others = trained - self.layers * sum(short * long for short, long in shapes)
        state = sum(step.state_bytes(*shape, self._rank) for shape in shapes)
        return (by_other * others + self.layers * state) / trained

    @property
    def _by_other_weight(self) -> float:
        known: Any = self._fact("state_bytes")
        assert PLAIN.state_bytes is not None
        return PLAIN.state_bytes if known is None else known

    @property
    def _rank(self) -> int:
        """The rank of the optimizer's matrix step."""
        return self._fact("matrix_step").rank(self.config.hidden_size)

    def _own_matrices(self) -> list[tuple[int, int]]:
        """Return the short and long side of a block's trained matrices that the optimizer steps in
        a way of its own."""
        if self._fact("matrix_step") is None:
            return []
        shapes, adapters = layer_shapes(self.config), self.recipe.adapters
        matrices = list(shapes.values())
        if self.recipe.has_adapters:
            adapted = [shapes[name] for name in adapters.layers]
            matrices = [(adapters.rank, side) for shape in adapted for side in shape]
        sides = [(min(shape), max(shape)) for shape in matrices]
        return [(short, long) for short, long in sides if short > self._rank]

    def matrix_operations(self) -> tuple[int, str]:
        """Return the operations of the optimizer's matmuls in a step, and their dtype."""
        step, shapes = self._fact("matrix_step"), self._own_matrices()
        if step is None:
            return 0, "bfloat16"
        count = self.layers * sum(step.operations(*shape, self._rank) for shape in shapes)
        return count, step.operations_dtype

    def _gradients(self, *, but: int = 0) -> int:
        """Return the bytes of gradients after backward, without `but` elements; 0 if each gradient
        is used at once."""
        if self.recipe.step_in_backward or self.is_streamed:
            return 0
        return self.weight_bytes * self._on_rank(self._trained() - but, from_stage=2)

    def _stepped_gradients(self) -> int:
        """Return the bytes of gradients in the step. Copies in float32 are made for the stepped
        weights. They replace the others, but in stages 0 and 1 all ranks' gradients are one flat
        tensor, which stays."""
        if not self._steps_copies:
            return self._gradients()
        stays = self.ranks > 1 and self.recipe.zero_stage < 2
        copies = FLOAT32 * self._on_rank(self._trained(), from_stage=1)
        # Without this, stage 0 was 10 % too low; with copies of all gradients, stage 1 was 14 % too
        # high. The errors are 0.4 % and 1.6 % now.
        return copies + (self._gradients() if stays else 0)

    def _gradients_from_before(self) -> int:
        """Return the bytes of the accumulated float32 gradients of earlier micro-batches."""
        adds = self.recipe.accumulation and self.batch_tokens > self.tokens
        # In float32 also for bfloat16 weights: 25 GiB for 7B instead of 12.55. Two bytes per
        # gradient gave 38.8 GiB for a step that needed 51.4.
        return FLOAT32 * self._gradients() // self.weight_bytes if adds else 0

    def _first_gradient(self) -> int:
        """Return the bytes of the unembedding's gradient."""
        if self.recipe.has_adapters or self.recipe.step_in_backward or self.is_streamed:
            return 0
        return self.weight_bytes * self.config.vocab_size * self.config.hidden_size // self.tensor

    def _cast_weights(self) -> int:
        """Return the bytes of autocast's bfloat16 copies of weights, which backward needs."""
        if self.recipe.precision != "autocast":
            return 0
        if self.recipe.qlora:  # decoded in bfloat16 and dropped again
            head = self.config.vocab_size * self.config.hidden_size
            return 2 * (head + self._trained())
        return 2 * self.weights.matmuls

    def _cast_weights_in_backward(self) -> int:
        """Return the bytes of the copies that last until a block's backward. A checkpointed block
        casts its own weights again."""
        head = self.config.vocab_size * self.config.hidden_size
        if self.recipe.checkpointing is None:
            return self._cast_weights()
        # Counting them to the end of backward was 4.0 % off.
        return min(self._cast_weights(), 2 * (head + self.weights.block))

    # -------------------------------------------------------------- activations

    def _blocks_kept(self, blocks: int | None = None) -> int:
        """Return the bytes that `blocks` blocks save, by default all."""
        if self._is_kept_elsewhere:
            return self._block_kept()  # about one block is being copied
        blocks = self.layers * self._in_flight() if blocks is None else blocks
        return blocks * self._own(self._block_kept(), self._whole(self._block_kept()))

    def _in_flight(self) -> int:
        """Return the micro-batches that the first stage of a pipeline saves at once."""
        stages = self.recipe.pipeline_parallel
        sequences = self.batch_tokens // self.seq_len
        micro_batches = sequences if self.recipe.accumulation else stages
        return micro_batches_in_flight(0, stages, micro_batches)

    def _own(self, saved: int, whole: int) -> int:
        """Return a rank's part of `saved` bytes; only sequence parallelism divides `whole`."""
        if self.recipe.sequence_parallel:
            return -(-saved // self.tensor)
        return whole + -(-(saved - whole) // self.tensor)

    def _whole(self, saved: int) -> int:
        """Return what tensor parallelism does not divide of a block's saved bytes: the residual
        stream, what norms save, and the output of attention's matmul that sums over ranks."""
        C, a = self.config.hidden_size, self.activation_bytes
        stream = self.tokens * self.residual_bytes * C
        if kept := self._fact("kept"):
            whole = kept(BlockBytes(input=stream, matmuls=self.tokens * a * C))
        else:
            whole = 2 * stream + self.tokens * (a * C * self._saved_norms() + 2 * FLOAT32)
        return min(saved, self._compressed(whole))

    @property
    def _is_kept_elsewhere(self) -> bool:
        return "activations" in self.on_disk

    def _block_kept(self, *, is_needed: bool = False) -> int:
        """Return the bytes that one block saves until its backward pass, without those that its
        backward doesn't need if `is_needed`: the scores that go into softmax."""
        config, a, r = self.config, self.activation_bytes, self.residual_bytes
        C, QD, KD = config.hidden_size, *self._head_widths
        # No backward needs the output of the block's last matmul. Counting the wrong outputs made
        # the formula 5.8 % wrong, now 0.2 %.
        matmuls = QD + 2 * KD + C + 2 * config.intermediate_size  # all but the MLP's last
        if self.recipe.has_adapters:  # their matmuls, too
            shapes = layer_shapes(config)
            matmuls += sum(shapes[name][1] for name in self.recipe.adapters.layers)
        outputs = a * (QD + matmuls) + 4 * config.heads
        if self._scores:  # two matmuls in float32, and no statistics
            outputs += (FLOAT32 - a) * QD - 4 * config.heads + (0 if is_needed else self._scores)
        saved = BlockBytes(input=self.tokens * r * C, matmuls=self.tokens * outputs)
        kept = self._fact("kept")
        return self._compressed(kept(saved)) if kept else self._block_made()

    def _block_made(self) -> int:
        """Return the bytes that a block without checkpointing saves."""
        config, a, r = self.config, self.activation_bytes, self.residual_bytes
        C, QD, KD = config.hidden_size, *self._head_widths
        norms = C * self._saved_norms()
        mlp = config.intermediate_size * (3 + self._saves_input("down"))
        elements = a * (norms + 2 * QD + 2 * KD + mlp) + r * 2 * C
        per_token = elements + 4 * (config.heads + 2) + self._attention_more()
        return self._compressed(self.tokens * per_token)

    def _saved_norms(self) -> int:
        """Return how many norm outputs a block saves: two; under autocast a copy per reader."""
        readers = ("query", "key", "value"), ("gate", "up")
        if self.recipe.precision == "autocast":
            return sum(self._saves_input(name) for names in readers for name in names)
        return sum(self._saves_input(*names) for names in readers)

    def _saves_input(self, *layers: str) -> bool:
        """Return whether one of the layers saves its input: it has a gradient, or its adapter."""
        recipe = self.recipe
        return not recipe.has_adapters or any(name in recipe.adapters.layers for name in layers)

    def _attention_more(self) -> int:
        """Return the bytes per token that attention saves more than a fused kernel. Math attention
        computes in float32: it saves its scores, and copies of queries, keys and values with a key
        and a value for each query head, but no statistics of rows."""
        config, a = self.config, self.activation_bytes
        QD, KD = self._head_widths
        if self.recipe.attention == "eager-attention":
            return a * (config.heads * self.seq_len + 2 * (QD - KD))
        if not self._scores:
            return 0
        return self._scores + FLOAT32 * 3 * QD - a * (QD + 2 * KD) - 4 * config.heads

    @property
    def _scores(self) -> int:
        """The bytes of math attention's scores per token, 0 with a fused kernel."""
        if self.recipe.attention is not None or self.fused_attention:
            return 0
        return FLOAT32 * self.config.heads * self.seq_len

    def _compressed(self, count: int) -> int:
        encoded = self._fact("encoded")
        return encoded(count // self.activation_bytes) if encoded else count

    @property
    def _head_widths(self) -> tuple[int, int]:
        """The queries' and the keys' total width over all heads."""
        D = self.config.head_dim
        return self.config.heads * D, self.config.kv_heads * D

    def _ends_kept(self) -> int:
        """Return the bytes saved by the last norm and the loss: log-probabilities, or gradients
        that the chunked loss has already computed. A frozen unembedding does not save its input."""
        C, V = self.config.hidden_size, self.config.vocab_size // self.tensor
        read = 0 if self.recipe.has_adapters else self.activation_bytes
        norm = self.tokens * ((self.residual_bytes + read) * C + 4)
        norm = self._own(norm, norm)
        if self.recipe.chunked_loss:
            weight_gradient = 0 if self.recipe.has_adapters else V * C
            return norm + FLOAT32 * (self.tokens * C + weight_gradient)
        return norm + self.tokens * V * self.logit_bytes

    def _loss_temporaries(self) -> int:
        """Return the bytes of the gradients of log-probabilities and logits. With the chunked loss,
        a chunk's logits or the gradients cast to the weights' dtype."""
        C, V, n = self.config.hidden_size, self.config.vocab_size // self.tensor, self.tokens
        if not self.recipe.chunked_loss:  # with autocast, one of the two is in bfloat16
            return n * V * (self.logit_bytes + self.activation_bytes)
        logit_copy = 0 if self.activation_bytes == 4 else self.activation_bytes
        chunk = (FLOAT32 + logit_copy) * chunk_rows(n, V, C) * V
        has_cast = self.weight_bytes < FLOAT32 and not self.recipe.has_adapters
        return max(chunk, self.weight_bytes * V * C if has_cast else 0)

    def _block_temporaries(self) -> int:
        """Return the temporaries of a block's backward pass: the residual stream's gradient, and
        two gradients of the intermediate size or attention's, and in a checkpointed block what is
        recomputed."""
        made = 0
        if self.recipe.checkpointing is not None:
            made = max(0, self._block_made() - self._block_kept(is_needed=True))
        a, C, F = self.activation_bytes, self.config.hidden_size, self.config.intermediate_size
        stream = self.tokens * C * self.residual_bytes
        gradients = self.tokens * max(2 * F * a, self._attention_gradients())
        divided = gradients + self._decoded_weight()
        # Of a block that runs again, the output of the second norm and the stream in its middle.
        norms = self.tokens * a * C * self._saved_norms() if made else 0
        whole = stream + min(made, norms + stream)
        return self._own(divided + stream + made, whole)

    def _attention_gradients(self) -> int:
        """Return the bytes per token of the scores' gradients: softmax's backward holds three
        tensors of their size. The MLP's saved tensors are free by then."""
        if self.recipe.attention == "eager-attention":
            return self.activation_bytes * (2 * self.config.intermediate_size) + (
                self._attention_more()
            )
        freed = self.activation_bytes * 3 * self.config.intermediate_size
        return max(0, 3 * self._scores - freed)

    # -------------------------------------------------------------- the optimizer

    def _step_temporaries(self) -> int:
        """Return the optimizer's temporaries. torch's AdamW makes two tensors the size of the
        largest weight; memlab's optimizers work on chunks. With streamed layers, a weight's whole
        float32 copy is cast before it is freed."""
        recipe, largest = self.recipe, self._on_rank(self.weights.largest, from_stage=1)
        if recipe.optimizer == "adamw" and recipe.precision != "bfloat16":
            return 2 * FLOAT32 * largest
        copies = self._fact("step_copies") or USUAL_STEP_COPIES
        chunks = round(copies * FLOAT32 * min(self.piece, largest))
        step, shapes = self._fact("matrix_step"), self._own_matrices()
        chunks = max([chunks, *(step.temporary_bytes(*shape, self._rank) for shape in shapes)])
        is_cast = self.is_streamed and self.weight_bytes < FLOAT32
        return max(chunks, self.weight_bytes * largest) if is_cast else chunks
