"""Shampoo and SOAP: closed forms, Adam as the case without rotation, and their bytes."""

import pytest
import torch
from close import assert_close
from torch import Tensor

import memlab
from memlab.reference.muon import newton_schulz
from memlab.reference.soap import root, shampoo_, soap_

SHAPES = [(6, 9), (9, 6), (7, 7)]


def seeded(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).double()


def orthogonal(size: int, seed: int) -> Tensor:
    return torch.linalg.qr(seeded(size, size, seed=seed))[0]


def test_the_root_to_the_fourth_power_is_the_inverse():
    matrix = seeded(6, 6)
    matrix = matrix @ matrix.T + torch.eye(6)
    fourth = torch.linalg.matrix_power(root(matrix, -0.25), 4)
    assert_close(fourth @ matrix, torch.eye(6).double())


@pytest.mark.parametrize("shape", SHAPES)
def test_shampoos_first_step_is_orthogonal_and_near_muons(shape):
    gradient, weight = seeded(*shape), torch.zeros(*shape).double()
    shampoo_(weight, gradient, {}, lr=1.0, eps=1e-12)
    u, values, v = torch.linalg.svd(gradient, full_matrices=False)
    assert (-weight - u @ v).abs().max() < 1e-12 / values.min() ** 2  # eps, and no rounding
    assert (-weight - newton_schulz(gradient)).norm() < 0.35 * weight.norm()


def test_shampoo_adds_up_its_statistics():
    weight, state = torch.zeros(4, 5).double(), {}
    gradients = [seeded(4, 5, seed=step) for step in range(3)]
    for gradient in gradients:
        shampoo_(weight, gradient, state, lr=0.1, eps=1e-4)
    wanted = sum((g @ g.T for g in gradients), 1e-4 * torch.eye(4).double())
    assert_close(state["L"], wanted)


@pytest.mark.parametrize("shape", [(5, 5), (4, 7)])
def test_soap_with_eigenvectors_along_the_axes_is_adam(shape):
    """The first gradient is diagonal, so that L and R are; no rotation follows."""
    first = torch.zeros(*shape).double()
    first.diagonal().copy_(torch.arange(1.0, min(shape) + 1))
    weight, other, state = seeded(*shape), torch.nn.Parameter(seeded(*shape)), {}
    adam = torch.optim.Adam([other], lr=0.1, betas=(0.9, 0.95))
    for step in range(5):
        other.grad = first if step == 0 else seeded(*shape, seed=step)
        soap_(weight, other.grad, state, lr=0.1, betas=(0.9, 0.95), frequency=9)
        adam.step()
    assert_close(weight, other.detach())


def test_a_rotated_problem_has_rotated_steps():
    """Adam's steps depend on the axes, SOAP's do not. Eigenvectors of 20 steps, renewed twice."""
    left, right = orthogonal(6, 1), orthogonal(6, 2)
    plain, rotated, states = torch.zeros(6, 6).double(), torch.zeros(6, 6).double(), ({}, {})
    for step in range(20):
        gradient = seeded(6, 6, seed=step)
        soap_(plain, gradient, states[0], lr=0.1)
        soap_(rotated, left @ gradient @ right, states[1], lr=0.1)
    # The first gradient becomes diagonal: Adam divides what rounding leaves beside it by its eps.
    assert_close(left @ plain @ right, rotated, summed=0.1 / 1e-8)


def test_eigenvectors_are_renewed_every_frequency_steps_and_stay_orthogonal():
    weight, state, changed, last = torch.zeros(5, 8).double(), {}, [], None
    for step in range(7):
        soap_(weight, seeded(5, 8, seed=step), state, lr=0.1, frequency=3)
        changed.append(last is not None and not torch.equal(state["QL"], last))
        last = state["QL"].clone()
        assert_close(last @ last.T, torch.eye(5).double())
    assert changed == [False, False, True, False, False, True, False]


@pytest.mark.parametrize("shape", SHAPES)
def test_state_bytes(shape):
    m, n = shape
    formulas = {shampoo_: m * m + n * n, soap_: 2 * m * m + 2 * n * n + 2 * m * n}
    for step, elements in formulas.items():
        weight, state = torch.zeros(m, n), {}
        gradient = seeded(m, n).float()
        trace = memlab.measure(lambda s=step, w=weight, g=gradient, kept=state: s(w, g, kept, 0.1))
        alive = sum(event.bytes for event in trace.events if event.phase != "before")
        assert alive == 4 * elements
