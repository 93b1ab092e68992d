"""Snapshots, checked with torch's own reader."""

import pickle
import pickletools
import re
from itertools import pairwise

import pytest
import torch
from torch.cuda import _memory_viz
from torch.cuda.memory import _snapshot

import memlab
from memlab.trace import Event, Trace
from memlab.train import Setting, build, combined, dry_trace, measured

KIB = 1024


@pytest.fixture(scope="module")
def trace() -> Trace:
    training = build(Setting("tiny", batch=2, seq_len=16), combined("plain"))
    training.step()
    return measured(training)


@pytest.fixture
def written(trace, tmp_path):
    trace.to_snapshot(tmp_path / "step.pickle")
    return pickle.loads((tmp_path / "step.pickle").read_bytes())


def events(*changes: tuple[int, int]) -> Trace:
    """Return events for (storage, bytes) pairs."""
    rest = ("activations", "aten.mm.default", "blocks.0", "forward", "float32", (1,))
    return Trace(tuple(Event(bytes_, storage, *rest) for storage, bytes_ in changes))


def read(trace: Trace, tmp_path) -> dict:
    trace.to_snapshot(tmp_path / "trace.pickle")
    return pickle.loads((tmp_path / "trace.pickle").read_bytes())


def replayed(entries: list[dict]) -> list[int]:
    """Return live bytes after each entry; fail on a double allocation or free."""
    alive, totals = {}, []
    for entry in entries:
        if entry["action"] == "alloc":
            assert entry["addr"] not in alive
            alive[entry["addr"]] = entry["size"]
        elif entry["action"] == "free_completed":
            assert alive.pop(entry["addr"]) == entry["size"]
        totals.append(sum(alive.values()))
    return totals


def test_the_trace_of_a_snapshot_has_the_peak_and_the_end_of_the_step(written, trace):
    totals = replayed(written["device_traces"][0])
    assert max(totals) == trace.peak_bytes
    assert totals[-1] == trace.live_bytes


def test_torch_s_reader_accounts_for_every_byte_at_the_end(written, trace):
    summary = _memory_viz.segsum(written)
    size = f"{trace.live_bytes / KIB:.1f}KiB"
    assert f"total_allocated: {size}" in summary
    assert f"total_reserved: {size}" in summary


def test_torch_s_reader_supports_every_action(written):
    lines = _memory_viz.trace(written).splitlines()
    told = re.compile(r"Device 0 -+|\d+ entries|\w+ = \w+\[\d+:.*\]|del .* # .*|# free.*|TOTAL.*")
    assert [line for line in lines if not told.fullmatch(line)] == []


def test_torch_s_flame_graph_names_a_block_s_operator(written):
    assert _memory_viz.memory(written, lambda text: text).count(";memlab:0:optimizer_state ") > 10


def test_entries_and_segments_have_torch_s_documented_keys(written):
    documented = set(
        re.findall(r"^ +(\w+): (?:int|List|Tuple|Literal|str)", _snapshot.__doc__, re.M)
    )
    (segment, *_), (entry, *_) = written["segments"], written["device_traces"][0]
    (block,) = segment["blocks"]
    assert documented >= {"total_size", "segment_type", "requested_size", "filename", "addr"}
    optional = {"device_free", "pool_id", "user_metadata", "internal_metadata"}
    optional |= {name for name in documented if name.startswith("fx_")}
    assert documented - optional <= {*segment, *block, *entry, *entry["frames"][0], *written}


def test_no_two_storages_share_an_address(written):
    entries = [entry for entry in written["device_traces"][0] if entry["action"] == "alloc"]
    ranges = sorted((entry["addr"], entry["addr"] + entry["size"]) for entry in entries)
    assert all(end <= start for (_, end), (start, _) in pairwise(ranges))


def test_a_storage_that_shrinks_is_freed_and_allocated_anew(tmp_path):
    written = read(events((1, 3 * KIB), (1, -KIB), (1, -2 * KIB)), tmp_path)
    entries = written["device_traces"][0]
    frees = ["free_requested", "free_completed"]
    assert [entry["action"] for entry in entries] == ["alloc", *frees, "alloc", *frees]
    assert replayed(entries) == [3072, 3072, 0, 2048, 2048, 0]
    assert written["segments"] == []


def test_the_viewer_reads_the_pickle_protocol(trace, tmp_path):
    trace.to_snapshot(tmp_path / "step.pickle")
    operations = pickletools.genops((tmp_path / "step.pickle").read_bytes())
    protocol = next(argument for operation, argument, _ in operations if operation.name == "PROTO")
    assert protocol <= 4
    assert not {o.name for o, _, _ in operations} & {"GLOBAL", "STACK_GLOBAL", "REDUCE"}


def test_a_line_is_a_frame(tmp_path):
    x = torch.randn(KIB, requires_grad=True)
    with memlab.metering.meter() as metered:
        (x * 2).sum().backward()
    line = "my runs/train.py:12 step"
    event = metered.trace.events[-1]._replace(bytes=4, storage=10**6, line=line)
    frames = read(Trace((event,)), tmp_path)["device_traces"][0][0]["frames"]
    assert frames[-1] == {"filename": "my runs/train.py", "line": 12, "name": "step"}


@pytest.mark.slow
def test_a_model_larger_than_this_machine_has_a_snapshot(tmp_path):
    trace = dry_trace(Setting("llama-3-8b", batch=1, seq_len=128), combined("sgd"))
    path = tmp_path / "8b.pickle"
    trace.to_snapshot(path)
    written = pickle.loads(path.read_bytes())
    assert max(replayed(written["device_traces"][0])) == trace.peak_bytes > 2 * 8e9 * 4
    assert path.stat().st_size < 300 * len(trace.events)  # the viewer fails on gigabytes
