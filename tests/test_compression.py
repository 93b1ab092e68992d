"""Compressed activations: exact bytes, and gradient errors within the expected bounds."""

import math
from contextlib import nullcontext
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from quick import quick, slow
from torch import nn
from torch.utils.checkpoint import checkpoint as torch_checkpoint

import memlab
from memlab import compression
from memlab.attention import attention_reference, flash_attention
from memlab.checkpointing import checkpoint
from memlab.compression import (
    compressed_activations,
    kind_of,
    pack_bools,
    shift_down_,
    shift_up,
    two_values,
    unpack_bools,
)
from memlab.data import batches, source_bytes
from memlab.internals.saved_tensors import TensorInfo
from memlab.model import GPT, PRESETS, GPTConfig
from memlab.quantize import dequantize_blockwise, quantize_blockwise
from memlab.train import Plugs, Setting, build, dry_trace, measured

B, T, C = 8, 128, 128
CONFIG = GPTConfig(256, C, layers=1, heads=4, kv_heads=2, intermediate_size=3 * C, seq_len=T)


def our_block() -> nn.Module:
    return GPT(CONFIG).blocks[0]


def eager_block() -> nn.Module:
    return GPT(CONFIG, attention=attention_reference).blocks[0]


def torchs_block() -> nn.Module:
    """With ReLU, and dropout of 0.1 in three places and in attention."""
    return nn.TransformerEncoderLayer(C, 4, 3 * C, batch_first=True).train()


BLOCKS = [our_block, eager_block, torchs_block]


def seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def gradients(make, around) -> torch.Tensor:
    """Return all gradients of a block as one float64 vector, for fixed data and dropout masks."""
    torch.manual_seed(0)
    block = make()
    x, upstream = torch.randn(2, B, T, C).unbind()
    x.requires_grad_()
    with around:
        out = block(x)
    result = torch.autograd.grad(out, [x, *block.parameters()], upstream)
    return torch.cat([gradient.flatten().double() for gradient in result])


def relative_error(result: torch.Tensor, exact: torch.Tensor) -> float:
    return ((result - exact).norm() / exact.norm()).item()


def encoded_bytes(numel: int, bits: int = 8) -> int:
    return math.ceil(numel * bits / 8) + 4 * math.ceil(numel / 256)


def activation_bytes(forward, around, model=None) -> int:
    """Return bytes alive between forward and backward, without `forward`'s result."""
    graphs = []

    def step() -> None:
        with around:
            graphs.append(forward().grad_fn)  # the graph, not the value

    events = memlab.measure(step, model=model).events
    return sum(event.bytes for event in events if event.phase == "forward")


# ------------------------------------------------------------------ gradients


@pytest.mark.parametrize("make", BLOCKS)
def test_gradients_at_8_bits_are_within_a_percent(make):
    exact = gradients(make, nullcontext())
    result = gradients(make, compressed_activations(bits=8))
    assert 0.001 < relative_error(result, exact) < 0.01
    assert torch.cosine_similarity(result, exact, dim=0) > 0.9999


@pytest.mark.parametrize("make", quick([our_block], [our_block, torchs_block]))
@pytest.mark.parametrize("bits", quick([2], [8, 4, 2]))
def test_the_mean_of_16_stochastic_draws_has_a_third_of_the_error(make, bits):
    exact = gradients(make, nullcontext())
    draws = [
        gradients(make, compressed_activations(bits, mode="stochastic", generator=seeded(n)))
        for n in range(16)
    ]
    one = relative_error(draws[0], exact)
    assert relative_error(torch.stack(draws).mean(0), exact) < one / 3


@pytest.mark.parametrize("make", BLOCKS)
def test_the_forward_pass_is_bitwise_equal(make):
    def out(around) -> torch.Tensor:
        torch.manual_seed(0)
        block, x = make(), torch.randn(B, T, C)
        with around:
            return block(x).detach()

    assert torch.equal(out(nullcontext()), out(compressed_activations(bits=2)))


