"""Safetensors files, mapped to be read and written a piece at a time.

Saves    all of a file's bytes: what is mapped is read when it is touched, and the system may drop
         it again. A file is written without having all of it in memory.
Costs    that it can't be changed: whoever has it mapped would see that, or crash.
Source   The safetensors format: 8 bytes with the header's length, the header in JSON, the tensors.

    {"weight": {"dtype": "F16", "shape": [2, 3], "data_offsets": [0, 12]}, "__metadata__": {…}}

Offsets count from the header's end. Metadata are strings. Tensors stand in falling order of their
element's size, so that each begins at a multiple of it.

Two of the metadata are checksums (XXH3, 64 bits): `xxh3` has one for each tensor, computed as it is
written, and `xxh3_of_header` is that of the header with zeros in its own place. A tensor is held
against its own when it is first asked for, which reads it once more; a flipped bit then is an error
that names the file and the tensor, and the other tensors can still be read. Files of others, which
have no such metadata, are read as they are.
"""

import json
import os
import re
import struct
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import xxhash
from torch import Tensor
from xxhash import xxh3_64_intdigest as xxh3

from memlab.internals.files import write_beside

ALIGNMENT = 64  # bytes, of where the first tensor begins
_SEAL = "xxh3_of_header"
_SEALED_BY = re.compile(rb'"xxh3_of_header": "([0-9a-f]{16})"')
_RUN = 2**22  # bytes that are checked at a time
_HEADER_LIMIT = 100 * 10**6  # bytes: longer ones are no headers
DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "BF16": torch.bfloat16,
    "F16": torch.float16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
_NAMES = {dtype: name for name, dtype in DTYPES.items()}


class Place(NamedTuple):
    """Where a tensor is in a file, `offset` from its begin."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    offset: int

    @property
    def nbytes(self) -> int:
        return prod(self.shape) * self.dtype.itemsize


def planned(
    tensors: Mapping[str, tuple[torch.dtype, tuple[int, ...]]], metadata: Mapping[str, str]
) -> tuple[bytes, dict[str, Place]]:
    """The header of a file with such tensors, its checksums still 0, and where each will be."""
    in_order = sorted(tensors.items(), key=lambda item: (-item[1][0].itemsize, item[0]))
    checksums = {"xxh3": _as_json(dict.fromkeys(sorted(tensors), 0)), _SEAL: _as_hex(0)}
    entries: dict[str, Any] = {"__metadata__": {**metadata, **checksums}}
    offsets, at = {}, 0
    for name, (dtype, shape) in in_order:
        if dtype not in _NAMES:
            raise TypeError(
                f"got {name!r} of {dtype}, which a safetensors file can't hold; cast it"
            )
        offsets[name], end = at, at + prod(shape) * dtype.itemsize
        entries[name] = {"dtype": _NAMES[dtype], "shape": list(shape), "data_offsets": [at, end]}
        at = end
    header = _packed(entries)
    return header, {n: Place(*tensors[n], len(header) + at) for n, at in offsets.items()}


def _packed(entries: Mapping[str, Any]) -> bytes:
    text = json.dumps(entries).encode()
    text += b" " * (-(8 + len(text)) % ALIGNMENT)
    return struct.pack("<Q", len(text)) + text


def _as_hex(checksum: int) -> str:
    """Of 16 digits: a header is as long with checksums as it was with zeros."""
    return f"{checksum:016x}"


def _as_json(checksums: Mapping[str, int]) -> str:
    return json.dumps({name: _as_hex(checksum) for name, checksum in checksums.items()})


def sealed(header: bytes, checksums: Mapping[str, int]) -> bytes:
    """The same header with the tensors' checksums, and with its own."""
    entries = json.loads(header[8:])
    entries["__metadata__"]["xxh3"] = _as_json(dict(sorted(checksums.items())))
    filled = _packed(entries)
    return _with_seal(filled, xxh3(filled))


def _with_seal(header: bytes, checksum: int) -> bytes:
    return _SEALED_BY.sub(f'"{_SEAL}": "{_as_hex(checksum)}"'.encode(), header, count=1)


# ------------------------------------------------------------------ written


class TensorWriter:
    """A file whose tensors are written in any order, each from its first element to its last, a run
    at a time."""

    def __init__(self, file: Any, places: Mapping[str, Place]) -> None:
        self._file, self._places = file, places
        self._written = dict.fromkeys(places, 0)  # elements
        self._hashes = {name: xxhash.xxh3_64() for name in places}

    @property
    def checksums(self) -> dict[str, int]:
        return {name: found.intdigest() for name, found in self._hashes.items()}

    def write(self, name: str, start: int, numbers: Tensor) -> None:
        """Flat elements of the tensor's dtype, from element `start` of it on."""
        place = self._places[name]
        assert numbers.dtype == place.dtype
        assert start == self._written[name]
        self._written[name] += numbers.numel()
        if numbers.numel():
            run = numbers.cpu().contiguous().view(torch.uint8).numpy().data
            self._file.seek(place.offset + start * place.dtype.itemsize)
            self._file.write(run)
            self._hashes[name].update(run)


