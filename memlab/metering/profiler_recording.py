"""Record a step's allocations with torch's profiler: the ground truth for the meter.

The meter's dispatch mode changes the step slightly (memlab.metering.observer). torch's profiler
does not: with `profile_memory` the CPU's allocator logs every allocation and free itself, exact to
the byte. A recording has three kinds of blocks:

    result    outlives the operator that allocated it; the meter must see exactly these
    scratch   freed before its operator returns: a kernel workspace, invisible to the dispatcher
              (0 to 60% of the bytes that a step allocates, for microseconds each). The meter knows
              one kind: copies of inputs that a kernel cannot read in place (copies.py)
    stray     allocated outside operators: a Python scalar converted to a tensor (8 bytes), or the
              generator state that checkpointing saves (5,056 bytes)

A block's operator is the outermost one that reaches the dispatcher's kernels: `aten::linear` is a
composite and does not; `aten::convolution` does, so operators inside it do not count.

Only the CPU's allocator and the calling thread are recorded. Frees of blocks from before the
profiler are left out, because their size is unknown; pass `warm_up` to include them.
"""

import gc
import os
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache, cached_property
from itertools import accumulate, pairwise
from math import inf
from tempfile import TemporaryFile
from typing import Any, Literal, NamedTuple

from torch.profiler import ProfilerActivity, profile, record_function

from memlab.internals.cycles import no_cycle_collection
from memlab.internals.torch_internals import (
    EventType,
    ExperimentalConfig,
    TorchDispatchMode,
    has_kernel,
)
from memlab.metering.storages import SCRATCH_NOTE
from memlab.trace import Event, Trace
from memlab.units import format_bytes

Step = Callable[[], object]
Kind = Literal["result", "scratch", "stray"]

_STEP = "memlab: the recorded step"
_PROFILER_MESSAGES = (
    b"SyncActivityProfilerHandler",
    b"Memory block of unknown size was allocated before",
    b"gpuGetDeviceCount failed",  # a CUDA build on a machine without a GPU
)
_NODE = "autograd::engine::evaluate_function: "


class MemoryEvent(NamedTuple):
    """An allocation (`bytes` > 0) or a free (`bytes` < 0)."""

    bytes: int
    address: int
    kind: Kind
    operator: str  # the operator that allocated the block, "" for a stray
    node: str  # the autograd node that called the operator, "" in forward


@dataclass(frozen=True)
class AllocatorRecording:
    """The memory events of one step, in order, relative to the memory at its start.

    `bytes_at_start` is the memory that `warm_up` allocated and kept. Without a warm-up, frees of
    blocks from before the step are not recorded.
    """

    events: tuple[MemoryEvent, ...]
    bytes_at_start: int = 0
    warmed_up: bool = False

    @cached_property
    def peak_bytes(self) -> int:
        """The peak memory, minus the memory at the start."""
        return _peak(event.bytes for event in self.events)

    @cached_property
    def live_bytes(self) -> int:
        """The memory at the end, minus the memory at the start."""
        return sum(event.bytes for event in self.events)

    @cached_property
    def allocations(self) -> Counter[int]:
        """The number of allocations of each size."""
        return Counter(event.bytes for event in self.events if event.bytes > 0)

    def allocated_by(self, kind: Kind) -> Counter[str]:
        """Return the bytes allocated as blocks of this kind, by operator."""
        sums: Counter[str] = Counter()
        for event in self.events:
            if event.kind == kind and event.bytes > 0:
                sums[event.operator] += event.bytes
        return sums


def record(step: Step, *, warm_up: Step | None = None) -> AllocatorRecording:
    """Run `step()` once under the profiler and return its memory events.

    `warm_up` runs first and is not recorded, but frees of its blocks are. So
    `record(step, warm_up=step)` records a second step, which frees the first step's gradients.

    Python's cyclic collector is off, because it would free cycles at different moments in two runs
    of one step. Turn it off for the trace to compare with, too. Cycles left by the warm-up are
    collected before the step.
    """
    return _recording(_profiled(step, warm_up), warmed_up=warm_up is not None)


# ------------------------------------------------------------------ comparing a trace


