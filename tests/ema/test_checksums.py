"""A flipped bit in a snapshot is an error that names it, and only its tensor is lost."""

import resource
from pathlib import Path

import pytest
import torch
from torch import nn

from memlab.ema import PostHocEMA, synthesize
from memlab.ema.snapshots import Snapshot
from memlab.ema.tensor_files import TensorFile, create_file

KINDS = {"a": (torch.float32, (5, 3)), "b": (torch.float16, (7,)), "empty": (torch.float32, (0,))}


@pytest.fixture
def path(tmp_path):
    path = tmp_path / "file.safetensors"
    with create_file(path, KINDS, {"about": "a test"}) as file:
        file.write("b", 0, torch.arange(4.0).half())
        file.write("a", 0, torch.arange(15.0))
        file.write("b", 4, torch.arange(3.0).half())
        file.write("empty", 0, torch.zeros(0))
    return path


def test_a_written_file_reads_back(path):
    file = TensorFile(path)
    assert file.metadata == {"about": "a test"}
    assert file.tensor("a").tolist() == list(range(15))
    assert file.tensor("b").tolist() == [0, 1, 2, 3, 0, 1, 2]
    assert file.tensor("empty").numel() == 0


def test_every_flipped_bit_is_an_error_that_names_the_file(path):
    content = path.read_bytes()
    for at in range(len(content)):
        flipped = bytearray(content)
        flipped[at] ^= 1 << at % 8
        path.write_bytes(flipped)
        with pytest.raises(ValueError, match=path.name):
            [TensorFile(path).tensor(name) for name in KINDS]


def test_intact_tensors_stay_readable_and_verify_false_reads_all(path):
    content = bytearray(path.read_bytes())
    content[TensorFile(path).places["b"].offset] ^= 1
    path.write_bytes(content)
    file = TensorFile(path)
    assert file.tensor("a").tolist() == list(range(15))
    with pytest.raises(
        ValueError, match=r"the checksum of its tensor 'b' is \w{16}, and was \w{16}"
    ):
        file.tensor("b")
    assert TensorFile(path, verify=False).tensor("b").numel() == 7


def test_files_without_checksums_are_readable(tmp_path):
    from safetensors.torch import save_file

    save_file({"a": torch.ones(3)}, tmp_path / "theirs.safetensors")
    assert TensorFile(tmp_path / "theirs.safetensors").tensor("a").tolist() == [1, 1, 1]


@pytest.mark.parametrize("snapshot_dtype", [torch.float16, "int8"])
def test_a_damaged_snapshot_stops_synthesis_unless_verify_is_false(tmp_path, snapshot_dtype):
    model = nn.Linear(80, 80)
    ema = PostHocEMA(model, tmp_path, sigmas=(0.05, 0.1), every=1, snapshot_dtype=snapshot_dtype)
    for step in range(1, 9):
        ema.update(step)
        if step % 4 == 0:
            ema.snapshot()
    damaged = max(tmp_path.glob("ema-*"))
    content = bytearray(damaged.read_bytes())
    content[-5] ^= 1
    damaged.write_bytes(content)
    with pytest.raises(ValueError, match=f"{damaged.name} is damaged"):
        synthesize(tmp_path, 0.08)
    opened = [Snapshot.open(path, verify=False) for path in tmp_path.glob("ema-*")]
    synthesize(opened, 0.08)


@pytest.fixture
def disk_of_2000_bytes():
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2000, before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.mark.parametrize("write", ["snapshot", "save"])
def test_a_full_disk_is_an_error_that_names_the_file(tmp_path, write, request):
    ema = PostHocEMA(nn.Linear(80, 80), tmp_path)
    ema.update(1)
    request.getfixturevalue("disk_of_2000_bytes")
    with pytest.raises(OSError, match=r"the file needs .* KiB, and no file was changed; free") as e:
        getattr(ema, write)()
    assert Path(e.value.filename).parent == tmp_path
    assert list(tmp_path.iterdir()) == []
