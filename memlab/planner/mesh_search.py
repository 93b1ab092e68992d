"""Search the meshes of a Llama in the order of their time, until some are predicted to fit.

The formula of `memlab.planner.meshes` ranks them. Each one's script is predicted by a dry run of
the rank that needs most by formula.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from memlab.configs.targets import target_named
from memlab.planner.measuring import summarized
from memlab.planner.mesh_script import mesh_script
from memlab.planner.meshes import Mesh, MeshOption, mesh_options
from memlab.planner.options import Option, Query
from memlab.trace import Trace

MAX_BLOCK_RUNS = 300  # blocks · micro-batches that a dry run may take, about a minute
MAX_MISSES = 3  # meshes that may turn out not to fit

Predict = Callable[[str, int], Trace]  # of a script's text, the step of a rank


class Tried(NamedTuple):
    """The meshes that were predicted, and why the predictions of others failed."""

    options: tuple[Option, ...]
    failures: tuple[str, ...]


def search_meshes(
    query: Query, count: int, predict: Predict, announce: Callable[[str], object]
) -> Tried:
    """Predict the fastest meshes until `count` fit, or MAX_MISSES don't."""
    options: list[Option] = []
    failures: list[str] = []
    for candidate in _likely(query):
        mesh, rank = candidate.mesh, candidate.rank
        fitting = sum(option.fits for option in options)
        if fitting == count or len(options) - fitting == MAX_MISSES:
            break
        announce(f"rank {rank} of {mesh}")
        try:
            trace = predict(script_of(query, mesh), rank)
        except Exception as error:  # a mesh that fails must not stop the search
            failures.append(" ".join(f"{mesh}: {type(error).__name__}: {error}".split()))
            continue
        found = summarized(trace, extrapolated=False)
        options.append(
            Option(
                mesh,
                found.needed_bytes(query.budget_bytes),
                query.budget_bytes,
                replace(found, trace=None),  # it is long
                {"a token": candidate.seconds_per_token},
                {f"stage {each.stage}": each.terms for each in candidate.stages},
                rank=rank,
            )
        )
    return Tried(tuple(options), tuple(failures))


def script_of(query: Query, mesh: Mesh) -> str:
    """Return the script that trains so."""
    sizes = {"sequences": query.batch, "seq_len": query.seq_len}
    return mesh_script(query.config, mesh, **sizes, name=Path(query.model).name)


def _likely(query: Query) -> Sequence[MeshOption]:
    """Return the meshes that the formula lets fit, those with a quick dry run first; if none fits,
    the one that needs least."""
    options = mesh_options(
        query.config,
        query.gpus,
        query.memory.card_for_costs,
        sequences=query.batch,
        seq_len=query.seq_len,
        workspace=2 * target_named(query.target).workspace_bytes,
    )
    fitting = [each for each in options if each.peak.total <= query.budget_bytes]
    smallest = min(options, key=lambda each: each.peak.total)
    return sorted(fitting, key=lambda each: _is_slow(query, each)) or [smallest]


def _is_slow(query: Query, option: MeshOption) -> bool:
    mesh = option.mesh
    blocks = mesh.blocks(query.config.layers, option.peak.stage)
    return mesh.micro_batches * blocks > MAX_BLOCK_RUNS
