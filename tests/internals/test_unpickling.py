"""Unpickling returns plain data and runs no code."""

import gzip
import json
import os
import pickle
from pathlib import Path

import pytest
import torch

import memlab
from memlab.allocator import read_recording
from memlab.internals.unpickling import unpickle


class Harmful:
    def __reduce__(self):
        return os.mkdir, ("harm",)


@pytest.mark.parametrize("content", [Harmful(), {"segments": [Harmful()]}, torch.float32, Path()])
def test_other_than_plain_data_is_refused_before_any_code_runs(tmp_path, monkeypatch, content):
    monkeypatch.chdir(tmp_path)
    Path("file.pickle").write_bytes(pickle.dumps(content))
    with pytest.raises(
        ValueError, match=r"file\.pickle cannot be read: it references .* plain data"
    ):
        unpickle(Path("file.pickle"))
    assert not Path("harm").exists()


def test_the_reason_is_never_empty(tmp_path):
    (tmp_path / "file").write_bytes(b"\x80\x04\x8a\x00")  # raises EOFError without a message
    with pytest.raises(ValueError, match=r"cannot be read: \w+"):
        unpickle(tmp_path / "file")


def test_an_allowed_name_is_replaced(tmp_path):
    (tmp_path / "file").write_bytes(pickle.dumps({"file": Path("a/b")}))
    names = {(Path().__class__.__module__, Path().__class__.__name__): lambda *parts: parts}
    assert unpickle(tmp_path / "file", names) == {"file": ("a", "b")}


@pytest.mark.parametrize("content", [b"", b"no pickle", pickle.dumps([1] * 100)[:-20]])
def test_a_damaged_pickle_is_a_one_line_error(tmp_path, content):
    (tmp_path / "file").write_bytes(content)
    with pytest.raises(ValueError, match="cannot be read"):
        unpickle(tmp_path / "file")


def test_a_snapshot_is_read_back(tmp_path):
    trace = memlab.measure(lambda: torch.zeros(128) + 1)
    trace.to_snapshot(tmp_path / "step.pickle")
    found = read_recording(tmp_path / "step.pickle")
    assert {entry["size"] for entry in found["device_traces"][0]} == {512}


def test_recordings_are_read_from_json_and_a_damaged_one_is_a_one_line_error(tmp_path):
    plain, packed = tmp_path / "a.json", tmp_path / "a.json.gz"
    plain.write_text(json.dumps({"events": []}))
    packed.write_bytes(gzip.compress(plain.read_bytes()))
    assert read_recording(plain) == read_recording(packed) == {"events": []}
    packed.write_bytes(packed.read_bytes()[:-9])
    with pytest.raises(ValueError, match=r"a\.json\.gz is no JSON"):
        read_recording(packed)
