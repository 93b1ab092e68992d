"""The meter: every storage that a step makes and drops, as the step does it unwatched.

Adds to memlab.reference.meter: categories, phases and modules, what existed before the step,
gradients that autograd would write in place, resized storages, threads, and dry runs.

A dispatch mode sees each operator's tensors; a storage seen for the first time is an allocation,
and a weak reference tells when it dies. Two things make the stream exact:

1. A mode makes autograd believe that it handles tensor subclasses, and autograd then avoids
   writing in place: `old + new` where a gradient has several sources instead of `old += new`,
   `scatter_add` instead of `scatter_add_` in gather's backward. The meter knows such a call (it
   comes straight from the engine, and its first input dies before the next operator), takes the
   allocation and the free out of the stream, and lets the new storage continue the old one.
2. What a storage holds is known late: an activation is what is alive when backward starts. So
   records are marked as the step goes on, and events are written out at the end.
"""

import functools
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import torch

from memlab.internals.torch_internals import FakeTensor, has_kernel
from memlab.metering.casts import Casts
from memlab.metering.compiled import CompiledCode, leave_out_the_remark_on_hooks
from memlab.metering.context import Context
from memlab.metering.dry import DryRun
from memlab.metering.frames import called_by, comes_from_the_engine, user_line
from memlab.metering.modes import LightMode
from memlab.metering.observer import COMPOSITIONS, OUT_OF_PLACE, is_formula, is_in_place_unwatched
from memlab.metering.reachable import reachable
from memlab.metering.registry import REGISTRY, Storage
from memlab.metering.tensors import (
    has_a_handler_of_its_own,
    plain_tensors,
    sharing_the_parts,
    tensors_among,
    tensors_within,
)

aten = torch.ops.aten

THREADS_NOTE = (
    "gradients were made where the meter does not look, in a thread that the step started: what "
    "such threads allocate is not in here"
)

_OF_PYTHON_NUMBERS = (torch.float64, torch.int64, torch.bool, torch.complex128)


class Change(NamedTuple):
    """One entry of the raw stream."""

    record: Storage
    bytes: int
    phase: str


class WatchedPair(NamedTuple):
    """An operator that unwatched might write its result `new` into its first input, `old`."""

    func: Any
    old: Storage
    new: Storage
    birth: Change  # of `new`


