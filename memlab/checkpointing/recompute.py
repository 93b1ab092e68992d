"""Checkpointing: forget what a function saved for backward, and run the function again for it.

Saves    every tensor that autograd would keep inside `fn`. Its inputs stay, and the state of the
         random numbers: 5,056 bytes, shared by calls between which nothing was drawn.
Costs    `fn` once more, up to the last tensor that backward needs of it.
Source   Chen et al. 2016, arXiv 1604.06174. Production's form, by saved-tensor hooks, is that of
         `torch.utils.checkpoint` with `use_reentrant=False`.

Adds to memlab.reference.checkpointing: the cases that the reference lists as missing: any arguments
and outputs, autograd.grad, second derivatives, early stopping, autocast, and a check that both runs
agree.

Autograd hands each tensor that it is about to save to a hook, and what the hook returns is saved in
its place; when backward wants the tensor, another hook has to come up with it.

    first run       the hook returns an empty slot, and the tensor dies
    backward        the first slot that is asked for its tensor runs fn again, under another hook:
                    the n-th tensor that fn saves now belongs into the n-th slot
    early stop      as soon as the last slot is filled, an exception ends the second run
    after backward  slots that nobody asked are emptied

The graph of the first run stays the one that backward walks. So `torch.autograd.grad`, second
derivatives, and several backward passes work as without a checkpoint.

Checkpoints nest: an inner call saves its inputs as autograd saves any tensor, so the outer one's
hook gets them and leaves slots. A slot that has died is not filled, whoever let go of it.

A call's settings are an object of their own, so that they cannot collide with arguments of `fn`:

    y = checkpoint(block, x, mask=mask)
    careful = Checkpoint(check="hash", random=("torch", "python", "numpy"))
    y = careful(block, x, mask=mask)

Beyond torch's: tensors in lists and dicts are inputs as others are; BatchNorm counts a batch once;
Python's and NumPy's random numbers, and a check of values, on request; several backward passes over
parts of a graph leave nothing behind; a tensor that is unpacked twice is computed twice, where
torch refuses. Writing over a saved tensor, or changing a weight between the two runs, is an error,
as it is without a checkpoint; torch's is silent.

Its limits: a `.backward()` inside `fn` (not `torch.autograd.grad`) adds to `.grad` in each run, and
what surroundings.py does not list is not restored.
"""

import weakref
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from itertools import count
from typing import Any, TypeVar, get_args

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from memlab.checkpointing.ambient_state import STATISTICS, Copies, Surroundings
from memlab.checkpointing.determinism import Check, Facts, facts
from memlab.checkpointing.random_states import NAMES
from memlab.internals.torch_internals import (
    disable_dynamo,
    in_backward,
    tree_flatten,
    tree_unflatten,
    when_backward_ends,
)

Result = TypeVar("Result")


class CheckpointError(RuntimeError):
    """A function did something else when it ran again."""


@dataclass(frozen=True)
class Checkpoint:
    """How functions are checkpointed: `Checkpoint(...)(fn, *args, **kwargs)`.

    check        what must be the same of each tensor in both runs: its shape, dtype and device
                 ("metadata"), its values too ("hash": 64 bits kept of each, and the time to read
                 it twice), or nothing but how many there are ("none")
    random       whose random numbers repeat: any of "torch", "python", "numpy"
    early_stop   whether the second run ends with the last tensor that backward needs
    statistics   classes of modules whose buffers the second run must leave alone
    """

    check: Check = "metadata"
    random: tuple[str, ...] = ("torch",)
    early_stop: bool = True
    statistics: tuple[type[nn.Module], ...] = STATISTICS

    def __post_init__(self) -> None:
        if self.check not in get_args(Check):
            raise ValueError(f"got check={self.check!r}; choose one of {_words(get_args(Check))}")
        if isinstance(self.random, str) or not set(self.random) <= set(NAMES):
            raise ValueError(f"got random={self.random!r}; give a tuple of any of {_words(NAMES)}")

    @disable_dynamo  # compiled around it, the two runs would save different tensors
    def __call__(self, fn: Callable[..., Result], /, *args: Any, **kwargs: Any) -> Result:
        """fn(*args, **kwargs), with these settings."""
        if not torch.is_grad_enabled():
            return fn(*args, **kwargs)
        call = CheckpointedCall(self, fn, args, kwargs)
        with saved_tensors_hooks(call.leave_a_slot, call.tensor_of):
            result = fn(*args, **kwargs)
        call.is_over = True
        return result


def checkpoint(fn: Callable[..., Result], /, *args: Any, **kwargs: Any) -> Result:
    """fn(*args, **kwargs), whose activations are computed again when backward needs them.

    The value, the gradients and the random numbers drawn later are those of the plain call, to the
    bit. Tensors are inputs however deep they lie in lists, tuples and dicts. CheckpointError, in
    backward, if fn does not save the same tensors again.
    """
    return AS_USUAL(fn, *args, **kwargs)


AS_USUAL = Checkpoint()


# ------------------------------------------------------------------ the two runs


class _Slot:
    """What the graph holds in a tensor's place."""

    __slots__ = ("__weakref__", "tensor", "version")

    def __init__(self) -> None:
        self.tensor: Tensor | None = None

    def fill(self, tensor: Tensor) -> None:
        self.tensor, self.version = tensor, tensor._version

    def take(self) -> Tensor:
        """Its tensor, which it then has no longer, even in a graph that is retained."""
        tensor, self.tensor = self.tensor, None
        assert tensor is not None
        if tensor._version != self.version:
            raise CheckpointError(
                f"a tensor {facts(tensor, 'metadata')} was written to after it had been saved for "
                f"backward; write into a new one, such as x * 2 in place of x.mul_(2)"
            )
        return tensor


