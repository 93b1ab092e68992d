"""`memlab run`: predict or measure a training script as it is, without changing a line."""

import io
import math
import os
import re
import sys
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import redirect_stdout
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from rich.table import Table

from memlab.allocator.capacity import needed_bytes
from memlab.cli import report, terminal
from memlab.cli.errors import UsageError, error_summary, quoted
from memlab.cli.parsing import choose_folder
from memlab.cli.plan import choose_memory
from memlab.cli.plan_report import EMPTIES_CACHE, room
from memlab.cli.results import write_run
from memlab.cli.rows import Row
from memlab.cli.run_progress import announce, ended_by_a_signal, telling_where
from memlab.cli.run_ranks import highest, show_ranks, show_transfers
from memlab.cli.script import as_usage_errors, assumed, check_assumption
from memlab.configs.targets import accepted_devices, find_target
from memlab.planner import Memory
from memlab.planner.cards import budget_bytes
from memlab.scripts.changes import (
    CHANGES,
    FSDP,
    Change,
    NotPossibleError,
    chunked_loss,
    logits_bytes,
    sharded_bytes,
    together,
)
from memlab.scripts.columns import Columns, columns_of
from memlab.scripts.launch import Launch, launch_of
from memlab.scripts.ranks import run_ranks
from memlab.scripts.running import Outcome, run
from memlab.trace import Event, Trace
from memlab.units import WIDTH, format_bytes, paragraph

LARGEST = 8  # rows in each list
NOTABLE_LOGITS = 0.1  # of the peak
_WITH_THE_BATCH = ("inputs", "activations", "forward_temporaries", "backward_temporaries")
NEEDS = (
    "needs: the least memory in which the step runs, because the allocator empties its cache when "
    "a card is full; reserved: on a larger card"
)


class Wanted(NamedTuple):
    """What the options of `memlab run` ask for."""

    words: Sequence[str]
    memory: str | None = None
    margin: str | None = None
    device: str | None = None
    gpus: int | None = None
    ranks: int | None = None
    rank: Sequence[int] | None = None
    real: bool = False
    steps: int = 2
    assume: str | None = None
    allow_writes: bool = False
    advise: bool | None = None
    configs: Sequence[str] = ()
    batch_like: str | None = None
    out: str = "work"


def run_script(wanted: Wanted) -> int:
    """Run the script, print where its memory goes, write results; return 1 if it does not fit."""
    launch = _launch(wanted)
    memory, target = _target(wanted)
    check_assumption(wanted.assume)
    folder = choose_folder(wanted.out)
    began = time.monotonic()
    outcomes = _outcomes(launch, wanted, target)
    seconds = time.monotonic() - began
    outcome = outcomes[highest(outcomes)]
    trace = outcome.trace
    assert trace is not None
    if wanted.real and outcome.rank > 0:
        return _show_another_rank(launch, outcome, trace, folder)
    terminal.echo(paragraph(f"{launch}: {_how(wanted, target, outcome)}"))
    for note in (*assumed(trace), *outcome.notes):
        terminal.echo(paragraph(note))
    terminal.echo("")
    if len(outcomes) > 1:
        show_ranks(outcomes)
    _show_peak(trace, None if wanted.real else target)
    show_transfers(outcome, launch.ranks or outcome.ranks or 1)
    status = 0 if memory is None else _show_verdict(trace, memory, target)
    changed: dict[str, Trace] = {}
    if wanted.advise or (wanted.advise is None and status):
        _announce_changes(seconds)
        changed = _show_advice(launch, wanted, target, outcome, memory)
    elif not wanted.real:
        terminal.echo("\n--advise predicts changes that save memory, and prints their code")
    if rest := [note for note in trace.notes if note not in assumed(trace)]:
        terminal.echo("\n" + "\n".join(paragraph(f"note: {note}") for note in rest))
    verdict = "measured" if memory is None else "does not fit" if status else "fits"
    rows = [Row(str(launch), trace), *(Row(f"with {name}", each) for name, each in changed.items())]
    write_run(rows, _title(launch, wanted, target), folder, verdict)
    return status


def _show_another_rank(launch: Launch, outcome: Outcome, trace: Trace, folder: Path) -> int:
    """Print one line, so that the outputs of real ranks do not mix; write to an own folder."""
    which = f"rank {outcome.rank} of {outcome.ranks}"
    peak = f"peak {format_bytes(trace.peak_bytes)} in {trace.peak_phase}"
    folder = folder / f"rank{outcome.rank}"
    print(f"{which}: {peak} ({folder}/run.json)", flush=True)
    with redirect_stdout(io.StringIO()):
        write_run([Row(str(launch), trace)], f"{launch}, {which}", folder, "measured")
    return 0


