"""Predict a step's memory on CUDA with a dry run, on a machine without CUDA.

The dry run has exactly the storages of the CPU's step. The differences on CUDA are added:

    devices     fake tensors on "cuda" are on a separate fake device. CPU tensors (an optimizer's
                step counters, data before `.to("cuda")`) do not count; copies to "cuda" do
    kernels     operators that decompose differently on CUDA (substitutes.py) or return different
                results (_RESULTS); the kernel choices are configurable (targets.py)
    autocast    CUDA's operator list (autocast_lists.py)
    optimizers  all parameters at once, as torch.optim does on CUDA
    workspace   one each of cuBLAS and cuBLASLt (matmuls with a bias), for forward and for backward
    rounding    block sizes are multiples of 512 bytes

The Trace's notes name the rest, which is not predicted.
"""

import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any, ClassVar

import torch

from memlab.allocator import simulate
from memlab.allocator.settings import configuration
from memlab.configs.targets import DEFAULT, Kernels, Target, target_named
from memlab.dry_runs.fake_accelerator import StandIn, on_stand_in
from memlab.dry_runs.fake_kernels import KERNELS
from memlab.dry_runs.fake_tensors import dry_run
from memlab.internals.cycles import no_cycle_collection
from memlab.internals.scaled_mm import SCALED_MM
from memlab.internals.torch_internals import (
    FakeTensor,
    exclude_from_dynamo,
    in_backward,
    tree_leaves,
)
from memlab.metering.cuda import GRANULARITY
from memlab.metering.device_stats import DeviceStats
from memlab.metering.devices import complete
from memlab.metering.frames import user_line
from memlab.metering.observer import formulas_note
from memlab.metering.registry import REGISTRY
from memlab.metering.storages import (
    THREADS_NOTE,
    Change,
    is_composite,
)
from memlab.prediction import (
    bitsandbytes_kernels,
    compiled,
    convolutions,
    fake_gpu,
    recurrent,
    reported_devices,
)
from memlab.prediction.accuracy import accuracy_note, unconfirmed_note
from memlab.prediction.autocast_lists import cuda_autocast, forget_casts
from memlab.prediction.meter import CUDA, PredictionMeter, buffer
from memlab.prediction.optimizers import implementation, optimizer_defaults
from memlab.prediction.paged_state import PagedState
from memlab.prediction.substitutes import Substitutes
from memlab.trace import DeviceMemory, Trace
from memlab.world.entering import Replacements

aten = torch.ops.aten

_MATMULS = frozenset(
    {
        *(aten.mm.default, aten.addmm.default, aten.bmm.default, aten.baddbmm.default),
        *(aten.addmv.default, aten.mv.default, aten.dot.default, aten.vdot.default),
        *(aten._addmm_activation.default, aten.addbmm.default),
        *(aten.mm.out, aten.addmm.out, aten.bmm.out, aten.baddbmm.out),  # of compiled code
        *SCALED_MM,
    }
)
_CUBLASLT = frozenset({aten._addmm_activation.default, *SCALED_MM})
_OF_THE_TARGET = ("torch.cuda", "torch.accelerator")
_COPIES = frozenset({aten._to_copy.default, aten.to.device, aten.to.dtype_layout})
Build = Callable[[], tuple[Callable[[], Any], torch.nn.Module | None, Any]]

EVERYTHING_NOTE = (
    "the script puts nothing on an accelerator, so every tensor counts as CUDA memory, even data "
    'that would stay on the CPU; create CUDA tensors with device="cuda" to tell them apart'
)


