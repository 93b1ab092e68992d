"""`memlab doctor`: what this machine has, and what works on it."""

import importlib.metadata
import os
import platform
import shutil
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

import torch
from rich.console import Console

import memlab
from memlab.cli.errors import in_one_line
from memlab.cli.machine import devices_present, memory_of, name_of
from memlab.internals.torch_internals import cuda_driver_version
from memlab.train import TECHNIQUES, Plugs, Setting, Technique, build, combined, measured
from memlab.train.plugs import techniques_with_kernels
from memlab.units import format_bytes

LOWEST_PYTHON, LOWEST_TORCH = (3, 11), (2, 11)
OPTIONAL = {
    "matplotlib": "pictures",
    "jupyterlab": "the course's notebooks",
    "transformers": "some tests",
    "bitsandbytes": "comparisons with its 8-bit optimizers",
    "triton": "memlab.kernels, on a GPU",
}
NEEDED_DISK = 100 * 2**20
SMALL = Setting("tiny", batch=2, seq_len=32)


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
    for device in devices_present():
        yield _tried("meter", _meter_works, device)
        yield _tried("techniques", _techniques_work, device)
        if device == "cuda" and find_spec("triton"):
            yield _tried("kernels", _kernels_work, device)
    yield _tried("dry run", _dry_run_works)
    yield _disk()
    for package, use in OPTIONAL.items():
        yield _package(package, use)
    if os.environ.get("OMP_WAIT_POLICY", "").upper() != "PASSIVE":
        advice = "set OMP_WAIT_POLICY=PASSIVE where other programs use the same cores"
        yield Finding("threads", None, f"{torch.get_num_threads()}; {advice}")


def _at_least(name: str, found: str, version: tuple[int, ...], lowest: tuple[int, ...]) -> Finding:
    wanted = ".".join(map(str, lowest))
    text = found if version >= lowest else f"{found}; memlab wants {wanted} or newer"
    return Finding(name, version >= lowest, text)


def _build() -> str:
    if torch.version.hip:
        return f"ROCm {torch.version.hip}"
    if torch.version.cuda:
        return f"CUDA {torch.version.cuda}"
    return "Metal" if torch.backends.mps.is_built() else "the CPU"


def _host() -> str:
    system = f"{platform.system()} {platform.machine()}, {os.cpu_count()} cores"
    memory = memory_of(torch.device("cpu"))
    if memory is None:
        return system
    free, total = memory
    return f"{system}, {format_bytes(total)} of memory, {format_bytes(free)} unused"


def _tried(name: str, attempt: Callable[..., str], *arguments: object) -> Finding:
    """What `attempt` says if it works; what it raises is the reason why not."""
    try:
        return Finding(name, True, attempt(*arguments))
    except Exception as error:
        return Finding(name, False, in_one_line(error))


# ------------------------------------------------------------------ devices


def _devices() -> Iterator[Finding]:
    """The accelerator, its driver and free memory; or why there is none."""
    with warnings.catch_warnings(record=True) as said:  # by a driver that is too old, for one
        warnings.simplefilter("always")
        kind = devices_present()[-1]
    if kind != "cpu":
        for index in range(torch.accelerator.device_count()):
            yield _tried("device", _describe, torch.device(kind, index))
    elif card := _card():
        reason = (
            str(said[0].message).splitlines()[0]
            if said
            else f"it is built for {_build()}; install another"
        )
        yield Finding("device", False, f"{card} is here, but this torch cannot use it: {reason}")
    else:
        yield Finding("device", None, "no accelerator found; everything runs on the CPU")


def _describe(device: torch.device) -> str:
    memory = memory_of(device)
    parts = [f"{device} {name_of(device)}"]
    if memory is not None:
        parts.append(f"{format_bytes(memory[0])} free of {format_bytes(memory[1])}")
    if device.type == "mps":
        limit = format_bytes(torch.mps.recommended_max_memory())
        parts.append(f"Metal recommends {limit} at most")
    if device.type == "cuda" and not torch.version.hip:
        version = cuda_driver_version()
        parts.append(f"driver for CUDA {version // 1000}.{version % 1000 // 10}")
    return ", ".join(parts)


def _card() -> str | None:
    """The GPU whose driver is installed here, whether or not torch can use it."""
    if Path("/dev/nvidiactl").exists() or shutil.which("nvidia-smi"):
        return "an NVIDIA GPU"
    return "an AMD GPU" if Path("/dev/kfd").exists() else None


# ------------------------------------------------------------------ what works


def _meter_works(device: str) -> str:
    peak = _peak(TECHNIQUES["plain"], device)
    return f"a training step on {device} was measured: peak {format_bytes(peak)}"


def _techniques_work(device: str) -> str:
    _require_all_work(TECHNIQUES, device)
    return f"the plain step and all {len(TECHNIQUES) - 1} techniques work on {device}"


def _kernels_work(device: str) -> str:
    by_kernel = {name: combined(name, kernels=True) for name in techniques_with_kernels()}
    _require_all_work(by_kernel, device)
    return f"every technique that has a Triton kernel works by it on {device}"


def _require_all_work(techniques: Mapping[str, Technique | Plugs], device: str) -> None:
    failed = {}
    for name, technique in techniques.items():
        try:
            _peak(technique, device)
        except Exception as error:
            failed[name] = in_one_line(error)
    if failed:
        reasons = "; ".join(f"{name} ({reason})" for name, reason in failed.items())
        raise RuntimeError(f"not all work on {device}: {reasons}")


def _dry_run_works() -> str:
    real = _peak(TECHNIQUES["plain"], "cpu")
    with memlab.dry_run():
        dry = _peak(TECHNIQUES["plain"], "cpu")
    if real != dry:
        raise RuntimeError(f"a dry run says {dry} bytes, the real step took {real}")
    return f"equal to the real step, to the byte ({dry:,} B)"


def _peak(technique: Technique | Plugs, device: str) -> int:
    training = build(replace(SMALL, device=device), technique)
    training.step()
    return measured(training).peak_bytes


# ------------------------------------------------------------------ disk and packages


def _disk() -> Finding:
    free = shutil.disk_usage(".").free
    short = "" if free >= NEEDED_DISK else f"; pictures need {format_bytes(NEEDED_DISK)}"
    return Finding("disk", not short, f"{format_bytes(free)} free here{short}")


def _package(package: str, use: str) -> Finding:
    try:
        return Finding(package, True, f"{importlib.metadata.version(package)}, for {use}")
    except importlib.metadata.PackageNotFoundError:
        return Finding(package, None, f"not installed; for {use}")
