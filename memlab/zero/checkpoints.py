"""Save and load sharded checkpoints with any number of ranks, in torch's distributed format.

A rank owns ranges of flattened weights and of their optimizer state. torch's checkpoints store
boxes (rectangular regions) of whole tensors. So each range is written as a few boxes:

    · · · ■ ■ ■     the rest of a row
    ■ ■ ■ ■ ■ ■     whole rows
    ■ ■ · · · ·     the start of a row

Tensors keep their own names and shapes (`model.…`, `optimizer.state.….exp_avg`, and `master.…` for
float32 copies). torch can therefore load them without this module, into a plain or an FSDP2 model.
When loading, each rank requests the boxes that it owns under its own plan.
"""

import warnings
from collections.abc import Callable, Iterator
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

from memlab.zero.checkpoint_files import (
    PlainLoadPlanner,
    PlainReader,
    commit,
    prepare_save,
    read_index,
    recover,
    staging_folder,
)
from memlab.zero.partitioning import ShardChunk
from memlab.zero.process_group import ProcessGroupCommunicator
from memlab.zero.ranks import Rank

_AS_NAMED = {"flatten_state_dict": False, "flatten_sharded_tensors": False}


class TensorBox(NamedTuple):
    """A rectangular region of a tensor whose elements are contiguous in the flattened tensor."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]


def boxes(shape: tuple[int, ...], start: int, stop: int) -> Iterator[TensorBox]:
    """Yield the boxes that cover elements `start` to `stop` - 1 of a flattened tensor, in order."""
    if start >= stop:
        return
    if not shape:
        yield TensorBox((), ())
        return
    row = prod(shape[1:])
    first, last = -(-start // row), stop // row  # the whole rows are first to last - 1
    if first > last:  # inside one row
        yield from _in_row(shape, last, start - last * row, stop - last * row)
        return
    yield from _in_row(shape, first - 1, start - (first - 1) * row, row)
    if first < last:
        rest = shape[1:]
        yield TensorBox((first, *(0 for _ in rest)), (last - first, *rest))
    yield from _in_row(shape, last, 0, stop - last * row)


def _in_row(shape: tuple[int, ...], index: int, start: int, stop: int) -> Iterator[TensorBox]:
    if start < stop and prod(shape[1:]) > stop - start:
        for offsets, sizes in boxes(shape[1:], start, stop):
            yield TensorBox((index, *offsets), (1, *sizes))


class OwnedBoxes(Tensor):
    """A tensor with the boxes that this rank owns; implements torch's checkpoint protocol."""

    @staticmethod
    def __new__(cls, shape: tuple[int, ...], dtype: torch.dtype) -> "OwnedBoxes":
        return Tensor._make_wrapper_subclass(cls, shape, dtype=dtype)

    def __init__(self, shape: tuple[int, ...], dtype: torch.dtype) -> None:
        self.parts: dict[tuple[int, ...], Tensor] = {}  # by the offsets of the box

    def add_elements(self, start: int, flat: Tensor) -> None:
        """Add the elements from `start` on, as views."""
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
        assert index.offset is not None
        return self.parts[tuple(index.offset)]

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # torch declares another function
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if func is torch.ops.aten.detach.default:
            return args[0]
        raise NotImplementedError(f"{func} of a tensor sharded over several ranks")


# ------------------------------------------------------------------ the state of a rank


def rank_state(rank: Rank) -> dict[str, Any]:
    """Return views of everything that this rank owns, by name in the checkpoint."""
    found: dict[str, Any] = {}
    for number in range(len(rank.plan.buckets)):
        for chunk in rank.chunks(number):
            _add(found, f"model.{chunk.weight.name}", chunk, rank.shards[number].detach(), 0)
    for chunk, begin, parameter in _optimizer_chunks(rank):
        if rank.master_weights:
            _add(found, f"master.{chunk.weight.name}", chunk, parameter.detach(), begin)
        for key, value in rank.optimizer.state.get(parameter, {}).items():
            name = f"optimizer.state.{chunk.weight.name}.{key}"
            if _is_per_element(value, parameter):
                _add(found, name, chunk, value, begin)
            else:  # a count of steps
                found[name] = value
    return found | {f"model.{name}": tensor for name, tensor in _replicated_tensors(rank)}


def _optimizer_chunks(rank: Rank) -> Iterator[tuple[ShardChunk, int, Tensor]]:
    """Yield (chunk, start of the optimizer's tensor in the shard, that tensor) for each overlap."""
    for number, span, parameter in rank.optimizer_shards:
        for chunk in rank.chunks(number):
            if chunk.at < span.stop and span.start < chunk.at + chunk.stop - chunk.start:
                yield chunk, span.start, parameter


def _add(
    found: dict[str, Any], name: str, chunk: ShardChunk, values: Tensor, values_start: int
) -> None:
    """Add the overlap of a chunk with `values`, which begin at `values_start` of the shard."""
    start = max(chunk.at, values_start)
    stop = min(chunk.at + chunk.stop - chunk.start, values_start + values.numel())
    if start < stop:
        if name not in found:
            found[name] = OwnedBoxes(chunk.weight.shape, values.dtype)
        span = slice(start - values_start, stop - values_start)
        found[name].add_elements(chunk.start + start - chunk.at, values[span])


def _is_per_element(value: Any, parameter: Tensor) -> bool:
    return isinstance(value, Tensor) and value.shape == parameter.shape