@exclude_from_dynamo
def predict(
    build: Build,
    *,
    device: str | torch.device = "cuda",
    kernels: Kernels = DEFAULT,
    steps: int = 2,
    lines: bool = False,
    assume: str | float | None = None,
) -> Trace:
    """Predict the memory of the last of `steps` steps on CUDA, without CUDA.

    build    returns (step, model, optimizer); model and optimizer may be None. It may use
             device="cuda" as on a machine with CUDA. What it allocates and frees, such as copies
             while loading, shapes the reserved memory; keep in the step what your loop keeps
             (outputs, loss, the last batch)
    device   the GPU: "cuda" (scripts see an A100 with 80 GB), "cuda:hopper" (an H100), a GPU's name
             ("cuda:t4", "cuda:rtx3060") or an architecture ("cuda:sm_86"); all in targets.py
    kernels  the kernels to assume; `Kernels()` are torch's defaults
    steps    the number of steps to run. The last is measured; the first allocates optimizer state
    lines    also record the Python line of each allocation (slower)
    assume   the size of results that depends on values: "most" chooses every element, a fraction
             that part of them, "imbalance:2" twice the average number of tokens for the busiest
             expert of a mixture

    The Trace's notes list the kernels and the limits of the prediction. Raises TypeError for an
    invalid builder, and ValueError for an unknown device or anything that a dry run does not
    support.
    """
    _check(build, kernels, steps)
    with PredictedRun(device=device, kernels=kernels, assume=assume) as run:
        step, model, optimizer = _build(build)
        for _ in range(steps - 1):
            step()
        run.begin_step(model, optimizer, step=step, lines=lines)
        step()
        return run.end_step()


class PredictedRun:
    """A prediction of code that takes its own steps, such as a script.

    with PredictedRun(device="cuda:t4") as run:
        ...                 # builds the model, and takes the first step
        run.begin_step()    # from here on the trace's events; before, its history
        ...                 # takes another step
        trace = run.end_step()

    device, kernels and assume as in `predict`; `gpus` is the number that the code finds.
    """

    def __init__(
        self,
        *,
        device: str | torch.device = "cuda",
        kernels: Kernels = DEFAULT,
        assume: str | float | None = None,
        gpus: int = 1,
    ) -> None:
        self._prediction = _CudaDryRun(kernels, target_named(str(device)), assume, gpus)

    def __enter__(self) -> "PredictedRun":
        self._stack = ExitStack()
        self._stack.enter_context(self._prediction.policy())
        self.history = PredictionMeter(self._prediction)
        self._meters = [self.history]
        self._metering = self._stack.enter_context(ExitStack())
        self._metering.enter_context(self.history)
        return self

    def __exit__(self, *exception: Any) -> None:
        self._stack.__exit__(*exception)

    def begin_step(
        self,
        model: torch.nn.Module | None = None,
        optimizer: Any = None,
        *,
        step: Callable[[], Any] | None = None,
        subject: Any = None,
        **options: Any,
    ) -> None:
        """End the history and start the measured step. The arguments are as in StorageMeter.

        Called again, it starts another step, and the first belongs to the history.
        """
        self._metering.close()
        self.history.set_subject(subject or (step if model is None else model))
        self._optimizer = optimizer
        meter = PredictionMeter(
            self._prediction,
            model,
            optimizer,
            step=step,
            subject=subject,
            **options,
        )
        self._meters.append(meter)
        self._metering.enter_context(meter)

    def end_step(self) -> Trace:
        """End the measured step and return its trace."""
        self._metering.close()
        return self._prediction.trace(self._meters, self._optimizer)


def _check(build: Any, kernels: Any, steps: Any) -> None:
    if not callable(build):
        raise TypeError(
            f"got a {type(build).__name__} to predict; pass a function without arguments that "
            f"returns (step, model, optimizer)"
        )
    if not isinstance(kernels, Kernels):
        raise TypeError(f"got a {type(kernels).__name__} as kernels; pass memlab.Kernels(...)")
    if not isinstance(steps, int) or steps < 1:
        raise ValueError(f"got steps={steps!r}; pass 1 or more, the last step is measured")


def _build(build: Build) -> tuple[Callable[[], Any], torch.nn.Module | None, Any]:
    built = build()
    if not isinstance(built, tuple) or len(built) != 3 or not callable(built[0]):
        raise TypeError(
            f"build() returned a {type(built).__name__}; return (step, model, optimizer), where "
            f"step is a function without arguments and model and optimizer may be None"
        )
    return built


