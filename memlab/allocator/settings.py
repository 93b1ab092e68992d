"""What a user can tell the allocator: as fields, or in the words of PYTORCH_ALLOC_CONF."""

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from memlab.allocator.sizes import LARGE_REQUEST_BYTES, LARGE_SEGMENT_BYTES, MIB, POWERS
from memlab.units import format_bytes

UNLIMITED_BYTES = 2**50  # more than any card has

# Options of PYTORCH_ALLOC_CONF that decide nothing that is simulated here.
_WITHOUT_EFFECT = {
    "backend",
    "graph_capture_record_stream_reuse",
    "pinned_max_cached_size_mb",
    "pinned_max_round_threshold_mb",
    "pinned_num_register_threads",
    "pinned_reserve_segment_size_mb",
    "pinned_use_background_threads",
    "pinned_use_cuda_host_register",
    "pinned_use_hip_host_register",
    "release_lock_on_cudamalloc",
    "release_lock_on_hipmalloc",
    "throw_on_cudamalloc_oom",
}


@dataclass(frozen=True)
class Settings:
    """What a user can tell the allocator, and the card that it works on.

    `capacity_bytes` is all memory of the card (None: no end to it), `occupied_bytes` what others
    hold of it: the context, the driver, other processes. `memory_fraction` and
    `garbage_collection_threshold` are shares of the capacity. `roundup_power2_divisions` is one
    number, or 16: for sizes from 1 MiB (and below), 2 MiB, … 32 GiB (and above).
    """

    max_split_size_bytes: int | None = None
    max_non_split_rounding_bytes: int | None = None  # None: as large_segment_bytes
    expandable_segments: bool = False
    roundup_power2_divisions: int | tuple[int, ...] | None = None
    garbage_collection_threshold: float | None = None
    large_segment_bytes: int = LARGE_SEGMENT_BYTES
    memory_fraction: float = 1.0
    capacity_bytes: int | None = None
    occupied_bytes: int = 0

    def __post_init__(self) -> None:
        self._check_segments()
        self._check_shares()
        self._check_divisions()

    @classmethod
    def parse(cls, configuration: str, **others: Any) -> "Settings":
        """The settings of a PYTORCH_ALLOC_CONF, such as
        `"max_split_size_mb:128,expandable_segments:True"`; `others` are fields it has no word for.

        Raises ValueError for an option that is not known here, and for a value that torch would
        refuse.
        """
        known = dict(_options(configuration))
        return cls(**{**_fields(known), **others})

    @property
    def fraction_bytes(self) -> int:
        """What this process may reserve."""
        return int(self.memory_fraction * self.card_bytes)

    @property
    def driver_bytes(self) -> int:
        """What the driver has to give."""
        return self.card_bytes - self.occupied_bytes

    @property
    def card_bytes(self) -> int:
        """All memory of the card."""
        return UNLIMITED_BYTES if self.capacity_bytes is None else self.capacity_bytes

    def _check_segments(self) -> None:
        if self.large_segment_bytes <= LARGE_REQUEST_BYTES:
            raise ValueError(
                f"large_segment_bytes is {self.large_segment_bytes}; "
                f"it must be more than 10 MiB, the largest request that such a segment serves"
            )
        for name in ("max_split_size_bytes", "max_non_split_rounding_bytes"):
            size = getattr(self, name)
            if size is not None and size < self.large_segment_bytes:
                raise ValueError(
                    f"{name} is {format_bytes(size)}; it must be at least large_segment_bytes, "
                    f"{format_bytes(self.large_segment_bytes)}"
                )

    def _check_shares(self) -> None:
        threshold = self.garbage_collection_threshold
        if threshold is not None and not 0 < threshold < 1:
            raise ValueError(f"garbage_collection_threshold is {threshold}; give one in (0, 1)")
        if not 0 <= self.memory_fraction <= 1:
            raise ValueError(f"memory_fraction is {self.memory_fraction}; give one in [0, 1]")

    def _check_divisions(self) -> None:
        divisions = self.roundup_power2_divisions
        several = divisions if isinstance(divisions, tuple) else (divisions or 0,)
        if len(several) not in (1, len(POWERS)) or any(n & (n - 1) for n in several):
            raise ValueError(
                f"roundup_power2_divisions is {divisions}; give a power of two, or 16 of them "
                f"(or 0), one for each of the sizes 1 MiB, 2 MiB, … 32 GiB"
            )

    def check_capacity(self) -> None:
        """Raises ValueError where a share is given and nothing that it is a share of."""
        for name, unset in (("garbage_collection_threshold", None), ("memory_fraction", 1.0)):
            if self.capacity_bytes is None and getattr(self, name) != unset:
                raise ValueError(f"{name} is a share of the card's memory; give capacity_bytes too")


