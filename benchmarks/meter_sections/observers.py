"""The truth about a step that nobody watched, and the two observers that are held against it."""

import gc
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import cache
from itertools import accumulate
from typing import Any, TypeVar

from torch import Tensor
from torch.distributed._tools.mem_tracker import MemTracker
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.utils._python_dispatch import TorchDispatchMode

import memlab
from memlab.metering.profiler_recording import AllocatorRecording, record
from memlab.trace import Trace

from .plans import Builder
from .tallies import Off

T = TypeVar("T")


@dataclass(frozen=True)
class Truth:
    """The second step of a kind, unwatched; the first has made the optimizer's state."""

    recording: AllocatorRecording
    alive_bytes: int  # when it begins

    @property
    def peak_bytes(self) -> int:
        """Over what was alive and what operators return."""
        return self.alive_bytes + result_peak_bytes(self.recording)

    @property
    def peak_with_scratch_bytes(self) -> int:
        return self.alive_bytes + self.recording.peak_bytes


@cache
def truth_of(build: Builder) -> Truth:
    build()  # imports, and what torch keeps for good, belong to no step
    kept = []

    def first_step() -> None:
        kept.append(build())
        kept[0][0]()

    alive_bytes = record(first_step).live_bytes
    return Truth(recorded(build), alive_bytes)


def recorded(
    build: Builder, around: Callable[[], AbstractContextManager[Any]] = nullcontext
) -> AllocatorRecording:
    """The second step, inside `around()`, as the allocator has it."""
    step, _, _ = build()

    def run() -> None:
        with around():
            step()

    return record(run, warm_up=run)


def result_peak_bytes(recording: AllocatorRecording) -> int:
    """The peak over the blocks that outlive their operators, above what was alive before."""
    sizes = (event.bytes for event in recording.events if event.kind == "result")
    return max(accumulate(sizes, initial=0))


def results(recording: AllocatorRecording) -> Counter[int]:
    return Counter(e.bytes for e in recording.events if e.kind == "result" and e.bytes > 0)


class Nothing(TorchDispatchMode):
    """A mode that does nothing but be there, which alone changes what autograd does."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


# ------------------------------------------------------------------ the two observers


def metered(build: Builder) -> Trace:
    """The second step under memlab's meter."""
    step, model, optimizer = build()
    step()
    return memlab.measure(step, model=model, optimizer=optimizer)


def tracked_peak_bytes(
    build: Builder,
    tensors: type[Tensor],
    around: Callable[[MemTracker], AbstractContextManager[Any]],
) -> int:
    """The peak of the second step as MemTracker has it, all tensors alive registered with it."""
    from_before = living(tensors)
    step, model, optimizer = build()
    step()
    known = set(map(id, from_before))
    others = [tensor for tensor in living(tensors) if id(tensor) not in known]
    tracker = MemTracker()
    tracker.track_external(*others, optimizer, model)
    del others, from_before
    with warnings.catch_warnings(), around(tracker), tracker:
        warnings.simplefilter("ignore")
        step()
    return sum(device["Total"] for device in tracker.get_tracker_snapshot("peak").values())


def living(tensors: type[Tensor]) -> list[Tensor]:
    """All tensors of a type that Python knows of."""
    return [thing for thing in gc.get_objects() if issubclass(type(thing), tensors)]


@contextmanager
def reset_before_each_call(tracker: MemTracker) -> Iterator[None]:
    """What MemTracker's error message advises where a model is called more than once."""
    depth = 0

    def enter(*_: Any) -> None:
        nonlocal depth
        if depth == 0:
            tracker.reset_mod_stats()
        depth += 1

    def leave(*_: Any) -> None:
        nonlocal depth
        depth -= 1

    handles = (
        register_module_forward_pre_hook(enter),
        register_module_forward_hook(leave, always_call=True),
    )
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


CALLED_AGAIN = "the model is called more than once"
# A part of an error's message, and what it means in the words of somebody who trains.
REFUSALS = {
    "multiple iterative calls": CALLED_AGAIN,
    "KeyError: <weakref": CALLED_AGAIN,  # a hook of the first call finds its statistics reset
    "_will_engine_execute_node": "`torch.autograd.grad` in the step",
    "SparseTensorImpl": "sparse tensors",
    "makes a sparse tensor": "sparse tensors",
    "Couldn't swap": "`model.to(…)`",
    "Mixing fake modes": "`copy.deepcopy` of a module",
    "_local_scalar_dense": "a number is read",
    "aten.equal": "values are compared",
    "result depends on the values": "a shape depends on values",
    "DynamicOutputShape": "a shape depends on values",
    "reads the values of a tensor": "values decide how much memory",
}


def attempt(measure: Callable[[], T]) -> T | str:
    """What `measure()` returns, or why it does not."""
    try:
        return measure()
    except Exception as error:
        return in_a_phrase(error)


def in_a_phrase(error: Exception) -> str:
    """The error in the words of REFUSALS; an unknown one by its first line."""
    text = f"{type(error).__name__}: {error}"
    phrases = (phrase for fragment, phrase in REFUSALS.items() if fragment in text)
    return next(phrases, text.splitlines()[0])


@dataclass(frozen=True)
class Tracked:
    """MemTracker's answer."""

    figure: Off
    needs_resets: bool  # it refused until its statistics were reset before each call


def tracked(
    build: Builder,
    truth_bytes: int,
    inside: Callable[[], AbstractContextManager[Any]] = nullcontext,
    tensors: type[Tensor] = Tensor,
) -> Tracked:
    """MemTracker used plainly; with resets where the model is called more than once."""

    def figure(around: Callable[[MemTracker], AbstractContextManager[Any]]) -> int:
        with inside():
            return tracked_peak_bytes(build, tensors, around) - truth_bytes

    plainly = attempt(lambda: figure(nullcontext))
    if plainly != CALLED_AGAIN:
        return Tracked(plainly, needs_resets=False)
    return Tracked(attempt(lambda: figure(reset_before_each_call)), needs_resets=True)
