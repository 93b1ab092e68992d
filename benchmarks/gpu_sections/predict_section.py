"""Predicted on the CPU, recorded on the GPU: peaks, and where the two part.

Four figures of each configuration, predicted less recorded:

    allocated   memlab.predict's peak, against the allocator's count. A block that takes more than
                it was asked for, because what was left was too small to split off, is in the
                count and not in the prediction
    blocks      the same without that waste: each block rounded up to 512 bytes, and nothing more
    with waste  the allocator's count, against memlab.allocator.simulate of the prediction
    reserved    what the allocator holds, against the same simulation

Where one is off, the blocks that are alive at one peak and not at the other are listed, then the
allocations around the peak that only one of the streams has, then what other choices of kernels
would have predicted.
"""

import statistics
import time
from collections.abc import Iterator, Sequence
from typing import Any

from common import Report, table

from memlab import Kernels
from memlab.allocator import simulate
from memlab.configs.targets import TARGETS
from memlab.units import format_bytes

from .bench import Bench
from .configurations import CONFIGURATIONS
from .jobs import first_line
from .predictions import Prediction, predicted, step_predicted
from .streams import Difference, compare, recorded_stream

FIGURES = ("allocated", "blocks", "with waste", "reserved")
ALTERNATIVES = {
    **{f"attention {name}": Kernels(attention=name) for name in ("flash", "efficient", "cudnn")},
    "attention math": Kernels(attention="math"),
    "norms composite": Kernels(norms="composite"),
    "dropout composite": Kernels(dropout="composite"),
    **{f"optimizer {name}": Kernels(optimizer=name) for name in ("loop", "foreach", "fused")},
    "autocast cpu": Kernels(autocast="cpu"),
}
SECONDS_FOR_ALTERNATIVES = 90  # in all: a GPU waits meanwhile, and the archive can be asked later
BESIDE_A_GPU = "AdamW, default"  # predicted where there is a GPU, too
Row = dict[str, Any]


def run(bench: Bench) -> Report:
    chosen = {name: c for name, c in CONFIGURATIONS.items() if not c.missing}
    for name in CONFIGURATIONS.keys() - chosen.keys():
        bench.say(f"{name}: skipped, {CONFIGURATIONS[name].missing} is not here")
    recordings = {name: bench.submit("record", name, name=f"predict: {name}") for name in chosen}
    beside = bench.submit("predict", BESIDE_A_GPU)
    rows: list[Row] = []
    for name in chosen:
        rows.append(row(bench, name, recordings.pop(name).result()))
        bench.say(told(rows[-1]))
        bench.keep_rows(rows)
    explain(bench, rows)
    return report(rows, beside_a_gpu(bench, beside.result()))


def explain(bench: Bench, rows: list[Row]) -> None:
    """Add to each row that is off what other choices of kernels would have predicted."""
    until = time.monotonic() + SECONDS_FOR_ALTERNATIVES
    for row in rows:
        if row.get("blocks_off") and time.monotonic() < until:
            row["alternatives"] = dict(alternatives(bench, row))
            bench.say(f"{row['configuration']}, otherwise: {row['alternatives']}")
            bench.keep_rows(rows)


def row(bench: Bench, name: str, recording: dict[str, Any]) -> Row:
    """One configuration: predicted, and held against its recording."""
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
    """The four figures, and what the streams differ in."""
    difference = held_against(prediction, recording)
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


def held_against(prediction: Prediction, recording: dict[str, Any]) -> Difference:
    return compare(prediction.whole, prediction.step_at, *recorded_stream(recording))


def alternatives(bench: Bench, row: Row) -> Iterator[tuple[str, int]]:
    """How far off other choices of kernels would be, in the blocks' peak: (what, bytes). Those that
    change nothing are left out."""
    choices = {
        **{what: (bench.target, kernels) for what, kernels in ALTERNATIVES.items()},
        **{f"target {target}": (target, Kernels()) for target in TARGETS},
    }
    configuration = CONFIGURATIONS[row["configuration"]]
    for what, (target, kernels) in choices.items():
        try:
            peak_bytes = step_predicted(configuration, bench.size, target, kernels).peak_bytes
        except Exception:  # torch was asked for what this choice cannot do
            continue
        if peak_bytes != row["predicted_bytes"]:
            yield what, peak_bytes - row["recorded_blocks_bytes"]


