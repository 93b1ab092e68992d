"""8-bit Adam: as close to bitsandbytes and torchao as their own tests require, with bounded steps.

Each claim about bounded steps is also checked to fail for a naive version, which rounds second
moments to the nearest entry.
"""

import math
from functools import cache

import pytest
import torch
from quick import quick
from torch import nn

import memlab
from memlab.optim import Adam8bit, AdamW
from memlab.optim.moments import BLOCK_SIZE, Chunk, QuantizedMoment, keep_nonzero
from memlab.quantize import dequantize_blockwise, dynamic_code, quantize_blockwise
from memlab.quantize.codebooks import ThresholdTables

MIB = 2**20
LR = 1e-3


class NearestMoment(QuantizedMoment):
    """The naive moment, where a small value may become zero."""

    def write(self, state, chunk, value):
        stored = self._quantized_view(state, chunk)
        new = quantize_blockwise(value, block=BLOCK_SIZE, codebook=stored.codebook)
        stored.codes.copy_(new.codes)
        stored.scales.copy_(new.scales)


class NaiveAdam8bit(Adam8bit):
    def moments(self, weight, group):
        return NearestMoment("exp_avg", signed=True), NearestMoment("exp_avg_sq", signed=False)


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def decoded(state: dict, name: str) -> torch.Tensor:
    codes, scales = state[f"{name}_codes"], state[f"{name}_scales"]
    values = state[f"{name}_code"][codes.int()]
    return values * scales.repeat_interleave(BLOCK_SIZE)[: len(codes)]


# ------------------------------------------------------------------ the second moment


def test_positive_values_get_at_least_code_1():
    codes = torch.tensor([0, 0, 1, 7, 0], dtype=torch.uint8)
    values = torch.tensor([0.0, 1e-45, 1e-8, 0.1, torch.finfo().tiny])
    assert keep_nonzero(codes, values).tolist() == [0, 1, 1, 7, 1]
    assert codes.tolist() == [0, 0, 1, 7, 0]


@pytest.mark.parametrize("signed", [True, False])
def test_a_moment_decodes_to_the_nearest_entry_and_zero_to_zero(signed):
    """Small second moments are the exception; they may become the smallest entry."""
    values = torch.randn(1000, generator=seeded()) ** (1 if signed else 2)
    values[::7] = 0
    weight, moment = torch.empty(1000), QuantizedMoment("m", signed=signed)
    state = moment.new(weight, ())
    assert not moment.read(state, Chunk(0, 1000)).any()
    assert not state["m_code"][state["m_codes"].int()].any()  # independent of the scale
    moment.write(state, Chunk(0, 1000), values)
    decoded_values = moment.read(state, Chunk(0, 1000))
    assert torch.equal(decoded_values == 0, values == 0)
    quantized = quantize_blockwise(values, block=BLOCK_SIZE, codebook=dynamic_code(signed))
    nearest = dequantize_blockwise(quantized)
    is_kept = nearest.bool() | ~values.bool()
    assert torch.equal(decoded_values[is_kept], nearest[is_kept])


# ------------------------------------------------------------------ bytes


def state_bytes(*sizes: int) -> int:
    """Return the bytes of codes and scales, or of two float32 moments, plus the two codebooks."""
    large = [n for n in sizes if n >= 4096]
    small = [n for n in sizes if n < 4096]
    encoded = sum(2 * n + 8 * math.ceil(n / 256) for n in large) + (2048 if large else 0)
    return encoded + sum(8 * n for n in small)


def table_bytes() -> int:
    """Return the bytes of the two lookup tables, which live as long as their codebooks."""
    tables = [vars(ThresholdTables.of(dynamic_code(signed), "nearest")) for signed in (True, False)]
    return sum(t.nbytes for table in tables for t in table.values() if torch.is_tensor(t))


