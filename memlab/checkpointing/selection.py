"""Selective checkpointing: forget most activations, and keep those that are dear to compute again.

Saves    of what a function's operators make, all but what is chosen.
Costs    what is not chosen runs again. With matrix products and attention kept, that is next to
         nothing; with nothing kept, it is `checkpoint`.
Source   Korthikanti et al. 2022, arXiv 2205.05198, section 5. Production's form is that of torch's
         `create_selective_checkpoint_contexts`.

Adds to memlab.reference.selective_checkpointing: choices by operator, by call or by a byte budget,
operators that write in place or draw random numbers, and all that `checkpoint` adds.

    keeping = selective(MATMULS | ATTENTION)
    y = keeping(block, x)                                    # as checkpoint(block, x)

    keeping = selective({flash_attention})                   # a function that announces itself

    numbers = best_within(operators_of(block, x), budget_bytes)
    keeping = selective(numbers)                             # what a budget chose

The first run is written down: which operator read which values, and made which. When it is over, a
walk back from the tensors that backward wants decides about each operator:

    it is chosen, and an output is needed        kept, and handed out in the second run
    it is not chosen, and an output is needed    runs again; so what it read is needed, too
    no output is needed                          does not run again, and nothing is kept

So to choose everything keeps what a run without checkpoint does, and no more. (torch's keeps all
that is chosen: of W2(relu(W1 x)), 1.5 times as much.)

A function that announces itself (see recording.py) is one operator: its results are kept or not,
and nothing inside is asked about. An operator that draws random numbers always runs again: those
after it would draw others. A kept output that the function writes over is copied before. Until the
first run is over, all chosen outputs are alive. What a function reads past torch (`.numpy()`)
nobody sees here; compute that outside.
"""

from collections.abc import Callable, Collection, Iterable
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from memlab.checkpointing.recompute import AS_USUAL, CheckpointedCall, Inputs
from memlab.checkpointing.recording import Call, Operator, Output, Playing, Recording

# Operators, functions that announce themselves, numbers of calls; or a function asked about each.
Keep: TypeAlias = Collection[Any] | Callable[[Operator], bool]


def selective(keep: Keep) -> Callable[..., Any]:
    """A `checkpoint` that keeps the outputs of the chosen operators: see above."""
    choose = keep if callable(keep) else lambda call: call.func in keep or call.number in keep

    def keeping(fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        """fn(*args, **kwargs), which keeps of its activations what was chosen."""
        if not torch.is_grad_enabled():
            return fn(*args, **kwargs)
        return _Selection(fn, choose).first_run(args, kwargs)

    return keeping


def operators_of(fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> list[Operator]:
    """What a checkpoint of fn(*args, **kwargs) runs again, and could keep instead. It runs fn."""
    selection = _Selection(fn, lambda operator: False)
    with torch.enable_grad():
        selection.first_run(args, kwargs)
    again = [call for call in selection.calls if call.is_playable and not call.is_played]
    return list(dict.fromkeys(call.to_choose for call in again if call.to_choose))


def best_within(operators: Iterable[Operator], budget_bytes: int) -> frozenset[int]:
    """The numbers of those to keep, so that the rest has the fewest operations: a knapsack.

    Bytes are exact. torch's `activation_memory_budget` rounds to 1/10,000 of all, and can come out
    above the budget. Of all choices, only those are carried on that no other beats in both.
    """
    if budget_bytes < 0:
        raise ValueError(f"got a budget of {budget_bytes} bytes; give 0 or more")
    choices: list[tuple[int, int, frozenset[int]]] = [(0, 0, frozenset())]  # bytes, operations
    for operator in operators:
        larger = [
            (taken + operator.bytes, spared + operator.operations, numbers | {operator.number})
            for taken, spared, numbers in choices
            if taken + operator.bytes <= budget_bytes
        ]
        choices = _undominated(choices + larger)
    return choices[-1][2]


def _undominated(
    choices: list[tuple[int, int, frozenset[int]]],
) -> list[tuple[int, int, frozenset[int]]]:
    """By growing bytes, each that spares more operations than all before it."""
    best = []
    for choice in sorted(choices, key=lambda choice: (choice[0], -choice[1])):
        if not best or choice[1] > best[-1][1]:
            best.append(choice)
    return best


class _Selection:
    """One call of a function: what was written down of it, and what is kept."""

    def __init__(self, fn: Callable[..., Any], choose: Callable[[Operator], bool]) -> None:
        self.fn, self.choose = fn, choose
        self.__qualname__ = getattr(fn, "__qualname__", type(fn).__name__)  # for messages
        self.calls: list[Call] = []
        self.kept_outputs: list[Output] = []

    def first_run(self, args: Any, kwargs: Any) -> Any:
        call = CheckpointedCall(AS_USUAL, self, args, kwargs)
        recording = Recording(self.choose)

        def leave_a_slot(tensor: Tensor) -> Any:
            recording.want(tensor)
            return call.leave_a_slot(tensor)

        with saved_tensors_hooks(leave_a_slot, call.tensor_of), recording:
            result = self.fn(*args, **kwargs)
        call.is_over = True
        self.kept_outputs = decide(recording.calls, recording.wanted)
        # As an input of the second run: whoever's hooks are outside may have it.
        self.kept = Inputs([output.as_made() for output in self.kept_outputs])
        for output in (output for call in recording.calls for output in call.outputs if output):
            output.tensor = None
        self.calls = recording.calls
        return result

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The second run; one that comes before the first is over finds nothing kept."""
        tensors = self.kept.tensors() if self.kept_outputs else []
        with Playing(self.calls, dict(zip(self.kept_outputs, tensors, strict=True))):
            return self.fn(*args, **kwargs)


def decide(calls: list[Call], wanted: Iterable[int]) -> list[Output]:
    """Mark the calls that need not run again, and return what to keep for that."""
    needed, kept = set(wanted), []
    for call in reversed(calls):
        for output in filter(None, call.outputs):
            output.is_needed = output.value_at_end in needed
        is_needed = call.must_run or not call.makes.isdisjoint(needed)
        call.is_played = call.is_playable and (call.is_chosen or not is_needed)
        if call.is_played:
            kept += [output for output in call.outputs if output and output.is_needed]
        elif is_needed:
            needed |= call.reads
    return kept
