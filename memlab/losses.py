"""Chunked cross-entropy: compute the loss without storing all logits at once.

Saves    three tensors of N·V elements (logits, log-softmax and its gradient), except one chunk of
         logits.
Costs    nothing for a mean or a sum: the same three matmuls, in chunks. Per-row losses
         (`reduction="none"`) cost a fourth matmul. Few rows save nothing: in bfloat16 with fewer
         than about C rows, the float32 dW is larger than all logits.
Source   gradients in the forward pass, by chunk: Hsu et al. 2024 (Liger), arXiv 2410.10989.
         Wijmans et al. 2024 (Cut Your Losses), 2411.09009, also split the vocabulary, in a kernel.

memlab.reference.chunked_loss is the short version. This file adds bias, label smoothing, z-loss,
soft caps, per-row losses, autocast and float16, and a chunk size chosen by bytes.

For one row h of N, with target y, matrix W (V, C), bias b:

    r    = W h + b                                     logits, V elements
    x    = cap · tanh(r / cap)                         soft cap (Gemma 2)
    lse  = log Σ exp x
    loss = lse − (1 − ε)·x[y] − ε·mean(x) + z·lse²     label smoothing ε, z-loss z

    p       = exp(x − lse)
    dx      = (1 + 2z·lse)·p − (1 − ε)·onehot(y) − ε/V
    dr      = dx · (1 − (x / cap)²)
    dh = Wᵀ dr        dW = Σ dr hᵀ        db = Σ dr    sums over the rows

The logits r are the largest tensor of a modern model: 250 MiB in float32 for 2,048 tokens and a
vocabulary of 32,000. Autograd keeps one such tensor and creates two more. But rows are independent.
A chunk's logits become its losses and, in the same buffer, its gradients, which are added to dh and
dW. The next chunk reuses the buffer. Backward only multiplies the results in place by the gradient
of the loss.

    peak          4·chunk·(V + C) + 4·(N + V)·C bytes in float32, plus 17 per row: a chunk's
                  logits, its part of dh, and both gradients, if needed
    soft cap      4·chunk·V more for its slope; a chunk's part of dh comes after it
    bfloat16,     logits and sums stay in float32. A chunk's gradient exists in both dtypes:
      float16       6·chunk·V + 2·chunk·C
    autocast      casts of the weight and a chunk of hidden, 2·(V + chunk)·C more

In low precision, matmuls take bfloat16 or float16 inputs (the autocast dtype, if enabled). All else
is float32, including the sums over chunks. The sums are rounded last, after multiplication by the
incoming gradient: a gradient of a mean over many tokens can underflow float16 before a loss scale
reaches it. CPUs have no matmul that adds bfloat16 products to float32, so dW is computed in
float32, which is slower.

Liger sums dW in the weight's dtype by default. `F.linear_cross_entropy` supports a second backward
pass only if announced, which doubles its gradients. This version recomputes them instead.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from memlab.internals.sizes import chunk_rows
from memlab.internals.transforms import is_transformed, require_no_transform

Reduction = Literal["mean", "sum", "none"]

REDUCTIONS = ("mean", "sum", "none")


@dataclass(frozen=True)
class LossTerms:
    """The settings of a row's loss."""

    ignore_index: int = -100
    label_smoothing: float = 0.0
    z_loss: float = 0.0
    soft_cap: float | None = None

    def __post_init__(self) -> None:
        if not 0 <= self.label_smoothing <= 1:
            raise ValueError(
                f"got label_smoothing={self.label_smoothing}; give the fraction of the target to "
                f"spread over all tokens, from 0 to 1"
            )
        if not 0 <= self.z_loss < math.inf:
            raise ValueError(
                f"got z_loss={self.z_loss}; give the factor of log²Z, 0 or more (PaLM: 1e-4)"
            )
        if self.soft_cap is not None and not 0 < self.soft_cap < math.inf:
            raise ValueError(
                f"got soft_cap={self.soft_cap}; give the bound of the logits (Gemma 2: 30), "
                f"or None for no cap"
            )


# ------------------------------------------------------------------ the reference


