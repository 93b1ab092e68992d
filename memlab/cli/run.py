"""`memlab run`: predict or measure a training script as it is, without changing a line."""

import io
import os
import re
import sys
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import redirect_stdout
from dataclasses import replace
from pathlib import Path
from typing import Any

from memlab.allocator.capacity import needed_bytes
from memlab.cli import report, terminal
from memlab.cli.advice import show_advice
from memlab.cli.errors import UsageError, quoted
from memlab.cli.parsing import choose_folder
from memlab.cli.plan_options import choose_memory
from memlab.cli.plan_report import EMPTIES_CACHE, room
from memlab.cli.requests import RunRequest
from memlab.cli.results import fill_font_cache, write_run
from memlab.cli.rows import Row
from memlab.cli.run_progress import announce, ended_by_a_signal, telling_where
from memlab.cli.run_ranks import highest, show_ranks, show_transfers
from memlab.cli.script import as_usage_errors, assumed, check_assumption
from memlab.configs.evidence import doubt
from memlab.configs.targets import accepted_devices, find_target
from memlab.planner import Memory
from memlab.planner.cards import budget_bytes
from memlab.scripts.evaluations import Evaluation
from memlab.scripts.launch import Launch, launch_of
from memlab.scripts.ranks import run_ranks
from memlab.scripts.running import Outcome, joins_others, run
from memlab.trace import Event, Trace
from memlab.units import WIDTH, format_bytes, paragraph
from memlab.world.confinement import unconfined_reason
from memlab.world.data.columns import Columns, columns_of

LARGEST = 8  # rows in each list


MATH_SOFTMAX = "aten._safe_softmax.default"  # only torch's math attention calls it
NOTABLE_SCORES = 0.1  # of the peak
_MATH_ATTENTION = (
    "{} of these are attention scores: torch has no fused kernel here for these inputs, and its "
    "math attention stores a matrix per head in float32. From Ampere on, flash attention takes "
    "float16 and bfloat16 with grouped heads, but no mask other than a causal one. Efficient "
    "attention takes masks, float16 and float32, also on a T4, but no grouped heads"
)


_WITH_GRADIENTS = (
    "Gradients were enabled, so it stored activations for a backward pass that never "
    "came; torch.no_grad() around it avoids that"
)
_WITHOUT_GRADIENTS = (
    "It stored no activations, so outputs used the memory: lower its batch size, or move what it "
    "keeps of each batch to the CPU"
)


_NEEDS_LESS = (
    "that is less than the reserved peak below, which a larger card would have: if a card is full, "
    "torch releases its unused memory and requests again"
)


_UNCONFINED = (
    "the operating system does not confine the script ({}); only functions that memlab replaces in "
    "Python keep it from files, programs and the network"
)


def run_script(request: RunRequest) -> int:
    """Run the script, print where its memory goes, write results; return 1 if it does not fit."""
    launch = _launch(request)
    memory, target = _target(request)
    check_assumption(request.assume)
    folder = choose_folder(request.out)
    if request.confinement is not None:
        fill_font_cache()
        request.confinement.begin(folder, network=joins_others(launch, real=request.real))
    began = time.monotonic()
    outcomes = _outcomes(launch, request, target)
    seconds = time.monotonic() - began
    outcome = outcomes[highest(outcomes)]
    trace = outcome.trace
    assert trace is not None
    if request.real and outcome.rank > 0:
        return _show_another_rank(launch, outcome, trace, folder)
    terminal.echo(paragraph(f"{launch}: {_how(request, target, outcome)}"))
    for note in (*assumed(trace), *outcome.notes):
        terminal.echo(paragraph(note))
    terminal.echo("")
    if len(outcomes) > 1:
        show_ranks(outcomes)
    status = 0 if memory is None else _show_verdict(trace, memory, target, outcome.steps)
    _show_peak(trace, None if request.real else target, outcome.evaluation)
    show_transfers(outcome, launch.ranks or outcome.ranks or 1)
    changed: dict[str, Trace] = {}
    if request.advise or (request.advise is None and status):
        budget = None if memory is None else budget_bytes(memory, target)
        changed = show_advice(launch, _settings(request, target), outcome, budget, seconds)
    elif not request.real:
        terminal.echo("\n--advise predicts changes that save memory, and prints their code")
    if rest := [note for note in trace.notes if note not in assumed(trace)]:
        terminal.echo("\n" + "\n".join(paragraph(f"note: {note}") for note in rest))
    verdict = "measured" if memory is None else "does not fit" if status else "fits"
    rows = [Row(str(launch), trace), *(Row(f"with {name}", each) for name, each in changed.items())]
    attempts = [attempt for each in outcomes.values() for attempt in each.attempts]
    write_run(rows, _title(launch, request, target), folder, verdict, attempts)
    return status


