"""Predict measured steps, each with the package versions that were measured.

transformers' memory changes from version to version, so the versions of a measurement are installed
beside the others, in a folder of .venv/evidence (`make evidence`), and predicted in processes that
import from there.
"""

import logging
import multiprocessing
import sys
import time
import warnings
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import partial

from common import ROOT, set_environment

import memlab

from .measurements import Measurement

PACKAGES = ROOT / ".venv" / "evidence"
WORKERS = 2


@dataclass(frozen=True)
class EvidenceRow:
    """A measurement and its prediction, in bytes."""

    measurement: Measurement
    allocated_bytes: int
    reserved_bytes: int
    reserved_most_bytes: int | None  # upper bound, for convolutions
    cpu_seconds: float

    @property
    def allocated_error(self) -> float | None:
        measured = self.measurement.allocated_bytes
        return self.allocated_bytes / measured - 1 if measured else None

    @property
    def reserved_error(self) -> float:
        return self.reserved_bytes / self.measurement.reserved_bytes - 1


def missing_packages(measurements: Sequence[Measurement]) -> list[str]:
    """Return the folders of packages that `make evidence` has not installed yet."""
    names = {m.packages for m in measurements if m.packages}
    return sorted(name for name in names if not (PACKAGES / name).exists())


def predictions(measurements: Sequence[Measurement]) -> Iterator[EvidenceRow]:
    """Predict in processes that import the measured versions, one group of versions at a time."""
    for packages in dict.fromkeys(m.packages for m in measurements):
        group = [m for m in measurements if m.packages == packages]
        spawned = multiprocessing.get_context("spawn")
        with ProcessPoolExecutor(WORKERS, spawned, _prepare, (packages,)) as pool:
            yield from pool.map(predicted, group)


def _prepare(packages: str) -> None:
    if packages:
        sys.path.insert(0, str(PACKAGES / packages))
    set_environment()
    warnings.simplefilter("ignore")  # of libraries, about each other's versions
    logging.disable(logging.WARNING)


def predicted(measurement: Measurement) -> EvidenceRow:
    """Predict a measured step with the packages of this process."""
    start = time.process_time()
    how = {"T4": _lora, "xMem": _xmem}.get(measurement.source, _own)
    allocated, reserved, most = how(measurement)
    return EvidenceRow(measurement, allocated, reserved, most, time.process_time() - start)


def _lora(measurement: Measurement) -> tuple[int, int, int | None]:
    from . import lora

    memory = memlab.predict(partial(lora.build, *measurement.facts)).memory
    return memory.allocated_peak_bytes or 0, memory.reserved_peak_bytes or 0, None


def _xmem(measurement: Measurement) -> tuple[int, int, int | None]:
    from . import xmem

    row = measurement.facts
    trace = memlab.predict(partial(xmem.build, row), steps=xmem.STEPS)
    memory, used = trace.memory, xmem.used_bytes(row, trace)
    most = memory.reserved_most_bytes
    more = most - (memory.reserved_peak_bytes or 0) if most else None
    return memory.allocated_peak_bytes or 0, used, None if more is None else used + more


def _own(measurement: Measurement) -> tuple[int, int, int | None]:
    from gpu_sections.configurations import CONFIGURATIONS, FULL
    from gpu_sections.predictions import step_predicted

    source, row = measurement.facts
    trace = step_predicted(CONFIGURATIONS[row["configuration"]], FULL, source["target"])
    memory = trace.memory
    return memory.allocated_peak_bytes or 0, memory.reserved_peak_bytes or 0, None
