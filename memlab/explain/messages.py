"""Out-of-memory messages of PyTorch, and the logs around them.

Every wording from torch 1.0 on is read field by field, so an unknown sentence in between does no
harm. Backends: CUDA, HIP, XPU, MPS and the CPU. From the traceback come the failing line and the
phase of the training step; from the log's other lines the completed steps and printed sizes.

A log may be long, and so may its lines. Of a long log only its first part and the part before the
message are read. No pattern here repeats anything without a bound, so the work for a character does
not grow with the length of its line.
"""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

from memlab.explain import tracebacks
from memlab.explain.findings import CONTEXT_BYTES
from memlab.explain.frames import is_user
from memlab.explain.tracebacks import Line

_SIZE = r"(\d{1,20}(?:\.\d{1,9})?) ?(TiB|GiB|MiB|KiB|TB|GB|MB|KB|kB|bytes|B)(?![a-zA-Z])"
_BINARY = {"b": 1, "k": 2**10, "m": 2**20, "g": 2**30, "t": 2**40}  # by the unit's first letter

# Each field of a message, and the wordings that state it. MPS and old versions write GB for 2³⁰.
_FIELDS = {
    "requested": (
        rf"[Tt]ried to allocate {_SIZE}",
        rf"you tried to allocate {_SIZE}",
        rf"Failed to allocate {_SIZE}",
        rf"Requested {{1,20}}: {_SIZE}",  # of cudaMallocAsync, which writes one field a line
    ),
    "capacity": (
        rf"total capac?i?ty of {_SIZE}",
        rf"{_SIZE} total capacity",
        rf"Device limit {{1,20}}: {_SIZE}",
    ),
    "free": (
        rf"of which {_SIZE} is free",
        rf"; {_SIZE} free[;)]",
        rf"Free \(according to CUDA\) ?: {_SIZE}",
    ),
    "process": (rf"this process has {_SIZE} memory in use",),
    "allowed": (rf"{_SIZE} allowed;", rf"max allowed: {_SIZE}"),
    "allocated": (
        rf"Of the allocated memory {_SIZE} is allocated by PyTorch",
        rf"{_SIZE} already allocated",
        rf"MPS allocated: {_SIZE}",
        rf"Currently allocated {{1,20}}: {_SIZE}",
    ),
    "reserved": (rf"{_SIZE} reserved in total by PyTorch",),
    "unallocated": (rf"{_SIZE} is reserved by PyTorch but unallocated", rf"{_SIZE} cached[;)]"),
    "private": (rf"with {_SIZE} allocated in private pools",),
    "other_allocations": (rf"other allocations: {_SIZE}",),
}
_LISTED_PROCESS = re.compile(rf"Process (\d{{1,10}}) has {_SIZE} memory in use")
_DEVICE = re.compile(r"\bGPU (\d{1,4})\b|\bon device (\d{1,4})\b")
_VARIABLE = re.compile(r"PYTORCH_(?:CUDA_|HIP_)?ALLOC_CONF")
_OUT_OF_MEMORY = re.compile(
    r"(CUDA|HIP|XPU|MPS)(?: backend)? out of memory"
    r"|(CUDA|HIP|cuda runtime|XPU) error.{0,20}out of memory"
    r"|(DefaultCPUAllocator).{0,60}(?:allocate|memory)"
    r"|Allocation on device \d{1,4} would exceed allowed memory"
    r"|OutOfMemoryError"
    r"|(CUBLAS|CUDNN)_STATUS_ALLOC_FAILED"
    r"|Cuda failure '?out of memory"
    r"|Tried to allocate [\d.]{1,20} ?[KMGT]?i?B"
)
# Every match of _OUT_OF_MEMORY contains one of these. Searching for plain text is fast.
KEYWORDS = (
    *("out of memory", "OutOfMemoryError", "ALLOC_FAILED", "DefaultCPUAllocator"),
    *("Tried to allocate", "would exceed allowed memory"),
)
_BACKENDS = {"cuda runtime": "CUDA", "DefaultCPUAllocator": "CPU", "CUBLAS": "CUDA"}
_BACKENDS["CUDNN"] = "CUDA"
_RANK = re.compile(r"^[ \t]{0,8}\[[a-z]{0,9}rank(\d{1,5})\]:?")
WIDEST_MESSAGE = 2000  # characters after the match that may belong to the message
WIDEST_PREFIX = 300  # characters of the message's line before the match
NEAR_KEYWORD = 100  # characters around a keyword that a match may reach
MOST_HEAD = 2**16  # characters from the start of a log, where scripts print their settings
MOST_BEFORE = 2**19  # characters before the message
MOST_TRACEBACK = 2**18  # characters of a traceback


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
    device: int | None = None
    variable: str = ""  # the environment variable of the allocator's settings that it names
    names_expandable: bool = False  # whether it recommends expandable segments

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
    def outside_pytorch(self) -> int | None:
        """Bytes of this process that its allocator did not reserve: the CUDA context, libraries."""
        if self.process is None or self.reserved_bytes is None:
            return None
        return max(0, self.process - self.reserved_bytes)

    @property
    def has_context(self) -> bool:
        """Whether `elsewhere` still includes this process's own CUDA context."""
        return self.process is None


