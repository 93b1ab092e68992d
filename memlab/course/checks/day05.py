"""Day 5: gradient checkpointing."""

import gc
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cache, partial
from itertools import accumulate, count
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import BackwardCFunction
from torch.autograd.graph import saved_tensors_hooks

from memlab.checkpointing.execution import run
from memlab.checkpointing.schedules import Schedule, check_schedule
from memlab.course.bill import SETTING
from memlab.course.exercises import (
    Bill,
    Day,
    Wrong,
    equal,
    first_line,
    require,
)
from memlab.course.properties import (
    elements,
    furthest,
    gradients,
    is_tensor,
    new_bytes,
    same_gradients,
    unchanged,
)
from memlab.course.solutions import checked, solution
from memlab.metering import measure
from memlab.reference.checkpointing import forget
from memlab.trace import Trace
from memlab.train import combined, dry_trace

Checkpointing = Callable[..., Tensor]  # called as checkpointing(fn, *inputs)

# ------------------------------------------------------------------ one pass through a chain

ROWS, WIDTH = 8, 16
BLOCKS = 4
OUTPUT_BYTES = 4 * ROWS * WIDTH


class _ResidualMLP(nn.Module):
    """Records each run, and whether the run made a graph."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        self.dropout = dropout
        self.grad_modes: list[bool] = []  # one per run

    def forward(self, x: Tensor, rows: Tensor | None = None) -> Tensor:
        self.grad_modes.append(torch.is_grad_enabled())
        hidden = F.gelu(self.up(x if rows is None else x[rows]))
        hidden = F.dropout(hidden, self.dropout, self.training)
        return x + self.down(hidden)


class _MaskedBlock(nn.Module):
    """Takes four inputs, and saves a bool mask and a scalar too."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, WIDTH)

    def forward(self, rows: Tensor, shift: Tensor, x: Tensor, scale: Tensor) -> Tensor:
        hidden = self.up(x[rows]) + shift
        return torch.where(hidden > 0, hidden * scale, hidden) * hidden.mean().exp()


class _PassResult(NamedTuple):
    gradients: dict[str, Tensor | None]  # and the output, as in `properties.gradients`
    runs: list[int]  # per block
    drawn_after: Tensor  # the next random numbers


def _chain(blocks: int, dropout: float = 0.0, requires_grad: bool = True) -> tuple[Any, Tensor]:
    torch.manual_seed(0)
    chain = nn.ModuleList(_ResidualMLP(dropout) for _ in range(blocks))
    return chain, torch.randn(ROWS, WIDTH, requires_grad=requires_grad)


def _forward(
    answer: Checkpointing, chain: Any, x: Tensor, *others: Tensor, case: str = ""
) -> Tensor:
    for block in chain:
        x = answer(_as_function(block) if block.dropout else block, x, *others)
        is_tensor(case, x)
    return x


def _as_function(block: nn.Module) -> Callable[..., Tensor]:
    """fn may be any callable, so a check must not always pass a module."""
    return lambda *inputs: block(*inputs)


def _passed(
    answer: Checkpointing,
    *others: Tensor,
    case: str = "",
    blocks: int = 1,
    dropout: float = 0.0,
    requires_grad: bool = True,
    backwards: int = 1,
) -> _PassResult:
    """One forward pass, and `backwards` backward passes, each with fresh gradients."""
    chain, x = _chain(blocks, dropout, requires_grad)
    with _hooks_recorded() as hooks:
        output = _forward(answer, chain, x, *others, case=case)
        require(
            output.requires_grad,
            f"{case} gave a tensor without a graph (requires_grad is False), so no gradient flows.",
        )
        loss = output.square().sum()
        for n in range(backwards):
            x.grad = None
            chain.zero_grad()
            _backward(loss, chain, case, hooks, retain_graph=n < backwards - 1)
    result = output.detach().requires_grad_(output.requires_grad)
    found = {"output 0": result} | ({"x": x.grad} if requires_grad else {})
    found |= {name: weight.grad for name, weight in chain.named_parameters()}
    return _PassResult(found, [len(block.grad_modes) for block in chain], torch.rand(4))


