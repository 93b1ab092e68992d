"""Saved tensors: one encoding per storage and version, and no leaks."""

import gc
import math
import weakref
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
import torchgen
from close import assert_close
from torch import nn
from torchgen.packaged.autograd.load_derivatives import load_derivatives

import memlab
from memlab.internals.saved_tensors import TensorInfo, encoded, tensor_info


class Copies:
    """The simplest encoding: a copy. Counts calls, and references its copies weakly."""

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
    """Saves its inputs, and stores the unpacked tensors in `seen`."""

    seen: tuple[torch.Tensor, ...] = ()

    @staticmethod
    def forward(ctx, *tensors):
        ctx.save_for_backward(*tensors)
        return torch.zeros(())

    @staticmethod
    def backward(ctx, gradient):
        Saving.seen = ctx.saved_tensors
        return (None,) * len(Saving.seen)


def unpacked(*tensors: torch.Tensor, choose) -> tuple[torch.Tensor, ...]:
    """Return the tensors that backward unpacks after one operator saved `tensors`."""
    with encoded(choose):
        out = Saving.apply(*tensors)
    out.backward()
    seen, Saving.seen = Saving.seen, ()
    return seen


# ------------------------------------------------------------------ one encoding per storage


def test_a_storage_is_encoded_once_for_all_operators_and_views(copies):
    x = leaf(6, 4) * 2
    with encoded(copies.choose):
        out = x.sin() + (x.t() * x.t()).t() + x.cos()
    assert copies.encoded == len(copies.asked) == 1
    out.sum().backward()


def test_on_pack_is_called_for_each_operator_and_its_result_lives_as_long(copies):
    class Hold:
        pass

    x, holds, packed_sums = leaf(6, 4) * 2, weakref.WeakSet(), []

    def on_pack(decode):
        packed_sums.append(decode().sum())
        holds.add(hold := Hold())
        return hold

    with encoded(copies.choose, on_pack):
        out, other = x.sin().sum(), x.cos().sum()
        leaf(3).sin()  # saves a weight
    assert copies.encoded == 1
    assert [float(total) for total in packed_sums] == [float(x.detach().sum())] * 2
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
    [found] = unpacked(x, choose=copies.choose)
    assert copies.encoded == 1
    assert torch.equal(found, x)
    assert (found.stride(), found.storage_offset()) == (x.stride(), x.storage_offset())
    assert found.untyped_storage().data_ptr() != x.untyped_storage().data_ptr()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64, torch.complex64])
def test_the_dtype_comes_back(copies, dtype):
    x = leaf(5).to(dtype)
    [found] = unpacked(x, choose=copies.choose)
    assert found.dtype == dtype
    assert torch.equal(found, x)


def test_one_storage_in_two_dtypes_has_two_encodings(copies):
    x = leaf(4, 2) * 2
    again, as_complex = unpacked(x, torch.view_as_complex(x), choose=copies.choose)
    assert copies.encoded == 2
    assert torch.equal(again, x)
    assert torch.equal(torch.view_as_real(as_complex), x)


def test_views_that_are_unpacked_together_share_what_was_decoded(copies):
    x = leaf(4, 6) * 2
    first, second = unpacked(x, x.t(), choose=copies.choose)
    assert copies.decoded == 1
    assert first.data_ptr() == second.data_ptr()
    assert torch.equal(second, x.t())


def test_a_decoded_tensor_is_freed_with_its_last_use(copies):
    with encoded(copies.choose):
        out = (leaf(4) * 2).sin()
    for times in (1, 2, 3):
        out.sum().backward(retain_graph=True)
        assert copies.decoded == times


# ------------------------------------------------------------------ versions


def test_each_version_of_a_storage_has_its_own_encoding(copies):
    start = leaf(8)
    with encoded(copies.choose):
        x = start * 1
        first = x.sin()
        x.mul_(3)
        second = x.sin()
    assert copies.encoded == 2
    # Without hooks torch raises an error, because the first x is overwritten.
    [gradient] = torch.autograd.grad((first + second).sum(), start)
    wanted = start.detach().cos() + 3 * (3 * start.detach()).cos()
    assert_close(gradient, wanted)


def test_pieces_with_version_counters_of_their_own_have_their_own_encodings(copies):
    pieces, wanted, outs = torch.randn(6, 4).unsafe_chunk(2, 1), [], []
    with encoded(copies.choose):
        for piece in 3 * pieces:  # both have the same versions, at different times
            piece.mul_(3)
            wanted.append(piece.clone())
            outs.append(Saving.apply(piece, leaf(1)))
    for out, right in zip(outs, wanted, strict=True):
        out.backward()
        assert torch.equal(Saving.seen[0], right)


def test_a_tensor_and_its_data_have_their_own_encodings(copies):
    x, wanted, outs = torch.randn(6), [], []
    with encoded(copies.choose):
        data = x.data
        for alias in (x, data, x):  # x is at the version that data has had
            alias.mul_(2)
            wanted.append(x.clone())
            outs.append(Saving.apply(alias, leaf(1)))
    for out, right in zip(outs, wanted, strict=True):
        out.backward()
        assert torch.equal(Saving.seen[0], right)


