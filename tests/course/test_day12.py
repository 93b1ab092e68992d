"""Day 12: what its checks tell a learner, and what the lesson claims."""

import copy
from dataclasses import replace
from itertools import accumulate as running_sums

import pytest
import torch
import torch.nn.functional as F
from close import assert_close
from torch import nn

import memlab
from memlab.course import days
from memlab.course.checks import day12
from memlab.course.checks.day12 import CheckedCommunicator, RankTracker, ShardedCase
from memlab.course.exercises import WRONG, Wrong, judge
from memlab.course.solutions import solution
from memlab.metering import measure
from memlab.model import GPT, PRESETS
from memlab.optim import Lion8bit
from memlab.reference.collectives import Collectives, Communicator
from memlab.reference.sharded_optimizer import ShardedAdam
from memlab.reference.sharded_weights import add_gradients_, backward_of, forward_of, sharded_pass
from memlab.train import combined
from memlab.zero import communication_bytes, model_state_bytes, one_rank, simulate

COLLECTIVES, ADAM, GRADIENTS, PASS, FORMULA = days.day(12).exercises
held_and_sent = solution("12.5")

# ------------------------------------------------------------------ answers


class SendsZeros(Collectives):
    """Sends zeros of the right size, and sums the tensors of all ranks without the communicator."""

    def reduce_scatter(self, wholes):
        super().reduce_scatter([torch.zeros_like(w) for w in wholes])
        return list(torch.stack(wholes).sum(0).chunk(len(wholes)))


class FalseSender(Collectives):
    """Sends under the number of another rank."""

    def all_gather(self, shards):
        ranks = range(len(shards))
        return [
            torch.cat([s if n == r else self.comm.send((n + 1) % len(shards), r, s) for n, s in x])
            for r in ranks
            for x in [list(enumerate(shards))]
        ]


@pytest.mark.parametrize(
    ("answer", "found"),
    [
        (SendsZeros, "stack was called on tensors of rank 0 and of rank 1"),
        (FalseSender, "this tensor is on rank"),
    ],
)
def test_tensors_of_two_ranks_meet_only_through_the_wire(answer, found):
    verdict = judge(COLLECTIVES, answer)
    assert verdict.status == WRONG
    assert found in verdict.text


def hiding(hide):
    """A correct optimizer that also keeps hide(weights) of all weights after each step."""

    class HidesWeights(ShardedAdam):
        def step(self, gradients, max_norm):
            super().step(gradients, max_norm)
            self.kept = hide(self.weights)

    return HidesWeights


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("hide", "found"),
    [
        (lambda weights: [w.float() for w in weights], "bytes per rank; wanted at most"),
        (lambda weights: [w.float().numpy().copy() for w in weights], "bytes outside of tensors"),
        (lambda weights: [w.tolist() for w in weights], "bytes outside of tensors"),
    ],
    ids=["tensors", "numpy", "lists"],
)
def test_a_copy_of_all_weights_is_found_in_tensors_arrays_and_lists(hide, found):
    verdict = judge(ADAM, hiding(hide))
    assert verdict.status == WRONG
    assert found in verdict.text


def test_an_unchanged_whole_is_not_called_an_all_reduce():
    class Unchanged(Collectives):
        def reduce_scatter(self, wholes):
            return wholes

    text = judge(COLLECTIVES, Unchanged).text
    assert "gave tensors of shapes [(6,), (6,), (6,)]; wanted [(2,), (2,), (2,)]." in text
    assert "an all-reduce" not in text


HIDDEN = pytest.mark.parametrize(
    "hide", [lambda x: x.numpy().copy(), lambda x: x.tolist()], ids=["numpy", "lists"]
)


