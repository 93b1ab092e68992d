"""Saved tensors: what autograd keeps for backward, kept in another form.

Saves    what the form saves: of each storage once, however many operators save views of it.
Costs    an encoding in the forward pass, a decoding for each operator of backward that asks.
Source   torch's saved-tensor hooks; one encoding for all that save a tensor: Liu et al. 2022
         (GACT), arXiv 2206.11357.

Autograd hands every tensor that it is about to save to a hook, and what the hook returns is saved
in its place; when backward wants the tensor, another hook has to come up with it. Some techniques
are no more than an encoding of what passes by: in fewer bits (compression), or in another place
(offloading).

    with encoded(choose):              encode = choose(facts)       or None: leave it as it is
        loss = model(batch)            decode = encode(numbers)     or None: it cannot
    loss.backward()                    numbers = decode()

`numbers` are all those of a storage, flat. What is easily done wrong:

    the same bytes twice   x and x.T, saved by two operators, are one storage and get one encoding;
                           it dies with the last of the graph's nodes that hold it
    another's bytes        a storage dies, the next gets its address: encodings are found by the
                           storage as an object, weakly, never by a number
    the bytes of before    x, x.mul_(2), x: an encoding is of one version of a storage
    the original, held     neither hook nor encoding may refer to it; nor may a decoding outlive its
                           use, but two that use it at the same time share one
    weights                are alive anyway, and an encoding would come on top
    no check any more      with hooks, torch does not notice that a saved tensor has been written
                           to: that of what is left as it is, is checked here. What is encoded may
                           be written to; its bytes are of the right moment

torch counts versions for a tensor and all its views. `x.data` has a count of its own: who writes
by way of it can make torch, and this, take one content for another.
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


class Facts(NamedTuple):
    """What is known of a storage when the first tensor of it is about to be saved.

    If that is a view, shape, gradient and operator are those of the tensor that it is a view of.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    numbers: int  # of the whole storage
    requires_grad: bool
    operator: str  # that made it, in autograd's words, as "MulBackward0"; "" where it has no graph
    version: int  # how often it was written to in place
    is_parameter: bool = False

    @property
    def is_weight(self) -> bool:
        """A leaf that requires a gradient, or an `nn.Parameter`, which may be frozen."""
        return self.is_parameter or (self.requires_grad and not self.operator)

    @property
    def bytes(self) -> int:
        return self.numbers * self.dtype.itemsize


Decode = Callable[[], Tensor]
Encode = Callable[[Tensor], Decode | None]
Choose = Callable[[Facts], Encode | None]
Note = Callable[[Decode], Any]


def facts_of(tensor: Tensor) -> Facts:
    """The facts by which a plan decides."""
    origin = tensor if tensor._base is None else tensor._base
    return Facts(
        shape=tuple(origin.shape),
        dtype=tensor.dtype,
        numbers=tensor.untyped_storage().nbytes() // tensor.itemsize,
        requires_grad=origin.requires_grad,
        operator="" if origin.grad_fn is None else origin.grad_fn.name(),
        version=tensor._version,
        is_parameter=isinstance(origin, nn.Parameter),
    )


@contextmanager
def encoded(choose: Choose, note: Note | None = None) -> Iterator[None]:
    """Encode what operators inside `with` save for backward, as `choose` decides.

    `note` is told of each tensor that an operator saves of an encoded storage, the first and every
    other; what it returns lives as long as the operator's hold on that tensor.

    `choose` is asked once about each storage, version and dtype. Weights stay as they are, whatever
    it says, and it is not asked about sparse tensors and subclasses. Of hooks inside hooks, these
    or others, the innermost alone gets to see a tensor.
    """
    hooks = _Hooks(choose, note)
    with saved_tensors_hooks(hooks.pack, hooks.unpack):
        yield


class _Hooks:
    """Whose encodings live in the graph; they are known here by weak references."""

    def __init__(self, choose: Choose, note: Note | None) -> None:
        self._choose, self._note = choose, note
        self._known = WeakIdKeyDictionary()  # storage: what is _Known of it

    def pack(self, tensor: Tensor) -> "_View | _Untouched":
        encoding = self._encoding_of(tensor) if _is_plain(tensor) else None
        if encoding is None:
            return _Untouched(tensor)
        noted = None if self._note is None else self._note(encoding.decode)
        return _View(encoding, tensor.size(), tensor.stride(), tensor.storage_offset(), noted)

    def unpack(self, packed: "_View | _Untouched") -> Tensor:
        return packed.tensor()

    def _encoding_of(self, tensor: Tensor) -> "_Encoding | None":
        known = self._known.setdefault(tensor.untyped_storage(), _Known())
        key = tensor._version, tensor.dtype
        encoding = known.encodings.get(key)
        if encoding is None and key not in known.left_alone:
            encoding = self._encode(tensor)
            if encoding is None:
                known.left_alone.add(key)
            else:
                known.encodings[key] = encoding
        return encoding

    def _encode(self, tensor: Tensor) -> "_Encoding | None":
        facts = facts_of(tensor)
        encode = self._choose(facts)
        if encode is None or facts.is_weight:
            return None
        decode = encode(tensor.detach().as_strided((facts.numbers,), (1,), 0))
        return None if decode is None else _Encoding(decode)


class _Known:
    """What has become of one storage, by (version, dtype)."""

    def __init__(self) -> None:
        self.encodings: WeakValueDictionary[tuple[int, torch.dtype], _Encoding]
        self.encodings = WeakValueDictionary()
        self.left_alone: set[tuple[int, torch.dtype]] = set()


def _is_plain(tensor: Tensor) -> bool:
    """Whether its numbers are what its storage holds."""
    is_lazy = tensor.is_neg() or tensor.is_conj()  # the sign to be changed by whoever reads
    is_dense = tensor.layout is torch.strided and not tensor.is_nested
    return is_dense and not is_lazy and not is_traceable_wrapper_subclass(tensor)


# ------------------------------------------------------------------ what the graph holds


class _View(NamedTuple):
    """A tensor, as a way to look at an encoded storage."""

    encoding: "_Encoding"
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    noted: Any

    def tensor(self) -> Tensor:
        return self.encoding.numbers().as_strided(self.size, self.stride, self.offset)


class _Encoding:
    """A storage in its other form."""

    __slots__ = ("__weakref__", "_decoded", "_kind", "decode")

    def __init__(self, decode: Decode) -> None:
        self.decode = decode
        self._decoded: Callable[[], torch.UntypedStorage | None] = lambda: None

    def numbers(self) -> Tensor:
        """(n,): decoded anew, unless somebody still holds what was decoded before.

        What they hold is the storage: autograd wraps a tensor of its own around it.
        """
        if (storage := self._decoded()) is not None:
            dtype, device = self._kind
            return torch.empty(0, dtype=dtype, device=device).set_(storage)
        numbers = self.decode()
        self._decoded = WeakIdRef(numbers.untyped_storage())
        self._kind = numbers.dtype, numbers.device
        return numbers


class _Untouched:
    """A tensor as it is, and the check that torch leaves out where there are hooks."""

    __slots__ = ("_tensor", "_version")

    def __init__(self, tensor: Tensor) -> None:
        self._tensor = tensor.detach()  # with its graph, an output would hold what holds it
        self._version = tensor._version

    def tensor(self) -> Tensor:
        if self._tensor._version != self._version:
            raise RuntimeError(
                f"a tensor of shape {tuple(self._tensor.shape)} and {self._tensor.dtype} was "
                f"written to after it had been saved for backward; write into a new one, such as "
                f"x * 2 in place of x.mul_(2)"
            )
        return self._tensor
