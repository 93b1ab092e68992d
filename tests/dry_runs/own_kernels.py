"""Triton kernels as other libraries write them."""

import triton
import triton.language as tl


@triton.jit
def twice(x, y, n, BLOCK: tl.constexpr):
    places = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(y + places, 2 * tl.load(x + places, mask=places < n), mask=places < n)


tuned = triton.autotune([triton.Config({}, num_warps=n) for n in (1, 2)], key=["n"])(twice)
