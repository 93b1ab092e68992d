"""Day 19's checks accept right answers and refuse wrong ones, and the lesson's figures hold."""

import ast
from dataclasses import replace
from functools import cache, partial

import pytest
import torch
import torch.nn.functional as F
from edited import each, verdict_on

import memlab
from memlab.course import bill, days
from memlab.course.checks.day19 import DAY, E4M3, E5M2, cast, cast_tiles, matmul, saved_bytes
from memlab.course.exercises import OK, WRONG, judge
from memlab.course.solutions import given
from memlab.model import PRESETS
from memlab.planner.repetition import extrapolate
from memlab.precision import FP8Recipe
from memlab.precision.fp8 import quantize_fp8

CAST, CAST_TILES, MATMUL, KEPT = DAY.exercises
training_step = given(19, "training_step")
SEVEN = PRESETS["llama-2-7b"]


# ------------------------------------------------------------------ right answers


def by_division(x, dtype):
    """Divides by the scale, and saturates."""
    largest = torch.finfo(dtype).max
    amax = max(x.float().min().abs(), x.float().max().abs())
    scale = (amax / largest).clamp(min=2.0**-120)
    return (x.to(torch.float32) / scale).clamp(-largest, largest).to(dtype), scale


def in_float64(x, dtype):
    amax = x.double().abs().max()
    scale = amax / torch.finfo(dtype).max if amax else torch.ones((), dtype=torch.float64)
    return (x.double() / scale).float().to(dtype), scale.float()


