"""The monitor's benchmark times the monitor, and nothing else counts as its cost."""

import json

import pytest
from benchmark_scripts import script

import memlab

benchmark = script("monitor")


def test_the_share_is_the_monitors_time_of_the_monitored_steps():
    cost = benchmark.Cost(None, step_seconds=0.2, monitor_seconds=0.001)
    assert cost.share == pytest.approx(0.005)


def test_every_monitored_step_is_clocked_and_no_plain_one():
    monitor, calls = memlab.monitor("cpu"), []
    benchmark.cost_of(lambda: calls.append(1), monitor, rounds=3)
    assert monitor.num_steps == benchmark.WARM_UP + 3
    assert len(calls) == benchmark.WARM_UP + 6


def test_it_prints_a_table_and_writes_its_results(tmp_path, capsys):
    assert benchmark.main(["--rounds", "2", "--results", str(tmp_path)], preset="tiny") == 0
    printed = capsys.readouterr().out
    assert "| alone |" in printed
    assert "| with loggers |" in printed
    [results] = tmp_path.glob("*.json")
    assert json.loads(results.read_text(encoding="utf-8"))["monitor"]["cost"]["alone"]["share"] > 0
