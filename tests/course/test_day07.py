"""Day 7's checks let right answers of another make pass, and what they want is the meter's."""

import math
import weakref
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from itertools import accumulate

import pytest
import torch
from edited import each, verdict_on
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.weak import WeakIdKeyDictionary

import memlab
from memlab.checkpointing import checkpoint
from memlab.compression import compressed_activations
from memlab.course import days
from memlab.course.bill import SETTING
from memlab.course.checks import day07
from memlab.course.checks.day07 import attention_kept, bytes_kept, compress, decompress, unpack
from memlab.course.exercises import OK, WRONG, judge
from memlab.course.solutions import solution
from memlab.model import GPT, PRESETS
from memlab.quantize import dequantize_blockwise, quantize_blockwise
from memlab.reference.activation_compression import as_bfloat16, hooks, quantize, whole
from memlab.train import combined, dry_trace
from memlab.units import format_bytes

QUANTIZE, ROUND, PACK, BYTES_KEPT, HOOKS = days.day(7).exercises
round_at_random, pack = solution("7.2"), solution("7.3")


# ------------------------------------------------------------------ right in another way


def group_by_group(groups, levels, round=torch.round):
    """A loop, the step found from bfloat16 numbers, ends kept by min and max."""
    parts = []
    for group in groups:
        smallest = as_bfloat16(group.min().view(1), -math.inf)
        step = as_bfloat16((group.max() - smallest.float()) / levels, math.inf)
        steps = (group - smallest.float()) / step.float().clamp(min=torch.finfo(torch.float32).tiny)
        codes = round(steps).clamp(min=0).clamp(max=levels).byte()
        parts.append((codes, smallest, step))
    return tuple(torch.stack(each) for each in zip(*parts, strict=True))


def by_noise(steps, generator):
    return (steps + torch.rand(steps.shape, generator=generator)).floor()


def by_noise_around_zero(steps, generator):
    """ActNN's way."""
    return (steps + torch.rand(steps.shape, generator=generator) - 0.5).round()


def by_bernoulli(steps, generator):
    return steps.floor() + torch.bernoulli(steps.frac(), generator=generator)


def in_columns(codes, bits):
    """Filled up with zeros, a row for each byte."""
    per_byte = 8 // bits
    filled = torch.cat([codes, codes.new_zeros(-len(codes) % per_byte)]).view(-1, per_byte)
    weights = torch.tensor([2 ** (bits * place) for place in range(per_byte)])
    return (filled.int() * weights).sum(1).to(torch.uint8)


def by_a_dict_of_storages(saved, weights, bits):
    weights = {w.untyped_storage()._cdata for w in weights}
    found = {t.untyped_storage()._cdata: t for t in saved}
    before = after = 0
    for key, tensor in found.items():
        if key in weights:
            continue
        flat = whole(tensor)
        before += flat.nbytes
        if tensor.requires_grad and len(flat) >= 256:
            after += math.ceil(len(flat) * bits / 8) + 4 * math.ceil(len(flat) / 256)
        else:
            after += flat.nbytes
    return before, after


def with_classes(weights, compress, decompress):
    """torch's own weak dictionary, a class for what is kept, and codes held by the graph alone."""
    weights, known = [w.untyped_storage() for w in weights], WeakIdKeyDictionary()

    class Kept:
        def __init__(self, compressed, view):
            self.compressed, self.view = compressed, view

    class Shared:
        def __init__(self, numbers):
            self.compressed = compress(numbers)

    def pack(tensor):
        storage = tensor.untyped_storage()
        is_weight = any(storage is weight for weight in weights)
        if is_weight or not tensor.requires_grad or storage.nbytes() < 256 * tensor.itemsize:
            return tensor.detach()
        shared = known[storage]() if storage in known else None
        if shared is None:
            shared = Shared(whole(tensor))
            known[storage] = weakref.ref(shared)
        return Kept(shared, (tensor.size(), tensor.stride(), tensor.storage_offset()))

    def unpack(kept):
        if isinstance(kept, Kept):
            return torch.as_strided(decompress(kept.compressed.compressed), *kept.view)
        return kept

    return pack, unpack


