"""Compare peaks predicted on the CPU with peaks recorded on the GPU.

Four figures for each configuration, each predicted − recorded:

    allocated   peak of memlab.predict and of the allocator's statistics. The allocator also counts
                the unused rest of a block if it is too small to split off
    blocks      the same without that rest: every block rounded up to 512 bytes
    with waste  the allocator's statistics, and memlab.allocator.simulate of the prediction
    reserved    reserved memory, and the same simulation

For each wrong prediction, the report lists the blocks alive at only one of the peaks, then the
nearest allocations in only one stream, then the predictions with other kernels.
"""

import statistics
import time
from collections.abc import Iterator, Sequence
from typing import Any

from common import SectionReport, table

from memlab import Kernels
from memlab.allocator import simulate
from memlab.units import format_bytes

from .bench import Bench
from .configurations import CONFIGURATIONS
from .jobs import first_line
from .predictions import Prediction, predicted, step_predicted
from .streams import StreamDifference, compare, recorded_stream

FIGURES = ("allocated", "blocks", "with waste", "reserved")
ALTERNATIVES = {
    **{f"attention {name}": Kernels(attention=name) for name in ("flash", "efficient", "cudnn")},
    "attention math": Kernels(attention="math"),
    "norms composite": Kernels(norms="composite"),
    "dropout composite": Kernels(dropout="composite"),
    **{f"optimizer {name}": Kernels(optimizer=name) for name in ("loop", "foreach", "fused")},
    "autocast cpu": Kernels(autocast="cpu"),
}
SECONDS_FOR_ALTERNATIVES = 90  # in total: the GPU waits; later runs can use the archive
NEAR_GPU = "AdamW, default"  # also predicted in a process with a GPU
Row = dict[str, Any]


def run(bench: Bench) -> SectionReport:
    chosen = {name: c for name, c in CONFIGURATIONS.items() if not c.missing}
    for name in CONFIGURATIONS.keys() - chosen.keys():
        bench.say(f"{name}: skipped, {CONFIGURATIONS[name].missing} is not installed")
    recordings = {name: bench.submit("record", name, name=f"predict: {name}") for name in chosen}
    near = bench.submit("predict", NEAR_GPU)
    rows: list[Row] = []
    for name in chosen:
        rows.append(row(bench, name, recordings.pop(name).result()))
        bench.say(progress_line(rows[-1]))
        bench.keep_rows(rows)
    bench.keep_evidence(rows)
    explain(bench, rows)
    return report(rows, near_gpu(bench, near.result()))


def explain(bench: Bench, rows: list[Row]) -> None:
    """Add predictions with other kernels to each wrong row."""
    until = time.monotonic() + SECONDS_FOR_ALTERNATIVES
    for row in rows:
        if row.get("blocks_off") and time.monotonic() < until:
            row["alternatives"] = dict(alternatives(bench, row))
            bench.say(f"{row['configuration']}, alternatives: {row['alternatives']}")
            bench.keep_rows(rows)


def row(bench: Bench, name: str, recording: dict[str, Any]) -> Row:
    """Predict a configuration and compare it with its recording."""
    failure = recording.get("failure") or recording["ran_out"]
    if failure:
        return {"configuration": name, "failure": f"on the GPU: {failure}"}
    bench.keep_recording(recording)
    try:
        prediction = predicted(CONFIGURATIONS[name], bench.size, bench.target)
    except Exception as error:
        failure = f"predicting: {type(error).__name__}: {first_line(str(error))}"
        return {"configuration": name, "failure": failure}
    kernels = recording["kernels"]
    return {"configuration": name, **scored(prediction, recording), "kernels": kernels}


def scored(prediction: Prediction, recording: dict[str, Any]) -> Row:
    """Return the four figures and the differences of the streams."""
    difference = difference_of(prediction, recording)
    allocated, reserved = recording["allocated_peak_bytes"], recording["reserved_peak_bytes"]
    simulated = simulate(prediction.trace)
    return {
        "allocated_bytes": allocated,
        "reserved_bytes": reserved,
        "requested_bytes": recording["requested_peak_bytes"],
        "recorded_blocks_bytes": difference.recorded_bytes,
        "predicted_bytes": prediction.trace.peak_bytes,
        "predicted_in": prediction.trace.peak_phase,
        "allocated_off": prediction.trace.peak_bytes - allocated,
        "blocks_off": difference.bytes,
        "with_waste_off": prediction.allocated_peak_bytes(prediction.blocks) - allocated,
        "reserved_off": simulated.reserved_bytes - reserved,
        "unlike": difference.unlike,
        "at_peak": list(difference.at_peak),
        "around_peak": list(difference.around_peak),
        "notes": list(prediction.trace.notes),
    }


def difference_of(prediction: Prediction, recording: dict[str, Any]) -> StreamDifference:
    return compare(prediction.whole, prediction.step_at, *recorded_stream(recording))