class CheckpointedCall:
    """A call of a function: all that it takes to run it again, and the slots that it left.

    The graph owns the call and the slots; the call knows its slots by weak references. So
    everything goes when the graph goes, and no cycle waits for a collector.
    """

    def __init__(
        self,
        settings: Checkpoint,
        fn: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> None:
        self.settings, self.fn = settings, fn
        arguments, self.structure = tree_flatten((args, kwargs))
        self.inputs = Inputs(arguments)
        self.surroundings = Surroundings(arguments, settings.random)
        self.slots: list[weakref.ref[_Slot]] = []
        self.facts: list[Facts | None] = []
        self.is_over = False

    def leave_a_slot(self, tensor: Tensor) -> _Slot:
        """The hook of the first run."""
        slot = _Slot()
        self.slots.append(weakref.ref(slot))
        self.facts.append(facts(tensor, self.settings.check))
        return slot

    def tensor_of(self, slot: _Slot) -> Tensor:
        """The hook of backward."""
        if slot.tensor is None:
            self.run_again()
        tensor = slot.take()
        if not in_backward():  # someone looks at `y.grad_fn._saved_self`
            _empty(self.slots)
        return tensor

    def run_again(self) -> None:
        """Fill every slot that still lives. A backward pass inside fn asks for this early: before
        the first run is over."""
        args, kwargs = tree_unflatten(self.inputs.tensors(), self.structure)
        second = _SecondRun(self)
        if in_backward():
            when_backward_ends(partial(_empty, self.slots))
        try:
            with (
                self.surroundings.restored(self.settings.statistics) as second.statistics,
                torch.enable_grad(),
                saved_tensors_hooks(second.fill_a_slot, _itself),
            ):
                self.fn(*args, **kwargs)
            second.require_all()
        except _AllFilled:
            pass
        except BaseException:
            _empty(self.slots)
            raise


class _SecondRun:
    """The n-th tensor that a function saves, into the n-th slot."""

    def __init__(self, call: CheckpointedCall) -> None:
        self.call = call
        self.slots = [reference() for reference in call.slots]
        self.last = max(n for n, slot in enumerate(self.slots) if slot is not None)
        self.numbers = count()
        self.statistics: Copies = []  # which have counted the batch that comes now already

    def fill_a_slot(self, tensor: Tensor) -> Tensor:
        """The hook of the second run; its graph, too, gets the tensor: fn may walk it backward."""
        number, early_stop = next(self.numbers), self.call.settings.early_stop
        without_graph = tensor.detach() if tensor.requires_grad else tensor
        if number < len(self.slots) and (slot := self.slots[number]) is not None:
            self.require_same(number, tensor)
            slot.fill(without_graph)
        if number == self.last and early_stop:
            raise _AllFilled
        if number == len(self.slots) and self.call.is_over and not early_stop:
            raise self.error(f"saved more than the {number} tensors that it saved before")
        return without_graph

    def require_same(self, number: int, tensor: Tensor) -> None:
        wanted, got = self.call.facts[number], facts(tensor, self.call.settings.check)
        if got != wanted and all(tensor is not copy for copy in self.statistics):
            among = f"tensor {number + 1} of {len(self.slots)}"
            raise self.error(f"saved as {among} {got}, where it had saved {wanted}")

    def require_all(self) -> None:
        if (got := next(self.numbers)) <= self.last:
            raise self.error(f"saved {got} tensors, where it had saved {len(self.slots)}")

    def error(self, what: str) -> CheckpointError:
        name = getattr(self.call.fn, "__qualname__", type(self.call.fn).__name__)
        return CheckpointError(
            f"when {name} ran again for backward, it {what}; a checkpointed function must do the "
            f"same in both runs: hand it whatever changes between them as an argument, and name "
            f"the random numbers that it draws, as in Checkpoint(random=('torch', 'python'))"
        )


class _AllFilled(BaseException):
    """Ends a second run; no `except Exception` in fn shall stop it."""


def _empty(slots: Iterable["weakref.ref[_Slot]"]) -> None:
    for reference in slots:
        if (slot := reference()) is not None:
            slot.tensor = None


# ------------------------------------------------------------------ the inputs


class _Keep(torch.autograd.Function):
    """A node beside the graph that saves tensors as all nodes do: by way of whoever's hooks are
    outside."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, *tensors: Tensor) -> Tensor:
        ctx.save_for_backward(*tensors)
        return anchor.new_empty(0)


class Inputs:
    """A call's arguments. To hold the tensors themselves would keep them from being forgotten by
    an outer checkpoint, or offloaded by a hook of someone else's."""

    def __init__(self, arguments: list[Any]) -> None:
        tensors = [argument for argument in arguments if isinstance(argument, Tensor)]
        self._arguments = [_TENSOR if isinstance(a, Tensor) else a for a in arguments]
        anchor = torch.empty(0, device="cpu", requires_grad=True)  # or there would be no node
        self._node = _Keep.apply(anchor, *tensors).grad_fn

    def tensors(self) -> list[Any]:
        """The arguments again, computed by an outer checkpoint where there is one."""
        saved = iter(self._node.saved_tensors)
        return [next(saved) if argument is _TENSOR else argument for argument in self._arguments]


_TENSOR = object()  # stands where the node keeps a tensor


def _itself(tensor: Tensor) -> Tensor:
    return tensor


def _words(names: Iterable[str]) -> str:
    return ", ".join(f'"{name}"' for name in names)
