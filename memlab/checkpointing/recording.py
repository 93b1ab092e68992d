"""A function's operators, written down in one run and played again in another.

Both are dispatch modes: they see what runs below autograd. A *value* is what a storage holds until
it is written over, as a number; a view has the value of its base.

A function that announces itself to torch (`torch.overrides.handle_torch_function`, as
`memlab.attention.flash_attention` does) is one operator, whatever runs inside: the products of its
tiles are not for keeping, its results are.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from itertools import count
from types import FunctionType
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from memlab.checkpointing.operations import operations
from memlab.checkpointing.recompute import CheckpointError
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
    """One call of an operator within a function: what keeping its outputs takes, and saves."""

    number: int
    func: Any  # such as torch.ops.aten.mm.default, or a function that announces itself
    bytes: int  # of such a function not known before it is over: 0 when it is chosen
    operations: int  # the same


@dataclass(eq=False)
class Output:
    """A tensor that a call made, on a storage of its own."""

    value: int
    make_alike: Callable[[], Tensor]  # the same shape and strides, and any content
    tensor: Tensor | None  # where it may be kept
    is_overwritten: bool = False
    bytes: int = 0
    whole: "Whole | None" = None
    value_at_end: int = -1  # of the whole, which may write over it
    is_needed: bool = False  # at that end

    def as_made(self) -> Tensor:
        """What is held, in the shape in which the call handed it out."""
        assert self.tensor is not None
        if self.whole is None:
            return self.tensor
        return self.tensor.as_strided(*self.make_alike.args, storage_offset=0)


@dataclass(eq=False)
class Whole:
    """One call of a function that is an operator as a whole."""

    number: int
    func: Any
    is_chosen: bool
    must_run: bool = False  # for more than its results
    operations: int = 0
    results: set[Output] = field(default_factory=set)  # what it returned, and backward wants

    @property
    def operator(self) -> Operator:
        needed = sum(result.bytes for result in self.results if result.is_needed)
        return Operator(self.number, self.func, needed, self.operations)


@dataclass(eq=False)
class Call:
    """One call of an operator, as the first run saw it."""

    operator: Operator
    reads: frozenset[int]
    writes: frozenset[int]  # new values, of storages that it wrote over
    outputs: list[Output | None]  # as the tree's leaves
    structure: TreeSpec
    must_run: bool  # for more than its outputs
    is_chosen_alone: bool
    whole: Whole | None  # in which it runs
    is_played: bool = False  # in the second run its outputs are handed out

    @property
    def is_playable(self) -> bool:
        """Whether handing out tensors does for it: a view is made anew, a random number drawn."""
        if self.whole is not None and not self.whole.must_run:
            return any(self.outputs) or bool(self.writes)
        return any(self.outputs) and not self.writes and not self.must_run

    @property
    def is_chosen(self) -> bool:
        if self.whole is None:
            return self.is_chosen_alone
        return self.whole.is_chosen and not self.whole.must_run

    @property
    def to_choose(self) -> Operator | None:
        """What somebody may choose to keep: the call, or the whole in which it runs."""
        if self.whole is None:
            return self.operator
        return None if self.whole.must_run else self.whole.operator

    @property
    def makes(self) -> set[int]:
        return {output.value for output in self.outputs if output} | self.writes


class Recording(TorchDispatchMode):
    """Writes down every operator inside `with`, and holds the outputs of those that are chosen."""

    def __init__(self, choose: Callable[[Operator], bool]) -> None:
        super().__init__()
        self.choose = choose
        self.calls: list[Call] = []
        self._whole: Whole | None = None
        self._announcements = _Announcements(self._as_one)
        self.wanted: set[int] = set()  # values that backward wants
        self._values: dict[int, int] = {}  # of storages, by address
        self._made: dict[int, Output] = {}  # by value; other values come from outside
        self._numbers = count()

    def want(self, tensor: Tensor) -> None:
        """Backward wants the tensor as it is now."""
        self.wanted.add(self._value(tensor))
        self._hold_of_a_whole(tensor)

    def __enter__(self) -> "Recording":
        self._announcements.__enter__()
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self._announcements.__exit__(*error)

    def _as_one(self, func: Any, args: Any, kwargs: Any) -> Any:
        """func(*args, **kwargs), as one operator."""
        number = len(self.calls)
        is_chosen = self.choose(Operator(number, func, 0, 0))
        self._whole = Whole(number, func, is_chosen)
        try:
            result = func(*args, **kwargs)
            for leaf in filter(torch.is_tensor, tree_leaves(result)):
                self._hold_of_a_whole(leaf)
        finally:
            self._whole = None
        return result

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if _makes_nothing(func):
            return func(*args, **kwargs)
        inputs = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        written = list(_written(func, args, kwargs))
        reads = frozenset(map(self._value, inputs))
        writes_outside = not all(map(self._is_made_here, written))
        for tensor in inputs:
            self._require_a_result(tensor)
        for tensor in written:
            self._copy_what_is_held_of(tensor)
        result = func(*args, **kwargs)
        leaves, structure = tree_flatten(result)
        fresh = [leaf for leaf in leaves if _is_fresh(leaf, inputs)]
        made = sum(tensor.untyped_storage().nbytes() for tensor in fresh)
        operator = Operator(len(self.calls), func, made, operations(func, args, kwargs, result))
        does_more = writes_outside or is_random(func, args, kwargs)
        does_more |= _returns_more_than_tensors(inputs, leaves, fresh)
        if self._whole is not None:
            self._whole.must_run |= does_more or _returns_parts(written, leaves, fresh)
            self._whole.operations += operator.operations
        must_run = does_more or (
            bool(written) and not all(tensor.is_floating_point() for tensor in inputs)
        )
        is_asked_about = bool(fresh) and not (must_run or written or self._whole)
        is_chosen = is_asked_about and self.choose(operator)
        call = Call(
            operator,
            reads,
            frozenset(self._overwritten(tensor) for tensor in written),
            [self._output(leaf, is_chosen) if _is_fresh(leaf, inputs) else None for leaf in leaves],
            structure,
            must_run,
            is_chosen,
            self._whole,
        )
        self.calls.append(call)
        return result

    def _value(self, tensor: Tensor) -> int:
        return self._values.setdefault(_address(tensor), -1 - len(self._values))

    def _is_made_here(self, tensor: Tensor) -> bool:
        """In this function; while a whole runs, in that."""
        made = self._made.get(self._value(tensor))
        return made is not None and (self._whole is None or made.whole is self._whole)

    def _output(self, tensor: Tensor, is_chosen: bool) -> Output:
        make_alike = partial(
            torch.empty_strided,
            tensor.shape,
            tensor.stride(),
            dtype=tensor.dtype,
            device=tensor.device,
        )
        held = _alias(tensor) if is_chosen else None
        value = next(self._numbers)
        size = tensor.untyped_storage().nbytes()
        output = Output(value, make_alike, held, False, size, self._whole, value)
        self._values[_address(tensor)] = output.value
        self._made[output.value] = output
        return output

    def _overwritten(self, tensor: Tensor) -> int:
        """The new value of a storage that has been written over."""
        made = self._made.get(self._value(tensor))
        value = self._values[_address(tensor)] = next(self._numbers)
        if made is None:
            return value
        if self._whole is not None and made.whole is self._whole:
            made.value_at_end = value
            self._made[value] = made
        else:
            self._made[value] = Output(value, made.make_alike, None)
        return value

    def _hold_of_a_whole(self, tensor: Tensor) -> None:
        """A tensor that backward wants, or that the function returns."""
        output = self._made.get(self._value(tensor))
        if output is not None and output.whole is not None:
            output.whole.results.add(output)
            output.tensor = _alias(tensor) if output.whole.is_chosen else None

    def _require_a_result(self, tensor: Tensor) -> None:
        """What is read of a whole from outside must be a result, or it has to run again."""
        output = self._made.get(self._value(tensor))
        if output is None or output.whole is None or output.whole is self._whole:
            return
        output.whole.must_run |= output not in output.whole.results

    def _copy_what_is_held_of(self, tensor: Tensor) -> None:
        output = self._made.get(self._value(tensor))
        if output is None or output.is_overwritten:
            return
        if self._whole is None or output.whole is not self._whole:
            output.is_overwritten = True
            output.tensor = None if output.tensor is None else output.as_made().clone()


class Playing(TorchDispatchMode):
    """Runs the same operators again, but hands out the outputs of those that are played."""

    def __init__(self, calls: list[Call], kept: dict[Output, Tensor]) -> None:
        super().__init__()
        self.calls, self.kept = iter(calls), kept

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if _makes_nothing(func):
            return func(*args, **(kwargs or {}))
        call = next(self.calls, None)
        if call is not None and call.operator.func is not func:
            raise CheckpointError(
                f"when it ran again for backward, a function called {func} where it had called "
                f"{call.operator.func}; a checkpointed function must do the same in both runs"
            )
        if call is None or not call.is_played:
            return func(*args, **(kwargs or {}))
        if call.writes:  # of a whole, whose results hold it already
            return tree_unflatten(_written(func, args, kwargs or {}), call.structure)
        leaves = [None if output is None else self._play(output) for output in call.outputs]
        return tree_unflatten(leaves, call.structure)

    def _play(self, output: Output) -> Tensor:
        tensor = self.kept.get(output)
        if tensor is None:
            return output.make_alike()  # nobody will read it
        return tensor.clone() if output.is_overwritten else tensor.detach()


class _Announcements(TorchFunctionMode):
    """Has functions that announce themselves called by way of `as_one`; torch's own are none."""

    def __init__(self, as_one: Callable[[Any, Any, Any], Any]) -> None:
        super().__init__()
        self.as_one = as_one

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if isinstance(func, FunctionType) and func.__module__.split(".")[0] != "torch":
            return self.as_one(func, args, kwargs)
        return func(*args, **kwargs)


