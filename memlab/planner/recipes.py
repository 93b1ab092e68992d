"""The techniques of one training as plain data: a Recipe.

Each field of a recipe corresponds to a row of `memlab.train.TECHNIQUES` or keeps the default.
`techniques` is the text that `memlab train --technique` and `combined` take. There are two kinds of
fields:

    the training        precision, optimizer, lora, qlora, adapters, activation_bits: they change
                        the result
    its computation     all others: the same gradients, up to summation order, in fewer bytes

Recipes that train the same compete by time alone. A person chooses between the others. Full
fine-tuning, LoRA and QLoRA are separate groups: they learn different things at different prices.
"""

from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from functools import cache
from itertools import product
from typing import TYPE_CHECKING, Any

from memlab.train.adapters import Adapters
from memlab.train.registry import ONE_PROCESS, TECHNIQUES, whole_weights, why_not_together
from memlab.train.technique import Technique

if TYPE_CHECKING:  # the choices are known without torch
    import torch

# The weights' dtype of each precision. Two of them have rows in the registry.
PRECISIONS = {
    "float32": "float32",
    "autocast": "float32",
    "bfloat16": "bfloat16",
    "master-weights": "bfloat16",
}
STAGES = (0, 1, 2, 3)
USUAL_ADAPTERS = Adapters()
GROUPS = ("full fine-tuning", "LoRA", "QLoRA")  # in the order of a plan's table


def words_for(field: str) -> tuple[Any, ...]:
    """Return the values of a Recipe's field that have a row in the registry."""
    choices = (row.choice for row in TECHNIQUES.values() if row.choice)
    return tuple(value for of, value in choices if of == field)


OPTIMIZERS = ("adamw", *words_for("optimizer"))
OFFLOAD = (None, *words_for("offload"))


