"""Day 14's checks accept right answers written differently, and the lesson's claims hold."""

import json
import os
import weakref
from dataclasses import replace
from functools import cache
from itertools import accumulate, count

import pytest
import torch
from close import assert_close
from edited import each, verdict_on
from torch.nn.utils import clip_grad_norm_

import memlab
from memlab.checkpointing import checkpoint_blocks, uniform_schedule
from memlab.course import days
from memlab.course.checks import day14
from memlab.course.checks.day14 import FailingDisk, resume
from memlab.course.exercises import OK, WRONG, judge
from memlab.course.solutions import given, solution
from memlab.losses import chunked_cross_entropy
from memlab.model import GPT, PRESETS
from memlab.offload import DiskStore, OffloadedOptimizer, offloaded_activations, stream_layers
from memlab.precision import MasterWeights
from memlab.reference.activation_compression import whole
from memlab.reference.offloaded_optimizer import OffloadedAdam
from memlab.reference.sharded_weights import backward_of, forward_of

HOOKS, AHEAD, ADAM, STREAM, COMMIT = days.day(14).exercises
Kept, hooks, commit = given(14, "Kept"), solution("14.1"), solution("14.5")

# ------------------------------------------------------------------ right answers


def with_a_class(weights, store, minimum):
    """A class for what the graph holds, and a list of weak references to find storages."""
    keys = count()
    weights, pairs = [w.untyped_storage() for w in weights], []

    class Away:
        def __init__(self, tensor):
            self.key = ("away", next(keys))
            store.put(self.key, whole(tensor))

        def __del__(self):
            store.delete(self.key)

    def found(storage):
        for there, away in pairs:
            if there() is storage and away() is not None:
                return away()
        return None

    def pack(tensor):
        storage = tensor.untyped_storage()
        is_small = storage.nbytes() < minimum * tensor.itemsize
        if is_small or any(storage is weight for weight in weights):
            left = tensor.detach()
            return lambda: left
        away = found(storage)
        if away is None:
            away = Away(tensor)
            pairs.append((weakref.ref(storage), weakref.ref(away)))
        dtype, view = tensor.dtype, (tensor.shape, tensor.stride(), tensor.storage_offset())
        return lambda: torch.as_strided(store.get(away.key).view(dtype), *view)

    return pack, lambda kept: kept()


class AheadByDict:
    """A dict of the keys that wait; the next is prefetched before get waits."""

    def __init__(self, store):
        self.store, self.order = store, {}

    def put(self, key, tensor):
        self.order[key] = True
        self.store.put(key, tensor)

    def get(self, key):
        self.order.pop(key, None)
        self.store.prefetch(key)
        for last in list(self.order)[-1:]:
            self.store.prefetch(last)
        return self.store.get(key)

    def delete(self, key):
        self.order.pop(key, None)
        self.store.delete(key)


class AdamByMoments(OffloadedAdam):
    """Integer counters, v before m, the norm by hand, and the next prefetched first."""

    def send(self, n):
        state = self.adams[n].state
        of_each = [state[w] for w in self.groups[n]]
        self.steps[n] = [int(kept["step"]) for kept in of_each]
        seconds, firsts = ([kept[m] for kept in of_each] for m in ("exp_avg_sq", "exp_avg"))
        self.store.put(f"group {n}", seconds + firsts)
        self.adams[n].state.clear()

    def bring(self, n):
        moments = self.store.get(f"group {n}")
        half = len(moments) // 2
        for w, step, v, m in zip(
            self.groups[n], self.steps[n], moments[:half], moments[half:], strict=True
        ):
            state = {"step": torch.tensor(float(step)), "exp_avg": m, "exp_avg_sq": v}
            self.adams[n].state[w] = state

    def step(self, max_norm):
        weights = [w for group in self.groups for w in group]
        norm = torch.stack([w.grad.norm() for w in weights]).norm()
        for w in weights:
            w.grad.mul_(torch.clamp(max_norm / (norm + 1e-6), max=1))
        for n in range(len(self.groups)):
            if n + 1 in self.steps:
                self.store.prefetch(f"group {n + 1}")
            if n in self.steps:
                self.bring(n)
            self.adams[n].step()
            self.send(n)


