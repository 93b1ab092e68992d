"""Activation checkpointing: drop a function's saved tensors and rerun the function in backward.

Saves    every tensor that autograd would save inside `fn`. Its inputs stay, and the state of the
         random number generators: 5,056 bytes, shared by calls without a draw between them.
Costs    a second run of `fn`, up to the last tensor that backward needs.
Source   Chen et al. 2016, arXiv 1604.06174. Saved-tensor hooks as in `torch.utils.checkpoint` with
         `use_reentrant=False`.

memlab.reference.checkpointing is the short version. This file adds the cases listed there: any
arguments and outputs, autograd.grad, second derivatives, early stopping, autocast, and a check that
both runs agree.

Autograd passes each tensor that it saves to a pack hook and saves the hook's result instead. When
backward needs the tensor, it calls an unpack hook.

    first run       pack returns an empty slot, and the tensor is freed
    backward        the first unpack of an empty slot reruns fn under another pack hook, which puts
                    the n-th saved tensor into the n-th slot
    early stop      an exception ends the second run as soon as the last slot is filled
    after backward  unused slots are emptied

Backward still walks the graph of the first run. So `torch.autograd.grad`, second derivatives and
repeated backward passes work as without a checkpoint.

Checkpoints nest: an inner call saves its inputs like any tensor, so the outer hook turns them into
slots. Slots that have been freed are not filled.

Settings live in a separate object, so they cannot collide with arguments of `fn`:

    y = checkpoint(block, x, mask=mask)
    careful = Checkpoint(check="hash", random=("torch", "python", "numpy"))
    y = careful(block, x, mask=mask)

Differences from torch's version:

    - tensors inside lists and dicts are inputs too
    - BatchNorm counts a batch once
    - optional: Python's and NumPy's random states, and a check of values
    - repeated backward passes over parts of a graph leave nothing behind
    - unpacking a tensor twice recomputes it twice; torch raises an error
    - writing to a saved tensor, or changing a weight between the runs, is an error, as without a
      checkpoint; torch's version does not report it

Limits: a `.backward()` inside `fn` (unlike `torch.autograd.grad`) adds to `.grad` in each run, and
global state not listed in ambient_state.py is not restored. Inside vmap, jvp and other transforms
of torch.func a checkpoint raises an error.
"""

import weakref
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from itertools import count
from typing import Any, TypeVar, get_args

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from memlab.checkpointing.ambient_state import STATISTICS, AmbientState, Copies
from memlab.checkpointing.determinism import Check, SavedTensorInfo, saved_tensor_info
from memlab.checkpointing.random_states import NAMES
from memlab.internals.saved_tensors import is_filled_after_saving
from memlab.internals.torch_internals import (
    disable_dynamo,
    in_backward,
    tree_flatten,
    tree_unflatten,
    when_backward_ends,
)
from memlab.internals.transforms import require_no_transform

Result = TypeVar("Result")


Contexts = tuple[AbstractContextManager[Any], AbstractContextManager[Any]]

TORCHS_SETTINGS = ("context_fn", "determinism_check", "preserve_rng_state", "use_reentrant")


class CheckpointError(RuntimeError):
    """A function behaved differently in its second run."""


def _no_contexts() -> Contexts:
    return nullcontext(), nullcontext()


@dataclass(frozen=True)
class Checkpoint:
    """Settings for checkpointing a function: `Checkpoint(...)(fn, *args, **kwargs)`.

    Args:
        check: what both runs must agree on: each saved tensor's shape, dtype and device
            ("metadata"); its values too ("hash": keeps 64 bits per tensor and reads it twice); or
            only the number of tensors ("none").
        random: the random states to restore: any of "torch", "python", "numpy".
        early_stop: whether to end the second run after the last tensor that backward needs.
        statistics: module classes whose buffers the second run must not change.
        context_fn: called once for each call; returns the contexts of the first and the second run,
            as in `torch.utils.checkpoint`. With check="hash" they also see the hash's operators.
    """

    check: Check = "metadata"
    random: tuple[str, ...] = ("torch",)
    early_stop: bool = True
    statistics: tuple[type[nn.Module], ...] = STATISTICS
    context_fn: Callable[[], Contexts] = _no_contexts

    def __post_init__(self) -> None:
        if self.check not in get_args(Check):
            raise ValueError(f"got check={self.check!r}; choose one of {_quoted(get_args(Check))}")
        if isinstance(self.random, str) or not set(self.random) <= set(NAMES):
            raise ValueError(f"got random={self.random!r}; give a tuple of any of {_quoted(NAMES)}")

    @disable_dynamo  # compiling around it would make the two runs save different tensors
    def __call__(self, fn: Callable[..., Result], /, *args: Any, **kwargs: Any) -> Result:
        """Run fn(*args, **kwargs) with these settings."""
        if not torch.is_grad_enabled():
            return fn(*args, **kwargs)
        call = CheckpointedCall(self, fn, args, kwargs)
        with saved_tensors_hooks(call.pack, call.unpack), call.first_context:
            result = fn(*args, **kwargs)
        call.is_finished = True
        return result


