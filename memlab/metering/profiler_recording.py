"""The step as it runs unwatched: every block of memory, from the CPU's allocator itself.

A meter that sees operators changes what it sees (memlab.metering.storages says how). torch's
profiler does not: with `profile_memory` the allocator itself notes every block that it hands out
and takes back, to the byte, and no mode, no dispatch key and no Python stands between autograd
and its kernels. So a recording is the truth that the meter is held against. It knows three kinds
of blocks:

    result    outlives the operator that made it: a meter of operators must see each of these,
              and nothing else
    scratch   freed before its operator returns: a kernel's working memory, which no dispatcher
              sees (0 to 60 % of the bytes that a step allocates, for microseconds each)
    stray     made outside of every operator: a Python number on its way into one (8 bytes),
              the generator's state that checkpointing keeps (5,056 bytes)

"Its operator" is the one that a dispatcher sees: `aten::linear` is written in terms of other
operators and never reaches a mode, `aten::convolution` does, and what it calls does not.

It sees the CPU's allocator and no other, and the thread that it runs in. A block that was there
before the profiler has no known size, so its free is left out: `warm_up` is for that.
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

from memlab.internals.torch_internals import (
    EventType,
    ExperimentalConfig,
    TorchDispatchMode,
    has_kernel,
)
from memlab.metering.cycles import no_cycle_collection
from memlab.trace import Event, Trace
from memlab.units import format_bytes

Step = Callable[[], object]
Kind = Literal["result", "scratch", "stray"]

_STEP = "memlab: the recorded step"
_REMARKS = (
    b"SyncActivityProfilerHandler",
    b"Memory block of unknown size was allocated before",
    b"gpuGetDeviceCount failed",  # built for CUDA, on a machine without
)
_NODE = "autograd::engine::evaluate_function: "


class MemoryEvent(NamedTuple):
    """One block handed out (`bytes` > 0) or taken back (`bytes` < 0)."""

    bytes: int
    address: int
    kind: Kind
    operator: str  # that made the block, "" for a stray
    node: str  # of autograd's graph that called the operator, "" in forward


@dataclass(frozen=True)
class Recording:
    """All events of one step, in order; what was alive when it began counts as 0 bytes.

    `bytes_at_start` of it were allocated by `warm_up`, which may build the model, too.
    """

    events: tuple[MemoryEvent, ...]
    bytes_at_start: int = 0

    @cached_property
    def peak_bytes(self) -> int:
        """The most bytes alive at one moment, above what was alive at the start."""
        return _peak(event.bytes for event in self.events)

    @cached_property
    def live_bytes(self) -> int:
        """Bytes alive at the end, less what was alive at the start."""
        return sum(event.bytes for event in self.events)

    @cached_property
    def allocations(self) -> Counter[int]:
        """How often each size was allocated."""
        return Counter(event.bytes for event in self.events if event.bytes > 0)

    def allocated_by(self, kind: Kind) -> Counter[str]:
        """Bytes allocated as blocks of this kind, by operator."""
        sums: Counter[str] = Counter()
        for event in self.events:
            if event.kind == kind and event.bytes > 0:
                sums[event.operator] += event.bytes
        return sums


def record(step: Step, *, warm_up: Step | None = None) -> Recording:
    """Run `step()` once under the profiler, and nothing else.

    `warm_up` runs first and is not recorded, but its blocks are known, so their frees are:
    `record(step, warm_up=step)` is the second step, the gradients of the first freed in it.

    Python's cycle collector waits meanwhile. It runs whenever enough Python objects were made,
    and an observer makes many: two runs of one step would free a cycle at different moments. So
    what a cycle holds stays alive here; an observer is compared with the collector off as well.
    What the warm-up left in cycles is freed before the step: nobody can reach it any more.
    """
    return _recording(_profiled(step, warm_up))


# ------------------------------------------------------------------ against an observer


@dataclass(frozen=True)
class Comparison:
    """What an observer saw against what happened. Differences are observed less recorded."""

    missing: Counter[int]  # sizes that the observer saw allocated and no operator returned
    unseen: Counter[int]  # sizes of results that it did not see
    excess: Counter[int]  # sizes of all blocks that it did not see: scratch and strays with them
    excess_share: float  # the bytes of these, of all that were allocated
    live_difference: int
    peak_difference: int  # of the peaks over the blocks that it could see
    real_peak_difference: int  # of the peaks over all blocks: below 0 by the scratch at the peak
    peak_bytes: int  # recorded, over all blocks

    @property
    def exact(self) -> bool:
        """Whether the observer saw every result and nothing else, and both peaks agree."""
        differs = self.missing or self.unseen or self.live_difference or self.peak_difference
        return not differs

    @property
    def excess_bytes(self) -> int:
        return _bytes_of(self.excess)

    def __str__(self) -> str:
        lines = [
            f"exact: {'yes' if self.exact else 'no'}",
            f"seen, but never allocated: {_describe(self.missing)}",
            f"results not seen: {_describe(self.unseen)}",
            f"scratch and strays: {self.excess.total()} blocks, {format_bytes(self.excess_bytes)}, "
            f"{self.excess_share:.1%} of the bytes",
            f"alive at the end: {self.live_difference:+d} B",
            f"peak: {self.peak_difference:+d} B, with the scratch {self.real_peak_difference:+d} B "
            f"of {self.peak_bytes:,} B",
        ]
        return "\n".join(lines)

    __repr__ = __str__


def compare(observed: Trace | Iterable[int], recording: Recording) -> Comparison:
    """Hold a Trace, or a stream of sizes (frees negative), against the recording of the same step.

    What a Trace found alive when it began is left out; the frees of it are not. An allocation
    belongs to a result of its size if there is one, else to a stray; never to scratch, or one
    too many of them would hide behind a kernel's.
    """
    sizes = _sizes(observed)
    seen = Counter(size for size in sizes if size > 0)
    results, strays = _allocated(recording, "result"), _allocated(recording, "stray")
    visible = list(_visible(recording.events, seen - results))
    excess = recording.allocations - seen
    return Comparison(
        missing=seen - (results + strays),
        unseen=results - seen,
        excess=excess,
        excess_share=_bytes_of(excess) / max(1, _bytes_of(recording.allocations)),
        live_difference=sum(sizes) - sum(visible),
        peak_difference=_peak(sizes) - _peak(visible),
        real_peak_difference=_peak(sizes) - recording.peak_bytes,
        peak_bytes=recording.peak_bytes,
    )


def with_workspace(trace: Trace, recording: Recording) -> Trace:
    """The trace of a step with its kernels' scratch put in, as events of category workspace.

    `recording` is of the same step; the two are laid side by side, event by event. The peak of
    the result is the real one: what the CPU's allocator had handed out at the fullest moment.
    Raises ValueError where the trace is not exact against the recording.
    """
    comparison = compare(trace, recording)
    if not comparison.exact:
        raise ValueError(f"the trace and the recording are not of equal steps:\n{comparison}")
    strays = Counter(s for s in _sizes(trace) if s > 0) - _allocated(recording, "result")
    merged = [event for event in trace.events if event.phase == "before"]
    seen = iter(trace.events[len(merged) :])
    numbers: dict[int, int] = {}
    for noted, is_visible in _with_visibility(recording.events, strays):
        if is_visible:
            merged.append(next(seen))
        else:
            if noted.bytes > 0:
                numbers[noted.address] = -1 - len(numbers)
            merged.append(_workspace(noted, numbers[noted.address], merged[-1].phase))
    return replace(trace, events=tuple(merged))


def _workspace(noted: MemoryEvent, number: int, phase: str) -> Event:
    """`number` is negative: no meter numbered the block. It has a size and no shape."""
    operator = noted.operator.replace("::", ".") or "outside of operators"
    phase = "forward" if phase == "before" else phase
    return Event(noted.bytes, number, "workspace", operator, "", phase, "uint8", ())


def _allocated(recording: Recording, kind: Kind) -> Counter[int]:
    return Counter(e.bytes for e in recording.events if e.kind == kind and e.bytes > 0)


def _sizes(observed: Trace | Iterable[int]) -> list[int]:
    if isinstance(observed, Trace):
        return [event.bytes for event in observed.events if event.phase != "before"]
    return list(observed)


def _visible(events: Iterable[MemoryEvent], strays: Counter[int]) -> Iterator[int]:
    """The sizes of all results, and of as many `strays` as the observer saw."""
    return (event.bytes for event, visible in _with_visibility(events, strays) if visible)


def _with_visibility(
    events: Iterable[MemoryEvent], strays: Counter[int]
) -> Iterator[tuple[MemoryEvent, bool]]:
    """Each event, and whether an observer who saw `strays` of the strays saw it."""
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
    """`2 × 4000 B, 1 × 12 B`, the largest sum first."""
    largest_first = sorted(counts.items(), key=lambda item: -item[0] * item[1])
    return ", ".join(f"{count} × {size} B" for size, count in largest_first) or "none"


# ------------------------------------------------------------------ what watching changes


class Made(NamedTuple):
    """A result: its size, its operator, and the node of autograd's graph that called it."""

    node: str
    operator: str
    bytes: int


