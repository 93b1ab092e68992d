"""Streams of random numbers: where each stands, and how to put it back there.

    torch     the CPU's generator (5,056 bytes), those of every device of the accelerator (16 bytes
              each on CUDA), and generators that are given by hand
    python    `random.random()` and its kin
    numpy     `numpy.random.rand()` and its kin; not a `numpy.random.Generator`, which is an object
              of the user's

A Mersenne twister has no counter that would tell whether anything was drawn. But calls between
which nothing was drawn begin in the same state, so they share one tensor of it.
"""

import ctypes
import random
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor


class Stream(NamedTuple):
    """One source of random numbers."""

    read: Callable[[], Any]
    set: Callable[[Any], object]


STREAMS = {
    "python": Stream(random.getstate, random.setstate),
    "numpy": Stream(np.random.get_state, np.random.set_state),
}
NAMES = ("torch", *STREAMS)

State = list[tuple[Stream, Any]]


def read(names: Iterable[str], arguments: Iterable[Any] = ()) -> State:
    """Where the streams of these names stand; generators among the arguments are torch's, too."""
    streams = [STREAMS[name] for name in names if name != "torch"]
    if "torch" in names:
        given = [argument for argument in arguments if isinstance(argument, torch.Generator)]
        streams += [Stream(_cpu_state, torch.default_generator.set_state), *_of_the_accelerator()]
        streams += [Stream(generator.get_state, generator.set_state) for generator in given]
    return [(stream, stream.read()) for stream in streams]


@contextmanager
def standing_at(state: State) -> Iterator[None]:
    """Let the streams begin there, and afterwards go on as if nothing had been drawn inside."""
    before = [(stream, stream.read()) for stream, _ in state]
    put_back(state)
    try:
        yield
    finally:
        put_back(before)


def put_back(state: State) -> None:
    """Set each stream to where it stood."""
    for stream, position in state:
        stream.set(position)


def _of_the_accelerator() -> list[Stream]:
    """One stream for each device, once the accelerator has been used at all."""
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if accelerator is None:
        return []
    module = torch.get_device_module(accelerator)
    if accelerator.type == "mps":  # one device, whose generator has no public name
        return [Stream(module.get_rng_state, module.set_rng_state)]
    generators = getattr(module, "default_generators", ())
    return [Stream(generator.get_state, generator.set_state) for generator in generators]


_latest: Callable[[], Tensor | None] = lambda: None  # noqa: E731 - a dead weak reference at first


def _cpu_state() -> Tensor:
    """The state of the CPU's generator: the tensor of the call before where it is the same."""
    global _latest
    state, before = torch.default_generator.get_state(), _latest()
    if before is not None and _content(before) == _content(state):
        return before
    _latest = weakref.ref(state)
    return state


def _content(state: Tensor) -> bytes:
    """Read past the dispatcher: no mode, meter or dry run has to do with it."""
    return ctypes.string_at(state.data_ptr(), state.nbytes)