def alternatives(bench: Bench, row: Row) -> Iterator[tuple[str, int]]:
    """Yield (name, error of the blocks' peak in bytes) for other kernels that change the peak."""
    choices = {
        **{what: (bench.target, kernels) for what, kernels in ALTERNATIVES.items()},
        **{f"target {target}": (target, Kernels()) for target in ("cuda", "cuda:hopper")},
    }
    configuration = CONFIGURATIONS[row["configuration"]]
    for what, (target, kernels) in choices.items():
        try:
            peak_bytes = step_predicted(configuration, bench.size, target, kernels).peak_bytes
        except Exception:  # this kernel does not support the configuration
            continue
        if peak_bytes != row["predicted_bytes"]:
            yield what, peak_bytes - row["recorded_blocks_bytes"]


def near_gpu(bench: Bench, answer: dict[str, Any]) -> str:
    """Say whether a prediction is the same in a process that has a GPU."""
    if "failure" in answer:
        return f"A prediction in a process with a GPU fails: {answer['failure']}."
    here = predicted(CONFIGURATIONS[NEAR_GPU], bench.size, "cuda")
    same = answer["sizes"] == [event.bytes for event in here.whole]
    return (
        f"A prediction in a process with a GPU is {'the same' if same else 'DIFFERENT'}, and "
        f"{'USES' if answer['touched'] else 'does not use'} the GPU."
    )


# ------------------------------------------------------------------ tables


def progress_line(row: Row) -> str:
    if "failure" in row:
        return f"{row['configuration']}: {row['failure']}"
    return (
        f"{row['configuration']}: {format_bytes(row['allocated_bytes'])} allocated, predicted "
        f"{off(row, 'allocated')}, blocks {off(row, 'blocks')}; reserved {off(row, 'reserved')}; "
        f"{row['unlike']} allocations differ"
    )


def off(row: Row, figure: str) -> str:
    """Format the error in bytes and relative to the recording."""
    count = row[f"{figure.replace(' ', '_')}_off"]
    return f"{count:+,} B ({share(row, figure):+.3%})" if count else "exact"


def share(row: Row, figure: str) -> float:
    of = "reserved_bytes" if figure == "reserved" else "allocated_bytes"
    return row[f"{figure.replace(' ', '_')}_off"] / max(1, row[of])


def report(rows: Sequence[Row], near: str) -> SectionReport:
    whole = [row for row in rows if "failure" not in row]
    spreads = {figure: spread([share(row, figure) for row in whole]) for figure in FIGURES}
    blocks = spreads["blocks"]
    exact = sum(row["blocks_off"] == 0 for row in whole)
    sentence = (
        f"{exact} of {len(rows)} configurations have the predicted peak of blocks to the byte "
        f"(error: median {blocks['median']:.3%}, 95th percentile {blocks['95th percentile']:.3%}, "
        f"worst {blocks['worst']:.3%}). Reserved memory: {in_words(spreads['reserved'])}."
    )
    parts = [
        table(("error", *blocks), [spread_cells(*item) for item in spreads.items()]),
        table(
            ("configuration", "recorded", "reserved", *FIGURES, "different"),
            [cells(row) for row in rows],
        ),
        near,
        *(f"**{row['configuration']}**\n\n{explained(row)}" for row in rows if is_off(row)),
    ]
    plain = {"exact": exact, "of": len(rows), "spreads": spreads, "rows": list(rows)}
    return SectionReport(sentence, "\n\n".join(parts), {**plain, "near_gpu": near})


def spread(shares: Sequence[float]) -> dict[str, float]:
    """Return median, 95th percentile and worst of the absolute errors."""
    sizes = sorted(map(abs, shares)) or [0.0]
    return {
        "median": statistics.median(sizes),
        "95th percentile": sizes[max(0, -(-95 * len(sizes) // 100) - 1)],
        "worst": sizes[-1],
    }


def in_words(of: dict[str, float]) -> str:
    return f"median error {of['median']:.3%}, worst {of['worst']:.3%}"


def spread_cells(figure: str, of: dict[str, float]) -> tuple[str, ...]:
    return (figure, *(f"{value:.3%}" for value in of.values()))


def cells(row: Row) -> tuple[str, ...]:
    if "failure" in row:
        return (row["configuration"], "failed", *[""] * (len(FIGURES) + 2))
    sizes = (f"{row[name]:,}" for name in ("allocated_bytes", "reserved_bytes"))
    figures = (off(row, figure) for figure in FIGURES)
    return (row["configuration"], *sizes, *figures, str(row["unlike"]))


def is_off(row: Row) -> bool:
    return "failure" in row or bool(row["blocks_off"] or row["unlike"])


def explained(row: Row) -> str:
    """Return the differences, alternatives, kernels and notes of a row as a list."""
    if "failure" in row:
        return f"- {row['failure']}"
    lines = [*row["at_peak"], *row["around_peak"]]
    for what, count in row.get("alternatives", {}).items():
        lines.append(f"with {what}: {count:+,} B")
    lines.append(f"ran: {', '.join(f'{n} × {name}' for name, n in row['kernels'].items()) or '?'}")
    return "\n".join(f"- {line}" for line in (*lines, *row["notes"][1:]))
