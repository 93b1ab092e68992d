"""Bytes that each rank stores and sends, compared exactly with the formulas plus padding."""

from dataclasses import replace
from functools import cache
from itertools import accumulate

import pytest
import torch
from in_ranks import Wide, mean_square
from quick import quick
from ranked import TIED, adamw, micro_batches, model_of, sgd, sum_of_losses, two_groups

import memlab
from memlab.checkpointing import checkpoint_blocks, uniform_schedule
from memlab.model import GPT
from memlab.trace import Trace
from memlab.zero import Partition, communication_bytes, model_state_bytes, one_rank, simulate
from memlab.zero.collectives import Collective

FLOAT = 4
STAGES = range(4)
ALL_GATHER = Collective("all_gather", "weights")
ALL_REDUCE = Collective("all_reduce", "gradients")
REDUCE_SCATTER = Collective("reduce_scatter", "gradients")


@cache
def metered(ranks: int, stage: int, optimizer=adamw, *, micro: int = 1):
    """Return (the simulation, its second step)."""
    return metered_of(model_of(), ranks, stage, optimizer, micro=micro)


def metered_of(model, ranks: int, stage: int, optimizer=adamw, *, micro: int = 1, **settings):
    groups = two_groups(model)
    zero = simulate(model, optimizer(groups), ranks, stage, meter=memlab.meter, **settings)
    for number in range(2):
        step = zero.step(micro_batches(ranks * micro, seed=number), sum_of_losses)
    return zero, step


def after_backward(trace: Trace) -> dict[str, int]:
    """Return the bytes alive by category at the end of the last backward pass."""
    last = max(n for n, event in enumerate(trace.events, 1) if event.phase == "backward")
    held: dict[str, int] = {}
    for event in trace.events[:last]:
        held[event.category] = held.get(event.category, 0) + event.bytes
    return held


def counters_of(plan: Partition) -> int:
    """Return the number of AdamW's step counters: one per stepped tensor."""
    if plan.stage == 0:
        return sum(len(bucket.slots) for bucket in plan.buckets)
    return sum(len(bucket.optimizer_spans()) for bucket in plan.buckets)


def model_states(held: dict[str, int]) -> int:
    return sum(held.get(name, 0) for name in ("parameters", "gradients", "optimizer_state"))


def most(trace: Trace, category: str) -> int:
    """Return the peak bytes of one category."""
    return max(accumulate(e.bytes for e in trace.events if e.category == category))


# ------------------------------------------------------------------ memory


@pytest.mark.few(1)
@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("ranks", quick([1, 2], [1, 2, 5]))
def test_every_rank_stores_what_the_formula_says_with_padding(ranks, stage):
    zero, step = metered(ranks, stage)
    whole, shard = zero.plan.padded_elements, zero.plan.shard_elements
    counters = counters_of(zero.plan)
    unstepped = whole - zero.plan.elements if stage == 0 else 0  # padding of stage 0
    for trace in step.traces:
        held = after_backward(trace)
        assert held["parameters"] == FLOAT * (shard if stage >= 3 else whole)
        assert held["gradients"] == FLOAT * (shard if stage >= 2 else whole)
        moments = 2 * FLOAT * (shard if stage >= 1 else zero.plan.elements)
        assert held["optimizer_state"] == moments + FLOAT * counters
        float32 = {"parameter_bytes": 4, "gradient_bytes": 4, "optimizer_bytes": 8}
        expected = model_state_bytes(whole, ranks=ranks, stage=stage, **float32)
        assert model_states(held) == expected + FLOAT * (counters - 2 * unstepped)


@pytest.mark.parametrize("stage", quick([3], STAGES))
def test_optimizer_temporaries_are_three_times_the_sub_group(stage, monkeypatch):
    """torch's AdamW has a square root and a quotient, while the previous ones are still alive."""
    monkeypatch.setattr("memlab.zero.ranks.SUB_GROUP", 64)
    _, step = metered_of(model_of(), 2, stage)  # not cached: the cached runs use another SUB_GROUP
    temporaries = [most(trace, "optimizer_temporaries") for trace in step.traces]
    assert temporaries == [3 * FLOAT * 64] * 2


