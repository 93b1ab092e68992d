"""Day 6's checks accept other right answers, refuse wrong ones, and agree with the meter."""

from dataclasses import replace
from functools import cache, partial
from itertools import combinations, product

import pytest
import torch
from edited import each, verdict_on
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import memlab
from memlab.checkpointing import (
    ATTENTION,
    MATMULS,
    Costs,
    checkpoint_blocks,
    optimal_schedule,
    predicted_peak_bytes,
    recomputed,
    tradeoffs,
    uniform_schedule,
)
from memlab.checkpointing.execution import run
from memlab.checkpointing.operations import Operations
from memlab.course import days
from memlab.course.bill import SETTING
from memlab.course.checks import day06
from memlab.course.checks.day06 import keep_of_each_block, random_chain, schedule_costs
from memlab.course.exercises import OK, WRONG, judge
from memlab.course.solutions import given
from memlab.model import GPT, PRESETS
from memlab.planner.block_costs import chain_costs
from memlab.train import combined, dry_trace
from memlab.units import format_bytes

WHAT_IT_TAKES, BEST_SCHEDULE, CHOOSING, BEST_OPERATORS = days.day(6).exercises
pareto_front = given(6, "pareto_front")


# ------------------------------------------------------------------ other right answers


def from_the_back(schedule, stages):
    """Sums up the held bytes anew for each part."""

    def kept(part):
        if isinstance(part, int):
            return stages[part].saved_bytes
        return stages[part[-1]].output_bytes

    def in_full(part):
        inside = (part,) if isinstance(part, int) else part
        return sum(stages[i].saved_bytes for i in inside)

    most = max(
        sum(map(kept, schedule[:place])) + in_full(part) for place, part in enumerate(schedule)
    )
    segments = [part for part in schedule if isinstance(part, tuple)]
    again = sum(sum(stages[i].forward for i in s) - stages[s[-1]].tail for s in segments)
    return sum(map(kept, schedule)), most, again


def bottom_up(chain, budget_bytes):
    """No recursion: a table of all rows of stages, shortest rows first, longest k first."""
    stages = len(chain.stages)
    table = {(i, i): [(chain.if_last(i), 0, (i,))] for i in range(stages + 1)}
    for length in range(1, stages + 1):
        for i in range(stages + 1 - length):
            j = i + length
            found = {
                (chain.if_plain(i, j, peak), again): (i, *rest)
                for peak, again, rest in table[i + 1, j]
            }
            for k in range(j, i, -1):
                for own, own_again, inside in table[i, k - 1]:
                    for peak, again, rest in table[k, j]:
                        takes = chain.if_segment(i, k, j, own, peak)
                        found[takes, own_again + again + chain.rerun(i, k)] = (inside, *rest)
            table[i, j] = pareto_front((*takes, how) for takes, how in found.items())
    fitting = [c for c in table[0, stages] if chain.in_all(c[0]) <= budget_bytes]
    return min(fitting, key=lambda c: c[1])[2][:-1] if fitting else None


class ByCall(TorchDispatchMode):
    """A dict keyed by the number of the call, as in torch's own version."""

    def __init__(self, chosen):
        super().__init__()
        self.chosen, self.outputs, self.is_second = chosen, {}, False
        self.calls = 0

    def __enter__(self):
        self.calls = 0
        return super().__enter__()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func not in self.chosen:
            return func(*args, **(kwargs or {}))
        self.calls += 1
        if self.is_second:
            return self.outputs.pop(self.calls)
        made = func(*args, **(kwargs or {}))
        several = isinstance(made, tuple)
        self.outputs[self.calls] = (
            tuple(tensor.detach() for tensor in made) if several else made.detach()
        )
        return made


def by_bytes_left(operators, budget_bytes):
    """The textbook's table: the best so far for each number of bytes."""
    best = [(0, ())] * (budget_bytes + 1)
    for o in operators:
        for left in range(budget_bytes, o.bytes - 1, -1):
            spared, numbers = best[left - o.bytes]
            best[left] = max(best[left], (spared + o.operations, (*numbers, o.number)))
    return list(best[-1][1])


