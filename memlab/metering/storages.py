"""The meter: a dispatch mode that records the allocations and frees of a step.

Adds to memlab.reference.meter: categories, phases and modules, storages from before the step,
corrections for in-place gradients, copies inside kernels (copies.py), resized storages, threads and
dry runs.

The mode sees each operator's tensors. A new storage is an allocation, and a weak reference reports
its death. Four classes share the work:

    StorageMeter   sees the operators
    ChangeStream   records storages and the changes of their bytes (stream.py)
    Scanner        finds storages from before the step and marks categories (scanning.py)
    Folding        removes allocations that only the mode causes (folding.py)

Some categories are known late: a tensor is an activation if it is alive when backward starts. So
storages are marked during the step, and events are created at the end.
"""

import functools
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack
from typing import Any

import torch

from memlab.internals.replacing import replaced
from memlab.internals.threads import measurement
from memlab.internals.torch_internals import call_composite, exclude_from_dynamo, has_kernel
from memlab.metering.casts import Casts
from memlab.metering.compiled import CompiledCode, CompiledLayer, hook_warning
from memlab.metering.context import Context
from memlab.metering.copies import copied_bytes
from memlab.metering.dry import DryRun
from memlab.metering.folding import Folding
from memlab.metering.frames import called_by, user_line
from memlab.metering.modes import LightMode
from memlab.metering.observer import COMPOSITE_TRACKER
from memlab.metering.registry import REGISTRY, Storage
from memlab.metering.scanning import Scanner
from memlab.metering.stream import Change, ChangeStream, MeteredRun
from memlab.metering.tensors import (
    has_own_handler,
    is_foreign_fake,
    plain_tensors,
    share_sparse_parts,
    tensors_among,
)

aten = torch.ops.aten

# 27 % of the peak in a UNet, 21 % in an LSTM, at most 0.02 % in transformers. Every storage is
# exact without them, the peak only with them (test_with_kernel_scratch_the_peak_is_the_real_peak).
SCRATCH_NOTE = (
    "kernel workspaces are not counted; in convolutions and recurrent layers they can raise the "
    "real peak by a quarter (memlab.metering.profiler_recording adds them)"
)
THREADS_NOTE = (
    "the step computed gradients in its own thread; allocations in such threads are not counted"
)

_PYTHON_SCALAR_DTYPES = (torch.float64, torch.int64, torch.bool, torch.complex128)


