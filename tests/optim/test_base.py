"""The loop shared by all optimizers: groups, states, dtypes, layouts, chunks and invalid input.

Where torch has the same optimizer, it is the oracle, stepping one weight at a time.
"""

import copy
import io
import math
import pickle
from functools import partial
from itertools import pairwise

import pytest
import torch
from close import assert_close
from torch import nn

import memlab
from memlab.internals.chunks import CHUNK_SIZE, CHUNK_SIZE_ON_ACCELERATOR
from memlab.optim import Adam8bit, AdamMini, AdamW, Lion, Lion8bit
from memlab.trace import Trace

OURS = [AdamW, Adam8bit, AdamMini, Lion, Lion8bit]
BY_ELEMENT = [AdamW, Adam8bit, Lion, Lion8bit]  # AdamMini depends on the shape
SIZES = (5000, 7)  # a quantized weight with a short last block, and an unquantized one
torch_adamw = partial(torch.optim.AdamW, foreach=False)


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def weights_of(*shapes, dtype=torch.float32, seed=0) -> list[nn.Parameter]:
    generator = seeded(seed)
    return [nn.Parameter(torch.randn(shape, generator=generator).to(dtype)) for shape in shapes]


def give_gradients(weights, seed: int) -> None:
    generator = seeded(seed)
    for weight in weights:
        weight.grad = torch.randn(weight.shape, generator=generator).to(weight.dtype)


def run(optimizer, steps=range(100, 105)) -> None:
    """Step with random gradients, the same for every optimizer."""
    for seed in steps:
        for number, group in enumerate(optimizer.param_groups):
            give_gradients(group["params"], seed + 1000 * number)
        optimizer.step()


def weights_in(optimizer) -> list[torch.Tensor]:
    return [weight.detach() for group in optimizer.param_groups for weight in group["params"]]


def assert_equal(optimizer, other) -> None:
    for ours, theirs in zip(weights_in(optimizer), weights_in(other), strict=True):
        assert torch.equal(ours, theirs)


def assert_near(optimizer, other) -> None:
    for ours, theirs in zip(weights_in(optimizer), weights_in(other), strict=True):
        assert_close(ours, theirs, terms=8)


def tensors_of(optimizer) -> list[torch.Tensor]:
    states = optimizer.state.values()
    return [value for state in states for value in state.values() if torch.is_tensor(value)]


def state_bytes(optimizer) -> int:
    return sum({t.untyped_storage().data_ptr(): t.nbytes for t in tensors_of(optimizer)}.values())


def module_of(*weights) -> nn.Module:
    module = nn.Module()
    for number, weight in enumerate(weights):
        module.register_parameter(f"weight{number}", weight)
    return module


# ------------------------------------------------------------------ groups and steps


def test_each_group_has_its_own_learning_rate_and_decay():
    settings = {"lr": 1e-2}, {"lr": 3e-4, "weight_decay": 0.3}
    twins = [weights_of(6, 7), weights_of(6, 7)]
    ours, theirs = (
        cls([{"params": [weight], **own} for weight, own in zip(twin, settings, strict=True)])
        for cls, twin in zip((AdamW, torch_adamw), twins, strict=True)
    )
    run(ours), run(theirs)
    assert_near(ours, theirs)


@pytest.mark.parametrize("cls", OURS)
def test_a_group_added_later_starts_at_its_first_step(cls):
    first, second = weights_of(*SIZES)
    late = cls([first])
    run(late)
    late.add_param_group({"params": [second]})
    give_gradients([first, second], 7)
    late.step()
    assert [late.state[weight]["step"] for weight in (first, second)] == [6, 1]


@pytest.mark.parametrize("cls", OURS)
def test_a_weight_without_a_gradient_is_unchanged_and_has_no_state(cls):
    idle, busy = weights_of(*SIZES)
    before = idle.detach().clone()
    optimizer = cls([idle, busy], weight_decay=0.1)
    give_gradients([busy], 0)
    optimizer.step()
    assert torch.equal(idle, before)
    assert optimizer.state.get(idle) in (None, {})
    assert list(optimizer.state_dict()["state"]) == [1]


