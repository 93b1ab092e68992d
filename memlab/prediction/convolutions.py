"""Workspaces of cuDNN's convolutions.

torch allocates a workspace for one call of cuDNN, through its caching allocator, and frees it right
after (Conv_v8.cpp, `run_conv_plan`). So it counts as allocated and as reserved memory. Before, it
copies tensors in another layout than the kernel's. Which kernel cuDNN picks depends on the card,
the shapes and cuDNN's version:

    with cuDNN       it is asked (cudnn.py), for the convolutions that torch gives to it: torch has
                     its own kernels for most depthwise convolutions, and where cuDNN is wrong
    without cuDNN    a rule decides (convolution_rule.py)

torch takes the first plan of the heuristics that runs, then of the fallback list, without plans
that round inputs, use TF32 against the setting, or sum in a random order in deterministic mode. A
plan whose workspace doesn't fit is passed over; the simulated allocator goes on without a
workspace. With `torch.backends.cudnn.benchmark` it runs them all once, with the largest workspace,
and keeps the fastest of the first ten, which nobody can know; `largest_bytes` is the upper bound.
It covers the plans that cuDNN lists without a driver: a residual network on an H200 reserved 5,408
MiB in the trials, of which they explain 952.

Held against the 1,026 workspaces of 342 convolutions on an H200 (torch 2.11, cuDNN 9.19), relative
to the bytes of input, weight and output:

                     exact    within 2 %    nine of ten within
    cuDNN 9.19         650         83 %                  6.5 %
    cuDNN 9.24         505         72 %                   39 %
    the rule           233         64 %                  100 %

The rest is mostly this: without a driver, cuDNN has fewer plans than with one.

    1 × 1 kernels       a matmul by cuBLASLt, which wants a driver: at most 4 MiB of workspace. So
                        these are not asked
    depthwise           kernels without copies, for weight gradients and for contiguous float16,
                        which are not asked either
    weight gradients    on Hopper, a sum split over all multiprocessors is split over about 18: up
                        to a quarter of the bytes is missing. So the rule's upper bound is printed
"""

from collections.abc import Iterable, Iterator, Mapping
from functools import cache
from itertools import chain
from math import prod
from typing import Any

import torch

from memlab.configs.gpus import Gpu
from memlab.configs.targets import Target
from memlab.internals.torch_internals import suggest_memory_format
from memlab.metering.copies import copied_bytes
from memlab.prediction import convolution_rule, cudnn
from memlab.prediction.convolution_rule import Call
from memlab.trace import Event
from memlab.units import format_bytes

aten = torch.ops.aten

FORWARD = aten.convolution.default
BACKWARD = aten.convolution_backward.default
_GRADIENTS = ("data gradient", "weight gradient")
_HALVES = (torch.float16, torch.bfloat16)
_INT32 = 2**31
_HOPPER = (9, 0)


def scratch_bytes(func: Any, args: Any, result: Any, target: Target) -> list[tuple[int, ...]]:
    """Return the buffers of each of a convolution's kernels, which run one after another."""
    call = _call(func, args, result, target)
    copies = tuple(copied_bytes(func, args, result, "cuda"))
    sizes = _asked(call) if is_asked(target) else convolution_rule.workspaces(call)
    if not any(sizes):
        return [copies] if copies else []
    return [(*copies, size) if size else copies for size in sizes]


def largest_bytes(func: Any, args: Any, result: Any, target: Target) -> int | None:
    """Return the largest workspace that cuDNN may choose; None if the choice is known."""
    call = _call(func, args, result, target)
    if torch.backends.cudnn.benchmark and is_asked(target) and _uses_cudnn(call):
        return max(chain([0], *(_tried(*_question(call, kernel)) for kernel in call.kernels)))
    is_sure = is_asked(target) and target.capability < _HOPPER
    return None if func is FORWARD or is_sure else convolution_rule.largest_bytes(call)


def is_asked(target: Target) -> bool:
    """Return whether cuDNN answers for this GPU."""
    return cudnn.answers_for(target.chip)


def with_largest(events: Iterable[Event], largest: Mapping[int, int]) -> Iterator[Event]:
    """Replace the workspaces of convolutions by the largest ones.

    `largest` has their bytes by the storage that the convolution allocated last.
    """
    events = tuple(events)
    replaced = {event.operator for event in events if event.storage in largest}
    for event in events:
        if event.category != "workspace" or event.operator not in replaced:
            yield event
        if event.bytes > 0 and event.storage in largest:
            size = largest[event.storage]
            workspace = event._replace(bytes=size, storage=-event.storage, category="workspace")
            yield workspace
            yield workspace._replace(bytes=-size)


def note(expected_bytes: int, most_bytes: int | None, target: Target) -> str:
    """Return what decided the workspaces, and both reserved peaks if they differ."""
    expected, most = format_bytes(expected_bytes), format_bytes(most_bytes or expected_bytes)
    if is_asked(target):
        asked = (
            f"convolutions: workspaces as cuDNN {cudnn.version()} chooses them for this GPU; other "
            f"versions may choose others"
        )
        return asked if expected == most else f"{asked}: {expected} to {most} are reserved"
    rule = (
        f"convolutions: workspaces by a rule; cuDNN {cudnn.OLDEST_NAME} or newer would tell them "
        f"(memlab[cudnn], on Linux)"
    )
    if expected == most:
        return rule
    return (
        f"{rule}: {expected} are reserved if cuDNN copies input and output of a convolution into a "
        f"workspace, as most measured trainings did; with other kernels up to {most}"
    )


# ------------------------------------------------------------------ what torch asks cuDNN


