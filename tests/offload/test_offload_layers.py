"""Streamed layers: at most two layers' weights are on the device, each is read twice a step, and
gradients and weights do not change."""

import copy
import gc
import io
import pickle
import weakref
from functools import partial
from itertools import pairwise

import pytest
import torch
from quick import quick
from torch import nn

import memlab
from memlab.checkpointing import checkpoint_blocks, sqrt_schedule, uniform_schedule
from memlab.model import GPT, PRESETS
from memlab.offload import (
    DiskStore,
    HostStore,
    OffloadedOptimizer,
    StoreError,
    offloaded_activations,
    stream_layers,
)
from memlab.optim import step_in_backward

CONFIG = PRESETS["tiny"]
B, T, L = 4, 64, CONFIG.layers
LAYER_BYTES = 49_408  # of a block's weights


@pytest.fixture(params=[HostStore, DiskStore])
def store(request):
    return request.param()


def gpt(dtype=torch.float32):
    torch.manual_seed(0)
    return GPT(CONFIG, dtype=dtype)


def a_batch(seed=0):
    tokens = torch.randint(256, (B, T + 1), generator=torch.Generator().manual_seed(seed))
    return tokens[:, :-1], tokens[:, 1:]


def a_step(model, optimizer, seed=0):
    optimizer.zero_grad()
    model(*a_batch(seed)).backward()
    optimizer.step()


def forward_and_backward(model):
    model.zero_grad()
    model(*a_batch()).backward()


def gradients(model):
    return [p.grad.clone() for p in model.parameters()]


def same(some, others):
    pairs = list(zip(some, others, strict=True))
    return len(pairs) > 0 and all(torch.equal(a, b) for a, b in pairs)


def weights_of(streamed, model):
    with streamed.present():
        return [p.detach().clone() for p in model.parameters()]


def most(trace, category):
    """Return the peak bytes of one category."""
    alive = peak = 0
    for event in trace.events:
        alive += event.bytes * (event.category == category)
        peak = max(peak, alive)
    return peak


def bytes_of(modules):
    return sum(p.nbytes for module in modules for p in module.parameters())


SCHEDULES = {
    "no checkpoint": lambda model: None,
    "checkpoint each block": lambda model: checkpoint_blocks(model, uniform_schedule(L, every=1)),
    "segments of √L": lambda model: checkpoint_blocks(model, sqrt_schedule(L)),
}

# ------------------------------------------------------------------ values


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_gradients_do_not_change(store, schedule):
    plain, ours = gpt(), gpt()
    for model in (plain, ours):
        SCHEDULES[schedule](model)
    stream_layers(ours, store)
    for model in (plain, ours):
        forward_and_backward(model)
        forward_and_backward(model)
    assert same(gradients(ours), gradients(plain))


def test_layers_are_streamed_without_a_graph(store):
    plain, ours = gpt(), gpt()
    streamed = stream_layers(ours, store)
    with torch.no_grad():
        assert torch.equal(ours(*a_batch()), plain(*a_batch()))
    assert [p.untyped_storage().nbytes() for p in ours.blocks.parameters()] == [0] * (9 * L)
    assert len(streamed.layer_bytes) == L


def test_a_failed_backward_does_not_disturb_the_next_step(store):
    plain, ours = gpt(), gpt()
    stream_layers(ours, store)

    def breaks(gradient):
        raise ArithmeticError

    handle = ours.blocks[1].register_forward_hook(
        lambda module, args, output: output.register_hook(breaks) and None
    )
    with pytest.raises(ArithmeticError):
        forward_and_backward(ours)
    handle.remove()
    for model in (plain, ours):
        forward_and_backward(model)
    assert same(gradients(ours), gradients(plain))
    assert [p.untyped_storage().nbytes() for p in ours.blocks.parameters()] == [0] * (9 * L)