@pytest.mark.slow
def test_training_on_text_at_8_bits_changes_the_loss_by_less_than_a_percent():
    def final_loss(around) -> float:
        torch.manual_seed(0)
        model = GPT(PRESETS["tiny"])
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        drawn = batches(source_bytes("256 KiB"), 4, 64, seed=0)
        losses = []
        for _ in range(80):
            optimizer.zero_grad()
            with around():
                loss = model(*next(drawn))
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        return sum(losses[-20:]) / 20

    exact, result = final_loss(nullcontext), final_loss(compressed_activations)
    assert exact < 4  # the loss started at 5.5
    assert result != exact
    assert result == pytest.approx(exact, rel=0.01)


# ------------------------------------------------------------------ bytes


@pytest.mark.parametrize("bits", [8, 4, 2])
@pytest.mark.parametrize("shape", [(32, 64), (3, 5, 7, 11), (256 * 5 + 1,)])
def test_each_storage_takes_bits_over_8_per_element_and_4_per_group(bits, shape):
    x = torch.randn(shape, requires_grad=True)

    def forward() -> torch.Tensor:
        y = x * 2
        return (
            y.sin()
            + y.cos()
            + y.flatten().exp().view(shape)
            + (y.mT if y.dim() > 1 else y).sin().sum()
        )

    got = activation_bytes(forward, compressed_activations(bits))
    assert got == 2 * encoded_bytes(x.numel(), bits)  # y, and the output of exp


def test_a_swiglu_mlp_saves_five_storages():
    rows, hidden = 64, 96
    mlp = GPT(PRESETS["tiny"]).blocks[0].mlp
    x = torch.randn(rows, 32, requires_grad=True)
    forward = lambda: mlp(x * 1)  # noqa: E731
    got = activation_bytes(forward, compressed_activations(), mlp)
    assert got == encoded_bytes(rows * 32) + 4 * encoded_bytes(rows * hidden)
    assert activation_bytes(forward, nullcontext(), mlp) / got > 3.9


def test_the_ratio_on_eligible_bytes_is_the_formula_s():
    torch.manual_seed(0)
    block, x = our_block(), torch.randn(B, T, C, requires_grad=True)
    with compressed_activations() as report:
        block(x)
    entry = report.kinds["activations"]
    assert entry.storages == 13
    assert entry.bytes_before / entry.bytes_after == pytest.approx(4 / (1 + 4 / 256), abs=1e-3)
    assert entry.bytes_before / entry.bytes_after > 3.9


def test_weights_need_no_extra_memory():
    linear = nn.Linear(64, 64, bias=False)
    x = torch.randn(32, 64, requires_grad=True)
    assert activation_bytes(lambda: linear(x), compressed_activations(), linear) == 0


def test_a_dropout_mask_on_the_cpu_takes_one_bit_per_element():
    x = torch.randn(80, 40, requires_grad=True)
    got = activation_bytes(lambda: F.dropout(x, 0.3), compressed_activations())
    assert got == 80 * 40 / 8 + 2 * 4  # the mask and its two values


def test_a_bool_mask_takes_one_bit_per_element():
    x, mask = torch.randn(1001, requires_grad=True), torch.rand(1001) > 0.5
    got = activation_bytes(
        lambda: x.masked_fill(mask.clone(), 0), compressed_activations(min_numel=1)
    )
    assert got == 126


# ------------------------------------------------------------------ masks


@pytest.mark.parametrize("n", [1, 7, 8, 9, 1000])
def test_packed_bools_take_an_eighth_and_unpack_exactly(n):
    flags = torch.rand(n) > 0.4
    packed = pack_bools(flags)
    assert packed.untyped_storage().nbytes() == math.ceil(n / 8)
    assert torch.equal(unpack_bools(packed, n), flags)


def test_the_first_bool_is_the_lowest_bit():
    flags = torch.tensor([1, 0, 1, 0, 0, 0, 0, 1, 1]).bool()
    assert pack_bools(flags).tolist() == [0b1000_0101, 1]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("p", [0.1, 0.5, 0.9])
@pytest.mark.parametrize("bits", [8, 2])
def test_dropout_s_gradient_is_bitwise_equal(dtype, p, bits):
    x = torch.randn(64, 64, dtype=dtype, requires_grad=True)

    def gradient(around) -> torch.Tensor:
        torch.manual_seed(1)
        with around:
            out = F.dropout(x, p)
        return torch.autograd.grad(out.sum(), x)[0]

    assert torch.equal(gradient(nullcontext()), gradient(compressed_activations(bits)))


