"""The offloaded optimizer: the weights of the run without it to the bit, two sub-groups of state on
the device, and as much traffic as the formulas say."""

from functools import partial

import pytest
import torch
from quick import quick
from torch import nn

import memlab
from memlab.offload import DiskStore, HostStore, OffloadedOptimizer, StoreError
from memlab.offload.sub_groups import Place, sub_groups
from memlab.optim import Adam8bit, AdamW, Lion
from memlab.precision import MasterWeights

STEPS = 10
CLIPPED_TO = 0.005
SUB_GROUP = 5000  # numbers; the largest weight has 4,800
OPTIMIZERS = {
    "AdamW, one by one": partial(torch.optim.AdamW, lr=0.01, foreach=False),
    "AdamW, all at once": partial(torch.optim.AdamW, lr=0.01, foreach=True),
    "AdamW, fused": partial(torch.optim.AdamW, lr=0.01, fused=True),
    "SGD with momentum": partial(torch.optim.SGD, lr=0.01, momentum=0.9),
    "SGD": partial(torch.optim.SGD, lr=0.01),
    "memlab's AdamW": partial(AdamW, lr=0.01),
    "Adam8bit": partial(Adam8bit, lr=0.01),
    "Lion": partial(Lion, lr=0.001),
}
PLACES = {
    "state": {},
    "state and gradients": {"gradients": True},
    "state and weights": {"weights": True},
    "all": {"gradients": True, "weights": True},
}
ADAMW = OPTIMIZERS["AdamW, one by one"]


def a_model(dtype=torch.float32):
    """Four matrices of 4,800 numbers, four biases; one weight that gets no gradient."""
    torch.manual_seed(0)
    layers = [nn.Linear(60, 80), nn.Linear(80, 60), nn.Linear(60, 80), nn.Linear(80, 60)]
    model = nn.Sequential(*(module for layer in layers for module in (layer, nn.Tanh())))
    model.unused = nn.Parameter(torch.ones(7))
    return model.to(dtype)


def two_groups(model):
    """With settings of their own."""
    weights = [p for p in model.parameters() if p.dim() == 2]
    others = [p for p in model.parameters() if p.dim() == 1]
    return [{"params": weights}, {"params": others, "weight_decay": 0.0, "lr": 0.02}]


def loss_of(model, seed):
    torch.manual_seed(seed)
    dtype = next(model.parameters()).dtype
    return model(torch.randn(5, 60).to(dtype)).square().mean()


def trained(model, optimizer, clip, *, steps=STEPS, micro_batches=2, scheduler=None):
    """The norms that were clipped, with a schedule that changes the rate in every step."""
    schedule = scheduler or torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    norms = []
    for step in range(steps):
        optimizer.zero_grad()
        for part in range(micro_batches):
            (loss_of(model, 10 * step + part) / micro_batches).backward()
        norms.append(clip())
        optimizer.step()
        schedule.step()
    return norms


def clipped(optimizer):
    """In the order of the groups: a norm of many numbers depends on their order in its last bit."""
    weights = [weight for group in optimizer.param_groups for weight in group["params"]]
    return partial(nn.utils.clip_grad_norm_, weights, CLIPPED_TO)


def same(some, others):
    return all(map(torch.equal, some, others))


def most(trace, category):
    """The most bytes of the category that are alive at once."""
    alive = peak = 0
    for event in trace.events:
        alive += event.bytes * (event.category == category)
        peak = max(peak, alive)
    return peak


# ------------------------------------------------------------------ the plan


def test_a_sub_group_is_a_run_of_one_group_and_no_larger_than_asked_unless_one_weight_is():
    runs = sub_groups([[3, 3, 9, 1], [2, 2]], 6)
    assert [[place.number for place in run] for run in runs] == [[0, 1], [2], [3], [4, 5]]
    assert runs[3] == [Place(1, 0, 4), Place(1, 1, 5)]
    assert sub_groups([[], [1]], 6) == [[Place(1, 0, 0)]]


