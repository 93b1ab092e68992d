"""Run functions under torch.compile as the code that Inductor generates, on fake tensors.

Dynamo, AOTAutograd and Inductor work as for real tensors, up to the text of the wrapper code: which
buffers it allocates, reuses and frees, and what is saved for backward. Then:

    kernels     are not compiled, and a launch does nothing: buffers exist before it
    buffers     are fake tensors, which a meter sees as it sees those of real compiled code
    operators   that Inductor leaves to torch, such as matmuls, run on fake tensors
    caches      are neither read nor written, and nothing is timed to choose a kernel

What Dynamo or Inductor cannot compile, and other backends, run uncompiled.
"""

import re
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from types import FrameType, ModuleType
from typing import Any, ClassVar

import torch

from memlab.dry_runs import known_values
from memlab.internals.torch_internals import (
    INDUCTOR_BACKEND,
    FakeTensor,
    FakeTensorMode,
    compile_ahead,
    disable_current_modes,
    forget_compiled,
    in_modes,
    innermost_backend,
    is_traceable_wrapper_subclass,
    leave_uncompiled,
    load_inductor,
    without_function_mode,
    without_modes,
)
from memlab.metering.compiled import CompiledLayer
from memlab.metering.frames import user_line_of
from memlab.world.entering import Replacements, enter

COMPILED = "code under torch.compile is counted as the code that Inductor generates"
UNCOMPILED = "code under torch.compile is counted as it runs uncompiled"
_WITH_RNG_STATE = "torch.ops.higher_order.graphsafe_run_with_rng_state("
_NEW_BUFFER = re.compile(
    r"^(?P<indent> +)(?P<name>buf\d+) = (?:empty_strided_|torch\.ops\.|extern_kernels\.)", re.M
)
_CONFIG = {
    "fx_graph_cache": False,
    "fx_graph_remote_cache": False,
    "compile_threads": 1,
    "cpp.vec_isa_ok": True,  # without a C++ compiler that tries the instructions
    "triton.cudagraphs": False,
    "triton.autotune_at_compile_time": False,
    "max_autotune": False,
    "max_autotune_gemm": False,
    "max_autotune_pointwise": False,
    "shape_padding": False,
}
_NOT_FOLLOWED = {
    "triton.cudagraphs": "CUDA graphs' private pool is not counted",
    "max_autotune": "what autotuning allocates, and the kernels that it chooses, are not counted",
    "max_autotune_gemm": "what autotuning allocates is not counted",
}


