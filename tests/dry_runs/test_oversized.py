"""Results smaller than their storage."""

import pytest
import torch
from torch.nn import functional as F

import memlab

X, Y = torch.rand(50, 60), torch.rand(50, 60)


def births(trace: memlab.Trace) -> list[int]:
    return [event.bytes for event in trace.events if event.bytes > 0]


@pytest.mark.few(6)
@pytest.mark.parametrize(
    "operator",
    [
        lambda x, y: F.mse_loss(x, y),
        lambda x, y: F.mse_loss(x, y[:1].expand_as(x), reduction="sum"),
        lambda x, y: F.mse_loss(x, y, reduction="none"),
        lambda x, y: F.smooth_l1_loss(x, y),
        lambda x, y: F.soft_margin_loss(x, y),
        lambda x, y: F.binary_cross_entropy(x, y),
        lambda x, y: F.l1_loss(x, y),
        lambda x, y: F.fold(x.new_zeros(2, 27, 21), (5, 9), 3),
        lambda x, y: F.embedding_bag(x.new_zeros(12).long(), y, x.new_zeros(3).long()),
        lambda x, y: F.embedding_bag(x.new_zeros(12).long(), y, x.new_zeros(3).long(), mode="sum"),
        lambda x, y: F.embedding_bag(x.new_zeros(12).long(), y, x.new_zeros(3).long(), mode="max"),
    ],
)
def test_a_dry_run_has_the_storages_of_the_real_kernels(operator):
    real = memlab.measure(lambda: operator(X, Y))
    with memlab.dry_run():
        dry = memlab.measure(lambda: operator(X, Y))
    assert births(dry) == births(real)


def test_the_scalar_from_mse_loss_keeps_the_bytes_of_its_input():
    assert F.mse_loss(X, Y).untyped_storage().nbytes() == 50 * 60 * 4
