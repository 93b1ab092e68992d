"""Streamed layers: a layer's weights are on the device while it runs, and otherwise in a store.

Saves    the weights of all layers but two: the one at work, and the next, which is on its way.
Costs    the weights brought twice a step, for the forward and for the backward pass; three times
         where backward runs layers again in segments of several. What isn't hidden behind a layer's
         arithmetic is waited for: a layer of N weights and a batch of T tokens have 2·N·T
         operations in the forward pass to hide 2·N or 4·N bytes.
Source   Pudipeddi et al. 2020 (L2L), arXiv 2002.05645; Rajbhandari et al. 2021 (ZeRO-Infinity),
         arXiv 2104.07857.

    streamed = stream_layers(model, store)
    loss = model(tokens, targets)       # layers 0, 1, 2, …: each there, with the next on its way
    loss.backward()                     # …, 2, 1, 0

A weight that is away keeps its tensor, and the tensor its storage, which is emptied. What autograd
saved of it is a view of that storage, and finds the numbers there again when backward comes. The
numbers come back past autograd, which would otherwise take them for a change of what it saved.

Who changes a weight while it is there (an optimizer that steps in backward) needs to do nothing:
a weight of another version than it came with goes back to the store before it is emptied. An
OffloadedOptimizer with `weights=True` has weights of its own, steps those after backward, and gives
the rounded ones to the store. Any other optimizer finds the weights away, and gets an error. What
is no optimizer gets none: torch doesn't check a tensor's storage, and a process that reads a weight
that is away crashes. `with streamed.present():` is for that.

What stays on the device: gradients, until somebody takes them (`gradients=True` there); all that is
in no layer, such as embedding, last norm and unembedding; and copies that others make: autocast
keeps what it casts until the end of the forward pass, and autograd beyond it.
"""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any
from weakref import WeakMethod, ref

from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.weak import WeakIdKeyDictionary

from memlab.internals.torch_internals import in_backward, tree_leaves, when_backward_ends
from memlab.offload.stores import Store

_STREAMS = WeakIdKeyDictionary()  # weight: a weak reference to its stream


def stream_layers(
    model: nn.Module, store: Store, layers: Iterable[nn.Module] | None = None
) -> "StreamedLayers":
    """Put the weights of the model's layers into the store, and bring each while it is wanted.

    `layers` are modules in the order in which they run; without, the members of the model's one
    `nn.ModuleList`. Raises ValueError where there is none or several, and where two layers share a
    weight, or one with the rest of the model.
    """
    return StreamedLayers(model, store, _found(model) if layers is None else layers)


def stream_of(weight: Tensor) -> "StreamedLayers | None":
    """Who streams the weight."""
    reference = _STREAMS.get(weight)
    return None if reference is None else reference()


def away(weight: Tensor) -> bool:
    """Whether its storage is empty."""
    return weight.untyped_storage().nbytes() == 0 < weight.numel()


