"""Write the allocator's snapshot at an out-of-memory error, and explain it.

torch calls an observer before it raises the error, while every tensor is still alive. Afterwards
the exception frees what only the failed call held. torch cannot detach an observer, so one is
attached for the whole process, and it calls the monitors that run.
"""

import importlib
import os
import subprocess
import sys
import traceback
import weakref
from collections.abc import Callable
from pathlib import Path

import torch

from memlab.internals.torch_internals import (
    attach_oom_observer,
    cuda_history_is_on,
    dump_snapshot,
    has_snapshots,
    record_allocations,
    stop_recording_allocations,
)
from memlab.units import format_bytes

MAX_ENTRIES = 100_000  # of the history
EXPLAIN = (sys.executable, "-m", "memlab", "explain")
EXPLAIN_TEXT = (
    *(sys.executable, "-c"),
    "import sys, memlab; print(memlab.explain(sys.stdin.read()))",
)
EXPLAIN_SECONDS = 60
_MESSAGES = ("out of memory", "can't allocate memory", "not enough memory")


class OomWatch:
    """Write a snapshot at an out-of-memory error of `device`; of any device if it is None.

    `describe(device)` describes the steps before.
    """

    def __init__(
        self,
        folder: str | os.PathLike[str],
        device: torch.device | None,
        max_entries: int | None,
        describe: Callable[[torch.device], str],
    ) -> None:
        self.device = device
        self.next_step = 1
        self.requested: str | None = None  # what the failed allocation asked for
        self.path: Path | None = None  # the newest snapshot
        self._folder, self._describe = folder, describe
        self._max_entries = max_entries  # of the history; None records none
        self._failed_step: int | None = None
        self._recorded_type: str | None = None
        _watches.add(self)
        if not _attached:
            _attached.append(True)
            attach_oom_observer(_on_oom)

    def start(self) -> None:
        """Record the stacks of allocations, unless a recording already runs."""
        _watches.add(self)
        if self._max_entries is None or self._recorded_type is not None:
            return
        device = self.device or torch.accelerator.current_accelerator(check_available=True)
        if device is None or not has_snapshots(device.type):
            return
        if device.type == "cuda" and cuda_history_is_on():
            return
        record_allocations(device.type, self._max_entries)
        self._recorded_type = device.type

    def stop(self) -> None:
        _watches.discard(self)
        if self._recorded_type is not None:
            stop_recording_allocations(self._recorded_type)
            self._recorded_type = None

    def on_oom(self, device_index: int, requested: int, total: int, free: int) -> None:
        """Write the snapshot while every tensor is still alive; one for each step."""
        if self.device is not None and (
            self.device.type != "cuda" or self.device.index not in (None, device_index)
        ):
            return
        if self._failed_step == self.next_step:
            return
        self._failed_step = self.next_step
        self.requested = (
            f"{format_bytes(requested)}, with {format_bytes(free)} free of {format_bytes(total)}"
        )
        device = torch.device("cuda", device_index)
        note = self.dump(device, "oom", self.next_step)
        say(f"{self._describe(device)}{note}")

    def has_seen_this_step(self) -> bool:
        return self._failed_step == self.next_step

    def dump(self, device: torch.device, reason: str, step: int) -> str:
        """Write a snapshot, and return a sentence about it for a message."""
        if not has_snapshots(device.type):
            return ""
        path, self.path = snapshot_path(self._folder, reason, step), None
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            dump_snapshot(device.type, str(path))
        except Exception as error:  # it must not hide the memory error
            return f"\n  snapshot    failed ({type(error).__name__}: {error})"
        self.path = path
        return f"\n  snapshot    {path}"


_watches: "weakref.WeakSet[OomWatch]" = weakref.WeakSet()
_attached: list[bool] = []


def _on_oom(device_index: int, requested: int, total: int, free: int) -> None:
    for watch in list(_watches):
        watch.on_oom(device_index, requested, total, free)


def is_oom(error: BaseException | None) -> bool:
    """Return whether the exception is a device's or the CPU's out-of-memory error."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    return isinstance(error, RuntimeError) and any(text in str(error) for text in _MESSAGES)


def snapshot_path(folder: str | os.PathLike[str], reason: str, step: int) -> Path:
    """Return a name for a snapshot; in a distributed run it contains the rank."""
    rank = os.environ.get("RANK")
    words = ("memlab", reason, *([f"rank{rank}"] if rank else []), f"step{step}")
    return Path(folder) / f"{'-'.join(words)}.pickle"


def explanation(path: Path | None, error: BaseException | None = None) -> str:
    """Return what `memlab explain FILE` prints, or name that command if that takes too long.

    Without a snapshot, the error's own text is explained. It runs as a process of its own: this one
    has just run out of memory.
    """
    log = "".join(traceback.format_exception(error)) if path is None and error else None
    advice = f"Run `memlab explain {path}` to see what filled the memory." if path else ""
    try:
        importlib.import_module("memlab.explain")  # not every version of memlab has it
        result = subprocess.run(
            EXPLAIN_TEXT if path is None else [*EXPLAIN, str(path)],
            input=log,
            capture_output=True,
            text=True,
            timeout=EXPLAIN_SECONDS,
        )
    except Exception:  # an explanation must not hide the memory error
        return advice
    return result.stdout.rstrip() if result.returncode == 0 else advice


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
