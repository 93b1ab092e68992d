"""Selective checkpointing: recompute most activations but keep the expensive ones.

Saves    the outputs of all other operators.
Costs    the other operators run again. With matmuls and attention kept, the cost is
         almost zero; with nothing kept, this equals `checkpoint`.
Source   Korthikanti et al. 2022, arXiv 2205.05198, section 5. Interface: torch's
         `create_selective_checkpoint_contexts`.

memlab.reference.selective_checkpointing is the short version. This file adds choices by operator,
by call or by byte budget, operators that write in place or draw random numbers, and everything
that `checkpoint` adds.

    keeping = selective(MATMULS | ATTENTION)
    y = keeping(block, x)                                    # like checkpoint(block, x)

    keeping = selective({flash_attention})                   # a composite operator

    numbers = best_within(operators_of(block, x), budget_bytes)
    keeping = selective(numbers)                             # chosen by a budget

The first run records the values that each operator reads and creates. After it, a pass from the
tensors that backward needs back to the inputs decides about each operator:

    chosen, and an output is needed        kept; the second run returns the output
    not chosen, and an output is needed    runs again, so its inputs are needed too
    no output is needed                    does not run again; nothing is kept

Choosing every operator therefore keeps exactly what a run without checkpointing keeps. (torch keeps
every chosen output: 1.5 times as much for W2(relu(W1 x)).)

A composite operator (see recording.py) is kept or recomputed as a whole. Operators that draw random
numbers always run again, so that later draws stay the same. A kept output that the function
overwrites is copied first. All chosen outputs stay alive until the first run ends. Values read
outside torch (`.numpy()`) are not recorded; compute them outside the checkpoint. A function with a
backward pass inside runs again as a whole, as in `checkpoint`: the backward pass reruns the
function before the first run is over.
"""

from collections.abc import Callable, Collection, Iterable
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from memlab.checkpointing.recompute import DEFAULT, CheckpointedCall, SavedInputs
from memlab.checkpointing.recording import (
    Operator,
    OperatorRecorder,
    OperatorReplayer,
    Output,
    RecordedCall,
)

# Operators, composite operators, numbers of calls; or a function that decides for each operator.
Keep: TypeAlias = Collection[Any] | Callable[[Operator], bool]


def selective(keep: Keep) -> Callable[..., Any]:
    """Return a `checkpoint` function that keeps the outputs of the chosen operators."""
    choose = keep if callable(keep) else lambda call: call.func in keep or call.number in keep

    def keeping(fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        """Run fn(*args, **kwargs), and keep the chosen activations."""
        if not torch.is_grad_enabled():
            return fn(*args, **kwargs)
        return _Selection(fn, choose).first_run(args, kwargs)

    return keeping


def operators_of(fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> list[Operator]:
    """Run fn once and return the operators that a checkpoint would run again and could keep."""
    selection = _Selection(fn, lambda operator: False)
    with torch.enable_grad():
        selection.first_run(args, kwargs)
    again = [call for call in selection.calls if call.is_replayable and not call.is_replayed]
    return list(dict.fromkeys(call.selectable for call in again if call.selectable))


def best_within(operators: Iterable[Operator], budget_bytes: int) -> frozenset[int]:
    """Choose the operators to keep within a budget so that recomputation is least: a knapsack.

    Return their numbers. Bytes are exact; torch's `activation_memory_budget` rounds to 1/10,000 of
    the total and can exceed the budget. The search carries on only the Pareto front.
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
        choices = _pareto_front(choices + larger)
    return choices[-1][2]


def _pareto_front(
    choices: list[tuple[int, int, frozenset[int]]],
) -> list[tuple[int, int, frozenset[int]]]:
    """Return the Pareto front: by growing bytes, choices that save more than all before."""
    best: list[tuple[int, int, frozenset[int]]] = []
    for choice in sorted(choices, key=lambda choice: (choice[0], -choice[1])):
        if not best or choice[1] > best[-1][1]:
            best.append(choice)
    return best


class _Selection:
    """One call of a function: its recorded operators and its kept outputs."""

    def __init__(self, fn: Callable[..., Any], choose: Callable[[Operator], bool]) -> None:
        self.fn, self.choose = fn, choose
        self.__qualname__ = getattr(fn, "__qualname__", type(fn).__name__)  # for messages
        self.calls: list[RecordedCall] = []
        self.kept_outputs: list[Output] = []
        self.is_recorded = self.has_backward = False

    def first_run(self, args: Any, kwargs: Any) -> Any:
        call = CheckpointedCall(DEFAULT, self, args, kwargs)
        recording = OperatorRecorder(self.choose)

        def pack(tensor: Tensor) -> Any:
            recording.mark_needed(tensor)
            return call.pack(tensor)

        with saved_tensors_hooks(pack, call.unpack), recording:
            result = self.fn(*args, **kwargs)
        call.is_finished = True
        self.calls = [] if self.has_backward else recording.calls
        self.kept_outputs = select_kept(self.calls, recording.wanted)
        # Keep them as inputs of the second run, so that enclosing hooks can handle them.
        self.kept = SavedInputs([output.as_returned() for output in self.kept_outputs])
        for output in (output for call in recording.calls for output in call.outputs if output):
            output.tensor = None
        self.is_recorded = True
        return result

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the function again. Nothing is kept yet if the first run is not over."""
        self.has_backward |= not self.is_recorded
        tensors = self.kept.tensors() if self.kept_outputs else []
        with OperatorReplayer(self.calls, dict(zip(self.kept_outputs, tensors, strict=True))):
            return self.fn(*args, **kwargs)


def select_kept(calls: list[RecordedCall], wanted: Iterable[int]) -> list[Output]:
    """Mark the calls that need not run again, and return the outputs to keep for them."""
    needed, kept = set(wanted), []
    for call in reversed(calls):
        for output in filter(None, call.outputs):
            output.is_needed = output.value_at_end in needed
        is_needed = call.must_run or not call.makes.isdisjoint(needed)
        # torch keeps every chosen output. And if it keeps a dropout's, the second run draws that
        # one's mask for the next dropout: a wrong gradient
        # (test_torchs_selection_can_draw_a_kept_dropouts_numbers_for_the_next_dropout).
        call.is_replayed = call.is_replayable and (call.is_chosen or not is_needed)
        if call.is_replayed:
            kept += [output for output in call.outputs if output and output.is_needed]
        elif is_needed:
            needed |= call.reads
    return kept
