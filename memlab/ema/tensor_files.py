"""Safetensors files, memory-mapped for reading and written in chunks.

Saves    a file's bytes in memory: mapped pages are read on access and can be reclaimed. Writing
         never holds the whole file in memory.
Costs    files are immutable: a change would corrupt or crash processes that have them mapped.
Source   the safetensors format: 8 bytes for the header's length, a JSON header, the tensors.

    {"weight": {"dtype": "F16", "shape": [2, 3], "data_offsets": [0, 12]}, "__metadata__": {…}}

Offsets count from the end of the header. Metadata are strings. Tensors are sorted by falling
element size, so each one is aligned.

The metadata include XXH3 checksums (64 bits): `xxh3` for each tensor, computed while writing, and
`xxh3_of_header` for the header with this field set to zeros. The first access to a tensor verifies
its checksum, which reads the tensor once more. A flipped bit raises an error that names the file
and the tensor; other tensors stay readable. Files without checksums are read unverified.

The safetensors library checks each header before anything else reads it.
"""

import json
import os
import re
import struct
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import xxhash
from safetensors import SafetensorError, safe_open
from torch import Tensor
from xxhash import xxh3_64_intdigest as xxh3

from memlab.internals.files import FULL, write_beside
from memlab.units import format_bytes

ALIGNMENT = 64  # bytes, of the first tensor
_HEADER_CHECKSUM = "xxh3_of_header"
_HEADER_CHECKSUM_PATTERN = re.compile(rb'"xxh3_of_header": "([0-9a-f]{16})"')
# XXH3 reads 26 GiB/s, zlib's CRC-32 2 to 4, less than the page cache gives: verifying makes a
# synthesis take 1.21 × and not 1.85 × (benchmarks/ema.py --section files).
_RUN = 2**22  # bytes per checksum update
_HEADER_LIMIT = 100 * 10**6  # bytes; anything longer is not a header
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
    """A tensor's location in a file; `offset` counts from the start of the file."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    offset: int

    @property
    def nbytes(self) -> int:
        return prod(self.shape) * self.dtype.itemsize


def plan_file(
    tensors: Mapping[str, tuple[torch.dtype, tuple[int, ...]]], metadata: Mapping[str, str]
) -> tuple[bytes, dict[str, Place]]:
    """Return a file's header, with checksums of 0, and the place of each tensor."""
    in_order = sorted(tensors.items(), key=lambda item: (-item[1][0].itemsize, item[0]))
    checksums = {"xxh3": _as_json(dict.fromkeys(sorted(tensors), 0)), _HEADER_CHECKSUM: _as_hex(0)}
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
    """Return 16 hexadecimal digits, so that filling in a checksum keeps the header's length."""
    return f"{checksum:016x}"


def _as_json(checksums: Mapping[str, int]) -> str:
    return json.dumps({name: _as_hex(checksum) for name, checksum in checksums.items()})


def add_checksums(header: bytes, checksums: Mapping[str, int]) -> bytes:
    """Return the header with the tensors' checksums and its own."""
    entries = json.loads(header[8:])
    entries["__metadata__"]["xxh3"] = _as_json(dict(sorted(checksums.items())))
    filled = _packed(entries)
    return _with_header_checksum(filled, xxh3(filled))


def _with_header_checksum(header: bytes, checksum: int) -> bytes:
    return _HEADER_CHECKSUM_PATTERN.sub(
        f'"{_HEADER_CHECKSUM}": "{_as_hex(checksum)}"'.encode(), header, count=1
    )


# ------------------------------------------------------------------ writing


class TensorWriter:
    """Writes a file's tensors in chunks: tensors in any order, each from start to end."""

    def __init__(self, file: Any, places: Mapping[str, Place]) -> None:
        self._file, self._places = file, places
        self._written = dict.fromkeys(places, 0)  # elements
        self._hashes = {name: xxhash.xxh3_64() for name in places}

    @property
    def checksums(self) -> dict[str, int]:
        return {name: found.intdigest() for name, found in self._hashes.items()}

    def write(self, name: str, start: int, elements: Tensor) -> None:
        """Write flat elements of a tensor, from element `start`."""
        place = self._places[name]
        assert elements.dtype == place.dtype
        assert start == self._written[name]
        self._written[name] += elements.numel()
        if elements.numel():
            run = elements.cpu().contiguous().view(torch.uint8).numpy().data
            self._file.seek(place.offset + start * place.dtype.itemsize)
            self._file.write(run)
            self._hashes[name].update(run)


@contextmanager
def create_file(
    path: str | os.PathLike[str],
    tensors: Mapping[str, tuple[torch.dtype, tuple[int, ...]]],
    metadata: Mapping[str, str],
) -> Iterator[TensorWriter]:
    """Create the file, synced to disk, when the block ends.

    If the block raises (including Ctrl-C), an existing file stays unchanged and no temporary file
    is left.
    """
    header, places = plan_file(tensors, metadata)
    size = len(header) + sum(place.nbytes for place in places.values())
    try:
        with write_beside(path) as beside, open(beside, "wb") as file:
            file.write(header)
            file.truncate(size)
            writer = TensorWriter(file, places)
            yield writer
            with_checksums = add_checksums(header, writer.checksums)
            assert len(with_checksums) == len(header)
            file.seek(0)
            file.write(with_checksums)
    except OSError as error:
        if error.errno not in FULL:
            raise
        raise OSError(
            error.errno,
            f"{error.strerror}: the file needs {format_bytes(size)}, and no file was changed; free "
            f"some space, or choose a folder on another disk",
            str(path),
        ) from error


