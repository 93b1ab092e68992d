"""Recordings: each block's size, order and kind, and comparisons with a meter."""

import gc
import os
import sys
from collections import Counter
from dataclasses import replace
from threading import Thread

import pytest
import torch
import torch.nn.functional as F
from kinds import KINDS
from quick import quick
from torch import Tensor

import memlab
from memlab.metering.profiler_recording import (
    AllocatorRecording,
    MemoryEvent,
    OperatorResult,
    _in_order,
    _LogEntry,
    compare,
    dispatch_mode_effects,
    record,
    with_workspace,
)
from memlab.trace import Event, Trace


def sizes(recording: AllocatorRecording) -> list[int]:
    return [event.bytes for event in recording.events]


def kinds(recording: AllocatorRecording) -> list[tuple[int, str, str]]:
    """Return (bytes, kind, operator) for each allocation."""
    return [(e.bytes, e.kind, e.operator) for e in recording.events if e.bytes > 0]


# ------------------------------------------------------------------ sizes and order


def test_blocks_are_recorded_exactly_in_order_of_allocation_and_free() -> None:
    def step() -> None:
        first = torch.empty(2)
        second = torch.empty(5, dtype=torch.bfloat16)
        third = torch.empty(1000, dtype=torch.float64)
        del second, first, third

    assert sizes(record(step)) == [8, 10, 8000, -10, -8, -8000]


def test_a_free_has_the_address_of_its_block() -> None:
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


def test_live_bytes_are_the_tensors_that_the_step_keeps() -> None:
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


def test_a_kernel_with_two_threads_is_recorded_in_order() -> None:
    threads = torch.get_num_threads()
    x = torch.randn(400, 400)
    torch.set_num_threads(2)
    try:
        recording = record(lambda: torch.softmax(x @ x, dim=-1).sum())
    finally:
        torch.set_num_threads(threads)
    assert recording.live_bytes == 0  # an event lost or out of order would have raised


def test_a_lost_allocator_event_raises() -> None:
    first, third = (_LogEntry(8, at, total, at, None, "") for at, total in ((1, 8), (3, 24)))
    with pytest.raises(RuntimeError, match=r"from 8 to 24 bytes with a block of 8"):
        _in_order([third, first])


def test_another_thread_of_the_step_is_not_recorded() -> None:
    def step() -> None:
        thread = Thread(target=lambda: torch.empty(50))
        thread.start()
        thread.join()

    assert record(step).events == ()


# ------------------------------------------------------------------ the start of a recording


def test_the_free_of_an_older_block_is_left_out() -> None:
    kept = [torch.empty(25)]
    assert record(kept.clear).events == ()


def test_the_free_of_a_block_from_an_earlier_recording_is_left_out() -> None:
    kept: list[Tensor] = []
    record(lambda: kept.append(torch.empty(25)))
    assert record(kept.clear).events == ()


def test_the_warm_up_is_not_recorded_but_frees_of_its_blocks_are() -> None:
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


def test_a_disabled_collector_stays_off() -> None:
    gc.disable()
    try:
        record(lambda: None)
        assert not gc.isenabled()
    finally:
        gc.enable()


# ------------------------------------------------------------------ kinds of blocks


def test_a_block_that_outlives_its_operator_is_a_result() -> None:
    x = torch.ones(100)
    assert kinds(record(lambda: x * x)) == [(400, "result", "aten::mul")]


def test_a_block_freed_before_its_operator_returns_is_scratch() -> None:
    x, integers = torch.ones(100), torch.arange(100)
    recording = record(lambda: x.add_(integers))  # a float32 copy of the integers is added
    assert kinds(recording) == [(400, "scratch", "aten::add_")]


def test_results_of_operators_inside_a_kernel_are_its_scratch() -> None:
    images, filters = torch.randn(1, 2, 9, 9), torch.randn(3, 2, 3, 3)
    recording = record(lambda: F.conv_transpose2d(images, filters.transpose(0, 1), stride=2))
    assert recording.allocated_by("result") == {"aten::convolution": 3 * 19 * 19 * 4}
    assert set(recording.allocated_by("scratch")) == {"aten::convolution"}


def test_a_composite_operator_is_replaced_by_the_operators_inside_it() -> None:
    condition = torch.tensor([True, False])
    recording = record(lambda: torch.where(condition, 1.0, 2.0))
    number = (4, "result", "aten::scalar_tensor")
    assert kinds(recording) == [number, number, (8, "result", "aten::where")]


