"""`memlab plan --gpus N`: compare ways to divide a Llama over GPUs, and write the script."""

import io
import tempfile
import warnings
from collections.abc import Iterator, Sequence
from contextlib import redirect_stdout
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rich.table import Table

from memlab.cli import terminal
from memlab.cli.errors import UsageError, error_summary
from memlab.cli.plan_report import nccl_buffers, room
from memlab.cli.results import write_breakdown
from memlab.configs.shapes import GPTConfig
from memlab.configs.targets import target_named
from memlab.configs.torchrun import MAX_GPUS_PER_MACHINE, torchrun
from memlab.internals.files import write_beside
from memlab.planner import Measured, Memory
from memlab.planner.cards import budget_bytes, margin_bytes
from memlab.planner.formulas import RESERVED
from memlab.planner.measuring import summarized
from memlab.planner.mesh_script import mesh_script
from memlab.planner.meshes import Mesh, MeshOption, mesh_options
from memlab.planner.options import option_numbers, verdict
from memlab.scripts.launch import launch_of
from memlab.scripts.ranks import run_ranks
from memlab.units import format_bytes, paragraph

SCRIPT = "train_mesh.py"
MAX_BLOCK_RUNS = 300  # blocks · micro-batches that a dry run may take, about a minute
MAX_TRIES = 3  # meshes to predict before giving up


@dataclass(frozen=True)
class Row:
    """A mesh, and the prediction of its script's fullest rank if it was made."""

    option: MeshOption
    budget_bytes: int
    measured: Measured | None = None

    @property
    def needed_bytes(self) -> int:
        """With an allowance for reserved memory, if it is by formula."""
        if self.measured is None:
            return round((1 + RESERVED) * self.option.peak.total)
        return self.measured.needed_bytes(self.budget_bytes)

    @property
    def fits(self) -> bool:
        return self.needed_bytes <= self.budget_bytes


@dataclass(frozen=True)
class _Query:
    config: GPTConfig
    model: str
    memory: Memory
    target: str
    gpus: int
    sequences: int
    seq_len: int

    @property
    def budget_bytes(self) -> int:
        return budget_bytes(self.memory, self.target)

    def script(self, option: MeshOption) -> str:
        return mesh_script(
            self.config,
            option.mesh,
            sequences=self.sequences,
            seq_len=self.seq_len,
            name=Path(self.model).name,
        )


def plan_meshes(
    config: GPTConfig,
    model: str,
    memory: Memory,
    target: str,
    gpus: int,
    sequences: int,
    seq_len: int,
    *,
    count: int,
    folder: Path,
) -> int:
    """Print the fastest meshes that fit, predict the best one's script and write it.

    Returns 1 if none fits, else 0.
    """
    query = _Query(config, model, memory, target, gpus, sequences, seq_len)
    options = mesh_options(
        config,
        gpus,
        memory.card_for_costs,
        sequences=sequences,
        seq_len=seq_len,
        workspace=2 * target_named(target).workspace_bytes,
    )
    rows = [Row(option, query.budget_bytes) for option in options]
    with terminal.progress(MAX_TRIES) as announce:
        best, tried, failures = _best(query, rows, announce)
    shown = _shown(rows, best, tried, count)
    _show(query, best, shown, failures)
    script = None if best is None else folder / SCRIPT
    if best is not None and script is not None:
        _write(query.script(best.option), script)
        terminal.echo(f"\n{best.option.mesh}:\n  {torchrun(gpus, str(script))}")
        if gpus > MAX_GPUS_PER_MACHINE:
            terminal.echo("\nRun it on each machine; replace HOST by the name of the first.")
    _write_document(query, best, shown, failures, script, folder)
    return 0 if best else 1


