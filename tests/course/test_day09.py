"""Day 9: what its checks tell a learner, and what the lesson claims."""

import pytest
import torch
from torch import nn

from memlab import optim, quantize
from memlab.course import bill, days
from memlab.course.bill import SETTING
from memlab.course.checks import day09
from memlab.course.checks.day09 import NearestCodeAdam, longest_step
from memlab.course.exercises import OK, WRONG, judge
from memlab.dry_runs import dry_run
from memlab.metering import measure
from memlab.model import GPT, PRESETS
from memlab.reference.adam8bit import Adam8bit, dynamic_code, encode, encode_positive

CODE, ENCODE, ADAM, RULE = days.day(9).exercises


# ------------------------------------------------------------------ answers


def test_calling_bitsandbytes_is_refused():
    functional = pytest.importorskip("bitsandbytes.functional")
    verdict = judge(CODE, lambda signed: functional.create_dynamic_map(signed).clone())
    assert verdict.status == WRONG
    assert "Your answer calls bitsandbytes.functional.create_dynamic_map" in verdict.text


class HiddenInTheClass(Adam8bit):
    """Keeps codes in the state, and float32 moments in a class attribute."""

    exact: dict = {}  # noqa: RUF012 - the hidden moments

    def step_weight(self, weight, gradient, state, group):
        b1, b2 = group["betas"]
        m, v, t = self.exact.get(id(weight), (0 * gradient, 0 * gradient, 0))
        m, v, t = b1 * m + (1 - b1) * gradient, b2 * v + (1 - b2) * gradient**2, t + 1
        self.exact[id(weight)] = m, v, t
        state["m"], state["v"] = encode(m, self.codebooks[0]), self.encode_v(v, self.codebooks[1])
        root = (v / (1 - b2**t)).sqrt() + group["eps"]
        weight -= group["lr"] * (m / (1 - b1**t) / root).view_as(weight)


def test_float32_moments_outside_of_the_state_are_found():
    verdict = judge(ADAM, HiddenInTheClass)
    HiddenInTheClass.exact.clear()
    assert verdict.status == WRONG
    assert "the state has 51,360 bytes" in verdict.text  # 8 per element too many


def beside_the_codes(hide):
    """A correct optimizer that also keeps hide(gradient) in its state."""

    class HidesInState(Adam8bit):
        def step_weight(self, weight, gradient, state, group):
            hidden = state.pop("hidden", None)
            super().step_weight(weight, gradient, state, group)
            state["hidden"] = hidden or hide(gradient.clone())

    return HidesInState


class AttributeHolder:
    def __init__(self, held):
        self.held = held


def with_an_attribute(x):
    codes = torch.zeros(4)
    codes.exact = x.numpy().copy()
    return codes


@pytest.mark.few(4)
@pytest.mark.parametrize(
    ("hide", "found"),
    [
        (lambda x: [x.numpy().copy()], "type ndarray in its state"),
        (lambda x: {"a": x.numpy().tobytes()}, "type bytes in its state"),
        (lambda x: int.from_bytes(x.numpy().tobytes()), "type int in its state"),
        (lambda x: AttributeHolder(x.numpy().copy()), "type ndarray in its state"),
        (lambda x: lambda: x.numpy(), "type function in its state"),
        (lambda x: [with_an_attribute(x)], "type ndarray in its state"),
        (lambda x: [torch.from_numpy(x.numpy().copy())], "the state has"),
    ],
    ids=["array", "bytes", "integer", "object", "closure", "attribute", "from_numpy"],
)
def test_moments_hidden_in_the_state_are_found(hide, found):
    verdict = judge(ADAM, beside_the_codes(hide))
    assert verdict.status == WRONG
    assert found in verdict.text


def test_plain_values_and_small_objects_may_be_in_the_state():
    assert (
        judge(ADAM, beside_the_codes(lambda x: AttributeHolder(("a", 1, 2.5, None)))).status == OK
    )


@pytest.mark.parametrize("wrong_code", [255, 0])
def test_a_block_of_zeros_must_get_the_code_of_zero(wrong_code):
    """Its scale is 0, so any code decodes to 0, but 9.4 reads the codes."""

    def answer(x, code):
        codes, scales = encode(x, code)
        codes[(scales == 0).repeat_interleave(256)[: len(codes)]] = wrong_code
        return codes, scales

    verdict = judge(ENCODE, answer)
    assert verdict.status == WRONG
    wanted = f"256 zeros should get code 127, but the first of them gets {wrong_code}."
    assert wanted in verdict.text