@HIDDEN
def test_gradients_kept_outside_of_tensors_are_found(hide):
    """Stage 1, hidden from the meter: all gradients are computed before the first is reduced."""

    def answer(comm, weights, inputs, dys, sums):
        dys, units, found = list(dys), range(len(weights[0])), {}
        for unit in reversed(units):
            for rank, dy in enumerate(dys):
                dw, dys[rank] = backward_of(weights[rank][unit], inputs[rank][unit], dy)
                found[rank, unit] = hide(dw), dw.dtype
        for unit in units:
            kept = [found[rank, unit] for rank in range(len(dys))]
            wholes = [torch.as_tensor(numbers, dtype=dtype) for numbers, dtype in kept]
            for mine, shard in zip(sums, Collectives(comm).reduce_scatter(wholes), strict=True):
                mine[unit] += shard
        return dys

    verdict = judge(GRADIENTS, answer)
    assert verdict.status == WRONG
    assert "bytes outside of tensors" in verdict.text


@pytest.mark.few(1)
@HIDDEN
def test_weights_kept_outside_of_tensors_are_found(hide):
    def answer(comm, shards, xs, dy_of, sums):
        kept = []
        for unit in range(len(shards[0])):
            wholes = Collectives(comm).all_gather([mine[unit] for mine in shards])
            kept.append([hide(w) for w in wholes])
            del wholes
        sharded_pass(FreeForward(comm, shards), shards, xs, dy_of, sums)

    verdict = judge(PASS, answer)
    assert verdict.status == WRONG
    assert "bytes outside of tensors" in verdict.text


class FreeForward:
    """A communicator that counts no bytes in forward."""

    def __init__(self, comm, shards):
        self.comm, self.left = comm, len(shards) * (len(shards) - 1) * len(shards[0])

    def send(self, source, target, numbers):
        self.left -= 1
        before = list(self.comm.sent)
        arrived = self.comm.send(source, target, numbers)
        if self.left >= 0:
            self.comm.sent[:] = before
        return arrived


def left_open(comm, shards, xs, dy_of, sums, *, forward, backward):
    """A learner's first version. `forward` and `backward` say where wholes is deleted."""
    together, inputs = Collectives(comm), [list(xs)]
    for unit in range(len(shards[0])):
        wholes = together.all_gather([mine[unit] for mine in shards])
        inputs.append([forward_of(w, x) for w, x in zip(wholes, inputs[-1], strict=True)])
        if forward:
            del wholes
    dys = [dy_of(y) for y in inputs[-1]]
    for unit in reversed(range(len(shards[0]))):
        wholes = together.all_gather([mine[unit] for mine in shards])
        given = [[w] for w in wholes], [[x] for x in inputs[unit]]
        dys = add_gradients_(comm, *given, dys, [[mine[unit]] for mine in sums])
        if backward:
            del wholes


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("forward", "backward", "found"),
    [
        (False, False, "A name still refers to the previous unit while the next is gathered"),
        (True, False, "Forward frees its units, but backward does not"),
        (True, True, "Forward frees its units, but backward does not"),  # `given` holds it
    ],
)
def test_a_unit_that_a_name_still_holds_is_found_in_both_directions(forward, backward, found):
    verdict = judge(PASS, lambda *args: left_open(*args, forward=forward, backward=backward))
    assert verdict.status == WRONG
    assert found in verdict.text


@pytest.mark.parametrize("place", [0, 1])
def test_an_answer_that_calls_the_librarys_formulas_is_refused(place):
    def answer(parameters, ranks, stage, K, k):
        own = held_and_sent(parameters, ranks, stage, K, k)
        held = model_state_bytes(parameters, ranks=ranks, stage=stage, optimizer_bytes=K)
        return (held, own[1]) if place == 0 else (own[0], sent_bytes(parameters, ranks, stage, k))

    def sent_bytes(parameters, ranks, stage, k):
        return communication_bytes(parameters, ranks=ranks, stage=stage, micro_batches=k)

    verdict = judge(FORMULA, answer)
    assert verdict.status == WRONG
    assert "which this exercise rebuilds" in verdict.text


