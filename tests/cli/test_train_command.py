"""`memlab train`: its losses equal a bare loop's on new batches; --memory caps the allocator."""

import math
import re

import pytest
import torch
import typer
from close import assert_close
from quick import slow

from memlab.cli import app, choices, memory_cap
from memlab.cli import steps as loop
from memlab.cli import train as command
from memlab.cli.errors import UsageError
from memlab.data import batches, source_bytes
from memlab.model import PRESETS
from memlab.train import (
    SEED,
    TECHNIQUES,
    Setting,
    build,
    combined,
    dry_trace,
    measured,
    predicted_trace,
)
from memlab.units import format_bytes

TINY = Setting("tiny", batch=2, seq_len=16)
SMALL = ("--model", "tiny", "--batch", "2", "--seq", "16")
GIB = 2**30


def losses(printed: str) -> dict[int, float]:
    """Parse the loss of each printed step."""
    found = re.findall(r"^step +(\d+): loss ([\d.]+)$", printed, re.M)
    return {int(number): float(loss) for number, loss in found}


def bare_loop_losses(technique: str, steps: int) -> list[float]:
    """Return the losses of steps on new batches, each from a separate forward pass."""
    training = build(TINY, combined(technique))
    text = batches(source_bytes(loop.TEXT), TINY.batch, TINY.seq_len, SEED)
    found = []
    for _, batch in zip(range(steps), text, strict=False):
        for held, new in zip(training.batch, batch, strict=True):
            held.copy_(new)
        with torch.no_grad():
            found.append(training.model(*batch).item())
        training.step()
    return found


# ------------------------------------------------------------------ output


@pytest.mark.few(1)
@pytest.mark.parametrize("technique", ["plain", "accumulation", "checkpointing+chunked-loss"])
def test_the_losses_are_those_of_a_bare_loop_on_new_batches(memlab_command, technique):
    outcome = memlab_command("train", *SMALL, "--steps", "3", "--technique", technique)
    assert (outcome.status, outcome.err) == (0, "")
    expected = bare_loop_losses(technique, 3)
    assert len({round(loss, 3) for loss in expected}) == 3
    assert losses(outcome.out) == pytest.approx(dict(enumerate(expected, 1)), abs=2e-4)
    output = re.search(
        r"^loss: ([\d.]+) in the first step, ([\d.]+) in the last", outcome.out, re.M
    )
    assert [float(loss) for loss in output.groups()] == pytest.approx(
        [expected[0], expected[-1]], abs=2e-4
    )


def test_a_scaled_loss_is_reported_unscaled(monkeypatch):
    found = []
    training = build(TINY, combined("loss-scaling"), on_loss=found.append)
    with torch.autocast("cpu", torch.float16), torch.no_grad():
        expected = training.model(*training.batch)
    training.step()
    assert_close(found, [expected])
    assert not found[0].requires_grad


def test_reading_the_loss_changes_no_byte_of_the_step():
    """This holds if the caller keeps no loss: its 4 bytes live until backward anyway."""
    seen = []
    for on_loss in (None, lambda loss: seen.append(loss.item())):
        training = build(TINY, combined("plain"), on_loss=on_loss)
        training.step()
        trace = measured(training)
        seen.append((trace.peak_bytes, trace.at_peak, trace.live_bytes))
    assert seen[0] == seen[-1]
    assert len(seen) == 4


def test_a_step_reads_the_batch_it_is_given():
    found = []
    training = build(TINY, combined("sgd"), on_loss=found.append)
    tokens, targets = (torch.zeros_like(held) for held in training.batch)
    with torch.no_grad():
        expected = training.model(tokens, targets)
    command.step(training, (tokens, targets), found)
    assert_close(found, [expected])


def test_on_a_cpu_the_peak_comes_from_a_metered_step(memlab_command):
    outcome = memlab_command("train", *SMALL, "--steps", "1", "--technique", "lora")
    peak = dry_trace(TINY, combined("lora")).peak_bytes
    assert f"\npeak: {format_bytes(peak)}, measured in one more step" in outcome.out


