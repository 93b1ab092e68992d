"""The device's answers beside the meter's stream: every byte at the peak gets a name.

    parameters … temporaries   what the meter saw, under the names that it gave
    workspace                  blocks that the allocator handed out and no storage lies in: the
                               scratch of kernels, and of libraries (cuBLAS keeps its own)
    rounding                   what blocks are larger than what was asked for
    unattributed               the rest: what was there before the step and the meter does not
                               know, and what the device counts and no one saw

Where the allocator keeps a history (CUDA, ROCm), the history gives the order and the meter the
names. In it are also blocks that the step takes only because it is watched: where autograd would
write into `old`, it allocates `new`, and `old` dies. The meter has taken such pairs out of its
stream. So here, neither the allocation of `new` nor the free of `old` is an event: from then on
`new` stands for `old`, and the bytes that both took at once are named in a note.

Without a history, the meter's stream is the base, and what separates its peak from the device's is
one event at the start. Where the device counts no peak (MPS for long), the stream's peak stands.
"""

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from itertools import accumulate
from typing import NamedTuple

import torch

from memlab.metering.answers import Accelerator, AllocatorWatch, Answers, Block, Entry, Watch
from memlab.metering.cuda import CudaWatch
from memlab.metering.mps import Mps
from memlab.metering.registry import Sighting, Storage
from memlab.metering.storages import Change
from memlab.trace import DeviceMemory, Event
from memlab.units import format_bytes

WATCHES: dict[str, Callable[[torch.device], Watch]] = {
    "cpu": Watch,
    "meta": Watch,
    "cuda": CudaWatch,  # ROCm too
    "mps": lambda device: AllocatorWatch(device, Mps()),
}

# Numbers for what is no storage; storages count from 1. Workspaces count down from _WORKSPACE.
_KNOWN_TO_NO_ONE, _SEEN_BY_NO_ONE, _ROUNDING, _WORKSPACE = 0, -1, -2, -3


def watch(device: torch.device) -> Watch:
    """A watch for the device: `start()` before the step, `stop()` after it."""
    known = WATCHES.get(device.type)
    return known(device) if known else AllocatorWatch(device, Accelerator())


class Completed(NamedTuple):
    """What a Trace is made of."""

    events: tuple[Event, ...]
    memory: DeviceMemory
    notes: tuple[str, ...]


def complete(changes: Iterable[Change], answers: Answers) -> Completed:
    """The events on the device, completed with what only the device knows.

    Their peak is the device's own, less what the step takes only because it is watched.
    """
    own = [change for change in changes if _is_on(answers.device, change.record.device)]
    if answers.history is None:
        events, device_peak = _from_stream(own, answers)
        extra = 0
    ...
