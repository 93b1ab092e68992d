"""Workspaces of cuDNN's convolutions.

cuDNN's fastest kernels run on tensor cores and need channels-last tensors. For channels-first
tensors, cuDNN copies input and output into a workspace. torch allocates it for one call of cuDNN
and frees it right after (Conv_v8.cpp, `run_conv_plan`).

    counted      these copies, in forward and twice in backward (input's and weight's gradient);
                 torch's copies of tensors in another layout than the kernel's
    not counted  1 × 1 kernels (a plain matmul), grouped and depthwise convolutions, and channel
                 counts that tensor cores cannot load (the 3 of an image)

Which kernel cuDNN picks is not documented and depends on the card, the shapes and cuDNN's version,
so this rule comes from measurements: 43 trainings of CNNs on an RTX 3060 and an RTX 4060
(benchmarks/evidence/xmem.json). Small batches of two depthwise networks need more. Twice the copies
in every convolution's backward exceed these too, so `largest_bytes` is the upper bound.
"""

from collections.abc import Iterable, Iterator, Mapping
from math import prod
from typing import Any

import torch

from memlab.configs.targets import Target
from memlab.metering.copies import copied_bytes
from memlab.trace import Event
from memlab.units import format_bytes

aten = torch.ops.aten

FORWARD = aten.convolution.default
BACKWARD = aten.convolution_backward.default
_FIRST_TENSOR_CORES = {torch.float16: (7, 0), torch.bfloat16: (8, 0), torch.float32: (8, 0)}
_CHANNELS_LAST = {4: torch.channels_last, 5: torch.channels_last_3d}  # by dimensions
_LOADED_BYTES = 16  # channels are loaded in groups of 16 bytes


def scratch_bytes(func: Any, args: Any, result: Any, target: Target) -> list[tuple[int, ...]]:
    """Return the buffers of each of a convolution's kernels, which run one after another."""
    x, weight, y, groups = _tensors(func, args, result)
    copies = copied_bytes(func, args, result, "cuda")
    kernels = 1 if func is FORWARD else sum(args[-1][:2])
    if _copies_to_channels_last(x, weight, groups, target):
        return [(*copies, x.nbytes + y.nbytes)] * kernels
    return [copies] if copies else []


def largest_bytes(grad: torch.Tensor, x: torch.Tensor) -> int:
    """Return the largest workspace in backward: twice the copies of input and output."""
    return 2 * (x.nbytes + grad.nbytes)


def with_largest(events: Iterable[Event], largest: Mapping[int, int]) -> Iterator[Event]:
    """Replace the workspaces in backward by the largest ones.

    `largest` has their bytes by the storage that the convolution allocated last.
    """
    for event in events:
        if event.category != "workspace" or event.operator != str(BACKWARD):
            yield event
        if event.bytes > 0 and event.storage in largest:
            size = largest[event.storage]
            workspace = event._replace(bytes=size, storage=-event.storage, category="workspace")
            yield workspace
            yield workspace._replace(bytes=-size)


def range_note(expected_bytes: int, most_bytes: int) -> list[str]:
    """Return a note with both reserved peaks, if they differ."""
    expected, most = format_bytes(expected_bytes), format_bytes(most_bytes)
    if expected == most:
        return []
    return [
        f"convolutions: {expected} are reserved if cuDNN copies input and output of a convolution "
        f"into a workspace, as most measured trainings did; with other kernels up to {most}"
    ]


def _tensors(
    func: Any, args: Any, result: Any
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, int]:
    if func is FORWARD:
        return args[0], args[1], result, args[8]
    grad, x, weight = args[:3]
    return x, weight, grad, args[9]


def _copies_to_channels_last(
    x: torch.Tensor, weight: torch.Tensor, groups: int, target: Target
) -> bool:
    capability = _FIRST_TENSOR_CORES.get(x.dtype)
    return (
        torch.backends.cudnn.enabled
        and capability is not None
        and target.capability >= capability
        and (x.dtype != torch.float32 or torch.backends.cudnn.allow_tf32)
        and groups == 1
        and prod(weight.shape[2:]) > 1
        and x.shape[1] * x.element_size() % _LOADED_BYTES == 0
        and not _is_channels_last(x)
        and not _is_channels_last(weight)
    )


def _is_channels_last(tensor: torch.Tensor) -> bool:
    layout = _CHANNELS_LAST.get(tensor.dim())
    return (
        layout is not None
        and not tensor.is_contiguous()
        and tensor.is_contiguous(memory_format=layout)
    )
