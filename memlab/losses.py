"""Cross-entropy: how surprised the model is by the next token, without all of its logits at once.

Saves    three tensors of N·V numbers, the logits, their log-softmax and its gradient: all but the
         logits of a chunk of rows.
Costs    nothing for a mean or a sum: the same three matrix products, in parts. A loss for each row
         (`reduction="none"`) costs a fourth product. Of few rows it saves nothing: in bfloat16, of
         fewer than about C, dW in float32 takes more than all the logits.
Source   gradients in the forward pass, chunk by chunk: Hsu et al. 2024 (Liger), arXiv 2410.10989.
         Wijmans et al. 2024 (Cut Your Losses), 2411.09009, cut the vocabulary too, in a kernel.

Adds to memlab.reference.chunked_loss: bias, label smoothing, z-loss, soft caps, losses per row,
autocast and float16, and a chunk size chosen by bytes.

For one row h of N, with target y, matrix W (V, C), bias b:

    r    = W h + b                                     logits, V numbers
    x    = cap · tanh(r / cap)                         soft cap (Gemma 2)
    lse  = log Σ exp x
    loss = lse − (1 − ε)·x[y] − ε·mean(x) + z·lse²     label smoothing ε, z-loss z

    p       = exp(x − lse)
    dx      = (1 + 2z·lse)·p − (1 − ε)·onehot(y) − ε/V
    dr      = dx · (1 − (x / cap)²)
    dh = Wᵀ dr        dW = Σ dr hᵀ        db = Σ dr    sums over the rows

The largest tensor of a modern model is r of all rows: 2,048 tokens and a vocabulary of 32,000 are
250 MiB in float32, and autograd keeps one such tensor and makes two more. But the rows know nothing
of each other: logits of a chunk become its losses, and in the same buffer its gradients, which go
into dh and dW, and the next chunk writes over them. The backward pass only has to multiply by the
one number that it is handed, the gradient of the loss, once more in place.

    at the peak   4·chunk·(V + C) + 4·(N + V)·C bytes in float32, and 17 for each row: a chunk's
                  logits, its share of dh, and both gradients, as far as they are wanted
    soft cap      4·chunk·V more, for its slope; a chunk's share of dh comes after it
    bfloat16,     sums and logits as above in float32, however little the inputs take. A chunk's
      float16     gradient is rounded beside itself: 6·chunk·V + 2·chunk·C
    autocast      the weight and a chunk of hidden as autocast casts them, 2·(V + chunk)·C more

Of low precision, then: products take bfloat16 or float16 (what autocast says, where it is on), all
else is float32, the sums over chunks too. The sums are rounded last, times what backward was
handed: the gradient of a mean over many tokens can be below float16's smallest number, and a loss
scale has to reach it before it is rounded. The CPU has no product that takes bfloat16 and adds to
float32: it multiplies the chunk's gradient and hidden in float32, which takes longer.

This differs from production's: Liger sums dW in the dtype of the weight unless told otherwise;
`F.linear_cross_entropy` has no second backward pass unless one is announced, which doubles its
gradients. Here another one makes them again.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

Reduction = Literal["mean", "sum", "none"]

REDUCTIONS = ("mean", "sum", "none")


@dataclass(frozen=True)
class Terms:
    """What the loss of a row consists of."""

    ignore_index: int = -100
    label_smoothing: float = 0.0
    z_loss: float = 0.0
    soft_cap: float | None = None

    def __post_init__(self) -> None:
        if not 0 <= self.label_smoothing <= 1:
            raise ValueError(
                f"got label_smoothing={self.label_smoothing}; give the share of the target that "
                f"goes to all tokens alike, from 0 to 1"
            )
        if not 0 <= self.z_loss < math.inf:
            raise ValueError(
                f"got z_loss={self.z_loss}; give the factor of log²Z, 0 or more (PaLM: 1e-4)"
            )
        if self.soft_cap is not None and not 0 < self.soft_cap < math.inf:
            raise ValueError(
                f"got soft_cap={self.soft_cap}; give what logits stay below (Gemma 2: 30), "
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
    """The same loss by way of all the logits, slow and obvious, in the dtype of its inputs.

    Arguments, shapes and errors are those of `chunked_cross_entropy`. Autograd does the rest, so
    there are second derivatives too.
    """
    terms = Terms(ignore_index, label_smoothing, z_loss, soft_cap)
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
    """Which rows are ignored, and the targets of all as indices, those of the ignored being 0."""
    targets = targets.long()
    is_ignored = targets == ignore_index
    return is_ignored, targets.masked_fill(is_ignored, 0)


def _kept_rows(is_ignored: Tensor) -> Tensor:
    """How many rows count: 1 if none does, so that a mean over none is 0."""
    return (is_ignored.numel() - is_ignored.sum()).clamp(min=1)


def _reduced(losses: Tensor, is_ignored: Tensor, reduction: Reduction) -> Tensor:
    if reduction == "none":
        return losses
    total = losses.sum()
    return total / _kept_rows(is_ignored) if reduction == "mean" else total


# ------------------------------------------------------------------ chunk by chunk


def chunk_rows(rows: int, vocab_size: int, width: int) -> int:
    """How many rows to take at once: their logits are half as many numbers as the gradients, and an
    eighth of all the logits, at most.

    Gradients of (rows + vocab_size)·width numbers have to be there in any case. Half of that is
    about width/2 rows: enough for the sum over chunks, which reads and writes all of dW for each,
    to be a product that is bound by arithmetic. Of fewer rows than four widths that would be most
    of them at once, hence the eighth; but 64, which keeps products from being slow. The fewest
    chunks within that, and all alike.
    """
    rows = max(1, rows)
    by_gradients = (rows + vocab_size) * width // (2 * vocab_size)
    most = max(1, min(by_gradients, max(rows // 8, 64)))
    return math.ceil(rows / math.ceil(rows / most))


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
    of_rows: "OfRows | None" = None,
) -> Tensor:
    """Cross-entropy in nats between `targets` and the logits `hidden @ weightᵀ + bias`, whose rows
    it makes a chunk at a time.

    hidden (…, C), weight (V, C), bias (V,), targets (…) of integers. The loss is float32, as that
    of autocast is, or float64: in bfloat16 it would move in steps of 1/16 where it is near 10.

    chunk            rows of hidden at once; None: as `chunk_rows` says
    ignore_index     rows with this target count for nothing, in the mean's denominator either. If
                     there are no others, the loss is 0, and so are all gradients
    label_smoothing  the share ε of the target that all tokens get alike (Szegedy et al. 2016)
    z_loss           the factor of log²Z, which keeps Z near 1 (Chowdhery et al. 2022, PaLM: 1e-4)
    soft_cap         logits stay within ± this much (Gemma Team 2024, Gemma 2: 30)
    reduction        "mean" or "sum" over rows; "none": a loss for each, in the shape of targets.
                     Its gradient has a factor for each row, known only in the backward pass, and
                     dW is a sum over rows: so that makes the logits again
    of_rows          what makes a chunk's logits into losses and gradients; None: torch's operators.
                     memlab.kernels.losses has a kernel for it

    Gradients are made in the forward pass: those that will be asked for, none under no_grad. The
    first backward pass gives them away; another one (`retain_graph=True`) makes new ones. With
    `create_graph=True` it raises RuntimeError.

    A target outside the vocabulary raises IndexError; on CUDA, where to look would be to wait for
    the device, it fails the device's own assertion.
    """
    terms = Terms(ignore_index, label_smoothing, z_loss, soft_cap)
    _check(hidden, weight, targets, bias, terms, reduction)
    (V, C), N = weight.shape, targets.numel()
    if chunk is None:
        chunk = chunk_rows(N, V, C)
    elif chunk < 1:
        raise ValueError(f"got chunk={chunk}; give at least 1 row, or None for a good number")
    dtype, grad_enabled = _dtype_of_products(hidden), torch.is_grad_enabled()
    plan = _Plan(terms, reduction, chunk, dtype, grad_enabled, of_rows or losses_of_rows_)
    loss = _ChunkedLoss.apply(hidden.reshape(-1, C), weight, bias, targets.flatten(), plan)
    return loss.view(targets.shape) if reduction == "none" else loss


@dataclass(frozen=True)
class _Plan:
    """How the loss is made."""

    terms: Terms
    reduction: Reduction
    chunk: int
    products: torch.dtype  # of the factors of matrix products
    grad_enabled: bool  # where the loss was asked for; inside of a Function it never is
    of_rows: "OfRows"


class _ChunkedLoss(torch.autograd.Function):
    """What keeps the gradients from the forward pass to the backward pass."""

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
        is_scaled_by_row = plan.reduction == "none"  # by numbers that only backward knows
        gradients = _zeros(inputs, [w and not is_scaled_by_row for w in ctx.wanted])
        losses = _in_chunks(plan, inputs, targets, gradients)
        if is_scaled_by_row:
            ctx.gradients = None
            return losses
        ctx.gradients = gradients
        is_ignored, _ = _labels(targets, plan.terms.ignore_index)
        ctx.rows = _kept_rows(is_ignored) if plan.reduction == "mean" else 1
        return losses.sum() / ctx.rows

    @staticmethod
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor | None, ...]:
        if torch.is_grad_enabled():
            raise RuntimeError(
                "chunked_cross_entropy has no second derivative, and its first was asked for with "
                "create_graph=True; leave that out, or use cross_entropy_reference"
            )
        by_row = upstream if ctx.plan.reduction == "none" else None
        # Given away, they are another's: a second backward pass must not scale them again.
        gradients, ctx.gradients = ctx.gradients, None
        if gradients is None:
            *inputs, targets = ctx.saved_tensors
            gradients = _zeros(inputs, ctx.wanted)
            with torch.autocast(upstream.device.type, enabled=False):  # the plan has its dtype
                _in_chunks(ctx.plan, inputs, targets, gradients, by_row)
        if by_row is None:
            for gradient in filter(torch.is_tensor, gradients):
                gradient.mul_(upstream / ctx.rows)
        rounded = [
            None if gradient is None else gradient.to(dtype)
            for gradient, dtype in zip(gradients, ctx.dtypes, strict=True)
        ]
        return *rounded, None, None


def _zeros(inputs: Sequence[Tensor | None], wanted: Sequence[bool]) -> list[Tensor | None]:
    """Where the gradient of each input will be summed up, in float32 at least."""
    return [
        torch.zeros(x.shape, dtype=_precise(x), device=x.device) if want else None
        for x, want in zip(inputs, wanted, strict=True)
    ]


def _in_chunks(
    plan: _Plan,
    inputs: Sequence[Tensor | None],
    targets: Tensor,
    gradients: Sequence[Tensor | None],
    factors: Tensor | None = None,
) -> Tensor:
    """The loss of each row, (N,). To the gradients that are there it adds those of the sum of all
    losses, each times its factor if there are factors."""
    hidden, weight, bias = inputs
    of_hidden, of_weight, of_bias = gradients
    N, V = len(hidden), len(weight)
    weight = weight.to(plan.products)
    is_ignored, labels = (x.unsqueeze(1) for x in _labels(targets, plan.terms.ignore_index))
    losses = hidden.new_empty(N, 1, dtype=_precise(hidden))
    factors = torch.ones_like(losses) if factors is None else factors.unsqueeze(1)
    factors = factors.masked_fill(is_ignored, 0)  # (N, 1)
    any_gradient = any(map(torch.is_tensor, gradients))
    buffer = hidden.new_empty(min(plan.chunk, N), V, dtype=_precise(hidden))
    for start in range(0, N, plan.chunk):
        rows = slice(start, start + plan.chunk)
        h = hidden[rows].to(plan.products)  # (chunk, C)
        x = _product_(buffer[: len(h)], h, weight.mT)  # (chunk, V)
        if bias is not None:
            x += bias
        factor = factors[rows] if any_gradient else None
        losses[rows] = plan.of_rows(x, labels[rows], factor, plan.terms)
        if of_hidden is not None:
            of_hidden[rows] = torch.mm(x.to(plan.products), weight)
        if of_weight is not None:
            _add_product_(of_weight, x.mT, h)
        if of_bias is not None:
            of_bias += x.sum(0)
    return losses.masked_fill_(is_ignored, 0).squeeze(1)


# What a kernel has to do in place of `losses_of_rows_`. The losses of rows with a factor of 0 and a
# gradient are not looked at: they are ignored, or have been handed out before.
OfRows = Callable[[Tensor, Tensor, Tensor | None, Terms], Tensor]


def losses_of_rows_(x: Tensor, labels: Tensor, factors: Tensor | None, terms: Terms) -> Tensor:
    """The losses (chunk, 1) of logits (chunk, V), which become their own gradients, times the
    factors (chunk, 1) if there are any; without, what the logits become is nothing."""
    share, cap, V = terms.label_smoothing, terms.soft_cap, x.shape[1]
    slope = None
    if cap is not None:
        x.div_(cap).tanh_()
        slope = x.square().neg_().add_(1) if factors is not None else None  # (chunk, V)
        x.mul_(cap)

    top = x.amax(1, keepdim=True)
    x.sub_(top)  # no exponential overflows, and at logits of 10⁴ a loss of 1 keeps its digits
    at_label = x.gather(1, labels)
    mean = x.mean(1, keepdim=True) if share else 0
    z = x.exp_().sum(1, keepdim=True)  # at least 1, at most V
    log_z = z.log()
    lse = top.add_(log_z)
    losses = log_z - (1 - share) * at_label - share * mean + terms.z_loss * lse.square()

    if factors is not None:
        x.mul_(factors * (1 + 2 * terms.z_loss * lse) / z)
        x.scatter_add_(1, labels, (share - 1) * factors)
        if share:
            x.sub_(factors * (share / V))
        if slope is not None:
            x.mul_(slope)
    return losses


# ------------------------------------------------------------------ products of low precision


def _precise(x: Tensor) -> torch.dtype:
    return torch.promote_types(x.dtype, torch.float32)


def _dtype_of_products(hidden: Tensor) -> torch.dtype:
    """That of `hidden`, or of autocast where it is on; float64 it leaves alone."""
    if _is_autocast(hidden):
        return torch.get_autocast_dtype(hidden.device.type)
    return hidden.dtype


def _is_autocast(x: Tensor) -> bool:
    return torch.is_autocast_enabled(x.device.type) and x.dtype != torch.float64


def _product_(out: Tensor, a: Tensor, b: Tensor) -> Tensor:
    """a @ b, put into `out`, which may be more precise than its factors."""
    if a.dtype == out.dtype:
        return torch.mm(a, b, out=out)
    if a.is_cuda:  # cuBLAS sums in float32 anyway, and need not round
        return torch.mm(a, b, out_dtype=out.dtype, out=out)
    return out.copy_(torch.mm(a, b))


def _add_product_(total: Tensor, a: Tensor, b: Tensor) -> Tensor:
    """Add a @ b to a total as precise as `a`, without a rounding on the way, nor a tensor as large
    as the total. The CPU has no such product of low precision: there it is one of float32."""
    if b.dtype != total.dtype and b.is_cuda:
        return torch.addmm(total, a.to(b.dtype), b, out_dtype=total.dtype, out=total)
    return total.addmm_(a, b.to(total.dtype))


# ------------------------------------------------------------------ what is refused


def _check(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    bias: Tensor | None,
    terms: Terms,
    reduction: Reduction,
) -> None:
    if reduction not in REDUCTIONS:
        raise ValueError(f"got reduction={reduction!r}; choose one of {', '.join(REDUCTIONS)}")
    if weight.ndim != 2:
        raise ValueError(f"got a weight of shape {tuple(weight.shape)}; give (V, C)")
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
        raise TypeError(f"got targets of {targets.dtype}; give the numbers of tokens, as int64")
    _check_dtypes(hidden, weight, bias)
    _check_range(targets, V, terms.ignore_index)


def _check_dtypes(hidden: Tensor, weight: Tensor, bias: Tensor | None) -> None:
    given = [x for x in (hidden, weight, bias) if x is not None]
    dtypes = {x.dtype for x in given}
    if not all(dtype.is_floating_point for dtype in dtypes):
        raise TypeError(f"got {_names(dtypes)}; give floating-point hidden, weight and bias")
    if len(dtypes) > 1 and not all(map(_is_autocast, given)):
        raise TypeError(
            f"got {_names(dtypes)} in hidden, weight and bias; give all in one dtype, or compute "
            f"under torch.autocast"
        )


def _names(dtypes: set[torch.dtype]) -> str:
    return " and ".join(sorted(str(dtype).removeprefix("torch.") for dtype in dtypes))


def _check_range(targets: Tensor, vocab_size: int, ignore_index: int) -> None:
    if targets.is_cuda:
        return
    _, labels = _labels(targets, ignore_index)
    is_outside = (labels < 0) | (labels >= vocab_size)
    if is_outside.any():
        raise IndexError(
            f"got the target {labels[is_outside][0].item()}; give 0 to {vocab_size - 1}, one of "
            f"the {vocab_size} rows of the weight, or ignore_index={ignore_index}"
        )