def test_gradients_accumulate_over_micro_batches(store):
    plain, ours = gpt(), gpt()
    stream_layers(ours, store)
    for model in (plain, ours):
        for seed in range(3):
            model(*a_batch(seed)).backward()
    assert same(gradients(ours), gradients(plain))


def test_weights_do_not_change_when_stepping_in_backward(store):
    plain, ours = gpt(), gpt()
    streamed = stream_layers(ours, store)
    unwrapped = torch.optim.AdamW(plain.parameters(), foreach=False)
    optimizer = step_in_backward(torch.optim.AdamW(ours.parameters(), foreach=False))
    for seed in range(3):
        a_step(plain, unwrapped, seed)
        a_step(ours, optimizer, seed)
    assert same(weights_of(streamed, ours), plain.parameters())


@pytest.mark.few(2)
@pytest.mark.parametrize("gradients", [False, True])
@pytest.mark.parametrize("dtype", quick([torch.float32], [torch.float32, torch.bfloat16]))
def test_weights_do_not_change_with_an_offloaded_optimizer(store, dtype, gradients):
    plain, ours = gpt(dtype), gpt(dtype)
    streamed = stream_layers(ours, store)

    def offloaded(model, store):
        inner = torch.optim.AdamW(model.parameters(), foreach=False)
        return OffloadedOptimizer(inner, store, weights=True, gradients=gradients, sub_group=9000)

    unstreamed, optimizer = offloaded(plain, DiskStore()), offloaded(ours, store)
    for seed in range(3):
        a_step(plain, unstreamed, seed)
        a_step(ours, optimizer, seed)
    assert same(weights_of(streamed, ours), plain.parameters())


def test_weights_do_not_change_with_all_offloading_techniques_at_once():
    plain, ours = gpt(), gpt()
    store = DiskStore()
    streamed = stream_layers(ours, store)
    unwrapped = torch.optim.AdamW(plain.parameters(), foreach=False)
    inner = torch.optim.AdamW(ours.parameters(), foreach=False)
    optimizer = OffloadedOptimizer(inner, store, weights=True, gradients=True, sub_group=9000)
    for seed in range(3):
        a_step(plain, unwrapped, seed)
        optimizer.zero_grad()
        with offloaded_activations(store, minimum=1, model=ours):
            loss = ours(*a_batch(seed))
        loss.backward()
        optimizer.step()
    assert same(weights_of(streamed, ours), plain.parameters())


# ------------------------------------------------------------------ bytes


@pytest.mark.parametrize("schedule", ["no checkpoint", "checkpoint each block"])
def test_the_peak_of_parameters_is_two_layers_plus_the_rest(schedule):
    model = gpt()
    SCHEDULES[schedule](model)
    rest = bytes_of([model]) - L * LAYER_BYTES
    streamed = stream_layers(model, DiskStore())
    assert streamed.layer_bytes == [LAYER_BYTES] * L
    forward_and_backward(model)
    trace = memlab.measure(lambda: forward_and_backward(model), model=model)
    assert most(trace, "parameters") == rest + 2 * LAYER_BYTES
    assert trace.at_end["parameters"] == rest


def test_the_peak_for_different_layer_sizes_is_the_two_largest_neighbours():
    torch.manual_seed(0)
    sizes = [10, 30, 20, 50, 10]
    model = nn.Sequential(*(nn.Linear(*pair, bias=False) for pair in pairwise(sizes)))
    streamed = stream_layers(model, DiskStore(), list(model))
    assert streamed.layer_bytes == [4 * 300, 4 * 600, 4 * 1000, 4 * 500]

    def step():
        model(torch.ones(2, 10)).sum().backward()

    step()
    assert most(memlab.measure(step, model=model), "parameters") == 4 * (600 + 1000)


def test_without_a_gpu_a_host_store_saves_no_metered_memory():
    """Emptied storages and the store's copies are in the same memory."""

    def streamed(kept):
        model = gpt()
        kept += [model, stream_layers(model, HostStore())]

    whole = memlab.measure(partial(list.append, [], gpt())).live_bytes
    assert memlab.measure(partial(streamed, [])).live_bytes == whole


