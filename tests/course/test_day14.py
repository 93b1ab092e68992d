"""Day 14: what its checks tell a learner, and what the lesson claims."""

import os
from dataclasses import replace
from functools import cache
from itertools import accumulate

import pytest
import torch
from close import assert_close

import memlab
from memlab.checkpointing import checkpoint_blocks, uniform_schedule
from memlab.course import bill_steps, days
from memlab.course.checks.day14 import FailingDisk, resume
from memlab.course.exercises import judge
from memlab.course.solutions import given, solution
from memlab.losses import chunked_cross_entropy
from memlab.model import GPT, PRESETS
from memlab.offload import DiskStore, OffloadedOptimizer, offloaded_activations, stream_layers
from memlab.precision import MasterWeights
from memlab.reference.offloaded_optimizer import OffloadedAdam
from memlab.reference.sharded_weights import backward_of, forward_of

HOOKS, AHEAD, ADAM, STREAM, COMMIT = days.day(14).exercises
Kept, hooks, commit = given(14, "Kept"), solution("14.1"), solution("14.5")

# ------------------------------------------------------------------ answers


def test_a_check_leaves_no_file_open():
    before = len(os.listdir("/proc/self/fd")) if os.path.isdir("/proc/self/fd") else 0
    for exercise in (HOOKS, AHEAD, ADAM, STREAM):
        judge(exercise, exercise.reference)
    after = len(os.listdir("/proc/self/fd")) if os.path.isdir("/proc/self/fd") else 0
    assert after == before


# ------------------------------------------------------------------ the disk and Kept


def test_a_power_failure_halves_files_without_fsync():
    disk = FailingDisk()
    disk.write("a", b"12345678")
    disk.write("b", b"12345678")
    disk.fsync("b")
    disk.rename("b", "c")
    assert disk.after_power_failure().files == {"a": b"1234", "c": b"12345678"}
    disk.write("c", b"new, and longer")
    assert disk.after_power_failure().files["c"] == b"new, an"


def test_a_rename_without_fsync_replaces_a_safe_file():
    disk = FailingDisk()
    disk.write("old", b"safe")
    disk.fsync("old")
    disk.write("new", b"12345678")
    disk.rename("new", "old")
    assert disk.after_power_failure().files == {"old": b"1234"}


def test_resume_finds_each_of_three_commits():
    disk = FailingDisk()
    for step in (1, 2, 3):
        commit(disk, step, {"m": bytes([step] * 8)})
        assert resume(disk.after_power_failure()) == (step, {"m": bytes([step] * 8)})


def test_a_kept_deletes_its_value_when_it_dies():
    with DiskStore() as store:
        kept = Kept(store, torch.arange(4.0))
        assert torch.equal(kept.get(), torch.arange(4.0))
        assert len(store.keys()) == 1
        del kept
        assert store.keys() == []


# ------------------------------------------------------------------ against the library


def a_model(layers=2):
    torch.manual_seed(0)
    return GPT(replace(PRESETS["tiny"], layers=layers))


def a_batch(seed):
    tokens = torch.randint(256, (2, 33), generator=torch.Generator().manual_seed(seed))
    return tokens[:, :-1], tokens[:, 1:]


def test_the_lessons_hooks_write_as_many_bytes_as_the_librarys():
    by_lesson, by_library = DiskStore(), DiskStore()
    gradients = []
    for around, model in (
        (lambda m: torch.autograd.graph.saved_tensors_hooks(*hooks(m.parameters(), by_lesson, 1)),
         a_model()),
        (lambda m: offloaded_activations(by_library, minimum=1), a_model()),
    ):  # fmt: skip
        with around(model):
            loss = model(*a_batch(0))
        loss.backward()
        gradients.append([w.grad for w in model.parameters()])
    assert by_lesson.traffic.written == by_library.traffic.written
    assert all(map(torch.equal, *gradients))


def test_the_lessons_optimizer_steps_and_moves_bytes_like_the_librarys():
    ours, theirs = a_model(), a_model()
    by_lesson, by_library = DiskStore(), DiskStore()
    adam = OffloadedAdam([[w] for w in ours.parameters()], by_lesson, 3e-3)
    inner = torch.optim.AdamW(theirs.parameters(), lr=3e-3, foreach=False)
    library = OffloadedOptimizer(inner, by_library, sub_group=1)
    for seed in range(3):
        for model in (ours, theirs):
            model.zero_grad()
            model(*a_batch(seed)).backward()
        adam.step(1.0)
        library.clip_grad_norm_(1.0)
        library.step()
    assert all(map(torch.equal, ours.parameters(), theirs.parameters()))
    assert by_lesson.traffic.written == by_library.traffic.written
    assert by_lesson.traffic.read == by_library.traffic.read


