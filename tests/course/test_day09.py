"""Day 9's checks let right answers of another make pass, and what the lesson says is so."""

from itertools import pairwise

import pytest
import torch
from edited import each, verdict_on
from torch import nn

from memlab import optim, quantize
from memlab.course import bill, days
from memlab.course.bill import SETTING
from memlab.course.checks import day09
from memlab.course.checks.day09 import ByNearest, longest_step
from memlab.course.exercises import OK, WRONG, judge
from memlab.dry_runs import dry_run
from memlab.metering import measure
from memlab.model import GPT, PRESETS
from memlab.reference.adam8bit import Adam8bit, decode, dynamic_code, encode, encode_positive

CODE, ENCODE, ADAM, RULE = days.day(9).exercises


# ------------------------------------------------------------------ right in another way


def by_lists(signed):
    """Number by number, without torch's sort."""
    numbers = [0.0, 1.0]
    for i in range(7):
        edges = torch.linspace(0.1, 1.0, 2 ** (i if signed else i + 1) + 1)
        power = torch.tensor(10.0 ** (i - 6))
        for low, high in pairwise(edges):
            middle = ((low + high) / 2 * power).item()
            numbers += [middle, -middle] if signed else [middle]
    return torch.tensor(sorted(numbers))


def block_by_block(x, code):
    """A loop, and all distances of one block at a time."""
    codes, scales = [], []
    for block in x.reshape(-1).split(256):
        scale = block.abs().max()
        fractions = block / scale if scale else block
        codes.append((fractions[:, None] - code).abs().argmin(1).to(torch.uint8))
        scales.append(scale)
    return torch.cat(codes), torch.stack(scales)


def by_neighbours(x, code):
    """The one above and the one below, the nearer of the two; zeros divided by a tiny number."""
    n = x.numel()
    blocks = torch.cat([x.flatten(), x.new_zeros(-n % 256)]).view(-1, 256)
    scales = blocks.abs().max(dim=1).values
    fractions = blocks / scales.clamp(min=1e-45)[:, None]
    above = torch.searchsorted(code, fractions).clamp(1, 255)
    below = above - 1
    nearer = fractions - code[below] < code[above] - fractions
    return torch.where(nearer, below, above).to(torch.uint8).view(-1)[:n].clone(), scales