@dataclass(frozen=True)
class Log:
    """A text with an out-of-memory message."""

    text: str  # what was read: the start, and the part before and after the message
    message: Message
    lines: tuple[Line, ...]  # of the traceback that ends with the message, outermost first
    before: str = field(repr=False)  # the text above the traceback
    rank: int | None = None  # of the process that printed the message, in a distributed run
    failures: int = 1  # tracebacks or lines with an out-of-memory message in the text
    skipped_chars: int = 0  # of the log, only searched for messages

    @property
    def user_lines(self) -> tuple[Line, ...]:
        return tuple(line for line in self.lines if is_user(line.frame))

    @property
    def line(self) -> Line | None:
        """The user's innermost line."""
        lines = self.user_lines or self.lines
        return lines[-1] if lines else None

    @property
    def inner_lines(self) -> tuple[Line, ...]:
        """The lines around the failing operator: the user's last one, and all below."""
        user = [number for number, line in enumerate(self.lines) if is_user(line.frame)]
        return self.lines[user[-1] if user else -2 :]

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

    @cached_property
    def trained(self) -> bool:
        """Whether the log shows that training ran before."""
        first = _EPOCH.search(self.before) or _FIRST_STEP.search(self.before)
        return bool(self.steps_done) or bool(first)


def read_log(text: str, unread: int = 0) -> Log:
    """Find the last out-of-memory message of a text. Raise ValueError if there is none.

    `unread` is how much of the log the text leaves out.
    """
    found = list(messages_in(text))
    if not found:
        raise ValueError(
            _other_failure(text)
            or (
                "it has no out-of-memory message; give a log that contains one, such as "
                "'CUDA out of memory. Tried to allocate 2.00 GiB'"
            )
        )
    match = _best(text, found)
    start = text.rfind("\n", 0, match.start()) + 1
    start = max(start, match.start() - WIDEST_PREFIX)
    first = max(0, start - MOST_BEFORE)
    head, before = text[: min(first, MOST_HEAD)], text[first:start]
    after = text[start : match.start() + WIDEST_MESSAGE]
    if after.lstrip().startswith(">"):  # quoted in a forum or a mail
        before, after = _unquoted(before), _unquoted(after)
    message = _message(after, match)
    rank = _RANK.search(after)
    if rank:
        before = _of_rank(before, rank[0])
    above, lines = tracebacks.last(before, MOST_TRACEBACK)
    return Log(
        head + before + after,
        message,
        lines,
        head + above,
        rank=int(rank[1]) if rank else None,
        failures=_count_failures(text, found),
        skipped_chars=first - len(head) + unread,
    )


_RAM = "this is the computer's own memory (RAM), not the GPU's: "
# Words of other failures, and what to say about them. The first that occurs counts.
_OTHER_FAILURES = (
    (
        "No available memory for the cache blocks",
        "vLLM has no room for the KV cache beside the weights: raise gpu_memory_utilization, "
        "lower max_model_len, or load the model in fewer bits",
    ),
    (
        "insufficient shared memory",
        "a DataLoader worker ran out of shared memory (/dev/shm): start the container with "
        "--shm-size=8g or --ipc=host, or set num_workers=0",
    ),
    (
        "is killed by signal",
        f"a DataLoader worker was killed; {_RAM}use fewer workers, or load less for each sample",
    ),
    (
        "RESOURCE_EXHAUSTED",
        "it has an out-of-memory message of JAX or TensorFlow; memlab only reads PyTorch's",
    ),
    (
        "Unable to allocate",
        f"numpy ran out of memory; {_RAM}load the data in parts (numpy.memmap), or use float32",
    ),
    ("MemoryError", f"Python ran out of memory; {_RAM}load less at once"),
    (
        "oom-kill",
        f"the system killed the process; {_RAM}ask for more, use fewer DataLoader workers, or load "
        f"the weights straight onto the GPU",
    ),
    (
        "Killed",
        f"the system killed the process; {_RAM}use fewer DataLoader workers, or load the weights "
        f"straight onto the GPU",
    ),
)


def _other_failure(text: str) -> str | None:
    """Return a sentence about a failure outside PyTorch's GPU memory."""
    return next((said for words, said in _OTHER_FAILURES if words in text), None)


def messages_in(text: str) -> Iterator[re.Match[str]]:
    """Yield the out-of-memory messages in order, each once."""
    places = sorted(place for word in KEYWORDS for place in _places(text, word))
    last = 0
    for place in places:
        begin = max(last, place - NEAR_KEYWORD)
        for match in _OUT_OF_MEMORY.finditer(text, begin, place + NEAR_KEYWORD):
            last = match.end()
            yield match


