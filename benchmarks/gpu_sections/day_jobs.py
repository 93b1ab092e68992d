"""Jobs for the figures of the course's days: measured in their own process, or predicted."""

import gc
import statistics
from collections.abc import Callable
from dataclasses import asdict, replace
from functools import partial
from typing import Any

import torch

import memlab
from memlab.allocator import simulate
from memlab.cli.rows import time_in_turn
from memlab.data import batches, source_bytes
from memlab.model import GPT, PRESETS
from memlab.trace import Trace
from memlab.train import Setting, build, combined

Answer = dict[str, Any]
Task = Callable[[str, bool, bool], Answer]  # task(name, small, rehearsal)
FOUR_LENGTHS = 448, 512, 640, 576  # sequence lengths of Day 2's batches
BILL, SMALL_BILL = Setting("124m", batch=8, seq_len=640), Setting("tiny", batch=2, seq_len=32)

# What each day compares: the same training step with several techniques.
SIDE_BY_SIDE: dict[str, dict[str, str]] = {
    "day 3": {"all at once": "plain", "one at a time": "accumulation"},
    "day 4": {
        "float32": "accumulation",
        "autocast": "accumulation+autocast",
        "bfloat16": "accumulation+bfloat16",
    },
    "day 5": {
        "no checkpointing": "plain",
        "every block": "checkpointing",
        "segments of √L": "sqrt-checkpointing",
    },
    "day 6": {
        "every block": "checkpointing",
        "matmuls and attention kept": "selective-checkpointing",
    },
    "day 7": {
        "exact activations": "plain",
        "8-bit activations": "int8-activations",
        "checkpointing": "checkpointing",
        "checkpointing, 8-bit inputs": "checkpointing+int8-activations",
    },
    "day 8": {
        "AdamW": "plain",
        "Adam-mini": "adam-mini",
        "Lion": "lion",
        "AdamW, step in backward": "step-in-backward",
    },
    "day 9": {"AdamW": "plain", "Adam8bit": "adam8bit", "Lion8bit": "lion8bit"},
    "day 10": {
        "score matrix": "eager-attention",
        "torch's attention": "plain",
        "memlab's tiles": "flash-attention",
    },
    "day 11": {
        "all logits": "plain",
        "chunked loss": "chunked-loss",
        "chunked loss, checkpointing": "checkpointing+chunked-loss",
    },
    "day 17": {
        "all weights": "plain",
        "LoRA": "lora",
        "QLoRA": "qlora",
        "QLoRA, checkpointing": "checkpointing+qlora",
    },
}

# Techniques timed against the plain step on an otherwise idle GPU.
TIMED = (
    *("autocast", "loss-scaling", "bfloat16", "master-weights"),
    *("checkpointing", "sqrt-checkpointing", "selective-checkpointing", "checkpointing+autocast"),
    *("int8-activations", "adam8bit", "lion8bit", "adam-mini", "step-in-backward"),
    *("eager-attention", "flash-attention", "chunked-loss"),
)

# What a loop may call after each step, timed against the step alone (rule 6a).
CLEARING: dict[str, Callable[[], object]] = {
    "empty_cache": torch.cuda.empty_cache,
    "gc.collect": gc.collect,
}


def first_day(_: str, small: bool, rehearsal: bool) -> Answer:
    """Measure the step of Day 1's lesson."""
    setting, trace = _step("plain", small, rehearsal)
    return {
        "what": str(setting),
        "peak_bytes": trace.peak_bytes,
        "peak_in": trace.peak_phase,
        **{f"{category}_bytes": count for category, count in trace.at_peak.items()},
        **{name: count for name, count in asdict(trace.memory).items() if count is not None},
    }


def one_of_several(technique: str, small: bool, rehearsal: bool) -> Answer:
    """Return the allocated and reserved peaks of the step with a technique."""
    setting, trace = _step(technique, small, rehearsal)
    return {
        "what": str(setting),
        "peak_bytes": trace.peak_bytes,
        "reserved_bytes": trace.reserved_bytes,
    }


def _step(technique: str, small: bool, rehearsal: bool) -> tuple[Setting, Trace]:
    setting = replace(SMALL_BILL if small else BILL, device="cuda")

    def built() -> tuple[Any, ...]:
        training = build(setting, combined(technique))
        return training.step, training.model, training.optimizer

    if rehearsal:
        return setting, memlab.predict(built)
    step, model, optimizer = built()
    step()
    return setting, memlab.measure(step, model=model, optimizer=optimizer)


def times(_: str, small: bool, rehearsal: bool) -> Answer:
    """Return the time ratio to the plain step of each technique, and of clearing after each step;
    a rehearsal uses the CPU."""
    setting = replace(SMALL_BILL if small else BILL, device="cpu" if rehearsal else "cuda")
    plain = _warm(setting, "plain")
    ratios = {}
    for technique in TIMED:
        rounds = time_in_turn(_warm(setting, technique), plain)
        ratios[technique] = statistics.median(ours / theirs for ours, theirs in rounds)
    for name, clear in CLEARING.items():
        rounds = time_in_turn(partial(_one_after_the_other, plain, clear), plain)
        ratios[name] = statistics.median(ours / theirs for ours, theirs in rounds)
    return {"what": str(setting), **ratios}


def _one_after_the_other(*calls: Callable[[], object]) -> None:
    for call in calls:
        call()


def _warm(setting: Setting, technique: str) -> Callable[[], None]:
    step = build(setting, combined(technique)).step
    for _ in range(3):  # creates optimizer state; tunes and compiles kernels
        step()
    return step


def second_day(_: str, small: bool, rehearsal: bool) -> Answer:
    """Return allocated, reserved and device memory of Day 2's steps of four lengths."""
    preset, batch, lengths = ("tiny", 2, (8, 64)) if small else ("124m", 8, FOUR_LENGTHS)

    def built() -> tuple[Any, ...]:
        with torch.device("cuda"):
            model = GPT(PRESETS[preset])
        optimizer = torch.optim.AdamW(model.parameters())
        text = source_bytes("64 KiB")

        def steps() -> None:
            for seq_len in lengths:
                tokens, targets = next(batches(text, batch, seq_len, seed=0))
                optimizer.zero_grad()
                model(tokens.to("cuda"), targets.to("cuda")).backward()
                optimizer.step()

        return steps, model, optimizer

    what = f"{preset}, {batch} × {', '.join(map(str, lengths))} tokens, float32"
    if rehearsal:
        blocks = simulate(memlab.predict(built, steps=1))
        return {"what": what, "allocated_bytes": blocks.allocated_bytes,
                "reserved_bytes": blocks.reserved_bytes}  # fmt: skip
    steps, *_ = built()
    before = torch.cuda.mem_get_info()
    steps()
    torch.cuda.synchronize()
    left, total = torch.cuda.mem_get_info()
    return {
        "what": what,
        "allocated_bytes": torch.cuda.max_memory_allocated(),
        "reserved_bytes": torch.cuda.max_memory_reserved(),
        "in_use_on_the_card_bytes": total - left,
        "context_and_other_processes_bytes": total - left - torch.cuda.memory_reserved(),
        "in_use_before_the_first_step_bytes": before[1] - before[0],
    }


TASKS: dict[str, Task] = {
    "day 1": first_day,
    "day 2": second_day,
    "step": one_of_several,
    "time": times,
}
