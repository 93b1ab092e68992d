"""Day 10: what its checks tell a learner, and what the lesson claims."""

import math
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from close import assert_close
from edited import verdict_on

from memlab.attention import attention_reference, flash_attention, tiles
from memlab.checkpointing import ATTENTION
from memlab.course import days
from memlab.course.bill import SETTING
from memlab.course.bill_steps import keep_of_each_block
from memlab.course.checks import day10
from memlab.course.exercises import OK, WRONG, judge
from memlab.dry_runs import dry_run
from memlab.metering import measure
from memlab.model import GPT, PRESETS, scaled_dot_product_attention
from memlab.reference import tiled_attention
from memlab.reference.tiled_attention import add_tile, attend, flash, plan
from memlab.train import combined, dry_trace

ADD, PLAN, ATTEND, FLASH = days.day(10).exercises


# ------------------------------------------------------------------ answers


def with_lse_of_blind_rows(number):
    def answer(q, k, v, tile, shift):
        out, lse = attend(q, k, v, tile, shift)
        return out, lse.masked_fill(lse == math.inf, number)

    return answer


@pytest.mark.few(1)
@pytest.mark.parametrize("number", [0, 5, 1e30, -math.inf, math.nan])
def test_the_lse_of_a_query_that_sees_nothing_must_be_infinite(number):
    verdict = judge(ATTEND, with_lse_of_blind_rows(number))
    assert verdict.status == WRONG
    assert "more queries than keys, the first see nothing): lse" in verdict.text


@pytest.mark.parametrize("change", [lambda n: slice(n.start, n.stop, 2), lambda n: range(2)])
def test_a_plan_has_slices_of_ints_without_a_step(change):
    verdict = judge(PLAN, lambda *given: [(change(row), c) for row, c in plan(*given)])
    assert "wanted slices from one int to another, without a step" in verdict.text
    of_tensors = [(slice(torch.tensor(0), torch.tensor(4)), [slice(0, 4)])]
    assert "wanted slices from one int" in judge(PLAN, lambda *given: of_tensors).text


@pytest.mark.few(1)
@pytest.mark.parametrize("kind", [list, tuple])
def test_lists_and_tuples_are_accepted(kind):
    def rows(*given):
        return kind(kind((row, kind(columns))) for row, columns in plan(*given))

    assert judge(PLAN, rows).status == OK
    assert judge(ADD, lambda *given: kind(add_tile(*given))).status == OK
    assert judge(ATTEND, lambda *given: kind(attend(*given))).status == OK


@pytest.mark.slow
def test_a_doubled_dk_gets_no_remark_on_the_scale():
    verdict = verdict_on("10.4", ("return dq, dk,", "return dq, 2 * dk,"))
    assert verdict.text.endswith("Wrong: dk.")


def test_a_correct_forward_without_backward_is_told():
    unwritten = 'raise NotImplementedError("exercise 10.4, about 13 lines")'
    still_open = ("q, k, v, out, lse = ctx.saved_tensors", unwritten)
    verdict = verdict_on("10.4", still_open)
    assert verdict.status == WRONG
    assert verdict.text == "flash: forward is right; backward is not written yet."
    unscaled = ("attend(q, k, v, tile", "attend(q * q.shape[-1] ** 0.5, k, v, tile")
    wrong = verdict_on("10.4", still_open, unscaled)
    assert "forward is right" not in wrong.text


def test_one_more_column_for_row_sum_is_accepted(monkeypatch):
    def add(row_max, row_sum, acc, scores, values):
        values = torch.cat([values, torch.ones_like(values[..., :1])], -1)
        row_max, _, both = add_tile(row_max, row_sum, torch.cat([acc, row_sum], -1), scores, values)
        return row_max, both[..., -1:], both[..., :-1]

    assert judge(ADD, add).status == OK
    monkeypatch.setattr(tiled_attention, "add_tile", add)
    assert judge(ATTEND, attend).status == OK


# ------------------------------------------------------------------ the library


@pytest.mark.parametrize(("queries", "keys"), [(9, 9), (3, 8), (7, 4), (1, 6)])
@pytest.mark.parametrize("alignment", ["top-left", "bottom-right"])
def test_the_oracle_and_the_reference_match_the_library(alignment, queries, keys):
    random = torch.Generator().manual_seed(0)
    lengths = (queries, keys, keys, queries)
    *qkv, dout = (torch.randn(2, 3, n, 4, generator=random, dtype=torch.float64) for n in lengths)
    qkv = [x.requires_grad_() for x in qkv]
    shift = 0 if alignment == "top-left" else keys - queries
    library = attention_reference(*qkv, causal=True, alignment=alignment)
    wanted = library, *torch.autograd.grad(library, qkv, dout)
    for way in (lambda *given: day10._whole(*given)[0], flash):
        out = way(*qkv, 2, shift)
        for a, b in zip((out, *torch.autograd.grad(out, qkv, dout)), wanted, strict=True):
            assert_close(a, b)


@pytest.mark.parametrize(("queries", "keys", "tile"), [(12, 12, 4), (5, 13, 3), (13, 5, 4)])
@pytest.mark.parametrize("alignment", ["top-left", "bottom-right"])
def test_the_lessons_plan_is_the_librarys(alignment, queries, keys, tile):
    shift = 0 if alignment == "top-left" else keys - queries
    mine = [(row, c) for row, columns in plan(queries, keys, tile, shift) for c in columns]
    plain = tiles(queries, keys, tile, causal=True, alignment=alignment)
    wanted = [
        (slice(t.queries.start, t.queries.stop), slice(t.keys.start, t.keys.stop))
        for t in plain
        if t.kind != "skipped"
    ]
    assert mine == wanted


