"""What planners take and return: a query, the options that they tried, and the plan."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from memlab.configs.shapes import GPTConfig
from memlab.configs.torchrun import torchrun
from memlab.planner.cards import Memory, budget_bytes, margin_bytes
from memlab.planner.recipes import Recipe
from memlab.units import format_bytes

if TYPE_CHECKING:  # it imports torch
    from memlab.planner.measuring import Measured

AS_IT_IS = Recipe(precision="float32")  # torch's defaults: AdamW, no techniques
NOTHING_FITS = "does not fit"  # a plan's verdict


class Way(NamedTuple):
    """What an option needs to know of its recipe: the words and the fields of the document."""

    words: str
    group: str | None = None
    settings: Mapping[str, Any] | None = None


@dataclass(frozen=True)
class Option:
    """A way to train that a planner tried, a row of its table.

    recipe         a Way, or another object with its fields
    needed_bytes   the memory that a card must have for it (`memlab.allocator.capacity`); before it
                   is measured by formula, or a lower bound; 0: unknown
    seconds        of a step, estimated, by term
    by_formula     bytes by moment and term
    largest_batch  that fits at this length; None if it was not searched
    longest        that fits at this batch
    rank           the one that was measured, of several
    command, code  that train so
    notes          what the prediction assumed
    failure        why the prediction failed, in one sentence
    """

    recipe: Any
    needed_bytes: int
    budget_bytes: int
    measured: "Measured | None" = None
    seconds: Mapping[str, float] | None = None
    by_formula: Mapping[str, Mapping[str, int]] | None = None
    largest_batch: int | None = None
    longest: int | None = None
    rank: int | None = None
    command: str | None = None
    code: Sequence[str] | None = None
    notes: tuple[str, ...] = ()
    failure: str | None = None

    @property
    def step_seconds(self) -> float:
        """The estimated time of a step; 0 without an estimate."""
        return sum((self.seconds or {}).values())

    @property
    def missing_bytes(self) -> int:
        """How much the memory is too small; negative if the recipe fits."""
        return self.needed_bytes - self.budget_bytes

    @property
    def fits(self) -> bool:
        return self.measured is not None and self.missing_bytes <= 0

    @property
    def reserved_bytes(self) -> int:
        """What the caching allocator reserves without a limit; 0 if there is none."""
        return (self.measured.reserved_bytes if self.measured else None) or 0

    @property
    def empties_cache(self) -> bool:
        """Whether it only fits because torch releases unused memory and asks the driver again."""
        return self.fits and self.reserved_bytes > self.budget_bytes

    def to_dict(self, **changed: Any) -> dict[str, Any]:
        """Return numbers and text for JSON, with the fields of memlab/cli/schema.json."""
        found, is_known = self.measured, self.failure is None
        return {
            "recipe": self.recipe.words,
            "fits": self.fits,
            "predicted": found is not None,
            "allocated_bytes": found and found.allocated_bytes,
            "reserved_bytes": found and found.reserved_bytes,
            "needed_bytes": self.needed_bytes if is_known else None,
            "missing_bytes": self.missing_bytes if is_known else None,
            "at_peak": found and dict(found.at_peak),
            "empties_cache": self.empties_cache,
            "group": self.recipe.group,
            "settings": self.recipe.settings,
            "estimated_seconds": self.seconds and dict(self.seconds),
            "by_formula": self.by_formula,
            "largest_batch": self.largest_batch,
            "longest_sequence": self.longest,
            "command": self.command,
            "code": self.code,
            "failure": self.failure,
            **changed,
        }


def plan_numbers(
    memory: Memory,
    target: str,
    options: Sequence[dict[str, Any]],
    chosen: int | None,
    as_it_is: Option | None,
    **more: Any,
) -> dict[str, Any]:
    """Return a plan's fields for JSON; `more` are those of what was planned.

    as_it_is  the unchanged training; None if it was not predicted
    """
    fits_as_it_is = as_it_is is not None and as_it_is.fits
    fits = "fits" if fits_as_it_is else "fits with another recipe"
    return {
        "verdict": NOTHING_FITS if chosen is None else fits,
        "target": target,
        "memory": {"name": memory.name, "total_bytes": memory.total_bytes},
        "margin_bytes": margin_bytes(memory, target),
        "budget_bytes": budget_bytes(memory, target),
        "bytes_as_it_is": as_it_is and as_it_is.needed_bytes,
        "chosen": chosen,
        "options": options,
        **more,
    }


@dataclass(frozen=True)
class Query:
    """A training of one of memlab's models, and the memory that it has to fit into."""

    model: str  # the name
    config: GPTConfig
    memory: Memory
    gpus: int
    batch: int  # of each data-parallel GPU
    seq_len: int
    target: str

    def __post_init__(self) -> None:
        require_positive(batch=self.batch, seq_len=self.seq_len, gpus=self.gpus)
        longest = self.config.seq_len
        if self.seq_len > longest:
            raise ValueError(
                f"got sequences of {self.seq_len} tokens; {self.model} takes 1 to {longest}"
            )
        self.config.require_countable(self.batch, self.seq_len)

    @property
    def budget_bytes(self) -> int:
        """The bytes available to torch's allocator."""
        return budget_bytes(self.memory, self.target)

    def numbers(self) -> dict[str, Any]:
        """Return the fields of the document that say what was planned."""
        return {
            "model": self.model,
            "library": "memlab",
            "parameters": self.config.parameters,
            "gpus": self.gpus,
            "batch": self.batch,
            "seq_len": self.seq_len,
        }


