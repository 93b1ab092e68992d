"""The folder of a checkpoint: complete or absent, verified, and read as plain data.

All is written into a folder beside it, whose files and names are forced to the disk (fsync) before
it is renamed. A rank that is killed leaves that folder, and the next save in the same place removes
it. Beside torch's files `checksums.json` holds a checksum (XXH3) for each box; the ranks verify all
of them, each its share, before a weight is changed. It costs one more reading of the checkpoint.

torch unpickles the index and whatever is no tensor. Here both are read as plain data
(memlab.internals.unpickling, `weights_only`): a checkpoint from somebody else cannot run anything.
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
_RUN = 2**22  # bytes that are read at a time


# ------------------------------------------------------------------ complete or absent


def folder_beside(folder: Path) -> Path:
    """Where a checkpoint is written until it is complete."""
    return folder.with_name(f".{folder.name}.partial")


def make_room(folder: Path, beside: Path, lock: FileLock, also: dict[str, Any]) -> None:
    """Make the folder beside, and hold its lock; FileExistsError for a folder of other files, and
    ValueError for what could be saved `also` and not be read again."""
    _require_plain(also)
    recover(folder)
    if folder.exists() and not (folder / ".metadata").exists():
        raise FileExistsError(
            f"{folder} is there and no checkpoint; give another folder to save to"
        )
    shutil.rmtree(_old(folder), ignore_errors=True)
    folder.parent.mkdir(parents=True, exist_ok=True)
    remove_orphaned_folders(folder.parent, ".*.partial")
    shutil.rmtree(beside, ignore_errors=True)
    beside.mkdir()
    lock.acquire(timeout=0)


def complete(
    folder: Path, beside: Path, lock: FileLock, checksums: list[dict[str, dict[str, int]]]
) -> None:
    """The moment from which the new checkpoint counts is the second renaming."""
    of_all = {file: of_file for of_rank in checksums for file, of_file in of_rank.items()}
    index = xxh3((beside / ".metadata").read_bytes())
    with write_beside(beside / CHECKSUMS) as path:
        path.write_text(json.dumps({"index": index, "boxes": of_all}), encoding="utf-8")
    lock.release()
    (beside / TEMPORARY_LOCK).unlink(missing_ok=True)
    sync(beside)
    old = _old(folder)
    if folder.exists():
        folder.rename(old)
    beside.rename(folder)
    sync(folder.parent)
    shutil.rmtree(old, ignore_errors=True)


def _old(folder: Path) -> Path:
    """Where a checkpoint is for the moment in which the next takes its place."""
    return folder.with_name(f".{folder.name}.old")


def recover(folder: Path) -> None:
    """Put back what a process that was killed in that moment had moved away."""
    if not folder.exists() and _old(folder).exists():
        _old(folder).rename(folder)


# ------------------------------------------------------------------ verified


def _boxes_by_file(folder: Path) -> dict[str, dict[int, tuple[int, str]]]:
    """{file: {where a box begins: (its bytes, its tensor's name)}}"""
    found: dict[str, dict[int, tuple[int, str]]] = {}
    for box, place in index_of(folder).storage_data.items():
        found.setdefault(place.relative_path, {})[place.offset] = place.length, box.fqn
    return found


def checksums_of_own(folder: Path, rank: int) -> dict[str, dict[str, int]]:
    """{file: {where a box begins: its checksum}} of the files that this rank has written."""
    return {
        file: {str(at): _checksum(folder / file, at, size) for at, (size, _) in boxes.items()}
        for file, boxes in _boxes_by_file(folder).items()
        if file.startswith(f"__{rank}_")
    }


def _checksum(path: Path, start: int, size: int) -> int:
    found = xxhash.xxh3_64()
    with path.open("rb") as file:
        file.seek(start)
        while size > 0 and (run := file.read(min(size, _RUN))):
            found.update(run)
            size -= len(run)
    return found.intdigest()


def verify_boxes(folder: Path, rank: int, ranks: int) -> None:
    """ValueError for a box that is not what was written; of all boxes each rank reads a share."""
    path = folder / CHECKSUMS
    if not path.exists():  # torch's own save, or an earlier version's
        return
    try:
        wanted = json.loads(path.read_text(encoding="utf-8"))
        index, boxes = wanted["index"], wanted["boxes"]
    except (ValueError, KeyError, TypeError) as error:
        raise _damaged(path, "it cannot be read") from error
    if xxh3((folder / ".metadata").read_bytes()) != index:
        raise _damaged(folder / ".metadata", "its checksum is another")
    places = [
        (file, at, size, name)
        for file, of_file in sorted(_boxes_by_file(folder).items())
        for at, (size, name) in sorted(of_file.items())
    ]
    for file, at, size, name in places[rank::ranks]:
        if _checksum(folder / file, at, size) != boxes.get(file, {}).get(str(at)):
            raise _damaged(folder / file, f"the checksum of {name} at byte {at:,} is another")


def _damaged(path: Path, what: str) -> ValueError:
    return ValueError(
        f"{path} is damaged: {what} than when it was written; load another checkpoint, or give "
        f"verify=False to read it as it is"
    )


def _require_plain(also: dict[str, Any]) -> None:
    """ValueError for what could be written and not read again."""
    file = io.BytesIO()
    torch.save(also, file)
    file.seek(0)
    try:
        torch.load(file, weights_only=True)
    except pickle.UnpicklingError as error:
        raise ValueError(
            f"got {', '.join(also)} to save beside the weights, of which not all is plain data: "
            f"give numbers, text, tensors, lists and dictionaries, such as a state_dict()"
        ) from error


# ------------------------------------------------------------------ plain data


def index_of(folder: Path) -> Metadata:
    try:
        return unpickle(folder / ".metadata", _IN_AN_INDEX)
    except FileNotFoundError as error:
        raise FileNotFoundError(
            f"{folder} is no checkpoint: it has no .metadata; give a folder that save() has written"
        ) from error


class PlainLoadPlanner(dcp.DefaultLoadPlanner):
    """torch's, which would run what it reads of settings and `also`."""

    def load_bytes(self, read_item: Any, value: io.BytesIO) -> None:
        self.state_dict[read_item.dest_index.fqn] = torch.load(value, weights_only=True)


class PlainReader(dcp.FileSystemReader):
    """torch's, which would run what it reads of the index."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        found = index_of(Path(self.path))
        found.storage_meta = found.storage_meta or metadata.StorageMeta()
        found.storage_meta.load_id = self.load_id
        return found


def _path(*parts: str) -> str:
    return "/".join(parts)


_IN_AN_INDEX = {
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
    **{(module, name): _path for module in ("pathlib", "pathlib._local")
       for name in ("PosixPath", "WindowsPath")},
}  # fmt: skip
