"""The GPU that a prediction is made for answers a script's questions about it.

A script that asks `torch.cuda.is_available()` before it moves its model, or whether there is
bfloat16, goes the way it would go on that card. No driver is asked, even where there is one.

    is there a GPU, how many        one, number 0
    its name, size and capability   those of the target's card (targets.py)
    how much of it is free          all
    torch.accelerator               that GPU too, and its streams have nothing to wait for

transformers, accelerate and Lightning ask in these ways. What they remember of an answer as long as
the process lives is forgotten before and after.
"""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch

from memlab.configs.targets import Target
from memlab.dry_runs.fake_accelerator import ANSWERS
from memlab.internals.replacing import replaced

_ASKERS = ("transformers.utils.import_utils", "accelerate.utils.imports")


class Properties(NamedTuple):
    """What `torch.cuda.get_device_properties` returns, as far as memory and kernels hang on it."""

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


def properties(target: Target) -> Properties:
    return Properties(target.card, *target.capability, target.total_bytes, target.multiprocessors)


@contextmanager
def answered_for(target: Target) -> Iterator[None]:
    """Let the target's card answer inside."""
    with _forgotten(), replaced(_replacements(properties(target))):
        yield


def _replacements(card: Properties) -> dict[tuple[Any, str], Callable[[Any], Any]]:
    memory = (card.total_memory, card.total_memory)
    modules = {
        torch.cuda: {"mem_get_info": memory, **_of_cuda(card)},
        torch.cuda.memory: {"mem_get_info": memory},
        torch.accelerator: {"get_memory_info": memory, **_OF_ACCELERATORS},
        torch.accelerator.memory: {"get_memory_info": memory},
    }
    answers = {
        **{(torch.cuda, name): _instead(answer) for name, answer in ANSWERS.items()},
        (torch.accelerator, "current_stream"): _instead(ANSWERS["current_stream"]),
        **{
            (module, name): _instead(_always(answer))
            for module, named in modules.items()
            for name, answer in named.items()
        },
    }
    return {key: answer for key, answer in answers.items() if hasattr(*key)}


def _of_cuda(card: Properties) -> dict[str, Any]:
    capability = (card.major, card.minor)
    return {
        **_THERE,
        "_device_count_nvml": 1,
        "is_initialized": True,
        "is_bf16_supported": capability >= (8, 0),
        "is_tf32_supported": capability >= (8, 0),
        "get_device_name": card.name,
        "get_device_properties": card,
        "get_device_capability": capability,
        "get_arch_list": [f"sm_{card.major}{card.minor}"],
        "can_device_access_peer": False,
        **dict.fromkeys(_SEEDS),
        "get_rng_state_all": [],
    }


_THERE = {"is_available": True, "device_count": 1}
# Random numbers are the stand-in's, from its own generator; a wait has nothing to wait for.
_SEEDS = (
    *("_lazy_init", "manual_seed", "manual_seed_all", "seed", "seed_all"),
    *("get_rng_state", "set_rng_state", "set_rng_state_all"),
)
_WAITS = ("synchronize", "empty_cache", "set_device_index", "set_device_idx", "set_stream")
_OF_ACCELERATORS = {
    **_THERE,
    "current_accelerator": torch.device("cuda"),
    "current_device_index": 0,
    "current_device_idx": 0,
    **dict.fromkeys(_WAITS),
}


def _always(answer: Any) -> Callable[..., Any]:
    return lambda *args, **kwargs: answer


def _instead(answer: Any) -> Callable[[Any], Any]:
    return lambda real: answer


# ------------------------------------------------------------------ what libraries remember


@contextmanager
def _forgotten() -> Iterator[None]:
    """Let libraries ask anew inside, and again afterwards."""
    states = [(state, dict(state)) for state in _shared_states()]
    _forget()
    try:
        yield
    finally:
        _forget()
        for state, before in states:
            state.update(before)


def _forget() -> None:
    for name in _ASKERS:
        for function in vars(sys.modules.get(name, object)).values():
            if hasattr(function, "cache_clear"):
                function.cache_clear()
    for state in _shared_states():
        state.clear()


def _shared_states() -> Iterator[dict[str, Any]]:
    """accelerate's, one for the whole process: on which device it is, in which precision."""
    module = sys.modules.get("accelerate.state")
    for name in ("PartialState", "AcceleratorState", "GradientState"):
        yield from [getattr(module, name)._shared_state] if module else []
