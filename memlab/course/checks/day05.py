"""Day 5: gradient checkpointing."""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache, partial
from itertools import accumulate, count
from typing import Any
from unittest.mock import patch

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import BackwardCFunction
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint as torch_checkpoint

from memlab.checkpointing import checkpoint
from memlab.checkpointing.execution import run
from memlab.checkpointing.schedules import Schedule, check_schedule
from memlab.course.bill import SETTING
from memlab.course.exercises import Bill, Day, Exercise, Wrong, WrongAnswer, equal, require
from memlab.course.properties import elements, gradients, same_gradients, unchanged
from memlab.course.solutions import Edit, body, mistakes, solution
from memlab.metering import measure
from memlab.reference.checkpointing import forget
from memlab.trace import Trace
from memlab.train import combined, dry_trace

Forgetting = Callable[..., Tensor]  # forgetting(fn, *inputs)

# ------------------------------------------------------------------ a chain of blocks, run

ROWS, WIDTH = 8, 16
BLOCKS = 4
OUTPUT_BYTES = 4 * ROWS * WIDTH


class _Block(nn.Module):
    """A residual MLP that notes how often it ran, and whether a graph was made."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        self.dropout = dropout
        self.graphs: list[bool] = []

    def forward(self, x: Tensor, rows: Tensor | None = None) -> Tensor:
        self.graphs.append(torch.is_grad_enabled())
        hidden = F.gelu(self.up(x if rows is None else x[rows]))
        hidden = F.dropout(hidden, self.dropout, self.training)
        return x + self.down(hidden)


class _Mixing(nn.Module):
    """Of several inputs, and it saves what is no float of theirs: a mask, and a few numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, WIDTH)

    def forward(self, rows: Tensor, shift: Tensor, x: Tensor, scale: Tensor) -> Tensor:
        hidden = self.up(x[rows]) + shift
        return torch.where(hidden > 0, hidden * scale, hidden) * hidden.mean().exp()


@dataclass
class _Pass:
    """A forward and a backward pass through a chain, and what came of it."""

    output: Tensor
    gradients: dict[str, Tensor | None]
    runs: list[int]  # of each block
    drawn_after: Tensor


def _chain(blocks: int, dropout: float, requires_grad: bool) -> tuple[nn.ModuleList, Tensor]:
    torch.manual_seed(0)
    chain = nn.ModuleList(_Block(dropout) for _ in range(blocks))
    return chain, torch.randn(ROWS, WIDTH, requires_grad=requires_grad)


def _forward(
    answer: Forgetting, chain: nn.ModuleList, x: Tensor, *others: Tensor, case: str = ""
) -> Tensor:
    for block in chain:
        x = answer(block, x, *others)
        kind = type(x).__name__
        require(
            isinstance(x, Tensor),
            f"{case} gave {kind}; wanted what fn returns, a Tensor."
            f"{' Is there a return?' if x is None else ''}",
        )
    return x


def _passed(
    answer: Forgetting,
    *others: Tensor,
    case: str = "",
    blocks: int = 1,
    dropout: float = 0.0,
    requires_grad: bool = True,
    backwards: int = 1,
) -> _Pass:
    """Through so many blocks and back; later backward passes begin with no gradients."""
    chain, x = _chain(blocks, dropout, requires_grad)
    exchanged: list[str] = []
    with _shapes_noted(exchanged):
        output = _forward(answer, chain, x, *others, case=case)
    require(
        output.requires_grad,
        f"{case} gave a tensor without a graph (requires_grad is False); no gradient can pass.",
    )
    loss = output.square().sum()
    for n in range(backwards):
        x.grad = None
        chain.zero_grad()
        _backward(loss, chain, case, exchanged, retain_graph=n < backwards - 1)
    gradients = {"x": x.grad} if requires_grad else {}
    gradients |= {name: weight.grad for name, weight in chain.named_parameters()}
    runs = [len(block.graphs) for block in chain]
    return _Pass(output.detach(), gradients, runs, torch.rand(4))


# What torch says where the second run made no graph, or where a slot stayed empty.
_NO_GRAPH = "does not require grad"
_NO_TENSOR = "unpack_hook"


@contextmanager
def _shapes_noted(exchanged: list[str]) -> Iterator[None]:
    """Notes what the hooks made inside hand out in another shape than it was saved in."""
    as_ever = saved_tensors_hooks.__init__

    def init(
        self: saved_tensors_hooks,
        pack_hook: Callable[[Tensor], Any],
        unpack_hook: Callable[[Any], Tensor],
    ) -> None:
        places = count(1)

        def pack(tensor: Tensor) -> tuple[int, torch.Size, Any]:
            return next(places), tensor.shape, pack_hook(tensor)

        def unpack(kept: tuple[int, torch.Size, Any]) -> Tensor:
            place, shape, own = kept
            tensor = unpack_hook(own)
            if isinstance(tensor, Tensor) and tensor.shape != shape:
                exchanged.append(
                    f"tensor {place} of those that fn saved was {tuple(shape)}, and came back "
                    f"{tuple(tensor.shape)}: another slot's"
                )
            return tensor

        as_ever(self, pack, unpack)

    with patch.object(saved_tensors_hooks, "__init__", init):
        yield


