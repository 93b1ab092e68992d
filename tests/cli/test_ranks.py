"""`memlab measure --ranks`: one rank of R in each stage of ZeRO, against formulas."""

import json

import pytest
import torch

import memlab
from memlab import zero
from memlab.cli.ranks import columns, rows_of
from memlab.model import PRESETS
from memlab.train import Setting, build, combined, rank_step

TINY = Setting("tiny", batch=2, seq_len=16)
N, RANKS = PRESETS["tiny"].parameters, 4
FLOAT32 = 4
COUNTERS = FLOAT32  # AdamW counts the steps of each tensor that it is given


def rows(name: str = "plain", ranks: int = RANKS, setting: Setting = TINY):
    return rows_of(name, setting, combined(name), ranks)


def test_a_rank_holds_weights_gradients_and_state_by_the_papers_formula():
    """And AdamW's counters, and padding; in stages 2 and 3 of each unit."""
    for stage, row in enumerate(rows()):
        float32 = {"parameter_bytes": 4, "gradient_bytes": 4, "optimizer_bytes": 8}
        formula = zero.model_state_bytes(N, ranks=RANKS, stage=stage, **float32)
        assert 0 < row.states_bytes - formula <= COUNTERS * 200


@pytest.mark.slow
def test_of_a_bfloat16_model_with_float32_copies_it_holds_16_bytes_a_weight():
    for stage, row in enumerate(rows("master-weights")):
        formula = zero.model_state_bytes(N, ranks=RANKS, stage=stage)
        assert 0 < row.states_bytes - formula <= COUNTERS * 200


def test_a_rank_sends_what_a_ring_sends_and_in_stage_3_half_as_much_again():
    sent = [row.sent_bytes for row in rows()]
    for stage, found in enumerate(sent):
        formula = zero.communication_bytes(N, ranks=RANKS, stage=stage, element_bytes=FLOAT32)
        assert found == pytest.approx(formula, rel=0.01)  # and padding
    assert sent[3] > 1.49 * sent[0]


@pytest.mark.slow
def test_with_micro_batches_stage_3_gathers_for_each():
    once, twice = (rows(name)[3].sent_bytes for name in ("plain", "accumulation"))
    assert twice == TINY.batch * once


def test_of_one_rank_stage_0_holds_what_the_plain_step_does():
    training = build(TINY, combined("plain"))
    training.step()
    trace = memlab.measure(training.step, model=training.model, optimizer=training.optimizer)
    ours = rows(ranks=1)[0].trace
    for category in ("parameters", "optimizer_state"):
        ours_bytes, wanted = ours.at_end[category], trace.at_end[category]
        assert abs(ours_bytes - wanted) <= COUNTERS * 200, category


def test_what_is_whole_at_the_peak_is_named():
    found = columns(rows())["whole at peak"]
    assert found[:3] == ["", "", ""]
    assert "root" in found[3]


@pytest.mark.slow
def test_dropping_activations_lowers_the_peak_of_every_stage():
    many = Setting("tiny", batch=8, seq_len=64)
    pairs = zip(rows("checkpointing", setting=many), rows(setting=many), strict=True)
    assert all(ours.trace.peak_bytes < plain.trace.peak_bytes for ours, plain in pairs)


@pytest.mark.parametrize("name", ["lion8bit", "adam-mini", "step-in-backward"])
def test_a_technique_that_cannot_be_in_shards_is_one_row_that_says_why(name):
    (row,) = rows(name)
    assert row.trace is None
    assert ";" in row.failure  # what to do


def test_a_rank_steps_with_a_loss_that_is_scaled():
    step = rank_step(TINY, combined("loss-scaling"), RANKS, 2)
    assert step.traces[0].at_end["parameters"] >= FLOAT32 * N


# ------------------------------------------------------------------ the command


def test_the_command_shows_each_stage_and_writes_numbers_and_pictures(memlab_command, tmp_path):
    outcome = memlab_command("measure", "--model", "tiny", "--batch", 2, "--ranks", 4)
    assert outcome.status == 0, outcome
    for stage in range(4):
        assert f"\nstage {stage}  " in outcome.out
    assert "one rank of 4, each with this batch" in outcome.out
    written = json.loads((tmp_path / "work/measure.json").read_text(encoding="utf-8"))
    assert len(written["rows"]) == 4
    assert (tmp_path / "work/measure.png").exists()


@pytest.mark.slow
def test_beside_others_a_technique_that_cannot_be_in_shards_fails_alone(memlab_command):
    names = ("--technique", "plain", "--technique", "lion8bit")
    outcome = memlab_command("measure", "--model", "tiny", "--ranks", 2, *names)
    assert outcome.status == 1
    assert "lion8bit: Lion8bit keeps" in outcome.out
    assert "stage 3  " in outcome.out


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--ranks", 0), "got --ranks 0; wanted a whole number from 1 to 100,000"),
        (("--ranks", 10**6), "got --ranks 1000000; wanted a whole number from 1 to 100,000"),
        (("--ranks", 2, "--device", "cpu"), "got --ranks together with --device; a rank"),
        (
            ("--ranks", 2, "--device", "cpu", "--script", "a.py:b"),
            "got --ranks together with --script and --device",
        ),
        (("--ranks", 2, "--technique", "lion8bit"), "lion8bit: Lion8bit"),
        (("--ranks", 2, "--model", "tinny"), "got --model tinny; did you mean tiny?"),
    ],
)
def test_what_cannot_be_is_one_line(in_one_line, words, message):
    assert in_one_line("measure", *words).startswith(message)


@pytest.mark.slow
def test_nothing_real_is_computed():
    assert rows()[0].trace.dry
    assert torch.zeros(1).device.type == "cpu"  # and the dry run is over
