"""Day 4's checks accept other right answers, and its formula matches the meter."""

from dataclasses import replace
from functools import partial
from itertools import accumulate

import pytest
import torch
from torch import nn

import memlab
from memlab.course import days
from memlab.course.checks.day04 import POLICIES, SCALER_CASES, held_bytes, scaler_steps
from memlab.course.exercises import WRONG, judge
from memlab.data import batches, source_bytes
from memlab.model import GPT, PRESETS
from memlab.precision import LossScaler, MasterWeights
from memlab.rounding import stochastic_round_

HELD_BYTES, SCALER, ROUND, MASTER_STEP = days.day(4).exercises
adamw = partial(torch.optim.AdamW, foreach=False)


# ------------------------------------------------------------------ other right answers


def by_shifts(numbers, generator):
    """Draws random bits in place, and clears the lower half by two shifts."""
    bits = torch.empty(numbers.shape, dtype=torch.int32).random_(0, 2**16, generator=generator)
    bits += numbers.view(torch.int32)
    bits = bits.bitwise_right_shift_(16).bitwise_left_shift_(16).view(torch.float32)
    special = ~numbers.isfinite()
    bits[special] = numbers[special]
    return bits.to(torch.bfloat16)


def one_by_one(weights, copies, optimizer, scale):
    """Multiplies by 1 / scale, and writes into .data without no_grad."""
    for weight, copy in zip(weights, copies, strict=True):
        gradient, weight.grad = weight.grad, None
        copy.grad = None if gradient is None else gradient.to(torch.float32).mul_(1 / scale)
        del gradient
    optimizer.step()
    optimizer.zero_grad()
    for weight, copy in zip(weights, copies, strict=True):
        weight.data.copy_(copy.data)


class TorchScaler:
    """torch's own scaler behind the exercise's method."""

    def __init__(self, scale, interval):
        self.scaler = torch.amp.GradScaler("cpu", init_scale=scale, growth_interval=interval)
        self.scaler.scale(torch.ones(()))  # makes its state

    scale = property(lambda self: self.scaler.get_scale())
    fine_steps = property(lambda self: self.scaler.state_dict()["_growth_tracker"])

    def train(self, optimizer, losses, max_norm):
        optimizer.zero_grad()
        for loss in losses:
            self.scaler.scale(loss).backward()
        self.scaler.unscale_(optimizer)
        weights = [w for group in optimizer.param_groups for w in group["params"]]
        stepped = all(bool(w.grad.isfinite().all()) for w in weights if w.grad is not None)
        nn.utils.clip_grad_norm_(weights, max_norm)
        self.scaler.step(optimizer)
        self.scaler.update()
        return stepped


@pytest.mark.parametrize("case", SCALER_CASES, ids=str)
def test_the_reference_scaler_decides_as_torchs_gradscaler(case):
    assert list(scaler_steps(SCALER.reference, case)) == list(scaler_steps(TorchScaler, case))


# ------------------------------------------------------------------ messages


def test_a_scaler_without_scale_and_fine_steps_is_told_so():
    class Nameless:
        def __init__(self, scale, interval):
            self._scale = scale

        def train(self, optimizer, losses, max_norm):
            return True

    verdict = judge(SCALER, Nameless)
    assert verdict.status == WRONG
    assert "without scale, fine_steps; wanted a Scaler." in verdict.text


@pytest.mark.parametrize("keep", [list, lambda losses: [torch.stack(list(losses)).sum()]])
def test_a_scaler_that_keeps_the_graphs_gets_the_remark_on_graphs(keep):
    class Keeping(SCALER.reference):
        def train(self, optimizer, losses, max_norm):
            return super().train(optimizer, keep(losses), max_norm)

    verdict = judge(SCALER, Keeping)
    assert verdict.status == WRONG
    assert "The graphs of all micro-batches are alive at once" in verdict.text


@pytest.mark.parametrize("width", [2**-13, 2**-8])
def test_narrow_noise_is_not_called_round_to_nearest(width):
    def narrow(numbers, generator):
        return (numbers + width * (torch.rand(numbers.shape, generator=generator) - 0.5)).bfloat16()

    verdict = judge(ROUND, narrow)
    assert verdict.status == WRONG
    assert "Wanted both ways for every value" in verdict.text
    assert "nearest" not in verdict.text


def test_rounding_that_holds_copies_is_told_to_free_them():
    def hoarding(numbers, generator):
        copies = [numbers.clone() for _ in range(4)]
        return by_shifts(copies[0], generator)

    verdict = judge(ROUND, hoarding)
    assert verdict.status == WRONG
    assert "wanted at most 24: free tensors" in verdict.text


