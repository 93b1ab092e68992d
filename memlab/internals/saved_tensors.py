"""Saved tensors: encode the tensors that autograd keeps for backward.

Saves    each saved storage takes the encoding's size, once, however many operators save views.
Costs    encoding in the forward pass, and decoding for each backward operator that unpacks it.
Source   torch's saved-tensor hooks. One encoding shared by all operators: Liu et al. 2022 (GACT),
         arXiv 2206.11357.

Autograd passes every tensor it saves to a pack hook and keeps the hook's result instead. When
backward needs the tensor, an unpack hook must return it. Activation compression (fewer bits) and
activation offloading (another device) are such encodings.

    with encoded(choose):              encode = choose(info)        or None: keep the tensor
        loss = model(batch)            decode = encode(flat)        or None: cannot encode
    loss.backward()                    flat = decode()

`flat` is the whole storage as a 1-D tensor. Pitfalls:

    duplicates             x and x.T share a storage and get one encoding; it is freed with the
                           last graph node that uses it
    reused addresses       a new storage may get a dead storage's address, so encodings are looked
                           up by weak references to storage objects, never by address
    in-place writes        x, x.mul_(2), x: an encoding is valid for one version of a storage
    leaks                  hooks and encodings must not reference the original; a decoded tensor
                           must not outlive its use, but simultaneous uses share it
    weights                stay in memory anyway, so encoding them would add memory
    version checks         torch does not check saved tensors for in-place writes when hooks are
                           set, so tensors kept as they are get the check here. Encoded tensors may
                           be overwritten, because the encoding has its own copy

torch counts versions per tensor and its views. `x.data` has its own counter, so neither torch nor
this module detects writes through it.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple
from weakref import WeakValueDictionary

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.weak import WeakIdKeyDictionary, WeakIdRef

from memlab.internals.torch_internals import is_traceable_wrapper_subclass


class TensorInfo(NamedTuple):
    """Properties of a storage when its first tensor is about to be saved.

    For a view, shape, gradient and operator describe the base tensor.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    numel: int  # elements in the whole storage
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
    """Describe a tensor's storage."""
    base = tensor if tensor._base is None else tensor._base
    return TensorInfo(
        shape=tuple(base.shape),
        dtype=tensor.dtype,
        numel=tensor.untyped_storage().nbytes() // tensor.itemsize,
        requires_grad=base.requires_grad,
        operator="" if base.grad_fn is None else base.grad_fn.name(),
        version=tensor._version,
        is_parameter=isinstance(base, nn.Parameter),
    )


@contextmanager
def encoded(choose: Choose, on_pack: OnPack | None = None) -> Iterator[None]:
    """Encode tensors that operators inside the block save for backward.

    `choose` is called once for each storage, version and dtype. Weights are never encoded, whatever
    it returns; it is not called for sparse tensors and tensor subclasses. When several saved-tensor
    hooks are nested, only the innermost sees a tensor.

    `on_pack` is called with the decoder each time an operator saves a tensor of an encoded storage.
    Its result lives as long as that operator holds the tensor.
    """
    hooks = _Hooks(choose, on_pack)
    with saved_tensors_hooks(hooks.pack, hooks.unpack):
        yield


class _Hooks:
    """The graph owns the encodings; the hooks hold weak references."""

    def __init__(self, choose: Choose, on_pack: OnPack | None) -> None:
        self._choose, self._on_pack = choose, on_pack
        self._records = WeakIdKeyDictionary()  # storage → _StorageRecord

    def pack(self, tensor: Tensor) -> "_EncodedView | _Unencoded":
        encoding = self._encoding_of(tensor) if _is_plain(tensor) else None
        if encoding is None:
            return _Unencoded(tensor)
        pack_result = None if self._on_pack is None else self._on_pack(encoding.decode)
        layout = tensor.size(), tensor.stride(), tensor.storage_offset()
        return _EncodedView(encoding, *layout, pack_result)

    def unpack(self, packed: "_EncodedView | _Unencoded") -> Tensor:
        return packed.tensor()

    def _encoding_of(self, tensor: Tensor) -> "_Encoding | None":
        record = self._records.setdefault(tensor.untyped_storage(), _StorageRecord())
        key = tensor._version, tensor.dtype
        encoding = record.encodings.get(key)
        if encoding is None and key not in record.unencoded:
            encoding = self._encode(tensor)
            if encoding is None:
                record.unencoded.add(key)
            else:
                record.encodings[key] = encoding
        return encoding

    def _encode(self, tensor: Tensor) -> "_Encoding | None":
        info = tensor_info(tensor)
        encode = self._choose(info)
        if encode is None or info.is_weight:
            return None
        decode = encode(tensor.detach().as_strided((info.numel,), (1,), 0))
        return None if decode is None else _Encoding(decode)


class _StorageRecord:
    """A storage's encodings, by (version, dtype)."""

    def __init__(self) -> None:
        self.encodings: WeakValueDictionary[tuple[int, torch.dtype], _Encoding]
        self.encodings = WeakValueDictionary()
        self.unencoded: set[tuple[int, torch.dtype]] = set()


def _is_plain(tensor: Tensor) -> bool:
    """Return whether a tensor's elements are the values in its storage."""
    is_lazy = tensor.is_neg() or tensor.is_conj()  # readers must change the sign
    is_dense = tensor.layout is torch.strided and not tensor.is_nested
    return is_dense and not is_lazy and not is_traceable_wrapper_subclass(tensor)


# ------------------------------------------------------------------ kept by the graph


class _EncodedView(NamedTuple):
    """A saved tensor as a view of an encoded storage."""

    encoding: "_Encoding"
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    pack_result: Any

    def tensor(self) -> Tensor:
        return self.encoding.flat().as_strided(self.size, self.stride, self.offset)


class _Encoding:
    """An encoded storage and its decoder."""

    __slots__ = ("__weakref__", "_decoded", "_dtype_and_device", "decode")

    def __init__(self, decode: Decode) -> None:
        self.decode = decode
        self._decoded: Callable[[], torch.UntypedStorage | None] = lambda: None

    def flat(self) -> Tensor:
        """Return the decoded storage as a 1-D tensor (n,), shared with earlier calls while in use.

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