@pytest.mark.parametrize(
    ("schedule", "times"),
    [("no checkpoint", 2), ("checkpoint each block", 2), ("segments of √L", 3)],
)
def test_each_layer_is_read_once_for_forward_and_once_for_backward(store, schedule, times):
    """Recomputed segments of several layers read all but their last layer once more."""
    model = gpt()
    SCHEDULES[schedule](model)
    stream_layers(model, store)
    store.traffic.reset()
    forward_and_backward(model)
    assert 2 * L * LAYER_BYTES <= store.traffic.read <= times * L * LAYER_BYTES
    if times == 2:
        assert store.traffic.read == 2 * L * LAYER_BYTES
    assert store.traffic.written == 0  # no weight changed


def test_all_layers_but_the_first_are_prefetched(store):
    model = gpt()
    stream_layers(model, store)
    store.traffic.reset()
    forward_and_backward(model)
    assert store.traffic.read - store.traffic.prefetched == LAYER_BYTES


def test_each_layer_is_written_back_once_when_stepping_in_backward(store):
    model = gpt()
    stream_layers(model, store)
    optimizer = step_in_backward(torch.optim.AdamW(model.parameters(), foreach=False))
    a_step(model, optimizer)
    store.traffic.reset()
    a_step(model, optimizer)
    assert store.traffic.written == L * LAYER_BYTES
    assert store.traffic.read == 2 * L * LAYER_BYTES
    assert store.nbytes == L * LAYER_BYTES


def test_with_everything_on_disk_only_the_rest_and_step_counters_stay_on_the_device():
    model, store = gpt(), DiskStore()
    rest = bytes_of([model]) - bytes_of(model.blocks)
    streamed = stream_layers(model, store)
    inner = torch.optim.AdamW(model.parameters(), foreach=False)
    optimizer = OffloadedOptimizer(inner, store, weights=True, gradients=True, sub_group=9000)
    a_step(model, optimizer)
    trace = memlab.measure(lambda: a_step(model, optimizer), model=model, optimizer=optimizer)
    assert trace.at_end["parameters"] == rest
    assert "gradients" not in trace.at_end
    counts = 4 * len(list(model.parameters()))
    assert trace.at_end["optimizer_state"] == counts
    assert streamed.layer_bytes == [LAYER_BYTES] * L


def test_a_dry_run_has_the_same_bytes():
    def measured():
        model = gpt()
        stream_layers(model, DiskStore())
        tokens, targets = torch.zeros(2, B, T, dtype=torch.int64)

        def step():
            model.zero_grad()
            model(tokens, targets).backward()

        step()
        return memlab.measure(step, model=model).peak_bytes

    real = measured()
    with memlab.dry_run():
        assert measured() == real


# ------------------------------------------------------------------ present and remove


def test_changes_inside_present_are_kept(store):
    model, other = gpt(), gpt()
    streamed = stream_layers(model, store)
    with torch.no_grad(), streamed.present():
        assert same(model.parameters(), other.parameters())
        model.blocks[2].mlp.up.weight.mul_(2)
        other.blocks[2].mlp.up.weight.mul_(2)
    forward_and_backward(model)
    forward_and_backward(other)
    assert same(gradients(model), gradients(other))


def test_weights_can_be_saved_and_loaded_inside_present(store):
    model, other = gpt(), gpt()
    with torch.no_grad():
        for weight in other.parameters():
            weight.add_(1)
    streamed = stream_layers(model, store)
    with streamed.present():
        model.load_state_dict(other.state_dict())
    with streamed.present():
        assert same(model.state_dict().values(), other.state_dict().values())