def traced_of(*sizes: int, dtype=torch.float32, **settings):
    model = nn.Module()
    for number, size in enumerate(sizes):
        weight = nn.Parameter(torch.ones(size, dtype=dtype))
        weight.grad = torch.ones_like(weight)
        model.register_parameter(f"weight{number}", weight)
    optimizer = Adam8bit(model.parameters(), **settings)
    optimizer.step()
    return memlab.measure(optimizer.step, model=model, optimizer=optimizer), optimizer


SIZES = [(4095,), (4096,), (4097,), (10_000,), (10**6,), (1, 255, 4095), (4096, 7, 70_001, 4097)]


@pytest.mark.parametrize("sizes", SIZES)
def test_state_bytes_match_the_formula_for_any_sizes(sizes):
    trace, optimizer = traced_of(*sizes)
    states = optimizer.state.values()
    tensors = [value for state in states for value in state.values() if torch.is_tensor(value)]
    storages = {tensor.untyped_storage()._cdata: tensor.untyped_storage() for tensor in tensors}
    assert sum(storage.nbytes() for storage in storages.values()) == state_bytes(*sizes)
    tables = table_bytes() if max(sizes) >= 4096 else 0
    assert trace.at_end["optimizer_state"] == state_bytes(*sizes) + tables


@pytest.mark.parametrize("size", [4095, 4096, 4097, 10_000])
def test_bitsandbytes_state_matches_the_same_formula(size):
    package = pytest.importorskip("bitsandbytes")
    weight = nn.Parameter(torch.ones(size))
    weight.grad = torch.ones(size)
    optimizer = package.optim.Adam8bit([weight])
    optimizer.step()
    tensors = [value for value in optimizer.state[weight].values() if torch.is_tensor(value)]
    assert sum(tensor.nbytes for tensor in tensors) == state_bytes(size)


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("dtype", "rounding"),
    [(torch.float32, "nearest"), (torch.bfloat16, "nearest"), (torch.bfloat16, "stochastic")],
)
@pytest.mark.parametrize("maximize", [False, True])
def test_a_step_needs_at_most_8_mib_for_any_weight(dtype, rounding, maximize):
    temporary_bytes = []
    for size in (MIB, 4 * MIB + 1000):
        trace, _ = traced_of(size, dtype=dtype, rounding=rounding, maximize=maximize)
        temporary_bytes.append(trace.peak_bytes - trace.live_bytes)
    assert temporary_bytes[0] == temporary_bytes[1] <= 8 * MIB


# ------------------------------------------------------------------ against production libraries


def test_fifty_steps_match_bitsandbytes():
    """Follow bitsandbytes' test, which starts each step from the same state.

    Weights must agree, and moments with few outliers. On a CPU bitsandbytes decays before the step.
    """
    package = pytest.importorskip("bitsandbytes")
    shape, settings = (64, 100), {"lr": LR, "weight_decay": 0.1}
    start = torch.randn(shape, generator=seeded()) * 0.1
    ours, theirs = nn.Parameter(start.clone()), nn.Parameter(start.clone())
    optimizer, reference = (
        Adam8bit([ours], **settings),
        package.optim.Adam8bit([theirs], **settings),
    )
    generator, errors, relatives = seeded(1), [], []
    for _ in range(50):
        ours.grad = torch.randn(shape, generator=generator) * 0.01
        theirs.grad = ours.grad.clone()
        optimizer.step(), reference.step()
        state, expected = optimizer.state[ours], reference.state[theirs]
        for name, n in (("exp_avg", 1), ("exp_avg_sq", 2)):
            codebook, codes = expected[f"qmap{n}"], expected[f"state{n}"].view(-1)
            scales = expected[f"absmax{n}"].repeat_interleave(BLOCK_SIZE)
            reference_moment = codebook[codes.long()] * scales
            near = torch.isclose(decoded(state, name), reference_moment, atol=3e-3, rtol=1e-3)
            assert (~near).sum() < 20
            state[f"{name}_codes"].copy_(codes)
            state[f"{name}_scales"].copy_(expected[f"absmax{n}"])
        error = (ours - theirs).detach().abs()
        errors.append(error.mean().item())
        relatives.append((error / theirs.detach().abs().add(1e-9)).mean().item())
        with torch.no_grad():
            ours.copy_(theirs)
    assert sum(errors) / 50 < 6e-5
    assert sum(relatives) / 50 < 6e-4


