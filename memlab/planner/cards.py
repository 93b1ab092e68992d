"""Memory and speed of common GPUs.

    card_named("RTX 4090").total_bytes      23.52 GiB of the advertised "24 GB"
    memory_named("24GB").budget_bytes       24·10⁹ bytes minus the CUDA context

Architecture and memory are in memlab/configs/gpus.py, which predictions read too. Speeds are the
datasheets' peaks, which no training step reaches. They rank recipes and give a lower bound of a
step's time.
"""

import re
from dataclasses import dataclass

from memlab.configs.gpus import CONTEXT_BYTES, GPUS, MIB, find_gpu, nearest_gpus
from memlab.units import format_bytes, parse_bytes

# One direction of 16 lanes, by the standard: 8, 16 or 32 Gbit/s per lane, minus the encoding.
PCIE_3, PCIE_4, PCIE_5 = 15.75e9, 31.5e9, 63e9


@dataclass(frozen=True)
class Card:
    """The properties of a GPU that a plan uses."""

    name: str  # of one of memlab.configs.gpus.GPUS
    flops: float  # per second: dense bfloat16 matmuls in tensor cores, float32 accumulation
    float32_flops: float  # per second: outside tensor cores, torch's default
    memory_bandwidth: float  # bytes per second
    host_bandwidth: float  # bytes per second from or to the host, one direction
    link_bandwidth: float  # bytes per second from or to another such card, one direction

    @property
    def total_bytes(self) -> int:
        """The memory, as torch.cuda reports it."""
        return GPUS[self.name].total_bytes

    @property
    def target(self) -> str:
        """The device that predictions for this card take."""
        return f"cuda:{self.name}"


# Speeds are from NVIDIA's datasheets and architecture papers, AMD's for the MI300X, in the variant
# with the fastest links (SXM); the B200's memory from pytorch/ao #4002. Cards without NVLink, or
# with one only where somebody bought the bridge (rtx3090, a6000), are linked by PCIe. The rtx4060
# has eight lanes of PCIe 4.0, which is the speed of PCIE_3.
#
# T4 and V100 have no bfloat16 in their tensor cores: their figure is float16's.
# fmt: off
_TABLE = (
    #    name          bf16   float32  memory  host    link
    Card("rtx3060",  25.5e12,  12.7e12,  360e9, PCIE_4, PCIE_4),
    Card("rtx3080",  59.5e12,  29.8e12,  760e9, PCIE_4, PCIE_4),
    Card("rtx3090",  71.2e12,  35.6e12,  936e9, PCIE_4, PCIE_4),
    Card("rtx4060",  30.2e12,  15.1e12,  272e9, PCIE_3, PCIE_3),
    Card("rtx4080",  97.5e12,  48.7e12,  717e9, PCIE_4, PCIE_4),
    Card("rtx4090", 165.2e12,  82.6e12, 1008e9, PCIE_4, PCIE_4),
    Card("rtx5090", 209.5e12, 104.8e12, 1792e9, PCIE_5, PCIE_5),
    Card("t4",       65.0e12,   8.1e12,  320e9, PCIE_3, PCIE_3),
    Card("v100-16", 125.0e12,  15.7e12,  900e9, PCIE_3, 150e9),
    Card("v100-32", 125.0e12,  15.7e12,  900e9, PCIE_3, 150e9),
    Card("a10g",     70.0e12,  31.5e12,  600e9, PCIE_4, PCIE_4),
    Card("l4",      121.0e12,  30.3e12,  300e9, PCIE_4, PCIE_4),
    Card("a6000",   154.8e12,  38.7e12,  768e9, PCIE_4, PCIE_4),
    Card("l40s",    362.0e12,  91.6e12,  864e9, PCIE_4, PCIE_4),
    Card("a100-40", 312.0e12,  19.5e12, 1555e9, PCIE_4, 300e9),
    Card("a100-80", 312.0e12,  19.5e12, 2039e9, PCIE_4, 300e9),
    Card("h100",    989.4e12,  66.9e12, 3350e9, PCIE_5, 450e9),
    Card("h200",    989.4e12,  66.9e12, 4800e9, PCIE_5, 450e9),
    Card("b200",   2250.0e12,  75.0e12, 7672e9, PCIE_5, 900e9),
    Card("mi300x", 1307.4e12, 163.4e12, 5300e9, PCIE_5, 448e9),
)
# fmt: on
CARDS = {card.name: card for card in _TABLE}


@dataclass(frozen=True)
class Memory:
    """The memory that a plan has to fit into: a card's, or a number of bytes."""

    name: str  # as it was typed, or the card's
    total_bytes: int
    card: Card | None = None

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
        """The card whose speeds to use. For a number of bytes, this is the card with the nearest
        memory size, the first in the table if two are equally near."""
        if self.card is not None:
            return self.card
        return min(_TABLE, key=lambda card: abs(card.total_bytes - self.total_bytes))


def card_named(name: str) -> Card:
    """Find a card by any spelling: "rtx4090", "NVIDIA GeForce RTX 4090", "4090".

    Raises ValueError for an unknown card, with the nearest known ones.
    """
    if gpu := find_gpu(name):
        return CARDS[gpu.name]
    raise ValueError(
        f"got unknown card {name!r}{_nearest(name)}; give its memory, such as 24GiB, or one of "
        f"{', '.join(CARDS)}"
    )


def memory_named(text: str, target: str | None = None) -> Memory:
    """Parse "24GB" (24·10⁹ bytes), "24GiB" (24·2³⁰ bytes), a number of bytes, or a card's name.

    Raises ValueError for anything else, and for memory no larger than the CUDA context or,
    with target "cpu", smaller than 1 MiB.
    """
    if gpu := find_gpu(text):
        return Memory(gpu.name, gpu.total_bytes, CARDS[gpu.name])
    if not re.match(r"\s*[-+]?\.?[0-9]", text):
        raise ValueError(
            f"got {text!r} as a memory, which is neither a number with a unit, such as 24GB or "
            f"24GiB, nor a known card{_nearest(text)}: {', '.join(CARDS)}"
        )
    total = parse_bytes(text)
    if target == "cpu" and total < MIB:
        why = "no training fits"
    elif target != "cpu" and total <= CONTEXT_BYTES[1]:
        why = f"the CUDA context needs up to {format_bytes(CONTEXT_BYTES[1])}"
    else:
        return Memory(text.strip(), total)
    raise ValueError(
        f"got {text!r} as a memory, which is {format_bytes(total)}, and {why}; give more, with a "
        f"unit, such as 24GB or 24GiB"
    )


def _nearest(text: str) -> str:
    """Suggest the cards that a partial or misspelled name may mean; "" if there are none."""
    names = nearest_gpus(text)
    return f" (did you mean {' or '.join(names)}?)" if names else ""
