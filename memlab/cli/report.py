"""How rows look in the terminal: a headline, a table, and explanations."""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from rich.table import Table

from memlab.cli import terminal
from memlab.cli.machine import name_of
from memlab.cli.rows import Row, by_peak
from memlab.configs.gpus import CONTEXT_BYTES
from memlab.configs.targets import TARGETS
from memlab.trace import CATEGORIES, Trace
from memlab.train import COMBINATIONS
from memlab.units import format_bytes, paragraph, plural

SHOWN = 10  # techniques on a screen
FOOTNOTES = 3
NOTABLE = 0.01  # of the plain peak: a smaller change is no saving and no cost
DOUBTFUL = 0.2  # relative spread: rounds that differ more were disturbed
PHASE_WORDS = {
    "before": "before the step",
    "forward": "in forward",
    "backward": "in backward",
    "optimizer": "in the optimizer step",
}


@dataclass(frozen=True)
class Result:
    """What `memlab measure` found of a model.

    setting    memlab.train's or a TransformersSetting
    rows       the plain one first, in the order of the registry
    predicted  rows for CUDA
    adapters   a line about them
    """

    setting: Any
    dry: bool
    rows: Sequence[Row]
    predicted: Sequence[Row]
    adapters: str

    @property
    def title(self) -> str:
        """The title of the document and of the pictures."""
        return f"{self.setting}, dry run" if self.dry else str(self.setting)


def of_result(found: Result, *, everything: bool) -> Iterator[str | Table]:
    """Yield the verdict, the rows with the smallest peaks, the plain step's peak, and remarks: one
    screen of them unless the user wants everything."""
    rows, predicted = by_peak(found.rows), by_peak(found.predicted)
    shown = rows if everything else rows[: SHOWN + 1]
    device = found.setting.device if found.dry else None
    plain = rows[0].trace
    assert plain is not None
    yield f"{paragraph(verdict(rows))}\n\n{headline(found.setting, found.dry)}\n"
    yield table(shown, context=context_of(device))
    if more := len(rows) - len(shown):
        yield f"{more} more: --all"
    yield f"\nplain: {replace(plain, notes=())}\n"
    sentences = [
        *(*failures(rows), *remarks(shown), *dry_rows_note(shown)),
        *filter(None, [found.adapters]),
        *(*legend(rows, context_of(device)), *notes(rows[0])),
    ]
    if predicted and (everything or len(predicted) == len(rows)):
        yield "the same on CUDA, predicted:"
        yield table(predicted)
        yield ""
        sentences += (*failures(predicted), *legend(predicted), *notes(predicted[0]))
    sentences = list(dict.fromkeys(sentences))
    few = sentences if everything else sentences[:FOOTNOTES]
    yield from map(paragraph, few)
    if more := len(sentences) - len(few):
        yield f"{plural(more, 'more note')}: --all"


def verdict(rows: Sequence[Row]) -> str:
    """Say how much less memory the best technique takes. The rows are by peak."""
    plain, *others = (row.trace.allocated_bytes for row in rows if row.trace)
    if not others:
        return f"the plain step takes {format_bytes(plain)}"
    share = 1 - others[0] / plain
    if share < NOTABLE:
        return f"no technique here takes notably less than {format_bytes(plain)}"
    *first, last = rows[1].name.split("+")
    names = f"{', '.join(first)} and {last} take" if first else f"{last} takes"
    return f"{names} {share:.0%} less memory"


def headline(setting: Any, dry: bool) -> str:
    """Describe the setting, and on a new line the device."""
    if dry:
        how = "dry run, nothing is computed"
        if setting.device in TARGETS:
            how = f"predicted for CUDA ({TARGETS[setting.device].name}), nothing is computed"
    else:
        how = name_of(torch.device(setting.device))
    second = paragraph(f"{setting.parameters:,} parameters; {how}; torch {torch.__version__}")
    return f"{paragraph(str(setting))}\n{second}"


def context_of(device: str | None) -> tuple[int, int]:
    """Return the smallest and largest CUDA context seen: on the predicted GPU if it was measured
    there, else on any GPU."""
    target = None if device in ("cuda", "cuda:hopper") else TARGETS.get(device or "")
    return target.gpu.context_bytes if target else CONTEXT_BYTES


