"""Partitions: each element has one owner, shards are equal, and padding is minimal."""

from math import prod

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from memlab.zero.layout import matching_views
from memlab.zero.partitioning import Weight, flat_bucket, partition, row_bucket

SHAPES = st.lists(st.lists(st.integers(1, 7), max_size=3).map(tuple), min_size=1, max_size=5)
RANKS = st.integers(1, 9)
BUCKETS = [flat_bucket, row_bucket]


def weights_of(*shapes: tuple[int, ...], **settings) -> list[Weight]:
    return [Weight(f"w{number}", shape, **settings) for number, shape in enumerate(shapes)]


def owned(bucket, rank: int) -> list[tuple[str, int, int, int]]:
    return [(chunk.weight.name, *chunk[1:]) for chunk in bucket.chunks(rank)]


def test_a_flat_bucket_is_cut_inside_a_weight_and_padded_at_the_end():
    bucket = flat_bucket(weights_of((5,), (2, 4)), ranks=3)
    assert (bucket.elements, bucket.shard_elements, bucket.padded_elements) == (13, 5, 15)
    assert owned(bucket, 0) == [("w0", 0, 5, 0)]
    assert owned(bucket, 1) == [("w1", 0, 5, 0)]
    assert owned(bucket, 2) == [("w1", 5, 8, 0)]


def test_rows_are_distributed_by_weight_and_the_last_ranks_may_have_none():
    bucket = row_bucket(weights_of((5, 2), (1,), ()), ranks=4)
    # 2 of 5 rows, 1 of 1 row, 1 of 1 element: ranks 1 to 3 have padding instead.
    assert (bucket.elements, bucket.shard_elements, bucket.padded_elements) == (12, 6, 24)
    assert owned(bucket, 0) == [("w0", 0, 4, 0), ("w1", 0, 1, 4), ("w2", 0, 1, 5)]
    assert owned(bucket, 2) == [("w0", 8, 10, 0)]
    assert owned(bucket, 3) == []


@pytest.mark.parametrize("bucket_of", BUCKETS)
@given(shapes=SHAPES, ranks=RANKS)
def test_every_element_has_one_owner(bucket_of, shapes, ranks):
    weights = weights_of(*shapes)
    bucket = bucket_of(weights, ranks)
    owners = {weight.name: [0] * weight.elements for weight in weights}
    for rank in range(ranks):
        for weight, start, stop, _ in bucket.chunks(rank):
            for element in range(start, stop):
                owners[weight.name][element] += 1
    assert all(count == 1 for counts in owners.values() for count in counts)


@pytest.mark.parametrize("bucket_of", BUCKETS)
@given(shapes=SHAPES, ranks=RANKS)
def test_the_chunks_of_a_rank_lie_in_its_shard_and_do_not_overlap(bucket_of, shapes, ranks):
    bucket = bucket_of(weights_of(*shapes), ranks)
    for rank in range(ranks):
        places = [
            place
            for _, start, stop, at in bucket.chunks(rank)
            for place in range(at, at + stop - start)
        ]
        assert len(set(places)) == len(places)
        assert all(0 <= place < bucket.shard_elements for place in places)


@given(shapes=SHAPES, ranks=RANKS)
def test_flat_padding_is_less_than_one_element_per_rank(shapes, ranks):
    bucket = flat_bucket(weights_of(*shapes), ranks)
    assert bucket.elements == sum(map(prod, shapes))
    assert 0 <= bucket.padded_elements - bucket.elements < ranks


@given(shapes=SHAPES, ranks=RANKS)
def test_rows_match_torch_chunk(shapes, ranks):
    """FSDP2 uses torch.chunk, and every rank gets as much space as the first one needs."""
    bucket = row_bucket(weights_of(*shapes), ranks)
    for number, shape in enumerate(shapes):
        numbered = torch.arange(prod(shape)).view(shape or (1,))
        chunks = numbered.chunk(ranks)
        for rank in range(ranks):
            mine = [p for p in bucket.chunks(rank) if p.weight.name == f"w{number}"]
            found = [n for p in mine for n in range(p.start, p.stop)]
            assert found == (chunks[rank].flatten().tolist() if rank < len(chunks) else [])
        assert bucket.slots[number].run == chunks[0].numel()


