"""The loss in a kernel: within 1e-6 of float64 by way of all the logits, and no byte more."""

import math
from functools import partial

import pytest
import torch
import triton
import triton.language as tl
from torch.nn import functional as F

import memlab
from memlab import losses
from memlab.kernels.launching import launch
from memlab.kernels.losses import _tanh, chunked_cross_entropy, rows_
from memlab.losses import LossTerms, cross_entropy_reference, row_losses_
from memlab.model import GPT, PRESETS

N, C, V = 20, 8, 33
OPTIONS = {
    "plain": {},
    "smoothed": {"label_smoothing": 0.1},
    "z-loss": {"z_loss": 0.01},
    "capped": {"soft_cap": 3.0},
    "all": {"label_smoothing": 0.2, "z_loss": 0.03, "soft_cap": 2.0},
}
every_option = pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
every_reduction = pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
of_infinities = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy's


def inputs(device, rows=N, vocab=V, dtype=torch.float32, bias=True, ignored=(3, 4, 5, 6, 7, 15)):
    """hidden, weight and bias, which want gradients, and targets, some of them ignored."""
    generator = torch.Generator().manual_seed(0)
    hidden, weight, offset = (
        (torch.randn(s, generator=generator) / 2).to(device, dtype).requires_grad_()
        for s in ((rows, C), (vocab, C), (vocab,))
    )
    targets = torch.randint(vocab, (rows,), generator=generator)
    targets[list(ignored)] = -100
    return hidden, weight, offset if bias else None, targets.to(device)


def exact(parts):
    return [
        x.detach().double().requires_grad_() if x is not None and x.is_floating_point() else x
        for x in parts
    ]


def upstream_for(loss):
    numbers = torch.linspace(-1, 2, loss.numel(), dtype=loss.dtype, device=loss.device)
    return numbers.view(loss.shape) + 0.7


def outcome(function, hidden, weight, bias, targets, **options):
    """The loss, and the gradients under an upstream gradient that is neither 1 nor the same for
    all rows."""
    loss = function(hidden, weight, targets, bias=bias, **options)
    wanted = [x for x in (hidden, weight, bias) if x is not None]
    return loss.detach(), *torch.autograd.grad(loss, wanted, upstream_for(loss))


def assert_close(found, expected, tolerance=1e-6, or_below=0.0):
    """In length, relative to what is expected."""
    for a, b in zip(found, expected, strict=True):
        assert a.shape == b.shape
        assert (a.double() - b.double()).norm() <= max(tolerance * b.double().norm(), or_below)


def error(found, expected):
    return ((found.double() - expected).norm() / expected.norm()).item()


def assert_as_near(found, others, expected, tolerance=2e-7):
    """To what is expected, as others are that err in the same products of float32."""
    for ours, theirs, e in zip(found, others, expected, strict=True):
        assert error(ours, e) <= error(theirs, e) + tolerance


# ------------------------------------------------------------------ values


@every_option
@every_reduction
@pytest.mark.parametrize("chunk", [7, None])
def test_losses_and_gradients_are_within_1e_6_of_the_reference_in_float64(
    chunk, reduction, options, device
):
    parts = inputs(device)
    settings = {**options, "reduction": reduction}
    expected = outcome(cross_entropy_reference, *exact(parts), **settings)
    found = outcome(chunked_cross_entropy, *parts, chunk=chunk, **settings)
    assert found[0].dtype == torch.float32
    assert_close(found, expected)
    chunked = outcome(losses.chunked_cross_entropy, *parts, chunk=chunk, **settings)
    assert_close(found, chunked)


@every_option
def test_a_vocabulary_may_be_several_blocks_and_a_part_of_one(options, device):
    for vocab in (2048, 2049, 5000):
        parts = inputs(device, rows=5, vocab=vocab, ignored=(2,))
        expected = outcome(cross_entropy_reference, *exact(parts), **options)
        found = outcome(chunked_cross_entropy, *parts, chunk=3, **options)
        chunked = outcome(losses.chunked_cross_entropy, *parts, chunk=3, **options)
        assert_close(found, chunked)
        assert_as_near(found, chunked, expected)


