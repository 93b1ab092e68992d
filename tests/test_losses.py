"""Chunked cross-entropy against the float64 reference, and its bytes, exactly."""

import gc
import math
import weakref
from functools import partial
from itertools import product

import pytest
import torch
import torch.nn.functional as F
from quick import quick
from torch.autograd.graph import saved_tensors_hooks

import memlab
from memlab.losses import (
    LossTerms,
    chunk_rows,
    chunked_cross_entropy,
    cross_entropy_reference,
    row_losses_,
    token_log_probs,
)
from memlab.model import GPT, PRESETS
from memlab.train import Plugs, Setting, build, combined

N, C, V = 20, 8, 33
OPTIONS = {
    "plain": {},
    "smoothed": {"label_smoothing": 0.1},
    "z-loss": {"z_loss": 0.01},
    "capped": {"soft_cap": 3.0},
    "all": {"label_smoothing": 0.2, "z_loss": 0.03, "soft_cap": 2.0},
}
every_option = pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
REDUCTIONS = ("mean", "sum", "none")


def inputs(rows=N, width=C, vocab=V, dtype=torch.float64, bias=True, ignored=(3, 4, 5, 6, 7, 15)):
    """Return hidden, weight and bias, which require gradients, and partly ignored targets."""
    generator = torch.Generator().manual_seed(0)
    shapes = ((rows, width), (vocab, width), (vocab,))
    hidden, weight, offset = (
        torch.randn(s, generator=generator, dtype=torch.float64).to(dtype).requires_grad_()
        for s in shapes
    )
    targets = torch.randint(vocab, (rows,), generator=generator)
    targets[list(ignored)] = -100
    return hidden, weight, offset if bias else None, targets


def upstream_for(loss):
    return torch.linspace(-1, 2, loss.numel(), dtype=loss.dtype).view(loss.shape) + 0.7


def outcome(function, hidden, weight, bias, targets, **options):
    """Return the loss, and the gradients for an upstream gradient that varies by row."""
    loss = function(hidden, weight, targets, bias=bias, **options)
    wanted = [x for x in (hidden, weight, bias) if x is not None and x.requires_grad]
    return loss.detach(), *torch.autograd.grad(loss, wanted, upstream_for(loss))


def assert_close(found, expected, tolerance=1e-12):
    """Compare norms, relative to the expected one."""
    for a, b in zip(found, expected, strict=True):
        assert a.shape == b.shape
        assert (a.double() - b.double()).norm() <= tolerance * b.double().norm()


# ------------------------------------------------------------------ the reference


def by_hand(hidden, weight, bias, target, label_smoothing=0.0, z_loss=0.0, soft_cap=None):
    """Compute one row in plain Python from the papers' formulas: the cross-entropy to a mixture of
    the target and the uniform distribution."""
    x = [
        sum(h * w for h, w in zip(hidden, row, strict=True)) + b
        for row, b in zip(weight, bias, strict=True)
    ]
    if soft_cap is not None:
        x = [soft_cap * math.tanh(logit / soft_cap) for logit in x]
    z = sum(map(math.exp, x))
    wanted = [label_smoothing / len(x)] * len(x)
    wanted[target] += 1 - label_smoothing
    cross = -sum(q * math.log(math.exp(logit) / z) for q, logit in zip(wanted, x, strict=True))
    return cross + z_loss * math.log(z) ** 2


@every_option
def test_the_reference_equals_the_sums_written_out_by_hand(options):
    hidden, weight, bias, targets = inputs()
    found = cross_entropy_reference(hidden, weight, targets, bias=bias, reduction="none", **options)
    for row, target in enumerate(targets.tolist()):
        numbers = (hidden[row].tolist(), weight.tolist(), bias.tolist())
        expected = 0 if target == -100 else by_hand(*numbers, target, **options)
        assert found[row].item() == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("function", [cross_entropy_reference, chunked_cross_entropy])
@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("smoothing", [0.0, 0.1, 1.0])
@pytest.mark.parametrize("ignore_index", [-100, 7])
def test_it_equals_torchs_cross_entropy(function, reduction, smoothing, ignore_index):
    settings = {
        "reduction": reduction,
        "label_smoothing": smoothing,
        "ignore_index": ignore_index,
    }

    def torchs(hidden, weight, targets, bias):
        return F.cross_entropy(F.linear(hidden, weight, bias), targets, **settings)

    *parts, targets = inputs()
    targets[targets == -100] = ignore_index
    expected = outcome(torchs, *parts, targets)
    assert_close(outcome(function, *parts, targets, **settings), expected)


# ------------------------------------------------------------------ values


