"""GaLore: the authors' steps, the paper's equations in float64, its bytes and its SVD."""

import pytest
import torch
from close import assert_close
from matrix_steps import SHAPES, parameter, run, seeded

import memlab
from memlab.model import GPT, PRESETS
from memlab.optim import AdamW, GaLore, matrix_groups

# ------------------------------------------------------------------ values


@pytest.mark.parametrize(("shape", "gap"), [((40, 90), 3), ((90, 40), 200), ((30, 30), 200)])
def test_steps_are_those_of_galore_torch(shape, gap):
    """A tall matrix is projected once: its singular vectors' signs differ, as its SVD does. eps is
    tiny, because the authors add it before the correction of the second moment."""
    package = pytest.importorskip("galore_torch")
    weight = parameter(*shape)
    own = {"rank": 8, "update_proj_gap": gap, "scale": 0.25, "proj_type": "std"}
    theirs = package.GaLoreAdamW(
        [{"params": [weight], **own}], lr=0.1, eps=1e-15, no_deprecation_warning=True
    )
    ours = GaLore([parameter(*shape)], lr=0.1, rank=8, gap=gap, eps=1e-15, weight_decay=0)
    assert_close(run(ours)[0], run(theirs)[0])


def test_the_authors_projector_keeps_all_singular_vectors_of_a_float32_gradient():
    """U[:, :r] is a slice, which keeps all of U alive: m² elements, not m·r."""
    package = pytest.importorskip("galore_torch")
    weight, rank = parameter(40, 90), 8
    own = {"rank": rank, "update_proj_gap": 200, "scale": 0.25, "proj_type": "std"}
    theirs = package.GaLoreAdamW([{"params": [weight], **own}], no_deprecation_warning=True)
    run(theirs, 1)
    kept = theirs.state[weight]["projector"].ortho_matrix.untyped_storage().nbytes()
    assert kept == 4 * 40 * 40
    ours = GaLore([parameter(40, 90)], rank=rank)
    run(ours, 1)
    assert next(iter(ours.state.values()))["projector"].untyped_storage().nbytes() == 4 * 40 * rank


@pytest.mark.parametrize("shape", SHAPES)
def test_steps_are_the_papers_equations_in_float64(shape):
    """Algorithm 2, with the projector that the optimizer has."""
    lr, rank, scale, (beta1, beta2), eps = 0.1, 5, 0.5, (0.8, 0.9), 1e-3
    weight = parameter(*shape, dtype=torch.float64)
    settings = {"lr": lr, "rank": rank, "scale": scale, "betas": (beta1, beta2), "eps": eps}
    optimizer = GaLore([weight], gap=2, weight_decay=0.3, **settings)
    wanted, m, v = weight.detach().clone(), 0.0, 0.0
    for t in range(1, 6):
        weight.grad = seeded(*shape, seed=t).double()
        optimizer.step()
        short_first = weight.grad if shape[0] < shape[1] else weight.grad.T
        P = optimizer.state[weight]["projector"]
        R = P.T @ short_first
        m, v = beta1 * m + (1 - beta1) * R, beta2 * v + (1 - beta2) * R**2
        N = m / (1 - beta1**t) / ((v / (1 - beta2**t)).sqrt() + eps)
        back = P @ N if shape[0] < shape[1] else (P @ N).T
        wanted = wanted * (1 - lr * 0.3) - lr * scale * back
        assert_close(weight.detach(), wanted)


@pytest.mark.parametrize("shape", SHAPES)
def test_the_projector_spans_the_largest_directions_and_is_renewed_after_gap_steps(shape):
    weight = parameter(*shape)
    optimizer, last = GaLore([weight], rank=5, gap=3), None
    for t in range(7):
        weight.grad = seeded(*shape, seed=t)
        optimizer.step()
        P = optimizer.state[weight]["projector"].clone()
        if t % 3 == 0:
            short_first = (weight.grad if shape[0] < shape[1] else weight.grad.T).double()
            U = torch.linalg.svd(short_first)[0][:, :5]
            assert_close(P @ P.T, (U @ U.T).float())
        else:
            assert torch.equal(P, last)
        last = P


def test_between_projections_a_matrix_moves_in_rank_directions_only():
    weight = parameter(40, 90)
    before = weight.detach().clone()
    run(GaLore([weight], rank=4, weight_decay=0), 5)
    moved = torch.linalg.svdvals((weight.detach() - before).double())
    assert moved[3] > 1e-4
    assert moved[4] < 5 * 2**-24 * before.norm()  # five roundings of each weight


def test_a_rank_that_saves_nothing_leaves_the_weight_to_adamw():
    for rank in (30, 31):
        ours = run(GaLore([parameter(30, 50)], rank=rank, lr=0.01))
        theirs = run(AdamW([parameter(30, 50)], lr=0.01))
        assert torch.equal(ours[0], theirs[0])