@dataclass(frozen=True)
class Recipe:
    """One choice for each technique. The default is AdamW in bfloat16 without techniques.

    precision         "float32"; "autocast": bfloat16 matmuls; "bfloat16": weights rounded
                      stochastically; "master-weights": bfloat16 with float32 copies
    optimizer         "adamw" or a row of the registry; AdamW's moments have the weights' dtype
    lora              frozen weights and trained adapters in every block
    qlora             the same, with the blocks' frozen weights in 4 bits
    adapters          their rank and layers
    activation_bits   8 or 4 bits per saved element; None: no compression
    checkpointing     which activations are dropped and recomputed; None: none
    attention         None: torch's fused kernel
    chunked_loss      compute the loss in chunks of tokens
    accumulation      one sequence at a time, with gradients accumulated
    step_in_backward  step each weight as soon as its gradient is ready
    offload           tensors kept on the host or the disk
    zero_stage        what data-parallel ranks shard
    tensor_parallel   GPUs that split each matrix; by formula only, as the next two
    sequence_parallel whether these GPUs also split what they would all save whole
    pipeline_parallel GPUs that split the blocks

    Raises ValueError for an unknown value, and for two that exclude each other.
    """

    precision: str = "bfloat16"
    optimizer: str = "adamw"
    lora: bool = False
    qlora: bool = False
    adapters: Adapters = USUAL_ADAPTERS
    activation_bits: int | None = None
    checkpointing: str | None = None
    attention: str | None = None
    chunked_loss: bool = False
    accumulation: bool = False
    step_in_backward: bool = False
    offload: str | None = None
    zero_stage: int = 0
    tensor_parallel: int = 1
    sequence_parallel: bool = False
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
                raise ValueError(f"got {name}={got!r} in a recipe; give an integer from 1")
        if complaint := self._complaint():
            raise ValueError(complaint)

    def _complaint(self) -> str | None:
        """Return why two of the choices exclude each other; None if none do."""
        if reason := why_not_together(self.rows):
            return reason
        if self.zero_stage == STAGES[-1] and (whole := whole_weights(self.rows.values())):
            return whole
        return self.why_not_on_ranks if self.zero_stage else None

    @property
    def why_not_on_ranks(self) -> str | None:
        """Why data-parallel ranks cannot run it, sharded or not; None if they can."""
        filled = {plug for row in self.rows.values() for plug in row.plugs}
        return next((reason for plug, reason in ONE_PROCESS.items() if plug in filled), None)

    @property
    def rows(self) -> dict[str, Technique]:
        """The registry's rows that the recipe turns on, in registry order."""
        return {
            name: row
            for name, row in TECHNIQUES.items()
            if row.choice and getattr(self, row.choice[0]) == row.choice[1]
        }

    @property
    def rounded_adamw(self) -> bool:
        """True if AdamW rounds bfloat16 weights stochastically, which is a row of its own."""
        return self.precision == "bfloat16" and self.optimizer == "adamw"

    @property
    def dtype(self) -> "torch.dtype":
        """The weights' dtype, for `memlab.train.Setting`."""
        import torch

        return getattr(torch, PRECISIONS[self.precision])

    @property
    def techniques(self) -> str:
        """The rows' names joined by "+", as `combined` and the command line take them."""
        return "+".join(self.rows) or "plain"

    @property
    def learned(self) -> "Recipe":
        """The fields that change the result, equal for all recipes that train the same."""
        trained = (self.lora, self.qlora, self.adapters, self.activation_bits)
        return Recipe(self.precision, self.optimizer, *trained)

    @property
    def has_adapters(self) -> bool:
        """True if the model is frozen and only adapters are trained."""
        return self.lora or self.qlora

    @property
    def group(self) -> str:
        """Which of GROUPS the training belongs to."""
        return "QLoRA" if self.qlora else "LoRA" if self.lora else "full fine-tuning"

    @property
    def words(self) -> str:
        """A readable description: the training, then its techniques."""
        how = [
            self._adapter_words,
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

    @property
    def settings(self) -> dict[str, Any]:
        """The fields, for JSON."""
        return asdict(self)

    @property
    def _adapter_words(self) -> str | None:
        if not self.has_adapters:
            return None
        rank = "" if self.adapters.rank == USUAL_ADAPTERS.rank else f" rank {self.adapters.rank}"
        targets = self.adapters.targets
        return f"{self.group}{rank}{'' if targets == USUAL_ADAPTERS.targets else f' on {targets}'}"

    def __str__(self) -> str:
        return self.words

    def _on_gpus(self) -> Iterator[str]:
        if self.zero_stage:
            yield f"ZeRO stage {self.zero_stage}"
        if self.tensor_parallel > 1:
            is_whole = "" if self.sequence_parallel else "out"
            yield f"tensor parallel {self.tensor_parallel} with{is_whole} sequence parallelism"
        if self.pipeline_parallel > 1:
            yield f"pipeline parallel {self.pipeline_parallel}"


_KNOWN: dict[str, tuple[Any, ...]] = {
    "precision": tuple(PRECISIONS),
    "optimizer": OPTIMIZERS,
    "lora": (False, True),
    "qlora": (False, True),
    "activation_bits": (None, *words_for("activation_bits")),
    "checkpointing": (None, *words_for("checkpointing")),
    "attention": (None, *words_for("attention")),
    "chunked_loss": (False, True),
    "accumulation": (False, True),
    "step_in_backward": (False, True),
    "offload": OFFLOAD,
    "zero_stage": STAGES,
    "sequence_parallel": (False, True),
}


@cache
def usual_kinds() -> tuple[Recipe, ...]:
    """Return the kinds of training to search, from the smallest change on. LoRA and QLoRA train a
    smaller model, and are searched in bfloat16 only."""
    return (
        *(Recipe(precision) for precision in PRECISIONS),
        *(Recipe(optimizer=optimizer) for optimizer in OPTIMIZERS[1:]),
        Recipe(lora=True),
        Recipe(qlora=True),
    )


def recipes(learned: Recipe, *, sequences: int, gpus: int = 1) -> Iterator[Recipe]:
    """Yield all ways to compute a training, which differ in bytes and time but train the same.

    With several ranks, skip what they cannot run. `sequences` per GPU decides whether there is
    anything to accumulate. Attention stays torch's fused kernel: memlab's needs the same bytes and
    more time, and eager attention more of both.
    """
    has_ranks = gpus > 1
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
            recipe = replace(
                learned,
                checkpointing=checkpointing,
                chunked_loss=chunked,
                accumulation=accumulated,
                step_in_backward=in_backward,
                offload=offload,
                zero_stage=stage,
            )
        except ValueError:  # two of the choices exclude each other
            continue
        if not (has_ranks and recipe.why_not_on_ranks):
            yield recipe
