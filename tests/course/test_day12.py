"""Day 12's checks let right answers of another make pass, and what the lesson says is so."""

import copy
import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import memlab
from memlab.course import days
from memlab.course.checks import day12
from memlab.course.checks.day12 import (
    CheckedWire,
    Collectives,
    Ranks,
    ShardedAdam,
    Wire,
    add_gradients_,
    backward_of,
    forward_of,
    held_and_sent,
    sharded_pass,
)
from memlab.course.exercises import OK, WRONG, Wrong, judge
from memlab.model import GPT, PRESETS
from memlab.optim import Lion8bit
from memlab.train import TECHNIQUES
from memlab.zero import communication_bytes, model_state_bytes, one_rank, simulate

COLLECTIVES, ADAM, GRADIENTS, PASS, FORMULA = days.day(12).exercises

# ------------------------------------------------------------------ right in another way


class Ring:
    """Pieces go round from neighbour to neighbour."""

    def __init__(self, wire):
        self.wire = wire

    def reduce_scatter(self, wholes):
        ranks = len(wholes)
        pieces = [list(whole.chunk(ranks)) for whole in wholes]
        for turn in range(ranks - 1):
            for rank in range(ranks):
                after, which = (rank + 1) % ranks, (rank - turn - 1) % ranks
                arrived = self.wire.send(rank, after, pieces[rank][which])
                pieces[after][which] = arrived + pieces[after][which]
        return [pieces[rank][rank].clone() for rank in range(ranks)]

    def all_gather(self, shards):
        ranks = len(shards)
        wholes = [torch.cat([torch.zeros_like(x)] * ranks).view(ranks, -1) for x in shards]
        for rank, shard in enumerate(shards):
            wholes[rank][rank] = shard
        for turn in range(ranks - 1):
            for rank in range(ranks):
                after, which = (rank + 1) % ranks, (rank - turn) % ranks
                wholes[after][which] = self.wire.send(rank, after, wholes[rank][which])
        return [whole.flatten() for whole in wholes]


class ByStacks(Collectives):
    """All that a rank is sent, and then one sum."""

    def reduce_scatter(self, wholes):
        size = len(wholes[0]) // len(wholes)
        found = []
        for rank in range(len(wholes)):
            mine = slice(rank * size, (rank + 1) * size)
            others = [self.wire.send(s, rank, w[mine]) for s, w in enumerate(wholes) if s != rank]
            found.append(torch.stack([wholes[rank][mine], *others]).sum(0))
        return found


class WithoutPadding(ShardedAdam):
    """Slices, and zeros only where they are missing; the gradient's squares by vector_norm."""

    def __init__(self, weights, wire, lr):
        self.weights, self.wire, self.ranks = weights, wire, len(weights)
        self.size = math.ceil(len(weights[0]) / self.ranks)
        self.copies, self.adams = [], []
        for rank, w in enumerate(weights):
            mine = w[rank * self.size : (rank + 1) * self.size]
            copied = torch.zeros(self.size)
            copied[: len(mine)] = mine
            self.copies.append(copied.requires_grad_())
            self.adams.append(torch.optim.AdamW([copied], lr=lr, foreach=False))

    @torch.no_grad()
    def step(self, gradients, max_norm):
        wide = [torch.cat([g, g.new_zeros(self.size * self.ranks - len(g))]) for g in gradients]
        means = [x.float().div(self.ranks) for x in Ring(self.wire).reduce_scatter(wide)]
        norm = math.sqrt(self.wire.sum([torch.linalg.vector_norm(m) ** 2 for m in means]))
        for copied, adam, mean in zip(self.copies, self.adams, means, strict=True):
            copied.grad = mean.mul_(max_norm / norm) if norm > max_norm else mean
            adam.step()
            adam.zero_grad()
        wholes = Collectives(self.wire).all_gather([x.bfloat16() for x in self.copies])
        for w, whole in zip(self.weights, wholes, strict=True):
            w[:] = whole[: w.numel()]


def by_autograd(wire, weights, inputs, dys, sums):
    """A graph for each unit, gone when the unit is."""
    given = list(dys)
    for unit in range(len(weights[0]) - 1, -1, -1):
        made = []
        for rank in range(len(weights)):
            w, x = (t.detach().requires_grad_() for t in (weights[rank][unit], inputs[rank][unit]))
            dw, given[rank] = torch.autograd.grad(forward_of(w, x), (w, x), given[rank])
            made.append(dw)
        for mine, shard in zip(sums, Ring(wire).reduce_scatter(made), strict=True):
            mine[unit].add_(shard)
        del made, w, x, dw
    return given


def with_inner_functions(wire, shards, xs, dy_of, sums):
    """Rank by rank where it can be, and backward by hand."""
    together, units = Ring(wire), len(shards[0])

    def gathered(unit):
        return together.all_gather([mine[unit] for mine in shards])

    inputs = [[x] for x in xs]
    for unit in range(units):
        for w, mine in zip(gathered(unit), inputs, strict=True):
            mine.append(forward_of(w, mine[-1]))
        del w
    dys = [dy_of(mine.pop()) for mine in inputs]
    for unit in reversed(range(units)):
        made = []
        for rank, w in enumerate(gathered(unit)):
            dw, dys[rank] = backward_of(w, inputs[rank].pop(), dys[rank])
            made.append(dw)
        for mine, shard in zip(sums, together.reduce_scatter(made), strict=True):
            mine[unit] += shard
        del made, dw, w


