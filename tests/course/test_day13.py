"""Day 13: what its checks tell a learner, and what the lesson claims."""

import threading
import time

import pytest
import torch
import torch.nn.functional as F
from edited import verdict_on

from memlab.course import days, exercises
from memlab.course.checks import day13
from memlab.course.exercises import WRONG, Wrong, judge
from memlab.course.peers import Stuck, in_turns
from memlab.course.solutions import solution
from memlab.model import PRESETS
from memlab.reference.collectives import Collectives, Communicator
from memlab.zero import communication_bytes, model_state_bytes

RING, BUCKETS, AGREED, RESHARDED, WAYS = days.day(13).exercises
ring_reduce_scatter, reduce_in_buckets = solution("13.1"), solution("13.2")
agreed_steps, resharded, bytes_per_rank = (solution(f"13.{n}") for n in (3, 4, 5))


# ------------------------------------------------------------------ answers


@pytest.mark.few(1)
@pytest.mark.parametrize(
    "keep",
    [
        lambda g: g,
        lambda g: g.view(-1),
        lambda g: g.clone(),
        lambda g: g.numpy().view(),
        lambda g: torch.cat([torch.zeros(3), g.flatten()])[1:],
        lambda g: torch.empty(20, dtype=g.dtype).index_copy_(0, torch.arange(len(g[0])), g[0]),
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

    assert "still holds gradient a when c is computed" in judge(BUCKETS, hoarding).text


def test_gradients_kept_in_a_list_do_not_get_the_remark_about_a_variable():
    begin = "work.append(peer.begin(torch.cat([grads.pop(n).flatten() for n in pending.pop(0)])))"
    parts = """parts = [grads.pop(n) for n in pending.pop(0)]
            work.append(peer.begin(torch.cat(parts)))"""
    flat = ("grads[name] = gradient", "grads[name] = gradient.flatten()")
    found = verdict_on("13.2", (begin, parts), flat).text
    assert "still holds gradient a when c is computed" in found
    assert "The variable `flat`" not in found


def test_a_gradient_with_another_dtype_or_shape_is_not_a_shard():
    def widened(read, n, old, new, rank):
        return resharded(read, n, old, new, rank).double()

    assert "gave torch.float64; wanted torch.float32" in judge(RESHARDED, widened).text
    assert judge(RESHARDED, lambda *args: resharded(*args)[None]).status == WRONG


@pytest.mark.parametrize(
    ("asked", "found"),
    [((9, 0, 1), "the files are 0 to"), ((0, -1, 1), "a file has"), ((0, 0, 1.0), "use //, not")],
)
def test_a_read_outside_a_file_is_refused(asked, found):
    assert found in judge(RESHARDED, lambda read, *_: read(*asked)).text


def test_an_element_read_twice_is_found_when_the_count_is_right():
    with pytest.raises(Wrong, match="never read element 1 of file 0, and read another one twice"):
        day13._require_read("resharded", [(0, 0), (0, 0)], [(0, 0), (0, 1)])


# ------------------------------------------------------------------ ranks that take turns


def test_a_message_goes_to_the_next_rank():
    def program(peer, mine):
        peer.send(mine)
        return peer.receive().item()

    assert in_turns(program, [(torch.tensor(r),) for r in range(4)]) == [3, 0, 1, 2]


def test_a_message_is_a_copy():
    def program(peer, mine):
        peer.send(mine)
        mine.zero_()
        return peer.receive()

    assert in_turns(program, [(torch.ones(2),)])[0].tolist() == [1, 1]


def test_a_rank_goes_on_while_a_sum_is_in_flight():
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
            "all ranks are stuck: rank 0 waits for a message from rank 1, rank 1 waits for a "
            "message from rank 0; real ranks would hang.",
        ),
        (
            lambda peer: peer.rank or peer.most(1),
            "all ranks are stuck: rank 0 waits in the maximum of one number per rank, rank 1 has "
            "ended; real ranks would hang.",
        ),
        (
            lambda peer: peer.sum(torch.ones(peer.rank + 1)),
            "the collectives do not match: collective 1 is a sum of 1 element on rank 0, and a sum "
            "of 2 elements on rank 1; real ranks would hang, or mix up their data.",
        ),
    ],
    ids=["messages", "ended", "unlike"],
)
def test_ranks_that_would_hang_raise_and_end(program, found):
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