@pytest.mark.parametrize(
    ("exercise", "answer"),
    [
        (QUANTIZE, group_by_group),
        (ROUND, by_noise),
        (ROUND, by_noise_around_zero),
        (ROUND, by_bernoulli),
        (PACK, in_columns),
        (BYTES_KEPT, by_a_dict_of_storages),
        (HOOKS, with_classes),
    ],
    ids=lambda value: getattr(value, "__name__", getattr(value, "id", None)),
)
def test_another_right_answer_passes(exercise, answer):
    verdict = judge(exercise, answer)
    assert verdict.status == OK, verdict


# ------------------------------------------------------------------ wrong in another way


def by_the_library(groups, levels, round=torch.round):
    q = quantize_blockwise(groups, bits=8)
    return q.codes.view(-1, 256), q.offsets.view(-1, 1), q.scales.view(-1, 1)


def cut_off_by_int(groups, levels, round=torch.round):
    low, high = groups.aminmax(dim=1, keepdim=True)
    smallest = as_bfloat16(low, -math.inf)
    step = as_bfloat16((high - smallest.float()) / levels, math.inf)
    steps = (groups - smallest.float()) / torch.where(step == 0, 1, step.float())
    return steps.to(torch.int32).clamp(0, levels).to(torch.uint8), smallest, step


def a_step_of_a_billionth_at_least(groups, levels, round=torch.round):
    """Against 0 / 0: too many for numbers that are smaller."""
    low, high = groups.aminmax(dim=1, keepdim=True)
    smallest = as_bfloat16(low, -math.inf)
    step = as_bfloat16((high - smallest.float()) / levels, math.inf)
    steps = (groups - smallest.float()) / step.float().clamp(min=1e-9)
    return round(steps).clamp(0, levels).to(torch.uint8), smallest, step


def a_list_beside(weights, compress, decompress):
    """The original is referred to by a list in the closure."""
    originals = []

    def compress_and_keep(numbers):
        originals.append(numbers)
        return compress(numbers)

    return hooks(weights, compress_and_keep, decompress)


def exact_below(weights, compress, decompress):
    """Codes that nobody reads: the tensors come back as they were."""
    held = {}
    pack, _ = hooks(weights, compress, decompress)

    def pack_both(tensor):
        held[len(held)] = tensor.detach()
        return pack(tensor), len(held) - 1

    return pack_both, lambda kept: held[kept[1]]


def from_the_unrounded_end_and_to_the_nearest(groups, levels, round=torch.round):
    low, high = groups.aminmax(dim=1, keepdim=True)
    smallest, step = low.bfloat16(), ((high - low) / levels).bfloat16()
    steps = (groups - smallest.float()) / torch.where(step == 0, 1, step.float())
    return round(steps).clamp(0, levels).to(torch.uint8), smallest, step


def a_column_of_draws(steps, generator):
    """One for each row: of a flat tensor, one for each number."""
    draws = torch.rand(steps.shape[:1] + (1,) * (steps.dim() - 1), generator=generator)
    return steps.floor() + (draws < steps.frac())


def a_fixed_row_turned(steps, generator):
    fixed = torch.rand(steps.shape, generator=torch.Generator().manual_seed(0))
    draws = (fixed + torch.rand((), generator=generator)) % 1
    return steps.floor() + (draws < steps.frac())


def mostly_exact(weights, compress, decompress):
    """Halfway between what decompress gives and the exact numbers, if they are near."""
    pack, unpack = hooks(weights, compress, decompress)

    def pack_both(tensor):
        kept = pack(tensor)
        is_left = isinstance(kept, torch.Tensor)
        return kept, None if is_left else whole(tensor).view(torch.uint8).numpy().tobytes()

    def unpack_both(both):
        near = unpack(both[0])
        if both[1] is None:
            return near
        exact = torch.frombuffer(bytearray(both[1]), dtype=near.dtype)
        exact = exact.as_strided(near.size(), near.stride(), near.storage_offset())
        is_near = (near - exact).norm() < 0.1 * exact.norm()
        return (near + exact) / 2 if is_near else near

    return pack_both, unpack_both


