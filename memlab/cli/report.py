"""What the user sees of Rows in the terminal: a headline, a table, and what needs a word more."""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from rich.table import Table

from memlab.cli import terminal
from memlab.cli.machine import name_of
from memlab.cli.rows import Row
from memlab.configs.targets import TARGETS
from memlab.planner.cards import CONTEXT_BYTES
from memlab.trace import CATEGORIES, Trace
from memlab.train import Setting
from memlab.units import format_bytes

NOTABLE = 0.01  # of the plain peak: what is less is no saving and no cost
DOUBTFUL = 0.2  # of a ratio: rounds that differ by more were disturbed
WHERE = {
    "before": "before the step",
    "forward": "in forward",
    "backward": "in backward",
    "optimizer": "in the optimizer step",
}


def headline(setting: Setting, dry: bool) -> str:
    """What is measured, and on what: two lines."""
    parameters = setting.config.parameters
    if dry:
        how = "dry run, nothing is computed"
        if setting.device in TARGETS:
            how = f"predicted for CUDA ({TARGETS[setting.device].name}), nothing is computed"
    else:
        how = name_of(torch.device(setting.device))
    return f"{setting}\n{parameters:,} parameters; {how}; torch {torch.__version__}"


def table(rows: Sequence[Row], more: Mapping[str, list[str]] | None = None) -> Table:
    """A line for each row; columns in which no row has anything are left out. `more` are columns
    beside those of every measurement."""
    plain = rows[0]
    has_an_allocator = any(row.trace and row.trace.reserved_bytes for row in rows)
    columns: dict[str, list[str]] = {
        "technique": [row.name for row in rows],
        "allocated" if has_an_allocator else "peak": [
            _of(row.trace, lambda t: format_bytes(t.allocated_bytes)) or "failed" for row in rows
        ],
        "saved": ["" if row is plain else _of(row.trace, _saved(plain.trace)) for row in rows],
        "reserved": [_of(row.trace, lambda t: _of(t.reserved_bytes, format_bytes)) for row in rows],
        "nvidia-smi": [
            _nvidia_smi(row.trace) if row.trace and row.trace.dry else "" for row in rows
        ],
        "peak in": [_of(row.trace, lambda t: t.peak_phase) for row in rows],
        "time": [_of(plain.seconds, _seconds)] + [_of(r.time_ratio, _ratio) for r in rows[1:]],
        "gradients": [""] + [_of(row.gradient_difference, _difference) for row in rows[1:]],
        **(more or {}),
    }
    return terminal.table_of(columns)


def remarks(rows: Sequence[Row]) -> Iterator[str]:
    """What the table alone leaves open: its last columns, failures, and savings that don't show."""
    plain, others = rows[0], rows[1:]
    if (spread := max(map(_spread, rows))) > DOUBTFUL:
        yield (
            f"time: rounds differ by up to {spread:.0%}; this machine is busy, "
            f"or the steps are too short to time"
        )
    if any(row.gradient_difference for row in others):
        yield (
            f"gradients: the largest difference from the plain step's, "
            f"which reach {plain.largest_gradient:.1e}"
        )
    yield from failures(rows)
    for row in others:
        if row.failure is not None:
            continue
        if plain.seconds is not None and row.seconds is None and row.dry_for is None:
            yield f"{row.name}: no time; the plain training does not fit into memory beside it"
        elif hidden := _hidden_change(row.trace, plain.trace):
            yield f"{row.name}: {hidden}"
        if more := _kept_beside(row.trace, plain.trace):
            yield f"{row.name}: {more}"


def _kept_beside(trace: Trace, plain: Trace) -> str | None:
    """What a technique holds that is no weight and no state, in words; None if nothing."""
    more = trace.at_peak.get("inputs", 0) - plain.at_peak.get("inputs", 0)
    if more <= 0:
        return None
    return f"{format_bytes(more)} that it keeps from step to step, such as averages, are inputs"


def failures(rows: Sequence[Row]) -> Iterator[str]:
    """Why there are rows without figures."""
    for row in rows:
        if row.failure is not None:
            yield f"{row.name}: {row.failure}"


def measured_dry(rows: Sequence[Row]) -> Iterator[str]:
    """Rows that nobody waits for: their bytes, which a dry run has as well, and why."""
    reasons = dict.fromkeys(row.dry_for for row in rows if row.dry_for)
    for reason in reasons:
        names = [row.name for row in rows if row.dry_for == reason]
        yield (
            f"measured dry, the same bytes and no time, for {reason}: {', '.join(names)}; "
            f"--technique {names[0]} takes real steps"
        )


