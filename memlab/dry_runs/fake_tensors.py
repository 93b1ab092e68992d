"""The dry run: tensors that have a shape, a dtype and a size in bytes, and no memory.

torch's fake tensors go through the same operators and the same autograd as real ones, so the
meter sees the same storages, and a 7B step fits into a laptop. What a training loop does besides
calling operators is answered here:

    reading a known value the real one: literals, `torch.arange`, `torch.zeros`, tensors from
                          outside, and what is computed from them (known_values.py)
    reading an unknown value
                          it depends on random numbers or weights. `loss.item()`, `f"{loss:.3f}"`,
                          `if x.isnan().any()`: 0.5, 1 or False; `isfinite` is True. A condition
                          under which an exception is raised does not hold (validations.py).
                          Integers are computed from 1, so `data[i : i + 256]` has the right
                          length; a note names the line
    a DataLoader          draws the samples that a real one would (samplers.py)
    compiled code         runs uncompiled
    converting a model    `.to()`, `.half()`, `.cuda()`: parameters keep their identity
    an accelerator        the CPU stands in, in autocast and loss scaling too (fake_accelerator.py)
    tensors from outside  converted when they meet the first operator, and left as they were
    whether a tensor is fake
                          no, where a library asks (fake_checks.py)
    a shape that depends on values (`x[x > 0]`)
                          the real one where the values are known, else one sentence that names
                          the line
"""

import logging
import operator
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any, NoReturn

import numpy as np
import torch
from torch.optim import optimizer
from torch.overrides import TorchFunctionMode
from torch.utils.weak import WeakIdKeyDictionary

from memlab.dry_runs import (
    collectives,
    fake_accelerator,
    fake_checks,
    known_values,
    readers,
    samplers,
)
from memlab.dry_runs.assumptions import Assumptions
from memlab.dry_runs.collectives import done, is_collective
from memlab.dry_runs.endless import Patience
from memlab.dry_runs.fake_kernels import KERNELS
from memlab.dry_runs.known_values import UNKNOWN
from memlab.dry_runs.loaders import Loaders
from memlab.dry_runs.oversized import enlarge
from memlab.dry_runs.validations import valid_answer
from memlab.internals.replacing import replaced
from memlab.internals.torch_internals import (
    DataDependentOutputException,
    DisableTorchFunction,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
    disable_fake_tensor_cache,
    eval_frame,
    foreach_utils,
    get_current_dispatch_mode,
    get_current_function_mode_stack,
    has_compatible_shallow_copy_type,
    load_dynamos_rules,
    tree_map_only,
)
from memlab.metering.dry import DryRun
from memlab.metering.frames import user_line
from memlab.metering.modes import LightMode
from memlab.metering.tensors import has_a_handler_of_its_own

