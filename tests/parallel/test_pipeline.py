"""The 1F1B pipeline: its order for any size, and its values and bytes in real processes."""

import pytest
import torch
from parallel_ranks import (
    DOUBLE,
    INPUTS,
    LAYERS,
    MICRO_BATCHES,
    MICRO_ROWS,
    ORDERS,
    WIDTH,
    gradients_of,
    loss_of,
    part_of_layers,
)
from quick import together

from memlab.planner.parallel import micro_batches_in_flight, pipeline_elements
from memlab.reference import pipeline
from memlab.reference.pipeline import gpipe, most_in_flight, one_forward_one_backward

SIZES = [(stages, m) for stages in range(1, 6) for m in range(1, 9)]
each_size = together(("stages", "micro_batches"), SIZES)
each_order = pytest.mark.parametrize("order_of", ORDERS.values(), ids=ORDERS)


# ------------------------------------------------------------------ the order


@each_order
@each_size
def test_each_stage_runs_each_pass_once_and_forward_first(order_of, stages, micro_batches):
    numbers = list(range(micro_batches))
    for stage in range(stages):
        order = order_of(stage, stages, micro_batches)
        assert [n for kind, n in order if kind == "forward"] == numbers
        assert [n for kind, n in order if kind == "backward"] == numbers
        assert all(order.index(("forward", n)) < order.index(("backward", n)) for n in numbers)


@each_size
def test_stage_i_of_1f1b_has_min_m_p_minus_i_micro_batches_in_flight(stages, micro_batches):
    for stage in range(stages):
        order = one_forward_one_backward(stage, stages, micro_batches)
        assert most_in_flight(order) == micro_batches_in_flight(stage, stages, micro_batches)
        assert most_in_flight(gpipe(stage, stages, micro_batches)) == micro_batches


def ticks(order_of, stages, micro_batches, *, has_room=None):
    """Return when the last pass ends, if a forward pass takes 1 tick and a backward pass 2.

    A pass waits for its stage, for what it receives, and for room to send: by default, its neighbor
    has received the tensor before. Fails if all stages wait for each other.
    """
    has_room = has_room or room_for_one
    orders = [order_of(stage, stages, micro_batches) for stage in range(stages)]
    end, free = {}, [0] * stages
    while any(orders):
        ready = [s for s in range(stages) if orders[s] and can_run(orders, end, s, has_room)]
        assert ready, "deadlock"
        for stage in ready:
            kind, n = orders[stage].pop(0)
            source = stage - 1 if kind == "forward" else stage + 1
            start = max(free[stage], end.get((source, kind, n), 0))
            free[stage] = end[stage, kind, n] = start + (1 if kind == "forward" else 2)
    return max(free)


def can_run(orders, end, stage, has_room):
    """Return whether a stage's next pass has its input, and room for its output."""
    kind, n = orders[stage][0]
    step, stages = (1 if kind == "forward" else -1), range(len(orders))
    source, target = stage - step, stage + step
    has_input = source not in stages or (source, kind, n) in end
    return has_input and (target not in stages or has_room(orders, end, target, kind, n))


def room_for_one(orders, end, target, kind, n):
    """The target has received the tensor before, or is about to."""
    return n == 0 or (target, kind, n - 1) in end or orders[target][0] == (kind, n - 1)


def no_room(orders, end, target, kind, n):
    """A send waits until the target receives."""
    return orders[target][:1] == [(kind, n)]


@each_order
@each_size
def test_stages_wait_for_p_minus_1_micro_batches(order_of, stages, micro_batches):
    assert ticks(order_of, stages, micro_batches) == 3 * (micro_batches + stages - 1)


def test_1f1b_deadlocks_if_a_send_waits_for_its_receiver():
    with pytest.raises(AssertionError, match="deadlock"):
        # Stage 0 sends its second activation while stage 1 sends the first gradient. One tensor in
        # flight per direction is enough for any number of stages and micro-batches.
        ticks(one_forward_one_backward, 2, 2, has_room=no_room)
    assert ticks(gpipe, 2, 2, has_room=no_room) == ticks(gpipe, 2, 2)


def test_the_docstring_shows_the_order():
    for stage in range(3):
        order = one_forward_one_backward(stage, 3, 4)
        row = " ".join(f"{kind[0].upper()}{n}" for kind, n in order)
        assert f"    stage {stage}     {row}\n" in pipeline.__doc__


# ------------------------------------------------------------------ real stages


@pytest.fixture
def stages(launched):
    return [found["pipeline"] for found in launched]


@pytest.fixture(scope="module")
def one():
    """Return (losses, gradients) of one process that accumulates over the micro-batches."""
    model, losses = part_of_layers(0, 1), []
    for number, x in enumerate(INPUTS):
        loss = loss_of(model(x), number)
        loss.backward()
        losses.append(loss.detach())
    return losses, gradients_of(model)