@dataclass
class _HookRecord:
    makers: list[str] = field(default_factory=list)  # modules that created hooks
    entered: int = 0
    wrong_shapes: list[str] = field(default_factory=list)


@contextmanager
def _hooks_recorded() -> Iterator[_HookRecord]:
    """Records who makes and enters `saved_tensors_hooks`, and unpacked tensors of a wrong shape."""
    record = _HookRecord()
    init, enter = saved_tensors_hooks.__init__, saved_tensors_hooks.__enter__

    def recording_init(self: Any, pack_hook: Any, unpack_hook: Any) -> None:
        record.makers.append(sys._getframe(1).f_globals["__name__"])
        places = count(1)

        def pack(tensor: Tensor) -> tuple[int, torch.Size, Any]:
            return next(places), tensor.shape, pack_hook(tensor)

        def unpack(packed: tuple[int, torch.Size, Any]) -> Tensor:
            place, shape, own = packed
            tensor = unpack_hook(own)
            if isinstance(tensor, Tensor) and tensor.shape != shape:
                record.wrong_shapes.append(
                    f"the hook returned another slot's tensor: saved tensor {place} of fn had "
                    f"shape {tuple(shape)}, and came back with shape {tuple(tensor.shape)}"
                )
            return tensor

        init(self, pack, unpack)

    def recording_enter(self: Any) -> None:
        record.entered += 1
        enter(self)

    with (
        patch.object(saved_tensors_hooks, "__init__", recording_init),
        patch.object(saved_tensors_hooks, "__enter__", recording_enter),
    ):
        yield record


# Torch's words for a second run without a graph, and for an empty slot.
_EXPLAINED = {
    "does not require grad": "the tensor that backward starts from has no graph",
    "unpack_hook": "the unpack hook returned no tensor",
}


def _in_words(error: Exception) -> str:
    known = (why for words, why in _EXPLAINED.items() if words in str(error))
    return next(known, f"{type(error).__name__}: {first_line(error)}")


def _backward(loss: Tensor, chain: Any, case: str, hooks: _HookRecord, retain_graph: bool) -> None:
    """loss.backward, with torch's errors explained."""
    hooks.entered = 0
    try:
        loss.backward(retain_graph=retain_graph)
    except (RuntimeError, TypeError, LookupError) as error:
        reruns = [mode for block in chain for mode in block.grad_modes[1:]]
        if reruns and not reruns[0]:
            raise Wrong(
                f"{case}: backward ran fn again with gradients disabled, so the second run saved "
                f"nothing."
            ) from None
        if hooks.wrong_shapes:
            raise Wrong(f"{case}: {hooks.wrong_shapes[0]}.") from None
        if not any(words in str(error) for words in _EXPLAINED):
            raise
        under = f"{'under' if hooks.entered else 'without'} saved-tensor hooks"
        how = f"ran fn again with gradients enabled, {under}" if reruns else "did not run fn again"
        raise Wrong(f"{case}: backward {how}, and {_in_words(error)}.") from None


def _plain(fn: Callable[..., Tensor], *inputs: Tensor) -> Tensor:
    return fn(*inputs)


# ------------------------------------------------------------------ values, bytes and counts


def _check_values(answer: Checkpointing, name: str) -> None:
    """The output, every gradient and the random numbers drawn later match the plain pass."""
    rows = torch.arange(ROWS).flip(0)
    cases: tuple[tuple[str, tuple[Tensor, ...], dict[str, Any]], ...] = (
        ("one block", (), {}),
        ("one block that also takes an integer tensor", (rows,), {}),
        (
            "2 blocks with dropout (both runs must draw the same)",
            (),
            {"blocks": 2, "dropout": 0.25},
        ),
    )
    for case, others, settings in cases:
        case = f"{name} of {case}"
        got = _passed(answer, *others, case=case, **settings)
        wanted = _passed(_plain, *others, **settings)
        same_gradients(case, got.gradients, wanted.gradients)
        require(
            torch.equal(got.drawn_after, wanted.drawn_after),
            f"{case}: after backward, torch draws other random numbers than after the plain pass.",
        )