def test_a_python_scalar_argument_is_a_stray() -> None:
    x = torch.ones(100)
    assert kinds(record(lambda: x.mul_(3)))[0] == (8, "stray", "")


def test_a_generators_state_is_a_stray() -> None:
    state_bytes = torch.get_rng_state().nbytes
    assert kinds(record(torch.get_rng_state)) == [(state_bytes, "stray", "")]


def test_a_result_in_backward_names_its_autograd_node() -> None:
    x = torch.ones(100, requires_grad=True)
    results = [e for e in record(lambda: x.sin().sum().backward()).events if e.bytes == 400]
    assert [(e.node, e.operator) for e in results] == [
        ("", "aten::sin"),
        ("SinBackward0", "aten::cos"),
        ("SinBackward0", "aten::mul"),
    ]


# ------------------------------------------------------------------ effects of a dispatch mode


def fan_in() -> None:
    """y is used twice, so its two gradients of 400 bytes are added."""
    x = torch.ones(100, requires_grad=True)
    y = x.exp()
    (y.sin() + y.cos()).sum().backward()


def test_under_a_recording_autograd_still_adds_in_place() -> None:
    unwatched = record(fan_in)
    assert "aten::add" in unwatched.allocated_by("result")  # in forward
    assert not [e for e in unwatched.events if e.node and e.operator == "aten::add"]


def test_a_no_op_mode_makes_autograd_add_out_of_place() -> None:
    changes = dispatch_mode_effects(lambda: fan_in)
    (added,) = changes.added.items()  # the node whose gradient comes second
    assert added == (OperatorResult("SinBackward0", "aten::add", 400), 1)
    assert not changes.removed


def test_under_a_mode_the_gradient_of_gather_is_scattered_out_of_place() -> None:
    def step() -> None:
        x = torch.ones(10, 10, requires_grad=True)
        x.gather(1, torch.zeros(10, 1, dtype=torch.int64)).sum().backward()

    changes = dispatch_mode_effects(lambda: step)
    assert changes.added == {OperatorResult("GatherBackward0", "aten::scatter_add", 400): 1}


def test_under_a_mode_the_gradient_of_prod_runs_other_operators() -> None:
    def step() -> None:
        torch.ones(10, requires_grad=True).prod().backward()

    removed = {made.operator for made in dispatch_mode_effects(lambda: step).removed}
    assert "aten::div" in removed  # the product is divided by each factor, as none is zero


# ------------------------------------------------------------------ comparing a trace


def recording_of(*blocks: tuple[int, int, str]) -> AllocatorRecording:
    """Make a recording of (change in bytes, address, kind) events."""
    return AllocatorRecording(tuple(MemoryEvent(*block, operator="", node="") for block in blocks))


TWO_RESULTS_AND_SCRATCH = recording_of(
    (400, 1, "result"),
    (999, 2, "scratch"),
    (-999, 2, "scratch"),
    (40, 3, "result"),
    (8, 4, "stray"),
    (-8, 4, "stray"),
    (-400, 1, "result"),
)


def test_a_trace_with_exactly_the_results_is_exact() -> None:
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


def test_an_allocation_that_is_not_in_the_recording_is_missing() -> None:
    comparison = compare([400, 400, -400, 40, -400], TWO_RESULTS_AND_SCRATCH)
    assert comparison.missing == {400: 1}
    assert comparison.peak_difference == 360
    assert not comparison.exact


def test_a_result_that_was_not_observed_is_unseen() -> None:
    comparison = compare([400, -400], TWO_RESULTS_AND_SCRATCH)
    assert comparison.unseen == {40: 1}
    assert comparison.missing == {}
    assert not comparison.exact


def test_a_block_that_is_never_freed_changes_the_live_bytes() -> None:
    comparison = compare([400, 40], TWO_RESULTS_AND_SCRATCH)
    assert comparison.live_difference == 400
    assert not comparison.exact


def test_a_block_that_is_freed_too_late_changes_the_peak() -> None:
    recording = recording_of((400, 1, "result"), (-400, 1, "result"), (40, 2, "result"))
    comparison = compare([400, 40, -400], recording)
    assert comparison.live_difference == 0
    assert comparison.peak_difference == 40
    assert not comparison.exact


