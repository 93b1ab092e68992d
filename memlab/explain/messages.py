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
from typing import NamedTuple

from memlab.explain import tracebacks
from memlab.explain.findings import CONTEXT_BYTES
from memlab.explain.frames import is_user
from memlab.explain.tracebacks import Line, Row
from memlab.units import format_bytes

_SIZE = r"(\d{1,20}(?:\.\d{1,9})?) ?(TiB|GiB|MiB|KiB|TB|GB|MB|KB|kB|bytes|B)(?![a-zA-Z])"
_BINARY = {"b": 1, "k": 2**10, "m": 2**20, "g": 2**30, "t": 2**40}  # by the unit's first letter

# Each field of a message, and the wordings that state it. MPS and old versions write GB for 2³⁰.
_FIELDS = {
    "requested": (
        rf"[Tt]ried to allocate {_SIZE}",
        rf"you tried to allocate {_SIZE}",
        rf"Failed to allocate {_SIZE}",
        rf"Requested {{1,25}}: {_SIZE}",  # of cudaMallocAsync, which writes one field a line
        rf"Unable to allocate {_SIZE}",  # of NumPy
        rf"Invalid buffer size: {_SIZE}",  # of MPS
        rf"Cannot allocate {_SIZE} memory on GPU",  # of Paddle
        rf"Requested size was {_SIZE}",  # of TensorRT
        rf"allocating {_SIZE} on device",  # of llama.cpp
        r"failed to allocate \w{1,20} buffer of size (\d{1,20})()",
        rf"trying to map {_SIZE}",  # of expandable segments; compiled C++ code states nothing else
    ),
    "capacity": (
        rf"total capac?i?ty of {_SIZE}",
        rf"{_SIZE} total capacity",
        rf"Device limit {{1,20}}: {_SIZE}",
        r"\(free: \d{1,20}, total: (\d{1,20})()\)",
    ),
    "free": (
        rf"of which {_SIZE} is free",
        rf"; {_SIZE} free[;)]",
        rf"Free \(according to CUDA\) ?: {_SIZE}",
        r"\(free: (\d{1,20})(), total:",
        rf"available memory is only {_SIZE}",
    ),
    "process": (rf"this process has {_SIZE} memory in use",),
    "allowed": (rf"{_SIZE} allowed;", rf"max allowed: {_SIZE}", rf"memory fraction\) ?: {_SIZE}"),
    "allocated": (
        rf"Of the allocated memory {_SIZE} is allocated by PyTorch",
        rf"{_SIZE} already allocated",
        rf"MPS allocated: {_SIZE}",
        rf"Currently allocated {{1,20}}: {_SIZE}",
        rf"on GPU \d{{1,4}}, {_SIZE} memory has been allocated",
    ),
    "reserved": (rf"{_SIZE} reserved in total by PyTorch",),
    "unallocated": (rf"{_SIZE} is reserved by PyTorch but unallocated", rf"{_SIZE} cached[;)]"),
    "private": (rf"with {_SIZE} allocated in private pools",),
    "other_allocations": (rf"other allocations: {_SIZE}",),
}
_LISTED_PROCESS = re.compile(rf"Process (\d{{1,10}}) has {_SIZE} memory in use")
_DEVICE = re.compile(r"\bGPU (\d{1,4})\b|\bon device (\d{1,4})\b")
_VARIABLE = re.compile(r"PYTORCH_(?:CUDA_|HIP_)?ALLOC_CONF")
MOST_BYTES = 2**46  # more than a card has: a message states a wrapped negative number