def test_remove_restores_the_model(store):
    model, other = gpt(), gpt()
    streamed = stream_layers(model, store)
    forward_and_backward(model)
    streamed.remove()
    assert store.keys() == []
    assert same(model.state_dict().values(), other.state_dict().values())
    for each in (model, other):
        optimizer = torch.optim.AdamW(each.parameters(), foreach=False)
        a_step(each, optimizer)
    assert same(model.parameters(), other.parameters())


def test_the_stream_is_freed_with_its_model():
    model = gpt()
    streamed = stream_layers(model, DiskStore())
    forward_and_backward(model)
    gone = weakref.ref(streamed)
    del model, streamed
    gc.collect()
    assert gone() is None


# ------------------------------------------------------------------ errors


def test_an_optimizer_that_would_step_offloaded_weights_is_refused(store):
    model = gpt()
    streamed = stream_layers(model, store)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    forward_and_backward(model)
    before = weights_of(streamed, model)
    with pytest.raises(
        RuntimeError, match=r"a step of an offloaded weight of shape .*; step in backward"
    ):
        optimizer.step()
    assert same(weights_of(streamed, model), before)
    with streamed.present():
        optimizer.step()
    assert not same(weights_of(streamed, model), before)


def test_an_offloaded_optimizer_without_weights_is_refused(store):
    model = gpt()
    stream_layers(model, store)
    optimizer = OffloadedOptimizer(torch.optim.AdamW(model.parameters()), DiskStore())
    forward_and_backward(model)
    with pytest.raises(RuntimeError, match="a step of an offloaded weight"):
        optimizer.step()


def test_saving_or_loading_offloaded_weights_is_refused(store):
    model = gpt()
    state = gpt().state_dict()
    stream_layers(model, store)
    for use in (model.state_dict, lambda: model.load_state_dict(state)):
        with pytest.raises(RuntimeError, match="save and load the model inside"):
            use()


def test_layers_must_be_given_if_they_cannot_be_found():
    with pytest.raises(ValueError, match=r"got a model with 0 nn.ModuleLists; pass its layers"):
        stream_layers(nn.Linear(2, 2), DiskStore())
    with pytest.raises(ValueError, match="got no layers to stream"):
        stream_layers(nn.Linear(2, 2), DiskStore(), [])


def test_weights_shared_between_layers_or_with_the_rest_are_refused():
    first, second = nn.Linear(3, 3), nn.Linear(3, 3)
    second.weight = first.weight
    model = nn.Sequential(first, second)
    with pytest.raises(ValueError, match="got two layers that share weight"):
        stream_layers(model, DiskStore(), list(model))
    with pytest.raises(ValueError, match=r"shares 1\.weight with the rest of the model"):
        stream_layers(model, DiskStore(), [first])


def test_a_damaged_layer_raises_an_error():
    model, store = gpt(), DiskStore()
    stream_layers(model, store)
    store.flush()
    for path in store.folder.glob("state.*"):
        content = bytearray(path.read_bytes())
        content[5] ^= 1
        path.write_bytes(content)
    with pytest.raises(StoreError, match="is damaged: its checksum is"):
        forward_and_backward(model)


@pytest.mark.gpu
@pytest.mark.parametrize("kind", [HostStore, DiskStore])
def test_weights_do_not_change_on_a_gpu(kind):
    with torch.device("cuda"):
        plain, ours = gpt(), gpt()
    ours.load_state_dict(plain.state_dict())
    streamed = stream_layers(ours, kind())
    adamw = partial(torch.optim.AdamW, foreach=False)
    optimizers = adamw(plain.parameters()), step_in_backward(adamw(ours.parameters()))
    batch = [x.cuda() for x in a_batch()]
    for _ in range(3):
        for model, optimizer in zip((plain, ours), optimizers, strict=True):
            optimizer.zero_grad()
            model(*batch).backward()
            optimizer.step()
    assert same(weights_of(streamed, ours), plain.parameters())


# ------------------------------------------------------------------ reading offloaded weights


def small():
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(8, 8) for _ in range(3)))