@pytest.mark.parametrize("vocab", [1, 2, 31, 32, 33])
def test_a_vocabulary_may_be_small(vocab, device):
    parts = inputs(device, rows=3, vocab=vocab, ignored=())
    found = outcome(chunked_cross_entropy, *parts)
    for ours, theirs in zip(found, outcome(cross_entropy_reference, *exact(parts)), strict=True):
        torch.testing.assert_close(ours.double(), theirs, rtol=1e-6, atol=1e-7)


def test_it_is_torch_s_cross_entropy(device):
    hidden, weight, bias, targets = inputs(device)
    settings = {"label_smoothing": 0.1, "ignore_index": 5}
    targets[targets == -100] = 5
    expected = F.cross_entropy(F.linear(hidden, weight, bias).double(), targets, **settings)
    found = chunked_cross_entropy(hidden, weight, targets, bias=bias, **settings)
    assert found.item() == pytest.approx(expected.item(), rel=1e-6)


# ------------------------------------------------------------------ rows of logits


def rows_and_reference(x, labels, factors, **options):
    """(losses, gradients) of the kernel, and of memlab.losses in float64."""
    found = []
    for function, dtype in ((rows_, torch.float32), (row_losses_, torch.float64)):
        logits = x.to(dtype).clone()
        by_row = None if factors is None else factors.to(dtype)
        found.append((function(logits, labels, by_row, LossTerms(**options)), logits))
    return found


def column(numbers, device, dtype=torch.float32):
    return torch.tensor(numbers, device=device, dtype=dtype).view(-1, 1)


@every_option
def test_of_labels_at_the_edges_of_blocks_each_row_is_right(options, device):
    labels = [0, 1, 2047, 2048, 4095, 4096, 4999]
    x = (torch.randn(len(labels), 5000, generator=torch.Generator().manual_seed(1)) * 3).to(device)
    factors = torch.linspace(-1, 2, len(labels), device=device).view(-1, 1) + 0.3
    found = rows_and_reference(x, column(labels, device, torch.int64), factors, **options)
    (ours, gradient), (theirs, expected) = found
    assert_close([ours, gradient], [theirs, expected])
    for row, label in enumerate(labels):  # 1 − p has fewer digits where p is near 1
        assert_close([ours[row], gradient[row]], [theirs[row], expected[row]], 5e-6)
        assert_close([gradient[row, label]], [expected[row, label]], 5e-6)


@every_option
@pytest.mark.parametrize("offset", [1e4, -1e4])
def test_at_logits_of_ten_thousand_a_loss_of_1_keeps_its_digits(options, offset, device):
    """A float32 near 1e4 has steps of 1/1024, which these are: nothing is lost before the sum."""
    steps = torch.randint(-2000, 2000, (4, 100), generator=torch.Generator().manual_seed(2))
    x = (offset + steps / 1024).to(device)
    labels, factors = column([0, 1, 50, 99], device, torch.int64), column([1.0] * 4, device)
    (ours, gradient), (theirs, expected) = rows_and_reference(x, labels, factors, **options)
    assert_close([ours, gradient], [theirs, expected], tolerance=3e-7)


def test_logits_from_minus_to_plus_ten_thousand_overflow_nothing(device):
    x = torch.linspace(-1e4, 1e4, 300, device=device).repeat(3, 1)
    labels, factors = column([0, 150, 299], device, torch.int64), column([1.0, 2.0, 3.0], device)
    for options in OPTIONS.values():
        (ours, gradient), (theirs, expected) = rows_and_reference(x, labels, factors, **options)
        # A cap's slope is exactly 0 in float32 where it is 1e-9.
        assert_close([ours, gradient], [theirs, expected], or_below=1e-7)


def test_the_maximum_may_rise_with_every_block_or_fall(device):
    rising = torch.arange(5000, device=device) / 50.0
    x = torch.stack([rising, -rising, rising.roll(2500)])
    labels, factors = column([4990, 3, 7], device, torch.int64), column([1.0] * 3, device)
    (ours, gradient), (theirs, expected) = rows_and_reference(x, labels, factors)
    assert_close([ours, gradient], [theirs, expected])


