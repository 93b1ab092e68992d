"""Day 3: what its checks tell a learner, and what the lesson claims."""

import pytest
import torch.nn.functional as F
from torch import nn

from memlab.accumulation import accumulate, windows
from memlab.course import days
from memlab.course.checks.day03 import MASKED, trained_bytes
from memlab.course.exercises import WRONG, judge
from memlab.lora import LoRALinear
from memlab.model import PRESETS
from memlab.train import Plugs, Setting, dry_trace

TRAIN_EPOCH, TRAINED_BYTES, LORA, VALIDATE = days.day(3).exercises


def sum_of_losses(logits, targets):
    losses = F.cross_entropy(
        logits.flatten(0, 1), targets.flatten(), ignore_index=MASKED, reduction="none"
    )
    return losses.sum(), int((targets != MASKED).sum())


# ------------------------------------------------------------------ answers


def by_the_library(model, optimizer, micro_batches, size, max_norm):
    losses = []
    for window in windows(micro_batches, size):
        optimizer.zero_grad()
        loss, _ = accumulate(
            window, lambda part: sum_of_losses(model(part[0]), part[1]), model.parameters()
        )
        nn.utils.clip_grad_norm_(model.parameters(), max_norm)
        optimizer.step()
        losses.append(loss.item())
    return losses


class Library(LoRALinear):
    """The library's own layer: it freezes nothing, and its merge has another name."""

    def __init__(self, frozen, rank, alpha):
        super().__init__(frozen.requires_grad_(False), rank, alpha)

    def merge(self):
        return self.merged()


@pytest.mark.parametrize(
    ("exercise", "answer", "named"),
    [
        (TRAIN_EPOCH, by_the_library, "calls memlab.accumulation.accumulate"),
        (LORA, Library, "is memlab.lora.LoRALinear"),
    ],
    ids=lambda value: getattr(value, "__name__", getattr(value, "id", None)),
)
def test_the_librarys_version_is_refused_though_its_values_are_right(exercise, answer, named):
    exercise.check(answer)
    verdict = judge(exercise, answer)
    assert verdict.status == WRONG
    assert f"{named}, which this exercise rebuilds" in verdict.text


# ------------------------------------------------------------------ compared with the meter


def frozen_but(trained):
    def change(model):
        model.requires_grad_(False)
        for place in trained:
            model.blocks[place].requires_grad_(True)

    return Plugs(change_model=change)


@pytest.mark.few(1)
@pytest.mark.parametrize(
    "trained", [range(1), range(2), range(1, 3), range(2, 4), range(4)], ids=str
)
def test_the_formula_of_a_partly_frozen_step_matches_the_meter(trained):
    trace = dry_trace(Setting("tiny", batch=8, seq_len=64), frozen_but(trained))
    wanted = trained_bytes(PRESETS["tiny"], 8, 64, trained)
    assert trace.peak_phase == "backward"
    assert {
        "gradients": trace.at_end["gradients"],
        "optimizer_state": trace.at_end["optimizer_state"],
        "activations": trace.at_peak["activations"],
    } == wanted