def _check_several_inputs(answer: Checkpointing, name: str) -> None:
    """Some inputs require no gradient, a weight is frozen, and weights have gradients already."""
    for kind, as_fn in (("a module", lambda block: block), ("a function", _as_function)):
        case = f"{name} of {kind} fn(rows, shift, x, scale) (x and scale require a gradient)"
        found = (_of_several_inputs(case, way, as_fn) for way in (answer, _plain))
        same_gradients(case, *found)
    twice = (gradients(partial(_square, way), x=elements(ROWS, seed=4)) for way in (answer, _plain))
    same_gradients(f"{name}(torch.mul, x, x)", *twice)
    drawn = (gradients(partial(_noisy, way), x=elements(ROWS, seed=5)) for way in (answer, _plain))
    same_gradients(f"{name} of an fn that adds noise before it saves a tensor", *drawn)


def _square(way: Checkpointing, x: Tensor) -> Tensor:
    return way(torch.mul, x, x)


def _noisy(way: Checkpointing, x: Tensor) -> Tensor:
    torch.manual_seed(0)
    return way(lambda x: (x + torch.rand_like(x)).square(), x)


def _of_several_inputs(case: str, way: Checkpointing, as_fn: Any) -> dict[str, Tensor | None]:
    rows, shift = torch.arange(ROWS).flip(0), elements(WIDTH, seed=1)
    torch.manual_seed(0)
    block = _MaskedBlock()
    for n, weight in enumerate(block.parameters()):
        weight.grad = elements(*weight.shape, seed=n)
    block.up.bias.requires_grad_(False)

    def call(x: Tensor, scale: Tensor) -> Tensor:
        return way(as_fn(block), rows, shift, x.tanh(), scale.sigmoid())  # inputs are no leaves

    with unchanged(case, may_change={"gradients"}, block=block, rows=rows, shift=shift):
        found = _gradients_or_wrong(case, call)
    return found | {f"fn's {key}": weight.grad for key, weight in block.named_parameters()}


def _gradients_or_wrong(case: str, call: Callable[..., Tensor]) -> dict[str, Tensor | None]:
    x = elements(ROWS, WIDTH, seed=2)
    scale = elements(ROWS, 1, dtype=torch.float64, seed=3)
    try:
        return gradients(call, x=x, scale=scale)
    except RuntimeError as error:
        if "through the graph a second time" not in str(error):
            raise
        raise Wrong(
            f"{case}: the second run's backward continued into the graph before fn and freed it: "
            f"an input was not detached."
        ) from None


def _check_costs(answer: Checkpointing, name: str) -> str:
    held, runs = _held(answer)
    wanted = BLOCKS * OUTPUT_BYTES
    require(
        held <= wanted,
        f"{name} of {BLOCKS} blocks holds {held:,} bytes between forward and backward; wanted "
        f"{wanted:,}: {BLOCKS - 1} inputs (the caller has the first one) and the result. The "
        f"blocks ran {_times(runs)}, and autograd itself saved {len(_saved_by_autograd(answer)[1])}"
        f" tensors of a block.",
    )
    require(
        runs == [2] * BLOCKS,
        f"{name} ran the blocks {_times(runs)}; wanted twice each: once in forward, once in "
        f"backward.",
    )
    return (
        f"gradients match bit for bit, with dropout · {held:,} bytes held for {BLOCKS} blocks, "
        f"besides random states · each block ran twice"
    )


