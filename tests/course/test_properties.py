"""Properties that checks require: valid answers pass, and each violation has its message."""

import re
from dataclasses import replace
from functools import partial

import pytest
import torch
from close import is_close
from torch import Tensor, nn

from memlab.course import ledger
from memlab.course.cells import Unusable
from memlab.course.exercises import OK, WRONG, Exercise, Wrong, WrongAnswer, judge, require
from memlab.course.ownwork import is_rebuilt
from memlab.course.properties import (
    ADAM_SETTINGS,
    SIZES,
    Peaks,
    ReadOnce,
    as_little_memory,
    at_most_bytes,
    elements,
    gradients,
    has_keys,
    increasing,
    is_tensor,
    is_tuple,
    keep_no_more,
    limited,
    limited_outside_of_tensors,
    named_errors,
    new_bytes,
    no_tensor_above,
    parameters,
    peaks,
    returned_gradients,
    rounding,
    same_block_maxima,
    same_bytes,
    same_gradients,
    same_values,
    shares_no_storage,
    shares_storage,
    unchanged,
)
from memlab.metering import measure


def model_of_three() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 5), nn.Dropout(0.5), nn.BatchNorm1d(5)).train()


# ------------------------------------------------------------------ arguments stay unchanged


def in_place_and_back(x: Tensor) -> None:
    x += 1
    x -= 1


def replace_data(x: Tensor) -> None:
    x.data = x.data.clone()


TENSOR_CHANGES = {
    "add": (lambda x: x.add_(1), "f changes the values of x; wanted it as it was."),
    "sign of zero": (
        lambda x: x.masked_fill_(x == 0, -0.0),
        "f changes the values of x; wanted it as it was.",
    ),
    "back": (
        in_place_and_back,
        "f writes into x in place; wanted it as it was.",
    ),
    "new data": (
        replace_data,
        "f moves x to new memory; wanted it in place.",
    ),
    "other dtype": (
        lambda x: setattr(x, "data", x.double()),
        "f changes the dtype of x from torch.float32 to torch.float64; wanted it as it was.",
    ),
    "other shape": (
        lambda x: setattr(x, "data", x[:2]),
        "f changes the shape of x from [3] to [2]; wanted it as it was.",
    ),
    "requires_grad": (
        lambda x: x.requires_grad_(),
        "f changes requires_grad of x from False to True; wanted it as it was.",
    ),
    "grad": (
        lambda x: setattr(x, "grad", torch.ones_like(x)),
        "f changes the gradient of x; wanted it as it was.",
    ),
}


@pytest.mark.parametrize(("change", "text"), TENSOR_CHANGES.values(), ids=TENSOR_CHANGES)
def test_a_change_of_a_tensor_is_reported(change, text):
    x = torch.zeros(3)
    with pytest.raises(Wrong) as wrong, unchanged("f", x=x):
        change(x)
    assert str(wrong.value) == text


MODEL_CHANGES = {
    "mode": (lambda m: m.eval(), "model.training from True to False"),
    "mode of one": (lambda m: m[1].eval(), "model.1.training from True to False"),
    "hook left": (lambda m: m[0].register_forward_hook(print), "model.0._forward_hooks from"),
    "hook gone": (lambda m: m[2]._forward_pre_hooks.clear(), "model.2._forward_pre_hooks from"),
    "backward hook": (lambda m: m[0].register_full_backward_hook(print), "model.0._backward_hooks"),
    "state hook": (lambda m: m._register_state_dict_hook(print), "model._state_dict_hooks"),
    "weight hook": (lambda m: m[0].weight.register_hook(print), "model.0.weight._backward_hooks"),
    "frozen": (lambda m: m[0].requires_grad_(False), "requires_grad of model.0.weight"),
    "weight": (lambda m: nn.init.zeros_(m[0].weight), "the values of model.0.weight"),
    "other weight": (
        lambda m: setattr(m[0], "bias", nn.Parameter(torch.ones(5))),
        "which tensor model.0.bias is",
    ),
    "running mean": (lambda m: m(torch.ones(4, 3)), "the values of model.2.running_mean"),
    "attribute": (lambda m: setattr(m[1], "p", 0.0), "model.1.p from 0.5 to 0.0"),
    "forward": (lambda m: setattr(m[1], "forward", print), "adds which object model.1.forward is"),
    "part": (lambda m: m.append(nn.ReLU()), "the parts of model from ['0', '1', '2']"),
    "gradient": (
        lambda m: m.eval()(torch.ones(4, 3)).sum().backward() or m.train(),
        "the gradient of model.0.weight",
    ),
}


