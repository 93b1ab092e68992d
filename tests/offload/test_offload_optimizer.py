"""The offloaded optimizer: weights do not change, and memory and traffic equal the formulas."""

from functools import partial

import pytest
import torch
from close import assert_close
from quick import quick
from torch import nn

import memlab
from memlab.offload import DiskStore, HostStore, OffloadedOptimizer, StoreError
from memlab.offload.sub_groups import WeightIndex, sub_groups
from memlab.optim import Adam8bit, AdamW, Lion
from memlab.precision import MasterWeights

STEPS = 10
CLIPPED_TO = 0.005
SUB_GROUP = 5000  # elements; the largest weight has 4,800
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
    """Four matrices of 4,800 elements, four biases, and one weight without a gradient."""
    torch.manual_seed(0)
    layers = [nn.Linear(60, 80), nn.Linear(80, 60), nn.Linear(60, 80), nn.Linear(80, 60)]
    model = nn.Sequential(*(module for layer in layers for module in (layer, nn.Tanh())))
    model.unused = nn.Parameter(torch.ones(7))
    return model.to(dtype)


def two_groups(model):
    """Return two groups with different settings."""
    weights = [p for p in model.parameters() if p.dim() == 2]
    others = [p for p in model.parameters() if p.dim() == 1]
    return [{"params": weights}, {"params": others, "weight_decay": 0.0, "lr": 0.02}]


def loss_of(model, seed):
    torch.manual_seed(seed)
    dtype = next(model.parameters()).dtype
    return model(torch.randn(5, 60).to(dtype)).square().mean()


def trained(model, optimizer, clip, *, steps=STEPS, micro_batches=2, scheduler=None):
    """Train with a learning rate that changes in every step; return the norms."""
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
    """Clip in the order of the groups, because the last bit of a norm depends on the order."""
    weights = [weight for group in optimizer.param_groups for weight in group["params"]]
    return partial(nn.utils.clip_grad_norm_, weights, CLIPPED_TO)


def same(some, others):
    return all(map(torch.equal, some, others))


def most(trace, category):
    """Return the peak bytes of one category."""
    alive = peak = 0
    for event in trace.events:
        alive += event.bytes * (event.category == category)
        peak = max(peak, alive)
    return peak


# ------------------------------------------------------------------ sub-groups


def test_a_sub_group_is_within_one_group_and_within_the_limit_unless_one_weight_is_larger():
    runs = sub_groups([[3, 3, 9, 1], [2, 2]], 6)
    assert [[place.number for place in run] for run in runs] == [[0, 1], [2], [3], [4, 5]]
    assert runs[3] == [WeightIndex(1, 0, 4), WeightIndex(1, 1, 5)]
    assert sub_groups([[], [1]], 6) == [[WeightIndex(1, 0, 0)]]


# ------------------------------------------------------------------ values


@pytest.mark.few(2)
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("name", quick(list(OPTIMIZERS)[::3], OPTIMIZERS))
def test_weights_do_not_change_with_clipping_accumulation_and_schedules(name, place):
    plain, ours = a_model(), a_model()
    made = OPTIMIZERS[name]
    inner = made(two_groups(ours))
    optimizer = OffloadedOptimizer(inner, DiskStore(), sub_group=SUB_GROUP, **PLACES[place])
    unwrapped = made(two_groups(plain))
    norms = trained(plain, unwrapped, clipped(unwrapped))
    assert same(norms, trained(ours, optimizer, partial(optimizer.clip_grad_norm_, CLIPPED_TO)))
    assert min(norms) > CLIPPED_TO  # every step was clipped
    assert same(plain.parameters(), ours.parameters())


def test_clipping_twice_applies_both_factors():
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
        assert_close(*norms)
    unwrapped.step()
    optimizer.step()
    assert_close(list(plain.parameters()), list(ours.parameters()))


@pytest.mark.parametrize("store", [DiskStore, HostStore])
@pytest.mark.parametrize("on", ["device", "host"])
@pytest.mark.parametrize("gradients", [False, True])
def test_a_bfloat16_model_is_stepped_like_with_master_weights(store, on, gradients):
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


