"""The loss scaler makes the same decisions as torch.amp.GradScaler."""

import random

import pytest
import torch
from close import assert_close
from quick import quick
from torch import nn

from memlab.precision import LossScaler, MasterWeights

SETTINGS = {"growth_factor": 2.0, "backoff_factor": 0.5, "growth_interval": 3}


def pair(scale: float = 2.0**16, **settings) -> tuple[LossScaler, torch.amp.GradScaler]:
    settings = SETTINGS | settings
    return LossScaler(scale, **settings), torch.amp.GradScaler("cpu", init_scale=scale, **settings)


def two_optimizers() -> list[torch.optim.SGD]:
    return [torch.optim.SGD([nn.Parameter(torch.zeros(3))], lr=1.0) for _ in range(2)]


def weights(optimizers) -> list[float]:
    return [o.param_groups[0]["params"][0].tolist() for o in optimizers]


def iteration(scaler, optimizers, gradients, unscaled) -> None:
    """Run one training step where each optimizer gets this gradient, times the scale."""
    for optimizer, gradient, early in zip(optimizers, gradients, unscaled, strict=True):
        [weight] = optimizer.param_groups[0]["params"]
        weight.grad = torch.tensor([1.0, gradient, 2.0]) * scaler.get_scale()
        if early:
            scaler.unscale_(optimizer)
        scaler.step(optimizer)
    scaler.update()


def trackers(ours: LossScaler, theirs: torch.amp.GradScaler) -> list[tuple[float, int]]:
    states = ours.state_dict(), theirs.state_dict()
    return [(state["scale"], state["_growth_tracker"]) for state in states]


@pytest.mark.filterwarnings("ignore:.*lazily")
@pytest.mark.parametrize("seed", quick(range(1), range(10)))
def test_it_decides_like_torchs_scaler_over_random_overflows(seed):
    """A thousand patterns per seed, with four steps and two optimizers."""
    numbers = random.Random(seed)
    for _ in range(1000):
        ours, theirs = pair(2.0 ** numbers.randint(0, 16), growth_interval=numbers.randint(1, 3))
        theirs.scale(torch.ones(()))  # creates its state on first use
        our_optimizers, their_optimizers = two_optimizers(), two_optimizers()
        for _ in range(4):
            gradients = numbers.choices([0.5, torch.inf, -torch.inf, torch.nan], (6, 1, 1, 1), k=2)
            unscaled = numbers.choices([True, False], k=2)
            iteration(ours, our_optimizers, gradients, unscaled)
            iteration(theirs, their_optimizers, gradients, unscaled)
            our_state, their_state = trackers(ours, theirs)
            assert our_state == their_state
            assert weights(our_optimizers) == weights(their_optimizers)


@pytest.mark.parametrize("factors", [(1.7, 0.3), (1.001, 0.999), (3.0, 0.1)])
def test_its_scale_is_rounded_like_torchs(factors):
    growth, backoff = factors
    ours, theirs = pair(1000.1, growth_factor=growth, backoff_factor=backoff)
    theirs.scale(torch.ones(()))
    optimizers = two_optimizers(), two_optimizers()
    for gradient in (0.5, 0.5, 0.5, torch.inf, 0.5, 0.5, 0.5, torch.nan, torch.inf, 0.5) * 3:
        iteration(ours, optimizers[0], (gradient, 0.5), (False, True))
        iteration(theirs, optimizers[1], (gradient, 0.5), (False, True))
        assert len(set(trackers(ours, theirs))) == 1


def test_the_scale_follows_the_rule_step_by_step():
    """Interval 3, with overflows in the first and fifth step."""
    scaler, _ = pair(2.0**17)
    optimizers = two_optimizers()
    seen = []
    for step in range(8):
        iteration(scaler, optimizers, (torch.inf if step in (0, 4) else 0.5, 0.5), (False, False))
        seen.append((scaler.get_scale(), scaler.state_dict()["_growth_tracker"]))
    assert seen == [
        (2.0**16, 0),
        (2.0**16, 1),
        (2.0**16, 2),
        (2.0**17, 0),
        (2.0**16, 0),
        (2.0**16, 1),
        (2.0**16, 2),
        (2.0**17, 0),
    ]


