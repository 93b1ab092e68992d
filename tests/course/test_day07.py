"""Day 7's checks accept right answers written differently, and agree with the meter."""

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
stochastic_round, pack = solution("7.2"), solution("7.3")


# ------------------------------------------------------------------ right, written differently


def group_by_group(groups, levels, round=torch.round):
    """A loop over groups."""
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
    """As ActNN does it. One draw in 2**24 is 0, and rounds 3.0 − 0.5 to the even 2."""
    return (steps + torch.rand(steps.shape, generator=generator) - 0.5).round()


def by_uniform_noise(steps, generator):
    noise = torch.empty_like(steps).uniform_(-0.5, 0.5, generator=generator)
    return torch.round(steps + noise)


def by_bernoulli(steps, generator):
    return steps.floor() + torch.bernoulli(steps.frac(), generator=generator)


def in_columns(codes, bits):
    """Padded with zeros, one row per byte, in int64."""
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
    """torch's weak dictionary, classes, and codes that only the graph keeps alive."""
    weights, known = [w.untyped_storage() for w in weights], WeakIdKeyDictionary()

    class Kept:
        def __init__(self, compressed, view):
            self.compressed, self.view = compressed, view

    class Shared:
        def __init__(self, values):
            self.compressed = compress(values)

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
        (ROUND, by_uniform_noise),
        (ROUND, by_bernoulli),
        (BYTES_KEPT, by_a_dict_of_storages),
        (HOOKS, with_classes),
    ],
    ids=lambda value: getattr(value, "__name__", getattr(value, "id", None)),
)
def test_a_right_answer_written_differently_passes(exercise, answer):
    verdict = judge(exercise, answer)
    assert verdict.status == OK, verdict


def test_packing_in_int64_is_refused_with_the_rule():
    assert "wanted at most 16,384: stay in uint8." in judge(PACK, in_columns).text


# ------------------------------------------------------------------ wrong in another way


def by_the_library(groups, levels, round=torch.round):
    q = quantize_blockwise(groups, bits=8)
    return q.codes.view(-1, 256), q.offsets.view(-1, 1), q.scales.view(-1, 1)


def a_list_beside(weights, compress, decompress):
    """A list in the closure keeps the originals."""
    originals = []

    def compress_and_keep(values):
        originals.append(values)
        return compress(values)

    return hooks(weights, compress_and_keep, decompress)


def exact_below(weights, compress, decompress):
    """The codes are never read: the tensors come back as they were."""
    held = {}
    pack, _ = hooks(weights, compress, decompress)

    def pack_both(tensor):
        held[len(held)] = tensor.detach()
        return pack(tensor), len(held) - 1

    return pack_both, lambda kept: held[kept[1]]


def mostly_exact(weights, compress, decompress):
    """Halfway between decompress's values and the exact ones, if the two are close."""
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
    ("exercise", "answer", "message"),
    [
        (
            QUANTIZE,
            by_the_library,
            "Your answer calls memlab.quantize.blockwise.quantize_blockwise,",
        ),
        (HOOKS, a_list_beside, "393,580 bytes"),
        (HOOKS, exact_below, "bytes between forward and backward"),
        (HOOKS, mostly_exact, "with a decompress that returns 8 bits"),
    ],
)
def test_another_mistake_is_refused_with_its_message(exercise, answer, message):
    verdict = judge(exercise, answer)
    assert verdict.status == WRONG
    assert message in verdict.text


# ------------------------------------------------------------------ the solution, edited

SMALLEST, STEP_IN = "smallest = as_bfloat16(low, -inf)", "torch.where(step == 0, 1, step.float())"
STEPS = "(groups - smallest.float())"
CODES = "round(steps).clamp(0, levels).to(torch.uint8)"
DOWN, IS_UP = "return down", "< steps - down)"
DRAWN = "torch.rand(steps.shape, generator=generator)"
PART = "        packed[: len(part)] |= part << place * bits"
UNPACK, VIEW = "    def unpack(kept):", "        return decompress(compressed).as_strided(*view)"
BY_CODES = """        if id(compressed) not in found:
            found[id(compressed)] = decompress(compressed)
        return found[id(compressed)].as_strided(*view)"""
BY_VIEW = """        if len(compressed) == 1:
            compressed.append(decompress(compressed[0]))
        return compressed[1].as_strided(*view)"""
FOUND = f"    found = {{}}\n\n{UNPACK}"
LIST_OF_CODES = ("return known[storage], tensor.size()", "return [known[storage]], tensor.size()")
ELIGIBLE = "tensor.requires_grad and count >= 256"
SEEN = "        seen.add(storage)"

