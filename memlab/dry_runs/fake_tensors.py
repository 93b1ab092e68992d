"""The dry run: tensors with a shape, a dtype and a size in bytes, but no memory.

torch's fake tensors use the same operators and the same autograd as real ones, so the meter sees
the same storages, and a step of a 7B model fits on a laptop. Everything else that a training loop
does is handled here:

    known values          literals, `torch.arange`, `torch.zeros`, tensors from outside, and
                          results computed from them have their real values (known_values.py)
    unknown values        depend on random numbers or weights. `loss.item()` and `f"{loss:.3f}"`
                          read 0.5, integers are 1, `if x.isnan().any()` is False, and `isfinite`
                          is True. Conditions for exceptions are false (validations.py). Integer
                          arithmetic starts from 1, so `data[i : i + 256]` has the right length;
                          a note names the line
    DataLoaders           draw the samples that a real one would (samplers.py)
    compiled code         runs as the code that Inductor generates (compiled.py)
    Triton kernels        do nothing; what they write is unknown (triton_launches.py)
    converting a model    `.to()`, `.half()`, `.cuda()`: parameters stay the same objects
    files of weights      give tensors in their shapes; the bytes stay unread (weight_files.py)
    accelerators          replaced by the CPU, with autocast and loss scaling (fake_accelerator.py)
    tensors from outside  are converted at their first operator, and not changed
    checks for fake tensors
                          return False in other libraries (fake_checks.py)
    shapes that depend on values (`x[x > 0]`)
                          are real if the values are known; otherwise an error names the line
"""

import operator
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from typing import Any, ClassVar, NoReturn

import numpy as np
import torch
from torch.optim import optimizer
from torch.overrides import TorchFunctionMode
from torch.utils.weak import WeakIdKeyDictionary

from memlab.dry_runs import (
    collectives,
    distributions,
    fake_accelerator,
    fake_checks,
    known_values,
    legacy_types,
    library_caches,
    readers,
    samplers,
    subclasses,
    triton_launches,
    weight_files,
)
from memlab.dry_runs.assumptions import ASSUMED, Assumptions
from memlab.dry_runs.collectives import COLLECTIVES, Collectives
from memlab.dry_runs.compiled import COMPILED, UNCOMPILED, Compiler
from memlab.dry_runs.endless import LoopGuard
from memlab.dry_runs.fake_kernels import KERNELS
from memlab.dry_runs.fake_results import FakeResults
from memlab.dry_runs.known_values import UNKNOWN
from memlab.dry_runs.loaders import Loaders
from memlab.dry_runs.oversized import enlarge
from memlab.dry_runs.routing import ASSUMED_ROUTING, Routing
from memlab.dry_runs.transfers import Transfer
from memlab.dry_runs.validations import valid_answer
from memlab.internals.threads import measurement, only_where_asked
from memlab.internals.torch_internals import (
    DataDependentOutputException,
    DisableTorchFunction,
    DynamicOutputShapeException,
    EnableTorchFunction,
    FakeTensor,
    FakeTensorMode,
    UnsupportedOperatorException,
    disable_fake_tensor_cache,
    exclude_frame_from_dynamo,
    exclude_from_dynamo,
    foreach_utils,
    get_current_dispatch_mode,
    get_current_function_mode_stack,
    has_compatible_shallow_copy_type,
    is_fake,
    is_traceable_wrapper_subclass,
    load_dynamos_rules,
    refuse_inside_compiled_code,
    tree_map_only,
    without_modes,
)
from memlab.metering.dry import DryRun
from memlab.metering.frames import user_line
from memlab.metering.modes import LightMode
from memlab.metering.tensors import has_own_handler
from memlab.units import format_bytes
from memlab.world.entering import Replacements, enter

aten = torch.ops.aten
STAND_IN_NOTE = (
    "the script uses an accelerator, but this dry run counts the memory of CPU kernels; use "
    "memlab.predict for CUDA (at the command line, --dry-run --device cuda)"
)


def is_assumption(note: str) -> bool:
    """Return whether a note says what a dry run assumed, which belongs in the first lines."""
    return note.startswith((ASSUMED, ASSUMED_ROUTING, COMPILED, UNCOMPILED))


