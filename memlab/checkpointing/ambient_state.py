"""Save and restore the global state that a function depends on besides its arguments.

    random states       restored for the second run, and put back afterwards
    autocast            on or off, dtype and cache, on the CPU and the accelerator
    default device      set by `with torch.device(...)`
    running statistics  BatchNorm and InstanceNorm in training write into copies of their buffers,
                        so the second run does not count a batch twice

Not restored: other global state (such as `torch.use_deterministic_algorithms`, or the user's
variables), function and dispatch modes, and statistics of modules not listed in `STATISTICS`. A
module whose *result* depends on a buffer it has just changed, such as `spectral_norm`, computes a
different result in the second run; `check="hash"` detects this.
"""

from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from threading import get_ident, local
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_pre_hook

from memlab.checkpointing import random_states
from memlab.internals.torch_internals import len_torch_function_stack

# `spectral_norm` is not among them: its result depends on the buffer that it changes, and its
# gradient was 21 % off.
STATISTICS = (nn.modules.batchnorm._NormBase,)  # base class of BatchNorm and InstanceNorm

Copies = list[Tensor | None]
Autocast = tuple[str, torch.dtype, bool, bool]  # device, dtype, enabled, cache enabled

_CPU = torch.device("cpu")
_thread = local()  # of this thread: whether it is copying buffers


class AmbientState:
    """The global state now. `with state.restored():` restores it temporarily."""

    def __init__(self, arguments: Iterable[Any], random: Iterable[str]) -> None:
        # Even if the run leaves the states unchanged: the function may draw inside `fork_rng`.
        self._random = random_states.read(random, arguments)
        self._autocast = _autocast()
        self._default_device = _default_device()

    @contextmanager
    def restored(self, statistics: tuple[type[nn.Module], ...] = STATISTICS) -> Iterator[Copies]:
        """Restore the state. Modules of the classes `statistics` write into copies of their
        buffers; yield the copies."""
        with (
            random_states.restored_to(self._random),
            _buffers_copied(statistics) as copies,
            self._settings(),
        ):
            yield copies

    def _settings(self) -> AbstractContextManager[Any]:
        """Return a context that restores the settings that have changed, most often none."""
        now, device = _autocast(), _default_device()
        if now == self._autocast and device == self._default_device:
            return nullcontext()
        stack = ExitStack()
        for was, is_now in zip(self._autocast, now, strict=True):
            if was != is_now:
                stack.enter_context(torch.autocast(*was))
        if device != self._default_device:
            stack.enter_context(self._default_device)
        return stack


def _autocast() -> tuple[Autocast, ...]:
    """Return the `torch.autocast` arguments that reproduce the current settings."""
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if accelerator is None or not torch.amp.is_autocast_available(accelerator.type):
        return (_autocast_on("cpu"),)
    return _autocast_on("cpu"), _autocast_on(accelerator.type)


def _autocast_on(device: str) -> Autocast:
    dtype, is_enabled = torch.get_autocast_dtype(device), torch.is_autocast_enabled(device)
    return device, dtype, is_enabled, torch.is_autocast_cache_enabled()


def _default_device() -> torch.device:
    """Return the default device. A default device is a function mode, so no mode means the CPU."""
    return torch.get_default_device() if len_torch_function_stack() else _CPU


def is_copying_buffers() -> bool:
    """Return whether this thread now calls operators that the first run did not call."""
    return getattr(_thread, "is_copying", False)


@contextmanager
def _buffers_copied(kinds: tuple[type[nn.Module], ...]) -> Iterator[Copies]:
    """Replace the buffers of these classes' modules with copies while they train."""
    thread = get_ident()  # the hook is global, so it also runs in other threads
    originals: dict[nn.Module, dict[str, Tensor | None]] = {}
    copies: Copies = []

    def copy_buffers(module: nn.Module, inputs: Any) -> None:
        if not isinstance(module, kinds) or not module.training or get_ident() != thread:
            return
        if module not in originals:
            originals[module] = module._buffers
            _thread.is_copying = True
            try:
                module._buffers = {
                    name: None if buffer is None else buffer.clone()
                    for name, buffer in module._buffers.items()
                }
            finally:
                _thread.is_copying = False
            copies.extend(module._buffers.values())

    hook = register_module_forward_pre_hook(copy_buffers)
    try:
        yield copies
    finally:
        hook.remove()
        for module, buffers in originals.items():
            module._buffers = buffers
