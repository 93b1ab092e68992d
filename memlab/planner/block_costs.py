"""A model's chain: what each of its blocks takes, measured, and the plan held against the meter.

    chain = chain_costs(model, tokens, targets)            # four steps; on fake tensors, for free
    schedule = optimal_schedule(chain, budget_bytes)
    predicted_peak_bytes(schedule, chain) == metered_peak_bytes(model, tokens, targets, schedule)

A step goes along the chain and back: embedding, block 0 … block L-1, norm and loss; then the same
from the right. A mark at each border cuts the meter's trace into sections. One step keeps
everything, and shows what each block saves. In another each block is a segment of its own, and
shows what it takes to run and keep nothing, and to run again. Every other schedule follows.
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

MARK = (1,)  # the shape of a tensor of bytes, born and dead at once, that cuts a trace


@dataclass
class Section:
    """What happens between two borders of a step."""

    before: int  # bytes alive at its begin
    peak: int
    after: int
    operations: int = 0


def chain_costs(model: nn.Module, tokens: Tensor, targets: Tensor) -> Chain:
    """The costs of `model.blocks`, of what stands before and behind them, and of all that is there.

    `model(tokens, targets)` is the loss. Operations are those of matrix products and attention,
    two for each product that is added. There is no optimizer here: add its state to `held_bytes`.
    Nor are the states of random numbers, which no meter sees: if the blocks draw numbers, give
    5,056 `call_bytes` (a segment within a segment keeps its own from the first run on, which is
    not counted).

    A block is taken to keep its input. One that does not (in bfloat16, RMSNorm keeps a float32
    copy instead) lets the prediction be too high, by that input for each plain block.
    """
    blocks = len(model.blocks)
    keeping = _sections(model, tokens, targets, plain_schedule(blocks))
    dropping = _sections(model, tokens, targets, uniform_schedule(blocks, every=1))
    rows = list(zip(*_there_and_back(keeping), *_there_and_back(dropping), strict=True))
    last = _end(*rows[-1][2:])
    gradient_bytes = last.gradient_bytes  # those there when backward comes to a stage
    stages: list[Costs] = []
    for sections, (next_there, *_) in reversed(list(pairwise(rows[1:]))):
        stages.insert(0, _stage(*sections, under=next_there.before + gradient_bytes))
        gradient_bytes += stages[0].gradient_bytes
    first = _end(*rows[0][2:])
    return Chain(tuple(stages), first, last, held_bytes=keeping[0].before)


def metered_peak_bytes(
    model: nn.Module, tokens: Tensor, targets: Tensor, schedule: Schedule
) -> int:
    """The peak of a forward and a backward pass by the schedule, as the meter sees it."""
    _require_no_gradients(model)
    with checkpoint_blocks(model, schedule):
        trace = measure(lambda: model(tokens, targets).backward(), model=model)
    model.zero_grad()
    return trace.peak_bytes


def _stage(there: Section, back: Section, drop: Section, rerun: Section, *, under: int) -> Costs:
    """A block: kept, there and back; and dropped on its way there, run again on its way back.

    When backward comes to it, the gradient of its output has taken the output's place. `under` it
    is all that is kept up to here, and the gradients that are there.
    """
    saved_bytes, output_bytes = there.after - there.before, drop.after - drop.before
    return Costs(
        forward=there.operations,
        backward=back.operations,
        output_bytes=output_bytes,
        saved_bytes=saved_bytes,
        forward_temporaries=there.peak - there.after,
        dropping_temporaries=drop.peak - drop.after,
        backward_temporaries=max(0, back.peak - under),
        rerun_temporaries=rerun.peak - rerun.before + output_bytes - saved_bytes,
        gradient_bytes=max(0, rerun.after - rerun.before + output_bytes),
        tail=there.operations + back.operations - rerun.operations,
    )


def _end(there: Section, back: Section) -> Costs:
    """What stands at an end of the chain, always kept; its output counts for what it saves."""
    saved_bytes = there.after - there.before
    forward_temporaries, backward_temporaries = there.peak - there.after, back.peak - back.before
    return Costs(
        forward=there.operations,
        backward=back.operations,
        output_bytes=0,
        saved_bytes=saved_bytes,
        forward_temporaries=forward_temporaries,
        backward_temporaries=backward_temporaries,
        rerun_temporaries=max(forward_temporaries, backward_temporaries),
        gradient_bytes=max(0, back.after - back.before + saved_bytes),
    )


# ------------------------------------------------------------------ a step in sections


def _sections(
    model: nn.Module, tokens: Tensor, targets: Tensor, schedule: Schedule
) -> list[Section]:
    """First and each block, with a section between them, and last; then back, from the last."""
    _require_no_gradients(model)

    def step(mark: Callable[[], Any]) -> None:
        with _borders(model, mark) as borders:
            loss = model(tokens, targets)
        mark()
        loss.backward()
        for _ in range(borders.without_gradient + 1):  # what backward did not come to, and the end
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
def _borders(model: nn.Module, mark: Callable[[], Any]) -> "Iterator[_Bordered]":
    """Within: the model's loop calls `mark` at each border of its blocks, there and back."""
    scheduled = model.__dict__["blocks"]
    model.__dict__["blocks"] = bordered = _Bordered(scheduled, mark)
    try:
        yield bordered
    finally:
        model.__dict__["blocks"] = scheduled


class _Bordered:
    """The parts of a schedule; each passes a border, and its gradient passes it on its way back."""

    def __init__(self, parts: Any, mark: Callable[[], Any]) -> None:
        self.parts, self.mark = parts, mark
        self.without_gradient = 0

    def __iter__(self) -> Iterator[Callable[..., Tensor]]:
        yield from (partial(self._run, part, is_first=n == 0) for n, part in enumerate(self.parts))
        self.mark()

    def _run(self, part: Callable[..., Tensor], x: Tensor, *args: Any, is_first: bool) -> Tensor:
        self.mark()
        if is_first:
            self._mark_on_the_way_back(x)
        y = part(x, *args)
        self._mark_on_the_way_back(y)
        self.mark()  # while the input is here, whether the block keeps it or not
        return y

    def _mark_on_the_way_back(self, x: Tensor) -> None:
        if x.requires_grad:
            x.register_hook(self._pass)
        else:
            self.without_gradient += 1

    def _pass(self, gradient: Tensor) -> None:
        self.mark()


def _cut(trace: Trace) -> list[Section]:
    """The sections of a trace that marks cut."""
    alive = sum(event.bytes for event in trace.events if event.phase == "before")
    sections = [Section(alive, alive, alive)]
    for event in trace.events:
        if _is_mark(event):
            if event.bytes > 0:
                sections.append(Section(alive, alive, alive))
        elif event.phase != "before":
            alive += event.bytes
            sections[-1].peak = max(sections[-1].peak, alive)
            sections[-1].after = alive
    return sections


def _is_mark(event: Event) -> bool:
    return event.shape == MARK and event.dtype == "uint8"


def _there_and_back(sections: list[Section]) -> tuple[list[Section], list[Section]]:
    """Both from left to right, without what lies between two blocks on the way there."""
    stages = (len(sections) + 2) // 3  # n blocks have 2n + 2 sections on the way there, n + 2 back
    there = sections[: 2 * stages - 2]
    return [there[0], *there[1:-1:2], there[-1]], sections[2 * stages - 2 :][::-1]


def _require_no_gradients(model: nn.Module) -> None:
    if any(parameter.grad is not None for parameter in model.parameters()):
        raise ValueError(
            "the model has gradients, and a step that adds to them takes other bytes than one that "
            "makes them; call model.zero_grad() first"
        )
