"""Day 4: what its checks tell a learner, and what the lesson claims."""

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

HELD_BYTES, SCALER, ROUND, MASTER_STEP = days.day(4).exercises
adamw = partial(torch.optim.AdamW, foreach=False)


# ------------------------------------------------------------------ answers


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


@pytest.mark.few(1)
@pytest.mark.parametrize("width", [2**-13, 2**-8])
def test_narrow_noise_is_not_called_round_to_nearest(width):
    def narrow(numbers, generator):
        return (numbers + width * (torch.rand(numbers.shape, generator=generator) - 0.5)).bfloat16()

    verdict = judge(ROUND, narrow)
    assert verdict.status == WRONG
    assert "Wanted both ways for every value" in verdict.text
    assert "nearest" not in verdict.text


def _unscale():
    numbers = [torch.ones(2)], torch.zeros(1), torch.ones(1)
    torch._amp_foreach_non_finite_check_and_unscale_(*numbers)


def _update():
    counted = torch.zeros(1, dtype=torch.int32)
    torch._amp_update_scale_(torch.ones(1), counted, torch.zeros(1), 2.0, 0.5, 3)


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


@pytest.mark.few(3)
@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
@pytest.mark.parametrize("policy", POLICIES)
def test_the_formula_of_a_policy_matches_the_meter(policy, tied):
    config = replace(PRESETS["tiny"], tied=tied)
    trace = step_by(config, policy)
    last = max(n for n, event in enumerate(trace.events) if event.phase == "backward")
    held = memlab.Trace(trace.events[: last + 1]).at_end
    found = {kind: held[kind] for kind in ("parameters", "gradients", "optimizer_state")}
    assert found | {"casts": most_casts(trace)} == held_bytes(config, policy)
