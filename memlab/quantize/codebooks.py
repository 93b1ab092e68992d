"""Codebooks: the dynamic codebook, and the lookup of the nearest entry.

Source   Dettmers et al. 2021, arXiv 2110.02861, section 2.2.
"""

import math
from typing import ClassVar

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from memlab.internals.torch_internals import has_values

_DECADES = 7


def dynamic_code(signed: bool) -> Tensor:
    """Return the dynamic codebook of bitsandbytes and torchao: 256 sorted float32 entries.

    Each decade i of 7 is cut into 2ⁱ equal parts (twice as many if unsigned). The entries are the
    midpoints of the parts, 0 and 1, so they are dense near zero. If signed, midpoints appear with
    both signs, zero is entry 127, and the smallest entry is −0.993, not −1. If unsigned, zero is
    entry 0.
    """
    positive = torch.cat([_midpoints(i, 2**i if signed else 2 ** (i + 1)) for i in range(_DECADES)])
    negative = -positive if signed else positive[:0]
    ends = torch.tensor([0.0, 1.0], dtype=torch.float32)
    return torch.cat([negative, positive, ends]).sort().values


def _midpoints(decade: int, parts: int) -> Tensor:
    """Return the midpoints of equal parts of 0.1 … 1, scaled by the decade's power of ten.

    Computed in float32 throughout, as bitsandbytes does: rounding once from float64 would change
    the last bit of a third of them.
    """
    # Rounded once from float64, 72 and 100 of the entries would differ in the last bit
    # (test_the_512_entries_equal_bitsandbytes_0_50_2).
    edges = torch.linspace(0.1, 1, parts + 1, dtype=torch.float32)
    return (edges[:-1] + edges[1:]) / 2 * 10 ** (decade - _DECADES + 1)


# ------------------------------------------------------------------ nearest entry


@torch.no_grad()
def nearest_code(x: Tensor, codebook: Tensor) -> Tensor:
    """Return the index (uint8) of the codebook entry nearest to each element of `x` (float32).

    Ties go to the lower index. Exact to the last bit: the thresholds are float64 midpoints rounded
    down to float32, and no float32 lies between a midpoint and its threshold.
    """
    return ThresholdTables.of(codebook, "nearest").count_below(x)


class _Thresholds:
    """Count the thresholds below a value with one lookup and one comparison, not eight comparisons.

    The upper 16 bits of a float32 are its sign, exponent and 7 mantissa bits. Values that share
    them form a short interval. A table of 2¹⁶ entries stores the count at each interval's lower
    end. An interval contains at most one threshold, so comparing with the next threshold finishes
    the count.
    """

    def __init__(self, thresholds: Tensor):
        ends = _interval_ends(thresholds.device)  # (2, 2¹⁶)
        low, high = torch.searchsorted(thresholds, ends, out_int32=True)
        is_too_close = (high - low).max() > 1
        if has_values(thresholds) and is_too_close:
            raise ValueError(
                "got a codebook with entries closer than 1/128 of their size; give fewer or wider "
                "spaced entries"
            )
        self.count_at_low_end = low.to(torch.uint8)
        self.next = torch.cat([thresholds, thresholds.new_full((1,), math.inf)])

    def count_below(self, x: Tensor) -> Tensor:
        """Return uint8 counts in the shape of `x` (float32)."""
        flat = x.reshape(-1)
        upper_bits = flat.view(torch.int32).bitwise_right_shift(16).bitwise_and_(0xFFFF)
        count = self.count_at_low_end.index_select(0, upper_bits)
        count += self.next.index_select(0, count.int()).lt_(flat).bool()  # adds 0 or 1
        return count.view(x.shape)


def _interval_ends(device: torch.device) -> Tensor:
    """Return float32 (2, 2¹⁶): the smallest and the largest value with the same upper 16 bits."""
    upper = torch.arange(2**16, device=device, dtype=torch.int32) << 16
    ends = torch.stack([upper, upper | 0xFFFF])
    return torch.where(upper < 0, ends.flip(0), ends).view(torch.float32)


def thresholds(codebook: Tensor) -> Tensor:
    """Return the thresholds between nearest entries: float64 midpoints, rounded down."""
    exact = codebook.double()
    return _float32_down((exact[:-1] + exact[1:]) / 2)


def _interior_entries(codebook: Tensor) -> Tensor:
    """Return the thresholds for the entry below a value: all entries but the ends."""
    return codebook[1:-1].clone()


class ThresholdTables:
    """Cache of threshold tables per codebook and kind, built on first use."""

    _cache = WeakTensorKeyDictionary()  # 131 KiB per kind, freed with the codebook
    _make_thresholds: ClassVar = {"nearest": thresholds, "below": _interior_entries}

    @classmethod
    def knows(cls, codebook: Tensor) -> bool:
        return codebook in cls._cache

    @classmethod
    def of(cls, codebook: Tensor, kind: str) -> _Thresholds:
        tables = cls._cache.setdefault(codebook, {})
        if kind not in tables:
            tables[kind] = _Thresholds(cls._make_thresholds[kind](codebook))
        return tables[kind]


def _float32_down(x: Tensor) -> Tensor:
    """Return the largest float32 at or below each float64."""
    nearest = x.float()
    down = torch.nextafter(nearest, torch.full_like(nearest, -math.inf))
    return torch.where(nearest.double() > x, down, nearest)
