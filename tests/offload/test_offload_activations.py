"""Offloaded activations: gradients do not change, and each storage moves once each way."""

import gc
from contextlib import nullcontext
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from close import assert_close
from torch import nn
from torch.utils.checkpoint import checkpoint as torchs

import memlab
from memlab.checkpointing import checkpoint, checkpoint_blocks, uniform_schedule
from memlab.compression import compressed_activations
from memlab.model import GPT, PRESETS
from memlab.offload import DiskStore, HostStore, offloaded_activations

CONFIG = PRESETS["tiny"]
B, T = 4, 64
LAYERS, ROWS, WIDTH = 6, 50, 40
STORAGE = 4 * ROWS * WIDTH  # bytes of what each layer of `Tanhs` saves


@pytest.fixture(params=[HostStore, DiskStore])
def store(request):
    return request.param()


def gpt(**settings):
    torch.manual_seed(0)
    return GPT(CONFIG, **settings)


def a_batch():
    tokens = torch.randint(256, (B, T + 1), generator=torch.Generator().manual_seed(1))
    return tokens[:, :-1], tokens[:, 1:]


def gradients(model):
    return [p.grad.clone() for p in model.parameters() if p.grad is not None]


def same(some, others):
    return len(some) == len(others) > 0 and all(map(torch.equal, some, others))


class Tanhs(nn.Module):
    """A chain where each tanh saves its output, a separate storage."""

    def forward(self, x):
        for _ in range(LAYERS):
            x = x.tanh()
        return x.sum()


def an_input():
    torch.manual_seed(0)
    return torch.randn(ROWS, WIDTH, requires_grad=True)


# ------------------------------------------------------------------ values


@pytest.mark.parametrize("minimum", [1, 4096])
def test_gradients_do_not_change(store, minimum):
    plain, ours = gpt(), gpt()
    plain(*a_batch()).backward()
    with offloaded_activations(store, minimum=minimum) as report:
        loss = ours(*a_batch())
    assert report.bytes == store.nbytes > 0
    loss.backward()
    assert same(gradients(ours), gradients(plain))
    assert store.keys() == []


def test_backward_may_run_twice(store):
    x = an_input()
    with offloaded_activations(store, minimum=1):
        loss = Tanhs()(x)
    (first,) = torch.autograd.grad(loss, x, retain_graph=True)
    assert len(store.keys()) == LAYERS
    (second,) = torch.autograd.grad(loss, x)
    (wanted,) = torch.autograd.grad(Tanhs()(x), x)
    assert torch.equal(first, wanted)
    assert torch.equal(second, wanted)
    assert store.keys() == []


def test_a_tensor_modified_later_is_loaded_with_its_original_values(store):
    x = torch.randn(100, requires_grad=True)
    with offloaded_activations(store, minimum=1):
        y = x * 3
        z = y.square()  # saves y
    wanted = 2 * (x * 3).detach() * 3
    y.data.zero_()
    z.sum().backward()
    assert torch.equal(x.grad, wanted)


