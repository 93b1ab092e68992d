"""Stepping in backward: bitwise equal weights, and one gradient alive at a time."""

from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial

import pytest
import torch
from close import assert_close
from quick import quick
from torch import nn
from torch.utils.checkpoint import checkpoint as torch_checkpoint

import memlab
from memlab import optim
from memlab.accumulation import accumulate
from memlab.checkpointing import checkpoint, checkpoint_blocks, uniform_schedule
from memlab.metering.profiler_recording import compare, record
from memlab.model import GPT, PRESETS
from memlab.optim import InBackward, step_in_backward
from memlab.precision import MasterWeights
from memlab.trace import Trace

TINY = replace(PRESETS["tiny"], layers=2)
EMBEDDING_BYTES = 4 * TINY.vocab_size * TINY.hidden_size  # the largest weight

Make = Callable[[nn.Module], torch.optim.Optimizer]


def of_all(made: Callable[..., torch.optim.Optimizer], **settings) -> Make:
    return lambda model: made(model.parameters(), lr=1e-2, weight_decay=0.1, **settings)


def adam_mini(model: nn.Module) -> torch.optim.Optimizer:
    partition = optim.gpt_partition(TINY.head_dim, default="row")
    return optim.AdamMini(model.named_parameters(), 1e-2, weight_decay=0.1, partition=partition)


def in_two_groups(model: nn.Module) -> torch.optim.Optimizer:
    """Return named groups with different learning rates and decays."""
    named = list(model.named_parameters())
    vectors = [(name, p) for name, p in named if p.ndim == 1]
    others = [(name, p) for name, p in named if p.ndim != 1]
    groups = [{"params": vectors, "weight_decay": 0.0, "lr": 1e-3}, {"params": others}]
    groups = [group for group in groups if group["params"]]
    return torch.optim.AdamW(groups, lr=1e-2, weight_decay=0.1, foreach=False)


SGD = partial(torch.optim.SGD, momentum=0.9)
OPTIMIZERS: dict[str, Make] = {
    "AdamW": of_all(optim.AdamW),
    "Adam8bit": of_all(optim.Adam8bit),
    "AdamMini": adam_mini,
    "Lion": of_all(optim.Lion),
    "Lion8bit": of_all(optim.Lion8bit),
    "Muon": of_all(optim.Muon),
    "GaLore": of_all(optim.GaLore, rank=3),
    "Apollo": of_all(optim.Apollo, rank=3),
    "torch AdamW, one by one": of_all(torch.optim.AdamW, foreach=False),
    "torch AdamW, foreach": of_all(torch.optim.AdamW, foreach=True),
    "torch AdamW, fused": of_all(torch.optim.AdamW, fused=True),
    "torch SGD, one by one": of_all(SGD, foreach=False),
    "torch SGD, foreach": of_all(SGD, foreach=True),
    "torch SGD, fused": of_all(SGD, fused=True),
    "torch NAdam": of_all(torch.optim.NAdam),
    "torch Adafactor": of_all(torch.optim.Adafactor),
    "two groups": in_two_groups,
}
each_optimizer = pytest.mark.parametrize("make", OPTIMIZERS.values(), ids=OPTIMIZERS)
some_optimizers = pytest.mark.parametrize(
    "make", quick(list(OPTIMIZERS.values())[::3], OPTIMIZERS.values())
)
adamw = OPTIMIZERS["torch AdamW, one by one"]


def gpt(*, tied: bool = True) -> GPT:
    torch.manual_seed(0)
    return GPT(replace(TINY, tied=tied))


