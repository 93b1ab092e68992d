"""Record a function's operators in the first run and replay their outputs in the second.

Both classes are dispatch modes: they see operators below autograd. A *value* is an integer id for
the content of a storage until it is overwritten. A view has its base's value.

A function that calls `torch.overrides.handle_torch_function`, such as
`memlab.attention.flash_attention`, is a composite operator: its results can be kept, but not the
outputs of the operators inside it.
"""

import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from itertools import count
from types import FunctionType
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from memlab.checkpointing.ambient_state import is_copying_buffers
from memlab.checkpointing.operations import operations
from memlab.checkpointing.recompute import AllFilled, CheckpointError
from memlab.internals.torch_internals import (
    DispatchKey,
    SetExcludeDispatchKeyGuard,
    TorchDispatchMode,
    TreeSpec,
    tree_flatten,
    tree_leaves,
    tree_unflatten,
)

DETACH = torch.ops.aten.detach.default


class Operator(NamedTuple):
    """One operator call: the cost of keeping its outputs, and the operations that this saves."""

    number: int
    func: Any  # such as torch.ops.aten.mm.default, or a composite operator
    bytes: int  # 0 for a composite operator when it is chosen, because it has not run yet
    operations: int  # likewise


@dataclass(eq=False)
class Output:
    """A tensor on a new storage, created by a call."""

    value: int
    allocate_like: "partial[Tensor]"  # allocates the same shape and strides, uninitialized
    tensor: Tensor | None  # set if it may be kept
    is_overwritten: bool = False
    bytes: int = 0
    composite: "Composite | None" = None
    value_at_end: int = -1  # after the composite operator, which may overwrite it
    is_needed: bool = False  # with the value at the end

    def as_returned(self) -> Tensor:
        """Return the held tensor in the shape that the call returned."""
        assert self.tensor is not None
        if self.composite is None:
            return self.tensor
        size, stride = self.allocate_like.args
        return self.tensor.as_strided(size, stride, storage_offset=0)


@dataclass(eq=False)
class Composite:
    """One call of a composite operator."""

    number: int
    func: Any
    is_chosen: bool
    must_run: bool = False  # has effects besides its results
    operations: int = 0
    results: set[Output] = field(default_factory=set)  # returned, or needed by backward

    @property
    def operator(self) -> Operator:
        needed = sum(result.bytes for result in self.results if result.is_needed)
        return Operator(self.number, self.func, needed, self.operations)


@dataclass(eq=False)
class RecordedCall:
    """One operator call of the first run."""

    operator: Operator
    reads: frozenset[int]
    writes: frozenset[int]  # new values of overwritten storages
    outputs: list[Output | None]  # in the order of the tree's leaves
    others: list[Any]  # the leaves that are no tensors, such as integers; None for tensors
    structure: TreeSpec
    must_run: bool  # has effects besides its outputs
    is_chosen_alone: bool
    composite: Composite | None  # the composite operator around it
    is_replayed: bool = False  # the second run returns its outputs without running it

    @property
    def is_replayable(self) -> bool:
        """Whether the second run could return tensors instead of running the call."""
        if self.composite is not None and not self.composite.must_run:
            return any(self.outputs) or bool(self.writes)
        return any(self.outputs) and not self.writes and not self.must_run

    @property
    def is_chosen(self) -> bool:
        if self.composite is None:
            return self.is_chosen_alone
        return self.composite.is_chosen and not self.composite.must_run

    @property
    def selectable(self) -> Operator | None:
        """The operator offered for selection: the call, or the composite operator around it."""
        if self.composite is None:
            return self.operator
        return None if self.composite.must_run else self.composite.operator

    @property
    def makes(self) -> set[int]:
        return {output.value for output in self.outputs if output} | self.writes


