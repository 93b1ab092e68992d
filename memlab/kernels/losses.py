"""Chunked cross-entropy in Triton: two reads turn logits into losses and gradients.

Saves    memory traffic: 12 bytes per logit, two reads and one write. memlab.losses moves 32 in
         separate operators, 44 with label smoothing, and 60 more with a soft cap. The cap's slope,
         a tensor as large as the chunk's logits, is recomputed instead of stored.
Costs    nothing: the matmuls are memlab.losses', and so is the memory.
Source   One kernel for the loss and its gradient in place: Hsu et al. 2024 (Liger), arXiv
         2410.10989. Online log-sum-exp: Milakov and Gimelshein 2018, arXiv 1805.02867.

Adds to memlab.reference.chunked_loss: one kernel per chunk, label smoothing, z-loss, soft caps and
ignored targets.

A program handles one row. Its first read keeps a running max m and the sum z of e^(x − m). When x
exceeds m, the earlier sum shrinks:

    d = x − m        z ← z·e^−|d| + 1,  m ← x     if d > 0
                     z ← z + e^−|d|               otherwise: one exponential in both cases

Each position of a block keeps its own m and z, so that threads do not wait for each other. At the
end the row's 2048 pairs are reduced to one. Then

    lse  = m + log z
    loss = log z + (m − x[y]) − ε·mean(x − x[y]) + ζ·lse²        ε label smoothing, ζ z-loss

is the loss of memlab.losses. Large terms cancel before they are summed, so a loss of 1 stays
precise when logits are ten thousand. The second read replaces each logit by its gradient.

Pitfalls:

    −∞ − (−∞)               is NaN, so the running max starts at the lowest float32, and a token
                            excluded by −∞ adds 0
    the logit at the label  is read before any thread writes
    tanh                    as 1 − 2/(e²ᵘ + 1) loses all precision near 0, where logits are; below
                            0.625 a polynomial is used
    invalid targets         would read another row or unallocated memory; their loss and gradients
                            are NaN (memlab.losses fails an assertion on a GPU)

The kernel is compiled for one vocabulary size. If it is a multiple of four, the compiler can load
four logits at once.

A row with a factor of 0, an ignored one, is not read; its gradients are zeros. float64 uses
memlab.losses' operators. Losses and gradients are within a relative 10⁻⁶ of the exact result, in
norm, as in memlab.losses. (A GPU's exponential of x adds an error of about |x|·2⁻²⁴.)
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
    """Run `memlab.losses.chunked_cross_entropy` with this kernel.

    Arguments, shapes and errors are the same, except that on a GPU a target outside the vocabulary
    gives a NaN loss.
    """
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
        kernel=rows_,
    )


def rows_(x: Tensor, labels: Tensor, factors: Tensor | None, terms: LossTerms) -> Tensor:
    """Return the losses (chunk, 1) of logits (chunk, V), and replace the logits by their gradients.

    Gradients are multiplied by `factors` (chunk, 1). Without factors the logits stay unchanged. A
    row with a factor of 0 has a loss of 0.
    """
    if x.dtype != torch.float32:
        return row_losses_(x, labels, factors, terms)
    rows, V = x.shape
    losses_out = torch.empty(rows, 1, dtype=torch.float32, device=x.device)
    smoothing, cap = terms.label_smoothing, terms.soft_cap
    block = min(_LARGEST_BLOCK, triton.next_power_of_2(V))
    launch(
        _row,
        (rows,),
        x,
        labels.contiguous(),
        None if factors is None else factors.contiguous(),
        losses_out,
        float(smoothing),
        float(smoothing / V),
        float(terms.z_loss),
        float(cap or 1),
        IS_SMOOTHED=smoothing > 0,
        IS_CAPPED=cap is not None,
        V=V,
        BLOCK=block,
        num_warps=max(1, block // 256),  # 8 logits per thread
    )
    return losses_out


@triton.jit
def _row(
    x_ptr,
    labels_ptr,
    factors_ptr,
    losses_ptr,
    smoothing,
    token_smoothing,
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
        is_valid = (label >= 0) & (label < V)
        logit = tl.load(x_ptr + label, is_valid, other=float("nan"))
        label_logit, _ = _soft_cap(logit, cap, IS_CAPPED)
        row_max, z, excess = _online_log_sum_exp(
            x_ptr, label_logit, cap, IS_SMOOTHED, IS_CAPPED, V, BLOCK
        )
        log_z = tl.log(z)
        lse = row_max + log_z
        loss = log_z + (row_max - label_logit) - token_smoothing * excess + z_loss * lse * lse
        tl.store(losses_ptr + row, loss)
        if factors_ptr is not None:
            factor = tl.where(is_valid, factor, float("nan"))
            scale = tl.div_rn(factor * (1 + 2 * z_loss * lse), z)
            label_grad, uniform_grad = (smoothing - 1) * factor, token_smoothing * factor
            _write_gradients(
                x_ptr, label, row_max, scale, label_grad, uniform_grad, cap, IS_CAPPED, V, BLOCK
            )


@triton.jit
def _online_log_sum_exp(
    x_ptr,
    label_logit,
    cap,
    IS_SMOOTHED: tl.constexpr,
    IS_CAPPED: tl.constexpr,
    V: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Return max x, Σ exp(x − max x), and if IS_SMOOTHED Σ (x − x[y])."""
    row_max = tl.full((BLOCK,), _LOWEST, tl.float32)
    z = tl.zeros((BLOCK,), tl.float32)
    excess = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, V, BLOCK):
        indices = start + tl.arange(0, BLOCK)
        is_token = indices < V
        x, _ = _soft_cap(tl.load(x_ptr + indices, is_token, other=0), cap, IS_CAPPED)
        if IS_SMOOTHED:
            excess += tl.where(is_token, x - label_logit, 0)
        x = tl.where(is_token, x, float("-inf"))
        d = x - row_max
        decay = tl.exp(-tl.abs(d))
        z = tl.where(d > 0, z * decay + 1, z + decay)
        row_max = tl.where(d > 0, x, row_max)
    new_max = tl.max(row_max, axis=0)
    return new_max, tl.sum(z * tl.exp(row_max - new_max), axis=0), tl.sum(excess, axis=0)


