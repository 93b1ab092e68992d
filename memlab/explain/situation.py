"""The facts of a history that the causes look at: shares, phases, growth, repetition, free memory.

Every fact is about one moment: the refused request, or the peak if no request was refused.
`needed_bytes` is what is alive then plus the refused request; shares are relative to it.
"""

import math
import re
from bisect import bisect_right
from collections import Counter, defaultdict
from dataclasses import dataclass
from functools import cached_property

from memlab.explain import steps
from memlab.explain.categories import Categories, bytes_by_category, unsure_bytes
from memlab.explain.frames import (
    MEMLAB,
    Frame,
    Stack,
    decoding_frame,
    disables_grad,
    evaluation_frame,
    generation_frame,
    in_attention,
    in_backward,
    in_block_without_grad,
    in_cat,
    in_forward,
    in_loss,
    in_optimizer,
    in_recompute,
    in_setup,
    in_softmax,
    is_cpp,
    makes_state,
    model_line,
    operator,
    runs,
    user_line,
)
from memlab.explain.histories import NEVER, Block, FreeMemory, History, free_memory, share

SCORES_RATIO = 8  # nothing else in a layer is more than 8 times as large as its input
LEAST_SIZES = 4  # of a cache that grows
CONVOLUTION = "modules/conv.py"
BATCHED_PRODUCTS = {"aten::bmm", "aten::baddbmm", "aten::matmul", "aten::einsum"}
ROW_SUMS, MASKS = {"aten::sum_dim_IntList", "aten::amax"}, {"aten::eq_Scalar", "aten::logical_not"}


@dataclass(frozen=True)
class Cache:
    """Blocks of one stack that a larger one replaces again and again."""

    frame: Frame | None
    first_bytes: int
    last_bytes: int
    alive_bytes: int
    replacements: int


