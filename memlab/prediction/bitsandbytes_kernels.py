"""bitsandbytes' quantized layers in a prediction: the Python of its CUDA kernels, on fake tensors.

bitsandbytes implements each of its operators for CUDA with a Python function, which allocates
tensors and passes their addresses to compiled code. A fake kernel shows the result alone. The CUDA
function also shows the tensors in between, such as the dequantized weight of a matmul with many
rows, and it chooses by the card's capability and the shapes, as on the card.

    a private copy     of bitsandbytes.backends.cuda.ops is imported, and registers nothing
    compiled code      does nothing: it allocates no memory
    addresses          are 0
    no CUDA function   then the operator's default implementation runs
    layers in 8 bits   take the path of CUDA, not the CPU's; an unknown activation has no outliers

Checked with bitsandbytes 0.49.2 and 0.50.2.
"""

import functools
import importlib.util
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.machinery import ModuleSpec
from typing import Any

import torch

from memlab.internals.torch_internals import DispatchKey, has_kernel
from memlab.world.entering import enter

_CUDA_MODULE = "bitsandbytes.backends.cuda.ops"
Kernels = dict[str, Callable[..., Any]]  # by the operator's name


@functools.cache
def is_operator(func: Any) -> bool:
    """Return whether the operator is one of bitsandbytes' that allocates; optimizers do not."""
    return func.name().startswith("bitsandbytes::") and "optimizer_update" not in func.name()


@contextmanager
def cuda_kernels() -> Iterator[Kernels]:
    """Yield bitsandbytes' CUDA kernels. Inside `with`, its layers run as on CUDA."""
    functions = sys.modules["bitsandbytes.autograd._functions"]
    on_cuda = {
        "matmul_on_cuda": lambda real: functions.MatMul8bitLt,
        "unpacked": lambda real: lambda weight, state, *options: (weight, state),
    }
    with enter(on_cuda):
        yield _load()


def run(kernels: Kernels, func: Any, args: Any, kwargs: Any) -> Any:
    """Run an operator's CUDA kernel, or its default implementation, or else the operator."""
    kernel = kernels.get(func.name())
    if kernel is None and has_kernel(func.name(), "CompositeExplicitAutograd"):
        kernel = functools.partial(func._op_dk, DispatchKey.CompositeExplicitAutograd)
    with enter({"address": lambda real: _no_address}):
        return (kernel or func)(*args, **kwargs)


def _no_address(tensor: torch.Tensor) -> int:
    return 0


# ------------------------------------------------------------------ the private copy


class _CompiledCode:
    """Compiled functions that do nothing and return 0, which means success."""

    def __getattr__(self, name: str) -> Callable[..., int]:
        function = functools.partial(_succeed)
        setattr(self, name, function)
        return function


def _succeed(*args: Any) -> int:
    return 0


class _NoContext:
    """An unused cuBLAS context."""

    @classmethod
    def get_instance(cls) -> "_NoContext":
        return cls()

    def get_context(self, device: torch.device) -> int:
        return 0


def _load() -> Kernels:
    """Import a private copy of the CUDA module and return the kernels that it would register."""
    kernels: Kernels = {}
    spec = _private_spec()
    if spec is None or spec.loader is None:
        return kernels
    module = importlib.util.module_from_spec(spec)
    own = {
        "compiled_code": lambda real: _CompiledCode(),
        "collect_kernel": lambda real: _collect(kernels),
    }
    with enter(own):
        spec.loader.exec_module(module)
    module.CUBLAS_Context = _NoContext  # type: ignore[attr-defined]
    return kernels


def _private_spec() -> ModuleSpec | None:
    """Return the CUDA module's spec under another name, in the same package."""
    found = importlib.util.find_spec(_CUDA_MODULE)
    if found is None or found.origin is None:
        return None
    return importlib.util.spec_from_file_location(f"{_CUDA_MODULE}_in_memlab", found.origin)


def _collect(kernels: Kernels) -> Callable[[str, str], Callable[[Any], Any]]:
    def register(name: str, device: str) -> Callable[[Any], Any]:
        return lambda kernel: kernels.setdefault(name, kernel)

    return register
