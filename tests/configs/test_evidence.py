"""Tests of memlab/configs/evidence.py: the errors that predictions report."""

import json

import pytest

from memlab.configs import evidence
from memlab.configs.evidence import accuracy, doubt, errors, margin_share


def write(folder, monkeypatch, lowest):
    of = {"rows": 3, "lowest": lowest, "highest": 0.004}
    kinds = {"transformers": {"allocated": {**of, "lowest": 0, "highest": 0}, "reserved": of}}
    path = folder / "evidence.json"
    path.write_text(json.dumps({"kinds": kinds, "kernels": []}))
    monkeypatch.setattr(evidence, "_FILE", path)
    evidence._written.cache_clear()


@pytest.fixture(autouse=True)
def forgotten():
    yield
    evidence._written.cache_clear()


@pytest.mark.parametrize("kind", ["transformers", "4-bit weights", "convolutions"])
def test_every_kind_of_step_has_measured_rows(kind):
    assert errors(kind)["reserved"].rows > 10


def test_a_kind_without_measured_rows_is_named():
    note = "no step of this kind (quantum layers) has been measured on a GPU yet"
    assert accuracy("quantum layers") == note


def test_transformers_are_allocated_within_three_thousandths():
    allocated = errors("transformers")["allocated"]
    assert allocated.rows >= 14
    assert max(-allocated.lowest, allocated.highest) < 0.003


def test_the_accuracy_is_one_sentence(tmp_path, monkeypatch):
    write(tmp_path, monkeypatch, -0.0031)
    assert accuracy("transformers") == (
        "compared with GPU measurements, transformers: allocated exact in all 3 steps; reserved up "
        "to 0.31% too low and 0.40% too high in 3 steps; see EVIDENCE.md"
    )


@pytest.mark.parametrize(("lowest", "share"), [(-0.0031, 0.004), (-0.003, 0.003), (0, 0)])
def test_the_margin_covers_the_largest_need_above_a_prediction(
    lowest, share, tmp_path, monkeypatch
):
    write(tmp_path, monkeypatch, lowest)
    assert margin_share() == share


def test_a_kind_that_needed_more_than_the_margin_is_doubted():
    kind, times = doubt(["a note", accuracy("convolutions")])
    assert (kind, times > 1.2) == ("convolutions", True)
    assert doubt([accuracy("transformers")]) is None
    assert doubt([]) is None
