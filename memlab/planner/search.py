"""Search recipes in the order of their estimated time until some are predicted to fit.

    by formula    every recipe in microseconds: bytes within a few percent, and an estimated time
    measured      the fastest candidates of each kind of training, by a prediction of a step's
                  allocated and reserved bytes
    batch, length increased to the limit by a few more predictions

The formula only decides which recipes and sizes to try. A recipe is reported to fit, at each size,
if the simulated allocator serves its predicted requests within the memory minus the CUDA context
and a margin.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import NamedTuple

from memlab.configs.config_json import config_named, name_of
from memlab.configs.shapes import GPTConfig
from memlab.planner.cards import Memory, memory_named, with_margin
from memlab.planner.costs import step_seconds
from memlab.planner.formulas import data_ranks, training_bytes
from memlab.planner.limits import largest
from memlab.planner.measuring import measured
from memlab.planner.options import (
    AS_IT_IS,
    Option,
    Plan,
    Query,
    require_positive,
    usual_seq_len,
)
from memlab.planner.processes import processes
from memlab.planner.recipes import GROUPS, Recipe, recipes, usual_kinds
from memlab.train import Setting

MARGIN = 0.05  # of the memory: left free by the next recipe after one that was too large
TRIES = 4  # recipes of one kind to measure before giving up on the kind
MAX_SEQUENCES = 4096
TOKENS = 128  # granularity of the longest length

Announce = Callable[[str], object]


def plan(
    model: str | GPTConfig,
    memory: str | int | Memory,
    *,
    gpus: int = 1,
    batch: int = 1,
    seq_len: int | None = None,
    learned: Iterable[Recipe] | None = None,
    count: int = len(GROUPS),
    target: str | None = None,
    margin: int | str | None = None,
    workers: int = 1,
    announce: Announce = lambda stage: None,
) -> Plan:
    """Find the recipes that fit, each of another kind of training, the fastest of a group first.

    The groups are full fine-tuning, LoRA and QLoRA, in this order. They are not compared by time.

    model     a preset, the path of a Hugging Face `config.json`, or a GPTConfig
    memory    of each GPU: "24GB", "24GiB", bytes, or a GPU's name
    batch     sequences per data-parallel GPU
    seq_len   tokens per sequence; default: 2048, at most the model's maximum
    learned   the kinds of training to choose from; default: `usual_kinds()`
    count     kinds to measure, the fastest by formula
    target    a device of `memlab.predict`, or "cpu", whose allocator reserves nothing; default: the
              card's, and "cuda" for a number of bytes
    margin    of the memory to leave free: "2%", "500MiB", bytes; default: as much as measured
              steps needed above their prediction, nothing on a CPU
    workers   processes that measure at once; with more than one, the calling script must be
              importable (`if __name__ == "__main__":`)
    announce  called with the name of each measurement

    Raises ValueError for an unknown model or memory, or a number out of range.
    """
    config = config_named(model) if isinstance(model, str) else model
    gpu_memory = memory if isinstance(memory, Memory) else memory_named(str(memory), target)
    if margin is not None:
        gpu_memory = with_margin(gpu_memory, margin, target or gpu_memory.target)
    query = Query(
        model if isinstance(model, str) else name_of(model),
        config,
        gpu_memory,
        gpus,
        batch,
        usual_seq_len(config) if seq_len is None else seq_len,
        target or gpu_memory.target,
    )
    return search(query, learned, count, workers=workers, announce=announce)


def search(
    query: Query,
    learned: Iterable[Recipe] | None = None,
    count: int = len(GROUPS),
    *,
    workers: int = 1,
    announce: Announce = lambda stage: None,
) -> Plan:
    """Find the recipes that fit, as `plan` does."""
    require_positive(count=count)
    return _Search(query, announce).plan(
        usual_kinds() if learned is None else learned, count, workers
    )


class Found(NamedTuple):
    """The result of trying a kind of training."""

    option: Option | None
    misses: list[Option]  # recipes that were too large
    failures: list[str]  # recipes that raised an error, with the reason


KindMap = Callable[[Callable[[list[Option]], Found], Iterable[list[Option]]], Iterable[Found]]


@dataclass(frozen=True)
class _KindSearch:
    """Searches a kind of training. It can be sent to another process."""

    query: Query

    def __call__(self, kind: list[Option]) -> Found:
        search = _Search(self.query, lambda stage: None)
        return Found(search.search_kind(kind), search.misses, search.failures)


class _Search:
    """Tries recipes, and collects those too large or failing."""

    def __init__(self, query: Query, announce: Announce) -> None:
        self.query, self.announce = query, announce
        self.failures: list[str] = []
        self.misses: list[Option] = []

    def plan(self, learned: Iterable[Recipe], count: int, workers: int) -> Plan:
        query, kinds = self.query, self.kinds(learned)
        with processes(workers) as map_:
            options = self.options(kinds, count, map_)
        miss = self.miss(kinds, options)
        if miss is not None and miss.fits:  # the formula was too high
            kind = miss.recipe.learned
            options = [miss, *(option for option in options if option.recipe.learned != kind)]
            options, miss = sorted([self.with_limits(miss), *options[1:]], key=_by_group), None
        as_it_is = self.as_it_is()
        return Plan(
            **vars(query),
            options=tuple(options),
            as_it_is=as_it_is,
            miss=miss,
            failures=tuple(self.failures),
        )

    # -------------------------------------------------------------- by formula

    def kinds(self, learned: Iterable[Recipe]) -> list[list[Option]]:
        """Return all recipes of each kind of training, the fastest first."""
        found = [self._candidates(each) for each in learned]
        return [kind for kind in found if kind]

    def _candidates(self, learned: Recipe) -> list[Option]:
        query = self.query
        ways = recipes(learned, sequences=query.batch, gpus=query.gpus)
        found = [self._candidate(recipe, query.batch, query.seq_len) for recipe in ways]
        return sorted(found, key=lambda c: (c.step_seconds, c.needed_bytes))

    def _candidate(self, recipe: Recipe, batch: int, seq_len: int) -> Option:
        """Return the recipe with its bytes and seconds by formula."""
        query = self.query
        sizes = query.config, recipe, batch, seq_len
        estimate = training_bytes(*sizes, gpus=query.gpus, target=query.target)
        seconds = step_seconds(*sizes, gpus=query.gpus, card=query.memory.card_for_costs)
        return Option(
            recipe,
            estimate.peak_bytes,
            query.budget_bytes,
            seconds=seconds,
            by_formula=estimate.moments,
        )

    # -------------------------------------------------------------- measured

    def options(self, kinds: list[list[Option]], count: int, map_: KindMap) -> list[Option]:
        """Return the fastest fitting recipe of each kind, in the order of their group and time.

        Each group of kinds gets a turn before a group gets a second one.
        """
        hopeful = [[c for c in kind if c.missing_bytes <= 0] for kind in kinds]
        hopeful = _groups_in_turn(list(filter(None, hopeful)))
        tried: list[Option] = []
        while hopeful and len(tried) < count:
            now, hopeful = hopeful[: count - len(tried)], hopeful[count - len(tried) :]
            for found in map_(_KindSearch(self.query), now):
                self.failures += found.failures
                self.misses += found.misses
                if found.option is not None:
                    self.announce(f"fits: {found.option.recipe.words}")
                    tried.append(found.option)
        return sorted(tried, key=_by_group)

    def search_kind(self, kind: list[Option]) -> Option | None:
        """Return the fastest recipe of a kind that fits, with its largest batch and length."""
        option = self._first_that_fits(kind)
        return None if option is None else self.with_limits(option)

    def _first_that_fits(self, kind: list[Option]) -> Option | None:
        """Return the fastest that fits. After one too large, skip to smaller ones."""
        budget = self.query.budget_bytes
        bound = float(budget)
        tries = 0
        for candidate in kind:
            if candidate.needed_bytes > bound or tries == TRIES:
                continue
            tries += 1
            option = self._tried(candidate)
            if option is None:
                continue
            if option.fits:
                return option
            self.misses.append(option)
            beyond_formula = option.needed_bytes / candidate.needed_bytes
            bound = min(bound, (1 - MARGIN) * budget / max(1.0, beyond_formula))
        return None

    def _tried(self, candidate: Option) -> Option | None:
        """Measure the recipe; return None if it fails."""
        query = self.query
        try:
            return self._option(candidate, query.batch, query.seq_len)
        except Exception as error:  # one failing recipe must not stop the search
            self.failures.append(f"{candidate.recipe}: {_message(error)}")
            return None

    def _option(self, candidate: Option, batch: int, seq_len: int) -> Option:
        """Measure the recipe."""
        query, recipe = self.query, candidate.recipe
        self.announce(f"{recipe.techniques}, {batch} × {seq_len}")
        setting = Setting(query.config, batch, seq_len, recipe.dtype, query.target)
        ranks = data_ranks(query.config, recipe, query.gpus)
        found = measured(
            setting,
            recipe.techniques,
            ranks=ranks,
            stage=recipe.zero_stage,
            adapters=recipe.adapters,
        )
        needed = found.needed_bytes(query.budget_bytes)
        # Drop the trace: it is long, and nothing else uses it.
        return replace(candidate, measured=replace(found, trace=None), needed_bytes=needed)

    def miss(self, kinds: list[list[Option]], fitting: list[Option]) -> Option | None:
        """Measure the next recipe that more memory would allow.

        This is the slowest recipe of the best option's kind of training that is faster than the
        best option and too large by formula. If nothing fits, it is the smallest recipe of all.
        """
        candidates = [candidate for kind in kinds for candidate in kind]
        if fitting:
            best = fitting[0]
            kind = best.recipe.learned
            candidates = [
                c
                for c in candidates
                if c.recipe.learned == kind
                and c.recipe.offload in (None, best.recipe.offload)
                and c.step_seconds < best.step_seconds
            ]
        known = {option.recipe: option for option in self.misses}

        def needed(candidate: Option) -> int:
            measured_one = known.get(candidate.recipe)
            return measured_one.needed_bytes if measured_one else candidate.needed_bytes

        too_large = [c for c in candidates if needed(c) > self.query.budget_bytes]
        if fitting:
            too_large.sort(key=lambda c: (-c.step_seconds, needed(c)))
        else:
            too_large.sort(key=needed)
        if not too_large:
            return None
        return known.get(too_large[0].recipe) or self._tried(too_large[0])

    def as_it_is(self) -> Option | None:
        """Measure the training without techniques, whole on each GPU; None if that fails."""
        alone, query = _Search(replace(self.query, gpus=1), self.announce), self.query
        found = alone._tried(alone._candidate(AS_IT_IS, query.batch, query.seq_len))
        self.failures += alone.failures
        return found

    # -------------------------------------------------------------- largest batch and length

    def with_limits(self, option: Option) -> Option:
        """Add the largest batch and the largest length that are predicted to fit, or nearly the
        largest, each with the other as given."""
        query = self.query
        batch = self._largest(option, query.batch, MAX_SEQUENCES, 1, lambda n: (n, query.seq_len))
        longest = self._largest(
            option, query.seq_len, query.config.seq_len, TOKENS, lambda n: (query.batch, n)
        )
        return replace(option, largest_batch=batch, longest=longest)

    def _largest(
        self,
        option: Option,
        fits: int,
        maximum: int,
        step: int,
        size: Callable[[int], tuple[int, int]],
    ) -> int:
        def needed(number: int) -> int:
            candidate = self._candidate(option.recipe, *size(number))
            return self._option(candidate, *size(number)).needed_bytes

        query, budget = self.query, self.query.budget_bytes
        now = self._candidate(option.recipe, query.batch, query.seq_len)
        more = self._candidate(option.recipe, *size(fits + step))
        slope = (more.needed_bytes - now.needed_bytes) / step
        known = {fits: option.needed_bytes}
        return largest(needed, known, budget, maximum, step=step, slope=slope).number


def _groups_in_turn(kinds: list[list[Option]]) -> list[list[Option]]:
    """Order kinds by their fastest recipe's place in its group, then by group."""
    placed = []
    for group in GROUPS:
        of_group = [kind for kind in kinds if kind[0].recipe.group == group]
        of_group.sort(key=lambda kind: kind[0].step_seconds)
        placed += [(place, GROUPS.index(group), kind) for place, kind in enumerate(of_group)]
    return [kind for *_, kind in sorted(placed, key=lambda each: each[:2])]


def _by_group(option: Option) -> tuple[int, float]:
    return GROUPS.index(option.recipe.group), option.step_seconds


def _message(error: Exception) -> str:
    return " ".join(str(error).split()) or type(error).__name__
