"""`memlab train`: run real steps of a model with techniques, optionally under a memory cap.

It runs the recipes that `memlab plan` finds. Each step gets a new batch, so the loss shows training
and not the memorization of one batch.
"""

import math
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from memlab.cli import report, terminal
from memlab.cli.adapter_options import choose_adapters, list_adapters
from memlab.cli.choices import (
    choose_device,
    choose_setting,
    choose_techniques,
    list_kernels,
    require_kernels,
    require_memory,
)
from memlab.cli.errors import UsageError, is_out_of_memory, quoted
from memlab.cli.models import choose_model
from memlab.cli.requests import Request
from memlab.cli.rows import Announce
from memlab.cli.torchrun import choose_rank
from memlab.data import TOKENS, batches, source_bytes
from memlab.train import (
    SEED,
    Plugs,
    RankTraining,
    Setting,
    Training,
    build,
    dry_trace,
    measured,
    predicted_trace,
)
from memlab.transformers_models.sources import Source
from memlab.units import format_bytes, parse_bytes

TEXT = "4 MiB"
MAX_LINES = 20  # of step output

Batch = tuple[Tensor, Tensor]


def train(request: Request, *, steps: int, memory: str | None) -> None:
    """Run the steps and print their losses, then the peak and the time."""
    rank = choose_rank(request)
    found = choose_model(request.model, request.library) if request.model else None
    if isinstance(found, Source):
        from memlab.cli.transformers_steps import train_transformers

        train_transformers(request, found, steps=steps, memory=memory)
    elif request.zero is not None:
        from memlab.cli.train_rank import train_rank

        train_rank(request, rank, steps=steps, memory=memory)
    else:
        _train(request, steps=steps, memory=memory)


def _train(request: Request, *, steps: int, memory: str | None) -> None:
    (technique,) = request.techniques
    chosen = choose_techniques(request)[technique]
    device = choose_device(request)
    if request.kernels:
        require_kernels(device)
    cap_bytes = choose_cap(memory, device)
    with terminal.progress(steps + 3) as announce:
        announce("checking memory")
        # A CPU step is checked below, with its technique, so skip the check of the plain step.
        setting = choose_setting(replace(request, device=device, dry=device == "cpu"))
        require_byte_vocabulary(setting)
        if device == "cpu":
            what, wanted = f"a step with {technique}", dry_trace(setting, chosen).peak_bytes
            require_memory(what, setting, wanted, "use memlab measure --dry-run")
        by_kernels = f"\n{list_kernels([technique])}" if request.kernels else ""
        adapters = choose_adapters(request.lora_rank, request.lora_targets)
        with_adapters = f"\n{line}" if (line := list_adapters([technique], adapters)) else ""
        terminal.echo(
            f"{report.headline(setting, dry=False)}\ntechnique: {technique}{by_kernels}"
            f"{with_adapters}\n"
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


def require_byte_vocabulary(setting: Setting) -> None:
    """Require a token for each of the 256 byte values of the text."""
    got = setting.config.vocab_size
    if got < TOKENS:
        raise UsageError(
            f"got a vocabulary of {got} tokens in {setting.model}; the training text needs "
            f"{TOKENS}, one per byte value: give a model with a vocab_size of at least {TOKENS}, "
            f"or use memlab measure, which needs no text"
        )


# ------------------------------------------------------------------ the steps


class StepResult(NamedTuple):
    """The loss and time of one step."""

    loss: float  # nats
    seconds: float


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
    return summary(taken, dtype, peak(training, next(text)))


def run_steps(
    run_step: Callable[[], StepResult], steps: int, announce: Announce
) -> list[StepResult]:
    """Run the steps and print the losses of some of them, the first and the last included."""
    taken: list[StepResult] = []
    every = math.ceil(steps / MAX_LINES)
    for number in range(1, steps + 1):
        announce(f"step {number}")
        taken.append(run_step())
        if number % every == 0 or number in (1, steps):
            terminal.echo(f"step {number:>{len(str(steps))}}: loss {taken[-1].loss:.4f}")
    return taken


def step(training: Training, batch: Batch, losses: list[Tensor]) -> StepResult:
    """Run one step on the batch. The training appends its micro-batches' losses to `losses`."""
    load_batch(training, batch)
    losses.clear()
    started = time.perf_counter()
    training.step()
    if torch.accelerator.is_available():
        torch.accelerator.synchronize()
    seconds = time.perf_counter() - started
    return StepResult(statistics.fmean(map(float, losses)), seconds)


def load_batch(training: Training | RankTraining, batch: Batch) -> None:
    """Copy the batch into the tensors that the training's next step reads."""
    for held, new in zip(training.batch, batch, strict=True):
        held.copy_(new)


def summary(taken: Sequence[StepResult], dtype: torch.dtype, peak: str) -> str:
    """Return the loss, the time and the peak, one line each."""
    seconds = [step.seconds for step in taken]
    typical = statistics.median(seconds[1:] or seconds)  # the first creates the optimizer state
    name = str(dtype).removeprefix("torch.")
    rounded = "" if dtype is torch.float32 else f", rounded to {name}"
    return (
        f"loss: {taken[0].loss:.4f} in the first step, {taken[-1].loss:.4f} in the last, in nats "
        f"per token{rounded}\n"
        f"time: {typical:.3g} s per step\n"
        f"peak: {peak}"
    )


def peak(training: Training, batch: Batch) -> str:
    """Return the peak from the accelerator's allocator so far, or of one metered CPU step."""
    if next(training.model.parameters()).device.type != "cpu":
        with suppress(RuntimeError):  # not every accelerator has these statistics
            allocated = torch.accelerator.max_memory_allocated()
            reserved = torch.accelerator.max_memory_reserved()
            return f"{format_bytes(allocated)} allocated, {format_bytes(reserved)} reserved"
    load_batch(training, batch)
    return f"{format_bytes(measured(training).peak_bytes)}, measured in one more step"


# ------------------------------------------------------------------ memory cap and out of memory


def choose_cap(memory: str | None, device: str) -> int | None:
    """Return the bytes that the process may reserve on the GPU."""
    if memory is None:
        return None
    if device != "cuda":
        raise UsageError(
            f"got --memory {quoted(memory)} on the device {device}; only CUDA's allocator can be "
            f"capped, so leave --memory out"
        )
    try:
        cap_bytes = parse_bytes(memory)
    except ValueError as error:
        raise UsageError(f"--memory: {error}") from error
    _, total_bytes = torch.cuda.mem_get_info()
    if not 0 < cap_bytes <= total_bytes:
        raise UsageError(
            f"got --memory {quoted(memory)}; give more than 0 bytes, and at most the GPU's "
            f"{format_bytes(total_bytes)}"
        )
    return cap_bytes


@contextmanager
def memory_cap(cap_bytes: int | None) -> Iterator[None]:
    """Limit what CUDA's allocator may reserve, to act like a smaller GPU."""
    if cap_bytes is None:
        yield
        return
    _, total_bytes = torch.cuda.mem_get_info()
    # torch rounds the bytes down.
    fraction = min(1.0, math.nextafter(cap_bytes / total_bytes, 1.0))
    torch.cuda.set_per_process_memory_fraction(fraction)
    try:
        yield
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)


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
