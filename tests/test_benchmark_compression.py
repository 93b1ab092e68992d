"""Tests of benchmarks/activation_compression.py."""

import itertools
import json
from contextlib import nullcontext

import pytest
import torch
from benchmark_scripts import script

from memlab.internals.saved_tensors import encoded

pytestmark = pytest.mark.slow  # runs a whole script at a small size


benchmark = script("activation_compression")

SMALL = benchmark.CompressionSizes(batch=2, seq_len=32, width=32, draws=2, elements=2000, seeds=1)


def test_a_relative_error_is_relative_to_the_exact_gradients_norm():
    exact = torch.tensor([3.0, 4.0])
    assert benchmark.relative_error(exact, exact) == 0
    assert benchmark.relative_error(torch.tensor([3.0, 4.5]), exact) == pytest.approx(0.1)


def test_a_lossless_encoding_has_exact_gradients_and_at_least_their_memory():
    for make in benchmark.BLOCKS.values():
        exact = benchmark.gradients(make, SMALL, torch.enable_grad())
        copied = benchmark.gradients(make, SMALL, encoded(lambda facts: lambda x: x.clone().clone))
        assert torch.equal(exact.flat, copied.flat)
        assert copied.activation_bytes >= exact.activation_bytes > 0


def test_fewer_bits_need_less_memory_and_have_larger_errors():
    rows = [row for row in benchmark.gradient_rows(SMALL) if row["mode"] == "nearest"]
    for first, second in itertools.pairwise(rows):
        if first["block"] == second["block"]:
            assert first["bytes"] > second["bytes"]
            assert first["error"] < second["error"]


def test_each_run_is_compared_with_the_last():
    runs = {name: lambda s=s: s for name, s in {"a": 3.0, "b": 1.0, "last": 2.0}.items()}
    found = benchmark.against_the_last(runs, rounds=2)
    assert {name: spread.median for name, spread in found.items()} == {"a": 1.5, "b": 0.5}


def test_losses_are_printed_relative_to_exact_ones():
    printed = benchmark.training_table({"exact": [2.0, 4.0], "8 bits": [2.1, 4.0]})
    assert "| 8 bits | 3.0500 | +5.00% | +0.00% |" in printed


def test_training_is_deterministic_and_jitter_changes_it():
    exact = benchmark.final_loss(SMALL, nullcontext, seed=0)
    assert benchmark.final_loss(SMALL, nullcontext, seed=0) == exact
    assert benchmark.final_loss(SMALL, nullcontext, seed=0, jitter=0.01) != exact


def test_it_prints_three_tables_and_writes_them(tmp_path, capsys):
    arguments = ["--rounds", "1", "--steps", "2", "--results", str(tmp_path)]
    assert benchmark.main(arguments, SMALL) == 0
    printed = capsys.readouterr().out
    assert printed.startswith("# Activation compression: CPU")
    for line in (
        "| memlab's Block | 8 | nearest |",
        "| nn.TransformerEncoderLayer | 2 | stochastic |",
        "| a step, to a plain one | 4 bits |",
        "| exact |",
    ):
        assert f"\n{line}" in printed
    [results] = tmp_path.glob("*.json")
    sections = json.loads(results.read_text(encoding="utf-8"))["compression"]
    assert {"gradients", "times", "losses"} <= sections.keys()