# ------------------------------------------------------------------ values


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("name", quick(list(OPTIMIZERS)[::3], OPTIMIZERS))
def test_clipped_accumulated_and_scheduled_its_weights_are_those_without_it(name, place):
    plain, ours = a_model(), a_model()
    made = OPTIMIZERS[name]
    inner = made(two_groups(ours))
    optimizer = OffloadedOptimizer(inner, DiskStore(), sub_group=SUB_GROUP, **PLACES[place])
    unwrapped = made(two_groups(plain))
    norms = trained(plain, unwrapped, clipped(unwrapped))
    assert same(norms, trained(ours, optimizer, partial(optimizer.clip_grad_norm_, CLIPPED_TO)))
    assert min(norms) > CLIPPED_TO  # every step was clipped
    assert same(plain.parameters(), ours.parameters())


def test_clipped_twice_it_is_scaled_by_both():
    plain, ours = a_model(), a_model()
    optimizer = OffloadedOptimizer(ADAMW(ours.parameters()), DiskStore(), gradients=True)
    unwrapped = ADAMW(plain.parameters())
    loss_of(plain, 0).backward()
    loss_of(ours, 0).backward()
    for bound in (CLIPPED_TO, CLIPPED_TO / 2):
        norms = [
            clip_to(bound)
            for clip_to in (
                partial(nn.utils.clip_grad_norm_, plain.parameters()),
                optimizer.clip_grad_norm_,
            )
        ]
        torch.testing.assert_close(*norms)
    unwrapped.step()
    optimizer.step()
    torch.testing.assert_close(list(plain.parameters()), list(ours.parameters()))


@pytest.mark.parametrize("store", [DiskStore, HostStore])
@pytest.mark.parametrize("on", ["device", "host"])
@pytest.mark.parametrize("gradients", [False, True])
def test_a_bfloat16_model_is_stepped_by_float32_weights_as_master_weights_do(store, on, gradients):
    plain, ours = a_model(torch.bfloat16), a_model(torch.bfloat16)
    master = MasterWeights(plain.parameters(), ADAMW, gather_at_once=False)
    optimizer = OffloadedOptimizer(ADAMW(ours.parameters()), store(), sub_group=SUB_GROUP,
                                   weights=True, gradients=gradients, on=on)  # fmt: skip
    for step in range(5):
        master.zero_grad()
        optimizer.zero_grad()
        loss_of(plain, step).backward()
        loss_of(ours, step).backward()
        master.step()
        optimizer.step()
    assert same(plain.parameters(), ours.parameters())
    masters = optimizer.state_dict()["masters"]
    assert same(masters, master.weights)


def test_a_closure_is_called_once_with_a_graph():
    plain, ours = a_model(), a_model()
    unwrapped = ADAMW(plain.parameters())
    optimizer = OffloadedOptimizer(ADAMW(ours.parameters()), DiskStore(), sub_group=SUB_GROUP)
    losses = []
    for model, each in ((plain, unwrapped), (ours, optimizer)):

        def closure(model=model):
            loss = loss_of(model, 0)
            loss.backward()
            return loss

        losses.append(each.step(closure))
    assert torch.equal(*losses)
    assert same(plain.parameters(), ours.parameters())


def test_torch_s_gradient_scaler_takes_it_for_an_optimizer():
    ours = a_model()
    optimizer = OffloadedOptimizer(ADAMW(ours.parameters()), DiskStore(), sub_group=SUB_GROUP)
    scaler = torch.amp.GradScaler("cpu")
    before = [p.detach().clone() for p in ours.parameters()]
    scaler.scale(loss_of(ours, 0) * float("inf")).backward()
    scaler.step(optimizer)
    assert optimizer.steps == 0
    assert same(before, ours.parameters())


# ------------------------------------------------------------------ states


