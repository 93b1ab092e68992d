"""A learner's progress is never lost."""

import json
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest

from memlab.course import progress
from memlab.course.exercises import NOT_ATTEMPTED, OK, WRONG
from memlab.course.progress import (
    FILE,
    VERSION,
    ExerciseProgress,
    Progress,
    note_check,
    read,
    update,
)

GUESSES = {"1.1": {"peak_gib": {"guessed": 2.0, "measured": 4.5}, "live_mib": {"guessed": 1.0}}}


def full() -> Progress:
    return Progress(
        {"1.1": ExerciseProgress(OK, checks=3, hints=1), "1.2": ExerciseProgress(hints=2)}, GUESSES
    )


def fill(p: Progress) -> None:
    p.exercises, p.guesses = full().exercises, full().guesses


def files(folder) -> list[str]:
    """List the files except the lock."""
    return sorted(path.name for path in folder.iterdir() if path.suffix != ".lock")


def plain(**changed) -> str:
    whole = {"version": 1, "exercises": {}, "guesses": {}}
    return json.dumps(whole | changed)


# ------------------------------------------------------------------ round trip


def test_written_progress_is_read_back(tmp_path):
    assert update(tmp_path, fill) == full()
    assert read(tmp_path) == full()
    assert files(tmp_path) == [FILE]


def test_the_files_exact_content(tmp_path):
    update(tmp_path, lambda p: note_check(p, "1.1", OK))
    assert (tmp_path / FILE).read_text(encoding="utf-8") == (
        '{\n "version": 2,\n "records": [\n'
        '  ["3120cd86", ["exercise", "1.1", {"status": "ok", "checks": 1, "hints": 0}]]\n ]\n}\n'
    )


def test_a_file_of_version_1_is_read_and_written_as_version_2(tmp_path, capsys):
    exercises = {id_: vars(record) for id_, record in full().exercises.items()}
    write(tmp_path, plain(exercises=exercises, guesses=GUESSES))
    assert read(tmp_path) == full()
    assert update(tmp_path, lambda p: None) == full()
    assert json.loads((tmp_path / FILE).read_text())["version"] == VERSION
    assert capsys.readouterr().out == ""


def test_a_flipped_bit_loses_at_most_its_own_record(tmp_path):
    update(tmp_path, fill)
    content = (tmp_path / FILE).read_bytes()
    records = [*full().exercises.items(), *full().guesses.items()]
    for at in range(len(content)):
        (tmp_path / FILE).write_bytes(
            content[:at] + bytes([content[at] ^ 1 << at % 8]) + content[at + 1 :]
        )
        found = read(tmp_path)
        kept = [*found.exercises.items(), *found.guesses.items()]
        assert len(kept) >= len(records) - (2 if content[at : at + 1] == b"\n" else 1)
        assert all(record in records for record in kept)
        (tmp_path / "progress.unreadable-1.json").unlink()


def test_a_damaged_file_is_kept_and_the_sentence_says_what_was_read(tmp_path, capsys):
    update(tmp_path, fill)
    damaged = (tmp_path / FILE).read_text().replace('"hints": 2', '"hints": 3')
    (tmp_path / FILE).write_text(damaged)
    wanted = full()
    del wanted.exercises["1.2"]
    assert read(tmp_path) == read(tmp_path) == wanted
    assert (tmp_path / "progress.unreadable-1.json").read_text() == damaged
    assert capsys.readouterr().out == (
        "progress.json was damaged; it was renamed to progress.unreadable-1.json. A new file has "
        "the 2 records that could be read\n"
    )


def test_without_a_file_progress_is_empty_and_no_file_is_created(tmp_path):
    assert read(tmp_path) == Progress()
    assert list(tmp_path.iterdir()) == []


def test_an_update_changes_existing_progress(tmp_path):
    update(tmp_path, fill)
    update(tmp_path, lambda p: note_check(p, "1.3", WRONG))
    wanted = full()
    wanted.exercises["1.3"] = ExerciseProgress(WRONG, checks=1)
    assert read(tmp_path) == wanted


