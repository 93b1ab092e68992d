"""The unwatched run: every block by size, order and kind, and what an observer makes of it."""

import gc
import os
import sys
from collections import Counter
from threading import Thread

import pytest
import torch
import torch.nn.functional as F
from kinds import KINDS
from quick import quick
from torch import Tensor

from memlab.metering.profiler_recording import (
    Made,
    MemoryEvent,
    Recording,
    _in_order,
    _Note,
    compare,
    record,
    what_watching_changes,
)
from memlab.trace import Event, Trace


def sizes(recording: Recording) -> list[int]:
    return [event.bytes for event in recording.events]


def kinds(recording: Recording) -> list[tuple[int, str, str]]:
    """(bytes, kind, operator) of the allocations."""
    return [(e.bytes, e.kind, e.operator) for e in recording.events if e.bytes > 0]


# ------------------------------------------------------------------ sizes and order


def test_blocks_are_recorded_to_the_byte_in_the_order_of_their_births_and_deaths() -> None:
    def step() -> None:
        first = torch.empty(2)
        second = torch.empty(5, dtype=torch.bfloat16)
        third = torch.empty(1000, dtype=torch.float64)
        del second, first, third

    assert sizes(record(step)) == [8, 10, 8000, -10, -8, -8000]


def test_a_free_carries_the_address_of_its_block() -> None:
    def step() -> None:
        blocks = [torch.empty(n) for n in (3, 4, 5)]
        del blocks[1]

    addresses: dict[int, int] = {}
    for event in record(step).events:
        if event.bytes > 0:
            addresses[event.address] = event.bytes
        else:
            assert addresses.pop(event.address) == -event.bytes


def test_an_empty_tensor_allocates_nothing() -> None:
    assert record(lambda: torch.empty(0)).events == ()


def test_resizing_allocates_the_new_block_before_it_frees_the_old() -> None:
    recording = record(lambda: torch.empty(100).resize_(300))
    assert sizes(recording) == [400, 1200, -400, -1200]


def test_the_peak_is_the_largest_running_sum() -> None:
    def step() -> None:
        for length in (10, 30, 20):
            a, b = torch.empty(length), torch.empty(length)
            del a, b

    assert record(step).peak_bytes == 2 * 30 * 4


def test_live_bytes_are_those_of_what_the_step_keeps() -> None:
    kept: list[Tensor] = []

    def step() -> None:
        kept.append(torch.empty(25))
        torch.empty(70)

    assert record(step).live_bytes == 100


def test_allocations_are_counted_by_size() -> None:
    def step() -> None:
        for length in (10, 10, 3):
            torch.empty(length)

    assert record(step).allocations == {40: 2, 12: 1}


def test_two_threads_of_a_kernel_leave_the_order_provable() -> None:
    threads = torch.get_num_threads()
    x = torch.randn(400, 400)
    torch.set_num_threads(2)
    try:
        recording = record(lambda: torch.softmax(x @ x, dim=-1).sum())
    finally:
        torch.set_num_threads(threads)
    assert recording.live_bytes == 0  # an event lost or out of order would have raised


def test_a_lost_event_of_the_allocator_is_an_error() -> None:
    first, third = (_Note(8, at, total, at, None, "") for at, total in ((1, 8), (3, 24)))
    with pytest.raises(RuntimeError, match=r"after 8 bytes and a block of 8, .* at 24"):
        _in_order([third, first])


def test_another_thread_of_the_step_is_not_seen() -> None:
    def step() -> None:
        thread = Thread(target=lambda: torch.empty(50))
        thread.start()
        thread.join()

    assert record(step).events == ()


# ------------------------------------------------------------------ where a recording begins


def test_the_free_of_an_older_block_is_left_out() -> None:
    kept = [torch.empty(25)]
    assert record(kept.clear).events == ()


def test_the_free_of_a_block_of_an_earlier_recording_is_left_out() -> None:
    kept: list[Tensor] = []
    record(lambda: kept.append(torch.empty(25)))
    assert record(kept.clear).events == ()


def test_warming_up_is_not_recorded_but_its_blocks_are_freed() -> None:
    kept: list[Tensor] = []
    recording = record(kept.clear, warm_up=lambda: kept.append(torch.empty(25)))
    assert sizes(recording) == [-100]


def test_a_second_step_frees_the_gradients_of_the_first() -> None:
    weight = torch.ones(50, requires_grad=True)

    def step() -> None:
        weight.grad = None
        (weight * 2).sum().backward()

    assert record(step).live_bytes == 200
    assert record(step, warm_up=step).live_bytes == 0


def test_no_cycle_is_collected_during_a_recording() -> None:
    def step() -> None:
        cycle: list[object] = [torch.empty(100)]
        cycle.append(cycle)
        del cycle
        assert [[] for _ in range(10_000)]  # more objects than start a collection

    assert gc.isenabled()
    assert gc.get_threshold()[0] < 10_000
    assert record(step).live_bytes == 400


