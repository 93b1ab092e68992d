"""Every optimizer replaces torch's: arguments, copies, states and schedulers."""

import copy
import io
import math
import pickle
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from quick import together
from torch import nn
from torch.optim import lr_scheduler

from memlab.offload import HostStore, OffloadedOptimizer
from memlab.optim import (
    Adam8bit,
    AdamMini,
    AdamW,
    Apollo,
    GaLore,
    Lion,
    Lion8bit,
    MomentumSGD,
    Muon,
    step_in_backward,
)
from memlab.optim.adam_mini import by_rows
from memlab.precision import MasterWeights

OURS = [
    *(AdamW, Adam8bit, AdamMini, Lion, Lion8bit, Muon),
    *(partial(kind, rank=3, gap=2) for kind in (GaLore, Apollo)),
]
WITH_MOMENTUM = [*OURS, partial(MomentumSGD, moment_dtype=None)]  # which has no betas
LIKE_ADAMW = [AdamW, Adam8bit, AdamMini]


def model_of(dtype: torch.dtype = torch.float32) -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(70, 80), nn.LayerNorm(80), nn.Linear(80, 5))
    return model.to(dtype)


def train(model: nn.Module, optimizer: Any, steps: int = 2) -> None:
    """Train with closures, one batch each."""
    for seed in range(steps):
        batch = torch.randn(3, 70, generator=torch.Generator().manual_seed(seed))

        def closure(batch: torch.Tensor = batch) -> torch.Tensor:
            optimizer.zero_grad()
            loss = model(batch.to(next(model.parameters()).dtype)).square().sum()
            loss.backward()
            return loss

        assert optimizer.step(closure).requires_grad


def assert_equal(model: nn.Module, other: nn.Module) -> None:
    for ours, theirs in zip(model.parameters(), other.parameters(), strict=True):
        assert torch.equal(ours, theirs)


