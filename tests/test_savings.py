"""The README's table of savings: its bytes are measured anew, its times are said to be measured."""

import re
from pathlib import Path

import pytest

from memlab.cli.choices import SUITABLE
from memlab.cli.rows import dry_row
from memlab.train import TECHNIQUES
from memlab.units import format_bytes

README = (Path(__file__).parents[1] / "README.md").read_text(encoding="utf-8")
ROWS = dict(re.findall(r"^\| ([a-z-]+): [^|]*\| ([0-9.]+ [KMG]iB) \|", README, re.M))


def test_the_readme_has_a_row_for_each_technique():
    assert list(ROWS) == list(TECHNIQUES)


@pytest.mark.parametrize("name", TECHNIQUES)
def test_the_readmes_peak_is_what_a_dry_run_measures(name):
    trace = dry_row(SUITABLE["cpu"], name, TECHNIQUES[name]).trace
    assert ROWS[name] == format_bytes(trace.peak_bytes)