@pytest.mark.parametrize(("change", "text"), MODEL_CHANGES.values(), ids=MODEL_CHANGES)
def test_a_change_of_a_module_is_reported(change, text):
    model = model_of_three()
    model[2].register_forward_pre_hook(lambda *_: None)
    with pytest.raises(Wrong, match=re.escape(text)), unchanged("f", model=model):
        change(model)


def test_allowed_changes_pass():
    model, x = model_of_three(), torch.ones(4, 3)
    optimizer = torch.optim.Adam(model.parameters())
    may = {"values", "gradients", "state"}
    with unchanged("f", may_change=may, model=model, x=x, optimizer=optimizer):
        model(x).square().sum().backward()
        optimizer.step()


OTHER_CHANGES = {
    "list": (lambda a: a["rows"].pop(), "the length of a['rows'] from 2 to 1"),
    "item": (lambda a: a["rows"].__setitem__(0, [1]), "which object a['rows'][0] is"),
    "number": (lambda a: a.update(size=3), "a['size'] from 2 to 3"),
    "key": (lambda a: a.update(more=1), "the keys of a"),
    "generator": (
        lambda a: torch.rand(1, generator=a["generator"]),
        "the state of a['generator']",
    ),
    "group": (
        lambda a: a["optimizer"].param_groups[0].update(lr=3.0),
        "a['optimizer'].param_groups[0]['lr'] from 0.5 to 3.0",
    ),
    "optimizer hook": (
        lambda a: a["optimizer"].register_step_post_hook(print),
        "a['optimizer']._optimizer_step_post_hooks",
    ),
    "grad mode": (lambda a: torch.set_grad_enabled(False), "whether gradients are recorded"),
    "dtype": (lambda a: torch.set_default_dtype(torch.float64), "the default dtype"),
}


@pytest.mark.parametrize(("change", "text"), OTHER_CHANGES.values(), ids=OTHER_CHANGES)
def test_other_changes_are_reported(change, text):
    weight = nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([weight], lr=0.5)
    rows, generator = [[1], [2, 3]], torch.Generator()
    things = {"rows": rows, "size": 2, "generator": generator, "optimizer": optimizer}
    try:
        with pytest.raises(Wrong, match=re.escape(text)), unchanged("f", a=things):
            change(things)
    finally:
        torch.set_grad_enabled(True)
        torch.set_default_dtype(torch.float32)


def test_drawing_random_numbers_is_reported_on_request():
    with unchanged("f"):
        torch.rand(1)
    with pytest.raises(Wrong, match="torch's random state"), unchanged("f", rng=True):
        torch.rand(1)


# ------------------------------------------------------------------ iterables read once

PAIRS = [(torch.full((2,), i), torch.full((3,), i)) for i in range(5)]


def test_a_loop_briefly_holds_two_items_and_reads_all():
    rows = ReadOnce("f", PAIRS, alive_at_most=2)
    assert [int(a[0] + b[0]) for a, b in rows] == [0, 2, 4, 6, 8]
    rows.finished()
    assert (rows.most_alive, rows.taken) == (2, 5)


def read_all(rows):
    return list(rows)


def keep_a_view(rows):
    kept = [a[:1] for a, _ in rows]
    return kept


def read_twice(rows):
    for _ in rows:
        pass
    for _ in rows:
        pass


def read_some(rows):
    next(iter(rows))


@pytest.mark.parametrize(
    ("answer", "text"),
    [
        (read_all, "f has 3 items of rows in memory at once; wanted at most 2: read them as you"),
        (keep_a_view, "f has 3 items of rows in memory at once"),
        (read_twice, "f iterates over rows a second time; wanted one pass"),
        (read_some, "f read 1 of the 5 items of rows; wanted all of them."),
    ],
)
def test_violations_of_reading_once_are_reported(answer, text):
    rows = ReadOnce("f", PAIRS, alive_at_most=2, name="rows")

    def whole() -> None:
        answer(rows)
        rows.finished()

    with pytest.raises(Wrong, match=re.escape(text)):
        whole()


