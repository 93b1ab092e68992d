"""APOLLO: the authors' steps, the paper's equations in float64, and its bytes."""

from itertools import pairwise

import pytest
import torch
from close import assert_close
from matrix_steps import SHAPES, parameter, run, seeded

import memlab
from memlab.model import GPT, PRESETS
from memlab.optim import Apollo, apollo, matrix_groups
from memlab.optim.apollo import MINI, random_projector
from memlab.train import Setting
from memlab.train.plugs import Plugs
from memlab.train.step import predicted_trace

KINDS = {"channel": {"rank": 8}, "mini": MINI}
each_kind = pytest.mark.parametrize("kind", KINDS)
each_shape = pytest.mark.parametrize("shape", SHAPES)


# ------------------------------------------------------------------ values


@each_shape
@each_kind
def test_steps_are_those_of_apollo_torch(shape, kind, monkeypatch):
    """With the projection that the authors' optimizer has drawn."""
    package = pytest.importorskip("apollo_torch")
    weight, own = parameter(*shape), KINDS[kind]
    group = {
        "params": [weight],
        "rank": own["rank"],
        "update_proj_gap": 3,
        "scale": own.get("scale", 1.0) ** 2,  # the authors take its root
        "scale_type": own.get("scale_by", "channel"),
        "proj": "random",
        "proj_type": "std",
    }
    theirs = package.APOLLOAdamW([group], lr=0.1, eps=1e-15, scale_front=True)
    ours = Apollo([parameter(*shape)], lr=0.1, gap=3, eps=1e-15, weight_decay=0, **own)

    def theirs_projector(*_):
        drawn = theirs.state[weight]["projector"].ortho_matrix
        return drawn if shape[0] < shape[1] else drawn.T

    monkeypatch.setattr(apollo, "random_projector", theirs_projector)
    for step in range(7):
        for optimizer in (theirs, ours):
            ((each,),) = (group["params"] for group in optimizer.param_groups)
            each.grad = (1 + step) * seeded(*shape, seed=step)
            optimizer.step()
    ((mine,),) = (group["params"] for group in ours.param_groups)
    assert_close(mine, weight)


@each_shape
@each_kind
def test_steps_are_the_papers_equations_in_float64(shape, kind):
    lr, (beta1, beta2), eps, own = 0.1, (0.8, 0.9), 1e-3, KINDS[kind]
    weight = parameter(*shape, dtype=torch.float64)
    settings = {"lr": lr, "betas": (beta1, beta2), "eps": eps, "gap": 2, **own}
    optimizer = Apollo([weight], weight_decay=0.3, seed=5, **settings)
    (group,) = optimizer.param_groups
    wanted, m, v, last, reached = weight.detach().clone(), 0.0, 0.0, None, False
    for t in range(1, 7):
        weight.grad = t**2 * seeded(*shape, seed=t).double()  # its norm grows by more than 1 %
        optimizer.step()
        G = weight.grad if shape[0] < shape[1] else weight.grad.T
        R = random_projector(weight, t, group).double().T @ G
        m, v = beta1 * m + (1 - beta1) * R, beta2 * v + (1 - beta2) * R**2
        N = m / (1 - beta1**t) / ((v / (1 - beta2**t)).sqrt() + eps)
        s = N.norm(dim=0) / R.norm(dim=0) if kind == "channel" else N.norm() / R.norm()
        bias = (1 - beta2**t) ** 0.5 / (1 - beta1**t)
        norm = (G * s).norm() / bias
        limited = norm if last is None else min(norm, 1.01 * last)
        reached |= bool(limited < norm)
        update, last = group["scale"] * G * s * limited / norm, limited
        wanted = wanted * (1 - lr * 0.3) - lr * (update if shape[0] < shape[1] else update.T)
        assert_close(weight.detach(), wanted, dtype=torch.float32, terms=1)
    assert reached


def test_the_projection_is_the_same_for_gap_steps_and_keeps_norms_on_average():
    weight = parameter(200, 500)
    group = {"rank": 50, "gap": 4, "seed": 1}
    drawn = [random_projector(weight, step, group) for step in range(1, 10)]
    same = [torch.equal(one, other) for one, other in pairwise(drawn)]
    assert same == [True, True, True, False] * 2
    ratios = (drawn[0].T @ weight).norm(dim=0) / weight.norm(dim=0)
    assert ratios.mean().item() == pytest.approx(1, abs=0.03)