def cross_entropy_reference(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    *,
    bias: Tensor | None = None,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    soft_cap: float | None = None,
    reduction: Reduction = "mean",
) -> Tensor:
    """Compute the same loss from all logits, in the inputs' dtype: the oracle for other versions.

    Arguments, shapes and errors are as in `chunked_cross_entropy`. Second derivatives are
    supported.
    """
    terms = LossTerms(ignore_index, label_smoothing, z_loss, soft_cap)
    _check(hidden, weight, targets, bias, terms, reduction)
    x = F.linear(hidden, weight, bias)  # (…, V)
    if soft_cap is not None:
        x = soft_cap * torch.tanh(x / soft_cap)
    is_ignored, labels = _labels(targets, ignore_index)
    log_z = x.logsumexp(-1)  # (…)
    losses = log_z - (1 - label_smoothing) * x.gather(-1, labels.unsqueeze(-1)).squeeze(-1)
    if label_smoothing:
        losses = losses - label_smoothing * x.mean(-1)
    losses = (losses + z_loss * log_z.square()).masked_fill(is_ignored, 0)
    return _reduced(losses, is_ignored, reduction)


def _labels(targets: Tensor, ignore_index: int) -> tuple[Tensor, Tensor]:
    """Return a mask of ignored rows, and the targets as indices with 0 for ignored rows."""
    targets = targets.long()
    is_ignored = targets == ignore_index
    return is_ignored, targets.masked_fill(is_ignored, 0)


def _count_rows(is_ignored: Tensor) -> Tensor:
    """Return the number of rows that count, at least 1, so that a mean over none is 0."""
    return (is_ignored.numel() - is_ignored.sum()).clamp(min=1)


def _reduced(losses: Tensor, is_ignored: Tensor, reduction: Reduction) -> Tensor:
    if reduction == "none":
        return losses
    total = losses.sum()
    return total / _count_rows(is_ignored) if reduction == "mean" else total


# ------------------------------------------------------------------ chunked version


def chunked_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    *,
    bias: Tensor | None = None,
    chunk: int | None = None,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    soft_cap: float | None = None,
    reduction: Reduction = "mean",
) -> Tensor:
    """Compute the cross-entropy in nats of the logits `hidden @ weightᵀ + bias`, in chunks of rows.

    Args:
        hidden: (…, C).
        weight: (V, C).
        targets: integers (…).
        bias: (V,).
        chunk: rows per chunk; None: `chunk_rows` chooses.
        ignore_index: rows with this target do not count, also in the mean's denominator. If no row
            counts, the loss and all gradients are 0, and not NaN as torch's mean.
        label_smoothing: the fraction ε of the target spread over all tokens (Szegedy et al. 2016).
        z_loss: the factor of log²Z, which keeps Z near 1 (Chowdhery et al. 2022, PaLM: 1e-4).
        soft_cap: bounds the logits to ± this value (Gemma Team 2024, Gemma 2: 30).
        reduction: "mean" or "sum" over rows, or "none" for a loss per row in the shape of targets.
            "none" recomputes the logits in backward, because dW is a sum over rows with factors
            known only then.

    Returns:
        The loss in float32, as under autocast, or float64. bfloat16 would have steps of 1/16
        near 10.

    Raises:
        IndexError: for a target outside the vocabulary. On CUDA, a check would synchronize, so the
            device's own assertion fails instead.
        TypeError: for sparse tensors, and dtypes that do not fit.
        RuntimeError: in a backward pass with `create_graph=True`, and in a transform of torch.func.

    Gradients are computed in the forward pass, if required, and returned by the first backward
    pass. Another one (`retain_graph=True`) recomputes them.
    """
    terms = LossTerms(ignore_index, label_smoothing, z_loss, soft_cap)
    _check(hidden, weight, targets, bias, terms, reduction)
    require_no_transform(
        "chunked_cross_entropy", "use cross_entropy_reference there", (hidden, weight, bias)
    )
    (V, C), N = weight.shape, targets.numel()
    if chunk is None:
        # For a 7B model with 1 × 2,048 tokens chunks cost memory: 20.28 GiB instead of 19.95,
        # because the weight's float32 gradient (500 MiB) is larger than the logits. With 8,192
        # tokens they pay.
        chunk = chunk_rows(N, V, C)
    elif chunk < 1:
        raise ValueError(f"got chunk={chunk}; give at least 1 row, or None to choose it")
    dtype, grad_enabled = _matmul_dtype(hidden), torch.is_grad_enabled()
    plan = _Plan(terms, reduction, chunk, dtype, grad_enabled)
    loss = _ChunkedLoss.apply(hidden.reshape(-1, C), weight, bias, targets.flatten(), plan)
    return loss.view(targets.shape) if reduction == "none" else loss


