"""`memlab measure`: rows equal bare loops, and the output files are written whole or not at all."""

import io
import itertools
import json
import math
import re
import signal
import sys
import weakref
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
from quick import quick, slow

import memlab
from memlab import plot
from memlab.cli import choices, parsing, report, results, rows, terminal
from memlab.cli.choices import SUITABLE, choose_device, choose_setting, choose_techniques
from memlab.cli.errors import UsageError
from memlab.cli.parsing import choose_folder
from memlab.cli.requests import Request
from memlab.cli.rows import (
    PairedRuns,
    Row,
    best_rows,
    dry_row,
    measured_rows,
    silent,
    slowdown_of,
    time_in_turn,
)
from memlab.model import PRESETS, cross_entropy
from memlab.trace import DeviceMemory, Event, Trace
from memlab.train import (
    COMBINATIONS,
    TECHNIQUES,
    Plugs,
    Setting,
    Technique,
    build,
    combined,
    of_all_weights,
    predicted_trace,
)
from memlab.units import format_bytes, paragraph, parse_bytes

TINY = Setting("tiny", batch=2, seq_len=32)
PLAIN = combined("plain")
THINNED = {"flash-attention"}  # a dry run computes one of several equal tiles
FILES = ("measure.json", "measure.png", "measure-timeline.png", "measure-blocks.png")


def second_step(technique: Plugs, setting: Setting = TINY) -> Trace:
    """Return the trace of a bare loop."""
    training = build(setting, technique)
    training.step()
    return memlab.measure(training.step, model=training.model, optimizer=training.optimizer)


def without_numbers(trace: Trace) -> list[Event]:
    """Return the events with storages numbered in the order of the trace. The storages from before
    the step are sorted, because their order depends on who created them."""
    before = [event for event in trace.events if event.phase == "before"]
    after = [event for event in trace.events if event.phase != "before"]
    before.sort(key=lambda event: str(event._replace(storage=0)))
    numbers: dict[int, int] = {}
    return [e._replace(storage=numbers.setdefault(e.storage, len(numbers))) for e in before + after]


def kinds_of(trace: Trace) -> Counter[Event]:
    """Count equal events, ignoring their storages."""
    return Counter(event._replace(storage=0) for event in trace.events)


@pytest.fixture(scope="module", autouse=True)
def quick_steps():
    """Use one block instead of four and steps of one second, so two rounds are enough."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(PRESETS, "tiny", replace(PRESETS["tiny"], layers=1))
        patch.setattr(rows, "_seconds", lambda step: (step(), 1.0)[1])
        yield


class Rows(dict[str, Row]):
    """Rows measured on first use."""

    def __init__(self, row_of: Callable[[str, Plugs], Row]) -> None:
        self._row_of = row_of

    def __missing__(self, name: str) -> Row:
        self[name] = self._row_of(name, combined(name))
        return self[name]


@pytest.fixture(scope="module")
def real_rows() -> Rows:
    real = Rows(PairedRuns(TINY, PLAIN).row)
    real["plain"]  # first, because the others are compared with it
    return real


@pytest.fixture(scope="module")
def dry_rows() -> Rows:
    return Rows(partial(dry_row, TINY))


FEW = ("plain", "checkpointing", "autocast", "accumulation", "lora", "sgd")


@pytest.fixture
def clock(monkeypatch):
    """Replace the measured times by given ones, and return the remaining times."""

    def durations(*seconds: float) -> list[float]:
        left = list(seconds)
        monkeypatch.setattr(rows, "_seconds", lambda step: step() or left.pop(0))
        return left

    return durations


# ------------------------------------------------------------------ bytes


@pytest.mark.few(3)
@pytest.mark.parametrize("name", quick(FEW, TECHNIQUES))
def test_a_row_has_the_trace_of_a_bare_loop(real_rows, name):
    bare = second_step(combined(name))
    assert without_numbers(real_rows[name].trace) == without_numbers(bare)


@pytest.mark.few(1)
@pytest.mark.parametrize("name", quick(FEW, sorted(TECHNIQUES.keys() - THINNED)))
def test_a_dry_row_has_the_trace_of_the_real_row(real_rows, dry_rows, name):
    assert without_numbers(dry_rows[name].trace) == without_numbers(real_rows[name].trace)


@pytest.mark.parametrize("name", THINNED)
def test_a_dry_row_with_fewer_tiles_has_the_peak_of_the_real_row(real_rows, dry_rows, name):
    dry, real = dry_rows[name].trace, real_rows[name].trace
    assert (dry.at_peak, dry.at_end) == (real.at_peak, real.at_end)
    assert kinds_of(dry) < kinds_of(real)


def test_a_gradient_kept_from_the_first_step_changes_the_trace():
    """So the two tests above would detect it."""
    training = build(TINY, PLAIN)
    training.step()
    held = [p.grad for p in training.model.parameters()]
    disturbed = rows.measured(training)
    assert held
    assert without_numbers(disturbed) != without_numbers(second_step(PLAIN))


@pytest.mark.few(1)
@pytest.mark.parametrize("target", ["cuda", "cuda:hopper", "cuda:t4"])
def test_a_dry_run_for_a_gpu_has_the_predicted_trace(target):
    setting = replace(TINY, device=target)
    [row] = measured_rows(setting, {"plain": PLAIN}, True, silent)

    def parts():
        training = build(replace(TINY, device="cuda"), PLAIN)
        return training.step, training.model, training.optimizer

    assert without_numbers(row.trace) == without_numbers(memlab.predict(parts, device=target))
    assert row.trace.peak_bytes > second_step(PLAIN).peak_bytes


def test_the_row_of_a_dry_run_is_marked(real_rows, dry_rows):
    assert (real_rows["plain"].trace.dry, dry_rows["plain"].trace.dry) == (False, True)


@pytest.fixture
def living_models(monkeypatch):
    """Count the models alive at each measurement. There is no accelerator cache to empty."""
    models, counts = weakref.WeakSet(), []

    def building(setting, technique):
        training = build(setting, technique)
        models.add(training.model)
        return training

    def metering(training, measured=rows.measured):
        counts.append(len(models))
        return measured(training)

    monkeypatch.setattr("memlab.train.step.build", building)
    monkeypatch.setattr(rows, "measured", metering)
    monkeypatch.setattr(torch.accelerator, "empty_cache", lambda: None)
    return counts


THREE = choose_techniques(
    Request(techniques=("checkpointing", "sgd"))  # checkpointing forms a reference cycle
)


def test_only_the_measured_model_is_alive_on_an_accelerator(living_models):
    """`cpu:0` is the CPU, but does not equal "cpu", so it takes the accelerator's path."""
    measured_rows(replace(TINY, device="cpu:0"), THREE, False, silent)
    assert living_models == [1, 1, 1]


