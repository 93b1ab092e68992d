"""Private pools of the simulated allocator keep their memory to themselves, as torch's do.

What torch does is described in c10/cuda/CUDACachingAllocator.cpp (`get_pool`,
`release_cached_blocks`, `create_or_incref_pool`) and in the docstrings of `torch.cuda.MemPool` and
`use_mem_pool`.
"""

import pytest
import torch

from memlab import Event
from memlab.allocator import Allocator, Settings, segments, simulate

MIB = 2**20


def allocated(storage, size, category="activations", phase="forward"):
    return Event(size, storage, category, "", "", phase, "uint8", ())


def freed(storage, size, category="activations", phase="backward"):
    return allocated(storage, -size, category, phase)


def capacity(size, **settings):
    return Settings(capacity_bytes=size, **settings)


def reserved_by_pool(allocator):
    held = {}
    for segment in segments(allocator):
        held[segment.private_pool] = held.get(segment.private_pool, 0) + segment.bytes
    return held


def test_a_pools_free_blocks_serve_its_own_requests_only():
    allocator = Allocator()
    allocator.free(allocator.malloc(30 * MIB, private_pool=1))
    other = allocator.malloc(30 * MIB)
    assert allocator.reserved_bytes == 60 * MIB
    again = allocator.malloc(30 * MIB, private_pool=1)
    assert allocator.reserved_bytes == 60 * MIB
    assert again.address != other.address
    allocator.malloc(30 * MIB, private_pool=2)
    assert reserved_by_pool(allocator) == {0: 30 * MIB, 1: 30 * MIB, 2: 30 * MIB}


def test_a_freed_block_returns_to_the_pool_that_it_came_from():
    allocator = Allocator()
    block = allocator.malloc(30 * MIB, private_pool=1)
    allocator.malloc(30 * MIB)
    allocator.free(block)
    assert allocator.malloc(30 * MIB, private_pool=1).address == block.address


def test_rounding_splitting_and_segments_follow_the_same_rules_in_a_pool():
    sizes = [512, 3 * MIB, 700_000, 15 * MIB, 64 * MIB]
    plain, private = Allocator(), Allocator()
    for size in sizes:
        plain.malloc(size)
        private.malloc(size, private_pool=1)
    assert private.reserved_bytes == plain.reserved_bytes
    found = [[(s.bytes, s.blocks) for s in segments(each)] for each in (plain, private)]
    assert found[0] == found[1]


def test_empty_cache_leaves_a_pool_alone_until_it_is_deleted():
    allocator = Allocator()
    for pool in (0, 1):
        allocator.free(allocator.malloc(30 * MIB, private_pool=pool))
    allocator.empty_cache()
    assert reserved_by_pool(allocator) == {1: 30 * MIB}
    allocator.delete_pool(1)
    assert allocator.reserved_bytes == 0


def test_a_deleted_pools_live_blocks_stay_and_empty_cache_releases_them_later():
    allocator = Allocator()
    live = allocator.malloc(30 * MIB, private_pool=1)
    allocator.delete_pool(1)
    assert allocator.reserved_bytes == 30 * MIB
    allocator.free(live)
    assert allocator.reserved_bytes == 30 * MIB
    allocator.empty_cache()
    assert allocator.reserved_bytes == 0


def test_a_refused_request_releases_the_default_pools_memory_and_not_a_private_pools():
    def second_is_served(first_pool):
        allocator = Allocator(capacity(50 * MIB))
        allocator.free(allocator.malloc(30 * MIB, private_pool=first_pool))
        return allocator.malloc(40 * MIB) is not None

    assert second_is_served(first_pool=0)
    assert not second_is_served(first_pool=1)


def test_a_refused_request_to_a_private_pool_does_not_retry():
    """torch skips the retry while a thread allocates to a pool (`captures_underway`)."""
    allocator = Allocator(capacity(50 * MIB))
    allocator.free(allocator.malloc(30 * MIB))
    assert allocator.malloc(40 * MIB, private_pool=1) is None
    assert allocator.retries == 0


def test_garbage_collection_leaves_private_pools_alone():
    def reserved_after(pool):
        allocator = Allocator(capacity(200 * MIB, garbage_collection_threshold=0.25))
        allocator.free(allocator.malloc(60 * MIB, private_pool=pool))
        allocator.malloc(70 * MIB)
        return allocator.reserved_bytes

    assert reserved_after(pool=0) == 70 * MIB
    assert reserved_after(pool=1) == 130 * MIB


def test_simulate_routes_storages_by_pool_of():
    """Long-lived storages between short-lived ones pin a segment; in a pool of their own, not."""
    events = []
    for n in range(4):
        events.append(allocated(2 * n, 12 * MIB))
        events.append(allocated(2 * n + 1, 2 * MIB, "parameters"))
    events += [freed(2 * n, 12 * MIB) for n in range(4)]
    events.append(allocated(100, 48 * MIB))

    def pool_of(event):
        return int(event.category == "parameters")

    one, two = simulate(events), simulate(events, pool_of=pool_of)
    assert one.allocated_bytes == two.allocated_bytes == 56 * MIB
    pools = {segment.private_pool for segment in two.at_end}
    assert pools == {0, 1}
    assert all(segment.private_pool == 0 for segment in one.at_end)
    assert two.segments(len(events)) == two.at_end  # simulated again, with the pools


def test_without_pools_nothing_changes():
    events = [allocated(n, (n + 1) * MIB) for n in range(9)] + [freed(3, 4 * MIB)]
    assert simulate(events).at_end == simulate(events, pool_of=lambda event: 0).at_end


def test_a_pools_peak_is_at_most_that_of_separate_runs():
    """Each pool alone behaves as an allocator of its own without a limit."""
    events = [allocated(n, (1 + n % 5) * 7 * MIB // 3) for n in range(40)]
    events += [freed(n, (1 + n % 5) * 7 * MIB // 3) for n in range(0, 40, 3)]

    def of(event):
        return event.storage % 2

    together = simulate(events, pool_of=of).reserved[-1]
    alone = [simulate([e for e in events if of(e) == pool]).reserved[-1] for pool in (0, 1)]
    assert together == sum(alone)


@pytest.mark.gpu
def test_torchs_pool_reserves_what_the_simulation_reserves():
    sizes = [30 * MIB, 3 * MIB, 700_000, 5 * MIB]
    torch.cuda.empty_cache()
    before = torch.cuda.memory_reserved()
    pool, allocator = torch.cuda.MemPool(), Allocator()
    with torch.cuda.use_mem_pool(pool):
        tensors = [torch.empty(size, dtype=torch.uint8, device="cuda") for size in sizes]
    blocks = [allocator.malloc(size, private_pool=1) for size in sizes]
    assert torch.cuda.memory_reserved() - before == allocator.reserved_bytes
    del tensors
    for block in blocks:
        allocator.free(block)
    torch.cuda.empty_cache()
    allocator.empty_cache()
    assert torch.cuda.memory_reserved() - before == allocator.reserved_bytes > 0
    del pool
    allocator.delete_pool(1)
    torch.cuda.empty_cache()
    assert torch.cuda.memory_reserved() - before == allocator.reserved_bytes == 0
