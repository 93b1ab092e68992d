"""A rule for cuDNN's workspaces, where cuDNN cannot be asked (cudnn.py).

cuDNN's fastest kernels run on tensor cores and need channels-last tensors. For channels-first
tensors, cuDNN copies input, weight and output into a workspace, with channels padded to 16 bytes.

    counted      these copies, in forward and twice in backward (input's and weight's gradient)
    not counted  1 × 1 kernels that are a plain matmul; depthwise convolutions; what a split sum for
                 the weight's gradient adds (0 to 15% of most workspaces); forward if the input's
                 channels need padding (the 3 of an image) and the kernel is smaller than 7 × 7,
                 in float32 backward too
    float32      before Hopper: no copy of the weight; none at all for 1 × 1 kernels and grouped
                 convolutions

The rule comes from measurements: 43 trainings of CNNs in float32 on an RTX 3060 and an RTX 4060
(benchmarks/evidence/xmem.json), and 366 single convolutions on an H200. Small batches of two
depthwise networks need more. Twice the copies in every convolution's backward exceed these too, so
`largest_bytes` is the upper bound.
"""

from collections.abc import Sequence
from math import prod
from typing import NamedTuple

import torch

from memlab.configs.targets import Target

_FIRST_TENSOR_CORES = {torch.float16: (7, 0), torch.bfloat16: (8, 0), torch.float32: (8, 0)}
_CHANNELS_LAST = {4: torch.channels_last, 5: torch.channels_last_3d}  # by dimensions
_HOPPER = (9, 0)
_LARGE_KERNEL = 7 * 7
_LOADED_BYTES = 16  # channels are loaded in groups of 16 bytes


def workspaces(call: "Call") -> list[int]:
    """Return the workspace of each of the convolution's kernels, which run one after another."""
    # With them, the reserved memory of VGG16 at batches of 480 to 684 on an RTX 3060 is within
    # 1.5 %; without, 7 to 14 % too low. Tried and worse: workspaces in only some of the passes,
    # Winograd's 2.25 × (test_a_measured_training_is_predicted_closely).
    return [call.padded_bytes if _copies_to_channels_last(call) else 0] * len(call.kernels)


def largest_bytes(call: "Call") -> int:
    """Return the largest workspace in backward: twice the copies of input and output."""
    # Unexplained: MnasNet at batches of 200 to 300 and MobileNetV2 at 251 to 317 need 15 to 21 %
    # more than `workspaces`, and nothing more from 377 on. This bound covers them. It is neither
    # what cuDNN 9.24 chooses there, with or without 1 × 1 kernels, nor copies for each 1 × 1 kernel
    # (2,520 MiB at batch 300, where 3,114 were measured), nor copies for all (2,312 MiB).
    return max(2 * (call.x.nbytes + call.y.nbytes), call.padded_bytes)


class Call(NamedTuple):
    """A convolution, forward or backward; `y` is the output or its gradient."""

    kernels: tuple[str, ...]  # "forward", "data gradient", "weight gradient", as torch runs them
    target: Target
    x: torch.Tensor
    weight: torch.Tensor
    y: torch.Tensor
    stride: Sequence[int]
    padding: Sequence[int]
    dilation: Sequence[int]
    transposed: bool
    output_padding: Sequence[int]
    groups: int

    @property
    def is_old_float32(self) -> bool:
        return self.x.dtype == torch.float32 and self.target.capability < _HOPPER

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


def _copies_to_channels_last(call: Call) -> bool:
    x, weight = call.x, call.weight
    capability = _FIRST_TENSOR_CORES.get(x.dtype)
    is_float32 = x.dtype == torch.float32
    is_forward = call.kernels == ("forward",)
    return (
        torch.backends.cudnn.enabled
        and capability is not None
        and call.target.capability >= capability
        and (not is_float32 or torch.backends.cudnn.allow_tf32)
        and not call.is_grouped
        and not call.is_matmul
        and (call.is_aligned or call.is_large or not (is_forward or is_float32))
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