@pytest.mark.parametrize("place", ["weights", "inputs"])
def test_writing_into_an_argument_of_add_gradients_is_refused(place):
    def answer(comm, weights, inputs, dys, sums):
        found = add_gradients_(comm, weights, inputs, dys, sums)
        {"weights": weights, "inputs": inputs}[place][-1][0].zero_()
        return found

    assert f"changed the {place} that it was given." in judge(GRADIENTS, answer).text


# ------------------------------------------------------------------ simulated ranks


def tracker_of(*tensors):
    """Tensor r is on rank r."""
    tracker = RankTracker()
    for rank, x in enumerate(tensors):
        tracker.place(rank, x)
    return tracker


def test_a_result_is_on_the_rank_of_its_arguments_and_two_ranks_cannot_mix():
    a, b = torch.ones(4), torch.ones(4)
    tracker = tracker_of(a, b)
    with tracker:
        mine = (a * 2)[:2] + torch.zeros(2)
        fresh = torch.empty(4)
        fresh.copy_(b)
        with pytest.raises(Wrong, match="add was called on tensors of rank 0 and of rank 1"):
            _ = a + b
    assert (tracker.rank_of(mine), tracker.rank_of(fresh)) == (0, 1)


def test_the_wire_moves_a_tensor_and_counts_the_senders_bytes():
    a, b = torch.ones(4), torch.ones(4)
    tracker = tracker_of(a, b)
    comm = CheckedCommunicator(2, tracker)
    with tracker:
        total = b + comm.send(0, 1, a)
        with pytest.raises(Wrong, match="this tensor is on rank 1"):
            comm.send(0, 1, total)
        with pytest.raises(Wrong, match="wanted two ranks from 0 to 1"):
            comm.send(0, 2, a)
    assert tracker.rank_of(total) == 1
    assert comm.sent == [16, 0]


# ------------------------------------------------------------------ the references


def test_the_lessons_formula_is_the_librarys():
    for stage in range(4):
        for n, ranks, K, k in ((1001, 8, 12, 3), (7_000_000_000, 64, 4, 1)):
            held = model_state_bytes(n, ranks=ranks, stage=stage, optimizer_bytes=K)
            sent = communication_bytes(n, ranks=ranks, stage=stage, micro_batches=k)
            assert held_and_sent(n, ranks, stage, K, k) == (held, sent)


def test_a_step_in_float32_matches_the_librarys_stage_1():
    """A layer of 8 weights on 3 ranks, two clipped steps."""
    torch.manual_seed(0)
    model = nn.Linear(3, 2)
    batches = [(torch.randn(4, 3), torch.randn(4, 2)) for _ in range(3)]
    made = torch.optim.AdamW(model.parameters(), lr=0.1, foreach=False)
    library = simulate(model, made, 3, 1)
    flat = [nn.utils.parameters_to_vector(model.parameters()).detach() for _ in range(3)]
    adam = ShardedAdam(flat, Communicator(3), 0.1)
    for _ in range(2):
        library.step(batches, lambda m, b: (F.mse_loss(m(b[0]), b[1]), 1), clip_norm=0.1)
        gradients = []
        for mine, (x, y) in zip(flat, batches, strict=True):
            local = copy.deepcopy(model)
            nn.utils.vector_to_parameters(mine.clone(), local.parameters())
            F.mse_loss(local(x), y).backward()
            gradients.append(torch.cat([p.grad.flatten() for p in local.parameters()]))
        adam.step(gradients, 0.1)
    expected = torch.cat([w.flatten() for w in library.weights().values()])
    assert_close(flat[0], expected)
    assert all(torch.equal(flat[0], other) for other in flat[1:])


def test_the_units_backward_matches_autograd():
    w, x, dy = torch.randn(12), torch.randn(5, 3), torch.randn(5, 4)
    given = [t.double().requires_grad_() for t in (w, x)]
    wanted = torch.autograd.grad(forward_of(*given), given, dy.double())
    found = backward_of(*(t.detach() for t in given), dy.double())
    assert_close(found, wanted)


