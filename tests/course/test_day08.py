"""Day 8: what its checks tell a learner, and what the lesson claims."""

from dataclasses import replace

import pytest
import torch
from close import assert_close
from edited import verdict_on

import memlab
from memlab import optim
from memlab.course import bill, days
from memlab.course.bill import SETTING
from memlab.course.exercises import WRONG
from memlab.model import GPT, PRESETS
from memlab.reference.adam_mini import adam_mini_, block_size
from memlab.reference.adamw import adamw_
from memlab.reference.lion import lion_
from memlab.reference.step_in_backward import in_backward
from memlab.train import Setting, combined, dry_trace
from memlab.units import format_bytes

# ------------------------------------------------------------------ answers


def test_one_beta_of_two_that_is_fixed_has_no_remark():
    verdict = verdict_on("8.2", ("beta1, beta2 = betas", "beta1, beta2 = betas[0], 0.99"))
    assert verdict.status == WRONG
    assert "take them from `betas`" not in verdict.text


# ------------------------------------------------------------------ compared with the library

TINY = replace(PRESETS["tiny"], layers=2, tied=False)
SETTINGS = {"lr": 1e-2, "weight_decay": 0.1}


def trained(make_update) -> GPT:
    """A model after five steps; make_update(model) returns the step."""
    torch.manual_seed(0)
    model = GPT(TINY)
    update = make_update(model)
    for seed in range(5):
        tokens = torch.randint(256, (2, 17), generator=torch.Generator().manual_seed(seed))
        model.zero_grad()
        model(tokens[:, :-1], tokens[:, 1:]).backward()
        update()
    return model


def by_hand(step_, sizes=None):
    def make(model):
        states = {name: {} for name, _ in model.named_parameters()}

        @torch.no_grad()
        def update():
            for name, weight in model.named_parameters():
                size = (sizes(name, weight.shape, TINY.head_dim),) if sizes else ()
                step_(weight, weight.grad, states[name], *size, **SETTINGS)

        return update

    return make


def mini(model):
    partition = optim.gpt_partition(TINY.head_dim)
    return optim.AdamMini(model.named_parameters(), partition=partition, **SETTINGS).step


@pytest.mark.parametrize(
    ("ours", "librarys"),
    [
        (by_hand(adamw_), lambda model: optim.AdamW(model.parameters(), **SETTINGS).step),
        (by_hand(lion_), lambda model: optim.Lion(model.parameters(), **SETTINGS).step),
        (by_hand(adam_mini_, block_size), mini),
    ],
    ids=["AdamW", "Lion", "Adam-mini"],
)
def test_the_references_step_as_the_library_does(ours, librarys):
    pairs = zip(trained(ours).parameters(), trained(librarys).parameters(), strict=True)
    for mine, other in pairs:
        assert_close(mine, other)


def test_the_partition_is_the_librarys():
    partition = optim.gpt_partition(TINY.head_dim)
    for name, weight in GPT(TINY).named_parameters():
        assert block_size(name, weight.shape, TINY.head_dim) == partition(name, weight.shape)


def test_a_refused_gradient_is_not_added_to_the_next():
    weight, gradients = torch.nn.Parameter(torch.ones(1)), []
    end_step = in_backward([weight], lambda w: gradients.append(w.grad.item()))
    weight.sum().backward()
    with pytest.raises(RuntimeError):
        weight.sum().backward()
    end_step()
    weight.sum().backward()
    assert gradients == [1.0, 1.0]


def test_in_backward_steps_each_weight_and_drops_its_gradient():
    torch.manual_seed(0)
    model, order = GPT(TINY), []
    end_step = in_backward(list(model.parameters()), order.append)
    tokens = torch.zeros(1, 8, dtype=torch.long)
    model(tokens, tokens).backward()
    end_step()
    assert len(order) == len(list(model.parameters()))
    assert all(weight.grad is None for weight in model.parameters())


# ------------------------------------------------------------------ claims of the lesson


def dry_peak(optimizer, setting, technique="checkpointing"):
    return dry_trace(setting, replace(combined(technique), optimizer=optimizer)).at_peak


@pytest.mark.slow
@pytest.mark.parametrize("in_turn", [False, True])
def test_every_block_of_a_7b_model_adds_the_same_bytes(monkeypatch, in_turn):
    """The lesson extrapolates from one and two blocks to 32."""

    def lion(model):
        optimizer = optim.Lion(model.parameters())
        return optim.step_in_backward(optimizer) if in_turn else optimizer

    def peak(layers):
        config = replace(PRESETS["llama-2-7b"], layers=layers)
        monkeypatch.setitem(PRESETS, "of so many blocks", config)
        setting = Setting("of so many blocks", 1, 2048, torch.bfloat16)
        return dry_peak(lion, setting)

    one, two, measured = peak(1), peak(2), peak(32)
    extrapolated = {kind: one.get(kind, 0) + 31 * (two[kind] - one.get(kind, 0)) for kind in two}
    assert extrapolated == measured


@pytest.mark.slow
def test_the_step_inside_backward_saves_nothing_if_the_peak_is_the_start_of_backward():
    """The bill's plain step, whose peak is at the logits."""

    def inside(model):
        return optim.step_in_backward(optim.AdamW(model.parameters()))

    def after(model):
        return optim.AdamW(model.parameters())

    assert dry_peak(inside, SETTING, "plain") == dry_peak(after, SETTING, "plain")


def test_the_bill_halves_the_state_of_day_7():
    today, before = (bill.stored(days.day(number).bill) for number in (8, 7))
    assert 2 * today.at_peak["optimizer_state"] == before.at_peak["optimizer_state"]
    assert format_bytes(today.peak_bytes) == "1.14 GiB"


def test_adam_mini_with_a_bfloat16_momentum_uses_as_many_bytes_as_lion():
    """Beside the v of each block."""

    def state_bytes(make):
        with memlab.dry_run():
            model = GPT(PRESETS["25m"], dtype=torch.bfloat16)
            optimizer = make(model)
            for weight in model.parameters():
                weight.grad = torch.zeros_like(weight)
            trace = memlab.measure(optimizer.step, model=model, optimizer=optimizer)
        return trace.at_end["optimizer_state"] / PRESETS["25m"].parameters

    bfloat16 = {"moment_dtype": torch.bfloat16}
    partition = optim.gpt_partition(PRESETS["25m"].head_dim)
    assert state_bytes(lambda model: optim.Lion(model.parameters(), **bfloat16)) == 2
    of_mini = state_bytes(
        lambda model: optim.AdamMini(model.named_parameters(), partition=partition, **bfloat16)
    )
    assert 2 < of_mini < 2.01
