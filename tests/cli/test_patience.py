"""Which rows of the table of all techniques would take too long."""

import math

import pytest
import torch

from memlab.cli.patience import DRY_SECONDS, MOST_SECONDS, Patience, slowdown_of

NO_SLOWER = {torch.bfloat16: 1.0, torch.float16: 1.0}.get


class Clock:
    """Shows what it was set to."""

    now = 1000.0

    def __call__(self) -> float:
        return self.now


def reasons(names, seconds, **settings):
    """Why each of the rows is not taken, if each that is taken takes so long."""
    clock = Clock()
    patience = Patience(names, slowdown=NO_SLOWER, clock=clock, **settings)
    found = []
    for name in names:
        found.append(patience.too_long(name))
        clock.now += DRY_SECONDS if found[-1] else seconds
    return found, clock.now - Clock.now


def test_rows_are_taken_until_another_would_end_too_late():
    found, seconds = reasons("abcdefgh", 20.0)
    assert found == [None] * 4 + ["the rows above took 80 s"] * 4
    assert MOST_SECONDS - 20 - 8 * DRY_SECONDS <= seconds <= MOST_SECONDS


def test_rows_that_are_quick_are_all_taken():
    assert reasons("abcdefgh", 5.0)[0] == [None] * 8


def test_without_a_limit_every_row_is_taken():
    assert reasons("abcdefgh", 500.0, most_seconds=math.inf)[0] == [None] * 8


@pytest.mark.parametrize("name", ["autocast", "lora+autocast", "bfloat16", "master-weights"])
def test_products_without_a_fast_kernel_are_not_waited_for(name):
    patience = Patience(["plain", name, "loss-scaling"], slowdown={torch.bfloat16: 24.4}.get)
    assert patience.too_long("plain") is None
    assert patience.too_long(name) == "this CPU takes 24 × as long for products in bfloat16"


def test_a_dtype_is_probed_once_and_against_float32():
    assert slowdown_of(torch.float32) > 0
    before = slowdown_of.cache_info().misses
    slowdown_of(torch.float32)
    assert slowdown_of.cache_info().misses == before
