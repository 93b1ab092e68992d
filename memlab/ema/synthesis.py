"""Synthesize averages of any length from snapshots on disk, in chunks.

Saves    all memory except one chunk's buffers: 12 · 2¹⁷ elements (6 MiB) for four lengths at once,
         for any model and number of snapshots.
Costs    one pass over the snapshots' bytes, shared by all lengths.
Source   Karras et al. 2023 (EDM2), arXiv 2312.02696, section 3.2 and algorithm 3.

memlab.reference.post_hoc_ema.synthesize is the short version. This file adds int8 snapshots, tied
weights, output to files and models, checks, and speed.

The order of the loops determines the memory, for a sum of S snapshots of N weights:

    for each snapshot: for each tensor    4·N bytes per length, and one loaded snapshot
    for each chunk: for each snapshot     one chunk per length, which is complete and written
                                          before the next chunk begins

The second order opens all files at once and reads one chunk from each in turn. Memory-mapped files
use only memory that the system can reclaim. This order is also faster, because sums stay in the
processor's cache. Eight snapshots' chunks form a matrix, so one matmul of the coefficients
(lengths × 8) with it (8 × chunk) updates all lengths and reads each element once.
"""

import fnmatch
import json
import os
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.progress import Progress
from torch import Tensor, nn

from memlab.ema.profiles import power_profile, profile_error, solve_weights
from memlab.ema.selection import Only, chosen
from memlab.ema.snapshots import PATTERN, Reader, Shapes, Snapshot, snapshots_of_one_run
from memlab.ema.tensor_files import TensorWriter, create_file

FORMAT = "memlab ema synthesized 1"
CHUNK = 2**17  # elements per chunk
ROWS = 8  # snapshots per matmul: 4 MiB in float32
BAR_AFTER_SECONDS = 2.0
WARN_ABOVE = 0.01  # profile_error

Out = str | os.PathLike[str] | nn.Module | Mapping[str, Tensor] | None


