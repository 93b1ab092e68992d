"""Chunked cross-entropy: compute the logits of a few rows, and turn them into gradients at once.

Saves    three tensors of rows × vocabulary: the logits, their log-softmax and its gradient.
Costs    nothing for a mean: the same three matmuls, in parts.
Source   Hsu et al. 2024 (Liger), arXiv 2410.10989, section 3.2.

    loss = log Σ exp(x) − x[y]           x the logits of a row, y its target
    d loss / dx = softmax(x) − onehot(y)

Rows are independent, so the gradients of a chunk are final in the forward pass; backward
multiplies them by the gradient of the loss. `memlab.losses.chunked_cross_entropy` is the version
to train with.
"""

from typing import Any

import torch
from torch import Tensor


def loss_and_gradient_(x: Tensor, targets: Tensor) -> Tensor:
    """Return the loss of each row; turn x (rows, V), float32, into its gradient. −100: ignored."""
    ignored = targets == -100
    labels = targets.masked_fill(ignored, 0).unsqueeze(1)
    at_label = x.sub_(x.amax(1, keepdim=True)).gather(1, labels)
    z = x.exp_().sum(1, keepdim=True)
    losses = (z.log() - at_label).squeeze(1)
    x.div_(z).scatter_add_(1, labels, -torch.ones_like(z))
    x.masked_fill_(ignored.unsqueeze(1), 0)
    return losses.masked_fill(ignored, 0)


class ChunkedLoss(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, targets: Tensor, chunk: int) -> Tensor:
        of_hidden = torch.zeros_like(hidden, dtype=torch.float32)
        of_weight = torch.zeros_like(weight, dtype=torch.float32)
        total = torch.zeros((), dtype=torch.float32, device=hidden.device)
        for start in range(0, len(hidden), chunk):
            rows = slice(start, start + chunk)
            x = (hidden[rows] @ weight.mT).float()
            total += loss_and_gradient_(x, targets[rows]).sum()
            of_hidden[rows] = x.to(weight.dtype) @ weight
            of_weight.addmm_(x.mT, hidden[rows].float())
            del x  # before the next chunk is made
        ctx.count = (targets != -100).sum().clamp(min=1)
        ctx.save_for_backward(of_hidden, of_weight)
        return total / ctx.count

    @staticmethod
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor | None, ...]:
        return *(g.mul_(upstream / ctx.count) for g in ctx.saved_tensors), None, None


def chunked_loss(hidden: Tensor, weight: Tensor, targets: Tensor, chunk: int) -> Tensor:
    """Return the mean loss of hidden (N, C) times weight (V, C), `chunk` rows at a time."""
    return ChunkedLoss.apply(hidden, weight, targets, chunk)