def batch(seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(TINY.vocab_size, (2, 17), generator=generator)
    return tokens[:, :-1], tokens[:, 1:]


def train(model: nn.Module, stepping, seeds: Iterable[int] = range(5)) -> None:
    for seed in seeds:
        stepping.zero_grad()
        model(*batch(seed)).backward()
        stepping.step()


def trained(make: Make, *, in_backward: bool, change=lambda model: None, tied=True) -> GPT:
    model = gpt(tied=tied)
    change(model)
    optimizer = make(model)
    train(model, step_in_backward(optimizer) if in_backward else optimizer)
    return model


def same(model: nn.Module, other: nn.Module) -> bool:
    pairs = zip(model.parameters(), other.parameters(), strict=True)
    return all(torch.equal(a, b) for a, b in pairs)


def one_weight(*shape: int) -> tuple[nn.Parameter, InBackward]:
    weight = nn.Parameter(torch.ones(shape or (3,)))
    return weight, step_in_backward(torch.optim.SGD([weight], lr=0.1))


# ------------------------------------------------------------------ values


@pytest.mark.few(7)
@each_optimizer
@pytest.mark.parametrize("tied", [True, False])
def test_weights_are_bitwise_equal_to_ordinary_steps(make, tied):
    ordinary = trained(make, in_backward=False, tied=tied)
    assert same(ordinary, trained(make, in_backward=True, tied=tied))
    assert not same(ordinary, gpt(tied=tied))


@pytest.mark.gpu
@each_optimizer
def test_weights_are_bitwise_equal_on_a_gpu(make):
    """Use no embedding, because its gradient is accumulated in no fixed order."""
    models = []
    for wrap in (lambda optimizer: optimizer, step_in_backward):
        torch.manual_seed(0)
        model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(3))).cuda()
        stepping = wrap(make(model))
        for _ in range(5):
            stepping.zero_grad()
            model(torch.ones(8, 64, device="cuda")).square().mean().backward()
            stepping.step()
        models.append(model)
    assert same(*models)


@pytest.mark.parametrize("using", [checkpoint, partial(torch_checkpoint, use_reentrant=False)])
def test_it_works_with_checkpointing(using):
    def change(model: GPT) -> None:
        checkpoint_blocks(model, uniform_schedule(TINY.layers, every=1), using=using)

    ordinary = trained(adamw, in_backward=False)
    assert same(ordinary, trained(adamw, in_backward=True, change=change))


def test_frozen_weights_are_unchanged_and_the_others_step():
    def change(model: GPT) -> None:
        model.blocks[0].requires_grad_(False)

    ordinary = trained(adamw, in_backward=False, change=change)
    stepped = trained(adamw, in_backward=True, change=change)
    assert same(ordinary, stepped)
    assert same(stepped.blocks[0], gpt().blocks[0])


def test_a_weight_unfrozen_later_is_stepped_at_the_end():
    models = gpt(), gpt()
    for model, wrap in zip(models, (lambda optimizer: optimizer, step_in_backward), strict=True):
        model.blocks[0].requires_grad_(False)
        stepping = wrap(adamw(model))
        train(model, stepping, seeds=range(2))
        model.blocks[0].requires_grad_(True)
        train(model, stepping, seeds=range(2, 4))
    assert same(*models)
    assert not same(models[0].blocks[0], gpt().blocks[0])


def test_a_learning_rate_schedule_works():
    models = gpt(), gpt()
    for model, in_backward in zip(models, (False, True), strict=True):
        optimizer = adamw(model)
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.5**step)
        stepping = step_in_backward(optimizer) if in_backward else optimizer
        for seed in range(4):
            train(model, stepping, seeds=[seed])
            schedule.step()
    assert same(*models)
    assert not same(models[0], trained(adamw, in_backward=False))


def test_several_losses_in_one_backward_are_one_step():
    weights = [nn.Parameter(torch.ones(3)) for _ in range(2)]
    optimizers = [torch.optim.SGD([weight], lr=0.1) for weight in weights]
    for weight in weights:
        if weight is weights[1]:
            step_in_backward(optimizers[1])
        torch.autograd.backward([weight.square().sum(), (3 * weight).sum()])
    optimizers[0].step()
    assert torch.equal(*weights)


def test_losses_of_different_weights_can_run_backward_in_turn():
    weights = [nn.Parameter(torch.ones(3)) for _ in range(2)]
    stepping = step_in_backward(torch.optim.SGD(weights, lr=0.5))
    for weight in weights:
        weight.sum().backward()
    stepping.step()
    assert all(torch.equal(weight, torch.full((3,), 0.5)) for weight in weights)