Observer = Callable[[Any, Any, Any, Any], None]  # (func, args, kwargs, result)
# Integer arithmetic whose results may become sizes. If an unknown integer read as 1 at both ends,
# nanoGPT's `data[i : i + T]` would be empty: 36 MiB instead of 101
# (test_a_slice_with_an_unknown_start_has_the_right_length).
_INTEGER_OPS: dict[Any, Callable[..., Any]] = {
    aten.add.Tensor: operator.add,
    aten.sub.Tensor: operator.sub,
    aten.mul.Tensor: operator.mul,
    aten.rsub.Scalar: lambda a, b: b - a,
    aten.floor_divide.default: operator.floordiv,
    aten.remainder.Scalar: operator.mod,
    aten.neg.default: operator.neg,
    aten.clone.default: lambda a: a,
    aten._to_copy.default: lambda a: a,
}
# torch uses foreach kernels only for these tensor types.
_FOREACH_TYPES = (foreach_utils._foreach_supported_types, optimizer._foreach_supported_types)
_PRESERVES_TRUE = frozenset(
    {aten.all.default, aten.any.default, aten.logical_and.default, aten.bitwise_and.Tensor}
)
# torch's cache of fake results would keep the storage arguments of these operators alive.
# Dry peaks of offloaded activations were up to 7 % too high
# (test_a_storage_set_on_a_tensor_dies_with_the_tensor).
_STORAGE_ARGUMENT = frozenset({aten.set_.source_Storage, aten.set_.source_Storage_storage_offset})


