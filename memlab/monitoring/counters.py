"""Read a device's memory counters, without synchronizing and without allocating on the device.

    CUDA, ROCm, XPU    the caching allocator's statistics; its peak can be reset for each step
    MPS                Metal's and the allocator's bytes; a peak since torch 2.13
    CPU                the process's anonymous memory (resident pages without a file behind them);
                       on Linux its peak can be reset too

A reset affects the whole process: `torch.cuda.max_memory_allocated` and the VmHWM line of
/proc/self/status also start over.
"""

import contextlib
import importlib
import os
import re
import sys
from pathlib import Path
from typing import Any, NamedTuple

import torch


class Reading(NamedTuple):
    """The counters of one moment, in bytes."""

    allocated_bytes: int
    peak_bytes: int  # since the last reset
    reserved_bytes: int | None = None  # None: the device does not report it
    retries: int = 0  # how often the allocator emptied its cache and tried again
    ooms: int = 0  # how many out-of-memory errors it raised


class Counters:
    """The counters of one device."""

    counts = "tensors"  # what allocated_bytes is made of
    peak_is_exact = True  # False: a peak between two calls of `read` is missed
    smallest_leak_bytes = 2**20  # below this, growth is noise
    smallest_leak_share = 0.001  # of what is allocated

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def read(self) -> Reading:
        raise NotImplementedError

    def reset_peak(self) -> None:
        """Let the peak start over."""

    def capacity_bytes(self) -> int | None:
        """Return the most bytes that this process can have; None if unknown."""
        return None


class CachingAllocator(Counters):
    """CUDA, ROCm and XPU. The statistics are read as a nested dict, at a tenth of the time."""

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        self._torch = getattr(torch, device.type)

    def read(self) -> Reading:
        stats = self._torch.memory_stats_as_nested_dict(self.device)
        if not stats:  # the device has not been used yet
            return Reading(0, 0, 0)
        allocated = stats["allocated_bytes"]["all"]
        return Reading(
            allocated["current"],
            allocated["peak"],
            stats["reserved_bytes"]["all"]["current"],
            stats.get("num_alloc_retries", 0),
            stats.get("num_ooms", 0),
        )

    def reset_peak(self) -> None:
        self._torch.reset_peak_memory_stats(self.device)

    def capacity_bytes(self) -> int | None:
        """Return free and reserved bytes; contexts and other processes have the rest."""
        with contextlib.suppress(RuntimeError):  # some drivers do not report free memory
            free, _ = self._torch.mem_get_info(self.device)
            return free + (self.read().reserved_bytes or 0)
        return None


class Accelerator(Counters):
    """Other accelerators, through `torch.accelerator`."""

    def read(self) -> Reading:
        stats = torch.accelerator.memory_stats(self.device)
        allocated = stats.get("allocated_bytes.all.current", 0)
        return Reading(
            allocated,
            stats.get("allocated_bytes.all.peak", allocated),
            stats.get("reserved_bytes.all.current"),
            stats.get("num_alloc_retries", 0),
            stats.get("num_ooms", 0),
        )

    def reset_peak(self) -> None:
        torch.accelerator.reset_peak_memory_stats(self.device)


class Mps(Accelerator):
    """Apple's GPUs. The reserved bytes are what Metal holds for this process."""

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        self.peak_is_exact = self._has_peak()

    def _has_peak(self) -> bool:
        """Return whether torch counts a peak; before 2.13 it raised RuntimeError."""
        with contextlib.suppress(RuntimeError):
            return bool(torch.accelerator.memory_stats(self.device).get(_PEAK))
        return False

    def read(self) -> Reading:
        allocated = torch.mps.current_allocated_memory()
        peak = torch.accelerator.memory_stats(self.device)[_PEAK] if self.peak_is_exact else 0
        return Reading(allocated, max(peak, allocated), torch.mps.driver_allocated_memory())

    def reset_peak(self) -> None:
        if self.peak_is_exact:
            super().reset_peak()

    def capacity_bytes(self) -> int | None:
        return torch.mps.recommended_max_memory()