def streamed_small(kind=HostStore):
    model = small()
    return model, stream_layers(model, kind(), list(model))


def gradients_of_small(model):
    model.zero_grad()
    dtype = model.get_parameter("0.weight").dtype
    model(torch.linspace(-1, 1, 32, dtype=dtype).view(4, 8)).sum().backward()
    return gradients(model)


READS = {
    "clone": lambda model, weight: weight.clone(),
    "data": lambda model, weight: weight.data.clone(),
    "detach": lambda model, weight: weight.detach().clone(),
    "a view": lambda model, weight: weight.view(-1)[:3],
    "numpy": lambda model, weight: weight.detach().numpy(),
    "tolist": lambda model, weight: weight.tolist(),
    "is_nonzero": lambda model, weight: weight.is_nonzero(),
    "data_ptr": lambda model, weight: weight.data_ptr(),
    "an operator": lambda model, weight: torch.mm(weight, weight),
    "foreach": lambda model, weight: torch._foreach_norm([weight]),
    "setting data": lambda model, weight: setattr(weight, "data", torch.zeros(8, 8)),
    "init": lambda model, weight: nn.init.zeros_(weight),
    "to": lambda model, weight: model.to(torch.float64),
    "deepcopy": lambda model, weight: copy.deepcopy(model),
    "pickle": lambda model, weight: pickle.dumps(model),
    "saving": lambda model, weight: torch.save(weight, io.BytesIO()),
    "a layer's state": lambda model, weight: model[0].state_dict(),
    "loading a layer": lambda model, weight: model[0].load_state_dict(small()[0].state_dict()),
    "parameters_to_vector": lambda model, weight: nn.utils.parameters_to_vector(model.parameters()),
    "an average": lambda model, weight: torch.optim.swa_utils.AveragedModel(model),
}


@pytest.mark.parametrize("read", READS)
def test_reading_or_changing_an_offloaded_weight_raises_one_sentence(read):
    model, _ = streamed_small()
    with pytest.raises(RuntimeError, match=r"of a streamed weight, which is in its store; read"):
        READS[read](model, model[0].weight)
    assert same(gradients_of_small(model), gradients_of_small(small()))


def test_what_needs_no_values_works_with_offloaded_weights():
    model, _ = streamed_small()
    weight = model[0].weight
    assert repr(weight).endswith("Parameter(streamed, in its store, shape=(8, 8))")
    assert (weight.shape, weight.dtype, weight.numel()) == ((8, 8), torch.float32, 64)
    assert isinstance(weight, nn.Parameter)
    assert torch.zeros_like(weight).sum() == 0
    gradients_of_small(model)
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    model.requires_grad_(False)
    assert not weight.requires_grad
    assert weight.grad.shape == (8, 8)


def test_a_state_dict_cannot_be_read_after_present():
    model, streamed = streamed_small()
    with streamed.present():
        state = model.state_dict()
    for read in (lambda: torch.save(state, io.BytesIO()), lambda: state["1.bias"].sum()):
        with pytest.raises(RuntimeError, match="of a streamed weight, which is in its store"):
            read()
    with streamed.present():
        assert same(state.values(), small().state_dict().values())


@pytest.mark.parametrize(
    "view", [torch.detach, torch.t, lambda weight: weight.data.view(-1), lambda weight: weight[2:]]
)
def test_a_view_kept_from_present_keeps_its_values(view):
    model, streamed = streamed_small()
    with streamed.present():
        kept = view(model[0].weight)
    expected = view(small()[0].weight)
    assert torch.equal(kept, expected)
    gradients_of_small(model)
    assert torch.equal(kept, expected)
    assert [w.untyped_storage().nbytes() for w in model.parameters()] == [0] * 6
    with streamed.present():
        assert same(model.parameters(), small().parameters())


