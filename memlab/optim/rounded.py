"""AdamW in pure bfloat16: weights, gradients and moments of two bytes, with stochastic rounding.

Saves    8 of 16 bytes per weight; 2 for the weight, 2 for its gradient, 4 for its moments remain.
Costs    random bits for three tensors, and rounding noise.
Source   Loshchilov and Hutter 2019, arXiv 1711.05101, Algorithm 2 (AdamW); Gupta et al. 2015,
         arXiv 1502.02551 (stochastic rounding). torchao's optimizers with bf16_stochastic_round
         round weights stochastically and moments to nearest.

Adds to memlab.reference.adamw: bfloat16 storage with stochastic rounding (memlab.rounding).

With round to nearest a weight ignores updates below half the spacing of bfloat16, and a second
moment never decreases: it shrinks by 1/1000 per step, and half a spacing is at least 2/1000.
"""

from collections.abc import Iterable
from typing import Any

import torch

from memlab.optim.adamw import AdamW


class RoundedAdamW(AdamW):
    """AdamW with bfloat16 weights and moments, computed in float32 and rounded stochastically.

    Arguments are AdamW's without `rounding` and `moment_dtype`, which are fixed. Raise TypeError
    for weights of another dtype.
    """

    def __init__(self, params: Iterable[Any], *args: Any, **adamw: Any) -> None:
        super().__init__(params, *args, rounding="stochastic", moment_dtype=torch.bfloat16, **adamw)

    def require_group(self, group: dict[str, Any]) -> None:
        """Raise TypeError also for weights of any dtype but bfloat16."""
        super().require_group(group)
        for weight in group["params"]:
            if weight.dtype != torch.bfloat16:
                raise TypeError(f"got weights of {weight.dtype}; give bfloat16, or use AdamW")
