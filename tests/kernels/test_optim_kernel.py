"""The fused 8-bit optimizers: the reference's codes, scales and weights; the code of any number by
one look at a table; nothing made on the way.
"""

import math
from collections.abc import Callable

import pytest
import torch
import triton
import triton.language as tl
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

each = pytest.mark.parametrize("name", NAMES)
# numpy, in the interpreter, warns of what a GPU passes over.
pytestmark = [
    pytest.mark.filterwarnings("ignore:(invalid value|overflow|divide by zero):RuntimeWarning")
]


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def weight_of(count: int, device, dtype=torch.float32, seed: int = 0) -> nn.Parameter:
    return nn.Parameter(torch.randn(count, generator=seeded(seed)).to(device, dtype))


def gradient_of(weight: Tensor, seed: int, spread: float = 2.0) -> Tensor:
    """Of sizes that are log-normal, one in seven of them zero."""
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
    """The reference and the kernel's, of weights of their own."""
    classes = getattr(reference, name), getattr(optim, name)
    return [cls([weight_of(count, device, dtype)], **settings) for cls in classes]


def only(optimizer) -> tuple[nn.Parameter, dict]:
    ((weight,),) = (group["params"] for group in optimizer.param_groups)
    return weight, optimizer.state[weight]


def has_the_references_arithmetic(device: torch.device) -> bool:
    """Where its operators fuse what they multiply and add: not all CPUs can, a GPU does other."""
    return device.type == "cpu" and "AVX" in torch.backends.cpu.get_cpu_capability()


def assert_same_state(wanted: dict, got: dict, device: torch.device) -> None:
    """To the bit, or one code in a thousand the neighbour's and scales within 1e-6."""
    assert wanted.keys() == got.keys()
    assert wanted["step"] == got["step"]
    is_exact = has_the_references_arithmetic(device)
    for name in wanted:
        if name.endswith("_codes"):
            apart = (wanted[name].int() - got[name].int()).abs()
            assert apart.max() <= 1
            assert apart.double().mean() <= (0 if is_exact else 1e-3)
        elif name.endswith("_scales"):
            rtol = 0 if is_exact else 1e-6
            torch.testing.assert_close(got[name], wanted[name], rtol=rtol, atol=0)


def assert_near_weights(wanted: Tensor, got: Tensor, lr: float) -> None:
    """Within 1e-6 of a step and a rounding of themselves, but for those whose code is another."""
    low = wanted.dtype != torch.float32
    rounding = torch.finfo(wanted.dtype).eps * wanted.float().abs() + (6e-8 if low else 0)
    apart = (wanted.float() - got.float()).abs()
    is_exact = has_the_references_arithmetic(wanted.device)
    assert (apart > rounding + 1e-6 * lr).double().mean() <= (0 if is_exact else 5e-3)
    if low:  # a last place of float32 that decides a rounding
        assert (apart > 0).double().mean() <= 0.01


# ------------------------------------------------------------------ the code of a number


@triton.jit
def nearest_kernel(x_ptr, thresholds_ptr, out_ptr, count, SIGNED: tl.constexpr):
    at = tl.program_id(0) * 4096 + tl.arange(0, 4096)
    x = tl.load(x_ptr + at, at < count, other=0.0)
    tl.store(out_ptr + at, optim.nearest_entry(x, thresholds_ptr, SIGNED), at < count)


@triton.jit
def guess_kernel(x_ptr, out_ptr, count, SIGNED: tl.constexpr):
    at = tl.program_id(0) * 4096 + tl.arange(0, 4096)
    x = tl.load(x_ptr + at, at < count, other=0.0)
    tl.store(out_ptr + at, optim.estimate_position(x, SIGNED), at < count)


@triton.jit
def fractions_kernel(x_ptr, scales_ptr, out_ptr):
    rows = tl.program_id(0) * 8 + tl.arange(0, 8)
    at = rows[:, None] * 256 + tl.arange(0, 256)[None, :]
    quotients = divide_by_scales(tl.load(x_ptr + at), tl.load(scales_ptr + rows))
    tl.store(out_ptr + at, quotients)