# What a log may end with, the most telling first, and the words that say so. Each wording is the
# one of the software that prints it; text_causes.py says what follows from it.
ERRORS = {
    "sized": r"Tried to allocate (?:more than )?[\d.]{1,20} ?[KMGTE]?i?B"
    r"|you tried to allocate %?\d|would exceed allowed memory"
    r"|Unable to allocate [\d.]{1,20} ?[KMGT]i?B for an array"
    r"|Invalid buffer size: [\d.]{1,20} ?[KMGT]i?B|memory mapping failed with OOM",
    "vllm": r"No available memory for the cache blocks|KV cache is needed, which is larger than the"
    r"|larger than the maximum number of tokens that can be stored in KV cache"
    r"|when warming up sampler|increase --mem-fraction-static",
    "vllm-shared": r"is less than desired GPU memory utilization|Error in memory profiling",
    "cumem": r"cumem_allocator\.cpp|torch_memory_saver\.cpp",
    "jax": r"XlaRuntimeError|JaxRuntimeError|RESOURCE_EXHAUSTED: (?:Out of memory|Failed to alloc"
    r"|Error (?:loading|allocating)|Attempting to|Allocation \(size|.{0,80}Ran out of memory in)"
    r"|external/org_tensorflow/|external/xla/|Out\s{1,9}of memory while trying to allocate",
    "paddle": r"Out of memory error on GPU",
    "paddle-path": r"paddle[./](?:fluid|phi)[./]\w",  # below the message, which may be cut off
    "tensorflow": r"OOM when allocating tensor|ResourceExhaustedError|tensorflow/\w{1,40}/"
    r"|failed to allocate [\d.]{1,20}[KMGT] \(|Could not create cudnn handle|GPU_\d_bfc",
    "mlx": r"\[METAL\] Command buffer execution failed: Insufficient Memory|\[metal::malloc\]",
    "library": r"(?:CUBLAS|CUDNN|CUSPARSE|CUSOLVER)_STATUS_ALLOC_FAILED|Failed to CUDA calloc"
    r"|Cuda failure '?out of memory|Cuda failure 2\b|NCCL.{0,200}out of memory",
    "llama": r"ggml_\w{1,60}: (?:allocating|failed to allocate) "
    r"|alloc_tensor_range: failed to allocate",
    "bare": r"(?i:(?:CUDA|HIP|XPU|NPU|MPS)(?: backend)? out of memory|cuda driver error: out of mem"
    r"ory|(?:CUDA|HIP|cuda runtime|XPU|NPU) (?:error.{0,200}|failed with error )out of memory)"
    r"|OutOfMemoryError\b(?!: Task)"
    r"|CUDA_ERROR_OUT_OF_MEMORY|cudaErrorMemoryAllocation|hipErrorOutOfMemory"
    r"|UR_RESULT_ERROR_OUT_OF_(?:DEVICE_MEMORY|RESOURCES)|(?i:nvml).{0,160}CUDACachingAllocator",
    # CTranslate2 says "failed with status" of a cuDNN that it cannot load.
    "handle": r"(?<!failed with status )(?:CUBLAS|CUDNN)_STATUS_NOT_INITIALIZED",
    "shm": r"insufficient shared memory|signal: Bus error|out of shared memory|SIGBUS"
    r"|unable to (?:write to|allocate shared memory).{0,20}(?:file|shm)",
    "page-file": r"WinError 1455|os error 1455|paging file is too small",
    "host": r"DefaultCPUAllocator|(?<!OutOf)\bMemoryError\b|std::bad_alloc|\[Errno 12\]"
    r"|Cannot allocate memory|node running low on memory|due to memory pressure"
    r"|ray-oom-prevention|unable to mmap|not enough memory: you",
    "killed": r"signal: Killed|SIGKILL|exitcode ? ?: -9|return code = -9|exit code 137|oom-kill"
    r"|oom_kill|OOMKilled|Out of memory: Kill|(?m:^[^\n]{0,80}\bKilled(?: {1,9}\S.{0,300})?$)"
    r"|zsh: killed|exit(?:ed with)? status 137",
    "fault": r"(?i:illegal memory access|device-side assert(?!ions)|no kernel image"
    r"|invalid device (?:p|or)|misaligned address|unspecified launch failure"
    r"|illegal instruction|error: invalid argument"
    r"|Attempting to deserialize object on a CUDA device|not compiled with CUDA enabled"
    r"|No CUDA GPUs are available|driver version is insufficient|signal: (?:Seg|Term|Abort)"
    r"|SIGSEGV|SIGABRT|Segmentation fault|collective operation timeout|invalid configuration arg"
    r"|expected all tensors to be on the same device|busy or unavailable"
    r"|unhandled (?:cuda|system) error"
    r"|Cuda failure (?:\d{1,4} )?'(?!out)|nccl(?:System|Internal|Remote)Error|ncclInvalid)"
    r"|INTERNAL ASSERT FAILED|(?:CUBLAS|CUDNN)_STATUS_(?!ALLOC|NOT_INIT)"
    r"|failed with status CUDNN_STATUS_NOT_INIT|exitcode ? ?: -(?:6|11)",
}
_ERRORS = {kind: re.compile(pattern) for kind, pattern in ERRORS.items()}
_NAMED = re.compile(  # where nothing else says why: other software, or a message that was cut
    r"(?i)\bout[ _-]?of[ _-]?memory|OutOfMemory|\bOOM\b|Allocation on device|failed to allocate"
)
_EXCEPTION = re.compile(
    r"(?m)^[ \t]{0,8}(?:\w{1,60}\.){0,6}\w{0,60}(?:Error|Exception)(?:: .{0,300})?$"
)
# Every match of ERRORS that a long log is searched for contains one of these.
KEYWORDS = (
    *(
        "out of memory",
        "OutOfMemoryError",
        "failed with OOM",
        "ALLOC_FAILED",
        "DefaultCPUAllocator",
    ),
    *("ried to allocate", "would exceed allowed memory", "Unable to allocate", "OOM when"),
    *("No available memory", "RESOURCE_EXHAUSTED", "MemoryError", "Killed", "SIGKILL"),
    *("exitcode", "return code = -9", "exit code 137", "oom-kill", "shared memory", "1455"),
)
_BACKENDS = {"HIP": "HIP", "XPU": "XPU", "MPS": "MPS", "NPU": "NPU", "hip": "HIP"}
_RANK = re.compile(r"rank(\d{1,5})")
WIDEST_MESSAGE = 2000  # characters after the match that may belong to the message
WIDEST_PREFIX = 300  # characters of the message's line before the match
NEAR_KEYWORD = 200  # characters around a keyword that a match may reach
MOST_HEAD = 2**16  # characters from the start of a log, where scripts print their settings
MOST_BEFORE = 2**19  # characters before the message


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
    def others(self) -> str:
        """The other processes that the message names, on one line."""
        return "; ".join(f"process {pid} has {format_bytes(size)}" for pid, size in self.processes)

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
    """A text that says why a program failed."""

    text: str  # what was read: the start, and the part before and after the message
    kind: str  # of ERRORS, or "other": an exception that says nothing about memory
    message: Message
    error: str  # the message's words on one line
    said: str  # the words that say what happened
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
    def model(self) -> tuple[str, float] | None:
        """The largest model that the text names, and its number of weights."""
        return _model_in(self.text)

    @cached_property
    def steps_done(self) -> int | None:
        """The last step or batch that a training's line names; None if no line names one."""
        return _last_step(self.before)

    @cached_property
    def trained(self) -> bool:
        """Whether the log shows that training ran before."""
        first = _EPOCH.search(self.before) or _FIRST_STEP.search(self.before)
        return bool(self.steps_done) or bool(first)


