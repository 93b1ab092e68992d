"""Day 17: what its checks tell a learner, and what the lesson claims."""

from dataclasses import replace
from functools import partial
from typing import NamedTuple

import pytest
import torch
from close import assert_close
from lesson_parts import lesson_part
from torch import nn

import memlab
from memlab import quantize
from memlab.course.checks.day17 import DAY, held
from memlab.course.exercises import WRONG, judge
from memlab.course.solutions import given
from memlab.lora import LoRALinear
from memlab.model import PRESETS
from memlab.planner import memory_named
from memlab.planner.repetition import extrapolate
from memlab.reference.adam8bit import dynamic_code
from memlab.reference.nf4 import double_encode, encode, levels

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


# ------------------------------------------------------------------ answers


def test_calling_bitsandbytes_is_refused():
    functional = pytest.importorskip("bitsandbytes.functional")

    def answer(weight):
        codes, state = functional.quantize_4bit(weight, blocksize=64, quant_type="nf4")
        return codes.flatten(), state.absmax

    verdict = judge(ENCODE, answer)
    assert verdict.status == WRONG
    assert "Your answer calls bitsandbytes.functional.quantize_4bit" in verdict.text


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


STEPS, BEST, GROWN, ENDS, BIG = lesson_part(
    17, "STEPS", "BEST", "GROWN", "ENDS", "BIG", Setup=Setup, Predicted=Predicted
)


def rows() -> dict[str, tuple]:
    """Every prediction that the lesson states: (config, setup, batch, length), bytes."""
    found = {f"7B {name}": ((SEVEN, setup, 4, 1024), step) for name, (setup, step) in STEPS.items()}
    found |= {
        f"7B {at}": ((SEVEN, BEST, *at), step) for at, step in GROWN.items() if at != (4, 1024)
    }
    ends = replace(STEPS["+ checkpointing"][0], ends=True)
    found["7B ends"] = (SEVEN, ends, 4, 1024), ENDS
    for name, (setup, step) in BIG.items():
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
    steps = [step.allocated for _, step in STEPS.values()]
    assert steps == sorted(steps, reverse=True)
    rtx4060, rtx4080, rtx4090, a6000 = (
        memory_named(name).budget_bytes for name in ("rtx4060", "rtx4080", "rtx4090", "a6000")
    )
    assert GROWN[1, 512].reserved <= rtx4060
    assert GROWN[16, 1024].reserved <= rtx4090 < GROWN[32, 1024].reserved
    assert BIG["13B, 4 × 1,024, logits in chunks"][1].reserved <= rtx4080
    assert BIG["65B, 1 × 512, logits in chunks"][1].reserved <= a6000


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
