"""`memlab plan` for a model of transformers: a row for each group of recipes, and its code."""

import os
from collections.abc import Iterator
from functools import partial
from textwrap import indent
from typing import Any

from memlab.cli import terminal
from memlab.cli.documents import room_numbers
from memlab.cli.errors import UsageError, quoted, suggestions
from memlab.cli.parsing import choose_folder
from memlab.cli.plan_report import EMPTIES_CACHE, room, shares
from memlab.cli.requests import PlanRequest
from memlab.cli.results import write_breakdown
from memlab.planner import Memory
from memlab.planner.options import budget_bytes, verdict
from memlab.planner.processes import ProcessEndedError, processes
from memlab.train.adapters import LORA_RANK
from memlab.transformers_models.memlab_code import memlab_code
from memlab.transformers_models.planning import MAX_SEQUENCES, Choice, Option, Search
from memlab.transformers_models.recipes import METHODS, OPTIMIZERS, PRECISIONS, Recipe
from memlab.transformers_models.recipes import code as production_code
from memlab.transformers_models.sources import Source
from memlab.transformers_models.structure import adapted_layers, linear_share
from memlab.transformers_models.tasks import Size
from memlab.transformers_models.training import Training
from memlab.units import format_bytes, paragraph

NOTABLE_SHARE = 0.2  # of the weights: said if so many are not in 4 bits
MAX_WORKERS = 2  # each imports torch and transformers, which takes seconds and about 700 MiB


CODE = ("production", "memlab")  # whose techniques the printed code uses


def plan_transformers(
    training: Training, choice: Choice, memory: Memory, target: str, out: str, code: str
) -> int:
    """Search each group of recipes, print what fits, write results; return 1 if nothing fits."""
    folder = choose_folder(out)
    groups = choice.groups()
    terminal.echo("\n".join(map(paragraph, _headline(training, memory, target))) + "\n")
    try:
        options = list(_best_options(groups, training, target, memory))
    except ProcessEndedError as error:
        raise UsageError(str(error)) from error
    _show(training, options, code, memory)
    write_breakdown(
        {option.title: option.measured for option in options if option.measured},
        f"{training}, in {memory.name}",
        _numbers(training, groups, memory, target, options, code),
        folder,
    )
    return 0 if any(option.fits for option in options) else 1


def _best_options(
    groups: list[list[Recipe]], training: Training, target: str, memory: Memory
) -> Iterator[Option]:
    """Search the groups, several at once."""
    workers = min(MAX_WORKERS, os.cpu_count() or 1, len(groups))
    with terminal.progress(len(groups) + 1) as announce, processes(workers) as map_:
        announce(groups[0][0].group)
        found = map_(partial(_best, training.source, training.size, target, memory), groups)
        for number, option in enumerate(found, start=1):
            if number < len(groups):
                announce(groups[number][0].group)
            yield option


_METHODS = {"full fine-tuning": "full", "LoRA": "lora", "QLoRA": "qlora"}  # by group of recipes


def choose_recipes(training: Training, request: PlanRequest, group: str | None) -> Choice:
    """Return the recipes that the options allow, after checking that the model takes the size."""
    for option, got, known in (
        ("--precision", request.precision, PRECISIONS),
        ("--optimizer", request.optimizer, OPTIMIZERS),
    ):
        if got is not None and got not in known:
            raise UsageError(f"got {option} {quoted(got)}; {suggestions(got, known)}")
    methods = METHODS if group is None else (_METHODS[group],)
    try:
        _ = training.described
        layers = adapted_layers(training.skeleton, request.lora_targets or "all")
    except ValueError as error:
        raise UsageError(str(error)) from error
    rank = request.lora_rank or LORA_RANK
    return Choice(methods, request.precision, request.optimizer, rank=rank, targets=layers)


def _best(source: Source, size: Size, target: str, memory: Memory, group: list[Recipe]) -> Option:
    """Search one group. Runs in another process."""
    budget = budget_bytes(memory, target)
    search = Search(
        Training(source, size), target, memory.card_for_costs, budget, lambda stage: None
    )
    return search.best_of(group)


def _headline(training: Training, memory: Memory, target: str) -> Iterator[str]:
    weights = training.parameters
    yield (
        f"{training.source.name}: transformers' {training.class_name}, {weights:,} parameters, "
        f"{training.described}"
    )
    declared = training.config.architectures or ()
    if declared and training.class_name not in declared:
        yield f"the config names {declared[0]}, whose training memlab does not know"
    if (card := memory.card) is not None and not card.runs_cuda:
        yield (
            f"{card.vendor}: predicted with CUDA's kernels and allocator, and not compared with "
            f"such a GPU; bitsandbytes' optimizers and 4-bit weights may not run there"
        )
    if stored := training.stored_quantized:
        yield f"the published weights are stored as {stored}; here they are counted as bfloat16"
    yield room(memory, target)
    yield f"predicted for {target} without running anything"


def _show(training: Training, options: list[Option], code: str, memory: Memory) -> None:
    first = next((option for option in options if option.fits), None)
    terminal.show_table(_table(options, first))
    sentences = "\n".join(map(paragraph, _remarks(training, options, first)))
    terminal.echo(f"\n{sentences}")
    if first is not None:
        lines = "\n".join(_lines(training, first.recipe, code, memory))
        terminal.echo(f"\n{first.title}:\n\n{indent(lines, '  ')}\n")


