"""Results that are smaller than the storage they lie in.

Some CPU kernels compute into a large buffer and then shrink the result to a part of it without
giving the rest back: the scalar of `F.mse_loss` holds as many bytes as its input for as long as
it lives. Fake tensors only know the result's shape, so a dry run makes their storages as large.
"""

from collections.abc import Callable
from typing import Any

import torch

from memlab.internals.torch_internals import StorageBase

aten = torch.ops.aten


def enlarge(func: Any, args: tuple[Any, ...], result: Any) -> None:
    """Give the fake `result` of `func(*args)` the storage that the real one has."""
    rule = _RULES.get(func)
    if rule is not None:
        tensor, count = rule(result, *args)
        if count > tensor.untyped_storage().nbytes():
            # no resize of the step's, which a meter watches: the storage is born like this
            StorageBase.resize_(tensor.untyped_storage(), count)


def _loss(result: Any, input: Any, target: Any, *others: Any) -> tuple[torch.Tensor, int]:
    """The losses of all elements stand in the buffer whose first element becomes their mean."""
    shape = torch.broadcast_shapes(input.shape, target.shape)
    return result, shape.numel() * result.element_size()


def _columns(result: Any, columns: Any, *others: Any) -> tuple[torch.Tensor, int]:
    """The image is made as large as the columns it is folded from."""
    return result, columns.numel() * columns.element_size()


def _bags(result: Any, *others: Any) -> tuple[torch.Tensor, int]:
    """The bag of each index has one element more, for where the last bag ends."""
    bag_of_index = result[1]  # without elements where the kernel does not need it
    extra = 1 if bag_of_index.numel() else 0
    return bag_of_index, (bag_of_index.numel() + extra) * bag_of_index.element_size()


_RULES: dict[Any, Callable[..., tuple[torch.Tensor, int]]] = {
    aten.mse_loss.default: _loss,
    aten.smooth_l1_loss.default: _loss,
    aten.soft_margin_loss.default: _loss,
    aten.binary_cross_entropy.default: _loss,
    aten.col2im.default: _columns,
    aten._embedding_bag.default: _bags,
    aten._embedding_bag_forward_only.default: _bags,
}
