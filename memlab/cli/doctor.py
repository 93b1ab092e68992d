"""`memlab doctor`: what this machine has, and what works on it."""

import importlib.metadata
import os
import platform
import shutil
import sys
from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
from rich.console import Console

import memlab
from memlab.train import TECHNIQUES, Setting, build
from memlab.units import format_bytes

LOWEST_PYTHON, LOWEST_TORCH = (3, 11), (2, 11)
OPTIONAL = {
    "matplotlib": "pictures",
    "jupyterlab": "the course's notebooks",
    "transformers": "some tests",
    "bitsandbytes": "comparisons with its 8-bit optimizers",
}
NEEDED_DISK = 100 * 2**20


class Finding(NamedTuple):
    """One line of the report. `ok` is None for what is only said, neither good nor bad."""

    name: str
    ok: bool | None
    text: str


def examine() -> int:
    """Print one line for each finding; 1 if one of them is a FAIL, else 0."""
    console = Console(highlight=False)
    failed = False
    for finding in _findings():
        mark = {True: "[green]OK  [/]", False: "[red]FAIL[/]", None: "    "}[finding.ok]
        console.print(f"{mark} {finding.name:<12}", end=" ")
        console.print(finding.text, markup=False, soft_wrap=True)
        failed |= finding.ok is False
    return int(failed)


def _findings() -> Iterator[Finding]:
    yield _at_least("python", platform.python_version(), sys.version_info[:2], LOWEST_PYTHON)
    version = tuple(map(int, torch.__version__.split("+")[0].split(".")[:2]))
    yield _at_least("torch", f"{torch.__version__}, built for {_build()}", version, LOWEST_TORCH)
    yield Finding("host", None, _host())
    yield from _devices()
    yield _tried("meter", "cpu", _meter_works)
    yield _tried("dry run", "cpu", _dry_run_works)
    yield _disk()
    for package, use in OPTIONAL.items():
        yield _package(package, use)
    if os.environ.get("OMP_WAIT_POLICY", "").upper() != "PASSIVE":
        advice = "set OMP_WAIT_POLICY=PASSIVE where other programs use the same cores"
        yield Finding("threads", None, f"{torch.get_num_threads()}; {advice}")


def _at_least(name: str, found: str, version: tuple, lowest: tuple) -> Finding:
    wanted = ".".join(map(str, lowest))
    text = found if version >= lowest else f"{found}; memlab wants {wanted} or newer"
    return Finding(name, version >= lowest, text)


def _build() -> str:
    if torch.version.hip:
        return f"ROCm {torch.version.hip}"
    return f"CUDA {torch.version.cuda}" if torch.version.cuda else "the CPU"


def _host() -> str:
    system = f"{platform.system()} {platform.machine()}, {os.cpu_count()} cores"
    try:
        page = os.sysconf("SC_PAGE_SIZE")
        total, free = (page * os.sysconf(f"SC_{which}_PAGES") for which in ("PHYS", "AVPHYS"))
    except (AttributeError, ValueError, OSError):  # not every system tells
        return system
    return f"{system}, {format_bytes(total)} of memory, {format_bytes(free)} unused"


def _devices() -> Iterator[Finding]:
    """The accelerator, its driver and free memory, and whether a step runs on it."""
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if accelerator is None:
        yield Finding("device", None, "no accelerator found; everything runs on the CPU")
        return
    kind = accelerator.type
    for index in range(torch.accelerator.device_count()):
        yield Finding("device", True, _describe_device(kind, index))
    yield _tried("step", kind, _meter_works)


def _describe_device(kind: str, index: int) -> str:
    if kind == "cuda":
        free, total = torch.cuda.mem_get_info(index)
        name = torch.cuda.get_device_name(index)
        driver = f"driver for CUDA {torch._C._cuda_getDriverVersion() / 1000:.1f}"
        memory = f"{format_bytes(free)} free of {format_bytes(total)}"
        return f"{kind}:{index} {name}, {memory}" + ("" if torch.version.hip else f", {driver}")
    if kind == "mps":
        limit = torch.mps.recommended_max_memory()
        return f"mps, Apple {platform.machine()}, up to {format_bytes(limit)} recommended"
    return f"{kind}:{index}"


def _tried(name: str, device: str, attempt: Callable[[str], str]) -> Finding:
    """Whether `attempt` works on the device; what it raises is the reason why not."""
    try:
        return Finding(name, True, attempt(device))
    except Exception as error:
        return Finding(name, False, f"{type(error).__name__}: {error}")


def _peak(setting: Setting) -> int:
    training = build(setting, TECHNIQUES["plain"])
    training.step()
    trace = memlab.measure(training.step, model=training.model, optimizer=training.optimizer)
    return trace.peak_bytes


def _meter_works(device: str) -> str:
    peak = _peak(Setting("tiny", batch=2, seq_len=32, device=device))
    return f"a training step on {device} was measured: peak {format_bytes(peak)}"


def _dry_run_works(device: str) -> str:
    setting = Setting("tiny", batch=2, seq_len=32, device=device)
    real = _peak(setting)
    with memlab.dry_run():
        dry = _peak(setting)
    if real != dry:
        raise RuntimeError(f"a dry run says {dry} bytes, the real step took {real}")
    return f"equal to the real step, to the byte ({dry:,} B)"


def _disk() -> Finding:
    free = shutil.disk_usage(".").free
    short = "" if free >= NEEDED_DISK else f"; pictures need {format_bytes(NEEDED_DISK)}"
    return Finding("disk", not short, f"{format_bytes(free)} free here{short}")


def _package(package: str, use: str) -> Finding:
    try:
        return Finding(package, True, f"{importlib.metadata.version(package)}, for {use}")
    except importlib.metadata.PackageNotFoundError:
        return Finding(package, None, f"not installed; for {use}")
