"""Day 6: choosing what to keep."""

import gc
import random
from collections import Counter
from collections.abc import (
    Callable,
    Collection,
    Iterable,
    Iterator,
    MutableMapping,
    MutableSequence,
    Sequence,
)
from dataclasses import replace
from functools import cache, partial
from itertools import chain as chained
from itertools import combinations, count, product
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor, nn

from memlab.checkpointing import (
    ATTENTION,
    MATMULS,
    Chain,
    Costs,
    best_within,
    checkpoint,
    optimal_schedule,
    predicted_peak_bytes,
    recomputed,
    selective,
    tradeoffs,
    uniform_schedule,
)
from memlab.checkpointing.recording import Operator
from memlab.checkpointing.schedules import Schedule, check_schedule, flat, plain_schedule
from memlab.course.bill import SETTING
from memlab.course.exercises import Bill, Day, Exercise, Wrong, WrongAnswer, equal, require
from memlab.internals.torch_internals import TorchDispatchMode, tree_map_only
from memlab.metering import measure
from memlab.model import GPT, PRESETS
from memlab.trace import Trace
from memlab.train import combined, dry_trace

# ------------------------------------------------------------------ 6.1: what a schedule takes

Stages = Sequence[Costs]
WhatItTakes = Callable[[Schedule, Stages], tuple[int, int, int]]

_EQUAL = [Costs(forward=30, backward=60, output_bytes=8, saved_bytes=50, tail=10)] * 6
_UNEQUAL = [
    Costs(forward, 2 * forward, output_bytes=output, saved_bytes=saved, tail=tail)
    for forward, output, saved, tail in (
        (10, 9, 20, 1),
        (30, 14, 50, 3),
        (5, 6, 90, 2),
        (40, 8, 31, 7),
        (20, 11, 64, 4),
    )
]
_SCHEDULES: tuple[tuple[list[Costs], Schedule], ...] = (
    (_EQUAL[:1], (0,)),
    (_EQUAL[:4], (0, 1, 2, 3)),
    (_EQUAL[:4], ((0, 1), 2, 3)),
    (_EQUAL[:4], ((0,), (1,), (2,), (3,))),
    (_EQUAL[:4], ((0, 1), (2, 3))),
    (_EQUAL[:6], ((0,), 1, (2,), 3, (4,), 5)),
    (_UNEQUAL, (0, 1, 2, 3, 4)),
    (_UNEQUAL, ((0, 1, 2), 3, (4,))),
    (_UNEQUAL, (0, (1, 2, 3), 4)),
    (_UNEQUAL, (0, (1, 2), (3, 4))),
)


def what_it_takes(schedule: Schedule, stages: Stages) -> tuple[int, int, int]:
    """Bytes held when backward begins, the most at one moment of it, operations run again: the
    chain run literally, there and back, with a counter of each."""
    alive = most = again = 0
    parts = [(part,) if isinstance(part, int) else part for part in schedule]
    kept = [
        stages[part].saved_bytes if isinstance(part, int) else stages[part[-1]].output_bytes
        for part in schedule
    ]
    for taken in kept:
        alive += taken
    held = most = alive
    for item, part, taken in reversed(list(zip(schedule, parts, kept, strict=True))):
        alive -= taken
        if isinstance(item, tuple):
            again += sum(stages[i].forward for i in part) - stages[part[-1]].tail
        full = sum(stages[i].saved_bytes for i in part)
        most = max(most, alive + full)
    return held, most, again


def _check_what_it_takes(answer: WhatItTakes) -> str:
    for stages, schedule in _SCHEDULES:
        case = f"what_it_takes({schedule}, stages), {_in_words(stages)},"
        got, wanted = answer(schedule, stages), what_it_takes(schedule, stages)
        equal(f"{case}{_which_is_off(got, wanted)}", got, wanted)
    held, most, again = what_it_takes(_SCHEDULES[-1][1], _UNEQUAL)
    return (
        f"{len(_SCHEDULES)} schedules: held, most and again · of the last {held} and {most} bytes, "
        f"{again} operations"
    )


def _which_is_off(got: Any, wanted: tuple[int, int, int]) -> str:
    """Of the three, by name, where some are right."""
    if not isinstance(got, tuple) or len(got) != len(wanted):
        return ""
    pairs = zip(("held", "most", "again"), got, wanted, strict=True)
    off = [name for name, mine, right in pairs if mine != right]
    return f" has another {' and another '.join(off)}:" if 0 < len(off) < len(wanted) else ""


def _in_words(stages: Stages) -> str:
    """All that the case is made of, so that whoever got another number can follow."""
    columns = {
        "saved_bytes": [stage.saved_bytes for stage in stages],
        "output_bytes": [stage.output_bytes for stage in stages],
        "forward": [stage.forward for stage in stages],
        "tail": [stage.tail for stage in stages],
    }
    alike = all(len(set(numbers)) == 1 for numbers in columns.values())
    words = (f"{name} {numbers[0] if alike else numbers}" for name, numbers in columns.items())
    each = "each of" if alike and len(stages) > 1 else "of"
    return f"{len(stages)} stage{'s' * (len(stages) > 1)} {each} {', '.join(words)}"


def _of_the_last(stages: Stages, part: Schedule) -> int:
    return stages[part[-1]].output_bytes


def _what_it_takes_but(
    *,
    segment_keeps: Callable[[Stages, Schedule], int] = _of_the_last,
    twice: Callable[[Stages, Schedule], int] = lambda stages, part: 0,
    more_saved: Callable[[Costs], int] = lambda stage: 0,
    plain_is_skipped: bool = False,
    beside: str = "before",
    rerun_fills: bool = True,
    spared: str = "tail of the last",
    keeps_the_last: bool = False,
    of_all: bool = False,
) -> WhatItTakes:
    """The right formula with something in it that is not."""

    def takes(schedule: Schedule, stages: Stages) -> tuple[int, int, int]:
        held = most = again = largest = 0
        for place, item in enumerate(schedule):
            part = (item,) if isinstance(item, int) else item
            full = sum(stages[i].saved_bytes + more_saved(stages[i]) for i in part)
            is_plain = isinstance(item, int) or (keeps_the_last and place == len(schedule) - 1)
            own = full if is_plain else segment_keeps(stages, part)
            at_once = full if is_plain or rerun_fills else own
            above = {"before": held, "nothing": 0, "before and own": held + own * (not is_plain)}
            if not (is_plain and plain_is_skipped):
                most = max(most, above.get(beside, held) + at_once)
            largest = max(largest, 0 if is_plain else full)
            held += own + (twice(stages, part) if is_plain else 0)
            if not is_plain or of_all:
                again += sum(stages[i].forward for i in part)
                again -= {
                    "tail of the last": stages[part[-1]].tail,
                    "nothing": 0,
                    "all tails": sum(stages[i].tail for i in part),
                }[spared]
        return held, held + largest if beside == "all" else most, again

    return takes


