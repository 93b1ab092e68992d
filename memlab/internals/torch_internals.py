"""Every private part of torch that memlab uses; a torch release may move or change any of them.

Checked with torch 2.11 and 2.13 to 2.15. After an upgrade run
tests/internals/test_torch_internals.py, which names each missing part. Names are torch's, without
the leading underscore.
"""
# ruff: noqa: F401 - other modules import these from here

import ctypes
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import cache
from itertools import permutations
from types import CodeType
from typing import Any

import torch
from torch import _C as torch_c  # noqa: N811 - a module
from torch import _disable_dynamo as disable_dynamo
from torch import _foreach_lerp_ as foreach_lerp_
from torch import _has_compatible_shallow_copy_type as has_compatible_shallow_copy_type
from torch import _pack_padded_sequence as packing_operator
from torch import _pad_packed_sequence as unpacking_operator
from torch import _scaled_mm as scaled_mm
from torch import _subclasses as subclasses
from torch import _utils as torch_utils
from torch._C import (
    DisableTorchFunction,
    DisableTorchFunctionSubclass,
    DispatchKey,
    DispatchKeySet,
    StorageBase,
    TensorBase,
)
from torch._C import PyTorchFileWriter as ArchiveWriter
from torch._C import _AutoDispatchBelowAutograd as AutoDispatchBelowAutograd
from torch._C import _current_autograd_node as current_autograd_node
from torch._C import _current_graph_task_id as current_graph_task_id
from torch._C import _DisableTorchDispatch as DisableTorchDispatch
from torch._C import _dispatch_get_all_op_names as dispatch_get_all_op_names
from torch._C import _dispatch_has_kernel_for_dispatch_key as has_kernel
from torch._C import _dispatch_keys as dispatch_keys
from torch._C import _dispatch_tls_local_exclude_set as dispatch_tls_local_exclude_set
from torch._C import _dispatch_tls_local_include_set as dispatch_tls_local_include_set
from torch._C import _EnableTorchFunction as EnableTorchFunction
from torch._C import _ExcludeDispatchKeyGuard as ExcludeDispatchKeyGuard
from torch._C import _ForceDispatchKeyGuard as ForceDispatchKeyGuard
from torch._C import _functorch as functorch
from torch._C import _get_default_device as get_default_device
from torch._C import _get_mkldnn_enabled as get_mkldnn_enabled
from torch._C import _get_obj_in_tls as get_obj_in_tls
from torch._C import _is_key_in_tls as is_key_in_tls
from torch._C import _len_torch_function_stack as len_torch_function_stack
from torch._C import _nn as c_nn
from torch._C import _set_mkldnn_enabled as set_mkldnn_enabled
from torch._C import (
    _set_warn_deprecated_on_mutable_data_ptr as set_warn_deprecated_on_mutable_data_ptr,
)
from torch._C import _SetExcludeDispatchKeyGuard as SetExcludeDispatchKeyGuard
from torch._C._autograd import _get_sequence_nr as get_sequence_nr
from torch._C._dynamo.eval_frame import _FrameAction as FrameAction
from torch._C._dynamo.eval_frame import _FrameExecStrategy as FrameExecStrategy
from torch._C._dynamo.eval_frame import get_eval_frame_callback, set_code_exec_strategy
from torch._C._profiler import _EventType as EventType
from torch._C._profiler import _ExperimentalConfig as ExperimentalConfig
from torch._library.utils import Kernel as LibraryKernel
from torch._ops import OpOverload
from torch._prims_common import compute_elementwise_output_strides, suggest_memory_format
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
    UnsupportedOperatorException,
    disable_fake_tensor_cache,
    is_fake,
)
from torch.cuda import _lazy_call as call_when_cuda_starts
from torch.nn.modules.conv import _ConvNd as ConvNd
from torch.overrides import _get_current_function_mode_stack as get_current_function_mode_stack
from torch.overrides import _pop_mode_temporarily as pop_function_mode_temporarily
from torch.serialization import _get_layout as get_layout
from torch.utils import _foreach_utils as foreach_utils
from torch.utils import _python_dispatch as python_dispatch
from torch.utils._device import DeviceContext
from torch.utils._device import _device_constructors as device_constructors
from torch.utils._python_dispatch import TorchDispatchMode, is_traceable_wrapper_subclass
from torch.utils._python_dispatch import _disable_current_modes as disable_current_modes
from torch.utils._python_dispatch import _get_current_dispatch_mode as get_current_dispatch_mode
from torch.utils._pytree import TreeSpec, tree_flatten, tree_leaves, tree_map_only, tree_unflatten
from torch.utils.data._utils.fetch import _MapDatasetFetcher as MapDatasetFetcher