def with_or_without(operators, budget_bytes):
    """Top down, from the first operator."""

    @cache
    def best(n, left):
        if n == len(operators):
            return 0, frozenset()
        o = operators[n]
        without = best(n + 1, left)
        if o.bytes > left:
            return without
        spared, numbers = best(n + 1, left - o.bytes)
        return max(without, (spared + o.operations, numbers | {o.number}), key=lambda c: c[0])

    return best(0, budget_bytes)[1]


@pytest.mark.parametrize(
    ("exercise", "answer"),
    [
        (WHAT_IT_TAKES, from_the_back),
        (BEST_SCHEDULE, bottom_up),
        (CHOOSING, ByCall),
        (BEST_OPERATORS, by_bytes_left),
        (BEST_OPERATORS, with_or_without),
    ],
    ids=lambda value: getattr(value, "__name__", getattr(value, "id", None)),
)
def test_another_right_answer_passes(exercise, answer):
    verdict = judge(exercise, answer)
    assert verdict.status == OK, verdict


# ------------------------------------------------------------------ other wrong answers


def with_the_librarys_search(chain, budget_bytes):
    return optimal_schedule(chain, budget_bytes)


def of_all_sets(operators, budget_bytes):
    sets = (s for size in range(len(operators) + 1) for s in combinations(operators, size))
    fitting = (s for s in sets if sum(o.bytes for o in s) <= budget_bytes)
    return [o.number for o in max(fitting, key=lambda s: sum(o.operations for o in s))]


@pytest.mark.parametrize(
    ("exercise", "answer", "said"),
    [
        (BEST_SCHEDULE, with_the_librarys_search, "The check's chain has only stages, if_last"),
        (BEST_OPERATORS, of_all_sets, "drop the dominated ones"),
    ],
)
def test_an_answer_written_differently_gets_the_same_remark(exercise, answer, said):
    verdict = judge(exercise, answer)
    assert verdict.status == WRONG
    assert said in verdict.text


@pytest.mark.parametrize("answer", [lambda chain, budget: None, lambda chain, budget: (0, 1, 2, 3)])
def test_a_missing_return_is_suggested_only_if_every_budget_gave_none(answer):
    suggested = "Is there a return?" in judge(BEST_SCHEDULE, answer).text
    assert suggested == (answer(None, 0) is None)


def test_dropping_dominated_choices_needs_fewer_than_5000_additions(monkeypatch):
    """The check's message says so."""
    monkeypatch.setattr(day06, "MOST_ADDITIONS", 4_999)
    assert judge(BEST_OPERATORS, BEST_OPERATORS.reference).status == OK


# ------------------------------------------------------------------ the solution, edited

LAST_OUTPUT = "stages[segment[-1]].output_bytes"
FITTING = "chain.in_all(c[0]) <= budget_bytes"
SECOND_RUN = "if self.is_second and func in self.chosen:\n            return self.kept.pop(0)"
DETACHED = "torch.utils._pytree.tree_map_only(torch.Tensor, torch.Tensor.detach, made)"
KEPT = "if func in self.chosen:\n            detached"
OF_THE_NAME = KEPT.replace("func in", "func.overloadpacket in").replace(
    "self.chosen", "{each.overloadpacket for each in self.chosen}"
)
ALL_SETS = "    choices = [(0, sum("

