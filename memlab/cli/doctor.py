"""`memlab doctor`: check this machine and whether memlab works on it."""

import importlib.metadata
import os
import platform
import shutil
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from itertools import groupby
from operator import attrgetter
from pathlib import Path
from typing import NamedTuple

import torch
from rich.text import Text

import memlab
from memlab.cli.errors import error_summary
from memlab.cli.machine import devices_present, memory_of, name_of
from memlab.cli.terminal import console, printable
from memlab.configs.targets import target_of
from memlab.internals.torch_internals import cuda_driver_version
from memlab.prediction import cudnn
from memlab.train import TECHNIQUES, Plugs, Setting, Technique, build, measured
from memlab.units import format_bytes, paragraph
from memlab.world.confinement import unconfined_reason
from memlab.world.table import EVERY_CACHE, TABLE

LOWEST_PYTHON, LOWEST_TORCH = (3, 11), (2, 11)
OPTIONAL = {
    "matplotlib": "pictures",
    "jupyterlab": "the course's notebooks",
    "transformers": "plans of any model",
    "bitsandbytes": "plans with 8-bit optimizers and QLoRA",
}
MARKS = {True: Text("OK  ", "green"), False: Text("FAIL", "red"), None: Text("    ")}
NEEDED_DISK_BYTES = 100 * 2**20
SMALL = Setting("tiny", batch=2, seq_len=32)


class Finding(NamedTuple):
    """One line of the report. `ok` is None for plain information."""

    name: str
    ok: bool | None
    text: str


def examine() -> int:
    """Print one line per finding; return 1 if any of them failed, else 0."""
    failed = False
    for finding in _findings():
        mark = MARKS[finding.ok] + Text(f" {finding.name:<12} {printable(finding.text)}")
        console.print(mark, soft_wrap=True)
        failed |= finding.ok is False
    return int(failed)


def show_world() -> int:
    """Print what is replaced for a script, by what, why, and the version where it was seen."""
    confines = unconfined_reason()
    console.print("the kernel confines a script" if confines is None else f"here, {confines}")
    for room, rows in groupby(TABLE, attrgetter("room")):
        console.print(f"\n{room}")
        for row in rows:
            owner = row.owner.replace(":", ".") + (" and its importers" if row.also_in else "")
            names = ", ".join("cached functions" if n == EVERY_CACHE else n for n in row.names)
            seen = f"{row.seen}; not in {row.lacks}" if row.lacks else row.seen
            why = f"{row.stand_in}: {row.why} ({seen})"
            console.print(paragraph(f"{owner}: {names}") + "\n" + paragraph(f"  {why}"))
    return 0


def _findings() -> Iterator[Finding]:
    yield _at_least("python", platform.python_version(), sys.version_info[:2], LOWEST_PYTHON)
    version = tuple(map(int, torch.__version__.split("+")[0].split(".")[:2]))
    yield _at_least("torch", f"{torch.__version__}, built for {_build()}", version, LOWEST_TORCH)
    yield Finding("host", None, _host())
    yield from _devices()
    for device in devices_present():
        yield _checked("meter", _meter_works, device)
        yield _checked("techniques", _techniques_work, device)
    yield _checked("dry run", _dry_run_works)
    yield _predictions()
    yield _cudnn()
    yield _disk()
    for package, use in OPTIONAL.items():
        yield _package(package, use)
    if os.environ.get("OMP_WAIT_POLICY", "").upper() != "PASSIVE":
        advice = "set OMP_WAIT_POLICY=PASSIVE if other programs use the same cores"
        yield Finding("threads", None, f"{torch.get_num_threads()}; {advice}")


def _at_least(name: str, found: str, version: tuple[int, ...], lowest: tuple[int, ...]) -> Finding:
    wanted = ".".join(map(str, lowest))
    text = found if version >= lowest else f"{found}; memlab needs {wanted} or newer"
    return Finding(name, version >= lowest, text)


def _build() -> str:
    if torch.version.hip:
        return f"ROCm {torch.version.hip}"
    if torch.version.cuda:
        return f"CUDA {torch.version.cuda}"
    if torch.version.xpu:
        return f"XPU {torch.version.xpu}"
    return "Metal" if torch.backends.mps.is_built() else "the CPU"


def _host() -> str:
    system = f"{platform.system()} {platform.machine()}, {os.cpu_count()} cores"
    memory = memory_of(torch.device("cpu"))
    if memory is None:
        return system
    free, total = memory
    return f"{system}, {format_bytes(total)} of memory, {format_bytes(free)} free"


def _checked(name: str, attempt: Callable[..., str], *arguments: object) -> Finding:
    """Run a check. It passes with the text that it returns, or fails with its error."""
    try:
        return Finding(name, True, attempt(*arguments))
    except Exception as error:
        return Finding(name, False, error_summary(error))


# ------------------------------------------------------------------ devices