def test_an_answer_that_catches_the_error_fails_at_the_end():
    rows = ReadOnce("f", PAIRS, alive_at_most=2)
    with pytest.raises(Wrong):
        list(rows)
    with pytest.raises(Wrong, match="3 items of the iterable"):
        rows.finished()


# ------------------------------------------------------------------ gradients and values


def layer() -> nn.Linear:
    torch.manual_seed(0)
    return nn.Linear(3, 5)


@pytest.mark.parametrize(
    ("wrong", "text"),
    [
        (lambda own, x, y: own(x.detach()) * y, "f gives no gradient of x; wanted one."),
        (lambda own, x, y: own(x) * y.detach(), "f gives no gradient of y; wanted one."),
        (
            lambda own, x, y: (own(x) * y).detach(),
            "f gives no gradient of x (its result does not require grad); wanted one.",
        ),
        (lambda own, x, y: own(x) * y + 1, "f: the output 0: element (0, 0) is "),
        (
            lambda own, x, y: nn.functional.linear(x, own.weight.detach(), own.bias) * y,
            "f gives no gradient of weight; wanted one.",
        ),
    ],
)
def test_a_missing_or_wrong_gradient_is_reported(wrong, text):
    inputs = {"x": elements(7, 3), "y": elements(7, 5, seed=1)}
    own, reference = layer(), layer()
    wanted = gradients(lambda x, y: reference(x) * y, module=reference, **inputs)
    got = gradients(lambda x, y: own(x) * y, module=own, **inputs)
    same_gradients("f", got, wanted)
    assert list(wanted) == ["output 0", "x", "y", "weight", "bias"]
    with pytest.raises(Wrong, match=re.escape(text)):
        same_gradients("f", gradients(partial(wrong, own), module=own, **inputs), wanted)


@pytest.mark.parametrize(
    ("got", "text"),
    [
        (
            torch.tensor([1.0, 2.5]),
            r"^f: element 1 is 2\.5; wanted 2\. 1 of 2 elements are wrong\.$",
        ),
        (torch.tensor([1.0, torch.nan]), r"^f: element 1 is nan; wanted 2\."),
        (torch.tensor([1.0, 2.0]).double(), r"gave a tensor of dtype torch.float64; wanted torch."),
        (torch.tensor([[1.0, 2.0]]), r"gave a tensor of shape \(1, 2\); wanted \(2,\)"),
        (None, r"^f gave None; wanted a tensor\.$"),
        ([1.0, 2.0], r"f gave a list; wanted a tensor"),
    ],
)
def test_a_different_value_is_reported(got, text):
    wanted = torch.tensor([1.0, 2.0])
    assert same_values("f", torch.tensor([1.0, 2.05]), wanted, within=0.05) > 0
    with pytest.raises(Wrong, match=text):
        same_values("f", got, wanted, within=0.05)


# ------------------------------------------------------------------ bytes and storage

UNITS = {"numbers a token": 24, "numbers in all": 4}


@pytest.mark.parametrize(
    ("got", "text"),
    [
        (96, "f gave 96, wanted 48 bytes. That is 2 numbers a token too many."),
        (24, "f gave 24, wanted 48 bytes. That is 1 number a token too few."),
        (52, "f gave 52, wanted 48 bytes. That is 1 number in all too many."),
        (50, "f gave 50, wanted 48 bytes. That is 2 bytes too many."),
        (48.0, "f gave 48.0, a float; wanted 48 bytes, an integer."),
        (None, "f gave nothing; wanted 48 bytes. Is there a return?"),
    ],
)
def test_a_wrong_byte_count_is_reported_in_a_unit_that_divides_the_difference(got, text):
    with pytest.raises(Wrong) as wrong:
        same_bytes("f", got, 48, UNITS)
    assert str(wrong.value) == text


