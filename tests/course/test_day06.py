"""Day 6's checks let right answers of another make pass, and what they want is the meter's."""

from dataclasses import replace
from functools import cache, partial
from itertools import combinations

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import memlab
from memlab.chain import chain_costs
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
from memlab.course.checks.day06 import (
    every_schedule,
    keep_of_each_block,
    random_chain,
    unbeaten,
    what_it_takes,
)
from memlab.course.exercises import OK, judge
from memlab.model import GPT, PRESETS
from memlab.train import combined, dry_trace

WHAT_IT_TAKES, BEST_SCHEDULE, CHOOSING, BEST_OPERATORS = days.day(6).exercises


# ------------------------------------------------------------------ right in another way


def from_the_back(schedule, stages):
    """What is held is summed up once for each part."""

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


def by_trying_all(chain, budget_bytes):
    """As long as the chain is short; the library for the others."""
    stages = len(chain.stages)
    if stages > 4:
        try:
            return optimal_schedule(chain, budget_bytes)
        except ValueError:
            return None
    fitting = [
        schedule
        for schedule in every_schedule(0, stages)
        if predicted_peak_bytes(schedule, chain) <= budget_bytes
    ]
    return min(fitting, key=lambda s: recomputed(s, chain), default=None)


def by_what_is_left(chain, budget_bytes):
    """Top down: each row of stages is given the bytes that are left for it."""

    @cache
    def best(i, j, left):
        """(operations run again, schedule) of i … j with a peak of at most `left`, or None."""
        if i == j:
            return (0, (j,)) if chain.if_last(j) <= left else None
        found = []
        rest = best(i + 1, j, left - chain.row[i].saved_bytes)
        if rest and chain.if_plain(i, j, 0) <= left:
            found.append((rest[0], (i, *rest[1])))
        for k in range(i + 1, j + 1):
            running, behind, above = chain.segment_terms(i, k, j)
            own, rest = best(i, k - 1, left - behind), best(k, j, left - above)
            if running <= left and own and rest:
                found.append((chain.rerun(i, k) + own[0] + rest[0], (own[1], *rest[1])))
        return min(found, key=lambda pair: pair[0], default=None)

    if chain.in_all(0) > budget_bytes:
        return None
    left = budget_bytes - chain.held_bytes - chain.first.saved_bytes
    found = best(0, len(chain.stages), left)
    return found[1][:-1] if found else None


class ByCall(TorchDispatchMode):
    """A dict by the number of the call, as torch's own has it."""

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


def all_sets(operators, budget_bytes):
    sets = [s for size in range(len(operators) + 1) for s in combinations(operators, size)]
    fitting = [s for s in sets if sum(o.bytes for o in s) <= budget_bytes]
    return [o.number for o in max(fitting, key=lambda s: sum(o.operations for o in s))]


@pytest.mark.parametrize(
    ("exercise", "answer"),
    [
        (WHAT_IT_TAKES, from_the_back),
        (BEST_SCHEDULE, by_trying_all),
        (BEST_SCHEDULE, by_what_is_left),
        (CHOOSING, ByCall),
        (BEST_OPERATORS, all_sets),
    ],
    ids=lambda value: getattr(value, "__name__", getattr(value, "id", None)),
)
def test_another_right_answer_passes(exercise, answer):
    verdict = judge(exercise, answer)
    assert verdict.status == OK, verdict


# ------------------------------------------------------------------ held against the meter

ROWS, WIDTH, HIDDEN = 8, 16, (24, 8, 40, 32)


def blocks():
    return nn.ModuleList(
        nn.Sequential(nn.Linear(WIDTH, h, bias=False), nn.GELU(), nn.Linear(h, WIDTH, bias=False))
        for h in HIDDEN
    )


@pytest.mark.parametrize(
    "schedule", [(0, 1, 2, 3), ((0,), (1,), (2,), (3,)), ((0, 1), 2, (3,)), (0, (1, 2, 3))]
)
def test_what_a_schedule_holds_and_runs_again_is_the_meters(schedule):
    """Of a block W2 gelu(W1 x), backward needs x, W1 x and gelu's result: W2 is the tail."""
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
    held, _, again = what_it_takes(schedule, stages)
    assert held == sum(e.bytes for e in trace.events if e.phase != "before")
    assert again == counted.total - plain.total


@pytest.mark.parametrize("seed", range(3))
def test_the_front_by_trying_all_is_the_librarys(seed):
    chain = random_chain(4, seed)
    tried = unbeaten(
        (predicted_peak_bytes(s, chain), recomputed(s, chain), s) for s in every_schedule(0, 4)
    )
    assert [(peak, again) for peak, again, _ in tried] == [
        (found.peak_bytes, found.recomputed) for found in tradeoffs(chain)
    ]


def test_every_schedule_is_there_once():
    of_four = every_schedule(0, 4)
    assert len(of_four) == len(set(of_four))
    assert {(0, 1, 2, 3), ((0, 1), (2, 3)), ((((0,), 1), 2), 3)} <= set(of_four)


# ------------------------------------------------------------------ what the lesson says


def test_of_a_chain_of_equal_blocks_one_is_enough():
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
def test_below_the_bills_peak_is_room_for_attention_and_not_for_all_products():
    """On two of its eight sequences: the peak is that of the last gradients, whatever the batch."""
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
    assert products.peak_bytes > every.peak_bytes
    assert every.at_peak["activations"] < 100  # the loss
