"""Compile kernels without a GPU, and report their resource use.

Triton and the assembler need no GPU. A launch proceeds as on a GPU up to loading the kernel. The
report lists registers per thread, register spills, and shared memory per program. A kernel that
needs more shared memory than the GPU has does not start.

    with compiled_for(89) as made:                       # an RTX 4090
        flash_attention(q, k, v)                         # on the meta device: nothing runs
    made[0].shared_bytes, made[0].registers, made[0].spilled_bytes
"""

import re
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.compiler import get_ptxas
from triton.runtime import driver

from memlab.kernels.launching import INTERPRETED, observed, targeting

# Compute capability: shared memory per program, in bytes (CUDA programming guide, technical
# specifications).
SHARED_BYTES = {80: 163 * 1024, 86: 99 * 1024, 89: 99 * 1024, 90: 227 * 1024, 120: 99 * 1024}


@dataclass(frozen=True)
class Compiled:
    """One kernel compiled for one compute capability."""

    name: str
    capability: int
    registers: int
    spilled_bytes: int
    shared_bytes: int
    ptx: str


@contextmanager
def compiled_for(capability: int) -> Iterator[list[Compiled]]:
    """Compile every kernel launched inside the block for `capability` (89 is 8.9), once each.

    Raise RuntimeError if Triton's interpreter is on, because it has no compiler.
    """
    if INTERPRETED:
        raise RuntimeError(
            "got TRITON_INTERPRET=1, which replaces the compiler by an interpreter; unset it"
        )
    compiled: dict[int, Compiled] = {}

    def compile_one(kernel: Any, arguments: tuple[Any, ...], constants: dict[str, Any]) -> None:
        specialized = [x.dtype if isinstance(x, Tensor) else x for x in arguments]
        binary = kernel.warmup(*specialized, grid=(1,), **constants)  # compiles without running
        if id(binary) not in compiled:
            compiled[id(binary)] = _inspect(binary, capability)
            results.append(compiled[id(binary)])

    results: list[Compiled] = []
    previous = driver._active
    driver.set_active(_TargetDriver(capability))
    try:
        with observed(compile_one), targeting(capability):
            yield results
    finally:
        driver.set_active(previous)


class _TargetDriver:
    """The parts of Triton's driver that compilation uses."""

    def __init__(self, capability: int) -> None:
        self.capability = capability

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", self.capability, 32)

    def get_current_device(self) -> int:
        return self.capability  # Triton caches kernels by device index

    def get_current_stream(self, device: int) -> int:
        return 0


def _inspect(kernel: Any, capability: int) -> Compiled:
    registers, spilled = _assemble(kernel.asm["ptx"], capability)
    return Compiled(
        name=kernel.src.fn.__name__,
        capability=capability,
        registers=registers,
        spilled_bytes=spilled,
        shared_bytes=kernel.metadata.shared,
        ptx=kernel.asm["ptx"],
    )


def _assemble(ptx: str, capability: int) -> tuple[int, int]:
    """Return registers per thread and bytes of spilled registers."""
    chip = re.search(r"^\.target (\w+)", ptx, re.MULTILINE).group(1)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "kernel.ptx")
        path.write_text(ptx)
        command = [get_ptxas(capability).path, "-v", f"--gpu-name={chip}", str(path), "-o"]
        completed = subprocess.run(
            [*command, str(path.with_suffix(".cubin"))], capture_output=True, text=True, check=True
        )
    registers = re.search(r"Used (\d+) registers", completed.stderr).group(1)
    spilled = re.search(r"(\d+) bytes spill stores", completed.stderr).group(1)
    return int(registers), int(spilled)
