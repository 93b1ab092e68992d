"""Steps of a loop in a history, and the memory that stays from step to step.

A loop shows in the stacks: at some depth the same function runs the same lines again and again. The
first line that repeats begins a step. Without stacks, a step is the period of the sizes: the
smallest distance at which the sequence of allocated bytes repeats itself.
"""

from bisect import bisect_left, bisect_right
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby, pairwise
from operator import eq
from typing import NamedTuple

from memlab.explain.frames import (
    Frame,
    Stack,
    in_backward,
    in_forward,
    in_optimizer,
    user_frames,
)
from memlab.explain.histories import Block, History

MODULE_FUNCTIONS = {"forward", "__init__", "__call__", "reset_parameters"}
MOST_DEPTH = 40
AGREEMENT = 0.9  # share of sizes that must repeat at the period
WARM_UP = 1  # steps whose survivors are weights, gradients and optimizer state
LEAST_STEPS = 3  # steps that must each leave memory behind before it counts as growth


@dataclass(frozen=True)
class Loop:
    """A loop: the positions where its steps begin, and its last position."""

    frame: Frame | None  # of the line that begins a step; None: found by sizes
    starts: tuple[int, ...]
    end: int
    depth: int  # of the loop's frame among the user's frames

    @property
    def steps(self) -> list[tuple[int, int]]:
        """(first position, first position of the next step) of each step."""
        return list(pairwise((*self.starts, self.end + 1)))

    def step_at(self, position: int) -> int:
        """Return the number of the step at a position."""
        return bisect_right(self.starts, position) - 1


@dataclass(frozen=True)
class Leak:
    """Blocks of one line that outlive the steps that made them."""

    frame: Frame | None
    blocks: tuple[Block, ...]
    steps: int  # distinct steps that left a block

    @property
    def bytes(self) -> int:
        return sum(block.bytes for block in self.blocks)


def loops_of(history: History) -> list[Loop]:
    """Return the loops of the script, outer ones before inner ones."""
    if not history.has_frames:
        return _loops_by_size(history)
    stacks = [(block.born, block.stack) for block in history.blocks if block.born]
    if history.refusal:
        stacks.append((history.refusal.position, history.refusal.stack))
    made = [
        Made(position, user_frames(stack), in_forward(stack))
        for position, stack in sorted(stacks, key=lambda item: item[0])
        if user_frames(stack) and not in_optimizer(stack)  # its loop is over parameters
    ]
    return list(_loops_within(made, 0, history.length))


class Made(NamedTuple):
    """An allocation by its position, its user's frames, and whether a module made it."""

    position: int
    frames: Stack
    in_module: bool


def _loops_within(made: Sequence[Made], depth: int, end: int) -> Iterable[Loop]:
    """Yield the loops at a depth of the user's stacks, then the loops of functions called there."""
    if depth >= MOST_DEPTH:
        return
    by_function = groupby(made, key=lambda item: _function(item.frames, depth))
    groups = [(name, list(items)) for name, items in by_function]
    for number, (name, items) in enumerate(groups):
        if name is None or name[1].rpartition(".")[2] in MODULE_FUNCTIONS:
            continue
        last = groups[number + 1][1][0].position - 1 if number + 1 < len(groups) else end
        runs = [(line, list(run)) for line, run in groupby(items, lambda i: i.frames[depth].line)]
        yield from _loop(runs, depth, last)
        for index, (_, run) in enumerate(runs):
            until = runs[index + 1][1][0].position - 1 if index + 1 < len(runs) else last
            yield from _loop_on_one_line(run, depth, until)
            yield from _loops_within(run, depth + 1, until)


def _function(stack: Stack, depth: int) -> tuple[str, str] | None:
    return (stack[depth].filename, stack[depth].name) if depth < len(stack) else None


def _loop(runs: Sequence[tuple[int, list[Made]]], depth: int, end: int) -> Iterable[Loop]:
    """Yield a loop if lines repeat. Its steps begin at the first line that repeats most often."""
    visits: dict[int, list[int]] = defaultdict(list)
    for line, run in runs:
        visits[line].append(run[0].position)
    most = max(map(len, visits.values()), default=0)
    if most < 2:
        return
    often = [line for line, starts in visits.items() if len(starts) >= max(2, most - 1)]
    line = min(often, key=lambda line: visits[line][0])
    frames = next(run[0].frames for at, run in runs if at == line)
    yield Loop(frames[depth], tuple(visits[line]), end, depth)


def _loop_on_one_line(run: Sequence[Made], depth: int, end: int) -> Iterable[Loop]:
    """Yield a loop whose body is one line, such as `outputs.append(model(x.cuda()))`.

    A step begins where the line itself allocates again, after a module did.
    """
    own = [not item.in_module and len(item.frames) == depth + 1 for item in run]
    begins = [
        a.position
        for a, now, before in zip(run, own, [False, *own], strict=False)
        if now and not before
    ]
    if len(begins) >= 2:
        yield Loop(run[0].frames[depth], tuple(begins), end, depth)


