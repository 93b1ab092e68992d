"""A file is as it was, or whole and new; nothing is left beside it."""

import pytest

from memlab.files import write_beside


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