@torch.no_grad()
def synthesize(
    snapshots: Any,
    sigma: float | Sequence[float],
    *,
    only: Only = None,
    out: Out | Sequence[Out] = None,
    at: float | None = None,
    dtype: torch.dtype = torch.float32,
) -> Any:
    """Synthesize the average of relative width `sigma` from snapshots.

    Several sigmas share one pass over the files. Buffers and frozen weights come from the snapshot
    at `at`.

    Args:
        snapshots: a folder, paths, or the result of `find_snapshots`. To skip the checksums, pass
            `find_snapshots(folder, verify=False)`.
        only: names or patterns of tensors or modules, such as "head" or "blocks.*.attention", or a
            function that returns True for the names to synthesize.
        out: a model or a mapping of tensors to write in place; a path for a safetensors file; None
            for a dict of new tensors. For several sigmas, a list.
        at: the time of a snapshot; None for the last.
        dtype: for a file or new tensors; existing tensors keep their dtype.

    Returns:
        `out`, or the dict; a list for several sigmas.

    Raises:
        ValueError: for damaged, truncated or unrelated snapshots, unknown names, tensors of other
            shapes, or an output path equal to a snapshot's.

    Warns if the profile error exceeds 1 %. Rounding in the snapshots is not counted.

    An output file is either complete or absent. If writing tensors in place is interrupted, a note
    on the exception says so; repeat the call to complete them.
    """
    found = snapshots_of_one_run(snapshots)
    widths: Any = sigma
    is_alone = isinstance(widths, str) or not isinstance(widths, Iterable)
    sigmas: list[float] = [widths] if is_alone else list(widths)
    outs = [out] if is_alone else _one_for_each(out, len(sigmas))
    _check_paths(outs, found)
    time_of = _checked_time(found, at)
    found = [snapshot for snapshot in found if snapshot.step <= time_of]
    weights = _weights(found, sigmas, time_of)
    everything = found[-1].shapes
    shapes = {name: everything[name] for name in chosen(everything, only, tied=found[-1].tied)}
    about = [_metadata(found[-1], each) for each in sigmas]
    with ExitStack() as stack:
        targets = [
            stack.enter_context(_target(each, found[-1], shapes, dtype, what))
            for each, what in zip(outs, about, strict=True)
        ]
        for snapshot in found:
            stack.callback(snapshot.file.close)
        pieces = sum(-(-prod(shape) // CHUNK) for shape in shapes.values())
        advance = stack.enter_context(_progress_bar(pieces))
        stack.enter_context(_exact_matmuls())
        for name, shape in shapes.items():
            _write_tensor(name, prod(shape), found, weights, targets, advance)
    results = [target.result for target in targets]
    return results[0] if is_alone else results


def _one_for_each(out: Any, count: int) -> list[Any]:
    """Return one output per average."""
    if count == 0:
        raise ValueError("got no sigma; give one, or several")
    if out is None:
        return [None] * count
    if isinstance(out, (str, os.PathLike, nn.Module, Mapping)) or len(out) != count:
        got = 1 if isinstance(out, (str, os.PathLike, nn.Module, Mapping)) else len(out)
        raise ValueError(f"got {got} of out for {count} sigmas; give a list with one for each")
    return list(out)


def _check_paths(outs: Sequence[Any], found: Sequence[Snapshot]) -> None:
    """Raise ValueError if a path names a snapshot, occurs twice, or its folder does not exist."""
    paths = [Path(out).resolve() for out in outs if isinstance(out, (str, os.PathLike))]
    folders = {snapshot.path.resolve().parent for snapshot in found}
    for path in paths:
        if path.parent in folders and fnmatch.fnmatchcase(path.name, PATTERN):
            raise ValueError(
                f"got out={str(path)!r}, a snapshot's name in the snapshots' folder; give another"
            )
        if paths.count(path) > 1:
            raise ValueError(f"got out={str(path)!r} twice; give each average its own file")
        if not path.parent.is_dir():
            raise ValueError(f"got out={str(path)!r}, whose folder does not exist; create it first")


def _write_tensor(
    name: str,
    numel: int,
    found: Sequence[Snapshot],
    weights: np.ndarray,
    targets: Sequence[Any],
    advance: Callable[[int], None],
) -> None:
    """Write one tensor to all targets."""
    last = found[-1]
    dtype = last.dtype(name)
    if name in last.followed:
        for target in targets:
            target.write(name, 0, last.read(name, 0, numel))
        advance(-(-numel // CHUNK))
        return
    size = min(CHUNK, numel)
    # float16 sums lose more than float16 files: relative errors of 2.8e-4 and 1.7e-4 at σ = 0.07,
    # and 3e-8 for float32 (benchmarks/ema.py --section float16).
    sums = torch.empty(len(targets), size, dtype=dtype)
    rows = torch.empty(min(ROWS, len(found)), size, dtype=dtype)
    shares = torch.tensor(weights.tolist(), dtype=dtype)  # (targets, snapshots)
    readers = [snapshot.reader(name) for snapshot in found]
    for start in range(0, numel, CHUNK):
        length = min(CHUNK, numel - start)
        _weighted_sums(sums[:, :length], rows[:, :length], shares, readers, start)
        for target, total in zip(targets, sums, strict=True):
            target.write(name, start, total[:length])
        advance(1)


def _weighted_sums(
    sums: Tensor, rows: Tensor, shares: Tensor, readers: Sequence[Reader], start: int
) -> None:
    """Compute sums ← shares @ snapshots for one chunk from `start`: (targets, chunk)."""
    for first in range(0, len(readers), ROWS):
        group = readers[first : first + ROWS]
        for row, read in zip(rows, group, strict=False):
            row.copy_(read(start, start + len(row)))
        part = shares[:, first : first + len(group)]
        sums.addmm_(part, rows[: len(group)], beta=min(first, 1))


@contextmanager
def _exact_matmuls() -> Iterator[None]:
    """Compute float32 matmuls in full precision, even if training allows TF32 or bfloat16."""
    products: Any = torch.backends.mkldnn.matmul  # type: ignore[attr-defined]  # not in the stubs
    before = products.fp32_precision
    products.fp32_precision = "ieee"
    try:
        yield
    finally:
        products.fp32_precision = before


# ------------------------------------------------------------------ the plan


def _checked_time(found: Sequence[Snapshot], at: float | None) -> float:
    times = sorted({snapshot.step for snapshot in found})
    if at is None or at in times:
        return times[-1] if at is None else at
    nearest = min(times, key=lambda t: abs(t - at))
    raise ValueError(
        f"got at={at}, when no snapshot was taken, so the weights since the last snapshot before "
        f"it are missing; give the time of a snapshot, such as {nearest}"
    )


def _weights(found: Sequence[Snapshot], sigmas: Sequence[float], time_of: float) -> np.ndarray:
    """Return the coefficients (sigmas, snapshots)."""
    profiles = [snapshot.profile for snapshot in found]
    rows = []
    for sigma in sigmas:
        target = power_profile(sigma, time_of)
        rows.append(solve_weights(profiles, target))
        error = profile_error(profiles, target, rows[-1])
        if error > WARN_ABOVE:
            warnings.warn(
                f"{len(found)} snapshots approximate sigma {sigma} with a profile error of "
                f"{error:.2g} (profile_error); take more snapshots, or another sigma",
                stacklevel=4,
            )
    return np.array(rows)


def _metadata(last: Snapshot, sigma: float) -> dict[str, str]:
    """Return the metadata of an output file."""
    return {
        "format": FORMAT,
        "run": last.run,
        "clock": last.clock,
        "step": json.dumps(last.step),
        "sigma": json.dumps(float(sigma)),
        "model": last.model,
        "tied": json.dumps(last.tied),
    }


# ------------------------------------------------------------------ targets


@contextmanager
def _target(
    out: Out, last: Snapshot, shapes: Shapes, dtype: torch.dtype, about: Mapping[str, str]
) -> Iterator[Any]:
    """Yield an object with `write(name, start, elements)` and `result`."""
    kinds = {
        name: (last.dtype(name) if name in last.followed else dtype, shape)
        for name, shape in shapes.items()
    }
    if isinstance(out, (str, os.PathLike)):
        with create_file(out, kinds, about) as file:
            yield _ToFile(file, kinds, Path(out))
        return
    if out is None:
        new = {name: torch.empty(shape, dtype=kind) for name, (kind, shape) in kinds.items()}
        others = {other: new[name] for other, name in last.tied.items() if name in new}
        yield _ToTensors(new, {**new, **others})
        return
    tensors = out.state_dict(keep_vars=True) if isinstance(out, nn.Module) else out
    _require_fit(tensors, last, shapes)
    target = _ToTensors({name: tensors[name].detach() for name in shapes}, out)
    try:
        yield target
        target.finish()
    except BaseException as error:
        if target.is_begun:
            error.add_note("`out` was only partly written and is not an average; call again")
        raise


def _require_fit(tensors: Mapping[str, Any], last: Snapshot, shapes: Shapes) -> None:
    for name, shape in shapes.items():
        there = tensors.get(name)
        got = tuple(there.shape) if isinstance(there, Tensor) else None
        if got != shape:
            raise ValueError(
                f"{last.path} is of another model than `out`: got {name!r} of shape "
                f"{'none' if got is None else got}, wanted {shape}; give the model that was "
                f"trained, or choose tensors with only="
            )


class _ToFile:
    def __init__(self, file: TensorWriter, kinds: Mapping[str, Any], path: Path) -> None:
        self._file, self._kinds, self.result = file, kinds, path

    def write(self, name: str, start: int, elements: Tensor) -> None:
        self._file.write(name, start, elements.to(self._kinds[name][0]))


class _ToTensors:
    """Writes in place. Noncontiguous tensors are written through a contiguous copy."""

    def __init__(self, tensors: Mapping[str, Tensor], result: Any) -> None:
        self._tensors, self.result = tensors, result
        self._name, self._flat = "", torch.empty(0, dtype=torch.float32)

    @property
    def is_begun(self) -> bool:
        """Whether any element was written."""
        return self._name != ""

    def write(self, name: str, start: int, elements: Tensor) -> None:
        if name != self._name:
            self.finish()
            tensor = self._tensors[name]
            self._name, self._flat = name, tensor.contiguous().view(-1)
        self._flat[start : start + len(elements)].copy_(elements)

    def finish(self) -> None:
        if self._name and not self._tensors[self._name].is_contiguous():
            tensor = self._tensors[self._name]
            tensor.copy_(self._flat.view(tensor.shape))


# ------------------------------------------------------------------ progress


@contextmanager
def _progress_bar(pieces: int) -> Iterator[Callable[[int], None]]:
    """Yield a function that counts chunks. Show a progress bar on a terminal after two seconds."""
    # In a notebook rich shows a bar as HTML, even here, and Day 15's outputs depended on the load
    # (test_a_bar_does_not_show_in_a_notebook).
    console = Console(stderr=True, force_jupyter=False)  # a notebook's outputs stay the same
    with ExitStack() as stack:
        begun, done = time.monotonic(), 0
        bar: Progress | None = None

        def advance(count: int) -> None:
            nonlocal done, bar
            done += count
            if bar is None and time.monotonic() - begun > BAR_AFTER_SECONDS:
                bar = stack.enter_context(Progress(console=console, transient=True))
                bar.add_task("averaging", total=pieces)
            if bar is not None:
                bar.update(bar.task_ids[0], completed=done)

        yield advance