def _backward(
    loss: Tensor, chain: nn.ModuleList, case: str, exchanged: list[str], retain_graph: bool
) -> None:
    entered: list[saved_tensors_hooks] = []
    as_ever = saved_tensors_hooks.__enter__

    def note(self: saved_tensors_hooks) -> None:
        entered.append(self)
        as_ever(self)

    try:
        with patch.object(saved_tensors_hooks, "__enter__", note):
            loss.backward(retain_graph=retain_graph)
    except (RuntimeError, TypeError, LookupError) as error:
        later = [graph for block in chain for graph in block.graphs[1:]]
        if later and not later[0]:
            raise Wrong(
                f"{case}: in backward fn ran again with gradients switched off, so that it made no "
                f"graph and saved nothing."
            ) from None
        if exchanged:
            raise Wrong(f"{case}: {exchanged[0]}.") from None
        if not any(words in str(error) for words in (_NO_GRAPH, _NO_TENSOR)):
            raise
        under = f"under {'hooks' if entered else 'no hooks'} for saved tensors"
        how = f"ran again with gradients switched on, {under}" if later else "did not run again"
        first_line = str(error).splitlines()[0].rstrip(".")
        raise Wrong(f"{case}: in backward fn {how}, and torch says: {first_line}.") from None


def _plainly(fn: Callable[..., Tensor], *inputs: Tensor) -> Tensor:
    return fn(*inputs)


def _check_values(answer: Forgetting, name: str) -> None:
    """The output and every gradient are those of the plain pass, to the bit; and so are the random
    numbers drawn later."""
    rows = torch.arange(ROWS).flip(0)
    for case, others, settings in (
        ("one block", (), {}),
        ("one block that takes a table of rows, too", (rows,), {}),
        ("2 blocks with dropout", (), {"blocks": 2, "dropout": 0.25}),
    ):
        case = f"{name} of {case}"
        got = _passed(answer, *others, case=case, **settings)
        wanted = _passed(_plainly, *others, **settings)
        _same(case, got, wanted, drew="dropout" in settings)
        require(
            torch.equal(got.drawn_after, wanted.drawn_after),
            f"{case}: after backward torch draws other random numbers than after the plain pass.",
        )


def _check_several_inputs(answer: Forgetting, name: str) -> None:
    """Some of which want a gradient, and weights that have one already."""
    case = f"{name} of fn(rows, shift, x, scale) (x and scale want a gradient)"
    rows, shift = torch.arange(ROWS).flip(0), elements(WIDTH, seed=1)
    found = []
    for way in (answer, _plainly):
        torch.manual_seed(0)
        block = _Mixing()
        for n, weight in enumerate(block.parameters()):
            weight.grad = elements(*weight.shape, seed=n)
        block.up.bias.requires_grad_(False)  # and stays frozen

        def call(x: Tensor, scale: Tensor, way: Forgetting = way, block: _Mixing = block) -> Tensor:
            return way(block, rows, shift, x.tanh(), scale.sigmoid())  # made, as a block makes them

        with unchanged(case, may_change={"gradients"}, block=block, rows=rows, shift=shift):
            found.append(_gradients_or_wrong(case, call))
        found[-1] |= {f"fn's {key}": weight.grad for key, weight in block.named_parameters()}
    same_gradients(case, *found)
    _check_held_of_any_dtype(answer, name)


def _gradients_or_wrong(case: str, call: Callable[..., Tensor]) -> dict[str, Tensor | None]:
    x = elements(ROWS, WIDTH, seed=2)
    scale = elements(ROWS, 1, dtype=torch.float64, seed=3)
    try:
        return gradients(call, x=x, scale=scale)
    except RuntimeError as error:
        if "through the graph a second time" not in str(error):
            raise
        raise Wrong(
            f"{case}: the second run's backward went on into the graph before fn, and freed what "
            f"the outer backward needed there: an input was not detached."
        ) from None


def _same(case: str, got: _Pass, wanted: _Pass, *, drew: bool = False) -> None:
    require(
        got.output.shape == wanted.output.shape,
        f"{case} gave a tensor {tuple(got.output.shape)}; wanted {tuple(wanted.output.shape)}.",
    )
    require(
        torch.equal(got.output, wanted.output),
        f"{case} gave other values than fn, up to {_furthest(got.output, wanted.output):.2e} off.",
    )
    missing = [name for name, gradient in got.gradients.items() if gradient is None]
    require(not missing, f"{case}: after backward there is no gradient of {_some(missing)}.")
    off = {
        name: _furthest(gradient, wanted.gradients[name])
        for name, gradient in got.gradients.items()
        if not torch.equal(gradient, wanted.gradients[name])
    }
    require(
        not off,
        f"{case}: the gradients of {_some(list(off))} are not those of the plain pass, up to "
        f"{max(off.values(), default=0):.2e} off{_DRAWS * drew}.",
    )