@triton.jit
def _write_gradients(
    x_ptr,
    label,
    row_max,
    scale,
    label_grad,
    uniform_grad,
    cap,
    IS_CAPPED: tl.constexpr,
    V: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Store scale·exp(x − row_max) − uniform_grad, plus label_grad at the label."""
    for start in range(0, V, BLOCK):
        indices = start + tl.arange(0, BLOCK)
        is_token = indices < V
        x, slope = _soft_cap(tl.load(x_ptr + indices, is_token, other=row_max), cap, IS_CAPPED)
        gradient = (
            scale * tl.exp(x - row_max) + tl.where(indices == label, label_grad, 0) - uniform_grad
        )
        tl.store(x_ptr + indices, gradient * slope, is_token)


@triton.jit
def _fill_with_zeros(x_ptr, V: tl.constexpr, BLOCK: tl.constexpr):
    for start in range(0, V, BLOCK):
        indices = start + tl.arange(0, BLOCK)
        tl.store(x_ptr + indices, tl.zeros((BLOCK,), tl.float32), indices < V)


@triton.jit
def _soft_cap(x, cap, IS_CAPPED: tl.constexpr):
    """Return cap·tanh(x / cap) and its slope; without a cap, x and 1."""
    slope = 1.0
    if IS_CAPPED:
        t = _tanh(tl.div_rn(x, cap))
        x = cap * t
        slope = 1 - t * t
    return x, slope


@triton.jit
def _tanh(u):
    """tanh with a relative error below 2⁻²¹; the polynomial is from Cephes (Moshier), tanhf."""
    decay = tl.exp(-2 * tl.abs(u))
    away_from_zero = (1 - decay) / (1 + decay)
    s = u * u
    p = -5.70498872745e-3 * s + 2.06390887954e-2
    p = p * s - 5.37397155531e-2
    p = p * s + 1.33314422036e-1
    p = p * s - 3.33332819422e-1
    return tl.where(
        tl.abs(u) < 0.625, p * s * u + u, tl.where(u < 0, -away_from_zero, away_from_zero)
    )
