"""Track values that a dry run can compute: they do not depend on random numbers or missing data.

`torch.arange(4)` has the same values in every run, and so do results computed from it. The fake
storage of such a tensor is paired with a real storage:

    factories                  computed on real tensors
    operators on known tensors
                               computed on real tensors too
    views                      share the fake storage, so they share its values
    in-place operators         run on the real storage; with an unknown argument or a random
                               operator, the whole storage becomes unknown
    literals, tensors from outside
                               have their own values, copied before the first write

The meter does not see this computation, and it uses no random numbers. Results of more than BOUND
elements are unknown. A batch's tokens, masks and positions are smaller, and an operator on so few
elements is as fast as its fake version.
"""

import functools
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from memlab.internals.torch_internals import (
    FakeTensor,
    OpOverload,
    resize_storage_,
    without_modes,
)

aten = torch.ops.aten
# RegNet computes widths with `torch.arange`, timm drop-path rates with `torch.linspace`. With 1 or
# 0.5 instead, a step of 94.1 MB seems to need 16.6 MB
# (test_a_step_whose_sizes_come_from_known_values_is_exact).
BOUND = 2**17  # elements of a result
_LARGEST_INPUT = 2**24  # elements of an input
_LARGEST_STORAGE = 16 * BOUND  # bytes, at 16 bytes per complex128 element
_NAME = "memlab_values"  # the attribute of a fake storage that has its values

# In-place operators after which an element is known, even if it was unknown before.
_OVERWRITES = frozenset(
    {aten.fill_.Scalar, aten.fill_.Tensor, aten.zero_.default, aten.copy_.default}
)
# In training they update the running statistics, which their schema does not declare.
_BATCH_NORMS = frozenset({aten.native_batch_norm.default, aten.cudnn_batch_norm.default})
# Factories of uninitialized tensors.
_EMPTY = frozenset(
    {
        aten.empty.memory_format,
        aten.empty_like.default,
        aten.empty_strided.default,
        aten.empty_permuted.default,
        aten.new_empty.default,
        aten.new_empty_strided.default,
    }
)
# `one_hot` writes into int64 zeros.
_ZEROS = frozenset({aten.zeros.default, aten.new_zeros.default, aten.zeros_like.default})
UNKNOWN: Any = object()  # the result of an operator that cannot be computed


class _Values:
    """The real storage of a fake one; `borrowed` if it belongs to the user's tensor, `assumed` if
    its values follow from assumed ones."""

    __slots__ = ("assumed", "borrowed", "storage")

    def __init__(
        self, storage: torch.UntypedStorage, borrowed: bool, assumed: bool = False
    ) -> None:
        self.storage, self.borrowed, self.assumed = storage, borrowed, assumed


_NO_ELEMENTS = _Values(torch.UntypedStorage(0), borrowed=False)  # for tensors without elements

# ------------------------------------------------------------------ a tensor's values


def is_known(tensor: torch.Tensor) -> bool:
    """Return whether the fake `tensor` has known values, few enough to compute with."""
    return _values_of(tensor) is not None and tensor.numel() <= _LARGEST_INPUT


def real(tensor: torch.Tensor) -> torch.Tensor:
    """Return the known values of a fake tensor as a real tensor; its views share one real storage.

    Raises ValueError if the values are unknown.
    """
    values = _values_of(tensor)
    if values is None:
        raise ValueError("got a tensor whose values are unknown; check is_known(tensor) first")
    with without_modes():
        return _tensor_over(values.storage, tensor)


def as_array(fake: torch.Tensor, values: torch.Tensor) -> np.ndarray:
    """Return an array that shares the values' memory and keeps the fake storage alive."""
    with without_modes():
        return np.asarray(_Shared(values.numpy(), fake.untyped_storage()))


class _Shared:
    """The owner of an array's memory; NumPy keeps it alive as long as the array."""

    def __init__(self, array: np.ndarray, storage: torch.UntypedStorage) -> None:
        self.__array_interface__ = array.__array_interface__
        # `array.base` is another tensor object, which does not keep the fake storage: a dry run of
        # PPO was 12 bytes too low.
        self._kept = array, storage


def as_list(tensor: torch.Tensor) -> Any:
    """Return the known values as `tolist` does."""
    values = real(tensor)
    with without_modes():
        return values.tolist()


