"""`memlab train`: its steps are a bare loop's on new batches, and a cap is the allocator's."""

import math
import re
from types import SimpleNamespace

import pytest
import torch
import typer
from quick import slow

from memlab.cli import app, choices
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
    """The loss of each step that has a line."""
    found = re.findall(r"^step +(\d+): loss ([\d.]+)$", printed, re.M)
    return {int(number): float(loss) for number, loss in found}


def of_a_bare_loop(technique: str, steps: int) -> list[float]:
    """The losses of steps on new batches, each by a forward pass of its own before the step."""
    training = build(TINY, combined(technique))
    text = batches(source_bytes(command.TEXT), TINY.batch, TINY.seq_len, SEED)
    found = []
    for _, batch in zip(range(steps), text, strict=False):
        for held, new in zip(training.batch, batch, strict=True):
            held.copy_(new)
        with torch.no_grad():
            found.append(training.model(*batch).item())
        training.step()
    return found


# ------------------------------------------------------------------ what it shows


@pytest.mark.parametrize("technique", ["plain", "accumulation", "checkpointing+chunked-loss"])
def test_the_losses_are_those_of_a_bare_loop_on_new_batches(memlab_command, technique):
    outcome = memlab_command("train", *SMALL, "--steps", "3", "--technique", technique)
    assert (outcome.status, outcome.err) == (0, "")
    expected = of_a_bare_loop(technique, 3)
    assert len({round(loss, 3) for loss in expected}) == 3
    assert losses(outcome.out) == pytest.approx(dict(enumerate(expected, 1)), abs=2e-4)
    told = re.search(r"^loss: ([\d.]+) in the first step, ([\d.]+) in the last", outcome.out, re.M)
    assert [float(loss) for loss in told.groups()] == pytest.approx(
        [expected[0], expected[-1]], abs=2e-4
    )


def test_a_scaled_loss_is_shown_unscaled(monkeypatch):
    found = []
    training = build(TINY, combined("loss-scaling"), on_loss=found.append)
    with torch.autocast("cpu", torch.float16), torch.no_grad():
        expected = training.model(*training.batch)
    training.step()
    torch.testing.assert_close(found, [expected])
    assert not found[0].requires_grad


def test_whoever_looks_at_the_loss_changes_no_byte_of_the_step():
    """A loss that is not kept, that is: one of 4 bytes is alive until backward anyway."""
    seen = []
    for on_loss in (None, lambda loss: seen.append(loss.item())):
        training = build(TINY, combined("plain"), on_loss=on_loss)
        training.step()
        trace = measured(training)
        seen.append((trace.peak_bytes, trace.at_peak, trace.live_bytes))
    assert seen[0] == seen[-1]
    assert len(seen) == 4


def test_another_batch_is_the_one_that_the_next_step_reads():
    found = []
    training = build(TINY, combined("sgd"), on_loss=found.append)
    tokens, targets = (torch.zeros_like(held) for held in training.batch)
    with torch.no_grad():
        expected = training.model(tokens, targets)
    command.step(training, (tokens, targets), found)
    torch.testing.assert_close(found, [expected])


def test_on_a_cpu_the_peak_is_that_of_a_metered_step(memlab_command):
    outcome = memlab_command("train", *SMALL, "--steps", "1", "--technique", "lora")
    peak = dry_trace(TINY, combined("lora")).peak_bytes
    assert f"\npeak: {format_bytes(peak)}, of one step more under the meter" in outcome.out


def test_on_an_accelerator_the_peak_is_what_its_allocator_counted(monkeypatch):
    monkeypatch.setattr(torch.accelerator, "max_memory_allocated", lambda: 3 * GIB)
    monkeypatch.setattr(torch.accelerator, "max_memory_reserved", lambda: 4 * GIB)
    training = SimpleNamespace(model=torch.nn.Linear(2, 2, device="meta"))
    assert command.peak(training, ()) == "3.00 GiB allocated, 4.00 GiB reserved"


def test_of_many_steps_some_have_a_line_and_always_the_first_and_the_last(monkeypatch, capsys):
    monkeypatch.setattr(command, "step", lambda *given: command.Step(1.0, 1.0))
    monkeypatch.setattr(command, "build", lambda *given, on_loss: on_loss(torch.ones(())))
    monkeypatch.setattr(command, "peak", lambda *given: "")
    command.run(TINY, combined("plain"), 50, lambda stage: None)
    assert list(losses(capsys.readouterr().out)) == [1, *range(3, 51, 3), 50]


def test_the_time_is_the_median_of_the_steps_after_the_first():
    taken = [command.Step(5.0, seconds) for seconds in (9.0, 1.0, 2.0, 4.0)]
    assert "\ntime: 2 s a step\n" in command.summary(taken, torch.float32, "")
    assert "\ntime: 9 s a step\n" in command.summary(taken[:1], torch.float32, "")


def test_a_loss_that_is_rounded_says_so(memlab_command):
    told = memlab_command("train", *SMALL, "--steps", "1", "--dtype", "bfloat16").out
    assert "in nats a token, rounded to bfloat16\n" in told
    told = memlab_command("train", *SMALL, "--steps", "1").out
    assert "in nats a token\n" in told


def test_the_step_reads_text_that_a_model_can_learn(memlab_command):
    outcome = memlab_command("train", *SMALL, "--steps", "60", "--dtype", "float32")
    found = losses(outcome.out)
    assert found[1] == pytest.approx(math.log(256), abs=0.5)
    assert found[60] < found[1] - 0.5


def test_the_examples_of_the_help_can_be_typed(memlab_command):
    help_ = typer.main.get_command(app).commands["train"].help
    examples = re.findall(r"\[bold\]memlab train (.*?)\[/\]", help_)
    assert len(examples) == 3
    for example in examples:
        context = (
            typer.main.get_command(app).commands["train"].make_context("train", example.split())
        )
        combined(context.params["technique"])
        assert context.params["model"] in PRESETS


