"""The formulas of parallel training against numbers from the papers, and their errors.

tests/parallel compares them with what real ranks save and send.
"""

import pytest

from memlab.planner.parallel import (
    micro_batches_in_flight,
    pipeline_elements,
    ring_attention_blocks,
    ring_attention_elements,
    saved_bytes,
    tensor_parallel_elements,
)


@pytest.mark.parametrize(
    ("sequence_parallel", "by_paper"),
    [(False, lambda t: 10 + 24 / t), (True, lambda t: 34 / t)],
)
@pytest.mark.parametrize("tensor", [1, 2, 4, 8])
def test_a_layer_saves_what_table_2_of_korthikanti_et_al_says(tensor, sequence_parallel, by_paper):
    """In bytes per element of s·b·h, without the attention scores."""
    found = saved_bytes(
        48, whole=10, divided=24, tensor=tensor, sequence_parallel=sequence_parallel
    )
    assert found == 48 * by_paper(tensor)


def test_context_parallelism_divides_all_that_a_layer_saves():
    assert saved_bytes(48, whole=10, divided=24, context=4) == 12 * 34


def test_in_flight_micro_batches_by_hand():
    assert [micro_batches_in_flight(stage, 4, 8) for stage in range(4)] == [4, 3, 2, 1]
    assert [micro_batches_in_flight(stage, 4, 2) for stage in range(4)] == [2, 2, 2, 1]


def test_sent_elements_by_hand():
    assert tensor_parallel_elements(10, 8, 2) == 4 * 80  # an all-reduce of two ranks sends it once
    assert tensor_parallel_elements(10, 8, 2, sequence_parallel=True) == 5 * 80
    assert [pipeline_elements(stage, 3, 5, 80) for stage in range(3)] == [400, 800, 400]
    assert ring_attention_elements(12, 16, 4) == (3 + 3 + 4) * 3 * 16


def test_nothing_is_sent_by_one_rank_alone():
    assert tensor_parallel_elements(10, 8, 1, sequence_parallel=True) == 0
    assert pipeline_elements(0, 1, 5, 80) == 0


def test_blocks_of_others_by_hand():
    assert [ring_attention_blocks(rank, 4) for rank in range(4)] == [1, 2, 2, 2]
    assert [ring_attention_blocks(rank, 2) for rank in range(2)] == [1, 1]
    assert ring_attention_blocks(0, 1) == 0


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: saved_bytes(9, whole=1, divided=1, context=2), "got 9 tokens for 2 context ranks"),
        (
            lambda: saved_bytes(9, whole=1, divided=1, tensor=2, sequence_parallel=True),
            "got 9 tokens for 2 tensor ranks",
        ),
        (lambda: saved_bytes(9, whole=1, divided=1, tensor=0), "got 9 bytes for 0 tensor ranks"),
        (lambda: micro_batches_in_flight(4, 4, 8), "got stage 4 of 4 and 8 micro-batches"),
        (lambda: micro_batches_in_flight(0, 4, 0), "and 0 micro-batches"),
    ],
)
def test_sizes_that_do_not_fit_are_refused(call, message):
    with pytest.raises(ValueError, match=message):
        call()