def _shown(rows: Sequence[Row], best: Row | None, tried: dict[Mesh, Row], count: int) -> list[Row]:
    """Return the best, those predicted not to fit, and the fastest that fit by formula; if none
    fits, the smallest."""
    known = {*tried, *([best.option.mesh] if best else [])}
    fitting = [row for row in rows if row.fits and row.option.mesh not in known]
    shown = [*([best] if best else []), *tried.values(), *fitting][: count + len(tried)]
    return shown or [min(rows, key=lambda row: row.needed_bytes)]


def _best(
    query: _Query, rows: Sequence[Row], announce: Any
) -> tuple[Row | None, dict[Mesh, Row], list[str]]:
    """Return the fastest mesh that fits, those predicted not to fit, and why predictions failed.

    A mesh whose dry run would take minutes is judged by formula.
    """
    too_large: dict[Mesh, Row] = {}
    failures: list[str] = []
    for row in rows:
        if row.option.peak.total > query.budget_bytes:
            continue
        if len(too_large) == MAX_TRIES or _block_runs(query, row.option) > MAX_BLOCK_RUNS:
            if row.fits:
                return row, too_large, failures
            continue
        announce(f"rank {row.option.rank} of {row.option.mesh}")
        try:
            found = replace(row, measured=_predicted(query, row.option))
        except Exception as error:  # a mesh that fails must not stop the search
            failures.append(f"{row.option.mesh}: {error_summary(error)}")
            continue
        if found.fits:
            return found, too_large, failures
        too_large[row.option.mesh] = found
    return None, too_large, failures


def _block_runs(query: _Query, option: MeshOption) -> int:
    mesh = option.mesh
    return mesh.micro_batches * mesh.blocks(query.config.layers, option.peak.stage)


def _predicted(query: _Query, option: MeshOption) -> Measured:
    """Predict the rank of the script that has most by formula, by a dry run."""
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        path = Path(folder, SCRIPT)
        path.write_text(query.script(option), encoding="utf-8")
        launch = launch_of([str(path)]).with_ranks(query.gpus)
        with redirect_stdout(io.StringIO()):
            outcomes = run_ranks(launch, (option.rank,), device=query.target)
    trace = outcomes[option.rank].trace
    assert trace is not None
    return summarized(trace, extrapolated=False)


def _write(text: str, path: Path) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with write_beside(path) as beside:
            beside.write_text(text, encoding="utf-8")
    except OSError as error:
        raise UsageError(f"writing {path} failed: {error}") from error


# ------------------------------------------------------------------ output


def _show(query: _Query, best: Row | None, shown: Sequence[Row], failures: Sequence[str]) -> None:
    terminal.echo("\n".join(map(paragraph, _headline(query))) + "\n")
    terminal.show_table(_table(shown))
    terminal.echo("\n" + "\n".join(map(paragraph, _remarks(query, best, shown, failures))))


def _headline(query: _Query) -> Iterator[str]:
    yield (
        f"{query.model} on {query.gpus} GPUs, micro-batches of {query.sequences} × "
        f"{query.seq_len} tokens; {query.config.parameters:,} parameters"
    )
    yield room(query.memory, query.target)
    yield "FSDP2 with float32 weights, gathered in bfloat16, and AdamW"


def _table(rows: Sequence[Row]) -> Table:
    first = rows[0].option.seconds_per_token
    meshes = [row.option.mesh for row in rows]
    return terminal.table_of(
        {
            **{
                short: [str(getattr(mesh, name)) for mesh in meshes]
                for short, name in _DIMENSIONS.items()
            },
            "recompute": ["blocks" if mesh.checkpointed else "" for mesh in meshes],
            "peak": [_peak(row) for row in rows],
            "rank": [str(row.option.rank) for row in rows],
            "in nodes": [format_bytes(row.option.within_nodes) for row in rows],
            "between": [format_bytes(row.option.between_nodes) for row in rows],
            "time": [f"{row.option.seconds_per_token / first:.2f} ×" for row in rows],
        }
    )