@pytest.mark.parametrize("ranks", [2, 4])
def test_stage_3_needs_at_most_four_units_for_any_number_of_units(ranks):
    """Whole weights, their gradient, tanh's temporaries, and the tensors being sent."""
    peaks = []
    for units in (6, 24):
        case = ShardedCase(ranks, 1, ((64, 64),) * units, torch.float32)
        given = case.for_stage_3(case.sums())
        trace = measure(lambda g=given: sharded_pass(Communicator(ranks), *g))
        peaks.append(day12._peak_per_rank(trace, ranks))
    assert peaks[0] < 4 * 64 * 64 * 4
    assert peaks[1] - peaks[0] == 18 * 64 * 4  # each unit's input


# ------------------------------------------------------------------ the lesson's claims


def test_the_limits_hold_within_a_tenth_from_27_and_63_ranks_on():
    def saved(stage, ranks, K=12):
        n = 27 * 63 * 26 * 62 * 8
        return (4 + K) * n / held_and_sent(n, ranks, stage, K, 1)[0]

    assert saved(1, 26) < 3.6 == saved(1, 27)
    assert saved(2, 62) < 7.2 == saved(2, 63)
    assert [f"{saved(stage, 8):.2f}" for stage in (1, 2, 3)] == ["2.91", "4.27", "8.00"]
    assert saved(1, 10**6, K=4) <= 2
    assert saved(2, 10**6, K=4) <= 4


def of_7b(stage, config=PRESETS["llama-2-7b"]):
    with memlab.dry_run():
        model = GPT(config, dtype=torch.bfloat16)
        combined("checkpointing").change_model(model)
        optimizer = torch.optim.AdamW(model.parameters(), foreach=False)
        zero = one_rank(model, optimizer, 8, stage, meter=memlab.meter, master_weights=True)
        tokens = torch.zeros(1, 2048, dtype=torch.long)
        return zero.step([(tokens, tokens)], lambda m, b: (m(*b), 1)).traces[0]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("stage", "peak", "formula"), [(1, 40.43, 37.06), (2, 27.29, 25.27), (3, 15.50, 13.48)]
)
def test_one_of_eight_ranks_peaks_in_the_step_with_float32_gradients(stage, peak, formula):
    trace = of_7b(stage)
    assert trace.peak_phase == "optimizer"
    n = PRESETS["llama-2-7b"].parameters
    assert round(trace.peak_bytes / 1e9, 2) == peak
    assert round(held_and_sent(n, 8, stage, K=12, k=1)[0] / 1e9, 2) == formula
    whole = 2 * n if stage == 1 else 0  # stage 1 frees its gradients when the shard's exist
    assert trace.at_peak["gradients"] == whole + 4 * n // 8


@pytest.mark.slow
def test_the_parts_of_a_ranks_peak_with_eight_blocks_are_the_lessons():
    config = replace(PRESETS["llama-2-7b"], layers=8)
    trace = of_7b(3, config)
    ends = 2 * config.vocab_size * config.hidden_size  # elements of embedding and head
    n, block = config.parameters, (config.parameters - ends) // 8
    shard, a_block_s = n / 8, block / 8
    whole = 2 * (block + ends)
    assert trace.at_peak["parameters"] == pytest.approx((2 + 4) * shard + whole, rel=1e-4)
    assert trace.at_peak["optimizer_state"] == pytest.approx(8 * shard, rel=1e-4)
    mlp = 3 * config.hidden_size * config.intermediate_size
    gradients = 2 * (7 * a_block_s + ends / 2 + mlp)
    assert trace.at_peak["gradients"] == pytest.approx(gradients, rel=1e-4)
    rest = sum(trace.at_peak[k] for k in ("activations", "backward_temporaries", "buffers"))
    said = (2 * shard, 12 * shard, 4 * shard, 14 * a_block_s, whole, ends + 2 * mlp, rest)
    in_gb = [f"{x / 1e9:.3f}" for x in (*said, trace.peak_bytes)]
    assert in_gb == ["0.470", "2.822", "0.941", "0.354", "0.929", "0.533", "0.387", "5.495"]