@every_option
@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("chunk", [1, 3, 4, N, 99, None])
def test_it_equals_the_reference_for_any_chunk_size(chunk, reduction, options):
    settings = {**options, "reduction": reduction}
    expected = outcome(cross_entropy_reference, *inputs(), **settings)
    assert_close(outcome(chunked_cross_entropy, *inputs(), chunk=chunk, **settings), expected)


@pytest.mark.few(8)
@every_option
@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_its_gradients_equal_finite_differences(reduction, options):
    *parts, targets = inputs(rows=5, width=3, vocab=6, ignored=(1,))

    def loss(hidden, weight, bias):
        settings = {**options, "reduction": reduction, "chunk": 2}
        return chunked_cross_entropy(hidden, weight, targets, bias=bias, **settings)

    assert torch.autograd.gradcheck(loss, parts)


@every_option
@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_in_float32_loss_and_gradients_are_within_1e_6(reduction, options):
    shape = {"rows": 96, "width": 64, "vocab": 4096}
    exact = [x.double() if x.is_floating_point() else x for x in inputs(**shape, dtype=torch.float)]
    hidden, weight, bias, targets = (x / 8 if x.is_floating_point() else x for x in exact)
    exact = [x.detach().requires_grad_() for x in (hidden, weight, bias)]
    found = [x.detach().float().requires_grad_() for x in exact]
    settings = {**options, "reduction": reduction}
    assert_close(
        outcome(chunked_cross_entropy, *found, targets, chunk=7, **settings),
        outcome(cross_entropy_reference, *exact, targets, **settings),
        tolerance=1e-6,
    )


def test_batches_of_sequences_are_rows():
    *parts, targets = inputs()
    flat = outcome(chunked_cross_entropy, *parts, targets, reduction="none")
    hidden = parts[0].detach().view(4, 5, C).requires_grad_()
    found = outcome(chunked_cross_entropy, hidden, *parts[1:], targets.view(4, 5), reduction="none")
    assert found[0].shape == (4, 5)
    assert_close([x.flatten() for x in found], [x.flatten() for x in flat])


def test_noncontiguous_hidden_is_accepted():
    *parts, targets = inputs()
    expected = outcome(chunked_cross_entropy, *parts, targets)
    hidden = parts[0].detach().mT.contiguous().mT.requires_grad_()
    assert not hidden.is_contiguous()
    assert_close(outcome(chunked_cross_entropy, hidden, *parts[1:], targets), expected)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int16, torch.int32])
def test_targets_may_be_of_any_integers(dtype):
    *parts, targets = inputs(ignored=())
    expected = outcome(chunked_cross_entropy, *parts, targets)
    assert_close(outcome(chunked_cross_entropy, *parts, targets.to(dtype)), expected)


def test_the_same_tensor_as_hidden_and_weight_gets_both_gradients():
    square = inputs(rows=V)[0]
    targets = torch.arange(V)
    [found] = torch.autograd.grad(chunked_cross_entropy(square, square, targets), square)
    [expected] = torch.autograd.grad(cross_entropy_reference(square, square, targets), square)
    assert_close([found], [expected])


def test_logits_in_the_thousands_do_not_overflow():
    *parts, targets = inputs()
    parts[0] = (parts[0] * 1e4).detach().requires_grad_()
    expected = outcome(cross_entropy_reference, *parts, targets)
    assert expected[0].isfinite()
    assert_close(outcome(chunked_cross_entropy, *parts, targets), expected)


@every_option
@pytest.mark.parametrize("offset", [1e4, -1e4])
def test_a_loss_of_1_is_precise_at_logits_of_ten_thousand(options, offset):
    """Near 1e4, float32 has steps of 1/1024. The inputs are such steps, so the sum is exact."""
    steps = torch.randint(-2000, 2000, (4, 100), generator=torch.Generator().manual_seed(2))
    labels = torch.tensor([[0], [1], [50], [99]])
    found, expected = (
        row_losses_((offset + steps / 1024).to(dtype), labels, None, LossTerms(**options))
        for dtype in (torch.float32, torch.float64)
    )
    assert_close([found], [expected], tolerance=3e-7)


def test_a_token_that_a_bias_excludes_gets_no_gradient():
    hidden, weight, bias, targets = inputs()
    with torch.no_grad():
        bias[0], targets[targets == 0] = -math.inf, 1
    _, of_hidden, of_weight, _ = outcome(chunked_cross_entropy, hidden, weight, bias, targets)
    assert of_hidden.isfinite().all()
    assert not of_weight[0].any()


# ------------------------------------------------------------------ ignored rows