def _show_another_rank(launch: Launch, outcome: Outcome, trace: Trace, folder: Path) -> int:
    """Print one line, so that the outputs of real ranks do not mix; write to an own folder."""
    which = f"rank {outcome.rank} of {outcome.ranks}"
    peak = f"peak {format_bytes(trace.peak_bytes)} in {trace.peak_phase}"
    folder = folder / f"rank{outcome.rank}"
    print(terminal.printable(f"{which}: {peak} ({folder}/run.json)"), flush=True)
    with redirect_stdout(io.StringIO()):
        write_run([Row(str(launch), trace)], f"{launch}, {which}", folder, "measured")
    return 0


def _launch(request: RunRequest) -> Launch:
    try:
        launch = launch_of(request.words or [])
    except ValueError as error:
        raise UsageError(str(error)) from error
    if request.ranks is not None:
        if launch.ranks is not None:
            raise UsageError("got --ranks with a launcher; leave --ranks out")
        launch = launch.with_ranks(request.ranks)
    if launch.visible_gpus == 0 and request.device != "cpu" and not request.real:
        raise UsageError(
            "got CUDA_VISIBLE_DEVICES without a GPU, so the script would use the CPU; pass "
            "--device cpu, or leave the variable out"
        )
    if (most := max(request.rank or (0,))) >= (launch.ranks or 1) * launch.nodes:
        raise UsageError(
            f"got --rank {most} of {(launch.ranks or 1) * launch.nodes}; ranks count from "
            f"0, and --ranks says how many there are"
        )
    if request.real and (launch.ranks or 1) > 1:
        raise UsageError(
            "got --real with several ranks; start them with torchrun, such as torchrun "
            f"--nproc-per-node {launch.ranks} -m memlab run --real {launch}"
        )
    return launch


def _target(request: RunRequest) -> tuple[Memory | None, str]:
    """Return the memory that the step has to fit into, if it is given, and what to predict for."""
    if request.real and request.device:
        raise UsageError(
            f"got --real together with --device {request.device}; a real run uses the device that "
            f"the script chooses, so leave --device out"
        )
    if request.real and request.assume:
        raise UsageError("got --assume with --real; a real step knows its sizes, so leave it out")
    if request.gpus and (request.real or request.device == "cpu"):
        raise UsageError("got --gpus without a prediction for a GPU; leave it out")
    if request.memory is not None:
        return choose_memory(request.memory, request.device, request.margin)
    if request.margin is not None:
        raise UsageError("got --margin without --gpu; name a GPU, such as --gpu rtx4090")
    if request.device in (None, "cpu"):
        return None, request.device or "cuda"
    found = find_target(request.device)
    if found is None:
        raise UsageError(
            f"got --device {request.device}; {accepted_devices(request.device, 'cpu')}"
        )
    return None, found.device


