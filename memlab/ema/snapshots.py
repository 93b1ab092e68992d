"""Snapshots: one file per average and time, with rounded weights.

Saves    half of float32's bytes in float16 or bfloat16; int8 takes 1.02 bytes per weight.
Costs    rounding: at most 2⁻¹² relative error in float16; in int8, 1/510 of the range of 256
         neighbours. A sum of snapshots multiplies the error by at most √Σxᵢ²: for 0.05 and 0.10,
         below 1.1 at widths from 0.06, but 2 at 0.04 and 6 at 0.03.
Source   Karras et al. 2023 (EDM2), arXiv 2312.02696, section 3.2; memlab.quantize for int8.

A file `ema-<step>-<sigma>.safetensors` uses the model's own names, so any safetensors reader can
load it as weights. In int8, each large tensor is stored as `name#codes`, `name#scales` and
`name#offsets`. Tied weights are stored once. Other tensors (buffers, frozen
weights) are exact copies of the live model's. The metadata name the run, clock, step and model, and
unrelated snapshots are rejected.
"""

import hashlib
import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from memlab.ema.profiles import WIDEST, Profile, power_profile
from memlab.ema.tensor_files import (
    TensorFile,
    is_dict_of_strings,
    is_list_of_strings,
    is_number,
)
from memlab.internals.chunks import chunk_size_on, chunk_starts
from memlab.internals.torch_internals import FakeTensor
from memlab.quantize import Quantized, dequantize_blockwise, quantize_blockwise

FORMAT = "memlab ema 1"
PATTERN = "ema-*.safetensors"
INT8 = "int8"
BLOCK = 256  # elements per scale and offset
SMALL = 4096  # elements: smaller tensors stay in float32 in int8 files
_FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)

Encoding = torch.dtype | str
Shapes = Mapping[str, tuple[int, ...]]
Reader = Callable[[int, int], Tensor]


def fingerprint(shapes: Shapes, followed: Iterable[str]) -> str:
    """Return a hash of a model's names and shapes, and of the names excluded from averaging."""
    listed = sorted((name, list(shape)) for name, shape in shapes.items())
    content = json.dumps([listed, sorted(followed)])
    return hashlib.sha256(content.encode()).hexdigest()[:12]


def check_encoding(encoding: Encoding) -> Encoding:
    """Return the encoding if it is a floating-point dtype or int8; else raise ValueError."""
    if encoding in (INT8, torch.int8):
        return INT8
    if encoding not in _FLOATS:
        raise ValueError(
            f"got {encoding!r} for snapshots; give torch.float16, bfloat16, float32, float64 or "
            f"'int8'"
        )
    return encoding


# ------------------------------------------------------------------ encoding