def test_it_grows_only_within_float32():
    scaler, _ = pair(2.0**127, growth_interval=1)
    [optimizer] = two_optimizers()[:1]
    optimizer.param_groups[0]["params"][0].grad = torch.zeros(3)
    scaler.step(optimizer)
    scaler.update()
    assert scaler.get_scale() == 2.0**127


@pytest.mark.filterwarnings("ignore:.*lazily")
def test_states_can_be_exchanged_with_torchs_scaler():
    ours, theirs = pair()
    theirs.scale(torch.ones(()))
    for gradient in (0.5, torch.inf, 0.5, 0.5):
        iteration(ours, two_optimizers(), (gradient, 0.5), (False, False))
    fresh, fresh_theirs = pair(4.0, growth_interval=7)
    fresh_theirs.load_state_dict(ours.state_dict())
    fresh_theirs.scale(torch.ones(()))
    assert fresh_theirs.state_dict() == ours.state_dict()
    fresh.load_state_dict(fresh_theirs.state_dict())
    assert fresh.state_dict() == ours.state_dict()


def test_an_invalid_state_is_an_error():
    with pytest.raises(ValueError, match="got a state without _growth_tracker, backoff_factor"):
        LossScaler().load_state_dict({"scale": 1.0, "growth_factor": 2.0, "growth_interval": 1})


# ------------------------------------------------------------------ values


def test_without_an_overflow_the_weights_equal_unscaled_training():
    runs = []
    for scaler in (LossScaler(), None):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4))
        optimizer = torch.optim.AdamW(model.parameters())
        for _ in range(5):
            optimizer.zero_grad()
            loss = model(torch.randn(6, 8)).square().mean()
            if scaler is None:
                loss.backward()
                optimizer.step()
            else:
                scaler.scale(loss).backward()
                scaler.step(optimizer)
                scaler.update()
        runs.append(torch.cat([p.flatten() for p in model.parameters()]))
    assert torch.equal(*runs)  # a power of two only moves the exponent


def test_gradients_that_underflow_in_float16_are_preserved():
    weight = nn.Parameter(torch.ones(4))
    optimizer = torch.optim.SGD([weight], lr=1.0)

    def gradient(scale) -> torch.Tensor:
        weight.grad = None
        scale((weight.half() * 1e-4).sum() * 1e-4).backward()
        return weight.grad

    assert gradient(lambda loss: loss).count_nonzero() == 0
    scaler = LossScaler(2.0**15)  # a float16 loss has the scale as its gradient; 2**16 is inf
    gradient(scaler.scale)
    scaler.unscale_(optimizer)
    assert_close(weight.grad, torch.full((4,), 1e-8), terms=16, dtype=torch.float16)


@pytest.mark.parametrize(("shape", "dtype"), [((), torch.float32), ((3,), torch.float16)])
def test_a_float16_loss_is_scaled_as_in_torch(shape, dtype):
    ours, theirs = pair()
    loss = torch.ones(shape, dtype=torch.float16)
    assert ours.scale(loss).dtype == theirs.scale(loss).dtype == dtype
    assert torch.equal(ours.scale(loss), theirs.scale(loss))


def test_step_returns_the_optimizers_result_or_none_if_skipped():
    scaler, _ = pair()
    [optimizer, other] = two_optimizers()
    optimizer.step = lambda *args: args
    for o, value in ((optimizer, 1.0), (other, torch.inf)):
        o.param_groups[0]["params"][0].grad = torch.full((3,), value)
    assert scaler.step(optimizer, 17) == (17,)
    assert scaler.step(other) is None


# ------------------------------------------------------------------ errors


def test_a_scale_below_the_floor_is_an_error_unlike_in_torch():
    ours, theirs = pair(1.0)
    theirs.scale(torch.ones(()))
    optimizers, their_optimizers = two_optimizers(), two_optimizers()
    for _ in range(14):
        iteration(ours, optimizers, (torch.inf, 0.5), (False, False))
    with pytest.raises(OverflowError, match=r"at a scale of 6.10352e-05, .* train in bfloat16"):
        iteration(ours, optimizers, (torch.inf, 0.5), (False, False))
    assert ours.get_scale() == 2.0**-14
    for _ in range(200):
        for optimizer in their_optimizers:
            optimizer.param_groups[0]["params"][0].grad = torch.full((3,), torch.inf)
            theirs.step(optimizer)
        theirs.update()
    assert theirs.get_scale() == 0.0


