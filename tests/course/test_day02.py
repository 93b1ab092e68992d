"""Day 2: what its checks tell a learner, and what the lesson claims."""

import pytest
import torch
import torch.nn.functional as F

from memlab.allocator import simulate
from memlab.course import days
from memlab.course.exercises import WRONG, judge
from memlab.trace import Event

SIZES, ALLOCATE, FREE_BLOCK, LEAKS, TRAIN_EPOCH, DIAGNOSE = days.day(2).exercises


# ------------------------------------------------------------------ answers


def train_epoch_with(of_output, keeps_soft_targets=False):
    """A repair whose hook keeps `of_output(output)` until the end of the epoch."""

    def train_epoch(model, optimizer, training, held_out, notes):
        seen, soft = [], {}
        hook = model[2].register_forward_hook(lambda module, args, out: seen.append(of_output(out)))
        for tokens, targets in training:
            optimizer.zero_grad()
            soft_targets = 0.9 * F.one_hot(targets, 256) + 0.1 / 256
            if keeps_soft_targets:
                soft[targets] = soft_targets
            F.cross_entropy(model(tokens).mT, soft_targets.mT).backward()
            optimizer.step()
        hook.remove()
        notes["scales"].append(torch.stack([torch.as_tensor(s) for s in seen]).mean().item())
        with torch.no_grad():
            for tokens, targets in held_out:
                notes["losses"].append(F.cross_entropy(model(tokens).mT, targets).item())

    return train_epoch


@pytest.mark.slow
def test_a_peak_that_grows_with_the_length_of_an_epoch_is_refused():
    def kept_until_the_end(model, optimizer, training, held_out, notes):
        kept = [torch.zeros(10_000) for _ in training]
        TRAIN_EPOCH.reference(model, optimizer, training, held_out, notes)
        kept.clear()

    verdict = judge(TRAIN_EPOCH, kept_until_the_end)
    assert verdict.status == WRONG
    assert "peaks 126,144 bytes above" in verdict.text  # 3 more tensors, and the longer text
    assert "The largest growth is 3 × 10000 float32, made by aten.zeros.default." in verdict.text


@pytest.mark.slow
def test_soft_targets_kept_for_an_epoch_have_their_remark():
    answer = train_epoch_with(lambda output: output.abs().mean().item(), keeps_soft_targets=True)
    verdict = judge(TRAIN_EPOCH, answer)
    assert verdict.status == WRONG
    assert "The largest growth is 3 × 4×16×256 float32" in verdict.text
    assert "A dictionary cleared after each epoch still grows" in verdict.text


# ------------------------------------------------------------------ compared with the allocator


@pytest.mark.parametrize("requested", [1, 512, 513, 2**20, 2**20 + 1, 10 * 2**20 - 1, 2**25 + 1])
def test_sizes_agrees_with_the_simulated_allocator(requested):
    size, segment = SIZES.reference(requested)
    blocks = simulate([Event(requested, 1, "activations", "", "", "forward", "uint8", ())])
    assert blocks.reserved_bytes == segment
    wasted = blocks.allocated_bytes - size  # in the large pool, up to 1 MiB is not split off
    assert 0 <= wasted <= 2**20
    assert wasted == 0 or wasted == segment - size
