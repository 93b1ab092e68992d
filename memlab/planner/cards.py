"""The memory of a plan: a GPU's, or a number of bytes.

    card_named("RTX 4090").total_bytes      23.52 GiB of the advertised "24 GB"
    memory_named("24GB").budget_bytes       24·10⁹ bytes minus the CUDA context
    margin_named("2%", memory)              two percent of the memory, in bytes

The table of GPUs is memlab/configs/gpus.csv, which predictions read too. Their speeds rank recipes
and give a lower bound of a step's time.
"""

import math
import re
from dataclasses import dataclass, replace
from fractions import Fraction

from memlab.configs.evidence import margin_share
from memlab.configs.gpu_names import LIST_HINT, ambiguous, did_you_mean, find_gpu, gpu_named
from memlab.configs.gpus import CONTEXT_BYTES, GPUS, MIB, Gpu
from memlab.units import format_bytes, parse_bytes

Card = Gpu
CARDS = GPUS
card_named = gpu_named

_PERCENT = re.compile(r"\s*(\d{1,3}(?:\.\d{1,6})?)\s*%\s*", re.ASCII)

# The cards whose speeds stand for a memory size that was given as a number of bytes.
_USUAL = (
    *("rtx3060", "rtx3080", "rtx3090", "rtx4060", "rtx4080", "rtx4090", "rtx5090"),
    *("t4", "v100-16", "v100-32", "a10g", "l4", "a6000", "l40s", "a100-40", "a100-80"),
    *("h100", "h200", "b200", "mi300x"),
)


@dataclass(frozen=True)
class Memory:
    """The memory that a plan has to fit into: a card's, or a number of bytes."""

    name: str  # as it was typed, or the card's
    total_bytes: int
    card: Card | None = None
    margin_bytes: int | None = None  # to leave free; None: as much as evidence suggests

    @property
    def budget_bytes(self) -> int:
        """The bytes available to torch's allocator: the total minus the largest CUDA context. Other
        processes and the desktop need memory in addition."""
        return self.total_bytes - CONTEXT_BYTES[1]

    @property
    def target(self) -> str:
        """The device to predict for: the card's; for a number of bytes "cuda", most cards'."""
        return self.card.target if self.card is not None else "cuda"

    @property
    def card_for_costs(self) -> Card:
        """The card whose speeds to use. For a number of bytes, this is the usual card with the
        nearest memory size, the first of them if two are equally near."""
        if self.card is not None:
            return self.card
        usual = (CARDS[name] for name in _USUAL)
        return min(usual, key=lambda card: abs(card.total_bytes - self.total_bytes))


def memory_named(text: str, target: str | None = None) -> Memory:
    """Parse "24GB" (24·10⁹ bytes), "24GiB" (24·2³⁰ bytes), a number of bytes, or a card's name.

    Raises ValueError for anything else, and for memory no larger than the CUDA context or,
    with target "cpu", smaller than 1 MiB.
    """
    if gpu := find_gpu(text):
        return Memory(gpu.name, gpu.total_bytes, gpu)
    if several := ambiguous(text):
        raise ValueError(several)
    question = did_you_mean(text)
    try:
        total = parse_bytes(text)
    except ValueError:
        if question:
            raise ValueError(f"got unknown GPU {text!r}; {question} {LIST_HINT}") from None
        if re.match(r"\s*[-+]?\.?[0-9]", text):
            raise
        raise ValueError(
            f"got {text!r} as a memory, which is neither a number with a unit, such as 24GB or "
            f"24GiB, nor a known GPU; {LIST_HINT}"
        ) from None
    if target == "cpu" and total < MIB:
        why = "no training fits"
    elif target != "cpu" and total <= CONTEXT_BYTES[1]:
        why = f"the CUDA context needs up to {format_bytes(CONTEXT_BYTES[1])}"
    else:
        return Memory(text.strip(), total)
    raise ValueError(
        f"got {text!r} as a memory, which is {format_bytes(total)}, and {why}; give more, with a "
        f"unit, such as 24GB or 24GiB{question and f', or a GPU: {question}'}"
    )


def budget_bytes(memory: Memory, target: str) -> int:
    """Return the bytes available to tensors, on a GPU without the CUDA context and the margin."""
    total = memory.total_bytes if target == "cpu" else memory.budget_bytes
    return total - margin_bytes(memory, target)


def margin_bytes(memory: Memory, target: str) -> int:
    """Return the bytes to leave free: as many as the user wants, else, on a GPU, a share because
    measured steps needed more than predicted."""
    if memory.margin_bytes is not None:
        return memory.margin_bytes
    return 0 if target == "cpu" else math.ceil(margin_share() * memory.total_bytes)


def with_margin(memory: Memory, margin: int | str, target: str) -> Memory:
    """Return the memory with this margin to leave free: "2%", "500MiB", or bytes.

    Raises ValueError for anything else, and for a margin that leaves nothing for tensors.
    """
    usable = budget_bytes(replace(memory, margin_bytes=0), target)
    found = margin_named(margin, memory)
    if found >= usable:
        raise ValueError(
            f"got a margin of {margin!r}, which leaves nothing of the {format_bytes(usable)} that "
            f"tensors can use on {memory.name}; give less"
        )
    return replace(memory, margin_bytes=found)


def margin_named(given: int | str, memory: Memory) -> int:
    """Return the bytes to leave free: "2%" of the memory, "500MiB", or a number of bytes.

    Raises ValueError for anything else.
    """
    if percent := _PERCENT.fullmatch(str(given)):
        return math.ceil(Fraction(percent[1]) / 100 * memory.total_bytes)
    try:
        return parse_bytes(given)
    except ValueError:
        raise ValueError(
            f"got a margin of {given!r}; give a percentage of the memory, such as 2%, or bytes "
            f"with a unit, such as 500MiB"
        ) from None