def test_on_the_cpu_the_plain_training_stays_alive(living_models):
    measured_rows(TINY, THREE, False, silent)
    assert living_models == [1, 2, 2]


# ------------------------------------------------------------------ gradients


@pytest.mark.parametrize("name", ["checkpointing", "muon"])  # muon steps matrices first
def test_techniques_with_the_same_kernels_have_equal_gradients(real_rows, name):
    assert real_rows[name].gradient_difference == 0


def test_a_wrong_gradient_is_reported_with_its_size():
    doubled = replace(PLAIN, loss=lambda *arguments: 2 * cross_entropy(*arguments))
    plain, wrong = measured_rows(TINY, {"plain": PLAIN, "doubled": doubled}, False, silent)
    assert wrong.gradient_difference == pytest.approx(plain.largest_gradient, rel=1e-6)


def test_a_single_nan_gradient_is_reported():
    def break_one(block):
        block.mlp.up.weight.register_hook(lambda gradient: gradient * math.nan)

    broken = replace(PLAIN, change_model=lambda model: break_one(model.blocks[0]))
    _, row = measured_rows(TINY, {"plain": PLAIN, "broken": broken}, False, silent)
    assert math.isnan(row.gradient_difference)


class ForgetfulSGD(torch.optim.SGD):
    """Drops its gradients after the step."""

    def step(self, closure=None):
        super().step()
        self.zero_grad()


def test_a_technique_that_drops_its_gradients_has_no_comparison():
    forgetful = replace(PLAIN, optimizer=of_all_weights(ForgetfulSGD))
    _, row = measured_rows(TINY, {"plain": PLAIN, "forgetful": forgetful}, False, silent)
    assert row.gradient_difference is None
    assert row.failure is None


def test_gradients_of_an_optimizers_copies_are_compared(real_rows):
    assert 0 < real_rows["master-weights"].gradient_difference < 0.02


# ------------------------------------------------------------------ time


@pytest.mark.parametrize(
    ("seconds", "rounds"),
    [
        ([0.01, 0.01] * 9, 5),  # short
        ([1.0, 1.0, 1.05, 1.0], 2),  # long, and the ratios agree
        ([1.0, 1.0, 1.2, 1.0, 1.0, 1.0], 3),  # long, and the first two differ
        ([3.0, 1.0, 3.0, 1.0], 2),  # the steps differ but the ratios agree
    ],
)
def test_the_number_of_rounds_depends_on_length_and_agreement(clock, seconds, rounds):
    clock(*seconds)
    assert len(time_in_turn(lambda: None, lambda: None)) == rounds


def test_steps_alternate(clock):
    taken = []
    clock(*[0.01] * 10)
    time_in_turn(lambda: taken.append("ours"), lambda: taken.append("theirs"))
    assert taken == ["ours", "theirs"] * 5


def test_the_ratio_is_the_median_of_the_rounds(clock):
    clock(*[0.01] * 5, *[0.02, 0.01, 0.02, 0.01, 0.09, 0.01, 0.02, 0.01, 0.02, 0.01])
    _, row = measured_rows(TINY, {"plain": PLAIN, "sgd": combined("sgd")}, False, silent)
    assert row.time_ratio == pytest.approx(2)
    assert row.seconds == pytest.approx(0.02)


def test_the_plain_step_is_timed_too(clock):
    clock(0.01, 0.015, 0.005, 0.025, 0.02)
    [row] = measured_rows(TINY, {"plain": PLAIN}, False, silent)
    assert (row.seconds, row.time_ratio) == (pytest.approx(0.015), 1)


def test_a_row_has_bytes_if_the_plain_training_does_not_fit_beside_it(monkeypatch):
    runs = PairedRuns(TINY, PLAIN)
    plain = runs.row("plain", PLAIN)
    monkeypatch.setattr(rows, "time_in_turn", raising(torch.OutOfMemoryError("CUDA out of memory")))
    row = runs.row("sgd", combined("sgd"))
    assert row.trace.peak_bytes == second_step(combined("sgd")).peak_bytes
    assert row.time_ratio is None
    assert list(report.remarks([plain, row])) == [
        "sgd: no time; the plain training does not fit into memory beside it"
    ]


