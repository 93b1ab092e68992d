"""The monitor's messages: warnings with numbers and a remedy, and the report of an OOM."""

import os
from collections.abc import Sequence
from pathlib import Path

import torch

from memlab.allocator.settings import variable_set
from memlab.monitoring.reports import StepMemory, signed
from memlab.monitoring.trends import HARMLESS_STEPS, Fragmentation, Leak, steps_until_full
from memlab.units import format_bytes, plural

VARIABLE = "PYTORCH_CUDA_ALLOC_CONF"  # which every version of torch reads, on AMD GPUs as well


class MemoryWarning(UserWarning):
    """The base class of the monitor's warnings. By itself: the memory is nearly full."""


class LeakWarning(MemoryWarning):
    """The memory allocated after each step keeps growing."""


class FragmentationWarning(MemoryWarning):
    """The allocator reserves much more than tensors ever used, or had to empty its cache."""


def leak_text(leak: Leak, device: torch.device, counts: str, capacity_bytes: int | None) -> str:
    left = steps_until_full(leak, capacity_bytes)
    until = "" if left is None else f" The memory will be full in about {left:,} more steps."
    per_step = format_bytes(round(leak.bytes_per_step))
    return (
        f"The {counts} left after each step grew from {format_bytes(leak.from_bytes)} to "
        f"{format_bytes(leak.to_bytes)} on {device} in {leak.steps:,} steps, by {per_step} per "
        f"step.{until} Look for code that keeps tensors of earlier steps: a list of losses or "
        f"outputs (append `loss.item()`), a sum of losses (add `loss.detach()`), a metric or a "
        f"cache without a reset. If a buffer grows by design, ignore memlab.monitoring.LeakWarning."
    )


def is_harmless(leak: Leak, capacity_bytes: int | None) -> bool:
    left = steps_until_full(leak, capacity_bytes)
    return left is not None and left > HARMLESS_STEPS


def fragmentation_text(found: Fragmentation, device: torch.device) -> str:
    unused = format_bytes(found.unused_bytes)
    share = found.unused_bytes / max(1, found.reserved_bytes)
    retries = (
        f" It had to empty its cache {plural(found.retries, 'time')} to serve a request, which "
        f"stalls the step."
        if found.retries
        else ""
    )
    return (
        f"The allocator reserves {format_bytes(found.reserved_bytes)} on {device}, and tensors "
        f"used at most {format_bytes(found.peak_bytes)}. {unused} ({share:.0%}) are lost to "
        f"fragmentation.{retries} {_fragmentation_remedy()}"
    )


def _fragmentation_remedy() -> str:
    if torch.version.hip:
        return f"Set {VARIABLE}=garbage_collection_threshold:0.8,max_split_size_mb:512."
    name = variable_set()
    settings = os.environ[name] if name else ""
    if "expandable_segments:true" in settings.lower():
        return "Pad batches to a few fixed lengths: expandable segments are already on."
    return f"Set {VARIABLE}=expandable_segments:True before the program starts."


def retries_text(found: Fragmentation, device: torch.device) -> str:
    """Return the warning of retries without fragmentation."""
    return (
        f"The memory of {device} is full: tensors used up to {format_bytes(found.peak_bytes)} of "
        f"{format_bytes(found.reserved_bytes)} reserved. The allocator had to empty its cache "
        f"{plural(found.retries, 'time')}, and each time stalls the step. Use a smaller batch, or "
        f"`memlab plan` to see what saves memory."
    )


def nearly_full_text(
    step: int, peak_bytes: int, capacity_bytes: int, device: torch.device, snapshot: Path | None
) -> str:
    return (
        f"Step {step} used {format_bytes(peak_bytes)} at its peak, "
        f"{peak_bytes / capacity_bytes:.0%} of the {format_bytes(capacity_bytes)} that this "
        f"process can have on {device}.{'' if snapshot is None else f' Snapshot: {snapshot}'}"
    )


# ------------------------------------------------------------------ out of memory


def oom_text(
    device: torch.device, requested: str | None, recent: Sequence[StepMemory], run_peak_bytes: int
) -> str:
    """Return the failed request and the memory of the steps before it."""
    step = recent[-1].step + 1 if recent else 1
    lines = [f"memlab: out of memory in step {step} on {device}"]
    if requested is not None:
        lines.append(f"  requested   {requested} on the device")
    if not recent:
        lines.append("  No step has finished, so the model and one step do not fit.")
        return "\n".join(lines)
    last, first = recent[-1], recent[0]
    lines.append(
        f"  last step   peak {format_bytes(last.peak_bytes)}, {format_bytes(last.allocated_bytes)} "
        f"after it; the run's peak is {format_bytes(run_peak_bytes)}"
    )
    if last.reserved_bytes is not None:
        unused = max(0, last.reserved_bytes - last.peak_bytes)
        lines.append(
            f"  reserved    {format_bytes(last.reserved_bytes)}, {format_bytes(unused)} unused in "
            f"the last step"
        )
    if len(recent) > 1:
        growth = last.allocated_bytes - first.allocated_bytes
        lines.append(
            f"  growth      {signed(growth)} after the step, over the last "
            f"{plural(len(recent) - 1, 'step')}"
        )
    return "\n".join(lines)
