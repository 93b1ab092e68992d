"""Muon: bitwise equal to torch's on matrices, to AdamW elsewhere; its bytes and its temporaries."""

import math
from dataclasses import replace
from functools import partial

import pytest
import torch
from close import assert_close
from matrix_steps import seeded
from torch import nn

import memlab
from memlab.model import GPT, PRESETS
from memlab.optim import AdamW, Muon, matrix_groups
from memlab.optim.muon import adjusted_lr, newton_schulz
from memlab.train import Setting, build, dry_trace, measured, of_all_weights
from memlab.train.plugs import Plugs

SHAPES = [(6, 9), (9, 6), (1, 5), (700, 40), (40, 700)]


def run(optimizer, steps: int = 5) -> list[torch.Tensor]:
    """Step with seeded gradients; return the weights."""
    weights = [weight for group in optimizer.param_groups for weight in group["params"]]
    for step in range(steps):
        for place, weight in enumerate(weights):
            weight.grad = seeded(*weight.shape, seed=100 * step + place).to(weight.dtype)
        optimizer.step()
    return [weight.detach() for weight in weights]


def parameter(*shape: int, dtype: torch.dtype = torch.float32) -> nn.Parameter:
    return nn.Parameter(seeded(*shape).to(dtype))


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize(("rule", "nesterov"), [("original", True), ("match_rms_adamw", False)])
def test_steps_are_bitwise_equal_to_torchs_muon(shape, rule, nesterov):
    settings = {"lr": 0.02, "weight_decay": 0.3, "momentum": 0.9, "nesterov": nesterov}
    ours = Muon([parameter(*shape)], adjust_lr=rule, **settings)
    theirs = torch.optim.Muon([parameter(*shape)], adjust_lr_fn=rule, **settings)
    assert torch.equal(run(ours)[0], run(theirs)[0])
    (state,), (expected,) = ours.state.values(), theirs.state.values()
    assert torch.equal(state["momentum_buffer"], expected["momentum_buffer"])


def test_all_other_weights_take_adamws_steps():
    def weights():
        return [parameter(30, 7), parameter(9), parameter(2, 3, 4)]

    table, *others = weights()
    groups = [{"params": [table], "matrices": False}, {"params": others}]
    settings = {"lr": 0.01, "betas": (0.8, 0.9), "weight_decay": 0.2}
    for ours, theirs in zip(
        run(Muon(groups, **settings)), run(AdamW(weights(), **settings)), strict=True
    ):
        assert torch.equal(ours, theirs)


def test_the_chunk_size_does_not_change_the_result():
    whole, rows = (Muon([parameter(50, 30)], chunk=chunk) for chunk in (None, 60))
    assert torch.equal(run(whole)[0], run(rows)[0])


@pytest.mark.parametrize("shape", SHAPES)
def test_newton_schulz_brings_every_singular_value_near_one(shape):
    found = newton_schulz([seeded(*shape).double()], steps=5)
    singular_values = torch.linalg.svdvals(found)
    assert singular_values.min() > 0.68
    assert singular_values.max() < 1.21


def test_newton_schulz_keeps_singular_vectors():
    matrix = seeded(6, 9).double()
    u, _, v = torch.linalg.svd(matrix, full_matrices=False)
    rotated = u.T @ newton_schulz([matrix.clone()], steps=5) @ v.T
    assert_close(rotated, rotated.diag().diag())


def test_one_rule_gives_updates_the_size_of_adamws():
    """Orthogonal updates of any shape then have a root mean square of about 0.2."""
    for shape in [(64, 256), (256, 64), (128, 128)]:
        update = newton_schulz([seeded(*shape)], steps=5)
        scale = adjusted_lr(1.0, update, "match_rms_adamw")
        assert 0.13 < (scale * update).square().mean().sqrt() < 0.25


def test_a_gradient_of_zeros_does_not_move_a_matrix():
    weight = parameter(4, 5)
    before = weight.detach().clone()
    weight.grad = torch.zeros(4, 5)
    Muon([weight], weight_decay=0).step()
    assert torch.equal(weight, before)