_DRAWS = "; where nothing is drawn they are: both runs have to draw the same random numbers"


def _furthest(a: Tensor, b: Tensor) -> float:
    return (a - b).abs().max().item()


def _some(names: list[str]) -> str:
    return f"all {len(names)} tensors" if len(names) > 4 else ", ".join(names)


# ------------------------------------------------------------------ bytes and counts


def _held(answer: Forgetting) -> tuple[int, list[int]]:
    """Bytes that wait for backward, and how often each block ran in the whole pass."""
    chain, x = _chain(BLOCKS, 0.0, True)
    kept: list[Tensor] = []
    trace = measure(lambda: kept.append(_forward(answer, chain, x)), model=chain)
    held = sum(e.bytes for e in trace.events if e.category not in ("parameters", "inputs"))
    kept.pop().sum().backward()
    return held, [len(block.graphs) for block in chain]


def _peak(answer: Forgetting) -> int:
    """The most bytes of a forward and a backward pass, beyond the weights and x."""
    chain, x = _chain(BLOCKS, 0.0, True)
    trace = measure(lambda: _forward(answer, chain, x).sum().backward(), model=chain)
    always = sum(e.bytes for e in trace.events if e.phase == "before")
    return trace.peak_bytes - always


def _check_costs(answer: Forgetting, name: str) -> str:
    held, runs = _held(answer)
    wanted = BLOCKS * OUTPUT_BYTES
    require(
        held <= wanted,
        f"{name} of {BLOCKS} blocks holds {held:,} bytes between forward and backward; wanted "
        f"{wanted:,}: {BLOCKS - 1} inputs (the first is the caller's) and the result. The blocks "
        f"ran {_times(runs)}, and of a block's tensors {len(_saved_by_autograd(answer)[1])} were "
        f"saved by autograd's own way.",
    )
    require(
        runs == [2] * BLOCKS,
        f"{name} ran the blocks {_times(runs)}; wanted twice each: once forward, once for "
        f"backward.",
    )
    return (
        f"gradients equal to the bit, with dropout · {held:,} bytes held for {BLOCKS} blocks, "
        f"random states aside · each ran twice"
    )


def _check_held_of_any_dtype(answer: Forgetting, name: str) -> None:
    """Of masks and of single numbers nothing is held either."""
    block, x = _Mixing(), torch.ones(ROWS, WIDTH, requires_grad=True)
    rows, shift, scale = torch.arange(ROWS), torch.ones(WIDTH), torch.ones(ROWS, 1)
    kept: list[Tensor] = []
    trace = measure(lambda: kept.append(answer(block, rows, shift, x, scale)), model=block)
    held = sum(e.bytes for e in trace.events if e.phase != "before")
    require(
        held <= OUTPUT_BYTES,
        f"{name} of a block that makes a mask holds {held:,} bytes between forward and backward; "
        f"wanted {OUTPUT_BYTES:,}, the result alone.",
    )


def _check_peak(answer: Forgetting, name: str, like: Forgetting) -> None:
    peak, allowed = _peak(answer), _allowed_peak(like)
    require(
        peak <= allowed,
        f"{name} of {BLOCKS} blocks takes {peak:,} bytes at its fullest; wanted at most "
        f"{allowed:,}: the inputs, the activations of one block, and a few tensors as large as its "
        f"output. Something holds tensors that no graph holds, or holds them too long.",
    )


@cache
def _allowed_peak(like: Forgetting) -> int:
    return _peak(like) + 4 * OUTPUT_BYTES


def _of_one_block(answer: Forgetting) -> Tensor:
    chain, x = _chain(1, 0.0, True)
    return answer(chain[0], x)


def _saved_by_autograd(answer: Forgetting) -> tuple[Tensor, list[int]]:
    """A block's input, and where the tensors lie that a hook outside of the answer sees."""
    chain, x = _chain(1, 0.0, True)
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


def _check_function(answer: Forgetting) -> str:
    _check_values(answer, "forget")
    evidence = _check_costs(answer, "forget")
    _check_is_a_function(answer)
    _check_saved(answer)
    _check_peak(answer, "forget", forget)
    _check_several_inputs(answer, "forget")
    return evidence


def _check_is_a_function(answer: Forgetting) -> None:
    node = _of_one_block(answer).grad_fn
    name = type(node).__name__
    require(
        isinstance(node, BackwardCFunction),
        f"forget gave a tensor whose grad_fn is {name}; wanted an autograd Function's.",
    )
    home = node._forward_cls.__module__
    require(
        not home.startswith("torch."),
        f"forget gave a tensor whose grad_fn is {name}, of {home}; wanted your own Function's.",
    )