def _outcomes(launch: Launch, request: RunRequest, target: str) -> dict[int, Outcome]:
    """Run the script; return the outcomes by rank. What it prints goes to standard error.

    A script that ends before the wanted step is run again, and measured from its start.
    """
    settings = {**_settings(request, target), "announce": announce}
    dry = "a run without --real" if request.real else ""
    announce(f"running {launch} until step {request.steps} has ended")
    if not request.allow_writes and request.confinement is None:
        announce(_UNCONFINED.format(unconfined_reason()))

    def ran(steps: int) -> dict[int, Outcome]:
        if request.real:
            return {0: run(launch, steps=steps, **settings)}
        found = run_ranks(launch, request.rank or (), steps=steps, **settings)
        return found if request.rank is None else {rank: found[rank] for rank in request.rank}

    with (
        ended_by_a_signal(),
        telling_where(launch.folder),
        as_usage_errors(Path(launch.script), launch.folder, dry),
        redirect_stdout(sys.stderr),
    ):
        outcomes = ran(request.steps)
        outcome = outcomes[highest(outcomes)]
        if outcome.trace is None and outcome.steps:
            announce(f"the script ended after step {outcome.steps}; running it again")
            outcomes = ran(outcome.steps)
            outcome = outcomes[highest(outcomes)]
    if outcome.trace is None:
        raise UsageError(
            f"{launch} ended without a training step: no torch.optim optimizer stepped and "
            f"nothing called backward; give the arguments that make it train"
        )
    if not outcome.trace.peak_bytes:
        raise UsageError(f"the step of {launch} allocated nothing on {outcome.trace.device}")
    return outcomes


def _settings(request: RunRequest, target: str) -> dict[str, Any]:
    """Return the arguments of `run` that the options choose."""
    return {
        "device": None if request.real else target,
        "gpus": request.gpus,
        "real": request.real,
        "assume": request.assume,
        "allow_writes": request.allow_writes,
        "configs": _configs(request.configs or ()),
        "columns": _columns(request.batch_like),
    }


def _configs(given: Sequence[str]) -> dict[str, str]:
    """Return the paths of config.json files by the names that the script uses."""
    paths = {}
    for pair in given:
        name, _, path = pair.partition("=")
        if not name or not os.path.exists(path):
            raise UsageError(
                f"got --config {quoted(pair)}; give the model's name in the script and an existing "
                f"config.json or its folder, such as --config gpt2=gpt2/config.json"
            )
        paths[name] = path
    return paths


def _columns(given: str | None) -> Columns | None:
    try:
        return None if given is None else columns_of(given)
    except ValueError as error:
        raise UsageError(str(error)) from error


def _how(request: RunRequest, target: str, outcome: Outcome) -> str:
    which = f"step {outcome.steps}" + (" (its only one)" if outcome.steps == 1 else "")
    if outcome.ranks is not None and outcome.ranks > 1:
        which += f" of rank {outcome.rank} of {outcome.ranks}"
    if request.real:
        return f"{which}, measured on this machine"
    on = "the CPU's memory, in a dry run" if target == "cpu" else f"predicted for {target}"
    return f"{which}, {on}; nothing is computed, so a printed loss is meaningless"


def _title(launch: Launch, request: RunRequest, target: str) -> str:
    return str(launch) if request.real else f"{launch}, predicted for {target}"


# ------------------------------------------------------------------ the peak


def _show_peak(trace: Trace, target: str | None, evaluation: Evaluation | None) -> None:
    """Print the peak by category, by layers and by lines."""
    if evaluation:
        terminal.echo(paragraph(_of_evaluation(evaluation, trace.peak_bytes)) + "\n")
    terminal.echo(str(replace(trace, notes=())))
    if numbers := "\n".join(
        map(paragraph, report.memory_numbers(trace, report.context_of(target)))
    ):
        terminal.echo(f"\n{numbers}")
    alive = trace.alive(trace.peak_position)
    terminal.echo("\nat the peak, by layer (* stands for a number):")
    _show_largest((_layer(event), event) for event in alive)
    if any(event.line for event in alive):
        terminal.echo("\nat the peak, allocated in this step, by line of code:")
        _show_largest((f"{event.line}  {event.category}", event) for event in alive if event.line)
    scores = sum(event.bytes for event in alive if event.operator == MATH_SOFTMAX)
    if scores > NOTABLE_SCORES * trace.peak_bytes:
        terminal.echo("\n" + paragraph(_MATH_ATTENTION.format(format_bytes(scores))))


