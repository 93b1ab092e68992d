"""The step of one of ZeRO's ranks: in a real process, in a dry run, or predicted for a GPU.

All three build the rank in the same way, so a real rank allocates what a dry run predicts. A real
rank does not overlap communication with computation: that would need one more unit's weights and
gradients (`memlab.zero.processes`).
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

from torch import Tensor, nn

from memlab import zero
from memlab.accumulation import split
from memlab.dry_runs import dry_run
from memlab.metering import measure, meter
from memlab.prediction import predict
from memlab.trace import Trace
from memlab.train.plugs import Plugs, master_weights_optimizer, plain_optimizer, plugs_of
from memlab.train.registry import ONE_PROCESS
from memlab.train.step import Setting, make_batch, make_model
from memlab.train.technique import Technique
from memlab.zero import processes
from memlab.zero.stepping import RankGroup

OnLoss = Callable[[Tensor], object]


@dataclass(frozen=True)
class RankTraining:
    """A rank's step, which can run repeatedly.

    `batch` holds the tokens and targets that every step reads. To train on others, copy them into
    these tensors.
    """

    step: Callable[[], zero.Step]
    group: RankGroup
    batch: tuple[Tensor, Tensor]


def build_rank(
    setting: Setting, technique: Technique | Plugs, stage: int, *, on_loss: OnLoss | None = None
) -> RankTraining:
    """Build the training of this process's rank, which has joined a process group.

    The step trains on the mean loss over all ranks' batches. `on_loss` is called with each
    micro-batch's own loss.

    Raises ValueError and TypeError for what cannot be sharded.
    """
    return _rank(setting, technique, partial(processes.shard, stage=stage, overlap=False), on_loss)


def measured_rank(training: RankTraining) -> Trace:
    """Return the trace of this rank's next step. All ranks have to step together."""
    [rank] = training.group.ranks
    return measure(training.step, model=rank.model, optimizer=rank.optimizer)


def rank_step(setting: Setting, technique: Technique | Plugs, ranks: int, stage: int) -> zero.Step:
    """The second step of one of `ranks` ranks in a stage of ZeRO, as a dry run. Each rank has the
    setting's batch.

    Raises ValueError and TypeError for what `zero.one_rank` cannot shard.
    """
    with dry_run():
        shard = partial(zero.one_rank, ranks=ranks, stage=stage, meter=meter)
        return _rank(setting, technique, shard).step()


def predicted_rank_trace(
    setting: Setting, technique: Technique | Plugs, ranks: int, stage: int
) -> Trace:
    """The trace of such a step, predicted for the setting's device: "cuda" or another target of
    `predict`. Needs no GPU."""

    def parts() -> tuple[Callable[[], zero.Step], None, None]:
        shard = partial(zero.one_rank, ranks=ranks, stage=stage)
        return _rank(replace(setting, device="cuda"), technique, shard).step, None, None

    return predict(parts, device=setting.device)


def _rank(
    setting: Setting,
    technique: Technique | Plugs,
    shard: Callable[..., RankGroup],
    on_loss: OnLoss | None = None,
) -> RankTraining:
    plugs = plugs_of(technique)
    for plug, reason in ONE_PROCESS.items():
        if getattr(plugs, plug) is not getattr(Plugs, plug):
            raise ValueError(reason)

    def share_of_loss(model: nn.Module, part: tuple[Tensor, Tensor]) -> tuple[Tensor, float]:
        with plugs.around_forward(setting.device):
            loss = model(*part)
        if on_loss is not None:
            on_loss(loss.detach())
        # Not a sum over tokens and their number: scaled, that overflows float16.
        share = len(part[0]) / setting.batch
        return loss * share, share

    # Ranks have float32 copies of their own: of shards.
    copies = plugs.optimizer is master_weights_optimizer
    made = plain_optimizer if copies else plugs.optimizer
    model = make_model(setting, plugs)
    group = shard(model, made(model), master_weights=copies)
    batch = make_batch(setting)
    parts = list(split(batch, plugs.micro_batch or setting.batch))
    scaler = plugs.scaler() if plugs.scaler else None
    return RankTraining(lambda: group.step(parts, share_of_loss, scaler=scaler), group, batch)