class Situation:
    """One device's history at the moment to explain."""

    def __init__(self, history: History, total_bytes: int | None = None) -> None:
        self.history = history
        self.total_bytes = total_bytes  # of the card, if known
        self.categories = Categories(history)
        self.moment = history.moment
        self.alive = history.alive(self.moment)
        self.loops = self._find_loops()

    def _find_loops(self) -> list[steps.Loop]:
        """Return the loops that stacks show. If none trains, add the one that phases show.

        memlab's stacks have one line of the user, which cannot tell a loop from a function that
        runs again.
        """
        by_memlab = any(frame.filename == MEMLAB for b in self.history.blocks for frame in b.stack)
        found = [] if by_memlab else steps.loops_of(self.history)
        if steps.training_loop(self.history, found) is None:
            phases = self.categories.phases.items()
            ordered = [(b.born, phase) for b, phase in phases if phase not in ("other", "setup")]
            by_phase = steps.loop_by_phase(ordered, self.history.length)
            found += [by_phase] if by_phase else []
        return found

    # -------------------------------------------------------------- sizes

    @cached_property
    def request_bytes(self) -> int:
        return self.history.refusal.bytes if self.history.refusal else 0

    @cached_property
    def allocated_bytes(self) -> int:
        return self.history.allocated[self.moment]

    @cached_property
    def needed_bytes(self) -> int:
        return self.allocated_bytes + self.request_bytes

    @cached_property
    def reserved_bytes(self) -> int:
        return self.history.reserved[self.moment]

    @cached_property
    def device_free(self) -> int | None:
        return self.history.refusal.device_free if self.history.refusal else None

    @cached_property
    def by_category(self) -> dict[str, int]:
        return bytes_by_category(self.categories, self.alive)

    @cached_property
    def unsure(self) -> dict[str, int]:
        return unsure_bytes(self.categories, self.alive)

    @cached_property
    def free(self) -> FreeMemory:
        """The free ranges of reserved memory."""
        return free_memory(self.history, self.moment)

    def share(self, size: float) -> float:
        return share(size, self.needed_bytes)

    def held(self, *names: str) -> int:
        """Return the bytes of some categories, the refused request included in its own."""
        found = sum(self.by_category.get(name, 0) for name in names)
        return found + (self.request_bytes if self.request_category in names else 0)

    # -------------------------------------------------------------- what was running

    @cached_property
    def stack(self) -> Stack:
        """The stack of the refused request, or of the last allocation before the peak."""
        if self.history.refusal:
            return self.history.refusal.stack
        made = [b for b in self.history.blocks if 0 < b.born <= self.moment]
        return max(made, key=lambda b: b.born).stack if made else ()

    @cached_property
    def phase(self) -> str:
        """setup, forward, backward, optimizer, other, or "" if the record does not say."""
        if in_optimizer(self.stack):
            return "optimizer"
        if in_backward(self.stack):
            return "backward"
        if not self.stack:
            return "backward" if self.history.has_frames and self.history.refusal else ""
        if in_forward(self.stack):
            return "forward"
        return "setup" if in_setup(self.stack) else "other"

    @cached_property
    def request_category(self) -> str:
        """The category that the refused request would have had."""
        if self.is_logits_request:
            return "logits"
        names = {"optimizer": "optimizer_state", "backward": "temporaries", "setup": "parameters"}
        return names.get(self.phase, "activations")

    @cached_property
    def is_logits_request(self) -> bool:
        """Whether the refused request is as large as the logits, or made by the loss."""
        if not self.request_bytes:
            return False
        if in_loss(self.stack):
            return True
        size = self.categories.logits_bytes
        return size > self.largest_layer_bytes and self.request_bytes in (size, size // 2)

    @cached_property
    def evaluation(self) -> Frame | None:
        return evaluation_frame(self.context_stack)

    @cached_property
    def generation(self) -> Frame | None:
        return generation_frame(self.context_stack) or decoding_frame(self.context_stack)

    @cached_property
    def context_stack(self) -> Stack:
        """The stack at the moment, or in backward, which runs no Python code, the last one before
        it with Python code."""
        made = (b for b in self.history.blocks if 0 < b.born <= self.moment)
        before = sorted(made, key=lambda b: -b.born)
        stacks = (self.stack, *(block.stack for block in before))
        return next((stack for stack in stacks if not all(map(is_cpp, stack))), self.stack)

    @property
    def line(self) -> Frame | None:
        return user_line(self.context_stack)

    @property
    def model_line(self) -> Frame | None:
        return model_line(self.context_stack)

    @property
    def operator(self) -> str:
        return operator(self.stack)

    # -------------------------------------------------------------- steps

    @cached_property
    def training(self) -> steps.Loop | None:
        return steps.training_loop(self.history, self.loops)

    @cached_property
    def loop(self) -> steps.Loop | None:
        """The innermost loop that was running."""
        return steps.current_loop(self.loops, self.moment)

    @cached_property
    def steps_done(self) -> int:
        """The completed steps of the loop that was running."""
        return self.loop.step_at(self.moment) if self.loop else 0

    @cached_property
    def step_start(self) -> int:
        """The position where the current step began."""
        starts = [start for start in self.loop.starts if start <= self.moment] if self.loop else []
        bounds = [*starts[-1:], self._function_start]
        return max(bounds)

    @cached_property
    def _function_start(self) -> int:
        """The position of the first allocation of the evaluation that runs, 1 without any."""
        frame = self.evaluation
        if frame is None:
            return min(1, self.history.length)  # 0 without a record: its blocks are all older
        last = 0
        for block in self.history.blocks:
            if 0 < block.born <= self.moment and block.stack and not runs(block.stack, frame):
                last = max(last, block.born)
        made = (b.born for b in self.history.blocks if last < b.born and runs(b.stack, frame))
        return min(made, default=1)

    @cached_property
    def growth(self) -> list[int]:
        if self.loop is None:
            return []
        return steps.growth_per_step(self.history, self.loop, self.moment)

    @cached_property
    def leaks(self) -> list[steps.Leak]:
        """Memory that stays from step to step in any loop that was running, the most first."""
        running = [lp for lp in self.loops if lp.starts[0] <= self.moment <= lp.end]
        found = [steps.leaks_of(self.history, loop, self.moment) for loop in running]
        return max(found, key=lambda leaks: sum(leak.bytes for leak in leaks), default=[])

    @cached_property
    def leaked_blocks(self) -> list[Block]:
        return [block for leak in self.leaks for block in leak.blocks]

    @cached_property
    def trains_now(self) -> bool:
        """Whether backward or an optimizer ran since the current loop or function began."""
        first = self.step_start if self.loop is None else self.loop.starts[0]
        first = max(first, self._function_start)
        if self.phase in ("backward", "optimizer"):
            return True
        phases = self.categories.phases
        return any(
            phases[b] in ("backward", "optimizer") and first <= b.born <= self.moment
            for b in phases
        )

    @cached_property
    def trained_before(self) -> bool:
        """Whether backward or an optimizer ran at any time before the moment."""
        phases = self.categories.phases
        return any(phases[b] in ("backward", "optimizer") and b.born <= self.moment for b in phases)

    @cached_property
    def stepped_before(self) -> bool:
        """Whether the optimizer has finished a step before the current one."""
        phases = self.categories.phases
        return any(phases[b] == "optimizer" and b.born < self.step_start for b in phases)

    @cached_property
    def has_older_state(self) -> bool:
        """Whether optimizer state is older than the record, so that no step in it is the first."""
        return any(not b.born and self.categories.name(b) == "optimizer_state" for b in self.alive)

    @cached_property
    def makes_state_now(self) -> bool:
        """Whether the current step of the optimizer creates state."""
        if self.history.refusal and makes_state(self.stack) and not self.stepped_before:
            return True
        phases = self.categories.phases
        return any(
            phases.get(b) == "optimizer" and self.categories.name(b) == "optimizer_state"
            for b in self.alive
            if b.born >= self.step_start > 0
        )

    # -------------------------------------------------------------- the current forward pass

    @cached_property
    def activations(self) -> list[Block]:
        """The activations alive that the current step made."""
        names = ("activations", "logits")
        return [
            b for b in self.alive if b.born >= self.step_start and self.categories.name(b) in names
        ]

    @cached_property
    def kept_share(self) -> float:
        """The share of the current step's forward bytes still alive.

        With gradients, most of it waits for backward. Without, a block dies when the next layers
        have used it.
        """
        phases = self.categories.phases
        made = kept = 0
        for block, phase in phases.items():
            if phase == "forward" and self.step_start <= block.born <= self.moment:
                made += block.bytes
                kept += block.bytes * block.alive(self.moment)
        return share(kept, made)

    @cached_property
    def passes_without_backward(self) -> int:
        """How often forward ran between the backward before the moment and the next one.

        It is 1 in an ordinary training step. Allocations that a training step makes once are
        counted, if they are still alive: a backward that allocates nothing, as when gradients are
        kept, shows in the record only by what it frees.
        """
        phases = self.categories.phases
        trained = [b.born for b, phase in phases.items() if phase in ("backward", "optimizer")]
        if not trained or self.training is None or min(trained) > self.moment:
            return 1
        last = max(position for position in trained if position <= self.moment)
        end = min((p for p in trained if p > self.moment), default=self.history.length + 1)
        starts = [start for start in self.training.starts if start < last]
        once: Counter[Stack] = Counter()
        since: Counter[Stack] = Counter()
        for block, phase in phases.items():
            if phase == "forward" and starts and starts[-1] <= block.born < last:
                once[_place(block)] += 1
            elif phase == "forward" and last < block.born < end and block.alive(self.moment):
                since[_place(block)] += 1
        counts = sorted((since[stack] for stack, n in once.items() if n == 1), reverse=True)
        return max(1, counts[len(counts) // 3]) if counts else 1

    @cached_property
    def untrained_bytes(self) -> int:
        """The bytes alive that forward made since the last backward."""
        phases = self.categories.phases
        trained = sorted(
            b.born for b, phase in phases.items() if phase in ("backward", "optimizer")
        )
        index = bisect_right(trained, self.moment) - 1
        last = trained[index] if index >= 0 else 0
        return sum(b.bytes for b in self.alive if b.born > last and phases.get(b) == "forward")

    @cached_property
    def layer_groups(self) -> dict[tuple[Stack, int], list[Block]]:
        """The current activations by stack and size. Equal layers make equal blocks."""
        groups: dict[tuple[Stack, int], list[Block]] = defaultdict(list)
        for block in self.activations:
            is_layer = in_forward(block.stack) or not block.stack or block.stated
            if self.categories.name(block) == "activations" and is_layer:
                groups[without_numbers(block.stack), block.bytes].append(block)
        return groups

    @cached_property
    def layers(self) -> float:
        """How often the same line made a block of the same size, averaged over bytes."""
        total = sum(b.bytes for group in self.layer_groups.values() for b in group)
        weighted = sum(len(g) * b.bytes for g in self.layer_groups.values() for b in g)
        return share(weighted, total)

    @cached_property
    def layer_bytes(self) -> int:
        """The size that most of the current activations outside attention have: a layer's input and
        output. Where all of them are attention's, the smallest product, which is its output."""
        large = [b for b in self.activations if b.bytes >= 1024]
        counts = Counter(b.bytes for b in large if not in_attention(b.stack))
        if not counts:
            products = [b.bytes for b in large if operator(b.stack) in BATCHED_PRODUCTS]
            counts = Counter([min(products)] if products else [b.bytes for b in large])
        return max(counts, key=lambda size: (counts[size], size), default=0)

    @cached_property
    def largest_layer_bytes(self) -> int:
        """The largest block that more than one layer made."""
        groups = self.layer_groups.items()
        return max((size for (_, size), group in groups if len(group) > 1), default=0)

    @cached_property
    def score_blocks(self) -> list[Block]:
        """Blocks of attention scores alive, and in backward of their gradients.

        Scores are much larger than a layer's input. Backward's blocks state no module: they count
        if they are as large as scores, and as nothing else in forward.
        """
        names, phases = ("activations", "temporaries"), self.categories.phases
        made = [
            b
            for b in self.history.blocks
            if self.step_start <= b.born <= self.moment and self.categories.name(b) in names
        ]
        forward = [b for b in made if phases.get(b) not in ("backward", "optimizer")]
        scores = {b for b in forward if self._is_score(b.stack, b.bytes)}
        others = {b.bytes for b in forward if b not in scores}
        sizes = {b.bytes for b in scores} - others
        counts = Counter(b.bytes for b in self.alive)
        return [
            b
            for b in made
            if b.alive(self.moment)
            and counts[b.bytes] > 1
            and (b in scores or (phases.get(b) == "backward" and b.bytes in sizes))
        ]

    def _is_score(self, stack: Stack, size: int) -> bool:
        if in_loss(stack):
            return False
        if in_softmax(stack) and size >= self.layer_bytes:
            return True
        if not self.layer_bytes:
            return False
        if in_attention(stack):
            return size > SCORES_RATIO / 2 * self.layer_bytes
        is_product = not operator(stack) or operator(stack) in BATCHED_PRODUCTS
        return size > SCORES_RATIO * self.layer_bytes and is_product and not self._has_convolutions

    @cached_property
    def _has_convolutions(self) -> bool:
        frames = (frame for block in self.activations for frame in block.stack)
        return any(frame.filename.endswith(CONVOLUTION) for frame in frames)

    @cached_property
    def score_tokens(self) -> int | None:
        """T of the scores' T × T, if the softmax's row sums or the mask are in the record."""
        size = max((b.bytes for b in self.score_blocks), default=0)
        made = [b for b in self.history.blocks if in_attention(b.stack) and b.bytes < size]
        sums = (size // b.bytes for b in made if operator(b.stack) in ROW_SUMS)
        masks = (math.isqrt(b.bytes) for b in made if operator(b.stack) in MASKS)
        found = [t for t in (*sums, *masks) if t > 1 and size % (t * t) == 0]
        return found[-1] if found else None

    @cached_property
    def is_score_request(self) -> bool:
        sizes = {block.bytes for block in self.score_blocks}
        if not self.request_bytes or self.phase == "optimizer":
            return False
        return self.request_bytes in sizes

    @cached_property
    def score_bytes(self) -> int:
        return sum(b.bytes for b in self.score_blocks) + self.is_score_request * self.request_bytes

    @cached_property
    def recomputes(self) -> bool:
        """Whether activation checkpointing is on."""
        return any(in_recompute(b.stack) for b in self.history.blocks if b.born <= self.moment)

    @cached_property
    def disables_grad(self) -> bool:
        return disables_grad(self.context_stack) or in_block_without_grad(self.context_stack)

    # -------------------------------------------------------------- caches

    @cached_property
    def caches(self) -> list[Cache]:
        """Blocks that a larger block from the same stack replaces, again and again."""
        by_stack: dict[Stack, list[Block]] = defaultdict(list)
        for block in self.history.blocks:
            if 0 < block.born <= self.moment and block.stack and not in_optimizer(block.stack):
                by_stack[block.stack].append(block)
        found = [self._cache(stack, blocks) for stack, blocks in by_stack.items()]
        return sorted(filter(None, found), key=lambda cache: -cache.alive_bytes)

    def _cache(self, stack: Stack, blocks: list[Block]) -> Cache | None:
        first_born: dict[int, int] = {}
        for block in blocks:
            first_born.setdefault(block.bytes, block.born)
        if len(first_born) < LEAST_SIZES or list(first_born) != sorted(first_born):
            return None
        sizes = list(first_born)
        next_born = dict(zip(sizes, [*list(first_born.values())[1:], NEVER], strict=True))
        earlier = [b for b in blocks if b.bytes != sizes[-1]]
        replaced = [b for b in earlier if next_born[b.bytes] < b.died <= self.moment]
        if len(replaced) < 0.6 * len(earlier):
            return None
        alive = sum(b.bytes for b in blocks if b.alive(self.moment))
        request = self.request_bytes if self.stack == stack else 0
        return Cache(user_line(stack), sizes[0], sizes[-1], alive + request, len(replaced))

    @cached_property
    def cat_request(self) -> bool:
        return in_cat(self.stack)

    # -------------------------------------------------------------- earlier peaks

    @cached_property
    def earlier_peak_bytes(self) -> int:
        """The most bytes that were allocated before the moment."""
        return max(self.history.allocated[: self.moment], default=0)

    @cached_property
    def earlier_reserved_bytes(self) -> int:
        return max(self.history.reserved[: self.moment + 1], default=0)


def _place(block: Block) -> Stack:
    """Return a block's stack without the category that memlab's own frames begin with."""
    return block.stack[1:] if block.stated else block.stack


def without_numbers(stack: Stack) -> Stack:
    """Return the stack without layer numbers: memlab's frames name layers.0, layers.1, …"""
    if not any(frame.filename == MEMLAB for frame in stack):
        return stack
    return tuple(frame._replace(name=re.sub(r"\d+", "*", frame.name)) for frame in stack)
