"""Day 4's checks accept other right answers, and its formula matches the meter."""

from dataclasses import replace
from functools import partial
from itertools import accumulate

import pytest
import torch
from edited import each, verdict_on
from torch import nn

import memlab
from memlab.course import days
from memlab.course.checks.day04 import POLICIES, SCALER_CASES, held_bytes, scaler_steps
from memlab.course.exercises import OK, WRONG, judge
from memlab.data import batches, source_bytes
from memlab.model import GPT, PRESETS
from memlab.precision import LossScaler, MasterWeights
from memlab.rounding import stochastic_round_

HELD_BYTES, SCALER, ROUND, MASTER_STEP = days.day(4).exercises
adamw = partial(torch.optim.AdamW, foreach=False)


# ------------------------------------------------------------------ other right answers


class CountingDown:
    """Checks the largest element of each gradient, and counts down instead of up."""

    def __init__(self, scale, interval):
        self.scale, self.left, self.interval = torch.tensor(scale), interval, interval

    @property
    def fine_steps(self):
        return self.interval - self.left

    def train(self, optimizer, losses, max_norm):
        weights = [w for group in optimizer.param_groups for w in group["params"]]
        for weight in weights:
            weight.grad = None
        for loss in losses:
            (self.scale * loss).backward()
        weights = [weight for weight in weights if weight.grad is not None]
        largest = torch.stack([weight.grad.abs().max() for weight in weights]).max()
        if not torch.isfinite(largest):
            self.scale, self.left = self.scale * 0.5, self.interval
            return False
        for weight in weights:
            weight.grad = weight.grad / self.scale
        nn.utils.clip_grad_norm_(weights, max_norm)
        optimizer.step()
        self.left -= 1
        if self.left == 0:
            self.scale = (2 * self.scale).clamp(max=2.0**127)
            self.left = self.interval
        return True


def by_shifts(numbers, generator):
    """Draws random bits in place, and clears the lower half by two shifts."""
    bits = torch.empty(numbers.shape, dtype=torch.int32).random_(0, 2**16, generator=generator)
    bits += numbers.view(torch.int32)
    bits = bits.bitwise_right_shift_(16).bitwise_left_shift_(16).view(torch.float32)
    special = ~numbers.isfinite()
    bits[special] = numbers[special]
    return bits.to(torch.bfloat16)


def by_neighbours(numbers, generator):
    """Compares a uniform random number with the fraction of the way between both neighbours."""
    down = numbers.view(torch.int32) & ~0xFFFF
    below, above = down.view(torch.float32), (down + 65536).view(torch.float32)
    up = torch.rand(numbers.shape, generator=generator) < (numbers - below) / (above - below)
    return torch.where(numbers.isfinite(), torch.where(up, above, below), numbers).bfloat16()


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


@pytest.mark.parametrize(
    ("exercise", "answer"),
    [(SCALER, CountingDown), (ROUND, by_shifts), (ROUND, by_neighbours), (MASTER_STEP, one_by_one)],
    ids=lambda value: getattr(value, "__name__", getattr(value, "id", None)),
)
def test_another_right_answer_passes(exercise, answer):
    verdict = judge(exercise, answer)
    assert verdict.status == OK, verdict


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


ALL = "all(gradient.isfinite().all() for"
SAID = [
    (
        "4.1",
        "in the units of the formula",
        ("0 if config.tied else config.vocab_size * C", "0"),
        "That is 10 · C cast weights too many.",
    ),
    (
        "4.2",
        "in words",
        (ALL, ALL.replace(".isfinite().all()", ".sum().isfinite()")),
        "It moved no weight, though all gradients are finite; it returned False, not True; the "
        "scale is 0.5 times the right one",
    ),
    (
        "4.2",
        "by how much",
        ("gradient /= self.scale", "gradient /= 2 * self.scale"),
        "Its step has 0.5 times the right length.",
    ),
    ("4.3", "too seldom", ("(chance +", "(chance.mul(0.9).int() +"), "1.001 too seldom and"),
    (
        "4.3",
        "swapped chances",
        ("numbers.view(torch.int32))", "(numbers.view(torch.int32) ^ 0xFFFF))"),
        "the chances of the two neighbors are swapped.",
    ),
    (
        "4.4",
        "rounded twice",
        ("weight.copy_(copy)", "weight.copy_(copy.bfloat16())"),
        "gives weights that differ from the float32 copies rounded once, to torch.float16.",
    ),
]


@pytest.mark.parametrize("row", SAID, ids=lambda row: f"{row[0]} {row[1]}")
def test_a_message_says_how_the_answer_is_off(row, tmp_path):
    id_, _, edit, words = row
    assert words in verdict_on((id_, (edit,)), tmp_path).text


CLIP_ALL = "nn.utils.clip_grad_norm_(weights, max_norm)"
UNNAMED = [
    ("4.2", "any finite element", (ALL, ALL.replace(".all() for", ".any() for"))),
    ("4.2", "one group clipped", (CLIP_ALL, CLIP_ALL.replace("(weights", "(weights[:1]"))),
    ("4.4", "bfloat16 in between", ("weight.copy_(copy)", "weight.copy_(copy.bfloat16())")),
]


