"""Day 6: what its checks tell a learner, and what the lesson claims."""

from dataclasses import replace
from functools import cache, partial
from itertools import product

import pytest
import torch
from edited import verdict_on
from torch import nn

import memlab
from memlab.checkpointing import (
    ATTENTION,
    MATMULS,
    Costs,
    checkpoint_blocks,
    predicted_peak_bytes,
    recomputed,
    tradeoffs,
    uniform_schedule,
)
from memlab.checkpointing.execution import run
from memlab.checkpointing.operations import Operations
from memlab.course import days
from memlab.course.bill import SETTING
from memlab.course.bill_steps import keep_of_each_block
from memlab.course.checks import day06
from memlab.course.checks.day06 import random_chain, schedule_costs
from memlab.course.exercises import OK, WRONG, judge
from memlab.course.solutions import given
from memlab.model import GPT, PRESETS
from memlab.planner.block_costs import chain_costs
from memlab.train import combined, dry_trace
from memlab.units import format_bytes

WHAT_IT_TAKES, BEST_SCHEDULE, CHOOSING, BEST_OPERATORS = days.day(6).exercises
pareto_front = given(6, "pareto_front")


# ------------------------------------------------------------------ answers


@pytest.mark.few(1)
@pytest.mark.parametrize("answer", [lambda chain, budget: None, lambda chain, budget: (0, 1, 2, 3)])
def test_a_missing_return_is_suggested_only_if_every_budget_gave_none(answer):
    suggested = "Is there a return?" in judge(BEST_SCHEDULE, answer).text
    assert suggested == (answer(None, 0) is None)


def test_dropping_dominated_choices_needs_fewer_than_5000_additions(monkeypatch):
    """The check's message says so."""
    monkeypatch.setattr(day06, "MOST_ADDITIONS", 4_999)
    assert judge(BEST_OPERATORS, BEST_OPERATORS.reference).status == OK


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
def test_an_answer_that_allows_plain_stages_is_not_told_to_allow_them(changes, said):
    verdict = verdict_on("6.2", changes)
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