def of_stage(gradients, stage, stages):
    each = 2 * LAYERS // stages
    return gradients[stage * each : (stage + 1) * each]


def equal(found, expected):
    return all(torch.equal(mine, other) for mine, other in zip(found, expected, strict=True))


@pytest.mark.few(1)
@pytest.mark.distributed
@pytest.mark.parametrize("name", ORDERS)
def test_losses_and_gradients_are_those_of_one_process_bit_for_bit(stages, one, name):
    for stage, found in enumerate(stages):
        assert equal(found[name]["gradients"], of_stage(one[1], stage, len(stages)))
        assert equal(found[name]["losses"], one[0] if stage == len(stages) - 1 else [])


@pytest.mark.distributed
def test_a_stage_that_takes_gradients_in_another_order_shows_in_its_gradients(stages, one):
    for stage, found in enumerate(stages):
        right = equal(found["swapped"]["gradients"], of_stage(one[1], stage, len(stages)))
        assert right == (stage > 0)


@pytest.mark.distributed
@pytest.mark.parametrize("name", ORDERS)
def test_torchs_schedules_give_the_same(stages, name):
    for found in stages:
        ours, theirs = found[name], found["torch"][name]
        assert equal(ours["gradients"], theirs["gradients"])
        assert equal(ours["losses"], theirs["losses"])


STREAM = DOUBLE * MICRO_ROWS * WIDTH  # what passes between stages


def peak_bytes(stage, stages, micro_batches, in_flight):
    """Return the peak of a stage, at the first weight gradient of a backward pass.

    A layer saves its input, and the input and output of its gelu. The first layer's input is
    received and counted there, or given to stage 0.
    """
    layers, last = LAYERS // stages, stages - 1
    weight = DOUBLE * 4 * WIDTH * WIDTH
    wide = 4 * STREAM  # a tensor of the intermediate size
    saved = layers * (STREAM + 2 * wide)
    outside = STREAM  # `like`, which has memory
    if stage == 0:
        saved -= STREAM
        outside += micro_batches * STREAM
    if stage == last:
        saved += STREAM  # of the loss; later its gradient
        outside += micro_batches * (STREAM + DOUBLE) + DOUBLE  # targets, losses, the loss's 1
    else:
        outside += STREAM + STREAM  # the received gradient, and the last output that was sent
    if stage > 0 and in_flight < micro_batches:
        outside += STREAM  # the gradient that the backward pass before has sent
    return 2 * 2 * layers * weight + in_flight * saved + outside + wide + weight


@pytest.mark.distributed
def test_a_stage_of_1f1b_holds_min_m_p_minus_i_micro_batches(stages):
    for stage, found in enumerate(stages):
        in_flight = micro_batches_in_flight(stage, len(stages), MICRO_BATCHES)
        expected = peak_bytes(stage, len(stages), MICRO_BATCHES, in_flight)
        assert found["1F1B"]["peak"] == expected
        assert found["one micro-batch"]["peak"] == peak_bytes(stage, len(stages), 1, 1)


@pytest.mark.distributed
def test_a_stage_of_gpipe_holds_all_micro_batches(stages):
    for stage, found in enumerate(stages):
        expected = peak_bytes(stage, len(stages), MICRO_BATCHES, MICRO_BATCHES)
        assert found["GPipe"]["peak"] == expected > found["1F1B"]["peak"]


@pytest.mark.distributed
@pytest.mark.parametrize("name", ORDERS)
def test_torch_also_holds_outputs_and_a_buffer_for_each_micro_batch(stages, name):
    for stage, found in enumerate(stages):
        theirs = found["torch"][name]
        weights = found[name]["at peak"]["parameters"]
        # In 1F1B too, so these bytes grow with the micro-batches. Outputs need not stay: backward
        # needs their node alone. Since torch 2.15, a buffer exists while its micro-batch needs it.
        is_kept = stage > 0 and torch.__version__ < "2.15"
        buffers = MICRO_BATCHES * STREAM if is_kept else 0  # for activations to arrive
        assert theirs["at peak"]["parameters"] == weights + buffers
        assert theirs["peak"] > found[name]["peak"]


@pytest.mark.distributed
@pytest.mark.parametrize("name", ORDERS)
def test_a_stage_sends_activations_on_and_gradients_back(stages, name):
    for stage, found in enumerate(stages):
        neighbours = [other for other in (stage - 1, stage + 1) if 0 <= other < len(stages)]
        expected = [(STREAM, other) for other in neighbours for _ in range(MICRO_BATCHES)]
        assert sorted(found[name]["sent"]) == expected
        by_formula = pipeline_elements(stage, len(stages), MICRO_BATCHES, MICRO_ROWS * WIDTH)
        assert sum(count for count, _ in expected) == DOUBLE * by_formula
