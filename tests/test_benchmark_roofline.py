"""Tests of benchmarks/roofline.py."""

import pytest
from benchmark_scripts import script

from memlab.planner.outside import AS_IT_IS

benchmark = script("roofline")


def row(estimated, measured):
    spread = benchmark.Spread(measured - 0.1, measured, measured + 0.1)
    return benchmark.TimeRow("a training", f"way {estimated}", estimated, spread)


def test_the_error_is_relative_to_the_measurement():
    assert row(1.2, 1.0).miss == pytest.approx(0.2)
    assert row(0.9, 1.2).miss == pytest.approx(-0.25)


def test_the_summary_has_the_median_and_the_worst_error():
    card = benchmark.this_core(64, 2**16)
    summary = benchmark.summary([row(1.0, 1.0), row(1.1, 1.0), row(0.5, 1.0)], card)
    assert "have a median error of 10%; the worst is -50% (way 0.5, a training)" in summary


def test_an_estimate_is_longer_on_a_slower_core():
    build = benchmark.SMALL["a perceptron"]
    card = benchmark.this_core(64, 2**16)
    slower = benchmark.replace(card, float32_flops=card.float32_flops / 10, memory_bandwidth=1e9)
    fast, slow = (benchmark.estimated(build, AS_IT_IS, each) for each in (card, slower))
    assert slow > fast > 0


def test_a_quick_run_writes_nothing(capsys, tmp_path):
    assert benchmark.main(["--quick", "--results", str(tmp_path)]) == 0
    printed = capsys.readouterr().out
    assert printed.count("| a perceptron |") == len(benchmark.WAYS)
    assert not list(tmp_path.iterdir())
