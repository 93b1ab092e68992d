"""What a function's result depends on besides its arguments, as it was when the function first ran.

    random numbers      begin where they began, and afterwards stand where they stood
    autocast            on or off, its dtype and its cache, on the CPU and the accelerator
    default device      of `with torch.device(...)`
    running statistics  BatchNorm and its kin, in training, work on copies of their buffers: what a
                        second run adds to them is thrown away

Not here: other global state (flags such as `torch.use_deterministic_algorithms`, variables of the
user's), modes for functions and operators, and statistics that anything but a module of
`STATISTICS` keeps. A module whose *result* depends on a buffer that it has just changed, as that of
`spectral_norm` does, computes something else the second time: `check="hash"` says so.
"""

from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from threading import get_ident
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_pre_hook

from memlab.checkpointing import random_states
from memlab.internals.torch_internals import len_torch_function_stack

STATISTICS = (nn.modules.batchnorm._NormBase,)  # of all BatchNorms and InstanceNorms

Copies = list[Tensor | None]
Autocast = tuple[str, torch.dtype, bool, bool]  # device, dtype, enabled, cache enabled

_CPU = torch.device("cpu")


class Surroundings:
    """What is around a function now; `with surroundings.restored():` it is so again."""

    def __init__(self, arguments: Iterable[Any], random: Iterable[str]) -> None:
        self._random = random_states.read(random, arguments)
        self._autocast = _autocast()
        self._default_device = _default_device()

    @contextmanager
    def restored(self, statistics: tuple[type[nn.Module], ...] = STATISTICS) -> Iterator[Copies]:
        """Everything as it was, but for the buffers of the modules of these classes: `with` hands
        out the copies that stand in for them."""
        with (
            random_states.standing_at(self._random),
            _buffers_copied(statistics) as copies,
            self._settings(),
        ):
            yield copies

    def _settings(self) -> AbstractContextManager[Any]:
        """Enters what differs from now: most often nothing."""
        now, device = _autocast(), _default_device()
        if now == self._autocast and device == self._default_device:
            return nullcontext()
        stack = ExitStack()
        for (kind, *was), (_, *is_now) in zip(self._autocast, now, strict=True):
            if was != is_now:
                stack.enter_context(torch.autocast(kind, *was))
        if device != self._default_device:
            stack.enter_context(self._default_device)
        return stack


def _autocast() -> tuple[Autocast, ...]:
    """The arguments of each `torch.autocast` that would set what is set now."""
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if accelerator is None or not torch.amp.is_autocast_available(accelerator.type):
        return (_autocast_on("cpu"),)
    return _autocast_on("cpu"), _autocast_on(accelerator.type)


def _autocast_on(device: str) -> Autocast:
    dtype, is_enabled = torch.get_autocast_dtype(device), torch.is_autocast_enabled(device)
    return device, dtype, is_enabled, torch.is_autocast_cache_enabled()


def _default_device() -> torch.device:
    """A default device is a mode for functions; where there is no mode, there is no need to ask."""
    return torch.get_default_device() if len_torch_function_stack() else _CPU


@contextmanager
def _buffers_copied(kinds: tuple[type[nn.Module], ...]) -> Iterator[Copies]:
    """Let modules of these kinds that are in training write into copies of their buffers."""
    thread = get_ident()  # the hook below hears of modules in every thread
    originals: dict[nn.Module, dict[str, Tensor | None]] = {}
    copies: Copies = []

    def copy_buffers(module: nn.Module, inputs: Any) -> None:
        if not isinstance(module, kinds) or not module.training or get_ident() != thread:
            return
        if module not in originals:
            originals[module] = module._buffers
            module._buffers = {
                name: None if buffer is None else buffer.clone()
                for name, buffer in module._buffers.items()
            }
            copies.extend(module._buffers.values())

    hook = register_module_forward_pre_hook(copy_buffers)
    try:
        yield copies
    finally:
        hook.remove()
        for module, buffers in originals.items():
            module._buffers = buffers