@pytest.mark.parametrize("shape", SHAPES)
def test_the_chunk_size_does_not_change_the_result(shape):
    whole, rows = (GaLore([parameter(*shape)], rank=4, chunk=chunk) for chunk in (None, 100))
    assert_close(run(whole)[0], run(rows)[0])


def test_bfloat16_weights_and_state_follow_float32():
    generator = torch.Generator().manual_seed(0)
    brain = {"moment_dtype": torch.bfloat16, "rounding": "stochastic", "generator": generator}
    weights = parameter(40, 60), parameter(40, 60, dtype=torch.bfloat16)
    exact, rounded = GaLore([weights[0]], rank=8, lr=0.01), GaLore([weights[1]], rank=8, **brain)
    for group in rounded.param_groups:
        group["lr"] = 0.01
    difference = run(exact, 4)[0] - run(rounded, 4)[0]
    assert difference.abs().mean() < 2**-8
    assert {t.dtype for t in rounded.state[weights[1]].values() if torch.is_tensor(t)} == {
        torch.bfloat16
    }


def test_a_loaded_state_takes_the_same_steps():
    one, other = parameter(40, 60), parameter(40, 60)
    ours, loaded = GaLore([one], rank=8, gap=3), GaLore([other], rank=3)
    run(ours, 2)
    other.data.copy_(one.detach())
    loaded.load_state_dict(ours.state_dict())
    assert loaded.param_groups[0]["rank"] == 8
    assert torch.equal(run(ours, 4)[0], run(loaded, 4)[0])


def test_a_state_of_another_rank_is_refused():
    ours, other = GaLore([parameter(40, 60)], rank=8), GaLore([parameter(40, 50)], rank=8)
    run(ours, 1)
    with pytest.raises(
        ValueError, match=r"projector \(40, 8\), exp_avg \(60, 8\).*weight of shape"
    ):
        other.load_state_dict(ours.state_dict())


# ------------------------------------------------------------------ bytes


def state_formula(shape: tuple[int, int], rank: int) -> int:
    short, long = sorted(shape)
    return 4 * (short * rank + 2 * long * rank)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("rank", [1, 7])
def test_state_bytes_match_the_papers_table(shape, rank):
    optimizer = GaLore([parameter(*shape)], rank=rank)
    run(optimizer, 1)
    trace = memlab.measure(lambda: None, optimizer=optimizer)
    assert trace.at_end["optimizer_state"] == state_formula(shape, rank)


def test_state_of_a_model_is_small_for_matrices_and_adamws_elsewhere():
    config, rank = PRESETS["tiny"], 8
    model = GPT(config)
    optimizer = GaLore(matrix_groups(model), rank=rank)
    run(optimizer, 1)
    matrices = [w for _, w in matrix_groups(model)[0]["params"]]
    others = config.parameters - sum(w.numel() for w in matrices)
    wanted = sum(state_formula(tuple(w.shape), rank) for w in matrices) + 8 * others
    at_end = memlab.measure(lambda: None, model=model, optimizer=optimizer).at_end
    assert at_end["optimizer_state"] == wanted


def events_of_step(shape, rank, steps, dtype=torch.float32, **settings):
    """The events of the last of some steps, without those before it."""
    weight = parameter(*shape, dtype=dtype)
    optimizer = GaLore([weight], rank=rank, **settings)
    for step in range(steps):
        weight.grad = seeded(*shape, seed=step).to(dtype)
        if step < steps - 1:
            optimizer.step()
    trace = memlab.measure(optimizer.step, optimizer=optimizer)
    before = sum(event.bytes for event in trace.events if event.phase == "before")
    return trace.peak_bytes - before, [event.operator for event in trace.events]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_step_with_an_svd_needs_its_results_and_one_without_a_few_rows(dtype):
    m, n, rank = 256, 1024, 16
    svd, operators = events_of_step((m, n), rank, 3, dtype, gap=2, chunk=4096)
    assert "aten._linalg_svd.default" in operators
    copy = 0 if dtype == torch.float32 else 4 * m * n
    assert svd == copy + 4 * (m * m + m + m * n)
    without, operators = events_of_step((m, n), rank, 2, dtype, gap=2, chunk=4096)
    assert "aten._linalg_svd.default" not in operators
    assert without < 4 * 4 * 4096 + 16 * m * rank  # a few chunks


# ------------------------------------------------------------------ errors


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"rank": 0}, "got rank=0; give an integer from 1"),
        ({"gap": 1.5}, "got gap=1.5; give an integer from 1"),
        ({"scale": 0}, "got scale=0; give a finite number above 0"),
    ],
)
def test_invalid_settings_are_refused(settings, message):
    with pytest.raises(ValueError, match=message):
        GaLore([parameter(3, 4)], **settings)