def test_a_loop_without_end_is_stopped_with_its_thread(monkeypatch):
    monkeypatch.setattr(exercises, "CPU_SECONDS", 0.1)
    monkeypatch.setattr(exercises, "LOOK_SECONDS", 0.05)
    threads = threading.active_count()

    def endless(peer, whole):
        while True:
            pass

    found = judge(RING, endless).text
    assert "was stopped at `" in found
    assert "it used 0.1 seconds of CPU time" in found
    deadline = time.monotonic() + 60
    while threading.active_count() > threads and time.monotonic() < deadline:
        time.sleep(0.01)
    assert threading.active_count() == threads


@pytest.mark.parametrize("call", ["send", "begin", "most"])
def test_peers_refuse_what_is_not_a_number_or_tensor(call):
    with pytest.raises(Wrong, match=f"peer.{call} got str; wanted"):
        in_turns(lambda peer: getattr(peer, call)("x"), [()])


def test_a_sum_is_waited_for_once():
    def program(peer):
        work = peer.begin(torch.ones(1))
        work.wait()
        work.wait()

    with pytest.raises(Wrong, match="called twice"):
        in_turns(program, [()])


# ------------------------------------------------------------------ the solutions


def test_the_ring_gives_and_sends_the_same_as_day_12s_reduce_scatter():
    wholes = [torch.randint(9, (12,)).float() for _ in range(4)]
    comm, peers = Communicator(4), []
    wanted = Collectives(comm).reduce_scatter(wholes)
    found = in_turns(ring_reduce_scatter, [(w,) for w in wholes], peers=peers)
    assert all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))
    sent = [sum(size for event, size in p.events if event == "send") for p in peers]
    assert sent == comm.sent


def test_sums_in_buckets_equal_one_sum():
    names = [f"{n}" for n in range(7)]
    given = [{n: torch.randint(9, (int(n) + 1,)).float() for n in names} for _ in range(3)]
    buckets = [names[6:3:-1], names[3:1:-1], names[1::-1]]

    def program(peer, mine):
        return torch.cat(reduce_in_buckets(peer, iter(list(mine.items())[::-1]), buckets))

    whole = [torch.cat([mine[n] for b in buckets for n in b]) for mine in given]
    for found in in_turns(program, [(mine,) for mine in given]):
        assert torch.equal(found, sum(whole))


def test_resharding_there_and_back_restores_every_shard():
    n, old, new = 1001, 8, 3
    whole = torch.randn(n)
    files = F.pad(whole, (0, -n % old)).chunk(old)

    def reader(shards):
        return lambda source, start, stop: shards[source][start:stop]

    others = [resharded(reader(files), n, old, new, rank) for rank in range(new)]
    back = [resharded(reader(others), n, new, old, rank) for rank in range(old)]
    assert all(torch.equal(a, b) for a, b in zip(files, back, strict=True))


def test_data_parallel_alone_is_the_librarys_stage_1():
    for layers, data, k in ((4, 8, 1), (3, 7, 5)):
        held, *sent = bytes_per_rank(1000, layers, 8, 1, 1, data, k, 16)
        n = 1000 * layers
        assert held == model_state_bytes(n, ranks=data, stage=1, optimizer_bytes=12)
        assert sent == [0, 0, communication_bytes(n, ranks=data, stage=1, micro_batches=k)]


def test_the_closed_form_equals_a_count_message_by_message():
    for tensor in (1, 2, 4):
        for pipeline in (1, 2, 3, 5):
            for data in (1, 3):
                shape = 480, 7, 8, tensor, pipeline, data, 3, 4
                assert bytes_per_rank(*shape) == day13._counted(*shape)


# ------------------------------------------------------------------ the lesson's claims


def test_405b_on_128_gpus_holds_and_sends_what_the_lesson_says():
    huge = PRESETS["llama-3-405b"]
    ends = 2 * huge.vocab_size * huge.hidden_size + huge.hidden_size
    block = (huge.parameters - ends) // huge.layers
    assert (huge.parameters - ends) % huge.layers == 0
    found = bytes_per_rank(block, huge.layers, huge.hidden_size, 8, 4, 4, 16, 8192)
    assert [f"{n / 1e9:.1f}" for n in found] == ["89.3", "962.1", "8.6", "38.3"]
    assert 0.01 < ends / huge.parameters < 0.011
    assert f"{found[1] / found[3]:.2f}" == "25.15"


def test_two_buckets_in_flight_give_the_events_of_the_picture():
    """With two in flight, a bucket has the time of four gradients."""

    def program(peer):
        def made():
            for name in "hgfedcba":
                yield name, torch.ones(2)

        reduce_in_buckets(peer, made(), [list(pair) for pair in ("hg", "fe", "dc", "ba")])
        return [event for event, _ in peer.events]

    assert in_turns(program, [(), ()])[0] == [
        "begin",
        "begin",
        "wait",
        "begin",
        "wait",
        "begin",
        "wait",
        "wait",
    ]
