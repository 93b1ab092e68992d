"""`memlab measure --ranks 8`: what one of eight ranks holds and sends in each ZeRO stage."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from memlab.cli import report, terminal
from memlab.cli.choices import choose_setting, choose_techniques
from memlab.cli.errors import UsageError
from memlab.cli.models import choose_model
from memlab.cli.parsing import choose_folder
from memlab.cli.requests import Request
from memlab.cli.results import write
from memlab.cli.rows import Announce, Row, silent
from memlab.trace import Trace
from memlab.train import Plugs, Setting, rank_step
from memlab.units import format_bytes, paragraph
from memlab.zero import Step
from memlab.zero.stages import STAGES

STATES = ("parameters", "gradients", "optimizer_state")


@dataclass(frozen=True)
class RankRow(Row):
    """One stage: a rank's model states, the bytes it sends per step, and the units whose weights
    are gathered at the peak."""

    states_bytes: int | None = None
    sent_bytes: int | None = None
    gathered: tuple[str, ...] = ()

    def more_numbers(self) -> dict[str, Any]:
        """Return the numbers of a rank, for JSON."""
        return {
            "model_states_bytes": self.states_bytes,
            "sent_bytes": self.sent_bytes,
            "gathered": list(self.gathered),
        }


def measure_ranks(request: Request) -> int:
    """Measure one rank by dry runs, print a table, write pictures and results; return 1 if a stage
    of a technique failed, else 0."""
    names, ranks = request.techniques or ["plain"], request.ranks
    assert ranks is not None
    if request.model:
        choose_model(request.model, "memlab")
    request = replace(request, techniques=names, device="cpu", dry=True)
    chosen = choose_techniques(request)
    folder = choose_folder(request.out)
    setting = choose_setting(request)
    if "plain" not in names:
        chosen.pop("plain")
    with terminal.progress(len(STAGES) * len(chosen)) as announce:
        rows = [
            row
            for name, technique in chosen.items()
            for row in rows_of(name, setting, technique, ranks, announce)
        ]
    if rows[0].failure is not None:
        raise UsageError(f"{rows[0].name}: {rows[0].failure}")
    rank = f"one rank of {ranks}, each with this batch"
    terminal.echo(f"{report.headline(setting, dry=True)}\n{rank}\n")
    terminal.show_table(report.table(rows, columns(rows)))
    terminal.echo("\n" + "\n".join(map(paragraph, legend(rows))))
    write(rows, f"{setting}, one rank of {ranks}, dry run", folder)
    return int(any(row.failure for row in rows))


def rows_of(
    name: str, setting: Setting, technique: Plugs, ranks: int, announce: Announce = silent
) -> list[RankRow]:
    """Measure a row per stage. A technique that cannot be sharded gets one row with the reason."""
    rows = []
    for stage in STAGES:
        label = f"stage {stage}" if name == "plain" else f"{name}, stage {stage}"
        announce(label)
        try:
            step = rank_step(setting, technique, ranks, stage)
        except (TypeError, ValueError) as error:
            return [RankRow(name, failure=str(error))]
        rows.append(_row_of_step(label, step))
    return rows


def _row_of_step(label: str, step: Step) -> RankRow:
    [trace], [traffic] = step.traces, step.traffic
    return RankRow(
        label,
        trace,
        states_bytes=model_states(trace),
        sent_bytes=traffic.model_bytes(),
        gathered=tuple(step.gathered_at_peak()),
    )


def model_states(trace: Trace) -> int:
    """Return the bytes of weights, gradients and optimizer state at the end of backward."""
    end = max(n for n, event in enumerate(trace.events, 1) if event.phase == "backward")
    return sum(event.bytes for event in trace.events[:end] if event.category in STATES)


def columns(rows: Sequence[RankRow]) -> dict[str, list[str]]:
    """Return the columns that only this table has."""
    return {
        "model states": [
            "" if r.states_bytes is None else format_bytes(r.states_bytes) for r in rows
        ],
        "sent": ["" if r.sent_bytes is None else format_bytes(r.sent_bytes) for r in rows],
        "gathered": [" + ".join(row.gathered) for row in rows],
    }


def legend(rows: Sequence[RankRow]) -> Iterator[str]:
    """Explain the stages and the columns."""
    yield from (f"stage {number}: {what}" for number, what in STAGES.items())
    yield "model states: weights, gradients and optimizer state at the end of backward"
    yield "sent: by each rank per step, with ring collectives"
    if any(row.gathered for row in rows):
        yield (
            "gathered: units whose full weights were present at the peak; the root unit holds the "
            "weights outside the blocks"
        )
    yield from report.failures(rows)
