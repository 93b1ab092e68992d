"""The API pages show docstrings, which are plain text, as Markdown."""

import runpy
from pathlib import Path

import pytest

pytest.importorskip("griffe", reason="needs the extra `site`")
paragraph = runpy.run_path(str(Path(__file__).parents[1] / "site" / "docstrings.py"))["paragraph"]


@pytest.mark.parametrize(
    ("plain", "markdown"),
    [
        ("    import memlab\n    print(1)", "```python\nimport memlab\nprint(1)\n```"),
        ("Saves    four bytes\nCosts    time", "```text\nSaves    four bytes\nCosts    time\n```"),
        ("0 < x and *args", "0 &lt; x and \\*args"),
        ("Bytes are *allocated*, not *2 * 3*.", "Bytes are *allocated*, not \\*2 \\* 3\\*."),
        ("Args:\n    loss: a scalar", "Args:\n    loss: a scalar"),
        ("Measure `a[0]`.", "Measure `a[0]`."),
    ],
)
def test_a_paragraph_becomes_code_or_prose(plain, markdown):
    assert paragraph(plain) == markdown
