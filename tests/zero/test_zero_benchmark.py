"""The ZeRO benchmark prints and writes what one rank stores and sends."""

import json

import pytest
from benchmark_scripts import script

from memlab.model import PRESETS

pytestmark = pytest.mark.slow  # a whole script, run small


benchmark = script("zero")


@pytest.mark.parametrize(("stage", "count"), [(1, 4 + 12 / 4), (2, 2 + 14 / 4), (3, 16 / 4)])
def test_the_measured_peak_exceeds_the_formula_and_the_traffic_equals_it(stage, count):
    row = benchmark.row_of("tiny", 4, stage, seq_len=16)
    assert row["formula_bytes"] == PRESETS["tiny"].parameters * count
    assert row["peak_bytes"] > row["formula_bytes"]
    assert row["sent_bytes"] == row["ring_bytes"]


def test_the_table_and_the_file_have_a_row_per_stage(tmp_path, capsys):
    words = ["--sections", "one_rank"]
    words += ["--runs", "tiny:2", "--stages", "1", "3", "--seq-len", "16"]
    assert benchmark.main([*words, "--results", str(tmp_path)]) == 0
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("| tiny")]
    assert [line.split(" | ")[1:3] for line in lines] == [["2", "1"], ["2", "3"]]
    [written] = [json.loads(path.read_text()) for path in tmp_path.glob("*.json")]
    assert [row["stage"] for row in written["zero"]["one_rank"]["rows"]] == [1, 3]


@pytest.mark.distributed
def test_the_table_has_a_row_for_each_way_to_run_real_processes(tmp_path, capsys):
    words = ["--sections", "processes", "--model", "tiny", "--tokens", "8", "--rounds", "1"]
    assert benchmark.main([*words, "--results", str(tmp_path)]) == 0
    printed = capsys.readouterr().out
    [written] = [json.loads(path.read_text()) for path in tmp_path.glob("*.json")]
    rows = written["zero"]["processes"]["rows"]
    assert [row["run"] for row in rows] == ["FSDP2", *benchmark.OURS]
    assert all(f"| {row['run']} | " in printed for row in rows)
