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
from memlab.dry_runs.compiled import Compiler
from memlab.dry_runs.fake_accelerator import FinishedWork
from memlab.internals.replacing import always
from memlab.internals.torch_internals import tree_leaves, tree_map_only
from memlab.world.entering import ByName, Replacements

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
    # of GPUs since Volta; Inductor reads them for the sizes of a kernel's blocks
    max_threads_per_multi_processor: int = 2048
    max_threads_per_block: int = 1024
    regs_per_multiprocessor: int = 65_536
    shared_memory_per_block_optin: int = 101_376
    shared_memory_per_multiprocessor: int = 102_400
    L2_cache_size: int = 2**22
    gcnArchName: str = ""  # noqa: N815 - of AMD's, as torch has it


def properties(target: Target) -> DeviceProperties:
    return DeviceProperties(
        target.card,
        *target.capability,
        target.total_bytes,
        target.multiprocessors,
        warp_size=64 if target.gpu.arch.startswith("gfx9") else 32,
    )


def stand_ins(target: Target, count: int) -> Replacements:
    """Return what reports so many of the target's card."""
    answers = {
        "is_available": True,
        "device_count": count,
        "_device_count_nvml": count,
        "is_initialized": True,
        "is_tf32_supported": target.has_bfloat16,
        "get_device_name": target.card,
        "get_device_properties": properties(target),
        "get_device_capability": target.capability,
        "get_arch_list": [target.chip.arch],
        **dict.fromkeys(("mem_get_info", "get_memory_info"), (target.total_bytes,) * 2),
        **_ANSWERS,
    }

    answered = ByName(lambda name: always(_always(answers[name])))
    return {
        "fact": answered,
        "report": answered,
        "event": always(_Event),
        # With one, Dynamo would follow its streams.
        "accelerator_available": always(lambda: not Compiler.is_compiling),
        "bf16_supported": always(_bf16_support(target)),
        "data_parallel": always(_data_parallel(count)),
        "own_cache": _OwnCaches().of,
        "own_state": lambda real: {},
    }


def _bf16_support(target: Target) -> Callable[..., bool]:
    """Like torch, count bfloat16 as supported if kernels emulate it, as on a T4."""
    return lambda including_emulation=True: including_emulation or target.has_bfloat16


# None is the answer of functions that do nothing: the stand-in has its own generator.
_ANSWERS: dict[str, Any] = {
    "version": 91002,  # cuDNN 9.10.2, of torch 2.11's builds
    "can_device_access_peer": False,
    **dict.fromkeys(("utilization", "memory_usage", "temperature", "power_draw"), 0),
    **{"memory_summary": "", "memory_snapshot": [], "_dump_snapshot": None},
    **dict.fromkeys(("_lazy_init", "manual_seed", "manual_seed_all", "seed", "seed_all")),
    **dict.fromkeys(("get_rng_state", "set_rng_state", "set_rng_state_all")),
    "get_rng_state_all": [],
    "current_accelerator": torch.device("cuda"),
    "_get_accelerator": torch.device("cuda"),
    **dict.fromkeys(("current_device_index", "current_device_idx"), 0),
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


class _OwnCaches:
    """A new cache for each function that caches answers, the same in all modules that have it."""

    def __init__(self) -> None:
        self._made: dict[int, Callable[..., Any]] = {}

    def of(self, real: Any) -> Callable[..., Any]:
        return self._made.setdefault(id(real), cache(real.__wrapped__))


@contextmanager
def caches_forgotten() -> Iterator[None]:
    """Clear, at the end, what a library has cached while it was imported inside the block."""
    names = [name for name in _CACHING_MODULES if name not in sys.modules]
    try:
        yield
    finally:
        for function in [f for name in names for f in vars(sys.modules.get(name, object)).values()]:
            if hasattr(function, "cache_clear"):
                function.cache_clear()
