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
    upstream = torch.linspace(-1, 2, loss.numel(), dtype=loss.dtype, device=loss.device)
    return upstream.view(loss.shape) + 0.7


def outcome(function, hidden, weight, bias, targets, **options):
    """Return the loss and the gradients, for an upstream gradient that varies between rows."""
    loss = function(hidden, weight, targets, bias=bias, **options)
    inputs_with_gradients = [x for x in (hidden, weight, bias) if x is not None]
    return loss.detach(), *torch.autograd.grad(loss, inputs_with_gradients, upstream_for(loss))


def assert_close(result, expected, tolerance=1e-6, or_below=0.0):
    """Compare norms, relative to the expected tensor."""
    for a, b in zip(result, expected, strict=True):
        assert a.shape == b.shape
        assert (a.double() - b.double()).norm() <= max(tolerance * b.double().norm(), or_below)


def error(result, expected):
    return ((result.double() - expected).norm() / expected.norm()).item()


def assert_as_near(result, readable, expected, tolerance=2e-7):
    """Require errors close to the readable version's, which has the same float32 matmuls."""
    for ours, theirs, e in zip(result, readable, expected, strict=True):
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
    result = outcome(chunked_cross_entropy, *parts, chunk=chunk, **settings)
    assert result[0].dtype == torch.float32
    assert_close(result, expected)
    chunked = outcome(losses.chunked_cross_entropy, *parts, chunk=chunk, **settings)
    assert_close(result, chunked)


@every_option
def test_a_vocabulary_can_span_several_blocks(options, device):
    for vocab in (2048, 2049, 5000):
        parts = inputs(device, rows=5, vocab=vocab, ignored=(2,))
        expected = outcome(cross_entropy_reference, *exact(parts), **options)
        result = outcome(chunked_cross_entropy, *parts, chunk=3, **options)
        chunked = outcome(losses.chunked_cross_entropy, *parts, chunk=3, **options)
        assert_close(result, chunked)
        assert_as_near(result, chunked, expected)


@pytest.mark.parametrize("vocab", [1, 2, 31, 32, 33])
def test_a_vocabulary_can_be_small(vocab, device):
    parts = inputs(device, rows=3, vocab=vocab, ignored=())
    result = outcome(chunked_cross_entropy, *parts)
    assert_close(result, outcome(cross_entropy_reference, *exact(parts)), or_below=1e-7)


def test_the_loss_matches_torch(device):
    hidden, weight, bias, targets = inputs(device)
    settings = {"label_smoothing": 0.1, "ignore_index": 5}
    targets[targets == -100] = 5
    expected = F.cross_entropy(F.linear(hidden, weight, bias).double(), targets, **settings)
    result = chunked_cross_entropy(hidden, weight, targets, bias=bias, **settings)
    assert result.item() == pytest.approx(expected.item(), rel=1e-6)


# ------------------------------------------------------------------ rows of logits


def rows_and_reference(x, labels, factors, **options):
    """Return (losses, gradients) of the kernel, and of memlab.losses in float64."""
    result = []
    for function, dtype in ((rows_, torch.float32), (row_losses_, torch.float64)):
        logits = x.to(dtype).clone()
        by_row = None if factors is None else factors.to(dtype)
        result.append((function(logits, labels, by_row, LossTerms(**options)), logits))
    return result


def column(values, device, dtype=torch.float32):
    return torch.tensor(values, device=device, dtype=dtype).view(-1, 1)


@every_option
def test_labels_at_block_edges_are_right(options, device):
    labels = [0, 1, 2047, 2048, 4095, 4096, 4999]
    x = (torch.randn(len(labels), 5000, generator=torch.Generator().manual_seed(1)) * 3).to(device)
    factors = torch.linspace(-1, 2, len(labels), device=device).view(-1, 1) + 0.3
    result = rows_and_reference(x, column(labels, device, torch.int64), factors, **options)
    (ours, gradient), (theirs, expected) = result
    assert_close([ours, gradient], [theirs, expected])
    for row, label in enumerate(labels):  # 1 − p loses precision when p is close to 1
        assert_close([ours[row], gradient[row]], [theirs[row], expected[row]], 5e-6)
        assert_close([gradient[row, label]], [expected[row, label]], 5e-6)