@pytest.mark.parametrize("cls", OURS)
def test_named_parameters_are_accepted(cls):
    named, plain = module_of(*weights_of(*SIZES)), weights_of(*SIZES)
    optimizer, twin = cls(named.named_parameters()), cls(plain)
    run(optimizer), run(twin)
    assert_equal(optimizer, twin)
    assert optimizer.param_groups[0]["param_names"] == ["weight0", "weight1"]
    optimizer.load_state_dict(twin.state_dict())
    assert optimizer.param_groups[0]["param_names"] == ["weight0", "weight1"]


def test_a_scheduler_sets_the_learning_rate():
    ours, theirs = AdamW(weights_of(9)), torch_adamw(weights_of(9))
    for optimizer in (ours, theirs):
        scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=4)
        for seed in range(4):
            run(optimizer, [seed])
            scheduler.step()
    assert ours.param_groups[0]["lr"] == theirs.param_groups[0]["lr"] == 0
    assert_near(ours, theirs)


@pytest.mark.parametrize("cls", OURS)
def test_a_scheduler_can_fill_a_tensor_learning_rate(cls):
    number, tensor = (
        cls(weights_of(*SIZES), lr=0.25),
        cls(weights_of(*SIZES), lr=torch.tensor(0.25)),
    )
    for optimizer in (number, tensor):
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.5)
        for seed in range(3):
            run(optimizer, [seed])
            scheduler.step()
    assert tensor.param_groups[0]["lr"].item() == 0.25 / 8
    assert_equal(number, tensor)


@pytest.mark.parametrize("cls", OURS)
def test_maximize_steps_in_the_opposite_direction(cls):
    up, down = cls(weights_of(*SIZES), maximize=True), cls(weights_of(*SIZES))
    for seed in range(3):
        for optimizer, sign in ((up, 1), (down, -1)):
            give_gradients(weights_in(optimizer), seed)
            for weight in optimizer.param_groups[0]["params"]:
                give_gradients([weight], seed)
                weight.grad *= sign
            optimizer.step()
    assert_equal(up, down)


def test_a_closure_runs_with_gradients_and_its_loss_is_returned():
    (weight,) = weights_of(3)
    optimizer = AdamW([weight], lr=0.1, weight_decay=0)
    before = weight.detach().clone()

    def closure():
        optimizer.zero_grad()
        loss = weight.square().sum()
        loss.backward()
        return loss

    assert optimizer.step(closure).item() == before.square().sum()
    assert_close(weight.detach(), before - 0.1 * before.sign())


def test_step_hooks_are_called():
    (weight,) = weights_of(3)
    optimizer, seen = AdamW([weight]), []
    optimizer.register_step_pre_hook(lambda *given: seen.append(weight.detach().clone()))
    optimizer.register_step_post_hook(lambda *given: seen.append(weight.detach().clone()))
    run(optimizer, [0, 1])
    assert len(seen) == 4
    changed = [not torch.equal(before, after) for before, after in pairwise(seen)]
    assert changed == [True, False, True]


def test_zero_grad_frees_the_gradients():
    weights = weights_of(*SIZES)
    optimizer = Adam8bit(weights)
    run(optimizer)
    optimizer.zero_grad()
    assert all(weight.grad is None for weight in weights)


def test_torchs_grad_scaler_skips_a_step_that_overflowed():
    optimizer, scaler = Adam8bit(weights_of(*SIZES)), torch.amp.GradScaler("cpu", init_scale=4.0)
    scaler.scale(torch.ones(()))
    give_gradients(optimizer.param_groups[0]["params"], 0)
    optimizer.param_groups[0]["params"][1].grad[3] = math.inf
    before = [weight.clone() for weight in weights_in(optimizer)]
    scaler.step(optimizer)
    for weight, kept in zip(weights_in(optimizer), before, strict=True):
        assert torch.equal(weight, kept)


# ------------------------------------------------------------------ shapes, layouts, dtypes, chunks


@pytest.mark.parametrize("cls", BY_ELEMENT)
@pytest.mark.parametrize("shape", [(), (0,), (3, 0), (1,), (70, 70)])
def test_any_shape_is_stepped_like_the_flat_weight(cls, shape):
    shaped, flat = weights_of(shape), weights_of(math.prod(shape))
    optimizer, twin = cls(shaped), cls(flat)
    run(optimizer), run(twin)
    assert torch.equal(shaped[0].view(-1), flat[0])