def assume(fake: torch.Tensor, values: torch.Tensor) -> None:
    """Give a fake tensor assumed values, which larger results also follow."""
    with without_modes():
        _store(fake, values, assumed=True)


def is_assumed(arguments: Any) -> bool:
    """Return whether the values of a tensor among the arguments follow from assumed ones."""
    found = (_values_of(tensor) for tensor in tensors_in(arguments))
    return any(values is not None and values.assumed for values in found)


def _mark_assumed(tensors: list[torch.Tensor]) -> None:
    for tensor in tensors:
        if (values := _values_of(tensor)) is not None:
            values.assumed = True


def borrow(fake: torch.Tensor, outside: torch.Tensor) -> None:
    """Give a fake tensor the values of the real tensor `outside`.

    Weights stay unknown: results computed with them are large and rarely read.
    """
    if outside.requires_grad or outside.device.type != "cpu" or type(outside) is not torch.Tensor:
        return
    if outside.layout is torch.strided and _NAME not in fake.untyped_storage().__dict__:
        _attach(fake, _Values(outside.untyped_storage(), borrowed=True))


def make_writable(tensor: torch.Tensor) -> bool:
    """Copy borrowed values before a write. Returns False if they are unknown or too large."""
    values = _values_of(tensor)
    if values is None:
        return False
    if values.borrowed:
        if values.storage.nbytes() > _LARGEST_STORAGE:
            return False
        with without_modes():
            values.storage, values.borrowed = values.storage.clone(), False
    return True


def _values_of(tensor: torch.Tensor) -> _Values | None:
    if type(tensor) is not FakeTensor and not isinstance(tensor, FakeTensor):
        return None
    if tensor.layout is not torch.strided:
        return None
    storage = tensor.untyped_storage()
    values = storage.__dict__.get(_NAME)
    if values is None and storage.nbytes() == 0:
        return _NO_ELEMENTS
    if values is None or values.storage.nbytes() != storage.nbytes():
        return None
    return None if tensor.is_conj() or tensor.is_neg() else values


def _attach(fake: torch.Tensor, values: _Values) -> None:
    storage = fake.untyped_storage()
    if storage.nbytes() == values.storage.nbytes():
        setattr(storage, _NAME, values)


def forget(tensors: list[torch.Tensor]) -> None:
    """Make the values of tensors unknown."""
    for tensor in tensors:
        setattr(tensor.untyped_storage(), _NAME, None)


def _tensor_over(storage: torch.UntypedStorage, like: torch.Tensor) -> torch.Tensor:
    """Return a real tensor over `storage`, with the dtype, shape and strides of `like`."""
    return torch.empty(0, dtype=like.dtype).set_(
        storage, like.storage_offset(), like.shape, like.stride()
    )


def _store(fake: Any, result: Any, assumed: bool = False, *, large: bool = False) -> None:
    """Store a real result as the values of the fake one."""
    if isinstance(fake, (list, tuple)):
        for one, values in zip(fake, result, strict=True):
            _store(one, values, assumed, large=large)
    elif isinstance(fake, FakeTensor) and isinstance(result, torch.Tensor):
        storage, own = fake.untyped_storage(), result.untyped_storage()
        largest = 8 * _LARGEST_INPUT if assumed or large else _LARGEST_STORAGE
        if _NAME in storage.__dict__ or not 0 < storage.nbytes() <= largest:
            return
        if own.nbytes() != storage.nbytes() or _layout(result) != _layout(fake):
            own = torch.UntypedStorage(storage.nbytes())
            _tensor_over(own, fake).copy_(result)
        setattr(storage, _NAME, _Values(own, borrowed=False, assumed=assumed))


def _layout(tensor: torch.Tensor) -> tuple[Any, ...]:
    return tensor.dtype, tensor.storage_offset(), tensor.shape, tensor.stride()


# ------------------------------------------------------------------ propagation


def propagate(func: Any, args: Any, kwargs: Any, result: Any) -> None:
    """Update the known values after `func(*args)` has returned `result` on fake tensors."""
    rule = _rule_for(func)
    if rule is not None:
        rule(func, args, kwargs, result)