def test_a_step_that_fails_only_while_timed_fails(monkeypatch):
    runs = PairedRuns(TINY, PLAIN)
    runs.row("plain", PLAIN)
    monkeypatch.setattr(
        rows, "time_in_turn", raising(RuntimeError("the third step is one too many"))
    )
    with pytest.raises(RuntimeError, match="one too many"):
        runs.row("sgd", combined("sgd"))


# ------------------------------------------------------------------ failures


def raising(error: BaseException):
    def function(*arguments, **named):
        raise error

    return function


def with_attention(attention) -> Technique:
    return replace(TECHNIQUES["plain"], plugs={"attention": lambda: attention})


def test_a_failing_technique_does_not_stop_the_others(memlab_command, monkeypatch):
    attention = raising(NotImplementedError("no such kernel\non this device"))
    monkeypatch.setitem(TECHNIQUES, "autocast", with_attention(attention))
    outcome = memlab_command(
        *("measure", "--model", "tiny", "--dry-run", "--technique", "autocast"),
        *("--technique", "sgd"),
    )
    assert outcome.status == 1
    lines = [line.split() for line in outcome.out.splitlines()]
    assert ["autocast", "failed"] in lines
    assert "sgd" in [line[0] for line in lines if line]
    assert outcome.out.count("autocast: NotImplementedError: no such kernel\n") == 1


def test_a_failing_technique_is_in_the_results(memlab_command, monkeypatch, tmp_path):
    attention = raising(NotImplementedError("no such kernel"))
    monkeypatch.setitem(TECHNIQUES, "autocast", with_attention(attention))
    memlab_command("measure", "--model", "tiny", "--dry-run", "--technique", "autocast")
    [_, row] = json.loads((tmp_path / "work/measure.json").read_text())["rows"]
    assert row["failure"] == "NotImplementedError: no such kernel"
    assert "peak_bytes" not in row


@pytest.mark.parametrize(
    "error",
    [
        MemoryError(),
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB\n…"),
        RuntimeError(
            "[enforce fail at alloc_cpu.cpp:127] DefaultCPUAllocator: can't allocate memory"
        ),
        RuntimeError("MPS backend out of memory (MPS allocated: 5 GB)"),
    ],
)
def test_out_of_memory_in_the_plain_step_suggests_a_smaller_batch(
    memlab_command, monkeypatch, error
):
    monkeypatch.setattr("memlab.train.step.build", raising(error))
    monkeypatch.setattr(choices, "_step_bytes", lambda setting: 0)
    outcome = memlab_command("measure", "--model", "tiny", "--batch", "8")
    assert outcome.status == 2
    assert outcome.err == (
        "memlab: the plain step ran out of memory with tiny, 8 × 64 tokens, float32, cpu; "
        "try --batch 4, or --dry-run, which allocates nothing\n"
    )


def test_another_error_in_the_plain_step_keeps_its_traceback(monkeypatch):
    monkeypatch.setattr("memlab.train.step.build", raising(RuntimeError("shapes do not match")))
    with pytest.raises(RuntimeError, match="shapes do not match"):
        measured_rows(TINY, TECHNIQUES, False, silent)


# ------------------------------------------------------------------ options


def choose(model=None, batch=None, seq_len=None, dtype=None, device="cpu", dry=True) -> Setting:
    return choose_setting(
        Request(model, batch=batch, seq_len=seq_len, dtype=dtype, device=device, dry=dry)
    )


@pytest.mark.parametrize(("device", "suited"), [("cpu", "5m"), ("mps", "34m"), ("cuda", "124m")])
def test_the_default_model_depends_on_the_device(device, suited):
    assert choose(device=device) == replace(
        SUITABLE.get(device, SUITABLE["accelerator"]), device=device
    )
    assert choose(device=device).model == suited


def test_options_replace_the_defaults():
    given = choose(model="34m", batch=2, seq_len=100, dtype="bfloat16")
    assert given == Setting("34m", 2, 100, torch.bfloat16, "cpu")


def test_the_default_sequence_length_is_the_models_maximum():
    assert choose(model="tiny").seq_len == PRESETS["tiny"].seq_len


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--model", "25"], "got --model 25; did you mean 25m? Choose from tiny, "),
        (["--model", "gpt"], "got --model gpt; choose from tiny, "),
        (["--technique", "sgdd"], "got --technique sgdd; did you mean sgd? Choose from plain, "),
        (["--technique", "lora+sgdd"], "got --technique sgdd; did you mean sgd?"),
        (["--technique", "sgd+sgd"], "got --technique sgd+sgd, which names a technique twice"),
        (["--technique", "lora+"], "got --technique ''; choose from plain, "),
        (
            ["--technique", "bfloat16+sgd"],
            "got --technique bfloat16+sgd: bfloat16 and sgd each bring their own optimizer; leave "
            "one of the two out; for bfloat16 weights, give sgd and --dtype bfloat16",
        ),
        (["--dtype", "int8"], "got --dtype int8; choose from float32, bfloat16, float16"),
        (["--batch", "0"], "got --batch 0; expected an integer from 1 to 1,000,000"),
        (["--batch", "-3"], "got --batch -3; expected an integer from 1 to 1,000,000"),
        (["--seq", "0"], "got --seq 0; expected an integer from 1 to 100,000,000"),
        (["--seq", "513"], "got sequences of 513 tokens; 5m takes 1 to 512"),
        (["--device", "tpu"], "got --device tpu; this machine has cpu"),
        (["--device", "mps", "--dry-run"], "mps with --dry-run; use cpu, cuda, cuda:hopper, "),
        (["--device", "t4", "--dry-run"], "t4 with --dry-run; did you mean cuda:t4? Use cpu, "),
        (["--device", "cuda"], "; --dry-run --device cuda predicts it"),
        (["--device", "cuda:3060"], "; --dry-run --device cuda:rtx3060 predicts it"),
        (["--device", "mps"], "; use --dry-run"),
    ],
)
def test_bad_input_is_one_line(usage_error, arguments, message):
    assert message in usage_error("measure", *arguments)


