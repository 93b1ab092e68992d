"""Day 11: what its checks tell a learner, and what the lesson claims."""

from functools import partial

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from close import assert_close
from torch.autograd.graph import saved_tensors_hooks

from memlab import losses
from memlab.checkpointing import ATTENTION
from memlab.course import bill_steps, days
from memlab.course.checks.day11 import all_logits_bytes, chunked_bytes
from memlab.course.exercises import WRONG, Wrong, judge
from memlab.course.solutions import solution
from memlab.dry_runs import dry_run
from memlab.metering import measure
from memlab.model import cross_entropy
from memlab.optim import step_in_backward
from memlab.reference.chunked_loss import ChunkedLoss, chunked_loss, loss_and_gradient_

_, GRADIENT, CHUNKED, _ = days.day(11).exercises
BY_LOOP, CHECKPOINTED, AT_ONCE = (wrong.answer for wrong in CHUNKED.wrong_answers[:3])
chunk_rows = solution("11.4")

# ------------------------------------------------------------------ answers


class ListedLoss(torch.autograd.Function):
    """Two chunks alive at once, and hidden's gradient in a list."""

    @staticmethod
    def forward(ctx, hidden, weight, targets, chunk):
        of_hidden, of_weight, total = [], torch.zeros(weight.shape), 0
        for h, t in zip(hidden.split(chunk), targets.split(chunk), strict=True):
            x = (h @ weight.T).float()
            total = total + loss_and_gradient_(x, t).sum()
            of_hidden.append((x.to(weight.dtype) @ weight).float())
            of_weight.addmm_(x.T, h.float())
        del x
        count = (targets != -100).sum().clamp(min=1)
        ctx.save_for_backward(torch.cat(of_hidden), of_weight, count)
        return total / count

    @staticmethod
    def backward(ctx, upstream):
        of_hidden, of_weight, count = ctx.saved_tensors
        return of_hidden.mul_(upstream / count), of_weight.mul_(upstream / count), None, None


@pytest.mark.skipif(not hasattr(F, "linear_cross_entropy"), reason="torch 2.13 has it")
def test_calling_torchs_chunked_loss_is_refused():
    def answer(hidden, weight, targets, chunk):
        options = torch.nn.LinearCrossEntropyOptions(batch_chunk_size=chunk)
        return F.linear_cross_entropy(hidden, weight, targets, options=options)

    assert "linear_cross_entropy, which this exercise rebuilds" in judge(CHUNKED, answer).text


def with_all_logits(hide):
    """A correct loss that also calls hide(hidden, weight) on large inputs, and keeps the result."""

    class HidesLogits(torch.autograd.Function):
        @staticmethod
        def forward(ctx, hidden, weight, targets, chunk):
            ctx.hidden_away = hide(hidden, weight) if len(hidden) == 200 else None
            return ChunkedLoss.forward(ctx, hidden, weight, targets, chunk)

        @staticmethod
        def backward(ctx, upstream):
            return ChunkedLoss.backward(ctx, upstream)

    return HidesLogits.apply


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("hide", "found"),
    [
        (lambda h, w: h @ w.mT, "allocates a tensor of 100,000 elements, as large as all"),
        (lambda h, w: (h @ w.mT).half().flatten(), "as large as all the logits"),
        (lambda h, w: [part @ w.mT for part in h.split(4)], "bytes are held for backward"),
        (lambda h, w: h.float().numpy() @ w.float().numpy().T, "bytes outside of tensors"),
        (lambda h, w: None if (h[:100] @ w.mT).any() else 0, "bytes at its peak"),
        (lambda h, w: None if (h[:100] @ w.mT).any() else 0, "Alive at the peak: 1 × (100, 500), "),
        (
            lambda h, w: None if any((p @ w.mT).sum() > 1e9 for p in h.split(4)) else 0,
            "4.0 matmuls",
        ),
    ],
    ids=["tensor", "half", "pieces", "numpy", "half of them", "by shape", "a fourth matmul"],
)
def test_all_the_logits_are_found_in_every_form(hide, found):
    verdict = judge(CHUNKED, with_all_logits(hide))
    assert verdict.status == WRONG
    assert found in verdict.text


def correct_except(has_size, other):
    """The chunked loss, but the other one where has_size(rows)."""

    def answer(hidden, weight, targets, chunk):
        loss = other if has_size(len(hidden)) else chunked_loss
        return loss(hidden, weight, targets, chunk)

    return answer