def test_maximize_steps_up():
    up, down = parameter(5, 8), parameter(5, 8)
    up.grad, down.grad = seeded(5, 8, seed=1), -seeded(5, 8, seed=1)
    Muon([up], maximize=True).step(), Muon([down]).step()
    assert torch.equal(up, down)


@pytest.mark.parametrize("layout", ["transposed", "every second column"])
def test_a_weight_that_is_not_contiguous_takes_the_same_steps(layout):
    dense = seeded(40, 30)
    other = dense.T.contiguous().T if layout == "transposed" else torch.zeros(40, 60)[:, ::2]
    weights = nn.Parameter(dense.clone()), nn.Parameter(other.copy_(dense))
    for ours, theirs in [[run(Muon([weight]))[0] for weight in weights]]:
        assert torch.equal(ours, theirs)


def test_stochastic_rounding_keeps_small_steps_of_bfloat16_weights():
    """A step of 0.001 is less than half of bfloat16's spacing at 1."""
    moved = {}
    for rounding in ("nearest", "stochastic"):
        weight = nn.Parameter(torch.ones(64, 64, dtype=torch.bfloat16))
        generator = torch.Generator().manual_seed(0)
        optimizer = Muon(
            [weight], lr=0.001, adjust_lr="original", rounding=rounding, generator=generator,
            weight_decay=0,
        )  # fmt: skip
        run(optimizer, steps=3)
        moved[rounding] = (weight != 1).float().mean().item()
    assert moved["nearest"] == 0
    assert 0.02 < moved["stochastic"] < 0.2


# ------------------------------------------------------------------ which weights


@pytest.mark.parametrize("tied", [True, False])
def test_embedding_output_layer_and_norms_are_no_hidden_matrices(tied):
    model = GPT(replace(PRESETS["tiny"], tied=tied))
    matrices, others = matrix_groups(model)
    assert len(matrices["params"]) == 7 * PRESETS["tiny"].layers
    assert all(name.startswith("blocks.") and w.ndim == 2 for name, w in matrices["params"])
    ends = {"embedding.weight"} | (set() if tied else {"unembedding.weight"})
    assert {name for name, w in others["params"] if w.ndim == 2} == ends