def compute(func: Any, args: Any, kwargs: Any) -> Any:
    """Return the real result of a functional operator on known tensors, UNKNOWN otherwise."""
    if not isinstance(func, OpOverload) or func._schema.is_mutable or _is_never_computed(func):
        return UNKNOWN
    if not all(map(is_known, tensors_in((*args, *kwargs.values())))):
        return UNKNOWN
    return _run(func, args, kwargs)


@functools.cache
def _rule_for(func: Any) -> Callable[[Any, Any, Any, Any], None] | None:
    """Return the function that updates known values after `func`; None if there is no update."""
    if not isinstance(func, OpOverload):
        return None
    if func is aten.lift_fresh.default:
        return _propagate_lift
    if func.namespace == "c10d" or func in _BATCH_NORMS:
        return _propagate_possible_write
    if func._schema.is_mutable:
        return None if torch.Tag.inplace_view in func.tags else _propagate_in_place
    return None if func.is_view or _is_never_computed(func) else _propagate_functional


@functools.cache
def _is_never_computed(func: OpOverload) -> bool:
    """Return whether the operator is random, uninitialized or outside aten: never computed."""
    return (
        func.namespace not in ("aten", "prims")
        or torch.Tag.nondeterministic_seeded in func.tags
        or func in _EMPTY
    )


def _propagate_lift(func: Any, args: Any, kwargs: Any, result: Any) -> None:
    """A literal, or a tensor that shares memory with an array, has its own values."""
    borrow(result, args[0])


def _propagate_possible_write(func: Any, args: Any, kwargs: Any, result: Any) -> None:
    forget(tensors_in(args))


def _propagate_functional(func: Any, args: Any, kwargs: Any, result: Any) -> None:
    for argument in args:  # fast path: the first tensor is usually unknown
        if isinstance(argument, torch.Tensor):
            if not is_known(argument):
                return
            break
    made = tensors_in((result,))
    count = sum(tensor.numel() for tensor in made)
    if count > _LARGEST_INPUT:
        return
    given = (*args, *kwargs.values())
    if all(map(is_known, tensors_in(given))):
        assumed = is_assumed(given)
        is_short = count <= BOUND or (func in _ZEROS and made[0].dtype is torch.int64)
        if not (is_short or assumed):
            return
        values = _run(func, args, kwargs)
        if values is not UNKNOWN:
            with without_modes():
                _store(result, values, assumed, large=count > BOUND)


def _propagate_in_place(func: Any, args: Any, kwargs: Any, result: Any) -> None:
    places, names = _written_arguments(func)
    targets = tensors_in(
        (*(args[i] for i in places if i < len(args)), *(kwargs.get(name) for name in names))
    )
    others = tensors_in(
        (
            *(argument for i, argument in enumerate(args) if i not in places),
            *(argument for name, argument in kwargs.items() if name not in names),
        )
    )
    overwrites = func in _OVERWRITES or bool(names)
    if (
        _is_never_computed(func)
        or not all(map(is_known, others))
        or not all(_prepare_write(target, overwrites) for target in targets)
        or _run(func, args, kwargs) is UNKNOWN
    ):
        forget(targets)
    elif is_assumed(others):
        _mark_assumed(targets)


@functools.cache
def _written_arguments(func: OpOverload) -> tuple[tuple[int, ...], tuple[str, ...]]:
    """Return the arguments that the operator writes to: positions, and names of out arguments."""
    written = [
        (i, argument)
        for i, argument in enumerate(func._schema.arguments)
        if argument.alias_info is not None and argument.alias_info.is_write
    ]
    return (
        tuple(i for i, argument in written if not argument.kwarg_only),
        tuple(argument.name for _, argument in written if argument.kwarg_only),
    )


def _prepare_write(target: torch.Tensor, overwrites: bool) -> bool:
    """Prepare the target's values for a write. Returns False if the write cannot be tracked."""
    if is_known(target):
        return make_writable(target)
    num_bytes = target.untyped_storage().nbytes()
    is_whole = target.numel() * target.element_size() == num_bytes and target.is_contiguous()
    if overwrites and is_whole and 0 < target.numel() <= BOUND:
        _attach(target, _Values(torch.UntypedStorage(num_bytes), borrowed=False))
        return True
    return False


# ------------------------------------------------------------------ shapes that depend on values


