"""Day 5's checks accept other right answers, refuse wrong ones, and agree with the meter."""

from functools import partial
from itertools import pairwise

import pytest
import torch
from edited import each, verdict_on
from torch.utils.checkpoint import checkpoint as torch_checkpoint

from memlab.checkpointing import checkpoint
from memlab.checkpointing.schedules import sqrt_schedule
from memlab.course import days
from memlab.course.checks import day05
from memlab.course.checks.day05 import best_segments, checkpointed, even_schedule
from memlab.course.exercises import OK, WRONG, judge

FUNCTION, HOOKS, BEST_SEGMENTS, SCHEDULE = days.day(5).exercises

# ------------------------------------------------------------------ other right answers


class ByHand(torch.autograd.Function):
    """Restores the random state by hand, reads ctx.needs_input_grad, and calls output.backward."""

    @staticmethod
    def forward(ctx, fn, *inputs):
        ctx.save_for_backward(torch.get_rng_state(), *inputs)
        ctx.fn = fn
        with torch.no_grad():
            return fn(*inputs)

    @staticmethod
    def backward(ctx, gradient):
        state, *inputs = ctx.saved_tensors
        inputs = [x.detach() for x in inputs]
        for x, needed in zip(inputs, ctx.needs_input_grad[1:], strict=True):
            x.requires_grad = needed
        now = torch.get_rng_state()
        torch.set_rng_state(state)
        with torch.set_grad_enabled(True):
            ctx.fn(*inputs).backward(gradient)
        torch.set_rng_state(now)
        return None, *[x.grad if x.requires_grad else None for x in inputs]


def by_hand(fn, *inputs):
    return ByHand.apply(fn, *inputs)


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