@pytest.mark.parametrize("function", [cross_entropy_reference, chunked_cross_entropy])
@every_option
@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_if_all_rows_are_ignored_loss_and_gradients_are_zero(function, reduction, options):
    settings = {**options, "reduction": reduction}
    for found in outcome(function, *inputs(ignored=range(N)), **settings):
        assert torch.equal(found, torch.zeros_like(found))


@pytest.mark.parametrize("function", [cross_entropy_reference, chunked_cross_entropy])
def test_the_mean_of_no_rows_is_zero(function):
    loss, _, of_weight, _ = outcome(function, *inputs(rows=0, ignored=()))
    assert loss == 0
    assert not of_weight.any()


@every_option
def test_ignored_rows_have_no_effect(options):
    hidden, weight, bias, targets = inputs()
    kept = targets != -100
    found = outcome(chunked_cross_entropy, hidden, weight, bias, targets, chunk=3, **options)
    part = hidden.detach()[kept].requires_grad_()
    expected = outcome(chunked_cross_entropy, part, weight, bias, targets[kept], **options)
    assert not found[1][~kept].any()
    assert_close((found[0], found[1][kept], *found[2:]), expected)


# ------------------------------------------------------------------ autograd


def test_only_required_gradients_are_computed():
    for wanted in product([True, False], repeat=3):
        *parts, targets = inputs()
        expected = outcome(cross_entropy_reference, *parts, targets)[1:]
        for part, want in zip(parts, wanted, strict=True):
            part.requires_grad_(want)
        loss = chunked_cross_entropy(parts[0], parts[1], targets, bias=parts[2])
        assert loss.requires_grad == any(wanted)
        if any(wanted):
            loss.backward(upstream_for(loss))
        for part, want, gradient in zip(parts, wanted, expected, strict=True):
            assert (part.grad is not None) == want
            if want:
                assert_close([part.grad], [gradient])


@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_a_second_backward_pass_gives_the_same_gradients(reduction):
    *parts, targets = inputs()
    loss = chunked_cross_entropy(*parts[:2], targets, bias=parts[2], reduction=reduction)
    grad = partial(torch.autograd.grad, loss, parts)
    first = grad(upstream_for(loss), retain_graph=True)
    kept = [x.clone() for x in first]
    second = grad(-3 * upstream_for(loss), retain_graph=True)
    third = grad(upstream_for(loss))
    assert_close(first, kept, tolerance=0)  # the caller owns these gradients
    assert_close(second, [-3 * x for x in kept])
    assert_close(third, kept)


def test_gradients_can_be_requested_one_at_a_time():
    *parts, targets = inputs()
    expected = outcome(cross_entropy_reference, *parts, targets)[1:]
    loss = chunked_cross_entropy(*parts[:2], targets, bias=parts[2])
    for part, gradient in zip(parts, expected, strict=True):
        [found] = torch.autograd.grad(loss, part, upstream_for(loss), retain_graph=True)
        assert_close([found], [gradient])


def test_without_retain_graph_a_second_backward_pass_raises_torchs_error():
    *parts, targets = inputs()
    loss = chunked_cross_entropy(*parts[:2], targets)
    loss.backward()
    with pytest.raises(RuntimeError, match="backward through the graph a second time"):
        loss.backward()


def test_two_backward_passes_accumulate_in_grad():
    *parts, targets = inputs()
    expected = outcome(cross_entropy_reference, *parts, targets)[1:]
    for _ in range(2):
        loss = chunked_cross_entropy(*parts[:2], targets, bias=parts[2])
        loss.backward(upstream_for(loss))
    assert_close([part.grad for part in parts], [2 * x for x in expected])


def test_weights_changed_after_the_forward_pass_do_not_change_its_gradients():
    hidden, weight, bias, targets = inputs()
    expected = outcome(cross_entropy_reference, hidden, weight, bias, targets)[1:]
    loss = chunked_cross_entropy(hidden, weight, targets, bias=bias)
    with torch.no_grad():
        weight.zero_()
    found = torch.autograd.grad(loss, (hidden, weight, bias), upstream_for(loss), retain_graph=True)
    assert_close(found, expected)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        torch.autograd.grad(loss, hidden)


@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_a_second_derivative_is_an_error(reduction):
    *parts, targets = inputs()
    loss = chunked_cross_entropy(*parts[:2], targets, reduction=reduction)
    with pytest.raises(RuntimeError, match=r"no second derivative.*use cross_entropy_reference"):
        torch.autograd.grad(loss.sum(), parts[:2], create_graph=True)


def test_the_reference_has_a_second_derivative():
    hidden, weight, _, targets = inputs(rows=4, width=2, vocab=3, ignored=(1,))
    loss = partial(cross_entropy_reference, targets=targets, soft_cap=3.0, z_loss=0.1)
    assert torch.autograd.gradgradcheck(loss, (hidden, weight))