def test_float16_gradients_are_an_error_as_in_torch():
    weight = nn.Parameter(torch.zeros(3, dtype=torch.float16))
    optimizer = torch.optim.SGD([weight], lr=1.0)
    weight.grad = torch.ones(3, dtype=torch.float16)
    with pytest.raises(ValueError, match="unscaled values underflow; keep the weights in float32"):
        LossScaler().unscale_(optimizer)


@pytest.mark.parametrize(
    ("calls", "message"),
    [
        (["unscale_", "unscale_"], "unscale_.. was called already for this optimizer"),
        (["step", "step"], "step.. was called already for this optimizer"),
        (["step", "unscale_"], "unscale_.. was called already"),
    ],
)
def test_calls_out_of_order_are_errors_as_in_torch(calls, message):
    for scaler, error in zip(pair(), (message, "."), strict=True):
        scaler.scale(torch.ones(()))
        [optimizer] = two_optimizers()[:1]
        optimizer.param_groups[0]["params"][0].grad = torch.ones(3)
        getattr(scaler, calls[0])(optimizer)
        with pytest.raises(RuntimeError, match=error):
            getattr(scaler, calls[1])(optimizer)


def test_an_update_before_any_step_is_an_error():
    with pytest.raises(RuntimeError, match=r"call step\(optimizer\)"):
        LossScaler().update()


@pytest.mark.parametrize(
    "wrong",
    [
        {"growth_factor": 1.0},
        {"backoff_factor": 1.0},
        {"backoff_factor": 0.0},
        {"growth_interval": 0},
        {"scale": 2.0**-15},
        {"scale": float("nan")},
    ],
)
def test_invalid_settings_are_errors(wrong):
    with pytest.raises(ValueError, match="; give"):
        LossScaler(**wrong)


@pytest.mark.parametrize("value", ["x", None, 1j, torch.ones(2), torch.nan, torch.inf, -1, [1]])
def test_a_setting_is_refused_by_name_also_in_a_state(value):
    for name in LossScaler().state_dict():
        with pytest.raises((TypeError, ValueError), match=f"got .*{name.removeprefix('_')}="):
            LossScaler().load_state_dict({**LossScaler().state_dict(), name: value})
        if name != "_growth_tracker":
            with pytest.raises((TypeError, ValueError), match=f"got .*{name}="):
                LossScaler(**{name: value})
    with pytest.raises((TypeError, ValueError), match=r"got .*floor="):
        LossScaler(floor=value)


def test_the_state_of_a_torch_scaler_that_collapsed_to_zero_is_refused():
    theirs = torch.amp.GradScaler("cpu", init_scale=0.0)
    with pytest.raises(
        ValueError, match=r"got scale=0.0 and floor=6.10352e-05; give a finite scale"
    ):
        LossScaler().load_state_dict(theirs.state_dict())


@pytest.mark.parametrize("value", [torch.inf, -torch.inf, torch.nan])
@pytest.mark.parametrize("place", [0, 517, 999])
def test_one_nonfinite_element_is_found_in_any_position(value, place):
    for weight in (nn.Parameter(torch.zeros(1000)), nn.Parameter(torch.zeros(1000).bfloat16())):
        optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(0)), weight], lr=1.0)
        for parameter in optimizer.param_groups[0]["params"]:
            parameter.grad = torch.ones_like(parameter)
        weight.grad[place] = value
        scaler = LossScaler(8.0)
        scaler.step(optimizer)
        scaler.update()
        assert (scaler.get_scale(), weight.count_nonzero()) == (4.0, 0)


