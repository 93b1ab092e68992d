"""Saved tensors in another form: one encoding a storage, of the right moment, and nothing held."""

import gc
import math
import weakref

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import memlab
from memlab.internals.saved_tensors import TensorInfo, encoded, tensor_info


class Copies:
    """The simplest form: a copy. It counts, and refers to its copies weakly."""

    def __init__(self) -> None:
        self.asked: list[TensorInfo] = []
        self.alive: weakref.WeakSet = weakref.WeakSet()
        self.encoded = self.decoded = 0

    def choose(self, info: TensorInfo):
        self.asked.append(info)
        return self.encode

    def encode(self, numbers: torch.Tensor):
        assert numbers.dim() == 1
        assert not numbers.requires_grad
        self.encoded += 1
        copy = numbers.clone()
        self.alive.add(copy)

        def decode() -> torch.Tensor:
            self.decoded += 1
            return copy.clone()

        return decode


@pytest.fixture
def copies() -> Copies:
    return Copies()


def leaf(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, requires_grad=True)


class Saving(torch.autograd.Function):
    """Saves what it is given, and keeps what it gets back in `seen`."""

    seen: tuple[torch.Tensor, ...] = ()

    @staticmethod
    def forward(ctx, *tensors):
        ctx.save_for_backward(*tensors)
        return torch.zeros(())

    @staticmethod
    def backward(ctx, gradient):
        Saving.seen = ctx.saved_tensors
        return (None,) * len(Saving.seen)


def back(*tensors: torch.Tensor, choose) -> tuple[torch.Tensor, ...]:
    """What backward gets of tensors that one operator saves."""
    with encoded(choose):
        out = Saving.apply(*tensors)
    out.backward()
    seen, Saving.seen = Saving.seen, ()
    return seen


# ------------------------------------------------------------------ one encoding a storage


def test_a_storage_is_encoded_once_whoever_saves_it_and_whatever_view(copies):
    x = leaf(6, 4) * 2
    with encoded(copies.choose):
        out = x.sin() + (x.t() * x.t()).t() + x.cos()
    assert copies.encoded == len(copies.asked) == 1
    out.sum().backward()


def test_each_operator_that_saves_it_is_noted_until_it_lets_go(copies):
    class Hold:
        pass

    x, holds, noted = leaf(6, 4) * 2, weakref.WeakSet(), []

    def note(decode):
        noted.append(decode().sum())
        holds.add(hold := Hold())
        return hold

    with encoded(copies.choose, note):
        out, other = x.sin().sum(), x.cos().sum()
        leaf(3).sin()  # a weight's
    assert copies.encoded == 1
    assert [float(total) for total in noted] == [float(x.detach().sum())] * 2
    out.backward(retain_graph=True)
    assert len(holds) == 2
    out.backward()
    assert len(holds) == 1
    del other
    assert len(holds) == 0


@pytest.mark.parametrize(
    "view",
    [
        lambda x: x,
        lambda x: x.t(),
        lambda x: x[2:5, 1::2],
        lambda x: x[3],
        lambda x: x.unsqueeze(1).expand(6, 3, 8),
        lambda x: x.view(-1)[7:],
        lambda x: x.flatten()[0],
    ],
)
def test_a_view_comes_back_with_its_shape_strides_offset_and_values(copies, view):
    x = view(leaf(6, 8) * 2)
    [found] = back(x, choose=copies.choose)
    assert copies.encoded == 1
    assert torch.equal(found, x)
    assert (found.stride(), found.storage_offset()) == (x.stride(), x.storage_offset())
    assert found.untyped_storage().data_ptr() != x.untyped_storage().data_ptr()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64, torch.complex64])
def test_the_dtype_comes_back(copies, dtype):
    x = leaf(5).to(dtype)
    [found] = back(x, choose=copies.choose)
    assert found.dtype == dtype
    assert torch.equal(found, x)


def test_one_storage_in_two_dtypes_has_two_encodings(copies):
    x = leaf(4, 2) * 2
    again, as_complex = back(x, torch.view_as_complex(x), choose=copies.choose)
    assert copies.encoded == 2
    assert torch.equal(again, x)
    assert torch.equal(torch.view_as_real(as_complex), x)


def test_views_that_are_unpacked_together_share_what_was_decoded(copies):
    x = leaf(4, 6) * 2
    first, second = back(x, x.t(), choose=copies.choose)
    assert copies.decoded == 1
    assert first.data_ptr() == second.data_ptr()
    assert torch.equal(second, x.t())


def test_what_was_decoded_dies_with_its_last_user(copies):
    with encoded(copies.choose):
        out = (leaf(4) * 2).sin()
    for times in (1, 2, 3):
        out.sum().backward(retain_graph=True)
        assert copies.decoded == times


# ------------------------------------------------------------------ the right moment


