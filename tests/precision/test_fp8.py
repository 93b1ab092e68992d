"""FP8 matmuls: rounding, scales, gradients and bytes, against a table of all codes and torchao."""

import copy
import importlib
import pickle
from dataclasses import replace
from functools import partial
from unittest.mock import patch

import pytest
import torch
from close import assert_close
from torch import nn
from torch.nn import functional as F

import memlab
from memlab.checkpointing import checkpoint
from memlab.data import batches, source_bytes
from memlab.model import GPT, PRESETS
from memlab.precision import FP8Linear, FP8Recipe, advance_scales, convert_to_fp8
from memlab.precision import fp8 as production
from memlab.precision.fp8 import (
    E4M3,
    E5M2,
    RECIPES,
    AmaxHistory,
    Scaled,
    dequantize_fp8,
    fp8_bytes,
    has_scaled_mm,
    matmul_fp8,
    quantize_fp8,
)

FORMATS = (E4M3, E5M2)
WAYS = {**RECIPES, "kept": FP8Recipe(keep_weights=True), "own": FP8Recipe(share_inputs=False)}
SMALL = replace(
    PRESETS["tiny"], hidden_size=64, layers=2, heads=4, kv_heads=2, intermediate_size=192
)
BF16 = torch.bfloat16


def normal(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def off(one: torch.Tensor, other: torch.Tensor) -> float:
    """The norm of the difference, as a share of the other's norm."""
    return ((one.float() - other.float()).norm() / other.float().norm()).item()


def float8():
    return pytest.importorskip("torchao.float8")


# ------------------------------------------------------------------ casts


def values(dtype: torch.dtype) -> torch.Tensor:
    """All finite values of the format."""
    every = torch.arange(256, dtype=torch.uint8).view(dtype).double()
    return every[every.isfinite()]


@pytest.mark.parametrize("tile", [None, (1, 16), (8, 8), (3, 50)], ids=str)
@pytest.mark.parametrize("dtype", FORMATS, ids=str)
def test_each_element_gets_the_nearest_code(dtype, tile):
    x = normal(16, 40) * torch.logspace(-6, 3, 40)
    q = quantize_fp8(x, dtype, tile)
    ones = Scaled(torch.ones_like(q.codes, dtype=torch.float32), q.scales, tile)
    in_scales = x.double() / dequantize_fp8(ones).double()
    table = values(dtype)
    least = (in_scales.unsqueeze(-1) - table).abs().amin(-1)
    further = (q.codes.double() - in_scales).abs() - least
    assert (further <= 1e-6 * in_scales.abs()).all()


@pytest.mark.parametrize("dtype", FORMATS, ids=str)
def test_the_amax_becomes_the_largest_value_in_every_tile(dtype):
    x = normal(5, 300) * torch.logspace(-20, 4, 300)
    q = quantize_fp8(x, dtype, (2, 128))
    assert q.scales.shape == (3, 3)
    for i in range(3):
        for j in range(3):
            place = slice(2 * i, 2 * i + 2), slice(128 * j, 128 * j + 128)
            assert q.codes[place].float().abs().max() == torch.finfo(dtype).max
            largest = x[place].abs().max() / torch.finfo(dtype).max
            assert_close(q.scales[i, j], largest, terms=2)


@pytest.mark.parametrize("x", [torch.zeros(4, 6), torch.zeros(0, 6), 1e-30 * normal(4, 6)])
def test_zeros_and_tiny_values_are_finite(x):
    for tile in (None, (1, 4)) if len(x) else (None,):
        back = dequantize_fp8(quantize_fp8(x, E5M2, tile))
        assert back.isfinite().all()
        assert ((back - x).abs() <= 0.15 * x.abs()).all()


def test_values_above_a_given_amax_saturate():
    q = quantize_fp8(torch.tensor([[1.0, -8.0, 0.5]]), E4M3, amax=torch.tensor(1.0))
    assert q.codes.float().tolist() == [[448, -448, 224]]


def test_nan_stays_nan():
    assert quantize_fp8(torch.tensor([[1.0, torch.nan]])).codes.float().isnan().any()


def test_gradients_of_a_millionth_become_zero_without_a_scale_and_not_with_one():
    gradient = 1e-6 * normal(64, 64)
    for dtype in FORMATS:
        assert not gradient.to(dtype).float().any()
        assert (quantize_fp8(gradient, dtype).codes.float() == 0).float().mean() < 0.01


def test_an_outlier_spoils_its_own_tile_alone():
    x = normal(32, 512)
    x[:, 0] *= 1e5
    tensor, tiles = (dequantize_fp8(quantize_fp8(x, E4M3, tile)) for tile in (None, (1, 128)))
    assert off(tensor[:, 128:], x[:, 128:]) > 0.3
    assert off(tiles[:, 128:], x[:, 128:]) < 0.03


@pytest.mark.parametrize("dtype", [torch.float32, BF16], ids=str)
def test_codes_and_scales_are_those_of_torchao(dtype):
    float8()
    utils = importlib.import_module("torchao.float8.float8_utils")
    x = (normal(64, 96) * torch.logspace(-4, 2, 96)).to(dtype)
    for target in FORMATS:
        scale = utils.tensor_to_scale(x, target)  # ours is its reciprocal
        codes = utils.to_fp8_saturated(x.float() * scale, target)
        q = quantize_fp8(x, target)
        assert torch.equal(q.codes.view(torch.uint8), codes.view(torch.uint8))
        assert_close(q.scales, 1 / scale, terms=2)


@pytest.mark.parametrize("tile", [None, (1, 128), (128, 128)], ids=str)
def test_a_matrix_takes_a_byte_per_element_and_four_per_scale(tile):
    q = quantize_fp8(normal(200, 300), E4M3, tile)
    assert q.codes.nbytes + q.scales.nbytes == fp8_bytes(200, 300, tile)
    storages = [t.untyped_storage().nbytes() for t in q[:2]]
    assert sum(storages) == fp8_bytes(200, 300, tile)


def test_a_cast_makes_one_float32_copy():
    x = normal(64, 64).to(BF16)
    peak = memlab.measure(lambda: quantize_fp8(x)).peak_bytes
    assert peak <= x.nbytes + 4 * x.numel() + x.numel() + 64


def test_another_dtype_is_refused():
    with pytest.raises(ValueError, match=r"^got torch.int8; give torch.float8_e4m3fn or "):
        quantize_fp8(normal(2, 2), torch.int8)


# ------------------------------------------------------------------ matmuls


@pytest.mark.parametrize("second", FORMATS, ids=str)
@pytest.mark.parametrize("first", FORMATS, ids=str)
def test_a_cpus_matmul_gives_what_the_decoded_codes_give(first, second):
    a, b = quantize_fp8(normal(16, 32), first), quantize_fp8(normal(48, 32, seed=1), second)
    with torch.autocast("cpu", BF16):
        product = matmul_fp8(a, b.transposed(), torch.float32)
    decoded = dequantize_fp8(a).double() @ dequantize_fp8(b).T.double()
    assert_close(product, decoded.float())


@pytest.mark.parametrize("dtype", [torch.float32, BF16], ids=str)
def test_a_cpus_matmul_has_the_bytes_of_scaled_mm(dtype):
    a, b = quantize_fp8(normal(16, 32)), quantize_fp8(normal(48, 32, seed=1)).transposed()
    operands = sum(t.nbytes for t in (a.codes, a.scales, b.codes, b.scales))
    product = memlab.measure(lambda: matmul_fp8(a, b, dtype))
    assert product.peak_bytes == operands + 16 * 48 * dtype.itemsize
    with torch._subclasses.fake_tensor.FakeTensorMode(allow_non_fake_inputs=True):
        fake = matmul_fp8(a, b, dtype)
    assert (fake.shape, fake.dtype) == ((16, 48), dtype)


def capable(shape, capability=(9, 0), dtypes=(E4M3, E4M3), tile=None) -> bool:
    """Whether a matmul runs on a GPU of this capability, by the shapes of fake tensors."""
    n, k, m = shape
    with torch.device("meta"):
        a = torch.empty(n, k).to(dtypes[0])
        b = torch.empty(k, m).to(dtypes[1])

    class OnCUDA:
        """A tensor's facts, with CUDA as its device."""

        def __init__(self, tensor):
            self.shape, self.dtype, self.device = tensor.shape, tensor.dtype, torch.device("cuda")
            self.numel = tensor.numel

    a, b = (Scaled(OnCUDA(t), None, tile) for t in (a, b))
    with patch.object(torch.cuda, "get_device_capability", return_value=capability):
        return has_scaled_mm(a, b)


def test_scaled_mm_runs_on_cuda_from_8_9_on_for_multiples_of_16_and_one_e4m3():
    assert capable((32, 64, 48))
    assert capable((32, 64, 48), (8, 9), (E5M2, E4M3))
    assert not capable((32, 64, 48), (8, 6))
    assert not capable((32, 64, 48), dtypes=(E5M2, E5M2))
    assert not capable((32, 64, 48), tile=(1, 128))
    assert not any(capable(shape) for shape in ((24, 64, 48), (32, 40, 48), (32, 64, 8)))


def test_scaled_mm_does_not_run_on_amds_gpus():
    with patch.object(torch.version, "hip", "6.4"):
        assert not capable((32, 64, 48))


# ------------------------------------------------------------------ a layer


def layer_of(way: str, bias: bool = True, dtype: torch.dtype = torch.float32) -> FP8Linear:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(256, 192, bias=bias)).to(dtype)
    convert_to_fp8(model, WAYS[way])
    return model[0]


