"""The meter on trial: is it exact, is a dry run the same, and what does either cost?

    exactness   every kind of step that the tests know, unwatched, then under memlab's meter and
                under torch's MemTracker. The truth is the CPU's allocator itself, as the profiler
                records it: what was alive when the step began, and every block since
    dry-run     the same kinds on fake tensors: equal to the real step, event by event? MemTracker
                beside it, under FakeTensorMode
    cost        a metered step against a plain one, and a 7B step without memory against the same
                on bare fake tensors and under MemTracker; each in a process of its own, in turn

MemTracker gets all that its documentation asks for: the model, the optimizer and every other
tensor that is alive, registered before it starts, and one call of the step. What it refuses
because the model is called more than once, it gets again with its statistics reset before each
call, as its error message advises.

A peak is the most bytes alive at one moment, parameters and all. A kernel's scratch, freed before
the operator returns, is no operator's result, so no observer of operators can see it: the peak
with it stands in a column of its own.
"""

import argparse
import gc
import importlib.util
import os
import sys
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import asdict, dataclass
from functools import cache, partial
from itertools import accumulate, groupby
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple, TypeVar

import torch
from common import (
    RESULTS,
    ROOT,
    THREADS,
    Runner,
    Spread,
    heading,
    progress,
    ratios,
    save,
    set_environment,
    side_by_side,
    spread,
    table,
)
from rich.progress import Progress
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.distributed._tools.mem_tracker import MemTracker
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.utils._python_dispatch import TorchDispatchMode

import memlab
from memlab.metering.cycles import no_cycle_collection
from memlab.metering.unobserved import Recording, compare, record
from memlab.model import GPT, PRESETS
from memlab.trace import Event, Trace
from memlab.units import format_bytes

Step = Callable[[], object]
Built = tuple[Step, nn.Module, Any]
Builder = Callable[[], Built]
T = TypeVar("T")
Off = int | str  # bytes above the truth, or why there is no figure

CLOSE = 0.0005  # "within 0.05 %"


class Report(NamedTuple):
    """What a section has to say."""

    sentence: str  # for the summary
    markdown: str
    plain: dict[str, Any]  # for the results


class Size(NamedTuple):
    """A language model and its batch."""

    preset: str
    batch: int
    seq_len: int
    dtype: str

    def __str__(self) -> str:
        return f"{self.preset} ({self.batch} × {self.seq_len} tokens, {self.dtype}, AdamW)"


@dataclass(frozen=True)
class Plan:
    """How much is run."""

    kinds: tuple[str, ...] | None  # None: all
    real: Size
    dry: Size
    rounds: int
    rounds_of_mem_tracker: int


FULL = Plan(
    kinds=None,
    real=Size("25m", 4, 256, "float32"),
    dry=Size("llama-2-7b", 1, 2048, "bfloat16"),
    rounds=7,
    rounds_of_mem_tracker=2,
)
QUICK = Plan(
    kinds=("mlp", "fan_out", "generator_and_critic", "recommender_sparse_gradients"),
    real=Size("tiny", 2, 32, "float32"),
    dry=Size("tiny", 2, 32, "bfloat16"),
    rounds=2,
    rounds_of_mem_tracker=1,
)


@cache
def kinds_of_steps() -> ModuleType:
    """`tests/metering/kinds.py`: what the tests hold the meter against."""
    spec = importlib.util.spec_from_file_location("kinds", ROOT / "tests/metering/kinds.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def chosen_kinds(plan: Plan) -> dict[str, Builder]:
    """The tests' kinds, which are small, and one of the size that people train on a CPU."""
    kinds = kinds_of_steps().KINDS
    chosen = {name: kinds[name] for name in plan.kinds or kinds}
    return {**chosen, f"gpt_{plan.real.preset}": partial(language_model, plan.real)}


# ------------------------------------------------------------------ the truth


@dataclass(frozen=True)
class Truth:
    """The second step of a kind, unwatched; the first has made the optimizer's state."""

    recording: Recording
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
) -> Recording:
    """The second step, inside `around()`, as the allocator has it."""
    step, _, _ = build()

    def run() -> None:
        with around():
            step()

    return record(run, warm_up=run)