LAYOUTS = {
    "transposed": lambda x: x.view(72, 80).T.contiguous().T,
    "channels last": lambda x: x.view(8, 20, 6, 6).contiguous(memory_format=torch.channels_last),
    "every other number": lambda x: x.repeat_interleave(2)[::2],
}


@pytest.mark.parametrize("cls", BY_ELEMENT)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_memory_layout_does_not_change_the_step(cls, layout):
    (contiguous,) = weights_of(5760)
    strided = nn.Parameter(LAYOUTS[layout](contiguous.detach()).detach())
    strides = strided.stride()
    assert not strided.is_contiguous()
    optimizer, twin = cls([strided], weight_decay=0.1), cls([contiguous], weight_decay=0.1)
    for seed in range(3):
        give_gradients([contiguous], seed)
        strided.grad = LAYOUTS[layout](contiguous.grad)
        optimizer.step(), twin.step()
    assert torch.equal(strided.reshape(-1), contiguous)
    assert strided.stride() == strides


def test_float64_matches_torch_to_the_last_digits():
    ours, theirs = (cls(weights_of(50, dtype=torch.float64)) for cls in (AdamW, torch_adamw))
    run(ours, range(50)), run(theirs, range(50))
    assert {tensor.dtype for tensor in tensors_of(ours)} == {torch.float64}
    assert_near(ours, theirs)


@pytest.mark.parametrize("cls", OURS)
@pytest.mark.parametrize("low", [torch.bfloat16, torch.float16])
def test_a_16_bit_step_is_the_float32_step_rounded_to_nearest(cls, low):
    """The moments equal float32 moments too."""
    (weight,) = weights_of(5000, dtype=low)
    exact = nn.Parameter(weight.detach().float())
    optimizer, twin = cls([weight]), cls([exact])
    for seed in range(3):
        give_gradients([weight], seed)
        exact.grad = weight.grad.float()
        optimizer.step(), twin.step()
        assert torch.equal(weight, exact.to(low))
        with torch.no_grad():
            exact.copy_(weight)
    for ours, theirs in zip(tensors_of(optimizer), tensors_of(twin), strict=True):
        assert ours.dtype == theirs.dtype
        assert torch.equal(ours, theirs)


@pytest.mark.parametrize("cls", OURS)
def test_float64_weights_step_in_float64_for_any_moment_dtype(cls):
    """Use steps of 1e-12, which float32 would lose."""
    (weight,) = weights_of(5000, dtype=torch.float64)
    before = weight.detach().clone()
    optimizer = cls([weight], lr=1e-12, weight_decay=0)
    give_gradients([weight], 0)
    optimizer.step()
    summed = before.abs().max() / 1e-12
    assert_close((before - weight) / 1e-12, weight.grad.sign(), terms=8, summed=summed)


@pytest.mark.parametrize("cls", OURS)
@pytest.mark.parametrize("dtypes", [("float32", "float64"), ("float64", "float32")])
def test_a_model_cast_after_some_steps_continues(cls, dtypes):
    first, then = (getattr(torch, name) for name in dtypes)
    module = module_of(*weights_of(*SIZES, dtype=first))
    moved, stayed = cls(module.parameters()), cls(weights_of(*SIZES))
    run(moved), run(stayed)
    module.to(then)
    for number in range(20):
        run(moved, [number]), run(stayed, [number])
    for ours, theirs in zip(weights_in(moved), weights_in(stayed), strict=True):
        assert ours.dtype == then
        assert_close(ours.float(), theirs, terms=64)


@pytest.mark.parametrize("cls", OURS)
@pytest.mark.parametrize("chunk", [1, 100, 256, 1000, 4999, 10**6])
def test_the_chunk_size_does_not_change_the_step(cls, chunk):
    if chunk < 100:
        whole, chunked = cls(weights_of(7)), cls(weights_of(7), chunk=chunk)
    else:
        whole, chunked = cls(weights_of(*SIZES)), cls(weights_of(*SIZES), chunk=chunk)
    run(whole), run(chunked)
    assert_equal(whole, chunked)
    for ours, theirs in zip(tensors_of(chunked), tensors_of(whole), strict=True):
        assert torch.equal(ours, theirs)


# ------------------------------------------------------------------ stochastic rounding