class OperatorRecorder(TorchDispatchMode):
    """Records every operator inside `with`, and holds the outputs of chosen operators."""

    def __init__(self, choose: Callable[[Operator], bool]) -> None:
        super().__init__()
        self.choose = choose
        self.calls: list[RecordedCall] = []
        self._composite: Composite | None = None
        self._interceptor = _CompositeInterceptor(self._run_composite)
        self.wanted: set[int] = set()  # values that backward needs
        self._values: dict[int, int] = {}  # by address of the storage
        self._made: dict[int, Output] = {}  # by value; other values come from outside
        self._numbers = count()

    def mark_needed(self, tensor: Tensor) -> None:
        """Record that backward needs the tensor with its current value."""
        self.wanted.add(self._value(tensor))
        self._hold_result(tensor)

    def __enter__(self) -> "OperatorRecorder":
        self._interceptor.__enter__()
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self._interceptor.__exit__(*error)

    def _run_composite(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Run func(*args, **kwargs) as one composite operator."""
        number = len(self.calls)
        is_chosen = self.choose(Operator(number, func, 0, 0))
        self._composite = Composite(number, func, is_chosen)
        try:
            result = func(*args, **kwargs)
            for leaf in filter(torch.is_tensor, tree_leaves(result)):
                self._hold_result(leaf)
        finally:
            self._composite = None
        return result

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if _is_ignored(func):
            return func(*args, **kwargs)
        inputs = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        written = list(_written(func, args, kwargs))
        reads = frozenset(map(self._value, inputs))
        writes_outside = not all(map(self._is_made_here, written))
        for tensor in inputs:
            self._require_result(tensor)
        for tensor in written:
            self._copy_held(tensor)
        result = func(*args, **kwargs)
        leaves, structure = tree_flatten(result)
        fresh = [leaf for leaf in leaves if _is_fresh(leaf, inputs)]
        made = sum(tensor.untyped_storage().nbytes() for tensor in fresh)
        operator = Operator(len(self.calls), func, made, operations(func, args, kwargs, result))
        does_more = writes_outside or is_random(func, args, kwargs)
        does_more |= _returns_more_than_tensors(inputs, leaves, fresh)
        if self._composite is not None:
            self._composite.must_run |= does_more or _returns_parts(written, leaves, fresh)
            self._composite.operations += operator.operations
        must_run = does_more or (
            bool(written) and not all(tensor.is_floating_point() for tensor in inputs)
        )
        is_asked_about = bool(fresh) and not (must_run or written or self._composite)
        is_chosen = is_asked_about and self.choose(operator)
        call = RecordedCall(
            operator,
            reads,
            frozenset(self._overwritten(tensor) for tensor in written),
            [self._output(leaf, is_chosen) if _is_fresh(leaf, inputs) else None for leaf in leaves],
            [None if isinstance(leaf, Tensor) else leaf for leaf in leaves],
            structure,
            must_run,
            is_chosen,
            self._composite,
        )
        self.calls.append(call)
        return result

    def _value(self, tensor: Tensor) -> int:
        return self._values.setdefault(_address(tensor), -1 - len(self._values))

    def _is_made_here(self, tensor: Tensor) -> bool:
        """Whether this function, or the current composite operator, created the tensor."""
        made = self._made.get(self._value(tensor))
        return made is not None and (self._composite is None or made.composite is self._composite)

    def _output(self, tensor: Tensor, is_chosen: bool) -> Output:
        allocate_like = partial(
            torch.empty_strided,
            tensor.shape,
            tensor.stride(),
            dtype=tensor.dtype,
            device=tensor.device,
        )
        held = _alias(tensor) if is_chosen else None
        value = next(self._numbers)
        size = tensor.untyped_storage().nbytes()
        output = Output(value, allocate_like, held, False, size, self._composite, value)
        self._values[_address(tensor)] = output.value
        self._made[output.value] = output
        return output

    def _overwritten(self, tensor: Tensor) -> int:
        """Return the new value of an overwritten storage."""
        made = self._made.get(self._value(tensor))
        value = self._values[_address(tensor)] = next(self._numbers)
        if made is None:
            return value
        if self._composite is not None and made.composite is self._composite:
            made.value_at_end = value
            self._made[value] = made
        else:
            self._made[value] = Output(value, made.allocate_like, None)
        return value

    def _hold_result(self, tensor: Tensor) -> None:
        """Mark a tensor as a result: backward needs it, or the function returns it."""
        output = self._made.get(self._value(tensor))
        if output is not None and output.composite is not None:
            output.composite.results.add(output)
            output.tensor = _alias(tensor) if output.composite.is_chosen else None

    def _require_result(self, tensor: Tensor) -> None:
        """A composite operator must run again if code outside reads more than its results."""
        output = self._made.get(self._value(tensor))
        if output is None or output.composite is None or output.composite is self._composite:
            return
        output.composite.must_run |= output not in output.composite.results

    def _copy_held(self, tensor: Tensor) -> None:
        output = self._made.get(self._value(tensor))
        if output is None or output.is_overwritten:
            return
        if self._composite is None or output.composite is not self._composite:
            output.is_overwritten = True
            output.tensor = None if output.tensor is None else output.as_returned().clone()


class OperatorReplayer(TorchDispatchMode):
    """Runs the same operators again, but returns kept outputs for replayed calls."""

    def __init__(self, calls: list[RecordedCall], kept: dict[Output, Tensor]) -> None:
        super().__init__()
        self.calls, self.kept = iter(calls), kept

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        # After an early stop, `finally` and context managers of the function still call operators.
        is_stopped = isinstance(sys.exception(), AllFilled)
        if _is_ignored(func) or is_copying_buffers() or is_stopped:
            return func(*args, **(kwargs or {}))
        call = next(self.calls, None)
        if call is not None and call.operator.func is not func:
            raise CheckpointError(
                f"when it ran again for backward, a function called {func}, but "
                f"{call.operator.func} in the first run; a checkpointed function must do the same "
                f"in both runs"
            )
        if call is None or not call.is_replayed:
            return func(*args, **(kwargs or {}))
        if call.writes:  # inside a composite operator, whose results already hold it
            return tree_unflatten(_written(func, args, kwargs or {}), call.structure)
        leaves = [
            other if output is None else self._replay(output)
            for output, other in zip(call.outputs, call.others, strict=True)
        ]
        return tree_unflatten(leaves, call.structure)

    def _replay(self, output: Output) -> Tensor:
        tensor = self.kept.get(output)
        if tensor is None:
            return output.allocate_like()  # never read
        return tensor.clone() if output.is_overwritten else tensor.detach()


class _CompositeInterceptor(TorchFunctionMode):
    """Passes composite operators (never torch's own functions) to `as_one`."""

    def __init__(self, run_composite: Callable[[Any, Any, Any], Any]) -> None:
        super().__init__()
        self.run_composite = run_composite

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        # Otherwise "keep the matmuls" keeps the score tiles of any autograd.Function with matmuls,
        # and memory grows with T² again, as with torch's own selection
        # (test_flash_attention_keeps_its_results_but_no_tiles).
        if isinstance(func, FunctionType) and func.__module__.split(".")[0] != "torch":
            return self.run_composite(func, args, kwargs)
        return func(*args, **kwargs)


def _is_ignored(func: Any) -> bool:
    """Whether to ignore a call: hooks detach, and fake tensors query devices, in one run only."""
    # In a dry run, torch.utils.checkpoint calls `prim.device` in only one of the two passes.
    return func is DETACH or func.namespace == "prim"


def is_random(func: Any, args: Any, kwargs: Any) -> bool:
    """Whether a call draws random numbers. Attention does so only with dropout."""
    if torch.Tag.nondeterministic_seeded not in func.tags:
        return False
    names = [argument.name for argument in func._schema.arguments]
    given = dict(zip(names, args, strict=False)) | kwargs
    return given.get("dropout_p", 0.0) > 0 if "dropout_p" in names else True


def _written(func: Any, args: Any, kwargs: Any) -> Iterator[Tensor]:
    """Yield the tensors that a call overwrites."""
    for position, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            given = args[position] if position < len(args) else kwargs.get(argument.name)
            yield from (leaf for leaf in tree_leaves(given) if isinstance(leaf, Tensor))


def _returns_more_than_tensors(
    inputs: list[Tensor], leaves: list[Any], fresh: list[Tensor]
) -> bool:
    """Whether new tensors cannot replace the results: they are only values read from a tensor, or
    include another layout or a mix of new and existing tensors. (CUDA's flash attention returns
    integers beside its tensors; these are recorded.)"""
    # Every number beside a tensor was once taken for a value read from data. CUDA's flash attention
    # then ran again, and no test on the CPU saw it, whose operator returns tensors alone
    # (test_cudas_attention_kernels_are_recomputed_only_if_they_are_not_kept).
    is_told_of = (
        bool(inputs)
        and not fresh
        and any(not isinstance(leaf, Tensor) and leaf is not None for leaf in leaves)
    )
    has_other_layout = any(tensor.layout is not torch.strided for tensor in fresh)
    has_old = bool(fresh) and len(fresh) < sum(isinstance(leaf, Tensor) for leaf in leaves)
    return is_told_of or has_other_layout or has_old


def _returns_parts(written: list[Tensor], leaves: list[Any], fresh: list[Tensor]) -> bool:
    """Whether a call returns more than its outputs, or part of a storage."""
    returns_more = bool(written) and len(leaves) != len(written)
    return returns_more or any(tensor.storage_offset() for tensor in fresh)


def _alias(tensor: Tensor) -> Tensor:
    """Return the tensor without its future graph but with its version counter, which a plain detach
    in a dispatch mode would not share."""
    with SetExcludeDispatchKeyGuard(DispatchKey.ADInplaceOrView, False):
        return tensor.detach()


def _is_fresh(leaf: Any, inputs: list[Tensor]) -> bool:
    return isinstance(leaf, Tensor) and _address(leaf) not in map(_address, inputs)


def _address(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata
