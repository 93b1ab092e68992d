"""A configuration predicted on the CPU: the second step, and the process that led to it.

Whether a block finds room in the cache depends on all that came before it: how the model was built,
and the first step. A prediction's trace has that as its history. Here both are one stream of what
was asked for, which the simulated allocator can be given under any settings and any cap.
"""

import math
from dataclasses import dataclass, replace
from functools import cached_property

import memlab
from memlab import Kernels
from memlab.allocator import Blocks, Settings, simulate
from memlab.metering.cycles import no_cycle_collection
from memlab.trace import Event, Trace

from .configurations import Configuration, Size

_PRECISION_BYTES = 2**20


@dataclass(frozen=True)
class Prediction:
    """What a configuration is expected to take."""

    trace: Trace  # of the second step
    whole: tuple[Event, ...]  # of the process, as the tensors ask for it: no rounding
    step_at: int  # where in `whole` the second step begins

    @property
    def step(self) -> tuple[Event, ...]:
        return self.whole[self.step_at :]

    @cached_property
    def blocks(self) -> Blocks:
        """What the process makes of a card without end."""
        return simulate(self.whole)

    def allocated_peak_bytes(self, blocks: Blocks) -> int:
        """In the second step, of what was handed out: with what blocks waste."""
        return max(blocks.allocated[max(self.step_at - 1, 0) :], default=0)

    def least_cap_bytes(self, total_bytes: int, settings: Settings | None = None) -> int:
        """The smallest cap on what the process may reserve under which it runs, to 1 MiB; under a
        lower one the allocator gives its cache back and still finds no room."""
        settings = settings or Settings()
        too_low, enough = 0, self.need_bytes(total_bytes, settings)
        while enough - too_low > _PRECISION_BYTES:
            middle = (too_low + enough) // 2
            if self.fits(settings, middle, total_bytes):
                enough = middle
            else:
                too_low = middle
        return enough

    def need_bytes(self, total_bytes: int, settings: Settings) -> int:
        """What is reserved where nothing limits it but the card."""
        return simulate(self.whole, replace(settings, capacity_bytes=total_bytes)).reserved_bytes

    def fits(self, settings: Settings, cap_bytes: int, total_bytes: int) -> bool:
        return simulate(self.whole, capped(settings, cap_bytes, total_bytes)).fits


def capped(settings: Settings, cap_bytes: int | None, total_bytes: int) -> Settings:
    """The settings under a cap on what a process may reserve of a card."""
    if cap_bytes is None:
        return settings
    fraction = fraction_of(cap_bytes, total_bytes)
    return replace(settings, memory_fraction=fraction, capacity_bytes=total_bytes)


def settings_of(conf: str, cap_bytes: int | None, total_bytes: int) -> Settings:
    """The settings of a PYTORCH_ALLOC_CONF, under a cap."""
    capacity_bytes = None if cap_bytes is None else total_bytes
    return capped(Settings.parse(conf, capacity_bytes=capacity_bytes), cap_bytes, total_bytes)


def fraction_of(cap_bytes: int, total_bytes: int) -> float:
    """What to give to `set_per_process_memory_fraction`, which rounds down."""
    return min(1.0, math.nextafter(cap_bytes / total_bytes, 1.0))


def predicted(configuration: Configuration, size: Size, target: str) -> Prediction:
    """Raises whatever the prediction raises."""
    trace = step_predicted(configuration, size, target)
    return Prediction(trace, *_whole(trace))


def step_predicted(
    configuration: Configuration, size: Size, target: str, kernels: Kernels | None = None
) -> Trace:
    """The second step alone, as users predict it."""
    with no_cycle_collection():
        return memlab.predict(
            lambda: configuration.build(size, "cuda"), target=target, kernels=kernels or Kernels()
        )


def _whole(trace: Trace) -> tuple[tuple[Event, ...], int]:
    """What was asked for from the first allocation on, and where the step begins in it."""
    history = [event for event in trace.history if event.category != "rounding"]
    step = [e for e in trace.events if e.phase != "before" and e.category != "rounding"]
    return (*history, *step), len(history)