def _makes_nothing(func: Any) -> bool:
    """Hooks detach, and a fake tensor is asked for its device (prim), and not in both runs."""
    return func is DETACH or func.namespace == "prim"


def is_random(func: Any, args: Any, kwargs: Any) -> bool:
    """Whether a call draws random numbers: attention does only if its dropout is not 0."""
    if torch.Tag.nondeterministic_seeded not in func.tags:
        return False
    names = [argument.name for argument in func._schema.arguments]
    given = dict(zip(names, args, strict=False)) | kwargs
    return given.get("dropout_p", 0.0) > 0 if "dropout_p" in names else True


def _written(func: Any, args: Any, kwargs: Any) -> Iterator[Tensor]:
    """The tensors that a call writes over."""
    for position, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            given = args[position] if position < len(args) else kwargs.get(argument.name)
            yield from (leaf for leaf in tree_leaves(given) if isinstance(leaf, Tensor))


def _returns_more_than_tensors(
    inputs: list[Tensor], leaves: list[Any], fresh: list[Tensor]
) -> bool:
    """More than new tensors that others of their shape could stand for: a number that was read off
    a tensor, another layout, or tensors of which only some are new."""
    is_told_of = bool(inputs) and any(
        not isinstance(leaf, Tensor) and leaf is not None for leaf in leaves
    )
    has_other_layout = any(tensor.layout is not torch.strided for tensor in fresh)
    has_old = bool(fresh) and len(fresh) < sum(isinstance(leaf, Tensor) for leaf in leaves)
    return is_told_of or has_other_layout or has_old


def _returns_parts(written: list[Tensor], leaves: list[Any], fresh: list[Tensor]) -> bool:
    """Something beside what it wrote over, or a part of a storage: a whole cannot hold those."""
    returns_more = bool(written) and len(leaves) != len(written)
    return returns_more or any(tensor.storage_offset() for tensor in fresh)


def _alias(tensor: Tensor) -> Tensor:
    """The tensor without the graph that autograd will hang on it, and with its count of writes: in
    a dispatch mode, a plain detach begins one of its own."""
    with SetExcludeDispatchKeyGuard(DispatchKey.ADInplaceOrView, False):
        return tensor.detach()


def _is_fresh(leaf: Any, inputs: list[Tensor]) -> bool:
    return isinstance(leaf, Tensor) and _address(leaf) not in map(_address, inputs)


def _address(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata
