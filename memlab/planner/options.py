"""The result of a search: tried recipes, and the plan."""

from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from typing import Any

from memlab.configs.shapes import GPTConfig
from memlab.configs.torchrun import torchrun
from memlab.planner.cards import Memory, budget_bytes, margin_bytes
from memlab.planner.formulas import Estimate
from memlab.planner.measuring import Measured
from memlab.planner.recipes import Recipe
from memlab.units import format_bytes

AS_IT_IS = Recipe(precision="float32")  # torch's defaults: AdamW, no techniques


def verdict(fits: bool, fits_as_it_is: bool) -> str:
    """Return a plan's result in words; the second argument only matters if something fits."""
    if not fits:
        return "does not fit"
    return "fits" if fits_as_it_is else "fits with another recipe"


def option_numbers(
    recipe: str,
    *,
    fits: bool,
    measured: Measured | None = None,
    needed_bytes: int | None = None,
    missing_bytes: int | None = None,
    **more: Any,
) -> dict[str, Any]:
    """Return one option's numbers and text for JSON, with the fields of memlab/cli/schema.json.

    The fields of `more` are null if they are left out.
    """
    others = (
        *("group", "settings", "estimated_seconds", "by_formula", "largest_batch"),
        *("longest_sequence", "command", "code", "failure"),
    )
    return {
        "recipe": recipe,
        "fits": fits,
        "predicted": measured is not None,
        "allocated_bytes": measured and measured.allocated_bytes,
        "reserved_bytes": measured and measured.reserved_bytes,
        "needed_bytes": needed_bytes,
        "missing_bytes": missing_bytes,
        "at_peak": measured and dict(measured.at_peak),
        "empties_cache": False,
        **dict.fromkeys(others),
        **more,
    }


@dataclass(frozen=True)
class Candidate:
    """A recipe with its bytes and seconds by formula."""

    recipe: Recipe
    estimate: Estimate
    seconds: dict[str, float]  # of a step, by term

    @property
    def step_seconds(self) -> float:
        return sum(self.seconds.values())


@dataclass(frozen=True)
class Option:
    """A tried recipe.

    `needed_bytes` is the memory that a card must have for it (`memlab.allocator.capacity`). If it
    fits, `largest_batch` is the limit at this length, and `longest` the limit at
    this batch.
    """

    candidate: Candidate
    measured: Measured
    needed_bytes: int
    budget_bytes: int
    largest_batch: int | None = None
    longest: int | None = None

    @property
    def recipe(self) -> Recipe:
        return self.candidate.recipe

    @property
    def missing_bytes(self) -> int:
        """How much the memory is too small; negative if the recipe fits."""
        return self.needed_bytes - self.budget_bytes

    @property
    def fits(self) -> bool:
        return self.missing_bytes <= 0

    @property
    def empties_cache(self) -> bool:
        """Whether it only fits because torch releases unused memory and asks the driver again."""
        reserved = self.measured.reserved_bytes
        return self.fits and reserved is not None and reserved > self.budget_bytes


@dataclass(frozen=True)
class Plan:
    """The recipes that fit.

    options   recipes measured to fit: by group, the fastest of a group first
    as_it_is  the training without techniques; None if its prediction failed
    miss      the nearest recipe that does not fit
    """

    model: str
    config: GPTConfig
    memory: Memory
    gpus: int
    batch: int
    seq_len: int
    target: str
    options: tuple[Option, ...]
    as_it_is: Option | None
    miss: Option | None  # faster than all options, or the smallest recipe if none fits
    failures: tuple[str, ...] = field(default=())  # recipes that raised an error, and why

    @property
    def budget_bytes(self) -> int:
        """The bytes available to torch's allocator."""
        return budget_bytes(self.memory, self.target)

    @property
    def best(self) -> Option | None:
        """The fastest recipe that fits, from the first group with such a recipe."""
        return self.options[0] if self.options else None

    def command(self, option: Option | None = None) -> str:
        """Return the command that trains with this option, by default the best."""
        chosen = option or self.best
        if chosen is None:
            raise ValueError(f"nothing fits {self.memory.name}, so there is no recipe to run")
        return command(self, chosen.recipe)

    def to_dict(self) -> dict[str, Any]:
        """Return numbers and text for JSON, with the fields of memlab/cli/schema.json."""
        plain = self.as_it_is
        return {
            "verdict": verdict(self.best is not None, bool(plain and plain.fits)),
            "model": self.model,
            "parameters": self.config.parameters,
            "memory": {"name": self.memory.name, "total_bytes": self.memory.total_bytes},
            "margin_bytes": margin_bytes(self.memory, self.target),
            "budget_bytes": self.budget_bytes,
            "gpus": self.gpus,
            "batch": self.batch,
            "seq_len": self.seq_len,
            "target": self.target,
            "bytes_as_it_is": plain and plain.needed_bytes,
            "chosen": 0 if self.best else None,
            "options": [self._numbers(option) for option in self._shown()],
            "notes": list(self.failures),
        }

    def _numbers(self, option: Option) -> dict[str, Any]:
        return option_numbers(
            option.recipe.words,
            fits=option.fits,
            measured=option.measured,
            needed_bytes=option.needed_bytes,
            missing_bytes=option.missing_bytes,
            empties_cache=option.empties_cache,
            group=option.recipe.group,
            settings=asdict(option.recipe),
            by_formula=option.candidate.estimate.moments,
            estimated_seconds=dict(option.candidate.seconds),
            largest_batch=option.largest_batch,
            longest_sequence=option.longest,
            command=self.command(option),
        )

    def __str__(self) -> str:
        of = f"{self.model}, {self.batch} × {self.seq_len} tokens, {self.memory.name}"
        lines = [f"{of}: {format_bytes(self.budget_bytes)} for torch"]
        lines += [f"{_verdict(option)}  {option.recipe}" for option in self._shown()]
        return "\n".join(lines)

    def _shown(self) -> Iterator[Option]:
        yield from self.options
        if self.miss is not None:
            yield self.miss


def _verdict(option: Option) -> str:
    needed = format_bytes(option.needed_bytes)
    if option.fits:
        return f"fits   {needed:>10}"
    return f"lacks  {format_bytes(option.missing_bytes):>10} of {needed}"


def command(asked: Plan, recipe: Recipe) -> str:
    """Return the command that trains with the recipe, in a process for each GPU."""
    dtype = str(recipe.dtype).removeprefix("torch.")
    options = {
        "--model": asked.model,
        "--dtype": dtype,
        "--batch": asked.batch,
        "--seq": asked.seq_len,
        "--technique": recipe.techniques,
        **(recipe.adapters.options if recipe.has_adapters else {}),
    }
    words = " ".join(f"{option} {value}" for option, value in options.items())
    if asked.gpus > 1:
        on_ranks = f"--zero {recipe.zero_stage} --ranks {asked.gpus}"
        return f"{torchrun(asked.gpus)} train {words} {on_ranks}"
    return f"memlab train {words}"