@pytest.mark.parametrize("name", ["AdamW, all at once", "SGD with momentum", "Adam8bit"])
@pytest.mark.parametrize("place", quick(["all"], ["state", "all"]))
def test_its_state_dict_is_the_optimizer_s_own_and_is_taken_by_both(name, place):
    """Five steps with, five without; and the other way round."""
    made = OPTIMIZERS[name]

    def offloaded(model):
        inner = made(model.parameters())
        return OffloadedOptimizer(inner, DiskStore(), sub_group=SUB_GROUP, **PLACES[place])

    def plain(model):
        return made(model.parameters())

    right = a_model()
    trained(right, plain(right), lambda: None)
    for first, second in ((offloaded, plain), (plain, offloaded), (offloaded, offloaded)):
        model = a_model()
        optimizer = first(model)
        schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
        trained(model, optimizer, lambda: None, steps=5, scheduler=schedule)
        state = optimizer.state_dict()
        state = {name: state[name] for name in ("state", "param_groups")}
        if first is offloaded:
            optimizer.remove()
        following = second(model)
        following.load_state_dict(state)
        continued = torch.optim.lr_scheduler.ExponentialLR(following, 0.9, last_epoch=5)
        for group, rate in zip(following.param_groups, schedule.get_last_lr(), strict=True):
            group["lr"] = rate
        for step in range(5, STEPS):
            following.zero_grad()
            for part in range(2):
                (loss_of(model, 10 * step + part) / 2).backward()
            following.step()
            continued.step()
        assert same(right.parameters(), model.parameters())


def test_the_state_of_other_groups_is_refused():
    ours = a_model()
    optimizer = OffloadedOptimizer(ADAMW(ours.parameters()), DiskStore())
    other = ADAMW(list(ours.parameters())[:2])
    with pytest.raises(ValueError, match=r"got a state of groups of \[2\] weights for groups of "):
        optimizer.load_state_dict(other.state_dict())


# ------------------------------------------------------------------ bytes

MATRIX = 60 * 80
GROUP_BYTES = 2 * 4 * MATRIX  # both moments of one


def offloaded_step(**settings):
    """A training whose sub-groups are four matrices of one size, and its next step."""
    torch.manual_seed(0)
    matrices = [nn.Parameter(torch.randn(60, 80)) for _ in range(4)]
    store = DiskStore()
    optimizer = OffloadedOptimizer(ADAMW(matrices), store, sub_group=MATRIX, **settings)

    def step():
        optimizer.zero_grad()
        sum((matrix * matrix).sum() for matrix in matrices).backward()
        optimizer.step()

    step()
    store.traffic.reset()
    return store, optimizer, step


COUNTS = 4 * 4  # of steps: a float32 for each weight


def test_two_sub_groups_of_state_are_on_the_device_at_most_and_none_between_steps():
    _, optimizer, step = offloaded_step()
    trace = memlab.measure(step, optimizer=optimizer)
    assert most(trace, "optimizer_state") == 2 * GROUP_BYTES + COUNTS
    assert trace.at_end["optimizer_state"] == COUNTS
    assert optimizer.state == {}


def test_the_first_step_makes_one_sub_group_s_state_at_a_time():
    torch.manual_seed(0)
    matrices = [nn.Parameter(torch.randn(60, 80)) for _ in range(4)]
    optimizer = OffloadedOptimizer(ADAMW(matrices), DiskStore(), sub_group=MATRIX)
    sum((matrix * matrix).sum() for matrix in matrices).backward()
    trace = memlab.measure(optimizer.step, optimizer=optimizer)
    assert most(trace, "optimizer_state") == GROUP_BYTES + COUNTS


def test_with_weights_two_sub_groups_of_weights_and_state_are_there_beside_the_model_s():
    """By an optimizer that makes nothing on the way."""
    torch.manual_seed(0)
    matrices = [nn.Parameter(torch.randn(60, 80)) for _ in range(4)]
    inner = torch.optim.SGD(matrices, lr=0.1, momentum=0.9, foreach=False)
    optimizer = OffloadedOptimizer(inner, DiskStore(), sub_group=MATRIX, weights=True)
    for _ in range(2):
        sum((matrix * matrix).sum() for matrix in matrices).backward()
        trace = memlab.measure(optimizer.step, optimizer=optimizer)
    weights_and_gradients = (4 + 4) * 4 * MATRIX
    assert trace.peak_bytes == weights_and_gradients + 2 * (4 + 4) * MATRIX
    assert trace.live_bytes == weights_and_gradients