def test_a_closure_is_called_once_with_grad_enabled():
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


def test_torchs_gradient_scaler_accepts_it():
    ours = a_model()
    optimizer = OffloadedOptimizer(ADAMW(ours.parameters()), DiskStore(), sub_group=SUB_GROUP)
    scaler = torch.amp.GradScaler("cpu")
    before = [p.detach().clone() for p in ours.parameters()]
    scaler.scale(loss_of(ours, 0) * float("inf")).backward()
    scaler.step(optimizer)
    assert optimizer.steps == 0
    assert same(before, ours.parameters())


# ------------------------------------------------------------------ states


@pytest.mark.few(1)
@pytest.mark.parametrize("name", ["AdamW, all at once", "SGD with momentum", "Adam8bit"])
@pytest.mark.parametrize("place", quick(["all"], ["state", "all"]))
def test_state_dicts_are_interchangeable_with_the_inner_optimizer(name, place):
    """Five steps with offloading and five without, and the reverse."""
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


def test_a_state_of_other_groups_is_refused():
    ours = a_model()
    optimizer = OffloadedOptimizer(ADAMW(ours.parameters()), DiskStore())
    other = ADAMW(list(ours.parameters())[:2])
    with pytest.raises(ValueError, match=r"got a state of groups of \[2\] weights for groups of "):
        optimizer.load_state_dict(other.state_dict())


# ------------------------------------------------------------------ bytes

MATRIX = 60 * 80
GROUP_BYTES = 2 * 4 * MATRIX  # both moments of one matrix


def offloaded_step(**settings):
    """Return a training whose sub-groups are four matrices of one size, after its first step."""
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


COUNTS = 4 * 4  # step counters: one float32 for each weight


def test_at_most_two_sub_groups_of_state_are_on_the_device_and_none_between_steps():
    _, optimizer, step = offloaded_step()
    trace = memlab.measure(step, optimizer=optimizer)
    assert most(trace, "optimizer_state") == 2 * GROUP_BYTES + COUNTS
    assert trace.at_end["optimizer_state"] == COUNTS
    assert optimizer.state == {}


def test_the_first_step_creates_the_state_of_one_sub_group_at_a_time():
    torch.manual_seed(0)
    matrices = [nn.Parameter(torch.randn(60, 80)) for _ in range(4)]
    optimizer = OffloadedOptimizer(ADAMW(matrices), DiskStore(), sub_group=MATRIX)
    sum((matrix * matrix).sum() for matrix in matrices).backward()
    trace = memlab.measure(optimizer.step, optimizer=optimizer)
    assert most(trace, "optimizer_state") == GROUP_BYTES + COUNTS


def test_with_weights_two_sub_groups_of_weights_and_state_are_on_the_device():
    """Use an optimizer without temporaries."""
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


def test_with_gradients_at_most_two_are_on_the_device():
    _, optimizer, step = offloaded_step(gradients=True)
    trace = memlab.measure(step, optimizer=optimizer)
    assert "gradients" not in trace.at_end
    assert most(trace, "gradients") <= 2 * 4 * MATRIX


@pytest.mark.parametrize(
    ("settings", "bytes_a_weight"),
    [({}, 8), ({"weights": True}, 12), ({"gradients": True}, 8 + 4),
     ({"weights": True, "gradients": True}, 12 + 4)],
)  # fmt: skip
def test_the_traffic_of_a_disk_store_equals_the_formulas(settings, bytes_a_weight):
    """8Ψ bytes each way for two moments, 12Ψ with the weights, 4Ψ more for float32 gradients."""
    store, _, step = offloaded_step(**settings)
    step()
    moved = bytes_a_weight * 4 * MATRIX
    assert (store.traffic.written, store.traffic.read) == (moved, moved)
    # The first sub-group is prefetched too, just before its step.
    assert store.traffic.prefetched == moved