REFUSED = [
    ("6.1", "the first output", (LAST_OUTPUT, "stages[segment[0]].output_bytes")),
    (
        "6.1",
        "the largest output",
        (LAST_OUTPUT, "max(stages[i].output_bytes for i in segment)"),
    ),
    ("6.1", "the output counted twice", ("held += in_full", "held += 2 * in_full")),
    ("6.1", "a segment of one stage is plain", ("if isinstance(part, int):", "if segment[1:]:")),
    ("6.2", "the budget is ignored", (FITTING, "True")),
    ("6.2", "without weights and embedding", (FITTING, "c[0] <= budget_bytes")),
    ("6.2", "below the budget", (FITTING, FITTING.replace("<=", "<"))),
    ("6.2", "the least memory", ("fitting[-1][2]", "fitting[0][2]")),
    ("6.2", "no None", ("if fitting else None", "if fitting else (*range(len(chain.stages)),)")),
    (
        "6.2",
        "pairs by place",
        (
            "((own, rest) for own in choices(i, k - 1) for rest in choices(k, j))",
            "zip(choices(i, k - 1), choices(k, j))",
        ),
    ),
    (
        "6.3",
        "tuples as they are",
        (DETACHED, "made.detach() if isinstance(made, torch.Tensor) else made"),
    ),
    (
        "6.3",
        "the first of a tuple detached",
        (DETACHED, "(made[0].detach(), *made[1:]) if isinstance(made, tuple) else made.detach()"),
    ),
    (
        "6.3",
        "run and then replaced",
        (SECOND_RUN, "if self.is_second:\n            func(*args, **(kwargs or {}))"),
    ),
    ("6.3", "operators of one name", (KEPT, OF_THE_NAME)),
    (
        "6.4",
        "operators without bytes are skipped",
        ("    for o in operators:\n", "    for o in [o for o in operators if o.bytes]:\n"),
    ),
    (
        "6.4",
        "empty if there is no budget",
        ("    for o in operators:\n", "    for o in operators if budget_bytes else []:\n"),
    ),
    (
        "6.4",
        "a hundred choices",
        ("pareto_front(choices + with_it)", "pareto_front(choices + with_it)[-100:]"),
    ),
    (
        "6.4",
        "a few hundred choices",
        ("pareto_front(choices + with_it)", "pareto_front(choices + with_it)[:500]"),
    ),
    ("6.4", "each number twice", ("return choices[-1][2]", "return 2 * sorted(choices[-1][2])")),
    (
        "6.4",
        "by the library",
        (ALL_SETS, f"    return checkpointing.best_within(operators, budget_bytes)\n{ALL_SETS}"),
    ),
]
ACCEPTED = [
    ("6.3", "detached here, too", ("        return made", f"        return {DETACHED}")),
    ("6.4", "a list", ("return choices[-1][2]", "return sorted(choices[-1][2])")),
]


@each(REFUSED)
def test_what_is_wrong_is_refused(edit, tmp_path):
    assert verdict_on(edit, tmp_path).status == WRONG


@each(ACCEPTED)
def test_what_is_right_is_accepted(edit, tmp_path):
    verdict = verdict_on(edit, tmp_path)
    assert verdict.status == OK, verdict


@pytest.mark.parametrize(
    ("id_", "changes", "said"),
    [
        ("6.1", (("held += in_full", "pass"),), "tail 10, has a wrong held:"),
        ("6.1", ((LAST_OUTPUT, "0"),), "has a wrong held and a wrong most:"),
        (
            "6.3",
            (
                ("chosen, [], False", "chosen, ALL, False"),
                ("class Choosing", "ALL = []\n\n\nclass Choosing"),
            ),
            "two Choosing objects share one self.kept",
        ),
    ],
    ids=["held", "held and most", "one list"],
)
def test_a_verdict_names_what_is_wrong(id_, changes, said, tmp_path):
    verdict = verdict_on((id_, changes), tmp_path)
    assert verdict.status == WRONG
    assert said in verdict.text


RERUN = "chain.rerun(i, k) + own[1]"
FITS = "Your search misses choices, computes too high a peak, or counts the rerun operations wrong."
TOO_LOW = "You computed too low a peak."


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        (("again, (i, *rest)", "again + chain.rerun(i, i + 1), (i, *rest)"), FITS),
        (("rest[0])", "0)"), TOO_LOW),
        ((RERUN, "chain.rerun(i, k - 1) + own[1]"), "called chain.rerun for an empty segment"),
    ],
    ids=["plain reruns", "the rest is nothing", "one stage less"],
)
def test_an_answer_that_allows_plain_stages_is_not_told_to_allow_them(changes, said, tmp_path):
    verdict = verdict_on(("6.2", (changes,)), tmp_path, named=True)
    assert verdict.status == WRONG
    assert said in verdict.text
    assert "A stage may be plain" not in verdict.text


# ------------------------------------------------------------------ against the meter

ROWS, WIDTH, HIDDEN = 8, 16, (24, 8, 40, 32)


def blocks():
    return nn.ModuleList(
        nn.Sequential(nn.Linear(WIDTH, h, bias=False), nn.GELU(), nn.Linear(h, WIDTH, bias=False))
        for h in HIDDEN
    )


