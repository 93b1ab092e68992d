"""Accumulated gradients against the full batch's, in values and bytes."""

from contextlib import contextmanager
from itertools import accumulate as running

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

import memlab
from memlab.accumulation import accumulate, split, windows

V, C = 11, 8
IGNORED = -100


def model_of(dtype=torch.float64) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Embedding(V, C), nn.Linear(C, C), nn.Tanh(), nn.Linear(C, V)).to(dtype)


def ragged(*lengths: int, tokens: int = 12) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Return one sequence per length, with that many unmasked tokens."""
    generator = torch.Generator().manual_seed(1)
    batches = []
    for length in lengths:
        inputs, targets = torch.randint(V, (2, 1, tokens), generator=generator)
        targets[:, length:] = IGNORED
        batches.append((inputs, targets))
    return batches


def sum_of_losses(model: nn.Module):
    def summed(batch):
        inputs, targets = batch
        logits = model(inputs)
        loss = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum")
        return loss, int((targets != IGNORED).sum())

    return summed


def gradients(model: nn.Module) -> list[torch.Tensor]:
    return [parameter.grad for parameter in model.parameters()]


def of_the_full_batch(model: nn.Module, batches) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Return the loss and gradients of all sequences at once, by torch's own mean."""
    inputs, targets = (torch.cat(parts) for parts in zip(*batches, strict=True))
    model.zero_grad()
    loss = F.cross_entropy(model(inputs).flatten(0, 1), targets.flatten())
    loss.backward()
    found = [gradient.clone() for gradient in gradients(model)]
    model.zero_grad()
    return loss.detach(), found


REORDERED = 256 * torch.finfo(torch.float64).eps  # sums in another order


def largest_error(found, expected) -> float:
    """Return the error relative to each tensor's largest element."""
    errors = [(f - e).abs().max() / e.abs().max() for f, e in zip(found, expected, strict=True)]
    return max(errors).item()


# ------------------------------------------------------------------ values


@pytest.mark.parametrize("lengths", [(12,), (12, 12), (1, 12), (3, 7, 12, 1, 5), (0, 4, 0, 9)])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_the_gradient_equals_the_full_batchs(lengths, dtype):
    tolerance = 256 * torch.finfo(dtype).eps
    model, batches = model_of(dtype), ragged(*lengths)
    loss, expected = of_the_full_batch(model, batches)
    result = accumulate(batches, sum_of_losses(model), model.parameters())
    assert largest_error(gradients(model), expected) <= tolerance
    assert abs(result.loss - loss) <= tolerance * loss
    assert result.tokens == sum(lengths)
    assert not result.loss.requires_grad


def test_the_mean_of_means_is_a_different_gradient():
    """The tolerance of this file detects the difference."""
    model, batches = model_of(), ragged(1, 2, 12)
    _, expected = of_the_full_batch(model, batches)
    for inputs, targets in batches:
        mean = F.cross_entropy(model(inputs).flatten(0, 1), targets.flatten())
        (mean / len(batches)).backward()
    assert largest_error(gradients(model), expected) > 0.1


@pytest.mark.parametrize("size", [1, 3, 4, 8])
def test_a_batch_may_be_split_anywhere(size):
    model, batches = model_of(), ragged(3, 12, 5, 1, 9, 12, 2, 7)
    batch = tuple(torch.cat(parts) for parts in zip(*batches, strict=True))
    _, expected = of_the_full_batch(model, batches)
    accumulate(split(batch, size), sum_of_losses(model), model.parameters())
    assert largest_error(gradients(model), expected) <= REORDERED


def test_the_number_of_tokens_may_be_a_tensor():
    model, batches = model_of(), ragged(3, 12)
    _, expected = of_the_full_batch(model, batches)

    def counted(batch):
        loss, tokens = sum_of_losses(model)(batch)
        return loss, torch.tensor(tokens)

    result = accumulate(batches, counted, model.parameters())
    assert largest_error(gradients(model), expected) <= REORDERED
    assert result.tokens.item() == 15


@pytest.mark.parametrize("wrap", [int, torch.tensor])
def test_a_fully_masked_window_has_zero_loss_and_gradients(wrap):
    model, batches = model_of(), ragged(0, 0)
    result = accumulate(
        batches, lambda batch: (sum_of_losses(model)(batch)[0], wrap(0)), model.parameters()
    )
    assert result.loss.item() == 0
    assert all(gradient.count_nonzero() == 0 for gradient in gradients(model))


