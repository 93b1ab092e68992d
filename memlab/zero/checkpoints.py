"""Checkpoints that any number of ranks can go on from: torch's distributed checkpoint.

A rank owns runs of flattened weights, and of the moments of these weights. A checkpoint knows boxes
of whole tensors. So a run is written as a few boxes, each a run itself:

    · · · ■ ■ ■     the rest of a row
    ■ ■ ■ ■ ■ ■     whole rows
    ■ ■ · · · ·     the begin of a row

Tensors lie in it under their own names and shapes (`model.…`, `optimizer.state.….exp_avg`, and
`master.…` for float32 copies), so torch can load them without this file: into a plain model, or
FSDP2's. Whoever loads asks for the boxes that it owns, by whatever plan.
"""

import warnings
from collections.abc import Callable, Iterator
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed.checkpoint as dcp
from filelock import FileLock
from torch import Tensor
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

from memlab.internals.files import TEMPORARY_LOCK
from memlab.zero.checkpoint_files import (
    PlainLoadPlanner,
    PlainReader,
    checksums_of_own,
    complete,
    folder_beside,
    index_of,
    make_room,
    recover,
    verify_boxes,
)
from memlab.zero.group_wire import GroupWire
from memlab.zero.partitioning import Piece
from memlab.zero.ranks import Rank

_AS_NAMED = {"flatten_state_dict": False, "flatten_sharded_tensors": False}


