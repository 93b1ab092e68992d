"""Report CUDA as the device of tensors on the stand-in.

In a prediction, tensors on CUDA are on a fake device of type "cpu". Libraries branch on
`x.device.type` and `x.is_cuda`: on the CPU, peft casts half-precision weights to float32 and
transformers computes in other dtypes. So all code outside torch and memlab reads "cuda:0". torch
itself compares devices, and reads the stand-in, unless it compiles (compiled.py).
"""

import sys
from collections.abc import Callable
from typing import Any

import torch

from memlab.dry_runs.compiled import Compiler
from memlab.dry_runs.fake_accelerator import StandIn
from memlab.dry_runs.fake_checks import TRUSTED, caller_module
from memlab.internals.torch_internals import FakeTensor
from memlab.prediction.compiled import IMPLEMENTATION, is_on_cuda

_REPORTED = torch.device("cuda", 0)


def _device(real: Any) -> property:
    def device(tensor: FakeTensor) -> torch.device:
        found = real.fget(tensor)
        return _REPORTED if _reads_cuda(found) else found

    return property(device, real.fset)


def _reads_cuda(device: torch.device) -> bool:
    """Return whether the caller of the stand-in that calls this reads CUDA for this device."""
    if Compiler.is_compiling:
        trusted: tuple[str, ...] = IMPLEMENTATION
    elif device == StandIn.device:
        trusted = TRUSTED
    else:
        return False
    module = caller_module(sys._getframe(1))
    return is_on_cuda(device) and not any(f"{module}.".startswith(f"{name}.") for name in trusted)


def _default_device(real: Callable[[], torch.device]) -> Callable[[], torch.device]:
    def get_default_device() -> torch.device:
        found = real()  # torch reads it from a tensor
        return _REPORTED if _reads_cuda(found) else found

    return get_default_device


def _is_type(wanted: str) -> Callable[[Any], property]:
    def replacement(real: Any) -> property:
        def is_type(tensor: FakeTensor) -> bool:
            if not _reads_cuda(tensor.fake_device):
                return real.__get__(tensor)
            # As "cpu", peft merged bfloat16 adapters in float32
            # (test_a_cast_that_peft_makes_on_the_cpu_only_is_not_predicted), and transformers chose
            # grouped matmuls on a T4
            # (test_a_mixture_of_experts_is_a_loop_on_a_gpu_without_grouped_matmuls).
            return wanted == _REPORTED.type

        return property(is_type)

    return replacement


STAND_INS: dict[str, Callable[[Any], Any]] = {
    "default_device": _default_device,
    "reported_device": _device,
    "is_cuda": _is_type("cuda"),
    "is_cpu": _is_type("cpu"),
}
