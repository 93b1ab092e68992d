"""ZeRO, stages 1 to 3: shard optimizer state, gradients and weights over R ranks.

`partition` plans the shards, the formulas count bytes, and `simulate` trains R ranks in one
process.
"""

from memlab.zero.formulas import communication_bytes, model_state_bytes
from memlab.zero.partitioning import Partition, Weight, partition
from memlab.zero.simulation import Simulation, Step, one_rank, simulate
from memlab.zero.units import describe, units_of

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
