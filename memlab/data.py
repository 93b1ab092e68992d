"""Bytes to train on: the source of torch itself, which is wherever this package is.

A byte is a token, so there is nothing to download and no tokenizer to train: the vocabulary is
256, and every text that a file can hold is in it. One version of torch is one text, whatever the
Python, the system and the GPU it was built for.
"""

import os
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor

from memlab.units import parse_bytes

TOKENS = 256  # a byte is one
SOURCE = Path(torch.__file__).parent
BUILD = SOURCE / "version.py"  # what differs between two builds of one version


def source_bytes(limit: int | str) -> Tensor:
    """The first `limit` bytes (`2**20`, `"1 MiB"`) of torch's own Python source, as uint8.

    The order of the files is fixed, so one version of torch gives the same bytes every time.
    Reads no more than it returns; returns less only where the whole source is less.
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
    """A file's bytes as uint8, mapped: read from disk where they are touched, held by nobody.

    The pages are the file's own, so the system may drop them at any time and read them again.
    Writing to the tensor changes this process's copy of the page, never the file.
    """
    path = Path(path)
    size = path.stat().st_size
    if not size:
        raise ValueError(f"got {path}, which is empty; give a file with at least one byte")
    return torch.from_file(str(path), shared=False, size=size, dtype=torch.uint8)


def _sources(folder: Path) -> Iterator[Path]:
    """Its modules, lazily, in an order that no file system decides; not the one of the build."""
    for parent, folders, files in os.walk(folder):
        folders[:] = sorted(set(folders) - {"__pycache__"})  # os.walk goes where this list says
        for name in sorted(files):
            if name.endswith(".py") and Path(parent, name) != BUILD:
                yield Path(parent, name)


def batches(data: Tensor, batch: int, seq_len: int, seed: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Endless (tokens, targets), int64 and (batch, seq_len) each, from random places in `data`.

    targets[b, t] is the byte after tokens[b, t]. The same seed gives the same batches.
    """
    if data.ndim != 1 or data.is_floating_point():
        shape, dtype = tuple(data.shape), data.dtype
        raise ValueError(f"got data of shape {shape} and {dtype}; give a 1-D tensor of integers")
    if min(batch, seq_len) < 1:
        raise ValueError(f"got batch={batch} and seq_len={seq_len}; give at least 1 of each")
    if len(data) <= seq_len:
        raise ValueError(
            f"got {len(data)} tokens of data, wanted at least {seq_len + 1} for seq_len={seq_len} "
            f"and one target more; read more data or shorten seq_len"
        )
    return _sample(data, batch, seq_len, torch.Generator().manual_seed(seed))


def _sample(
    data: Tensor, batch: int, seq_len: int, generator: torch.Generator
) -> Iterator[tuple[Tensor, Tensor]]:
    """The loop of `batches`, apart from its checks so that those fail at the call."""
    offsets = torch.arange(seq_len, device="cpu")
    while True:
        starts = torch.randint(len(data) - seq_len, (batch, 1), generator=generator, device="cpu")
        positions = starts + offsets  # (B, T)
        yield data[positions].long(), data[positions + 1].long()