def test_a_shard_is_larger_than_the_weights_divided_by_the_ranks():
    """7 divides neither the groups nor the rows. Padding is stored too, and more of it by rows."""
    model, ranks = model_of(), 7
    matrices, vectors = (group["params"] for group in two_groups(model))
    counts = sum(p.numel() for p in matrices), sum(p.numel() for p in vectors)
    by_rows = sum(-len(p) % ranks * (p.numel() // len(p)) for p in model.parameters())
    assert sum(counts) == TIED.parameters  # the tied matrix once
    for stage, padding in {0: -counts[0] % 7 + -counts[1] % 7, 3: by_rows}.items():
        plan = simulate(model, adamw(two_groups(model)), ranks, stage).plan
        assert plan.elements == TIED.parameters
        assert plan.padded_elements == plan.elements + padding


@pytest.mark.parametrize("stage", quick([3], STAGES))
def test_between_steps_there_are_no_gradients_and_no_gathered_weights(stage):
    zero, step = metered(3, stage)
    whole, shard = zero.plan.padded_elements, zero.plan.shard_elements
    for trace in step.traces:
        assert trace.at_end["parameters"] == FLOAT * (shard if stage == 3 else whole)
        assert trace.at_end.keys() == {"parameters", "buffers", "optimizer_state", "inputs"}


def test_sgd_without_momentum_keeps_no_state():
    _, step = metered(3, 2, lambda parameters: torch.optim.SGD(parameters, lr=0.1))
    assert "optimizer_state" not in step.traces[0].at_end
    zero, step = metered(3, 2, sgd)
    assert step.traces[0].at_end["optimizer_state"] == FLOAT * zero.plan.shard_elements


def test_stage_2_frees_the_gradients_of_a_block_after_reducing_them():
    """The peak is in the last reduction, which is the first block's.

    Alive then: its gradients one by one and in a bucket, the shards of the other blocks, and the
    final norm's gradient.
    """
    model = model_of()
    zero = simulate(model, adamw(model.parameters()), 2, 2, meter=memlab.meter)
    [trace, _] = zero.step(micro_batches(2), sum_of_losses).traces
    _, first, *others = zero.plan.buckets
    shards = sum(block.shard_elements for block in others)
    expected = first.elements + first.padded_elements + shards + TIED.hidden_size
    assert most(trace, "gradients") == FLOAT * expected


def test_each_stage_has_a_lower_peak_than_the_one_before():
    """Without sharding, the peak would be the same in each stage."""
    peaks = [metered(3, stage)[1].traces[0].peak_bytes for stage in STAGES]
    assert peaks == sorted(peaks, reverse=True)
    assert len(set(peaks)) == len(peaks)


# ------------------------------------------------------------------ the gathered unit


def test_the_peak_of_stage_3_is_the_steady_state_plus_the_largest_unit():
    """The largest unit counts twice: its gathered weights and their new gradient."""
    model = Wide()
    zero = simulate(model, adamw(model.parameters()), 2, 3, meter=memlab.meter)
    for _ in range(2):
        step = zero.step([torch.randn(1, 6)] * 2, mean_square)
    largest = 8 * 500
    for rank, trace in enumerate(step.traces):
        assert trace.peak_phase == "backward"
        assert step.gathered_at_peak(rank) == {"layers.1": FLOAT * largest}
        shards = FLOAT * zero.plan.shard_elements
        assert trace.at_peak["parameters"] == shards + FLOAT * largest
        of_the_last = FLOAT * 500 * 2 // 2  # the shard of the unit whose backward ran before
        assert trace.at_peak["gradients"] == FLOAT * largest + of_the_last
        assert trace.at_peak["optimizer_state"] == 2 * shards + 3 * FLOAT


def test_only_the_root_and_one_block_are_gathered_at_a_time():
    zero, step = metered(2, 3)
    blocks = [b.elements for b in zero.plan.buckets if b.unit == "blocks.0"]
    root = [b.elements for b in zero.plan.buckets if b.unit == "root"]
    shard = zero.plan.shard_elements
    assert most(step.traces[0], "parameters") == FLOAT * (shard + sum(blocks) + sum(root))
    assert set(step.gathered_at_peak()) <= {"root", "blocks.0", "blocks.1", "blocks.2"}


def test_units_can_be_chosen():
    """With the whole model as one unit, all weights are gathered at once."""
    zero, step = metered_of(model_of(), 2, 3, units=[])
    assert {bucket.unit for bucket in zero.plan.buckets} == {"root"}
    expected = FLOAT * (zero.plan.shard_elements + zero.plan.elements)
    assert most(step.traces[0], "parameters") == expected
    assert step.gathered_at_peak() == {"root": FLOAT * zero.plan.elements}


@pytest.mark.parametrize("stage", [0, 1, 2])
def test_below_stage_3_nothing_is_gathered(stage):
    assert metered(2, stage)[1].gathered_at_peak() == {}


# ------------------------------------------------------------------ traffic


@pytest.mark.few(1)
@pytest.mark.parametrize("micro", quick([2], [1, 2]))
@pytest.mark.parametrize("stage", quick([1, 3], STAGES))
@pytest.mark.parametrize("ranks", quick([2], [1, 2, 5]))
def test_every_rank_sends_what_the_ring_formula_says(ranks, stage, micro):
    zero, step = metered(ranks, stage, micro=micro)
    recipe = {"ranks": ranks, "stage": stage, "micro_batches": micro, "element_bytes": FLOAT}
    expected = communication_bytes(zero.plan.padded_elements, **recipe)
    for traffic in step.traffic:
        assert traffic.model_bytes() == expected
        assert traffic.model_elements() == expected // FLOAT


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("stage", "calls"),
    [
        (0, {ALL_REDUCE: 2}),
        (1, {REDUCE_SCATTER: 2, ALL_GATHER: 2}),
        (2, {REDUCE_SCATTER: 8 * 2, ALL_GATHER: 8}),
        (3, {REDUCE_SCATTER: 4 * 2, ALL_GATHER: 4 * 2 * 2}),
    ],
)
def test_the_collectives_of_each_stage(stage, calls):
    """Four units, two groups, two micro-batches.

    Stages 1 and 2 never all-reduce gradients. Stage 3 gathers a unit twice in each pass and
    reduce-scatters it once.
    """
    _, step = metered(2, stage, micro=2)
    for traffic in step.traffic:
        assert {c: n for c, n in traffic.calls.items() if c.payload != "numbers"} == calls


def test_a_checkpointed_block_is_not_gathered_a_third_time():
    model = model_of()
    checkpoint_blocks(model, uniform_schedule(TIED.layers, 1))
    _, step = metered_of(model, 2, 3)
    assert step.traffic[0].calls[ALL_GATHER] == 2 * 4


@pytest.mark.parametrize(("stage", "numbers"), [(0, 2), (1, 3), (2, 3), (3, 3)])
def test_the_norm_costs_one_scalar_if_gradients_are_sharded(stage, numbers):
    """The sums of losses and of tokens cost two more."""
    model = model_of()
    zero = simulate(model, adamw(model.parameters()), 2, stage)
    step = zero.step(micro_batches(2), sum_of_losses, clip_norm=1.0)
    assert step.traffic[0].calls[Collective("all_reduce", "numbers")] == numbers


def test_bytes_depend_on_the_dtype_sent():
    single, double = (
        simulate(model, adamw(model.parameters()), 2, 3).step(micro_batches(2), sum_of_losses)
        for model in (model_of(), model_of().double())
    )
    assert double.traffic[0].model_elements() == single.traffic[0].model_elements()
    assert double.traffic[0].model_bytes() == 2 * single.traffic[0].model_bytes()


# ------------------------------------------------------------------ one rank on fake tensors


def alone(ranks: int, stage: int, config=TIED, **settings):
    with memlab.dry_run():
        model = GPT(config, dtype=settings.pop("dtype", None))
        optimizer = adamw(two_groups(model))
        zero = one_rank(model, optimizer, ranks, stage, meter=memlab.meter, **settings)
        tokens = torch.zeros(2, 8, dtype=torch.long)
        return zero.step([(tokens, tokens.clone())], sum_of_losses)


@pytest.mark.few(1)
@pytest.mark.parametrize("stage", quick([1, 3], STAGES))
@pytest.mark.parametrize("ranks", quick([3], [1, 3]))
def test_one_rank_on_fake_tensors_stores_and_sends_what_a_real_one_does(ranks, stage):
    found, [expected, *_] = alone(ranks, stage), metered(ranks, stage)[1:]
    assert found.traffic == expected.traffic[:1]
    [trace] = found.traces
    assert trace.dry
    assert trace.peak_bytes == expected.traces[0].peak_bytes
    assert trace.at_peak == expected.traces[0].at_peak
    assert trace.at_end == expected.traces[0].at_end
    assert found.gathered_at_peak() == expected.gathered_at_peak()


@pytest.mark.parametrize("stage", quick([3], STAGES))
def test_one_rank_on_fake_tensors_matches_with_float32_copies_of_shards(stage):
    model = model_of(dtype=torch.bfloat16)
    _, expected = metered_of(model, 3, stage, master_weights=True)
    [trace] = alone(3, stage, dtype=torch.bfloat16, master_weights=True).traces
    assert trace.at_peak == expected.traces[0].at_peak
    assert trace.at_end == expected.traces[0].at_end


@pytest.mark.parametrize("stage", quick([2], STAGES))
def test_with_float32_copies_a_rank_stores_the_papers_16_bytes_per_weight(stage):
    """2 + 2 + 12 bytes when backward ends, for an R that divides every size."""
    config = replace(TIED, vocab_size=36, intermediate_size=12)
    with memlab.dry_run():
        model = GPT(config, dtype=torch.bfloat16)
        optimizer = adamw(model.parameters())
        zero = one_rank(model, optimizer, 4, stage, meter=memlab.meter, master_weights=True)
        tokens = torch.zeros(2, 8, dtype=torch.long)
        [trace] = zero.step([(tokens, tokens)], sum_of_losses).traces
    counters = FLOAT * counters_of(zero.plan)
    expected = model_state_bytes(config.parameters, ranks=4, stage=stage)
    assert model_states(after_backward(trace)) == expected + counters


def test_one_rank_refuses_real_tensors():
    model = model_of()
    with pytest.raises(ValueError, match="a model with real values"):
        one_rank(model, adamw(model.parameters()), 2, 3)