# ------------------------------------------------------------------ reading


class TensorFile:
    """The header of a file. Tensors are mapped on first access.

    `verify=False` ignores checksums. Raise ValueError if the file is truncated or not a
    safetensors file, or if the header or a tensor is damaged.
    """

    def __init__(self, path: str | os.PathLike[str], *, verify: bool = True) -> None:
        self.path = Path(path)
        self.places, self.metadata, self._size = _read_header(self.path, verify)
        self._unverified = {}
        if verify and "xxh3" in self.metadata:
            self._unverified = self.value("xxh3", is_dict_of_strings)
        for checksums in ("xxh3", _HEADER_CHECKSUM):
            self.metadata.pop(checksums, None)
        self._bytes: Tensor | None = None

    def value(self, key: str, is_valid: Callable[[Any], bool]) -> Any:
        """Return a value of the metadata, which is JSON. Raise ValueError if it is not valid."""
        text = self.metadata.get(key, "")
        try:
            value = json.loads(text)
            if is_valid(value):
                return value
        except (ValueError, RecursionError):
            pass
        raise ValueError(
            f"{self.path} has {text[:40]!r} as {key!r} in its metadata, which memlab never writes "
            f"there; restore a copy of the file, or remove it"
        )

    def tensor(self, name: str) -> Tensor:
        """Return the flat, mapped tensor, verified on first access. Do not write to it."""
        if name not in self.places:
            raise ValueError(f"{self.path} has no tensor {name!r}; restore a copy of the file")
        tensor = self._mapped(name)
        if (wanted := self._unverified.get(name)) is not None:
            _verify(self.path, f"its tensor {name!r}", _checksum(tensor), wanted)
            del self._unverified[name]
        return tensor

    def _mapped(self, name: str) -> Tensor:
        place = self.places[name]
        if self._bytes is None:
            _require_size(self.path, self.path.stat().st_size, self._size)
            # Mode "c" is copy-on-write, because torch warns about read-only memory.
            self._bytes = torch.from_numpy(np.memmap(self.path, dtype=np.uint8, mode="c"))
        return self._bytes[place.offset : place.offset + place.nbytes].view(place.dtype)

    def close(self) -> None:
        """Drop the mapping; it ends with the last tensor that uses it."""
        self._bytes = None


def _checksum(tensor: Tensor) -> str:
    found = xxhash.xxh3_64()
    for run in tensor.view(torch.uint8).split(_RUN):
        found.update(run.numpy().data)
    return _as_hex(found.intdigest())


def _verify(path: Path, what: str, got: str, wanted: str) -> None:
    if got != wanted:
        raise ValueError(
            f"{path} is damaged: the checksum of {what} is {got}, and was {wanted} when it was "
            f"written; restore a copy, or pass verify=False to read the damaged data"
        )


def _verify_header(path: Path, header: bytes) -> None:
    """Verify the header's checksum. Metadata with one checksum must have both."""
    seal = _HEADER_CHECKSUM_PATTERN.search(header)
    if seal is None and b'"xxh3' not in header:
        return
    wanted = seal[1].decode() if seal else "missing"
    _verify(path, "its header", _as_hex(xxh3(_with_header_checksum(header, 0))), wanted)


def _read_header(path: Path, verify: bool) -> tuple[dict[str, Place], dict[str, str], int]:
    try:
        with open(path, "rb") as file:
            size = os.fstat(file.fileno()).st_size
            length = struct.unpack("<Q", file.read(8).ljust(8, b"\0"))[0]
            text = file.read(length) if length <= min(size, _HEADER_LIMIT) else b""
    except OSError as error:
        raise ValueError(
            f"could not read {path}: {error}; give the path of an existing file"
        ) from error
    if verify:
        _verify_header(path, struct.pack("<Q", length) + text)
    try:
        with safe_open(path, framework="numpy"):
            pass
        entries = json.loads(text)
        metadata = entries.pop("__metadata__", None) or {}
        places = {name: _place(entry, 8 + length) for name, entry in entries.items()}
    except (SafetensorError, OSError, ValueError) as error:
        raise ValueError(
            f"{path} has {size:,} bytes and is not a whole safetensors file ({error}): it is "
            f"truncated, too long or another kind of file; remove it, or restore a copy"
        ) from None
    return places, metadata, size


def _require_size(path: Path, size: int, wanted: int) -> None:
    if size != wanted:
        raise ValueError(
            f"{path} is {'truncated' if size < wanted else 'too long'}: got {size:,} bytes, wanted "
            f"{wanted:,}; remove it, or restore a copy"
        )


def _place(entry: Mapping[str, Any], data_begin: int) -> Place:
    """Return the place of an entry that the safetensors library has accepted."""
    if (dtype := DTYPES.get(entry["dtype"])) is None:
        raise ValueError(f"memlab writes no tensors of {entry['dtype']}")
    begin = data_begin + entry["data_offsets"][0]
    if begin % dtype.itemsize:
        raise ValueError(f"a tensor of {entry['dtype']} begins at byte {begin}")
    return Place(dtype, tuple(entry["shape"]), begin)


# ------------------------------------------------------------------ values of metadata


def is_dict_of_strings(value: Any) -> bool:
    return isinstance(value, dict) and all(isinstance(each, str) for each in value.values())


def is_list_of_strings(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(each, str) for each in value)


def is_number(value: Any) -> bool:
    """Return whether a value is a finite number, 0 or above."""
    return isinstance(value, (int, float)) and not isinstance(value, bool) and 0 <= value < 2**63
