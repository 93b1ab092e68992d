"""Checkpoint folders: atomic replacement, checksums, and loading without running pickled code.

Ranks write a new checkpoint to a staging folder beside the target. Its files and names are synced
to disk (fsync) before the folder is renamed. A killed rank leaves the staging folder, and the next
save to the same place removes it.

`checksums.json` holds one checksum (XXH3) for each box. A box is a rectangular region of a tensor.
Before any weight changes, the ranks share the verification of all boxes. Verification reads the
checkpoint once more.

torch unpickles the index and everything except tensors. This module reads both as plain data
(memlab.internals.unpickling, `weights_only`), so an untrusted checkpoint cannot run code.
"""

import io
import json
import pickle
import shutil
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
import xxhash
from filelock import FileLock
from torch.distributed.checkpoint import filesystem, metadata
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from xxhash import xxh3_64_intdigest as xxh3

from memlab.internals.files import TEMPORARY_LOCK, remove_orphaned_folders, sync, write_beside
from memlab.internals.torch_internals import get_layout
from memlab.internals.unpickling import unpickle

CHECKSUMS = "checksums.json"
_READ_BYTES = 2**22


# ------------------------------------------------------------------ atomic replacement


def staging_folder(folder: Path) -> Path:
    """Return the folder where a checkpoint is written until it is complete."""
    return folder.with_name(f".{folder.name}.partial")


def prepare_save(folder: Path, staging: Path, lock: FileLock, also: dict[str, Any]) -> None:
    """Create the staging folder and acquire its lock.

    Raises FileExistsError for a folder that holds other files, and ValueError for values in `also`
    that could not be loaded again.
    """
    _require_plain(also)
    recover(folder)
    if folder.exists() and not (folder / ".metadata").exists():
        raise FileExistsError(
            f"{folder} exists and is not a checkpoint; pass another folder to save to"
        )
    shutil.rmtree(_backup(folder), ignore_errors=True)
    folder.parent.mkdir(parents=True, exist_ok=True)
    remove_orphaned_folders(folder.parent, ".*.partial")
    shutil.rmtree(staging, ignore_errors=True)
    staging.mkdir()
    lock.acquire(timeout=0)


def commit(
    folder: Path, staging: Path, lock: FileLock, checksums: list[dict[str, dict[str, int]]]
) -> None:
    """Write the checksums and rename the staging folder. The second rename commits the save."""
    boxes = {file: of_file for of_rank in checksums for file, of_file in of_rank.items()}
    index = xxh3((staging / ".metadata").read_bytes())
    with write_beside(staging / CHECKSUMS) as path:
        path.write_text(json.dumps({"index": index, "boxes": boxes}), encoding="utf-8")
    lock.release()
    (staging / TEMPORARY_LOCK).unlink(missing_ok=True)
    sync(staging)
    old = _backup(folder)
    if folder.exists():
        folder.rename(old)
    staging.rename(folder)
    sync(folder.parent)
    shutil.rmtree(old, ignore_errors=True)


def _backup(folder: Path) -> Path:
    """Return the folder that holds the previous checkpoint between the two renames."""
    return folder.with_name(f".{folder.name}.old")


def recover(folder: Path) -> None:
    """Restore the previous checkpoint if a process was killed between the two renames."""
    if not folder.exists() and _backup(folder).exists():
        _backup(folder).rename(folder)


# ------------------------------------------------------------------ checksums


def _boxes_by_file(folder: Path) -> dict[str, dict[int, tuple[int, str]]]:
    """Return {file: {start of a box: (its bytes, its tensor's name)}}."""
    found: dict[str, dict[int, tuple[int, str]]] = {}
    for box, place in read_index(folder).storage_data.items():
        found.setdefault(place.relative_path, {})[place.offset] = place.length, box.fqn
    return found


def own_checksums(folder: Path, rank: int) -> dict[str, dict[str, int]]:
    """Return {file: {start of a box: its checksum}} for the files that this rank wrote."""
    return {
        file: {str(at): _checksum(folder / file, at, size) for at, (size, _) in boxes.items()}
        for file, boxes in _boxes_by_file(folder).items()
        if file.startswith(f"__{rank}_")
    }


