"""Offloaded activations: the gradients of the run without them to the bit, each storage moved once
each way, and nothing left behind."""

import gc
from contextlib import nullcontext
from functools import partial

import pytest
import torch
import torch.nn.functional as F
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
    """Each layer saves its output, a storage of its own."""

    def forward(self, x):
        for _ in range(LAYERS):
            x = x.tanh()
        return x.sum()


def an_input():
    torch.manual_seed(0)
    return torch.randn(ROWS, WIDTH, requires_grad=True)


# ------------------------------------------------------------------ values


@pytest.mark.parametrize("minimum", [1, 4096])
def test_the_gradients_are_those_without_it(store, minimum):
    plain, ours = gpt(), gpt()
    plain(*a_batch()).backward()
    with offloaded_activations(store, minimum=minimum) as report:
        loss = ours(*a_batch())
    assert report.bytes == store.nbytes > 0
    loss.backward()
    assert same(gradients(ours), gradients(plain))
    assert store.keys() == []


def test_backward_may_run_twice_and_finds_everything_both_times(store):
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


def test_what_is_written_to_later_comes_back_as_it_was(store):
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
    inputs = -(-CONFIG.layers // every) * B * T * CONFIG.width * 4
    of_norm_and_loss = report.bytes - inputs
    with offloaded_activations(DiskStore(), minimum=4096, model=ours) as without_blocks:
        x = 1 * torch.randn(B, T, CONFIG.width, requires_grad=True)
        ours.loss(ours.norm(x), ours.embedding.weight, a_batch()[1])
    assert of_norm_and_loss == without_blocks.bytes
    loss.backward()
    assert same(gradients(ours), gradients(plain))
    assert store.keys() == []


@pytest.mark.parametrize("checkpointed", [partial(torchs, use_reentrant=False), checkpoint])
def test_inside_of_a_checkpoint_it_is_offloaded_and_not_computed_again(store, checkpointed):
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


def test_of_two_hooks_the_inner_one_has_the_tensor(store):
    x = an_input()
    with offloaded_activations(store, minimum=1) as report, compressed_activations(bits=8):
        Tanhs()(x)
    assert report.storages == 0
    with compressed_activations(bits=8), offloaded_activations(store, minimum=1) as report:
        Tanhs()(x).backward()
    assert report.storages == LAYERS


# ------------------------------------------------------------------ bytes


def test_each_storage_is_moved_once_each_way_however_many_operators_save_it(store):
    x = an_input()
    with offloaded_activations(store, minimum=1) as report:
        y = x.exp()  # saves its result
        loss = (y * y.T.contiguous().T).sum() + y.square().sum() + y.view(-1).sin().sum()
    loss.backward()
    assert (report.storages, report.bytes) == (2, 2 * STORAGE)  # y, and its copy in another order
    assert store.traffic.written == report.bytes
    (wanted,) = torch.autograd.grad(
        ((y := x.exp()) * y.T.contiguous().T).sum() + y.square().sum() + y.sin().sum(), x
    )
    torch.testing.assert_close(x.grad, wanted, rtol=1e-6, atol=0)


def test_all_but_the_first_that_backward_wants_are_prefetched(store):
    x = an_input()
    with offloaded_activations(store, minimum=1):
        loss = Tanhs()(x)
    loss.backward()
    moved = LAYERS * STORAGE
    assert (store.traffic.written, store.traffic.read) == (moved, moved)
    assert store.traffic.prefetched == moved - STORAGE


def test_a_storage_that_operators_far_apart_saved_is_on_its_way_each_time(store):
    x = an_input()
    with offloaded_activations(store, minimum=1):
        y = z = x.tanh()
        for _ in range(LAYERS - 1):
            z = z.tanh()
        loss = (z * y).sum()
    del y, z
    loss.backward()
    assert store.traffic.written == LAYERS * STORAGE
    # z is held from the product to the tanh next to it; y is let go of, and comes again at the end.
    assert store.traffic.read == (LAYERS + 1) * STORAGE
    assert store.traffic.prefetched == LAYERS * STORAGE
    (wanted,) = torch.autograd.grad(_tanhs_times_the_first(x), x)
    assert torch.equal(x.grad, wanted)


def _tanhs_times_the_first(x):
    y = z = x.tanh()
    for _ in range(LAYERS - 1):
        z = z.tanh()
    return (z * y).sum()


def test_what_one_operator_saved_comes_one_ahead_of_the_other(store):
    x = an_input()
    with offloaded_activations(store, minimum=1):
        loss = (x.sin() * x.cos()).sum()
    loss.backward()
    assert (store.traffic.read, store.traffic.prefetched) == (2 * STORAGE, STORAGE)


def test_a_graph_that_was_dropped_is_not_asked_for(store):
    x = an_input()
    with offloaded_activations(store, minimum=1):
        Tanhs()(x)
        loss = Tanhs()(x)
    loss.backward()
    assert store.traffic.read == LAYERS * STORAGE
    assert store.keys() == []


def test_what_was_held_goes_with_its_graph():
    x, store, others = an_input(), DiskStore(), []

    def half_a_backward():
        with offloaded_activations(store, minimum=1):
            y = x.tanh()
            loss = (y * y).sum()
            others.append(Tanhs()(x))  # whose graph lives on
        torch.autograd.grad(loss, y)

    assert memlab.measure(half_a_backward).live_bytes == x.nbytes + others[0].nbytes


def test_one_that_backward_passes_by_is_let_go_of_and_others_come_ahead_of_it(store):
    x, half = an_input(), LAYERS // 2
    with offloaded_activations(store, minimum=1):
        y = x
        for _ in range(half):
            y = y.tanh()
        aside = y.exp()  # saves its result, and the loss has nothing of it
        for _ in range(half):
            y = y.tanh()
        loss = y.sum()
    del y
    loss.backward()
    assert store.traffic.read == (LAYERS + 1) * STORAGE  # aside, too, and in vain
    assert store.traffic.prefetched == (LAYERS - 1) * STORAGE  # not the first, nor the one after it
    assert store.coming() == []
    del aside
    assert store.keys() == []


def alive_before_backward(around_forward):
    """Bytes, beyond the input, when there is the loss of `Tanhs` and no gradient yet."""
    x, kept = an_input(), []

    def forward():
        with around_forward:
            kept.append(Tanhs()(x))

    return memlab.measure(forward).live_bytes - x.nbytes


def test_on_the_disk_all_of_them_leave_the_device():
    assert alive_before_backward(nullcontext()) == LAYERS * STORAGE + 4
    assert alive_before_backward(offloaded_activations(DiskStore(), minimum=1)) == 4


def test_on_the_host_without_a_gpu_nothing_is_saved_and_the_meter_says_so():
    """It is the same memory: copies stand in the place of the originals."""
    in_memory = offloaded_activations(HostStore(), minimum=1)
    assert alive_before_backward(in_memory) == LAYERS * STORAGE + 4


def test_in_backward_two_of_them_are_there_at_once_and_the_gradients_at_work():
    x, store = an_input(), DiskStore()
    with offloaded_activations(store, minimum=1):
        loss = Tanhs()(x)
    trace = memlab.measure(loss.backward)
    # The one at work and the one on its way; the gradient that comes and the one that goes.
    assert trace.peak_bytes == 2 * STORAGE + 2 * STORAGE + loss.nbytes + 4  # its gradient


def test_a_gpt_s_activations_leave_but_for_the_loss():
    model, store, kept = gpt(), DiskStore(), []
    tokens, targets = a_batch()

    def forward():
        with offloaded_activations(store, minimum=1, model=model):
            kept.append(model(tokens, targets))

    assert memlab.measure(forward, model=model).at_end["activations"] == 4


def test_small_storages_stay(store):
    x = an_input()
    with offloaded_activations(store, minimum=ROWS * WIDTH + 1) as report:
        Tanhs()(x)
    assert report.storages == 0
    with offloaded_activations(store, minimum=ROWS * WIDTH) as report:
        Tanhs()(x)
    assert report.storages == LAYERS


class Scaled(nn.Module):
    """A frozen layer, whose result is multiplied by a buffer: backward wants both."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(64, 64, bias=False).requires_grad_(False)
        self.register_buffer("scale", torch.randn(64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x) * self.scale


def test_frozen_weights_stay_and_buffers_do_if_the_model_is_given(store):
    model, x = Scaled(), torch.randn(8, 64, requires_grad=True)
    moved = {}
    for name, given in (("without", None), ("with", model)):
        with offloaded_activations(store, minimum=1, model=given) as report:
            model(x).sum().backward()
        moved[name] = report.bytes
    assert moved == {"without": model.scale.nbytes, "with": 0}


def test_a_graph_that_is_never_walked_leaves_nothing_in_the_store(store):
    x = an_input()
    with offloaded_activations(store, minimum=1):
        loss = Tanhs()(x)
    assert len(store.keys()) == LAYERS
    del loss
    gc.collect()
    assert store.keys() == []


def test_a_dry_run_has_the_bytes_of_the_real_one():
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


# ------------------------------------------------------------------ what is refused


def test_a_minimum_below_1_is_refused(store):
    with (
        pytest.raises(ValueError, match="got minimum=0 numbers; give at least 1"),
        offloaded_activations(store, minimum=0),
    ):
        pass


def test_torch_s_own_check_of_what_was_written_to_is_kept_for_what_stays(store):
    x = torch.randn(3, requires_grad=True)
    with offloaded_activations(store, minimum=100):
        y = x * 2
        z = F.softplus(y)
    y.mul_(2)
    with pytest.raises(RuntimeError, match="was written to after it had been saved"):
        z.sum().backward()


@pytest.mark.gpu
@pytest.mark.parametrize("kind", [HostStore, DiskStore])
def test_on_a_gpu_the_gradients_are_those_without_it(kind):
    with torch.device("cuda"):
        plain, ours = gpt(), gpt()
    ours.load_state_dict(plain.state_dict())
    batch = [x.cuda() for x in a_batch()]
    plain(*batch).backward()
    with offloaded_activations(kind(), minimum=1):
        loss = ours(*batch)
    loss.backward()
    assert same(gradients(ours), gradients(plain))
