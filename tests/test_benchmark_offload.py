"""Tests of benchmarks/offload.py."""

import json
from dataclasses import replace

import pytest
import torch
from benchmark_scripts import script

from memlab.model import PRESETS
from memlab.offload import HostStore, Traffic
from memlab.train import Setting

pytestmark = pytest.mark.slow  # runs a whole script at a small size


benchmark = script("offload")

SMALL = benchmark.OffloadSizes(
    Setting("tiny", batch=4, seq_len=64), sub_group=2**13, alone_bytes=2**12
)
N = PRESETS["tiny"].parameters
EMBEDDING_AND_NORM = (256 + 1) * 32


def row(peak_bytes, *seconds, alone=0.0, read=0, prefetched=0):
    return benchmark.OffloadRow(peak_bytes, 0, 0, 0, read, prefetched, alone, list(seconds))


@pytest.fixture(scope="module")
def found():
    with benchmark.disk_stores() as made:
        return benchmark.compared(benchmark.WAYS, SMALL, made, range(1))


@pytest.mark.parametrize(
    ("name", "bytes_each_way"),
    [("nothing", 0), ("state", 8), ("state and gradients", 12), (benchmark.COMMITTED, 12)],
)
def test_moved_bytes_match_the_formulas(found, name, bytes_each_way):
    assert (found[name].written, found[name].read) == (bytes_each_way * N, bytes_each_way * N)


def test_streamed_weights_are_read_twice_more_and_written_once_more(found):
    """The optimizer step itself moves 16 bytes per weight in each direction."""
    layers = N - EMBEDDING_AND_NORM
    of_layers = found["layers, their gradients and state"]
    assert of_layers.read == 16 * N + 2 * 4 * layers
    assert of_layers.written == 16 * N + 4 * layers


def test_activations_add_their_own_traffic(found):
    alone, everything = found["activations"], found["all of these"]
    assert alone.written > 0
    without = found["layers, their gradients and state"]
    assert everything.written - without.written == alone.written


def test_offloading_lowers_the_peak_and_the_memory_between_steps(found):
    peak = found["nothing"].peak_bytes
    assert all(row.peak_bytes < peak for name, row in found.items() if name != "nothing")
    kept = {name: row.between_bytes for name, row in found.items()}
    assert kept["nothing"] - kept["state"] == 8 * N
    assert kept["state"] - kept["state and gradients"] == 4 * N
    assert kept["activations"] == kept["nothing"]


def test_derived_shares_use_medians():
    found = {
        "nothing": row(1000, 2.0, 2.0, 2.0),
        "half": row(250, 3.0, 3.0, 9.0, alone=2.0, read=40, prefetched=10),
        "all": row(1000, 2.0, 2.0, 1.0, alone=2.0),
        "none": row(1000, 9.0, 9.0, 9.0, alone=2.0),
    }
    assert benchmark.saved(found, "half") == 0.75
    assert benchmark.ahead(found["half"]) == 0.25
    assert benchmark.slowdown(found, "half").median == 1.5
    assert [benchmark.hidden(found, name) for name in found] == [None, 0.5, 1.0, 0.0]


def test_copies_alone_are_timed_in_both_directions(monkeypatch):
    seconds = iter([2.0, 3.0])
    monkeypatch.setattr(benchmark, "timed", lambda run, store, device: next(seconds))
    store = HostStore()
    cpu = torch.device("cpu")
    assert benchmark.alone_seconds(store, cpu, 400, Traffic(written=800, read=200)) == 2 * 2 + 1.5
    assert store.keys() == []
    assert benchmark.alone_seconds(store, cpu, 400, Traffic()) == 0


def test_it_prints_and_stores_a_table(tmp_path, capsys, monkeypatch):
    few = {name: benchmark.WAYS[name] for name in ("nothing", "state")}
    monkeypatch.setattr(benchmark, "WAYS", few)
    plan = replace(SMALL, rounds=1)
    assert benchmark.main(["--rounds", "1", "--results", str(tmp_path)], plan) == 0
    printed = capsys.readouterr().out
    assert printed.startswith("# Offloading to the disk: CPU")
    assert "\n## tiny, 4 × 64 tokens, float32, cpu, sub-groups of 8,192 weights\n" in printed
    assert "\nPeak memory saved: state: " in printed
    assert "\n| state | " in printed
    [results] = tmp_path.glob("*.json")
    kept = json.loads(results.read_text(encoding="utf-8"))["offload"]["disk"]
    assert kept["ways"].keys() == few.keys()
    assert kept["ways"]["state"]["written"] == 8 * N