def token_log_probs(
    hidden: Tensor,
    weight: Tensor,
    tokens: Tensor,
    *,
    bias: Tensor | None = None,
    temperature: float = 1.0,
    chunk: int | None = None,
    ignore_index: int = -100,
    soft_cap: float | None = None,
) -> Tensor:
    """Return log p(token) of each row, float32 (…), as DPO and GRPO need them, in chunks of rows.

    Arguments as in `chunked_cross_entropy`; p is the softmax of the logits / temperature. A row
    whose token is `ignore_index` gives 0, but its logits are computed. Leave rows out before the
    call where you can: the tokens of a prompt need no log-probability.

    memlab.reference.log_probs has it in a few lines.
    """
    if not 0 < temperature < math.inf:
        raise ValueError(f"got temperature={temperature}; give a number above 0")
    if temperature != 1 and (soft_cap is not None or bias is not None):
        raise ValueError(
            f"got temperature={temperature} with a soft cap or a bias, which are applied to the "
            f"logits; divide the logits of your own, or use temperature 1"
        )
    # The logits are linear in hidden, which has V / C times fewer elements.
    scaled = hidden if temperature == 1 else hidden / temperature
    losses = chunked_cross_entropy(
        scaled,
        weight,
        tokens,
        bias=bias,
        chunk=chunk,
        ignore_index=ignore_index,
        soft_cap=soft_cap,
        reduction="none",
    )
    return -losses


@dataclass(frozen=True)
class _Plan:
    """The settings of one call."""

    terms: LossTerms
    reduction: Reduction
    chunk: int
    matmul_dtype: torch.dtype  # of the inputs of matmuls
    grad_enabled: bool  # at the call; inside a Function it is always False


