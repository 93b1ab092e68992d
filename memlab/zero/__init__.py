"""ZeRO, stages 1 to 3: shard optimizer state, gradients and weights over R ranks.

`partition` plans the shards, the formulas count bytes, and `simulate` trains R ranks in one
process.
"""

from typing import TYPE_CHECKING

from memlab.internals.lazy import lazily

if TYPE_CHECKING:
    from memlab.zero.formulas import communication_bytes, model_state_bytes
    from memlab.zero.partitioning import Partition, Weight, partition
    from memlab.zero.simulation import Simulation, Step, one_rank, simulate
    from memlab.zero.units import describe, units_of

_HOME_OF = {
    **dict.fromkeys(("communication_bytes", "model_state_bytes"), "memlab.zero.formulas"),
    **dict.fromkeys(("Partition", "Weight", "partition"), "memlab.zero.partitioning"),
    **dict.fromkeys(("Simulation", "Step", "one_rank", "simulate"), "memlab.zero.simulation"),
    **dict.fromkeys(("describe", "units_of"), "memlab.zero.units"),
}

__all__ = [
    "Partition",
    "Simulation",
    "Step",
    "Weight",
    "communication_bytes",
    "describe",
    "model_state_bytes",
    "one_rank",
    "partition",
    "simulate",
    "units_of",
]

__getattr__ = lazily(__name__, _HOME_OF)