def test_tiles_give_the_result_of_softmax():
    scores, values = torch.randn(4, 10).double(), torch.randn(10, 3).double()
    state = day10._empty_state((4,), 3, torch.float64)
    for start in range(0, 10, 3):
        state = add_tile(*state, scores[:, start : start + 3], values[start : start + 3])
    row_max, row_sum, acc = state
    assert_close(acc / row_sum, scores.softmax(-1) @ values)
    assert_close((row_max + row_sum.log())[:, 0], scores.logsumexp(-1))


# ------------------------------------------------------------------ the lesson's claims


def kept_and_peak(attend_by, kv_heads=32, dtype=torch.bfloat16, T=8192):
    """For a layer of 32 heads of 128, with q, k and v, without dout."""
    with dry_run():
        q, k, v, dout = (
            torch.zeros(1, T, h, 128, dtype=dtype).transpose(1, 2)
            for h in (32, kv_heads, kv_heads, 32)
        )
        qkv, kept = [x.requires_grad_() for x in (q, k, v)], []
        forward = measure(lambda: kept.append(attend_by(*qkv, causal=True)))
        both = measure(lambda: torch.autograd.grad(attend_by(*qkv, causal=True), qkv, dout))
    return forward.live_bytes, both.peak_bytes - dout.nbytes


@pytest.mark.few(1)
@pytest.mark.parametrize(("kv_heads", "mib"), [(32, 257), (8, 161)])
def test_the_bytes_kept_of_a_7b_layer_match_the_formula(kv_heads, mib):
    formula = 8192 * ((2 * 4096 + 2 * kv_heads * 128) * 2 + 4 * 32)
    for way in (flash_attention, scaled_dot_product_attention):
        assert kept_and_peak(way, kv_heads)[0] == formula == mib * 2**20


def test_the_guides_256_mb_per_head_and_8_gb_per_layer_are_one_float32_matrix():
    one = 8192**2 * 4
    assert one == 256 * 2**20
    kept, peak = kept_and_peak(attention_reference, dtype=torch.float32)
    layer = 128 * 2**20  # q, or the result
    mask = 8192**2
    assert kept - 3 * layer == 32 * one + 2 * layer + mask
    assert 3 * 32 * one < peak - 3 * layer < 3 * 32 * one + 4 * layer


@pytest.mark.few(1)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_twice_the_length_keeps_twice_the_bytes(dtype):
    one, two = (kept_and_peak(flash_attention, dtype=dtype, T=T)[0] for T in (4096, 8192))
    assert two == 2 * one


def test_torchs_causal_is_top_left():
    q, k = torch.zeros(1, 1, 2, 4), torch.zeros(1, 1, 5, 4)
    seen = F.scaled_dot_product_attention(q, k, torch.eye(5).view(1, 1, 5, 5), is_causal=True)
    assert seen[0, 0].count_nonzero(1).tolist() == [1, 2]


def test_autograd_through_the_loop_keeps_more_than_the_score_matrix():
    def held(call):
        kept = []
        trace = measure(lambda: kept.append(call()))
        return sum(e.bytes for e in trace.events if e.phase != "before")

    qkv = [torch.randn(1, 4, 256, 64).requires_grad_() for _ in range(3)]
    loop = held(lambda: attend(*qkv, 32, 0)[0])
    matrix = held(lambda: attention_reference(*qkv, causal=True))
    assert loop > matrix > 4 * 256**2 * 4
    assert held(lambda: flash(*qkv, 32, 0)) == 4 * 256 * (64 + 1) * 4


def first_step(attention, length=640, keep=ATTENTION):
    """The peak of forward and backward of today's bill, with one sequence."""
    with dry_run():
        config = replace(PRESETS[SETTING.model], seq_len=length)
        model = GPT(config, attention=attention, dtype=torch.bfloat16)
        keep_of_each_block(model, keep)
        tokens = torch.zeros(1, length, dtype=torch.long)
        return measure(lambda: model(tokens, tokens).backward(), model=model).peak_bytes


@pytest.mark.slow
def test_todays_bill_is_the_same_with_every_attention():
    by_torch = first_step(scaled_dot_product_attention)
    assert first_step(flash_attention) == first_step(attention_reference) == by_torch
    long = first_step(scaled_dot_product_attention, 5120)
    assert first_step(attention_reference, 5120) > long + 2**28
    kept = 5120 * 768 * 2 + 12 * 5120 * 4  # out and lse
    assert long - first_step(flash_attention, 5120) == 12 * kept  # its tiles are recomputed
    assert first_step(flash_attention, 5120, ATTENTION | {flash_attention}) == long


@pytest.mark.slow
def test_the_first_days_bill_would_be_larger_by_the_probabilities_of_all_layers():
    ways = ("fused-adamw", "fused-adamw+eager-attention", "fused-adamw+flash-attention")
    torchs, eager, ours = (dry_trace(SETTING, combined(way)).at_peak for way in ways)
    probabilities = 12 * 8 * 12 * 640**2 * 4
    assert 0 < eager["activations"] - torchs["activations"] - probabilities < 2**23
    assert f"{probabilities / 2**30:.2f}" == "1.76"
    assert ours == torchs
