"""The steps of `memlab train`: their text, their losses and times, and the summary."""

import math
import statistics
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import NamedTuple

import torch
from torch import Tensor

from memlab.cli import terminal
from memlab.cli.errors import UsageError
from memlab.cli.rows import Announce
from memlab.data import TOKENS
from memlab.train import RankTraining, Setting, Training
from memlab.units import format_bytes

TEXT = "4 MiB"
MAX_LINES = 20  # of step output

Batch = tuple[Tensor, Tensor]


def require_byte_vocabulary(setting: Setting) -> None:
    """Require a token for each of the 256 byte values of the text."""
    got = setting.config.vocab_size
    if got < TOKENS:
        raise UsageError(
            f"got a vocabulary of {got} tokens in {setting.model}; the training text needs "
            f"{TOKENS}, one per byte value: give a model with a vocab_size of at least {TOKENS}, "
            f"or use memlab measure, which needs no text"
        )


class StepResult(NamedTuple):
    """The loss and time of one step."""

    loss: float  # nats
    seconds: float


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


def timed_step(step: Callable[[], object], losses: list[Tensor]) -> StepResult:
    """Run one step, which appends its micro-batches' losses to `losses`."""
    losses.clear()
    started = time.perf_counter()
    step()
    if torch.accelerator.is_available():
        torch.accelerator.synchronize()
    seconds = time.perf_counter() - started
    return StepResult(statistics.fmean(map(float, losses)), seconds)


def peak(device: torch.device, measured_bytes: Callable[[], int]) -> str:
    """Return the peak from the accelerator's allocator so far, or of one more step, measured."""
    if device.type != "cpu":
        with suppress(RuntimeError):  # not every accelerator has these statistics
            allocated = torch.accelerator.max_memory_allocated()
            reserved = torch.accelerator.max_memory_reserved()
            return f"{format_bytes(allocated)} allocated, {format_bytes(reserved)} reserved"
    return f"{format_bytes(measured_bytes())}, measured in one more step"


def load_batch(training: Training | RankTraining, batch: Batch) -> None:
    """Copy the batch into the tensors that the training's next step reads."""
    for held, new in zip(training.batch, batch, strict=True):
        held.copy_(new)


def summary(
    taken: Sequence[StepResult], dtype: torch.dtype, peak: str, of: str = "in nats per token"
) -> str:
    """Return the loss, what it is of, the time and the peak, one line each."""
    seconds = [step.seconds for step in taken]
    typical = statistics.median(seconds[1:] or seconds)  # the first creates the optimizer state
    name = str(dtype).removeprefix("torch.")
    rounded = "" if dtype is torch.float32 else f", rounded to {name}"
    return (
        f"loss: {taken[0].loss:.4f} in the first step, {taken[-1].loss:.4f} in the last, "
        f"{of}{rounded}\n"
        f"time: {typical:.3g} s per step\n"
        f"peak: {peak}"
    )