def saved_and_loaded(both: Any) -> Any:
    file = io.BytesIO()
    torch.save(both, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


@pytest.mark.parametrize("cls", OURS)
@pytest.mark.parametrize(
    "copied", [copy.deepcopy, lambda both: pickle.loads(pickle.dumps(both)), saved_and_loaded]
)
def test_a_model_and_its_optimizer_are_copied_together(cls, copied):
    model = model_of()
    optimizer = cls(model.parameters(), lr=0.01)
    train(model, optimizer)
    other, its_optimizer = copied((model, optimizer))
    train(model, optimizer), train(other, its_optimizer)
    assert_equal(model, other)


@pytest.mark.parametrize("cls", OURS)
def test_a_state_loads_with_weights_only(cls):
    model = model_of()
    optimizer = cls(model.parameters(), lr=0.01)
    train(model, optimizer)
    file = io.BytesIO()
    torch.save(optimizer.state_dict(), file)
    file.seek(0)
    other = copy.deepcopy(model)
    loaded = cls(other.parameters(), lr=0.5)
    loaded.load_state_dict(torch.load(file, weights_only=True))
    train(model, optimizer), train(other, loaded)
    assert_equal(model, other)


SCHEDULERS: dict[str, Callable[[Any], Any]] = {
    "lambda": lambda o: lr_scheduler.LambdaLR(o, lambda step: 0.5**step),
    "one cycle, betas too": lambda o: lr_scheduler.OneCycleLR(o, 0.1, total_steps=9),
    "cyclic": lambda o: lr_scheduler.CyclicLR(o, 0.01, 0.1, cycle_momentum=True),
    "warm-up, then cosine": lambda o: lr_scheduler.SequentialLR(
        o, [lr_scheduler.LinearLR(o), lr_scheduler.CosineAnnealingLR(o, 5)], [2]
    ),
}


@pytest.mark.parametrize("cls", OURS)
@pytest.mark.parametrize("scheduler", SCHEDULERS)
def test_schedulers_set_the_same_values_as_in_torch(cls, scheduler):
    ours, torchs = (
        kind(model_of().parameters(), lr=0.01, betas=(0.9, 0.99))
        for kind in (cls, torch.optim.AdamW)
    )
    settings = []
    for optimizer in (ours, torchs):
        schedule = SCHEDULERS[scheduler](optimizer)
        for _ in range(4):
            optimizer.step()
            schedule.step()
        [group] = optimizer.param_groups
        settings.append((group["lr"], group["betas"]))
    assert settings[0] == settings[1]


@pytest.mark.parametrize("cls", LIKE_ADAMW)
def test_positional_arguments_are_in_torchs_order(cls):
    given = (1e-2, (0.8, 0.95), 1e-6, 0.1, False)
    ours = cls(model_of().parameters(), *given)
    torchs = torch.optim.AdamW(model_of().parameters(), *given)
    for name in ("lr", "betas", "eps", "weight_decay"):
        assert ours.defaults[name] == torchs.defaults[name]


@pytest.mark.parametrize("cls", OURS)
def test_foreach_and_fused_are_accepted_and_ignored(cls):
    plain, hinted = model_of(), model_of()
    train(plain, cls(plain.parameters()))
    off = dict.fromkeys(("amsgrad", "capturable", "differentiable"), False)
    train(hinted, cls(hinted.parameters(), foreach=True, fused=True, **off))
    assert_equal(plain, hinted)


@together("cls", OURS)
@together(
    ("settings", "error", "message"),
    [
        ({"capturable": True}, ValueError, "capturable=True: a step here reads its count on the"),
        ({"differentiable": True}, ValueError, "differentiable=True: a step here runs in place"),
        ({"amsgrad": True}, ValueError, "amsgrad=True: it keeps a third moment"),
        ({"lr": math.inf}, ValueError, "got lr=inf; give at least 0, and a finite"),
        ({"lr": "x"}, TypeError, "got lr='x'; give a number"),
        ({"lr": True}, TypeError, "got lr=True; give a number"),
        ({"lr": torch.ones(2)}, TypeError, "give a number, or a tensor of one element"),
        ({"weight_decay": None}, TypeError, "got weight_decay=None; give a number"),
        ({"betas": 0.9}, TypeError, "got betas=0.9; give two numbers"),
        ({"betas": ("a", 0.9)}, TypeError, "got betas='a'; give a number"),
        ({"maximize": "no"}, TypeError, "got maximize='no'; give True or False"),
        ({"fused": "yes"}, TypeError, "got fused='yes'; give True or False"),
        ({"dampening": 0.9}, TypeError, "an unexpected argument 'dampening'=0.9"),
    ],
)
def test_invalid_settings_are_refused_with_a_message(cls, settings, error, message):
    with pytest.raises(error, match=message):
        cls(model_of().parameters(), **settings)


def numeric_settings(cls: Any) -> dict[str, Any]:
    defaults = cls(model_of().parameters()).defaults
    return {name: value for name, value in defaults.items() if type(value) in (float, tuple)}


@together("cls", WITH_MOMENTUM)
@together("shape", [(), (1,), (1, 1), (1, 1, 1)])
def test_every_number_may_be_a_tensor_of_one_element(cls, shape):
    def as_tensor(value: float) -> torch.Tensor:
        return torch.full(shape, value, dtype=torch.float64)

    for name, value in numeric_settings(cls).items():
        tensors = tuple(map(as_tensor, value)) if isinstance(value, tuple) else as_tensor(value)
        plain, tensor = model_of(), model_of()
        train(plain, cls(plain.parameters()))
        train(tensor, cls(tensor.parameters(), **{name: tensors}))
        assert_equal(plain, tensor)


@together("cls", WITH_MOMENTUM)
@together(
    "value",
    ["x", None, {}, 1j, torch.ones(2), torch.tensor(1j), -0.5, math.nan, math.inf, (0.9, "x")],
)
def test_anything_but_a_number_is_refused_by_name_also_in_a_group(cls, value):
    for name in numeric_settings(cls):
        with pytest.raises((TypeError, ValueError), match=f"got {name}="):
            cls(model_of().parameters(), **{name: value})
        optimizer = cls(model_of().parameters())
        with pytest.raises((TypeError, ValueError), match=f"got {name}="):
            optimizer.add_param_group({"params": model_of().parameters(), name: value})


@pytest.mark.parametrize("cls", WITH_MOMENTUM)
def test_a_chunk_and_a_generator_of_another_type_are_refused(cls):
    for chunk in (0, 0.5, math.nan, "x", torch.ones(2)):
        with pytest.raises(ValueError, match=r"got chunk=.*; give an integer from 1"):
            cls(model_of().parameters(), chunk=chunk)
    with pytest.raises(TypeError, match=r"got generator=0; give a torch.Generator or None"):
        cls(model_of().parameters(), generator=0)


@pytest.mark.parametrize("cls", [AdamW, Adam8bit, Lion, Lion8bit])
def test_a_parameter_given_twice_is_named_in_the_error(cls):
    weight = nn.Parameter(torch.ones(3))
    with pytest.raises(ValueError, match="twice, as parameter 0 and as parameter 1; give each"):
        cls([weight, weight])
    with pytest.raises(ValueError, match="twice, as head and as tail"):
        cls([("head", weight), ("tail", weight)])


def test_adam_mini_without_a_partition_uses_rows():
    """The oracle is the same rule as a partition of named parameters."""
    plain, named = model_of(), model_of()
    ours = AdamMini(plain.parameters(), lr=0.01)
    train(plain, ours)
    train(named, AdamMini(named.named_parameters(), lr=0.01, partition=by_rows))
    assert_equal(plain, named)
    shared = [len(ours.state[weight]["exp_avg_sq"]) for weight in plain.parameters()]
    assert shared == [80, 80, 80, 80, 5, 5]


# ------------------------------------------------------------------ wrapped optimizers


def test_master_weights_accept_a_closure():
    ways = []
    for by_closure in (True, False):
        model = model_of(torch.bfloat16)
        master = MasterWeights(model.parameters(), lambda w: torch.optim.AdamW(w, lr=0.01))
        for seed in range(3):
            batch = torch.randn(3, 70, generator=torch.Generator().manual_seed(seed)).bfloat16()

            def closure(model=model, master=master, batch=batch):
                master.zero_grad()
                loss = model(batch).square().sum()
                loss.backward()
                return loss

            if by_closure:
                master.step(closure)
            else:
                closure(), master.step()
        ways.append(model)
    assert_equal(*ways)


def test_master_weights_with_lbfgs_find_the_float32_minimum():
    weight = nn.Parameter(torch.tensor([3.0, -2.0], dtype=torch.bfloat16))
    master = MasterWeights([weight], lambda w: torch.optim.LBFGS(w, max_iter=20))

    def closure() -> torch.Tensor:
        master.zero_grad()
        loss = (weight - torch.tensor([1.0, 0.5])).square().sum()
        loss.backward()
        return loss

    master.step(closure)
    assert weight.tolist() == [1.0, 0.5]


@pytest.mark.parametrize("at_once", [False, True])
def test_master_weights_accept_another_group_with_its_own_settings(at_once):
    first, second = (nn.Parameter(torch.ones(3, dtype=torch.bfloat16)) for _ in range(2))
    master = MasterWeights([first], lambda w: torch.optim.SGD(w, lr=0.5), gather_at_once=at_once)
    master.add_param_group({"params": [second], "lr": 0.25})
    (first.sum() + second.sum()).backward()
    master.step()
    assert first.tolist() == [0.5] * 3
    assert second.tolist() == [0.75] * 3


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda both: pickle.loads(pickle.dumps(both))])
def test_a_copy_of_step_in_backward_steps_the_copied_model(copied):
    model = model_of()
    stepping = step_in_backward(AdamW(model.parameters(), lr=0.01))
    train(model, stepping)
    other, its_stepping = copied((model, stepping))
    train(model, stepping)
    model(torch.ones(1, 70)).sum().backward()
    train(other, its_stepping)
    other(torch.ones(1, 70)).sum().backward()
    assert all(weight.grad is None for weight in other.parameters())
    assert_equal(model, other)


def test_an_offloaded_optimizer_says_why_it_cannot_be_copied():
    model = model_of()
    optimizer = OffloadedOptimizer(torch.optim.AdamW(model.parameters()), HostStore())
    for way in (copy.deepcopy, pickle.dumps):
        with pytest.raises(TypeError, match="cannot be copied or pickled, because its state lies"):
            way(optimizer)