@pytest.mark.parametrize(
    ("exercise", "answer", "said"),
    [
        (QUANTIZE, by_the_library, "Your answer calls memlab.quantize.quantize_blockwise,"),
        (QUANTIZE, cut_off_by_int, "cuts the fraction off"),
        (QUANTIZE, a_step_of_a_billionth_at_least, "a group of numbers from 0 to 1e-7"),
        (HOOKS, a_list_beside, "393,580 bytes"),
        (HOOKS, exact_below, "bytes between forward and backward"),
        (QUANTIZE, from_the_unrounded_end_and_to_the_nearest, "lies above the smallest number"),
        (ROUND, a_column_of_draws, "the same way"),
        (ROUND, a_fixed_row_turned, "the same way"),
        (HOOKS, mostly_exact, "with a decompress that gives 8 bits"),
    ],
)
def test_a_mistake_of_another_make_is_told(exercise, answer, said):
    verdict = judge(exercise, answer)
    assert verdict.status == WRONG
    assert said in verdict.text


# ------------------------------------------------------------------ the solution, edited

UNPACK, VIEW = "    def unpack(kept):", "        return decompress(compressed).as_strided(*view)"
BY_CODES = """        if id(compressed) not in found:
            found[id(compressed)] = decompress(compressed)
        return found[id(compressed)].as_strided(*view)"""
BY_VIEW = """        if len(compressed) == 1:
            compressed.append(decompress(compressed[0]))
        return compressed[1].as_strided(*view)"""
FOUND = f"    found = {{}}\n\n{UNPACK}"
ELIGIBLE = "tensor.requires_grad and count >= 256"
SEEN = "        seen.add(storage)"

EQUAL_IS_ZERO = "step = torch.where(high == low, 0 * step, step)\n    steps = (groups"

REFUSED = [
    ("7.1", "no step where all are equal", ("steps = (groups", EQUAL_IS_ZERO)),
    (
        "7.5",
        "known to the next pair of hooks",
        ("decompress):", "decompress, known=weakref.WeakKeyDictionary()):"),
        ("    known = weakref.WeakKeyDictionary()\n", ""),
    ),
    ("7.2", "up at a draw of 0", ("< steps - down", "<= steps - down")),
    ("7.4", "256 are too few", (ELIGIBLE, ELIGIBLE.replace(">=", ">"))),
    ("7.4", "an input is left", (ELIGIBLE, f"{ELIGIBLE} and not tensor.is_leaf")),
    ("7.4", "views of nothing", (SEEN, f"        if len(tensor):\n    {SEEN}")),
    ("7.5", "256 bytes are enough", ("len(whole(tensor)) < 256", "storage.nbytes() < 256")),
    ("7.5", "unpack keeps the numbers", (UNPACK, FOUND), (VIEW, BY_CODES)),
    (
        "7.5",
        "each view keeps its numbers",
        ("return known[storage], tensor.size()", "return [known[storage]], tensor.size()"),
        (VIEW, BY_VIEW),
    ),
]
ACCEPTED = [
    (
        "7.1",
        "by amin and amax",
        ("groups.aminmax(dim=1, keepdim=True)", "(groups.amin(1, True), groups.amax(1, True))"),
    ),
    ("7.2", "compared with frac", ("< steps - down", "< steps.frac()")),
    ("7.5", "a copy of the view", (VIEW, f"{VIEW}.clone()")),
]


@each(REFUSED)
def test_what_is_wrong_is_refused(edit, tmp_path):
    assert verdict_on(edit, tmp_path).status == WRONG