# ------------------------------------------------------------------ the lesson's claims


def one_by_one(weights):
    return torch.optim.AdamW(weights, foreach=False)


@cache
def seven_b(layers, way):
    """The trace and the traffic of the second step."""
    with memlab.dry_run():
        store, inputs = DiskStore(), torch.zeros(1, 2048, dtype=torch.long)
        config = replace(PRESETS["llama-2-7b"], layers=layers)
        model = GPT(config, dtype=torch.bfloat16, loss=chunked_cross_entropy)
        checkpoint_blocks(model, uniform_schedule(layers, every=1))
        for weight in model.parameters():
            weight.grad = torch.zeros_like(weight)
        if way == "everything":
            stream_layers(model, store)
        if way == "nothing":
            optimizer = MasterWeights(model.parameters(), optimizer=one_by_one)
        else:
            settings = {"weights": True, "gradients": way != "state"}
            optimizer = OffloadedOptimizer(one_by_one(model.parameters()), store, **settings)
        optimizer.step()
        store.traffic.reset()

        def step():
            optimizer.zero_grad()
            if way == "everything":
                with offloaded_activations(store):
                    loss = model(inputs, inputs)
            else:
                loss = model(inputs, inputs)
            loss.backward()
            optimizer.step()

        return memlab.measure(step, model=model, optimizer=optimizer), store.traffic


BLOCK = 202_383_360  # weights of one of Llama 2 7B's


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("way", "each"), [("nothing", 18), ("state", 4), ("state, gradients", 2), ("everything", 0)]
)
def test_every_further_block_adds_the_lessons_bytes_per_weight(way, each):
    """The lesson measures one block, and adds 31 times this. The tolerance is a step counter or a
    norm per tensor."""
    (one, _), (two, _) = seven_b(1, way), seven_b(2, way)
    assert 0 <= two.peak_bytes - one.peak_bytes - each * BLOCK <= 128


def test_every_further_block_moves_16_and_18_bytes_per_weight():
    """16 written: 12 for state and float32 weights, 2 for gradients, 2 for weights. 18 read, with
    the weights twice. The checkpoint's input travels both ways, too."""
    (_, one), (_, two) = seven_b(1, "everything"), seven_b(2, "everything")
    inputs = 2 * 2048 * 4096
    assert two.written - one.written == 16 * BLOCK + inputs
    assert two.read - one.read == 18 * BLOCK + inputs


def test_with_everything_offloaded_the_peak_is_the_embeddings_step():
    """Float32 weights and gradient, m and v, two temporaries, and the embedding and the head."""
    trace, _ = seven_b(1, "everything")
    embedding = 32_000 * 4096
    assert trace.peak_phase == "optimizer"
    wanted = (4 + 4 + 8 + 8 + 2 + 2) * embedding
    assert 0 <= trace.peak_bytes - wanted < 2**20 * 1.5


@pytest.mark.slow
def test_the_bill_keeps_no_state_gradients_or_activations():
    measured = bill_steps.offloaded_to_the_disk().at_peak
    assert measured.get("optimizer_state", 0) < 2**10
    of_the_embedding = 2 * 50_257 * 768  # the loss makes it first; the rest are norms
    assert 0 <= measured["gradients"] - of_the_embedding < 256
    assert measured["activations"] < 2**10


def test_streamed_weights_peak_at_the_rest_and_two_layers():
    model = a_model(12)
    everything = sum(w.nbytes for w in model.parameters())
    stream = stream_layers(model, DiskStore())
    rest = everything - sum(stream.layer_bytes)
    model(*a_batch(0)).backward()

    def step():
        model.zero_grad()
        model(*a_batch(0)).backward()

    events = memlab.measure(step, model=model).events
    most = max(accumulate(e.bytes * (e.category == "parameters") for e in events))
    assert (everything, most, rest, stream.layer_bytes[0]) == (625_792, 131_712, 32_896, 49_408)
    assert most == rest + 2 * stream.layer_bytes[0]


def test_the_lessons_backward_equals_autograd():
    w, x = torch.randn(6), torch.randn(4, 2)
    leaves = w.clone().requires_grad_(), x.clone().requires_grad_()
    dy = torch.randn(4, 3)
    wanted = torch.autograd.grad(forward_of(*leaves), leaves, dy)
    for got, right in zip(backward_of(w, x, dy), wanted, strict=True):
        assert_close(got, right)
