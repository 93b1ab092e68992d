"""Find recipes that make a transformers model's training fit, in each group of recipes.

A group's recipes train the same weights in the same precision, so they can be compared by time.
Groups cannot: LoRA beside 4-bit weights trains something else than full fine-tuning.

In each group, recipes are predicted in the order of their time until one fits. A recipe whose
weights, gradients and optimizer state alone exceed the budget is not predicted.
"""

import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from memlab.dry_runs.fake_tensors import is_assumption
from memlab.planner.cards import Memory, budget_bytes
from memlab.planner.limits import largest
from memlab.planner.options import Option
from memlab.planner.processes import processes
from memlab.transformers_models.measuring import predicted
from memlab.transformers_models.recipes import METHODS, STATE_BYTES, Recipe
from memlab.transformers_models.sources import Source
from memlab.transformers_models.tasks import Size, loops_over_tokens, positions
from memlab.transformers_models.training import Training

NO_LIMITS = (
    "the largest batch and length were not searched: without the kernels of its own packages, this "
    "model loops over the tokens, so each prediction takes long"
)
MAX_WORKERS = 2  # each imports torch and transformers, which takes seconds and about 700 MiB
MAX_SEQUENCES = 4096
TOKENS = 128  # granularity of the longest length
_MOST_TOKENS = 2**20  # the longest length to try if the model has no limit
_ITEMSIZE = {"float32": 4, "bfloat16": 2}


@dataclass(frozen=True)
class Choice:
    """What the user allows. None: everything."""

    methods: tuple[str, ...] = METHODS
    precision: str | None = None
    optimizer: str | None = None
    attention: str = "default"
    rank: int = 8
    targets: str = "all-linear"

    def groups(self) -> list[list[Recipe]]:
        """Return the recipes of each group, the fastest first."""
        found = []
        for method in self.methods:
            base = Recipe(method, attention=self.attention, rank=self.rank, targets=self.targets)
            for precision in self._precisions(method):
                group = replace(base, precision=precision)
                found.append([replace(group, **way) for way in self._ways(method)])
        return found

    def _precisions(self, method: str) -> tuple[str, ...]:
        if method != "full":  # adapters have a precision of their own
            return ("bfloat16",)
        return ("autocast", "bfloat16") if self.precision is None else (self.precision,)

    def _ways(self, method: str) -> Iterator[dict[str, Any]]:
        optimizers = [self.optimizer] if self.optimizer else ["adamw"]
        if method == "full" and not self.optimizer:
            optimizers = ["adamw", "adam8bit"]
        for checkpointing in (False, True):
            for optimizer in optimizers:
                yield {"checkpointing": checkpointing, "optimizer": optimizer}
        if method == "full" and not self.optimizer:
            yield {"checkpointing": True, "optimizer": "paged-adam8bit"}


def best_options(
    training: Training,
    choice: Choice,
    memory: Memory,
    target: str,
    announce: Callable[[str], object],
) -> list[Option]:
    """Search the groups, several at once: the best option of each.

    Raises ProcessEndedError if a process of the search ends.
    """
    groups = choice.groups()
    workers = min(MAX_WORKERS, os.cpu_count() or 1, len(groups))
    with processes(workers) as map_:
        found = iter(map_(partial(_best, training.source, training.size, target, memory), groups))
        options = []
        for group in groups:
            announce(group[0].group)
            options.append(next(found))
    return options


def _best(source: Source, size: Size, target: str, memory: Memory, group: list[Recipe]) -> Option:
    """Search one group. Runs in another process."""
    return Search(Training(source, size), target, memory).best_of(group)


class Search:
    """Predicts the recipes of a training for a memory."""

    def __init__(self, training: Training, target: str, memory: Memory) -> None:
        self.training, self.target, self.card = training, target, memory.card_for_costs
        self.budget = budget_bytes(memory, target)

    def best_of(self, group: list[Recipe]) -> Option:
        """Return the fastest option of a group that fits, with its limits; the smallest one tried
        if none fits."""
        tried: list[Option] = []
        for recipe in group:
            option = self.option(recipe)
            if option.fits:
                return self.with_limits(option)
            tried.append(option)
        return min(tried, key=lambda option: (option.failure is not None, option.needed_bytes))

    def option(self, recipe: Recipe) -> Option:
        """Predict the recipe, unless its fixed bytes exceed the budget."""
        fixed = fixed_bytes(self.training, recipe)
        known = Option(recipe, fixed, self.budget)
        if fixed > self.budget:
            return known
        try:
            found = predicted(self.training, recipe, self.target, self.card)
        except Exception as error:  # one failing recipe must not stop the search
            return replace(known, failure=f"{type(error).__name__}: {error}")
        needed = found.measured.needed_bytes(self.budget)
        assert found.measured.trace is not None
        return replace(
            known,
            needed_bytes=needed,
            measured=replace(found.measured, trace=None),  # it is long
            seconds=found.seconds,
            notes=tuple(filter(is_assumption, found.measured.trace.notes)),
        )

    def with_limits(self, option: Option) -> Option:
        """Add the largest batch, and the longest length at the given batch."""
        if loops_over_tokens(self.training.config):
            return replace(option, notes=(*option.notes, NO_LIMITS))
        size, recipe = self.training.completed_size, option.recipe

        def needed(changed: Size) -> int:
            training = Training(self.training.source, changed)
            found = predicted(training, recipe, self.target, self.card)
            return found.measured.needed_bytes(self.budget)

        batch, slope = largest(
            lambda number: needed(replace(size, batch=number)),
            {size.batch: option.needed_bytes},
            self.budget,
            MAX_SEQUENCES,
        )
        if size.seq_len is None:
            return replace(option, largest_batch=batch)
        longest, _ = largest(
            lambda number: needed(replace(size, seq_len=number)),
            {size.seq_len: option.needed_bytes},
            self.budget,
            positions(self.training.config) or _MOST_TOKENS,
            step=TOKENS,
            slope=slope * size.batch / size.seq_len,  # tokens are tokens
        )
        return replace(option, largest_batch=batch, longest=longest)


def fixed_bytes(training: Training, recipe: Recipe) -> int:
    """Return the bytes of weights, gradients and optimizer state; of adapters, none.

    4-bit weights are counted as if all weights had half a byte, which is too little.
    """
    weights = training.parameters
    if recipe.method == "qlora":
        return weights // 2
    itemsize = _ITEMSIZE[recipe.weights_dtype]
    if recipe.method == "lora":
        return weights * itemsize
    return weights * (2 * itemsize + STATE_BYTES[recipe.optimizer](itemsize))
