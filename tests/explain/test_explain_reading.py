"""Files of every kind are read; damaged and malicious ones are refused before any code runs."""

import gc
import gzip
import json
import math
import os
import pickle
import threading
import tracemalloc
from pathlib import Path

import pytest

from memlab import Event, Trace
from memlab.allocator import history
from memlab.explain import explain, reading
from memlab.explain.categories import Categories
from memlab.explain.frames import Frame, in_recompute
from memlab.explain.histories import free_memory, history_of
from memlab.explain.messages import read_log
from memlab.internals import unpickling

MIB = 2**20
RECORDINGS = sorted(Path(os.environ.get("MEMLAB_RECORDINGS", "none")).glob("*.json.gz"))


def event(
    size: int, storage: int, category: str, phase: str = "forward", module: str = ""
) -> Event:
    return Event(size, storage, category, "aten.mm", module, phase, "float32", (size // 4,))


TRACE = Trace(
    (
        event(4 * MIB, 0, "parameters", "before"),
        *(event(8 * MIB, n, "activations", module=f"blocks.{n}") for n in range(1, 9)),
        event(4 * MIB, 9, "gradients", "backward"),
        *(event(-8 * MIB, n, "activations", "backward") for n in range(8, 0, -1)),
        event(8 * MIB, 10, "optimizer_state", "optimizer"),
    )
)


def write(path: Path, content) -> Path:
    path.write_bytes(content if isinstance(content, bytes) else pickle.dumps(content))
    return path


def test_a_trace_keeps_its_own_categories(tmp_path):
    path = write(tmp_path / "trace.json", json.dumps(TRACE.to_dict()).encode())
    found = explain(path)
    assert found.kind == "trace"
    assert found.situation.by_category == {
        "parameters": 4 * MIB,
        "gradients": 4 * MIB,
        "activations": 64 * MIB,
    }
    assert not any(found.situation.unsure.values())


def test_an_exported_snapshot_has_the_same_categories_as_its_trace(tmp_path):
    TRACE.to_snapshot(tmp_path / "snapshot.pickle")
    found = explain(tmp_path / "snapshot.pickle")
    assert found.kind == "snapshot"
    assert found.situation.by_category["activations"] == 64 * MIB


def test_a_recording_of_the_simulated_allocator_is_read(tmp_path):
    path = write(tmp_path / "recording.json", json.dumps(history(TRACE)).encode())
    assert explain(path).situation.allocated_bytes == TRACE.peak_bytes


@pytest.mark.skipif(not RECORDINGS, reason="MEMLAB_RECORDINGS names no folder of recordings")
@pytest.mark.parametrize("path", RECORDINGS, ids=lambda path: path.name)
def test_recordings_of_a_real_gpu_are_explained(path):
    found = explain(path)
    assert found.situation.by_category["parameters"] == pytest.approx(12.7 * 2**30, rel=0.01)


# ------------------------------------------------------------------ refused


class Malicious:
    def __reduce__(self):
        return os.mkdir, ("made-by-a-pickle",)


def test_a_malicious_pickle_is_refused_before_it_runs(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    path = write(tmp_path / "snapshot.pickle", {"segments": [Malicious()], "device_traces": []})
    with pytest.raises(ValueError, match="not plain data"):
        explain(path)
    assert not (tmp_path / "made-by-a-pickle").exists()


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "empty"),
        (pickle.dumps({"segments": []})[:-4], "cannot be read"),
        (b'{"events": [', "no complete JSON"),
        (b"\x1f\x8bnot gzip", "damaged"),
        ([1, 2], "holds a list"),
        ({"other": 1}, "its keys are other"),
        ({"segments": [], "device_traces": [[]]}, "neither segments nor a trace"),
        ({"segments": 3, "device_traces": [[]]}, "must be lists"),
        ({"segments": [3], "device_traces": [[]]}, "no dictionary"),
        ({"segments": [], "device_traces": [[{"action": "alloc"}]]}, "malformed"),
        ({"segments": [], "device_traces": [[{"action": "snapshot"}]]}, "no memory was allocated"),
        (b'{"schema": 1, "command": "plan"}', "result of memlab plan"),
        (b"hello", "no out-of-memory message"),
        (b"PK\x03\x04and so on", "a zip file, such as a checkpoint of torch.save"),
    ],
)
def test_other_files_are_refused_in_one_sentence(tmp_path, content, words):
    with pytest.raises(ValueError, match=words) as error:
        explain(write(tmp_path / "file", content))
    assert "\n" not in str(error.value)