def result_peak_bytes(recording: Recording) -> int:
    """The peak over the blocks that outlive their operators, above what was alive before."""
    sizes = (event.bytes for event in recording.events if event.kind == "result")
    return max(accumulate(sizes, initial=0))


def results(recording: Recording) -> Counter[int]:
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


@dataclass(frozen=True)
class Tally:
    """How an observer fares over many kinds of step."""

    answers: int
    exact: int
    close: int  # within 0.05 %
    worst: float  # share of the truth


def tally(figures: Iterable[tuple[Off, int]]) -> Tally:
    """Of (bytes off, the truth) for each kind of step."""
    shares = [figure / truth for figure, truth in figures if isinstance(figure, int)]
    return Tally(
        answers=len(shares),
        exact=sum(share == 0 for share in shares),
        close=sum(abs(share) <= CLOSE for share in shares),
        worst=max(shares, key=abs, default=0.0),
    )


def tallies(named: dict[str, Tally]) -> str:
    header = ("peak", "answers", "exact to the byte", "within 0.05 %", "at worst")
    return table(
        header,
        [
            (name, str(t.answers), str(t.exact), str(t.close), percent(t.worst))
            for name, t in named.items()
        ],
    )


def at_worst(tally: Tally) -> str:
    return f" (at worst {percent(tally.worst)})" if tally.worst else ""


def percent(share: float) -> str:
    return f"{share:+.3%}".replace("%", " %") if share else "0"


def in_words(figure: Off, truth_bytes: int, needs_resets: bool = False) -> str:
    """`exact`, `+4.008 %`, or why there is no figure."""
    if isinstance(figure, str):
        return f"refuses: {figure}"
    words = percent(figure / truth_bytes) if figure else "exact"
    return f"{words}, with resets" if needs_resets else words


# ------------------------------------------------------------------ exactness


@dataclass(frozen=True)
class Exactness:
    """One kind of step: the truth, and how far the observers are from it, in bytes."""

    kind: str
    peak_bytes: int
    peak_with_scratch_bytes: int
    scratch_share: float  # of all bytes that the step allocates
    scratch_at_peak: dict[str, int]  # bytes at the peak with scratch, by operator
    memlab: int
    missing: int  # allocations that memlab reports and that no operator made
    unseen: int  # results of operators that it does not report
    mem_tracker: Off
    needs_resets: bool  # see Tracked
    watched: int  # the peak under a mode that does nothing, less the peak
    added_share: float  # bytes allocated only under such a mode, of all that are allocated

    @property
    def right(self) -> str:
        """Whose peak is exact."""
        who = {"memlab": self.memlab, "MemTracker": self.mem_tracker}
        exact = [name for name, figure in who.items() if figure == 0]
        return "both" if len(exact) == 2 else exact[0] if exact else "neither"


def exactness_of(kind: str, build: Builder) -> Exactness:
    truth = truth_of(build)
    trace = metered(build)
    watched = recorded(build, Nothing)
    comparison = compare(trace, truth.recording)
    mem_tracker = tracked(build, truth.peak_bytes)
    return Exactness(
        kind=kind,
        peak_bytes=truth.peak_bytes,
        peak_with_scratch_bytes=truth.peak_with_scratch_bytes,
        scratch_share=comparison.excess_share,
        scratch_at_peak=scratch_at_peak(truth.recording),
        memlab=trace.peak_bytes - truth.peak_bytes,
        missing=comparison.missing.total(),
        unseen=comparison.unseen.total(),
        mem_tracker=mem_tracker.figure,
        needs_resets=mem_tracker.needs_resets,
        watched=truth.alive_bytes + result_peak_bytes(watched) - truth.peak_bytes,
        added_share=share_added(watched, truth.recording),
    )


def scratch_at_peak(recording: Recording) -> dict[str, int]:
    """Bytes at the peak over all blocks that are no operator's results, by who took them."""
    totals = list(accumulate((event.bytes for event in recording.events), initial=0))
    alive: dict[int, tuple[str, int]] = {}
    for event in recording.events[: totals.index(max(totals))]:
        if event.bytes < 0:
            alive.pop(event.address, None)
        elif event.kind != "result":
            alive[event.address] = event.operator or "no operator", event.bytes
    sums: Counter[str] = Counter()
    for operator, count in alive.values():
        sums[operator] += count
    return dict(sums.most_common())


