"""A learner's copies are made once and never overwritten or lost."""

import json
from pathlib import Path
from types import SimpleNamespace

import pytest

from memlab.course import days, notebooks, progress, workspace
from memlab.course.workspace import KEPT, NEW, OUTDATED, UNREADABLE

NAME = "day07_test.ipynb"
MINE = '{"cells": [{"cell_type": "code", "source": "mine"}]}'


def lesson_text(source: str = "theirs", **layout: int) -> str:
    cell = {"id": "cell-1", "cell_type": "code", "source": source, "outputs": [], "metadata": {}}
    return json.dumps({"cells": [cell], "metadata": {"kernelspec": {"name": "×"}}}, **layout)


@pytest.fixture
def root(tmp_path, monkeypatch) -> Path:
    """A repository with one day."""
    monkeypatch.setattr(days, "ROOT", tmp_path)
    monkeypatch.setattr(days, "numbers", lambda: [7])
    monkeypatch.setattr(days, "day", one_day)
    (tmp_path / "lessons").mkdir()
    (tmp_path / "lessons" / NAME).write_text(lesson_text(), encoding="utf-8")
    return tmp_path


def one_day(number: int) -> SimpleNamespace:
    if number != 7:
        raise ValueError(f"got day {number}; there is day 7")
    return SimpleNamespace(exercises=())


@pytest.fixture
def copy(root) -> Path:
    """A copy with a learner's edits."""
    workspace.start(7)
    path = root / "work" / NAME
    path.write_text(MINE)
    return path


def files(folder: Path) -> dict[str, str]:
    """List the files below the folder except locks, which stay."""
    return {
        path.relative_to(folder).as_posix(): path.read_text(encoding="utf-8")
        for path in sorted(folder.rglob("*"))
        if path.is_file() and path.suffix != ".lock"
    }


# ------------------------------------------------------------------ start


def test_start_copies_the_lesson_into_work(root):
    copy = workspace.start(7)
    assert (copy.path, copy.state) == (root / "work" / NAME, NEW)
    made = json.loads(copy.path.read_text(encoding="utf-8"))
    assert list(made["metadata"].pop("memlab")) == ["lesson"]
    assert made == json.loads(lesson_text())


def test_start_does_not_change_the_lesson(root):
    workspace.start(7)
    assert (root / "lessons" / NAME).read_text(encoding="utf-8") == lesson_text()


def test_start_makes_a_folder_that_the_gate_recognizes(root):
    workspace.start(7)
    assert progress.read(root / "work") == progress.Progress()
    assert (root / "work" / progress.FILE).exists()


def test_start_keeps_existing_progress(root):
    workspace.start(7)
    progress.update(root / "work", lambda p: progress.note_check(p, "7.1", "ok"))
    before = (root / "work" / progress.FILE).read_bytes()
    workspace.start(7)
    assert (root / "work" / progress.FILE).read_bytes() == before


def test_start_works_below_another_root(root, tmp_path):
    assert workspace.start(7, tmp_path / "a" / "b").path == tmp_path / "a" / "b" / "work" / NAME
    assert workspace.folder(tmp_path) == tmp_path / "work"


def test_an_existing_copy_is_never_overwritten(root):
    first = workspace.start(7)
    before = first.path.read_bytes()
    assert workspace.start(7).state == KEPT
    assert first.path.read_bytes() == before


@pytest.mark.parametrize("text", ["", "{", "[]", '{"cells": []}', "\0"])
def test_an_unreadable_copy_is_kept(copy, text):
    copy.write_text(text)
    assert workspace.start(7).state == UNREADABLE
    assert copy.read_text() == text


def test_a_dangling_link_is_kept(copy, root):
    copy.unlink()
    copy.symlink_to(root / "elsewhere.ipynb")
    assert workspace.start(7).state == UNREADABLE
    assert copy.is_symlink()
    assert not (root / "elsewhere.ipynb").exists()


def test_a_changed_lesson_is_detected(root):
    path = workspace.start(7).path
    before = path.read_bytes()
    (root / "lessons" / NAME).write_text(lesson_text("theirs, better"), encoding="utf-8")
    assert workspace.start(7).state == OUTDATED
    assert path.read_bytes() == before


def test_another_file_layout_is_not_a_change(root):
    workspace.start(7)
    (root / "lessons" / NAME).write_text(lesson_text(indent=4) + "\r\n", encoding="utf-8")
    assert workspace.start(7).state == KEPT


def test_a_copys_lesson_is_known_after_saving_in_jupyter(root):
    path = workspace.start(7).path
    made = json.loads(path.read_text(encoding="utf-8"))
    made["metadata"]["language_info"] = {"name": "python", "version": "3.11.7"}
    made["cells"][0]["source"] = ["mine"]
    path.write_text(json.dumps(made, indent=2))
    assert workspace.start(7).state == KEPT
    (root / "lessons" / NAME).write_text(lesson_text("theirs, better"), encoding="utf-8")
    assert workspace.start(7).state == OUTDATED


@pytest.mark.parametrize("metadata", [None, [], {}, {"memlab": 3}, {"memlab": {}}])
def test_a_copy_without_a_hash_is_kept(copy, metadata):
    cells = json.loads(MINE)["cells"]
    copy.write_text(json.dumps({"cells": cells, "metadata": metadata}))
    assert workspace.start(7).state == KEPT