def _check_saved(answer: Forgetting) -> None:
    """Inputs are saved as autograd saves tensors, so that whoever has hooks there sees them."""
    x, seen = _saved_by_autograd(answer)
    require(
        x.data_ptr() in seen,
        f"forget keeps its input where no hook for saved tensors sees it ({len(seen)} tensors went "
        f"through one); wanted it saved as autograd saves tensors.",
    )


_FIRST_RUN = "        return fn(*inputs)"
_ON_THEIR_OWN = "[x.detach().requires_grad_(x.requires_grad) for x in {}]"
_GRAPH_KEPT = f"""        ctx.own = {_ON_THEIR_OWN.format("inputs")}
        with torch.enable_grad():
            ctx.output = fn(*ctx.own)
        return ctx.output.detach()"""
_BY_THE_FIRST_GRAPH = """
torch.autograd.backward(ctx.output, gradient)
return None, *(x.grad for x in ctx.own)
"""
_STATE_PUT_BACK = "torch.set_rng_state(ctx.state)"
_NO_FORK = ("torch.random.fork_rng([]), ", "")
_WENT_BACK = "torch.autograd.backward(output, gradient)"
_READ_LATE = """        output = fn(*inputs)
        ctx.state = torch.get_rng_state()
        return output"""
_OF_INPUTS_ALONE = """wanting = [x for x in inputs if x.requires_grad]
        found = iter(torch.autograd.grad(output, wanting, gradient))
        return None, *(next(found) if x.requires_grad else None for x in inputs)"""

_FUNCTION = Exercise(
    id="5.1",
    title="Forget, and compute again",
    minutes=20,
    difficulty=4,
    hints=(
        "Forward has three things to keep: fn, the inputs (ctx.save_for_backward) and the state of "
        "the random numbers. What fn computes on its way is gone by itself: a Function's forward "
        "makes no graph.",
        "In backward, run fn again with a graph (torch.enable_grad), on inputs that are detached "
        "from the old graph and want a gradient if the old ones did; then "
        "torch.autograd.backward(output, gradient) fills .grad of these inputs and of the weights.",
        "inputs = [x.detach().requires_grad_(x.requires_grad) for x in ctx.saved_tensors]; with "
        "torch.random.fork_rng([]), torch.enable_grad(): torch.set_rng_state(ctx.state); output = "
        "ctx.fn(*inputs). Then go back from output. backward returns as many as forward has "
        "arguments, and fn has no gradient.",
    ),
    reference=forget,
    check=_check_function,
    wrong_answers=(
        WrongAnswer(
            checkpoint,
            "Use an autograd Function: the library's checkpoint, torch's with use_reentrant=False, "
            "and 5.2 are made of hooks.",
        ),
        WrongAnswer(
            partial(torch_checkpoint, use_reentrant=True),
            "This is torch's Function, and it is right: now build yours.",
        ),
        *mistakes(
            "5.1",
            (
                "This is x = block(x): the right numbers, and everything is kept.",
                body("forget", "return fn(*inputs)"),
            ),
            (
                "The first run's graph is kept on ctx, and with it all activations.",
                (_FIRST_RUN, _GRAPH_KEPT),
                body("Forget.backward", _BY_THE_FIRST_GRAPH),
            ),
            (
                "It runs again, and the first run's graph is kept all the same: run forward "
                "without one.",
                (_FIRST_RUN, _GRAPH_KEPT),
            ),
            (
                "no_grad alone forgets, and nobody knows any more how to compute again.",
                body("forget", "with torch.no_grad():\n    return fn(*inputs)"),
            ),
            (
                "Inside backward no graph is made unless you ask for it: torch.enable_grad().",
                (", torch.enable_grad()", ""),
            ),
            (
                "The second run drew another dropout mask: keep the random state, and put it back.",
                (_STATE_PUT_BACK, "pass"),
            ),
            (
                "The second run drew from where the random numbers stood by then: keep their state "
                "before fn draws, and run again from it.",
                (_STATE_PUT_BACK, "pass"),
                _NO_FORK,
            ),
            (
                "The random state was read too late, after fn had drawn from it.",
                (_FIRST_RUN, _READ_LATE),
            ),
            (
                "With a fixed seed both runs agree, and every block has the same dropout mask.",
                ("ctx.fn, ctx.state", "torch.manual_seed(0)\n        ctx.fn, ctx.state"),
            ),
            (
                "eval() lets both runs agree by switching dropout off: then it is not there at "
                "all.",
                ("Forget.apply(fn,", "Forget.apply(fn.eval(),"),
            ),
            (
                "What comes after backward gets random numbers that were drawn before: "
                "torch.random.fork_rng puts the stream back where it was.",
                _NO_FORK,
            ),
            (
                "torch.autograd.grad of the inputs gives the weights nothing, and they never "
                "learn.",
                (_WENT_BACK, _OF_INPUTS_ALONE),
            ),
            (
                "The gradient that comes from above is to be sent on, not ones.",
                ("(output, gradient)", "(output, torch.ones_like(output))"),
            ),
            (
                "A detached input wants no gradient unless it is told to: requires_grad_.",
                (".requires_grad_(x.requires_grad)", ""),
            ),
            (
                "The second run is tied to the old graph: detach its inputs.",
                (_ON_THEIR_OWN.format("ctx.saved_tensors"), "ctx.saved_tensors"),
            ),
            (
                "The second run's graph stays on ctx when its backward is done: let it go.",
                (_WENT_BACK, f"ctx.output = output\n        {_WENT_BACK}"),
            ),
            (
                "Inputs on ctx are out of reach for an outer checkpoint, or for one that moves "
                "what is saved to the host (Day 14): ctx.save_for_backward.",
                ("ctx.save_for_backward(*inputs)", "ctx.inputs = inputs"),
                ("ctx.saved_tensors", "ctx.inputs"),
            ),
        ),
    ),
)