def fake_result(func: Any, args: Any, kwargs: Any) -> Any:
    """Return the fake result of an operator whose shape depends on values, or UNKNOWN."""
    shape = _SHAPES.get(func)
    if shape is not None:
        result = shape(func, *args, **kwargs)
        if result is not UNKNOWN:
            return result
    values = compute(func, args, kwargs)
    return values if values is UNKNOWN else _to_fake(values, is_assumed((*args, *kwargs.values())))


def _index(func: Any, tensor: torch.Tensor, indices: Any) -> Any:
    """Compute `x[mask]` from the indices of the mask's True elements, as its kernel does."""
    expanded = []
    for index in indices:
        if index is None or index.dtype not in (torch.bool, torch.uint8):
            expanded.append(index)
        elif is_known(index):
            chosen = _to_fake(_run(aten.nonzero.default, (index,), {}), is_assumed(index))
            expanded += [aten.select.int(chosen, 1, i) for i in range(index.dim())]
        else:
            return UNKNOWN
    result = func(tensor, expanded)
    with without_modes():
        _store_if_computed(func, (tensor, indices), result)
    return result


def _store_if_computed(func: Any, args: Any, result: Any) -> None:
    if result.numel() <= BOUND and (values := compute(func, args, {})) is not UNKNOWN:
        _store(result, values, is_assumed(args))


def _masked_select(func: Any, tensor: torch.Tensor, mask: torch.Tensor) -> Any:
    if not is_known(mask):
        return UNKNOWN
    with without_modes():
        count = real(mask).expand(torch.broadcast_shapes(mask.shape, tensor.shape)).sum().item()
    result = aten.empty.memory_format([count], dtype=tensor.dtype, device=tensor.device)
    with without_modes():
        _store_if_computed(func, (tensor, mask), result)
    return result


def _packed(func: Any, inputs: torch.Tensor, lengths: torch.Tensor, batch_first: bool) -> Any:
    """Pack with known lengths; the data stays unknown."""
    if not is_known(lengths):
        return UNKNOWN
    with without_modes():
        steps = torch.zeros(inputs.shape[:2], dtype=torch.float32)
        data, batch_sizes = func(steps, real(lengths), batch_first)
    shape = (data.shape[0], *inputs.shape[2:])
    packed = aten.empty.memory_format(shape, dtype=inputs.dtype, device=inputs.device)
    return packed, _to_fake(batch_sizes)


_SHAPES: dict[Any, Callable[..., Any]] = {
    aten.index.Tensor: _index,
    aten.masked_select.default: _masked_select,
    aten._pack_padded_sequence.default: _packed,
}


def _to_fake(values: Any, assumed: bool = False) -> Any:
    """Return fake tensors with the real results' metadata and values."""
    if isinstance(values, (list, tuple)):
        return tuple(_to_fake(one, assumed) for one in values)
    if not isinstance(values, torch.Tensor):
        return values
    fake = aten.empty_strided.default(values.shape, values.stride(), dtype=values.dtype)
    resize_storage_(fake.untyped_storage(), values.untyped_storage().nbytes())
    with without_modes():
        _store(fake, values, assumed)
    return fake


# ------------------------------------------------------------------ running on real tensors


def _run(func: Any, args: Any, kwargs: Any) -> Any:
    """Run the operator on real tensors. Returns UNKNOWN if it raises: the dry run continues."""
    with without_modes():
        try:
            named = {name: _real_argument(v) for name, v in kwargs.items() if name != "pin_memory"}
            return func(*map(_real_argument, args), **named)
        except (RuntimeError, IndexError, ValueError, TypeError, NotImplementedError):
            return UNKNOWN


def _real_argument(argument: Any) -> Any:
    if isinstance(argument, torch.Tensor):
        values = _values_of(argument)
        assert values is not None
        return _tensor_over(values.storage, argument)
    if isinstance(argument, (list, tuple)):
        return [_real_argument(one) for one in argument]
    return torch.device("cpu") if isinstance(argument, torch.device) else argument


def tensors_in(arguments: Any) -> list[torch.Tensor]:
    """Return the tensors among arguments, also those in lists."""
    found = []
    for argument in arguments:
        if isinstance(argument, torch.Tensor):
            found.append(argument)
        elif isinstance(argument, (list, tuple)):
            found += tensors_in(argument)
    return found
