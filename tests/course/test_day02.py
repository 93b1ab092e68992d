"""Day 2's checks let right answers of another make pass, and hold the toy against the allocator."""

from collections import Counter, defaultdict
from dataclasses import dataclass
from itertools import pairwise

import pytest
import torch
import torch.nn.functional as F

from memlab.allocator import simulate
from memlab.course import days
from memlab.course.exercises import OK, WRONG, judge
from memlab.trace import Event

SIZES, TAKE, GIVE_BACK, LEAKS, TRAIN_EPOCH = days.day(2).exercises


@dataclass
class OtherPiece:
    """A class of the learner's own, as the notebook's is."""

    segment: int
    address: int
    bytes: int
    free: bool


# ------------------------------------------------------------------ right in another way


def take_sorted(pieces, size):
    for piece in sorted(pieces, key=lambda piece: piece.bytes):  # stable: addresses stay in order
        if piece.free and piece.bytes >= size:
            rest, least = piece.bytes - size, 512 if size <= 2**20 else 2**20 + 1
            if rest >= least:
                piece.bytes = size
                above = OtherPiece(piece.segment, piece.address + size, rest, True)
                pieces.insert(pieces.index(piece) + 1, above)
            piece.free = False
            return piece.address
    return None


def give_back_in_passes(pieces, address):
    for piece in pieces:
        if piece.address == address:
            piece.free = True
    while True:
        for one, other in pairwise(pieces):
            if one.free and other.free and one.segment == other.segment:
                one.bytes += other.bytes
                pieces.remove(other)
                break
        else:
            return


def leaks_by_counter(epochs):
    middle = len(epochs) // 2
    after, before = Counter(), Counter()
    for event in epochs[-1].alive():
        after[event.line] += event.bytes
    for event in epochs[middle].alive():
        before[event.line] += event.bytes
    found = after - before  # of Counters: what is above 0
    return Counter({line: size // (len(epochs) - 1 - middle) for line, size in found.items()})


def leaks_by_difference(epochs):
    middle = len(epochs) // 2
    sums = defaultdict(int)
    for kind, count in epochs[middle].diff(epochs[-1]).rows:
        sums[kind.line] += kind.bytes * count
    grown = {line: size // (len(epochs) - 1 - middle) for line, size in sums.items()}
    return {line: size for line, size in grown.items() if size > 0}


def train_epoch_without_a_hook(model, optimizer, training, held_out, notes):
    scales = []
    for tokens, targets in training:
        optimizer.zero_grad()
        inside = model[:3](tokens)
        scales.append(inside.detach().abs().mean().item())
        soft = 0.9 * F.one_hot(targets, 256) + 0.1 / 256
        F.cross_entropy(model[3](inside).mT, soft.mT).backward()
        optimizer.step()
    notes["scales"].append(sum(scales) / len(scales))
    for tokens, targets in held_out:  # with a graph, of one batch at a time
        notes["losses"].append(float(F.cross_entropy(model(tokens).mT, targets).detach()))


@pytest.mark.parametrize(
    ("exercise", "answer"),
    [
        (TAKE, take_sorted),
        (GIVE_BACK, give_back_in_passes),
        (LEAKS, leaks_by_counter),
        (LEAKS, leaks_by_difference),
        (TRAIN_EPOCH, train_epoch_without_a_hook),
    ],
)
def test_a_right_answer_of_another_make_passes(exercise, answer):
    verdict = judge(exercise, answer)
    assert verdict.status == OK, verdict


# ------------------------------------------------------------------ wrong beyond the named ones


def test_memory_that_is_flat_from_epoch_to_epoch_may_not_grow_with_the_epoch_s_length():
    def kept_until_the_end(model, optimizer, training, held_out, notes):
        kept = [torch.zeros(10_000) for _ in training]
        TRAIN_EPOCH.reference(model, optimizer, training, held_out, notes)
        kept.clear()

    verdict = judge(TRAIN_EPOCH, kept_until_the_end)
    assert verdict.status == WRONG
    assert "peaks 168,192 bytes above" in verdict.text  # 4 tensors more, and the text's own


# ------------------------------------------------------------------ the rules, one more time


@pytest.mark.parametrize("requested", [1, 512, 513, 2**20, 2**20 + 1, 10 * 2**20 - 1, 2**25 + 1])
def test_the_two_sizes_are_those_of_the_simulated_allocator(requested):
    block, segment = SIZES.reference(requested)
    blocks = simulate([Event(requested, 1, "activations", "", "", "forward", "uint8", ())])
    assert blocks.reserved_bytes == segment
    wasted = blocks.allocated_bytes - block  # a large rest of up to 1 MiB goes with the block
    assert 0 <= wasted <= 2**20
    assert wasted == 0 or wasted == segment - block
