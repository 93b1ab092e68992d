"""The fused 8-bit optimizers: codes, scales and weights of the reference, and no temporaries."""

import math
from collections.abc import Callable

import pytest
import torch
import triton
import triton.language as tl
from close import assert_close
from torch import Tensor, nn

import memlab
from memlab import optim as reference
from memlab.kernels import launching, optim
from memlab.kernels.arithmetic import divide_by_scales
from memlab.kernels.launching import observed
from memlab.optim import step_in_backward
from memlab.optim.moments import QuantizedMoment
from memlab.quantize import dynamic_code, nearest_code, thresholds

NAMES = ["Adam8bit", "Lion8bit"]
LR = 1e-3

each_optimizer = pytest.mark.parametrize("name", NAMES)
# numpy, used by the interpreter, warns about operations that a GPU ignores.
pytestmark = [
    pytest.mark.filterwarnings("ignore:(invalid value|overflow|divide by zero):RuntimeWarning")
]


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def weight_of(count: int, device, dtype=torch.float32, seed: int = 0) -> nn.Parameter:
    return nn.Parameter(torch.randn(count, generator=seeded(seed)).to(device, dtype))


def gradient_of(weight: Tensor, seed: int, spread: float = 2.0) -> Tensor:
    """Return gradients of log-normal sizes, one in seven of them zero."""
    generator = seeded(100 + seed)
    numbers, scales = (torch.randn(weight.numel(), generator=generator) for _ in range(2))
    numbers[::7] = 0
    numbers = (numbers * torch.exp(spread * scales)).clamp(-1000, 1000)
    return numbers.view(weight.shape).to(weight.device, weight.dtype)


def run(optimizer, seeds=range(4), spread: float = 2.0) -> None:
    for seed in seeds:
        for group in optimizer.param_groups:
            for weight in group["params"]:
                weight.grad = gradient_of(weight, seed, spread)
        optimizer.step()


def pair(name: str, count: int, device, dtype=torch.float32, **settings):
    """Return the reference and the kernel's optimizer, each with its own weights."""
    classes = getattr(reference, name), getattr(optim, name)
    return [cls([weight_of(count, device, dtype)], **settings) for cls in classes]


def only(optimizer) -> tuple[nn.Parameter, dict]:
    ((weight,),) = (group["params"] for group in optimizer.param_groups)
    return weight, optimizer.state[weight]


def has_reference_arithmetic(device: torch.device) -> bool:
    """Return whether torch's operators use fma: not on all CPUs, and differently on a GPU."""
    return device.type == "cpu" and "AVX" in torch.backends.cpu.get_cpu_capability()


def assert_same_state(expected: dict, got: dict, device: torch.device) -> None:
    """Require equal states, or one code in a thousand off by one and scales within 1e-6."""
    assert expected.keys() == got.keys()
    assert expected["step"] == got["step"]
    is_exact = has_reference_arithmetic(device)
    for name in expected:
        if name.endswith("_codes"):
            difference = (expected[name].int() - got[name].int()).abs()
            assert difference.max() <= 1
            assert difference.double().mean() <= (0 if is_exact else 1e-3)
        elif name.endswith("_scales"):
            terms = 0 if is_exact else 8
            assert_close(got[name], expected[name], terms=terms, summed=expected[name].abs())


def assert_near_weights(expected: Tensor, got: Tensor, lr: float) -> None:
    """Require weights within 1e-6 of a step and their rounding, except where codes differ."""
    is_low_precision = expected.dtype != torch.float32
    rounding = torch.finfo(expected.dtype).eps * expected.float().abs() + (
        6e-8 if is_low_precision else 0
    )
    difference = (expected.float() - got.float()).abs()
    is_exact = has_reference_arithmetic(expected.device)
    assert (difference > rounding + 1e-6 * lr).double().mean() <= (0 if is_exact else 5e-3)
    if is_low_precision:  # the last bit of float32 can change the rounding
        assert (difference > 0).double().mean() <= 0.01


# ------------------------------------------------------------------ nearest entries


@triton.jit
def nearest_kernel(x_ptr, thresholds_ptr, out_ptr, count, SIGNED: tl.constexpr):
    at = tl.program_id(0) * 4096 + tl.arange(0, 4096)
    x = tl.load(x_ptr + at, at < count, other=0.0)
    tl.store(out_ptr + at, optim.nearest_entry(x, thresholds_ptr, SIGNED), at < count)