def _call(func: Any, args: Any, result: Any, target: Target) -> Call:
    if func is FORWARD:
        x, weight, _, *others = args
        return Call(("forward",), target, x, weight, result, *others)
    y, x, weight, _, *others, mask = args
    kernels = tuple(name for name, wanted in zip(_GRADIENTS, mask, strict=False) if wanted)
    return Call(kernels, target, x, weight, y, *others)


def _asked(call: Call) -> list[int]:
    """Return the workspace of each kernel: of the first plan that fits into the GPU."""
    asked = _asked_kernels(call)
    return [_first(*_question(call, kernel)) if kernel in asked else 0 for kernel in call.kernels]


def _asked_kernels(call: Call) -> tuple[str, ...]:
    if call.is_matmul or not _uses_cudnn(call):
        return ()
    if _is_depthwise(call):
        return tuple(k for k in call.kernels if k != _GRADIENTS[1]) if _is_last(call) else ()
    return call.kernels


def _uses_cudnn(call: Call) -> bool:
    """Return whether torch gives the convolution to cuDNN (Convolution.cpp, `use_cudnn`).

    cuDNN 9.3 and newer also gets tensors of 2^31 elements and more, which older versions do not.
    """
    is_known = str(call.x.dtype).removeprefix("torch.") in cudnn.DTYPES
    if not torch.backends.cudnn.enabled or not is_known or not call.x.numel() * call.y.numel():
        return False
    if call.x.dtype == torch.bfloat16 and call.target.capability < (8, 0):
        return False
    if any(out >= step for out, step in zip(call.output_padding, call.stride, strict=False)):
        return False
    if _is_depthwise(call):
        return _is_large_depthwise(call) or _is_last(call)
    # These versions return wrong results (pytorch #163539).
    is_wrong = 90800 <= cudnn.number() < 91500 and not _is_last(call) and call.x.dtype in _HALVES
    return not (is_wrong and call.x.dim() == 5 and prod(call.weight.shape[2:]) > 1)


def _is_depthwise(call: Call) -> bool:
    return call.groups == call.x.shape[1] > 1 and not call.transposed


def _is_large_depthwise(call: Call) -> bool:
    """Return whether torch's own depthwise kernels cannot index the tensors."""
    is_broken = 91000 < cudnn.number() < 91500 and _is_last(call)
    return max(call.x.numel(), call.weight.numel()) >= _INT32 and not is_broken


def _is_last(call: Call) -> bool:
    """Return whether cuDNN gets channels-last tensors (`cudnn_conv_suggest_memory_format`)."""
    if call.x.dim() == 3 or call.x.dtype == torch.float64:
        return False
    formats = {suggest_memory_format(call.x), suggest_memory_format(call.weight)}
    return formats != {torch.contiguous_format}


def _question(call: Call, kernel: str) -> tuple[Gpu, cudnn.Convolution, frozenset[int]]:
    """Return the card, the call of cuDNN and the numerical notes that torch refuses."""
    operation = cudnn.OPERATIONS[kernel]
    x, y = call.x, call.y
    if call.transposed:  # the gradient of a convolution from its output to its input
        x, y = y, x
        operation = _TRANSPOSED.get(operation, operation)
    dims, is_last = x.dim() - 2, _is_last(call)
    convolution = cudnn.Convolution(
        operation,
        str(x.dtype).removeprefix("torch."),
        _operand(x, is_last),
        _operand(call.weight, is_last),
        _operand(y, is_last),
        *(
            _in_two_dimensions(fill, tuple(map(int, values)) * (dims // len(values)))
            for fill, values in ((1, call.stride), (0, call.padding), (1, call.dilation))
        ),
    )
    refused = {cudnn.DOWN_CONVERTS}
    if x.dtype == torch.float32 and not torch.backends.cudnn.allow_tf32:
        refused.add(cudnn.TENSOR_CORES)
    if torch.backends.cudnn.deterministic or torch.are_deterministic_algorithms_enabled():
        refused.add(cudnn.NONDETERMINISTIC)
    return call.target.chip, convolution, frozenset(refused)


_TRANSPOSED = {cudnn.FORWARD: cudnn.DATA_GRADIENT, cudnn.DATA_GRADIENT: cudnn.FORWARD}


def _in_two_dimensions(fill: int, values: tuple[int, ...]) -> tuple[int, ...]:
    """Return the values of a convolution along one dimension as torch runs it (`view1d_as_2d`)."""
    return (fill, *values) if len(values) == 1 else values


def _operand(tensor: torch.Tensor, is_last: bool) -> cudnn.Operand:
    batch, channels, *pixels = map(int, tensor.shape)
    shape = (batch, channels, *_in_two_dimensions(1, tuple(pixels)))
    order = [0, *range(2, len(shape)), 1] if is_last else range(len(shape))
    strides, step = [0] * len(shape), 1
    for dim in reversed(order):
        strides[dim], step = step, step * shape[dim]
    return cudnn.Operand(shape, tuple(strides))


@cache
def _first(gpu: Gpu, convolution: cudnn.Convolution, refused: frozenset[int]) -> int:
    """Return the workspace of the first plan; 0 if cuDNN has none."""
    return next(_fitting(gpu, convolution, refused), 0)


@cache
def _tried(gpu: Gpu, convolution: cudnn.Convolution, refused: frozenset[int]) -> tuple[int, ...]:
    """Return the workspaces of all plans: `benchmark` allocates the largest of them."""
    return tuple(_fitting(gpu, convolution, refused))


def _fitting(gpu: Gpu, convolution: cudnn.Convolution, refused: frozenset[int]) -> Iterator[int]:
    """Yield the workspaces that fit into the GPU, in torch's order."""
    for mode in (cudnn.HEURISTICS, cudnn.FALLBACK):
        for size in cudnn.workspaces(gpu, convolution, mode, refused):
            if size <= gpu.total_bytes:
                yield size
