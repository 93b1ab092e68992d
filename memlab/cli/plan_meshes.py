"""`memlab plan --gpus N`: compare ways to divide a Llama over GPUs, and write the script."""

import io
import tempfile
import warnings
from collections.abc import Callable, Iterator
from contextlib import redirect_stdout
from dataclasses import dataclass, replace
from pathlib import Path

from memlab.cli.errors import UsageError
from memlab.cli.plan_report import (
    ON_EACH_MACHINE,
    Result,
    Section,
    columns_of,
    nccl_buffers,
    room,
)
from memlab.configs.torchrun import MAX_GPUS_PER_MACHINE, torchrun
from memlab.internals.files import write_beside
from memlab.planner import Option
from memlab.planner.mesh_search import MAX_MISSES, Tried, script_of, search_meshes
from memlab.planner.options import Query, plan_numbers
from memlab.scripts.launch import launch_of
from memlab.scripts.ranks import run_ranks
from memlab.trace import Trace
from memlab.units import format_bytes

SCRIPT = "train_mesh.py"


@dataclass(frozen=True)
class Meshes:
    """Predict the scripts of the fastest meshes until `count` fit; write the best one's script."""

    query: Query
    count: int
    folder: Path

    @property
    def stages(self) -> int:
        return self.count + MAX_MISSES

    def plan(self, announce: Callable[[str], None]) -> Result:
        query = self.query
        found = search_meshes(query, self.count, self._predicted, announce)
        best = next((each for each in found.options if each.fits), None)
        options, blocks = list(found.options), []
        if best is not None:
            script = self.folder / SCRIPT
            _write(script_of(query, best.recipe), script)
            command = torchrun(query.gpus, str(script))
            blocks = [f"{best.recipe}:\n  {command}"]
            blocks += [ON_EACH_MACHINE] if query.gpus > MAX_GPUS_PER_MACHINE else []
            options[options.index(best)] = replace(best, command=command)
        return Result(
            f"{query.model} on {query.gpus} GPUs, in {query.memory.name}",
            plan_numbers(
                query.memory,
                query.target,
                [option.to_dict() for option in options],
                None if best is None else found.options.index(best),
                None,
                **query.numbers(),
                notes=list(found.failures),
            ),
            list(_headline(query)),
            columns_of([Section(options, next(iter(options), None))], "mesh"),
            list(_remarks(query, best, found)),
            blocks,
            {option.recipe.words: option for option in options},
        )

    def _predicted(self, script: str, rank: int) -> Trace:
        """Predict a rank of a script by a dry run."""
        with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
            warnings.simplefilter("ignore")
            path = Path(folder, SCRIPT)
            path.write_text(script, encoding="utf-8")
            launch = launch_of([str(path)]).with_ranks(self.query.gpus)
            with redirect_stdout(io.StringIO()):
                outcomes = run_ranks(launch, (rank,), device=self.query.target)
        trace = outcomes[rank].trace
        assert trace is not None
        return trace


def _write(text: str, path: Path) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with write_beside(path) as beside:
            beside.write_text(text, encoding="utf-8")
    except OSError as error:
        raise UsageError(f"writing {path} failed: {error}") from error


def _headline(query: Query) -> Iterator[str]:
    yield (
        f"{query.model} on {query.gpus} GPUs, micro-batches of {query.batch} × "
        f"{query.seq_len} tokens; {query.config.parameters:,} parameters"
    )
    yield room(query.memory, query.target)
    yield "FSDP2 with float32 weights, gathered in bfloat16, and AdamW"


def _remarks(query: Query, best: Option | None, found: Tried) -> Iterator[str]:
    if best is not None:
        mesh = best.recipe
        tokens = mesh.data * mesh.micro_batches * query.batch * query.seq_len
        yield (
            f"a step of {mesh} processes {tokens:,} tokens: {mesh.micro_batches} × "
            f"{mesh.data} micro-batches"
        )
    elif found.options:
        least = min(found.options, key=lambda each: each.needed_bytes)
        yield (
            f"Nothing fits {query.memory.name}: {least.recipe} lacks "
            f"{format_bytes(least.missing_bytes)} of "
            f"{format_bytes(least.needed_bytes)}; use more GPUs, a shorter sequence or a larger GPU"
        )
    for first in found.options[:1]:
        assert first.measured is not None
        yield (
            "predicted by a dry run of each script, of the rank that needs most by formula; "
            f"the first row's peak is in {first.measured.peak_phase}"
        )
    yield (
        "time: per token, estimated, relative to the first row; only FSDP's collectives overlap "
        "with computation, and the network has 400 Gbit/s for each GPU"
    )
    yield nccl_buffers()
    yield from found.failures