class Error(NamedTuple):
    """A place in a text where a program says why it failed."""

    kind: str  # of ERRORS, or "other"
    start: int
    end: int


def read_log(text: str, unread: int = 0) -> Log:
    """Find the words of a text that say most about its failure. Raise ValueError if none do.

    `unread` is how much of the log the text leaves out.
    """
    found = list(messages_in(text)) or _failures_in(text)
    if not found:
        raise ValueError(
            "it has no out-of-memory message; give a log that contains one, such as 'CUDA out of "
            "memory. Tried to allocate 2.00 GiB', or the last lines of a program that was killed"
        )
    error = _most_telling(found)
    start = max(text.rfind("\n", 0, error.start) + 1, error.start - WIDEST_PREFIX)
    first = max(0, start - MOST_BEFORE)
    head, before = text[: min(first, MOST_HEAD)], text[first:start]
    after = text[start : error.start + WIDEST_MESSAGE]
    above, below = tracebacks.rows_of(before)[:-1], tracebacks.rows_of(after)
    writer = below[0].writer
    above = [row for row in above if row.writer in (writer, "")] if writer else above
    rest, lines = tracebacks.before(above)
    if not lines and any(tracebacks.DEBUGGER in row.text for row in above[-3:]):
        lines = tracebacks.reversed_lines(below)
    lines += tuple(tracebacks.pytest_lines([*above[-8:], *below[:8]]))
    lines = lines or tracebacks.below(below) or tracebacks.code_above(above)
    lines = lines or _lines_of_another(text, error, found)
    rank = _RANK.search(writer)
    message = _message(below, error.kind)
    return Log(
        head + before + after,
        error.kind,
        message,
        _flat(below),
        _said(text, error),
        lines,
        head + "\n".join(row.text for row in rest),
        rank=int(rank[1]) if rank else None,
        failures=max(1, len({e.end for e in found if e.kind == "sized"})),
        skipped_chars=first - len(head) + unread,
    )


