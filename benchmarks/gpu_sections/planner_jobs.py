"""Jobs that test the planner on the GPU: second steps, and training under a memory limit."""

import statistics
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache
from itertools import islice
from typing import Any

import torch
from torch import Tensor

from memlab.cli.steps import TEXT, StepResult
from memlab.cli.train import step
from memlab.data import batches, source_bytes
from memlab.train import SEED, Setting, Training, build, combined, predicted_trace

from . import recorder
from .configurations import Built, Configuration, Size

Answer = dict[str, Any]

FULL_FINE_TUNING = "checkpointing+lion8bit+step-in-backward+chunked-loss"
STEPS = 20


@dataclass(frozen=True)
class TestedRecipe:
    """A setting and techniques, and the small setting for a rehearsal."""

    setting: Setting
    techniques: str
    small: Setting

    def of(self, small: bool, device: str) -> Setting:
        return replace(self.small if small else self.setting, device=device)

    def __str__(self) -> str:
        setting = self.setting
        dtype = str(setting.dtype).removeprefix("torch.")
        return f"{setting.model}, {setting.batch} × {setting.seq_len}, {dtype}, {self.techniques}"


BF16 = torch.bfloat16
TINY, TINY_BF16 = Setting("tiny", 2, 32), Setting("tiny", 1, 64, BF16)


def _recipes() -> Iterator[TestedRecipe]:
    for techniques in (
        *("plain", "autocast", "bfloat16", "master-weights", "accumulation+autocast", "lora"),
        *("adam8bit", "adam-mini", "lion", "lion8bit", "step-in-backward"),
        *("checkpointing", "sqrt-checkpointing", "selective-checkpointing"),
        *("int8-activations", "eager-attention", "chunked-loss"),
        *("checkpointing+autocast", "checkpointing+int8-activations", FULL_FINE_TUNING),
    ):
        yield TestedRecipe(Setting("124m", 8, 1024), techniques, TINY)
    for techniques in (
        *("plain", "checkpointing", "checkpointing+master-weights", "checkpointing+adam8bit"),
        *("checkpointing+chunked-loss", "checkpointing+lora+chunked-loss", FULL_FINE_TUNING),
    ):
        yield TestedRecipe(Setting("1b", 1, 2048, BF16), techniques, TINY_BF16)


RECIPES: dict[str, TestedRecipe] = {str(recipe): recipe for recipe in _recipes()}
TRAININGS: dict[str, TestedRecipe] = {
    model: TestedRecipe(Setting(model, 1, 2048, BF16), FULL_FINE_TUNING, TINY_BF16)
    for model in ("llama-2-7b", "llama-3-8b")
}


def configuration(recipe: TestedRecipe, small: bool) -> Configuration:
    """Return the recipe as a configuration."""

    def built(_: Size, device: str) -> Built:
        training = build(recipe.of(small, device), combined(recipe.techniques))
        return training.step, training.model, training.optimizer

    return Configuration(built)


def second_step(name: str, small: bool, rehearsal: bool) -> Answer:
    """Measure the second step with the allocator's statistics; a rehearsal predicts them."""
    recipe = RECIPES[name]
    if rehearsal:
        return predicted(recipe, small, "cuda:hopper")
    recorder.start()
    training = build(recipe.of(small, "cuda"), combined(recipe.techniques))
    training.step()
    torch.cuda.synchronize()
    reserved_before = torch.cuda.max_memory_reserved()
    torch.cuda.reset_peak_memory_stats()
    training.step()
    torch.cuda.synchronize()
    return {
        "allocated_bytes": torch.cuda.max_memory_allocated(),
        "reserved_bytes": max(reserved_before, torch.cuda.max_memory_reserved()),
    }


@cache  # a rehearsal calls this twice
def predicted(recipe: TestedRecipe, small: bool, target: str) -> Answer:
    """Predict the allocated and reserved peaks."""
    trace = predicted_trace(recipe.of(small, target), combined(recipe.techniques))
    return {"allocated_bytes": trace.allocated_bytes, "reserved_bytes": trace.reserved_bytes}


def trained(name: str, cap_bytes: int | None, small: bool, rehearsal: bool) -> Answer:
    """Train on new batches in a process with a limit of reserved memory.

    A rehearsal trains on the CPU and predicts the memory.
    """
    recipe = TRAININGS[name]
    setting = recipe.of(small, "cpu" if rehearsal else "cuda")
    if not rehearsal:
        recorder.start(cap_bytes)
    losses: list[Tensor] = []
    training = build(setting, combined(recipe.techniques), on_loss=losses.append)
    taken = list(steps(training, setting, losses))
    if rehearsal:
        figures = predicted(recipe, small, "cuda:hopper")
    else:
        figures = {
            "allocated_bytes": torch.cuda.max_memory_allocated(),
            "reserved_bytes": torch.cuda.max_memory_reserved(),
        }
    return {
        "what": f"{setting}, {recipe.techniques}",
        "losses": [step.loss for step in taken],
        "seconds": statistics.median(step.seconds for step in taken[1:]),
        **figures,
    }


def steps(training: Training, setting: Setting, losses: list[Tensor]) -> Iterator[StepResult]:
    text = batches(source_bytes(TEXT), setting.batch, setting.seq_len, SEED)
    return (step(training, batch, losses) for batch in islice(text, STEPS))