def test_dropping_the_loss_frees_its_gradients():
    *parts, targets = inputs()
    gc.disable()  # no cycle collector
    try:
        loss = chunked_cross_entropy(*parts[:2], targets)
        gradient = weakref.ref(loss.grad_fn.gradients[1])
        assert gradient() is not None
        del loss
        assert gradient() is None
    finally:
        gc.enable()


# ------------------------------------------------------------------ low precision


LOW = [torch.bfloat16, torch.float16]


@every_option
@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("dtype", LOW)
def test_in_low_precision_its_error_is_at_most_the_references(dtype, reduction, options):
    settings = {**options, "reduction": reduction}
    *parts, targets = inputs(rows=64, width=32, vocab=100, dtype=dtype)
    exact = [x.detach().double().requires_grad_() for x in parts]
    expected = outcome(cross_entropy_reference, *exact, targets, **settings)
    found = outcome(chunked_cross_entropy, *parts, targets, chunk=5, **settings)
    naive = outcome(cross_entropy_reference, *parts, targets, **settings)
    assert [x.dtype for x in found] == [torch.float32, dtype, dtype, dtype]
    for ours, theirs, e in zip(found, naive, expected, strict=True):
        ours, theirs = (((x.double() - e).norm() / e.norm()).item() for x in (ours, theirs))
        assert ours <= 1.1 * theirs + 1e-4
        assert ours < 2 * torch.finfo(dtype).eps


def test_the_gradient_of_bfloat16_weights_is_summed_in_float32():
    """Each chunk's part is a thousandth of the sum, so bfloat16 would round it away."""
    rows = 2000
    hidden = torch.ones(rows, 1, dtype=torch.bfloat16)
    weight = torch.zeros(2, 1, dtype=torch.bfloat16, requires_grad=True)
    targets = torch.zeros(rows, dtype=torch.long)
    chunked_cross_entropy(hidden, weight, targets, chunk=1, reduction="sum").backward()
    assert weight.grad.flatten().tolist() == [-rows / 2, rows / 2]


def test_a_loss_scale_reaches_gradients_before_float16_rounds_them():
    """Without the scale, the gradients are near float16's smallest value, 6e-8."""
    hidden, weight, _, targets = inputs(rows=64, dtype=torch.float16, ignored=())
    exact = weight.detach().double().requires_grad_()
    (cross_entropy_reference(hidden.double(), exact, targets) * 2**-16).backward()

    def error(scale):
        loss = chunked_cross_entropy(hidden, weight, targets) * 2**-16
        [found] = torch.autograd.grad(loss * scale, weight)
        return (found.double() / scale - exact.grad).norm() / exact.grad.norm()

    assert error(2**16) < 1e-3 < 0.01 < error(1)


@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("dtype", LOW)
def test_autocast_lowers_matmuls_and_gradients_have_the_inputs_dtype(dtype, reduction):
    *parts, targets = inputs(rows=64, width=32, vocab=100, dtype=torch.float32)
    low = [x.detach().to(dtype).requires_grad_() for x in parts[:2]]
    with torch.autocast("cpu", dtype):
        loss = chunked_cross_entropy(*parts[:2], targets, bias=parts[2], reduction=reduction)
    found = torch.autograd.grad(loss, parts, upstream_for(loss), retain_graph=True)
    again = torch.autograd.grad(loss, parts, upstream_for(loss))
    assert {x.dtype for x in (loss, *found)} == {torch.float32}
    assert_close(again, found, tolerance=1e-6)
    bias = torch.zeros(100, dtype=dtype, requires_grad=True)
    parts[2] = torch.zeros(100)
    with torch.autocast("cpu", dtype):
        loss = chunked_cross_entropy(*parts[:2], targets, bias=parts[2], reduction=reduction)
    lowered = outcome(chunked_cross_entropy, *low, bias, targets, reduction=reduction)
    assert torch.equal(loss.detach(), lowered[0])
    assert_close(
        [x.to(dtype) for x in torch.autograd.grad(loss, parts[:2], upstream_for(loss))],
        lowered[1:3],
        tolerance=0,
    )


def test_autocast_does_not_change_float64():
    expected = outcome(chunked_cross_entropy, *inputs())
    with torch.autocast("cpu", torch.bfloat16):
        found = outcome(chunked_cross_entropy, *inputs())
    assert_close(found, expected, tolerance=0)


@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_autocast_around_backward_has_no_effect(reduction):
    *parts, targets = inputs(rows=64, width=32, dtype=torch.float32)
    loss = chunked_cross_entropy(*parts[:2], targets, bias=parts[2], reduction=reduction)
    grad = partial(torch.autograd.grad, loss, parts, upstream_for(loss), retain_graph=True)
    expected = grad()
    with torch.autocast("cpu", torch.bfloat16):
        assert_close(grad(), expected, tolerance=1e-6)