@dataclass(frozen=True)
class TraceComparison:
    """A meter's allocations compared with a recording. Differences are observed minus recorded."""

    missing: Counter[int]  # observed sizes that the recording does not have
    unseen: Counter[int]  # sizes of results that were not observed
    excess: Counter[int]  # sizes of all blocks that were not observed, with scratch and strays
    excess_share: float  # the excess bytes as a fraction of all allocated bytes
    live_difference: int
    peak_difference: int  # between the peaks over observable blocks
    real_peak_difference: int  # between the peaks over all blocks; minus the scratch at the peak
    peak_bytes: int  # recorded, over all blocks

    @property
    def exact(self) -> bool:
        """True if exactly the results were observed, and the peaks are equal."""
        differs = self.missing or self.unseen or self.live_difference or self.peak_difference
        return not differs

    @property
    def excess_bytes(self) -> int:
        return _bytes_of(self.excess)

    def __str__(self) -> str:
        lines = [
            f"exact: {'yes' if self.exact else 'no'}",
            f"observed, but not allocated: {_describe(self.missing)}",
            f"results not observed: {_describe(self.unseen)}",
            f"scratch and strays: {self.excess.total()} blocks, {format_bytes(self.excess_bytes)}, "
            f"{self.excess_share:.1%} of the bytes",
            f"alive at the end: {self.live_difference:+d} B",
            f"peak: {self.peak_difference:+d} B, with scratch {self.real_peak_difference:+d} B "
            f"of {self.peak_bytes:,} B",
        ]
        return "\n".join(lines)

    __repr__ = __str__


def compare(observed: Trace | Iterable[int], recording: AllocatorRecording) -> TraceComparison:
    """Compare a Trace, or a sequence of sizes (frees negative), with a recording of the same step.

    A Trace's storages from before the step are left out; their frees too, if the recording has no
    warm-up. An allocation is matched with a result of its size, or else with a stray. It never
    matches scratch, which would hide a wrong allocation; a Trace's workspaces only match scratch.
    """
    events = _comparable(observed, recording)
    sizes = [event.bytes for event in events if event.category != "workspace"]
    seen = Counter(size for size in sizes if size > 0)
    known_scratch = Counter(e.bytes for e in events if e.category == "workspace" and e.bytes > 0)
    results, strays = _allocated(recording, "result"), _allocated(recording, "stray")
    visible = list(_visible(recording.events, seen - results))
    excess = recording.allocations - seen - known_scratch
    real_peak = _peak(event.bytes for event in events)
    return TraceComparison(
        missing=seen - (results + strays) + (known_scratch - _allocated(recording, "scratch")),
        unseen=results - seen,
        excess=excess,
        excess_share=_bytes_of(excess) / max(1, _bytes_of(recording.allocations)),
        live_difference=sum(sizes) - sum(visible),
        peak_difference=_peak(sizes) - _peak(visible),
        real_peak_difference=real_peak - recording.peak_bytes,
        peak_bytes=recording.peak_bytes,
    )


def with_workspace(trace: Trace, recording: AllocatorRecording) -> Trace:
    """Add the recording's scratch to a trace of the same step, as events of category workspace.

    The two are merged event by event, so the peak of the result is the CPU allocator's real peak.
    The recording's scratch includes the workspaces that the trace has already.
    Raises ValueError if the trace is not exact against the recording.
    """
    comparison = compare(trace, recording)
    if not comparison.exact:
        raise ValueError(
            f"the trace and the recording differ; pass a recording of the same step:\n{comparison}"
        )
    recorded: list[Any] = [e for e in _comparable(trace, recording) if e.category != "workspace"]
    strays = Counter(e.bytes for e in recorded if e.bytes > 0) - _allocated(recording, "result")
    merged = [event for event in trace.events if event.phase == "before"]
    rest = [event for event in trace.events[len(merged) :] if event.category != "workspace"]
    seen, expected = iter(rest), iter(recorded)
    numbers: dict[int, int] = {}
    for event, is_visible in _with_visibility(recording.events, strays):
        if is_visible:
            merged += _until(next(expected), seen)
        else:
            if event.bytes > 0:
                numbers[event.address] = -1 - len(numbers)
            merged.append(_workspace(event, numbers[event.address], merged[-1].phase))
    notes = tuple(note for note in trace.notes if note != SCRATCH_NOTE)
    return replace(trace, events=(*merged, *seen), notes=notes)


class _Size(NamedTuple):
    """An observed change of bytes, of which nothing else is known."""

    bytes: int
    category: str = ""


def _until(last: Event, events: Iterator[Event]) -> Iterator[Event]:
    """Yield the events up to `last`, inclusive."""
    for event in events:
        yield event
        if event is last:
            return


