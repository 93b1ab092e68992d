"""Turn the command line's options into a Setting and techniques, or raise a UsageError."""

from dataclasses import replace
from typing import Any

import torch

from memlab.cli.adapter_options import choose_adapters
from memlab.cli.errors import UsageError, quoted, require_known
from memlab.cli.machine import devices_present, memory_of
from memlab.cli.requests import StepRequest
from memlab.configs import config_named
from memlab.configs.targets import accepted_devices, find_target
from memlab.planner.measuring import whole_trace
from memlab.train import (
    COMBINATIONS,
    TECHNIQUES,
    Plugs,
    Setting,
    combined,
)
from memlab.units import format_bytes

SUITABLE = {
    "cpu": Setting("5m", batch=4, seq_len=128),
    "mps": Setting("34m", batch=4, seq_len=512),
    "accelerator": Setting("124m", batch=8, seq_len=1024),
}
# What people call a device, and what torch calls it.
TORCHS_NAMES = {
    **dict.fromkeys(("rocm", "hip", "amd", "nvidia"), "cuda"),
    **dict.fromkeys(("metal", "apple"), "mps"),
    **dict.fromkeys(("intel", "sycl"), "xpu"),
}
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def choose_device(request: StepRequest) -> str:
    """Return the requested device, or the accelerator, or the CPU. A dry run takes the CPU or a
    GPU to predict."""
    given = request.device
    target = find_target(given or "")
    if request.dry:
        if target is None and given not in (None, "cpu"):
            raise UsageError(
                f"got --device {quoted(given)} with --dry-run; {accepted_devices(given, 'cpu')}, "
                f"or leave --dry-run out"
            )
        return target.device if target else "cpu"
    present = devices_present()
    if given is not None and given not in present:
        if TORCHS_NAMES.get(given.lower()) in present:
            name = TORCHS_NAMES[given.lower()]
            raise UsageError(f"got --device {quoted(given)}; torch calls it {name}: use {name}")
        dry = f"--dry-run --device {target.device} predicts it" if target else "use --dry-run"
        raise UsageError(
            f"got --device {quoted(given)}; this machine has {' and '.join(present)} (see memlab "
            f"doctor); {dry}"
        )
    return given or present[-1]


def choose_setting(request: StepRequest) -> Setting:
    """Return the defaults for the request's device, overridden by the user's options.

    If the user gave no batch, an accelerator gets one that leaves half of its free memory to
    the techniques that need more than the plain step.
    """
    device = request.device
    assert device is not None
    suitable = SUITABLE.get(device, SUITABLE["accelerator"])
    require_known("--dtype", request.dtype, DTYPES)
    options: dict[str, Any] = {
        "model": request.model,
        "batch": request.batch,
        "seq_len": request.seq_len,
        "dtype": DTYPES.get(request.dtype or ""),
    }
    given = {name: value for name, value in options.items() if value is not None}
    try:
        shape = config_named(request.model) if request.model else suitable.config
        suitable = replace(suitable, device=device, seq_len=min(suitable.seq_len, shape.seq_len))
        setting = replace(suitable, **given)
        setting.config.require_countable(setting.batch, setting.seq_len)
    except ValueError as error:
        raise UsageError(str(error)) from error
    if not request.dry and device == "cpu" and given:
        require_memory("a plain step", setting, _step_bytes(setting), "add --dry-run")
    may_shrink = not (request.dry or device == "cpu" or request.batch)
    return _with_fitting_batch(setting) if may_shrink else setting


def choose_techniques(request: StepRequest) -> dict[str, Plugs]:
    """Return the plain step and the requested techniques, or all of them, in registry order.

    "a+b" combines two techniques.
    """
    full_names = {short: name for name, short in COMBINATIONS.items()}
    given = request.techniques or (*TECHNIQUES, *COMBINATIONS)
    wanted = dict.fromkeys(full_names.get(name, name) for name in given)
    for name in wanted:
        if "," in name:
            raise UsageError(
                f"got --technique {quoted(name)}; join techniques with +: "
                f"{quoted(name.replace(' ', '').replace(',', '+'))}"
            )
        parts = name.split("+")
        for part in parts:
            require_known("--technique", part, TECHNIQUES)
        if len(set(parts)) < len(parts):
            raise UsageError(
                f"got --technique {quoted(name)}, which names a technique twice; give each once"
            )
    adapters = choose_adapters(
        request.lora_rank, request.lora_targets, request.techniques or TECHNIQUES
    )
    single = [name for name in TECHNIQUES if name == "plain" or name in wanted]
    several = [name for name in wanted if name not in TECHNIQUES]
    try:
        return {name: combined(name, adapters=adapters) for name in (*single, *several)}
    except ValueError as error:
        raise UsageError(
            f"got --technique {' and '.join(map(quoted, several))}: {error}"
        ) from error


def require_memory(what: str, setting: Any, wanted: int, instead: str) -> None:
    """Check first: Linux overcommits memory and later kills the process without a message."""
    memory = memory_of(torch.device("cpu"))
    if memory is not None and wanted > memory[1]:
        raise UsageError(
            f"{what} of {setting} needs {format_bytes(wanted)}; this machine has "
            f"{format_bytes(memory[1])}; make it smaller, or {instead}, which allocates nothing"
        )


def _with_fitting_batch(setting: Setting) -> Setting:
    memory = memory_of(torch.device(setting.device))
    while memory and setting.batch > 1 and _step_bytes(setting) > memory[0] / 2:
        setting = replace(setting, batch=setting.batch // 2)
    return setting


def _step_bytes(setting: Setting) -> int:
    return whole_trace(replace(setting, device="cpu"), "plain", combined("plain")).peak_bytes
