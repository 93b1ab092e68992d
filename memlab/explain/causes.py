"""One rule for each known cause: what in a history speaks for it, and how strongly.

A rule is a mechanism. It looks at what the cause does to an allocator's history, and returns a
finding, or None if nothing speaks for the cause. `explain` shows the most confident finding first.
"""

from collections.abc import Callable
from dataclasses import replace

from memlab.configs.gpus import GPUS
from memlab.explain.findings import CONTEXT_BYTES, Finding, finding, ranked
from memlab.explain.histories import share
from memlab.explain.situation import Situation
from memlab.units import format_bytes, plural

Rule = Callable[[Situation], Finding | None]

EVEN_LAYERS = 8  # with more equal layers, checkpointing saves more than a smaller batch
LEAST_SHARE = 0.15  # of the needed memory, for a cause to be named
KEPT_WITHOUT_GRAD = 0.35  # of a forward pass's bytes, at most, stay alive under no_grad
UNEXPLAINED_SHARE = 0.12  # of a GPU's memory: more than contexts and libraries need
WITHOUT_STACKS = 0.65  # of the confidence, where categories come from sizes alone
SIZES = {"batch", "sequence", "logits", "no-checkpointing"}  # causes that need too much at once
MOSTLY_WEIGHTS = 0.6  # of the needed memory, for weights to be the cause of a running step
SURE_OF_WASTE = 0.6  # with more confidence in fragmentation, it explains the failure by itself


def findings(situation: Situation) -> tuple[Finding, ...]:
    """Return the causes with evidence, the most confident first."""
    found = [each for each in (rule(situation) for rule in RULES) if each is not None]
    found = doubt_sizes(found)
    if not situation.history.has_frames:
        found = [replace(each, confidence=each.confidence * WITHOUT_STACKS) for each in found]
    return ranked(found)


def kept_graphs(s: Situation) -> Finding | None:
    """Blocks of several earlier steps are alive, although backward and the optimizer ran since."""
    leaked = sum(block.bytes for block in s.leaked_blocks)
    if s.share(leaked) < LEAST_SHARE or not s.loop:
        return None
    top = s.leaks[0]
    per_step = sum(leak.bytes / leak.steps for leak in s.leaks)
    strength = 0.45 + 0.6 * s.share(leaked)
    if not s.trains_now:
        strength *= 0.75 if s.generation or s.kept_share > KEPT_WITHOUT_GRAD else 1
    if s.caches and s.caches[0].alive_bytes > leaked / 2:
        strength *= 0.5
    return finding(
        "kept-graphs",
        strength,
        f"{format_bytes(leaked)} ({s.share(leaked):.0%}) are from {top.steps} earlier steps",
        f"each step leaves {format_bytes(round(per_step))} more",
        f"the line that leaves the most: {top.frame}" if top.frame else "",
    )


def kv_cache(s: Situation) -> Finding | None:
    """Blocks of one line are replaced by larger ones again and again, or pile up in generation."""
    # A cache's block is freed after the larger one was allocated. Activations of growing batches
    # are freed before.
    caches = [cache for cache in s.caches if cache.last_bytes > cache.first_bytes]
    held = sum(cache.alive_bytes for cache in caches)
    leaked = sum(block.bytes for block in s.leaked_blocks)
    if s.share(held) >= LEAST_SHARE / 2:
        top = caches[0]
        named = bool(s.generation) or s.cat_request
        return finding(
            "kv-cache",
            0.35 + 0.6 * s.share(held) + 0.2 * named,
            f"{format_bytes(held)} ({s.share(held):.0%}) are blocks that grow: "
            f"{top.frame} replaced its block {top.replacements} times, "
            f"from {format_bytes(top.first_bytes)} to {format_bytes(top.last_bytes)}",
            f"{_at_the_moment(s)} {s.generation.name}()" if s.generation else "",
        )
    if s.generation and not s.trains_now and s.share(leaked) >= LEAST_SHARE:
        return finding(
            "kv-cache",
            0.45 + 0.5 * s.share(leaked),
            f"{format_bytes(leaked)} ({s.share(leaked):.0%}) stay from {s.leaks[0].steps} earlier "
            f"passes of {s.generation.name}()",
        )
    return None


