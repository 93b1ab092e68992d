"""Training data: the bytes of torch's own source, available wherever this package runs.

Each byte is a token, so no download and no tokenizer are needed. The vocabulary has 256 tokens and
covers any file. A version of torch has the same text for every Python, system and GPU.
"""

import os
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor

from memlab.units import parse_bytes

TOKENS = 256  # one per byte value
SOURCE = Path(torch.__file__).parent
BUILD = SOURCE / "version.py"  # differs between builds of the same version


def source_bytes(limit: int | str) -> Tensor:
    """Return the first `limit` bytes (`2**20`, `"1 MiB"`) of torch's Python source, as uint8.

    The order of the files is fixed, so a version of torch always gives the same bytes. The result
    is shorter only if the whole source is shorter.
    """
    wanted = parse_bytes(limit)
    if wanted < 1:
        raise ValueError(f"got a limit of {limit!r}; give at least one byte, such as '1 MiB'")
    text = bytearray()
    for path in _sources(SOURCE):
        with path.open("rb") as file:
            text += file.read(wanted - len(text))
        if len(text) == wanted:
            break
    if not text:
        raise ValueError(
            f"found no .py file in {SOURCE}, where torch's source should be; "
            f"install torch from its wheel, which has it"
        )
    return torch.frombuffer(text, dtype=torch.uint8)


def mapped_bytes(path: str | os.PathLike[str]) -> Tensor:
    """Return a file's bytes as a memory-mapped uint8 tensor.

    Pages are read from disk on access, and the system may drop and reread them at any time. Writing
    to the tensor changes this process's copy of the page, not the file.
    """
    path = Path(path)
    size = path.stat().st_size
    if not size:
        raise ValueError(f"got {path}, which is empty; give a file with at least one byte")
    return torch.from_file(str(path), shared=False, size=size, dtype=torch.uint8)


def _sources(folder: Path) -> Iterator[Path]:
    """Yield the modules in a fixed order, except the file that depends on the build."""
    for parent, folders, files in os.walk(folder):
        folders[:] = sorted(set(folders) - {"__pycache__"})  # os.walk descends into this list
        for name in sorted(files):
            if name.endswith(".py") and Path(parent, name) != BUILD:
                yield Path(parent, name)


def batches(data: Tensor, batch: int, seq_len: int, seed: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield (tokens, targets) endlessly from random positions in `data`.

    Both are int64 (batch, seq_len). targets[b, t] is the byte after tokens[b, t]. The same seed
    gives the same batches.
    """
    if data.ndim != 1 or data.is_floating_point():
        shape, dtype = tuple(data.shape), data.dtype
        raise ValueError(f"got data of shape {shape} and {dtype}; give a 1-D tensor of integers")
    if min(batch, seq_len) < 1:
        raise ValueError(f"got batch={batch} and seq_len={seq_len}; give at least 1 of each")
    if len(data) <= seq_len:
        raise ValueError(
            f"got {len(data)} tokens of data, wanted at least {seq_len + 1} for seq_len={seq_len} "
            f"and one more target; read more data or shorten seq_len"
        )
    return _sample(data, batch, seq_len, torch.Generator().manual_seed(seed))


def _sample(
    data: Tensor, batch: int, seq_len: int, generator: torch.Generator
) -> Iterator[tuple[Tensor, Tensor]]:
    """Run the loop of `batches`. It is separate so that the checks run at the call."""
    offsets = torch.arange(seq_len, dtype=torch.int64, device="cpu")
    while True:
        starts = torch.randint(len(data) - seq_len, (batch, 1), generator=generator, device="cpu")
        positions = starts + offsets  # (B, T)
        yield data[positions].long(), data[positions + 1].long()
