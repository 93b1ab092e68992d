"""The guides whose rules of thumb the course tries, each with its author and address.

docs/GUIDES.md has what each guide says, and where the course does it.
"""

from typing import NamedTuple


class Guide(NamedTuple):
    """A guide. `author` is the account that publishes it; None if unknown."""

    title: str
    author: str | None = None
    address: str | None = None

    def __str__(self) -> str:
        """Return the guide in Markdown, as the lessons cite it."""
        if self.address is None:
            return f'"{self.title}", author and address unknown'
        return f"{self.author}: [{self.title}]({self.address})"


_ON_GITHUB = "https://github.com/{}/blob/{}/{}"

EMA = Guide(
    "Learnings from RAM Optimization in PostHocEMA",
    "nextml-code",
    _ON_GITHUB.format(
        "nextml-code/pytorch-posthoc-ema",
        "485021c95b0477536c9e915cdb8c4f35d177b384",
        "notes/MINIMIZE_RAM_LEARNED.md",
    ),
)
DREAMS = Guide(
    "DreaMS Memory Optimization Strategies",
    "maxvdboom",
    _ON_GITHUB.format(
        "maxvdboom/DreaMS",
        "757a414db1b8430e3ebed6665aa1f9d1b19eb376",
        "MEMORY_OPTIMIZATION_GUIDE.md",
    ),
)
PLATFORMS = Guide(
    "Multi-Platform Memory Optimization",
    "thINKblots",
    _ON_GITHUB.format(
        "thINKblots/gearhead",
        "d9730c481ff0cc18e9e2b2e6981495e233b9f7b1",
        "MEMORY_OPTIMIZATIONS.md",
    ),
)
MEMORY_GUIDE = Guide(
    "Memory Optimization Guide",
    "gHashTag, VIBEE",
    _ON_GITHUB.format(
        "gHashTag/vibee-lang",
        "203f37f8ed256b5a984355cbb3ee82194a8affd7",
        "docs/guides/MEMORY_OPTIMIZATION_GUIDE.md",
    ),
)
DAY_19 = Guide("Day 19: Memory Optimization")

GUIDES = (EMA, DREAMS, PLATFORMS, MEMORY_GUIDE, DAY_19)
