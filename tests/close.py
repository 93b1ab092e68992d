"""Compare computed floats, with an error bound that follows from what was summed."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

WIDEST = 1 / 8  # a wider bound, as a share of the sum, proves nothing


def assert_close(
    got: Tensor | Sequence[Tensor],
    wanted: Tensor | Sequence[Tensor],
    *,
    terms: float = 256,
    summed: Tensor | float | None = None,
    dtype: torch.dtype | None = None,
) -> None:
    """Require |got - wanted| <= terms · eps · summed in every element.

    An addition rounds its partial sum by at most eps/2 of it, so two orders of adding `terms` terms
    differ by at most terms · eps of the largest partial sum. Other CPUs add in other orders. The
    largest |wanted| stands for that sum. Pass `summed` where terms cancel: a number, or one element
    for each of wanted's. `dtype`, whose eps it is, is got's own unless values were rounded before.
    """
    __tracebackhide__ = True
    if not isinstance(got, Tensor):
        for one, other in zip(got, wanted, strict=True):
            assert_close(one, other, terms=terms, summed=summed, dtype=dtype)
        return
    assert (got.dtype, got.shape) == (wanted.dtype, wanted.shape)
    if not (got.is_floating_point() and got.numel()):
        assert torch.equal(got, wanted)
        return
    share = terms * torch.finfo(dtype or got.dtype).eps
    assert share <= WIDEST, f"{terms} terms of {dtype or got.dtype}: the bound proves nothing"
    got, wanted = got.detach().double(), wanted.detach().double()
    size = wanted.abs().max() if summed is None else torch.as_tensor(summed).detach().double()
    allowed = (share * size).expand_as(wanted)
    difference = torch.where(got == wanted, 0, (got - wanted).abs())
    off = ~(difference <= allowed)  # NaN is off, too
    if off.any():
        at = (difference - allowed).nan_to_num(torch.inf).where(off, -torch.inf).argmax()
        value, expected, apart, most = (
            each.flatten()[at].item() for each in (got, wanted, difference, allowed)
        )
        raise AssertionError(
            f"{off.sum()} of {off.numel()} elements are off. Element {at} is {value:.9g}, expected "
            f"{expected:.9g}: they differ by {apart:.3g}, allowed is {most:.3g}"
        )


def is_close(got: Tensor, wanted: Tensor, **bound: Any) -> bool:
    """Return whether `assert_close` accepts."""
    try:
        assert_close(got, wanted, **bound)
    except AssertionError:
        return False
    return True
