"""Log-probabilities of given tokens, without the logits of all rows at once.

Saves    all but one chunk of the logits, their log-softmax and its gradient: what DPO, GRPO and
         distillation need is one number per token.
Costs    the logits' matmul once more, in backward.
Source   the identity log softmax(x)[y] = x[y] − log Σ exp x; recomputation: Chen et al. 2016,
         arXiv 1604.06174.

`memlab.losses.token_log_probs` is the version to train with.
"""

from collections.abc import Callable

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint


def recompute(function: Callable[..., Tensor], *inputs: Tensor) -> Tensor:
    """Return function(*inputs); autograd keeps only the inputs."""
    return checkpoint(function, *inputs, use_reentrant=False)


def of_rows(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    """Return log p(target) of each row, float32: hidden (N, C), weight (V, C), targets (N,)."""
    x = (hidden @ weight.mT).float()  # (N, V)
    return x.gather(1, targets.unsqueeze(1)).squeeze(1) - x.logsumexp(1)


def log_probs(hidden: Tensor, weight: Tensor, targets: Tensor, chunk: int) -> Tensor:
    """Return the same, `chunk` rows at a time; backward computes a chunk's logits again."""
    parts = []
    for rows, wanted in zip(hidden.split(chunk), targets.split(chunk), strict=True):
        parts.append(recompute(of_rows, rows, weight, wanted))
    return torch.cat(parts)