def beside_a_gpu(bench: Bench, answer: dict[str, Any]) -> str:
    """Whether a prediction is the same in a process that finds a GPU."""
    if "failure" in answer:
        return f"A prediction in a process that finds a GPU fails: {answer['failure']}."
    here = predicted(CONFIGURATIONS[BESIDE_A_GPU], bench.size, "cuda")
    same = answer["sizes"] == [event.bytes for event in here.whole]
    return (
        f"A prediction in a process that finds a GPU is {'the same' if same else 'ANOTHER'}, and "
        f"{'TOUCHES' if answer['touched'] else 'does not touch'} it."
    )


# ------------------------------------------------------------------ in words


def told(row: Row) -> str:
    if "failure" in row:
        return f"{row['configuration']}: {row['failure']}"
    return (
        f"{row['configuration']}: {format_bytes(row['allocated_bytes'])} allocated, predicted "
        f"{off(row, 'allocated')}, blocks {off(row, 'blocks')}; reserved {off(row, 'reserved')}; "
        f"{row['unlike']} allocations unlike"
    )


def off(row: Row, figure: str) -> str:
    """Bytes, and the share of what was recorded."""
    count = row[f"{figure.replace(' ', '_')}_off"]
    return f"{count:+,} B ({share(row, figure):+.3%})" if count else "exact"


def share(row: Row, figure: str) -> float:
    of = "reserved_bytes" if figure == "reserved" else "allocated_bytes"
    return row[f"{figure.replace(' ', '_')}_off"] / max(1, row[of])


def report(rows: Sequence[Row], beside: str) -> Report:
    whole = [row for row in rows if "failure" not in row]
    spreads = {figure: spread([share(row, figure) for row in whole]) for figure in FIGURES}
    blocks = spreads["blocks"]
    exact = sum(row["blocks_off"] == 0 for row in whole)
    sentence = (
        f"Of {len(rows)} configurations, predicted without the GPU, {exact} have the recorded "
        f"peak of their blocks to the byte (median {blocks['median']:.3%} off, 95th percentile "
        f"{blocks['95th percentile']:.3%}, worst {blocks['worst']:.3%}). Reserved memory is "
        f"{in_words(spreads['reserved'])}."
    )
    parts = [
        table(("off by", *blocks), [spread_cells(*item) for item in spreads.items()]),
        table(
            ("configuration", "recorded", "reserved", *FIGURES, "unlike"),
            [cells(row) for row in rows],
        ),
        beside,
        *(f"**{row['configuration']}**\n\n{explained(row)}" for row in rows if is_off(row)),
    ]
    plain = {"exact": exact, "of": len(rows), "spreads": spreads, "rows": list(rows)}
    return Report(sentence, "\n\n".join(parts), {**plain, "beside_a_gpu": beside})


def spread(shares: Sequence[float]) -> dict[str, float]:
    """Of the sizes of errors, as shares."""
    sizes = sorted(map(abs, shares)) or [0.0]
    return {
        "median": statistics.median(sizes),
        "95th percentile": sizes[max(0, -(-95 * len(sizes) // 100) - 1)],
        "worst": sizes[-1],
    }


def in_words(of: dict[str, float]) -> str:
    return f"{of['median']:.3%} off in the median and {of['worst']:.3%} at worst"


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
    """All that the output alone can say about why."""
    if "failure" in row:
        return f"- {row['failure']}"
    lines = [*row["at_peak"], *row["around_peak"]]
    for what, count in row.get("alternatives", {}).items():
        lines.append(f"with {what}: {count:+,} B")
    lines.append(f"ran: {', '.join(f'{n} × {name}' for name, n in row['kernels'].items()) or '?'}")
    return "\n".join(f"- {line}" for line in (*lines, *row["notes"][1:]))