def test_autocast_accepts_hidden_of_another_dtype():
    hidden, weight, _, targets = inputs(dtype=torch.float32)
    hidden = hidden.detach().bfloat16().requires_grad_()
    with torch.autocast("cpu", torch.bfloat16):
        found = outcome(chunked_cross_entropy, hidden, weight, None, targets)
    assert [x.dtype for x in found] == [torch.float32, torch.bfloat16, torch.float32]


# ------------------------------------------------------------------ bytes


ROWS, WIDTH, VOCAB = 2048, 512, 32_000
SMALL = (48, 16, 300)


def alive_at_peak(
    function, rows, width, vocab, dtype=torch.float32, wanted=(True, True), **options
):
    """Return bytes beyond the inputs of forward and backward, or without gradients of forward."""
    hidden = torch.zeros(rows, width, dtype=dtype, requires_grad=wanted[0])
    weight = torch.zeros(vocab, width, dtype=dtype, requires_grad=wanted[1])
    targets = torch.zeros(rows, dtype=torch.long)

    def step():
        loss = function(hidden, weight, targets, **options)
        if any(wanted):
            loss.backward(torch.ones_like(loss))

    given = hidden.nbytes + weight.nbytes + targets.nbytes
    return memlab.measure(step).peak_bytes - given


def of_each_row(rows):
    """A label (8), a loss and a factor (4 each), and the ignore mask (1)."""
    return 17 * rows


def peak_formula(rows, width, vocab, chunk):
    """A chunk's logits, its part of the gradient of hidden, both gradients, and row tensors."""
    gradients = 4 * rows * width + 4 * vocab * width
    return 4 * chunk * vocab + 4 * chunk * width + gradients + of_each_row(rows)


@pytest.mark.few(1)
@pytest.mark.parametrize("chunk", [32, 256, None])
def test_the_peak_is_a_chunk_and_both_gradients(chunk):
    rows = chunk or chunk_rows(ROWS, VOCAB, WIDTH)
    with memlab.dry_run():
        found = alive_at_peak(chunked_cross_entropy, ROWS, WIDTH, VOCAB, chunk=chunk)
    assert found == peak_formula(ROWS, WIDTH, VOCAB, rows)
    assert found <= 100 * 2**20


def test_the_reference_takes_750_mib():
    with memlab.dry_run():
        by_all = partial(alive_at_peak, rows=ROWS, width=WIDTH, vocab=VOCAB)
        naive = by_all(lambda h, w, t: F.cross_entropy(F.linear(h, w), t))
        reference = by_all(cross_entropy_reference)
    assert 3 * 4 * ROWS * VOCAB <= naive <= reference


@pytest.mark.few(2)
@pytest.mark.parametrize("chunk", quick([5], [1, 5, 48]))
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_a_dry_run_has_the_bytes_of_a_real_one(chunk, options):
    found = alive_at_peak(chunked_cross_entropy, *SMALL, chunk=chunk, **options)
    with memlab.dry_run():
        assert alive_at_peak(chunked_cross_entropy, *SMALL, chunk=chunk, **options) == found


def test_gradients_that_are_not_required_take_no_memory():
    (rows, width, vocab), chunk = SMALL, 6
    peak = partial(alive_at_peak, chunked_cross_entropy, *SMALL, chunk=chunk)
    both = peak_formula(*SMALL, chunk)
    assert peak() == both
    assert peak(wanted=(True, False)) == both - 4 * vocab * width
    # No gradient of hidden and no chunk's part of it; at the peak the row sums are alive.
    only_weight = 4 * chunk * vocab + 4 * vocab * width + of_each_row(rows)
    assert 0 < peak(wanted=(False, True)) - only_weight <= 32 * chunk
    nothing = 4 * chunk * vocab + of_each_row(rows)
    assert 0 < peak(wanted=(False, False)) - nothing <= 32 * chunk


@pytest.mark.parametrize("without", [torch.no_grad, torch.inference_mode])
def test_without_grad_mode_no_gradient_is_computed(without):
    rows, width, vocab = SMALL
    hidden, weight = (torch.zeros(n, width, requires_grad=True) for n in (rows, vocab))
    targets = torch.zeros(rows, dtype=torch.long)

    def step():
        with without():
            assert not chunked_cross_entropy(hidden, weight, targets, chunk=6).requires_grad

    given = hidden.nbytes + weight.nbytes + targets.nbytes
    frozen = alive_at_peak(chunked_cross_entropy, *SMALL, wanted=(False, False), chunk=6)
    assert memlab.measure(step).peak_bytes - given == frozen