def checkpoint(fn: Callable[..., Result], /, *args: Any, **kwargs: Any) -> Result:
    """Run fn(*args, **kwargs), and recompute its activations in backward.

    The value, the gradients and later random numbers equal a plain call's, to the bit. Tensors at
    any depth of lists, tuples and dicts are inputs. Raise CheckpointError in backward if fn does
    not save the same tensors again, TypeError for a setting of torch's checkpoint, and RuntimeError
    inside a transform of torch.func or with dual tensors.
    """
    return DEFAULT(fn, *args, **kwargs)


DEFAULT = Checkpoint()


# ------------------------------------------------------------------ the two runs


class _Slot:
    """The object that the graph holds in place of a saved tensor."""

    __slots__ = ("__weakref__", "tensor", "version")

    def __init__(self) -> None:
        self.tensor: Tensor | None = None

    def fill(self, tensor: Tensor) -> None:
        self.tensor, self.version = tensor, tensor._version

    def take(self) -> Tensor:
        """Return the tensor and release it, even if the graph is retained."""
        tensor, self.tensor = self.tensor, None
        assert tensor is not None
        if tensor._version != self.version:
            raise CheckpointError(
                f"a tensor {saved_tensor_info(tensor, 'metadata')} was written to after it had "
                f"been saved for backward; write into a new one, such as x * 2 in place of "
                f"x.mul_(2)"
            )
        return tensor


