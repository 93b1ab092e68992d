"""Operations for kernels that round the same on a GPU and in Triton's interpreter.

The interpreter differs from a GPU in three ways, which are fixed here:

    tl.dot of bfloat16      multiplies the bit patterns (Triton 3.7); `matmul_add` uses float32
    float32 to bfloat16     truncates, but a GPU rounds to nearest; `cast` rounds to nearest
    tl.fma                  rounds twice; `fma` uses float64
"""

import triton
import triton.language as tl

from memlab.kernels.launching import INTERPRETED

# Kernels can only use a module's globals if they are constexpr.
_INTERPRETED = tl.constexpr(INTERPRETED)


@triton.jit
def matmul_add(a, b, acc):
    """acc + a @ b in float32; float32 inputs are not rounded to tf32."""
    if _INTERPRETED:
        a = a.to(tl.float32)
        b = b.to(tl.float32)
    return tl.dot(a, b, acc, input_precision="ieee")


@triton.jit
def cast(x, dtype: tl.constexpr):
    """Cast float32 `x` to `dtype`, rounding to nearest, ties to even."""
    if _INTERPRETED and dtype == tl.bfloat16:
        bits = x.to(tl.uint32, bitcast=True)
        up = bits + 0x7FFF + ((bits >> 16) & 1)
        nearest = (up & 0xFFFF0000).to(tl.float32, bitcast=True)
        x = tl.where(x == x, nearest, x)
    return x.to(dtype)


@triton.jit
def fma(a, b, c):
    """a·b + c, rounded once."""
    if _INTERPRETED:  # numpy rounds twice; a·b is exact in float64
        exact = tl.to_tensor(a).to(tl.float64) * tl.to_tensor(b).to(tl.float64)
        return (exact + c.to(tl.float64)).to(tl.float32)
    return tl.fma(a, b, c)


@triton.jit
def divide_by_shared(x, divisor):
    """x/divisor, rounded to nearest, for finite values and a `divisor` shared by many x.

    Markstein 1990: one division for all, then three operations each. The remainder of the estimate
    is exact and corrects it.
    """
    reciprocal = tl.div_rn(1.0, divisor)
    estimate = x * reciprocal
    remainder = fma(-estimate, divisor, x)
    return fma(remainder, reciprocal, estimate)


@triton.jit
def divide_by_scales(x, scales):
    """Divide each block by its scale; a block of zeros gives zeros.

    Both are multiplied by the same power of two first, because the reciprocal of a scale below
    2⁻¹²⁶ would overflow.
    """
    power = tl.where(scales < 2.0**-60, 2.0**64, tl.where(scales > 2.0**60, 2.0**-64, 1.0))
    divisors = tl.where(scales == 0, 1.0, scales * power)
    return divide_by_shared(x * power[:, None], divisors[:, None])