@every_option
@pytest.mark.parametrize("offset", [1e4, -1e4])
def test_a_loss_of_1_stays_precise_at_logits_of_ten_thousand(options, offset, device):
    """The logits are multiples of 1/1024, float32's spacing at 1e4, so the inputs are exact."""
    steps = torch.randint(-2000, 2000, (4, 100), generator=torch.Generator().manual_seed(2))
    x = (offset + steps / 1024).to(device)
    labels, factors = column([0, 1, 50, 99], device, torch.int64), column([1.0] * 4, device)
    (ours, gradient), (theirs, expected) = rows_and_reference(x, labels, factors, **options)
    assert_close([ours, gradient], [theirs, expected], tolerance=3e-7)


def test_logits_up_to_ten_thousand_do_not_overflow(device):
    x = torch.linspace(-1e4, 1e4, 300, device=device).repeat(3, 1)
    labels, factors = column([0, 150, 299], device, torch.int64), column([1.0, 2.0, 3.0], device)
    for options in OPTIONS.values():
        (ours, gradient), (theirs, expected) = rows_and_reference(x, labels, factors, **options)
        # A cap's slope of 1e-9 is exactly 0 in float32.
        assert_close([ours, gradient], [theirs, expected], or_below=1e-7)


def test_the_row_max_can_rise_or_fall_with_every_block(device):
    rising = torch.arange(5000, device=device) / 50.0
    x = torch.stack([rising, -rising, rising.roll(2500)])
    labels, factors = column([4990, 3, 7], device, torch.int64), column([1.0] * 3, device)
    (ours, gradient), (theirs, expected) = rows_and_reference(x, labels, factors)
    assert_close([ours, gradient], [theirs, expected])


@of_infinities
def test_a_token_at_minus_infinity_gets_no_gradient(device):
    x = torch.randn(2, 50, device=device)
    x[0, 3], x[1, 5:] = -math.inf, -math.inf
    labels, factors = column([0, 1], device, torch.int64), column([1.0, 1.0], device)
    (ours, gradient), (theirs, expected) = rows_and_reference(x, labels, factors)
    assert_close([ours, gradient], [theirs, expected])
    assert not gradient[1, 5:].any()


@of_infinities
@pytest.mark.parametrize("value", [math.nan, math.inf])
@pytest.mark.parametrize("options", [{}, {"label_smoothing": 0.1}], ids=["plain", "smoothed"])
def test_a_non_finite_logit_only_makes_its_row_nan(value, options, device):
    x = torch.randn(3, 3000, device=device)
    x[1, 2900] = value
    labels, factors = column([0, 1, 2], device, torch.int64), column([1.0] * 3, device)
    (ours, gradient), (theirs, expected) = rows_and_reference(x, labels, factors, **options)
    assert gradient[1].isnan().all()
    assert expected[1].isnan().all()
    assert not ours[1].isfinite()
    assert_close([ours[[0, 2]], gradient[[0, 2]]], [theirs[[0, 2]], expected[[0, 2]]])


@pytest.mark.parametrize("label", [-1, V, 2**40])
def test_an_invalid_target_only_makes_its_row_nan(label, device):
    x = torch.randn(3, V, device=device)
    labels, factors = column([0, label, 2], device, torch.int64), column([1.0] * 3, device)
    right = column([0, 1, 2], device, torch.int64)
    gradient, expected = x.clone(), x.clone()
    result = rows_(gradient, labels, factors, LossTerms())
    expected_losses = rows_(expected, right, factors, LossTerms())
    assert result[1].isnan()
    assert gradient[1].isnan().all()
    assert torch.equal(result[[0, 2]], expected_losses[[0, 2]])
    assert torch.equal(gradient[[0, 2]], expected[[0, 2]])


def test_a_row_with_a_factor_of_zero_is_not_read(device):
    x = torch.full((2, 3000), math.nan, device=device)
    x[0] = 0.0
    result = rows_(x, column([1, 1], device, torch.int64), column([1.0, 0.0], device), LossTerms())
    assert result[0].item() == pytest.approx(math.log(3000), rel=1e-6)
    assert result[1] == 0
    assert not x[1].any()


def test_without_factors_the_logits_are_unchanged(device):
    x = torch.randn(4, 100, device=device)
    before = x.clone()
    result = rows_(x, column([0, 1, 2, 3], device, torch.int64), None, LossTerms())
    assert torch.equal(x, before)
    assert_close(
        [result[:, 0]], [F.cross_entropy(x, torch.arange(4, device=device), reduction="none")]
    )


