"""`torchrun … -m memlab train --zero`: real ranks against one process, and against predictions."""

import os
import re
import shlex
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from in_ranks_of_train import PEAKS, setting_of

from memlab.cli import steps
from memlab.cli import train_rank as command
from memlab.cli.torchrun import Rank, interruptible
from memlab.cli.train_rank import Peak, format_peaks
from memlab.data import batches, source_bytes
from memlab.planner.options import command as command_of
from memlab.planner.recipes import Recipe
from memlab.train import SEED, build, combined, rank_step
from memlab.units import format_bytes
from memlab.zero.launch import run_ranks

SMALL = ("train", "--model", "tiny", "--batch", "2", "--seq", "16", "--steps", "3")
PLANNED = Recipe("master-weights", checkpointing="checkpointing", zero_stage=2)
WORK = {
    **{f"stage {stage}": (*SMALL, "--zero", str(stage)) for stage in range(4)},
    "accumulated": (*SMALL, "--zero", "2", "--technique", "accumulation+chunked-loss"),
    "planned": tuple(
        shlex.split(
            command_of(SimpleNamespace(model="tiny", gpus=2, batch=1, seq_len=16), PLANNED)
        )[5:]
    ),
}
WRONG = {
    "optimizer": (*SMALL, "--zero", "1", "--technique", "lion8bit"),
    "stepping": (*SMALL, "--zero", "0", "--technique", "step-in-backward"),
    "ranks": (*SMALL, "--zero", "1", "--ranks", "4"),
    "no stage": SMALL,
    "stage": (*SMALL, "--zero", "4"),
    "device": (*SMALL, "--zero", "1", "--device", "cuda"),
}
COMMANDS = WORK | WRONG


@pytest.fixture(scope="module")
def two():
    """Run all commands in two ranks, in one launch."""
    target = f"{Path(__file__).with_name('in_ranks_of_train.py')}:everything"
    return run_ranks(target, 2, [list(words) for words in COMMANDS.values()])


def outcomes(two, name):
    """Return (status, output, errors) of a command in each rank."""
    place = list(COMMANDS).index(name)
    return [rank["commands"][place] for rank in two]


def losses(printed):
    return [float(loss) for loss in re.findall(r"^step +\d+: loss ([\d.]+)$", printed, re.M)]


def losses_of_one_process(ranks):
    """Return the losses of steps that accumulate the gradients of all ranks' batches."""
    training = build(setting_of("float32"), combined("plain"))
    texts = [batches(source_bytes(steps.TEXT), 2, 16, SEED + rank) for rank in range(ranks)]
    found = []
    for _ in range(3):
        training.optimizer.zero_grad()
        of_ranks = [training.model(*next(text)) / ranks for text in texts]
        sum(of_ranks).backward()
        training.optimizer.step()
        found.append(sum(of_ranks).item())
    return found


# ------------------------------------------------------------------ the training


@pytest.mark.few(1)
@pytest.mark.parametrize("name", [*(f"stage {stage}" for stage in range(4)), "accumulated"])
def test_the_losses_are_those_of_one_process_with_the_batches_of_all_ranks(two, name):
    (status, out, err), _ = outcomes(two, name)
    assert (status, err) == (0, "")
    assert losses(out) == pytest.approx(losses_of_one_process(2), abs=2e-4)


def test_ranks_have_different_batches():
    assert losses_of_one_process(2) != pytest.approx(losses_of_one_process(1), abs=2e-3)


@pytest.mark.parametrize("name", WORK)
def test_only_rank_0_prints(two, name):
    (status, out, _), second = outcomes(two, name)
    assert status == 0
    assert re.search(r"^step +1: loss", out, re.M)
    assert second == (0, "", "")


@pytest.mark.few(1)
@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize(("names", "dtype"), PEAKS)
def test_a_real_rank_peaks_at_the_predicted_bytes(two, names, dtype, stage):
    """Equal in every category. gloo's own copies are counted on neither side."""
    [trace] = rank_step(setting_of(dtype), combined(names), 2, stage).traces
    for rank in two:
        assert rank["peaks"][names, stage] == trace.at_peak


