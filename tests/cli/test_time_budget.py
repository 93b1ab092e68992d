"""Rows of the table of all techniques that would take too long."""

import math

import pytest
import torch

from memlab.cli.time_budget import DRY_RUN_SECONDS, MAX_SECONDS, TimeBudget, slowdown_of

EQUAL_SPEED = {torch.bfloat16: 1.0, torch.float16: 1.0}.get


class Clock:
    """Returns the time that it was set to."""

    now = 1000.0

    def __call__(self) -> float:
        return self.now


def reasons(names, seconds, **settings):
    """Return each row's reason to skip and the total time, if a real row takes `seconds`."""
    clock = Clock()
    time_budget = TimeBudget(names, slowdown=EQUAL_SPEED, clock=clock, **settings)
    found = []
    for name in names:
        found.append(time_budget.reason_to_skip(name))
        clock.now += DRY_RUN_SECONDS if found[-1] else seconds
    return found, clock.now - Clock.now


def test_rows_run_until_another_would_exceed_the_limit():
    found, seconds = reasons("abcdefgh", 20.0)
    assert found == [None] * 4 + ["the rows above took 80 s"] * 4
    assert MAX_SECONDS - 20 - 8 * DRY_RUN_SECONDS <= seconds <= MAX_SECONDS


def test_fast_rows_all_run():
    assert reasons("abcdefgh", 5.0)[0] == [None] * 8


def test_without_a_limit_every_row_runs():
    assert reasons("abcdefgh", 500.0, max_seconds=math.inf)[0] == [None] * 8


@pytest.mark.parametrize("name", ["autocast", "lora+autocast", "bfloat16", "master-weights"])
def test_a_technique_whose_matmuls_are_slow_on_this_cpu_is_skipped(name):
    time_budget = TimeBudget(["plain", name, "loss-scaling"], slowdown={torch.bfloat16: 24.4}.get)
    assert time_budget.reason_to_skip("plain") is None
    reason = time_budget.reason_to_skip(name)
    assert reason == "matmuls in bfloat16 are 24 × slower on this CPU"


def test_a_dtype_is_timed_once_relative_to_float32():
    assert slowdown_of(torch.float32) > 0
    before = slowdown_of.cache_info().misses
    slowdown_of(torch.float32)
    assert slowdown_of.cache_info().misses == before