def _lines_of_another(text: str, error: Error, found: Sequence[Error]) -> tuple[Line, ...]:
    """Return the traceback of a later message without sizes: another rank's, of the same job."""
    others = [other.start for other in found if other.kind == "bare" and other.start > error.end]
    rows = tracebacks.rows_of(text[error.end : others[-1]])[1:-1] if others else []
    return tracebacks.before(rows)[1]


def messages_in(text: str) -> Iterator[Error]:
    """Yield the places that say why a program failed, as far as a KEYWORD is near, in order."""
    places = sorted({place for word in KEYWORDS for place in _places(text, word)})
    seen: dict[str, int] = {}
    for place in places:
        for kind, pattern in _ERRORS.items():
            begin = max(seen.get(kind, 0), place - NEAR_KEYWORD)
            for match in pattern.finditer(text, begin, place + NEAR_KEYWORD):
                seen[kind] = match.end()
                yield Error(kind, match.start(), match.end())


def _places(text: str, word: str) -> Iterator[int]:
    place = text.find(word)
    while place >= 0:
        yield place
        place = text.find(word, place + len(word))


def _failures_in(text: str) -> list[Error]:
    """Return the failures of the text's end that name no memory."""
    start = max(0, len(text) - MOST_BEFORE)
    found = [
        Error(kind, match.start(), match.end())
        for kind, pattern in _ERRORS.items()
        for match in pattern.finditer(text, start)
    ]
    if not found and (tracebacks.HEAD in text or "----> " in text):
        ends = list(_EXCEPTION.finditer(text, start))
        kinds = ["bare" if _NAMED.search(match[0]) else "other" for match in ends[-1:]]
        found = [Error(kind, m.start(), m.end()) for kind, m in zip(kinds, ends[-1:], strict=True)]
    if not found:
        named = list(_NAMED.finditer(text, start))
        found = [Error("bare", match.start(), match.end()) for match in named[-1:]]
    return found


def _most_telling(found: Sequence[Error]) -> Error:
    """Return the last error of the kind that says most: a summary may repeat an error's name."""
    kinds = [*ERRORS, "other"]
    best = min(kinds.index(error.kind) for error in found)
    return [error for error in found if kinds.index(error.kind) == best][-1]


def _said(text: str, error: Error) -> str:
    """Return the row of an error, or as much around its words as fits a line."""
    start = max(text.rfind("\n", 0, error.start) + 1, error.start - 40)
    end = text.find("\n", error.end)
    cut = text[start : min(end % (len(text) + 1), start + 130)]
    if start and text[start - 1] != "\n":
        cut = "… " + cut.partition(" ")[2]
    return _flat(tracebacks.rows_of(cut)).strip()


def _flat(rows: Sequence[Row], between: str = " ") -> str:
    text = between.join(row.text for row in rows)
    return re.sub(r"\s+", " ", text) if between else text


def _message(rows: Sequence[Row], kind: str) -> Message:
    """Read the fields of a message. A terminal may have broken its words over rows."""
    texts = _flat(rows), _flat(rows, "")
    flat = texts[0]
    host = kind == "host" or "DefaultCPUAllocator" in flat or "for an array" in flat
    names = (word for word in re.findall(r"\w+", flat[:WIDEST_PREFIX]) if word in _BACKENDS)
    values = {}
    for name, wordings in _FIELDS.items():
        hits = (re.search(wording, text) for text in texts for wording in wordings)
        if hit := next(filter(None, hits), None):
            values[name] = _bytes(hit[1], hit[2])
    listed = tuple((int(pid), _bytes(n, u)) for pid, n, u in _LISTED_PROCESS.findall(flat))
    device, variable = _DEVICE.search(flat), _VARIABLE.search(flat)
    message = Message(
        _backend(names, host),
        **{name: size for name, size in values.items() if _is_size(name, size)},
        processes=listed,
        device=int(device[1] or device[2]) if device else None,
        variable=variable[0] if variable else "",
        names_expandable="expandable_segments" in flat,
    )
    return _without_own_process(message)


