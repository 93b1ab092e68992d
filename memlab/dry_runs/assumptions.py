"""Assume a size for results whose size depends on values.

`x[mask]` has as many elements as the mask selects, which is unknown in a dry run. `assume="most"`
selects all of them, the upper bound; a fraction, such as 0.15, selects that fraction.

    operator                                        fraction of
    x[mask], masked_select, nonzero, where(mask)    the mask's elements
    unique, unique_consecutive                      the input's elements, as unique elements
    torchvision's nms                               the boxes, as boxes to keep
    ctc_loss                                        the longest possible target, as its length

Results without an upper bound (bincount, repeat_interleave with a tensor) still raise.
"""

import math
from collections.abc import Callable
from typing import Any

import torch

from memlab.dry_runs.routing import IMBALANCE
from memlab.metering.frames import user_line

aten = torch.ops.aten
ASSUMED = "assumed where a size depends on values"  # the beginning of the note


def fraction_of(assume: object) -> float | None:
    """Return 1.0 for "most", a fraction unchanged, and None for None and for an assumption on the
    routing; raise ValueError otherwise."""
    if assume is None or str(assume).startswith(IMBALANCE):
        return None
    if assume == "most":
        return 1.0
    try:
        fraction = float(assume)  # type: ignore[arg-type]
    except (TypeError, ValueError):
        fraction = math.nan
    if not 0 < fraction <= 1:
        raise ValueError(
            f'got assume={assume!r}; use "most" (every element is chosen), a fraction above 0 '
            f'and at most 1, or "{IMBALANCE}2"'
        )
    return fraction


class Assumptions:
    """Make results of an assumed shape, and record the lines that need them."""

    def __init__(self, assume: object = None) -> None:
        self.fraction = fraction_of(assume)
        self._lines: dict[str, None] = {}  # in order

    def result(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Return the operator's result in the assumed shape; None if nothing is assumed."""
        shaped = _SHAPED.get(str(func))
        if self.fraction is None or shaped is None:
            return None
        self._lines[user_line()] = None
        return shaped(self._share, *args, **kwargs)

    def remedy(self, func: Any) -> str:
        """Return the advice to set `assume`, for this operator's error message."""
        if self.fraction is not None or str(func) not in _SHAPED:
            return ""
        return ", or set an assumption: --assume most, or a fraction (assume= in Python)"

    def _share(self, count: int) -> int:
        assert self.fraction is not None
        return math.ceil(count * self.fraction)

    def __str__(self) -> str:
        if self.fraction == 1:
            return "every element is chosen"
        return f"a fraction of {self.fraction:g} of the elements is chosen"

    def notes(self) -> tuple[str, ...]:
        """Return a note on the assumption and the lines that used it."""
        if not self._lines:
            return ()
        first, *others = self._lines
        more = f" and {len(others)} more" if others else ""
        return (f"{ASSUMED} ({first}{more}): {self}",)


Share = Callable[[int], int]


def _index(share: Share, tensor: torch.Tensor, indices: Any) -> torch.Tensor:
    """Turn each dimension of a mask into an index tensor, as torch does."""
    plain: list[torch.Tensor | None] = []
    for index in indices:
        if index is not None and index.dtype in (torch.bool, torch.uint8):
            chosen = share(index.numel())
            plain += [index.new_empty(chosen, dtype=torch.int64) for _ in range(index.dim())]
        else:
            plain.append(index)
    return aten.index.Tensor(tensor, plain)


def _nonzero(share: Share, tensor: torch.Tensor) -> torch.Tensor:
    return tensor.new_empty(share(tensor.numel()), tensor.dim(), dtype=torch.int64)


def _masked_select(share: Share, tensor: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    shape = torch.broadcast_shapes(tensor.shape, mask.shape)
    return tensor.new_empty(share(shape.numel()))


def _unique2(
    share: Share,
    tensor: torch.Tensor,
    sorted: bool = True,
    return_inverse: bool = False,
    return_counts: bool = False,
) -> tuple[torch.Tensor, ...]:
    different = share(tensor.numel())
    return _unique_parts(
        tensor, (different,), tensor.shape, different, return_inverse, return_counts
    )


def _unique_consecutive(
    share: Share,
    tensor: torch.Tensor,
    return_inverse: bool = False,
    return_counts: bool = False,
    dim: int | None = None,
) -> tuple[torch.Tensor, ...]:
    if dim is not None:
        return _unique_dim(share, tensor, dim, True, return_inverse, return_counts)
    return _unique2(share, tensor, True, return_inverse, return_counts)


def _unique_dim(
    share: Share,
    tensor: torch.Tensor,
    dim: int,
    sorted: bool = True,
    return_inverse: bool = False,
    return_counts: bool = False,
) -> tuple[torch.Tensor, ...]:
    shape, rows = list(tensor.shape), tensor.shape[dim]
    shape[dim] = share(rows)
    return _unique_parts(tensor, shape, (rows,), shape[dim], return_inverse, return_counts)


def _unique_parts(
    tensor: torch.Tensor,
    shape: Any,
    inverse_shape: Any,
    different: int,
    return_inverse: bool,
    return_counts: bool,
) -> tuple[torch.Tensor, ...]:
    inverse = inverse_shape if return_inverse else (0,)
    counts = (different,) if return_counts else (0,)
    indices = (tensor.new_empty(size, dtype=torch.int64) for size in (inverse, counts))
    return (tensor.new_empty(shape), *indices)


def _ctc_loss(
    share: Share,
    log_probs: torch.Tensor,
    targets: torch.Tensor,
    input_lengths: Any,
    target_lengths: Any,
    *others: Any,
    **kwargs: Any,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Concatenated targets are assumed to have equal lengths."""
    T, B = log_probs.shape[:2]
    longest = share(targets.shape[1] if targets.dim() == 2 else math.ceil(targets.numel() / B))
    return log_probs.new_empty(B), log_probs.new_empty(B, T, 2 * longest + 1)


def _nms(share: Share, boxes: torch.Tensor, *others: Any) -> torch.Tensor:
    return boxes.new_empty(share(boxes.shape[0]), dtype=torch.int64)


_SHAPED: dict[str, Callable[..., Any]] = {
    "aten.index.Tensor": _index,
    "aten.nonzero.default": _nonzero,
    "aten.masked_select.default": _masked_select,
    "aten._unique2.default": _unique2,
    "aten.unique_dim.default": _unique_dim,
    "aten.unique_consecutive.default": _unique_consecutive,
    "aten._ctc_loss.Tensor": _ctc_loss,
    "torchvision.nms.default": _nms,
}