def passes(layer, x, upstream):
    """Output, and gradients of the input and of each parameter."""
    layer.zero_grad()
    given = x.clone().requires_grad_()
    out = layer(given)
    out.backward(upstream)
    return out, given.grad, *(p.grad for p in layer.parameters())


@pytest.mark.parametrize("way", WAYS)
def test_a_layer_is_a_linear_layer_of_rounded_operands(way):
    """The oracle: each of the three matmuls in float64, of operands that were cast and decoded."""
    layer, recipe = layer_of(way), WAYS[way]
    x, upstream = normal(4, 40, 256, seed=1), 1e-5 * normal(4, 40, 192, seed=2)
    out, dx, dW, db = passes(layer, x, upstream)
    turned = recipe.inputs and recipe.inputs[::-1]

    def rounded(t, dtype, tile):
        return dequantize_fp8(quantize_fp8(t, dtype, tile)).double()

    rows, g = x.flatten(0, 1), upstream.flatten(0, 1)
    x8, w8 = rounded(rows, E4M3, recipe.inputs), rounded(layer.weight, E4M3, recipe.weights)
    g8 = rounded(g, recipe.gradients, recipe.inputs)
    again = x8 if turned is None else rounded(x8.float(), E4M3, turned)
    g_turned = rounded(g, recipe.gradients, turned)
    for got, wanted in (
        (out, (x8 @ w8.T + layer.bias.double()).view(out.shape)),
        (dx, (g8 @ w8).view(x.shape)),
        (dW, g_turned.T @ again),
        (db, g.double().sum(0)),
    ):
        assert_close(got, wanted.float())


