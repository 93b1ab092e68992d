"""Repeat fake results: the same operator on tensors of the same shapes has the same result.

A model repeats its layers, so most operators of a step have run before on tensors with the same
metadata. torch caches fake results too, but its look-up costs ten times as much, and it skips
lists.

    key       the operator, the metadata of its tensors, and its other arguments
    result    for each of its tensors: an argument, a view of an argument, or a new storage; a
              view's offset is from the argument's
    skipped   operators that read values, resize a tensor, or come from other libraries; results
              that differ from their own repetition
"""

from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import torch

from memlab.internals.torch_internals import (
    DisableTorchDispatch,
    FakeTensor,
    FakeTensorMode,
    OpOverload,
    TensorBase,
    dispatch_keys,
    get_default_device,
    has_kernel,
    set_warn_deprecated_on_mutable_data_ptr,
)

aten = torch.ops.aten

_META = torch.device("meta")
_VALUE_TYPES = frozenset(
    {
        *(type(None), bool, int, float, complex, str),
        *(torch.dtype, torch.device, torch.layout, torch.memory_format),
    }
)
_SKIPPED_TAGS = frozenset(
    {
        torch.Tag.data_dependent_output,
        torch.Tag.dynamic_output_shape,
        torch.Tag.inplace_view,
    }
)
_SKIPPED = frozenset(
    {
        *(aten.lift.default, aten.lift_fresh.default, aten.lift_fresh_copy.default),  # real tensors
        *(aten.as_strided.default, aten.as_strided_scatter.default),  # check the storage's size
        *(aten._resize_output_.default, aten.resize_as_sparse_.default),
    }
)
_NAMESPACES = ("aten", "_c10d_functional")  # a group's name is part of the key
_UNSEEN: Any = object()


