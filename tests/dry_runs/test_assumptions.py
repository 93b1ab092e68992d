"""Assumed sizes for results that depend on values."""

import pytest
import torch
from torch.nn import functional as F

import memlab
from memlab.dry_runs.assumptions import fraction_of


def positive(x: torch.Tensor) -> torch.Tensor:
    return x > 0


WAYS = {  # with the number of elements if all, or half of them, are chosen
    "mask": (lambda x: x[positive(x)], 48, 24),
    "mask of a dimension": (lambda x: x[positive(x[:, 0])], 48, 24),
    "masked_select": (lambda x: x.masked_select(positive(x[0])), 48, 24),
    "nonzero": (lambda x: positive(x).nonzero(), 96, 48),
    "where": (lambda x: torch.stack(torch.where(positive(x))), 96, 48),
    "unique": (lambda x: x.unique(), 48, 24),
    "unique rows": (lambda x: x.unique(dim=0), 48, 24),
    "unique_consecutive": (lambda x: x.unique_consecutive(), 48, 24),
    "inverse": (lambda x: x.unique(return_inverse=True)[1], 48, 48),
    "counts": (lambda x: x.unique(return_counts=True)[1], 48, 24),
}


@pytest.mark.few(10)
@pytest.mark.parametrize("name", WAYS)
@pytest.mark.parametrize("assume", ["most", 0.5, "0.5"])
def test_the_assumed_fraction_is_chosen(name, assume):
    choose, most, half = WAYS[name]
    with memlab.dry_run(assume=assume):
        chosen = choose(torch.randn(6, 8))
    assert chosen.numel() == (most if assume == "most" else half)
    real = choose(torch.rand(6, 8))  # all are positive and different
    assert (real.numel(), real.dtype, real.dim()) == (most, chosen.dtype, chosen.dim())


def step_with(mask: torch.Tensor):
    model = torch.nn.Linear(8, 4)
    batch = torch.rand(16, 8)

    def step() -> None:
        model(batch)[mask].square().mean().backward()
        model.zero_grad()

    return step, model


def test_the_upper_bound_equals_a_real_step_that_chooses_every_element():
    step, model = step_with(torch.ones(16, dtype=torch.bool))
    real = memlab.measure(step, model=model)
    with memlab.dry_run(assume="most"):
        step, model = step_with(torch.rand(16) > 0.5)
        dry = memlab.measure(step, model=model)
    assert dry.peak_bytes == real.peak_bytes


def test_ctc_loss_assumes_the_longest_target():
    def loss(lengths: torch.Tensor, targets: torch.Tensor) -> tuple[int, ...]:
        log_probs = torch.randn(10, 2, 5).log_softmax(-1)
        result = F.ctc_loss(log_probs.requires_grad_(), targets, torch.full((2,), 10), lengths)
        result.backward()
        return tuple(torch.ops.aten._ctc_loss.Tensor(log_probs, targets, lengths, lengths)[1].shape)

    with memlab.dry_run(assume="most"):
        unknown = torch.randint(1, 5, (2,))
        assert loss(unknown, torch.randint(1, 5, (2, 4))) == (2, 10, 9)
        assert loss(unknown, torch.randint(1, 5, (8,))) == (2, 10, 9)  # concatenated: half each


def test_the_first_note_has_the_assumption_and_its_line():
    step, model = step_with(torch.ones(16, dtype=torch.bool))
    with memlab.dry_run(assume=0.25):
        assert not memlab.measure(step, model=model).notes  # these values are known
        step, model = step_with(torch.rand(16) > 0.5)
        note, *_ = memlab.measure(step, model=model).notes
    assert note.startswith(
        "assumed where a size depends on values (tests/dry_runs/test_assumptions"
    )
    assert note.endswith("a fraction of 0.25 of the elements is chosen")


def test_a_prediction_uses_the_assumption_too():
    def build():
        step, model = step_with(torch.rand(16) > 0.5)
        return step, model, None

    notes = memlab.predict(build, assume="most").notes
    assert any(note.endswith("every element is chosen") for note in notes)
    with pytest.raises(ValueError, match="--assume most, or a fraction"):
        memlab.predict(build)


def test_results_without_an_upper_bound_raise_with_and_without_an_assumption():
    for assume in (None, "most"):
        with memlab.dry_run(assume=assume), pytest.raises(ValueError, match="bincount") as error:
            torch.randint(9, (4,)).bincount()
        assert "assume" not in str(error.value)


@pytest.mark.parametrize("wrong", ["all", "", 0, -0.5, 1.5, "nan", [1]])
def test_an_invalid_assumption_raises(wrong):
    with pytest.raises(ValueError, match=r'use "most" .* a fraction above 0 and at most 1'):
        fraction_of(wrong)
