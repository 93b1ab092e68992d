"""Read the caching allocator's history on CUDA (and on ROCm, under the same names).

torch's caching allocator can record every allocation and free. The record lacks two facts, which
are reconstructed here:

1. The owner of a block. Addresses are reused, so an address alone does not identify a storage. But
   every entry carries a text that the meter sets before each operator: the number of the newest
   storage, and the operator. Storage 17 at an address lies in the last block that was
   allocated there before the text contained 17.
2. The size of a block. The record has the requested size. The allocator rounds it up to 512 bytes,
   and uses a whole free block if the remainder would be too small (up to 1 MiB, for requests above
   1 MiB). The free blocks are known at the start and tracked from there.
"""

import functools
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch

from memlab.internals.torch_internals import (
    cuda_history_is_on,
    cuda_snapshot,
    record_cuda_history,
    set_cuda_metadata,
)
from memlab.metering.device_stats import (
    Accelerator,
    AllocatorMonitor,
    BlockSize,
    DeviceStats,
    HistoryEntry,
    HistoryTag,
)
from memlab.metering.registry import REGISTRY

GRANULARITY = 512
_SMALL_POOL_LIMIT = 2**20  # the largest request in the small pool

INCOMPLETE = (
    "another recorder of the allocator's history keeps too few entries: workspace and rounding "
    "are estimated"
)

_text = functools.cache(str)  # names of operators


class Cuda(Accelerator):
    """The torch functions that a CudaMonitor calls."""

    def synchronize(self, device: torch.device) -> None:
        torch.cuda.synchronize(device)

    def reset_peak(self, device: torch.device) -> None:
        torch.cuda.reset_peak_memory_stats(device)

    def stats(self, device: torch.device) -> dict[str, Any]:
        return torch.cuda.memory_stats(device)

    def used_bytes(self, device: torch.device) -> int:
        free, total = torch.cuda.mem_get_info(device)
        return total - free

    def notes(self, device: torch.device) -> tuple[str, ...]:
        return ("used bytes are as in nvidia-smi: all processes, with their CUDA contexts",)

    def current_index(self) -> int:
        return torch.cuda.current_device()

    def keeps_history(self) -> bool:
        """Return whether the allocator records a history; only torch's native allocator does."""
        return torch.cuda.get_allocator_backend() == "native"

    def is_recording(self) -> bool:
        return cuda_history_is_on()

    def record(self, on: bool) -> None:
        record_cuda_history(on)

    def snapshot(self) -> dict[str, Any]:
        return cuda_snapshot()

    def set_tag(self, text: str) -> None:
        set_cuda_metadata(text)


class CudaMonitor(AllocatorMonitor):
    """Record the allocator's history besides its statistics.

    If a history is already being recorded, use it and leave it running.
    """

    granularity = GRANULARITY
    _torch: Cuda

    def __init__(self, device: torch.device, functions: Cuda | None = None) -> None:
        super().__init__(device, functions or Cuda())

    def start(self) -> None:
        super().start()
        if self.device.index is None:
            self.device = torch.device(self.device.type, self._torch.current_index())
        if self._torch.keeps_history():
            self._starts_recording = not self._torch.is_recording()
            if self._starts_recording:
                self._torch.record(on=True)
            self._torch.set_tag(str(HistoryTag(REGISTRY.last_number)))
            self._at_start = self._torch.snapshot()

    def tag(self, operator: Any, phase: str, module: str) -> None:
        """Tag the following history entries with the next operator."""
        self._torch.set_tag(str(HistoryTag(REGISTRY.last_number, phase, _text(operator), module)))

    def stop(self) -> DeviceStats:
        stats = super().stop()
        if not self._torch.keeps_history():
            return stats
        at_end = self._torch.snapshot()
        self._torch.set_tag("")
        if self._starts_recording:
            self._torch.record(on=False)
        entries = self._entries(at_end)[len(self._entries(self._at_start)) :]
        blocks = BlockTracker(self._at_start, self.device.index)
        history = tuple(read_history(entries, blocks))
        if blocks.in_use.keys() != BlockTracker(at_end, self.device.index).in_use.keys():
            return replace(stats, notes=(*stats.notes, INCOMPLETE))
        at_start = allocated_blocks(self._at_start, self.device.index)
        return replace(stats, history=history, blocks_at_start=at_start)

    def _entries(self, snapshot: Mapping[str, Any]) -> list[dict[str, Any]]:
        return snapshot["device_traces"][self.device.index]


# ------------------------------------------------------------------ reading the history


