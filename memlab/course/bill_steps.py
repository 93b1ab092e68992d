"""The running bill's training steps that more than one day measures, or continues."""

from collections.abc import Callable, Collection
from dataclasses import replace
from functools import partial
from typing import Any

from torch import nn

from memlab.checkpointing import ATTENTION, selective
from memlab.course.bill import SETTING
from memlab.offload import DiskStore, OffloadedOptimizer, offloaded_activations
from memlab.offload.layers import stream_layers
from memlab.optim import Lion8bit
from memlab.trace import Trace
from memlab.train import combined, dry_trace, of_all_weights
from memlab.train.plugs import averaged


def keep_of_each_block(model: Any, keep: Collection[Any]) -> None:
    """Checkpoint every block, and keep the outputs of the chosen operators."""
    for block in model.blocks:
        block.forward = partial(selective(keep), block.forward)


def checkpointed(techniques: str, keep: Collection[Any], **plugs: Any) -> Trace:
    """The bill's step with these techniques. Every block keeps the outputs of these operators."""
    technique = combined(techniques)

    def change(model: nn.Module) -> None:
        technique.change_model(model)
        keep_of_each_block(model, keep)

    return dry_trace(SETTING, replace(technique, change_model=change, **plugs))


def attention_kept(**plugs: Any) -> Trace:
    """Attention's outputs fit below the peak, which occurs when the last gradients are made and no
    activation is left."""
    return checkpointed("accumulation+bfloat16", ATTENTION, **plugs)


def momentum_in_8_bits() -> Trace:
    """Day 6's step, with Lion and 8-bit momentum, on bfloat16 weights with stochastic rounding."""
    return attention_kept(optimizer=of_all_weights(Lion8bit, rounding="stochastic"))


def in_chunks(keep: Collection[Any] = (), **plugs: Any) -> Trace:
    """Day 9's step with the loss in chunks, which leaves room for all eight sequences at once."""
    lion = of_all_weights(Lion8bit, rounding="stochastic")
    return checkpointed("bfloat16+chunked-loss", keep, **{"optimizer": lion, **plugs})


def offloaded_to_the_disk(**plugs: Any) -> Trace:
    """Day 11's step, with saved tensors, gradients and Lion's state on the disk."""
    store = DiskStore()
    stepping = partial(OffloadedOptimizer, store=store, sub_group=2**20, gradients=True)
    around: dict[str, Any] = {"around_forward": lambda device: offloaded_activations(store)}
    return in_chunks(**around, stepping=stepping, **plugs)


def everything_elsewhere() -> Trace:
    """Day 15's step with the weights on disk too, except for one block at a time."""
    store, streams = DiskStore(), []
    technique = combined("bfloat16+checkpointing+chunked-loss")

    def change(model: nn.Module) -> None:
        technique.change_model(model)
        streams.append(stream_layers(model, store))

    def after_step(model: nn.Module) -> Callable[[], object]:
        """Load the weights to update the averages, and offload them again."""
        with streams[0].present():
            update = averaged(model, store=DiskStore())

        def present_and_averaged() -> None:
            with streams[0].present():
                update()

        return present_and_averaged

    step = replace(
        technique,
        change_model=change,
        around_forward=lambda device: offloaded_activations(store),
        optimizer=combined("lion8bit").optimizer,
        stepping=partial(
            OffloadedOptimizer, store=store, sub_group=2**20, weights=True, gradients=True
        ),
        after_step=after_step,
    )
    return dry_trace(SETTING, step)
