"""Prediction of a configuration on the CPU: the whole process up to the end of the second step.

The state of the cache depends on all earlier allocations: building the model and the first step. A
trace keeps them as its history. Here history and second step form one stream of requests, for the
simulated allocator to run under any settings and limit.
"""

import math
from dataclasses import dataclass, replace
from functools import cached_property

import memlab
from memlab import Kernels
from memlab.allocator import Blocks, Settings, simulate
from memlab.internals.cycles import no_cycle_collection
from memlab.trace import Event, Trace

from .configurations import Configuration, Size

_PRECISION_BYTES = 2**20


@dataclass(frozen=True)
class Prediction:
    """The predicted allocations of a configuration."""

    trace: Trace  # of the second step
    whole: tuple[Event, ...]  # requests of the whole process, without rounding
    step_at: int  # index in `whole` where the second step begins

    @property
    def step(self) -> tuple[Event, ...]:
        return self.whole[self.step_at :]

    @cached_property
    def blocks(self) -> Blocks:
        """Return the simulated blocks on a GPU of unlimited memory."""
        return simulate(self.whole)

    def allocated_peak_bytes(self, blocks: Blocks) -> int:
        """Return the allocated peak of the second step, with the blocks' waste."""
        return max(blocks.allocated[max(self.step_at - 1, 0) :], default=0)

    def least_cap_bytes(self, total_bytes: int, settings: Settings | None = None) -> int:
        """Return the smallest limit of reserved memory under which the process runs, to 1 MiB.

        Under a lower limit the allocator runs out of memory even after it frees its cache.
        """
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
        """Return the reserved memory if only the GPU limits it."""
        return simulate(self.whole, replace(settings, capacity_bytes=total_bytes)).reserved_bytes

    def fits(self, settings: Settings, cap_bytes: int, total_bytes: int) -> bool:
        return simulate(self.whole, capped(settings, cap_bytes, total_bytes)).fits


def capped(settings: Settings, cap_bytes: int | None, total_bytes: int) -> Settings:
    """Return the settings with a limit of reserved memory."""
    if cap_bytes is None:
        return settings
    fraction = fraction_of(cap_bytes, total_bytes)
    return replace(settings, memory_fraction=fraction, capacity_bytes=total_bytes)


def settings_of(conf: str, cap_bytes: int | None, total_bytes: int) -> Settings:
    """Return the settings of a PYTORCH_ALLOC_CONF with a limit of reserved memory."""
    capacity_bytes = None if cap_bytes is None else total_bytes
    return capped(Settings.parse(conf, capacity_bytes=capacity_bytes), cap_bytes, total_bytes)


def fraction_of(cap_bytes: int, total_bytes: int) -> float:
    """Return the argument for `set_per_process_memory_fraction`, which rounds down."""
    return min(1.0, math.nextafter(cap_bytes / total_bytes, 1.0))


def predicted(configuration: Configuration, size: Size, target: str) -> Prediction:
    """Predict the whole process; errors of the prediction propagate."""
    trace = step_predicted(configuration, size, target)
    return Prediction(trace, *_whole(trace))


def step_predicted(
    configuration: Configuration, size: Size, target: str, kernels: Kernels | None = None
) -> Trace:
    """Predict the second step, with its history."""
    with no_cycle_collection():
        return memlab.predict(
            lambda: configuration.build(size, "cuda"), device=target, kernels=kernels or Kernels()
        )


def _whole(trace: Trace) -> tuple[tuple[Event, ...], int]:
    """Return all requests from the first allocation on, and the index of the second step."""
    history = [event for event in trace.history if event.category != "rounding"]
    step = [e for e in trace.events if e.phase != "before" and e.category != "rounding"]
    return (*history, *step), len(history)
