"""What the user asked for: a Setting and Techniques, or one sentence that says why not."""

import os
from collections.abc import Collection, Iterable
from dataclasses import replace
from pathlib import Path

import torch

from memlab.cli.errors import UsageError, choice, shown
from memlab.cli.machine import devices_present, memory_of
from memlab.cli.requests import Request
from memlab.cli.rows import dry_row
from memlab.configs.config_json import config_named
from memlab.configs.targets import TARGETS
from memlab.model import PRESETS, GPTConfig
from memlab.train import (
    COMBINATIONS,
    TECHNIQUES,
    Plugs,
    Setting,
    combined,
    techniques_with_kernels,
)
from memlab.units import format_bytes

SUITABLE = {
    "cpu": Setting("5m", batch=4, seq_len=128),
    "mps": Setting("34m", batch=4, seq_len=512),
    "accelerator": Setting("124m", batch=8, seq_len=1024),
}
MOST_LAYERS = 10_000  # a dry run takes one after the other: more is hours
LARGEST_TENSOR = 2**59  # numbers, of which torch still counts the bytes
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def choose_device(request: Request) -> str:
    """The device asked for, or the accelerator that is there, or the CPU; of a dry run, a class of
    cards to predict or the CPU."""
    given = request.device
    if request.dry:
        if given not in (None, "cpu", *TARGETS):
            raise UsageError(
                f"got --device {shown(given)} with --dry-run, which is of the cpu or predicts "
                f"{' or '.join(TARGETS)}; choose one of these, or leave --dry-run out"
            )
        return given or "cpu"
    present = devices_present()
    if given is not None and given not in present:
        predicted = f"--dry-run --device {given} predicts it" if given in TARGETS else ""
        raise UsageError(
            f"got --device {shown(given)}; this machine has {' and '.join(present)} "
            f"(memlab doctor says more), and {predicted or '--dry-run needs none'}"
        )
    return given or present[-1]


def choose_setting(request: Request) -> Setting:
    """What suits the request's device, with the user's options in its place; it fits into memory
    if it can.

    Where the user gave no batch, an accelerator gets one that leaves half of its free memory to
    the techniques that take more than the plain step.
    """
    device = request.device
    _require_a_model(request.model)
    _require_known("--dtype", request.dtype, DTYPES)
    given = {
        "model": request.model,
        "batch": request.batch,
        "seq_len": request.seq_len,
        "dtype": DTYPES.get(request.dtype),
    }
    given = {name: value for name, value in given.items() if value is not None}
    suitable = SUITABLE.get(device, SUITABLE["accelerator"])
    longest = config_named(given.get("model", suitable.model)).seq_len
    suitable = replace(suitable, device=device, seq_len=min(suitable.seq_len, longest))
    try:
        setting = replace(suitable, **given)
    except ValueError as error:
        raise UsageError(str(error)) from error
    require_countable(setting.config, setting.batch, setting.seq_len)
    if not request.dry and device == "cpu" and given:
        require_memory("a plain step", setting, _bytes_of_a_step(setting), "add --dry-run")
    may_shrink = not (request.dry or device == "cpu" or request.batch)
    return _with_a_batch_that_fits(setting) if may_shrink else setting


def choose_techniques(request: Request) -> dict[str, Plugs]:
    """The plain step, and those asked for, or all; "a+b" is both at once. Single ones come in the
    order of their table. With `kernels`, those that have one are taken by it."""
    wanted = dict.fromkeys(request.techniques or (*TECHNIQUES, *COMBINATIONS))
    for name in wanted:
        parts = name.split("+")
        for part in parts:
            _require_known("--technique", part, TECHNIQUES)
        if len(set(parts)) < len(parts):
            raise UsageError(
                f"got --technique {shown(name)}, which names a technique twice; give each once"
            )
    single = [name for name in TECHNIQUES if name == "plain" or name in wanted]
    several = [name for name in wanted if name not in TECHNIQUES]
    try:
        return {name: combined(name, kernels=request.kernels) for name in (*single, *several)}
    except ValueError as error:
        raise UsageError(f"got --technique {' and '.join(map(shown, several))}: {error}") from error
    except ImportError as error:
        raise UsageError(f"got --kernels: {error}") from error


def require_kernels(device: str) -> None:
    """Triton's kernels run on CUDA or, in its interpreter, on a CPU."""
    from memlab.kernels.launching import require_gpu

    try:
        require_gpu(torch.device(device))
    except RuntimeError as error:
        raise UsageError(
            f"got --kernels on {device}, and Triton's kernels run on CUDA; leave --kernels out, "
            f"measure with --dry-run, or set TRITON_INTERPRET=1 to try them here, slowly"
        ) from error


def taken_by_kernels(names: Iterable[str]) -> str:
    """A line that says which of these, "a+b" being two, their kernels take."""
    by_kernel = set(techniques_with_kernels()) - {"selective-checkpointing"}
    parts = dict.fromkeys(part for name in names for part in name.split("+"))
    taken = [part for part in parts if part in by_kernel]
    return f"by Triton's kernels: {', '.join(taken) or 'nothing; no technique here has one'}"


def require_countable(config: GPTConfig, batch: int, seq_len: int) -> None:
    """A depth that a dry run comes to the end of, and tensors whose bytes torch can count."""
    if config.layers > MOST_LAYERS:
        raise UsageError(
            f"got a model of {config.layers:,} layers; give one of {MOST_LAYERS:,} at most"
        )
    tokens = batch * seq_len
    attention = config.heads * config.head_width
    rows = max(config.width, tokens)
    columns = max(config.vocab_size, config.hidden, attention)
    largest = max(rows * columns, batch * config.heads * seq_len**2)
    if largest > LARGEST_TENSOR:
        raise UsageError(
            f"got a tensor of {largest:.1e} numbers, by this model with {batch:,} × {seq_len:,} "
            f"tokens; torch counts up to {LARGEST_TENSOR:.1e}: give a smaller one"
        )


def require_memory(what: str, setting: Setting, wanted: int, instead: str) -> None:
    """Linux hands out more memory than it has, and later ends the process without a word."""
    memory = memory_of(torch.device("cpu"))
    if memory is not None and wanted > memory[1]:
        raise UsageError(
            f"{what} of {setting} takes {format_bytes(wanted)}; this machine has "
            f"{format_bytes(memory[1])}; make it smaller, or {instead}, which takes none"
        )


def _require_a_model(given: str | None) -> None:
    """The name of a preset, or the path of a file that has a shape in it."""
    if given is None or not _is_a_path(given):
        _require_known("--model", given, PRESETS)
        return
    try:
        config_named(given)
    except (ValueError, OSError) as error:
        raise UsageError(f"got --model {shown(given)}: {error}") from error


def _is_a_path(given: str) -> bool:
    return given not in PRESETS and (
        given.endswith(".json") or Path(given).name != given or os.path.exists(given)
    )


def _require_known(option: str, given: str | None, known: Collection[str]) -> None:
    if given is not None and given not in known:
        raise UsageError(f"got {option} {shown(given)}; {choice(given, known)}")


def _with_a_batch_that_fits(setting: Setting) -> Setting:
    memory = memory_of(torch.device(setting.device))
    while memory and setting.batch > 1 and _bytes_of_a_step(setting) > memory[0] / 2:
        setting = replace(setting, batch=setting.batch // 2)
    return setting


def _bytes_of_a_step(setting: Setting) -> int:
    trace = dry_row(replace(setting, device="cpu"), "plain", TECHNIQUES["plain"]).trace
    assert trace is not None
    return trace.peak_bytes
