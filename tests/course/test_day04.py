"""Day 4's checks let right answers of another make pass, and its formulas are the meter's."""

from dataclasses import replace
from functools import partial
from itertools import accumulate

import pytest
import torch
from edited import each, verdict_on
from torch import nn

import memlab
from memlab.course import days
from memlab.course.checks.day04 import POLICIES, held_bytes
from memlab.course.exercises import OK, WRONG, judge
from memlab.data import batches, source_bytes
from memlab.model import GPT, PRESETS
from memlab.precision import LossScaler, MasterWeights
from memlab.rounding import stochastic_round_

HELD_BYTES, SCALER, ROUND, MASTER_STEP = days.day(4).exercises
adamw = partial(torch.optim.AdamW, foreach=False)


# ------------------------------------------------------------------ right in another way


class ByNorms:
    """A norm is finite only if all numbers are; new gradients in place of the old, one by one."""

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
            grown = 2 * self.scale
            self.scale = grown if torch.isfinite(grown) else self.scale
            self.left = self.interval
        return True


def by_shifts(numbers, generator):
    """Random bits drawn in place, and the lower half shifted out and in again."""
    bits = torch.empty(numbers.shape, dtype=torch.int32).random_(0, 2**16, generator=generator)
    bits += numbers.view(torch.int32)
    bits = bits.bitwise_right_shift_(16).bitwise_left_shift_(16).view(torch.float32)
    special = ~numbers.isfinite()
    bits[special] = numbers[special]
    return bits.to(torch.bfloat16)


def by_fraction(numbers, generator):
    """Up with a probability equal to the fraction of the way, as the lesson says it."""
    bits = numbers.view(torch.int32)
    fraction = (bits & 0xFFFF) / 2**16
    up = torch.rand(numbers.shape, generator=generator) < fraction
    rounded = ((bits & ~0xFFFF) + 65536 * up.int()).view(torch.float32)
    return torch.where(numbers.isfinite(), rounded, numbers).bfloat16()


def by_neighbours(numbers, generator):
    """In numbers, not in bits: both neighbours, and how far it is from the one to the other."""
    down = numbers.view(torch.int32) & ~0xFFFF
    below, above = down.view(torch.float32), (down + 65536).view(torch.float32)
    up = torch.rand(numbers.shape, generator=generator) < (numbers - below) / (above - below)
    return torch.where(numbers.isfinite(), torch.where(up, above, below), numbers).bfloat16()


def one_by_one(weights, copies, optimizer, scale):
    """A multiplication in place of the division, and .data in place of no_grad."""
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
    [
        (SCALER, ByNorms),
        (ROUND, by_shifts),
        (ROUND, by_fraction),
        (ROUND, by_neighbours),
        (MASTER_STEP, one_by_one),
    ],
    ids=lambda value: getattr(value, "__name__", getattr(value, "id", None)),
)
def test_another_right_answer_passes(exercise, answer):
    verdict = judge(exercise, answer)
    assert verdict.status == OK, verdict


# ------------------------------------------------------------------ wrong in another way


def test_a_scaler_without_its_numbers_is_told_which_are_missing():
    class Nameless:
        def __init__(self, scale, interval):
            self._scale = scale

        def train(self, optimizer, losses, max_norm):
            return True

    verdict = judge(SCALER, Nameless)
    assert verdict.status == WRONG
    assert "without scale, fine_steps; wanted a Scaler." in verdict.text


@pytest.mark.parametrize("keep", [list, lambda losses: [torch.stack(list(losses)).sum()]])
def test_a_scaler_that_keeps_the_graphs_is_told_however_it_does(keep):
    class Keeping(SCALER.reference):
        def train(self, optimizer, losses, max_norm):
            return super().train(optimizer, keep(losses), max_norm)

    verdict = judge(SCALER, Keeping)
    assert verdict.status == WRONG
    assert "All micro-batches' graphs are alive at once" in verdict.text


@pytest.mark.parametrize("width", [2**-13, 2**-10, 2**-9, 2**-8])
def test_noise_that_is_too_narrow_is_not_called_rounding_to_the_nearest(width):
    def narrow(numbers, generator):
        return (numbers + width * (torch.rand(numbers.shape, generator=generator) - 0.5)).bfloat16()

    verdict = judge(ROUND, narrow)
    assert verdict.status == WRONG
    assert "wanted chance for each, over the whole step" in verdict.text
    assert "nearest" not in verdict.text