def test_techniques_are_measured_in_registry_order_after_the_plain_step():
    chosen = choose_techniques(Request(techniques=("sgd", "checkpointing")))
    assert list(chosen) == ["plain", "checkpointing", "sgd"]


def test_techniques_joined_by_a_plus_are_combined():
    chosen = choose_techniques(Request(techniques=("autocast+lora", "sgd")))
    assert list(chosen) == ["plain", "sgd", "autocast+lora"]
    _, both = measured_rows(TINY, {"plain": PLAIN, "both": chosen["autocast+lora"]}, True, silent)
    for one in ("autocast", "lora"):
        assert both.trace.peak_bytes < second_step(combined(one)).peak_bytes


def test_by_default_every_technique_is_measured():
    chosen = choose_techniques(Request())
    assert list(chosen) == [*TECHNIQUES, *COMBINATIONS]
    assert chosen["sgd"].optimizer is not chosen["plain"].optimizer


def test_a_combination_is_chosen_by_the_name_in_the_table():
    assert list(choose_techniques(Request(techniques=("ckpt+int8",)))) == [
        "plain",
        "checkpointing+int8-activations",
    ]


def test_a_dry_run_of_a_model_is_one_answer_unless_more_is_wanted(memlab_command, tmp_path):
    given = ("measure", "--model", "tiny", "--dry-run", "--technique", "plain")
    one = memlab_command(*given[:-2]).out
    assert one == memlab_command(*given).out
    rows_ = json.loads((tmp_path / "work/measure.json").read_text())["rows"]
    assert [row["technique"] for row in rows_] == ["plain"]


# ------------------------------------------------------------------ a screen in a minute


@pytest.fixture
def seconds_of(monkeypatch):
    """Let a real row take so many seconds, a dry one none, and measure rows of `sgd`."""
    now = [0.0]

    def timed(self, name, technique, trace=None):
        now[0] += 20.0
        return Row(name, trace, 1.0, (1.0,))

    monkeypatch.setattr(PairedRuns, "row", timed)
    monkeypatch.setattr(rows, "slowdown_of", {torch.bfloat16: 24.4}.get)

    def reasons(names: str, most: int, max_seconds: float) -> dict[str, str | None]:
        chosen = dict.fromkeys(names.split(), PLAIN)
        found = best_rows(TINY, chosen, silent, most, max_seconds, lambda: now[0])
        return {row.name: row.dry_for for row in found}

    return reasons


def test_rows_are_timed_until_another_would_exceed_the_limit(seconds_of):
    reasons = seconds_of("plain a b c d", 4, 65.0)
    assert list(reasons.values()) == [None, None, None, *["65 s were over"] * 2]


def test_if_nothing_could_be_timed_one_sentence_says_so():
    rows_ = [Row(name, trace_of(1), dry_for="40 s were over") for name in ("plain", "sgd")]
    assert list(report.dry_rows_note(rows_)) == [
        "no times, because 40 s were over after the dry runs; --all has no limit"
    ]


def test_without_a_limit_the_smallest_peaks_are_timed(seconds_of):
    reasons = seconds_of("plain a b c", 2, math.inf)
    assert list(reasons.values()) == [*[None] * 3, "only the 2 smallest peaks are timed"]


@pytest.mark.parametrize("name", ["autocast", "lora+autocast", "bfloat16", "master-weights"])
def test_a_technique_whose_matmuls_are_slow_on_this_cpu_is_not_timed(seconds_of, name):
    reasons = seconds_of(f"plain {name} sgd", 9, math.inf)
    slowly = "matmuls in bfloat16 are 24 × slower on this CPU"
    assert reasons == {"plain": None, name: slowly, "sgd": None}


def test_a_dtype_is_timed_once_relative_to_float32():
    assert slowdown_of(torch.float32) > 0
    before = slowdown_of.cache_info().misses
    slowdown_of(torch.float32)
    assert slowdown_of.cache_info().misses == before


@pytest.mark.parametrize(
    ("arguments", "is_timed"),
    [([], False), slow((["--all"], False)), slow((["--technique", "loss-scaling"], True))],
)
def test_a_slow_technique_is_timed_if_requested(
    memlab_command, tmp_path, monkeypatch, arguments, is_timed
):
    few = {name: TECHNIQUES[name] for name in ("plain", "loss-scaling", "lora")}
    monkeypatch.setattr(choices, "TECHNIQUES", few)
    monkeypatch.setattr(choices, "COMBINATIONS", {})
    monkeypatch.setattr(rows, "slowdown_of", {torch.float16: 24.0}.get)
    small = ("--model", "tiny", "--batch", "2", "--out", tmp_path)
    outcome = memlab_command("measure", *small, *arguments)
    measured = json.loads((tmp_path / "measure.json").read_text(encoding="utf-8"))
    why = {row["technique"]: row["dry_for"] for row in measured["rows"]}
    slowly = "matmuls in float16 are 24 × slower on this CPU"
    assert why["loss-scaling"] == (None if is_timed else slowly)
    assert {why[name] for name in why if name != "loss-scaling"} == {None}
    words = f"no time, because {slowly}: loss-scaling; --technique loss-scaling runs real steps"
    assert (words in " ".join(outcome.out.split())) != is_timed


