"""Day 2's checks accept right answers written differently, and agree with the allocator."""

from collections import Counter, defaultdict
from dataclasses import dataclass
from itertools import pairwise

import pytest
import torch
import torch.nn.functional as F
from edited import each, verdict_on

from memlab.allocator import simulate
from memlab.course import days
from memlab.course.exercises import OK, WRONG, judge
from memlab.trace import Event

SIZES, ALLOCATE, FREE_BLOCK, LEAKS, TRAIN_EPOCH, DIAGNOSE = days.day(2).exercises


@dataclass
class NotebookBlock:
    """The learner's class, as in the notebook."""

    segment: int
    address: int
    bytes: int
    free: bool


# ------------------------------------------------------------------ right, written differently


def allocate_sorted(pool, size):
    for block in sorted(pool, key=lambda block: block.bytes):  # stable: addresses stay in order
        if block.free and block.bytes >= size:
            remaining, least = block.bytes - size, 512 if size <= 2**20 else 2**20 + 1
            if remaining >= least:
                block.bytes = size
                upper = NotebookBlock(block.segment, block.address + size, remaining, True)
                pool.insert(pool.index(block) + 1, upper)
            block.free = False
            return block.address
    return None


def free_block_in_passes(pool, address):
    for block in pool:
        if block.address == address:
            block.free = True
    while True:
        for lower, upper in pairwise(pool):
            if lower.free and upper.free and lower.segment == upper.segment:
                lower.bytes += upper.bytes
                pool.remove(upper)
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
    found = after - before  # Counters drop values of 0 and below
    return Counter({line: size // (len(epochs) - 1 - middle) for line, size in found.items()})


def leaks_by_difference(epochs):
    middle = len(epochs) // 2
    sums = defaultdict(int)
    for kind, count in epochs[middle].diff(epochs[-1]).rows:
        sums[kind.line] += kind.bytes * count
    grown = {line: size // (len(epochs) - 1 - middle) for line, size in sums.items()}
    return {line: size for line, size in grown.items() if size > 0}


def leaks_in_floats(epochs):
    return {line: size * 3 / 3 for line, size in LEAKS.reference(epochs).items()}


def diagnose_by_room(oom):
    """In integers, and from what this process can have, not from what others hold."""
    wanted = 100 * (oom.process + oom.requested - oom.unallocated)
    for answer, room in (("too much", oom.total), ("another process", oom.free + oom.process)):
        if wanted > 98 * room:
            return answer
    return "fragmentation"


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
        (ALLOCATE, allocate_sorted),
        (FREE_BLOCK, free_block_in_passes),
        (LEAKS, leaks_by_counter),
        (LEAKS, leaks_by_difference),
        (LEAKS, leaks_in_floats),
        (DIAGNOSE, diagnose_by_room),
        (TRAIN_EPOCH, train_epoch_without_a_hook),
        (TRAIN_EPOCH, train_epoch_with(lambda output: output.detach().abs().mean())),
    ],
)
def test_a_right_answer_written_differently_passes(exercise, answer):
    verdict = judge(exercise, answer)
    assert verdict.status == OK, verdict


# ------------------------------------------------------------------ wrong, without a remark

HOOK_OFF = "    hook.remove()\n"
NO_GRAD = "    with torch.no_grad():"
SPLIT = "    splits = remaining >= 512 if size <= MIB else remaining > MIB\n"
JOIN = "                del pool[i + 1]"
ALL_FREE = """
    kept = [block for block in pool if not block.free]
    for n in {block.segment for block in pool if block.free}:
        first, *others = [block for block in pool if block.free and block.segment == n]
        first.bytes += sum(block.bytes for block in others)
        kept.append(first)
    pool[:] = sorted(kept, key=lambda block: block.address)"""

SIZE, INSERTED = "-(-requested_bytes // 512) * 512", "pool.insert(pool.index(best) + 1, upper)"
BY_SEGMENT = "pool.append(upper); pool.sort(key=lambda block: (block.segment, block.address))"
SCALE, MEAN = "output.detach().abs().mean().item()", "sum(seen) / len(seen)"


REFUSED = [
    (
        "2.4",
        "the number of tensors decides",
        ("before, after = {}, {}", "before, after = {}, {}\n    counts = {}, {}"),
        (
            "in epoch.alive():",
            "in epoch.alive():\n            number = counts[sums is after]\n"
            "            number[event.line] = number.get(event.line, 0) + 1",
        ),
        ("if size > 0}", "if size > 0 and counts[1][line] > counts[0].get(line, 0)}"),
    ),
    (
        "2.5",
        "the mean is over the number of held-out batches",
        ("/ len(seen)", "/ len(held_out)"),
    ),
    (
        "2.1",
        "powers of two above 1 MiB",
        (
            "    if size <= MIB",
            "    if size > MIB: size = 1 << (size - 1).bit_length()\n    if size <= MIB",
        ),
    ),
    ("2.1", "32 bits", (SIZE, "requested_bytes + 511 & 0xFFFFFE00")),
    ("2.2", "sorted by segment", (INSERTED, BY_SEGMENT)),
    (
        "2.2",
        "the block, not the request, chooses the pool",
        (SPLIT, SPLIT.replace("size <=", "best.bytes <= 2 *")),
    ),
    (
        "2.2",
        "no block above 20 MiB",
        ("bytes >= size]", "bytes >= size and block.bytes <= 20 * MIB]"),
    ),
    ("2.2", "no address as 0", ("        return None", "        return 0")),
    ("2.2", "the upper part allocated", ("remaining, free=True", "remaining, free=False")),
    ("2.3", "merges all free blocks of a segment", (JOIN, f"{JOIN}{ALL_FREE}")),
    (
        "2.3",
        "returns the list",
        (
            "                del pool[i + 1]",
            "                del pool[i + 1]\n    return pool",
        ),
    ),
    (
        "2.4",
        "activations alone",
        ("epoch.alive()", "[e for e in epoch.alive() if e.category == 'activations']"),
    ),
    ("2.4", "takes an epoch from the list", ("    middle =", "    epochs.pop(0)\n    middle =")),
    ("2.5", "all modules in training mode", (NO_GRAD, f"    model.train()\n{NO_GRAD}")),
    ("2.5", "the scale of the last batch", ("sum(seen) / len(seen)", "seen[-1]")),
    ("2.5", "all hooks cleared", (HOOK_OFF, "    model[2]._forward_hooks.clear()\n")),
    ("2.5", "left in eval mode", (NO_GRAD, f"    model.eval()\n{NO_GRAD}")),
    ("2.5", "a sum for the mean", (MEAN, "sum(seen)")),
    ("2.5", "two batches in any epoch", (MEAN, "sum(seen) / 2")),
    (
        "2.5",
        "the mean of all elements, not of batches",
        (SCALE, "(output.detach().abs().mean().item(), len(output))"),
        (MEAN, "sum(x * n for x, n in seen) / sum(n for _, n in seen)"),
    ),
    (
        "2.5",
        "the last epoch's scale alone",
        ('notes["scales"].append(', 'notes["scales"][:] = [sum(seen)] or ('),
    ),
]


@each(REFUSED)
def test_a_wrong_answer_is_refused(edit, tmp_path):
    assert verdict_on(edit, tmp_path).status == WRONG


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
