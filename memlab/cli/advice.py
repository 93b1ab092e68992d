"""What `memlab run --advise` prints: what each change saves, predicted, and its code."""

import math
from collections.abc import Iterator, Sequence

from rich.table import Table

from memlab.allocator.capacity import needed_bytes
from memlab.cli import terminal
from memlab.cli.errors import error_summary
from memlab.scripts.changes import FSDP, sharded_bytes
from memlab.scripts.late_logits import OtherUseError
from memlab.scripts.running import Outcome
from memlab.scripts.runs import Trials
from memlab.scripts.techniques import NotPossibleError
from memlab.trace import Trace
from memlab.units import format_bytes, paragraph

NOTABLE_SHARDS = 0.9  # of the peak, on each of 8 GPUs
_WITH_THE_BATCH = ("inputs", "activations", "forward_temporaries", "backward_temporaries")
NEEDS = (
    "needs: reserved, including an evaluation before the step, and with the largest workspaces "
    "that convolutions may choose. If that is too much: the least memory in which the step runs, "
    "because the allocator empties its cache when a card is full"
)


def advice(trials: Trials, plain: Outcome, budget: int | None) -> Iterator[str | Table]:
    """Yield each change's peak, and the code of the helpful ones.

    plain    the script's outcome as it is
    budget   bytes for PyTorch; None if no memory is given
    """
    assert plain.trace is not None
    traces = {"as it is": plain.trace, **trials.traces}
    yield "\neach change, predicted:\n"
    needed = {} if budget is None else {n: needed_bytes(t, budget) for n, t in traces.items()}
    yield _table(traces, needed, budget)
    if budget is not None:
        yield paragraph(NEEDS)
    for name, reason in trials.reasons.items():
        yield paragraph(f"not possible: {name}: {reason}")
    yield paragraph(_smaller_batch(traces, needed, budget))
    for change in trials.helpful:
        yield _code(change.name, change.lines(plain.framework, plain.models))
    yield from _sharding(plain.trace, plain)


def why_not(error: Exception) -> str:
    """Say why a change is not possible."""
    says_why = isinstance(error, (NotPossibleError, OtherUseError))
    return str(error) if says_why else error_summary(error)


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


def _sharding(trace: Trace, plain: Outcome) -> Iterator[str]:
    """Yield how much each of several GPUs would hold with FSDP2."""
    held = {ranks: sharded_bytes(trace, plain.models, ranks) for ranks in (2, 4, 8)}
    known = {ranks: size for ranks, size in held.items() if size}
    if trace.device == "cpu" or not known:
        return
    if min(known.values()) > NOTABLE_SHARDS * trace.peak_bytes:
        return  # activations, which are not sharded, use nearly everything
    each = ", ".join(f"{format_bytes(size)} on each of {n}" for n, size in known.items())
    name = f"FSDP2 over several GPUs, by formula: about {each}"
    yield _code(paragraph(name), FSDP.get(plain.framework, FSDP["plain"]))


def _code(name: str, lines: Sequence[str]) -> str:
    return "\n  ".join([f"\n{name}:", *lines])


def _table(traces: dict[str, Trace], needed: dict[str, int], budget: int | None) -> Table:
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
