"""`memlab plan --gpus N` for a mixture of experts: compare the degrees of expert parallelism."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.table import Table

from memlab.cli import terminal
from memlab.cli.documents import room_numbers
from memlab.cli.expert_options import Routing
from memlab.cli.plan_report import nccl_buffers, room
from memlab.cli.results import write_formula_plan
from memlab.configs.mixtures import MixtureConfig
from memlab.configs.nccl import CHANNELS, all_to_all_bytes
from memlab.configs.targets import target_named
from memlab.configs.torchrun import MAX_GPUS_PER_MACHINE
from memlab.planner.cards import Memory, budget_bytes
from memlab.planner.expert_parallel import (
    CAPACITY,
    ExpertMesh,
    crosses_nodes,
    dropped_share,
    expert_bytes,
    largest_imbalance,
    seconds_per_token,
    sent_bytes,
)
from memlab.planner.formulas import RESERVED
from memlab.planner.meshes import RankBytes
from memlab.planner.options import option_numbers, verdict
from memlab.units import format_bytes, paragraph


@dataclass(frozen=True)
class Row:
    """A degree of expert parallelism with its bytes and time, by formula."""

    mesh: ExpertMesh
    even: RankBytes
    busiest: RankBytes
    budget_bytes: int
    largest_imbalance: float | None
    sent: Mapping[str, int]
    seconds_per_token: float

    @property
    def needed_bytes(self) -> int:
        """With an allowance for reserved memory."""
        return round((1 + RESERVED) * self.busiest.total)

    @property
    def fits(self) -> bool:
        return self.needed_bytes <= self.budget_bytes

    @property
    def between_nodes(self) -> int:
        crossing = crosses_nodes(self.mesh)
        return sum(size for name, size in self.sent.items() if crossing[name])

    @property
    def within_nodes(self) -> int:
        return sum(self.sent.values()) - self.between_nodes


@dataclass(frozen=True)
class _Query:
    config: MixtureConfig
    model: str
    memory: Memory
    target: str
    gpus: int
    sequences: int
    seq_len: int
    imbalance: float

    def row(self, mesh: ExpertMesh) -> Row:
        sizes: dict[str, int] = {"sequences": self.sequences, "seq_len": self.seq_len}
        workspace = 2 * target_named(self.target).workspace_bytes
        budget = budget_bytes(self.memory, self.target)
        card = self.memory.card_for_costs
        at = {**sizes, "imbalance": self.imbalance}
        return Row(
            mesh,
            expert_bytes(self.config, mesh, **sizes, workspace=workspace),
            expert_bytes(self.config, mesh, **at, workspace=workspace),
            budget,
            largest_imbalance(
                self.config, mesh, budget, **sizes, allowance=RESERVED, workspace=workspace
            ),
            sent_bytes(self.config, mesh, **at),
            seconds_per_token(self.config, mesh, card, **at),
        )


def plan_experts(
    config: MixtureConfig,
    model: str,
    memory: Memory,
    target: str,
    gpus: int,
    sequences: int,
    seq_len: int,
    *,
    routing: Routing,
    folder: Path,
) -> int:
    """Print what each degree needs and sends, the fastest that fit first. Returns 1 if none fits,
    else 0."""
    imbalance = routing.imbalance_for(config, model)
    query = _Query(config, model, memory, target, gpus, sequences, seq_len, imbalance)
    rows = sorted((_row(query, n) for n in routing.degrees_for(config, model, gpus)), key=_rank)
    _show(query, rows)
    write_formula_plan(f"{model} on {gpus} GPUs, in {memory.name}", _numbers(query, rows), folder)
    return 0 if rows[0].fits else 1


def _row(query: _Query, degree: int) -> Row:
    """Return the degree without checkpointing if that fits, else with it."""
    whole = query.row(ExpertMesh(query.gpus, degree, checkpointed=False))
    return whole if whole.fits else query.row(ExpertMesh(query.gpus, degree))


def _rank(row: Row) -> tuple[bool, float]:
    """The fastest that fits comes first, or the smallest."""
    return not row.fits, row.seconds_per_token if row.fits else row.needed_bytes


# ------------------------------------------------------------------ output


def _show(query: _Query, rows: Sequence[Row]) -> None:
    terminal.echo("\n".join(map(paragraph, _headline(query, rows[0]))) + "\n")
    terminal.show_table(_table(query, rows))
    terminal.echo("\n" + "\n".join(map(paragraph, _remarks(query, rows))))


def _headline(query: _Query, row: Row) -> Iterator[str]:
    config, terms = query.config, row.busiest.terms
    yield (
        f"{query.model} on {query.gpus} GPUs, each with {query.sequences} × {query.seq_len} "
        f"tokens; {config.parameters:,} parameters, {config.experts} experts in a layer, "
        f"{config.chosen} for a token"
    )
    yield room(query.memory, query.target)
    yield (
        f"by formula: FSDP2 with float32 weights, gathered in bfloat16, and AdamW; each GPU's "
        f"shards are {format_bytes(terms['weights'])} of weights, {format_bytes(terms['weights'])} "
        f"of gradients and {format_bytes(terms['state'])} of optimizer state, in every row"
    )


def _table(query: _Query, rows: Sequence[Row]) -> Table:
    first = rows[0].seconds_per_token
    return terminal.table_of(
        {
            "experts over": [_over(row.mesh) for row in rows],
            "recompute": ["blocks" if row.mesh.checkpointed else "" for row in rows],
            "even": [format_bytes(row.even.total) for row in rows],
            f"× {query.imbalance:g}": [format_bytes(row.busiest.total) for row in rows],
            "fits": [_most(query, row) for row in rows],
            "all-to-all": [format_bytes(row.sent["tokens"]) for row in rows],
            "in nodes": [format_bytes(row.within_nodes) for row in rows],
            "between": [format_bytes(row.between_nodes) for row in rows],
            "time": [f"{row.seconds_per_token / first:.2f} ×" for row in rows],
        }
    )


def _over(mesh: ExpertMesh) -> str:
    return "1 GPU" if mesh.experts == 1 else f"{mesh.experts} GPUs"


def _most(query: _Query, row: Row) -> str:
    """Format the largest imbalance that fits, rounded down."""
    if row.largest_imbalance is None:
        return "no"
    if row.largest_imbalance == query.config.experts / query.config.chosen:
        return "all"
    return f"× {int(100 * row.largest_imbalance) / 100:.2f}"


def _remarks(query: _Query, rows: Sequence[Row]) -> Iterator[str]:
    config, first = query.config, rows[0]
    if not first.fits:
        lacks = format_bytes(first.needed_bytes - first.budget_bytes)
        yield (
            f"Nothing fits {query.memory.name}: experts over {_over(first.mesh)} lack {lacks} of "
            f"{format_bytes(first.needed_bytes)}; use more GPUs, a shorter sequence or a larger GPU"
        )
    yield (
        "experts over: how many GPUs share the experts of each layer and send tokens to each "
        "other; with 1 GPU, FSDP gathers all experts of a layer"
    )
    yield (
        f"even, × {query.imbalance:g}: peak of a GPU if all experts get the same number of tokens, "
        f"and of the busiest GPU if one expert in every layer, always on that GPU, gets "
        f"{query.imbalance:g} times as many (--imbalance)"
    )
    yield (
        f"fits: the largest imbalance whose peak fits, with {RESERVED:.0%} more for reserved "
        f"memory; all: even × {config.experts / config.chosen:g} fits, where every token chooses "
        f"the same expert"
    )
    yield _capacity(query)
    yield (
        "all-to-all: bytes of tokens that the busiest GPU sends to experts and back in a step. "
        "in nodes, between: these bytes plus FSDP's, over NVLink or PCIe within a node of "
        f"{MAX_GPUS_PER_MACHINE} GPUs, and over the network between nodes"
    )
    yield (
        "time: per token, estimated, relative to the first row; FSDP overlaps with computation, "
        "all-to-all does not, and the network has 400 Gbit/s for each GPU"
    )
    yield nccl_buffers()
    if (widest := max(row.mesh.experts for row in rows)) > 1:
        peers = min(widest, MAX_GPUS_PER_MACHINE)
        least, most = (format_bytes(all_to_all_bytes(channels, peers)) for channels in CHANNELS)
        yield f"NCCL's all-to-all among {peers} GPUs of a node needs {least} to {most} in addition"


def _capacity(query: _Query) -> str:
    dropped = dropped_share(query.config, query.imbalance)
    what = "drops nothing here"
    if dropped:
        of_expert = (query.imbalance - CAPACITY) / query.imbalance
        what = (
            f"would drop {of_expert:.1%} of the busiest expert's tokens ({dropped:.1%} of all "
            f"experts' tokens), and keep the peak at × {CAPACITY:g}"
        )
    return (
        f"capacity: the peak counts every token. A capacity factor of {CAPACITY:g}, as in Switch "
        f"Transformer (Fedus et al. 2021), {what}"
    )


def _numbers(query: _Query, rows: Sequence[Row]) -> dict[str, Any]:
    fits = rows[0].fits
    return {
        "library": "memlab",
        **room_numbers(query.memory, query.target),
        "verdict": verdict(fits, False),
        "model": query.model,
        "parameters": query.config.parameters,
        "gpus": query.gpus,
        "batch": query.sequences,
        "seq_len": query.seq_len,
        "bytes_as_it_is": None,
        "chosen": 0 if fits else None,
        "options": [_option(query, row) for row in rows],
        "notes": [],
    }


def _option(query: _Query, row: Row) -> dict[str, Any]:
    mesh = row.mesh
    return option_numbers(
        f"{mesh}{', checkpointing' if mesh.checkpointed else ''}",
        fits=row.fits,
        needed_bytes=row.needed_bytes,
        missing_bytes=row.needed_bytes - row.budget_bytes,
        group="full fine-tuning",
        settings={"data": mesh.gpus, "experts": mesh.experts, "checkpointed": mesh.checkpointed},
        by_formula={
            f"even: {row.even.moment}": row.even.terms,
            f"× {query.imbalance:g}: {row.busiest.moment}": row.busiest.terms,
        },
        estimated_seconds={"a token": row.seconds_per_token},
        imbalance=query.imbalance,
        largest_imbalance=row.largest_imbalance,
        sent_bytes=dict(row.sent),
    )
