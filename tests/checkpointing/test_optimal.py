"""The optimal schedule against brute force, a closed form, and torch's own partition."""

import random
from dataclasses import fields, replace
from functools import cache
from itertools import product
from math import comb

import numpy as np
import pytest
import torch
from quick import slow
from torch.utils.checkpoint import checkpoint_sequential

from memlab.checkpointing import optimal
from memlab.checkpointing.costs import NOTHING, Chain, Costs, predicted_peak_bytes, recomputed
from memlab.checkpointing.optimal import optimal_schedule, tradeoffs
from memlab.checkpointing.schedules import Schedule, plain_schedule, sqrt_schedule

# ------------------------------------------------------------------ oracles


@cache
def all_schedules(start: int, end: int) -> tuple[Schedule, ...]:
    """Return every schedule of stages start to end, except segments that hold only one segment."""
    segments = [(inside,) for inside in several_parts(start, end)]
    return (*several_parts(start, end), *segments)


@cache
def several_parts(start: int, end: int) -> tuple[Schedule, ...]:
    """Return the schedules with more than one part."""
    found = [(start, *rest) for rest in rests(start + 1, end)]
    for border in range(start + 1, end):
        pairs = product(several_parts(start, border), rests(border, end))
        found += [(segment, *rest) for segment, rest in pairs]
    return tuple(found)


def rests(start: int, end: int) -> tuple[Schedule, ...]:
    return all_schedules(start, end) if start < end else ((),)


class Machine:
    """Runs a schedule step by step and counts bytes and operations.

    Its costs are integers, or arrays that represent many chains at once.
    """

    def __init__(self, chain: Chain) -> None:
        self.chain, self.row = chain, (*chain.stages, chain.last)
        self.alive = self.peak = chain.held_bytes
        self.forwards = 0

    def run(self, schedule: Schedule) -> "Machine":
        first = self.chain.first
        self.moment(first.saved_bytes + first.forward_temporaries)
        self.alive = self.alive + first.saved_bytes
        self.run_both_ways((*schedule, len(self.chain.stages)), is_rerun=False)
        self.moment(first.backward_temporaries)
        return self

    def moment(self, above: int) -> None:
        self.peak = np.maximum(self.peak, self.alive + above)

    def run_both_ways(self, items: Schedule, is_rerun: bool) -> None:
        """Run forward, then backward. The gradient of the last output replaces that output; the
        gradient of the input replaces the input."""
        *before, last = items
        for item in before:
            if isinstance(item, int):
                self.keep(item)
            else:
                self.drop(item)
                self.alive = self.alive + self.chain.call_bytes
                self.alive = self.alive + self.row[ends(item)].output_bytes
        self.turn(last, is_rerun)
        for item in reversed(before):
            if isinstance(item, int):
                self.moment(self.row[item].backward_temporaries)
                self.alive = self.alive - self.row[item].saved_bytes
                self.alive = self.alive + self.row[item].gradient_bytes
            else:
                self.run_both_ways(item, is_rerun=True)
                self.alive = self.alive - self.chain.call_bytes

    def turn(self, last: int | Schedule, is_rerun: bool) -> None:
        if isinstance(last, tuple):
            self.alive = self.alive + self.chain.call_bytes
            self.run_both_ways(last, is_rerun=True)
            self.alive = self.alive - self.chain.call_bytes
            return
        stage = self.row[last]
        self.forwards = self.forwards + stage.forward - (stage.tail if is_rerun else 0)
        self.alive = self.alive - stage.output_bytes  # its gradient is part of the temporaries
        self.moment(stage.saved_bytes + stage.rerun_temporaries)
        self.alive = self.alive + stage.gradient_bytes

    def keep(self, i: int) -> None:
        stage = self.row[i]
        self.forwards = self.forwards + stage.forward
        self.moment(stage.saved_bytes + stage.forward_temporaries)
        self.alive = self.alive + stage.saved_bytes

    def drop(self, segment: Schedule) -> None:
        """Run without saving. While a stage runs, the previous output is its input."""
        above = self.chain.call_bytes
        for item in flattened(segment):
            stage = self.row[item]
            self.forwards = self.forwards + stage.forward
            self.moment(above + stage.output_bytes + stage.dropping_temporaries)
            above = self.chain.call_bytes + stage.output_bytes


def flattened(part: int | Schedule) -> list[int]:
    return [part] if isinstance(part, int) else [i for item in part for i in flattened(item)]


def ends(part: Schedule) -> int:
    return flattened(part)[-1]


NAMES = [field.name for field in fields(Costs)]


