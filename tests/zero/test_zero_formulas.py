"""The formulas, compared with the figures of the ZeRO paper and with counting by hand."""

import pytest

from memlab.zero import communication_bytes, model_state_bytes
from memlab.zero.formulas import collective_passes, ring_elements

BILLION = 10**9


@pytest.mark.parametrize(("stage", "gigabytes"), [(0, 120), (1, 31.4), (2, 16.6), (3, 1.9)])
def test_the_formula_gives_the_figures_of_the_paper(stage, gigabytes):
    """Rajbhandari et al., figure 1: 7.5 billion weights on 64 ranks, in GB."""
    found = model_state_bytes(15 * BILLION // 2, ranks=64, stage=stage) / BILLION
    assert round(found, 1) == gigabytes


@pytest.mark.parametrize(
    ("stage", "count"), [(0, 16 * 10), (1, 4 * 10 + 12 * 3), (2, 2 * 10 + 14 * 3), (3, 16 * 3)]
)
def test_shards_are_rounded_up_on_every_rank(stage, count):
    """10 weights on 4 ranks are shards of 3."""
    assert model_state_bytes(10, ranks=4, stage=stage) == count


def test_bytes_per_weight_can_be_set():
    recipe = {"parameter_bytes": 4, "gradient_bytes": 4, "optimizer_bytes": 8}
    assert model_state_bytes(10, ranks=1, stage=3, **recipe) == 160
    assert model_state_bytes(10, ranks=5, stage=2, **recipe) == 40 + 2 * 12


@pytest.mark.parametrize("stage", range(4))
def test_a_single_rank_stores_everything_and_sends_nothing(stage):
    assert model_state_bytes(10, ranks=1, stage=stage) == 160
    assert communication_bytes(10, ranks=1, stage=stage) == 0


@pytest.mark.parametrize(("stage", "passes"), [(0, 2), (1, 2), (2, 2), (3, 3)])
def test_the_passes_of_one_step(stage, passes):
    """Each pass sends (R−1)/R of the weights, 2 bytes each."""
    assert communication_bytes(1000, ranks=4, stage=stage) == passes * 750 * 2


@pytest.mark.parametrize(("stage", "passes"), [(0, 2), (1, 2), (2, 6), (3, 15)])
def test_with_5_micro_batches_stage_3_sends_everything_15_times(stage, passes):
    assert collective_passes(stage, 5) == passes
    found = communication_bytes(1000, ranks=4, stage=stage, micro_batches=5, element_bytes=4)
    assert found == passes * 750 * 4


def by_hand(elements: int, ranks: int) -> list[int]:
    """Return how many elements each rank sends until every rank has every shard."""
    shard = -(-elements // ranks)
    has = [{rank} for rank in range(ranks)]
    latest = list(range(ranks))
    sent = [0] * ranks
    while any(len(shards) < ranks for shards in has):
        received = [latest[rank - 1] for rank in range(ranks)]
        for rank in range(ranks):
            sent[rank] += shard
            has[rank].add(received[rank])
        latest = received
    return sent


@pytest.mark.parametrize("ranks", [1, 2, 3, 7])
@pytest.mark.parametrize("elements", [1, 10, 21])
def test_a_ring_sends_all_shards_but_one(elements, ranks):
    assert by_hand(elements, ranks) == [ring_elements(elements, ranks)] * ranks


def test_zero_micro_batches_are_refused():
    with pytest.raises(ValueError, match="got 0 micro-batches"):
        communication_bytes(10, ranks=2, stage=3, micro_batches=0)


@pytest.mark.parametrize("formula", [model_state_bytes, communication_bytes])
def test_unknown_stages_are_refused(formula):
    with pytest.raises(ValueError, match="got stage 5; pass one of 0, data parallel"):
        formula(10, ranks=2, stage=5)