def by_sorted_sizes(blocks, segments):
    """Borders by division, then the longest segment first."""
    borders = [blocks * n // segments for n in range(segments + 1)]
    sizes = sorted((b - a for a, b in pairwise(borders)), reverse=True)
    parts, stages = [], iter(range(blocks))
    for size in sizes:
        parts.append(tuple(next(stages) for _ in range(size)))
    return tuple(parts)


def by_number_of_blocks(blocks, input_bytes, block_bytes):
    """Loops over the length of the longest segment, and takes the fewest segments for each."""
    held = []
    for longest in range(1, blocks + 1):
        segments = -(-blocks // longest)
        held.append((segments * input_bytes + -(-blocks // segments) * block_bytes, segments))
    return min(held)[::-1]


@pytest.mark.parametrize(
    ("exercise", "answer"),
    [
        (FUNCTION, by_hand),
        (HOOKS, with_slots_of_a_class),
        (BEST_SEGMENTS, by_number_of_blocks),
        (SCHEDULE, by_sorted_sizes),
    ],
)
def test_another_right_answer_passes(exercise, answer):
    verdict = judge(exercise, answer)
    assert verdict.status == OK, verdict


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


def without_a_graph(fn, *inputs):
    """5.2 without enable_grad: backward reads a slot that does not exist."""
    slots = []

    def leave(tensor):
        slots.append(None)
        return len(slots) - 1

    def take(number):
        slots.clear()
        with torch.autograd.graph.saved_tensors_hooks(slots.append, lambda nothing: nothing):
            fn(*inputs)
        return slots[number]

    with torch.autograd.graph.saved_tensors_hooks(leave, take):
        return fn(*inputs)


def test_a_second_run_without_a_graph_is_named_for_every_error():
    assert "torch.enable_grad()" in judge(HOOKS, without_a_graph).text


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


# ------------------------------------------------------------------ the solution, edited

INPUTS = "inputs = [x.detach()"
RETURN = "return None, *(x.grad for x in inputs)"
BACKWARD = "torch.autograd.backward(output, gradient)"
FORWARD = "return fn(*inputs)\n"
NOT_WANTED = (
    "if not ctx.needs_input_grad[1]:\n            return (None,) * len(ctx.needs_input_grad)"
)
OWN = "inputs = [x.detach().requires_grad_(x.requires_grad) for x in ctx.saved_tensors]"
FIRST_DETACHED = (
    (
        OWN,
        "x, *others = ctx.saved_tensors\n"
        "        inputs = [x.detach().requires_grad_(x.requires_grad), *others]",
    ),
    (RETURN, "return None, inputs[0].grad, *(None for _ in others)"),
)
SLOT_OF = "slots.append(None)\n        return len(slots) - 1"
IS_EMPTY = "if slots[index] is None:"
FLOATS = "t.is_floating_point() and t.numel() > 1"
STATE = "state = [], torch.get_rng_state()"
EMPTIED_TOGETHER = """tensor = slots[index]
        out.append(index)
        if len(out) == len(slots):
            out.clear()
            slots[:] = [None] * len(slots)"""
RESTORED_FOR_MODULES = "hasattr(ctx.fn, 'training') and torch.set_rng_state(ctx.state)"
ONE_LEAF = OWN.replace("[x.detach()", "[leaves.setdefault(x.data_ptr(), x.detach()").replace(
    "(x.requires_grad) for", "(x.requires_grad)) for"
)
ONE_LEAF = f"leaves = {{}}\n        {ONE_LEAF}"
IS_LEAF = "t.is_leaf and t.requires_grad"
LEAVES_STAY = (  # weights are in memory anyway
    (SLOT_OF, f"t = tensor\n        if {IS_LEAF}:\n            return t\n        {SLOT_OF}"),
    (
        IS_EMPTY,
        f"if isinstance(index, torch.Tensor):\n            return index\n        {IS_EMPTY}",
    ),
    ("slots.append, lambda", f"lambda t: None if {IS_LEAF} else slots.append(t), lambda"),
)
BY_SUM = "with torch.enable_grad():\n            (output * gradient).sum().backward()"

REFUSED = [
    (
        "5.1",
        "the output is saved too",
        (
            "ctx.save_for_backward(*inputs)\n        return fn(*inputs)",
            "y = fn(*inputs)\n        ctx.save_for_backward(*inputs, y)\n        return y",
        ),
        ("for x in ctx.saved_tensors]", "for x in ctx.saved_tensors[:-1]]"),
    ),
    (
        "5.2",
        "the random state is read after fn has drawn",
        ("slots, state = [], torch.get_rng_state()", "slots, states = [], []"),
        (
            "        slots.append(None)\n",
            "        slots.append(None); states.append(torch.get_rng_state())\n",
        ),
        ("set_rng_state(state)", "set_rng_state(states[0])"),
    ),
    ("5.1", "the first input alone", (RETURN, "return None, inputs[0].grad, *[None] * 3")),
    (
        "5.1",
        "the first input detached alone",
        *FIRST_DETACHED,
    ),
    (
        "5.1",
        "nothing, if the first input requires no gradient",
        (INPUTS, f"{NOT_WANTED}\n        {INPUTS}"),
    ),
    (
        "5.1",
        "the weights' gradients anew",
        (BACKWARD, f"ctx.fn.zero_grad()\n        {BACKWARD}"),
    ),
    (
        "5.1",
        "unfreezes weights",
        (BACKWARD, f"{BACKWARD}\n        getattr(ctx.fn, 'requires_grad_', bool)()"),
    ),
    (
        "5.2",
        "slots shared by all calls",
        ("forget_by_hooks(fn, *inputs):", "forget_by_hooks(fn, *inputs, slots=[]):"),
        ("slots, state = [], torch", "slots.clear()\n    state = torch"),
    ),
    (
        "5.2",
        "masks and scalars are kept",
        (
            SLOT_OF,
            f"t = tensor\n        if not ({FLOATS}):\n            return t\n        {SLOT_OF}",
        ),
        ("slots.append, lambda", f"lambda t: slots.append(t) if {FLOATS} else None, lambda"),
        (
            IS_EMPTY,
            f"if isinstance(index, torch.Tensor):\n            return index\n        {IS_EMPTY}",
        ),
    ),
    (
        "5.2",
        "fills only if all slots are empty",
        (IS_EMPTY, "if all(t is None for t in slots):"),
    ),
    (
        "5.1",
        "random state of modules only",
        ("torch.set_rng_state(ctx.state)", RESTORED_FOR_MODULES),
    ),
    ("5.1", "one leaf for an input given twice", (OWN, ONE_LEAF)),
    ("5.1", "parameters of fn", (BACKWARD, f"[*ctx.fn.parameters()]\n        {BACKWARD}")),
    (
        "5.2",
        "slots are emptied together",
        (f"slots, {STATE}", f"out = []\n    slots, {STATE}"),
        ("tensor, slots[index] = slots[index], None", EMPTIED_TOGETHER),
    ),
    (
        "5.2",
        "a graph under no_grad",
        (
            "with saved_tensors_hooks(pack, unpack):",
            "with saved_tensors_hooks(pack, unpack), torch.enable_grad():",
        ),
    ),
    (
        "5.2",
        "the second result is kept",
        ("                fn(*inputs)\n", "                forget_by_hooks.last = fn(*inputs)\n"),
    ),
    (
        "5.3",
        "only divisors",
        ("in range(1, blocks + 1):", "in [s for s in range(1, blocks + 1) if blocks % s == 0]:"),
    ),
    (
        "5.3",
        "the last takes the rest",
        ("-(-blocks // segments)", "blocks - (segments - 1) * (blocks // segments)"),
    ),
]
ACCEPTED = [
    (
        "5.1",
        "a graph in forward, and a sum in backward",
        (FORWARD, "with torch.enable_grad():\n            return fn(*inputs).detach().clone()\n"),
        (BACKWARD, BY_SUM),
    ),
    ("5.1", "a second run on clones", (INPUTS, "inputs = [x.detach().clone()"), (BACKWARD, BY_SUM)),
    ("5.2", "weights are saved as they are", *LEAVES_STAY),
    ("5.2", "detached", ("slots.append, lambda", "lambda t: slots.append(t.detach()), lambda")),
]


@each(REFUSED)
def test_what_is_wrong_is_refused(edit, tmp_path):
    assert verdict_on(edit, tmp_path).status == WRONG


@each(ACCEPTED)
def test_what_is_right_is_accepted(edit, tmp_path):
    verdict = verdict_on(edit, tmp_path)
    assert verdict.status == OK, verdict


def test_hooks_that_fill_no_slot_are_not_mistaken_for_missing_hooks(tmp_path):
    """The second run appends behind the empty slots."""
    verdict = verdict_on(("5.2", (("slots.clear()", "pass"),)), tmp_path, named=True)
    assert "under saved-tensor hooks" in verdict.text
    assert "set hooks for the second" not in verdict.text


def test_a_verdict_names_the_shapes_of_swapped_slots(tmp_path):
    last = ("tensor, slots[index] = slots[index], None", "tensor = slots.pop()")
    empty = ("if slots[index] is None:", "if not slots or slots[-1] is None:")
    verdict = verdict_on(("5.2", (last, empty)), tmp_path)
    assert "of fn had shape (8, 64), and came back with shape (64, 16)" in verdict.text


def test_a_verdict_names_an_input_that_was_not_detached(tmp_path):
    verdict = verdict_on(("5.1", FIRST_DETACHED), tmp_path)
    assert verdict.status == WRONG
    assert "an input was not detached" in verdict.text


def test_other_random_numbers_in_the_second_run_fail_only_the_case_with_dropout(tmp_path):
    late = "y = fn(*inputs)\n    state = torch.get_rng_state()\n    return y\n"
    verdict = verdict_on(("5.2", (("        return fn(*inputs)\n", f"        {late}"),)), tmp_path)
    assert "with dropout (both runs must draw the same)" in verdict.text


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