# Modules that torch.compile imports on first use, and memlab patches.
EVAL_FRAME, CODE_CACHE = "torch._dynamo.eval_frame", "torch._inductor.codecache"
CONVERT_FRAME = "torch._dynamo.convert_frame"
GUARDS = "torch._C._dynamo.guards"  # provides generated code's allocation function
INDUCTOR_BACKEND = torch._TorchCompileInductorWrapper


# ------------------------------------------------------------------ autograd's engine


def in_backward() -> bool:
    """Return whether this thread is running a backward pass."""
    return current_graph_task_id() != -1


def top_saved_tensors_hooks() -> Any:
    """Return the innermost active pair of `saved_tensors_hooks`, or None."""
    return torch._C._autograd._top_saved_tensors_default_hooks(True)


def when_backward_ends(do: Callable[[], None]) -> None:
    """Call `do` once, when the current backward pass ends."""
    torch.autograd.Variable._execution_engine.queue_callback(do)


def stash_obj_in_tls(key: str, value: Any) -> None:
    """Give this thread an object, which autograd's threads inherit."""
    torch._C._stash_obj_in_tls(key, value)
    if _stash_borrows():
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(value))


@cache
def _stash_borrows() -> bool:
    """Return whether torch takes no reference, although it releases one later, as 2.11 does."""
    value = object()
    before = sys.getrefcount(value)
    torch._C._stash_obj_in_tls("memlab's probe", value)
    if borrows := sys.getrefcount(value) == before:
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(value))
    return borrows


def remove_obj_from_tls(key: str) -> None:
    """Remove an object from this thread's; torch 2.11 can only overwrite it."""
    remove = getattr(torch._C, "_remove_obj_from_tls", None)
    remove(key) if remove else stash_obj_in_tls(key, None)


# ------------------------------------------------------------------ torch.compile and fake tensors


def load_dynamos_rules() -> None:
    """Fill Dynamo's tables of torch functions, which otherwise happens on first use."""
    torch._dynamo.trace_rules.get_torch_obj_rule_map()


def load_inductor() -> None:
    """Import the modules of Inductor whose names the world's table has."""
    import torch._inductor.async_compile
    import torch._inductor.codegen.cuda.device_op_overrides
    import torch._inductor.compile_fx
    import torch._inductor.fx_passes.joint_graph
    import torch._inductor.graph
    import torch._inductor.scheduler


def innermost_backend(compiler: Any) -> Any:
    """Return the backend of torch.compile inside Dynamo's wrappers."""
    while hasattr(compiler, "_torchdynamo_orig_backend"):
        compiler = compiler._torchdynamo_orig_backend
    return compiler


def leave_uncompiled() -> Any:
    """Return Dynamo's answer for a frame that runs as it is, this time."""
    from torch._dynamo.types import ConvertFrameReturn

    return ConvertFrameReturn(apply_to_code=False)


def forget_compiled(codes: Iterable[CodeType]) -> None:
    """Drop what Dynamo has compiled for these functions."""
    from torch._C._dynamo.eval_frame import reset_code

    for code in codes:
        reset_code(code)


@contextmanager
def compile_ahead() -> Iterator[None]:
    """Compile backward with forward, which can still run uncompiled if that fails."""
    from torch._functorch import config

    with config.patch(force_non_lazy_backward_lowering=True, enable_autograd_cache=False):
        yield


@contextmanager
def without_function_mode(kind: type) -> Iterator[list[Any]]:
    """Leave function modes of this class inside the block, which gets those from before."""
    stack = get_current_function_mode_stack()
    with _function_modes([mode for mode in stack if type(mode) is not kind]):
        yield stack


@contextmanager
def in_modes(modes: list[Any], function_modes: list[Any]) -> Iterator[None]:
    """Enter modes again that were left, the innermost first."""
    for mode in reversed(modes):
        python_dispatch._push_mode(mode)
    try:
        with _function_modes(function_modes):
            yield
    finally:
        for mode in modes:
            python_dispatch._pop_mode(getattr(mode, "_mode_key", None))


@contextmanager
def _function_modes(stack: list[Any]) -> Iterator[None]:
    from torch._dynamo import utils

    before = get_current_function_mode_stack()
    utils.set_torch_function_mode_stack(stack)
    try:
        yield
    finally:
        utils.set_torch_function_mode_stack(before)


def eval_frame() -> Any:
    """Return the Dynamo module that decides which functions are compiled."""
    return torch._dynamo.eval_frame


