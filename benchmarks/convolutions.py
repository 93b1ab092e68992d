"""Workspaces of single convolutions on an H200, beside cuDNN's answers and the rule without cuDNN.

    python benchmarks/convolutions.py

benchmarks/evidence/convolutions-h200.csv has 342 convolutions that memlab's authors ran with torch
2.11 and cuDNN 9.19 on 2026-11-28: forward, the input's gradient and the weight's. A workspace is
the first block that the allocator's history shows as allocated and freed again. Errors are relative
to the bytes of input, weight and output together. cuDNN is asked if it is installed
(`pip install "memlab[cudnn]"`); the version that answers is in the table.

Prints Markdown.
"""

import csv
import statistics
import sys
from collections.abc import Iterator, Mapping, Sequence
from unittest.mock import patch

import torch
from common import ROOT, heading, parser, set_environment, table

from memlab.configs.targets import Target, target_named
from memlab.prediction import convolutions, cudnn

FILE = ROOT / "benchmarks" / "evidence" / "convolutions-h200.csv"
CHANNELS_LAST = {4: torch.channels_last, 5: torch.channels_last_3d}
KERNELS = ("forward", "data_gradient", "weight_gradient")


def errors(target: Target) -> Iterator[float]:
    """Yield the error of each predicted workspace."""
    with FILE.open(encoding="utf-8") as lines:
        for row in csv.DictReader(lines):
            with torch.backends.cudnn.flags(enabled=True, allow_tf32=bool(row["tf32"])):
                total, sizes = _predicted(row, target)
            for kernel, size in zip(KERNELS, sizes, strict=True):
                yield (size - int(row[kernel])) / total


def _predicted(row: Mapping[str, str], target: Target) -> tuple[int, list[int]]:
    """Return the bytes of input, weight and output, and the workspaces."""
    x, weight = (_tensor(row, name) for name in ("x", "weight"))
    stride, padding, dilation = (_numbers(row[name]) for name in ("stride", "padding", "dilation"))
    options = stride, padding, dilation, bool(row["transposed"]), [0] * len(stride)
    options = (*options, int(row["groups"]))
    y = convolutions.FORWARD(x, weight, None, *options)
    mask = [True, True, False]
    calls = (
        (convolutions.FORWARD, (x, weight, None, *options), y),
        (convolutions.BACKWARD, (y, x, weight, None, *options, mask), None),
    )
    kernels = [convolutions.scratch_bytes(*call, target) for call in calls]
    forward, backward = ([sum(buffers) for buffers in of] for of in kernels)
    return x.nbytes + weight.nbytes + y.nbytes, [*(forward or [0]), *(backward or [0, 0])]


def _tensor(row: Mapping[str, str], name: str) -> torch.Tensor:
    shape = _numbers(row[name])
    tensor = torch.empty(shape, device="meta", dtype=getattr(torch, row["dtype"]))
    layout = CHANNELS_LAST.get(len(shape)) if row["layout"] else None
    return tensor.to(memory_format=layout) if layout else tensor


def _numbers(text: str) -> list[int]:
    return [int(number) for number in text.split("x")]


def line(name: str, found: Sequence[float]) -> tuple[str, ...]:
    """Return the name, and how many workspaces are exact, are close, and how close most are."""
    sizes = sorted(map(abs, found))
    exact, close = (sum(size <= bound for size in sizes) for bound in (0, 0.02))
    nine_of_ten = sizes[len(sizes) * 9 // 10]
    shares = close / len(sizes), statistics.median(sizes), nine_of_ten
    return (name, str(len(sizes)), str(exact), *(f"{share:.1%}" for share in shares))


def lines() -> Iterator[tuple[str, ...]]:
    target = target_named("cuda:h200")
    if version := cudnn.version():
        yield line(f"cuDNN {version}", list(errors(target)))
    with patch.object(cudnn, "library", return_value=None):
        yield line("the rule", list(errors(target)))


def main(words: Sequence[str] | None = None) -> int:
    set_environment()
    parser(__doc__ or "").parse_args(words)
    print(heading("Workspaces of convolutions"), end="\n\n")
    header = ("predicted by", "workspaces", "exact", "within 2 %", "median", "nine of ten within")
    print(table(header, lines()))
    return 0


if __name__ == "__main__":
    sys.exit(main())
