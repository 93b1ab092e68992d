"""Memory and speed of common GPUs.

    card_named("RTX 4090").total_bytes      23.52 GiB of the advertised "24 GB"
    memory_named("24GB").budget_bytes       24·10⁹ bytes minus the CUDA context

A card sold as "24 GB" has 24 GiB. The driver keeps a part, and error correction another one (T4,
L4, A10G, L40S). `torch.cuda` reports the rest as `total_memory`, which out-of-memory messages call
the total capacity. It also depends on the driver. The table has the smallest value found on Linux,
so that a plan fits with every driver. On Windows a card reports nearly all of its memory, and the
desktop uses some of that.

Speeds are the datasheets' peaks, which no training step reaches. They rank recipes and give a lower
bound of a step's time.
"""

import re
from dataclasses import dataclass
from difflib import get_close_matches

from memlab.units import BINARY_UNITS, format_bytes, parse_bytes

GIB = BINARY_UNITS["GiB"]
MIB = BINARY_UNITS["MiB"]

# CUDA context of a torch process: the smallest and largest values that users reported 2023 to 2026
# (pytorch #107667, #109888, invoke-ai #9413, unsloth-zoo #1053, LMCache #4019).
CONTEXT_BYTES = 256 * MIB, 616 * MIB

# One direction of 16 lanes, by the standard: 8, 16 or 32 Gbit/s per lane, minus the encoding.
PCIE_3, PCIE_4, PCIE_5 = 15.75e9, 31.5e9, 63e9


@dataclass(frozen=True)
class Card:
    """The properties of a GPU that a plan uses."""

    name: str  # as typed at the command line
    total_bytes: int  # as torch.cuda reports it
    flops: float  # per second: dense bfloat16 matmuls in tensor cores, float32 accumulation
    float32_flops: float  # per second: outside tensor cores, torch's default
    memory_bandwidth: float  # bytes per second
    host_bandwidth: float  # bytes per second from or to the host, one direction
    link_bandwidth: float  # bytes per second from or to another such card, one direction
    target: str = "cuda"  # one of memlab.configs.targets.TARGETS


def _gib(number: float) -> int:
    """Convert GiB, given with the two decimals of an out-of-memory message, to bytes."""
    return round(number * GIB)


# The total bytes are from users' error messages:
#   rtx3080 zai-org/CogVideo #34 · rtx3090 vllm #16343 · rtx4090 Soul-AILab/SoulX-FlashTalk #5
#   (23.64 with older drivers: ali-vilab/VGen #104) · rtx5090 TrajectoryCrafter #20
#   t4 Zheng-Chong/CatVTON #133 (14.75 with older drivers: hpcaitech/Open-Sora #697)
#   v100-16 kchengiva/Shift-GCN #34 · v100-32 haotian-liu/LLaVA #812 · l4 ArcInstitute/evo2 #190
#   l40s stepfun-ai/Step-Video-T2V #8 · a100-40 TianheWu/CoSeR #10 · a100-80 OOTDiffusion #235
#   h100 vllm #27508 · h200 stas00/ml-engineering · b200 pytorch/ao #4002
# or from get_device_properties, in MiB: rtx3060, rtx4080, a10g, a6000 (47.54 in
# google-research/semivl #18), mi300x (ROCm/ROCm #4203).
#
# Speeds are from NVIDIA's datasheets and architecture papers, AMD's for the MI300X, in the variant
# with the fastest links (SXM); the B200's memory from pytorch/ao #4002. Cards without NVLink, or
# with one only where somebody bought the bridge (rtx3090, a6000), are linked by PCIe.
#
# T4 and V100 have no bfloat16 in their tensor cores: their figure is float16's. The B200 is no
# Hopper but the nearest class there is. Predictions know CUDA's kernels alone: nothing has been
# held against an MI300X.
# fmt: off
_TABLE = (
    #    name        total           bf16      float32    memory   host    link
    Card("rtx3060",  11_931 * MIB,   25.5e12,   12.7e12,  360e9,  PCIE_4, PCIE_4),
    Card("rtx3080",  _gib(9.78),     59.5e12,   29.8e12,  760e9,  PCIE_4, PCIE_4),
    Card("rtx3090",  _gib(23.68),    71.2e12,   35.6e12,  936e9,  PCIE_4, PCIE_4),
    Card("rtx4080",  16_049 * MIB,   97.5e12,   48.7e12,  717e9,  PCIE_4, PCIE_4),
    Card("rtx4090",  _gib(23.52),   165.2e12,   82.6e12, 1008e9,  PCIE_4, PCIE_4),
    Card("rtx5090",  _gib(31.36),   209.5e12,  104.8e12, 1792e9,  PCIE_5, PCIE_5),
    Card("t4",       _gib(14.56),    65.0e12,    8.1e12,  320e9,  PCIE_3, PCIE_3),
    Card("v100-16",  _gib(15.78),   125.0e12,   15.7e12,  900e9,  PCIE_3, 150e9),
    Card("v100-32",  _gib(31.74),   125.0e12,   15.7e12,  900e9,  PCIE_3, 150e9),
    Card("a10g",     22_587 * MIB,   70.0e12,   31.5e12,  600e9,  PCIE_4, PCIE_4),
    Card("l4",       _gib(22.03),   121.0e12,   30.3e12,  300e9,  PCIE_4, PCIE_4),
    Card("a6000",    48_676 * MIB,  154.8e12,   38.7e12,  768e9,  PCIE_4, PCIE_4),
    Card("l40s",     _gib(44.42),   362.0e12,   91.6e12,  864e9,  PCIE_4, PCIE_4),
    Card("a100-40",  _gib(39.50),   312.0e12,   19.5e12, 1555e9,  PCIE_4, 300e9),
    Card("a100-80",  _gib(79.25),   312.0e12,   19.5e12, 2039e9,  PCIE_4, 300e9),
    Card("h100",     _gib(79.11),   989.4e12,   66.9e12, 3350e9,  PCIE_5, 450e9, "cuda:hopper"),
    Card("h200",     _gib(139.80),  989.4e12,   66.9e12, 4800e9,  PCIE_5, 450e9, "cuda:hopper"),
    Card("b200",     _gib(178.35), 2250.0e12,   75.0e12, 7672e9,  PCIE_5, 900e9, "cuda:hopper"),
    Card("mi300x",   196_592 * MIB, 1307.4e12,  163.4e12, 5300e9, PCIE_5, 448e9),
)
# fmt: on
CARDS = {card.name: card for card in _TABLE}