def _workspace(event: MemoryEvent, number: int, phase: str) -> Event:
    """Return a workspace event. `number` is negative, because storages have positive numbers."""
    operator = event.operator.replace("::", ".") or "outside of operators"
    phase = "forward" if phase == "before" else phase
    return Event(event.bytes, number, "workspace", operator, "", phase, "uint8", ())


def _allocated(recording: AllocatorRecording, kind: Kind) -> Counter[int]:
    return Counter(e.bytes for e in recording.events if e.kind == kind and e.bytes > 0)


def _comparable(
    observed: Trace | Iterable[int], recording: AllocatorRecording
) -> list[Event] | list[_Size]:
    """Return the observed events that the recording should have."""
    if not isinstance(observed, Trace):
        return [_Size(size) for size in observed]
    events = [event for event in observed.events if event.phase != "before"]
    if recording.warmed_up:
        return events
    older = {event.storage for event in observed.events if event.phase == "before"}
    return [event for event in events if event.storage not in older]


def _visible(events: Iterable[MemoryEvent], strays: Counter[int]) -> Iterator[int]:
    """Yield the sizes of all results and of the observed `strays`."""
    return (event.bytes for event, visible in _with_visibility(events, strays) if visible)


def _with_visibility(
    events: Iterable[MemoryEvent], strays: Counter[int]
) -> Iterator[tuple[MemoryEvent, bool]]:
    """Yield each event with whether it was observed, given the sizes of the observed `strays`."""
    left, followed = Counter(strays), set()
    for event in events:
        if event.kind == "stray" and event.bytes > 0 and left[event.bytes] > 0:
            left[event.bytes] -= 1
            followed.add(event.address)
        yield event, event.kind == "result" or event.address in followed
        if event.bytes < 0:
            followed.discard(event.address)


def _peak(sizes: Iterable[int]) -> int:
    return max(accumulate(sizes, initial=0))


def _bytes_of(counts: Counter[int]) -> int:
    return sum(size * count for size, count in counts.items())


def _describe(counts: Counter[int]) -> str:
    """Format sizes like `2 × 4000 B, 1 × 12 B`, the largest total first."""
    largest_first = sorted(counts.items(), key=lambda item: -item[0] * item[1])
    return ", ".join(f"{count} × {size} B" for size, count in largest_first) or "none"


# ------------------------------------------------------------------ effects of a dispatch mode


class OperatorResult(NamedTuple):
    """A result: its size, its operator and the autograd node that called the operator."""

    node: str
    operator: str
    bytes: int


@dataclass(frozen=True)
class ModeEffects:
    """Results that exist only under a dispatch mode (added) or only without one (removed)."""

    added: Counter[OperatorResult]
    removed: Counter[OperatorResult]


def dispatch_mode_effects(build: Callable[[], Step]) -> ModeEffects:
    """Record the step that `build()` returns, without and with a no-op dispatch mode.

    For example, a gradient with two sources uses `aten::add_` without the mode and `aten::add` with
    it, which adds one result. Use this to find new branches in a new torch version.
    """
    without_mode = _operator_results(record(build()))
    with_mode = _operator_results(record(_under_mode(build())))
    return ModeEffects(with_mode - without_mode, without_mode - with_mode)