def test_with_gradients_two_are_on_the_device_at_most():
    _, optimizer, step = offloaded_step(gradients=True)
    trace = memlab.measure(step, optimizer=optimizer)
    assert "gradients" not in trace.at_end
    assert most(trace, "gradients") <= 2 * 4 * MATRIX


@pytest.mark.parametrize(
    ("settings", "bytes_a_weight"),
    [({}, 8), ({"weights": True}, 12), ({"gradients": True}, 8 + 4),
     ({"weights": True, "gradients": True}, 12 + 4)],
)  # fmt: skip
def test_the_disk_s_traffic_is_that_of_the_formulas(settings, bytes_a_weight):
    """8Ψ each way for two moments, 12Ψ with the weights, and 4Ψ for gradients in float32."""
    store, _, step = offloaded_step(**settings)
    step()
    moved = bytes_a_weight * 4 * MATRIX
    assert (store.traffic.written, store.traffic.read) == (moved, moved)
    # All but what the first sub-group's step wants at once is asked for a sub-group ahead.
    assert store.traffic.prefetched == moved


def test_a_tensor_that_several_weights_states_share_is_moved_once_and_comes_back_shared():
    """Adam8bit's two codes of 256 numbers."""
    weights = [nn.Parameter(torch.ones(64, 64)) for _ in range(3)]
    optimizer = OffloadedOptimizer(Adam8bit(weights), store := DiskStore())
    for _ in range(2):
        store.traffic.reset()
        sum(weight.sum() for weight in weights).backward()
        optimizer.step()
    record = store.get("optimizer/0")
    assert len({tensor.data_ptr() for tensor in record}) == len(record)
    assert store.traffic.written == store.nbytes == sum(tensor.nbytes for tensor in record)
    [sub_group] = optimizer._sub_groups
    shared = [index for _, _, index in sub_group.layout]
    assert len(set(shared)) == len(record) < len(shared)


@pytest.mark.parametrize("gradients", [False, True])
def test_stepped_on_the_host_2_bytes_of_gradient_go_down_and_2_of_weight_up(gradients):
    """ZeRO-Offload's 4Ψ."""
    torch.manual_seed(0)
    weights = [nn.Parameter(torch.randn(60, 80, dtype=torch.bfloat16)) for _ in range(3)]
    store = HostStore()
    optimizer = OffloadedOptimizer(ADAMW(weights), store, weights=True, gradients=gradients,
                                   on="host", sub_group=MATRIX)  # fmt: skip
    for _ in range(2):
        store.traffic.reset()
        optimizer.zero_grad()
        sum(weight.square().sum() for weight in weights).backward()
        optimizer.step()
        moved = 2 * 3 * MATRIX
        assert (store.traffic.written, store.traffic.read) == (moved, moved)


def test_accumulated_on_the_host_a_gradient_only_goes_down():
    weight = nn.Parameter(torch.ones(60, 80, dtype=torch.bfloat16))
    store = HostStore()
    OffloadedOptimizer(ADAMW([weight]), store, weights=True, gradients=True, on="host")
    store.traffic.reset()
    for _ in range(3):
        weight.sum().backward()
        assert weight.grad is None
    assert (store.traffic.written, store.traffic.read) == (3 * 2 * MATRIX, 0)
    assert torch.equal(store.lend("gradient/0")[0], torch.full((60, 80), 3.0, dtype=torch.bfloat16))


def test_gradients_that_were_made_by_hand_are_taken_too():
    plain, ours = a_model(), a_model()
    optimizer = OffloadedOptimizer(ADAMW(ours.parameters()), DiskStore(), gradients=True)
    unwrapped = ADAMW(plain.parameters())
    for model, each in ((plain, unwrapped), (ours, optimizer)):
        for weight in model.parameters():
            weight.grad = torch.ones_like(weight)
        each.step()
    assert same(plain.parameters(), ours.parameters())
    assert all(weight.grad is None for weight in ours.parameters())


