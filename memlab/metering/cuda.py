"""CUDA, and ROCm under the same names: the allocator's own history, which is the truth.

torch's caching allocator can record every block that it hands out and takes back. Two things are
missing in that record, and both can be had:

1. Whose a block is. An address is used again and again, so it says little by itself. But every
   entry carries a text of ours, set before each operator: how many storages the meter had
   numbered by then, and which operator was about to run. A storage that got number 17 at an
   address lies in the last block allocated there before the text said 17.
2. How large it is. The record says what was asked for; what was handed out is rounded up to
   512 bytes, and is the whole free block if too little of it would remain (1 MiB, for requests
   above 1 MiB). Which blocks were free is known at the start; from there it is followed.
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
from memlab.metering.answers import Accelerator, AllocatorWatch, Answers, Block, Entry, Mark
from memlab.metering.registry import REGISTRY

GRANULARITY = 512
_SMALL = 2**20  # the largest request that the small pool serves

INCOMPLETE = (
    "somebody else records the allocator's history and keeps too little of it: scratch and "
    "rounding are estimated"
)

_text = functools.cache(str)  # of operators, which are few


class Cuda(Accelerator):
    """The functions of torch that a CudaWatch calls."""

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
        return ("used is what nvidia-smi shows: all processes, and what each takes to run at all",)

    def current_index(self) -> int:
        return torch.cuda.current_device()

    def keeps_history(self) -> bool:
        """Only torch's own allocator does, not the driver's asynchronous or a user's."""
        return torch.cuda.get_allocator_backend() == "native"

    def is_recording(self) -> bool:
        return cuda_history_is_on()

    def record(self, on: bool) -> None:
        record_cuda_history(on)

    def snapshot(self) -> dict[str, Any]:
        return cuda_snapshot()

    def set_mark(self, text: str) -> None:
        set_cuda_metadata(text)


class CudaWatch(AllocatorWatch):
    """Records the allocator's history beside its counts.

    A history that somebody else is recording goes on, and is used from here.
    """

    granularity = GRANULARITY

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
            self._torch.set_mark(str(Mark(REGISTRY.count)))
            self._at_start = self._torch.snapshot()

    def mark(self, operator: Any, phase: str, module: str) -> None:
        """Have every entry say, from now on, what is about to run."""
        self._torch.set_mark(str(Mark(REGISTRY.count, phase, _text(operator), module)))

    def stop(self) -> Answers:
        answers = super().stop()
        if not self._torch.keeps_history():
            return answers
        at_end = self._torch.snapshot()
        self._torch.set_mark("")
        if self._starts_recording:
            self._torch.record(on=False)
        entries = self._entries(at_end)[len(self._entries(self._at_start)) :]
        blocks = Blocks(self._at_start, self.device.index)
        history = tuple(read(entries, blocks))
        if blocks.in_use.keys() != Blocks(at_end, self.device.index).in_use.keys():
            return replace(answers, notes=(*answers.notes, INCOMPLETE))
        at_start = allocated(self._at_start, self.device.index)
        return replace(answers, history=history, blocks_at_start=at_start)

    def _entries(self, snapshot: Mapping[str, Any]) -> list[dict[str, Any]]:
        return snapshot["device_traces"][self.device.index]


# ------------------------------------------------------------------ reading the history


def read(entries: Iterable[Mapping[str, Any]], blocks: "Blocks") -> Iterator[Entry]:
    """The blocks handed out and taken back, with what they took and what was about to run."""
    mark = Mark()
    for entry in entries:
        action, address, size = entry["action"], entry.get("addr"), entry["size"]
        mark = _latest(mark, entry.get("user_metadata", ""))
        if action == "alloc":
            yield Entry(False, address, blocks.allocate(address, size), mark)
        elif action == "free_requested":
            yield Entry(
                True, address, blocks.in_use.get(address, Block(size, _rounded(size))), mark
            )
        elif action == "free_completed":
            blocks.free(address)
        elif action in ("segment_alloc", "segment_map"):
            blocks.add_segment(address, size, merges=action == "segment_map")
        elif action in ("segment_free", "segment_unmap"):
            blocks.remove_segment(address, size)


def _latest(known: Mark, text: str) -> Mark:
    """The mark that `text` is. Each thread has a text of its own, and an idle thread's is old."""
    seen, *words = text.split("|", 3)
    if len(words) != 3 or not seen.isdigit() or int(seen) < known.seen:
        return known
    return Mark(int(seen), *words)


def allocated(snapshot: Mapping[str, Any], index: int) -> dict[int, Block]:
    """The blocks handed out on the device with this index, by address."""
    return {
        block["address"]: Block(block["requested_size"], block["size"])
        for segment in snapshot["segments"]
        for block in segment["blocks"]
        if segment["device"] == index and block["state"] == "active_allocated"
    }


class Blocks:
    """The allocator's blocks, in use and free, as its history leads from one state to the next."""

    def __init__(self, snapshot: Mapping[str, Any], index: int) -> None:
        settings = snapshot.get("allocator_settings", {})
        self._expandable = settings.get("expandable_segments", False)
        self._unsplit_from = settings.get("max_split_size", -1)  # -1: there is no such size
        self.in_use: dict[int, Block] = {}  # by address
        self._end: dict[int, int] = {}  # of each free block, by its start …
        self._start: dict[int, int] = {}  # … and the other way round
        self._segments: set[int] = set()  # where one starts, so that no block reaches across
        for segment in snapshot["segments"]:
            if segment["device"] == index:
                self._add_known(segment)

    def allocate(self, address: int, asked: int) -> Block:
        """Hand out the free block at this address, or its beginning."""
        taken = _rounded(asked)
        end = self._end.get(address, 0)
        if end >= address + taken:
            self._remove(address)
            if self._splits(taken, end - address - taken):
                self._add(address + taken, end)
            else:
                taken = end - address
        self.in_use[address] = Block(asked, taken)
        return self.in_use[address]

    def free(self, address: int) -> None:
        """Take a block back, and merge it with the free ones beside it."""
        if address in self.in_use:
            self._add(address, address + self.in_use.pop(address).taken)

    def add_segment(self, address: int, size: int, merges: bool) -> None:
        """Take memory from the driver; `merges` where it continues an expandable segment."""
        if not merges:
            self._segments.add(address)
        self._add(address, address + size)

    def remove_segment(self, address: int, size: int) -> None:
        """Give memory back to the driver: a whole segment, or part of an expandable one."""
        self._segments.discard(address)
        for start, end in list(self._end.items()):
            if start <= address < end:
                self._remove(start)
                self._add(start, address)
                self._add(address + size, end)

    def _splits(self, size: int, rest: int) -> bool:
        if size <= _SMALL or self._expandable:
            return rest >= GRANULARITY
        return rest > _SMALL and not 0 <= self._unsplit_from <= size

    def _add_known(self, segment: Mapping[str, Any]) -> None:
        if not segment.get("is_expandable", False):
            self._segments.add(segment["address"])
        for block in segment["blocks"]:
            if block["state"] == "inactive":
                self._add(block["address"], block["address"] + block["size"])
            else:  # handed out, or taken back while another stream still uses it
                self.in_use[block["address"]] = Block(block["requested_size"], block["size"])

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