def test_each_version_of_a_storage_has_its_own_encoding(copies):
    start = leaf(8)
    with encoded(copies.choose):
        x = start * 1
        first = x.sin()
        x.mul_(3)
        second = x.sin()
    assert copies.encoded == 2
    # Without hooks torch refuses: the first x is gone.
    [gradient] = torch.autograd.grad((first + second).sum(), start)
    wanted = start.detach().cos() + 3 * (3 * start.detach()).cos()
    assert torch.allclose(gradient, wanted)


def test_an_address_that_another_storage_gets_is_not_taken_for_the_first(copies):
    addresses, wanted, outs = set(), [], []
    start = leaf(1000)
    with encoded(copies.choose):
        for n in range(20):
            x = start * n
            addresses.add(x.data_ptr())
            outs.append(x.sin())
            wanted.append(n * x.detach().cos())
            del x
    assert len(addresses) < 20  # or this tests nothing
    assert copies.encoded == 20
    for out, right in zip(outs, wanted, strict=True):
        [gradient] = torch.autograd.grad(out.sum(), start, retain_graph=True)
        assert torch.allclose(gradient, right)


# ------------------------------------------------------------------ how long anything lives


def test_the_original_dies_as_soon_as_its_user_lets_go(copies):
    with encoded(copies.choose):
        x = leaf(100) * 2
        out = x.sin()
        storage = weakref.ref(x.untyped_storage())
        del x
    assert storage() is None
    out.sum().backward()


def test_an_encoding_dies_with_the_last_node_that_saved_its_storage(copies):
    gc.disable()  # no cycle may need it
    try:
        with encoded(copies.choose):
            x = leaf(100) * 2
            first, second = x.sin().sum(), x.cos().sum()
        del x
        assert len(copies.alive) == 1
        del first
        assert len(copies.alive) == 1
        second.backward()
        assert len(copies.alive) == 0
    finally:
        gc.enable()


@pytest.mark.parametrize("is_encoded", [True, False])
def test_a_graph_that_is_dropped_leaves_nothing_behind(copies, is_encoded):
    gc.disable()
    try:
        with encoded(copies.choose if is_encoded else lambda info: None):
            x = leaf(100)
            out = (x * 2).exp()  # an operator that saves its own output
            storage = weakref.ref(out.untyped_storage())
        assert len(copies.alive) == is_encoded
        del out, x
        assert len(copies.alive) == 0
        assert storage() is None
    finally:
        gc.enable()


def test_an_encoding_dies_with_the_graph_though_the_tensor_lives_on(copies):
    with encoded(copies.choose):
        x = leaf(100) * 2
        out = x.sin()
        del out
        assert len(copies.alive) == 0
        x.cos().sum().backward()
    assert copies.encoded == 2


# ------------------------------------------------------------------ what is left alone


@pytest.mark.parametrize("make", [lambda: nn.Parameter(torch.randn(4, 4)), lambda: leaf(4, 4)])
@pytest.mark.parametrize("view", [lambda w: w, lambda w: w.t(), lambda w: w[1:3, :2].unsqueeze(0)])
def test_weights_and_their_views_pass_whatever_the_plan_says(copies, make, view):
    weight = make()
    [found] = back(view(weight), choose=copies.choose)
    assert copies.encoded == 0
    assert copies.asked[0].is_weight
    assert found.data_ptr() == view(weight).data_ptr()


def test_what_the_plan_leaves_alone_is_the_same_memory():
    x = leaf(5) * 2
    [found] = back(x, choose=lambda info: None)
    assert found.data_ptr() == x.data_ptr()


def test_an_encoding_may_find_that_it_cannot(copies):
    x = leaf(5) * 2
    [found] = back(x, choose=lambda info: lambda numbers: None)
    assert found.data_ptr() == x.data_ptr()


def test_sparse_tensors_pass_without_asking(copies):
    x = leaf(3, 3)
    sparse = torch.eye(3).to_sparse()
    with encoded(copies.choose):
        out = torch.sparse.mm(sparse, x)
    out.sum().backward()
    assert all(info.numbers for info in copies.asked)
    assert torch.allclose(x.grad, torch.ones(3, 3))


def test_a_lazily_negated_view_and_a_plain_one_of_the_same_storage_come_back_right(copies):
    z = leaf(4).to(torch.complex64) * (1 + 2j)
    negated, plain = z.conj().imag, torch.view_as_real(z)
    assert negated.is_neg()
    first, second = back(negated, plain, choose=copies.choose)
    assert torch.equal(first, negated)
    assert torch.equal(second, plain)