class StorageMeter(LightMode):
    """Meter the code inside `with`; in a dry run, its fake tensors.

    subject                                storages that an earlier meter of the same subject left
                                           alive count; by default the model, else the step
    in_step                                the meter starts at the end of an optimizer's step,
                                           inside one of its hooks
    lines                                  record the user's line of each allocation (slower)
    on_birth(record)                       called for each allocation in the corrected stream
    on_operator(operator, phase, module)   called before each operator
    """

    def __init__(
        self,
        model: torch.nn.Module | None = None,
        optimizer: Any = None,
        *,
        step: Callable[[], Any] | None = None,
        subject: Any = None,
        in_step: bool = False,
        lines: bool = False,
        on_birth: Callable[[Storage], None] | None = None,
        on_operator: Callable[[Any, str, str], None] | None = None,
    ) -> None:
        super().__init__()
        self.context = context = Context(
            on_root=_weak_callback(self._on_root),
            on_first_step=_weak_callback(self._on_first_step),
            on_step_end=_weak_callback(self._on_step_end),
            on_backward_start=_weak_callback(self._on_backward_start),
            on_backward_end=_weak_callback(self._on_backward_end),
            in_step=in_step,
        )
        self._dry_run = DryRun.active
        self._on_birth = on_birth or _ignore
        self._on_operator, self._lines = on_operator, lines
        self._stream = ChangeStream(
            MeteredRun(subject or (step if model is None else model)), lambda: context.last_phase
        )
        self._scanner = Scanner(self._stream, context.names, self._dry_run)
        self._folding = Folding(self._stream, context, self._on_birth)
        self._casts = Casts()
        self._compiled = CompiledCode(
            on_buffer=_weak_callback(self._on_compiled_buffer),
            on_run=_weak_callback(self._on_compiled_run),
        )
        self._model, self._optimizer = model, optimizer
        self._roots = (step, model, optimizer)
        self._subject_is_step = model is None and subject is None
        self.nodes: set[str] = set()  # names of the autograd nodes that allocated

    # ------------------------------------------------------------------ begin and end

    @exclude_from_dynamo
    def __enter__(self) -> "StorageMeter":
        with ExitStack() as stack:
            stack.enter_context(measurement())
            self._start(stack)
            self._started = stack.pop_all()
        return self

    @exclude_from_dynamo
    def __exit__(self, *exception: Any) -> None:
        self._started.close()

    def _start(self, stack: ExitStack) -> None:
        """Start metering; what `stack` holds ends it, in reverse order."""
        self._stream.start()
        if self._model is not None:
            self.context.names.add_root(self._model)
            self._scanner.scan_model(self._model)
        if self._optimizer is not None:
            self._scanner.scan_optimizer(self._optimizer)
        self._scanner.scan_reachable(self._roots)
        stack.callback(self._mark_the_rest)
        stack.enter_context(self._stream.listening())
        stack.callback(self._scan_at_the_end)
        stack.enter_context(self.context.followed())
        stack.enter_context(self._compiled.reported())
        parts = (self._casts.replacements(), REGISTRY.replacements(), hook_warning())
        stack.enter_context(replaced({key: new for part in parts for key, new in part.items()}))
        stack.callback(self._folding.close)
        stack.enter_context(COMPOSITE_TRACKER)
        if self._dry_run is not None and self._dry_run.release_mode():
            stack.callback(self._dry_run.reclaim_mode)
        super().__enter__()
        stack.push(super().__exit__)

    def _scan_at_the_end(self) -> None:
        """Find what unmetered threads have left in gradients and states."""
        known = len(self._stream.found)
        for root in self.context.names.roots:
            self._scanner.scan_gradients(root.parameters())
        self.found_thread_gradients = len(self._stream.found) > known
        for optimizer in (self._optimizer, *self.context.optimizers):  # one may be in its step
            if optimizer is not None:
                self._scanner.scan_state(optimizer)

    def _mark_the_rest(self) -> None:
        if not self.context.optimizers and self._optimizer is None:
            self._mark_alive("optimizer", "optimizer_state")  # of a handwritten optimizer
        for record in self._scanner.unused():
            record.mark("inputs")
        if torch.is_grad_enabled():
            self._on_backward_start()  # saved tensors are activations, even before backward

    def changes(self) -> Iterator[Change]:
        """Yield the corrected stream: storages from before, then each allocation and free."""
        return self._stream.changes()

    @property
    def live_bytes(self) -> int:
        """Bytes of the living storages that were allocated inside `with`."""
        return self._stream.live_bytes

    def largest_live(self, count: int) -> list[Storage]:
        """Return the largest living storages that were allocated inside `with`."""
        return sorted(self._stream.own.values(), key=lambda record: -record.bytes)[:count]

    # ------------------------------------------------------------------ compiled code

    def _on_compiled_buffer(self, tensor: torch.Tensor) -> None:
        self._folding.close()
        self._record_birth(tensor, "compiled code", self.context.phase(), None, [])

    def _on_compiled_run(self, is_running: bool) -> None:
        self.context.follow_modules(not is_running)

    # ------------------------------------------------------------------ one operator

    def handle(self, func: Any, types: Any, args: Any, kwargs: Any) -> Any:
        if has_own_handler(types):
            return NotImplemented  # the wrapper then calls the operator on plain tensors
        if torch.is_inference_mode_enabled() and (parts := self._decomposition(func)):
            with self.reenter(), self._casts.inside(func):
                return parts(*args, **kwargs)  # without inference mode, autograd decomposes first
        phase = self.context.phase()
        if self._dry_run is not None:
            args, kwargs = self._dry_run.arguments(func, args, kwargs)
        is_new = func is aten.lift_fresh.default  # from torch.tensor(...), not seen before
        tensors = [] if is_new else self._own_tensors((*args, *kwargs.values()))
        self._folding.close(func, tensors)
        inputs = [self._record_input(tensor, phase) for tensor in tensors]
        if phase == "backward" and func.namespace == "c10d":
            self._mark_buckets(inputs)
        # An observer and not a second mode: a mode that counted operators added 1.5 MB to the peak
        # of a checkpointed step.
        if self._on_operator is not None:
            self._on_operator(func, phase, self.context.module())
        result = self._execute(func, args, kwargs)
        if _is_mutable(func):
            for tensor in tensors:
                REGISTRY.check_size(tensor.untyped_storage())
        if inputs and func is aten.detach.default and self._becomes_grad(args[0], phase):
            inputs[0].mark("gradients")
        for tensor in self._in_order_of_allocation(func, self._own_tensors((result,))):
            record = REGISTRY.find(tensor)
            if record is None or record not in self._stream:
                self._record_birth(tensor, func, phase, inputs, tensors)
        for sizes in self._scratch(func, args, kwargs, result):
            if sizes:
                self._stream.add_scratch(sizes, func, _device(result))
        return result

    def _in_order_of_allocation(self, func: Any, results: list[torch.Tensor]) -> list[torch.Tensor]:
        """Return an operator's results in the order in which its kernel allocates them."""
        return results

    def _scratch(self, func: Any, args: Any, kwargs: Any, result: Any) -> Iterable[Sequence[int]]:
        """Yield the bytes of buffers that the operator's kernel allocated together and freed."""
        yield copied_bytes(func, args, result, "cpu")

    def _own_tensors(self, values: Iterable[Any]) -> list[torch.Tensor]:
        return [
            plain
            for tensor in tensors_among(values)
            for plain in (plain_tensors(tensor) if has_own_handler((type(tensor),)) else (tensor,))
            if not is_foreign_fake(plain)
        ]

    def _decomposition(self, func: Any) -> Callable[..., Any] | None:
        """Return the operator's decomposition if it is composite, else None."""
        return functools.partial(call_composite, func) if is_composite(func) else None

    def _becomes_grad(self, tensor: torch.Tensor, phase: str) -> bool:
        """Return whether backward assigns this gradient to `.grad` without a copy."""
        leaf = self.context.leaf() if phase == "backward" else None
        return leaf is not None and leaf.shape == tensor.shape

    def _execute(self, func: Any, args: Any, kwargs: Any) -> Any:
        if self._dry_run is not None:
            return self._dry_run.execute(func, args, kwargs)
        # Autograd checks how many references the parts of a sparse gradient have.
        if func is aten.clone.default and self._becomes_sparse_grad(args[0]):
            return share_sparse_parts(args[0])
        return func(*args, **kwargs)

    def _becomes_sparse_grad(self, tensor: torch.Tensor) -> bool:
        """Return whether `.grad` shares the parts of this sparse gradient without the meter.

        Under the meter, autograd clones them.
        """
        return (
            tensor.layout is torch.sparse_coo
            and self.context.leaf() is not None
            and not torch.is_grad_enabled()
            and all(part.is_contiguous() for part in tensors_among((tensor,)))
        )

    def _record_input(self, tensor: torch.Tensor, phase: str) -> Storage:
        """Return the record of an operator's input; an unknown input is from before the step."""
        record = REGISTRY.find(tensor)
        is_found = record is None
        if record is None:
            if tensor.dim() == 0 and tensor.is_cpu and tensor.dtype in _PYTHON_SCALAR_DTYPES:
                return self._record_birth(tensor, "Python scalar", phase, [], [])
            record = self._stream.find(tensor)
        elif (was_unknown := self._scanner.first_use(record)) is not None:
            is_found = was_unknown
        elif record in self._stream:
            if record.category is None and isinstance(tensor, torch.nn.Parameter):
                # Otherwise `memlab run` would call gathered weights activations; `memlab measure`
                # knows the model.
                record.mark("parameters")  # FSDP has gathered them in this step
            return record
        else:
            self._stream.include(record, tensor)
        if isinstance(tensor, torch.nn.Parameter) or (tensor.requires_grad and tensor.is_leaf):
            record.mark("parameters")
        elif phase == "optimizer":
            record.mark("optimizer_state")
        elif is_found:
            record.mark("inputs")
        return record

    def _record_birth(
        self,
        tensor: torch.Tensor,
        func: Any,
        phase: str,
        inputs: list[Storage] | None,
        input_tensors: list[torch.Tensor],
    ) -> Storage:
        if func is aten.ones_like.default and called_by("_make_grads"):
            phase = "backward"  # the loss's own gradient
        record = REGISTRY.find(tensor) or REGISTRY.add(tensor, self._stream.run)
        record.operator, record.phase, record.module = func, phase, self.context.module()
        node = self.context.node()
        record.node = None if node is None else node._sequence_nr()
        if node is not None:
            self.nodes.add(node.name())
        record.line = (CompiledLayer.line or user_line()) if self._lines else None
        if phase == "backward" and self.context.leaf() is not None:
            record.mark("gradients")
        elif phase == "forward" and not self.context.in_module and _all_are_inputs(inputs):
            record.mark("inputs")
        birth = self._stream.add_birth(record)
        if not self._folding.hold(func, input_tensors, birth):
            self._on_birth(record)
        return record

    # ------------------------------------------------------------------ categories

    def _mark_buckets(self, sent: list[Storage]) -> None:
        """Mark DDP's buckets, which it allocates outside modules, where a batch is made too.

        A bucket is flat. Backward also sends saved activations, such as a sequence's shard.
        """
        for record in sent:
            if record.category in ("inputs", "activations") and len(record.shape) == 1:
                record.category = "workspace"

    def _on_root(self, root: torch.nn.Module) -> None:
        if self._subject_is_step:
            self._stream.run.set_subject(root)
            self._subject_is_step = False
        self._scanner.scan_model(root)

    def _on_first_step(self, optimizer: Any) -> None:
        self._scanner.scan_optimizer(optimizer)

    def _on_step_end(self, optimizer: Any) -> None:
        self._scanner.scan_state(optimizer)

    def _on_backward_start(self) -> None:
        self._mark_alive("forward", "activations")
        self._stream.births["forward"].clear()

    def _on_backward_end(self) -> None:
        """Mark the results of `torch.autograd.grad`, which never pass through `.grad`."""
        for record in self._stream.births["backward"]:
            if record.alive and self._scanner.is_parameter_sized(record):
                record.mark("gradients")
        self._stream.births["backward"].clear()

    def _mark_alive(self, phase: str, category: str) -> None:
        for record in self._stream.births[phase]:
            if record.alive:
                record.mark(category)


def _weak_callback(method: Callable[..., None]) -> Callable[..., None]:
    """Wrap a method without a reference cycle, which would keep the model alive."""
    reference = weakref.WeakMethod(method)
    return lambda *args: reference()(*args)  # type: ignore[misc] # only its owner calls it


def _ignore(record: Storage) -> None:
    pass


def _device(result: Any) -> torch.device:
    return next((tensor.device for tensor in tensors_among((result,))), torch.device("cpu"))


@functools.cache
def is_composite(func: Any) -> bool:
    """Return whether the operator is composite: other operators implement it, not a kernel."""
    name = func.name()
    return has_kernel(name, "CompositeImplicitAutograd") and not has_kernel(name, "CPU")


@functools.cache
def _is_mutable(func: Any) -> bool:
    return func._schema.is_mutable


def _all_are_inputs(records: list[Storage] | None) -> bool:
    """Return whether all records are inputs; False for None, compiled code's unknown inputs."""
    return records is not None and all(record.category == "inputs" for record in records)
