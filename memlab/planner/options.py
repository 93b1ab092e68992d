"""What a search comes to: recipes that were tried, and the plan that says what fits."""

from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from typing import Any

from memlab.configs.shapes import GPTConfig
from memlab.planner.cards import Memory
from memlab.planner.formulas import Estimate, training_bytes
from memlab.planner.measuring import Measured
from memlab.planner.recipes import Recipe
from memlab.units import format_bytes

AS_IT_IS = Recipe(precision="float32")  # torch's defaults: AdamW, and nothing saved


@dataclass(frozen=True)
class Candidate:
    """A recipe, with what formulas say of it."""

    recipe: Recipe
    estimate: Estimate
    seconds: dict[str, float]  # of a step, by what they go to

    @property
    def step_seconds(self) -> float:
        return sum(self.seconds.values())


@dataclass(frozen=True)
class Option:
    """A recipe, tried.

    `measured` is None where nothing here can run it, and its bytes are the formula's. Where it
    fits, `largest_batch` and `longest` say how far the batch can grow at this length, and the
    length at this batch.
    """

    candidate: Candidate
    measured: Measured | None
    budget_bytes: int
    largest_batch: int | None = None
    longest: int | None = None

    @property
    def recipe(self) -> Recipe:
        return self.candidate.recipe

    @property
    def needed_bytes(self) -> int:
        """What a card must have: reserved bytes where they are known."""
        if self.measured is None:
            return self.candidate.estimate.peak_bytes
        return self.measured.reserved_bytes or self.measured.allocated_bytes

    @property
    def missing_bytes(self) -> int:
        """How much more is needed than is there; negative where it fits."""
        return self.needed_bytes - self.budget_bytes

    @property
    def fits(self) -> bool:
        return self.missing_bytes <= 0


@dataclass(frozen=True)
class Plan:
    """The answer.

    options   recipes that are measured to fit, the fastest first
    others    of kinds that were not tried, the fastest that fits by formula
    miss      the nearest that does not fit
    """

    model: str
    config: GPTConfig
    memory: Memory
    gpus: int
    batch: int
    seq_len: int
    target: str
    exact: bool  # whether the largest batches and lengths are measured
    options: tuple[Option, ...]
    others: tuple[Option, ...]
    miss: Option | None  # faster than all of them, or the smallest where none fits
    failures: tuple[str, ...] = field(default=())  # recipes that could not be tried, and why

    @property
    def budget_bytes(self) -> int:
        """What torch's allocator may have."""
        return budget_bytes(self.memory, self.target)

    @property
    def bytes_as_it_is(self) -> int:
        """What a training without any technique takes on each GPU, by formula."""
        found = training_bytes(self.config, AS_IT_IS, self.batch, self.seq_len, target=self.target)
        return found.peak_bytes

    @property
    def best(self) -> Option | None:
        """The fastest that fits."""
        return self.options[0] if self.options else None

    def command(self, option: Option | None = None) -> str:
        """What to type to train with this recipe, or the best."""
        chosen = option or self.best
        if chosen is None:
            raise ValueError(f"nothing fits {self.memory.name}: there is no recipe to run")
        if chosen.recipe.by_formula_only:
            raise ValueError(
                "tensor and pipeline parallel recipes are by formula: nothing runs them"
            )
        return command(self, chosen.recipe)

    def to_dict(self) -> dict[str, Any]:
        """Plain numbers and words, for JSON."""
        return {
            "model": self.model,
            "parameters": self.config.parameters,
            "memory": {"name": self.memory.name, "total_bytes": self.memory.total_bytes},
            "budget_bytes": self.budget_bytes,
            "gpus": self.gpus,
            "batch": self.batch,
            "seq_len": self.seq_len,
            "target": self.target,
            "bytes_as_it_is": self.bytes_as_it_is,
            "fits": [self._numbers(option) for option in self.options],
            "fits_by_formula": [self._numbers(option) for option in self.others],
            "does_not_fit": None if self.miss is None else self._numbers(self.miss),
            "not_tried": list(self.failures),
        }

    def _numbers(self, option: Option) -> dict[str, Any]:
        found = option.measured
        return {
            "recipe": asdict(option.recipe),
            "allocated_bytes": found and found.allocated_bytes,
            "reserved_bytes": found and found.reserved_bytes,
            "at_peak": found and found.at_peak,
            "missing_bytes": option.missing_bytes,
            "by_formula": option.candidate.estimate.moments,
            "estimated_seconds": option.candidate.seconds,
            "largest_batch": option.largest_batch,
            "longest": option.longest,
            "command": None if option.recipe.by_formula_only else self.command(option),
        }

    def __str__(self) -> str:
        of = f"{self.model}, {self.batch} × {self.seq_len} tokens, {self.memory.name}"
        lines = [f"{of}: {format_bytes(self.budget_bytes)} for torch"]
        lines += [f"{_verdict(option)}  {option.recipe}" for option in self._shown()]
        return "\n".join(lines)

    def _shown(self) -> Iterator[Option]:
        yield from self.options
        yield from self.others
        if self.miss is not None:
            yield self.miss


def _verdict(option: Option) -> str:
    needed = format_bytes(option.needed_bytes)
    if option.fits:
        return f"fits   {needed:>10}"
    return f"lacks  {format_bytes(option.missing_bytes):>10} of {needed}"


def budget_bytes(memory: Memory, target: str) -> int:
    """What is there for tensors: on a card, less than all."""
    return memory.total_bytes if target == "cpu" else memory.budget_bytes


def command(asked: Plan, recipe: Recipe) -> str:
    """The line that trains by the recipe, or says what each rank of several takes."""
    dtype = str(recipe.dtype).removeprefix("torch.")
    options = {
        "--model": asked.model,
        "--dtype": dtype,
        "--batch": asked.batch,
        "--seq": asked.seq_len,
        "--technique": recipe.techniques,
    }
    words = " ".join(f"{option} {value}" for option, value in options.items())
    if asked.gpus > 1:
        return f"memlab measure {words} --ranks {asked.gpus}"
    return f"memlab train {words}"