def _held(answer: Checkpointing) -> tuple[int, list[int]]:
    """Bytes held between forward and backward, and the runs of each block in both passes."""
    chain, x = _chain(BLOCKS)
    kept: list[Tensor] = []
    trace = measure(lambda: kept.append(_forward(answer, chain, x)), model=chain)
    kept.pop().sum().backward()
    return new_bytes(trace), [len(block.grad_modes) for block in chain]


def _check_masks_and_leaks(answer: Checkpointing, name: str) -> None:
    """No mask or scalar is held; without a result, or without a graph, nothing is."""
    block, x = _MaskedBlock(), torch.ones(ROWS, WIDTH, requires_grad=True)
    inputs = torch.arange(ROWS), torch.ones(WIDTH), x, torch.ones(ROWS, 1)
    kept: list[Tensor] = []
    held = new_bytes(measure(lambda: kept.append(answer(block, *inputs)), model=block))
    require(
        held <= OUTPUT_BYTES,
        f"{name} of a block that makes a mask holds {held:,} bytes between forward and backward; "
        f"wanted {OUTPUT_BYTES:,}, the result alone.",
    )
    summed = new_bytes(measure(lambda: kept.append(answer(block, *inputs).sum()), model=block))
    require(
        summed < OUTPUT_BYTES,
        f"{name} of a block holds {summed:,} bytes after its result was summed and deleted; wanted "
        f"the sum alone: save the inputs, not the result.",
    )
    left = new_bytes(measure(lambda: (answer(block, *inputs), gc.collect()), model=block))
    require(
        left == 0,
        f"{name} of a block leaves {left:,} bytes in memory after its result is deleted; wanted "
        f"none: a graph node still refers to the result.",
    )
    with torch.no_grad():
        has_graph = answer(block, *inputs).requires_grad
    require(
        not has_graph,
        f"{name} of a block under torch.no_grad() gave a tensor with a graph; wanted no graph, as "
        f"from fn itself.",
    )


def _check_peak(answer: Checkpointing, name: str, like: Checkpointing) -> None:
    peak, allowed = _peak(answer), _allowed_peak(like)
    require(
        peak <= allowed,
        f"{name} of {BLOCKS} blocks has a peak of {peak:,} bytes; wanted at most {allowed:,}: the "
        f"inputs, the activations of one block, and a few tensors of its output's size. You keep "
        f"tensors that no graph needs, or free them too late.",
    )


def _peak(answer: Checkpointing) -> int:
    """The peak of forward and backward, besides the weights and x."""
    chain, x = _chain(BLOCKS)
    trace = measure(lambda: _forward(answer, chain, x).sum().backward(), model=chain)
    return trace.peak_bytes - sum(e.bytes for e in trace.events if e.phase == "before")


@cache
def _allowed_peak(like: Checkpointing) -> int:
    return _peak(like) + 4 * OUTPUT_BYTES


def _of_one_block(answer: Checkpointing) -> Tensor:
    chain, x = _chain(1)
    return answer(chain[0], x)


def _saved_by_autograd(answer: Checkpointing) -> tuple[Tensor, list[int]]:
    """A block's input, and the addresses of the tensors that reach a hook around the answer."""
    chain, x = _chain(1)
    seen: list[int] = []

    def pack(tensor: Tensor) -> Tensor:
        seen.append(tensor.data_ptr())
        return tensor

    with saved_tensors_hooks(pack, lambda tensor: tensor):
        answer(chain[0], x)
    return x, seen


def _times(runs: list[int]) -> str:
    if len(set(runs)) > 1:
        return f"{', '.join(map(str, runs))} times"
    return "once each" if runs[0] == 1 else f"{runs[0]} times each"


# ------------------------------------------------------------------ 5.1: an autograd Function