@each(ACCEPTED)
def test_what_is_right_is_accepted(edit, tmp_path):
    verdict = verdict_on(edit, tmp_path)
    assert verdict.status == OK, verdict


OF_WEIGHTS = "{weight.untyped_storage() for weight in weights}"
ASKED = "if storage in seen"
LEFT_ALONE = "if storage in left_alone"
OF_EACH = "any(storage is w.untyped_storage() for w in weights)"
LOW, STEP = "(groups - smallest.float())", "torch.where(step == 0, 1, step.float())"


@pytest.mark.parametrize(
    ("id_", "change", "said"),
    [
        ("7.1", (LOW, "(groups - low)"), "All of the group come back about 0.3 below"),
        ("7.1", (STEP, f"{STEP} * 0.9"), "The larger the code, the farther off"),
        (
            "7.1",
            ("return round(steps)", "return (steps * 1)"),
            "fractions are cut off, not rounded",
        ),
        ("7.5", ("tensor.storage_offset()", "0"), "its second half, of its columns, comes back"),
        ("7.5", ("len(whole(tensor)) < 256", "False"), "Too much: float32 (8,)"),
        ("7.4", (ASKED, f"{ASKED} or {OF_EACH}"), "goes through weights 2 times; wanted once"),
        ("7.5", (LEFT_ALONE, f"{LEFT_ALONE} or {OF_EACH}"), "times; wanted once: of model.param"),
    ],
    ids=[
        *("another smallest", "another step", "cut off", "no offset", "small ones, too"),
        *("weights twice", "weights for each"),
    ],
)
def test_beside_the_numbers_a_sentence_says_what_they_have_in_common(id_, change, said, tmp_path):
    verdict = verdict_on((id_, (change,)), tmp_path)
    assert verdict.status == WRONG
    assert said in verdict.text


def test_a_name_that_two_tensors_have_is_not_taken_for_an_address(tmp_path):
    by_size = (
        ("known = weakref.WeakKeyDictionary()", "known = {}"),
        ("if storage not in known:", "if storage.nbytes() not in known:"),
        ("known[storage]", "known[storage.nbytes()]"),
    )
    verdict = verdict_on(("7.5", by_size), tmp_path, named=True)
    assert "one comes back with the other's numbers" in verdict.text
    assert "address" not in verdict.text


def test_codes_that_go_with_the_first_backward_are_told_as_that(tmp_path):
    kept = ("return known[storage], tensor.size()", "return [known[storage]], tensor.size()")
    verdict = verdict_on(
        ("7.5", (kept, (VIEW, VIEW.replace("compressed", "compressed.pop()")))), tmp_path
    )
    assert verdict.status == WRONG
    assert "a second backward through a retained graph raised IndexError" in verdict.text


# ------------------------------------------------------------------ held against the library


@pytest.mark.parametrize("bits", [8, 4, 2])
@pytest.mark.parametrize("count", [256, 1000, 5 * 256 + 1])
def test_the_lessons_codes_are_the_librarys(bits, count):
    x = torch.randn(count, generator=torch.Generator().manual_seed(count)) * 3 + 1
    kept, by_library = compress(x, bits), quantize_blockwise(x, bits=bits)
    assert torch.equal(kept.packed, by_library.codes)
    assert torch.equal(decompress(kept), dequantize_blockwise(by_library))
    assert sum(part.nbytes for part in kept[:3]) == by_library.nbytes


@pytest.mark.parametrize("bits", [8, 4, 2])
def test_what_is_packed_comes_back(bits):
    codes = torch.randint(2**bits, (1001,), dtype=torch.uint8)
    assert torch.equal(unpack(pack(codes, bits), bits, 1001), codes)


def test_rounding_at_random_is_right_in_the_mean():
    """Five standard deviations of the mean of 100,000 draws."""
    steps = torch.linspace(0, 3, 13).repeat_interleave(100_000)
    rounded = round_at_random(steps, torch.Generator().manual_seed(0))
    means = rounded.view(13, -1).mean(1)
    assert (means - torch.linspace(0, 3, 13)).abs().max() < 5 * 0.5 / 100_000**0.5


