"""Day 17's checks accept right answers and refuse wrong ones, and the lesson's figures hold."""

import ast
from dataclasses import replace
from functools import cache, partial
from math import ceil
from statistics import NormalDist
from typing import NamedTuple

import pytest
import torch
import torch.nn.functional as F
from close import assert_close
from edited import each, verdict_on
from torch import nn

import memlab
from memlab import quantize
from memlab.course import bill, days
from memlab.course.checks import day17
from memlab.course.checks.day17 import DAY, held, matmul
from memlab.course.exercises import OK, WRONG, judge
from memlab.course.solutions import given
from memlab.lora import LoRALinear
from memlab.model import PRESETS
from memlab.planner import memory_named
from memlab.planner.repetition import extrapolate
from memlab.reference.adam8bit import dynamic_code
from memlab.reference.nf4 import OUTERMOST, decode, double_encode, encode, levels

LEVELS, ENCODE, DOUBLE, MATMUL, HELD = DAY.exercises
Setup, qlora_step, predicted, QLoRALinear = given(
    17, "Setup", "qlora_step", "predicted", "QLoRALinear"
)
SEVEN = PRESETS["llama-2-7b"]
THIRTEEN = replace(SEVEN, hidden_size=5_120, layers=40, heads=40, kv_heads=40,
                   intermediate_size=13_824)  # fmt: skip
SIXTY_FIVE = replace(SEVEN, hidden_size=8_192, layers=80, heads=64, kv_heads=64,
                     intermediate_size=22_016)  # fmt: skip


class Predicted(NamedTuple):
    """As in the lesson."""

    allocated: int
    reserved: int


def shapes_of(config):
    C, width = config.hidden_size, config.intermediate_size
    Q, K = config.heads * config.head_dim, config.kv_heads * config.head_dim
    block = [(Q, C), (K, C), (K, C), (C, Q), (width, C), (width, C), (C, width)]
    return config.layers * block


# ------------------------------------------------------------------ right answers


def by_torchs_quantiles():
    """In float32, one side after the other."""
    above, below = (torch.special.ndtri(torch.linspace(0.5, OUTERMOST, n)[1:]) for n in (9, 8))
    return torch.cat([-below.flip(0), torch.zeros(1), above]) / above[-1]


def by_the_table_of_the_other_side():
    """From the largest to the smallest, and then reversed."""
    normal = NormalDist()
    above = [normal.inv_cdf(0.5 + i * (OUTERMOST - 0.5) / 8) for i in range(8, 0, -1)]
    below = [normal.inv_cdf(0.5 - i * (OUTERMOST - 0.5) / 7) for i in range(8)]
    return torch.tensor([x / above[0] for x in [*above, 0.0, *below[1:]]]).flip(0)


def block_by_block(weight):
    """A loop over blocks; the bytes are made by arithmetic."""
    codes, found, table = [], [], levels()
    for block in weight.reshape(-1).float().split(64):
        largest = block.abs().max()
        fractions = block / largest if largest else block
        codes.append((fractions[:, None] - table).abs().argmin(1))
        found.append(largest)
    pairs = torch.cat(codes).view(-1, 2)
    return (pairs[:, 0] * 16 + pairs[:, 1]).to(torch.uint8), torch.stack(found)


def by_reciprocals(weight):
    """As bitsandbytes does: multiply by 1 / absmax."""
    rows = weight.contiguous().view(-1, 64).to(torch.float32)
    absmax, table = rows.abs().max(dim=1).values, levels()
    fractions = rows * (1 / absmax.clamp(min=1e-38))[:, None]
    codes = torch.searchsorted((table[1:] + table[:-1]) / 2, fractions).byte().flatten()
    return codes[::2] * 16 + codes[1::2], absmax


def part_by_part(absmax, codebook):
    """A loop over blocks of 256, without padding."""
    mean, codes, scales = absmax.sum() / len(absmax), [], []
    for part in (absmax - mean).split(256):
        scale = part.abs().max()
        fractions = part / scale if scale else part
        codes.append((fractions[:, None] - codebook).abs().argmin(1))
        scales.append(scale)
    return torch.cat(codes).to(torch.uint8), torch.stack(scales), mean