class _ChunkedLoss(torch.autograd.Function):
    """Keeps gradients from the forward pass for the backward pass."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        targets: Tensor,
        plan: _Plan,
    ) -> Tensor:
        inputs = (hidden, weight, bias)
        ctx.plan = plan
        ctx.dtypes = [None if x is None else x.dtype for x in inputs]
        ctx.wanted = [plan.grad_enabled and needed for needed in ctx.needs_input_grad[:3]]
        ctx.save_for_backward(*inputs, targets)
        is_scaled_by_row = plan.reduction == "none"  # by factors known only in backward
        gradients = _zeros(inputs, [w and not is_scaled_by_row for w in ctx.wanted])
        losses = _compute_chunks(plan, inputs, targets, gradients)
        if is_scaled_by_row:
            ctx.gradients = None
            return losses
        ctx.gradients = gradients
        is_ignored, _ = _labels(targets, plan.terms.ignore_index)
        ctx.rows = _count_rows(is_ignored) if plan.reduction == "mean" else 1
        return losses.sum() / ctx.rows

    @staticmethod
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor | None, ...]:
        if torch.is_grad_enabled():
            raise RuntimeError(
                "chunked_cross_entropy has no second derivative, but was differentiated with "
                "create_graph=True; leave it out, or use cross_entropy_reference"
            )
        by_row = upstream if ctx.plan.reduction == "none" else None
        # The caller owns returned gradients: a second backward pass must not scale them again.
        gradients, ctx.gradients = ctx.gradients, None
        if gradients is None:
            *inputs, targets = ctx.saved_tensors
            gradients = _zeros(inputs, ctx.wanted)
            kind = upstream.device.type if not upstream.is_meta else "cpu"
            with torch.autocast(kind, enabled=False):  # the plan has the dtype
                _compute_chunks(ctx.plan, inputs, targets, gradients, by_row)
        if by_row is None:
            for gradient in filter(torch.is_tensor, gradients):
                gradient.mul_(upstream / ctx.rows)
        rounded = [
            None if gradient is None else gradient.to(dtype)
            for gradient, dtype in zip(gradients, ctx.dtypes, strict=True)
        ]
        return *rounded, None, None


def _zeros(inputs: Sequence[Any], wanted: Sequence[bool]) -> list[Tensor | None]:
    """Return accumulators for the wanted gradients, in at least float32."""
    return [
        torch.zeros(x.shape, dtype=_accumulation_dtype(x), device=x.device) if want else None
        for x, want in zip(inputs, wanted, strict=True)
    ]


def _compute_chunks(
    plan: _Plan,
    inputs: Sequence[Any],
    targets: Tensor,
    gradients: Sequence[Tensor | None],
    factors: Tensor | None = None,
) -> Tensor:
    """Return the loss of each row, (N,), and accumulate the gradients of their weighted sum.

    `factors` (N,) are the weights of the rows, 1 by default.
    """
    hidden, weight, bias = inputs
    d_hidden, d_weight, d_bias = gradients
    N, V = len(hidden), len(weight)
    weight = weight.to(plan.matmul_dtype)
    is_ignored, labels = (x.unsqueeze(1) for x in _labels(targets, plan.terms.ignore_index))
    losses = hidden.new_empty(N, 1, dtype=_accumulation_dtype(hidden))
    factors = torch.ones_like(losses) if factors is None else factors.unsqueeze(1)
    factors = factors.masked_fill(is_ignored, 0)  # (N, 1)
    any_gradient = any(map(torch.is_tensor, gradients))
    buffer = hidden.new_empty(min(plan.chunk, N), V, dtype=_accumulation_dtype(hidden))
    for start in range(0, N, plan.chunk):
        rows = slice(start, start + plan.chunk)
        h = hidden[rows].to(plan.matmul_dtype)  # (chunk, C)
        x = _matmul_(buffer[: len(h)], h, weight.mT)  # (chunk, V)
        if bias is not None:
            x += bias
        factor = factors[rows] if any_gradient else None
        losses[rows] = row_losses_(x, labels[rows], factor, plan.terms)
        if d_hidden is not None:
            d_hidden[rows] = torch.mm(x.to(plan.matmul_dtype), weight)
        if d_weight is not None:
            _addmm_(d_weight, x.mT, h)
        if d_bias is not None:
            d_bias += x.sum(0)
    return losses.masked_fill_(is_ignored, 0).squeeze(1)


def row_losses_(x: Tensor, labels: Tensor, factors: Tensor | None, terms: LossTerms) -> Tensor:
    """Return losses (chunk, 1) of logits x (chunk, V), and turn x into gradients times `factors`.

    Without factors, x is overwritten with unspecified values.
    """
    share, cap, V = terms.label_smoothing, terms.soft_cap, x.shape[1]
    slope = None
    if cap is not None:
        x.div_(cap).tanh_()
        slope = x.square().neg_().add_(1) if factors is not None else None  # (chunk, V)
        x.mul_(cap)

    row_max = x.amax(1, keepdim=True)
    x.sub_(row_max)  # avoids overflow, and keeps a loss of 1 precise at logits of 10⁴
    at_label = x.gather(1, labels)
    mean = x.mean(1, keepdim=True) if share else 0
    z = x.exp_().sum(1, keepdim=True)  # at least 1, at most V
    log_z = z.log()
    lse = row_max.add_(log_z)
    # log-sum-exp − x[y] would have a relative error of up to 1.1e-4 at logits of ten thousand, this
    # has 4e-8 (test_a_loss_of_1_is_precise_at_logits_of_ten_thousand).
    losses = log_z - (1 - share) * at_label - share * mean + terms.z_loss * lse.square()

    if factors is not None:
        x.mul_(factors * (1 + 2 * terms.z_loss * lse) / z)
        x.scatter_add_(1, labels, (share - 1) * factors)
        if share:
            x.sub_(factors * (share / V))
        if slope is not None:
            x.mul_(slope)
    return losses


# ------------------------------------------------------------------ matmuls in low precision


def _accumulation_dtype(x: Tensor) -> torch.dtype:
    return torch.promote_types(x.dtype, torch.float32)


def _matmul_dtype(hidden: Tensor) -> torch.dtype:
    """Return hidden's dtype, or the autocast dtype if autocast is on and hidden is not float64."""
    if _is_autocast(hidden):
        return torch.get_autocast_dtype(hidden.device.type)
    return hidden.dtype


