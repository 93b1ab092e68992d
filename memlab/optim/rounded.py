"""AdamW in bfloat16: weights, gradients and moments of two bytes, every update rounded at random.

Saves    8 of 16 bytes a weight: 2 of weight, 2 of gradient and 4 of moments are left.
Costs    random numbers for three tensors, and the noise of their roundings.
Source   Loshchilov and Hutter 2019, arXiv 1711.05101, Algorithm 2 (AdamW); Gupta et al. 2015,
         arXiv 1502.02551 (stochastic rounding); torchao's optimizers with bf16_stochastic_round
         round the weights so, and the moments to the nearest.

Rounded to the nearest, a weight does not move by less than half a step of bfloat16, and a second
moment never falls: in a step it loses a thousandth, and half a step of bfloat16 is at least two.
"""

from collections.abc import Iterable
from typing import Any

import torch

from memlab.optim.adamw import AdamW


class RoundedAdamW(AdamW):
    """AdamW whose weights and moments are bfloat16, computed in float32 and rounded at random.

    Arguments are AdamW's but for `rounding` and `moment_dtype`, which are settled. Raises TypeError
    for weights of another dtype.
    """

    def __init__(self, params: Iterable[Any], *args: Any, **adamw: Any) -> None:
        settled = {"rounding": "stochastic", "moment_dtype": torch.bfloat16}
        super().__init__(params, *args, **adamw, **settled)

    def require_group(self, group: dict[str, Any]) -> None:
        """As AdamW's, for bfloat16 alone."""
        super().require_group(group)
        for weight in group["params"]:
            if weight.dtype != torch.bfloat16:
                raise TypeError(f"got weights of {weight.dtype}; give bfloat16, or use AdamW")
