"""Adam in 8 bits: bitsandbytes' and torchao's by their own protocols, to the byte, and safe where
they are not: no gradients make a step long.

A naive version, with the nearest code for every number, is held against each claim of safety: it
has to fail it.
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
from memlab.quantize import _ThresholdTables, dequantize_blockwise, dynamic_code, quantize_blockwise

MIB = 2**20
LR = 1e-3


class Nearest(QuantizedMoment):
    """The naive moment: a small number may become zero."""

    def write(self, state, piece, value):
        kept = self._kept(state, piece)
        new = quantize_blockwise(value, block=BLOCK_SIZE, codebook=kept.codebook)
        kept.codes.copy_(new.codes)
        kept.scales.copy_(new.scales)


class NaiveAdam8bit(Adam8bit):
    def moments(self, weight, group):
        return Nearest("exp_avg", signed=True), Nearest("exp_avg_sq", signed=False)


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def decoded(state: dict, name: str) -> torch.Tensor:
    codes, scales = state[f"{name}_codes"], state[f"{name}_scales"]
    numbers = state[f"{name}_codebook"][codes.int()]
    return numbers * scales.repeat_interleave(BLOCK_SIZE)[: len(codes)]


# ------------------------------------------------------------------ the second moment


def test_what_is_positive_gets_code_1_at_least():
    codes = torch.tensor([0, 0, 1, 7, 0], dtype=torch.uint8)
    numbers = torch.tensor([0.0, 1e-45, 1e-8, 0.1, torch.finfo().tiny])
    assert keep_nonzero(codes, numbers).tolist() == [0, 1, 1, 7, 1]
    assert codes.tolist() == [0, 0, 1, 7, 0]


@pytest.mark.parametrize("signed", [True, False])
def test_a_moment_comes_back_within_half_a_gap_of_the_code_and_zero_as_zero(signed):
    """But for the second moment's small numbers, which may become the smallest of the code."""
    numbers = torch.randn(1000, generator=seeded()) ** (1 if signed else 2)
    numbers[::7] = 0
    weight, moment = torch.empty(1000), QuantizedMoment("m", signed=signed)
    state = moment.new(weight, ())
    assert not moment.read(state, Chunk(0, 1000)).any()
    assert not state["m_codebook"][state["m_codes"].int()].any()  # whatever the scale
    moment.write(state, Chunk(0, 1000), numbers)
    found = moment.read(state, Chunk(0, 1000))
    assert torch.equal(found == 0, numbers == 0)
    quantized = quantize_blockwise(numbers, block=BLOCK_SIZE, codebook=dynamic_code(signed))
    nearest = dequantize_blockwise(quantized)
    is_kept = nearest.bool() | ~numbers.bool()
    assert torch.equal(found[is_kept], nearest[is_kept])


# ------------------------------------------------------------------ bytes


def formula(*sizes: int) -> int:
    """Of the state: codes and scales of two moments, or two float32; and once the two codes."""
    large = [n for n in sizes if n >= 4096]
    small = [n for n in sizes if n < 4096]
    encoded = sum(2 * n + 8 * math.ceil(n / 256) for n in large) + (2048 if large else 0)
    return encoded + sum(8 * n for n in small)


def table_bytes() -> int:
    """Of the tables by which the two codes are found; they live as long as the codes."""
    tables = [
        vars(_ThresholdTables.of(dynamic_code(signed), "nearest")) for signed in (True, False)
    ]
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
def test_state_bytes_are_those_of_the_formula_whatever_the_sizes(sizes):
    trace, optimizer = traced_of(*sizes)
    states = optimizer.state.values()
    tensors = [value for state in states for value in state.values() if torch.is_tensor(value)]
    storages = {tensor.untyped_storage()._cdata: tensor.untyped_storage() for tensor in tensors}
    assert sum(storage.nbytes() for storage in storages.values()) == formula(*sizes)
    tables = table_bytes() if max(sizes) >= 4096 else 0
    assert trace.at_end["optimizer_state"] == formula(*sizes) + tables


@pytest.mark.parametrize("size", [4095, 4096, 4097, 10_000])
def test_bitsandbytes_has_the_bytes_of_the_same_formula(size):
    package = pytest.importorskip("bitsandbytes")
    weight = nn.Parameter(torch.ones(size))
    weight.grad = torch.ones(size)
    optimizer = package.optim.Adam8bit([weight])
    optimizer.step()
    tensors = [value for value in optimizer.state[weight].values() if torch.is_tensor(value)]
    assert sum(tensor.nbytes for tensor in tensors) == formula(size)


