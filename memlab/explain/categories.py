"""What each allocation is for: parameters, gradients, optimizer state, activations and so on.

Categories come from the stacks where there are any, else from sizes and lifetimes:

    parameters       made while a model was built or moved, before the first forward pass, and kept
    gradients        made in backward, as large as a parameter, and alive at the end of backward
    optimizer state  made in an optimizer's step, and kept after it
    activations      made in forward, and alive at the end of forward
    logits           as large as the result of the loss function's log_softmax, or half of it
    workspaces       asked for by a library, or as large as a workspace of cuBLAS
    temporaries      freed in the phase that made them

Blocks older than the record have no phase. Equal counts of equal sizes tell them apart: one
parameter, one gradient and two moments of Adam have the same size.
"""

from bisect import bisect_right
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby

from memlab.explain.frames import (
    Stack,
    in_forward,
    in_loss,
    in_optimizer,
    in_recompute,
    in_setup,
    in_workspace,
    makes_state,
)
from memlab.explain.histories import NEVER, Block, History
from memlab.explain.steps import is_backward

CATEGORIES = (
    *("parameters", "gradients", "optimizer_state", "inputs"),
    *("activations", "logits", "temporaries", "workspaces", "unknown"),
)
OF_MEMLAB = {  # memlab's own categories, in a file that it wrote
    "parameters": "parameters",
    "buffers": "parameters",
    "gradients": "gradients",
    "optimizer_state": "optimizer_state",
    "inputs": "inputs",
    "activations": "activations",
    "forward_temporaries": "temporaries",
    "backward_temporaries": "temporaries",
    "optimizer_temporaries": "temporaries",
    "workspace": "workspaces",
    "rounding": "unknown",
    "unattributed": "unknown",
}
PHASES_OF_MEMLAB = {"backward_temporaries": "backward", "gradients": "backward"}
DEFAULT_WORKSPACE = 8_519_680  # bytes of cuBLAS, which no parameter has
CUBLAS_WORKSPACES = {DEFAULT_WORKSPACE, 33_554_432}  # the second on Hopper
LEAST_VOTE_BYTES, LEAST_VOTES = 1024, 4  # smaller and rarer blocks may be anything
NEAR = 8  # allocations between the last layer and the loss, and from there into backward
LEAST_LOGITS_BYTES = 1024  # smaller blocks have equal sizes by chance


@dataclass(frozen=True)
class Category:
    """A category. `sure` if it is stated or read from a stack, not inferred from sizes alone."""

    name: str
    sure: bool = True


UNKNOWN = Category("unknown", sure=False)