def started(kernel, x: Tensor, *others: Tensor, signed: bool) -> Tensor:
    out = torch.empty(len(x), dtype=torch.int32, device=x.device)
    kernel[(-(-len(x) // 4096),)](x, *others, out, len(x), SIGNED=signed)
    return out


def edge_cases(signed: bool) -> Tensor:
    """Every threshold, number and end of a decade with their neighbours, random numbers of every
    size, and what is beyond."""
    code = dynamic_code(signed)
    ends = 10.0 ** torch.arange(-9, 1)
    edges = torch.cat([thresholds(code), code, ends, -ends])
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
def test_the_code_of_any_number_is_the_nearest_by_one_look_at_a_table(signed, device):
    numbers = edge_cases(signed).to(device)
    code = dynamic_code(signed).to(device)
    found = started(nearest_kernel, numbers, thresholds(code), signed=signed)
    assert torch.equal(found, nearest_code(numbers, code).int())


@pytest.mark.parametrize("signed", [True, False])
def test_no_threshold_is_near_to_where_the_guess_changes(signed, device):
    """A fifth of a part, less what the reckoning rounds: it is right however a GPU rounds."""
    thresholds = thresholds(dynamic_code(signed))
    thresholds = thresholds[thresholds > 0]
    decades = torch.floor(torch.log10(thresholds.double())) + 1
    part = 10**decades * 0.9 / 2 ** (decades + 6) / (1 if signed else 2)
    wide = torch.tensor([-1, 1]).view(2, 1) * 0.2 * part
    around = (thresholds + wide).float().clamp(max=1).to(device)
    guesses = [started(guess_kernel, some, signed=signed) for some in around]
    assert torch.equal(*guesses)


def test_fractions_are_the_quotients_rounded_to_the_nearest_whatever_the_scale(device):
    """Where they have a code: below 2⁻²⁴ it is zero's however they were rounded."""
    scales = torch.cat([2.0 ** torch.linspace(-149, 127, 510), torch.tensor([0.0, math.nan])])
    scales[:510] *= 1 + torch.rand(510, generator=seeded(1)) / 2
    numbers = scales[:, None] * (2 * torch.rand(512, 256, generator=seeded(2)) - 1)
    numbers *= 2.0 ** -torch.randint(20, (512, 256), generator=seeded(3))
    out = torch.empty(512, 256, device=device)
    fractions_kernel[(64,)](numbers.to(device), scales.to(device), out)
    wanted, found = (numbers / scales[:, None])[:510], out.cpu()[:510]
    has_code = wanted.abs() > 2.0**-24
    assert torch.equal(found[has_code], wanted[has_code])
    assert found[~has_code].abs().max() <= 1.01 * 2.0**-24
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
    "in pieces": {"piece": 1100, "weight_decay": 0.1},
}


@each
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("settings", SETTINGS.values(), ids=SETTINGS)
def test_steps_are_the_references(name, dtype, settings, device):
    wanted, got = pair(name, 5000, device, dtype, **settings)
    for seed in range(3):
        run(wanted, [seed]), run(got, [seed])
        assert_same_state(only(wanted)[1], only(got)[1], device)
        lr = float(wanted.param_groups[0]["lr"])
        assert_near_weights(only(wanted)[0], only(got)[0], 5 * lr)


@each
@pytest.mark.parametrize("count", [4096, 4097, 4111, 4112, 65_536 + 1])
def test_a_weight_of_any_length_is_stepped_whole_and_no_further(name, count, device):
    """The weight, its gradient and its codes stand before other numbers, which stay."""
    wanted, got = pair(name, count, device)
    roomy = torch.full((count + 600,), 7.0, device=device)
    weight, _ = only(got)
    roomy[:count] = weight.detach()
    weight.data = roomy[:count]
    run(wanted, range(2)), run(got, range(2))
    assert_same_state(only(wanted)[1], only(got)[1], device)
    assert_near_weights(only(wanted)[0], weight, 5 * LR)
    assert (roomy[count:] == 7).all()


@each
def test_tiles_of_four_blocks_take_the_same_steps(name, device, monkeypatch):
    """A GPU's; the interpreter's are larger."""
    monkeypatch.setattr(optim, "ROWS", 4)
    wanted, got = pair(name, 5000, device, weight_decay=0.1)
    run(wanted, range(2)), run(got, range(2))
    assert_same_state(only(wanted)[1], only(got)[1], device)
    assert_near_weights(only(wanted)[0], only(got)[0], 5 * LR)


@each
def test_forty_steps_have_the_references_codes(name, device):
    wanted, got = pair(name, 4096, device, weight_decay=0.1)
    run(wanted, range(40)), run(got, range(40))
    assert_same_state(only(wanted)[1], only(got)[1], device)
    assert_near_weights(only(wanted)[0], only(got)[0], 40 * LR)


def test_lions_weights_are_the_references_to_the_bit(device):
    if not has_the_references_arithmetic(device):
        pytest.skip("the reference's operators round otherwise here")
    wanted, got = pair("Lion8bit", 5000, device, weight_decay=0.3)
    run(wanted), run(got)
    assert torch.equal(only(wanted)[0], only(got)[0])


@each
def test_a_layout_changes_nothing_but_itself(name, device):
    flat = weight_of(5760, device)
    strided = nn.Parameter(flat.detach().view(72, 80).T.contiguous().T.detach())
    made = getattr(optim, name)
    twin, optimizer = made([flat]), made([strided])
    for seed in range(2):
        flat.grad = gradient_of(flat, seed)
        strided.grad = flat.grad.repeat_interleave(2)[::2].view(72, 80)
        twin.step(), optimizer.step()
    assert torch.equal(strided.reshape(-1), flat)
    every_other = nn.Parameter(flat.detach().clone())
    every_other.grad = flat.grad.repeat_interleave(2)[::2]
    again = made([every_other])
    again.step(), made([flat]).step()
    assert torch.equal(every_other, flat)


class OtherCodes(QuantizedMoment):
    """What a kernel knows nothing of."""


class WithOtherCodes(optim.Lion8bit):
    def moments(self, weight, group):
        return (OtherCodes("exp_avg", signed=True),)


def test_moments_that_are_encoded_otherwise_go_the_references_way(device):
    with observed(refuse):
        run(WithOtherCodes([weight_of(4096, device)]))


def refuse(kernel, *_) -> None:
    raise AssertionError(f"launched {kernel.__name__}")


@each
def test_small_weights_and_float64_go_the_references_way_to_the_bit(name, device):
    for count, dtype in ((4095, torch.float32), (5000, torch.float64)):
        wanted, got = pair(name, count, device, dtype)
        with observed(refuse):
            run(wanted), run(got)
        assert torch.equal(only(wanted)[0], only(got)[0])


@each
def test_a_weight_takes_one_launch_a_short_last_block_one_more(name, device):
    made = getattr(optim, name)
    for count, spans in ((4096, 1), (2**20, 1), (5000, 2), (5008, 1), (2**20 + 1, 2)):
        weight = torch.empty(count, device="meta", requires_grad=True)
        weight.grad = torch.empty_like(weight)
        seen = []
        with observed(lambda kernel, given, _: seen.append(given[0].numel())):  # noqa: B023
            made([weight]).step()
        assert (len(seen), sum(seen)) == (spans, count)


# ------------------------------------------------------------------ safety, as the reference's


def ways(spread: float, device) -> tuple[float, float]:
    """How far 100 steps lead from float64 Adam's, as a part of the way, and the longest step as a
    multiple of lr."""
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
    way, wanted = weight.detach().double(), exact.detach()
    return ((way - wanted).norm() / wanted.norm()).item(), longest


def test_log_normal_gradients_make_no_step_long(device):
    drift, longest = ways(3.0, device)
    assert drift <= 0.7
    assert longest <= 3.5


@each
def test_weights_that_never_have_a_gradient_do_not_move_at_all(name, device):
    weight = weight_of(4096, device)
    before, quiet = weight.detach().clone(), torch.arange(4096, device=device) % 3 == 0
    optimizer = getattr(optim, name)([weight], weight_decay=0.0)
    for seed in range(20):
        weight.grad = gradient_of(weight, seed).masked_fill(quiet, 0)
        optimizer.step()
    assert torch.equal(weight[quiet], before[quiet])
    assert not torch.equal(weight[~quiet], before[~quiet])


@each
@pytest.mark.parametrize("wrong", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite_takes_its_block_at_the_next_step_and_no_other(name, wrong, device):
    """Block 1 of 20 is 256 … 511. At the step itself its other numbers are stepped as ever."""
    made = getattr(optim, name)
    weight, wanted = weight_of(5000, device), weight_of(5000, device)
    optimizer, clean = made([weight]), made([wanted])
    run(optimizer, [1]), run(clean, [1])
    weight.grad, wanted.grad = gradient_of(weight, 2), gradient_of(weight, 2)
    weight.grad[300] = wrong
    optimizer.step(), clean.step()
    numbers = torch.arange(5000, device=device)
    assert torch.equal(weight[numbers != 300], wanted[numbers != 300])
    at_300 = weight.detach()[300].clone()
    run(optimizer), run(clean)
    in_block = (numbers >= 256) & (numbers < 512)
    assert torch.equal(weight[~in_block], wanted[~in_block])
    assert optimizer.state[weight]["exp_avg_scales"].isnan().nonzero().tolist() == [[1]]
    if name == "Adam8bit":
        assert weight[in_block].isnan().all()
    elif math.isnan(wrong):  # has no sign: the weight stands
        assert weight[300] == at_300


def test_a_square_beyond_float32_stops_its_weight_and_no_other(device):
    """v is infinite there, m is not: a step of zero, as the reference's."""
    wanted, got = pair("Adam8bit", 4096, device, weight_decay=0.0)
    for optimizer in (wanted, got):
        weight, _ = only(optimizer)
        weight.grad = gradient_of(weight, 0)
        weight.grad[5] = 1e25
        optimizer.step()
    assert only(got)[0][5] == only(wanted)[0][5] == weight_of(4096, device)[5]
    assert_near_weights(only(wanted)[0], only(got)[0], LR)


@each
@pytest.mark.parametrize("scale", [1e-21, 1e-15, 1e12])
def test_gradients_of_any_size_have_the_references_codes(name, scale, device):
    """Of 1e-21, squares are not float32s any more; of 1e-15, their scales barely are."""
    wanted, got = pair(name, 4096, device)
    for optimizer in (wanted, got):
        weight, _ = only(optimizer)
        for seed in range(2):
            weight.grad = gradient_of(weight, seed) * scale
            optimizer.step()
    assert_same_state(only(wanted)[1], only(got)[1], device)
    assert_near_weights(only(wanted)[0], only(got)[0], 5 * LR)


# ------------------------------------------------------------------ rounding at random


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


@pytest.mark.parametrize("number", [1.001, -3.14159, 1e-3, 1e-39])
def test_the_mean_of_many_roundings_is_the_number(number, device):
    precise = torch.full((16 * 1024,), number, device=device)
    down = (precise[:1].view(torch.int32) & ~0xFFFF).view(torch.float32).double().item()
    up = ((precise[:1].view(torch.int32) & ~0xFFFF) + 0x10000).view(torch.float32).double().item()
    found = rounded(precise)
    assert set(found.tolist()) == {down, up}
    error = abs(found.double().mean().item() - precise[0].double().item())
    assert error <= 4 * abs(up - down) / 2 / len(precise) ** 0.5


def test_the_eight_numbers_of_a_draw_and_the_programs_round_each_for_itself(device):
    """Half-way between two bfloat16s: up or down by a coin, and no two coins are one."""
    x = torch.full((16 * 1024,), 1 + 2**-8, device=device)
    coins = (rounded(x) > 1).double()
    for parts in (coins.view(-1, 8), coins.view(16, 1024).T, coins.view(-1, 256)[:, :8]):
        centred = parts * 2 - 1
        alike = (centred.T @ centred / len(parts)).fill_diagonal_(0).abs().max().item()
        assert alike <= 5 / len(parts) ** 0.5
    assert not torch.equal(coins, (rounded(x, 1) > 1).double())
    assert not torch.equal(coins, (rounded(x, 2**40) > 1).double())


def test_bfloat16s_infinities_nan_and_zeros_stay(device):
    x = torch.randn(1024, generator=seeded()).bfloat16().float().to(device)
    x[:5] = torch.tensor([math.inf, -math.inf, math.nan, -0.0, 0.0])
    x[5:7] = torch.tensor([2**31 - 1, -1], dtype=torch.int32).view(torch.float32)  # NaN: all ones
    found = rounded(x)
    assert torch.equal(found.nan_to_num(7), x.nan_to_num(7))
    assert found[3:5].signbit().tolist() == [True, False]
    assert found[[2, 5, 6]].isnan().all()


@each
def test_rounded_at_random_weights_are_in_the_mean_those_of_float32(name, device):
    """All numbers of one size; every step moves each by 1/300 of a bfloat16's step."""
    start, lr = 1.0, 2**-7 / 300
    settings = {"lr": lr, "weight_decay": 0.0, "rounding": "stochastic"}
    weight = nn.Parameter(torch.full((8192,), start, device=device, dtype=torch.bfloat16))
    generator = torch.Generator(device).manual_seed(3)
    optimizer = getattr(optim, name)([weight], generator=generator, **settings)
    for _ in range(10):
        weight.grad = torch.full_like(weight, -1.0)
        optimizer.step()
    moved = weight.detach().double().mean().item() - start
    # A coin of odds 1/30 for each number, four standard errors.
    assert abs(moved - 10 * lr) <= 4 * 2**-7 * (1 / 30 / 8192) ** 0.5


@each
def test_a_generator_decides_the_draws_and_the_users_is_untouched(name, device):
    def stepped(seed: int) -> Tensor:
        generator = torch.Generator(device).manual_seed(seed)
        weight = weight_of(4096, device, torch.bfloat16)
        made = getattr(optim, name)([weight], rounding="stochastic", generator=generator)
        run(made, range(2))
        return weight.detach()

    before = torch.get_rng_state()
    assert torch.equal(stepped(1), stepped(1))
    assert not torch.equal(stepped(1), stepped(2))
    assert torch.equal(torch.get_rng_state(), before)


@each
def test_rounding_at_random_leaves_the_moments_as_they_are(name, device):
    wanted, got = pair(name, 4096, device, torch.bfloat16)
    got.param_groups[0]["rounding"] = "stochastic"
    run(wanted), run(got)
    assert_same_state(only(wanted)[1], only(got)[1], device)


# ------------------------------------------------------------------ states


@each
@pytest.mark.parametrize("there", [True, False], ids=["to the kernel", "to the reference"])
def test_a_state_goes_to_and_fro(name, there, device):
    classes = [getattr(reference, name), getattr(optim, name)]
    first, second = classes if there else classes[::-1]
    weights = weight_of(5000, device), weight_of(100, device)
    begun = first(weights, lr=0.003, weight_decay=0.1)
    run(begun, range(2))
    copies = [nn.Parameter(weight.detach().clone()) for weight in weights]
    resumed = second(copies)
    resumed.load_state_dict(begun.state_dict())
    run(begun, [5, 6]), run(resumed, [5, 6])
    for weight, copy in zip(weights, copies, strict=True):
        assert_same_state(begun.state[weight], resumed.state[copy], device)
        assert_near_weights(weight, copy, 5 * 0.003)


@each
def test_two_groups_have_settings_of_their_own(name, device):
    def stepped(module) -> list[Tensor]:
        weights = [weight_of(4096, device, seed=seed) for seed in range(2)]
        groups = [{"params": weights[:1], "weight_decay": 0.5}, {"params": weights[1:], "lr": 0.1}]
        run(getattr(module, name)(groups, lr=0.01))
        return weights

    for wanted, got in zip(stepped(reference), stepped(optim), strict=True):
        assert_near_weights(wanted, got, 0.5)


# ------------------------------------------------------------------ beside other techniques


def model_of(device) -> nn.Sequential:
    torch.manual_seed(0)
    layers = nn.Linear(64, 80), nn.Tanh(), nn.Linear(80, 64)
    return nn.Sequential(*layers).to(device)


def trained(device, made: Callable, wrap: Callable = lambda optimizer: optimizer) -> list[Tensor]:
    model = model_of(device)
    optimizer = wrap(made(model.parameters(), lr=0.01))
    for seed in range(3):
        optimizer.zero_grad()
        x = torch.randn(5, 64, generator=seeded(seed)).to(device)
        model(x).square().mean().backward()
        optimizer.step()
    return list(model.parameters())


def offloaded(optimizer):
    from memlab.offload import DiskStore, OffloadedOptimizer

    return OffloadedOptimizer(optimizer, DiskStore(), sub_group=6000)


@each
@pytest.mark.parametrize("wrap", [step_in_backward, offloaded])
def test_in_backward_and_offloaded_it_takes_the_same_steps(name, wrap, device):
    made = getattr(optim, name)
    plain, wrapped = trained(device, made), trained(device, made, wrap)
    assert all(map(torch.equal, plain, wrapped))


@each
def test_zero_refuses_it_as_it_does_the_reference(name, device):
    from memlab.zero import simulate

    model = model_of(device)
    with pytest.raises(TypeError, match="treats each number by itself"):
        simulate(model, getattr(optim, name)(model.parameters()), 2, 2)


# ------------------------------------------------------------------ bytes


def traced(name: str, device, dtype=torch.float32, count: int = 2**14, **settings):
    model = nn.Module()
    model.weight = weight_of(count, device, dtype)
    optimizer = getattr(optim, name)(model.parameters(), **settings)
    model.weight.grad = torch.ones_like(model.weight)
    optimizer.step()
    return memlab.measure(optimizer.step, model=model, optimizer=optimizer)


def made_on_the_way(trace) -> list[int]:
    events = [event for event in trace.events if event.phase == "optimizer"]
    return [event.bytes for event in events if event.bytes > 0]


@each
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_step_makes_nothing_on_the_way(name, dtype, device):
    trace = traced(name, device, dtype)
    assert made_on_the_way(trace) == []
    assert trace.peak_bytes == trace.live_bytes


@each
def test_rounded_at_random_it_makes_one_seed(name, device):
    trace = traced(name, device, torch.bfloat16, rounding="stochastic")
    (seed,) = made_on_the_way(trace)
    assert seed == (8 if device.type == "cpu" else 512)


@each
@pytest.mark.parametrize("rounding", ["nearest", "stochastic"])
def test_a_dry_step_has_the_bytes_of_the_real_one(name, rounding, device):
    settings = {"dtype": torch.bfloat16, "rounding": rounding, "count": 8192}
    real = traced(name, device, **settings)
    with memlab.dry_run():
        dry = traced(name, device, **settings)
    assert made_on_the_way(dry) == made_on_the_way(real)
    assert dry.peak_bytes == real.peak_bytes
    assert dry.at_end["optimizer_state"] == real.at_end["optimizer_state"]


@each
def test_the_state_has_the_references_bytes_and_smaller_tables(name, device):
    """Thresholds alone: 255 a code, where the reference has 65 KiB too."""
    codes = 2 if name == "Adam8bit" else 1
    wanted = codes * (10_000 + 4 * 40 + 1024 + 4 * 255)
    assert traced(name, device, count=10_000).at_end["optimizer_state"] == wanted


def test_thresholds_are_made_once_and_live_as_long_as_their_code():
    code = dynamic_code(True)
    first = optim.thresholds_of(code)
    before = len(optim._cached_thresholds)
    assert optim.thresholds_of(code).data_ptr() == first.data_ptr()
    assert len(optim._cached_thresholds) == before
    del code
    assert len(optim._cached_thresholds) == before - 1


# ------------------------------------------------------------------ for GPUs

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


def test_for_a_gpu_nothing_spills_and_codes_are_read_eight_at_a_time(compiled):
    made = compiled(COMPILE)
    assert len(made) == 3
    for kernel in made:
        assert kernel["spilled"] == 0
        assert kernel["registers"] <= 96
        assert kernel["shared"] <= 4096
        assert "ld.global.b8" not in kernel["ptx"]
        assert "st.global.b8" not in kernel["ptx"]
        assert "fma.rn.f32" in kernel["ptx"]


def test_a_step_that_is_refused_does_not_count(monkeypatch):
    monkeypatch.setattr(launching, "INTERPRETED", False)
    weight = torch.nn.Parameter(torch.zeros(4096))
    weight.grad = torch.ones(4096)
    optimizer = optim.Adam8bit([weight])
    with pytest.raises(RuntimeError, match="set TRITON_INTERPRET=1"):
        optimizer.step()
    assert not optimizer.state[weight]