def _check_function(answer: Checkpointing) -> str:
    _check_values(answer, "forget")
    evidence = _check_costs(answer, "forget")
    _check_is_a_function(answer)
    _check_saved(answer)
    _check_peak(answer, "forget", forget)
    _check_several_inputs(answer, "forget")
    _check_masks_and_leaks(answer, "forget")
    return evidence


def _check_is_a_function(answer: Checkpointing) -> None:
    node: Any = _of_one_block(answer).grad_fn
    name = type(node).__name__
    require(
        isinstance(node, BackwardCFunction),
        f"forget gave a tensor whose grad_fn is {name}; wanted the node of an autograd Function.",
    )
    home = node._forward_cls.__module__
    require(
        not home.startswith("torch."),
        f"forget gave a tensor whose grad_fn is {name}, from {home}; wanted your own Function.",
    )


def _check_saved(answer: Checkpointing) -> None:
    """Autograd saves the inputs, so that outer hooks see them."""
    x, seen = _saved_by_autograd(answer)
    require(
        x.data_ptr() in seen,
        f"forget hides its input from saved-tensor hooks ({len(seen)} tensors reached one); wanted "
        f"the input saved through autograd.",
    )


# ------------------------------------------------------------------ 5.2: hooks for saved tensors


def _check_hooks(answer: Checkpointing) -> str:
    _check_values(answer, "forget_by_hooks")
    evidence = _check_costs(answer, "forget_by_hooks")
    _check_without_input_gradient(answer)
    _check_retained(answer)
    _check_partial_backward(answer)
    _check_saved_twice(answer)
    _check_peak(answer, "forget_by_hooks", forget_by_hooks)
    _check_uses_own_hooks(answer)
    _check_several_inputs(answer, "forget_by_hooks")
    _check_masks_and_leaks(answer, "forget_by_hooks")
    return evidence


def _check_uses_own_hooks(answer: Checkpointing) -> None:
    with _hooks_recorded() as hooks:
        _of_one_block(answer)
    require(
        bool(hooks.makers),
        "forget_by_hooks created no torch.autograd.graph.saved_tensors_hooks in forward; wanted "
        "fn's own graph, with hooks for the tensors that it saves.",
    )
    require(
        not hooks.makers[0].startswith(("torch.", "memlab.checkpointing.")),
        f"forget_by_hooks uses the hooks of {hooks.makers[0]}; wanted hooks of your own.",
    )


def _check_without_input_gradient(answer: Checkpointing) -> None:
    """The weights get gradients even if no input requires one."""
    case = "forget_by_hooks of 2 blocks, x.requires_grad=False"
    settings: dict[str, Any] = {"blocks": 2, "dropout": 0.25, "requires_grad": False}
    got = _passed(answer, case=case, **settings)
    same_gradients(case, got.gradients, _passed(_plain, **settings).gradients)


def _check_saved_twice(answer: Checkpointing) -> None:
    """fn saves ten tensors, and one twice. A slot for both would be empty when it is read again."""
    runs: list[int] = []

    def square(x: Tensor) -> Tensor:
        runs.append(1)
        for _ in range(10):
            x = x.tanh()
        doubled = 2 * x
        return doubled * doubled

    answer(square, torch.ones(3, requires_grad=True)).sum().backward()
    require(
        len(runs) == 2,
        f"forget_by_hooks of a function that saves 11 tensors, one of them twice, ran it "
        f"{len(runs)} times; wanted twice, once in forward and once in backward.",
        evidence=("saved twice", len(runs)),
    )


def _check_retained(answer: Checkpointing) -> None:
    """A second backward through a retained graph works, and the first one leaves nothing behind."""
    case = "forget_by_hooks of 2 blocks, a second backward through a retained graph"
    settings: dict[str, Any] = {"blocks": 2, "dropout": 0.25, "backwards": 2}
    got = _passed(answer, case=case, **settings)
    same_gradients(case, got.gradients, _passed(_plain, **settings).gradients)
    held, wanted = _held_when_retained(answer, _backward_of_all), BLOCKS * OUTPUT_BYTES
    require(
        held <= wanted,
        f"forget_by_hooks of {BLOCKS} blocks holds {held:,} bytes after a backward pass that "
        f"retains the graph (fn ran {got.runs[0]} times in two such passes); wanted {wanted:,}, as "
        f"before it.",
    )


