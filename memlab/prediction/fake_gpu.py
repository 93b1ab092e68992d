"""Make torch report the target's GPU during a prediction.

Scripts that check `torch.cuda.is_available()` or bfloat16 support then take the same branches as on
that GPU. The driver is never called, even if there is one.

    is_available, device_count      one GPU, with index 0, or as many as the caller says
    name, memory and capability     of the target's card (targets.py)
    free memory                     all of it
    times, loads, own statistics    1 ms, 0 and none, as nothing is computed
    torch.accelerator               the same GPU; its streams have no work to wait for
    DataParallel                    runs its module on the first GPU, with that GPU's share of the
                                    batch; gradients that arrive from the others are not counted

transformers, accelerate and Lightning use these functions. They cache answers for the life of the
process; a prediction has caches of its own.
"""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any, NamedTuple

import torch

from memlab.configs.targets import Target
from memlab.dry_runs.fake_accelerator import CUDA_REPLACEMENTS, FinishedWork
from memlab.internals.replacing import always, replaced
from memlab.internals.torch_internals import torch_c, tree_leaves, tree_map_only

_CACHING_MODULES = ("transformers.utils.import_utils", "accelerate.utils.imports")


class _Event(FinishedWork):
    """An event of a prediction. Scripts divide by the time, so it is not 0."""

    def elapsed_time(self, end: FinishedWork) -> float:
        return 1.0


class DeviceProperties(NamedTuple):
    """The properties from `torch.cuda.get_device_properties` that affect memory and kernels."""

    name: str
    major: int
    minor: int
    total_memory: int
    multi_processor_count: int
    warp_size: int = 32
    is_integrated: bool = False
    is_multi_gpu_board: bool = False
    pci_bus_id: int = 0
    pci_device_id: int = 0
    pci_domain_id: int = 0


def properties(target: Target) -> DeviceProperties:
    return DeviceProperties(
        target.card,
        *target.capability,
        target.total_bytes,
        target.multiprocessors,
        warp_size=64 if target.gpu.arch.startswith("gfx9") else 32,
    )


@contextmanager
def fake_gpu(target: Target, count: int = 1) -> Iterator[None]:
    """Report so many of the target's card inside `with`."""
    with _caches_cleared(), replaced(_replacements(target, count)):
        yield


def _replacements(target: Target, count: int) -> dict[tuple[Any, str], Callable[[Any], Any]]:
    memory = (target.total_bytes, target.total_bytes)
    modules: dict[Any, dict[str, Any]] = {
        torch.cuda: {"mem_get_info": memory, **_cuda_answers(target, count)},
        torch.cuda.memory: {"mem_get_info": memory, **_STATISTICS},
        torch.backends.cudnn: {"version": _CUDNN},
        torch.cuda.random: _RANDOM_STATES,
        torch.accelerator: {
            "get_memory_info": memory,
            "device_count": count,
            **_ACCELERATOR_ANSWERS,
        },
        torch.accelerator.memory: {"get_memory_info": memory},
    }
    answers = {
        **{(torch.cuda, name): always(answer) for name, answer in CUDA_REPLACEMENTS.items()},
        # FSDP2 and DTensor ask for the device of a new mesh here
        (torch_c, "_get_accelerator"): always(_always(torch.device("cuda"))),
        (torch.cuda, "Event"): always(_Event),
        (torch.cuda, "is_bf16_supported"): always(_bf16_support(target)),
        **{
            (torch.accelerator, name): always(CUDA_REPLACEMENTS[name])
            for name in ("current_stream", "set_stream")
        },
        (torch.nn.DataParallel, "forward"): always(_data_parallel(count)),
        **{
            (module, name): always(_always(answer))
            for module, named in modules.items()
            for name, answer in named.items()
        },
    }
    return {key: answer for key, answer in answers.items() if hasattr(*key)}


def _cuda_answers(target: Target, count: int) -> dict[str, Any]:
    return {
        "is_available": True,
        "device_count": count,
        "_device_count_nvml": count,
        "is_initialized": True,
        "is_tf32_supported": target.has_bfloat16,
        "get_device_name": target.card,
        "get_device_properties": properties(target),
        "get_device_capability": target.capability,
        "get_arch_list": [target.chip.arch],
        "can_device_access_peer": False,
        **_RANDOM_STATES,
        **dict.fromkeys(("utilization", "memory_usage", "temperature", "power_draw"), 0),
        **_STATISTICS,
    }


