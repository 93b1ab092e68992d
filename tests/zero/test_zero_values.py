"""Simulated ranks compute what one process computes that accumulates in rank order."""

import copy
from dataclasses import replace
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from close import assert_close
from quick import quick
from ranked import (
    TIED,
    OneProcess,
    adamw,
    differing,
    micro_batches,
    model_of,
    sgd,
    sum_of_losses,
    two_groups,
)
from torch import nn

from memlab import optim
from memlab.accumulation import accumulate
from memlab.checkpointing import checkpoint_blocks, sqrt_schedule, uniform_schedule
from memlab.lora import add_lora
from memlab.precision import LossScaler, MasterWeights
from memlab.zero import simulate
from memlab.zero.ranks import in_sub_groups

STAGES = range(4)


def both(model, optimizer, ranks: int, stage: int, **settings):
    """Return (the ranks, one process), which train equal copies of the model."""
    return simulate(model, optimizer(two_groups(model)), ranks, stage, **settings), OneProcess(
        model, optimizer
    )


@pytest.mark.parametrize("optimizer", quick([adamw], [adamw, sgd, optim.AdamW, optim.Lion]))
@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("ranks", quick([3], [1, 3, 5]))
def test_the_weights_equal_one_process_bit_for_bit(ranks, stage, optimizer):
    """Sizes are odd and mostly not divisible by the ranks; two groups and a tied matrix."""
    model = model_of()
    zero, alone = both(model, optimizer, ranks, stage)
    for number in range(3):
        batches = micro_batches(ranks, seed=number)
        zero.step(batches, sum_of_losses)
        alone.step(batches, ranks, stage)
        assert differing(zero.weights(), alone.weights()) == []


@pytest.mark.few(2)
@pytest.mark.parametrize("stage", STAGES)
def test_the_weights_are_equal_with_several_micro_batches_per_rank(stage):
    model = model_of()
    zero, alone = both(model, adamw, 3, stage)
    for number in range(2):
        batches = micro_batches(4 * 3, seed=number)
        zero.step(batches, sum_of_losses)
        alone.step(batches, 3, stage)
        assert differing(zero.weights(), alone.weights()) == []


@pytest.mark.few(2)
@pytest.mark.parametrize("master_weights", quick([True], [False, True]))
@pytest.mark.parametrize("stage", STAGES)
def test_the_weights_are_equal_for_any_sub_group_size(stage, master_weights, monkeypatch):
    model, found = model_of(), []
    for size in (7, 2**26):
        monkeypatch.setattr("memlab.zero.ranks.SUB_GROUP", size)
        zero, _ = both(model, adamw, 3, stage, master_weights=master_weights)
        for number in range(2):
            zero.step(micro_batches(3, seed=number), sum_of_losses)
        found.append(zero.weights())
    assert differing(*found) == []


def test_spans_are_split_without_losing_elements(monkeypatch):
    monkeypatch.setattr("memlab.zero.ranks.SUB_GROUP", 4)
    cut = list(in_sub_groups([(0, slice(0, 9)), (1, slice(9, 13)), (1, slice(13, 13))]))
    assert cut == [
        *((0, slice(0, 4)), (0, slice(4, 8)), (0, slice(8, 9))),
        *((1, slice(9, 13)), (1, slice(13, 13))),
    ]


@pytest.mark.parametrize("stage", STAGES)
def test_the_weights_are_equal_with_an_untied_head(stage):
    model = model_of(replace(TIED, tied=False))
    zero, alone = both(model, adamw, 3, stage)
    for number in range(2):
        batches = micro_batches(3, seed=number)
        zero.step(batches, sum_of_losses)
        alone.step(batches, 3, stage)
    assert differing(zero.weights(), alone.weights()) == []


