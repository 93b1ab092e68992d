"""Checkpoint folders: killed saves, flipped bits, and malicious pickles."""

import json
import os
import pickle
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from filelock import FileLock

from memlab.internals.files import TEMPORARY_LOCK
from memlab.zero import checkpoint_files as files

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed")


@pytest.fixture
def folder(tmp_path) -> Path:
    """A complete checkpoint, written as one rank."""
    return save(tmp_path / "step 1", 1.0)


def save(folder: Path, value: float) -> Path:
    staging = files.staging_folder(folder)
    lock = FileLock(staging / TEMPORARY_LOCK)
    files.prepare_save(folder, staging, lock, {})
    state = {"weight": torch.full((30,), value), "bias": torch.zeros(5)}
    dcp.save(state, storage_writer=dcp.FileSystemWriter(staging), no_dist=True)
    files.commit(folder, staging, lock, [files.own_checksums(staging, 0)])
    return folder


def loaded(folder: Path) -> float:
    state = {"weight": torch.zeros(30)}
    dcp.load(state, storage_reader=files.PlainReader(folder), no_dist=True)
    return state["weight"].mean().item()


def test_a_complete_checkpoint_is_verified_and_loaded(folder):
    files.verify_boxes(folder, 0, 1)
    assert loaded(folder) == 1.0
    assert sorted(path.name for path in folder.parent.iterdir()) == ["step 1"]


def test_a_flip_of_any_bit_in_a_box_or_the_index_is_detected(folder):
    for path in (*folder.glob("*.distcp"), folder / ".metadata"):
        content = path.read_bytes()
        for at in range(0, len(content), 7):
            flipped = bytearray(content)
            flipped[at] ^= 1 << at % 8
            path.write_bytes(flipped)
            with pytest.raises(ValueError, match=f"{path.name} is damaged: .* verify=False"):
                files.verify_boxes(folder, 0, 1)
        path.write_bytes(content)
    files.verify_boxes(folder, 0, 1)


def test_exactly_one_of_several_ranks_finds_a_damaged_box(folder):
    [path] = folder.glob("*.distcp")
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)
    found = 0
    for rank in range(3):
        try:
            files.verify_boxes(folder, rank, 3)
        except ValueError:
            found += 1
    assert found == 1


def test_a_damaged_checksum_file_is_reported(folder):
    (folder / files.CHECKSUMS).write_text("{")
    with pytest.raises(ValueError, match=r"checksums\.json is damaged"):
        files.verify_boxes(folder, 0, 1)


def test_a_checkpoint_saved_by_torch_has_no_checksums_and_is_loaded(tmp_path):
    dcp.save({"weight": torch.ones(30)}, checkpoint_id=tmp_path / "torchs", no_dist=True)
    files.verify_boxes(tmp_path / "torchs", 0, 1)
    assert loaded(tmp_path / "torchs") == 1.0


# ------------------------------------------------------------------ killed saves


def test_the_next_save_removes_the_staging_folder_of_a_killed_save(folder):
    orphan = folder.with_name(".step 2.partial")
    orphan.mkdir()
    (orphan / TEMPORARY_LOCK).touch()
    save(folder.with_name("step 3"), 3.0)
    assert sorted(path.name for path in folder.parent.iterdir()) == ["step 1", "step 3"]


def test_the_staging_folder_of_a_running_save_is_kept(folder):
    other = folder.with_name(".step 2.partial")
    other.mkdir()
    with FileLock(other / TEMPORARY_LOCK):
        save(folder.with_name("step 3"), 3.0)
        assert other.exists()


def test_the_old_checkpoint_is_restored_after_a_kill_between_the_two_renames(folder):
    folder.rename(folder.with_name(".step 1.old"))
    files.recover(folder)
    assert loaded(folder) == 1.0


def test_the_new_checkpoint_counts_after_a_kill_after_the_second_rename(folder):
    old = folder.with_name(".step 1.old")
    old.mkdir()
    (old / "file").touch()
    save(folder, 2.0)
    assert loaded(folder) == 2.0
    assert not old.exists()


# ------------------------------------------------------------------ plain data


class Harmful:
    def __reduce__(self):
        return os.mkdir, ("harm",)


def test_an_index_that_would_run_code_is_refused_without_running_it(folder, monkeypatch):
    monkeypatch.chdir(folder)
    (folder / ".metadata").write_bytes(pickle.dumps(Harmful()))
    (folder / files.CHECKSUMS).unlink()
    with pytest.raises(ValueError, match=r"references posix\.mkdir, which is not plain data"):
        files.verify_boxes(folder, 0, 1), files.read_index(folder)
    assert not Path("harm").exists()


def test_values_saved_with_the_weights_must_be_plain_data(tmp_path):
    folder = tmp_path / "step 1"
    staging = files.staging_folder(folder)
    with pytest.raises(ValueError, match="got steps, sampler to save, and not all of it is plain"):
        files.prepare_save(folder, staging, FileLock(staging), {"steps": 1, "sampler": Harmful()})
    assert list(tmp_path.iterdir()) == []


def test_the_checksums_are_a_json_file(folder):
    content = json.loads((folder / files.CHECKSUMS).read_text())
    assert [len(boxes) for boxes in content["boxes"].values()] == [2]