def test_an_allocation_never_matches_scratch_of_its_size() -> None:
    comparison = compare([400, 999, -999, 40, -400], TWO_RESULTS_AND_SCRATCH)
    assert comparison.missing == {999: 1}
    assert comparison.peak_difference == 1399 - 440


def test_an_observed_stray_is_not_a_difference() -> None:
    recording = recording_of((8, 4, "stray"), (400, 1, "result"), (-8, 4, "stray"), (8, 4, "stray"))
    comparison = compare([8, 400, -8], recording)
    assert comparison.exact
    assert comparison.excess == {8: 1}


def test_storages_from_before_are_left_out_but_their_frees_are_compared() -> None:
    def event(count: int, storage: int, phase: str) -> Event:
        return Event(count, storage, "activations", "", "", phase, "float32", (1,))

    found, made = event(70, 1, "before"), event(400, 2, "forward")
    freed = event(-70, 1, "backward"), event(-400, 2, "backward")
    trace = Trace((found, made, *freed))
    recording = recording_of((400, 2, "result"), (-70, 1, "result"), (-400, 2, "result"))
    assert compare(trace, replace(recording, warmed_up=True)).exact


def test_frees_of_older_storages_are_left_out_of_a_recording_without_a_warm_up() -> None:
    older = [torch.ones(100, requires_grad=True)]
    older[0].grad = torch.ones(100)

    def step() -> None:
        older[0].grad = None
        (older[0] * torch.ones(50, 100)).sum().backward()

    trace = memlab.measure(step, model=torch.nn.ParameterList(older))
    assert compare(trace, record(step)).exact
    assert compare(trace, record(step, warm_up=step)).exact


def test_workspaces_are_added_to_a_step_that_frees_older_gradients() -> None:
    model = torch.nn.Conv2d(3, 8, 3)
    x = torch.randn(2, 3, 16, 16)

    def step() -> None:
        model.zero_grad()
        model(x).square().sum().backward()

    step()
    trace = memlab.measure(step, model=model)
    added = [with_workspace(trace, recording) for recording in (record(step), second(step))]
    assert [a.live_bytes for a in added] == [trace.live_bytes] * 2
    assert all(any(e.category == "workspace" for e in a.events) for a in added)
    assert any("workspaces are not counted" in note for note in trace.notes)
    assert not any("workspaces are not counted" in note for a in added for note in a.notes)


def second(step) -> AllocatorRecording:
    return record(step, warm_up=step)


def test_an_empty_step_is_exact() -> None:
    comparison = compare([], AllocatorRecording(()))
    assert comparison.exact
    assert comparison.excess_share == 0


def test_a_comparison_prints_the_differences() -> None:
    text = str(compare([400, 400, -400, 12], TWO_RESULTS_AND_SCRATCH))
    assert "exact: no" in text
    assert "observed, but not allocated: 1 × 400 B, 1 × 12 B" in text
    assert "results not observed: 1 × 40 B" in text


# ------------------------------------------------------------------ the kinds of steps


@pytest.mark.few(1)
@pytest.mark.parametrize("name", quick(list(KINDS)[1::32], KINDS))
def test_a_rebuilt_kind_has_the_same_recording(name: str) -> None:
    def events() -> list[tuple[int, str, str]]:
        step, _, _ = KINDS[name]()
        recording = record(step, warm_up=step)
        return [(event.bytes, event.kind, event.operator) for event in recording.events]

    first = events()
    assert Counter(first) == Counter(events())
    assert first


def test_a_recording_hides_the_profilers_messages_but_not_the_steps(capfd):
    held = [torch.ones(1000)]

    def step() -> None:
        held.clear()  # from before: the profiler warns that the size is unknown
        os.write(2, b"from below\n")
        print("from Python", file=sys.stderr)

    record(step)
    assert sorted(capfd.readouterr().err.splitlines()) == ["from Python", "from below"]


def test_cycles_from_the_warm_up_are_freed_before_the_step():
    def warm_up():
        cycle = [torch.ones(1024)]
        cycle.append(cycle)

    assert record(lambda: torch.ones(4), warm_up=warm_up).bytes_at_start == 0


def test_tensors_kept_by_the_warm_up_are_alive_at_the_start():
    kept = []
    recording = record(lambda: torch.ones(4), warm_up=lambda: kept.append(torch.ones(1024)))
    assert recording.bytes_at_start == 4096
    assert recording.peak_bytes == 16
