"""8-bit Adam: both moments stored as one byte per element and one scale per block of 256.

Saves    three quarters of AdamW's state: 2N + 8⌈N/256⌉ bytes, not 8N. Weights with fewer than 4096
         elements keep float32 moments.
Costs    decoding and encoding both moments in every step, and their rounding errors. Shared by all
         weights: 2 KiB of codebooks and 130 KiB of lookup tables. Temporaries: 8 MiB per chunk.
Source   Dettmers et al. 2021, arXiv 2110.02861; the optimizers of bitsandbytes and torchao. Zero
         point: Li et al. 2023, arXiv 2309.01507, section 4.1, who observed it with 4 bits.

Adds to memlab.reference.adam8bit: weight decay, chunked updates (8 MiB of temporaries for any size
of weight), a lookup table in place of the search, one codebook for all weights, and everything that
AdamW adds.

The step is AdamW's, computed from decoded moments before they are rounded again. The dynamic
codebook spans seven decades. It is most precise near a block's absmax, and keeps only the sign of
values a million times smaller.

Second moments are squares, so they span twice as many decades as first moments. In one block a
small v can round to 0 while its m does not; m/√v is then bounded only by m/eps, a step of hundreds
or millions of times lr. Here a positive v never becomes 0: it is rounded up to the smallest entry,
which can only shorten the step. The remaining rounding errors lengthen a step beyond exact Adam's
bound only for gradients constructed to do so. A weight whose gradients are all zero has zero
moments and does not move.
"""

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from memlab.optim.adamw import AdamW
from memlab.optim.moments import BLOCK_SIZE, Moment, QuantizedMoment, is_worth_quantizing


class Adam8bit(AdamW):
    """AdamW with decoupled weight decay, and 8-bit moments for weights with at least 4096 elements.

    Arguments and defaults are AdamW's.
    """

    def moments(self, weight: Tensor, group: dict[str, Any]) -> Sequence[Moment]:
        """Return both moments, in 8 bits if the weight is large enough."""
        if is_worth_quantizing(weight):
            return QuantizedMoment("exp_avg", signed=True), QuantizedMoment(
                "exp_avg_sq", signed=False
            )
        return self.float_moment("exp_avg", group), self.float_moment("exp_avg_sq", group)

    def block_size(self, weight: Tensor, group: dict[str, Any]) -> int:
        """Return how many elements share a scale."""
        return BLOCK_SIZE