def _lines(training: Training, recipe: Recipe, code: str, memory: Memory) -> list[str]:
    """Return the code that trains with a recipe."""
    is_apple = memory.card is not None and memory.card.vendor == "Apple"
    loaded = training.loaded("mps" if is_apple else "cuda")
    return list((production_code if code == "production" else memlab_code)(recipe, loaded))


def _table(options: list[Option], first: Option | None) -> Any:
    return terminal.table_of(
        {
            "recipe": [option.title for option in options],
            "allocated": [_bytes_of(option, "allocated_bytes") for option in options],
            "reserved": [_bytes_of(option, "reserved_bytes") for option in options],
            "left": [_left(option) for option in options],
            "time": [_time(option, first) for option in options],
            "batch up to": [_number(option.largest_batch, MAX_SEQUENCES) for option in options],
            "length up to": [_number(option.longest) for option in options],
        }
    )


def _bytes_of(option: Option, field: str) -> str:
    if option.measured is None:
        return f"≥ {format_bytes(option.fixed_bytes)}" if field == "allocated_bytes" else ""
    found = getattr(option.measured, field)
    return "" if found is None else format_bytes(found)


def _left(option: Option) -> str:
    if option.failure:
        return "failed"
    at_least = "" if option.measured else "≥ "
    missing = option.missing_bytes
    return format_bytes(-missing) if option.fits else f"lacks {at_least}{format_bytes(missing)}"


def _time(option: Option, first: Option | None) -> str:
    if option.seconds is None or first is None:
        return ""
    return f"{option.total_seconds / first.total_seconds:.2f} ×"


def _number(found: int | None, limit: int | None = None) -> str:
    return "" if found is None else f"{found:,}{'+' if found == limit else ''}"


def _remarks(training: Training, options: list[Option], first: Option | None) -> Iterator[str]:
    yield (
        "each row is the fastest recipe of its group that fits, or the smallest; groups train "
        "differently, so their times alone do not rank them"
    )
    if first is None and all(option.failure for option in options):
        yield "nothing could be predicted; the reasons are below"
    elif first is None:
        yield "nothing fits; use a shorter sequence, a smaller batch or a larger GPU"
    else:
        yield (
            f"time: estimated, relative to the first row that fits, whose time is "
            f"{shares(first.seconds or {})}"
        )
        if any(option.longest for option in options):
            yield (
                "batch up to, length up to: predicted to fit, each with the other as given; a "
                "slightly larger value may fit"
            )
        elif any(option.largest_batch for option in options):
            yield "batch up to: predicted to fit; a slightly larger batch may fit"
        if sum(option.fits for option in options) > 1:
            yield "the code is for the first row that fits; --full, --lora, --qlora choose another"
    if any(option.measured is None and not option.failure for option in options):
        yield "≥: weights, gradients and optimizer state alone, which already exceed the memory"
    # transformers 5 keeps experts in 3-D parameters: Mixtral-8x7B "in 4 bits" has 181 GiB allocated
    # in a step, gpt-oss-20b 82.
    others = 1 - linear_share(training.skeleton)
    if others > NOTABLE_SHARE and any(option.recipe.method == "qlora" for option in options):
        yield (
            f"4-bit weights: bitsandbytes quantizes linear layers alone; {others:.0%} of this "
            f"model's weights, such as experts and embeddings, are not, and peft's "
            f"prepare_model_for_kbit_training casts them to float32"
        )
    if any(option.empties_cache for option in options):
        yield EMPTIES_CACHE
    yield from dict.fromkeys(note for option in options for note in option.notes)
    for option in options:
        if option.failure:
            yield f"{option.title} failed: {option.failure}"


def _numbers(
    training: Training,
    groups: list[list[Recipe]],
    memory: Memory,
    target: str,
    options: list[Option],
    code: str,
) -> dict[str, Any]:
    """Return the plan's fields for JSON. The training as it is has the first recipe of all."""
    chosen = next((number for number, option in enumerate(options) if option.fits), None)
    as_it_is = options[0] if options[0].recipe == groups[0][0] else None
    return {
        **room_numbers(memory, target),
        "verdict": verdict(chosen is not None, as_it_is is not None and as_it_is.fits),
        "model": training.source.name,
        "library": "transformers",
        "parameters": training.parameters,
        "batch": training.size.batch,
        "seq_len": training.completed_size.seq_len,
        "bytes_as_it_is": as_it_is and as_it_is.needed_bytes,
        "chosen": chosen,
        "options": [_option_numbers(training, option, code, memory) for option in options],
        "notes": list(_notes(training, options)),
    }


def _option_numbers(
    training: Training, option: Option, code: str, memory: Memory
) -> dict[str, Any]:
    lines = _lines(training, option.recipe, code, memory) if option.fits else None
    return {**option.to_dict(), "code": lines}


def _notes(training: Training, options: list[Option]) -> Iterator[str]:
    """Yield what the predictions assumed."""
    yield f"{training.class_name}, {training.described}"
    yield from dict.fromkeys(note for option in options for note in option.notes)