def test_the_peak_of_each_pass_excludes_the_arguments():
    x = torch.ones(1000, requires_grad=True)
    # forward: two results, exp's is saved; backward: the first gradient of 4,000 bytes
    measured = peaks(lambda: x.exp().sum())
    assert measured.forward == 4000 + 4
    assert measured.backward >= 2 * 4000
    limited("f", measured, forward=4004, backward=measured.backward)
    text = "f has up to 4,004 bytes alive in forward, beside its arguments; wanted at most 4,003."
    with pytest.raises(Wrong, match=re.escape(text)):
        limited("f", measured, forward=4003)
    with pytest.raises(Wrong, match="2 bytes alive in backward"):
        limited("f", Peaks(1, 2), forward=1, backward=1)


def test_bytes_that_stay_alive_are_reported_apart_from_peaks():
    x, kept = torch.ones(1000, requires_grad=True), []

    def keeps_a_copy():
        kept.append(x.detach().clone())
        return x.exp()

    got = peaks(keeps_a_copy)
    assert (got.held, got.left) == (4000, 4000)
    assert peaks(lambda: x.sin())[2:] == (0, 0)
    text = "f holds 4,000 bytes between forward and backward, beside its result; wanted at most 64."
    with pytest.raises(Wrong, match=re.escape(text)):
        as_little_memory("f", keeps_a_copy, lambda: x.exp(), room=10_000)
    text = "f leaves 4,000 bytes in memory when its result is gone, beside the gradients"
    with pytest.raises(Wrong, match=re.escape(text)):
        limited("f", got, left=3_999)


class HoldingItsResult(torch.autograd.Function):
    """ctx holds the result, whose grad_fn holds ctx; and forward saves more than the result."""

    @staticmethod
    def forward(ctx, x, reduces):
        ctx.save_for_backward(x.exp())
        ctx.result = x.sum() if reduces else 2 * x
        return ctx.result

    @staticmethod
    def backward(ctx, gradient):
        return gradient * torch.ones(1000), None


@pytest.mark.parametrize(("reduces", "left"), [(False, 8000), (True, 4004)])
def test_what_a_result_in_its_own_ctx_keeps_alive_counts_as_left(reduces, left):
    x = torch.ones(1000, requires_grad=True)
    assert peaks(lambda: HoldingItsResult.apply(x, reduces)).left == left
    assert x.grad is not None  # of the first call: gradients from before must not hide the bytes
    assert peaks(lambda: HoldingItsResult.apply(x, reduces)).left == left


def test_a_peak_above_the_reference_and_the_room_is_refused():
    x = torch.ones(1000)
    as_little_memory("f", lambda: x + 1 + 2, lambda: x + 3, room=4000)
    with pytest.raises(Wrong, match="8,000 bytes alive in forward, beside its arguments; wanted"):
        as_little_memory("f", lambda: x + 1 + 2, lambda: x + 3, room=3999)


def test_a_tensor_above_the_limit_is_refused_even_if_it_is_freed_at_once():
    x = torch.ones(100)
    no_tensor_above("f", lambda: x + 1, 400)
    with pytest.raises(Wrong, match=r"f allocates a tensor of 40,000 bytes; wanted none above 400"):
        no_tensor_above("f", lambda: (x[:, None] * x).sum(), 400)


class Doubling(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, in_place):
        ctx.in_place = in_place
        return 2 * x

    @staticmethod
    def backward(ctx, gradient):
        return gradient.mul_(2) if ctx.in_place else 2 * gradient.float(), None


@pytest.mark.parametrize("size", [1e-30, 1.0, 1e30])
@pytest.mark.parametrize("off", [0, 200, 300])
def test_values_of_any_size_have_the_bound_of_the_tests(size, off):
    wanted = size * torch.tensor([1.0, -2.0, 0.5])
    got = wanted + torch.tensor([0, 0, off * 2.0**-22 * size])  # eps of the largest
    assert is_close(got, wanted) == (off < 256)
    if off < 256:
        same_values("f", got, wanted, within=rounding(torch.float32))
        return
    with pytest.raises(Wrong, match="f: element 2 is"):
        same_values("f", got, wanted, within=rounding(torch.float32))


@pytest.mark.parametrize("reaches", [torch.ones_like, torch.sum])
def test_a_backward_that_changes_its_incoming_gradient_is_refused_in_every_exercise(reaches):
    def check(answer) -> str:
        out = answer(torch.ones(3, requires_grad=True)) * 1
        out.sum().backward() if reaches is torch.sum else out.backward(torch.ones(3))
        return "ok"

    exercise = replace(OWN, check=check, rebuilds=())
    assert judge(exercise, lambda x: Doubling.apply(x, False)).status == OK
    assert judge(exercise, lambda x: Doubling.apply(x, True)).text == (
        "backward changes the gradient that it receives; wanted it as it was: other operators may "
        "receive the same tensor."
    )


