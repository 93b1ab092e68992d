"""Workspaces of cuDNN's convolutions.

cuDNN's fastest kernels run on tensor cores and need channels-last tensors. For channels-first
tensors, cuDNN copies input, weight and output into a workspace, with channels padded to 16 bytes.
torch allocates it for one call of cuDNN, through its caching allocator, and frees it right after
(Conv_v8.cpp, `run_conv_plan`). So it counts as allocated and as reserved memory.

    counted      these copies, in forward and twice in backward (input's and weight's gradient);
                 torch's copies of tensors in another layout than the kernel's
    not counted  1 × 1 kernels that are a plain matmul; depthwise convolutions; what a split sum for
                 the weight's gradient adds (0 to 15% of most workspaces); forward if the input's
                 channels need padding (the 3 of an image) and the kernel is smaller than 7 × 7,
                 in float32 backward too
    float32      before Hopper: no copy of the weight; none at all for 1 × 1 kernels and grouped
                 convolutions

Which kernel cuDNN picks is not documented and depends on the card, the shapes and cuDNN's version,
so this rule comes from measurements: 43 trainings of CNNs in float32 on an RTX 3060 and an RTX 4060
(benchmarks/evidence/xmem.json), and 366 single convolutions on an H200. Small batches of two
depthwise networks need more. Twice the copies in every convolution's backward exceed these too, so
`largest_bytes` is the upper bound.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from math import prod
from typing import Any, NamedTuple

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
_HOPPER = (9, 0)
_LARGE_KERNEL = 7 * 7
_LOADED_BYTES = 16  # channels are loaded in groups of 16 bytes


def scratch_bytes(func: Any, args: Any, result: Any, target: Target) -> list[tuple[int, ...]]:
    """Return the buffers of each of a convolution's kernels, which run one after another."""
    call = _Call.of(func, args, result, target)
    copies = tuple(copied_bytes(func, args, result, "cuda"))
    kernels = 1 if func is FORWARD else sum(args[-1][:2])
    if _copies_to_channels_last(call, target):
        # With them, the reserved memory of VGG16 at batches of 480 to 684 on an RTX 3060 is within
        # 1.5 %; without, 7 to 14 % too low. Tried and worse: workspaces in only some of the passes,
        # Winograd's 2.25 × (test_a_measured_training_is_predicted_closely).
        return [(*copies, call.padded_bytes)] * kernels
    return [copies] if copies else []


def largest_bytes(args: Any, result: Any, target: Target) -> int:
    """Return the largest workspace in backward: twice the copies of input and output."""
    call = _Call.of(BACKWARD, args, result, target)
    # Unexplained: MnasNet at batches of 200 to 300 and MobileNetV2 at 251 to 317 need 15 to 21 %
    # more than `scratch_bytes`, and nothing more from 377 on. This bound covers them.
    return max(2 * (call.x.nbytes + call.y.nbytes), call.padded_bytes)


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


class _Call(NamedTuple):
    """The operands of a convolution, forward or backward; `y` is the output or its gradient."""

    is_forward: bool
    is_old_float32: bool  # float32 before Hopper
    x: torch.Tensor
    weight: torch.Tensor
    y: torch.Tensor
    stride: Sequence[int]
    groups: int

    @classmethod
    def of(cls, func: Any, args: Any, result: Any, target: Target) -> "_Call":
        is_old = args[1].dtype == torch.float32 and target.capability < _HOPPER
        if func is FORWARD:
            return cls(True, is_old, args[0], args[1], result, args[3], args[8])
        return cls(False, is_old, args[1], args[2], args[0], args[4], args[9])

    @property
    def padded_bytes(self) -> int:
        """The bytes of input, output and weight with padded channels."""
        tensors = [(self.x, self.x.shape[1:2]), (self.y, self.y.shape[1:2])]
        if not self.is_old_float32:
            tensors.append((self.weight, self.weight.shape[:2]))
        return sum(
            tensor.nbytes * prod(map(self._padded, channels)) // prod(channels)
            for tensor, channels in tensors
            if tensor.numel()
        )

    @property
    def is_aligned(self) -> bool:
        """Whether the input's channels need no padding."""
        return self._padded(self.x.shape[1]) == self.x.shape[1]

    @property
    def is_large(self) -> bool:
        """Whether the kernel is so large that copies pay off for few channels, too."""
        return not self.is_old_float32 and prod(self.weight.shape[2:]) >= _LARGE_KERNEL

    @property
    def is_matmul(self) -> bool:
        """Whether the convolution is a matmul of channels-first tensors."""
        pixels = prod(self.x.shape[2:])
        is_pointwise = prod(self.weight.shape[2:]) == 1
        is_dense = max(self.stride) == 1 and self._padded(pixels) == pixels
        return is_pointwise and (self.is_old_float32 or is_dense)

    @property
    def is_grouped(self) -> bool:
        """Whether cuDNN uses kernels for grouped convolutions, which copy nothing."""
        return self.groups > 1 and (self.is_old_float32 or self.weight.shape[1] == 1)

    def _padded(self, count: int) -> int:
        """Round up to a multiple of 16 bytes."""
        step = max(1, _LOADED_BYTES // self.x.element_size())
        return -(-count // step) * step


def _copies_to_channels_last(call: _Call, target: Target) -> bool:
    x, weight = call.x, call.weight
    capability = _FIRST_TENSOR_CORES.get(x.dtype)
    is_float32 = x.dtype == torch.float32
    return (
        torch.backends.cudnn.enabled
        and capability is not None
        and target.capability >= capability
        and (not is_float32 or torch.backends.cudnn.allow_tf32)
        and not call.is_grouped
        and not call.is_matmul
        and (call.is_aligned or call.is_large or not (call.is_forward or is_float32))
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