@triton.jit
def _tanh_kernel(u_ptr, out_ptr, COUNT: tl.constexpr):
    places = tl.arange(0, COUNT)
    tl.store(out_ptr + places, _tanh(tl.load(u_ptr + places)))


def test_tanh_is_within_4_ulps(device):
    sizes = torch.logspace(-30, 3, 4096, dtype=torch.float64)
    near = torch.linspace(0.6, 0.65, 4096, dtype=torch.float64)
    u = torch.cat([sizes, -sizes, near, -near]).float().to(device)
    result = torch.empty_like(u)
    launch(_tanh_kernel, (1,), u, result, COUNT=len(u))
    expected = u.double().tanh()
    assert ((result.double() - expected) / expected).abs().max() < 2**-21


# ------------------------------------------------------------------ ignored rows


@every_option
@every_reduction
def test_loss_and_gradients_are_zero_if_all_rows_are_ignored(reduction, options, device):
    parts = inputs(device, ignored=range(N))
    for result in outcome(chunked_cross_entropy, *parts, **options, reduction=reduction):
        assert torch.equal(result, torch.zeros_like(result))


def test_the_mean_of_no_rows_is_zero(device):
    loss, _, of_weight, _ = outcome(chunked_cross_entropy, *inputs(device, rows=0, ignored=()))
    assert loss == 0
    assert not of_weight.any()


# ------------------------------------------------------------------ autograd


@every_reduction
def test_a_second_backward_pass_gives_the_same_gradients(reduction, device):
    hidden, weight, bias, targets = inputs(device)
    loss = chunked_cross_entropy(hidden, weight, targets, bias=bias, reduction=reduction)
    grad = partial(torch.autograd.grad, loss, (hidden, weight, bias))
    first = grad(upstream_for(loss), retain_graph=True)
    kept = [x.clone() for x in first]
    second = grad(-3 * upstream_for(loss))
    assert_close(first, kept, tolerance=0)
    assert_close(second, [-3 * x for x in kept])


def test_an_expanded_upstream_gradient_is_supported(device):
    hidden, weight, _, targets = inputs(device)
    by_row = chunked_cross_entropy(hidden, weight, targets, reduction="none").sum()  # expanded
    total = chunked_cross_entropy(hidden, weight, targets, reduction="sum")
    result = torch.autograd.grad(by_row, (hidden, weight))
    assert_close(result, torch.autograd.grad(total, (hidden, weight)))


def test_the_loss_works_without_gradients(device):
    parts = inputs(device)
    with torch.no_grad():
        result = chunked_cross_entropy(parts[0], parts[1], parts[3], bias=parts[2])
    expected = cross_entropy_reference(*exact(parts)[:2], parts[3], bias=parts[2].double())
    assert result.item() == pytest.approx(expected.item(), rel=1e-6)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@every_option
def test_low_precision_matches_memlab_losses_up_to_rounding(dtype, options, device):
    parts = inputs(device, dtype=dtype)
    result = outcome(chunked_cross_entropy, *parts, chunk=7, **options)
    expected = outcome(losses.chunked_cross_entropy, *parts, chunk=7, **options)
    assert [x.dtype for x in result] == [x.dtype for x in expected]
    assert_close(result[:1], expected[:1])
    assert_close(result[1:], expected[1:], tolerance=torch.finfo(dtype).eps / 4)


def test_float64_uses_memlab_losses(device):
    parts = exact(inputs(device))
    result = outcome(chunked_cross_entropy, *parts, soft_cap=3.0)
    expected = outcome(losses.chunked_cross_entropy, *parts, soft_cap=3.0)
    assert_close(result, expected, tolerance=0)


def test_it_works_as_the_loss_of_a_model_with_tied_weights(device):
    tokens, targets = torch.randint(256, (2, 1, 24), device=device).unbind()
    result = []
    for loss_of in (losses.chunked_cross_entropy, chunked_cross_entropy):
        torch.manual_seed(0)
        model = GPT(PRESETS["tiny"], loss=loss_of).to(device)
        loss = model(tokens, targets)
        loss.backward()
        result.append([loss, *(p.grad for p in model.parameters())])
    assert_close(result[1], result[0], tolerance=2e-6)


# ------------------------------------------------------------------ bytes


SMALL = (48, 16, 300)