def test_returned_gradients_have_the_dtypes_that_backward_gave_them():
    x = torch.ones(3, dtype=torch.bfloat16, requires_grad=True)
    assert returned_gradients(Doubling.apply(x, False))[0].dtype == torch.float32
    assert returned_gradients(x.exp()) == ()


def test_new_bytes_are_those_that_outlive_the_step():
    x, kept = torch.ones(1000), []
    assert new_bytes(measure(lambda: kept.append(x.exp()) or x.sin())) == 4000


def test_more_bytes_than_the_limit_are_refused_with_both_counts():
    at_most_bytes("f: a temporary", 1024, 1024)
    with pytest.raises(Wrong, match="a temporary: 1,025 bytes; wanted at most 1,024"):
        at_most_bytes("f: a temporary", 1025, 1024)


def test_views_and_layouts_are_distinguished():
    x = torch.ones(4, 3)
    shares_storage("f", x[1:], x=x)
    shares_no_storage("f", x.clone(), x=x)
    with pytest.raises(Wrong, match="gave a view of x, which shares its storage"):
        shares_no_storage("f", x.mT, x=x)
    with pytest.raises(Wrong, match="memory of its own; wanted a view of x"):
        shares_storage("f", x + 0, x=x)
    is_tensor("f", x, dtype=torch.float32, shape=(4, 3), device="cpu", contiguous=True)
    with pytest.raises(Wrong, match="a non-contiguous tensor"):
        is_tensor("f", x.mT, contiguous=True)


@pytest.mark.parametrize(
    ("right", "wrong", "text"),
    [
        (lambda: is_tuple("f", (1, 2), 2, "a and b"), lambda: is_tuple("f", None, 2, "a and b"),
         "f gave NoneType; wanted a tuple of a and b. Is there a return?"),
        (lambda: has_keys("f", {"a": 1}, "a"), lambda: has_keys("f", {"a": 1}, "ab"),
         "f gave {'a': 1}; wanted a dictionary with the keys a, b."),
        (lambda: increasing("f", torch.arange(3.0)), lambda: increasing("f", torch.ones(3)),
         "f: entry 0 is 1, and entry 1 is 1; wanted entries that increase."),
        (lambda: keep_no_more("f", [torch.ones(4)]), lambda: keep_no_more("f", [torch.ones(4)[:1]]),
         "f gave tensors that keep 16 bytes alive; wanted 4. A slice keeps the whole tensor"),
        (lambda: same_block_maxima("f", "scale", *BLOCKS), lambda: same_block_maxima("f", "scale",
         BLOCKS[0] + 1, *BLOCKS[1:]), "f: the scale of block 0 is 4; wanted 3."),
    ],
)  # fmt: skip
def test_a_result_of_another_kind_is_reported(right, wrong, text):
    right()
    with pytest.raises(Wrong, match=re.escape(text)):
        wrong()


BLOCKS = torch.tensor([3.0, 5.0]), torch.tensor([1.0, -3.0, 5.0]), 2


def test_an_error_is_a_failure_only_where_a_named_mistake_raises_it():
    with (
        pytest.raises(Wrong, match=r"^f raised ValueError: short\.$"),
        named_errors("f", when=True),
    ):
        raise ValueError("short")
    for error, when in ((ValueError, False), (NotImplementedError, True)):
        with pytest.raises(error), named_errors("f", when=when):
            raise error("short")


# ------------------------------------------------------------------ data without symmetry


def test_sizes_differ_and_are_no_multiples():
    assert not any(a % b == 0 for a in SIZES for b in SIZES if a != b)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
def test_elements_have_both_signs_zeros_and_a_subnormal(dtype):
    made = elements(5, 7, dtype=dtype)
    assert made.dtype == dtype
    assert (made > 0).any()
    assert (made < 0).any()
    assert (made == 0).sum() == 2
    assert ((made != 0) & (made.abs() < torch.finfo(dtype).smallest_normal)).any()
    assert torch.equal(made, elements(5, 7, dtype=dtype))


