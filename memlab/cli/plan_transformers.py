"""`memlab plan` for a model of transformers: a row for each group of recipes, and its code."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from textwrap import indent

from memlab.cli.errors import UsageError, require_known
from memlab.cli.plan_report import EMPTIES_CACHE, Result, Section, columns_of, room, shares
from memlab.cli.requests import PlanRequest
from memlab.planner import Memory, Option
from memlab.planner.options import plan_numbers
from memlab.train.adapters import LORA_RANK
from memlab.transformers_models.memlab_code import memlab_code
from memlab.transformers_models.planning import Choice, best_options
from memlab.transformers_models.recipes import METHODS, OPTIMIZERS, PRECISIONS
from memlab.transformers_models.recipes import code as production_code
from memlab.transformers_models.sources import Source
from memlab.transformers_models.structure import adapted_layers, linear_share
from memlab.transformers_models.tasks import Size
from memlab.transformers_models.training import Training

CODE = ("production", "memlab")  # whose techniques the printed code uses
_METHODS = {"full fine-tuning": "full", "LoRA": "lora", "QLoRA": "qlora"}  # by group of recipes
NOTABLE_SHARE = 0.2  # of the weights: said if so many are not in 4 bits


@dataclass(frozen=True)
class OfTransformers:
    """Search each group of recipes. `code` says whose techniques the printed code uses."""

    training: Training
    choice: Choice
    memory: Memory
    target: str
    code: str

    @property
    def stages(self) -> int:
        return len(self.choice.groups()) + 1

    def plan(self, announce: Callable[[str], None]) -> Result:
        training, memory, target = self.training, self.memory, self.target
        found = best_options(training, self.choice, memory, target, announce)
        options = [replace(each, code=self._lines(each)) if each.fits else each for each in found]
        first = next((option for option in options if option.fits), None)
        plainest = self.choice.groups()[0][0]
        assumed = dict.fromkeys(note for option in options for note in option.notes)
        return Result(
            f"{training}, in {memory.name}",
            plan_numbers(
                memory,
                target,
                [option.to_dict() for option in options],
                None if first is None else options.index(first),
                options[0] if options[0].recipe == plainest else None,
                model=training.source.name,
                library="transformers",
                parameters=training.parameters,
                batch=training.size.batch,
                seq_len=training.completed_size.seq_len,
                notes=[f"{training.class_name}, {training.described}", *assumed],
            ),
            list(_headline(training, memory, target)),
            columns_of([Section(options, first)], named=lambda option: str(option.recipe)),
            list(_remarks(training, options, first)),
            [f"{first.recipe}:\n\n{_indented(first)}\n"] if first else [],
            {str(option.recipe): option for option in options},
        )

    def _lines(self, option: Option) -> list[str]:
        """Return the code that trains with a recipe."""
        card = self.memory.card
        loaded = self.training.loaded("mps" if card and card.vendor == "Apple" else "cuda")
        written = production_code if self.code == "production" else memlab_code
        return list(written(option.recipe, loaded))


def of_transformers(
    request: PlanRequest, source: Source, group: str | None, memory: Memory, target: str
) -> OfTransformers:
    """Check the options, and that the model takes the size."""
    if request.gpus != 1:
        raise UsageError(
            f"got --gpus for {source.name}, a model of transformers; it is planned for one GPU: "
            f"leave it out"
        )
    if target == "cpu":
        raise UsageError(
            f"got --device cpu for {source.name}, a model of transformers, which is planned for a "
            f"GPU; memlab measure --model {source.name} --dry-run counts a step on the CPU"
        )
    require_known("--code", request.code, CODE)
    require_known("--precision", request.precision, PRECISIONS)
    require_known("--optimizer", request.optimizer, OPTIMIZERS)
    training = Training(source, Size(request.batch, request.seq_len, request.image))
    try:
        _ = training.described
        layers = adapted_layers(training.skeleton, request.lora_targets or "all")
    except ValueError as error:
        raise UsageError(str(error)) from error
    choice = Choice(
        METHODS if group is None else (_METHODS[group],),
        request.precision,
        request.optimizer,
        rank=request.lora_rank or LORA_RANK,
        targets=layers,
    )
    return OfTransformers(training, choice, memory, target, request.code or CODE[0])


def _indented(option: Option) -> str:
    return indent("\n".join(option.code or ()), "  ")


def _headline(training: Training, memory: Memory, target: str) -> Iterator[str]:
    weights = training.parameters
    yield (
        f"{training.source.name}: transformers' {training.class_name}, {weights:,} parameters, "
        f"{training.described}"
    )
    declared = training.config.architectures or ()
    if declared and training.class_name not in declared:
        yield f"the config names {declared[0]}, whose training memlab does not know"
    if (card := memory.card) is not None and not card.runs_cuda:
        yield (
            f"{card.vendor}: predicted with CUDA's kernels and allocator, and not compared with "
            f"such a GPU; bitsandbytes' optimizers and 4-bit weights may not run there"
        )
    if stored := training.stored_quantized:
        yield f"the published weights are stored as {stored}; here they are counted as bfloat16"
    yield room(memory, target)
    yield f"predicted for {target} without running anything"


def _remarks(training: Training, options: list[Option], first: Option | None) -> Iterator[str]:
    yield (
        "each row is the fastest recipe of its group that fits, or the smallest; groups train "
        "differently, so their times alone do not rank them"
    )
    if first is None and all(option.failure for option in options):
        yield "nothing could be predicted; the reasons are below"
    elif first is None:
        yield "nothing fits; use a shorter sequence, a smaller batch or a larger GPU"
    else:
        yield (
            f"time: estimated, relative to the first row that fits, whose time is "
            f"{shares(first.seconds or {})}"
        )
        if any(option.longest for option in options):
            yield (
                "batch up to, length up to: predicted to fit, each with the other as given; a "
                "slightly larger value may fit"
            )
        elif any(option.largest_batch for option in options):
            yield "batch up to: predicted to fit; a slightly larger batch may fit"
        if sum(option.fits for option in options) > 1:
            yield "the code is for the first row that fits; --full, --lora, --qlora choose another"
    if any(option.measured is None and not option.failure for option in options):
        yield "≥: weights, gradients and optimizer state alone, which already exceed the memory"
    # transformers 5 keeps experts in 3-D parameters: Mixtral-8x7B "in 4 bits" has 181 GiB allocated
    # in a step, gpt-oss-20b 82.
    others = 1 - linear_share(training.skeleton)
    if others > NOTABLE_SHARE and any(option.recipe.method == "qlora" for option in options):
        yield (
            f"4-bit weights: bitsandbytes quantizes linear layers alone; {others:.0%} of this "
            f"model's weights, such as experts and embeddings, are not, and peft's "
            f"prepare_model_for_kbit_training casts them to float32"
        )
    if any(option.empties_cache for option in options):
        yield EMPTIES_CACHE
    yield from dict.fromkeys(note for option in options for note in option.notes)
    for option in options:
        if option.failure:
            yield f"{option.recipe} failed: {option.failure}"