# ------------------------------------------------------------------ records


@pytest.mark.parametrize(
    ("statuses", "stands"),
    [
        ([NOT_ATTEMPTED], NOT_ATTEMPTED),
        ([NOT_ATTEMPTED, WRONG], WRONG),
        ([WRONG, NOT_ATTEMPTED], NOT_ATTEMPTED),
        ([WRONG, OK], OK),
        ([OK, WRONG], OK),
        ([WRONG, OK, NOT_ATTEMPTED, WRONG], OK),
    ],
)
def test_a_solved_exercise_stays_solved(statuses, stands):
    done = Progress()
    for status in statuses:
        note_check(done, "1.1", status)
    attempts = len(statuses) - statuses.count(NOT_ATTEMPTED)
    assert done.exercises == {"1.1": ExerciseProgress(stands, checks=attempts)}


def test_deleting_a_day_leaves_the_others():
    ids = ("1.1", "1.12", "11.1", "2.1")
    done = Progress({id_: ExerciseProgress(OK) for id_ in ids}, {id_: {} for id_ in ids})
    done.forget(1)
    assert list(done.exercises) == list(done.guesses) == ["11.1", "2.1"]


# ------------------------------------------------------------------ unreadable files

UNREADABLE = {
    "empty": "",
    "half a file": plain()[:20],
    "no text": "\ud800",
    "a list": "[]",
    "a number": "1",
    "nothing": "null",
    "no version": json.dumps({"exercises": {}, "guesses": {}}),
    "another version": plain(version=VERSION + 1),
    "no guesses": json.dumps({"version": 1, "exercises": {}}),
    "exercises in a list": plain(exercises=[]),
    "a word as record": plain(exercises={"1.1": "ok"}),
    "a record with more in it": plain(exercises={"1.1": {"stars": 5}}),
    "a number as status": plain(exercises={"1.1": {"status": 1}}),
    "checks in words": plain(exercises={"1.1": {"checks": "three"}}),
    "no hints": plain(exercises={"1.1": {"hints": None}}),
    "guesses in a list": plain(guesses=[]),
    "a guess without its quantity": plain(guesses={"1.1": 2}),
    "a number as guess": plain(guesses={"1.1": {"peak_gib": 2}}),
    "a guess of nothing": plain(guesses={"1.1": {"peak_gib": {"guessed": None}}}),
    "a guess in words": plain(guesses={"1.1": {"peak_gib": {"guessed": "two"}}}),
    "measured, not guessed": plain(guesses={"1.1": {"peak_gib": {"measured": 2}}}),
    "measured in words": plain(guesses={"1.1": {"peak_gib": {"guessed": 2, "measured": ""}}}),
}
unreadable = pytest.mark.parametrize("text", UNREADABLE.values(), ids=UNREADABLE)


def write(folder, text: str) -> bytes:
    (folder / FILE).write_text(text, encoding="utf-8", errors="surrogatepass")
    return (folder / FILE).read_bytes()


@unreadable
def test_an_unreadable_file_is_renamed_and_a_new_one_started(tmp_path, capsys, text):
    unread = write(tmp_path, text)
    assert read(tmp_path) == Progress()
    assert (tmp_path / "progress.unreadable-1.json").read_bytes() == unread
    assert (tmp_path / FILE).read_text(encoding="utf-8").startswith('{\n "version": 2,')
    assert capsys.readouterr().out == (
        "progress.json was damaged; it was renamed to progress.unreadable-1.json. A new file has "
        "nothing\n"
    )


@unreadable
def test_an_update_of_an_unreadable_file_starts_a_new_one(tmp_path, text):
    unread = write(tmp_path, text)
    assert update(tmp_path, fill) == read(tmp_path) == full()
    assert (tmp_path / "progress.unreadable-1.json").read_bytes() == unread