def test_rounding_that_keeps_all_it_makes_is_told_what_to_do():
    def hoarding(numbers, generator):
        copies = [numbers.clone() for _ in range(4)]
        return by_shifts(copies[0], generator)

    verdict = judge(ROUND, hoarding)
    assert verdict.status == WRONG
    assert "wanted at most 24: let tensors go" in verdict.text


def test_rounding_at_random_now_and_then_is_not_enough():
    def by_seed(numbers, generator):
        nearest = generator.initial_seed() % 2
        return numbers.bfloat16() if nearest else by_shifts(numbers, generator)

    verdict = judge(ROUND, by_seed)
    assert verdict.status == WRONG
    assert "away from zero" in verdict.text


# ------------------------------------------------------------------ what is said of a mistake


ALL = "all(gradient.isfinite().all() for"
SAID = [
    (
        "4.1",
        "in what the formula has",
        ("0 if config.tied else config.vocab_size * C", "0"),
        "That is 10 · C casts too many.",
    ),
    (
        "4.2",
        "in words",
        (ALL, ALL.replace(".isfinite().all()", ".sum().isfinite()")),
        "It moved no weight, though the gradients of its losses are finite; it returned False, not "
        "True; the scale is 0.5 times as large",
    ),
    (
        "4.2",
        "by how much",
        ("gradient /= self.scale", "gradient /= 2 * self.scale"),
        "Its step is 0.5 times as long.",
    ),
    ("4.3", "which way", ("(chance +", "(chance.mul(0.9).int() +"), "1.001 too seldom and"),
    (
        "4.3",
        "where the ways are exchanged",
        ("numbers.view(torch.int32))", "(numbers.view(torch.int32) ^ 0xFFFF))"),
        "with the chance of the way to the other neighbour.",
    ),
    (
        "4.4",
        "what is written",
        ("weight.copy_(copy)", "weight.copy_(copy.bfloat16())"),
        "leaves other weights than its float32 copies rounded once, to torch.float16.",
    ),
]


@pytest.mark.parametrize("row", SAID, ids=lambda row: f"{row[0]} {row[1]}")
def test_a_message_says_what_is_off_and_which_way(row, tmp_path):
    id_, _, edit, words = row
    assert words in verdict_on((id_, (edit,)), tmp_path).text


CLIP_ALL = "nn.utils.clip_grad_norm_(weights, max_norm)"
UNNAMED = [
    ("4.2", "one number will do", (ALL, ALL.replace(".all() for", ".any() for"))),
    ("4.2", "one group clipped", (CLIP_ALL, CLIP_ALL.replace("(weights", "(weights[:1]"))),
    ("4.4", "bfloat16 between", ("weight.copy_(copy)", "weight.copy_(copy.bfloat16())")),
]


@each(UNNAMED)
def test_a_mistake_that_is_not_among_the_named_ones_is_given_no_name(edit, tmp_path):
    verdict = verdict_on(edit, tmp_path, named=True)
    assert verdict.status == WRONG
    assert not any(wrong.remark in verdict.text for wrong in verdict.exercise.wrong_answers)


# ------------------------------------------------------------------ wrong and right by an edit

CLIP = "nn.utils.clip_grad_norm_(weights, max_norm)"
NORM = "norm = torch.stack([g.norm() for g in gradients]).norm()"
BY_HAND = "g.mul_(min(1.0, max_norm / norm))"
DRAW = "torch.randint(2**16, numbers.shape, generator=generator, dtype=torch.int32)"
HAS = "        if weight.grad is not None:\n"
ZEROS = "weight.grad = torch.zeros_like(weight)"
DOWN = "weight.copy_(copy)"

RESEED = "generator.manual_seed(generator.initial_seed())"