def test_a_parameter_passed_twice_is_divided_once():
    model, batches = model_of(), ragged(3, 12)
    _, expected = of_the_full_batch(model, batches)
    accumulate(batches, sum_of_losses(model), [*model.parameters(), *model.parameters()])
    assert largest_error(gradients(model), expected) <= REORDERED


def test_frozen_parameters_get_no_gradient():
    model, batches = model_of(), ragged(3, 12)
    model[1].requires_grad_(False)
    accumulate(batches, sum_of_losses(model), model.parameters())
    assert [g is None for g in gradients(model)] == [False, True, True, False, False]


def test_clipping_afterwards_equals_clipping_the_full_batch():
    model, batches = model_of(), ragged(1, 2, 12)
    _, expected = of_the_full_batch(model, batches)
    norm = torch.stack([g.norm() for g in expected]).norm()
    accumulate(batches, sum_of_losses(model), model.parameters())
    assert torch.nn.utils.clip_grad_norm_(model.parameters(), norm / 2) == pytest.approx(norm)
    assert largest_error(gradients(model), [g / 2 for g in expected]) <= 1e-5  # clipping's epsilon


def test_the_last_window_is_shorter_and_not_dropped():
    assert list(windows(range(7), 3)) == [[0, 1, 2], [3, 4, 5], [6]]
    assert list(windows(range(6), 3)) == [[0, 1, 2], [3, 4, 5]]
    assert list(windows([], 3)) == []


def test_windows_reads_only_the_micro_batches_it_yields():
    read = []
    first = next(windows((read.append(i) or i for i in range(9)), 2))
    assert first == read == [0, 1]


# ------------------------------------------------------------------ low precision


def summing(count: int, dtype: torch.dtype) -> tuple[nn.Parameter, list[torch.Tensor]]:
    """A weight whose gradient is the sum of its micro-batches, each of them exact."""
    generator = torch.Generator().manual_seed(0)
    parameter = nn.Parameter(torch.zeros(1000, dtype=dtype))
    return parameter, [torch.rand(1000, generator=generator).to(dtype) for _ in range(count)]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_low_precision_gradients_are_added_in_float32(dtype):
    parameter, batches = summing(256, dtype)
    expected = torch.stack(batches).double().mean(0)
    accumulate(batches, lambda b: ((parameter * b).sum(), 1), [parameter])
    assert parameter.grad.dtype == dtype
    assert torch.equal(parameter.grad, expected.to(dtype))


def test_accumulating_in_low_precision_would_be_inaccurate():
    """The test above would fail without float32 sums."""
    parameter, batches = summing(256, torch.bfloat16)
    expected = torch.stack(batches).double().mean(0)
    for batch in batches:
        (parameter * batch).sum().backward()
    assert largest_error([parameter.grad.double() / 256], [expected]) > 0.02


def test_hooks_are_removed_even_after_an_error():
    parameter, batches = summing(2, torch.bfloat16)

    def failing(batch):
        raise RuntimeError("no data")

    with pytest.raises(RuntimeError, match="no data"):
        accumulate(batches, failing, [parameter])
    (parameter * batches[0]).sum().backward()
    assert torch.equal(parameter.grad, batches[0])


# ------------------------------------------------------------------ bytes


def most_activations(step, model) -> int:
    """Return the most bytes of activations alive at once."""
    events = memlab.measure(step, model=model).events
    return max(running(e.bytes for e in events if e.category == "activations"))


def test_the_peak_of_activations_is_one_micro_batchs():
    model = nn.Sequential(nn.Linear(64, 256), nn.Tanh(), nn.Linear(256, 64)).float()
    batch = (torch.randn(32, 64),)

    def summed(micro_batch):
        return model(*micro_batch).square().sum(), len(micro_batch[0])

    def step(batches):
        def run():
            model.zero_grad()
            accumulate(batches, summed, model.parameters())

        return run

    one = most_activations(step([(batch[0][:4],)]), model)
    assert most_activations(step(split(batch, 4)), model) == one
    assert (
        most_activations(step([batch]), model) == 8 * one - 7 * 4
    )  # except the loss, a single element