def test_the_largest_float32_values_are_no_overflow():
    weight = nn.Parameter(torch.zeros(2))
    weight.grad = torch.tensor([3e38, -3e38])
    optimizer = torch.optim.SGD([weight], lr=1.0)
    scaler = LossScaler(8.0)
    scaler.step(optimizer)
    scaler.update()
    assert scaler.get_scale() == 8.0
    assert weight.count_nonzero() == 2


def test_checking_gradients_takes_no_memory():
    import memlab

    weight = nn.Parameter(torch.zeros(2**20))
    optimizer = torch.optim.SGD([weight], lr=1.0)
    weight.grad = torch.ones(2**20)
    trace = memlab.measure(lambda: LossScaler().unscale_(optimizer), optimizer=optimizer)
    assert trace.peak_bytes <= 2 * 4 * 2**20 + 64


def test_an_optimizer_that_steps_in_backward_is_an_error():
    weight = torch.nn.Parameter(torch.ones(3))
    optimizer, scaler = torch.optim.SGD([weight], lr=1.0), LossScaler()
    scaler.scale(weight.sum()).backward()
    optimizer.zero_grad()
    with pytest.raises(ValueError, match="steps inside backward"):
        scaler.step(optimizer)


# ------------------------------------------------------------------ as torch's scaler


def test_sparse_gradients_are_unscaled_and_checked_as_in_torch():
    found = []
    for scaler in pair():
        torch.manual_seed(0)
        embedding = nn.Embedding(10, 4, sparse=True)
        optimizer = torch.optim.SparseAdam(embedding.parameters(), lr=0.1)
        tokens = torch.tensor([1, 1, 3])
        for factor in (1.0, torch.inf, 2.0):
            optimizer.zero_grad()
            scaler.scale(embedding(tokens).square().sum() * factor).backward()
            scaler.step(optimizer)
            scaler.update()
        found.append((embedding.weight.detach().clone(), scaler.get_scale()))
    assert torch.equal(found[0][0], found[1][0])
    assert found[0][1] == found[1][1]


def test_lists_and_tuples_of_losses_are_scaled_as_in_torch():
    ours, theirs = pair()
    losses = [torch.ones(()), (torch.full((2,), 3.0), torch.tensor(2.0).half())]
    for found, wanted in zip(ours.scale(losses), theirs.scale(losses), strict=True):
        assert type(found) is type(wanted)
        for one, other in zip(found, wanted, strict=True) if isinstance(found, tuple) else ():
            assert (one.dtype, one.tolist()) == (other.dtype, other.tolist())
    with pytest.raises(TypeError, match="got str; give a tensor, or a list or tuple of them"):
        ours.scale("loss")


def test_a_disabled_scaler_only_steps():
    weight = nn.Parameter(torch.ones(3))
    optimizer = torch.optim.SGD([weight], lr=1.0)
    scaler = LossScaler(enabled=False)
    loss = scaler.scale(weight.sum())
    loss.backward()
    scaler.unscale_(optimizer)
    scaler.step(optimizer)
    scaler.update()
    scaler.load_state_dict({})
    assert (loss.item(), scaler.get_scale(), scaler.is_enabled()) == (3.0, 1.0, False)
    assert weight.tolist() == [0.0, 0.0, 0.0]
    theirs = torch.amp.GradScaler("cpu", enabled=False)
    assert scaler.state_dict() == theirs.state_dict() == {}


def test_a_closure_is_an_error_as_in_torch():
    for scaler, message in zip(pair(), ("got a closure, whose backward", "."), strict=True):
        [optimizer] = two_optimizers()[:1]
        with pytest.raises(RuntimeError, match=message):
            scaler.step(optimizer, closure=lambda: None)


def test_master_weights_that_were_not_gathered_are_stepped_as_if_they_were():
    found = []
    for gathers in (True, False):
        torch.manual_seed(0)
        model = nn.Linear(4, 3).half()
        master = MasterWeights(model.parameters(), torch.optim.AdamW)
        scaler = LossScaler(64.0)
        scaler.scale(model(torch.ones(2, 4).half()).float().sum()).backward()
        if gathers:
            master.gather_gradients()
        scaler.step(master)
        scaler.update()
        found.append(torch.cat([weight.flatten() for weight in master.weights]))
    assert torch.equal(*found)