def table(
    rows: Sequence[Row],
    more: Mapping[str, list[str]] | None = None,
    context: tuple[int, int] = CONTEXT_BYTES,
) -> Table:
    """Build a line for each row, without the empty columns. `more` adds columns."""
    plain = rows[0]
    has_an_allocator = any(row.trace and row.trace.reserved_bytes for row in rows)
    columns: dict[str, list[str]] = {
        "technique": [COMBINATIONS.get(row.name, row.name) for row in rows],
        "allocated" if has_an_allocator else "peak": [
            _optional(row.trace, lambda t: format_bytes(t.allocated_bytes)) or "failed"
            for row in rows
        ],
        "saved": [
            "" if row is plain else _optional(row.trace, _saved(plain.trace)) for row in rows
        ],
        "reserved": [
            _optional(row.trace, lambda t: _optional(t.reserved_bytes, format_bytes))
            for row in rows
        ],
        "nvidia-smi": [
            _nvidia_smi(row.trace, context) if row.trace and row.trace.dry else "" for row in rows
        ],
        "peak in": [_optional(row.trace, lambda t: t.peak_phase) for row in rows],
        "time": [_optional(plain.seconds, _seconds)]
        + [_optional(r.time_ratio, _ratio) for r in rows[1:]],
        "gradients": [""] + [_optional(row.gradient_difference, _difference) for row in rows[1:]],
        **(more or {}),
    }
    return terminal.table_of(columns)


def remarks(rows: Sequence[Row]) -> Iterator[str]:
    """Explain the last columns, and the savings that the peak does not show."""
    plain, others = rows[0], rows[1:]
    if (spread := max(map(_spread, rows))) > DOUBTFUL:
        yield (
            f"time: rounds differ by up to {spread:.0%}; this machine is busy, or the steps are "
            f"too short to time"
        )
    if any(row.gradient_difference for row in others):
        yield (
            f"gradients: the largest difference from the plain step's, "
            f"which reach {plain.largest_gradient:.1e}"
        )
    for row in others:
        if row.trace is None or plain.trace is None:
            continue
        if plain.seconds is not None and row.seconds is None and row.dry_for is None:
            yield f"{row.name}: no time; the plain training does not fit into memory beside it"
        elif hidden := _hidden_change(row.trace, plain.trace):
            yield f"{row.name}: {hidden}"
        if more := _extra_inputs(row.trace, plain.trace):
            yield f"{row.name}: {more}"


def _extra_inputs(trace: Trace, plain: Trace) -> str | None:
    """Describe what a technique keeps outside weights and optimizer state; None if nothing."""
    more = trace.at_peak.get("inputs", 0) - plain.at_peak.get("inputs", 0)
    if more <= 0:
        return None
    return (
        f"keeps {format_bytes(more)} across steps beside weights and optimizer state, counted as "
        f"inputs"
    )


def failures(rows: Sequence[Row]) -> Iterator[str]:
    """Explain the rows without figures."""
    for row in rows:
        if row.failure is not None:
            yield f"{row.name}: {row.failure}"


def dry_rows_note(rows: Sequence[Row]) -> Iterator[str]:
    """List the rows that were not timed, and why."""
    if late := rows[0].dry_for:
        yield f"no times, because {late} after the dry runs; --all has no limit"
        return
    for reason in dict.fromkeys(row.dry_for for row in rows if row.dry_for):
        names = [row.name for row in rows if row.dry_for == reason]
        yield (
            f"no time, because {reason}: {', '.join(names)}; --technique {names[0]} runs real steps"
        )


def notes(row: Row) -> Iterator[str]:
    """List the caveats of the row's trace."""
    return (f"{row.name}: {note}" for note in (row.trace.notes if row.trace else ()))


def legend(rows: Sequence[Row], context: tuple[int, int] = CONTEXT_BYTES) -> Iterator[str]:
    """Explain the columns of an accelerator's memory."""
    trace = rows[0].trace
    if trace is not None and trace.reserved_bytes is not None:
        for name, meaning in _meanings(trace, context).items():
            yield f"{name}: {meaning}"