@pytest.mark.parametrize(
    ("values", "count"),
    [([0.0, 2.0, 0.0], 2), ([-1.0, -1.0, 3.0], 2), ([0.0, 1.0, 2.0], 3), ([0.0, math.nan], 0)],
)
def test_two_values_finds_tensors_of_two_values(values, count):
    result = two_values(torch.tensor(values))
    assert (result is not None) == (count == 2)


def test_a_tensor_written_in_place_with_other_values_is_kept_unchanged():
    x, buffer = torch.randn(2000, requires_grad=True), torch.randn(2000).mul_(2)
    with compressed_activations() as report:
        out = x * buffer
    assert torch.equal(torch.autograd.grad(out.sum(), x)[0], buffer)
    assert report.kinds["without a gradient"].storages == 1


# ------------------------------------------------------------------ ReLU outputs


@pytest.mark.parametrize("bits", [8, 4, 2])
@pytest.mark.parametrize("mode", ["nearest", "stochastic"])
@pytest.mark.parametrize("inplace", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_relu_passes_the_same_gradients_at_any_bit_width(bits, mode, inplace, dtype):
    x = torch.randn(33, 100, dtype=dtype, requires_grad=True)
    with compressed_activations(bits, mode=mode) as report:
        out = F.relu(x * 10 ** torch.linspace(-6, 3, 100), inplace=inplace)
        out = F.relu(x * 1, inplace=inplace)
    [gradient] = torch.autograd.grad(out.sum(), x)
    assert torch.equal(gradient != 0, x > 0)
    assert report.kinds["ReLU outputs"].storages == 2


@pytest.mark.few(1)
@pytest.mark.parametrize("bits", [8, 4, 2])
@pytest.mark.parametrize("n", quick([255], [255, 256, 1000]))
def test_zero_has_its_own_code_and_positive_values_are_unbiased(bits, n):
    x = torch.randn(n, generator=seeded(1)).relu_()
    draws, generator = [], seeded(2)
    for _ in range(1000):
        q = quantize_blockwise(
            shift_up(x, 256, bits), bits=bits, mode="stochastic", generator=generator
        )
        draws.append(shift_down_(dequantize_blockwise(q), q.scales.float(), 256).double())
    draws = torch.stack(draws)
    steps = q.scales.double().repeat_interleave(256)[:n]
    assert ((draws > 0) == (x > 0)).all()
    # 5 standard errors of a mean, plus 2.5 % of a step for two bfloat16 roundings.
    assert ((draws.mean(0) - x).abs() <= steps * (2.5 / 1000**0.5 + 0.025)).all()
    assert ((draws - x).abs() <= 1.05 * steps).all()


# ------------------------------------------------------------------ what to encode


def info(**changes) -> TensorInfo:
    usual = TensorInfo((64, 64), torch.float32, 4096, True, "MulBackward0", 0)
    return usual._replace(**changes)


@pytest.mark.parametrize(
    ("changes", "kind"),
    [
        ({}, "activations"),
        ({"dtype": torch.bfloat16, "version": 1}, "activations"),
        ({"operator": "ToCopyBackward0"}, "activations"),
        ({"operator": "ReluBackward0"}, "ReLU outputs"),
        ({"operator": ""}, "weights"),
        ({"numel": 1023}, "small"),
        ({"dtype": torch.bool, "requires_grad": False, "operator": ""}, "bool masks"),
        ({"dtype": torch.int64, "requires_grad": False, "operator": ""}, "int64"),
        ({"dtype": torch.float64}, "float64"),
        ({"requires_grad": False, "operator": ""}, "without a gradient"),
        ({"requires_grad": False, "operator": "", "version": 2}, "two-value masks"),
        ({"shape": (4096, 1)}, "one element per row"),
        ({"operator": "LogSoftmaxBackward0"}, "logarithms"),
        ({"operator": "LogsumexpBackward0"}, "logarithms"),
        ({"operator": "LogBackward0"}, "logarithms"),
    ],
)
def test_kind_of_a_storage(changes, kind):
    assert kind_of(info(**changes), min_numel=1024) == kind


@pytest.mark.parametrize(
    ("operator", "kind"),
    [
        ("CatBackward0", "queries and keys"),
        ("ScaledDotProductFlashAttentionBackward0", "activations"),
        ("SafeSoftmaxBackward0", "activations"),
    ],
)
def test_kind_of_a_storage_inside_attention(operator, kind):
    assert kind_of(info(operator=operator), 1024, in_attention=True) == kind


def test_the_report_covers_every_kind():
    model, tokens = GPT(PRESETS["tiny"]), torch.randint(256, (20, 64))
    with compressed_activations() as report:
        model(tokens, tokens)
    kinds = report.kinds
    assert set(kinds) == {
        *("activations", "weights", "logarithms", "int64"),
        *("without a gradient", "one element per row", "small"),
    }
    assert kinds["logarithms"].bytes_after == 20 * 64 * 256 * 4
    assert kinds["int64"].storages == 1
    weights = sum(p.untyped_storage().nbytes() for p in model.parameters())
    assert kinds["weights"].bytes_before == weights
    assert f"{kinds['activations'].storages:>4} ×" in report.summary
    assert len(report.summary.splitlines()) == len(kinds)


def test_buffers_frozen_weights_and_data_are_kept_unchanged():
    frozen = nn.Linear(64, 64).requires_grad_(False)
    data, table = torch.randn(64, 64), torch.randn(64, 64)
    weight = nn.Parameter(torch.randn(64, 64))
    with compressed_activations() as report:
        frozen(data @ weight) * table
    assert set(report.kinds) == {"weights", "without a gradient"}
    assert report.kinds["weights"].storages == 1  # a Parameter, written to by its initialization
    assert report.kinds["without a gradient"].storages == 2


def test_leave_alone_keeps_the_chosen_tensors_unchanged():
    x = torch.randn(2000, requires_grad=True)
    keep = lambda info: info.operator == "MulBackward0"  # noqa: E731
    with compressed_activations(leave_alone=keep) as report:
        out = (x * 2).sin().exp()
    assert report.kinds["left alone by request"].storages == 1
    assert report.kinds["activations"].storages == 1
    out.sum().backward()


# ------------------------------------------------------------------ exponentiated tensors


def trained() -> tuple[GPT, tuple[torch.Tensor, torch.Tensor]]:
    """Return a model with trained attention, and a batch."""
    model = GPT(
        GPTConfig(256, 64, layers=2, heads=4, kv_heads=2, intermediate_size=192, seq_len=64)
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    drawn = batches(source_bytes("256 KiB"), 8, 64, seed=0)
    for _ in range(150):
        optimizer.zero_grad()
        model(*next(drawn)).backward()
        optimizer.step()
    return model, next(drawn)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("bits", "kind", "applies"),
    [
        (8, "logarithms", lambda info: info.operator == "LogSoftmaxBackward0"),
        slow((2, "without a gradient", lambda info: info.shape == (8, 4, 64))),  # log-sum-exp
        slow((2, "queries and keys", lambda info: True)),
    ],
)
def test_compressing_exponentiated_tensors_would_increase_gradient_errors(
    monkeypatch, bits, kind, applies
):
    model, batch = trained()

    def error(around) -> float:
        def result(around) -> torch.Tensor:
            with around:
                loss = model(*batch)
            grads = torch.autograd.grad(loss, list(model.parameters()))
            return torch.cat([gradient.flatten() for gradient in grads])

        return relative_error(result(around), result(nullcontext()))

    safe = error(compressed_activations(bits, mode="nearest"))

    def without_the_rule(info: TensorInfo, *others) -> str:
        correct = kind_of(info, *others)
        return "activations" if correct == kind and applies(info) else correct

    monkeypatch.setattr(compression, "kind_of", without_the_rule)
    assert error(compressed_activations(bits, mode="nearest")) > 1.05 * safe


def test_memlab_s_flash_attention_is_detected_like_torch_s():
    q, k, v, upstream = (torch.randn(2, 4, 64, 16) for _ in range(4))

    def gradients(attention, around) -> torch.Tensor:
        leaves = [x.clone().requires_grad_() for x in (q, k, v)]
        with around:
            out = attention(*(x * 1.0 for x in leaves))
        return torch.cat([g.flatten() for g in torch.autograd.grad(out, leaves, upstream)])

    def error(attention) -> float:
        compressed = compressed_activations(bits=2, mode="nearest", min_numel=0)
        return relative_error(gradients(attention, compressed), gradients(attention, nullcontext()))

    torchs = error(partial(F.scaled_dot_product_attention, is_causal=True))
    assert torchs < 0.5
    assert error(partial(flash_attention, causal=True)) == pytest.approx(torchs, rel=1e-3)


# ------------------------------------------------------------------ random numbers


def test_the_default_generator_is_untouched():
    before = torch.get_rng_state()
    with compressed_activations(bits=2):
        (torch.ones(5000, requires_grad=True) * 2).sin().sum().backward()
    assert torch.equal(torch.get_rng_state(), before)


def test_two_steps_draw_different_bits_and_a_generator_repeats_them():
    def gradient(**settings) -> torch.Tensor:
        x = torch.linspace(0, 1, 5000, requires_grad=True)
        with compressed_activations(bits=2, **settings):
            out = (x * 2).square()
        return torch.autograd.grad(out.sum(), x)[0]

    assert not torch.equal(gradient(), gradient())
    assert torch.equal(gradient(generator=seeded(1)), gradient(generator=seeded(1)))
    assert torch.equal(gradient(mode="nearest"), gradient(mode="nearest"))


# ------------------------------------------------------------------ combinations


@pytest.mark.parametrize(
    "module",
    [
        nn.Sequential(nn.Linear(64, 64), nn.ReLU(inplace=True), nn.Linear(64, 64)),
        nn.Sequential(nn.BatchNorm1d(64), nn.GELU(), nn.LayerNorm(64)),
        nn.Sequential(nn.Unflatten(1, (1, 8, 8)), nn.Conv2d(1, 4, 3), nn.MaxPool2d(2)),
        nn.Sequential(nn.Linear(64, 64), nn.Softmax(-1), nn.Linear(64, 64)),
    ],
)
def test_other_layers_have_the_right_gradients(module):
    torch.manual_seed(0)
    x = torch.randn(512, 64, requires_grad=True)

    def result(around) -> torch.Tensor:
        with around:
            out = module(x * 1)
        torch.manual_seed(1)
        upstream = torch.randn_like(out)
        grads = torch.autograd.grad(out, [x, *module.parameters()], upstream)
        return torch.cat([gradient.flatten() for gradient in grads])

    exact = result(nullcontext())
    assert 0 < relative_error(result(compressed_activations()), exact) < 0.01


def test_an_embedding_s_indices_are_exact():
    table, tokens = nn.Embedding(100, 8), torch.randint(100, (64, 64))
    with compressed_activations():
        out = table(tokens)
    out.sum().backward()
    assert torch.equal(table.weight.grad[:, 0], tokens.flatten().bincount(minlength=100).float())


def test_under_autocast_bfloat16_activations_are_compressed():
    torch.manual_seed(0)
    model, tokens = GPT(PRESETS["tiny"]), torch.randint(256, (8, 64))

    def result(around) -> torch.Tensor:
        with around, torch.autocast("cpu", torch.bfloat16):
            loss = model(tokens, tokens)
        grads = torch.autograd.grad(loss, list(model.parameters()))
        return torch.cat([gradient.flatten() for gradient in grads])

    exact = result(nullcontext())
    context = compressed_activations()
    assert relative_error(result(context), exact) < 0.02
    mlp = model.blocks[0].mlp
    x = torch.randn(64, 32, requires_grad=True)

    def forward() -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return mlp(x)

    cast_weights = 3 * encoded_bytes(32 * 96)
    expected = encoded_bytes(64 * 32) + 4 * encoded_bytes(64 * 96) + cast_weights
    assert activation_bytes(forward, compressed_activations(), mlp) == expected


@pytest.mark.few(2)
@pytest.mark.parametrize("bits", [8, 2])
@pytest.mark.parametrize(
    "again", [checkpoint, lambda fn, x: torch_checkpoint(fn, x, use_reentrant=False)]
)
def test_gradients_stay_close_inside_and_around_a_checkpoint(again, bits):
    torch.manual_seed(0)
    block, x = our_block(), torch.randn(B, T, C, requires_grad=True)

    def gradient(run) -> torch.Tensor:
        return torch.autograd.grad(run(x * 1).square().sum(), x)[0]

    def compressed(x: torch.Tensor) -> torch.Tensor:
        with compressed_activations(bits, generator=seeded(0)):
            return block(x)

    def around(x: torch.Tensor) -> torch.Tensor:
        with compressed_activations(bits, generator=seeded(0)):
            return again(block, x)

    exact, plain = gradient(block), gradient(compressed)
    assert torch.equal(gradient(lambda x: again(compressed, x)), plain)
    assert relative_error(gradient(around), exact) <= relative_error(plain, exact) * 1.5 + 0.005


def test_around_a_checkpoint_its_input_is_compressed():
    block, x = our_block(), torch.randn(B, T, C, requires_grad=True)
    got = activation_bytes(lambda: checkpoint(block, x * 1), compressed_activations(), block)
    graphs = activation_bytes(lambda: checkpoint(block, x * 1), nullcontext(), block)
    assert graphs - got == x.nbytes - encoded_bytes(x.numel())


def test_backward_passes_and_second_derivatives_work():
    x = torch.linspace(0.5, 1.5, 4096, requires_grad=True)
    with compressed_activations():
        y = x * 1
        out = (y * y * y).sum()
        [first] = torch.autograd.grad(out, x, create_graph=True)
    [second] = torch.autograd.grad(first.sum(), x, retain_graph=True)
    [again] = torch.autograd.grad(out, x)
    assert torch.equal(first, again)
    assert relative_error(first.detach(), 3 * x.detach() ** 2) < 0.001
    assert relative_error(second, 6 * x.detach()) < 0.001


def test_after_an_exception_nothing_is_compressed():
    with pytest.raises(KeyError), compressed_activations(bits=2) as report:
        raise KeyError
    x = torch.randn(5000, requires_grad=True)
    F.scaled_dot_product_attention(*(x.view(1, 1, -1, 8) for _ in range(3))).sum().backward()
    assert report.kinds == {}


@pytest.mark.parametrize("bits", quick([8], [8, 4]))
def test_a_dry_run_has_every_event_of_the_step(bits):
    setting = Setting("tiny", 4, 64)
    technique = Plugs(around_forward=lambda device: compressed_activations(bits=bits))
    training = build(setting, technique)
    training.step()
    events = [
        [(e.bytes, e.category, e.operator, e.phase) for e in trace.events]
        for trace in (measured(training), dry_trace(setting, technique))
    ]
    assert events[0] == events[1]


def test_a_dry_run_of_storages_of_many_chunks_has_the_step_s_peak():
    def step() -> None:
        x = torch.randn(3, 400_001, requires_grad=True)
        with compressed_activations(bits=4):
            out = F.dropout((x * 2).sin().relu()).sum()
        out.backward()

    real = memlab.measure(step)
    with memlab.dry_run():
        dry = memlab.measure(step)
    assert (dry.peak_bytes, dry.at_peak) == (real.peak_bytes, real.at_peak)
    assert len(dry.events) < len(real.events)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"bits": 3}, "got 3 bits; give 8, 4 or 2"),
        ({"bits": 2, "group": 6}, "got blocks of 6 at 2 bits; give a multiple of 4"),
        ({"mode": "up"}, "got mode 'up'; give 'nearest' or 'stochastic'"),
    ],
)
def test_invalid_settings_are_refused_at_the_call(settings, message):
    with pytest.raises(ValueError, match=message):
        compressed_activations(**settings)


@pytest.mark.parametrize("bits", [8, 4])
def test_meta_tensors_are_compressed_too(bits):
    layer = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Dropout())
    with compressed_activations(bits=bits, min_numel=1) as report:
        out = layer.to("meta")(torch.empty(64, 64, device="meta", requires_grad=True))
    out.sum().backward()
    assert layer[0].weight.grad.is_meta
    assert sum(kind.storages for kind in report.kinds.values()) > 2
