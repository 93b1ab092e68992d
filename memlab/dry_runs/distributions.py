"""Skip torch.distributions' checks of small unknown tensors in a dry run.

They pass, because values that a dry run does not know are valid, and what they allocate is smaller
than the allocator's smallest block. In a script of reinforcement learning they are half of all
operators.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch.distributions import Distribution

from memlab.dry_runs import known_values
from memlab.internals.torch_internals import FakeTensor

_SMALL = 512  # bytes, of CUDA's smallest block


def _is_small_and_unknown(value: Any) -> bool:
    is_small = isinstance(value, FakeTensor) and value.nbytes <= _SMALL
    return is_small and not known_values.is_known(value)


def _initialize(real: Callable[..., None]) -> Callable[..., None]:
    def initialize(
        made: Distribution,
        batch_shape: torch.Size = torch.Size(),  # noqa: B008 - as torch's
        event_shape: torch.Size = torch.Size(),  # noqa: B008
        validate_args: bool | None = None,
    ) -> None:
        given = [value for value in vars(made).values() if isinstance(value, torch.Tensor)]
        if not given or not all(map(_is_small_and_unknown, given)):
            real(made, batch_shape, event_shape, validate_args)
            return
        real(made, batch_shape, event_shape, False)
        if validate_args is None:
            del made._validate_args  # torch's default again
        else:
            made._validate_args = validate_args

    return initialize


def _validate(real: Callable[[Any, Any], None]) -> Callable[[Any, Any], None]:
    def validate(made: Distribution, value: Any) -> None:
        if not _is_small_and_unknown(value):
            real(made, value)

    return validate


STAND_INS: dict[str, Callable[[Any], Any]] = {
    "unvalidated": _initialize,
    "validate_sample": _validate,
}
