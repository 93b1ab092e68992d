"""What a kernel reckons with, rounded alike on a GPU and in Triton's interpreter.

The interpreter differs from a GPU in three points, and all are mended here:

    tl.dot of bfloat16      multiplies the bit patterns (Triton 3.7): `product` takes float32 there
    float32 to bfloat16     cuts off, where a GPU rounds to the nearest: `rounded` does there too
    tl.fma                  rounds twice: `fused` takes float64 there
"""

import triton
import triton.language as tl

from memlab.kernels.launching import INTERPRETED

# What a kernel sees of a module must be a constant of the language.
_INTERPRETED = tl.constexpr(INTERPRETED)


@triton.jit
def product(a, b, total):
    """total + a @ b, in float32; float32 factors are taken in full, not in tf32."""
    if _INTERPRETED:
        a = a.to(tl.float32)
        b = b.to(tl.float32)
    return tl.dot(a, b, total, input_precision="ieee")


@triton.jit
def rounded(x, dtype: tl.constexpr):
    """float32 `x` in `dtype`, to the nearest, ties to even."""
    if _INTERPRETED and dtype == tl.bfloat16:
        bits = x.to(tl.uint32, bitcast=True)
        up = bits + 0x7FFF + ((bits >> 16) & 1)
        nearest = (up & 0xFFFF0000).to(tl.float32, bitcast=True)
        x = tl.where(x == x, nearest, x)
    return x.to(dtype)


@triton.jit
def fused(a, b, c):
    """a·b + c, rounded once."""
    if _INTERPRETED:  # numpy rounds twice; in float64 the product is exact
        exact = tl.to_tensor(a).to(tl.float64) * tl.to_tensor(b).to(tl.float64)
        return (exact + c.to(tl.float64)).to(tl.float32)
    return tl.fma(a, b, c)


@triton.jit
def quotient(x, divisor):
    """x/divisor to the nearest, of finite numbers; `divisor` is one of many x.

    Markstein 1990: one division for all, then three operations each. What the first quotient
    leaves over is exact, and corrects it.
    """
    inverse = tl.div_rn(1.0, divisor)
    about = x * inverse
    left = fused(-about, divisor, x)
    return fused(left, inverse, about)


@triton.jit
def fractions(numbers, scales):
    """numbers/scales, of a block of zeros 0; both times the same power of two.

    Without it the inverse of a scale below 2⁻¹²⁶ would be infinite.
    """
    power = tl.where(scales < 2.0**-60, 2.0**64, tl.where(scales > 2.0**60, 2.0**-64, 1.0))
    divisors = tl.where(scales == 0, 1.0, scales * power)
    return quotient(numbers * power[:, None], divisors[:, None])
