"""What a log says about the moment when memory ran out.

The facts here are what the rows of rules.py ask for: sizes of the message that contradict or
explain each other, the phase of the step, what the failing lines compute. A message, code lines,
frames and printed lines are different parts of a log, and a fact reads one of them.
"""

import re
from dataclasses import dataclass
from functools import cached_property

from memlab.explain.findings import CONTEXT_BYTES
from memlab.explain.frames import (
    Frame,
    decoding_frame,
    disables_grad,
    evaluation_frame,
    framework_without_grad,
    generation_frame,
    in_forward,
    in_optimizer,
    in_recompute,
    in_setup,
    in_worker,
    is_user,
    makes_state,
)
from memlab.explain.histories import share
from memlab.explain.messages import Log, Message
from memlab.explain.source_files import SourceLine, calls_backward, changed, gradients, unchanged
from memlab.explain.tracebacks import Line
from memlab.units import format_bytes

MANY_STEPS = 20  # after these, what every step needs has been shown to fit
GIB = 2**30
LARGEST_CARD = 288 * GIB
LARGE_REQUEST = 2**29  # that only a segment of its own has room for
SMALL_REQUEST = 0.02  # of what was allocated: the last of many, which says little
MOST_HEADS = 512
CONTEXT_SHARE = 0.05  # of a card: what a CUDA context takes at least
# No pattern repeats anything without a bound; see messages.
_CACHE = re.compile(r"past_key|key_cache|value_cache|kv_cache|k_cache|v_cache|\bcache\b|\bpast\b")
_MODEL_CALL = re.compile(r"\b(model|net|network|criterion|loss_fn|loss_func|forward)\(")
_LOADS = re.compile(
    r"\b(\w{0,40}model\w{0,40}|net|unet|pipe\w{0,20})\.(to|cuda)\(|\bfrom_pretrained\("
)
_CHECKPOINTING = re.compile(
    r"(?i)(gradient|activation)[_ ]?checkpointing['\"]?[ \t]{0,4}([=:][ \t]{0,4}|is )?"
    r"(true|on\b|1|yes|enabled)"
)
WSL = r"/mnt/[a-z]/[\w./-]{0,60}|@DESKTOP-\w{1,20}|\b(?:WSL|wsl)\d?\b|microsoft-standard\S{0,20}"
_WINDOWS = re.compile(rf"\b[A-Za-z]:\\|\\site-packages\\|WinError|{WSL}")
_LLAMA_CPP = re.compile(r"\bggml[-_]\w|\bllama_\w{1,60}: ")
_RSS = re.compile(r"(?:anon|file|shmem)-rss:(\d{1,12})kB")  # of the kernel's line
_TORCH = re.compile(r"-packages/torch/")
_COPIES = re.compile(r"n_copies=(\d{1,3})")  # of llama.cpp's pipeline
_UNIX = re.compile(r"(?<![\w.])/(?:home|root|usr|opt|data|content|workspace)/")
_JAX_START = re.compile(  # its share is refused, or CUDA's libraries find no room beside it
    r"(?i)(unable to create StreamExecutor|failed call to cuDevicePrimaryCtxRetain"
    r"|(before creating|could not create) cudnn|failed to create cu\w{3,8} handle"
    r"|failed to allocate [^\n]{1,60} from device: CUDA_ERR|DNN library init"
    r"|load in-memory CUBIN|no supported devices found)[^\n]{0,80}"
)
_NVIDIA_SMI = re.compile(r"\b(\d{1,7})MiB / {1,4}(\d{1,7})MiB")
_NODE = re.compile(r"running was (\d[\d.]{0,9} ?GB) / (\d[\d.]{0,9} ?GB)")  # of Ray's message
_NODE_USER = re.compile(r"(?m)\b\d{1,8}[ \t]{1,20}(\d{1,6}\.\d\d)[ \t]{1,20}(\S{1,60})")
_BUFFER = re.compile(r"empty_strided\w{0,10}\(\((\d{1,12}), (\d{1,12})\)")  # of Inductor's code
LEAST_VOCABULARY = 8192  # columns: wider than layers are


