"""The FP8 benchmark measures correctly: rounding, an outlier and kept bytes show up."""

import json

import pytest
from benchmark_scripts import script

benchmark = script("fp8")
TENSOR, TILES = "per tensor, E5M2 gradients", "1 × 128 and 128 × 128, E4M3 gradients"


def test_bf16_has_smaller_errors_than_fp8_and_e4m3_than_e5m2():
    found = {way: benchmark.errors(recipe, 1) for way, recipe in benchmark.WAYS.items()}
    y = {way: each["y"][0] for way, each in found.items()}
    dx = {way: each["dx"][0] for way, each in found.items()}
    assert y["BF16"] < 0.005 < 0.03 < y[TENSOR] < 0.06
    assert dx["BF16"] < 0.005 < 0.03 < dx[TILES] < dx[TENSOR] < 0.08


def test_small_gradients_are_lost_with_a_scale_per_tensor_in_e4m3_alone():
    """Tokens' gradients span seven decades, E4M3 five and E5M2 nine."""
    found = {way: benchmark.errors(recipe, 1)["dx"] for way, recipe in benchmark.WAYS.items()}
    error = {way: each[0] for way, each in found.items()}
    cosine = {way: each[1] for way, each in found.items()}
    assert error[TILES] < error[TENSOR] < 0.08 < 0.15 < error["per tensor, E4M3 gradients"]
    assert cosine["per tensor, E4M3 gradients"] < 0.95 < cosine[TENSOR] < cosine[TILES] < 1


def test_kept_bytes_are_those_of_codes_and_scales():
    elements = benchmark.TOKENS * benchmark.IN
    kept = [benchmark.kept_bytes(recipe) for recipe in benchmark.WAYS.values()]
    assert kept == [2 * elements, elements + 4, elements + 4, elements + 4 * elements // 128]


@pytest.mark.slow
def test_it_prints_three_tables_and_writes_them(tmp_path, capsys):
    assert benchmark.main(["--rounds", "1", "--results", str(tmp_path)]) == 0
    printed = capsys.readouterr().out
    assert printed.startswith("# FP8 matmuls: CPU")
    for line in ("| BF16 | 1 × |", "| BF16 | 262,144 | 2.0000 |", "| BF16 | "):
        assert f"\n{line}" in printed
    [results] = tmp_path.glob("*.json")
    sections = json.loads(results.read_text(encoding="utf-8"))["fp8"]
    assert {"errors", "bytes", "times"} <= sections.keys()