def test_what_is_wrong_with_a_file_does_not_repeat_its_path(tmp_path):
    path = write(tmp_path / "snapshot.pickle", pickle.dumps({"segments": []})[:-4])
    with pytest.raises(ValueError, match=r"^it cannot be read") as error:
        explain(path)
    assert str(path) not in str(error.value)


def recorded(**changes):
    plain = {"action": "alloc", "addr": 2**40, "size": 2 * MIB, "stream": 0, "frames": []}
    return {"segments": [], "device_traces": [[{**plain, **changes}]]}


NESTED_KEY = b"\x80\x04})" + b"".join(b"\x94h" + bytes([n]) + b"\x86" for n in range(45)) + b"Ns."


@pytest.mark.parametrize("write_data", [pickle.dumps, lambda data: json.dumps(data).encode()])
@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"size": -1}, r"the size -1; expected an integer from 0 to 2\^50"),
        ({"size": 2**63 - 1}, "the size 9223372036854775807; expected"),
        ({"size": 10**40}, "the size 1000"),
        ({"size": math.inf}, "the size inf"),
        ({"size": "2"}, "the size '2'"),
        ({"addr": -4}, r"the addr -4; expected an integer from 0 to 2\^64"),
        ({"stream": []}, r"the stream \[\]"),
        ({"category": 3}, "the category 3"),
        ({"frames": [{"filename": 3}]}, "the frame {'filename': 3}"),
    ],
)
def test_values_that_torch_does_not_record_are_named(tmp_path, write_data, changes, words):
    path = write(tmp_path / "snapshot", write_data(recorded(**changes)))
    with pytest.raises(ValueError, match=f"an entry has {words}"):
        explain(path)


def test_the_settings_of_a_snapshot_are_checked(tmp_path):
    data = {**recorded(), "allocator_settings": {"max_split_size": "large"}}
    with pytest.raises(ValueError, match="its allocator_settings are damaged"):
        explain(write(tmp_path / "snapshot", data))


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"[" * 200_000, "no complete JSON: maximum recursion depth"),
        (b"[" + b"1" * 5_000 + b"]", "no out-of-memory message"),
        (
            gzip.compress(b"[" + bytes(100 * MIB), mtime=0),
            "expands to more than 200 times its bytes",
        ),
        (
            gzip.compress(b"log " + bytes(100 * MIB), mtime=0),
            "expands to more than 200 times its bytes",
        ),
        (
            gzip.compress(b"CUDA out of memory" * 100, mtime=0)[:-9],
            "damaged: Compressed file ended before",
        ),
        (gzip.compress(b"CUDA out of memory", mtime=0) + b"more", "damaged: Not a gzipped file"),
    ],
)
def test_hostile_files_are_refused_in_one_sentence(tmp_path, content, words):
    with pytest.raises(ValueError, match=words):
        explain(write(tmp_path / "file", content))


def test_a_pickle_that_takes_for_ever_to_load_is_refused(tmp_path, monkeypatch):
    """The hash of 45 nested pairs takes 2^45 steps, which nothing in the process can interrupt."""
    monkeypatch.setattr(unpickling, "SECONDS", 1)
    with pytest.raises(ValueError, match="takes more than 1 s or 1024 MiB to load"):
        explain(write(tmp_path / "snapshot.pickle", NESTED_KEY))


OUT_OF_MEMORY = "CUDA out of memory. Tried to allocate 2.00 MiB\n"