@of_infinities
def test_a_token_that_minus_infinity_excludes_gets_no_gradient(device):
    x = torch.randn(2, 50, device=device)
    x[0, 3], x[1, 5:] = -math.inf, -math.inf
    labels, factors = column([0, 1], device, torch.int64), column([1.0, 1.0], device)
    (ours, gradient), (theirs, expected) = rows_and_reference(x, labels, factors)
    assert_close([ours, gradient], [theirs, expected])
    assert not gradient[1, 5:].any()


@of_infinities
@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("options", [{}, {"label_smoothing": 0.1}], ids=["plain", "smoothed"])
def test_a_logit_that_is_no_number_makes_its_row_nan_and_no_other(bad, options, device):
    x = torch.randn(3, 3000, device=device)
    x[1, 2900] = bad
    labels, factors = column([0, 1, 2], device, torch.int64), column([1.0] * 3, device)
    (ours, gradient), (theirs, expected) = rows_and_reference(x, labels, factors, **options)
    assert gradient[1].isnan().all()
    assert expected[1].isnan().all()
    assert not ours[1].isfinite()
    assert_close([ours[[0, 2]], gradient[[0, 2]]], [theirs[[0, 2]], expected[[0, 2]]])


@pytest.mark.parametrize("label", [-1, V, 2**40])
def test_a_target_outside_the_vocabulary_makes_its_row_nan_and_reads_no_other(label, device):
    x = torch.randn(3, V, device=device)
    labels, factors = column([0, label, 2], device, torch.int64), column([1.0] * 3, device)
    right = column([0, 1, 2], device, torch.int64)
    gradient, expected = x.clone(), x.clone()
    found = rows_(gradient, labels, factors, LossTerms())
    wanted = rows_(expected, right, factors, LossTerms())
    assert found[1].isnan()
    assert gradient[1].isnan().all()
    assert torch.equal(found[[0, 2]], wanted[[0, 2]])
    assert torch.equal(gradient[[0, 2]], expected[[0, 2]])


def test_a_row_with_a_factor_of_zero_is_not_read(device):
    x = torch.full((2, 3000), math.nan, device=device)
    x[0] = 0.0
    found = rows_(x, column([1, 1], device, torch.int64), column([1.0, 0.0], device), LossTerms())
    assert found[0].item() == pytest.approx(math.log(3000), rel=1e-6)
    assert found[1] == 0
    assert not x[1].any()


def test_without_factors_the_logits_are_left_alone(device):
    x = torch.randn(4, 100, device=device)
    before = x.clone()
    found = rows_(x, column([0, 1, 2, 3], device, torch.int64), None, LossTerms())
    assert torch.equal(x, before)
    assert_close(
        [found[:, 0]], [F.cross_entropy(x, torch.arange(4, device=device), reduction="none")]
    )


@triton.jit
def _tanh_kernel(u_ptr, out_ptr, COUNT: tl.constexpr):
    places = tl.arange(0, COUNT)
    tl.store(out_ptr + places, _tanh(tl.load(u_ptr + places)))


def test_the_hyperbolic_tangent_is_within_4_units_in_the_last_place(device):
    sizes = torch.logspace(-30, 3, 4096, dtype=torch.float64)
    near = torch.linspace(0.6, 0.65, 4096, dtype=torch.float64)
    u = torch.cat([sizes, -sizes, near, -near]).float().to(device)
    found = torch.empty_like(u)
    launch(_tanh_kernel, (1,), u, found, COUNT=len(u))
    expected = u.double().tanh()
    assert ((found.double() - expected) / expected).abs().max() < 2**-21


# ------------------------------------------------------------------ ignored rows


@every_option
@every_reduction
def test_where_all_rows_are_ignored_loss_and_gradients_are_zero(reduction, options, device):
    parts = inputs(device, ignored=range(N))
    for found in outcome(chunked_cross_entropy, *parts, **options, reduction=reduction):
        assert torch.equal(found, torch.zeros_like(found))


def test_of_no_rows_the_mean_is_zero(device):
    loss, _, of_weight, _ = outcome(chunked_cross_entropy, *inputs(device, rows=0, ignored=()))
    assert loss == 0
    assert not of_weight.any()


