"""FP8 matmuls on a CPU: an operator that does what torch's `_scaled_mm` does.

torch 2.13 gives `_scaled_mm` on a CPU to oneDNN. With one scale per tensor oneDNN has only its
reference implementation (10 million multiplications a second), and on CPUs with AVX2 at most it
refuses some shapes.
"""

import torch
from torch import Tensor


@torch.library.custom_op("memlab::scaled_mm_on_cpu", mutates_args=())
def scaled_mm_on_cpu(
    a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor, dtype: torch.dtype
) -> Tensor:
    """Decode a (n, k) and b (k, m) to float32, and return their product in `dtype`.

    One operator, so that a meter sees no more tensors than on a GPU.
    """
    with torch.autocast("cpu", enabled=False):
        return ((a.float() * scale_a) @ (b.float() * scale_b)).to(dtype)


@scaled_mm_on_cpu.register_fake
def _(a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor, dtype: torch.dtype) -> Tensor:
    return a.new_empty(a.shape[0], b.shape[1], dtype=dtype)


# The operators' names in traces.
SCALED_MM = frozenset(
    {torch.ops.aten._scaled_mm.default, torch.ops.memlab.scaled_mm_on_cpu.default}
)