class Mixed(nn.Module):
    """Two dtypes, a scalar weight, and a list whose two layers share a matrix."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.layers = nn.ModuleList(nn.Linear(5, 5) for _ in range(3))
        self.layers[2].weight = self.layers[0].weight
        self.last = nn.Linear(5, 3, dtype=torch.float64)

    def forward(self, x):
        for layer in self.layers:
            x = layer(x).tanh() * self.scale
        return self.last(x.double())


def squares(model, x):
    return model(x).square().sum(), x.shape[0]


@pytest.mark.parametrize("stage", STAGES)
def test_the_weights_are_equal_for_mixed_dtypes_and_shared_weights(stage):
    model = Mixed()
    zero = simulate(model, adamw(model.parameters()), 3, stage)
    alone = OneProcess(model, adamw, groups=lambda model: list(model.parameters()))
    for _ in range(3):
        batches = [torch.randn(2, 5) for _ in range(6)]
        zero.step(batches, squares)
        alone.gradients(batches, 3, stage, summed=squares)
        alone.optimizer.step()
        alone.optimizer.zero_grad()
    assert differing(zero.weights(), alone.weights()) == []


@pytest.mark.parametrize("schedule", [lambda n: uniform_schedule(n, 1), sqrt_schedule])
@pytest.mark.parametrize("stage", STAGES)
def test_the_weights_are_equal_with_checkpointed_blocks(stage, schedule):
    model = model_of()
    alone = OneProcess(model, adamw)
    checkpoint_blocks(model, schedule(TIED.layers))
    zero = simulate(model, adamw(two_groups(model)), 2, stage)
    for number in range(2):
        batches = micro_batches(2, seed=number)
        zero.step(batches, sum_of_losses)
        alone.step(batches, 2, stage)
    assert differing(zero.weights(), alone.weights()) == []


@pytest.mark.parametrize("stage", STAGES)
def test_the_weights_are_equal_if_most_weights_are_frozen(stage):
    model = model_of()
    add_lora(model, rank=2, where=lambda name: name.startswith("blocks."))

    def trained(model):
        return [p for p in model.parameters() if p.requires_grad]

    zero = simulate(model, adamw(trained(model)), 3, stage)
    alone = OneProcess(model, adamw, groups=trained)
    for number in range(2):
        batches = micro_batches(3, seed=number)
        zero.step(batches, sum_of_losses)
        accumulate(batches, lambda b: sum_of_losses(alone.model, b), trained(alone.model))
        alone.optimizer.step()
        alone.optimizer.zero_grad()
    assert differing(zero.weights(), alone.weights()) == []


@pytest.mark.few(2)
@pytest.mark.parametrize("stage", STAGES)
def test_float32_copies_of_shards_step_like_master_weights_in_one_process(stage):
    model = model_of(dtype=torch.bfloat16)
    ranks, batches = 3, micro_batches(3)
    zero = simulate(model, adamw(two_groups(model)), ranks, stage, master_weights=True)
    alone = copy.deepcopy(model)
    master = MasterWeights(alone.parameters(), lambda copies: adamw(copies_by_group(copies)))
    for _ in range(4):
        tokens = zero.step(batches, sum_of_losses).tokens
        for batch in batches:
            sum_of_losses(alone, batch)[0].backward()
        master.gather_gradients()
        for weight in master.weights:
            weight.grad.div_(tokens)
        master.step()
        master.zero_grad()
    assert differing(zero.weights(), dict(alone.named_parameters())) == []


def copies_by_group(copies):
    return [
        {"params": [p for p in copies if p.ndim > 1]},
        {"params": [p for p in copies if p.ndim < 2], "weight_decay": 0.0},
    ]


@pytest.mark.parametrize("stage", [0, 1, 2])
def test_all_ranks_have_the_same_weights_after_a_step(stage):
    model = model_of()
    zero = simulate(model, adamw(model.parameters()), 3, stage)
    zero.step(micro_batches(3), sum_of_losses)
    first, *others = [dict(rank.model.named_parameters()) for rank in zero.ranks]
    assert all(differing(other, first) == [] for other in others)


def test_the_given_model_and_optimizer_do_not_change():
    model = model_of()
    before = copy.deepcopy(dict(model.named_parameters()))
    optimizer = adamw(model.parameters())
    simulate(model, optimizer, 2, 3).step(micro_batches(2), sum_of_losses)
    assert differing(dict(model.named_parameters()), before) == []
    assert not optimizer.state
    assert optimizer.param_groups[0]["params"] == list(model.parameters())


@pytest.mark.parametrize("stage", STAGES)
def test_the_loss_is_the_mean_over_all_tokens(stage):
    model, batches = model_of(), micro_batches(6)
    step = simulate(model, adamw(model.parameters()), 3, stage).step(batches, sum_of_losses)
    tokens, targets = (torch.cat(parts) for parts in zip(*batches, strict=True))
    expected = F.cross_entropy(model(tokens).flatten(0, 1), targets.flatten())
    assert step.loss == pytest.approx(expected.item(), rel=1e-6)
    assert step.tokens == int((targets >= 0).sum())


# ------------------------------------------------------------------ clipping


@pytest.mark.few(2)
@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("ranks", [2, 5])
def test_clipping_uses_the_norm_over_all_shards(ranks, stage):
    """The norm of one shard is smaller and differs between ranks, so it would clip less."""
    model = model_of().double()
    zero, alone = both(model, adamw, ranks, stage)
    for number in range(3):
        batches = micro_batches(ranks, seed=number)
        step = zero.step(batches, sum_of_losses, clip_norm=0.1)
        alone.gradients(batches, ranks, stage)
        norm = nn.utils.clip_grad_norm_(alone.model.parameters(), 0.1)
        alone.optimizer.step()
        alone.optimizer.zero_grad()
        assert norm > 0.1
        assert step.norm == pytest.approx(float(norm), rel=1e-6)
        for name, weight in zero.weights().items():
            # torch adds 1e-6 to the norm.
            assert_close(weight, alone.weights()[name], dtype=torch.float32)


@pytest.mark.parametrize("stage", STAGES)
def test_a_norm_below_the_limit_changes_nothing(stage):
    model = model_of()
    clipped, plain = (simulate(model, adamw(model.parameters()), 2, stage) for _ in range(2))
    clipped.step(micro_batches(2), sum_of_losses, clip_norm=1e6)
    plain.step(micro_batches(2), sum_of_losses)
    assert differing(clipped.weights(), plain.weights()) == []


# ------------------------------------------------------------------ loss scaling


@pytest.mark.parametrize("scaler_of", [LossScaler, lambda: torch.amp.GradScaler("cpu")])
@pytest.mark.parametrize("stage", quick([3], STAGES))
def test_loss_scaling_by_a_power_of_two_does_not_change_the_weights(stage, scaler_of):
    model = model_of()
    scaled, plain = (simulate(model, adamw(model.parameters()), 3, stage) for _ in range(2))
    scaler = scaler_of()
    for number in range(3):
        batches = micro_batches(6, seed=number)
        step = scaled.step(batches, sum_of_losses, scaler=scaler)
        assert step.loss == plain.step(batches, sum_of_losses).loss
        assert step.stepped
    assert differing(scaled.weights(), plain.weights()) == []


@pytest.mark.parametrize("culprit", range(3))
@pytest.mark.parametrize("stage", STAGES)
def test_an_overflow_on_one_rank_skips_the_step_on_all_ranks(stage, culprit):
    """One element of the gradient is inf. Its shard is on one rank, but all ranks must skip."""
    model = Weighted()
    zero = simulate(model, adamw(model.parameters()), 3, stage)
    before, scaler = zero.weights(), LossScaler()
    fine, bad = torch.ones(3, 3), torch.ones(3, 3)
    bad[culprit, 1] = torch.inf

    step = zero.step([fine, bad, fine], weighted, scaler=scaler)
    assert not step.stepped
    assert scaler.get_scale() == 2.0**15
    assert differing(zero.weights(), before) == []
    assert zero.step([fine, fine, fine], weighted, scaler=scaler).stepped
    assert differing(zero.weights(), before) == ["weight"]


class Weighted(nn.Module):
    """A module whose input is the gradient of its weight."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3, 3))

    def forward(self, x):
        return (self.weight * x).sum()


