"""Sizes and kinds of step, and the language model among them."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from common import kinds_of_steps
from torch import nn

from memlab.model import GPT, PRESETS

Step = Callable[[], object]
Built = tuple[Step, nn.Module, Any]
Builder = Callable[[], Built]


class ModelSize(NamedTuple):
    """A language model and its batch."""

    preset: str
    batch: int
    seq_len: int
    dtype: str

    def __str__(self) -> str:
        return f"{self.preset} ({self.batch} × {self.seq_len} tokens, {self.dtype}, AdamW)"


@dataclass(frozen=True)
class MeterPlan:
    """Sizes of the benchmark."""

    kinds: tuple[str, ...] | None  # None for all
    real: ModelSize
    dry: ModelSize
    rounds: int
    rounds_of_mem_tracker: int


FULL = MeterPlan(
    kinds=None,
    real=ModelSize("25m", 4, 256, "float32"),
    dry=ModelSize("llama-2-7b", 1, 2048, "bfloat16"),
    rounds=7,
    rounds_of_mem_tracker=2,
)
QUICK = MeterPlan(
    kinds=("mlp", "fan_out", "generator_and_critic", "recommender_sparse_gradients"),
    real=ModelSize("tiny", 2, 32, "float32"),
    dry=ModelSize("tiny", 2, 32, "bfloat16"),
    rounds=2,
    rounds_of_mem_tracker=1,
)


def language_model(size: ModelSize) -> Built:
    """Return a training step of a language model."""
    torch.manual_seed(0)
    config = PRESETS[size.preset]
    model = GPT(config, dtype=getattr(torch, size.dtype))
    text = torch.randint(config.vocab_size, (size.batch, size.seq_len + 1))
    optimizer = torch.optim.AdamW(model.parameters())

    def step() -> None:
        optimizer.zero_grad()
        model(text[:, :-1], text[:, 1:]).backward()
        optimizer.step()

    return step, model, optimizer


def chosen_kinds(plan: MeterPlan) -> dict[str, Builder]:
    """Return the small kinds of the tests, and a language model of realistic size."""
    kinds = kinds_of_steps().KINDS
    chosen = {name: kinds[name] for name in plan.kinds or kinds}
    return {**chosen, f"gpt_{plan.real.preset}": partial(language_model, plan.real)}
