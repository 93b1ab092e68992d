"""What the compiler makes of a kernel, for a GPU that is not there.

Triton and its assembler need no GPU to compile for one, and a launch goes here all the way that it
goes on a GPU, up to where the kernel would be loaded. What they say is the half of a kernel's speed
that can be known without one: how many registers a thread takes, whether some of them had to
be spilled to memory, and how much shared memory a program takes, of which a GPU has so much and no
more: a kernel that takes too much does not start.

    with compiled_for(89) as made:                       # an RTX 4090
        flash_attention(q, k, v)                         # of the meta device: nothing runs
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

# Compute capability: the shared memory that one program may take there (CUDA's programming guide,
# table of technical specifications).
SHARED_BYTES = {80: 163 * 1024, 86: 99 * 1024, 89: 99 * 1024, 90: 227 * 1024, 120: 99 * 1024}


@dataclass(frozen=True)
class Compiled:
    """One kernel for one kind of GPU."""

    name: str
    capability: int
    registers: int
    spilled_bytes: int
    shared_bytes: int
    ptx: str


@contextmanager
def compiled_for(capability: int) -> Iterator[list[Compiled]]:
    """Every kernel that is launched inside, compiled for `capability` (89 is 8.9), each once.

    RuntimeError with Triton's interpreter on, which has no compiler.
    """
    if INTERPRETED:
        raise RuntimeError(
            "got TRITON_INTERPRET=1, which puts the interpreter in the compiler's place; unset it"
        )
    made: dict[int, Compiled] = {}

    def compile_one(kernel: Any, arguments: tuple[Any, ...], constants: dict[str, Any]) -> None:
        given = [x.dtype if isinstance(x, Tensor) else x for x in arguments]
        one = kernel.warmup(*given, grid=(1,), **constants)  # a launch, but for its last step
        if id(one) not in made:
            made[id(one)] = _described(one, capability)
            found.append(made[id(one)])

    found: list[Compiled] = []
    before = driver._active
    driver.set_active(_Absent(capability))
    try:
        with observed(compile_one), targeting(capability):
            yield found
    finally:
        driver.set_active(before)


class _Absent:
    """As much of Triton's driver as is asked before a kernel is loaded."""

    def __init__(self, capability: int) -> None:
        self.capability = capability

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", self.capability, 32)

    def get_current_device(self) -> int:
        return self.capability  # a kernel is kept by the number of its device

    def get_current_stream(self, device: int) -> int:
        return 0


def _described(kernel: Any, capability: int) -> Compiled:
    registers, spilled = _assembled(kernel.asm["ptx"], capability)
    return Compiled(
        name=kernel.src.fn.__name__,
        capability=capability,
        registers=registers,
        spilled_bytes=spilled,
        shared_bytes=kernel.metadata.shared,
        ptx=kernel.asm["ptx"],
    )


def _assembled(ptx: str, capability: int) -> tuple[int, int]:
    """Registers a thread, and the bytes of them that the assembler had to spill."""
    chip = re.search(r"^\.target (\w+)", ptx, re.MULTILINE).group(1)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "kernel.ptx")
        path.write_text(ptx)
        words = [get_ptxas(capability).path, "-v", f"--gpu-name={chip}", str(path), "-o"]
        done = subprocess.run(
            [*words, str(path.with_suffix(".cubin"))], capture_output=True, text=True, check=True
        )
    registers = re.search(r"Used (\d+) registers", done.stderr).group(1)
    spilled = re.search(r"(\d+) bytes spill stores", done.stderr).group(1)
    return int(registers), int(spilled)
