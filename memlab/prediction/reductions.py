"""Scratch memory of CUDA's reductions.

Long reductions over a slow dimension (such as a bias's gradient, a sum over tokens) are split among
thread blocks, which exchange partial results through a buffer. `reduction_bytes` follows
`setReduceConfig` (ATen/native/cuda/Reduce.cuh) line by line.
"""

from collections.abc import Sequence
from math import prod
from typing import Any, NamedTuple

import torch

from memlab.configs.gpus import Gpu

aten = torch.ops.aten

_WARP = 32
_MAX_THREADS = 512
_MIN_VALUES, _MAX_VALUES = 16, 256  # per thread


class _ReductionLayout(NamedTuple):
    """A tensor's dimensions as (size, stride), fastest first, with contiguous ones merged."""

    reduced: list[tuple[int, int]]
    kept: list[tuple[int, int]]


def reduction_bytes(
    shape: Sequence[int],
    strides: Sequence[int],
    reduced: Sequence[int],
    accumulator_bytes: int,
    *,
    offset: int = 0,
    multiprocessors: int = 108,
    threads_per_multiprocessor: int = 2048,
) -> tuple[int, ...]:
    """Return the two buffers of a reduction over dimensions `reduced`: partial results, counters.

    Returns () if one thread block reduces each output. `accumulator_bytes` is the accumulator's
    size: 4 for a float32 sum, 16 for a maximum with its index.
    """
    layout = _layout(shape, strides, reduced)
    inputs = prod(size for size, _ in layout.reduced)
    outputs = prod(size for size, _ in layout.kept)
    if not inputs * outputs:
        return ()
    along = not layout.kept or (layout.reduced and layout.reduced[0][1] < layout.kept[0][1])
    dim0, dim1 = (inputs, outputs) if along else (outputs, inputs)
    vector = 1
    fastest = [*(layout.reduced if along else layout.kept), (1, 1)][0][1]
    if fastest == 1 and not along:
        vector = _vector(layout, offset)
        dim0 //= vector
    elif fastest == 1 and dim0 >= 128 and len(layout.reduced) == 1:
        dim0 //= 4
    width, height = _block(dim0, dim1, _MAX_THREADS // vector)
    step_input, step_output = (width, 1) if along else (1, width)
    splits = _ceil(inputs, step_input) >= min(height * 16, _MAX_VALUES)
    if not splits:
        return ()
    values = _ceil(inputs, step_input * height)
    grid = _ceil(outputs // vector, step_output)
    wanted = multiprocessors * (threads_per_multiprocessor // (width * height))
    if values < _MAX_VALUES or grid > wanted:
        return ()
    blocks = max(min(_ceil(wanted, grid), _ceil(values, _MIN_VALUES)), _ceil(values, _MAX_VALUES))
    if blocks == 1:
        return ()
    lanes = 1 if along else width * vector
    return accumulator_bytes * outputs * blocks * lanes, 4 * grid


def _layout(
    shape: Sequence[int], strides: Sequence[int], reduced: Sequence[int]
) -> _ReductionLayout:
    sizes = [(size, stride) for size, stride in zip(shape, strides, strict=True)]
    reduced_dims = sorted((sizes[dim] for dim in reduced), key=lambda dim: dim[1])
    kept = [dim for position, dim in enumerate(sizes) if position not in reduced]
    return _ReductionLayout(_merged(reduced_dims), _merged(kept[::-1]))  # the output is contiguous


def _merged(dims: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    merged: list[tuple[int, int]] = []
    for size, stride in dims:
        if size == 1:
            continue
        if merged and merged[-1][0] * merged[-1][1] == stride:
            merged[-1] = merged[-1][0] * size, merged[-1][1]
        else:
            merged.append((size, stride))
    return merged


def _vector(layout: _ReductionLayout, offset: int) -> int:
    """Return the number of adjacent outputs per thread: up to 4, and a divisor of all strides."""
    vector = 4
    numbers = (offset, layout.kept[0][0], *(s for _, s in (*layout.reduced, *layout.kept[1:])))
    for number in numbers:
        while number % vector:
            vector //= 2
    return vector


def _block(dim0: int, dim1: int, limit: int) -> tuple[int, int]:
    """Return the (width, height) of a thread block."""
    width, height = _power_of_2(dim0, limit), _power_of_2(dim1, limit)
    height = min(height, limit // min(width, _WARP))
    return min(width, limit // height), height


def _power_of_2(number: int, limit: int) -> int:
    """Return the largest power of 2 up to `number`, or `limit` if `number` reaches it."""
    return limit if number >= limit else 1 << max(number.bit_length() - 1, 0)


def _ceil(number: int, divisor: int) -> int:
    return -(-number // divisor)


def reduction_scratch(func: Any, args: Any, kwargs: Any, gpu: Gpu) -> tuple[int, ...]:
    """Return the buffers of one of the REDUCTIONS."""
    position, accumulator_bytes = REDUCTIONS[func]
    tensor = args[0]
    dims = kwargs.get("dim", args[position] if len(args) > position else None)
    dims = [dims] if isinstance(dims, int) else dims
    if not dims or not tensor.dim():
        dims = range(tensor.dim())
    return reduction_bytes(
        tensor.shape,
        tensor.stride(),
        [dim % tensor.dim() for dim in dims],
        accumulator_bytes or max(4, tensor.element_size()),
        offset=tensor.storage_offset(),
        # A reduction is split among all threads: 1,024 per multiprocessor on sm_75, 1,536 on sm_86,
        # sm_89 and sm_120, else 2,048. Unexplained: ConvNeXt's rows are 2 % off in both directions
        # with the RTX 3060's 28 multiprocessors, and only 0.7 % with an A100's 108
        # (test_a_gpu_with_fewer_and_smaller_multiprocessors_splits_a_reduction_less).
        multiprocessors=gpu.multiprocessors,
        threads_per_multiprocessor=gpu.threads_per_multiprocessor,
    )


_NO_DIM = 99  # in place of a position: the operator has no argument for dimensions
REDUCTIONS = {  # operator: (position of its dimensions, accumulator bytes; 0 means from the dtype)
    aten.sum.default: (_NO_DIM, 0),
    aten.sum.dim_IntList: (1, 0),
    aten.mean.default: (_NO_DIM, 0),
    aten.mean.dim: (1, 0),
    aten.linalg_vector_norm.default: (2, 0),
    aten.max.dim: (1, 16),
    aten.min.dim: (1, 16),
    aten.argmax.default: (1, 16),
    aten.argmin.default: (1, 16),
}
