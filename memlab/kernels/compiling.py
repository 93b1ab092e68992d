"""What the compiler makes of a kernel, for a GPU that is not there.

Triton and its assembler need no GPU to compile for one. What they say is the half of a kernel's
speed that can be known without it: how many registers a thread takes, whether some of them had to
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

import torch
import triton
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.compiler import get_ptxas
from triton.compiler import ASTSource

from memlab.kernels.launching import INTERPRETED, observed

# Compute capability: the shared memory that one program may take there (CUDA's programming guide,
# table of technical specifications).
SHARED_BYTES = {80: 163 * 1024, 86: 99 * 1024, 89: 99 * 1024, 90: 227 * 1024, 120: 99 * 1024}

_NAMES = {
    torch.float32: "fp32",
    torch.float16: "fp16",
    torch.bfloat16: "bf16",
    torch.uint8: "u8",
    torch.int32: "i32",
    torch.int64: "i64",
    torch.bool: "i1",
}
_OPTIONS = ("num_warps", "num_stages", "enable_fp_fusion")


@dataclass(frozen=True)
class Compiled:
    """One kernel for one kind of GPU."""

    name: str
    capability: int
    constants: dict[str, Any]
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
    made: dict[str, Compiled] = {}

    def compile_one(kernel: Any, arguments: tuple[Any, ...], constants: dict[str, Any]) -> None:
        source = _source(kernel, arguments, constants)
        key = f"{kernel.__name__} {source.signature} {source.constants} {source.attrs} {constants}"
        if key not in made:
            made[key] = _compiled(source, capability, constants)
            found.append(made[key])

    found: list[Compiled] = []
    with observed(compile_one):
        yield found


def _source(kernel: Any, arguments: tuple[Any, ...], constants: dict[str, Any]) -> ASTSource:
    """As a launch would specialize it: what is 1 is a constant, multiples of 16 are known to be."""
    given = dict(zip(kernel.arg_names, arguments, strict=False))
    given |= {name: value for name, value in constants.items() if name not in _OPTIONS}
    signature, values, attributes = {}, {}, {}
    for place, name in enumerate(kernel.arg_names):
        is_constant = kernel.params[place].is_constexpr
        signature[name] = _declared(given[name], (place,), is_constant, values, attributes)
    return ASTSource(kernel, signature, values, attributes)


def _declared(
    value: Any, path: tuple[int, ...], is_constant: bool, values: Any, attributes: Any
) -> Any:
    """The type of an argument, or of each part of a tuple; what is known of it is written down."""
    if isinstance(value, tuple) and not is_constant:
        parts = enumerate(value)
        return tuple(_declared(x, (*path, i), False, values, attributes) for i, x in parts)
    if is_constant or value is None or (type(value) is int and value == 1):
        values[path] = value
        return "constexpr"
    if isinstance(value, Tensor) or (type(value) is int and value % 16 == 0):
        attributes[path] = [["tt.divisibility", 16]]
    return _type(value)


def _type(value: Any) -> str:
    if isinstance(value, Tensor):
        return "*" + _NAMES[value.dtype]
    if isinstance(value, float):
        return "fp32"
    return "i32" if -(2**31) <= value < 2**31 else "i64"


def _compiled(source: ASTSource, capability: int, constants: dict[str, Any]) -> Compiled:
    options = {name: constants[name] for name in _OPTIONS if name in constants}
    target = GPUTarget("cuda", capability, 32)
    kernel = triton.compile(source, target=target, options=options)
    registers, spilled = _assembled(kernel.asm["ptx"], capability)
    return Compiled(
        name=source.fn.__name__,
        capability=capability,
        constants={name: value for name, value in constants.items() if name not in _OPTIONS},
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