REFUSED = [
    (
        "7.1",
        "0 / 0 in a group of ones",
        ("torch.where(step == 0,", "torch.where((low == 0) & (high == 0),"),
    ),
    (
        "7.2",
        "256 different draws",
        (
            "torch.rand(steps.shape, generator=generator)",
            "torch.randint(256, steps.shape, generator=generator) / 256",
        ),
    ),
    ("7.2", "draws in half precision", ("generator=generator)", "generator=generator).half()")),
    (
        "7.4",
        "weights by their first address",
        (
            "{weight.untyped_storage() for weight in weights}",
            "{weight.data_ptr() for weight in weights}; ours = set()",
        ),
        ("if storage in seen:", "if storage in ours or tensor.data_ptr() in seen:"),
        ("seen.add(storage)", "ours.add(storage)"),
    ),
    ("7.1", "another default of round", ("round=torch.round", "round=torch.floor")),
    ("7.1", "elements of 0 are not divided", ("where(step == 0,", "where(groups == 0,")),
    ("7.1", "groups up to 0 are not divided", ("where(step == 0,", "where(high == 0,")),
    (
        "7.1",
        "overflow above 65,504",
        ("(groups - smallest.float())", "(groups - smallest.half())"),
    ),
    (
        "7.1",
        "no step where all elements are equal",
        ("steps = (groups", "step = torch.where(high == low, 0 * step, step)\n    steps = (groups"),
    ),
    ("7.1", "a step of at least 1e-9", (STEP_IN, "step.float().clamp(min=1e-9)")),
    ("7.1", "cast to int32", (CODES, "steps.to(torch.int32).clamp(0, levels).to(torch.uint8)")),
    ("7.1", "codes in float32", (".to(torch.uint8)", "")),
    ("7.1", "two float32 per group", (SMALLEST, "smallest = low")),
    (
        "7.1",
        "0 / 0 is replaced later",
        (STEP_IN, "step.float()"),
        ("(steps)", "(steps).nan_to_num()"),
    ),
    ("7.1", "writes into groups", (STEPS, "groups.sub_(smallest.float())")),
    ("7.2", "rounds up at a draw of 0", ("< steps - down", "<= steps - down")),
    ("7.2", "codes in bytes", (DOWN, "return (down"), (IS_UP, f"{IS_UP}).to(torch.uint8)")),
    (
        "7.2",
        "noise alone",
        (DOWN, f"return steps + {DRAWN} - 0.5 + 0 * (down"),
        (IS_UP, f"{IS_UP})"),
    ),
    ("7.2", "down in int32", ("steps.floor()", "steps.int()")),
    ("7.2", "at most 255", ("return down", "return down.clamp(max=254)")),
    ("7.2", "writes into steps", ("< steps - down", "< steps.sub_(down)")),
    ("7.2", "one draw per row", ("steps.shape,", "(*steps.shape[:1], *[1] * (steps.dim() - 1)),")),
    (
        "7.2",
        "seeds the global state",
        (f"({DRAWN}", "(torch.manual_seed(generator.seed()) and torch.rand(steps.shape)"),
    ),
    (
        "7.2",
        "a fixed sequence, shifted",
        (
            "    down =",
            "    fixed = torch.rand(steps.shape, generator=torch.Generator())\n    down =",
        ),
        (DRAWN, "(fixed + torch.rand((), generator=generator)) % 1"),
    ),
    ("7.3", "codes in int32", ("torch.uint8", "torch.int32"), ("part <<", "part.int() <<")),
    ("7.3", "a byte per code", ("return packed", "return codes.clone()")),
    (
        "7.3",
        "a slice of a longer buffer",
        ("-(-len(codes) // per_byte)", "len(codes)"),
        ("return packed", "return packed[: -(-len(codes) // per_byte)]"),
    ),
    (
        "7.3",
        "shifts in place",
        (PART, f"        part <<= place * bits\n{PART}"),
        ("part << place * bits", "part"),
    ),
    ("7.4", "256 elements are too few", (ELIGIBLE, ELIGIBLE.replace(">=", ">"))),
    ("7.4", "an input stays", (ELIGIBLE, f"{ELIGIBLE} and not tensor.is_leaf")),
    ("7.4", "empty views", (SEEN, f"        if len(tensor):\n    {SEEN}")),
    ("7.4", "four bytes per element", ("// tensor.itemsize", "// 4")),
    (
        "7.5",
        "codes shared with the next pair of hooks",
        ("decompress):", "decompress, known=weakref.WeakKeyDictionary()):"),
        ("    known = weakref.WeakKeyDictionary()\n", ""),
    ),
    (
        "7.5",
        "unpack keeps its argument",
        (f"{UNPACK}\n", f"    seen = []\n\n{UNPACK}\n        seen.append(kept)\n"),
    ),
    (
        "7.5",
        "leaves left alone",
        (" or not tensor.requires_grad", " or not tensor.requires_grad or tensor.is_leaf"),
    ),
    ("7.5", "small tensors, too", (" or len(whole(tensor)) < 256", "")),
    ("7.5", "values in float32", ("compress(whole(tensor))", "compress(whole(tensor).float())")),
    ("7.5", "256 bytes are enough", ("len(whole(tensor)) < 256", "storage.nbytes() < 256")),
    ("7.5", "unpack keeps the values", (UNPACK, FOUND), (VIEW, BY_CODES)),
    ("7.5", "each view keeps its values", LIST_OF_CODES, (VIEW, BY_VIEW)),
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
def test_a_wrong_answer_is_refused(edit, tmp_path):
    assert verdict_on(edit, tmp_path).status == WRONG


@each(ACCEPTED)
def test_a_right_answer_is_accepted(edit, tmp_path):
    verdict = verdict_on(edit, tmp_path)
    assert verdict.status == OK, verdict


OF_EACH = "any(storage is w.untyped_storage() for w in weights)"
IS_SEEN, IS_LEFT = "if storage in seen", "if storage in left_alone"


@pytest.mark.parametrize(
    ("id_", "changes", "message"),
    [
        ("7.1", [(STEPS, "(groups - low)")], "The whole group comes back about 0.3 below"),
        (
            "7.1",
            [("return round(steps)", "return (steps * 1)")],
            "fractions are cut off, not rounded",
        ),
        (
            "7.1",
            [("round(steps)", "torch.round(steps)")],
            "call the function `round` that you are given",
        ),
        ("7.5", [("tensor.storage_offset()", "0")], "the second half of its columns comes back"),
        ("7.5", [("len(whole(tensor)) < 256", "False")], "Too much: float32 (8,)"),
        ("7.4", [(IS_SEEN, f"{IS_SEEN} or {OF_EACH}")], "over weights 2 times; wanted once"),
        ("7.5", [(IS_LEFT, f"{IS_LEFT} or {OF_EACH}")], "times; wanted once: model.parameters()"),
        (
            "7.5",
            [LIST_OF_CODES, (VIEW, VIEW.replace("compressed", "compressed.pop()"))],
            "a second backward through a retained graph raised IndexError",
        ),
    ],
)
def test_a_message_says_which_pattern_the_errors_have(id_, changes, message, tmp_path):
    verdict = verdict_on((id_, tuple(changes)), tmp_path)
    assert verdict.status == WRONG
    assert message in verdict.text


def test_a_key_that_two_tensors_share_is_not_taken_for_an_address(tmp_path):
    by_size = (
        ("known = weakref.WeakKeyDictionary()", "known = {}"),
        ("if storage not in known:", "if storage.nbytes() not in known:"),
        ("known[storage]", "known[storage.nbytes()]"),
    )
    verdict = verdict_on(("7.5", by_size), tmp_path, named=True)
    assert "one comes back with the other's values" in verdict.text
    assert "address" not in verdict.text


# ------------------------------------------------------------------ compared with the library


@pytest.mark.parametrize("bits", [8, 4, 2])
@pytest.mark.parametrize("count", [256, 1000, 5 * 256 + 1])
def test_the_lessons_codes_are_the_librarys(bits, count):
    x = torch.randn(count, generator=torch.Generator().manual_seed(count)) * 3 + 1
    kept, by_library = compress(x, bits), quantize_blockwise(x, bits=bits)
    assert torch.equal(kept.packed, by_library.codes)
    assert torch.equal(decompress(kept), dequantize_blockwise(by_library))
    assert sum(part.nbytes for part in kept[:3]) == by_library.nbytes


@pytest.mark.parametrize("bits", [8, 4, 2])
def test_packed_codes_come_back(bits):
    codes = torch.randint(2**bits, (1001,), dtype=torch.uint8)
    assert torch.equal(unpack(pack(codes, bits), bits, 1001), codes)


def test_stochastic_rounding_is_unbiased():
    """Five standard deviations of the mean of 100,000 draws."""
    steps = torch.linspace(0, 3, 13).repeat_interleave(100_000)
    rounded = stochastic_round(steps, torch.Generator().manual_seed(0))
    means = rounded.view(13, -1).mean(1)
    assert (means - torch.linspace(0, 3, 13)).abs().max() < 5 * 0.5 / 100_000**0.5


def test_the_levels_reach_the_maximum():
    groups = torch.randn(64, 256) * 10 + 100
    _, smallest, step = quantize(groups, 255)
    low, high = groups.aminmax(dim=1, keepdim=True)
    assert (smallest.float() <= low).all()
    assert (smallest.float() + 255 * step.float() >= high - 1e-5).all()


class TanhLayer(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(64, 256), nn.Linear(256, 64)

    def forward(self, x):
        return self.down(self.up(x).tanh())


def test_the_lessons_count_of_bytes_is_the_meters():
    """The output and x, which the test holds, are not counted."""
    layer, x, seen = TanhLayer(), torch.randn(32, 64, requires_grad=True), []
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


# ------------------------------------------------------------------ claims of the lesson


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
def test_every_block_of_a_7b_model_adds_the_same_bytes(call, around):
    """The lesson measures models of two and three of the 32 blocks, or of one and two."""
    is_eight_bits_alone = call is not checkpoint and around is compressed_activations
    first = 2 if is_eight_bits_alone else 1
    one, two = (predicted(layers, call, around) for layers in (first, first + 1))
    all_of_them = predicted(32, call, around)
    more = 32 - first - 1
    assert all_of_them == tuple(b + more * (b - a) for a, b in zip(one, two, strict=True))


@pytest.mark.slow
def test_eight_bits_instead_of_recomputation_have_a_higher_peak_than_day_6():
    """On two of the bill's eight sequences: the others are like the second."""
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


def test_the_bill_is_day_6s():
    assert day07.DAY.bill.measure is attention_kept is days.day(6).bill.measure