class StorageMeter(LightMode):
    """Meters what runs inside `with`.

    Inside a dry run it meters fake tensors. `lines` asks for the user's line of
    each allocation, which costs a walk up the stack each. `on_birth(record)`, where given, is
    called for each allocation of the corrected stream, `on_operator(operator, phase, module)`
    before each operator.
    """

    def __init__(
        self,
        model: torch.nn.Module | None = None,
        optimizer: Any = None,
        *,
        step: Callable[[], Any] | None = None,
        lines: bool = False,
        on_birth: Callable[[Storage], None] | None = None,
        on_operator: Callable[[Any, str, str], None] | None = None,
    ) -> None:
        super().__init__()
        self.context = Context(
            on_root=_weakly(self._scan_model),
            on_first_step=_weakly(self._scan_optimizer),
            on_step_end=_weakly(self._scan_state),
            on_backward_start=_weakly(self._backward_starts),
            on_backward_end=_weakly(self._backward_ends),
        )
        self._run = Run(step if model is None else model)
        self._roots = (step, model, optimizer)
        self._run_is_named_after_step = model is None
        self._casts = Casts()
        self._compiled = CompiledCode(
            on_buffer=_weakly(self._compiled_code_takes), on_run=_weakly(self._compiled_code_runs)
        )
        self._model, self._optimizer = model, optimizer
        self._lines, self._on_birth, self._on_operator = lines, on_birth, on_operator
        self._dry_run = DryRun.active
        self._initial: list[Change] = []
        self._stream: list[Change] = []
        self._accounted: set[int] = set()  # numbers of storages in one of the two
        self._untouched: dict[int, bool] = {}  # of those that no operator has shown: are they new?
        self._own: dict[int, Storage] = {}  # born here and alive, by number
        self.live_bytes = 0  # of these
        self._births: dict[str, list[Storage]] = {"forward": [], "backward": [], "optimizer": []}
        self._parameter_kinds: set[tuple[int, torch.dtype]] = set()  # (bytes, dtype)
        self._watched_pair: WatchedPair | None = None
        self.nodes: set[str] = set()  # names of those of autograd that allocated

    # ------------------------------------------------------------------ begin and end

    def __enter__(self) -> "StorageMeter":
        self._last_before = REGISTRY.count
        self._before = {record.number: (record, record.bytes) for record in REGISTRY.alive()}
        if self._model is not None:
            self.context.names.add_root(self._model)
            self._scan_model(self._model)
        if self._optimizer is not None:
            self._scan_optimizer(self._optimizer)
        self._scan_reachable()
        self.context.start()
        self._casts.start()
        leave_out_the_remark_on_hooks()
        if self._dry_run is None:
            self._compiled.start()
        COMPOSITIONS.__enter__()
        REGISTRY.listen(self._storage_changed)
        self._took_over = self._dry_run is not None and self._dry_run.step_aside()
        return super().__enter__()

    def __exit__(self, *exception: Any) -> None:
        super().__exit__(*exception)
        if self._took_over:
            self._dry_run.step_back()
        COMPOSITIONS.__exit__()
        self._close_watched_pair()
        self._casts.stop()
        self._compiled.stop()
        self.context.stop()
        known = len(self._initial)
        for root in self.context.names.roots:
            self._scan_gradients(root.parameters())
        self.found_unseen_gradients = len(self._initial) > known
        if self._optimizer is not None:
            self._scan_state(self._optimizer)
        REGISTRY.unlisten(self._storage_changed)
        self._adopt_leftovers()
        for record, *_ in self._initial:
            if self._untouched.get(record.number):
                record.mark("inputs")
        if torch.is_grad_enabled():
            self._backward_starts()  # it might still: what a graph saved is alive for it

    def changes(self) -> Iterator[Change]:
        """The corrected stream: what was alive before, then each allocation and free."""
        for change in (*self._initial, *self._stream):
            if change.bytes and change.record.number in self._accounted:
                yield change

    def largest_own(self, count: int) -> list[Storage]:
        """The largest living storages that were born inside."""
        return sorted(self._own.values(), key=lambda record: -record.bytes)[:count]

    # ------------------------------------------------------------------ compiled code

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Whether compiled functions run compiled under this mode."""
        return True

    def _compiled_code_takes(self, tensor: torch.Tensor) -> None:
        self._close_watched_pair()
        self._born(tensor, "compiled code", self.context.phase(), None, [])

    def _compiled_code_runs(self, does: bool) -> None:
        self.context.follow_modules(not does)

    # ------------------------------------------------------------------ one operator

    def handle(self, func: Any, types: Any, args: Any, kwargs: Any) -> Any:
        if has_a_handler_of_its_own(types):
            return NotImplemented  # which runs it on plain tensors, and those we see
        if torch.is_inference_mode_enabled() and (parts := self._composition(func)):
            with self.again(), self._casts.inside(func):
                return parts(*args, **kwargs)  # elsewhere autograd does so before a mode sees it
        phase = self.context.phase()
        if self._dry_run is not None:
            args, kwargs = self._dry_run.arguments(func, args, kwargs)
        is_new = func is aten.lift_fresh.default  # torch.tensor(...): made past the dispatcher
        tensors = [] if is_new else self._tensors_of_this_run((*args, *kwargs.values()))
        self._close_watched_pair(func, tensors)
        inputs = [self._see(tensor, phase) for tensor in tensors]
        if self._on_operator is not None:
            self._on_operator(func, phase, self.context.module())
        result = self._execute(func, args, kwargs)
        if _writes_to_an_input(func):
            for tensor in tensors:
                REGISTRY.check_size(tensor.untyped_storage())
        if func is aten.detach.default and self._is_handed_over(args[0], phase):
            inputs[0].mark("gradients")
        for tensor in self._tensors_of_this_run((result,)):
            record = REGISTRY.find(tensor)
            if record is None or record.number not in self._accounted:
                self._born(tensor, func, phase, inputs, tensors)
        return result

    def _tensors_of_this_run(self, values: Iterable[Any]) -> list[torch.Tensor]:
        return [tensor for tensor in tensors_among(values) if not self._is_of_another_run(tensor)]

    @staticmethod
    def _is_of_another_run(tensor: torch.Tensor) -> bool:
        """Whether the tensor is fake, and not of the dry run that is active now, if one is.

        Inside a real step, DTensor and torch.compile run operators on fake tensors to learn their
        shapes.
        """
        if not isinstance(tensor, FakeTensor):
            return False
        return DryRun.active is None or not DryRun.active.owns(tensor)

    def _composition(self, func: Any) -> Callable[..., Any] | None:
        """What takes the operator apart, if it has no kernel but is written in terms of others."""
        return func.decompose if is_a_composition(func) else None

    def _is_handed_over(self, tensor: torch.Tensor, phase: str) -> bool:
        """Whether backward gives the finished gradient itself, not a copy of it, to `.grad`."""
        leaf = self.context.leaf() if phase == "backward" else None
        return leaf is not None and leaf.shape == tensor.shape

    def _execute(self, func: Any, args: Any, kwargs: Any) -> Any:
        if self._dry_run is not None:
            return self._dry_run.execute(func, args, kwargs)
        if func is aten.clone.default and self._is_handed_over_sparse(args[0]):
            return sharing_the_parts(args[0])
        return func(*args, **kwargs)

    def _is_handed_over_sparse(self, tensor: torch.Tensor) -> bool:
        """Whether it becomes `.grad` as it is unwatched; watched, autograd clones its parts."""
        return (
            tensor.layout is torch.sparse_coo
            and self.context.leaf() is not None
            and not torch.is_grad_enabled()
            and all(part.is_contiguous() for part in tensors_among((tensor,)))
        )

    def _see(self, tensor: torch.Tensor, phase: str) -> Storage:
        """The record of an operator's input; one never seen before was alive before us."""
        record = REGISTRY.find(tensor)
        is_found = record is None
        if record is not None and record.number in self._untouched:
            is_found = self._untouched.pop(record.number)
        elif record is not None and record.number in self._accounted:
            return record
        elif record is None:
            if tensor.dim() == 0 and tensor.is_cpu and tensor.dtype in _OF_PYTHON_NUMBERS:
                return self._born(tensor, "a number", phase, [], [])
            record = self._found(tensor)
        else:
            self._include(record, tensor)
        if isinstance(tensor, torch.nn.Parameter) or (tensor.requires_grad and tensor.is_leaf):
            record.mark("parameters")
        elif phase == "optimizer":
            record.mark("optimizer_state")
        elif is_found:
            record.mark("inputs")
        return record

    def _born(
        self,
        tensor: torch.Tensor,
        func: Any,
        phase: str,
        inputs: list[Storage] | None,
        input_tensors: list[torch.Tensor],
    ) -> Storage:
        if func is aten.ones_like.default and called_by("_make_grads"):
            phase = "backward"  # the gradient of the loss itself
        record = REGISTRY.find(tensor) or REGISTRY.add(tensor, self._run)
        record.operator, record.phase, record.module = func, phase, self.context.module()
        node = self.context.node()
        record.node = None if node is None else node._sequence_nr()
        if node is not None:
            self.nodes.add(node.name())
        record.line = user_line() if self._lines else None
        if phase == "backward" and self.context.leaf() is not None:
            record.mark("gradients")
        elif phase == "forward" and not self.context.in_module and _all_are_inputs(inputs):
            record.mark("inputs")
        self._accounted.add(record.number)
        self._births[phase].append(record)
        self._own[record.number] = record
        self.live_bytes += record.bytes
        birth = Change(record, record.bytes, phase)
        self._stream.append(birth)
        is_watched = func in OUT_OF_PLACE and self._watch_pair(func, input_tensors, birth)
        if not is_watched and self._on_birth is not None:
            self._on_birth(record)
        return record

    def _found(self, tensor: torch.Tensor) -> Storage:
        """The record of a storage that was alive, unknown to any meter, before this one."""
        record = REGISTRY.add(tensor, self._run)
        self._accounted.add(record.number)
        self._initial.append(Change(record, record.bytes, "before"))
        return record

    def _include(self, record: Storage, tensor: torch.Tensor | None = None) -> None:
        """Count a storage that an earlier meter knew, or that was resized before it was seen."""
        _, count = self._before.get(record.number, (record, record.bytes))
        if record.run is None:
            record.run = self._run
            record.describe(tensor)
            count -= sum(change.bytes for change in self._stream if change.record is record)
        self._accounted.add(record.number)
        self._initial.append(Change(record, count, "before"))

    def _storage_changed(self, record: Storage, change: int) -> None:
        self._stream.append(Change(record, change, self.context.last_phase))
        if record.number in self._own:
            self.live_bytes += change
            if not record.alive:
                del self._own[record.number]

    # ------------------------------------------------------------------ the observer's effect

    def _watch_pair(self, func: Any, tensors: list[torch.Tensor], birth: Change) -> bool:
        """Keep an eye on an output that unwatched would be written into the first input."""
        if not tensors:
            return False
        new = birth.record
        old, *others = [REGISTRY.find(tensor) for tensor in tensors]
        if old in others or not self._is_in_place_unwatched(func, tensors[0], old, new):
            return False
        self._watched_pair = WatchedPair(func, old, new, birth)
        return True

    def _is_in_place_unwatched(
        self, func: Any, first: torch.Tensor, old: Storage, new: Storage
    ) -> bool:
        if COMPOSITIONS.depth:
            return func is aten.add.Tensor
        if new.phase != "backward" or torch.is_grad_enabled() or not comes_from_the_engine():
            return False
        return is_in_place_unwatched(func, first, old, new, self.context.node())

    def _close_watched_pair(self, func: Any = None, tensors: Iterable[torch.Tensor] = ()) -> None:
        """Fold the last operator's output into its input, if that died right after it.

        `func` and `tensors` are the next operator and its inputs.
        """
        pair, self._watched_pair = self._watched_pair, None
        if pair is None:
            return
        # Any storage may die at any moment, and stand in the stream between or after the two.
        birth, death = self._position(lambda c: c is pair.birth), self._death_of(pair.old)
        takes_it = any(REGISTRY.find(tensor) is pair.new for tensor in tensors)
        in_formula = takes_it and is_formula(pair.func, func) and self._is_in_node(pair.new)
        if death is None or in_formula or not pair.new.alive:
            if self._on_birth is not None:
                self._on_birth(pair.new)
            return
        del self._stream[death], self._stream[birth]
        self._births[pair.new.phase].pop()
        del self._own[pair.new.number]
        if self._is_own(pair.old):
            self._own[pair.old.number] = pair.old
        else:
            self.live_bytes -= pair.new.bytes
        REGISTRY.continue_as(pair.old, pair.new)

    def _is_in_node(self, record: Storage) -> bool:
        """Whether backward still evaluates the node that made the storage."""
        node = self.context.node()
        return node is not None and record.node == node._sequence_nr()

    def _death_of(self, record: Storage) -> int | None:
        """The position in the stream at which the storage died; None while it is alive."""
        return None if record.alive else self._position(lambda change: change.record is record)

    def _position(self, wanted: Callable[[Change], bool]) -> int:
        """Of the last such change in the stream: it is among the last few."""
        positions = reversed(range(len(self._stream)))
        return next(i for i in positions if wanted(self._stream[i]))

    def _is_own(self, record: Storage) -> bool:
        return record.number > self._last_before and record.phase != "before"

    # ------------------------------------------------------------------ what storages hold

    def _backward_starts(self) -> None:
        for record in self._births["forward"]:
            if record.alive:
                record.mark("activations")
        self._births["forward"].clear()

    def _backward_ends(self) -> None:
        """What `torch.autograd.grad` hands out never passes through `.grad`."""
        for record in self._births["backward"]:
            if record.alive and (record.bytes, record.dtype) in self._parameter_kinds:
                record.mark("gradients")
        self._births["backward"].clear()

    def _scan_model(self, root: torch.nn.Module) -> None:
        if self._run_is_named_after_step:
            self._run.name_after(root)
            self._run_is_named_after_step = False
        for parameter in root.parameters():
            self._scan_parameter(parameter)
        for buffer in root.buffers():
            self._scan(buffer, "buffers", self.context.names.owning(buffer))
        self._scan_gradients(root.parameters())

    def _scan_reachable(self) -> None:
        """Count what the step, the model or the optimizer holds, whether the step uses it or not.

        Its first operator tells what it is; what has none is data that waits for its turn.
        """
        for reached in reachable(self._roots):
            if isinstance(reached, torch.optim.Optimizer):
                self._scan_state(reached)
            elif isinstance(reached, torch.nn.Module):
                for buffer in reached._buffers.values():
                    if buffer is not None:
                        self._scan(buffer, "buffers", self.context.names.owning(buffer))
            elif not self._is_of_another_run(reached):
                self._scan_waiting(reached)

    def _scan_waiting(self, tensor: torch.Tensor) -> None:
        if isinstance(tensor, torch.nn.Parameter) or (tensor.requires_grad and tensor.is_leaf):
            self._scan(tensor, "parameters", self.context.names.owning(tensor))
            self._scan_gradients([tensor])
            return
        for plain in self._plain(tensor):
            record = REGISTRY.find(plain)
            if record is None:
                self._untouched[self._found(plain).number] = True
            elif record.number not in self._accounted:
                self._include(record, plain)
                self._untouched[record.number] = record.category is None

    def _scan_optimizer(self, optimizer: Any) -> None:
        for group in getattr(optimizer, "param_groups", ()):
            for parameter in group["params"]:
                self._scan_parameter(parameter)
            self._scan_gradients(group["params"])
        self._scan_state(optimizer)

    def _scan_state(self, optimizer: Any) -> None:
        state = getattr(optimizer, "state", {})
        for parameter, values in state.items() if hasattr(state, "items") else ():
            module = self.context.names.owning(parameter)
            for tensor in tensors_within(values):
                self._scan(tensor, "optimizer_state", module)

    def _scan_gradients(self, parameters: Iterable[torch.Tensor]) -> None:
        for parameter in parameters:
            if parameter.grad is not None:
                self._scan(parameter.grad, "gradients", self.context.names.owning(parameter))

    def _scan_parameter(self, parameter: torch.Tensor) -> None:
        for plain in plain_tensors(parameter):
            self._parameter_kinds.add((plain.untyped_storage().nbytes(), plain.dtype))
        self._scan(parameter, "parameters", self.context.names.owning(parameter))

    def _scan(self, tensor: torch.Tensor, category: str, module: str) -> None:
        for plain in self._plain(tensor):
            record = REGISTRY.find(plain)
            if record is None:
                record = self._found(plain)
            elif record.number not in self._accounted:
                self._include(record, plain)
            record.mark(category)
            record.module = module or record.module

    def _plain(self, tensor: torch.Tensor) -> Iterator[torch.Tensor]:
        for plain in plain_tensors(tensor):
            yield plain if self._dry_run is None else self._dry_run.tensor(plain)

    def _adopt_leftovers(self) -> None:
        """Count what earlier steps of the same model left alive, and name the state of an
        optimizer written by hand."""
        for record, _ in self._before.values():
            is_known = record.number in self._accounted or record.run is None
            if not is_known and self._run.continues(record.run):
                self._include(record)
        if not self.context.optimizers and self._optimizer is None:
            for record in self._births["optimizer"]:
                if record.alive:
                    record.mark("optimizer_state")


