"""docs/SAVINGS.md: its bytes are measured and predicted again."""

import re
from dataclasses import replace
from pathlib import Path

import pytest
from quick import quick

from memlab.cli.choices import SUITABLE, choose_techniques
from memlab.cli.requests import Request
from memlab.cli.rows import dry_row
from memlab.train import predicted_trace
from memlab.units import format_bytes

PAGE = (Path(__file__).parents[1] / "docs" / "SAVINGS.md").read_text(encoding="utf-8")
ON_CUDA = {
    name: (allocated, reserved)
    for name, allocated, reserved in re.findall(
        r"^\| ([a-z0-9+-]+)(?:: .*)? \|.*\| ([0-9.]+ [KMG]iB) \| ([0-9.]+ [KMG]iB) \|$",
        PAGE,
        re.M,
    )
}
CHOSEN = choose_techniques(Request())
ROWS = dict(re.findall(r"^\| ([a-z0-9+-]+)(?:: [^|]*)? \| ([0-9.]+ [KMG]iB) \|", PAGE, re.M))


# One technique for each kind of plug, with few operators.
PREDICTED = quick(("plain", "checkpointing", "chunked-loss", "autocast", "sgd"), CHOSEN)


def test_the_page_has_a_row_for_each_technique():
    assert list(ROWS) == list(CHOSEN)


@pytest.mark.few(1)
@pytest.mark.parametrize("name", PREDICTED)
def test_the_pages_peak_equals_a_dry_run(name):
    trace = dry_row(SUITABLE["cpu"], name, CHOSEN[name]).trace
    assert ROWS[name] == format_bytes(trace.peak_bytes)


@pytest.mark.few(1)
@pytest.mark.parametrize("name", PREDICTED)
def test_the_pages_bytes_on_cuda_equal_a_prediction(name):
    trace = predicted_trace(replace(SUITABLE["cpu"], device="cuda"), CHOSEN[name])
    expected = format_bytes(trace.allocated_bytes), format_bytes(trace.reserved_bytes)
    assert ON_CUDA[name] == expected