def share_added(watched: Recording, unwatched: Recording) -> float:
    """The bytes of results that exist only where somebody watches, of all that are allocated."""
    added = results(watched) - results(unwatched)
    return total_bytes(added) / max(1, total_bytes(unwatched.allocations))


def total_bytes(counts: Counter[int]) -> int:
    return sum(size * count for size, count in counts.items())


def exactness(plan: Plan, bar: Progress) -> Report:
    kinds = chosen_kinds(plan)
    rows = []
    for kind, build in bar.track(kinds.items(), description="exactness"):
        with no_cycle_collection():
            rows.append(exactness_of(kind, build))
    parts = [exactness_tallies(rows), exactness_table(rows), exactness_notes(rows)]
    return Report(exactness_sentence(rows), "\n\n".join(parts), as_rows(rows))


def as_rows(rows: Iterable[Any]) -> dict[str, Any]:
    return {"rows": [asdict(row) for row in rows]}


def exactness_sentence(rows: list[Exactness]) -> str:
    ours, theirs = tally(figures(rows, "memlab")), tally(figures(rows, "mem_tracker"))
    streams = sum(not (row.missing or row.unseen) for row in rows)
    return (
        f"Over {len(rows)} kinds of training step, held against what the CPU's allocator did "
        f"unwatched, memlab's peak is exact to the byte in {ours.exact}{at_worst(ours)} and its "
        f"every allocation in {streams}; torch's MemTracker, given everything it asks for, answers "
        f"in {theirs.answers} and is exact in {theirs.exact}{at_worst(theirs)}."
    )


def figures(
    rows: list[Exactness], observer: str, *, with_scratch: bool = False
) -> Iterator[tuple[Off, int]]:
    """(bytes off, the truth) of each row; the truth with or without the kernels' scratch."""
    for row in rows:
        scratch = row.peak_with_scratch_bytes - row.peak_bytes if with_scratch else 0
        figure = getattr(row, observer)
        yield figure if isinstance(figure, str) else figure - scratch, row.peak_bytes + scratch


def exactness_tallies(rows: list[Exactness]) -> str:
    observers = {"memlab": "memlab", "MemTracker": "mem_tracker"}
    named = {name: tally(figures(rows, observer)) for name, observer in observers.items()}
    for name, observer in observers.items():
        named[f"{name}, scratch counted"] = tally(figures(rows, observer, with_scratch=True))
    return tallies(named)


def exactness_table(rows: list[Exactness]) -> str:
    header = ("kind of step", "peak", "memlab", "allocations off", "MemTracker", "right")
    return table(
        (*header, "watching adds", "scratch", "peak with scratch"),
        [
            (
                row.kind,
                format_bytes(row.peak_bytes),
                in_words(row.memlab, row.peak_bytes),
                str(row.missing + row.unseen),
                in_words(row.mem_tracker, row.peak_bytes, row.needs_resets),
                row.right,
                f"{row.added_share:.1%}",
                f"{row.scratch_share:.1%}",
                format_bytes(row.peak_with_scratch_bytes),
            )
            for row in rows
        ],
    )


def exactness_notes(rows: list[Exactness]) -> str:
    """What the columns mean, and why a row is not exact."""
    outside = kinds_of_steps().OUTSIDE_THE_PROMISE
    inexact = [row for row in rows if row.memlab or row.missing or row.unseen]
    much_scratch = [
        row for row in rows if row.peak_with_scratch_bytes > (1 + CLOSE) * row.peak_bytes
    ]
    return bullets(
        "*allocations off*: those that memlab reports and no operator made, and results of "
        "operators that it does not report",
        "*watching adds*: what is allocated only under a dispatch mode, even one that does "
        "nothing, of all bytes allocated; memlab takes it out again",
        "*scratch*: what kernels take and give back before they return, of all bytes allocated",
        "*with resets*: MemTracker's statistics were reset before each call of the model",
        *grouped("memlab", {row.kind: outside.get(row.kind, "?") for row in inexact}),
        *grouped("MemTracker", {row.kind: why_tracked_so(row) for row in rows if row.mem_tracker}),
        *grouped("scratch at the peak", {row.kind: describe_scratch(row) for row in much_scratch}),
    )