def test_on_an_accelerator_the_peak_comes_from_its_allocator(monkeypatch):
    monkeypatch.setattr(torch.accelerator, "max_memory_allocated", lambda: 3 * GIB)
    monkeypatch.setattr(torch.accelerator, "max_memory_reserved", lambda: 4 * GIB)
    assert loop.peak(torch.device("cuda"), lambda: 0) == "3.00 GiB allocated, 4.00 GiB reserved"


def test_some_steps_are_printed_including_the_first_and_the_last(monkeypatch, capsys):
    monkeypatch.setattr(command, "step", lambda *given: loop.StepResult(1.0, 1.0))
    monkeypatch.setattr(command, "build", lambda *given, on_loss: on_loss(torch.ones(())))
    monkeypatch.setattr(command, "peak", lambda *given: "")
    command.run(TINY, combined("plain"), 50, lambda stage: None)
    assert list(losses(capsys.readouterr().out)) == [1, *range(3, 51, 3), 50]


def test_the_time_is_the_median_of_the_steps_after_the_first():
    taken = [loop.StepResult(5.0, seconds) for seconds in (9.0, 1.0, 2.0, 4.0)]
    assert "\ntime: 2 s per step\n" in loop.summary(taken, torch.float32, "")
    assert "\ntime: 9 s per step\n" in loop.summary(taken[:1], torch.float32, "")


def test_a_rounded_loss_is_marked(memlab_command):
    output = memlab_command("train", *SMALL, "--steps", "1", "--dtype", "bfloat16").out
    assert "in nats per token, rounded to bfloat16\n" in output
    output = memlab_command("train", *SMALL, "--steps", "1").out
    assert "in nats per token\n" in output


def test_the_model_learns_the_text(memlab_command):
    outcome = memlab_command("train", *SMALL, "--steps", "60", "--dtype", "float32")
    found = losses(outcome.out)
    assert found[1] == pytest.approx(math.log(256), abs=0.5)
    assert found[60] < found[1] - 0.5


def test_the_examples_of_the_help_parse(memlab_command):
    help_ = typer.main.get_command(app).commands["train"].help
    examples = re.findall(r"\[bold\]memlab train (.*?)\[/\]", help_)
    assert len(examples) == 3
    for example in examples:
        context = (
            typer.main.get_command(app).commands["train"].make_context("train", example.split())
        )
        combined(context.params["technique"])
        assert context.params["model"] in PRESETS


def test_the_help_lists_models_and_techniques(memlab_command):
    output = memlab_command("train", "--help").out
    assert all(name in output for name in (*PRESETS, *TECHNIQUES, "measure --dry-run"))


# ------------------------------------------------------------------ errors


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--steps", "0"], "got --steps 0; expected an integer from 1 to "),
        (["--steps", "-3"], "got --steps -3; expected an integer from 1 to "),
        (["--model", "25"], "got --model 25; did you mean 25m? Choose from tiny, "),
        (["--technique", "sgdd"], "got --technique sgdd; did you mean sgd? Choose from plain, "),
        (["--technique", "sgd+lion"], "got --technique sgd+lion: lion and sgd each bring"),
        (["--dtype", "int8"], "got --dtype int8; choose from float32, bfloat16, float16"),
        (["--model", "tiny", "--seq", "65"], "got sequences of 65 tokens; tiny takes 1 to 64"),
        (["--model", "nowhere.json"], "got --model nowhere.json: "),
        (["--device", "cuda"], "got --device cuda; this machine has cpu"),
        (
            ["--memory", "24GB"],
            "got --memory 24GB on the device cpu; only CUDA's allocator can be capped, so leave",
        ),
    ],
)
def test_bad_input_is_one_sentence(usage_error, arguments, message):
    assert usage_error("train", *arguments).startswith(message)


def test_a_step_larger_than_the_machine_does_not_start(usage_error, monkeypatch):
    """The check uses the requested technique, not the plain step."""
    wanted = dry_trace(TINY, combined("sgd")).peak_bytes
    monkeypatch.setattr(choices, "memory_of", lambda device: (0, wanted - 1))
    line = usage_error("train", *SMALL, "--technique", "sgd")
    assert line.startswith(
        f"a step with sgd of tiny, 2 × 16 tokens, float32, cpu needs {format_bytes(wanted)}; "
    )
    assert line.endswith("or use memlab measure --dry-run, which allocates nothing")