def exclude_from_dynamo(function: Callable[..., Any]) -> Callable[..., Any]:
    """Exclude the function and its callees from torch.compile, which breaks the graph at a call.

    A compiled function under a dispatch mode calls the mode's handler with the mode off, so Dynamo
    would compile the handler. That takes minutes, and guards and resumed frames keep tensors alive.
    `torch.compiler.disable` costs as much as a small operator.
    """
    return _excluded(function, FrameAction.SKIP)


def exclude_frame_from_dynamo(function: Callable[..., Any]) -> Callable[..., Any]:
    """Exclude the function from torch.compile, but not its callees."""
    return _excluded(function, FrameAction.DEFAULT)


def _excluded(function: Callable[..., Any], callees: FrameAction) -> Callable[..., Any]:
    set_code_exec_strategy(function.__code__, FrameExecStrategy(FrameAction.SKIP, callees))
    vars(function).update(  # what torch.compiler.disable sets, so that Dynamo does not inline it
        _torchdynamo_disable=True,
        _torchdynamo_disable_recursive=callees is FrameAction.SKIP,
        _torchdynamo_disable_msg="memlab measures a compiled function from outside: call the "
        "compiled function in the code that memlab measures",
    )
    return function


@exclude_frame_from_dynamo
def refuse_inside_compiled_code(name: str) -> None:
    """Raise RuntimeError inside a function under torch.compile, where parts of it run compiled."""
    if callable(get_eval_frame_callback()):
        raise RuntimeError(
            f"got {name} inside a function under torch.compile; call the compiled function inside "
            f"`with {name}(...)` instead"
        )


def has_values(tensor: torch.Tensor) -> bool:
    """Return whether a tensor has elements to read, unlike a fake or meta tensor."""
    return not (tensor.is_meta or isinstance(tensor, FakeTensor))


# ------------------------------------------------------------------ composite operators


def call_composite(func: OpOverload, *args: Any, **kwargs: Any) -> Any:
    """Run a composite operator as the operators that implement it in C++.

    `func.decompose` prefers torch's decompositions for tracing, which may allocate otherwise:
    dropout with p = 0 clones its input there.
    """
    return func._op_dk(DispatchKey.CompositeImplicitAutograd, *args, **kwargs)


def forget_python_dispatch(func: OpOverload) -> None:
    """Let Python's dispatcher, which traces for torch.compile, look up an operator's kernels again.

    Otherwise it calls a kernel that is no longer registered, and autograd records nothing.
    """
    func._dispatch_cache.clear()


# ------------------------------------------------------------------ CUDA, collectives, storages


def cuda_snapshot() -> dict[str, Any]:
    """Return the caching allocator's blocks and recorded history."""
    return torch.cuda.memory._snapshot()


def record_cuda_history(on: bool) -> None:
    """Start or stop recording the history, without stacks, which would take gigabytes."""
    torch.cuda.memory._record_memory_history("all" if on else None, context=None)


def cuda_history_is_on() -> bool:
    return torch._C._cuda_isHistoryEnabled()


def has_snapshots(device_type: str) -> bool:
    """Return whether the device's caching allocator can write its blocks to a file."""
    memory = getattr(getattr(torch, device_type, None), "memory", None)
    return hasattr(memory, "_dump_snapshot") and hasattr(memory, "_record_memory_history")


def record_allocations(device_type: str, max_entries: int) -> None:
    """Record the Python stack of each allocation and free, for `dump_snapshot`."""
    memory = getattr(torch, device_type).memory
    memory._record_memory_history("all", stacks="python", max_entries=max_entries)


def stop_recording_allocations(device_type: str) -> None:
    getattr(torch, device_type).memory._record_memory_history(None)


def dump_snapshot(device_type: str, path: str) -> None:
    """Write the caching allocator's blocks and recorded history as a pickle."""
    getattr(torch, device_type).memory._dump_snapshot(path)


def attach_oom_observer(observer: Callable[[int, int, int, int], None]) -> None:
    """Call `observer(device, requested, total, free)` before CUDA raises an out-of-memory error.

    It is attached when CUDA starts, and torch cannot detach it. Without CUDA, nothing happens.
    """
    attach = getattr(torch._C, "_cuda_attach_out_of_memory_observer", None)
    if attach is not None:
        call_when_cuda_starts(lambda: attach(observer))


def set_cuda_metadata(text: str) -> None:
    """Add a note to the history."""
    torch.cuda.memory._set_memory_metadata(text)


