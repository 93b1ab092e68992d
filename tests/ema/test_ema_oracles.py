"""Comparison with ema-pytorch: equal where it is right, and the width of its average elsewhere."""

import pytest
import torch
from drifting import OneHot, drift
from torch import nn

from memlab.ema import PostHocEMA, relative_width, synthesize

ema_pytorch = pytest.importorskip("ema_pytorch")
STEPS = 1000


def width_of_theirs(sigma, **settings):
    """Return the width of its average after 1000 updates, and the mean time of its profile."""
    model = OneHot(STEPS).float()
    theirs = ema_pytorch.KarrasEMA(model, sigma_rel=sigma, **settings)
    for step in range(1, STEPS + 1):
        model.go_to(step)
        theirs.update()
    response = theirs.ema_model.weight.detach().double()
    times = torch.arange(1, STEPS + 1) / STEPS
    return relative_width(times, response), float((times * response).sum() / response.sum())


def width_of_ours(sigma, every, folder):
    model = OneHot(STEPS).float()
    ours = PostHocEMA(model, folder, (sigma, 0.2), every=every)
    for step in range(1, STEPS + 1):
        model.go_to(step)
        ours.update(step)
    return relative_width(range(1, STEPS + 1), ours.averages[sigma]["weight"])


def test_with_updates_at_every_step_both_have_the_requested_width(tmp_path):
    assert width_of_theirs(0.05, update_every=1)[0] == pytest.approx(0.05, rel=0.02)
    assert width_of_ours(0.05, 1, tmp_path) == pytest.approx(0.05, rel=0.02)


def test_with_updates_at_every_tenth_step_ema_pytorch_is_five_times_as_wide(tmp_path):
    """It applies the β of one step at every tenth step. This gives a width of 0.245, and a mean
    time of 0.64 of the training instead of 0.948."""
    width, mean = width_of_theirs(0.05, update_every=10)
    assert width == pytest.approx(0.245, abs=0.001)
    assert mean == pytest.approx(0.64, abs=0.005)
    assert width_of_ours(0.05, 10, tmp_path) == pytest.approx(0.05, rel=0.02)


def test_with_ema_pytorchs_default_interval_the_first_weights_count_most():
    _, mean = width_of_theirs(0.05)
    assert mean == pytest.approx(0.14, abs=0.01)


def test_ema_pytorch_is_right_if_called_only_at_every_tenth_step():
    """It counts calls: 100 of them have the requested width in hundredths of the training."""
    model = OneHot(100).float()
    theirs = ema_pytorch.KarrasEMA(model, sigma_rel=0.05, update_every=1)
    for call in range(1, 101):
        model.go_to(call)
        theirs.update()
    response = theirs.ema_model.weight.detach()
    assert relative_width(range(1, 101), response) == pytest.approx(0.05, rel=0.03)


def test_with_updates_at_every_step_both_synthesize_the_same(tmp_path):
    """The tolerance covers float16 snapshots and its β, which is one step late. Weights move by
    0.1 per step. The averages differ by 0.02, and two widths by more than 0.3."""
    model = nn.Linear(20, 20)
    ours = PostHocEMA(model, tmp_path / "ours", snapshot_every=100)
    theirs = ema_pytorch.PostHocEMA(
        model, sigma_rels=(0.05, 0.10), update_every=1,
        checkpoint_every_num_steps=100, checkpoint_folder=str(tmp_path / "theirs"),
    )  # fmt: skip
    for step in range(1, STEPS + 1):
        drift(model, step)
        ours.update(step)
        theirs.update()
    found = synthesize(tmp_path / "ours", 0.07)["weight"]
    same = theirs.synthesize_ema_model(sigma_rel=0.07).ema_model.weight
    other = synthesize(tmp_path / "ours", 0.10)["weight"]
    assert (found - same).abs().max() < 0.02
    assert (found - other).abs().max() > 0.3
