"""Checkpoint folders: killed saves and malicious pickles."""

import os
import pickle
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp

from memlab.zero import checkpoint_files as files

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed")


@pytest.fixture
def folder(tmp_path) -> Path:
    """A complete checkpoint, written as one rank."""
    return save(tmp_path / "step 1", 1.0)


def save(folder: Path, value: float) -> Path:
    files.prepare_save(folder, {})
    state = {"weight": torch.full((30,), value), "bias": torch.zeros(5)}
    writer = dcp.FileSystemWriter(files.staging_folder(folder))
    dcp.save(state, storage_writer=writer, no_dist=True)
    files.commit(folder)
    return folder


def loaded(folder: Path) -> float:
    state = {"weight": torch.zeros(30)}
    dcp.load(state, storage_reader=files.PlainReader(folder), no_dist=True)
    return state["weight"].mean().item()


def test_a_checkpoint_of_torch_is_loaded(tmp_path):
    dcp.save({"weight": torch.ones(30)}, checkpoint_id=tmp_path / "torchs", no_dist=True)
    assert loaded(tmp_path / "torchs") == 1.0


# ------------------------------------------------------------------ killed saves


def test_a_killed_save_leaves_the_old_checkpoint_and_the_next_one_removes_its_files(folder):
    files.prepare_save(folder, {})
    (files.staging_folder(folder) / "half a file").touch()
    assert loaded(folder) == 1.0
    save(folder, 2.0)
    assert loaded(folder) == 2.0
    assert sorted(path.name for path in folder.parent.iterdir()) == ["step 1"]


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
    with pytest.raises(ValueError, match=r"references posix\.mkdir, which is not plain data"):
        files.read_index(folder)
    assert not Path("harm").exists()


def test_values_saved_with_the_weights_must_be_plain_data(tmp_path):
    with pytest.raises(ValueError, match="got steps, sampler to save, and not all of it is plain"):
        files.prepare_save(tmp_path / "step 1", {"steps": 1, "sampler": Harmful()})
    assert list(tmp_path.iterdir()) == []