def test_a_soft_cap_takes_a_second_chunk_for_its_slope():
    peak = partial(alive_at_peak, chunked_cross_entropy, *SMALL, chunk=6)
    _, width, vocab = SMALL
    rows_sums = peak(soft_cap=30.0) - (peak() - 4 * 6 * width + 4 * 6 * vocab)
    assert 0 < rows_sums <= 32 * 6
    # Without gradients, no slope is needed.
    assert peak(soft_cap=30.0, wanted=(False, False)) == peak(wanted=(False, False))


def test_in_bfloat16_sums_are_float32_and_a_chunks_gradient_exists_twice():
    (rows, width, vocab), chunk = (2048, 64, 300), 256
    found = alive_at_peak(chunked_cross_entropy, rows, width, vocab, torch.bfloat16, chunk=chunk)
    gradients = 4 * rows * width + 4 * vocab * width
    a_chunk = 6 * chunk * vocab + 2 * chunk * width
    assert found == a_chunk + gradients + of_each_row(rows)


def test_autocast_adds_its_copy_of_the_weight():
    (rows, width, vocab), chunk = SMALL, 12
    with torch.autocast("cpu", torch.bfloat16):
        found = alive_at_peak(chunked_cross_entropy, *SMALL, chunk=chunk)
    gradients = 4 * rows * width + 4 * vocab * width
    a_chunk = 6 * chunk * vocab + 4 * chunk * width  # hidden cast by autocast, and its gradient
    assert found == a_chunk + gradients + 2 * vocab * width + of_each_row(rows)


def test_losses_per_row_keep_no_gradients_until_backward():
    (rows, width, vocab), chunk = SMALL, 6
    hidden = torch.zeros(rows, width, requires_grad=True)
    weight = torch.zeros(vocab, width, requires_grad=True)
    targets = torch.zeros(rows, dtype=torch.long)

    def forward(reduction, kept):
        settings = {"chunk": chunk, "reduction": reduction}
        kept.append(chunked_cross_entropy(hidden, weight, targets, **settings))

    alive = {}
    for reduction in ("mean", "none"):
        live_bytes = memlab.measure(partial(forward, reduction, [])).live_bytes
        alive[reduction] = live_bytes - hidden.nbytes - weight.nbytes - targets.nbytes
    gradients = 4 * rows * width + 4 * vocab * width
    assert alive == {"mean": gradients + 4 + 8, "none": 4 * rows}  # the loss and the row count


@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_autograd_saves_only_the_inputs(reduction):
    *parts, targets = inputs()
    kept = []

    def keep(tensor):
        kept.append(tensor)
        return tensor

    with saved_tensors_hooks(keep, lambda tensor: tensor):
        chunked_cross_entropy(*parts[:2], targets, bias=parts[2], reduction=reduction)
    # The Function divides by the row count internally, so autograd saves nothing for it.
    assert {x.data_ptr() for x in kept} == {x.data_ptr() for x in (*parts, targets)}


def test_the_weights_grad_is_the_gradient_without_a_copy():
    *parts, targets = inputs()
    loss = chunked_cross_entropy(*parts[:2], targets)
    made = loss.grad_fn.gradients[1].data_ptr()
    loss.backward()
    assert parts[1].grad.data_ptr() == made


# ------------------------------------------------------------------ chunk size


@pytest.mark.parametrize("rows", [1, 7, 100, 2048, 65_536])
@pytest.mark.parametrize("vocab", [256, 32_000, 128_256])
@pytest.mark.parametrize("width", [32, 4096])
def test_the_default_chunk_has_at_most_half_the_gradients_and_an_eighth_of_the_logits(
    rows, vocab, width
):
    def is_too_much(chunk: float) -> bool:
        is_most_of_all = chunk > 64 and 8 * chunk > rows
        return 2 * chunk * vocab > (rows + vocab) * width or is_most_of_all

    chunk = chunk_rows(rows, vocab, width)
    assert 1 <= chunk <= rows
    assert chunk == 1 or not is_too_much(chunk)
    fewest = math.ceil(rows / chunk)
    larger = math.ceil(rows / (fewest - 1)) if fewest > 1 else math.inf
    assert is_too_much(larger)  # with one chunk less


def test_the_default_is_256_rows_of_2048_at_32000_tokens_and_512_wide():
    assert chunk_rows(ROWS, VOCAB, WIDTH) == 256


def test_a_chunk_of_no_rows_is_one():
    assert chunk_rows(0, VOCAB, WIDTH) == 1


# ------------------------------------------------------------------ models


