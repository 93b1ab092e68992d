"""Predict measured steps, each with the package versions that were measured.

transformers' memory changes from version to version, so the versions of a measurement are installed
beside the others, in a folder of .venv/evidence (`make evidence`), and predicted in processes that
import from there.
"""

import logging
import os
import sys
import time
import warnings
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import partial
from multiprocessing.context import SpawnContext, SpawnProcess
from typing import Any
from unittest.mock import patch

import numpy as np
from common import ROOT, set_environment

import memlab
from memlab import Kernels
from memlab.trace import Trace

from .measurements import MIB, Measurement

PACKAGES = ROOT / ".venv" / "evidence"
WORKERS = 2


@dataclass(frozen=True)
class EvidenceRow:
    """A measurement and its prediction, in bytes."""

    measurement: Measurement
    allocated_bytes: int
    reserved_bytes: int
    reserved_most_bytes: int | None  # upper bound, for convolutions
    kernels: tuple[str, ...]  # that the prediction chose as CUDA does
    cpu_seconds: float

    @property
    def allocated_error(self) -> float | None:
        measured = self.measurement.allocated_bytes
        if self.allocated_is_exact:
            return 0.0 if measured else None
        return self.allocated_bytes / measured - 1

    @property
    def allocated_is_exact(self) -> bool:
        """Whether it is the measured figure, which Liger-Kernel rounded to a float32 of MiB."""
        measured = self.measurement.allocated_bytes
        if self.measurement.source == "Liger":
            return np.float32(self.allocated_bytes / MIB) == np.float32(measured / MIB)
        return measured in (None, self.allocated_bytes)

    @property
    def reserved_error(self) -> float | None:
        measured = self.measurement.reserved_bytes
        return self.reserved_bytes / measured - 1 if measured else None

    @property
    def error(self) -> float:
        """Of reserved memory, or of allocated memory where only that was measured."""
        reserved = self.reserved_error
        return (self.allocated_error or 0.0) if reserved is None else reserved


def missing_packages(wanted: Iterable[str]) -> list[str]:
    """Return the folders of packages that `make evidence` has not installed yet."""
    names = {name for packages in wanted for name in packages.split()}
    return sorted(name for name in names if not (PACKAGES / name).exists())


def predictions(measurements: Sequence[Measurement]) -> Iterator[EvidenceRow]:
    """Predict in processes that import the measured versions, one group of versions at a time."""
    for packages in dict.fromkeys(m.packages for m in measurements):
        group = [m for m in measurements if m.packages == packages]
        with importing(packages, WORKERS) as processes:
            yield from processes.map(predicted, group)


def importing(packages: str, workers: int) -> ProcessPoolExecutor:
    """Return processes that import from these folders of .venv/evidence."""
    return ProcessPoolExecutor(workers, _Importing(packages), _prepare)


class _Importing(SpawnContext):
    """Start processes that find packages in a folder from their start, before they import torch."""

    def __init__(self, packages: str) -> None:
        self._folders = [str(PACKAGES / name) for name in packages.split()]

    def Process(self, *args: Any, **options: Any) -> SpawnProcess:  # noqa: N802 - its name
        return _Process(self._folders, *args, **options)


class _Process(SpawnProcess):
    def __init__(self, folders: list[str], *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._folders = folders

    def start(self) -> None:
        with patch.object(sys, "path", [*self._folders, *sys.path]):  # which it hands over
            super().start()


def _prepare() -> None:
    set_environment()
    warnings.simplefilter("ignore")  # of libraries, about each other's versions
    logging.disable(logging.WARNING)
    os.environ["HF_HUB_DISABLE_PROGRESS_BARS"] = "1"  # transformers shows how it loads weights


def predicted(measurement: Measurement) -> EvidenceRow:
    """Predict a measured step with the packages of this process."""
    start = time.process_time()
    builders = {"T4": _lora, "xMem": _xmem, "H100": _compiled, "torchao": _vision, "Liger": _liger}
    how = builders.get(measurement.source, _own)
    with patch("memlab.prediction.accuracy.confirmed_kernels", frozenset):
        trace = how(measurement)
    memory, reserved = trace.memory, trace.memory.reserved_peak_bytes or 0
    most = memory.reserved_most_bytes
    if measurement.source == "xMem":
        from . import xmem

        used = xmem.used_bytes(measurement.facts, trace)
        most, reserved = most and used + most - reserved, used
    allocated, seconds = memory.allocated_peak_bytes or 0, time.process_time() - start
    return EvidenceRow(measurement, allocated, reserved, most, _kernels(trace), seconds)


def _lora(measurement: Measurement) -> Trace:
    from . import lora

    return memlab.predict(partial(lora.build, *measurement.facts), device="cuda:t4")


def _xmem(measurement: Measurement) -> Trace:
    from . import xmem

    row = measurement.facts
    device = "cuda:rtx4060" if "4060" in row["gpu"] else "cuda:rtx3060"
    return memlab.predict(partial(xmem.build, row), device=device, steps=xmem.STEPS)


def _compiled(measurement: Measurement) -> Trace:
    from . import compiled_gpt

    build = partial(compiled_gpt.build, measurement.facts)
    return memlab.predict(build, device="cuda:h100", kernels=Kernels(attention="flash"))


def _vision(measurement: Measurement) -> Trace:
    from . import vit

    return memlab.predict(partial(vit.build, measurement.facts), device="cuda:rtx4070tisuper")


def _liger(measurement: Measurement) -> Trace:
    from . import liger

    run = measurement.facts
    return memlab.predict(partial(liger.build, run), device=f"cuda:{run['gpu']}")


def _own(measurement: Measurement) -> Trace:
    from . import own

    source, row = measurement.facts
    size = own.SMALL if source["small"] else own.FULL
    return own.predicted(row["configuration"], size, source["target"])


def _kernels(trace: Trace) -> tuple[str, ...]:
    """Return the kernels that the trace's notes name; with none confirmed, these are all."""
    start = "not yet confirmed by a GPU: "
    notes = [note.removeprefix(start) for note in trace.notes if note.startswith(start)]
    return tuple(name for note in notes for name in note.split(", "))