_WHAT_IT_TAKES = Exercise(
    id="6.1",
    title="What a schedule takes",
    minutes=15,
    difficulty=3,
    hints=(
        "Go along the schedule once and keep a running sum of what is held. Backward comes to a "
        "part when all that is behind it has gone: what is there then?",
        "A plain stage adds its saved_bytes to what is held, a segment the output_bytes of its "
        "last stage. When backward comes to a part, it is what was held before the part, and the "
        "saved_bytes of all stages of the part.",
        "for part in schedule: segment = (part,) if it is an int else part; full = sum of "
        "saved_bytes; most = max(most, held + full); then held += full if it is an int, else "
        "stages[segment[-1]].output_bytes. What runs again is missing: the segment's forward, all "
        "but one tail.",
    ),
    reference=what_it_takes,
    check=_check_what_it_takes,
    wrong_answers=(
        WrongAnswer(
            _what_it_takes_but(segment_keeps=lambda stages, part: 0),
            "A segment keeps what it hands on: the output of its last stage.",
        ),
        WrongAnswer(
            _what_it_takes_but(
                segment_keeps=lambda stages, part: sum(stages[i].output_bytes for i in part)
            ),
            "Of a segment only one output is kept, the last one's; those between its stages go.",
        ),
        WrongAnswer(
            _what_it_takes_but(
                segment_keeps=lambda stages, part: sum(stages[i].saved_bytes for i in part)
            ),
            "A segment is a tuple, and it forgets: here it keeps as much as plain stages do.",
        ),
        WrongAnswer(
            _what_it_takes_but(twice=_of_the_last),
            "The output is part of saved_bytes already: here plain stages count it twice.",
        ),
        WrongAnswer(
            _what_it_takes_but(more_saved=lambda stage: stage.output_bytes),
            "saved_bytes is all that a stage keeps, its output too: add nothing to it.",
        ),
        WrongAnswer(
            _what_it_takes_but(plain_is_skipped=True),
            "The most can lie at a plain stage as well: backward comes to each part.",
        ),
        WrongAnswer(
            _what_it_takes_but(beside="before and own"),
            "When a segment has run again, its own output is among its saved_bytes: it is counted "
            "twice.",
        ),
        WrongAnswer(
            _what_it_takes_but(beside="all"),
            "All that is held and the largest segment are never there together: what lies behind "
            "a segment has gone when backward comes to it.",
        ),
        WrongAnswer(
            _what_it_takes_but(beside="nothing"),
            "While a part is there in full, all that was kept before it is there, too.",
        ),
        WrongAnswer(
            _what_it_takes_but(rerun_fills=False),
            "In backward a segment is there in full: it has run again, and kept.",
        ),
        WrongAnswer(
            _what_it_takes_but(spared="nothing"),
            "A rerun stops at the last tensor that backward needs: leave out the tail of the "
            "segment's last stage.",
        ),
        WrongAnswer(
            _what_it_takes_but(spared="all tails"),
            "Only the segment's last stage may stop early: the others hand their outputs on.",
        ),
        WrongAnswer(
            _what_it_takes_but(of_all=True), "A plain stage has kept what it needs: it runs once."
        ),
        WrongAnswer(
            _what_it_takes_but(keeps_the_last=True),
            "The last segment forgets as well. That of checkpoint_sequential is kept; a tuple here "
            "is not.",
        ),
    ),
)

# ------------------------------------------------------------------ 6.2: the best schedule

BestSchedule = Callable[[Any, int], Schedule | None]  # of a chain, or of one that is AsTold
Pair = tuple[int, int, Any]  # peak, operations run again, how


def unbeaten(choices: Iterable[Pair]) -> list[Pair]:
    """By growing bytes, each choice that runs less again than all that take no more bytes."""
    best: list[Pair] = []
    for choice in sorted(choices, key=lambda choice: choice[:2]):
        if not best or choice[1] < best[-1][1]:
            best.append(choice)
    return best


def random_chain(stages: int, seed: int) -> Chain:
    """Unequal stages with temporaries, gradients and all."""
    rng = random.Random(seed)

    def costs(output: int) -> Costs:
        forward = rng.randint(5, 30)
        return Costs(
            forward,
            2 * forward,
            output,
            output + rng.randint(10, 100),
            *(rng.randint(0, 20) for _ in range(5)),
            tail=rng.randint(0, 5),
        )

    return Chain(
        tuple(costs(8) for _ in range(stages)),
        first=costs(8),
        last=costs(0),
        held_bytes=rng.randint(20, 50),
        call_bytes=rng.randint(0, 3),
    )


@cache
def every_schedule(start: int, end: int) -> tuple[Schedule, ...]:
    """All schedules of the stages from start up to end, but for a segment of nothing but one."""
    if start == end:
        return ((),)
    of_more = _of_more_parts(start, end)
    return (*of_more, *((inside,) for inside in of_more))


@cache
def _of_more_parts(start: int, end: int) -> tuple[Schedule, ...]:
    """Those that are not one segment."""
    found = [(start, *rest) for rest in every_schedule(start + 1, end)]
    for border in range(start + 1, end):
        pairs = product(_of_more_parts(start, border), every_schedule(border, end))
        found += [(own, *rest) for own, rest in pairs]
    return tuple(found)


# Stages and seed of a chain; and a budget: that of a choice on the chain's front, with so much to
# spare. The first five tell every named mistake from every other.
_BUDGETS = (
    *((4, 12, 11, 40), (4, 3, 0, -1), (4, 12, 10, 0), (4, 8, 4, 3), (4, 8, 1, 0)),
    *((1, 0, 0, 0), (1, 0, 1, 0), (2, 1, 0, -1), (2, 1, 1, 0), (3, 2, 2, 1), (3, 11, 0, 0)),
)


@cache
def _cases() -> tuple[tuple[int, Chain, int, Schedule | None], ...]:
    """Stages, the chain, a budget, and one of the best schedules, by trying all; a longer chain at
    the end, by the library."""
    found: list[tuple[int, Chain, int, Schedule | None]] = []
    for stages, seed, place, spare in _BUDGETS:
        chain = random_chain(stages, seed)
        front = unbeaten(
            (predicted_peak_bytes(schedule, chain), recomputed(schedule, chain), schedule)
            for schedule in every_schedule(0, stages)
        )
        budget = front[place][0] + spare
        fitting = [schedule for peak, _, schedule in front if peak <= budget]
        found.append((stages, chain, budget, fitting[-1] if fitting else None))
    chain = random_chain(7, 5)
    for peak, *_ in tradeoffs(chain)[::6]:
        found.append((7, chain, peak, optimal_schedule(chain, peak)))
    return tuple(found)