class _CudaDryRun(dry_run):
    """A dry run that behaves like CUDA."""

    _fake_kernels: ClassVar[dict[Any, Any]] = {**KERNELS, **recurrent.KERNELS}

    def __init__(
        self, kernels: Kernels, target: Target, assume: str | float | None, gpus: int
    ) -> None:
        super().__init__(assume=assume)
        self.kernels, self.target, self._gpus = kernels, target, gpus
        self.substitutes = Substitutes(kernels, target)
        self.workspaces: dict[tuple[str, bool], torch.Tensor] = {}  # by library; True: backward
        self.unknown_scratch: set[str] = set()
        self.meter: PredictionMeter | None = None  # the active one
        self._bitsandbytes: bitsandbytes_kernels.Kernels | None = None
        self._paged_state = PagedState()
        self._emptied: list[torch.Tensor] = []  # of no bytes, one for each `empty_cache()`
        self.has_convolutions = False
        self.largest_workspaces: dict[int, int] = {}  # of convolutions (convolutions.with_largest)

    @contextmanager
    def policy(self) -> Iterator[None]:
        """Install CUDA's behaviour inside `with`."""
        with ExitStack() as stack:
            self._installed = stack
            stack.enter_context(_cache_cleared(is_composite))
            stack.enter_context(StandIn.use(CUDA))
            stack.enter_context(fake_gpu.caches_forgotten())
            stack.enter_context(self)
            stack.enter_context(self.substitutes.installed())
            if self.kernels.autocast == "cuda":
                stack.enter_context(cuda_autocast())
            stack.enter_context(optimizer_defaults(self.kernels.optimizer))
            stack.enter_context(self._paged_state.installed())
            yield

    def _stand_ins(self) -> Replacements:
        return {
            **super()._stand_ins(),
            **fake_gpu.stand_ins(self.target, self._gpus),
            **reported_devices.STAND_INS,
            "raw_stream": _stream_0,
            "empty_cache": self._with_empty_cache,
            "on_device": _with_device,
            "generators": compiled.generators(self._gpus),
            "generator_of": compiled.generator_of,
            **({"forget_casts": forget_casts} if self.kernels.autocast == "cuda" else {}),
        }

    def _compilers_stand_ins(self) -> Replacements:
        return compiled.stand_ins(self.target)

    def _device_of_buffers(self, device: str) -> torch.device:
        return compiled.device_of_buffers(device)

    def _leave(self) -> set[str]:
        return {name for name in super()._leave() if not name.startswith(_OF_THE_TARGET)}

    def execute(self, func: Any, args: Any, kwargs: Any) -> Any:
        try:
            result = super().execute(func, args, kwargs)
        except RuntimeError as error:
            # torch 2.11 says "two different devices".
            if not re.search("at least two devices|two different devices", str(error)):
                raise
            raise ValueError(
                f"{user_line()}: {func} got tensors on CUDA and on the CPU; move all of them to "
                f'one device, such as x.to("cuda"); if the script runs on a GPU, memlab follows '
                f"this operator wrongly: please report it"
            ) from error
        if func in _COPIES and _names_cuda(*args[1:], *kwargs.values()):
            on_stand_in(result)
        if func in _MATMULS or _is_grouped_cublas_matmul(func, args, self.target):
            self._use_workspace("cuBLAS", self.target.workspace_bytes)
        if _uses_cublaslt(func, args):
            self._use_workspace("cuBLASLt", self.target.lt_workspace_bytes)
        if func in _RESULTS:
            result = _RESULTS[func](result)
        if func in _UNKNOWN_SCRATCH:
            self.unknown_scratch.add(_UNKNOWN_SCRATCH[func])
        return result

    def _use_workspace(self, library: str, size: int) -> None:
        """Allocate the library's workspace at its first use in this thread."""
        key = library, in_backward()
        if key not in self.workspaces:
            self.workspaces[key] = buffer(size)

    def bitsandbytes(self) -> bitsandbytes_kernels.Kernels:
        """Return bitsandbytes' CUDA kernels. From the first call on, its layers run as on CUDA."""
        if self._bitsandbytes is None:
            self._bitsandbytes = self._installed.enter_context(bitsandbytes_kernels.cuda_kernels())
        return self._bitsandbytes

    def _with_empty_cache(self, real: Callable[[], None]) -> Callable[[], None]:
        """Return an `empty_cache` that adds an event of no bytes, for the simulated allocator."""

        def empty_cache() -> None:
            if self.meter is not None:
                self._emptied.append(buffer(0))
                self.meter.note_empty_cache(self._emptied[-1])

        return empty_cache

    # -------------------------------------------------------------- the result

    def trace(self, meters: Sequence["PredictionMeter"], optimizer: Any) -> Trace:
        """Return the trace of the last meter, with the others as its history."""
        *earlier, meter = meters
        with no_cycle_collection():
            before, during = list(_joined(earlier)), list(meter.changes())
            allocator = configuration()  # the script may have set it
            names_cuda = any(map(_is_on_cuda, (*before, *during)))
            counts = _is_on_cuda_or_workspace if names_cuda else _is_not_step_counter(optimizer)
            events = complete(
                filter(counts, during), DeviceStats(CUDA, granularity=GRANULARITY)
            ).events
            trace = Trace(
                events,
                device="cuda",
                dry=True,
                notes=(
                    *([] if names_cuda else [EVERYTHING_NOTE]),
                    *([f"with the allocator settings {allocator}"] if allocator else []),
                    *self._notes(meter),
                ),
                history=tuple(
                    change.record.event(change.bytes, change.phase)
                    for change in filter(counts, before)
                ),
                allocator=allocator,
            )
            blocks = simulate(trace)
            memory = DeviceMemory(blocks.allocated_bytes, blocks.reserved_bytes)
            trace = replace(
                trace,
                memory=memory,
                notes=(*trace.notes, accuracy_note(trace, self._bitsandbytes is not None)),
            )
            return self._with_range(trace)

    def _with_range(self, trace: Trace) -> Trace:
        """Add what decided convolutions' workspaces, and the memory that the largest would need."""
        if not self.has_convolutions:
            return trace
        expected, memory = trace.memory.reserved_peak_bytes or 0, trace.memory
        if self.largest_workspaces:
            events, history = (
                tuple(convolutions.with_largest(events, self.largest_workspaces))
                for events in (trace.events, trace.history)
            )
            largest = simulate(replace(trace, events=events, history=history))
            memory = replace(memory, reserved_most_bytes=max(largest.reserved_bytes, expected))
        note = convolutions.note(expected, memory.reserved_most_bytes, self.target)
        return replace(trace, memory=memory, notes=(*trace.notes, note))

    def _notes(self, meter: "PredictionMeter") -> tuple[str, ...]:
        kernels = self.substitutes.used | self._optimizer_kernels(meter)
        unknown = set(self.unknown_scratch)
        if meter.context.has_recurrent_layer:
            unknown.add("recurrent layers (cuDNN)")
        return (
            f"predicted for {self.target.name} with these kernels: {self.kernels}",
            *([self.target.note] if self.target.note else []),
            *([f"kernels chosen for this GPU: {', '.join(sorted(kernels))}"] * bool(kernels)),
            *unconfirmed_note(kernels),
            *(
                f"not counted: the scratch memory of {kind}; the real peak can be higher"
                for kind in sorted(unknown)
            ),
            *self._paged_state.notes(),
            *([recurrent.RESERVE_NOTE] if recurrent.LABEL in kernels else []),
            *([THREADS_NOTE] if meter.found_thread_gradients else []),
            *formulas_note(meter.nodes),
            *self.notes(),
        )

    def _optimizer_kernels(self, meter: "PredictionMeter") -> set[str]:
        return {
            f"{implementation(group, self.kernels.optimizer)} {type(optimizer).__name__}"
            for optimizer in meter.context.optimizers
            if type(optimizer).__module__.startswith("torch.optim.")
            for group in optimizer.param_groups
        }


