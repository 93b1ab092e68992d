"""Draw the samples that a real DataLoader would draw.

A DataLoader's random samplers read random values, which are unknown in a dry run. As unknown
integers, all indices would be 1, and every batch would have the lengths of sample 1. So samplers
draw real random numbers, and the random number generators are restored afterwards.
"""

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch.utils import data
from torch.utils.data import Sampler

from memlab.dry_runs import known_values
from memlab.internals.torch_internals import FakeTensor, without_modes
from memlab.metering.frames import frames

_BLOCK = 4096  # samples drawn at once
_FOLDER = str(Path(data.__file__).parent)


def is_loader_seed() -> bool:
    """Return whether torch.utils.data reads the value, which is then a seed."""
    return next(frames()).f_code.co_filename.startswith(_FOLDER)


def _draw_real_samples(iterate: Callable[[Sampler], Iterator[Any]]) -> Callable[..., Any]:
    def indices(sampler: Sampler) -> Iterator[Any]:
        fakes = {k: v for k, v in vars(sampler).items() if isinstance(v, FakeTensor)}
        if not all(map(known_values.is_known, fakes.values())):
            return iterate(sampler)
        real = copy.copy(sampler)
        vars(real).update({name: known_values.real(fake) for name, fake in fakes.items()})
        return _drawn(lambda: iterate(real), getattr(sampler, "generator", None))

    return indices


def _drawn(iterate: Callable[[], Iterator[Any]], generator: torch.Generator | None) -> Iterator:
    """Draw block by block: a sampler with replacement may be endless."""
    # minGPT's `RandomSampler(replacement=True, num_samples=10**10)` as a list would fill the
    # memory.
    samples, state, has_more = None, None, True
    while has_more:
        with without_modes(), _restored(generator):
            if state is not None:
                _set_state(generator, state)
            samples = iterate() if samples is None else samples
            block = list(islice(samples, _BLOCK))
            state = _state(generator)
        has_more = len(block) == _BLOCK
        yield from block


def _state(generator: torch.Generator | None) -> torch.Tensor:
    return torch.get_rng_state() if generator is None else generator.get_state()


def _set_state(generator: torch.Generator | None, state: torch.Tensor) -> None:
    if generator is None:
        torch.set_rng_state(state)
    else:
        generator.set_state(state)


@contextmanager
def _restored(generator: torch.Generator | None) -> Iterator[None]:
    """Restore the generators after the block."""
    state: Any = None if generator is None else generator.get_state()
    with torch.random.fork_rng(devices=[]):
        yield
    if generator is not None:
        generator.set_state(state)


STAND_INS: dict[str, Callable[[Any], Any]] = {"real_samples": _draw_real_samples}