class dry_run(DryRun):  # noqa: N801 - used as a function: `with memlab.dry_run():`
    """Make every tensor inside `with` fake: exact sizes, but no memory.

    Only values that depend on no random number and no weight are known. Build the model and its
    inputs inside. A model from outside also works: its gradients and its optimizer's state are
    restored at the end.

    The CPU replaces a GPU. Autocast uses the requested dtype, but the CPU's operator list, which
    keeps norms and softmax in that dtype where CUDA computes in float32. `torch.save` writes
    nothing.

    assume   the size of results that depends on values: "most" chooses every element, a fraction
             that part of them; by default such results raise ValueError (assumptions.py).
             "imbalance:2" gives the busiest expert of a mixture twice the average number of tokens;
             by default every expert gets the same number (routing.py)

    Raises RuntimeError if a dry run is already active, and ValueError, with the line, for unknown
    shapes and for questions that only a real device can answer.
    """

    _fake_kernels: ClassVar[dict[Any, Any]] = KERNELS
    _observer: Observer | None = None

    @exclude_from_dynamo
    def __init__(self, *others: object, assume: str | float | None = None) -> None:
        if others:
            raise TypeError(
                f"got dry_run({type(others[0]).__name__}); it takes no positional arguments: build "
                f"the model and measure a step inside `with memlab.dry_run():`"
            )
        self._assumptions = Assumptions(assume)
        self._routing = Routing(assume)

    @exclude_frame_from_dynamo
    def __enter__(self) -> "dry_run":
        refuse_inside_compiled_code("memlab.dry_run")
        if DryRun.active is not None:
            raise RuntimeError("a dry run is already active; use one `with dry_run()` at a time")
        with ExitStack() as stack:
            stack.enter_context(measurement())
            self._start(stack)
            self._started = stack.pop_all()
        return self

    @exclude_from_dynamo
    def _start(self, stack: ExitStack) -> None:
        """Start the dry run; what `stack` holds ends it, in reverse order."""
        stack.callback(self._end)
        DryRun.active = self
        fake_accelerator.StandIn.was_named = False
        self._outside = _OutsideTensors()
        stack.callback(self._outside.restore)
        self._fake_mode = _FakeTensorMode(allow_non_fake_inputs=True)
        self._fake_mode.create_symbolic_nested_int = _reject_jagged
        self._results = FakeResults(self._fake_mode)
        self._operators = _DispatchMode(self)
        self._functions = _FunctionMode()
        for mode in (self._fake_mode, self._functions, self._operators):
            stack.enter_context(mode)
        self._zeros = WeakIdKeyDictionary()  # the scaler's flags for infinities, read as 0
        self._true = WeakIdKeyDictionary()  # unknown bools that read as True, such as isfinite
        self._integers = WeakIdKeyDictionary()  # values of integers computed from unknown ones
        self.integer_reads: dict[str, None] = {}  # lines that read unknown integers, ordered
        self._collectives = Collectives()
        self._compiler = Compiler(
            self._fake_mode, _FunctionMode, self._compilers_stand_ins(), self._device_of_buffers
        )
        stack.callback(self._compiler.forget)
        self._loop_guard = LoopGuard()
        self._loaders = Loaders()
        # dynamo stops with "Duplicate torch object" if two functions with different rules are one
        # object, so each that does nothing is its own
        # (test_functions_that_do_nothing_are_not_the_same_one).
        load_dynamos_rules()  # before functions in it are replaced
        stack.enter_context(enter(self._stand_ins(), leave=self._leave()))
        for kinds in _FOREACH_TYPES:
            # torch's clipping and optimizers check for exact types before they use foreach kernels.
            kinds.append(FakeTensor)
            stack.callback(kinds.remove, FakeTensor)

    def _stand_ins(self) -> Replacements:
        """Return what the code finds in place of the machine's devices and of values."""
        return {
            **_STAND_INS,
            **legacy_types.stand_ins(),
            **collectives.stand_ins(),
            **weight_files.stand_ins(),
            **self._loaders.stand_ins(),
            "with_mode": self._with_function_mode,
            **self._compiler.stand_ins(),
        }

    def _leave(self) -> set[str]:
        """Return the modules of devices that the code finds as they are."""
        own = fake_accelerator.modules_of_this_machines()
        return {"torch.accelerator", "torch.accelerator.memory", *own}

    @property
    def transfers(self) -> list[Transfer]:
        """What collectives have sent to other ranks."""
        return self._collectives.transfers

    @exclude_from_dynamo
    def __exit__(self, *exception: Any) -> None:
        self._started.close()

    def _end(self) -> None:
        DryRun.active, DryRun.stream = None, 0

    def notes(self) -> tuple[str, ...]:
        """Return the assumptions behind the byte counts, one sentence each."""
        assumed, loaded = self._assumptions.notes(), self._loaders.notes()
        stands_in = fake_accelerator.StandIn.was_named and fake_accelerator.StandIn.device == "cpu"
        return (
            *([STAND_IN_NOTE] if stands_in else []),
            *self._compiler.notes(),
            *assumed,
            *self._routing.notes(),
            *self._integer_note(),
            *loaded,
        )

    def _integer_note(self) -> tuple[str, ...]:
        if not self.integer_reads:
            return ()
        first, *others = self.integer_reads
        more = f" and {len(others)} more" if others else ""
        return (
            f"{first}{more} reads an integer from a tensor whose values are unknown in a dry run, "
            f"because they depend on random numbers, weights or large tensors; it reads 1, so a "
            f"size computed from it would be wrong; compute sizes from shapes or Python integers",
        )

    def release_mode(self) -> bool:
        is_last = get_current_dispatch_mode() is self._operators
        if is_last:
            self._operators.__exit__(None, None, None)
        return is_last

    def reclaim_mode(self) -> None:
        self._operators.__enter__()

    @contextmanager
    def observed(self, observer: Observer) -> Iterator[None]:
        """Call `observer(func, args, kwargs, result)` after each operator inside `with`.

        A separate dispatch mode would change autograd's allocations.
        """
        self._observer = observer
        try:
            yield
        finally:
            self._observer = None

    def _compilers_stand_ins(self) -> Replacements:
        """Return what torch.compile's compilers find in place of the machine."""
        return {}

    def _device_of_buffers(self, device: str) -> torch.device:
        return torch.device(device)

    def _with_function_mode(self, run: Callable[..., Any]) -> Callable[..., Any]:
        """Keep the function mode active in backward, for hooks and recomputation, and in fake
        kernels of libraries, for `torch.empty(x.shape, device=x.device)`.

        `backward` and operators are overridable functions, so torch disables the mode inside them.
        """

        def running(*args: Any, **kwargs: Any) -> Any:
            if Compiler.is_compiling:
                return run(*args, **kwargs)
            with EnableTorchFunction():
                if self._functions in get_current_function_mode_stack():
                    return run(*args, **kwargs)
                with self._functions:
                    return run(*args, **kwargs)

        return running

    def tensor(self, tensor: torch.Tensor) -> torch.Tensor:
        if isinstance(tensor, FakeTensor):
            return tensor
        fake = self._outside.fakes.get(tensor)
        if fake is None:
            fake = self._outside.fakes[tensor] = self._fake_mode.from_tensor(tensor)
            known_values.borrow(fake, tensor)
            self._outside.note(tensor, self._fake_mode)
        return fake

    def owns(self, tensor: Any) -> bool:
        return tensor.fake_mode is self._fake_mode

    def arguments(self, func: Any, args: Any, kwargs: Any) -> tuple[Any, Any]:
        # `lift_fresh` gets a literal's real tensor
        if func is aten.lift_fresh.default or all(map(_is_fake, (*args, *kwargs.values()))):
            return args, kwargs
        return tree_map_only(torch.Tensor, self.tensor, (args, kwargs))

    def execute(self, func: Any, args: Any, kwargs: Any) -> Any:
        if kwargs.get("device") is not None:
            kwargs = {
                **kwargs,
                "device": torch.device(fake_accelerator.to_stand_in(kwargs["device"])),
            }
        is_collective = func.namespace in COLLECTIVES
        if is_collective and (done := self._collectives.run(func, args)) is not NotImplemented:
            return done
        if func in _PRESERVES_TRUE and any(_is_in(self._true, argument) for argument in args):
            with DisableTorchFunction():
                result = func(*args, **kwargs)
                known_values.propagate(func, args, kwargs, result)
            self._true[result] = True
            return result
        if func is aten._local_scalar_dense.default:
            return self._read(func, args, kwargs)
        if func is aten._amp_foreach_non_finite_check_and_unscale_.default:
            self._zeros[args[1]] = True
        try:
            result = self._fake_result(func, args, kwargs)
        except DataDependentOutputException:
            return self._read(func, args, kwargs)
        except DynamicOutputShapeException as error:
            result = self._data_dependent_shape(func, args, kwargs, error)
        except UnsupportedOperatorException as error:
            raise ValueError(
                f"{user_line()}: {func} has no fake kernel, or one that makes a tensor on a GPU by "
                f"name; register one with torch.library.register_fake that returns, for example, "
                f"torch.empty_like(x)"
            ) from error
        if func in _INTEGER_OPS and _is_integer_scalar(result):
            self._compute_integer(func, args, kwargs, result)
        if is_collective:
            self._collectives.keep(result)
        if self._observer is not None:
            self._observer(func, args, kwargs, result)
        return result

    def _fake_result(self, func: Any, args: Any, kwargs: Any) -> Any:
        with DisableTorchFunction():  # _FunctionMode would slow down every attribute access
            if func in _STORAGE_ARGUMENT:
                with disable_fake_tensor_cache(self._fake_mode):
                    result = func(*args, **kwargs)
            elif func is aten.lift_fresh.default and type(args[0]) is torch.Tensor:
                result = self._results.lifted(args[0])
            elif kernel := self._fake_kernels.get(func):
                result = kernel(*args, **kwargs)
            else:
                result = self._results.run(func, args, kwargs)
            if isinstance(result, FakeTensor) and result.layout is not torch.strided:
                raise ValueError(
                    f"{user_line()}: {func} makes a sparse tensor, whose size depends on unknown "
                    f"values; use the dense form, such as Embedding(sparse=False)"
                )
            enlarge(func, args, result)
            known_values.propagate(func, args, kwargs, result)
            if func is aten.topk.default:
                self._routing.assume(args[0], result[1])
        return result

    def _data_dependent_shape(self, func: Any, args: Any, kwargs: Any, error: Exception) -> Any:
        with DisableTorchFunction():
            result = known_values.fake_result(func, args, kwargs)
            if result is not UNKNOWN and known_values.is_assumed((*args, *kwargs.values())):
                self._routing.note_use()
            if result is UNKNOWN:
                result = self._assumptions.result(func, args, kwargs)
        if result is None:
            raise ValueError(
                f"{user_line()}: the shape of {func}'s result depends on values, which are unknown "
                f"in a dry run; use a fixed shape, for example with torch.where or masked_fill "
                f"instead of x[mask]{self._assumptions.remedy(func)}"
            ) from error
        return result

    def _read(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Return the result of an operator that reads values."""
        with DisableTorchFunction():
            result = known_values.compute(func, args, kwargs)
            may_be_a_size = type(result) is int
            if may_be_a_size and known_values.is_assumed((*args, *kwargs.values())):
                self._routing.note_use()
        return self._answer(func, *args) if result is UNKNOWN else result

    def _compute_integer(self, func: Any, args: Any, kwargs: Any, result: torch.Tensor) -> None:
        """Compute an integer result, so that `data[i : i + 256]` has 256 elements for unknown i."""
        numbers = [self._integer_value(x) if isinstance(x, torch.Tensor) else x for x in args]
        if len(numbers) > 1:
            numbers[1] *= kwargs.get("alpha", 1)
        with suppress(ZeroDivisionError, ValueError, TypeError):
            self._integers[result] = int(_INTEGER_OPS[func](*numbers[:2]))

    def _integer_value(self, tensor: torch.Tensor) -> int:
        known = known_values.compute(aten._local_scalar_dense.default, (tensor,), {})
        return self._integers.get(tensor, 1) if known is UNKNOWN else int(known)

    def _answer(self, func: Any, tensor: torch.Tensor, *others: Any) -> bool | int | float:
        if func in (aten.equal.default, aten.allclose.default):
            return True
        if func not in (aten._local_scalar_dense.default, aten.item.default):
            raise ValueError(
                f"{user_line()}: {func} reads values, which are unknown in a dry run; remove the "
                f"call, or measure a real step"
            )
        if tensor.dtype == torch.bool:
            answer = valid_answer()
            if answer is None:
                answer = tensor in self._true
                self._loop_guard.count(answer)
            return answer
        if not tensor.dtype.is_floating_point:
            if not samplers.is_loader_seed():
                self.integer_reads[user_line()] = None
            return self._integers.get(tensor, 1)
        # Not 1.0, by which NAdam would divide by 1 − 1.0.
        return 0.0 if tensor in self._zeros else 0.5


class _FakeTensorMode(FakeTensorMode):
    """torch's mode, which does not stop the compilation of functions in other threads."""

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        return True


class _OutsideTensors:
    """Restore tensors and optimizers from outside the dry run."""

    def __init__(self) -> None:
        self.fakes = WeakIdKeyDictionary()  # real tensor to fake tensor
        self._gradients = WeakIdKeyDictionary()
        self._states: list[tuple[torch.optim.Optimizer, dict[Any, Any]]] = []
        note_state = only_where_asked(self._note_state)
        self._hook = optimizer.register_optimizer_step_pre_hook(note_state)

    def note(self, tensor: torch.Tensor, fake_mode: FakeTensorMode) -> None:
        """Replace a leaf's gradient by a fake one with the same lifetime."""
        if tensor.requires_grad and tensor.is_leaf:
            self._gradients[tensor] = tensor.grad
            if tensor.grad is not None:
                tensor.grad = fake_mode.from_tensor(tensor.grad)
                self.fakes[tensor].grad = None

    def restore(self) -> None:
        self._hook.remove()
        for tensor, gradient in self._gradients.items():
            tensor.grad = gradient
        for stepped, state in self._states:
            stepped.state.clear()
            stepped.state.update(state)
        _OutsideTensors.__init__(self)  # drop the references
        self._hook.remove()

    def _note_state(self, stepping: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        if isinstance(stepping, torch.optim.LBFGS):
            raise ValueError(
                f"{user_line()}: LBFGS's evaluations and state depend on values, which are unknown "
                f"in a dry run; measure a real step of a smaller model"
            )
        parameters = (p for group in stepping.param_groups for p in group["params"])
        known = any(stepping is other for other, _ in self._states)
        if not known and not all(map(_is_fake, parameters)):
            state = {parameter: dict(values) for parameter, values in stepping.state.items()}
            self._states.append((stepping, state))


class _DispatchMode(LightMode):
    """Pass operators to the dry run."""

    def __init__(self, owner: dry_run) -> None:
        super().__init__()
        self._owner = owner

    def handle(self, func: Any, types: Any, args: Any, kwargs: Any) -> Any:
        if has_own_handler(types):
            return NotImplemented
        return self._owner.execute(func, *self._owner.arguments(func, args, kwargs))


class _FunctionMode(TorchFunctionMode):
    """Replace Python functions that do not work on fake tensors."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if answer := _FUNCTIONS.get(func):
            return answer(*args, **kwargs)
        if kwargs.get("device") is not None:
            kwargs = {**kwargs, "device": fake_accelerator.to_stand_in(kwargs["device"])}
        return func(*args, **kwargs)


def _reject_jagged(*args: Any, **options: Any) -> NoReturn:
    raise ValueError(
        f"{user_line()}: a dry run does not support nested tensors with layout jagged; pad the "
        f"sequences, or measure a real step"
    )


def _format(tensor: torch.Tensor, spec: str) -> str:
    return format(tensor.item() if tensor.dim() == 0 else repr(tensor), spec)


def _one_hot(index: torch.Tensor, num_classes: int = -1) -> torch.Tensor:
    """Scatter into zeros, as for real tensors; for fake ones, torch compares with a range."""
    if num_classes == -1 or index.device.type == "cpu":  # where the real one checks the bounds
        bounds = torch.aminmax(index)
        if num_classes == -1:
            if not known_values.is_known(bounds.max):
                raise ValueError(
                    f"{user_line()}: without num_classes, the shape of one_hot depends on values, "
                    f"which are unknown in a dry run; pass num_classes"
                )
            num_classes = int(bounds.max) + 1
        del bounds
    result = torch.zeros((*index.shape, num_classes), dtype=torch.long, device=index.device)
    return result.scatter_(-1, index.unsqueeze(-1), 1)


def _deepcopy(tensor: torch.Tensor, memo: dict[int, Any]) -> torch.Tensor:
    """Copy a tensor with a new storage; torch's version reads the address of the storage."""
    if id(tensor) not in memo:
        copy = tensor.detach().clone()
        if isinstance(tensor, torch.nn.Parameter):
            copy = torch.nn.Parameter(copy, tensor.requires_grad)
        memo[id(tensor)] = copy.requires_grad_(tensor.requires_grad)
    return memo[id(tensor)]


def _set_data(tensor: torch.Tensor, data: torch.Tensor) -> None:
    """Set `tensor.data`, and the device, which a fake tensor stores separately."""
    with DisableTorchFunction():
        tensor.data = data
    if isinstance(tensor, FakeTensor) and isinstance(data, FakeTensor):
        tensor.fake_device = data.fake_device


def _isfinite(tensor: torch.Tensor) -> torch.Tensor:
    result = torch.isfinite(tensor)
    active: Any = dry_run.active
    # For `if not torch.isfinite(loss): raise` (test_a_guard_against_non_finite_losses_passes).
    active._true[result] = True
    return result


_LARGE_ARRAY = 2**30  # bytes


def _numpy(tensor: torch.Tensor, **kwargs: Any) -> np.ndarray:
    """Return the known values in shared memory, or an array filled with the answer of `.item()`."""
    if known_values.make_writable(tensor):
        return known_values.as_array(tensor, known_values.real(tensor))
    if tensor.nbytes >= _LARGE_ARRAY:
        warnings.warn(
            f"a tensor of {format_bytes(tensor.nbytes)} becomes an array in the host's memory, "
            f"also in this dry run",
            stacklevel=2,
        )
    active: Any = dry_run.active
    number = active._answer(aten.item.default, tensor)
    with without_modes():
        made_up = torch.full(tensor.shape, number, dtype=tensor.dtype)
    return known_values.as_array(tensor, made_up)


def _array(tensor: torch.Tensor, dtype: Any = None) -> np.ndarray:
    """Support `numpy.asarray`."""
    array = _numpy(tensor)
    return array if dtype is None else array.astype(dtype, copy=False)


def _tolist(by_elements: Callable[[FakeTensor], Any]) -> Callable[[FakeTensor], Any]:
    """Read an unknown tensor's first element, and repeat it: all would read as the same number."""

    def tolist(tensor: FakeTensor) -> Any:
        if known_values.is_known(tensor):
            return known_values.as_list(tensor)
        if tensor.dim() == 0 or not tensor.numel():
            return by_elements(tensor)
        return _repeated(tensor[(0,) * tensor.dim()].item(), tensor.shape)

    return tolist


def _repeated(number: Any, shape: torch.Size) -> Any:
    return [_repeated(number, shape[1:]) for _ in range(shape[0])] if shape else number


_FUNCTIONS: dict[Any, Callable[..., Any]] = {
    **fake_accelerator.FUNCTIONS,
    **legacy_types.FUNCTIONS,
    **readers.FUNCTIONS,
    **subclasses.FUNCTIONS,
    **weight_files.FUNCTIONS,
    torch.Tensor.__format__: _format,
    torch.Tensor.__deepcopy__: _deepcopy,
    torch.Tensor.data.__set__: _set_data,  # type: ignore[attr-defined]  # a property
    torch.Tensor.numpy: _numpy,
    torch.Tensor.__array__: _array,
    torch.Tensor.isfinite: _isfinite,
    torch.isfinite: _isfinite,
    torch.nn.functional.one_hot: _one_hot,
}


def _is_in(tensors: WeakIdKeyDictionary, argument: Any) -> bool:
    return isinstance(argument, torch.Tensor) and argument in tensors


def _is_integer_scalar(result: Any) -> bool:
    return (
        isinstance(result, torch.Tensor)
        and result.numel() == 1
        and result.dtype in (torch.int64, torch.int32)
    )


def _is_fake(argument: Any) -> bool:
    """Return whether an operator's argument has no real tensors."""
    if isinstance(argument, torch.Tensor):
        return isinstance(argument, FakeTensor)
    return not isinstance(argument, (list, tuple)) or all(map(_is_fake, argument))


@torch.no_grad()
def _apply_by_data(module: torch.nn.Module, fn: Callable[..., Any], recurse: bool = True) -> Any:
    """`Module._apply` as for real tensors: each parameter stays the same object.

    torch swaps fake parameters with new ones, which fails if the old ones have other references.
    """
    if recurse:
        for child in module.children():
            child._apply(fn)
    for name, parameter in module._parameters.items():
        if parameter is None:
            continue
        if not is_fake(parameter):
            raise ValueError(
                f"got {type(module).__name__} with real weights, built outside the dry run or in "
                f"another thread; converting it here would change the real module; build or load "
                f"it inside the dry run, or convert it before"
            )
        converted = made = fn(parameter)
        if is_traceable_wrapper_subclass(made):  # as torch does
            converted = torch.nn.Parameter(converted, parameter.requires_grad)
            torch.utils.swap_tensors(parameter, converted)
            continue
        if not has_compatible_shallow_copy_type(parameter, converted):
            module._parameters[name] = torch.nn.Parameter(converted, parameter.requires_grad)
            continue
        _set_data(parameter, converted)
        if parameter.grad is not None:
            _set_data(parameter.grad, fn(parameter.grad.data))
    for name, buffer in module._buffers.items():
        if buffer is not None:
            module._buffers[name] = fn(buffer)
    return module


_STAND_INS: Replacements = {
    **fake_accelerator.STAND_INS,
    **fake_checks.STAND_INS,
    **distributions.STAND_INS,
    **samplers.STAND_INS,
    **subclasses.STAND_INS,
    **library_caches.STAND_INS,
    **triton_launches.STAND_INS,
    "apply": lambda real: _apply_by_data,
    "tolist": _tolist,
    "true": lambda real: True,
}
