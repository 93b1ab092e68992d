"""Record a step with CUDA's memory history, in a process that does nothing else.

No dispatch mode or hook is active, and no stacks are recorded. The history begins before the first
tensor, so it can be replayed from an empty GPU. One more step runs under the profiler to find the
operator of each block.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch._C._profiler import _EventType
from torch.profiler import ProfilerActivity, profile

from memlab.allocator import Settings, history, simulate
from memlab.allocator.recordings import ACTIONS
from memlab.internals.cycles import no_cycle_collection

from .configurations import Built, Configuration, Size
from .predictions import Prediction, fraction_of

_EVENT = ("action", "addr", "size", "stream")
_SEGMENT = ("address", "total_size", "segment_type", "stream")
_BLOCK = ("address", "size", "requested_size", "state")
_NO_OPERATORS: dict[str, Any] = {"operators": [], "kernels": {}}
_MEMORY_KERNELS = (
    "_scaled_dot_product_",
    "_fused_",
    "native_dropout",
    "cudnn",
    "native_layer_norm",
)


def start(cap_bytes: int | None = None) -> None:
    """Create the CUDA context, with the allocator still unused, and set the memory limit."""
    torch.cuda.init()
    torch.cuda.synchronize()
    if cap_bytes is not None:
        _, total_bytes = torch.cuda.mem_get_info()
        torch.cuda.set_per_process_memory_fraction(fraction_of(cap_bytes, total_bytes))


def record(configuration: Configuration, size: Size, cap_bytes: int | None) -> dict[str, Any]:
    """Record building, a first and a second step, with the allocator's statistics of the second.

    If memory runs out, the history ends there.
    """
    start(cap_bytes)
    torch.cuda.memory._record_memory_history("all", context=None)
    with no_cycle_collection():
        built, ran_out = None, ""
        step_at = reserved_before = 0
        try:
            built = configuration.build(size, "cuda")
            built[0]()
            torch.cuda.synchronize()
            step_at = len(_events(torch.cuda.memory._snapshot()))
            reserved_before = torch.cuda.max_memory_reserved()
            torch.cuda.reset_peak_memory_stats()
            built[0]()
            torch.cuda.synchronize()
        except torch.cuda.OutOfMemoryError as error:
            ran_out = str(error)
        stats, after = torch.cuda.memory_stats(), torch.cuda.memory._snapshot()
    torch.cuda.memory._record_memory_history(None)
    return {
        "allocated_peak_bytes": stats["allocated_bytes.all.peak"],
        "requested_peak_bytes": stats["requested_bytes.all.peak"],
        "reserved_peak_bytes": max(reserved_before, stats["reserved_bytes.all.peak"]),
        "retries": stats["num_alloc_retries"],
        "ran_out": ran_out,
        "step_at": step_at,
        "events": _events(after),
        "segments_at_end": [_segment(s) for s in after["segments"] if s["device"] == 0],
        **(_profiled_operators(built) if not ran_out else _NO_OPERATORS),
    }


def rehearsed(prediction: Prediction, settings: Settings) -> dict[str, Any]:
    """Return the recording that would result if the prediction were exact."""
    whole, at = prediction.whole, prediction.step_at
    recording = history(whole, settings)
    blocks = simulate(whole, settings)
    return {
        "allocated_peak_bytes": prediction.allocated_peak_bytes(blocks),
        "requested_peak_bytes": 0,
        "reserved_peak_bytes": blocks.reserved_bytes,
        "retries": blocks.retries,
        "ran_out": "" if blocks.fits else str(blocks.out_of_memory),
        "step_at": len(history(whole[:at], settings)["events"]),
        "events": recording["events"],
        "segments_at_end": recording["segments_at_end"],
        **_NO_OPERATORS,
    }


def _events(snapshot: Mapping[str, Any]) -> list[dict[str, Any]]:
    entries = snapshot["device_traces"][0]
    return [_only(_EVENT, entry) for entry in entries if entry["action"] in ACTIONS]


def _segment(segment: Mapping[str, Any]) -> dict[str, Any]:
    blocks = [_only(_BLOCK, block) for block in segment["blocks"]]
    return {**_only(_SEGMENT, segment), "blocks": blocks}


def _only(names: Iterable[str], entry: Mapping[str, Any]) -> dict[str, Any]:
    return {name: entry[name] for name in names}


# ------------------------------------------------------------------ operators of blocks


def _profiled_operators(built: Built) -> dict[str, Any]:
    """Profile a further step; return the operator of each allocation, and kernel counts.

    The recording stays valid if the profiler fails; the operators are then empty.
    """
    try:
        roots = _profiled(built[0])
        allocations = sorted(_allocations(roots))
        return {
            "operators": [name for _, name in allocations],
            "kernels": dict(Counter(_memory_kernels(roots))),
        }
    except Exception as error:
        return {**_NO_OPERATORS, "kernels": {f"the profiler fails: {error!r}": 1}}


def _profiled(step: Callable[[], object]) -> list[Any]:
    with (
        no_cycle_collection(),
        profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler,
    ):
        step()
        torch.cuda.synchronize()
    return profiler.profiler.kineto_results.experimental_event_tree()


def _allocations(events: Iterable[Any], inside: str = "") -> Iterator[tuple[int, str]]:
    """Yield (time, operator) of each CUDA allocation."""
    for event in events:
        kind, details = event.typed
        if kind == _EventType.Allocation:
            if details.device.type == "cuda" and details.alloc_size > 0:
                yield event.start_time_ns, inside
        else:
            operator = event.name if event.name.startswith("aten::") else inside
            yield from _allocations(event.children, operator)


def _memory_kernels(events: Iterable[Any]) -> Iterator[str]:
    for event in events:
        if event.name.startswith("aten::") and any(part in event.name for part in _MEMORY_KERNELS):
            yield event.name.removeprefix("aten::")
        yield from _memory_kernels(event.children)
