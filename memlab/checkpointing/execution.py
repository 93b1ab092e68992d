"""A schedule, run: the blocks of a model in segments that are checkpointed, from outside.

    handle = checkpoint_blocks(model, ((0, 1), (2, 3)))
    loss = model(tokens, targets)                          # keeps two inputs, not four blocks
    loss.backward()                                        # runs two blocks again, then two more
    handle.remove()                                        # the plain model

    checkpoint_blocks(model, schedule, using=selective(MATMULS))   # segments that keep something

The model loops over `self.blocks` and never knows: while a schedule is on, that loop meets one
function for each part of the schedule instead of the blocks. Parameters, their names, the state
dict and each block's hooks are untouched.
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
    """Part of a schedule: a stage as it is, or a segment, whose parts run inside a checkpoint.

    `args` are handed to every stage beside `x`.
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
    """One part after the other: what runs again when backward arrives."""
    for part in parts:
        x = run(part, stages, x, *args, using=using, **kwargs)
    return x


class Part:
    """What a model's loop meets in the place of its blocks: one part of the schedule."""

    def __init__(
        self, part: int | Schedule, blocks: nn.ModuleList, using: Callable[..., Any]
    ) -> None:
        self.part, self.blocks, self.using = part, blocks, using

    def __call__(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        return run(self.part, self.blocks, x, *args, using=self.using, **kwargs)


class ScheduledBlocks:
    """`model.blocks` under a schedule: a loop over it meets the schedule's parts, and anything
    else (an index, a length, an attribute) the blocks themselves."""

    def __init__(
        self, blocks: nn.ModuleList, schedule: Schedule, using: Callable[..., Any]
    ) -> None:
        self.blocks, self.schedule, self.using = blocks, schedule, using

    def __iter__(self) -> Iterator[Part]:
        return (Part(part, self.blocks, self.using) for part in self.schedule)

    def __getitem__(self, index: int | slice) -> nn.Module:
        return self.blocks[index]

    def __len__(self) -> int:
        return len(self.blocks)


class Handle:
    """Takes the schedule off again: `handle.remove()`, or the end of `with`."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model

    def remove(self) -> None:
        """The plain model again; a backward pass that is still to come runs by the schedule."""
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
    """Run `model.blocks`, an nn.ModuleList over which the model loops, by the schedule.

    Every block takes (x, *args) and returns the next x. A segment is run by `using`: `checkpoint`,
    a `Checkpoint` with settings of its own, or `selective(...)`.
    """
    blocks = model._modules.get("blocks")
    if not isinstance(blocks, nn.ModuleList):
        found = "none" if blocks is None else f"a {type(blocks).__name__}"
        raise TypeError(
            f"wanted a model with `blocks`, an nn.ModuleList; {type(model).__name__} has {found}"
        )
    if "blocks" in model.__dict__:
        raise ValueError(
            f"the model runs by the schedule {model.__dict__['blocks'].schedule} already; call "
            f"remove() on the handle of that one first"
        )
    check_schedule(schedule, len(blocks))
    # An attribute in __dict__ is found before a submodule of that name, which stays where it is.
    model.__dict__["blocks"] = ScheduledBlocks(blocks, schedule, using)
    return Handle(model)