@pytest.mark.few(1)
@pytest.mark.parametrize("share", [0.01, 0.5, 1], ids=["start", "middle", "end"])
@pytest.mark.parametrize("encoding", ["utf-8", "utf-16-le"])
@pytest.mark.parametrize(
    "first", ["batch_size=8\n", "[00:00] batch_size=8\n", "{'batch_size': 8}\n"]
)
def test_of_a_long_log_the_part_with_its_message_is_kept(
    tmp_path, monkeypatch, share, encoding, first
):
    monkeypatch.setattr(reading, "MOST_TEXT_BYTES", 2**18)
    monkeypatch.setattr(reading, "CHUNK_BYTES", 2**16)
    steps = [f"step {n} took {n * n % 977}\n" for n in range(2**17)]
    steps.insert(round(share * len(steps)), OUT_OF_MEMORY)
    start = b"\xff\xfe" if encoding == "utf-16-le" else b""
    text = start + (first + "".join(steps)).encode(encoding)
    counts = []
    tracemalloc.start()
    source = reading.read_file(write(tmp_path / "log.txt", text), counts.append)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert read_log(source.text).steps_done == round(share * 2**17) - 1
    assert read_log(source.text).numbers["batch"] == 8
    assert peak < 2.5 * MIB
    assert counts[-1] == len(text)
    compressed = write(tmp_path / "log.txt.gz", gzip.compress(text))
    assert reading.read_file(compressed) == source


@pytest.mark.parametrize("write_data", [pickle.dumps, lambda data: json.dumps(data).encode()])
def test_cycles_are_not_searched_for_while_a_file_is_read(tmp_path, write_data):
    """Searching the lists that were read, again and again, took 9 s for 12 MB of JSON."""
    starts = []

    def on_collection(phase: str, info: dict) -> None:
        starts.append(phase)

    path = write(tmp_path / "nested", write_data([[[], [], []] for _ in range(20_000)]))
    gc.callbacks.append(on_collection)
    try:
        with pytest.raises(ValueError, match="holds a list"):
            reading.read_file(path)
    finally:
        gc.callbacks.remove(on_collection)
    assert len(starts) < 10


def test_a_message_on_the_border_of_two_chunks_is_found(tmp_path, monkeypatch):
    monkeypatch.setattr(reading, "MOST_TEXT_BYTES", 2**15)
    monkeypatch.setattr(reading, "CHUNK_BYTES", 2**13)
    for before in range(2**13 - 50, 2**13 + 2, 5):
        text = b" " * before + OUT_OF_MEMORY.encode() + b"step 1\n" * 2**14
        assert OUT_OF_MEMORY in reading.read_file(write(tmp_path / "log.txt", text)).text


def test_a_compressed_snapshot_is_read(tmp_path):
    snapshot = {"segments": [segment(0, block(0, 2 * MIB))], "device_traces": []}
    path = write(tmp_path / "snapshot.pickle.gz", gzip.compress(pickle.dumps(snapshot)))
    assert explain(path).situation.allocated_bytes == 2 * MIB


def test_the_list_of_segments_of_memory_snapshot_is_read(tmp_path):
    path = write(tmp_path / "list.pickle", [segment(0, block(0, 2 * MIB))])
    assert explain(path).situation.allocated_bytes == 2 * MIB


def test_a_log_in_utf_16_is_read(tmp_path):
    text = "CUDA out of memory. Tried to allocate 2.00 MiB"
    path = write(tmp_path / "log.txt", text.encode("utf-16"))
    assert explain(path).log.message.requested == 2 * MIB


def test_a_pipe_is_read_once(tmp_path):
    """A named pipe, as a shell's <(...) is, gives its bytes to one reader only."""
    path = tmp_path / "pipe"
    os.mkfifo(path)
    snapshot = pickle.dumps({"segments": [segment(0, block(0, 2 * MIB))], "device_traces": []})
    writer = threading.Thread(target=path.write_bytes, args=(snapshot,))
    writer.start()
    try:
        assert explain(path).situation.allocated_bytes == 2 * MIB
    finally:
        writer.join()


# ------------------------------------------------------------------ histories


def entry(action: str, addr: int, size: int, **more) -> dict:
    return {"action": action, "addr": addr, "size": size, "stream": 0, **more}