class Categories:
    """The categories and phases of a history's blocks."""

    def __init__(self, history: History) -> None:
        self.history = history
        self.of: dict[Block, Category] = {}
        self._recorded = sorted((b for b in history.blocks if b.born), key=lambda b: b.born)
        self._sort_by_stack()
        self._sort_older()
        self._find_logits()

    def name(self, block: Block) -> str:
        return self.of[block].name

    @cached_property
    def phases(self) -> dict[Block, str]:
        """forward, backward, optimizer, setup or other of each block made during the record."""
        return {block: phase_of(block, self.history) for block in self._recorded}

    @cached_property
    def first_forward(self) -> int:
        made = (b.born for b, phase in self.phases.items() if phase == "forward")
        return min(made, default=self.history.length + 1)

    @cached_property
    def _setup_end(self) -> int:
        """Where a model is complete: at its first forward, or where memory ran out before.

        Afterwards the exception frees what was built.
        """
        refusal = self.history.refusal
        return min(self.first_forward, refusal.position) if refusal else self.first_forward

    @cached_property
    def _phase_ends(self) -> dict[Block, int]:
        """The position of the last allocation in each block's own run of a phase."""
        ends: dict[Block, int] = {}
        merged = {"other": "forward"}
        runs = groupby(self._recorded, lambda b: merged.get(self.phases[b], self.phases[b]))
        for _, run in runs:
            blocks = list(run)
            ends |= dict.fromkeys(blocks, blocks[-1].born)
        return ends

    def _stays(self, block: Block) -> bool:
        """Whether the block is alive at the end of the phase that made it.

        A phase that memory ran out in ends at the refused request.
        """
        end = self._phase_ends[block]
        refusal = self.history.refusal
        if refusal and block.born <= refusal.position <= end:
            end = refusal.position
        return block.died > end

    # -------------------------------------------------------------- by stack

    def _sort_by_stack(self) -> None:
        for block in self.history.blocks:
            if block.stated in OF_MEMLAB:
                self.of[block] = Category(OF_MEMLAB[block.stated])
            elif is_workspace(block):
                self.of[block] = Category("workspaces")
            elif block.born and self.history.has_frames:
                self.of[block] = self._recorded_category(block)
            elif block.stack:
                self.of[block] = self._older_category(block)
        self._find_gradients()

    def _recorded_category(self, block: Block) -> Category:
        stays = self._stays(block)
        match self.phases[block]:
            case "optimizer":
                kept = stays and (makes_state(block.stack) or self._survives_step(block))
                return Category("optimizer_state" if kept else "temporaries")
            case "backward":
                is_activation = stays is False and in_recompute(block.stack)
                return Category("activations" if is_activation else "temporaries")
            case "setup":
                return Category("parameters" if block.died > self._setup_end else "temporaries")
            case "other":
                return self._user_category(block, stays)
        return Category("activations" if stays else "temporaries")

    def _survives_step(self, block: Block) -> bool:
        """Whether an optimizer's block is still there when the optimizer has finished."""
        index = bisect_right(self._outside_optimizer, block.born)
        later = self._outside_optimizer[index : index + 1]
        if later:
            return block.died > later[0]
        return block.died == NEVER and block.stack not in self._scratch_stacks

    @cached_property
    def _scratch_stacks(self) -> set[Stack]:
        """Lines of the optimizer whose blocks died in an earlier step.

        A step that memory runs out in holds its temporaries to the end of the record.
        """
        return {
            b.stack for b in self._recorded if self.phases[b] == "optimizer" and b.died != NEVER
        }

    @cached_property
    def _outside_optimizer(self) -> list[int]:
        return [b.born for b in self._recorded if self.phases[b] != "optimizer"]

    def _user_category(self, block: Block, stays: bool) -> Category:
        """Return the category of a block that the user's own lines made, outside of any module."""
        if block.born < self.first_forward and block.died == NEVER:
            return Category("parameters", sure=False)
        index = bisect_right(self._forward_starts, block.born)
        is_input = index < len(self._forward_starts) and block.died > self._forward_starts[index]
        before = self._previous_phase(block)
        if is_input and before in ("", "optimizer", "backward", "setup"):
            return Category("inputs", sure=False)
        return Category("activations" if stays else "temporaries", sure=False)

    @cached_property
    def _forward_starts(self) -> list[int]:
        return [b.born for b in self._recorded if self.phases[b] == "forward"]

    @cached_property
    def _positions(self) -> list[tuple[int, str]]:
        return [(b.born, self.phases[b]) for b in self._recorded if self.phases[b] != "other"]

    def _previous_phase(self, block: Block) -> str:
        index = bisect_right(self._positions, (block.born, "")) - 1
        return self._positions[index][1] if index >= 0 else ""

    def _older_category(self, block: Block) -> Category:
        """Return the category of a block whose stack is known, but not when it was made."""
        if in_optimizer(block.stack):
            return Category("optimizer_state")
        if in_forward(block.stack):
            return Category("activations", sure=False)
        return Category("parameters", sure=in_setup(block.stack))

    def _find_gradients(self) -> None:
        """Mark blocks of backward that stay and are as large as a parameter."""
        names = ((block.bytes, category.name) for block, category in self.of.items())
        sizes = {size for size, name in names if name == "parameters"}
        for block, category in self.of.items():
            if block.stated or category.name != "temporaries" or not block.born:
                continue
            if self.phases[block] != "backward" or not self._stays(block):
                continue
            if block.bytes in sizes or not sizes:
                self.of[block] = Category("gradients", sure=self._survives_phase(block))

    def _survives_phase(self, block: Block) -> bool:
        return block.died > self._phase_ends[block]

    # -------------------------------------------------------------- by size

    def _sort_older(self) -> None:
        """Sort what has no stack: blocks older than the record, or all if no stack was recorded."""
        rest = [block for block in self.history.blocks if block not in self.of]
        older = [block for block in rest if not block.born and block.died > self.history.moment]
        known = {c.name for c in self.of.values() if c.sure}
        # In a recording of a 3.4B GPT, 12.72 GiB of weights, 12.72 of gradients and 25.38 of
        # AdamW's state. Every size has one vote: by bytes, four equal matrices in a layer look like
        # a weight, a gradient and two moments
        # (test_four_equal_matrices_in_a_layer_are_no_sign_of_adam).
        gradients = (
            block.bytes
            for block, category in self.of.items()
            if category.name == "gradients" and block.alive(self.history.moment)
        )
        self.of |= split_by_counts(older, known, Counter(gradients))
        left = Counter(b.bytes for b, c in self.of.items() if c.name == "parameters")
        sizes = set(left)
        for block in sorted(rest, key=lambda block: block.born):
            if block not in self.of:
                self.of[block] = self._by_lifetime(block, sizes, left)

    def _by_lifetime(self, block: Block, sizes: set[int], left: Counter[int]) -> Category:
        """Return the category of a block without a stack.

        Of the blocks as large as a parameter that stay, backward makes the first, one for each
        parameter, and the optimizer the others. `left` counts the gradients still to come.
        """
        if not block.born:
            return UNKNOWN
        if block.died == NEVER and block.bytes in sizes:
            left[block.bytes] -= 1
            is_gradient = left[block.bytes] >= 0
            return Category("gradients" if is_gradient else "optimizer_state", sure=False)
        if block.alive(self.history.moment):
            return Category("activations", sure=False)
        return Category("temporaries", sure=False)

    # -------------------------------------------------------------- logits

    def _find_logits(self) -> None:
        """Mark blocks as large as the logits in float32, or half as large for a 16-bit dtype."""
        size = self.logits_bytes
        if size < LEAST_LOGITS_BYTES:
            return
        made = [n for n, block in enumerate(self._recorded) if is_logits(block)]
        for place in made:
            for block in self._recorded[max(0, place - NEAR) : place + NEAR + 1]:
                is_kind = self.of[block].name in ("activations", "temporaries")
                if is_kind and block.bytes in (size, size // 2):
                    self.of[block] = Category("logits", sure=in_loss(block.stack))

    @cached_property
    def logits_bytes(self) -> int:
        """The bytes of the largest block that a loss over classes made; 0 if there is none."""
        made = [b.bytes for b in self.history.blocks if is_logits(b)]
        refusal = self.history.refusal
        if refusal and in_loss(refusal.stack):
            made.append(refusal.bytes)
        return max(made, default=0)


def is_logits(block: Block) -> bool:
    return in_loss(block.stack) and block.stated in (None, "activations", "forward_temporaries")


def phase_of(block: Block, history: History) -> str:
    """Return the phase that made a block during the record."""
    if block.stated:
        return PHASES_OF_MEMLAB.get(block.stated, _stated_phase(block.stated))
    if in_optimizer(block.stack):
        return "optimizer"
    if is_backward(block, history):
        return "backward"
    if in_forward(block.stack):
        return "forward"
    return "setup" if in_setup(block.stack) else "other"


def _stated_phase(stated: str) -> str:
    if stated in ("activations", "forward_temporaries"):
        return "forward"
    return "optimizer" if stated.startswith("optimizer") else "setup"


def is_workspace(block: Block) -> bool:
    """Whether a library asked for the block as scratch memory."""
    if block.bytes == DEFAULT_WORKSPACE and not block.stack and not block.born:
        return True
    return in_workspace(block.stack) or (
        block.bytes in CUBLAS_WORKSPACES and in_forward(block.stack) and block.died == NEVER
    )


# ------------------------------------------------------------------ equal counts of equal sizes

# How many blocks of one size are a parameter, a gradient, and optimizer state.
SHARES = {
    4: ("parameters", "gradients", "optimizer_state", "optimizer_state"),
    3: ("parameters", "optimizer_state", "optimizer_state"),
    2: ("parameters", "gradients"),
    1: ("parameters",),
}


def split_by_counts(
    blocks: Iterable[Block], known: set[str], gradients: Mapping[int, int]
) -> dict[Block, Category]:
    """Split blocks older than the record by how often each size occurs.

    If every large size occurs a multiple of 4 times, Adam's state and the gradients were there.
    Where the record has as many `gradients` by size as parameters, they tell how often each is.
    """
    by_size: dict[int, list[Block]] = {}
    for block in sorted(blocks, key=lambda block: block.address):
        by_size.setdefault(block.bytes, []).append(block)
    if not by_size:
        return {}
    times = _common_count(by_size, gradients)
    names = SHARES[times]
    if times == 2 and "gradients" in known:
        names = ("parameters", "optimizer_state")
    found = {}
    for same in by_size.values():
        for number, block in enumerate(same):
            found[block] = Category(names[number * times // len(same)], sure=False)
    return found


def _common_count(by_size: dict[int, list[Block]], gradients: Mapping[int, int]) -> int:
    """Return 4, 3, 2 or 1: what divides the count of every size that occurs often.

    One size is enough to refuse: a model of 22 layers has even counts, but 45 norms. Sizes that
    occur less often are buffers, and must not be most of the memory.
    """
    often = {size: len(same) for size, same in by_size.items() if len(same) >= LEAST_VOTES}
    counts = [count for size, count in often.items() if size >= LEAST_VOTE_BYTES]
    held = sum(size * count for size, count in often.items())
    alone = len(counts) < 2 and len(often) < len(by_size)  # as four equal matrices in every layer
    if alone or not counts or held < sum(size * len(same) for size, same in by_size.items()) / 2:
        return 1
    ratios = {count // gradients[size] if size in gradients else 0 for size, count in often.items()}
    if len(ratios) == 1 and ratios <= SHARES.keys():
        return ratios.pop()
    return next(times for times in (4, 3, 2, 1) if not any(count % times for count in counts))


def bytes_by_category(categories: Categories, blocks: Iterable[Block]) -> dict[str, int]:
    """Return the bytes of each category that has any."""
    sums: Counter[str] = Counter()
    for block in blocks:
        sums[categories.name(block)] += block.bytes
    return {name: sums[name] for name in CATEGORIES if sums[name]}


def unsure_bytes(categories: Categories, blocks: Iterable[Block]) -> dict[str, int]:
    """Return the bytes of each category that were inferred from sizes and lifetimes alone."""
    sums: Counter[str] = Counter()
    for block in blocks:
        if not categories.of[block].sure:
            sums[categories.name(block)] += block.bytes
    return dict(sums)