def test_thirty_steps_match_torchao():
    """Compare weights after 30 steps, relative to the distance travelled.

    The gradients have similar sizes, so that torchao's nearest codes equal ours.
    """
    package = pytest.importorskip("torchao.optim")
    start = torch.randn(40, 256, generator=seeded())
    ours, theirs = nn.Parameter(start.clone()), nn.Parameter(start.clone())
    optimizer = Adam8bit([ours], lr=LR, weight_decay=0.1)
    reference = package.AdamW8bit([theirs], lr=LR, weight_decay=0.1)
    generator = seeded(1)
    with torch.compiler.set_stance("force_eager"):  # same results without a compiler
        for _ in range(30):
            ours.grad = torch.randn(start.shape, generator=generator)
            theirs.grad = ours.grad.clone()
            optimizer.step(), reference.step()
    difference, distance = (ours - theirs).detach(), (theirs - start).detach()
    assert (difference.norm() / distance.norm()).item() < 2e-3


# ------------------------------------------------------------------ drift and step length


def steps_of(cls, spread: float, count: int, *, values: int = 16_384, gradients=None):
    """Return the relative drift from float64 Adam, and the longest step as a multiple of lr.

    Gradients have log-normal scales. Weights start at zero without decay, so that steps are not
    rounded.
    """
    scales = torch.exp(spread * torch.randn(values, generator=seeded(1)))
    weight = nn.Parameter(torch.zeros(values))
    exact = nn.Parameter(torch.zeros(values, dtype=torch.float64))
    settings = {"lr": LR, "weight_decay": 0.0, "eps": 1e-8}
    optimizer, reference = cls([weight], **settings), AdamW([exact], **settings)
    generator, longest = seeded(2), 0.0
    for step in range(count):
        drawn = torch.randn(values, generator=generator)
        weight.grad = drawn * scales if gradients is None else gradients(step, drawn * scales)
        exact.grad = weight.grad.double()
        before = weight.detach().clone()
        optimizer.step(), reference.step()
        longest = max(longest, ((weight - before).abs().max() / LR).item())
    distance, expected = weight.detach().double(), exact.detach()
    return ((distance - expected).norm() / expected.norm()).item(), longest


steps_of_100 = cache(lambda cls, spread: steps_of(cls, spread, 100))


def test_gaussian_gradients_drift_by_at_most_2_3_percent_in_100_steps():
    drift, _ = steps_of_100(Adam8bit, 0.0)
    assert 0.01 < drift <= 0.023


@pytest.mark.parametrize(("spread", "bound"), [(1.0, 0.08), (2.0, 0.35), (3.0, 0.70)])
def test_log_normal_gradients_drift_within_bounds_and_no_step_is_long(spread, bound):
    drift, longest = steps_of_100(Adam8bit, spread)
    assert drift <= bound
    assert longest <= 3.5


@pytest.mark.parametrize("spread", [1.0, 2.0, 3.0])
def test_steps_with_nearest_codes_are_unbounded(spread):
    _, longest = steps_of_100(NaiveAdam8bit, spread)
    assert longest > 10


def rare_gradients(step: int, gradient: torch.Tensor) -> torch.Tensor:
    """Keep one gradient in fifty, like the rows of an embedding."""
    return gradient * (torch.rand(gradient.shape, generator=seeded(step)) < 0.02)


def growing_gradients(step: int, gradient: torch.Tensor) -> torch.Tensor:
    """Zeros, then gradients that grow by β2/β1 per step, which maximizes Adam's steps."""
    silence, growth = 400, 100
    n = step % (silence + growth) - silence
    return gradient * 0 if n < 0 else gradient.abs() * (0.999 / 0.9) ** n