@pytest.mark.few(1)
@pytest.mark.parametrize("stage", range(4))
def test_the_printed_peak_is_the_predicted_one(two, stage):
    [trace] = rank_step(setting_of("float32"), combined("plain"), 2, stage).traces
    printed = outcomes(two, f"stage {stage}")[0][1]
    peak = format_bytes(trace.peak_bytes)
    assert f"\npeak: {peak} on each rank, measured in one more step\n" in printed
    assert f"\npredicted: {peak} for a rank, by a dry run\n" in printed


def test_the_peak_per_rank_falls_with_the_stage(two):
    found = [sum(two[0]["peaks"]["plain", stage].values()) for stage in (1, 2, 3)]
    assert found == sorted(set(found), reverse=True)


def test_the_command_of_a_plan_trains_with_its_recipe(two):
    (status, out, err), _ = outcomes(two, "planned")
    assert (status, err) == (0, "")
    assert "tiny, 1 × 16 tokens, bfloat16, cpu\n" in out
    assert f"\ntechnique: {PLANNED.techniques}\n" in out
    assert "\n2 ranks, each with this batch; ZeRO stage 2: sharded gradients too\n" in out


# ------------------------------------------------------------------ the output


def test_peaks_that_differ_are_a_range_with_their_ranks():
    peaks = [Peak(3 * 2**20), Peak(2**20), Peak(2 * 2**20)]
    assert format_peaks(peaks) == (
        "1.00 MiB (rank 1) to 3.00 MiB (rank 0), measured in one more step"
    )
    on_cuda = [Peak(2**20, 4 * 2**20), Peak(2**20, 5 * 2**20)]
    assert format_peaks(on_cuda) == (
        "1.00 MiB on each rank allocated, 4.00 MiB (rank 0) to 5.00 MiB (rank 1) reserved"
    )


# ------------------------------------------------------------------ errors


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("optimizer", "got a technique that does not work with --zero: Lion8bit keeps"),
        ("stepping", "got a technique that does not work with --zero: gradients are freed"),
        ("ranks", "got 2 processes for a recipe of --ranks 4, whose"),
        ("no stage", "got 2 processes from torchrun without --zero; give the stage"),
        ("stage", "got --zero 4; expected an integer from 0 to 3"),
        ("device", "got --device cuda; this machine has cpu"),
    ],
)
def test_bad_input_is_one_sentence_of_rank_0_and_a_status_of_all(two, name, words):
    if name == "device" and torch.cuda.is_available():
        pytest.skip("this machine has CUDA")
    (status, out, err), second = outcomes(two, name)
    assert (status, out) == (2, "")
    [line] = err.splitlines()
    assert line.startswith(f"memlab: {words}")
    assert second == (2, "", "")


def test_without_torchrun_the_sentence_has_its_command(usage_error):
    words = ("train", "--model", "tiny", "--zero", "3")
    assert usage_error(*words, "--ranks", "16").endswith(
        "torchrun --nnodes 2 --rdzv-backend c10d --rdzv-endpoint HOST:29500 --nproc-per-node 8 -m "
        "memlab train --model tiny --zero 3 --ranks 16"
    )
    assert usage_error(*words) == (
        "got --zero 3 in a single process; start one process for each GPU, or several on the CPU: "
        "torchrun --nproc-per-node 2 -m memlab train --model tiny --zero 3"
    )


def test_ranks_need_a_stage(usage_error):
    assert usage_error("train", "--model", "tiny", "--ranks", "2").startswith(
        "got --ranks 2 without --zero; give the stage"
    )


