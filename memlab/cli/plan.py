"""`memlab plan`: which recipe fits a model into a memory, measured, and at what cost."""

import os
from collections.abc import Iterator, Mapping
from dataclasses import replace

from rich.table import Table

from memlab.cli import report
from memlab.cli.choices import choose_folder, require_countable
from memlab.cli.errors import UsageError, choice, shown
from memlab.cli.results import write_plan
from memlab.configs import config_named
from memlab.metering.kernels import TARGETS
from memlab.model import PRESETS
from memlab.planner import LEARNED, Memory, Option, Plan, Recipe, memory_named, plan
from memlab.planner.options import AS_IT_IS, budget_bytes
from memlab.planner.recipes import OPTIMIZERS, PRECISIONS
from memlab.planner.search import USUAL_SEQ_LEN
from memlab.units import format_bytes

MOST_OTHERS = 3  # recipes that were not measured, to be shown
MOST_WORKERS = 4  # each imports torch, which takes seconds and some 300 MiB


def plan_model(
    *,
    model: str | None,
    memory: str | None,
    gpus: int,
    batch: int,
    seq_len: int | None,
    precision: str | None,
    optimizer: str | None,
    lora: bool | None,
    tensor_parallel: int,
    pipeline_parallel: int,
    count: int,
    exact: bool,
    target: str | None,
    out: str,
) -> int:
    """Search, print what fits, write a picture and numbers; 1 if nothing fits, else 0."""
    if model is None:
        raise UsageError(
            f"got no --model; give one of {', '.join(PRESETS)}, a config.json, or --script"
        )
    there, target = choose_memory(memory, target)
    learned = choose_kinds(precision, optimizer, lora)
    folder = choose_folder(out)
    try:
        config = config_named(model)
        require_countable(config, batch, min(seq_len or USUAL_SEQ_LEN, config.seq_len))
        with report.progress(count + 2) as announce:
            found = plan(
                model,
                there,
                gpus=gpus,
                batch=batch,
                seq_len=seq_len,
                tensor_parallel=tensor_parallel,
                pipeline_parallel=pipeline_parallel,
                learned=learned,
                count=count,
                exact=exact,
                workers=min(MOST_WORKERS, os.cpu_count() or 1),
                target=target,
                announce=announce,
            )
    except ValueError as error:
        raise UsageError(str(error)) from error
    show(found)
    write_plan(found, folder)
    return 0 if found.best else 1


def choose_memory(given: str | None, target: str | None) -> tuple[Memory, str]:
    """What a training has to fit into, and what kind of device that is of: as its card has it,
    unless the user says."""
    if given is None:
        raise UsageError(
            "got no --memory; give it as 24GB, 24GiB or a card's name, such as rtx4090"
        )
    if target not in (None, "cpu", *TARGETS):
        raise UsageError(f"got --device {shown(target)}; {choice(target, ('cpu', *TARGETS))}")
    try:
        memory = memory_named(given, target)
    except ValueError as error:
        raise UsageError(str(error)) from error
    return memory, target or memory.card_for_costs.target


def choose_kinds(
    precision: str | None, optimizer: str | None, lora: bool | None
) -> tuple[Recipe, ...]:
    """The kinds of training that the user leaves open; what is asked for by name may be one that
    is not among the usual."""
    for option, got, known in (
        ("--precision", precision, PRECISIONS),
        ("--optimizer", optimizer, OPTIMIZERS),
    ):
        if got is not None and got not in known:
            raise UsageError(f"got {option} {shown(got)}; {choice(got, known)}")
    kinds = [
        each
        for each in LEARNED
        if precision in (None, each.precision)
        and optimizer in (None, each.optimizer)
        and lora in (None, each.lora)
    ]
    if kinds:
        return tuple(kinds)
    try:
        return (
            replace(
                Recipe(),
                precision=precision or "bfloat16",
                optimizer=optimizer or "adamw",
                lora=bool(lora),
            ),
        )
    except ValueError as error:
        raise UsageError(str(error)) from error


# ------------------------------------------------------------------ what is printed


def show(found: Plan) -> None:
    """What was asked, the table, and what each column leaves open."""
    report.say("\n".join(headline(found)) + "\n")
    others = found.others[:MOST_OTHERS]
    if rows := [*found.options, *others, *([found.miss] if found.miss else [])]:
        report.console.print(table(rows))
    sentences = "\n".join(map(report.paragraph, remarks(found)))
    report.say(f"\n{sentences}")
    for option in found.options:
        if option.recipe.by_formula_only:
            continue
        report.say(f"\n{option.recipe.words}:\n  {found.command(option)}")