class SavedForBackward(torch.autograd.Function):
    """With save_for_backward, F.linear, and the shape on ctx."""

    @staticmethod
    def forward(ctx, x, codes, absmax, rows):
        ctx.save_for_backward(codes, absmax)
        ctx.shape = rows, x.shape[-1]
        return F.linear(x, decode(codes, absmax).view(ctx.shape).to(x.dtype))

    @staticmethod
    def backward(ctx, gradient):
        weight = decode(*ctx.saved_tensors).to(gradient.dtype).view(ctx.shape)
        return torch.matmul(gradient, weight), *(None,) * 3


def by_save_for_backward(x, codes, absmax, out_features):
    return SavedForBackward.apply(x, codes, absmax, out_features)


class RoundsOnce(torch.autograd.Function):
    """Multiplies in float32 and rounds the result."""

    @staticmethod
    def forward(ctx, x, codes, absmax, rows):
        ctx.decode = partial(decode, codes, absmax)
        return (x.float() @ ctx.decode().view(rows, -1).T).to(x.dtype)

    @staticmethod
    def backward(ctx, gradient):
        weight = ctx.decode().view(gradient.shape[-1], -1)
        return (gradient.float() @ weight).to(gradient.dtype), None, None, None


def in_float32(x, codes, absmax, out_features):
    return RoundsOnce.apply(x, codes, absmax, out_features)


def by_ceil(shapes, others, rank, prepared):
    sizes = [rows * columns for rows, columns in shapes]
    per_matrix = [ceil(n / 2) + ceil(n / 64) + 4 * ceil(ceil(n / 64) / 256) + 4 for n in sizes]
    adapters = sum(rank * rows + rank * columns for rows, columns in shapes)
    counts = sum(per_matrix), others * (2, 4)[prepared], adapters * 4, adapters * (4 + 8)
    return dict(zip(("codes", "others", "adapters", "training"), counts, strict=True))


def by_distance(absmax, codebook):
    """The nearest entry by all distances, and a divisor that is never 0."""
    mean = torch.mean(absmax)
    blocks = (absmax - mean).split(256)
    scales = torch.stack([block.abs().max() for block in blocks])
    zero = int(codebook.abs().argmin())
    codes = [
        torch.full((len(block),), zero)
        if scale == 0
        else (block[:, None] - codebook * scale).abs().argmin(1)
        for block, scale in zip(blocks, scales, strict=True)
    ]
    return torch.cat(codes).to(torch.uint8), scales, mean


@pytest.mark.parametrize(
    ("exercise", "answer"),
    [
        (LEVELS, by_torchs_quantiles),
        (LEVELS, by_the_table_of_the_other_side),
        (ENCODE, block_by_block),
        (ENCODE, by_reciprocals),
        (DOUBLE, part_by_part),
        (DOUBLE, by_distance),
        (MATMUL, by_save_for_backward),
        (MATMUL, in_float32),
        (HELD, by_ceil),
    ],
    ids=lambda value: getattr(value, "__name__", getattr(value, "id", None)),
)
def test_a_correct_answer_written_differently_passes(exercise, answer):
    verdict = judge(exercise, answer)
    assert verdict.status == OK, verdict


# ------------------------------------------------------------------ wrong answers


def through_the_library(weight):
    q = quantize.quantize_nf4(weight, double=False)
    return q.codes, q.absmax


def held_by_the_library(shapes, others, rank, prepared):
    found = by_ceil(shapes, others, rank, prepared)
    return found | {"codes": sum(quantize.nf4_bytes(a * b) for a, b in shapes)}


def doubled_by_the_library(absmax, codebook):
    kept = quantize.quantize_blockwise(absmax - absmax.mean(), codebook=codebook)
    return kept.codes, kept.scales, absmax.mean()


@pytest.mark.parametrize(
    ("exercise", "answer"),
    [
        (LEVELS, quantize.nf4_code),
        (ENCODE, through_the_library),
        (DOUBLE, doubled_by_the_library),
        (HELD, held_by_the_library),
    ],
    ids=["17.1", "17.2", "17.3", "17.5"],
)
def test_calling_the_library_is_refused(exercise, answer):
    verdict = judge(exercise, answer)
    assert verdict.status == WRONG
    assert "memlab.quantize." in verdict.text
    assert "which this exercise rebuilds" in verdict.text


