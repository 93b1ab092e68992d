"""APOLLO: step by the gradient itself, each channel scaled as Adam would scale it in r dimensions.

Saves    for a matrix of m × n weights (m ≤ n) the state is 8·n·r + 4 bytes, not 8·m·n. With
         rank 1 (APOLLO-Mini): two elements per column. Embeddings, the output layer and
         vectors keep AdamW's 8 bytes per weight.
Costs    normal numbers for the projection in every step, and two passes over the gradient. Without
         momentum in full size, steps are noisier than AdamW's.
Source   Zhu et al. 2024, arXiv 2412.05270; the limit on the norm's
         growth: Chen et al. 2024 (Fira), arXiv 2410.01623. The authors' package is
         apollo-torch.

Adds to memlab.reference.apollo: AdamW for all other weights in the same optimizer, passes over some
rows at a time, so that no temporary is as large as the matrix, state in bfloat16, stochastic
rounding, and the checks and state dicts of torch's optimizers.

AdamW's step for a column is often close to the column's gradient times one scale: the ratio of
their norms. A random projection nearly preserves both norms, so r elements per column are enough to
estimate the scale. The projection is drawn from a seed whenever it is needed. All matrices with the
same short side use the same one, so that the order of weights does not matter.

    optimizer = Apollo(matrix_groups(model), lr=1e-2, rank=256)
    optimizer = Apollo(matrix_groups(model), lr=1e-2, **MINI)
"""

from collections.abc import Iterable, Sequence
from typing import Any, Literal

import torch
from torch import Tensor

from memlab.internals.settings import require_counts
from memlab.optim.galore import adam_direction_
from memlab.optim.matrices import (
    MatrixMoment,
    MatrixOptimizer,
    Rows,
    long_side_first,
    require_scale,
    signed,
)
from memlab.optim.moments import Moment, State

# The limit acts before the bias corrections, as in apollo-torch: seven steps agree to 5e-7.
MOST_GROWTH = 1.01  # of an update's norm from step to step
SMALLEST_NORM = 1e-8
MINI: dict[str, Any] = {"rank": 1, "scale": 128**0.5, "scale_by": "tensor"}