def _places(text: str, word: str) -> Iterator[int]:
    place = text.find(word)
    while place >= 0:
        yield place
        place = text.find(word, place + len(word))


def _best(text: str, found: Sequence[re.Match[str]]) -> re.Match[str]:
    """Return the match that states most: a retry or a summary may repeat the error's name."""
    stated = [m for m in found if "allocate" in text[m.start() : m.start() + 150]]
    named = [m for m in stated if m.group(0) != "OutOfMemoryError"]
    return (named or stated or list(found))[-1]


def _count_failures(text: str, found: Sequence[re.Match[str]]) -> int:
    """Return how many messages state a request; 1 if none does."""
    ends = (m.end() for m in found if m.group(0).startswith("Tried to allocate"))
    return max(1, len(set(ends)))


def _unquoted(text: str) -> str:
    return re.sub(r"(?m)^[ \t]{0,8}> ?", "", text)


def _of_rank(text: str, prefix: str) -> str:
    """Return the lines of one rank, and those without a rank. Ranks print at the same time."""
    rows = text.split("\n")
    kept = [row for row in rows if row.startswith(prefix) or not _RANK.search(row)]
    return "\n".join(kept)


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
    listed = tuple((int(pid), _bytes(n, u)) for pid, n, u in _LISTED_PROCESS.findall(flat))
    device, variable = _DEVICE.search(flat), _VARIABLE.search(flat)
    message = Message(
        _BACKENDS.get(backend, backend),
        **values,
        processes=listed,
        device=int(device[1] or device[2]) if device else None,
        variable=variable[0] if variable else "",
        names_expandable="expandable_segments" in flat,
    )
    return _without_own_process(message)


def _without_own_process(message: Message) -> Message:
    """Find this process among the listed ones.

    In a container the driver's process ids differ from the container's, so torch does not recognize
    its own process, lists it with the others and leaves the words "this process has" out. It is the
    one as large as what this process reserved plus a CUDA context.
    """
    ours = message.reserved_bytes
    if message.process is not None or ours is None:
        return message
    larger = [entry for entry in message.processes if ours <= entry[1] + CONTEXT_BYTES // 100]
    if not larger:
        return message
    own = min(larger, key=lambda entry: entry[1])
    listed = sum(size for _, size in message.processes)
    impossible = message.capacity is not None and listed + ours > message.capacity
    if own[1] - ours > CONTEXT_BYTES and not impossible:
        return message
    others = tuple(entry for entry in message.processes if entry is not own)
    return replace(message, process=own[1], processes=others)


def _bytes(number: str, unit: str) -> int:
    return round(float(number) * _BINARY[unit.lower()[0]])


# ------------------------------------------------------------------ the rest of the log

_SETTING = re.compile(
    r"(?i)\b((?:per[_-]device[_-])?(?:(?:train|eval|micro|global|mini|test|val)[_-])?"
    r"(?:batch[_ -]?size|batch|bs|bsz)"
    r"|(?:max[_-])?(?:seq(?:uence)?[_ -]?len(?:gth)?|context[_ -]?len(?:gth)?|block[_-]?size"
    r"|max[_-]?length|seqlen|ctx|tokens|prompt[_-]len(?:gth)?|max[_-]new[_-]tokens)"
    r"|vocab(?:ulary)?(?:[_ -]?size)?"
    r"|(?:num[_-]?(?:hidden[_-])?|n[_-]?)?layers?|depth"
    r")\b['\"]?[ \t]{0,4}[=:]?[ \t]{0,4}(\d{1,12})\b"
)
_SYMBOL = re.compile(r"\b([BT])[ \t]{0,4}=[ \t]{0,4}(\d{1,12})\b")  # as many a script calls them
_MEMORY = re.compile(  # as progress lines print it; without a unit, it is in MiB
    r"(?i)\b(?:(?:max|peak|gpu)_?)?(?:mem(?:ory)?|alloc(?:ated)?|reserved|vram|cuda(?!:\d))\w{0,20}[^\d\n]{0,20}"
    r"(\d{1,15}(?:\.\d{1,9})?) ?(TiB|GiB|MiB|KiB|TB|GB|MB|KB|G|M)?(?![a-zA-Z\d])"
)
_STEP = re.compile(
    r"(?i)\b(?:step|iter(?:ation)?|batch|global_step|it|update)s?\b\s{0,4}[:=#\[(]?\s{0,4}(\d{1,12})"
    r"|\b(\d{1,12})/\d{1,12} \["
)
_EPOCH = re.compile(r"(?i)\bepochs?\b.{0,40}\bloss\b|\bepoch\b[ \t:=#\[(]{0,4}\d")
_FIRST_STEP = re.compile(r"(?i)\bstep[ \t:=#\[(]{0,4}0{1,12}\b.{0,40}\btrain")


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