def tile_by_tile(x, dtype, rows, columns):
    """A loop, with the cast of the exercise before."""
    n, k = x.shape
    codes = torch.empty(n, k, dtype=dtype)
    scales = torch.empty(-(-n // rows), -(-k // columns))
    for i in range(len(scales)):
        for j in range(scales.shape[1]):
            place = slice(i * rows, (i + 1) * rows), slice(j * columns, (j + 1) * columns)
            codes[place], scales[i, j] = cast(x[place], dtype)
    return codes, scales


def by_repeating(x, dtype, rows, columns):
    """Scales are spread over the elements; no tile has axes of its own."""
    n, k = x.shape
    padded = F.pad(x.abs().float(), (0, -k % columns, 0, -n % rows))
    amax = torch.stack([part.amax(0) for part in padded.split(rows)])
    amax = torch.stack([part.amax(1) for part in amax.split(columns, 1)], 1).clamp(min=2.0**-100)
    scales = amax / torch.finfo(dtype).max
    spread = scales.repeat_interleave(rows, 0)[:n].repeat_interleave(columns, 1)[:, :k]
    return (x.float() / spread).to(dtype), scales


class ScaledMM(torch.autograd.Function):
    """torch's own FP8 matmul, with everything on ctx."""

    @staticmethod
    def forward(ctx, x, weight):
        ctx.x8, ctx.weight, (w8, scale) = cast(x, E4M3), weight, cast(weight, E4M3)
        codes, by = ctx.x8
        return torch._scaled_mm(codes, w8.T, scale_a=by, scale_b=scale, out_dtype=x.dtype)

    @staticmethod
    def backward(ctx, gradient):
        g8, g_scale = cast(gradient, E5M2)
        w8, scale = cast(ctx.weight, E4M3)
        codes, by = ctx.x8
        dx = torch._scaled_mm(
            g8, w8.T.contiguous().T, scale_a=g_scale, scale_b=scale, out_dtype=gradient.dtype
        )
        return dx, torch._scaled_mm(
            g8.T.contiguous(), codes, scale_a=g_scale, scale_b=by, out_dtype=ctx.weight.dtype
        )


def by_library(x, dtype, tile=None):
    return tuple(quantize_fp8(x, dtype, tile)[:2])


def by_cases(tokens, C, Q, F, way, columns=None):
    if way == "bf16":
        return 4 * tokens * C + 2 * tokens * F
    scaled = (lambda k: 4) if columns is None else lambda k: 4 * tokens * ((k - 1) // columns + 1)
    times = 5 if way == "own" else 2
    return sum(tokens * k + scaled(k) for k in [C] * times + [Q, F])


@pytest.mark.parametrize(
    ("exercise", "answer"),
    [
        (CAST, by_division),
        (CAST, in_float64),
        (CAST_TILES, tile_by_tile),
        (CAST_TILES, by_repeating),
        (MATMUL, lambda x, weight: ScaledMM.apply(x, weight)),
        (KEPT, by_cases),
    ],
)
def test_right_answers_pass(exercise, answer):
    verdict = judge(exercise, answer)
    assert verdict.status == OK, verdict


def test_the_librarys_casts_pass_the_checks():
    CAST.check(lambda x, dtype: by_library(x, dtype))
    CAST_TILES.check(lambda x, dtype, rows, columns: by_library(x, dtype, (rows, columns)))


# ------------------------------------------------------------------ wrong answers


def test_calling_the_library_is_refused():
    verdict = judge(CAST, by_library)
    assert verdict.status == WRONG
    assert "Your answer calls memlab.precision" in verdict.text


def writes_into_x(x, dtype):
    found = cast(x, dtype)
    x.zero_()
    return found


def a_slice(x, dtype):
    codes, scale = cast(x, dtype)
    return torch.cat([codes, codes])[: len(codes)], scale


KEPT_ELSEWHERE = []


def keeps_x_elsewhere(x, weight):
    KEPT_ELSEWHERE.append(x)
    return matmul(x, weight)


def keeps_a_float32_copy(x, weight):
    out = matmul(x, weight)
    if out.grad_fn is not None:
        out.grad_fn.kept = x.float()
    return out


@pytest.mark.parametrize(
    ("exercise", "answer", "said"),
    [
        (CAST, writes_into_x, "changes the values of x"),
        (CAST, a_slice, "bytes alive"),
        (CAST, lambda x, dtype: cast(x, dtype)[0], "wanted a tuple of codes and scale"),
        (CAST, lambda x, dtype: cast(x, dtype)[::-1], "codes, gave a tensor of dtype"),
        (CAST, lambda x, dtype: (cast(x, dtype)[0], 2 * cast(x, dtype)[1]), "the scale is"),
        (CAST_TILES, lambda *a: (cast_tiles(*a)[0].flip(0), cast_tiles(*a)[1]), "codes are wrong"),
        (CAST_TILES, lambda *a: cast_tiles(*a)[1], "wanted a tuple of codes and scales"),
        (MATMUL, keeps_x_elsewhere, "keeps x for backward"),
        (MATMUL, keeps_a_float32_copy, "bytes for backward; wanted"),
        (MATMUL, lambda *a: matmul(*a).detach(), "no gradient of x"),
        (MATMUL, lambda *a: 1.01 * matmul(*a), "elements are wrong."),
        (MATMUL, lambda x, w: F.linear(x, w.to(x.dtype)), "elements are wrong."),
        (KEPT, lambda *a: float(saved_bytes(*a)), "a float"),
    ],
)
def test_other_wrong_answers_are_refused(exercise, answer, said):
    verdict = judge(exercise, answer)
    KEPT_ELSEWHERE.clear()
    assert verdict.status == WRONG
    assert said in verdict.text


AMAX = "x.abs().amax().float().clamp(min=SMALLEST)"
CODES = "(x.float() * (largest / amax)).to(dtype)"

SAVED = "save_for_backward(*x8, weight)"
TWICE = "return 2 * tokens * sum(inputs)"
HALF = ("amax / largest", "2 * amax / largest"), ("largest / amax", "largest / amax / 2")

REFUSED = [
    ("19.1", "twice rounded in bfloat16", ("x.float() *", "x *")),
    ("19.1", "half of the range", *HALF),
    ("19.1", "the mean", ("x.abs().amax()", "x.abs().mean()")),
    ("19.1", "codes as float32", (CODES, f"{CODES}.float()")),
    ("19.2", "a scale per row", ("-k % columns", "0"), ("(-1, columns)", "(1, k)")),
    ("19.2", "E4M3 always", (".to(dtype)", ".to(torch.float8_e4m3fn)")),
    ("19.2", "the amax of columns", ("amax((1, 3)", "amax((0, 1)")),
    ("19.3", "a third of the gradient", ("cast(gradient,", "cast(gradient / 3,")),
    ("19.3", "float32 codes are kept", (SAVED, "save_for_backward(x8[0].float(), x8[1], weight)")),
    ("19.4", "q for c", ("[C, Q, C, F]", "[Q, Q, C, F]")),
    ("19.4", "bf16 with scales", (TWICE, f"{TWICE} + 12")),
]
ACCEPTED = [
    ("19.1", "another amax", (AMAX, "x.float().abs().max().clamp(min=SMALLEST)")),
    ("19.1", "saturated", (".to(dtype), amax", ".clamp(-largest, largest).to(dtype), amax")),
    ("19.2", "a reshape", (".view(padded.shape)", ".reshape(padded.shape)")),
    ("19.2", "another padding", ("nn.functional.pad", "F.pad")),
    ("19.3", "mT", ("w8.T", "w8.mT")),
    ("19.4", "a generator", ("sum(scales)", "sum(s for s in scales)")),
]


@each(REFUSED)
def test_a_wrong_edit_is_refused(edit, tmp_path):
    assert verdict_on(edit, tmp_path).status == WRONG


@each(ACCEPTED)
def test_a_correct_edit_is_accepted(edit, tmp_path):
    verdict = verdict_on(edit, tmp_path)
    assert verdict.status == OK, verdict


# ------------------------------------------------------------------ figures of the lesson


@cache
def table(name: str) -> dict[str, tuple]:
    """A table of the lesson: (recipe, (allocated, reserved)) by name."""
    path = days.notebook(19, "solutions").with_suffix(".py")
    (value,) = (
        node.value
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == name
    )
    return eval(compile(ast.Expression(value), name, "eval"), {"FP8Recipe": FP8Recipe})


ROWS = {
    (checkpointed, name): row
    for checkpointed, rows in ((False, "COPIES"), (True, "CHECKPOINTED"))
    for name, row in table(rows).items()
}
ROW_PARAMETERS = [  # in one argument
    pytest.param(row, marks=() if row == (False, "FP8, shared copies") else pytest.mark.slow)
    for row in ROWS
]


def deep(layers, recipe, checkpointed):
    return memlab.predict(
        partial(training_step, replace(SEVEN, layers=layers), recipe, 2, 4096, checkpointed)
    )


@pytest.mark.parametrize("row", ROW_PARAMETERS)
def test_the_lessons_table_is_predicted(row):
    """With four and with five blocks; the others are added event by event."""
    checkpointed, _ = row
    recipe, stated = ROWS[row]
    trace = extrapolate(*(deep(n, recipe, checkpointed) for n in (4, 5)), 5, SEVEN.layers)
    assert (trace.allocated_bytes, trace.reserved_bytes) == stated


@pytest.mark.slow
def test_all_blocks_give_the_tables_peak():
    recipe, stated = ROWS[False, "FP8, shared copies"]
    whole = deep(SEVEN.layers, recipe, False)
    assert (whole.allocated_bytes, whole.reserved_bytes) == stated


def test_the_table_says_what_the_text_says():
    bf16, own, shared, kept_too = (row[1] for row in table("COPIES").values())
    assert shared[0] < own[0] < bf16[0] < kept_too[0]
    assert own[1] > bf16[1] > shared[1]
    assert [round(100 * (1 - way[0] / bf16[0])) for way in (own, shared)] == [1, 5]
    assert round(100 * (1 - shared[1] / bf16[1])) == 2
    plain, fp8 = (row[1][0] for row in table("CHECKPOINTED").values())
    assert abs(fp8 / plain - 1) < 1e-4


def test_with_checkpointing_the_peak_is_adamws_step():
    trace = deep(2, FP8Recipe(), True)
    assert trace.peak_phase == "optimizer"
    assert "activations" not in trace.at_peak


def test_the_shares_of_the_text_are_the_formulas():
    sizes = SEVEN.hidden_size, SEVEN.heads * SEVEN.head_dim, SEVEN.intermediate_size
    bf16, own, shared = (saved_bytes(8192, *sizes, way) for way in ("bf16", "own", "shared"))
    assert [round(100 * (1 - way / bf16)) for way in (own, shared)] == [7, 39]
    activations = [deep(n, None, False).at_peak["activations"] for n in (4, 5)]
    of_a_block = activations[1] - activations[0]
    assert 0.24 < bf16 / of_a_block < 0.26  # "a quarter"
    eight_bits_a_token = saved_bytes(8192, *sizes, "shared", 128) - 8192 * sum(
        (2 * sizes[0], *sizes[1:])
    )
    assert eight_bits_a_token / 8192 == 4 * (2 * 32 + 32 + 86)


def test_the_bill_is_day_16s():
    before, now = (bill.stored(days.day(n).bill) for n in (16, 19))
    assert before.at_peak == now.at_peak
    assert days.day(19).bill.measure is days.day(16).bill.measure
    assert "optimizer_temporaries" in now.at_peak  # the peak is the optimizer's