def random_costs(rng: random.Random) -> Costs:
    output = rng.randint(1, 40)
    forward = rng.randint(1, 30)
    return Costs(
        forward=forward,
        backward=rng.randint(1, 60),
        output_bytes=output,
        saved_bytes=output + rng.randint(0, 100),
        forward_temporaries=rng.randint(0, 30),
        dropping_temporaries=rng.randint(0, 30),
        backward_temporaries=rng.randint(0, 60),
        rerun_temporaries=rng.randint(0, 60),
        gradient_bytes=rng.choice([0, rng.randint(0, 60)]),
        tail=rng.choice([0, rng.randint(0, forward)]),
    )


def random_chain(rng: random.Random, stages: int) -> Chain:
    return Chain(
        tuple(random_costs(rng) for _ in range(stages)),
        first=random_costs(rng),
        last=replace(random_costs(rng), output_bytes=0),
        held_bytes=rng.randint(0, 50),
        call_bytes=rng.choice([0, rng.randint(1, 20)]),
    )


def stack_chains(chains: list[Chain]) -> Chain:
    """Return one chain of arrays; element n of each array belongs to chain n."""

    class Many:
        pass

    def stack_costs(costs: list[Costs]) -> Costs:
        made = Many()
        for name in NAMES:
            setattr(made, name, np.array([getattr(c, name) for c in costs]))
        return made

    made = Many()
    made.stages = [stack_costs([c.stages[i] for c in chains]) for i in range(len(chains[0].stages))]
    made.first, made.last = (
        stack_costs([c.first for c in chains]),
        stack_costs([c.last for c in chains]),
    )
    made.held_bytes = np.array([c.held_bytes for c in chains])
    made.call_bytes = np.array([c.call_bytes for c in chains])
    return made


def pareto_front(peaks: np.ndarray, again: np.ndarray) -> list[tuple[int, int]]:
    """Return the Pareto front of (peak, operations) pairs, by growing peak."""
    order = np.lexsort((again, peaks))
    peaks, again = peaks[order], again[order]
    least_before = np.minimum.accumulate(again)[:-1]
    is_best = np.r_[True, again[1:] < least_before]
    return list(zip(peaks[is_best].tolist(), again[is_best].tolist(), strict=True))


# ------------------------------------------------------------------ the cost model


@pytest.mark.parametrize("stages", [1, 2, 3, 4, 5])
def test_predictions_equal_a_step_by_step_simulation(stages):
    rng = random.Random(stages)
    schedules = all_schedules(0, stages)
    for schedule in rng.sample(schedules, min(len(schedules), 150)):
        chain = random_chain(rng, stages)
        machine = Machine(chain).run(schedule)
        assert predicted_peak_bytes(schedule, chain) == machine.peak
        once = sum(stage.forward for stage in (*chain.stages, chain.last))
        assert recomputed(schedule, chain) == machine.forwards - once


# ------------------------------------------------------------------ optimality


@pytest.mark.few(1)
@pytest.mark.parametrize("stages", [1, 2, 3, 4, 5, slow(6)])
def test_the_tradeoffs_equal_brute_force_over_all_schedules(stages):
    """1000 random chains, each with every budget at once."""
    rng = random.Random(stages)
    chains = [random_chain(rng, stages) for _ in range(167)]
    stacked = stack_chains(chains)
    once = sum(stage.forward for stage in (*stacked.stages, stacked.last))
    machines = [Machine(stacked).run(schedule) for schedule in all_schedules(0, stages)]
    all_peaks = np.stack([machine.peak for machine in machines])  # (schedules, chains)
    all_again = np.stack([machine.forwards - once for machine in machines])
    for n, chain in enumerate(chains):
        expected = pareto_front(all_peaks[:, n], all_again[:, n])
        found = tradeoffs(chain)
        assert [tradeoff[:2] for tradeoff in found] == expected
        for peak, again in expected:
            schedule = optimal_schedule(chain, peak)
            assert recomputed(schedule, chain) == again
            assert predicted_peak_bytes(schedule, chain) <= peak


def griewank_walther(stages: int, checkpoints: int) -> int:
    """Return t(l, c): the fewest extra forwards of l equal stages with c checkpoints, including
    the input."""
    r = 0
    while comb(checkpoints + r, checkpoints) < stages:
        r += 1
    return r * stages - comb(checkpoints + r, r - 1) if r else 0


def equal_stages(stages: int) -> tuple[Chain, int]:
    """Return a chain whose checkpoints take one byte each, and the bytes of one stage's backward.

    Each byte beyond these allows one more checkpoint. The chain's input is a free checkpoint, but
    the input of the current stage takes a byte.
    """
    saved = 1000
    stage = Costs(1, 1, output_bytes=1, saved_bytes=saved)
    return Chain((stage,) * (stages - 1), last=stage), saved


def test_the_closed_form_agrees_with_the_literature():
    assert [griewank_walther(*lc) for lc in ((10, 3), (16, 4), (32, 4), (48, 5), (64, 6))] == [
        *(15, 27, 75, 116, 156)
    ]