def test_the_collector_runs_again_after_a_step_that_raised() -> None:
    def step() -> None:
        raise ArithmeticError

    with pytest.raises(ArithmeticError):
        record(step)
    assert gc.isenabled()


def test_a_collector_that_was_off_stays_off() -> None:
    gc.disable()
    try:
        record(lambda: None)
        assert not gc.isenabled()
    finally:
        gc.enable()


# ------------------------------------------------------------------ kinds of blocks


def test_what_outlives_its_operator_is_a_result() -> None:
    x = torch.ones(100)
    assert kinds(record(lambda: x * x)) == [(400, "result", "aten::mul")]


def test_what_an_operator_frees_before_it_returns_is_scratch() -> None:
    x, integers = torch.ones(100), torch.arange(100)
    recording = record(lambda: x.add_(integers))  # a float32 copy of the integers is added
    assert kinds(recording) == [(400, "scratch", "aten::add_")]


def test_results_of_the_operators_below_a_kernel_are_its_scratch() -> None:
    images, filters = torch.randn(1, 2, 9, 9), torch.randn(3, 2, 3, 3)
    recording = record(lambda: F.conv_transpose2d(images, filters.transpose(0, 1), stride=2))
    assert recording.allocated_by("result") == {"aten::convolution": 3 * 19 * 19 * 4}
    assert set(recording.allocated_by("scratch")) == {"aten::convolution"}


def test_an_operator_written_in_terms_of_others_is_looked_through() -> None:
    condition = torch.tensor([True, False])
    recording = record(lambda: torch.where(condition, 1.0, 2.0))
    number = (4, "result", "aten::scalar_tensor")
    assert kinds(recording) == [number, number, (8, "result", "aten::where")]


def test_a_python_number_on_its_way_into_an_operator_is_a_stray() -> None:
    x = torch.ones(100)
    assert kinds(record(lambda: x.mul_(3)))[0] == (8, "stray", "")


def test_the_state_of_a_generator_is_a_stray() -> None:
    state_bytes = torch.get_rng_state().nbytes
    assert kinds(record(torch.get_rng_state)) == [(state_bytes, "stray", "")]


def test_a_result_of_backward_names_the_node_of_the_graph() -> None:
    x = torch.ones(100, requires_grad=True)
    results = [e for e in record(lambda: x.sin().sum().backward()).events if e.bytes == 400]
    assert [(e.node, e.operator) for e in results] == [
        ("", "aten::sin"),
        ("SinBackward0", "aten::cos"),
        ("SinBackward0", "aten::mul"),
    ]


# ------------------------------------------------------------------ an observer that sees too much


def fan_in() -> None:
    """y is read twice: two gradients of 400 bytes meet, and one is added to the other."""
    x = torch.ones(100, requires_grad=True)
    y = x.exp()
    (y.sin() + y.cos()).sum().backward()


def test_recording_leaves_autograd_to_add_in_place() -> None:
    unwatched = record(fan_in)
    assert "aten::add" in unwatched.allocated_by("result")  # of the forward pass
    assert not [e for e in unwatched.events if e.node and e.operator == "aten::add"]


def test_a_mode_that_does_nothing_makes_autograd_add_out_of_place() -> None:
    changes = what_watching_changes(lambda: fan_in)
    (added,) = changes.added.items()  # the node is the one whose gradient comes second
    assert added == (Made("SinBackward0", "aten::add", 400), 1)
    assert not changes.removed


def test_watched_the_gradient_of_gather_is_scattered_out_of_place() -> None:
    def step() -> None:
        x = torch.ones(10, 10, requires_grad=True)
        x.gather(1, torch.zeros(10, 1, dtype=torch.int64)).sum().backward()

    changes = what_watching_changes(lambda: step)
    assert changes.added == {Made("GatherBackward0", "aten::scatter_add", 400): 1}


def test_watched_the_gradient_of_prod_runs_other_operators() -> None:
    def step() -> None:
        torch.ones(10, requires_grad=True).prod().backward()

    removed = {made.operator for made in what_watching_changes(lambda: step).removed}
    assert "aten::div" in removed  # of the whole product by each factor, as none is zero


# ------------------------------------------------------------------ against an observer


def recording_of(*blocks: tuple[int, int, str]) -> Recording:
    """Of (bytes ±, address, kind)."""
    return Recording(tuple(MemoryEvent(*block, operator="", node="") for block in blocks))


TWO_RESULTS_AND_SCRATCH = recording_of(
    (400, 1, "result"),
    (999, 2, "scratch"),
    (-999, 2, "scratch"),
    (40, 3, "result"),
    (8, 4, "stray"),
    (-8, 4, "stray"),
    (-400, 1, "result"),
)


def test_an_observer_that_saw_the_results_and_nothing_else_is_exact() -> None:
    assert compare([400, 40, -400], TWO_RESULTS_AND_SCRATCH).exact


