"""The search: recipes in the order of their time, until some are measured to fit.

    by formula    every recipe, in microseconds: its bytes within some percent, its estimated time
    measured      the fastest that can fit, of each thing that can be learned, by a prediction of
                  its step: allocated bytes, and the reserved ones that a card must have
    batch, length grown as far as the memory goes, by the formula scaled to what was measured; or
                  measured themselves, up to the first that does not fit

The formula decides what is tried, never what is said: a recipe is called fitting where the bytes
that a prediction reserves are within the memory, less what CUDA itself takes.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import partial
from typing import NamedTuple

from memlab.configs.config_json import config_named, name_of
from memlab.configs.shapes import GPTConfig
from memlab.planner.cards import Memory, memory_named
from memlab.planner.costs import step_seconds
from memlab.planner.formulas import Estimate, data_ranks, training_bytes
from memlab.planner.measuring import Measured, measured
from memlab.planner.options import Candidate, Option, Plan, budget_bytes
from memlab.planner.processes import processes
from memlab.planner.recipes import Recipe, recipes, usual_kinds
from memlab.train import Setting

SLACK = 0.02  # of the memory: left free by a batch and a length that are not measured themselves
RESERVED = 0.1  # of a peak: what an allocator may hold beyond it, where nobody has measured it
MARGIN = 0.05  # of the memory: what the next recipe leaves, after one that was too large
TRIES = 4  # recipes of one kind that are measured before the kind is given up
USUAL_SEQ_LEN = 2048
MOST_SEQUENCES = 4096
TOKENS = 128  # to the next of which a length is found

Announce = Callable[[str], object]


def plan(
    model: str | GPTConfig,
    memory: str | int | Memory,
    *,
    gpus: int = 1,
    batch: int = 1,
    seq_len: int | None = None,
    tensor_parallel: int = 1,
    pipeline_parallel: int = 1,
    learned: Iterable[Recipe] | None = None,
    count: int = 2,
    exact: bool = False,
    target: str | None = None,
    workers: int = 1,
    announce: Announce = lambda stage: None,
) -> Plan:
    """Which recipes fit, the fastest first, each of another kind of training: `count` are measured,
    the others are by formula.

    model     a preset, a path of a Hugging Face `config.json`, or a shape
    memory    of each GPU: "24GB", "24GiB", bytes, or a card's name
    batch     sequences of each data-parallel GPU, of `seq_len` tokens (2048, or what the model
              takes)
    learned   the kinds of training among which to choose: recipes of what is learned; None: those
              of `usual_kinds`
    exact     measure the largest batch and length of each, which takes several times as long;
              else they are the formula's, scaled to what was measured
    target    what is predicted: "cuda", "cuda:hopper"; None: as the card has it. "cpu" plans for
              this kind of machine, whose allocator reserves nothing
    workers   processes that measure at once; of more than one, a script that plans must be one that
              can be imported (`if __name__ == "__main__":`)
    announce  is told what is measured

    ValueError, in a sentence, for what is no model, memory or number.
    """
    config = config_named(model) if isinstance(model, str) else model
    there = _memory(memory, target)
    seq_len = min(USUAL_SEQ_LEN, config.seq_len) if seq_len is None else seq_len
    _require_numbers(count=count, batch=batch, seq_len=seq_len)
    asked = _Asked(
        model if isinstance(model, str) else name_of(model),
        config,
        there,
        gpus,
        batch,
        seq_len,
        (tensor_parallel, pipeline_parallel),
        target or there.card_for_costs.target,
    )
    kinds = usual_kinds() if learned is None else learned
    return _Search(asked, exact, announce).plan(kinds, count, workers)


def _require_numbers(**given: int) -> None:
    for what, got in given.items():
        if not isinstance(got, int) or got < 1:
            raise ValueError(f"got {what}={got!r}; give a number from 1")


def _memory(memory: str | int | Memory, target: str | None) -> Memory:
    if isinstance(memory, Memory):
        return memory
    return memory_named(str(memory), target)


@dataclass(frozen=True)
class _Asked:
    """What the user asked for."""

    model: str  # its name
    config: GPTConfig
    memory: Memory
    gpus: int
    batch: int
    seq_len: int
    parallel: tuple[int, int]
    target: str

    def __post_init__(self) -> None:
        longest = self.config.seq_len
        if self.seq_len > longest:
            raise ValueError(
                f"got sequences of {self.seq_len} tokens; {self.model} takes 1 to {longest}"
            )

    @property
    def budget_bytes(self) -> int:
        return budget_bytes(self.memory, self.target)


class Found(NamedTuple):
    """What trying a kind of training came to."""

    option: Option | None
    misses: list[Option]  # tried before it, too large
    failures: list[str]  # could not be tried, and why


Each = Callable[[Callable[[list[Candidate]], Found], Iterable[list[Candidate]]], Iterable[Found]]


@dataclass(frozen=True)
class _Try:
    """Tries a kind of training, in whatever process."""

    asked: _Asked
    exact: bool

    def __call__(self, kind: list[Candidate]) -> Found:
        search = _Search(self.asked, self.exact, lambda stage: None)
        return Found(search.of_kind(kind), search.misses, search.failures)


class _Search:
    """Tries recipes, and remembers those that could not be."""

    def __init__(self, asked: _Asked, exact: bool, announce: Announce) -> None:
        self.asked, self.exact, self.announce = asked, exact, announce
        self.failures: list[str] = []
        self.misses: list[Option] = []

    def plan(self, learned: Iterable[Recipe], count: int, workers: int) -> Plan:
        asked, kinds = self.asked, self.kinds(learned)
        with processes(workers) as each:
            options = self.options(kinds, count, each)
            miss = self.miss(kinds, options)
            others = self.others(kinds, options)
        return Plan(
            asked.model,
            asked.config,
            asked.memory,
            asked.gpus,
            asked.batch,
            asked.seq_len,
            asked.target,
            self.exact,
            tuple(options),
            tuple(others),
            miss,
            tuple(self.failures),
        )

    # -------------------------------------------------------------- by formula

    def kinds(self, learned: Iterable[Recipe]) -> list[list[Candidate]]:
        """All recipes of each kind of training, the fastest first."""
        tensor, pipeline = self.asked.parallel
        data_ranks(
            self.asked.config,
            Recipe(tensor_parallel=tensor, pipeline_parallel=pipeline),
            self.asked.gpus,
        )
        found = [self._candidates(each) for each in learned]
        return [kind for kind in found if kind]

    def _candidates(self, learned: Recipe) -> list[Candidate]:
        asked = self.asked
        ways = recipes(learned, sequences=asked.batch, gpus=asked.gpus, parallel=asked.parallel)
        found = [self._candidate(recipe, asked.batch, asked.seq_len) for recipe in ways]
        return sorted(found, key=lambda c: (c.step_seconds, c.estimate.peak_bytes))

    def _candidate(self, recipe: Recipe, batch: int, seq_len: int) -> Candidate:
        asked = self.asked
        estimate = self._estimate(recipe, batch, seq_len)
        card = asked.memory.card_for_costs
        seconds = step_seconds(asked.config, recipe, batch, seq_len, gpus=asked.gpus, card=card)
        return Candidate(recipe, estimate, seconds)

    def _estimate(self, recipe: Recipe, batch: int, seq_len: int) -> Estimate:
        asked = self.asked
        return training_bytes(
            asked.config, recipe, batch, seq_len, gpus=asked.gpus, target=asked.target
        )

    def _may_fit(self, candidate: Candidate) -> bool:
        return candidate.estimate.peak_bytes <= self.asked.budget_bytes

    # -------------------------------------------------------------- measured

    def options(self, kinds: list[list[Candidate]], count: int, each: Each) -> list[Option]:
        """The fastest of each kind that fits; kinds in the order of that time."""
        hopeful = [[c for c in kind if self._may_fit(c)] for kind in kinds]
        hopeful = sorted(filter(None, hopeful), key=lambda kind: kind[0].step_seconds)
        tried: list[Option] = []
        while hopeful and len(tried) < count:
            now, hopeful = hopeful[: count - len(tried)], hopeful[count - len(tried) :]
            for found in each(_Try(self.asked, self.exact), now):
                self.failures += found.failures
                self.misses += found.misses
                if found.option is not None:
                    self.announce(f"fits: {found.option.recipe.words}")
                    tried.append(found.option)
        return sorted(tried, key=lambda option: option.candidate.step_seconds)

    def of_kind(self, kind: list[Candidate]) -> Option | None:
        """The fastest of a kind that fits, and how far it goes."""
        option = self._first_that_fits(kind)
        return None if option is None else self.grown(option)

    def _first_that_fits(self, kind: list[Candidate]) -> Option | None:
        """The fastest; one that is too large, or cannot be tried, is followed by a smaller one."""
        budget = self.asked.budget_bytes
        bound = float(budget)
        tries = 0
        for candidate in kind:
            if candidate.estimate.peak_bytes > bound or tries == TRIES:
                continue
            tries += 1
            option = self._tried(candidate)
            if option is None:
                continue
            if option.fits:
                return option
            self.misses.append(option)
            beyond_formula = option.needed_bytes / candidate.estimate.peak_bytes
            bound = min(bound, (1 - MARGIN) * budget / max(1.0, beyond_formula))
        return None

    def _tried(self, candidate: Candidate) -> Option | None:
        """The recipe, measured; None if it cannot be."""
        asked = self.asked
        try:
            found = self._measured(candidate.recipe, asked.batch, asked.seq_len)
        except Exception as error:  # the others are worth having
            self.failures.append(f"{candidate.recipe}: {_in_one_line(error)}")
            return None
        return Option(candidate, found, asked.budget_bytes)

    def _measured(self, recipe: Recipe, batch: int, seq_len: int) -> Measured | None:
        """None where formulas are all there is."""
        asked = self.asked
        if recipe.by_formula_only:
            return None
        self.announce(f"{recipe.techniques}, {batch} × {seq_len}")
        setting = Setting(asked.config, batch, seq_len, recipe.dtype, asked.target)
        # The trace stays where it was made: it is long, and nobody here reads it.
        ranks = data_ranks(asked.config, recipe, asked.gpus)
        found = measured(setting, recipe.techniques, ranks=ranks, stage=recipe.zero_stage)
        return replace(found, trace=None)

    def miss(self, kinds: list[list[Candidate]], fitting: list[Option]) -> Option | None:
        """The recipe that would be next if there were more memory: of what is learned by the best
        option, the nearest in time that is faster and does not fit. Where nothing fits, the
        smallest of all. What was not measured on the way is by formula."""
        candidates = [candidate for kind in kinds for candidate in kind]
        if fitting:
            best = fitting[0].candidate
            kind = best.recipe.learned
            candidates = [
                c
                for c in candidates
                if c.recipe.learned == kind
                and c.recipe.offload in (None, best.recipe.offload)
                and c.step_seconds < best.step_seconds
            ]
        measured_ones = {option.recipe: option for option in self.misses}
        budget = self.asked.budget_bytes
        options = [measured_ones.get(c.recipe, Option(c, None, budget)) for c in candidates]
        too_large = [option for option in options if not option.fits]
        if fitting:
            return max(
                too_large, key=lambda o: (o.candidate.step_seconds, -o.needed_bytes), default=None
            )
        return min(too_large, key=lambda option: option.needed_bytes, default=None)

    def others(self, kinds: list[list[Candidate]], options: list[Option]) -> list[Option]:
        """Of each kind that was not measured, the fastest that fits by formula, and some more."""
        known = {option.recipe.learned for option in (*options, *self.misses)}
        budget = self.asked.budget_bytes
        found = []
        for kind in kinds:
            fitting = (c for c in kind if (1 + RESERVED) * c.estimate.peak_bytes <= budget)
            first = next(fitting, None)
            if first is not None and first.recipe.learned not in known:
                found.append(self.grown(Option(first, None, budget)))
        return sorted(found, key=lambda option: option.candidate.step_seconds)

    def _needed(self, option: Option, batch: int, seq_len: int) -> int:
        """What the recipe needs of another batch or length."""
        estimate = self._estimate(option.recipe, batch, seq_len)
        found = self._measured(option.recipe, batch, seq_len)
        return replace(
            option, candidate=replace(option.candidate, estimate=estimate), measured=found
        ).needed_bytes

    # -------------------------------------------------------------- how far it goes

    def grown(self, option: Option) -> Option:
        """With the largest batch and the greatest length that fit, the other as asked."""
        asked = self.asked
        batch = self._largest(option, asked.batch, MOST_SEQUENCES, 1, lambda n: (n, asked.seq_len))
        longest = self._largest(
            option, asked.seq_len, asked.config.seq_len, TOKENS, lambda n: (asked.batch, n)
        )
        return replace(option, largest_batch=batch, longest=longest)

    def _largest(
        self,
        option: Option,
        fits: int,
        most: int,
        step: int,
        size: Callable[[int], tuple[int, int]],
    ) -> int:
        """The largest number up to `most`, in steps of so many, whose training fits.

        The formula, scaled to what was measured last, says where to look next.
        """
        recipe, budget = option.recipe, self.asked.budget_bytes

        def formula(scale: float, number: int) -> float:
            return scale * self._estimate(recipe, *size(number)).peak_bytes

        scale = option.needed_bytes / option.candidate.estimate.peak_bytes
        too_many = most + 1
        if too_many - fits <= step:
            return fits
        if not self.exact or option.measured is None:
            guess = _last_within(partial(formula, scale + SLACK), budget, fits, too_many, step)
            return guess if formula(scale + SLACK, guess) <= budget else fits
        while too_many - fits > step:
            guess = _last_within(partial(formula, scale), budget, fits, too_many, step)
            needed = self._needed(option, *size(guess))
            scale = needed / formula(1, guess)
            if needed <= budget:
                fits = guess
            else:
                too_many = guess
        return fits


def _last_within(
    bytes_at: Callable[[int], float], budget: int, fits: int, too_many: int, step: int
) -> int:
    """The last number between the two, in steps from the one that fits, that is within the budget;
    the first of them if none is."""
    last = (too_many - fits - 1) // step
    few, many = 1, last + 1
    while many - few > 1:
        middle = (few + many) // 2
        if bytes_at(fits + middle * step) <= budget:
            few = middle
        else:
            many = middle
    return fits + few * step


def _in_one_line(error: Exception) -> str:
    return " ".join(str(error).split()) or type(error).__name__
