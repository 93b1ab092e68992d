"""Reading a notebook's cells and first heading without running it."""

import json
from pathlib import Path

import pytest

from memlab.course.notebooks import cells, code_cells, heading, read


@pytest.fixture
def notebook(tmp_path):
    """Write a notebook with a heading and code cells."""

    def write(*sources: str) -> Path:
        found = [{"cell_type": "markdown", "source": ["# The title\n", "text"]}]
        found += [{"cell_type": "code", "source": source} for source in sources]
        path = tmp_path / "day07_test.ipynb"
        path.write_text(json.dumps({"cells": found}), encoding="utf-8")
        return path

    return write


def test_only_code_cells_are_returned_in_order(notebook):
    assert code_cells(notebook("a = 1", "%matplotlib inline\nb = 2")) == [
        "a = 1",
        "%matplotlib inline\nb = 2",
    ]


def test_a_source_may_be_a_list_of_lines(tmp_path):
    path = tmp_path / "a.ipynb"
    path.write_text('{"cells": [{"cell_type": "code", "source": ["a = 1\\n", "b = 2"]}]}')
    assert code_cells(path) == ["a = 1\nb = 2"]


def test_a_notebook_is_read_as_utf_8_with_or_without_a_bom(tmp_path):
    text = '{"cells": [{"cell_type": "code", "source": "a = \'×\'"}]}'
    for encoding in ("utf-8", "utf-8-sig"):
        (tmp_path / "a.ipynb").write_bytes(text.encode(encoding))
        assert code_cells(tmp_path / "a.ipynb") == ["a = '×'"]


@pytest.mark.parametrize(
    ("text", "why"),
    [
        (b"", "Expecting value"),
        (b'{"cells": [', "Expecting value"),
        (b"<<<<<<< HEAD\n{}", "Expecting value"),
        (b"\xff\xfe{}", "codec can't decode"),
        (b"{}", "it has no cells"),
        (b'{"cells": []}', "it has no cells"),
        (b'{"cells": [{"cell_type": "code"}]}', "it has no source"),
        (b'{"cells": ["text"]}', "its structure is not a notebook's"),
        (b'{"cells": [{"cell_type": "code", "source": [1]}]}', "its structure is not"),
        (b'{"cells": [{"cell_type": null, "source": ""}]}', "its structure is not"),
        (b"[1]", "its structure is not a notebook's"),
    ],
)
def test_an_invalid_notebook_is_one_sentence_with_a_remedy(tmp_path, text, why):
    path = tmp_path / "day07_test.ipynb"
    path.write_bytes(text)
    for use in (read, cells, code_cells, heading):
        with pytest.raises(ValueError, match="cannot be read as a notebook") as error:
            use(path)
        [line] = str(error.value).splitlines()
        assert why in line
        assert "`memlab reset`" in line


def test_the_heading_is_the_first_one(notebook):
    assert heading(notebook("# a comment")) == "The title"


def test_a_notebook_may_have_no_heading(tmp_path):
    (tmp_path / "a.ipynb").write_text('{"cells": [{"cell_type": "code", "source": "# a"}]}')
    assert heading(tmp_path / "a.ipynb") == ""
