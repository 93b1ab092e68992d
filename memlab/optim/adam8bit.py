"""Adam with moments of 8 bits: a code a number, and a scale for each block of 256.

Saves    three quarters of AdamW's state: 2N + 8⌈N/256⌉ bytes, not 8N. Weights of fewer than 4096
         numbers keep theirs in float32.
Costs    a decoding and an encoding of both moments in every step, and their rounding errors. Once
         for all weights, 2 KiB of codes and 130 KiB of tables by which a code is found; on the way
         8 MiB for a piece.
Source   Dettmers et al. 2021, arXiv 2110.02861; bitsandbytes' and torchao's optimizers. The zero
         point: Li et al. 2023, arXiv 2309.01507, section 4.1, who found it in 4 bits.

Adds to memlab.reference.adam8bit: weight decay, chunked updates (8 MiB of temporaries for any size
of weight), a lookup table in place of the search, one codebook for all weights, and all that AdamW
adds.

The step itself is AdamW's, on decoded moments and before they are rounded again. The dynamic code
has seven decades: it is as exact as 8 bits can be near the largest of a block, and knows of what is
a millionth of that no more than its sign.

Second moments are squares, and spread over twice as many decades as first ones. In one block the
nearest code to a small v is 0 while its m is not, and m/√v has no bound but m/eps: a step of
hundreds or millions of times lr. Here a positive v never becomes 0: it becomes the smallest number
of the code, if anything too large, and the step too short. What is left is the rounding of two
codes, which makes a step longer than any of exact Adam's only where gradients are made for it. And
a weight whose gradients are all zero has moments of exactly zero, and stays where it is.
"""

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from memlab.optim.adamw import AdamW
from memlab.optim.moments import BLOCK, Dynamic, Moment, in_8_bits


class Adam8bit(AdamW):
    """AdamW, its decay decoupled, with moments of 8 bits for every weight of at least 4096 numbers.

    Arguments and defaults are AdamW's.
    """

    def moments(self, weight: Tensor, group: dict[str, Any]) -> Sequence[Moment]:
        """Both in 8 bits, where that is worth it."""
        if in_8_bits(weight):
            return Dynamic("exp_avg", signed=True), Dynamic("exp_avg_sq", signed=False)
        return self.number("exp_avg", group), self.number("exp_avg_sq", group)

    def block(self, weight: Tensor, group: dict[str, Any]) -> int:
        """Those that share a scale."""
        return BLOCK