@pytest.mark.parametrize("cls", OURS)
def test_stochastic_rounding_gives_a_neighbor_and_is_unbiased(cls):
    """Round one value 10,000 times: equal weights with equal gradients."""
    start, lr, draws = 1.5, 1e-3, 10_000
    settings = {"lr": lr, "weight_decay": 0.1}
    low = nn.Parameter(torch.full((draws,), start, dtype=torch.bfloat16))
    exact = nn.Parameter(torch.full((draws,), start))
    optimizer = cls([low], **settings, rounding="stochastic", generator=seeded())
    twin = cls([exact], **settings)
    low.grad, exact.grad = torch.ones_like(low), torch.ones_like(exact)
    optimizer.step(), twin.step()
    neighbours = torch.tensor([start - 2**-7, start])
    assert torch.equal(low.float().unique(), neighbours)
    wanted = exact[0].item()
    share = (start - wanted) * 2**7
    deviation = 2**-7 * math.sqrt(share * (1 - share) / draws)
    assert abs(low.double().mean().item() - wanted) < 4 * deviation


@pytest.mark.parametrize("cls", OURS)
def test_stochastic_rounding_keeps_updates_that_nearest_loses(cls):
    moved = {}
    for rounding in ("nearest", "stochastic"):
        weight = nn.Parameter(torch.ones(5000, dtype=torch.bfloat16))
        optimizer = cls([weight], lr=1e-3, weight_decay=0, rounding=rounding, generator=seeded())
        for _ in range(100):
            weight.grad = torch.ones_like(weight)
            optimizer.step()
        moved[rounding] = 1 - weight.double().mean().item()
    assert moved["nearest"] == 0
    assert moved["stochastic"] == pytest.approx(0.1, rel=0.02)


def test_a_generator_repeats_its_draws_and_the_default_one_is_untouched():
    def stepped(seed: int) -> AdamW:
        optimizer = AdamW(
            weights_of(50, dtype=torch.bfloat16), rounding="stochastic", generator=seeded(seed)
        )
        run(optimizer)
        return optimizer

    before = torch.get_rng_state()
    assert_equal(stepped(1), stepped(1))
    assert not torch.equal(*(weights_in(stepped(seed))[0] for seed in (1, 2)))
    assert torch.equal(torch.get_rng_state(), before)


def test_a_group_can_set_its_rounding():
    nearest, stochastic = (nn.Parameter(torch.ones(4000, dtype=torch.bfloat16)) for _ in range(2))
    groups = [{"params": [nearest]}, {"params": [stochastic], "rounding": "stochastic"}]
    optimizer = AdamW(groups, lr=1e-3, weight_decay=0, generator=seeded())
    nearest.grad, stochastic.grad = torch.ones_like(nearest), torch.ones_like(nearest)
    optimizer.step()
    assert nearest.eq(1).all()
    assert not stochastic.eq(1).all()


def test_rounding_does_not_affect_float32_weights():
    nearest, stochastic = (
        Adam8bit(weights_of(5000)),
        Adam8bit(weights_of(5000), rounding="stochastic"),
    )
    run(nearest), run(stochastic)
    assert_equal(nearest, stochastic)


# ------------------------------------------------------------------ state dicts


def through_a_file(state: dict) -> dict:
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


def twin_of(optimizer):
    """Return a new optimizer of the same class on copies of the weights."""
    return type(optimizer)([nn.Parameter(weight.clone()) for weight in weights_in(optimizer)])


@pytest.mark.parametrize("cls", OURS)
@pytest.mark.parametrize("way", [lambda state: state, through_a_file], ids=["memory", "file"])
def test_training_from_a_loaded_state_is_bitwise_equal(cls, way):
    first = cls(weights_of(*SIZES), lr=3e-3, weight_decay=0.1)
    run(first)
    second = twin_of(first)
    second.load_state_dict(way(first.state_dict()))
    assert second.param_groups[0]["lr"] == 3e-3
    run(first, range(5)), run(second, range(5))
    assert_equal(first, second)


@pytest.mark.parametrize("cls", OURS)
def test_a_loaded_state_is_a_copy(cls):
    first = cls(weights_of(*SIZES), lr=torch.tensor(1e-3))
    run(first)
    second = twin_of(first)
    second.load_state_dict(first.state_dict())
    theirs = {tensor.data_ptr() for tensor in (*tensors_of(first), first.param_groups[0]["lr"])}
    ours = {tensor.data_ptr() for tensor in (*tensors_of(second), second.param_groups[0]["lr"])}
    assert theirs.isdisjoint(ours)


