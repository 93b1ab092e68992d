"""`memlab plan`: which recipe fits a model into a memory, measured, and at what cost.

What was asked is judged without torch, so that a slip is answered at once.
"""

import os
from dataclasses import replace

from memlab.cli import terminal
from memlab.cli.errors import UsageError, choice, shown
from memlab.cli.parsing import choose_folder
from memlab.configs.config_json import config_named
from memlab.configs.shapes import PRESETS
from memlab.configs.targets import TARGETS
from memlab.planner.cards import Memory, memory_named
from memlab.planner.recipes import OPTIMIZERS, PRECISIONS, Recipe, usual_kinds

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
    folder = choose_folder(out)
    try:
        config = config_named(model)
    except ValueError as error:
        raise UsageError(str(error)) from error
    learned = choose_kinds(precision, optimizer, lora)
    from memlab.cli.choices import require_countable
    from memlab.cli.plan_report import show
    from memlab.cli.results import write_plan
    from memlab.planner.search import USUAL_SEQ_LEN, plan

    try:
        require_countable(config, batch, min(seq_len or USUAL_SEQ_LEN, config.seq_len))
        with terminal.progress(count + 2) as announce:
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
        for each in usual_kinds()
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