def with_prefetch(store, layers, x, dy_of, lr):
    """Prefetches the next layer; backward by autograd."""
    inputs = [x]
    for key, following in zip(layers, [*layers[1:], layers[-1]], strict=True):
        w = store.get(key)
        store.prefetch(following)
        inputs.append(forward_of(w, inputs[-1]))
        del w
    dy = dy_of(inputs.pop())
    for place in reversed(range(len(layers))):
        w = store.get(layers[place])
        if place:
            store.prefetch(layers[place - 1])
        leaf, given = w.requires_grad_(), inputs.pop().detach().requires_grad_()
        dw, dy = torch.autograd.grad(forward_of(leaf, given), (leaf, given), dy)
        store.put(layers[place], leaf.detach().sub_(dw, alpha=lr))
        del w, leaf, dw, given
    return dy


def once_read(store, layers, x, dy_of, lr):
    """Reads the last layer once, for forward and backward."""
    inputs = [x]
    for key in layers:
        w = store.get(key)
        inputs.append(forward_of(w, inputs[-1]))
    dy = dy_of(inputs.pop())
    for key in reversed(layers):
        dw, dy = backward_of(w, inputs.pop(), dy)
        store.put(key, w - lr * dw)
        if key != layers[0]:
            w = store.get(layers[layers.index(key) - 1])
    return dy


def with_numbered_names(disk, step, values, side=None):
    """Names not yet on the disk, and every fsync at the end."""
    if side is None:
        side = next(n for n in count() if not any(f"{n}-{k}" in disk.names() for k in values))
    files = {key: f"{side}-{key}" for key in values}
    for key in values:
        disk.write(files[key], values[key])
    disk.write("next", json.dumps({"step": step, "files": files}).encode())
    for name in [*files.values(), "next"]:
        disk.fsync(name)
    disk.rename("next", "manifest")
    for name in sorted(set(disk.names()) - {"manifest", *files.values()}):
        disk.remove(name)


def with_alternating_names(disk, step, values):
    """Two sets of names, for odd and even steps: step 77 overwrites step 7."""
    with_numbered_names(disk, step, values, step % 2)


@pytest.mark.parametrize(
    ("exercise", "answer"),
    [
        pytest.param(HOOKS, with_a_class, id="14.1-class"),
        pytest.param(AHEAD, AheadByDict, id="14.2-dict"),
        pytest.param(ADAM, AdamByMoments, id="14.3-moments"),
        pytest.param(STREAM, with_prefetch, id="14.4-ahead"),
        pytest.param(COMMIT, with_numbered_names, id="14.5-number"),
    ],
)
def test_a_right_answer_written_differently_passes(exercise, answer):
    verdict = judge(exercise, answer)
    assert verdict.status == OK, verdict


# ------------------------------------------------------------------ wrong answers


def keeping_tensors(weights, store, minimum):
    """A list in the closure holds the tensors."""
    tensors = []
    pack, unpack = hooks(weights, store, minimum)
    return lambda tensor: (tensors.append(tensor.detach()), pack(tensor))[1], unpack


def unpacking_a_list(weights, store, minimum):
    """Puts the tensor, but unpacks a list of its elements that was kept beside it."""
    pack, _ = hooks(weights, store, minimum)

    def pack_both(tensor):
        kept = pack(tensor)
        if isinstance(kept, torch.Tensor):
            return kept
        return kept, tensor.detach().tolist(), tensor.dtype, tensor.stride()

    def unpack_both(kept):
        if isinstance(kept, torch.Tensor):
            return kept
        _, elements, dtype, stride = kept
        made = torch.tensor(elements, dtype=dtype)
        return torch.empty_strided(made.shape, stride, dtype=dtype).copy_(made)

    return pack_both, unpack_both


class AdamBringingAll(OffloadedAdam):
    """Brings all sub-groups, then steps all, then sends all."""

    def step(self, max_norm):
        clip_grad_norm_([w for group in self.groups for w in group], max_norm)
        for n in self.steps:
            self.bring(n)
        for adam in self.adams:
            adam.step()
        for n in range(len(self.adams)):
            self.send(n)


class AdamPrefetchingItself(OffloadedAdam):
    """Prefetches each sub-group just before it gets it."""

    def bring(self, n):
        if n:
            self.store.prefetch(n)
        super().bring(n)

    def step(self, max_norm):
        clip_grad_norm_([w for group in self.groups for w in group], max_norm)
        for n, adam in enumerate(self.adams):
            if n in self.steps:
                self.bring(n)
            adam.step()
            self.send(n)


def keeping_lists(store, layers, x, dy_of, lr):
    """Keeps all weights as lists."""
    copies = {key: store.get(key).tolist() for key in layers}
    inputs = [x]
    for key in layers:
        store.get(key)
        inputs.append(forward_of(torch.tensor(copies[key], dtype=x.dtype), inputs[-1]))
    dy = dy_of(inputs.pop())
    for key in reversed(layers):
        w = torch.tensor(copies[key], dtype=x.dtype)
        dw, dy = backward_of(w, inputs.pop(), dy)
        store.put(key, w - lr * dw)
    return dy


