"""Training steps: the setting, the techniques, and the traces of a step.

adapters    the adapters of LoRA and QLoRA
technique   what memlab knows about a technique, in one record
registry    the techniques, one row each
plugs       the plugs of a step, and how the registry's rows fill them
step        the step itself: run, metered, in a dry run, predicted
ranks       the same for one of ZeRO's ranks

    trace = dry_trace(Setting("124m"), combined("checkpointing+autocast"))
"""

from typing import TYPE_CHECKING

from memlab.internals.lazy import lazily

if TYPE_CHECKING:
    from memlab.train.adapters import Adapters
    from memlab.train.plugs import (
        Plugs,
        combined,
        of_all_weights,
        to_bfloat16,
    )
    from memlab.train.ranks import (
        RankTraining,
        build_rank,
        measured_rank,
        predicted_rank_trace,
        rank_step,
    )
    from memlab.train.registry import COMBINATIONS, TECHNIQUES
    from memlab.train.step import (
        SEED,
        Setting,
        Training,
        build,
        dry_trace,
        measured,
        predicted_trace,
    )
    from memlab.train.technique import Technique

_HOME_OF = {
    **dict.fromkeys(
        ("Plugs", "combined", "of_all_weights", "to_bfloat16"),
        "memlab.train.plugs",
    ),
    **dict.fromkeys(("COMBINATIONS", "TECHNIQUES"), "memlab.train.registry"),
    **dict.fromkeys(
        ("SEED", "Setting", "Training", "build", "dry_trace", "measured", "predicted_trace"),
        "memlab.train.step",
    ),
    **dict.fromkeys(
        ("RankTraining", "build_rank", "measured_rank", "predicted_rank_trace", "rank_step"),
        "memlab.train.ranks",
    ),
    "Adapters": "memlab.train.adapters",
    "Technique": "memlab.train.technique",
}
__all__ = [
    "COMBINATIONS",
    "SEED",
    "TECHNIQUES",
    "Adapters",
    "Plugs",
    "RankTraining",
    "Setting",
    "Technique",
    "Training",
    "build",
    "build_rank",
    "combined",
    "dry_trace",
    "measured",
    "measured_rank",
    "of_all_weights",
    "predicted_rank_trace",
    "predicted_trace",
    "rank_step",
    "to_bfloat16",
]

__getattr__ = lazily(__name__, _HOME_OF)