def _backend(names: Iterator[str], host: bool) -> str:
    return "CPU" if host else _BACKENDS.get(next(names, ""), "CUDA")


def _is_size(name: str, size: int) -> bool:
    """Whether a field is a size: a container hides its processes, and 2⁶⁴ − n was negative."""
    return (size < MOST_BYTES or name == "requested") and not (name == "process" and size == 0)


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
    return round(float(number) * _BINARY[unit.lower()[:1] or "b"])


# ------------------------------------------------------------------ the rest of the log

_SETTING = re.compile(
    r"(?i)\b((?:per[_-]device[_-])?(?:(?:train|eval|micro|global|mini|test|val)[_-])?"
    r"(?:batch[_ -]?size|batch|bs|bsz)"
    r"|(?:max[_-])?(?:seq(?:uence)?[_ -]?len(?:gth)?|context[_ -]?len(?:gth)?|block[_-]?size"
    r"|max[_-]?length|seqlen|ctx|tokens|prompt[_-]len(?:gth)?|max[_-]new[_-]tokens)"
    r"|vocab(?:ulary)?(?:[_ -]?size)?"
    r")\b['\"]?[ \t]{0,4}[=:]?[ \t]{0,4}(\d{1,12})\b"
)
_MODEL = re.compile(
    r"(?<![\w.-])([A-Za-z][A-Za-z\d.]{0,30}[-_](?:[A-Za-z\d.]{1,30}[-_]){0,5}?"
    r"(\d{1,3}(?:\.\d{1,2})?)[bB])(?![A-Za-z\d])"
)
_SYMBOL = re.compile(r"\b([BT])[ \t]{0,4}=[ \t]{0,4}(\d{1,12})\b")  # as many a script calls them
_STEP = re.compile(
    r"(?i)(?<!total )(?<!max )(?<!num )\b(?:step|iter(?:ation)?|batch|global_step|it|update)s?\b"
    r"\s{0,4}[:=#\[(]?\s{0,4}(\d{1,12})(?![\d%])"
    r"|\b(\d{1,12}) ?/ ?\d{1,12} (?:\[|loss)"
)
_OTHER_PROGRESS = re.compile(  # a bar of shards, downloads, images, samples of an evaluation
    r"(?i)load|shard|sampl|generat|merg|tokeniz|eval|valid|predict|infer|test|decod|map\b|filter"
    r"|convert|saving|quanti|caching|fetch|prepar"
)
_TRAINING = re.compile(r"(?i)train|loss|epoch|\blr\b|learning")
_EPOCH = re.compile(r"(?i)\bepochs?\b.{0,40}\bloss\b|\bepoch\b[ \t:=#\[(]{0,4}\d")
_FIRST_STEP = re.compile(r"(?i)\bstep[ \t:=#\[(]{0,4}0{1,12}\b.{0,40}\btrain")


def _model_in(text: str) -> tuple[str, float] | None:
    """Return the largest model that a text names, such as Llama-2-70b, and its weights."""
    found = ((match[1], float(match[2]) * 1e9) for match in _MODEL.finditer(text))
    return max(found, key=lambda model: model[1], default=None)


def _settings_in(text: str) -> Iterator[tuple[str, float]]:
    for name, number in _SETTING.findall(text):
        key = re.sub(r"[ -]", "_", name.lower())
        yield _kind_of(key), float(number)
    for symbol, number in _SYMBOL.findall(text):
        yield {"B": "batch", "T": "sequence"}[symbol], float(number)


def _kind_of(key: str) -> str:
    """Return batch, sequence, vocabulary or new_tokens."""
    for word, kind in (("new", "new_tokens"), ("vocab", "vocabulary")):
        if word in key:
            return kind
    return "batch" if re.search(r"batch|\bbsz?\b|^bs", key) else "sequence"


def _last_step(text: str) -> int | None:
    """Return the last step of a training. A bare progress bar may count anything else."""
    last = None
    trains = bool(_TRAINING.search(text))
    for row in text.split("\n"):
        if match := _STEP.search(row):
            trained = trains or bool(match[1])
            if _TRAINING.search(row) or (trained and not _OTHER_PROGRESS.search(row)):
                last = int(match[1] or match[2])
    return last