def fields_in(configuration: str) -> dict[str, Any]:
    """The fields that a PYTORCH_ALLOC_CONF sets; an option that is not simulated is left out."""
    return _fields({n: v for n, v in _options(configuration) if n in _OPTIONS})


def _options(configuration: str) -> Iterator[tuple[str, str]]:
    """(name, value) of each option; commas inside brackets part nothing."""
    text = re.sub(r"\s", "", configuration)
    for option in re.split(r",(?![^\[]*\])", text.removesuffix(",")) if text else ():
        name, colon, value = option.partition(":")
        if not colon or not value:
            raise ValueError(f"got {option!r} in {configuration!r}; options look like name:value")
        yield name, value


def _fields(options: Mapping[str, str]) -> dict[str, Any]:
    """The fields of Settings that options of PYTORCH_ALLOC_CONF stand for."""
    found: dict[str, Any] = {}
    for name, value in options.items():
        if name in _OPTIONS:
            field_name, read = _OPTIONS[name]
            try:
                found[field_name] = read(value)
            except (ValueError, KeyError) as error:
                raise ValueError(f"got {name}:{value}; {_WANTED[read]}") from error
        elif name not in _WITHOUT_EFFECT or (name, value) == ("backend", "cudaMallocAsync"):
            known = ", ".join(sorted(_OPTIONS))
            raise ValueError(f"got {name}:{value}, which is not simulated; known are {known}")
    return found


def _mebibytes(text: str) -> int:
    return int(text) * MIB


def _truth(text: str) -> bool:
    return {"True": True, "False": False}[text]


def _divisions(text: str) -> int | tuple[int, ...]:
    """One number, or `[256:1,512:2,>:4]`: for sizes from so many MiB, so many divisions.

    The first pair holds for all smaller sizes too, `>` for all above the pair before it.
    """
    if not text.startswith("["):
        if int(text) == 0:
            raise ValueError("0 divisions are only for some of the sizes")
        return int(text)
    divisions = [0 for _ in POWERS]
    last, is_first = 0, True
    for pair in text.strip("[]").split(","):
        size, number = pair.split(":")
        if size == ">":
            start, last = last + 1, POWERS[-1]
        else:
            last = min(_exponent(int(size)), POWERS[-1])
            start = 0 if is_first else last
        divisions[start : last + 1] = [int(number)] * (last + 1 - start)
        is_first = False
    return tuple(divisions)


def _exponent(power_of_two: int) -> int:
    if power_of_two <= 0 or power_of_two & (power_of_two - 1):
        raise ValueError(f"{power_of_two} is no power of two")
    return power_of_two.bit_length() - 1


_OPTIONS: dict[str, tuple[str, Callable[[str], Any]]] = {
    "max_split_size_mb": ("max_split_size_bytes", _mebibytes),
    "max_non_split_rounding_mb": ("max_non_split_rounding_bytes", _mebibytes),
    "expandable_segments": ("expandable_segments", _truth),
    "roundup_power2_divisions": ("roundup_power2_divisions", _divisions),
    "garbage_collection_threshold": ("garbage_collection_threshold", float),
    "large_segment_size_mb": ("large_segment_bytes", _mebibytes),
    "per_process_memory_fraction": ("memory_fraction", float),
}
_WANTED = {
    _mebibytes: "give a whole number of MiB",
    _truth: "give True or False",
    _divisions: "give a power of two, or powers by size in MiB, such as [256:1,512:2,>:4]",
    float: "give a number between 0 and 1",
}