@pytest.mark.parametrize("cls", OURS)
def test_a_loaded_state_has_the_same_bytes(cls):
    """Loaded 8-bit states share the codebook again."""
    first = cls(weights_of(5000, 6000, 7))
    run(first)
    second = twin_of(first)
    second.load_state_dict(through_a_file(first.state_dict()))
    assert state_bytes(second) == state_bytes(first)


@pytest.mark.parametrize("cls", OURS)
@pytest.mark.parametrize("moved", [torch.bfloat16, torch.float16, torch.float64])
def test_a_state_loaded_into_a_cast_model_is_unchanged(cls, moved):
    first = cls(weights_of(*SIZES))
    run(first)
    second = cls([nn.Parameter(weight.to(moved)) for weight in weights_in(first)])
    second.load_state_dict(first.state_dict())
    for ours, theirs in zip(tensors_of(second), tensors_of(first), strict=True):
        assert torch.equal(ours.to(theirs.dtype), theirs)
        is_wide = moved == torch.float64 and theirs.ndim and theirs.shape in ((5000,), (7,))
        wanted = torch.float64 if is_wide and theirs.is_floating_point() else theirs.dtype
        assert ours.dtype == wanted
    run(second)


def test_states_are_interchangeable_with_torchs():
    theirs, straight = torch_adamw(weights_of(40)), torch_adamw(weights_of(40))
    run(theirs), run(straight)
    ours = AdamW([nn.Parameter(weight.clone()) for weight in weights_in(theirs)])
    ours.load_state_dict(through_a_file(theirs.state_dict()))
    run(ours, range(5)), run(straight, range(5))
    assert_near(ours, straight)


def test_a_setting_missing_from_the_state_is_kept():
    theirs = torch_adamw(weights_of(40, dtype=torch.bfloat16))
    ours = AdamW(weights_of(40, dtype=torch.bfloat16), rounding="stochastic")
    ours.load_state_dict(theirs.state_dict())
    assert ours.param_groups[0]["rounding"] == "stochastic"


def test_loading_hooks_can_change_the_state():
    first, second = AdamW(weights_of(9)), AdamW(weights_of(9))
    run(first)

    def reset_the_step(optimizer, state_dict):
        states = {index: {**state, "step": 0} for index, state in state_dict["state"].items()}
        return {**state_dict, "state": states}

    seen = []
    second.register_load_state_dict_pre_hook(reset_the_step)
    second.register_load_state_dict_post_hook(lambda loaded: seen.append(len(loaded.state)))
    second.load_state_dict(first.state_dict())
    assert second.state[second.param_groups[0]["params"][0]]["step"] == 0
    assert seen == [1]


def broken_setting() -> AdamW:
    optimizer = AdamW(weights_of(*SIZES))
    optimizer.param_groups[0]["lr"] = -1
    return optimizer