@pytest.mark.parametrize("command", [workspace.start, workspace.reset, workspace.copy_of])
def test_an_unknown_day_is_refused(root, command):
    with pytest.raises(ValueError, match="got day 8; there is day 7"):
        command(8)
    assert not (root / "work").exists()


@pytest.mark.parametrize("name", [NAME, "day07_other_name"])
def test_an_unreadable_lesson_leaves_the_copy_in_place(copy, root, name):
    (root / "lessons" / NAME).write_text("{")
    (root / "lessons" / NAME).rename(root / "lessons" / name)
    before = files(root / "work")
    with pytest.raises(ValueError, match="notebook"):
        workspace.reset(7)
    assert files(root / "work") == before


# ------------------------------------------------------------------ reset


def test_reset_backs_up_the_copy_and_makes_a_fresh_one(copy, root):
    backup = workspace.reset(7)
    assert backup == root / "work" / "backups" / "day07_test.1.ipynb"
    assert backup.read_text() == MINE
    assert notebooks.code_cells(copy) == ["theirs"]
    assert workspace.start(7).state == KEPT


def test_reset_never_overwrites_a_backup(copy, root):
    backups = root / "work" / "backups"
    backups.mkdir()
    (backups / "day07_test.1.ipynb").write_text("older")
    (backups / "day07_test.3.ipynb").write_text("from somewhere else")
    (backups / "day07_test.2.ipynb").symlink_to("nowhere")
    assert workspace.reset(7) == backups / "day07_test.4.ipynb"
    assert (backups / "day07_test.1.ipynb").read_text() == "older"
    assert (backups / "day07_test.3.ipynb").read_text() == "from somewhere else"
    assert (backups / "day07_test.2.ipynb").is_symlink()
    assert (backups / "day07_test.4.ipynb").read_text() == MINE


@pytest.mark.parametrize("text", ["", "{", "\0"])
def test_reset_backs_up_an_unreadable_copy(copy, text):
    copy.write_text(text)
    assert workspace.reset(7).read_text() == text


def test_reset_of_a_link_keeps_its_target(copy, root):
    copy.rename(root / "elsewhere.ipynb")
    copy.symlink_to(root / "elsewhere.ipynb")
    assert workspace.reset(7).read_text() == MINE
    assert (root / "elsewhere.ipynb").read_text() == MINE
    assert notebooks.code_cells(copy) == ["theirs"]


def test_reset_deletes_only_its_days_progress(copy):
    def note(p: progress.Progress) -> None:
        for id_ in ("7.1", "8.1", "70.1"):
            progress.note_check(p, id_, "ok")
            p.guesses[id_] = {"peak_gib": {"guessed": 1.0}}

    progress.update(copy.parent, note)
    workspace.reset(7)
    kept = progress.read(copy.parent)
    assert list(kept.exercises) == list(kept.guesses) == ["8.1", "70.1"]


def test_reset_without_a_copy_makes_one(root):
    assert workspace.reset(7) is None
    assert notebooks.code_cells(root / "work" / NAME) == ["theirs"]
    assert not (root / "work" / "backups").exists()


@pytest.mark.parametrize("command", [workspace.start, workspace.reset])
def test_unreadable_progress_is_not_lost(copy, root, command):
    (root / "work" / progress.FILE).write_text("half of it")
    command(7)
    progress.read(root / "work")
    assert "half of it" in files(root / "work").values()


# ------------------------------------------------------------------ errors while writing

FULL = OSError(28, "No space left on device")


@pytest.fixture
def failing(monkeypatch):
    """Make writing a notebook fail halfway with the given error."""

    def fail_with(failure: BaseException) -> None:
        write_text = Path.write_text

        def write_half(path: Path, text: str, **how: str) -> None:
            if path.suffix != ".ipynb":
                return write_text(path, text, **how)
            write_text(path, text[: len(text) // 2], **how)
            raise failure

        monkeypatch.setattr(Path, "write_text", write_half)

    return fail_with


@pytest.mark.parametrize("failure", [FULL, KeyboardInterrupt()])
def test_a_copy_is_complete_or_missing(root, failing, failure):
    failing(failure)
    with pytest.raises(type(failure)):
        workspace.start(7)
    assert set(files(root / "work")) <= {progress.FILE}


@pytest.mark.parametrize("failure", [FULL, KeyboardInterrupt()])
def test_a_failed_reset_changes_nothing(copy, failing, failure):
    progress.update(copy.parent, lambda p: progress.note_check(p, "7.1", "ok"))
    before = files(copy.parent)
    failing(failure)
    with pytest.raises(type(failure)):
        workspace.reset(7)
    assert files(copy.parent) == before


def test_a_reset_that_fails_after_the_fresh_copy_keeps_the_old_one(copy, monkeypatch):
    def fail(*arguments):
        raise FULL

    monkeypatch.setattr(progress, "update", fail)
    with pytest.raises(OSError, match="No space left"):
        workspace.reset(7)
    assert (copy.parent / "backups" / "day07_test.1.ipynb").read_text() == MINE


def test_a_folder_that_cannot_be_created_is_an_os_error(root):
    (root / "work").write_text("a file")
    with pytest.raises(OSError, match="work"):
        workspace.start(7)
    assert (root / "work").read_text() == "a file"