_DIMENSIONS = {"data": "data", "tensor": "tensor", "pipe": "pipeline", "ctx": "context"}


def _peak(row: Row) -> str:
    if row.measured is None:
        return f"≈ {format_bytes(row.option.peak.total)}"
    return format_bytes(row.measured.allocated_bytes)


def _remarks(
    query: _Query, best: Row | None, shown: Sequence[Row], failures: Sequence[str]
) -> Iterator[str]:
    if best is None:
        row = min(shown, key=lambda row: row.needed_bytes)
        lacks = format_bytes(max(0, row.needed_bytes - query.budget_bytes))
        yield (
            f"Nothing fits {query.memory.name}: {row.option.mesh} lacks {lacks} of "
            f"{format_bytes(row.needed_bytes)}; use more GPUs, a shorter sequence or a larger GPU"
        )
    else:
        mesh = best.option.mesh
        tokens = mesh.data * mesh.micro_batches * query.sequences * query.seq_len
        yield (
            f"a step of the first mesh processes {tokens:,} tokens: {mesh.micro_batches} × "
            f"{mesh.data} micro-batches"
        )
    if best is not None and best.measured is not None:
        phase, peak = best.measured.peak_phase, best.option.peak
        yield (
            f"peak: of the rank that needs the most memory. The first row is predicted by a dry "
            f"run of the script: rank {best.option.rank} needs {format_bytes(best.needed_bytes)} "
            f"of reserved memory, in {phase} (by formula ≈ {format_bytes(peak.total)})"
        )
    if any(row.measured is None for row in shown):
        yield (
            f"≈: allocated memory by formula; a mesh is listed if {RESERVED:.0%} more fits, which "
            f"allows for reserved memory"
        )
    yield (
        "in nodes, between: bytes that this rank sends in a step, over NVLink or PCIe within a "
        f"node of {MAX_GPUS_PER_MACHINE} GPUs, and over the network between nodes"
    )
    yield (
        "time: per token, estimated, relative to the first row; only FSDP's collectives overlap "
        "with computation, and the network has 400 Gbit/s for each GPU"
    )
    yield nccl_buffers()
    yield from failures


def _write_document(
    query: _Query,
    best: Row | None,
    shown: Sequence[Row],
    failures: Sequence[str],
    script: Path | None,
    folder: Path,
) -> None:
    command = None if script is None else torchrun(query.gpus, str(script))
    document = {
        "library": "memlab",
        "verdict": verdict(best is not None, False),
        "model": query.model,
        "parameters": query.config.parameters,
        "memory": {"name": query.memory.name, "total_bytes": query.memory.total_bytes},
        "margin_bytes": margin_bytes(query.memory, query.target),
        "budget_bytes": query.budget_bytes,
        "gpus": query.gpus,
        "batch": query.sequences,
        "seq_len": query.seq_len,
        "target": query.target,
        "bytes_as_it_is": None,
        "chosen": shown.index(best) if best in shown else None,
        "options": [_numbers(row, command if row is best else None) for row in shown],
        "notes": list(failures),
    }
    title = f"{query.model} on {query.gpus} GPUs, in {query.memory.name}"
    measured = {str(row.option.mesh): row.measured for row in shown if row.measured}
    write_breakdown(measured, title, document, folder)


def _numbers(row: Row, command: str | None) -> dict[str, Any]:
    mesh = row.option.mesh
    return option_numbers(
        f"{mesh}{', checkpointing' if mesh.checkpointed else ''}",
        fits=row.fits,
        measured=row.measured,
        needed_bytes=row.needed_bytes,
        missing_bytes=row.needed_bytes - row.budget_bytes,
        group="full fine-tuning",
        settings={**mesh.sizes, "checkpointed": mesh.checkpointed},
        by_formula={f"stage {each.stage}": each.terms for each in row.option.stages},
        estimated_seconds={"a token": row.option.seconds_per_token},
        command=command,
    )