def _bf16_support(target: Target) -> Callable[..., bool]:
    """Like torch, count bfloat16 as supported if kernels emulate it, as on a T4."""
    return lambda including_emulation=True: including_emulation or target.has_bfloat16


_CUDNN = 91002  # 9.10.2, of torch 2.11's builds
_STATISTICS: dict[str, Any] = {"memory_summary": "", "memory_snapshot": [], "_dump_snapshot": None}
# Functions that do nothing: the stand-in has its own generator, and no work to wait for.
_GENERATOR_NO_OPS = (
    *("_lazy_init", "manual_seed", "manual_seed_all", "seed", "seed_all"),
    *("get_rng_state", "set_rng_state", "set_rng_state_all"),
)
_RANDOM_STATES: dict[str, Any] = {**dict.fromkeys(_GENERATOR_NO_OPS), "get_rng_state_all": []}
_STREAM_NO_OPS = ("synchronize", "empty_cache", "set_device_index", "set_device_idx")
_ACCELERATOR_ANSWERS = {
    "is_available": True,
    "current_accelerator": torch.device("cuda"),
    "current_device_index": 0,
    "current_device_idx": 0,
    **dict.fromkeys(_STREAM_NO_OPS),
}


def _data_parallel(count: int) -> Callable[..., Any]:
    """Return DataParallel's forward on the first of the GPUs: its share of the inputs goes through
    the module, and the others' outputs arrive."""

    def forward(self: torch.nn.DataParallel, *inputs: Any, **kwargs: Any) -> Any:
        sizes = [x.shape[0] for x in tree_leaves((inputs, kwargs)) if _has_rows(x)]
        rows = max(sizes, default=0)
        gpus = len(list(range(0, rows, -(-rows // count)))) if rows else 1

        def share(x: torch.Tensor) -> torch.Tensor:
            return (x.chunk(gpus)[0] if _has_rows(x) else x).to("cuda")

        moved, named = tree_map_only(torch.Tensor, share, (inputs, kwargs))
        outputs = self.module(*moved, **named)
        if gpus == 1:
            return outputs
        return tree_map_only(torch.Tensor, lambda x: _Gathered.apply(x, gpus, rows), outputs)

    return forward


def _has_rows(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.dim() > 0


class _Gathered(torch.autograd.Function):
    """The outputs of all GPUs on the first; backward goes on with its own."""

    @staticmethod
    def forward(ctx: Any, own: torch.Tensor, gpus: int, rows: int) -> torch.Tensor:
        ctx.shape = own.shape
        if not own.dim():  # such as a loss: one number from each
            return own.new_empty(gpus)
        whole = rows if own.shape[0] == -(-rows // gpus) else gpus * own.shape[0]
        return own.new_empty(whole, *own.shape[1:])

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        part = gradient[: ctx.shape[0]] if ctx.shape else gradient[0]
        return part.contiguous(), None, None


def _always(answer: Any) -> Callable[..., Any]:
    return lambda *args, **kwargs: answer


# ------------------------------------------------------------------ caches of libraries


@contextmanager
def _caches_cleared() -> Iterator[None]:
    """Give libraries caches and states of their own inside the block."""
    states: dict[tuple[Any, str], Any] = {
        (kind, "_shared_state"): lambda real: {} for kind in _kinds_of_state()
    }
    try:
        with replaced({**states, **_uncached()}):
            yield
    finally:
        for function in _cached_functions():  # imported since then, they have the block's answers
            function.cache_clear()
        for kind in _kinds_of_state():
            if (kind, "_shared_state") not in states:
                kind._shared_state.clear()


def _uncached() -> dict[tuple[Any, str], Callable[[Any], Any]]:
    """Return a new cache for each function that caches its answers, in all modules that have it."""
    new = {id(function): cache(function.__wrapped__) for function in _cached_functions()}
    return {
        (module, name): always(new[id(value)])
        for module in list(sys.modules.values())
        for name, value in list(getattr(module, "__dict__", {}).items())
        if id(value) in new
    }


def _cached_functions() -> Iterator[Any]:
    for name in _CACHING_MODULES:
        for function in list(vars(sys.modules.get(name, object)).values()):
            if hasattr(function, "cache_clear"):
                yield function


def _kinds_of_state() -> Iterator[Any]:
    """Yield accelerate's classes that have a process-wide state, such as the device."""
    module = sys.modules.get("accelerate.state")
    for name in ("PartialState", "AcceleratorState", "GradientState"):
        yield from [getattr(module, name)] if module else []
