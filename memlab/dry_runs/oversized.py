"""Results smaller than their storage.

Some CPU kernels compute into a large buffer and return a small tensor in it without freeing the
rest: the scalar from `F.mse_loss` keeps as many bytes alive as its input. A fake tensor has only
the result's shape, so a dry run enlarges its storage.
"""

from collections.abc import Callable
from typing import Any

import torch

from memlab.internals.torch_internals import resize_storage_

aten = torch.ops.aten


def enlarge(func: Any, args: tuple[Any, ...], result: Any) -> None:
    """Enlarge the storage of the fake `result` of `func(*args)` to the real one's size."""
    rule = _RULES.get(func)
    if rule is not None:
        tensor, num_bytes = rule(result, *args)
        if num_bytes > tensor.untyped_storage().nbytes():
            # bypasses the resize hook of the registry: the real storage has this size from birth
            resize_storage_(tensor.untyped_storage(), num_bytes)


def _elementwise_loss(
    result: Any, input: Any, target: Any, *others: Any
) -> tuple[torch.Tensor, int]:
    """The buffer has the losses of all elements; their mean overwrites the first."""
    shape = torch.broadcast_shapes(input.shape, target.shape)
    return result, shape.numel() * result.element_size()


def _columns(result: Any, columns: Any, *others: Any) -> tuple[torch.Tensor, int]:
    """The image's storage is as large as the columns."""
    return result, columns.numel() * columns.element_size()


def _bags(result: Any, *others: Any) -> tuple[torch.Tensor, int]:
    """The storage of the bag indices has one more element, for the end of the last bag."""
    bag_of_index = result[1]  # empty if the kernel does not need it
    extra = 1 if bag_of_index.numel() else 0
    return bag_of_index, (bag_of_index.numel() + extra) * bag_of_index.element_size()


_RULES: dict[Any, Callable[..., tuple[torch.Tensor, int]]] = {
    # `F.l1_loss` and `F.huber_loss` are not among them
    # (test_a_dry_run_has_the_storages_of_the_real_kernels).
    aten.mse_loss.default: _elementwise_loss,
    aten.smooth_l1_loss.default: _elementwise_loss,
    aten.soft_margin_loss.default: _elementwise_loss,
    aten.binary_cross_entropy.default: _elementwise_loss,
    aten.col2im.default: _columns,
    aten._embedding_bag.default: _bags,
    aten._embedding_bag_forward_only.default: _bags,
}