@dataclass(frozen=True)
class TextSituation:
    """What a log says about the moment when memory ran out."""

    log: Log

    @property
    def message(self) -> Message:
        return self.log.message

    # ------------------------------------------------------------------ frames and code

    @cached_property
    def stack(self) -> tuple[Frame, ...]:
        """The traceback's frames, innermost first as in a snapshot."""
        return tuple(line.frame for line in reversed(self.log.lines))

    @cached_property
    def frames(self) -> str:
        """A row for each frame: its file and function."""
        return "\n".join(f"{f.filename.replace(chr(92), '/')} {f.name}" for f in self.stack)

    @cached_property
    def failing(self) -> str:
        """The rows around the failing operator: file, function and code, as in `frames`."""
        return "\n".join(map(row_of, self.log.inner_lines))

    @cached_property
    def near(self) -> str:
        """The last six frames, which may belong to one library."""
        return "\n".join(map(row_of, self.log.lines[-6:]))

    @cached_property
    def code(self) -> str:
        """The source lines around the failing operator."""
        return "\n".join(line.source for line in self.log.inner_lines)

    @cached_property
    def all_code(self) -> str:
        return "\n".join(line.source for line in self.log.lines)

    @cached_property
    def phase(self) -> str:
        """setup, forward, backward, optimizer, other, or "" without a traceback."""
        names = {frame.name.rpartition(".")[2] for frame in self.stack}
        if names & {"_engine_run_backward", "run_backward"} or ".backward(" in self.all_code:
            return "backward"
        if in_optimizer(self.stack) or re.search(r"\boptim\w{0,40}\.step\(", self.code):
            return "optimizer"
        if in_forward(self.stack):
            return "forward"
        if in_setup(self.stack) or _LOADS.search(self.code):
            return "setup"
        if names & {"_call_impl", "_wrapped_call_impl"} or _MODEL_CALL.search(self.code):
            return "forward"
        return "backward" if "run_backward(" in self.log.before[-400:] else self._rest

    @property
    def _rest(self) -> str:
        return "other" if self.log.lines else ""

    @property
    def in_setup(self) -> bool:
        return self.phase == "setup"

    @property
    def in_optimizer(self) -> bool:
        return self.phase == "optimizer"

    @property
    def makes_state(self) -> bool:
        return makes_state(self.stack) or "zeros_like" in self.code

    @property
    def in_step(self) -> bool:
        return self.phase in ("forward", "backward")

    @property
    def in_backward(self) -> bool:
        return self.phase == "backward"

    @property
    def in_worker(self) -> bool:
        return in_worker(self.stack)

    @property
    def has_traceback(self) -> bool:
        return bool(self.log.lines)

    # ------------------------------------------------------------------ evaluation, generation

    @cached_property
    def evaluation(self) -> Frame | None:
        """The function that evaluates. One that calls backward, as an attack does, trains."""
        found = None if self.phase in ("backward", "optimizer") else evaluation_frame(self.stack)
        read = unchanged(self.source_lines)
        start = next((n for n, line in enumerate(read) if line[:3] == found), len(read))
        return None if calls_backward(read[start:]) else found

    @property
    def evaluates(self) -> bool:
        return bool(self.evaluation or framework_without_grad(self.stack))

    @property
    def may_keep_graph(self) -> bool:
        """Whether an evaluation runs the model, and nothing is seen to disable gradients."""
        return self.evaluation is not None and not self.disables_grad

    @property
    def trained(self) -> bool:
        return self.log.trained

    @cached_property
    def source_lines(self) -> list[SourceLine]:
        """The user's lines of the traceback, outermost first."""
        return [SourceLine(*line.frame, line.source) for line in self.log.user_lines]

    @cached_property
    def enables_grad(self) -> bool:
        """Whether the user's files show that nothing around the evaluation disables gradients.

        The traceback must be whole: an error that the program caught and printed has no frames
        above the function that caught it. And the user's code must call the evaluation; a library
        may disable gradients around a function that it calls.
        """
        frames = [line.frame for line in self.log.lines]
        if self.evaluation not in frames or not is_user(self.evaluation):
            return False
        callers = frames[: frames.index(self.evaluation)][-1:]
        whole = frames[0].name == "<module>" or not is_user(frames[0])
        return whole and all(map(is_user, callers)) and gradients(self.source_lines) is True

    @cached_property
    def disables_grad(self) -> bool:
        return disables_grad(self.stack) or gradients(self.source_lines) is False

    @cached_property
    def generation(self) -> Frame | None:
        """The function that generates text. A function called decode needs a cache beside it."""
        if self.phase in ("backward", "optimizer"):
            return None
        caches = "cache_utils" in self.frames or _CACHE.search(self.code)
        return generation_frame(self.stack) or (decoding_frame(self.stack) if caches else None)

    @property
    def generates(self) -> bool:
        return self.generation is not None

    @property
    def infers(self) -> bool:
        """Whether nothing trains: gradients are disabled, or an evaluation or loading ran."""
        names = r"sampl|inference|pipeline|generate|predict|ComfyUI|/vllm/|webui|Fooocus"
        seen = self.disables_grad or self.evaluates or self.in_setup or self.generates
        seen = seen or bool(_LLAMA_CPP.search(self.log.text))
        return not self.in_backward and (seen or bool(re.search(names, self.frames)))

    @cached_property
    def recomputes(self) -> bool:
        return in_recompute(self.stack) or bool(_CHECKPOINTING.search(self.log.text))

    @cached_property
    def llama_buffer(self) -> str:
        """Which of llama.cpp's buffers found no room, or ""."""
        if self.log.kind != "llama":
            return ""
        if re.search(r"alloc_tensor_range|error loading model: unable to", self.log.text):
            return "weights"
        return "the KV cache" if "buffer for kv cache" in self.log.text else "its compute buffer"

    @property
    def copies(self) -> int:
        """How many compute buffers llama.cpp's pipeline keeps; 0 if the log does not say."""
        found = _COPIES.findall(self.log.text)
        return int(found[-1]) if found and self.llama_buffer == "its compute buffer" else 0

    @property
    def killed_bytes(self) -> int:
        """The RAM of the process that the kernel killed; 0 if no line of the kernel says it."""
        return 1024 * sum(int(kib) for kib in _RSS.findall(self.log.error))

    @property
    def joins_outputs(self) -> bool:
        return self.on_host and bool(re.search(r"\b(cat|concat\w{0,6}|v?stack)\(", self.code))

    @property
    def makes_buffer(self) -> bool:
        """Whether a buffer of NumPy's arrays is made, such as the observations of a replay."""
        return "for an array with shape" in self.log.error and "buffer_size" in self.code

    @property
    def fitting_tokens(self) -> str:
        """The number of tokens that vLLM's KV cache has room for, or ""."""
        match = re.search(r"stored in KV cache \((\d{1,9})\)", self.log.text)
        return match[1] if match else ""

    # ------------------------------------------------------------------ printed numbers

    def _number(self, name: str) -> int | None:
        number = self.log.numbers.get(name)
        return int(number) if number else None

    @property
    def batch_of_one(self) -> bool:
        return self._number("batch") == 1

    @property
    def trains(self) -> bool:
        """Whether the log prints a batch, as settings of a training do, and infers nothing."""
        return "batch" in self.log.numbers and not self.infers

    @property
    def long_sequence(self) -> bool:
        return (self._number("sequence") or 0) >= 2048

    @property
    def ran_before(self) -> bool:
        """Whether many steps of the same kind were completed."""
        return (self.log.steps_done or 0) >= MANY_STEPS

    # ------------------------------------------------------------------ sizes of the message

    @property
    def backend(self) -> str:
        return self.message.backend

    @property
    def on_mps(self) -> bool:
        return self.backend == "MPS"

    @property
    def on_xpu(self) -> bool:
        return self.backend == "XPU"

    @property
    def on_hip(self) -> bool:
        return self.backend == "HIP"

    @property
    def on_host(self) -> bool:
        return self.backend == "CPU"

    @cached_property
    def windows(self) -> bool:
        """Whether the log may be of Windows: by a path, or since it states the card's full size.

        Linux states some hundred MiB less than the GiB that a card is sold with.
        """
        whole = (self.message.capacity or GIB // 2) / GIB
        full = whole > 1.9 and abs(whole - round(whole)) < 0.02
        return self.names_windows or (full and not self.unix)

    @property
    def names_windows(self) -> bool:
        """Whether the log has a path or word of Windows or WSL."""
        return bool(_WINDOWS.search(self.log.text))

    @property
    def unix(self) -> bool:
        """Whether the log has a path of Linux or macOS."""
        return bool(_UNIX.search(self.log.text))

    @property
    def states_own(self) -> bool:
        """Whether the message states this process's own memory, by which others' is known.

        A message that was cut before it may list this process as if it were another one.
        """
        return self.message.allocated is not None or self.message.process is not None

    @property
    def whole(self) -> int:
        """The bytes that the process may use at most: of the card, or a limit. 0: not stated."""
        return self.message.capacity or self.message.allowed or 0

    @property
    def wrapped_size(self) -> bool:
        """Whether the request is a negative number that was read as an unsigned one."""
        wrapped = (self.message.requested or 0) >= 2**46 or "more than 1EB" in self.log.error
        return wrapped and not self.on_host

    @property
    def larger_than_card(self) -> bool:
        room = self.whole - min(CONTEXT_BYTES / 2, CONTEXT_SHARE * self.whole)
        return (self.message.requested or 0) > (room or LARGEST_CARD) and not self.on_host

    @property
    def more_free_than_card(self) -> bool:
        return (self.message.free or 0) > (self.message.capacity or 2**63)

    @property
    def much_free(self) -> bool:
        """Whether the driver refuses although much more than the request is free."""
        free, requested = self.message.free or 0, self.message.requested or 0
        enough = free >= 1.2 * requested and free > max(0.12 * self.whole, GIB / 2)
        return bool(requested) and enough

    @property
    def at_a_fraction(self) -> bool:
        """Whether the process holds a round share of the card, as with a memory fraction."""
        held = share(self.message.reserved_bytes or 0, self.message.capacity or 0)
        return 0.15 < held < 0.95 and abs(held * 20 - round(held * 20)) < 0.06

    @property
    def below_a_limit(self) -> bool:
        allowed, whole = self.message.allowed or 0, self.message.capacity or 0
        held = (self.message.reserved_bytes or 0) + (self.message.requested or 0)
        return bool(allowed and whole) and allowed < 0.9 * whole and held > 0.95 * allowed

    @property
    def little_held(self) -> bool:
        """Whether the request would fit beside all that this process holds."""
        held = (self.message.reserved_bytes or 0) + (self.message.requested or 0)
        return self.message.reserved_bytes is not None and 0 < held <= self.whole

    @property
    def spilled(self) -> bool:
        """Whether more is allocated than the card has, as only Windows' driver allows."""
        return (self.message.allocated or 0) > (self.message.capacity or 2**63)

    @property
    def engine_sleeps(self) -> bool:
        """Whether a sleeping engine's pools count as allocated, although they are on the host."""
        return self.spilled and "private pools" in self.log.text

    @cached_property
    def jax_found_no_room(self) -> str:
        """The line that shows that the card was full before JAX took its share, or ""."""
        match = _JAX_START.search(self.log.text)
        return match[0].strip() if match else ""

    @property
    def model_bits(self) -> float:
        """The bits for each weight of the named model that the card has room for. 0: not known."""
        return 8 * self.whole / self.log.model[1] if self.log.model else 0

    @property
    def too_large_in_4_bits(self) -> bool:
        return 0 < self.model_bits < 4

    @property
    def fills_card(self) -> bool:
        return share(self.message.allocated or 0, self.whole) > 0.85

    @property
    def small_request(self) -> bool:
        requested = self.message.requested or 0
        return requested <= SMALL_REQUEST * (self.message.allocated or 0)

    @cached_property
    def elsewhere(self) -> int:
        """Bytes of the card that are neither this process's nor free, its CUDA context subtracted.

        cudaMallocAsync's message states no reserved bytes: what is allocated is a lower bound.
        """
        message = self.message
        if self.on_mps or not message.capacity or self.spilled:
            return 0
        ours = message.process if message.process is not None else message.reserved_bytes
        if ours is None and message.free is not None and message.allocated is not None:
            rest = message.capacity - message.free - message.allocated
            return rest if rest > 0.5 * message.capacity else 0
        rest = (message.elsewhere or 0) - CONTEXT_BYTES * message.has_context
        named = sum(size for _, size in message.processes if size <= message.capacity)
        return max(0, rest, named)

    @property
    def others_large(self) -> bool:
        return share(self.elsewhere, self.message.capacity or 0) >= 0.25

    @property
    def others_some(self) -> bool:
        return share(self.elsewhere, self.message.capacity or 0) >= 0.1

    @property
    def others_like_a_desktop(self) -> bool:
        """Whether others hold no more than a desktop and CUDA's contexts may."""
        return self.elsewhere < 2 * GIB

    @cached_property
    def full_card(self) -> str:
        """The use of a card in a table of nvidia-smi, if almost all of it is used, or ""."""
        used = ((int(m[1]), int(m[2]), m[0]) for m in _NVIDIA_SMI.finditer(self.log.before))
        return next((text for held, whole, text in used if held > 0.9 * whole), "")

    @property
    def others_alike(self) -> bool:
        """Whether three or more processes hold about the same, or a container hides what."""
        sizes = [size for _, size in self.message.processes]
        return len(sizes) >= 3 and max(sizes) <= 1.5 * max(min(sizes), 1)

    @property
    def mps_other(self) -> bool:
        """Whether a fifth of what Metal allows is this process's, but no tensor's."""
        return share(self.message.other_allocations or 0, self.message.allowed or 0) > 0.2

    @property
    def unallocated_serves(self) -> bool:
        """Whether reserved but unallocated memory would hold the request in one piece."""
        unused, requested = self.message.free_reserved or 0, self.message.requested or 0
        wasted = share(unused, self.message.reserved_bytes or 0)
        least = 0.04 if requested >= LARGE_REQUEST and not self.ran_before else 0.1
        return bool(requested) and unused >= requested and wasted > least

    @property
    def unallocated_nearly_serves(self) -> bool:
        """Whether it would hold the request together with what is free on the card."""
        unused, free = self.message.free_reserved or 0, self.message.free or 0
        wasted = share(unused, self.message.reserved_bytes or 0)
        requested = self.message.requested or 0
        return bool(requested) and unused + free >= requested and wasted > 0.2

    # ------------------------------------------------------------------ shapes

    @cached_property
    def logits_product(self) -> str:
        """The product of printed sizes that equals the request, or ""."""
        vocabulary, requested = self.log.numbers.get("vocabulary"), self.message.requested
        tokens, batch = self._number("sequence"), self._number("batch") or 1
        if not requested or not vocabulary or not tokens:
            return self._compiled_logits
        for size, dtype in ((4, "float32"), (2, "16 bits")):
            for count in (tokens, tokens - 1):
                if abs(batch * count * vocabulary * size - requested) <= 0.01 * requested:
                    return f"{batch} × {count:,} tokens × {int(vocabulary):,} logits in {dtype}"
        return ""

    @property
    def _compiled_logits(self) -> str:
        """The shape of a compiled step's buffer if it is as wide as a vocabulary, or ""."""
        match = _BUFFER.search(self.log.line.source) if self.log.line else None
        requested = self.message.requested or 0
        if match is None or int(match[2]) < LEAST_VOCABULARY:
            return ""
        for size, dtype in ((4, "float32"), (2, "16 bits")):
            if abs(int(match[1]) * int(match[2]) * size - requested) <= 0.01 * requested:
                return f"a buffer of {int(match[1]):,} × {int(match[2]):,} in {dtype}"
        return ""

    @cached_property
    def scores_product(self) -> str:
        """Heads × tokens² as a product that equals the request, or ""."""
        tokens, batch = self._number("sequence"), self._number("batch") or 1
        if not tokens or tokens <= 256 or not self.message.requested:
            return ""
        for size, dtype in ((4, "float32"), (2, "16 bits")):
            heads = self.message.requested / (batch * tokens**2 * size)
            if round(heads) in range(1, MOST_HEADS) and abs(heads - round(heads)) < 0.01 * heads:
                return f"{batch} × {round(heads)} heads × {tokens:,}² scores in {dtype}"
        return ""

    # ------------------------------------------------------------------ words for evidence

    @property
    def words(self) -> dict[str, str]:
        """What a rule's evidence may quote; "" if the log does not say it."""
        message = self.message
        names = ("requested", "capacity", "free", "allocated", "allowed", "free_reserved")
        sizes = {name: getattr(message, name) for name in names}
        sizes |= {"whole": self.whole or None, "elsewhere": self.elsewhere or None}
        sizes |= {"other": message.other_allocations, "process": message.process}
        steps = self.log.steps_done
        model, weights = self.log.model if 0 < self.model_bits < 16 and self.log.model else ("", 0)
        node = _NODE.search(self.log.text)
        users = [(float(gb), name) for gb, name in _NODE_USER.findall(self.log.text)]
        return {
            **{name: format_bytes(n) if n is not None else "" for name, n in sizes.items()},
            "said": self.log.said,
            "place": str(self.log.line or ""),
            "asking": self._asking,
            "killed": format_bytes(self.killed_bytes) if self.killed_bytes else "",
            "last": str(self.log.lines[-1].frame) if self.log.lines else "",
            "phase": self.phase,
            "share": f"{share(self.elsewhere, message.capacity or 0):.0%}",
            "times": f"{(message.requested or 0) / self.whole:.1f}" if self.whole else "",
            "processes": message.others,
            "function": self.evaluation.name if self.evaluation else "",
            "gradients": self._gradients if self.evaluation else "",
            "steps": f"{steps:,}" if steps else "",
            "full_card": self.full_card,
            "logits": self.logits_product,
            "scores": self.scores_product,
            "tokens": f"{self._number('sequence') or 0:,}" if self.long_sequence else "",
            "batch": str(self._number("batch") or ""),
            "trained": "training ran before" if self.trained else "",
            "model": model,
            "weights": format_bytes(round(2 * weights)),
            "no_room": self.jax_found_no_room,
            "llama_buffer": self.llama_buffer,
            "copies": str(self.copies) if self.copies > 1 else "",
            "node": f"{node[1]} of {node[2]}" if node else "",
            "user": "{1} with {0:g} GB".format(*max(users)) if users else "",
        }

    @property
    def _asking(self) -> str:
        """The innermost line outside torch, which may be a library's."""
        outside = (line for line in reversed(self.log.lines) if not _TORCH.search(row_of(line)))
        return str(next(outside, ""))

    @property
    def _gradients(self) -> str:
        """Say that nothing disables gradients, and how far that was checked."""
        names = [f.filename.replace("\\", "/").rpartition("/")[2] for f in self.source_lines]
        if self.enables_grad:
            return f"no torch.no_grad() around these lines in {', '.join(dict.fromkeys(names))}"
        unseen = "a with statement would not show"
        differ = [name.replace("\\", "/").rpartition("/")[2] for name in changed(self.source_lines)]
        why = f"{unseen}, and {', '.join(differ)} differs from the traceback" if differ else unseen
        return f"no torch.no_grad() decorator in the traceback ({why})"


def row_of(line: Line) -> str:
    """Return a line of a traceback as rules read it."""
    return f"{line.frame.filename.replace(chr(92), '/')} {line.frame.name}: {line.source}"