class Compiler:
    """What a dry run finds in place of torch.compile's compilers.

    mode            the dry run's mode
    functions       its function mode, which Dynamo would trace
    stand_ins       what else the compilers find, such as a GPU's properties
    device_of(name) the device of buffers
    """

    is_compiling: ClassVar[bool] = False

    def __init__(
        self,
        mode: FakeTensorMode,
        functions: type,
        stand_ins: Replacements,
        device_of: Callable[[str], torch.device],
    ) -> None:
        self._mode, self._functions, self._device_of = mode, functions, device_of
        self._compilers_mode: FakeTensorMode | None = None  # while new code is tried
        self._outside: tuple[list[Any], list[Any]] = [], []  # modes outside compilation
        self._codes: set[Any] = set()  # of frames that were compiled
        self._graphs = 0
        self._failures: dict[str, None] = {}  # ordered
        self._others: dict[str, None] = {}
        self._stand_ins: Replacements = {
            "unguarded": lambda real: lambda builder, guard: None,
            "own_settings": self._with_own_settings,
            "loaded_code": lambda real: lambda graph, code: self._load(graph, code),
            "no_header": lambda real: lambda wrapper: None,
            "launched": lambda real: lambda *args, **kwargs: _Kernel(),
            "buildable": lambda real: lambda isa, code: True,
            "no_compiler": lambda real: lambda: False,
            "no_random_state": lambda real: _nothing_preserved,
            "in_modes": self._in_modes,
            **stand_ins,
        }

    def stand_ins(self) -> Replacements:
        """Return what the dry run finds from its start to its end."""
        return {
            "choosing": self._choosing,
            "compiling": self._compiling,
            "stance": lambda real: self._stance(),
            "buffer_cpu": lambda real: self._make("cpu"),
            "buffer_cuda": lambda real: self._make("cuda"),
            "view_of_buffer": lambda real: _view,
            "as_aligned": lambda real: lambda tensor, *others: tensor,
        }

    def notes(self) -> Iterator[str]:
        """Yield what was counted how."""
        if self._graphs:
            others = "".join(f"; {other}" for other in self._others)
            yield f"{COMPILED} ({self._graphs} graphs, torch {torch.__version__}){others}"
        for failure in self._failures:
            yield (
                f"{UNCOMPILED}: {failure}; compiled code saves fewer tensors, but compiling "
                f"reserves more memory once, so use memlab.measure on a real step for its memory"
            )

    def forget(self) -> None:
        """Drop the code that was compiled for fake tensors."""
        forget_compiled(self._codes)

    def _choosing(self, choose: Callable[[Any], Any]) -> Callable[[Any], Any]:
        """Leave functions with other backends uncompiled."""

        def choosing(compiler: Any) -> Any:
            if compiler is None or compiler is False:
                return choose(compiler)
            backend = innermost_backend(compiler)
            if isinstance(backend, INDUCTOR_BACKEND):
                return choose(compiler)
            name = getattr(backend, "__name__", type(backend).__name__)
            self._failures[f"the backend {name} is not Inductor"] = None
            return None

        return choosing

    def _stance(self) -> property:
        """Return how Dynamo runs: eagerly after a failure, or fullgraph=True would raise."""
        return property(
            lambda stance: "force_eager" if self._failures else vars(stance)["stance"],
            lambda stance, new: vars(stance).update(stance=new),
        )

    def _compiling(self, compile_frame: Callable[..., Any]) -> Callable[..., Any]:
        """Compile a frame outside the dry run's modes; if that fails, leave it uncompiled."""

        def compiling(wrapper: Any, frame: FrameType, *others: Any) -> Any:
            if self._failures:
                return leave_uncompiled()
            load_inductor()
            self._codes.add(frame.f_code)
            outer, Compiler.is_compiling = Compiler.is_compiling, True
            try:
                with (
                    self._without_modes(),
                    enter(self._stand_ins),
                    compile_ahead(),
                    warnings.catch_warnings(action="ignore"),  # a real run gives them
                ):
                    return compile_frame(wrapper, frame, *others)
            except Exception as error:
                root: BaseException = error
                while cause := root.__cause__ or root.__context__:
                    root = cause
                first = str(root).strip().partition("\n")[0]
                self._failures[f"{type(root).__name__}: {first}"] = None
                return leave_uncompiled()
            finally:
                Compiler.is_compiling = outer

        return compiling

    @contextmanager
    def _without_modes(self) -> Iterator[None]:
        with (
            disable_current_modes() as modes,
            without_function_mode(self._functions) as function_modes,
        ):
            outer, self._outside = self._outside, (modes, function_modes)
            try:
                yield
            finally:
                self._outside = outer

    def _in_modes(self, run: Callable[..., Any]) -> Callable[..., Any]:
        """Run what Dynamo calls instead of tracing it, such as an optimizer's first step."""

        def running(*args: Any, **kwargs: Any) -> Any:
            if not Compiler.is_compiling:
                return run(*args, **kwargs)
            Compiler.is_compiling = False
            try:
                with in_modes(*self._outside):
                    return run(*args, **kwargs)
            finally:
                Compiler.is_compiling = True

        return running

    def _with_own_settings(self, compile_graph: Callable[..., Any]) -> Callable[..., Any]:
        """Compile without caches, CUDA graphs and autotuning, whatever the script's mode asks."""

        def compiled(backend: Any, graph: Any, inputs: Sequence[Any], **kwargs: Any) -> Any:
            if any(map(is_traceable_wrapper_subclass, inputs)):
                raise NotImplementedError("it has tensor subclasses, which are not followed")
            before = backend.config
            self._others |= {n: None for key, n in _NOT_FOLLOWED.items() if before.get(key)}
            backend.config = {**before, **_CONFIG}
            try:
                return compile_graph(backend, graph, inputs, **kwargs)
            finally:
                backend.config = before

        return compiled

    def _load(self, graph: Any, code: Any) -> ModuleType:
        """Run the wrapper's module, without writing a file."""
        module: Any = ModuleType("memlab.inductors_code")
        inputs = graph.example_inputs
        module.__file__ = module.key = "<code of Inductor>"
        module.get_raw_stream = lambda device: 0
        module.without_rng_state = lambda func, *args, rng_state, **kwargs: func(*args, **kwargs)
        text = code.value.replace(_WITH_RNG_STATE, "without_rng_state(")  # no mode handles it
        module.in_layer = _enter_layer
        exec(compile(_with_layers(text, graph), module.__file__, "exec"), vars(module))
        module.call = partial(_called, module.call)
        if not any(isinstance(size, torch.SymInt) for x in inputs for size in (x, *_shape(x))):
            self._try(module.call, inputs)
        self._graphs += 1
        return module

    def _try(self, call: Callable[[list[Any]], Any], inputs: Sequence[Any]) -> None:
        """Run the code on the compiler's tensors: after an error here, it runs uncompiled."""
        mode = next((x.fake_mode for x in inputs if isinstance(x, FakeTensor)), None)
        if mode is not None:
            self._compilers_mode = mode
            try:
                with mode, torch.no_grad():
                    call([*inputs])
            finally:
                self._compilers_mode = None

    def _make(self, device: str) -> Callable[..., torch.Tensor]:
        """Return the function that allocates a buffer on this device, below all modes."""

        def make(shape: Any, stride: Any, dtype: torch.dtype) -> torch.Tensor:
            with without_modes():
                empty = torch.empty_strided(shape, stride, dtype=dtype, device="meta")
            return FakeTensor(self._compilers_mode or self._mode, empty, self._device_of(device))

        return make


