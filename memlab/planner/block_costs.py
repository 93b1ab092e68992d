"""The costs of each block of a model, measured, for the optimal checkpointing schedule.

    chain = chain_costs(model, tokens, targets)            # four steps; free on fake tensors
    schedule = optimal_schedule(chain, budget_bytes)
    predicted_peak_bytes(schedule, chain) == metered_peak_bytes(model, tokens, targets, schedule)

A step runs embedding, block 0 … block L-1, norm and loss, and then backward in reverse. A mark at
each border cuts the meter's trace into sections. One step keeps all activations, which shows the
bytes that each block saves. Another step checkpoints each block on its own, which shows the cost of
running a block without saving and of recomputing it. The costs of every other schedule follow.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from memlab.checkpointing.costs import Chain, Costs
from memlab.checkpointing.execution import checkpoint_blocks
from memlab.checkpointing.operations import Operations
from memlab.checkpointing.schedules import Schedule, plain_schedule, uniform_schedule
from memlab.metering import measure
from memlab.trace import Event, Trace

MARK = (1,)  # the shape of a uint8 tensor, freed at once, that cuts the trace


@dataclass
class TraceSection:
    """Memory between two borders of a step."""

    before: int  # live bytes at the start
    peak: int
    after: int
    operations: int = 0


def chain_costs(model: Any, tokens: Tensor, targets: Tensor) -> Chain:
    """Measure the costs of `model.blocks` and of the parts before and after them.

    `model(tokens, targets)` returns the loss. Operations count matmuls and attention, two
    per multiply-add. There is no optimizer here, so add its state to `held_bytes`. The meter does
    not see random number states, so if the blocks draw random numbers, add 5,056 `call_bytes`.
    (A nested segment keeps its own state from its first run on, which is not counted.)

    A block is assumed to keep its input. For a block that does not, the prediction is too high by
    that input for each plain block. (In bfloat16, RMSNorm keeps a float32 copy instead.)
    """
    blocks = len(model.blocks)
    keeping = _sections(model, tokens, targets, plain_schedule(blocks))
    dropping = _sections(model, tokens, targets, uniform_schedule(blocks, every=1))
    rows = list(zip(*_split_passes(keeping), *_split_passes(dropping), strict=True))
    last = _end_costs(*rows[-1][2:])
    gradient_bytes = last.gradient_bytes  # gradients that exist when backward reaches a block
    stages: list[Costs] = []
    for sections, (next_forward, *_) in reversed(list(pairwise(rows[1:]))):
        stages.insert(0, _block_costs(*sections, under=next_forward.before + gradient_bytes))
        gradient_bytes += stages[0].gradient_bytes
    first = _end_costs(*rows[0][2:])
    return Chain(tuple(stages), first, last, held_bytes=keeping[0].before)


def metered_peak_bytes(
    model: nn.Module, tokens: Tensor, targets: Tensor, schedule: Schedule
) -> int:
    """Measure the peak of a forward and backward pass with the schedule."""
    _require_no_gradients(model)
    with checkpoint_blocks(model, schedule):
        trace = measure(lambda: model(tokens, targets).backward(), model=model)
    model.zero_grad()
    return trace.peak_bytes


def _block_costs(
    forward: TraceSection,
    backward: TraceSection,
    drop: TraceSection,
    rerun: TraceSection,
    *,
    under: int,
) -> Costs:
    """Combine a block's sections: forward and backward with saving, forward without, and rerun.

    When backward reaches the block, the gradient of its output has replaced the output. `under`
    is the live bytes below it: the saved tensors of earlier blocks and the existing gradients.
    """
    saved_bytes, output_bytes = forward.after - forward.before, drop.after - drop.before
    return Costs(
        forward=forward.operations,
        backward=backward.operations,
        output_bytes=output_bytes,
        saved_bytes=saved_bytes,
        forward_temporaries=forward.peak - forward.after,
        dropping_temporaries=drop.peak - drop.after,
        backward_temporaries=max(0, backward.peak - under),
        rerun_temporaries=rerun.peak - rerun.before + output_bytes - saved_bytes,
        gradient_bytes=max(0, rerun.after - rerun.before + output_bytes),
        tail=forward.operations + backward.operations - rerun.operations,
    )


def _end_costs(forward: TraceSection, backward: TraceSection) -> Costs:
    """Return the costs of the first or last part, which is always kept, its output included."""
    saved_bytes = forward.after - forward.before
    forward_temporaries = forward.peak - forward.after
    backward_temporaries = backward.peak - backward.before
    return Costs(
        forward=forward.operations,
        backward=backward.operations,
        output_bytes=0,
        saved_bytes=saved_bytes,
        forward_temporaries=forward_temporaries,
        backward_temporaries=backward_temporaries,
        rerun_temporaries=max(forward_temporaries, backward_temporaries),
        gradient_bytes=max(0, backward.after - backward.before + saved_bytes),
    )


# ------------------------------------------------------------------ a step in sections


def _sections(
    model: nn.Module, tokens: Tensor, targets: Tensor, schedule: Schedule
) -> list[TraceSection]:
    """Return a step's sections: the first part, each block and the gaps between them, the last
    part; then the same backward."""
    _require_no_gradients(model)

    def step(mark: Callable[[], Any]) -> None:
        with _marked_borders(model, mark) as borders:
            loss = model(tokens, targets)
        mark()
        loss.backward()
        for _ in range(borders.without_gradient + 1):  # borders without a gradient, and the end
            mark()

    with checkpoint_blocks(model, schedule):
        make_mark = partial(torch.empty, MARK, dtype=torch.uint8, device=tokens.device)
        trace = measure(partial(step, make_mark), model=model)
        model.zero_grad()
        with Operations() as counter:
            step(counter.begin_section)
        model.zero_grad()
    sections = _cut(trace)
    for section, operations in zip(sections, counter.sections, strict=True):
        section.operations = operations
    return sections[:-1]


@contextmanager
def _marked_borders(model: nn.Module, mark: Callable[[], Any]) -> "Iterator[_MarkedBlocks]":
    """Call `mark` at each border of the model's blocks, forward and backward."""
    scheduled = model.__dict__["blocks"]
    model.__dict__["blocks"] = marked = _MarkedBlocks(scheduled, mark)
    try:
        yield marked
    finally:
        model.__dict__["blocks"] = scheduled