aten = torch.ops.aten
STAND_IN_NOTE = (
    "the script asks for an accelerator, and this dry run counts what the CPU's kernels take; "
    "memlab.predict counts CUDA's (at the command line, --dry-run --device cuda)"
)
UNCOMPILED = (
    "what torch.compile compiles is counted as it runs uncompiled: an upper bound, as a rule, for "
    "compiled code keeps less; memlab.measure of a real step counts what it does take"
)
_LOG = logging.getLogger("torch._subclasses.fake_tensor")
Observer = Callable[[Any, Any, Any, Any], None]  # of an operator, its arguments and its result
# What is reckoned with whole numbers on the way to a size.
_WHOLE: dict[Any, Callable[..., Any]] = {
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
# torch looks here whether it may work on a list of tensors at once, as it does on real ones.
_KINDS_WITH_FOREACH = (foreach_utils._foreach_supported_types, optimizer._foreach_supported_types)
_KEEPS_TRUTH = frozenset(
    {aten.all.default, aten.any.default, aten.logical_and.default, aten.bitwise_and.Tensor}
)


# torch remembers an operator's arguments beside its result: a storage would live as long as that.
_TAKES_A_STORAGE = frozenset({aten.set_.source_Storage, aten.set_.source_Storage_storage_offset})


class dry_run(DryRun):  # noqa: N801 - used as a function: `with memlab.dry_run():`
    """Make every tensor inside `with` fake: exact bytes, no memory, and values only where they
    depend on no random number and no weight.

    Build the model and its inputs inside. A model from outside works too and is left untouched:
    its gradients and its optimizer's state are put back at the end. A script for a GPU runs
    without one: the CPU stands in, with autocast in the dtype that was asked for and the CPU's own
    list of operators, which leaves normalizations and softmax in it where CUDA takes float32.
    `torch.save` writes nothing. A size that depends on values is refused, or taken by `assume`:
    "most" where every element is chosen, or a fraction of them (assumptions.py). Raises
    RuntimeError when a dry run is active already, ValueError (with the line) for a shape that
    depends on values and for what only a device knows.
    """

    _fake_kernels = KERNELS
    _observer: Observer | None = None

    def __init__(self, *others: object, assume: str | float | None = None) -> None:
        if others:
            raise TypeError(
                f"got dry_run({type(others[0]).__name__}); it takes no function: build the model "
                f"and measure a step inside `with memlab.dry_run():`"
            )
        self._assumptions = Assumptions(assume)

    def __enter__(self) -> "dry_run":
        if DryRun.active is not None:
            raise RuntimeError("a dry run is active already; use one `with dry_run()` at a time")
        DryRun.active = self
        fake_accelerator.StandIn.asked_for = False
        self._outside = _Outside()
        self._fake_mode = FakeTensorMode(allow_non_fake_inputs=True)
        self._fake_mode.create_symbolic_nested_int = _refuse_jagged
        self._operators = _Operators(self)
        self._functions = _Functions()
        self._modes = (self._fake_mode, self._functions, self._operators)
        for mode in self._modes:
            mode.__enter__()
        self._zeros = WeakIdKeyDictionary()  # counts of infinities: a dry run finds none
        self._true = WeakIdKeyDictionary()  # answers that are True: all is finite in a dry run
        self._whole = WeakIdKeyDictionary()  # numbers reckoned from whole ones, which are 1
        self.whole_numbers_read: dict[str, None] = {}  # the lines where, in order
        self._is_uncompiled = False  # whether something was to run compiled
        self._patience = Patience()
        self._loaders = Loaders()
        self._stance = torch.compiler.set_stance("force_eager")  # compiled kernels want addresses
        self._stance.__enter__()
        load_dynamos_rules()  # before functions in it are replaced
        own = {
            (torch.autograd, "_engine_run_backward"): self._with_functions,
            (_LOG, "disabled"): lambda real: True,  # what the user's error says is said by itself
            (eval_frame(), "_callback_from_stance"): self._noting_what_is_compiled,
        }
        parts = (fake_accelerator, fake_checks, collectives, samplers, self._loaders)
        replacements = {key: new for part in parts for key, new in part.replacements().items()}
        self._replaced = replaced({**_REPLACEMENTS, **own, **replacements})
        self._replaced.__enter__()
        for kinds in _KINDS_WITH_FOREACH:
            kinds.append(FakeTensor)
        return self

    def __exit__(self, *exception: Any) -> None:
        self._replaced.__exit__(None, None, None)
        self._stance.__exit__(*exception)
        for kinds in _KINDS_WITH_FOREACH:
            kinds.remove(FakeTensor)
        for mode in reversed(self._modes):
            mode.__exit__(*exception)
        self._outside.restore()
        DryRun.active = None

    def notes(self) -> tuple[str, ...]:
        """What it had to make up, where bytes may depend on that."""
        assumed, loaded = self._assumptions.notes(), self._loaders.notes()
        stands_in = fake_accelerator.StandIn.asked_for and fake_accelerator.StandIn.device == "cpu"
        return (
            *([STAND_IN_NOTE] if stands_in else []),
            *([UNCOMPILED] if self._is_uncompiled else []),
            *assumed,
            *self._note_of_whole_numbers(),
            *loaded,
        )

    def _note_of_whole_numbers(self) -> tuple[str, ...]:
        if not self.whole_numbers_read:
            return ()
        first, *others = self.whole_numbers_read
        more = f" and {len(others)} more" if others else ""
        return (
            f"{first}{more} reads an integer from a tensor whose values a dry run does not know, "
            f"because they depend on random numbers, on weights or on large tensors; it answers 1, "
            f"so a size computed from it would be wrong; take sizes from shapes or Python numbers",
        )

    def step_aside(self) -> bool:
        """Let a meter that is about to start call `arguments` and `execute` itself, which saves
        a mode; False if something else has started in between."""
        is_last = get_current_dispatch_mode() is self._operators
        if is_last:
            self._operators.__exit__(None, None, None)
        return is_last

    def step_back(self) -> None:
        """The opposite of `step_aside`."""
        self._operators.__enter__()

    @contextmanager
    def observed(self, observer: Observer) -> Iterator[None]:
        """Inside, `observer(func, args, kwargs, result)` is told of each operator when it has run.

        A mode of its own would be seen by autograd, which then allocates otherwise.
        """
        self._observer = observer
        try:
            yield
        finally:
            self._observer = None

    def _noting_what_is_compiled(self, choose: Callable[[Any], Any]) -> Callable[[Any], Any]:
        """Whenever a compiled function is called, Dynamo asks for its compiler."""

        def choosing(compiler: Any) -> Any:
            self._is_uncompiled |= compiler is not None and compiler is not False
            return choose(compiler)

        return choosing

    def _with_functions(self, run: Callable[..., Any]) -> Callable[..., Any]:
        """Hooks and what is recomputed in backward call functions, too; torch takes the mode away
        for as long as `backward`, itself such a function, runs."""

        def running(*args: Any, **kwargs: Any) -> Any:
            if self._functions in get_current_function_mode_stack():
                return run(*args, **kwargs)
            with self._functions:
                return run(*args, **kwargs)

        return running

    def tensor(self, tensor: torch.Tensor) -> torch.Tensor:
        """The fake twin of a tensor made outside; the same one each time."""
        if isinstance(tensor, FakeTensor):
            return tensor
        twin = self._outside.twins.get(tensor)
        if twin is None:
            twin = self._outside.twins[tensor] = self._fake_mode.from_tensor(tensor)
            known_values.borrow(twin, tensor)
            self._outside.note(tensor, self._fake_mode)
        return twin

    def owns(self, tensor: torch.Tensor) -> bool:
        return tensor.fake_mode is self._fake_mode

    def arguments(self, func: Any, args: Any, kwargs: Any) -> tuple[Any, Any]:
        """An operator's arguments, with every tensor fake; not those of `lift_fresh`, through
        which a literal comes in."""
        if func is aten.lift_fresh.default or all(map(_is_fake, (*args, *kwargs.values()))):
            return args, kwargs
        return tree_map_only(torch.Tensor, self.tensor, (args, kwargs))

    def execute(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Run an operator on fake tensors, answering what they cannot."""
        if kwargs.get("device") is not None:
            kwargs = {
                **kwargs,
                "device": torch.device(fake_accelerator.on_the_stand_in(kwargs["device"])),
            }
        if is_collective(func):
            return done(func, args)
        if func in _KEEPS_TRUTH and any(_is_in(self._true, argument) for argument in args):
            with DisableTorchFunction():
                result = func(*args, **kwargs)
                known_values.follow(func, args, kwargs, result)
            self._true[result] = True
            return result
        if func is aten._amp_foreach_non_finite_check_and_unscale_.default:
            self._zeros[args[1]] = True
        try:
            with DisableTorchFunction():  # of _Functions, which costs at every attribute
                if func in _TAKES_A_STORAGE:
                    with disable_fake_tensor_cache(self._fake_mode):
                        result = func(*args, **kwargs)
                else:
                    result = self._fake_kernels.get(func, func)(*args, **kwargs)
                enlarge(func, args, result)
                known_values.follow(func, args, kwargs, result)
        except DataDependentOutputException:
            return self._read(func, args, kwargs)
        except DynamicOutputShapeException as error:
            result = self._shaped_by_values(func, args, kwargs, error)

        if isinstance(result, FakeTensor) and result.layout is not torch.strided:
            raise ValueError(
                f"{user_line()}: {func} makes a sparse tensor, whose size depends on values, and a "
                f"dry run has none; use the dense form, such as Embedding(sparse=False)"
            )
        if func in _WHOLE and _is_whole_number(result):
            self._reckon(func, args, kwargs, result)
        if self._observer is not None:
            self._observer(func, args, kwargs, result)
        return result

    def _shaped_by_values(self, func: Any, args: Any, kwargs: Any, error: Exception) -> Any:
        with DisableTorchFunction():
            result = known_values.with_values(func, args, kwargs)
            if result is UNKNOWN:
                result = self._assumptions.result(func, args, kwargs)
        if result is None:
            raise ValueError(
                f"{user_line()}: the shape of {func}'s result depends on values that a dry run "
                f"does not know; give it a fixed shape, for example with torch.where or "
                f"masked_fill in place of x[mask]{self._assumptions.remedy(func)}"
            ) from error
        return result

    def _read(self, func: Any, args: Any, kwargs: Any) -> Any:
        """The result of an operator that reads values."""
        with DisableTorchFunction():
            result = known_values.compute(func, args, kwargs)
        return self._answer(func, *args) if result is UNKNOWN else result

    def _reckon(self, func: Any, args: Any, kwargs: Any, result: torch.Tensor) -> None:
        """So that `data[i : i + 256]` has 256 numbers, whatever i is."""
        numbers = [self._whole_number(x) if isinstance(x, torch.Tensor) else x for x in args]
        if len(numbers) > 1:
            numbers[1] *= kwargs.get("alpha", 1)
        with suppress(ZeroDivisionError, ValueError, TypeError):
            self._whole[result] = int(_WHOLE[func](*numbers[:2]))

    def _whole_number(self, tensor: torch.Tensor) -> int:
        known = known_values.compute(aten._local_scalar_dense.default, (tensor,), {})
        return self._whole.get(tensor, 1) if known is UNKNOWN else int(known)

    def _answer(self, func: Any, tensor: torch.Tensor, *others: Any) -> bool | int | float:
        if func in (aten.equal.default, aten.allclose.default):
            return True
        if func not in (aten._local_scalar_dense.default, aten.item.default):
            raise ValueError(f"{user_line()}: {func} reads values that a dry run does not know")
        if tensor.dtype == torch.bool:
            answer = valid_answer()
            if answer is None:
                answer = tensor in self._true
                self._patience.round(answer)
            return answer
        if not tensor.dtype.is_floating_point:
            if not samplers.read_by_a_loader():
                self.whole_numbers_read[user_line()] = None
            return self._whole.get(tensor, 1)
        return 0.0 if tensor in self._zeros else 0.5


class _Outside:
    """What a dry run changes on tensors and optimizers made outside, to put it back."""

    def __init__(self) -> None:
        self.twins = WeakIdKeyDictionary()  # tensor: its fake, which lives as long
        self._gradients = WeakIdKeyDictionary()
        self._states: list[tuple[torch.optim.Optimizer, dict[Any, Any]]] = []
        self._hook = optimizer.register_optimizer_step_pre_hook(self._note_state)

    def note(self, tensor: torch.Tensor, fake_mode: FakeTensorMode) -> None:
        """Give a leaf a fake gradient in place of its real one, which dies as that would."""
        if tensor.requires_grad and tensor.is_leaf:
            self._gradients[tensor] = tensor.grad
            if tensor.grad is not None:
                tensor.grad = fake_mode.from_tensor(tensor.grad)
                self.twins[tensor].grad = None

    def restore(self) -> None:
        self._hook.remove()
        for tensor, gradient in self._gradients.items():
            tensor.grad = gradient
        for stepped, state in self._states:
            stepped.state.clear()
            stepped.state.update(state)
        self.__init__()  # and let go of all of it
        self._hook.remove()

    def _note_state(self, stepping: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        if isinstance(stepping, torch.optim.LBFGS):
            raise ValueError(
                f"{user_line()}: how often LBFGS evaluates the loss, and what it keeps, depends on "
                f"values, and a dry run has none; measure a real step of a smaller model"
            )
        parameters = (p for group in stepping.param_groups for p in group["params"])
        known = any(stepping is other for other, _ in self._states)
        if not known and not all(map(_is_fake, parameters)):
            state = {parameter: dict(values) for parameter, values in stepping.state.items()}
            self._states.append((stepping, state))


class _Operators(LightMode):
    """Hands the operators to the dry run."""

    def __init__(self, owner: dry_run) -> None:
        super().__init__()
        self._owner = owner

    def handle(self, func: Any, types: Any, args: Any, kwargs: Any) -> Any:
        if has_a_handler_of_its_own(types):
            return NotImplemented
        return self._owner.execute(func, *self._owner.arguments(func, args, kwargs))


class _Functions(TorchFunctionMode):
    """Answers the functions that act before any operator is called."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        answer = _FUNCTIONS.get(func)
        return (answer or func)(*args, **(kwargs or {}))


def _refuse_jagged(*args: Any, **options: Any) -> NoReturn:
    raise ValueError(
        f"{user_line()}: a dry run does not follow the lengths in a nested tensor of layout "
        f"jagged; pad the sequences, or measure a real step"
    )


def _format(tensor: torch.Tensor, spec: str) -> str:
    return format(tensor.item() if tensor.dim() == 0 else repr(tensor), spec)


def _one_hot(index: torch.Tensor, num_classes: int = -1) -> torch.Tensor:
    """As on real tensors, a scatter into zeros; on fake ones torch compares with a range."""
    bounds = torch.aminmax(index)  # which the real one checks
    if num_classes == -1:
        if not known_values.is_known(bounds.max):
            raise ValueError(
                f"{user_line()}: one_hot without num_classes has a shape that depends on values "
                f"that a dry run does not know; pass num_classes"
            )
        num_classes = int(bounds.max) + 1
    del bounds
    result = torch.zeros((*index.shape, num_classes), dtype=torch.long)
    return result.scatter_(-1, index.unsqueeze(-1), 1)


def _deepcopy(tensor: torch.Tensor, memo: dict[int, Any]) -> torch.Tensor:
    """A copy with a storage of its own; torch's would read the address of a fake one."""
    if id(tensor) not in memo:
        copy = tensor.detach().clone()
        if isinstance(tensor, torch.nn.Parameter):
            copy = torch.nn.Parameter(copy, tensor.requires_grad)
        memo[id(tensor)] = copy.requires_grad_(tensor.requires_grad)
    return memo[id(tensor)]


def _set_data(tensor: torch.Tensor, data: torch.Tensor) -> None:
    """`tensor.data = data`, and the device with it, which a fake tensor keeps beside its data."""
    with DisableTorchFunction():
        tensor.data = data
    if isinstance(tensor, FakeTensor) and isinstance(data, FakeTensor):
        tensor.fake_device = data.fake_device


def _isfinite(tensor: torch.Tensor) -> torch.Tensor:
    result = torch.isfinite(tensor)
    dry_run.active._true[result] = True
    return result


def _numpy(tensor: torch.Tensor, **kwargs: Any) -> np.ndarray:
    """The tensor's values, in memory that it shares; else an array of what `.item()` reads."""
    if known_values.writable(tensor):
        return known_values.as_array(tensor, known_values.real(tensor))
    number = dry_run.active._answer(aten.item.default, tensor)
    with known_values.unseen():
        made_up = torch.full(tensor.shape, number, dtype=tensor.dtype)
    return known_values.as_array(tensor, made_up)


def _array(tensor: torch.Tensor, dtype: Any = None) -> np.ndarray:
    """What `numpy.asarray` asks for."""
    array = _numpy(tensor)
    return array if dtype is None else array.astype(dtype, copy=False)


def _tolist(by_elements: Callable[[FakeTensor], Any]) -> Callable[[FakeTensor], Any]:
    def tolist(tensor: FakeTensor) -> Any:
        known = known_values.is_known(tensor)
        return known_values.as_list(tensor) if known else by_elements(tensor)

    return tolist


_FUNCTIONS: dict[Any, Callable[..., Any]] = {
    **fake_accelerator.FUNCTIONS,
    **readers.FUNCTIONS,
    torch.Tensor.__format__: _format,
    torch.Tensor.__deepcopy__: _deepcopy,
    torch.Tensor.data.__set__: _set_data,
    torch.Tensor.numpy: _numpy,
    torch.Tensor.__array__: _array,
    torch.Tensor.isfinite: _isfinite,
    torch.isfinite: _isfinite,
    torch.nn.functional.one_hot: _one_hot,
}


def _is_in(tensors: WeakIdKeyDictionary, argument: Any) -> bool:
    return isinstance(argument, torch.Tensor) and argument in tensors


def _is_whole_number(result: Any) -> bool:
    return (
        isinstance(result, torch.Tensor)
        and result.numel() == 1
        and result.dtype in (torch.int64, torch.int32)
    )


def _is_fake(argument: Any) -> bool:
    """Whether an operator's argument holds no real tensor."""
    if isinstance(argument, torch.Tensor):
        return isinstance(argument, FakeTensor)
    return not isinstance(argument, (list, tuple)) or all(map(_is_fake, argument))


@torch.no_grad()
def _apply_by_data(module: torch.nn.Module, fn: Callable[..., Any], recurse: bool = True) -> Any:
    """`Module._apply` as on real tensors: each parameter stays the same object.

    torch would swap fake parameters for new ones, and refuses where something refers to the old.
    """
    if recurse:
        for child in module.children():
            child._apply(fn)
    for name, parameter in module._parameters.items():
        if parameter is None:
            continue
        if not isinstance(parameter, FakeTensor):
            raise ValueError(
                f"a {type(module).__name__} built outside the dry run cannot be converted inside "
                f"it without changing the real one; build it inside, or convert it before"
            )
        converted = fn(parameter.data)
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


_REPLACEMENTS: dict[tuple[Any, str], Callable[[Any], Any]] = {
    (torch.nn.Module, "_apply"): lambda real: _apply_by_data,
    (FakeTensor, "tolist"): _tolist,
}
