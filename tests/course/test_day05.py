"""Day 5: what its checks tell a learner, and what the lesson claims."""

from functools import partial

import pytest
import torch
from edited import verdict_on
from torch.utils.checkpoint import checkpoint as torch_checkpoint

from memlab.checkpointing import checkpoint
from memlab.checkpointing.schedules import sqrt_schedule
from memlab.course import days
from memlab.course.checks import day05
from memlab.course.checks.day05 import best_segments, checkpointed, even_schedule
from memlab.course.exercises import WRONG, judge

FUNCTION, HOOKS, BEST_SEGMENTS, SCHEDULE = days.day(5).exercises

# ------------------------------------------------------------------ answers


def with_slots_of_a_class(fn, *inputs):
    """Slots are objects, filled in the order of creation."""

    class Slot:
        tensor = None

    slots, state = [], torch.get_rng_state()

    def leave(tensor):
        slots.append(Slot())
        return slots[-1]

    def take(slot):
        if slot.tensor is None:
            waiting = iter(slots)

            def fill(tensor):
                next(waiting).tensor = tensor.detach()

            now = torch.get_rng_state()
            torch.set_rng_state(state)
            with torch.enable_grad(), torch.autograd.graph.saved_tensors_hooks(fill, lambda _: _):
                fn(*inputs)
            torch.set_rng_state(now)
        tensor, slot.tensor = slot.tensor, None
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(leave, take):
        return fn(*inputs)


@pytest.mark.parametrize(
    "answer",
    [with_slots_of_a_class, checkpoint, partial(torch_checkpoint, use_reentrant=False)],
    ids=["own", "memlab", "torch"],
)
def test_the_first_exercise_refuses_hooks(answer):
    """Their values, bytes and counts are right."""
    verdict = judge(FUNCTION, answer)
    assert verdict.status == WRONG
    assert "Use an autograd Function" in verdict.text


def test_a_verdict_on_a_schedule_names_only_what_is_wrong():
    """Each block runs twice, and the number of segments is right."""

    def shorter_first(blocks, segments):
        sizes = [len(segment) for segment in even_schedule(blocks, segments)][::-1]
        stages = iter(range(blocks))
        return tuple(tuple(next(stages) for _ in range(size)) for size in sizes)

    text = judge(SCHEDULE, shorter_first).text
    assert "peak" in text
    assert "run" not in text.partition(".")[0]
    assert "segments, wanted" not in text


def test_hooks_that_fill_no_slot_are_not_mistaken_for_missing_hooks():
    """The second run appends behind the empty slots."""
    verdict = verdict_on("5.2", ("slots.clear()", "pass"))
    assert "under saved-tensor hooks" in verdict.text
    assert "set hooks for the second" not in verdict.text


# ------------------------------------------------------------------ against the meter


INPUT = day05.OUTPUT_BYTES
BLOCK = 9 * INPUT  # its input, and GELU's input and output, each 4 times as wide


def metered(blocks, segments):
    return day05._run_by(even_schedule(blocks, segments), blocks)[0]


@pytest.mark.parametrize(("blocks", "segments"), [(4, 2), (6, 3), (6, 2), (9, 3), (5, 5), (8, 1)])
def test_for_equal_segments_meter_and_formula_differ_by_a_constant(blocks, segments):
    formula = segments * INPUT + blocks // segments * BLOCK
    assert metered(blocks, segments) - formula == metered(1, 1) - (INPUT + BLOCK)


@pytest.mark.parametrize(("blocks", "segments"), [(7, 3), (5, 2), (12, 5)])
def test_unequal_segments_hold_less_than_the_formula(blocks, segments):
    """The longer segments come first."""
    formula = segments * INPUT + -(-blocks // segments) * BLOCK
    assert metered(blocks, segments) - formula < metered(1, 1) - (INPUT + BLOCK)


@pytest.mark.few(1)
@pytest.mark.parametrize("blocks", [4, 12, 36])
def test_no_other_number_of_equal_segments_has_a_lower_peak(blocks):
    peaks = {n: metered(blocks, n) for n in range(1, blocks + 1) if blocks % n == 0}
    best, _ = best_segments(blocks, INPUT, BLOCK)
    assert peaks[best] == min(peaks.values())


@pytest.mark.parametrize("blocks", [1, 2, 5, 12, 32, 126])
def test_sqrt_schedule_has_even_segments(blocks):
    schedule = sqrt_schedule(blocks)
    assert even_schedule(blocks, len(schedule)) == schedule


# ------------------------------------------------------------------ the bill


@pytest.mark.slow
def test_a_third_sequence_adds_only_its_tokens_to_the_bills_peak():
    two, three = (checkpointed(batch=batch).at_peak for batch in (2, 3))
    tokens = 2 * 640 * 8  # one sequence and its targets, in int64
    assert three == two | {"inputs": two["inputs"] + tokens}