def test_rounding_at_random_for_some_seeds_only_is_refused():
    def by_seed(numbers, generator):
        nearest = generator.initial_seed() % 2
        return numbers.bfloat16() if nearest else by_shifts(numbers, generator)

    verdict = judge(ROUND, by_seed)
    assert verdict.status == WRONG
    assert "away from zero" in verdict.text


# ------------------------------------------------------------------ edits of the solution


def _unscale():
    numbers = [torch.ones(2)], torch.zeros(1), torch.ones(1)
    torch._amp_foreach_non_finite_check_and_unscale_(*numbers)


def _update():
    counted = torch.zeros(1, dtype=torch.int32)
    torch._amp_update_scale_(torch.ones(1), counted, torch.zeros(1), 2.0, 0.5, 3)


def by_the_library(numbers, generator):
    out = torch.empty_like(numbers, dtype=torch.bfloat16)
    return stochastic_round_(out, numbers, generator=generator)


def by_master_weights(weights, copies, optimizer, scale):
    MasterWeights(weights, lambda _: optimizer)
    one_by_one(weights, copies, optimizer, scale)


def metered(config, policy):
    return held_bytes(config, policy) | {"casts": memlab.measure(torch.ones).peak_bytes}


@pytest.mark.parametrize(
    ("exercise", "answer", "name"),
    [
        (HELD_BYTES, metered, "memlab.measure"),
        (ROUND, by_the_library, "memlab.rounding.stochastic_round_"),
        (MASTER_STEP, by_master_weights, "memlab.precision.MasterWeights"),
    ],
)
def test_the_librarys_version_is_refused(exercise, answer, name):
    verdict = judge(exercise, answer)
    assert verdict.status == WRONG
    assert f"calls {name}, which this exercise rebuilds" in verdict.text


@pytest.mark.parametrize(
    ("make", "name"),
    [
        (lambda: torch.amp.GradScaler("cpu", init_scale=8.0), "torch.amp.GradScaler"),
        (lambda: LossScaler(8.0), "memlab.precision.LossScaler"),
        (_unscale, "torch._amp_foreach_non_finite_check_and_unscale_"),
        (_update, "torch._amp_update_scale_"),
        (lambda: torch._foreach_div_([torch.ones(2)], 8.0), "torch._foreach_div_"),
        (lambda: torch._foreach_norm([torch.ones(2)]), "torch._foreach_norm"),
    ],
)
def test_a_scaler_of_torch_or_the_library_is_refused(make, name):
    class Wrapped(SCALER.reference):
        def __init__(self, scale, interval):
            super().__init__(scale, interval)
            self.inner = make()

    verdict = judge(SCALER, Wrapped)
    assert verdict.status == WRONG
    assert name in verdict.text


# ------------------------------------------------------------------ compared with the meter


def step_by(config, policy):
    """The trace of a second step with this policy."""
    dtype = torch.float32 if policy in ("float32", "autocast") else torch.bfloat16
    model = GPT(config, dtype=dtype)
    masters = partial(MasterWeights, optimizer=adamw, gather_at_once=policy == "master32")
    optimizer = (masters if policy.startswith("master") else adamw)(model.parameters())
    tokens, targets = next(batches(source_bytes("64 KiB"), 2, 64, seed=0))

    def step():
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.bfloat16, enabled=policy == "autocast"):
            loss = model(tokens, targets)
        loss.backward()
        optimizer.step()

    step()
    return memlab.measure(step, model=model, optimizer=getattr(optimizer, "optimizer", optimizer))


def most_casts(trace):
    """The peak of the bytes of matrices cast to bfloat16 in forward."""
    kind = ("aten._to_copy.default", "bfloat16", 2, "forward")
    made = {e.storage for e in trace.events if (e.operator, e.dtype, len(e.shape), e.phase) == kind}
    return max(accumulate(e.bytes if e.storage in made else 0 for e in trace.events))


@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
@pytest.mark.parametrize("policy", POLICIES)
def test_the_formula_of_a_policy_matches_the_meter(policy, tied):
    config = replace(PRESETS["tiny"], tied=tied)
    trace = step_by(config, policy)
    last = max(n for n, event in enumerate(trace.events) if event.phase == "backward")
    held = memlab.Trace(trace.events[: last + 1]).at_end
    found = {kind: held[kind] for kind in ("parameters", "gradients", "optimizer_state")}
    assert found | {"casts": most_casts(trace)} == held_bytes(config, policy)