def by_cases(parameters, ranks, stage, K, k):
    piece = math.ceil(parameters / ranks)
    a_pass = 2 * piece * (ranks - 1)
    if stage == 0:
        return (4 + K) * parameters, 2 * a_pass
    if stage == 1:
        return 4 * parameters + K * piece, 2 * a_pass
    if stage == 2:
        return 2 * parameters + (2 + K) * piece, (k + 1) * a_pass
    return (4 + K) * piece, 3 * k * a_pass


@pytest.mark.parametrize(
    ("exercise", "answer"),
    [
        pytest.param(COLLECTIVES, Ring, id="12.1-ring"),
        pytest.param(COLLECTIVES, ByStacks, id="12.1-stacks"),
        pytest.param(ADAM, WithoutPadding, id="12.2-slices"),
        pytest.param(GRADIENTS, by_autograd, id="12.3-autograd"),
        pytest.param(PASS, with_inner_functions, id="12.4-by-hand"),
        pytest.param(FORMULA, by_cases, id="12.5-cases"),
    ],
)
def test_another_right_answer_passes(exercise, answer):
    verdict = judge(exercise, answer)
    assert verdict.status == OK, verdict


# ------------------------------------------------------------------ wrong in another way


class Borrowed(Collectives):
    """Sends something of the right size, and adds what it had no right to see."""

    def reduce_scatter(self, wholes):
        super().reduce_scatter([torch.zeros_like(w) for w in wholes])
        return list(torch.stack(wholes).sum(0).chunk(len(wholes)))


class FalseSender(Collectives):
    """Sends in the name of another rank."""

    def all_gather(self, shards):
        ranks = range(len(shards))
        return [
            torch.cat([s if n == r else self.wire.send((n + 1) % len(shards), r, s) for n, s in x])
            for r in ranks
            for x in [list(enumerate(shards))]
        ]


@pytest.mark.parametrize(
    ("answer", "found"),
    [
        (Borrowed, "stack was handed tensors of rank 0 and of rank 1"),
        (FalseSender, "these numbers lie at rank"),
    ],
)
def test_numbers_of_two_ranks_meet_on_the_wire_alone(answer, found):
    verdict = judge(COLLECTIVES, answer)
    assert verdict.status == WRONG
    assert found in verdict.text


def hiding(hide):
    """Right in all it does; beside it, `hide` is handed all of the weights in every step."""

    class Hiding(ShardedAdam):
        def step(self, gradients, max_norm):
            super().step(gradients, max_norm)
            self.kept = hide(self.weights)

    return Hiding


@pytest.mark.parametrize(
    ("hide", "found"),
    [
        (lambda weights: [w.float() for w in weights], "bytes at each rank; wanted at most"),
        (lambda weights: [w.float().numpy().copy() for w in weights], "bytes outside of tensors"),
        (lambda weights: [w.tolist() for w in weights], "bytes outside of tensors"),
    ],
    ids=["tensors", "numpy", "lists"],
)
def test_a_whole_copy_is_found_wherever_it_is(hide, found):
    verdict = judge(ADAM, hiding(hide))
    assert verdict.status == WRONG
    assert found in verdict.text


def test_who_writes_into_the_gradients_of_a_rank_is_told_so():
    class Careless(ShardedAdam):
        def step(self, gradients, max_norm):
            super().step(gradients, max_norm)
            gradients[0].zero_()

    assert "changed the gradients that rank 0 gave." in judge(ADAM, Careless).text


@pytest.mark.parametrize("place", ["weights", "inputs"])
def test_who_writes_into_what_add_gradients_was_given_is_told_so(place):
    def answer(wire, weights, inputs, dys, sums):
        found = add_gradients_(wire, weights, inputs, dys, sums)
        {"weights": weights, "inputs": inputs}[place][-1][0].zero_()
        return found

    assert f"changed the {place} that it was given." in judge(GRADIENTS, answer).text


def test_weights_that_a_graph_keeps_are_found():
    """Autograd in one go holds every unit that was gathered."""

    def answer(wire, shards, xs, dy_of, sums):
        kept = []
        sharded_pass(wire, shards, xs, dy_of, sums)
        for unit in range(len(shards[0])):
            kept.append([s[unit].repeat(len(shards)) for s in shards])

    assert "bytes more at each rank at its fullest" in judge(PASS, answer).text


# ------------------------------------------------------------------ the ranks of a check


def placed(*of_ranks):
    where = Ranks()
    for rank, x in enumerate(of_ranks):
        where.place(rank, x)
    return where


