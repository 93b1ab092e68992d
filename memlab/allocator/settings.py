"""The allocator's settings, as fields or parsed from PYTORCH_ALLOC_CONF."""

import os
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from memlab.allocator.sizes import LARGE_REQUEST_BYTES, LARGE_SEGMENT_BYTES, MIB, POWERS
from memlab.units import format_bytes

UNLIMITED_BYTES = 2**50  # more than any card has
SHARES = ("garbage_collection_threshold", "memory_fraction")  # fractions of device memory
# In this order (CUDAAllocatorConfig.h); see test_the_environment_is_read_as_torch_reads_it.
VARIABLES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")  # torch reads the first one set

# Options of PYTORCH_ALLOC_CONF that do not affect the simulation.
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
    """The allocator's settings and the device it runs on.

    `capacity_bytes` is the device's total memory (None: unlimited). `occupied_bytes` is used by
    the context, the driver and other processes. `memory_fraction` and
    `garbage_collection_threshold` are fractions of the capacity. `roundup_power2_divisions` is one
    integer, or 16 for sizes from 1 MiB (and below), 2 MiB, … to 32 GiB (and above).
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
        """Parse a PYTORCH_ALLOC_CONF such as
        `"max_split_size_mb:128,expandable_segments:True"`; `others` sets further fields.

        Raise ValueError for an unknown option or a value that torch would reject.
        """
        known = dict(_options(configuration))
        return cls(**{**_fields(known), **others})

    @property
    def fraction_bytes(self) -> int:
        """The bytes that this process may reserve."""
        return int(self.memory_fraction * self.card_bytes)

    @property
    def driver_bytes(self) -> int:
        """The bytes that the driver can provide."""
        return self.card_bytes - self.occupied_bytes

    @property
    def card_bytes(self) -> int:
        """The device's total memory."""
        return UNLIMITED_BYTES if self.capacity_bytes is None else self.capacity_bytes

    def _check_segments(self) -> None:
        if self.large_segment_bytes <= LARGE_REQUEST_BYTES:
            raise ValueError(
                f"large_segment_bytes is {self.large_segment_bytes}; "
                f"it must be more than 10 MiB, the largest request served from such a segment"
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
            raise ValueError(f"garbage_collection_threshold is {threshold}; give a value in (0, 1)")
        if not 0 <= self.memory_fraction <= 1:
            raise ValueError(f"memory_fraction is {self.memory_fraction}; give a value in [0, 1]")

    def _check_divisions(self) -> None:
        divisions = self.roundup_power2_divisions
        several = divisions if isinstance(divisions, tuple) else (divisions or 0,)
        if len(several) not in (1, len(POWERS)) or any(n & (n - 1) for n in several):
            raise ValueError(
                f"roundup_power2_divisions is {divisions}; give a power of two, or 16 of them "
                f"(or 0), one for each of the sizes 1 MiB, 2 MiB, … 32 GiB"
            )

    def check_capacity(self) -> None:
        """Raise ValueError if a fraction is set without a capacity."""
        for name, unset in (("garbage_collection_threshold", None), ("memory_fraction", 1.0)):
            if self.capacity_bytes is None and getattr(self, name) != unset:
                raise ValueError(
                    f"{name} is a fraction of the device's memory; give capacity_bytes too"
                )


def variable_set() -> str | None:
    """Return the environment variable that torch reads, None if neither is set."""
    return next((name for name in VARIABLES if name in os.environ), None)


def configuration() -> str:
    """Return the allocator's configuration from this process's environment, "" if there is none.

    Raise ValueError for settings that torch would reject, and for settings not simulated.
    """
    name = variable_set()
    if name is None:
        return ""
    try:
        Settings.parse(os.environ[name], capacity_bytes=UNLIMITED_BYTES)
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from error
    return os.environ[name]


def fields_in(configuration: str) -> dict[str, Any]:
    """Return the fields set by a PYTORCH_ALLOC_CONF. Skip options without a field."""
    return _fields({n: v for n, v in _options(configuration) if n in _OPTIONS})


def _options(configuration: str) -> Iterator[tuple[str, str]]:
    """Yield (name, value) of each option. Commas inside brackets do not separate options."""
    text = re.sub(r"\s", "", configuration)
    for option in re.split(r",(?![^\[]*\])", text.removesuffix(",")) if text else ():
        name, colon, value = option.partition(":")
        if not colon or not value:
            raise ValueError(f"got {option!r} in {configuration!r}; options look like name:value")
        yield name, value


def _fields(options: Mapping[str, str]) -> dict[str, Any]:
    """Convert options of PYTORCH_ALLOC_CONF to fields of Settings."""
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
            raise ValueError(f"got {name}:{value}, which is not simulated; use one of {known}")
    return found


def _parse_mebibytes(text: str) -> int:
    return int(text) * MIB


def _parse_bool(text: str) -> bool:
    return {"True": True, "False": False}[text]


def _divisions(text: str) -> int | tuple[int, ...]:
    """Parse one integer, or a list such as `[256:1,512:2,>:4]`: divisions by size in MiB.

    The first pair also applies to all smaller sizes. `>` applies to all sizes above the previous
    pair's.
    """
    if not text.startswith("["):
        if int(text) == 0:
            raise ValueError("0 divisions are allowed only for individual sizes")
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
        raise ValueError(f"{power_of_two} is not a power of two")
    return power_of_two.bit_length() - 1


_OPTIONS: dict[str, tuple[str, Callable[[str], Any]]] = {
    "max_split_size_mb": ("max_split_size_bytes", _parse_mebibytes),
    "max_non_split_rounding_mb": ("max_non_split_rounding_bytes", _parse_mebibytes),
    "expandable_segments": ("expandable_segments", _parse_bool),
    "roundup_power2_divisions": ("roundup_power2_divisions", _divisions),
    "garbage_collection_threshold": ("garbage_collection_threshold", float),
    "large_segment_size_mb": ("large_segment_bytes", _parse_mebibytes),
    "per_process_memory_fraction": ("memory_fraction", float),
}
_WANTED = {
    _parse_mebibytes: "give an integer number of MiB",
    _parse_bool: "give True or False",
    _divisions: "give a power of two, or powers by size in MiB, such as [256:1,512:2,>:4]",
    float: "give a number between 0 and 1",
}