@pytest.mark.parametrize(("way", "of_y", "of_gradients"), [("tensor", 4, 7), ("block", 4, 5)])
def test_the_errors_are_those_of_the_formats(way, of_y, of_gradients):
    """In percent of the exact result's norm; E5M2 rounds twice as coarsely as E4M3."""
    layer, exact = layer_of(way, bias=False), nn.Linear(256, 192, bias=False)
    exact.weight = nn.Parameter(layer.weight.detach().clone())
    x, upstream = normal(64, 256, seed=1), normal(64, 192, seed=2)
    errors = [
        100 * off(*pair)
        for pair in zip(passes(layer, x, upstream), passes(exact, x, upstream), strict=True)
    ]
    assert 2 < errors[0] < of_y
    assert all(2 < error < of_gradients for error in errors[1:])


@pytest.mark.parametrize("dtype", [torch.float32, BF16], ids=str)
def test_values_are_torchaos_and_bytes_are_not(dtype):
    """torchao keeps the input itself and casts it again in backward."""
    theirs = nn.Sequential(nn.Linear(256, 192)).to(dtype)
    ours = layer_of("tensor", dtype=dtype)
    theirs[0].load_state_dict(ours.state_dict())
    config = float8().Float8LinearConfig(emulate=True)
    (theirs,) = float8().convert_to_float8_training(theirs, config=config)
    x, upstream = normal(64, 256, seed=1).to(dtype), normal(64, 192, seed=2).to(dtype)
    terms = 256 if dtype == torch.float32 else 1
    assert_close(passes(ours, x, upstream), passes(theirs, x, upstream), terms=terms)
    assert held_by(ours, x) == 64 * 256 + 4
    assert held_by(theirs, x) == x.nbytes


def new_bytes(trace) -> int:
    """Bytes alive at the end and not before."""
    return sum(event.bytes for event in trace.events if event.phase != "before")


