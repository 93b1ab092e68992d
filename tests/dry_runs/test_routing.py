"""A dry run of a mixture of experts assumes how many tokens each expert gets."""

import pytest
import torch
from torch import nn

import memlab
from memlab.dry_runs.routing import balanced


@pytest.mark.parametrize(
    ("tokens", "k", "experts", "imbalance", "counts"),
    [
        (8, 2, 4, 1, [4, 4, 4, 4]),
        (8, 2, 4, 2, [8, 3, 3, 2]),
        (8, 1, 4, 3, [6, 1, 1, 0]),
        (8, 2, 4, 100, [8, 3, 3, 2]),  # a token chooses an expert once
        (4, 4, 4, 1, [4, 4, 4, 4]),
        (5, 2, 4, 1, [2, 3, 3, 2]),
    ],
)
def test_tokens_are_spread_over_the_experts(tokens, k, experts, imbalance, counts):
    chosen = balanced(torch.Size((tokens, k)), experts, imbalance)
    assert chosen.flatten().bincount(minlength=experts).tolist() == counts
    assert all(len(set(row)) == k for row in chosen.tolist())


class Mixture(nn.Module):
    """Experts by boolean masks, as many models have them."""

    def __init__(self, experts=4):
        super().__init__()
        self.router = nn.Linear(32, experts)
        self.experts = nn.ModuleList(nn.Linear(32, 32) for _ in range(experts))
        self.counts = []

    def forward(self, x):
        scores, chosen = self.router(x).topk(2)
        result = torch.zeros_like(x)
        mask = nn.functional.one_hot(chosen, len(self.experts)).permute(2, 1, 0)
        for number, expert in enumerate(self.experts):
            slot, token = torch.where(mask[number])
            self.counts.append(len(token))
            result.index_add_(0, token, expert(x[token]) * scores[token, slot, None])
        return result


def counts_of(tokens=64, **assumption) -> tuple[list[int], memlab.Trace]:
    with memlab.dry_run(**assumption):
        model, x = Mixture(), torch.randn(tokens, 32)
        trace = memlab.measure(lambda: model(x).sum().backward(), model=model)
    return model.counts, trace


def test_masks_have_known_sizes():
    counts, trace = counts_of()
    assert counts == [32, 32, 32, 32]
    [note] = [note for note in trace.notes if "routing" in note]
    assert "every expert gets the same number of tokens; --assume imbalance:N changes it" in note
    assert "test_routing.py" in note


def test_the_busiest_expert_can_get_more():
    counts, trace = counts_of(assume="imbalance:1.5")
    assert counts == [48, 27, 27, 26]
    [note] = [note for note in trace.notes if "routing" in note]
    assert "the busiest expert gets 1.5 times as many tokens as the average" in note


def test_larger_masks_are_followed():
    counts, _ = counts_of(tokens=40_000)  # 320,000 elements of a mask
    assert counts == [20_000] * 4


def test_the_bytes_are_those_of_a_real_step_with_such_a_routing():
    _, dry = counts_of()
    model, x = Mixture(), torch.zeros(64, 32)
    with torch.no_grad():
        model.router.weight.copy_(torch.eye(4, 32))
        model.router.bias.zero_()
        x.scatter_(1, balanced(torch.Size((64, 2)), 4, 1), torch.tensor([[2.0, 1.0]] * 64))
    real = memlab.measure(lambda: model(x).sum().backward(), model=model)
    assert model.counts == [32, 32, 32, 32]
    assert real.peak_bytes == dry.peak_bytes


def test_without_masks_nothing_is_said():
    with memlab.dry_run():
        x = torch.randn(8, 4, requires_grad=True)
        trace = memlab.measure(lambda: x.topk(2).values.sum().backward(), model=None)
    assert not any("routing" in note for note in trace.notes)


@pytest.mark.parametrize(
    "wrong", ["imbalance:", "imbalance:0.5", "imbalance:many", "imbalance:inf"]
)
def test_a_wrong_imbalance_is_one_sentence(wrong):
    with pytest.raises(ValueError, match="give the tokens of the busiest expert relative"):
        memlab.dry_run(assume=f"imbalance:{wrong}")
