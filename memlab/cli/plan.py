"""`memlab plan`: find recipes that make a model's training fit, and their cost.

The options are checked without importing torch, so that a typo is reported at once.
"""

import os
from dataclasses import replace

from memlab.cli import terminal
from memlab.cli.adapter_options import choose_adapters
from memlab.cli.errors import UsageError, quoted, suggestions
from memlab.cli.models import choose_model
from memlab.cli.parsing import choose_folder
from memlab.configs.shapes import PRESETS
from memlab.configs.targets import accepted_devices, find_target
from memlab.planner.cards import Memory, memory_named, with_margin
from memlab.planner.processes import ProcessEndedError
from memlab.planner.recipes import OPTIMIZERS, PRECISIONS, USUAL_ADAPTERS, Recipe, usual_kinds
from memlab.train.adapters import Adapters
from memlab.transformers_models.sources import Source

MAX_WORKERS = 4  # each imports torch, which takes seconds and about 300 MiB


def plan_model(
    *,
    model: str | None,
    memory: str | None,
    gpus: int,
    batch: int,
    seq_len: int | None,
    precision: str | None,
    optimizer: str | None,
    group: str | None,
    lora_rank: int | None,
    lora_targets: str | None,
    library: str | None,
    image: int | None,
    code: str | None,
    count: int,
    target: str | None,
    margin: str | None,
    out: str,
) -> int:
    """Search, print what fits, write a picture and results; return 1 if nothing fits, else 0."""
    if model is None:
        raise UsageError(
            f"got no --model; give one of {', '.join(PRESETS)}, a config.json, or --script"
        )
    gpu_memory, target = choose_memory(memory, target, margin)
    folder = choose_folder(out)
    config = choose_model(model, library)
    if isinstance(config, Source):
        from memlab.cli.plan_transformers import CODE, choose_recipes, plan_transformers
        from memlab.transformers_models.tasks import Size
        from memlab.transformers_models.training import Training

        if gpus != 1:
            raise UsageError(
                f"got --gpus for {model}, a model of transformers; it is planned for one GPU: "
                f"leave it out"
            )
        if target == "cpu":
            raise UsageError(
                f"got --device cpu for {model}, a model of transformers, which is planned for a "
                f"GPU; memlab measure --model {model} --dry-run counts a step on the CPU"
            )
        if code not in (None, *CODE):
            raise UsageError(f"got --code {quoted(code)}; {suggestions(code, CODE)}")
        training = Training(config, Size(batch, seq_len, image))
        choice = choose_recipes(training, precision, optimizer, group, lora_rank, lora_targets)
        return plan_transformers(training, choice, gpu_memory, target, out, code or CODE[0])
    if image is not None:
        raise UsageError(f"got --image {image}; {model} takes no images")
    if code is not None:
        raise UsageError(
            f"got --code {quoted(code)} for {model}, which memlab trains itself: leave it out, or "
            f"add --library transformers"
        )
    chosen = (precision, optimizer, group, lora_rank, lora_targets)
    if gpus > 1 and target.startswith("cuda") and all(each is None for each in chosen):
        from memlab.cli.plan_meshes import plan_meshes
        from memlab.planner.meshes import why_no_llama

        if why_no_llama(config) is None:
            seq_len = choose_seq_len(seq_len, config.seq_len, model)
            return plan_meshes(
                config, model, gpu_memory, target, gpus, batch, seq_len, count=count, folder=folder
            )
    learned = choose_kinds(precision, optimizer, group, choose_adapters(lora_rank, lora_targets))
    from memlab.cli.choices import require_countable
    from memlab.cli.plan_report import show
    from memlab.cli.results import write_plan
    from memlab.planner.search import USUAL_SEQ_LEN, plan

    try:
        require_countable(config, batch, min(seq_len or USUAL_SEQ_LEN, config.seq_len))
        with terminal.progress(count + 2) as announce:
            found = plan(
                model,
                gpu_memory,
                gpus=gpus,
                batch=batch,
                seq_len=seq_len,
                learned=learned,
                count=count,
                workers=min(MAX_WORKERS, os.cpu_count() or 1),
                target=target,
                announce=announce,
            )
    except (ValueError, ProcessEndedError) as error:
        raise UsageError(str(error)) from error
    show(found)
    write_plan(found, folder)
    return 0 if found.best else 1


def choose_seq_len(given: int | None, longest: int, model: str) -> int:
    """Return the tokens of a sequence, by default the usual number, at most the model's longest."""
    from memlab.planner.search import USUAL_SEQ_LEN

    seq_len = min(USUAL_SEQ_LEN, longest) if given is None else given
    if seq_len > longest:
        raise UsageError(f"got sequences of {seq_len} tokens; {model} takes 1 to {longest}")
    return seq_len


def choose_memory(
    given: str | None, target: str | None, margin: str | None = None
) -> tuple[Memory, str]:
    """Return the memory that the training has to fit into, and the kind of device, which depends
    on the GPU unless the user gives it."""
    if given is None:
        raise UsageError("got no --memory; give it as 24GB, 24GiB or a GPU's name, such as rtx4090")
    if target not in (None, "cpu"):
        if (found := find_target(target)) is None:
            raise UsageError(f"got --device {quoted(target)}; {accepted_devices(target, 'cpu')}")
        target = found.device
    try:
        memory = memory_named(given, target)
        target = target or memory.target
        if margin is not None:
            memory = with_margin(memory, margin, target)
    except ValueError as error:
        raise UsageError(str(error)) from error
    return memory, target


def choose_kinds(
    precision: str | None,
    optimizer: str | None,
    group: str | None = None,
    adapters: Adapters = USUAL_ADAPTERS,
) -> tuple[Recipe, ...]:
    """Return the kinds of training that the options allow. A combination that the options name
    need not be among the usual kinds."""
    for option, got, known in (
        ("--precision", precision, PRECISIONS),
        ("--optimizer", optimizer, OPTIMIZERS),
    ):
        if got is not None and got not in known:
            raise UsageError(f"got {option} {quoted(got)}; {suggestions(got, known)}")
    kinds = [
        replace(each, adapters=adapters) if each.has_adapters else each
        for each in usual_kinds()
        if precision in (None, each.precision)
        and optimizer in (None, each.optimizer)
        and group in (None, each.group)
    ]
    if kinds:
        return tuple(kinds)
    try:
        return (
            replace(
                Recipe(),
                precision=precision or "bfloat16",
                optimizer=optimizer or "adamw",
                lora=group == "LoRA",
                qlora=group == "QLoRA",
                adapters=adapters,
            ),
        )
    except ValueError as error:
        raise UsageError(str(error)) from error