REFUSED = {
    "other shapes": (
        lambda: AdamW(weights_of(5000, 8)),
        r"got a state of step, exp_avg \(8,\), exp_avg_sq \(8,\) for a weight of shape \(7,\)",
    ),
    "one weight more": (lambda: AdamW(weights_of(5000, 7, 7)), r"groups of \[3\] weights"),
    "another optimizer": (
        lambda: Lion(weights_of(*SIZES)),
        r"got a state of step, exp_avg \(5000,",
    ),
    "codes": (lambda: Adam8bit(weights_of(*SIZES)), r"exp_avg_codes \(5000,\)"),
    "torch's SGD": (
        lambda: torch.optim.SGD(weights_of(*SIZES), momentum=0.9),
        r"momentum_buffer \(5000,\)",
    ),
    "AMSGrad": (lambda: torch_adamw(weights_of(*SIZES), amsgrad=True), r"got a state of AMSGrad"),
    "a coupled decay": (
        lambda: torch.optim.Adam(weights_of(*SIZES), weight_decay=0.1),
        r"got a state of torch.optim.Adam",
    ),
    "a broken setting": (broken_setting, r"got lr=-1; give at least 0"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_state_that_does_not_fit_is_refused_and_nothing_changes(name):
    other, message = REFUSED[name]
    theirs, ours, untouched = (
        other(),
        AdamW(weights_of(*SIZES), lr=5e-3),
        AdamW(weights_of(*SIZES), lr=5e-3),
    )
    run(theirs), run(ours), run(untouched)
    with pytest.raises(ValueError, match=message) as refusal:
        ours.load_state_dict(theirs.state_dict())
    assert str(refusal.value).count("\n") == 0
    assert ours.param_groups[0]["lr"] == 5e-3
    run(ours, range(3)), run(untouched, range(3))
    assert_equal(ours, untouched)


@pytest.mark.parametrize("cls", OURS)
@pytest.mark.parametrize("way", [copy.deepcopy, lambda o: pickle.loads(pickle.dumps(o))])
def test_a_copy_or_a_pickle_takes_the_same_steps(cls, way):
    first = cls(
        weights_of(*SIZES, dtype=torch.bfloat16),
        rounding="stochastic",
        generator=seeded(),
        chunk=512,
    )
    run(first)
    second = way(first)
    run(first, range(3)), run(second, range(3))
    assert second.chunk == 512
    assert_equal(first, second)
    assert {t.data_ptr() for t in weights_in(first)}.isdisjoint(
        t.data_ptr() for t in weights_in(second)
    )


# ------------------------------------------------------------------ dry runs and predictions


def training(cls, *shapes, device="cpu", dtype=torch.float32):
    with torch.device(device):
        model = module_of(*(nn.Parameter(torch.zeros(shape, dtype=dtype)) for shape in shapes))
    optimizer = cls(model.parameters())

    def step() -> None:
        optimizer.zero_grad()
        for weight in model.parameters():
            weight.grad = torch.zeros_like(weight)
        optimizer.step()

    return step, model, optimizer


def traced(step, model, optimizer) -> Trace:
    step()
    return memlab.measure(step, model=model, optimizer=optimizer)


def events_of(trace: Trace) -> list[tuple]:
    return [(event.bytes, event.category, event.phase) for event in trace.events]


@pytest.mark.few(2)
@pytest.mark.parametrize("cls", OURS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_dry_step_has_the_events_of_the_real_one(cls, dtype):
    shapes = (2 * CHUNK_SIZE - 100,), (70, 70), (9,)
    real = traced(*training(cls, *shapes, dtype=dtype))
    with memlab.dry_run():
        dry = traced(*training(cls, *shapes, dtype=dtype))
    assert events_of(dry) == events_of(real)


@pytest.mark.few(2)
@pytest.mark.parametrize("cls", OURS)
def test_a_dry_step_of_many_chunks_has_the_bytes_of_the_real_one(cls):
    """It runs the first two chunks and the last; the others allocate the same bytes."""
    shapes = [(5 * CHUNK_SIZE + 100,)]
    real = traced(*training(cls, *shapes))
    with memlab.dry_run():
        dry = traced(*training(cls, *shapes))
    assert len(dry.events) < len(real.events)
    assert (dry.peak_bytes, dry.at_peak) == (real.peak_bytes, real.at_peak)
    assert dry.at_end == real.at_end


def test_a_prediction_uses_cudas_chunk_size():
    """AdamW's only temporary is the square root of one chunk."""
    build = partial(training, AdamW, (2 * CHUNK_SIZE_ON_ACCELERATOR,), device="cuda")
    assert memlab.predict(build).peak_bytes == (4 * 4 * 2 + 4) * CHUNK_SIZE_ON_ACCELERATOR


# ------------------------------------------------------------------ invalid input


@pytest.mark.parametrize("cls", OURS)
@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"lr": -1.0}, "got lr=-1.0; give at least 0"),
        ({"lr": math.nan}, "got lr=nan; give at least 0"),
        ({"weight_decay": -0.1}, "got weight_decay=-0.1; give at least 0"),
        ({"betas": (0.9, 1.0)}, r"got betas=\(0.9, 1.0\); give two of at least 0 and less than 1"),
        ({"betas": (-0.1, 0.9)}, r"got betas=\(-0.1, 0.9\)"),
        ({"betas": (0.9,)}, r"got betas=\(0.9,\)"),
        ({"rounding": "up"}, "got rounding='up'; give 'nearest' or 'stochastic'"),
    ],
)
def test_an_invalid_setting_is_refused_also_in_a_group(cls, settings, message):
    first, second = weights_of(3, 4)
    with pytest.raises(ValueError, match=message):
        cls([first], **settings)
    optimizer = cls([first])
    with pytest.raises(ValueError, match=message):
        optimizer.add_param_group({"params": [second], **settings})
    assert len(optimizer.param_groups) == 1