# Words in the names that nvidia-smi and torch print which do not distinguish these cards.
_FILLER_WORDS = frozenset(
    {
        *("nvidia", "geforce", "tesla", "quadro", "amd", "instinct", "gpu", "gb"),
        *("sxm", "sxm2", "sxm4", "sxm5", "hbm2", "hbm2e", "hbm3", "hbm3e"),
    }
)


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
    wanted = _normalized(name)
    if wanted in _BY_NORMALIZED_NAME:
        return _BY_NORMALIZED_NAME[wanted]
    raise ValueError(
        f"got unknown card {name!r}{_nearest(wanted)}; give its memory, such as 24GiB, or one of "
        f"{', '.join(CARDS)}"
    )


def memory_named(text: str, target: str | None = None) -> Memory:
    """Parse "24GB" (24·10⁹ bytes), "24GiB" (24·2³⁰ bytes), a number of bytes, or a card's name.

    Raises ValueError for anything else, and for memory no larger than the CUDA context or,
    with target "cpu", smaller than 1 MiB.
    """
    if card := _BY_NORMALIZED_NAME.get(_normalized(text)):
        return Memory(card.name, card.total_bytes, card)
    if not re.match(r"\s*[-+]?\.?[0-9]", text):
        raise ValueError(
            f"got {text!r} as a memory, which is neither a number with a unit, such as 24GB or "
            f"24GiB, nor a known card{_nearest(_normalized(text))}: {', '.join(CARDS)}"
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


def _normalized(name: str) -> str:
    """Return the name in lower case, without separators, filler words and "GB"."""
    words = [word for word in re.split(r"[\s_-]+", name.lower()) if word not in _FILLER_WORDS]
    return "".join(re.sub(r"^([0-9]+)gi?b$", r"\1", word) for word in words)


# Also "4090" and "RTX A6000", as people write them, and "H100 80GB HBM3", as torch prints it.
_BY_NORMALIZED_NAME = {
    **{_normalized(card.name): card for card in _TABLE},
    **{card.name.removeprefix("rtx"): card for card in _TABLE if card.name.startswith("rtx")},
    "rtxa6000": CARDS["a6000"],
    "h10080": CARDS["h100"],
}


def _nearest(wanted: str) -> str:
    """Suggest the cards that a partial or misspelled name may mean; "" if there are none."""
    near = [name for name in _BY_NORMALIZED_NAME if wanted and name.startswith(wanted)]
    near = near or get_close_matches(wanted, _BY_NORMALIZED_NAME, n=1)
    names = dict.fromkeys(_BY_NORMALIZED_NAME[name].name for name in near)
    return f" (did you mean {' or '.join(names)}?)" if names else ""