def peak_bytes(
    function, rows, width, vocab, chunk, requires_grad=(True, True), dtype=None, **options
):
    """Return peak bytes beyond the inputs in a dry run, of forward and backward if trained."""
    with memlab.dry_run():
        hidden = torch.zeros(rows, width, dtype=dtype, requires_grad=requires_grad[0])
        weight = torch.zeros(vocab, width, dtype=dtype, requires_grad=requires_grad[1])
        targets = torch.zeros(rows, dtype=torch.long)

        def step():
            loss = function(hidden, weight, targets, chunk=chunk, **options)
            if any(requires_grad):
                loss.backward(torch.ones_like(loss))

        result = memlab.measure(step).peak_bytes
    return result - hidden.nbytes - weight.nbytes - targets.nbytes


@every_option
def test_the_peak_is_a_chunk_and_both_gradients_without_the_cap_s_slope(options):
    """A chunk's logits, its dh, both gradients, and a label, loss, factor and flag per row."""
    (rows, width, vocab), chunk = SMALL, 6
    gradients = 4 * rows * width + 4 * vocab * width
    result = peak_bytes(chunked_cross_entropy, *SMALL, chunk, **options)
    assert result == 4 * chunk * vocab + 4 * chunk * width + gradients + 17 * rows
    reference = peak_bytes(losses.chunked_cross_entropy, *SMALL, chunk, **options)
    slope = 4 * chunk * (vocab - width) if options.get("soft_cap") else 0
    assert slope <= reference - result <= slope + 32 * chunk


def test_the_kernel_allocates_4_bytes_per_row():
    (rows, width, vocab), chunk = SMALL, 6
    common = 4 * chunk * vocab + 17 * rows
    for options in OPTIONS.values():
        peak = partial(peak_bytes, chunked_cross_entropy, *SMALL, chunk, **options)
        assert peak(requires_grad=(False, False)) == common + 4 * chunk
        assert peak(requires_grad=(False, True)) == common + 4 * chunk + 4 * vocab * width


@every_reduction
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_peak_never_exceeds_memlab_losses(dtype, reduction):
    for chunk in (5, None):
        settings = {"chunk": chunk, "dtype": dtype, "reduction": reduction}
        ours = peak_bytes(chunked_cross_entropy, *SMALL, **settings)
        assert ours <= peak_bytes(losses.chunked_cross_entropy, *SMALL, **settings)


@pytest.mark.gpu
def test_a_dry_run_has_the_peak_of_a_gpu():
    """The interpreter's peak differs, because it keeps arguments alive until garbage collection."""
    hidden, weight, _, targets = inputs("cuda", rows=512, vocab=4096, bias=False)

    def step():
        chunked_cross_entropy(hidden, weight, targets, chunk=64, soft_cap=30.0).backward()

    given = hidden.nbytes + weight.nbytes + targets.nbytes
    expected = peak_bytes(chunked_cross_entropy, 512, C, 4096, 64, soft_cap=30.0)
    assert memlab.measure(step).peak_bytes - given == expected


# ------------------------------------------------------------------ invalid input


@pytest.mark.parametrize(
    ("changed", "error", "message"),
    [
        ({"hidden": torch.zeros(N, 9)}, ValueError, r"hidden of shape \(20, 9\); give \(…, 8\)"),
        ({"soft_cap": 0.0}, ValueError, "soft_cap=0.0; .* None for no cap"),
        ({"chunk": 0}, ValueError, "chunk=0; give at least 1 row"),
    ],
)
def test_invalid_input_is_refused_as_in_memlab_losses(changed, error, message):
    hidden, weight, bias, targets = inputs("cpu")
    given = {"hidden": hidden, "weight": weight, "bias": bias, "targets": targets, **changed}
    with pytest.raises(error, match=message):
        chunked_cross_entropy(**given)


def test_an_invalid_target_is_named_on_a_cpu():
    hidden, weight, _, targets = inputs("cpu")
    targets[0] = V
    with pytest.raises(IndexError, match="target 33; give 0 to 32"):
        chunked_cross_entropy(hidden, weight, targets)


# ------------------------------------------------------------------ compiled

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


def test_compiled_kernels_spill_nothing_and_load_16_bytes_if_aligned(compiled):
    made = compiled(COMPILED)
    assert len(made) == 2 * 2 * 3
    for kernel in made:
        assert kernel["spilled"] == 0
        assert kernel["registers"] <= 80  # three programs of 256 threads fit into 65,536
        assert kernel["shared"] <= 1024
    assert sum("ld.global.v4" in kernel["ptx"] for kernel in made) == 2 * 3
