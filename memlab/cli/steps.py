"""The steps of `memlab train`: their text, their losses and times, and the summary."""

import math
import statistics
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from memlab.cli import terminal
from memlab.cli.errors import UsageError
from memlab.cli.rows import Announce
from memlab.data import TOKENS
from memlab.train import RankTraining, Setting, Training

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