def test_calling_bitsandbytes_is_refused():
    functional = pytest.importorskip("bitsandbytes.functional")

    def answer(weight):
        codes, state = functional.quantize_4bit(weight, blocksize=64, quant_type="nf4")
        return codes.flatten(), state.absmax

    verdict = judge(ENCODE, answer)
    assert verdict.status == WRONG
    assert "Your answer calls bitsandbytes.functional.quantize_4bit" in verdict.text


def writes_into_the_weight(weight):
    found = encode(weight)
    weight.zero_()
    return found


def a_slice(weight):
    codes, absmax = encode(weight)
    return torch.cat([codes, codes])[: len(codes)], absmax


def keeps_x_on_ctx(x, codes, absmax, out_features):
    out = matmul(x, codes, absmax, out_features)
    out.grad_fn.kept = x
    return out


DECODED = {}


def keeps_the_weight_elsewhere(x, codes, absmax, out_features):
    DECODED[len(DECODED)] = decode(codes, absmax)
    return matmul(x, codes, absmax, out_features)


def in_float64(x, codes, absmax, out_features):
    weight = decode(codes, absmax).view(out_features, -1).double()
    return matmul(x, codes, absmax, out_features) + (0 * x.double() @ weight.T).to(x.dtype)


@pytest.mark.parametrize(
    ("exercise", "answer", "said"),
    [
        (LEVELS, lambda: levels().tolist(), "gave a list; wanted a tensor"),
        (LEVELS, lambda: levels().flip(0), "wanted entries that increase"),
        (LEVELS, lambda: -levels().flip(0), "You swapped the sides"),
        (LEVELS, lambda: levels() + torch.nan, "has no 0"),
        (ENCODE, writes_into_the_weight, "changes the values of weight"),
        (ENCODE, a_slice, "bytes alive"),
        (ENCODE, lambda weight: encode(weight)[::-1], "codes, gave a tensor of dtype"),
        (DOUBLE, lambda *a: double_encode(*a)[:2], "wanted a tuple of codes, scales and the mean"),
        (MATMUL, keeps_x_on_ctx, "keeps x for backward"),
        (MATMUL, keeps_the_weight_elsewhere, "between forward and backward"),
        (MATMUL, in_float64, "saves 1 tensor for backward"),
        (MATMUL, lambda *a: matmul(*a).detach(), "no gradient of x"),
        (MATMUL, lambda *a: 1.01 * matmul(*a), "elements are wrong."),
        (HELD, lambda *a: held(*a)["codes"], "wanted a dictionary"),
        (HELD, lambda *a: {k: float(v) for k, v in held(*a).items()}, "a float"),
    ],
)
def test_other_wrong_answers_are_refused(exercise, answer, said):
    verdict = judge(exercise, answer)
    DECODED.clear()
    assert verdict.status == WRONG
    assert said in verdict.text


FLAT = "weight.flatten().float().view(-1, BLOCK)"
PACKED = "first << 4 | second"
PADDED = "(0, -len(absmax) % 256)"
FORWARD = "decode(codes, absmax).view(out_features, -1).to(x.dtype).T"

REFUSED = [
    ("17.1", "one side is divided by its own spacing", ("/ count", "/ 8")),
    ("17.1", "in float16 on the way", ("found / found.max()", "(found / found.max()).half()")),
    ("17.2", "padding of a block", (FLAT, FLAT.replace("weight", "weight.view(-1)"))),
    ("17.2", "16 levels in 16-bit codes", ("torch.uint8", "torch.int16")),
    ("17.2", "absmax of the first block", ("blocks.abs().amax(1)", "blocks[:1].abs().amax(1)")),
    ("17.2", "absmax of 1 for zeros", (", absmax\n", ", absmax.where(absmax > 0, 1)\n")),
    ("17.2", "the fourth bit is lost", (PACKED, "first << 4 | second & 7")),
    ("17.3", "padding with ones", (PADDED, f"{PADDED}, value=1.0")),
    ("17.3", "blocks of 128", ("% 256", "% 128"), ("view(-1, 256)", "view(-1, 128)")),
    ("17.3", "int32 codes", ("torch.uint8", "torch.int32")),
    ("17.4", "W from memory, once", ("decode(*ctx.weight)", "Matmul.__dict__.get('w', 0) or 1")),
    ("17.4", "W is rounded to float16", (FORWARD, FORWARD.replace(".to(x", ".half().to(x"))),
    ("17.5", "two scales at least", ("-(-blocks // 256)", "max(2, -(-blocks // 256))")),
    ("17.5", "adapters on one side", ("rows + columns", "2 * rows")),
]
ACCEPTED = [
    ("17.1", "a longer loop", ("range(1, count + 1)", "range(1, 1 + count, 1)")),
    ("17.2", "reshape", (FLAT, "weight.reshape(-1, 64).to(torch.float32)")),
    ("17.2", "a sum", (PACKED, "(first << 4) + second")),
    ("17.3", "flattened after the cut", ("codes.flatten()", "codes.reshape(-1)")),
    ("17.4", "a method", ("x @ ", "x.matmul("), (".to(x.dtype).T", ".to(x.dtype).T)")),
]  # fmt: skip


