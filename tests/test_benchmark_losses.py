"""Tests of benchmarks/losses.py."""

import json

import pytest
import torch
from benchmark_scripts import script
from close import assert_close

from memlab.losses import chunked_cross_entropy

pytestmark = pytest.mark.slow  # runs a whole script at a small size


benchmark = script("losses")

SMALL = benchmark.LossSizes(rows=64, width=16, vocab_size=500, chunks=(4, 64))


def row(peak_bytes, *seconds):
    return benchmark.LossRow(peak_bytes, list(seconds), 1e-7, 2e-7)


def test_the_peak_excludes_the_inputs():
    given = benchmark.problem(SMALL, torch.float32)
    logits = 4 * 64 * 500
    assert 3 * logits <= benchmark.peak_bytes(benchmark.by_all_logits, given) < 4 * logits
    by_chunks = benchmark.peak_bytes(benchmark.ways_of(SMALL)["memlab, chunk=4"], given)
    both_gradients = 4 * 16 * (64 + 500)
    assert both_gradients < by_chunks < both_gradients + logits / 8


def test_the_error_is_relative_to_the_exact_gradients_norm():
    exact = torch.tensor([3.0, 4.0], dtype=torch.float64)
    assert benchmark.relative_error(exact, exact) == 0
    assert benchmark.relative_error(torch.tensor([3.0, 4.5]), exact) == pytest.approx(0.1)


def test_all_implementations_have_the_same_gradients():
    given = benchmark.problem(SMALL, torch.float64)
    expected = benchmark.gradients(chunked_cross_entropy, *given)
    ways = benchmark.ways_of(SMALL)
    assert next(iter(ways)) == benchmark.ALL_LOGITS
    for loss in ways.values():
        for found, exact in zip(benchmark.gradients(loss, *given), expected, strict=True):
            assert_close(found, exact)


@pytest.mark.parametrize(
    ("peak_bytes", "seconds", "verdict"),
    [(100 * 2**20, 2.0, "met"), (100 * 2**20 + 1, 2.0, "missed"), (2**20, 2.1, "missed")],
)
def test_the_goal_needs_both_memory_and_time(peak_bytes, seconds, verdict):
    found = {benchmark.ALL_LOGITS: row(2**30, 2.0), benchmark.DEFAULT: row(peak_bytes, seconds)}
    assert benchmark.sentence(found).endswith(f": {verdict}.")


def test_it_prints_and_stores_a_table_for_each_dtype(tmp_path, capsys):
    assert benchmark.main(["--rounds", "1", "--results", str(tmp_path)], SMALL) == 0
    printed = capsys.readouterr().out
    assert printed.startswith("# Chunked cross-entropy: CPU")
    for line in (
        "## float32: 64 rows of 16, 500 tokens\n",
        "## bfloat16: 64 rows of 16, 500 tokens\n",
        "| all logits |",
        "| F.linear_cross_entropy |",
        "| memlab, default: chunk=8 |",
        "| memlab, chunk=4 |",
    ):
        assert f"\n{line}" in printed
    [results] = tmp_path.glob("*.json")
    sections = json.loads(results.read_text(encoding="utf-8"))["losses"]
    assert {"float32", "bfloat16"} <= sections.keys()
    assert sections["float32"]["ways"].keys() == sections["bfloat16"]["ways"].keys()