@pytest.mark.parametrize(
    ("dtype", "rounding"),
    [(torch.float32, "nearest"), (torch.bfloat16, "nearest"), (torch.bfloat16, "stochastic")],
)
@pytest.mark.parametrize("maximize", [False, True])
def test_a_step_takes_8_mib_at_most_however_large_the_weight(dtype, rounding, maximize):
    taken = []
    for size in (MIB, 4 * MIB + 1000):
        trace, _ = traced_of(size, dtype=dtype, rounding=rounding, maximize=maximize)
        taken.append(trace.peak_bytes - trace.live_bytes)
    assert taken[0] == taken[1] <= 8 * MIB


# ------------------------------------------------------------------ beside production's


def test_fifty_steps_are_bitsandbytes_by_its_own_protocol():
    """Its test: each step from its state; weights, and moments with few outliers. It decays before
    the step on a CPU, as here."""
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
        state, wanted = optimizer.state[ours], reference.state[theirs]
        for name, n in (("exp_avg", 1), ("exp_avg_sq", 2)):
            code, codes = wanted[f"qmap{n}"], wanted[f"state{n}"].view(-1)
            scales = wanted[f"absmax{n}"].repeat_interleave(BLOCK_SIZE)
            reference_moment = code[codes.long()] * scales
            near = torch.isclose(decoded(state, name), reference_moment, atol=3e-3, rtol=1e-3)
            assert (~near).sum() < 20
            state[f"{name}_codes"].copy_(codes)
            state[f"{name}_scales"].copy_(wanted[f"absmax{n}"])
        error = (ours - theirs).detach().abs()
        errors.append(error.mean().item())
        relatives.append((error / theirs.detach().abs().add(1e-9)).mean().item())
        with torch.no_grad():
            ours.copy_(theirs)
    assert sum(errors) / 50 < 6e-5
    assert sum(relatives) / 50 < 6e-4


def test_torchaos_trajectory_is_ours():
    """Where its nearest codes are ours: gradients of much of a size. The weights after 30 steps,
    against how far they have come."""
    package = pytest.importorskip("torchao.optim")
    start = torch.randn(40, 256, generator=seeded())
    ours, theirs = nn.Parameter(start.clone()), nn.Parameter(start.clone())
    optimizer = Adam8bit([ours], lr=LR, weight_decay=0.1)
    reference = package.AdamW8bit([theirs], lr=LR, weight_decay=0.1)
    generator = seeded(1)
    with torch.compiler.set_stance("force_eager"):  # the same numbers without a compiler
        for _ in range(30):
            ours.grad = torch.randn(start.shape, generator=generator)
            theirs.grad = ours.grad.clone()
            optimizer.step(), reference.step()
    apart, way = (ours - theirs).detach(), (theirs - start).detach()
    assert (apart.norm() / way.norm()).item() < 2e-3


# ------------------------------------------------------------------ drift, and the longest step


def steps_of(cls, spread: float, count: int, *, numbers: int = 16_384, gradients=None):
    """The way that Adam in 8 bits and float64 Adam have come on gradients whose scales are
    log-normal, and the longest steps as multiples of lr.

    The weights are near zero and without decay, so that the last digit of a step is there.
    """
    scales = torch.exp(spread * torch.randn(numbers, generator=seeded(1)))
    weight = nn.Parameter(torch.zeros(numbers))
    exact = nn.Parameter(torch.zeros(numbers, dtype=torch.float64))
    settings = {"lr": LR, "weight_decay": 0.0, "eps": 1e-8}
    optimizer, reference = cls([weight], **settings), AdamW([exact], **settings)
    generator, longest = seeded(2), 0.0
    for step in range(count):
        drawn = torch.randn(numbers, generator=generator)
        weight.grad = drawn * scales if gradients is None else gradients(step, drawn * scales)
        exact.grad = weight.grad.double()
        before = weight.detach().clone()
        optimizer.step(), reference.step()
        longest = max(longest, ((weight - before).abs().max() / LR).item())
    way, wanted = weight.detach().double(), exact.detach()
    return ((way - wanted).norm() / wanted.norm()).item(), longest


steps_of_100 = cache(lambda cls, spread: steps_of(cls, spread, 100))


def test_gaussian_gradients_drift_by_2_3_percent_of_the_way_in_100_steps():
    drift, _ = steps_of_100(Adam8bit, 0.0)
    assert 0.01 < drift <= 0.023


