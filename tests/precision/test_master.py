"""Master weights: float32 training of a low-precision model, and its bytes."""

from functools import partial

import pytest
import torch
from close import assert_close
from torch import nn

import memlab
from memlab.precision import LossScaler, MasterWeights

LOW = (torch.bfloat16, torch.float16)
adamw = partial(torch.optim.AdamW, lr=1e-3, foreach=False)


def model_of(dtype: torch.dtype, layers: int = 3) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*[nn.Linear(32, 32, bias=False) for _ in range(layers)]).to(dtype)


def batch(dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(8, 32, generator=torch.Generator().manual_seed(1)).to(dtype)


# ------------------------------------------------------------------ values


@pytest.mark.parametrize("dtype", LOW)
@pytest.mark.parametrize("gather_at_once", [False, True])
def test_the_copies_are_trained_like_a_float32_model_with_the_same_gradients(dtype, gather_at_once):
    model, x = model_of(dtype), batch(dtype)
    master = MasterWeights(model.parameters(), adamw, gather_at_once=gather_at_once)
    twin = [nn.Parameter(p.detach().float()) for p in model.parameters()]
    optimizer = adamw(twin)
    for _ in range(5):
        model(x).square().mean().backward()
        if gather_at_once:
            assert all(p.grad is None for p in model.parameters())
        master.gather_gradients()
        for weight, copy in zip(twin, master.weights, strict=True):
            weight.grad = copy.grad.clone()
        master.step()
        optimizer.step()
        master.zero_grad()
        for low, copy, weight in zip(model.parameters(), master.weights, twin, strict=True):
            assert torch.equal(copy, weight)
            assert torch.equal(low, weight.to(dtype))


def test_updates_below_a_step_of_bfloat16_add_up():
    weight = nn.Parameter(torch.ones(4, dtype=torch.bfloat16))
    master = MasterWeights([weight], partial(torch.optim.SGD, lr=1e-3))
    for _ in range(100):
        (-weight.sum()).backward()
        master.step()
        master.zero_grad()
    assert_close(master.weights[0].detach(), torch.full((4,), 1.1))
    assert torch.equal(weight, torch.full((4,), 1.1).bfloat16())


def test_with_gather_at_once_several_backward_passes_accumulate_in_float32():
    weight = nn.Parameter(torch.zeros(1000, dtype=torch.bfloat16))
    master = MasterWeights([weight], adamw, gather_at_once=True)
    parts = [torch.rand(1000).bfloat16() for _ in range(256)]
    for part in parts:
        (weight * part).sum().backward()
    expected = torch.stack(parts).double().sum(0)
    assert_close(master.weights[0].grad, expected.float())
    assert weight.grad is None


@pytest.mark.parametrize("set_to_none", [True, False])
def test_gradients_are_freed_or_set_to_zero_as_by_torchs_optimizers(set_to_none):
    model, x = model_of(torch.bfloat16), batch(torch.bfloat16)
    master = MasterWeights(model.parameters(), adamw)
    for gather in (False, True):
        model(x).square().mean().backward()
        if gather:
            master.gather_gradients()
        gradients = [p.grad for p in (*model.parameters(), *master.weights)]
        master.zero_grad(set_to_none=set_to_none)
        for parameter, before in zip(
            (*model.parameters(), *master.weights), gradients, strict=True
        ):
            if before is None or set_to_none:
                assert parameter.grad is None
            else:
                assert parameter.grad is before
                assert not before.any()


def test_a_loss_scaler_accepts_it_as_an_optimizer():
    model, x = model_of(torch.float16), batch(torch.float16)
    master = MasterWeights(model.parameters(), adamw)
    plain = MasterWeights((twin := model_of(torch.float16)).parameters(), adamw)
    scaler = LossScaler(2.0**8)
    for _ in range(3):
        scaler.scale(model(x).float().square().mean()).backward()
        master.gather_gradients()
        scaler.step(master)
        scaler.update()
        master.zero_grad()
        twin(x).float().square().mean().backward()
        plain.step()
        plain.zero_grad()
    assert_close(master.weights, plain.weights, terms=8, dtype=torch.float16)


def test_a_step_that_overflows_changes_nothing():
    model, x = model_of(torch.float16), batch(torch.float16)
    master = MasterWeights(model.parameters(), adamw)
    before = [p.clone() for p in (*master.weights, *model.parameters())]
    scaler = LossScaler(2.0**16)
    (scaler.scale(model(x).float().square().sum()) * 1e6).backward()
    master.gather_gradients()
    scaler.step(master)
    assert all(map(torch.equal, before, (*master.weights, *model.parameters())))


def test_training_resumes_from_a_state():
    def trained(steps: int, state=None) -> tuple[MasterWeights, nn.Module]:
        model, x = model_of(torch.bfloat16), batch(torch.bfloat16)
        master = MasterWeights(model.parameters(), adamw)
        if state is not None:
            master.load_state_dict(state)
        for _ in range(steps):
            model(x).square().mean().backward()
            master.step()
            master.zero_grad()
        return master, model

    whole, _ = trained(5)
    half, model = trained(2)
    resumed, resumed_model = trained(0, half.state_dict())
    assert all(map(torch.equal, resumed_model.parameters(), model.parameters()))
    resumed, _ = trained(3, half.state_dict())
    assert all(map(torch.equal, resumed.weights, whole.weights))


# ------------------------------------------------------------------ bytes

N = 3 * 32 * 32


def bytes_per_weight(step, model, optimizer, moment: str) -> dict[str, float]:
    """Return parameters, gradients and state per weight, at the end of backward or of the step."""
    step()
    trace = memlab.measure(step, model=model, optimizer=optimizer)
    events = trace.events
    if moment == "backward":
        last = max(i for i, event in enumerate(events) if event.phase == "backward")
        events = events[: last + 1]
    held = memlab.Trace(events).at_end
    kinds = ("parameters", "gradients", "optimizer_state")
    return {kind: round(held.get(kind, 0) / N, 2) for kind in kinds}


def stepping(model, optimizer):
    x = batch(next(model.parameters()).dtype)

    def step() -> None:
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()

    return step


def test_the_byte_table_of_precisions():
    """Bytes per weight after backward: weights and copies, gradients, state."""
    table = {}
    for name, dtype, make in (
        ("float32", torch.float32, None),
        ("pure bfloat16", torch.bfloat16, None),
        ("classic mixed", torch.bfloat16, {}),
        ("float32 gradients", torch.bfloat16, {"gather_at_once": True}),
    ):
        model = model_of(dtype)
        parameters = list(model.parameters())
        optimizer = adamw(parameters) if make is None else MasterWeights(parameters, adamw, **make)
        inner = optimizer if make is None else optimizer.optimizer
        step = stepping(model, optimizer)
        found = bytes_per_weight(step, model, inner, "backward")
        table[name] = tuple(found.values())
    assert table == {
        "float32": (4, 4, 8),  # 16
        "pure bfloat16": (2, 2, 4),  # 8
        "classic mixed": (2 + 4, 2, 8),  # 16
        "float32 gradients": (2 + 4, 4, 8),  # 18
    }


# ------------------------------------------------------------------ errors


def test_no_trainable_weights_is_an_error():
    frozen = nn.Linear(2, 2).requires_grad_(False)
    with pytest.raises(ValueError, match="got no weights to train"):
        MasterWeights(frozen.parameters(), adamw)


def test_the_state_of_another_model_is_an_error():
    state = MasterWeights(model_of(torch.bfloat16, 2).parameters(), adamw).state_dict()
    master = MasterWeights(model_of(torch.bfloat16).parameters(), adamw)
    with pytest.raises(ValueError, match="got a state of 2 weights for 3"):
        master.load_state_dict(state)