def no_grad(s: Situation) -> Finding | None:
    """A forward pass outside training keeps the activations that only backward needs."""
    repeated = s.passes_without_backward >= 2
    kept = sum(block.bytes for block in s.activations)
    leaked = sum(b.bytes for b in s.leaked_blocks) if not s.trains_now else 0
    held = max(kept, leaked, s.untrained_bytes if repeated else 0)
    outside_training = s.evaluation is not None or (s.trained_before and _another_loop(s))
    if (s.trains_now or not outside_training) and not repeated:
        return None
    if s.share(held) < LEAST_SHARE:
        return None
    # Without `no_grad`, 35 to 95 % of the forward pass's memory is still alive; with it, less.
    if s.kept_share < KEPT_WITHOUT_GRAD or (s.generation and s.caches):
        return None
    strength = 0.5 + 0.3 * s.share(held) + 0.2 * (s.evaluation is not None or repeated)
    where = f"{s.evaluation.name}()" if s.evaluation else "code after training"
    return finding(
        "no-grad",
        strength * (0.6 if s.disables_grad else 1),
        f"{_at_the_moment(s)} {where}, where neither backward nor an optimizer runs",
        f"{s.kept_share:.0%} of its forward pass's memory is still alive, {format_bytes(held)}; "
        f"under no_grad each layer's blocks are freed after the next layer",
    )


def _at_the_moment(s: Situation) -> str:
    return "memory ran out in" if s.history.refusal else "the peak is in"


def _another_loop(s: Situation) -> bool:
    """Whether the code that runs is none of the lines of the training loop."""
    return s.loop is not s.training or not s.loop


def optimizer_state(s: Situation) -> Finding | None:
    """The first `optimizer.step()` allocates the state, and everything after has less room."""
    state = s.held("optimizer_state")
    weights = s.by_category.get("parameters", 0)
    in_step = s.phase == "optimizer"
    if not in_step and s.share(state) < LEAST_SHARE:
        return None
    evidence = [f"{format_bytes(state)} ({s.share(state):.0%}) are optimizer state"]
    if weights:
        evidence.append(f"the weights are {format_bytes(weights)}; AdamW keeps twice their size")
    if in_step and not s.has_older_state and (s.makes_state_now or not s.stepped_before):
        strength = 0.95
        evidence.append(f"{_at_the_moment(s)} {s.stack[0].name}, in the optimizer's first step")
    elif s.steps_done == 1:
        strength = 0.45 + 0.9 * s.share(state)
        evidence.append("the first step, before the state existed, had enough memory")
    else:
        strength = 0.9 * s.share(state)
    guessed = share(s.unsure.get("optimizer_state", 0), state)
    if guessed > 0.5:
        evidence.append("this category was inferred from block sizes, not from stacks")
    return finding("optimizer-state", strength * (1 - 0.4 * guessed), *evidence)


def logits(s: Situation) -> Finding | None:
    """The loss's blocks of tokens × vocabulary, and the request as large as one of them."""
    held = s.held("logits")
    if s.share(held) < LEAST_SHARE:
        return None
    size = s.categories.logits_bytes
    strength = 0.3 + 1.1 * s.share(held) + 0.15 * s.is_logits_request
    return finding(
        "logits",
        _of_one_step(s, strength),
        f"{format_bytes(held)} ({s.share(held):.0%}) are logits, their log_softmax and gradients, "
        f"{format_bytes(size)} each",
        f"the refused request of {format_bytes(s.request_bytes)} is one of them"
        if s.is_logits_request
        else "",
    )