# ------------------------------------------------------------------ 5.2: hooks for saved tensors


def _check_hooks(answer: Forgetting) -> str:
    _check_values(answer, "forget_by_hooks")
    evidence = _check_costs(answer, "forget_by_hooks")
    _check_without_gradient(answer)
    _check_retained(answer)
    _check_peak(answer, "forget_by_hooks", forget_by_hooks)
    _check_are_hooks(answer)
    _check_several_inputs(answer, "forget_by_hooks")
    return evidence


def _check_are_hooks(answer: Forgetting) -> None:
    homes = _homes_of_hooks(answer)
    require(
        bool(homes),
        "forget_by_hooks made no torch.autograd.graph.saved_tensors_hooks in forward; wanted fn's "
        "own graph, and hooks for what it saves.",
    )
    require(
        not homes[0].startswith(("torch.", "memlab.checkpointing.")),
        f"forget_by_hooks has its hooks made by {homes[0]}; wanted hooks of your own.",
    )


def _homes_of_hooks(answer: Forgetting) -> list[str]:
    """The modules that make hooks for saved tensors while the answer calls a block."""
    homes: list[str] = []
    as_ever = saved_tensors_hooks.__init__

    def note(self: saved_tensors_hooks, *hooks: Any, **named_hooks: Any) -> None:
        homes.append(sys._getframe(1).f_globals["__name__"])
        as_ever(self, *hooks, **named_hooks)

    with patch.object(saved_tensors_hooks, "__init__", note):
        _of_one_block(answer)
    return homes


def _check_without_gradient(answer: Forgetting) -> None:
    """Where no input wants a gradient, the weights still do."""
    case = "forget_by_hooks of 2 blocks, x.requires_grad=False"
    settings = {"blocks": 2, "dropout": 0.25, "requires_grad": False}
    _same(case, _passed(answer, case=case, **settings), _passed(_plainly, **settings))


def _check_retained(answer: Forgetting) -> None:
    """A retained graph can be walked twice, and holds no more after the first walk."""
    case = "forget_by_hooks of 2 blocks, a second backward through a retained graph"
    settings = {"blocks": 2, "dropout": 0.25, "backwards": 2}
    got = _passed(answer, case=case, **settings)
    _same(case, got, _passed(_plainly, **settings), drew=True)
    _check_walked_in_part(answer)
    _check_walked_in_turn(answer)
    held = _held_when_retained(answer)
    wanted = BLOCKS * OUTPUT_BYTES
    require(
        held <= wanted,
        f"forget_by_hooks of {BLOCKS} blocks holds {held:,} bytes after a backward pass that "
        f"retains the graph (and {got.runs[0]} runs after two); wanted {wanted:,}, as before it.",
    )


def _check_walked_in_part(answer: Forgetting) -> None:
    """The first walk asks for some of the saved tensors, the second for all."""
    case = "forget_by_hooks of 2 blocks, backward to the last weight, and then to all of them"
    found: list[list[Tensor]] = []
    for way in (answer, _plainly):
        chain, x = _chain(2, 0.25, True)
        loss = _forward(way, chain, x, case=case).square().sum()
        weights = [*chain.parameters()]
        try:
            last = torch.autograd.grad(loss, weights[-1:], retain_graph=True)
            found.append([*last, *torch.autograd.grad(loss, [x, *weights])])
        except (RuntimeError, TypeError, LookupError) as error:
            raise Wrong(f"{case}, ended in an error: {str(error).splitlines()[0]}.") from None
    far = max(_furthest(mine, plain) for mine, plain in zip(*found, strict=True))
    require(far == 0, f"{case}: gradients are up to {far:.2e} off those of the plain pass.")