def _weakly(method: Callable[..., None]) -> Callable[..., None]:
    """The method, without a cycle in which a finished meter would keep the model alive."""
    reference = weakref.WeakMethod(method)
    return lambda *args: reference()(*args)  # type: ignore[misc] # it is called by its owner alone


class Run:
    """What a metering is of: storages that one run leaves alive count in the next of its kind."""

    def __init__(self, subject: Any) -> None:
        self._dry_run = DryRun.active
        self.name_after(subject)

    def name_after(self, subject: Any) -> None:
        try:
            self._subject = weakref.ref(subject)
        except TypeError:  # None, and what Python keeps no weak references to
            self._subject = lambda: None

    @property
    def has_subject(self) -> bool:
        return self._subject() is not None

    def continues(self, earlier: "Run") -> bool:
        """Whether both step the same model (or call the same function), both dry or both real."""
        return (
            self.has_subject
            and self._subject() is earlier._subject()
            and self._dry_run is earlier._dry_run
        )


@functools.cache
def is_a_composition(func: Any) -> bool:
    """Whether the operator has no kernel but is written in terms of other operators."""
    name = func.name()
    return has_kernel(name, "CompositeImplicitAutograd") and not has_kernel(name, "CPU")


@functools.cache
def _writes_to_an_input(func: Any) -> bool:
    return func._schema.is_mutable


def _all_are_inputs(records: list[Storage] | None) -> bool:
    """None: nobody knows of what compiled code made it."""
    return records is not None and all(record.category == "inputs" for record in records)