def _stream_0(real: Any) -> Callable[[int], int]:
    return lambda device: 0


def _joined(meters: Iterable["PredictionMeter"]) -> Iterator[Change]:
    """Yield the changes of meters that ran one after another. A meter's stream begins with the
    storages that are alive, which the meters before it may have yielded."""
    held: Counter[int] = Counter()
    for meter in meters:
        for change in meter.changes():
            if change.phase != "before" or not held[change.record.number]:
                held[change.record.number] += change.bytes
                yield change


def _with_device(fallback: Callable[..., Any]) -> Callable[..., Any]:
    """Keep the results of an operator without a fake kernel on CUDA. torch runs it on zeros on the
    CPU, and takes the device of their result."""

    def run(fake_mode: Any, func: Any, arguments: Any, *others: Any) -> Any:
        result = fallback(fake_mode, func, arguments, *others)
        if _names_cuda(*(a.device for a in arguments if isinstance(a, torch.Tensor))):
            known = {id(argument) for argument in arguments}
            for tensor in tree_leaves(result):
                if isinstance(tensor, FakeTensor) and id(tensor) not in known:
                    # Otherwise `multi_margin_loss_backward` returned a CPU tensor, and the next
                    # matmul was refused (test_losses_of_cuda_tensors_stay_on_cuda).
                    tensor.fake_device = CUDA
        return result

    return run


