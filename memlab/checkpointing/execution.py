"""Run a model's blocks by a checkpointing schedule, without changing the model.

    handle = checkpoint_blocks(model, ((0, 1), (2, 3)))
    loss = model(tokens, targets)                          # keeps two inputs, not four blocks
    loss.backward()                                        # reruns two blocks, then two more
    handle.remove()                                        # restores the plain model

    checkpoint_blocks(model, schedule, using=selective(MATMULS))   # selective checkpointing

The model loops over `self.blocks`. While a schedule is on, that loop yields one function per part
of the schedule instead of the blocks. Parameters, their names, the state dict and the blocks' hooks
do not change.
"""

from collections.abc import Callable, Iterator, Sequence
from types import TracebackType
from typing import Any

from torch import Tensor, nn

from memlab.checkpointing.recompute import checkpoint
from memlab.checkpointing.schedules import Schedule, check_schedule


def run(
    part: int | Schedule,
    stages: Sequence[Any],
    x: Tensor,
    *args: Any,
    using: Callable[..., Any] = checkpoint,
    **kwargs: Any,
) -> Tensor:
    """Run one part of a schedule: a plain stage, or a segment inside a checkpoint.

    `args` and `kwargs` are passed to every stage.
    """
    if isinstance(part, int):
        return stages[part](x, *args, **kwargs)
    return using(run_segment, part, stages, x, *args, using=using, **kwargs)


def run_segment(
    parts: Schedule,
    stages: Sequence[Any],
    x: Tensor,
    *args: Any,
    using: Callable[..., Any] = checkpoint,
    **kwargs: Any,
) -> Tensor:
    """Run the parts of a segment in order."""
    for part in parts:
        x = run(part, stages, x, *args, using=using, **kwargs)
    return x


class SchedulePart:
    """One part of the schedule, in the place of blocks in the model's loop."""

    def __init__(self, part: int | Schedule, blocks: Any, using: Callable[..., Any]) -> None:
        self.part, self.blocks, self.using = part, blocks, using

    def __call__(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        return run(self.part, self.blocks, x, *args, using=self.using, **kwargs)


class ScheduledBlocks:
    """`model.blocks` under a schedule: iteration yields the schedule's parts; an index, the length
    and attributes refer to the blocks."""

    def __init__(
        self, blocks: nn.ModuleList, schedule: Schedule, using: Callable[..., Any]
    ) -> None:
        self.blocks, self.schedule, self.using = blocks, schedule, using

    def __iter__(self) -> Iterator[SchedulePart]:
        return (SchedulePart(part, self.blocks, self.using) for part in self.schedule)

    def __getitem__(self, index: int | slice) -> nn.Module:
        return self.blocks[index]

    def __len__(self) -> int:
        return len(self.blocks)


class Handle:
    """Removes the schedule: `handle.remove()`, or the end of `with`."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model

    def remove(self) -> None:
        """Restore the plain model. A pending backward pass still follows the schedule."""
        self.model.__dict__.pop("blocks", None)

    def __enter__(self) -> "Handle":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.remove()


def checkpoint_blocks(
    model: nn.Module, schedule: Schedule, *, using: Callable[..., Any] = checkpoint
) -> Handle:
    """Run `model.blocks` by the schedule.

    Args:
        model: has `blocks`, an nn.ModuleList, and loops over it. Each block takes (x, *args) and
            returns the next x.
        using: runs a segment: `checkpoint`, a `Checkpoint` with other settings, or
            `selective(...)`.
    """
    blocks = model._modules.get("blocks")
    if not isinstance(blocks, nn.ModuleList):
        found = "none" if blocks is None else f"a {type(blocks).__name__}"
        raise TypeError(
            f"wanted a model with `blocks`, an nn.ModuleList; {type(model).__name__} has {found}"
        )
    if "blocks" in model.__dict__:
        raise ValueError(
            f"the model already runs by the schedule {model.__dict__['blocks'].schedule}; call "
            f"remove() on its handle first"
        )
    check_schedule(schedule, len(blocks))
    # Python finds `blocks` in __dict__ before the submodule, which stays registered.
    model.__dict__["blocks"] = ScheduledBlocks(blocks, schedule, using)
    return Handle(model)
