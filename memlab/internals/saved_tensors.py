"""Saved tensors: encode the tensors that autograd keeps for backward.

Saves    each saved tensor takes the encoding's size, once, however many operators save views.
Costs    encoding in the forward pass, and decoding for each backward operator that unpacks it.
Source   torch's saved-tensor hooks. One encoding shared by all operators: Liu et al. 2022 (GACT),
         arXiv 2206.11357.

Autograd passes every tensor it saves to a pack hook and keeps the hook's result instead. When
backward needs the tensor, an unpack hook must return it. Activation compression (fewer bits) and
activation offloading (another device) are such encodings.

    with encoded(choose):              encode = choose(info)        or None: keep the tensor
        loss = model(batch)            decode = encode(flat)        or None: cannot encode
    loss.backward()                    flat = decode()

`flat` is the memory of a base tensor, and so of all its views, as a 1-D tensor. Pitfalls:

    duplicates             x and x.T have the same base and get one encoding; it is freed with the
                           last graph node that uses it
    reused addresses       a new tensor may get a dead tensor's address, so encodings are looked up
                           by weak references to base tensors and storages, never by address
    in-place writes        x, x.mul_(2), x: an encoding is valid for one version of a base
    several counters       `unsafe_chunk` (recurrent layers), `x.data` and slices of `x.detach()`
                           make tensors that share a storage, but not a base. Equal versions of
                           two bases say nothing, so each base has its own encodings
    holes                  the base may be a few columns of a storage; only its elements are encoded
    leaks                  hooks and encodings must not reference the original; a decoded tensor
                           must not outlive its use, but simultaneous uses share it
    weights                stay in memory anyway, so encoding them would add memory
    version checks         torch does not check saved tensors for in-place writes when hooks are
                           set, so tensors kept as they are get the check here. Encoded tensors may
                           be overwritten, because the encoding has its own copy

A write through `x.data` does not change the version of x, so neither torch nor this module detects
it. If x was saved before the write, later operators that save x share that encoding.
"""

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple
from weakref import WeakValueDictionary

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.weak import WeakIdKeyDictionary, WeakIdRef

from memlab.internals.torch_internals import FakeTensor, current_autograd_node


class TensorInfo(NamedTuple):
    """Properties of the memory that is about to be encoded, when its first tensor is saved.

    For a view, shape, gradient and operator describe the base tensor.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    numel: int  # elements to encode
    requires_grad: bool
    operator: str  # autograd's name, such as "MulBackward0"; "" without a graph
    version: int  # counts in-place writes
    is_parameter: bool = False

    @property
    def is_weight(self) -> bool:
        """True for a leaf that requires grad and for an `nn.Parameter`, frozen or not."""
        return self.is_parameter or (self.requires_grad and not self.operator)

    @property
    def bytes(self) -> int:
        return self.numel * self.dtype.itemsize


Decode = Callable[[], Tensor]
Encode = Callable[[Tensor], Decode | None]
Choose = Callable[[TensorInfo], Encode | None]
OnPack = Callable[[Decode], Any]


def tensor_info(tensor: Tensor) -> TensorInfo:
    """Describe the memory that is encoded for a tensor."""
    base = _base(tensor)
    return TensorInfo(
        shape=tuple(base.shape),
        dtype=tensor.dtype,
        numel=_layout(tensor).numel,
        requires_grad=base.requires_grad,
        operator="" if base.grad_fn is None else base.grad_fn.name(),
        version=tensor._version,
        is_parameter=isinstance(base, nn.Parameter),
    )


@contextmanager
def encoded(choose: Choose, on_pack: OnPack | None = None) -> Iterator[None]:
    """Encode tensors that operators inside the block save for backward.

    `choose` is called once for each base tensor, version and dtype. Weights are never encoded,
    whatever it returns; it is not called for sparse tensors and for subclasses with operators of
    their own. When several saved-tensor hooks are nested, only the innermost sees a tensor.

    `on_pack` is called with the decoder each time an operator saves a tensor that is encoded. Its
    result lives as long as that operator holds the tensor.

    Raises RuntimeError in the backward pass of RReLU if its noise was encoded: see
    `is_filled_after_saving`.
    """
    hooks = _Hooks(choose, on_pack)
    with saved_tensors_hooks(hooks.pack, hooks.unpack):
        yield


class _Hooks:
    """The graph owns the encodings; the hooks hold weak references."""

    def __init__(self, choose: Choose, on_pack: OnPack | None) -> None:
        self._choose, self._on_pack = choose, on_pack
        self._records = WeakIdKeyDictionary()  # base tensor → _Record

    def pack(self, tensor: Tensor) -> "_EncodedView | _Unencoded":
        if not _is_plain(tensor):
            return _Unencoded(tensor)
        layout = _layout(tensor)
        encoding = self._encoding_of(tensor, layout)
        if encoding is None:
            return _Unencoded(tensor)
        pack_result = None if self._on_pack is None else self._on_pack(encoding.decode)
        view = tensor.size(), layout.stride, layout.offset
        return _EncodedView(encoding, *view, tensor.requires_grad, pack_result)

    def unpack(self, packed: "_EncodedView | _Unencoded") -> Tensor:
        return packed.tensor()

    def _encoding_of(self, tensor: Tensor, layout: "_Layout") -> "_Encoding | None":
        record = self._records.setdefault(_base(tensor), _Record())
        key = (WeakIdRef(tensor.untyped_storage()), tensor._version, tensor.dtype, layout.memory)
        encoding = record.encodings.get(key)
        if encoding is None and key not in record.unencoded:
            encoding = self._encode(tensor, layout)
            if encoding is None:
                record.unencoded.add(key)
            else:
                record.encodings[key] = encoding
        return encoding

    def _encode(self, tensor: Tensor, layout: "_Layout") -> "_Encoding | None":
        info = tensor_info(tensor)
        encode = self._choose(info)
        if encode is None or info.is_weight:
            return None
        decode = encode(layout.flat(tensor.detach()))
        return None if decode is None else _Encoding(decode)


class _Record:
    """A base tensor's encodings, by storage, version, dtype and memory."""

    def __init__(self) -> None:
        self.encodings: WeakValueDictionary[tuple[Any, ...], _Encoding] = WeakValueDictionary()
        self.unencoded: set[tuple[Any, ...]] = set()