@pytest.mark.parametrize(
    ("gradients", "spread"),
    quick(
        [(rare_gradients, 2.0)],
        [(None, 0.0), (None, 2.0), (rare_gradients, 0.0), (rare_gradients, 2.0)],
    ),
)
def test_no_step_of_a_long_run_exceeds_8_learning_rates(gradients, spread):
    """Exact Adam's bound is 7.27."""
    _, longest = steps_of(Adam8bit, spread, 1000, values=4096, gradients=gradients)
    assert longest <= 8


@pytest.mark.slow
def test_gradients_made_for_long_steps_exceed_exact_adams_bound_less_than_twice():
    _, longest = steps_of(Adam8bit, 2.0, 1000, values=4096, gradients=growing_gradients)
    assert 7.27 < longest < 2 * 7.27


@pytest.mark.few(1)
@pytest.mark.parametrize("gradients", [rare_gradients, growing_gradients])
def test_steps_of_a_long_run_with_nearest_codes_are_unbounded(gradients):
    _, longest = steps_of(NaiveAdam8bit, 2.0, 500, values=4096, gradients=gradients)
    assert longest > 100


@pytest.mark.parametrize("spread", [0.0, 3.0])
def test_weights_without_gradients_do_not_move(spread):
    """Other weights in their blocks do have gradients."""
    is_idle = torch.arange(8192) % 3 == 0
    weight = nn.Parameter(torch.randn(8192, generator=seeded()))
    before = weight.detach().clone()
    optimizer = Adam8bit([weight], weight_decay=0.0)
    scales = torch.exp(spread * torch.randn(8192, generator=seeded(1)))
    for seed in range(200):
        drawn = torch.randn(8192, generator=seeded(seed))
        weight.grad = (drawn * scales).masked_fill(is_idle, 0)
        optimizer.step()
    assert torch.equal(weight[is_idle], before[is_idle])
    assert not torch.equal(weight[~is_idle], before[~is_idle])


def test_weights_below_4096_elements_are_bitwise_equal_to_adamw():
    start = torch.randn(4095, generator=seeded())
    weights = nn.Parameter(start.clone()), nn.Parameter(start.clone())
    optimizers = Adam8bit([weights[0]]), AdamW([weights[1]])
    for seed in range(20):
        for weight, optimizer in zip(weights, optimizers, strict=True):
            weight.grad = torch.randn(4095, generator=seeded(seed))
            optimizer.step()
    assert torch.equal(*weights)


def test_the_first_step_is_bitwise_equal_to_adamw():
    """The step uses the moments before they are rounded."""
    start = torch.randn(10_000, generator=seeded())
    weights = nn.Parameter(start.clone()), nn.Parameter(start.clone())
    optimizers = Adam8bit([weights[0]]), AdamW([weights[1]])
    for weight, optimizer in zip(weights, optimizers, strict=True):
        weight.grad = torch.randn(10_000, generator=seeded(1))
        optimizer.step()
    assert torch.equal(*weights)


# ------------------------------------------------------------------ bfloat16 weights


def test_bfloat16_weights_with_stochastic_rounding_converge_like_float32():
    """Minimize a parabola, 1/256 from the start, with steps that bfloat16 would round away."""
    target, losses = 1 + 2**-8, {}
    for name, dtype, rounding in (
        ("float32", torch.float32, "nearest"),
        ("stochastic", torch.bfloat16, "stochastic"),
        ("nearest", torch.bfloat16, "nearest"),
    ):
        weight = nn.Parameter(torch.ones(8192, dtype=dtype))
        optimizer = Adam8bit(
            [weight], lr=2e-4, weight_decay=0.0, rounding=rounding, generator=seeded()
        )
        for _ in range(60):
            weight.grad = (weight.detach().float() - target).to(dtype)
            optimizer.step()
        losses[name] = abs(weight.detach().double().mean().item() - target)
    assert losses["nearest"] == pytest.approx(2**-8)
    assert losses["stochastic"] < 2**-8 / 4
    assert losses["float32"] < 2**-8 / 4