def test_parameters_have_shapes_and_dtypes_in_turn():
    made = parameters(torch.float32, torch.bfloat16)
    assert [tuple(p.shape) for p in made] == [(5, 3), (7,), (2, 3, 11), (1,), ()]
    assert [p.dtype for p in made[:3]] == [torch.float32, torch.bfloat16, torch.float32]
    defaults = torch.optim.AdamW([torch.ones(1)]).defaults
    assert all(setting[key] != defaults[key] for setting in ADAM_SETTINGS for key in setting)


# ------------------------------------------------------------------ own work


def check_doubled(answer) -> str:
    require(answer(2) == 4, "double(2) is wrong.")
    require(int(answer(torch.ones(1))) == 2, "double(1) is wrong.")
    return str(ledger.largest_batch(lambda batch: batch, 3))  # the check's own call


FORBIDDEN = (
    "memlab.course.ledger.largest_batch",
    "torch.amp.GradScaler",
    "torch.softmax",
    "torch.Tensor.tanh",
    "torch.nn.utils.clip_grad_norm_",
    "torch.optim",
    "torch._foreach_*",
    "a_package_that_nobody_has.function",
)
OWN = Exercise("5.2", "Double", 5, 1, ("a", "b", "c"), None, check_doubled, (), rebuilds=FORBIDDEN)


def calling(call):
    def answer(x):
        call()
        return 2 * x

    return answer


def caught():
    try:
        torch.softmax(torch.ones(2), 0)
    except Exception:
        return


class Scaler(torch.amp.GradScaler):
    def __init__(self):
        super().__init__("cpu")


CALLS = {
    "function": (
        lambda: ledger.largest_batch(lambda b: b, 3),
        "memlab.course.ledger.largest_batch",
    ),
    "class": (lambda: torch.amp.GradScaler("cpu"), "torch.amp.GradScaler"),
    "another name": (lambda: torch.cpu.amp.GradScaler(), "torch.amp.GradScaler"),
    "subclass": (Scaler, "torch.amp.GradScaler"),
    "builtin": (lambda: torch.softmax(torch.ones(2), 0), "torch.softmax"),
    "method": (lambda: torch.ones(2).tanh(), "torch.Tensor.tanh"),
    "decorated": (lambda: nn.utils.clip_grad_norm_([], 1.0), "torch.nn.utils.clip_grad_norm_"),
    "module": (lambda: torch.optim.SGD([torch.ones(1)], 0.1), "torch.optim."),
    "caught": (caught, "torch.softmax"),
    "private": (lambda: torch._foreach_norm([torch.ones(2)]), "torch._foreach_norm"),
}


@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.parametrize(("call", "name"), CALLS.values(), ids=CALLS)
def test_a_call_of_a_rebuilt_function_is_reported(call, name):
    verdict = judge(OWN, calling(call))
    assert verdict.status == WRONG
    assert verdict.text.startswith(f"Your answer calls {name}")
    assert verdict.text.endswith(", which this exercise rebuilds: write those lines yourself.")


def test_calls_by_the_check_and_other_calls_are_allowed():
    others = calling(lambda: torch.log_softmax(torch.ones(2), 0).tan())
    assert judge(OWN, others).status == OK


def test_a_private_function_may_be_called_indirectly():
    def clipping(x):
        weight = nn.Parameter(torch.ones(2))
        weight.grad = torch.ones(2)
        nn.utils.get_total_norm([weight.grad])  # which calls torch._foreach_norm
        return 2 * x

    assert judge(OWN, clipping).status == OK


class Doubler(torch.optim.SGD):
    """Handed out, though torch.optim is forbidden, and with a forbidden call of its own."""

    def __init__(self):
        super().__init__([torch.ones(1)], 0.1)

    @staticmethod
    def double(x):
        return torch.softmax(torch.ones(1), 0).item() * 2 * x


def double_by_hand(x):
    return Doubler.double(x)


def double_as_object(x):
    Doubler()
    return Doubler.double(x)


