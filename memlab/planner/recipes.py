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
from typing import TYPE_CHECKING, Any

from memlab.train.registry import TECHNIQUES, why_not_together
from memlab.train.technique import Technique

if TYPE_CHECKING:  # which words there are is known without torch
    import torch

# The weights' dtype of each precision. A row of the registry goes with two of them.
PRECISIONS = {
    "float32": "float32",
    "autocast": "float32",
    "bfloat16": "bfloat16",
    "master-weights": "bfloat16",
}
STAGES = (0, 1, 2, 3)


def words_for(field: str) -> tuple[Any, ...]:
    """The values of a Recipe's field that the registry has a row for."""
    choices = (row.choice for row in TECHNIQUES.values() if row.choice)
    return tuple(value for of, value in choices if of == field)


OPTIMIZERS = ("adamw", *words_for("optimizer"))
OFFLOAD = (None, *words_for("offload"))


@dataclass(frozen=True)
class Recipe:
    """One choice of everything; the defaults are AdamW in bfloat16, and nothing saved.

    precision         "float32"; "autocast", its products in bfloat16; "bfloat16", weights rounded
                      at random; "master-weights", bfloat16 and float32 copies
    optimizer         "adamw" or a row of the registry; AdamW's moments have the weights' dtype
    lora              frozen weights and trained changes of rank 8 in every block
    activation_bits   8 or 4 of each number that is kept for backward; None: as it is
    checkpointing     which activations are dropped and recomputed; None: none
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
        if reason := why_not_together(self.rows):
            return reason
        if self.zero_stage:
            return next((row.one_process for row in self.rows.values() if row.one_process), None)
        return None

    @property
    def rows(self) -> dict[str, Technique]:
        """The registry's rows that it turns on, in the registry's order."""
        return {
            name: row
            for name, row in TECHNIQUES.items()
            if row.choice and getattr(self, row.choice[0]) == row.choice[1]
        }

    @property
    def rounded_adamw(self) -> bool:
        """Whether AdamW rounds bfloat16 weights stochastically: a row of its own."""
        return self.precision == "bfloat16" and self.optimizer == "adamw"

    @property
    def dtype(self) -> "torch.dtype":
        """Of the weights, and of `memlab.train.Setting`."""
        import torch

        return getattr(torch, PRECISIONS[self.precision])

    @property
    def techniques(self) -> str:
        """The rows' names joined by "+", as `combined` and the command line take them."""
        return "+".join(self.rows) or "plain"

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
            f"int{self.activation_bits}-activations" if self.activation_bits else None,
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


_KNOWN: dict[str, tuple[Any, ...]] = {
    "precision": tuple(PRECISIONS),
    "optimizer": OPTIMIZERS,
    "lora": (False, True),
    "activation_bits": (None, *words_for("activation_bits")),
    "checkpointing": (None, *words_for("checkpointing")),
    "attention": (None, *words_for("attention")),
    "chunked_loss": (False, True),
    "accumulation": (False, True),
    "step_in_backward": (False, True),
    "offload": OFFLOAD,
    "zero_stage": STAGES,
}


@cache
def usual_kinds() -> tuple[Recipe, ...]:
    """What is learned, from what changes least on. LoRA trains another, smaller thing: it is
    searched in bfloat16 alone."""
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
    if has_ranks and any(row.cannot_shard for row in learned.rows.values()):
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