# ------------------------------------------------------------------ what autograd asks


@every_reduction
def test_a_second_backward_pass_finds_the_same_gradients(reduction, device):
    hidden, weight, bias, targets = inputs(device)
    loss = chunked_cross_entropy(hidden, weight, targets, bias=bias, reduction=reduction)
    grad = partial(torch.autograd.grad, loss, (hidden, weight, bias))
    first = grad(upstream_for(loss), retain_graph=True)
    kept = [x.clone() for x in first]
    second = grad(-3 * upstream_for(loss))
    assert_close(first, kept, tolerance=0)
    assert_close(second, [-3 * x for x in kept])


def test_an_upstream_gradient_that_all_rows_share_may_be_one_number(device):
    hidden, weight, _, targets = inputs(device)
    by_row = chunked_cross_entropy(hidden, weight, targets, reduction="none").sum()  # expanded
    total = chunked_cross_entropy(hidden, weight, targets, reduction="sum")
    found = torch.autograd.grad(by_row, (hidden, weight))
    assert_close(found, torch.autograd.grad(total, (hidden, weight)))


def test_without_a_gradient_there_is_a_loss(device):
    parts = inputs(device)
    with torch.no_grad():
        found = chunked_cross_entropy(parts[0], parts[1], parts[3], bias=parts[2])
    expected = cross_entropy_reference(*exact(parts)[:2], parts[3], bias=parts[2].double())
    assert found.item() == pytest.approx(expected.item(), rel=1e-6)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@every_option
def test_of_low_precision_it_is_memlab_s_but_for_a_rounding(dtype, options, device):
    parts = inputs(device, dtype=dtype)
    found = outcome(chunked_cross_entropy, *parts, chunk=7, **options)
    expected = outcome(losses.chunked_cross_entropy, *parts, chunk=7, **options)
    assert [x.dtype for x in found] == [x.dtype for x in expected]
    assert_close(found[:1], expected[:1])
    assert_close(found[1:], expected[1:], tolerance=torch.finfo(dtype).eps / 4)


def test_of_float64_it_is_memlab_s_own(device):
    parts = exact(inputs(device))
    found = outcome(chunked_cross_entropy, *parts, soft_cap=3.0)
    expected = outcome(losses.chunked_cross_entropy, *parts, soft_cap=3.0)
    assert_close(found, expected, tolerance=0)


def test_it_is_the_loss_of_a_model_with_tied_weights(device):
    tokens, targets = torch.randint(256, (2, 1, 24), device=device).unbind()
    found = []
    for loss_of in (losses.chunked_cross_entropy, chunked_cross_entropy):
        torch.manual_seed(0)
        model = GPT(PRESETS["tiny"], loss=loss_of).to(device)
        loss = model(tokens, targets)
        loss.backward()
        found.append([loss, *(p.grad for p in model.parameters())])
    assert_close(found[1], found[0], tolerance=2e-6)


# ------------------------------------------------------------------ bytes


SMALL = (48, 16, 300)


def peak_bytes(function, rows, width, vocab, chunk, wanted=(True, True), dtype=None, **options):
    """Beyond the inputs, of forward and backward, in a dry run; without a gradient of forward."""
    with memlab.dry_run():
        hidden = torch.zeros(rows, width, dtype=dtype, requires_grad=wanted[0])
        weight = torch.zeros(vocab, width, dtype=dtype, requires_grad=wanted[1])
        targets = torch.zeros(rows, dtype=torch.long)

        def step():
            loss = function(hidden, weight, targets, chunk=chunk, **options)
            if any(wanted):
                loss.backward(torch.ones_like(loss))

        found = memlab.measure(step).peak_bytes
    return found - hidden.nbytes - weight.nbytes - targets.nbytes