@pytest.mark.parametrize(("spread", "most"), [(1.0, 0.08), (2.0, 0.35), (3.0, 0.70)])
def test_log_normal_gradients_drift_by_a_part_of_the_way_and_no_step_is_long(spread, most):
    drift, longest = steps_of_100(Adam8bit, spread)
    assert drift <= most
    assert longest <= 3.5


@pytest.mark.parametrize("spread", [1.0, 2.0, 3.0])
def test_with_nearest_codes_alone_steps_have_no_bound(spread):
    _, longest = steps_of_100(NaiveAdam8bit, spread)
    assert longest > 10


def rare(step: int, gradient: torch.Tensor) -> torch.Tensor:
    """One gradient in fifty, as an embedding's rows see them."""
    return gradient * (torch.rand(gradient.shape, generator=seeded(step)) < 0.02)


def growing(step: int, gradient: torch.Tensor) -> torch.Tensor:
    """Silence, then gradients that grow by β2/β1 a step: what makes Adam's steps longest."""
    silence, growth = 400, 100
    n = step % (silence + growth) - silence
    return gradient * 0 if n < 0 else gradient.abs() * (0.999 / 0.9) ** n


@pytest.mark.parametrize(
    ("gradients", "spread"),
    quick([(rare, 2.0)], [(None, 0.0), (None, 2.0), (rare, 0.0), (rare, 2.0)]),
)
def test_over_a_long_run_no_step_is_longer_than_8_learning_rates(gradients, spread):
    """Of exact Adam the longest that there can be is 7.27."""
    _, longest = steps_of(Adam8bit, spread, 1000, numbers=4096, gradients=gradients)
    assert longest <= 8


@pytest.mark.slow
def test_gradients_made_for_long_steps_are_rounded_to_less_than_twice_exact_adams_longest():
    _, longest = steps_of(Adam8bit, 2.0, 1000, numbers=4096, gradients=growing)
    assert 7.27 < longest < 2 * 7.27


@pytest.mark.parametrize("gradients", [rare, growing])
def test_over_a_long_run_nearest_codes_alone_make_steps_of_any_length(gradients):
    _, longest = steps_of(NaiveAdam8bit, 2.0, 500, numbers=4096, gradients=gradients)
    assert longest > 100


@pytest.mark.parametrize("spread", [0.0, 3.0])
def test_weights_that_never_have_a_gradient_do_not_move_at_all(spread):
    """Beside others of their block that do."""
    quiet = torch.arange(8192) % 3 == 0
    weight = nn.Parameter(torch.randn(8192, generator=seeded()))
    before = weight.detach().clone()
    optimizer = Adam8bit([weight], weight_decay=0.0)
    scales = torch.exp(spread * torch.randn(8192, generator=seeded(1)))
    for seed in range(200):
        drawn = torch.randn(8192, generator=seeded(seed))
        weight.grad = (drawn * scales).masked_fill(quiet, 0)
        optimizer.step()
    assert torch.equal(weight[quiet], before[quiet])
    assert not torch.equal(weight[~quiet], before[~quiet])


def test_below_4096_numbers_it_is_adamw_to_the_bit():
    start = torch.randn(4095, generator=seeded())
    weights = nn.Parameter(start.clone()), nn.Parameter(start.clone())
    optimizers = Adam8bit([weights[0]]), AdamW([weights[1]])
    for seed in range(20):
        for weight, optimizer in zip(weights, optimizers, strict=True):
            weight.grad = torch.randn(4095, generator=seeded(seed))
            optimizer.step()
    assert torch.equal(*weights)


def test_its_first_step_is_adamws_to_the_bit():
    """The step is taken by the moments as they are, and they are rounded after it."""
    start = torch.randn(10_000, generator=seeded())
    weights = nn.Parameter(start.clone()), nn.Parameter(start.clone())
    optimizers = Adam8bit([weights[0]]), AdamW([weights[1]])
    for weight, optimizer in zip(weights, optimizers, strict=True):
        weight.grad = torch.randn(10_000, generator=seeded(1))
        optimizer.step()
    assert torch.equal(*weights)


# ------------------------------------------------------------------ bfloat16 weights


def test_bfloat16_weights_rounded_at_random_learn_what_float32_weights_do():
    """A parabola: its minimum is 1/256 from the start, in steps that bfloat16 rounds away."""
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