@pytest.mark.parametrize("written", ["weight", "activation"])
def test_what_is_left_alone_and_then_written_to_is_refused_as_torch_does(written):
    def out(choose) -> torch.Tensor:
        weight = leaf(4)
        with encoded(choose) if choose else torch.enable_grad():
            activation = weight * 2
            result = (activation * activation * weight).sum()
        with torch.no_grad():
            {"weight": weight, "activation": activation}[written].mul_(2)
        return result

    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out(None).backward()
    with pytest.raises(RuntimeError, match=r"shape \(4,\) and torch.float32 was written to after"):
        out(lambda info: None).backward()


# ------------------------------------------------------------------ the facts


def test_the_facts_of_a_view_are_those_of_what_it_views():
    x = leaf(6, 4).exp()
    assert tensor_info(x[1:2, :1]) == tensor_info(x)
    assert tensor_info(x) == TensorInfo((6, 4), torch.float32, 24, True, "ExpBackward0", 0)
    assert tensor_info(x).bytes == 96
    assert tensor_info(torch.zeros(3).add_(1)) == TensorInfo((3,), torch.float32, 3, False, "", 1)


# ------------------------------------------------------------------ several backward passes


def third_power(x: torch.Tensor) -> torch.Tensor:
    y = x * 1
    return (y * y * y).sum()


def test_gradients_of_gradients_are_right(copies):
    x = leaf(5)
    with encoded(copies.choose):
        out = third_power(x)
        [first] = torch.autograd.grad(out, x, create_graph=True)
        [second] = torch.autograd.grad(first.sum(), x, create_graph=True)
    assert copies.encoded > 0
    assert torch.allclose(first, 3 * x**2)
    assert torch.allclose(second, 6 * x)
    assert torch.autograd.gradgradcheck(_encoded_copy(copies), leaf(3).double())


def _encoded_copy(copies):
    def function(x):
        with encoded(copies.choose):
            return (x * 1).sin() * x.exp().tanh()

    return function


def test_a_retained_graph_is_walked_twice(copies):
    x = leaf(5)
    with encoded(copies.choose):
        out = third_power(x)
    passes = [torch.autograd.grad(out, x, retain_graph=True)[0] for _ in range(2)]
    assert torch.equal(*passes)
    assert torch.allclose(passes[0], 3 * x**2)


def test_a_walk_through_a_graph_that_was_freed_is_refused_as_always(copies):
    with encoded(copies.choose):
        out = third_power(leaf(5))
    out.backward()
    with pytest.raises(RuntimeError, match="backward through the graph a second time"):
        out.backward()


def test_an_exception_inside_leaves_no_hook_behind(copies):
    with pytest.raises(ZeroDivisionError), encoded(copies.choose):
        math.floor(1 / 0)
    (leaf(3) * 2).sin()
    assert copies.asked == []


def test_of_two_contexts_the_inner_one_gets_the_tensors(copies):
    outer, x = Copies(), leaf(3)
    with encoded(outer.choose):
        with encoded(copies.choose):
            (x * 2).sin()
        assert (outer.encoded, copies.encoded) == (0, 1)
        (x * 2).sin()
    assert (outer.encoded, copies.encoded) == (1, 1)


@pytest.mark.parametrize(
    "module",
    [
        nn.Sequential(nn.Linear(8, 8), nn.ReLU(inplace=True), nn.Dropout(0.5), nn.Linear(8, 8)),
        nn.Sequential(nn.BatchNorm1d(8), nn.GELU(), nn.LayerNorm(8), nn.RMSNorm(8)),
        nn.TransformerEncoderLayer(8, 2, 16),
    ],
)
def test_with_copies_every_gradient_is_exact_to_the_bit(copies, module):
    x = leaf(6, 8)

    def gradients(choose) -> list[torch.Tensor]:
        torch.manual_seed(1)
        with encoded(choose) if choose else torch.enable_grad():
            out = module(x).square().sum()
        return list(torch.autograd.grad(out, [x, *module.parameters()]))

    exact, found = gradients(None), gradients(copies.choose)
    assert copies.encoded > 2
    assert all(map(torch.equal, exact, found))


def test_in_a_dry_run_the_same_is_encoded(copies):
    def run(copies: Copies) -> list[TensorInfo]:
        x = leaf(6, 4)
        with encoded(copies.choose):
            out = (x * 2).exp().t() @ (x @ x.t() @ x)
        out.sum().backward()
        return copies.asked

    real = run(copies)
    with memlab.dry_run():
        assert run(dry := Copies()) == real
    assert (dry.encoded, dry.decoded) == (copies.encoded, copies.decoded)


def test_attention_s_saved_tensors_are_of_five_storages(copies):
    q, k, v = (leaf(1, 2, 8, 16) * 1 for _ in range(3))
    with encoded(copies.choose):
        out = F.scaled_dot_product_attention(q, k, v)
    assert copies.encoded == 5  # and the log-sum-exp, and what comes out
    out.sum().backward()