class FakeResults:
    """The results of operators on the tensors of one fake mode."""

    def __init__(self, fake_mode: FakeTensorMode) -> None:
        self._fake_mode = fake_mode
        self._is_repeatable: dict[Any, bool] = {}  # by operator
        self._recipes: dict[tuple[Any, ...], _Recipe | None] = {}  # None: cannot be repeated

    def run(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Return `func(*args, **kwargs)`."""
        alike, shift = args, 0  # arguments with the same result, but for its offset
        if func is aten.select.int and 0 <= args[2] < args[0].shape[args[1]]:
            alike, shift = (*args[:2], 0), args[2] * args[0].stride(args[1])
        tensors: list[FakeTensor] = []
        key = self._key(func, alike, kwargs, tensors)
        recipe = None if key is None else self._recipes.get(key, _UNSEEN)
        if key is None or recipe is None:
            return func(*args, **kwargs)
        # torch's own fake dispatch was 60 % of a prediction's time: an 8B LoRA prediction takes 6.2
        # CPU-seconds instead of 16.4, with the same events
        # (test_a_prediction_with_repeated_results_is_the_same).
        if recipe is not _UNSEEN:
            return recipe.repeat(tensors, shift)
        result = func(*args, **kwargs)
        is_unchanged = key == self._key(func, alike, kwargs, [])
        self._recipes[key] = _recipe(result, tensors, shift) if is_unchanged else None
        return result

    def lifted(self, real: torch.Tensor) -> FakeTensor:
        """Return the fake tensor of a literal. Its values are known, so torch's constant, which
        no recipe may have, is dropped."""
        func, storage_bytes = aten.lift_fresh.default, real.untyped_storage().nbytes()
        key = (func, real.dtype, real.shape, real.stride(), real.storage_offset(), storage_bytes)
        if recipe := self._recipes.get(key):
            return recipe.repeat((), 0)
        fake = func(real)
        fake.constant = None
        self._recipes[key] = _recipe(fake, (), 0)
        return fake

    def _key(
        self, func: Any, args: Any, kwargs: Any, tensors: list[FakeTensor]
    ) -> tuple[Any, ...] | None:
        """Return the key, and append the arguments' tensors to `tensors`; None if there is no key.

        Some global settings change results, too.
        """
        if func not in self._is_repeatable:
            self._is_repeatable[func] = _is_repeatable(func)
        if not self._is_repeatable[func]:
            return None
        settings = (torch.get_default_dtype(), get_default_device())
        key = [func, torch.is_inference_mode_enabled(), *settings]
        arguments = (*args, *kwargs, *kwargs.values()) if kwargs else args
        return tuple(key) if self._extend(key, arguments, tensors) else None

    def _extend(self, key: list[Any], arguments: Iterable[Any], tensors: list[FakeTensor]) -> bool:
        """Append arguments to the key. Returns False if an argument cannot be part of a key."""
        for argument in arguments:
            kind = type(argument)
            if kind in _VALUE_TYPES:
                key += (kind, argument)  # the type too, because 1 == 1.0 == True
            elif isinstance(argument, FakeTensor):
                if argument.fake_mode is not self._fake_mode or argument.constant is not None:
                    return False
                if argument.layout is not torch.strided:
                    return False
                tensors.append(argument)
                key += _metadata(argument)
            elif kind is list or kind is tuple:
                key += (kind, len(argument))
                if not self._extend(key, argument, tensors):
                    return False
            else:
                return False
        return True


def _metadata(tensor: FakeTensor) -> tuple[Any, ...]:
    """Return the metadata; the dispatch keys tell conjugates and inference tensors apart. Only
    views that change the dtype depend on the number of the offset."""
    return (
        tensor.dtype,
        tensor.shape,
        tensor.stride(),
        tensor.storage_offset() > 0,
        tensor.fake_device,
        tensor.requires_grad,
        dispatch_keys(tensor).raw_repr(),
    )


def _is_repeatable(func: Any) -> bool:
    """Return whether the metadata of the operator's result depends on nothing but the key."""
    if not isinstance(func, OpOverload) or func in _SKIPPED:
        return False
    if func.namespace not in _NAMESPACES:
        return False
    if _SKIPPED_TAGS.intersection(func.tags):
        return False
    if any(argument.is_out for argument in func._schema.arguments):  # may be resized
        return False
    # a composite's operators depend on more, such as autocast
    return has_kernel(func.name(), "CPU") or not has_kernel(
        func.name(), "CompositeImplicitAutograd"
    )


# ------------------------------------------------------------------ recipes


class _Output(NamedTuple):
    """One tensor of a result."""

    argument: int | None  # it is this argument …
    base: int | None  # … or a view of this one; if both are None, it has a new storage
    shape: torch.Size
    stride: tuple[int, ...]
    offset: int  # from that of the argument
    dtype: torch.dtype
    device: torch.device
    attributes: dict[str, Any]  # of the fake tensor

    def repeat(self, tensors: Sequence[FakeTensor], shift: int) -> FakeTensor:
        if self.argument is not None:
            return tensors[self.argument]
        with DisableTorchDispatch():
            meta = torch.empty_strided(self.shape, self.stride, dtype=self.dtype, device=_META)
            if self.base is not None:
                base = tensors[self.base]
                offset = base.storage_offset() + self.offset + shift
                meta.set_(base.untyped_storage(), offset, self.shape, self.stride)
        made = TensorBase._make_subclass(
            FakeTensor, meta, False, dispatch_device=True, device_for_backend_keys=self.device
        )
        if self.base is None:
            set_warn_deprecated_on_mutable_data_ptr(made)
        made.__dict__.update(self.attributes)
        return made


class _Recipe(NamedTuple):
    """How to repeat a result: its tensors, None for absent ones, and their container."""

    outputs: list[_Output | None]
    container: type | None  # list or tuple; None for a single tensor

    def repeat(self, tensors: Sequence[FakeTensor], shift: int) -> Any:
        made = [each if each is None else each.repeat(tensors, shift) for each in self.outputs]
        return made[0] if self.container is None else self.container(made)


def _recipe(result: Any, tensors: Sequence[FakeTensor], shift: int) -> _Recipe | None:
    """Return the recipe of a result; None if its repetition would differ."""
    container = type(result) if type(result) in (list, tuple) else None
    parts = [result] if container is None else result
    if not all(part is None or _is_plain(part) for part in parts):
        return None
    arguments = _positions(map(id, tensors))
    bases = _positions(map(_storage, tensors))
    outputs = []
    for part in parts:
        same = arguments.get(id(part), [])
        sharing = [] if part is None else bases.get(_storage(part), [])
        if len(same or sharing) > 1:
            return None  # unclear which argument it is, or is a view of
        base = tensors[sharing[0]] if sharing else None
        start = 0 if base is None else base.storage_offset()
        if base is not None and start and base.dtype != part.dtype:
            return None  # its offset is another multiple of another size
        offset = 0 if part is None else part.storage_offset() - start - shift
        outputs.append(None if part is None else _output(part, same, sharing, offset))
    new = [part for part, output in zip(parts, outputs, strict=True) if _is_new(output)]
    if len(set(map(_storage, new))) < len(new):
        return None  # they share a new storage
    recipe = _Recipe(outputs, container)
    repeated = _Recipe(outputs, list).repeat(tensors, shift)
    return recipe if list(map(_facts, repeated)) == list(map(_facts, parts)) else None


def _positions(keys: Iterable[int]) -> dict[int, list[int]]:
    positions = defaultdict(list)
    for position, key in enumerate(keys):
        positions[key].append(position)
    return positions


def _is_plain(part: Any) -> bool:
    return type(part) is FakeTensor and part.layout is torch.strided and part.constant is None


def _output(part: FakeTensor, same: list[int], sharing: list[int], offset: int) -> _Output:
    return _Output(
        argument=next(iter(same), None),
        base=next(iter(sharing), None),
        shape=part.shape,
        stride=part.stride(),
        offset=offset,
        dtype=part.dtype,
        device=part.fake_device,
        attributes=dict(vars(part)),
    )


def _is_new(output: _Output | None) -> bool:
    return output is not None and output.argument is None and output.base is None


def _storage(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage()._cdata


def _facts(tensor: FakeTensor | None) -> Any:
    if tensor is None:
        return None
    return (*_metadata(tensor), tensor.storage_offset(), tensor.untyped_storage().nbytes())