def test_only_the_elements_of_a_base_with_holes_are_encoded(copies):
    pieces = (leaf(6, 8) * 2).unsafe_chunk(4, 1)
    seen = unpacked(pieces[1], pieces[2], pieces[2].unsqueeze(0), choose=copies.choose)
    assert [info.bytes for info in copies.asked] == [6 * 2 * 4] * 3
    for found, right in zip(seen, (pieces[1], pieces[2], pieces[2][None]), strict=True):
        assert torch.equal(found, right)


@pytest.mark.parametrize(
    "view",
    [
        lambda piece: piece.expand(5, 6, 2),
        lambda piece: piece.unfold(0, 3, 1),
        lambda piece: piece[:0],
        lambda piece: piece.as_strided((40,), (1,), 1),  # beyond the piece
        lambda piece: piece.detach().t(),
        lambda piece: piece.detach()[2:, 1],
        lambda piece: piece[3, 1],
    ],
)
def test_any_view_of_a_base_with_holes_comes_back(copies, view):
    x = view((leaf(6, 8) * 2).unsafe_chunk(4, 1)[1])
    anchor = leaf(1)  # a detached view has no graph of its own
    found, _ = unpacked(x, anchor, choose=copies.choose)
    assert torch.equal(found, x)


def test_a_reused_address_gets_a_new_encoding(copies):
    addresses, wanted, outs = set(), [], []
    start = leaf(1000)
    with encoded(copies.choose):
        for n in range(20):
            x = start * n
            addresses.add(x.data_ptr())
            outs.append(x.sin())
            wanted.append(n * x.detach().cos())
            del x
    assert len(addresses) < 20  # otherwise no address was reused
    assert copies.encoded == 20
    for out, right in zip(outs, wanted, strict=True):
        [gradient] = torch.autograd.grad(out.sum(), start, retain_graph=True)
        assert_close(gradient, right)


# ------------------------------------------------------------------ lifetimes


def test_the_original_is_freed_when_its_user_releases_it(copies):
    with encoded(copies.choose):
        x = leaf(100) * 2
        out = x.sin()
        storage = weakref.ref(x.untyped_storage())
        del x
    assert storage() is None
    out.sum().backward()


def test_an_encoding_is_freed_with_the_last_node_that_saved_its_storage(copies):
    gc.disable()  # reference cycles would keep it alive
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
def test_dropping_the_graph_frees_everything(copies, is_encoded):
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


def test_an_encoding_is_freed_with_the_graph_even_if_the_tensor_lives(copies):
    with encoded(copies.choose):
        x = leaf(100) * 2
        out = x.sin()
        del out
        assert len(copies.alive) == 0
        x.cos().sum().backward()
    assert copies.encoded == 2


# ------------------------------------------------------------------ tensors kept unchanged


@pytest.mark.parametrize("make", [lambda: nn.Parameter(torch.randn(4, 4)), lambda: leaf(4, 4)])
@pytest.mark.parametrize("view", [lambda w: w, lambda w: w.t(), lambda w: w[1:3, :2].unsqueeze(0)])
def test_weights_and_their_views_are_never_encoded(copies, make, view):
    weight = make()
    [found] = unpacked(view(weight), choose=copies.choose)
    assert copies.encoded == 0
    assert copies.asked[0].is_weight
    assert found.data_ptr() == view(weight).data_ptr()


def test_an_unencoded_tensor_is_the_same_memory():
    x = leaf(5) * 2
    [found] = unpacked(x, choose=lambda info: None)
    assert found.data_ptr() == x.data_ptr()


def test_an_encoder_may_return_none(copies):
    x = leaf(5) * 2
    [found] = unpacked(x, choose=lambda info: lambda numbers: None)
    assert found.data_ptr() == x.data_ptr()


def test_choose_is_not_called_for_sparse_tensors(copies):
    x = leaf(3, 3)
    sparse = torch.eye(3).to_sparse()
    with encoded(copies.choose):
        out = torch.sparse.mm(sparse, x)
    out.sum().backward()
    assert all(info.numel for info in copies.asked)
    assert_close(x.grad, torch.ones(3, 3))


class Wrapper(torch.Tensor):
    """A subclass without a storage of its own; its values are those of `inner`."""

    @staticmethod
    def __new__(cls, inner):
        return torch.Tensor._make_wrapper_subclass(cls, inner.shape)

    def __init__(self, inner):
        self.inner = inner

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        return cls(func(*(getattr(x, "inner", x) for x in args), **(kwargs or {})))


def test_choose_is_not_called_for_a_subclass_with_operators_of_its_own(copies):
    x = Wrapper(torch.randn(4))
    found, _ = unpacked(x, leaf(1) * 2, choose=copies.choose)
    assert torch.equal(found.inner, x.inner)
    assert [info.shape for info in copies.asked] == [(1,)]


def test_a_subclass_with_torchs_operators_is_encoded(copies):
    class Named(torch.Tensor):
        pass

    x = (leaf(4) * 2).as_subclass(Named)
    [found] = unpacked(x, choose=copies.choose)
    assert copies.encoded == 1
    assert torch.equal(found, x.as_subclass(torch.Tensor))