@dataclass(frozen=True)
class Changes:
    """Results that exist only where somebody watches, and only where nobody does."""

    added: Counter[Made]
    removed: Counter[Made]


def what_watching_changes(build: Callable[[], Step]) -> Changes:
    """Record the step that `build()` returns, and another under a mode that does nothing.

    A gradient that several consumers send back is `aten::add_` unwatched and `aten::add` watched:
    one result added. With a new torch, this names each new branch of the kind and its formula.
    """
    unwatched = _made(record(build()))
    watched = _made(record(_under_a_mode(build())))
    return Changes(watched - unwatched, unwatched - watched)


class _Nothing(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


def _under_a_mode(step: Step) -> Step:
    def watched() -> None:
        with _Nothing():
            step()

    return watched


def _made(recording: Recording) -> Counter[Made]:
    return Counter(
        Made(event.node, event.operator, event.bytes)
        for event in recording.events
        if event.kind == "result" and event.bytes > 0
    )


# ------------------------------------------------------------------ reading the profiler


def _profiled(step: Step, warm_up: Step | None) -> list[Any]:
    """The roots of the profiler's tree of what ran; one of them is the scope named _STEP."""
    config = ExperimentalConfig(capture_overload_names=True)
    with (
        _without_the_profilers_remarks(),
        no_cycle_collection(),
        profile(
            activities=[ProfilerActivity.CPU], profile_memory=True, experimental_config=config
        ) as profiler,
    ):
        if warm_up is not None:
            warm_up()
            gc.collect()
        with record_function(_STEP):
            step()
    return profiler.profiler.kineto_results.experimental_event_tree()


@contextmanager
def _without_the_profilers_remarks() -> Iterator[None]:
    """Leave out what the profiler itself writes to standard error; all else is handed on."""
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
                if not any(remark in line for remark in _REMARKS):
                    os.write(2, line)


class _Note(NamedTuple):
    """What the allocator noted, and what was running then."""

    bytes: int
    address: int
    total_bytes: int  # allocated in all, this block included
    time_ns: int
    operator: Any  # the event of the operator that a dispatcher saw, None outside of all
    node: str


def _notes(events: Iterable[Any], operator: Any = None, node: str = "") -> Iterator[_Note]:
    """The notes of the CPU's allocator in a tree of events."""
    for event in events:
        kind, details = event.typed
        if kind == EventType.Allocation and details.device.type == "cpu":
            block = details.alloc_size, details.ptr, details.total_allocated
            yield _Note(*block, event.start_time_ns, operator, node)
        elif children := event.children:
            inside = event.name.removeprefix(_NODE) if event.name.startswith(_NODE) else node
            within = event if operator is None and _reaches_the_dispatcher(event) else operator
            yield from _notes(children, within, inside)


def _reaches_the_dispatcher(event: Any) -> bool:
    """Whether the event is an operator with a kernel, not one written in terms of others."""
    overload = f".{event.overload_name}" if event.overload_name else ""
    return event.tag == EventType.TorchOp and _has_a_kernel(event.name + overload)


@cache
def _has_a_kernel(name: str) -> bool:
    try:
        return has_kernel(name, "CPU") or not has_kernel(name, "CompositeImplicitAutograd")
    except RuntimeError:
        return False  # a node of the graph, an optimizer's step: scopes, not operators


def _in_order(notes: Iterable[_Note]) -> list[_Note]:
    """Notes by time; the allocator's own running total proves that none is lost or misplaced."""
    ordered = sorted(notes, key=lambda note: note.time_ns)
    for before, after in pairwise(ordered):
        if before.total_bytes + after.bytes != after.total_bytes:
            raise RuntimeError(
                f"after {before.total_bytes} bytes and a block of {after.bytes}, the profiler has "
                f"the allocator at {after.total_bytes}: events of it are lost or out of order"
            )
    return ordered


class _Block:
    """A piece of memory from its allocation to its free."""

    def __init__(self, birth: _Note) -> None:
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


def _with_blocks(notes: Iterable[_Note]) -> Iterator[tuple[_Note, _Block]]:
    """Each note with the block that it is about.

    A free of an unknown block is left out: the profiler reports it only if an earlier profile of
    this process saw the address handed out, and then with the size of that time.
    """
    alive: dict[int, _Block] = {}
    for note in notes:
        if note.bytes > 0:
            alive[note.address] = _Block(note)
            yield note, alive[note.address]
        elif note.address in alive:
            block = alive.pop(note.address)
            block.freed_ns = note.time_ns
            yield note, block


def _recording(roots: list[Any]) -> Recording:
    """What the allocator did during the step."""
    (step,) = (event for event in roots if event.name == _STEP)
    history = list(_with_blocks(_in_order(_notes(roots))))  # a block's kind is known at its end
    before = [note for note, _ in history if note.time_ns < step.start_time_ns]
    events = tuple(
        block.event(note.bytes)
        for note, block in history
        if step.start_time_ns <= note.time_ns <= step.end_time_ns
    )
    return Recording(events, bytes_at_start=sum(note.bytes for note in before))
