"""Day 13's checks let right answers of another make pass, and what the lesson says is so."""

import signal
import threading
import time
from collections import deque

import pytest
import torch
import torch.nn.functional as F
from edited import each, verdict_on

from memlab.course import days
from memlab.course.checks import day13
from memlab.course.checks.day13 import (
    agreed_steps,
    of_a_rank,
    reduce_in_buckets,
    resharded,
    ring_reduce_scatter,
)
from memlab.course.exercises import OK, WRONG, Wrong, judge
from memlab.course.peers import Stuck, in_turns
from memlab.model import PRESETS
from memlab.reference.collectives import Collectives, Wire
from memlab.zero import communication_bytes, model_state_bytes

RING, BUCKETS, AGREED, RESHARDED, WAYS = days.day(13).exercises


# ------------------------------------------------------------------ right in another way


def with_a_running_sum(peer, whole):
    """Only the sum that travels has a name; the pieces stay as they are."""
    pieces = whole.view(peer.ranks, -1)
    travelling = pieces[peer.rank - 1].clone()
    for turn in range(2, peer.ranks + 1):
        peer.send(travelling)
        travelling = peer.receive()
        travelling += pieces[(peer.rank - turn) % peer.ranks]
    return travelling


def with_counters(peer, made, buckets):
    """Counts what is missing of each bucket, and writes gradients into a bucket's own tensor."""
    bucket_of = {n: b for b, names in enumerate(buckets) for n in names}
    missing, parts = [len(b) for b in buckets], [{} for _ in buckets]
    begun, sums = [], {}
    for name, gradient in made:
        number = bucket_of[name]
        parts[number][name] = gradient.reshape(-1).clone()
        missing[number] -= 1
        while len(begun) < len(buckets) and not missing[len(begun)]:
            if len(begun) >= 2:
                sums[len(begun) - 2] = begun[len(begun) - 2].wait()
            following = len(begun)
            begun.append(peer.begin(torch.cat([parts[following][n] for n in buckets[following]])))
            parts[following].clear()
    for number, work in enumerate(begun):
        if number not in sums:
            sums[number] = work.wait()
    return [sums[number] for number in range(len(buckets))]


def with_the_worst_in_front(peer, weight, gradients, lr):
    """The same decision, with other numbers and torch's operators."""
    steps = 0
    for gradient in gradients:
        worst = peer.most(0.0 if torch.isfinite(gradient).all() else 0.5)
        if worst > 0.6:
            return steps
        if worst > 0.2:
            continue
        weight.sub_(peer.sum(gradient.mul(lr / peer.ranks)))
        steps += 1
    peer.most(1.0)
    return steps