class InPlace(Adam8bit):
    """Moments stepped in place, codes copied into the old ones, a tensor for the count."""

    def step_weight(self, weight, gradient, state, group):
        if not state:
            state["step"] = torch.zeros(())
            self.begin(state, gradient)
        state["step"] += 1
        is_small = "v" in state
        m, v = (state["m"], state["v"]) if is_small else self.decoded(state)
        beta1, beta2 = group["betas"]
        m.lerp_(gradient, 1 - beta1)
        v.mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)
        c1, c2 = (1 - beta ** state["step"].item() for beta in (beta1, beta2))
        root = v.sqrt().div_(c2**0.5).add_(group["eps"])
        weight.addcdiv_(m.view_as(weight), root.view_as(weight), value=-group["lr"] / c1)
        if not is_small:
            new = (*encode(m, self.codes[0]), *self.encode_v(v, self.codes[1]))
            for kept, one in zip(state["kept"], new, strict=True):
                kept.copy_(one)

    def begin(self, state, gradient):
        n = len(gradient)
        if n < 4096:
            state["m"], state["v"] = torch.zeros(n), torch.zeros(n)
            return
        m, v = torch.full((n,), 127, dtype=torch.uint8), torch.zeros(n, dtype=torch.uint8)
        state["kept"] = [m, torch.zeros(-(-n // 256)), v, torch.zeros(-(-n // 256))]

    def decoded(self, state):
        m, m_scales, v, v_scales = state["kept"]
        return decode(m, m_scales, self.codes[0]), decode(v, v_scales, self.codes[1])


class SmallOnesAsTheyAre(Adam8bit):
    """Encoding and decoding behind two functions of one name."""

    def step_weight(self, weight, gradient, state, group):
        def is_large():
            return gradient.numel() > 4095

        b1, b2 = group["betas"]
        t = state.setdefault("t", 0) + 1
        old = state.get("moments", (torch.zeros_like(gradient),) * 2)
        if t > 1 and is_large():
            old = [decode(*kept, code) for kept, code in zip(old, self.codes, strict=True)]
        m = old[0] * b1 + gradient * (1 - b1)
        v = old[1] * b2 + gradient.square() * (1 - b2)
        change = m / (1 - b1**t) / (torch.sqrt(v / (1 - b2**t)) + group["eps"])
        weight.sub_(change.reshape(weight.shape), alpha=group["lr"])
        moments = (encode(m, self.codes[0]), self.encode_v(v, self.codes[1])) if is_large() else 0
        state.update(t=t, moments=moments or (m, v))


def by_maximum(x, code):
    codes, scales = encode(x, code)
    return torch.maximum(codes, x.flatten().gt(0).to(torch.uint8)), scales


def by_where(x, code):
    codes, scales = block_by_block(x, code)
    return codes.where((codes > 0) | (x.view(-1) == 0), 1), scales


@pytest.mark.parametrize(
    ("exercise", "answer"),
    [
        (CODE, by_lists),
        (ENCODE, block_by_block),
        (ENCODE, by_neighbours),
        (ADAM, InPlace),
        (ADAM, SmallOnesAsTheyAre),
        (RULE, by_maximum),
        (RULE, by_where),
    ],
    ids=lambda value: getattr(value, "__name__", getattr(value, "id", None)),
)
def test_another_right_answer_passes(exercise, answer):
    verdict = judge(exercise, answer)
    assert verdict.status == OK, verdict


# ------------------------------------------------------------------ wrong in another way


def through_the_library(x, code):
    kept = quantize.quantize_blockwise(x, codebook=code)
    return kept.codes, kept.scales


@pytest.mark.parametrize(
    ("exercise", "answer"),
    [(CODE, quantize.dynamic_code), (ENCODE, through_the_library)],
    ids=["9.1", "9.2"],
)
def test_who_asks_the_library_is_told_so(exercise, answer):
    verdict = judge(exercise, answer)
    assert verdict.status == WRONG
    assert " uses memlab.quantize; wanted your own lines." in verdict.text


def test_who_asks_bitsandbytes_is_told_so():
    functional = pytest.importorskip("bitsandbytes.functional")
    verdict = judge(CODE, lambda signed: functional.create_dynamic_map(signed).clone())
    assert verdict.status == WRONG
    assert " uses bitsandbytes; wanted your own lines." in verdict.text


class HiddenInTheClass(Adam8bit):
    """Codes in the state, and float32 moments where a look at the state would not find them."""

    exact: dict = {}  # noqa: RUF012 - what the check is to find

    def step_weight(self, weight, gradient, state, group):
        b1, b2 = group["betas"]
        m, v, t = self.exact.get(id(weight), (0 * gradient, 0 * gradient, 0))
        m, v, t = b1 * m + (1 - b1) * gradient, b2 * v + (1 - b2) * gradient**2, t + 1
        self.exact[id(weight)] = m, v, t
        state["m"], state["v"] = encode(m, self.codes[0]), self.encode_v(v, self.codes[1])
        root = (v / (1 - b2**t)).sqrt() + group["eps"]
        weight -= group["lr"] * (m / (1 - b1**t) / root).view_as(weight)


def test_moments_of_float32_are_found_wherever_they_are():
    verdict = judge(ADAM, HiddenInTheClass)
    HiddenInTheClass.exact.clear()
    assert verdict.status == WRONG
    assert "51,360 bytes are left behind" in verdict.text  # 8 a number too many


class InPythonLists(HiddenInTheClass):
    """No tensor holds them at all."""

    def step_weight(self, weight, gradient, state, group):
        if "m" in state:
            state["m"], state["v"] = torch.tensor(state["m"]), torch.tensor(state["v"])
        else:
            state["m"], state["v"], state["step"] = 0 * gradient, 0 * gradient, 0
        b1, b2 = group["betas"]
        state["step"] += 1
        m, v = b1 * state["m"] + (1 - b1) * gradient, b2 * state["v"] + (1 - b2) * gradient**2
        root = (v / (1 - b2 ** state["step"])).sqrt() + group["eps"]
        weight -= group["lr"] * (m / (1 - b1 ** state["step"]) / root).view_as(weight)
        state["m"], state["v"] = m.tolist(), v.tolist()


def test_moments_in_lists_are_counted():
    verdict = judge(ADAM, InPythonLists)
    assert verdict.status == WRONG
    assert "has 10,244 numbers in its state that are in no tensor" in verdict.text


def beside_the_codes(hide):
    """Right in all it does, and what `hide` makes of the moments is in its state as well."""

    class Hiding(Adam8bit):
        def step_weight(self, weight, gradient, state, group):
            hidden = state.pop("hidden", None)
            super().step_weight(weight, gradient, state, group)
            state["hidden"] = hidden or hide(gradient.clone())

    return Hiding


class Box:
    def __init__(self, held):
        self.held = held


def with_an_attribute(x):
    codes = torch.zeros(4)
    codes.exact = x.numpy().copy()
    return codes


@pytest.mark.parametrize(
    ("hide", "found"),
    [
        (lambda x: [x.numpy().copy()], "has a ndarray in its state"),
        (lambda x: {"a": x.numpy().tobytes()}, "has a bytes in its state"),
        (lambda x: int.from_bytes(x.numpy().tobytes()), "has a int in its state"),
        (lambda x: Box(x.numpy().copy()), "has a ndarray in its state"),
        (lambda x: lambda: x.numpy(), "has a function in its state"),
        (lambda x: [with_an_attribute(x)], "has a ndarray in its state"),
        (lambda x: [torch.from_numpy(x.numpy().copy())], "bytes are left behind"),
    ],
    ids=["array", "bytes", "integer", "object", "closure", "attribute", "from_numpy"],
)
def test_moments_that_are_no_tensors_are_found_in_the_state(hide, found):
    verdict = judge(ADAM, beside_the_codes(hide))
    assert verdict.status == WRONG
    assert found in verdict.text


def test_plain_numbers_and_objects_of_codes_may_be_in_the_state():
    assert judge(ADAM, beside_the_codes(lambda x: Box(("a", 1, 2.5, None)))).status == OK


class NewData(Adam8bit):
    def step_weight(self, weight, gradient, state, group):
        before = weight.data
        weight.data = before.clone()
        super().step_weight(weight, gradient, state, group)


def test_a_weight_that_gets_a_new_storage_is_told_to_step_in_place():
    assert "step it in place, weight -= …." in judge(ADAM, NewData).text


@pytest.mark.parametrize("nowhere", [255, 0])
def test_a_block_of_zeros_gets_the_code_of_zero(nowhere):
    """Its scale is 0, so that any code comes back as 0; the rule of 9.4 reads codes."""

    def answer(x, code):
        codes, scales = encode(x, code)
        codes[(scales == 0).repeat_interleave(256)[: len(codes)]] = nowhere
        return codes, scales

    verdict = judge(ENCODE, answer)
    assert verdict.status == WRONG
    assert f"256 zeros get another code than 127, that of zero, the first of them {nowhere}." in (
        verdict.text
    )


def test_codes_that_are_a_view_of_something_larger_are_told_so():
    def answer(x, code):
        codes, scales = encode(x, code)
        wide = torch.cat([codes, codes.new_zeros(3 * len(codes) + 1024)])
        return wide[: len(codes)], scales

    assert "gave tensors that hold on to" in judge(ENCODE, answer).text


def test_an_encoder_that_writes_into_its_input_is_told_so():
    def answer(x, code):
        given = encode(x, code)
        x.zero_()
        return given

    assert "changed the numbers that it was given" in judge(ENCODE, answer).text


T, LR = 'state.get("step", 0) + 1', 'lr, (beta1, beta2), eps = group["lr"]'
STEP = "weight -= lr * (m / (1 - beta1**t) / root).view_as(weight)"
ZERO, FILLED = "scales.where(scales > 0, 1)", "scales = blocks.abs().amax(1)"
ENCODED = ".to(torch.uint8)\n"
LIFTED = "(x.flatten() > 0) & (codes == 0)"
FRACTIONS = "x.flatten() / scales.repeat_interleave(256)[: x.numel()]"

REFUSED = [
    (
        "9.2",
        "zeros are 127 by either code",
        (ENCODED, ".where(scales.view(-1, 1) > 0, 127).byte()\n"),
    ),
    ("9.2", "scales of zeros are 1", (FILLED, f"{FILLED}\n    scales = {ZERO}")),
    ("9.2", "scales of 1e-30 and more", (FILLED, f"{FILLED}.clamp(1e-30)")),
    ("9.2", "divided by 1e-30 and more", (ZERO, "scales.clamp(1e-30)")),
    ("9.2", "flat by view", ("x.flatten()", "x.view(-1)")),
    ("9.3", "one count for all weights", (T, "self.__dict__.get('count', 0) + 1; self.count = t")),
    ("9.3", "the default lr", (LR, 'lr, (beta1, beta2), eps = self.defaults["lr"]')),
    ("9.3", "the first group's betas", ('group["betas"]', 'self.param_groups[0]["betas"]')),
    ("9.3", "a copy where not contiguous", (STEP, STEP[:6] + ".flatten()" + STEP[6:-16])),
    ("9.4", "by a fraction that underflows", ("x.flatten() > 0", f"{FRACTIONS} > 0")),
]
ACCEPTED = [
    ("9.2", "divided by a tiny number", (ZERO, "scales.clamp(1e-45)")),
    ("9.3", "a tensor for the count", (T, 'state.get("step", torch.zeros(())) + 1')),
    ("9.3", "reshaped", (STEP, STEP.replace("view_as(weight)", "reshape(weight.shape)"))),
    ("9.4", "masked", (f"codes[{LIFTED}] = 1", f"codes.masked_fill_({LIFTED}, 1)")),
]


@each(REFUSED)
def test_what_is_wrong_is_refused(edit, tmp_path):
    assert verdict_on(edit, tmp_path).status == WRONG


@each(ACCEPTED)
def test_what_is_right_is_accepted(edit, tmp_path):
    verdict = verdict_on(edit, tmp_path)
    assert verdict.status == OK, verdict


# ------------------------------------------------------------------ held against the library


@pytest.mark.parametrize("signed", [True, False])
def test_the_lessons_code_is_the_librarys(signed):
    assert torch.equal(dynamic_code(signed), quantize.dynamic_code(signed))


def test_the_lessons_optimizer_goes_where_the_librarys_goes():
    """With the rule in both, on gradients of many sizes; 5143 numbers are no whole blocks."""

    class Safe(Adam8bit):
        encode_v = staticmethod(encode_positive)

    ends = []
    for make in (lambda w: Safe(w, lr=1e-3), lambda w: optim.Adam8bit(w, 1e-3, weight_decay=0)):
        random, weight = torch.Generator().manual_seed(0), nn.Parameter(torch.zeros(37, 139))
        size, optimizer = torch.randn(37, 139, generator=random).exp(), make([weight])
        for _ in range(20):
            weight.grad = size * torch.randn(37, 139, generator=random)
            optimizer.step()
        ends.append(weight.detach())
    off = (ends[0] - ends[1]).abs() > 1e-6  # a thousandth of lr
    assert off.float().mean() < 0.01


def test_nearest_codes_explode_and_the_rule_keeps_every_step_short():
    assert longest_step(encode) > 1000
    assert longest_step(encode_positive) <= day09.BOUND


def test_torchaos_nearest_codes_step_as_far_as_the_lessons():
    """That the explosion is no fault of the lesson's own optimizer."""
    torchao = pytest.importorskip("torchao.optim")
    longest = []
    with torch.compiler.set_stance("force_eager"):
        for make in (torchao.Adam8bit, ByNearest):
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


def test_bitsandbytes_zero_is_none_on_a_cpu_and_the_lessons_is():
    bitsandbytes = pytest.importorskip("bitsandbytes.optim")

    class Safe(Adam8bit):
        encode_v = staticmethod(encode_positive)

    strayed = {}
    for make in (bitsandbytes.Adam8bit, Safe):
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
    assert strayed[bitsandbytes.Adam8bit][1] == 0  # where a whole block has no gradients
    assert strayed[Safe] == (0, 0)


# ------------------------------------------------------------------ what the lesson says


def formula(sizes, moments, tables):
    """The lesson's."""
    one = (n + 4 * -(-n // 256) if n >= 4096 else 4 * n for n in sizes)
    return moments * sum(one) + 1024 * tables


@pytest.mark.slow
def test_a_whole_7b_models_state_is_what_blocks_and_formula_say():
    with dry_run():
        model = GPT(PRESETS["llama-2-7b"], dtype=torch.bfloat16)
        for weight in model.parameters():
            weight.grad = torch.zeros_like(weight)
        optimizer = optim.Adam8bit(model.parameters())
        trace = measure(optimizer.step, model=model, optimizer=optimizer)
    sizes = [weight.numel() for weight in model.parameters()]
    assert trace.at_end["optimizer_state"] == formula(sizes, 2, 2) == 13_687_408_768


def test_the_bills_momentum_takes_a_byte_a_weight_and_adam_would_take_two():
    """What is more than the formula's: a table of 2¹⁶ bytes, and its like, to look codes up."""
    today = bill.stored(day09.DAY.bill)
    with dry_run():
        sizes = [weight.numel() for weight in GPT(PRESETS[SETTING.model]).parameters()]
    lion, adam = (formula(sizes, n, n) for n in (1, 2))
    beyond = today.at_peak["optimizer_state"] - lion
    assert 0 <= beyond < 2**17
    assert f"{(adam - lion) / 2**30:.2f}" == "0.12"