# Sets a storage's size below the hooks of `torch.UntypedStorage.resize_`.
resize_storage_: Callable[[Any, int], Any] = StorageBase.resize_  # type: ignore[attr-defined]


def cuda_driver_version() -> int:
    """Return the driver's CUDA version; 12080 means 12.8."""
    return torch._C._cuda_getDriverVersion()  # type: ignore[attr-defined]  # not in the stubs


def fake_process_group_store() -> Any:
    """Return the store of a process group whose collectives do nothing (backend "fake")."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    return FakeStore()


def finished_work(future: Any) -> Any:
    """Return the handle of a collective that has already finished."""
    c10d: Any = torch._C._distributed_c10d
    return c10d._create_work_from_future(future).boxed()


@contextmanager
def without_modes() -> Iterator[None]:
    """Run operators on real tensors inside, without modes and without autograd."""
    with (
        DisableTorchFunction(),
        DisableTorchDispatch(),
        AutoDispatchBelowAutograd(),
    ):
        yield


def load_parallel_parts() -> None:
    """Import the parts of DTensor and FSDP whose names the world's table has."""
    import torch.distributed.fsdp._fully_shard._fsdp_init
    import torch.distributed.fsdp._init_utils
    import torch.distributed.tensor._op_schema
    import torch.distributed.tensor._random
    import torch.distributed.tensor._sharding_prop


def forget_meshes() -> None:
    """Clear DTensor's caches. They hold meshes with the names of process groups, which no longer
    exist when the next training in this process has equal meshes."""
    from torch.distributed.tensor._redistribute import _gen_transform_infos
    from torch.distributed.tensor._sharding_prop import ShardingPropagator
    from torch.distributed.tensor.debug import _clear_sharding_prop_cache

    _clear_sharding_prop_cache()
    _gen_transform_infos.cache_clear()
    ShardingPropagator._propagate_tensor_meta_cached.cache_clear()


def process_group_named(name: Any) -> Any:
    """Return the process group that functional collectives call by this name."""
    from torch.distributed.distributed_c10d import _resolve_process_group

    return _resolve_process_group(name)


def stage_gradients(stage: Any) -> Any:
    """Return what the next stage of a pipeline would send: the shapes of its inputs' gradients."""
    from torch.distributed.pipelining._utils import _derive_grad_metas, _StageBackwardMeta

    return _StageBackwardMeta(_derive_grad_metas(stage._stage_meta.outputs))


def choose_inference_mode(stages: list[Any], has_backward: bool) -> bool:
    """Let a pipeline's stages infer their shapes, unless each was given its own.

    Return whether they can: stages of a traced graph have their shapes from it.
    """
    from torch.distributed.pipelining import PipelineStage
    from torch.distributed.pipelining._utils import InferenceMode

    if not all(isinstance(stage, PipelineStage) for stage in stages):
        return False
    is_dynamic = any(InferenceMode.needs_dynamic(s._user_meta, has_backward) for s in stages)
    for stage in stages:
        stage._inference_mode = InferenceMode.DYNAMIC if is_dynamic else InferenceMode.STATIC
        if getattr(stage, "p2p_per_edge", False):  # a setting of torch 2.15
            edges = permutations(range(stage.group_size), 2)
            stage._p2p_edge_groups = dict.fromkeys(edges, stage.group)
    return True


def storage_from_weak_pointer(pointer: int) -> torch.UntypedStorage | None:
    """Return the storage behind a weak pointer, or None if it was freed."""
    return torch.UntypedStorage._new_with_weak_ptr(pointer)


def storage_use_count(storage: int) -> int:
    """Return how many tensors share a storage, or 0 if this torch cannot count them."""
    count_of = getattr(torch._C, "_storage_Use_Count", None)
    return 0 if count_of is None else count_of(storage)


def forbid_data_access(storage: torch.UntypedStorage, message: str) -> None:
    """Let each read and write of the storage raise, if this torch was built for GPUs."""
    if hasattr(torch._C, "_clear_storage_data_ptr_access_error_msg"):
        torch._C._set_storage_data_ptr_access_error_msg(storage._cdata, message)


def storage_users(storage: torch.UntypedStorage) -> int:
    """Return how many tensors have the storage, those that autograd saved among them."""
    return torch._C._storage_Use_Count(storage._cdata) - 1  # itself


def allow_data_access(storage: torch.UntypedStorage) -> None:
    """Undo `forbid_data_access`."""
    if hasattr(torch._C, "_clear_storage_data_ptr_access_error_msg"):
        torch._C._clear_storage_data_ptr_access_error_msg(storage._cdata)