def why_tracked_so(row: Exactness) -> str:
    if isinstance(row.mem_tracker, str):
        return f"refuses: {row.mem_tracker}"
    if row.mem_tracker == row.watched:
        return "has, to the byte, the peak of the step under a mode that does nothing"
    return "is off, and the step under a mode that does nothing does not explain it"


def describe_scratch(row: Exactness) -> str:
    below = row.peak_bytes / row.peak_with_scratch_bytes - 1
    operator, count = next(iter(row.scratch_at_peak.items()))
    return f"{format_bytes(count)} by `{operator}`; the peak without is {percent(below)} off"


def grouped(who: str, reasons: dict[str, str]) -> list[str]:
    """One line for each reason, with the kinds of step that it holds for."""
    kinds: dict[str, list[str]] = {}
    for kind, reason in reasons.items():
        kinds.setdefault(reason, []).append(kind)
    return [f"{who} on {', '.join(names)}: {reason}" for reason, names in kinds.items()]


def bullets(*lines: str) -> str:
    return "\n".join(f"- {line}" for line in lines)


# ------------------------------------------------------------------ dry runs


@dataclass(frozen=True)
class DryRun:
    """One kind of step without memory, against the same step with."""

    kind: str
    peak_bytes: int  # of the real step, unwatched
    memlab: Off
    equal_events: bool  # to those of the real step under the meter
    unlike: list[str]  # operators that allocate other bytes than in the real step
    mem_tracker: Off
    needs_resets: bool  # see Tracked
    mem_tracker_unlike: list[str]  # the same under FakeTensorMode alone


def dry_run_of(kind: str, build: Builder) -> DryRun:
    peak_bytes = truth_of(build).peak_bytes
    real = metered(build)
    dry = attempt(lambda: metered_inside(memlab.dry_run(), build))
    fake = attempt(lambda: metered_inside(FakeTensorMode(), build))
    mem_tracker = tracked(build, peak_bytes, FakeTensorMode, FakeTensor)
    return DryRun(
        kind=kind,
        peak_bytes=peak_bytes,
        memlab=dry if isinstance(dry, str) else dry.peak_bytes - peak_bytes,
        equal_events=isinstance(dry, Trace) and in_order(dry) == in_order(real),
        unlike=[] if isinstance(dry, str) else unlike(dry, real),
        mem_tracker=mem_tracker.figure,
        needs_resets=mem_tracker.needs_resets,
        mem_tracker_unlike=[] if isinstance(fake, str) else unlike(fake, real),
    )


def metered_inside(mode: AbstractContextManager[Any], build: Builder) -> Trace:
    with mode:
        return metered(build)


def unlike(trace: Trace, other: Trace) -> list[str]:
    """The operators that allocate other bytes in one trace than in the other."""
    ours, theirs = allocated_by_operator(trace), allocated_by_operator(other)
    return sorted(op for op in ours | theirs if ours[op] != theirs[op])


def allocated_by_operator(trace: Trace) -> Counter[str]:
    sums: Counter[str] = Counter()
    for event in trace.events:
        if event.bytes > 0 and event.phase != "before":
            sums[event.operator] += event.bytes
    return sums


def in_order(trace: Trace) -> list[Event]:
    """The events, storages numbered from 0, frees between two allocations sorted: which of
    several storages dies first is Python's affair and changes no peak."""
    numbers: dict[int, int] = {}
    events = [e._replace(storage=numbers.setdefault(e.storage, len(numbers))) for e in trace.events]
    runs = groupby(events, key=lambda event: event.bytes < 0)
    return [e for frees, run in runs for e in (sorted(run) if frees else run)]