class Apollo(MatrixOptimizer):
    """APOLLO for matrices whose short side is longer than `rank`, and AdamW for all other weights.

    rank       dimensions of the projection, in groups with `matrices=True`
    gap        steps between two random projections
    scale      of the update: 1 in the paper, √128 for APOLLO-Mini (`MINI`)
    scale_by   "channel": a number for each element of the long side; "tensor": one for the matrix
    seed       of the projections

    Other arguments are AdamW's. The state's tensors of a matrix have its long side first.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-2,
        rank: int = 128,
        gap: int = 200,
        scale: float = 1.0,
        scale_by: Literal["channel", "tensor"] = "channel",
        seed: int = 0,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        **base: Any,
    ) -> None:
        own = {"rank": rank, "gap": gap, "scale": scale, "scale_by": scale_by, "seed": seed}
        super().__init__(params, lr, betas, eps, weight_decay, own=own, **base)

    def require_group(self, group: dict[str, Any]) -> None:
        """Raise ValueError also for APOLLO's own settings."""
        super().require_group(group)
        require_counts(rank=group["rank"], gap=group["gap"])
        require_scale(group["scale"])
        if group["scale_by"] not in ("channel", "tensor"):
            raise ValueError(f"got scale_by={group['scale_by']!r}; give 'channel' or 'tensor'")
        if isinstance(group["seed"], bool) or not isinstance(group["seed"], int):
            raise ValueError(f"got seed={group['seed']!r}; give an integer")

    def steps_as_matrix(self, weight: Tensor, group: dict[str, Any]) -> bool:
        """Return whether a weight is a matrix that the projection makes smaller."""
        return super().steps_as_matrix(weight, group) and min(weight.shape) > group["rank"]

    def matrix_moments(self, weight: Tensor, group: dict[str, Any]) -> Sequence[Moment]:
        """Return both moments (long side, rank), and the norm of the last update (1,)."""
        kind, shape = group["moment_dtype"], (max(weight.shape), group["rank"])
        return (
            MatrixMoment("exp_avg", kind, self.generator, shape),
            MatrixMoment("exp_avg_sq", kind, self.generator, shape),
            MatrixMoment("norm", None, None, (1,)),
        )

    def step_matrix(
        self, weight: Tensor, gradient: Tensor, state: State, group: dict[str, Any]
    ) -> None:
        """Find each channel's scale and the gradient's norm after it, then step the weight."""
        weight, gradient = long_side_first(weight), long_side_first(gradient)  # (long, short)
        precision = torch.promote_types(weight.dtype, torch.float32)
        factors, norm = self._factors(weight, gradient, state, group)
        norm = norm / bias_correction(state["step"], group["betas"])
        last = state["norm"]
        limited = torch.where(last > 0, norm.minimum(MOST_GROWTH * last), norm)
        last.copy_(limited)
        # An update of zeros stays one.
        factors = factors * (group["scale"] * limited / norm.clamp(min=SMALLEST_NORM))
        lr = group["lr"]
        for rows in self.rows_of(weight):
            part = weight[rows.as_slice]
            value, update = part.to(precision), signed(gradient[rows.as_slice], group, precision)
            value.mul_(1 - lr * group["weight_decay"])
            value.addcmul_(update, _of_rows(factors, rows), value=-lr)
            if value is not part:
                self.write_weight(part, value, group)

    def _factors(
        self, weight: Tensor, gradient: Tensor, state: State, group: dict[str, Any]
    ) -> tuple[Tensor, Tensor]:
        """Step the moments; return the scale of each channel (long, 1) or of the matrix (1, 1), and
        the norm of the scaled gradient (1,)."""
        moments, rank = self.matrix_moments(weight, group)[:2], group["rank"]
        precision = torch.promote_types(weight.dtype, torch.float32)
        projector = random_projector(weight, state["step"], group).to(precision)
        squares = torch.zeros(len(weight), 3, dtype=precision, device=weight.device)
        for rows in self.rows_of(weight):
            chunk = rows.of(rank)
            values = [each.read(state, chunk).to(precision).view(-1, rank) for each in moments]
            part = signed(gradient[rows.as_slice], group, precision)
            low = part @ projector  # (rows, rank)
            direction = adam_direction_(
                low, *values, step=state["step"], betas=group["betas"], eps=group["eps"]
            )
            for place, each in enumerate((direction, low, part)):
                squares[rows.as_slice, place] = each.square().sum(1)
            for moment, new in zip(moments, values, strict=True):
                moment.write(state, chunk, new.view(-1))
        if group["scale_by"] == "tensor":
            squares = squares.sum(0, keepdim=True)  # (1, 3)
        stepped, projected, full = squares.sqrt().unbind(1)
        factors = stepped / (projected + SMALLEST_NORM)
        return factors.view(-1, 1), (factors * full).norm().view(1)


def random_projector(weight: Tensor, step: int, group: dict[str, Any]) -> Tensor:
    """Return normal numbers (short side, rank) of variance 1/rank, the same for `gap` steps."""
    drawn = torch.Generator(weight.device)
    drawn.manual_seed(group["seed"] + (step - 1) // group["gap"])
    shape = min(weight.shape), group["rank"]
    normal = torch.randn(shape, generator=drawn, dtype=torch.float32, device=weight.device)
    return normal.div_(group["rank"] ** 0.5)


def bias_correction(step: int, betas: tuple[float, float]) -> float:
    """Return Adam's factor for moments that start at zero. The norm is limited without it."""
    return float((1 - betas[1] ** step) ** 0.5 / (1 - betas[0] ** step))


def _of_rows(factors: Tensor, rows: Rows) -> Tensor:
    return factors[rows.as_slice] if len(factors) > 1 else factors