def _devices() -> Iterator[Finding]:
    """Describe each accelerator, its driver and free memory, or say why none can be used."""
    with warnings.catch_warnings(record=True) as caught:  # such as an outdated driver
        warnings.simplefilter("always")
        kind = devices_present()[-1]
    if kind != "cpu":
        for index in range(torch.accelerator.device_count()):
            yield _checked("device", _describe, torch.device(kind, index))
    elif card := _installed_gpu():
        reason = (
            str(caught[0].message).splitlines()[0]
            if caught
            else f"it is built for {_build()}; install a build for this GPU"
        )
        yield Finding("device", False, f"{card} was found, but this torch cannot use it: {reason}")
    else:
        yield Finding("device", None, "no accelerator found; everything runs on the CPU")


def _predictions() -> Finding:
    """Say which --device stands for this machine's GPU, or which GPU is assumed without one."""
    if devices_present()[-1] != "cuda":
        return Finding("predictions", None, _DEFAULT_TARGET)
    return _checked("predictions", _target_here)


def _cudnn() -> Finding:
    """Say whether cuDNN can be asked for its workspaces."""
    if version := cudnn.version():
        return Finding("cudnn", True, f"{version}, chooses workspaces of predicted convolutions")
    text = f"no cuDNN {cudnn.OLDEST_NAME} or newer; a rule predicts the workspaces of convolutions"
    return Finding("cudnn", None, text)


_DEFAULT_TARGET = "assume an A100 unless you pass --device cuda:rtx4090"


def _target_here() -> str:
    device = torch.device("cuda", 0)
    if torch.version.hip:
        arch = torch.cuda.get_device_properties(device).gcnArchName.split(":")[0]
    else:
        arch = "sm_{}{}".format(*torch.cuda.get_device_capability(device))
    target = target_of(name_of(device), arch)
    if target is None:
        return f"{_DEFAULT_TARGET}; {arch} is unknown"
    workspace = f"{target.workspace_bytes / 2**20:.3g} MiB"
    kernel = (*target.attention_order, "math")[0]
    return f"{target.device}: {target.gpu.arch}, workspace {workspace}, {kernel} attention"


def _describe(device: torch.device) -> str:
    memory = memory_of(device)
    parts = [f"{device} {name_of(device)}"]
    if memory is not None:
        parts.append(f"{format_bytes(memory[0])} free of {format_bytes(memory[1])}")
    if device.type == "mps":
        limit = format_bytes(torch.mps.recommended_max_memory())
        parts.append(f"Metal recommends at most {limit}")
    if device.type == "cuda" and not torch.version.hip:
        version = cuda_driver_version()
        parts.append(f"driver for CUDA {version // 1000}.{version % 1000 // 10}")
    return ", ".join(parts)


def _installed_gpu() -> str | None:
    """Return the GPU whose driver is installed, whether or not torch can use it."""
    if Path("/dev/nvidiactl").exists() or shutil.which("nvidia-smi"):
        return "an NVIDIA GPU"
    if Path("/dev/kfd").exists():
        return "an AMD GPU"
    return "an Intel GPU" if shutil.which("xpu-smi") else None


# ------------------------------------------------------------------ checks


def _meter_works(device: str) -> str:
    peak = _peak(TECHNIQUES["plain"], device)
    return f"measured a training step on {device}: peak {format_bytes(peak)}"


def _techniques_work(device: str) -> str:
    _require_all(TECHNIQUES, device)
    return f"the plain step and all {len(TECHNIQUES) - 1} techniques work on {device}"


def _require_all(techniques: Mapping[str, Technique | Plugs], device: str) -> None:
    failed = {}
    for name, technique in techniques.items():
        try:
            _peak(technique, device)
        except Exception as error:
            failed[name] = error_summary(error)
    if failed:
        reasons = "; ".join(f"{name} ({reason})" for name, reason in failed.items())
        raise RuntimeError(f"failed on {device}: {reasons}")


def _dry_run_works() -> str:
    real = _peak(TECHNIQUES["plain"], "cpu")
    with memlab.dry_run():
        dry = _peak(TECHNIQUES["plain"], "cpu")
    if real != dry:
        raise RuntimeError(f"a dry run reports {dry} bytes, the real step used {real}")
    return f"same peak as the real step, to the byte ({dry:,} B)"


def _peak(technique: Technique | Plugs, device: str) -> int:
    training = build(replace(SMALL, device=device), technique)
    training.step()
    return measured(training).peak_bytes


# ------------------------------------------------------------------ disk and packages


def _disk() -> Finding:
    free = shutil.disk_usage(".").free
    short = (
        "" if free >= NEEDED_DISK_BYTES else f"; pictures need {format_bytes(NEEDED_DISK_BYTES)}"
    )
    return Finding("disk", not short, f"{format_bytes(free)} free here{short}")


def _package(package: str, use: str) -> Finding:
    try:
        return Finding(package, True, f"{importlib.metadata.version(package)}, for {use}")
    except importlib.metadata.PackageNotFoundError:
        return Finding(package, None, f"not installed; for {use}")