def test_equal_stages_recompute_as_often_as_griewank_and_walther_predict():
    for stages in range(2, 61):
        chain, saved = equal_stages(stages)
        best = tradeoffs(chain, saved + 7)
        for checkpoints in range(1, 8):
            within = [t.recomputed for t in best if t.peak_bytes <= saved + checkpoints]
            assert within[-1] == griewank_walther(stages, checkpoints), (stages, checkpoints)


def checkpoint_sequential_schedule(stages: int, segments: int) -> Schedule:
    """Return torch's partition: equal segments and a plain remainder."""
    size = stages // segments
    border = size * (segments - 1)
    checkpointed = tuple(tuple(range(i, i + size)) for i in range(0, border, size))
    return (*checkpointed, *range(border, stages))


@pytest.mark.parametrize(("stages", "segments"), [(12, 5), (12, 4), (7, 2), (5, 5), (3, 1)])
def test_the_model_of_torchs_partition_agrees_with_torch(stages, segments):
    runs = [0] * stages

    def stage(i):
        def run(x):
            runs[i] += 1
            return x.sin()

        return run

    x = torch.ones(3, requires_grad=True)
    y = checkpoint_sequential([stage(i) for i in range(stages)], segments, x, use_reentrant=False)
    y.sum().backward()
    rule = checkpoint_sequential_schedule(stages, segments)
    assert runs == [
        2 if any(i in p for p in rule if isinstance(p, tuple)) else 1 for i in range(stages)
    ]


def test_it_never_recomputes_more_than_torchs_partition_and_usually_less():
    rng = random.Random(0)
    faster = 0
    for _ in range(200):
        stages = rng.randint(4, 14)
        chain = random_chain(rng, stages)
        torchs = checkpoint_sequential_schedule(stages, rng.randint(2, stages // 2))
        ours = optimal_schedule(chain, predicted_peak_bytes(torchs, chain))
        assert predicted_peak_bytes(ours, chain) <= predicted_peak_bytes(torchs, chain)
        assert recomputed(ours, chain) <= recomputed(torchs, chain)
        faster += recomputed(ours, chain) < recomputed(torchs, chain)
    assert faster > 150


# ------------------------------------------------------------------ budgets


def test_a_large_budget_recomputes_nothing():
    chain = random_chain(random.Random(0), 9)
    plain = plain_schedule(9)
    assert optimal_schedule(chain, predicted_peak_bytes(plain, chain)) == plain
    assert tradeoffs(chain)[-1] == (predicted_peak_bytes(plain, chain), 0, plain)


@pytest.mark.parametrize("seed", range(5))
def test_a_budget_that_is_too_small_is_an_error_that_names_the_smallest(seed):
    chain = random_chain(random.Random(seed), 7)
    least = tradeoffs(chain)[0].peak_bytes
    optimal_schedule(chain, least)
    with pytest.raises(ValueError, match=f"the smallest that will do is {least} bytes"):
        optimal_schedule(chain, least - 1)


def test_rounding_to_slots_keeps_long_chains_within_the_budget(monkeypatch):
    monkeypatch.setattr(optimal, "EXACT_STAGES", 4)
    monkeypatch.setattr(optimal, "SLOTS", 50)
    for seed in range(20):
        chain = random_chain(random.Random(seed), 12)
        exact = tradeoffs(chain)
        least, most = exact[0].peak_bytes, exact[-1].peak_bytes
        for budget in (least, (least + most) // 2, most):
            schedule = optimal_schedule(chain, budget)
            assert predicted_peak_bytes(schedule, chain) <= budget
            within = [t.recomputed for t in exact if t.peak_bytes <= budget]
            assert recomputed(schedule, chain) >= within[-1]


def test_sixty_four_equal_blocks_are_solved_exactly():
    """As in a transformer: the square root schedule keeps more and recomputes as much."""
    block = Costs(100, 200, output_bytes=10, saved_bytes=170, gradient_bytes=5, tail=20)
    chain = Chain((block,) * 64, last=Costs(30, 60, 0, 200))
    simple = sqrt_schedule(64)
    ours = optimal_schedule(chain, predicted_peak_bytes(simple, chain))
    assert recomputed(ours, chain) < recomputed(simple, chain)


# ------------------------------------------------------------------ errors


def test_an_empty_chain_is_an_error():
    with pytest.raises(ValueError, match="got a chain of no stages"):
        Chain(())


def test_a_stage_that_keeps_less_than_its_output_is_an_error():
    with pytest.raises(ValueError, match="got saved_bytes=3, less than output_bytes=4"):
        Costs(1, 1, output_bytes=4, saved_bytes=3)


def test_negative_costs_are_an_error():
    with pytest.raises(ValueError, match="got tail=-1; give 0 or more"):
        replace(NOTHING, tail=-1)
