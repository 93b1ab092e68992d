"""`memlab plan` for memlab's own models: recipes, on several GPUs sharded by ZeRO."""

import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from memlab.cli.plan_report import (
    EMPTIES_CACHE,
    ON_EACH_MACHINE,
    Result,
    Section,
    columns_of,
    nccl_buffers,
    room,
    shares,
)
from memlab.configs.targets import find_target
from memlab.configs.torchrun import MAX_GPUS_PER_MACHINE
from memlab.planner import Plan, Recipe
from memlab.planner.options import AS_IT_IS, Query, command
from memlab.planner.recipes import GROUPS
from memlab.planner.search import search
from memlab.units import format_bytes, paragraph

MAX_WORKERS = 4  # each imports torch, which takes seconds and about 300 MiB


@dataclass(frozen=True)
class Recipes:
    """Search the recipes of some kinds of training, and predict `count` kinds."""

    query: Query
    kinds: tuple[Recipe, ...]
    count: int

    @property
    def stages(self) -> int:
        return self.count + 2

    def plan(self, announce: Callable[[str], None]) -> Result:
        workers = min(MAX_WORKERS, os.cpu_count() or 1)
        return report(
            search(self.query, self.kinds, self.count, workers=workers, announce=announce)
        )


def report(found: Plan) -> Result:
    """Return what is printed and written: a section for each group of recipes."""
    by_group = {
        group: [option for option in found.shown if option.recipe.group == group]
        for group in GROUPS
    }
    return Result(
        f"{found.model}, {found.batch} × {found.seq_len} tokens, in {found.memory.name}",
        found.to_dict(),
        list(headline(found)),
        columns_of([Section(group, group[0], name) for name, group in by_group.items() if group]),
        list(remarks(found)),
        list(_commands(found)),
        {option.recipe.words: option for option in found.shown},
    )


def _commands(found: Plan) -> Iterator[str]:
    if found.as_it_is and found.as_it_is.fits:
        yield f"without techniques:\n  {command(found, AS_IT_IS)}"
    for option in found.options:
        yield f"{option.recipe.words}:\n  {found.command(option)}"
    if found.gpus > 1 and (stopped := list(_too_large_to_make(found))):
        yield "\n".join(map(paragraph, stopped))
    if found.gpus > MAX_GPUS_PER_MACHINE:
        yield ON_EACH_MACHINE


def _too_large_to_make(found: Plan) -> Iterator[str]:
    """Say which recipes' ranks cannot make their model: it is whole before it is sharded."""
    for option in found.options:
        needed = found.config.parameters * option.recipe.dtype.itemsize
        if needed > found.budget_bytes:
            yield (
                f"{option.recipe.words}: its command stops, because memlab makes the whole model, "
                f"{format_bytes(needed)}, on each GPU before it shards it"
            )


def headline(found: Plan) -> Iterator[str]:
    """Yield the model, the memory and the unmodified training's need."""
    many = f", on each of {found.gpus} GPUs" if found.gpus > 1 else ","
    yield (
        f"{found.model}{many} {found.batch} × {found.seq_len} tokens; "
        f"{found.config.parameters:,} parameters"
    )
    how = f"predicted for {found.target} without running anything"
    if found.target == "cpu":
        how = "predicted by dry runs for the CPU"
    yield room(found.memory, found.target)
    yield how
    if note := getattr(find_target(found.target), "note", None):
        yield note
    if plain := found.as_it_is:
        lacks = f"lacks {format_bytes(plain.missing_bytes)}"
        yield (
            f"without techniques ({AS_IT_IS}): {format_bytes(plain.needed_bytes)}, "
            f"{'fits' if plain.fits else lacks}"
        )


def remarks(found: Plan) -> Iterator[str]:
    """Explain the table's columns, and its limits."""
    best, miss = found.best, found.miss
    if best is None:
        yield f"Nothing fits {found.memory.name}{_smallest(found)}"
    else:
        yield (
            f"time: estimated, relative to the first recipe of the same group, as if no copy "
            f"overlapped with computation; the time of {best.recipe.words} is "
            f"{shares(best.seconds or {})}"
        )
        yield (
            "each row is the fastest recipe that fits for its precision and optimizer; --recipes "
            "predicts more of them; full fine-tuning, LoRA and QLoRA train different weights, so "
            "their times are not compared"
        )
        if any(option.largest_batch for option in found.options):
            yield (
                f"batch up to: predicted to fit at {found.seq_len} tokens per sequence; length up "
                f"to: at batch {found.batch}, in steps of 128; a slightly larger value may fit"
            )
    if any(option.empties_cache for option in found.options):
        yield EMPTIES_CACHE
    elif miss and miss.reserved_bytes > miss.needed_bytes:
        yield (
            "left: a full card needs less than is reserved on a larger one, because torch releases "
            "its unused memory and requests again"
        )
    if best and miss:
        yield (
            f"The next faster recipe, {miss.recipe.words}, would fit with "
            f"{format_bytes(miss.missing_bytes)} more"
        )
    if found.gpus > 1 and found.target != "cpu":
        yield nccl_buffers()
    yield from found.failures


def _smallest(found: Plan) -> str:
    if found.miss is None:
        return ""
    return (
        f": the smallest recipe tried, {found.miss.recipe.words}, lacks "
        f"{format_bytes(found.miss.missing_bytes)} of {format_bytes(found.miss.needed_bytes)}; "
        f"use a shorter sequence, more GPUs or a larger GPU"
    )