def test_float32_accumulation_takes_no_extra_memory():
    model = nn.Linear(64, 64, bias=False)
    batches = [torch.randn(4, 64) for _ in range(3)]

    def step():
        model.zero_grad()
        accumulate(batches, lambda b: (model(b).square().sum(), 4), model.parameters())

    trace = memlab.measure(step, model=model)
    assert trace.at_end == {"parameters": 4 * 64**2, "gradients": 4 * 64**2, "inputs": 3 * 1024}
    of_weights = [e for e in trace.events if e.shape == (64, 64) and e.bytes > 0]
    assert len(of_weights) == 1 + 3  # the weights, and one gradient per micro-batch


def test_float32_sums_cost_four_bytes_per_weight_until_the_end():
    layers = [nn.Linear(64, 64, bias=False, dtype=torch.bfloat16) for _ in range(8)]
    model = nn.Sequential(*layers)
    batches = [torch.randn(4, 64).bfloat16() for _ in range(2)]
    N, one = 8 * 64**2, 64**2

    def step():
        model.zero_grad()
        accumulate(batches, lambda b: (model(b).square().sum(), 4), model.parameters())

    trace = memlab.measure(step, model=model)
    alive = most = 0
    for event in trace.events:
        alive += event.bytes if event.shape == (64, 64) else 0
        most = max(most, alive)
    # Weights, sums, one gradient, and its float32 cast.
    assert 2 * N + 4 * N < most <= 2 * N + 4 * N + (2 + 4) * one
    assert trace.at_end["gradients"] == 2 * N
    assert sum(trace.at_end.values()) == 4 * N + 2 * 512


# ------------------------------------------------------------------ several ranks


@pytest.mark.parametrize("count", [1, 2, 5])
def test_all_but_the_last_micro_batch_are_inside_no_sync(count):
    seen, inside = [], [False]

    @contextmanager
    def no_sync():
        inside[0] = True
        yield
        inside[0] = False

    model = model_of()
    hooks = [p.register_hook(lambda g: seen.append(inside[0])) for p in [model[3].bias]]
    accumulate(ragged(*[12] * count), sum_of_losses(model), model.parameters(), no_sync=no_sync)
    assert len(hooks) == 1
    assert seen == [True] * (count - 1) + [False]


def test_ddp_communicates_once_per_window(tmp_path):
    store = dist.FileStore(str(tmp_path / "store"), 1)
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        calls = []

        def hook(state, bucket):
            calls.append(bucket.buffer().numel())
            future = torch.futures.Future()
            future.set_result(bucket.buffer())
            return future

        model = model_of()
        _, expected = of_the_full_batch(model, ragged(3, 7, 12))
        ddp = nn.parallel.DistributedDataParallel(model)
        ddp.register_comm_hook(None, hook)
        batches = ragged(3, 7, 12)
        accumulate(batches, sum_of_losses(ddp), model.parameters(), no_sync=ddp.no_sync)
        assert calls == [sum(p.numel() for p in model.parameters())]
        assert largest_error(gradients(model), expected) <= REORDERED
    finally:
        dist.destroy_process_group()


# ------------------------------------------------------------------ errors


def test_existing_gradients_are_an_error():
    model, batches = model_of(), ragged(3)
    accumulate(batches, sum_of_losses(model), model.parameters())
    with pytest.raises(ValueError, match=r"call optimizer\.zero_grad"):
        accumulate(batches, sum_of_losses(model), model.parameters())


def test_no_micro_batch_is_an_error():
    model = model_of()
    with pytest.raises(ValueError, match="no micro-batch"):
        accumulate([], sum_of_losses(model), model.parameters())


def test_an_optimizer_that_steps_inside_backward_is_an_error():
    model = model_of()
    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(lambda p: setattr(p, "grad", None))
    with pytest.raises(ValueError, match="steps inside backward"):
        accumulate(ragged(3), sum_of_losses(model), model.parameters())


@pytest.mark.parametrize("size", [0, -1])
def test_sizes_below_one_are_errors(size):
    with pytest.raises(ValueError, match="at least 1"):
        list(windows([1], size))
    with pytest.raises(ValueError, match="at least 1"):
        split((torch.ones(2),), size)