def parts(
    name: str, shape: tuple[int, ...], encoding: Encoding
) -> dict[str, tuple[torch.dtype, tuple[int, ...]]]:
    """Return the dtypes and shapes of the file's tensors for one averaged tensor."""
    if isinstance(encoding, torch.dtype):
        return {name: (encoding, shape)}
    if prod(shape) < SMALL:
        return {name: (torch.float32, shape)}
    blocks = -(-prod(shape) // BLOCK)
    return {
        f"{name}#codes": (torch.uint8, shape),
        f"{name}#scales": (torch.bfloat16, (blocks,)),
        f"{name}#offsets": (torch.bfloat16, (blocks,)),
    }


def encode(name: str, elements: Tensor, encoding: Encoding) -> Iterator[tuple[str, int, Tensor]]:
    """Yield (file tensor, start, elements) of an averaged tensor, in chunks."""
    flat = elements.reshape(-1)
    size = chunk_size_on(flat.device)
    for start in chunk_starts(flat, size):
        part = flat[start : start + size]
        if encoding != INT8 or len(flat) < SMALL:
            dtype = encoding if isinstance(encoding, torch.dtype) else torch.float32
            yield name, start, _cast(name, part, dtype)
            continue
        # Saves disk, not time: a synthesis takes 2.16 × the CPU time of float32 files, from float16
        # files 0.67 × (benchmarks/ema.py --section decoding).
        q = quantize_blockwise(part.float(), block=BLOCK)
        assert q.offsets is not None
        yield f"{name}#codes", start, q.codes
        yield f"{name}#scales", start // BLOCK, q.scales
        yield f"{name}#offsets", start // BLOCK, q.offsets


def _cast(name: str, part: Tensor, dtype: torch.dtype) -> Tensor:
    rounded = part.to(dtype)
    if dtype == torch.float16 and not isinstance(part, FakeTensor):
        largest = max(abs(float(end)) for end in part.aminmax())
        if torch.finfo(dtype).max < largest < float("inf"):
            raise ValueError(
                f"got {largest:.6g} in {name!r}, and float16 ends at 65504; give PostHocEMA "
                f"snapshot_dtype=torch.bfloat16"
            )
    return rounded


def reader(file: TensorFile, name: str) -> Reader:
    """Return `read(start, stop)`; `start` must begin a block. Maps or decodes the elements."""
    if name in file.places:
        mapped = file.tensor(name)
        return lambda start, stop: mapped[start:stop]
    codes, scales, offsets = (
        file.tensor(f"{name}#{kind}") for kind in ("codes", "scales", "offsets")
    )

    def read(start: int, stop: int) -> Tensor:
        blocks = slice(start // BLOCK, -(-stop // BLOCK))
        shape = torch.Size([stop - start])
        return dequantize_blockwise(
            Quantized(
                codes[start:stop], scales[blocks], offsets[blocks], None, shape, torch.float32, 8,
                BLOCK,
            )
        )  # fmt: skip

    return read


# ------------------------------------------------------------------ one snapshot


@dataclass(frozen=True)
class Snapshot:
    """The header of a snapshot file. Tensors are read on demand."""

    file: TensorFile
    run: str
    clock: str
    step: int | float
    sigma: float
    model: str  # fingerprint
    followed: frozenset[str]  # copied from the live model, not averaged
    tied: dict[str, str]  # other name: name of the stored tensor

    @classmethod
    def open(cls, path: str | os.PathLike[str], *, verify: bool = True) -> "Snapshot":
        """Read a snapshot's header.

        With `verify`, tensors are checked against their checksums when read. Raise ValueError if
        the file is truncated, damaged or not a snapshot.
        """
        file = TensorFile(path, verify=verify)
        about = file.metadata
        if about.get("format") != FORMAT:
            raise ValueError(
                f"{file.path} is of format {about.get('format')!r}, wanted {FORMAT!r}; give a file "
                f"written by PostHocEMA.snapshot()"
            )
        if missing := sorted({"run", "clock", "model"} - about.keys()):
            raise ValueError(f"{file.path} has no {missing[0]!r} in its metadata; restore a copy")
        snapshot = cls(
            file,
            about["run"],
            about["clock"],
            file.value("step", lambda step: is_number(step) and step > 0),
            file.value("sigma", lambda sigma: is_number(sigma) and 0 < sigma < WIDEST),
            about["model"],
            frozenset(file.value("followed", is_list_of_strings)),
            file.value("tied", is_dict_of_strings),
        )
        snapshot._require_stored_tensors()
        return snapshot

    def _require_stored_tensors(self) -> None:
        """Raise ValueError unless each tensor is stored as `encode` stores tensors."""
        places, shapes = self.file.places, self.shapes
        wanted: dict[str, Any] = {name: places.get(name) for name in self.followed}
        for name, shape in shapes.items():
            if f"{name}#codes" in places:
                wanted |= parts(name, shape, INT8)
            elif name not in self.followed:
                place = places[name]
                wanted[name] = place if place.dtype in _FLOATS else None
        stored = {name: (place.dtype, place.shape) for name, place in places.items()}
        for name in sorted(wanted.keys() | stored.keys()):
            want = wanted.get(name)
            if want is None or stored.get(name) != tuple(want)[:2]:
                raise ValueError(
                    f"{self.path} has {stored.get(name, 'nothing')} as {name!r}, which no snapshot "
                    f"has; restore a copy of the file, or remove it"
                )
        if unknown := sorted(set(self.tied.values()) - shapes.keys()):
            raise ValueError(f"{self.path} ties a weight to {unknown[0]!r}, which it does not have")

    @property
    def path(self) -> Path:
        return self.file.path

    @property
    def profile(self) -> Profile:
        return power_profile(self.sigma, self.step)

    @property
    def nbytes(self) -> int:
        """The size of the file."""
        return self.path.stat().st_size

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """The shapes of all tensors, by the model's names."""
        found = {
            name.removesuffix("#codes"): place.shape
            for name, place in self.file.places.items()
            if not name.endswith(("#scales", "#offsets"))
        }
        return dict(sorted(found.items()))

    def dtype(self, name: str) -> torch.dtype:
        """Return the dtype for reading: the stored one if not averaged, else float32 or float64."""
        if name in self.followed:
            return self.file.places[name].dtype
        stored = self.file.places.get(name)
        return torch.float64 if stored and stored.dtype == torch.float64 else torch.float32

    def reader(self, name: str) -> Reader:
        """Return `read(start, stop)` for flat elements; `start` must be a multiple of 256."""
        return reader(self.file, name)

    def read(self, name: str, start: int, stop: int) -> Tensor:
        """Read flat elements once; `start` must be a multiple of 256."""
        return self.reader(name)(start, stop)


def snapshot_metadata(
    *, run: str, clock: str, step: float, sigma: float, model: str,
    followed: Iterable[str], tied: Mapping[str, str],
) -> dict[str, str]:  # fmt: skip
    """Return a file's metadata. The step keeps full precision, as an int or a float64."""
    return {
        "format": FORMAT,
        "run": run,
        "clock": clock,
        "step": json.dumps(step),
        "sigma": json.dumps(sigma),
        "model": model,
        "followed": json.dumps(sorted(followed)),
        "tied": json.dumps(dict(sorted(tied.items()))),
    }


def file_name(step: float, sigma: float) -> str:
    """Return a file name that sorts by time."""
    whole, _, part = f"{step:.17f}".partition(".")
    when = f"{whole:0>12}" if isinstance(step, int) else f"{whole:0>12}.{part.rstrip('0') or '0'}"
    return f"ema-{when}-{sigma}.safetensors"


# ------------------------------------------------------------------ several snapshots


def find_snapshots(folder: str | os.PathLike[str], *, verify: bool = True) -> list[Snapshot]:
    """Return all snapshots in a folder in the order of time; see `Snapshot.open`."""
    found = [Snapshot.open(path, verify=verify) for path in Path(folder).glob(PATTERN)]
    return sorted(found, key=lambda snapshot: (snapshot.step, snapshot.sigma))


def snapshots_of_one_run(snapshots: Any) -> list[Snapshot]:
    """Return snapshots in the order of time from a folder, paths, or Snapshots.

    Raise ValueError unless they share one run, clock and model.
    """
    if isinstance(snapshots, (str, os.PathLike)) and Path(snapshots).is_dir():
        found = find_snapshots(snapshots)
    else:
        several = [snapshots] if isinstance(snapshots, (str, os.PathLike, Snapshot)) else snapshots
        opened = (s if isinstance(s, Snapshot) else Snapshot.open(s) for s in several)
        found = sorted(opened, key=lambda snapshot: (snapshot.step, snapshot.sigma))
    if not found:
        raise ValueError(f"got no snapshots in {snapshots!s}; give snapshots written by PostHocEMA")
    for kind in ("model", "run", "clock"):
        _require_same(found, kind)
    return found


def _require_same(snapshots: Sequence[Snapshot], kind: str) -> None:
    first = snapshots[0]
    wanted = getattr(first, kind)
    for snapshot in snapshots:
        if (got := getattr(snapshot, kind)) != wanted:
            raise ValueError(
                f"{snapshot.path} is of another {kind} than {first.path}: got {got!r}, wanted "
                f"{wanted!r}; give snapshots of one {kind}"
            )
