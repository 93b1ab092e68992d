"""Optimizers with a step of their own for matrices, and which weights are such matrices.

    optimizer = Muon(matrix_groups(model), lr=0.02)

A matrix of a hidden layer multiplies activations: its rows and columns are directions, and its
update can be rotated, orthogonalized or projected. An embedding is a table of vectors; a
step reads a few. Norms and biases are vectors. Those, and the output layer, keep AdamW's step, as
in the papers of Muon, GaLore and APOLLO.

`MatrixOptimizer` is the loop: a subclass names the state of a matrix and steps it, some rows at a
time. All other weights take AdamW's step.
"""

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from memlab.internals.chunks import chunk_size_on, chunk_starts
from memlab.internals.settings import number, require_bools
from memlab.optim.adamw import AdamW
from memlab.optim.base import Optimizer, require_dense
from memlab.optim.moments import Chunk, FloatMoment, Moment, State

# ------------------------------------------------------------------ which weights


def matrix_groups(model: nn.Module) -> list[dict[str, Any]]:
    """Return two parameter groups: the matrices of hidden layers, and all other trained weights.

    The second group has `matrices=False` and takes AdamW's step. It has the embeddings, a linear
    layer with as many outputs as the largest embedding has rows (the output layer), and all weights
    with other than two dimensions. Both groups have names.

    Raise ValueError for a model without hidden matrices.
    """
    elsewhere = _tables(model)
    named = [(name, weight) for name, weight in model.named_parameters() if weight.requires_grad]
    matrices = [(n, w) for n, w in named if w.ndim == 2 and w not in elsewhere]
    if not matrices:
        raise ValueError(
            f"got {type(model).__name__} with {len(named)} trained weights, none of them a matrix "
            f"of a hidden layer; use memlab.optim.AdamW"
        )
    chosen = {weight for _, weight in matrices}
    others = [(name, weight) for name, weight in named if weight not in chosen]
    return [
        {"params": matrices, "matrices": True},
        *([{"params": others, "matrices": False}] if others else []),
    ]


def _tables(model: nn.Module) -> set[Tensor]:
    """Return the weights of embeddings and of the output layer."""
    embeddings = [module for module in model.modules() if isinstance(module, nn.Embedding)]
    vocab_size = max((module.num_embeddings for module in embeddings), default=None)
    outputs = [
        module
        for module in model.modules()
        if isinstance(module, nn.Linear) and module.out_features == vocab_size
    ]
    return {each.weight for each in embeddings} | {each.weight for each in outputs}


# ------------------------------------------------------------------ the loop


class Rows(NamedTuple):
    """Some rows of a matrix."""

    start: int
    stop: int

    @property
    def as_slice(self) -> slice:
        return slice(self.start, self.stop)

    def of(self, columns: int) -> Chunk:
        """Return the rows of a matrix with so many columns as a chunk of its elements."""
        return Chunk(self.start * columns, self.stop * columns)


@dataclass(frozen=True)
class MatrixMoment(FloatMoment):
    """A float moment with its own shape, such as a projected gradient's."""

    shape: Sequence[int] = ()

    def new(self, weight: Tensor, others: Any) -> State:
        """Return zeros in `shape`."""
        dtype = self.dtype or torch.promote_types(weight.dtype, torch.float32)
        return {self.name: torch.zeros(tuple(self.shape), dtype=dtype, device=weight.device)}


class MatrixOptimizer(AdamW):
    """AdamW whose two-dimensional weights take another step, in groups with `matrices=True`.

    `matrices` is True unless a group says otherwise: pass `matrix_groups(model)`, which leaves
    embeddings and the output layer to AdamW. A subclass passes its own settings as `own`; further
    arguments are memlab.optim.base.Optimizer's.
    """

    is_elementwise = False
    takes_dtensors = False

    def __init__(
        self,
        params: Iterable[Any],
        lr: float,
        betas: tuple[float, float],
        eps: float,
        weight_decay: float,
        *,
        own: dict[str, Any],
        **base: Any,
    ) -> None:
        defaults = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        # Not AdamW's __init__, which takes no settings but these.
        Optimizer.__init__(self, params, {**defaults, "matrices": True, **own}, **base)

    def require_group(self, group: dict[str, Any]) -> None:
        """Raise TypeError also for `matrices` other than True or False."""
        super().require_group(group)
        require_bools(matrices=group["matrices"])

    def steps_as_matrix(self, weight: Tensor, group: dict[str, Any]) -> bool:
        """Return whether a weight takes the matrix step, not AdamW's."""
        return weight.ndim == 2 and group["matrices"]

    def matrix_moments(self, weight: Tensor, group: dict[str, Any]) -> Sequence[Moment]:
        """Return the state of a matrix."""
        raise NotImplementedError

    def step_matrix(
        self, weight: Tensor, gradient: Tensor, state: State, group: dict[str, Any]
    ) -> None:
        """Step a matrix and its state in place. `state["step"]` starts at 1."""
        raise NotImplementedError

    def moments(self, weight: Tensor, group: dict[str, Any]) -> Sequence[Moment]:
        """Return AdamW's moments, or the matrix's."""
        if self.steps_as_matrix(weight, group):
            return self.matrix_moments(weight, group)
        return super().moments(weight, group)

    def rows_of(self, matrix: Tensor) -> Iterator[Rows]:
        """Split a matrix into chunks of whole rows."""
        count, columns = matrix.shape
        size = max(1, (self.chunk or chunk_size_on(matrix.device)) // max(1, columns))
        for start in chunk_starts(matrix, size * columns):
            first = start // columns
            yield Rows(first, min(first + size, count))

    def _step_weight(self, weight: Tensor, group: dict[str, Any]) -> None:
        if not self.steps_as_matrix(weight, group):
            super()._step_weight(weight, group)
            return
        gradient = require_dense(weight.grad)
        state = self.state[weight]
        if not state:
            state.update(self._new_state(weight, group, self.state.values()))
        state["step"] += 1
        self.step_matrix(weight, gradient, state, group)


def signed(gradient: Tensor, group: dict[str, Any], precision: torch.dtype) -> Tensor:
    """Return some rows of a gradient in at least float32, with a minus sign for `maximize`."""
    return (-gradient if group["maximize"] else gradient).to(precision)


def long_side_first(matrix: Tensor) -> Tensor:
    """Return a matrix, or its transposed view, with at least as many rows as columns."""
    # A square matrix counts as tall, as in galore-torch and apollo-torch.
    return matrix if matrix.shape[0] >= matrix.shape[1] else matrix.T


def require_scale(scale: Any) -> None:
    """Raise ValueError unless the scale of an update is positive and finite."""
    if not 0 < number("scale", scale) < math.inf:
        raise ValueError(f"got scale={scale}; give a finite number above 0")