def _check_walked_in_turn(answer: Forgetting) -> None:
    """Two graphs: that of two blocks is walked in part, and then that of one, which saves fewer."""
    case = "forget_by_hooks of one block and of two at once, backward through the two in part first"
    found: list[tuple[Tensor, ...]] = []
    for way in (answer, _plainly):
        chain, x = _chain(3, 0.0, True)
        both = nn.Sequential(chain[1], chain[2])
        first, second = (
            _forward(way, nn.ModuleList([fn]), x, case=case) for fn in (chain[0], both)
        )
        try:
            torch.autograd.grad(second.sum(), chain[2].down.weight, retain_graph=True)
            found.append(torch.autograd.grad(first.sum(), [x, *chain[0].parameters()]))
        except (RuntimeError, TypeError, LookupError) as error:
            raise Wrong(f"{case}, ended in an error: {str(error).splitlines()[0]}.") from None
    far = max(_furthest(mine, plain) for mine, plain in zip(*found, strict=True))
    require(
        far == 0,
        f"{case}: gradients are up to {far:.2e} off those of the plain pass; each call needs slots "
        f"of its own.",
        evidence="slots of another call",
    )


def _held_when_retained(answer: Forgetting) -> int:
    chain, x = _chain(BLOCKS, 0.0, True)
    kept: list[Tensor] = []

    def step() -> None:
        kept.append(_forward(answer, chain, x))
        torch.autograd.backward(kept[0], torch.ones_like(x), retain_graph=True)

    trace = measure(step, model=chain)
    counted = ("parameters", "inputs", "gradients")
    held = sum(e.bytes for e in trace.events if e.category not in counted)
    kept.clear()
    return held


forget_by_hooks = solution("5.2")


def _function_that_is_asked(fn: Callable[..., Tensor], *inputs: Tensor) -> Tensor:
    """5.1's Function, with an input that wants a gradient whatever the others want."""
    asked = torch.zeros(0, requires_grad=True)
    return forget(lambda _, *others: fn(*others), asked, *inputs)


_TAKEN = "tensor, slots[number] = slots[number], None"
_SLOTS_STAY = ("            slots.clear()\n", "")
_SECOND_HOOKS = "saved_tensors_hooks(slots.append, lambda nothing: nothing)"
_WITH_THEIR_GRAPH = (
    ("slots.clear()", "found = []"),
    (_SECOND_HOOKS, "saved_tensors_hooks(lambda t: found.append(t) or t, lambda t: t)"),
    ("        tensor, slots", "            slots[:] = found\n        tensor, slots"),
)

_HOOKS = Exercise(
    id="5.2",
    title="The same by hooks for saved tensors",
    minutes=25,
    difficulty=5,
    hints=(
        "Three functions share one list of slots: the first hook in forward, the second in "
        "backward, and the first hook of the run in between. Which of them writes, which reads, "
        "and which empties?",
        "In forward: slots.append(None), and return its place. In backward, of place n: if "
        "slots[n] is None, fill all of them: slots.clear(), and fn(*inputs) inside of three withs: "
        "torch.random.fork_rng([]), with the random state put back in it; torch.enable_grad(); and "
        "saved_tensors_hooks with slots.append as its first hook. Then take the n-th tensor out, "
        "and leave None.",
        "slots, state = [], torch.get_rng_state(). The first hook: slots.append(None); return "
        "len(slots) - 1. The second, of n: if slots[n] is None: slots.clear(); with "
        "torch.random.fork_rng([]), torch.enable_grad(), saved_tensors_hooks(slots.append, lambda "
        "nothing: nothing): torch.set_rng_state(state); fn(*inputs). Then hand slot n out, and "
        "leave it empty. Under which hooks does fn run in forward?",
    ),
    reference=forget_by_hooks,
    check=_check_hooks,
    wrong_answers=(
        WrongAnswer(
            forget,
            "This is 5.1's Function: where no input wants a gradient, autograd does not ask it for "
            "those of the weights.",
        ),
        WrongAnswer(
            _function_that_is_asked,
            "An input more that wants a gradient gets a Function asked; but here the graph stays, "
            "and hooks forget what hangs on it.",
        ),
        WrongAnswer(
            checkpoint, "This is the library's checkpoint, and it is right: now build yours."
        ),
        WrongAnswer(
            partial(torch_checkpoint, use_reentrant=False),
            "This is torch's checkpoint, and it is right: write the hooks yourself.",
        ),
        *mistakes(
            "5.2",
            (
                "No hook is set: everything is kept, as ever.",
                body("forget_by_hooks", "return fn(*inputs)"),
            ),
            (
                "A slot with the tensor in it is not empty: nothing is saved.",
                ("slots.append(None)", "slots.append(tensor.detach())"),
            ),
            (
                "fn runs again for every single tensor: fill all slots in one run.",
                (_TAKEN, "tensor = slots[number]; slots[:] = [None] * len(slots)"),
            ),
            (
                "In backward the hooks of the first run are no longer set: the second run needs "
                "its own, to fill the slots.",
                _SLOTS_STAY,
                (f"                {_SECOND_HOOKS},\n", ""),
            ),
            (
                "Backward runs without a graph, and there no hook is called: torch.enable_grad().",
                _SLOTS_STAY,
                ("                torch.enable_grad(),\n", ""),
            ),
            (
                "Slots that stay full keep their tensors as long as the graph: take the tensor "
                "out.",
                (_TAKEN, "tensor = slots[number]"),
            ),
            (
                "A tensor in a slot brings the second run's graph along, and what that one saved: "
                "let the second run's hook return None, or put t.detach() into the slot.",
                *_WITH_THEIR_GRAPH,
            ),
            (
                "The second run drew another dropout mask than the first.",
                ("torch.set_rng_state(state)", "pass"),
            ),
            (
                "After the second run the stream of random numbers has to stand where it stood.",
                ("                torch.random.fork_rng([]),\n", ""),
            ),
        ),
    ),
)