def test_it_works_as_the_loss_of_a_model_with_tied_weights():
    tokens, targets = torch.randint(256, (2, 3, 48)).unbind()
    found = []
    for plug in ({}, {"loss": chunked_cross_entropy}):
        torch.manual_seed(0)
        model = GPT(PRESETS["tiny"], **plug, dtype=torch.float64)
        loss = model(tokens, targets)
        loss.backward()
        found.append([loss, *(p.grad for p in model.parameters())])
    assert_close(found[1], found[0])


@pytest.mark.parametrize(
    "others", ["plain", "autocast", "bfloat16", "loss-scaling", "accumulation"]
)
def test_it_combines_with_other_techniques_in_a_training_step(others):
    losses = {}
    for name, row in {"all": {}, "chunked": {"loss": chunked_cross_entropy}}.items():
        technique = Plugs(**{**vars(combined(others)), **row})
        training = build(Setting("tiny", batch=2, seq_len=32), technique)
        for _ in range(3):
            training.step()
        losses[name] = torch.cat([p.detach().flatten() for p in training.model.parameters()])
    assert_close([losses["chunked"]], [losses["all"]], tolerance=0.02)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, *LOW])
def test_on_a_gpu_it_equals_the_reference_and_has_the_dry_runs_peak(dtype):
    shape = (512, 64, 4096)
    *parts, targets = inputs(*shape, dtype=dtype, bias=False)
    parts = [x.detach().cuda().requires_grad_() for x in parts[:2]]
    exact = [x.detach().double().requires_grad_() for x in parts]
    found = outcome(chunked_cross_entropy, *parts, None, targets.cuda())
    expected = outcome(cross_entropy_reference, *exact, None, targets.cuda())
    assert_close(found, expected, tolerance=max(1e-5, 2 * torch.finfo(dtype).eps))
    with torch.device("cuda"):
        peak = alive_at_peak(chunked_cross_entropy, *shape, dtype)
    with memlab.dry_run():
        assert alive_at_peak(chunked_cross_entropy, *shape, dtype) == peak


# ------------------------------------------------------------------ errors


@pytest.mark.parametrize("function", [cross_entropy_reference, chunked_cross_entropy])
@pytest.mark.parametrize(
    ("changed", "error", "message"),
    [
        ({"weight": torch.zeros(V)}, ValueError, r"a weight of shape \(33,\); give \(V, C\)"),
        ({"hidden": torch.zeros(N, 9)}, ValueError, r"hidden of shape \(20, 9\); give \(…, 8\)"),
        ({"targets": torch.zeros(4, 5).long()}, ValueError, r"shape \(4, 5\); give \(20,\)"),
        ({"bias": torch.zeros(C)}, ValueError, r"a bias of shape \(8,\); give \(33,\)"),
        ({"targets": torch.zeros(N)}, TypeError, "targets of torch.float32; give token indices"),
        (
            {"targets": torch.zeros(N).bool()},
            TypeError,
            "targets of torch.bool; give token indices",
        ),
        ({"targets": torch.full((N,), V)}, IndexError, "target 33; give 0 to 32, .*=-100"),
        ({"targets": torch.full((N,), -1)}, IndexError, "target -1; give 0 to 32"),
        ({"ignore_index": 0}, IndexError, "target -100; give 0 to 32, .*ignore_index=0"),
        ({"hidden": torch.zeros(N, C).half()}, TypeError, "float16 and float32 in .*autocast"),
        ({"weight": torch.zeros(V, C).long()}, TypeError, "float32 and int64; give floating"),
        ({"label_smoothing": 1.1}, ValueError, "label_smoothing=1.1; .* from 0 to 1"),
        ({"label_smoothing": math.nan}, ValueError, "label_smoothing=nan"),
        ({"z_loss": -1e-4}, ValueError, "z_loss=-0.0001; .* 0 or more"),
        ({"soft_cap": 0.0}, ValueError, "soft_cap=0.0; .* None for no cap"),
        ({"soft_cap": math.inf}, ValueError, "soft_cap=inf"),
        ({"reduction": "median"}, ValueError, "reduction='median'; choose one of mean, sum, none"),
    ],
)
def test_bad_input_is_an_error_that_names_it(function, changed, error, message):
    hidden, weight, bias, targets = inputs(dtype=torch.float32)
    given = {"hidden": hidden, "weight": weight, "bias": bias, "targets": targets, **changed}
    with pytest.raises(error, match=message):
        function(**given)


@pytest.mark.parametrize("chunk", [0, -1])
def test_a_chunk_below_one_row_is_an_error(chunk):
    *parts, targets = inputs()
    with pytest.raises(ValueError, match=f"chunk={chunk}; give at least 1 row"):
        chunked_cross_entropy(*parts[:2], targets, chunk=chunk)


