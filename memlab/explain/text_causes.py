"""One rule for each known cause, for an out-of-memory message and the log around it.

A text holds less than a snapshot: the sizes in the message, the failing line, the phase of the
step, and what the log printed. Where it cannot decide, two causes get similar confidence, and the
report says what to record next.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

from memlab.explain.causes import CONTEXT_BYTES
from memlab.explain.findings import Finding, finding, ranked
from memlab.explain.frames import (
    Frame,
    disables_grad,
    evaluation_frame,
    generation_frame,
    in_optimizer,
    in_recompute,
    makes_state,
)
from memlab.explain.histories import share
from memlab.explain.messages import Log, Message
from memlab.units import format_bytes

TextRule = Callable[["TextSituation"], Finding | None]

MANY_STEPS = 20  # after these, what every step needs has been shown to fit
LONG, VERY_LONG = 2048, 4096  # tokens
LARGE_BATCH, SMALL_BATCH = 32, 4
DEEP = 12  # layers
MOST_HEADS = 512
_LOGITS = re.compile(
    r"cross_entropy|CrossEntropy|log_softmax|nll_loss|lm_head|logits|vocab|unembed|loss_f(n|unction)"
)
_SCORES = re.compile(
    r"attn_w|attn_scores|attention_scores|attention_probs|\bscores?\b|\batt\b|attn_prob|baddbmm"
    r"|\b(q|query|query_states|query_layer|xq)\s*(@|,\s*k)|masked_fill|attn\s*=|bmm\(q"
    r"|einsum\([^)]*(qk|bhqk|bhij|bhtt|q.*k)"
)
_ATTENTION_PLACE = re.compile(r"attn|attention", re.IGNORECASE)
_CACHE = re.compile(r"past_key|key_cache|value_cache|kv_cache|k_cache|v_cache|\bcache\b|\bpast\b")
_LAYER_CALL = re.compile(
    r"\b(layer|block|blk|decoder_layer|encoder_layer|layer_module|module|mod|resblock|stage)"
    r"(_\w+|\[\w+\])?\(|self\.(layers|blocks|h|layer|encoder|decoder|transformer)\b"
)
_CONVOLUTION = re.compile(r"conv\d?d?|batchnorm|batch_norm|resnet|unet|vgg|pool", re.IGNORECASE)
_NO_CHECKPOINTING = re.compile(
    r"(?i)(gradient|activation)_?[ ]?checkpointing['\"]?\s*[=:]\s*(false|off|0|no|none)"
)
_CHECKPOINTING = re.compile(
    r"(?i)(gradient|activation)_?[ ]?checkpointing['\"]?\s*[=:]\s*(true|on|1|yes)"
)
_KEPT_LOSS = re.compile(
    r"retain_graph\s*=\s*True|(losses|history|outputs|all_\w+)\.append\((?!.*(item|detach|float\())"
    r"|\b(total|running|epoch|sum|avg|train)\w*loss\s*\+=\s*(?!.*(item|detach|float\())\w*loss"
)
_PRINTED_GRAPH = re.compile(r"[\w ]*[:= ]\s*tensor\([^()\n]*grad_fn=<\w+>\)")
_TOO_LONG = re.compile(r"Token indices sequence length is longer|exceeds? the (model|maximum)")


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
        rows = list(self.log.lines)
        user = [n for n, line in enumerate(rows) if line in self.log.user_lines]
        return "\n".join(line.source for line in rows[user[-1] if user else -2 :])

    @cached_property
    def phase(self) -> str:
        if in_optimizer(self.stack) or re.search(r"\boptim\w*\.step\(", self.inner_sources):
            return "optimizer"
        names = {frame.name for frame in self.stack}
        if names & {"_engine_run_backward", "run_backward"} or ".backward(" in self.sources:
            return "backward"
        return "forward" if self.log.lines else ""

    @cached_property
    def evaluation(self) -> Frame | None:
        return None if self.phase in ("backward", "optimizer") else evaluation_frame(self.stack)

    @cached_property
    def generation(self) -> Frame | None:
        return None if self.phase in ("backward", "optimizer") else generation_frame(self.stack)

    @cached_property
    def disables_grad(self) -> bool:
        return disables_grad(self.stack)

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
    def has_layers(self) -> bool:
        return bool(_LAYER_CALL.search(self.sources))

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
        line = self.log.line
        return f"{line.frame}: {line.source}" if line else "no traceback"


def text_findings(situation: TextSituation) -> tuple[Finding, ...]:
    """Return the causes with evidence, the most confident first."""
    found = [rule(situation) for rule in RULES]
    return ranked([each for each in found if each is not None])


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
    """The traceback passes a function that evaluates, and no decorator disables gradients."""
    if s.evaluation is None or s.disables_grad:
        return None
    is_generation = s.generation is not None or bool(_CACHE.search(s.inner_sources))
    return finding(
        "no-grad",
        0.35 if is_generation else 0.82,
        f"memory ran out in {s.evaluation.name}(), after training fit",
        "no torch.no_grad() decorator in the traceback (a with statement would not show in it)",
        f"printed memory grew from {format_bytes(s.growing[0])} to {format_bytes(s.growing[-1])}"
        if s.growing
        else "",
    )


def kv_cache(s: TextSituation) -> Finding | None:
    """The traceback passes a generating function, or concatenates keys and values."""
    inner = s.inner_sources
    concatenates = "cat(" in inner and bool(_CACHE.search(inner) or re.search(r"\b[kv]\b", inner))
    library = any("cache_utils" in frame.filename for frame in s.stack)
    if not (s.generation or concatenates or library):
        return None
    training = s.phase in ("backward", "optimizer")
    strength = 0.6 * bool(s.generation) + 0.35 * (concatenates or library)
    return finding(
        "kv-cache",
        max(0.6, strength + 0.15 * (concatenates or library)) * (0.3 if training else 1)
        + 0.1 * bool(s.growing),
        f"memory ran out in {s.generation.name}()" if s.generation else "",
        f"the failing line concatenates keys or values: {s.place}" if concatenates else "",
        "the traceback passes transformers' cache_utils" if library else "",
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
            f"the log has what keeps graphs: {kept.group(0).strip()}" if kept else "",
        )
    if kept and training:
        sentence = f"the log has what keeps graphs: {kept.group(0).strip()}"
        return finding("kept-graphs", 0.72, sentence)
    if s.ran_before and training and s.phase != "optimizer":
        return finding(
            "kept-graphs",
            0.42,
            f"{s.log.steps_done:,} steps ran before, so memory grew or this batch was larger",
        )
    return None


def logits(s: TextSituation) -> Finding | None:
    """The failing line computes the logits or their loss, or the request has their size."""
    if s.phase == "optimizer":
        return None
    product = _logits_product(s)
    named = _LOGITS.search(s.inner_sources) or _LOGITS.search(s.stack[0].name if s.stack else "")
    if not product and (not named or s.phase == "backward"):
        return None
    size = format_bytes(s.message.requested or 0)
    return finding(
        "logits",
        (0.93 if product and named else 0.85 if product else 0.8) * s.weight,
        f"the refused request of {size} is {product}" if product else "",
        f"the failing line works on logits: {s.place}" if named else "",
    )


def _logits_product(s: TextSituation) -> str:
    """Return the product of printed sizes that equals the request, or ""."""
    vocabulary, requested = s.log.numbers.get("vocabulary"), s.message.requested
    if not vocabulary or not requested or not s.tokens:
        return ""
    for size, dtype in ((4, "float32"), (2, "16 bits")):
        for tokens in (s.tokens, s.tokens - 1):
            product = (s.batch or 1) * tokens * vocabulary * size
            if abs(product - requested) <= 0.01 * requested:
                return f"{s.batch or 1} × {tokens:,} tokens × {int(vocabulary):,} logits in {dtype}"
    return ""


def sequence(s: TextSituation) -> Finding | None:
    """The failing line computes attention scores, or the request has their size."""
    if s.phase == "optimizer":
        return None
    product = _scores_product(s)
    inner = s.inner_sources
    attention = any(_ATTENTION_PLACE.search(f"{f.filename} {f.name}") for f in s.stack[:3])
    named = bool(_SCORES.search(inner)) or (attention and "softmax" in inner)
    named = named and "scaled_dot_product" not in inner  # which stores no scores
    warned = bool(_TOO_LONG.search(s.log.text))
    long = (s.tokens or 0) >= LONG and (s.batch is None or s.batch <= SMALL_BATCH)
    strength = max(
        0.92 * bool(product and (named or attention)),
        0.8 * (named and not _LOGITS.search(inner)),
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
        f"the failing line computes attention scores: {s.place}" if named else "",
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
    """Forward or backward of a stack of layers, none of them recomputed."""
    if s.phase not in ("forward", "backward") or s.recomputes or s.disables_grad:
        return None
    off = bool(_NO_CHECKPOINTING.search(s.log.text))
    deep, small = (s.depth or 0) >= DEEP, s.batch is not None and s.batch <= SMALL_BATCH
    strength = 0.38 + 0.17 * s.has_layers + 0.2 * off + 0.17 * deep + 0.12 * small
    return finding(
        "no-checkpointing",
        _static(s, strength - 0.2 * s.convolves),
        f"memory ran out in {s.phase}, and no frame belongs to activation checkpointing",
        f"the failing line is in a stack of layers: {s.place}" if s.has_layers else "",
        "the log says that checkpointing is off" if off else "",
        f"the log prints {s.depth} layers" if s.depth else "",
    )


def batch(s: TextSituation) -> Finding | None:
    """Forward or backward with a large batch, or nothing more specific."""
    if s.phase not in ("forward", "backward", ""):
        return None
    large = (s.batch or 0) >= LARGE_BATCH
    small = s.batch is not None and s.batch <= SMALL_BATCH
    strength = (0.48 if s.phase else 0.3) + 0.3 * large - 0.3 * small + 0.17 * s.convolves
    return finding(
        "batch",
        _static(s, strength),
        f"memory ran out in {s.phase}: {s.place}"
        if s.phase
        else "without a traceback, the sizes alone show no other cause",
        f"the log prints a batch of {s.batch}" if s.batch else "",
    )


def _static(s: TextSituation, strength: float) -> float:
    """Lower the confidence in what every step needs, if memory grew or many steps ran."""
    return strength * (0.5 if s.growing else 0.75 if s.ran_before else 1)


def fragmentation(s: TextSituation) -> Finding | None:
    """More bytes are reserved but unallocated than the request asks for."""
    free, requested, reserved = (
        s.message.free_reserved,
        s.message.requested,
        s.message.reserved_bytes,
    )
    if not free or not requested or not reserved or free < requested:
        return None
    wasted = share(free, reserved)
    strength = 2 * wasted + 0.15 * (free >= 2 * requested and wasted > 0.1)
    return finding(
        "fragmentation",
        strength * (0.6 if kv_cache(s) else 1),  # a growing cache leaves its old blocks behind
        f"{format_bytes(free)} are reserved but unallocated ({wasted:.0%} of reserved), more than "
        f"the request of {format_bytes(requested)}: no free block is large enough",
    )


def other_process(s: TextSituation) -> Finding | None:
    """Much of the card belongs neither to this process nor to its CUDA context."""
    message = s.message
    whole = message.capacity or message.allowed
    if not whole:
        return None
    named = [(pid, size) for pid, size in message.processes if size <= whole]
    elsewhere = max(sum(size for _, size in named), _elsewhere(message))
    if share(elsewhere, whole) < 0.05:
        return None
    ours = message.process or message.reserved_bytes
    return finding(
        "other-process",
        0.35 + 1.3 * share(elsewhere, whole) + 0.2 * bool(named),
        f"{format_bytes(elsewhere)} of {format_bytes(whole)} ({share(elsewhere, whole):.0%}) "
        f"are used outside this process",
        *(f"process {pid} has {format_bytes(size)}" for pid, size in named),
        f"this process has {format_bytes(ours)}" if ours else "",
    )


def _elsewhere(message: Message) -> int:
    """Return the bytes used outside this process, its own CUDA context subtracted."""
    elsewhere = message.elsewhere or 0
    return max(0, elsewhere - CONTEXT_BYTES) if message.has_context else elsewhere


RULES: tuple[TextRule, ...] = (
    *(optimizer_state, no_grad, kv_cache, kept_graphs, logits),
    *(sequence, no_checkpointing, batch, fragmentation, other_process),
)