@pytest.mark.parametrize(
    ("answer", "found"),
    [
        (
            correct_except(lambda n: n == 200, lambda h, w, t, c: chunked_loss(h * 0, w, t, c)),
            "wanted",
        ),
        (correct_except(lambda n: n < 100, AT_ONCE), "as large as all the logits"),
        (correct_except(lambda n: n in (50, 90), BY_LOOP), "bytes are held for backward"),
        (lambda h, w, t, c: chunked_loss(h, w, t, 1), "at most 1 row of hidden at once; wanted 2."),
        (lambda h, w, t, c: chunked_loss(h, w, t, 2 * c), "at most 4 rows of hidden at once"),
        (lambda h, w, t, c: chunked_loss(h, w, t, c + c // 2), "of hidden at once; wanted 2."),
    ],
    ids=[
        "zeros at 200",
        "all below 100",
        "a loop at 50",
        "1 row",
        "2 chunks",
        "a chunk and a half",
    ],
)
def test_values_are_checked_where_bytes_are_and_bytes_where_values_are(answer, found):
    with pytest.raises(Wrong) as wrong:
        CHUNKED.check(answer)
    assert found in str(wrong.value)


def test_two_chunks_alive_at_once_pass_with_a_note():
    assert "two tensors of chunk × V are alive at once" in CHUNKED.check(ListedLoss.apply)
    assert "alive at once" not in CHUNKED.check(chunked_loss)


def garbage_at_size(x, targets):
    found = loss_and_gradient_(x, targets)
    return found * 0 if x.numel() == 64 * 1024 else found


def with_logsumexp(x, targets):
    """Softmax in place, and the loss by logsumexp, which allocates inside its kernel."""
    kept = targets != -100
    labels = targets.masked_fill(~kept, 0)[:, None]
    x.sub_(x.amax(1, keepdim=True))
    losses = x.logsumexp(1) - x.gather(1, labels)[:, 0]
    torch.softmax(x, 1, out=x)
    x.scatter_add_(1, labels, torch.full_like(losses, -1)[:, None]).mul_(kept[:, None])
    return losses.masked_fill(~kept, 0)


def with_numpy(x, targets):
    other = np.exp(x.numpy() / 9999)
    return loss_and_gradient_(x, targets) + 0 * float(other[0, 0])


def with_no_other_label(x, targets):
    """Indexing raises an IndexError; gather raises a RuntimeError."""
    x[torch.arange(len(x)), targets] += 0
    return loss_and_gradient_(x, targets)


@pytest.mark.parametrize(
    ("answer", "found"),
    [
        (garbage_at_size, "64 rows of 1,024 logits: the losses are [0, 0"),
        (with_logsumexp, "logsumexp allocates 262,144 bytes at once"),
        (with_numpy, "bytes outside of tensors"),
        (with_no_other_label, "reads column -100"),
        (lambda x, t: loss_and_gradient_(x, t).half(), "gave a loss in torch.float16"),
    ],
    ids=["garbage", "logsumexp", "numpy", "no label", "half"],
)
def test_a_second_tensor_or_a_wrong_value_of_a_chunk_is_found(answer, found):
    with pytest.raises(Wrong) as wrong:
        GRADIENT.check(answer)
    assert found in str(wrong.value)


def learners_loss(add, multiply):
    """A learner's first version, without del x."""

    class LearnersLoss(torch.autograd.Function):
        @staticmethod
        def forward(ctx, hidden, weight, targets, chunk):
            of_hidden, of_weight = torch.zeros(hidden.shape), torch.zeros(weight.shape)
            total = torch.zeros(())
            for start in range(0, len(hidden), chunk):
                rows = slice(start, start + chunk)
                x = (hidden[rows] @ weight.mT).float()
                total += loss_and_gradient_(x, targets[rows]).sum()
                of_hidden[rows] = x.to(weight.dtype) @ weight
                of_weight = add(of_weight, x.mT, hidden[rows].float())
            ctx.count = (targets != -100).sum().clamp(min=1)
            ctx.save_for_backward(of_hidden, of_weight)
            return total / ctx.count

        @staticmethod
        def backward(ctx, upstream):
            return *(multiply(g, upstream / ctx.count) for g in ctx.saved_tensors), None, None

    return LearnersLoss.apply


@pytest.mark.slow
@pytest.mark.parametrize(
    ("answer", "remark"),
    [
        (
            learners_loss(lambda w, x, h: w.add_(x @ h), torch.Tensor.mul_),
            "dw.addmm_(x.mT, h) does not.",
        ),
        (learners_loss(torch.Tensor.addmm_, torch.mul), "Use g.mul_(factor)."),
    ],
    ids=["+=", "g * upstream"],
)
def test_a_mistake_is_named_while_two_chunks_are_alive(answer, remark):
    assert judge(CHUNKED, answer).text.endswith(remark)


@pytest.mark.parametrize("place", [0, 1, 2])
def test_writing_into_an_argument_is_refused(place):
    def answer(*given):
        loss = chunked_loss(*given)
        with torch.no_grad():
            given[place].zero_()
        return loss

    assert "changed its arguments in place." in judge(CHUNKED, answer).text


# ------------------------------------------------------------------ the reference


def inputs(rows, width, vocab, dtype=torch.float32):
    random = torch.Generator().manual_seed(0)
    hidden, weight = (torch.randn(n, width, generator=random) for n in (rows, vocab))
    targets = torch.randint(vocab, (rows,), generator=random)
    return hidden.to(dtype).requires_grad_(), weight.to(dtype).requires_grad_(), targets


def peak(loss, given):
    trace = measure(lambda: loss(*given).backward())
    return trace.peak_bytes - sum(x.nbytes for x in given)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_lessons_loss_matches_the_librarys(dtype):
    found = []
    for loss in (chunked_loss, losses.chunked_cross_entropy):
        hidden, weight, targets = inputs(50, 16, 99, dtype)
        targets[::7] = -100
        value = 0.3 * loss(hidden, weight, targets, chunk=8)
        value.backward()
        found.append((value.detach(), hidden.grad, weight.grad))
    for ours, theirs in zip(*found, strict=True):
        assert ours.dtype == theirs.dtype
        assert_close(ours, theirs, terms=2 if dtype == torch.bfloat16 else 256)


@pytest.mark.parametrize(
    "shape", [(512, 64, 1000), (64, 128, 1024), (100, 3, 50), (1, 10, 100)], ids=str
)
def test_the_peak_of_all_the_logits_is_the_formula_and_the_loss(shape):
    given = inputs(*shape)
    found = peak(lambda h, w, t: F.cross_entropy(F.linear(h, w), t), given)
    assert found - all_logits_bytes(*shape) == 8  # the loss, and the number of rows


@pytest.mark.parametrize("chunk", [1, 7, 64, 200])
def test_the_peak_of_chunks_is_the_formula_and_a_few_bytes_per_row(chunk):
    rows, width, vocab = shape = 200, 24, 500
    more = peak(partial(chunked_loss, chunk=chunk), inputs(*shape))
    more -= chunked_bytes(rows, width, vocab, chunk)
    assert 0 <= more <= 64 + 8 * rows


def test_hooks_for_saved_tensors_see_both_gradients():
    """Offloading needs the hooks, which don't see tensors on ctx."""
    seen = []

    def pack(x):
        seen.append(x.shape)
        return x

    with saved_tensors_hooks(pack, lambda x: x):
        chunked_loss(*inputs(20, 4, 30), 8)
    assert seen == [(20, 4), (30, 4)]


def test_the_chosen_chunk_fits_the_budget_and_one_chunk_fewer_does_not():
    for rows, width, vocab, budget in ((1000, 64, 5000, 4_000_000), (77, 8, 300, 20_000)):
        found = chunk_rows(rows, width, vocab, budget)
        chunks = -(-rows // found)
        assert chunked_bytes(rows, width, vocab, found) <= budget
        assert chunked_bytes(rows, width, vocab, -(-rows // (chunks - 1))) > budget


# ------------------------------------------------------------------ the lesson's claims


def test_torchs_chunked_loss_saves_memory_only_with_options():
    function = getattr(F, "linear_cross_entropy", None)
    if function is None:
        pytest.skip("torch 2.13 has it")
    shape, options = (512, 64, 8192), torch.nn.LinearCrossEntropyOptions()
    whole = all_logits_bytes(*shape) + 8
    assert peak(function, inputs(*shape)) == whole
    assert peak(partial(function, options=options), inputs(*shape)) < whole / 10


def test_the_mean_over_no_rows_is_nan_in_torch_and_zero_here():
    hidden, weight, _ = inputs(4, 3, 5)
    none = torch.full((4,), -100)
    assert F.cross_entropy(hidden @ weight.mT, none).isnan()
    assert chunked_loss(hidden, weight, none, 2).item() == 0


def test_torchs_bfloat16_loss_is_wrong_by_a_tenth_and_the_lessons_is_exact():
    if not hasattr(F, "linear_cross_entropy"):
        pytest.skip("torch 2.13 has it")
    hidden, weight, targets = inputs(512, 64, 8192, torch.bfloat16)
    weight = (weight.detach() / 8).requires_grad_()
    exact = F.cross_entropy(hidden.double() @ weight.double().mT, targets).item()
    options = torch.nn.LinearCrossEntropyOptions()
    theirs = F.linear_cross_entropy(hidden, weight, targets, options=options).item()
    assert abs(theirs - exact) > 0.1
    assert abs(chunked_loss(hidden, weight, targets, 64).item() - exact) < 1e-3


@pytest.mark.few(2)
@pytest.mark.parametrize("chunk", [16, 32, 64, 128, 256])
def test_the_loop_and_checkpointed_chunks_need_the_tables_bytes(chunk):
    """Below the width the peak is three times weight's gradient, after two log-softmaxes are freed.
    The tolerance is hidden's gradient."""
    rows, width, vocab = shape = 512, 64, 8192
    a_chunk, of_weight, of_hidden = 4 * chunk * vocab, 4 * vocab * width, 4 * rows * width
    loop = 4 * rows * vocab + max(2 * a_chunk, 3 * of_weight - 2 * a_chunk)
    recomputed = max(of_weight + 3 * a_chunk, 3 * of_weight)
    for answer, wanted in ((BY_LOOP, loop), (CHECKPOINTED, recomputed)):
        found = peak(partial(answer, chunk=chunk), inputs(*shape))
        assert abs(found - wanted) <= of_hidden


@pytest.mark.parametrize(
    ("of_the_width", "upcast_wins", "plain_wins"),
    [(0.25, True, True), (0.75, False, True), (2.0, False, False)],
)
def test_in_bfloat16_chunks_need_more_below_half_the_width_or_the_width(
    of_the_width, upcast_wins, plain_wins
):
    shape = int(64 * of_the_width), 64, 4096
    ways = (
        partial(losses.chunked_cross_entropy, chunk=8),
        lambda h, w, t: F.cross_entropy(F.linear(h, w).float(), t),
        lambda h, w, t: F.cross_entropy(F.linear(h, w), t),
    )
    chunks, upcast, plain = (peak(loss, inputs(*shape, torch.bfloat16)) for loss in ways)
    assert (upcast < chunks, plain < chunks) == (upcast_wins, plain_wins)


def test_the_loss_of_llama_3_8b_is_three_float32_tensors_of_all_the_logits():
    rows, width, vocab = 8192, 4096, 128_256
    with dry_run():
        hidden, weight = (
            torch.zeros(n, width, dtype=torch.bfloat16, requires_grad=True) for n in (rows, vocab)
        )
        given = hidden, weight, torch.zeros(rows, dtype=torch.long)
        found = peak(lambda h, w, t: F.cross_entropy(F.linear(h, w).float(), t), given)
    assert 0 <= found - 12 * rows * vocab <= 16


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("rows", "to_float", "to_bfloat16"),
    [(512, 0.37, 0.37), (2048, 0.98, 0.50), (4096, 1.94, 0.97), (8192, 3.76, 1.88)],
)
def test_in_llama_3_8b_chunks_break_even_at_half_the_width_or_at_the_width(
    rows, to_float, to_bfloat16
):
    ways = (
        lambda h, w, t: F.cross_entropy(F.linear(h, w).float(), t),
        lambda h, w, t: F.cross_entropy(F.linear(h, w), t),
        losses.chunked_cross_entropy,
    )
    found = []
    for loss in ways:
        with dry_run():
            hidden, weight = (
                torch.zeros(n, 4096, dtype=torch.bfloat16, requires_grad=True)
                for n in (rows, 128_256)
            )
            found.append(peak(loss, (hidden, weight, torch.zeros(rows, dtype=torch.long))))
    by_float, by_bfloat16, by_chunks = found
    assert round(by_float / by_chunks, 2) == to_float
    assert round(by_bfloat16 / by_chunks, 2) == to_bfloat16


# ------------------------------------------------------------------ the bill


@pytest.mark.slow
def test_the_alternatives_to_the_bills_choices():
    """Day 9's bill is 1.02 GiB, today's 821.07 MiB (tests/course/test_bill.py)."""
    gib, mib = 2**30, 2**20
    found = {
        "chunks alone": bill_steps.in_chunks(ATTENTION, micro_batch=1).peak_bytes / gib,
        "all the logits": bill_steps.in_chunks(loss=cross_entropy).peak_bytes / gib,
        "attention kept": bill_steps.in_chunks(ATTENTION).peak_bytes / mib,
        "stepped in backward": bill_steps.in_chunks(stepping=step_in_backward).peak_bytes / mib,
    }
    assert {name: f"{peak:.2f}" for name, peak in found.items()} == {
        "chunks alone": "1.05",
        "all the logits": "1.91",
        "attention kept": "852.18",
        "stepped in backward": "759.37",
    }
