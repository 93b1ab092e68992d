"""The reference checkpoint: its behaviour and each documented limitation."""

import weakref

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import memlab
from memlab.checkpointing import checkpoint
from memlab.reference.checkpointing import forget


def net(*extra: nn.Module) -> nn.Sequential:
    return nn.Sequential(nn.Linear(8, 8), nn.GELU(), *extra, nn.Linear(8, 8))


def plainly(fn, *args):
    return fn(*args)


def batch() -> Tensor:
    return torch.randn(4, 8, requires_grad=True)


# ------------------------------------------------------------------ behaviour


def observed(call) -> list[Tensor]:
    torch.manual_seed(0)
    model, x = nn.Sequential(net(nn.Dropout()), net(nn.Dropout())), batch()
    y = call(model[1], call(model[0], x))
    y.square().sum().backward()
    return [y, torch.rand(3), x.grad, *(p.grad for p in model.parameters())]


def test_values_gradients_and_later_random_numbers_equal_a_plain_call():
    assert all(map(torch.equal, observed(forget), observed(plainly)))


def test_several_inputs_each_get_their_gradients():
    def found(call) -> list[Tensor]:
        torch.manual_seed(0)
        a, b = batch(), batch()
        y = call(lambda a, b: (a * b).tanh() * a.exp(), a, b)
        y.sum().backward()
        return [y, a.grad, b.grad]

    assert all(map(torch.equal, found(forget), found(plainly)))


def test_it_keeps_only_its_inputs():
    blocks, x = [net() for _ in range(4)], batch()
    with memlab.meter() as running:
        y = x
        for block in blocks:
            y = forget(block, y)
    between = 4 * 8 * 4
    assert running.trace.at_end["activations"] == (3 + 1) * between  # including the result


def test_activations_are_freed_after_backward():
    storages = []

    def fn(x: Tensor) -> Tensor:
        y = x.sin()
        storages.append(weakref.ref(y.untyped_storage()))
        return y.exp().tanh()

    forget(fn, batch()).sum().backward()
    assert [storage() for storage in storages] == [None, None]


# ------------------------------------------------------------------ limitations


def test_it_takes_no_keyword_arguments():
    with pytest.raises(TypeError, match="unexpected keyword argument 'p'"):
        forget(F.dropout, batch(), p=0.5)


def test_it_takes_one_output():
    first, second = forget(lambda x: (x.sin(), x.exp()), batch())
    with pytest.raises(TypeError, match="takes 2 positional arguments but 3 were given"):
        (first * second).sum().backward()


def test_it_takes_no_tensors_in_a_list():
    with pytest.raises(TypeError, match="argument 1 is of type list"):
        forget(lambda x, more: x * more[0], batch(), [batch()])


@pytest.mark.parametrize(("call", "has_graph"), [(forget, False), (checkpoint, True)])
def test_weights_get_no_gradient_if_no_input_requires_one(call, has_graph):
    assert call(net(), batch().detach()).requires_grad == has_graph


@pytest.mark.parametrize(("call", "fills"), [(forget, True), (checkpoint, False)])
def test_autograd_grad_fills_the_gradients_of_all_weights(call, fills):
    model, x = net(), batch()
    torch.autograd.grad(call(model, x).sum(), x)
    assert (model[0].weight.grad is not None) == fills


def test_it_has_no_second_derivative():
    x = batch()
    y = forget(lambda x: x.sin().exp(), x)
    (slope,) = torch.autograd.grad(y.sum(), x, create_graph=True)
    assert not slope.requires_grad


@pytest.mark.parametrize(("call", "runs_to_its_end"), [(forget, 2), (checkpoint, 1)])
def test_it_runs_the_function_to_its_end(call, runs_to_its_end):
    ends = []

    def fn(x: Tensor) -> Tensor:
        y = x.sin() * 2
        ends.append(y.shape)
        return y

    call(fn, batch()).sum().backward()
    assert len(ends) == runs_to_its_end


@pytest.mark.parametrize(("call", "counted"), [(forget, 2), (checkpoint, 1)])
def test_batch_norm_counts_its_batch_twice(call, counted):
    norm = nn.BatchNorm1d(8)
    call(lambda x: norm(x).tanh(), batch()).sum().backward()
    assert norm.num_batches_tracked == counted


def test_autocast_is_not_restored():
    dtypes = []

    def fn(x: Tensor) -> Tensor:
        y = x @ x.mT
        dtypes.append(y.dtype)
        return y.float()

    with torch.autocast("cpu", torch.bfloat16):
        y = forget(fn, batch())
    y.sum().backward()
    assert dtypes == [torch.bfloat16, torch.float32]