@every_option
def test_at_the_peak_are_a_chunk_and_both_gradients_and_no_slope_of_a_cap(options):
    """A chunk's logits, its share of dh, both gradients; a label, a loss, a factor and a flag."""
    (rows, width, vocab), chunk = SMALL, 6
    gradients = 4 * rows * width + 4 * vocab * width
    found = peak_bytes(chunked_cross_entropy, *SMALL, chunk, **options)
    assert found == 4 * chunk * vocab + 4 * chunk * width + gradients + 17 * rows
    reference = peak_bytes(losses.chunked_cross_entropy, *SMALL, chunk, **options)
    slope = 4 * chunk * (vocab - width) if options.get("soft_cap") else 0
    assert slope <= reference - found <= slope + 32 * chunk


def test_a_row_takes_4_bytes_in_the_kernel():
    (rows, width, vocab), chunk = SMALL, 6
    common = 4 * chunk * vocab + 17 * rows
    for options in OPTIONS.values():
        peak = partial(peak_bytes, chunked_cross_entropy, *SMALL, chunk, **options)
        assert peak(wanted=(False, False)) == common + 4 * chunk
        assert peak(wanted=(False, True)) == common + 4 * chunk + 4 * vocab * width


@every_reduction
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_it_never_takes_more_than_memlab_s(dtype, reduction):
    for chunk in (5, None):
        settings = {"chunk": chunk, "dtype": dtype, "reduction": reduction}
        ours = peak_bytes(chunked_cross_entropy, *SMALL, **settings)
        assert ours <= peak_bytes(losses.chunked_cross_entropy, *SMALL, **settings)


@pytest.mark.gpu
def test_a_dry_run_has_the_peak_of_a_gpu():
    """In the interpreter it has not: that holds its arguments until Python looks for cycles."""
    hidden, weight, _, targets = inputs("cuda", rows=512, vocab=4096, bias=False)

    def step():
        chunked_cross_entropy(hidden, weight, targets, chunk=64, soft_cap=30.0).backward()

    given = hidden.nbytes + weight.nbytes + targets.nbytes
    expected = peak_bytes(chunked_cross_entropy, 512, C, 4096, 64, soft_cap=30.0)
    assert memlab.measure(step).peak_bytes - given == expected


# ------------------------------------------------------------------ what is refused


@pytest.mark.parametrize(
    ("changed", "error", "message"),
    [
        ({"hidden": torch.zeros(N, 9)}, ValueError, r"hidden of shape \(20, 9\); give \(…, 8\)"),
        ({"soft_cap": 0.0}, ValueError, "soft_cap=0.0; .* None for no cap"),
        ({"chunk": 0}, ValueError, "chunk=0; give at least 1 row"),
    ],
)
def test_what_memlab_s_refuses_is_refused(changed, error, message):
    hidden, weight, bias, targets = inputs("cpu")
    given = {"hidden": hidden, "weight": weight, "bias": bias, "targets": targets, **changed}
    with pytest.raises(error, match=message):
        chunked_cross_entropy(**given)


def test_on_a_cpu_a_target_outside_the_vocabulary_is_named():
    hidden, weight, _, targets = inputs("cpu")
    targets[0] = V
    with pytest.raises(IndexError, match="target 33; give 0 to 32"):
        chunked_cross_entropy(hidden, weight, targets)


# ------------------------------------------------------------------ on a GPU that is not there

COMPILED = """
from memlab.kernels.losses import rows_
from memlab.losses import LossTerms
found = []
for capability in (80, 89):
    with compiled_for(capability) as made:
        for vocab in (32_000, 50_257):
            x = torch.empty(64, vocab, device="meta")
            labels = torch.empty(64, 1, dtype=torch.int64, device="meta")
            every = LossTerms(-100, 0.1, 1e-4, 30.0)
            for terms in (LossTerms(), LossTerms(label_smoothing=0.1), every):
                rows_(x, labels, torch.empty(64, 1, device="meta"), terms)
    found += made
report(found)
"""


def test_compiled_nothing_is_spilled_and_a_reading_is_of_16_bytes_where_rows_allow(compiled):
    made = compiled(COMPILED)
    assert len(made) == 2 * 2 * 3
    for kernel in made:
        assert kernel["spilled"] == 0
        assert kernel["registers"] <= 80  # of 65,536, three programs of 256 threads at once
        assert kernel["shared"] <= 1024
    assert sum("ld.global.v4" in kernel["ptx"] for kernel in made) == 2 * 3