def _base(tensor: Tensor) -> Tensor:
    return tensor if tensor._base is None else tensor._base


def _is_plain(tensor: Tensor) -> bool:
    """Return whether a tensor's elements are the values in its storage."""
    is_lazy = tensor.is_neg() or tensor.is_conj()  # readers must change the sign
    is_dense = tensor.layout is torch.strided and not tensor.is_nested and not tensor.is_quantized
    has_torchs_operators = type(tensor).__torch_dispatch__ is Tensor.__torch_dispatch__
    return is_dense and not is_lazy and (has_torchs_operators or isinstance(tensor, FakeTensor))


# ------------------------------------------------------------------ which memory to encode


class _Layout(NamedTuple):
    """The memory that is encoded for a tensor, and the tensor's place in it."""

    memory: Any  # the range of the storage, in elements; or the tensor's size, stride and offset
    numel: int
    stride: tuple[int, ...] | None  # None: contiguous
    offset: int

    def flat(self, tensor: Tensor) -> Tensor:
        """Return the memory as a 1-D tensor: a view, or a copy if the tensor's base has holes."""
        if self.stride is None:
            return tensor.reshape(-1)
        return tensor.as_strided((self.numel,), (1,), self.memory[0])


def _layout(tensor: Tensor) -> _Layout:
    """Choose the memory of the base, for all its views; if it has holes, the tensor's own."""
    first, last = _range(tensor)
    base, scale = _base(tensor), tensor.itemsize
    for owner in (base, tensor):
        start, stop = (end * owner.itemsize // scale for end in _range(owner))
        has_holes = (stop - start) * scale > owner.nbytes
        if not has_holes and start <= first and last <= stop:  # as_strided may leave its base
            return _Layout((start, stop), stop - start, tensor.stride(), first - start)
    own = (tensor.size(), tensor.stride(), tensor.storage_offset())
    return _Layout(own, tensor.numel(), None, 0)


def _range(tensor: Tensor) -> tuple[int, int]:
    """Return the first element in the storage, and the one after the last."""
    first: Any = tensor.storage_offset()
    if not tensor.numel():
        return first, first
    steps = zip(tensor.size(), tensor.stride(), strict=True)
    return first, first + 1 + sum((size - 1) * stride for size, stride in steps)


# ------------------------------------------------------------------ RReLU


def is_filled_after_saving() -> bool:
    """Return whether backward now unpacks tensors for RReLU in training.

    RReLU is torch's only operator that saves a tensor, its noise, before its kernel fills it, so
    hooks see uninitialized memory. (BatchNorm's running statistics are saved before their update,
    but its backward pass in training does not read them.)
    """
    node: Any = current_autograd_node()
    return node is not None and node.name().startswith("RreluWithNoise") and node._saved_training


# ------------------------------------------------------------------ kept by the graph


class _EncodedView(NamedTuple):
    """A saved tensor as a view of encoded memory."""

    encoding: "_Encoding"
    size: tuple[int, ...]
    stride: tuple[int, ...] | None
    offset: int
    requires_grad: bool
    pack_result: Any

    def tensor(self) -> Tensor:
        if not self.requires_grad and is_filled_after_saving():
            raise RuntimeError(
                "got RReLU in training, whose noise torch saves for backward before filling it "
                "(pytorch#193671), so that the noise could not be encoded; run RReLU outside of "
                "the block that offloads or compresses activations"
            )
        flat = self.encoding.flat()
        if self.stride is None:
            return flat[: math.prod(self.size)].view(self.size)
        return flat.as_strided(self.size, self.stride, self.offset)


class _Encoding:
    """Encoded memory and its decoder."""

    __slots__ = ("__weakref__", "_decoded", "_dtype_and_device", "decode")

    def __init__(self, decode: Decode) -> None:
        self.decode = decode
        self._decoded: Callable[[], torch.UntypedStorage | None] = lambda: None
        self._dtype_and_device: tuple[torch.dtype, torch.device]

    def flat(self) -> Tensor:
        """Return the decoded memory as a 1-D tensor (n,), shared with earlier calls while in use.

        The cache refers to the storage, because autograd wraps the tensor in another tensor object.
        """
        if (storage := self._decoded()) is not None:
            dtype, device = self._dtype_and_device
            return torch.empty(0, dtype=dtype, device=device).set_(storage)
        flat = self.decode()
        self._decoded = WeakIdRef(flat.untyped_storage())
        self._dtype_and_device = flat.dtype, flat.device
        return flat


class _Unencoded:
    """A tensor saved as it is, with the version check that torch skips under hooks."""

    __slots__ = ("_tensor", "_version")

    def __init__(self, tensor: Tensor) -> None:
        self._tensor = tensor.detach()  # an output with its graph would be a reference cycle
        self._version = tensor._version

    def tensor(self) -> Tensor:
        if self._tensor._version != self._version:
            raise RuntimeError(
                f"a tensor of shape {tuple(self._tensor.shape)} and {self._tensor.dtype} was "
                f"written to after it had been saved for backward; create a new tensor instead, "
                f"such as x * 2 in place of x.mul_(2)"
            )
        return self._tensor
