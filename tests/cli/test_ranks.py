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


@pytest.mark.slow
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
            ("--ranks", 2, "--script", "a.py:b"),
            "got --script together with --ranks; several ranks are predicted, so add --dry-run",
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


# ------------------------------------------------------------------ the user's own script

FSDP2 = """
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard


def build(batch=8):
    dist.init_process_group()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = nn.Sequential(*[nn.Linear(512, 512) for _ in range(4)]).to(device)
    for layer in model:
        fully_shard(layer)
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters())

    def step():
        model(torch.randn(batch, 512, device=device)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    return step, model, optimizer


if __name__ == "__main__":
    step, *_ = build()
    for _ in range(3):
        step()
"""


@pytest.mark.slow
@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_a_functions_rank_has_the_bytes_that_the_whole_script_has(tmp_path, memlab_command, device):
    (tmp_path / "train.py").write_text(FSDP2)

    def written(name, *words):
        outcome = memlab_command(*words)
        assert outcome.status == 0, outcome.err
        return json.loads((tmp_path / "work" / name).read_text())

    def at_peak(name, *words):
        held = written(name, *words)["rows"][0]["at_peak"]
        held.pop("inputs")  # a function's closure holds more scalars
        return held

    on = ("--device", device)
    whole = at_peak("run.json", "run", *on, "--ranks", 4, "--rank", 0, "train.py")
    layer = 4 * (512 * 512 + 512)
    assert whole["parameters"] == 4 * layer // 4 + layer  # the shards, and a gathered layer
    function = ("--script", "train.py:build", *on)
    assert at_peak("measure.json", "measure", *function, "--dry-run", "--ranks", 4) == whole
    if device == "cuda":
        planned = written("plan.json", "plan", *function, "--gpus", 4, "--memory", "8GiB")
        measured = json.loads((tmp_path / "work" / "measure.json").read_text())["rows"][0]
        assert planned["gpus"] == 4
        assert planned["options"][0]["allocated_bytes"] == measured["allocated_bytes"]


def test_a_distributed_function_without_ranks_is_told_so(tmp_path, usage_error):
    (tmp_path / "train.py").write_text(FSDP2)
    words = ("measure", "--script", "train.py:build", "--dry-run")
    assert "add --ranks" in usage_error(*words)