@pytest.mark.parametrize("every", [1, 2])
def test_around_checkpoints_their_inputs_are_offloaded(store, every):
    plain, ours = gpt(), gpt()
    for model in (plain, ours):
        checkpoint_blocks(model, uniform_schedule(CONFIG.layers, every=every))
    plain(*a_batch()).backward()
    with offloaded_activations(store, minimum=4096, model=ours) as report:
        loss = ours(*a_batch())
    inputs = -(-CONFIG.layers // every) * B * T * CONFIG.hidden_size * 4
    of_norm_and_loss = report.bytes - inputs
    with offloaded_activations(DiskStore(), minimum=4096, model=ours) as without_blocks:
        x = 1 * torch.randn(B, T, CONFIG.hidden_size, requires_grad=True)
        ours.loss(ours.norm(x), ours.embedding.weight, a_batch()[1])
    assert of_norm_and_loss == without_blocks.bytes
    loss.backward()
    assert same(gradients(ours), gradients(plain))
    assert store.keys() == []


@pytest.mark.parametrize("checkpointed", [partial(torchs, use_reentrant=False), checkpoint])
def test_inside_a_checkpoint_tensors_are_offloaded_and_not_recomputed(store, checkpointed):
    x, calls = an_input(), []

    def inside(x):
        calls.append(1)
        with offloaded_activations(store, minimum=1):
            return Tanhs()(x)

    loss = checkpointed(inside, x)
    assert store.nbytes == LAYERS * STORAGE
    loss.backward()
    (wanted,) = torch.autograd.grad(Tanhs()(x), x)
    assert torch.equal(x.grad, wanted)
    assert len(calls) == 1


def test_the_inner_one_of_two_hooks_applies(store):
    x = an_input()
    with offloaded_activations(store, minimum=1) as report, compressed_activations(bits=8):
        Tanhs()(x)
    assert report.storages == 0
    with compressed_activations(bits=8), offloaded_activations(store, minimum=1) as report:
        Tanhs()(x).backward()
    assert report.storages == LAYERS


# ------------------------------------------------------------------ bytes


def test_each_storage_moves_once_each_way_however_many_operators_save_it(store):
    x = an_input()
    with offloaded_activations(store, minimum=1) as report:
        y = x.exp()  # saves its result
        loss = (y * y.T.contiguous().T).sum() + y.square().sum() + y.view(-1).sin().sum()
    loss.backward()
    assert (report.storages, report.bytes) == (2, 2 * STORAGE)  # y and its transposed copy
    assert store.traffic.written == report.bytes
    (wanted,) = torch.autograd.grad(
        ((y := x.exp()) * y.T.contiguous().T).sum() + y.square().sum() + y.sin().sum(), x
    )
    assert_close(x.grad, wanted)


def test_all_storages_but_the_first_are_prefetched(store):
    x = an_input()
    with offloaded_activations(store, minimum=1):
        loss = Tanhs()(x)
    loss.backward()
    moved = LAYERS * STORAGE
    assert (store.traffic.written, store.traffic.read) == (moved, moved)
    assert store.traffic.prefetched == moved - STORAGE


def test_a_storage_saved_by_distant_operators_is_prefetched_each_time(store):
    x = an_input()
    with offloaded_activations(store, minimum=1):
        y = z = x.tanh()
        for _ in range(LAYERS - 1):
            z = z.tanh()
        loss = (z * y).sum()
    del y, z
    loss.backward()
    assert store.traffic.written == LAYERS * STORAGE
    # z is held from the mul to the adjacent tanh; y is released and loaded again at the end.
    assert store.traffic.read == (LAYERS + 1) * STORAGE
    assert store.traffic.prefetched == LAYERS * STORAGE
    (wanted,) = torch.autograd.grad(_tanhs_times_the_first(x), x)
    assert torch.equal(x.grad, wanted)


def _tanhs_times_the_first(x):
    y = z = x.tanh()
    for _ in range(LAYERS - 1):
        z = z.tanh()
    return (z * y).sum()


def test_tensors_saved_by_one_operator_are_prefetched_one_after_another(store):
    x = an_input()
    with offloaded_activations(store, minimum=1):
        loss = (x.sin() * x.cos()).sum()
    loss.backward()
    assert (store.traffic.read, store.traffic.prefetched) == (2 * STORAGE, STORAGE)


def test_a_dropped_graph_is_not_prefetched(store):
    x = an_input()
    with offloaded_activations(store, minimum=1):
        Tanhs()(x)
        loss = Tanhs()(x)
    loss.backward()
    assert store.traffic.read == LAYERS * STORAGE
    assert store.keys() == []


def test_a_held_storage_is_freed_with_its_graph():
    x, store, others = an_input(), DiskStore(), []

    def half_a_backward():
        with offloaded_activations(store, minimum=1):
            y = x.tanh()
            loss = (y * y).sum()
            others.append(Tanhs()(x))  # keeps its graph alive
        torch.autograd.grad(loss, y)

    assert memlab.measure(half_a_backward).live_bytes == x.nbytes + others[0].nbytes


def test_a_storage_that_backward_skips_is_cancelled_and_others_are_prefetched(store):
    x, half = an_input(), LAYERS // 2
    with offloaded_activations(store, minimum=1):
        y = x
        for _ in range(half):
            y = y.tanh()
        aside = y.exp()  # saves its result, which the loss does not use
        for _ in range(half):
            y = y.tanh()
        loss = y.sum()
    del y
    loss.backward()
    assert store.traffic.read == (LAYERS + 1) * STORAGE  # including aside, unused
    assert store.traffic.prefetched == (LAYERS - 1) * STORAGE  # not the first, nor the one after it
    assert store.coming() == []
    del aside
    assert store.keys() == []


def alive_before_backward(around_forward):
    """Return the bytes alive beyond the input, between forward and backward of `Tanhs`."""
    x, kept = an_input(), []

    def forward():
        with around_forward:
            kept.append(Tanhs()(x))

    return memlab.measure(forward).live_bytes - x.nbytes


def test_a_disk_store_frees_all_activations_from_the_device():
    assert alive_before_backward(nullcontext()) == LAYERS * STORAGE + 4
    assert alive_before_backward(offloaded_activations(DiskStore(), minimum=1)) == 4


def test_without_a_gpu_a_host_store_saves_no_metered_memory():
    """The copies are in the same memory as the originals were."""
    in_memory = offloaded_activations(HostStore(), minimum=1)
    assert alive_before_backward(in_memory) == LAYERS * STORAGE + 4


def test_backward_has_two_storages_and_two_gradients_at_once():
    x, store = an_input(), DiskStore()
    with offloaded_activations(store, minimum=1):
        loss = Tanhs()(x)
    trace = memlab.measure(loss.backward)
    # The used storage and the prefetched one; the incoming and the outgoing gradient.
    assert trace.peak_bytes == 2 * STORAGE + 2 * STORAGE + loss.nbytes + 4  # its gradient


def test_all_activations_of_a_gpt_are_offloaded_but_the_loss():
    model, store, kept = gpt(), DiskStore(), []
    tokens, targets = a_batch()

    def forward():
        with offloaded_activations(store, minimum=1, model=model):
            kept.append(model(tokens, targets))

    assert memlab.measure(forward, model=model).at_end["activations"] == 4


def test_small_storages_are_not_offloaded(store):
    x = an_input()
    with offloaded_activations(store, minimum=ROWS * WIDTH + 1) as report:
        Tanhs()(x)
    assert report.storages == 0
    with offloaded_activations(store, minimum=ROWS * WIDTH) as report:
        Tanhs()(x)
    assert report.storages == LAYERS


class Scaled(nn.Module):
    """A frozen layer whose result is multiplied by a buffer: backward needs both."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(64, 64, bias=False).requires_grad_(False)
        self.register_buffer("scale", torch.randn(64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x) * self.scale


def test_frozen_weights_are_not_offloaded_nor_buffers_if_the_model_is_given(store):
    model, x = Scaled(), torch.randn(8, 64, requires_grad=True)
    moved = {}
    for name, given in (("without", None), ("with", model)):
        with offloaded_activations(store, minimum=1, model=given) as report:
            model(x).sum().backward()
        moved[name] = report.bytes
    assert moved == {"without": model.scale.nbytes, "with": 0}


def test_a_graph_without_backward_leaves_nothing_in_the_store(store):
    x = an_input()
    with offloaded_activations(store, minimum=1):
        loss = Tanhs()(x)
    assert len(store.keys()) == LAYERS
    del loss
    gc.collect()
    assert store.keys() == []


def test_a_dry_run_has_the_same_bytes():
    def measured():
        model, store = gpt(), DiskStore()
        tokens, targets = torch.zeros(2, B, T, dtype=torch.int64)

        def step():
            with offloaded_activations(store, minimum=1):
                loss = model(tokens, targets)
            loss.backward()

        return memlab.measure(step, model=model).peak_bytes, store.traffic.written

    real = measured()
    with memlab.dry_run():
        assert measured() == real


# ------------------------------------------------------------------ errors


def test_a_minimum_below_1_is_refused(store):
    with (
        pytest.raises(ValueError, match="got minimum=0 elements; pass at least 1"),
        offloaded_activations(store, minimum=0),
    ):
        pass


def test_modified_tensors_that_are_not_offloaded_still_raise_torchs_error(store):
    x = torch.randn(3, requires_grad=True)
    with offloaded_activations(store, minimum=100):
        y = x * 2
        z = F.softplus(y)
    y.mul_(2)
    with pytest.raises(RuntimeError, match="was written to after it had been saved"):
        z.sum().backward()


@pytest.mark.gpu
@pytest.mark.parametrize("kind", [HostStore, DiskStore])
def test_gradients_do_not_change_on_a_gpu(kind):
    with torch.device("cuda"):
        plain, ours = gpt(), gpt()
    ours.load_state_dict(plain.state_dict())
    batch = [x.cuda() for x in a_batch()]
    plain(*batch).backward()
    with offloaded_activations(kind(), minimum=1):
        loss = ours(*batch)
    loss.backward()
    assert same(gradients(ours), gradients(plain))
