"""Assume which experts the router of a mixture of experts chooses.

`topk` returns the experts of each token, which depend on unknown values. In a dry run the tokens
are spread evenly, or with an imbalance: the busiest expert gets so many times the average. The
indices are then known, and so is every mask and size computed from them (known_values.py).

The values of masks are followed up to LARGEST elements, such as 2048 tokens, 8 of 128 experts.
"""

import math

import torch

from memlab.dry_runs import known_values
from memlab.internals.torch_internals import without_modes
from memlab.metering.frames import user_line

aten = torch.ops.aten
ASSUMED_ROUTING = "assumed where a size depends on the routing"  # the beginning of the note


IMBALANCE = "imbalance:"  # how an assumption on the routing begins


def imbalance_of(assume: object) -> float:
    """Return the number after "imbalance:", 1 for other assumptions; raise ValueError for a number
    below 1 and for no number."""
    if not isinstance(assume, str) or not assume.startswith(IMBALANCE):
        return 1.0
    try:
        imbalance = float(assume.removeprefix(IMBALANCE))
    except ValueError:
        imbalance = math.nan
    if not 1 <= imbalance < math.inf:
        raise ValueError(
            f"got assume={assume!r}; give the tokens of the busiest expert relative to the "
            f"average, from 1, such as {IMBALANCE}2"
        )
    return imbalance


class Routing:
    """Give `topk` known indices, and record whether sizes depend on them.

    imbalance   tokens of the busiest expert, relative to the average
    """

    def __init__(self, assume: object = None) -> None:
        self.imbalance = imbalance_of(assume)
        self._lines: dict[str, None] = {}  # where sizes depended on it, in order

    def assume(self, scores: torch.Tensor, indices: torch.Tensor) -> None:
        """Give the result of `topk` values, if its input's values are unknown."""
        if indices.dim() and indices.numel() and not known_values.is_known(scores):
            with without_modes():
                # With these indices every mask, `nonzero` and index of a loop over experts has its
                # size. transformers' default experts are one grouped matmul, whose bytes do not
                # depend on the routing (test_masks_have_known_sizes).
                chosen = balanced(indices.shape, scores.shape[-1], self.imbalance)
            known_values.assume(indices, chosen)

    def note_use(self) -> None:
        """Record the line of an operator whose result's size follows from known values."""
        self._lines[user_line()] = None

    def notes(self) -> tuple[str, ...]:
        """Return a note if a size depended on the routing."""
        if not self._lines:
            return ()
        first, *others = self._lines
        more = f" and {len(others)} more" if others else ""
        how = "every expert gets the same number of tokens"
        if self.imbalance > 1:
            how = f"the busiest expert gets {self.imbalance:g} times as many tokens as the average"
        return (f"{ASSUMED_ROUTING} ({first}{more}): {how}; --assume imbalance:N changes it",)


def balanced(shape: torch.Size, experts: int, imbalance: float) -> torch.Tensor:
    """Return int64 indices (..., k): k different experts for each token.

    Expert 0 is the busiest: it is chosen by the first tokens. The others follow in turn.
    """
    *_, k = shape
    tokens = shape.numel() // k
    if k >= experts:
        return torch.arange(k, dtype=torch.int64).expand(shape).contiguous()
    busiest = min(tokens, round(imbalance * tokens * k / experts))
    chosen = torch.empty(tokens, k, dtype=torch.int64)
    is_others = torch.ones(tokens, k, dtype=torch.bool)
    is_others[:busiest, 0] = False
    chosen[:busiest, 0] = 0
    count = tokens * k - busiest
    chosen[is_others] = 1 + torch.arange(count, dtype=torch.int64) % (experts - 1)
    return chosen.view(shape)
