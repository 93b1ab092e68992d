"""Tests of benchmarks/trainings/run.py that need no further packages."""

import importlib

import pytest
import torch
from benchmark_scripts import script
from quick import slow

run = script("trainings.run")


def linear():
    model = torch.nn.Linear(64, 64, bias=False)  # 16384 bytes
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    batch = torch.randn(8, 64)

    def step():
        model(batch).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    return step, model, optimizer


def masked():
    step, model, optimizer = linear()
    batch = torch.randn(8, 64)

    def chosen():
        step()
        model(batch[torch.rand(8) > -1.0]).square().mean().backward()
        optimizer.zero_grad()

    return chosen, model, optimizer


def test_there_are_at_least_fifty_distinct_trainings():
    names = [name for module in run.MODULES for name in run.trainings(module)]
    assert len(names) == len(set(names)) >= 50


def test_recorded_measured_and_dry_peaks_are_equal():
    found = run.peaks_of(linear)
    assert found["recorded"] == found["measured"] == found["dry"]
    assert found["predicted"] > found["dry"]
    assert not found["assumed"]


@pytest.mark.slow
def test_a_size_that_depends_on_values_gives_an_upper_bound():
    found = run.peaks_of(masked)
    assert found["assumed"]
    row = run.TrainingRow("plain_torch", "masked", **found)
    assert run.cells(row)[0] == "masked (upper bound)"
    assert row.difference("dry") >= 0


@pytest.mark.slow
def test_an_error_is_in_its_row_and_the_other_runs_continue():
    def without_values():
        step, model, optimizer = linear()

        def reads():
            step()
            torch.randint(9, (4,)).bincount()

        return reads, model, optimizer

    found = run.peaks_of(without_values)
    assert found["recorded"] > 0
    assert found["dry"].startswith("ValueError: ")
    assert "bincount" in run.cells(run.TrainingRow("plain_torch", "reads", **found))[3]


def test_the_summary_counts_exact_peaks():
    rows = [
        run.TrainingRow("m", "a", 100_000, 100_000, 100_000, 100_001, 5),
        run.TrainingRow("m", "b", 100_000, 100_000, 100_000, 90_000, "ValueError: no"),
        run.TrainingRow("m", "c", 100_000, 100_000, 100_000, 200_000, 5, assumed=True),
    ]
    assert run.summary(rows) == (
        "measured: 2 of 2 to the byte, 2 within 0.05%; run dry: 0 of 2 to the byte, 1 within "
        "0.05%; 2 of 3 can be predicted, 1 with an assumption"
    )
    assert run.cells(rows[1])[2:4] == ("exact", "-10.00%")


@pytest.mark.parametrize("name", [slow("variational_autoencoder"), slow("policy_gradient")])
def test_trainings_in_plain_torch_are_exact_up_to_small_kernels(name, monkeypatch):
    monkeypatch.syspath_prepend(run.HERE / "cases")
    training = getattr(importlib.import_module("plain_torch"), name)
    found = run.peaks_of(training)
    assert found["measured"] == found["recorded"]
    assert found["recorded"] - 64 <= found["dry"] <= found["recorded"]  # kernels' scratch
