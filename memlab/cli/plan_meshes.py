"""`memlab plan --gpus N`: compare ways to divide a Llama over GPUs, and write the script."""

import io
import tempfile
import warnings
from collections.abc import Iterator, Sequence
from contextlib import redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.table import Table

from memlab.cli import terminal
from memlab.cli.errors import UsageError, error_summary
from memlab.cli.parsing import choose_folder
from memlab.cli.plan_options import choose_seq_len
from memlab.cli.plan_report import left_or_lacking, nccl_buffers, room
from memlab.cli.requests import PlanRequest
from memlab.cli.results import write_breakdown
from memlab.configs.shapes import GPTConfig
from memlab.configs.targets import target_named
from memlab.configs.torchrun import MAX_GPUS_PER_MACHINE, torchrun
from memlab.internals.files import write_beside
from memlab.planner import Measured, Memory
from memlab.planner.cards import budget_bytes, margin_bytes
from memlab.planner.measuring import summarized
from memlab.planner.mesh_script import mesh_script
from memlab.planner.meshes import Mesh, MeshOption, mesh_options
from memlab.planner.options import option_numbers, verdict
from memlab.scripts.launch import launch_of
from memlab.scripts.ranks import run_ranks
from memlab.units import format_bytes, paragraph

SCRIPT = "train_mesh.py"
MAX_BLOCK_RUNS = 300  # blocks · micro-batches that a dry run may take, about a minute
MAX_MISSES = 3  # meshes that may turn out not to fit


@dataclass(frozen=True)
class Row:
    """A mesh, and the prediction of its script's fullest rank."""

    option: MeshOption
    measured: Measured
    budget_bytes: int

    @property
    def needed_bytes(self) -> int:
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


def plan_meshes(request: PlanRequest, config: GPTConfig, memory: Memory, target: str) -> int:
    """Predict the scripts of the fastest meshes, print those, and write the best one's script.

    Returns 1 if none fits, else 0.
    """
    folder, gpus, count = choose_folder(request.out), request.gpus, request.recipes
    assert request.model is not None
    seq_len = choose_seq_len(request.seq_len, config.seq_len, request.model)
    query = _Query(config, request.model, memory, target, gpus, request.batch, seq_len)
    options = mesh_options(
        config,
        gpus,
        memory.card_for_costs,
        sequences=request.batch,
        seq_len=seq_len,
        workspace=2 * target_named(target).workspace_bytes,
    )
    with terminal.progress(count + MAX_MISSES) as announce:
        rows, failures = _rows(query, options, count, announce)
    best = next((row for row in rows if row.fits), None)
    _show(query, best, rows, failures)
    script = None if best is None else folder / SCRIPT
    if best is not None and script is not None:
        _write(query.script(best.option), script)
        terminal.echo(f"\n{best.option.mesh}:\n  {torchrun(gpus, str(script))}")
        if gpus > MAX_GPUS_PER_MACHINE:
            terminal.echo("\nRun it on each machine; replace HOST by the name of the first.")
    _write_document(query, best, rows, failures, script, folder)
    return 0 if best else 1


def _rows(
    query: _Query, options: Sequence[MeshOption], count: int, announce: Any
) -> tuple[list[Row], list[str]]:
    """Predict the fastest meshes until `count` fit, or MAX_MISSES don't. Return them, and why the
    predictions of others failed."""
    rows: list[Row] = []
    failures: list[str] = []
    for option in _likely(query, options):
        fitting = sum(row.fits for row in rows)
        if fitting == count or len(rows) - fitting == MAX_MISSES:
            break
        announce(f"rank {option.rank} of {option.mesh}")
        try:
            rows.append(Row(option, _predicted(query, option), query.budget_bytes))
        except Exception as error:  # a mesh that fails must not stop the search
            failures.append(f"{option.mesh}: {error_summary(error)}")
    return rows, failures


def _likely(query: _Query, options: Sequence[MeshOption]) -> list[MeshOption]:
    """Return the meshes that the formula lets fit, those with a quick dry run first; if none fits,
    the one that needs least."""
    fitting = [each for each in options if each.peak.total <= query.budget_bytes]
    smallest = min(options, key=lambda each: each.peak.total)
    return sorted(fitting, key=lambda each: _block_runs(query, each) > MAX_BLOCK_RUNS) or [smallest]


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


def _show(query: _Query, best: Row | None, rows: Sequence[Row], failures: Sequence[str]) -> None:
    terminal.echo("\n".join(map(paragraph, _headline(query))) + "\n")
    if rows:
        terminal.show_table(_table(rows))
    terminal.echo("\n" + "\n".join(map(paragraph, _remarks(query, best, rows, failures))))


def _headline(query: _Query) -> Iterator[str]:
    yield (
        f"{query.model} on {query.gpus} GPUs, micro-batches of {query.sequences} × "
        f"{query.seq_len} tokens; {query.config.parameters:,} parameters"
    )
    yield room(query.memory, query.target)
    yield "FSDP2 with float32 weights, gathered in bfloat16, and AdamW"


def _table(rows: Sequence[Row]) -> Table:
    first = rows[0].option.seconds_per_token
    return terminal.table_of(
        {
            "mesh": [_name(row.option.mesh) for row in rows],
            "allocated": [format_bytes(row.measured.allocated_bytes) for row in rows],
            "rank": [str(row.option.rank) for row in rows],
            "reserved": [format_bytes(row.measured.reserved_bytes or 0) for row in rows],
            "left": [left_or_lacking(row.budget_bytes - row.needed_bytes) for row in rows],
            "time": [f"{row.option.seconds_per_token / first:.2f} ×" for row in rows],
        }
    )


def _name(mesh: Mesh) -> str:
    return f"{mesh}{', checkpointing' if mesh.checkpointed else ''}"


def _remarks(
    query: _Query, best: Row | None, rows: Sequence[Row], failures: Sequence[str]
) -> Iterator[str]:
    if best is None and rows:
        row = min(rows, key=lambda row: row.needed_bytes)
        yield (
            f"Nothing fits {query.memory.name}: {row.option.mesh} lacks "
            f"{format_bytes(row.needed_bytes - query.budget_bytes)} of "
            f"{format_bytes(row.needed_bytes)}; use more GPUs, a shorter sequence or a larger GPU"
        )
    if best is not None:
        mesh = best.option.mesh
        tokens = mesh.data * mesh.micro_batches * query.sequences * query.seq_len
        yield (
            f"a step of {mesh} processes {tokens:,} tokens: {mesh.micro_batches} × "
            f"{mesh.data} micro-batches"
        )
    if rows:
        yield (
            "predicted by a dry run of each script, of the rank that needs most by formula; "
            f"the first row's peak is in {rows[0].measured.peak_phase}"
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
    rows: Sequence[Row],
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
        "chosen": rows.index(best) if best else None,
        "options": [_numbers(row, command if row is best else None) for row in rows],
        "notes": list(failures),
    }
    title = f"{query.model} on {query.gpus} GPUs, in {query.memory.name}"
    measured = {str(row.option.mesh): row.measured for row in rows}
    write_breakdown(measured, title, document, folder)


def _numbers(row: Row, command: str | None) -> dict[str, Any]:
    mesh = row.option.mesh
    return option_numbers(
        _name(mesh),
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