def held_by(layer: nn.Module, x: torch.Tensor) -> int:
    """Bytes that a forward pass leaves for backward beside its output."""
    leaf, outputs = x.clone().requires_grad_(), []
    trace = memlab.measure(lambda: outputs.append(layer(leaf * 1)), model=layer)
    return new_bytes(trace) - outputs[0].nbytes


@pytest.mark.parametrize(
    ("way", "kept"),
    [
        ("tensor", 64 * 256 + 4),
        ("delayed", 64 * 256 + 4),
        ("block", 64 * 256 + 4 * 64 * 2),
        ("kept", 64 * 256 + 4 + 192 * 256 + 4),
    ],
)
def test_a_layer_keeps_the_codes_of_its_input_and_their_scales(way, kept):
    assert held_by(layer_of(way, bias=False, dtype=BF16), normal(64, 256).to(BF16)) == kept


def test_a_frozen_layer_keeps_nothing_of_its_input():
    layer = layer_of("tensor", bias=False).requires_grad_(False)
    assert held_by(layer, normal(64, 256)) == 0


def test_an_input_without_gradient_needs_none():
    layer = layer_of("tensor")
    layer(normal(3, 256)).sum().backward()
    assert layer.weight.grad is not None


def test_kept_copies_of_weights_change_no_value():
    x, upstream = normal(8, 256), normal(8, 192, seed=1)
    one, other = (passes(layer_of(way), x, upstream) for way in ("tensor", "kept"))
    assert all(map(torch.equal, one, other))


def test_autocast_gives_the_output_its_dtype_and_gradients_their_own():
    layer, x = layer_of("block"), normal(8, 256).requires_grad_()
    with torch.autocast("cpu", BF16):
        out = layer(x)
    assert out.dtype == BF16
    out.sum().backward()
    assert x.grad.dtype == layer.weight.grad.dtype == torch.float32
    with torch.autocast("cpu", enabled=False):
        plain = layer(x)
    assert_close(out, plain.to(BF16), terms=1)


@pytest.mark.parametrize("shape", [(256,), (2, 3, 256), (0, 256)], ids=str)
def test_inputs_of_any_number_of_dimensions(shape):
    for way in ("tensor", "kept"):
        layer, x = layer_of(way), normal(*shape).requires_grad_()
        out = layer(x)
        assert out.shape == (*shape[:-1], 192)
        out.sum().backward()
        assert x.grad.shape == shape


def test_gradients_are_off_without_the_scale_of_the_gradient():
    """A layer whose scale of the gradient is 1 loses a gradient of a millionth altogether."""
    layer, x = layer_of("tensor"), normal(8, 256)
    small = 1e-6 * normal(8, 192, seed=1)
    assert passes(layer, x, small)[1].any()
    cast = production.quantize_fp8

    def unscaled(t, dtype=E4M3, tile=None, *, amax=None):
        largest = torch.tensor(torch.finfo(dtype).max)
        return cast(t, dtype, tile, amax=largest if dtype == E5M2 else amax)

    with patch.object(production, "quantize_fp8", unscaled):
        assert not passes(layer, x, small)[1].any()


# ------------------------------------------------------------------ shared copies


def test_layers_with_the_same_input_share_its_copy_and_other_inputs_do_not():
    torch.manual_seed(0)
    model = nn.ModuleList(nn.Linear(64, 32, bias=False) for _ in range(3))
    convert_to_fp8(model, where=lambda name: True)

    def held(inputs):
        outputs = []
        trace = memlab.measure(
            lambda: outputs.extend(layer(x) for layer, x in zip(model, inputs, strict=True)),
            model=model,
        )
        return new_bytes(trace) - sum(out.nbytes for out in outputs)

    x = normal(16, 64).requires_grad_()
    assert held([x, x, x]) == 16 * 64 + 4
    others = [normal(16, 64).requires_grad_() for _ in range(3)]
    assert held(others) == 3 * (16 * 64 + 4)


def test_an_input_that_changed_in_place_is_cast_again():
    model = nn.ModuleList(nn.Linear(8, 8, bias=False) for _ in range(2))
    convert_to_fp8(model)
    x = normal(4, 8)
    first = model[0](x)
    x.mul_(2)
    second = model[1](x)
    model[1].weight = model[0].weight
    assert second.norm() > 0
    assert_close(model[1](x), 2 * first)