def test_the_excess_is_scratch_and_strays() -> None:
    comparison = compare([400, 40, -400], TWO_RESULTS_AND_SCRATCH)
    assert comparison.excess == {999: 1, 8: 1}
    assert comparison.excess_bytes == 1007
    assert comparison.excess_share == 1007 / 1447


def test_the_real_peak_is_higher_by_the_scratch_at_the_peak() -> None:
    comparison = compare([400, 40, -400], TWO_RESULTS_AND_SCRATCH)
    assert comparison.peak_difference == 0
    assert comparison.real_peak_difference == 440 - 1399
    assert comparison.peak_bytes == 1399


def test_an_allocation_that_never_was_is_missing() -> None:
    comparison = compare([400, 400, -400, 40, -400], TWO_RESULTS_AND_SCRATCH)
    assert comparison.missing == {400: 1}
    assert comparison.peak_difference == 360
    assert not comparison.exact


def test_a_result_that_was_not_seen_is_unseen() -> None:
    comparison = compare([400, -400], TWO_RESULTS_AND_SCRATCH)
    assert comparison.unseen == {40: 1}
    assert comparison.missing == {}
    assert not comparison.exact


def test_a_block_held_too_long_shows_in_the_live_bytes() -> None:
    comparison = compare([400, 40], TWO_RESULTS_AND_SCRATCH)
    assert comparison.live_difference == 400
    assert not comparison.exact


def test_a_block_freed_too_late_shows_in_the_peak() -> None:
    recording = recording_of((400, 1, "result"), (-400, 1, "result"), (40, 2, "result"))
    comparison = compare([400, 40, -400], recording)
    assert comparison.live_difference == 0
    assert comparison.peak_difference == 40
    assert not comparison.exact


def test_scratch_is_no_excuse_for_an_allocation_of_its_size() -> None:
    comparison = compare([400, 999, -999, 40, -400], TWO_RESULTS_AND_SCRATCH)
    assert comparison.missing == {999: 1}
    assert comparison.peak_difference == 1399 - 440


def test_a_stray_that_an_observer_saw_is_no_difference() -> None:
    recording = recording_of((8, 4, "stray"), (400, 1, "result"), (-8, 4, "stray"), (8, 4, "stray"))
    comparison = compare([8, 400, -8], recording)
    assert comparison.exact
    assert comparison.excess == {8: 1}


def test_a_trace_is_compared_without_what_it_found_but_with_the_frees_of_that() -> None:
    def event(count: int, storage: int, phase: str) -> Event:
        return Event(count, storage, "activations", "", "", phase, "float32", (1,))

    found, made = event(70, 1, "before"), event(400, 2, "forward")
    freed = event(-70, 1, "backward"), event(-400, 2, "backward")
    trace = Trace((found, made, *freed))
    recording = recording_of((400, 2, "result"), (-70, 1, "result"), (-400, 2, "result"))
    assert compare(trace, recording).exact


def test_an_empty_step_compares_with_nothing() -> None:
    comparison = compare([], Recording(()))
    assert comparison.exact
    assert comparison.excess_share == 0


def test_a_comparison_says_what_is_wrong() -> None:
    text = str(compare([400, 400, -400, 12], TWO_RESULTS_AND_SCRATCH))
    assert "exact: no" in text
    assert "seen, but never allocated: 1 × 400 B, 1 × 12 B" in text
    assert "results not seen: 1 × 40 B" in text


# ------------------------------------------------------------------ the catalogue of kinds


@pytest.mark.parametrize("name", quick(list(KINDS)[::4], KINDS))
def test_a_kind_built_again_repeats_itself_to_the_byte(name: str) -> None:
    def events() -> list[tuple[int, str, str]]:
        step, _, _ = KINDS[name]()
        recording = record(step, warm_up=step)
        return [(event.bytes, event.kind, event.operator) for event in recording.events]

    first = events()
    assert Counter(first) == Counter(events())
    assert first


def test_a_recording_says_nothing_of_the_profiler_and_all_that_the_step_says(capfd):
    held = [torch.ones(1000)]

    def step() -> None:
        held.clear()  # a block from before: the profiler remarks that it does not know its size
        os.write(2, b"from below\n")
        print("from Python", file=sys.stderr)

    record(step)
    assert sorted(capfd.readouterr().err.splitlines()) == ["from Python", "from below"]


def test_what_the_warm_up_leaves_in_a_cycle_is_not_there_at_the_start():
    def warm_up():
        cycle = [torch.ones(1024)]
        cycle.append(cycle)

    assert record(lambda: torch.ones(4), warm_up=warm_up).bytes_at_start == 0


def test_what_the_warm_up_leaves_alive_is_there_at_the_start():
    kept = []
    recording = record(lambda: torch.ones(4), warm_up=lambda: kept.append(torch.ones(1024)))
    assert recording.bytes_at_start == 4096
    assert recording.peak_bytes == 16
