"""An explanation as lines of text, for the terminal and the report."""

from collections import Counter
from collections.abc import Iterator

from memlab.explain.categories import CATEGORIES
from memlab.explain.explanation import RECORD_NEXT, Explanation
from memlab.explain.findings import Finding
from memlab.explain.frames import Frame, model_line, user_line, with_class
from memlab.explain.histories import share
from memlab.explain.messages import MOST_BYTES, Log, Message
from memlab.explain.remedies import Replays, outcome_for
from memlab.explain.situation import Situation
from memlab.units import format_bytes, plural

MOST_LINES = 5  # of leaks
KINDS = {
    "snapshot": "memory snapshot",
    "recording": "recording of the allocator",
    "trace": "memlab trace",
    "log": "log",
}
HEADLINES = {  # of a log that ends otherwise than with PyTorch's message; by messages.ERRORS
    "killed": "a process was killed",
    "host": "the computer's own memory ran out",
    "shm": "shared memory ran out",
    "page-file": "Windows refused memory",
    "llama": "llama.cpp out of memory",
    "library": "a CUDA library ran out of memory",
    "handle": "a CUDA library could not start",
    "fault": "it ends with an error that names no memory",
    "other": "it ends with an error that names no memory",
}
OF_OTHERS = ("jax", "paddle", "paddle-path", "tensorflow", "mlx", "llama")  # kinds of a log
OTHER_SOFTWARE = "out of memory, in the words of other software than PyTorch"
PHASES = {
    "setup": " while a model was loaded",
    **{name: f" in {name}" for name in ("forward", "backward", "optimizer")},
}
WORDS = {name: name.replace("_", " ") for name in CATEGORIES}


def headline(found: Explanation) -> str:
    """Say what failed, or what the peak was."""
    if found.log:
        return _log_headline(found.log)
    s = found.situation
    assert s is not None
    if s.history.refusal:
        where = PHASES.get(s.phase, "")
        where += f" on GPU {s.history.device}" if found.kind != "trace" else ""
        after = f" after {_completed(s)}" if s.steps_done else ""
        return (
            f"out of memory{where}{after}: {format_bytes(s.request_bytes)} requested, "
            f"{format_bytes(s.allocated_bytes)} allocated, "
            f"{format_bytes(s.reserved_bytes)} reserved"
        )
    return (
        f"no memory problem (no request was refused); the peak is "
        f"{format_bytes(s.allocated_bytes)} allocated"
    )


def _completed(s: Situation) -> str:
    """Say how many steps were completed, or how often an evaluation ran its loop."""
    if s.evaluation and not s.trains_now:
        return f"{plural(s.steps_done, 'pass', 'passes')} of {s.evaluation.name}()"
    return plural(s.steps_done, "completed step")


def _log_headline(log: Log) -> str:
    message = log.message
    torchs = f"{message.backend} out of memory" if log.kind in ("sized", "bare") else ""
    sized = message.requested is not None
    what = torchs or HEADLINES.get(log.kind, "out of memory" if sized else OTHER_SOFTWARE)
    if message.requested is None:
        return f"{what}; the message states no sizes" if torchs else what
    wrapped = message.requested >= MOST_BYTES
    asked = "a negative size" if wrapped else format_bytes(message.requested)
    parts = [f"{asked} requested"]
    for words, size in (("allocated", message.allocated), ("free", message.free)):
        if size is not None:
            parts.append(f"{format_bytes(size)} {words}")
    whole = message.capacity or message.allowed
    of = f" of {format_bytes(whole)}" if whole else ""
    where = "" if message.device is None else f" on GPU {message.device}"
    rank = "" if log.rank is None else f" (rank {log.rank})"
    return f"{what}{where}{rank}: {', '.join(parts)}{of}"


def device(found: Explanation) -> int | None:
    """Return the number of the explained GPU, if the file states it."""
    if found.log:
        return found.log.message.device
    if found.kind == "trace" or found.situation is None:
        return None
    return found.situation.history.device


def notes(found: Explanation) -> Iterator[str]:
    """Yield what the explanation leaves out."""
    if found.log:
        yield from _log_notes(found.log)
        return
    if found.kind == "trace":
        yield "a trace has no segments, so reserved and free memory are simulated as on CUDA"
    if found.situation and found.situation.history.others:
        others = found.situation.history.others
        sizes = ", ".join(f"GPU {n} has {format_bytes(size)}" for n, size in sorted(others.items()))
        yield (
            f"this explains GPU {found.situation.history.device}; {sizes} reserved: "
            f"choose another with --device"
        )


def _log_notes(log: Log) -> Iterator[str]:
    if log.failures > 1:
        least = "at least " if log.skipped_chars else ""
        yield f"the log has {least}{log.failures} out-of-memory messages; this explains the last"
    if log.skipped_chars:
        yield (
            f"the log is long: {log.skipped_chars:,} characters were only searched for "
            f"out-of-memory messages"
        )


def place(found: Explanation) -> str:
    """Return the failing line, or ""."""
    if found.log:
        return str(found.log.line or "")
    assert found.situation is not None
    return str(found.situation.line or "")


