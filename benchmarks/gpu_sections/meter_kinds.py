"""Kinds of step to measure on a GPU: kinds of the tests, and some configurations."""

from collections.abc import Callable
from itertools import accumulate
from typing import Any

import torch
from common import kinds_of_steps

import memlab
from memlab.trace import Trace

from .configurations import CONFIGURATIONS, Built, Size

# Kinds of tests/metering/kinds.py that create everything before the step, and so on the GPU.
OF_THE_TESTS = (
    *("mlp", "mlp_pure_bfloat16", "convolutions", "autoencoder", "unet", "lstm", "recommender"),
    *("fan_out", "tied_weights", "residual_with_dropout", "hooks", "transformer_encoder"),
    *("gpt_sdpa", "gpt_eager", "gpt_pure_bfloat16", "gpt_checkpointed"),
    *("gpt_checkpointed_reentrant", "gpt_accumulates_three_micro_batches"),
    *("gpt_clips_and_schedules", "gpt_steps_in_backward", "gpt_evaluated"),
    *("adamw_loop", "adamw_foreach", "adamw_fused", "sgd_momentum", "handwritten_adam"),
)
OF_THE_CONFIGURATIONS = (
    "sdpa auto, causal, 64, bf16",
    "sdpa efficient, masked, 64, bf16",
    "convolutions, channels last, autocast bf16",
    "LSTM",
    "autocast bf16, checkpointed",
    "autocast float16, GradScaler, clipped",
    "batch copied from the CPU each step",
    "batch copied on a side stream",
    "inference mode, autocast bf16",
)
NAMES = (*OF_THE_TESTS, *OF_THE_CONFIGURATIONS)


def builder(name: str, size: Size) -> Callable[[], Built]:
    """Return a builder of the kind on the GPU; kinds of the tests keep their small size."""

    def build() -> Built:
        if name in CONFIGURATIONS:
            return CONFIGURATIONS[name].build(size, "cuda")
        with torch.device("cuda"):
            return kinds_of_steps().KINDS[name]()

    return build


def measured(build: Callable[[], Built]) -> dict[str, Any]:
    """Take a second step without the meter, then measure a third."""
    step, model, optimizer = build()
    step()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    step()
    torch.cuda.synchronize()
    stats = torch.cuda.memory_stats()
    trace = memlab.measure(step, model=model, optimizer=optimizer)
    return {
        **figures(trace),
        "unwatched_allocated_bytes": stats["allocated_bytes.all.peak"],
        "unwatched_requested_bytes": stats["requested_bytes.all.peak"],
    }


def rehearsed(build: Callable[[], Built]) -> dict[str, Any]:
    """Return a prediction as if it were the measurement."""
    found = figures(memlab.predict(build))
    return {
        **found,
        "device_peak_bytes": found["peak_bytes"],
        "unwatched_allocated_bytes": found["peak_bytes"],
        "unwatched_requested_bytes": found["requested_bytes"],
    }


def figures(trace: Trace) -> dict[str, Any]:
    requested = (event.bytes for event in trace.events if event.category != "rounding")
    return {
        "peak_bytes": trace.peak_bytes,
        "requested_bytes": max(accumulate(requested), default=0),
        "peak_in": trace.peak_phase,
        "at_peak": trace.at_peak,
        "device_peak_bytes": trace.memory.allocated_peak_bytes,
        "reserved_bytes": trace.memory.reserved_peak_bytes,
        "events": len(trace.events),
        "unattributed": at_peak(trace, "unattributed"),
        "workspaces": at_peak(trace, "workspace"),
        "notes": list(trace.notes),
    }


def at_peak(trace: Trace, category: str) -> dict[str, int]:
    """Return the bytes of a category at the peak, by the operator that allocated them."""
    found: dict[str, int] = {}
    for event in trace.alive(trace.peak_position):
        if event.category == category:
            found[event.operator] = found.get(event.operator, 0) + event.bytes
    return found