def test_the_help_says_what_is_there_to_choose(memlab_command):
    told = memlab_command("train", "--help").out
    assert all(name in told for name in (*PRESETS, *TECHNIQUES, "measure --dry-run"))


# ------------------------------------------------------------------ what it refuses


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--steps", "0"], "got --steps 0; wanted a whole number from 1 to "),
        (["--steps", "-3"], "got --steps -3; wanted a whole number from 1 to "),
        (["--model", "25"], "got --model 25; did you mean 25m? There are tiny, "),
        (["--technique", "sgdd"], "got --technique sgdd; did you mean sgd? There are plain, "),
        (["--technique", "sgd+lion"], "got --technique sgd+lion: lion and sgd each bring"),
        (["--dtype", "int8"], "got --dtype int8; choose from float32, bfloat16, float16"),
        (["--model", "tiny", "--seq", "65"], "got sequences of 65 tokens; tiny takes 1 to 64"),
        (["--model", "nowhere.json"], "got --model nowhere.json: "),
        (["--device", "cuda"], "got --device cuda; this machine has cpu"),
        (
            ["--memory", "24GB"],
            "got --memory 24GB on the device cpu; only CUDA's allocator takes a cap, so leave",
        ),
    ],
)
def test_what_cannot_be_used_is_one_sentence(in_one_line, arguments, message):
    assert in_one_line("train", *arguments).startswith(message)


def test_a_step_larger_than_the_machine_is_not_begun(in_one_line, monkeypatch):
    """Of the technique that was asked for, not of the plain step."""
    wanted = dry_trace(TINY, combined("sgd")).peak_bytes
    monkeypatch.setattr(choices, "memory_of", lambda device: (0, wanted - 1))
    line = in_one_line("train", *SMALL, "--technique", "sgd")
    assert line.startswith(
        f"a step with sgd of tiny, 2 × 16 tokens, float32, cpu takes {format_bytes(wanted)}; "
    )
    assert line.endswith("or use memlab measure --dry-run, which takes none")


def test_a_step_as_large_as_the_machine_is_begun(memlab_command, monkeypatch):
    wanted = dry_trace(TINY, combined("sgd")).peak_bytes
    assert wanted < dry_trace(TINY, combined("plain")).peak_bytes
    monkeypatch.setattr(choices, "memory_of", lambda device: (0, wanted))
    assert memlab_command("train", *SMALL, "--technique", "sgd", "--steps", "1").status == 0


@pytest.mark.parametrize(
    "error", [MemoryError(), slow(torch.OutOfMemoryError("CUDA out of memory.\n…"))]
)
def test_where_memory_runs_out_one_line_says_what_it_takes(memlab_command, monkeypatch, error):
    def run_out(*given, **more):
        raise error

    monkeypatch.setattr(command, "build", run_out)
    outcome = memlab_command("train", *SMALL, "--technique", "lora")
    wanted = format_bytes(dry_trace(TINY, combined("lora")).peak_bytes)
    assert outcome.status == 2
    assert outcome.err == (
        f"memlab: lora ran out of memory with tiny, 2 × 16 tokens, float32, cpu; its tensors take "
        f"{wanted}; give a smaller --batch or --seq, or another technique\n"
    )


def test_what_fails_otherwise_is_our_mistake(memlab_command, monkeypatch):
    monkeypatch.setattr(command, "build", lambda *given, on_loss: [][0])
    with pytest.raises(IndexError):
        memlab_command("train", *SMALL)


# ------------------------------------------------------------------ a cap


@pytest.fixture
def card(monkeypatch):
    """A card of 80 GiB; the fractions that its allocator was given."""
    given: list[float] = []
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (80 * GIB, 80 * GIB))
    monkeypatch.setattr(torch.cuda, "set_per_process_memory_fraction", given.append)
    return given


def test_a_cap_is_the_allocator_s_while_the_steps_run_and_no_longer(card):
    with command.capped(24 * 10**9):
        assert int(card[-1] * 80 * GIB) in (24 * 10**9, 24 * 10**9 + 1)
        assert len(card) == 1
    assert card[1:] == [1.0]


def test_ctrl_c_takes_the_cap_away(card):
    with pytest.raises(KeyboardInterrupt), command.capped(GIB):
        raise KeyboardInterrupt
    assert card[1:] == [1.0]


def test_without_a_cap_nothing_is_set(card):
    with command.capped(None):
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
    assert command.choose_cap(memory, "cuda") == cap


@pytest.mark.parametrize(
    ("memory", "message"),
    [
        ("0B", "got --memory 0B; give more than nothing"),
        ("81GiB", "got --memory 81GiB; .* at most the card's 80.00 GiB"),
        ("lots", "--memory: got 'lots' as a number of bytes"),
    ],
)
def test_a_cap_that_no_card_can_have_is_refused(card, memory, message):
    with pytest.raises(UsageError, match=message):
        command.choose_cap(memory, "cuda")


@pytest.mark.parametrize(("more", "words"), [(1, "1 B more"), (-GIB, "1.00 GiB less")])
def test_out_of_memory_on_a_card_says_by_how_much(card, more, words):
    setting = Setting("tiny", 2, 16, device="cuda")
    wanted = predicted_trace(setting, combined("plain")).allocated_bytes
    told = command.why_it_ran_out(setting, combined("plain"), wanted - more)
    assert told.startswith(
        f"it takes {format_bytes(wanted)}, {words} than the {format_bytes(wanted - more)} there are"
    )
    assert ("pieces" in told) == (more < 0)