def block(address: int, size: int, state: str = "active_allocated") -> dict:
    return {"address": address, "size": size, "requested_size": size, "state": state}


def segment(address: int, *blocks: dict, device: int = 0) -> dict:
    size = sum(each["size"] for each in blocks)
    head = {"device": device, "address": address, "total_size": size, "stream": 0}
    return {**head, "segment_type": "large", "blocks": list(blocks)}


def test_blocks_and_segments_older_than_the_record_count_from_its_start():
    """The first is alive at the end; the second is freed during the record."""
    at_end = segment(0, block(0, 2 * MIB), block(2 * MIB, 18 * MIB, "inactive"))
    freed = [entry("free_requested", 2 * MIB, 4 * MIB), entry("free_completed", 2 * MIB, 4 * MIB)]
    found = history_of({"segments": [at_end], "device_traces": [freed]})
    assert found.allocated == [6 * MIB, 2 * MIB, 2 * MIB]
    assert found.reserved == [20 * MIB] * 3


def test_the_device_that_ran_out_of_memory_is_chosen():
    traces = [[entry("alloc", 0, MIB)], [{"action": "oom", "size": 8, "device_free": 0}]]
    segments = [segment(0, block(0, 40 * MIB)), segment(0, block(0, 2 * MIB), device=1)]
    snapshot = {"segments": segments, "device_traces": traces}
    assert history_of(snapshot).device == 1
    assert history_of(snapshot, 0).device == 0
    with pytest.raises(ValueError, match=r"no device 2; choose from \[0, 1\]"):
        history_of(snapshot, 2)


def test_free_memory_counts_gaps_and_merges_pages_of_an_expandable_segment():
    maps = [entry("segment_map", n * 2 * MIB, 2 * MIB) for n in range(3)]
    found = history_of(
        {
            "segments": [],
            "device_traces": [[*maps, entry("alloc", 0, MIB), entry("alloc", MIB, MIB)]],
        }
    )
    assert free_memory(found, found.length).gaps == (4 * MIB,)


def test_part_of_a_range_can_be_unmapped():
    maps = [entry("segment_map", 0, 6 * MIB), entry("segment_unmap", 2 * MIB, 2 * MIB)]
    found = history_of({"segments": [], "device_traces": [maps]})
    assert found.reserved == [0, 6 * MIB, 4 * MIB]
    assert free_memory(found, 2).gaps == (2 * MIB, 2 * MIB)


def test_equal_counts_of_equal_sizes_are_weights_gradients_and_two_moments():
    sizes = [8 * MIB, 4 * MIB, 2 * MIB]
    blocks = [block(0, size) for size in sizes for _ in range(4)]
    for each, address in zip(blocks, range(0, 2**40, 16 * MIB), strict=False):
        each["address"] = address
    segments = [segment(each["address"], each) for each in blocks]
    found = history_of({"segments": segments, "device_traces": []})
    names = [Categories(found).name(b) for b in found.blocks if b.bytes == 8 * MIB]
    assert names == ["parameters", "gradients", "optimizer_state", "optimizer_state"]


def test_four_equal_matrices_in_a_layer_are_no_sign_of_adam():
    blocks = [block(n * 16 * MIB, 8 * MIB) for n in range(4)]
    blocks += [block(2**40 + n * 16 * MIB, (n + 1) * MIB) for n in range(3)]
    segments = [segment(each["address"], each) for each in blocks]
    found = history_of({"segments": segments, "device_traces": []})
    assert {Categories(found).name(b) for b in found.blocks} == {"parameters"}


@pytest.mark.parametrize(
    ("filename", "recomputes"),
    [
        ("/env/site-packages/torch/utils/checkpoint.py", True),
        ("C:\\env\\site-packages\\torch\\utils\\checkpoint.py", True),
        ("/home/me/project/utils/checkpoint.py", False),
    ],
)
def test_a_users_file_of_checkpoints_is_no_activation_checkpointing(filename, recomputes):
    assert in_recompute((Frame(filename, 1, "checkpoint"),)) == recomputes