def _of_evaluation(evaluation: Evaluation, step_bytes: int) -> str:
    """Compare the peak of an evaluation with the step's."""
    peak = format_bytes(evaluation.peak_bytes)
    if evaluation.peak_bytes < step_bytes:
        return f"an evaluation of {evaluation.model} needs less: its peak is {peak}"
    where = "the peak is in an evaluation"
    if evaluation.peak_bytes > step_bytes:
        where = f"before this step, an evaluation had a higher peak, {peak}"
    remedy = _WITH_GRADIENTS if evaluation.gradients else _WITHOUT_GRADIENTS
    return f"{where}: {evaluation.model} was in evaluation mode. {remedy}"


def _layer(event: Event) -> str:
    """Return the module's path with its numbers replaced, and the category."""
    path = event.module.removeprefix("_orig_mod.")  # of a compiled model
    path = re.sub(r"(?<![^.])\d+(?![^.])", "*", path) or "outside modules"
    return f"{path}  {event.category}"


def _show_largest(named: Iterator[tuple[str, Event]]) -> None:
    """Print the groups with most bytes, each with its number of tensors."""
    groups: dict[str, list[int]] = defaultdict(list)
    for name, event in named:
        groups[name].append(event.bytes)
    ranked = sorted(groups.items(), key=lambda group: -sum(group[1]))
    for name, sizes in ranked[:LARGEST]:
        total, count = format_bytes(sum(sizes)), f"{len(sizes)} ×" if len(sizes) > 1 else ""
        where, category = name.split("  ")
        line = f"  {total:>11}  {count:>6} {category.replace('_', ' '):<20} {where}"
        terminal.echo(line if len(line) <= WIDTH else f"{line[:39].rstrip()}\n{' ' * 15}{where}")
    if rest := ranked[LARGEST:]:
        total = format_bytes(sum(sum(sizes) for _, sizes in rest))
        terminal.echo(f"  {total:>11}  in {len(rest)} more groups")


# ------------------------------------------------------------------ does it fit?


def _show_verdict(trace: Trace, memory: Memory, target: str, steps: int) -> int:
    """Print the answer first: how much the step needs, of how much."""
    budget = budget_bytes(memory, target)
    left = budget - (needed := needed_bytes(trace, budget))
    needs = f"it needs {format_bytes(needed)}"
    terminal.echo(paragraph(room(memory, target)))
    if left >= 0:
        terminal.echo(f"{needs}: it fits, {format_bytes(left)} are left")
        most = trace.memory.reserved_most_bytes or 0
        kind, times = doubt(trace.notes) or ("", 1.0)
        if most > budget:
            terminal.echo(
                paragraph(
                    f"with other convolution kernels it may need up to {format_bytes(most)}, and "
                    f"then not fit"
                )
            )
        elif times * needed > budget:
            terminal.echo(
                paragraph(
                    f"but it may not: of measured steps of this kind ({kind}) one reserved "
                    f"{times:.2f} times its prediction"
                )
            )
        terminal.echo(
            paragraph(
                f"if the script evaluates after step {steps}, that is not included; --steps N goes "
                f"on to step N"
            )
        )
        if (trace.reserved_bytes or 0) > budget:
            terminal.echo(paragraph(EMPTIES_CACHE))
    else:
        terminal.echo(f"{needs}: it does not fit, {format_bytes(-left)} are lacking")
        if (trace.reserved_bytes or 0) > needed:
            terminal.echo(paragraph(_NEEDS_LESS))
    terminal.echo("")
    return int(left < 0)