# ------------------------------------------------------------------ the library


@pytest.mark.parametrize("signed", [True, False])
def test_the_lessons_codebook_is_the_librarys(signed):
    assert torch.equal(dynamic_code(signed), quantize.dynamic_code(signed))


def test_the_lessons_optimizer_matches_the_librarys():
    """With the rule in both, on gradients of many sizes. The last block of 5,143 elements is
    short."""
    ends = []
    for make in (lambda w: Adam8bit(w, lr=1e-3), lambda w: optim.Adam8bit(w, 1e-3, weight_decay=0)):
        random, weight = torch.Generator().manual_seed(0), nn.Parameter(torch.zeros(37, 139))
        size, optimizer = torch.randn(37, 139, generator=random).exp(), make([weight])
        for _ in range(20):
            weight.grad = size * torch.randn(37, 139, generator=random)
            optimizer.step()
        ends.append(weight.detach())
    off = (ends[0] - ends[1]).abs() > 1e-6  # a thousandth of lr
    assert off.float().mean() < 0.01


def test_steps_explode_with_nearest_codes_and_stay_short_with_the_rule():
    assert longest_step(encode) > 1000
    assert longest_step(encode_positive) <= day09.BOUND


def test_torchaos_steps_explode_as_the_lessons_do():
    """The explosion is not a bug of the lesson's optimizer."""
    torchao = pytest.importorskip("torchao.optim")
    longest = []
    with torch.compiler.set_stance("force_eager"):
        for make in (torchao.Adam8bit, NearestCodeAdam):
            random, weight = torch.Generator().manual_seed(0), nn.Parameter(torch.zeros(4096))
            size, optimizer = (2 * torch.randn(4096, generator=random)).exp(), make([weight], 1e-3)
            steps = []
            for _ in range(30):
                before = weight.detach().clone()
                weight.grad = size * torch.randn(4096, generator=random)
                optimizer.step()
                steps.append((weight.detach() - before).abs().max().item() / 1e-3)
            longest.append(max(steps))
    assert longest[0] > 100
    assert longest[1] == pytest.approx(longest[0], rel=0.05)


def test_idle_weights_move_in_bitsandbytes_on_a_cpu_and_not_in_the_lesson():
    bitsandbytes = pytest.importorskip("bitsandbytes.optim")
    strayed = {}
    for make in (bitsandbytes.Adam8bit, Adam8bit):
        random, weight = torch.Generator().manual_seed(0), nn.Parameter(torch.zeros(4096))
        lives = torch.zeros(4096)
        lives[:256:2] = 1
        optimizer = make([weight], lr=1e-3)
        for _ in range(300):
            weight.grad = lives * torch.randn(4096, generator=random)
            optimizer.step()
        idle = weight.detach()
        strayed[make] = idle[1:256:2].abs().max().item(), idle[256:].abs().max().item()
    assert strayed[bitsandbytes.Adam8bit][0] > 1e-4
    assert strayed[bitsandbytes.Adam8bit][1] == 0  # a whole block without gradients
    assert strayed[Adam8bit] == (0, 0)


# ------------------------------------------------------------------ the lesson's claims


def formula(sizes, moments, tables):
    """The lesson's formula."""
    one = (n + 4 * -(-n // 256) if n >= 4096 else 4 * n for n in sizes)
    return moments * sum(one) + 1024 * tables


@pytest.mark.slow
def test_the_state_of_a_7b_model_matches_the_formula():
    with dry_run():
        model = GPT(PRESETS["llama-2-7b"], dtype=torch.bfloat16)
        for weight in model.parameters():
            weight.grad = torch.zeros_like(weight)
        optimizer = optim.Adam8bit(model.parameters())
        trace = measure(optimizer.step, model=model, optimizer=optimizer)
    sizes = [weight.numel() for weight in model.parameters()]
    assert trace.at_end["optimizer_state"] == formula(sizes, 2, 2) == 13_687_408_768


def test_the_bills_momentum_is_a_byte_per_weight_and_adams_state_would_be_two():
    """Look-up tables of 2¹⁶ bytes come on top of the formula."""
    today = bill.stored(day09.DAY.bill)
    with dry_run():
        sizes = [weight.numel() for weight in GPT(PRESETS[SETTING.model]).parameters()]
    lion, adam = (formula(sizes, n, n) for n in (1, 2))
    beyond = today.at_peak["optimizer_state"] - lion
    assert 0 <= beyond < 2**17
    assert f"{(adam - lion) / 2**30:.2f}" == "0.12"