def dry_runs(plan: Plan, bar: Progress) -> Report:
    rows = []
    for kind, build in bar.track(chosen_kinds(plan).items(), description="dry-run"):
        with no_cycle_collection():
            rows.append(dry_run_of(kind, build))
    ours = tally((row.memlab, row.peak_bytes) for row in rows)
    theirs = tally((row.mem_tracker, row.peak_bytes) for row in rows)
    equal = sum(row.equal_events for row in rows)
    sentence = (
        f"A dry run, which takes no memory, has every event of the real step in {equal} of "
        f"{len(rows)} kinds, differs in {ours.answers - equal}{at_worst(ours)} and "
        f"refuses {len(rows) - ours.answers}; MemTracker under FakeTensorMode answers in "
        f"{theirs.answers} and has the real peak in {theirs.exact}{at_worst(theirs)}."
    )
    summary = tallies({"memlab, dry run": ours, "MemTracker, FakeTensorMode": theirs})
    parts = [summary, dry_run_table(rows), dry_run_notes(rows)]
    return Report(sentence, "\n\n".join(parts), as_rows(rows))


def dry_run_table(rows: list[DryRun]) -> str:
    def events(row: DryRun) -> str:
        return "none" if isinstance(row.memlab, str) else "equal" if row.equal_events else "differ"

    return table(
        ("kind of step", "peak", "events", "peak of the dry run", "MemTracker, FakeTensorMode"),
        [
            (
                row.kind,
                format_bytes(row.peak_bytes),
                events(row),
                in_words(row.memlab, row.peak_bytes),
                in_words(row.mem_tracker, row.peak_bytes, row.needs_resets),
            )
            for row in rows
        ],
    )


def dry_run_notes(rows: list[DryRun]) -> str:
    """Why a figure is off: which operators' results are of another size on fake tensors."""
    ours = {row.kind: in_short(row.unlike) for row in rows if row.memlab or row.unlike}
    theirs = {
        row.kind: in_short(row.mem_tracker_unlike)
        for row in rows
        if row.mem_tracker and isinstance(row.mem_tracker, int)
    }
    refusals = {row.kind: row.memlab for row in rows if isinstance(row.memlab, str)}
    return bullets(
        *grouped("a dry run refuses", refusals),
        *grouped("a dry run", {kind: why for kind, why in ours.items() if kind not in refusals}),
        *grouped("MemTracker", theirs),
    )


def in_short(operators: list[str]) -> str:
    if not operators:
        return "the same as on real tensors"
    if len(operators) > 3:
        return f"{len(operators)} operators allocate other bytes: values decide which ones run"
    return f"other bytes than in the real step by {', '.join(f'`{op}`' for op in operators)}"


# ------------------------------------------------------------------ cost


def language_model(size: Size) -> Built:
    """A training step of a model of this size."""
    torch.manual_seed(0)
    config = PRESETS[size.preset]
    model = GPT(config, dtype=getattr(torch, size.dtype))
    text = torch.randint(config.vocab_size, (size.batch, size.seq_len + 1))
    optimizer = torch.optim.AdamW(model.parameters())

    def step() -> None:
        optimizer.zero_grad()
        model(text[:, :-1], text[:, 1:]).backward()
        optimizer.step()

    return step, model, optimizer


def run_plainly(step: Step, model: nn.Module, optimizer: Any) -> None:
    step()


def run_metered(step: Step, model: nn.Module, optimizer: Any) -> None:
    memlab.measure(step, model=model, optimizer=optimizer)


def run_with_lines(step: Step, model: nn.Module, optimizer: Any) -> None:
    memlab.measure(step, model=model, optimizer=optimizer, lines=True)


def run_tracked(step: Step, model: nn.Module, optimizer: Any) -> None:
    tracker = MemTracker()
    tracker.track_external(model, optimizer)
    with tracker:
        step()


# What a Runner runs, and inside what it does.
RUNS: dict[str, tuple[Callable[..., None], Callable[[], AbstractContextManager[Any]]]] = {
    "plain": (run_plainly, nullcontext),
    "metered": (run_metered, nullcontext),
    "metered, with lines": (run_with_lines, nullcontext),
    "bare fake tensors": (run_plainly, FakeTensorMode),
    "dry run, metered": (run_metered, memlab.dry_run),
    "MemTracker, fake tensors": (run_tracked, FakeTensorMode),
}


def two_steps(size: Size) -> None:
    with FakeTensorMode():
        step, *_ = language_model(size)
        step()
        step()


def predict(size: Size) -> None:
    memlab.predict(lambda: language_model(size))