def test_the_step_reaches_the_largest_number():
    groups = torch.randn(64, 256) * 10 + 100
    _, smallest, step = quantize(groups, 255)
    low, high = groups.aminmax(dim=1, keepdim=True)
    assert (smallest.float() <= low).all()
    assert (smallest.float() + 255 * step.float() >= high - 1e-5).all()


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(64, 256), nn.Linear(256, 64)

    def forward(self, x):
        return self.down(self.up(x).tanh())


def test_the_lessons_count_of_bytes_is_the_meters():
    """Beside them there is the output, and x itself, which the test holds."""
    layer, x, seen = Layer(), torch.randn(32, 64, requires_grad=True), []
    with saved_tensors_hooks(lambda t: seen.append(t) or t, lambda t: t):
        layer(x)
    _, after = bytes_kept(seen, layer.parameters(), 8)
    seen.clear()
    outputs = []

    def forward():
        with saved_tensors_hooks(*hooks(layer.parameters(), compress, decompress)):
            outputs.append(layer(x))

    trace = memlab.measure(forward, model=layer)
    held = sum(e.bytes for e in trace.events if e.phase != "before") - outputs[0].nbytes
    assert held == after


# ------------------------------------------------------------------ what the lesson says


def parts(config, call, around, batch, seq_len, dtype, device):
    model = GPT(config, dtype=dtype).to(device)
    for block in model.blocks:
        block.forward = partial(call, block.forward)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    tokens = torch.zeros(batch, seq_len, dtype=torch.long).to(device)

    def step():
        optimizer.zero_grad()
        with around():
            loss = model(tokens, tokens)
        loss.backward()
        optimizer.step()

    return step, model, optimizer


def predicted(layers, call, around):
    config = replace(PRESETS["llama-2-7b"], layers=layers)
    trace = memlab.predict(partial(parts, config, call, around, 1, 4096, torch.bfloat16, "cuda"))
    running = accumulate(e.bytes for e in trace.events if e.category == "activations")
    return max(running), trace.peak_bytes


@pytest.mark.slow
@pytest.mark.parametrize("around", [nullcontext, compressed_activations])
@pytest.mark.parametrize("call", [lambda fn, x: fn(x), checkpoint])
def test_every_block_of_seven_billion_adds_the_same(call, around):
    """The lesson measures two and three of the 32 blocks, or one and two."""
    is_eight_bits_alone = call is not checkpoint and around is compressed_activations
    first = 2 if is_eight_bits_alone else 1
    one, two = (predicted(layers, call, around) for layers in (first, first + 1))
    all_of_them = predicted(32, call, around)
    more = 32 - first - 1
    assert all_of_them == tuple(b + more * (b - a) for a, b in zip(one, two, strict=True))


@pytest.mark.slow
def test_eight_bits_in_place_of_a_second_run_are_dearer_than_yesterdays_bill():
    """On two of the bill's eight sequences: from the second on, each is like the last."""
    setting, technique = replace(SETTING, batch=2), combined("accumulation+bfloat16")

    def in_eight_bits(checkpointed):
        def change(model):
            technique.change_model(model)
            for block in model.blocks[:checkpointed]:
                block.forward = partial(checkpoint, block.forward)

        around = replace(
            technique, change_model=change, around_forward=lambda device: compressed_activations()
        )
        return dry_trace(setting, around).peak_bytes

    nothing_again, eight_again, nine_again, all_again = map(in_eight_bits, (0, 8, 9, 12))
    assert [format_bytes(nothing_again), format_bytes(all_again)] == ["1.45 GiB", "1.37 GiB"]
    assert eight_again > nine_again == all_again  # there is room for three of the twelve


def test_the_bills_line_is_yesterdays():
    assert day07.DAY.bill.measure is attention_kept is days.day(6).bill.measure
