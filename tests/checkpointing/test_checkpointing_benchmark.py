"""The checkpointing benchmark measures correctly: a slow or wasteful checkpoint is reported."""

import json

import pytest
from benchmark_scripts import script

benchmark = script("checkpointing")


@pytest.fixture
def quick(monkeypatch):
    """Shrink the full plan to the quick one, so that results are written."""
    monkeypatch.setattr(benchmark, "FULL", benchmark.QUICK)


def row(memlab_seconds: float, memlab_bytes: int = 70) -> object:
    seconds = {"plain": [1.0, 2.0], "torch": [2.0, 4.0]}
    seconds["memlab"] = [memlab_seconds, 2 * memlab_seconds]
    return benchmark.CheckpointTimes(seconds, {"plain": 100, "torch": 70, "memlab": memlab_bytes})


@pytest.mark.parametrize(
    ("comparison", "verdict"),
    [
        (row(2.0), "met"),
        (row(2.1), "met"),
        (row(2.2), "missed"),
        (row(1.0, memlab_bytes=71), "missed: different peak"),
    ],
)
def test_the_aim_is_torchs_peak_at_nearly_its_time(comparison, verdict):
    assert comparison.verdict == verdict


def test_it_prints_and_writes_both_models_with_every_method(quick, tmp_path, capsys):
    assert benchmark.main(["--section", "against torch", "--results", str(tmp_path)]) == 0
    printed = capsys.readouterr().out
    assert printed.startswith("# Checkpointing: CPU")
    [results] = tmp_path.glob("*.json")
    section = json.loads(results.read_text(encoding="utf-8"))["checkpointing"]["against torch"]
    for name in ("tiny, 4 × 64 tokens", "5 blocks of Linear(16, 16), GELU and Tanh"):
        assert f"\n| {name} |" in printed
        assert section[name]["peak_bytes"]["memlab"] == section[name]["peak_bytes"]["torch"]
        assert section[name]["peak_bytes"]["memlab"] < section[name]["peak_bytes"]["plain"]
        assert section[name]["seconds"].keys() == benchmark.WAYS.keys()


def test_a_checkpoint_that_saves_nothing_is_reported(quick, tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(benchmark.WAYS, "memlab", benchmark.WAYS["plain"])
    benchmark.main(["--section", "against torch", "--results", str(tmp_path)])
    assert "missed: different peak" in capsys.readouterr().out


@pytest.mark.slow
def test_a_quick_run_writes_nothing(tmp_path, capsys):
    assert benchmark.main(["--quick", "--results", str(tmp_path)]) == 0
    assert "memlab's checkpoint takes" in capsys.readouterr().out
    assert list(tmp_path.iterdir()) == []


def test_schedules_have_their_predicted_peaks(quick, tmp_path, capsys):
    assert benchmark.main(["--section", "schedules", "--results", str(tmp_path)]) == 0
    assert "tokens: 6 of 6 schedules have the predicted peak" in capsys.readouterr().out
    [results] = tmp_path.glob("*.json")
    section = json.loads(results.read_text(encoding="utf-8"))["checkpointing"]["schedules"]
    plain, every = (section[name] for name in ("no checkpointing", "every block"))
    torchs, ours = (
        section[name]
        for name in ("checkpoint_sequential, 2 segments", "optimal, memory of 2 segments")
    )
    kept = section["matmuls and attention kept"]
    assert (
        plain["recomputed_operations"]
        == kept["recomputed_operations"]
        == 0
        < every["recomputed_operations"]
    )
    assert every["peak_bytes"] < kept["peak_bytes"] < plain["peak_bytes"]
    assert ours["peak_bytes"] <= torchs["peak_bytes"]
    assert ours["recomputed_operations"] <= torchs["recomputed_operations"]


def test_a_prediction_that_is_off_by_a_byte_is_no_success():
    assert benchmark.ScheduleResult(100, 100, 7, 7, []).is_as_predicted
    assert benchmark.ScheduleResult(100, 101, 7, 7, []).is_as_predicted is False
    assert benchmark.ScheduleResult(100, 100, 7, 8, []).is_as_predicted is False
    assert benchmark.ScheduleResult(100, None, 7, None, []).is_as_predicted is None


def test_the_rule_of_checkpoint_sequential():
    assert benchmark.sequential_schedule(12, 5) == ((0, 1), (2, 3), (4, 5), (6, 7), 8, 9, 10, 11)
