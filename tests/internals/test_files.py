"""A file is as it was, or whole and new; nothing is left beside it."""

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


def test_the_file_is_as_it_was_until_the_block_ends(tmp_path):
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
def test_a_failure_leaves_the_file_as_it_was(tmp_path, failure):
    path = tmp_path / "table.json"
    path.write_text("old")
    with pytest.raises(failure):
        write_half(path, failure)
    assert path.read_text() == "old"


@pytest.mark.parametrize("failure", [ValueError, KeyboardInterrupt])
def test_a_failure_makes_no_file_where_none_was(tmp_path, failure):
    with pytest.raises(failure):
        write_half(tmp_path / "table.json", failure)
    assert list(tmp_path.iterdir()) == []


def test_nothing_is_left_beside_the_file(tmp_path):
    with write_beside(tmp_path / "table.json") as beside:
        beside.write_text("new")
    assert list(tmp_path.iterdir()) == [tmp_path / "table.json"]


def test_a_file_that_cannot_be_replaced_leaves_nothing_beside_it(tmp_path):
    (tmp_path / "folder").mkdir()
    with pytest.raises(OSError, match="folder"), write_beside(tmp_path / "folder") as beside:
        beside.touch()
    assert list(tmp_path.iterdir()) == [tmp_path / "folder"]


def test_what_is_written_has_the_suffix_that_tells_its_format(tmp_path):
    with write_beside(tmp_path / "picture.svg") as beside:
        assert beside.suffix == ".svg"
        beside.touch()


def test_a_link_stays_a_link_to_what_was_written(tmp_path):
    (tmp_path / "link").symlink_to(tmp_path / "table.json")
    with write_beside(tmp_path / "link") as beside:
        beside.write_text("new")
    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "table.json").read_text() == "new"


def test_a_file_in_the_current_folder_needs_no_folder_in_its_name(tmp_path, monkeypatch):
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
    """Run a block in a process of its own that is killed in it."""
    command = [sys.executable, "-c", KILLED.format(block=block)]
    killed = subprocess.run(command, env={**os.environ, **environment})
    assert killed.returncode == -signal.SIGKILL


@needs_locks
def test_what_a_killed_process_left_is_removed_by_the_next_write_in_the_folder(tmp_path):
    kill_inside(f"with write_beside({str(tmp_path / 'results.json')!r})")
    [orphan] = tmp_path.iterdir()
    assert orphan.read_text() == "half"
    with write_beside(tmp_path / "picture.png") as beside:
        beside.touch()
    assert list(tmp_path.iterdir()) == [tmp_path / "picture.png"]


@needs_locks
def test_a_file_that_is_being_written_is_not_taken_for_an_orphan(tmp_path):
    with write_beside(tmp_path / "one.json") as first, write_beside(tmp_path / "two.json"):
        first.write_text("whole")
    assert (tmp_path / "one.json").read_text() == "whole"


@needs_locks
def test_a_block_inside_a_block_keeps_the_lock_of_the_outer_one(tmp_path):
    with write_beside(tmp_path / "one.png") as outer:
        with write_beside(outer) as inner:
            inner.write_text("whole")
        remove_orphans(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["one.png"]
    assert (tmp_path / "one.png").read_text() == "whole"


@needs_locks
def test_files_of_others_whose_names_begin_with_a_dot_stay(tmp_path):
    names = (".hidden", ".config.json", ".x.12.json", ".x.a-b.json")
    for name in names:
        (tmp_path / name).touch()
    remove_orphans(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(names)


@needs_locks
def test_the_temporary_folder_of_a_killed_process_is_removed_by_the_next_of_its_kind(
    tmp_path, monkeypatch
):
    (tmp_path / "memlab-mine").mkdir()  # somebody's own: it has no lock
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
    """Each fsync and each renaming, in order: what it was of."""
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


def test_data_is_on_the_disk_before_the_name_and_the_name_before_it_returns(tmp_path, calls):
    with write_beside(tmp_path / "table.json") as beside:
        beside.write_text("new")
    assert calls == ["file", "rename", "folder"]


def test_what_ends_with_the_process_is_not_forced_to_the_disk(tmp_path, calls):
    with write_beside(tmp_path / "table.json", durable=False) as beside:
        beside.write_text("new")
    assert calls == ["rename"]