def test_a_negative_eps_and_empty_chunks_are_refused():
    with pytest.raises(ValueError, match="got eps=-1; give at least 0"):
        AdamW(weights_of(3), eps=-1)
    with pytest.raises(ValueError, match="got chunk=0; give an integer from 1"):
        AdamW(weights_of(3), chunk=0)


@pytest.mark.parametrize("dtype", [torch.int64, torch.complex64])
def test_weights_that_are_not_floating_point_are_refused(dtype):
    weight = torch.ones(3, dtype=dtype)
    with pytest.raises(TypeError, match=f"got weights of {dtype}; give floating-point weights"):
        AdamW([weight])


def test_stochastic_rounding_to_float16_is_refused():
    with pytest.raises(TypeError, match=r"got weights of torch.float16 to round stochastically"):
        AdamW(weights_of(3, dtype=torch.float16), rounding="stochastic")


@pytest.mark.parametrize("cls", OURS)
def test_a_sparse_gradient_is_refused(cls):
    layer = nn.Embedding(5, 3, sparse=True)
    layer(torch.tensor([1, 2])).sum().backward()
    optimizer = cls(layer.parameters())
    with pytest.raises(TypeError, match=r"got a sparse gradient; give the layer sparse=False"):
        optimizer.step()
    assert not optimizer.state_dict()["state"]


# ------------------------------------------------------------------ non-finite gradients


@pytest.mark.parametrize("wrong", [math.nan, math.inf, -math.inf])
def test_a_non_finite_gradient_only_affects_its_element(wrong):
    """Only this element becomes NaN."""
    ours, theirs = AdamW(weights_of(600)), torch_adamw(weights_of(600))
    for optimizer in (ours, theirs):
        (weight,) = optimizer.param_groups[0]["params"]
        give_gradients([weight], 0)
        weight.grad[300] = wrong
        optimizer.step()
        run(optimizer)
    (weight,), (wanted,) = weights_in(ours), weights_in(theirs)
    assert weight.isnan().nonzero().tolist() == [[300]]
    assert_close(weight.nan_to_num(), wanted.nan_to_num(), terms=8)


@pytest.mark.parametrize("cls", [Adam8bit, Lion8bit])
@pytest.mark.parametrize("wrong", [math.nan, math.inf, -math.inf])
def test_a_non_finite_gradient_in_8_bits_only_affects_its_block(cls, wrong):
    """Block 1 of 20 is 256 … 511. Its other elements still take the current step."""
    optimizer, clean = cls(weights_of(5000)), cls(weights_of(5000))
    for each in (optimizer, clean):
        run(each, [1])
        give_gradients(each.param_groups[0]["params"], 2)
    (weight,), (wanted,) = weights_in(optimizer), weights_in(clean)
    optimizer.param_groups[0]["params"][0].grad[300] = wrong
    optimizer.step(), clean.step()
    indices = torch.arange(5000)
    assert torch.equal(weight[indices != 300], wanted[indices != 300])
    run(optimizer), run(clean)
    in_block = (indices >= 256) & (indices < 512)
    assert torch.equal(weight[~in_block], wanted[~in_block])
    state = optimizer.state[optimizer.param_groups[0]["params"][0]]
    assert state["exp_avg_scales"].isnan().nonzero().tolist() == [[1]]
    if cls is Adam8bit:  # for Lion see test_lion.py: the sign of NaN is 0
        assert weight[in_block].isnan().all()


@pytest.mark.parametrize("cls", OURS)
def test_weights_on_meta_are_stepped_as_in_torch(cls):
    weight = nn.Parameter(torch.empty(70, 80, device="meta"))
    weight.grad = torch.empty_like(weight)
    optimizer = cls([weight])
    for _ in range(2):
        optimizer.step()
    tensors = [x for x in optimizer.state[weight].values() if torch.is_tensor(x)]
    assert all(x.is_meta for x in tensors)