def sequence(s: Situation) -> Finding | None:
    """Attention scores, B·H·T² elements each, outweigh the rest of the layers."""
    if s.share(s.score_bytes) < LEAST_SHARE:
        return None
    size = max(block.bytes for block in s.score_blocks)
    tokens = s.score_tokens
    return finding(
        "sequence",
        _of_one_step(s, 0.3 + 0.9 * s.share(s.score_bytes)),
        f"{format_bytes(s.score_bytes)} ({s.share(s.score_bytes):.0%}) are attention scores, in "
        f"blocks of {format_bytes(size)}",
        f"each block is batch × heads × {tokens:,}² scores"
        if tokens
        else f"a layer's input is only {format_bytes(s.layer_bytes)}, so each score matrix is "
        f"{share(size, s.layer_bytes):.0f}× larger",
    )


def no_checkpointing(s: Situation) -> Finding | None:
    """Many equal layers keep equal activations, and nothing is recomputed."""
    held = _layer_activations(s)
    if s.recomputes or s.share(held) < LEAST_SHARE or s.layers < 2:
        return None
    if s.phase == "forward" and s.kept_share < KEPT_WITHOUT_GRAD and s.trained_before:
        return None  # nothing is kept for backward
    depth = s.layers / (s.layers + EVEN_LAYERS)
    return finding(
        "no-checkpointing",
        _of_one_step(s, (0.25 + 0.75 * s.share(held)) * (0.35 + 0.75 * depth)),
        f"{format_bytes(held)} ({s.share(held):.0%}) are activations; each of their lines "
        f"allocated about {s.layers:.0f} blocks of equal size",
        "no activation checkpointing in any stack" if s.history.has_frames else "",
    )


def batch(s: Situation) -> Finding | None:
    """Activations and inputs, which grow with the batch, outweigh weights and state."""
    held = _layer_activations(s) + s.by_category.get("inputs", 0)
    if s.share(held) < LEAST_SHARE:
        return None
    depth = s.layers / (s.layers + EVEN_LAYERS) if not s.recomputes else 0
    weights = s.by_category.get("parameters", 0)
    ratio = f"{held / weights:.0f}× the weights" if weights else "no weights in the record"
    trains = 1 if s.trained_before or s.phase == "forward" or not s.history.has_frames else 0.6
    return finding(
        "batch",
        _of_one_step(s, (0.25 + 0.75 * s.share(held)) * (1 - 0.7 * depth) * trains),
        f"{format_bytes(held)} ({s.share(held):.0%}) are activations and inputs, {ratio}",
    )


def _layer_activations(s: Situation) -> int:
    """Return the current step's activations, without logits and attention scores."""
    kinds = [b for b in s.activations if s.categories.name(b) == "activations"]
    request = s.request_bytes if s.request_category in ("activations", "temporaries") else 0
    request = 0 if s.is_score_request else request
    backward = s.by_category.get("temporaries", 0)
    return sum(b.bytes for b in kinds) - sum(b.bytes for b in s.score_blocks) + request + backward


def _of_one_step(s: Situation, strength: float) -> float:
    """Lower the confidence of what each step needs, if earlier steps of the same size ran."""
    leaked = s.share(sum(block.bytes for block in s.leaked_blocks))
    return strength * (1 - min(0.7, leaked))


def fragmentation(s: Situation) -> Finding | None:
    """Reserved memory has more free bytes than the request, but no free block holds it."""
    # Waste alone proves nothing: with models of a few MiB, segments of 20 MiB waste up to 20 %.
    if not s.history.has_segments or not s.history.refusal:
        return None
    free, largest = s.free.free_bytes, s.free.largest_bytes
    if free < s.request_bytes or largest >= s.request_bytes or not s.request_bytes:
        return None
    wasted = share(free, s.reserved_bytes)
    ran_before = s.earlier_peak_bytes > s.needed_bytes
    strength = 1.6 * wasted + 0.35 * ran_before * min(1.0, wasted / 0.1)
    return finding(
        "fragmentation",
        strength,
        f"{format_bytes(free)} ({wasted:.0%} of reserved) are free in "
        f"{plural(len(s.free.gaps), 'piece')}, the largest {format_bytes(largest)}; "
        f"the refused request needs {format_bytes(s.request_bytes)}",
        f"{format_bytes(s.earlier_peak_bytes)} were allocated before, more than the "
        f"{format_bytes(s.needed_bytes)} needed now"
        if ran_before
        else "",
    )