# ------------------------------------------------------------------ 5.3: how many segments


best_segments = solution("5.3")
_CHAINS = (
    # blocks, an input's bytes, a block's
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
BestSegments = Callable[[int, int, int], tuple[int, int]]


def _check_best_segments(answer: BestSegments) -> str:
    for blocks, input_bytes, block_bytes in _CHAINS:
        call = f"best_segments({blocks}, {input_bytes}, {block_bytes})"
        equal(
            call,
            answer(blocks, input_bytes, block_bytes),
            best_segments(blocks, input_bytes, block_bytes),
        )
    return f"{len(_CHAINS)} chains, the last of 126 blocks in {best_segments(*_CHAINS[-1])[0]}"


_LONGEST, _BEST = "-(-blocks // segments)", "best = min(held, key=held.get)"
_HELD, _TRIED = "segments * input_bytes + longest * block_bytes", "range(1, blocks + 1)"
_RATIO = "round((blocks * block_bytes / input_bytes) ** 0.5)"

_BEST_SEGMENTS = Exercise(
    id="5.3",
    title="How many segments?",
    minutes=8,
    difficulty=2,
    hints=(
        "Two terms: one grows with the number of segments, one shrinks with it. Which bytes are in "
        "which?",
        "Kept all the time is one input a segment. While the longest segment goes back, all of its "
        "blocks' activations are there: it has blocks / segments of them, rounded up.",
        "held[segments] = segments * input_bytes + -(-blocks // segments) * block_bytes, for each "
        "number of segments from 1 to blocks. Of a dict, min(held, key=held.get) is the first key "
        "with the least.",
    ),
    reference=best_segments,
    check=_check_best_segments,
    wrong_answers=mistakes(
        "5.3",
        (
            "√n is best only where a block keeps as much as its input, and n is a square: try them "
            "all.",
            (_BEST, "best = int(blocks**0.5)"),
        ),
        (
            "A formula is right only for numbers that divide evenly: try all numbers.",
            (_BEST, f"best = max(1, min(blocks, {_RATIO}))"),
        ),
        (
            "If the blocks don't divide evenly, the longest segment has one more: round up.",
            (_LONGEST, "blocks // segments"),
        ),
        (
            "There are no fractions of a block.",
            (_LONGEST, "blocks / segments"),
            (_HELD, f"round({_HELD})"),
        ),
        (
            "A / gives a float, and fractions of a block: -(-a // b) is a / b rounded up.",
            (_LONGEST, "blocks / segments"),
        ),
        (
            "First the number of segments, then the bytes.",
            ("return best, held[best]", "return held[best], best"),
        ),
        ("Each segment keeps its input, too.", ("segments * input_bytes + ", "")),
        (
            "The last segment's input is one of those that are kept: every segment has one.",
            ("segments * input_bytes", "(segments - 1) * input_bytes"),
        ),
        (
            "The bytes of an input and of a block are exchanged.",
            (_HELD, "segments * block_bytes + longest * input_bytes"),
        ),
        ("If several numbers are as good, the smallest.", ("min(held,", "min(reversed(held),")),
        (
            "One segment around everything is a choice, too.",
            (_TRIED, "range(min(2, blocks), blocks + 1)"),
        ),
        (
            "A segment around every single block is a choice, too: range(1, blocks + 1).",
            (_TRIED, "range(1, blocks)"),
        ),
    ),
)

# ------------------------------------------------------------------ 5.4: a schedule

Segmenting = Callable[[int, int], Schedule]


even_schedule = solution("5.4")
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
            f"parts: {len(schedule)}, wanted {segments}": len(schedule) != segments,
            "wanted numbers of blocks in each": _is_nested(schedule),
            f"blocks run {_times(runs)}, wanted twice each": runs != [2] * blocks,
            f"peak {peak:,} bytes, wanted at most {allowed:,}": peak > allowed,
        }
        found = "; ".join(fault for fault, is_there in faults.items() if is_there)
        require(not found, f"{case} gave {_in_sizes(schedule)}: {found}.")
    return (
        f"{len(_SEGMENTINGS)} chains of real blocks · the last holds {peak:,} bytes at its peak · "
        f"each block ran twice"
    )


def _in_sizes(schedule: Schedule) -> str:
    """How many blocks each part has: "3, 3, then 2 kept"."""
    sizes = [str(len(part)) for part in schedule if isinstance(part, tuple)]
    plain = sum(isinstance(part, int) for part in schedule)
    words = f"segments of {', '.join(sizes)}" if sizes else "no segments"
    words += " with segments in them" if _is_nested(schedule) else ""
    return f"{words} and {plain} kept" if plain else words