def test_a_step_as_large_as_the_machine_starts(memlab_command, monkeypatch):
    wanted = dry_trace(TINY, combined("sgd")).peak_bytes
    assert wanted < dry_trace(TINY, combined("plain")).peak_bytes
    monkeypatch.setattr(choices, "memory_of", lambda device: (0, wanted))
    assert memlab_command("train", *SMALL, "--technique", "sgd", "--steps", "1").status == 0


@pytest.mark.parametrize(
    "error", [MemoryError(), slow(torch.OutOfMemoryError("CUDA out of memory.\n…"))]
)
def test_running_out_of_memory_is_one_line_with_the_need(memlab_command, monkeypatch, error):
    def run_out(*given, **more):
        raise error

    monkeypatch.setattr(command, "build", run_out)
    outcome = memlab_command("train", *SMALL, "--technique", "lora")
    wanted = format_bytes(dry_trace(TINY, combined("lora")).peak_bytes)
    assert outcome.status == 2
    assert outcome.err == (
        f"memlab: lora ran out of memory with tiny, 2 × 16 tokens, float32, cpu; its tensors need "
        f"{wanted}; give a smaller --batch or --seq, or another technique\n"
    )


def test_other_errors_keep_their_traceback(memlab_command, monkeypatch):
    monkeypatch.setattr(command, "build", lambda *given, on_loss: [][0])
    with pytest.raises(IndexError):
        memlab_command("train", *SMALL)


# ------------------------------------------------------------------ memory cap


@pytest.fixture
def card(monkeypatch):
    """Fake a GPU of 80 GiB; return the memory fractions that were set."""
    given: list[float] = []
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (80 * GIB, 80 * GIB))
    monkeypatch.setattr(torch.cuda, "set_per_process_memory_fraction", given.append)
    return given


def test_the_cap_applies_only_while_the_steps_run(card):
    with memory_cap.memory_cap(24 * 10**9):
        assert int(card[-1] * 80 * GIB) in (24 * 10**9, 24 * 10**9 + 1)
        assert len(card) == 1
    assert card[1:] == [1.0]


def test_ctrl_c_removes_the_cap(card):
    with pytest.raises(KeyboardInterrupt), memory_cap.memory_cap(GIB):
        raise KeyboardInterrupt
    assert card[1:] == [1.0]


def test_without_a_cap_nothing_is_set(card):
    with memory_cap.memory_cap(None):
        pass
    assert card == []


def test_ctrl_c_is_one_line(memlab_command, monkeypatch):
    def interrupted(*given):
        raise KeyboardInterrupt

    monkeypatch.setattr(command, "step", interrupted)
    outcome = memlab_command("train", *SMALL)
    assert (outcome.status, outcome.err) == (130, "memlab: interrupted; nothing was written\n")


@pytest.mark.parametrize(("memory", "cap"), [("24GB", 24 * 10**9), ("80GiB", 80 * GIB)])
def test_a_cap_is_read_with_its_unit(card, memory, cap):
    assert memory_cap.choose_cap(memory, "cuda") == cap


@pytest.mark.parametrize(
    ("memory", "message"),
    [
        ("0B", "got --memory 0B; give more than 0 bytes"),
        ("81GiB", "got --memory 81GiB; .* at most the GPU's 80.00 GiB"),
        ("lots", "--memory: got 'lots' as a number of bytes"),
    ],
)
def test_a_cap_outside_the_gpus_memory_is_refused(card, memory, message):
    with pytest.raises(UsageError, match=message):
        memory_cap.choose_cap(memory, "cuda")


@pytest.mark.few(1)
@pytest.mark.parametrize(("more", "words"), [(1, "1 B more"), (-GIB, "1.00 GiB less")])
def test_out_of_memory_on_a_gpu_says_by_how_much(card, more, words):
    setting = Setting("tiny", 2, 16, device="cuda")
    wanted = predicted_trace(setting, combined("plain")).allocated_bytes
    output = command.out_of_memory_advice(setting, combined("plain"), wanted - more)
    assert output.startswith(
        f"it needs {format_bytes(wanted)}, {words} than the {format_bytes(wanted - more)} available"
    )
    assert ("fragmentation" in output) == (more < 0)
