"""Fake devices, with counters moved by hand."""

from typing import Any

import torch

GIB = 2**30


class FakeAllocator:
    """A caching allocator's counters, in the place of torch.cuda's or torch.xpu's functions."""

    def __init__(self, capacity: int = 24 * GIB) -> None:
        self.capacity = capacity
        self.allocated = self.peak = self.reserved = 0
        self.retries = self.ooms = self.resets = self.calls = 0
        self.snapshots: list[str] = []
        self.recording: tuple[Any, ...] | None = None

    def allocate(self, num_bytes: int) -> None:
        self.allocated += num_bytes
        self.peak = max(self.peak, self.allocated)
        self.reserved = max(self.reserved, self.allocated)

    def free(self, num_bytes: int) -> None:
        self.allocated -= num_bytes

    def step(self, activations: int, kept: int = 0) -> None:
        """A training step that leaves `kept` bytes behind."""
        self.allocate(activations + kept)
        self.free(activations)

    def stats(self, device: Any = None) -> dict[str, Any]:
        return {
            "allocated_bytes": {"all": {"current": self.allocated, "peak": self.peak}},
            "reserved_bytes": {"all": {"current": self.reserved, "peak": self.reserved}},
            "num_alloc_retries": self.retries,
            "num_ooms": self.ooms,
        }

    def flat_stats(self, device: Any = None) -> dict[str, int]:
        return {
            "allocated_bytes.all.current": self.allocated,
            "allocated_bytes.all.peak": self.peak,
            "reserved_bytes.all.current": self.reserved,
        }

    def reset(self, device: Any = None) -> None:
        self.resets += 1
        self.peak = self.allocated

    def mem_get_info(self, device: Any = None) -> tuple[int, int]:
        return self.capacity - self.reserved, self.capacity

    def dump(self, path: str) -> None:
        self.snapshots.append(path)
        with open(path, "wb") as file:
            file.write(b"snapshot")

    def record(self, enabled: str | None, **settings: Any) -> None:
        self.recording = None if enabled is None else (enabled, settings)

    def install(self, monkeypatch: Any, name: str = "cuda") -> "FakeAllocator":
        module = getattr(torch, name)
        monkeypatch.setattr(module, "memory_stats_as_nested_dict", self.stats)
        monkeypatch.setattr(module, "reset_peak_memory_stats", self.reset)
        monkeypatch.setattr(module, "mem_get_info", self.mem_get_info)
        monkeypatch.setattr(module.memory, "_dump_snapshot", self.dump)
        monkeypatch.setattr(module.memory, "_record_memory_history", self.record)
        return self