def _backward_of_all(output: Tensor, chain: Any) -> None:
    output.backward(torch.ones_like(output), retain_graph=True)


def _backward_of_last_weight(output: Tensor, chain: Any) -> None:
    torch.autograd.grad(output.sum(), chain[-1].down.weight, retain_graph=True)


def _held_when_retained(
    answer: Checkpointing, backward: Callable[[Tensor, nn.ModuleList], None]
) -> int:
    chain, x = _chain(BLOCKS)
    kept: list[Tensor] = []

    def step() -> None:
        kept.append(_forward(answer, chain, x))
        backward(kept[0], chain)

    trace = measure(step, model=chain)
    left_out = ("parameters", "inputs", "gradients")
    held = sum(e.bytes for e in trace.events if e.category not in left_out)
    kept.clear()
    return held


def _check_partial_backward(answer: Checkpointing) -> None:
    held, allowed = (
        _held_when_retained(way, _backward_of_last_weight) for way in (answer, forget_by_hooks)
    )
    require(
        held <= allowed,
        f"forget_by_hooks of {BLOCKS} blocks holds {held:,} bytes after a backward pass to the "
        f"last weight alone; wanted at most {allowed:,}: a tensor that you returned, or the graph "
        f"of one, is still alive.",
    )
    for case, of, advice in (
        ("of 2 blocks, backward to the last weight and then to all", _in_part_and_in_full, ""),
        (
            "of one block and of two others, first backward through part of the two",
            _in_part_and_elsewhere,
            " Give each call slots of its own.",
        ),
    ):
        case = f"forget_by_hooks {case}"
        try:
            got = of(answer)
        except (RuntimeError, TypeError, LookupError) as error:
            raise Wrong(f"{case}: backward failed, because {_in_words(error)}.") from None
        far = max(map(furthest, got, of(_plain)))
        require(
            far == 0,
            f"{case}: gradients are up to {far:.2e} off the plain pass.{advice}",
            evidence=(case, "gradients"),
        )


def _in_part_and_in_full(answer: Checkpointing) -> list[Tensor]:
    """The first backward needs some saved tensors, the second one needs all."""
    chain, x = _chain(2, dropout=0.25)
    loss = _forward(answer, chain, x).square().sum()
    weights = [*chain.parameters()]
    last = torch.autograd.grad(loss, weights[-1:], retain_graph=True)
    return [*last, *torch.autograd.grad(loss, [x, *weights])]


def _in_part_and_elsewhere(answer: Checkpointing) -> list[Tensor]:
    """Two graphs: backward through part of the larger one, then through the smaller one."""
    chain, x = _chain(3)
    first, second = answer(chain[0], x), answer(nn.Sequential(chain[1], chain[2]), x)
    torch.autograd.grad(second.sum(), chain[2].down.weight, retain_graph=True)
    return [*torch.autograd.grad(first.sum(), [x, *chain[0].parameters()])]


forget_by_hooks = solution("5.2")


# ------------------------------------------------------------------ 5.3: how many segments

BestSegments = Callable[[int, int, int], tuple[int, int]]
best_segments: BestSegments = solution("5.3")
_CHAINS = (
    # blocks, bytes of an input, bytes of a block
    (4, 10, 10),
    (100, 10, 90),
    (12, 1, 24),
    (16, 10, 10),
    (10, 10, 10),
    (7, 100, 30),
    (32, 16, 365),
    (1, 10, 90),
    (7, 1, 1),
    (11, 3, 5),
    (23, 10, 35),
    (126, 256, 6000),
)