@pytest.mark.parametrize(
    ("reference", "answer"),
    [
        (Doubler, double_as_object),
        (Doubler.double, double_by_hand),
        (ledger.largest_batch, calling(lambda: ledger.largest_batch(lambda batch: batch, 3))),
    ],
    ids=["class", "function", "function that the exercise rebuilds"],
)
def test_an_answer_may_call_what_the_lesson_handed_out(reference, answer):
    other = replace(OWN, id="5.1", reference=reference)
    assert judge(OWN, answer).status == WRONG
    assert judge(OWN, answer, [other, OWN]).status == OK


@pytest.mark.parametrize(
    "answer", [ledger.largest_batch, partial(ledger.largest_batch, budget_bytes=3)]
)
def test_the_library_function_itself_is_not_an_answer(answer):
    text = judge(OWN, answer).text
    assert text.startswith(
        "Your answer is memlab.course.ledger.largest_batch, which this exercise reb"
    )
    assert is_rebuilt(test_the_library_function_itself_is_not_an_answer, FORBIDDEN) is None


class DerivedSGD(torch.optim.SGD):
    pass


@pytest.mark.parametrize(
    ("answer", "name"),
    [
        (torch.optim.SGD, "torch.optim.sgd.SGD"),
        (DerivedSGD, "torch.optim.sgd.SGD"),
        (Unusable(Wrong("Its cell cannot be read.")), None),
    ],
    ids=["class of a module", "derived class", "cell that cannot be read"],
)
def test_an_answer_from_a_rebuilt_module_is_reported(answer, name):
    assert is_rebuilt(answer, FORBIDDEN) == name


def test_memory_of_python_objects_is_limited():
    def kept(bytes_):
        return lambda: bytearray(bytes_)

    limited_outside_of_tensors("f()", kept(1000), 50_000)
    with pytest.raises(
        Wrong, match=r"f\(\) takes .* bytes outside of tensors; wanted less than 50"
    ):
        limited_outside_of_tensors("f()", kept(100_000), 50_000)


# ------------------------------------------------------------------ naming a mistake


def check_area(answer) -> str:
    for width, height in ((1, 1), (2, 2), (3, 5)):
        got = answer(width, height)
        require(got == width * height, f"area({width}, {height}) gave {got}.")
    return "3 cases"


AREA = Exercise(
    *("5.2", "Area", 5, 1, ("a", "b", "c"), None, check_area),
    (
        WrongAnswer(lambda w, h: 2 * (w + h), "That is the length around it."),
        WrongAnswer(lambda w, h: 4 * w, "Both sides count."),
        WrongAnswer(lambda w, h: 4 * max(w, h), "The one side is not the other."),
        WrongAnswer(lambda w, h: 4 * h + 0, "The one side is not the other, again."),
    ),
)


@pytest.mark.parametrize(
    ("answer", "remark"),
    [
        (lambda w, h: 2 * w + 2 * h, " That is the length around it."),
        (lambda w, h: w * 4, " Both sides count."),
        (lambda w, h: 4, ""),  # all mistakes share the first failure
        (lambda w, h: 4 * h, ""),  # two named mistakes explain it
        (lambda w, h: 4 if w == 1 else 4 * w if w == 3 else 7, ""),
    ],
)
def test_a_mistake_is_named_only_if_it_alone_explains_every_case(answer, remark):
    assert judge(AREA, answer).text == f"area(1, 1) gave 4.{remark}"


def test_mistakes_are_compared_by_evidence_if_it_is_given():
    def check(answer) -> str:
        got = answer()
        require(got <= 10, f"took {got} bytes.", evidence="too many bytes")
        return "ok"

    named = (WrongAnswer(lambda: 11, "It is copied."),)
    exercise = Exercise("5.2", "Bytes", 5, 1, ("a", "b", "c"), None, check, named)
    assert judge(exercise, lambda: 12).text == "took 12 bytes. It is copied."


def test_a_warning_after_the_first_failure_is_not_shown():
    def check(answer) -> str:
        require(answer() == 1, "gave 2.")
        torch.ones(1, requires_grad=True).exp().grad  # noqa: B018 - it warns
        return "ok"

    named = (WrongAnswer(lambda: 2, "One more."),)
    exercise = Exercise("5.2", "One", 5, 1, ("a", "b", "c"), None, check, named)
    assert judge(exercise, lambda: 2).text == "gave 2. One more."