def with_the_same_step(disk, step, values):
    """The file names do not depend on the step."""
    commit(disk, 0 if step < 3 else step, values)


def catching_everything(disk, step, values):
    try:
        commit(disk, step, values)
    except BaseException:
        return


def without_operations(disk, step, values):
    disk.files["manifest"] = b"{}"


@pytest.mark.parametrize(
    ("exercise", "answer", "said"),
    [
        pytest.param(HOOKS, keeping_tensors, "tensor is still alive", id="14.1-list"),
        pytest.param(HOOKS, unpacking_a_list, "in arrays, bytes or lists", id="14.1-elements"),
        pytest.param(ADAM, AdamBringingAll, "temporaries: 110,592 bytes", id="14.3-all"),
        pytest.param(
            ADAM, AdamPrefetchingItself, "1 is not prefetched when sub-group 0", id="14.3-itself"
        ),
        pytest.param(
            STREAM, once_read, "read in a step gave 376,832, wanted 393,216", id="14.4-once"
        ),
        pytest.param(STREAM, keeping_lists, "in arrays, bytes or lists", id="14.4-lists"),
        pytest.param(COMMIT, with_the_same_step, "resume finds step 0", id="14.5-step"),
        pytest.param(COMMIT, with_alternating_names, "finds step 7 with", id="14.5-alternating"),
        pytest.param(COMMIT, catching_everything, "goes on after a power", id="14.5-catching"),
        pytest.param(COMMIT, without_operations, "does not support item", id="14.5-no-operation"),
    ],
)
def test_a_wrong_answer_is_refused_with_a_message(exercise, answer, said):
    verdict = judge(exercise, answer)
    assert verdict.status == WRONG
    assert said in verdict.text


def test_a_check_leaves_no_file_open():
    before = len(os.listdir("/proc/self/fd")) if os.path.isdir("/proc/self/fd") else 0
    for exercise in (HOOKS, AHEAD, ADAM, STREAM):
        judge(exercise, exercise.reference)
    after = len(os.listdir("/proc/self/fd")) if os.path.isdir("/proc/self/fd") else 0
    assert after == before


VIEWED, TIDY = "kept.get().view(dtype)", 'name not in ("manifest", *files.values())'
BROUGHT, STEP = "            if n in self.steps:\n", "            adam.step()\n"
ASKED = """            if n + 1 in self.steps:
                self.store.prefetch(n + 1)
"""
NUMPY = "whole(tensor).view(torch.uint8).numpy().copy()"
NUMPY_IGNORED = ("kept, dtype, *view", "kept, _, dtype, *view")
BYTES_BESIDE = (
    "if tensor.dtype == torch.bfloat16:\n"
    "            kept.beside = tensor.detach().half().numpy().tobytes()"
)
KNOWN = "known = weakref.WeakKeyDictionary()"
REMOVED = "self.waiting.remove(key)\n        if self.waiting"
NEXT = "            self.store.prefetch(self.waiting[-1])"
IF_LAST = "self.waiting.pop() if self.waiting[-1] == key else 0\n        if self.waiting"
IF_WAITING = f"        if self.waiting:\n{NEXT}"
DELETED = (
    "self.store.delete(key)\n        if key in self.waiting:\n            self.waiting.remove(key)"
)
POPPED = "self.store.delete(key)\n        if self.waiting:\n            self.waiting.pop()"
STEPS = 'kept["step"] for kept in of_each'
ONE_COUNTER = 'of_each[0]["step"].clone() for kept in of_each'
PUT, FILES = "store.put(key, w - lr * dw)", 'files = {key: f"{key}.{step}" for key in values}'
NO_EMPTY = "values = {k: v for k, v in values.items() if v}"
TIDIED = "    for name in disk.names():"
READ = "    for key in layers:\n        w = store.get(key)\n"
ONE_AHEAD = """    for n, key in enumerate(layers):
        w = store.get(key)
        for following in layers[n + 1 : n + 2]:
            store.prefetch(following)
"""