def _is_autocast(x: Tensor) -> bool:
    kind = x.device.type  # "meta" has no autocast
    is_on = torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind)
    return is_on and x.dtype != torch.float64


def _matmul_(out: Tensor, a: Tensor, b: Tensor) -> Tensor:
    """Compute a @ b into `out`, which may be more precise than a and b."""
    if a.dtype == out.dtype:
        return torch.mm(a, b, out=out)
    if a.is_cuda:  # cuBLAS accumulates in float32, so no rounding is needed
        return torch.mm(a, b, out_dtype=out.dtype, out=out)
    return out.copy_(torch.mm(a, b))


def _addmm_(total: Tensor, a: Tensor, b: Tensor) -> Tensor:
    """Add a @ b to `total` in the precision of `a`, without rounding or a large temporary.

    The CPU lacks a low-precision matmul that accumulates like this, so it computes in float32.
    """
    if b.dtype != total.dtype and b.is_cuda:
        return torch.addmm(total, a.to(b.dtype), b, out_dtype=total.dtype, out=total)
    return total.addmm_(a, b.to(total.dtype))


# ------------------------------------------------------------------ checks


def _check(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    bias: Tensor | None,
    terms: LossTerms,
    reduction: Reduction,
) -> None:
    if reduction not in REDUCTIONS:
        raise ValueError(f"got reduction={reduction!r}; choose one of {', '.join(REDUCTIONS)}")
    for x in (hidden, weight, targets, bias):
        if x is not None and (x.layout is not torch.strided or x.is_nested):
            layout = "a nested tensor" if x.is_nested else f"a tensor of layout {x.layout}"
            raise TypeError(f"got {layout}; give hidden, weight, targets and bias as dense tensors")
    if weight.ndim != 2 or not weight.shape[0]:
        raise ValueError(f"got a weight of shape {tuple(weight.shape)}; give (V, C), V at least 1")
    V, C = weight.shape
    if hidden.shape[-1:] != (C,):
        raise ValueError(
            f"got hidden of shape {tuple(hidden.shape)}; give (…, {C}), as the weight is ({V}, {C})"
        )
    if targets.shape != hidden.shape[:-1]:
        raise ValueError(
            f"got targets of shape {tuple(targets.shape)}; give {tuple(hidden.shape[:-1])}, one "
            f"for each row of hidden {tuple(hidden.shape)}"
        )
    if bias is not None and bias.shape != (V,):
        raise ValueError(f"got a bias of shape {tuple(bias.shape)}; give ({V},), one for each row")
    if targets.is_floating_point() or targets.is_complex() or targets.dtype == torch.bool:
        raise TypeError(f"got targets of {targets.dtype}; give token indices, as int64")
    _check_dtypes(hidden, weight, bias)
    _check_range(targets, V, terms.ignore_index)


def _check_dtypes(hidden: Tensor, weight: Tensor, bias: Tensor | None) -> None:
    given = [x for x in (hidden, weight, bias) if x is not None]
    dtypes = {x.dtype for x in given}
    if not all(dtype.is_floating_point for dtype in dtypes):
        raise TypeError(f"got {_join_dtypes(dtypes)}; give floating-point hidden, weight and bias")
    if len(dtypes) > 1 and not all(map(_is_autocast, given)):
        raise TypeError(
            f"got {_join_dtypes(dtypes)} in hidden, weight and bias; give all in one dtype, or "
            f"compute under torch.autocast"
        )


def _join_dtypes(dtypes: set[torch.dtype]) -> str:
    return " and ".join(sorted(str(dtype).removeprefix("torch.") for dtype in dtypes))


def _check_range(targets: Tensor, vocab_size: int, ignore_index: int) -> None:
    if targets.is_cuda or targets.is_meta or is_transformed():  # the values cannot be read
        return
    _, labels = _labels(targets, ignore_index)
    is_outside = (labels < 0) | (labels >= vocab_size)
    if is_outside.any():
        raise IndexError(
            f"got the target {labels[is_outside][0].item()}; give 0 to {vocab_size - 1}, one of "
            f"the {vocab_size} rows of the weight, or ignore_index={ignore_index}"
        )