@pytest.mark.parametrize(
    "schedule", [(0, 1, 2, 3), ((0,), (1,), (2,), (3,)), ((0, 1), 2, (3,)), (0, (1, 2, 3))]
)
def test_the_bytes_and_operations_of_a_schedule_are_the_meters(schedule):
    """For a block W2 gelu(W1 x), backward needs x, W1 x and gelu's result: W2 is the tail."""
    stages = [
        Costs(
            forward=2 * 2 * ROWS * WIDTH * h,
            backward=0,
            output_bytes=4 * ROWS * WIDTH,
            saved_bytes=4 * ROWS * (2 * h + WIDTH),
            tail=2 * ROWS * WIDTH * h,
        )
        for h in HIDDEN
    ]
    chain, x, outputs = blocks(), torch.randn(ROWS, WIDTH, requires_grad=True), []

    def forward(schedule):
        y = x
        for part in schedule:
            y = run(part, chain, y)
        return y

    trace = memlab.measure(lambda: outputs.append(forward(schedule)), model=chain)
    with Operations() as counted:
        forward(schedule).sum().backward()
    with Operations() as plain:
        forward((0, 1, 2, 3)).sum().backward()
    held, _, again = schedule_costs(schedule, stages)
    assert held == sum(e.bytes for e in trace.events if e.phase != "before")
    assert again == counted.total - plain.total


@cache
def every_schedule(start, end):
    """All schedules of stages start … end - 1, except segments that hold just one segment."""
    if start == end:
        return ((),)
    several_parts = of_several_parts(start, end)
    return (*several_parts, *((inside,) for inside in several_parts))


@cache
def of_several_parts(start, end):
    """The schedules of several parts."""
    found = [(start, *rest) for rest in every_schedule(start + 1, end)]
    for border in range(start + 1, end):
        pairs = product(of_several_parts(start, border), every_schedule(border, end))
        found += [(own, *rest) for own, rest in pairs]
    return tuple(found)


@pytest.mark.parametrize(("stages", "seed"), sorted({budget[:2] for budget in day06._BUDGETS}))
def test_the_checks_best_schedules_are_the_best_by_brute_force(stages, seed):
    chain = random_chain(stages, seed)
    tried = pareto_front(
        (predicted_peak_bytes(s, chain), recomputed(s, chain), s) for s in every_schedule(0, stages)
    )
    assert [(peak, again) for peak, again, _ in tried] == [
        (choice.peak_bytes, choice.recomputed) for choice in tradeoffs(chain)
    ]


def test_every_schedule_is_listed_once():
    of_four = every_schedule(0, 4)
    assert len(of_four) == len(set(of_four))
    assert {(0, 1, 2, 3), ((0, 1), (2, 3)), ((((0,), 1), 2), 3)} <= set(of_four)


# ------------------------------------------------------------------ the lesson's claims


def test_one_block_is_enough_to_measure_a_chain_of_equal_blocks():
    """The lesson measures one block of twelve, and multiplies."""
    config = PRESETS["tiny"]
    with memlab.dry_run():
        tokens = torch.zeros(2, 64, dtype=torch.long)
        whole = chain_costs(GPT(config), tokens, tokens)
        one = chain_costs(GPT(replace(config, layers=1)), tokens, tokens)
    [stage] = one.stages
    held_bytes = one.held_bytes + (config.layers - 1) * stage.gradient_bytes
    assert replace(one, stages=config.layers * (stage,), held_bytes=held_bytes) == whole


@pytest.mark.slow
def test_attention_fits_below_the_bills_peak_and_all_matmuls_do_not():
    """On two of its eight sequences: the last gradients make the peak at every batch size."""
    setting, technique = replace(SETTING, batch=2), combined("accumulation+bfloat16")

    def trace_of(change):
        def both(model):
            technique.change_model(model)
            change(model)

        return dry_trace(setting, replace(technique, change_model=both))

    every = trace_of(partial(checkpoint_blocks, schedule=uniform_schedule(12, every=1)))
    attention = trace_of(partial(keep_of_each_block, keep=ATTENTION))
    products = trace_of(partial(keep_of_each_block, keep=MATMULS | ATTENTION))
    assert attention.at_peak == every.at_peak
    assert [format_bytes(t.peak_bytes) for t in (attention, products)] == ["1.37 GiB", "1.46 GiB"]
    assert every.at_peak["activations"] < 100  # the loss