def _launch(wanted: Wanted) -> Launch:
    try:
        launch = launch_of(wanted.words)
    except ValueError as error:
        raise UsageError(str(error)) from error
    if wanted.ranks is not None:
        if launch.ranks is not None:
            raise UsageError("got --ranks with a launcher; leave --ranks out")
        launch = launch.with_ranks(wanted.ranks)
    if launch.visible_gpus == 0 and wanted.device != "cpu" and not wanted.real:
        raise UsageError(
            "got CUDA_VISIBLE_DEVICES without a GPU, so the script would use the CPU; pass "
            "--device cpu, or leave the variable out"
        )
    if (most := max(wanted.rank or (0,))) >= (launch.ranks or 1) * launch.nodes:
        raise UsageError(
            f"got --rank {most} of {(launch.ranks or 1) * launch.nodes}; ranks count from "
            f"0, and --ranks says how many there are"
        )
    if wanted.real and (launch.ranks or 1) > 1:
        raise UsageError(
            "got --real with several ranks; start them with torchrun, such as torchrun "
            f"--nproc-per-node {launch.ranks} -m memlab run --real {launch}"
        )
    return launch


def _target(wanted: Wanted) -> tuple[Memory | None, str]:
    """Return the memory that the step has to fit into, if it is given, and what to predict for."""
    if wanted.real and wanted.device:
        raise UsageError(
            f"got --real together with --device {wanted.device}; a real run uses the device that "
            f"the script chooses, so leave --device out"
        )
    if wanted.real and wanted.assume:
        raise UsageError("got --assume with --real; a real step knows its sizes, so leave it out")
    if wanted.gpus and (wanted.real or wanted.device == "cpu"):
        raise UsageError("got --gpus without a prediction for a GPU; leave it out")
    if wanted.memory is not None:
        return choose_memory(wanted.memory, wanted.device, wanted.margin)
    if wanted.margin is not None:
        raise UsageError("got --margin without --gpu; name a GPU, such as --gpu rtx4090")
    if wanted.device in (None, "cpu"):
        return None, wanted.device or "cuda"
    found = find_target(wanted.device)
    if found is None:
        raise UsageError(f"got --device {wanted.device}; {accepted_devices(wanted.device, 'cpu')}")
    return None, found.device


def _outcomes(launch: Launch, wanted: Wanted, target: str) -> dict[int, Outcome]:
    """Run the script; return the outcomes by rank. What it prints goes to standard error.

    A script that ends before the wanted step is run again, and measured from its start.
    """
    settings = {**_settings(wanted, target), "announce": announce}
    dry = "a run without --real" if wanted.real else ""
    announce(f"running {launch} until step {wanted.steps} has ended")

    def ran(steps: int) -> dict[int, Outcome]:
        if wanted.real:
            return {0: run(launch, steps=steps, **settings)}
        found = run_ranks(launch, wanted.rank or (), steps=steps, **settings)
        return found if wanted.rank is None else {rank: found[rank] for rank in wanted.rank}

    with (
        ended_by_a_signal(),
        telling_where(launch.folder),
        as_usage_errors(Path(launch.script), launch.folder, dry),
        redirect_stdout(sys.stderr),
    ):
        outcomes = ran(wanted.steps)
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


