"""The allocator's record as reference, and the two observers to compare with it."""

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
class Reference:
    """The allocator's record of a second step; the first step creates the optimizer state."""

    recording: AllocatorRecording
    alive_bytes: int  # at the beginning of the step

    @property
    def peak_bytes(self) -> int:
        """Return the peak without scratch."""
        return self.alive_bytes + result_peak_bytes(self.recording)

    @property
    def peak_with_scratch_bytes(self) -> int:
        return self.alive_bytes + self.recording.peak_bytes


@cache
def reference_of(build: Builder) -> Reference:
    build()  # imports and torch's caches do not belong to the step
    kept = []

    def first_step() -> None:
        kept.append(build())
        kept[0][0]()

    alive_bytes = record(first_step).live_bytes
    return Reference(recorded(build), alive_bytes)


def recorded(
    build: Builder, around: Callable[[], AbstractContextManager[Any]] = nullcontext
) -> AllocatorRecording:
    """Record the second step inside `around()` with the profiler."""
    step, _, _ = build()

    def run() -> None:
        with around():
            step()

    return record(run, warm_up=run)


def result_peak_bytes(recording: AllocatorRecording) -> int:
    """Return the peak of operators' results, beyond the bytes alive before the step."""
    sizes = (event.bytes for event in recording.events if event.kind == "result")
    return max(accumulate(sizes, initial=0))


def results(recording: AllocatorRecording) -> Counter[int]:
    return Counter(e.bytes for e in recording.events if e.kind == "result" and e.bytes > 0)


class EmptyMode(TorchDispatchMode):
    """A dispatch mode without effect; its presence alone changes autograd's allocations."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


# ------------------------------------------------------------------ observers


def measured(build: Builder) -> Trace:
    """Measure the second step with memlab."""
    step, model, optimizer = build()
    step()
    return memlab.measure(step, model=model, optimizer=optimizer)


def tracked_peak_bytes(
    build: Builder,
    tensors: type[Tensor],
    around: Callable[[MemTracker], AbstractContextManager[Any]],
) -> int:
    """Return MemTracker's peak of the second step, with all live tensors registered."""
    existing = living(tensors)
    step, model, optimizer = build()
    step()
    known = set(map(id, existing))
    others = [tensor for tensor in living(tensors) if id(tensor) not in known]
    tracker = MemTracker()
    tracker.track_external(*others, optimizer, model)
    del others, existing
    with warnings.catch_warnings(), around(tracker), tracker:
        warnings.simplefilter("ignore")
        step()
    return sum(device["Total"] for device in tracker.get_tracker_snapshot("peak").values())


def living(tensors: type[Tensor]) -> list[Tensor]:
    """Return all live tensors of a type."""
    return [thing for thing in gc.get_objects() if issubclass(type(thing), tensors)]


@contextmanager
def reset_before_each_call(tracker: MemTracker) -> Iterator[None]:
    """Reset MemTracker before each call of the model, as its error message advises."""
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
# Fragments of error messages, and short explanations.
REFUSALS = {
    "multiple iterative calls": CALLED_AGAIN,
    "KeyError: <weakref": CALLED_AGAIN,  # a hook of the first call misses its statistics
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
    """Return `measure()`, or why it failed."""
    try:
        return measure()
    except Exception as error:
        return explanation_of(error)


def explanation_of(error: Exception) -> str:
    """Return the explanation from REFUSALS, or the error's first line."""
    text = f"{type(error).__name__}: {error}"
    phrases = (phrase for fragment, phrase in REFUSALS.items() if fragment in text)
    return next(phrases, text.splitlines()[0])


@dataclass(frozen=True)
class MemTrackerAnswer:
    """MemTracker's error in bytes, or why it refused."""

    figure: Off
    needs_resets: bool  # it refused until its statistics were reset before each call


def tracked(
    build: Builder,
    reference_bytes: int,
    inside: Callable[[], AbstractContextManager[Any]] = nullcontext,
    tensors: type[Tensor] = Tensor,
) -> MemTrackerAnswer:
    """Run MemTracker, with resets if it refuses because the model is called more than once."""

    def figure(around: Callable[[MemTracker], AbstractContextManager[Any]]) -> int:
        with inside():
            return tracked_peak_bytes(build, tensors, around) - reference_bytes

    plainly = attempt(lambda: figure(nullcontext))
    if plainly != CALLED_AGAIN:
        return MemTrackerAnswer(plainly, needs_resets=False)
    return MemTrackerAnswer(attempt(lambda: figure(reset_before_each_call)), needs_resets=True)
