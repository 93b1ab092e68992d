"""The precision benchmark measures correctly: a lost gradient and a wrong byte are reported."""

import json

import pytest
import torch
from benchmark_scripts import script

from memlab.course.checks.day04 import POLICIES, held_bytes
from memlab.model import PRESETS

benchmark = script("precision")


@pytest.mark.few(3)
@pytest.mark.parametrize("policy", POLICIES)
def test_the_bytes_of_a_policy_equal_the_formula(policy):
    wanted = held_bytes(PRESETS["tiny"], policy)
    found = benchmark.bytes_of(policy)
    assert {kind: found[kind] for kind in benchmark.KINDS} == {
        kind: wanted[kind] for kind in benchmark.KINDS
    }


def test_elements_lost_in_float16_are_counted_by_kind():
    gradient = torch.tensor([0.0, 1.0, 2.0**-14, 2.0**-15, 2.0**-24, 2.0**-26, 70_000.0, -1e-9])
    assert benchmark.lost(gradient, 1.0) == {"zero": 2 / 8, "subnormal": 2 / 8, "infinite": 1 / 8}
    assert benchmark.lost(gradient, 2.0**16) == {"zero": 0, "subnormal": 0, "infinite": 2 / 8}


def test_the_first_run_is_compared_with_each_other_run():
    seconds = {"ours": 3.0, "theirs": 2.0, "another": 6.0}
    runs = {name: lambda name=name: seconds[name] for name in seconds}
    found = benchmark.compared(runs, rounds=2)
    assert {name: spread.median for name, spread in found.items()} == {
        "theirs": 1.5,
        "another": 0.5,
    }


@pytest.mark.slow
def test_it_prints_three_tables_and_writes_them(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(benchmark, "TENSORS", (2, 8))
    monkeypatch.setattr(benchmark, "ELEMENTS", 64)
    arguments = ["--rounds", "1", "--steps", "1", "--results", str(tmp_path)]
    assert benchmark.main(arguments) == 0
    printed = capsys.readouterr().out
    assert printed.startswith("# Precision: CPU")
    for line in (
        "| float32 | 4.00 |",
        "| logits, 512 tokens, × 1 |",
        "| LossScaler | GradScaler |",
    ):
        assert f"\n{line}" in printed
    [results] = tmp_path.glob("*.json")
    sections = json.loads(results.read_text(encoding="utf-8"))["precision"]
    assert {"bytes", "float16", "times"} <= sections.keys()
