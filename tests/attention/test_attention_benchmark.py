"""The attention benchmark measures correctly: slow, large or inexact tiles are reported."""

import json
from functools import partial

import pytest
import torch
from benchmark_scripts import script

benchmark = script("attention")


@pytest.fixture
def quick(monkeypatch):
    """Shrink the full plan to the quick one, so that results are written."""
    monkeypatch.setattr(benchmark, "FULL", benchmark.QUICK)


def run(folder, *words):
    assert benchmark.main([*words, "--results", str(folder)]) == 0
    [results] = folder.glob("*.json")
    return json.loads(results.read_text(encoding="utf-8"))["attention"]


@pytest.mark.parametrize(
    ("mask", "seconds", "verdict"),
    [
        ("causal", 0.4, "met"),
        ("causal", 0.5, "missed"),
        ("full", 0.5, "met"),
        ("full", 0.7, "missed"),
    ],
)
def test_the_aims_are_shares_of_the_time_by_way_of_the_score_matrix(mask, seconds, verdict):
    row = benchmark.AttentionTimes(
        mask, {"score matrix": [1.0, 2.0], "tiles": [seconds, 2 * seconds]}
    )
    assert row.verdict == verdict


def test_times_are_printed_as_ratios_and_written(quick, tmp_path, capsys):
    section = run(tmp_path, "--section", "time")["time"]
    printed = capsys.readouterr().out
    assert printed.startswith("# Attention: CPU")
    assert "\n| causal | " in printed
    assert "\n| 16 | 62% | " in printed  # 10 of 4 × 4 tiles
    for mask in ("causal", "full"):
        assert section[mask]["seconds"].keys() > benchmark.WAYS.keys()


def test_peaks_have_slopes_of_two_and_one(quick, tmp_path):
    section = run(tmp_path, "--section", "bytes")["bytes"]
    assert section["slopes"]["score matrix"] == pytest.approx(2, abs=0.05)
    assert section["slopes"]["tiles"] < 1
    wrong = partial(benchmark.peak_bytes, benchmark.attention_reference, benchmark.QUICK)
    assert section["peak_bytes"]["score matrix"] == [wrong(T) for T in benchmark.QUICK.lengths]


def test_a_slope_is_an_exponent():
    assert benchmark.slope([1, 10, 20], [7, 100, 400]) == pytest.approx(2)
    assert benchmark.slope([1, 10, 20], [7, 100, 200]) == pytest.approx(1)


def test_errors_are_within_the_limit(quick, tmp_path):
    section = run(tmp_path, "--section", "error")["error"]
    assert section["within"] == {"float32": True, "bfloat16": True, "float16": True}


def test_an_error_beyond_the_limit_is_reported(quick, tmp_path, monkeypatch):
    def inexact(q, k, v, *, causal):
        return benchmark.torchs(q, k, v * 1.1, causal=causal)

    monkeypatch.setitem(benchmark.WAYS, "tiles", inexact)
    section = run(tmp_path, "--section", "error")["error"]
    assert not any(section["within"].values())


def test_a_quick_run_writes_nothing_and_leaves_the_threads_alone(tmp_path, capsys):
    threads = torch.get_num_threads()
    assert benchmark.main(["--quick", "--results", str(tmp_path)]) == 0
    assert "take" in capsys.readouterr().out
    assert list(tmp_path.iterdir()) == []
    assert torch.get_num_threads() == threads
