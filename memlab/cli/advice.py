"""The changes of `memlab run --advise`: what each saves, predicted, and its code."""

import math
import os
from collections.abc import Sequence
from contextlib import redirect_stderr, redirect_stdout
from typing import Any

from rich.table import Table

from memlab.allocator.capacity import needed_bytes
from memlab.cli import terminal
from memlab.cli.errors import error_summary
from memlab.cli.run_progress import announce
from memlab.scripts.changes import (
    FSDP,
    Change,
    changes_for,
    combinations_of,
    sharded_bytes,
    together,
)
from memlab.scripts.late_logits import OtherUseError
from memlab.scripts.launch import Launch
from memlab.scripts.ranks import run_ranks
from memlab.scripts.running import Outcome
from memlab.scripts.techniques import NotPossibleError
from memlab.trace import Trace
from memlab.units import format_bytes, paragraph

NOTABLE_SHARDS = 0.9  # of the peak, on each of 8 GPUs
NOTABLE_CHANGE = 0.99  # of the peak as it is
_WITH_THE_BATCH = ("inputs", "activations", "forward_temporaries", "backward_temporaries")
NEEDS = (
    "needs: reserved, including an evaluation before the step, and with the largest workspaces "
    "that convolutions may choose. If that is too much: the least memory in which the step runs, "
    "because the allocator empties its cache when a card is full"
)


def _announce_changes(count: int, seconds: float) -> None:
    """Say how long the changes take before they are tried."""
    each = f"about {max(1, round(seconds))} s for each"
    announce(
        f"trying {count} changes, then combinations of the helpful ones, {each}; "
        f"--no-advice leaves them out"
    )


def show_advice(
    launch: Launch, settings: dict[str, Any], plain: Outcome, budget: int | None, seconds: float
) -> dict[str, Trace]:
    """Predict the script with changes; print each one's peak, and the code of the helpful ones.

    settings   for `run_ranks`, as the script was run
    plain      the script's outcome as it is
    budget     bytes for PyTorch; None if no memory is given
    seconds    that the script took

    Returns the traces by the names of the changes.
    """
    assert plain.trace is not None
    device = settings.get("device") or "cuda"
    changes = changes_for(device, plain.trace, plain.models, plain.evaluation)
    _announce_changes(len(changes), seconds)
    traces, reasons, helpful = _tried(launch, settings, plain, changes)
    terminal.echo("\neach change, predicted:\n")
    needed = {} if budget is None else {n: needed_bytes(t, budget) for n, t in traces.items()}
    terminal.show_table(_advice_table(traces, needed, budget))
    if budget is not None:
        terminal.echo(paragraph(NEEDS))
    for reason in reasons:
        terminal.echo(paragraph(f"not possible: {reason}"))
    terminal.echo(paragraph(_smaller_batch(traces, needed, budget)))
    for change in helpful:
        _show_code(change.name, change.lines(plain.framework, plain.models))
    _show_sharding(plain)
    return {name: trace for name, trace in traces.items() if trace is not plain.trace}


def _smaller_batch(traces: dict[str, Trace], needed: dict[str, int], budget: int | None) -> str:
    """Say what a smaller batch does, and how large it may be if nothing fits.

    By formula: everything grows with the batch but weights, gradients, optimizer state and
    workspaces.
    """
    general = "a smaller batch shrinks activations and inputs in proportion"
    if budget is None:
        return general
    name = min(needed, key=lambda name: needed[name])
    lacking = needed[name] - budget
    growing = sum(traces[name].at_peak.get(category, 0) for category in _WITH_THE_BATCH)
    if lacking <= 0 or growing <= lacking:
        return general
    share = math.floor(100 * (1 - lacking / growing))
    return f"{name}, about {share} % of this batch fits, by formula: {general}"


def _show_sharding(plain: Outcome) -> None:
    """Print how much each of several GPUs would hold with FSDP2."""
    assert plain.trace is not None
    held = {ranks: sharded_bytes(plain.trace, plain.models, ranks) for ranks in (2, 4, 8)}
    known = {ranks: size for ranks, size in held.items() if size}
    if plain.trace.device == "cpu" or not known:
        return
    if min(known.values()) > NOTABLE_SHARDS * plain.trace.peak_bytes:
        return  # activations, which are not sharded, use nearly everything
    each = ", ".join(f"{format_bytes(size)} on each of {n}" for n, size in known.items())
    name = f"FSDP2 over several GPUs, by formula: about {each}"
    _show_code(paragraph(name), FSDP.get(plain.framework, FSDP["plain"]))


def _tried(
    launch: Launch, settings: dict[str, Any], plain: Outcome, changes: Sequence[Change]
) -> tuple[dict[str, Trace], list[str], list[Change]]:
    """Predict the script with each change, then with combinations of the helpful ones.

    Returns the traces by name, why changes failed, and the ones that save memory, the best first.
    """
    assert plain.trace is not None
    traces, reasons = {"as it is": plain.trace}, []

    def attempt(change: Change) -> None:
        try:
            traces[change.name] = _changed(launch, settings, plain, change)
        except (NotPossibleError, OtherUseError) as error:
            reasons.append(f"{change.name}: {error}")
        except Exception as error:  # a change may not suit the model
            reasons.append(f"{change.name}: {error_summary(error)}")

    def allocated(change: Change) -> int:
        return traces.get(change.name, traces["as it is"]).allocated_bytes

    for change in changes:
        attempt(change)
    helpful = sorted(
        (
            change
            for change in changes
            if allocated(change) < NOTABLE_CHANGE * plain.trace.allocated_bytes
        ),
        key=allocated,
    )
    for combination in combinations_of(helpful):
        attempt(together(combination))
    return traces, reasons, helpful


def _show_code(name: str, lines: Sequence[str]) -> None:
    terminal.echo("\n  ".join([f"\n{name}:", *lines]))


def _changed(launch: Launch, settings: dict[str, Any], plain: Outcome, change: Change) -> Trace:
    """Return the trace of the script's step with a change."""
    announce(f"trying {change.name}")
    with (
        open(os.devnull, "w") as nowhere,
        redirect_stdout(nowhere),  # it has printed all this
        redirect_stderr(nowhere),
    ):
        found = run_ranks(launch, (plain.rank,), steps=plain.steps, change=change, **settings)[
            plain.rank
        ].trace
    assert found is not None
    return found


def _advice_table(traces: dict[str, Trace], needed: dict[str, int], budget: int | None) -> Table:
    columns = {
        "with": list(traces),
        "allocated": [format_bytes(trace.allocated_bytes) for trace in traces.values()],
        "reserved": [format_bytes(trace.reserved_bytes or 0) for trace in traces.values()],
    }
    if budget is not None:
        columns["needs"] = [format_bytes(needed[name]) for name in traces]
        columns["left"] = [_left(budget - needed[name]) for name in traces]
    return terminal.table_of(columns)


def _left(count: int) -> str:
    return format_bytes(count) if count >= 0 else f"lacks {format_bytes(-count)}"
