"""The memory that a card must have: reserved if there is room, else what the allocator needs."""

from dataclasses import replace

import pytest
import torch

import memlab
from memlab.allocator import simulate
from memlab.allocator.capacity import needed_bytes
from memlab.trace import DeviceMemory, Event, Trace

MIB = 2**20


def trace_of(*changes: tuple[int, int]) -> Trace:
    """Return a trace of (storage, MiB) with its reserved bytes on a card without a limit."""
    events = tuple(
        Event(mib * MIB, storage, "activations", "", "", "", "forward", ())
        for storage, mib in changes
    )
    trace = Trace(events, device="cuda")
    blocks = simulate(trace)
    return replace(trace, memory=DeviceMemory(blocks.allocated_bytes, blocks.reserved_bytes))


# 60 MiB stay in the cache when 70 MiB are asked for.
ONE_AFTER_THE_OTHER = trace_of((1, 60), (1, -60), (2, 70), (2, -70))


@pytest.mark.parametrize(
    ("budget", "least", "most"),
    [(200, 130, 130), (130, 130, 130), (129, 70, 71.3), (100, 70, 71.3), (70, 70, 70)],
)
def test_a_cache_that_can_be_released_is_needed_only_if_there_is_room(budget, least, most):
    assert least <= needed_bytes(ONE_AFTER_THE_OTHER, budget * MIB) / MIB <= most


def test_the_result_exceeds_a_budget_in_which_the_step_does_not_run():
    assert needed_bytes(ONE_AFTER_THE_OTHER, 69 * MIB) == pytest.approx(70 * MIB, rel=0.02)


def test_free_memory_in_a_segment_in_use_cannot_be_released():
    pinned = trace_of((1, 9), (2, 9), (1, -9), (3, 30))  # 1 and 2 share a segment of 20 MiB
    assert simulate(pinned).reserved_bytes == 50 * MIB
    assert needed_bytes(pinned, 49 * MIB) == 50 * MIB


def test_a_budget_just_below_the_reserved_bytes_is_tried():
    """The allocated bytes are within 1 % of the reserved ones, and the step runs in them."""
    trace = trace_of((1, 20), (1, -20), (2, 4000), (2, -4000))
    budget = trace.reserved_bytes - MIB
    assert trace.allocated_bytes > 0.99 * trace.reserved_bytes
    assert simulate(trace, capacity_bytes=budget).fits
    assert needed_bytes(trace, budget) <= budget


def test_the_step_runs_in_the_result():
    trace = memlab.predict(_training)
    needed = needed_bytes(trace, trace.reserved_bytes - MIB)
    assert trace.allocated_bytes <= needed < trace.reserved_bytes
    assert simulate(trace, capacity_bytes=needed).fits


def _training():
    """Each step has a larger batch, so blocks cached before are too small."""
    layers = torch.nn.Sequential(*(torch.nn.Linear(500, 500) for _ in range(4))).cuda()
    batches = iter((20_000, 30_000))

    def step():
        layers(torch.zeros(next(batches), 500, device="cuda")).sum().backward()

    return step, layers, None


def test_the_upper_bound_decides_if_there_is_room_for_it():
    memory = replace(ONE_AFTER_THE_OTHER.memory, reserved_most_bytes=150 * MIB)
    bounded = replace(ONE_AFTER_THE_OTHER, memory=memory)
    assert needed_bytes(bounded, 160 * MIB) == 150 * MIB
    assert needed_bytes(bounded, 140 * MIB) <= 140 * MIB


def test_a_device_without_a_caching_allocator_needs_what_is_allocated():
    trace = replace(ONE_AFTER_THE_OTHER, device="cpu", memory=DeviceMemory())
    assert needed_bytes(trace, 10) == trace.allocated_bytes == 70 * MIB
