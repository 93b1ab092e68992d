"""Stored GPU results are labelled, and never presented as the reader's own."""

import json
import re
from pathlib import Path

import pytest

from memlab.course.elsewhere import RESULTS, stored_on_a_gpu, time_on_a_gpu

MADE_UP = Path(__file__).parent / "made_up_gpu"
SOLUTIONS = sorted((Path(__file__).parents[2] / "solutions").glob("*.py"))
NONE = "No GPU here, and no GPU's measurement of “peak” (benchmarks/gpu.py) is stored yet."
NONE_OF_A_DAY = "No GPU here, and no GPU's measurement of day 4 is stored yet."
CIRCUMSTANCES = {
    "device": "NVIDIA H200",
    "torch": "2.13.0+cu130",
    "python": "3.11.7",
    "memlab": "0.1.0",
    "date": "2026-11-20",
}
LABEL = (
    "Not your machine: measured on NVIDIA H200, torch 2.13.0+cu130, python 3.11.7, memlab 0.1.0, "
    "2026-11-20"
)


@pytest.fixture
def write(tmp_path):
    """Write a file of results from {section: numbers}."""

    def make(name: str, *, command: str = "gpu", device: str = "NVIDIA H200", **sections) -> None:
        circumstances = CIRCUMSTANCES | {"device": device}
        entries = {section: circumstances | numbers for section, numbers in sections.items()}
        (tmp_path / name).write_text(json.dumps({command: entries}), encoding="utf-8")

    return make


def test_a_measurement_is_labelled_with_device_versions_and_date(tmp_path, write):
    write("h200.json", peak={"peak_bytes": 3 * 2**29, "time_ratio": 1.23456, "steps": 3})
    assert stored_on_a_gpu("peak", tmp_path).splitlines() == [
        LABEL,
        "  peak: 1.50 GiB",
        "  time ratio: 1.23",
        "  steps: 3",
    ]


def test_every_machine_has_its_label_in_file_order(tmp_path, write):
    write("b.json", peak={"steps": 2}, device="second")
    write("a.json", peak={"steps": 1}, device="first")
    first, second = stored_on_a_gpu("peak", tmp_path).split("\n\n")
    assert first == f"{LABEL.replace('NVIDIA H200', 'first')}\n  steps: 1"
    assert second == f"{LABEL.replace('NVIDIA H200', 'second')}\n  steps: 2"


def test_a_section_is_shown_without_the_others(tmp_path, write):
    write("h200.json", peak={"steps": 1}, step={"steps": 2})
    assert stored_on_a_gpu("step", tmp_path) == f"{LABEL}\n  steps: 2"


def test_missing_results_are_one_sentence(tmp_path, write):
    assert stored_on_a_gpu("peak", tmp_path) == NONE
    assert stored_on_a_gpu("peak", tmp_path / "absent") == NONE
    assert stored_on_a_gpu("day 4", tmp_path) == NONE_OF_A_DAY
    write("h200.json", another={"steps": 1})
    write("cpu.json", command="savings", peak={"steps": 1})
    assert stored_on_a_gpu("peak", tmp_path) == NONE


def test_the_repositorys_results_are_readable():
    assert list(RESULTS.glob("*.json"))
    assert stored_on_a_gpu("a section of no benchmark").startswith("No GPU here")


def test_a_verdict_lists_the_time_of_every_gpu(tmp_path, write):
    write("a.json", time={"what": "a step", "bfloat16": 0.123, "autocast": 0.5}, device="first")
    write("b.json", time={"what": "a step", "bfloat16": 2}, device="second")
    assert time_on_a_gpu("bfloat16", tmp_path) == "measured: 0.12 × on first, 2.00 × on second"
    assert time_on_a_gpu("autocast", tmp_path) == "measured: 0.50 × on first"


def test_a_verdict_without_gpu_times_says_so(tmp_path, write):
    write("cpu.json", command="savings", time={"bfloat16": 1})
    assert time_on_a_gpu("bfloat16", tmp_path) == "not measured: no GPU"


@pytest.mark.parametrize("solution", SOLUTIONS, ids=lambda path: path.stem[:5])
def test_the_made_up_gpu_has_results_for_every_section_in_a_day(solution):
    """`make solutions` runs the notebooks with these results: no other output may differ."""
    source = solution.read_text(encoding="utf-8")
    for section in re.findall(r"stored_on_a_gpu\((.+?)\)", source):
        assert "made-up GPU" in stored_on_a_gpu(section.strip('"'), MADE_UP), section
    for technique in re.findall(r"time_on_a_gpu\((.+?)\)", source):
        assert "made-up GPU" in time_on_a_gpu(technique.strip("'\""), MADE_UP), technique