@pytest.mark.parametrize("bucket_of", BUCKETS)
@given(shapes=SHAPES, ranks=RANKS)
def test_a_whole_bucket_is_all_shards_in_rank_order(bucket_of, shapes, ranks):
    bucket = bucket_of(weights_of(*shapes), ranks)
    tensors = [torch.rand(shape) for shape in shapes]
    whole = torch.zeros(bucket.padded_elements)
    for slot, tensor in zip(bucket.slots, tensors, strict=True):
        for bucket_view, weight_view in matching_views(bucket, slot, whole, tensor):
            bucket_view.copy_(weight_view)
    by_name = {w.name: tensor.view(-1) for w, tensor in zip(bucket.weights, tensors, strict=True)}
    for rank in range(ranks):
        shard = torch.zeros(bucket.shard_elements)
        for weight, start, stop, at in bucket.chunks(rank):
            shard[at : at + stop - start] = by_name[weight.name][start:stop]
        assert torch.equal(whole[bucket.span(rank)], shard)


@pytest.mark.parametrize("bucket_of", BUCKETS)
@given(shapes=SHAPES, ranks=RANKS)
def test_copying_into_a_bucket_and_back_is_exact(bucket_of, shapes, ranks):
    bucket = bucket_of(weights_of(*shapes), ranks)
    whole = torch.zeros(bucket.padded_elements)
    for slot, shape in zip(bucket.slots, shapes, strict=True):
        tensor, again = torch.rand(shape), torch.zeros(shape)
        for bucket_view, weight_view in matching_views(bucket, slot, whole, tensor):
            bucket_view.copy_(weight_view)
        for bucket_view, weight_view in matching_views(bucket, slot, whole, again):
            weight_view.copy_(bucket_view)
        assert torch.equal(again, tensor)


# ------------------------------------------------------------------ the plan of a model

MIXED = [
    Weight("a", (3, 2), unit="one"),
    Weight("b", (4,), group=1, unit="one"),
    Weight("c", (3, 2), torch.bfloat16, unit="one"),
    Weight("d", (5,), unit="two"),
    Weight("e", (2,), unit="two", trained=False),
]


def together(stage: int) -> list[list[str]]:
    plan = partition(MIXED, ranks=2, stage=stage)
    return [[weight.name for weight in bucket.weights] for bucket in plan.buckets]


@pytest.mark.parametrize("stage", [0, 1])
def test_a_flat_bucket_has_one_group_and_one_dtype(stage):
    assert together(stage) == [["a", "d"], ["b"], ["c"]]


def test_buckets_of_stage_2_do_not_span_units():
    assert together(2) == [["a"], ["b"], ["c"], ["d"]]


def test_buckets_of_stage_3_span_groups_and_include_frozen_weights():
    assert together(3) == [["a", "b"], ["c"], ["d", "e"]]


def test_a_flat_shard_is_stepped_as_one_tensor():
    [bucket] = partition(MIXED[1:2], ranks=3, stage=1).buckets
    assert bucket.optimizer_spans() == [(1, slice(0, 2))]


def test_adjacent_rows_of_one_group_are_stepped_as_one_tensor():
    first, second, _ = partition(MIXED, ranks=2, stage=3).buckets
    assert first.optimizer_spans() == [(0, slice(0, 4)), (1, slice(4, 6))]
    assert second.optimizer_spans() == [(0, slice(0, 4))]
    [bucket] = partition([MIXED[0], MIXED[3]], ranks=2, stage=3).buckets[:1]
    assert bucket.optimizer_spans() == [(0, slice(0, 4))]


def test_frozen_weights_are_not_stepped():
    [bucket] = partition(MIXED[3:], ranks=1, stage=3).buckets
    assert bucket.optimizer_spans() == [(0, slice(0, 5))]


def test_the_plan_counts_padding():
    plan = partition(weights_of((5,), (3, 3)), ranks=4, stage=1)
    assert (plan.elements, plan.shard_elements, plan.padded_elements) == (14, 4, 16)
    plan = partition(weights_of((5,), (3, 3)), ranks=4, stage=3)
    assert (plan.elements, plan.shard_elements, plan.padded_elements) == (14, 2 + 3, 20)


def test_a_weight_named_twice_is_refused():
    with pytest.raises(ValueError, match="a weight twice"):
        partition([*weights_of((2,)), *weights_of((2,))], ranks=2, stage=1)


@pytest.mark.parametrize(("ranks", "stage"), [(0, 1), (2, 4), (2, -1)])
def test_zero_ranks_and_unknown_stages_are_refused(ranks, stage):
    with pytest.raises(ValueError, match="got 0 ranks" if not ranks else "got stage"):
        partition(weights_of((2,)), ranks=ranks, stage=stage)