def _with_layers(text: str, graph: Any) -> str:
    """Return the code with the layer of each new buffer before it."""

    def line(match: re.Match[str]) -> str:
        layer = _layer(graph.name_to_buffer.get(match["name"]))
        return match[0] if layer is None else f"{match['indent']}in_layer{layer}\n{match[0]}"

    return _NEW_BUFFER.sub(line, text)


def _layer(buffer: Any) -> tuple[str, str] | None:
    """Return the module path and the line of the operators that fill a buffer of Inductor."""
    for node in () if buffer is None else (buffer.get_origin_node(), *buffer.origins):
        meta = {} if node is None else node.meta
        if stack := meta.get("nn_module_stack") or meta.get("fwd_nn_module_stack"):
            path, _ = [*stack.values()][-1]  # such as L['self'].layers.0
            return re.sub(r"^L\['\w+'\]\.?", "", path), user_line_of(meta.get("stack_trace") or "")
    return None


def _called(call: Callable[[list[Any]], Any], inputs: list[Any]) -> Any:
    try:
        return call(inputs)
    finally:
        _enter_layer("", "")


def _enter_layer(name: str, line: str) -> None:
    CompiledLayer.name, CompiledLayer.line = name, line


def _shape(value: Any) -> Sequence[Any]:
    return value.shape if isinstance(value, torch.Tensor) else ()


class _Kernel:
    """A kernel that was not compiled. What it writes is unknown."""

    def __call__(self, *args: Any, **kwargs: Any) -> None:
        known_values.forget(known_values.tensors_in(args))

    run = __call__


def _view(
    tensor: torch.Tensor, size: tuple[int, ...], stride: tuple[int, ...], offset: int = 0
) -> torch.Tensor:
    return torch.as_strided(tensor, size, stride, tensor.storage_offset() + offset)


@contextmanager
def _nothing_preserved() -> Iterator[None]:
    yield