def test_a_lazily_negated_view_and_a_plain_one_of_the_same_storage_come_back_right(copies):
    z = leaf(4).to(torch.complex64) * (1 + 2j)
    negated, plain = z.conj().imag, torch.view_as_real(z)
    assert negated.is_neg()
    first, second = unpacked(negated, plain, choose=copies.choose)
    assert torch.equal(first, negated)
    assert torch.equal(second, plain)


@pytest.mark.parametrize("written", ["weight", "activation"])
def test_writing_to_an_unencoded_tensor_is_an_error_as_in_torch(written):
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


# ------------------------------------------------------------------ RReLU


def test_rrelu_in_training_is_refused_only_where_its_noise_was_encoded(copies):
    x = leaf(20)
    layer = nn.RReLU()
    for choose, training in ((copies.choose, False), (lambda info: None, True)):
        grads = []
        for around in (torch.enable_grad(), encoded(choose)):
            torch.manual_seed(1)
            with around:
                out = layer.train(training)(x * 2)
            grads += torch.autograd.grad(out.sum(), x)
        assert torch.equal(*grads)
    with encoded(copies.choose):
        out = layer.train()(x * 2)
    with pytest.raises(RuntimeError, match="run RReLU outside of the block that offloads"):
        out.sum().backward()


# torch saves these before the kernel updates them, but their backward pass reads them only in
# evaluation, which does not update them.
RUNNING_STATISTICS = {"_native_batch_norm_legit", "_batch_norm_with_update"}


def test_rrelu_is_torchs_only_operator_that_saves_a_tensor_before_filling_it():
    files = Path(torchgen.__file__).parent / "packaged"
    derivatives, _ = load_derivatives(
        str(files / "autograd/derivatives.yaml"),
        str(files / "ATen/native/native_functions.yaml"),
        str(files / "ATen/native/tags.yaml"),
    )
    found = set()
    for info in (info for by_key in derivatives.values() for info in by_key.values()):
        saved = {str(x.nctype.name) for each in info.derivatives for x in each.saved_inputs}
        arguments = info.func.func.arguments
        written = {x.name for x in arguments.flat_all if x.is_write} - {"self"}
        if saved & written:
            found.add(str(info.func.func.name))
    assert found - RUNNING_STATISTICS == {"rrelu_with_noise", "rrelu_with_noise_"}


# ------------------------------------------------------------------ tensor info


def test_tensor_info_of_a_view_describes_its_base():
    x = leaf(6, 4).exp()
    assert tensor_info(x[1:2, :1]) == tensor_info(x)
    assert tensor_info(x) == TensorInfo((6, 4), torch.float32, 24, True, "ExpBackward0", 0)
    assert tensor_info(x).bytes == 96
    assert tensor_info(torch.zeros(3).add_(1)) == TensorInfo((3,), torch.float32, 3, False, "", 1)


# ------------------------------------------------------------------ several backward passes


def third_power(x: torch.Tensor) -> torch.Tensor:
    y = x * 1
    return (y * y * y).sum()


def test_second_derivatives_are_right(copies):
    x = leaf(5)
    with encoded(copies.choose):
        out = third_power(x)
        [first] = torch.autograd.grad(out, x, create_graph=True)
        [second] = torch.autograd.grad(first.sum(), x, create_graph=True)
    assert copies.encoded > 0
    assert_close(first, 3 * x**2)
    assert_close(second, 6 * x)
    assert torch.autograd.gradgradcheck(_encoded_copy(copies), leaf(3).double())


def _encoded_copy(copies):
    def function(x):
        with encoded(copies.choose):
            return (x * 1).sin() * x.exp().tanh()

    return function


def test_a_retained_graph_allows_two_backward_passes(copies):
    x = leaf(5)
    with encoded(copies.choose):
        out = third_power(x)
    passes = [torch.autograd.grad(out, x, retain_graph=True)[0] for _ in range(2)]
    assert torch.equal(*passes)
    assert_close(passes[0], 3 * x**2)


def test_backward_through_a_freed_graph_is_an_error(copies):
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


def test_the_inner_of_two_contexts_gets_the_tensors(copies):
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
def test_gradients_with_copies_are_bitwise_equal(copies, module):
    x = leaf(6, 8)

    def gradients(choose) -> list[torch.Tensor]:
        torch.manual_seed(1)
        with encoded(choose) if choose else torch.enable_grad():
            out = module(x).square().sum()
        return list(torch.autograd.grad(out, [x, *module.parameters()]))

    exact, found = gradients(None), gradients(copies.choose)
    assert copies.encoded > 2
    assert all(map(torch.equal, exact, found))


def test_a_dry_run_encodes_the_same_tensors(copies):
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


def test_attention_saves_five_storages(copies):
    q, k, v = (leaf(1, 2, 8, 16) * 1 for _ in range(3))
    with encoded(copies.choose):
        out = F.scaled_dot_product_attention(q, k, v)
    assert copies.encoded == 5  # q, k, v, output, log-sum-exp
    out.sum().backward()