def test_a_graph_kept_from_present_has_the_values_of_its_forward_pass():
    x = torch.linspace(-1, 1, 32).view(4, 8).requires_grad_()
    model, streamed = streamed_small()
    with streamed.present():
        loss = model(x).square().sum()
    loss.backward()
    plain = torch.linspace(-1, 1, 32).view(4, 8).requires_grad_()
    small()(plain).square().sum().backward()
    assert torch.equal(x.grad, plain.grad)


def test_parameters_that_share_a_storage_are_all_unreadable():
    model = small()
    flat = torch.arange(72.0)
    model[0].weight.data, model[0].bias.data = flat[:64].view(8, 8), flat[64:]
    streamed = stream_layers(model, HostStore(), list(model))
    for weight in model[0].parameters():
        with pytest.raises(RuntimeError, match="of a streamed weight"):
            weight.sum()
    with streamed.present():
        assert model[0].bias.tolist() == flat[64:].tolist()
    assert flat[3] == 3  # other code still reads the storage


def test_a_model_can_be_converted_inside_present():
    model, streamed = streamed_small()
    with streamed.present():
        model.to(torch.float64)
    assert same(gradients_of_small(model), gradients_of_small(small().to(torch.float64)))
    assert streamed.layer_bytes == [8 * 72] * 3


def test_assigned_parameters_are_streamed_and_stay_readable_elsewhere():
    model, streamed = streamed_small()
    state = {name: value + 1 for name, value in small().state_dict().items()}
    with streamed.present():
        model.load_state_dict(state, assign=True)
    plain = small()
    plain.load_state_dict(state)
    assert same(gradients_of_small(model), gradients_of_small(plain))
    assert [w.untyped_storage().nbytes() for w in model.parameters()] == [0] * 6


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
@pytest.mark.parametrize("kind", [HostStore, DiskStore])
def test_a_copy_made_inside_present_is_a_plain_model(kind, copied):
    model, streamed = streamed_small(kind)
    with streamed.present():
        made = copied(model)
    for each in (made, model):
        assert same(gradients_of_small(each), gradients_of_small(small()))
    assert type(made[0].weight) is nn.Parameter
    assert same(made.state_dict().values(), small().state_dict().values())


def test_present_can_be_nested():
    model, streamed = streamed_small()
    with streamed.present():
        with streamed.present():
            pass
        assert torch.equal(model[0].weight, small()[0].weight)


def test_a_store_that_fails_leaves_the_model_as_it_was():
    class Full(HostStore):
        def _put(self, key, *rest):
            if key == "layers/1.bias":
                raise StoreError("full")
            super()._put(key, *rest)

    model = small()
    with pytest.raises(StoreError, match="full"):
        stream_layers(model, Full(), list(model))
    assert same(gradients_of_small(model), gradients_of_small(small()))
    assert same(model.state_dict().values(), small().state_dict().values())


@pytest.mark.few(1)
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")  # Dynamo's
@pytest.mark.parametrize("kind", [HostStore, DiskStore])
def test_a_compiled_model_can_be_streamed(kind):
    model, _ = streamed_small(kind)
    torch._dynamo.reset()
    compiled = torch.compile(model, backend="aot_eager")
    assert same(gradients_of_small(compiled._orig_mod), gradients_of_small(small()))
    compiled.zero_grad()
    compiled(torch.linspace(-1, 1, 32).view(4, 8)).sum().backward()
    assert same(gradients(model), gradients_of_small(small()))


def test_stores_refuse_tensors_on_the_meta_device(store):
    with torch.device("meta"):
        model = small()
    for use in (
        lambda: stream_layers(model, store, list(model)),
        lambda: OffloadedOptimizer(torch.optim.AdamW(model.parameters()), store, weights=True),
        lambda: store.put("key", torch.ones(3, device="meta")),
    ):
        with pytest.raises(ValueError, match="got a tensor on the meta device, which has no"):
            use()
    store.put("key", torch.ones(3))
    with pytest.raises(ValueError, match="got a tensor on the meta device"):
        store.get("key", device="meta")
