"""Which samples of a dataset a dry run sees: those that a real DataLoader would draw.

A DataLoader shuffles by random numbers that it reads, and a dry run has none. Answered like any
other number that nobody knows, each would be sample 1: every batch had the lengths of that one.
So samplers draw for real, and leave the random number generators as they were.
"""

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch.utils import data
from torch.utils.data import RandomSampler, Sampler, SubsetRandomSampler, WeightedRandomSampler

from memlab.dry_runs import known_values
from memlab.internals.torch_internals import FakeTensor
from memlab.metering.frames import frames

_FOLDER = str(Path(data.__file__).parent)


def read_by_a_loader() -> bool:
    """Whether torch's own loading of data reads a number: a seed."""
    return next(frames()).f_code.co_filename.startswith(_FOLDER)


def _drawing_for_real(iterate: Callable[[Sampler], Iterator[Any]]) -> Callable[..., Any]:
    def indices(sampler: Sampler) -> Iterator[Any]:
        fakes = {k: v for k, v in vars(sampler).items() if isinstance(v, FakeTensor)}
        if not all(map(known_values.is_known, fakes.values())):
            return iterate(sampler)
        real = copy.copy(sampler)
        vars(real).update({name: known_values.real(fake) for name, fake in fakes.items()})
        with known_values.unseen(), _restored(getattr(sampler, "generator", None)):
            return iter(list(iterate(real)))

    return indices


@contextmanager
def _restored(generator: torch.Generator | None) -> Iterator[None]:
    state = None if generator is None else generator.get_state()
    with torch.random.fork_rng(devices=[]):
        yield
    if generator is not None:
        generator.set_state(state)


def replacements() -> dict[tuple[Any, str], Callable[[Any], Any]]:
    """For `replaced`."""
    samplers = (RandomSampler, SubsetRandomSampler, WeightedRandomSampler)
    return {(sampler, "__iter__"): _drawing_for_real for sampler in samplers}
