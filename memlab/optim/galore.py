"""GaLore: AdamW's moments of the gradient's projection onto its r largest directions.

Saves    for a matrix of m × n weights (m ≤ n) the state is 4·(m·r + 2·n·r) bytes, not 8·m·n.
         Embeddings, the output layer and vectors keep AdamW's 8 bytes per weight.
Costs    an SVD of each matrix's gradient once in `gap` steps. Between two of them the weights only
         move in r directions, and the moments stay as they are when the directions change.
Source   Zhao et al. 2024, arXiv 2403.03507. The authors' package is
         galore-torch.

Adds to memlab.reference.galore: AdamW for all other weights in the same optimizer, steps of some
rows at a time, so that no temporary is as large as the matrix, state in bfloat16, stochastic
rounding, and the checks and state dicts of torch's optimizers.

A singular vector is defined up to its sign, so new directions can turn a moment's sign around. The
paper leaves the moments as they are when the directions change, and so does this file.

The SVD needs whole matrices: U, Σ and Vᵀ are 4·(m² + m + m·n) bytes, a gradient in bfloat16 is
copied to float32, and the library behind torch.linalg.svd (LAPACK, cuSOLVER) takes a workspace
of its own. memlab.measure sees the first two. memlab.predict does not know the workspace, so a
prediction of a step with an SVD is a lower bound. Steps without one are exact. A step with an SVD
raises torch.linalg.LinAlgError for a gradient with an infinity or NaN.

    optimizer = GaLore(matrix_groups(model), lr=1e-3, rank=1024)
"""

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from memlab.internals.settings import require_counts
from memlab.optim.adamw import adam_settings
from memlab.optim.matrices import (
    MatrixMoment,
    MatrixOptimizer,
    long_side_first,
    require_scale,
    signed,
)
from memlab.optim.moments import Moment, State


class GaLore(MatrixOptimizer):
    """GaLore for matrices whose short side is longer than `rank`, and AdamW for all other weights.

    rank    directions learned at a time, in groups with `matrices=True`
    gap     steps between two projections
    scale   of the projected update: 0.25 in the paper

    Other arguments are AdamW's. The state's tensors of a matrix have its long side first.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        rank: int = 128,
        gap: int = 200,
        scale: float = 0.25,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        **base: Any,
    ) -> None:
        own = {"rank": rank, "gap": gap, "scale": scale}
        super().__init__(params, lr, betas, eps, weight_decay, own=own, **base)

    def require_group(self, group: dict[str, Any]) -> None:
        """Raise ValueError also for GaLore's own settings."""
        super().require_group(group)
        require_counts(rank=group["rank"], gap=group["gap"])
        require_scale(group["scale"])

    def steps_as_matrix(self, weight: Tensor, group: dict[str, Any]) -> bool:
        """Return whether a weight is a matrix that the projection makes smaller."""
        return super().steps_as_matrix(weight, group) and min(weight.shape) > group["rank"]

    def matrix_moments(self, weight: Tensor, group: dict[str, Any]) -> Sequence[Moment]:
        """Return the projector (short side, rank), and both moments (long side, rank)."""
        short, long, rank = min(weight.shape), max(weight.shape), group["rank"]
        shapes = {"projector": short, "exp_avg": long, "exp_avg_sq": long}
        return [
            MatrixMoment(name, group["moment_dtype"], self.generator, (side, rank))
            for name, side in shapes.items()
        ]

    def step_matrix(
        self, weight: Tensor, gradient: Tensor, state: State, group: dict[str, Any]
    ) -> None:
        """Step the moments of the projected gradient, and the weight by their projection back."""
        moments, rank = self.matrix_moments(weight, group), group["rank"]
        settings = {**adam_settings(group), "step": state["step"], "scale": group["scale"]}
        weight, gradient = long_side_first(weight), long_side_first(gradient)  # (long, short)
        precision = torch.promote_types(weight.dtype, torch.float32)
        if (state["step"] - 1) % group["gap"] == 0:
            # Written into the state, because a slice of the SVD's result keeps all of it alive.
            state["projector"].copy_(largest_directions(gradient.to(precision), rank))
        projector = state["projector"].to(precision)  # (short, rank)
        for rows in self.rows_of(weight):
            part, chunk = weight[rows.as_slice], rows.of(rank)
            values = [each.read(state, chunk).to(precision).view(-1, rank) for each in moments[1:]]
            value = part.to(precision)
            galore_(
                value, signed(gradient[rows.as_slice], group, precision), projector, *values,
                **settings,
            )  # fmt: skip
            for moment, new in zip(moments[1:], values, strict=True):
                moment.write(state, chunk, new.view(-1))
            if value is not part:
                self.write_weight(part, value, group)


def largest_directions(gradient: Tensor, rank: int) -> Tensor:
    """Return the singular vectors of a gradient's short side (short, rank), the largest first.

    `gradient` is (long, short).
    """
    # A view of all m² elements. galore-torch 1.0 stores it for float32: 6,400 bytes for 40 × 90 at
    # rank 8, where a copy has 1,280. `.contiguous()` copies nothing for one column of a
    # column-major matrix.
    return torch.linalg.svd(gradient.T, full_matrices=False)[0][:, :rank]


def galore_(
    weight: Tensor,
    gradient: Tensor,
    projector: Tensor,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    *,
    step: int,
    lr: float,
    scale: float,
    betas: tuple[float, float],
    eps: float,
    weight_decay: float,
) -> None:
    """Algorithm 2 in place, for rows of a matrix with its long side first; `step` starts at 1.

    weight, gradient (rows, short); projector (short, rank); moments (rank,) for each row.
    """
    low = gradient @ projector  # (rows, rank)
    direction = adam_direction_(low, exp_avg, exp_avg_sq, step=step, betas=betas, eps=eps)
    weight.mul_(1 - lr * weight_decay)
    weight.addmm_(direction, projector.T, alpha=-lr * scale)


def adam_direction_(
    gradient: Tensor,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    *,
    step: int,
    betas: tuple[float, float],
    eps: float,
) -> Tensor:
    """Update both moments in place and return Adam's step for a learning rate of 1."""
    beta1, beta2 = betas
    exp_avg.lerp_(gradient, 1 - beta1)
    exp_avg_sq.mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)
    root = exp_avg_sq.sqrt().div_((1 - beta2**step) ** 0.5).add_(eps)
    return (exp_avg / (1 - beta1**step)).div_(root)