class AsTold:
    """A chain that answers what the lesson tells of it, and nothing else: no library's search."""

    TOLD = ("stages", "if_last", "if_plain", "if_segment", "rerun", "in_all")

    def __init__(self, chain: Chain) -> None:
        self._told = {name: getattr(chain, name) for name in self.TOLD}
        self.asked: set[str] = set()

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        self.asked.add(name)
        if name in ("if_segment", "rerun"):
            return partial(self._of_a_segment, name)
        if name not in self._told:
            raise Wrong(
                f"best_schedule asked the chain for .{name}; the check's knows "
                f"{', '.join(self.TOLD)}: search with these alone."
            )
        return self._told[name]

    def _of_a_segment(self, name: str, i: int, k: int, *rest: int) -> int:
        if i >= k:
            self.asked.add(f"{name} of a segment without stages")
        return int(self._told[name](i, k, *rest))


def _check_best_schedule(answer: BestSchedule) -> str:
    tried = [
        (f"best_schedule(a chain of {stages}, {budget:,} bytes)", stages, chain, budget, wanted)
        for stages, chain, budget, wanted in _cases()
    ]
    gave, asked = [], set[str]()
    for case, _, chain, budget, _ in tried:
        told = AsTold(chain)
        gave.append(_asked(answer, case, told, budget))
        asked |= told.asked
    faults = [_fault(*case, got) for case, got in zip(tried, gave, strict=True)]
    if any(faults):
        first = next(n for n, fault in enumerate(faults) if fault)
        forgotten = " Is there a return?" if all(got is None for got in gave) else ""
        raise Wrong(
            f"{_told(*tried[first], gave[first])} {_of_all(faults)}{_never(asked)}{forgotten}"
        )
    return f"{len(tried)} budgets, each within it and with the least run again"


def _never(asked: set[str]) -> str:
    """What was not asked for in any budget, or should not have been: it tells mistakes apart that
    agree in all of them."""
    missing = [name for name in AsTold.TOLD if name not in asked]
    strange = sorted(asked.difference(AsTold.TOLD))
    words = [
        f" chain.{name} was asked for: segments are i … k−1, with k from i + 1." for name in strange
    ]
    return (
        f" chain.{' and chain.'.join(missing)} was never asked for." if missing else "".join(words)
    )


def _asked(answer: BestSchedule, case: str, chain: AsTold, budget: int) -> Any:
    try:
        return answer(chain, budget)
    except RecursionError:
        raise Wrong(f"{case}: choices() asks for itself again and again, without an end.") from None


def _fault(case: str, stages: int, chain: Chain, budget: int, wanted: Any, got: Any) -> str:
    """What is wrong, in a word or two; nothing if nothing is."""
    if got is None or wanted is None:
        return "" if got is wanted else ("None" if got is None else "not None")
    try:
        check_schedule(got, stages)
    except (TypeError, ValueError) as error:
        raise Wrong(f"{case} gave no schedule: {error}.") from None
    above = predicted_peak_bytes(got, chain) - budget
    if above > 0:
        return f"{above:,} B over"
    more = recomputed(got, chain) - recomputed(wanted, chain)
    return f"{more:,} more again" if more else ""


def _told(case: str, stages: int, chain: Chain, budget: int, wanted: Any, got: Any) -> str:
    """What is wrong, in a sentence."""
    if wanted is None:
        return f"{case} gave {got}; no schedule fits: wanted None."
    least = recomputed(wanted, chain)
    wants = f"wanted one that runs {least:,} operations again, such as {wanted}"
    if got is None:
        return f"{case} gave None; {wants}."
    peak, again = predicted_peak_bytes(got, chain), recomputed(got, chain)
    if peak > budget:
        return f"{case} gave {got}, which takes {peak:,} bytes: over budget; {wants}."
    return f"{case} gave {got}, which runs {again:,} operations again; {wants}."


def _of_all(faults: list[str]) -> str:
    """Every budget's fault, by its number: two mistakes can agree in one budget, seldom in all."""
    wrong = [f"{n}: {fault}" for n, fault in enumerate(faults, start=1) if fault]
    listed = f"Wrong in {len(wrong)} of {len(faults)} budgets ({', '.join(wrong)})."
    if any("over" in fault for fault in faults):
        return f"{listed} What is over its budget has a peak that came out too low."
    if all("again" in fault for fault in faults if fault):
        return (
            f"{listed} All are within their budgets: choices are missing, or what runs again is "
            f"miscounted."
        )
    return listed


def _cheapest_fitting(choices: list[Pair], chain: Any, budget: int) -> Schedule | None:
    fitting = [choice for choice in choices if chain.in_all(choice[0]) <= budget]
    return fitting[-1][2] if fitting else None


def takes_as_told(parts: Schedule, chain: Any) -> tuple[int, int]:
    """(peak, operations run again) of a row whose last part, and each segment's, is plain: by what
    the lesson tells of a chain."""
    *before, j = parts
    assert isinstance(j, int)
    peak, again, end = chain.if_last(j), 0, j
    for part in reversed(before):
        if isinstance(part, int):
            start, peak = part, chain.if_plain(part, j, peak)
        else:
            own, own_again = takes_as_told(part, chain)
            start = next(flat(part))
            peak = chain.if_segment(start, end, j, own, peak)
            again += own_again + chain.rerun(start, end)
        end = start
    return peak, again


def _fits(schedule: Schedule, chain: Any, budget: int) -> bool:
    return bool(chain.in_all(_with_the_loss(schedule, chain)[0]) <= budget)


def _with_the_loss(schedule: Schedule, chain: Any) -> tuple[int, int]:
    return takes_as_told((*schedule, len(chain.stages)), chain)