def places(found: Explanation) -> Iterator[str]:
    """Yield the failing line, in a snapshot with the model's line under it and the operator, and
    the lines that hold the most bytes."""
    s = found.situation
    if s is None:
        yield from (f"at {line}" for line in [place(found)] if line)
        return
    words = [*_lines(s.line, s.model_line), *filter(None, [s.operator])]
    yield from (f"{'in' if number else 'at'} {each}" for number, each in enumerate(words))
    held = Counter[tuple[Frame, Frame | None]]()
    for block in s.alive:
        if line := user_line(block.stack):
            held[line, model_line(block.stack)] += block.bytes
    for lines, size in held.most_common(1):
        yield f"most is held by {' in '.join(_lines(*lines))}: {format_bytes(size)}"


def _lines(*frames: Frame | None) -> list[str]:
    return [str(with_class(frame)) for frame in frames if frame]


def peak_rows(s: Situation) -> list[tuple[str, str, str, str]]:
    """Return (category, bytes, share, note) of what was alive, the most bytes first."""
    rows = []
    for name, size in sorted(s.by_category.items(), key=lambda item: -item[1]):
        unsure = s.unsure.get(name, 0)
        note = "" if unsure < 0.1 * size else "ambiguous" if unsure > 0.5 * size else "partly"
        portion = f"{share(size, s.allocated_bytes):.1%}"
        rows.append((WORDS[name], format_bytes(size), portion, note))
    return rows


def size_rows(message: Message) -> list[tuple[str, str]]:
    """Return (what, bytes) of each size that a message states."""
    fields = (
        ("the card", message.capacity),
        ("allowed", message.allowed),
        ("allocated by PyTorch", message.allocated),
        ("reserved, but unallocated", message.free_reserved),
        ("free on the card", message.free),
        ("this process, with its CUDA context", message.process),
        ("this process, outside PyTorch", message.outside_pytorch),
        (
            "contexts and other processes" if message.has_context else "outside this process",
            message.elsewhere,
        ),
        ("the request", message.requested if (message.requested or 0) < MOST_BYTES else None),
    )
    rows = [(words, format_bytes(size)) for words, size in fields if size is not None]
    return rows + [(f"process {pid}", format_bytes(size)) for pid, size in message.processes]


def growth_lines(s: Situation) -> Iterator[str]:
    """Yield the growth from step to step and the lines that leave memory behind."""
    steps = s.growth[1:]
    if s.loop and steps:
        where = f" at {s.loop.frame}" if s.loop.frame else ""
        mean = sum(steps) / len(steps)
        yield f"{len(s.growth) + 1} steps{where}: {_signed(round(mean))} per step after the first"
    for leak in s.leaks[:MOST_LINES]:
        yield (
            f"{format_bytes(leak.bytes)} left behind by {leak.steps} steps: "
            f"{leak.frame or 'line unknown'}"
        )


def _signed(size: int) -> str:
    return f"{'+' if size >= 0 else ''}{format_bytes(size)}"


def fragmentation_lines(s: Situation) -> Iterator[str]:
    """Yield the free reserved memory, and what the refused request needed."""
    if not s.history.has_segments:
        return
    free = s.free
    count = plural(len(free.gaps), "piece")
    largest = f", the largest {format_bytes(free.largest_bytes)}" if len(free.gaps) > 1 else ""
    pieces = f" in {count}{largest}"
    yield (
        f"{format_bytes(free.free_bytes)} of {format_bytes(free.reserved_bytes)} reserved are free"
        f"{pieces if free.gaps else ''}"
    )
    if s.device_free is not None:
        yield f"{format_bytes(s.device_free)} were free on the card outside PyTorch's reserve"


def advice(found: Finding, replayed: Replays | None) -> Iterator[str]:
    """Yield what to do about a finding, the replayed remedies first."""
    for name, outcome in outcome_for(replayed, found.cause.name).items():
        assert replayed is not None
        yield f"{name}: {outcome.against(replayed.base)}"
    yield from found.todo


def stack_note(s: Situation) -> str:
    """Say that the file has no stacks, or ""."""
    if s.history.has_frames:
        return ""
    return (
        "the file has no stacks, so categories come from sizes and lifetimes; "
        'record with context="all"'
    )


def replay_note(replayed: Replays | None, situation: Situation | None) -> str:
    """Say how reliable the replays are."""
    if replayed is None:
        return "remedies were not replayed: the history is too long"
    if not replayed.reproduces:
        return (
            "approximate: a replay with the recorded settings does not run out of memory where the "
            "recorded run did"
        )
    until = "this request" if situation and situation.history.refusal else "the peak"
    return f"predicted by replaying the history up to {until}; later requests may need more"


def needs_recording(found: Explanation) -> bool:
    """Whether a snapshot of the next run would say more."""
    if found.log:
        torchs = found.log.kind not in OF_OTHERS
        return torchs and found.log.message.backend in ("CUDA", "HIP")
    s = found.situation
    if found.kind == "snapshot" and s and s.history.has_frames and s.history.length:
        return False  # it is such a recording
    if not found.findings:
        return True
    best = found.findings[0].confidence
    second = found.findings[1].confidence if len(found.findings) > 1 else 0
    return best < 0.6 or best - second < 0.15


def record_next() -> tuple[str, ...]:
    return RECORD_NEXT


def why_record(found: Explanation) -> str:
    """Say why the next run should be recorded."""
    if found.log:
        return "a snapshot shows more than a message"
    return "several causes are likely" if found.findings else "no known cause was found"


def title_of_causes(found: Explanation) -> str:
    """Return the title of the first finding: the cause of a failure, or of a peak."""
    failed = found.log is not None or (found.situation and found.situation.history.refusal)
    return "cause" if failed else "what fills the peak"