@each(REFUSED)
def test_a_wrong_edit_is_refused(edit, tmp_path):
    assert verdict_on(edit, tmp_path).status == WRONG


@each(ACCEPTED)
def test_a_correct_edit_is_accepted(edit, tmp_path):
    verdict = verdict_on(edit, tmp_path)
    assert verdict.status == OK, verdict


# ------------------------------------------------------------------ the library and bitsandbytes


def normal(*shape):
    return torch.randn(shape, generator=torch.Generator().manual_seed(0))


def test_the_lessons_levels_are_the_librarys_up_to_the_last_bit():
    assert_close(levels(), quantize.nf4_code())


def test_the_lessons_codes_are_the_librarys():
    weight = 0.02 * normal(1024, 1024)
    codes, absmax = encode(weight)
    library = quantize.quantize_nf4(weight, double=False)
    assert torch.equal(codes, library.codes)
    assert torch.equal(absmax, library.absmax)
    small, scales, mean = double_encode(absmax, dynamic_code(True))
    double = quantize.quantize_nf4(weight)
    assert (small == double.absmax).float().mean() > 0.999
    assert torch.equal(scales, double.scales)
    assert torch.equal(mean, double.mean)


def test_the_lessons_codes_are_those_of_bitsandbytes():
    functional = pytest.importorskip("bitsandbytes.functional")
    weight = 0.02 * normal(1024, 1024)
    codes, absmax = encode(weight)
    packed, state = functional.quantize_4bit(weight, blocksize=64, quant_type="nf4")
    assert torch.equal(packed.flatten(), codes)
    assert torch.equal(state.absmax, absmax)
    assert torch.equal(state.code, quantize.nf4_code())
    small, scales, _ = double_encode(absmax, dynamic_code(True))
    _, double = functional.quantize_4bit(
        weight, blocksize=64, quant_type="nf4", compress_statistics=True
    )
    assert torch.equal(double.state2.absmax, scales)
    assert 0.995 < (double.absmax == small).float().mean() < 1  # the lesson says: a few differ


def test_the_lessons_layer_has_the_librarys_gradients():
    linear, x = nn.Linear(192, 320, bias=False), normal(64, 192)
    mine = QLoRALinear(linear, 4, 8)
    model = nn.Sequential(linear)
    memlab.qlora.add_qlora(model, 4, double=False)
    library = next(m for m in model.modules() if isinstance(m, LoRALinear))
    nn.init.normal_(library.up, std=0.1)
    mine.A.data, mine.B.data = library.down.data.clone(), library.up.data.clone()
    for layer in (mine, model):
        layer(x).square().mean().backward()
    for own, other in ((mine.A, library.down), (mine.B, library.up)):
        assert_close(own.grad, other.grad)


# ------------------------------------------------------------------ figures of the lesson


@cache
def source() -> ast.Module:
    path = days.notebook(17, "solutions").with_suffix(".py")
    return ast.parse(path.read_text(encoding="utf-8"))


@cache
def constant(name: str):
    """Evaluate a table of the lesson."""
    assigned = [
        node.value
        for node in ast.walk(source())
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == name
    ]
    names = {"Setup": Setup, "Predicted": Predicted}
    names |= {
        n: constant(n) for n in ("STEPS", "BEST") if n != name and n in ast.unparse(*assigned)
    }
    return eval(compile(ast.Expression(*assigned), name, "eval"), names)