def test_the_copy_lives_no_longer_than_the_graph():
    model = nn.Sequential(nn.Linear(64, 64))
    convert_to_fp8(model)
    x = normal(16, 64)
    trace = memlab.measure(lambda: model(x).sum().backward(), model=model)
    assert new_bytes(trace) == sum(p.grad.nbytes for p in model.parameters())


def held_by_a_block(way: str | None) -> int:
    """Bytes of a second block after forward, 64 tokens in bfloat16."""
    held = []
    for layers in (1, 2):
        model, outputs = GPT(replace(SMALL, layers=layers), dtype=BF16), []
        if way:
            convert_to_fp8(model, WAYS[way])
        tokens = torch.zeros(2, 32, dtype=torch.long)
        trace = memlab.measure(lambda m=model, o=outputs, t=tokens: o.append(m(t, t)), model=model)
        held.append(new_bytes(trace))
    return held[1] - held[0]


N, C, Q, K = 64, SMALL.hidden_size, SMALL.heads * SMALL.head_dim, SMALL.kv_heads * SMALL.head_dim
HIDDEN = SMALL.intermediate_size
WEIGHTS = C * Q + 2 * C * K + Q * C + 3 * C * HIDDEN


@pytest.mark.few(2)
@pytest.mark.parametrize(
    ("way", "kept"),
    [
        ("tensor", N * (2 * C + Q + HIDDEN) + 4 * 4),
        ("own", N * (5 * C + Q + HIDDEN) + 7 * 4),
        ("kept", N * (2 * C + Q + HIDDEN) + 4 * 4 + WEIGHTS + 7 * 4),
        ("block", N * (2 * C + Q + HIDDEN) + 4 * N * (3 + 2)),
    ],
)
def test_what_a_block_keeps_is_the_formula_to_the_byte(way, kept):
    """In bfloat16 the linear layers keep two norms' outputs and the input of `down`."""
    in_bfloat16 = 2 * N * (2 * C + HIDDEN)
    assert held_by_a_block(None) - held_by_a_block(way) == in_bfloat16 - kept


# ------------------------------------------------------------------ delayed scales


def test_a_history_returns_the_largest_amax_of_the_past_steps():
    history = AmaxHistory(2, torch.device("cpu"))
    seen = []
    for amaxes in ([3.0], [1.0, 5.0], [1.0], [1.0], [1.0]):
        seen += [history.amax(torch.tensor([-amax])).item() for amax in amaxes]
        history.advance()
    assert seen == [3, 3, 3, 5, 5, 1]


def test_a_history_does_not_learn_from_evaluation():
    history = AmaxHistory(2, torch.device("cpu")).eval()
    history.amax(torch.tensor([7.0]))
    assert history.now == 0


def test_delayed_scales_saturate_when_the_input_grows_and_recover():
    model = nn.Sequential(nn.Linear(64, 64, bias=False))
    convert_to_fp8(model, "delayed")
    errors = []
    for size in (1, 1, 32, 32):
        x = size * normal(16, 64)
        exact = F.linear(x, model[0].weight)
        errors.append(off(model(x).detach(), exact))
        advance_scales(model)
    assert max(errors[0], errors[1], errors[3]) < 0.06 < 0.5 < errors[2]


def test_a_recomputed_block_has_the_same_scales():
    x = normal(16, 64)
    found = []
    for run in (lambda f, x: f(x), checkpoint):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64))
        convert_to_fp8(model, "delayed")
        for step in range(3):
            model.zero_grad()
            run(model, (1 + step) * x.requires_grad_()).square().mean().backward()
            advance_scales(model)
        found.append([p.grad.clone() for p in model.parameters()])
    assert all(map(torch.equal, *found))


def test_histories_take_four_bytes_for_each_step_and_this_one():
    layer = layer_of("delayed")
    assert sum(b.nbytes for b in layer.buffers()) == 3 * 4 * (16 + 1)
    assert sum(b.nbytes for b in layer_of("tensor").buffers()) == 0


# ------------------------------------------------------------------ models


def test_parameters_stay_the_same_objects_with_the_same_names():
    model = GPT(SMALL)
    before = dict(model.named_parameters())
    names = convert_to_fp8(model)
    after = dict(model.named_parameters())
    assert list(before) == list(after)
    assert all(before[name] is after[name] for name in before)
    assert len(names) == 7 * SMALL.layers
    assert "blocks.0.attention.query" in names