class _PassThrough(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


def _under_mode(step: Step) -> Step:
    def run() -> None:
        with _PassThrough():
            step()

    return run


def _operator_results(recording: AllocatorRecording) -> Counter[OperatorResult]:
    return Counter(
        OperatorResult(event.node, event.operator, event.bytes)
        for event in recording.events
        if event.kind == "result" and event.bytes > 0
    )


# ------------------------------------------------------------------ reading the profiler


def _profiled(step: Step, warm_up: Step | None) -> list[Any]:
    """Return the roots of the profiler's event tree; one of them is the scope named _STEP."""
    config = ExperimentalConfig(capture_overload_names=True)
    with (
        _profiler_messages_filtered(),
        no_cycle_collection(),
        profile(
            activities=[ProfilerActivity.CPU],
            profile_memory=True,
            experimental_config=config,
            acc_events=True,  # without, torch 2.11 warns that events of earlier cycles are lost
        ) as profiler,
    ):
        if warm_up is not None:
            warm_up()
            # A cycle that the warm-up left would count as alive in the step: a neural ODE seemed 14
            # % off (test_cycles_from_the_warm_up_are_freed_before_the_step).
            gc.collect()
        with record_function(_STEP):
            step()
    return profiler.profiler.kineto_results.experimental_event_tree()


@contextmanager
def _profiler_messages_filtered() -> Iterator[None]:
    """Filter the profiler's own messages out of standard error."""
    sys.stderr.flush()
    stderr = os.dup(2)
    with TemporaryFile() as caught:
        os.dup2(caught.fileno(), 2)
        try:
            yield
        finally:
            sys.stderr.flush()
            os.dup2(stderr, 2)
            os.close(stderr)
            caught.seek(0)
            for line in caught:
                if not any(remark in line for remark in _PROFILER_MESSAGES):
                    os.write(2, line)


class _LogEntry(NamedTuple):
    """An entry of the allocator's log, with the operator that was running."""

    bytes: int
    address: int
    total_bytes: int  # allocated in total, including this block
    time_ns: int
    operator: Any  # the profiler's event of the operator, None outside operators
    node: str


def _log_entries(
    events: Iterable[Any], operator: Any = None, node: str = ""
) -> Iterator[_LogEntry]:
    """Yield the CPU allocator's log entries in a tree of profiler events."""
    for event in events:
        kind, details = event.typed
        if kind == EventType.Allocation and details.device.type == "cpu":
            block = details.alloc_size, details.ptr, details.total_allocated
            yield _LogEntry(*block, event.start_time_ns, operator, node)
        elif children := event.children:
            inside = event.name.removeprefix(_NODE) if event.name.startswith(_NODE) else node
            within = event if operator is None and _is_dispatched(event) else operator
            yield from _log_entries(children, within, inside)


def _is_dispatched(event: Any) -> bool:
    """Return whether the event is an operator with a kernel, not a composite."""
    overload = f".{event.overload_name}" if event.overload_name else ""
    return event.tag == EventType.TorchOp and _has_a_kernel(event.name + overload)


@cache
def _has_a_kernel(name: str) -> bool:
    try:
        return has_kernel(name, "CPU") or not has_kernel(name, "CompositeImplicitAutograd")
    except RuntimeError:
        return False  # a scope, such as an autograd node or an optimizer's step


def _in_order(notes: Iterable[_LogEntry]) -> list[_LogEntry]:
    """Sort by time, and check against the allocator's running total that no entry is missing."""
    ordered = sorted(notes, key=lambda note: note.time_ns)
    for before, after in pairwise(ordered):
        if before.total_bytes + after.bytes != after.total_bytes:
            raise RuntimeError(
                f"the profiler's total goes from {before.total_bytes} to {after.total_bytes} bytes "
                f"with a block of {after.bytes}: its events are lost or out of order; record again"
            )
    return ordered


class _ProfiledBlock:
    """A block of memory, from its allocation to its free."""

    def __init__(self, birth: _LogEntry) -> None:
        self.birth = birth
        self.freed_ns: float = inf

    @property
    def kind(self) -> Kind:
        operator = self.birth.operator
        if operator is None:
            return "stray"
        return "scratch" if self.freed_ns <= operator.end_time_ns else "result"

    def event(self, count: int) -> MemoryEvent:
        operator = self.birth.operator.name if self.birth.operator else ""
        return MemoryEvent(count, self.birth.address, self.kind, operator, self.birth.node)


def _with_blocks(notes: Iterable[_LogEntry]) -> Iterator[tuple[_LogEntry, _ProfiledBlock]]:
    """Yield each log entry with its block.

    Frees of unknown blocks are left out: the profiler reports them only if an earlier profile saw
    the address allocated, and then with the old size.
    """
    alive: dict[int, _ProfiledBlock] = {}
    for note in notes:
        if note.bytes > 0:
            alive[note.address] = _ProfiledBlock(note)
            yield note, alive[note.address]
        # The profiler reports no free of a block whose allocation it did not see
        # (test_the_free_of_an_older_block_is_left_out).
        elif note.address in alive:
            block = alive.pop(note.address)
            block.freed_ns = note.time_ns
            yield note, block


def _recording(roots: list[Any], *, warmed_up: bool) -> AllocatorRecording:
    """Return the allocator's events during the step."""
    (step,) = (event for event in roots if event.name == _STEP)
    history = list(_with_blocks(_in_order(_log_entries(roots))))  # a block's free decides its kind
    before = [note for note, _ in history if note.time_ns < step.start_time_ns]
    events = tuple(
        block.event(note.bytes)
        for note, block in history
        if step.start_time_ns <= note.time_ns <= step.end_time_ns
    )
    return AllocatorRecording(events, sum(note.bytes for note in before), warmed_up)
