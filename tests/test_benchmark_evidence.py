"""Tests of benchmarks/evidence.py: predictions beside other people's measurements."""

import pytest
from scripts import script

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning")  # of transformers
evidence = script("evidence")
RUNS = {name: (name, shape, entry) for name, shape, entry in evidence.runs()}


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_a_lora_step_on_a_t4_is_predicted_exactly(attention):
    row = evidence.predicted(*RUNS[f"SmolLM2-135M, {attention}, fp16, 2 × 512"])
    assert row.allocated == row.measured_allocated
    assert row.reserved == row.measured_reserved


def test_a_four_bit_step_on_a_t4_is_predicted_within_a_thousandth():
    row = evidence.predicted(*RUNS["SmolLM2-135M, sdpa, nf4, 2 × 512"])
    assert row.kind == "QLoRA"
    assert row.allocated == pytest.approx(row.measured_allocated, rel=1e-3)


def test_a_summary_has_the_median_and_the_worst_error_of_each_kind():
    rows = [
        evidence.EvidenceRow("a", "LoRA", 100, 200, 100, 210),
        evidence.EvidenceRow("b", "LoRA", 100, 200, 98, 200),
        evidence.EvidenceRow("c", "LoRA", 100, 200, 101, 200),
        evidence.EvidenceRow("d", "QLoRA", 100, 200, 100, 100),
    ]
    found = evidence.summary(rows)
    assert found["LoRA, allocated"] == {
        "rows": 3,
        "median": pytest.approx(0.01),
        "worst": pytest.approx(0.02),
    }
    assert found["QLoRA, reserved"]["worst"] == 0.5


def test_an_unknown_name_is_one_line(capsys):
    assert evidence.main(["--only", "GPT-9"]) == 2
    assert capsys.readouterr().err == "error: no step has 'GPT-9' in its name\n"