def test_training_resumes_from_a_loaded_state():
    ordinary = trained(adamw, in_backward=False)
    model = gpt()
    stepping = step_in_backward(adamw(model))
    train(model, stepping, seeds=range(2))
    state, weights = stepping.state_dict(), model.state_dict()
    other = gpt()
    other.load_state_dict(weights)
    resumed = step_in_backward(adamw(other))
    resumed.load_state_dict(state)  # which replaces the groups
    train(other, resumed, seeds=range(2, 5))
    assert same(ordinary, other)


def test_a_hook_can_clip_each_gradient():
    weight, _ = one_weight()
    weight.register_hook(lambda gradient: gradient.clamp(max=0.5))
    weight.sum().backward()
    assert_close(weight.detach(), torch.full((3,), 0.95))


def test_loading_a_state_starts_a_new_step():
    weight, stepping = one_weight()
    state = stepping.state_dict()
    weight.sum().backward()
    stepping.load_state_dict(state)
    weight.sum().backward()
    assert_close(weight.detach(), torch.full((3,), 0.8))


# ------------------------------------------------------------------ one weight at a time


@pytest.mark.parametrize("make", [adamw, adam_mini], ids=["torch", "memlab"])
def test_backward_steps_the_weights_and_leaves_no_gradient(make):
    model = gpt()
    step_in_backward(make(model))
    model(*batch(0)).backward()
    assert all(p.grad is None for p in model.parameters())
    pairs = zip(model.parameters(), gpt().parameters(), strict=True)
    assert not any(torch.equal(after, before) for after, before in pairs)


def test_the_optimizer_steps_one_weight_with_its_name_and_settings():
    seen = []
    model = gpt()
    optimizer = in_two_groups(model)
    groups, settings = optimizer.param_groups, [{**group} for group in optimizer.param_groups]
    optimizer.register_step_pre_hook(lambda *_: seen.append(optimizer.param_groups))
    train(model, step_in_backward(optimizer), seeds=[0])
    names = dict(model.named_parameters())
    assert len(seen) == len(names)
    for (group,) in seen:
        (name,), (weight,) = group["param_names"], group["params"]
        assert names.pop(name) is weight
        assert (group["lr"], group["weight_decay"]) == (
            (1e-3, 0) if weight.ndim == 1 else (0.01, 0.1)
        )
    assert optimizer.param_groups is groups
    assert groups == settings


def test_step_applies_and_frees_a_gradient_set_by_hand():
    weight, stepping = one_weight()
    weight.grad = torch.ones(3)
    stepping.step()
    assert_close(weight.detach(), torch.full((3,), 0.9))
    assert weight.grad is None


def test_step_steps_weights_of_a_group_added_later():
    weight, stepping = one_weight()
    later = nn.Parameter(torch.ones(3))
    stepping.optimizer.add_param_group({"params": [later]})
    (weight + later).sum().backward()
    assert torch.equal(later, torch.ones(3))
    stepping.step()
    assert torch.equal(later, weight)


def test_remove_stops_stepping_in_backward():
    weight, stepping = one_weight()
    stepping.remove()
    weight.sum().backward()
    weight.sum().backward()
    assert torch.equal(weight, torch.ones(3))
    assert torch.equal(weight.grad, torch.full((3,), 2.0))


def test_leaving_a_with_block_removes_the_hooks():
    weight, stepping = one_weight()
    with stepping as entered:
        weight.sum().backward()
    assert entered is stepping
    weight.sum().backward()
    assert_close(weight.detach(), torch.full((3,), 0.9))
    assert torch.equal(weight.grad, torch.ones(3))


# ------------------------------------------------------------------ bytes


def step_of(model: GPT, stepping) -> Callable[[], None]:
    x, y = batch(0)

    def step() -> None:
        stepping.zero_grad()
        model(x, y).backward()
        stepping.step()

    return step


def second_step(make: Make, *, in_backward: bool, tied: bool = True) -> Trace:
    model = gpt(tied=tied)
    optimizer = make(model)
    step = step_of(model, step_in_backward(optimizer) if in_backward else optimizer)
    step()
    return memlab.measure(step, model=model, optimizer=optimizer)


def most(trace: Trace, wanted) -> int:
    """Return the peak bytes of the selected storages."""
    alive = peak = 0
    for event in trace.events:
        alive += event.bytes if wanted(event) else 0
        peak = max(peak, alive)
    return peak