# From building the model to the second step.
WHOLE: dict[str, Callable[[Size], None]] = {
    "two steps on bare fake tensors": two_steps,
    "predicted for CUDA": predict,
}


def serve_whole(name: str, size: Size) -> None:
    """What a Runner's process does: all of it once, then once more for each line."""
    WHOLE[name](size)
    print(0.0, flush=True)
    for _ in sys.stdin:
        gc.collect()
        start = time.perf_counter()
        WHOLE[name](size)
        print(time.perf_counter() - start, flush=True)


def serve(name: str, size: Size) -> None:
    """What a Runner's process does: builds and steps once, then once more for each line."""
    if name in WHOLE:
        return serve_whole(name, size)
    run, around = RUNS[name]
    with around():
        start = time.perf_counter()
        built = language_model(size)
        construction_seconds = time.perf_counter() - start
        built[0]()
        print(construction_seconds, flush=True)
        for _ in sys.stdin:
            gc.collect()  # the last run's cycles are not this one's
            start = time.perf_counter()
            run(*built)
            print(time.perf_counter() - start, flush=True)


@dataclass(frozen=True)
class Costs:
    """Of each run: its seconds in each round, those of building what it runs, its memory."""

    seconds: dict[str, list[float]]
    construction_seconds: dict[str, float]
    peak_bytes: dict[str, int]

    def ratio(self, of: str, to: str) -> Spread:
        return ratios(self.seconds[of], self.seconds[to])


def costs(size: Size, names: Iterable[str], rounds: int, bar: Progress) -> Costs:
    with ExitStack() as stack:
        runners: dict[str, Runner] = {}
        construction_seconds: dict[str, float] = {}
        for name in bar.track(list(names), description=f"{size.preset}: starting"):
            arguments = (__file__, "--serve", name, *map(str, size))
            runners[name] = stack.enter_context(Runner(*arguments))
            construction_seconds[name] = runners[name].answer()
        turns = bar.track(range(rounds), description=f"{size.preset}: in turn")
        seconds = side_by_side({name: runner.run for name, runner in runners.items()}, turns)
        peak_bytes = {name: runner.peak_bytes for name, runner in runners.items()}
    return Costs(seconds, construction_seconds, peak_bytes)


def bytes_of_torch_alone() -> int:
    """The memory of a process that has imported torch and does nothing."""
    with Runner("-c", "import torch; print(0, flush=True); input()") as process:
        process.answer()
        return process.bytes_now()


class Line(NamedTuple):
    """A measurement, what it is to be at most, and its unit."""

    what: str
    measured: Spread
    aim: float | None
    unit: str

    def cells(self) -> tuple[str, ...]:
        if self.aim is None:
            return self.what, f"{self.measured} {self.unit}", "", ""
        verdict = "met" if self.measured.median <= self.aim else "missed"
        return self.what, f"{self.measured} {self.unit}", f"≤ {self.aim} {self.unit}", verdict


def cost(plan: Plan, bar: Progress) -> Report:
    real = costs(plan.real, ("plain", "metered", "metered, with lines"), plan.rounds, bar)
    dry = costs(plan.dry, ("bare fake tensors", "dry run, metered"), plan.rounds, bar)
    names = ("bare fake tensors", "MemTracker, fake tensors")
    theirs = costs(plan.dry, names, plan.rounds_of_mem_tracker, bar)
    whole = costs(plan.dry, WHOLE, plan.rounds, bar)
    lines = cost_lines(real, dry, theirs, whole, bytes_of_torch_alone())
    note = (
        f"Real: {plan.real}. Dry: {plan.dry}. Medians of the rounds, with their quartiles; a ratio "
        f"is taken within each round. Kernels have {os.environ.get('OMP_NUM_THREADS', THREADS)} "
        f"threads."
    )
    markdown = table(("", "measured", "aim", ""), [line.cells() for line in lines.values()])
    plain = {
        "real": str(plan.real),
        "dry": str(plan.dry),
        "lines": {name: line._asdict() for name, line in lines.items()},
        "seconds": {
            "real": real.seconds,
            "dry": dry.seconds,
            "MemTracker": theirs.seconds,
            "whole": whole.seconds,
        },
    }
    return Report(cost_sentence(plan, lines), f"{note}\n\n{markdown}", plain)