@contextmanager
def written(
    path: str | os.PathLike[str],
    tensors: Mapping[str, tuple[torch.dtype, tuple[int, ...]]],
    metadata: Mapping[str, str],
) -> Iterator[TensorWriter]:
    """Makes the file of that name when the block ends, forced to the disk. If it raises, Ctrl-C
    included, what was there before is there still, and nothing beside it."""
    header, places = planned(tensors, metadata)
    with write_beside(path) as beside, open(beside, "wb") as file:
        file.write(header)
        file.truncate(len(header) + sum(place.nbytes for place in places.values()))
        writer = TensorWriter(file, places)
        yield writer
        with_checksums = sealed(header, writer.checksums)
        assert len(with_checksums) == len(header)
        file.seek(0)
        file.write(with_checksums)


# ------------------------------------------------------------------ read


class TensorFile:
    """A file's metadata and places, by its header alone; it is mapped when a tensor is asked for.

    `verify=False` reads what is there, whatever the checksums say.

    ValueError for a file that is cut short or no safetensors file, and for a header or a tensor
    that is not what was written.
    """

    def __init__(self, path: str | os.PathLike[str], *, verify: bool = True) -> None:
        self.path = Path(path)
        self.places, self.metadata, self._size = _read_header(self.path, verify)
        self.metadata.pop(_SEAL, None)
        checksums = json.loads(self.metadata.pop("xxh3", "{}"))
        self._unverified = checksums if verify else {}
        self._bytes: Tensor | None = None

    def tensor(self, name: str) -> Tensor:
        """Flat, and mapped: not to be written to. The first time it is verified."""
        tensor = self._mapped(name)
        if (wanted := self._unverified.get(name)) is not None:
            _require_same(self.path, f"its tensor {name!r}", _checksum(tensor), wanted)
            del self._unverified[name]
        return tensor

    def _mapped(self, name: str) -> Tensor:
        place = self.places[name]
        if self._bytes is None:
            _require_size(self.path, self.path.stat().st_size, self._size)
            # Copied on write, which nothing does: torch takes no memory that is read-only.
            self._bytes = torch.from_numpy(np.memmap(self.path, dtype=np.uint8, mode="c"))
        return self._bytes[place.offset : place.offset + place.nbytes].view(place.dtype)

    def close(self) -> None:
        """Unmap it, once its tensors are gone."""
        self._bytes = None


def _checksum(tensor: Tensor) -> str:
    found = xxhash.xxh3_64()
    for run in tensor.view(torch.uint8).split(_RUN):
        found.update(run.numpy().data)
    return _as_hex(found.intdigest())


def _require_same(path: Path, what: str, got: str, wanted: str) -> None:
    if got != wanted:
        raise ValueError(
            f"{path} is damaged: the checksum of {what} is {got}, and was {wanted} when it was "
            f"written; put back a copy, or give verify=False to read it as it is"
        )


def _require_sealed(path: Path, header: bytes) -> None:
    """Where the metadata have one checksum, they have to have both."""
    seal = _SEALED_BY.search(header)
    if seal is None and b'"xxh3' not in header:
        return
    wanted = seal[1].decode() if seal else "missing"
    _require_same(path, "its header", _as_hex(xxh3(_with_seal(header, 0))), wanted)


def _read_header(path: Path, verify: bool) -> tuple[dict[str, Place], dict[str, str], int]:
    try:
        with open(path, "rb") as file:
            size = os.fstat(file.fileno()).st_size
            length = struct.unpack("<Q", file.read(8).ljust(8, b"\0"))[0]
            text = file.read(length) if length <= min(size, _HEADER_LIMIT) else b""
    except OSError as error:
        raise ValueError(
            f"could not read {path}: {error}; give the path of a file that is there"
        ) from error
    if verify:
        _require_sealed(path, struct.pack("<Q", length) + text)
    try:
        entries = json.loads(text)
        metadata = entries.pop("__metadata__", {})
        places = {name: _place(entry, 8 + length) for name, entry in entries.items()}
    except (ValueError, KeyError, TypeError, AttributeError):
        raise ValueError(
            f"{path} has {size:,} bytes and no safetensors header: it is cut short or something "
            f"else; remove it, or put back a copy"
        ) from None
    wanted = max((place.offset + place.nbytes for place in places.values()), default=8 + length)
    _require_size(path, size, wanted)
    return places, metadata, size


def _require_size(path: Path, size: int, wanted: int) -> None:
    if size != wanted:
        raise ValueError(
            f"{path} is {'cut short' if size < wanted else 'too long'}: got {size:,} bytes, wanted "
            f"{wanted:,}; remove it, or put back a copy"
        )


def _place(entry: Mapping[str, Any], data_begin: int) -> Place:
    dtype, shape = DTYPES[entry["dtype"]], tuple(entry["shape"])
    begin, end = entry["data_offsets"]
    if end - begin != prod(shape) * dtype.itemsize or (data_begin + begin) % dtype.itemsize:
        raise ValueError("offsets that are not those of the shape")
    return Place(dtype, shape, data_begin + begin)