def is_gradient(event) -> bool:
    return event.category == "gradients"


def of_the_embeddings_shape(event) -> bool:
    is_new = event.category in ("gradients", "backward_temporaries")
    return is_new and event.shape == (TINY.vocab_size, TINY.hidden_size)


@pytest.mark.few(4)
@some_optimizers
@pytest.mark.parametrize("tied", quick([True], [True, False]))
def test_peak_gradient_bytes_are_those_of_the_largest_weight(make, tied):
    parameters = replace(TINY, tied=tied).parameters
    assert most(second_step(make, in_backward=False, tied=tied), is_gradient) == 4 * parameters
    trace = second_step(make, in_backward=True, tied=tied)
    assert most(trace, is_gradient) == EMBEDDING_BYTES
    assert trace.at_end.get("gradients", 0) == 0


@pytest.mark.parametrize(("tied", "copies"), [(False, 1), (True, 3)])
def test_a_tied_matrix_needs_two_gradients_and_briefly_their_sum(tied, copies):
    trace = second_step(OPTIMIZERS["AdamW"], in_backward=True, tied=tied)
    assert most(trace, of_the_embeddings_shape) == copies * EMBEDDING_BYTES


def test_bytes_after_a_step_are_those_of_an_ordinary_step_without_gradients():
    ordinary = second_step(adamw, in_backward=False).at_end
    stepped = second_step(adamw, in_backward=True).at_end
    assert stepped == {name: n for name, n in ordinary.items() if name != "gradients"}
    assert ordinary["gradients"] == 4 * TINY.parameters


def test_the_meter_attributes_state_created_in_backward_to_the_optimizer():
    model = gpt()
    optimizer = adamw(model)
    step = step_of(model, step_in_backward(optimizer))
    first = memlab.measure(step, model=model)  # the meter finds the optimizer when it steps
    state = {e.phase for e in first.events if e.category == "optimizer_state" and e.bytes > 0}
    assert state == {"optimizer"}
    adam = 2 * 4 * TINY.parameters + 4 * len(list(model.parameters()))  # and a step count each
    assert first.at_end["optimizer_state"] == adam
    phases = [event.phase for event in first.events]
    assert "backward" in phases[phases.index("optimizer") :]


@pytest.mark.few(1)
@pytest.mark.parametrize("make", [adamw, OPTIMIZERS["Adam8bit"]], ids=["torch", "memlab"])
@pytest.mark.parametrize("tied", [True, False])
def test_the_meter_matches_the_allocator(make, tied):
    model = gpt(tied=tied)
    optimizer = make(model)
    step = step_of(model, step_in_backward(optimizer))
    step()
    trace = memlab.measure(step, model=model, optimizer=optimizer)
    assert compare(trace, record(step, warm_up=step)).exact


@pytest.mark.few(1)
@some_optimizers
def test_a_dry_run_counts_the_same_bytes(make):
    real = second_step(make, in_backward=True)
    with memlab.dry_run():
        model = gpt()
        stepping = step_in_backward(make(model))
        for parameter in model.parameters():
            parameter.grad = torch.zeros_like(parameter)
        stepping.step()  # creates the state, and frees the zeros
        dry = memlab.measure(step_of(model, stepping), model=model, optimizer=stepping.optimizer)
    assert [(e.bytes, e.category, e.phase) for e in dry.events if e.phase != "before"] == [
        (e.bytes, e.category, e.phase) for e in real.events if e.phase != "before"
    ]
    assert (dry.peak_bytes, dry.at_peak) == (real.peak_bytes, real.at_peak)


def test_a_dry_run_leaves_an_existing_model_unchanged():
    model = gpt()
    stepping = step_in_backward(adamw(model))
    train(model, stepping, seeds=[0])
    before = [p.detach().clone() for p in model.parameters()]
    steps = [state["step"].item() for state in stepping.state.values()]
    with memlab.dry_run():
        memlab.measure(step_of(model, stepping), model=model, optimizer=stepping)
    assert all(map(torch.equal, model.parameters(), before))
    assert steps == [state["step"].item() for state in stepping.state.values()]
    assert all(p.grad is None for p in model.parameters())


