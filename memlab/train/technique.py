"""What memlab knows about a technique, in one record. Reading a record imports no torch."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple


class BlockBytes(NamedTuple):
    """The bytes of one transformer block's saved tensors, by kind.

    input     the block's input
    matmuls   the outputs of its matmuls and of attention
    """

    input: int
    matmuls: int


@dataclass(frozen=True)
class Code:
    """The lines that turn a technique on in a user's training script.

    A script has `model`, `optimizer`, `inputs` and `targets`; `loss_of(model, inputs, targets)`
    stands for its forward pass. `memlab` uses this library, `production` the most common package.
    It is empty if no maintained package has the technique.
    """

    memlab: tuple[str, ...]
    production: tuple[str, ...] = ()


def _whole(hidden_size: int) -> int:
    return 0


@dataclass(frozen=True)
class MatrixStep:
    """The costs of an optimizer's special step for hidden layers' matrices.

    Each is a function of the matrix's short side, its long side and the rank.

    state_bytes       optimizer state
    temporary_bytes   the step's temporaries at their peak, without chunks of rows
    operations        operations of the step's matmuls
    rank              the rank for a model's hidden size; AdamW steps a matrix whose short side is
                      not longer than the rank
    operations_dtype  the dtype of those matmuls
    """

    state_bytes: Callable[[int, int, int], int]
    temporary_bytes: Callable[[int, int, int], int]
    operations: Callable[[int, int, int], int]
    rank: Callable[[int], int] = _whole
    operations_dtype: str = "bfloat16"


@dataclass(frozen=True)
class Technique:
    """One row of the registry (memlab.train.registry). Every default is the plain step's.

    summary          what it does, in one line
    plugs            how it fills the plugs of a training step (memlab.train.plugs.Plugs): for each
                     plug a function that returns the value, and imports torch only when called
    choice           the field of a planner's Recipe that turns it on, and the value; None: the
                     planner does not search it
    slot             techniques with the same slot exclude each other
    exclusive_with   techniques that it does not work with, and why
    cannot_shard     why ZeRO cannot shard its state
    whole_weights    why ZeRO cannot shard the weights (stage 3)
    matmul_dtype     the dtype of its matmuls, if not the weights' dtype
    state_bytes      optimizer state for each trained weight
    step_copies      how many float32 copies of a chunk of a weight its step makes
    matrix_step      the costs of its special step for hidden layers' matrices, if it has one;
                     `state_bytes` is then the state of all other weights
    kept             bytes of a block's saved tensors that it keeps for backward
    encoded          bytes of this many elements saved for backward; None: saved unchanged
    recomputed       the recomputed share of the blocks' forward pass
    on_disk          which of "weights", "gradients", "state" and "activations" are on the disk
                     while the device does not need them
    costs            what it costs, for a user who is about to turn it on
    code             the lines that turn it on in a script
    """

    summary: str
    plugs: Mapping[str, Callable[[], Any]] = field(default_factory=dict)
    choice: tuple[str, Any] | None = None
    slot: str | None = None
    exclusive_with: Mapping[str, str] = field(default_factory=dict)
    cannot_shard: str | None = None
    whole_weights: str | None = None
    matmul_dtype: str | None = None
    state_bytes: float | None = None
    step_copies: float | None = None
    matrix_step: MatrixStep | None = None
    kept: Callable[[BlockBytes], int] | None = None
    encoded: Callable[[int], int] | None = None
    recomputed: float = 0.0
    on_disk: frozenset[str] = frozenset()
    costs: str = ""
    code: Code = Code(())
