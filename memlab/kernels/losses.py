"""Chunked cross-entropy with a kernel: logits become losses and gradients in two readings.

Saves    bytes moved: 12 for each logit, two readings and one writing. memlab.losses, operator by
         operator, takes 32, with label smoothing 44, and with a soft cap 60 more. And the cap's
         slope, as large as a chunk's logits: here it is made when it is needed.
Costs    nothing more: the matrix products are those of memlab.losses, and so are its bytes.
Source   one kernel for the loss and its gradient in place: Hsu et al. 2024 (Liger), arXiv
         2410.10989. The sum beside a maximum that is still rising: Milakov and Gimelshein 2018,
         arXiv 1805.02867.

A program has a row. First it reads all of it once, and for a maximum m that is not known before the
end, keeps the sum z of e to the power of x − m: where x is above m, what was summed so far shrinks,

    d = x − m        z ← z·e^−|d| + 1,  m ← x     where d > 0
                     z ← z + e^−|d|               elsewhere: one exponential either way

in each of a block's places apart, so that threads need not wait for each other; at the end a
row's 2048 maxima and sums become one. Then

    lse  = m + log z
    loss = log z + (m − x[y]) − ε·mean(x − x[y]) + ζ·lse²        ε label smoothing, ζ z-loss

is the loss of memlab.losses: what is large is taken out before it is summed, so that at logits of
ten thousand a loss of 1 keeps its digits. The second reading has m and z, and writes over each
logit its gradient.

What is easily done wrong:

    −∞ less −∞              is NaN: a maximum begins at the lowest of float32, and a token that is
                            excluded by −∞ adds 0
    the logit at the label  is read before any thread begins to write
    tanh                    as 1 − 2/(e²ᵘ + 1) has no digits left near 0, where logits are: below
                            0.625 a polynomial
    a target outside        of the vocabulary would be another row's logit, or nobody's memory: its
                            loss and gradients are NaN (memlab.losses fails an assertion on a GPU)

The kernel is compiled for one vocabulary: a model has one, and of rows of a multiple of four logits
the compiler then knows that it may read four at once.

A row whose factor is 0, an ignored one, is not read: zeros are written. Of float64, memlab.losses'
own operators. Losses and gradients are within 10⁻⁶ of the exact, in length, as are those of
memlab.losses. (A GPU's exponential of x errs by some |x|·2⁻²⁴ more.)
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from memlab import losses
from memlab.kernels.launching import launch
from memlab.losses import LossTerms, Reduction, row_losses_

_LARGEST_BLOCK = 2048
_LOWEST = tl.constexpr(torch.finfo(torch.float32).min)


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
    """`memlab.losses.chunked_cross_entropy` with this kernel: arguments, shapes and errors are the
    same, but for a target outside the vocabulary on a GPU, of which the loss is NaN."""
    return losses.chunked_cross_entropy(
        hidden,
        weight,
        targets,
        bias=bias,
        chunk=chunk,
        ignore_index=ignore_index,
        label_smoothing=label_smoothing,
        z_loss=z_loss,
        soft_cap=soft_cap,
        reduction=reduction,
        row_losses=rows_,
    )


def rows_(x: Tensor, labels: Tensor, factors: Tensor | None, terms: LossTerms) -> Tensor:
    """The losses (chunk, 1) of logits (chunk, V), which become their own gradients, times the
    factors (chunk, 1) if there are any. Without, the logits stay; a row with a factor of 0 has a
    loss of 0."""
    if x.dtype != torch.float32:
        return row_losses_(x, labels, factors, terms)
    rows, V = x.shape
    found = torch.empty(rows, 1, device=x.device)
    share, cap = terms.label_smoothing, terms.soft_cap
    block = min(_LARGEST_BLOCK, triton.next_power_of_2(V))
    launch(
        _row,
        (rows,),
        x,
        labels.contiguous(),
        None if factors is None else factors.contiguous(),
        found,
        float(share),
        float(share / V),
        float(terms.z_loss),
        float(cap or 1),
        IS_SMOOTHED=share > 0,
        IS_CAPPED=cap is not None,
        V=V,
        BLOCK=block,
        num_warps=max(1, block // 256),  # 8 logits a thread
    )
    return found


@triton.jit
def _row(
    x_ptr,
    labels_ptr,
    factors_ptr,
    losses_ptr,
    share,
    share_of_each,
    z_loss,
    cap,
    IS_SMOOTHED: tl.constexpr,
    IS_CAPPED: tl.constexpr,
    V: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    x_ptr += row * V
    factor = 1.0
    if factors_ptr is not None:
        factor = tl.load(factors_ptr + row)
    if factor == 0:
        _fill_with_zeros(x_ptr, V, BLOCK)
        tl.store(losses_ptr + row, 0.0)
    else:
        label = tl.load(labels_ptr + row)
        is_inside = (label >= 0) & (label < V)
        logit = tl.load(x_ptr + label, is_inside, other=float("nan"))
        at_label, _ = _capped(logit, cap, IS_CAPPED)
        top, z, beyond = _read(x_ptr, at_label, cap, IS_SMOOTHED, IS_CAPPED, V, BLOCK)
        log_z = tl.log(z)
        lse = top + log_z
        loss = log_z + (top - at_label) - share_of_each * beyond + z_loss * lse * lse
        tl.store(losses_ptr + row, loss)
        if factors_ptr is not None:
            factor = tl.where(is_inside, factor, float("nan"))
            of_all = tl.div_rn(factor * (1 + 2 * z_loss * lse), z)
            of_label, of_each = (share - 1) * factor, share_of_each * factor
            _write(x_ptr, label, top, of_all, of_label, of_each, cap, IS_CAPPED, V, BLOCK)


@triton.jit
def _read(
    x_ptr,
    at_label,
    cap,
    IS_SMOOTHED: tl.constexpr,
    IS_CAPPED: tl.constexpr,
    V: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """max x, Σ exp(x − max x), and where it is asked for Σ (x − x[y])"""
    top = tl.full((BLOCK,), _LOWEST, tl.float32)
    z = tl.zeros((BLOCK,), tl.float32)
    beyond = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, V, BLOCK):
        places = start + tl.arange(0, BLOCK)
        is_token = places < V
        x, _ = _capped(tl.load(x_ptr + places, is_token, other=0), cap, IS_CAPPED)
        if IS_SMOOTHED:
            beyond += tl.where(is_token, x - at_label, 0)
        x = tl.where(is_token, x, float("-inf"))
        d = x - top
        e = tl.exp(-tl.abs(d))
        z = tl.where(d > 0, z * e + 1, z + e)
        top = tl.where(d > 0, x, top)
    of_all = tl.max(top, axis=0)
    return of_all, tl.sum(z * tl.exp(top - of_all), axis=0), tl.sum(beyond, axis=0)


@triton.jit
def _write(
    x_ptr,
    label,
    top,
    of_all,
    of_label,
    of_each,
    cap,
    IS_CAPPED: tl.constexpr,
    V: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Over each logit its gradient, of_all·exp(x − top) − of_each, and of_label at the label."""
    for start in range(0, V, BLOCK):
        places = start + tl.arange(0, BLOCK)
        is_token = places < V
        x, slope = _capped(tl.load(x_ptr + places, is_token, other=top), cap, IS_CAPPED)
        gradient = of_all * tl.exp(x - top) + tl.where(places == label, of_label, 0) - of_each
        tl.store(x_ptr + places, gradient * slope, is_token)


@triton.jit
def _fill_with_zeros(x_ptr, V: tl.constexpr, BLOCK: tl.constexpr):
    for start in range(0, V, BLOCK):
        places = start + tl.arange(0, BLOCK)
        tl.store(x_ptr + places, tl.zeros((BLOCK,), tl.float32), places < V)


@triton.jit
def _capped(x, cap, IS_CAPPED: tl.constexpr):
    """cap·tanh(x / cap) and its slope; without a cap x and 1"""
    slope = 1.0
    if IS_CAPPED:
        t = _tanh(tl.div_rn(x, cap))
        x = cap * t
        slope = 1 - t * t
    return x, slope


@triton.jit
def _tanh(u):
    """Within 2⁻²¹ of it, relatively; the polynomial is that of Cephes (Moshier), tanhf."""
    e = tl.exp(-2 * tl.abs(u))
    far = (1 - e) / (1 + e)
    s = u * u
    p = -5.70498872745e-3 * s + 2.06390887954e-2
    p = p * s - 5.37397155531e-2
    p = p * s + 1.33314422036e-1
    p = p * s - 3.33332819422e-1
    return tl.where(tl.abs(u) < 0.625, p * s * u + u, tl.where(u < 0, -far, far))