def test_a_timed_row_has_the_bytes_of_the_real_step():
    chosen = {"plain": PLAIN, "sgd": combined("sgd")}
    for timed, real in zip(
        best_rows(TINY, chosen, silent, 1, math.inf),
        measured_rows(TINY, chosen, False, silent),
        strict=True,
    ):
        assert timed.trace.at_peak == real.trace.at_peak
        assert timed.gradient_difference == real.gradient_difference
        assert timed.time_ratio == 1
        assert (timed.trace.dry, real.trace.dry) == (True, False)


@pytest.fixture(scope="module")
def first_command(memlab_in, tmp_path_factory):
    """Run `memlab measure` as a newcomer does, of a model with one block."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(SUITABLE, "cpu", TINY)
        patch.setattr(PairedRuns, "row", lambda self, name, _, trace: Row(name, trace, 1, (1.0,)))
        patch.setattr(rows, "slowdown_of", lambda dtype: 24.0)
        return memlab_in(tmp_path_factory.mktemp("first"), "measure").out.splitlines()


def test_the_first_command_prints_a_screen(first_command):
    assert len(first_command) <= 40
    assert max(map(len, first_command)) <= 80
    assert re.fullmatch(r"[a-z0-9, -]+ takes? \d\d% less memory", first_command[0])
    assert "next: memlab run --gpu rtx4090 your_script.py" in first_command
    assert f"{len(TECHNIQUES) + len(COMBINATIONS) - 11} more: --all" in first_command


def test_the_first_command_shows_the_smallest_peaks(first_command):
    start = first_command.index(next(line for line in first_command if line[:5] == "plain"))
    shown = first_command[start + 1 :][:10]
    peaks = [parse_bytes(re.search(r"[\d.]+ [KM]iB", line)[0]) for line in shown]
    assert peaks == sorted(peaks)


@pytest.mark.parametrize("arguments", [[], ["--dry-run"], ["--technique", "sgd"]])
def test_progress_counts_the_rows(memlab_command, monkeypatch, arguments):
    monkeypatch.setattr(terminal, "SECONDS_BETWEEN_LINES", -1)
    monkeypatch.setattr(choices, "TECHNIQUES", {n: TECHNIQUES[n] for n in ("plain", "sgd")})
    monkeypatch.setattr(choices, "COMBINATIONS", {})
    *_, last = memlab_command("measure", "--model", "tiny", "--seq", "8", *arguments).err.split(
        "\n"
    )[:-1]
    done, stages = re.match(r"(\d+) of (\d+)", last).groups()
    assert done == stages


def test_the_accelerator_is_the_default_device(monkeypatch):
    monkeypatch.setattr(choices, "devices_present", lambda: ["cpu", "xpu"])
    assert choose_device(Request(device=None, dry=False)) == "xpu"


def test_the_cpu_can_be_chosen_beside_an_accelerator(monkeypatch):
    monkeypatch.setattr(choices, "devices_present", lambda: ["cpu", "xpu"])
    assert choose_device(Request(device="cpu", dry=False)) == "cpu"


def test_the_default_batch_leaves_half_of_an_accelerators_free_memory(monkeypatch):
    small = replace(SUITABLE["accelerator"], model="tiny", seq_len=64)
    monkeypatch.setitem(SUITABLE, "accelerator", small)
    wanted = second_step(PLAIN, replace(small, batch=2)).peak_bytes
    monkeypatch.setattr(choices, "memory_of", lambda device: (2 * wanted, 10**12))
    assert choose(device="cuda", dry=False) == replace(small, batch=2, device="cuda")


def test_a_given_batch_is_kept(monkeypatch):
    monkeypatch.setattr(choices, "memory_of", lambda device: (0, 10**12))
    assert choose(model="tiny", batch=5, device="cuda", dry=False).batch == 5


def test_a_step_larger_than_the_machine_does_not_start(usage_error, monkeypatch):
    wanted = second_step(PLAIN, Setting("tiny", 4, 64)).peak_bytes
    monkeypatch.setattr(choices, "memory_of", lambda device: (0, wanted - 1))
    line = usage_error("measure", "--model", "tiny")
    assert line.startswith(
        f"a plain step of tiny, 4 × 64 tokens, float32, cpu needs {format_bytes(wanted)}; "
    )
    assert line.endswith("add --dry-run, which allocates nothing")


def test_a_step_as_large_as_the_machine_starts(monkeypatch):
    wanted = second_step(PLAIN, Setting("tiny", 4, 64)).peak_bytes
    monkeypatch.setattr(choices, "memory_of", lambda device: (0, wanted))
    assert choose(model="tiny", dry=False) == Setting("tiny", 4, 64)


def test_without_a_known_memory_size_nothing_is_refused(monkeypatch):
    monkeypatch.setattr(choices, "memory_of", lambda device: None)
    assert choose(model="tiny", dry=False) == Setting("tiny", 4, 64)
    assert choose(model="tiny", device="cuda", dry=False).batch == SUITABLE["accelerator"].batch


# ------------------------------------------------------------------ the folder and its files


@pytest.fixture
def quick(memlab_command, monkeypatch, kept_rows):
    """Run the fastest command that measures, the first time; then it writes the same rows."""
    monkeypatch.setattr("memlab.cli.measure.measured_rows", kept_rows)
    return lambda *more: memlab_command(
        "measure", "--model", "tiny", "--dry-run", "--technique", "sgd", *more
    )


@pytest.fixture(scope="module")
def kept_rows():
    known = {}

    def rows_of(setting, techniques, *others):
        if setting not in known:
            known[setting] = measured_rows(setting, techniques, *others)
        return known[setting]

    return rows_of


@pytest.fixture(scope="module")
def finished(memlab_in, tmp_path_factory):
    """Return a successful command's outcome and its output folder."""
    folder = tmp_path_factory.mktemp("finished")
    arguments = ("--model", "tiny", "--dry-run", "--technique", "sgd", "--out", "here/and/there")
    return memlab_in(folder, "measure", *arguments), folder / "here/and/there"