def weighted(model, x):
    return model(x), 1


# ------------------------------------------------------------------ refusals


def adam_mini(parameters):
    partition = optim.gpt_partition(TIED.head_dim)
    return optim.AdamMini(model_of().named_parameters(), partition=partition)


class ByNorm(torch.optim.SGD):
    """Take steps of length lr, without state. Each shard would take a step of length lr."""

    @torch.no_grad()
    def step(self):
        for weight in self.param_groups[0]["params"]:
            weight.sub_(weight.grad / weight.grad.norm(), alpha=self.param_groups[0]["lr"])


@pytest.mark.parametrize(
    "optimizer",
    [
        *(optim.Adam8bit, optim.Lion8bit, adam_mini, torch.optim.Adafactor, ByNorm),
        *(optim.Muon, partial(optim.GaLore, rank=3), partial(optim.Apollo, rank=1024)),
    ],
)
def test_an_optimizer_that_is_not_elementwise_is_refused(optimizer):
    model = model_of()
    with pytest.raises(TypeError, match="elementwise optimizer, such as AdamW"):
        simulate(model, optimizer(model.parameters()), 2, 2)


@pytest.mark.parametrize("stage", STAGES)
def test_a_weight_without_a_gradient_is_reported_by_name(stage):
    model = HalfUsed()
    zero = simulate(model, adamw(model.parameters()), 2, stage)
    with pytest.raises(ValueError, match=r"no gradient of unused\.bias, unused\.weight"):
        zero.step([torch.ones(1, 2)] * 2, only_used)


class HalfUsed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.used, self.unused = nn.Linear(2, 2), nn.Linear(2, 2)

    def forward(self, x):
        return self.used(x)


def only_used(model, x):
    return model(x).sum(), 1


def test_an_optimizer_that_has_stepped_is_refused():
    model = model_of()
    optimizer = adamw(model.parameters())
    sum_of_losses(model, micro_batches(1)[0])[0].backward()
    optimizer.step()
    with pytest.raises(ValueError, match="an optimizer that has stepped"):
        simulate(model, optimizer, 2, 1)


def test_an_object_that_is_not_an_optimizer_is_refused():
    model = model_of()
    with pytest.raises(TypeError, match="got a MasterWeights as optimizer"):
        simulate(model, MasterWeights(model.parameters(), adamw), 2, 1)


def test_a_trained_weight_outside_the_optimizer_is_refused():
    model = model_of()
    with pytest.raises(
        ValueError, match=r"norm\.weight requires a gradient and the optimizer does"
    ):
        simulate(model, adamw([p for p in model.parameters() if p.ndim > 1]), 2, 1)


def test_the_optimizer_of_another_model_is_refused():
    with pytest.raises(ValueError, match=r"steps .* tensors outside the model"):
        simulate(model_of().requires_grad_(False), adamw(model_of().parameters()), 2, 1)
