"""Checkpoint folders: atomic replacement, and loading without running pickled code.

Ranks write a new checkpoint to a staging folder beside the target. Its files and names are synced
to disk (fsync) before the folder is renamed. A killed save leaves the staging folder, and the next
save to the same place removes it.

torch unpickles the index and everything except tensors. This module reads both as plain data
(memlab.internals.unpickling, `weights_only`), so an untrusted checkpoint cannot run code.
"""

import io
import pickle
import shutil
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import filesystem, metadata
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from memlab.internals.files import sync
from memlab.internals.torch_internals import get_layout
from memlab.internals.unpickling import unpickle

# ------------------------------------------------------------------ atomic replacement


def staging_folder(folder: Path) -> Path:
    """Return the folder where a checkpoint is written until it is complete."""
    return folder.with_name(f".{folder.name}.partial")


def prepare_save(folder: Path, also: dict[str, Any]) -> None:
    """Create the staging folder.

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
    shutil.rmtree(staging_folder(folder), ignore_errors=True)
    staging_folder(folder).mkdir(parents=True)


def commit(folder: Path) -> None:
    """Rename the staging folder. The second rename commits the save."""
    staging, old = staging_folder(folder), _backup(folder)
    sync(staging)
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
