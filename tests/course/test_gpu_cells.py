"""The cells for a reader's GPU run on every platform that torch drives."""

import re
from pathlib import Path

import pytest

SOLUTIONS = sorted((Path(__file__).parents[2] / "solutions").glob("day*.py"))
# Ranks on several GPUs need NCCL or RCCL, 24 GB on a larger card a limit for the process, FP8
# matmuls a kernel of CUDA's, and Day 21 compares a step with its prediction for CUDA.
CUDA_ALONE = {"day13", "day16", "day19", "day21"}


def gpu_cells(source: str) -> list[str]:
    """The code of the cells for the reader's GPU."""
    cells = source.split("\n# %%")
    return [cell for cell in cells if re.match(r' tags=.* reason="[^"]*reader\'s GPU', cell)]


@pytest.mark.parametrize("path", SOLUTIONS, ids=lambda path: path.stem[:5])
def test_a_cell_for_the_readers_gpu_asks_for_any_accelerator(path):
    cells = gpu_cells(path.read_text(encoding="utf-8"))
    assert bool(cells) == (path.stem[:5] != "day18")  # whose ranks need several GPUs
    for cell in cells:
        asks_cuda = re.search(r"torch\.cuda\.|\.cuda\(|[\"']cuda[\"']", cell)
        if path.stem[:5] in CUDA_ALONE:
            assert asks_cuda
        else:
            assert not asks_cuda, cell
            assert "torch.accelerator.current_accelerator(check_available=True)" in cell