@each(UNNAMED)
def test_a_mistake_that_has_no_remark_gets_no_remark(edit, tmp_path):
    verdict = verdict_on(edit, tmp_path, named=True)
    assert verdict.status == WRONG
    assert not any(wrong.remark in verdict.text for wrong in verdict.exercise.wrong_answers)


# ------------------------------------------------------------------ edits of the solution

CLIP = "nn.utils.clip_grad_norm_(weights, max_norm)"
NORM = "norm = torch.stack([g.norm() for g in gradients]).norm()"
BY_HAND = "g.mul_(min(1.0, max_norm / norm))"
DRAW = "torch.randint(2**16, numbers.shape, generator=generator, dtype=torch.int32)"
HAS = "        if weight.grad is not None:\n"
ZEROS = "weight.grad = torch.zeros_like(weight)"
DOWN = "weight.copy_(copy)"
NUMBERS = "torch.where(numbers.isfinite(),"
SUBNORMAL = "torch.where(numbers.abs() >= torch.finfo(torch.float32).tiny,"

RESEED = "generator.manual_seed(generator.initial_seed())"

PAIRS = "zip(weights, copies, strict=True)"
IN_ORDER = "(c for group in optimizer.param_groups for c in group['params'])"

REFUSED = [
    (
        "4.2",
        "each gradient clipped alone",
        (CLIP, "[g.mul_(max_norm / max(g.norm(), max_norm)) for g in gradients]"),
    ),
    ("4.2", "clipped to half", (CLIP, "nn.utils.clip_grad_norm_(weights, max_norm / 2)")),
    (
        "4.2",
        "the sum checked",
        ("gradient.isfinite().all() for", "gradient.sum().isfinite() for"),
    ),
    ("4.2", "fine_steps on the class", ("self.fine_steps", "type(self).fine_steps")),
    ("4.2", "a floor for the scale", ("self.scale / 2, 0", "max(self.scale / 2, 1.0), 0")),
    ("4.2", "None for False", ("return False", "return")),
    ("4.2", "graphs retained", (".backward()", ".backward(retain_graph=True)")),
    ("4.2", "never grows", ("if self.fine_steps == self.interval:", "if False:")),
    ("4.3", "the seed set again", ("    chance =", f"    {RESEED}\n    chance =")),
    (
        "4.3",
        "draws from a copy of the generator",
        (DRAW, DRAW.replace("=generator", "=generator.clone_state()")),
    ),
    (
        "4.3",
        "no scalars",
        (DRAW, DRAW.replace("numbers.shape", "(len(numbers), *numbers.shape[1:])")),
    ),
    ("4.3", "rows share draws", (DRAW, DRAW.replace("numbers.shape", "numbers.shape[-1:]"))),
    (
        "4.3",
        "columns share draws",
        (DRAW, DRAW.replace("numbers.shape", "(*numbers.shape[:-1], 1)")),
    ),
    ("4.3", "subnormal values to nearest", (NUMBERS, SUBNORMAL)),
    (
        "4.4",
        "zeros for a missing gradient",
        (HAS, f"        if weight.grad is None:\n            {ZEROS}\n        if True:\n"),
    ),
    ("4.4", "the difference rounded", (DOWN, "weight += (copy - weight).to(weight.dtype)")),
    (
        "4.4",
        "1 / scale in float16",
        (
            "weight.grad.float() / scale",
            "weight.grad.float() * (weight.grad.new_tensor(1 / scale))",
        ),
    ),
    ("4.4", "divided twice", ("/ scale", "/ scale / scale")),
    ("4.4", "the copies in the optimizer's order", (PAIRS, PAIRS.replace("copies", IN_ORDER))),
]
ACCEPTED = [
    (
        "4.2",
        "a boolean per element",
        (
            "        if not all(gradient.isfinite().all() for gradient in gradients):",
            "        noted = [gradient.isfinite() for gradient in gradients]\n"
            "        if not all(fine.all() for fine in noted):",
        ),
    ),
    ("4.4", "a tensor as scale", ("/ scale", "/ torch.tensor(scale)")),
    (
        "4.2",
        "clipped by hand",
        (CLIP, f"{NORM}\n        for g in gradients:\n            {BY_HAND}"),
    ),
    (
        "4.2",
        "clipped by hand, with 1e-6",
        (CLIP, f"{NORM} + 1e-6\n        for g in gradients:\n            {BY_HAND}"),
    ),
]


@each(REFUSED)
def test_a_wrong_answer_is_refused(edit, tmp_path):
    assert verdict_on(edit, tmp_path).status == WRONG


@each(ACCEPTED)
def test_a_right_answer_is_accepted(edit, tmp_path):
    verdict = verdict_on(edit, tmp_path)
    assert verdict.status == OK, verdict


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
