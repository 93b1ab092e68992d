"""The output of `memlab run` for several ranks: the peak of each, and what they send each other."""

from collections import Counter
from collections.abc import Mapping, Sequence

from memlab.cli import terminal
from memlab.configs.nccl import CHANNELS, ring_bytes
from memlab.scripts.running import Outcome
from memlab.trace import Trace
from memlab.units import format_bytes, paragraph

CATEGORIES = ("parameters", "gradients", "optimizer_state", "activations")


def highest(outcomes: Mapping[int, Outcome]) -> int:
    """Return the rank that peaks highest, the first of several."""
    return max(outcomes, key=lambda rank: (_peak(outcomes[rank].trace), -rank))


def _peak(trace: Trace | None) -> int:
    return trace.allocated_bytes if trace is not None else -1


def show_ranks(outcomes: Mapping[int, Outcome]) -> None:
    """Print a row for each rank that ran."""
    traces = {rank: each.trace for rank, each in outcomes.items() if each.trace is not None}
    columns = {
        "rank": [str(rank) for rank in traces],
        "allocated": [format_bytes(trace.allocated_bytes) for trace in traces.values()],
        **{
            name.replace("_", " "): [
                format_bytes(trace.at_peak.get(name, 0)) for trace in traces.values()
            ]
            for name in CATEGORIES
        },
    }
    terminal.show_table(terminal.table_of(columns))
    for rank, outcome in outcomes.items():
        if outcome.alike:
            terminal.echo(paragraph(_alike(rank, outcome.alike)))
    terminal.echo(f"\nrank {highest(outcomes)}, the highest:\n")


def _alike(rank: int, others: Sequence[int]) -> str:
    named = ", ".join(map(str, others if len(others) < 4 else (*others[:2], "…", others[-1])))
    are, they = ("ranks", "their stages have") if len(others) > 1 else ("rank", "its stage has")
    return (
        f"{are} {named} did not run: {they} the same weights as rank {rank}'s, and torch's "
        f"schedules keep no more micro-batches there (--rank {others[0]} runs one anyway)"
    )


def show_transfers(outcome: Outcome, per_node: int) -> None:
    """Print what a rank sends in its step, by collective, number of ranks and link."""
    sizes: Counter[tuple[str, int, str]] = Counter()
    times: Counter[tuple[str, int, str]] = Counter()
    for transfer in outcome.transfers:
        crosses = len({rank // per_node for rank in (*transfer.ranks, outcome.rank)}) > 1
        where = "between nodes" if crosses else "within a node"
        key = transfer.kind, len(transfer.ranks), where
        sizes[key] += transfer.bytes
        times[key] += 1
    if not any(sizes.values()):
        return
    terminal.echo("\nsent to other ranks in the step, with ring collectives:")
    for (kind, ranks, where), size in sizes.most_common():
        if size:
            among = "to one rank" if kind == "send" else f"of {ranks} ranks"
            count = times[kind, ranks, where]
            terminal.echo(f"  {format_bytes(size):>11}  {count:>5} × {kind} {among}, {where}")
    groups = {transfer.ranks for transfer in outcome.transfers if len(transfer.ranks) > 1}
    if groups and outcome.trace is not None and outcome.trace.device != "cpu":
        least, most = (format_bytes(len(groups) * ring_bytes(count)) for count in CHANNELS)
        terminal.echo(
            paragraph(
                f"NCCL's own buffers come on top, by formula {least} (2 channels) to {most} (32) "
                f"for rings of {len(groups)} process groups; trees and networks need more"
            )
        )