# ------------------------------------------------------------------ log-probabilities of tokens


def all_log_probs(hidden, weight, tokens, *, bias=None, temperature=1.0):
    """From all logits, by torch."""
    logits = F.linear(hidden, weight, bias) / temperature
    return logits.log_softmax(-1).gather(-1, tokens.unsqueeze(-1)).squeeze(-1)


@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("chunk", [None, 1, 7])
def test_log_probs_and_their_gradients_are_those_of_all_logits(temperature, chunk):
    hidden, weight, _, tokens = inputs(bias=False, ignored=())
    options = {"temperature": temperature}
    mine = outcome(token_log_probs, hidden, weight, None, tokens, chunk=chunk, **options)
    theirs = outcome(all_log_probs, hidden, weight, None, tokens, **options)
    for one, other in zip(mine, theirs, strict=True):
        assert_close([one], [other])


def test_an_ignored_token_has_log_probability_zero_and_no_gradient():
    hidden, weight, _, tokens = inputs(bias=False)
    found = token_log_probs(hidden, weight, tokens)
    [gradient] = torch.autograd.grad(found.sum(), [hidden])
    ignored = tokens == -100
    assert (found[ignored] == 0).all()
    assert (gradient[ignored] == 0).all()
    assert (gradient[~ignored].abs().sum(-1) > 0).all()


def test_log_probs_without_gradients_need_one_chunk_of_logits():
    """As for the reference model of DPO."""
    rows, width, vocab, chunk = 256, 8, 1000, 16
    hidden, weight, _, tokens = inputs(rows, width, vocab, torch.float32, bias=False, ignored=())

    def step():
        with torch.no_grad():
            token_log_probs(hidden, weight, tokens, chunk=chunk)

    before = sum(x.nbytes for x in (hidden, weight, tokens))
    most = memlab.measure(step).peak_bytes - before
    all_at_once = 4 * rows * vocab
    assert 4 * chunk * vocab <= most < all_at_once / 4


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"temperature": 0.0}, "got temperature=0.0; give a number above 0"),
        ({"temperature": 2.0, "soft_cap": 3.0}, "with a soft cap or a bias"),
    ],
)
def test_temperatures_that_have_no_meaning_are_an_error(options, message):
    hidden, weight, _, tokens = inputs(bias=False)
    with pytest.raises(ValueError, match=message):
        token_log_probs(hidden, weight, tokens, **options)


# ------------------------------------------------------------------ inputs it cannot read


def test_meta_tensors_have_a_loss_and_gradients_of_the_right_shapes_as_in_torch():
    for function in (chunked_cross_entropy, cross_entropy_reference):
        hidden, weight = (torch.empty(n, 8, device="meta", requires_grad=True) for n in (20, 30))
        targets = torch.empty(20, dtype=torch.int64, device="meta")
        loss = function(hidden, weight, targets)
        gradients = torch.autograd.grad(loss, (hidden, weight))
        assert [x.shape for x in (loss, *gradients)] == [(), (20, 8), (30, 8)]
        assert loss.is_meta


@pytest.mark.parametrize("place", range(3))
def test_a_sparse_tensor_is_an_error_in_one_sentence(place):
    given = [torch.ones(4, 3), torch.ones(5, 3), torch.zeros(4, dtype=torch.int64)]
    given[place] = given[place].to_sparse()
    with pytest.raises(TypeError, match=r"got a tensor of layout torch.sparse_coo; give hidden, w"):
        chunked_cross_entropy(*given)


def test_under_vmap_the_reference_works_and_the_chunks_are_refused_in_one_sentence():
    hidden, weight = torch.randn(2, 4, 3).double(), torch.randn(5, 3).double()
    targets = torch.arange(8).view(2, 4) % 5
    found = torch.vmap(lambda h, t: cross_entropy_reference(h, weight, t))(hidden, targets)
    wanted = [F.cross_entropy(h @ weight.T, t) for h, t in zip(hidden, targets, strict=True)]
    assert_close(found, torch.stack(wanted))
    with pytest.raises(RuntimeError, match=r"got chunked_cross_entropy inside vmap, .*; use cross"):
        torch.vmap(lambda h, t: chunked_cross_entropy(h, weight, t))(hidden, targets)


def test_a_vocabulary_of_no_tokens_is_an_error():
    with pytest.raises(ValueError, match=r"\(0, 3\); give \(V, C\), V at least 1"):
        chunked_cross_entropy(torch.ones(4, 3), torch.ones(0, 3), torch.zeros(4).long())
    with pytest.raises(ValueError, match="got rows=10, vocab_size=0 and width=10; give at least"):
        chunk_rows(10, 0, 10)