@pytest.mark.slow
def test_some_gradients_exist_twice_for_a_moment():
    """Two tiny blocks on four ranks: the embedding's in stages 0 and 1, a block's in 2 and 3."""
    model = GPT(replace(PRESETS["tiny"], layers=2))
    everything, embedding, block = (
        sum(p.nbytes for p in m.parameters()) for m in (model, model.embedding, model.blocks[0])
    )
    twice = 2 * block + block // 4 + model.norm.weight.nbytes
    wanted = [everything + embedding] * 2 + [twice] * 2
    for stage in range(4):
        made = torch.optim.AdamW(model.parameters(), foreach=False)
        zero = simulate(model, made, 4, stage, meter=memlab.meter)
        tokens = torch.zeros(1, 16, dtype=torch.long)
        step = zero.step([(tokens, tokens)] * 4, lambda m, b: (m(*b), 1))
        events = [e for e in step.traces[0].events if e.category == "gradients"]
        assert max(running_sums(e.bytes for e in events)) == wanted[stage]
    assert [f"{n / 1024:.2f}" for n in wanted] == ["160.62"] * 2 + ["108.69"] * 2


def two_steps_of_two_tiny_blocks(make):
    """The trace of the second step, with one sequence of 16 tokens per rank."""
    torch.manual_seed(0)
    model = GPT(replace(PRESETS["tiny"], layers=2))
    step = make(model, torch.optim.AdamW(model.parameters(), foreach=False))
    tokens, targets = (torch.zeros(1, 16, dtype=torch.long) for _ in range(2))
    return [step(tokens, targets) for _ in range(2)][-1]


def of_a_stage(stage):
    def make(model, optimizer):
        zero = simulate(model, optimizer, 4, stage, meter=memlab.meter)
        return lambda *b: zero.step([b] * 4, lambda m, b: (m(*b) * 16, 16)).traces[0]

    return two_steps_of_two_tiny_blocks(make)


def of_one_process(model, optimizer):
    def step(*batch):
        with memlab.meter(model, optimizer) as run:
            (model(*batch) * 16).backward()
            optimizer.step()
            optimizer.zero_grad()
        return run.trace

    return step


@pytest.mark.slow
def test_stage_0_peaks_in_backward_and_above_one_process():
    """Stage 0 allocates one bucket for all gradients with the first gradient, while activations
    are alive."""
    alone, stage_0 = two_steps_of_two_tiny_blocks(of_one_process), of_a_stage(0)
    assert stage_0.peak_phase == "backward"
    in_kib = [f"{trace.peak_bytes / 1024:.2f}" for trace in (alone, stage_0)]
    assert in_kib == ["580.84", "653.59"]
    weights, no_activations = stage_0.at_peak["parameters"], 4  # the loss
    assert alone.at_peak["gradients"] == weights < stage_0.at_peak["gradients"]
    assert alone.at_peak["activations"] == no_activations < stage_0.at_peak["activations"]


def test_stage_3_peaks_with_one_gathered_block_and_few_gradients():
    model = GPT(replace(PRESETS["tiny"], layers=2))
    everything, embedding, block, norm = (
        sum(p.nbytes for p in m.parameters())
        for m in (model, model.embedding, model.blocks[0], model.norm)
    )
    trace = of_a_stage(3)
    assert trace.peak_phase == "backward"
    assert trace.at_peak["parameters"] == everything // 4 + block + embedding + norm
    assert trace.at_peak["gradients"] == norm
    assert 0 <= trace.at_peak["backward_temporaries"] - (block + embedding) < 4096
    assert [f"{n / 1024:.2f}" for n in (block, embedding)] == ["48.25", "32.00"]


def test_sharding_lion_8bit_is_refused():
    model = GPT(PRESETS["tiny"])
    with pytest.raises(TypeError, match="use an elementwise optimizer"):
        simulate(model, Lion8bit(model.parameters()), 8, 1)
