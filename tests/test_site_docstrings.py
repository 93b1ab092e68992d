"""The API pages show docstrings, which are plain text, as Markdown."""

import runpy
from pathlib import Path

import pytest

pytest.importorskip("griffe", reason="needs the extra `site`")
DOCSTRINGS = runpy.run_path(str(Path(__file__).parents[1] / "site" / "docstrings.py"))


@pytest.mark.parametrize(
    ("plain", "markdown"),
    [
        ("import memlab\n\nprint(1)  # one", "```python\nimport memlab\n\nprint(1)  # one\n```"),
        ("0 < x and *args", "0 &lt; x and \\*args"),
        ("Bytes are *allocated*, not *2 * 3*.", "Bytes are *allocated*, not \\*2 \\* 3\\*."),
        ("Measure.", "Measure."),
    ],
)
def test_a_paragraph_becomes_code_or_prose(plain, markdown):
    assert DOCSTRINGS["markdown"](plain) == markdown


def test_a_name_as_long_as_its_column_is_a_row():
    lines = ["lora       frozen weights", "           and adapters", "zero_stage what is sharded"]
    rows = [("lora", "frozen weights and adapters"), ("zero_stage", "what is sharded")]
    assert DOCSTRINGS["table_rows"](lines) == rows