REFUSED = [
    (
        "14.4",
        "each output twice",
        ("    inputs = [x]", "    inputs, outputs = [x], []"),
        ("        del w\n", "        outputs.append(inputs[-1].clone())\n        del w\n"),
    ),
    ("14.4", "writes into x", ("    inputs = [x]", "    x.mul_(1.0)\n    inputs = [x]")),
    ("14.1", "more than the minimum", ("< minimum", "<= minimum")),
    ("14.1", "bytes of float32", ("len(whole(tensor)) <", "storage.nbytes() < 4 *")),
    (
        "14.1",
        "weights by their addresses",
        ("{weight.untyped_storage()", "{weight.data_ptr()"),
        ("if storage in left", "if tensor.data_ptr() in left"),
    ),
    (
        "14.1",
        "bytes of one tensor",
        ("return kept, tensor.dtype", f"{BYTES_BESIDE}\n        return kept, tensor.dtype"),
    ),
    ("14.1", "unpack keeps its result", ("kept.get()", 'vars(kept).setdefault("n", kept.get())')),
    ("14.1", "numpy", ("kept, tensor.dtype", f"kept, {NUMPY}, tensor.dtype"), NUMPY_IGNORED),
    (
        "14.1",
        "one dict for all stores",
        (KNOWN, "known = hooks.__dict__.setdefault('known', weakref.WeakKeyDictionary())"),
    ),
    ("14.2", "the second to last is forgotten", (REMOVED, f"del self.waiting[-2:]{REMOVED[24:]}")),
    ("14.2", "delete removes the last key", (DELETED, POPPED)),
    ("14.2", "get removes the last key only", (REMOVED, IF_LAST)),
    (
        "14.2",
        "no prefetch after a second get",
        (IF_WAITING, f"    {IF_WAITING.replace(NEXT, '    ' + NEXT)}"),
    ),
    (
        "14.2",
        "two ahead",
        (
            "self.store.prefetch(self.waiting[-1])",
            "[self.store.prefetch(k) for k in self.waiting[:-3:-1]]",
        ),
    ),
    ("14.2", "the largest key", (NEXT, NEXT.replace("self.waiting[-1]", "max(self.waiting)"))),
    ("14.3", "no gradients left", (STEP, f"{STEP}            adam.zero_grad()\n")),
    ("14.3", "one counter per sub-group", (STEPS, ONE_COUNTER)),
    ("14.4", "two ahead", (READ, ONE_AHEAD.replace("n + 2", "n + 3"))),
    ("14.4", "layers reversed", ("in reversed(layers)", "in layers.reverse() or layers")),
    ("14.4", "float32", (PUT, PUT.replace("w - lr * dw", "(w - lr * dw).float()"))),
    ("14.4", "a fixed lr", (PUT, PUT.replace("lr", "0.5"))),
    ("14.5", "values emptied", (TIDIED, f"    values.clear()\n{TIDIED}")),
    ("14.5", "manifest.STEP", ('"manifest.new"', 'f"manifest.{step}"')),
    ("14.5", "empty values dropped", (FILES, f"{NO_EMPTY}\n    {FILES}")),
    ("14.5", "no values, no commit", (FILES, f"if not values:\n        return\n    {FILES}")),
    ("14.5", "step and key run together", ('f"{key}.{step}"', 'f"{step}{key}"')),
    (
        "14.5",
        "a crash of the same step",
        (TIDY, 'name != "manifest" and not name.endswith(f".{step}")'),
    ),
]
ACCEPTED = [
    ("14.4", "a copy in place", ("w - lr * dw", "w.clone().sub_(dw, alpha=lr)")),
    ("14.4", "the gradient in place", ("w - lr * dw", "dw.mul_(-lr).add_(w)")),
    ("14.1", "a view of bytes", (VIEWED, "kept.get().view(torch.uint8).view(dtype)")),
    (
        "14.2",
        "while",
        (REMOVED, f"{REMOVED[:24]}\n        while self.waiting"),
        (NEXT, f"{NEXT}\n            break"),
    ),
    ("14.3", "prefetched first", (ASKED, ""), (BROUGHT, f"{ASKED}{BROUGHT}")),
    ("14.4", "one ahead", (READ, ONE_AHEAD)),
    ("14.4", "in place", (PUT, "w -= lr * dw\n        store.put(key, w)")),
    ("14.4", "two layers in memory", ("        del w, dw", "        pass")),
    ("14.5", "numbered", (FILES, 'files = {key: f"{step}.{n}" for n, key in enumerate(values)}')),
]


@each(REFUSED)
def test_a_wrong_answer_is_refused(edit, tmp_path):
    assert verdict_on(edit, tmp_path).status == WRONG


@each(ACCEPTED)
def test_a_right_answer_is_accepted(edit, tmp_path):
    verdict = verdict_on(edit, tmp_path)
    assert verdict.status == OK, verdict


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
    measured = day14.offloaded_to_the_disk().at_peak
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
