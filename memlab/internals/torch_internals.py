"""Everything private of torch that memlab uses: what a release may move or change without a word.

Seen in torch 2.11 and 2.13. After an upgrade run tests/test_torch_internals.py, which names each
part that is gone. Names are torch's own, without the underscore in front.
"""
# ruff: noqa: F401 - other modules import these from here

from collections.abc import Callable
from typing import Any

import torch
from torch import _disable_dynamo as disable_dynamo
from torch import _foreach_lerp_ as foreach_lerp_
from torch import _has_compatible_shallow_copy_type as has_compatible_shallow_copy_type
from torch import _pack_padded_sequence as packing_operator
from torch import _pad_packed_sequence as unpacking_operator
from torch import _subclasses as subclasses
from torch._C import DisableTorchFunction, DispatchKey, DispatchKeySet, StorageBase
from torch._C import _AutoDispatchBelowAutograd as AutoDispatchBelowAutograd
from torch._C import _current_autograd_node as current_autograd_node
from torch._C import _current_graph_task_id as current_graph_task_id
from torch._C import _DisableTorchDispatch as DisableTorchDispatch
from torch._C import _dispatch_get_all_op_names as dispatch_get_all_op_names
from torch._C import _dispatch_has_kernel_for_dispatch_key as has_kernel
from torch._C import _dispatch_tls_local_exclude_set as dispatch_tls_local_exclude_set
from torch._C import _dispatch_tls_local_include_set as dispatch_tls_local_include_set
from torch._C import _ExcludeDispatchKeyGuard as ExcludeDispatchKeyGuard
from torch._C import _ForceDispatchKeyGuard as ForceDispatchKeyGuard
from torch._C import _functorch as functorch
from torch._C import _get_mkldnn_enabled as get_mkldnn_enabled
from torch._C import _len_torch_function_stack as len_torch_function_stack
from torch._C import _nn as c_nn
from torch._C import _set_mkldnn_enabled as set_mkldnn_enabled
from torch._C import _SetExcludeDispatchKeyGuard as SetExcludeDispatchKeyGuard
from torch._C._autograd import _get_sequence_nr as get_sequence_nr
from torch._C._dynamo.eval_frame import _FrameAction as FrameAction
from torch._C._dynamo.eval_frame import _FrameExecStrategy as FrameExecStrategy
from torch._C._dynamo.eval_frame import set_code_exec_strategy
from torch._C._profiler import _EventType as EventType
from torch._C._profiler import _ExperimentalConfig as ExperimentalConfig
from torch._ops import OpOverload
from torch._prims_common import compute_elementwise_output_strides
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
    disable_fake_tensor_cache,
)
from torch.nn.modules.conv import _ConvNd as ConvNd
from torch.overrides import _get_current_function_mode_stack as get_current_function_mode_stack
from torch.serialization import _get_layout as get_layout
from torch.utils import _foreach_utils as foreach_utils
from torch.utils import _python_dispatch as python_dispatch
from torch.utils._device import _device_constructors as device_constructors
from torch.utils._python_dispatch import TorchDispatchMode, is_traceable_wrapper_subclass
from torch.utils._python_dispatch import _disable_current_modes as disable_current_modes
from torch.utils._python_dispatch import _get_current_dispatch_mode as get_current_dispatch_mode
from torch.utils._pytree import TreeSpec, tree_flatten, tree_leaves, tree_map_only, tree_unflatten

# Modules that torch.compile imports when it is first used, where memlab hooks in.
EVAL_FRAME, CODE_CACHE = "torch._dynamo.eval_frame", "torch._inductor.codecache"
CONVERT_FRAME = "torch._dynamo.convert_frame"
GUARDS = "torch._C._dynamo.guards"  # where generated code has its allocation from


# ------------------------------------------------------------------ autograd's engine


def in_backward() -> bool:
    """Whether this thread runs a backward pass."""
    return current_graph_task_id() != -1


def when_backward_ends(do: Callable[[], None]) -> None:
    """Call `do` once, when the backward pass that runs now is over."""
    torch.autograd.Variable._execution_engine.queue_callback(do)


# ------------------------------------------------------------------ torch.compile and fake tensors


def load_dynamos_rules() -> None:
    """Dynamo's tables of torch's functions, which it fills when it first needs them."""
    torch._dynamo.trace_rules.get_torch_obj_rule_map()


def eval_frame() -> Any:
    """Dynamo's module that decides which functions are compiled."""
    return torch._dynamo.eval_frame


# ------------------------------------------------------------------ CUDA, collectives, storages


def cuda_snapshot() -> dict[str, Any]:
    """The caching allocator's blocks and its recorded history."""
    return torch.cuda.memory._snapshot()


def record_cuda_history(on: bool) -> None:
    """Start or stop the history, without the stack of each entry, which would take gigabytes."""
    torch.cuda.memory._record_memory_history("all" if on else None, context=None)


def cuda_history_is_on() -> bool:
    return torch._C._cuda_isHistoryEnabled()


def set_cuda_metadata(text: str) -> None:
    """Write a note into the history."""
    torch.cuda.memory._set_memory_metadata(text)


def cuda_driver_version() -> int:
    """12080 is 12.8."""
    return torch._C._cuda_getDriverVersion()


def finished_work(future: Any) -> Any:
    """What a collective returns whose result is there."""
    return torch._C._distributed_c10d._create_work_from_future(future).boxed()


def sharding_propagator() -> Any:
    """DTensor's class that learns the shape of a result."""
    from torch.distributed.tensor._sharding_prop import ShardingPropagator

    return ShardingPropagator


def storage_from_weak_pointer(pointer: int) -> torch.UntypedStorage | None:
    """The storage that a weak reference points to; None once it is gone."""
    return torch.UntypedStorage._new_with_weak_ptr(pointer)


def storage_use_count(storage: int) -> int:
    """How many tensors share a storage; 0 where this torch does not say."""
    count_of = getattr(torch._C, "_storage_Use_Count", None)
    return 0 if count_of is None else count_of(storage)