def _check_best_segments(answer: BestSegments) -> str:
    for sizes in _CHAINS:
        equal(f"best_segments{sizes}", answer(*sizes), best_segments(*sizes))
    return f"{len(_CHAINS)} chains, the last of 126 blocks in {best_segments(*_CHAINS[-1])[0]}"


# ------------------------------------------------------------------ 5.4: a schedule

Segmenting = Callable[[int, int], Schedule]
even_schedule: Segmenting = solution("5.4")
_SEGMENTINGS = ((7, 4), (5, 2), (1, 1), (4, 4), (5, 1), (7, 3), (12, 5), (9, 6), (16, 4))


def _check_schedule(answer: Segmenting) -> str:
    for blocks, segments in _SEGMENTINGS:
        case = f"even_schedule({blocks}, {segments})"
        schedule = answer(blocks, segments)
        try:
            check_schedule(schedule, blocks)
        except (TypeError, ValueError) as error:
            raise Wrong(f"{case}: {error}.") from None
        peak, runs = _run_by(schedule, blocks)
        allowed, _ = _run_by(even_schedule(blocks, segments), blocks)
        faults = {
            f"{len(schedule)} segments, wanted {segments}": len(schedule) != segments,
            "wanted only ints in each segment": _is_nested(schedule),
            f"the blocks ran {_times(runs)}, wanted twice each": runs != [2] * blocks,
            f"peak {peak:,} bytes, wanted at most {allowed:,}": peak > allowed,
        }
        found = "; ".join(fault for fault, is_there in faults.items() if is_there)
        require(not found, f"{case} gave {_in_sizes(schedule)}: {found}.")
    return (
        f"{len(_SEGMENTINGS)} chains of real blocks · the last has a peak of {peak:,} bytes · each "
        f"block ran twice"
    )


def _in_sizes(schedule: Schedule) -> str:
    """The blocks of each part: "segments of 3, 3 and 2 blocks without checkpointing"."""
    sizes = [str(len(part)) for part in schedule if isinstance(part, tuple)]
    plain = sum(isinstance(part, int) for part in schedule)
    words = f"segments of {', '.join(sizes)}" if sizes else "no segments"
    words += " with segments inside" if _is_nested(schedule) else ""
    unsaved = f"{plain} block{'s' * (plain > 1)} without checkpointing"
    return f"{words} and {unsaved}" if plain else words


def _is_nested(schedule: Schedule) -> bool:
    segments = (part for part in schedule if isinstance(part, tuple))
    return any(isinstance(item, tuple) for segment in segments for item in segment)


@cache
def _run_by(schedule: Schedule, blocks: int) -> tuple[int, list[int]]:
    """The peak besides weights, gradients and x, and the runs of each block."""
    chain, x = _chain(blocks)

    def step() -> None:
        y = x
        for part in schedule:
            y = run(part, chain, y)
        y.sum().backward()

    trace = measure(step, model=chain)
    return activation_peak(trace), [len(block.grad_modes) for block in chain]


def activation_peak(trace: Trace) -> int:
    """The peak of activations and of both passes' temporaries: bytes that depend on tokens."""
    kinds = ("activations", "forward_temporaries", "backward_temporaries")
    return max(accumulate(e.bytes for e in trace.events if e.category in kinds))


# ------------------------------------------------------------------ the bill


def checkpointed(batch: int = SETTING.batch) -> Trace:
    """The bill's step with every block checkpointed, on top of days 3 and 4."""
    technique = combined("accumulation+bfloat16+checkpointing")
    return dry_trace(replace(SETTING, batch=batch), technique)


DAY = Day(
    exercises=(
        checked("5.1", _check_function, forget),
        checked("5.2", _check_hooks, forget_by_hooks),
        checked("5.3", _check_best_segments, best_segments),
        checked("5.4", _check_schedule, even_schedule),
    ),
    bill=Bill("day 5: every block checkpointed", checkpointed),
)