def test_the_output_layer_of_a_transformers_model_is_found():
    transformers = pytest.importorskip("transformers")
    layers = {"num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1}
    sizes = {"vocab_size": 96, "hidden_size": 16, "intermediate_size": 40}
    config = transformers.LlamaConfig(**sizes, **layers, tie_word_embeddings=False)
    matrices, others = matrix_groups(transformers.LlamaForCausalLM(config))
    assert len(matrices["params"]) == 7
    assert {n for n, w in others["params"] if w.ndim == 2} == {
        "model.embed_tokens.weight",
        "lm_head.weight",
    }


def test_frozen_weights_are_in_no_group():
    model = GPT(PRESETS["tiny"])
    model.embedding.requires_grad_(False)
    _, others = matrix_groups(model)
    assert "embedding.weight" not in dict(others["params"])


def test_a_model_without_hidden_matrices_is_refused():
    with pytest.raises(ValueError, match="none of them a matrix of a hidden layer; use memlab"):
        matrix_groups(nn.Sequential(nn.Embedding(9, 4), nn.LayerNorm(4), nn.Linear(4, 9)))


# ------------------------------------------------------------------ bytes


def test_state_is_one_momentum_for_matrices_and_two_moments_elsewhere():
    config = PRESETS["tiny"]
    model = GPT(config)
    optimizer = Muon(matrix_groups(model))
    run(optimizer, 1)
    trace = memlab.measure(lambda: None, model=model, optimizer=optimizer)
    matrices = sum(w.numel() for _, w in matrix_groups(model)[0]["params"])
    assert trace.at_end["optimizer_state"] == 4 * matrices + 8 * (config.parameters - matrices)


@pytest.mark.parametrize(("dtype", "ours"), [(torch.float32, 4), (torch.bfloat16, 2)])
def test_momentum_in_another_dtype(dtype, ours):
    weight = parameter(30, 40)
    optimizer = Muon([weight], moment_dtype=dtype)
    run(optimizer, 1)
    assert optimizer.state[weight]["momentum_buffer"].nbytes == ours * 30 * 40


@pytest.mark.parametrize("shape", [(256, 1024), (1024, 256), (512, 512)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_step_needs_two_copies_of_the_matrix_and_one_square_in_bfloat16(shape, dtype):
    """4·m·n + 2·m² bytes, whatever the weight's dtype. torch's needs 4·m² and a copy of its own."""
    short, long = sorted(shape)
    formula = 4 * short * long + 2 * short**2
    assert temporaries(partial(Muon, chunk=4096), shape, dtype) == formula
    assert temporaries(torch.optim.Muon, shape, dtype) > formula + 2 * short**2


def test_a_step_needs_no_more_while_dynamo_watches_frames():
    """It does so after a failed compile, and a call then keeps its arguments until it returns."""
    before = torch._C._dynamo.eval_frame.set_eval_frame(False)
    try:
        needed = temporaries(partial(Muon, chunk=4096), (256, 1024), torch.bfloat16)
    finally:
        torch._C._dynamo.eval_frame.set_eval_frame(before)
    assert needed == 4 * 256 * 1024 + 2 * 256**2


def temporaries(make, shape: tuple[int, int], dtype: torch.dtype) -> int:
    """The most bytes of temporaries in a second step."""
    weight = parameter(*shape, dtype=dtype)
    optimizer = make([weight])
    weight.grad = seeded(*shape).to(dtype)
    optimizer.step()
    trace = memlab.measure(optimizer.step, optimizer=optimizer)
    before = sum(event.bytes for event in trace.events if event.phase == "before")
    return trace.peak_bytes - before


def test_a_dry_run_of_a_step_has_the_bytes_of_a_real_one():
    technique = Plugs(optimizer=lambda model: Muon(matrix_groups(model)))
    setting = Setting("tiny", batch=2, seq_len=16)
    training = build(setting, technique)
    training.step()
    assert dry_trace(setting, technique).peak_bytes == measured(training).peak_bytes


# ------------------------------------------------------------------ errors


@pytest.mark.parametrize(
    ("settings", "error", "message"),
    [
        ({"momentum": 1.0}, ValueError, "got momentum=1.0; give a number from 0 to below 1"),
        ({"ns_steps": 0}, ValueError, "got ns_steps=0; give an integer from 1"),
        ({"ns_steps": True}, ValueError, "got ns_steps=True; give an integer from 1"),
        ({"adjust_lr": "adam"}, ValueError, "got adjust_lr='adam'; give 'original' or"),
        ({"nesterov": 1}, TypeError, "got nesterov=1; give True or False"),
        ({"lr": math.nan}, ValueError, "got lr=nan; give at least 0"),
        ({"rank": 3}, TypeError, "Muon got an unexpected argument 'rank'=3"),
    ],
)
def test_invalid_settings_are_refused(settings, error, message):
    with pytest.raises(error, match=message):
        Muon([parameter(3, 4)], **settings)


def test_a_group_must_say_true_or_false():
    with pytest.raises(TypeError, match="got matrices=1; give True or False"):
        Muon([{"params": [parameter(3, 4)], "matrices": 1}])


def test_a_sparse_gradient_is_refused():
    weight = parameter(3, 4)
    weight.grad = torch.eye(3, 4).to_sparse()
    with pytest.raises(TypeError, match="got a sparse gradient"):
        Muon([weight]).step()


def test_a_state_of_another_optimizer_is_refused():
    weight, other = parameter(3, 4), parameter(3, 4)
    adam = AdamW([weight])
    run(adam, 1)
    with pytest.raises(ValueError, match="give the state of Muon on the same weights"):
        Muon([other]).load_state_dict(adam.state_dict())


def test_of_all_weights_takes_embeddings_for_matrices():
    """What `matrix_groups` is for."""
    model = GPT(PRESETS["tiny"])
    optimizer = of_all_weights(Muon)(model)
    table = model.embedding.weight
    table.grad = torch.ones_like(table)
    optimizer.step()
    assert "momentum_buffer" in optimizer.state[table]