_PEAK = "allocated_bytes.all.peak"


# ------------------------------------------------------------------ CPU


class LinuxProcess(Counters):
    """This process's anonymous memory, from /proc. Mapped files do not count.

    The kernel's peak counts them. So the files resident after the step are subtracted from it.
    """

    counts = "process memory"
    smallest_leak_bytes = 32 * 2**20  # malloc keeps some of the freed memory
    smallest_leak_share = 0.01

    def __init__(self, device: torch.device, folder: Path = Path("/proc/self")) -> None:
        super().__init__(device)
        self._statm, self._status, self._clear = (
            str(folder / name) for name in ("statm", "status", "clear_refs")
        )
        self._page_bytes = os.sysconf("SC_PAGE_SIZE")

    def read(self) -> Reading:
        _, resident, shared, *_ = map(int, _contents(self._statm).split())
        anonymous = (resident - shared) * self._page_bytes
        found = re.search(rb"VmHWM:\s+(\d+) kB", _contents(self._status))
        highest = 1024 * int(found[1]) - shared * self._page_bytes if found else 0
        return Reading(anonymous, max(highest, anonymous))

    def reset_peak(self) -> None:
        with contextlib.suppress(OSError):  # a kernel without it: the peak is the process's
            # Writing 5 starts `VmHWM` over; writing and reading take about 20 µs together.
            _write(self._clear, b"5")

    def capacity_bytes(self) -> int | None:
        return min([_physical_bytes(), *_control_group_limits()])


class Process(Counters):
    """This process's resident memory, through psutil, or else the highest value so far."""

    counts = "process memory"
    peak_is_exact = False
    smallest_leak_bytes = LinuxProcess.smallest_leak_bytes
    smallest_leak_share = LinuxProcess.smallest_leak_share

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        self._process: Any = None
        with contextlib.suppress(ImportError):
            self._process = importlib.import_module("psutil").Process()

    def read(self) -> Reading:
        if self._process is not None:
            resident = self._process.memory_info().rss
            return Reading(resident, resident)
        highest = _highest_resident_bytes()
        return Reading(highest, highest)


def _highest_resident_bytes() -> int:
    """Return the most resident bytes of this process so far; 0 on Windows."""
    try:
        import resource
    except ImportError:
        return 0
    highest = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return highest if sys.platform == "darwin" else 1024 * highest


def _physical_bytes() -> int:
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def _control_group_limits() -> list[int]:
    """Return the memory limit of this process's container, if it has one."""
    with contextlib.suppress(OSError, ValueError):
        return [int(Path("/sys/fs/cgroup/memory.max").read_text(encoding="ascii"))]
    return []


def _contents(path: str) -> bytes:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        return os.read(descriptor, 8192)
    finally:
        os.close(descriptor)


def _write(path: str, text: bytes) -> None:
    descriptor = os.open(path, os.O_WRONLY)
    try:
        os.write(descriptor, text)
    finally:
        os.close(descriptor)


# ------------------------------------------------------------------ which device


def counters_for(device: torch.device) -> Counters:
    if device.type in ("cuda", "xpu"):
        return CachingAllocator(device)
    if device.type == "mps":
        return Mps(device)
    if device.type == "cpu":
        return LinuxProcess(device) if Path("/proc/self/statm").exists() else Process(device)
    return Accelerator(device)


def device_in_use(optimizer: torch.optim.Optimizer | None = None) -> torch.device:
    """Return the device of the optimizer's parameters, or else the current accelerator if used."""
    if optimizer is not None:
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                return parameter.device
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if accelerator is None or not _is_started(accelerator.type):
        return torch.device("cpu")
    return torch.device(accelerator.type, torch.accelerator.current_device_index())


def _is_started(device_type: str) -> bool:
    """Return whether the process has used the device; asking must not start it."""
    is_initialized = getattr(getattr(torch, device_type, None), "is_initialized", None)
    return is_initialized is None or is_initialized()