def test_output_layers_are_left_alone_unless_selected():
    untied = replace(SMALL, tied=False)
    assert "unembedding" not in convert_to_fp8(GPT(untied))
    assert convert_to_fp8(GPT(untied), where=lambda name: name == "unembedding") == ["unembedding"]


def test_a_shared_layer_stays_shared():
    linear = nn.Linear(8, 8)
    model = nn.Sequential(linear, nn.ReLU(), linear)
    assert convert_to_fp8(model) == ["0", "2"]
    assert model[0] is model[2]


def test_a_model_can_be_copied_and_pickled():
    model = nn.Sequential(nn.Linear(8, 8))
    convert_to_fp8(model)
    x = normal(2, 8)
    out = model(x)
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert torch.equal(twin(x), out)
        assert twin[0].last is not model[0].last


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: convert_to_fp8(GPT(SMALL), "tiles"), r"^got recipe 'tiles'; give tensor, delayed"),
        (
            lambda: convert_to_fp8(GPT(SMALL), where=lambda name: False),
            r"^where= selected no nn.Linear layer of GPT; ",
        ),
        (lambda: FP8Recipe(inputs=(1, 128)), "give tiles for inputs and weights, or for neither"),
        (lambda: FP8Recipe((1, 128), (128, 128), history=2), "and a history only without tiles"),
    ],
)
def test_bad_input_is_one_sentence(call, message):
    with pytest.raises(ValueError, match=message):
        call()


@pytest.mark.few(1)
@pytest.mark.parametrize("way", WAYS)
def test_a_model_learns_nearly_as_without_fp8(way):
    """Fifteen steps: the loss falls by a nat at least, to within 3 % of float32's."""
    text = source_bytes("64 KiB")
    ends = []
    for converted in (False, True):
        torch.manual_seed(0)
        model = GPT(SMALL)
        if converted:
            convert_to_fp8(model, WAYS[way])
        optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, foreach=False)
        losses, drawn = [], batches(text, 4, 32, seed=1)
        for _ in range(15):
            optimizer.zero_grad()
            loss = model(*next(drawn))
            loss.backward()
            optimizer.step()
            advance_scales(model)
            losses.append(loss.item())
        assert losses[-1] < losses[0] - 1
        ends.append(sum(losses[-3:]) / 3)
    assert ends[1] == pytest.approx(ends[0], rel=0.03)


def test_checkpointed_blocks_keep_as_much_as_without_fp8():
    """Only block inputs are kept, which no cast touches."""
    held = []
    for converted in (False, True):
        model, outputs = GPT(SMALL, dtype=BF16), []
        if converted:
            convert_to_fp8(model)
        for block in model.blocks:
            block.forward = partial(checkpoint, block.forward)
        tokens = torch.zeros(2, 32, dtype=torch.long)
        trace = memlab.measure(lambda m=model, o=outputs, t=tokens: o.append(m(t, t)), model=model)
        held.append(new_bytes(trace))
    assert held[0] == held[1]


# ------------------------------------------------------------------ predictions


def predicted(way: str | None, layers: int) -> int:
    """Bytes that a forward pass leaves, as CUDA would allocate them."""
    outputs = []

    def build():
        model = GPT(replace(SMALL, layers=layers), dtype=BF16)
        if way:
            convert_to_fp8(model, WAYS[way])
        model = model.to("cuda")
        tokens = torch.zeros(2, 32, dtype=torch.long, device="cuda")
        return lambda: outputs.append(model(tokens, tokens)), model, None

    return new_bytes(memlab.predict(build))


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("way", "copies", "weights"),
    [("tensor", 4, 0), ("own", 7, 0), ("kept", 4, 7), ("block", 4, 0)],
)
def test_on_cuda_a_block_keeps_the_same_copies(way, copies, weights):
    """Predicted without a GPU: the same codes as on the CPU, and 512 bytes for each tensor of
    scales, because CUDA's allocator rounds up."""
    of_a_block = [predicted(w, 2) - predicted(w, 1) for w in (None, way)]
    shared = N * (2 * C + Q + HIDDEN)
    codes = (N * 3 * C if way == "own" else 0) + shared + (WEIGHTS if weights else 0)
    kept = codes + 512 * (copies + weights)
    assert of_a_block[0] - of_a_block[1] == 2 * N * (2 * C + HIDDEN) - kept
