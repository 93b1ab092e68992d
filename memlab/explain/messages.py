"""Out-of-memory messages of PyTorch, and the logs around them.

Every wording from torch 1.0 on is read field by field, so an unknown sentence in between does no
harm. Backends: CUDA, HIP, XPU, MPS and the CPU. From the traceback come the failing line and the
phase of the training step; from the log's other lines the completed steps and printed sizes.
"""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from memlab.explain.frames import Frame, is_user

_SIZE = r"(\d+(?:\.\d+)?) ?(TiB|GiB|MiB|KiB|TB|GB|MB|KB|kB|bytes|B)(?![a-zA-Z])"
_BINARY = {"b": 1, "k": 2**10, "m": 2**20, "g": 2**30, "t": 2**40}  # by the unit's first letter

# Each field of a message, and the wordings that state it. MPS and old versions write GB for 2³⁰.
_FIELDS = {
    "requested": (
        rf"[Tt]ried to allocate {_SIZE}",
        rf"you tried to allocate {_SIZE}",
        rf"Failed to allocate {_SIZE}",
    ),
    "capacity": (rf"total capac?i?ty of {_SIZE}", rf"{_SIZE} total capacity"),
    "free": (rf"of which {_SIZE} is free", rf"; {_SIZE} free[;)]"),
    "process": (rf"this process has {_SIZE} memory in use",),
    "allowed": (rf"{_SIZE} allowed;", rf"max allowed: {_SIZE}"),
    "allocated": (
        rf"Of the allocated memory {_SIZE} is allocated by PyTorch",
        rf"{_SIZE} already allocated",
        rf"MPS allocated: {_SIZE}",
    ),
    "reserved": (rf"{_SIZE} reserved in total by PyTorch",),
    "unallocated": (rf"{_SIZE} is reserved by PyTorch but unallocated", rf"{_SIZE} cached[;)]"),
    "private": (rf"with {_SIZE} allocated in private pools",),
    "other_allocations": (rf"other allocations: {_SIZE}",),
}
_OTHER_PROCESS = re.compile(rf"Process (\d+) has {_SIZE} memory in use")
_OUT_OF_MEMORY = re.compile(
    r"(CUDA|HIP|XPU|MPS)(?: backend)? out of memory"
    r"|(CUDA|HIP|cuda runtime|XPU) error.{0,20}out of memory"
    r"|(DefaultCPUAllocator).{0,60}(?:allocate|memory)"
    r"|OutOfMemoryError"
    r"|(CUBLAS|CUDNN)_STATUS_ALLOC_FAILED"
    r"|Cuda failure '?out of memory"
    r"|Tried to allocate [\d.]+ ?[KMGT]?i?B"
)
_BACKENDS = {"cuda runtime": "CUDA", "DefaultCPUAllocator": "CPU", "CUBLAS": "CUDA"}
_BACKENDS["CUDNN"] = "CUDA"
_FILE_LINE = re.compile(r'File "([^"]+)", line (\d+), in (\S+)')
_TRACEBACK = "Traceback (most recent call last)"
_PREFIX = re.compile(r"^\s*(?:\[\w*rank\d+\]:?|\d+:|\|)?\s*")
WIDEST_MESSAGE = 2000  # characters after the match that may belong to the message


@dataclass(frozen=True)
class Line:
    """A frame of a traceback with its source line, outermost first in a traceback."""

    frame: Frame
    source: str


@dataclass(frozen=True)
class Message:
    """An out-of-memory message. Fields that it does not state are None."""

    backend: str
    requested: int | None = None
    capacity: int | None = None
    free: int | None = None
    process: int | None = None  # used by this process, CUDA context included
    allowed: int | None = None
    allocated: int | None = None
    reserved: int | None = None
    unallocated: int | None = None
    private: int | None = None
    other_allocations: int | None = None
    processes: tuple[tuple[int, int], ...] = ()  # (process id, bytes) of other processes

    @property
    def free_reserved(self) -> int | None:
        """Reserved bytes that no tensor uses."""
        if self.unallocated is not None:
            return self.unallocated
        if self.reserved is not None and self.allocated is not None:
            return max(0, self.reserved - self.allocated)
        return None

    @property
    def reserved_bytes(self) -> int | None:
        """Reserved bytes of this process."""
        if self.reserved is not None:
            return self.reserved
        if self.allocated is not None and self.unallocated is not None:
            return self.allocated + self.unallocated
        return None

    @property
    def elsewhere(self) -> int | None:
        """Bytes of the card that neither this process's allocator nor anything free accounts for:
        contexts, libraries and other processes."""
        if self.capacity is None or self.free is None:
            return self.other_allocations
        ours = self.process if self.process is not None else self.reserved_bytes
        return None if ours is None else max(0, self.capacity - self.free - ours)

    @property
    def has_context(self) -> bool:
        """Whether `elsewhere` still includes this process's own CUDA context."""
        return self.process is None


@dataclass(frozen=True)
class Log:
    """A text with an out-of-memory message."""

    text: str
    message: Message
    lines: tuple[Line, ...]  # of the traceback that ends with the message, outermost first
    before: str = field(repr=False)  # the text above the traceback

    @property
    def user_lines(self) -> tuple[Line, ...]:
        return tuple(line for line in self.lines if is_user(line.frame))

    @property
    def line(self) -> Line | None:
        """The user's innermost line."""
        lines = self.user_lines or self.lines
        return lines[-1] if lines else None

    @cached_property
    def numbers(self) -> dict[str, float]:
        """Printed settings, such as batch_size=64 or seq_len: 4096."""
        return dict(_settings_in(self.text))

    @cached_property
    def memory_by_step(self) -> list[int]:
        """Bytes that the log's progress lines print, in order."""
        return list(_printed_memory(self.before))

    @cached_property
    def steps_done(self) -> int | None:
        """The last step or batch that a progress line names; None if no line names one."""
        return _last_step(self.before)