def other_process(s: Situation) -> Finding | None:
    """The card has less room for this process than its size, or than the process had before."""
    if s.device_free is None:
        return None
    room = s.reserved_bytes + s.device_free
    if s.earlier_reserved_bytes > room + CONTEXT_BYTES // 100:
        lost = s.earlier_reserved_bytes - room
        return finding(
            "other-process",
            0.6 + share(lost, s.earlier_reserved_bytes),
            f"this process had {format_bytes(s.earlier_reserved_bytes)} reserved before; now only "
            f"{format_bytes(room)} are reserved or free, so another process took "
            f"{format_bytes(lost)}",
        )
    if s.total_bytes is None:
        return _maybe_other_process(room)
    elsewhere = s.total_bytes - room
    if elsewhere < max(CONTEXT_BYTES, 0.1 * s.total_bytes):
        return None
    return finding(
        "other-process",
        0.3 + 1.3 * share(elsewhere, s.total_bytes),
        f"{format_bytes(room)} of {format_bytes(s.total_bytes)} are reserved by this process or "
        f"free; {format_bytes(elsewhere)} are used elsewhere, and a CUDA context needs less than "
        f"{format_bytes(CONTEXT_BYTES)}",
    )


def _maybe_other_process(room: int) -> Finding | None:
    """Return a guess if no GPU has so little memory; the card's size is unknown."""
    larger = [gpu.total_bytes for gpu in GPUS.values() if gpu.total_bytes >= room]
    if larger and share(min(larger) - room, min(larger)) < UNEXPLAINED_SHARE:
        return None
    return finding(
        "other-process",
        0.2,
        f"only {format_bytes(room)} are reserved or free; if the GPU has more, another process "
        f"holds the rest: pass the GPU's size as --memory",
    )


def doubt_sizes(found: list[Finding]) -> list[Finding]:
    """Lower the confidence that too much is needed where much memory is free in small pieces."""
    wasted = next((f.confidence for f in found if f.cause.name == "fragmentation"), 0)
    if wasted < SURE_OF_WASTE:
        return found
    return [
        replace(f, confidence=f.confidence * (1 - 0.6 * wasted)) if f.cause.name in SIZES else f
        for f in found
    ]


def weights(s: Situation) -> Finding | None:
    """The weights alone fill the memory, or memory ran out while a model was loaded."""
    held = s.held("parameters")
    loads = s.phase == "setup"
    if s.share(held) < (LEAST_SHARE if loads else MOSTLY_WEIGHTS):
        return None
    guessed = share(s.unsure.get("parameters", 0), held)
    strength = (0.6 if loads else 0.1) + 0.5 * s.share(held)
    ran_out = "memory ran out" if s.history.refusal else "the peak is"
    return finding(
        "weights",
        strength * (1 - 0.6 * guessed),
        f"{format_bytes(held)} ({s.share(held):.0%}) are weights",
        f"{ran_out} where a model is built, moved or loaded" if loads else "",
    )


def large_request(s: Situation) -> Finding | None:
    """The request is larger than the most that this process can reserve."""
    if s.device_free is None or not s.history.has_segments:
        return None
    room = max(s.reserved_bytes + s.device_free, s.total_bytes or 0)
    if s.request_bytes <= room:
        return None
    return finding(
        "request",
        0.97,
        f"the request of {format_bytes(s.request_bytes)} is {s.request_bytes / room:.1f} times "
        f"the {format_bytes(room)} that this process could have; freeing everything would not help",
    )


RULES: tuple[Rule, ...] = (
    *(weights, large_request),
    *(kept_graphs, kv_cache, no_grad, optimizer_state, logits),
    *(sequence, no_checkpointing, batch, fragmentation, other_process),
)
