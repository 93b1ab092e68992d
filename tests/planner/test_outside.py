"""Techniques around somebody else's training: what is learned, and what it takes."""

from functools import partial

import pytest
import torch
from torch import nn

import memlab
from memlab.optim import Adam8bit, AdamW
from memlab.planner.outside import LADDER, checkpointed, kept_on_disk, layers_of, stepped_by


class Deep(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(32, 128), nn.GELU(), nn.Linear(128, 32)) for _ in range(6)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = x + layer(x)
        return x


def build(lr: float = 0.01):
    torch.manual_seed(0)
    model, x = Deep(), torch.randn(256, 32)
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr)

    def step() -> None:
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()

    return step, model, optimizer


def trained(change=lambda *parts: parts, steps: int = 3) -> list[torch.Tensor]:
    step, model, _ = change(*build())
    for _ in range(steps):
        step()
    return list(model.parameters())


def trace_of(change=lambda *parts: parts):
    with memlab.dry_run():
        step, model, optimizer = change(*build())
        step()
        return memlab.measure(step, model=model, optimizer=optimizer)


@pytest.mark.parametrize("change", [checkpointed, kept_on_disk])
def test_where_activations_are_changes_no_weight(change):
    for ours, theirs in zip(trained(change), trained(), strict=True):
        assert torch.equal(ours, theirs)


def test_another_optimizer_takes_the_steps_at_the_same_rate():
    for ours, theirs in zip(
        trained(stepped_by(partial(AdamW, weight_decay=0.01))), trained(), strict=True
    ):
        assert torch.allclose(ours, theirs, atol=1e-6)


def test_a_step_in_backward_learns_what_the_step_after_it_does():
    after, inside = (trained(stepped_by(Adam8bit, in_backward=each)) for each in (False, True))
    for one, other in zip(after, inside, strict=True):
        assert torch.equal(one, other)


@pytest.mark.slow
def test_each_rung_saves():
    plain, checkpoints, small_state, both, inside, disk = (
        trace_of(rung.applied) for rung in LADDER
    )
    N = sum(p.numel() for p in Deep().parameters())
    counters = 4 * len(list(Deep().parameters()))
    assert plain.at_end["optimizer_state"] == 8 * N + counters
    assert small_state.at_end["optimizer_state"] < 3 * N + 2**18  # and the table of codes
    assert checkpoints.peak_bytes < plain.peak_bytes
    assert both.at_peak.get("activations", 0) < plain.at_peak["activations"]
    assert inside.at_end.get("gradients", 0) == 0
    assert disk.peak_bytes <= inside.peak_bytes


def test_a_model_without_a_list_of_layers_is_told_what_to_do():
    with pytest.raises(ValueError, match=r"a Linear holds its layers in no nn\.ModuleList"):
        layers_of(nn.Linear(2, 2))
    with pytest.raises(ValueError, match="nothing holds its layers"):
        layers_of(None)


def test_what_is_no_optimizer_cannot_be_replaced():
    step, model, _ = build()
    with pytest.raises(ValueError, match=r"build\(\) returned nothing as optimizer"):
        stepped_by(Adam8bit)(step, model, None)