def read_log(text: str) -> Log:
    """Find the last out-of-memory message of a text. Raise ValueError if there is none."""
    found = list(_OUT_OF_MEMORY.finditer(text))
    if not found:
        raise ValueError(
            "it has no out-of-memory message; give a log that contains one, such as "
            "'CUDA out of memory. Tried to allocate 2.00 GiB'"
        )
    match = _best(text, found)
    start = text.rfind("\n", 0, match.start()) + 1
    message = _message(text[start : match.start() + WIDEST_MESSAGE], match)
    traceback_start = text.rfind(_TRACEBACK, 0, match.start())
    before = text[: traceback_start if traceback_start >= 0 else start]
    lines = tuple(_lines(text[len(before) : match.start()]))
    return Log(text, message, lines, before)


def _best(text: str, found: Sequence[re.Match[str]]) -> re.Match[str]:
    """Return the match that states most: a retry or a summary may repeat the error's name."""
    stated = [m for m in found if "allocate" in text[m.start() : m.start() + 150]]
    named = [m for m in stated if m.group(0) != "OutOfMemoryError"]
    return (named or stated or list(found))[-1]


def _message(text: str, match: re.Match[str]) -> Message:
    flat = re.sub(r"\s+", " ", text)
    backend = next((group for group in match.groups() if group), None)
    if backend is None:
        backend = next((b for b in ("HIP", "XPU", "MPS") if f"{b} " in flat[:80]), "CUDA")
    values = {}
    for name, wordings in _FIELDS.items():
        hits = (re.search(wording, flat) for wording in wordings)
        if hit := next(filter(None, hits), None):
            values[name] = _bytes(hit[1], hit[2])
    others = tuple((int(pid), _bytes(n, u)) for pid, n, u in _OTHER_PROCESS.findall(flat))
    return Message(_BACKENDS.get(backend, backend), **values, processes=others)


def _bytes(number: str, unit: str) -> int:
    return round(float(number) * _BINARY[unit.lower()[0]])


def _lines(text: str) -> Iterator[Line]:
    """Yield the frames of a traceback with their source lines."""
    rows = text.split("\n")
    for number, row in enumerate(rows):
        if match := _FILE_LINE.search(row):
            below = rows[number + 1] if number + 1 < len(rows) else ""
            source = "" if _FILE_LINE.search(below) else _PREFIX.sub("", below).strip()
            yield Line(Frame(match[1], int(match[2]), match[3]), source)


# ------------------------------------------------------------------ the rest of the log

_SETTING = re.compile(
    r"(?i)\b((?:per[_-]device[_-])?(?:(?:train|eval|micro|global|mini|test|val)[_-])?"
    r"(?:batch[_ -]?size|batch|bs|bsz)"
    r"|(?:max[_-])?(?:seq(?:uence)?[_ -]?len(?:gth)?|context[_ -]?len(?:gth)?|block[_-]?size"
    r"|max[_-]?length|seqlen|ctx|tokens|prompt[_-]len(?:gth)?|max[_-]new[_-]tokens)"
    r"|vocab(?:ulary)?(?:[_ -]?size)?"
    r"|(?:num[_-]?(?:hidden[_-])?|n[_-]?)?layers?|depth"
    r")\b['\"]?\s*[=:]?\s*(\d+)\b"
)
_SYMBOL = re.compile(r"\b([BT])\s*=\s*(\d+)\b")  # as many a script calls them
_MEMORY = re.compile(  # as progress lines print it; without a unit, it is in MiB
    r"(?i)\b(?:(?:max|peak|gpu)_?)?(?:mem(?:ory)?|alloc(?:ated)?|reserved|vram|cuda(?!:\d))\w*[^\d\n]{0,20}"
    r"(\d+(?:\.\d+)?) ?(TiB|GiB|MiB|KiB|TB|GB|MB|KB|G|M)?(?![a-zA-Z\d])"
)
_STEP = re.compile(
    r"(?i)\b(?:step|iter(?:ation)?|batch|global_step|it|update)s?\b\s*[:=#\[(]?\s*(\d+)"
    r"|\b(\d+)/\d+ \["
)


def _settings_in(text: str) -> Iterator[tuple[str, float]]:
    for name, number in _SETTING.findall(text):
        key = re.sub(r"[ -]", "_", name.lower())
        yield _kind_of(key), float(number)
    for symbol, number in _SYMBOL.findall(text):
        yield {"B": "batch", "T": "sequence"}[symbol], float(number)


def _kind_of(key: str) -> str:
    """Return batch, sequence, vocabulary, new_tokens or layers."""
    if "new" in key:
        return "new_tokens"
    for word, kind in (("vocab", "vocabulary"), ("layer", "layers"), ("depth", "layers")):
        if word in key:
            return kind
    return "batch" if re.search(r"batch|\bbsz?\b|^bs", key) else "sequence"


def _printed_memory(text: str) -> Iterator[int]:
    for row in re.split(r"[\r\n]", text):
        match = _MEMORY.search(row)
        if match:
            yield _bytes(match[1], match[2] or "MiB")


def _last_step(text: str) -> int | None:
    last = None
    for match in _STEP.finditer(text):
        last = int(match[1] or match[2])
    return last