def memory_numbers(trace: Trace, context: tuple[int, int] = CONTEXT_BYTES) -> Iterator[str]:
    """Describe an accelerator's allocated, reserved and nvidia-smi memory, one line each."""
    numbers = {
        "allocated": format_bytes(trace.allocated_bytes),
        "reserved": _optional(trace.reserved_bytes, format_bytes),
        "nvidia-smi": _nvidia_smi(trace, context),
    }
    if numbers["reserved"]:
        for name, meaning in _meanings(trace, context).items():
            yield f"{name} {numbers[name]}: {meaning}"


def _meanings(trace: Trace, context: tuple[int, int]) -> dict[str, str]:
    """Explain each of an accelerator's memory numbers."""
    least, most = map(format_bytes, context)
    size = f"{least} to {most} depending on GPU and driver" if least != most else f"{least} here"
    return {
        "allocated": (
            "held by tensors and kernels at the peak, in the allocator's blocks; the peak by "
            "category and the pictures count the requested bytes, which are slightly fewer"
        ),
        "reserved": (
            "taken from the driver by the caching allocator; the least memory that the step can "
            "run in lies between allocated and reserved"
        ),
        "nvidia-smi": (
            f"reserved plus the CUDA context, {size}; other processes come on top"
            if trace.dry
            else "reserved plus each process's CUDA context, for all processes"
        ),
    }


def _spread(row: Row) -> float:
    """Return by how much the largest ratio exceeds the smallest, relative to the smallest."""
    return max(row.time_ratios) / min(row.time_ratios) - 1 if row.time_ratios else 0


# ------------------------------------------------------------------ cells


def _optional(value: Any, text: Callable[[Any], str]) -> str:
    """Format the value, or return "" for None."""
    return "" if value is None else text(value)


def _saved(plain: Trace | None) -> Callable[[Trace], str]:
    def text(trace: Trace) -> str:
        assert plain is not None
        share = f"{1 - trace.allocated_bytes / plain.allocated_bytes:+.1%}"
        return "0.0%" if share in ("+0.0%", "-0.0%") else share

    return text


def _nvidia_smi(trace: Trace, context: tuple[int, int]) -> str:
    """Format what nvidia-smi shows; for a prediction, the range over CUDA context sizes."""
    if not trace.dry or trace.reserved_bytes is None:
        return _optional(trace.memory.used_bytes, format_bytes)
    least, most = (f"{(trace.reserved_bytes + count) / 2**30:.2f}" for count in context)
    return f"{least} GiB" if least == most else f"{least}–{most} GiB"


def _seconds(seconds: float) -> str:
    return f"{seconds:.3g} s" if seconds >= 1 else f"{1000 * seconds:.3g} ms"


def _ratio(ratio: float) -> str:
    return f"{ratio:.2f} ×"


def _difference(difference: float) -> str:
    return f"{difference:.1e}" if difference else "equal"


# ------------------------------------------------------------------ savings hidden by the peak


def _hidden_change(trace: Trace, plain: Trace) -> str | None:
    """Describe the largest change in a category below its maximum at the peak; None if the
    peaks differ, or nothing else does."""
    notable = NOTABLE * plain.peak_bytes
    if abs(trace.peak_bytes - plain.peak_bytes) >= notable:
        return None
    most, plain_most = _max_live_bytes(trace), _max_live_bytes(plain)
    changes = {c: most[c] - plain_most[c] for c in CATEGORIES}
    hidden = {
        category: change
        for category, change in changes.items()
        if abs(change) >= notable and not _is_at_maximum(category, plain if change < 0 else trace)
    }
    if not hidden:
        return None
    category = max(hidden, key=lambda c: abs(hidden[c]))
    advice = "; try a larger --batch or --seq" if category == "activations" else ""
    return (
        f"{category.replace('_', ' ')} reach {format_bytes(most[category])} (plain: "
        f"{format_bytes(plain_most[category])}), which does not change the peak, "
        f"{PHASE_WORDS[plain.peak_phase]}"
        f"{advice}"
    )


def _is_at_maximum(category: str, trace: Trace) -> bool:
    return trace.at_peak.get(category, 0) == _max_live_bytes(trace)[category]


def _max_live_bytes(trace: Trace) -> Counter[str]:
    """Return each category's largest live bytes at one moment."""
    alive: Counter[str] = Counter()
    most: Counter[str] = Counter()
    for event in trace.events:
        alive[event.category] += event.bytes
        most[event.category] = max(most[event.category], alive[event.category])
    return most
