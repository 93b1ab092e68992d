"""Test the planner: memory of two dozen recipes, and full training of 7 billion weights in 24 GB.

The recipes' second steps are predicted on the CPU and measured on the GPU. The report lists each
recipe whose allocated peak is more than 1 % off, or whose reserved memory is more than 3 % off. If
the prediction says that a model needs more than 24 GB, its limit is raised and the report says so.
"""

import statistics
from collections.abc import Sequence
from typing import Any

from common import SectionReport, table

from memlab.units import format_bytes

from . import predictions
from .bench import Bench
from .planner_jobs import RECIPES, STEPS, TRAININGS, configuration, predicted

CAP_BYTES = 24 * 10**9
ROOM = 1.01  # raised limit / smallest predicted limit
MAX_ERROR = {"allocated": 0.01, "reserved": 0.03}
Row = dict[str, Any]


def run(bench: Bench) -> SectionReport:
    """Run the recipes concurrently, then the timed trainings one by one."""
    answers = {name: bench.submit("planner", name) for name in RECIPES}
    rows: list[Row] = []
    for name, recipe in RECIPES.items():
        expected = predicted(recipe, bench.small, bench.target)
        rows.append(row(name, expected, answers[name].result()))
        bench.say(progress_line(rows[-1]))
        bench.keep_rows(rows)
    trainings = {name: training(bench, name) for name in TRAININGS}
    return report(rows, trainings)


# ------------------------------------------------------------------ the recipes


def row(name: str, expected: dict[str, int], answer: dict[str, Any]) -> Row:
    """Return the relative errors (predicted − measured) / measured."""
    if "failure" in answer:
        return {"configuration": name, "failure": answer["failure"]}
    figures = {f"{figure}_bytes": answer[f"{figure}_bytes"] for figure in MAX_ERROR}
    off = {
        f"{figure}_off": (expected[f"{figure}_bytes"] - count) / count
        for figure, count in zip(MAX_ERROR, figures.values(), strict=True)
    }
    return {"configuration": name, **figures, **off}


def is_a_miss(row: Row) -> bool:
    return "failure" in row or any(
        abs(row[f"{figure}_off"]) > most for figure, most in MAX_ERROR.items()
    )


def progress_line(row: Row) -> str:
    if "failure" in row:
        return f"{row['configuration']}: {row['failure']}"
    figures = (
        f"{format_bytes(row[f'{figure}_bytes'])} {figure}, predicted {row[f'{figure}_off']:+.2%}"
        for figure in MAX_ERROR
    )
    return f"{row['configuration']}: {'; '.join(figures)}"


# ------------------------------------------------------------------ the trainings


def training(bench: Bench, name: str) -> Row:
    """Train under 24 GB if the prediction says that it fits, else under the predicted need."""
    step = configuration(TRAININGS[name], bench.small)
    least = predictions.predicted(step, bench.size, bench.target).least_cap_bytes(bench.total_bytes)
    cap_bytes = CAP_BYTES if least <= CAP_BYTES else int(ROOM * least)
    answer = bench.submit("planner training", name, cap_bytes=cap_bytes).result()
    found = {"least_cap_bytes": least, "cap_bytes": cap_bytes, **answer}
    bench.say(in_words(name, found))
    return found


def in_words(name: str, found: Row) -> str:
    fits = found["cap_bytes"] == CAP_BYTES
    cap = "24 GB" if fits else f"{found['cap_bytes'] / 1e9:.1f} GB (24 GB are too little)"
    least = f"predicted minimum {found['least_cap_bytes'] / 1e9:.1f} GB"
    if "failure" in found:
        return f"{name} with a limit of {cap} failed: {found['failure']}; {least}"
    first, *_, last = found["losses"]
    return (
        f"{name}, fully trained with a limit of {cap}: "
        f"{found['allocated_bytes'] / 1e9:.2f} GB allocated, {found['reserved_bytes'] / 1e9:.2f} "
        f"GB reserved, {found['seconds']:.2f} s per step, loss {first:.2f} → {last:.2f} in {STEPS} "
        f"steps; {least}"
    )


# ------------------------------------------------------------------ tables


def report(rows: Sequence[Row], trainings: dict[str, Row]) -> SectionReport:
    whole = [row for row in rows if "failure" not in row]
    misses = [row for row in rows if is_a_miss(row)]
    figures = (
        f"{figure} {_spread([abs(row[f'{figure}_off']) for row in whole])}" for figure in MAX_ERROR
    )
    promised = " and ".join(f"{figure} within {most:.0%}" for figure, most in MAX_ERROR.items())
    words = [in_words(name, found) for name, found in trainings.items()]
    sentence = (
        f"{len(rows) - len(misses)} of {len(rows)} recipes have {promised} "
        f"(median and worst error: {', '.join(figures)}). {'. '.join(words)}."
    )
    parts = [
        table(("recipe", "allocated", "off", "reserved", "off"), map(cells, rows)),
        "\n".join(f"- missed: {progress_line(row)}" for row in misses),
        table(
            ("loss in step", *map(str, range(1, STEPS + 1))),
            [losses(name, found) for name, found in trainings.items()],
        ),
    ]
    plain = {"misses": len(misses), "of": len(rows), "rows": list(rows), "trainings": trainings}
    return SectionReport(sentence, "\n\n".join(filter(None, parts)), plain)


def _spread(shares: Sequence[float]) -> str:
    return f"{statistics.median(shares):.2%} and {max(shares):.2%}" if shares else "unknown"


def cells(row: Row) -> tuple[str, ...]:
    if "failure" in row:
        return (row["configuration"], "failed", "", "", "")
    figures = (
        (format_bytes(row[f"{figure}_bytes"]), f"{row[f'{figure}_off']:+.2%}")
        for figure in MAX_ERROR
    )
    return (row["configuration"], *(cell for pair in figures for cell in pair))


def losses(name: str, found: Row) -> tuple[str, ...]:
    cells = [f"{loss:.2f}" for loss in found.get("losses", [])]
    return (name, *cells, *[""] * (STEPS - len(cells)))