def _settings(wanted: Wanted, target: str) -> dict[str, Any]:
    """Return the arguments of `run` that the options choose."""
    return {
        "device": None if wanted.real else target,
        "gpus": wanted.gpus,
        "real": wanted.real,
        "assume": wanted.assume,
        "allow_writes": wanted.allow_writes,
        "configs": _configs(wanted.configs),
        "columns": _columns(wanted.batch_like),
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


def _how(wanted: Wanted, target: str, outcome: Outcome) -> str:
    which = f"step {outcome.steps}" + (" (its only one)" if outcome.steps == 1 else "")
    if outcome.ranks is not None and outcome.ranks > 1:
        which += f" of rank {outcome.rank} of {outcome.ranks}"
    if wanted.real:
        return f"{which}, measured on this machine"
    on = "the CPU's memory, in a dry run" if target == "cpu" else f"predicted for {target}"
    return f"{which}, {on}; nothing is computed, so a printed loss is meaningless"


def _title(launch: Launch, wanted: Wanted, target: str) -> str:
    return str(launch) if wanted.real else f"{launch}, predicted for {target}"


# ------------------------------------------------------------------ the peak


def _show_peak(trace: Trace, target: str | None) -> None:
    """Print the peak by category, by layers and by lines."""
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


def _show_verdict(trace: Trace, memory: Memory, target: str) -> int:
    budget = budget_bytes(memory, target)
    needed = needed_bytes(trace, budget)
    terminal.echo(f"\n{paragraph(room(memory, target))}")
    left, needs = budget - needed, f"it needs {format_bytes(needed)}"
    if left >= 0:
        terminal.echo(f"{needs}: it fits, {format_bytes(left)} are left")
        terminal.echo("not included: what the script does after this step, such as an evaluation")
        if (trace.reserved_bytes or 0) > budget:
            terminal.echo(paragraph(EMPTIES_CACHE))
        return 0
    terminal.echo(f"{needs}: it does not fit, {format_bytes(-left)} are lacking")
    return 1


# ------------------------------------------------------------------ what to change


def _announce_changes(seconds: float) -> None:
    """Say how long the changes take before they are tried."""
    count = f"{len(CHANGES)} changes, about {max(1, round(seconds))} s for each"
    print(f"memlab: trying {count}; --no-advice leaves them out", file=sys.stderr, flush=True)


def _show_advice(
    launch: Launch, wanted: Wanted, target: str, plain: Outcome, memory: Memory | None
) -> dict[str, Trace]:
    """Predict the script with changes; print each one's peak, and the code of the helpful ones.

    Returns the traces by the names of the changes.
    """
    assert plain.trace is not None
    traces, reasons, helpful = _tried(launch, _settings(wanted, target), plain)
    budget = None if memory is None else budget_bytes(memory, target)
    terminal.echo("\nchanges that would save memory, each predicted:\n")
    terminal.show_table(_advice_table(traces, budget))
    if budget is not None:
        terminal.echo(paragraph(NEEDS))
    for reason in reasons:
        terminal.echo(paragraph(f"not tried: {reason}"))
    terminal.echo(paragraph(_smaller_batch(traces, budget)))
    for change in helpful:
        _show_code(change.name, change.lines(plain.framework))
    logits = logits_bytes(plain.trace, plain.models)
    if logits > NOTABLE_LOGITS * plain.trace.peak_bytes:
        name = f"chunked loss: logits and their gradients use {format_bytes(logits)}"
        _show_code(name, chunked_loss(plain.framework, plain.models))
    _show_sharding(plain)
    return {name: trace for name, trace in traces.items() if trace is not plain.trace}


def _smaller_batch(traces: dict[str, Trace], budget: int | None) -> str:
    """Say what a smaller batch does, and how large it may be if nothing fits.

    By formula: everything grows with the batch but weights, gradients, optimizer state and
    workspaces.
    """
    general = "a smaller batch shrinks activations and inputs in proportion"
    if budget is None:
        return general
    name, trace = min(traces.items(), key=lambda one: needed_bytes(one[1], budget))
    lacking = needed_bytes(trace, budget) - budget
    growing = sum(trace.at_peak.get(category, 0) for category in _WITH_THE_BATCH)
    if lacking <= 0 or growing <= lacking:
        return general
    share = math.floor(100 * (1 - lacking / growing))
    return f"{name}, about {share} % of this batch fits, by formula: {general}"


def _show_sharding(plain: Outcome) -> None:
    """Print how much each of several GPUs would hold with FSDP2."""
    assert plain.trace is not None
    held = {ranks: sharded_bytes(plain.trace, plain.models, ranks) for ranks in (2, 4, 8)}
    known = [f"{format_bytes(size)} on each of {n}" for n, size in held.items() if size]
    if known and plain.trace.device != "cpu":
        name = f"FSDP2 over several GPUs, by formula: about {', '.join(known)}"
        _show_code(paragraph(name), FSDP.get(plain.framework, FSDP["plain"]))


def _tried(
    launch: Launch, settings: dict[str, Any], plain: Outcome
) -> tuple[dict[str, Trace], list[str], list[Change]]:
    """Predict the script with each change, then with the two, three, … that save most.

    Returns the traces by name, why changes failed, and the ones that save memory, the best first.
    """
    assert plain.trace is not None
    traces, reasons = {"as it is": plain.trace}, []

    def attempt(change: Change) -> None:
        try:
            traces[change.name] = _changed(launch, settings, plain, change)
        except NotPossibleError as error:
            reasons.append(f"{change.name}: {error}")
        except Exception as error:  # a change may not suit the model
            reasons.append(f"{change.name}: {error_summary(error)}")

    def allocated(change: Change) -> int:
        return traces.get(change.name, plain.trace).allocated_bytes

    for change in CHANGES:
        attempt(change)
    helpful = sorted(
        (change for change in CHANGES if allocated(change) < plain.trace.allocated_bytes),
        key=allocated,
    )
    for count in range(2, len(helpful) + 1):
        attempt(together(tuple(helpful[:count])))
    return traces, reasons, helpful


def _show_code(name: str, lines: Sequence[str]) -> None:
    terminal.echo("\n  ".join([f"\n{name}:", *lines]))


def _changed(launch: Launch, settings: dict[str, Any], plain: Outcome, change: Change) -> Trace:
    """Return the trace of the script's step with a change."""
    print(f"memlab: with {change.name}", file=sys.stderr, flush=True)
    with open(os.devnull, "w") as nowhere, redirect_stdout(nowhere):  # it has printed all this
        found = run_ranks(launch, (plain.rank,), steps=plain.steps, change=change, **settings)[
            plain.rank
        ].trace
    assert found is not None
    return found


def _advice_table(traces: dict[str, Trace], budget: int | None) -> Table:
    columns = {
        "with": list(traces),
        "allocated": [format_bytes(trace.allocated_bytes) for trace in traces.values()],
        "reserved": [format_bytes(trace.reserved_bytes or 0) for trace in traces.values()],
    }
    if budget is not None:
        columns["needs"] = [format_bytes(needed_bytes(t, budget)) for t in traces.values()]
        columns["left"] = [_left(budget - needed_bytes(trace, budget)) for trace in traces.values()]
    return terminal.table_of(columns)


def _left(count: int) -> str:
    return format_bytes(count) if count >= 0 else f"lacks {format_bytes(-count)}"
