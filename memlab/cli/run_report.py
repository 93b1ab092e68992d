"""What `memlab run` prints: the verdict, where the peak's memory is, and what ranks send."""

import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace

from rich.table import Table

from memlab.cli import report, terminal
from memlab.cli.plan_report import EMPTIES_CACHE, room
from memlab.cli.run_options import RunOptions
from memlab.cli.script import assumed
from memlab.configs.evidence import doubt
from memlab.configs.nccl import CHANNELS, ring_bytes
from memlab.planner.cards import budget_bytes
from memlab.scripts.evaluations import Evaluation
from memlab.scripts.running import Outcome
from memlab.scripts.runs import highest
from memlab.trace import Event, Trace
from memlab.units import WIDTH, format_bytes, paragraph

LARGEST = 8  # rows in each list
_OF_A_RANK = ("parameters", "gradients", "optimizer_state", "activations")

MATH_SOFTMAX = "aten._safe_softmax.default"  # only torch's math attention calls it
NOTABLE_SCORES = 0.1  # of the peak
_MATH_ATTENTION = (
    "{} of these are attention scores: torch has no fused kernel here for these inputs, and its "
    "math attention stores a matrix per head in float32. From Ampere on, flash attention takes "
    "float16 and bfloat16 with grouped heads, but no mask other than a causal one. Efficient "
    "attention takes masks, float16 and float32, also on a T4, but no grouped heads"
)
_WITH_GRADIENTS = (
    "Gradients were enabled, so it stored activations for a backward pass that never "
    "came; torch.no_grad() around it avoids that"
)
_WITHOUT_GRADIENTS = (
    "It stored no activations, so outputs used the memory: lower its batch size, or move what it "
    "keeps of each batch to the CPU"
)
_NEEDS_LESS = (
    "that is less than the reserved peak below, which a larger card would have: if a card is full, "
    "torch releases its unused memory and requests again"
)


def of_step(
    options: RunOptions, outcomes: Mapping[int, Outcome], needed: int
) -> Iterator[str | Table]:
    """Say whether the step fits, and where the memory of the rank that peaks highest is.

    needed   bytes that the device must have, if a memory is given
    """
    outcome = outcomes[highest(outcomes)]
    trace = outcome.trace
    assert trace is not None
    launch = options.script.launch
    yield paragraph(f"{launch}: {_how(options, outcome)}")
    yield from map(paragraph, (*assumed(trace), *outcome.notes))
    yield ""
    if len(outcomes) > 1:
        yield from _ranks(outcomes)
    if options.memory is not None:
        budget = budget_bytes(options.memory, options.target)
        yield paragraph(room(options.memory, options.target))
        yield from _verdict(trace, needed, budget, outcome.steps)
        yield ""
    if outcome.evaluation:
        yield paragraph(_of_evaluation(outcome.evaluation, trace.peak_bytes)) + "\n"
    yield from _peak(trace, options.script.device)
    yield from _transfers(outcome, launch.ranks or outcome.ranks or 1)


def notes(trace: Trace) -> Iterator[str]:
    """Yield the notes that do not stand in the first lines."""
    if rest := [note for note in trace.notes if note not in assumed(trace)]:
        yield "\n" + "\n".join(paragraph(f"note: {note}") for note in rest)


def _how(options: RunOptions, outcome: Outcome) -> str:
    which = f"step {outcome.steps}" + (" (its only one)" if outcome.steps == 1 else "")
    if outcome.ranks is not None and outcome.ranks > 1:
        which += f" of rank {outcome.rank} of {outcome.ranks}"
    if options.script.is_real:
        return f"{which}, measured on this machine"
    is_cpu = options.script.device == "cpu"
    on = "the CPU's memory, in a dry run" if is_cpu else f"predicted for {options.script.device}"
    return f"{which}, {on}; nothing is computed, so a printed loss is meaningless"


# ------------------------------------------------------------------ does it fit?


def _verdict(trace: Trace, needed: int, budget: int, steps: int) -> Iterator[str]:
    """Say how much the step needs, and whether it fits."""
    left, needs = budget - needed, f"it needs {format_bytes(needed)}"
    if left < 0:
        yield f"{needs}: it does not fit, {format_bytes(-left)} are lacking"
        if (trace.reserved_bytes or 0) > needed:
            yield paragraph(_NEEDS_LESS)
        return
    yield f"{needs}: it fits, {format_bytes(left)} are left"
    most = trace.memory.reserved_most_bytes or 0
    kind, times = doubt(trace.notes) or ("", 1.0)
    if most > budget:
        yield paragraph(
            f"with other convolution kernels it may need up to {format_bytes(most)}, and then not "
            f"fit"
        )
    elif times * needed > budget:
        yield paragraph(
            f"but it may not: of measured steps of this kind ({kind}) one reserved {times:.2f} "
            f"times its prediction"
        )
    yield paragraph(
        f"if the script evaluates after step {steps}, that is not included; --steps N goes on to "
        f"step N"
    )
    if (trace.reserved_bytes or 0) > budget:
        yield paragraph(EMPTIES_CACHE)


# ------------------------------------------------------------------ the peak