def test_numbers_and_pictures_are_written(finished):
    outcome, folder = finished
    assert outcome.status == 0
    assert {path.name for path in folder.iterdir()} == set(FILES)
    assert outcome.out.endswith(
        "written: here/and/there/measure.json, here/and/there/measure.png,\n"
        "  here/and/there/measure-timeline.png, here/and/there/measure-blocks.png\n"
    )


def test_the_results_match_the_traces(finished):
    _, folder = finished
    numbers = json.loads((folder / "measure.json").read_text())
    assert numbers["what"] == "tiny, 4 × 64 tokens, float32, cpu, dry run"
    for row in numbers["rows"]:
        trace = second_step(combined(row["technique"]), Setting("tiny", 4, 64))
        assert (row["peak_bytes"], row["at_peak"]) == (trace.peak_bytes, trace.at_peak)


def test_the_results_include_a_prediction_for_cuda(finished):
    outcome, folder = finished
    numbers = json.loads((folder / "measure.json").read_text())
    for row in numbers["on_cuda"]:
        trace = predicted_trace(Setting("tiny", 4, 64, device="cuda"), combined(row["technique"]))
        assert row["peak_bytes"] == trace.peak_bytes
        assert row["memory"]["reserved_peak_bytes"] == trace.reserved_bytes
        shown = [row["technique"], *format_bytes(trace.allocated_bytes).split()]
        assert any(line.split()[:3] == shown for line in outcome.out.splitlines())


def test_the_output_says_what_to_do_next(finished):
    outcome, _ = finished
    assert "\nnext: memlab plan --model tiny --gpu rtx4090\n" in outcome.out


def test_nan_is_written_to_json_as_text(tmp_path):
    trace = second_step(PLAIN)
    results.write([Row("plain", trace, gradient_difference=math.nan)], "", tmp_path)

    def refuse(constant):
        raise AssertionError(constant)

    text = (tmp_path / "measure.json").read_text()
    [row] = json.loads(text, parse_constant=refuse)["rows"]
    assert row["gradient_difference"] == "nan"


def test_without_matplotlib_only_the_results_are_written(quick, tmp_path, monkeypatch):
    monkeypatch.setattr(results.importlib.util, "find_spec", lambda name: None)
    outcome = quick()
    assert "no pictures: matplotlib is not installed; run pip install matplotlib" in outcome.out
    assert [path.name for path in (tmp_path / "work").iterdir()] == ["measure.json"]


@pytest.fixture
def old_files(tmp_path):
    """Create files of an earlier run. Return a function that reads the current files."""
    (tmp_path / "work").mkdir()
    for name in FILES:
        (tmp_path / "work" / name).write_text(f"old {name}")
    return lambda: {path.name: path.read_bytes() for path in (tmp_path / "work").iterdir()}


def test_a_failing_picture_leaves_every_old_file(quick, old_files, monkeypatch):
    before = old_files()
    monkeypatch.setattr(plot, "timeline", raising(OSError("No space left on device")))
    outcome = quick()
    assert outcome.status == 2
    assert outcome.err == "memlab: writing to work failed: No space left on device\n"
    assert old_files() == before


@pytest.mark.parametrize("moment", ["a technique", "the last picture"])
def test_ctrl_c_is_one_line_and_leaves_every_old_file(quick, old_files, monkeypatch, moment):
    before = old_files()
    interrupt = lambda *arguments, **named: signal.raise_signal(signal.SIGINT)  # noqa: E731
    if moment == "a technique":
        monkeypatch.setattr("memlab.cli.measure.measured_rows", measured_rows)
        monkeypatch.setitem(TECHNIQUES, "sgd", with_attention(interrupt))
    else:
        monkeypatch.setattr(plot, "timeline", interrupt)
    outcome = quick()
    assert outcome.status == 130
    assert outcome.err == "memlab: interrupted; nothing was written\n"
    assert old_files() == before


def test_ctrl_c_between_two_renames_leaves_only_new_files(quick, old_files, monkeypatch):
    before = old_files()
    replace = Path.replace

    def interrupted(path, target):
        signal.raise_signal(signal.SIGINT)
        return replace(path, target)

    monkeypatch.setattr(Path, "replace", interrupted)
    assert quick().status == 0
    after = old_files()
    assert after.keys() == before.keys()
    assert all(after[name] != before[name] for name in before)


def test_a_file_in_place_of_the_folder_is_detected_before_measuring(usage_error, tmp_path):
    (tmp_path / "taken").touch()
    line = usage_error("measure", "--model", "tiny", "--out", "taken")
    assert line == "got --out taken, which is not writable (File exists); name another folder"


@pytest.mark.parametrize("out", ["new", "new/and/deeper"])
def test_checking_the_folder_leaves_no_trace(monkeypatch, tmp_path, out):
    monkeypatch.chdir(tmp_path)
    assert choose_folder(out) == Path(out)
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "new").mkdir()
    assert choose_folder(out) == Path(out)
    assert list(tmp_path.rglob("*")) == [tmp_path / "new"]


