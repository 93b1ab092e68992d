"""A file is either unchanged or completely replaced, and no temporary file remains."""

import os
import signal
import stat
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from memlab.internals.files import remove_orphans, temporary_folder, write_beside


def test_the_file_holds_what_was_written(tmp_path):
    with write_beside(tmp_path / "table.json") as beside:
        beside.write_text("new")
    assert (tmp_path / "table.json").read_text() == "new"


def test_the_file_is_unchanged_until_the_block_ends(tmp_path):
    path = tmp_path / "table.json"
    path.write_text("old")
    with write_beside(path) as beside:
        beside.write_text("new")
        assert path.read_text() == "old"
    assert path.read_text() == "new"


def write_half(path, failure):
    with write_beside(path) as beside:
        beside.write_text("half")
        raise failure


@pytest.mark.parametrize("failure", [ValueError, KeyboardInterrupt])
def test_a_failure_leaves_the_file_unchanged(tmp_path, failure):
    path = tmp_path / "table.json"
    path.write_text("old")
    with pytest.raises(failure):
        write_half(path, failure)
    assert path.read_text() == "old"


@pytest.mark.parametrize("failure", [ValueError, KeyboardInterrupt])
def test_a_failure_creates_no_file(tmp_path, failure):
    with pytest.raises(failure):
        write_half(tmp_path / "table.json", failure)
    assert list(tmp_path.iterdir()) == []


def test_no_temporary_file_remains(tmp_path):
    with write_beside(tmp_path / "table.json") as beside:
        beside.write_text("new")
    assert list(tmp_path.iterdir()) == [tmp_path / "table.json"]


def test_a_failed_replacement_leaves_no_temporary_file(tmp_path):
    (tmp_path / "folder").mkdir()
    with pytest.raises(OSError, match="folder"), write_beside(tmp_path / "folder") as beside:
        beside.touch()
    assert list(tmp_path.iterdir()) == [tmp_path / "folder"]


def test_the_temporary_file_keeps_the_suffix(tmp_path):
    with write_beside(tmp_path / "picture.svg") as beside:
        assert beside.suffix == ".svg"
        beside.touch()


def test_a_symbolic_link_stays_and_its_target_is_replaced(tmp_path):
    (tmp_path / "link").symlink_to(tmp_path / "table.json")
    with write_beside(tmp_path / "link") as beside:
        beside.write_text("new")
    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "table.json").read_text() == "new"


def test_a_bare_file_name_is_in_the_current_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with write_beside("table.json") as beside:
        beside.write_text("new")
    assert (tmp_path / "table.json").read_text() == "new"


# ------------------------------------------------------------------ killed processes

KILLED = """
import os, signal
from pathlib import Path
from memlab.internals.files import temporary_folder, write_beside
{block} as beside:
    (beside / "file" if beside.is_dir() else beside).write_text("half")
    os.kill(os.getpid(), signal.SIGKILL)
"""
needs_locks = pytest.mark.skipif(sys.platform == "win32", reason="unfinished files are not locked")


def kill_inside(block: str, **environment: str) -> None:
    """Run a block in a subprocess killed inside it."""
    command = [sys.executable, "-c", KILLED.format(block=block)]
    killed = subprocess.run(command, env={**os.environ, **environment})
    assert killed.returncode == -signal.SIGKILL


@needs_locks
def test_the_next_write_removes_files_of_killed_processes(tmp_path):
    kill_inside(f"with write_beside({str(tmp_path / 'results.json')!r})")
    [orphan] = tmp_path.iterdir()
    assert orphan.read_text() == "half"
    with write_beside(tmp_path / "picture.png") as beside:
        beside.touch()
    assert list(tmp_path.iterdir()) == [tmp_path / "picture.png"]


@needs_locks
def test_a_file_being_written_is_not_an_orphan(tmp_path):
    with write_beside(tmp_path / "one.json") as first, write_beside(tmp_path / "two.json"):
        first.write_text("whole")
    assert (tmp_path / "one.json").read_text() == "whole"


@needs_locks
def test_a_nested_block_keeps_the_outer_lock(tmp_path):
    with write_beside(tmp_path / "one.png") as outer:
        with write_beside(outer) as inner:
            inner.write_text("whole")
        remove_orphans(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["one.png"]
    assert (tmp_path / "one.png").read_text() == "whole"


@needs_locks
def test_hidden_files_of_other_programs_stay(tmp_path):
    names = (".hidden", ".config.json", ".x.12.json", ".x.a-b.json")
    for name in names:
        (tmp_path / name).touch()
    remove_orphans(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(names)


@needs_locks
def test_the_next_temporary_folder_removes_folders_of_killed_processes(tmp_path, monkeypatch):
    (tmp_path / "memlab-mine").mkdir()  # another program's folder: it has no lock
    kill_inside('with temporary_folder("memlab-")', TMPDIR=str(tmp_path))
    assert len(list(tmp_path.iterdir())) == 2
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with temporary_folder("memlab-") as folder:
        assert sorted(tmp_path.iterdir()) == sorted([folder, tmp_path / "memlab-mine"])
        with temporary_folder("memlab-"):
            assert folder.exists()
    assert list(tmp_path.iterdir()) == [tmp_path / "memlab-mine"]


# ------------------------------------------------------------------ on the disk


@pytest.fixture
def calls(monkeypatch):
    """Record each fsync and each rename, in order."""
    found = []
    real_fsync, real_replace = os.fsync, Path.replace

    def fsync(descriptor):
        found.append("folder" if stat.S_ISDIR(os.fstat(descriptor).st_mode) else "file")
        real_fsync(descriptor)

    def replace(path, target):
        found.append("rename")
        return real_replace(path, target)

    monkeypatch.setattr(os, "fsync", fsync)
    monkeypatch.setattr(Path, "replace", replace)
    return found


def test_the_data_is_synced_before_the_rename_and_the_folder_after(tmp_path, calls):
    with write_beside(tmp_path / "table.json") as beside:
        beside.write_text("new")
    assert calls == ["file", "rename", "folder"]


def test_durable_false_skips_fsync(tmp_path, calls):
    with write_beside(tmp_path / "table.json", durable=False) as beside:
        beside.write_text("new")
    assert calls == ["rename"]