class _MarkedBlocks:
    """The parts of a schedule, with marks around each part's forward and backward pass."""

    def __init__(self, parts: Any, mark: Callable[[], Any]) -> None:
        self.parts, self.mark = parts, mark
        self.without_gradient = 0

    def __iter__(self) -> Iterator[Callable[..., Tensor]]:
        yield from (partial(self._run, part, is_first=n == 0) for n, part in enumerate(self.parts))
        self.mark()

    def _run(self, part: Callable[..., Tensor], x: Tensor, *args: Any, is_first: bool) -> Tensor:
        self.mark()
        if is_first:
            self._mark_in_backward(x)
        y = part(x, *args)
        self._mark_in_backward(y)
        self.mark()  # while the input is alive, whether or not the block keeps it
        return y

    def _mark_in_backward(self, x: Tensor) -> None:
        if x.requires_grad:
            x.register_hook(self._mark_gradient)
        else:
            self.without_gradient += 1

    def _mark_gradient(self, gradient: Tensor) -> None:
        self.mark()


def _cut(trace: Trace) -> list[TraceSection]:
    """Cut a trace into sections at its marks."""
    alive = sum(event.bytes for event in trace.events if event.phase == "before")
    sections = [TraceSection(alive, alive, alive)]
    for event in trace.events:
        if _is_mark(event):
            if event.bytes > 0:
                sections.append(TraceSection(alive, alive, alive))
        elif event.phase != "before":
            alive += event.bytes
            sections[-1].peak = max(sections[-1].peak, alive)
            sections[-1].after = alive
    return sections


def _is_mark(event: Event) -> bool:
    return event.shape == MARK and event.dtype == "uint8"


def _split_passes(
    sections: list[TraceSection],
) -> tuple[list[TraceSection], list[TraceSection]]:
    """Return the forward and backward sections in model order, without the gaps between blocks."""
    stages = (len(sections) + 2) // 3  # n blocks: 2n + 2 forward sections, n + 2 backward
    forward = sections[: 2 * stages - 2]
    return [forward[0], *forward[1:-1:2], forward[-1]], sections[2 * stages - 2 :][::-1]


def _require_no_gradients(model: nn.Module) -> None:
    if any(parameter.grad is not None for parameter in model.parameters()):
        raise ValueError(
            "the model has gradients, which change the bytes of a step; call model.zero_grad() "
            "first"
        )
