"""What can be turned on in one training, as plain data: a Recipe.

A recipe is nothing new. Each of its words is a row of `memlab.train.TECHNIQUES`, or leaves a plug
as it is, and `techniques` is what `memlab train --technique` and `combined` take. Words of two
kinds stand in it:

    what is learned      precision, optimizer, lora, activation_bits: another word, another training
    how it is computed   all others: the same gradients, up to the order of sums, in fewer bytes

so recipes of the same first words compete by time alone, and between others a person chooses.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache
from itertools import product
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # which words there are is known without torch
    import torch

PRECISIONS = {  # the weights' dtype, and the row that goes with it
    "float32": ("float32", None),
    "autocast": ("float32", "autocast"),
    "bfloat16": ("bfloat16", None),
    "master-weights": ("bfloat16", "master-weights"),
}
OPTIMIZERS = ("adamw", "adam8bit", "adam-mini", "lion", "lion8bit")
CHECKPOINTING = (None, "checkpointing", "sqrt-checkpointing", "selective-checkpointing")
ATTENTION = (None, "flash-attention", "eager-attention")
OFFLOAD = (None, "offloaded-optimizer", "offloaded-activations", "streamed-layers")
# What `memlab.zero` refuses to step a shard by: neighbours share something, or moments are rounded
# at random, otherwise in each cut.
NOT_SHARDED = ("adam8bit", "adam-mini", "lion8bit", "bfloat16")
COMPRESSION = {None: None, 8: "int8-activations", 4: "int4-activations"}
STAGES = (0, 1, 2, 3)


@dataclass(frozen=True)
class Recipe:
    """One choice of everything; the defaults are AdamW in bfloat16, and nothing saved.

    precision         "float32"; "autocast", its products in bfloat16; "bfloat16", weights rounded
                      at random; "master-weights", bfloat16 and float32 copies
    optimizer         one of OPTIMIZERS; AdamW's moments have the weights' dtype
    lora              frozen weights and trained changes of rank 8 in every block
    activation_bits   8 or 4 of each number that is kept for backward; None: as it is
    checkpointing     one of CHECKPOINTING: which activations are forgotten and computed again
    attention         None is torch's fused kernel
    chunked_loss      the logits of some tokens at a time
    accumulation      one sequence at a time, their gradients added
    step_in_backward  each weight stepped as soon as its gradient is there
    offload           what is on the host or the disk meanwhile
    zero_stage        what is sharded among data-parallel ranks
    tensor_parallel   each matrix in so many parts, by formula alone
    pipeline_parallel the blocks in so many parts, one after another, by formula alone

    ValueError for a word that is not known, and for two that exclude each other.
    """

    precision: str = "bfloat16"
    optimizer: str = "adamw"
    lora: bool = False
    activation_bits: int | None = None
    checkpointing: str | None = None
    attention: str | None = None
    chunked_loss: bool = False
    accumulation: bool = False
    step_in_backward: bool = False
    offload: str | None = None
    zero_stage: int = 0
    tensor_parallel: int = 1
    pipeline_parallel: int = 1

    def __post_init__(self) -> None:
        for name, known in _KNOWN.items():
            got = getattr(self, name)
            if got not in known:
                words = ", ".join(repr(word) for word in known)
                raise ValueError(f"got {name}={got!r} in a recipe; choose one of {words}")
        for name in ("tensor_parallel", "pipeline_parallel"):
            got = getattr(self, name)
            if not isinstance(got, int) or got < 1:
                raise ValueError(f"got {name}={got!r} in a recipe; give a number of GPUs from 1")
        if complaint := self._complaint():
            raise ValueError(complaint)

    def _complaint(self) -> str | None:
        """Why two of its words exclude each other; None if no two do."""
        if self.precision == "master-weights" and self.optimizer != "adamw":
            return f"float32 copies are stepped by AdamW here, not by {self.optimizer}; leave one"
        if self.precision == "master-weights" and (self.step_in_backward or self._moves_weights):
            return (
                "float32 copies are stepped after backward, where they are; leave step_in_backward "
                "and the offload of the optimizer out, or take precision='bfloat16'"
            )
        if self.step_in_backward and self.accumulation:
            return (
                "a weight that is stepped in backward has no gradient left to be added to; leave "
                "step_in_backward or accumulation out"
            )
        if self.accumulation and self.offload == "streamed-layers":
            return (
                "gradients of streamed layers are taken away after each backward pass, before "
                "another is added; leave accumulation or streamed-layers out"
            )
        if self.zero_stage and (self.step_in_backward or self._moves_weights):
            return "ZeRO sends gradients that a step in backward or an offloaded one has used up"
        return _exclusion(self.techniques)

    @property
    def _moves_weights(self) -> bool:
        return self.offload in ("offloaded-optimizer", "streamed-layers")

    @property
    def dtype(self) -> "torch.dtype":
        """Of the weights, and of `memlab.train.Setting`."""
        import torch

        return getattr(torch, PRECISIONS[self.precision][0])

    @property
    def techniques(self) -> str:
        """The rows of TECHNIQUES, joined by "+", as `combined` and the command line take them."""
        rows = [
            self.checkpointing,
            COMPRESSION[self.activation_bits],
            PRECISIONS[self.precision][1],
            self.attention,
            "chunked-loss" if self.chunked_loss else None,
            "accumulation" if self.accumulation else None,
            "lora" if self.lora else None,
            self._optimizer_row,
            "step-in-backward" if self.step_in_backward else None,
            self.offload,
        ]
        return "+".join(row for row in rows if row) or "plain"

    @property
    def _optimizer_row(self) -> str | None:
        if self.optimizer != "adamw":
            return self.optimizer
        return "bfloat16" if self.precision == "bfloat16" else None  # AdamW that rounds at random

    @property
    def learned(self) -> "Recipe":
        """The recipe of what is learned alone: equal for all that train the same."""
        return Recipe(self.precision, self.optimizer, self.lora, self.activation_bits)

    @property
    def by_formula_only(self) -> bool:
        """Whether nothing here can run it, so that its bytes are not measured."""
        return self.tensor_parallel * self.pipeline_parallel > 1

    @property
    def words(self) -> str:
        """What is on, to be read: what is learned, then how."""
        how = [
            "LoRA" if self.lora else None,
            COMPRESSION[self.activation_bits],
            self.checkpointing,
            self.attention,
            "chunked loss" if self.chunked_loss else None,
            "accumulation" if self.accumulation else None,
            "step in backward" if self.step_in_backward else None,
            self.offload,
            *self._on_gpus(),
        ]
        learned = f"{self.precision} {self.optimizer}"
        return ", ".join([learned, *(word for word in how if word)])

    def __str__(self) -> str:
        return self.words

    def _on_gpus(self) -> Iterator[str]:
        if self.zero_stage:
            yield f"ZeRO stage {self.zero_stage}"
        if self.tensor_parallel > 1:
            yield f"tensor parallel {self.tensor_parallel}"
        if self.pipeline_parallel > 1:
            yield f"pipeline parallel {self.pipeline_parallel}"


_KNOWN = {
    "precision": tuple(PRECISIONS),
    "optimizer": OPTIMIZERS,
    "lora": (False, True),
    "activation_bits": tuple(COMPRESSION),
    "checkpointing": CHECKPOINTING,
    "attention": ATTENTION,
    "chunked_loss": (False, True),
    "accumulation": (False, True),
    "step_in_backward": (False, True),
    "offload": OFFLOAD,
    "zero_stage": STAGES,
}


@cache
def _exclusion(techniques: str) -> str | None:
    """Why two rows exclude each other, in the words of the table."""
    if "+" not in techniques:
        return None
    from memlab.train import combined

    try:
        combined(techniques)
    except ValueError as error:
        return str(error)
    return None


@cache
def usual_kinds() -> tuple[Recipe, ...]:
    """What is learned, from what changes least on. LoRA trains another, smaller thing: it is
    searched in bfloat16 alone. (Not made at import: whether two rows go together, torch knows.)"""
    return (
        *(Recipe(precision) for precision in PRECISIONS),
        *(Recipe(optimizer=optimizer) for optimizer in OPTIMIZERS[1:]),
        Recipe(lora=True),
    )


def recipes(
    learned: Recipe, *, sequences: int, gpus: int = 1, parallel: tuple[int, int] = (1, 1)
) -> Iterator[Recipe]:
    """All ways to compute a training: what differs in bytes and time, and not in what is learned.

    With several ranks none for an optimizer that cannot step a shard. `sequences` of each GPU
    decide whether there is anything to accumulate. torch's fused attention stays: ours takes its
    bytes in more time, and eager attention more of both.
    """
    tensor, pipeline = parallel
    has_ranks = gpus > tensor * pipeline
    if has_ranks and learned._optimizer_row in NOT_SHARDED:
        return
    stages = STAGES if has_ranks else (0,)
    for checkpointing, chunked, accumulated, in_backward, offload, stage in product(
        (None, "selective-checkpointing", "checkpointing"),
        (False, True),
        (False, True) if sequences > 1 else (False,),
        (False, True),
        OFFLOAD,
        stages,
    ):
        try:
            yield replace(
                learned,
                checkpointing=checkpointing,
                chunked_loss=chunked,
                accumulation=accumulated,
                step_in_backward=in_backward,
                offload=offload,
                zero_stage=stage,
                tensor_parallel=tensor,
                pipeline_parallel=pipeline,
            )
        except ValueError:  # two of these exclude each other
            continue
