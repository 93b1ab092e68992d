"""Every byte that a device counts gets a category. A fake device replaces the GPU.

FakeCuda is a caching allocator with segments, splitting, merging, a history and reused addresses. A
Step uses it like a training step, produces the meter's changes, and records the true live bytes by
category at each moment.
"""

from collections import Counter
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from kinds import KINDS
from torch._C._profiler import _EventType
from torch.profiler import ProfilerActivity, profile, record_function

from memlab.metering.cuda import BlockTracker, Cuda, CudaMonitor, allocated_blocks, read_history
from memlab.metering.device_stats import AllocatorMonitor, BlockSize, DeviceStats
from memlab.metering.devices import MONITORS, WORKSPACE_BYTES, complete, monitor_for
from memlab.metering.registry import REGISTRY, KnownAddress, Registry, Storage
from memlab.metering.storages import Change, StorageMeter
from memlab.trace import CATEGORIES, Trace

MIB = 2**20
CUDA = torch.device("cuda", 0)


# ------------------------------------------------------------------ a fake device


@dataclass
class FakeBlock:
    """A block; it is free if `requested` is None."""

    segment: int
    address: int
    size: int
    requested: int | None = None


class FakeCuda(Cuda):
    """A caching allocator and the torch functions that report on it."""

    def __init__(self, keeps_history: bool = True, longest_history: int | None = None) -> None:
        self.blocks: list[FakeBlock] = []
        self.history: list[dict[str, Any]] = []
        self.recording = False
        self.text = ""
        self.peak = self.segments = 0
        self.elsewhere: list[dict[str, Any]] = []  # segments of another device
        self._keeps_history, self._longest_history = keeps_history, longest_history

    def allocate(self, requested: int) -> int:
        size = -(-requested // 512) * 512
        free = [p for p in self.blocks if p.requested is None and p.size >= size]
        fitting = [p for p in free if self.is_small(p) == (size <= MIB)]
        block = min(fitting, key=lambda p: (p.size, p.address), default=None)
        block = block or self.new_segment(size)
        rest = block.size - size
        if rest >= 512 if size <= MIB else rest > MIB:
            self.blocks.append(FakeBlock(block.segment, block.address + size, rest))
            block.size = size
        block.requested = requested
        self.peak = max(self.peak, self.allocated)
        self.note("alloc", block.address, requested)
        return block.address

    def free(self, address: int) -> None:
        block = next(p for p in self.blocks if p.address == address)
        self.note("free_requested", address, block.requested)
        self.note("free_completed", address, block.requested)
        block.requested = None
        for other in [p for p in self.blocks if p.requested is None and p.segment == block.segment]:
            if other.address == block.address + block.size:
                block.size += other.size
                self.blocks.remove(other)
            elif other.address + other.size == block.address:
                other.size += block.size
                self.blocks.remove(block)
                block = other

    def new_segment(self, size: int) -> FakeBlock:
        """Add an adjacent segment, so that only segment boundaries prevent merging."""
        room = 2 * MIB if size <= MIB else 20 * MIB if size < 10 * MIB else size
        room = -(-room // (2 * MIB)) * 2 * MIB
        address = 2**40
        for block in sorted(self.blocks, key=lambda p: p.address):
            if block.address - address >= room:
                break
            address = block.address + block.size
        block = FakeBlock(self.segments, address, room)
        self.segments += 1
        self.blocks.append(block)
        self.note("segment_alloc", block.address, room)
        return block

    def empty_cache(self) -> None:
        for number in {p.segment for p in self.blocks}:
            blocks = [p for p in self.blocks if p.segment == number]
            if all(p.requested is None for p in blocks):
                self.blocks.remove(blocks[0])  # merged, so there is only one
                self.note("segment_free", blocks[0].address, blocks[0].size)

    def is_small(self, block: FakeBlock) -> bool:
        return sum(p.size for p in self.blocks if p.segment == block.segment) == 2 * MIB

    def note(self, action: str, address: int, size: int) -> None:
        if self.recording:
            entry = {"action": action, "addr": address, "size": size, "user_metadata": self.text}
            self.history = [*self.history, entry][-(self._longest_history or 10**9) :]

    def size_of(self, address: int) -> int:
        return next(p.size for p in self.blocks if p.address == address)

    @property
    def allocated(self) -> int:
        return sum(p.size for p in self.blocks if p.requested is not None)

    @property
    def reserved(self) -> int:
        return sum(p.size for p in self.blocks)

    def synchronize(self, device):
        pass

    def reset_peak(self, device):
        self.peak = self.allocated

    def stats(self, device):
        return {
            "allocated_bytes.all.current": self.allocated,
            "allocated_bytes.all.peak": self.peak,
            "reserved_bytes.all.peak": self.reserved,
        }

    def used_bytes(self, device):
        return self.reserved + 300 * MIB

    def current_index(self):
        return 0

    def keeps_history(self):
        return self._keeps_history

    def is_recording(self):
        return self.recording

    def record(self, on):
        self.recording = on
        self.history = self.history if on else []

    def set_tag(self, text):
        self.text = text

    def snapshot(self):
        blocks = [
            {
                "address": p.address,
                "size": p.size,
                "requested_size": p.requested or 0,
                "state": "inactive" if p.requested is None else "active_allocated",
                "segment": p.segment,
            }
            for p in sorted(self.blocks, key=lambda p: p.address)
        ]
        numbers = sorted({b["segment"] for b in blocks})
        segments = [[b for b in blocks if b["segment"] == n] for n in numbers]
        own = [{"device": 0, "address": s[0]["address"], "blocks": s} for s in segments]
        return {
            "segments": own + self.elsewhere,
            "device_traces": [self.history],
        }


class Step:
    """A step's allocations, the meter's changes, and the true live bytes."""

    def __init__(self, cuda: FakeCuda | None = None) -> None:
        self.cuda = cuda or FakeCuda()
        self.monitor = CudaMonitor(torch.device("cuda"), self.cuda)
        self.changes: list[Change] = []
        self.phase = "before"
        self.alive: dict[int, tuple[str, int, int]] = {}  # by address: category, requested, size
        self.moments: list[Counter[str]] = [Counter()]  # bytes by category

    def start(self) -> None:
        self.monitor.start()
        self.phase = "forward"

    def storage(self, count: int, category: str = "activations", op: str = "aten.mm") -> Storage:
        """Allocate an operator's result, which the meter sees."""
        address = self.allocate(count, category, op)
        REGISTRY.last_number += 1
        record = Storage(REGISTRY.last_number, torch.empty(0), count, None)
        record.device, record.addresses = CUDA, (KnownAddress(record.number, address),)
        record.category = category
        self.changes.append(Change(record, count, self.phase))
        return record

    def scratch(self, count: int, op: str = "aten.mm") -> int:
        """Allocate a block without a tensor. Before the step, only its size identifies it."""
        known = self.phase != "before" or count in WORKSPACE_BYTES
        category = "workspace" if known else "unattributed"
        return self.allocate(count, category, op)

    def drop(self, thing: Storage | int) -> None:
        address = thing if isinstance(thing, int) else thing.addresses[-1].address
        self.cuda.free(address)
        del self.alive[address]
        self.note_moment()
        if self.phase == "before":  # the meter does not see it
            self.changes = [change for change in self.changes if change.record is not thing]
        elif isinstance(thing, Storage):
            self.changes.append(Change(thing, -thing.bytes, self.phase))

    def resize(self, record: Storage, count: int) -> None:
        """Allocate the new block before freeing the old one, as `resize_` does."""
        old = record.addresses[-1].address
        address = self.allocate(count, record.category, "aten.resize_")
        REGISTRY.last_number += 1
        record.addresses += (KnownAddress(REGISTRY.last_number, address),)
        self.cuda.free(old)
        del self.alive[old]
        self.note_moment()
        self.changes.append(Change(record, count - record.bytes, self.phase))
        record.bytes = count

    def add_to(self, old: Storage) -> None:
        """Accumulate a gradient: out of place under the meter, in place without it."""
        self.mark("aten.add")
        new = self.cuda.allocate(old.bytes)
        REGISTRY.last_number += 1
        self.cuda.free(old.addresses[-1].address)
        self.alive[new] = self.alive.pop(old.addresses[-1].address)
        old.addresses += (KnownAddress(REGISTRY.last_number, new, in_place=True),)

    def allocate(self, count: int, category: str, op: str) -> int:
        self.mark(op)
        address = self.cuda.allocate(count)
        self.alive[address] = category, count, self.cuda.size_of(address)
        self.note_moment()
        return address

    def mark(self, op: str) -> None:
        if self.phase != "before" and self.cuda.keeps_history():
            self.monitor.tag(op, self.phase, "blocks.0")

    def note_moment(self) -> None:
        moment: Counter[str] = Counter()
        for category, requested, size in self.alive.values():
            if category == "unattributed":
                moment[category] += size
            else:
                moment.update({category: requested, "rounding": size - requested})
        self.moments.append(moment)
        if self.phase == "before":
            self.moments = [moment]  # the step starts from here

    def end(self) -> Trace:
        done = complete(self.changes, self.monitor.stop())
        return Trace(done.events, "cuda", memory=done.memory, notes=done.notes)

    @property
    def true_peak(self) -> dict[str, int]:
        highest = max(self.moments, key=Counter.total)
        return {category: highest[category] for category in CATEGORIES if highest[category]}


def started(cuda: FakeCuda | None = None) -> Step:
    step = Step(cuda)
    step.start()
    return step


# ------------------------------------------------------------------ with a history


def test_nothing_is_unattributed_if_every_block_has_a_storage():
    step = Step()
    step.storage(4 * MIB, "parameters")
    step.start()
    step.storage(3 * MIB)
    trace = step.end()
    assert trace.at_peak == {"parameters": 4 * MIB, "activations": 3 * MIB}
    assert trace.peak_bytes == trace.memory.allocated_peak_bytes == 7 * MIB
    assert "0 B at the peak are unattributed" in trace.notes


@pytest.mark.parametrize("size", [8_519_680, 32 * MIB])
def test_a_cublas_buffer_from_an_earlier_step_is_workspace(size):
    step = Step()
    step.storage(4 * MIB, "parameters")
    for _ in "forward", "backward":
        step.scratch(size)
    unknown = step.scratch(size - 512)
    step.start()
    trace = step.end()
    assert trace.at_peak == step.true_peak
    assert trace.at_peak["unattributed"] == step.cuda.size_of(unknown)
    kept = [event for event in trace.events if event.category == "workspace"]
    assert [(e.operator, e.bytes) for e in kept] == [("cuBLAS, before the step", size)] * 2
    assert len({event.storage for event in trace.events}) == 4


def test_a_block_without_a_storage_is_workspace_of_its_operator():
    step = started()
    step.scratch(8_519_680, op="aten.addmm.default")  # cuBLAS's workspace
    workspace = next(e for e in step.end().events if e.category == "workspace")
    assert (workspace.bytes, workspace.operator) == (8_519_680, "aten.addmm.default")
    assert (workspace.module, workspace.phase) == ("blocks.0", "forward")


def test_scratch_freed_inside_an_operator_counts_at_the_peak():
    step = started()
    step.storage(2 * MIB)
    step.drop(step.scratch(5 * MIB))
    step.storage(4 * MIB)
    assert step.end().at_peak == {"activations": 2 * MIB, "workspace": 5 * MIB}


def test_rounding_is_the_block_size_minus_the_requested_size():
    step = started()
    step.storage(1)
    step.storage(1000)
    assert step.end().at_peak == {"activations": 1001, "rounding": 511 + 24}


def test_a_free_block_is_not_split_if_the_rest_is_at_most_one_mebibyte():
    step = started()
    step.drop(step.storage(12 * MIB))
    step.storage(11 * MIB)
    assert step.end().at_end == {"activations": 11 * MIB, "rounding": MIB}


def test_adjacent_free_blocks_merge():
    step = started()
    left, right, _ = step.storage(5 * MIB), step.storage(6 * MIB), step.storage(9 * MIB)
    step.drop(left)
    step.drop(right)
    step.storage(10 * MIB + 512)  # out of 11 MiB
    assert step.end().at_end["rounding"] == MIB - 512


def test_unknown_memory_from_before_the_step_is_unattributed():
    step = Step()
    step.scratch(3 * MIB)
    step.start()
    step.storage(2 * MIB)
    trace = step.end()
    assert trace.at_peak == {"activations": 2 * MIB, "unattributed": 3 * MIB}
    assert trace.events[0].phase == "before"
    assert "3.00 MiB at the peak are unattributed" in trace.notes


def test_unknown_memory_from_before_the_step_can_be_freed_in_it():
    step = Step()
    unknown = step.scratch(3 * MIB)
    step.start()
    step.drop(unknown)
    assert step.end().live_bytes == 0


def test_scratch_before_a_storage_at_the_same_address_is_distinguished():
    step = started()
    address = step.scratch(MIB, op="aten.sum")
    step.drop(address)
    record = step.storage(MIB)
    assert record.addresses[0].address == address
    assert [e.category for e in step.end().events] == ["workspace", "workspace", "activations"]


def test_scratch_after_a_storage_at_the_same_address_is_distinguished():
    step = started()
    record = step.storage(MIB)
    step.drop(record)
    assert step.scratch(MIB) == record.addresses[0].address
    assert [e.category for e in step.end().events] == ["activations", "activations", "workspace"]


def test_scratch_before_the_first_operator_is_distinguished_from_an_old_storage():
    step = Step()
    parameter = step.storage(MIB, "parameters")
    step.start()
    step.drop(parameter)
    assert step.cuda.allocate(MIB) == parameter.addresses[0].address
    categories = [event.category for event in step.end().events]
    assert categories == ["parameters", "parameters", "workspace"]


def test_an_old_tag_from_another_thread_does_not_move_a_storage():
    step = started()
    idle_thread = step.cuda.text
    record = step.storage(MIB)
    step.mark("aten.relu")
    step.drop(record)
    step.cuda.set_tag(idle_thread)
    step.cuda.free(step.cuda.allocate(MIB))
    categories = [e.category for e in step.end().events]
    assert categories == ["activations", "activations", "workspace", "workspace"]


def test_a_gradient_sum_that_is_in_place_without_the_meter_is_no_workspace():
    step = started()
    gradient = step.storage(2 * MIB, "gradients")
    step.add_to(gradient)
    step.add_to(gradient)
    trace = step.end()
    assert trace.at_peak == {"gradients": 2 * MIB}
    assert trace.memory.allocated_peak_bytes == 4 * MIB
    assert any("2.00 MiB higher" in note and "under the meter" in note for note in trace.notes)


def test_an_accumulated_gradient_dies_with_its_last_block():
    step = started()
    gradient = step.storage(2 * MIB, "gradients")
    step.add_to(gradient)
    step.drop(gradient)
    assert [e.bytes for e in step.end().events] == [2 * MIB, -2 * MIB]


def test_resizing_a_storage_needs_its_old_and_new_bytes_at_once():
    step = started()
    step.resize(step.storage(2 * MIB), 3 * MIB)
    trace = step.end()
    assert trace.at_peak == {"activations": 5 * MIB}
    assert trace.at_end == {"activations": 3 * MIB}


def test_a_storage_first_seen_as_an_input_has_its_allocation_in_the_history():
    step = started()
    step.storage(4 * MIB)
    late = step.storage(3 * MIB, "inputs")
    step.changes = [Change(late, late.bytes, "before"), *step.changes[:-1]]
    assert [e.category for e in step.end().events] == ["activations", "inputs"]


def test_storages_outside_the_allocator_are_not_counted_but_noted():
    step = started()
    step.storage(2 * MIB)
    shared = step.storage(3 * MIB)
    shared.addresses = (KnownAddress(shared.number, 12345),)
    trace = step.end()
    assert trace.at_peak == {"activations": 2 * MIB, "workspace": 3 * MIB}
    assert any(note.startswith("3.00 MiB are in storages") for note in trace.notes)


def test_resetting_the_peak_statistic_in_the_step_does_not_lower_the_peak():
    step = started()
    step.drop(step.storage(4 * MIB))
    step.cuda.reset_peak(CUDA)
    trace = step.end()
    assert trace.peak_bytes == trace.memory.allocated_peak_bytes == 4 * MIB


def test_memory_that_is_not_in_the_history_is_unattributed():
    step = started()
    step.storage(4 * MIB)
    step.cuda.peak += 12345
    trace = step.end()
    assert trace.at_peak == {"activations": 4 * MIB, "unattributed": 12345}
    assert trace.peak_bytes == trace.memory.allocated_peak_bytes


def test_storages_on_another_device_are_left_out():
    step = started()
    step.storage(4 * MIB)
    step.storage(2 * MIB).device = torch.device("cuda", 1)
    step.storage(3 * MIB).device = torch.device("cpu")
    assert step.end().at_peak == {"activations": 4 * MIB, "workspace": 5 * MIB}


def test_blocks_on_another_device_are_ignored():
    step = Step()
    block = {"address": 5, "size": MIB, "requested_size": MIB, "state": "active_allocated"}
    step.cuda.elsewhere = [{"device": 1, "address": 5, "blocks": [block]}]
    step.start()
    step.cuda.elsewhere = []
    step.storage(MIB)
    step.scratch(MIB)
    assert step.end().at_peak == {"activations": MIB, "workspace": MIB}


# ------------------------------------------------------------------ block sizes


def rounded(*entries: tuple[str, int, float], segments: Any = (), **settings: Any) -> list[float]:
    """Return the block size of each allocation; all sizes are in MiB."""
    snapshot = {"segments": segments, "allocator_settings": settings}
    history = [
        {"action": action, "addr": address * MIB, "size": int(size * MIB)}
        for action, address, size in entries
    ]
    return [
        e.block.rounded / MIB
        for e in read_history(history, BlockTracker(snapshot, 0))
        if not e.is_free
    ]


def segment(address: int, state: str, expandable: bool = False) -> dict[str, Any]:
    """Return a segment of 20 MiB with one block."""
    size, start = 20 * MIB, address * MIB
    block = {"address": start, "size": size, "requested_size": size, "state": state}
    return {"device": 0, "address": start, "is_expandable": expandable, "blocks": [block]}


def test_a_rest_of_one_mebibyte_is_split_off_only_in_expandable_segments():
    history = ("segment_alloc", 0, 20), ("alloc", 0, 19)
    assert rounded(*history) == [20]
    assert rounded(*history, expandable_segments=True) == [19]


def test_requests_of_max_split_size_or_more_use_the_whole_block():
    history = ("segment_alloc", 0, 40), ("alloc", 0, 30)
    assert rounded(*history) == [30]
    assert rounded(*history, max_split_size=30 * MIB) == [40]
    assert rounded(*history, max_split_size=31 * MIB) == [30]


def test_an_expandable_segment_grows_at_both_ends():
    assert rounded(("segment_map", 0, 20), ("segment_map", 20, 20), ("alloc", 0, 39.5)) == [40]
    known = [segment(20, "inactive", expandable=True)]
    assert rounded(("segment_map", 40, 20), ("alloc", 20, 39.5), segments=known) == [40]
    assert rounded(("segment_map", 0, 20), ("alloc", 0, 39.5), segments=known) == [40]


def test_adjacent_segments_do_not_merge():
    both = ("alloc", 0, 19.5), ("alloc", 20, 19.5)
    assert rounded(("segment_alloc", 0, 20), ("segment_alloc", 20, 20), *both) == [20, 20]
    assert rounded(("segment_alloc", 20, 20), *both, segments=[segment(0, "inactive")]) == [20, 20]
    assert rounded(("segment_alloc", 0, 20), *both, segments=[segment(20, "inactive")]) == [20, 20]


def test_the_middle_of_an_expandable_segment_can_be_unmapped():
    history = ("segment_map", 0, 40), ("segment_unmap", 10, 10)
    assert rounded(*history, ("alloc", 0, 9.5), ("alloc", 20, 19.5)) == [10, 20]


def test_freed_segments_can_be_allocated_again_with_other_sizes():
    small = ("segment_alloc", 0, 20), ("segment_alloc", 20, 20)
    given_back = ("segment_free", 0, 20), ("segment_free", 20, 20)
    large = ("segment_alloc", 0, 40), ("alloc", 0, 20), ("free_completed", 0, 20)
    assert rounded(*small, *given_back, *large, ("alloc", 0, 39.5)) == [20, 40]


def test_a_block_in_use_by_another_stream_is_freed_when_that_is_done():
    pending = {"segments": [segment(0, "active_pending_free")]}
    assert allocated_blocks(pending, 0) == {}
    assert BlockTracker(pending, 0).in_use == {0: BlockSize(20 * MIB, 20 * MIB)}
    history = ("free_completed", 0, 20), ("alloc", 0, 19.5)
    assert rounded(*history, segments=pending["segments"]) == [20]


# ------------------------------------------------------------------ any step

SIZES = st.one_of(st.integers(1, 2000), st.integers(1, 3 * MIB), st.integers(MIB, 40 * MIB))
ACTIONS = st.sampled_from(
    ["storage", "storage", "scratch", "drop", "add_to", "resize", "empty_cache"]
)
STEPS = st.tuples(
    st.lists(st.tuples(st.sampled_from(["storage", "scratch", "drop"]), SIZES, st.integers(0))),
    st.lists(st.tuples(ACTIONS, SIZES, st.integers(0)), min_size=10, max_size=40),
)


def act(step: Step, things: list[Storage | int], action: str, size: int, which: int) -> None:
    if action in ("storage", "scratch"):
        things.append(getattr(step, action)(size))
    elif action == "empty_cache":
        step.cuda.empty_cache()
    elif things:
        thing = things[which % len(things)]
        if action == "drop":
            things.remove(thing)
            step.drop(thing)
        elif action == "add_to" and isinstance(thing, Storage):
            step.add_to(thing)
        elif action == "resize" and isinstance(thing, Storage):
            step.resize(thing, size)


def played(cuda: FakeCuda, script: tuple[list[Any], list[Any]]) -> Step:
    step, things = Step(cuda), []
    for action in script[0]:
        act(step, things, *action)
    step.start()
    for action in script[1]:
        act(step, things, *action)
    return step


@given(STEPS)
def test_with_a_history_the_peak_is_exact_in_every_category(script):
    step = played(FakeCuda(), script)
    trace = step.end()
    assert trace.at_peak == step.true_peak
    assert trace.memory.allocated_peak_bytes == step.cuda.peak


@given(STEPS)
def test_with_a_history_the_live_bytes_at_the_end_are_exact_in_every_category(script):
    step = played(FakeCuda(), script)
    at_end = step.moments[-1]
    assert step.end().at_end == {c: at_end[c] for c in CATEGORIES if at_end[c]}


@given(STEPS)
def test_without_a_history_the_categories_still_sum_to_the_devices_peak(script):
    step = played(FakeCuda(keeps_history=False), script)
    trace = step.end()
    assert trace.peak_bytes == sum(trace.at_peak.values()) == step.cuda.peak


# ------------------------------------------------------------------ without a history


def test_without_a_history_a_hidden_block_is_exactly_unattributed():
    step = started(FakeCuda(keeps_history=False))
    step.storage(2 * MIB)
    step.scratch(3 * MIB)
    trace = step.end()
    assert trace.at_peak == {"activations": 2 * MIB, "unattributed": 3 * MIB}
    assert trace.peak_bytes == trace.memory.allocated_peak_bytes
    assert trace.events[0].phase == "before"


def test_without_a_history_rounding_is_to_512_bytes():
    step = started(FakeCuda(keeps_history=False))
    step.storage(1000)
    step.drop(step.storage(1))
    trace = step.end()
    assert trace.at_peak == {"activations": 1001, "rounding": 24 + 511}
    assert trace.at_end == {"activations": 1000, "rounding": 24}


def test_without_a_history_known_memory_from_before_is_not_unattributed():
    step = Step(FakeCuda(keeps_history=False))
    step.storage(1000, "parameters")
    step.start()
    step.storage(512)
    categories = [event.category for event in step.end().events]
    assert categories == ["parameters", "rounding", "activations"]


def test_without_a_history_unknown_bytes_from_before_are_separate_from_hidden_ones():
    step = Step(FakeCuda(keeps_history=False))
    step.scratch(3 * MIB)
    step.start()
    step.scratch(2 * MIB)
    events = step.end().events
    assert {e.operator: e.bytes for e in events} == {
        "there before the step": 3 * MIB,
        "counted by the device only": 2 * MIB,
    }


def test_unattributed_is_negative_if_the_device_counts_less_than_was_alive():
    step = started(FakeCuda(keeps_history=False))
    step.drop(step.storage(4 * MIB))
    step.cuda.reset_peak(CUDA)
    step.storage(MIB)
    trace = step.end()
    assert trace.at_peak == {"activations": 4 * MIB, "unattributed": -3 * MIB}
    assert "-3.00 MiB at the peak are unattributed" in trace.notes


def test_an_existing_history_with_too_few_entries_is_not_used():
    step = started(FakeCuda(longest_history=3))
    for _ in range(5):
        step.storage(4 * MIB)
    trace = step.end()
    assert trace.at_peak == {"activations": 20 * MIB}
    assert any("keeps too few entries" in note for note in trace.notes)


# ------------------------------------------------------------------ device statistics


def test_a_trace_reports_allocated_reserved_and_used_memory():
    step = started()
    step.storage(3 * MIB)
    printed = str(step.end()).splitlines()
    assert "device: allocated peak 3.00 MiB" in printed
    assert "device: reserved peak 20.00 MiB" in printed
    assert "device: used 320.00 MiB" in printed
    assert "note: 0 B at the peak are unattributed" in printed
    assert any("nvidia-smi" in line for line in printed)


def test_a_peak_before_the_step_does_not_count():
    step = Step()
    step.drop(step.scratch(9 * MIB))
    step.start()
    step.storage(MIB)
    assert step.end().memory.allocated_peak_bytes == MIB


def test_recording_ends_with_the_step():
    step = started()
    assert step.cuda.recording
    step.end()
    assert not step.cuda.recording
    assert step.cuda.text == ""


def test_an_existing_recording_continues_and_is_read_from_the_start_of_the_step():
    cuda = FakeCuda()
    cuda.record(on=True)
    step = Step(cuda)
    step.storage(2 * MIB, "parameters")
    step.start()
    step.storage(MIB)
    assert step.end().at_peak == {"parameters": 2 * MIB, "activations": MIB}
    assert cuda.recording
    assert [entry["size"] for entry in cuda.history if entry["action"] == "alloc"] == [2 * MIB, MIB]


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_without_device_statistics_the_meters_events_are_unchanged(device):
    monitor = monitor_for(torch.device(device))
    monitor.start()
    record = Registry().add(torch.zeros(100, device=device), None)
    record.mark("inputs")
    changes = [Change(record, 400, "before"), Change(record, -400, "forward")]
    done = complete(changes, monitor.stop())
    assert done.events == tuple(record.event(c.bytes, c.phase) for c in changes)
    assert (done.memory.allocated_peak_bytes, done.memory.used_bytes) == (None, None)
    assert done.notes == ()
    assert monitor.tag is None


def test_every_accelerator_has_a_monitor():
    kinds = {kind: type(monitor_for(torch.device(kind))) for kind in ("cuda", "mps", "xpu")}
    assert kinds == {"cuda": CudaMonitor, "mps": AllocatorMonitor, "xpu": AllocatorMonitor}


# ------------------------------------------------------------------ MPS


def metal_answers(monkeypatch, *, allocated: int, driver: int, stats: dict[str, int] | None):
    """Return the statistics on a Mac. `stats` is None for a torch without MPS statistics."""

    def memory_stats(device):
        if stats is None:
            raise RuntimeError("Allocator for mps is not a DeviceAllocator.")
        return stats

    monkeypatch.setattr(torch.accelerator, "synchronize", lambda device: None)
    monkeypatch.setattr(torch.accelerator, "memory_stats", memory_stats)
    monkeypatch.setattr(torch.accelerator, "reset_peak_memory_stats", memory_stats)
    monkeypatch.setattr(torch.mps, "current_allocated_memory", lambda: allocated)
    monkeypatch.setattr(torch.mps, "driver_allocated_memory", lambda: driver)
    monkeypatch.setattr(torch.mps, "recommended_max_memory", lambda: 16 * 2**30)
    monitor = MONITORS["mps"](torch.device("mps"))
    monitor.start()
    return monitor.stop()


def on_mps(count: int) -> list[Change]:
    record = Registry().add(torch.zeros(1), None)
    record.device = torch.device("mps", 0)
    record.mark("activations")
    return [Change(record, count, "forward")]


def test_mps_never_reports_the_drivers_bytes_as_a_peak(monkeypatch):
    stats = metal_answers(monkeypatch, allocated=0, driver=11 * 2**30, stats=None)
    done = complete(on_mps(1500 * MIB), stats)
    assert Trace(done.events).peak_bytes == 1500 * MIB
    assert done.memory.allocated_peak_bytes is None
    assert done.memory.reserved_peak_bytes is None
    assert done.memory.used_bytes == 11 * 2**30
    assert "not a peak" in done.notes[0]


def test_mps_without_a_peak_has_the_memory_allocated_before_the_step(monkeypatch):
    stats = metal_answers(monkeypatch, allocated=7 * MIB, driver=2**30, stats=None)
    done = complete(on_mps(3 * MIB), stats)
    assert Trace(done.events).at_peak == {"activations": 3 * MIB, "unattributed": 7 * MIB}


def test_mps_reports_its_allocators_peak(monkeypatch):
    stats = {"allocated_bytes.all.current": 0, "allocated_bytes.all.peak": 4 * MIB}
    stats = metal_answers(monkeypatch, allocated=0, driver=2**30, stats=stats)
    done = complete(on_mps(3 * MIB), stats)
    assert done.memory.allocated_peak_bytes == 4 * MIB
    assert Trace(done.events).at_peak == {"activations": 3 * MIB, "unattributed": MIB}


def test_a_peak_of_0_means_none(monkeypatch):
    stats = {"allocated_bytes.all.current": 0, "allocated_bytes.all.peak": 0}
    stats = metal_answers(monkeypatch, allocated=0, driver=2**30, stats=stats)
    assert stats.allocated_peak_bytes is None


# ------------------------------------------------------------------ addresses in the registry


def test_a_new_storage_has_its_address_and_number():
    registry, x = Registry(), torch.zeros(4)
    assert registry.add(x, None).addresses == (KnownAddress(1, x.data_ptr()),)


def test_a_resized_storage_gets_a_new_address_and_a_new_number():
    registry, x = Registry(), torch.zeros(4)
    record = registry.add(x, None)
    x.untyped_storage().resize_(2**20)
    registry.check_size(x.untyped_storage())
    assert record.addresses[1] == KnownAddress(2, x.data_ptr())
    assert registry.add(torch.zeros(4), None).number == 3


def test_a_storage_that_did_not_move_has_one_address():
    registry, x = Registry(), torch.zeros(4)
    record = registry.add(x, None)
    record.bytes = 12
    registry.check_size(x.untyped_storage())
    assert (record.bytes, len(record.addresses)) == (16, 1)


def test_a_continued_storage_marks_its_successors_address_as_in_place():
    registry, old, new = Registry(), torch.zeros(4), torch.zeros(4)
    first, second = registry.add(old, None), registry.add(new, None)
    registry.continue_as(first, second)
    assert first.addresses[1] == KnownAddress(2, new.data_ptr(), in_place=True)


def test_a_fake_storage_has_no_address():
    with torch._subclasses.fake_tensor.FakeTensorMode():
        x = torch.zeros(4)
    assert Registry().add(x, None).addresses == ()


# ------------------------------------------------------------------ real steps and addresses


class ProfiledCpu(FakeCuda):
    """Replay the CPU allocator's events from torch's profiler, with real scratch and addresses."""

    def set_tag(self, text):
        self.text = text
        with record_function(f"mark {text}"):
            pass

    def replay(self, history: list[tuple[int, str, int, int]]) -> DeviceStats:
        """Replay the profiler's events; the step starts with the first mark."""
        monitor = None
        for _, text, address, count in history:
            if text:
                if monitor is None:
                    monitor = CudaMonitor(torch.device("cpu", 0), self)
                    monitor.start()
                self.text = text
            elif count > 0:
                self.note("segment_alloc", address, -(-count // 512) * 512)
                self.blocks.append(FakeBlock(address, address, -(-count // 512) * 512, count))
                self.peak = max(self.peak, self.allocated)
                self.note("alloc", address, count)
            elif block := next((p for p in self.blocks if p.address == address), None):
                for action in ("free_requested", "free_completed", "segment_free"):
                    self.note(action, address, block.size)
                self.blocks.remove(block)
        return monitor.stop()


def allocations_and_marks(events: list[Any]) -> list[tuple[int, str, int, int]]:
    """Return (time, mark, address, change in bytes) for a profile, unordered."""
    found = []
    for event in events:
        kind, details = event.typed
        if kind == _EventType.Allocation and details.device.type == "cpu":
            found.append((event.start_time_ns, "", details.ptr, details.alloc_size))
        elif event.name.startswith("mark "):
            found.append((event.start_time_ns, event.name.removeprefix("mark "), 0, 0))
        found += allocations_and_marks(event.children)
    return found


class MarkingMeter(StorageMeter):
    """A meter that tags the device's history with each operator."""

    def _execute(self, func: Any, args: Any, kwargs: Any) -> Any:
        self.monitor.tag(func, self.context.last_phase, self.context.module())
        return super()._execute(func, args, kwargs)


def profiled_second_step(name: str) -> tuple[list[Change], DeviceStats]:
    """Return the meter's changes and the allocator's recording of a real step on the CPU."""
    monitor = CudaMonitor(torch.device("cpu", 0), ProfiledCpu())
    # `acc_events`: torch 2.11 warns without it
    activities = [ProfilerActivity.CPU]
    with profile(activities=activities, profile_memory=True, acc_events=True) as profiler:
        step, model, optimizer = KINDS[name]()
        step()
        meter = MarkingMeter(model, optimizer)
        meter.monitor = monitor
        monitor.start()
        with meter:
            step()
    tree = profiler.profiler.kineto_results.experimental_event_tree()
    return list(meter.changes()), ProfiledCpu().replay(sorted(allocations_and_marks(tree)))


REAL_STEPS = [
    *("mlp", "convolutions", "fan_out", "gradient_of_a_gradient", "gpt_sdpa", "gpt_checkpointed"),
    *("gpt_accumulates_three_micro_batches", "gpt_autocast_bfloat16", "adamw_foreach"),
]


@pytest.mark.few(1)
@pytest.mark.parametrize("name", REAL_STEPS)
def test_in_a_real_step_every_block_is_a_storages_or_scratch(name):
    changes, stats = profiled_second_step(name)
    done = complete(changes, stats)
    seen = [change for change in changes if change.record.category != "workspace"]
    of_the_meter = Counter((change.record.number, change.bytes) for change in seen)
    assert Counter((e.storage, e.bytes) for e in done.events if e.storage > 0) == of_the_meter
    assert {e.category for e in done.events if e.storage <= 0} <= {"workspace", "rounding"}
    assert done.memory.allocated_peak_bytes == stats.allocated_peak_bytes


@pytest.mark.gpu
def test_on_a_gpu_every_byte_of_a_step_has_a_category():
    torch._C._cuda_clearCublasWorkspaces()  # from earlier tests
    model = torch.nn.Sequential(torch.nn.Linear(1000, 3000), torch.nn.Linear(3000, 10)).cuda()
    optimizer = torch.optim.AdamW(model.parameters())
    monitor = monitor_for(torch.device("cuda"))
    meter = MarkingMeter(model, optimizer)
    meter.monitor = monitor
    monitor.start()
    with meter:
        model(torch.randn(777, 1000, device="cuda")).square().mean().backward()
        optimizer.step()
    done = complete(meter.changes(), monitor.stop())
    trace = Trace(done.events, "cuda", memory=done.memory)
    assert trace.peak_bytes == trace.memory.allocated_peak_bytes
    assert "unattributed" not in trace.at_peak
    assert "workspace" in trace.at_peak