@dataclass
class _Layer:
    """A layer's storages, each by the weight that was found with it first."""

    module: nn.Module
    weights: list[Tensor]
    keys: list[str]
    bytes: list[int] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)  # when they came; empty: not there

    def out(self, number: int) -> list[Tensor]:
        """Its whole storage, flat."""
        weight = self.weights[number].data
        return [weight.as_strided((self.bytes[number] // weight.itemsize,), (1,), 0)]


class StreamedLayers:
    """Layers of a model that come and go; `remove()` brings all of them back for good.

    `with streamed.present():` all are there, to be saved, loaded or looked at; what is changed in
    there goes to the store at its end.
    """

    def __init__(self, model: nn.Module, store: Store, layers: Iterable[nn.Module]) -> None:
        self.store = store
        self._layers = _with_weights(model, list(layers))
        self._coming: set[int] = set()
        self._here: set[int] = set()
        self._at = 0  # the layer whose backward pass was the last to begin
        self._all = self._ends = False
        self._hooks: list[Any] = [
            model.register_forward_hook(self._forward_ends),
            model.register_state_dict_pre_hook(self._require_present),
            model.register_load_state_dict_pre_hook(self._require_present),
            register_optimizer_step_pre_hook(_Guard(self)),
        ]
        for number, layer in enumerate(self._layers):
            self._hooks += (
                layer.module.register_forward_pre_hook(partial(self._before, number)),
                layer.module.register_forward_hook(partial(self._after, number)),
            )
            for weight in layer.weights:
                _STREAMS[weight] = ref(self)
            layer.bytes = [weight.untyped_storage().nbytes() for weight in layer.weights]
            layer.versions = [-1] * len(layer.weights)  # the store has none of it
            self._here.add(number)
            self._free(number)

    @property
    def layer_bytes(self) -> list[int]:
        """What the weights of each layer take."""
        return [sum(layer.bytes) for layer in self._layers]

    @contextmanager
    def present(self) -> Iterator[None]:
        """All weights on the device."""
        for number in range(len(self._layers)):
            self._bring(number)
        self._all = True
        try:
            yield
        finally:
            self._all = False
            self._free_all()

    def numbers_of(self, weight: Tensor) -> Tensor:
        """A copy of a weight that is away, while that stays away."""
        return self.store.get(self._key_of(weight))[0].view(weight.shape)

    def replace(self, weight: Tensor, numbers: Tensor) -> None:
        """Give a weight that is away other numbers: those are put into the store."""
        self.store.put(self._key_of(weight), [numbers.to(weight.dtype).contiguous().view(-1)])

    def _key_of(self, weight: Tensor) -> str:
        layer, number = next(
            (layer, number)
            for layer in self._layers
            for number, other in enumerate(layer.weights)
            if other.untyped_storage()._cdata == weight.untyped_storage()._cdata
        )
        if not weight.is_contiguous() or weight.nbytes != layer.bytes[number]:
            raise ValueError(
                f"got a streamed weight of shape {tuple(weight.shape)} that is a part or another "
                f"order of its storage; make it contiguous before it is streamed"
            )
        return layer.keys[number]

    def remove(self) -> None:
        """Bring all weights back, and let the model be what it was."""
        for number in range(len(self._layers)):
            self._bring(number)
        for hook in self._hooks:
            hook.remove()
        for layer in self._layers:
            for weight, key in zip(layer.weights, layer.keys, strict=True):
                self.store.delete(key)
                del _STREAMS[weight]
        self._hooks, self._layers = [], []

    # -------------------------------------------------------------- who is there

    def _use(self, number: int, following: int | None) -> None:
        """Have one layer there, the following on its way, and no other."""
        if self._all:
            return
        for other in (self._here | self._coming) - {number, following}:
            self._free(other)
        self._bring(number)
        if following is not None:
            self._ask_for(following)

    def _ask_for(self, number: int) -> None:
        if number in self._here | self._coming:
            return
        self._coming.add(number)
        layer = self._layers[number]
        for n, (weight, key) in enumerate(zip(layer.weights, layer.keys, strict=True)):
            weight.untyped_storage().resize_(layer.bytes[n])
            self.store.prefetch(key, layer.out(n))

    def _bring(self, number: int) -> None:
        if number in self._here:
            return
        layer, is_coming = self._layers[number], number in self._coming
        for n, (weight, key) in enumerate(zip(layer.weights, layer.keys, strict=True)):
            if not is_coming:
                weight.untyped_storage().resize_(layer.bytes[n])
            self.store.get(key, None if is_coming else layer.out(n))
        layer.versions = [weight._version for weight in layer.weights]
        self._coming.discard(number)
        self._here.add(number)

    def _free(self, number: int) -> None:
        if number in self._coming:
            self._bring(number)  # nobody may write to what is emptied
        layer = self._layers[number]
        for n, (weight, key) in enumerate(zip(layer.weights, layer.keys, strict=True)):
            if weight._version != layer.versions[n]:
                self.store.put(key, layer.out(n))
            weight.untyped_storage().resize_(0)
        self._here.discard(number)

    def _free_all(self) -> None:
        self._ends = False
        if not self._all:
            for number in sorted(self._here | self._coming):
                self._free(number)

    # -------------------------------------------------------------- when

    def _before(self, number: int, module: nn.Module, args: Any) -> None:
        if not in_backward():
            self._ends = False  # also where the last backward pass broke off
            self._use(number, number + 1 if number + 1 < len(self._layers) else None)
        elif number < self._at:  # computed again, in a segment that ends further on
            self._use(number, number + 1)
        else:
            self._goes_back(number)

    def _after(self, number: int, module: nn.Module, args: Any, output: Any) -> None:
        if in_backward() or self._all:
            return  # computed again: its backward pass comes next, or that of one further on
        self._free(number)
        for tensor in tree_leaves(output):
            if isinstance(tensor, Tensor) and tensor.requires_grad:
                tensor.register_hook(partial(_call, WeakMethod(self._goes_back), number))

    def _goes_back(self, number: int) -> None:
        """The gradient of a layer's output is there."""
        self._at = number
        self._at_the_end_of_backward()
        self._use(number, number - 1 if number else None)

    def _forward_ends(self, model: nn.Module, args: Any, output: Any) -> None:
        """The model's own hook: the last layer is on its way as soon as backward begins."""
        for tensor in tree_leaves(output):
            if isinstance(tensor, Tensor) and tensor.requires_grad and not in_backward():
                tensor.register_hook(partial(_call, WeakMethod(self._backward_begins)))

    def _backward_begins(self) -> None:
        if not self._all and self._layers:
            self._at_the_end_of_backward()
            self._ask_for(len(self._layers) - 1)

    def _at_the_end_of_backward(self) -> None:
        if not self._ends:
            self._ends = True
            when_backward_ends(self._free_all)

    # -------------------------------------------------------------- who has to be told

    def _require_present(self, *_: Any) -> None:
        if not self._all and self._layers:
            raise RuntimeError(
                "the weights of streamed layers are in their store; save and load the model inside "
                "`with streamed.present():`"
            )

    def require_steppable(self, optimizer: Any) -> None:
        """RuntimeError for an optimizer that is about to step weights that are not there."""
        if getattr(optimizer, "offloads_weights", False):
            return
        for group in optimizer.param_groups:
            for weight in group["params"]:
                if weight.grad is not None and away(weight) and stream_of(weight) is self:
                    raise RuntimeError(
                        f"got a step of a weight of shape {tuple(weight.shape)} that is in its "
                        f"store; step in backward (step_in_backward), use OffloadedOptimizer(..., "
                        f"weights=True), or step inside `with streamed.present():`"
                    )


class _Guard:
    """A hook of all optimizers, which keeps no stream alive."""

    def __init__(self, stream: StreamedLayers) -> None:
        self._stream = ref(stream)

    def __call__(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        if (stream := self._stream()) is not None:
            stream.require_steppable(optimizer)


def _call(method: Any, *args: Any) -> None:
    """What a graph calls must not keep the stream alive, nor, by its last word, change a
    gradient."""
    *args, _ = args
    if (function := method()) is not None:
        function(*args)


# ------------------------------------------------------------------ which layers


def _found(model: nn.Module) -> Sequence[nn.Module]:
    lists = [module for module in model.modules() if isinstance(module, nn.ModuleList)]
    if len(lists) != 1:
        raise ValueError(
            f"got a model with {len(lists)} nn.ModuleLists; give its layers, in the order in which "
            f"they run, as the third argument"
        )
    return list(lists[0])


def _with_weights(model: nn.Module, modules: list[nn.Module]) -> list[_Layer]:
    if not modules:
        raise ValueError("got no layers to stream; give modules in the order in which they run")
    names = {id(module): name for name, module in model.named_modules()}
    layers, owner = [], {}
    for number, module in enumerate(modules):
        layer = _Layer(module, [], [])
        for name, weight in module.named_parameters():
            storage = weight.untyped_storage()._cdata
            if owner.setdefault(storage, number) != number:
                raise ValueError(f"got two layers that share {name}; stream one of them alone")
            if all(storage != w.untyped_storage()._cdata for w in layer.weights):
                layer.weights.append(weight)
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
