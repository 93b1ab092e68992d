"""Does it fit? timm's models on an RTX 3090, with the largest batch that trained and the next one.

benchmarks/evidence/timm.json has the batches. A verdict is "fits" if the most that the step may
reserve is within the card after the largest CUDA context, "does not fit" if the allocator cannot
serve the step after the smallest one even when it releases what is free, else "may fit".
"""

import json
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn

import memlab
from memlab.allocator.capacity import needed_bytes
from memlab.configs.gpus import CONTEXT_BYTES, GPUS

from .measurements import EVIDENCE
from .predictions import WORKERS, importing
from .xmem import torchvision

CARD = "rtx3090"
PACKAGES = "torchvision timm-0.6.13"
FITS, MAY_FIT, DOES_NOT_FIT = "fits", "may fit", "does not fit"


class Judged(NamedTuple):
    """One batch of a model, and what was predicted for it."""

    model: str
    batch: int
    ran: bool
    allocated_bytes: int
    reserved_bytes: int
    verdict: str

    @property
    def is_wrong(self) -> bool:
        return self.verdict == (DOES_NOT_FIT if self.ran else FITS)


def batches() -> list[tuple[str, int, int, bool]]:
    """Return (model, pixels, batch, whether it ran) of each batch that timm tried."""
    models = json.loads((EVIDENCE / "timm.json").read_text(encoding="utf-8"))["models"]
    return [
        (of["model"], of["pixels"], of[key], key == "ran")
        for of in models
        for key in ("ran", "ran_out")
    ]


def verdicts(chosen: Sequence[tuple[str, int, int, bool]]) -> Iterator[Judged]:
    """Judge each batch, in processes that import timm as it was."""
    with importing(PACKAGES, WORKERS) as processes:
        yield from processes.map(judged, chosen)


def judged(tried: tuple[str, int, int, bool]) -> Judged:
    model, pixels, batch, ran = tried
    trace = memlab.predict(lambda: build(model, pixels, batch), device=f"cuda:{CARD}")
    memory, reserved = trace.memory, trace.memory.reserved_peak_bytes or 0
    most_left, least_left = (GPUS[CARD].total_bytes - context for context in CONTEXT_BYTES)
    if (memory.reserved_most_bytes or reserved) <= least_left:
        verdict = FITS
    else:
        verdict = MAY_FIT if needed_bytes(trace, most_left) <= most_left else DOES_NOT_FIT
    return Judged(model, batch, ran, memory.allocated_peak_bytes or 0, reserved, verdict)


def build(name: str, pixels: int, batch: int) -> tuple[Callable[[], None], nn.Module, Any]:
    """Return (step, model, optimizer) as timm's benchmark trains a model."""
    torchvision()
    import timm

    model = timm.create_model(name).cuda().train()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4, momentum=0.9, nesterov=True)
    images, loss = torch.randn(batch, 3, pixels, pixels, device="cuda"), nn.CrossEntropyLoss()

    def step() -> None:
        optimizer.zero_grad()
        with torch.autocast("cuda", torch.float16):
            out = model(images)
            out = out[0] if isinstance(out, tuple) else out
            labels = torch.empty(batch, device="cuda", dtype=torch.int64).random_(1000)
            loss(out, labels).backward()
        optimizer.step()

    return step, model, optimizer
