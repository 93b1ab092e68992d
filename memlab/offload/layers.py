"""Streamed layers: keep a layer's weights in a store, and load them only while it runs.

Saves    the weights of all layers but two: the running layer and the prefetched next one.
Costs    loading the weights twice a step, for forward and backward; three times if backward
         recomputes segments of several layers. Loads that computation does not hide add time: the
         forward pass of a layer with N weights and T tokens has 2·N·T operations to hide 2·N or
         4·N bytes.
Source   Pudipeddi et al. 2020 (L2L), arXiv 2002.05645; Rajbhandari et al. 2021 (ZeRO-Infinity),
         arXiv 2104.07857.

    streamed = stream_layers(model, store)
    loss = model(tokens, targets)       # runs layers 0, 1, 2, …, and prefetches the next
    loss.backward()                     # …, 2, 1, 0

An offloaded weight keeps its tensor and empties its storage. Tensors that autograd saved are views
of it, so backward finds the values there again. Loading bypasses autograd, which would otherwise
see an in-place change of saved tensors.

- An optimizer that steps in backward works unchanged. A weight whose version changed is written to
  the store before its storage is emptied.
- An OffloadedOptimizer with `weights=True` steps its own copies after backward, and writes the
  rounded weights to the store.
- Any other optimizer raises an error, because the weights are offloaded.
- Other code that reads or changes an offloaded weight gets an error. torch does not check a
  tensor's storage, and would crash the process. Use `with streamed.present():` there.

These stay on the device: gradients (unless `gradients=True` in OffloadedOptimizer), weights outside
of layers (embedding, last norm, unembedding), and copies. For example, autocast caches its casts
until the end of the forward pass, and autograd keeps them longer.
"""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any
from weakref import WeakMethod, ref

import torch
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.weak import WeakIdKeyDictionary

from memlab.internals.shards import require_no_dtensors
from memlab.internals.torch_internals import (
    DisableTorchFunctionSubclass,
    allow_data_access,
    exclude_from_dynamo,
    in_backward,
    storage_users,
    tree_leaves,
    when_backward_ends,
)
from memlab.offload.stores import Store
from memlab.offload.unreadable import make_readable, make_unreadable

_STREAMS = WeakIdKeyDictionary()  # weight: weak reference to its StreamedLayers


def stream_layers(
    model: nn.Module, store: Store, layers: Iterable[nn.Module] | None = None
) -> "StreamedLayers":
    """Move the weights of the model's layers to the store, and load each layer when it runs.

    `layers` are modules in the order of execution; by default, the members of the model's only
    `nn.ModuleList`. Raises ValueError if there is none or several, and if a layer shares a weight
    with another layer or with the rest of the model.
    """
    return StreamedLayers(model, store, _module_list(model) if layers is None else layers)


def stream_of(weight: Tensor) -> "StreamedLayers | None":
    """Return the StreamedLayers that stream this weight, or None."""
    reference = _STREAMS.get(weight)
    return None if reference is None else reference()


def is_offloaded(weight: Tensor) -> bool:
    """Return whether the weight's storage is empty."""
    return weight.untyped_storage().nbytes() == 0 < weight.numel()