def usual_seq_len(config: GPTConfig) -> int:
    """Return the length of a sequence unless the user gives one."""
    return min(2048, config.seq_len)


def require_positive(**given: int) -> None:
    """Raise ValueError for a number that is no integer from 1."""
    for what, got in given.items():
        if not isinstance(got, int) or got < 1:
            raise ValueError(f"got {what}={got!r}; give an integer from 1")


@dataclass(frozen=True)
class Plan(Query):
    """The recipes that fit.

    options   recipes measured to fit: by group, the fastest of a group first
    as_it_is  the training without techniques; None if its prediction failed
    miss      the nearest recipe that does not fit: faster than all options, or the smallest one
    failures  recipes that raised an error, and why
    """

    options: tuple[Option, ...]
    as_it_is: Option | None
    miss: Option | None
    failures: tuple[str, ...] = ()

    @property
    def best(self) -> Option | None:
        """The fastest recipe that fits, from the first group with such a recipe."""
        return self.options[0] if self.options else None

    @property
    def shown(self) -> tuple[Option, ...]:
        """The options, and the miss."""
        return (*self.options, *([self.miss] if self.miss else []))

    def command(self, option: Option | None = None) -> str:
        """Return the command that trains with this option, by default the best."""
        chosen = option or self.best
        if chosen is None:
            raise ValueError(f"nothing fits {self.memory.name}, so there is no recipe to run")
        return command(self, chosen.recipe)

    def to_dict(self) -> dict[str, Any]:
        """Return numbers and text for JSON, with the fields of memlab/cli/schema.json."""
        return plan_numbers(
            self.memory,
            self.target,
            [option.to_dict(command=self.command(option)) for option in self.shown],
            0 if self.best else None,
            self.as_it_is,
            **self.numbers(),
            notes=list(self.failures),
        )

    def __str__(self) -> str:
        of = f"{self.model}, {self.batch} × {self.seq_len} tokens, {self.memory.name}"
        lines = [f"{of}: {format_bytes(self.budget_bytes)} for torch"]
        lines += [f"{_verdict(option)}  {option.recipe}" for option in self.shown]
        return "\n".join(lines)


def _verdict(option: Option) -> str:
    needed = format_bytes(option.needed_bytes)
    if option.fits:
        return f"fits   {needed:>10}"
    return f"lacks  {format_bytes(option.missing_bytes):>10} of {needed}"


def command(asked: Query, recipe: Recipe) -> str:
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