class CheckpointedCall:
    """One checkpointed call: its arguments and state for the second run, and its slots.

    The graph owns the call and the slots. The call holds only weak references to its slots, so
    everything is freed with the graph, without a reference cycle.
    """

    def __init__(
        self,
        settings: Checkpoint,
        fn: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> None:
        for name in kwargs.keys() & set(TORCHS_SETTINGS):
            raise TypeError(
                f"got {name}=, a setting of torch.utils.checkpoint; memlab's settings are in "
                f"Checkpoint(context_fn=..., check=..., random=...)(fn, x); if {name} is an "
                f"argument of the function, bind it with functools.partial"
            )
        self.settings, self.fn = settings, fn
        arguments, self.structure = tree_flatten((args, kwargs))
        require_no_transform(
            "a checkpoint",
            "call the function itself there, or differentiate with torch.autograd",
            arguments,
        )
        self.first_context: Any
        self.first_context, self.second_context = settings.context_fn()
        if getattr(self.first_context, "respect_saved_tensors_hooks", True) is None:
            # From torch 2.14 on. The hooks of this call would recompute what the context keeps.
            self.first_context.respect_saved_tensors_hooks = False
        self.inputs = SavedInputs(arguments)
        self.ambient_state = AmbientState(arguments, settings.random)
        self.slots: list[weakref.ref[_Slot]] = []
        self.infos: list[SavedTensorInfo | None] = []
        self.is_finished = False

    def pack(self, tensor: Tensor) -> _Slot:
        """The pack hook of the first run."""
        slot = _Slot()
        self.slots.append(weakref.ref(slot))
        self.infos.append(saved_tensor_info(tensor, self.settings.check))
        return slot

    def unpack(self, slot: _Slot) -> Tensor:
        """The unpack hook."""
        if slot.tensor is None:
            self.rerun()
        tensor = slot.take()
        if not in_backward():  # the user inspects `y.grad_fn._saved_self`
            _empty(self.slots)
        return tensor

    def rerun(self) -> None:
        """Rerun the function and fill every live slot.

        A backward pass inside fn calls this before the first run is over.
        """
        args, kwargs = tree_unflatten(self.inputs.tensors(), self.structure)
        second = _SecondRun(self)
        if in_backward():
            when_backward_ends(partial(_empty, self.slots))
        try:
            with (
                self.ambient_state.restored(self.settings.statistics) as second.statistics,
                torch.enable_grad(),
                saved_tensors_hooks(second.pack, _identity),
                self.second_context,
            ):
                self.fn(*args, **kwargs)
            second.require_all()
        except AllFilled:
            pass
        except BaseException:
            _empty(self.slots)
            raise


class _SecondRun:
    """Puts the n-th tensor saved by the second run into the n-th slot."""

    def __init__(self, call: CheckpointedCall) -> None:
        self.call = call
        self.slots = [reference() for reference in call.slots]
        self.last = max(n for n, slot in enumerate(self.slots) if slot is not None)
        self.numbers = count()
        # An early stop interrupts the last operator, before RReLU has filled its saved noise.
        self.early_stop = (
            call.settings.early_stop and in_backward() and not is_filled_after_saving()
        )
        self.statistics: Copies = []  # these already include the current batch

    def pack(self, tensor: Tensor) -> Tensor:
        """The pack hook of the second run. Its graph gets the tensor, for a backward inside fn."""
        number = next(self.numbers)
        without_graph = tensor.detach() if tensor.requires_grad else tensor
        if number < len(self.slots) and (slot := self.slots[number]) is not None:
            self.require_same(number, tensor)
            slot.fill(without_graph)
        # Skips the last of equal matmuls: a SwiGLU block recomputes 26.3 % of its operations, 32.7
        # % without; a two-matrix MLP 22 % (test_the_second_run_skips_the_last_matmul).
        if number == self.last and self.early_stop:
            raise AllFilled
        if number == len(self.slots) and self.call.is_finished and not self.early_stop:
            raise self.error(f"saved more than the {number} tensors of the first run")
        return without_graph

    def require_same(self, number: int, tensor: Tensor) -> None:
        wanted, got = self.call.infos[number], saved_tensor_info(tensor, self.call.settings.check)
        if got != wanted and all(tensor is not copy for copy in self.statistics):
            among = f"tensor {number + 1} of {len(self.slots)}"
            raise self.error(f"saved as {among} {got}, but {wanted} in the first run")

    def require_all(self) -> None:
        if (got := next(self.numbers)) <= self.last:
            raise self.error(f"saved {got} tensors, but {len(self.slots)} in the first run")

    def error(self, what: str) -> CheckpointError:
        name = getattr(self.call.fn, "__qualname__", type(self.call.fn).__name__)
        return CheckpointError(
            f"when {name} ran again for backward, it {what}; a checkpointed function must do the "
            f"same in both runs: pass everything that changes between them as an argument, and "
            f"name the random numbers that it draws, as in Checkpoint(random=('torch', 'python'))"
        )


class AllFilled(BaseException):
    """Ends the second run. It derives from BaseException so that fn's handlers don't catch it."""


def _empty(slots: Iterable["weakref.ref[_Slot]"]) -> None:
    for reference in slots:
        if (slot := reference()) is not None:
            slot.tensor = None


# ------------------------------------------------------------------ inputs


class _Keep(torch.autograd.Function):
    """A node outside the main graph that saves tensors, so that enclosing hooks handle them."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, *tensors: Tensor) -> Tensor:
        ctx.save_for_backward(*tensors)
        return anchor.new_empty(0)


class SavedInputs:
    """A call's arguments.

    Tensors are saved through autograd rather than referenced, so that an outer checkpoint can drop
    them and offloading hooks can move them.
    """

    def __init__(self, arguments: list[Any]) -> None:
        tensors = [argument for argument in arguments if isinstance(argument, Tensor)]
        self._arguments = [_TENSOR if isinstance(a, Tensor) else a for a in arguments]
        # Makes autograd create a node.
        anchor = torch.empty(0, dtype=torch.float32, device="cpu", requires_grad=True)
        # Up to torch 2.11 a node dies with its last output, and its saved tensors with it.
        self._kept = _Keep.apply(anchor, *tensors)

    def tensors(self) -> list[Any]:
        """Return the arguments. An outer checkpoint recomputes the tensors if there is one."""
        saved = iter(self._kept.grad_fn.saved_tensors)
        return [next(saved) if argument is _TENSOR else argument for argument in self._arguments]


_TENSOR = object()  # placeholder for a tensor saved by the node


def _identity(tensor: Tensor) -> Tensor:
    return tensor


def _quoted(names: Iterable[str]) -> str:
    return ", ".join(f'"{name}"' for name in names)
