"""Muon: step each matrix by its momentum with all singular values set to about 1.

Saves    half of AdamW's state for matrices: 4 bytes per weight. Embeddings, the output layer and
         vectors keep AdamW's 8.
Costs    fifteen matmuls per matrix in every step, in bfloat16. The temporaries of one matrix are
         4·m·n + 2·m² bytes for m × n weights with m ≤ n.
Source   Jordan et al. 2024, kellerjordan.github.io/posts/muon; learning rates: Liu et al. 2025,
         arXiv 2502.16982. torch.optim.Muon is the same step for matrices alone.

Adds to memlab.reference.muon: AdamW for all other weights in the same optimizer, a momentum updated
and a weight stepped some rows at a time, moments in bfloat16, stochastic rounding, both rules for
the learning rate, and the checks and state dicts of torch's optimizers.

An orthogonal update moves all directions of a matrix by the same amount, even if the gradient is
small in some. It needs the whole matrix: a rank of ZeRO that has a part of its rows cannot compute
it.

    optimizer = Muon(matrix_groups(model), lr=0.02, adjust_lr="original")
"""

import math
from collections.abc import Iterable, Sequence
from typing import Any, Literal

import torch
from torch import Tensor

from memlab.internals.settings import require_bools, require_counts
from memlab.optim.matrices import MatrixOptimizer, signed
from memlab.optim.moments import Moment, State

COEFFICIENTS = (3.4445, -4.7750, 2.0315)  # of σ, σ³ and σ⁵
SMALLEST_NORM = 1e-7
ADJUSTMENTS = ("original", "match_rms_adamw")


class Muon(MatrixOptimizer):
    """Muon for the matrices of groups with `matrices=True`, and AdamW for all other weights.

    lr            of matrices, adjusted to their shape, and of AdamW
    weight_decay  decoupled, of both
    momentum      of matrices; `nesterov` looks one gradient ahead
    ns_steps      Newton–Schulz steps, from 1
    adjust_lr     "match_rms_adamw": lr · 0.2·√max(rows, columns), for which AdamW's own lr and
                  weight decay fit (0.2 is the usual size of AdamW's updates). "original":
                  lr · √max(1, rows/columns), for which AdamW's weights need groups with another lr
    betas, eps    of AdamW

    Other arguments are memlab.optim.base.Optimizer's.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        weight_decay: float = 0.1,
        momentum: float = 0.95,
        nesterov: bool = True,
        ns_steps: int = 5,
        adjust_lr: Literal["original", "match_rms_adamw"] = "match_rms_adamw",
        betas: tuple[float, float] = (0.9, 0.95),
        eps: float = 1e-8,
        **base: Any,
    ) -> None:
        own: dict[str, Any] = {"momentum": momentum, "nesterov": nesterov, "ns_steps": ns_steps}
        own["adjust_lr"] = adjust_lr
        super().__init__(params, lr, betas, eps, weight_decay, own=own, **base)

    def require_group(self, group: dict[str, Any]) -> None:
        """Raise ValueError also for Muon's own settings."""
        super().require_group(group)
        if group["adjust_lr"] not in ADJUSTMENTS:
            raise ValueError(
                f"got adjust_lr={group['adjust_lr']!r}; give 'original' or 'match_rms_adamw'"
            )
        require_bools(nesterov=group["nesterov"])
        require_counts(ns_steps=group["ns_steps"])

    def matrix_moments(self, weight: Tensor, group: dict[str, Any]) -> Sequence[Moment]:
        """Return one momentum."""
        return (self.float_moment("momentum_buffer", group),)

    def step_matrix(
        self, weight: Tensor, gradient: Tensor, state: State, group: dict[str, Any]
    ) -> None:
        """Orthogonalize the momentum in bfloat16, and step by it."""
        # Passed in a list that is emptied, so that it is freed after the first Newton–Schulz step.
        # A call keeps its arguments alive while Dynamo watches frames, as after a failed compile.
        update = newton_schulz([self._ahead(weight, gradient, state, group)], group["ns_steps"])
        lr, precision = group["lr"], torch.promote_types(weight.dtype, torch.float32)
        for rows in self.rows_of(weight):
            part = weight[rows.as_slice]
            value = part.to(precision)
            value.mul_(1 - lr * group["weight_decay"])
            value.add_(update[rows.as_slice], alpha=-adjusted_lr(lr, weight, group["adjust_lr"]))
            if value is not part:
                self.write_weight(part, value, group)

    def _ahead(
        self, weight: Tensor, gradient: Tensor, state: State, group: dict[str, Any]
    ) -> Tensor:
        """Update the momentum; return it in bfloat16, one gradient ahead with `nesterov`."""
        (moment,), mu = self.matrix_moments(weight, group), group["momentum"]
        precision = torch.promote_types(weight.dtype, torch.float32)
        ahead = torch.empty(weight.shape, dtype=torch.bfloat16, device=weight.device)
        for rows in self.rows_of(weight):
            part = signed(gradient[rows.as_slice], group, precision)
            chunk = rows.of(weight.shape[1])
            average = moment.read(state, chunk).to(precision).view(part.shape)
            average.lerp_(part, 1 - mu)
            ahead[rows.as_slice] = part.lerp(average, mu) if group["nesterov"] else average
            moment.write(state, chunk, average.view(-1))
        return ahead


def newton_schulz(matrices: list[Tensor], steps: int) -> Tensor:
    """Return about U Vᵀ of the one matrix U Σ Vᵀ, which is taken from the list and scaled in place.

    At most two matrices of its size and one square matrix of its short side are in memory.
    """
    a, b, c = COEFFICIENTS
    matrix = matrices.pop()
    is_tall = matrix.shape[0] > matrix.shape[1]
    matrix.div_(matrix.norm().clamp(min=SMALLEST_NORM))  # every singular value is at most 1
    if is_tall:
        matrix = matrix.T  # (short, long)
    for _ in range(steps):
        gram = matrix @ matrix.T  # (short, short)
        gram = torch.addmm(gram, gram, gram, beta=b, alpha=c)
        matrix = torch.addmm(matrix, gram, matrix, beta=a)
    return matrix.T if is_tall else matrix


def adjusted_lr(lr: float, weight: Tensor, rule: str) -> float:
    """Return the learning rate of a matrix: an orthogonal update is smaller in a larger one."""
    rows, columns = weight.shape
    if rule == "original":
        return lr * math.sqrt(max(1, rows / columns))
    return lr * 0.2 * math.sqrt(max(rows, columns))
