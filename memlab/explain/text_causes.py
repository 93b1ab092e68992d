"""One rule for each known cause, for an out-of-memory message and the log around it.

A text holds less than a snapshot: the sizes in the message, the failing line, the phase of the
step, and what the log printed. Where it cannot decide, two causes get similar confidence, and the
report says what to record next.
"""

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

from memlab.explain import advice
from memlab.explain.findings import CONTEXT_BYTES, Finding, finding, ranked, with_advice
from memlab.explain.frames import (
    Frame,
    collecting_frame,
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

TextRule = Callable[["TextSituation"], Finding | None]

MANY_STEPS = 20  # after these, what every step needs has been shown to fit
LONG, VERY_LONG = 2048, 4096  # tokens
LARGE_BATCH, SMALL_BATCH = 32, 4
DEEP = 12  # layers
MOST_HEADS = 512
LEAST_VOCABULARY = 8192  # columns: wider than layers are
CONTEXT_SHARE = 0.05  # of a card: what a CUDA context takes at least
READ = 0.94  # confidence in what the user's files show: above that in a line or a size
LIMIT_SHARE = 0.9  # of the card: a smaller limit of the process is worth naming
# No pattern repeats anything without a bound; see messages.
_LOGITS = re.compile(
    r"cross_entropy|CrossEntropy|log_softmax|nll_loss|lm_head|logits|vocab|unembed|loss_f(n|unction)"
)
_SCORES = re.compile(
    r"attn_w|attn_scores|attention_scores|attention_probs|\bscores?\b|\batt\b|attn_prob|baddbmm"
    r"|\b(q|query|query_states|query_layer|xq)[ \t]{0,4}(@|,[ \t]{0,4}k)|masked_fill"
    r"|attn[ \t]{0,4}=|bmm\(q|einsum\([^)]{0,60}(qk|bhqk|bhij|bhtt|q[^)]{0,60}k)"
)
_ATTENTION_PLACE = re.compile(r"attn|attention", re.IGNORECASE)
_CACHE = re.compile(r"past_key|key_cache|value_cache|kv_cache|k_cache|v_cache|\bcache\b|\bpast\b")
_LAYER_CALL = re.compile(
    r"\b(layer|block|blk|decoder_layer|encoder_layer|layer_module|module|mod|resblock|stage)"
    r"(_\w{1,40}|\[\w{1,40}\])?\(|self\.(layers|blocks|h|layer|encoder|decoder|transformer)\b"
)
_MODEL_CALL = re.compile(r"\b(model|net|network|criterion|loss_fn|loss_func|forward)\(")
_LOADS = re.compile(r"\bmodel\w{0,40}\.(to|cuda)\(|\bfrom_pretrained\(|\.(load_)?state_dict\(")
_CONVOLUTION = re.compile(r"conv\d?d?|batchnorm|batch_norm|resnet|unet|vgg|pool", re.IGNORECASE)
_NO_CHECKPOINTING = re.compile(
    r"(?i)(gradient|activation)[_ ]?checkpointing['\"]?[ \t]{0,4}[=:][ \t]{0,4}"
    r"(false|off|0|no|none)"
)
_CHECKPOINTING = re.compile(
    r"(?i)(gradient|activation)[_ ]?checkpointing['\"]?[ \t]{0,4}([=:][ \t]{0,4}|is )?"
    r"(true|on\b|1|yes|enabled)"
)
_KEPT_LOSS = re.compile(
    r"retain_graph[ \t]{0,4}=[ \t]{0,4}True"
    r"|(losses|history|outputs|all_\w{1,40})\.append\((?!.{0,200}(item|detach|float\())"
    r"|\b(total|running|epoch|sum|avg|train)\w{0,40}loss[ \t]{0,4}\+=[ \t]{0,4}"
    r"(?!.{0,200}(item|detach|float\())\w{0,40}loss"
)
_PRINTED_GRAPH = re.compile(r"tensor\([^()\n]{0,200}grad_fn=<\w{1,60}>\)")
_TOO_LONG = re.compile(r"Token indices sequence length is longer|exceeds? the (model|maximum)")
_BUFFER = re.compile(r"empty_strided\w{0,10}\(\((\d{1,12}), (\d{1,12})\)")  # of Inductor's code


@dataclass(frozen=True)
class TextSituation:
    """What a log says about the moment when memory ran out."""

    log: Log

    @property
    def message(self) -> Message:
        return self.log.message

    @cached_property
    def stack(self) -> tuple[Frame, ...]:
        """The traceback's frames, innermost first as in a snapshot."""
        return tuple(line.frame for line in reversed(self.log.lines))

    @cached_property
    def sources(self) -> str:
        """The source lines of the traceback."""
        return "\n".join(line.source for line in self.log.lines)

    @cached_property
    def inner_sources(self) -> str:
        """The source lines around the failing operator: the user's last one, and all below."""
        return "\n".join(line.source for line in self.log.inner_lines)

    def matching(self, pattern: re.Pattern[str]) -> Line | None:
        """Return the innermost line whose source matches."""
        return next((x for x in reversed(self.log.lines) if pattern.search(x.source)), None)

    def line_of(self, frame: Frame) -> Line | Frame:
        """Return a frame's line of the traceback."""
        return next((line for line in reversed(self.log.lines) if line.frame == frame), frame)

    @cached_property
    def phase(self) -> str:
        """setup, forward, backward, optimizer, other, or "" without a traceback."""
        if in_optimizer(self.stack) or re.search(r"\boptim\w{0,40}\.step\(", self.inner_sources):
            return "optimizer"
        names = {frame.name.rpartition(".")[2] for frame in self.stack}
        if names & {"_engine_run_backward", "run_backward"} or ".backward(" in self.sources:
            return "backward"
        if in_forward(self.stack):
            return "forward"
        if in_setup(self.stack) or _LOADS.search(self.inner_sources):
            return "setup"
        if names & {"_call_impl", "_wrapped_call_impl"} or _MODEL_CALL.search(self.inner_sources):
            return "forward"
        return "other" if self.log.lines else ""

    @cached_property
    def evaluation(self) -> Frame | None:
        """The function that evaluates. One that calls backward, as an attack does, trains."""
        found = None if self.phase in ("backward", "optimizer") else evaluation_frame(self.stack)
        read = unchanged(self.source_lines)
        start = next((n for n, line in enumerate(read) if line[:3] == found), len(read))
        return None if calls_backward(read[start:]) else found

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
    def generation(self) -> Frame | None:
        """The function that generates text. A function called decode needs a cache beside it."""
        if self.phase in ("backward", "optimizer"):
            return None
        caches = self.grows_cache or _CACHE.search(self.inner_sources)
        return generation_frame(self.stack) or (decoding_frame(self.stack) if caches else None)

    @cached_property
    def grows_cache(self) -> bool:
        """Whether the failing lines are a library's cache of keys and values."""
        return any("cache_utils" in frame.filename for frame in self.stack)

    @cached_property
    def disables_grad(self) -> bool:
        return disables_grad(self.stack) or gradients(self.source_lines) is False

    @cached_property
    def recomputes(self) -> bool:
        return in_recompute(self.stack) or bool(_CHECKPOINTING.search(self.log.text))

    @cached_property
    def batch(self) -> int | None:
        return self._number("batch")

    @cached_property
    def tokens(self) -> int | None:
        return self._number("sequence")

    @cached_property
    def depth(self) -> int | None:
        return self._number("layers")

    def _number(self, name: str) -> int | None:
        number = self.log.numbers.get(name)
        return int(number) if number else None

    @cached_property
    def layer_line(self) -> Line | None:
        """The innermost line that calls a layer of a stack of layers."""
        return self.matching(_LAYER_CALL) if self.phase in ("forward", "backward") else None

    @cached_property
    def convolves(self) -> bool:
        places = " ".join(f"{frame.filename} {frame.name}" for frame in self.stack)
        return bool(_CONVOLUTION.search(self.sources) or _CONVOLUTION.search(places))

    @cached_property
    def growing(self) -> list[int]:
        """The printed memory, if it grew in most steps; else empty."""
        levels = self.log.memory_by_step
        rises = sum(after > before for before, after in pairwise(levels))
        falls = sum(after < before for before, after in pairwise(levels))
        grew = len(levels) >= 3 and levels[-1] > 1.15 * levels[0] and falls <= 0.2 * rises
        recent = len(levels) < 4 or levels[-1] > levels[len(levels) // 2]
        return levels if grew and recent else []

    @cached_property
    def ran_before(self) -> bool:
        """Whether many steps of the same kind were completed."""
        return (self.log.steps_done or 0) >= MANY_STEPS

    @cached_property
    def weight(self) -> float:
        """How much the failing line says: a small request is only the last of many."""
        portion = share(self.message.requested or 0, self.message.allocated or 0)
        return 1 if portion > 0.03 or not portion else 0.85 if portion > 0.01 else 0.6

    @property
    def place(self) -> str:
        return str(self.log.line) if self.log.line else "no traceback"


def text_findings(situation: TextSituation) -> tuple[Finding, ...]:
    """Return the causes with evidence, the most confident first."""
    found = [each for each in (rule(situation) for rule in RULES) if each is not None]
    infers = situation.disables_grad or bool(situation.evaluation) or situation.phase == "setup"
    return ranked([advice.for_log(each, situation.log, infers=infers) for each in found])


def weights(s: TextSituation) -> Finding | None:
    """The traceback builds, moves, loads or saves a model, and no step runs."""
    if s.phase != "setup":
        return None
    message = s.message
    needed = (message.allocated or 0) + (message.requested or 0)
    filled = min(1.0, share(needed, message.capacity or message.allowed or 0))
    found = finding(
        "weights",
        0.55 + 0.35 * filled,
        f"memory ran out while a model was built, moved, loaded or saved: {s.place}",
        f"{format_bytes(message.allocated)} were allocated before" if message.allocated else "",
    )
    if any("state_dict" in frame.name for frame in s.stack):
        return with_advice(
            found,
            "Save shards instead of the whole model: StateDictType.SHARDED_STATE_DICT, or "
            "torch.distributed.checkpoint.",
            "Gather the weights on the CPU: offload_to_cpu=True.",
        )
    return found


def large_request(s: TextSituation) -> Finding | None:
    """The request is larger than the card, so no remedy that frees memory can help."""
    message = s.message
    whole, requested = message.capacity or message.allowed, message.requested
    if not whole or not requested:
        return None
    if requested <= whole - min(CONTEXT_BYTES / 2, CONTEXT_SHARE * whole):
        return None
    return finding(
        "request",
        0.9,
        f"the request of {format_bytes(requested)} is {requested / whole:.1f} times the card's "
        f"{format_bytes(whole)}; it would not fit on an empty card",
        f"the line that asks for it: {s.place}" if s.log.line else "",
    )


def limit(s: TextSituation) -> Finding | None:
    """The driver has enough free memory, and yet the request was refused."""
    message = s.message
    if message.free is None or not message.requested or message.free < message.requested:
        return None
    if message.allowed is None or message.capacity is None:
        return finding(
            "limit",
            0.3,
            _enough_free(message),
            "a memory limit would explain it, or free memory in several pieces",
        )
    if message.allowed > LIMIT_SHARE * message.capacity:
        return None
    return finding(
        "limit",
        0.95,
        f"this process is allowed {format_bytes(message.allowed)} of the card's "
        f"{format_bytes(message.capacity)}",
        _enough_free(message),
    )


def _enough_free(message: Message) -> str:
    return (
        f"{format_bytes(message.free or 0)} are free on the card, and the request of "
        f"{format_bytes(message.requested or 0)} was refused"
    )


def predictions(s: TextSituation) -> Finding | None:
    """An evaluation joins the outputs of its batches on the GPU."""
    collecting = collecting_frame(s.stack)
    evaluates = s.evaluation or framework_without_grad(s.stack)
    if collecting is None or evaluates is None:
        return None
    return finding(
        "predictions",
        0.9,
        f"memory ran out where {evaluates.name}() joins the outputs of its batches: "
        f"{s.line_of(collecting)}",
    )


def optimizer_state(s: TextSituation) -> Finding | None:
    """The traceback ends in the optimizer, most often where it makes its state."""
    if s.phase != "optimizer":
        return None
    makes = makes_state(s.stack) or "zeros_like" in s.inner_sources
    steps = s.log.steps_done or 0
    strength = (0.95 if makes else 0.75) * (0.7 if steps > 2 and not makes else 1)
    return finding(
        "optimizer-state",
        strength,
        f"the traceback ends in the optimizer's step: {s.stack[0]}",
        "that line creates the state, which only the first step does" if makes else "",
        f"{format_bytes(s.message.allocated)} were allocated before" if s.message.allocated else "",
    )


def no_grad(s: TextSituation) -> Finding | None:
    """The traceback passes a function that evaluates, and nothing in it disables gradients.

    The name alone is weak evidence. That training ran before, and so fitted, makes it stronger. The
    user's files, if they are here, decide.
    """
    if s.evaluation is None or s.disables_grad:
        return None
    is_generation = s.generation is not None or bool(_CACHE.search(s.inner_sources))
    trained = s.log.trained
    guess = 0.35 if is_generation else 0.82 if trained else 0.6
    return finding(
        "no-grad",
        READ if s.enables_grad and s.phase == "forward" else guess,
        f"memory ran out in {s.evaluation.name}(): {s.line_of(s.evaluation)}",
        "the log shows that training ran before, so a training step fits" if trained else "",
        _nothing_disables_grad(s),
        f"printed memory grew from {format_bytes(s.growing[0])} to {format_bytes(s.growing[-1])}"
        if s.growing
        else "",
    )


def _nothing_disables_grad(s: TextSituation) -> str:
    """Say that nothing disables gradients, and how far that was checked."""
    if s.enables_grad:
        files = _names(dict.fromkeys(line.filename for line in s.source_lines), "has", "have")
        return f"{files} no torch.no_grad() or torch.inference_mode() around these lines"
    here = changed(s.source_lines)
    unseen = "a with statement would not show in it"
    why = (
        f"{unseen}, and {_names(here, 'differs', 'differ')} from the traceback" if here else unseen
    )
    return f"no torch.no_grad() decorator in the traceback ({why})"


def _names(paths: Iterable[str], one: str, several: str) -> str:
    """Return the names of files and a verb that fits their number."""
    names = [path.replace("\\", "/").rpartition("/")[2] for path in paths]
    return f"{', '.join(names)} {one if len(names) == 1 else several}"


def kv_cache(s: TextSituation) -> Finding | None:
    """The traceback passes a generating function, or concatenates keys and values."""
    joins = re.compile(r"\bcat\(")
    line = s.matching(joins) if joins.search(s.inner_sources) else None
    keys = re.compile(rf"{_CACHE.pattern}|\b[kv]\b")
    concatenates = line is not None and bool(keys.search(line.source))
    if not (s.generation or concatenates or s.grows_cache):
        return None
    training = s.phase in ("backward", "optimizer")
    strength = 0.6 * bool(s.generation) + 0.35 * (concatenates or s.grows_cache)
    return finding(
        "kv-cache",
        max(0.6, strength + 0.15 * (concatenates or s.grows_cache)) * (0.3 if training else 1)
        + 0.1 * bool(s.growing),
        f"memory ran out in {s.generation.name}()" if s.generation else "",
        f"the failing line concatenates keys or values: {line}" if concatenates else "",
        "the traceback passes transformers' cache_utils" if s.grows_cache else "",
    )


def kept_graphs(s: TextSituation) -> Finding | None:
    """Printed memory grew from step to step, or many steps ran before this one failed."""
    training = not (s.evaluation or s.generation)
    kept = _KEPT_LOSS.search(s.log.text) or _PRINTED_GRAPH.search(s.log.text)
    if s.growing:
        first, last = s.growing[0], s.growing[-1]
        return finding(
            "kept-graphs",
            0.88 if training else 0.45,
            f"printed memory grew in {len(s.growing)} lines of the log, from "
            f"{format_bytes(first)} to {format_bytes(last)}",
            f"the log shows code that keeps graphs: {kept.group(0).strip()}" if kept else "",
        )
    if kept and training:
        sentence = f"the log shows code that keeps graphs: {kept.group(0).strip()}"
        return finding("kept-graphs", 0.72, sentence)
    if s.ran_before and training and s.phase not in ("optimizer", "setup"):
        return finding(
            "kept-graphs",
            0.42,
            f"{s.log.steps_done:,} steps ran before, so memory grew or this batch was larger",
        )
    return None


def logits(s: TextSituation) -> Finding | None:
    """The failing line computes the logits or their loss, or the request has their size."""
    if s.phase in ("optimizer", "setup") or collecting_frame(s.stack):
        return None
    product = _logits_product(s)
    line = s.matching(_LOGITS) if _LOGITS.search(s.inner_sources) else None
    function = bool(s.stack) and _LOGITS.search(s.stack[0].name)
    named = line or (s.line_of(s.stack[0]) if function else None)
    if not product and (not named or s.phase == "backward"):
        return None
    size = format_bytes(s.message.requested or 0)
    return finding(
        "logits",
        (0.93 if product and named else 0.85 if product else 0.8) * s.weight,
        f"the refused request of {size} is {product}" if product else "",
        f"the failing line works on logits: {named}" if named else "",
    )


def _logits_product(s: TextSituation) -> str:
    """Return the product of printed sizes that equals the request, or ""."""
    vocabulary, requested = s.log.numbers.get("vocabulary"), s.message.requested
    if not requested:
        return ""
    if not vocabulary or not s.tokens:
        return _compiled_logits(s, requested)
    for size, dtype in ((4, "float32"), (2, "16 bits")):
        for tokens in (s.tokens, s.tokens - 1):
            product = (s.batch or 1) * tokens * vocabulary * size
            if abs(product - requested) <= 0.01 * requested:
                return f"{s.batch or 1} × {tokens:,} tokens × {int(vocabulary):,} logits in {dtype}"
    return ""


def _compiled_logits(s: TextSituation, requested: int) -> str:
    """Return the shape of a compiled step's buffer if it is as wide as a vocabulary, or ""."""
    line = s.log.line
    match = _BUFFER.search(line.source) if line else None
    if match is None or int(match[2]) < LEAST_VOCABULARY:
        return ""
    for size, dtype in ((4, "float32"), (2, "16 bits")):
        if abs(int(match[1]) * int(match[2]) * size - requested) <= 0.01 * requested:
            return f"a buffer of {int(match[1]):,} × {int(match[2]):,} in {dtype}"
    return ""


def sequence(s: TextSituation) -> Finding | None:
    """The failing line computes attention scores, or the request has their size."""
    if s.phase in ("optimizer", "setup"):
        return None
    product = _scores_product(s)
    inner = s.inner_sources
    attention = any(_ATTENTION_PLACE.search(f"{f.filename} {f.name}") for f in s.stack[:3])
    line = s.matching(_SCORES) if _SCORES.search(inner) else None
    if line is None and attention and "softmax" in inner:
        line = s.matching(re.compile("softmax"))
    if "scaled_dot_product" in inner:  # which stores no scores
        line = None
    warned = bool(_TOO_LONG.search(s.log.text))
    long = (s.tokens or 0) >= LONG and (s.batch is None or s.batch <= SMALL_BATCH)
    strength = max(
        0.92 * bool(product and (line or attention)),
        0.8 * bool(line and not _LOGITS.search(inner)),
        0.5 * bool(product and (s.tokens or 0) > 256),
        0.55 * warned,
        (0.62 if (s.tokens or 0) >= VERY_LONG else 0.5) * long,
    )
    if not strength:
        return None
    return finding(
        "sequence",
        strength * s.weight,
        f"the refused request of {format_bytes(s.message.requested or 0)} is {product}"
        if product
        else "",
        f"the failing line computes attention scores: {line}" if line else "",
        "the tokenizer warned of a sequence longer than the model's maximum" if warned else "",
        f"the log prints {s.tokens:,} tokens per sequence" if s.tokens else "",
    )


def _scores_product(s: TextSituation) -> str:
    """Return heads × tokens² as a product that equals the request, or ""."""
    if not s.tokens or not s.message.requested:
        return ""
    for size, dtype in ((4, "float32"), (2, "16 bits")):
        heads = s.message.requested / ((s.batch or 1) * s.tokens**2 * size)
        if round(heads) in range(1, MOST_HEADS) and abs(heads - round(heads)) < 0.01 * heads:
            return f"{s.batch or 1} × {round(heads)} heads × {s.tokens:,}² scores in {dtype}"
    return ""


def no_checkpointing(s: TextSituation) -> Finding | None:
    """Forward or backward of a stack of layers, none of them recomputed.

    An evaluation needs no activations, so recomputing them is no remedy for it.
    """
    if s.phase not in ("forward", "backward") or s.recomputes:
        return None
    if s.disables_grad or s.evaluation:
        return None
    off = bool(_NO_CHECKPOINTING.search(s.log.text))
    deep, small = (s.depth or 0) >= DEEP, s.batch is not None and s.batch <= SMALL_BATCH
    strength = 0.38 + 0.17 * bool(s.layer_line) + 0.2 * off + 0.17 * deep + 0.12 * small
    return finding(
        "no-checkpointing",
        _static(s, strength - 0.2 * s.convolves),
        f"memory ran out in {s.phase}, and no frame belongs to activation checkpointing",
        f"this line calls a layer: {s.layer_line}" if s.layer_line else "",
        "the log says that checkpointing is off" if off else "",
        f"the log prints {s.depth} layers" if s.depth else "",
    )


def batch(s: TextSituation) -> Finding | None:
    """Forward or backward with a large batch, or nothing more specific."""
    if s.phase in ("optimizer", "setup"):
        return None
    large = (s.batch or 0) >= LARGE_BATCH
    small = s.batch is not None and s.batch <= SMALL_BATCH
    runs = s.phase in ("forward", "backward")
    strength = (0.48 if runs else 0.3) + 0.3 * large - 0.3 * small + 0.17 * s.convolves
    where = f"memory ran out in {s.phase}: {s.place}" if runs else f"memory ran out at {s.place}"
    return finding(
        "batch",
        _static(s, strength),
        where if s.log.lines else "there is no traceback; this is the most common cause",
        f"the log prints a batch of {s.batch}" if s.batch else "",
    )


def _static(s: TextSituation, strength: float) -> float:
    """Lower the confidence in what every step needs, if memory grew or many steps ran."""
    return strength * (0.5 if s.growing else 0.75 if s.ran_before else 1)


def fragmentation(s: TextSituation) -> Finding | None:
    """The request would fit into reserved but unallocated memory, plus the card's free memory.

    The allocator returned all unused segments to the driver before it gave up, so the rest lies in
    partly used segments.
    """
    message = s.message
    free, requested = message.free_reserved, message.requested
    if requested and message.allowed is None and requested <= (message.free or 0):
        found = finding(
            "fragmentation",
            0.45,
            f"{_enough_free(message)}: the free memory may be in several pieces",
        )
        return with_advice(
            found,
            "Restart the program, and update torch and the driver: old versions can fail so.",
        )
    reserved = message.reserved_bytes
    if not free or not requested or not reserved:
        return None
    wasted = share(free, reserved)
    strength = 2 * wasted + 0.15 * (free >= 2 * requested and wasted > 0.1)
    strength *= 0.6 if kv_cache(s) else 1  # a growing cache leaves its old blocks behind
    if free < requested:
        together = free + (message.free or 0)
        if message.allowed is not None or together < requested:
            return None
        return finding(
            "fragmentation",
            strength,
            f"{format_bytes(free)} are reserved but unallocated ({wasted:.0%} of reserved); with "
            f"the card's free {format_bytes(message.free or 0)} they would hold the request of "
            f"{format_bytes(requested)}",
        )
    return finding(
        "fragmentation",
        strength,
        f"{format_bytes(free)} are reserved but unallocated ({wasted:.0%} of reserved), more than "
        f"the request of {format_bytes(requested)}: no free block is large enough",
    )


def other_process(s: TextSituation) -> Finding | None:
    """Much of the card belongs neither to this process nor to its CUDA context."""
    message = s.message
    whole = message.capacity or message.allowed
    if not whole:
        return None
    if message.free is not None and message.free >= (message.requested or whole):
        return None  # the request failed for another reason
    if message.requested and message.requested > whole:
        return None
    named = [(pid, size) for pid, size in message.processes if size <= whole]
    elsewhere = max(sum(size for _, size in named), _elsewhere(message))
    if share(elsewhere, whole) < 0.05:
        return None
    ours = message.process or message.reserved_bytes
    found = finding(
        "other-process",
        0.35 + 1.3 * share(elsewhere, whole) + 0.2 * bool(named),
        f"{format_bytes(elsewhere)} of {format_bytes(whole)} ({share(elsewhere, whole):.0%}) "
        f"are used outside this process",
        *(f"process {pid} has {format_bytes(size)}" for pid, size in named),
        f"this process has {format_bytes(ours)}" if ours else "",
        "this process is a worker of a DataLoader; the training that started it is another process"
        if in_worker(s.stack)
        else "",
    )
    if in_worker(s.stack):
        return with_advice(
            found,
            "Return CPU tensors from the dataset, and move the batch to the GPU in the training "
            "loop: each worker that uses CUDA needs a context of its own.",
            "If the workers must use CUDA, set num_workers=0 or make the batch of the training "
            "smaller.",
        )
    return found


def _elsewhere(message: Message) -> int:
    """Return the bytes used outside this process, its own CUDA context subtracted."""
    elsewhere = message.elsewhere or 0
    return max(0, elsewhere - CONTEXT_BYTES) if message.has_context else elsewhere


RULES: tuple[TextRule, ...] = (
    *(large_request, limit, weights, predictions),
    *(optimizer_state, no_grad, kv_cache, kept_graphs, logits),
    *(sequence, no_checkpointing, batch, fragmentation, other_process),
)