@triton.jit
def estimate_kernel(x_ptr, out_ptr, count, SIGNED: tl.constexpr):
    at = tl.program_id(0) * 4096 + tl.arange(0, 4096)
    x = tl.load(x_ptr + at, at < count, other=0.0)
    tl.store(out_ptr + at, optim.estimate_position(x, SIGNED), at < count)


@triton.jit
def divide_kernel(x_ptr, scales_ptr, out_ptr):
    rows = tl.program_id(0) * 8 + tl.arange(0, 8)
    at = rows[:, None] * 256 + tl.arange(0, 256)[None, :]
    quotients = divide_by_scales(tl.load(x_ptr + at), tl.load(scales_ptr + rows))
    tl.store(out_ptr + at, quotients)


def run_kernel(kernel, x: Tensor, *others: Tensor, signed: bool) -> Tensor:
    out = torch.empty(len(x), dtype=torch.int32, device=x.device)
    kernel[(-(-len(x) // 4096),)](x, *others, out, len(x), SIGNED=signed)
    return out


def edge_cases(signed: bool) -> Tensor:
    """Return thresholds, entries and decade ends with neighbors, random and special values."""
    codebook = dynamic_code(signed)
    ends = 10.0 ** torch.arange(-9, 1)
    edges = torch.cat([thresholds(codebook), codebook, ends, -ends])
    for _ in range(2):
        ups, downs = (torch.nextafter(edges, torch.tensor(end)) for end in (math.inf, -math.inf))
        edges = torch.cat([edges, ups, downs])
    drawn = torch.randn(4096, generator=seeded(1)).clamp(-1, 1)
    sizes = 10 ** (12 * torch.rand(4096, generator=seeded(2)) - 12)
    even = torch.linspace(-1, 1, 20_001)
    rare = torch.tensor([0.0, -0.0, 1.0, -1.0, 1e-45, -1e-45, 1e-38, 1.5, -1.0001, math.nan])
    numbers = torch.cat([edges, drawn, drawn.sign() * sizes, even, rare])
    return numbers if signed else numbers[~(numbers < 0)]


@pytest.mark.parametrize("signed", [True, False])
def test_nearest_entry_is_exact_with_one_table_lookup(signed, device):
    numbers = edge_cases(signed).to(device)
    codebook = dynamic_code(signed).to(device)
    result = run_kernel(nearest_kernel, numbers, thresholds(codebook), signed=signed)
    assert torch.equal(result, nearest_code(numbers, codebook).int())


@pytest.mark.parametrize("signed", [True, False])
def test_no_threshold_is_close_to_where_the_estimate_changes(signed, device):
    """The distance is a fifth of a part minus rounding errors, so any GPU's rounding is safe."""
    positive = thresholds(dynamic_code(signed))
    positive = positive[positive > 0]
    decades = torch.floor(torch.log10(positive.double())) + 1
    part = 10**decades * 0.9 / 2 ** (decades + 6) / (1 if signed else 2)
    wide = torch.tensor([-1, 1]).view(2, 1) * 0.2 * part
    around = (positive + wide).float().clamp(max=1).to(device)
    estimates = [run_kernel(estimate_kernel, some, signed=signed) for some in around]
    assert torch.equal(*estimates)


def test_divide_by_scales_rounds_to_nearest_for_any_scale(device):
    """Exact above 2⁻²⁴; smaller quotients get the code of zero in any case."""
    scales = torch.cat([2.0 ** torch.linspace(-149, 127, 510), torch.tensor([0.0, math.nan])])
    scales[:510] *= 1 + torch.rand(510, generator=seeded(1)) / 2
    numbers = scales[:, None] * (2 * torch.rand(512, 256, generator=seeded(2)) - 1)
    numbers *= 2.0 ** -torch.randint(20, (512, 256), generator=seeded(3))
    out = torch.empty(512, 256, device=device)
    divide_kernel[(64,)](numbers.to(device), scales.to(device), out)
    expected, result = (numbers / scales[:, None])[:510], out.cpu()[:510]
    has_code = expected.abs() > 2.0**-24
    assert torch.equal(result[has_code], expected[has_code])
    assert result[~has_code].abs().max() <= 1.01 * 2.0**-24
    assert not out[510].any()
    assert out[511].isnan().all()


# ------------------------------------------------------------------ steps

SETTINGS = {
    "defaults": {},
    "decay, up the gradient": {"lr": 0.01, "weight_decay": 0.3, "maximize": True},
    "lr of a tensor, short memory": {
        "lr": torch.tensor(0.02),
        "betas": (0.3, 0.8),
        "weight_decay": 0.1,
    },
    "in chunks": {"chunk": 1100, "weight_decay": 0.1},
}


@each_optimizer
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("settings", SETTINGS.values(), ids=SETTINGS)
def test_steps_match_the_reference(name, dtype, settings, device):
    expected, got = pair(name, 5000, device, dtype, **settings)
    for seed in range(3):
        run(expected, [seed]), run(got, [seed])
        assert_same_state(only(expected)[1], only(got)[1], device)
        lr = float(expected.param_groups[0]["lr"])
        assert_near_weights(only(expected)[0], only(got)[0], 5 * lr)


@each_optimizer
@pytest.mark.parametrize("count", [4096, 4097, 4111, 4112, 65_536 + 1])
def test_a_weight_of_any_length_is_stepped_within_its_bounds(name, count, device):
    """The weight's buffer continues with other values, which must not change."""
    expected, got = pair(name, count, device)
    roomy = torch.full((count + 600,), 7.0, device=device)
    weight, _ = only(got)
    roomy[:count] = weight.detach()
    weight.data = roomy[:count]
    run(expected, range(2)), run(got, range(2))
    assert_same_state(only(expected)[1], only(got)[1], device)
    assert_near_weights(only(expected)[0], weight, 5 * LR)
    assert (roomy[count:] == 7).all()


@each_optimizer
def test_tiles_of_four_blocks_take_the_same_steps(name, device, monkeypatch):
    """A GPU uses four; the interpreter uses larger tiles."""
    monkeypatch.setattr(optim, "ROWS", 4)
    expected, got = pair(name, 5000, device, weight_decay=0.1)
    run(expected, range(2)), run(got, range(2))
    assert_same_state(only(expected)[1], only(got)[1], device)
    assert_near_weights(only(expected)[0], only(got)[0], 5 * LR)


@each_optimizer
def test_forty_steps_match_the_reference(name, device):
    expected, got = pair(name, 4096, device, weight_decay=0.1)
    run(expected, range(40)), run(got, range(40))
    assert_same_state(only(expected)[1], only(got)[1], device)
    assert_near_weights(only(expected)[0], only(got)[0], 40 * LR)


def test_lions_weights_are_bitwise_equal_to_the_reference(device):
    if not has_reference_arithmetic(device):
        pytest.skip("the reference's operators round differently here")
    expected, got = pair("Lion8bit", 5000, device, weight_decay=0.3)
    run(expected), run(got)
    assert torch.equal(only(expected)[0], only(got)[0])


@each_optimizer
def test_the_memory_layout_does_not_change_the_step(name, device):
    flat = weight_of(5760, device)
    strided = nn.Parameter(flat.detach().view(72, 80).T.contiguous().T.detach())
    optimizer_class = getattr(optim, name)
    twin, optimizer = optimizer_class([flat]), optimizer_class([strided])
    for seed in range(2):
        flat.grad = gradient_of(flat, seed)
        strided.grad = flat.grad.repeat_interleave(2)[::2].view(72, 80)
        twin.step(), optimizer.step()
    assert torch.equal(strided.reshape(-1), flat)
    every_other = nn.Parameter(flat.detach().clone())
    every_other.grad = flat.grad.repeat_interleave(2)[::2]
    again = optimizer_class([every_other])
    again.step(), optimizer_class([flat]).step()
    assert torch.equal(every_other, flat)


class OtherCodes(QuantizedMoment):
    """A moment that the kernel does not support."""


class WithOtherCodes(optim.Lion8bit):
    def moments(self, weight, group):
        return (OtherCodes("exp_avg", signed=True),)


def test_other_encodings_use_the_reference(device):
    with observed(refuse):
        run(WithOtherCodes([weight_of(4096, device)]))


def refuse(kernel, *_) -> None:
    raise AssertionError(f"launched {kernel.__name__}")


@each_optimizer
def test_small_weights_and_float64_use_the_reference(name, device):
    for count, dtype in ((4095, torch.float32), (5000, torch.float64)):
        expected, got = pair(name, count, device, dtype)
        with observed(refuse):
            run(expected), run(got)
        assert torch.equal(only(expected)[0], only(got)[0])


@each_optimizer
def test_a_weight_takes_one_launch_and_a_short_last_block_another(name, device):
    optimizer_class = getattr(optim, name)
    for count, spans in ((4096, 1), (2**20, 1), (5000, 2), (5008, 1), (2**20 + 1, 2)):
        weight = torch.empty(count, device="meta", requires_grad=True)
        weight.grad = torch.empty_like(weight)
        seen = []
        with observed(lambda kernel, given, _: seen.append(given[0].numel())):  # noqa: B023
            optimizer_class([weight]).step()
        assert (len(seen), sum(seen)) == (spans, count)


# ------------------------------------------------------------------ step length


def drift_and_longest_step(spread: float, device) -> tuple[float, float]:
    """Return the relative drift from float64 Adam in 100 steps, and the longest step / lr."""
    scales = torch.exp(spread * torch.randn(4096, generator=seeded(1))).to(device)
    weight = nn.Parameter(torch.zeros(4096, device=device))
    exact = nn.Parameter(torch.zeros(4096, dtype=torch.float64, device=device))
    settings = {"lr": LR, "weight_decay": 0.0, "eps": 1e-8}
    optimizer, adamw = optim.Adam8bit([weight], **settings), reference.AdamW([exact], **settings)
    generator, longest = seeded(2), 0.0
    for _ in range(100):
        weight.grad = torch.randn(4096, generator=generator).to(device) * scales
        exact.grad = weight.grad.double()
        before = weight.detach().clone()
        optimizer.step(), adamw.step()
        longest = max(longest, ((weight - before).abs().max() / LR).item())
    distance, expected = weight.detach().double(), exact.detach()
    return ((distance - expected).norm() / expected.norm()).item(), longest


def test_log_normal_gradients_take_no_long_step(device):
    drift, longest = drift_and_longest_step(3.0, device)
    assert drift <= 0.7
    assert longest <= 3.5


@each_optimizer
def test_weights_without_gradients_do_not_move(name, device):
    weight = weight_of(4096, device)
    before, is_idle = weight.detach().clone(), torch.arange(4096, device=device) % 3 == 0
    optimizer = getattr(optim, name)([weight], weight_decay=0.0)
    for seed in range(20):
        weight.grad = gradient_of(weight, seed).masked_fill(is_idle, 0)
        optimizer.step()
    assert torch.equal(weight[is_idle], before[is_idle])
    assert not torch.equal(weight[~is_idle], before[~is_idle])


@each_optimizer
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_non_finite_gradient_only_affects_its_block(name, value, device):
    """Block 1 of 20 is 256 … 511. Its other elements still take the current step."""
    optimizer_class = getattr(optim, name)
    weight, expected = weight_of(5000, device), weight_of(5000, device)
    optimizer, clean = optimizer_class([weight]), optimizer_class([expected])
    run(optimizer, [1]), run(clean, [1])
    weight.grad, expected.grad = gradient_of(weight, 2), gradient_of(weight, 2)
    weight.grad[300] = value
    optimizer.step(), clean.step()
    numbers = torch.arange(5000, device=device)
    assert torch.equal(weight[numbers != 300], expected[numbers != 300])
    at_300 = weight.detach()[300].clone()
    run(optimizer), run(clean)
    in_block = (numbers >= 256) & (numbers < 512)
    assert torch.equal(weight[~in_block], expected[~in_block])
    assert optimizer.state[weight]["exp_avg_scales"].isnan().nonzero().tolist() == [[1]]
    if name == "Adam8bit":
        assert weight[in_block].isnan().all()
    elif math.isnan(value):  # the sign of NaN is 0, so the weight stays
        assert weight[300] == at_300


def test_a_square_beyond_float32_only_stops_its_weight(device):
    """v is infinite and m is not, so the step is zero, as in the reference."""
    expected, got = pair("Adam8bit", 4096, device, weight_decay=0.0)
    for optimizer in (expected, got):
        weight, _ = only(optimizer)
        weight.grad = gradient_of(weight, 0)
        weight.grad[5] = 1e25
        optimizer.step()
    assert only(got)[0][5] == only(expected)[0][5] == weight_of(4096, device)[5]
    assert_near_weights(only(expected)[0], only(got)[0], LR)


@each_optimizer
@pytest.mark.parametrize("scale", [1e-21, 1e-15, 1e12])
def test_gradients_of_any_size_match_the_reference(name, scale, device):
    """At 1e-21 squares underflow float32; at 1e-15 their scales almost do."""
    expected, got = pair(name, 4096, device)
    for optimizer in (expected, got):
        weight, _ = only(optimizer)
        for seed in range(2):
            weight.grad = gradient_of(weight, seed) * scale
            optimizer.step()
    assert_same_state(only(expected)[1], only(got)[1], device)
    assert_near_weights(only(expected)[0], only(got)[0], 5 * LR)


# ------------------------------------------------------------------ stochastic rounding


@triton.jit
def random_kernel(x_ptr, seed_ptr, out_ptr):
    rows = tl.program_id(0) * 4 + tl.arange(0, 4)
    at = rows[:, None] * 256 + tl.arange(0, 256)[None, :]
    tl.store(out_ptr + at, optim.stochastic_round(tl.load(x_ptr + at), seed_ptr, 4))


def rounded(x: Tensor, seed: int = 0) -> Tensor:
    out = torch.empty_like(x)
    seeds = torch.tensor([seed], device=x.device)
    random_kernel[(len(x) // 1024,)](x, seeds, out)
    assert torch.equal(out.bfloat16().float().nan_to_num(1), out.nan_to_num(1))
    return out


@pytest.mark.parametrize("value", [1.001, -3.14159, 1e-3, 1e-39])
def test_stochastic_rounding_is_unbiased(value, device):
    precise = torch.full((16 * 1024,), value, device=device)
    down = (precise[:1].view(torch.int32) & ~0xFFFF).view(torch.float32).double().item()
    up = ((precise[:1].view(torch.int32) & ~0xFFFF) + 0x10000).view(torch.float32).double().item()
    result = rounded(precise)
    assert set(result.tolist()) == {down, up}
    error = abs(result.double().mean().item() - precise[0].double().item())
    assert error <= 4 * abs(up - down) / 2 / len(precise) ** 0.5


def test_elements_of_a_draw_and_programs_round_independently(device):
    """Values half-way between two bfloat16s round up or down independently."""
    x = torch.full((16 * 1024,), 1 + 2**-8, device=device)
    coins = (rounded(x) > 1).double()
    for parts in (coins.view(-1, 8), coins.view(16, 1024).T, coins.view(-1, 256)[:, :8]):
        centred = parts * 2 - 1
        alike = (centred.T @ centred / len(parts)).fill_diagonal_(0).abs().max().item()
        assert alike <= 5 / len(parts) ** 0.5
    assert not torch.equal(coins, (rounded(x, 1) > 1).double())
    assert not torch.equal(coins, (rounded(x, 2**40) > 1).double())


def test_bfloat16_values_infinities_nan_and_zeros_are_unchanged(device):
    x = torch.randn(1024, generator=seeded()).bfloat16().float().to(device)
    x[:5] = torch.tensor([math.inf, -math.inf, math.nan, -0.0, 0.0])
    x[5:7] = torch.tensor([2**31 - 1, -1], dtype=torch.int32).view(torch.float32)  # NaN: all ones
    result = rounded(x)
    assert torch.equal(result.nan_to_num(7), x.nan_to_num(7))
    assert result[3:5].signbit().tolist() == [True, False]
    assert result[[2, 5, 6]].isnan().all()


@each_optimizer
def test_stochastically_rounded_weights_match_float32_on_average(name, device):
    """Equal weights move by 1/300 of bfloat16's spacing in every step."""
    start, lr = 1.0, 2**-7 / 300
    settings = {"lr": lr, "weight_decay": 0.0, "rounding": "stochastic"}
    weight = nn.Parameter(torch.full((8192,), start, device=device, dtype=torch.bfloat16))
    generator = torch.Generator(device).manual_seed(3)
    optimizer = getattr(optim, name)([weight], generator=generator, **settings)
    for _ in range(10):
        weight.grad = torch.full_like(weight, -1.0)
        optimizer.step()
    moved = weight.detach().double().mean().item() - start
    # Each weight moves with probability 1/30; allow four standard errors.
    assert abs(moved - 10 * lr) <= 4 * 2**-7 * (1 / 30 / 8192) ** 0.5


@each_optimizer
def test_a_generator_repeats_its_draws_and_the_default_one_is_untouched(name, device):
    def stepped(seed: int) -> Tensor:
        generator = torch.Generator(device).manual_seed(seed)
        weight = weight_of(4096, device, torch.bfloat16)
        optimizer_class = getattr(optim, name)([weight], rounding="stochastic", generator=generator)
        run(optimizer_class, range(2))
        return weight.detach()

    before = torch.get_rng_state()
    assert torch.equal(stepped(1), stepped(1))
    assert not torch.equal(stepped(1), stepped(2))
    assert torch.equal(torch.get_rng_state(), before)


@each_optimizer
def test_stochastic_rounding_does_not_change_the_moments(name, device):
    expected, got = pair(name, 4096, device, torch.bfloat16)
    got.param_groups[0]["rounding"] = "stochastic"
    run(expected), run(got)
    assert_same_state(only(expected)[1], only(got)[1], device)


# ------------------------------------------------------------------ states


@each_optimizer
@pytest.mark.parametrize("to_kernel", [True, False], ids=["to the kernel", "to the reference"])
def test_states_load_in_both_directions(name, to_kernel, device):
    classes = [getattr(reference, name), getattr(optim, name)]
    first, second = classes if to_kernel else classes[::-1]
    weights = weight_of(5000, device), weight_of(100, device)
    original = first(weights, lr=0.003, weight_decay=0.1)
    run(original, range(2))
    copies = [nn.Parameter(weight.detach().clone()) for weight in weights]
    resumed = second(copies)
    resumed.load_state_dict(original.state_dict())
    run(original, [5, 6]), run(resumed, [5, 6])
    for weight, copy in zip(weights, copies, strict=True):
        assert_same_state(original.state[weight], resumed.state[copy], device)
        assert_near_weights(weight, copy, 5 * 0.003)


@each_optimizer
def test_two_groups_have_their_own_settings(name, device):
    def stepped(module) -> list[Tensor]:
        weights = [weight_of(4096, device, seed=seed) for seed in range(2)]
        groups = [{"params": weights[:1], "weight_decay": 0.5}, {"params": weights[1:], "lr": 0.1}]
        run(getattr(module, name)(groups, lr=0.01))
        return weights

    for expected, got in zip(stepped(reference), stepped(optim), strict=True):
        assert_near_weights(expected, got, 0.5)


# ------------------------------------------------------------------ combinations


def model_of(device) -> nn.Sequential:
    torch.manual_seed(0)
    layers = nn.Linear(64, 80), nn.Tanh(), nn.Linear(80, 64)
    return nn.Sequential(*layers).to(device)


def trained(
    device, optimizer_class: Callable, wrap: Callable = lambda optimizer: optimizer
) -> list[Tensor]:
    model = model_of(device)
    optimizer = wrap(optimizer_class(model.parameters(), lr=0.01))
    for seed in range(3):
        optimizer.zero_grad()
        x = torch.randn(5, 64, generator=seeded(seed)).to(device)
        model(x).square().mean().backward()
        optimizer.step()
    return list(model.parameters())


def offloaded(optimizer):
    from memlab.offload import DiskStore, OffloadedOptimizer

    return OffloadedOptimizer(optimizer, DiskStore(), sub_group=6000)


@each_optimizer
@pytest.mark.parametrize("wrap", [step_in_backward, offloaded])
def test_steps_are_the_same_in_backward_and_offloaded(name, wrap, device):
    optimizer_class = getattr(optim, name)
    plain, wrapped = trained(device, optimizer_class), trained(device, optimizer_class, wrap)
    assert all(map(torch.equal, plain, wrapped))


@each_optimizer
def test_zero_refuses_it_like_the_reference(name, device):
    from memlab.zero import simulate

    model = model_of(device)
    with pytest.raises(TypeError, match="use an elementwise optimizer"):
        simulate(model, getattr(optim, name)(model.parameters()), 2, 2)


# ------------------------------------------------------------------ bytes


def traced(name: str, device, dtype=torch.float32, count: int = 2**14, **settings):
    model = nn.Module()
    model.weight = weight_of(count, device, dtype)
    optimizer = getattr(optim, name)(model.parameters(), **settings)
    model.weight.grad = torch.ones_like(model.weight)
    optimizer.step()
    return memlab.measure(optimizer.step, model=model, optimizer=optimizer)


def allocated_by_step(trace) -> list[int]:
    events = [event for event in trace.events if event.phase == "optimizer"]
    return [event.bytes for event in events if event.bytes > 0]


@each_optimizer
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_step_allocates_nothing(name, dtype, device):
    trace = traced(name, device, dtype)
    assert allocated_by_step(trace) == []
    assert trace.peak_bytes == trace.live_bytes


@each_optimizer
def test_stochastic_rounding_allocates_one_seed(name, device):
    trace = traced(name, device, torch.bfloat16, rounding="stochastic")
    (seed,) = allocated_by_step(trace)
    assert seed == (8 if device.type == "cpu" else 512)


@each_optimizer
@pytest.mark.parametrize("rounding", ["nearest", "stochastic"])
def test_a_dry_step_has_the_bytes_of_the_real_one(name, rounding, device):
    settings = {"dtype": torch.bfloat16, "rounding": rounding, "count": 8192}
    real = traced(name, device, **settings)
    with memlab.dry_run():
        dry = traced(name, device, **settings)
    assert allocated_by_step(dry) == allocated_by_step(real)
    assert dry.peak_bytes == real.peak_bytes
    assert dry.at_end["optimizer_state"] == real.at_end["optimizer_state"]


@each_optimizer
def test_the_state_has_the_reference_bytes_and_smaller_tables(name, device):
    """255 thresholds per codebook, where the reference also has tables of 65 KiB."""
    codes = 2 if name == "Adam8bit" else 1
    expected = codes * (10_000 + 4 * 40 + 1024 + 4 * 255)
    assert traced(name, device, count=10_000).at_end["optimizer_state"] == expected


def test_thresholds_are_cached_as_long_as_their_codebook():
    codebook = dynamic_code(True)
    first = optim.thresholds_of(codebook)
    before = len(optim._cached_thresholds)
    assert optim.thresholds_of(codebook).data_ptr() == first.data_ptr()
    assert len(optim._cached_thresholds) == before
    del codebook
    assert len(optim._cached_thresholds) == before - 1


# ------------------------------------------------------------------ compiled

COMPILE = """
from torch import nn
from memlab.kernels import optim

def step(cls, dtype, **settings):
    weight = nn.Parameter(torch.empty(2**20, dtype=dtype, device="meta"))
    weight.grad = torch.empty_like(weight)
    cls([weight], **settings).step()

with compiled_for(89) as made:
    step(optim.Adam8bit, torch.float32)
    step(optim.Adam8bit, torch.bfloat16, rounding="stochastic")
    step(optim.Lion8bit, torch.float16)
report(made)
"""


@pytest.mark.slow
def test_compiled_kernels_spill_nothing_and_load_eight_codes_at_a_time(compiled):
    optimizer_class = compiled(COMPILE)
    assert len(optimizer_class) == 3
    for kernel in optimizer_class:
        assert kernel["spilled"] == 0
        assert kernel["registers"] <= 96
        assert kernel["shared"] <= 4096
        assert "ld.global.b8" not in kernel["ptx"]
        assert "st.global.b8" not in kernel["ptx"]
        assert "fma.rn.f32" in kernel["ptx"]


def test_a_refused_step_is_not_counted(monkeypatch):
    monkeypatch.setattr(launching, "INTERPRETED", False)
    weight = torch.nn.Parameter(torch.zeros(4096))
    weight.grad = torch.ones(4096)
    optimizer = optim.Adam8bit([weight])
    with pytest.raises(RuntimeError, match="set TRITON_INTERPRET=1"):
        optimizer.step()
    assert not optimizer.state[weight]
