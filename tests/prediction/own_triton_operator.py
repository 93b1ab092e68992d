"""A Triton operator, as libraries register them. It lies outside of a test, as they do."""

import torch
import triton
import triton.language as tl


@triton.jit
def _double(x, y, count, BLOCK: tl.constexpr):
    place = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(y + place, 2 * tl.load(x + place, mask=place < count), mask=place < count)


@torch.library.triton_op("memlab_tests_triton::doubled", mutates_args={})
def doubled(x: torch.Tensor) -> torch.Tensor:
    result = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    torch.library.wrap_triton(_double)[(1,)](x, result, x.numel(), BLOCK=64)
    return result