def _is_grouped_cublas_matmul(func: Any, args: Any, target: Target) -> bool:
    """Return whether a grouped matmul runs as one matmul per group (GroupedBlas.cpp)."""
    if func is not aten._grouped_mm.default:
        return False
    return args[0].dtype != torch.bfloat16 or target.capability[0] not in (9, 10)


def _uses_cublaslt(func: Any, args: Any) -> bool:
    """Return whether cuBLASLt runs the matmul, as one with a bias (`addmm_out_cuda_impl`)."""
    if func not in (aten.addmm.default, aten.addmm.out):
        return func in _CUBLASLT
    bias, _, right = args[:3]
    return bias.dim() == 1 and bias.is_contiguous() and min(right.shape) > 1


def _names_cuda(*arguments: Any) -> bool:
    return any(isinstance(argument, torch.device) and argument == CUDA for argument in arguments)


def _is_on_cuda_or_workspace(change: Change) -> bool:
    return change.record.device == CUDA


def _is_on_cuda(change: Change) -> bool:
    """Return whether the script, not a kernel, allocated it on CUDA."""
    return change.record.device == CUDA and change.record.category != "workspace"


def _is_not_step_counter(optimizer: Any) -> Callable[[Change], bool]:
    """Return a filter that drops the step counters that torch.optim keeps on the CPU."""
    counters = set()
    groups = getattr(optimizer, "param_groups", ())
    for group in groups if isinstance(optimizer, torch.optim.Optimizer) else ():
        if group.get("capturable") or group.get("fused"):
            continue
        for parameter in group["params"]:
            step = optimizer.state.get(parameter, {}).get("step")
            if isinstance(step, torch.Tensor) and (record := REGISTRY.find(step)):
                counters.add(record.number)
    return lambda change: change.record.number not in counters


@contextmanager
def _cache_cleared(cached: Any) -> Iterator[None]:
    """Clear a cached function before and after the block, because registered kernels change it."""
    cached.cache_clear()
    try:
        yield
    finally:
        cached.cache_clear()


# ------------------------------------------------------------------ results and scratch of kernels


def _statistics_in_float32(result: Any) -> Any:
    output, *statistics = result
    return output, *(statistic.float() for statistic in statistics)


def _seeds_on_the_cpu(result: Any) -> Any:
    output, logsumexp, *seeds = result
    return output, logsumexp, *(torch.empty((), dtype=torch.int64) for _ in seeds)


_RESULTS: dict[Any, Callable[[Any], Any]] = {
    aten.native_layer_norm.default: _statistics_in_float32,
    aten.native_batch_norm.default: _statistics_in_float32,
    aten._scaled_dot_product_efficient_attention.default: _seeds_on_the_cpu,
}
_UNKNOWN_SCRATCH = {
    aten._scaled_dot_product_cudnn_attention_backward.default: "cuDNN's attention in backward",
}