# ------------------------------------------------------------------ invalid use


def test_a_second_gradient_before_the_step_is_refused():
    weight, stepping = one_weight()
    weight.sum().backward()
    with pytest.raises(RuntimeError, match=r"got a second gradient of a weight of shape \(3,\)"):
        weight.sum().backward()
    assert torch.equal(weight, torch.full((3,), 0.9))  # stepped once
    stepping.step()
    weight.sum().backward()
    assert_close(weight.detach(), torch.full((3,), 0.8))


def test_an_existing_gradient_before_backward_is_refused():
    weight, stepping = one_weight()
    weight.grad = torch.ones(3)
    with pytest.raises(RuntimeError, match=r"that has one already; call zero_grad\(\) before"):
        weight.sum().backward()
    assert torch.equal(weight, torch.ones(3))
    stepping.zero_grad()
    weight.sum().backward()
    assert_close(weight.detach(), torch.full((3,), 0.9))


def test_accumulation_is_refused():
    weight, _ = one_weight()
    with pytest.raises(RuntimeError, match="or accumulate gradients with the optimizer"):
        accumulate([1, 2], lambda n: (weight.sum(), n), [weight])


def test_torchs_loss_scaler_raises_an_error():
    weight, stepping = one_weight()
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(weight.sum()).backward()
    with pytest.raises(AssertionError, match="No inf checks were recorded"):
        scaler.step(stepping)


@each_optimizer
def test_stepping_a_weight_that_backward_still_needs_is_an_error(make):
    """Fused kernels don't increment a tensor's version, so step_in_backward does."""
    layer = nn.Linear(1, 3, bias=False)
    weight, x = layer.weight, torch.ones(3, 1, requires_grad=True)
    step_in_backward(make(nn.ModuleDict({"down_proj": layer})))
    scaled = x * weight.detach()  # its backward reads the weight but gives it no gradient
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        (scaled * weight).sum().backward()


@pytest.mark.parametrize("using", [checkpoint, partial(torch_checkpoint, use_reentrant=False)])
def test_stepping_a_weight_that_a_checkpoint_still_needs_is_an_error(using):
    weight, _ = one_weight()
    x = torch.ones(3, requires_grad=True)
    scaled = using(lambda x, scale: (x * scale).sin(), x, weight.detach())
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        (scaled * weight).sum().backward()


def test_master_weights_are_refused():
    master = MasterWeights([nn.Parameter(torch.ones(3))], torch.optim.SGD)
    with pytest.raises(TypeError, match=r"got MasterWeights, which is not a torch\.optim\.Opt"):
        step_in_backward(master)


def test_an_optimizer_that_needs_a_closure_is_refused():
    lbfgs = torch.optim.LBFGS([nn.Parameter(torch.ones(3))])
    with pytest.raises(TypeError, match="got LBFGS, whose step needs a closure"):
        step_in_backward(lbfgs)


class CountsInItsGroup(torch.optim.SGD):
    """Some optimizers count steps per group, once for all weights."""

    def step(self, closure=None):
        for group in self.param_groups:
            group["k"] = group.get("k", 0) + 1
        return super().step(closure)


def test_an_optimizer_that_changes_its_groups_is_refused():
    weight = nn.Parameter(torch.ones(3))
    optimizer = CountsInItsGroup([weight], lr=0.1)
    step_in_backward(optimizer)
    with pytest.raises(
        TypeError, match="got CountsInItsGroup, whose step changes its group's k once"
    ):
        weight.sum().backward()


def test_an_exception_restores_the_groups_and_step_starts_anew():
    table, weight = nn.Embedding(4, 3, sparse=True), nn.Parameter(torch.ones(3))
    optimizer = optim.AdamW([table.weight, weight])
    stepping = step_in_backward(optimizer)
    with pytest.raises(TypeError, match="got a sparse gradient"):
        (table(torch.tensor([1])) * weight).sum().backward()
    assert [len(group["params"]) for group in optimizer.param_groups] == [2]
    stepping.zero_grad()
    stepping.step()
    weight.sum().backward()
    assert weight.grad is None