@each_kind
def test_the_order_in_which_weights_are_stepped_does_not_matter(kind):
    shapes = [(40, 90), (90, 40), (40, 40)]
    together = run(Apollo([parameter(*shape) for shape in shapes], **KINDS[kind]), 1)
    alone = []
    for place, shape in reversed(list(enumerate(shapes))):
        weight = parameter(*shape)
        weight.grad = seeded(*shape, seed=place)
        Apollo([weight], **KINDS[kind]).step()
        alone.insert(0, weight.detach())
    assert all(map(torch.equal, together, alone))


@each_kind
def test_a_gradient_of_zeros_neither_moves_a_matrix_nor_stops_it_for_good(kind):
    weight = parameter(40, 50)
    optimizer, before = Apollo([weight], weight_decay=0, **KINDS[kind]), weight.detach().clone()
    weight.grad = torch.zeros(40, 50)
    optimizer.step()
    assert torch.equal(weight, before)
    weight.grad = seeded(40, 50)
    optimizer.step()
    assert (weight - before).abs().max() > 1e-4


@each_shape
@each_kind
def test_the_chunk_size_does_not_change_the_result(shape, kind):
    whole, rows = (Apollo([parameter(*shape)], chunk=c, **KINDS[kind]) for c in (None, 100))
    assert_close(run(whole)[0], run(rows)[0])


def test_bfloat16_weights_and_state_follow_float32():
    brain = {"moment_dtype": torch.bfloat16, "rounding": "stochastic"}
    exact = run(Apollo([parameter(40, 60)], rank=8), 4)[0]
    torch.manual_seed(0)
    rounded = run(Apollo([parameter(40, 60, dtype=torch.bfloat16)], rank=8, **brain), 4)[0]
    assert (exact - rounded).abs().mean() < 2**-8


# ------------------------------------------------------------------ bytes


@each_shape
@pytest.mark.parametrize("rank", [1, 7])
def test_state_is_two_moments_of_the_projection_and_a_norm(shape, rank):
    optimizer = Apollo([parameter(*shape)], rank=rank)
    run(optimizer, 1)
    trace = memlab.measure(lambda: None, optimizer=optimizer)
    assert trace.at_end["optimizer_state"] == 8 * max(shape) * rank + 4


def test_the_mini_state_of_a_model_is_almost_only_its_ends():
    model = GPT(PRESETS["tiny"])
    optimizer = Apollo(matrix_groups(model), **MINI)
    run(optimizer, 1)
    matrices = [w for _, w in matrix_groups(model)[0]["params"]]
    others = PRESETS["tiny"].parameters - sum(w.numel() for w in matrices)
    wanted = sum(8 * max(w.shape) + 4 for w in matrices) + 8 * others
    at_end = memlab.measure(lambda: None, model=model, optimizer=optimizer).at_end
    assert at_end["optimizer_state"] == wanted


@each_kind
def test_no_temporary_is_as_large_as_the_matrix(kind):
    weight = parameter(256, 4096)
    optimizer = Apollo([weight], chunk=2**14, **KINDS[kind])
    weight.grad = seeded(256, 4096)
    optimizer.step()
    trace = memlab.measure(optimizer.step, optimizer=optimizer)
    before = sum(event.bytes for event in trace.events if event.phase == "before")
    assert trace.peak_bytes - before < weight.nbytes / 4


def test_a_step_is_predicted_for_cuda():
    """The random numbers are drawn on the device, and no operator has an unknown workspace."""
    setting = Setting("tiny", batch=2, seq_len=16, device="cuda")
    mini, plain = (
        predicted_trace(setting, technique)
        for technique in (
            Plugs(optimizer=lambda model: Apollo(matrix_groups(model), **MINI)),
            Plugs(),
        )
    )
    assert mini.at_end["optimizer_state"] < plain.at_end["optimizer_state"]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"rank": 0}, "got rank=0; give an integer from 1"),
        ({"scale_by": "row"}, "got scale_by='row'; give 'channel' or 'tensor'"),
        ({"seed": 0.5}, "got seed=0.5; give an integer"),
        ({"scale": float("inf")}, "got scale=inf; give a finite number above 0"),
    ],
)
def test_invalid_settings_are_refused(settings, message):
    with pytest.raises(ValueError, match=message):
        Apollo([parameter(3, 4)], **settings)