def _replicated_tensors(rank: Rank) -> Iterator[tuple[str, Tensor]]:
    """Yield buffers and, in stages below 3, frozen weights."""
    planned = {weight.name for bucket in rank.plan.buckets for weight in bucket.weights}
    kept = rank.model.state_dict(keep_vars=True)
    for name, tensor in (*rank.model.named_parameters(), *rank.model.named_buffers()):
        if name not in planned and name in kept:
            yield name, tensor.detach()


# ------------------------------------------------------------------ save and load


def save(rank: Rank, comm: ProcessGroupCommunicator, folder: Path, also: dict[str, Any]) -> None:
    """Write what each rank owns. The folder is replaced only when every rank has written."""
    state = rank_state(rank)
    if rank.index == 0:
        groups = rank.optimizer.param_groups
        state["settings"] = [{k: v for k, v in g.items() if k != "params"} for g in groups]
        state["also"] = also
    _on_rank_0(comm, lambda: prepare_save(folder, also))
    with comm.naming_lost_ranks("writing a checkpoint"):
        planner = dcp.DefaultSavePlanner(**_AS_NAMED)
        writer = dcp.FileSystemWriter(staging_folder(folder))
        _without_planner_warnings(
            lambda: dcp.save(
                state, storage_writer=writer, process_group=comm.group, planner=planner
            )
        )
    _on_rank_0(comm, lambda: commit(folder))


def load(rank: Rank, comm: ProcessGroupCommunicator, folder: Path) -> dict[str, Any]:
    """Read what each rank owns, and return what was saved as `also`.

    The optimizer has state afterwards only if it had state when it was saved. If one rank cannot
    read its part, every rank raises the same error.
    """
    _on_rank_0(comm, lambda: recover(folder))
    state, with_copies = _agree(comm, lambda: _state_to_load(rank, folder))
    with comm.naming_lost_ranks("reading a checkpoint"):
        planner = PlainLoadPlanner(**_AS_NAMED)
        reader = PlainReader(folder)
        _without_planner_warnings(
            lambda: dcp.load(
                state, storage_reader=reader, process_group=comm.group, planner=planner
            )
        )
    _restore(rank, state, with_copies)
    return state["also"]


def _state_to_load(rank: Rank, folder: Path) -> tuple[dict[str, Any], bool]:
    """Return the state for this rank to read, and whether float32 copies were saved."""
    saved = read_index(folder).state_dict_metadata
    state_names = {name for name in saved if name.startswith("optimizer.state.")}
    if not state_names:
        rank.optimizer.state.clear()
    elif not rank.optimizer.state:
        rank.init_optimizer_state()
    state = {**rank_state(rank), "settings": None, "also": None}
    with_copies = any(name.startswith("master.") for name in saved)
    if rank.master_weights and not with_copies:
        state = {k: tensor for k, tensor in state.items() if not k.startswith("master.")}
    _require_same_shapes(state, saved, folder)
    return state, with_copies


@torch.no_grad()
def _restore(rank: Rank, state: dict[str, Any], with_copies: bool) -> None:
    """Restore everything that was not loaded in place."""
    for group, settings in zip(rank.optimizer.param_groups, state["settings"], strict=True):
        group.update(settings)
    for chunk, _, parameter in _optimizer_chunks(rank):
        for key, value in rank.optimizer.state.get(parameter, {}).items():
            if not isinstance(value, Tensor):
                name = f"optimizer.state.{chunk.weight.name}.{key}"
                rank.optimizer.state[parameter][key] = state[name]
    if rank.master_weights:
        for number, span, parameter in rank.optimizer_shards:
            shard = rank.shards[number][span]
            shard.copy_(parameter) if with_copies else parameter.copy_(shard)
    rank.gather()


def _require_same_shapes(state: dict[str, Any], saved: dict[str, Any], folder: Path) -> None:
    """Raise ValueError for a tensor that the checkpoint lacks or has in another shape."""
    for name, mine in state.items():
        if name not in saved:
            raise ValueError(
                f"{folder} has no {name}; load it into the same model, with the same kind of "
                f"optimizer that it was saved with"
            )
        stored = saved[name]
        if isinstance(stored, TensorStorageMetadata) and stored.size != mine.shape:
            raise ValueError(
                f"{name} is {tuple(stored.size)} in {folder} and {tuple(mine.shape)} here; load it "
                f"into a model with that shape"
            )


def _agree(comm: ProcessGroupCommunicator, do: Callable[[], Any]) -> Any:
    """Return the result of `do`. If any rank fails, every rank raises the first rank's error.

    Each rank checks only its own shards, so one rank may fail where another succeeds.
    """
    found, problem = None, None
    try:
        found = do()
    except (OSError, ValueError) as error:
        problem = type(error) if isinstance(error, OSError) else ValueError, str(error)
    for other in comm.gather_objects(problem):
        if other is not None:
            kind, message = other
            raise kind(message)
    return found


def _on_rank_0(comm: ProcessGroupCommunicator, do: Callable[[], None]) -> None:
    """Run `do` on rank 0 while the other ranks wait."""
    _agree(comm, lambda: do() if comm.index == 0 else None)


def _without_planner_warnings(do: Callable[[], Any]) -> None:
    """Silence torch's warnings for planner authors, and raise its errors as OSError."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            do()
    except dcp.api.CheckpointException as error:
        raise OSError(f"the checkpoint failed: {error}") from error
