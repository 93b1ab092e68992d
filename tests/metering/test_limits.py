"""`budget`: a memory limit for a block of code."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import memlab

KIB = 1024


def test_code_within_its_budget_runs_and_reports_its_peak():
    with memlab.budget("8 KiB") as spent:
        torch.zeros(KIB)
        torch.zeros(KIB)
    assert spent.peak_bytes == 4 * KIB  # the first is freed before the second is allocated


def test_tensors_from_before_do_not_count():
    x = torch.zeros(100 * KIB)
    with memlab.budget(4 * KIB):
        x.add_(1)
        x[:KIB].clone()


def test_the_limit_itself_is_allowed_and_one_byte_more_is_not():
    with memlab.budget(4 * KIB):
        torch.zeros(KIB)
    with pytest.raises(memlab.BudgetExceeded), memlab.budget(4 * KIB - 1):
        torch.zeros(KIB)


def test_it_raises_at_the_line_that_exceeds_it():
    reached = []

    def step() -> None:
        first = torch.zeros(KIB)
        reached.append("first")
        second = torch.zeros(KIB)
        reached.append(f"second {first} {second}")

    with pytest.raises(memlab.BudgetExceeded), memlab.budget("6 KiB"):
        step()
    assert reached == ["first"]


def test_the_message_names_the_request_the_total_and_the_largest_with_their_modules():
    class Mixer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up, self.down = nn.Linear(16, 256), nn.Linear(256, 16)

        def forward(self, x):
            return self.down(F.relu(self.up(x)))

    model, x = Mixer(), torch.randn(64, 16)
    with pytest.raises(memlab.BudgetExceeded) as caught, memlab.budget("100 KiB"):
        model(x)
    assert str(caught.value) == (
        "64.00 KiB float32 (64, 256) by aten.relu.default in Mixer brings the live total to "
        "128.00 KiB, past the budget of 100.00 KiB. Largest alive: "
        "64.00 KiB float32 (64, 256) by aten.addmm.default in up; "
        "64.00 KiB float32 (64, 256) by aten.relu.default in Mixer"
    )


def test_at_most_five_tensors_are_named():
    kept = []
    with pytest.raises(memlab.BudgetExceeded) as caught, memlab.budget("30 KiB"):
        kept.extend(torch.zeros(KIB) for _ in range(20))
    assert str(caught.value).split("Largest alive: ")[1].count("aten.zeros") == 5


def test_a_gradient_with_two_sources_does_not_count_twice():
    """Autograd allocates the second buffer only under the meter, so the budget ignores it."""
    x = torch.randn(KIB, requires_grad=True)
    with memlab.budget("1 MiB") as spent:
        (torch.exp(x).sum() + torch.exp(-x).sum()).backward()
    x.grad = None
    trace = memlab.measure(lambda: (torch.exp(x).sum() + torch.exp(-x).sum()).backward())
    assert spent.peak_bytes == trace.peak_bytes - 4 * KIB  # without x, which is from before


def test_it_is_a_memory_error():
    assert issubclass(memlab.BudgetExceeded, MemoryError)


def test_it_works_in_a_dry_run():
    with memlab.dry_run(), pytest.raises(memlab.BudgetExceeded), memlab.budget("1 TiB"):
        torch.zeros(2**40)


def test_a_budget_within_a_measurement_changes_nothing():
    def step() -> None:
        with memlab.budget("1 MiB"):
            torch.zeros(KIB).add(1)

    assert memlab.measure(step).peak_bytes == 8 * KIB


def test_a_budget_that_is_not_a_number_of_bytes_raises():
    with pytest.raises(ValueError, match="'6 MiB'"):
        memlab.budget("lots")