def _best_schedule_but(
    *,
    if_plain: Callable[..., int] | None = lambda chain, *costs: chain.if_plain(*costs),
    if_segment: Callable[..., int] = lambda chain, *costs: chain.if_segment(*costs),
    again: Callable[[Any, int, int, int, int], int] = lambda chain, i, k, own, rest: (
        chain.rerun(i, k) + own + rest
    ),
    inside: str = "all",
    longest: int = 99,
    last_k: int = 0,  # from j
    join: Callable[[Any, Any], Schedule] = lambda own, rest: (own, *rest),
    choose: Callable[[list[Pair], Any, int], Schedule | None] = _cheapest_fitting,
) -> BestSchedule:
    def best_schedule(chain: Any, budget_bytes: int) -> Schedule | None:
        @cache
        def choices(i: int, j: int, is_plain: bool = False) -> list[Pair]:
            if i == j:
                return [(chain.if_last(i), 0, (i,))]
            found = []
            if if_plain is not None:
                found = [
                    (if_plain(chain, i, j, peak), again, (i, *rest))
                    for peak, again, rest in choices(i + 1, j, is_plain)
                ]
            for k in [] if is_plain else range(i + 1, min(j + last_k, i + longest) + 1):
                last = k if inside == "too long" else k - 1
                within = choices(i, last, inside == "plain")
                pairs = product(within[:1] if inside == "least memory" else within, choices(k, j))
                for (own_peak, own_again, own), (peak, rest_again, rest) in pairs:
                    found.append(
                        (
                            if_segment(chain, i, k, j, own_peak, peak),
                            again(chain, i, k, own_again, rest_again),
                            join(own, rest),
                        )
                    )
            return unbeaten(found)

        found = choose(choices(0, len(chain.stages)), chain, budget_bytes)
        return None if found is None else found[:-1]

    return best_schedule


def _one_input_forgotten(chain: Any, i: int, k: int, j: int, own: int, rest: int) -> int:
    """if_segment adds the segment's output to `rest`: take it off before."""
    return int(chain.if_segment(i, k, j, own, rest - chain.stages[k - 1].output_bytes))


def _swapped(chain: Any, i: int, k: int, j: int, own: int, rest: int) -> int:
    return int(chain.if_segment(i, k, j, rest, own))


def _larger(chain: Any, i: int, k: int, j: int, own: int, rest: int) -> int:
    return max(own, rest)


def _whatever_it_takes(choices: list[Pair], chain: Any, budget: int) -> Schedule | None:
    return choices[-1][2]


def _least_memory(choices: list[Pair], chain: Any, budget: int) -> Schedule | None:
    return choices[0][2] if chain.in_all(choices[0][0]) <= budget else None


def _without_what_is_held(choices: list[Pair], chain: Any, budget: int) -> Schedule | None:
    fitting = [choice for choice in choices if choice[0] <= budget]
    return fitting[-1][2] if fitting else None


