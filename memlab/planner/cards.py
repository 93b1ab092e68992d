"""The cards people have: how much fits into one, and how fast it computes and copies.

    card_named("RTX 4090").total_bytes      23.52 GiB, of the "24 GB" that it is sold with
    memory_named("24GB").budget_bytes       24·10⁹ bytes, less what CUDA itself takes

A card sold as "24 GB" has 24 GiB. The driver keeps a part of them, error correction a further one
(T4, L4, A10G, L40S), and `torch.cuda` reports what is left: `total_memory`, which an out-of-memory
message calls the total capacity. It differs by driver, too. The table has the least that was found
on Linux, so that a plan which fits into it fits with each of them; on Windows a card reports nearly
all that it has, and the desktop takes its share of that.

Speeds are those of datasheets: peaks that no training step reaches. They say which of two recipes
costs more, and bound how long one takes.
"""

import re
from dataclasses import dataclass
from difflib import get_close_matches

from memlab.units import BINARY_UNITS, format_bytes, parse_bytes

GIB = BINARY_UNITS["GiB"]
MIB = BINARY_UNITS["MiB"]

# Of a process of torch on a card: the least and the most that users report for 2023 to 2026
# (pytorch #107667, #109888, invoke-ai #9413, unsloth-zoo #1053, LMCache #4019).
CONTEXT_BYTES = 256 * MIB, 616 * MIB

# One direction of 16 lanes, as the standard has it: 8, 16 or 32 Gbit/s a lane, less its encoding.
PCIE_3, PCIE_4, PCIE_5 = 15.75e9, 31.5e9, 63e9


@dataclass(frozen=True)
class Card:
    """What a plan has to know of a kind of GPU."""

    name: str  # as it is typed at the command line
    total_bytes: int  # as torch.cuda reports it
    flops: float  # a second: dense products of bfloat16 in tensor cores, summed in float32
    float32_flops: float  # a second: outside of tensor cores, as torch multiplies unless asked
    memory_bandwidth: float  # bytes a second
    host_bandwidth: float  # bytes a second from or to the host, one direction
    link_bandwidth: float  # bytes a second from or to another such card, one direction
    target: str = "cuda"  # the class of cards, one of memlab.configs.targets.TARGETS


def _gib(number: float) -> int:
    """Bytes, as near as two decimals of an out-of-memory message tell."""
    return round(number * GIB)


# What torch.cuda reports is from messages of users:
#   rtx3080 zai-org/CogVideo #34 · rtx3090 vllm #16343 · rtx4090 Soul-AILab/SoulX-FlashTalk #5
#   (23.64 with older drivers: ali-vilab/VGen #104) · rtx5090 TrajectoryCrafter #20
#   t4 Zheng-Chong/CatVTON #133 (14.75 with older drivers: hpcaitech/Open-Sora #697)
#   v100-16 kchengiva/Shift-GCN #34 · v100-32 haotian-liu/LLaVA #812 · l4 ArcInstitute/evo2 #190
#   l40s stepfun-ai/Step-Video-T2V #8 · a100-40 TianheWu/CoSeR #10 · a100-80 OOTDiffusion #235
#   h100 vllm #27508 · h200 stas00/ml-engineering · b200 pytorch/ao #4002
# or printed by get_device_properties, which counts in MiB: rtx3060, rtx4080, a10g, a6000 (47.54 in
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

# Of a full name, as nvidia-smi and torch print it: words that tell no two of these cards apart.
_IDLE_WORDS = frozenset(
    {
        *("nvidia", "geforce", "tesla", "quadro", "amd", "instinct", "gpu", "gb"),
        *("sxm", "sxm2", "sxm4", "sxm5", "hbm2", "hbm2e", "hbm3", "hbm3e"),
    }
)


@dataclass(frozen=True)
class Memory:
    """What a plan has to fit into: that of a card, or so many bytes of whatever card."""

    name: str  # as it was typed, or the card's
    total_bytes: int
    card: Card | None = None

    @property
    def budget_bytes(self) -> int:
        """What is left for torch's allocator: the total, less the most that CUDA itself takes in a
        process. Other processes and a desktop on the card come on top."""
        return self.total_bytes - CONTEXT_BYTES[1]

    @property
    def card_for_costs(self) -> Card:
        """Whose speeds to reckon with: the card's own; for mere bytes those of the card that is
        nearest in memory, of two at one distance the first in the table."""
        if self.card is not None:
            return self.card
        return min(_TABLE, key=lambda card: abs(card.total_bytes - self.total_bytes))


def card_named(name: str) -> Card:
    """The card of this name, however it is written: "rtx4090", "NVIDIA GeForce RTX 4090", "4090".

    ValueError for one that is not known, with the nearest that are.
    """
    wanted = _plain(name)
    if wanted in _BY_PLAIN_NAME:
        return _BY_PLAIN_NAME[wanted]
    raise ValueError(
        f"got card {name!r}, of which nothing is known{_nearest(wanted)}; give its memory, such as "
        f"24GiB, or one of {', '.join(CARDS)}"
    )


def memory_named(text: str, target: str | None = None) -> Memory:
    """The memory that a person means by "24GB", "24GiB", a number of bytes, or a card's name.

    24GB is 24·10⁹ bytes, 24GiB is 24·2³⁰. ValueError for anything else, and for what leaves nothing
    beside what CUDA itself takes or, where the target is "cpu", for less than 1 MiB.
    """
    if card := _BY_PLAIN_NAME.get(_plain(text)):
        return Memory(card.name, card.total_bytes, card)
    if not re.match(r"\s*[-+]?\.?[0-9]", text):
        raise ValueError(
            f"got {text!r} as a memory, which is neither a number with a unit, such as 24GB or "
            f"24GiB, nor a card that is known{_nearest(_plain(text))}: {', '.join(CARDS)}"
        )
    total = parse_bytes(text)
    if target == "cpu" and total < MIB:
        why = "no training fits"
    elif target != "cpu" and total <= CONTEXT_BYTES[1]:
        why = f"CUDA itself takes up to {format_bytes(CONTEXT_BYTES[1])}"
    else:
        return Memory(text.strip(), total)
    raise ValueError(
        f"got {text!r} as a memory, which is {format_bytes(total)}, and {why}; give more, with a "
        f"unit, such as 24GB or 24GiB"
    )


def _plain(name: str) -> str:
    """What tells a card: its name in small letters, without separators, idle words and "GB"."""
    words = [word for word in re.split(r"[\s_-]+", name.lower()) if word not in _IDLE_WORDS]
    return "".join(re.sub(r"^([0-9]+)gi?b$", r"\1", word) for word in words)


# "4090" and "RTX A6000", as people say it, and "H100 80GB HBM3", as torch does.
_BY_PLAIN_NAME = {
    **{_plain(card.name): card for card in _TABLE},
    **{card.name.removeprefix("rtx"): card for card in _TABLE if card.name.startswith("rtx")},
    "rtxa6000": CARDS["a6000"],
    "h10080": CARDS["h100"],
}


def _nearest(wanted: str) -> str:
    """A question for whoever typed half of a name, or a letter wrong; else nothing."""
    near = [name for name in _BY_PLAIN_NAME if wanted and name.startswith(wanted)]
    near = near or get_close_matches(wanted, _BY_PLAIN_NAME, n=1)
    names = dict.fromkeys(_BY_PLAIN_NAME[name].name for name in near)
    return f" (did you mean {' or '.join(names)}?)" if names else ""
