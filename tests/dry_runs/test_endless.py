"""`while` loops whose end depends on unknown values."""

import pytest
import torch

import memlab
from memlab.dry_runs.endless import MAX_ITERATIONS


def until_the_error_is_small(x: torch.Tensor) -> torch.Tensor:
    done = False
    while not done:
        x = x / 2
        done = bool(x.abs().max() < 1e-3)
    return x


def steps_to(end: float, x: torch.Tensor) -> torch.Tensor:
    """Attempt steps in a separate function, as ODE solvers do."""
    t = torch.zeros(())
    while t < end:
        t, x = attempt(t, x)
    return x


def attempt(t: torch.Tensor, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    new = x * 0.9
    return (t + 0.1, new) if (new - x).norm() < 1.0 else (t, x)


@pytest.mark.parametrize("run", [until_the_error_is_small, lambda x: steps_to(1.0, x)])
def test_a_loop_that_would_never_end_raises(run):
    with memlab.dry_run():
        x = torch.randn(8)
        with pytest.raises(
            ValueError, match=r"test_endless.py:\d+ \w+: a loop here depends on a value"
        ):
            run(x)


def test_a_for_loop_and_a_counting_while_loop_are_allowed():
    with memlab.dry_run():
        x = torch.randn(8)
        assert sum(bool((x > round).any()) for round in range(2 * MAX_ITERATIONS)) == 0
        for _ in range(2 * MAX_ITERATIONS):
            if x.isnan().any():
                break
        t = torch.zeros(())
        while t < 2 * MAX_ITERATIONS:
            t += 1
        assert t == 2 * MAX_ITERATIONS


def test_a_training_loop_far_above_the_read_is_allowed():
    def check(x: torch.Tensor) -> bool:
        return bool(x.isnan().any())

    def forward(x: torch.Tensor) -> bool:
        return check(x)

    def step(x: torch.Tensor) -> bool:
        return forward(x)

    with memlab.dry_run():
        x, count = torch.randn(8), 0
        while count < 2 * MAX_ITERATIONS:
            count += 1
            step(x)


def test_loops_that_end_after_one_iteration_are_allowed():
    def clipped(x: torch.Tensor) -> torch.Tensor:
        while True:
            mask = x > 2
            if not mask.any():
                break
            x = torch.where(mask, torch.randn(8), x)
        return x

    def clipped_often(x: torch.Tensor) -> None:
        for _ in range(2 * MAX_ITERATIONS):
            while (x > 2).any():
                x = torch.randn(8)

    with memlab.dry_run():
        for _ in range(2 * MAX_ITERATIONS):
            clipped(torch.randn(8))
            torch.nn.init.trunc_normal_(torch.empty(3))
        clipped_often(torch.randn(8))


def test_a_read_in_a_for_loop_inside_a_while_loop_is_counted():
    def run(x: torch.Tensor) -> None:
        done = False
        while not done:
            for row in x:
                done = bool((row > 9).any())

    with memlab.dry_run(), pytest.raises(ValueError, match="a loop here depends on a value"):
        run(torch.randn(3, 2))