def test_what_is_made_of_a_rank_s_tensors_lies_there_and_two_ranks_do_not_meet():
    a, b = torch.ones(4), torch.ones(4)
    where = placed(a, b)
    with where:
        mine = (a * 2)[:2] + torch.zeros(2)
        fresh = torch.empty(4)
        fresh.copy_(b)
        with pytest.raises(Wrong, match="add was handed tensors of rank 0 and of rank 1"):
            _ = a + b
    assert (where.rank_of(mine), where.rank_of(fresh)) == (0, 1)


def test_the_wire_moves_a_tensor_and_counts_its_sender():
    a, b = torch.ones(4), torch.ones(4)
    where = placed(a, b)
    wire = CheckedWire(2, where)
    with where:
        total = b + wire.send(0, 1, a)
        with pytest.raises(Wrong, match="these numbers lie at rank 1"):
            wire.send(0, 1, total)
        with pytest.raises(Wrong, match="wanted two of ranks 0 to 1"):
            wire.send(0, 2, a)
    assert where.rank_of(total) == 1
    assert wire.sent == [16, 0]


# ------------------------------------------------------------------ the references


def test_the_lessons_formula_is_the_librarys():
    for stage in range(4):
        for n, ranks, K, k in ((1001, 8, 12, 3), (7_000_000_000, 64, 4, 1)):
            held = model_state_bytes(n, ranks=ranks, stage=stage, optimizer_bytes=K)
            sent = communication_bytes(n, ranks=ranks, stage=stage, micro_batches=k)
            assert held_and_sent(n, ranks, stage, K, k) == (held, sent)


def test_in_float32_a_step_is_that_of_the_librarys_stage_1():
    """Weights of 10 numbers on 3 ranks, two steps, clipped."""
    torch.manual_seed(0)
    model = nn.Linear(3, 2)
    batches = [(torch.randn(4, 3), torch.randn(4, 2)) for _ in range(3)]
    made = torch.optim.AdamW(model.parameters(), lr=0.1, foreach=False)
    library = simulate(model, made, 3, 1)
    flat = [nn.utils.parameters_to_vector(model.parameters()).detach() for _ in range(3)]
    adam = ShardedAdam(flat, Wire(3), 0.1)
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
    assert torch.allclose(flat[0], expected, rtol=1e-5, atol=1e-6)
    assert all(torch.equal(flat[0], other) for other in flat[1:])


def test_the_units_backward_is_autograd_s():
    w, x, dy = torch.randn(12), torch.randn(5, 3), torch.randn(5, 4)
    given = [t.double().requires_grad_() for t in (w, x)]
    wanted = torch.autograd.grad(forward_of(*given), given, dy.double())
    found = backward_of(*(t.detach() for t in given), dy.double())
    assert all(torch.allclose(a, b) for a, b in zip(found, wanted, strict=True))


@pytest.mark.parametrize("ranks", [2, 4])
def test_on_the_way_are_four_units_at_most_in_stage_3_whatever_their_number(ranks):
    """Whole weights, their gradient, tanh's temporaries and what the wire carries."""
    peaks = []
    for units in (6, 24):
        patient = day12._Patient(ranks, 1, ((64, 64),) * units, torch.float32)
        sums = patient.sums()
        given = patient.shards, patient.xs, day12._dy, sums
        peaks.append(day12._most_bytes(lambda g=given: sharded_pass(Wire(ranks), *g), ranks))
    assert peaks[0] < 4 * 64 * 64 * 4
    assert peaks[1] - peaks[0] == 18 * 64 * 4  # each unit's input


# ------------------------------------------------------------------ what the lesson says


def test_the_limits_are_true_to_a_tenth_from_27_and_63_ranks_on():
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
        TECHNIQUES["checkpointing"].change_model(model)
        optimizer = torch.optim.AdamW(model.parameters(), foreach=False)
        zero = one_rank(model, optimizer, 8, stage, meter=memlab.meter, master_weights=True)
        tokens = torch.zeros(1, 2048, dtype=torch.long)
        return zero.step([(tokens, tokens)], lambda m, b: (m(*b), 1)).traces[0]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("stage", "peak", "formula"), [(1, 40.43, 37.06), (2, 27.29, 25.27), (3, 15.50, 13.48)]
)
def test_a_rank_of_eight_peaks_in_its_step_with_float32_gradients(stage, peak, formula):
    trace = of_7b(stage)
    assert trace.peak_phase == "optimizer"
    n = PRESETS["llama-2-7b"].parameters
    assert round(trace.peak_bytes / 1e9, 2) == peak
    assert round(held_and_sent(n, 8, stage, K=12, k=1)[0] / 1e9, 2) == formula
    whole = 2 * n if stage == 1 else 0  # gradients of stage 1 are there until the shard's are made
    assert trace.at_peak["gradients"] == whole + 4 * n // 8


def test_shards_of_a_lion_of_8_bits_are_refused():
    model = GPT(PRESETS["tiny"])
    with pytest.raises(TypeError, match="give an optimizer that treats each number by itself"):
        simulate(model, Lion8bit(model.parameters()), 8, 1)


def test_the_line_of_the_bill_is_the_day_before_s():
    assert days.day(12).bill.measure is days.day(11).bill.measure