def test_a_tensor_shared_by_several_states_moves_once_and_stays_shared():
    """Adam8bit has two codebooks of 256 elements."""
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
def test_a_step_on_the_host_moves_2_bytes_of_gradient_down_and_2_of_weight_up(gradients):
    """ZeRO-Offload moves 4Ψ bytes."""
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


def test_gradients_accumulated_on_the_host_only_move_down():
    weight = nn.Parameter(torch.ones(60, 80, dtype=torch.bfloat16))
    store = HostStore()
    OffloadedOptimizer(ADAMW([weight]), store, weights=True, gradients=True, on="host")
    store.traffic.reset()
    for _ in range(3):
        weight.sum().backward()
        assert weight.grad is None
    assert (store.traffic.written, store.traffic.read) == (3 * 2 * MATRIX, 0)
    assert torch.equal(store.lend("gradient/0")[0], torch.full((60, 80), 3.0, dtype=torch.bfloat16))


def test_gradients_set_by_hand_are_used():
    plain, ours = a_model(), a_model()
    optimizer = OffloadedOptimizer(ADAMW(ours.parameters()), DiskStore(), gradients=True)
    unwrapped = ADAMW(plain.parameters())
    for model, each in ((plain, unwrapped), (ours, optimizer)):
        for weight in model.parameters():
            weight.grad = torch.ones_like(weight)
        each.step()
    assert same(plain.parameters(), ours.parameters())
    assert all(weight.grad is None for weight in ours.parameters())


def test_zero_grad_drops_gradients_in_the_store():
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


def test_a_dry_run_has_the_same_bytes_and_does_not_change_the_real_state():
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


# ------------------------------------------------------------------ errors


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
        (ADAMW, {"sub_group": 0}, ValueError, "got sub-groups of 0 elements; pass at least 1"),
        (ADAMW, {"commit_every": 0}, ValueError, "got commit_every=0; pass at least 1"),
        (ADAMW, {"on": "moon"}, ValueError, "got on='moon'; pass 'device' or 'host'"),
        (ADAMW, {"on": "host"}, ValueError, "a step on the host needs weights there"),
        (torch.optim.LBFGS, {}, TypeError, "got LBFGS, whose step needs a closure"),
        (partial(MasterWeights, optimizer=ADAMW), {}, TypeError, "is not a torch.optim.Optimizer"),
    ],
)
def test_invalid_optimizers_and_settings_are_refused(made, settings, error, words):
    with pytest.raises(error, match=words):
        OffloadedOptimizer(made(a_model().parameters()), DiskStore(), **settings)


@pytest.mark.parametrize(
    ("made", "words"),
    [(SomethingInTheState, "'history' of list; only tensors and numbers can be stored"),
     (ChangesItsGroup, "whose step changes its group's lr for all weights at once")],
)  # fmt: skip
def test_an_optimizer_that_does_not_step_weights_separately_is_refused_in_its_step(made, words):
    model = a_model()
    optimizer = OffloadedOptimizer(made(model.parameters(), lr=0.1), DiskStore())
    loss_of(model, 0).backward()
    with pytest.raises(TypeError, match=words):
        optimizer.step()
    with pytest.raises(StoreError, match=r"a step failed \(TypeError\)"):
        optimizer.step()


def test_an_optimizer_that_has_stepped_and_new_groups_are_refused():
    model = a_model()
    inner = ADAMW(model.parameters())
    loss_of(model, 0).backward()
    inner.step()
    with pytest.raises(ValueError, match="got AdamW that has stepped already"):
        OffloadedOptimizer(inner, DiskStore())
    optimizer = OffloadedOptimizer(ADAMW(model.parameters()), DiskStore())
    with pytest.raises(ValueError, match="cannot add groups"):
        optimizer.add_param_group({"params": [nn.Parameter(torch.ones(1))]})


def test_resume_without_a_commit_starts_at_0_and_is_refused_after_steps():
    model = a_model()
    optimizer = OffloadedOptimizer(ADAMW(model.parameters()), HostStore())
    assert optimizer.resume() == 0
    loss_of(model, 0).backward()
    optimizer.step()
    with pytest.raises(ValueError, match="there is no commit to return to"):
        optimizer.resume()