def test_a_machine_needs_a_gpu_for_each_of_its_ranks(monkeypatch):
    monkeypatch.setattr(command, "choose_device", lambda request: "cuda")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    chosen = []
    monkeypatch.setattr(torch.cuda, "set_device", chosen.append)
    request = SimpleNamespace(zero=1)
    assert command._choose_device(request, Rank(5, 8, 1, 2)) == "cuda"
    assert chosen == [1]
    with pytest.raises(command.UsageError, match="got 3 processes on a machine with 2 GPUs"):
        command._choose_device(request, Rank(5, 8, 1, 3))


def test_all_ranks_of_a_machine_need_their_memory(monkeypatch):
    setting, technique = setting_of("float32"), combined("plain")
    [trace] = rank_step(setting, technique, 4, 2).traces
    wanted = 2 * trace.peak_bytes  # two of the four ranks are on this machine
    monkeypatch.setattr("memlab.cli.choices.memory_of", lambda device: (0, wanted))
    rank = Rank(0, 4, 0, 2)
    assert command._require_memory(setting, technique, "plain", 2, rank) == trace.peak_bytes
    monkeypatch.setattr("memlab.cli.choices.memory_of", lambda device: (0, wanted - 1))
    with pytest.raises(command.UsageError, match="a step with plain on 2 ranks of tiny"):
        command._require_memory(setting, technique, "plain", 2, rank)


def test_a_gpu_needs_room_for_the_whole_weights(monkeypatch):
    setting, technique = replace(setting_of("bfloat16"), device="cuda"), combined("plain")
    rank, wanted = Rank(0, 4, 0, 2), 2 * setting.parameters
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (0, wanted))
    assert command._require_memory(setting, technique, "plain", 3, rank) is None
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (0, wanted - 1))
    with pytest.raises(command.UsageError, match=r"got a model of 112\.56 KiB of weights on GPUs"):
        command._require_memory(setting, technique, "plain", 3, rank)


# ------------------------------------------------------------------ Ctrl-C

# A locked mutex blocks as a collective does: outside of Python, and also while signals arrive.
BLOCKED = """
import ctypes, signal, sys
from memlab.cli import torchrun

torchrun.INTERRUPT_SECONDS = 0
signal.signal(signal.SIGINT, lambda *given: None)  # it may arrive before the rank blocks
lock, mutex = ctypes.CDLL(None).pthread_mutex_lock, ctypes.create_string_buffer(256)
with torchrun.interruptible(torchrun.Rank(int(sys.argv[1]), 2, 0, 2)):
    lock(mutex)
    print("waiting", flush=True)
    lock(mutex)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="a mutex of zeros is Linux's")
def test_ctrl_c_ends_ranks_that_wait_for_each_other_with_one_line_of_rank_0():
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", BLOCKED, str(rank)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        for rank in ranks:
            assert rank.stdout.readline() == "waiting\n"
            rank.send_signal(signal.SIGINT)
        errors = [rank.communicate()[1] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    assert [rank.returncode for rank in ranks] == [130, 130]
    assert errors == ["memlab: interrupted; nothing was written\n", ""]


def test_a_rank_that_can_end_by_itself_does():
    with pytest.raises(KeyboardInterrupt), interruptible(Rank(0, 2, 0, 2)):
        signal.raise_signal(signal.SIGINT)
    assert signal.set_wakeup_fd(-1) == -1


# ------------------------------------------------------------------ torchrun itself


@pytest.mark.slow
@pytest.mark.parametrize(
    ("more", "status", "out", "err"),
    [
        ((), 0, "\npeak: ", ""),
        (("--technique", "lion8bit"), 1, "", "memlab: got a technique that does not work with"),
    ],
)
def test_torchrun_starts_the_ranks(more, status, out, err):
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"]
    found = subprocess.run(
        [*torchrun, "-m", "memlab", *SMALL, "--zero", "3", *more],
        capture_output=True,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        check=False,
    )
    assert found.returncode == status
    assert out in found.stdout
    assert found.stdout.count("step 1: loss") == (status == 0)
    assert [line.startswith(err) for line in found.stderr.splitlines() if "memlab: " in line] == [
        True
    ] * bool(err)
