"""Optimizers of 8 bits beside bitsandbytes' own kernels: codes, bytes, time, and heavy tails."""

import contextlib
import importlib
import importlib.util
import io
import logging
import statistics
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from memlab.cli.rows import time_in_turn
from memlab.optim import Adam8bit, Lion8bit

Answer = dict[str, Any]

LR = 1e-3
STEPS = 100
SPREADS = (1, 2, 3)  # of the logarithms of the gradients' scales
SIZES = {False: (2**20, 2**26), True: (2**13, 2**14)}  # weights followed, and timed; small or not
NO_PEER = "bitsandbytes is not installed: pip install bitsandbytes, or carry its wheel there"


@dataclass(frozen=True)
class Pair:
    """An optimizer of ours, bitsandbytes' of its rule, and the codes of the moments in both."""

    ours: Callable[..., torch.optim.Optimizer]
    theirs: str
    codes: dict[str, str]


PAIRS = {
    "Adam8bit": Pair(
        Adam8bit, "Adam8bit", {"exp_avg_codes": "state1", "exp_avg_sq_codes": "state2"}
    ),
    "Lion8bit": Pair(Lion8bit, "Lion8bit", {"exp_avg_codes": "state1"}),
}


def beside_bitsandbytes(name: str, small: bool, rehearsal: bool) -> Answer:
    """All that is known of one pair; a rehearsal asks bitsandbytes' CPU kernels."""
    if importlib.util.find_spec("bitsandbytes") is None:
        return {"failure": NO_PEER}
    followed, timed = SIZES[small or rehearsal]
    device, pair = "cpu" if rehearsal else "cuda", PAIRS[name]
    both = {"memlab": pair.ours, "bitsandbytes": _of_bitsandbytes(pair.theirs)}
    found: Answer = {
        "what": f"{name}, {followed:,} weights followed and {timed:,} timed",
        **_codes_apart(pair, both, followed, device),
    }
    for who, made in both.items():
        for spread in SPREADS:
            longest = _longest_step(made, followed, device, spread)
            found[f"{who}, longest step over lr, σ = {spread}"] = longest
        found[f"{who}, state_bytes"], found[f"{who}, on the way_bytes"] = _bytes(
            made, timed, device
        )
    found["time over bitsandbytes'"] = _time_ratio(both, timed, device)
    return found


def _of_bitsandbytes(name: str) -> Callable[..., torch.optim.Optimizer]:
    logging.disable(logging.WARNING)  # of kernels that it looks for and does without
    try:
        with contextlib.redirect_stderr(io.StringIO()):
            return getattr(importlib.import_module("bitsandbytes.optim"), name)
    finally:
        logging.disable(logging.NOTSET)


def _gradients(count: int, device: str, spread: float = 0.0) -> Callable[[], Tensor]:
    """Gaussian, their scales log-normal; the same for everybody."""
    generator = torch.Generator(device).manual_seed(0)
    draw = partial(torch.randn, count, generator=generator, device=device)
    scales = torch.exp(spread * draw())
    return lambda: draw() * scales


def _started(made: Callable[..., torch.optim.Optimizer], count: int, device: str) -> Any:
    weight = nn.Parameter(torch.zeros(count, device=device))
    return weight, made([weight], lr=LR, weight_decay=0.0)


def _codes_apart(
    pair: Pair, both: dict[str, Callable[..., Any]], count: int, device: str
) -> Answer:
    """The share of codes that differ after one step from the same start, and after many."""
    states = {}
    for who, made in both.items():
        weight, optimizer = _started(made, count, device)
        gradient = _gradients(count, device)
        for step in range(1, STEPS + 1):
            weight.grad = gradient()
            optimizer.step()
            if step in (1, STEPS):
                kept = optimizer.state[weight]
                names = pair.codes if who == "memlab" else pair.codes.values()
                states[who, step] = [kept[name].flatten().clone() for name in names]
    found = {}
    for step in (1, STEPS):
        ours, theirs = states["memlab", step], states["bitsandbytes", step]
        for name, our, their in zip(pair.codes, ours, theirs, strict=True):
            share = (our != their).double().mean().item()
            found[f"{name} that differ after {step} step{'s' * (step > 1)}"] = share
    return found


def _longest_step(
    made: Callable[..., torch.optim.Optimizer], count: int, device: str, spread: float
) -> float:
    weight, optimizer = _started(made, count, device)
    gradient, longest = _gradients(count, device, spread), 0.0
    for _ in range(STEPS):
        weight.grad = gradient()
        before = weight.detach().clone()
        optimizer.step()
        longest = max(longest, (weight.detach() - before).abs().max().item() / LR)
    return longest


def _bytes(
    made: Callable[..., torch.optim.Optimizer], count: int, device: str
) -> tuple[int, int | None]:
    """Of the state, as unique storages; and what a step allocates beyond what is there."""
    weight, optimizer = _started(made, count, device)
    weight.grad = _gradients(count, device)()
    optimizer.step()
    tensors = [kept for kept in optimizer.state[weight].values() if isinstance(kept, Tensor)]
    storages = {t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in tensors}
    if device == "cpu":
        return sum(storages.values()), None
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    optimizer.step()
    return sum(storages.values()), torch.cuda.max_memory_allocated() - before


def _time_ratio(both: dict[str, Callable[..., Any]], count: int, device: str) -> float:
    steps = []
    for made in both.values():
        weight, optimizer = _started(made, count, device)
        weight.grad = _gradients(count, device)()
        for _ in range(3):
            optimizer.step()
        steps.append(optimizer.step)
    return statistics.median(ours / theirs for ours, theirs in time_in_turn(*steps))
