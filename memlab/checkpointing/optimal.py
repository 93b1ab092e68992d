"""Find the schedule with the least recomputation within a memory budget.

Saves    memory down to the given budget, or the least that any schedule needs.
Costs    the fewest recomputed operations of any persistent schedule. In a persistent schedule, a
         kept input stays until its own segment's backward.
Source   Beaumont et al. 2019, arXiv 1911.13214 (rotor); equal stages: Griewank and Walther 2000,
         whose closed form is the tests' oracle.

A schedule of stages i … j begins with a plain stage or a segment. The remainder is again a
schedule, so dynamic programming solves short ranges of stages before long ones:

    best(i … j) = the best of    i plain, and best(i+1 … j)
                                 i … k-1 a segment, best(i … k-1) and best(k … j), for each k

Rotor solves one budget, with bytes rounded to 500 slots. This search keeps the Pareto front of
(peak, recomputed operations) for each range. Bytes stay exact, and one search serves all budgets.
For L stages with P pairs per range, it takes O(L³·P) steps. Equal ranges are solved once, so a
transformer's equal blocks take O(L²·P).
"""

from collections.abc import Iterable, Iterator
from dataclasses import fields, replace
from itertools import count, islice, takewhile
from math import inf
from operator import itemgetter
from typing import NamedTuple, TypeAlias

from memlab.checkpointing.costs import Chain, Costs, predicted_peak_bytes, recomputed
from memlab.checkpointing.schedules import Schedule
from memlab.units import format_bytes

# 64 equal blocks take 1.2 s, 64 different ones 16 to 39 s
# (test_sixty_four_equal_blocks_are_solved_exactly).
EXACT_STAGES = 64  # with more distinct stages, bytes are rounded up to slots
SLOTS = 1000  # per budget
_IN_BYTES = ("_bytes", "_temporaries")


class Tradeoff(NamedTuple):
    """A Pareto-optimal schedule: every schedule with a lower peak recomputes more."""

    peak_bytes: int
    recomputed: int
    schedule: Schedule


# A Pair is the same for a range of stages, with a shape instead of a schedule. A shape is (own,
# rest): `own` is the shape of the first segment, or None for a plain stage.
Shape: TypeAlias = tuple["Shape | None", "Shape | None"]
Pair: TypeAlias = tuple[int, int, Shape]


def optimal_schedule(chain: Chain, budget_bytes: int) -> Schedule:
    """Return the schedule within the budget that recomputes the fewest operations.

    Raise ValueError, with the smallest feasible budget, if no schedule fits.
    """
    pairs = _search(_round_to_slots(chain, budget_bytes), budget_bytes)
    if not pairs:  # rounding to slots can hide a schedule that barely fits
        pairs = _search(chain, None, only_least=True)
        least = chain.in_all(pairs[0][0])
        if least > budget_bytes:
            raise ValueError(
                f"a budget of {budget_bytes} bytes ({format_bytes(budget_bytes)}) is below what "
                f"any schedule of this chain needs; the smallest that will do is {least} bytes "
                f"({format_bytes(least)})"
            )
    return _schedule(pairs[-1][2])


def tradeoffs(chain: Chain, budget_bytes: int | None = None) -> list[Tradeoff]:
    """Return all Pareto-optimal schedules (within the budget), by growing peak."""
    schedules = [_schedule(shape) for _, _, shape in _search(chain, budget_bytes)]
    found = [Tradeoff(predicted_peak_bytes(s, chain), recomputed(s, chain), s) for s in schedules]
    return list({tradeoff.peak_bytes: tradeoff for tradeoff in found}.values())  # the last of each


def _search(chain: Chain, budget_bytes: int | None, *, only_least: bool = False) -> list[Pair]:
    """Return the pairs of the whole chain that fit, by growing peak."""
    stages = len(chain.row)
    kinds: dict[Costs, int] = {}
    row = tuple(kinds.setdefault(stage, len(kinds)) for stage in chain.row)  # cheap to compare
    solved: dict[tuple[int, ...], list[Pair]] = {}
    best: dict[tuple[int, int], list[Pair]] = {}
    for length in range(1, stages + 1):
        for i in range(stages - length + 1):
            j = i + length - 1
            alike = row[i : j + 1]
            if alike not in solved:
                pairs = _pareto_front(_candidates(chain, i, j, best))
                fitting = takewhile(lambda pair: _fits(chain, pair[0], budget_bytes), pairs)
                solved[alike] = list(islice(fitting, 1) if only_least else fitting)
            best[i, j] = solved[alike]
    return best[0, stages - 1]


def _candidates(
    chain: Chain, i: int, j: int, best: dict[tuple[int, int], list[Pair]]
) -> Iterator[Pair]:
    """Yield a pair for each possible first part of i … j with the best remainder."""
    if i == j:
        yield chain.if_last(i), 0, (None, None)
        return
    for peak, again, shape in best[i + 1, j]:
        yield chain.if_plain(i, j, peak), again, (None, shape)
    for k in range(i + 1, j + 1):
        yield from _with_segment(chain, i, k, j, best[i, k - 1], best[k, j])


def _with_segment(
    chain: Chain, i: int, k: int, j: int, owns: list[Pair], rests: list[Pair]
) -> Iterator[Pair]:
    """Yield, for each peak, the cheapest segment i … k-1 and rest k … j within it."""
    running, behind, above = chain.segment_terms(i, k, j)
    rerun = chain.rerun(i, k)
    o = r = 0
    while o < len(owns) and r < len(rests):
        own_peak, own_again, own = owns[o]
        rest_peak, rest_again, rest = rests[r]
        own_peak, rest_peak = behind + own_peak, above + rest_peak
        yield max(running, own_peak, rest_peak), rerun + own_again + rest_again, (own, rest)
        next_own = behind + owns[o + 1][0] if o + 1 < len(owns) else inf
        next_rest = above + rests[r + 1][0] if r + 1 < len(rests) else inf
        if next_own < next_rest:
            o += 1
        else:
            r += 1


def _pareto_front(pairs: Iterable[Pair]) -> Iterator[Pair]:
    """Yield the Pareto front, by growing peak."""
    least = inf
    for pair in sorted(pairs, key=itemgetter(0, 1)):
        if pair[1] < least:
            least = pair[1]
            yield pair


def _fits(chain: Chain, peak: int, budget_bytes: int | None) -> bool:
    return budget_bytes is None or chain.in_all(peak) <= budget_bytes


def _round_to_slots(chain: Chain, budget_bytes: int) -> Chain:
    """Round bytes up to slots in a long chain of distinct stages, so that more are equal."""
    if len(set(chain.stages)) <= EXACT_STAGES:
        return chain
    slot = max(1, budget_bytes // SLOTS)

    def round_up(costs: Costs) -> Costs:
        names = [field.name for field in fields(costs) if field.name.endswith(_IN_BYTES)]
        return replace(costs, **{name: -(-getattr(costs, name) // slot) * slot for name in names})

    return replace(chain, stages=tuple(map(round_up, chain.stages)))


def _schedule(shape: Shape) -> Schedule:
    """Convert a shape to nested tuples of stage numbers, without the last stage."""
    numbers = count()

    def parts(shape: Shape | None) -> Schedule:
        found: list[int | Schedule] = []
        while shape is not None:
            own, shape = shape
            found.append(next(numbers) if own is None else parts(own))
        return tuple(found)

    return parts(shape)[:-1]
