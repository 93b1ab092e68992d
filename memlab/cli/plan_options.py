"""The options that several plans read: a typo is reported before torch is imported."""

from dataclasses import replace

from memlab.cli.adapter_options import choose_adapters
from memlab.cli.errors import UsageError, quoted, require_known
from memlab.cli.requests import PlanRequest
from memlab.configs.targets import accepted_devices, find_target
from memlab.planner.cards import Memory, memory_named, with_margin
from memlab.planner.recipes import OPTIMIZERS, PRECISIONS, Recipe, usual_kinds


def choose_target(device: str | None) -> str | None:
    """Return the device to predict for as `memlab.predict` has it; None if none is given."""
    if device in (None, "cpu"):
        return device
    if (found := find_target(device)) is None:
        raise UsageError(f"got --device {quoted(device)}; {accepted_devices(device, 'cpu')}")
    return found.device


def choose_memory(
    given: str | None, device: str | None, margin: str | None = None
) -> tuple[Memory, str]:
    """Return the memory that the training has to fit into, and the kind of device, which depends
    on the GPU unless the user gives it."""
    if given is None:
        raise UsageError("got no --memory; give it as 24GB, 24GiB or a GPU's name, such as rtx4090")
    target = choose_target(device)
    try:
        memory = memory_named(given, target)
        if margin is not None:
            memory = with_margin(memory, margin, target or memory.target)
    except ValueError as error:
        raise UsageError(str(error)) from error
    return memory, target or memory.target


def choose_group(request: PlanRequest) -> str | None:
    """Return the group of recipes that the options ask for; None: all."""
    if request.qlora and request.lora is not None:
        raise UsageError("got --qlora together with --lora or --full; give one of them")
    if request.qlora:
        return "QLoRA"
    return {None: None, True: "LoRA", False: "full fine-tuning"}[request.lora]


def choose_kinds(request: PlanRequest, group: str | None) -> tuple[Recipe, ...]:
    """Return the kinds of training that the options allow. A combination that the options name
    need not be among the usual kinds."""
    precision, optimizer = request.precision, request.optimizer
    require_known("--precision", precision, PRECISIONS)
    require_known("--optimizer", optimizer, OPTIMIZERS)
    adapters = choose_adapters(request.lora_rank, request.lora_targets)
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