def headline(found: Plan) -> Iterator[str]:
    """The model, the memory, and how it was found out."""
    many = f", one of {found.gpus} GPUs, each with" if found.gpus > 1 else ","
    yield (
        f"{found.model}{many} {found.batch} × {found.seq_len} tokens; "
        f"{found.config.parameters:,} parameters"
    )
    how = f"predicted for {found.target}, nothing is computed"
    if found.target == "cpu":
        how = "dry runs for the CPU"
    yield f"{room(found.memory, found.target)}; {how}"
    needed = found.bytes_as_it_is
    lacks = format_bytes(needed - found.budget_bytes)
    yield (
        f"as it is, {AS_IT_IS}, nothing saved: ≈ {format_bytes(needed)}, by formula: "
        f"{'fits' if needed <= found.budget_bytes else f'lacks {lacks}'}"
    )


def room(memory: Memory, target: str) -> str:
    """How much is there, and how much of it for tensors."""
    total = f"{memory.name}: {format_bytes(memory.total_bytes)}"
    if target == "cpu":
        return f"{total}, all of it for tensors"
    return f"{total}, of which CUDA leaves {format_bytes(budget_bytes(memory, target))} to torch"


def table(rows: list[Option]) -> Table:
    """A line for each recipe: those that fit, then the nearest that does not."""
    first = rows[0].candidate.step_seconds
    columns = {
        "recipe": [row.recipe.words for row in rows],
        "allocated": [
            format_bytes(row.measured.allocated_bytes)
            if row.measured
            else f"≈ {format_bytes(row.needed_bytes)}"
            for row in rows
        ],
        "reserved": [
            format_bytes(row.measured.reserved_bytes)
            if row.measured and row.measured.reserved_bytes
            else ""
            for row in rows
        ],
        "left": [
            format_bytes(-row.missing_bytes)
            if row.fits
            else f"lacks {format_bytes(row.missing_bytes)}"
            for row in rows
        ],
        "time": [f"{row.candidate.step_seconds / first:.2f} ×" for row in rows],
        "batch up to": [str(row.largest_batch or "") for row in rows],
        "length up to": [f"{row.longest:,}" if row.longest else "" for row in rows],
    }
    return report.table_of(columns)


def remarks(found: Plan) -> Iterator[str]:
    """What the table leaves open."""
    best, miss = found.best, found.miss
    if best is None:
        yield f"Nothing fits {found.memory.name}{_smallest(found)}"
    else:
        yield (
            f"time: over the first one's, which goes to {shares(best.candidate.seconds)}; an "
            f"estimate that counts every copy, not a measurement"
        )
        yield (
            "each recipe trains something else (another precision, optimizer or LoRA), and is the "
            "fastest found that trains it and fits"
        )
        if any(option.largest_batch for option in found.options):
            how = "measured" if found.exact else "by formula, scaled to what was measured; --exact"
            yield (
                f"batch up to: with {found.seq_len} tokens each; length up to: with a batch of "
                f"{found.batch}, in steps of 128. Both {how}{'' if found.exact else ' measures'}"
            )
    if best and miss:
        yield (
            f"The next, {miss.recipe.words}, does not fit: it lacks "
            f"{format_bytes(miss.missing_bytes)} of {format_bytes(miss.needed_bytes)}"
        )
    shown = (*found.options, *found.others)
    if any(option.recipe.by_formula_only for option in shown):
        yield "≈: by formula alone; nothing here runs tensor or pipeline parallel parts"
    elif found.others:
        yield (
            f"≈: by formula, not measured, nor what an allocator reserves beyond it; --recipes "
            f"{len(shown)} measures these, and --optimizer or --precision one of them"
        )
    yield from found.failures


def _smallest(found: Plan) -> str:
    if found.miss is None:
        return ""
    return (
        f": the smallest that was tried, {found.miss.recipe.words}, lacks "
        f"{format_bytes(found.miss.missing_bytes)} of {format_bytes(found.miss.needed_bytes)}; "
        f"take a shorter length, more GPUs or a larger card"
    )


def shares(seconds: Mapping[str, float]) -> str:
    """What an estimated step goes to, the largest first."""
    total = sum(seconds.values())
    terms = sorted(seconds.items(), key=lambda term: -term[1])
    return ", ".join(f"{name} {value / total:.0%}" for name, value in terms if value > total / 100)