def rows() -> dict[str, tuple]:
    """Every prediction that the lesson states: (config, setup, batch, length), bytes."""
    best = constant("BEST")
    found = {
        f"7B {name}": ((SEVEN, setup, 4, 1024), step)
        for name, (setup, step) in constant("STEPS").items()
    }
    found |= {
        f"7B {at}": ((SEVEN, best, *at), step)
        for at, step in constant("GROWN").items()
        if at != (4, 1024)
    }
    ends = replace(constant("STEPS")["+ checkpointing"][0], ends=True)
    found["7B ends"] = (SEVEN, ends, 4, 1024), constant("ENDS")
    for name, (setup, step) in constant("BIG").items():
        config = THIRTEEN if name.startswith("13B") else SIXTY_FIVE
        batch, length = (4, 1024) if config is THIRTEEN else (1, 512)
        found[name] = (config, setup, batch, length), step
    return found


ROWS = rows()


def deep_trace(config, setup, batch, length):
    """Predict with four and with five blocks, and add the others event by event."""
    traces = (
        memlab.predict(partial(qlora_step, replace(config, layers=n), setup, batch, length))
        for n in (4, 5)
    )
    return extrapolate(*traces, 5, config.layers)


@pytest.mark.slow
@pytest.mark.parametrize("name", ROWS)
def test_the_lessons_tables_are_predicted(name):
    step, stated = ROWS[name]
    trace = deep_trace(*step)
    assert (trace.allocated_bytes, trace.reserved_bytes) == (stated.allocated, stated.reserved)


@pytest.mark.slow
def test_two_blocks_and_all_blocks_give_the_same_peak():
    step, stated = ROWS["7B a plain loop"]
    whole = memlab.predict(partial(qlora_step, *step))
    assert (whole.allocated_bytes, whole.reserved_bytes) == (stated.allocated, stated.reserved)
    assert predicted(*step) == (whole.allocated_bytes, whole.at_peak)


def test_the_table_says_what_the_text_says():
    steps = [step.allocated for _, step in constant("STEPS").values()]
    assert steps == sorted(steps, reverse=True)
    rtx4060, rtx4080, rtx4090, a6000 = (
        memory_named(name).budget_bytes for name in ("rtx4060", "rtx4080", "rtx4090", "a6000")
    )
    grown = constant("GROWN")
    assert grown[1, 512].reserved <= rtx4060
    assert grown[16, 1024].reserved <= rtx4090 < grown[32, 1024].reserved
    big = constant("BIG")
    assert big["13B, 4 × 1,024, logits in chunks"][1].reserved <= rtx4080
    assert big["65B, 1 × 512, logits in chunks"][1].reserved <= a6000


def test_the_models_of_the_table_have_their_sizes():
    assert f"{THIRTEEN.parameters / 1e9:.1f}" == "13.0"
    assert f"{SIXTY_FIVE.parameters / 1e9:.1f}" == "65.3"
    ends = 2 * SEVEN.vocab_size * SEVEN.hidden_size
    assert f"{ends / 1e6:.0f}" == "262"
    quantized = sum(a * b for a, b in shapes_of(SEVEN))
    assert f"{4 * quantized / 64 / 2**20:.0f}" == "386"  # MiB of absmax in float32


def test_the_formula_is_what_the_meter_sees():
    config = replace(PRESETS["tiny"], tied=False)
    for prepared in (True, False):
        step, model, optimizer = qlora_step(config, Setup(prepared), 1, 16, device="cpu")
        step()
        trace = memlab.measure(step, model=model, optimizer=optimizer)
        shapes = shapes_of(config)
        others = config.parameters - sum(a * b for a, b in shapes)
        found = held(shapes, others, 16, prepared)
        tables = 4 * (16 + 256) + 2 * config.seq_len * config.head_dim
        assert trace.at_end["buffers"] == found["codes"] + tables
        assert trace.at_end["parameters"] == found["others"] + found["adapters"]
        counters = 4 * sum(w.requires_grad for w in model.parameters())
        learning = trace.at_end["gradients"] + trace.at_end["optimizer_state"] - counters
        assert learning == found["training"]


def test_the_bill_is_day_16s():
    before, now = (bill.stored(days.day(n).bill) for n in (16, 17))
    assert before.at_peak == now.at_peak
    assert day17.DAY.bill.measure is days.day(16).bill.measure