def read_history(
    entries: Iterable[Mapping[str, Any]], blocks: "BlockTracker"
) -> Iterator[HistoryEntry]:
    """Yield allocations and frees, with block sizes and the operator that was about to run."""
    tag = HistoryTag()
    for entry in entries:
        address: Any = entry.get("addr")
        action, size = entry["action"], entry["size"]
        tag = _newest_tag(tag, entry.get("user_metadata", ""))
        if action == "alloc":
            yield HistoryEntry(False, address, blocks.allocate(address, size), tag)
        elif action == "free_requested":
            yield HistoryEntry(
                True, address, blocks.in_use.get(address, BlockSize(size, _rounded(size))), tag
            )
        elif action == "free_completed":
            blocks.free(address)
        elif action in ("segment_alloc", "segment_map"):
            blocks.add_segment(address, size, merges=action == "segment_map")
        elif action in ("segment_free", "segment_unmap"):
            blocks.remove_segment(address, size)


def _newest_tag(known: HistoryTag, text: str) -> HistoryTag:
    """Parse the tag in `text`, or return `known` if `text` is older.

    Each thread has its own text, and an idle thread's text is out of date.
    """
    last_number, *words = text.split("|", 3)
    if len(words) != 3 or not last_number.isdigit() or int(last_number) < known.last_number:
        return known
    return HistoryTag(int(last_number), *words)


def allocated_blocks(snapshot: Mapping[str, Any], index: int) -> dict[int, BlockSize]:
    """Return the allocated blocks of the device with this index, by address."""
    return {
        block["address"]: BlockSize(block["requested_size"], block["size"])
        for segment in snapshot["segments"]
        for block in segment["blocks"]
        if segment["device"] == index and block["state"] == "active_allocated"
    }


class BlockTracker:
    """Track the allocator's used and free blocks through its history."""

    def __init__(self, snapshot: Mapping[str, Any], index: int) -> None:
        settings = snapshot.get("allocator_settings", {})
        self._expandable = settings.get("expandable_segments", False)
        self._unsplit_from = settings.get("max_split_size", -1)  # -1 means unlimited
        self.in_use: dict[int, BlockSize] = {}  # by address
        self._end: dict[int, int] = {}  # free blocks: start to end
        self._start: dict[int, int] = {}  # free blocks: end to start
        self._segments: set[int] = set()  # segment starts; blocks do not merge across them
        for segment in snapshot["segments"]:
            if segment["device"] == index:
                self._add_known(segment)

    def allocate(self, address: int, requested: int) -> BlockSize:
        """Allocate the free block at this address, or the front of it."""
        rounded = _rounded(requested)
        end = self._end.get(address, 0)
        if end >= address + rounded:
            self._remove(address)
            if self._splits(rounded, end - address - rounded):
                self._add(address + rounded, end)
            else:
                rounded = end - address
        self.in_use[address] = BlockSize(requested, rounded)
        return self.in_use[address]

    def free(self, address: int) -> None:
        """Free a block and merge it with free neighbours."""
        if address in self.in_use:
            self._add(address, address + self.in_use.pop(address).rounded)

    def add_segment(self, address: int, size: int, merges: bool) -> None:
        """Add memory from the driver; `merges` if it extends an expandable segment."""
        if not merges:
            self._segments.add(address)
        self._add(address, address + size)

    def remove_segment(self, address: int, size: int) -> None:
        """Return a segment to the driver, or part of an expandable segment."""
        self._segments.discard(address)
        for start, end in list(self._end.items()):
            if start <= address < end:
                self._remove(start)
                self._add(start, address)
                self._add(address + size, end)

    def _splits(self, size: int, rest: int) -> bool:
        if size <= _SMALL_POOL_LIMIT or self._expandable:
            return rest >= GRANULARITY
        return rest > _SMALL_POOL_LIMIT and not 0 <= self._unsplit_from <= size

    def _add_known(self, segment: Mapping[str, Any]) -> None:
        if not segment.get("is_expandable", False):
            self._segments.add(segment["address"])
        for block in segment["blocks"]:
            if block["state"] == "inactive":
                self._add(block["address"], block["address"] + block["size"])
            else:  # allocated, or freed while another CUDA stream still uses it
                self.in_use[block["address"]] = BlockSize(block["requested_size"], block["size"])

    def _add(self, start: int, end: int) -> None:
        if start == end or start in self._end or end in self._start:
            return
        if end in self._end and end not in self._segments:
            end = self._remove(end)
        if start in self._start and start not in self._segments:
            start = self._start[start]
            self._remove(start)
        self._end[start], self._start[end] = end, start

    def _remove(self, start: int) -> int:
        end = self._end.pop(start)
        del self._start[end]
        return end


def _rounded(size: int) -> int:
    return max(-(-size // GRANULARITY), 1) * GRANULARITY
