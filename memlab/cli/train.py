"""`memlab train`: real steps of a model with techniques, under a cap if there is one.

What `memlab plan` says fits, this takes. Each step has a new batch, so the loss is that of a
training and not of one batch learned by heart.
"""

import math
import statistics
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from memlab.cli import report, terminal
from memlab.cli.choices import (
    choose_device,
    choose_setting,
    choose_techniques,
    require_kernels,
    require_memory,
    taken_by_kernels,
)
from memlab.cli.errors import UsageError, is_out_of_memory, shown
from memlab.cli.requests import Request
from memlab.cli.rows import Announce
from memlab.data import TOKENS, batches, source_bytes
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
from memlab.units import format_bytes, parse_bytes

TEXT = "4 MiB"
LINES = 20  # of steps, at most

Batch = tuple[Tensor, Tensor]


def train(request: Request, *, steps: int, memory: str | None) -> None:
    """Take the steps and print their losses, then the peak and the seconds."""
    (technique,) = request.techniques
    chosen = choose_techniques(request)[technique]
    device = choose_device(request)
    if request.kernels:
        require_kernels(device)
    cap_bytes = choose_cap(memory, device)
    with terminal.progress(steps + 3) as announce:
        announce("does it fit?")
        # On a CPU the step's own bytes decide below whether it fits, with its technique.
        setting = choose_setting(replace(request, device=device, dry=device == "cpu"))
        _require_every_byte(setting)
        if device == "cpu":
            what, wanted = f"a step with {technique}", dry_trace(setting, chosen).peak_bytes
            require_memory(what, setting, wanted, "use memlab measure --dry-run")
        by_kernels = f"\n{taken_by_kernels([technique])}" if request.kernels else ""
        terminal.say(f"{report.headline(setting, dry=False)}\ntechnique: {technique}{by_kernels}\n")
        with capped(cap_bytes):
            try:
                summary = run(setting, chosen, steps, announce)
            except Exception as error:
                if not is_out_of_memory(error):
                    raise
                announce("what would it take?")
                lacking = why_it_ran_out(setting, chosen, cap_bytes)
                raise UsageError(
                    f"{technique} ran out of memory with {setting}; {lacking}"
                ) from error
    terminal.say(f"\n{summary}")
    if cap_bytes is not None:
        terminal.say(f"cap: {format_bytes(cap_bytes)} on what the allocator reserves")


def _require_every_byte(setting: Setting) -> None:
    """The text is bytes, and each of the 256 is a token."""
    got = setting.config.vocab_size
    if got < TOKENS:
        raise UsageError(
            f"got a vocabulary of {got} tokens in {setting.model}; the text that is trained on has "
            f"{TOKENS}, one for each byte: give a model with a vocab_size of at least that, or use "
            f"memlab measure, which needs no text"
        )


# ------------------------------------------------------------------ the steps


class Step(NamedTuple):
    """What is known of a step that was taken."""

    loss: float  # nats
    seconds: float


def run(setting: Setting, technique: Plugs, steps: int, announce: Announce) -> str:
    """Build, take the steps, print a line for every few; the summary of all."""
    announce("building")
    losses: list[Tensor] = []
    training = build(setting, technique, on_loss=losses.append)
    text = batches(source_bytes(TEXT), setting.batch, setting.seq_len, SEED)
    taken: list[Step] = []
    every = math.ceil(steps / LINES)
    for number in range(1, steps + 1):
        announce(f"step {number}")
        taken.append(step(training, next(text), losses))
        if number % every == 0 or number in (1, steps):
            terminal.say(f"step {number:>{len(str(steps))}}: loss {taken[-1].loss:.4f}")
    dtype = losses[0].dtype
    losses.clear()
    announce("peak")
    return summary(taken, dtype, peak(training, next(text)))


def step(training: Training, batch: Batch, losses: list[Tensor]) -> Step:
    """One step on the batch; `losses` is where the training puts those of its micro-batches."""
    read(training, batch)
    losses.clear()
    started = time.perf_counter()
    training.step()
    if torch.accelerator.is_available():
        torch.accelerator.synchronize()
    seconds = time.perf_counter() - started
    return Step(statistics.fmean(map(float, losses)), seconds)


def read(training: Training, batch: Batch) -> None:
    """Let the training's next step read this batch."""
    for held, new in zip(training.batch, batch, strict=True):
        held.copy_(new)


def summary(taken: Sequence[Step], dtype: torch.dtype, peak: str) -> str:
    """The loss, the time and the peak, a line each."""
    seconds = [step.seconds for step in taken]
    typical = statistics.median(seconds[1:] or seconds)  # the first makes the state
    name = str(dtype).removeprefix("torch.")
    rounded = "" if dtype is torch.float32 else f", rounded to {name}"
    return (
        f"loss: {taken[0].loss:.4f} in the first step, {taken[-1].loss:.4f} in the last, in nats "
        f"a token{rounded}\n"
        f"time: {typical:.3g} s a step\n"
        f"peak: {peak}"
    )


def peak(training: Training, batch: Batch) -> str:
    """What the accelerator's allocator counted until now; elsewhere, a metered step's peak."""
    if next(training.model.parameters()).device.type != "cpu":
        with suppress(RuntimeError):  # not every accelerator counts
            allocated = torch.accelerator.max_memory_allocated()
            reserved = torch.accelerator.max_memory_reserved()
            return f"{format_bytes(allocated)} allocated, {format_bytes(reserved)} reserved"
    read(training, batch)
    return f"{format_bytes(measured(training).peak_bytes)}, of one step more under the meter"


# ------------------------------------------------------------------ a cap, and memory that runs out


def choose_cap(memory: str | None, device: str) -> int | None:
    """Bytes that the process may reserve of the card."""
    if memory is None:
        return None
    if device != "cuda":
        raise UsageError(
            f"got --memory {shown(memory)} on the device {device}; only CUDA's allocator takes a "
            f"cap, so leave --memory out"
        )
    try:
        cap_bytes = parse_bytes(memory)
    except ValueError as error:
        raise UsageError(f"--memory: {error}") from error
    _, total_bytes = torch.cuda.mem_get_info()
    if not 0 < cap_bytes <= total_bytes:
        raise UsageError(
            f"got --memory {shown(memory)}; give more than nothing, and at most the card's "
            f"{format_bytes(total_bytes)}"
        )
    return cap_bytes


@contextmanager
def capped(cap_bytes: int | None) -> Iterator[None]:
    """Let CUDA's allocator reserve no more meanwhile: what a card of that size would give it."""
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


def why_it_ran_out(setting: Setting, technique: Plugs, cap_bytes: int | None) -> str:
    """What a step takes beside what there is, and what to do."""
    remedy = "give a smaller --batch or --seq, or another technique"
    if setting.device != "cuda":
        wanted = dry_trace(replace(setting, device="cpu"), technique).peak_bytes
        return f"its tensors take {format_bytes(wanted)}; {remedy}"
    limit = cap_bytes or torch.cuda.mem_get_info()[1]
    wanted = predicted_trace(setting, technique).allocated_bytes
    off = wanted - limit
    more_or_less = f"{format_bytes(abs(off))} {'more' if off > 0 else 'less'} than"
    torn = "" if off > 0 else ", but in pieces that find no room between others"
    return (
        f"it takes {format_bytes(wanted)}, {more_or_less} the {format_bytes(limit)} there are"
        f"{torn}; {remedy}"
    )
