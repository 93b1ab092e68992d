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
STEP_COUNTER = FLOAT32  # AdamW keeps a step counter for each tensor


def rows(name: str = "plain", ranks: int = RANKS, setting: Setting = TINY):
    return rows_of(name, setting, combined(name), ranks)


def test_a_rank_holds_the_model_states_of_the_zero_papers_formula():
    """AdamW's counters and padding come on top; stages 2 and 3 pad each unit."""
    for stage, row in enumerate(rows()):
        float32 = {"parameter_bytes": 4, "gradient_bytes": 4, "optimizer_bytes": 8}
        formula = zero.model_state_bytes(N, ranks=RANKS, stage=stage, **float32)
        assert 0 < row.states_bytes - formula <= STEP_COUNTER * 200


@pytest.mark.slow
def test_a_rank_of_a_bfloat16_model_with_float32_copies_holds_16_bytes_per_weight():
    for stage, row in enumerate(rows("master-weights")):
        formula = zero.model_state_bytes(N, ranks=RANKS, stage=stage)
        assert 0 < row.states_bytes - formula <= STEP_COUNTER * 200


def test_a_rank_sends_the_ring_traffic_and_half_as_much_again_in_stage_3():
    sent = [row.sent_bytes for row in rows()]
    for stage, found in enumerate(sent):
        formula = zero.communication_bytes(N, ranks=RANKS, stage=stage, element_bytes=FLOAT32)
        assert found == pytest.approx(formula, rel=0.01)  # the difference is padding
    assert sent[3] > 1.49 * sent[0]


@pytest.mark.slow
def test_stage_3_gathers_for_each_micro_batch():
    once, twice = (rows(name)[3].sent_bytes for name in ("plain", "accumulation"))
    assert twice == TINY.batch * once


def test_stage_0_of_one_rank_holds_what_the_plain_step_holds():
    training = build(TINY, combined("plain"))
    training.step()
    trace = memlab.measure(training.step, model=training.model, optimizer=training.optimizer)
    ours = rows(ranks=1)[0].trace
    for category in ("parameters", "optimizer_state"):
        ours_bytes, wanted = ours.at_end[category], trace.at_end[category]
        assert abs(ours_bytes - wanted) <= STEP_COUNTER * 200, category


def test_units_gathered_at_the_peak_are_named():
    found = columns(rows())["gathered"]
    assert found[:3] == ["", "", ""]
    assert "root" in found[3]


@pytest.mark.slow
def test_checkpointing_lowers_the_peak_of_every_stage():
    many = Setting("tiny", batch=8, seq_len=64)
    pairs = zip(rows("checkpointing", setting=many), rows(setting=many), strict=True)
    assert all(ours.trace.peak_bytes < plain.trace.peak_bytes for ours, plain in pairs)


@pytest.mark.parametrize("name", ["lion8bit", "adam-mini", "step-in-backward"])
def test_a_technique_that_cannot_be_sharded_is_one_row_with_the_reason(name):
    (row,) = rows(name)
    assert row.trace is None
    assert ";" in row.failure  # what to do


def test_a_rank_runs_a_step_with_loss_scaling():
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
def test_a_technique_that_cannot_be_sharded_does_not_stop_the_others(memlab_command):
    names = ("--technique", "plain", "--technique", "lion8bit")
    outcome = memlab_command("measure", "--model", "tiny", "--ranks", 2, *names)
    assert outcome.status == 1
    assert "lion8bit: Lion8bit keeps" in outcome.out
    assert "stage 3  " in outcome.out


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--ranks", 0), "got --ranks 0; expected an integer from 1 to 100,000"),
        (("--ranks", 10**6), "got --ranks 1000000; expected an integer from 1 to 100,000"),
        (("--ranks", 2, "--device", "cpu"), "got --ranks together with --device; a rank"),
        (
            ("--ranks", 2, "--device", "cpu", "--script", "a.py:b"),
            "got --ranks together with --script and --device",
        ),
        (("--ranks", 2, "--technique", "lion8bit"), "lion8bit: Lion8bit"),
        (("--ranks", 2, "--model", "tinny"), "got --model tinny; did you mean tiny?"),
    ],
)
def test_bad_input_is_one_line(usage_error, words, message):
    assert usage_error("measure", *words).startswith(message)


@pytest.mark.slow
def test_ranks_are_measured_by_a_dry_run():
    assert rows()[0].trace.dry
    assert torch.zeros(1).device.type == "cpu"  # the dry run has ended