def loop_by_phase(phases: Sequence[tuple[int, str]], end: int) -> Loop | None:
    """Return the loop that phases show, given (position, phase) of the allocations in order.

    A step begins with the first forward after backward or the optimizer. This finds the steps of a
    library's training loop, and of memlab's traces, whose stacks have one line.
    """
    trained = ("backward", "optimizer")
    starts = [
        at
        for (_, before), (at, now) in pairwise([(0, "optimizer"), *phases])
        if before in trained and now == "forward"
    ]
    return Loop(None, tuple(starts), end, 0) if len(starts) >= 2 else None


def _loops_by_size(history: History) -> list[Loop]:
    """Return the loop that the sizes show, if they repeat."""
    made = sorted((b for b in history.blocks if b.born), key=lambda b: b.born)
    period = _period([b.bytes for b in made])
    if period is None:
        return []
    first = len(made) % period
    starts = tuple(made[index].born for index in range(first, len(made), period))
    return [Loop(None, starts, history.length, 0)]


def _period(sizes: Sequence[int]) -> int | None:
    """Return the smallest distance at which the last two thirds of the sizes repeat."""
    tail = sizes[len(sizes) // 3 :]
    if len(tail) < 8:
        return None
    counts = Counter(tail)
    rare = min(counts, key=lambda size: (abs(counts[size] - 4), -size))
    *places, last = (place for place, size in enumerate(tail) if size == rare)
    for distance in (last - place for place in reversed(places)):
        compared = len(tail) - distance
        if not 4 <= distance <= compared:
            continue
        if sum(map(eq, tail[distance:], tail)) >= AGREEMENT * compared:
            return distance
    return None


# ------------------------------------------------------------------ roles of loops


def training_loop(history: History, loops: Sequence[Loop]) -> Loop | None:
    """Return the innermost loop whose steps run backward or an optimizer."""
    trained = sorted(b.born for b in history.blocks if b.born and _trains(b, history))
    found = [loop for loop in loops if _any_within(trained, loop.starts[0], loop.end)]
    return max(found, key=lambda loop: (loop.depth, len(loop.starts)), default=None)


def current_loop(loops: Sequence[Loop], position: int) -> Loop | None:
    """Return the innermost loop that runs at a position."""
    found = [loop for loop in loops if loop.starts[0] <= position <= loop.end]
    return max(found, key=lambda loop: (loop.depth, loop.starts[0]), default=None)


def _trains(block: Block, history: History) -> bool:
    return is_backward(block, history) or in_optimizer(block.stack)


def is_backward(block: Block, history: History) -> bool:
    """Whether backward made the block: by its frames, or by their absence in a file with frames."""
    if not block.born:
        return False
    if block.stated:
        return block.stated in ("backward_temporaries", "gradients")
    return in_backward(block.stack) or (history.has_frames and not block.stack)


def _any_within(positions: Sequence[int], first: int, last: int) -> bool:
    index = bisect_left(positions, first)
    return index < len(positions) and positions[index] <= last


# ------------------------------------------------------------------ growth


def growth_per_step(history: History, loop: Loop, until: int) -> list[int]:
    """Return the change of the bytes alive from the start of each step to the next one's."""
    levels = [history.allocated[start - 1] for start in loop.starts if start <= until]
    return [after - before for before, after in pairwise(levels)]


def leaks_of(history: History, loop: Loop, until: int) -> list[Leak]:
    """Return the lines whose blocks outlive their step and the next, the most bytes first.

    Blocks of the first step do not count, nor lines that leave blocks in fewer than three steps.
    What such a line left before the record began counts too, as earlier steps of as many bytes:
    a short record may hold only two steps, and the first of them is then no warm-up.
    """
    starts = [start for start in loop.starts if start <= until]
    by_line: dict[Frame | None, list[tuple[int, Block]]] = defaultdict(list)
    older: dict[Frame | None, list[Block]] = defaultdict(list)
    for block in history.blocks:
        step = bisect_right(starts, block.born) - 1
        if not block.alive(until) or step + 2 > len(starts):
            continue
        if block.born and step >= 0:
            by_line[line_in(block.stack, loop.depth)].append((step, block))
        elif not block.born and in_forward(block.stack):
            older[line_in(block.stack, loop.depth)].append(block)
    found = []
    for frame, blocks in by_line.items():
        warm_up = 0 if older[frame] else WARM_UP
        made = [(step, block) for step, block in blocks if step >= warm_up]
        steps = len({step for step, _ in made})
        if steps:
            per_step = sum(block.bytes for _, block in made) / steps
            steps += int(sum(block.bytes for block in older[frame]) / per_step)
        if steps >= LEAST_STEPS:
            left = (*(block for _, block in made), *older[frame])
            found.append(Leak(frame, left, steps))
    return sorted(found, key=lambda leak: -leak.bytes)


def line_in(stack: Stack, depth: int) -> Frame | None:
    """Return the user's frame at a depth, or the innermost if the stack is shorter."""
    frames = user_frames(stack)
    return frames[min(depth, len(frames) - 1)] if frames else None