def _checksum(path: Path, start: int, size: int) -> int:
    found = xxhash.xxh3_64()
    with path.open("rb") as file:
        file.seek(start)
        while size > 0 and (block := file.read(min(size, _READ_BYTES))):
            found.update(block)
            size -= len(block)
    return found.intdigest()


def verify_boxes(folder: Path, rank: int, ranks: int) -> None:
    """Raise ValueError for a box whose checksum differs. Each rank reads its share of the boxes."""
    path = folder / CHECKSUMS
    if not path.exists():  # saved by torch or by an earlier version
        return
    try:
        expected = json.loads(path.read_text(encoding="utf-8"))
        index, boxes = expected["index"], expected["boxes"]
    except (ValueError, KeyError, TypeError) as error:
        raise _damaged(path, "it is not valid JSON") from error
    if xxh3((folder / ".metadata").read_bytes()) != index:
        raise _damaged(folder / ".metadata", "its checksum differs")
    places = [
        (file, at, size, name)
        for file, of_file in sorted(_boxes_by_file(folder).items())
        for at, (size, name) in sorted(of_file.items())
    ]
    for file, at, size, name in places[rank::ranks]:
        if _checksum(folder / file, at, size) != boxes.get(file, {}).get(str(at)):
            raise _damaged(folder / file, f"the checksum of {name} at byte {at:,} differs")


def _damaged(path: Path, reason: str) -> ValueError:
    return ValueError(
        f"{path} is damaged: {reason}; load another checkpoint, or pass verify=False to skip the "
        f"checksums"
    )


def _require_plain(also: dict[str, Any]) -> None:
    """Raise ValueError for values that could be saved but not loaded again."""
    file = io.BytesIO()
    torch.save(also, file)
    file.seek(0)
    try:
        torch.load(file, weights_only=True)
    except pickle.UnpicklingError as error:
        raise ValueError(
            f"got {', '.join(also)} to save, and not all of it is plain data: pass numbers, text, "
            f"tensors, lists and dictionaries, such as a state_dict()"
        ) from error


# ------------------------------------------------------------------ loading plain data


def read_index(folder: Path) -> Metadata:
    try:
        return unpickle(folder / ".metadata", _INDEX_TYPES)
    except FileNotFoundError as error:
        raise FileNotFoundError(
            f"{folder} is not a checkpoint: it has no .metadata; pass a folder that save() wrote"
        ) from error


class PlainLoadPlanner(dcp.DefaultLoadPlanner):
    """Load settings and `also` with weights_only=True; torch's planner would run pickled code."""

    def load_bytes(self, read_item: Any, value: io.BytesIO) -> None:
        self.state_dict[read_item.dest_index.fqn] = torch.load(value, weights_only=True)


class PlainReader(dcp.FileSystemReader):
    """Read the index as plain data; torch's reader would run pickled code."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        found = read_index(Path(self.path))
        found.storage_meta = found.storage_meta or metadata.StorageMeta()
        found.storage_meta.load_id = self.load_id
        return found


def _join_path(*parts: str) -> str:
    return "/".join(parts)


_INDEX_TYPES: dict[tuple[str, str], Any] = {
    **{
        (kind.__module__, kind.__qualname__): kind
        for kind in (
            *(Metadata, MetadataIndex, ChunkStorageMetadata),
            *(TensorProperties, TensorStorageMetadata),
            *(metadata.BytesStorageMetadata, metadata.StorageMeta, metadata._MEM_FORMAT_ENCODING),
            filesystem._StorageInfo,
        )
    },
    ("torch", "Size"): torch.Size,
    ("torch.serialization", "_get_layout"): get_layout,
    **{("torch", str(dtype).removeprefix("torch.")): dtype for dtype in vars(torch).values()
       if isinstance(dtype, torch.dtype)},
    **{(module, name): _join_path for module in ("pathlib", "pathlib._local")
       for name in ("PosixPath", "WindowsPath")},
}  # fmt: skip