def test_gradients_that_are_dropped_are_dropped_in_the_store():
    model = a_model()
    store = DiskStore()
    optimizer = OffloadedOptimizer(ADAMW(model.parameters()), store, gradients=True)
    loss_of(model, 0).backward()
    assert sum(key.startswith("gradient/") for key in list(store.keys())) == 8
    before = [p.detach().clone() for p in model.parameters()]
    optimizer.zero_grad()
    optimizer.step()
    assert store.keys() == []
    assert same(before, model.parameters())


def test_a_dry_run_has_the_bytes_of_the_real_step_and_leaves_the_real_one_alone():
    _, optimizer, step = offloaded_step()
    real = memlab.measure(step, optimizer=optimizer)
    steps, state = optimizer.steps, optimizer.state_dict()
    with memlab.dry_run():
        dry = memlab.measure(step, optimizer=optimizer)
    assert dry.peak_bytes == real.peak_bytes
    assert optimizer.steps == steps
    after = optimizer.state_dict()
    assert all(torch.equal(state["state"][n]["exp_avg"], after["state"][n]["exp_avg"])
               for n in range(4))  # fmt: skip
    step()


# ------------------------------------------------------------------ what is refused


class SomethingInTheState(torch.optim.SGD):
    def step(self, closure=None):
        for group in self.param_groups:
            for weight in group["params"]:
                self.state[weight]["history"] = [weight.detach().clone()]


class ChangesItsGroup(torch.optim.SGD):
    def step(self, closure=None):
        self.param_groups[0]["lr"] = self.param_groups[0]["lr"] / 2


@pytest.mark.parametrize(
    ("made", "settings", "error", "words"),
    [
        (ADAMW, {"sub_group": 0}, ValueError, "got sub-groups of 0 numbers; give at least 1"),
        (ADAMW, {"commit_every": 0}, ValueError, "got commit_every=0; give at least 1"),
        (ADAMW, {"on": "moon"}, ValueError, "got on='moon'; give 'device' or 'host'"),
        (ADAMW, {"on": "host"}, ValueError, "a step on the host needs weights there"),
        (torch.optim.LBFGS, {}, TypeError, "got LBFGS, whose step needs a closure"),
        (partial(MasterWeights, optimizer=ADAMW), {}, TypeError, "is no torch.optim.Optimizer"),
    ],
)
def test_what_cannot_be_offloaded_is_refused(made, settings, error, words):
    with pytest.raises(error, match=words):
        OffloadedOptimizer(made(a_model().parameters()), DiskStore(), **settings)


@pytest.mark.parametrize(
    ("made", "words"),
    [(SomethingInTheState, "'history' of list; tensors and numbers can be stored"),
     (ChangesItsGroup, "whose step changes its group's lr, once for all of its weights")],
)  # fmt: skip
def test_an_optimizer_that_does_not_step_weight_by_weight_is_refused_at_its_step(made, words):
    model = a_model()
    optimizer = OffloadedOptimizer(made(model.parameters(), lr=0.1), DiskStore())
    loss_of(model, 0).backward()
    with pytest.raises(TypeError, match=words):
        optimizer.step()
    with pytest.raises(StoreError, match=r"a step broke off \(TypeError\)"):
        optimizer.step()


def test_an_optimizer_that_has_stepped_is_refused_and_so_is_another_group():
    model = a_model()
    inner = ADAMW(model.parameters())
    loss_of(model, 0).backward()
    inner.step()
    with pytest.raises(ValueError, match="got AdamW that has stepped already"):
        OffloadedOptimizer(inner, DiskStore())
    optimizer = OffloadedOptimizer(ADAMW(model.parameters()), DiskStore())
    with pytest.raises(ValueError, match="takes no more groups"):
        optimizer.add_param_group({"params": [nn.Parameter(torch.ones(1))]})


def test_resumed_without_a_commit_it_begins_and_after_steps_it_refuses():
    model = a_model()
    optimizer = OffloadedOptimizer(ADAMW(model.parameters()), HostStore())
    assert optimizer.resume() == 0
    loss_of(model, 0).backward()
    optimizer.step()
    with pytest.raises(ValueError, match="there is no commit to go back to"):
        optimizer.resume()