def by_lists_of_places(read, n, old, new, rank):
    """Slow and obvious: the places of each number, and of each file those that it has."""
    size, mine = -(-n // old), -(-n // new)
    found = [read(0, 0, 0)]
    for source in range(old):
        places = [i % size for i in range(n)[rank * mine :][:mine] if i // size == source]
        found += [read(source, places[0], places[-1] + 1)] if places else []
    numbers = torch.cat(found)
    return F.pad(numbers, (0, mine - len(numbers)))


def with_a_buffer(peer, made, buckets):
    """One flat tensor of each bucket, made with its first gradient; and the sums as a tuple."""
    parts, sums, way = {}, [], deque()
    for name, gradient in made:
        parts[name] = torch.empty(gradient.numel())
        parts[name].copy_(gradient.view(-1))
        while len(sums) + len(way) < len(buckets):
            bucket = buckets[len(sums) + len(way)]
            if any(n not in parts for n in bucket):
                break
            if len(way) == 2:
                sums.append(way.popleft().wait())
            flat = torch.empty(sum(parts[n].numel() for n in bucket))
            torch.cat([parts.pop(n) for n in bucket], out=flat)
            way.append(peer.begin(flat))
            del flat
    return (*sums, *(work.wait() for work in way))


def zeros_by_hand(read, n, old, new, rank):
    """With a tensor of zeros in the files' dtype."""
    share, size = -(-n // new), -(-n // old)
    found = torch.zeros(share, dtype=read(0, 0, 0).dtype)
    place, number = 0, rank * share
    while place < share and number < n:
        source, start = divmod(number, size)
        part = read(source, start, min(size, n - source * size, start + share - place))
        found[place : place + len(part)] = part
        place, number = place + len(part), number + len(part)
    return found


def as_a_list(*shape):
    return list(of_a_rank(*shape))


def with_fractions(block, layers, width, tensor, pipeline, data, k, tokens):
    blocks = (layers + pipeline - 1) // pipeline
    weights = block * blocks // tensor
    shard = (weights + data - 1) // data
    ring = 8 * (tensor - 1) * 2 * tokens * width * blocks * k // tensor
    line = (pipeline > 1) + (pipeline > 2)
    return (
        2 * weights + 2 * weights + 12 * shard,
        ring,
        2 * tokens * width * line * k,
        (4 * shard * (data - 1)),
    )


@pytest.mark.parametrize(
    ("exercise", "answer"),
    [
        pytest.param(RING, with_a_running_sum, id="13.1-running-sum"),
        pytest.param(BUCKETS, with_counters, id="13.2-counters"),
        pytest.param(AGREED, with_the_worst_in_front, id="13.3-other-numbers"),
        pytest.param(RESHARDED, by_lists_of_places, id="13.4-lists-of-places"),
        pytest.param(BUCKETS, with_a_buffer, id="13.2-buffer-and-tuple"),
        pytest.param(RESHARDED, zeros_by_hand, id="13.4-zeros-by-hand"),
        pytest.param(WAYS, with_fractions, id="13.5-other-order"),
        pytest.param(WAYS, as_a_list, id="13.5-list"),
    ],
)
def test_another_right_answer_passes(exercise, answer):
    verdict = judge(exercise, answer)
    assert verdict.status == OK, verdict


# ------------------------------------------------------------------ wrong in another way


def behind_the_wire():
    """Sends what it must, and takes the sums from where all ranks can reach."""
    shared = {}

    def ring(peer, whole):
        shared.setdefault(len(whole), {})[peer.rank] = whole.clone()
        for _ in range(peer.ranks - 1):
            peer.send(whole.chunk(peer.ranks)[0])
            peer.receive()
        total = sum(shared[len(whole)][rank] for rank in range(peer.ranks))
        return total.chunk(peer.ranks)[peer.rank].clone()

    return ring


def test_sums_that_did_not_go_round_the_ring_are_found():
    def calculated(peer, whole):
        """Knows what every check of this size gives."""
        piece = ring_reduce_scatter(peer, whole)
        if len(whole) != 6:
            return piece
        wholes = day13._wholes(3, 6, torch.float32)
        return torch.stack(wholes).sum(0).chunk(3)[peer.rank].clone()

    verdict = judge(RING, calculated)
    assert verdict.status == WRONG
    assert "a sum is right whatever has arrived" in verdict.text
    assert judge(RING, behind_the_wire()).status == WRONG


def test_wholes_that_go_round_are_told_by_their_bytes():
    found = judge(RING, day13._wholes_round).text
    assert "rank 0 sent 1 message of 16 bytes; wanted 1 of 8 bytes." in found


def test_zeros_sent_round_beside_a_collective_are_no_ring():
    def hidden(peer, whole):
        for _ in range(peer.ranks - 1):
            peer.send(torch.zeros_like(whole.chunk(peer.ranks)[0]))
            peer.receive()
        if peer.ranks == 3:
            return ring_reduce_scatter(peer, whole)
        return peer.sum(whole).chunk(peer.ranks)[peer.rank].clone()

    assert "wanted send and receive alone" in judge(RING, hidden).text


def test_sums_that_were_not_waited_for_are_found():
    def calculated(peer, made, buckets):
        sums = reduce_in_buckets(peer, made, buckets)
        case = next(c for c in day13.BACKWARDS if [list(b) for b in c.buckets] == buckets)
        return case.sums(0.0) if len(sums) == 2 else sums

    verdict = judge(BUCKETS, calculated)
    assert verdict.status == WRONG
    assert "is not what came by the wire" in verdict.text


@pytest.mark.parametrize(
    "keep",
    [
        lambda g: g,
        lambda g: g.view(-1),
        lambda g: g.clone(),
        lambda g: g.numpy().view(),
        lambda g: torch.cat([torch.zeros(3), g.flatten()])[1:],
        lambda g: torch.empty(20).index_copy_(0, torch.arange(g.numel()), g.flatten()),
    ],
    ids=["tensor", "view", "clone", "numpy", "part of another", "buffer"],
)
def test_a_gradient_that_is_kept_is_found_also_as_a_view_or_copy(keep):
    def hoarding(peer, made, buckets):
        kept = []

        def noted():
            for name, gradient in made:
                kept.append(keep(gradient))
                yield name, gradient

        return reduce_in_buckets(peer, noted(), buckets)

    verdict = judge(BUCKETS, hoarding)
    assert verdict.status == WRONG
    assert "gradient a is still held when c is made" in verdict.text


def test_gradients_that_a_list_holds_are_not_told_as_a_name_of_their_bucket():
    def with_parts(peer, made, buckets):
        there, sums, way, left = {}, [], deque(), deque(buckets)
        for name, gradient in made:
            there[name] = gradient.flatten()
            while left and all(n in there for n in left[0]):
                if len(way) == 2:
                    sums.append(way.popleft().wait())
                parts = [there.pop(n) for n in left.popleft()]
                way.append(peer.begin(torch.cat(parts)))
        return sums + [work.wait() for work in way]

    found = judge(BUCKETS, with_parts).text
    assert "gradient a is still held when c is made" in found
    assert "still has a name, flat" not in found


def test_copies_that_are_never_taken_out_are_found():
    def never_pops(peer, made, buckets):
        there, sums, way, left = {}, [], deque(), deque(buckets)
        for name, gradient in made:
            there[name] = gradient.clone()
            while left and all(n in there for n in left[0]):
                if len(way) == 2:
                    sums.append(way.popleft().wait())
                way.append(peer.begin(torch.cat([there[n].flatten() for n in left.popleft()])))
        return sums + [work.wait() for work in way]

    assert "gradient a is still held when c is made" in judge(BUCKETS, never_pops).text


def test_buckets_that_are_emptied_are_an_input_changed():
    def empties(peer, made, buckets):
        sums = reduce_in_buckets(peer, made, [list(bucket) for bucket in buckets])
        buckets.clear()
        return sums

    assert "`buckets` is [] afterwards; wanted it left" in judge(BUCKETS, empties).text


def test_all_gradients_taken_first_is_no_overlap():
    verdict = judge(BUCKETS, lambda peer, made, b: reduce_in_buckets(peer, iter([*made]), b))
    assert verdict.status == WRONG
    assert "is begun after gradient" in verdict.text


def test_a_gradient_that_nobody_takes_is_missed():
    def lazy(peer, made, buckets):
        return []

    assert "0 gradients taken of `made`; wanted 4." in judge(BUCKETS, lazy).text


def test_a_right_step_with_another_dtype_or_shape_is_no_shard():
    def widened(read, n, old, new, rank):
        return resharded(read, n, old, new, rank).double()

    assert "gave torch.float64; wanted torch.float32" in judge(RESHARDED, widened).text
    assert judge(RESHARDED, lambda *args: resharded(*args)[None]).status == WRONG


def test_a_shard_that_is_a_view_of_more_is_found():
    def hoarding(read, n, old, new, rank):
        found = resharded(read, n, old, new, rank)
        return torch.cat([found] * 3)[: len(found)]

    assert "wanted a tensor of its own" in judge(RESHARDED, hoarding).text


@pytest.mark.parametrize(
    ("asked", "found"),
    [((9, 0, 1), "there are files 0 to"), ((0, -1, 1), "a file has"), ((0, 0, 1.0), "use // for")],
)
def test_a_read_out_of_a_file_is_told_so(asked, found):
    assert found in judge(RESHARDED, lambda read, *_: read(*asked)).text


def test_a_gradient_of_no_data_is_not_made_up():
    """Who has ended repeats its last gradient."""

    def repeats(peer, weight, gradients, lr):
        def forever():
            last = torch.zeros(3)
            for last in gradients:
                yield last
            for _ in range(9):
                yield last

        return agreed_steps(peer, weight, forever(), lr)

    verdict = judge(AGREED, repeats)
    assert verdict.status == WRONG
    assert "wanted" in verdict.text


def stepping(step):
    """Right rounds, and in a good one `step(peer, weight, gradient, lr)`."""

    def answer(peer, weight, gradients, lr):
        steps = 0
        while True:
            gradient = next(gradients, None)
            fine = gradient is not None and gradient.isfinite().all()
            worst = peer.most(2 if gradient is None else 0 if fine else 1)
            if worst == 2:
                return steps
            if worst == 0:
                step(peer, weight, gradient, lr)
                steps += 1

    return answer


def replaces_the_data(peer, weight, gradient, lr):
    weight.data = weight - lr * peer.sum(gradient) / peer.ranks


def overwrites_the_gradient(peer, weight, gradient, lr):
    weight -= peer.sum(gradient.mul_(lr)) / peer.ranks


def in_float64(peer, weight, gradient, lr):
    weight -= (lr * peer.sum(gradient.double()) / peer.ranks).float()


def steps_in_the_end(peer, weight, gradients, lr):
    """One sum of all steps, when they are over."""
    total = torch.zeros_like(weight)
    steps = agreed_steps(peer, total, gradients, lr)
    weight += total
    return steps


@pytest.mark.parametrize(
    ("answer", "found"),
    [
        (stepping(replaces_the_data), "the weight that was given is [1, 2, 3]; wanted [0.75"),
        (stepping(overwrites_the_gradient), "changed gradient 0 to [0.25"),
        (stepping(in_float64), "sent a gradient of 24 bytes; wanted 12"),
        (steps_in_the_end, "after 1 round: the weight that was given is [1, 2, 3]"),
    ],
    ids=["data", "overwritten", "float64", "one step"],
)
def test_a_step_that_is_not_the_step_asked_for_is_found(answer, found):
    assert found in judge(AGREED, answer).text


def test_numbers_that_were_calculated_or_read_elsewhere_are_no_shard():
    def calculated(read, n, old, new, rank):
        found = resharded(read, n, old, new, rank)
        share = len(found)
        numbers = torch.arange(1, n + 1)[rank * share :][:share] % 101
        return F.pad(numbers, (0, share - len(numbers))).to(found.dtype)

    def elsewhere(read, n, old, new, rank):
        """As many as are needed, of file 0."""
        places = []

        def noted(source, start, stop):
            places.extend(range(start, stop))
            return read(0, 0, stop - start) if n == 8 else read(source, start, stop)

        found = resharded(noted, n, old, new, rank)
        whole = torch.randint(
            1, 200, (n,), generator=torch.Generator().manual_seed(n * old * new)
        ).to(found.dtype)
        share = len(found)
        return F.pad(whole[rank * share :][:share], (0, max(0, (rank + 1) * share - n)))

    assert judge(RESHARDED, calculated).status == WRONG
    found = judge(RESHARDED, elsewhere).text
    assert "rank=1) read number 0 of file 0, which is not in this shard" in found


def test_a_number_read_twice_is_found_where_the_count_is_right():
    with pytest.raises(Wrong, match="never read number 1 of file 0, and another one twice"):
        day13._require_read("resharded", [(0, 0), (0, 0)], [(0, 0), (0, 1)])


BEGIN = "way.append(peer.begin(torch.cat([there.pop(n).flatten() for n in left.pop(0)])))"
FLAT = """flat = torch.cat([there.pop(n).flatten() for n in left.pop(0)])
            way.append(peer.begin(flat))"""
READ = "parts.append(read(source, first - source * size, last - source * size))"
AT, OVER_T = (
    "for n in range(first - source * size, last - source * size)]",
    "blocks * block // tensor",
)
OF_A_COPY = (
    ("list(whole.chunk(peer.ranks))", "whole.clone().view(peer.ranks, -1)"),
    ("pieces[coming] = peer.receive() + pieces[coming]", "pieces[coming] += peer.receive()"),
    ("pieces[peer.rank].clone()", "pieces[peer.rank]"),
)
NEWER = (
    ("[], [], list(buckets)", "[], {}, list(buckets)"),
    ("sums.append(way.pop(0).wait())", "newer = way.pop(); sums[newer] = newer.wait()"),
    ("for name, gradient in made", "begun = []\n    for name, gradient in made"),
    (BEGIN, f"{BEGIN}\n            begun.append(way[-1])"),
    ("return sums +", "sums |= dict(zip(way,"),
    ("for work in way]", "for work in way]))\n    return [sums[work] for work in begun]"),
)
SENT = "pieces[(peer.rank - turn - 1) % peer.ranks]"

REFUSED = [
    ("13.1", "a view where there is one rank", (".clone()", "")),
    ("13.1", "a view of a copy of all", *OF_A_COPY),
    ("13.2", "a name for what was sent", (BEGIN, FLAT)),
    ("13.2", "the newer is waited for", *NEWER),
    ("13.3", "a skipped round is a step", ("            steps += 1", "        steps += worst < 2")),
    ("13.3", "a sum that overflows", ("gradient.isfinite().all()", "gradient.sum().isfinite()")),
    ("13.4", "a read for each number", (READ, f"parts += [read(source, n, n + 1) {AT}")),
    ("13.5", "weights over t rounded up", (OVER_T, "-(-blocks * block // tensor)")),
    ("13.5", "each block rounded down", (OVER_T, "blocks * (block // tensor)")),
]
ACCEPTED = [
    ("13.1", "a copy is sent", (SENT, f"{SENT}.clone()")),
    ("13.2", "a name that is let go", (BEGIN, f"{FLAT}\n            del flat")),
    ("13.3", "by torch.all", ("gradient.isfinite().all()", "torch.isfinite(gradient).all()")),
    ("13.4", "the files that it has to do with", ("range(old)", "range(start // size, old)")),
    ("13.5", "by divmod", (OVER_T, "divmod(blocks * block, tensor)[0]")),
]


@each(REFUSED)
def test_what_is_wrong_is_refused(edit, tmp_path):
    assert verdict_on(edit, tmp_path).status == WRONG


@each(ACCEPTED)
def test_what_is_right_is_accepted(edit, tmp_path):
    verdict = verdict_on(edit, tmp_path)
    assert verdict.status == OK, verdict


# ------------------------------------------------------------------ ranks that take turns


def test_numbers_go_to_the_next_rank_and_come_from_the_one_before():
    def program(peer, mine):
        peer.send(mine)
        return peer.receive().item()

    assert in_turns(program, [(torch.tensor(r),) for r in range(4)]) == [3, 0, 1, 2]


def test_what_is_sent_is_another_tensor_than_what_comes():
    def program(peer, mine):
        peer.send(mine)
        mine.zero_()
        return peer.receive()

    assert in_turns(program, [(torch.ones(2),)])[0].tolist() == [1, 1]


def test_a_sum_goes_on_while_the_rank_does_something_else():
    order = []

    def program(peer, mine):
        work = peer.begin(mine)
        order.append(("begun", peer.rank))
        total = work.wait()
        order.append(("there", peer.rank))
        return total.tolist(), peer.most(peer.rank)

    assert in_turns(program, [(torch.ones(2),)] * 3) == [([3, 3], 2)] * 3
    assert [what for what, _ in order[:3]] == ["begun"] * 3


@pytest.mark.parametrize(
    ("program", "found"),
    [
        (
            lambda peer: peer.receive(),
            "nobody can go on: rank 0 waits for a message of rank 1, rank 1 waits for a message "
            "of rank 0; real ranks would hang.",
        ),
        (
            lambda peer: peer.rank or peer.most(1),
            "nobody can go on: rank 0 waits in the greatest of a number, rank 1 has ended; real "
            "ranks would hang.",
        ),
        (
            lambda peer: peer.sum(torch.ones(peer.rank + 1)),
            "the collectives do not match: number 1 of rank 0 is a sum of 1 number, of rank 1 a "
            "sum of 2 numbers; real ranks would hang, or mix up their numbers.",
        ),
    ],
    ids=["messages", "ended", "unlike"],
)
def test_ranks_that_would_hang_are_told_so_and_end(program, found):
    threads = threading.active_count()
    with pytest.raises(Stuck) as stuck:
        in_turns(program, [(), ()])
    assert str(stuck.value) == found
    assert threading.active_count() == threads


def test_the_error_of_a_rank_is_raised_and_the_others_end():
    def program(peer):
        if peer.rank:
            raise KeyError("of rank 1")
        peer.receive()

    threads = threading.active_count()
    with pytest.raises(KeyError, match="of rank 1"):
        in_turns(program, [(), ()])
    assert threading.active_count() == threads


def test_a_loop_without_end_is_stopped_with_its_thread():
    threads = threading.active_count()

    def endless(peer, whole):
        signal.setitimer(signal.ITIMER_REAL, 0.05)  # the alarm comes while this runs
        while True:
            pass

    found = judge(RING, endless).text
    assert "ran for more than" in found
    assert "was stopped at `" in found
    assert "somewhere" not in found
    deadline = time.monotonic() + 60
    while threading.active_count() > threads and time.monotonic() < deadline:
        time.sleep(0.01)
    assert threading.active_count() == threads


@pytest.mark.parametrize("call", ["send", "begin", "most"])
def test_what_is_no_number_is_refused(call):
    with pytest.raises(Wrong, match=f"peer.{call} got str; wanted"):
        in_turns(lambda peer: getattr(peer, call)("x"), [()])


def test_a_sum_is_waited_for_once():
    def program(peer):
        work = peer.begin(torch.ones(1))
        work.wait()
        work.wait()

    with pytest.raises(Wrong, match="called twice"):
        in_turns(program, [()])


# ------------------------------------------------------------------ the references


def test_the_ring_is_day_12s_reduce_scatter_and_sends_as_much():
    wholes = [torch.randint(9, (12,)).float() for _ in range(4)]
    wire, peers = Wire(4), []
    wanted = Collectives(wire).reduce_scatter(wholes)
    found = in_turns(ring_reduce_scatter, [(w,) for w in wholes], peers=peers)
    assert all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))
    sent = [sum(size for event, size in p.events if event == "send") for p in peers]
    assert sent == wire.sent


def test_sent_in_buckets_the_sums_are_those_of_one_sum():
    names = [f"{n}" for n in range(7)]
    given = [{n: torch.randint(9, (int(n) + 1,)).float() for n in names} for _ in range(3)]
    buckets = [names[6:3:-1], names[3:1:-1], names[1::-1]]

    def program(peer, mine):
        return torch.cat(reduce_in_buckets(peer, iter(list(mine.items())[::-1]), buckets))

    whole = [torch.cat([mine[n] for b in buckets for n in b]) for mine in given]
    for found in in_turns(program, [(mine,) for mine in given]):
        assert torch.equal(found, sum(whole))


def test_there_and_back_a_shard_is_what_it_was():
    n, old, new = 1001, 8, 3
    whole = torch.randn(n)
    files = F.pad(whole, (0, -n % old)).chunk(old)

    def reader(shards):
        return lambda source, start, stop: shards[source][start:stop]

    others = [resharded(reader(files), n, old, new, rank) for rank in range(new)]
    back = [resharded(reader(others), n, new, old, rank) for rank in range(old)]
    assert all(torch.equal(a, b) for a, b in zip(files, back, strict=True))


def test_with_data_parallel_alone_a_rank_is_that_of_the_librarys_stage_1():
    for layers, data, k in ((4, 8, 1), (3, 7, 5)):
        held, *sent = of_a_rank(1000, layers, 8, 1, 1, data, k, 16)
        n = 1000 * layers
        assert held == model_state_bytes(n, ranks=data, stage=1, optimizer_bytes=12)
        assert sent == [0, 0, communication_bytes(n, ranks=data, stage=1, micro_batches=k)]


def test_the_closed_form_is_what_is_counted_message_by_message():
    for tensor in (1, 2, 4):
        for pipeline in (1, 2, 3, 5):
            for data in (1, 3):
                shape = 480, 7, 8, tensor, pipeline, data, 3, 4
                assert of_a_rank(*shape) == day13._counted(*shape)


# ------------------------------------------------------------------ what the lesson says


def test_405b_on_128_is_what_the_lesson_says():
    huge = PRESETS["llama-3-405b"]
    ends = 2 * huge.vocab_size * huge.width + huge.width
    block = (huge.parameters - ends) // huge.layers
    assert (huge.parameters - ends) % huge.layers == 0
    found = of_a_rank(block, huge.layers, huge.width, 8, 4, 4, 16, 8192)
    assert [f"{n / 1e9:.1f}" for n in found] == ["89.3", "962.1", "8.6", "38.3"]
    assert 0.01 < ends / huge.parameters < 0.011
    assert f"{found[1] / found[3]:.2f}" == "25.15"


def test_the_line_of_the_bill_is_the_day_before_s():
    assert days.day(13).bill.measure is days.day(12).bill.measure


def test_one_ahead_is_a_deque_of_two():
    """The picture of the lesson: with two on the way a bucket has as long as four gradients."""
    events = []

    def program(peer):
        def made():
            for name in "hgfedcba":
                events.append(("made", name)) if peer.rank == 0 else None
                yield name, torch.ones(2)

        reduce_in_buckets(peer, made(), [list(pair) for pair in ("hg", "fe", "dc", "ba")])
        return [event for event, _ in peer.events]

    found = deque(in_turns(program, [(), ()])[0])
    assert [*found] == ["begin", "begin", "wait", "begin", "wait", "begin", "wait", "wait"]
