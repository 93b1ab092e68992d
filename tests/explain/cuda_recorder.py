"""Record a training script as CUDA would, without a GPU.

A dispatch mode sees every new storage, the simulated caching allocator serves it, and the history
becomes a snapshot in the format of `torch.cuda.memory._dump_snapshot`, with the script's own Python
frames. Allocations of backward have no Python frames, because on CUDA they come from autograd's
thread. With stacks="all", C++ frames as in public snapshots are around the Python frames. If
the simulated card is full, the mode raises torch's own error with torch's own message.
"""

import sys
import traceback
import weakref
from typing import Any

import default_stacks
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from memlab.allocator import Allocator, Settings, recording

ENGINE = "_engine_run_backward"
SKIPPED = (
    *("/torch/utils/_python_dispatch.py", "/torch/_ops.py"),
    *("/torch/_compile.py", "/torch/_dynamo/eval_frame.py", __file__),
)


class Recorder(TorchDispatchMode):
    """Records every storage created under it, on a card with `capacity` bytes."""

    def __init__(self, capacity: int | None = None, occupied: int = 0, *, stacks="python", **how):
        super().__init__()
        settings = Settings(capacity_bytes=capacity, occupied_bytes=occupied, **how)
        self.allocator = Allocator(settings, keeps_history=True)
        self.entries: list[dict[str, Any]] = []
        self.stacks = stacks
        self._known: dict[int, Any] = {}  # storages alive, by their C++ address
        self._frames: dict[int, list] = {}  # of blocks in use, by address

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **kwargs or {})
        for tensor in tree_leaves(result):
            if isinstance(tensor, torch.Tensor):
                self._see(tensor.untyped_storage(), func)
        return result

    def _see(self, storage, func) -> None:
        key = storage._cdata
        if key in self._known or not storage.nbytes():
            return
        frames = self._stack(func)
        block = self._allocate(storage.nbytes(), frames)
        self._known[key] = weakref.finalize(storage, self._free, key, block)

    def _allocate(self, size: int, frames: list) -> Any:
        block = self.allocator.malloc(size)
        if block is None:
            self._drain([])
            self._raise_out_of_memory(size, frames)
        self._frames[block.address] = frames
        self._drain(frames)
        return block

    def _free(self, key: int, block) -> None:
        del self._known[key]
        self._frames.pop(block.address, None)
        self.allocator.free(block)
        self._drain([])

    def _drain(self, frames: list) -> None:
        """Turn the allocator's new history into entries of a device trace."""
        new, self.allocator.history[:] = list(self.allocator.history), []
        for action, addr, size, stream in new:
            shown = frames if not action.startswith("free") else []
            entry = {"action": action, "addr": addr, "size": size, "stream": stream}
            self.entries.append({**entry, "time_us": len(self.entries), "frames": shown})

    def _stack(self, func) -> list[dict[str, Any]]:
        """Return the frames, innermost first, that CUDA would have recorded."""
        found = []
        frame = sys._getframe(2)
        while frame is not None and frame.f_code is not record.__code__:  # not the test runner's
            code = frame.f_code
            if code.co_name == ENGINE:
                break
            if not any(part in code.co_filename for part in SKIPPED):
                found.append((code.co_filename, frame.f_lineno, code.co_name))
            frame = frame.f_back
        if self.stacks == "python":
            return default_stacks.as_dicts(*found)
        op = str(func).removeprefix("aten.").removesuffix(".default").replace(".", "_")
        if frame is None or frame.f_code.co_name != ENGINE:
            return default_stacks.forward(*found, ops=(op,))
        node = torch._C._current_autograd_node()
        return default_stacks.backward(node.name().rpartition("::")[2], op, *found)

    def _raise_out_of_memory(self, size: int, frames: list) -> None:
        allocator, settings = self.allocator, self.allocator.settings
        free = settings.driver_bytes - allocator.reserved_bytes
        oom = {"action": "oom", "size": size, "stream": 0, "device_free": free, "frames": frames}
        self.entries.append({**oom, "time_us": len(self.entries)})
        card, reserved = settings.card_bytes, allocator.reserved_bytes
        allocated = allocator.allocated_bytes
        raise torch.OutOfMemoryError(
            f"CUDA out of memory. Tried to allocate {torch_bytes(size)}. GPU 0 has a total "
            f"capacity of {torch_bytes(card)} of which {torch_bytes(free)} is free. Including "
            f"non-PyTorch memory, this process has {torch_bytes(reserved)} memory in use. Of the "
            f"allocated memory {torch_bytes(allocated)} is allocated by PyTorch, and "
            f"{torch_bytes(reserved - allocated)} is reserved by PyTorch but unallocated. If "
            f"reserved but unallocated memory is large try setting "
            f"PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True to avoid fragmentation."
        )

    def snapshot(self, max_entries: int | None = None) -> dict[str, Any]:
        """Return what `torch.cuda.memory._snapshot()` would."""
        found = recording(self.allocator)
        segments = found["segments_at_end"]
        for segment in segments:
            segment["device"] = 0
            for block in segment["blocks"]:
                block["frames"] = self._frames.get(block["address"], [])
        entries = self.entries if max_entries is None else self.entries[-max_entries:]
        stated = found["allocator_settings"]
        return {"segments": segments, "device_traces": [entries], "allocator_settings": stated}


def torch_bytes(size: int) -> str:
    """Format bytes as torch's messages do."""
    for unit, factor in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if size >= factor:
            return f"{size / factor:.2f} {unit}"
    return f"{size} bytes"


def record(script, capacity: int | None = None, **how) -> tuple[dict[str, Any], str]:
    """Run a script on a card of `capacity` bytes. Return its snapshot and its log.

    The log is "" if the script did not run out of memory.
    """
    recorder, log = Recorder(capacity, **how), ""
    try:
        with recorder:
            script()
    except torch.OutOfMemoryError as error:
        frames = traceback.extract_tb(error.__traceback__)
        shown = [f for f in frames if not any(part in f.filename for part in SKIPPED)]
        log = f"Traceback (most recent call last):\n{''.join(traceback.format_list(shown))}"
        log += f"torch.OutOfMemoryError: {error}\n"
    return recorder.snapshot(), log


def peak_bytes(script) -> int:
    """Return the reserved peak of a script that has enough memory."""
    recorder = Recorder()
    with recorder:
        script()
    return recorder.allocator.reserved_peak_bytes
