"""Day 2's checks accept right answers written differently, and agree with the allocator."""

from collections import defaultdict

import pytest
import torch
import torch.nn.functional as F

from memlab.allocator import simulate
from memlab.course import days
from memlab.course.exercises import WRONG, judge
from memlab.trace import Event

SIZES, ALLOCATE, FREE_BLOCK, LEAKS, TRAIN_EPOCH, DIAGNOSE = days.day(2).exercises


# ------------------------------------------------------------------ right, written differently


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


# ------------------------------------------------------------------ wrong, without a remark


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


def test_a_scale_that_stays_a_tensor_is_refused():
    def scales_as_tensors(model, optimizer, training, held_out, notes):
        TRAIN_EPOCH.reference(model, optimizer, training, held_out, notes)
        notes["scales"][-1] = torch.tensor(notes["scales"][-1])

    verdict = judge(TRAIN_EPOCH, scales_as_tensors)
    assert verdict.status == WRONG
    assert "1 × scalar float32" in verdict.text


def test_a_key_error_for_a_line_that_is_new_after_the_middle_is_told():
    def indexes(epochs):
        middle = len(epochs) // 2
        before, after = defaultdict(int), defaultdict(int)
        for sums, epoch in ((before, epochs[middle]), (after, epochs[-1])):
            for event in epoch.alive():
                sums[event.line] += event.bytes
        before = dict(before)  # a plain dictionary has no 0 for a missing key
        grown = {line: after[line] - before[line] for line in after}
        return {n: size // (len(epochs) - 1 - middle) for n, size in grown.items() if size > 0}

    verdict = judge(LEAKS, indexes)
    assert verdict.status == WRONG
    assert verdict.text.startswith("KeyError: 'late.py:8 keep', at `grown = ")


def test_a_list_assigned_to_the_argument_is_told():
    def without_the_freed(pool, address):
        pool = [block for block in pool if block.address != address]

    def copied(pool, address):
        pool = sorted(pool, key=lambda block: (pool[0].segment, block.address))
        next(block for block in pool if block.address == address).free = True

    for answer in (without_the_freed, copied):  # a local name, and one in a closure
        verdict = judge(FREE_BLOCK, answer)
        assert verdict.status == WRONG
        assert "Your function assigns a new list to its argument." in verdict.text
    assert "another list" not in judge(FREE_BLOCK, lambda pool, address: None).text


def test_wrapping_around_to_the_last_block_has_its_remark():
    def wraps_around(pool, address):
        index = next(i for i, block in enumerate(pool) if block.address == address)
        pool[index].free = True
        for i in (index, index - 1):  # pool[-1] is the last block
            if i + 1 < len(pool):
                lower, upper = pool[i], pool[i + 1]
                if lower.free and upper.free and lower.segment == upper.segment:
                    lower.bytes += upper.bytes
                    del pool[i + 1]

    verdict = judge(FREE_BLOCK, wraps_around)
    assert verdict.text.startswith(
        "free_block([0: 512 allocated, 512: 512 allocated, 1,024: 1,024 free], 0)"
    )
    assert verdict.text.endswith("pool[-1] is the last block.")


# ------------------------------------------------------------------ compared with the allocator


@pytest.mark.parametrize("requested", [1, 512, 513, 2**20, 2**20 + 1, 10 * 2**20 - 1, 2**25 + 1])
def test_sizes_agrees_with_the_simulated_allocator(requested):
    size, segment = SIZES.reference(requested)
    blocks = simulate([Event(requested, 1, "activations", "", "", "forward", "uint8", ())])
    assert blocks.reserved_bytes == segment
    wasted = blocks.allocated_bytes - size  # in the large pool, up to 1 MiB is not split off
    assert 0 <= wasted <= 2**20
    assert wasted == 0 or wasted == segment - size
