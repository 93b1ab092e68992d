"""Export events in the format of PyTorch's memory viewer (pytorch.org/memory_viz).

The format is the result of `torch.cuda.memory._snapshot()`: a device trace lists what happened, and
segments of blocks list the allocations live at the end. A CUDA snapshot has the
allocator's segments. memlab's events only have storages, so each storage becomes a segment at a
unique address. A block's stack shows its operator, the module, and the user's line where known.

Storages that already existed come first, so that the viewer's timeline shows them.

Source torch.cuda.memory._snapshot's documentation, torch 2.13; read by torch.cuda._memory_viz.
"""

from collections.abc import Iterable, Iterator
from typing import Any

FIRST_ADDRESS = 0x7F00_0000_0000  # as on CUDA
ALIGNMENT = 512
StorageEvent = Any  # memlab.trace.Event, which is above this layer
PROTOCOL = 4  # pickle protocol; the viewer shows an empty page for newer ones


def snapshot(events: Iterable[StorageEvent]) -> dict[str, Any]:
    """Return the contents of a snapshot file for one device."""
    blocks: dict[int, dict[str, Any]] = {}  # alive, by storage
    entries = list(_entries(events, blocks))
    return {
        "segments": [_segment(block) for block in blocks.values()],
        "device_traces": [entries],
        "allocator_settings": {},
        "external_annotations": [],
    }


def _entries(
    events: Iterable[StorageEvent], blocks: dict[int, dict[str, Any]]
) -> Iterator[dict[str, Any]]:
    """Yield trace entries; a resized storage is freed and allocated again, as on a GPU."""
    address = FIRST_ADDRESS
    frames = _Frames()
    for moment, event in enumerate(events):
        old = blocks.pop(event.storage, None)
        size = event.bytes + (old["size"] if old else 0)
        if old:
            yield _entry("free_requested", old, event, moment)
            yield _entry("free_completed", old, event, moment)
        if size > 0:
            block = {
                "address": address,
                "size": size,
                "requested_size": size,
                "state": "active_allocated",
                "frames": frames.of(event),
            }
            blocks[event.storage] = block
            address += -(-size // ALIGNMENT) * ALIGNMENT
            yield _entry("alloc", block, event, moment)


def _entry(action: str, block: dict[str, Any], event: StorageEvent, moment: int) -> dict[str, Any]:
    return {
        "action": action,
        "addr": block["address"],
        "size": block["size"],
        "stream": 0,
        "time_us": moment,
        "category": event.category,
        "frames": block["frames"],
    }


def _segment(block: dict[str, Any]) -> dict[str, Any]:
    size = block["size"]
    return {
        "device": 0,
        "address": block["address"],
        "total_size": size,
        "allocated_size": size,
        "active_size": size,
        "requested_size": size,
        "stream": 0,
        "segment_type": "large" if size > 2**20 else "small",
        "segment_pool_id": (0, 0),
        "is_expandable": False,
        "frames": block["frames"],
        "blocks": [block],
    }


class _Frames:
    """Stacks of events; equal stacks share one object, which keeps the file small."""

    def __init__(self) -> None:
        self._known: dict[tuple[str | None, ...], list[dict[str, Any]]] = {}

    def of(self, event: StorageEvent) -> list[dict[str, Any]]:
        key = (event.category, event.operator, event.module, event.line)
        if key not in self._known:
            self._known[key] = list(stack_frames(event))
        return self._known[key]


def stack_frames(event: StorageEvent) -> Iterator[dict[str, Any]]:
    """Yield frames, innermost first: category, operator, module, the user's line."""
    for name in (event.category, event.operator, event.module):
        if name:
            yield {"name": name, "filename": "memlab", "line": 0}
    if event.line:
        place, _, function = event.line.rpartition(" ")  # a path may contain spaces
        filename, _, line = place.rpartition(":")
        yield {"name": function, "filename": filename, "line": int(line)}