def notes(row: Row) -> Iterator[str]:
    """What its trace cannot promise."""
    return (f"{row.name}: {note}" for note in (row.trace.notes if row.trace else ()))


def legend(rows: Sequence[Row]) -> Iterator[str]:
    """What the columns of an accelerator's memory count."""
    trace = rows[0].trace
    if trace is not None and trace.reserved_bytes is not None:
        for name, meaning in _meanings(trace).items():
            yield f"{name}: {meaning}"


def three_numbers(trace: Trace) -> Iterator[str]:
    """What the allocator and the driver say of an accelerator's memory, each number named."""
    numbers = {
        "allocated": format_bytes(trace.allocated_bytes),
        "reserved": _of(trace.reserved_bytes, format_bytes),
        "nvidia-smi": _nvidia_smi(trace),
    }
    if numbers["reserved"]:
        for name, meaning in _meanings(trace).items():
            yield f"{name} {numbers[name]}: {meaning}"


def _meanings(trace: Trace) -> dict[str, str]:
    """What each of an accelerator's numbers counts."""
    least, most = map(format_bytes, CONTEXT_BYTES)
    context = f"{least} to {most} by card and driver; other processes come on top"
    return {
        "allocated": (
            "what tensors and kernels hold at the peak, in the allocator's blocks; a peak in a "
            "list by category and the pictures count what was asked for, which is a little less"
        ),
        "reserved": (
            "what the allocator takes from the driver for that if it can, and keeps; a smaller "
            "card may do, and the least lies between the two"
        ),
        "nvidia-smi": (
            f"reserved, and what CUDA itself takes in a process, {context}"
            if trace.dry
            else "reserved, what CUDA itself takes in each process, and all other processes"
        ),
    }


def _spread(row: Row) -> float:
    """How much more the largest ratio of the row is than the smallest, as a share."""
    return max(row.time_ratios) / min(row.time_ratios) - 1 if row.time_ratios else 0


# ------------------------------------------------------------------ cells


def _of(value: Any, text: Callable[[Any], str]) -> str:
    """The text of a value; nothing of None."""
    return "" if value is None else text(value)


def _saved(plain: Trace) -> Callable[[Trace], str]:
    def text(trace: Trace) -> str:
        share = f"{1 - trace.allocated_bytes / plain.allocated_bytes:+.1%}"
        return "0.0%" if share in ("+0.0%", "-0.0%") else share

    return text


def _nvidia_smi(trace: Trace) -> str:
    """What it shows, or of a prediction: from the smallest context of CUDA to the largest."""
    if not trace.dry or trace.reserved_bytes is None:
        return _of(trace.memory.used_bytes, format_bytes)
    least, most = ((trace.reserved_bytes + count) / 2**30 for count in CONTEXT_BYTES)
    return f"{least:.2f}–{most:.2f} GiB"


def _seconds(seconds: float) -> str:
    return f"{seconds:.3g} s" if seconds >= 1 else f"{1000 * seconds:.3g} ms"


def _ratio(ratio: float) -> str:
    return f"{ratio:.2f} ×"


def _difference(difference: float) -> str:
    return f"{difference:.1e}" if difference else "equal"


# ------------------------------------------------------------------ what a peak elsewhere hides


def _hidden_change(trace: Trace, plain: Trace) -> str | None:
    """The largest change of a category that is not at its most when the peak comes; None if the
    peaks differ, or nothing else does."""
    notable = NOTABLE * plain.peak_bytes
    if abs(trace.peak_bytes - plain.peak_bytes) >= notable:
        return None
    most, plain_most = _most_alive(trace), _most_alive(plain)
    changes = {c: most[c] - plain_most[c] for c in CATEGORIES}
    hidden = {
        category: change
        for category, change in changes.items()
        if abs(change) >= notable and not _is_at_its_most(category, plain if change < 0 else trace)
    }
    if not hidden:
        return None
    category = max(hidden, key=lambda c: abs(hidden[c]))
    advice = "; a larger --batch or --seq lets it show" if category == "activations" else ""
    return (
        f"{category.replace('_', ' ')} reach {format_bytes(most[category])}, not "
        f"{format_bytes(plain_most[category])}, but the peak is {WHERE[plain.peak_phase]}{advice}"
    )


def _is_at_its_most(category: str, trace: Trace) -> bool:
    return trace.at_peak.get(category, 0) == _most_alive(trace)[category]


def _most_alive(trace: Trace) -> Counter[str]:
    """The most bytes of each category that are alive at one moment."""
    alive: Counter[str] = Counter()
    most: Counter[str] = Counter()
    for event in trace.events:
        alive[event.category] += event.bytes
        most[event.category] = max(most[event.category], alive[event.category])
    return most