def _by_the_slot(choices: list[Pair], chain: Any, budget: int) -> Schedule | None:
    """Bytes rounded to the nearest of slots, as torch's memory budget does."""
    slot = max(1, budget // 40)
    fitting = [c for c in choices if round(chain.in_all(c[0]) / slot) <= round(budget / slot)]
    return fitting[-1][2] if fitting else None


def _below(choices: list[Pair], chain: Any, budget: int) -> Schedule | None:
    return _cheapest_fitting(choices, chain, budget - 1)


def _always_some(choices: list[Pair], chain: Any, budget: int) -> Schedule | None:
    return _cheapest_fitting(choices, chain, budget) or choices[0][2]


def _largest_first(chain: Any, budget_bytes: int) -> Schedule | None:
    """Forgets one stage after the other, what saved most first, until it fits."""
    schedule: list[Any] = list(plain_schedule(len(chain.stages)))
    for i in sorted(schedule, key=lambda i: -chain.stages[i].saved_bytes):
        if _fits(tuple(schedule), chain, budget_bytes):
            break
        schedule[i] = (i,)
    return tuple(schedule) if _fits(tuple(schedule), chain, budget_bytes) else None


def _best_uniform(chain: Any, budget_bytes: int) -> Schedule | None:
    """Every k-th input kept, or everything."""
    stages = len(chain.stages)
    uniform = [uniform_schedule(stages, every) for every in range(1, stages + 1)]
    fitting = [s for s in (plain_schedule(stages), *uniform) if _fits(s, chain, budget_bytes)]
    return min(fitting, key=lambda s: _with_the_loss(s, chain)[1], default=None)


def _all_plain(chain: Any, budget_bytes: int) -> Schedule | None:
    schedule = plain_schedule(len(chain.stages))
    return schedule if _fits(schedule, chain, budget_bytes) else None


_BEST_SCHEDULE = Exercise(
    id="6.2",
    title="The best schedule within a budget",
    minutes=20,
    difficulty=4,
    hints=(
        "For plain one loop, over the choices of what remains. For segments three, one inside "
        "another: over k, over the choices inside, over the choices of what remains. From where to "
        "where does k run, if a segment has at least one stage, and may end right before stage j?",
        "Plain: each choice of i+1 … j, with (i, *rest) and chain.if_plain(i, j, peak). A segment: "
        "for each k from i+1 to j, each pair of a choice of i … k-1 and one of k … j, with "
        "(own, *rest), chain.if_segment(i, k, j, own_peak, peak), and chain.rerun(i, k) + both "
        "agains.",
        "found = [(chain.if_plain(i, j, peak), again, (i, *rest)) for peak, again, rest in "
        "choices(i + 1, j)]; for k in range(i + 1, j + 1): for own_peak, own_again, own in "
        "choices(i, k - 1): for peak, again, rest in choices(k, j). In the innermost loop, append "
        "the peak, all that runs again, and the schedule.",
    ),
    reference=_best_schedule_but(),
    check=_check_best_schedule,
    wrong_answers=(
        WrongAnswer(_largest_first, "Greedy: to forget the largest first is not what costs least."),
        WrongAnswer(
            _all_plain,
            "Plain stages alone come out. Is each segment i … k-1 among found, with "
            "chain.if_segment as its peak?",
        ),
        WrongAnswer(
            _best_schedule_but(if_segment=lambda chain, i, k, j, own, rest: own + rest),
            "A segment's own peak and the rest's never add up: chain.if_segment says what is there "
            "at once.",
        ),
        WrongAnswer(_best_uniform, "Every k-th input alone: unequal stages want unequal segments."),
        WrongAnswer(
            _best_schedule_but(inside="plain"),
            "A segment may have segments inside: of i … k-1, too, take choices().",
        ),
        WrongAnswer(
            _best_schedule_but(if_plain=None), "A stage may be plain, and then nothing runs again."
        ),
        WrongAnswer(
            _best_schedule_but(longest=1),
            "A segment may have several stages: k is not only i + 1.",
        ),
        WrongAnswer(
            _best_schedule_but(last_k=-1),
            "The last segment may end right before j: range(i + 1, j + 1), for k reaches j.",
        ),
        WrongAnswer(
            _best_schedule_but(inside="too long"),
            "The inside of a segment i … k-1 is choices(i, k - 1): with k it can be as long as the "
            "whole.",
        ),
        WrongAnswer(
            _best_schedule_but(inside="least memory"),
            "Of the inside, only the first choice was taken: all of choices(i, k - 1) are asked "
            "for, and which is best depends on the rest.",
        ),
        WrongAnswer(
            _best_schedule_but(if_segment=_swapped),
            "own and rest have changed places: in chain.if_segment(i, k, j, own, rest), own is the "
            "peak of i … k-1.",
        ),
        WrongAnswer(
            _best_schedule_but(if_segment=_larger),
            "The larger of two peaks is not all: chain.if_segment knows what is held beside each.",
        ),
        WrongAnswer(
            _best_schedule_but(join=lambda own, rest: (*own, *rest)),
            "A segment is a tuple in the schedule, (own, *rest): flattened, its stages are plain.",
        ),
        WrongAnswer(
            _best_schedule_but(if_segment=_one_input_forgotten),
            "While the rest runs, the segment's output is there for it: chain.if_segment adds it.",
        ),
        WrongAnswer(
            _best_schedule_but(again=lambda chain, i, k, own, rest: chain.rerun(i, k) + rest),
            "What the segments inside run again is missing: own_again.",
        ),
        WrongAnswer(
            _best_schedule_but(again=lambda chain, i, k, own, rest: chain.rerun(i, k) + own),
            "What the rest runs again is missing.",
        ),
        WrongAnswer(_best_schedule_but(choose=_whatever_it_takes), "The budget is not looked at."),
        WrongAnswer(
            _best_schedule_but(choose=_least_memory),
            "The least memory is not asked for: of all that fit, the least run again.",
        ),
        WrongAnswer(
            _best_schedule_but(choose=_without_what_is_held),
            "The budget is for all that is there: chain.in_all(peak), with weights and embedding.",
        ),
        WrongAnswer(
            _best_schedule_but(choose=_by_the_slot),
            "Bytes that are rounded can come out above the budget: leave them exact.",
        ),
        WrongAnswer(_best_schedule_but(choose=_below), "A budget may be used up to its last byte."),
        WrongAnswer(
            _best_schedule_but(choose=_always_some),
            "Say so when nothing fits, rather than run out of memory: None.",
        ),
    ),
)

# ------------------------------------------------------------------ 6.3: selective, by operator

Choosing = Callable[[Collection[Any]], TorchDispatchMode]
ROWS, WIDTH = 8, 16
TENSOR = 4 * ROWS * WIDTH  # bytes
aten = torch.ops.aten


class _Counter(TorchDispatchMode):
    """How often each operator runs."""

    def __init__(self) -> None:
        super().__init__()
        self.runs: Counter[Any] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.runs[func] += 1
        return func(*args, **(kwargs or {}))


def _layers() -> list[nn.Module]:
    """Two blocks of products that all have one shape, so that a mix-up shows in values alone."""
    torch.manual_seed(0)

    def linear() -> nn.Module:
        return nn.Linear(WIDTH, WIDTH, bias=False)

    return [nn.Sequential(linear(), nn.Tanh(), linear(), nn.Tanh()) for _ in range(2)]


def _attention_block() -> list[nn.Module]:
    torch.manual_seed(0)
    return [GPT(PRESETS["tiny"]).blocks[1]]


class _Attention(nn.Module):
    """Of x with itself, and its scale is not the usual one: that is handed over by its name."""

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.scaled_dot_product_attention(x, x, x, scale=2.0)


class _Powers(nn.Module):
    """Two operators of one name: to the power of a tensor, and to that of a number."""

    def forward(self, x: Tensor) -> Tensor:
        return (x.square() + 1) ** x + x**3


# What a case has: its blocks, x's shape, what is chosen, and bytes that may be held: the chosen
# outputs and each block's output.
_SELECTIONS: dict[str, tuple[Callable[[], list[nn.Module]], tuple[int, ...], Any, int]] = {
    "1 block, with its 2 products chosen": (
        lambda: _layers()[:1],
        (ROWS, WIDTH),
        MATMULS,
        3 * TENSOR,
    ),
    "2 blocks, with their 4 products chosen": (_layers, (ROWS, WIDTH), MATMULS, 6 * TENSOR),
    "1 block, with its 2 tanh chosen": (
        lambda: _layers()[:1],
        (ROWS, WIDTH),
        frozenset({aten.tanh.default}),
        2 * TENSOR,
    ),
    # Of 2 × 16 tokens, C = 32, H = 4, KV · D = 16, hidden = 96: what q, k, v, the output, gate, up
    # and down make; attention's output and log-sum-exp; and the block's output.
    "a transformer's block, with products and attention chosen": (
        _attention_block,
        (2, 16, 32),
        MATMULS | ATTENTION,
        4 * 2 * 16 * (3 * 32 + 2 * 16 + 2 * 96 + (32 + 4) + 32),
    ),
    # Two heads of eight tokens: attention's output, which is the block's, and its log-sum-exp.
    "1 block of attention with scale=2.0, chosen": (
        lambda: [_Attention()],
        (1, 2, ROWS, WIDTH),
        ATTENTION,
        4 * 2 * ROWS * (WIDTH + 1),
    ),
    "1 block with pow(tensor, tensor) chosen, and pow(tensor, number) not": (
        lambda: [_Powers()],
        (ROWS, WIDTH),
        frozenset({aten.pow.Tensor_Tensor}),
        2 * TENSOR,
    ),
}


def _check_choosing(answer: Choosing) -> str:
    _require_a_list_each(answer)
    for name, (build, shape, chosen, allowed) in _SELECTIONS.items():
        case = f"Choosing around {name}"
        blocks, x = build(), torch.linspace(-1, 1, torch.Size(shape).numel()).view(shape)
        x.requires_grad_()
        held, y = _held(case, answer, chosen, blocks, x)
        gradients, runs = _backward(case, y, blocks, x)
        wanted, once = _plainly(build, x)
        far = max((a - b).abs().max().item() for a, b in zip(gradients, wanted, strict=True))
        first = sum(count for func, count in once.items() if func in chosen)
        again = sum(count for func, count in runs.items() if func in chosen) - first
        require(
            far == 0,
            f"{case} gives gradients up to {far:.2e} off those of the plain blocks.",
        )
        require(
            held <= allowed,
            f"{case} holds {held:,} bytes between forward and backward; wanted at most "
            f"{allowed:,}: the chosen outputs, and that of each block.",
        )
        require(
            again == 0,
            f"{case} holds {held:,} bytes, and the chosen operators ran {again} times again; "
            f"wanted none.",
        )
    for name, blocks, chosen in (
        ("2 blocks", _layers(), MATMULS),
        ("attention, which makes two tensors,", _attention_block(), ATTENTION),
    ):
        left = _left(answer, blocks, chosen)
        require(
            left == 0,
            f"Choosing around {name} leaves {left:,} bytes behind when the output is dropped; "
            f"wanted none.",
        )
    left = _left_by_backward(answer)
    require(
        left == 0,
        f"Choosing around 2 blocks, with their 4 products of {TENSOR} bytes chosen: when backward "
        f"is over, {left:,} bytes are left beside the output; wanted none.",
    )
    return (
        f"{len(_SELECTIONS)} selections · gradients equal to the bit · no more held than was "
        f"chosen, and nothing behind backward · no chosen operator ran again"
    )


def _require_a_list_each(answer: Choosing) -> None:
    """What one mode keeps is not another's."""
    one, other = (getattr(answer(MATMULS), "kept", None) for _ in range(2))
    require(
        one is not other or not isinstance(one, (MutableSequence, MutableMapping)),
        "two Choosing objects have one and the same self.kept; wanted one for each: make it in "
        "__init__.",
    )


def _forward(
    case: str, answer: Choosing, chosen: Any, blocks: list[nn.Module], x: Tensor
) -> Tensor:
    for block in blocks:
        mode = answer(chosen)
        require(
            isinstance(mode, TorchDispatchMode),
            f"{case}: Choosing(chosen) gave {mode!r}; wanted a TorchDispatchMode.",
        )
        x = _keeping(mode, block, x)
    return x


def _keeping(mode: Any, block: nn.Module, x: Tensor) -> Tensor:
    """The lesson's: yesterday's checkpoint, with the mode around both runs."""

    def run(x: Tensor) -> Tensor:
        with mode:
            return block(x)

    y = checkpoint(run, x)
    mode.is_second = True
    return y


def _held(
    case: str, answer: Choosing, chosen: Any, blocks: list[nn.Module], x: Tensor
) -> tuple[int, Tensor]:
    outputs: list[Tensor] = []

    def forward() -> None:
        outputs.append(_forward(case, answer, chosen, blocks, x))

    trace = measure(forward, model=nn.ModuleList(blocks))
    return _born(trace), outputs[0]


def _born(trace: Trace) -> int:
    """Bytes alive at the end that were not there before."""
    return sum(event.bytes for event in trace.events if event.phase != "before")


def _backward(
    case: str, y: Tensor, blocks: list[nn.Module], x: Tensor
) -> tuple[list[Tensor], Counter[Any]]:
    weights = [weight for block in blocks for weight in block.parameters()]
    with _Counter() as counter:
        try:
            gradients = torch.autograd.grad(y.square().sum(), [x, *weights])
        except IndexError:
            raise Wrong(
                f"{case}: in backward a list of kept outputs has nothing more to hand out."
            ) from None
    return list(gradients), counter.runs


def _plainly(build: Callable[[], list[nn.Module]], x: Tensor) -> tuple[list[Tensor], Counter[Any]]:
    """The gradients, and what backward runs."""
    blocks, y = build(), x
    for block in blocks:
        y = block(y)
    return _backward("", y, blocks, x)


def _left(answer: Choosing, blocks: list[nn.Module], chosen: Any) -> int:
    """Bytes alive when the output was dropped, and Python has looked for circles."""
    width = next(blocks[0].parameters()).shape[-1]
    x = torch.ones(1, ROWS, width, requires_grad=True)

    def forward() -> None:
        _forward("", answer, chosen, blocks, x)
        gc.collect()

    return _born(measure(forward, model=nn.ModuleList(blocks)))


def _left_by_backward(answer: Choosing) -> int:
    """Bytes alive when backward is over and the output still there, beside the output."""
    blocks, x = _layers(), torch.ones(ROWS, WIDTH, requires_grad=True)
    outputs: list[Tensor] = []

    def there_and_back() -> None:
        outputs.append(_forward("", answer, MATMULS, blocks, x))
        torch.autograd.grad(outputs[0].sum(), x)

    return _born(measure(there_and_back, model=nn.ModuleList(blocks))) - TENSOR


def _detached(made: Any) -> Any:
    return tree_map_only(Tensor, Tensor.detach, made)


def _cloned(made: Any) -> Any:
    return tree_map_only(Tensor, lambda tensor: tensor.detach().clone(), made)


class _Choosing(TorchDispatchMode):
    """What is chosen is kept in the first run, and handed out in the second."""

    def __init__(
        self,
        chosen: Collection[Any],
        *,
        store: Callable[[Any], Any] = _detached,
        hand_out: Callable[[list[Any]], Any] | None = lambda kept: kept.pop(0),
        kept: list[Any] | None = None,
        hands_on_names: bool = True,
    ) -> None:
        super().__init__()
        self.chosen, self.store, self.hand_out = chosen, store, hand_out
        self.hands_on_names = hands_on_names
        self.kept: list[Any] = [] if kept is None else kept
        self.is_second = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        is_chosen = func in self.chosen
        if is_chosen and self.is_second and self.hand_out:
            return self.hand_out(self.kept)
        made = func(*args, **((kwargs or {}) if self.hands_on_names else {}))
        if is_chosen:
            self.kept.append(self.store(made))
        return made


class _ByPlace(_Choosing):
    """Hands out by a place that it counts, and lets go of nothing."""

    def __init__(self, chosen: Collection[Any]) -> None:
        super().__init__(chosen, hand_out=self._next)
        self.place = -1

    def _next(self, kept: list[Any]) -> Any:
        self.place += 1
        return kept[self.place]


class _Everything(frozenset[Any]):
    def __contains__(self, operator: object) -> bool:
        return True


def _all_chosen(chosen: Collection[Any]) -> TorchDispatchMode:
    return _Choosing(_Everything())


def _none_chosen(chosen: Collection[Any]) -> TorchDispatchMode:
    return _Choosing(())


_ONE_LIST: list[Any] = []
_SHARING: WeakSet[Any] = WeakSet()


def _sharing_a_list(chosen: Collection[Any]) -> TorchDispatchMode:
    """One list for all the blocks of a model; a new model's first block finds it empty."""
    if not _SHARING:
        _ONE_LIST.clear()
    _SHARING.add(sharing := _Choosing(chosen, kept=_ONE_LIST))
    return sharing


_CHOOSING = Exercise(
    id="6.3",
    title="Keep what chosen operators made",
    minutes=15,
    difficulty=4,
    hints=(
        "Every operator of the block passes __torch_dispatch__, in both runs and in the same "
        "order. Which of the two runs has to remember, and which to hand out?",
        "First run: made = func(*args, **(kwargs or {})); if func is chosen, append it to "
        "self.kept, detached, and return made. Second run: a chosen func does not run; the first "
        "of self.kept is its result. Whatever is not chosen runs in both.",
        "if self.is_second and func in self.chosen: return self.kept.pop(0); made = func(*args, "
        "**(kwargs or {})); detached = torch.utils._pytree.tree_map_only(torch.Tensor, "
        "torch.Tensor.detach, made). Then keep it, if it is chosen; and what does the operator "
        "give?",
    ),
    reference=_Choosing,
    check=_check_choosing,
    wrong_answers=(
        WrongAnswer(
            _all_chosen,
            "Only what is chosen is kept: of all operators, some do not even run in both runs.",
        ),
        WrongAnswer(_none_chosen, "This is yesterday's checkpoint: everything runs again."),
        WrongAnswer(
            partial(_Choosing, hand_out=None),
            "The chosen outputs are kept and then made again: hand them out in the second run.",
        ),
        WrongAnswer(
            partial(_Choosing, hand_out=lambda kept: kept.pop()),
            "The second run asks in the order of the first: hand out the oldest, pop(0).",
        ),
        WrongAnswer(
            partial(_Choosing, hand_out=lambda kept: kept[-1]),
            "One operator runs several times in a block: keep an output for each call.",
        ),
        WrongAnswer(
            partial(_Choosing, store=lambda made: made),
            "Autograd hangs its graph on the tensor that you return, and the graph holds your "
            "list: a circle that nobody frees. Keep it detached.",
        ),
        WrongAnswer(
            partial(_Choosing, store=_cloned),
            "A clone is a second copy; a detached tensor shares the memory.",
        ),
        WrongAnswer(
            partial(_Choosing, hands_on_names=False),
            "An operator can be called with keywords: func(*args, **(kwargs or {})).",
        ),
        WrongAnswer(_ByPlace, "What was handed out is still in your list: pop it."),
        WrongAnswer(
            _sharing_a_list,
            "One list for all blocks: backward comes to the last block first. Each call has a list "
            "of its own.",
        ),
    ),
)

# ------------------------------------------------------------------ 6.4: a knapsack

BestOperators = Callable[[Sequence[Operator], int], Collection[int]]


def _operators(*pairs: tuple[int, int], first: int = 0) -> list[Operator]:
    """Operators of so many (bytes, operations); their numbers begin at `first`."""
    return [Operator(first + 3 * n, aten.mm.default, *pair) for n, pair in enumerate(pairs)]


def _many(count: int, seed: int) -> list[Operator]:
    rng = random.Random(seed)
    return _operators(*((rng.randint(5, 60), rng.randint(1, 90)) for _ in range(count)), first=7)


def _worth_alike(count: int) -> list[Operator]:
    """Byte for byte all spare nearly the same, so that of a thousand choices none beats another:
    whoever goes on with a part of them misses the best."""
    rng = random.Random(0)
    sizes = [rng.randint(1_000, 9_999) for _ in range(count)]
    return _operators(*((size, size + 700) for size in sizes), first=5)


# Operators, and the budget in bytes.
_KNAPSACKS: tuple[tuple[list[Operator], int], ...] = (
    (_operators((10, 5)), 9),
    (_operators((10, 5)), 11),
    (_operators((10, 5)), 10),
    (_operators((4, 5), (6, 1), first=2), 10),
    (_operators((6, 1), (4, 5)), 6),
    (_operators((1, 1), (2, 1), (3, 100)), 3),
    (_operators((6, 70), (5, 60), (5, 60)), 10),
    (_operators((6, 90), (5, 60), (5, 60)), 10),
    (_operators(*[(10_004, 1)] * 10), 100_000),
    (_many(8, 0), 120),
    (_many(10, 1), 200),
    (_many(9, 0), 150),
    (_operators((0, 5), (7, 0), (4, 9), (3, 2), first=11), 5),
)
MOST_ADDITIONS = 100_000  # 2²⁰ sets take one each at least; who drops the beaten, some 2,000


def _check_best_operators(answer: BestOperators) -> str:
    for operators, budget in _KNAPSACKS:
        best = max(_every_sum_within(operators, budget))
        _check_a_knapsack(answer, operators, budget, best)
    many, budget = _many(20, 2), 400
    best = _sums(many, best_within(many, budget))[1]
    _check_a_knapsack(answer, _counted(many), budget, best)
    alike = _worth_alike(14)
    budget = sum(o.bytes for o in alike) // 2
    best = _sums(alike, best_within(alike, budget))[1]
    _check_a_knapsack(answer, alike, budget, best)
    return (
        f"{len(_KNAPSACKS) + 2} budgets, none passed by a byte, each with the most operations "
        f"spared, and of {len(many)} operators not all 2²⁰ sets tried"
    )


def _check_a_knapsack(
    answer: BestOperators, operators: list[Operator], budget: int, best: int
) -> None:
    listed = ", ".join(f"{o.number}: {o.bytes:,} B {o.operations}" for o in operators[:3])
    more = f", … {len(operators)} in all" if len(operators) > 3 else ""
    case = f"best_operators([{listed}{more}], {budget:,} bytes)"
    given = list(operators)
    try:
        got = answer(given, budget)
    except _TooManyAdditions:
        raise Wrong(
            f"{case} was stopped after {MOST_ADDITIONS:,} additions of bytes and operations; "
            f"fewer than 5,000 do."
        ) from None
    require(given == operators, f"{case} has changed the list that it was given, or its order.")
    _require_numbers(case, got, {o.number for o in operators})
    taken, spared = _sums(operators, got)
    words = f"{case} gave {sorted(got)}, {taken:,} bytes that spare {spared:,} operations"
    require(taken <= budget, f"{words}: over budget.")
    require(spared == best, f"{words}; {best:,} can be spared.")


class _TooManyAdditions(BaseException):
    """No Exception, for an answer may catch those."""


def _counted(operators: list[Operator]) -> list[Operator]:
    """The same, of numbers that count how often one is added or subtracted: they stop an answer
    that would never come to its end, and no clock is asked."""
    so_far = count(1)

    class Counted(int):
        def _tick(self, result: int) -> "Counted":
            if next(so_far) > MOST_ADDITIONS:
                raise _TooManyAdditions
            return Counted(result)

        def __add__(self, other: int) -> "Counted":
            return self._tick(int(self) + int(other))

        def __sub__(self, other: int) -> "Counted":
            return self._tick(int(self) - int(other))

        def __rsub__(self, other: int) -> "Counted":
            return self._tick(int(other) - int(self))

        __radd__ = __add__

    return [o._replace(bytes=Counted(o.bytes), operations=Counted(o.operations)) for o in operators]


def _require_numbers(case: str, got: Any, numbers: set[int]) -> None:
    require(
        isinstance(got, Collection) and not isinstance(got, (str, dict)),
        f"{case} gave {got!r}; wanted the numbers of the operators to keep."
        f"{' Is there a return?' if got is None else ''}",
    )
    strangers = [number for number in got if number not in numbers]
    require(
        not strangers,
        f"{case} gave {list(got)}; no operator has a number of {strangers}.",
    )
    require(
        len(set(got)) == len(got),
        f"{case} gave {list(got)}; wanted each number once.",
    )


def _sums(operators: Sequence[Operator], numbers: Collection[int]) -> tuple[int, int]:
    kept = [operator for operator in operators if operator.number in numbers]
    return sum(o.bytes for o in kept), sum(o.operations for o in kept)


def _every_sum_within(operators: Sequence[Operator], budget: int) -> Iterator[int]:
    """Of every choice that fits, by trying all, the operations that it spares."""
    sizes = range(len(operators) + 1)
    for kept in chained.from_iterable(combinations(operators, size) for size in sizes):
        if sum(o.bytes for o in kept) <= budget:
            yield sum(o.operations for o in kept)


def _greedy(order: Callable[[Operator], float]) -> BestOperators:
    def best(operators: Sequence[Operator], budget_bytes: int) -> set[int]:
        numbers, taken = set(), 0
        for operator in sorted(operators, key=order):
            if taken + operator.bytes <= budget_bytes:
                numbers.add(operator.number)
                taken += operator.bytes
        return numbers

    return best


def _everything(operators: Sequence[Operator], budget_bytes: int) -> set[int]:
    return {operator.number for operator in operators}


def _nothing(operators: Sequence[Operator], budget_bytes: int) -> set[int]:
    return set()


def _below_the_budget(operators: Sequence[Operator], budget_bytes: int) -> Collection[int]:
    return best_within(operators, max(0, budget_bytes - 1))


def _places(operators: Sequence[Operator], budget_bytes: int) -> set[int]:
    numbers = best_within(operators, budget_bytes)
    return {place for place, operator in enumerate(operators) if operator.number in numbers}


def _rounded(operators: Sequence[Operator], budget_bytes: int) -> Collection[int]:
    """Bytes to the nearest ten-thousandth of the budget, or thousandth …: by slots."""
    slot = max(1, budget_bytes // 1000)
    in_slots = [o._replace(bytes=round(o.bytes / slot)) for o in operators]
    return best_within(in_slots, round(budget_bytes / slot))


def _per_byte(operator: Operator) -> float:
    return -operator.operations / max(1, operator.bytes)


def _by_operations(operator: Operator) -> float:
    return -operator.operations


def _by_bytes(operator: Operator) -> float:
    return operator.bytes


def _best_greedy(operators: Sequence[Operator], budget_bytes: int) -> set[int]:
    found = [_greedy(o)(operators, budget_bytes) for o in (_per_byte, _by_operations, _by_bytes)]
    return max(found, key=lambda numbers: _sums(operators, numbers)[1])


def _all_sets(operators: Sequence[Operator], budget_bytes: int) -> set[int]:
    """Each operator in or out, and nothing dropped but what is over the budget."""
    choices: list[tuple[int, int, frozenset[int]]] = [(0, 0, frozenset())]
    for o in operators:
        choices += [
            (taken + o.bytes, spared + o.operations, numbers | {o.number})
            for taken, spared, numbers in choices
            if taken + o.bytes <= budget_bytes
        ]
    return set(max(choices, key=lambda choice: choice[1])[2])


def _twice(operators: Sequence[Operator], budget_bytes: int) -> list[int]:
    return 2 * sorted(best_within(operators, budget_bytes))


def _sorted_in_place(operators: Sequence[Operator], budget_bytes: int) -> Collection[int]:
    if isinstance(operators, list):
        operators.sort(key=_per_byte)
    return best_within(operators, budget_bytes)


_BEST_OPERATORS = Exercise(
    id="6.4",
    title="What to keep within a budget",
    minutes=12,
    difficulty=3,
    hints=(
        "Take the operators one by one. Each choice so far splits in two: with this operator, and "
        "without it. What keeps the list from doubling each time?",
        "A choice is (bytes, operations that still run again, numbers); the first is (0, all "
        "operations, frozenset()). With an operator: more bytes, fewer operations. Drop those over "
        "budget, and unbeaten() drops those that another choice beats.",
        "for o in operators: larger = [(taken + o.bytes, again - o.operations, numbers | "
        "{o.number}) for taken, again, numbers in choices if taken + o.bytes <= budget_bytes]; "
        "choices = unbeaten(choices + larger). Which of the last choices runs the least again?",
    ),
    reference=best_within,
    check=_check_best_operators,
    rebuilds=("memlab.checkpointing.best_within",),
    wrong_answers=(
        WrongAnswer(_everything, "The budget is not looked at: everything is kept."),
        WrongAnswer(_nothing, "Nothing is kept, whatever the budget."),
        WrongAnswer(
            _greedy(_per_byte),
            "Greedy: the most operations a byte first can leave room that nothing fits into.",
        ),
        WrongAnswer(
            _greedy(_by_operations),
            "The most operations first: one large operator can cost more than two small ones.",
        ),
        WrongAnswer(
            _greedy(_by_bytes),
            "The smallest first: what is small may spare nothing.",
        ),
        WrongAnswer(
            _greedy(lambda operator: 0), "In the order of the block, whatever they are worth."
        ),
        WrongAnswer(_below_the_budget, "The last byte of the budget may be used: <=, not <."),
        WrongAnswer(_places, "An operator has a number; its place in the list is another."),
        WrongAnswer(
            _best_greedy, "Three greedy ways, and the best of them: all three can miss the best."
        ),
        WrongAnswer(
            _all_sets,
            "Each operator doubles the sets: drop those that another beats, after each operator.",
        ),
        WrongAnswer(_twice, "To keep an output twice spares nothing: a set has each number once."),
        WrongAnswer(
            _sorted_in_place,
            "The lesson goes on with that list: sorted(operators, …) makes one of your own.",
        ),
        WrongAnswer(
            _rounded,
            "Rounded bytes: ten small roundings can come out above the budget.",
        ),
    ),
)

# ------------------------------------------------------------------ the bill


def keep_of_each_block(model: nn.Module, keep: Collection[Any]) -> None:
    """Forget what every block saved, but for what was chosen."""
    for block in model.blocks:
        block.forward = partial(selective(keep), block.forward)


def attention_kept() -> Trace:
    """The bill's step, checkpointed, with attention's outputs kept: they fit below the peak, which
    lies where the last gradients are made and no activation is left."""
    technique = combined("accumulation+bfloat16")

    def change(model: nn.Module) -> None:
        technique.change_model(model)
        keep_of_each_block(model, ATTENTION)

    return dry_trace(SETTING, replace(technique, change_model=change))


DAY = Day(
    exercises=(_WHAT_IT_TAKES, _BEST_SCHEDULE, _CHOOSING, _BEST_OPERATORS),
    bill=Bill("day 6: and attention's outputs kept, for nothing", attention_kept),
)