class Box(NamedTuple):
    """Neighbours in a tensor that are neighbours when it is flat, too."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]


def boxes(shape: tuple[int, ...], start: int, stop: int) -> Iterator[Box]:
    """The numbers from `start` to before `stop` of a flattened tensor, in order."""
    if start >= stop:
        return
    if not shape:
        yield Box((), ())
        return
    row = prod(shape[1:])
    first, last = -(-start // row), stop // row  # whole rows between
    if first > last:  # inside one row
        yield from _in_row(shape, last, start - last * row, stop - last * row)
        return
    yield from _in_row(shape, first - 1, start - (first - 1) * row, row)
    if first < last:
        rest = shape[1:]
        yield Box((first, *(0 for _ in rest)), (last - first, *rest))
    yield from _in_row(shape, last, 0, stop - last * row)


def _in_row(shape: tuple[int, ...], index: int, start: int, stop: int) -> Iterator[Box]:
    if start < stop and prod(shape[1:]) > stop - start:
        for offsets, sizes in boxes(shape[1:], start, stop):
            yield Box((index, *offsets), (1, *sizes))


class Pieces(Tensor):
    """A tensor of which this rank has some boxes, as torch's checkpoints ask for them."""

    @staticmethod
    def __new__(cls, shape: tuple[int, ...], dtype: torch.dtype) -> "Pieces":
        return Tensor._make_wrapper_subclass(cls, shape, dtype=dtype)

    def __init__(self, shape: tuple[int, ...], dtype: torch.dtype) -> None:
        self.parts: dict[tuple[int, ...], Tensor] = {}  # by where the box begins

    def add(self, start: int, flat: Tensor) -> None:
        """Have the numbers from `start` on; they stay where they are."""
        at = 0
        for offsets, sizes in boxes(tuple(self.shape), start, start + flat.numel()):
            count = prod(sizes)
            self.parts[offsets] = flat[at : at + count].view(sizes)
            at += count

    def __create_write_items__(self, name: str, _: Any) -> list[WriteItem]:
        properties = TensorProperties(dtype=self.dtype)
        return [
            WriteItem(
                MetadataIndex(name, chunk.offsets),
                WriteItemType.SHARD,
                tensor_data=TensorWriteData(chunk, properties, self.size()),
            )
            for chunk in self.__create_chunk_list__()
        ]

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        return [
            ChunkStorageMetadata(torch.Size(offsets), part.size())
            for offsets, part in self.parts.items()
        ]

    def __get_tensor_shard__(self, index: MetadataIndex) -> Tensor:
        return self.parts[tuple(index.offset)]

    @classmethod
    def __torch_dispatch__(
        cls, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if function is torch.ops.aten.detach.default:
            return args[0]
        raise NotImplementedError(f"{function} of a tensor that is on several ranks")


# ------------------------------------------------------------------ what a rank has


def state_of(rank: Rank) -> dict[str, Any]:
    """Views of all that this rank owns, by the names in a checkpoint."""
    found: dict[str, Any] = {}
    for number in range(len(rank.plan.buckets)):
        for piece in rank.pieces(number):
            _add(found, f"model.{piece.weight.name}", piece, rank.shards[number].detach(), 0)
    for piece, begin, parameter in _stepped(rank):
        if rank.master_weights:
            _add(found, f"master.{piece.weight.name}", piece, parameter.detach(), begin)
        for key, value in rank.optimizer.state.get(parameter, {}).items():
            name = f"optimizer.state.{piece.weight.name}.{key}"
            if _is_of_each_number(value, parameter):
                _add(found, name, piece, value, begin)
            else:  # a count of steps
                found[name] = value
    return found | {f"model.{name}": tensor for name, tensor in _whole_everywhere(rank)}


def _stepped(rank: Rank) -> Iterator[tuple[Piece, int, Tensor]]:
    """(a piece, where the optimizer's tensor begins in its shard, that tensor) of all that have
    numbers in common."""
    for number, span, parameter in rank.stepped:
        for piece in rank.pieces(number):
            if piece.at < span.stop and span.start < piece.at + piece.stop - piece.start:
                yield piece, span.start, parameter


def _add(found: dict[str, Any], name: str, piece: Piece, numbers: Tensor, begin: int) -> None:
    """What `numbers`, which begin at `begin` of a shard, have of a piece."""
    start = max(piece.at, begin)
    stop = min(piece.at + piece.stop - piece.start, begin + numbers.numel())
    if start < stop:
        if name not in found:
            found[name] = Pieces(piece.weight.shape, numbers.dtype)
        found[name].add(piece.start + start - piece.at, numbers[start - begin : stop - begin])


def _is_of_each_number(value: Any, parameter: Tensor) -> bool:
    return isinstance(value, Tensor) and value.shape == parameter.shape


def _whole_everywhere(rank: Rank) -> Iterator[tuple[str, Tensor]]:
    """Buffers, and in stages below 3 what is not trained."""
    planned = {weight.name for bucket in rank.plan.buckets for weight in bucket.weights}
    kept = rank.model.state_dict(keep_vars=True)
    for name, tensor in (*rank.model.named_parameters(), *rank.model.named_buffers()):
        if name not in planned and name in kept:
            yield name, tensor.detach()


# ------------------------------------------------------------------ to a folder and back


def save(rank: Rank, wire: GroupWire, folder: Path, also: dict[str, Any]) -> None:
    """Each rank writes what it owns; the folder is there when all is in it, or as it was."""
    state = state_of(rank)
    if rank.index == 0:
        groups = rank.optimizer.param_groups
        state["settings"] = [{k: v for k, v in g.items() if k != "params"} for g in groups]
        state["also"] = also
    beside = folder_beside(folder)
    lock = FileLock(beside / TEMPORARY_LOCK)
    _by_first(wire, lambda: make_room(folder, beside, lock, also))
    try:
        with wire.watched("writing a checkpoint"):
            planner = dcp.DefaultSavePlanner(**_AS_NAMED)
            writer = dcp.FileSystemWriter(beside)
            _quietly(lambda: dcp.save(state, storage_writer=writer, **_in(wire), planner=planner))
        checksums = wire.everyone(checksums_of_own(beside, wire.index))
        _by_first(wire, lambda: complete(folder, beside, lock, checksums))
    finally:
        lock.release()


def load(rank: Rank, wire: GroupWire, folder: Path, *, verify: bool = True) -> dict[str, Any]:
    """Each rank reads what it owns; what was saved `also`. The optimizer has a state afterwards if
    it had one when it was saved. What one rank cannot read is the same error on all."""
    _by_first(wire, lambda: recover(folder))
    if verify:
        _agreed(wire, lambda: verify_boxes(folder, wire.index, wire.ranks))
    state, with_copies = _agreed(wire, lambda: _wanted(rank, folder))
    with wire.watched("reading a checkpoint"):
        planner = PlainLoadPlanner(**_AS_NAMED)
        reader = PlainReader(folder)
        _quietly(lambda: dcp.load(state, storage_reader=reader, **_in(wire), planner=planner))
    _put_back(rank, state, with_copies)
    return state["also"]


def _wanted(rank: Rank, folder: Path) -> tuple[dict[str, Any], bool]:
    """What this rank is to read, and whether it was saved with float32 copies."""
    saved = index_of(folder).state_dict_metadata
    state_names = {name for name in saved if name.startswith("optimizer.state.")}
    if not state_names:
        rank.optimizer.state.clear()
    elif not rank.optimizer.state:
        rank.make_state()
    state = {**state_of(rank), "settings": None, "also": None}
    with_copies = any(name.startswith("master.") for name in saved)
    if rank.master_weights and not with_copies:
        state = {name: one for name, one in state.items() if not name.startswith("master.")}
    _require_same(state, saved, folder)
    return state, with_copies


@torch.no_grad()
def _put_back(rank: Rank, state: dict[str, Any], with_copies: bool) -> None:
    """What was not read into its own place."""
    for group, settings in zip(rank.optimizer.param_groups, state["settings"], strict=True):
        group.update(settings)
    for piece, _, parameter in _stepped(rank):
        for key, value in rank.optimizer.state.get(parameter, {}).items():
            if not isinstance(value, Tensor):
                name = f"optimizer.state.{piece.weight.name}.{key}"
                rank.optimizer.state[parameter][key] = state[name]
    if rank.master_weights:
        for number, span, parameter in rank.stepped:
            shard = rank.shards[number][span]
            shard.copy_(parameter) if with_copies else parameter.copy_(shard)
    rank.gather()


def _require_same(state: dict[str, Any], saved: dict[str, Any], folder: Path) -> None:
    """ValueError for what is not in the checkpoint, or in another shape."""
    for name, mine in state.items():
        if name not in saved:
            raise ValueError(
                f"{folder} has no {name}; load it into the model and with the kind of optimizer "
                f"that it was saved with"
            )
        there = saved[name]
        if isinstance(there, TensorStorageMetadata) and there.size != mine.shape:
            raise ValueError(
                f"{name} is {tuple(there.size)} in {folder} and {tuple(mine.shape)} here; load it "
                f"into a model of the same shape"
            )


def _agreed(wire: GroupWire, do: Callable[[], Any]) -> Any:
    """What it returns here; the error of the first rank that has one is everyone's. (A rank has a
    few weights, and may see nothing wrong in these.)"""
    found, problem = None, None
    try:
        found = do()
    except (OSError, ValueError) as error:
        problem = type(error) if isinstance(error, OSError) else ValueError, str(error)
    for other in wire.everyone(problem):
        if other is not None:
            kind, said = other
            raise kind(said)
    return found


def _by_first(wire: GroupWire, do: Callable[[], None]) -> None:
    """Rank 0 does it, and all wait."""
    _agreed(wire, lambda: do() if wire.index == 0 else None)


def _in(wire: GroupWire) -> dict[str, Any]:
    return {"process_group": wire.group}


def _quietly(do: Callable[[], Any]) -> None:
    """Without torch's notices to those who write planners; with its errors as OSError."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            do()
    except dcp.api.CheckpointException as error:
        raise OSError(f"the checkpoint failed: {error}") from error