def _is_nested(schedule: Schedule) -> bool:
    segments = (part for part in schedule if isinstance(part, tuple))
    return any(isinstance(item, tuple) for segment in segments for item in segment)


@cache
def _run_by(schedule: Schedule, blocks: int) -> tuple[int, list[int]]:
    """The peak beyond weights, gradients and x, and how often each block ran."""
    chain, x = _chain(blocks, 0.0, True)

    def step() -> None:
        y = x
        for part in schedule:
            y = run(part, chain, y)
        y.sum().backward()

    trace = measure(step, model=chain)
    return most_for_tokens(trace), [len(block.graphs) for block in chain]


def most_for_tokens(trace: Trace) -> int:
    """The most bytes at one moment that belong to tokens, not to weights: what forward keeps, and
    what either pass makes for itself."""
    kinds = ("activations", "forward_temporaries", "backward_temporaries")
    return max(accumulate(e.bytes for e in trace.events if e.category in kinds))


_PARTS, _LONGER = "return tuple(parts)", "size + (number < longer)"
_LAST_KEPT = (_PARTS, "return (*parts[:-1], *parts[-1])")
_REST_LAST = (f"start + {_LONGER}", "start + size if number < segments - 1 else blocks")
_BY_THE_LONGEST = """
size = -(-blocks // segments)
return tuple(tuple(range(n, min(n + size, blocks))) for n in range(0, blocks, size))
"""


def _returned(schedule: str) -> Edit:
    return body("even_schedule", f"return {schedule}")


_SCHEDULE = Exercise(
    id="5.4",
    title="A schedule of even segments",
    minutes=10,
    difficulty=2,
    hints=(
        "7 blocks in 3 segments: 3, 2 and 2. How many segments are one longer than the others, and "
        "how long are those?",
        "size, longer = divmod(blocks, segments): `longer` segments have size + 1 blocks, the "
        "others size. Count up where each begins.",
        "start, parts = 0, []; for n in range(segments): end = start + size + (n < longer). In the "
        "loop, a tuple of the blocks from start up to end goes into parts; and where does the next "
        "segment start?",
    ),
    reference=even_schedule,
    check=_check_schedule,
    wrong_answers=mistakes(
        "5.4",
        (
            "The last segment is not checkpointed: all that it saves is there when backward "
            "begins, beside the loss.",
            _LAST_KEPT,
        ),
        (
            "This is checkpoint_sequential: the last segment takes the rest, and is kept.",
            _REST_LAST,
            _LAST_KEPT,
        ),
        ("The last segment takes the whole rest: spread it, one block to a segment.", _REST_LAST),
        (
            "The longer segments come first: while they run again, the inputs of the later ones "
            "are gone.",
            ("number < longer", "number >= segments - longer"),
        ),
        ("The rest of the division is dropped: blocks vanish.", (_LONGER, "size")),
        (
            "The rest makes one segment more than there are to be.",
            (_LONGER, "size"),
            (_PARTS, "return (*parts, *([tuple(range(start, blocks))] if longer else []))"),
        ),
        (
            "Rounded up, the blocks are used up early: the last segment is short, or missing.",
            body("even_schedule", _BY_THE_LONGEST),
        ),
        (
            "Forward runs in the schedule's order: the first block first.",
            (_PARTS, "return tuple(parts[::-1])"),
        ),
        (
            "A segment is a run of neighbours: blocks are not dealt like cards.",
            _returned("tuple(tuple(range(n, blocks, segments)) for n in range(segments))"),
        ),
        (
            "A plain number is a block that is kept: make tuples of them.",
            _returned("tuple(range(blocks))"),
        ),
        (
            "One segment around all the others: when it runs again, each of them runs once more.",
            (_PARTS, "return (tuple(parts),)"),
        ),
        (
            "A pair of brackets too many around each segment: (0, 1), not ((0, 1),).",
            (_PARTS, "return tuple((part,) for part in parts)"),
        ),
        (
            "One segment a block, however many were asked for.",
            _returned("tuple((n,) for n in range(blocks))"),
        ),
        (
            "One segment holds all blocks at once when it runs again.",
            _returned("(tuple(range(blocks)),)"),
        ),
        (
            "A schedule is made of tuples, not of lists: tuple(...).",
            (_PARTS, "return [list(part) for part in parts]"),
        ),
    ),
)

# ------------------------------------------------------------------ the bill


def checkpointed(batch: int = SETTING.batch) -> Trace:
    """The bill's step with the activations of every block forgotten, on top of days 3 and 4."""
    technique = combined("accumulation+bfloat16+checkpointing")
    return dry_trace(replace(SETTING, batch=batch), technique)


DAY = Day(
    exercises=(_FUNCTION, _HOOKS, _BEST_SEGMENTS, _SCHEDULE),
    bill=Bill("day 5: every block computed again", checkpointed),
)