def test_a_read_only_folder_is_detected_before_measuring(monkeypatch, tmp_path):
    monkeypatch.setattr(parsing, "TemporaryFile", raising(PermissionError(13, "Permission denied")))
    with pytest.raises(UsageError, match=r"is not writable \(Permission denied\)"):
        choose_folder(str(tmp_path))


# ------------------------------------------------------------------ the table and remarks


def table_lines(*rows_: Row) -> list[str]:
    """Return the lines of the table."""
    with terminal.console.capture() as capture:
        terminal.console.print(report.table(rows_))
    return [line.rstrip() for line in capture.get().splitlines()]


def trace_of(bytes_: int) -> Trace:
    return Trace((Event(bytes_, 1, "activations", "", "", "forward", "float32", ()),))


def cells(title: str, *rows_: Row) -> list[str]:
    """Return the cells of a column."""
    [column] = [column for column in report.table(rows_).columns if column.header == title]
    return list(column.cells)


@pytest.mark.parametrize(
    ("bytes_", "saving"),
    [(1000, "0.0%"), (900, "+10.0%"), (1100, "-10.0%"), (100_001, "-9900.1%")],
)
def test_the_saving_is_relative_to_the_plain_peak(bytes_, saving):
    plain, ours = Row("plain", trace_of(1000)), Row("other", trace_of(bytes_))
    assert cells("saved", plain, ours) == ["", saving]


@pytest.mark.parametrize("bytes_", [999_999, 1_000_001])
def test_a_change_too_small_to_show_has_no_sign(bytes_):
    plain, ours = Row("plain", trace_of(10**6)), Row("other", trace_of(bytes_))
    assert cells("saved", plain, ours) == ["", "0.0%"]


def test_the_plain_time_is_in_seconds_and_the_others_are_ratios():
    plain = Row("plain", trace_of(1), seconds=0.25, time_ratios=(1.0,))
    ours = Row("other", trace_of(1), seconds=0.5, time_ratios=(1.9, 2.0, 2.2))
    assert cells("time", plain, ours) == ["250 ms", "2.00 ×"]


def test_gradients_are_equal_or_show_a_difference():
    differences = (None, 0.0, 0.00123, math.nan)
    rows_ = [Row("x", trace_of(1), gradient_difference=d) for d in differences]
    assert cells("gradients", *rows_) == ["", "equal", "1.2e-03", "nan"]


def test_empty_columns_are_left_out():
    assert table_lines(Row("plain", trace_of(1)))[0].split() == ["technique", "peak", "peak", "in"]


# The smallest and largest CUDA context, as in the nvidia-smi column.
LEAST, MOST = 256 * 2**20, 616 * 2**20


def test_a_prediction_shows_and_explains_three_numbers():
    memory = DeviceMemory(allocated_peak_bytes=3 * 2**30, reserved_peak_bytes=4 * 2**30)
    row = Row("plain", replace(trace_of(2**30), device="cuda", dry=True, memory=memory))
    assert cells("allocated", row) == ["3.00 GiB"]
    assert cells("reserved", row) == ["4.00 GiB"]
    assert cells("nvidia-smi", row) == [f"{4 + LEAST / 2**30:.2f}–{4 + MOST / 2**30:.2f} GiB"]
    assert [remark.partition(":")[0] for remark in report.legend([row])] == [
        "allocated",
        "reserved",
        "nvidia-smi",
    ]


def test_nvidia_smi_shows_one_number_where_the_context_was_measured():
    memory = DeviceMemory(allocated_peak_bytes=2**30, reserved_peak_bytes=2 * 2**30)
    trace = replace(trace_of(2**30), device="cuda", dry=True, memory=memory)
    *_, line = report.memory_numbers(trace, report.context_of("cuda:t4"))
    assert line == (
        "nvidia-smi 2.14 GiB: reserved plus the CUDA context, 140.88 MiB here; other processes "
        "come on top"
    )
    for device in ("cuda", "cuda:rtx3060", "cpu", None):
        assert report.context_of(device) == (LEAST, MOST)


def test_the_saving_of_a_prediction_uses_allocated_bytes():
    plain, ours = (
        Row("x", replace(trace_of(1), dry=True, memory=DeviceMemory(count, 2**30)))
        for count in (1000, 900)
    )
    assert cells("saved", plain, ours) == ["", "+10.0%"]


def test_a_real_device_shows_nvidia_smi():
    memory = DeviceMemory(2**30, 2 * 2**30, used_bytes=3 * 2**30)
    trace = replace(trace_of(2**30), device="cuda", memory=memory)
    assert [sentence.partition(":")[0] for sentence in report.memory_numbers(trace)] == [
        "allocated 1.00 GiB",
        "reserved 2.00 GiB",
        "nvidia-smi 3.00 GiB",
    ]
    assert list(report.memory_numbers(trace_of(1))) == []  # on the CPU