def cost_lines(
    real: Costs, dry: Costs, theirs: Costs, whole: Costs, torch_bytes: int
) -> dict[str, Line]:
    bare, ours, tracker = "bare fake tensors", "dry run, metered", "MemTracker, fake tensors"
    lines_noted = real.ratio("metered, with lines", "plain")
    construction = spread([dry.construction_seconds[ours]])
    memory = spread([(dry.peak_bytes[ours] - torch_bytes) / 2**30])
    return {
        "metered": Line("real, metered / plain", real.ratio("metered", "plain"), 1.15, "×"),
        "lines": Line("real, metered with lines / plain", lines_noted, None, "×"),
        "dry": Line("dry, metered / bare fake tensors", dry.ratio(ours, bare), 1.3, "×"),
        "dry_seconds": Line("dry, metered", spread(dry.seconds[ours]), 3, "s"),
        "construction": Line("dry, building the model", construction, 5, "s"),
        "memory": Line("dry, metered: memory of the process above torch's", memory, 0.5, "GiB"),
        "predicted": Line(
            "predicted for CUDA / building and two steps on bare fake tensors",
            whole.ratio(*reversed(WHOLE)),
            1.3,
            "×",
        ),
        "tracker": Line("dry, MemTracker / bare", theirs.ratio(tracker, bare), None, "×"),
        "tracker_seconds": Line("dry, MemTracker", spread(theirs.seconds[tracker]), None, "s"),
    }


def cost_sentence(plan: Plan, lines: dict[str, Line]) -> str:
    of = {name: f"{line.measured.median:.2f} {line.unit}" for name, line in lines.items()}
    return (
        f"A metered step of {plan.real} takes {of['metered']} the time of a plain one; a step of "
        f"{plan.dry} is measured without its memory in {of['dry_seconds']} and {of['memory']} of "
        f"the process, {of['dry']} the time on bare fake tensors, where MemTracker takes "
        f"{of['tracker_seconds']}, {of['tracker']}. Predicted for CUDA, from building it to the "
        f"second step, it takes {of['predicted']} the time on bare fake tensors."
    )


# ------------------------------------------------------------------ the command

SECTIONS: dict[str, Callable[[Plan, Progress], Report]] = {
    "exactness": exactness,
    "dry-run": dry_runs,
    "cost": cost,
}


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--section",
        action="append",
        choices=SECTIONS,
        help="run this section only (may be given more than once); about four minutes for all",
    )
    parser.add_argument(
        "--quick",
        action="store_true",
        help="a few kinds and a tiny model, to see that it runs; nothing is written",
    )
    parser.add_argument(
        "--results", type=Path, default=RESULTS, help="the folder of the results (%(default)s)"
    )
    parser.add_argument("--serve", nargs=5, help=argparse.SUPPRESS)  # for a Runner
    return parser.parse_args()


def reports(sections: Iterable[str], plan: Plan, results: Path | None) -> dict[str, Report]:
    """Each section, written as soon as it is done."""
    found: dict[str, Report] = {}
    with progress() as bar:
        for name in sections:
            found[name] = SECTIONS[name](plan, bar)
            if results is not None:
                report = found[name]
                save(results, "meter", name, {"summary": report.sentence, **report.plain})
    return found


def main() -> int:
    set_environment()
    given = arguments()
    if given.serve:
        name, preset, batch, seq_len, dtype = given.serve
        serve(name, Size(preset, int(batch), int(seq_len), dtype))
        return 0
    warnings.simplefilter("ignore")  # some kinds do what torch warns of
    torch.set_num_threads(1)  # the threads of a kernel decide how much scratch it takes
    results = None if given.quick else given.results
    try:
        found = reports(given.section or SECTIONS, QUICK if given.quick else FULL, results)
    except KeyboardInterrupt:
        print("stopped; sections that were done are written", file=sys.stderr)
        return 130
    print(heading("The meter"), end="\n\n")
    print(" ".join(report.sentence for report in found.values()))
    for name, report in found.items():
        print(f"\n## {name}\n\n{report.markdown}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