def test_every_unreadable_file_is_kept(tmp_path):
    for number in range(3):
        write(tmp_path, f"file {number}")
        read(tmp_path)
    kept = [tmp_path / f"progress.unreadable-{number}.json" for number in (1, 2, 3)]
    assert [path.read_text() for path in kept] == ["file 0", "file 1", "file 2"]
    assert files(tmp_path) == [FILE, *(path.name for path in kept)]


def test_a_file_is_not_renamed_after_an_os_error(tmp_path):
    (tmp_path / FILE).mkdir()
    with pytest.raises(OSError, match=FILE):
        read(tmp_path)
    assert files(tmp_path) == [FILE]


# ------------------------------------------------------------------ concurrency


@pytest.fixture
def many_turns():
    """Switch threads after every few instructions."""
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(interval)


def test_concurrent_updates_lose_nothing(tmp_path, many_turns):
    ids = [f"1.{number}" for number in range(40)]
    with ThreadPoolExecutor(8) as threads:
        list(threads.map(lambda id_: update(tmp_path, lambda p: note_check(p, id_, OK)), ids))
    assert read(tmp_path).exercises == {id_: ExerciseProgress(OK, checks=1) for id_ in ids}


def test_concurrent_checks_of_one_exercise_are_all_counted(tmp_path, many_turns):
    with ThreadPoolExecutor(8) as threads:
        for _ in range(40):
            threads.submit(update, tmp_path, lambda p: note_check(p, "1.1", WRONG))
    assert read(tmp_path).exercises == {"1.1": ExerciseProgress(WRONG, checks=40)}


def test_concurrent_reads_rename_a_file_once(tmp_path, many_turns):
    write(tmp_path, "half of it")
    with ThreadPoolExecutor(8) as threads:
        found = list(threads.map(read, [tmp_path] * 8))
    assert found == [Progress()] * 8
    assert files(tmp_path) == [FILE, "progress.unreadable-1.json"]


def test_a_file_repaired_in_the_meantime_is_not_renamed(tmp_path, monkeypatch):
    write(tmp_path, "half of it")
    lock = progress.FileLock

    def another_was_faster(path):
        (tmp_path / FILE).unlink()
        monkeypatch.setattr(progress, "FileLock", lock)
        update(tmp_path, fill)
        return lock(path)

    monkeypatch.setattr(progress, "FileLock", another_was_faster)
    assert read(tmp_path) == full()
    assert files(tmp_path) == [FILE]


# ------------------------------------------------------------------ whole or not at all


def test_a_change_that_raises_leaves_the_file_unchanged(tmp_path):
    def half(p: Progress) -> None:
        p.exercise("1.1").checks += 1
        raise KeyboardInterrupt

    update(tmp_path, fill)
    before = (tmp_path / FILE).read_bytes()
    with pytest.raises(KeyboardInterrupt):
        update(tmp_path, half)
    assert (tmp_path / FILE).read_bytes() == before
    assert files(tmp_path) == [FILE]


@pytest.mark.parametrize("failure", [OSError, KeyboardInterrupt])
def test_a_failure_while_writing_leaves_the_file_unchanged(tmp_path, monkeypatch, failure):
    def write_half(path, text, **how):
        path.write_bytes(text[: len(text) // 2].encode())
        raise failure

    update(tmp_path, fill)
    before = (tmp_path / FILE).read_bytes()
    monkeypatch.setattr(type(tmp_path), "write_text", write_half)
    with pytest.raises(failure):
        update(tmp_path, lambda p: note_check(p, "1.1", WRONG))
    assert (tmp_path / FILE).read_bytes() == before
    assert files(tmp_path) == [FILE]


def test_unserializable_progress_leaves_the_file_unchanged(tmp_path):
    update(tmp_path, fill)
    with pytest.raises(TypeError):
        update(tmp_path, lambda p: p.guesses.update({"1.3": {"peak_gib": {"guessed": ...}}}))
    assert read(tmp_path) == full()


def test_an_update_works_after_a_failed_one(tmp_path):
    with pytest.raises(ZeroDivisionError):
        update(tmp_path, lambda p: 1 / 0)
    assert update(tmp_path, fill) == read(tmp_path) == full()