@pytest.fixture
def wide_rows() -> list[Row]:
    """Return rows with the widest cells below a terabyte."""
    memory = DeviceMemory(reserved_peak_bytes=10**12)
    event = Event(10**12, 1, "activations", "", "", "optimizer", "float32", ())
    wide = Trace((event,), memory=memory)
    half = Trace((event._replace(bytes=event.bytes // 2),), memory=memory)
    return [
        Row("plain", half, 123.45, (1.0,), 0.0),
        Row("eager-attention", wide, 1234.5, (10.01,), 1.2e-10),
    ]


def test_a_table_below_a_terabyte_fits_into_80_columns(wide_rows):
    assert max(map(len, table_lines(*wide_rows))) <= 80


def test_a_table_of_predictions_fits_into_80_columns(wide_rows):
    predicted = [Row(row.name, replace(row.trace, dry=True)) for row in wide_rows]
    assert max(map(len, table_lines(*predicted))) <= 80


def test_a_narrow_terminal_truncates_no_number(wide_rows, monkeypatch):
    monkeypatch.setenv("COLUMNS", "20")
    assert " ".join(table_lines(*wide_rows)[2].split()) == (
        "eager-attention 931.32 GiB -100.0% 931.32 GiB optimizer 10.01 × 1.2e-10"
    )


def test_a_saving_hidden_by_the_peak_is_explained(monkeypatch):
    """With two tokens and untied weights, the peak is in the optimizer step."""
    monkeypatch.setitem(PRESETS, "untied", replace(PRESETS["tiny"], layers=4, tied=False))
    setting = Setting("untied", batch=1, seq_len=2)
    plain, ours = (dry_row(setting, n, combined(n)) for n in ("plain", "checkpointing"))
    assert plain.trace.peak_bytes == ours.trace.peak_bytes
    [remark] = report.remarks([plain, ours])
    most = [most_activations(row.trace) for row in (ours, plain)]
    assert remark == (
        f"checkpointing: activations reach {most[0] / 1024:.2f} KiB (plain: {most[1] / 1024:.2f} "
        f"KiB), which does not change the peak, in the optimizer step; try a larger --batch or "
        f"--seq"
    )


def most_activations(trace: Trace) -> int:
    changes = (event.bytes for event in trace.events if event.category == "activations")
    return max(itertools.accumulate(changes))


def test_a_cost_hidden_by_the_peak_is_explained():
    plain, ours = (dry_row(TINY, n, combined(n)) for n in ("plain", "foreach-adamw"))
    all_weights = format_bytes(4 * PRESETS["tiny"].parameters)
    [remark] = report.remarks([plain, ours])
    assert remark == (
        f"foreach-adamw: optimizer temporaries reach {all_weights} (plain: 64.00 KiB), which does "
        f"not change the peak, in backward"
    )


def peak_of(**bytes_: int) -> Row:
    """Return a row with all bytes alive at the peak."""
    events = (
        Event(count, number, category, "", "", "backward", "float32", ())
        for number, (category, count) in enumerate(bytes_.items())
    )
    return Row("", Trace(tuple(events)))


def test_a_shift_between_categories_at_the_peak_is_not_remarked():
    plain = peak_of(parameters=100, activations=50)
    ours = peak_of(parameters=100, activations=20, backward_temporaries=30)
    assert list(report.remarks([plain, ours])) == []


def test_extra_tensors_of_a_technique_are_reported():
    plain, ours = (dry_row(TINY, n, combined(n)) for n in ("plain", "post-hoc-ema"))
    averages = 2 * 4 * PRESETS["tiny"].parameters  # two averages in float32
    assert list(report.remarks([plain, ours])) == [
        f"post-hoc-ema: keeps {format_bytes(averages)} across steps beside weights and "
        f"optimizer state, counted as inputs"
    ]


def test_a_remark_is_wrapped_without_breaking_words():
    words = ["eager-attention:", *["--batch"] * 40, "x" * 90]
    lines = paragraph(" ".join(words)).splitlines()
    assert " ".join(lines).split() == words
    assert max(map(len, lines[:-1])) <= 80


def test_a_saving_in_the_peak_needs_no_remark():
    plain, ours = (dry_row(TINY, n, combined(n)) for n in ("plain", "checkpointing"))
    assert plain.trace.peak_bytes != ours.trace.peak_bytes
    assert list(report.remarks([plain, ours])) == []


def test_rounds_that_differ_are_reported():
    plain = Row("plain", trace_of(1), seconds=1.0, time_ratios=(1.0, 1.0))
    ours = Row("other", trace_of(1), seconds=1.0, time_ratios=(1.0, 1.25))
    assert list(report.remarks([plain, ours])) == [
        "time: rounds differ by up to 25%; this machine is busy, or the steps are too short to time"
    ]


def test_gradient_differences_are_shown_relative_to_the_gradients(real_rows):
    plain, ours = real_rows["plain"], real_rows["autocast"]
    [remark] = report.remarks([plain, ours])
    assert remark == (
        f"gradients: the largest difference from the plain step's, "
        f"which reach {plain.largest_gradient:.1e}"
    )


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_text_printed_beside_the_progress_bar_goes_to_standard_output(monkeypatch):
    out, err = io.StringIO(), Terminal()
    monkeypatch.setattr(sys, "stdout", out)
    monkeypatch.setattr(sys, "stderr", err)
    with terminal.progress(stages=1) as announce:
        announce("the only stage")
        print("a number")
    assert out.getvalue() == "a number\n"
    assert "the only stage" in err.getvalue()


def test_piped_output_is_printable_text(finished):
    outcome, _ = finished
    assert outcome.err == ""
    assert [c for c in outcome.out if not c.isprintable() and c != "\n"] == []


def test_the_output_names_the_setting_and_shows_the_peak(finished):
    outcome, _ = finished
    with memlab.dry_run():
        trace = second_step(PLAIN, Setting("tiny", 4, 64))
    assert outcome.out.startswith(
        f"sgd takes 9% less memory\n\ntiny, 4 × 64 tokens, float32, cpu\n"
        f"{PRESETS['tiny'].parameters:,} parameters; dry run, nothing is computed; "
    )
    assert f"\nplain: {trace}\n" in outcome.out
