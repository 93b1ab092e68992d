"""Compile memlab's Triton kernels for several GPUs, without needing one.

    python benchmarks/compiled_kernels.py                       all kernels, in about a minute
    python benchmarks/compiled_kernels.py --gpu 8.9 --case "8 bits"   one of each; writes nothing

Shows the registers per thread, spilled bytes (the goal is 0) and shared memory per program, for
each kernel and compute capability. To time the kernels on a GPU, run
`python benchmarks/gpu.py --section kernels`. Prints Markdown and writes
`benchmarks/results/<machine>.json`.
"""

import argparse
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from functools import partial
from typing import Any

import torch
import triton
from common import heading, parser_with_results, save, set_environment, table
from torch import nn

from memlab import dry_run, kernels
from memlab.kernels.compiling import SHARED_BYTES, Compiled, compiled_for
from memlab.units import format_bytes

HALF = torch.bfloat16
Rows = Sequence[tuple[str, list[Compiled]]]


def attention(width: int, dtype: torch.dtype) -> None:
    """Run causal attention with four query heads per key head, forward and backward."""
    draw = partial(torch.empty, dtype=dtype, requires_grad=True)
    q = draw(1, 8, 4096, width)
    k, v = (draw(1, 2, 4096, width) for _ in range(2))
    out = kernels.flash_attention(q, k, v, causal=True)
    out.backward(torch.empty_like(out))


def optimizer(name: str, dtype: torch.dtype) -> None:
    """Take one step of a weight in this dtype."""
    weight = nn.Parameter(torch.empty(2**20, dtype=dtype))
    weight.grad = torch.empty_like(weight)
    getattr(kernels, name)([weight], rounding="stochastic" if dtype == HALF else "nearest").step()


def coding(bits: int) -> None:
    """Quantize and dequantize."""
    mode = "nearest" if bits == 8 else "stochastic"
    x = torch.empty(2**20, dtype=HALF)
    kernels.dequantize_affine(kernels.quantize_affine(x, bits=bits, mode=mode))


def loss() -> None:
    """Run the chunked loss, forward and backward."""
    hidden, weight = (
        torch.empty(rows, 4096, dtype=HALF, requires_grad=True) for rows in (8192, 128_256)
    )
    targets = torch.empty(8192, dtype=torch.int64)
    kernels.chunked_cross_entropy(hidden, weight, targets).backward()


CASES: dict[str, Callable[[], None]] = {
    **{f"attention, D = {width}": partial(attention, width, HALF) for width in (64, 128, 256)},
    "attention, D = 64, float32": partial(attention, 64, torch.float32),
    **{
        f"{name}, {str(dtype).removeprefix('torch.')}": partial(optimizer, name, dtype)
        for name in ("Adam8bit", "Lion8bit")
        for dtype in (torch.float32, HALF)
    },
    **{f"{bits} bits": partial(coding, bits) for bits in (8, 4, 2)},
    "loss in chunks": loss,
}


def compiled(case: Callable[[], None], capability: int) -> list[Compiled]:
    """Return the compiled kernels of a case in launch order."""
    with compiled_for(capability) as made, dry_run():
        case()
    return made


def found(cases: Sequence[str], gpus: Sequence[int]) -> Iterator[tuple[str, list[Compiled]]]:
    """Yield each kernel's name and its compiled versions for all GPUs."""
    for name in cases:
        by_gpu = [compiled(CASES[name], capability) for capability in gpus]
        for same in zip(*by_gpu, strict=True):
            yield f"{name}: {same[0].name.strip('_')}", list(same)


def cell(made: Compiled) -> str:
    """Return registers, spilled bytes (if any) and shared memory as text."""
    spilled = f", **{made.spilled_bytes} spilled**" if made.spilled_bytes else ""
    return f"{made.registers}{spilled}; {format_bytes(made.shared_bytes)}"


def spilled(rows: Rows) -> list[str]:
    """Return a message for each kernel that spills registers."""
    return [
        f"{what}, {each.capability / 10}: {each.spilled_bytes} bytes spilled"
        for what, made in rows
        for each in made
        if each.spilled_bytes
    ]


def too_large(rows: Rows) -> list[str]:
    """Return a message for each kernel that needs more shared memory than the GPU has."""
    return [
        f"{what}, {each.capability / 10}: {format_bytes(each.shared_bytes)} of shared memory, "
        f"limit {format_bytes(SHARED_BYTES[each.capability])}"
        for what, made in rows
        for each in made
        if each.shared_bytes > SHARED_BYTES[each.capability]
    ]


def plain(made: Compiled) -> dict[str, Any]:
    """Return the fields for the results file, without the PTX code."""
    return {name: value for name, value in asdict(made).items() if name != "ptx"}


def capability(text: str) -> int:
    """Parse a compute capability: \"8.9\" is 89."""
    by_name = {str(gpu / 10): gpu for gpu in SHARED_BYTES}
    if text not in by_name:
        raise argparse.ArgumentTypeError(f"got {text}; choose one of {', '.join(by_name)}")
    return by_name[text]


def arguments(words: Sequence[str] | None) -> argparse.Namespace:
    made = parser_with_results(__doc__)
    made.add_argument(
        "--gpu", type=capability, metavar="8.9", help="compile for this compute capability only"
    )
    made.add_argument(
        "--case", action="append", choices=CASES, metavar="NAME", help="compile this case only"
    )
    return made.parse_args(words)


def main(words: Sequence[str] | None = None) -> int:
    set_environment()
    given = arguments(words)
    gpus = [given.gpu] if given.gpu else list(SHARED_BYTES)
    print(heading("Kernels, compiled"), end="\n\n")
    try:
        rows = list(found(given.case or list(CASES), gpus))
    except RuntimeError as error:
        print(error, file=sys.stderr)
        return 2
    titles = ("kernel", *(f"compute capability {gpu / 10}" for gpu in gpus))
    print("Registers per thread; shared memory per program.", end="\n\n")
    print(table(titles, [(what, *map(cell, made)) for what, made in rows]), end="\n\n")
    does_not_fit = too_large(rows)
    messages = [*spilled(rows), *does_not_fit]
    print("\n\n".join(messages) or "No kernel spills registers, and all fit in shared memory.")
    if given.gpu or given.case:
        return int(bool(does_not_fit))
    kept = {what: [plain(each) for each in made] for what, made in rows}
    save(given.results, "kernels", "compiled", {"triton": triton.__version__, "rows": kept})
    return int(bool(does_not_fit))


if __name__ == "__main__":
    sys.exit(main())
