"""Save files of fake tensors: placeholders that a dry run reads again as tensors of their shapes.

    torch.save     writes the usual archive, with empty storages: `torch.load` takes the shapes from
                   the pickled object, and a dry run leaves the storages unread
    torch.jit.save writes zeros
    safetensors    writes the usual header. Large tensors are holes in the file, which take no space
                   on most file systems. Small tensors have their values, because a dry run reads
                   them; unknown values are 0.5, or 1 for integers, as everywhere in a dry run
    addresses      of fake tensors tell them apart, so that libraries find tied weights

Python's `open` opens the files, so `memlab run` can redirect them. Saving allocates what it
allocates for real tensors: nothing on an accelerator.
"""

import io
import json
import os
import struct
import sys
from collections import OrderedDict
from collections.abc import Callable, Mapping
from typing import Any, BinaryIO, NamedTuple

import torch
from torch.jit import save as save_module
from torch.serialization import save as save_archive
from torch.serialization import skip_data

from memlab.dry_runs import known_values
from memlab.internals.replacing import always
from memlab.internals.torch_internals import FakeTensor, StorageBase, torch_utils, without_modes
from memlab.world.entering import enter

_HEADER_ALIGNMENT = 8  # of the first tensor in a file of safetensors


# ------------------------------------------------------------------ torch.save


def _save_archive(
    saved: object, f: Any, *args: Any, _use_new_zipfile_serialization: bool = True, **options: Any
) -> None:
    """`torch.save`, without the bytes of storages. The format before torch 1.6 becomes today's."""
    archive = io.BytesIO()
    own = {"empty_record": lambda real: _write_empty, "described": _reduce}
    with skip_data(materialize_fake_tensors=True), enter(own):
        save_archive(saved, archive, *args, **options)
    _write_to(f, archive)


def _write_empty(writer: Any, name: str, count: int) -> None:
    writer.write_record(name, b"", 0)


def _reduce(real: Callable[[torch.Tensor, Any], Any]) -> Callable[[torch.Tensor, Any], Any]:
    """Return a function that describes a fake parameter as torch does a real one."""

    def reduce(tensor: torch.Tensor, protocol: Any) -> Any:
        if not isinstance(tensor, torch.nn.Parameter):
            return real(tensor, protocol)
        hooks: OrderedDict[Any, Any] = OrderedDict()
        return torch_utils._rebuild_parameter, (tensor.data, tensor.requires_grad, hooks)

    return reduce


def _jit_save(m: Any, f: Any, *args: Any, **options: Any) -> None:
    """`torch.jit.save` of zeros instead of fake tensors, whose memory C++ would read."""
    places = [
        (tensors, name)
        for module in m.modules()
        for tensors in (module._parameters, module._buffers)
        for name, _ in tensors.items()
    ]
    fakes = [tensors[name] for tensors, name in places]
    archive = io.BytesIO()
    try:
        with without_modes():
            for (tensors, name), fake in zip(places, fakes, strict=True):
                zeros = torch.zeros(fake.shape, dtype=fake.dtype)
                tensors[name] = zeros.requires_grad_(fake.requires_grad)
            save_module(m, archive, *args, **options)
    finally:
        for (tensors, name), fake in zip(places, fakes, strict=True):
            tensors[name] = fake
    _write_to(f, archive)


def _write_to(f: Any, archive: io.BytesIO) -> None:
    """Write to a path, or to an open file."""
    if isinstance(f, (str, os.PathLike)):
        with open(f, "wb") as file:
            file.write(archive.getbuffer())
    else:
        f.write(archive.getvalue())


# ------------------------------------------------------------------ safetensors


class _Saved(NamedTuple):
    """A tensor in a file of safetensors."""

    name: str
    tensor: torch.Tensor  # on the CPU

    @property
    def bytes(self) -> int:
        return self.tensor.numel() * self.tensor.element_size()


def _serialize_file(
    tensors: list[_Saved], filename: Any, metadata: Mapping[str, str] | None = None
) -> None:
    with open(filename, "wb") as file:
        _write(file, tensors, metadata)


def _serialize(tensors: list[_Saved], metadata: Mapping[str, str] | None = None) -> bytes:
    file = io.BytesIO()
    _write(file, tensors, metadata)
    return file.getvalue()


def _flatten(tensors: Mapping[str, torch.Tensor], *_: Any) -> list[_Saved]:
    """Return the tensors on the CPU. Raises what safetensors raises for tensors that it rejects."""
    if check := getattr(sys.modules["safetensors.torch"], "_evaluate_tensors_for_save", None):
        check(tensors)
    for name, tensor in tensors.items():
        if not tensor.is_contiguous():
            raise ValueError(
                f"You are trying to save a non contiguous tensor: `{name}` which is not allowed; "
                f"call `.contiguous()` before saving"
            )
    kept = [_Saved(name, tensor.to("cpu")) for name, tensor in tensors.items()]
    return sorted(kept, key=lambda saved: (-saved.tensor.element_size(), saved.name))


def _write(file: BinaryIO, tensors: list[_Saved], metadata: Mapping[str, str] | None) -> None:
    """Write the length of the header, the header in JSON, and the tensors one after another."""
    names_of_dtypes = sys.modules["safetensors.torch"]._TYPES.items()
    dtype_names = {dtype: name for name, dtype in names_of_dtypes}
    header: dict[str, Any] = {} if metadata is None else {"__metadata__": dict(metadata)}
    start = 0
    for saved in tensors:
        header[saved.name] = {
            "dtype": dtype_names[saved.tensor.dtype],
            "shape": list(saved.tensor.shape),
            "data_offsets": [start, start := start + saved.bytes],
        }
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % _HEADER_ALIGNMENT)
    file.write(struct.pack("<Q", len(text)) + text)
    for saved in tensors:
        if saved.bytes <= known_values.BOUND:
            file.write(_values(saved.tensor))
        else:
            file.seek(saved.bytes - 1, os.SEEK_CUR)
            file.write(b"\0")


def _values(tensor: torch.Tensor) -> bytes:
    """Return the bytes of a small tensor; a dry run's answers in place of unknown values."""
    if not isinstance(tensor, FakeTensor):
        values = tensor
    elif known_values.is_known(tensor):
        values = known_values.real(tensor)
    else:
        answer = 0.5 if tensor.dtype.is_floating_point or tensor.dtype.is_complex else 1
        answer = False if tensor.dtype is torch.bool else answer
        with without_modes():
            values = torch.full(tensor.shape, answer, dtype=torch.float64).to(tensor.dtype)
    with without_modes():
        return values.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes()


# ------------------------------------------------------------------ addresses


def _address(tensor: torch.Tensor) -> int:
    start: Any = tensor.untyped_storage().data_ptr()
    return start + tensor.storage_offset() * tensor.element_size() if start else 0


def _address_of_storage(real: Callable[[StorageBase], int]) -> Callable[[StorageBase], int]:
    """Return a function that gives a fake tensor's storage the address of its description."""

    def address(storage: Any) -> int:
        if storage.device.type != "meta":
            return real(storage)
        return storage._cdata if storage.nbytes() else 0

    return address


STAND_INS: dict[str, Callable[[Any], Any]] = {
    "save": always(_save_archive),
    "jit_save": always(_jit_save),
    "address": always(_address),
    "storage_address": _address_of_storage,
    "flatten": always(_flatten),
    "serialize": always(_serialize),
    "serialize_file": always(_serialize_file),
}
