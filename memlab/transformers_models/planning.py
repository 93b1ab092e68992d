"""Find recipes that make a transformers model's training fit, in each group of recipes.

A group's recipes train the same weights in the same precision, so they can be compared by time.
Groups cannot: LoRA beside 4-bit weights trains something else than full fine-tuning.

In each group, recipes are predicted in the order of their time until one fits. A recipe whose
weights, gradients and optimizer state alone exceed the budget is not predicted.
"""

from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from typing import Any

from memlab.dry_runs.fake_tensors import is_assumption
from memlab.planner.limits import largest
from memlab.planner.measuring import Measured
from memlab.planner.options import option_numbers
from memlab.transformers_models.measuring import predicted
from memlab.transformers_models.recipes import METHODS, STATE_BYTES, Recipe
from memlab.transformers_models.tasks import Size, loops_over_tokens, positions
from memlab.transformers_models.training import Training

NO_LIMITS = (
    "the largest batch and length were not searched: without the kernels of its own packages, this "
    "model loops over the tokens, so each prediction takes long"
)
Announce = Callable[[str], object]
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


@dataclass(frozen=True)
class Option:
    """A recipe with its prediction, if it was predicted.

    fixed_bytes     weights, gradients and optimizer state, without adapters: a lower bound
    needed_bytes    the memory that a card must have
    largest_batch   at this length; None if it was not searched
    longest         at this batch
    notes           what the prediction assumed
    failure         why the prediction failed, in one sentence
    """

    recipe: Recipe
    fixed_bytes: int
    needed_bytes: int
    budget_bytes: int
    measured: Measured | None = None
    seconds: dict[str, float] | None = None
    largest_batch: int | None = None
    longest: int | None = None
    notes: tuple[str, ...] = ()
    failure: str | None = None

    @property
    def title(self) -> str:
        return f"{self.recipe.group}: {self.recipe.words}"

    @property
    def total_seconds(self) -> float:
        """The estimated time of a step; 0 if it was not predicted."""
        return sum((self.seconds or {}).values())

    @property
    def fits(self) -> bool:
        return self.measured is not None and self.needed_bytes <= self.budget_bytes

    @property
    def missing_bytes(self) -> int:
        """How much the memory is too small; negative if the recipe fits."""
        return self.needed_bytes - self.budget_bytes

    @property
    def empties_cache(self) -> bool:
        """Whether it only fits because torch releases unused memory and asks the driver again."""
        reserved = self.measured.reserved_bytes if self.measured else None
        return self.fits and reserved is not None and reserved > self.budget_bytes

    def to_dict(self) -> dict[str, Any]:
        """Return numbers and text for JSON, with the fields of memlab/cli/schema.json."""
        return option_numbers(
            self.recipe.words,
            fits=self.fits,
            measured=self.measured,
            needed_bytes=self.needed_bytes,
            missing_bytes=self.missing_bytes,
            empties_cache=self.empties_cache,
            group=self.recipe.group,
            settings=asdict(self.recipe),
            estimated_seconds=self.seconds and dict(self.seconds),
            largest_batch=self.largest_batch,
            longest_sequence=self.longest,
            failure=self.failure,
        )


class Search:
    """Predicts the recipes of a training for a budget.

    `announce` is called with the name of each prediction.
    """

    def __init__(
        self, training: Training, target: str, card: Any, budget: int, announce: Announce
    ) -> None:
        self.training, self.target, self.card = training, target, card
        self.budget, self.announce = budget, announce

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
        known = Option(recipe, fixed, fixed, self.budget)
        if fixed > self.budget:
            return known
        self.announce(f"{recipe.group}: {recipe.words}")
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
            self.announce(f"{recipe.group}: {changed.batch} × {changed.seq_len or 1}")
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
