"""`memlab train`: run real steps of a model with techniques, optionally under a memory cap.

It runs the recipes that `memlab plan` finds. Each step gets a new batch, so the loss shows training
and not the memorization of one batch.
"""

from dataclasses import replace

import torch
from torch import Tensor

from memlab.cli import report, terminal
from memlab.cli.adapter_options import choose_adapters, list_adapters
from memlab.cli.choices import (
    choose_device,
    choose_setting,
    choose_techniques,
    require_memory,
)
from memlab.cli.errors import UsageError, is_out_of_memory
from memlab.cli.memory_cap import choose_cap, memory_cap
from memlab.cli.models import choose_model
from memlab.cli.requests import TrainRequest
from memlab.cli.rows import Announce
from memlab.cli.steps import (
    TEXT,
    Batch,
    StepResult,
    load_batch,
    peak,
    require_byte_vocabulary,
    run_steps,
    summary,
    timed_step,
)
from memlab.cli.torchrun import choose_rank
from memlab.data import batches, source_bytes
from memlab.train import (
    SEED,
    Plugs,
    Setting,
    Training,
    build,
    dry_trace,
    measured,
    predicted_trace,
)
from memlab.transformers_models.sources import Source
from memlab.units import format_bytes


def train(request: TrainRequest) -> None:
    """Run the steps and print their losses, then the peak and the time."""
    rank = choose_rank(request)
    found = choose_model(request.model, request.library) if request.model else None
    if isinstance(found, Source):
        from memlab.cli.transformers_steps import train_transformers

        train_transformers(replace(request, device=choose_device(request)), found)
    elif request.zero is not None:
        from memlab.cli.train_rank import train_rank

        assert rank is not None
        train_rank(request, rank)
    else:
        _train(request)


def _train(request: TrainRequest) -> None:
    technique, steps = request.technique, request.steps
    chosen = choose_techniques(request)[technique]
    device = choose_device(request)
    cap_bytes = choose_cap(request.memory, device)
    with terminal.progress(steps + 3) as announce:
        announce("checking memory")
        # A CPU step is checked below, with its technique, so skip the check of the plain step.
        setting = choose_setting(replace(request, device=device, dry=device == "cpu"))
        require_byte_vocabulary(setting)
        if device == "cpu":
            what, wanted = f"a step with {technique}", dry_trace(setting, chosen).peak_bytes
            require_memory(what, setting, wanted, "use memlab measure --dry-run")
        adapters = choose_adapters(request.lora_rank, request.lora_targets)
        with_adapters = f"\n{line}" if (line := list_adapters([technique], adapters)) else ""
        terminal.echo(
            f"{report.headline(setting, dry=False)}\ntechnique: {technique}{with_adapters}\n"
        )
        with memory_cap(cap_bytes):
            try:
                summary = run(setting, chosen, steps, announce)
            except Exception as error:
                if not is_out_of_memory(error):
                    raise
                announce("finding the memory needed")
                lacking = out_of_memory_advice(setting, chosen, cap_bytes)
                raise UsageError(
                    f"{technique} ran out of memory with {setting}; {lacking}"
                ) from error
    terminal.echo(f"\n{summary}")
    if cap_bytes is not None:
        terminal.echo(f"cap: {format_bytes(cap_bytes)} of reserved memory")


def run(setting: Setting, technique: Plugs, steps: int, announce: Announce) -> str:
    """Build the training, run the steps, print some of them, and return the summary."""
    announce("building")
    losses: list[Tensor] = []
    training = build(setting, technique, on_loss=losses.append)
    text = batches(source_bytes(TEXT), setting.batch, setting.seq_len, SEED)
    taken = run_steps(lambda: step(training, next(text), losses), steps, announce)
    dtype = losses[0].dtype
    losses.clear()
    announce("peak")

    def measured_bytes() -> int:
        load_batch(training, next(text))
        return measured(training).peak_bytes

    return summary(taken, dtype, peak(torch.device(setting.device), measured_bytes))


def step(training: Training, batch: Batch, losses: list[Tensor]) -> StepResult:
    """Run one step on the batch. The training appends its micro-batches' losses to `losses`."""
    load_batch(training, batch)
    return timed_step(training.step, losses)


def out_of_memory_advice(setting: Setting, technique: Plugs, cap_bytes: int | None) -> str:
    """Say how much a step needs and what to do."""
    remedy = "give a smaller --batch or --seq, or another technique"
    if setting.device != "cuda":
        wanted = dry_trace(replace(setting, device="cpu"), technique).peak_bytes
        return f"its tensors need {format_bytes(wanted)}; {remedy}"
    limit = cap_bytes or torch.cuda.mem_get_info()[1]
    wanted = predicted_trace(setting, technique).allocated_bytes
    off = wanted - limit
    more_or_less = f"{format_bytes(abs(off))} {'more' if off > 0 else 'less'} than"
    fragmented = "" if off > 0 else ", but fragmentation leaves no block large enough"
    return (
        f"it needs {format_bytes(wanted)}, {more_or_less} the {format_bytes(limit)} available"
        f"{fragmented}; {remedy}"
    )