def _peak(trace: Trace, device: str | None) -> Iterator[str]:
    """Describe the peak by category, by layers and by lines."""
    yield str(replace(trace, notes=()))
    if numbers := "\n".join(
        map(paragraph, report.memory_numbers(trace, report.context_of(device)))
    ):
        yield f"\n{numbers}"
    alive = trace.alive(trace.peak_position)
    yield "\nat the peak, by layer (* stands for a number):"
    yield from _largest((_layer(event), event) for event in alive)
    if any(event.line for event in alive):
        yield "\nat the peak, allocated in this step, by line of code:"
        yield from _largest(
            (f"{event.line}  {event.category}", event) for event in alive if event.line
        )
    scores = sum(event.bytes for event in alive if event.operator == MATH_SOFTMAX)
    if scores > NOTABLE_SCORES * trace.peak_bytes:
        yield "\n" + paragraph(_MATH_ATTENTION.format(format_bytes(scores)))


def _of_evaluation(evaluation: Evaluation, step_bytes: int) -> str:
    """Compare the peak of an evaluation with the step's."""
    peak = format_bytes(evaluation.peak_bytes)
    if evaluation.peak_bytes < step_bytes:
        return f"an evaluation of {evaluation.model} needs less: its peak is {peak}"
    where = "the peak is in an evaluation"
    if evaluation.peak_bytes > step_bytes:
        where = f"before this step, an evaluation had a higher peak, {peak}"
    remedy = _WITH_GRADIENTS if evaluation.gradients else _WITHOUT_GRADIENTS
    return f"{where}: {evaluation.model} was in evaluation mode. {remedy}"


def _layer(event: Event) -> str:
    """Return the module's path with its numbers replaced, and the category."""
    path = event.module.removeprefix("_orig_mod.")  # of a compiled model
    path = re.sub(r"(?<![^.])\d+(?![^.])", "*", path) or "outside modules"
    return f"{path}  {event.category}"


def _largest(named: Iterable[tuple[str, Event]]) -> Iterator[str]:
    """Yield the groups with most bytes, each with its number of tensors."""
    groups: dict[str, list[int]] = defaultdict(list)
    for name, event in named:
        groups[name].append(event.bytes)
    ranked = sorted(groups.items(), key=lambda group: -sum(group[1]))
    for name, sizes in ranked[:LARGEST]:
        total, count = format_bytes(sum(sizes)), f"{len(sizes)} ×" if len(sizes) > 1 else ""
        where, category = name.split("  ")
        line = f"  {total:>11}  {count:>6} {category.replace('_', ' '):<20} {where}"
        yield line if len(line) <= WIDTH else f"{line[:39].rstrip()}\n{' ' * 15}{where}"
    if rest := ranked[LARGEST:]:
        total = format_bytes(sum(sum(sizes) for _, sizes in rest))
        yield f"  {total:>11}  in {len(rest)} more groups"


# ------------------------------------------------------------------ several ranks


def _ranks(outcomes: Mapping[int, Outcome]) -> Iterator[str | Table]:
    """Yield a row for each rank that ran."""
    traces = {rank: each.trace for rank, each in outcomes.items() if each.trace is not None}
    columns = {
        "rank": [str(rank) for rank in traces],
        "allocated": [format_bytes(trace.allocated_bytes) for trace in traces.values()],
        **{
            name.replace("_", " "): [
                format_bytes(trace.at_peak.get(name, 0)) for trace in traces.values()
            ]
            for name in _OF_A_RANK
        },
    }
    yield terminal.table_of(columns)
    for rank, outcome in outcomes.items():
        if outcome.alike:
            yield paragraph(_alike(rank, outcome.alike))
    yield f"\nrank {highest(outcomes)}, the highest:\n"


def _alike(rank: int, others: Sequence[int]) -> str:
    named = ", ".join(map(str, others if len(others) < 4 else (*others[:2], "…", others[-1])))
    are, they = ("ranks", "their stages have") if len(others) > 1 else ("rank", "its stage has")
    return (
        f"{are} {named} did not run: {they} the same weights as rank {rank}'s, and torch's "
        f"schedules keep no more micro-batches there (--rank {others[0]} runs one anyway)"
    )


def _transfers(outcome: Outcome, per_node: int) -> Iterator[str]:
    """Yield what a rank sends in its step, by collective, number of ranks and link."""
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
    yield "\nsent to other ranks in the step, with ring collectives:"
    for (kind, ranks, where), size in sizes.most_common():
        if size:
            among = "to one rank" if kind == "send" else f"of {ranks} ranks"
            count = times[kind, ranks, where]
            yield f"  {format_bytes(size):>11}  {count:>5} × {kind} {among}, {where}"
    groups = {transfer.ranks for transfer in outcome.transfers if len(transfer.ranks) > 1}
    if groups and outcome.trace is not None and outcome.trace.device != "cpu":
        least, most = (format_bytes(len(groups) * ring_bytes(count)) for count in CHANNELS)
        yield paragraph(
            f"NCCL's own buffers come on top, by formula {least} (2 channels) to {most} (32) "
            f"for rings of {len(groups)} process groups; trees and networks need more"
        )
