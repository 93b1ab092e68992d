"""Arguments of a simulation, and the errors for invalid ones."""

import pytest
import torch
from close import assert_close
from ranked import TIED, adamw, micro_batches, model_of, sum_of_losses, two_groups
from torch import nn

import memlab
from memlab.zero import simulate, units_of


def simulated(ranks=2, stage=3, **settings):
    model = model_of()
    return simulate(model, adamw(two_groups(model)), ranks, stage, **settings)


@pytest.mark.parametrize(
    ("returned", "words"),
    [
        (lambda loss, tokens: loss, "a single Tensor"),
        (lambda loss, tokens: (loss,), r"a tuple of 1 \(Tensor\)"),
        (lambda loss, tokens: (loss, tokens, 1), r"a tuple of 3 \(Tensor, Tensor, int\)"),
        (lambda loss, tokens: (loss.item(), tokens), r"a tuple of 2 \(float, Tensor\)"),
        (lambda loss, tokens: None, "a single NoneType"),
    ],
)
def test_a_sum_of_losses_returns_the_sum_and_the_number_of_tokens(returned, words):
    with pytest.raises(TypeError, match=f"sum_of_losses returned {words}; return two values: the"):
        simulated().step(micro_batches(2), lambda m, batch: returned(*sum_of_losses(m, batch)))


def test_gathered_at_peak_needs_a_meter():
    step = simulated().step(micro_batches(2), sum_of_losses)
    with pytest.raises(ValueError, match=r"not metered, .*; pass meter=memlab\.meter"):
        step.gathered_at_peak()


@pytest.mark.parametrize(("meter", "name"), [(True, "True"), (memlab.measure, "measure")])
def test_a_meter_is_made_from_a_model_and_an_optimizer(meter, name):
    with pytest.raises(TypeError, match=f"got meter={name}, .*; pass meter=memlab.meter"):
        simulated(meter=meter)


@pytest.mark.parametrize("ranks", [2.0, "2", None])
def test_ranks_must_be_an_integer(ranks):
    with pytest.raises(TypeError, match=f"got {ranks!r} as number of ranks; pass an integer"):
        simulated(ranks)


def test_micro_batches_may_come_from_an_iterator():
    listed, generated = simulated(), simulated()
    step = listed.step(micro_batches(4), sum_of_losses)
    assert generated.step(iter(micro_batches(4)), sum_of_losses).loss == step.loss
    assert all(torch.equal(w, listed.weights()[n]) for n, w in generated.weights().items())
    with pytest.raises(ValueError, match="got 3 micro-batches for 2 ranks"):
        generated.step(iter(micro_batches(3)), sum_of_losses)


@pytest.mark.parametrize("clip_norm", [-1, 0.0, float("nan")])
def test_a_clip_norm_must_be_above_0(clip_norm):
    zero = simulated()
    with pytest.raises(ValueError, match=f"got clip_norm={clip_norm}; pass a norm above 0"):
        zero.step(micro_batches(2), sum_of_losses, clip_norm=clip_norm)


def test_units_must_be_a_list_and_not_a_single_name():
    """As characters, "0" would be one unit, and "blocks.0" none."""
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    with pytest.raises(TypeError, match=r"got units='0', a single name; .*: \['0'\]"):
        units_of(model, "0")
    assert units_of(model, ["0"])["0.weight"] == "0"


@pytest.mark.parametrize("stage", range(4))
def test_a_step_names_its_units_in_the_models_order(stage):
    step = simulated(stage=stage).step(micro_batches(2), sum_of_losses)
    assert step.units == tuple(f"blocks.{number}" for number in range(TIED.layers))


def test_the_repr_of_a_step_is_one_line():
    zero = simulated(meter=memlab.meter)
    step = zero.step(micro_batches(2), sum_of_losses, clip_norm=0.1)
    assert repr(step) == (
        f"<Step of stage 3, 2 ranks, metered: loss {step.loss:.4g} over 31 tokens, "
        f"norm {step.norm:.4g}>"
    )


def test_weights_keep_their_whole_shapes_while_their_storages_are_empty():
    zero = simulated()
    for name, weight in zero.ranks[0].model.named_parameters():
        assert weight.shape == zero.weights()[name].shape
        assert weight.untyped_storage().nbytes() == 0


def test_each_rank_keeps_its_own_batch_norm_statistics():
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))
    zero = simulate(model, adamw(model.parameters()), 2, 2)
    batches = [torch.full((2, 3), float(rank)) for rank in range(2)]
    zero.step(batches, lambda m, x: (m(x).sum(), len(x)))
    means = [rank.model[1].running_mean for rank in zero.ranks]
    with torch.no_grad():
        for mean, batch in zip(means, batches, strict=True):
            assert_close(mean, 0.1 * model[0](batch).mean(0))
    assert not torch.equal(*means)