@dataclass
class _Layer:
    """The storages of a layer, each represented by its first weight."""

    module: nn.Module
    weights: list[Tensor]
    names: list[str]
    keys: list[str]
    bytes: list[int] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)  # of the weights when they were loaded
    storages: list[Any] = field(default_factory=list)  # the stream's own, one for each weight
    aliases: WeakIdKeyDictionary = field(default_factory=WeakIdKeyDictionary)  # of state dicts

    def allocate(self, number: int) -> None:
        allow_data_access(self.storages[number])
        self.storages[number].resize_(self.bytes[number])

    def own_storage(self, number: int) -> None:
        """Move a weight to a new storage: other code may read the one that it had, or share it."""
        weight = self.weights[number]
        old, size = weight.untyped_storage()._cdata, self.bytes[number]
        new = torch.empty(size, dtype=torch.uint8, device=weight.device).untyped_storage()
        for each in self.module.parameters():
            if each.untyped_storage()._cdata == old:
                empty = torch.empty(0, dtype=each.dtype, device=each.device)
                each.data = empty.set_(new, each.storage_offset(), each.shape, each.stride())
        self.storages[number] = new

    def leave_kept_storages(self) -> None:
        """Give up the storages that other tensors than the known readers share, such as a view or a
        graph that a caller keeps: they keep their values, and the weights get storages anew."""
        for number, storage in enumerate(self.storages):
            if storage is None:
                continue
            at = storage._cdata
            known = [each for each in self.readers() if each.untyped_storage()._cdata == at]
            if storage_users(storage) > len(known):
                self.storages[number] = None

    def readers(self, others: Iterable[Any] = ()) -> list[Tensor]:
        """Return the parameters, known aliases and `others` that share the stream's storages."""
        own = {storage._cdata for storage in self.storages if storage is not None}
        tensors = (*self.module.parameters(), *self.aliases, *others)
        return [
            tensor
            for tensor in tensors
            if isinstance(tensor, Tensor) and tensor.untyped_storage()._cdata in own
        ]

    def flat_storage(self, number: int) -> list[Tensor]:
        """Return the whole storage of a weight, flat, as an `out` argument of the store."""
        with DisableTorchFunctionSubclass():  # it may be offloaded: a prefetch fills it
            weight = self.weights[number].data
        return [weight.as_strided((self.bytes[number] // weight.itemsize,), (1,), 0)]


class StreamedLayers:
    """The streamed layers of a model; `remove()` loads all of them for good.

    Inside `with streamed.present():` all weights are on the device, to save, load or inspect. At
    the end, changes are written to the store.
    """

    def __init__(self, model: nn.Module, store: Store, layers: Iterable[nn.Module]) -> None:
        self.store = store
        self._layers = _with_weights(model, list(layers))
        self._prefetching: set[int] = set()
        self._loaded = set(range(len(self._layers)))
        self._backward_layer = 0  # the last layer whose backward has started
        self._present = 0  # how many `present()` are open
        self._free_queued = False
        self._hooks: list[Any] = [
            model.register_forward_hook(self._forward_ends),
            model.register_state_dict_pre_hook(self._require_present),
            model.register_load_state_dict_pre_hook(self._require_present),
            register_optimizer_step_pre_hook(_Guard(self)),
        ]
        for number, layer in enumerate(self._layers):
            self._hooks += (
                layer.module.register_forward_pre_hook(partial(self._before_forward, number)),
                layer.module.register_forward_hook(partial(self._after_forward, number)),
                layer.module.register_state_dict_post_hook(partial(self._note_aliases, number)),
            )
            layer.bytes, layer.versions = [0] * len(layer.weights), [0] * len(layer.weights)
            layer.storages = [None] * len(layer.weights)  # not in the store yet
        try:
            for number in range(len(self._layers)):
                self._free(number)
        except BaseException:  # such as a full disk, or Ctrl-C
            self.remove()
            raise

    @property
    def layer_bytes(self) -> list[int]:
        """Bytes of the weights of each layer."""
        return [sum(layer.bytes) for layer in self._layers]

    @contextmanager
    def present(self) -> Iterator[None]:
        """Load all weights onto the device."""
        for number in range(len(self._layers)):
            self._load(number)
        self._present += 1
        try:
            yield
        finally:
            self._present -= 1
            for layer in self._layers:  # load_state_dict(assign=True) replaces parameters
                layer.weights = [layer.module.get_parameter(name) for name in layer.names]
            if not self._present:
                for layer in self._layers:
                    layer.leave_kept_storages()
            self._free_all()

    def read_weight(self, weight: Tensor) -> Tensor:
        """Return a copy of an offloaded weight, which stays offloaded."""
        return self.store.get(self._key_of(weight))[0].view(weight.shape)

    def replace(self, weight: Tensor, values: Tensor) -> None:
        """Replace the values of an offloaded weight in the store."""
        self.store.put(self._key_of(weight), [values.to(weight.dtype).contiguous().view(-1)])

    def _key_of(self, weight: Tensor) -> str:
        layer, number = next(
            (layer, number)
            for layer in self._layers
            for number, other in enumerate(layer.weights)
            if other.untyped_storage()._cdata == weight.untyped_storage()._cdata
        )
        if not weight.is_contiguous() or weight.nbytes != layer.bytes[number]:
            raise ValueError(
                f"got a streamed weight of shape {tuple(weight.shape)} that does not fill its "
                f"storage in order; make it contiguous before streaming"
            )
        return layer.keys[number]

    def remove(self) -> None:
        """Load all weights and restore the model."""
        for number in range(len(self._layers)):
            self._load(number)
        for hook in self._hooks:
            hook.remove()
        for layer in self._layers:
            for weight, key in zip(layer.weights, layer.keys, strict=True):
                self.store.delete(key)
                _STREAMS.pop(weight, None)
        self._hooks, self._layers = [], []

    # -------------------------------------------------------------- load and free

    def _use(self, number: int, following: int | None) -> None:
        """Load one layer, prefetch the following one, and free all others."""
        if self._present:
            return
        for other in (self._loaded | self._prefetching) - {number, following}:
            self._free(other)
        self._load(number)
        if following is not None:
            self._prefetch(following)

    def _prefetch(self, number: int) -> None:
        if number in self._loaded | self._prefetching:
            return
        self._prefetching.add(number)
        layer = self._layers[number]
        for n, key in enumerate(layer.keys):
            layer.allocate(n)
            self.store.prefetch(key, layer.flat_storage(n))

    def _load(self, number: int) -> None:
        if number in self._loaded:
            return
        layer, is_coming = self._layers[number], number in self._prefetching
        for n, key in enumerate(layer.keys):
            if not is_coming:
                layer.allocate(n)
            self.store.get(key, None if is_coming else layer.flat_storage(n))
        for tensor in layer.readers():
            make_readable(tensor)
        layer.versions = [weight._version for weight in layer.weights]
        self._prefetching.discard(number)
        self._loaded.add(number)

    def _free(self, number: int) -> None:
        if number in self._prefetching:
            self._load(number)  # wait: the store must not write to an emptied storage
        layer = self._layers[number]
        for n, (weight, key) in enumerate(zip(layer.weights, layer.keys, strict=True)):
            _STREAMS[weight] = ref(self)
            is_new = weight.untyped_storage() is not layer.storages[n]
            if is_new or weight._version != layer.versions[n]:
                layer.bytes[n] = weight.untyped_storage().nbytes()
                self.store.put(key, layer.flat_storage(n))
        # All values are in the store now. If one could not be stored, none is lost.
        for n, weight in enumerate(layer.weights):
            if weight.untyped_storage() is not layer.storages[n]:
                layer.own_storage(n)
            layer.storages[n].resize_(0)
        for tensor in layer.readers():
            make_unreadable(tensor)
        self._loaded.discard(number)

    def _free_all(self) -> None:
        self._free_queued = False
        if not self._present:
            for number in sorted(self._loaded | self._prefetching):
                self._free(number)

    # -------------------------------------------------------------- hooks

    @exclude_from_dynamo
    def _before_forward(self, number: int, module: nn.Module, args: Any) -> None:
        if not in_backward():
            self._free_queued = False  # a failed backward pass may have left it set
            self._use(number, number + 1 if number + 1 < len(self._layers) else None)
        elif number < self._backward_layer:  # a recompute, in a segment that ends later
            self._use(number, number + 1)
        else:
            self._before_backward(number)

    @exclude_from_dynamo
    def _after_forward(self, number: int, module: nn.Module, args: Any, output: Any) -> None:
        if in_backward() or self._present:
            return  # a recompute: backward of this segment follows
        self._free(number)
        for tensor in tree_leaves(output):
            if isinstance(tensor, Tensor) and tensor.requires_grad:
                tensor.register_hook(
                    partial(_call_if_alive, WeakMethod(self._before_backward), number)
                )

    def _before_backward(self, number: int) -> None:
        """Load a layer once the gradient of its output is ready."""
        self._backward_layer = number
        self._free_after_backward()
        self._use(number, number - 1 if number else None)

    @exclude_from_dynamo
    def _forward_ends(self, model: nn.Module, args: Any, output: Any) -> None:
        """Hook the model's output, to prefetch the last layer as soon as backward begins."""
        for tensor in tree_leaves(output):
            if isinstance(tensor, Tensor) and tensor.requires_grad and not in_backward():
                tensor.register_hook(partial(_call_if_alive, WeakMethod(self._backward_begins)))

    def _backward_begins(self) -> None:
        if not self._present and self._layers:
            self._free_after_backward()
            self._prefetch(len(self._layers) - 1)

    def _free_after_backward(self) -> None:
        if not self._free_queued:
            self._free_queued = True
            when_backward_ends(self._free_all)

    def _note_aliases(
        self, number: int, module: nn.Module, state_dict: dict[str, Any], *_: Any
    ) -> None:
        """Remember the tensors of a state dict, which share the storages of the weights."""
        for layer in self._layers[number : number + 1]:  # a copy of a stream has none
            for tensor in layer.readers(state_dict.values()):
                layer.aliases[tensor] = None

    # -------------------------------------------------------------- errors

    def _require_present(self, *_: Any) -> None:
        if not self._present and self._layers:
            raise RuntimeError(
                "the weights of streamed layers are in their store; save and load the model inside "
                "`with streamed.present():`"
            )

    def require_steppable(self, optimizer: Any) -> None:
        """Raise RuntimeError for an optimizer that would step offloaded weights."""
        if getattr(optimizer, "offloads_weights", False):
            return
        for group in optimizer.param_groups:
            for weight in group["params"]:
                if weight.grad is not None and is_offloaded(weight) and stream_of(weight) is self:
                    raise RuntimeError(
                        f"got a step of an offloaded weight of shape {tuple(weight.shape)}; step "
                        f"in backward (step_in_backward), use OffloadedOptimizer(..., "
                        f"weights=True), or step inside `with streamed.present():`"
                    )

    def __reduce__(self) -> Any:
        """Copy or pickle no layers: a copy of the model, made inside `present()`, has them all."""
        return _without_layers, ()


def _without_layers() -> StreamedLayers:
    """Return a stream whose hooks do nothing."""
    stream = StreamedLayers.__new__(StreamedLayers)
    stream._layers, stream._hooks, stream._present = [], [], 1
    return stream


class _Guard:
    """A hook of all optimizers that holds the stream only weakly."""

    def __init__(self, stream: StreamedLayers) -> None:
        self._stream = ref(stream)

    def __call__(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        if (stream := self._stream()) is not None:
            stream.require_steppable(optimizer)


def _call_if_alive(method: Any, *args: Any) -> None:
    """Call a bound method if its object is alive, without the last argument, the gradient.

    Return None, so that the hook does not change the gradient.
    """
    if (function := method()) is not None:
        function(*args[:-1])


# ------------------------------------------------------------------ find the layers


def _module_list(model: nn.Module) -> Sequence[nn.Module]:
    lists = [module for module in model.modules() if isinstance(module, nn.ModuleList)]
    if len(lists) != 1:
        raise ValueError(
            f"got a model with {len(lists)} nn.ModuleLists; pass its layers as the third argument, "
            f"in the order of execution"
        )
    return list(lists[0])


def _with_weights(model: nn.Module, modules: list[nn.Module]) -> list[_Layer]:
    if not modules:
        raise ValueError("got no layers to stream; pass modules in the order of execution")
    require_no_dtensors("a streamed layer", model.parameters())
    names = {id(module): name for name, module in model.named_modules()}
    layers: list[_Layer] = []
    owner: dict[Any, int] = {}
    for number, module in enumerate(modules):
        layer = _Layer(module, [], [], [])
        for name, weight in module.named_parameters():
            storage = weight.untyped_storage()._cdata
            if owner.setdefault(storage, number) != number:
                raise ValueError(f"got two layers that share {name}; stream only one of them")
            if all(storage != w.untyped_storage()._cdata for w in layer.weights):
                layer.weights.append(weight)
                layer.names.append(name)
                layer.keys.append(f"layers/{names.get(id(module), number)}.{name}")
        layers.append(layer)
    inside = tuple(
        f"{name}."
        for name, module in model.named_modules(remove_duplicate=False)
        if any(module is layer for layer in modules)
    )
    for name, weight in model.named_parameters(remove_duplicate=False):
        if not name.startswith(inside) and weight.untyped_storage()._cdata in owner:
            raise ValueError(
                f"got a layer that shares {name} with the rest of the model; leave that layer out"
            )
    return layers