REFUSED = [
    (
        "4.2",
        "the wrong norm",
        (CLIP, "[g.mul_(max_norm / max(g.norm(), max_norm)) for g in gradients]"),
    ),
    ("4.2", "clipped to half", (CLIP, "nn.utils.clip_grad_norm_(weights, max_norm / 2)")),
    (
        "4.2",
        "finite by the sum",
        ("gradient.isfinite().all() for", "gradient.sum().isfinite() for"),
    ),
    ("4.2", "one count for all", ("self.fine_steps", "type(self).fine_steps")),
    ("4.2", "None for False", ("return False", "return")),
    ("4.2", "never grows", ("if self.fine_steps == self.interval:", "if False:")),
    ("4.3", "a seed set anew", ("    chance =", f"    {RESEED}\n    chance =")),
    ("4.3", "draws of a copy", (DRAW, DRAW.replace("=generator", "=generator.clone_state()"))),
    (
        "4.3",
        "of two dimensions at least",
        (DRAW, DRAW.replace("numbers.shape", "(len(numbers), *numbers.shape[1:])")),
    ),
    ("4.3", "rows share draws", (DRAW, DRAW.replace("numbers.shape", "numbers.shape[-1:]"))),
    (
        "4.3",
        "columns share draws",
        (DRAW, DRAW.replace("numbers.shape", "(*numbers.shape[:-1], 1)")),
    ),
    (
        "4.3",
        "nan is lost",
        (
            "torch.where(numbers.isfinite(), bits.view(torch.float32), numbers)",
            "bits.view(torch.float32)",
        ),
    ),
    (
        "4.4",
        "none is zeros",
        (
            HAS,
            f"        if weight.grad is None:\n            {ZEROS}\n        if True:\n",
        ),
    ),
    ("4.4", "by bfloat16", (DOWN, "weight.copy_(copy.bfloat16())")),
    (
        "4.4",
        "times a float16",
        (
            "weight.grad.float() / scale",
            "weight.grad.float() * (weight.grad.new_tensor(1 / scale))",
        ),
    ),
    ("4.4", "divided twice", ("/ scale", "/ scale / scale")),
]
ACCEPTED = [
    (
        "4.2",
        "a byte noted for each number",
        (
            "        if not all(gradient.isfinite().all() for gradient in gradients):",
            "        noted = [gradient.isfinite() for gradient in gradients]\n"
            "        if not all(fine.all() for fine in noted):",
        ),
    ),
    ("4.4", "a scale that is a tensor", ("/ scale", "/ torch.tensor(scale)")),
    (
        "4.2",
        "a clip of one's own",
        (
            CLIP,
            f"{NORM}\n        for g in gradients:\n            {BY_HAND}",
        ),
    ),
    (
        "4.2",
        "and with 1e-6",
        (
            CLIP,
            f"{NORM} + 1e-6\n        for g in gradients:\n            {BY_HAND}",
        ),
    ),
]


@each(REFUSED)
def test_what_is_wrong_is_refused(edit, tmp_path):
    assert verdict_on(edit, tmp_path).status == WRONG


@each(ACCEPTED)
def test_what_is_right_is_accepted(edit, tmp_path):
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
def test_the_library_is_no_answer(exercise, answer, name):
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
def test_a_librarys_scaler_is_no_answer(make, name):
    class Wrapped(SCALER.reference):
        def __init__(self, scale, interval):
            super().__init__(scale, interval)
            self.inner = make()

    verdict = judge(SCALER, Wrapped)
    assert verdict.status == WRONG
    assert name in verdict.text


# ------------------------------------------------------------------ held against the meter


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
    """The most bytes of matrices cast to bfloat16 in forward that are alive at one moment."""
    kind = ("aten._to_copy.default", "bfloat16", 2, "forward")
    made = {e.storage for e in trace.events if (e.operator, e.dtype, len(e.shape), e.phase) == kind}
    return max(accumulate(e.bytes if e.storage in made else 0 for e in trace.events))


@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
@pytest.mark.parametrize("policy", POLICIES)
def test_the_bytes_of_a_policy_are_those_of_the_meter(policy, tied):
    config = replace(PRESETS["tiny"], tied=tied)
    trace = step_by(config, policy)
    last = max(n for n, event in enumerate(trace.events) if event.phase == "backward")
    held = memlab.Trace(trace.events[: last + 1]).at_end
    found = {kind: held[kind] for kind in ("parameters", "gradients", "optimizer_state")}
    assert found | {"casts": most_casts(trace)} == held_bytes(config, policy)
